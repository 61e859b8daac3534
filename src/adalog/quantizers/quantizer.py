"""The abstract `Quantizer`, and what all quantizers share: limits, straight-through gradients and slicing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from adalog.device import waits_for_launches
from adalog.errors import ArtifactError
from adalog.quantizers.elementwise import straight_through

MIN_BITS, MAX_BITS = 2, 8
FLOAT_BITS = 32  # the width of an operand that is not quantized
_SLICE_ELEMENTS = 1 << 17

Same = TypeVar("Same", bound="Quantizer")


def at_least_float32(x: Tensor) -> Tensor:
    """Return x itself if it is float32 or float64, else x in float32."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


class _RoundStraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def round_ste(x: Tensor) -> Tensor:
    """Round to the nearest integer, halves to even; the gradient passes through as if nothing were rounded."""
    rounded: Tensor = _RoundStraightThrough.apply(x)  # type: ignore[no-untyped-call]
    return rounded


class _QuantizedStraightThrough(torch.autograd.Function):
    """x_hat, with the gradients of c + s e: c is x clipped to [low, high], and e = (x_hat - c) / s is held constant.

    hat: x_hat.
    above: how far x_hat lies above x, because a bias has absorbed the offset.
    mixed: True if some values of x_hat are x + above instead; c is x there.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, low: Tensor, high: Tensor, step: Tensor, hat: Tensor, above: float, mixed: bool
    ) -> Tensor:
        ctx.save_for_backward(x, low, high, step, hat)
        ctx.above, ctx.mixed = above, mixed
        return hat.view_as(hat)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, *trained, hat = ctx.saved_tensors
        at_once = straight_through(gradient, x, hat, trained, ctx.above, ctx.mixed)
        if at_once is not None:
            return at_once[0], *at_once[1], None, None, None
        trains = any(ctx.needs_input_grad[1:4])
        result = torch.empty_like(gradient)
        sums = [torch.zeros_like(value) for value in trained] if trains else []
        for slopes, target, *others in zip(*_slices([gradient, result, x, hat], trained), strict=True):
            wide = torch.promote_types(x.dtype, trained[0].dtype)
            values, hats = (value.to(wide) for value in others)
            target.copy_(_gradient_by_values(slopes.to(wide), values, hats, trained, sums, ctx.above, ctx.mixed))
        return result if ctx.needs_input_grad[0] else None, *(sums if trains else (None,) * 3), None, None, None


class _ScaledStraightThrough(torch.autograd.Function):
    """x_hat, with the gradients of `_QuantizedStraightThrough` by x, the scale and the zero point, in few operations.

    hat: x_hat. It is the origin plus whole or other fixed numbers of scales, less a whole number of zero points.
    inside: 1 for values within the range and for values that are not quantized, 0 for the others.
    error: the distance of x_hat from the origin, less that of x if it is inside.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor | None, hat: Tensor, inside: Tensor, error: Tensor
    ) -> Tensor:
        ctx.save_for_backward(scale, inside, error)
        return hat.view_as(hat)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        scale, inside, error = ctx.saved_tensors
        by_x = gradient * inside
        by_scale = by_zero_point = None
        if ctx.needs_input_grad[1]:
            by_scale = (gradient * error).sum_to_size(scale.shape) / scale
        if ctx.needs_input_grad[2]:
            by_zero_point = (by_x - gradient).sum_to_size(scale.shape) * scale
        return by_x if ctx.needs_input_grad[0] else None, by_scale, by_zero_point, None, None, None


def _gradient_by_values(
    gradient: Tensor, x: Tensor, hat: Tensor, trained: Sequence[Tensor], sums: list[Tensor], above: float, mixed: bool
) -> Tensor:
    """Return the gradient of a slice of x, and add the gradients of low, high and step to `sums`.

    Masks are the numbers 0 and 1, because PyTorch is slower on booleans on the CPU.
    """
    low, high, step = trained
    clipped = torch.minimum(torch.maximum(x, low), high)
    if mixed:
        clipped.lerp_(x, _one_where(torch.eq, hat, x + above if above else x))
    by_x = _one_where(torch.eq, clipped, x).mul_(gradient)
    if sums:
        outside = gradient - by_x
        beyond = _product_sum(outside, _one_where(torch.gt, x, (low + high) / 2), high)
        sums[0] += outside.sum_to_size(low.shape) - beyond
        sums[1] += beyond
        error = torch.sub(hat, clipped, out=clipped)
        error = error.sub_(above) if above else error
        sums[2] += _product_sum(gradient, error, step) / step
    return by_x


def _one_where(compare: Callable[..., Tensor], first: Tensor, second: Tensor) -> Tensor:
    """Return a comparison as the numbers 0 and 1, in the dtype of the first tensor."""
    return compare(first, second, out=torch.empty_like(first))


def _product_sum(first: Tensor, second: Tensor, like: Tensor) -> Tensor:
    """Return first * second, summed to the shape of `like`."""
    if like.numel() == 1:
        return torch.dot(first.reshape(-1), second.reshape(-1)).reshape(like.shape)
    return (first * second).sum_to_size(like.shape)


class Quantizer(ABC):
    """A quantizer with its parameters, which maps values to codes of `bits` bits and back.

    Quantizers are frozen dataclasses. Their tensor fields are their parameters, which broadcast against the values.
    """

    kind: ClassVar[str]  # the name in files
    scale: Tensor
    bits: int

    def __post_init__(self) -> None:
        if not MIN_BITS <= self.bits <= MAX_BITS:
            raise ValueError(f"bits = {self.bits} is outside {MIN_BITS} to {MAX_BITS}")

    # --- codes ---

    @property
    def code_count(self) -> int:
        """The number of codes; the first code is 0."""
        return int(2**self.bits)

    @abstractmethod
    def quantize(self, x: Tensor) -> Tensor:
        """Return the codes of x: whole numbers in the dtype of x, but at least float32."""

    @abstractmethod
    def dequantize(self, code: Tensor) -> Tensor:
        """Return the values of codes, in the dtype of the scale."""

    def fake_quantize(self, x: Tensor, kept: Tensor | None = None) -> Tensor:
        """Quantize and dequantize x, in the dtype of x; differentiable as in LSQ (Esser et al., 2020).

        With c the value clipped to the range and s the step there, x_hat = c + s e. The rounding error e = (x_hat - c)
        / s is held constant. The gradient of x is therefore 1 inside the range and 0 outside, and the scale and zero
        point get the gradients of LSQ and LSQ+.

        kept: the shape and dtype of x; 1 for values that are not quantized (QDrop), 0 for the others. Only an offset
            that a bias has absorbed is added to them. Their gradient is 1, and the parameters get none from them.
        """
        trained = (x, *self.parameters().values())
        differentiable = torch.is_grad_enabled() and any(value.requires_grad for value in trained)
        if differentiable and self.origin is not None and x.dtype == self.scale.dtype and waits_for_launches(x.device):
            return self._fake_quantize_in_few_operations(x.contiguous(), kept, self.origin)
        x = x.contiguous() if differentiable else x
        with torch.no_grad():
            hat = self._nearest(x)
            if kept is not None:
                hat.lerp_(x + self.kept_offset if self.kept_offset else x, kept)  # exact, since the weights are 0 and 1
        if not differentiable:
            return hat
        low, high = self.bounds()
        result: Tensor = _QuantizedStraightThrough.apply(  # type: ignore[no-untyped-call]
            x, low, high, self.step(x), hat, self.kept_offset, kept is not None
        )
        return result

    def _fake_quantize_in_few_operations(self, x: Tensor, kept: Tensor | None, origin: float) -> Tensor:
        """Return the same as `fake_quantize`, with gradients of the scale and the zero point."""
        above = self.kept_offset
        with torch.no_grad():
            hat, low, high = self._nearest_and_bounds(x)
            inside = _one_where(torch.eq, torch.clamp(x, low, high), x)
            if kept is not None:
                hat.lerp_(x + above if above else x, kept)
                torch.maximum(inside, kept, out=inside)
            error = torch.addcmul(hat - (above + origin) if above + origin else hat, inside, x, value=-1)
            error = error.add_(inside, alpha=origin) if origin else error
        result: Tensor = _ScaledStraightThrough.apply(  # type: ignore[no-untyped-call]
            x, self.scale, self.parameters().get("zero_point"), hat, inside, error
        )
        return result

    def _nearest_and_bounds(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return x_hat and the result of `bounds`."""
        return self._nearest(x), *self.bounds()

    @property
    def origin(self) -> float | None:
        """The value that no scale moves, if all levels are at fixed numbers of scales from it, else None."""
        return None

    def _nearest(self, x: Tensor) -> Tensor:
        return by_slices(lambda part: self.dequantize(self.quantize(part)).to(x.dtype), x, self.scale)

    def tables(self) -> tuple[Tensor, ...]:
        """Return the tables of `fake_quantize`, kept for `torch.compile`, which cannot trace how they are made."""
        return ()

    @abstractmethod
    def bounds(self) -> tuple[Tensor, Tensor]:
        """Return the least and the largest value that a code can have; differentiable."""

    def step(self, x: Tensor) -> Tensor:
        """Return the scale that applies at x, to broadcast against x. Quantizers with several scales override it."""
        return self.scale

    def levels(self) -> Tensor:
        """Return every value that the quantizer can output, over all its scales, ascending: float, on the CPU.

        The values are in the domain of x: an offset that a bias has absorbed is subtracted.
        """
        code = torch.arange(self.code_count, dtype=torch.float32, device=self.scale.device)
        return self.restore_offset().map(lambda value: value.reshape(-1, 1)).dequantize(code).unique().cpu()

    @property
    def lift(self) -> float:
        """The number that makes all levels non-negative when it is added to them."""
        return max(0.0, -float(self.levels()[0]))

    # --- parameters ---

    def parameters(self) -> dict[str, Tensor]:
        """Return the tensor fields by name."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}  # type: ignore[arg-type]
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def map(self: Same, function: Callable[[Tensor], Tensor]) -> Same:
        """Apply a function (a reshape, a move to a device, a cast) to every parameter."""
        values = {name: function(value) for name, value in self.parameters().items()}
        return replace(self, **values)  # type: ignore[type-var]

    def to(self: Same, device: torch.device) -> Same:
        return self.map(lambda value: value.to(device))

    def rescale(self: Same, factor: float | Tensor) -> Same:
        """Multiply the scales by `factor`, which is one number or one factor per scale."""
        return replace(self, scale=self.scale * factor)  # type: ignore[type-var]

    @property
    def nbytes(self) -> int:
        """The size of the parameters as an artifact stores them [bytes]."""
        return sum(value.nbytes for value in self.stored_parameters().values())

    @classmethod
    def reaching(cls: type[Same], upper: Tensor, bits: int) -> Same:
        """Return the quantizer whose largest level is `upper`, in the shape of the scale.

        Raises ValueError if one number does not determine a quantizer of this kind.
        """
        raise ValueError(f"the largest level alone does not determine a quantizer of the kind {cls.kind}")

    def absorb_offset(self: Same) -> tuple[float, Same]:
        """Return the offset that a consumer's bias can absorb (Eq. 15), or 0, and the quantizer after that."""
        return 0.0, self

    @property
    def kept_offset(self) -> float:
        """The number by which dequantized values exceed x, because a bias has absorbed the offset."""
        return 0.0

    def restore_offset(self: Same) -> Same:
        """Return the quantizer that dequantizes to the domain of x, even if a bias has absorbed the offset."""
        return self

    # --- descriptions ---

    @abstractmethod
    def describe(self, count: int = 0) -> str:
        """Describe the quantizer in a few words, such as "4-bit uniform x 3".

        count: the number of scales; 0: as many as the quantizer has.
        """

    @property
    def title(self) -> str:
        """A short name, for a row of a figure."""
        return type(self).__name__.removesuffix("Quantizer").lower()

    # --- integers ---

    @property
    def why_no_integers(self) -> str:
        """The reason why executors cannot run the codes as integers, and the way out; empty if they can."""
        return ""

    @abstractmethod
    def integers(self, code: Tensor) -> list[Tensor]:
        """Return the integers of codes, one tensor per part: int64, the shape of the codes.

        A value is the sum of its parts, and each part is its integer times its unit (`units`). All integers of a
        constant part (an offset that no bias has absorbed) are 1.
        """

    def integer(self, code: Tensor) -> Tensor:
        """Return the integers of a weight's codes. Raises ArtifactError if its values have several parts."""
        parts = self.integers(code)
        if (count := len(parts)) != 1:
            raise ArtifactError(
                f"values of the kind {self.kind} have {count} parts, but those of a weight must have one"
            )
        return parts[0]

    @abstractmethod
    def units(self) -> list[Tensor]:
        """Return the unit of each part: float64, to broadcast against the codes."""

    @abstractmethod
    def limits(self) -> list[tuple[int, int]]:
        """Return the least and the largest integer of each part, over all codes."""

    def clamp_bounds(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return (unit, low, high) of each part if its integers are x / unit, rounded and clamped, else nothing."""
        return []

    # --- cost ---

    @property
    def multiplied_bits(self) -> int:
        """The width of the integers that are multiplied, either codes or entries of a table [bits]."""
        return self.bits

    @property
    def look_ups(self) -> int:
        """The number of tables that are read per code."""
        return 0

    @property
    def shifts_products(self) -> bool:
        """True if every product is shifted (Eq. 10 as printed)."""
        return False

    @property
    def table_bytes(self) -> int:
        """The size of the integer table [bytes]."""
        return 0

    def without_table(self: Same) -> Same:
        """Return the quantizer without its integer table."""
        return self

    # --- files ---

    @abstractmethod
    def fields(self) -> dict[str, Any]:
        """Return the quantizer as JSON, without the dtype of its numbers.

        Raises ArtifactError if a file cannot hold the parameters.
        """

    @classmethod
    @abstractmethod
    def of_fields(cls: type[Same], name: str, record: Mapping[str, Any], scale: Tensor) -> Same:
        """Return the quantizer that `fields` described.

        name: the quantizer's name, for messages.
        scale: already read, positive and finite.
        Raises ArtifactError if the fields are not valid for this kind.
        """

    def stored_parameters(self) -> dict[str, Tensor]:
        """Return a weight's parameters as an artifact's tensors, by name: (n,) each, for n scales."""
        return {name: value.reshape(-1).contiguous() for name, value in self.parameters().items()}

    @classmethod
    def of_stored(cls: type[Same], name: str, stored: Mapping[str, Tensor], bits: int) -> Same:
        """Return the quantizer of a weight whose tensors `stored_parameters` returned.

        name: the weight's name, for messages.
        stored: its `scale` is already checked: floating-point, positive and finite.
        Raises ArtifactError if the tensors are not valid for this kind, or if weights cannot have this kind.
        """
        raise ArtifactError(f"weight {name} has a quantizer of the kind {cls.kind}, which weights cannot have")

    def _common_fields(self) -> dict[str, Any]:
        return {"bits": self.bits, "shape": list(self.scale.shape), "scale": decimals(self.scale)}


def by_slices(function: Callable[[Tensor], Tensor], x: Tensor, scale: Tensor | None = None) -> Tensor:
    """Compute an elementwise function of x in the slices of `_slices`."""
    result = torch.empty_like(x)
    sources, targets = _slices([x, result], [] if scale is None else [scale])
    if len(sources) == 1:
        return function(x)
    for part, target in zip(sources, targets, strict=True):
        target.copy_(function(part))
    return result


def _slices(values: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    """Cut tensors of one shape along the first dimension into slices whose temporaries fit in the cache.

    Each tensor is one slice if a parameter varies along that dimension, and on devices other than the CPU. All
    dimensions are first merged into one if all parameters are single numbers and the tensors are contiguous.
    """
    x = values[0]
    if x.ndim == 0 or x.device.type != "cpu":
        return [[value] for value in values]
    if all(value.numel() == 1 and value.ndim <= x.ndim for value in parameters):
        if all(value.is_contiguous() for value in values):
            values = [value.view(-1, *(1 for _ in value.shape[1:])) for value in values]
    elif any(value.ndim > x.ndim or (value.ndim == x.ndim and len(value) > 1) for value in parameters):
        return [[value] for value in values]
    count = min(-(-x.numel() // _SLICE_ELEMENTS), len(values[0]))
    return [value.tensor_split(max(1, count)) for value in values]


def decimals(values: Tensor) -> list[float]:
    """Return numbers for JSON: the shortest decimals that read back as the same values."""
    if values.dtype in (torch.float16, torch.bfloat16):  # readers take float32, and numpy has no bfloat16
        values = values.float()
    return [float(str(value)) for value in values.detach().cpu().reshape(-1).numpy()]


def check_parameters(name: str, scale: Tensor, zero_point: Tensor, bits: int) -> None:
    """Raise ArtifactError unless all scales are positive and finite, and all zero points are codes."""
    if not bool(torch.isfinite(scale).all() and (scale > 0).all()):
        raise ArtifactError(f"{name} has a scale that is not positive and finite")
    if not bool(((zero_point >= 0) & (zero_point < 2**bits) & (zero_point == zero_point.round())).all()):
        raise ArtifactError(f"{name} has a zero point that is not a whole number from 0 to {2**bits - 1}")


def read_scale(name: str, numbers: Any, shape: list[int], dtype: torch.dtype) -> Tensor:
    """Read a scale that `decimals` wrote. Raises ArtifactError if it is not positive and finite."""
    scale = torch.tensor(numbers, dtype=dtype).reshape(shape)
    check_parameters(name, scale, torch.zeros_like(scale), MIN_BITS)
    return scale
