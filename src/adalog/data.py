"""What a model wants done to an image before it sees it."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

Interpolation = Literal["bilinear", "bicubic", "lanczos", "nearest"]

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Preprocessing:
    """What is done to an image before a model sees it: resized, cropped at its centre, scaled and normalised.

    size: (H, W) that the model takes. resize: the image's shorter side before the crop, its shape kept, or its exact
    (H, W), its shape squashed; never smaller than the crop, so that nothing need be padded.
    mean, std: of a channel after its codes 0-255 were multiplied by `rescale`.
    """

    size: tuple[int, int] = (224, 224)
    resize: int | tuple[int, int] = 256
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD
    interpolation: Interpolation = "bicubic"
    rescale: float = 1 / 255

    def __post_init__(self) -> None:
        if len(self.size) != 2 or min(self.size) < 1:
            raise ValueError(f"size = {self.size} is not (height, width) in pixels")
        sides = (self.resize, self.resize) if isinstance(self.resize, int) else self.resize
        if len(sides) != 2 or any(side < crop for side, crop in zip(sides, self.size, strict=True)):
            raise ValueError(
                f"resize = {self.resize} is smaller than the crop size = {self.size}: give at least {max(self.size)}, "
                f"or {self.size} for no crop"
            )
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise ValueError(f"mean = {self.mean} and std = {self.std} are not three numbers each, std positive")
        if self.interpolation not in get_args(Interpolation):
            raise ValueError(f"interpolation = {self.interpolation!r} is none of {', '.join(get_args(Interpolation))}")


def side_before_crop(side: int, crop_share: float) -> int:
    """`resize` for a crop of `side` pixels that is `crop_share` of the image's shorter side, timm's crop_pct."""
    return math.floor(side / crop_share)
