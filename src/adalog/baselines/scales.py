"""Search symmetric scales by an output's error: EasyQuant, PTQ4ViT, APQ-ViT.

`methods.METHODS` lists the choices of each method.

With b bits, let L = 2**b - 1 and h = 2**(b - 1).

- The scales of symmetric quantizers are s0 m_i, with s0 = max|x| / (h - 1/2) and m_i = low + i (high - low) / n for i <
  n. The operands are searched in turn, in rounds, each with the other one quantized. The right operand comes first, but
  in products of activations the left one does (EasyQuant, PTQ4ViT).
- The loss of an output O with the error e = O_hat - O is sum e^2 (squared), 1 - <O, O + e> / (|O| |O + e|) (cosine,
  EasyQuant), or sum H e^2, with H the mean squared gradient of the model's loss with respect to O (Hessian, PTQ4ViT).
  The cosine does not depend on an output's length, so scales with the same codes have equal losses. If losses differ by
  rounding noise only, adalog takes the scale with the least sum e^2.
- A twin quantizer, after GELU, has s+ = m_i max(x) / (h - 1/2), and its s- spans the minimum.
- A split quantizer, after softmax (PTQ4ViT), has steps of sigma / (h - 1) below sigma and of 1 / (h - 1) from sigma on.
  The search tries sigma = 2^-i, i = 0 ... 19.
- A max-kept quantizer, after softmax (APQ-ViT), has steps of max(x) / L from zero on, so it does not clip the largest
  weights of attention.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from adalog.baselines.split import MaxKeptFormat, SplitFormat, SplitUniformQuantizer
from adalog.baselines.twin import TwinFormat, TwinUniformQuantizer
from adalog.choices import check_choice, check_flag, check_span, check_whole
from adalog.quantizers import (
    Assignment,
    Errors,
    LogFormat,
    Quantizer,
    UniformFormat,
    UniformQuantizer,
    symmetric_scale,
    symmetric_zero_point,
)
from adalog.quantizers.fused import products, uniform_errors
from adalog.quantizers.quantiles import coprime
from adalog.search import AnySearch, Needs
from adalog.search.forms import error_base, gains_from_bfloat16
from adalog.search.operand import Operand
from adalog.search.product import Product

Metric = Literal["squared", "cosine", "hessian"]

_SPLITS = 20  # the number of split points sigma
_TINY = 2.0**-94
_LEAST_ROWS, _LEAST_IMAGES = 1024, 32  # products with fewer rows or images are not sampled
_FINALISTS = 16  # the sample leaves this many candidates
_SLICE = 1 << 18  # elements of a product that are scored at once; with their weights they fit in a core's own cache


@dataclass(frozen=True)
class ScaleSearch(AnySearch):
    """A search that finds symmetric scales, operand by operand, by the output's error.

    EasyQuant, PTQ4ViT and APQ-ViT use it. The defaults are those of PTQ4ViT, unless stated otherwise.

    Args:
        metric: The error: "squared", "cosine" (1 minus the cosine of the angle between the outputs), or "hessian" (the
            squared error, weighted by the diagonal of the loss's Hessian).
        span: Interval of the candidates, as multiples of the scale that covers all values. The upper end is excluded.
        candidates: Number of candidates, spaced evenly over `span`.
        rounds: Number of times that each operand is searched.
        row_scales: Give each row of a linear its own scale. If False, each split (queries, keys, values) has one.
        probes: Number of random gradients from which the Hessian's diagonal is estimated. Chosen by adalog.
        released: Follow PTQ4ViT's code where it differs from the paper: one probe of rounding noise, a split after
            softmax that is found with V not quantized, and both halves of its values added up.
        rough_stride: Score all candidates on every n-th row or image first, and the best 16 on all. Chosen by adalog.

    Raises:
        ValueError: If a field has an invalid value.
    """

    kind: ClassVar[str] = "scales"
    metric: Metric = "hessian"
    span: tuple[float, float] = (0.01, 1.2)
    candidates: int = 100
    rounds: int = 3
    row_scales: bool = False
    probes: int = 8
    released: bool = False
    rough_stride: int = 5

    def __post_init__(self) -> None:
        check_choice("metric", self.metric, Metric)
        check_span("span", self.span)
        for name in ("candidates", "rounds", "probes", "rough_stride"):
            check_whole(name, getattr(self, name), 1)
        for name in ("row_scales", "released"):
            check_flag(name, getattr(self, name))

    @property
    def needs(self) -> Needs:
        probes = self.probes if self.metric == "hessian" else 0
        return Needs(probes=probes, noise=self.released, row_splits=not self.row_scales)

    def search_product(self, product: Product) -> Assignment:
        left, right, left_first = product.left, product.right, product.of_activations
        firsts, seconds = _ScaledQuantizers(left, self, None), _ScaledQuantizers(right, self, product.row_splits)
        first, second = firsts.start(), seconds.start()
        products = [(left, right, product.weights), *_sample(product, self.rough_stride)]
        for turn, on_left in enumerate((left_first, not left_first) * self.rounds):
            before = first if on_left else second
            if on_left and firsts.is_searched:
                other = seconds.quantizer(None if self.released and product.role == "av" else second)
                first = firsts.search(*(_OperandError.of(x, w, other, h, self) for x, w, h in products))
            elif not on_left and seconds.is_searched:
                other = firsts.quantizer(first)
                second = seconds.search(
                    *(_OperandError.of(w, x, other, None if h is None else h.mT, self) for x, w, h in products)
                )
            if turn and torch.equal(before, first if on_left else second):
                break  # the other operand was searched with this result, so later turns would change nothing
        return product.assign(firsts.quantizer(first), seconds.quantizer(second))


def _sample(product: Product, stride: int) -> Iterator[tuple[Operand, Operand, Tensor | None]]:
    """Yield the product of every n-th image (attention) or row, or nothing if the product is small."""
    of_activations, left, right, weights = product.of_activations, product.left, product.right, product.weights
    dim = 0 if of_activations else left.values.ndim - 2
    size = left.values.shape[dim]
    if stride == 1 or size < (_LEAST_IMAGES if of_activations else _LEAST_ROWS):
        return
    take = (slice(None),) * dim + (slice(None, None, coprime(stride, size)),)
    mask = None if left.mask is None else left.mask[take]
    sample = replace(left, values=left.values[take].contiguous(), mask=mask)
    other = replace(right, values=right.values[take].contiguous()) if of_activations else right
    yield sample, other, None if weights is None else weights[take]


@dataclass(frozen=True)
class _OperandError:
    """The error of a product's output as a function of one operand's candidates, in the error form (see `objective`).

    factor: the other operand, quantized and transposed.
    base: left @ (factor - exact).
    output: the exact output, for the cosine only.
    weights: weights of the squared errors, in the shape of the output; None: all are 1.
    """

    operand: Operand
    factor: Tensor
    base: Tensor
    output: Tensor | None
    weights: Tensor | None

    @staticmethod
    def of(
        operand: Operand, other: Operand, quantizer: Quantizer | None, weights: Tensor | None, search: ScaleSearch
    ) -> "_OperandError":
        exact, factor = (value.transpose(-1, -2) for value in (other.values, other.fake_quantize(quantizer)))
        output = operand.values @ exact if search.metric == "cosine" else None
        return _OperandError(operand, factor, error_base(operand.values, exact, factor), output, weights)

    def fast(self) -> "_OperandError":
        """Return the same error with products in bfloat16, if the device supports them and they take less time.

        A cosine stays as it is: its ties between equal codes must differ by no more than float32 rounding noise.
        """
        gains = self.output is None and gains_from_bfloat16(self.factor)
        return replace(self, factor=self.factor.bfloat16()) if gains else self

    def losses(self, errors: Errors, points: Tensor) -> Tensor:
        """Return the losses of points (K, *groups), in float64: (K, *groups), or (K, 2, *groups) sums for a cosine.

        errors: a function from points to the errors that quantization adds to the operand, (K, *operand).
        """
        chunk = max(1, _SLICE // max(self.operand.values.numel(), self.base.numel()))
        return torch.cat([self._score(errors(part, self.factor.dtype)) for part in points.split(chunk)])

    def splits(self) -> "list[_OperandError]":
        """Return the errors of slices of the product, which add up to this one.

        The slices are of the first dimension that is summed over, or of the columns if every row has its own loss. They
        fit in the cache; in larger slices, the work around a product takes longer than the product.
        """
        values, own_dims = self.operand.values, self.operand.format.own_dims
        count = -(-max(values.numel(), self.base.numel()) // _SLICE)
        dim = next((dim for dim in range(values.ndim - 1) if dim not in own_dims), values.ndim - 1)
        size = -(-self.base.shape[dim] // count)

        def split(value: Tensor | None, apart: bool = True) -> Iterable[Any]:
            return value.split(size, dim) if apart and value is not None else repeat(value)

        by_row, shared = dim < values.ndim - 1, dim == values.ndim - 2
        operands = split(values, by_row), split(self.operand.mask, by_row)
        others = split(self.factor, not shared), split(self.base), split(self.output), split(self.weights)
        return [
            _OperandError(replace(self.operand, values=piece, mask=mask), *rest)
            for piece, mask, *rest in zip(*operands, *others, strict=False)
        ]

    def _score(self, delta: Tensor) -> Tensor:
        if self.operand.mask is not None:
            delta.mul_(self.operand.mask)
        error = products(delta, self.factor).to(self.base.dtype).add_(self.base)
        if self.output is not None:
            along = self._total(error * self.output)
            return torch.stack([along, self._total(error.square_())], dim=1)
        error.square_()
        return self._total(error if self.weights is None else error.mul_(self.weights))

    def power(self) -> Tensor:
        """Return the sum of squares of each group's exact output."""
        assert self.output is not None
        return self._total(self.output.square()[None])[0]

    def _total(self, values: Tensor) -> Tensor:
        kept = (0, *(dim + 1 for dim in self.operand.format.own_dims))
        dims = [dim for dim in range(values.ndim - 1) if dim not in kept]
        rows = values.sum(-1).double()  # faster than adding everything in float64
        return rows.sum(dims) if dims else rows


@dataclass(frozen=True)
class _ScaledQuantizers:
    """The quantizers of an operand whose scales are multiples of its first scale s0; a point is the scales (*groups).

    row_splits: a number per group; groups with the same number share a scale. None: each group has its own scale.
    """

    operand: Operand
    choices: ScaleSearch
    row_splits: Tensor | None

    @property
    def is_searched(self) -> bool:
        return not self.operand.is_float and not isinstance(self.operand.format, MaxKeptFormat)

    def start(self) -> Tensor:
        """Return the first scale s0; for a split quantizer it is 1, the whole interval."""
        form, groups, shape = self.operand.format, self.operand.groups(), self.operand.groups_shape
        if self.operand.is_float:
            return groups.new_zeros(shape)
        match form:
            case SplitFormat():
                scale = groups.new_ones(len(groups))
            case MaxKeptFormat():
                scale = groups.amax(1) / (2**form.bits - 1)
            case LogFormat():
                scale = (groups.amax(1) + form.offset).clamp(min=_TINY)
            case _:
                ends = groups.amax(1) if isinstance(form, TwinFormat) else groups.abs().amax(1)
                scale = self._merge(symmetric_scale(ends.clamp(min=_TINY), form.bits), torch.amax)
        return scale.reshape(shape)

    def _merge(self, values: Tensor, function: Callable[..., Tensor]) -> Tensor:
        """Replace the values (..., groups) of groups that share a scale by their sum or maximum."""
        if self.row_splits is None:
            return values
        merged = values.clone()
        for split in self.row_splits.unique():
            rows = self.row_splits == split
            merged[..., rows] = function(values[..., rows], dim=-1, keepdim=True)
        return merged

    def search(self, error: _OperandError, sample: _OperandError | None = None) -> Tensor:
        """Return the candidate that `_rank` puts first in each group.

        sample: the error of a sample, which selects the candidates that the whole error then scores.
        """
        start = self.start()
        if isinstance(self.operand.format, SplitFormat):
            factors = torch.exp2(-torch.arange(_SPLITS, dtype=torch.float64))
        else:
            (low, high), count = self.choices.span, self.choices.candidates
            factors = low + torch.arange(count, dtype=torch.float64) * (high - low) / count
        points = factors.to(start).view(-1, *(1 for _ in start.shape)) * start
        if sample is not None and len(points) > _FINALISTS:
            points = points.gather(0, self._rank(sample.fast(), points)[:_FINALISTS].sort(dim=0).values)
        return points.gather(0, self._rank(error, points)[:1])[0]

    def _rank(self, error: _OperandError, points: Tensor) -> Tensor:
        """Return the indices of points (K, *groups), from the least loss to the largest: (K, *groups).

        Groups that share a scale use the sum of their losses. Equal points stay in their order.
        """
        part_losses = [split.losses(partial(self._errors, split.operand.values), points) for split in error.splits()]
        losses = self._merge(torch.stack(part_losses).sum(0), torch.sum)
        if error.output is None:
            return losses.sort(dim=0, stable=True).indices
        power = self._merge(error.power(), torch.sum)
        along, square = losses.unbind(1)
        return by_cosine(power, along, square, torch.finfo(error.base.dtype).eps)

    def _errors(self, values: Tensor, points: Tensor, dtype: torch.dtype) -> Tensor:
        form = self.operand.format
        if isinstance(form, UniformFormat):
            middle = torch.full_like(points, symmetric_zero_point(form.bits))
            return uniform_errors(values, points, middle, form.bits, form.own_dims, dtype)
        hats = [self.quantizer(point) for point in points]
        return torch.stack([hat.fake_quantize(values) for hat in hats if hat is not None]).sub_(values).to(dtype)

    def quantizer(self, point: Tensor | None) -> Quantizer | None:
        """Return the quantizer of one point, or None without a point or for an operand that stays float."""
        form = self.operand.format
        if point is None or self.operand.is_float:
            return None
        half = symmetric_zero_point(form.bits)
        match form:
            case SplitFormat():
                coarse = torch.ones_like(point) / (half - 1)
                return SplitUniformQuantizer(point / (half - 1), coarse, form.bits, self.choices.released)
            case MaxKeptFormat():
                return UniformQuantizer(point.clamp(min=_TINY), torch.zeros_like(point), form.bits)
            case TwinFormat():
                return TwinUniformQuantizer.of(point, form.bits, form.offset)
            case LogFormat():
                return form.with_base(point, form.q)
        scale = self.operand.reshape(point)[0]
        return UniformQuantizer(scale, torch.full_like(scale, half), form.bits)


def by_cosine(power: Tensor, along: Tensor, square: Tensor, epsilon: float) -> Tensor:
    """Return the indices of outputs O + e, from the least 1 - cosine to the largest: (K, *groups). |e|^2 decides ties.

    A loss ties with the least loss if rounding noise alone may explain the difference. An error of u |O| |e| in `along`
    and an error of u |e|^2 in `square` change a loss by at most 3/2 u |e|^2 / |O + e|^2, to first order: the cosine's
    derivatives are (|e|^2 + along) / (|O| |O + e|^3), with |e|^2 + along = <e, O + e>, and -cosine / (2 |O + e|^2).
    Here u = 4 epsilon, which leaves a margin over the noise of products with equal codes. The last bits of float64, in
    which the cosine is subtracted from 1, are added.

    power: |O|^2, (*groups).
    along, square: <O, e> and |e|^2, (K, *groups), in float64.
    epsilon: the epsilon of the dtype in which their terms were computed.
    """
    length = power + 2 * along + square
    noise = 4 * epsilon * (power + square)
    known = (length > noise) & (power > 0)  # else the output is zero within rounding noise and has no direction
    product = (power * length).where(known, 1.0).sqrt()
    losses = (1 - (power + along) / product).where(known, 1.0)
    wrong = 6 * epsilon * square / torch.maximum(length, noise).clamp(min=torch.finfo(length.dtype).tiny)
    wrong = wrong + 8 * torch.finfo(length.dtype).eps
    first = losses.sort(dim=0, stable=True).indices[:1]
    least = losses.gather(0, first)
    tied = losses <= least + wrong + wrong.gather(0, first)
    order = square.sort(dim=0, stable=True).indices
    return order.gather(0, losses.where(~tied, least).gather(0, order).sort(dim=0, stable=True).indices)
