"""Fake quantization and its gradient in one pass, where there is a compiled library (`elementwise.cpp`).

Each function here returns None where the library does not take what it is given: without a library, for other dtypes
and devices, and for parameters that vary from one value to the next. PyTorch does it then, in several passes. Values
are the same to the bit; sums are added up in another order. The library trusts the sizes that it is given.
"""

import ctypes
import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from adalog import library

KINDS = {torch.float32: "float", torch.bfloat16: "bfloat16"}
_POINTER, _SIZE, _FLOAT, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int32
_THREE = (_SIZE,) * 3  # those of `sizes_around`
_FAKE_QUANTIZATION = {
    "nearest_uniform": (_POINTER, *_THREE, _POINTER, _POINTER, _FLOAT, _POINTER),
    "nearest_log": (_POINTER, _SIZE, *(_FLOAT,) * 4, _INT, _INT, _POINTER, _POINTER, _POINTER),
    "straight_through": (*(_POINTER,) * 3, *_THREE, _POINTER, _POINTER, _FLOAT, ctypes.c_int, _POINTER, _POINTER),
}
_SEARCH = {  # one function for each of KINDS
    "uniform_errors": (_POINTER, *_THREE, _SIZE, _POINTER, _POINTER, _FLOAT, _SIZE, _POINTER),
    "table_errors": (_POINTER, _POINTER, _SIZE, _SIZE, _POINTER, _SIZE, _SIZE, _POINTER),
    "sums": (_POINTER, _POINTER, _POINTER, *_THREE, _SIZE, _SIZE, _POINTER),
}
_LEAST = 16  # values in a row with the same parameters; with fewer, calls of PyTorch are quicker


@functools.cache
def _functions() -> dict[str, Callable[..., None]]:
    """The library's functions by name; empty without a library."""
    found, _ = library.load()
    if found is None:
        return {}
    searching = {f"{name}_{kind}": types for name, types in _SEARCH.items() for kind in KINDS.values()}
    functions = {}
    for name, types in {**_FAKE_QUANTIZATION, **searching}.items():
        functions[name] = getattr(found, f"adalog_{name}")
        functions[name].argtypes, functions[name].restype = types, None
    return functions


def compiled(name: str, *values: Tensor) -> Callable[..., None] | None:
    """The library's function of this name; None where it does not take these values."""
    able = all(value.device.type == "cpu" and value.dtype == torch.float32 for value in values)
    return _functions().get(name) if able else None


def sizes_around(shape: Sequence[int], own_dims: Sequence[int]) -> tuple[int, int, int] | None:
    """The number of elements before, in and after these dimensions; None where they are not next to each other."""
    first, end = (own_dims[0], own_dims[-1] + 1) if own_dims else (0, 0)
    if tuple(own_dims) != tuple(range(first, end)):
        return None
    return math.prod(shape[:first]), math.prod(shape[first:end]), math.prod(shape[end:])


def _sizes_of(x: Tensor, like: Tensor, *parameters: Tensor) -> tuple[int, int, int] | None:
    """The sizes for parameters that broadcast against x alike; None where no function takes them.

    like: a result in the layout of x. With one parameter for all values any layout without gaps will do.
    """
    shape = parameters[0].shape
    if any(each.shape != shape for each in parameters) or len(shape) > x.ndim or like.stride() != x.stride():
        return None
    own_dims = [dim for dim, size in enumerate(shape, x.ndim - len(shape)) if size > 1]
    if not own_dims:
        return 1, 1, x.numel()
    found = sizes_around(x.shape, own_dims) if x.is_contiguous() else None
    return None if found is None or found[1] != shape.numel() or found[2] < _LEAST else found


def nearest_uniform(x: Tensor, scale: Tensor, zero_point: Tensor, bits: int) -> Tensor | None:
    """The values that the codes of x stand for (`uniform_fake_quantize`)."""
    result = torch.empty_like(x)
    call, found = compiled("nearest_uniform", x, scale, zero_point), _sizes_of(x, result, scale, zero_point)
    if call is None or found is None:
        return None
    scale, zero_point = scale.contiguous(), zero_point.contiguous()
    call(x.data_ptr(), *found, scale.data_ptr(), zero_point.data_ptr(), 2**bits - 1, result.data_ptr())
    return result


def nearest_log(
    x: Tensor, offset: float, scale: Tensor, span: tuple[float, float], places: tuple[int, int], *tables: Tensor
) -> Tensor | None:
    """The level of each value of a logarithmic quantizer with one scale.

    span: the least and largest value of (x + offset) / scale that matters. places: how many bits of such a value do not
    count for its bin, and the number that the others are for the first bin. tables: the end of each bin, and the levels
    above and below the ends, bin by bin.
    """
    result = torch.empty_like(x)
    call, found = compiled("nearest_log", x, scale, *tables), _sizes_of(x, result, scale)
    if call is None or found is None or scale.numel() != 1:
        return None
    ends, levels = (each.contiguous() for each in tables)
    tables_at = ends.data_ptr(), levels.data_ptr()
    call(x.data_ptr(), x.numel(), offset, scale.item(), *span, *places, *tables_at, result.data_ptr())
    return result


def straight_through(
    gradient: Tensor, x: Tensor, hat: Tensor, low: Tensor, high: Tensor, step: Tensor, above: float, mixed: bool
) -> tuple[Tensor, list[Tensor]] | None:
    """The gradient by x, and those by low, high and step.

    The gradients are those of c + s e, in which c is x clipped to [low, high] and e = (hat - above - c) / s is
    constant. mixed: where hat is x + above, c is x.
    """
    gradient, x, hat = (each.contiguous() for each in (gradient, x, hat))
    result = torch.empty_like(x)
    call, found = compiled("straight_through", gradient, x, hat, low, high, step), _sizes_of(x, result, low, high, step)
    if call is None or found is None:
        return None
    low, high = low.contiguous(), high.contiguous()
    sums = torch.zeros(low.numel(), 3, dtype=torch.float64)
    values, ends = (gradient, x, hat), (low, high)
    pointers = [[each.data_ptr() for each in some] for some in (values, ends, (result, sums))]
    call(*pointers[0], *found, *pointers[1], above, mixed, *pointers[2])
    by_low, by_high, by_step = (each.reshape(low.shape).to(low.dtype) for each in sums.unbind(1))
    return result, [by_low, by_high, by_step / step]
