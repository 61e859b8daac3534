"""The parts of Mask R-CNN and Cascade Mask R-CNN with a Swin backbone, as in mmdetection 2.

Mask R-CNN: He et al., ICCV 2017. Cascade R-CNN: Cai and Vasconcelos, CVPR 2018. FPN: Lin et al., CVPR 2017. Swin and
its public detectors: Liu et al., ICCV 2021. Each part is a separate module with tensors as inputs and outputs.
`detector.Detector` does the steps between them, such as the choice of regions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F

from adalog.extras import extra_module

LEVELS = 5  # number of maps of the pyramid
RATIOS = (0.5, 1.0, 2.0)  # ratios of the anchors, height divided by width
BOX_SIDE, MASK_SIDE = 7, 14  # sides of the regions that the heads read


@dataclass(frozen=True)
class Architecture:
    """Sizes of a detector.

    width, depths, heads, window: of the Swin backbone. channels: of the pyramid and of the heads' convolutions. hidden:
    width of the linears of box heads. classes: number of classes without the background. stages: number of box and of
    mask heads; 3 in a cascade, whose box heads begin with convolutions.
    """

    width: int = 96
    depths: tuple[int, ...] = (2, 2, 6, 2)
    heads: tuple[int, ...] = (3, 6, 12, 24)
    window: int = 7
    channels: int = 256
    hidden: int = 1024
    classes: int = 80
    stages: int = 1


SWIN_S = (2, 2, 18, 2)
ARCHITECTURES = {
    "mask-swin-t": Architecture(),
    "mask-swin-s": Architecture(depths=SWIN_S),
    "cascade-swin-t": Architecture(stages=3),
    "cascade-swin-s": Architecture(depths=SWIN_S, stages=3),
}


class Backbone(nn.Module):
    """torchvision's Swin without its head, with a norm on the output of each stage: (N, 3, H, W) to four maps."""

    def __init__(self, sizes: Architecture):
        super().__init__()
        swin = extra_module("torchvision.models.swin_transformer", "coco").SwinTransformer(
            patch_size=[4, 4],
            embed_dim=sizes.width,
            depths=list(sizes.depths),
            num_heads=list(sizes.heads),
            window_size=[sizes.window, sizes.window],
            stochastic_depth_prob=0.0,
            num_classes=1,
        )
        self.features = swin.features
        self.norms = nn.ModuleList(nn.LayerNorm(sizes.width << stage) for stage in range(4))

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        x, outputs = self.features[0](images), []
        for stage, norm in enumerate(self.norms):
            x = self.features[2 * stage + 1](x)
            outputs.append(norm(x).permute(0, 3, 1, 2))
            if stage < len(self.norms) - 1:
                x = self.features[2 * stage + 2](x)
        return tuple(outputs)


class Neck(nn.Module):
    """A feature pyramid: four maps to five with equal channels. The fifth takes every second pixel of the fourth."""

    def __init__(self, sizes: Architecture):
        super().__init__()
        self.lateral = nn.ModuleList(nn.Conv2d(sizes.width << stage, sizes.channels, 1) for stage in range(4))
        self.smooth = nn.ModuleList(nn.Conv2d(sizes.channels, sizes.channels, 3, padding=1) for _ in range(4))

    def forward(self, fine: Tensor, middle: Tensor, coarse: Tensor, coarsest: Tensor) -> tuple[Tensor, ...]:
        maps = [layer(x) for layer, x in zip(self.lateral, (fine, middle, coarse, coarsest), strict=True)]
        for level in (2, 1, 0):
            maps[level] = maps[level] + F.interpolate(maps[level + 1], size=maps[level].shape[2:], mode="nearest")
        maps_out = [layer(x) for layer, x in zip(self.smooth, maps, strict=True)]
        return (*maps_out, F.max_pool2d(maps_out[-1], 1, stride=2))


class RegionProposals(nn.Module):
    """The same three convolutions on each of five maps: all scores (N, 3, H, W), then all offsets (N, 12, H, W)."""

    def __init__(self, sizes: Architecture):
        super().__init__()
        self.hidden = nn.Conv2d(sizes.channels, sizes.channels, 3, padding=1)
        self.scores = nn.Conv2d(sizes.channels, len(RATIOS), 1)
        self.offsets = nn.Conv2d(sizes.channels, 4 * len(RATIOS), 1)

    def forward(self, p2: Tensor, p3: Tensor, p4: Tensor, p5: Tensor, p6: Tensor) -> tuple[Tensor, ...]:
        hidden = [self.hidden(x).relu() for x in (p2, p3, p4, p5, p6)]
        return (*(self.scores(x) for x in hidden), *(self.offsets(x) for x in hidden))


class BoxHead(nn.Module):
    """Regions (R, C, 7, 7) to logits (R, classes + 1), background last, and offsets per class (R, 4 * classes)."""

    def __init__(self, sizes: Architecture):
        super().__init__()
        cascade, channels = sizes.stages > 1, sizes.channels
        convolutions: list[nn.Module] = []
        for _ in range(4 if cascade else 0):
            convolutions += [nn.Conv2d(channels, channels, 3, padding=1, bias=False)]
            convolutions += [nn.BatchNorm2d(channels), nn.ReLU()]
        self.convolutions = nn.Sequential(*convolutions)
        pairs = pairwise([channels * BOX_SIDE**2, *[sizes.hidden] * (1 if cascade else 2)])
        self.linears = nn.Sequential(*(layer for pair in pairs for layer in (nn.Linear(*pair), nn.ReLU())))
        self.logits = nn.Linear(sizes.hidden, sizes.classes + 1)
        self.offsets = nn.Linear(sizes.hidden, 4 * sizes.classes)

    def forward(self, regions: Tensor) -> tuple[Tensor, Tensor]:
        x = self.linears(self.convolutions(regions).flatten(1))
        return self.logits(x), self.offsets(x)


class MaskHead(nn.Module):
    """Regions (R, C, 14, 14) to mask logits per class (R, classes, 28, 28)."""

    def __init__(self, sizes: Architecture):
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(4):
            layers += [nn.Conv2d(sizes.channels, sizes.channels, 3, padding=1), nn.ReLU()]
        self.convolutions = nn.Sequential(*layers)
        self.upsample = nn.ConvTranspose2d(sizes.channels, sizes.channels, 2, stride=2)
        self.logits = nn.Conv2d(sizes.channels, sizes.classes, 1)

    def forward(self, regions: Tensor) -> Tensor:
        return self.logits(self.upsample(self.convolutions(regions)).relu())


def make_parts(sizes: Architecture) -> dict[str, nn.Module]:
    """Return the parts of a detector by name, in the order in which they run, with random weights."""
    parts: dict[str, nn.Module] = {"backbone": Backbone(sizes), "neck": Neck(sizes), "rpn": RegionProposals(sizes)}
    for kind, make in (("box", BoxHead), ("mask", MaskHead)):
        parts |= {name: make(sizes) for name in head_names(kind, sizes.stages)}
    return parts


def head_names(kind: str, stages: int) -> list[str]:
    """Return the names of the box or mask heads."""
    return [kind] if stages == 1 else [f"{kind}_{stage}" for stage in range(stages)]


def parameters(parts: Sequence[nn.Module]) -> int:
    """Count the learned parameters."""
    return sum(value.numel() for part in parts for value in part.parameters())


def initialise(parts: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Initialize the parts for training as mmdetection does, and return them."""
    for name, part in parts.items():
        for layer, module in part.named_modules():
            if name == "backbone" or not isinstance(module, (nn.Conv2d, nn.Linear, nn.ConvTranspose2d)):
                continue
            if name == "rpn" or (layer == "logits" and name.startswith("box")):
                nn.init.normal_(module.weight, std=0.01)
            elif layer == "offsets":
                nn.init.normal_(module.weight, std=0.001)
            elif isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
            else:
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return parts
