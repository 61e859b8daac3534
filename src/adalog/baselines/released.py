"""The search of the authors' released code, with its quirks, so that adalog can reproduce its results.

It differs from Algorithm 1 as the paper prints it, which `strategies` and `bounds` implement:

- Uniform quantizers are searched as (scale, zero point). The scale is between (Q_0.9 - Q_0.1) / L and (Q_1 - Q_0) / L,
  with L = 2**bits - 1 and Q_p a quantile. The zero point is a whole number around 2**(bits - 1), whatever the data is.
- Only scales are refined; q and zero points stay as the first grid found them. Parents are not candidates again. A step
  divides the spacing by m - 1/2, although its m children divide it by m - 1.
- The search of a linear starts from each operand's own error. The search of a product of activations starts from an
  arbitrary point of the grid. Three rounds follow by default. Each begins from the first grid again, and the result of
  the last round is returned even if an earlier one was better.
- After softmax the scale is 1. After GELU, log2 and log-sqrt2 take the scale that was found for AdaLog.

If an operand is large, each step scores its candidates on a sample of the tokens, with bfloat16 products and codes from
a table. The best candidates of the last step are then scored exactly, on all tokens. If an operand is small, as in the
golden outputs, every loss is exact.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import ClassVar

import torch
from torch import Tensor

from adalog.baselines.twin import TwinFormat, TwinUniformQuantizer
from adalog.choices import check_flag, check_whole
from adalog.device import chunk_elements
from adalog.quantizers import (
    Assignment,
    Errors,
    Fold,
    LogFormat,
    LogQuantizer,
    Quantizer,
    UniformFormat,
    UniformQuantizer,
    symmetric_scale,
    symmetric_zero_point,
)
from adalog.quantizers.fused import sums, uniform_errors
from adalog.quantizers.quantiles import QUANTILE_LIMIT, quantiles
from adalog.search import AnySearch
from adalog.search.objective import ProductError
from adalog.search.operand import Operand
from adalog.search.product import Product
from adalog.search.strategies import Loss

POINTS = 128  # n, the number of candidates in every step
_RADIX = 37  # r of the AdaLog quantizer whose scale fixed bases take
_LEAST_SCALE, _TINY = 1e-4, 2.0**-94  # the least scale of an activation, and of a weight's row, which may be all zero
# An operand with at least _MANY values averages out the rounding of bfloat16, and _ROWS tokens can represent all.
_MANY, _ROWS = 1 << 19, 4096
_FINALISTS = 8  # a rough loss leaves this many candidates, and twice as many if equal ones are common


@dataclass(frozen=True)
class ReleasedSearch(AnySearch):
    """The search of the authors' released code, including its deviations from the paper.

    Args:
        progressive: Refine the best scales of the first grid, which is FPCS in the released code. If False, the first
            grid alone decides.
        steps: Number of steps, including the first grid. Default from the released code; the paper has p = 4 steps.
        rounds: Number of times that each operand is searched. Default from the released code.

    Raises:
        ValueError: If a field has an invalid value.
    """

    kind: ClassVar[str] = "released"
    finds_bases: ClassVar[bool] = True
    progressive: bool = True
    steps: int = 6
    rounds: int = 3

    def __post_init__(self) -> None:
        check_flag("progressive", self.progressive)
        for name in ("steps", "rounds"):
            check_whole(name, getattr(self, name), 1)

    @property
    def refinements(self) -> int:
        """The number of steps after the first grid."""
        return self.steps - 1 if self.progressive else 0

    def refuses_fold(self, weight_bits: int, activation_bits: int) -> str:
        why = "the released code does not fold norms if weights and activations have different bits"
        return "" if weight_bits == activation_bits else why

    def fold_channels(self, values: Tensor, bits: int, weight: Tensor) -> tuple[Fold, UniformQuantizer | None]:
        operand = Operand(values, UniformFormat(bits, own_dims=(1,)))
        quantizer = _UniformSpace(operand, min(2**bits, 16), self, _LEAST_SCALE).start(own_error=True)
        return Fold.sharing(quantizer.scale.flatten(), quantizer.zero_point.flatten()), None

    def search_product(self, product: Product) -> Assignment:
        left, right, of_activations = product.left, product.right, product.of_activations
        half = symmetric_zero_point(right.format.bits)
        zero_points = min(half, POINTS // 2) if product.role == "conv" else min(half, 16)
        seconds = _UniformSpace(right, zero_points, self, _LEAST_SCALE if of_activations else _TINY)
        firsts: _UniformSpace | _LogSpace | _TwinSpace
        if isinstance(left.format, TwinFormat):
            firsts = _TwinSpace(left, left.format)
        elif isinstance(left.format, LogFormat):
            firsts = _LogSpace(left, left.format, self, scale_is_one=product.role == "av")
        else:
            count = zero_points if of_activations else min(2**left.format.bits, 16)
            firsts = _UniformSpace(left, count, self, _LEAST_SCALE)
        left_first = of_activations or not isinstance(firsts, _UniformSpace)

        first: Quantizer | None = None if left.is_float else firsts.start(own_error=not of_activations)
        second: Quantizer | None = None if right.is_float else seconds.start(own_error=not of_activations)
        for _ in range(1 if left.is_float or right.is_float else self.rounds):
            for on_left in (left_first, not left_first):
                if on_left and first is not None:
                    first = firsts.search(_error(left, right, second), first)
                elif not on_left and second is not None:
                    second = seconds.search(_error(right, left, first))
        return product.assign(firsts.final(first) if isinstance(firsts, _LogSpace) else first, second)


def _error(operand: Operand, other: Operand, quantizer: Quantizer | None) -> ProductError:
    """Return the product's error as a function of one operand, with the other one quantized."""
    exact, hat = (value.transpose(-1, -2) for value in (other.values, other.fake_quantize(quantizer)))
    return ProductError.of(operand.values, exact, hat, operand.format.own_dims, operand.mask, operand.alike)


@dataclass(frozen=True)
class _LossPair:
    """The losses of candidates, as functions from points (K, P, *groups) to losses (K, *groups).

    rough: a faster approximation, if there is one, which may use a sample of the tokens.
    finalists: the number of candidates that it leaves to the exact loss.
    """

    exact: Loss
    rough: Loss | None = None
    finalists: int = _FINALISTS

    @staticmethod
    def of(
        error: ProductError, errors: Callable[[Tensor], Errors], rough: Callable[[Tensor], Errors] | None = None
    ) -> "_LossPair":
        """Return the losses of a product; the rough one is in bfloat16.

        errors: maps values to the errors that quantization adds to them at any points. rough: a faster approximation.
        """
        if error.left.numel() < _MANY:
            return _LossPair(error.loss_by(errors))
        return _LossPair(error.loss_by(errors), error.sample(_ROWS).fast().loss_by(rough or errors))

    def survivors(self, points: Tensor, count: int) -> Tensor:
        """Return the `count` points with the least loss in each group, by the fastest loss."""
        return _gather(points, _least((self.rough or self.exact)(points), count))

    def best(self, points: Tensor) -> Tensor:
        """Return the point with the least loss in each group, (P, *groups), among the finalists of the rough loss.

        If nothing is clipped, all zero points have the same loss. The released code leaves the choice among them to
        `torch.topk`. Here the last one wins, which came closest to the released choice.
        """
        if self.rough is not None and len(points) > self.finalists:
            few = _least(self.rough(points), self.finalists)
            points = _gather(points, few.sort(dim=0).values)  # in their old order, so that the last one wins
        return _gather(points, _least(self.exact(points), 1))[0]


def _least(losses: Tensor, count: int) -> Tensor:
    """Return the indices (count, *groups) of the least losses (K, *groups); among equals the last comes first."""
    return len(losses) - 1 - losses.flip(0).sort(dim=0, stable=True).indices[:count]


def _gather(points: Tensor, order: Tensor) -> Tensor:
    return torch.take_along_dim(points, order.unsqueeze(1), dim=0)


def _refine(scores: _LossPair, points: Tensor, spacing: Tensor, steps: int, *, parents: int, least: float) -> Tensor:
    """Return the best point of the released FPCS, which refines only the scale.

    points: (K, P, *groups); the scale is the first hyperparameter, at least `least`.
    spacing: the distance between the scales of `points`, (*groups).
    """
    fan = POINTS // parents
    shares = torch.linspace(0, 1, fan, dtype=points.dtype, device=points.device) - 0.5
    for _ in range(steps):
        points = scores.survivors(points, parents).repeat_interleave(fan, dim=0)
        offsets = shares.repeat(len(points) // fan).view(-1, *(1 for _ in spacing.shape)) * spacing
        points[:, 0] = (points[:, 0] + offsets).clamp(min=least)
        spacing = spacing / (fan - 0.5)
    return scores.best(points)


@dataclass(frozen=True)
class _UniformSpace:
    """Uniform quantizers as points (scale, zero point).

    The grid has `zero_points` whole numbers around the middle code, and POINTS / zero_points scales of at least
    `least`.
    """

    operand: Operand
    zero_points: int
    search_choices: ReleasedSearch
    least: float

    @cached_property
    def _grid(self) -> tuple[Tensor, Tensor]:
        """The grid, (POINTS, 2, *groups), with scales running fastest, and the spacing of its scales, (*groups)."""
        values, form, shape = self.operand.values, self.operand.format, self.operand.groups_shape
        ones = [1 for _ in shape]
        top, count = 2**form.bits - 1, POINTS // self.zero_points
        lowest, low, high, highest = (quantile.reshape(shape) for quantile in _quantiles(self.operand.groups()))
        start, stop = high - low, highest - lowest
        number = torch.arange(count, device=values.device).view(-1, *ones)
        scales = ((start + number / (count - 1) * (stop - start)) / top).clamp(min=self.least)
        first = symmetric_zero_point(form.bits) - self.zero_points // 2
        zero_point = torch.arange(first, first + self.zero_points, device=values.device).to(values)
        zero_point = zero_point.repeat_interleave(count).view(-1, *ones).expand(POINTS, *shape)
        return torch.stack([scales.repeat(self.zero_points, *ones), zero_point], dim=1), scales[1] - scales[0]

    def _refine_grid(self, scores: _LossPair) -> UniformQuantizer:
        point = _refine(scores, *self._grid, self.search_choices.refinements, parents=16, least=self.least)
        return self._quantizer(point)

    def _quantizer(self, point: Tensor) -> UniformQuantizer:
        scale, zero_point = (self.operand.reshape(parameter)[0] for parameter in point)
        return UniformQuantizer(scale, zero_point, self.operand.format.bits)

    def start(self, *, own_error: bool) -> UniformQuantizer:
        """Return the quantizer with the least own error, or the second-to-last of the grid."""
        if not own_error:
            return self._quantizer(self._grid[0][POINTS - 2])
        values, form = self.operand.values.double(), self.operand.format
        chunk = max(1, chunk_elements(values.device) // values.numel())

        def loss_on(values: Tensor, own_dims: tuple[int, ...], dtype: torch.dtype) -> Loss:
            zeros = torch.zeros_like(values)

            def loss(points: Tensor) -> Tensor:
                parts = points.split(chunk)
                errors = (uniform_errors(values, part[:, 0], part[:, 1], form.bits, own_dims, dtype) for part in parts)
                return torch.cat([sums(error, zeros, None, own_dims) for error in errors]).view(points[:, 0].shape)

            return loss

        exact = loss_on(values, form.own_dims, torch.float64)  # so that only equal candidates tie
        if values.numel() < _MANY:
            return self._refine_grid(_LossPair(exact))
        rough = loss_on(self.operand.groups().contiguous(), (0,), torch.float32)  # sums along rows are fast
        return self._refine_grid(_LossPair(exact, rough, 2 * _FINALISTS))

    def search(self, error: ProductError, current: Quantizer | None = None) -> UniformQuantizer:
        """Return the best quantizer by the product's error."""
        bits, own_dims = self.operand.format.bits, self.operand.format.own_dims

        def errors(values: Tensor) -> Errors:
            return lambda points, dtype: uniform_errors(values, points[:, 0], points[:, 1], bits, own_dims, dtype)

        return self._refine_grid(_LossPair.of(error, errors))


@dataclass(frozen=True)
class _LogSpace:
    """AdaLog quantizers as points (scale, q), even if the format has a fixed base; `final` sets that base."""

    operand: Operand
    form: LogFormat
    search_choices: ReleasedSearch
    scale_is_one: bool

    @cached_property
    def _searched_format(self) -> LogFormat:
        """The format with the bases of AdaLog."""
        return replace(self.form, q=0, r=_RADIX if self.form.q else self.form.r, table=True)

    def _quantizer(self, scale: Tensor, q: Tensor | int) -> LogQuantizer:
        return self._searched_format.with_base(scale, round(float(q)))

    def final(self, quantizer: Quantizer | None) -> Quantizer | None:
        """Return the quantizer with the base of the format, if that is fixed."""
        if quantizer is None or not self.form.q:
            return quantizer
        return self.form.with_base(quantizer.scale, self.form.q)

    @cached_property
    def _span(self) -> tuple[Tensor, Tensor]:
        """The 0.9 quantile and the maximum of the positive values, each plus the offset."""
        values = self.operand.values
        positive = values[values > 0].sort().values
        if not len(positive):
            positive = values.new_ones(1)
        low, high = (positive[math.ceil(p * len(positive)) - 1] for p in (0.9, 1.0))
        return low + self.form.offset, high + self.form.offset

    def start(self, *, own_error: bool) -> LogQuantizer:
        """Return the quantizer with q = 37, and the scale 1 or the second-to-last of the POINTS scales."""
        if self.scale_is_one:
            return self._quantizer(self.operand.values.new_ones(()), _RADIX)
        low, high = self._span
        return self._quantizer(low + (high - low) * (POINTS - 2) / (POINTS - 1), _RADIX)

    def search(self, error: ProductError, current: Quantizer) -> Quantizer | None:
        """Return the best quantizer by the product's error.

        All q are tried at the current scale, then scales for the 8 best q (without refinement, for the best q only).
        """
        if self.scale_is_one and self.form.q:
            return self.final(current)

        def errors(values: Tensor) -> Errors:
            def exact(points: Tensor, dtype: torch.dtype) -> Tensor:
                hats = [self._quantizer(*point).fake_quantize(values) for point in points]
                return torch.stack(hats).sub_(values).to(dtype)

            return exact

        def rough(values: Tensor) -> Errors:
            by_table = self._searched_format.errors(values)
            return lambda points, dtype: by_table(torch.stack([points[:, 1].log2(), points[:, 0]], dim=1), dtype)

        scores = _LossPair.of(error, errors, rough)
        q = torch.arange(self.form.q_min, self.form.q_max + 1).to(error.left)
        points = torch.stack([current.scale.expand(len(q)), q], dim=1)
        if self.scale_is_one:
            return self._quantizer(current.scale, scores.best(points)[1])
        low, high = self._span
        progressive, steps = self.search_choices.progressive, self.search_choices.refinements
        count, bases = (16, scores.survivors(points, 8)) if progressive else (POINTS, scores.best(points)[None])
        scales = low + (high - low) * torch.linspace(0, 1, count).to(error.left)
        points = torch.stack([scales.repeat(len(bases)), bases[:, 1].repeat_interleave(count)], dim=1)
        return self._quantizer(
            *_refine(scores, points, (high - low) / (count - 1), steps, parents=32, least=_LEAST_SCALE)
        )


@dataclass(frozen=True)
class _TwinSpace:
    """Twin quantizers whose positive scale is a power of two times the negative one, which spans the offset."""

    operand: Operand
    form: TwinFormat

    def _quantizer(self, scale: Tensor) -> TwinUniformQuantizer:
        return TwinUniformQuantizer.of(scale, self.form.bits, self.form.offset)

    def start(self, *, own_error: bool) -> TwinUniformQuantizer:
        """Return the quantizer whose positive half spans the largest magnitude."""
        return self._quantizer(symmetric_scale(self.operand.values.abs().max(), self.form.bits))

    def search(self, error: ProductError, current: Quantizer) -> TwinUniformQuantizer:
        """Return the best of 29 powers of two by the product's error."""
        negative = self.form.offset / symmetric_zero_point(self.form.bits)
        points = negative * torch.exp2(torch.arange(-5, 24)).to(error.left)[:, None]

        def candidates(scales: Tensor) -> Tensor:
            return torch.stack([self._quantizer(scale).fake_quantize(error.left) for scale in scales[:, 0]])

        scores = _LossPair(partial(error.loss, candidates))
        return self._quantizer(scores.best(points)[0])


def _quantiles(groups: Tensor) -> list[Tensor]:
    """Return Q_0, Q_0.1, Q_0.9 and Q_1 per row of (G, T).

    Long rows are cut into pieces, and the quantiles of the pieces are averaged.
    """
    count = 1
    while groups.numel() // count > QUANTILE_LIMIT and groups.shape[1] % (2 * count) == 0:
        count *= 2
    pieces = quantiles(groups.reshape(len(groups) * count, -1), (0.0, 0.1, 0.9, 1.0))
    return list(torch.stack(pieces).view(len(pieces), len(groups), count).mean(dim=2))
