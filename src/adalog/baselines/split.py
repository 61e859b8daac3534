"""The split uniform quantizer of PTQ4ViT, for softmax outputs in [0, 1]."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from adalog.errors import ArtifactError
from adalog.quantizers.formats import Format
from adalog.quantizers.quantizer import Quantizer, at_least_float32, decimals, read_scale
from adalog.quantizers.uniform import symmetric_zero_point


@dataclass(frozen=True)
class SplitUniformQuantizer(Quantizer):
    """Two uniform quantizers for values in [0, 1]; the finer one is for small values (PTQ4ViT).

    Each has half of the codes. With h = 2**(bits - 1), the finer quantizer ends at split = scale (h - 1). Below split,
    code = round(x / scale). From split on, code = h + round(x / coarse_scale), at most 2 h - 1.

    scale, coarse_scale: float32, broadcast against x.
    sums: each value is the sum of both quantizers' values of x, as in the released code; large values then exceed x by
        split.
    """

    kind: ClassVar[str] = "split"
    scale: Tensor
    coarse_scale: Tensor
    bits: int
    sums: bool = False

    @property
    def split(self) -> Tensor:
        """The value at which the coarser quantizer begins."""
        return self.scale * (symmetric_zero_point(self.bits) - 1)

    def quantize(self, x: Tensor) -> Tensor:
        half, x = symmetric_zero_point(self.bits), at_least_float32(x)
        fine = torch.div(x, self.scale).round_().clamp_(0, half - 1)
        coarse = torch.div(x, self.coarse_scale).round_().clamp_(0, half - 1).add_(half)
        return torch.where(x < self.split, fine, coarse)

    def dequantize(self, code: Tensor) -> Tensor:
        half, code = symmetric_zero_point(self.bits), code.to(self.scale.dtype)
        fine, coarse = code * self.scale, (code - half) * self.coarse_scale
        if self.sums:
            fine = fine + torch.div(self.split, self.coarse_scale).round() * self.coarse_scale
            coarse = coarse + self.split
        return torch.where(code < half, fine, coarse)

    def bounds(self) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(self.coarse_scale), (symmetric_zero_point(self.bits) - 1) * self.coarse_scale

    def step(self, x: Tensor) -> Tensor:
        return torch.where(x < self.split, self.scale, self.coarse_scale)

    def describe(self, count: int = 0) -> str:
        return f"{self.bits}-bit split uniform"

    @property
    def why_no_integers(self) -> str:
        return (
            "has split uniform codes, which no executor supports: quantize the model with another method, "
            "such as adalog"
        )

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise ArtifactError(f"a quantizer {self.why_no_integers}")

    integers = units = limits = _refuse

    def fields(self) -> dict[str, Any]:
        coarse = decimals(self.coarse_scale)
        return {"kind": self.kind, **self._common_fields(), "coarse_scale": coarse, "sums": self.sums}

    @classmethod
    def of_fields(cls, name: str, record: Mapping[str, Any], scale: Tensor) -> "SplitUniformQuantizer":
        coarse = read_scale(name, record["coarse_scale"], list(scale.shape), scale.dtype)
        if type(record["sums"]) is not bool:
            raise ArtifactError(f"quantizer {name} has sums = {record['sums']!r}, which is neither true nor false")
        return SplitUniformQuantizer(scale, coarse, record["bits"], record["sums"])


@dataclass(frozen=True)
class SplitFormat(Format):
    """Split quantizers, for values in [0, 1], which only `ScaleSearch` finds."""


@dataclass(frozen=True)
class MaxKeptFormat(Format):
    """Uniform quantizers from zero to the largest value (APQ-ViT), which only `ScaleSearch` finds."""
