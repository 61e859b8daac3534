"""Declare the interface of `native.cpp` for ctypes: its structures, functions, threads and weights.

The compiled library reports the offset and size of every structure field. Loading compares this report with
`library.LAYOUT`, the digest of the structures in this module. Every kernel checks that the sizes in its arguments fit
together before it reads or writes memory.
"""

import ctypes
import functools
from collections.abc import Callable
from ctypes import c_float, c_int, c_int32, c_int64, c_void_p
from typing import Any

import numpy as np
import numpy.typing as npt

from adalog import library

SUMS, FLOATS, CODES, STEPS = range(4)  # what a kernel writes, as `Kind` in structures.h numbers it
ACTIVATIONS = ("", "relu", "gelu", "gelu_tanh", "silu", "hardswish", "sigmoid")  # as `Activation` numbers them

# --- structures ------------------------------------------------------------------------------------------------------


def _fields(*groups: tuple[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return the fields of a structure, from pairs of several names and their type."""
    return tuple((name, kind) for names, kind in groups for name in names.split())


class Steps(ctypes.Structure):
    _fields_ = _fields(
        ("heap values", c_void_p),
        ("length", c_int64),
        ("depth planes", c_int32),
        ("buckets", c_void_p),
        ("count", c_int64),
        ("slope origin center", c_float),
        ("shift least top most", c_int32),
        ("near", c_void_p),
        ("near_length", c_int64),
        ("near_slope near_origin", c_float),
    )


class Output(ctypes.Structure):
    _fields_ = _fields(
        ("kind", c_int32),
        ("scale bias high top", c_void_p),
        ("parameters", c_int64),
        ("residual", c_void_p),
        ("residual_bytes", c_int64),
        ("data more", c_void_p),
        ("bytes row", c_int64),
        ("place added_to", c_void_p),
        ("places", c_int64),
        ("activation", c_int32),
        ("code_scale code_zero", c_void_p),
        ("steps", Steps),
    )


class Linear(ctypes.Structure):
    _fields_ = _fields(("weights data more", c_void_p), ("bytes row rows", c_int64), ("out", Output))


class Side(ctypes.Structure):
    _fields_ = _fields(
        ("data more", c_void_p), ("bytes batch head row", c_int64), ("zero", c_void_p), ("bits transposed top", c_int32)
    )


class Matrices(ctypes.Structure):
    _fields_ = _fields(
        ("batches heads rows terms columns", c_int64),
        ("left right", Side),
        ("out", Output),
        ("out_batch out_head", c_int64),
    )


class Attention(ctypes.Structure):
    _fields_ = _fields(
        ("scores", Matrices),
        ("factor bias bias_of", c_void_p),
        ("bias_bytes bias_tables bias_heads bias_batches", c_int64),
        ("steps", Steps),
        ("zero", c_int32),
        ("code_scale", c_float),
        ("columns", c_int64),
        ("values", Side),
        ("out", Output),
        ("out_batch out_head", c_int64),
    )


class Encode(ctypes.Structure):
    _fields_ = _fields(("data", c_void_p), ("bytes row rows columns", c_int64), ("out", Output))


class Norm(ctypes.Structure):
    _fields_ = _fields(
        ("data", c_void_p),
        ("bytes row rows columns", c_int64),
        ("epsilon", c_float),
        ("about_zero", c_int32),
        ("out", Output),
    )


_WINDOW = (  # of a convolution
    ("data", c_void_p),
    ("bytes images channels height width", c_int64),
    ("kernel stride padding dilation", c_int64 * 2),
)


class Patches(ctypes.Structure):
    _fields_ = _fields(*_WINDOW, ("fill", c_int32), ("out", c_void_p), ("out_bytes row", c_int64))


class Depthwise(ctypes.Structure):
    _fields_ = _fields(*_WINDOW, ("zero factors", c_void_p), ("pairs", c_int64), ("out", Output))

    @property
    def factor_count(self) -> int:
        """Number of factors, including the zeros that fill the last pair."""
        return 2 * int(self.pairs) * int(self.channels)


STRUCTURES = (Steps, Output, Linear, Side, Matrices, Attention, Norm, Encode, Patches, Depthwise)
KERNELS = {
    "linear": Linear,
    "product": Matrices,
    "attention": Attention,
    "norm": Norm,
    "encode": Encode,
    "patches": Patches,
    "depthwise": Depthwise,
}
WRITTEN = {(Output, "data"), (Output, "more"), (Patches, "out")}  # pointers to memory that kernels write

# --- the library -----------------------------------------------------------------------------------------------------


def load() -> ctypes.CDLL:
    """Load the library of kernels and declare its functions. Raises ValueError if it cannot be used here."""
    compiled, why = library.load()
    if compiled is None:
        raise ValueError(f"executor = 'native' does not run here: {why}")
    return _declare(compiled)


@functools.cache
def _declare(compiled: ctypes.CDLL) -> ctypes.CDLL:
    for name, result, arguments in (
        ("open", c_void_p, [c_int, c_int]),
        ("close", None, [c_void_p]),
        ("weights", c_void_p, [c_void_p, c_void_p, c_int64, c_int64, c_int, c_int, c_int]),
        ("weights_free", None, [c_void_p]),
        ("weights_bytes", c_int64, [c_void_p]),
        *((kernel, c_int, [c_void_p, c_void_p]) for kernel in KERNELS),
    ):
        function = getattr(compiled, f"adalog_{name}")
        function.restype, function.argtypes = result, arguments
    return compiled


class Context:
    """The threads and kernels of one compiled model. Calls from several threads run one after another.

    threads: the number of threads that share the work of a kernel. level: one of `library.levels()`; None selects the
    fastest. Raises ValueError if the level or that many threads are not available on this machine.
    """

    def __init__(self, threads: int, level: str | None = None):
        self._library = load()
        level = library.choose_level(level)
        library.check_threads(threads)
        self.level, self.threads = level, threads
        self._pointer = self._library.adalog_open(threads, library.LEVELS.index(level))
        if not self._pointer:
            raise ValueError(f"threads = {threads} is more than this machine can start: choose fewer")
        self._kernels = {name: getattr(self._library, f"adalog_{name}") for name in KERNELS}

    def __del__(self) -> None:
        if getattr(self, "_pointer", None):
            self._library.adalog_close(self._pointer)

    def bind(self, kernel: str, arguments: ctypes.Structure) -> Callable[[], int]:
        """Return a function that calls the kernel with these arguments and returns a status for `check`.

        The caller must keep the arguments, and all memory that they point to, alive as long as the function.
        """
        return functools.partial(self._kernels[kernel], self._pointer, ctypes.addressof(arguments))

    def run(self, kernel: str, arguments: ctypes.Structure) -> None:
        """Call the kernel once with these arguments."""
        check(self.bind(kernel, arguments)())


def check(status: int) -> None:
    """Raise an error for a status other than 0, which a kernel returns if it did not run."""
    if status:
        raise MemoryError("a kernel is out of memory") if status == 2 else ValueError("a kernel's sizes do not match")


class Weights:
    """A stored weight in the layout that kernels read. A code of up to 4 bits takes half a byte.

    codes: (O, I), uint8, contiguous. zero: the zero points, (O,), int32, contiguous. name: names the weight in error
    messages. choices: (bits, zero point of the left operand, its largest byte), as tapes store them.
    """

    def __init__(
        self, codes: npt.NDArray[np.uint8], zero: npt.NDArray[np.int32], name: str, choices: tuple[int, int, int]
    ):
        assert codes.dtype == np.uint8
        assert codes.flags.c_contiguous
        assert zero.dtype == np.int32
        assert zero.shape == codes.shape[:1]
        self._library, self.choices = load(), choices
        sizes = (*codes.shape, *choices)
        self.pointer = self._library.adalog_weights(codes.ctypes.data, zero.ctypes.data, *sizes)
        if not self.pointer:
            raise MemoryError(f"there is not enough memory for the weight of {name}")
        self.nbytes = self._library.adalog_weights_bytes(self.pointer)

    def __del__(self) -> None:
        if getattr(self, "pointer", None):
            self._library.adalog_weights_free(self.pointer)
