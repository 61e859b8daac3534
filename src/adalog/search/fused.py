"""The elementwise work of a search on its candidates, in one pass where there is a compiled library (`fused.cpp`).

Without the library, and for other dtypes and devices, PyTorch takes several passes. Errors are the same to the bit;
sums are added up in another order. The library trusts the sizes it is given, so shapes that do not fit are left to
PyTorch.
"""

import ctypes
import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from adalog import library
from adalog.quantizers import uniform_fake_quantize

_KINDS = {torch.float32: "float", torch.bfloat16: "bfloat16"}
_SIZES = (ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
_ARGUMENTS = {
    "uniform_errors": (ctypes.c_void_p, *_SIZES, *(ctypes.c_void_p,) * 2, ctypes.c_float, _SIZES[0], ctypes.c_void_p),
    "table_errors": (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p),
    "sums": (*(ctypes.c_void_p,) * 3, *_SIZES, ctypes.c_int64, ctypes.c_void_p),
}


@functools.cache
def _functions() -> dict[str, Callable[..., None]]:
    """The library's functions by name and dtype; empty without a library."""
    found, _ = library.load()
    functions = {}
    for name, arguments in _ARGUMENTS.items() if found else ():
        for kind in _KINDS.values():
            function = getattr(found, f"adalog_{name}_{kind}")
            function.argtypes, function.restype = arguments, None
            functions[f"{name}_{kind}"] = function
    return functions


def _function(name: str, dtype: torch.dtype, *values: Tensor) -> Callable[..., None] | None:
    """The library's function for these values; None where it does not take them."""
    able = all(value.device.type == "cpu" and value.dtype == torch.float32 for value in values)
    return _functions().get(f"{name}_{_KINDS.get(dtype)}") if able else None


def _sizes(shape: Sequence[int], own_dims: Sequence[int]) -> tuple[int, int, int] | None:
    """The number of elements before, in and after these dimensions; None where they are not next to each other."""
    first, end = (own_dims[0], own_dims[-1] + 1) if own_dims else (0, 0)
    if tuple(own_dims) != tuple(range(first, end)):
        return None
    return math.prod(shape[:first]), math.prod(shape[first:end]), math.prod(shape[end:])


def shaped_against(parameters: Tensor, shape: Sequence[int], own_dims: Sequence[int]) -> Tensor:
    """Parameters (k, *groups) in the shape (k, ...) that broadcasts against k candidates of values of this shape."""
    return parameters.reshape(-1, *(size if dim in own_dims else 1 for dim, size in enumerate(shape)))


def uniform_errors(
    values: Tensor, scale: Tensor, zero_point: Tensor, bits: int, own_dims: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """The errors that k uniform quantizers add to the values: (k, *values.shape), rounded to `dtype`.

    scale, zero_point: (k, *groups), where groups are the sizes of the dimensions `own_dims` of the values.
    """
    function, sizes = _function("uniform_errors", dtype, values, scale, zero_point), _sizes(values.shape, own_dims)
    fit = sizes is not None and scale.numel() == zero_point.numel() == len(scale) * sizes[1]
    if function is None or sizes is None or not fit:
        scale, zero_point = (shaped_against(each, values.shape, own_dims) for each in (scale, zero_point))
        return uniform_fake_quantize(values, scale, zero_point, bits).sub_(values).to(dtype)
    values, scale, zero_point = (each.contiguous() for each in (values, scale, zero_point))
    result = torch.empty(len(scale), *values.shape, dtype=dtype, device=values.device)
    parameters = scale.data_ptr(), zero_point.data_ptr(), 2**bits - 1, len(scale)
    function(values.data_ptr(), *sizes, *parameters, result.data_ptr())
    return result


def table_errors(values: Tensor, bins: Tensor, tables: Tensor, dtype: torch.dtype) -> Tensor:
    """table[bins] - values for each row of the tables (k, n): (k, *values.shape), rounded to `dtype`.

    bins: int32, one per value.
    """
    fit = bins.dtype == torch.int32 and bins.numel() == values.numel()
    function = _function("table_errors", dtype, values, tables) if fit else None
    result = torch.empty(len(tables), *values.shape, dtype=dtype, device=values.device)
    values, bins, tables = values.contiguous(), bins.contiguous(), tables.contiguous()
    for table, put in zip(tables, result, strict=True):
        if function is None:
            put.copy_(torch.index_select(table, 0, bins.view(-1)).view(values.shape).sub_(values))
        else:
            function(values.data_ptr(), bins.data_ptr(), values.numel(), table.data_ptr(), put.data_ptr())
    return result


def sums(product: Tensor, base: Tensor, error: Tensor | None, own_dims: Sequence[int]) -> Tensor:
    """The sums of (product + base)**2, or of (product + 2 base) error for a Gram matrix: (k, *groups), base's dtype.

    product, error: (k, ...); error is None without a Gram matrix. base: one for all k. own_dims: the dimensions of the
    base that are not summed over.
    """
    function, sizes = _function("sums", product.dtype, base), _sizes(base.shape, own_dims)
    fit = product.shape[1:] == base.shape and (error is None or error.shape == product.shape)
    if function is None or sizes is None or not fit or (error is not None and error.dtype != product.dtype):
        product = product.to(base.dtype)
        product = product.add_(base).square_() if error is None else product.add_(base, alpha=2).mul_(error)
        summed = [dim + 1 for dim in range(base.ndim) if dim not in own_dims]
        return product.sum(summed) if summed else product
    product, base, error = product.contiguous(), base.contiguous(), None if error is None else error.contiguous()
    shape = len(product), *(base.shape[dim] for dim in own_dims)
    result = torch.zeros(shape, dtype=torch.float64, device=base.device)
    pointers = product.data_ptr(), base.data_ptr(), None if error is None else error.data_ptr()
    function(*pointers, *sizes, len(product), result.data_ptr())
    return result.to(base.dtype)
