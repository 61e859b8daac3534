"""The search of symmetric scales by an output's error: EasyQuant, PTQ4ViT, APQ-ViT.

It is one of the four kinds of search in `search.SEARCHES`. The rows of `methods.METHODS` say which method makes which
choices.

With b bits, L = 2**b - 1 and h = 2**(b - 1):

- The scales of symmetric quantizers are s0 m_i, where s0 = max|x| / (h - 1/2) and m_i = low + i (high - low) / n for
  i < n. The operands are searched in turn, each with the other one quantized, in rounds: the right one first, but for
  products of activations the left one (EasyQuant, PTQ4ViT).
- The loss of an output O with the error e = O_hat - O is sum e^2 (squared), 1 - <O, O + e> / (|O| |O + e|) (cosine,
  EasyQuant), or sum H e^2, with H the mean squared gradient of the model's loss with respect to O (Hessian, PTQ4ViT).
  The cosine does not see an output's length, so scales with the same codes are equal to it: among those whose losses
  differ by rounding alone, sum e^2 decides (ours).
- A twin quantizer, after GELU, has s+ = m_i max(x) / (h - 1/2), and its s- spans the minimum.
- A split quantizer, after softmax (PTQ4ViT), has steps of sigma / (h - 1) below sigma and of 1 / (h - 1) from there
  on, with sigma in 2^-i, i = 0 ... 19. A max-kept one (APQ-ViT) has steps of max(x) / L from zero on, so that the
  largest weights of attention stay as they are.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from adalog.choices import ScaleSearch
from adalog.config import Config
from adalog.quantizers import (
    Assignment,
    Fold,
    LogQuantizer,
    Quantizer,
    SplitUniformQuantizer,
    TwinUniformQuantizer,
    UniformQuantizer,
    symmetric_scale,
    symmetric_zero_point,
)
from adalog.search.fused import products, uniform_errors
from adalog.search.objective import Errors, error_base, gains_from_bfloat16
from adalog.search.operand import Operand
from adalog.search.product import Product
from adalog.search.quantiles import coprime

_SPLITS = 20  # powers of two
_TINY = 2.0**-94
_LEAST_ROWS, _LEAST_IMAGES = 1024, 32  # fewer than these are not sampled
_FINALISTS = 16  # this many candidates are left after the sample
_SLICE = 1 << 18  # elements of a product that are scored at once; with their weights they stay in a core's own cache


def needs(search: ScaleSearch) -> frozenset[str]:
    """Weights of the output's errors, for the Hessian's metric, and which rows of a weight share a scale."""
    hessian = {"weights"} if search.metric == "hessian" else set[str]()
    return frozenset(hessian if search.row_scales else hessian | {"row_splits"})


def refuses_fold(search: ScaleSearch, config: Config) -> str:
    """Why this search folds no norm."""
    return "this method folds no norm"


def fold_channels(values: Tensor, bits: int, search: ScaleSearch) -> tuple[Fold, UniformQuantizer | None]:
    """Raise ValueError: `refuses_fold` says why there is no fold."""
    raise ValueError(refuses_fold(search, Config()))


def search_product(product: Product, search: ScaleSearch) -> Assignment:
    """Quantizers of both operands, found in turn by the output's error. The result of the last round stands."""
    left, right, left_first = product.left, product.right, product.of_activations
    firsts, seconds = _Scaled(left, search, None), _Scaled(right, search, product.row_splits)
    first, second = firsts.start(), seconds.start()
    products = [(left, right, product.weights), *_sampled(product, search.rough_stride)]
    for turn, on_left in enumerate((left_first, not left_first) * search.rounds):
        before = first if on_left else second
        if on_left and firsts.is_searched:
            other = seconds.quantizer(None if search.released and product.role == "av" else second)
            whole, *sample = (_OutputError.of(x, w, other, h, search) for x, w, h in products)
            first = firsts.search(whole, *(each.fast() for each in sample))
        elif not on_left and seconds.is_searched:
            other = firsts.quantizer(first)
            whole, *sample = (_OutputError.of(w, x, other, _turned(h), search) for x, w, h in products)
            second = seconds.search(whole, *(each.fast() for each in sample))
        if turn and torch.equal(before, first if on_left else second):
            break  # the other operand was found beside this one, so all later turns find the same again
    return product.assigned(firsts.quantizer(first), seconds.quantizer(second))


def _sampled(product: Product, stride: int) -> Iterator[tuple[Operand, Operand, Tensor | None]]:
    """The product of every n-th image (attention) or row, which rules out most candidates; none if it is small."""
    of_activations, left, right, weights = product.of_activations, product.left, product.right, product.weights
    dim = 0 if of_activations else left.values.ndim - 2
    size = left.values.shape[dim]
    if stride == 1 or size < (_LEAST_IMAGES if of_activations else _LEAST_ROWS):
        return
    take = (slice(None),) * dim + (slice(None, None, coprime(stride, size)),)
    mask = None if left.mask is None else left.mask[take]
    some = replace(left, values=left.values[take].contiguous(), mask=mask)
    other = replace(right, values=right.values[take].contiguous()) if of_activations else right
    yield some, other, None if weights is None else weights[take]


def _turned(weights: Tensor | None) -> Tensor | None:
    return None if weights is None else weights.transpose(-1, -2)


@dataclass(frozen=True)
class _OutputError:
    """The error of a product's output as a function of one operand's candidates, in the error form (see `objective`).

    factor: the other operand, quantized and transposed. base: left @ (factor - exact). output: the exact output, for
    the cosine alone. weights: those of the squared errors, in the shape of the output; None: all are one.
    """

    operand: Operand
    factor: Tensor
    base: Tensor
    output: Tensor | None
    weights: Tensor | None

    @staticmethod
    def of(
        operand: Operand, other: Operand, quantizer: Quantizer | None, weights: Tensor | None, search: ScaleSearch
    ) -> "_OutputError":
        exact, factor = (value.transpose(-1, -2) for value in (other.values, other.quantized(quantizer)))
        output = operand.values @ exact if search.metric == "cosine" else None
        return _OutputError(operand, factor, error_base(operand.values, exact, factor), output, weights)

    def fast(self) -> "_OutputError":
        """The same error with products in bfloat16, where the device has them and they take less time.

        A cosine is left as it is: ties between equal codes are told from rounding there.
        """
        gains = self.output is None and gains_from_bfloat16(self.factor)
        return replace(self, factor=self.factor.bfloat16()) if gains else self

    def losses(self, errors: Errors, points: Tensor) -> Tensor:
        """The losses of points (K, *groups): float64, (K, *groups), or (K, 2, *groups) of the sums that a cosine needs.

        errors: a function from points to what quantizing adds to the operand, (K, *operand).
        """
        chunk = max(1, _SLICE // max(self.operand.values.numel(), self.base.numel()))
        return torch.cat([self._score(errors(some, self.factor.dtype)) for some in points.split(chunk)])

    def splits(self) -> "list[_OutputError]":
        """The errors of slices of the product, which add up to this one.

        The slices are of the first dimension that is summed over, or of the columns where every row has a loss of its
        own. They fit in the cache: beyond it, the work around a product takes a multiple of the product's time.
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
            _OutputError(replace(self.operand, values=some, mask=mask), *rest)
            for some, mask, *rest in zip(*operands, *others, strict=False)
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
        """The sum of squares of the exact output of each group."""
        assert self.output is not None
        return self._total(self.output.square()[None])[0]

    def _total(self, values: Tensor) -> Tensor:
        kept = (0, *(dim + 1 for dim in self.operand.format.own_dims))
        dims = [dim for dim in range(values.ndim - 1) if dim not in kept]
        rows = values.sum(-1).double()  # several times as fast as adding all up in float64
        return rows.sum(dims) if dims else rows


@dataclass(frozen=True)
class _Scaled:
    """The quantizers of an operand whose scales are multiples of its first scale s0; a point is the scales (*groups).

    row_splits: which of the groups share a scale; None: each group has its own.
    """

    operand: Operand
    choices: ScaleSearch
    row_splits: Tensor | None

    @property
    def is_searched(self) -> bool:
        return not self.operand.is_float and self.operand.format.unit != "max-kept"

    def start(self) -> Tensor:
        """The first scale s0; for a split quantizer, the whole interval."""
        form, groups = self.operand.format, self.operand.groups()
        shape = [self.operand.values.shape[dim] for dim in form.own_dims]
        if form.unit == "split":
            return groups.new_ones(shape)
        if form.unit == "max-kept":
            return groups.amax(1).reshape(shape) / (2**form.bits - 1)
        if self.operand.is_float:
            return groups.new_zeros(shape)
        if form.log2_base is not None:
            return (groups.amax(1) + form.offset).clamp(min=_TINY).reshape(shape)
        ends = groups.amax(1) if form.twin else groups.abs().amax(1)
        scale = symmetric_scale(ends.clamp(min=_TINY), form.bits)
        return self._merged(scale, torch.amax).reshape(shape)

    def _merged(self, values: Tensor, function: Callable[..., Tensor]) -> Tensor:
        """The values (..., groups), in which all groups that share a scale get their sum or maximum."""
        if self.row_splits is None:
            return values
        merged = values.clone()
        for split in self.row_splits.unique():
            rows = self.row_splits == split
            merged[..., rows] = function(values[..., rows], dim=-1, keepdim=True)
        return merged

    def search(self, error: _OutputError, rough: _OutputError | None = None) -> Tensor:
        """The candidate that `_ranked` puts first in each group.

        rough: the error of a sample, which chooses the candidates that are scored by the whole error.
        """
        start = self.start()
        if self.operand.format.unit == "split":
            factors = torch.exp2(-torch.arange(_SPLITS, dtype=torch.float64))
        else:
            low, high = self.choices.span
            count = self.choices.candidates
            factors = low + torch.arange(count, dtype=torch.float64) * (high - low) / count
        points = factors.to(start).view(-1, *(1 for _ in start.shape)) * start
        if rough is not None and len(points) > _FINALISTS:
            points = points.gather(0, self._ranked(rough, points)[:_FINALISTS].sort(dim=0).values)
        return points.gather(0, self._ranked(error, points)[:1])[0]

    def _ranked(self, error: _OutputError, points: Tensor) -> Tensor:
        """The indices of points (K, *groups) from the least loss to the largest: (K, *groups).

        Groups that share a scale have the sum of their losses. Equal points stay in their order.
        """
        each = [split.losses(partial(self._errors, split.operand.values), points) for split in error.splits()]
        losses = self._merged(torch.stack(each).sum(0), torch.sum)
        if error.output is None:
            return losses.sort(dim=0, stable=True).indices
        power = self._merged(error.power(), torch.sum)
        along, square = losses.unbind(1)
        return by_cosine(power, along, square, torch.finfo(error.base.dtype).eps)

    def _errors(self, values: Tensor, points: Tensor, dtype: torch.dtype) -> Tensor:
        form = self.operand.format
        if form.is_uniform:
            middle = torch.full_like(points, symmetric_zero_point(form.bits))
            return uniform_errors(values, points, middle, form.bits, form.own_dims, dtype)
        hats = [self.quantizer(point) for point in points]
        return torch.stack([hat.fake_quantize(values) for hat in hats if hat is not None]).sub_(values).to(dtype)

    def quantizer(self, point: Tensor | None) -> Quantizer | None:
        """The quantizer of one point; None for no point, or where the operand stays float."""
        form = self.operand.format
        if point is None or self.operand.is_float:
            return None
        half = symmetric_zero_point(form.bits)
        if form.unit == "split":
            return SplitUniformQuantizer(
                point / (half - 1), torch.ones_like(point) / (half - 1), form.bits, self.choices.released
            )
        if form.unit == "max-kept":
            return UniformQuantizer(point.clamp(min=_TINY), torch.zeros_like(point), form.bits)
        if form.twin:
            return TwinUniformQuantizer.of(point, form.bits, form.offset)
        if form.log2_base is not None:
            q, r = form.log2_base
            return LogQuantizer(point, q, r, form.bits, form.beyond, form.rounding, form.table, offset=form.offset)
        scale = self.operand.shaped(point)[0]
        return UniformQuantizer(scale, torch.full_like(scale, half), form.bits)


def by_cosine(power: Tensor, along: Tensor, square: Tensor, epsilon: float) -> Tensor:
    """The indices of outputs O + e from the least 1 - cosine to the largest, (K, *groups); |e|^2 decides ties.

    power: |O|^2, (*groups). along, square: <O, e> and |e|^2, (K, *groups), in float64. epsilon: that of the type in
    which their terms were computed. A tie is a loss that exceeds the least one by rounding alone. An error of
    u |O| |e| in along and one of u |e|^2 in square change a loss by at most 3/2 u |e|^2 / |O + e|^2, in first order:
    the cosine's derivatives are (|e|^2 + along) / (|O| |O + e|^3), with |e|^2 + along = <e, O + e>, and
    -cosine / (2 |O + e|^2). u = 4 epsilon: products of up to 1,536 terms with equal codes needed at most 1.4 epsilon.
    To this come the last bits of float64, in which the cosine is subtracted from 1.
    """
    length = power + 2 * along + square
    noise = 4 * epsilon * (power + square)
    known = (length > noise) & (power > 0)  # else an output is zero as far as rounding can tell: it has no direction
    product = (power * length).where(known, 1.0).sqrt()
    losses = (1 - (power + along) / product).where(known, 1.0)
    wrong = 6 * epsilon * square / torch.maximum(length, noise).clamp(min=torch.finfo(length.dtype).tiny)
    wrong = wrong + 8 * torch.finfo(length.dtype).eps
    first = losses.sort(dim=0, stable=True).indices[:1]
    least = losses.gather(0, first)
    tied = losses <= least + wrong + wrong.gather(0, first)
    order = square.sort(dim=0, stable=True).indices
    return order.gather(0, losses.where(~tied, least).gather(0, order).sort(dim=0, stable=True).indices)
