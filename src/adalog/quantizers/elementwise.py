"""Fake quantization, its gradient, and codes in turn in one pass, by the compiled library (`elementwise.cpp`).

Each function returns None if the library cannot compute it: without a library, for other dtypes and devices, and for
parameters that vary from one value to the next. The caller then uses PyTorch, which takes several passes. The values
are the same to the bit, but sums are added in another order. The library does not check the sizes that it gets. On CUDA
devices, kernels of Triton take its place (`elementwise_cuda.py`).
"""

import ctypes
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from adalog import library


class _Pointer:
    """The type of a C function's argument for which Python code passes a tensor, or None."""

    @staticmethod
    def from_param(values: Tensor | None) -> ctypes.c_void_p:
        return ctypes.c_void_p(None if values is None else values.data_ptr())


KINDS = {torch.float32: "float", torch.bfloat16: "bfloat16"}
_SIZE, _FLOAT, _INT = ctypes.c_int64, ctypes.c_float, ctypes.c_int32
_THREE = (_SIZE,) * 3  # the sizes that `sizes_around` returns
_SEARCH = {  # one function for each dtype in KINDS
    "uniform_errors": (_Pointer, *_THREE, _SIZE, _Pointer, _Pointer, _FLOAT, _SIZE, _Pointer),
    "table_errors": (_Pointer, _Pointer, _SIZE, _SIZE, _Pointer, _SIZE, _SIZE, _Pointer),
    "sums": (_Pointer, _Pointer, _Pointer, *_THREE, _SIZE, _SIZE, _Pointer),
}
TYPES = {
    "nearest_uniform": (_Pointer, *_THREE, _Pointer, _Pointer, _FLOAT, _Pointer),
    "nearest_log": (_Pointer, _SIZE, *(_FLOAT,) * 4, _INT, _INT, *(_Pointer,) * 3),
    "straight_through": (*(_Pointer,) * 3, *_THREE, _Pointer, _Pointer, _FLOAT, ctypes.c_int, _Pointer, _Pointer),
    "codes_in_turn": (*(_Pointer,) * 5, ctypes.c_double, *_THREE, *(_SIZE,) * 4, _Pointer, _Pointer),
    **{f"{name}_{kind}": types for name, types in _SEARCH.items() for kind in KINDS.values()},
}
_MOST_ROWS = 64  # whose codes are chosen in one call
MOST_ELEMENTS = 2**31  # that the kernels of Triton can number
_LEAST = 16  # consecutive values that share parameters; with fewer, PyTorch is faster


@functools.cache
def _functions() -> dict[str, Callable[..., None]]:
    """Return the library's functions by name, or an empty dict without the library."""
    library_here, _ = library.load()
    if library_here is None:
        return {}
    functions = {}
    for name, types in TYPES.items():
        functions[name] = getattr(library_here, f"adalog_{name}")
        functions[name].argtypes, functions[name].restype = types, None
    return functions


def c_function(name: str, *values: Tensor, dtype: torch.dtype = torch.float32) -> Callable[..., None] | None:
    """Return the library's function of this name, or None if not all values are of this dtype in CPU memory."""
    fits = are_values(*values) and all(
        value.device.type == "cpu" and value.dtype == dtype and not value.is_neg() for value in values
    )
    return _functions().get(name) if fits else None


def are_values(*tensors: Tensor) -> bool:
    """Return True if the tensors hold values, not placeholders while PyTorch traces, compiles or maps a function."""
    if torch.jit.is_tracing() or torch.compiler.is_compiling():  # type: ignore[attr-defined, no-untyped-call]
        return False
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return all(type(value) in (Tensor, nn.Parameter) and not wrapped(value) for value in tensors)


def sizes_around(shape: Sequence[int], own_dims: Sequence[int]) -> tuple[int, int, int] | None:
    """Return the number of elements before, in and after these dimensions, or None if they are not adjacent."""
    first, end = (own_dims[0], own_dims[-1] + 1) if own_dims else (0, 0)
    if tuple(own_dims) != tuple(range(first, end)):
        return None
    return math.prod(shape[:first]), math.prod(shape[first:end]), math.prod(shape[end:])


def _sizes_for(x: Tensor, parameters: Sequence[Tensor]) -> tuple[int, int, int] | None:
    """Return the sizes of x around the dimensions in which parameters that broadcast against it vary.

    None if the parameters differ in shape, or if they vary and x is not contiguous.
    """
    shape = parameters[0].shape
    if any(parameter.shape != shape for parameter in parameters) or len(shape) > x.ndim:
        return None
    own = [(dim, size) for dim, size in enumerate(shape, x.ndim - len(shape)) if size != 1]
    if not own:
        return 1, 1, x.numel()
    sizes = sizes_around(x.shape, [dim for dim, _ in own])
    fits = x.is_contiguous() and all(x.shape[dim] == size for dim, size in own)
    return sizes if fits and sizes is not None and sizes[2] >= _LEAST else None


def nearest_uniform(x: Tensor, scale: Tensor, zero_point: Tensor, bits: int) -> Tensor | None:
    """Return the same values as `uniform_fake_quantize`, in the layout of x."""
    module, call = kernels(x, scale, zero_point), c_function("nearest_uniform", x, scale, zero_point)
    sizes = _sizes_for(x, (scale, zero_point))
    if (module is None and call is None) or sizes is None:
        return None
    if module is not None and not (x.is_contiguous() and x.numel()):
        return None
    result = torch.empty_like(x)
    if result.stride() != x.stride() and not x.is_contiguous():  # x has gaps in memory
        return None
    scale, zero_point = scale.contiguous(), zero_point.contiguous()
    if module is not None:
        module.nearest_uniform(x, scale, zero_point, 2**bits - 1, sizes, result)
    elif call is not None:
        call(x, *sizes, scale, zero_point, 2**bits - 1, result)
    return result


def nearest_log(
    x: Tensor, offset: float, scale: Tensor, span: tuple[float, float], places: tuple[int, int], *tables: Tensor
) -> Tensor | None:
    """Return the nearest level of each value, for a logarithmic quantizer with one scale; the result is contiguous.

    span: (x + offset) / scale is clamped to this interval.
    places: the number of trailing bits of such a value that its bin number leaves out, and the number of the first bin.
    tables: the threshold in each bin, and the levels above and below it, bin by bin; contiguous.
    """
    if scale.numel() != 1 or scale.ndim > x.ndim:
        return None
    module, call = kernels(x, scale, *tables) if x.numel() else None, c_function("nearest_log", x, scale, *tables)
    if module is None and call is None:
        return None
    x = x.contiguous()
    result = torch.empty_like(x)
    if module is not None:
        module.nearest_log(x, offset, scale, span, places, *tables, result)
    elif call is not None:
        call(x, x.numel(), offset, scale.item(), *span, *places, *tables, result)
    return result


def straight_through(
    gradient: Tensor, x: Tensor, hat: Tensor, trained: Sequence[Tensor], above: float, mixed: bool
) -> tuple[Tensor, list[Tensor]] | None:
    """Return the gradient of x, contiguous, and the gradients of the trained parameters low, high and step.

    They are those of `Quantizer.fake_quantize`. The result has no gradients of its own, so it is None while gradients
    are enabled.

    above, mixed: as in `_QuantizedStraightThrough`.
    """
    call, sizes = c_function("straight_through", gradient, x, hat, *trained), _sizes_for(x, trained)
    if call is None or sizes is None or torch.is_grad_enabled():
        return None
    low, high, step = trained
    gradient, x, hat = (value.contiguous() for value in (gradient, x, hat))
    result = torch.empty_like(x)
    sums = torch.zeros(low.numel(), 3, dtype=torch.float64, device=x.device)
    call(gradient, x, hat, *sizes, low.contiguous(), high.contiguous(), above, mixed, result, sums)
    by_low, by_high, by_step = (total.reshape(low.shape).to(low.dtype) for total in sums.unbind(1))
    return result, [by_low, by_high, by_step / step]


def codes_in_turn(
    left: Tensor, form: Tensor, base: Tensor | None, parameters: Sequence[Tensor], bits: int, rows: range, codes: Tensor
) -> Tensor | None:
    """Choose the uniform codes of at most 64 consecutive rows of weights, one row after another, in float64.

    Let f be the form. Before the code of row r is chosen, each earlier row q in `rows` subtracts f[q, r] moved[q] from
    left[r]. Without a base, left[r] is quantized, and moved[r] is its error divided by f[r, r]. With a base, base[r] +
    left[r] / f[r, r] is quantized, and moved[r] is the new level minus base[r].

    left: (G, K, O); it does not change. form: (G, K, K). base: (G, K, O). parameters: scale and zero point, (G, 1, O).
    codes: (G, K, O), gets the codes of these rows. The result is `moved`, (G, len(rows), O).
    """
    groups, _, outputs = left.shape
    wholes = [left, codes, *parameters, *([] if base is None else [base])]
    fit = form.dtype == torch.float64 and all(value.shape == (groups, 1, outputs) for value in parameters)
    fit = fit and all(value.dtype == torch.float64 and value.is_contiguous() for value in wholes)
    if not fit or len(rows) > _MOST_ROWS:
        return None
    module = kernels(*wholes, form, dtype=torch.float64)
    call = c_function("codes_in_turn", *wholes, form, dtype=torch.float64)
    if module is None and call is None:
        return None
    span = slice(rows.start, rows.stop)
    blocks = left[:, span], form[:, span, span], None if base is None else base[:, span]
    moved = torch.empty((groups, len(rows), outputs), dtype=left.dtype, device=left.device)
    if module is not None:
        module.launch_codes_in_turn(*blocks, *parameters, 2**bits - 1, codes[:, span], moved)
    elif call is not None:
        sizes = groups, len(rows), outputs, left.shape[1] * outputs, *form.stride()
        call(*blocks, *parameters, 2**bits - 1, *sizes, codes[:, span], moved)
    return moved


def kernels(*values: Tensor, dtype: torch.dtype = torch.float32) -> Any:
    """Return the module of Triton's kernels for CUDA tensors of this dtype, of fewer than 2**31 elements, else None."""
    fits = all(value.is_cuda and value.dtype == dtype and value.numel() < MOST_ELEMENTS for value in values)
    if not fits or not are_values(*values) or any(value.is_neg() for value in values):
        return None
    return _triton_kernels()


@functools.cache
def _triton_kernels() -> Any:
    """Return the module of Triton's kernels, or None if Triton is missing or cannot compile them here."""
    try:
        from adalog.quantizers import elementwise_cuda

        one = torch.ones(1, 1, 1, dtype=torch.float64, device="cuda")
        others = torch.empty_like(one), torch.empty_like(one)
        elementwise_cuda.launch_codes_in_turn(one, one, None, one, one, 1, *others)
    except Exception:  # Triton's compiler raises errors of many types, such as when there is no C compiler
        return None
    return elementwise_cuda
