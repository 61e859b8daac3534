"""The bundled vision transformer in plain PyTorch. Its parameters have timm's names, so timm can load its weights."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, DEPTH, HEADS, CLASSES = 192, 6, 3, 10


class ConvStem(nn.Module):
    """Three 3 x 3 convolutions with strides 1, 2, 2 as the patch embedding: (B, 3, 32, 32) -> (B, 64, embed_dim).

    It accepts the arguments that timm passes to an `embed_layer`; only `in_chans` and `embed_dim` change its weights.
    """

    def __init__(self, img_size: int = 32, patch_size: int = 4, in_chans: int = 3, embed_dim: int = WIDTH, **_: object):
        super().__init__()
        self.num_patches = (img_size // patch_size) ** 2
        self.conv1 = nn.Conv2d(in_chans, embed_dim // 4, 3, stride=1, padding=1)
        self.conv2 = nn.Conv2d(embed_dim // 4, embed_dim // 2, 3, stride=2, padding=1)
        self.conv3 = nn.Conv2d(embed_dim // 2, embed_dim, 3, stride=2, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.conv1(images))
        x = F.relu(self.conv2(x))
        return self.conv3(x).flatten(2).transpose(1, 2)


class SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = (
            self.qkv(x).reshape(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        )
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(batch, tokens, width))


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class TransformerBlock(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attn = SelfAttention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = Mlp(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class DemoViT(nn.Module):
    """A pre-norm ViT for 32 x 32 images: (B, 3, 32, 32), normalised by `MEAN` and `STD` -> logits (B, 10).

    The same model in timm: VisionTransformer(img_size=32, patch_size=4, num_classes=10, embed_dim=192, depth=6,
    num_heads=3, class_token=False, global_pool="avg", embed_layer=ConvStem).
    """

    def __init__(self, width: int = WIDTH, depth: int = DEPTH, heads: int = HEADS, classes: int = CLASSES):
        super().__init__()
        self.patch_embed: nn.Module = ConvStem(embed_dim=width)
        self.pos_embed = nn.Parameter(torch.zeros(1, 64, width))
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(depth)))
        self.fc_norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.blocks(self.patch_embed(images) + self.pos_embed)
        return self.head(self.fc_norm(x.mean(dim=1)))
