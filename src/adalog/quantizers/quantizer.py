"""The abilities of every quantizer, and what all of them share: limits, straight-through gradients, slicing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from adalog.errors import ArtifactError
from adalog.quantizers.elementwise import straight_through

MIN_BITS, MAX_BITS = 2, 8
FLOAT_BITS = 32  # the width of an operand that is not quantized
_SLICE_ELEMENTS = 1 << 17

Same = TypeVar("Same", bound="Quantizer")


def at_least_float32(x: Tensor) -> Tensor:
    """x itself if it is float32 or float64, else x in float32."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def check_bits(bits: int) -> None:
    """Raise ValueError for a width that no quantizer has."""
    if not MIN_BITS <= bits <= MAX_BITS:
        raise ValueError(f"bits = {bits} is outside {MIN_BITS} to {MAX_BITS}")


class _RoundStraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def round_ste(x: Tensor) -> Tensor:
    """Round to the nearest integer, halves to even; the gradient passes straight through as if nothing was rounded."""
    rounded: Tensor = _RoundStraightThrough.apply(x)  # type: ignore[no-untyped-call]
    return rounded


class _QuantizedStraightThrough(torch.autograd.Function):
    """x_hat with the gradients of c + s e, in which c is x clipped to [low, high] and e = (x_hat - c) / s is constant.

    hat: x_hat; above: how far it lies above the values of x, because a bias has absorbed the offset. mixed: whether
    some of x_hat are x + above instead; there c is x.
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
        needed = any(ctx.needs_input_grad[1:4])
        found = torch.empty_like(gradient)
        sums = [torch.zeros_like(value) for value in trained] if needed else []
        for given, put, *others in zip(*_slices([gradient, found, x, hat], trained), strict=True):
            wide = torch.promote_types(x.dtype, trained[0].dtype)
            values, hats = (each.to(wide) for each in others)
            put.copy_(_gradient_by_values(given.to(wide), values, hats, trained, sums, ctx.above, ctx.mixed))
        return found if ctx.needs_input_grad[0] else None, *(sums if needed else (None,) * 3), None, None, None


def _gradient_by_values(
    gradient: Tensor, x: Tensor, hat: Tensor, trained: Sequence[Tensor], sums: list[Tensor], above: float, mixed: bool
) -> Tensor:
    """The gradient by x on a slice; those by low, high and step are added to the sums.

    Masks are numbers, 0 and 1: PyTorch's operations on the CPU take several times as long on booleans.
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


def _one_where(compare: Callable[..., Tensor], one: Tensor, other: Tensor) -> Tensor:
    """A comparison as numbers, 1 where it holds and 0 elsewhere, in the dtype of the first."""
    return compare(one, other, out=torch.empty_like(one))


def _product_sum(one: Tensor, other: Tensor, like: Tensor) -> Tensor:
    """The sum of the products of two tensors over all that a third one broadcasts over, in its shape."""
    if like.numel() == 1:
        return torch.dot(one.reshape(-1), other.reshape(-1)).reshape(like.shape)
    return (one * other).sum_to_size(like.shape)


class Quantizer(ABC):
    """A quantizer with its parameters, which turns values into codes of `bits` bits and back.

    Quantizers are frozen dataclasses. Their tensor fields are their parameters, which broadcast against the values.
    kind: the quantizer's name in files.
    """

    kind: ClassVar[str]
    scale: Tensor
    bits: int

    # --- codes ---

    @property
    def code_count(self) -> int:
        """How many codes there are, from 0 on."""
        return int(2**self.bits)

    @abstractmethod
    def quantize(self, x: Tensor) -> Tensor:
        """The codes of values: whole numbers in the dtype of the values, at least float32."""

    @abstractmethod
    def dequantize(self, code: Tensor) -> Tensor:
        """The values that codes stand for, in the dtype of the scale."""

    def fake_quantize(self, x: Tensor, kept: Tensor | None = None) -> Tensor:
        """The values that the codes of x stand for, in the dtype of x; differentiable as in LSQ (Esser et al., 2020).

        With c the value clipped to the range and s the step there, x_hat = c + s e, in which the rounding error
        e = (x_hat - c) / s is held constant. So the gradient by x is 1 inside the range and 0 outside, and the scale
        and zero point have the gradients of LSQ and LSQ+ wherever they require one.
        kept: 1 where a value is not quantized (QDrop), but for an offset that a bias has absorbed, and 0 elsewhere, in
        the shape and dtype of x. The gradient by x is 1 there, and parameters get none.
        """
        trained = (x, *self.parameters().values())
        differentiable = torch.is_grad_enabled() and any(value.requires_grad for value in trained)
        x = x.contiguous() if differentiable else x
        with torch.no_grad():
            hat = self._nearest(x)
            if kept is not None:
                hat.lerp_(x + self.kept_offset if self.kept_offset else x, kept)  # exact for weights of 0 and 1
        if not differentiable:
            return hat
        low, high = self.bounds()
        made: Tensor = _QuantizedStraightThrough.apply(  # type: ignore[no-untyped-call]
            x, low, high, self.step(x), hat, self.kept_offset, kept is not None
        )
        return made

    def _nearest(self, x: Tensor) -> Tensor:
        return by_slices(lambda some: self.dequantize(self.quantize(some)).to(x.dtype), x, self.scale)

    @abstractmethod
    def bounds(self) -> tuple[Tensor, Tensor]:
        """The ends of the range of x, the least and the largest value that a code stands for; differentiable."""

    @abstractmethod
    def step(self, x: Tensor) -> Tensor:
        """The scale that applies where x lies, to broadcast against x."""

    def levels(self) -> Tensor:
        """Every value that the quantizer stands for, under all its scales, ascending: float, on the CPU.

        The values are in the domain of what it quantizes: an offset that a bias has absorbed is taken off.
        """
        code = torch.arange(self.code_count, dtype=torch.float32, device=self.scale.device)
        return self.unabsorbed().map(lambda value: value.reshape(-1, 1)).dequantize(code).unique().cpu()

    @property
    def lift(self) -> float:
        """What to add to the values to make them positive, as far as the levels tell."""
        return max(0.0, -float(self.levels()[0]))

    # --- parameters ---

    def parameters(self) -> dict[str, Tensor]:
        """The tensor fields, by name."""
        found = {entry.name: getattr(self, entry.name) for entry in fields(self)}  # type: ignore[arg-type]
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}

    def map(self: Same, function: Callable[[Tensor], Tensor]) -> Same:
        """The same quantizer with a function (a reshape, a move to a device, a cast) applied to every parameter."""
        changed = {name: function(value) for name, value in self.parameters().items()}
        return replace(self, **changed)  # type: ignore[type-var]

    def scaled(self: Same, factor: float | Tensor) -> Same:
        """The same quantizer with scales that are `factor` times as large; a tensor has a factor for each scale."""
        return replace(self, scale=self.scale * factor)  # type: ignore[type-var]

    @property
    def nbytes(self) -> int:
        """The size of the parameters as an artifact's tensors hold them [bytes]."""
        return sum(value.nbytes for value in self.stored().values())

    @classmethod
    def reaching(cls: type[Same], upper: Tensor, bits: int, offset: float) -> Same:
        """The quantizer whose largest level is `upper`, for a search that has this one number to find.

        upper: in the shape of the scale. offset: how far below zero the values reach, where that is known; else 0.
        Raises ValueError where one number does not give a quantizer of this kind.
        """
        raise ValueError(f"a quantizer of the kind {cls.kind} takes more than one number")

    def absorbed(self: Same) -> tuple[float, Same]:
        """The offset that a consumer's bias can absorb (Eq. 15), and the quantizer after that; 0: there is none."""
        return 0.0, self

    @property
    def kept_offset(self) -> float:
        """How far the values that codes stand for are above those of x, because a bias has absorbed the offset."""
        return 0.0

    def unabsorbed(self: Same) -> Same:
        """The quantizer whose values are those of x itself: the offset is taken off even if a bias has absorbed it."""
        return self

    # --- words ---

    @abstractmethod
    def describe(self, count: int = 0) -> str:
        """The quantizer in a few words, such as "4-bit uniform x 3". count: how many scales; 0: as many as it has."""

    @property
    def title(self) -> str:
        """A short name, for a row of a figure."""
        return type(self).__name__.removesuffix("Quantizer").lower()

    # --- integers ---

    @property
    def why_no_integers(self) -> str:
        """Why the codes stand for no integers, with the way out; empty where they do."""
        return ""

    @abstractmethod
    def integers(self, code: Tensor) -> list[Tensor]:
        """The integers that codes stand for, one tensor per part: int64, the shape of the codes.

        A value is the sum of its parts, and each part is its integer times its unit (`units`). The integers of a
        constant part (an offset that no bias has absorbed) are all one.
        """

    def integer(self, code: Tensor) -> Tensor:
        """The integers of a weight's codes, whose values have one part. Raises ArtifactError for several."""
        parts = self.integers(code)
        if len(parts) != 1:
            count = len(parts)
            raise ArtifactError(f"values of the kind {self.kind} are sums of {count} parts; those of weights have one")
        return parts[0]

    @abstractmethod
    def units(self) -> list[Tensor]:
        """The unit of each part: float64, to broadcast against the codes."""

    @abstractmethod
    def limits(self) -> list[tuple[int, int]]:
        """(least, most) that the integer of each part can be, whatever the code."""

    # --- cost ---

    @property
    def multiplied_bits(self) -> int:
        """The width of the integers that are multiplied: the codes', or that of a table's entries [bits]."""
        return self.bits

    @property
    def look_ups(self) -> int:
        """How many tables are read per code."""
        return 0

    @property
    def shifts_products(self) -> bool:
        """Whether every product is shifted (Eq. 10 as printed)."""
        return False

    @property
    def table_bytes(self) -> int:
        """Bytes of the table of integers."""
        return 0

    def without_table(self: Same) -> Same:
        """The quantizer without its table of integers."""
        return self

    # --- files ---

    @abstractmethod
    def fields(self) -> dict[str, Any]:
        """The quantizer as JSON, without the type of its numbers.

        Raises ArtifactError for parameters that no file takes.
        """

    @classmethod
    @abstractmethod
    def of_fields(cls: type[Same], name: str, given: Mapping[str, Any], scale: Tensor) -> Same:
        """The quantizer that `fields` wrote.

        name: the quantizer's, for messages. scale: already read, positive and finite.
        Raises ArtifactError for fields that no quantizer of this kind has.
        """

    def stored(self) -> dict[str, Tensor]:
        """The parameters as an artifact's tensors hold those of a weight, by name: (n,) each, for n scales."""
        return {name: value.reshape(-1).contiguous() for name, value in self.parameters().items()}

    @classmethod
    def of_stored(cls: type[Same], name: str, stored: Mapping[str, Tensor], bits: int) -> Same:
        """The quantizer of a weight that `stored` wrote.

        name: the weight's, for messages. stored: `scale` is already checked: floating, positive and finite.
        Raises ArtifactError for tensors that no quantizer of this kind has, and for kinds that no weight has.
        """
        raise ArtifactError(f"the weight {name} has a quantizer of the kind {cls.kind}, which no weight has")

    def _common_fields(self) -> dict[str, Any]:
        return {"bits": self.bits, "shape": list(self.scale.shape), "scale": decimals(self.scale)}


def by_slices(function: Callable[[Tensor], Tensor], x: Tensor, scale: Tensor | None = None) -> Tensor:
    """An elementwise function of x, computed in slices of the first dimension whose temporaries fit in the cache.

    It is computed on all of x at once where the scale varies along that dimension, and on other devices than the CPU.
    """
    result = torch.empty_like(x)
    given, put = _slices([x, result], [] if scale is None else [scale])
    if len(given) == 1:
        return function(x)
    for some, there in zip(given, put, strict=True):
        there.copy_(function(some))
    return result


def _slices(values: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    """Each of these tensors of one shape in slices that fit in the cache, along the first dimension.

    They are one slice each where a parameter varies along that dimension, and on other devices than the CPU. Where all
    parameters are single numbers, and values lie in memory in their order, the first dimension takes all others in.
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
    """Numbers for JSON: the shortest decimals that read back the same."""
    if values.dtype in (torch.float16, torch.bfloat16):  # readers take float32, and numpy has no bfloat16
        values = values.float()
    return [float(str(value)) for value in values.detach().cpu().reshape(-1).numpy()]


def check_parameters(name: str, scale: Tensor, zero_point: Tensor, bits: int) -> None:
    """Raise ArtifactError for a scale that is not positive and finite, or a zero point that is not a code."""
    if not bool(torch.isfinite(scale).all() and (scale > 0).all()):
        raise ArtifactError(f"{name} has a scale that is not positive and finite")
    if not bool(((zero_point >= 0) & (zero_point < 2**bits) & (zero_point == zero_point.round())).all()):
        raise ArtifactError(f"{name} has a zero point that is not a whole number from 0 to {2**bits - 1}")


def read_scale(name: str, numbers: Any, shape: list[int], dtype: torch.dtype) -> Tensor:
    """A scale as `decimals` wrote it. Raises ArtifactError for one that is not positive and finite."""
    scale = torch.tensor(numbers, dtype=dtype).reshape(shape)
    check_parameters(name, scale, torch.zeros_like(scale), MIN_BITS)
    return scale
