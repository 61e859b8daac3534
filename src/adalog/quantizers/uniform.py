"""The asymmetric uniform quantizer, with one scale and zero point per tensor, channel or head, and its search space."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from adalog.errors import ArtifactError
from adalog.quantizers.elementwise import kernels, nearest_uniform
from adalog.quantizers.formats import Errors, Format
from adalog.quantizers.fused import uniform_errors
from adalog.quantizers.quantiles import sample_quantiles
from adalog.quantizers.quantizer import Quantizer, at_least_float32, by_slices, check_parameters, round_ste


def least_scale(dtype: torch.dtype) -> float:
    """Return the least scale in this dtype, which quantizers take if all values are zero."""
    return 2.0**-20 if dtype == torch.float16 else 2.0**-94


def uniform_quantize(x: Tensor, scale: Tensor, zero_point: Tensor, bits: int) -> Tensor:
    """Return clamp(round(x / scale) + zero_point, 0, 2**bits - 1); the parameters broadcast against x."""
    return torch.div(at_least_float32(x), scale).round_().add_(zero_point).clamp_(0, 2**bits - 1)


def uniform_dequantize(code: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    """Return the values of codes, (code - zero_point) * scale."""
    return (code - zero_point) * scale


def uniform_fake_quantize(x: Tensor, scale: Tensor, zero_point: Tensor, bits: int) -> Tensor:
    """Quantize and dequantize x, in the dtype of x."""
    return uniform_quantize(x, scale, zero_point, bits).sub_(zero_point).mul_(scale).to(x.dtype)


def symmetric_zero_point(bits: int) -> int:
    """Return the zero point of the symmetric quantizer, whose integers are -2**(bits-1) ... 2**(bits-1) - 1."""
    return int(2 ** (bits - 1))


def symmetric_scale(largest: Tensor, bits: int) -> Tensor:
    """Return the scale of the symmetric quantizer whose range ends at `largest`, half a step above its last code."""
    return largest / (symmetric_zero_point(bits) - 0.5)


def bounds_to_uniform(lower: Tensor, upper: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return (scale, zero_point) of the quantizer that spans [lower, upper].

    The range is widened to include zero, which stays exact. Gradients pass through the rounding of the zero point.
    """
    top = 2**bits - 1
    trained = torch.is_grad_enabled() and (lower.requires_grad or upper.requires_grad)
    module = None if trained or lower.shape != upper.shape else kernels(lower, upper)
    if module is not None and lower.ndim and lower.numel():
        ends = [bound.reshape(len(bound), -1) for bound in (lower, upper)]
        ends = [bound if bound.stride(1) == 1 else bound.contiguous() for bound in ends]
        scale, zero_point = module.uniform_of_bounds(*ends, top, least_scale(lower.dtype))
        return scale.view(lower.shape), zero_point.view(lower.shape)
    lower, upper = lower.clamp(max=0), upper.clamp(min=0)
    scale = ((upper - lower) / top).clamp(min=least_scale(lower.dtype))
    return scale, round_ste(-lower / scale).clamp(0, top)


@dataclass(frozen=True)
class UniformQuantizer(Quantizer):
    """An asymmetric uniform quantizer with its parameters.

    scale: float32, positive, broadcasts against x.
    zero_point: the shape of the scale, whole numbers in [0, 2**bits).
    """

    kind: ClassVar[str] = "uniform"
    scale: Tensor
    zero_point: Tensor
    bits: int

    def quantize(self, x: Tensor) -> Tensor:
        return uniform_quantize(x, self.scale, self.zero_point, self.bits)

    def dequantize(self, code: Tensor) -> Tensor:
        return uniform_dequantize(code.to(self.scale.dtype), self.scale, self.zero_point)

    def _nearest(self, x: Tensor) -> Tensor:
        parameters = self.scale, self.zero_point, self.bits
        hat = nearest_uniform(x, *parameters)
        return by_slices(lambda part: uniform_fake_quantize(part, *parameters), x, self.scale) if hat is None else hat

    def bounds(self) -> tuple[Tensor, Tensor]:
        return -self.zero_point * self.scale, (2**self.bits - 1 - self.zero_point) * self.scale

    def _nearest_and_bounds(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        low = -self.zero_point
        high = low + (2**self.bits - 1)
        hat = torch.div(x, self.scale).round_().clamp_(low, high).mul_(self.scale)
        return hat, low * self.scale, high * self.scale

    @property
    def origin(self) -> float | None:
        return 0.0

    @classmethod
    def reaching(cls, upper: Tensor, bits: int) -> "UniformQuantizer":
        """Return the symmetric quantizer whose largest level is `upper`; its zero point is half the number of codes."""
        half = symmetric_zero_point(bits)
        scale = (upper / (half - 1)).clamp(min=least_scale(upper.dtype))
        return UniformQuantizer(scale, torch.full_like(scale, half), bits)

    def describe(self, count: int = 0) -> str:
        count = count or self.scale.numel()
        return f"{self.bits}-bit uniform" + (f" x {count}" if count > 1 else "")

    @property
    def why_no_integers(self) -> str:
        if not bool((self.zero_point % 1 != 0).any()):
            return ""
        return "has a zero point that is not a whole number: quantize the model with round_zero_point = True"

    def integers(self, code: Tensor) -> list[Tensor]:
        return [code.to(torch.int64) - self.zero_point.to(torch.int64)]

    def units(self) -> list[Tensor]:
        return [self.scale.double()]

    def limits(self) -> list[tuple[int, int]]:
        return [(-int(self.zero_point.max()), 2**self.bits - 1 - int(self.zero_point.min()))]

    def clamp_bounds(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        low = -self.zero_point
        return [(self.scale, low, low + (2**self.bits - 1))]

    def fields(self) -> dict[str, Any]:
        check_parameters("a uniform quantizer", self.scale, self.zero_point, self.bits)
        zero_point = [int(value) for value in self.zero_point.reshape(-1)]
        return {"kind": self.kind, **self._common_fields(), "zero_point": zero_point}

    def stored_parameters(self) -> dict[str, Tensor]:
        stored = super().stored_parameters()
        return stored | {"zero_point": stored["zero_point"].to(torch.uint8)}

    @classmethod
    def of_stored(cls, name: str, stored: Mapping[str, Tensor], bits: int) -> "UniformQuantizer":
        scale, zero_point = stored["scale"], stored["zero_point"]
        if zero_point.dtype != torch.uint8:
            raise ArtifactError(f"weight {name} has zero points of the type {zero_point.dtype}, but they must be uint8")
        zero_point = zero_point.to(scale.dtype)
        check_parameters(name, scale, zero_point, bits)
        return UniformQuantizer(scale, zero_point, bits)

    @classmethod
    def of_fields(cls, name: str, record: Mapping[str, Any], scale: Tensor) -> "UniformQuantizer":
        zero_point = torch.tensor(record["zero_point"], dtype=scale.dtype).reshape(scale.shape)
        check_parameters(name, scale, zero_point, record["bits"])
        return UniformQuantizer(scale, zero_point, record["bits"])


@dataclass(frozen=True)
class UniformFormat(Format):
    """Asymmetric uniform quantizers; a point is (lower bound, upper bound)."""

    has_groups = True

    @property
    def names(self) -> tuple[str, ...]:
        return ("lower bound", "upper bound")

    def of(self, points: Tensor) -> UniformQuantizer:
        return UniformQuantizer(*bounds_to_uniform(points[:, 0], points[:, 1], self.bits), self.bits)

    def box(self, groups: Tensor, reach: float, stack: int = 1) -> tuple[Tensor, Tensor]:
        """Return the percentiles 0 and reach for the lower bound, 1 - reach and 1 for the upper (Algorithm 1)."""
        corners = torch.stack(sample_quantiles(groups, (0.0, reach, 1 - reach, 1.0), stack))
        return corners[::2], corners[1::2]

    def point_of(self, quantizer: Quantizer) -> Tensor | None:
        if not isinstance(quantizer, UniformQuantizer):
            return None
        low = quantizer.bounds()[0]
        return torch.stack([low, low + (2**self.bits - 1) * quantizer.scale])

    def point_of_range(self, low: Tensor, high: Tensor) -> Tensor:
        return torch.stack([low, high])

    def errors(self, values: Tensor) -> Errors:
        values = values.contiguous()  # once for all candidates

        def errors(points: Tensor, dtype: torch.dtype) -> Tensor:
            quantizer = self.of(points)
            return uniform_errors(values, quantizer.scale, quantizer.zero_point, self.bits, self.own_dims, dtype)

        return errors

    def steps(self, points: Tensor) -> tuple[Tensor, Tensor]:
        scale, zero_point = (value.double()[..., None] for value in self.of(points).parameters().values())
        code = torch.arange(2**self.bits, dtype=torch.float64, device=points.device)
        return scale * (code - zero_point), scale * (code[:-1] + 0.5 - zero_point)
