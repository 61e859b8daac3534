"""Quantize a model of your own: see its sites, give some of them more bits, and compare configurations.

    python examples/your_own_model.py [--bits w4a4]

The model here has random weights and the images are those bundled with adalog, so the script shows the steps, not an
accuracy.
"""

import argparse
from dataclasses import replace

import torch
from torch import Tensor, nn

import adalog
from adalog import demo


class Block(nn.Module):
    """A transformer block with separate queries, keys and values."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        query, key, value = (self.split(linear(y)) for linear in (self.query, self.key, self.value))
        attention = (query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5).softmax(-1)
        x = x + self.out((attention @ value).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class SmallViT(nn.Module):
    """A vision transformer for images of 32 x 32 pixels that averages its tokens."""

    def __init__(self, width: int = 64, depth: int = 2, heads: int = 4, classes: int = 10):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.positions = nn.Parameter(torch.randn(1, 64, width) / 8)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.blocks(x)).mean(1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bits", default="w4a4")
    options = parser.parse_args()

    torch.manual_seed(0)
    model, images = SmallViT().eval(), demo.unlabelled_images()
    calibration = adalog.Calibration(model, images[:32])  # captured and observed once, for all configurations
    print("sites:", ", ".join(site.name for site in calibration.sites))

    config = adalog.Config.preset(options.bits)
    configs = {"all sites alike": config, "the head at 8 bits": replace(config, pinned=(("head", "w8a8"),))}
    held_out = images[32:288]
    with torch.no_grad():
        expected = model(held_out)
    for name, choices in configs.items():
        qmodel = calibration.quantize(choices)
        error = (qmodel(held_out) - expected).norm() / expected.norm()
        print(f"{name}: relative error of the logits {error:.3f}")
    print(qmodel.summary())


if __name__ == "__main__":
    main()
