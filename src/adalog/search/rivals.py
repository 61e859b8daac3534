"""The searches of the paper's rivals, over shared parts: ranges by a tensor's own values, scales by an output's error.

`search_ranges`: minimum and maximum, percentiles, FQ-ViT, RepQ-ViT. `search_scales`: EasyQuant, PTQ4ViT, APQ-ViT. Which
method takes which choices is a row of `config.METHODS`.

With R rounding halves to even, b bits, L = 2**b - 1 and h = 2**(b - 1):

- Range (lo, hi) of a group of values x at the share p: hi = Q_p(x), lo = Q_(1-p)(x), by linear interpolation.
  Asymmetric s = (hi - lo) / L and z = R(-lo / s), the range widened to hold zero; symmetric
  s = max(|lo|, |hi|) / (h - 1/2) and z = h. A logarithm's scale is hi. Of several p the one of the least mean
  (x - x_hat)^2 (RepQ-ViT).
- Scales s0 m_i, s0 = max|x| / (h - 1/2), m_i = low + i (high - low) / n for i < n, of symmetric quantizers: those of
  the right operand with the left one at its own, then the left one's, and again (EasyQuant; PTQ4ViT).
- Metrics of an output O and its error e = O_hat - O: squared, sum e^2; cosine, 1 - <O, O + e> / (|O| |O + e|)
  (EasyQuant); Hessian, sum H e^2 with H the mean squared gradient of the loss by O (PTQ4ViT).
- After GELU, twin: s+ = m_i max(x) / (h - 1/2), s- spans the minimum. After softmax, split (PTQ4ViT): steps of
  sigma / (h - 1) below sigma, of 1 / (h - 1) from there on, sigma in 2^-i, i = 0 ... 19; or max-kept (APQ-ViT): steps
  of max(x) / L from zero on, so that the largest weights of attention stay as they are.
- A norm's channels c: their own (s_c, z_c) are replaced by the means of both (RepQ-ViT, `reparam.shared_scale`); or,
  with s = (max - min) / L / 2^K of the whole tensor and its z, by 2^a_c s with a_c in 0 ... K of the least error
  (FQ-ViT).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from adalog.config import RangeSearch, ScaleSearch
from adalog.graph.reparam import shared_scale
from adalog.quantizers import (
    LogQuantizer,
    Quantizer,
    SplitUniformQuantizer,
    TwinUniformQuantizer,
    UniformQuantizer,
    bounds_to_uniform,
    symmetric_zero_point,
    uniform_fake_quantize,
)
from adalog.search.fused import uniform_errors
from adalog.search.objective import Errors, coprime
from adalog.search.product import Format, Found, Operand, fake_quantize

_SPLITS = 20  # powers of two
_QUANTILE_LIMIT = 1 << 24  # elements that torch.quantile takes
_TINY = 2.0**-94
_LEAST_ROWS, _LEAST_IMAGES = 1024, 32  # of which some are sampled
_KEPT = 16  # candidates that a sample leaves
_PART = 1 << 18  # elements of a product that are scored at once: they stay in a core's own cache, with their weights

# --- ranges ----------------------------------------------------------------------------------------------------------


def search_ranges(
    role: str, left: Operand, right: Operand, search: RangeSearch, shared: UniformQuantizer | None = None
) -> Found:
    """Quantizers of left @ right^T (see `calibrate.search_product`), each by its own values.

    role: as `sites.Site.role`. shared: the left quantizer where a norm's fold has decided it.
    """
    first: Quantizer | None = shared
    if left.is_float:
        first = None
    elif first is None and search.unit_softmax and role == "av" and left.format.log2_base is not None:
        first = left.quantizer(left.values.new_ones(1))
    elif first is None:
        first = own_range(left, search)
    symmetric = search.symmetric_weights and role in ("linear", "conv")
    return Found.judged(left, right, first, None if right.is_float else own_range(right, search, symmetric=symmetric))


def own_range(operand: Operand, search: RangeSearch, *, symmetric: bool = False) -> Quantizer:
    """The quantizer of each group's range, at the share of the least own error; of equal ones the first."""
    shares = search.percentiles
    found = quantiles(operand.groups(), [*shares, *(1 - share for share in shares)])
    best, *others = (
        _ends(operand, low, high, symmetric)
        for high, low in zip(found[: len(shares)], found[len(shares) :], strict=True)
    )
    least = _own_error(operand, best) if others else None
    for point in others:
        error = _own_error(operand, point)
        assert least is not None
        best, least = torch.where(error < least, point, best), torch.minimum(error, least)
    quantizer = operand.quantizer(best)
    assert quantizer is not None
    return quantizer


def _ends(operand: Operand, low: Tensor, high: Tensor, symmetric: bool) -> Tensor:
    """The point (P, *groups) of `Operand.quantizer` whose range has these ends, (G,)."""
    form = operand.format
    shape = [operand.values.shape[dim] for dim in form.keep]
    low, high = low.reshape(shape), high.reshape(shape)
    if not form.is_uniform:
        return (high + (0.0 if form.twin else form.offset))[None]
    if symmetric:
        half = symmetric_zero_point(form.bits)
        scale = torch.maximum(high.abs(), low.abs()) / (half - 0.5)
        low, high = -half * scale, (half - 1) * scale
    return torch.stack([low, high])


def _own_error(operand: Operand, point: Tensor) -> Tensor:
    """The mean squared error of each group's values: (*groups)."""
    quantizer = operand.quantizer(point)
    assert quantizer is not None
    error = replace(operand, values=(quantizer.fake_quantize(operand.values) - operand.values).square_())
    return error.groups().mean(dim=1).reshape(point.shape[1:])


def quantiles(groups: Tensor, shares: Sequence[float]) -> list[Tensor]:
    """Of each row of (G, T), by linear interpolation: (G,) for each share.

    The rank is computed in the values' own type, as torch.quantile does, but for rows that are too long for it: earlier
    sites' codes follow such small differences, and so does all behind them.
    """
    if set(shares) <= {0.0, 1.0}:
        ends = {0.0: groups.amin(dim=1), 1.0: groups.amax(dim=1)}
        return [ends[share] for share in shares]
    if groups.shape[1] > _QUANTILE_LIMIT:
        ordered = groups.sort(dim=1).values
        found = []
        for share in shares:
            rank = share * (groups.shape[1] - 1)
            below, above = (ordered[:, place] for place in (int(rank), min(int(rank) + 1, groups.shape[1] - 1)))
            found.append(torch.lerp(below, above, rank - int(rank)))
        return found
    rows = max(1, _QUANTILE_LIMIT // groups.shape[1])
    parts = [part.quantile(part.new_tensor(shares), dim=1) for part in groups.split(rows)]
    return list(torch.cat(parts, dim=1))


def share_channels(values: Tensor, bits: int, search: RangeSearch) -> tuple[Tensor, Tensor, UniformQuantizer]:
    """(ratio, beta), each (C,), of a norm's fold, and the quantizer that its channels then share. values: (T, C)."""
    if search.share == "power-of-two":
        return _doubled_channels(values, bits, search)
    scale, zero_point = own_channels(values, bits, search)
    ratio, beta = shared_scale(scale, zero_point, rounds=search.round_zero_point)
    shared = zero_point.mean()
    return ratio, beta, UniformQuantizer(scale.mean(), shared.round() if search.round_zero_point else shared, bits)


def own_channels(values: Tensor, bits: int, search: RangeSearch) -> tuple[Tensor, Tensor]:
    """(scale, zero_point), each (C,), of a uniform quantizer a channel."""
    quantizer = own_range(Operand(values, Format(bits, keep=(1,))), search)
    assert isinstance(quantizer, UniformQuantizer)
    return quantizer.scale.flatten(), quantizer.zero_point.flatten()


def _doubled_channels(values: Tensor, bits: int, search: RangeSearch) -> tuple[Tensor, Tensor, UniformQuantizer]:
    """FQ-ViT's power-of-two factors: exact in the folded weights, since they only change exponents."""
    scale, zero_point = bounds_to_uniform(values.min(), values.max(), bits)
    scale = scale / 2**search.powers
    errors = [
        (uniform_fake_quantize(values, scale * 2**power, zero_point, bits) - values).square_().sum(0)
        for power in range(search.powers + 1)
    ]
    ratio = torch.exp2(_first_least(torch.stack(errors)).to(values.dtype))
    return ratio, torch.zeros_like(ratio), UniformQuantizer(scale, zero_point, bits)


# --- scales ----------------------------------------------------------------------------------------------------------


def search_scales(
    role: str,
    left: Operand,
    right: Operand,
    search: ScaleSearch,
    weights: Tensor | None = None,
    parts: Tensor | None = None,
) -> Found:
    """Quantizers of left @ right^T (see `calibrate.search_product`), by the output's error.

    role: as `sites.Site.role`. weights: of the output's squared errors, in its shape (*batch, T, O); None: all one.
    parts: (O,), which rows of a linear's weight have one scale; None: each its own. The last round stands.
    """
    firsts, seconds = _Scaled(left, search, None), _Scaled(right, search, parts)
    first, second = firsts.start(), seconds.start()
    left_first = role in ("qk", "av")
    products = [(left, right, weights), *_sampled(left_first, left, right, weights, search.rough_stride)]
    for _ in range(search.rounds):
        before = first, second
        for on_left in (left_first, not left_first):
            if on_left and firsts.is_searched:
                other = seconds.quantizer(None if search.released and role == "av" else second)
                first = firsts.search(*(_OutputError.of(x, w, other, h, search) for x, w, h in products))
            elif not on_left and seconds.is_searched:
                other = firsts.quantizer(first)
                second = seconds.search(*(_OutputError.of(w, x, other, _turned(h), search) for x, w, h in products))
        if all(torch.equal(now, then) for now, then in zip((first, second), before, strict=True)):
            break
    return Found.judged(left, right, firsts.quantizer(first), seconds.quantizer(second))


_Product = tuple[Operand, Operand, Tensor | None]


def _sampled(
    of_activations: bool, left: Operand, right: Operand, weights: Tensor | None, stride: int
) -> Iterator[_Product]:
    """The product of every n-th image's (of attention) or row's values, to tell hopeless candidates; none if small."""
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
    """What a product's output loses by an operand's candidates, in the error form (see `objective`).

    factor: the other operand as it is quantized, transposed; base: left @ (factor - exact); output: the exact one, for
    the cosine alone.
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
        exact, factor = (value.transpose(-1, -2) for value in (other.values, fake_quantize(other, quantizer)))
        output = operand.values @ exact if search.metric == "cosine" else None
        return _OutputError(operand, factor, operand.values @ (factor - exact), output, weights)

    def losses(self, errors: Errors, points: Tensor) -> Tensor:
        """points (K, *groups) -> float64 (K, *groups), or (K, 2, *groups) of what the cosine is made of.

        errors: points -> what quantizing adds to the operand, (K, *operand).
        """
        chunk = max(1, _PART // max(self.operand.values.numel(), self.base.numel()))
        return torch.cat([self._score(errors(part, self.base.dtype)) for part in points.split(chunk)])

    def parts(self) -> "list[_OutputError]":
        """The same as a sum: of slices of the product's columns where its rows have losses of their own, else of the
        first dimension that is summed over: beyond the cache, what surrounds a product takes a multiple of its time."""
        values, keep = self.operand.values, self.operand.format.keep
        count = -(-max(values.numel(), self.base.numel()) // _PART)
        dim = next((dim for dim in range(values.ndim - 1) if dim not in keep), values.ndim - 1)
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
        error = (delta @ self.factor).add_(self.base)
        if self.output is not None:
            along = self._total(error * self.output)
            return torch.stack([along, self._total(error.square_())], dim=1)
        error.square_()
        return self._total(error if self.weights is None else error.mul_(self.weights))

    def power(self) -> Tensor:
        """The sum of squares of each group's exact output."""
        assert self.output is not None
        return self._total(self.output.square()[None])[0]

    def _total(self, values: Tensor) -> Tensor:
        kept = (0, *(dim + 1 for dim in self.operand.format.keep))
        dims = [dim for dim in range(values.ndim - 1) if dim not in kept]
        rows = values.sum(-1).double()  # which is several times as fast as to add up all in float64
        return rows.sum(dims) if dims else rows


@dataclass(frozen=True)
class _Scaled:
    """An operand's quantizers with scales that are multiples of where its values end; a point is the scales (*groups).

    parts: which of the groups have one scale; None: each its own.
    """

    operand: Operand
    choices: ScaleSearch
    parts: Tensor | None

    @property
    def is_searched(self) -> bool:
        return not self.operand.is_float and self.operand.format.unit != "max-kept"

    def start(self) -> Tensor:
        """s0; after softmax, where it is split, the whole interval."""
        form, groups = self.operand.format, self.operand.groups()
        shape = [self.operand.values.shape[dim] for dim in form.keep]
        if form.unit == "split":
            return groups.new_ones(shape)
        if form.unit == "max-kept":
            return groups.amax(1).reshape(shape) / (2**form.bits - 1)
        if self.operand.is_float:
            return groups.new_zeros(shape)
        if form.log2_base is not None:
            return (groups.amax(1) + form.offset).clamp(min=_TINY).reshape(shape)
        ends = groups.amax(1) if form.twin else groups.abs().amax(1)
        scale = ends.clamp(min=_TINY) / (symmetric_zero_point(form.bits) - 0.5)
        return self._merged(scale, torch.amax).reshape(shape)

    def _merged(self, values: Tensor, function: Callable[..., Tensor]) -> Tensor:
        """(..., groups) with those of one part put together by a sum or maximum, and given back to each."""
        if self.parts is None:
            return values
        merged = values.clone()
        for part in self.parts.unique():
            rows = self.parts == part
            merged[..., rows] = function(values[..., rows], dim=-1, keepdim=True)
        return merged

    def search(self, error: _OutputError, rough: _OutputError | None = None) -> Tensor:
        """The candidate of the least loss in each group; of equal ones the first.

        rough: the error of a sample, which leaves the candidates that are scored by the whole one.
        """
        start = self.start()
        if self.operand.format.unit == "split":
            factors = torch.exp2(-torch.arange(_SPLITS, dtype=torch.float64))
        else:
            low, high = self.choices.span
            count = self.choices.candidates
            factors = low + torch.arange(count, dtype=torch.float64) * (high - low) / count
        points = factors.to(start).view(-1, *(1 for _ in start.shape)) * start
        if rough is not None and len(points) > _KEPT:
            order = self._losses(rough, points).sort(dim=0, stable=True).indices[:_KEPT]
            points = points.gather(0, order.sort(dim=0).values)
        return points.gather(0, _first_least(self._losses(error, points))[None])[0]

    def _losses(self, error: _OutputError, points: Tensor) -> Tensor:
        """points (K, *groups) -> (K, *groups), those of one part together."""
        each = [part.losses(partial(self._errors, part.operand.values), points) for part in error.parts()]
        losses = self._merged(torch.stack(each).sum(0), torch.sum)
        if error.output is None:
            return losses
        power = self._merged(error.power(), torch.sum)
        along, square = losses.unbind(1)
        length = (power * (power + 2 * along + square).clamp(min=0)).sqrt()
        return 1 - (power + along) / length.clamp(min=torch.finfo(length.dtype).tiny)

    def _errors(self, values: Tensor, points: Tensor, dtype: torch.dtype) -> Tensor:
        form = self.operand.format
        if form.is_uniform:
            middle = torch.full_like(points, symmetric_zero_point(form.bits))
            return uniform_errors(values, points, middle, form.bits, form.keep, dtype)
        hats = [self.quantizer(point) for point in points]
        return torch.stack([hat.fake_quantize(values) for hat in hats if hat is not None]).sub_(values).to(dtype)

    def quantizer(self, point: Tensor | None) -> Quantizer | None:
        """Of one point; None for none, or where the operand stays float."""
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
            return TwinUniformQuantizer(point, torch.full_like(point, form.offset / half), form.bits)
        if form.log2_base is not None:
            q, r = form.log2_base
            return LogQuantizer(point, q, r, form.bits, form.beyond, form.rounding, form.table, offset=form.offset)
        scale = self.operand.spread(point)[0]
        return UniformQuantizer(scale, torch.full_like(scale, half), form.bits)


def _first_least(losses: Tensor) -> Tensor:
    """The index of the least loss along the first dimension, the first one of equals: (*groups)."""
    return losses.sort(dim=0, stable=True).indices[0]
