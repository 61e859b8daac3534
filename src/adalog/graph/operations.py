"""Define the operations that a program may hold, by name.

A program cannot name anything else, so running a program never runs foreign code.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from adalog.graph.activations import BY_OPERATION

FAKE_QUANTIZE = "adalog.fake_quantize"  # quantize and dequantize a value; the only tensor operation not from PyTorch


def aten(names: str) -> frozenset[str]:
    """Return the full names of ATen operations, given their names without the prefix."""
    return frozenset(f"aten.{name}" for name in names.split())


_ATEN = aten(
    """
    linear.default conv2d.default matmul.default bmm.default softmax.int log_softmax.int sym_size.int
    layer_norm.default batch_norm.default group_norm.default instance_norm.default rms_norm.default
    hardtanh.default leaky_relu.default erf.default softplus.default prelu.default glu.default log_sigmoid.default
    square.default sign.default floor.default ceil.default round.default exp.default log.default sqrt.default
    rsqrt.default cos.default sin.default abs.default neg.default reciprocal.default
    add.Tensor sub.Tensor mul.Tensor div.Tensor div.Tensor_mode pow.Tensor_Scalar pow.Scalar
    add.Scalar sub.Scalar mul.Scalar div.Scalar rsub.Scalar
    maximum.default minimum.default clamp.default clamp.Tensor clamp_min.default clamp_max.default
    mean.dim mean.default sum.dim_IntList sum.default amax.default amin.default argmax.default max.dim min.dim
    var.correction std.correction linalg_vector_norm.default cumsum.default
    reshape.default reshape_as.default permute.default transpose.int t.default flatten.using_ints unflatten.int
    expand.default expand_as.default unsqueeze.default squeeze.dim squeeze.dims squeeze.default movedim.int
    unbind.int split.Tensor split_with_sizes.default chunk.default select.int slice.Tensor narrow.int
    select_scatter.default slice_scatter.default im2col.default col2im.default tril.default triu.default
    cat.default stack.default meshgrid.indexing repeat.default repeat_interleave.self_int roll.default flip.default
    pad.default constant_pad_nd.default masked_fill.Scalar where.self where.ScalarOther where.ScalarSelf
    logical_not.default logical_and.default logical_or.default bitwise_not.default bitwise_and.Tensor bitwise_or.Tensor
    eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar
    ge.Scalar index.Tensor index_select.default embedding.default gather.default
    index_put.default scatter.src scatter.value scatter_add.default topk.default sort.default
    zeros.default ones.default full.default arange.default arange.start arange.start_step
    zeros_like.default ones_like.default full_like.default to.dtype
    max_pool2d.default avg_pool1d.default avg_pool2d.default adaptive_avg_pool1d.default adaptive_avg_pool2d.default
    upsample_bicubic2d.vec upsample_bilinear2d.vec upsample_nearest2d.vec pixel_shuffle.default pixel_unshuffle.default
    _upsample_bicubic2d_aa.vec _upsample_bilinear2d_aa.vec grid_sampler.default
    """
)


def _on_sizes(function: Callable[..., int]) -> Callable[..., int]:
    """Restrict a function of sizes to 64-bit integers, because Python's operators take larger ones and other types."""

    def check(*sizes: int) -> int:
        if not all(type(size) is int and abs(size) < 2**63 for size in sizes):
            raise TypeError("sizes must be 64-bit integers")
        return int(function(*sizes))

    return check


def _item(values: Sequence[Any], index: int) -> Any:
    """Return one of several tensors that an operation returned, by its index."""
    if not isinstance(values, (tuple, list)) or type(index) is not int:
        raise TypeError("getitem takes several values and an integer index")
    return values[index]


_OPERATORS = ("add", "sub", "mul", "floordiv", "mod", "neg", "eq", "ne", "lt", "le")
_PYTHON: dict[str, Callable[..., Any]] = {
    **{f"sym.{name}": _on_sizes(getattr(operator, name)) for name in _OPERATORS},
    "sym.min": _on_sizes(min),
    "sym.max": _on_sizes(max),
    "sym.and": _on_sizes(lambda first, second: bool(first and second)),
    "sym.or": _on_sizes(lambda first, second: bool(first or second)),
    "getitem": _item,
}

# Multiplications that always run in float; they are not sites.
FLOAT_PRODUCTS = aten(
    "conv1d.default conv1d.padding conv3d.default conv3d.padding "
    "conv_transpose1d.default conv_transpose2d.input conv_transpose3d.input"
)

OPERATIONS: frozenset[str] = _ATEN | set(BY_OPERATION) | FLOAT_PRODUCTS | set(_PYTHON) | {FAKE_QUANTIZE}

# Multiplications of two tensors that can be quantized. The first two have a weight and a bias.
PRODUCTS = ("aten.linear.default", "aten.conv2d.default", "aten.matmul.default", "aten.bmm.default")

# Operations that make a tensor from numbers alone, so they need the device as an argument.
FACTORIES = aten("zeros.default ones.default full.default arange.default arange.start arange.start_step")

# Keyword arguments for a value's device and memory layout, which capture drops: a program runs on its inputs' device.
PLACEMENT = ("device", "layout", "pin_memory", "memory_format", "non_blocking", "copy")

# Operations that move values without changing them; `find_source` walks through them.
MOVES = {"getitem"} | aten(
    "reshape.default permute.default transpose.int t.default flatten.using_ints unflatten.int expand.default "
    "unsqueeze.default squeeze.dim squeeze.dims squeeze.default movedim.int unbind.int split.Tensor "
    "split_with_sizes.default chunk.default select.int slice.Tensor narrow.int roll.default flip.default repeat.default"
)

# Operations that pad a value, or crop it (with negative widths).
PADS = aten("pad.default constant_pad_nd.default")

# Operations that read only a tensor's shape.
SHAPE_READERS = aten("sym_size.int zeros_like.default ones_like.default full_like.default")


def resolve(op: str) -> Callable[..., Any]:
    """Return the function of an operation on the whitelist. Raises KeyError for any other name."""
    if op not in OPERATIONS or op == FAKE_QUANTIZE:
        raise KeyError(op)
    if op in _PYTHON:
        return _PYTHON[op]
    name, overload = op.removeprefix("aten.").split(".")
    return getattr(getattr(torch.ops.aten, name), overload)
