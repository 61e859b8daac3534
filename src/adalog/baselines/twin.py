"""The twin uniform quantizer of PTQ4ViT, for GELU outputs, which have both signs."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from adalog.quantizers.formats import Format, positive_box
from adalog.quantizers.quantizer import Quantizer, at_least_float32, decimals, read_scale
from adalog.quantizers.uniform import symmetric_zero_point


@dataclass(frozen=True)
class TwinUniformQuantizer(Quantizer):
    """Two symmetric uniform quantizers, one per sign, each with half of the codes (PTQ4ViT).

    With h = 2**(bits - 1), code = h + round(x / scale), at most 2 h - 1, for x >= 0. For x < 0, code = h + round(x /
    negative_scale), at least 0.

    scale, negative_scale: float32, broadcast against x.
    """

    kind: ClassVar[str] = "twin"
    scale: Tensor
    negative_scale: Tensor
    bits: int

    def quantize(self, x: Tensor) -> Tensor:
        half = symmetric_zero_point(self.bits)
        upper = torch.div(at_least_float32(x), self.scale).round_().clamp_(0, half - 1)
        return upper.add_(torch.div(at_least_float32(x), self.negative_scale).round_().clamp_(-half, 0)).add_(half)

    def dequantize(self, code: Tensor) -> Tensor:
        signed = code.to(self.scale.dtype) - symmetric_zero_point(self.bits)
        return signed.clamp(min=0) * self.scale + signed.clamp(max=0) * self.negative_scale

    @classmethod
    def of(cls, scale: Tensor, bits: int, offset: float) -> "TwinUniformQuantizer":
        """Return the quantizer with this positive scale; the negative scale spans the offset."""
        return cls(scale, torch.full_like(scale, offset / symmetric_zero_point(bits)), bits)

    def bounds(self) -> tuple[Tensor, Tensor]:
        half = symmetric_zero_point(self.bits)
        return -half * self.negative_scale, (half - 1) * self.scale

    def step(self, x: Tensor) -> Tensor:
        return torch.where(x < 0, self.negative_scale, self.scale)

    def rescale(self, factor: float | Tensor) -> "TwinUniformQuantizer":
        return replace(self, scale=self.scale * factor, negative_scale=self.negative_scale * factor)

    def describe(self, count: int = 0) -> str:
        return f"{self.bits}-bit twin uniform"

    def integers(self, code: Tensor) -> list[Tensor]:
        signed = code.to(torch.int64) - symmetric_zero_point(self.bits)
        return [signed.clamp(min=0), signed.clamp(max=0)]

    def units(self) -> list[Tensor]:
        return [self.scale.double(), self.negative_scale.double()]

    def limits(self) -> list[tuple[int, int]]:
        half = symmetric_zero_point(self.bits)
        return [(0, half - 1), (-half, 0)]

    def clamp_bounds(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        half, zero = symmetric_zero_point(self.bits), torch.zeros_like(self.scale)
        return [(self.scale, zero, zero + (half - 1)), (self.negative_scale, zero - half, zero)]

    def fields(self) -> dict[str, Any]:
        return {"kind": self.kind, **self._common_fields(), "negative_scale": decimals(self.negative_scale)}

    @classmethod
    def of_fields(cls, name: str, record: Mapping[str, Any], scale: Tensor) -> "TwinUniformQuantizer":
        negative = read_scale(name, record["negative_scale"], list(scale.shape), scale.dtype)
        return TwinUniformQuantizer(scale, negative, record["bits"])


@dataclass(frozen=True)
class TwinFormat(Format):
    """Twin quantizers whose negative scale spans the offset; a point is the largest value.

    offset: how far the values reach below zero.
    """

    offset: float = 0.0

    @property
    def title(self) -> str:
        return "twin uniform"

    @property
    def names(self) -> tuple[str, ...]:
        return ("largest value",)

    def of(self, points: Tensor) -> TwinUniformQuantizer:
        scale = (points[:, 0] / (symmetric_zero_point(self.bits) - 1)).clamp(min=1e-12)
        return TwinUniformQuantizer.of(scale, self.bits, self.offset)

    def box(self, groups: Tensor, reach: float, stack: int = 1) -> tuple[Tensor, Tensor]:
        """Return the percentiles 0.9 and 1 of the positive values."""
        return positive_box(groups, 0.0, stack)

    def point_of(self, quantizer: Quantizer) -> Tensor | None:
        return quantizer.bounds()[1][None] if isinstance(quantizer, TwinUniformQuantizer) else None
