"""The search space of logarithmic quantizers: their bases and scales."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from adalog.quantizers.formats import Errors, Format, positive_box
from adalog.quantizers.fused import table_errors
from adalog.quantizers.logarithmic import Beyond, LogQuantizer, Rounding, log_steps
from adalog.quantizers.quantizer import Quantizer

# The table that gives candidates their codes spans `_OCTAVES` octaves below the largest value. Its bins ignore the last
# `_DROPPED_BITS` bits of the mantissa.
_OCTAVES, _DROPPED_BITS = 20, 13
_LEAST_SCALE = 1e-12


@dataclass(frozen=True)
class LogFormat(Format):
    """Logarithmic quantizers with log2(base) = q / r, each for a whole operand; a point is (log2 q, scale).

    Operands that are searched together have points of their own, so each has a base of its own.

    r: the denominator.
    q: the numerator, and a point is then (scale,). 0: it is searched in q_min ... q_max.
    beyond, rounding, table, offset: as in `LogQuantizer`.
    """

    has_zero = False
    for_power_laws = True

    r: int = 37
    q: int = 0
    q_min: int = 1
    q_max: int = 137
    table: bool = True
    beyond: Beyond = "zero-coded"
    rounding: Rounding = "nearest"
    offset: float = 0.0

    @property
    def title(self) -> str:
        return "logarithmic"

    @property
    def names(self) -> tuple[str, ...]:
        return ("scale",) if self.q else (f"q (rounded), of base 2^(q / {self.r})", "scale")

    @property
    def scales(self) -> tuple[bool, ...]:
        return (True,) if self.q else (False, True)

    @property
    def bases(self) -> range:
        """The numerators that a quantizer may have."""
        return range(self.q, self.q + 1) if self.q else range(self.q_min, self.q_max + 1)

    def with_base(self, scale: Tensor, q: int) -> LogQuantizer:
        return LogQuantizer(scale, q, self.r, self.bits, self.beyond, self.rounding, self.table, offset=self.offset)

    def of(self, points: Tensor) -> LogQuantizer:
        bases = {self.q} if self.q else {round(2**base) for base in points[:, 0].unique().tolist()}
        if len(bases) > 1:
            raise ValueError("points have different bases, but a logarithmic quantizer has one")
        (q,) = bases
        q = min(max(q, self.bases[0]), self.bases[-1])
        return self.with_base(points[:, -1].clamp(min=_LEAST_SCALE), q)

    def box(self, groups: Tensor, reach: float, stack: int = 1) -> tuple[Tensor, Tensor]:
        """Return log2 of q_min and q_max, and `positive_box` of the values plus the offset."""
        low, high = positive_box(groups, self.offset, stack)
        if self.q:
            return low, high
        first, last = (torch.full_like(low, math.log2(q)) for q in (self.q_min, self.q_max))
        return torch.cat([first, low]), torch.cat([last, high])

    def point_of(self, quantizer: Quantizer) -> Tensor | None:
        if not isinstance(quantizer, LogQuantizer) or quantizer.r != self.r:
            return None
        scale = quantizer.scale
        return scale[None] if self.q else torch.stack([torch.full_like(scale, math.log2(quantizer.q)), scale])

    def point_of_range(self, low: Tensor, high: Tensor) -> Tensor:
        return (high + self.offset)[None]

    def fake_quantize(self, point: Tensor, values: Tensor) -> Tensor:
        if not self.own_dims:
            return super().fake_quantize(point, values)
        levels, cuts = (table[0].to(values.dtype) for table in self.steps(point[None]))
        return nearest_levels(values.reshape(len(values), -1), levels, cuts).view(values.shape)

    def errors(self, values: Tensor) -> Errors:
        """Return the errors of codes from a table over the leading bits of the values, with one look-up per value.

        A value in the same table bin as a threshold may get the code on the threshold's other side. A search therefore
        replaces a point only by the exact loss.
        """
        values = values.contiguous()  # once for all candidates
        groups = len(values) if self.own_dims else 1
        lifted = (values + self.offset).float().view(groups, -1)
        # Both ends of the table are normal numbers, so the number of bins does not depend on the values.
        top = lifted.amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny * 2.0**_OCTAVES)
        least = top * 2.0**-_OCTAVES
        first = least.view(torch.int32) >> _DROPPED_BITS
        count = (_OCTAVES << (23 - _DROPPED_BITS)) + 1
        numbers = torch.arange(count + 1, dtype=torch.int32, device=values.device) + first
        edges = (numbers << _DROPPED_BITS).view(torch.float32).double()
        middles = ((edges[:, :-1] + edges[:, 1:]) / 2).contiguous()
        bins = (lifted.clamp_(min=least).view(torch.int32) >> _DROPPED_BITS).sub_(first)
        if self.own_dims:  # the tables of all operands follow one another
            bins.add_(count * torch.arange(groups, dtype=torch.int32, device=values.device)[:, None])
        bins = bins.reshape(-1)

        def errors(points: Tensor, dtype: torch.dtype) -> Tensor:
            levels, cuts = (table.view(len(points), groups, -1) for table in self.steps(points))
            sought = (cuts + self.offset).transpose(0, 1).reshape(groups, -1)
            ends = torch.searchsorted(middles, sought, right=True)  # the first bin above each threshold
            ends = ends.view(groups, len(points), -1).transpose(0, 1)
            none, total = (ends.new_full((len(points), groups, 1), end) for end in (0, count))
            counts = torch.diff(ends, prepend=none, append=total).reshape(-1)
            size = len(points) * groups * count
            tables = levels.to(values.dtype).reshape(-1).repeat_interleave(counts, output_size=size)
            return table_errors(values, bins, tables.view(len(points), -1), dtype)

        return errors

    def steps(self, points: Tensor) -> tuple[Tensor, Tensor]:
        low, high = self.bases[0], self.bases[-1]
        tables = log_steps(self.bases, self.r, self.bits, self.beyond, self.rounding, self.table, points.device)
        row = torch.zeros_like(points[:, 0]) if self.q else points[:, 0].double().exp2().round().clamp(low, high) - low
        factor = points[:, -1, ..., None].clamp(min=_LEAST_SCALE).double()
        numbers = row.to(torch.int64).reshape(-1)
        levels, cuts = (
            table.index_select(0, numbers).view(*row.shape, table.shape[1]) * factor - self.offset for table in tables
        )
        return levels, cuts

    def snap(self, points: Tensor) -> Tensor:
        """Round log2 q to that of a whole q."""
        if self.q:
            return points
        bases = points[:, :1].exp2().round_().clamp_(self.q_min, self.q_max).log2_()
        return torch.cat([bases, points[:, 1:]], dim=1)


def nearest_levels(rows: Tensor, levels: Tensor, thresholds: Tensor) -> Tensor:
    """Return the level of each value of (G, T), for levels (G, L) and thresholds (G, L - 1) that ascend in each row."""
    return levels.gather(1, torch.searchsorted(thresholds.contiguous(), rows.contiguous()))
