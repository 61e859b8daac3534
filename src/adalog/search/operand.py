"""One operand of a product: its values, the format of its quantizer, and the search space of that quantizer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from adalog.quantizers import (
    FLOAT_BITS,
    Beyond,
    LogQuantizer,
    QuantizedTensor,
    Quantizer,
    Rounding,
    UniformQuantizer,
    bounds_to_uniform,
    log_steps,
)
from adalog.quantizers.fused import shaped_against, table_errors, uniform_errors
from adalog.quantizers.quantiles import positive_quantile, thinned, thinned_quantiles
from adalog.search.objective import Errors

# The table that gives candidates their codes spans `_OCTAVES` octaves below the largest value. Its bins ignore the last
# `_DROPPED_BITS` bits of the mantissa.
_OCTAVES, _DROPPED_BITS = 20, 13


@dataclass(frozen=True)
class Format:
    """The kind of quantizer that an operand gets; the search finds its parameters.

    own_dims: the dimensions of `Operand.values` that have parameters of their own.
    log2_base: None for other kinds than logarithmic; (q, r) for a fixed base with log2(base) = q / r; (0, r) if q is
        searched in q_min ... q_max.
    one_scale: the class of a quantizer that its largest level alone determines (`Quantizer.reaching`).
        `UniformQuantizer` means a symmetric one.
    unit: the kind of a quantizer for values in [0, 1] that only the search of a baseline finds, or "".
    """

    bits: int
    own_dims: tuple[int, ...] = ()
    log2_base: tuple[int, int] | None = None
    one_scale: type[Quantizer] | None = None
    q_min: int = 1
    q_max: int = 137
    table: bool = True
    beyond: Beyond = "zero-coded"
    rounding: Rounding = "nearest"
    offset: float = 0.0
    unit: str = ""

    @property
    def is_uniform(self) -> bool:
        return self.log2_base is None and self.one_scale is None and not self.unit

    @property
    def is_symmetric(self) -> bool:
        """True for a uniform quantizer whose zero point is half of its codes."""
        return self.one_scale is UniformQuantizer

    @property
    def twin(self) -> bool:
        """True if half of the codes are for the negative values, down to -offset."""
        return self.one_scale is not None and self.one_scale.spans_offset


@dataclass(frozen=True)
class Operand:
    """One side of a product; the last dimension but one holds its rows.

    values: activations (T, I), weights (O, I), heads (B, H, N, D).
    mask: 1 for values that are quantized, 0 for the zero padding of a convolution; the same in each of its groups.
    alike: True if the rows are tokens, so that a sample can represent them all; False if they are channels.
    stacked: True if the first dimension of the values counts operands that are searched together (`stack`).
    """

    values: Tensor
    format: Format
    mask: Tensor | None = None
    alike: bool = True
    stacked: bool = False

    @staticmethod
    def stack(operands: "Sequence[Operand]") -> "Operand":
        """Stack operands of the same shape and format without masks; each keeps parameters of its own."""
        first = operands[0]
        own_dims = (0, *(dim + 1 for dim in first.format.own_dims))
        values = torch.stack([operand.values for operand in operands])
        return Operand(values, replace(first.format, own_dims=own_dims), alike=first.alike, stacked=True)

    @property
    def stack_size(self) -> int:
        """The number of operands that are searched together."""
        return len(self.values) if self.stacked else 1

    def groups(self) -> Tensor:
        """Return the values as (G, T): one row per set of parameters."""
        own_dims = self.format.own_dims
        rest = [dim for dim in range(self.values.ndim) if dim not in own_dims]
        size = math.prod(self.values.shape[dim] for dim in own_dims)
        return self.values.permute(*own_dims, *rest).reshape(size, -1)

    def shaped(self, parameters: Tensor) -> Tensor:
        """Reshape parameters (k, *groups) to (k, ...), so that they broadcast against k candidates of the values."""
        return shaped_against(parameters, self.values.shape, self.format.own_dims)

    @property
    def has_own_rows(self) -> bool:
        """True if each row has parameters of its own, as in a weight."""
        return self.values.ndim - 2 in self.format.own_dims

    @property
    def is_float(self) -> bool:
        return self.format.bits == FLOAT_BITS

    def quantizer(self, point: Tensor | None) -> Quantizer | None:
        """Return the quantizer of one point (P, *groups); its parameters broadcast against the values."""
        form = self.format
        if point is None:
            return None
        if form.one_scale is not None:
            found = form.one_scale.reaching(self.shaped(point[:1]), form.bits, form.offset)
            return found.map(lambda value: value[0] if form.own_dims or form.is_symmetric else value.reshape(()))
        if form.log2_base is None:
            scale, zero_point = bounds_to_uniform(point[0], point[1], form.bits)
            return UniformQuantizer(self.shaped(scale)[0], self.shaped(zero_point)[0], form.bits)
        q, scale = _base_and_scale(point, form)
        return LogQuantizer(scale, q, self.radix, form.bits, form.beyond, form.rounding, form.table, offset=form.offset)

    def errors(self, values: Tensor) -> Errors:
        """Return a function from k points to the errors that quantization adds to these values: (k, *values.shape).

        Logarithmic codes come from a table over the leading bits of the values, so a candidate costs one look-up per
        value. A value in the same table bin as a threshold may get the code on the threshold's other side.
        `search_product` therefore replaces a point only by the exact loss.

        values: the operand's values, or some of their rows.
        """
        form = self.format
        kind = form.one_scale
        values = values.contiguous()  # once for all candidates
        if kind is not None:

            def one_scale(points: Tensor, dtype: torch.dtype) -> Tensor:
                upper = shaped_against(points[:, 0], values.shape, form.own_dims)
                found = kind.reaching(upper, form.bits, form.offset)
                return found.fake_quantize(values[None]).sub_(values).to(dtype)

            return one_scale
        if form.log2_base is None:

            def uniform(points: Tensor, dtype: torch.dtype) -> Tensor:
                scale, zero_point = bounds_to_uniform(points[:, 0], points[:, 1], form.bits)
                return uniform_errors(values, scale, zero_point, form.bits, form.own_dims, dtype)

            return uniform

        groups = self.stack_size
        lifted = (values + form.offset).float().view(groups, -1)
        # Both ends of the table are normal numbers, so the number of bins does not depend on the values.
        top = lifted.amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny * 2.0**_OCTAVES)
        least = top * 2.0**-_OCTAVES
        first = least.view(torch.int32) >> _DROPPED_BITS
        count = (_OCTAVES << (23 - _DROPPED_BITS)) + 1
        numbers = torch.arange(count + 1, dtype=torch.int32, device=values.device) + first
        edges = (numbers << _DROPPED_BITS).view(torch.float32).double()
        middles = ((edges[:, :-1] + edges[:, 1:]) / 2).contiguous()
        bins = (lifted.clamp_(min=least).view(torch.int32) >> _DROPPED_BITS).sub_(first)
        if self.stacked:  # the tables of all operands follow one another
            bins.add_(count * torch.arange(groups, dtype=torch.int32, device=values.device)[:, None])
        bins = bins.reshape(-1)

        def logarithmic(points: Tensor, dtype: torch.dtype) -> Tensor:
            levels, cuts = (each.view(len(points), groups, -1) for each in self.steps(points))
            sought = (cuts + form.offset).transpose(0, 1).reshape(groups, -1)
            ends = torch.searchsorted(middles, sought, right=True)  # the first bin above each threshold
            ends = ends.view(groups, len(points), -1).transpose(0, 1)
            none, every = (ends.new_full((len(points), groups, 1), end) for end in (0, count))
            counts = torch.diff(ends, prepend=none, append=every).reshape(-1)
            size = len(points) * groups * count
            tables = levels.to(values.dtype).reshape(-1).repeat_interleave(counts, output_size=size)
            return table_errors(values, bins, tables.view(len(points), -1), dtype)

        return logarithmic

    def settled(self, points: Tensor) -> Tensor:
        """Round log2 q of the candidates to that of a whole q, so that points with the same base are equal."""
        form = self.format
        if form.log2_base is None or form.log2_base[0]:
            return points
        bases = points[:, :1].exp2().round_().clamp_(form.q_min, form.q_max).log2_()
        return torch.cat([bases, points[:, 1:]], dim=1)

    def steps(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ascending levels (K, *groups, L) and thresholds (K, *groups, L - 1) of K points (K, P, *groups).

        They are in float64, on the device of the points. The points are those of a logarithmic format, or of a format
        with `one_scale`. They have no groups unless operands are stacked.
        """
        form = self.format
        if form.one_scale is not None:
            quantizer = form.one_scale.reaching(points[:, 0, ..., None].double(), form.bits, form.offset)
            levels = quantizer.dequantize(torch.arange(quantizer.code_count, device=points.device))
            return levels, (levels[..., 1:] + levels[..., :-1]) / 2
        assert form.log2_base is not None
        fixed, r = form.log2_base
        low, high = (fixed, fixed) if fixed else (form.q_min, form.q_max)
        row = torch.zeros_like(points[:, 0]) if fixed else points[:, 0].double().exp2().round().clamp(low, high) - low
        tables = log_steps(
            low,
            high,
            r,
            form.bits,
            beyond=form.beyond,
            rounding=form.rounding,
            table=form.table,
            device=points.device,
        )
        factor = points[:, -1, ..., None].clamp(min=1e-12).double()
        chosen = row.to(torch.int64).reshape(-1)
        levels, cuts = (
            each.index_select(0, chosen).view(*row.shape, each.shape[1]) * factor - form.offset for each in tables
        )
        return levels, cuts

    @property
    def radix(self) -> int:
        """The denominator r of log2(base)."""
        assert self.format.log2_base is not None
        return self.format.log2_base[1]

    def box(self, reach: float) -> tuple[Tensor, Tensor]:
        """Return the corners (low, high) of the search space, each (P, *groups).

        - Uniform: the lower bound is between the percentiles 0 and reach, and the upper bound between 1 - reach and 1
          (Algorithm 1, lines 1-2).
        - Logarithmic: log2 q covers q_min ... q_max. The scale is between the percentiles 0.9 and 1 of the values plus
          the offset.
        - Twin: the largest positive value is between the percentiles 0.9 and 1.
        - Other kinds with `one_scale`: the largest level is between the percentiles 1 - 2 reach and 1 of the
          magnitudes, since both tails are among these.
        """
        form = self.format
        shape = [self.values.shape[dim] for dim in form.own_dims]
        sample = self.groups()
        if form.is_uniform:
            own = thinned_quantiles(sample, (0.0, reach, 1 - reach, 1.0), self.stack_size)
            corners = [value.to(self.values.dtype).reshape(shape) for value in own]
            return torch.stack([corners[0], corners[2]]), torch.stack([corners[1], corners[3]])
        if form.one_scale is not None and not form.twin:
            # If the range reaches further down than up, a smaller largest level already spans the magnitudes.
            below, above = form.one_scale.reaching(sample.new_ones(()), form.bits, form.offset).bounds()
            low, high = thinned_quantiles(sample.abs(), (max(0.0, 1 - 2 * reach), 1.0), self.stack_size)
            low = low * float(above / torch.maximum(above, -below))
            return low.to(self.values.dtype).reshape(1, *shape), high.to(self.values.dtype).reshape(1, *shape)
        lift = 0.0 if form.log2_base is None else form.offset
        low, positive = positive_quantile(thinned(sample, self.stack_size) + lift, 0.9)
        top = torch.where(positive, sample.amax(dim=1) + lift, 1.0)
        low, high = torch.where(positive, low, 1.0).reshape(shape), top.reshape(shape)
        low = torch.minimum(low, high * 0.5)
        if form.log2_base is None or form.log2_base[0]:
            return low[None], high[None]
        ones = torch.ones_like(low)
        ends = (math.log2(form.q_min), math.log2(form.q_max))
        return torch.stack([ones * ends[0], low]), torch.stack([ones * ends[1], high])

    def quantized(self, side: Quantizer | QuantizedTensor | None) -> Tensor:
        """Return the values after quantization; the padding of a convolution stays as it is."""
        if side is None:
            return self.values
        hat = (
            side.dequantize().to(self.values.dtype)
            if isinstance(side, QuantizedTensor)
            else side.fake_quantize(self.values)
        )
        if self.mask is None:
            return hat
        # A large operand's values are overwritten, not copied, unless gradients flow through them.
        return torch.where(self.mask.bool(), hat, self.values, out=None if hat.requires_grad else hat)

    def quantized_at(self, point: Tensor | None) -> Tensor:
        """Return the values after quantization with the quantizer of one point."""
        if point is None or not self.stacked or self.format.log2_base is None:
            return self.quantized(self.quantizer(point))
        # A quantizer has one base, and each stacked operand has its own.
        levels, cuts = (each[0].to(self.values.dtype) for each in self.steps(point[None]))
        return nearest_levels(self.values.reshape(len(self.values), -1), levels, cuts).view(self.values.shape)


def nearest_levels(rows: Tensor, levels: Tensor, thresholds: Tensor) -> Tensor:
    """Return the level of each value of (G, T), for levels (G, L) and thresholds (G, L - 1) that ascend in each row."""
    return levels.gather(1, torch.searchsorted(thresholds.contiguous(), rows.contiguous()))


def _base_and_scale(point: Tensor, form: Format) -> tuple[int, Tensor]:
    assert form.log2_base is not None
    if form.log2_base[0]:
        return form.log2_base[0], point[0].clamp(min=1e-12)
    q = round(2 ** float(point[0]))
    return min(max(q, form.q_min), form.q_max), point[1].clamp(min=1e-12)
