"""The executor of compiled kernels: `native.cpp` through ctypes, and its products as `reference` has them.

The structures are those of `native.cpp`, which checks that what they say fits together before it reads or writes.
"""

import ctypes
import functools
import math
from collections.abc import Callable, Sequence
from ctypes import c_float, c_int, c_int32, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from adalog import library
from adalog.quantizers import LogQuantizer, Quantizer, UniformQuantizer
from adalog.runtime import integer
from adalog.runtime.reference import INT32, IntegerSite, finish

# --- the library -----------------------------------------------------------------------------------------------------


@functools.cache
def _library() -> ctypes.CDLL | None:
    found, _ = library.load()
    for name, result, arguments in (
        (
            ("open", c_void_p, [c_int, c_int]),
            ("close", None, [c_void_p]),
            ("weights", c_void_p, [c_void_p, c_void_p, c_int64, c_int64, c_int, c_int]),
            ("weights_free", None, [c_void_p]),
            ("weights_bytes", c_int64, [c_void_p]),
            *((kernel, c_int, [c_void_p, c_void_p]) for kernel in KERNELS),
        )
        if found
        else ()
    ):
        function = getattr(found, f"adalog_{name}")
        function.restype, function.argtypes = result, arguments
    return found


# --- its structures --------------------------------------------------------------------------------------------------

SUMS, FLOATS, CODES, STEPS = range(4)  # what becomes of accumulators: see `Output` in native.cpp


class Steps(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("heap", "values")),
        ("length", c_int64),
        *((name, c_int32) for name in ("depth", "planes")),
    )


class Output(ctypes.Structure):
    _fields_ = (
        ("kind", c_int32),
        *((name, c_void_p) for name in ("scale", "bias", "high", "top")),
        ("parameters", c_int64),
        ("residual", c_void_p),
        ("residual_bytes", c_int64),
        *((name, c_void_p) for name in ("data", "more")),
        *((name, c_int64) for name in ("bytes", "row")),
        *((name, c_void_p) for name in ("place", "from_")),
        ("places", c_int64),
        ("steps", Steps),
    )


class Linear(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("weights", "data", "more")),
        *((name, c_int64) for name in ("bytes", "row", "rows")),
        ("out", Output),
    )


class Side(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("data", "more")),
        *((name, c_int64) for name in ("bytes", "batch", "head", "row")),
        ("zero", c_void_p),
        *((name, c_int32) for name in ("bits", "transposed")),
    )


class Matrices(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("batches", "heads", "rows", "terms", "columns")),
        ("left", Side),
        ("right", Side),
        ("out", Output),
        *((name, c_int64) for name in ("out_batch", "out_head")),
    )


class Attention(ctypes.Structure):
    _fields_ = (
        ("scores", Matrices),
        *((name, c_void_p) for name in ("factor", "bias", "bias_of")),
        *((name, c_int64) for name in ("bias_bytes", "bias_tables", "bias_heads", "bias_batches")),
        ("steps", Steps),
        ("zero", c_int32),
        ("columns", c_int64),
        ("values", Side),
        ("out", Output),
        *((name, c_int64) for name in ("out_batch", "out_head")),
    )


class Norm(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p),
        *((name, c_int64) for name in ("bytes", "row", "rows", "columns")),
        ("epsilon", c_float),
        ("out", Output),
    )


class Encode(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p),
        *((name, c_int64) for name in ("bytes", "row", "rows", "columns")),
        ("out", Output),
    )


class Patches(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p),
        *((name, c_int64) for name in ("bytes", "images", "channels", "height", "width")),
        *((name, c_int64 * 2) for name in ("kernel", "stride", "padding", "dilation")),
        ("fill", c_int32),
        ("out", c_void_p),
        *((name, c_int64) for name in ("out_bytes", "row")),
    )


KERNELS = ("linear", "product", "attention", "norm", "encode", "patches")


class Context:
    """Threads and the kernels of one level, for a compiled model. Calls from several threads wait for each other."""

    def __init__(self, threads: int, level: str | None = None):
        found = library.levels()
        if not found:
            raise ValueError(f"executor = 'native' does not run here: {library.why()}")
        level = found[-1] if level is None else level
        if level not in found:
            raise ValueError(f"level = {level!r} is none of {', '.join(found)}")
        if not 1 <= threads <= 1024:
            raise ValueError(f"threads = {threads} is outside 1 to 1024")
        self.level, self.threads = level, threads
        compiled = _library()
        assert compiled is not None
        self._library = compiled
        self._pointer = compiled.adalog_open(threads, library.LEVELS.index(level))
        if not self._pointer:
            raise ValueError(f"threads = {threads} are more than this machine starts")
        self._kernels = {name: getattr(compiled, f"adalog_{name}") for name in KERNELS}

    def __del__(self) -> None:
        if getattr(self, "_pointer", None):
            self._library.adalog_close(self._pointer)

    def bind(self, kernel: str, arguments: ctypes.Structure) -> Callable[[], int]:
        """The kernel on these arguments, as a call that returns 0 where it has done it."""
        return functools.partial(self._kernels[kernel], self._pointer, ctypes.addressof(arguments))

    def run(self, kernel: str, arguments: ctypes.Structure) -> None:
        check(self.bind(kernel, arguments)())

    def weights(self, site: IntegerSite) -> "Weights":
        return Weights(self._library, site)


def check(status: int) -> None:
    """Raise for what a kernel returns."""
    if status:
        raise MemoryError("no memory for a kernel") if status == 2 else ValueError("the sizes of a kernel do not fit")


class Weights:
    """A site's stored weight as kernels read it: up to 4 bits in half a byte each."""

    def __init__(self, library: ctypes.CDLL, site: IntegerSite):
        assert site.weight is not None
        codes = site.weight.flatten(1).contiguous()
        zero = site.right.zero_point.reshape(-1).expand(len(codes)).to(torch.int32).contiguous()  # type: ignore[attr-defined]
        self._library = library
        self.pointer = library.adalog_weights(
            codes.data_ptr(), zero.data_ptr(), *codes.shape, site.right.bits, zero_point(site.left)
        )
        if not self.pointer:
            raise MemoryError(f"no memory for the weight of {site.name}")
        self.nbytes = library.adalog_weights_bytes(self.pointer)

    def __del__(self) -> None:
        if getattr(self, "pointer", None):
            self._library.adalog_weights_free(self.pointer)


# --- operands --------------------------------------------------------------------------------------------------------

Planes = list[Tensor]  # what a left operand's codes stand for: uint8, low bytes and, of tables of 16 bits, high bytes


def zero_point(quantizer: Quantizer) -> int:
    """The zero point of all codes: that of a table is none."""
    return int(quantizer.zero_point.reshape(-1)[0]) if isinstance(quantizer, UniformQuantizer) else 0


def _by_head(quantizer: Quantizer) -> bool:
    """Whether scales differ by no more than the heads of (..., heads, rows, columns)."""
    shape = quantizer.scale.shape
    return quantizer.scale.numel() == 1 or (len(shape) >= 3 and shape[-3] == quantizer.scale.numel())


def takes(site: IntegerSite) -> bool:
    """Whether there is a kernel for a site: bytes by bytes in 32 bits, with one scale a tensor or a head."""
    left, right = site.left, site.right
    if not isinstance(right, UniformQuantizer) or site.bits > 32 or len(site.scales) != 1:
        return False
    if site.scales[0].dtype != torch.float32 or site.scales[0].device.type != "cpu" or not site.terms:
        return False
    sides = [left] if site.weight is not None else [left, right]
    if any(isinstance(side, UniformQuantizer) and not _codes_hold_zero(side) for side in (left, right)):
        return False
    if site.weight is not None:
        return site.groups == 1 and left.scale.numel() == 1 and site.weight.numel() > 0 and site.terms < INT32 >> 16
    return isinstance(left, (UniformQuantizer, LogQuantizer)) and all(map(_by_head, sides))


def _codes_hold_zero(quantizer: UniformQuantizer) -> bool:
    zero = quantizer.zero_point
    return bool((zero >= 0).all()) and bool((zero < 2**quantizer.bits).all())


def table(quantizer: Quantizer) -> Tensor:
    """What a left operand's codes become: int32, (2**bits,), bytes of one plane or two."""
    return (
        quantizer.table_integers().int()
        if isinstance(quantizer, LogQuantizer)
        else torch.arange(2**quantizer.bits).int()
    )


def planes_of(values: Tensor, quantizer: Quantizer) -> Planes:
    """Entries of a table as bytes."""
    two = int(table(quantizer).max()) > 255
    return [(values & 255).to(torch.uint8), *([(values >> 8).to(torch.uint8)] if two else [])]


class Encoder:
    """From values to the bytes of what their codes stand for."""

    def __new__(cls, quantizer: Quantizer, site: IntegerSite) -> Any:
        return object.__new__(cls) if takes(site) else integer.Encoder(quantizer, site)

    def __init__(self, quantizer: Quantizer, site: IntegerSite):
        self.quantizer = quantizer
        self._table = table(quantizer)

    @staticmethod
    def key(site: IntegerSite) -> str:
        """Sites of the same key share what is encoded for one of them."""
        return "planes" if takes(site) else integer.Encoder.key(site)

    def __call__(self, x: Tensor) -> Planes:
        return self.lift(self.quantizer.quantize(x))

    def lift(self, code: Tensor) -> Planes:
        return planes_of(self._table[code.long()], self.quantizer)


class Room:
    """Encoders and products of a context."""

    Encoder = Encoder

    def __init__(self, context: Context):
        self.context = context

    def Product(self, site: IntegerSite) -> Any:
        return Product(site, self.context) if takes(site) else integer.Product(site)


class Product:
    """A site's product of bytes."""

    def __init__(self, site: IntegerSite, context: Context):
        self.site, self.context = site, context
        self.weights = None if site.weight is None else context.weights(site)
        self.nbytes = 0 if self.weights is None else self.weights.nbytes
        self.columns = 0 if site.weight is None else len(site.weight)

    def rows(self, left: Planes) -> Planes:
        """A left operand of a stored weight as (T, I). A padded place is the integer 0."""
        if self.site.geometry is None:
            return [plane.reshape(-1, self.site.terms).contiguous() for plane in left]
        fill = zero_point(self.site.left)
        return [self.site.rows(plane, fill).reshape(-1, self.site.terms) for plane in left]

    def accumulate(self, left: Planes, right: Planes | None = None) -> list[Tensor]:
        """As `reference.Product.accumulate`, of bytes."""
        site, shape = self.site, left[0].shape
        if self.weights is None:
            assert right is not None
            site.check_terms(shape[-1])
            return [self._multiply(left, right[0])]
        rows = self.rows(left)
        sums = torch.empty(len(rows[0]), self.columns, dtype=torch.int32)
        if len(rows[0]):
            self.context.run("linear", linear(self.weights, rows, Output(kind=SUMS, **place(sums))))
        lead = shape[:-1] if site.geometry is None else (shape[0], 1, math.prod(site.sizes(shape)))
        return [sums.long().view(*lead, self.columns)]

    def _multiply(self, left: Planes, right: Tensor) -> Tensor:
        lead = torch.broadcast_shapes(left[0].shape[:-2], right.shape[:-2])
        sums = torch.empty(*lead, left[0].shape[-2], right.shape[-1], dtype=torch.int32)
        if sums.numel():
            arguments, kept = matrices(self.site, left, right, sums)
            arguments.out = Output(kind=SUMS, **place(sums))
            self.context.run("product", arguments)
            del kept
        return sums.long()

    def __call__(self, left: Planes, right: Planes | None = None, bias: Tensor | None = None) -> Tensor:
        return finish(self.site, self.accumulate(left, right), bias, left[0].shape)


def place(value: Tensor, *others: Tensor) -> dict[str, int]:
    """Where an output lies, as `Output` has it: rows of the last dimension."""
    row = value.stride(-2) if value.ndim > 1 else value.shape[-1]
    found = {"data": value.data_ptr(), "bytes": room_of(value), "row": row}
    return found | ({"more": others[0].data_ptr()} if others else {})


def room_of(value: Tensor) -> int:
    """Bytes from a tensor's first entry to the end of its memory."""
    storage = value.untyped_storage()
    return int(storage.nbytes()) - int(value.storage_offset()) * value.element_size()


def linear(weights: Weights, rows: Planes, out: Output) -> Linear:
    """rows: (T, I), as `Product.rows` gives them."""
    low, high = rows[0], rows[1] if len(rows) > 1 else None
    return Linear(
        weights=weights.pointer,
        data=low.data_ptr(),
        more=None if high is None else high.data_ptr(),
        bytes=min(map(room_of, rows)),
        row=low.stride(0),
        rows=len(low),
        out=out,
    )


def matrices(site: IntegerSite, left: Planes, right: Tensor, out: Tensor) -> tuple[Matrices, list[Any]]:
    """The product of two computed operands, without what becomes of it, and what must live as long.

    out: of the shape of the product, for how its batches and heads lie.
    """
    lead = out.shape[:-2]
    (one, *kept), (other, *kept_too) = side(left, lead, site.left), side([right], lead, site.right)
    result = spread(out, lead)
    arguments = Matrices(
        batches=len(result),
        heads=result.shape[1],
        rows=out.shape[-2],
        terms=left[0].shape[-1],
        columns=out.shape[-1],
        left=one,
        right=other,
        out_batch=result.stride(0),
        out_head=result.stride(1),
    )
    return arguments, [kept, kept_too]


def spread(value: Tensor, lead: Sequence[int]) -> Tensor:
    """A value as (batches, heads, rows, columns): heads are the last of the leading dimensions."""
    value = value.expand(*lead, *value.shape[-2:])
    if len(lead) == 2:
        return value
    return value.reshape(math.prod(lead[:-1]), lead[-1] if lead else 1, *value.shape[-2:])


def side(planes: Planes, lead: Sequence[int], quantizer: Quantizer) -> tuple[Side, Planes, Tensor]:
    """One operand of a product, and what must live as long: columns may be dense instead of rows."""
    planes = [spread(plane, lead) for plane in planes]
    transposed = planes[0].stride(-1) != 1 and planes[0].stride(-2) == 1 and planes[0].shape[-1] > 1
    if not transposed and planes[0].stride(-1) != 1:
        planes = [plane.contiguous() for plane in planes]
    first = planes[0]
    zero = torch.zeros(first.shape[1], dtype=torch.int32)
    if isinstance(quantizer, UniformQuantizer):
        zero += quantizer.zero_point.reshape(-1).to(torch.int32)
    found = Side(
        data=first.data_ptr(),
        more=planes[1].data_ptr() if len(planes) > 1 else None,
        bytes=min(map(room_of, planes)),
        batch=first.stride(0),
        head=first.stride(1),
        row=first.stride(-1) if transposed else first.stride(-2),
        zero=zero.data_ptr(),
        bits=quantizer.bits,
        transposed=transposed,
    )
    return found, planes, zero
