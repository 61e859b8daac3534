"""Elementwise work on the candidates of a search, in one pass if there is a compiled library or a kernel.

The library's functions are in `elementwise.cpp`, and the kernels for CUDA in `elementwise_cuda.py`. Without them, and
for other dtypes and devices, PyTorch takes several passes. Errors are the same to the bit, but sums are added in
another order. The library and the kernels do not check the sizes that they get, so PyTorch handles shapes that do not
fit.

In both, candidates (k, *batch, T, I) lie in memory as (*batch, k, T, I). The candidates of one matrix are then
adjacent, and `products` computes them as one product. Candidates in another order are copied.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from adalog.device import waits_for_launches
from adalog.quantizers.elementwise import KINDS, MOST_ELEMENTS, c_function, kernels, sizes_around

# Sums of fewer values than this are left to PyTorch on CUDA devices.
_LEAST_SUMMED = 16


def _compiled(name: str, count: int, dtype: torch.dtype, *values: Tensor) -> tuple[Any, Any]:
    """Return the kernels and the library's function for `count` results per value; None if they cannot take these."""
    fits = dtype in KINDS and 0 < count * values[0].numel() < MOST_ELEMENTS
    return kernels(*values) if fits else None, c_function(f"{name}_{KINDS.get(dtype)}", *values)


def _matrix(values: Tensor) -> int:
    return math.prod(values.shape[-2:])  # elements


def _together(candidates: Tensor) -> Tensor:
    """Return candidates (k, *batch, T, I) as (*batch, k, T, I)."""
    return candidates.movedim(0, -3) if candidates.ndim > 3 else candidates


def _empty(count: int, values: Tensor, dtype: torch.dtype) -> Tensor:
    """Allocate memory for `count` candidates of the values, (k, *values.shape)."""
    *batch, rows, columns = (1, 1, *values.shape)[-max(2, values.ndim) :]
    result = torch.empty(*batch, count, rows, columns, dtype=dtype, device=values.device)
    return result.movedim(-3, 0).view(count, *values.shape)


def products(candidates: Tensor, factor: Tensor) -> Tensor:
    """Return candidates (k, *batch, T, I) @ factor (*batch, I, O), with one product for all candidates of a matrix."""
    *batch, count, rows, width = _together(candidates).shape
    values = _together(candidates).reshape(*batch, count * rows, width)
    if factor.shape[-1] == 1 and batch:  # depthwise convolutions are faster in this orientation
        product = (factor.transpose(-1, -2) @ values.transpose(-1, -2)).transpose(-1, -2)
    else:
        product = values @ factor
    return product.view(*batch, count, rows, factor.shape[-1]).movedim(-3, 0)


def reshape_against(parameters: Tensor, shape: Sequence[int], own_dims: Sequence[int]) -> Tensor:
    """Reshape parameters (k, *groups) so that they broadcast against k candidates of values of this shape: (k, ...)."""
    return parameters.reshape(-1, *(size if dim in own_dims else 1 for dim, size in enumerate(shape)))


def uniform_errors(
    values: Tensor, scale: Tensor, zero_point: Tensor, bits: int, own_dims: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Return the errors that k uniform quantizers add to the values: (k, *values.shape), rounded to `dtype`.

    scale, zero_point: (k, *groups), where groups are the sizes of the dimensions `own_dims` of the values.
    """
    sizes = sizes_around(values.shape, own_dims)
    fit = sizes is not None and scale.numel() == zero_point.numel() == len(scale) * sizes[1]
    module, function = _compiled("uniform_errors", len(scale), dtype, values, scale, zero_point)
    if (function is None and module is None) or sizes is None or not fit:
        scale, zero_point = (reshape_against(item, values.shape, own_dims) for item in (scale, zero_point))
        # The same values as those of `uniform_fake_quantize`, with fewer passes over the candidates.
        steps = torch.div(values, scale).round_()
        torch.maximum(steps, -zero_point, out=steps)
        torch.minimum(steps, 2**bits - 1 - zero_point, out=steps)
        return steps.mul_(scale).sub_(values).to(dtype)
    values, scale, zero_point = (item.contiguous() for item in (values, scale, zero_point))
    result = _empty(len(scale), values, dtype)
    if module is not None:
        module.uniform_errors(values, scale, zero_point, 2**bits - 1, sizes, _matrix(values), result)
    elif function is not None:
        function(values, *sizes, _matrix(values), scale, zero_point, 2**bits - 1, len(scale), result)
    return result


def table_errors(values: Tensor, bins: Tensor, tables: Tensor, dtype: torch.dtype) -> Tensor:
    """Return table[bins] - values for each row of the tables (k, n): (k, *values.shape), rounded to `dtype`.

    bins: int32, one per value.
    """
    module, function = _compiled("table_errors", len(tables), dtype, values, tables)
    if bins.dtype != torch.int32 or bins.numel() != values.numel():
        module = function = None
    result = _empty(len(tables), values, dtype)
    values, bins, tables = values.contiguous(), bins.contiguous(), tables.contiguous()
    if module is not None:
        module.table_errors(values, bins, tables, _matrix(values), result)
    elif function is not None:
        function(values, bins, values.numel(), _matrix(values), tables, tables.shape[1], len(tables), result)
    elif waits_for_launches(values.device):  # one launch for all candidates
        return tables.index_select(1, bins.view(-1)).view(result.shape).sub_(values).to(dtype)
    else:
        for table, target in zip(tables, result, strict=True):
            target.copy_(torch.index_select(table, 0, bins.view(-1)).view(values.shape).sub_(values))
    return result


def sums(product: Tensor, base: Tensor, error: Tensor | None, own_dims: Sequence[int]) -> Tensor:
    """Return the sums of (product + base)**2, or of (product + 2 base) error for a Gram matrix: (k, *groups).

    product, error: (k, ...). error is None without a Gram matrix.
    base: shared by all k candidates. The result has its dtype.
    own_dims: the dimensions of the base that are not summed over.
    """
    sizes = sizes_around(base.shape, own_dims)
    fit = product.shape[1:] == base.shape and (error is None or error.shape == product.shape)
    fit = fit and (error is None or error.dtype == product.dtype)
    module, function = _compiled("sums", len(product), product.dtype, base)
    module = module if sizes is not None and sizes[2] >= _LEAST_SUMMED else None
    if (function is None and module is None) or sizes is None or not fit:
        alpha = 1 if error is None else 2
        alike = product.dtype == base.dtype
        product = product.add_(base, alpha=alpha) if alike else torch.add(product, base, alpha=alpha)
        product = product.square_() if error is None else product.mul_(error)
        summed = [dim + 1 for dim in range(base.ndim) if dim not in own_dims]
        return product.sum(summed) if summed else product
    count, base, product = len(product), base.contiguous(), _together(product).contiguous()
    error = None if error is None else _together(error).contiguous()
    shape = count, *(base.shape[dim] for dim in own_dims)
    if module is not None:
        added: Tensor = module.sums(product, base, error, sizes, _matrix(base), count)
        return added.view(shape)
    result = torch.zeros(shape, dtype=torch.float64, device=base.device)
    function(product, base, error, *sizes, _matrix(base), count, result)
    return result.to(base.dtype)
