"""Define how a kernel encodes each value before it stores it, and build the tables for that.

The code of GELU(x), or of a probability, takes few values. A kernel finds the code by comparing x with thresholds. This
module computes the thresholds in float64 from the definition of the function.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adalog.quantizers import LogQuantizer, Quantizer

LEAST_BUCKETS, MOST_BUCKETS = 32, 2048  # the fewest and the most buckets of a function of few values
EDGE = 1e-3  # fraction of a bucket: larger than the rounding of a bucket number


@dataclass(frozen=True)
class Codes:
    """Finish that stores a uniform quantizer's codes: clamp(round(y / scale) + zero, 0, top), (columns,) each."""

    scale: Tensor  # float64
    zero: Tensor
    top: Tensor


@dataclass(frozen=True)
class Lookup:
    """Finish that stores the bytes of a function of y that takes few values.

    thresholds: ascending, float32. values: int32, one more than the thresholds; values[0] holds below the first
    threshold, and values[i + 1] from thresholds[i] on. planes: the bytes per value.
    """

    thresholds: Tensor
    values: Tensor
    planes: int


Finish = Codes | Lookup | None  # what a kernel does with its results y; None: it stores them in float32


def entries_of(quantizer: Quantizer) -> Tensor:
    """Return the integer of each code of a left operand, which fits in one or two bytes: int32, (2**bits,)."""
    if isinstance(quantizer, LogQuantizer):
        return quantizer.table_integers().int()
    return torch.arange(quantizer.code_count).int()


def lookup_of(quantizer: Quantizer, function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Lookup:
    """Return the lookup of the code of function(x), for x in float32. dtype: the type used to compute the codes."""
    entries, wide = entries_of(quantizer), quantizer.map(lambda value: value.to(dtype))
    thresholds, codes = steps_of(lambda x: wide.quantize(function(x.to(dtype))).long().reshape(-1))
    values = entries[codes]
    changes = values.diff() != 0  # codes beyond the last integer of a table are all zeros
    values = torch.cat([values[:1], values[1:][changes]])
    return Lookup(thresholds[changes], values, 2 if int(entries.max()) > 255 else 1)


def _float_of(key: Tensor) -> Tensor:
    """Return the float32 of this rank among all float32; zero has rank 0."""
    return torch.where(key < 0, key ^ 0x7FFFFFFF, key).to(torch.int32).view(torch.float32)


def steps_of(values: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Return a function of float32 as ascending thresholds, float32, and its values between them, int64, one more.

    values: the function, which takes few values. It is sampled 256 times per octave, and must be monotonic between two
    samples.
    """
    most = 0x7F7FFFFF
    keys = torch.arange(-most - 1, most, 1 << 15)
    samples = values(_float_of(keys))
    changes = samples.diff().nonzero()[:, 0]
    low, high = keys[changes], keys[changes + 1]
    left, right = samples[changes], samples[changes + 1]
    places, after = [], []
    while len(low):
        # bisect for the first key in (low, high] whose value differs from that of `low`
        start, bottom, top = left, low, high
        while bool((top - bottom > 1).any()):
            middle = (bottom + top) // 2
            same = values(_float_of(middle)) == start
            bottom, top = torch.where(same, middle, bottom), torch.where(same, top, middle)
        value = values(_float_of(top))
        places.append(top)
        after.append(value)
        more = value != right
        low, high, left, right = top[more], high[more], value[more], right[more]
    if not places:
        return torch.empty(0), samples[:1]
    place_of, order = torch.cat(places).sort()
    return _float_of(place_of), torch.cat([samples[:1], torch.cat(after)[order]])


def search_tables(thresholds: Tensor, values: Tensor) -> tuple[int, Tensor, Tensor]:
    """Return (depth, heap, values) of a function of few values, as `Steps` in structures.h defines them."""
    depth = max(4, len(thresholds).bit_length())
    count = 2**depth
    padded = torch.full((count - 1,), -math.inf)  # no value is below these
    padded[: len(thresholds)] = thresholds.flip(0)
    heap = torch.full((count + 32,), -math.inf)
    for level in range(depth):  # 2**level thresholds, (count >> level) apart
        middle = (count >> (level + 1)) - 1
        heap[1 << level : 2 << level] = padded[middle :: count >> level]
    entries = values[0].repeat(count + 32)  # padded with the value below all thresholds
    entries[: len(values)] = values.flip(0)
    return depth, heap, entries.to(torch.int32)


def _within(thresholds: Tensor, count: int) -> tuple[Tensor, Tensor, float, float]:
    """Return the range of thresholds in each of `count` equal buckets, [first, last), and the slope and origin.

    first, last: int64, (count,). A value x falls into bucket slope * x + origin, without the fraction.
    """
    cuts = thresholds.double()
    low, width = float(cuts[0]), float(cuts[-1] - cuts[0])
    slope = float(torch.tensor((count - 2) / width if width else 1.0).float())
    origin = float(torch.tensor(1 - low * slope).float())
    if not abs(origin) < 2**30:  # the thresholds are too close to each other: search the heap
        slope, origin = 2.0**-100, 0.0
    places, numbers = cuts * slope + origin, torch.arange(count, dtype=torch.float64)
    # Kernels round bucket numbers, so a threshold near the end of a bucket counts for both buckets.
    first, last = (torch.searchsorted(places, numbers + edge) for edge in (-EDGE, 1 + EDGE))
    first[0], last[-1] = 0, len(places)  # values beyond the ends fall into the outer buckets
    return first, last, slope, origin


def buckets_of(thresholds: Tensor, values: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """Return the buckets of a function of few values, and the fields of `Steps` that assign values to buckets.

    buckets: int32, (count, 2): the bits of the threshold, a float32, and the values below it (low 16 bits) and from it
    on (high 16 bits). The count is doubled until each bucket has at most one threshold, or up to MOST_BUCKETS, which
    fit in the first-level cache. A bucket with more thresholds has NaN as its threshold. Logarithmic codes crowd
    buckets of equal width, and crowd growing buckets less.
    """
    values = values.int()
    if not len(thresholds):
        return torch.stack([torch.zeros(1, dtype=torch.int32), values | (values << 16)], dim=1), {}
    count = LEAST_BUCKETS
    first, last, slope, origin = _within(thresholds, count)
    while count < MOST_BUCKETS and bool((last - first > 1).any()):
        count *= 2
        first, last, slope, origin = _within(thresholds, count)
    places: dict[str, Any] = {"slope": slope, "origin": origin}
    if bool((last - first > 1).any()):
        grown_first, grown_last, grown = _around(thresholds)
        if _crowd(grown_first, grown_last) < _crowd(first, last):
            first, last, places = grown_first, grown_last, grown
    pairs = values[first] | (values[last] << 16)
    ends = torch.where(last == first, math.inf, thresholds[first.clamp(max=len(thresholds) - 1)])
    ends = torch.where(last > first + 1, math.nan, ends)
    return torch.stack([ends.float().view(torch.int32), pairs], dim=1), places


def _crowd(first: Tensor, last: Tensor) -> int:
    """Return the number of thresholds that share a bucket with another threshold."""
    within = last - first
    return int(within[within > 1].sum())


def _around(thresholds: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return the range of thresholds in each of MOST_BUCKETS buckets that grow with the distance from a centre.

    The centre is a threshold or the middle of two thresholds, chosen so that the fewest thresholds share a bucket. A
    kernel rounds only once here, to float32, so no threshold counts for two buckets.
    """
    half, middles = MOST_BUCKETS // 2, (thresholds[1:] + thresholds[:-1]) / 2
    centers = torch.cat([thresholds, middles])
    centers = centers[centers.isfinite()]
    candidates = []
    for shift in (18, 17, 16):  # 32, 64 and 128 buckets for each power of two
        sizes = (thresholds - centers[:, None]).view(torch.int32)
        bits = (sizes & 0x7FFFFFFF) >> shift
        leasts = (bits.amax(1, keepdim=True) - half + 1).clamp(min=0)
        numbers = (bits - leasts).clamp(0, half - 1)
        numbers = torch.where(sizes < 0, half - 1 - numbers, half + numbers)
        alone = torch.ones_like(numbers, dtype=torch.bool)
        alone[:, 1:] &= numbers.diff() != 0
        alone[:, :-1] &= numbers.diff() != 0
        best = int(alone.sum(1).argmax())
        candidates.append((int(alone[best].sum()), numbers[best], float(centers[best]), shift, int(leasts[best])))
    _, numbers, center, shift, least = max(candidates, key=lambda candidate: candidate[0])
    positions = torch.arange(2 * half)
    first, last = torch.searchsorted(numbers, positions), torch.searchsorted(numbers, positions, right=True)
    return first, last, {"center": center, "shift": shift, "least": least}


def few_buckets_of(thresholds: Tensor) -> tuple[Tensor, int, float, float] | None:
    """Return (near, most, near_slope, near_origin) of `Steps` in structures.h, or None if 32 buckets are too few."""
    if not 0 < len(thresholds) < 32:
        return None
    first, last, slope, origin = _within(thresholds, 32)
    most = int((last - first).max())
    if most > 3:
        return None
    numbers = first + torch.arange(3)[:, None]
    within = torch.where(numbers < last, thresholds[numbers.clamp(max=len(thresholds) - 1)], math.nan)
    return torch.cat([within, (len(thresholds) - first).int().view(torch.float32)[None]]), most, slope, origin
