"""Encode values as the digits of the integers that their codes represent."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adalog.quantizers import Bins, LogQuantizer, Quantizer, UniformQuantizer
from adalog.runtime.integer.digits import Digits, multiplies_rows
from adalog.runtime.integer.memory import CHUNK, chunks, is_channels_last, is_transposed, scratch
from adalog.runtime.reference import IntegerSite

_LEAST_THRESHOLD = torch.finfo(torch.float32).tiny * 2.0**17  # bins do not separate thresholds below this


class DigitEncoder:
    """Encoder of values into the digits of the integers of their codes: one tensor per part and factor.

    The codes are the same as from `Quantizer.quantize`, bit for bit. For float32 values and the common quantizers, the
    digits are computed directly, without codes in between.
    """

    def __init__(self, quantizer: Quantizer, site: IntegerSite):
        self.quantizer = quantizer
        self._digits = [Digits(*limit, signed=multiplies_rows(site)) for limit in quantizer.limits()]
        self._dtype = self._digits[0].dtype
        self._direct: _UniformDigits | _LogDigits | None = None
        if len(self._digits) == 1 and quantizer.scale.dtype == torch.float32:
            (digits,) = self._digits
            if isinstance(quantizer, UniformQuantizer) and len(digits.factors) == 1:
                self._direct = _UniformDigits(quantizer, digits)
            elif isinstance(quantizer, LogQuantizer) and quantizer.rounding == "nearest":
                self._direct = _log_digits(quantizer, digits)

    @staticmethod
    def key(site: IntegerSite) -> str:
        """Return the kind of digits that a site's product takes. Sites with the same key share an encoded operand."""
        return "bytes" if multiplies_rows(site) else "floats"

    @property
    def by_value(self) -> bool:
        """True if a value's code does not depend on its position in the tensor."""
        return self.quantizer.scale.numel() == 1

    def __call__(self, x: Tensor, outs: list[Tensor] | None = None) -> list[Tensor]:
        """Return the digits of values. outs: memory for the digits, from `empty` or `scratch`."""
        if self._direct is None or x.dtype != torch.float32 or not x.numel():
            digits = self.lift(self.quantizer.quantize(x))
            return digits if outs is None else [out.copy_(digit) for out, digit in zip(outs, digits, strict=True)]
        if outs is None:
            if is_channels_last(x):
                rows = x.permute(0, 2, 3, 1)
                if self.by_value:
                    return [_as_image(digit) for digit in self(rows)]
                outs = [_as_image(out) for out in self.empty(rows.shape, x.device)]
            elif is_transposed(x) and isinstance(self.quantizer, UniformQuantizer):
                outs = [out.mT for out in self.empty(x.mT.shape, x.device)]
            else:
                outs = self.empty(x.shape, x.device)
        self._direct(x, outs)
        return outs

    def lift(self, code: Tensor) -> list[Tensor]:
        """Return the digits of codes."""
        parts = self.quantizer.integers(code)
        return [digit for part, digits in zip(parts, self._digits, strict=True) for digit in digits.split(part)]

    def empty(self, shape: Sequence[int], device: torch.device) -> list[Tensor]:
        """Allocate memory for the digits of a value of this shape."""
        return [torch.empty(shape, dtype=self._dtype, device=device) for _ in range(self._count)]

    def scratch(self, shape: Sequence[int], device: torch.device) -> list[Tensor]:
        """Return this thread's memory for the digits of a value of this shape. The next call reuses the memory."""
        return [scratch(f"digit {i}", shape, self._dtype, device) for i in range(self._count)]

    @property
    def _count(self) -> int:
        return sum(len(digits.factors) for digits in self._digits)


def _as_image(x: Tensor) -> Tensor:
    """Permute (B, H, W, C) to (B, C, H, W). The channels stay last in memory."""
    return x.permute(0, 3, 1, 2)


class _UniformDigits:
    """Encoder of uniform codes with a single digit: clamp(round(x / scale) - constant, *bounds).

    scale: has no dimensions if there is only one. bounds: two numbers, or two tensors with the shape of the scale.
    """

    def __init__(self, quantizer: UniformQuantizer, digits: Digits):
        zero_point, scale, self.constant = quantizer.zero_point, quantizer.scale, digits.constant
        bounds = -zero_point - self.constant, 2**quantizer.bits - 1 - zero_point - self.constant
        self.bounds: Any = [bound.item() for bound in bounds] if zero_point.numel() == 1 else bounds
        self.scale = scale.reshape(()) if scale.numel() == 1 else scale

    def __call__(self, x: Tensor, outs: list[Tensor]) -> None:
        (result,) = outs
        for values, out in self._pieces(x, result):
            if out.dtype == torch.float32:  # digits in floats have the constant 0
                torch.div(values, self.scale, out=out).round_().clamp_(*self.bounds)
                continue
            code = scratch("values", values.shape, torch.float32, x.device)
            torch.div(values, self.scale, out=code).round_()
            if self.constant:
                code.sub_(self.constant)
            out.copy_(code.clamp_(*self.bounds))

    def _pieces(self, x: Tensor, out: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Split values and the memory for their digits into pieces that fit in the cache."""
        if self.scale.ndim == 0 and x.is_contiguous():
            return chunks(x.view(-1), out.view(-1))
        if x.device.type == "cpu" and (self.scale.ndim < x.ndim or self.scale.shape[0] == 1):
            count = min(len(x), -(-x.numel() // CHUNK))
            return zip(x.tensor_split(count), out.tensor_split(count), strict=True)
        return iter([(x, out)])


@dataclass(frozen=True, eq=False)
class _LogDigits:
    """Encoder of logarithmic codes by table. The index is a value's bin, and whether the value is above the bin's end.

    bins: the bins of the quantizer's thresholds. first: the number of the first bin in `ends`. ends: the end of each
    bin, which is the threshold in it, as the bits of a float32. tables: one per factor. For bin i, entry 2 i - 1 is the
    digit of values above the end, and entry 2 i is the digit of the other values.
    """

    offset: float
    bins: Bins
    first: int
    ends: Tensor
    tables: list[Tensor]

    def __call__(self, x: Tensor, outs: list[Tensor]) -> None:
        for values, *pieces in chunks(x.reshape(-1), *(out.view(-1) for out in outs)):
            value = scratch("values", values.shape, torch.float32, x.device)
            number = scratch("numbers", values.shape, torch.int32, x.device)
            end = scratch("ends", values.shape, torch.int32, x.device)
            if self.offset:
                torch.add(values, self.offset, out=value).clamp_(self.bins.lowest, self.bins.highest)
            else:
                torch.clamp(values, self.bins.lowest, self.bins.highest, out=value)
            bits = value.view(torch.int32)
            torch.bitwise_right_shift(bits, self.bins.drop, out=number)
            if self.first:
                number.sub_(self.first)
            number.clamp_(1, len(self.ends) - 1)  # the bits of a NaN are beyond all bins
            torch.index_select(self.ends, 0, number, out=end)
            # Positive floats are in the same order as their bits. The difference is negative for a value above the end.
            # An arithmetic shift by 31 turns it into -1 then, and into 0 otherwise.
            above = torch.sub(end, bits, out=end).bitwise_right_shift_(31)
            torch.add(above, number, alpha=2, out=number)
            for table, piece in zip(self.tables, pieces, strict=True):
                torch.index_select(table, 0, number, out=piece)


def _log_digits(quantizer: LogQuantizer, digits: Digits) -> _LogDigits | None:
    """Create the encoder of a quantizer. Return None if bins do not separate its thresholds."""
    thresholds = value_thresholds(quantizer)
    bins = Bins(thresholds, torch.float32)
    if not bins.fit or bool(((thresholds > 0) & (thresholds < _LEAST_THRESHOLD)).any()):
        return None
    # Bins are counted from the one before the lowest, or from bin 0 if the table stays small. One more bin, beyond all
    # values, is for NaN.
    first = 0 if bins.first < 1 << 14 else bins.first - 1
    numbers = torch.arange(first, bins.first + len(bins.ends) + 1) - bins.first
    numbers[-1] = 0
    numbers.clamp_(min=0)
    (values,) = quantizer.integers(bins.counts[numbers].reshape(-1)[1:])
    device = quantizer.scale.device
    tables = [digit.to(device) for digit in digits.split(values)]
    ends = bins.ends[numbers].view(torch.int32).to(device)
    return _LogDigits(quantizer.offset, bins, first, ends, tables)


def value_thresholds(quantizer: LogQuantizer) -> Tensor:
    """Return the values x + offset at which the code changes: float32, descending, on the CPU.

    A value has code k if it is at most thresholds[k - 1] and above thresholds[k]. This is exact: the quotient of the
    value and the scale lies on the same side of the quantizer's own threshold.
    """
    return _largest_values(quantizer.steps()[1].flip(0).float(), quantizer.scale.cpu().reshape(()))


def _largest_values(quotients: Tensor, scale: Tensor) -> Tensor:
    """Return the largest values whose float quotients by the scale are at most these. A quotient of 0 returns 0."""
    values, infinity = quotients * scale, torch.tensor(math.inf)
    while bool((more := (quotients > 0) & (torch.nextafter(values, infinity) / scale <= quotients)).any()):
        values = torch.where(more, torch.nextafter(values, infinity), values)
    while bool((less := values / scale > quotients).any()):
        values = torch.where(less, torch.nextafter(values, -infinity), values)
    return values
