"""Prepare images for a detector: resize them with fixed proportions, normalise them, and pad them to one size."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from adalog.errors import DataError
from adalog.inputs.images import IMAGENET_MEAN, IMAGENET_STD, read_image
from adalog.inputs.shards import Member


@dataclass(frozen=True)
class Batch:
    """Images in one tensor, (N, 3, H, W), padded with zeros on the right and at the bottom.

    sizes: (height, width) of each image without padding. originals: (height, width) before resizing. factors: (N, 4),
    sizes divided by originals, in the order (x1, y1, x2, y2) of a box.
    """

    images: Tensor
    sizes: tuple[tuple[int, int], ...]
    originals: tuple[tuple[int, int], ...]
    factors: Tensor

    def first(self, count: int) -> "Batch":
        """Return the first `count` images, or all if there are fewer."""
        return Batch(self.images[:count], self.sizes[:count], self.originals[:count], self.factors[:count])


@dataclass(frozen=True)
class Resizing:
    """Preparation of an image for a detector.

    The image is resized so that its shorter side is `short`, or less if its longer side would exceed `long`. Then it is
    normalised by mean and std, and padded with zeros to multiples of `divisor`, the coarsest stride of the backbone.
    """

    short: int = 800
    long: int = 1333
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD
    divisor: int = 32

    def __post_init__(self) -> None:
        if not 1 <= self.short <= self.long <= 1 << 14 or not 1 <= self.divisor <= 1024:
            raise ValueError(
                f"short = {self.short}, long = {self.long} and divisor = {self.divisor} do not satisfy 1 <= short <= "
                "long <= 16384 and 1 <= divisor <= 1024"
            )
        numbers = (*self.mean, *self.std)
        if len(self.mean) != 3 or len(self.std) != 3 or not all(map(math.isfinite, numbers)) or min(self.std) <= 0:
            raise ValueError(f"mean = {self.mean} and std = {self.std} are not three numbers each, with a positive std")

    @staticmethod
    def from_json(content: Any) -> "Resizing":
        """Return the resizing that `dataclasses.asdict` described. Raises ValueError for anything else."""
        if not isinstance(content, dict) or content.keys() != {field.name for field in fields(Resizing)}:
            raise ValueError("the resizing of a detector has missing or unknown fields")
        if not all(type(content[name]) is int for name in ("short", "long", "divisor")):
            raise ValueError("short, long and divisor of a detector's resizing are not whole numbers")
        triples = [content[name] for name in ("mean", "std")]
        if not all(isinstance(rgb, (list, tuple)) and all(type(x) in (int, float) for x in rgb) for rgb in triples):
            raise ValueError("mean and std of a detector's resizing are not lists of numbers")
        mean, std = map(tuple, triples)
        return Resizing(**{**content, "mean": mean, "std": std})

    def size_of(self, height: int, width: int) -> tuple[int, int]:
        """Return (height, width) after resizing, rounded to the nearest integer."""
        scale = min(self.long / max(height, width), self.short / min(height, width))
        return max(1, int(height * scale + 0.5)), max(1, int(width * scale + 0.5))

    def resize(self, image: Image.Image) -> Tensor:
        """Resize an RGB image bilinearly without antialiasing, round it to 8 bits, and normalise it: (3, H, W)."""
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float()
        size = self.size_of(image.height, image.width)
        if size != (image.height, image.width):
            pixels = F.interpolate(pixels, size, mode="bilinear", align_corners=False).round().clamp(0, 255)
        mean, std = (torch.tensor(rgb).view(3, 1, 1) for rgb in (self.mean, self.std))
        return (pixels[0] / 255 - mean) / std

    def batch(self, images: Sequence[Image.Image], size: tuple[int, int] | None = None) -> Batch:
        """Prepare RGB images as a batch. size: (height, width) of the tensor; by default the smallest that fits all."""
        values = [self.resize(image) for image in images]
        sizes = tuple((value.shape[1], value.shape[2]) for value in values)
        height, width = size or self.pad_size(sizes)
        padded = torch.zeros(len(values), 3, height, width)
        for place, value in zip(padded, values, strict=True):
            place[:, : value.shape[1], : value.shape[2]] = value
        originals = tuple((image.height, image.width) for image in images)
        ratios = [(w / width, h / height) for (h, w), (height, width) in zip(sizes, originals, strict=True)]
        return Batch(padded, sizes, originals, torch.tensor([[x, y, x, y] for x, y in ratios]).reshape(-1, 4))

    def pad_size(self, sizes: Sequence[tuple[int, int]]) -> tuple[int, int]:
        """Return the smallest padded (height, width) that fits images of these sizes."""
        height, width = (max(lengths) for lengths in zip(*sizes, strict=True))
        return -(-height // self.divisor) * self.divisor, -(-width // self.divisor) * self.divisor


def batches_of(images: Sequence[Image.Image], resizing: Resizing, count: int = 2) -> list[Batch]:
    """Prepare RGB images in batches of `count`, all padded to one height and width."""
    size = resizing.pad_size([resizing.size_of(image.height, image.width) for image in images])
    return [resizing.batch(images[start : start + count], size) for start in range(0, len(images), count)]


def read(path: Path | Member) -> Image.Image:
    """Read an image file by `inputs.images.read_image`. Raises DataError, also if it is too thin to be resized."""
    image = read_image(path)
    if max(image.size) > 256 * min(image.size):
        raise DataError(f"{path} has {image.width} x {image.height} pixels, too thin for a detector: leave it out")
    return image
