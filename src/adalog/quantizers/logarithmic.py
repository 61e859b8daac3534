"""The logarithmic quantizers log2, log-sqrt2 and AdaLog (Eqs. 1-9).

Codes are whole numbers in the dtype of the input, float32 or float64; narrower inputs are computed in float32. Rounding
is to the nearest integer, halves to even.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from adalog.errors import ArtifactError
from adalog.quantizers.elementwise import are_values, nearest_log
from adalog.quantizers.quantizer import FLOAT_BITS, Quantizer, at_least_float32, by_slices
from adalog.stored import is_whole

Beyond = Literal["saturate", "zero", "zero-coded"]
Rounding = Literal["log", "nearest"]

WIDTHS = (8, 16)  # bits per entry of a logarithmic quantizer's integer table
_TABLE_BINS = 1 << 20


def log_tables(q: int, r: int, bits: int) -> tuple[Tensor, Tensor]:
    """Return the shift and the mantissa of every code k (Eqs. 8-9): int64, (2**bits,) each.

    The shift is floor(k q / r). The mantissa is round(2**-((k q mod r) / r) / table_step): bits + 1 bits.
    """
    product = torch.arange(2**bits) * q
    exact = torch.exp2(-(product % r).double() / r)
    return product // r, (exact / table_step(bits)).round().to(torch.int64)


def table_step(bits: int) -> float:
    """Return the scale of the mantissa table, s_table above Eq. 9."""
    return 1 / (2 * (2**bits - 1))


def most_headroom(bits: int, width: int, *, table: bool = True) -> int:
    """Return the largest headroom whose table fits in `width` bits; it is negative if no table fits."""
    return width - bits - 1 if table else width - 1


def integer_levels(q: int, r: int, bits: int, headroom: int, *, table: bool = True) -> Tensor:
    """Return the integer of each code, in units of `integer_unit`: int64, (2**bits,).

    table: the folded table of Eq. 10, T = (U << headroom) >> A, with the mantissas U and shifts A of `log_tables`. Else
        each integer is 2**headroom times the exact power 2**(-k q / r), rounded.
    """
    if table:
        shift, mantissa = log_tables(q, r, bits)
        return (mantissa << headroom) >> shift.clamp(max=62)  # a shift by the full width of an integer is undefined
    return torch.exp2(headroom - torch.arange(2**bits, dtype=torch.float64) * q / r).round().to(torch.int64)


def integer_unit(bits: int, headroom: int, *, table: bool = True) -> float:
    """Return the value of one unit of `integer_levels` at scale 1."""
    return (table_step(bits) if table else 1.0) * 2.0**-headroom


@lru_cache(4096)
def log_levels(
    q: int, r: int, bits: int, *, beyond: Beyond = "zero-coded", table: bool = True, headroom: int | None = None
) -> Tensor:
    """Return the value of each code at scale 1, descending: float64, (2**bits,), and a zero more if `beyond` is "zero".

    table: use the quantized mantissas of Eq. 9 in Eq. 7, as AdaLog does in integers. Else use the exact powers 2**(-k q
        / r): Eq. 2 for (q, r) = (1, 1), log2, and Eq. 4 for (1, 2), whose parity scale S~ makes odd codes exact.
    headroom: that of the integer table (`integer_levels`); None without one.
    """
    if headroom is not None:
        integers = integer_levels(q, r, bits, headroom, table=table)
        levels = integers.double() * integer_unit(bits, headroom, table=table)
    elif table:
        shift, mantissa = log_tables(q, r, bits)
        levels = mantissa.double() * table_step(bits) * torch.exp2(-shift.double())
    else:
        levels = torch.exp2(-torch.arange(2**bits, dtype=torch.float64) * q / r)
    zero = levels.new_zeros(1)
    if beyond == "zero":
        return torch.cat([levels, zero])
    return torch.cat([levels[:-1], zero]) if beyond == "zero-coded" else levels


@lru_cache(4096)
def log_thresholds(
    q: int,
    r: int,
    bits: int,
    *,
    beyond: Beyond = "zero-coded",
    rounding: Rounding = "nearest",
    table: bool = True,
    headroom: int | None = None,
) -> Tensor:
    """Return the values of x / scale between neighbouring codes, descending: float64, one fewer than the levels.

    A value has code k if it is at most thresholds[k - 1] and above thresholds[k]. With the rounding "log" (Eq. 5), code
    k ends at -log2(x / scale) r / q = k + 1/2. With "nearest", each threshold lies halfway between two levels.
    """
    levels = log_levels(q, r, bits, beyond=beyond, table=table, headroom=headroom)
    if rounding == "nearest":
        # Rounded mantissas can make neighbouring levels equal. The first keeps the interval, the others get an
        # empty one.
        distinct, first = levels.unique_consecutive(return_inverse=True)
        middle = torch.cat([(distinct[:-1] + distinct[1:]) / 2, distinct.new_zeros(1)])
        return middle[first[:-1]]
    return torch.exp2(-(torch.arange(len(levels) - 1, dtype=torch.float64) + 0.5) * q / r)


@lru_cache(64)
def log_steps(
    bases: range, r: int, bits: int, beyond: Beyond, rounding: Rounding, table: bool, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the ascending levels and thresholds of every base, (Q, levels) and (Q, thresholds), copied only once."""
    levels = [log_levels(q, r, bits, beyond=beyond, table=table) for q in bases]
    cuts = [log_thresholds(q, r, bits, beyond=beyond, rounding=rounding, table=table) for q in bases]
    with torch.inference_mode(mode=False):  # later callers of the cache may need normal tensors
        return torch.stack(levels).flip(1).to(device), torch.stack(cuts).flip(1).to(device)


class Bins:
    """A table that counts the thresholds not below a value, with the same result as `torch.bucketize` but faster.

    The leading bits of a float are the number of its bin. No bin holds two different thresholds.

    counts: two per bin, for values above the threshold in the bin and for the others.
    ends: the threshold in each bin; 0 if there is none.
    lowest, highest: values are clamped to this interval first; NaN takes the last count.
    first: the number of the first bin.
    drop: the number of trailing bits that a bin number leaves out.
    fit: False if this takes more than `_TABLE_BINS` bins; the thresholds are then searched directly.
    """

    def __init__(self, thresholds: Tensor, dtype: torch.dtype, device: torch.device | str = "cpu"):
        tiny = torch.finfo(dtype).tiny * 2.0**16
        cuts = thresholds.to(dtype).clamp(min=tiny)  # on the input's grid, above subnormals
        cuts, repeats = cuts.unique_consecutive(return_counts=True)
        mantissa_bits, self.integer = (23, torch.int32) if dtype == torch.float32 else (52, torch.int64)
        gap = (cuts[:-1] / cuts[1:] - 1).min().item() if len(cuts) > 1 else 1.0
        self.drop = mantissa_bits - min(max(3, 2 - math.floor(math.log2(gap))), mantissa_bits)
        lowest, highest = cuts[-1] / 2, cuts[0] * 2
        self.lowest, self.highest = lowest.item(), highest.item()
        self.first, last = (int(edge.view(self.integer)) >> self.drop for edge in (lowest, highest))
        self.fit = last - self.first <= _TABLE_BINS  # a search never leads to so many bins
        self.ascending = thresholds.to(dtype).clamp(min=tiny).flip(0).to(device)
        if not self.fit:
            return
        numbers = torch.arange(self.first, last + 1, dtype=self.integer)
        upper_edges = ((numbers + 1) << self.drop).view(dtype)
        distinct = len(cuts) - torch.searchsorted(cuts.flip(0), upper_edges, out_int32=True)
        passed = torch.cat([repeats.new_zeros(1), repeats.cumsum(0), repeats.sum()[None]]).to(torch.int32)
        counts = passed[torch.stack([distinct, distinct + 1], dim=1)]  # for values above the end, and up to it
        self.counts = counts.to(device)
        self.ends = torch.cat([cuts, cuts.new_zeros(1)])[distinct].to(device)  # the last interval has no lower end


def _places(values: Tensor, bins: Bins) -> Tensor:
    """Return the index of each value, (n,), in the flattened `counts` of bins that fit."""
    values = values.clamp(bins.lowest, bins.highest).nan_to_num_(bins.lowest)
    number = (values.view(bins.integer) >> bins.drop).sub_(bins.first)
    # -1 if the value is above its bin's threshold, else 0. Shifting out the sign bit is faster than a comparison.
    sign = bins.ends.index_select(0, number).sub_(values).view(bins.integer) >> (8 * values.element_size() - 1)
    return number.mul_(2).add_(1).add_(sign)


def _count_not_below(x: Tensor, bins: Bins) -> Tensor:
    """Return the number of thresholds not below each x: int32, the shape of x."""
    if bins.fit and are_values(x):
        return bins.counts.reshape(-1).index_select(0, _places(x.reshape(-1), bins)).view(x.shape)
    values = x.clamp(bins.lowest, bins.highest).nan_to_num_(bins.lowest)
    return len(bins.ascending) - torch.searchsorted(bins.ascending, values, out_int32=True)


@lru_cache(128)
def _bins_on(device: torch.device, dtype: torch.dtype, q: int, r: int, bits: int, **choices: Any) -> Bins:
    """Return the bins of `log_thresholds`, copied to the device once."""
    with torch.inference_mode(mode=False):  # later callers of the cache may need normal tensors
        return Bins(log_thresholds(q, r, bits, **choices), dtype, device)


@lru_cache(128)
def _levels_on(device: torch.device, dtype: torch.dtype, q: int, r: int, bits: int, **choices: Any) -> Tensor:
    with torch.inference_mode(mode=False):
        return log_levels(q, r, bits, **choices).to(device, dtype)


def log_quantize(
    x: Tensor,
    scale: Tensor,
    q: int,
    r: int,
    bits: int,
    *,
    beyond: Beyond = "saturate",
    rounding: Rounding = "log",
    table: bool = True,
    headroom: int | None = None,
) -> Tensor:
    """Return clamp(round(-log2(x / scale) r / q), 0, 2**bits - 1), the codes of Eq. 5 with log2(base) = q / r.

    (q, r) = (1, 1) is the log2 quantizer of Eq. 1, (1, 2) is the log-sqrt2 quantizer of Eq. 3, and (q, 37) is AdaLog.

    beyond: the code of values below the last level. "saturate" (the paper): the last code. "zero" (the released code):
        the extra code 2**bits, which means zero and does not fit in `bits` bits. "zero-coded": the last code, which
        then means zero.
    rounding: "log" as above, or "nearest" for the nearest level.
    """
    last = 2**bits if beyond == "zero" else 2**bits - 1
    ratio = at_least_float32(x) / scale
    if rounding == "log":
        exponent = ratio.clamp_(min=torch.finfo(ratio.dtype).tiny).log2_().neg_()
        return torch.div(exponent.mul_(r), q).round_().clamp_(0, last)
    choices = {"beyond": beyond, "rounding": rounding, "table": table, "headroom": headroom}
    return _count_not_below(ratio, _bins_on(ratio.device, ratio.dtype, q, r, bits, **choices)).to(ratio.dtype)


def log_dequantize(
    code: Tensor,
    scale: Tensor,
    q: int,
    r: int,
    bits: int,
    *,
    beyond: Beyond = "saturate",
    table: bool = True,
    headroom: int | None = None,
) -> Tensor:
    """Return scale times the level of each code, by Eq. 7 with `table`, or by Eqs. 2, 4 and 6 without it."""
    levels = _levels_on(scale.device, scale.dtype, q, r, bits, beyond=beyond, table=table, headroom=headroom)
    return levels.index_select(0, code.reshape(-1).to(torch.int32)).view(code.shape) * scale


@dataclass(frozen=True)
class LogQuantizer(Quantizer):
    """A logarithmic quantizer of base 2**(q / r), for values with x + offset >= 0 (Eqs. 5-9, 13-14).

    scale: float32, one value.
    offset: minus the activation's minimum.
    keeps_offset: dequantized values are those of x + offset, because a bias has absorbed the offset (Eq. 15).
    table: mantissas are quantized (Eq. 9).
    width, headroom: the bits of an entry (8 or 16) and the headroom of the integer table that replaces the levels
        (`table_integers`). A width of 0 means no table: the levels are floats.
    """

    kind: ClassVar[str] = "log"
    scale: Tensor
    q: int
    r: int
    bits: int
    beyond: Beyond = "zero-coded"
    rounding: Rounding = "nearest"
    table: bool = True
    offset: float = 0.0
    keeps_offset: bool = False
    width: int = 0
    headroom: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.q < 1 or self.r < 1:
            raise ValueError(f"log2(base) = {self.q} / {self.r} is not positive: q and r must be at least 1")
        if not self.width:
            return
        if self.beyond == "zero":
            raise ValueError(
                f"beyond = 'zero' has one value more than the 2**{self.bits} entries of an integer table: "
                "choose 'zero-coded' or 'saturate'"
            )
        most = most_headroom(self.bits, self.width, table=self.table)
        if self.width not in WIDTHS or not 0 <= self.headroom <= most:
            raise ValueError(
                f"width = {self.width} and headroom = {self.headroom} do not fit the integer table of {self.bits}-bit "
                f"codes: the width must be one of {', '.join(map(str, WIDTHS))}, and the headroom from 0 to {most}"
            )

    def quantize(self, x: Tensor) -> Tensor:
        return log_quantize(
            self._lift(x), self.scale, self.q, self.r, self.bits, rounding=self.rounding, **self._choices
        )

    def _lift(self, x: Tensor) -> Tensor:
        x = at_least_float32(x)
        return x + self.offset if self.offset else x

    @property
    def _choices(self) -> dict[str, Any]:
        return {"beyond": self.beyond, "table": self.table, "headroom": self.headroom if self.width else None}

    def dequantize(self, code: Tensor) -> Tensor:
        value = log_dequantize(code, self.scale, self.q, self.r, self.bits, **self._choices)
        return value.sub_(self.offset) if self._takes_offset_off else value

    @property
    def _takes_offset_off(self) -> bool:
        return bool(self.offset) and not self.keeps_offset

    @cached_property
    def _tables(self) -> tuple[Tensor, Tensor]:
        """The ascending thresholds of (x + offset) / scale, and the value of each code."""
        choices = {"rounding": self.rounding, **self._choices}
        bins = _bins_on(self.scale.device, self.scale.dtype, self.q, self.r, self.bits, **choices)
        codes = torch.arange(self.code_count, device=self.scale.device)
        return bins.ascending, self.dequantize(codes).reshape(-1)

    def tables(self) -> tuple[Tensor, ...]:
        return self._tables

    def _traced(self, x: Tensor) -> Tensor:
        """Return `_nearest` in operations that `torch.compile` can trace, once `tables` was called."""
        ascending, levels = self._tables
        if self.rounding == "nearest":
            ratio = (self._lift(x) / self.scale).nan_to_num(nan=0.0)
            code = len(ascending) - torch.searchsorted(ascending.to(ratio.dtype), ratio, out_int32=True)
        else:
            code = self.quantize(x).to(torch.int32)
        return levels.index_select(0, code.reshape(-1)).view(x.shape).to(x.dtype)

    def _nearest(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return self._traced(x)
        flat = x.reshape(-1)
        if self.rounding == "nearest":
            dtype = torch.result_type(at_least_float32(flat[:1]), self.scale)
            bins = _bins_on(x.device, dtype, self.q, self.r, self.bits, rounding=self.rounding, **self._choices)
            if bins.fit and are_values(x):  # the level is looked up directly, without the code
                levels = self.dequantize(bins.counts.reshape(-1)).to(x.dtype).reshape(-1)
                span, places = (bins.lowest, bins.highest), (bins.drop, bins.first)
                nearest = nearest_log(x, self.offset, self.scale, span, places, bins.ends, levels)
                if nearest is not None:
                    return nearest

                def level(part: Tensor) -> Tensor:
                    return levels.index_select(0, _places((self._lift(part) / self.scale).reshape(-1), bins))

                return by_slices(level, flat).view(x.shape)
        return by_slices(lambda part: self.dequantize(self.quantize(part)).to(x.dtype), flat).view(x.shape)

    def steps(self) -> tuple[Tensor, Tensor]:
        """Return the levels and the thresholds between them at scale 1, ascending: float64, on the CPU."""
        levels = log_levels(self.q, self.r, self.bits, **self._choices)
        cuts = log_thresholds(self.q, self.r, self.bits, rounding=self.rounding, **self._choices)
        return levels.flip(0), cuts.flip(0)

    def bounds(self) -> tuple[Tensor, Tensor]:
        levels = _levels_on(self.scale.device, self.scale.dtype, self.q, self.r, self.bits, **self._choices)
        return levels[-1] * self.scale - self.offset, levels[0] * self.scale - self.offset

    @property
    def origin(self) -> float | None:
        return -self.offset

    @property
    def code_count(self) -> int:
        return int(2**self.bits) + (self.beyond == "zero")  # "zero" has one code more than the bits hold

    @property
    def lift(self) -> float:
        return self.offset

    @property
    def title(self) -> str:
        return f"log, base 2^({self.q}/{self.r})"

    def absorb_offset(self) -> "tuple[float, LogQuantizer]":
        return self.offset, replace(self, keeps_offset=True) if self.offset else self

    @property
    def kept_offset(self) -> float:
        return self.offset if self.keeps_offset else 0.0

    def restore_offset(self) -> "LogQuantizer":
        return replace(self, keeps_offset=False)

    def describe(self, count: int = 0) -> str:
        beyond = " and a zero beyond its codes" if self.beyond == "zero" else ""
        table = f" u{self.width}" if self.width else ""
        return f"{self.bits}-bit log 2^({self.q}/{self.r}){table}{beyond}"

    @property
    def why_no_integers(self) -> str:
        if self.width:
            return ""
        return (
            "has logarithmic codes with float levels, which executors cannot multiply as integers: quantize the model "
            "with a method that has integer tables, such as adalog"
        )

    def table_integers(self) -> Tensor:
        """Return the integer of each code, below 2**width, in units of `unit`: int64, (2**bits,), on the CPU."""
        integers = integer_levels(self.q, self.r, self.bits, self.headroom, table=self.table)
        if self.beyond == "zero-coded":
            integers[-1] = 0
        return integers

    @property
    def unit(self) -> Tensor:
        """The value of one unit of the table: float64, the shape of the scale."""
        return self.scale.double() * integer_unit(self.bits, self.headroom, table=self.table)

    def integers(self, code: Tensor) -> list[Tensor]:
        code = code.to(torch.int64)
        table = self.table_integers().to(code.device)
        return [table[code], *([torch.ones_like(code)] if self._takes_offset_off else [])]

    def units(self) -> list[Tensor]:
        return [self.unit, *([torch.full_like(self.unit, -self.offset)] if self._takes_offset_off else [])]

    def limits(self) -> list[tuple[int, int]]:
        return [(0, int(self.table_integers().max())), *([(1, 1)] if self._takes_offset_off else [])]

    @property
    def multiplied_bits(self) -> int:
        """The width of the table's integers, else of a mantissa, else of a float [bits]."""
        if self.width:
            return self.width
        if self.q % self.r == 0:  # all mantissas are equal, so a product is only a shift
            return 0
        return self.bits + 1 if self.table else FLOAT_BITS

    @property
    def look_ups(self) -> int:
        if not self.multiplied_bits:
            return 0
        return 1 if self.width else 2  # one integer of a table, or a mantissa and a shift (Eqs. 8-9)

    @property
    def shifts_products(self) -> bool:
        return not self.width

    @property
    def table_bytes(self) -> int:
        return 2**self.bits * self.width // 8

    def without_table(self) -> "LogQuantizer":
        return replace(self, width=0, headroom=0)

    def fields(self) -> dict[str, Any]:
        return {"kind": self.kind, **self._common_fields(), **{name: getattr(self, name) for name in _FIELDS}}

    @classmethod
    def of_fields(cls, name: str, record: Mapping[str, Any], scale: Tensor) -> "LogQuantizer":
        choices = {key: record[key] for key in _FIELDS}
        sane = scale.numel() == 1 and all(is_whole(choices[key], 1, 2**16) for key in ("q", "r"))
        sane = sane and choices["beyond"] in get_args(Beyond) and choices["rounding"] in get_args(Rounding)
        sane = sane and all(type(choices[key]) is bool for key in ("table", "keeps_offset"))
        sane = sane and type(choices["offset"]) in (int, float) and math.isfinite(choices["offset"])
        sane = sane and all(is_whole(choices[key], 0, 16) for key in ("width", "headroom"))
        if not sane:
            raise ArtifactError(f"quantizer {name} has invalid fields for a logarithmic quantizer: {choices}")
        return LogQuantizer(scale=scale, bits=record["bits"], **choices)


_FIELDS = ("q", "r", "beyond", "rounding", "table", "offset", "keeps_offset", "width", "headroom")
