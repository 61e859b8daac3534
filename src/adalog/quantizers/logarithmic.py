"""The logarithmic quantizers: log2, log-sqrt2 and AdaLog, each formula of Eqs. 1-9 written once.

Every function broadcasts: a leading candidate axis on the parameters gives a leading candidate axis on the result.
Codes are integers held in the dtype of the input, float32 or float64 (narrower inputs are computed in float32).
Rounding is to the nearest integer, halves to even.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from adalog.errors import ArtifactError
from adalog.quantizers.elementwise import are_values, nearest_log
from adalog.quantizers.quantizer import FLOAT_BITS, Quantizer, at_least_float32, by_slices, check_bits
from adalog.stored import is_whole

Beyond = Literal["saturate", "zero", "zero-coded"]
Rounding = Literal["log", "nearest"]

WIDTHS = (8, 16)  # bits of the integers in a logarithmic quantizer's table
_TABLE_BINS = 1 << 20


def log_tables(q: int, r: int, bits: int) -> tuple[Tensor, Tensor]:
    """Eqs. 8-9: for every code k the shift floor(k q / r) and the mantissa round(2**-((k q mod r) / r) / table_step).

    table_step = 1 / (2 (2**bits - 1)), so a mantissa is an integer of bits + 1 bits. Both tables: int64, (2**bits,).
    """
    product = torch.arange(2**bits) * q
    exact = torch.exp2(-(product % r).double() / r)
    return product // r, (exact / table_step(bits)).round().to(torch.int64)


def table_step(bits: int) -> float:
    """The scale of the mantissa table, s_table above Eq. 9."""
    return 1 / (2 * (2**bits - 1))


def most_headroom(bits: int, width: int, *, table: bool = True) -> int:
    """The largest headroom whose table fits in `width` bits; below zero where none does."""
    return width - bits - 1 if table else width - 1


def integer_levels(q: int, r: int, bits: int, headroom: int, *, table: bool = True) -> Tensor:
    """The integer of each code, in units of `integer_unit`: int64, (2**bits,), the folded table of Eq. 10.

    table: T = (U << headroom) >> A, with the mantissas U and shifts A of `log_tables`. Without it each integer is
    2**headroom times the exact power 2**(-k q / r), rounded to the nearest.
    """
    if table:
        shift, mantissa = log_tables(q, r, bits)
        return (mantissa << headroom) >> shift.clamp(max=62)  # larger shifts are undefined
    return torch.exp2(headroom - torch.arange(2**bits, dtype=torch.float64) * q / r).round().to(torch.int64)


def integer_unit(bits: int, headroom: int, *, table: bool = True) -> float:
    """The value of one unit of `integer_levels` at scale 1."""
    return (table_step(bits) if table else 1.0) * 2.0**-headroom


@lru_cache(4096)
def log_levels(
    q: int, r: int, bits: int, *, beyond: Beyond = "zero-coded", table: bool = True, headroom: int | None = None
) -> Tensor:
    """The value of each code at scale 1, descending: float64, (2**bits,), or one more where `beyond` is "zero".

    table: Eq. 7 with the quantized mantissas of Eq. 9 (AdaLog as it runs in integers). Without it the exact powers
    2**(-k q / r): Eq. 2 for (q, r) = (1, 1), log2, and Eq. 4 for (1, 2), whose parity scale S~ makes odd codes exact.
    headroom: the levels are those of the integer table with this headroom (`integer_levels`); None: there is no table.
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
    """The values of x / scale at which one code gives way to the next, descending: float64, one fewer than the levels.

    A value takes code k where it is at most thresholds[k - 1] and above thresholds[k]. Rounding "log" is Eq. 5: code k
    ends where -log2(x / scale) r / q = k + 1/2. Rounding "nearest" puts the threshold half way between two levels.
    """
    levels = log_levels(q, r, bits, beyond=beyond, table=table, headroom=headroom)
    if rounding == "nearest":
        # Rounded mantissas can make neighbours equal: the first keeps the interval, the others get an empty one.
        distinct, first = levels.unique_consecutive(return_inverse=True)
        middle = torch.cat([(distinct[:-1] + distinct[1:]) / 2, distinct.new_zeros(1)])
        return middle[first[:-1]]
    return torch.exp2(-(torch.arange(len(levels) - 1, dtype=torch.float64) + 0.5) * q / r)


@lru_cache(64)
def log_steps(
    low: int,
    high: int,
    r: int,
    bits: int,
    *,
    beyond: Beyond,
    rounding: Rounding,
    table: bool,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """The levels and thresholds of every base from q = low to high: (Q, levels) and (Q, thresholds).

    They are those of `log_levels` and `log_thresholds`, but ascending, and are copied to the device once.
    """
    bases = range(low, high + 1)
    levels = [log_levels(q, r, bits, beyond=beyond, table=table) for q in bases]
    cuts = [log_thresholds(q, r, bits, beyond=beyond, rounding=rounding, table=table) for q in bases]
    with torch.inference_mode(mode=False):  # they are cached for later callers, who may need normal tensors
        return torch.stack(levels).flip(1).to(device), torch.stack(cuts).flip(1).to(device)


class Bins:
    """A table that counts the thresholds not below a value, exactly as `torch.bucketize` does, several times faster.

    The leading bits of a float are the number of its bin. Bins are so narrow that none holds two different thresholds.
    counts: two per bin, for values above the threshold that lies in the bin and for values at most that threshold.
    ends: that threshold; 0 where there is none. lowest, highest: values are clamped to this interval first; a NaN takes
    the last count. first: the number of the first bin. drop: how many trailing bits the number leaves out. fit: false
    where more than `_TABLE_BINS` bins would be needed; the thresholds are then searched directly.
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
        self.fit = last - self.first <= _TABLE_BINS  # false for close thresholds over many octaves: no search finds any
        self.ascending = thresholds.to(dtype).clamp(min=tiny).flip(0).to(device)
        if not self.fit:
            return
        numbers = torch.arange(self.first, last + 1, dtype=self.integer)
        upper_edges = ((numbers + 1) << self.drop).view(dtype)
        distinct = len(cuts) - torch.searchsorted(cuts.flip(0), upper_edges, out_int32=True)
        passed = torch.cat([repeats.new_zeros(1), repeats.cumsum(0), repeats.sum()[None]]).to(torch.int32)
        counts = passed[torch.stack([distinct, distinct + 1], dim=1)]  # for values above the end, and at most it
        self.counts = counts.to(device)
        self.ends = torch.cat([cuts, cuts.new_zeros(1)])[distinct].to(device)  # the last interval has no lower end


def _places(values: Tensor, bins: Bins) -> Tensor:
    """The place of each value, (n,), among the flattened `counts` of bins that fit: int32."""
    values = values.clamp(bins.lowest, bins.highest).nan_to_num_(bins.lowest)
    number = (values.view(bins.integer) >> bins.drop).sub_(bins.first)
    # The sign of how far the threshold is above the value, -1 or 0: comparisons take several times as long.
    sign = bins.ends.index_select(0, number).sub_(values).view(bins.integer) >> (8 * values.element_size() - 1)
    return number.mul_(2).add_(1).add_(sign)


def _count_not_below(x: Tensor, bins: Bins) -> Tensor:
    """How many of the thresholds are not below each x: int32, the shape of x."""
    if bins.fit and are_values(x):
        return bins.counts.reshape(-1).index_select(0, _places(x.reshape(-1), bins)).view(x.shape)
    values = x.clamp(bins.lowest, bins.highest).nan_to_num_(bins.lowest)
    return len(bins.ascending) - torch.searchsorted(bins.ascending, values, out_int32=True)


@lru_cache(128)
def _bins_on(device: torch.device, dtype: torch.dtype, q: int, r: int, bits: int, **choices: Any) -> Bins:
    """The bins of `log_thresholds`, copied to the device once."""
    with torch.inference_mode(mode=False):  # they are cached for later callers, who may need normal tensors
        return Bins(log_thresholds(q, r, bits, **choices), dtype, device)


@lru_cache(128)
def _levels_on(device: torch.device, dtype: torch.dtype, q: int, r: int, bits: int, **choices: Any) -> Tensor:
    """`log_levels` in this type, copied to the device once."""
    with torch.inference_mode(mode=False):
        return log_levels(q, r, bits, **choices).to(device, dtype)


def log_quantize(
    x: Tensor,
    scale: Tensor,
    q: Tensor | int,
    r: int,
    bits: int,
    *,
    beyond: Beyond = "saturate",
    rounding: Rounding = "log",
    table: bool = True,
    headroom: int | None = None,
) -> Tensor:
    """Eq. 5 with log2(base) = q / r: code = clamp(round(-log2(x / scale) r / q), 0, 2**bits - 1).

    (q, r) = (1, 1) is the log2 quantizer of Eq. 1, (1, 2) the log-sqrt2 quantizer of Eq. 3, (q, 37) AdaLog.
    beyond: values below the last level saturate ("saturate": the paper), take the extra code 2**bits that means zero
    ("zero": the released code, not storable in `bits` bits), or take the last code, which then means zero
    ("zero-coded"). rounding: "log" as above, or "nearest", to the nearest level.
    """
    last = 2**bits if beyond == "zero" else 2**bits - 1
    ratio = at_least_float32(x) / scale
    if rounding == "log":
        exponent = ratio.clamp_(min=torch.finfo(ratio.dtype).tiny).log2_().neg_()
        return torch.div(exponent.mul_(r), q).round_().clamp_(0, last)

    def nearest(values: Tensor, base: int) -> Tensor:
        choices = {"beyond": beyond, "rounding": rounding, "table": table, "headroom": headroom}
        return _count_not_below(values, _bins_on(values.device, values.dtype, base, r, bits, **choices))

    return _per_base(nearest, ratio, q).to(ratio.dtype)


def log_dequantize(
    code: Tensor,
    scale: Tensor,
    q: Tensor | int,
    r: int,
    bits: int,
    *,
    beyond: Beyond = "saturate",
    table: bool = True,
    headroom: int | None = None,
) -> Tensor:
    """Eq. 7 (with `table`) or Eqs. 2, 4 and 6 (without): scale times the level of each code."""

    def lookup(codes: Tensor, base: int) -> Tensor:
        choices = {"beyond": beyond, "table": table, "headroom": headroom}
        levels = _levels_on(scale.device, scale.dtype, base, r, bits, **choices)
        return levels.index_select(0, codes.reshape(-1).to(torch.int32)).view(codes.shape)

    return _per_base(lookup, code, q) * scale


def _per_base(function: Callable[[Tensor, int], Tensor], values: Tensor, q: Tensor | int) -> Tensor:
    """function(values, q) for one integer q, or for each entry of q's leading candidate axis, (K, 1, ...)."""
    if isinstance(q, int) or q.numel() == 1:
        single = function(values, int(q))
        return single if isinstance(q, int) or q.ndim <= single.ndim else single.reshape(q.shape[0], *single.shape)
    if q.numel() != q.shape[0]:
        raise ValueError(f"q of shape {tuple(q.shape)} varies along more than its leading candidate axis")
    values = values.expand(torch.broadcast_shapes(values.shape, q.shape))
    return torch.stack([function(row, int(base)) for row, base in zip(values, q.flatten().tolist(), strict=True)])


@dataclass(frozen=True)
class LogQuantizer(Quantizer):
    """A logarithmic quantizer of base 2**(q / r) with its parameters, for x + offset >= 0 (Eqs. 5-9, 13-14).

    scale: float32, one value. offset: minus the activation's minimum. keeps_offset: the dequantized value is that of
    x + offset, because the consumer's bias has absorbed the offset (Eq. 15); otherwise the offset is taken off.
    table: mantissas are quantized (Eq. 9). width, headroom: those of the table of integers that stands for the levels
    (`table_integers`). A width of 8 or 16 bits; 0: there is no such table, and the levels are floats.
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
        check_bits(self.bits)
        if self.q < 1 or self.r < 1:
            raise ValueError(f"log2(base) = {self.q} / {self.r} is not positive")
        if not self.width:
            return
        if self.beyond == "zero":
            raise ValueError(f"2**{self.bits} + 1 values are more than a table of integers has codes for")
        most = most_headroom(self.bits, self.width, table=self.table)
        if self.width not in WIDTHS or not 0 <= self.headroom <= most:
            raise ValueError(
                f"a table of {self.width} bits with a headroom of {self.headroom} does not hold {self.bits}-bit codes' "
                f"levels: the width is one of {', '.join(map(str, WIDTHS))}, the headroom from 0 to {most}"
            )

    def quantize(self, x: Tensor) -> Tensor:
        return log_quantize(
            self._lifted(x), self.scale, self.q, self.r, self.bits, rounding=self.rounding, **self._choices
        )

    def _lifted(self, x: Tensor) -> Tensor:
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

    def _nearest(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1)
        if self.rounding == "nearest":
            dtype = torch.result_type(self._lifted(flat[:1]), self.scale)
            bins = _bins_on(x.device, dtype, self.q, self.r, self.bits, rounding=self.rounding, **self._choices)
            if bins.fit and are_values(x):  # a value's place leads to its level at once
                levels = self.dequantize(bins.counts.reshape(-1)).to(x.dtype).reshape(-1)
                span, places = (bins.lowest, bins.highest), (bins.drop, bins.first)
                found = nearest_log(x, self.offset, self.scale, span, places, bins.ends, levels)
                if found is not None:
                    return found
                return by_slices(lambda some: levels.index_select(0, self._places(some, bins)), flat).view(x.shape)
        return by_slices(lambda some: self.dequantize(self.quantize(some)).to(x.dtype), flat).view(x.shape)

    def _places(self, x: Tensor, bins: Bins) -> Tensor:
        return _places((self._lifted(x) / self.scale).reshape(-1), bins)

    def bounds(self) -> tuple[Tensor, Tensor]:
        levels = log_levels(self.q, self.r, self.bits, **self._choices)
        return float(levels[-1]) * self.scale - self.offset, float(levels[0]) * self.scale - self.offset

    def step(self, x: Tensor) -> Tensor:
        return self.scale

    @property
    def code_count(self) -> int:
        return int(2**self.bits) + (self.beyond == "zero")  # one more than these bits hold

    @property
    def lift(self) -> float:
        return self.offset

    @property
    def title(self) -> str:
        return f"log, base 2^({self.q}/{self.r})"

    def absorbed(self) -> "tuple[float, LogQuantizer]":
        return self.offset, replace(self, keeps_offset=True) if self.offset else self

    @property
    def kept_offset(self) -> float:
        return self.offset if self.keeps_offset else 0.0

    def unabsorbed(self) -> "LogQuantizer":
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
            "has logarithmic codes with levels in float, which no integers stand for: quantize the model with a method "
            "whose tables are of integers, such as adalog"
        )

    def table_integers(self) -> Tensor:
        """The integer below 2**width of each code, in units of `unit`: int64, (2**bits,), on the CPU."""
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
        """The width of the table's integers, else of a mantissa, else of a float.

        Mantissas are bits + 1 wide. A base that is a power of two has one mantissa and needs a shift alone: 0.
        """
        if self.width:
            return self.width
        if self.q % self.r == 0:
            return 0
        return self.bits + 1 if self.table else FLOAT_BITS

    @property
    def look_ups(self) -> int:
        if not self.multiplied_bits:
            return 0
        return 1 if self.width else 2  # a table's integer, or a mantissa and a shift (Eqs. 8-9)

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
    def of_fields(cls, name: str, given: Mapping[str, Any], scale: Tensor) -> "LogQuantizer":
        choices = {key: given[key] for key in _FIELDS}
        sane = scale.numel() == 1 and all(is_whole(choices[key], 1, 2**16) for key in ("q", "r"))
        sane = sane and choices["beyond"] in get_args(Beyond) and choices["rounding"] in get_args(Rounding)
        sane = sane and all(type(choices[key]) is bool for key in ("table", "keeps_offset"))
        sane = sane and type(choices["offset"]) in (int, float) and math.isfinite(choices["offset"])
        sane = sane and all(is_whole(choices[key], 0, 16) for key in ("width", "headroom"))
        if not sane:
            raise ArtifactError(f"quantizer {name} has choices that no logarithmic quantizer has: {choices}")
        return LogQuantizer(scale=scale, bits=given["bits"], **choices)


_FIELDS = ("q", "r", "beyond", "rounding", "table", "offset", "keeps_offset", "width", "headroom")
