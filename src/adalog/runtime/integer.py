"""The executor on `torch._int_mm` and exact float products: the integers of `reference`, at speed, on any device.

Linears and ungrouped convolutions multiply signed bytes. What does not fit in a byte is cut into digits of base 256,
and what a digit is moved by to be signed comes back as one constant an output channel. Products of many small matrices
(attention, grouped convolutions) run on whole numbers in float32, where no sum reaches 2**24, or in float64.
"""

import functools
import math
import platform
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from adalog.errors import ArtifactError
from adalog.graph.program import Node, Program, refs_of
from adalog.quantizers import Bins, LogQuantizer, Quantizer, UniformQuantizer, log_thresholds
from adalog.runtime.reference import ENCODE, INT32, PRODUCT, IntegerSite, finish
from adalog.runtime.regions import Pure

_TREE_BITS = 4  # up to which codes are found by comparing with one threshold after the other
_CHUNK = 1 << 16  # elements that elementwise steps do at once on a CPU: their temporaries stay in the cache
_EXACT = {torch.float32: 2**24, torch.float64: 2**53}  # below which whole numbers have no gaps
_LEAST = torch.finfo(torch.float32).tiny * 2.0**17  # of the thresholds that bins tell apart
_LARGE = 1 << 20  # multiplications of one of many products, from which bytes pay off
# Whether a float convolution is nothing but its products' sum: where it may be transformed (Winograd), it rounds.
_SUMS_DIRECTLY = torch.backends.mkldnn.is_available() and platform.machine().lower() in ("x86_64", "amd64")
_scratch = threading.local()


def _buffer(name: str, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory of this thread's, uninitialised, (count,): fresh memory costs more than what is done with it."""
    kept: dict[Any, Tensor] = _scratch.__dict__
    key = (name, dtype, device)
    if key not in kept or kept[key].numel() < count:
        kept[key] = torch.empty(count, dtype=dtype, device=device)
    return kept[key][:count]


def _chunks(*values: Tensor, size: int = _CHUNK) -> Iterator[tuple[Tensor, ...]]:
    """Flat tensors of equal length, a cacheful at a time."""
    size = size if values[0].device.type == "cpu" else max(1, values[0].numel())
    return zip(*(value.split(size) for value in values), strict=True)


def _is_channels_last(x: Tensor) -> bool:
    return x.ndim == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)


def _image(x: Tensor) -> Tensor:
    """(B, H, W, C) -> (B, C, H, W), the channels last in memory."""
    return x.permute(0, 3, 1, 2)


# --- digits ----------------------------------------------------------------------------------------------------------


class Digits:
    """Integers from `least` to `most` as sums of signed bytes or, for float products, of whole numbers up to 255.

    An integer is `constant` plus, for each of the `factors`, factor times a digit.
    """

    def __init__(self, least: int, most: int, *, signed: bool):
        self._signed = signed
        self._plain = least >= -128 and most <= 127 if signed else max(-least, most) <= 255
        self._least = 0 if self._plain else least
        count = 1 if self._plain else max(1, -(-(most - least).bit_length() // 8))
        self.factors = tuple(256**place for place in range(count))
        middle = 128 if signed and not self._plain else 0
        self._middle = middle
        self.constant = self._least + middle * sum(self.factors)
        self.largest = max(-least, most) if self._plain else 128 if signed else 255

    def padding(self, factor: int) -> int:
        """The digit of this factor in an integer of zero."""
        return 0 if self._plain else (-self._least // factor) % 256 - self._middle

    def of(self, value: Tensor) -> list[Tensor]:
        """int8, or float32, one tensor a factor."""
        dtype = torch.int8 if self._signed else torch.float32
        if self._plain:
            return [value.to(dtype)]
        raised = value - self._least
        return [(((raised >> (8 * place)) & 255) - self._middle).to(dtype) for place in range(len(self.factors))]


def _left_digits(site: IntegerSite) -> list[Digits]:
    return [Digits(*limit, signed=_by_rows(site)) for limit in site.left.limits()]


def _by_rows(site: IntegerSite) -> bool:
    """Whether a site is one product of two matrices, a stored one on the right."""
    return site.weight is not None and site.groups == 1


# --- values to digits ------------------------------------------------------------------------------------------------


class Encoder:
    """From values to the digits of what their codes stand for: one tensor a part and factor.

    The same codes as `Quantizer.quantize` gives, bit for bit.
    """

    def __init__(self, quantizer: Quantizer, site: IntegerSite):
        self.quantizer = quantizer
        signed = _by_rows(site)
        self._digits = [Digits(*limit, signed=signed) for limit in quantizer.limits()]
        self._dtype = torch.int8 if signed else torch.float32
        plain = len(self._digits) == 1 and quantizer.scale.dtype == torch.float32
        self._tables: list[Tensor] = []
        self._quick: Callable[[Tensor, list[Tensor]], None] | None = None
        if plain and isinstance(quantizer, UniformQuantizer) and len(self._digits[0].factors) == 1:
            constant, top = self._digits[0].constant, 2**quantizer.bits - 1
            bounds = -quantizer.zero_point - constant, top - quantizer.zero_point - constant
            single = quantizer.zero_point.numel() == 1
            self._bounds: list[Any] = [bound.item() if single else bound for bound in bounds]
            self._constant = constant
            self._quick = self._uniform
        elif plain and isinstance(quantizer, LogQuantizer) and quantizer.rounding == "nearest":
            self._quick = self._logarithmic if self._prepare(quantizer) else None

    @property
    def pure(self) -> Pure | None:
        """The same for `torch.compile`, where it is few operations."""
        quantizer, scale = self.quantizer, self.quantizer.scale
        scale = scale.reshape(()) if scale.numel() == 1 else scale
        if self._quick is None:
            return None
        if isinstance(quantizer, UniformQuantizer):
            low = -quantizer.zero_point.reshape(scale.shape) - self._constant
            bounds = low, low + (2**quantizer.bits - 1)
            return Pure(_uniform_digit, (self._narrow, self._constant), (scale, *bounds))
        if isinstance(quantizer, LogQuantizer) and quantizer.bits <= _TREE_BITS:
            offset = torch.tensor(quantizer.offset, dtype=scale.dtype, device=scale.device)
            digits = (digit.to(scale) for digit in self.lift(torch.arange(2**quantizer.bits)))
            return Pure(_log_digits, (self._narrow,), (offset, self._cuts.to(scale), *digits))
        return None

    @property
    def _narrow(self) -> torch.dtype:
        """The narrowest type of a digit that is the only one."""
        ((least, most),) = self.quantizer.limits()
        if self._dtype == torch.int8 or len(self._digits[0].factors) > 1:
            return self._dtype
        return (
            torch.int8 if least >= -128 and most <= 127 else torch.uint8 if 0 <= least <= most <= 255 else self._dtype
        )

    @property
    def by_value(self) -> bool:
        """Whether a value's code does not depend on where it is."""
        return self.quantizer.scale.numel() == 1

    @staticmethod
    def key(site: IntegerSite) -> str:
        """Sites of the same key share what is encoded for one of them."""
        return "bytes" if _by_rows(site) else "floats"

    def __call__(self, x: Tensor, puts: list[Tensor] | None = None) -> list[Tensor]:
        """puts: memory for the digits, as `room` gives it."""
        if self._quick is None or x.dtype != torch.float32 or not x.numel():
            digits = self.lift(self.quantizer.quantize(x))
            return digits if puts is None else [put.copy_(digit) for put, digit in zip(puts, digits, strict=True)]
        if puts is None:
            uniform = isinstance(self.quantizer, UniformQuantizer)
            by_column = uniform and x.ndim > 1 and x.stride(-1) != 1 and x.stride(-2) == 1  # keys, transposed
            if _is_channels_last(x):
                rows = x.permute(0, 2, 3, 1)
                if self.by_value:
                    return [_image(put) for put in self(rows)]
                puts = [_image(put) for put in self.room(rows.shape, x.device)]
            elif by_column:
                puts = [put.mT for put in self.room(x.mT.shape, x.device)]
            else:
                puts = self.room(x.shape, x.device)
        self._quick(x, puts)
        return puts

    def room(self, shape: Sequence[int], device: torch.device, *, kept: bool = False) -> list[Tensor]:
        """Memory for the digits of a value; kept: this thread's, until it is asked for again."""
        count = sum(len(digits.factors) for digits in self._digits)
        if kept:
            size = math.prod(shape)
            return [_buffer(f"digit {i}", size, self._dtype, device).view(shape) for i in range(count)]
        return [torch.empty(shape, dtype=self._dtype, device=device) for _ in range(count)]

    def lift(self, code: Tensor) -> list[Tensor]:
        """The digits of codes."""
        parts = self.quantizer.integers(code)
        return [digit for part, digits in zip(parts, self._digits, strict=True) for digit in digits.of(part)]

    def _uniform(self, x: Tensor, puts: list[Tensor]) -> None:
        """clamp(round(x / scale), -zero_point, top - zero_point), less the digits' constant."""
        scale = self.quantizer.scale
        (result,) = puts
        if scale.numel() == 1:
            scale = scale.reshape(())
        parts: Iterator[tuple[Tensor, ...]] = iter([(x, result)])
        if scale.ndim == 0 and x.is_contiguous():
            parts = _chunks(x.view(-1), result.view(-1))
        elif x.device.type == "cpu" and (scale.ndim < x.ndim or scale.shape[0] == 1):
            count = min(len(x), -(-x.numel() // _CHUNK))
            parts = zip(x.tensor_split(count), result.tensor_split(count), strict=True)
        for given, put in parts:
            if self._dtype == torch.float32:
                torch.div(given, scale, out=put).round_().clamp_(*self._bounds)
                continue
            part = _buffer("values", given.numel(), torch.float32, x.device).view(given.shape)
            torch.div(given, scale, out=part).round_()
            if self._constant:
                part.sub_(self._constant)
            put.copy_(part.clamp_(*self._bounds))

    def _prepare(self, quantizer: LogQuantizer) -> bool:
        """The table from a value's bin and side of the bin's end to digits."""
        cuts = log_thresholds(
            quantizer.q,
            quantizer.r,
            quantizer.bits,
            beyond=quantizer.beyond,
            rounding=quantizer.rounding,
            table=quantizer.table,
            headroom=quantizer.headroom,
        )
        self._cuts = _of_quotients(cuts.float(), quantizer.scale.cpu().reshape(()))
        self._bins = bins = Bins(self._cuts, torch.float32)
        if not bins.fit or bool(((self._cuts > 0) & (self._cuts < _LEAST)).any()):
            return False
        device = quantizer.scale.device
        # Where the bins are counted from one at the lowest, or where that makes no large table, from zero's; one more,
        # beyond all values, is for what is no number. Counts of above and below a bin's end are at 2 i - 1 and 2 i.
        self._first = 0 if bins.first < 1 << 14 else bins.first - 1
        numbers = torch.arange(self._first, bins.first + len(bins.ends) + 1) - bins.first
        numbers[-1] = 0
        numbers.clamp_(min=0)
        (values,) = quantizer.integers(bins.counts[numbers].reshape(-1)[1:])
        self._tables = [digit.to(device) for digit in self._digits[0].of(values)]
        self._ends = bins.ends[numbers].view(torch.int32).to(device)
        return True

    def _logarithmic(self, x: Tensor, results: list[Tensor]) -> None:
        quantizer, bins = self.quantizer, self._bins
        assert isinstance(quantizer, LogQuantizer)
        for given, *puts in _chunks(x.reshape(-1), *(result.view(-1) for result in results), size=_CHUNK):
            count = given.numel()
            value = _buffer("values", count, torch.float32, x.device)
            number = _buffer("numbers", count, torch.int32, x.device)
            end = _buffer("ends", count, torch.int32, x.device)
            if quantizer.offset:
                torch.add(given, quantizer.offset, out=value).clamp_(bins.lowest, bins.highest)
            else:
                torch.clamp(given, bins.lowest, bins.highest, out=value)
            bits = value.view(torch.int32)
            # Positive floats are in the order of their bits: those at most the end are less than the end's bits by -1
            # or more, which an arithmetic shift makes -1, and 0 of all others.
            torch.bitwise_right_shift(bits, bins.drop, out=number)
            if self._first:
                number.sub_(self._first)
            number.clamp_(1, len(self._ends) - 1)  # where a NaN's bits are
            torch.index_select(self._ends, 0, number, out=end)
            above = torch.sub(end, bits, out=end).bitwise_right_shift_(31)  # -1: above the end
            torch.add(above, number, alpha=2, out=number)
            for table, put in zip(self._tables, puts, strict=True):
                torch.index_select(table, 0, number, out=put)


def _of_quotients(cuts: Tensor, scale: Tensor) -> Tensor:
    """The largest values whose quotients by the scale are at most the cuts, as floats divide; of cuts of 0, 0."""
    values, infinity = cuts * scale, torch.tensor(math.inf)
    while bool((more := (cuts > 0) & (torch.nextafter(values, infinity) / scale <= cuts)).any()):
        values = torch.where(more, torch.nextafter(values, infinity), values)
    while bool((less := values / scale > cuts).any()):
        values = torch.where(less, torch.nextafter(values, -infinity), values)
    return values


def _laid_out(digit: Tensor) -> Tensor:
    """As products take it, rows of rows or of columns."""
    by_column = digit.ndim > 1 and digit.stride(-1) != 1 and digit.stride(-2) == 1  # keys, transposed
    return digit.mT.contiguous().mT if by_column else digit.contiguous()


def _uniform_digit(
    dtype: torch.dtype, constant: int, x: Tensor, scale: Tensor, low: Tensor, high: Tensor
) -> list[Tensor]:
    """As `Encoder`, for `torch.compile`. Raises TypeError for values of another type than the scale's."""
    if x.dtype != scale.dtype:
        raise TypeError(f"values are {x.dtype}, not {scale.dtype}")
    code = torch.div(x, scale).round()
    code = code - constant if constant else code
    return [_laid_out(torch.minimum(torch.maximum(code, low), high).to(dtype))]


def _log_digits(dtype: torch.dtype, x: Tensor, offset: Tensor, cuts: Tensor, *digits: Tensor) -> list[Tensor]:
    """As `Encoder`, for `torch.compile`: the number of cuts that a value is at most, bit by bit from the highest.

    digits: of every code, a table each. Raises TypeError for values of another type than the cuts'.
    """
    if x.dtype != cuts.dtype:
        raise TypeError(f"values are {x.dtype}, not {cuts.dtype}")
    value, each = x + offset, cuts.unbind()
    above: list[Tensor] = []
    step = len(digits[0]) // 2
    while step:
        above.insert(0, value > _chosen(each[step - 1 :: 2 * step], above))
        step //= 2
    return [_laid_out(_chosen(digit.unbind(), above).to(dtype)) for digit in digits]


def _chosen(values: Sequence[Tensor], above: Sequence[Tensor]) -> Tensor:
    """One of 2**n values by n masks, that of the lowest bit first; a bit is 0 where its mask is set."""
    for mask in above:
        values = [torch.where(mask, zero, one) for zero, one in zip(values[::2], values[1::2], strict=True)]
    return values[0]


# --- products --------------------------------------------------------------------------------------------------------


@functools.cache
def _multiplies_bytes(device: torch.device, dtype: torch.dtype = torch.int8) -> bool:
    """Whether `torch._int_mm` is there, and exact on extreme bytes, which it is not on processors that saturate.

    dtype: of the left operand, int8 or uint8.
    """
    least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    left = torch.full((32, 64), least, dtype=dtype, device=device)
    left[::2] = most
    right = torch.full((64, 32), -128, dtype=torch.int8, device=device)
    right[:, ::2] = 127
    try:
        result = torch._int_mm(left, right)
    except (RuntimeError, NotImplementedError):
        return False
    return torch.equal(result.cpu().double(), left.cpu().double() @ right.cpu().double())


def _pays(left: Tensor, right: Tensor) -> bool:
    """Whether many products of bytes, (..., T, I) and (..., I, O), are sooner made one after the other by `_int_mm`."""
    return (
        (left.dtype.itemsize, right.dtype) == (1, torch.int8)
        and left.ndim > 2
        and left.shape[:-2] == right.shape[:-2]
        and left.shape[-1] > 1  # which PyTorch 2.12 gets wrong
        and left.shape[-2] * left.shape[-1] * right.shape[-1] >= _LARGE
        and _multiplies_bytes(left.device, left.dtype)
    )


def multiply_bytes(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """left @ right, int8 (T, I) and (I, O), as int32 (T, O)."""
    if not _multiplies_bytes(left.device):
        dtype = torch.float32 if left.shape[1] * 2**14 < _EXACT[torch.float32] else torch.float64
        return (left.to(dtype) @ right.to(dtype)).to(torch.int32)
    if left.shape[1] == 1:  # which PyTorch 2.12 gets wrong on the CPU
        left, right = torch.nn.functional.pad(left, (0, 1)), torch.nn.functional.pad(right, (0, 0, 0, 1))
    if left.device.type == "cpu":
        if not left.numel() or not right.numel():
            return torch.zeros(len(left), right.shape[1], dtype=torch.int32)
        return torch._int_mm(left, right) if out is None else torch._int_mm(left, right, out=out)
    # cuBLAS takes more than 16 rows, and whole eights of everything.
    rows, terms, columns = len(left), left.shape[1], right.shape[1]
    left = torch.nn.functional.pad(left, (0, -terms % 8, 0, max(-rows % 8, 24 - rows)))
    right = torch.nn.functional.pad(right, (0, -columns % 8, 0, -terms % 8))
    return torch._int_mm(left, right.t().contiguous().t())[:rows, :columns]


def _floats(sums: Tensor, bias: Tensor | None, scale: Tensor) -> Tensor:
    """As `finish`, for `torch.compile`."""
    result = sums.to(scale.dtype) * scale
    return result if bias is None else result + bias


class Product:
    """A site's product of digits. nbytes: of its stored weight."""

    nbytes: int

    def __new__(cls, site: IntegerSite) -> Any:
        return object.__new__(_Rows if _by_rows(site) else _Batched)

    def __init__(self, site: IntegerSite):
        self.site = site
        self._left = _left_digits(site)


class _Rows(Product):
    """Signed bytes by signed bytes: a linear, or a convolution of one group."""

    def __init__(self, site: IntegerSite):
        super().__init__(site)
        self._weight, self._moved = self._bytes(site)
        self.nbytes = self._weight.nbytes
        sums = self._weight.sum(0, dtype=torch.int64) + site.terms * self._moved
        largest = int(self._weight.to(torch.int16).abs().max()) if self._weight.numel() else 0
        self._constants = [digits.constant * sums for digits in self._left]
        self._dtypes = []
        for digits, bound in zip(self._left, site.bounds, strict=True):
            passing = sum(digits.factors) * site.terms * 128 * largest + bound
            self._dtypes.append(torch.int32 if 2 * passing < INT32 else torch.int64)
        if site.terms * 2**14 >= INT32:
            raise ArtifactError(f"site {site.name} sums {site.terms:,} products: bytes take fewer than {INT32 >> 14:,}")
        self.columns = self._weight.shape[1]
        self._scales = [scale.reshape(-1).expand(self._weight.shape[1]).contiguous() for scale in site.scales]

    @staticmethod
    def _bytes(site: IntegerSite) -> tuple[Tensor, Tensor]:
        """The weight as signed bytes, (I, O), and what each channel was moved by to be that, (O,)."""
        whole = site.weight_integers()
        whole = whole if site.geometry is None else whole[0]
        outside = (whole.amin(0) < -128) | (whole.amax(0) > 127)
        zero_point = site.right.zero_point.reshape(-1).long()  # type: ignore[attr-defined]
        moved = torch.where(outside, 128 - zero_point, 0)
        return (whole - moved).to(torch.int8).t().contiguous().t(), moved

    def _rows(self, digits: list[Tensor]) -> list[list[Tensor]]:
        """The digits of each part as (T, I)."""
        site, given = self.site, iter(digits)
        parts = [[(next(given), factor, each) for factor in each.factors] for each in self._left]
        if site.geometry is None:
            return [[digit.reshape(-1, site.terms) for digit, *_ in part] for part in parts]
        # A padded place is the integer 0 in every part, ones too.
        return [
            [site.rows(digit, each.padding(factor)).reshape(-1, site.terms) for digit, factor, each in part]
            for part in parts
        ]

    def _products(self, rows: list[Tensor]) -> list[Tensor]:
        shape = len(rows[0]), self._weight.shape[1]
        outs = (_buffer(f"product {i}", math.prod(shape), torch.int32, row.device) for i, row in enumerate(rows))
        return [multiply_bytes(row, self._weight, out.view(shape)) for row, out in zip(rows, outs, strict=True)]

    def _sums(self, part: int, products: list[Tensor], rows: list[Tensor]) -> Tensor:
        """The accumulators of one part, in the first of its products where 32 bits hold them."""
        digits, dtype = self._left[part], self._dtypes[part]
        total = products[0].to(dtype)
        for product, factor in zip(products[1:], digits.factors[1:], strict=True):
            total.add_(product.to(dtype), alpha=factor)
        if self._constants_matter[part]:
            total.add_(self._constants[part].to(dtype))
        if self._moves:
            whole = sum(
                (row.sum(1, dtype=torch.int64) * factor for row, factor in zip(rows, digits.factors, strict=True)),
                start=torch.zeros(len(rows[0]), dtype=torch.int64, device=rows[0].device),
            )
            total.add_((whole[:, None] * self._moved).to(dtype))
        return total

    @functools.cached_property
    def _constants_matter(self) -> list[bool]:
        return [bool(constant.any()) for constant in self._constants]

    @functools.cached_property
    def _moves(self) -> bool:
        return bool(self._moved.any())

    @property
    def opened(self) -> tuple[Callable[..., Tensor], Pure] | None:
        """Its accumulators, until the next ones, and for `torch.compile` what makes floats of them."""
        if self.site.geometry is not None or self._moves or self._dtypes != [torch.int32]:
            return None

        def sums(left: list[Tensor], right: None) -> Tensor:
            (rows,) = self._rows(left)
            return self._sums(0, self._products(rows), rows).view(*left[0].shape[:-1], self.columns)

        return sums, Pure(_floats, (), (self._scales[0],))

    def accumulate(self, left: list[Tensor], right: None = None) -> list[Tensor]:
        """As `reference.Product.accumulate`, of digits."""
        sums = []
        for part, rows in enumerate(self._rows(left)):
            total = self._sums(part, self._products(rows), rows).to(torch.int64)
            lead = left[0].shape[:-1] if self.site.geometry is None else (len(left[0]), 1, -1)
            sums.append(total.reshape(*lead, total.shape[1]))
        return sums

    def _spans(self, left: list[Tensor]) -> Iterator[tuple[slice, list[list[Tensor]]]]:
        """Some rows at a time, whose accumulators stay in the cache: which, and their digits by part."""
        parts = self._rows(left)
        total = len(parts[0][0])
        count = max(64, _CHUNK // max(1, self.columns)) if left[0].device.type == "cpu" else max(1, total)
        for start in range(0, max(1, total), count):
            span = slice(start, min(start + count, total))
            yield span, [[row[span] for row in rows] for rows in parts]

    def sums_by_rows(self, left: list[Tensor]) -> Iterator[tuple[slice, Tensor]]:
        """The accumulators of a site of one part, (T, O), some rows at a time, in memory that the next ones take."""
        for span, (rows,) in self._spans(left):
            yield span, self._sums(0, self._products(rows), rows)

    def blocks(
        self, left: list[Tensor], bias: Tensor | None, result: Tensor | None = None
    ) -> Iterator[tuple[slice, Tensor]]:
        """The output, (T, O), some rows at a time: in `result`, or in memory that the next ones take again."""
        dtype, device = self._scales[0].dtype, left[0].device
        for span, parts in self._spans(left):
            shape = span.stop - span.start, self.columns
            real = _buffer("sums", math.prod(shape), dtype, device).view(shape)
            put = real if result is None else result[span]
            if result is None and len(self._scales) > 1:
                put = _buffer("output", math.prod(shape), dtype, device).view(shape)
            for part, (scale, rows) in enumerate(zip(self._scales, parts, strict=True)):
                real.copy_(self._sums(part, self._products(rows), rows))
                if part:
                    put.addcmul_(real, scale)
                elif bias is None:
                    torch.mul(real, scale, out=put)
                else:
                    torch.addcmul(bias, real, scale, out=put)
            yield span, put

    def __call__(self, left: list[Tensor], right: None = None, bias: Tensor | None = None) -> Tensor:
        site, shape = self.site, left[0].shape
        lead = shape[:-1] if site.geometry is None else (shape[0], math.prod(site.sizes(shape)))
        columns, scale = self.columns, self._scales[0]
        result = torch.empty(math.prod(lead), columns, dtype=scale.dtype, device=scale.device)
        for _ in self.blocks(left, bias, result):
            pass
        result = result.view(*lead, columns)
        return result if site.geometry is None else site.image(result[:, None], shape)


class _Batched(Product):
    """Quantizer numbers in float, exact in any order of summation: attention, and grouped convolutions."""

    def __init__(self, site: IntegerSite):
        super().__init__(site)
        self._right = [Digits(*each, signed=False) for each in site.right.limits()]
        self._weight = None
        if site.weight is not None:
            self._weight = [digit for each in self._right for digit in each.of(site.weight_integers())]
        self.nbytes = sum(digit.nbytes for digit in self._weight or ())
        largest = max(each.largest for each in self._left) * max(each.largest for each in self._right)
        fitting = [dtype for dtype, most in _EXACT.items() if site.terms * largest < most]
        if not fitting:
            raise ArtifactError(
                f"site {site.name} sums {site.terms:,} products up to {largest:,}: more than floats hold"
            )
        self._dtype = fitting[0]

    @property
    def simple(self) -> bool:
        """Whether a product of two tensors in float32 is all there is to it."""
        sides = (*self._left, *self._right)
        plain = len(sides) == 2 and all(len(each.factors) == 1 for each in sides) and self._weight is None
        return plain and self._dtype == self.site.scales[0].dtype == torch.float32

    @property
    def opened(self) -> tuple[Callable[..., Tensor], Pure] | None:
        """As of `_Rows`."""
        if not self.simple:
            return None

        def sums(left: list[Tensor], right: list[Tensor]) -> Tensor:
            x, y = left[0], right[0]
            self.site.check_terms(x.shape[-1])
            if not _pays(x, y):
                return torch.matmul(x.to(self._dtype), y.to(self._dtype))
            shape = *x.shape[:-1], y.shape[-1]
            result = _buffer("batched", math.prod(shape), torch.int32, x.device).view(shape)
            for one, other, put in zip(x.flatten(0, -3), y.flatten(0, -3), result.flatten(0, -3), strict=True):
                torch._int_mm(one, other, out=put)
            return result

        return sums, Pure(_floats, (), (self.site.scales[0],))

    def _pairs(self, left: list[Tensor], right: list[Tensor] | None) -> list[list[tuple[int, Tensor]]]:
        """For each pair of parts the products of their digits, and what each is to be multiplied by."""
        site = self.site
        product: Callable[[Tensor, Tensor], Tensor] = torch.matmul
        if site.weight is not None and site.weight.shape[1] == 1 and len(site.weight) == site.groups:
            product = self._depthwise
        elif site.geometry is not None:
            left = [site.rows(digit) for digit in left]
        if right is not None:
            site.check_terms(left[0].shape[-1])
        sides = [(iter(left), self._left), (iter(self._weight if right is None else right), self._right)]  # type: ignore[arg-type]
        lefts, rights = (
            [[(factor, next(given).to(self._dtype)) for factor in each.factors] for each in digits]
            for given, digits in sides
        )
        return [[(f * g, product(x, y)) for f, x in part for g, y in other] for part in lefts for other in rights]

    def _depthwise(self, image: Tensor, weight: Tensor) -> Tensor:
        """A convolution of each channel with its own kernel: (B, C, H, W), (C, taps, 1) -> (B, C, L, 1).

        Without a row for each place, as `Site.rows` has them, which repeat the image for each tap.
        """
        site = self.site
        assert site.geometry is not None
        assert site.weight is not None
        stride, padding, dilation, groups = site.geometry
        kernels = weight.reshape(site.weight.shape)
        if _SUMS_DIRECTLY and image.device.type == "cpu" and image.dtype == torch.float32:
            result = torch.conv2d(image, kernels, None, stride, padding, dilation, groups)
        else:
            height, width = site.sizes(image.shape)
            padded = torch.nn.functional.pad(image, (padding[1], padding[1], padding[0], padding[0]))
            result = image.new_zeros(*image.shape[:2], height, width)
            for i in range(kernels.shape[2]):
                for j in range(kernels.shape[3]):
                    seen = padded[:, :, i * dilation[0] :: stride[0], j * dilation[1] :: stride[1]]
                    result.addcmul_(seen[:, :, :height, :width], kernels[:, :, i, j, None])
        return result.flatten(2).unsqueeze(-1)

    def accumulate(self, left: list[Tensor], right: list[Tensor] | None = None) -> list[Tensor]:
        """As `reference.Product.accumulate`, of digits."""
        pairs = self._pairs(left, right)
        return [torch.stack([sums.long() * factor for factor, sums in products]).sum(0) for products in pairs]

    def __call__(self, left: list[Tensor], right: list[Tensor] | None = None, bias: Tensor | None = None) -> Tensor:
        sums = []
        for (_, total), *others in self._pairs(left, right):
            for factor, product in others:
                total.add_(product, alpha=factor)
            sums.append(total)
        if len(sums) == 1 and self.site.geometry is None and sums[0].dtype == self.site.scales[0].dtype:
            return sums[0].mul_(self.site.scales[0])
        return finish(self.site, sums, bias, left[0].shape)


# --- several steps in one --------------------------------------------------------------------------------------------


class _Chain:
    """A linear, an activation and an encoder, some rows at a time."""

    def __init__(self, product: _Rows, activation: Callable[[Tensor], Tensor], encoder: Encoder):
        self._product, self._activation, self._encoder = product, activation, encoder

    def __call__(self, left: list[Tensor], right: None, bias: Tensor | None) -> list[Tensor]:
        shape = *left[0].shape[:-1], self._product.columns
        results = self._encoder.room(shape, left[0].device)
        flat = [result.view(-1, shape[-1]) for result in results]
        for span, block in self._product.blocks(left, bias):
            self._encoder(self._activation(block), [result[span] for result in flat])
        return results


class _Attention:
    """Q K^T, scale, softmax over the last dimension, encoder and A V, some images at a time."""

    def __init__(self, scores: _Batched, factor: float, encoder: Encoder, product: _Batched):
        self._scores, self._factor, self._encoder, self._product = scores, factor, encoder, product

    def __call__(self, *sides: list[Tensor]) -> Tensor:
        """Digits of queries, keys (transposed) and values."""
        queries, keys, _ = (side[0] for side in sides)
        alike = all(digit.ndim > 3 and digit.shape[:-2] == queries.shape[:-2] for side in sides for digit in side)
        if not alike or not len(queries) or queries.device.type != "cpu":
            weights = self._scores(sides[0], sides[1]).mul_(self._factor).softmax(-1)
            return self._product(self._encoder(weights), sides[2])
        self._scores.site.check_terms(queries.shape[-1])
        count = max(1, 4 * _CHUNK // max(1, queries[0, ..., 0].numel() * keys.shape[-1]))
        parts = zip(*(zip(*(digit.split(count) for digit in side), strict=True) for side in sides), strict=True)
        return torch.cat([self._some(*map(list, part)) for part in parts])

    def _some(self, queries: list[Tensor], keys: list[Tensor], values: list[Tensor]) -> Tensor:
        (left,), (right,) = queries, keys
        shape = *left.shape[:-1], right.shape[-1]
        scores, weights = (_buffer(name, math.prod(shape), left.dtype, left.device).view(shape) for name in "sw")
        torch.bmm(left.flatten(0, -3), right.flatten(0, -3), out=scores.flatten(0, -3))
        torch.softmax(scores.mul_(self._scores.site.scales[0]).mul_(self._factor), -1, out=weights)
        digits = self._encoder.room(shape, left.device, kept=True)
        return self._product(self._encoder(weights, digits), values)


def fuse(program: Program, steps: Mapping[str, Any]) -> tuple[Program, dict[str, Any]]:
    """The same program, with one step for several where what they pass on is large: it then stays in the cache."""
    steps = dict(steps)
    readers, outputs = program.consumers(), set(refs_of(program.output))
    nodes = {node.name: node for node in program.nodes}

    def next_of(node: Node | None, op: str) -> Node | None:
        """What alone reads the node, as its first argument, if it does this."""
        found = [] if node is None or node.name in outputs else readers.get(node.name, [])
        fits = len(found) == 1 and found[0].op == op and list(found[0].refs())[:1] == [node.name if node else ""]
        return found[0] if fits else None

    for node in program.nodes:
        step = steps.get(node.name)
        if isinstance(step, _Rows) and step.site.geometry is None:
            middle = next_of(node, "aten.gelu.default")
            encode = next_of(middle, ENCODE)
            if middle is None or encode is None or not steps[encode.name].by_value:
                continue
            steps[encode.name] = _Chain(
                step, functools.partial(torch.ops.aten.gelu_.default, **middle.kwargs), steps[encode.name]
            )
            nodes[encode.name] = replace(node, name=encode.name)
            del nodes[node.name], nodes[middle.name]
        elif isinstance(step, _Batched):
            scaled = next_of(node, "aten.mul.Tensor")
            if scaled is not None and not isinstance(scaled.args[1], float):
                continue
            middle = next_of(scaled or node, "aten.softmax.int")
            encode = next_of(middle, ENCODE)
            product = next_of(encode, PRODUCT)
            if middle is None or encode is None or product is None or middle.args[1:] != (-1,) or middle.kwargs:
                continue
            if steps[product.name].site.weight is not None:  # a linear of the attention, not a product with values
                continue
            scales = (*step.site.scales, *steps[product.name].site.scales)
            if (
                not steps[encode.name].by_value
                or not step.simple
                or any(scale.ndim > 3 and len(scale) > 1 for scale in scales)
            ):
                continue
            factor = scaled.args[1] if scaled is not None else 1.0
            steps[product.name] = _Attention(step, factor, steps[encode.name], steps[product.name])
            nodes[product.name] = replace(product, args=(*node.args[:2], product.args[1]))
            for gone in (node, scaled, middle, encode):
                nodes.pop(gone.name if gone else "", None)
    return replace(program, nodes=tuple(nodes.values())), steps
