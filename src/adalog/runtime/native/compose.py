"""Compose operations from the float operations in `FLOATS` and from kernels, so that they run without PyTorch.

Each function adds the calls that write the result of an operation to the tensor `out`. It takes the arguments of the
operation in PyTorch's order, and returns False if PyTorch must run the operation.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from adalog.graph.operations import aten, resolve
from adalog.graph.program import leaves_of
from adalog.runtime.native import abi
from adalog.runtime.native.arena import Layout, in_memory
from adalog.runtime.native.floats import COPY, FLOATS
from adalog.runtime.native.products import row_fields

_RESHAPES = aten("reshape.default flatten.using_ints unflatten.int")
_ADD, _SUB, _MUL, _DIV = (f"aten.{name}.Tensor" for name in ("add", "sub", "mul", "div"))
_MAXIMUM, _MINIMUM, _SQRT = (f"aten.{name}.default" for name in ("maximum", "minimum", "sqrt"))
_CAT, _MEAN = "aten.cat.default", "aten.mean.dim"


def compose(layout: Layout, operation: str, out: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Add an operation, with its result in `out`. Return False if PyTorch must run it.

    PyTorch runs operations on values of other types than float32, except reshapes.
    """
    if operation in _RESHAPES and out.is_contiguous():
        layout.floats(COPY, out.view(args[0].shape), args[0])
        return True
    tensors = [leaf for leaf in leaves_of([out, args, dict(kwargs)]) if isinstance(leaf, Tensor)]
    if any(tensor.dtype != torch.float32 for tensor in tensors):
        return False
    if operation in FLOATS and not kwargs:
        layout.floats(operation, out, *args)
        return True
    if operation not in COMPOSED:
        return False
    resolved: Any = resolve(operation)
    parameters = {parameter.name: parameter.default_value for parameter in resolved._schema.arguments}
    values = (parameters | dict(zip(parameters, args, strict=False)) | dict(kwargs)).values()
    return COMPOSED[operation](layout, out, *values)


def _scratch(layout: Layout, like: Tensor, *lead: int) -> Tensor:
    """Take memory, until the end of the step, for a tensor of shape (*lead, *like.shape) in the memory order of one."""
    order, back = in_memory(like)
    memory = layout.take_scratch([*lead, *(like.shape[i] for i in order)], torch.float32)
    return memory.permute(*range(len(lead)), *(len(lead) + i for i in back))


# --- elements --------------------------------------------------------------------------------------------------------


def _negate(layout: Layout, out: Tensor, x: Tensor) -> bool:
    layout.floats(_MUL, out, x, -1.0)
    return True


def _square(layout: Layout, out: Tensor, x: Tensor, exponent: float = 2) -> bool:
    if exponent != 2:
        return False
    layout.floats(_MUL, out, x, x)
    return True


def _reciprocal(layout: Layout, out: Tensor, x: Tensor) -> bool:
    layout.floats(_DIV, out, 1.0, x)
    return True


def _subtract_from(layout: Layout, out: Tensor, x: Tensor, number: float, alpha: float = 1) -> bool:
    if alpha != 1:
        return False
    layout.floats(_SUB, out, float(number), x)
    return True


def _reciprocal_root(layout: Layout, out: Tensor, x: Tensor) -> bool:
    layout.floats(_SQRT, out, x)
    layout.floats(_DIV, out, 1.0, out)
    return True


def _clamp(layout: Layout, out: Tensor, x: Tensor, low: float | None, high: float | None = None) -> bool:
    bounds = [(name, bound) for name, bound in ((_MAXIMUM, low), (_MINIMUM, high)) if bound is not None]
    if not all(abs(bound) <= torch.finfo(torch.float32).max for _, bound in bounds):
        return False
    for name, bound in bounds:
        layout.floats(name, out, x, bound)
        x = out
    return True


def _clamp_max(layout: Layout, out: Tensor, x: Tensor, high: float) -> bool:
    return _clamp(layout, out, x, None, high)


def _batch_norm(
    layout: Layout,
    out: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    training: bool,
    momentum: float,
    epsilon: float,
    *_: Any,
) -> bool:
    """Compute x gain + shift with gain = weight / sqrt(variance + epsilon) and shift = bias - mean gain."""
    if training or mean is None or variance is None:
        return False
    gain, shift = _scratch(layout, mean), _scratch(layout, mean)
    layout.floats(_ADD, gain, variance, epsilon)
    layout.floats(_SQRT, gain, gain)
    layout.floats(_DIV, gain, 1.0 if weight is None else weight, gain)
    layout.floats(_MUL, shift, mean, gain)
    layout.floats(_SUB, shift, 0.0 if bias is None else bias, shift)
    by_channel = (-1, *[1] * (x.ndim - 2))
    layout.floats(_MUL, out, x, gain.view(by_channel))
    layout.floats(_ADD, out, out, shift.view(by_channel))
    return True


def _group_norm(
    layout: Layout,
    out: Tensor,
    x: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    epsilon: float,
    *_: Any,
) -> bool:
    """Let the kernel of norms read each group of channels as a row."""
    if not x.numel():
        return False
    rows = layout.dense(x).view(len(x) * groups, -1)
    result = layout.take_scratch(x.shape, torch.float32)
    output = layout.output(None, [result.view(rows.shape)], torch.ones(rows.shape[1]).double(), None)
    layout.call("norm", abi.Norm(**row_fields(rows), epsilon=epsilon, out=output))
    by_channel = (-1, *[1] * (x.ndim - 2))
    layout.floats(_MUL, out, result, 1.0 if weight is None else weight.view(by_channel))
    if bias is not None:
        layout.floats(_ADD, out, out, bias.view(by_channel))
    return True


# --- moves -----------------------------------------------------------------------------------------------------------


def _stack(layout: Layout, out: Tensor, values: Sequence[Tensor], dim: int) -> bool:
    layout.floats(_CAT, out, [value.unsqueeze(dim) for value in values], dim)
    return True


def _roll(layout: Layout, out: Tensor, x: Tensor, shifts: Sequence[int], dims: Sequence[int]) -> bool:
    if not dims or len(set(dims)) < len(dims):
        return False
    parts = [(out, x)]
    for shift, dim in zip(shifts, dims, strict=True):
        size = x.shape[dim]
        first = shift % max(size, 1)  # the new place of the first entry
        pieces = ((first, 0, size - first), (0, size - first, first))
        parts = [
            (to.narrow(dim, place, count), part.narrow(dim, start, count))
            for to, part in parts
            for place, start, count in pieces
        ]
    for to, part in parts:
        if to.numel():
            layout.floats(COPY, to, part)
    return True


def _pad(layout: Layout, out: Tensor, x: Tensor, widths: Sequence[int], value: float | None = None) -> bool:
    layout.floats(COPY, out, torch.tensor(float(value or 0)).expand(out.shape))
    for i in range(0, len(widths), 2):
        dim, (left, right) = x.ndim - 1 - i // 2, widths[i : i + 2]
        start, end = max(-left, 0), x.shape[dim] - max(-right, 0)
        x = x.narrow(dim, start, end - start)
        out = out.narrow(dim, max(left, 0), end - start)
    layout.floats(COPY, out, x)
    return True


def _pad_by_mode(layout: Layout, out: Tensor, x: Tensor, widths: Sequence[int], mode: str, value: float | None) -> bool:
    return mode == "constant" and _pad(layout, out, x, widths, value)


# --- sums and largest values -----------------------------------------------------------------------------------------


def _takes_sum(x: Tensor, dtype: Any) -> bool:
    return bool(x.ndim and x.numel()) and dtype in (None, torch.float32)


def _sum(layout: Layout, out: Tensor, x: Tensor, dims: Sequence[int] | None, keep: bool, dtype: Any) -> bool:
    """Multiply the mean by the number of its values, because the mean adds in float64."""
    if not _takes_sum(x, dtype):
        return False
    dims = list(dims or range(x.ndim))
    layout.floats(_MEAN, out, x, dims, keep)
    layout.floats(_MUL, out, out, math.prod(x.shape[dim] for dim in dims))
    return True


def _length(
    layout: Layout, out: Tensor, x: Tensor, order: float, dims: Sequence[int] | None, keep: bool, dtype: Any
) -> bool:
    if order != 2 or not _takes_sum(x, dtype):
        return False
    squares = _scratch(layout, x)
    layout.floats(_MUL, squares, x, x)
    _sum(layout, out, squares, dims, keep, dtype)
    layout.floats(_SQRT, out, out)
    return True


def _reduce(layout: Layout, operation: str, out: Tensor, x: Tensor, dim: int) -> None:
    """Write the largest or smallest value along a dimension, which `out` lacks. Halves of odd sizes overlap."""
    x = x.movedim(dim, 0)
    while len(x) > 8:
        half = -(-len(x) // 2)
        halved = _scratch(layout, x[0], half)
        layout.floats(operation, halved, x[:half], x[len(x) - half :])
        x = halved
    layout.floats(operation, out, x[0], x[-1])
    for value in x[1:-1]:
        layout.floats(operation, out, out, value)


def _extremum(operation: str) -> Callable[..., bool]:
    def run(layout: Layout, out: Tensor, x: Tensor, dims: Sequence[int], keep: bool) -> bool:
        if not x.ndim:
            return False
        order = sorted((dim % x.ndim for dim in dims or range(x.ndim)), reverse=True)
        for dim in order if keep else ():
            out = out.select(dim, 0)
        for dim in order[:-1]:
            part = _scratch(layout, x.select(dim, 0))
            _reduce(layout, operation, part, x, dim)
            x = part
        _reduce(layout, operation, out, x, order[-1])
        return True

    return run


# --- windows ---------------------------------------------------------------------------------------------------------


def _pair(values: Sequence[int] | int) -> list[int]:
    values = [values] if isinstance(values, int) else list(values)
    return values * 2 if len(values) == 1 else values


def _padded(
    layout: Layout,
    x: Tensor,
    counts: Sequence[int],
    spans: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    fill: float,
) -> Tensor:
    """Return an image (..., H, W) with a border that `counts` windows of `spans` pixels, down and across, fit into."""
    sizes = zip(counts, spans, stride, padding, x.shape[-2:], strict=True)
    (top, bottom), (left, right) = (
        (before, max((count - 1) * step + span - size - before, 0)) for count, span, step, before, size in sizes
    )
    if not any((top, bottom, left, right)):
        return x
    height, width = x.shape[-2] + top + bottom, x.shape[-1] + left + right
    out = _scratch(layout, x[..., :1, :1].expand(*x.shape[:-2], height, width))
    _pad(layout, out, x, (left, right, top, bottom), fill)
    return out


def _windows(x: Tensor, dim: int, count: int, span: int, step: int, dilation: int) -> Tensor:
    """Return a view whose last dimension goes through each of the windows along a dimension."""
    return x.unfold(dim, span, step).narrow(dim, 0, count)[..., ::dilation]


def _max_pool(
    layout: Layout, out: Tensor, x: Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool
) -> bool:
    kernel, padding, dilation = map(_pair, (kernel, padding, dilation))
    stride, counts = _pair(stride) if stride else kernel, out.shape[-2:]
    spans = [step * (size - 1) + 1 for size, step in zip(kernel, dilation, strict=True)]
    x = _padded(layout, x, counts, spans, stride, padding, -math.inf)
    (down, across), sizes = (x.ndim - 2, x.ndim - 1), list(zip(counts, spans, stride, dilation, strict=True))
    windows = _windows(x, down, *sizes[0])
    rows = _scratch(layout, windows[..., 0])
    _reduce(layout, _MAXIMUM, rows, windows, -1)
    _reduce(layout, _MAXIMUM, out, _windows(rows, across, *sizes[1]), -1)
    return True


def _patches(layout: Layout, out: Tensor, x: Tensor, kernel: Any, dilation: Any, padding: Any, stride: Any) -> bool:
    kernel, dilation, padding, stride = map(_pair, (kernel, dilation, padding, stride))
    spans = [step * (size - 1) + 1 for size, step in zip(kernel, dilation, strict=True)]
    counts = [
        (size + 2 * border - span) // step + 1
        for size, border, span, step in zip(x.shape[-2:], padding, spans, stride, strict=True)
    ]
    if not out.is_contiguous():
        return False
    x = _padded(layout, x, counts, spans, stride, padding, 0.0)
    for dim, size in zip((x.ndim - 2, x.ndim - 1), zip(counts, spans, stride, dilation, strict=True), strict=True):
        x = _windows(x, dim, *size)
    x = x.movedim((-2, -1), (-4, -3))
    layout.floats(COPY, out.view(x.shape), x)
    return True


# For each operation, a function that composes it.
COMPOSED: dict[str, Callable[..., bool]] = {
    "aten.neg.default": _negate,
    "aten.square.default": _square,
    "aten.pow.Tensor_Scalar": _square,
    "aten.reciprocal.default": _reciprocal,
    "aten.rsub.Scalar": _subtract_from,
    "aten.rsqrt.default": _reciprocal_root,
    "aten.clamp.default": _clamp,
    "aten.clamp_min.default": _clamp,
    "aten.clamp_max.default": _clamp_max,
    "aten.batch_norm.default": _batch_norm,
    "aten.group_norm.default": _group_norm,
    "aten.stack.default": _stack,
    "aten.roll.default": _roll,
    "aten.pad.default": _pad_by_mode,
    "aten.constant_pad_nd.default": _pad,
    "aten.sum.dim_IntList": _sum,
    "aten.linalg_vector_norm.default": _length,
    "aten.amax.default": _extremum(_MAXIMUM),
    "aten.amin.default": _extremum(_MINIMUM),
    "aten.max_pool2d.default": _max_pool,
    "aten.im2col.default": _patches,
}
