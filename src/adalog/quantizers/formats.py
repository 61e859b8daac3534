"""The kind of quantizer that an operand gets, and the space in which a search finds its parameters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from adalog.quantizers.fused import reshape_against
from adalog.quantizers.quantiles import ascending, sample_quantiles, thin
from adalog.quantizers.quantizer import FLOAT_BITS, Quantizer

Errors = Callable[[Tensor, torch.dtype], Tensor]  # points (k, P, *groups), a dtype -> quantized minus exact, rounded
Same = TypeVar("Same", bound="Format")


@dataclass(frozen=True)
class Format:
    """The kind of an operand's quantizer, without the parameters that a search finds.

    A point has P hyperparameters for each group of values with a quantizer of its own: (P, *groups). A kind that every
    search can find defines `names`, `of`, `box` and `point_of`. Other kinds are found by the search of a baseline only.

    bits: the width of codes, or 32 for an operand that stays float.
    own_dims: the dimensions of the operand's values that have parameters of their own.
    """

    has_zero: ClassVar[bool] = True  # zero is always a level, so the zero padding of a convolution stays as it is
    has_groups: ClassVar[bool] = False  # an activation can have parameters by groups, such as heads
    for_power_laws: ClassVar[bool] = False  # a uniform quantizer may be closer to values without a power law

    bits: int
    own_dims: tuple[int, ...] = ()

    @property
    def is_float(self) -> bool:
        return self.bits == FLOAT_BITS

    @property
    def title(self) -> str:
        """A few words for the kind, as in "4-bit uniform"."""
        return type(self).__name__.removesuffix("Format").lower()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the P hyperparameters."""
        return ()

    @property
    def scales(self) -> tuple[bool, ...]:
        """True for each hyperparameter that is multiplied if all levels are."""
        return (True,) * len(self.names)

    def by_groups(self: Same, own_dims: tuple[int, ...]) -> Same:
        """Return the format with parameters for each index of these dimensions, if activations can have that."""
        return replace(self, own_dims=own_dims) if self.has_groups else self

    def of(self, points: Tensor) -> Quantizer:
        """Return the quantizers of K points (K, P, ...) as one, with parameters of the shape (K, ...)."""
        raise ValueError(f"no point determines a quantizer of the format {type(self).__name__}")

    def box(self, groups: Tensor, reach: float, stack: int = 1) -> tuple[Tensor, Tensor]:
        """Return the corners (low, high) of the space, each (P, G), for values (G, T).

        reach: as in `Search`.
        stack: the number of operands whose groups follow one another.
        """
        raise ValueError(f"a search has no space for the format {type(self).__name__}")

    def point_of(self, quantizer: Quantizer) -> Tensor | None:
        """Return the point of a quantizer, (P, ...) with the shape of its scale, or None if no point gives it."""
        return None

    def point_of_range(self, low: Tensor, high: Tensor) -> Tensor:
        """Return the point (P, *groups) of the quantizer for values from low to high, (*groups) each."""
        return high[None]

    def quantizer(self, point: Tensor, shape: Sequence[int]) -> Quantizer:
        """Return the quantizer of one point (P, *groups); its parameters broadcast against values of this shape."""
        quantizer_of_point = self.of(self._reshape(point[None], shape))
        keeps_shape = self.own_dims or self.has_groups
        return quantizer_of_point.map(lambda value: value[0] if keeps_shape else value.reshape(()))

    def fake_quantize(self, point: Tensor, values: Tensor) -> Tensor:
        """Return the values after quantization by the quantizer of one point (P, *groups)."""
        return self.quantizer(point, values.shape).fake_quantize(values)

    def errors(self, values: Tensor) -> Errors:
        """Return a function from k points to the errors that quantization adds to these values: (k, *values.shape)."""
        values = values.contiguous()  # once for all candidates

        def errors(points: Tensor, dtype: torch.dtype) -> Tensor:
            quantizer = self.of(self._reshape(points, values.shape))
            return quantizer.fake_quantize(values[None]).sub_(values).to(dtype)

        return errors

    def steps(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ascending levels (K, *groups, L) and thresholds (K, *groups, L - 1) of points (K, P, *groups).

        They are in float64, on the device of the points.
        """
        quantizer = self.of(points[..., None].double())
        levels = quantizer.dequantize(torch.arange(quantizer.code_count, device=points.device))
        return levels, (levels[..., 1:] + levels[..., :-1]) / 2

    def snap(self, points: Tensor) -> Tensor:
        """Return points (K, P, *groups) with the same quantizers, which are equal if their quantizers are."""
        return points

    def _reshape(self, points: Tensor, shape: Sequence[int]) -> Tensor:
        """Return points (K, P, *groups) as (K, P, ...), to broadcast against values of this shape."""
        return torch.stack([reshape_against(parameter, shape, self.own_dims) for parameter in points.unbind(1)], dim=1)


@dataclass(frozen=True)
class LargestLevelFormat(Format):
    """Quantizers that their largest level alone determines (`Quantizer.reaching`), such as symmetric uniform ones."""

    has_groups = True

    kind: type[Quantizer] = field(kw_only=True)

    @property
    def title(self) -> str:
        return "symmetric uniform" if self.kind.kind == "uniform" else self.kind.kind

    @property
    def names(self) -> tuple[str, ...]:
        return ("largest value",)

    def of(self, points: Tensor) -> Quantizer:
        return self.kind.reaching(points[:, 0], self.bits)

    def box(self, groups: Tensor, reach: float, stack: int = 1) -> tuple[Tensor, Tensor]:
        """Return the percentiles 1 - 2 reach and 1 of the magnitudes, since both tails are among these.

        The lower one is less if the range reaches further down than up.
        """
        below, above = self.kind.reaching(groups.new_ones(()), self.bits).bounds()
        low, high = sample_quantiles(groups.abs(), (max(0.0, 1 - 2 * reach), 1.0), stack)
        return (low * float(above / torch.maximum(above, -below)))[None], high[None]

    def point_of(self, quantizer: Quantizer) -> Tensor | None:
        if not isinstance(quantizer, self.kind):
            return None
        low, upper = quantizer.bounds()
        near = 4 * torch.finfo(upper.dtype).eps
        same = torch.allclose(self.kind.reaching(upper, self.bits).bounds()[0], low, rtol=near, atol=0)
        return upper[None] if same else None


def positive_box(groups: Tensor, lift: float, stack: int) -> tuple[Tensor, Tensor]:
    """Return the percentiles 0.9 and 1 of the positive values of (G, T) plus the lift, (1, G) each; 1 without any.

    The first is at most half of the second.
    """
    ordered = ascending(thin(groups, stack) + lift)
    first, last = (ordered <= 0).sum(1), ordered.shape[1] - 1  # nothing waits for the device
    rank = 0.9 * (last - first).clamp(min=0).double()
    below = rank.to(torch.int64)
    places = torch.stack([first + below, first + below + 1], dim=1).clamp(max=last)
    start, end = ordered.gather(1, places).unbind(1)
    low = torch.where(first <= last, torch.lerp(start, end, (rank - below).to(ordered.dtype)), 1.0)
    high = torch.where(first <= last, groups.amax(dim=1) + lift, 1.0)
    return torch.minimum(low, high * 0.5)[None], high[None]
