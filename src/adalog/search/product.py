"""The search of one site's quantizers on recorded operands (Sec. 3.4): what runs once per site, method and bits."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from adalog.config import Config, PostSoftmax, Search, Tables
from adalog.quantizers import (
    FLOAT_BITS,
    Beyond,
    LogQuantizer,
    Quantizer,
    Rounding,
    TwinUniformQuantizer,
    UniformQuantizer,
    at_least_float32,
    bounds_to_uniform,
    log_levels,
    log_thresholds,
    most_headroom,
    symmetric_zero_point,
)
from adalog.search.fused import spread, table_errors, uniform_errors
from adalog.search.objective import Errors, OwnError, ProductError, quantiles, thinned
from adalog.search.strategies import Loss, alternating, brute_force, fpcs, grid_spacing, rescaled, walk

# Of the table that codes search candidates: octaves below the largest value, and mantissa bits that are left out of it.
_OCTAVES, _DROPPED_BITS = 20, 13
# Of the error that a round takes away, so that another one is worth its time.
_LEAST_GAIN = 1e-3
# Neighbours of a parent in FPCS.
_CHILDREN = 8
# Outputs of a product are judged so many at a time.
_OUTPUTS = 1 << 20
# Of the choice of an integer table: how much the output's error may rise for 8 bits, and what bases and scales around
# the float table's are tried.
_RISE = 1.03
_FACTORS = (0.7, 0.8, 0.87, 0.94, 1.06, 1.13, 1.25, 1.4)


@dataclass(frozen=True)
class Format:
    """The kind of quantizer an operand gets; its parameters are what the search finds.

    keep: the operand's dimensions, in the orientation of `Operand`, that have parameters of their own.
    log2_base: None for uniform; the fixed q / r as (q, r), or (0, r) where q is searched in q_min ... q_max.
    twin: the negative values, down to -offset, have half of the codes to themselves. unit: of the ways that rivals
    have for values in [0, 1], the one taken, if any.
    """

    bits: int
    keep: tuple[int, ...] = ()
    log2_base: tuple[int, int] | None = None
    twin: bool = False
    q_min: int = 1
    q_max: int = 137
    table: bool = True
    beyond: Beyond = "zero-coded"
    rounding: Rounding = "nearest"
    offset: float = 0.0
    unit: Literal["", "split", "max-kept"] = ""

    @property
    def is_uniform(self) -> bool:
        return self.log2_base is None and not self.twin and not self.unit

    @staticmethod
    def power_law(kind: PostSoftmax, bits: int, config: Config, offset: float) -> "Format":
        """log2 and log-sqrt2 keep exact powers (their papers' float scale), AdaLog the rounded tables of Eq. 9."""
        if kind in ("split", "max-kept"):
            return Format(bits, unit=kind)
        if kind in ("uniform", "twin") or bits == FLOAT_BITS:
            return Format(bits, twin=kind == "twin", offset=offset)
        base = {"log2": (1, 1), "log-sqrt2": (1, 2), "adalog": (0, config.r)}[kind]
        return Format(
            bits,
            log2_base=base,
            q_min=config.q_min,
            q_max=config.q_max,
            table=kind == "adalog",
            beyond=config.beyond,
            rounding=config.rounding,
            offset=offset,
        )


@dataclass(frozen=True)
class Operand:
    """One side of a product, rows last but one: activations (T, I), weights (O, I), heads (B, H, N, D).

    mask: 1 where a value is quantized, 0 where it is a convolution's zero padding. alike: whether the rows are
    tokens, of which some can stand for all, and not channels.
    """

    values: Tensor
    format: Format
    mask: Tensor | None = None
    alike: bool = True

    def groups(self) -> Tensor:
        """The operand as (G, T): one row for each set of parameters."""
        keep = self.format.keep
        rest = [dim for dim in range(self.values.ndim) if dim not in keep]
        size = math.prod(self.values.shape[dim] for dim in keep)
        return self.values.permute(*keep, *rest).reshape(size, -1)

    def spread(self, parameters: Tensor) -> Tensor:
        """(k, *groups) -> (k, ...), shaped to broadcast against k candidates of the values."""
        return spread(parameters, self.values.shape, self.format.keep)

    @property
    def has_own_rows(self) -> bool:
        """Whether each row has parameters of its own, as those of a weight do."""
        return self.values.ndim - 2 in self.format.keep

    @property
    def is_float(self) -> bool:
        return self.format.bits == FLOAT_BITS

    def quantizer(self, point: Tensor | None) -> Quantizer | None:
        """The quantizer of one point (P, *groups) of the search space, its parameters shaped against the values."""
        form = self.format
        if point is None:
            return None
        if form.twin:
            return self._twin(point[:1]).map(lambda scale: scale.reshape(()))
        if form.log2_base is None:
            scale, zero_point = bounds_to_uniform(point[0], point[1], form.bits)
            return UniformQuantizer(self.spread(scale)[0], self.spread(zero_point)[0], form.bits)
        q, scale = _base_and_scale(point, form)
        return LogQuantizer(scale, q, self.radix, form.bits, form.beyond, form.rounding, form.table, offset=form.offset)

    def errors(self, values: Tensor) -> Errors:
        """What quantizing under k points at once adds to the values, or to some of their rows: (k, *values.shape).

        Logarithmic codes come from a table over the leading bits of the values, so that a candidate costs one look-up a
        value. A value within 0.1 % of a threshold may land on its other side; `search_product` exchanges a point for
        another only by the exact loss.
        """
        form = self.format
        if form.twin:
            return lambda points, dtype: self._twin(points[:, 0]).fake_quantize(values[None]).sub_(values).to(dtype)
        if form.log2_base is None:

            def uniform(points: Tensor, dtype: torch.dtype) -> Tensor:
                scale, zero_point = bounds_to_uniform(points[:, 0], points[:, 1], form.bits)
                return uniform_errors(values, scale, zero_point, form.bits, form.keep, dtype)

            return uniform

        lifted = (values + form.offset).float()
        top = lifted.max().clamp(min=torch.finfo(torch.float32).tiny)
        lifted = lifted.clamp_(min=float(top) * 2.0**-_OCTAVES)
        first = int((top * 2.0**-_OCTAVES).view(torch.int32)) >> _DROPPED_BITS
        last = int(top.view(torch.int32)) >> _DROPPED_BITS
        edges = (torch.arange(first, last + 2, dtype=torch.int32) << _DROPPED_BITS).view(torch.float32).double()
        middles = ((edges[:-1] + edges[1:]) / 2).contiguous()
        bins = (lifted.view(torch.int32) >> _DROPPED_BITS).sub_(first).reshape(-1)

        def logarithmic(points: Tensor, dtype: torch.dtype) -> Tensor:
            tables = []
            for point in points:
                levels, cuts = self.steps(point)
                ends = torch.searchsorted(middles, cuts + form.offset, right=True)  # the first bin above each threshold
                counts = torch.diff(ends, prepend=ends.new_zeros(1), append=ends.new_full((1,), len(middles)))
                tables.append(levels.to(values.dtype).repeat_interleave(counts).to(values.device))
            return table_errors(values, bins, tables, dtype)

        return logarithmic

    def steps(self, point: Tensor) -> tuple[Tensor, Tensor]:
        """The levels of one logarithmic or twin point, and the thresholds between them, ascending: float64, CPU."""
        form = self.format
        if form.twin:
            half = symmetric_zero_point(form.bits)
            signed = torch.arange(-half, half, dtype=torch.float64)
            upper = float(point[0]) / (half - 1)
            levels = signed.clamp(min=0) * upper + signed.clamp(max=0) * (form.offset / half)
            return levels, (levels[1:] + levels[:-1]) / 2
        q, scale = _base_and_scale(point, form)
        factor, beyond, table = float(scale), form.beyond, form.table
        levels = log_levels(q, self.radix, form.bits, beyond=beyond, table=table)
        cuts = log_thresholds(q, self.radix, form.bits, beyond=beyond, rounding=form.rounding, table=table)
        return levels.flip(0) * factor - form.offset, cuts.flip(0) * factor - form.offset

    def _twin(self, upper: Tensor) -> TwinUniformQuantizer:
        """upper: (k, ), the largest value of each of k quantizers; the negative scale spans the offset."""
        half = symmetric_zero_point(self.format.bits)
        scale = self.spread((upper / (half - 1)).clamp(min=1e-12))
        return TwinUniformQuantizer(scale, torch.full_like(scale, self.format.offset / half), self.format.bits)

    @property
    def radix(self) -> int:
        """r, the denominator of log2(base)."""
        assert self.format.log2_base is not None
        return self.format.log2_base[1]

    def box(self, reach: float) -> tuple[Tensor, Tensor]:
        """(low, high), each (P, *groups).

        Uniform: (lower, upper) bounds between the percentiles 0 and reach, 1 - reach and 1 (Algorithm 1, lines 1-2).
        Logarithmic: log2 q over all of q_min ... q_max, and the scale between the percentiles 0.9 and 1 of the lifted
        values. Twin: the largest positive value, likewise.
        """
        form = self.format
        shape = [self.values.shape[dim] for dim in form.keep]
        sample = self.groups()
        if form.is_uniform:
            own = quantiles(sample, (0.0, reach, 1 - reach, 1.0))
            corners = [value.to(self.values.dtype).reshape(shape) for value in own]
            return torch.stack([corners[0], corners[2]]), torch.stack([corners[1], corners[3]])
        lift = 0.0 if form.twin else form.offset
        some, top = thinned(sample), sample.max() + lift
        lifted = some[some + lift > 0] + lift
        if not len(lifted):
            lifted = top = sample.new_ones(1)
        low, high = quantiles(lifted[None], (0.9,))[0].reshape(shape), top.reshape(shape)
        low = torch.minimum(low, high * 0.5)
        if form.log2_base is None or form.log2_base[0]:
            return low[None], high[None]
        ones = torch.ones_like(low)
        ends = (math.log2(form.q_min), math.log2(form.q_max))
        return torch.stack([ones * ends[0], low]), torch.stack([ones * ends[1], high])


def _base_and_scale(point: Tensor, form: Format) -> tuple[int, Tensor]:
    assert form.log2_base is not None
    if form.log2_base[0]:
        return form.log2_base[0], point[0].clamp(min=1e-12)
    q = round(2 ** float(point[0]))
    return min(max(q, form.q_min), form.q_max), point[1].clamp(min=1e-12)


def minimise(
    loss: Loss,
    operand: Operand,
    search: Search,
    incumbent: Tensor | None = None,
    rough: Loss | None = None,
    *,
    nearby: bool = False,
) -> Tensor:
    """The best point of an operand's box by the configured strategy. nearby: FPCS looks around the incumbent alone."""
    low, high = operand.box(search.reach)
    count = math.prod(search.init)
    if search.strategy == "brute-force":
        return brute_force(loss, low, high, sizes=(count,) * len(low), incumbent=incumbent)[0]
    if search.strategy == "alternating":
        sizes = (count // len(low),) * len(low)
        return alternating(loss, low, high, sizes=sizes, incumbent=incumbent)[0]
    init: tuple[int, ...] = search.init
    steps = search.steps
    if len(low) == 1:  # one hyperparameter: its spacing shrinks by as much in fewer, larger steps
        init, steps = (count,), math.ceil(search.steps / math.log2(_CHILDREN))
    if nearby and incumbent is not None:
        spacing = grid_spacing(low, high, init) / 2**search.steps
        point, _ = walk(loss, incumbent, spacing, children=_CHILDREN, moves=max(4, search.steps))
    else:
        keep = search.keep
        point, _ = fpcs(
            loss, low, high, init=init, keep=keep, children=_CHILDREN, steps=steps, incumbent=incumbent, rough=rough
        )
    scales = [True] * len(low) if operand.format.is_uniform else [False] * (len(low) - 1) + [True]
    return rescaled(loss, point, scales, rough=rough)[0] if search.rough_rows else point


@dataclass(frozen=True)
class Found:
    """The quantizers of a product's operands (None: float), and its output's SQNR [dB] on the calibration images."""

    left: Quantizer | None
    right: Quantizer | None
    sqnr: float

    @staticmethod
    def judged(left: Operand, right: Operand, first: Quantizer | None, second: Quantizer | None) -> "Found":
        """These quantizers with the signal-to-noise ratio that they leave of left @ right^T."""
        signal, noise = output_power(left, right, first, second)
        decibels = 10 * math.log10(signal / noise) if signal and noise else -math.inf if noise else math.inf
        return Found(first, second, decibels)


def output_power(
    left: Operand, right: Operand, first: Quantizer | None, second: Quantizer | None
) -> tuple[float, float]:
    """The sums of squares of left @ right^T and of its error under these quantizers."""
    signal = noise = 0.0
    for x, x_hat, w, w_hat in _operand_parts(left, right, first, second):
        error = _output_error(x, x_hat, w, w_hat)
        signal += float((x @ w.transpose(-1, -2)).square().sum(dtype=torch.float64))
        noise += float(error.square().sum(dtype=torch.float64))
    return signal, noise


def refitted(left: Operand, right: Operand, first: Quantizer | None, second: UniformQuantizer) -> UniformQuantizer:
    """A weight's quantizer with the scale a row that fits its codes best: the output's error is quadratic in it.

    The codes stay as they are: no row is rounded again.
    """
    onto: list[Tensor] = []
    power: list[Tensor] = []
    for x, x_hat, w, w_hat in _operand_parts(left, right, first, second):
        output = x_hat @ w_hat.transpose(-1, -2)
        error = _output_error(x, x_hat, w, w_hat)
        onto.append((output * error).sum(-2, dtype=torch.float64))
        power.append(output.square().sum(-2, dtype=torch.float64))
    grouped = right.values.ndim > 2  # each part is other rows; otherwise other tokens
    excess, size = (torch.cat(parts) if grouped else torch.stack(parts).sum(0) for parts in (onto, power))
    factor = 1 - (excess / size.clamp(min=torch.finfo(size.dtype).tiny)).clamp(-1, 0.5).unsqueeze(-1)
    return replace(second, scale=second.scale * factor.to(second.scale.dtype), rounded_by=second.scale)


def _output_error(x: Tensor, x_hat: Tensor, w: Tensor, w_hat: Tensor) -> Tensor:
    """x_hat w_hat^T - x w^T, without the cancellation of two large outputs."""
    return (x_hat - x) @ w_hat.transpose(-1, -2) + x @ (w_hat - w).transpose(-1, -2)


def _operand_parts(
    left: Operand, right: Operand, first: Quantizer | None, second: Quantizer | None
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Both operands as they are and as they are quantized, (x, x_hat, w, w_hat), over slices of the first dimension.

    In float32 at least: squares of float16 overflow.
    """
    x_hat, w_hat = fake_quantize(left, first), fake_quantize(right, second)
    outputs = left.values[..., 0].numel() * right.values.shape[-2]
    parts = min(-(-outputs // _OUTPUTS), len(left.values))
    lefts = (value.tensor_split(parts) for value in (left.values, x_hat))
    rights = (value.tensor_split(parts) if value.ndim > 2 else [value] * parts for value in (right.values, w_hat))
    for slices in zip(*lefts, *rights, strict=True):
        x, x_slice, w, w_slice = (at_least_float32(value) for value in slices)
        yield x, x_slice, w, w_slice


def search_product(left: Operand, right: Operand, search: Search) -> Found:
    """Quantizers of both operands of left @ right^T, found in turn on the output's error, never exchanged for worse.

    right is given transposed, (*batch, O, I), so that both operands have the summed dimension last. The left one starts
    from its own error; the right one is found first. What has been found once on the output's error is from then on
    looked for nearby, where every step looks at a sample and there are twice as many rows as columns: the fewer they
    are, the farther the best point moves when the other operand does. A round that gains less than 0.1 % is the last.
    """
    rows, columns = left.values[..., 0].numel(), left.values.shape[-1]
    many = search.rough_rows > 0 and rows > max(search.rough_rows, 2 * columns)
    first = None if left.is_float else search_own(left, search)
    second: Tensor | None = None
    left_hat, right_hat = _apply(left, first), right.values
    error = math.inf
    if not right.is_float:
        second, error = _search_operand(right, left.values, left_hat, search, None)
        right_hat = _apply(right, second)
    for index in range(search.rounds):
        before = first, error
        if not left.is_float:
            first, error = _search_operand(left, right.values, right_hat, search, first, nearby=many and index > 0)
            left_hat = _apply(left, first)
        if not right.is_float and first is not before[0]:
            second, error = _search_operand(right, left.values, left_hat, search, second, nearby=many)
            right_hat = _apply(right, second)
        if error > before[1] * (1 - _LEAST_GAIN):
            break
    x_quantizer, w_quantizer = left.quantizer(first), right.quantizer(second)
    if search.refit and right.has_own_rows and isinstance(w_quantizer, UniformQuantizer):
        w_quantizer = refitted(left, right, x_quantizer, w_quantizer)
    return Found.judged(left, right, x_quantizer, w_quantizer)


def with_table(left: Operand, right: Operand, found: Found, tables: Tables) -> Found:
    """The result with the table of integers that its logarithmic codes run through, if it has such codes.

    8 bits wide where the output's error rises at most 3 % over that of the levels in float, else 16; base, scale and
    headroom are searched with either table. A quantizer of 2**bits + 1 values stays as it is.
    Raises ValueError where mantissas do not fit in the width that `tables` asks for.
    """
    quantizer = found.left
    if tables == "float" or not isinstance(quantizer, LogQuantizer) or quantizer.beyond == "zero":
        return found
    fits = most_headroom(quantizer.bits, 8, table=quantizer.table) >= 0
    if tables == "u8" and not fits:
        raise ValueError(f"tables = 'u8': mantissas of {quantizer.bits + 1} bits do not fit: choose 'u16'")

    transposed = right.values.transpose(-1, -2), fake_quantize(right, found.right).transpose(-1, -2)
    sample = ProductError.of(left.values, *transposed, mask=left.mask).sample(1)
    only = sample.left.new_zeros(1)  # the point in place of which a quantizer is given

    def rough(first: LogQuantizer) -> float:
        return float(sample.loss(lambda _: first.fake_quantize(sample.left)[None], only))

    def error(first: LogQuantizer) -> float:
        return output_power(left, right, first, found.right)[1]

    best: LogQuantizer | None = None
    if fits and tables != "u16":
        best = _tabled(left, quantizer, found.right, 8, rough, error)
        if tables == "calibrated" and error(best) > _RISE * error(quantizer):
            best = None
    return Found.judged(left, right, best or _tabled(left, quantizer, found.right, 16, rough, error), found.right)


def _tabled(
    left: Operand,
    quantizer: LogQuantizer,
    second: Quantizer | None,
    width: int,
    rough: Callable[[LogQuantizer], float],
    error: Callable[[LogQuantizer], float],
) -> LogQuantizer:
    """The quantizer with a table of this width: headroom, base and scale one after the other, by the rough error.

    error: the exact one, by which the base and scale that the quantizer has stay unless others are better. The
    headroom leaves accumulators in 32 bits, where any does.
    """
    most = most_headroom(quantizer.bits, width, table=quantizer.table)
    other = 1 if second is None else 2**second.bits - 1
    narrow = [room for room in range(most + 1) if left.values.shape[-1] * other << (width - most + room) <= 2**31]
    tried = [replace(quantizer, width=width, headroom=room) for room in narrow or [0]]
    start = best = min(tried, key=rough)
    form = left.format
    if form.log2_base is not None and not form.log2_base[0]:
        bases = {round(best.q * factor) for factor in _FACTORS} | {best.q + step for step in (-2, -1, 1, 2)}
        bases = {min(max(q, form.q_min), form.q_max) for q in bases}
        best = min((best, *(replace(best, q=q) for q in sorted(bases))), key=rough)
    best = min((best, *(replace(best, scale=best.scale * factor) for factor in _FACTORS)), key=rough)
    return best if best is not start and error(best) < error(start) else start


def search_own(operand: Operand, search: Search) -> Tensor:
    """The operand's best point by its own error, the output not looked at."""
    own = OwnError(operand.groups())
    form = operand.format

    def uniform(points: Tensor) -> Tensor:
        return own.uniform_loss(*bounds_to_uniform(points[:, 0], points[:, 1], form.bits), form.bits)

    def stepwise(points: Tensor) -> Tensor:
        device = own.sorted.device
        steps = ((part.to(device)[None, None] for part in operand.steps(point)) for point in points)
        return torch.stack([own.loss(*pair)[0, 0] for pair in steps])

    return minimise(uniform if form.is_uniform else stepwise, operand, replace(search, strategy="fpcs"))


def _search_operand(
    operand: Operand,
    other: Tensor,
    other_hat: Tensor,
    search: Search,
    incumbent: Tensor | None,
    *,
    nearby: bool = False,
) -> tuple[Tensor, float]:
    """The best point of an operand, and its error, given the other one as it is and as it is quantized."""
    transposed = (other.transpose(-1, -2), other_hat.transpose(-1, -2))
    error = ProductError.of(operand.values, *transposed, operand.format.keep, operand.mask, operand.alike)
    start, found, total = 0, [], 0.0
    for piece in error.by_rows():
        rows = slice(start, start := start + len(piece.left))
        known = incumbent if incumbent is None or piece is error else incumbent[:, rows]
        best, least = _search_piece(piece, replace(operand, values=piece.left), search, known, nearby)
        found.append(best)
        total += least
    best = found[0] if len(found) == 1 else torch.cat(found, dim=1)
    return incumbent if incumbent is not None and torch.equal(best, incumbent) else best, total


def _search_piece(
    error: ProductError, operand: Operand, search: Search, incumbent: Tensor | None, nearby: bool
) -> tuple[Tensor, float]:
    """The steps look at a sample of the tokens, their survivors at all; the winner meets the incumbent exactly."""
    sample = error.sample(search.rough_rows) if search.rough_rows else error
    rough = sample.fast() if search.rough_rows else error
    loss = (error.fast() if sample is not error else error).loss_by(operand.errors)
    cheaper = None if rough is error else rough.loss_by(operand.errors)
    best = minimise(loss, operand, search, incumbent, cheaper, nearby=nearby)
    return _better(error, operand, best, incumbent)


def _better(error: ProductError, operand: Operand, best: Tensor, incumbent: Tensor | None) -> tuple[Tensor, float]:
    """In each group the incumbent, unless the best point's exact loss is less; the incumbent itself where none is.

    With the exact loss of all groups together.
    """

    def exact(point: Tensor) -> Tensor:
        return error.loss(lambda points: _apply(operand, points[0])[None], point[None])[0]

    new = exact(best)
    if incumbent is None:
        return best, float(new.sum())
    old = exact(incumbent)
    if not bool((new < old).any()):
        return incumbent, float(old.sum())
    return torch.where(new < old, best, incumbent), float(torch.minimum(new, old).sum())


def fake_quantize(operand: Operand, quantizer: Quantizer | None) -> Tensor:
    """The operand's values after quantization, a convolution's padding left as it is."""
    if quantizer is None:
        return operand.values
    hat = quantizer.fake_quantize(operand.values)
    return hat if operand.mask is None else torch.where(operand.mask.bool(), hat, operand.values)


def _apply(operand: Operand, point: Tensor | None) -> Tensor:
    return fake_quantize(operand, operand.quantizer(point))


def search_channels(
    values: Tensor, bits: int, search: Search, *, own_ranges: bool | None = None
) -> tuple[Tensor, Tensor]:
    """(scale, zero_point), each (C,), of a uniform quantizer a channel: where a fold starts. values: (T, C).

    own_ranges: by each channel's own error, as is done up to 4 bits. The finer the codes, the more does a channel's
    best range follow its few largest values, and the less does it fit other images: with more bits one range, in
    standard deviations around a channel's mean, serves all channels (measured in benchmarks/folds.py).
    """
    if bits <= 4 if own_ranges is None else own_ranges:
        point = search_own(Operand(values, Format(bits, keep=(1,))), search)
        return bounds_to_uniform(point[0], point[1], bits)
    mean, deviation = values.mean(0), values.std(0, correction=0)
    deviation = deviation.clamp(min=max(float(deviation.mean()) * 1e-4, torch.finfo(values.dtype).tiny))
    point = search_own(Operand((values - mean) / deviation, Format(bits)), search)
    return bounds_to_uniform(mean + deviation * point[0], mean + deviation * point[1], bits)
