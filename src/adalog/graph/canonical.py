"""Rewrite a program to canonical form: the same values, computed in the one way that the rest of the package expects.

`capture` applies `UNFOLDED` to single operations as it reads them. `canonical` applies `REWRITES` to the whole program,
in this order:

    join_softmax          exp(x - max x) / sum(...)          -> softmax(x)
    softmax_left          V^T A^T                            -> (A V)^T
    share_equal_values    the same operation, twice          -> once
    choose_by_masks       x[mask] = y[mask]                  -> where(mask, y, x)
    store_parameters      a parameter computed from tensors  -> a stored tensor;   x W -> linear(x, W^T)
    multiply_as_real      view_as_real(view_as_complex(x) c), as in rotary positions -> products of real values
    store_constants       a resize, a cast from float64, or an operation outside the whitelist, of what no input reaches
                                                             -> a stored tensor
    join_activations      x (1 + erf(x / sqrt 2)) / 2        -> gelu(x), and the same for others
    fold_batch_norms      batch_norm(conv(x))                -> conv(x), with other weights

Last, `join_norms`, which needs the shapes of values, rewrites w x / sqrt(mean x^2 + eps) to rms_norm(x), and the same
for layer_norm.
"""

import math
import string
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor

from adalog.graph.activations import BY_OPERATION
from adalog.graph.operations import OPERATIONS, PRODUCTS, aten, resolve
from adalog.graph.program import Arg, Node, Program, Ref, map_refs
from adalog.graph.sites import find_source
from adalog.graph.tracing import trace

# Arguments that are parameters: (operation, position) -> "weight" or "bias".
PARAMETERS = {
    **{(f"aten.{op}.default", 1): "weight" for op in ("linear", "conv2d", "matmul", "batch_norm")},
    **{(f"aten.{op}.default", 2): "bias" for op in ("linear", "conv2d", "batch_norm")},
    ("aten.layer_norm.default", 2): "weight",
    ("aten.layer_norm.default", 3): "bias",
    ("aten.rms_norm.default", 2): "weight",
}


# --- single operations -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OpCall:
    """One operation `op` of the exported graph, with everything that a rewrite needs to replace it.

    metas, meta_kwargs: the arguments as tensors without data; their sizes may be symbolic. emit(op, *args, part=""):
    adds a node, named after this operation and the part, and returns a reference to it.
    """

    op: str
    args: tuple[Arg, ...]
    kwargs: Mapping[str, Arg]
    metas: tuple[Any, ...]
    meta_kwargs: Mapping[str, Any]
    emit: Callable[..., Ref]

    def size(self, value: Arg, meta: Tensor, dim: int) -> Arg:
        """Return the size of a dimension: a number, or a reference if it is not known."""
        size = meta.shape[dim]
        return size if isinstance(size, int) else self.emit("aten.sym_size.int", value, dim, part="_size")

    @property
    def dims(self) -> tuple[int, ...]:
        """All dimensions of the first argument."""
        return tuple(range(self.metas[0].ndim))

    def arguments(self) -> dict[str, Any]:
        """Return all arguments by their names in PyTorch, with the defaults of those that are left out."""
        parameters = _operation(self.op)._schema.arguments
        defaults = {parameter.name: parameter.default_value for parameter in parameters}
        return defaults | dict(zip(defaults, self.args, strict=False)) | dict(self.kwargs)


def unfold_attention(call: OpCall) -> Ref:
    """Unfold softmax(Q K^T scale + mask) V into separate operations, so that its two products become sites."""
    values = call.arguments()
    query, key = call.metas[:2]
    shared = query.shape[-3] // key.shape[-3] if values["enable_gqa"] else 1
    if shared > 1:  # heads that share keys and values
        for name in ("key", "value"):
            values[name] = call.emit("aten.repeat_interleave.self_int", values[name], shared, -3, part=f"_{name}s")
    scale = 1 / math.sqrt(query.shape[-1]) if values["scale"] is None else values["scale"]
    transposed = call.emit("aten.transpose.int", values["key"], -2, -1, part="_kt")
    scores = call.emit("aten.matmul.default", values["query"], transposed, part="_qk")
    scores = call.emit("aten.mul.Tensor", scores, scale, part="_scaled")
    if (mask := values["attn_mask"]) is not None:
        meta = call.metas[3] if len(call.metas) > 3 else call.meta_kwargs["attn_mask"]
        if meta.dtype == torch.bool:
            hidden = call.emit("aten.logical_not.default", mask, part="_hidden")
            scores = call.emit("aten.masked_fill.Scalar", scores, hidden, -math.inf, part="_masked")
        else:
            scores = call.emit("aten.add.Tensor", scores, mask, part="_masked")
    if values["is_causal"]:  # a token does not read later ones
        rows = call.emit("aten.arange.default", call.size(values["query"], query, -2), part="_rows")
        columns = call.emit("aten.arange.default", call.size(values["key"], key, -2), part="_columns")
        later = call.emit("aten.gt.Tensor", columns, call.emit("aten.unsqueeze.default", rows, -1), part="_later")
        scores = call.emit("aten.masked_fill.Scalar", scores, later, -math.inf, part="_causal")
    weights = call.emit("aten.softmax.int", scores, -1, part="_softmax")
    return call.emit("aten.matmul.default", weights, values["value"], part="_av")


def unfold_einsum(call: OpCall) -> Ref | None:
    """Write an einsum as sums over single operands, and one matrix product for each further operand.

    A letter of two operands is summed, or is a leading dimension of matmul if the rest of the equation has it. A letter
    of one operand is a row or column dimension. An ellipsis stands for letters. Capture refuses a model whose equation
    repeats a letter within an operand.
    """
    equation, operands = call.args[:2]
    equation, metas = equation.replace(" ", ""), call.metas[1]
    inputs, arrow, output = equation.partition("->")
    words = inputs.split(",")
    free = [letter for letter in string.ascii_letters if letter not in equation]
    covered = [meta.ndim - len(word.replace("...", "")) for word, meta in zip(words, metas, strict=True)]
    rest = "".join(free[: max(n if "..." in word else 0 for word, n in zip(words, covered, strict=True))])
    words = [word.replace("...", rest[len(rest) - n :]) for word, n in zip(words, covered, strict=True)]
    if not arrow:
        letters = "".join(words)
        output = "..." + "".join(sorted(letter for letter in {*letters} - {*rest} if letters.count(letter) == 1))
    output = output.replace("...", rest)
    if any(len(set(word)) != len(word) for word in words):
        return None
    sizes: dict[str, Arg] = {}
    for value, word, meta in zip(operands, words, metas, strict=True):
        for axis, letter in enumerate(word):
            if letter not in sizes or not _is_one(meta.shape[axis]):
                sizes[letter] = call.size(value, meta, axis)
    values = list(operands)
    for index, meta in enumerate(metas):  # an operand of size one is broadcast
        dims = [axis for axis, letter in enumerate(words[index]) if _is_one(meta.shape[axis]) and sizes[letter] != 1]
        values[index], words[index] = _without(call, "aten.squeeze.dims", values[index], words[index], dims)
    for index, word in enumerate(words):
        others = {*output}.union(*words[:index], *words[index + 1 :])
        dims = [axis for axis, letter in enumerate(word) if letter not in others]
        values[index], words[index] = _without(call, "aten.sum.dim_IntList", values[index], word, dims)
    word, value = words[0], values[0]
    for index in range(1, len(words)):
        needed = {*output}.union(*words[index + 1 :])
        word, value = _contract(call, (value, values[index]), (word, words[index]), needed, sizes)
    return call.emit("aten.permute.default", value, tuple(word.index(letter) for letter in output))


def _without(call: OpCall, op: str, value: Ref, word: str, dims: Sequence[int]) -> tuple[Ref, str]:
    """Remove these dimensions of a value, which `word` names, with an operation."""
    if not dims:
        return value, word
    kept = "".join(letter for axis, letter in enumerate(word) if axis not in dims)
    return call.emit(op, value, tuple(dims), part="_reduced"), kept


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


def _contract(
    call: OpCall, values: tuple[Ref, Ref], words: tuple[str, str], needed: Collection[str], sizes: Mapping[str, Arg]
) -> tuple[str, Ref]:
    """Multiply two operands of an einsum as matrices. Return the letters of the result and the result."""
    left, right = words
    lead = [dim for dim in left if dim in right and dim in needed]
    summed = [dim for dim in left if dim in right and dim not in needed]
    rows, columns = ([dim for dim in word if dim not in other] for word, other in (words, words[::-1]))
    first = _arrange(call, values[0], left, (lead, rows, summed), sizes, "_left")
    second = _arrange(call, values[1], right, (lead, summed, columns), sizes, "_right")
    result = call.emit("aten.matmul.default", first, second, part="_product")
    dims = [*lead, *rows, *columns]
    return "".join(dims), call.emit("aten.reshape.default", result, tuple(sizes[dim] for dim in dims), part="_split")


def _arrange(
    call: OpCall, value: Ref, word: str, groups: tuple[list[str], ...], sizes: Mapping[str, Arg], part: str
) -> Ref:
    """Permute and flatten a value, whose dimensions `word` names, to (*lead, second group, third group)."""
    lead, *grouped = groups
    order = tuple(word.index(letter) for letter in [*lead, *grouped[0], *grouped[1]])
    value = call.emit("aten.permute.default", value, order, part=part)
    if all(len(letters) == 1 for letters in grouped):
        return value
    shape: list[Arg] = [sizes[letter] for letter in lead]
    for letters in grouped:
        count: Arg = 1
        for letter in letters:
            size = sizes[letter]
            if isinstance(count, int) and isinstance(size, int):
                count *= size
            else:
                count = call.emit("sym.mul", count, size, part="_count")
        shape.append(count)
    return call.emit("aten.reshape.default", value, tuple(shape), part=f"{part}_matrix")


def unfold_vector_product(call: OpCall) -> Ref | None:
    """Write a product with a vector as a product with a matrix of one row or one column."""
    row, column = (meta.ndim == 1 for meta in call.metas)
    if not row and not column:
        return None
    left, right = call.args
    if row:
        left = call.emit("aten.unsqueeze.default", left, 0, part="_row")
    if column:
        right = call.emit("aten.unsqueeze.default", right, -1, part="_column")
    product = call.emit("aten.matmul.default", left, right, part="_product")
    dims = (-2,) * row + (-1,) * column
    return call.emit("aten.squeeze.dims", product, dims)


def _unfold_added(op: str) -> Callable[[OpCall], Ref]:
    """Return a rewrite of beta * term + alpha * op(left, right) as separate operations; alpha may be called value."""

    def unfold(call: OpCall) -> Ref:
        values = call.arguments()
        term, left, right = list(values.values())[:3]
        alpha, beta = values.get("alpha", values.get("value")), values.get("beta", 1)
        product = call.emit(op, left, right, part="_product")
        if alpha != 1:
            product = call.emit("aten.mul.Tensor", product, alpha, part="_scaled")
        if beta != 1:
            term = call.emit("aten.mul.Tensor", term, beta, part="_weighed")
        return call.emit("aten.add.Tensor", term, product)

    return unfold


def unfold_convolution(call: OpCall) -> Ref | None:
    """Write a convolution over one dimension, or with padding "same" or "valid", as one over two, padded by numbers."""
    image, weight, bias, stride, padding, dilation, groups = call.arguments().values()
    kernel = call.metas[1].shape[2:]
    one_dimension = len(kernel) == 1
    if one_dimension:  # maps and kernels of height 1
        if call.metas[0].ndim != 3:
            return None
        image, weight = (call.emit("aten.unsqueeze.default", value, -2, part="_map") for value in (image, weight))
        kernel, stride, dilation = (1, *kernel), (1, *stride), (1, *dilation)
    if isinstance(padding, str):
        totals = [step * (size - 1) * (padding == "same") for step, size in zip(dilation, kernel, strict=True)]
        sides = tuple(total // 2 for total in totals)
        if any(total % 2 for total in totals):  # the extra row goes to the bottom, the extra column to the right
            (top, left), (height, width) = sides, totals
            zeros = (left, width - left, top, height - top)
            image = call.emit("aten.constant_pad_nd.default", image, zeros, part="_pad")
            sides = (0, 0)
    else:
        sides = (0, *padding)
    result = call.emit("aten.conv2d.default", image, weight, bias, tuple(stride), sides, tuple(dilation), groups)
    return call.emit("aten.squeeze.dim", result, -2, part="_row") if one_dimension else result


def unfold_adaptive_max_pool(call: OpCall) -> tuple[Ref, Ref] | None:
    """Write an adaptive maximum pooling with windows of equal sizes as maxima. The indices stay as they are."""
    value, counts = call.args
    dims = range(-len(counts), 0)
    if whole := tuple(dim for dim, count in zip(dims, counts, strict=True) if count == 1):
        value = call.emit("aten.amax.default", value, whole, True, part="_most")
    for dim, count in zip(dims, counts, strict=True):
        size = call.metas[0].shape[dim]
        if dim in whole:
            continue
        if not isinstance(size, int) or not isinstance(count, int) or count < 1 or size % count:
            return None
        windows = call.emit("aten.unflatten.int", value, dim, (count, -1), part="_windows")
        value = call.emit("aten.amax.default", windows, (dim,), part="_most")
    return value, call.emit("getitem", call.emit(call.op, *call.args), 1, part="_indices")


def unfold_mask_index(call: OpCall) -> Ref | None:
    """Write an index by masks as an index by the positions at which they are true."""
    value, indices = call.args
    plain: list[Arg] = []
    for index, meta in zip(indices, call.metas[1], strict=True):
        if meta is None or meta.dtype != torch.bool:
            plain.append(index)
            continue
        places = call.emit("aten.nonzero_numpy.default", index, part="_places")
        plain += [call.emit("getitem", places, axis, part="_place") for axis in range(meta.ndim)]
    return call.emit("aten.index.Tensor", value, tuple(plain)) if plain != list(indices) else None


def unfold_mask_write(call: OpCall) -> Ref | None:
    """Write x[mask] = value as where(mask, value, x) or, if value has an entry per true one, as `masked_scatter`."""
    x, indices, value = call.args[:3]
    target, metas, source = call.metas[:3]
    lead = next((axis for axis, meta in enumerate(metas) if meta is not None), 0)
    mask, accumulate = metas[lead], (*call.args, False)[3] or call.kwargs.get("accumulate")
    if accumulate or mask.dtype != torch.bool or any(meta is not None for meta in metas[lead + 1 :]):
        return None
    after = target.ndim - lead - mask.ndim  # the dimensions of x behind those of the mask
    several = source.ndim > after and not _is_one(source.shape[0])
    if source.ndim > after + 1 or (several and (lead or isinstance(source.shape[0], int))):
        return None
    if several and tuple(map(str, source.shape[1:])) != tuple(map(str, target.shape[mask.ndim :])):
        return None
    if source.ndim > after and not several:
        value = call.emit("aten.squeeze.dim", value, 0, part="_value")
    hidden = indices[lead]
    for _ in range(after):
        hidden = call.emit("aten.unsqueeze.default", hidden, -1, part="_mask")
    if several:
        return call.emit("aten.masked_scatter.default", x, hidden, value)
    return call.emit("aten.where.self", hidden, value, x)


def unfold_windows(call: OpCall) -> Ref:
    """Write the windows of one dimension as a list of slices, one for each position in a window."""
    value, dim, size, step = call.args
    dim %= max(call.metas[0].ndim, 1)
    ends = (index + 1 - size or 2**63 - 1 for index in range(size))  # counted from the last entry
    parts = [
        call.emit("aten.slice.Tensor", value, dim, index, end, step, part="_part") for index, end in enumerate(ends)
    ]
    return call.emit("aten.stack.default", tuple(parts), -1)


def unfold_tensor_split(call: OpCall, dim: int = 0) -> Any:
    """Write `tensor_split` as a split with sizes. dim: the dimension, if the operation does not say it."""
    value, where = call.args[:2]
    dim = min(call.arguments().get("dim", dim), call.metas[0].ndim - 1)  # `hsplit` splits a vector's only dimension
    size = call.metas[0].shape[dim]
    places = where if type(where) is tuple else (where,)
    if not isinstance(size, int) or not all(isinstance(place, int) for place in places):
        return None
    if isinstance(where, int):
        sizes = [size // where + (index < size % where) for index in range(where)]
    else:
        ends = [min(max(place + size * (place < 0), 0), size) for place in where]
        sizes = [max(end - start, 0) for start, end in zip((0, *ends), (*ends, size), strict=True)]
        if sum(sizes) != size:  # the positions do not ascend
            return None
    parts = call.emit("aten.split_with_sizes.default", value, tuple(sizes), dim)
    return tuple(call.emit("getitem", parts, index, part="_part") for index in range(len(sizes)))


def unfold_one_hot(call: OpCall) -> Ref | None:
    """Write `one_hot` with a number of classes as a comparison with all of them."""
    value, classes = call.args[0], call.arguments()["num_classes"]
    if not isinstance(classes, int) or classes < 0:
        return None
    numbers = call.emit("aten.arange.default", classes, part="_classes")
    column = call.emit("aten.unsqueeze.default", value, -1, part="_column")
    return call.emit("aten.to.dtype", call.emit("aten.eq.Tensor", column, numbers, part="_equal"), torch.int64)


def unfold_any_or_all(call: OpCall) -> Ref:
    """Write `any` and `all` as a comparison of the number of values that decide, those unlike or like zero, with 0."""
    values, is_any = call.arguments(), call.op.startswith("aten.any.")
    dims = values.get("dim")
    dims = (dims,) if isinstance(dims, int) else dims or call.dims
    deciding = call.emit("aten.ne.Scalar" if is_any else "aten.eq.Scalar", values["self"], 0, part="_deciding")
    count = call.emit("aten.sum.dim_IntList", deciding, dims, bool(values.get("keepdim")), part="_count")
    return call.emit("aten.gt.Scalar" if is_any else "aten.eq.Scalar", count, 0)


def unfold_bucketize(call: OpCall) -> Ref | None:
    """Write `bucketize` as the number of boundaries that are at most a value, or less than it."""
    values = call.arguments()
    if values["out_int32"]:
        return None
    column = call.emit("aten.unsqueeze.default", values["self"], -1, part="_column")
    compare = "aten.ge.Tensor" if values["right"] else "aten.gt.Tensor"
    above = call.emit(compare, column, values["boundaries"], part="_above")
    return call.emit("aten.sum.dim_IntList", above, (-1,))


def unfold_nan_to_num(call: OpCall) -> Ref | None:
    """Write `nan_to_num` as three masks."""
    values = call.arguments()
    value, dtype = values["self"], call.metas[0].dtype
    if not dtype.is_floating_point:
        return None
    most = torch.finfo(dtype).max
    for name, limit, other in (("posinf", math.inf, most), ("neginf", -math.inf, -most)):
        mask = call.emit("aten.eq.Scalar", value, limit, part=f"_is_{name}")
        number = other if values[name] is None else values[name]
        value = call.emit("aten.masked_fill.Scalar", value, mask, number, part=f"_{name}")
    mask = call.emit("aten.ne.Tensor", value, value, part="_is_nan")
    return call.emit("aten.masked_fill.Scalar", value, mask, values["nan"] or 0.0)


def unfold_cosine(call: OpCall) -> Ref:
    """Write a cosine similarity as a sum of products of normalised values."""
    values, shares = call.arguments(), []
    dim = values["dim"]
    dim -= max(meta.ndim for meta in call.metas[:2]) if dim >= 0 else 0  # the operands may have unequally many
    for name in ("x1", "x2"):
        length = call.emit("aten.linalg_vector_norm.default", values[name], 2, (dim,), True, part="_length")
        length = call.emit("aten.clamp_min.default", length, values["eps"], part="_length")
        shares.append(call.emit("aten.div.Tensor", values[name], length, part="_share"))
    product = call.emit("aten.mul.Tensor", *shares, part="_product")
    return call.emit("aten.sum.dim_IntList", product, (dim,))


def unfold_logsumexp(call: OpCall) -> Ref:
    """Write log(sum(exp(x))) with the largest value subtracted before and added after, unless it is infinite."""
    values = call.arguments()
    value, dims, keep = values["self"], values["dim"] or call.dims, values["keepdim"]
    most = call.emit("aten.amax.default", value, dims, True, part="_most")
    infinite = call.emit("aten.eq.Scalar", call.emit("aten.abs.default", most, part="_abs"), math.inf, part="_infinite")
    most = call.emit("aten.masked_fill.Scalar", most, infinite, 0.0, part="_shift")
    powers = call.emit("aten.exp.default", call.emit("aten.sub.Tensor", value, most, part="_less"), part="_exp")
    total = call.emit("aten.sum.dim_IntList", powers, dims, True, part="_sum")
    total = call.emit("aten.log.default", total, part="_log")
    result = call.emit("aten.add.Tensor", total, most, part="" if keep else "_kept")
    return result if keep else call.emit("aten.squeeze.dims", result, dims)


def unfold_scatter(call: OpCall) -> Ref | None:
    """Cut the values of a scatter to the shape of the index, because ONNX does not take more of them."""
    value, dim, index, source = call.args
    places, values = call.metas[2:]
    dims = [axis for axis in range(places.ndim) if str(places.shape[axis]) != str(values.shape[axis])]
    for axis in dims:
        end = call.size(index, places, axis)
        source = call.emit("aten.slice.Tensor", source, axis, 0, end, part="_cut")
    return call.emit(call.op, value, dim, index, source) if dims else None


def _respell(op: str, *last: Arg, **named: Arg) -> Callable[[OpCall], Ref]:
    """Return a rewrite that emits the operation as `op`, with further arguments after its own."""
    return lambda call: call.emit(op, *call.args, *last, **call.kwargs, **named)


def _with_correction(op: str) -> Callable[[OpCall], Ref]:
    """Return a rewrite of a variance or standard deviation that turns `unbiased` into a correction of 1 or 0."""

    def respell(call: OpCall) -> Ref:
        values = call.arguments()
        correction = int(values["unbiased"])
        return call.emit(op, values["self"], values["dim"], correction=correction, keepdim=values["keepdim"])

    return respell


_COMPARISONS = {"greater": "gt", "less": "lt", "greater_equal": "ge", "less_equal": "le", "not_equal": "ne"}
# Operations with several names in PyTorch.
_ALIASES = {
    "concat.default": "cat.default",
    "concatenate.default": "cat.default",
    "multiply.Tensor": "mul.Tensor",
    "subtract.Tensor": "sub.Tensor",
    "divide.Tensor": "div.Tensor",
    "true_divide.Tensor": "div.Tensor",
    "negative.default": "neg.default",
    "absolute.default": "abs.default",
    "moveaxis.int": "movedim.int",
    "special_expit.default": "sigmoid.default",
    "swapaxes.default": "transpose.int",
    "swapdims.default": "transpose.int",
    "clip.default": "clamp.default",
    "clip.Tensor": "clamp.Tensor",
    "__and__.Tensor": "bitwise_and.Tensor",
    "__or__.Tensor": "bitwise_or.Tensor",
    "max.other": "maximum.default",
    "min.other": "minimum.default",
    **{f"{long}.{kind}": f"{short}.{kind}" for kind in ("Tensor", "Scalar") for long, short in _COMPARISONS.items()},
}
# Each function returns the replacement of an operation (a tuple of references for an operation with several results),
# or None to keep the operation as it is.
UNFOLDED: Mapping[str, Callable[[OpCall], Any]] = {
    **{f"aten.{name}": _respell(f"aten.{other}") for name, other in _ALIASES.items()},
    # Values are real.
    **dict.fromkeys(aten("mT.default mH.default adjoint.default"), _respell("aten.transpose.int", -2, -1)),
    "aten.numpy_T.default": lambda call: call.emit("aten.permute.default", call.args[0], call.dims[::-1]),
    **dict.fromkeys(
        aten("floor_divide.default floor_divide.Tensor floor_divide.Scalar"),
        _respell("aten.div.Tensor_mode", rounding_mode="floor"),
    ),
    "aten.var.dim": _with_correction("aten.var.correction"),
    "aten.std.dim": _with_correction("aten.std.correction"),
    "aten.scaled_dot_product_attention.default": unfold_attention,
    "aten.einsum.default": unfold_einsum,
    "aten.matmul.default": unfold_vector_product,
    "aten.mv.default": unfold_vector_product,
    **dict.fromkeys(aten("baddbmm.default addmm.default"), _unfold_added("aten.matmul.default")),
    "aten.addcmul.default": _unfold_added("aten.mul.Tensor"),
    "aten.addcdiv.default": _unfold_added("aten.div.Tensor"),
    **dict.fromkeys(aten("conv1d.default conv1d.padding conv2d.padding"), unfold_convolution),
    **dict.fromkeys(aten("adaptive_max_pool1d.default adaptive_max_pool2d.default"), unfold_adaptive_max_pool),
    "aten.index.Tensor": unfold_mask_index,
    "aten.index_put.default": unfold_mask_write,
    "aten.masked_fill.Tensor": lambda call: call.emit("aten.where.self", *call.args[1:], call.args[0]),
    "aten.unfold.default": unfold_windows,
    **dict.fromkeys(aten("tensor_split.sections tensor_split.indices"), unfold_tensor_split),
    **dict.fromkeys(aten("hsplit.int hsplit.array"), partial(unfold_tensor_split, dim=1)),
    **dict.fromkeys(aten("dsplit.int dsplit.array"), partial(unfold_tensor_split, dim=2)),
    **dict.fromkeys(aten("scatter.src scatter_add.default"), unfold_scatter),
    "aten.one_hot.default": unfold_one_hot,
    **dict.fromkeys(aten("any.default any.dim any.dims all.default all.dim all.dims"), unfold_any_or_all),
    "aten.bucketize.Tensor": unfold_bucketize,
    "aten.nan_to_num.default": unfold_nan_to_num,
    "aten.cosine_similarity.default": unfold_cosine,
    "aten.logsumexp.default": unfold_logsumexp,
    "aten.max.default": lambda call: call.emit("aten.amax.default", call.args[0], call.dims),
    "aten.min.default": lambda call: call.emit("aten.amin.default", call.args[0], call.dims),
}


# --- whole programs --------------------------------------------------------------------------------------------------


def _find_maker(program: Program, value: Any, *ops: str) -> Node | None:
    """Return the node that computes a value, if one of these operations does."""
    node = program.makers.get(value.name) if isinstance(value, Ref) else None
    return node if node is not None and node.op in ops else None


def join_softmax(program: Program) -> Program:
    """Rewrite a softmax that several operations compute to one operation."""
    find_maker = partial(_find_maker, program)

    def is_largest(value: Any, x: Any, dim: int) -> bool:
        part = find_maker(value, "getitem")  # max.dim returns values and indices
        largest = find_maker(value if part is None else part.args[0], "aten.amax.default", "aten.max.dim")
        if largest is None or largest.kwargs:
            return False
        of, dims, *keeps = largest.args
        return of == x and dims in (dim, [dim], (dim,)) and keeps == [True]

    def join(node: Node) -> Node:
        if node.op != "aten.div.Tensor":
            return node
        powers = find_maker(node.args[0], "aten.exp.default")
        total = find_maker(node.args[1], "aten.sum.dim_IntList")
        if powers is None or total is None or len(total.args) != 3 or len(total.args[1] or ()) != 1:
            return node
        value, (dim,), keeps = total.args
        if value != node.args[0] or not keeps or total.kwargs:
            return node
        x = powers.args[0]
        shifted = find_maker(x, "aten.sub.Tensor")
        if shifted is not None and is_largest(shifted.args[1], shifted.args[0], dim):
            x = shifted.args[0]
        return replace(node, op="aten.softmax.int", args=(x, dim))

    return replace(program, nodes=tuple(map(join, program.nodes))).prune()


def softmax_left(program: Program) -> Program:
    """Rewrite V^T A^T as (A V)^T, so that a softmax is always the left operand of its product."""
    nodes: list[Node] = []

    def transpose(value: Ref, name: str, scope: str) -> Ref:
        maker = program.makers.get(value.name)
        if maker is not None and maker.op == "aten.transpose.int" and set(maker.args[1:]) == {-2, -1}:
            return maker.args[0]
        nodes.append(Node(name, "aten.transpose.int", (value, -2, -1), scope=scope))
        return Ref(name)

    for node in program.nodes:
        sources = [find_source(program, ref.name).kind for ref in node.args] if node.op in PRODUCTS[2:] else []
        if sources[1:] == ["softmax"] and sources[0] not in ("softmax", "weight"):
            left = transpose(node.args[1], f"{node.name}#left", node.scope)
            right = transpose(node.args[0], f"{node.name}#right", node.scope)
            nodes.append(replace(node, name=f"{node.name}#product", args=(left, right)))
            transpose(Ref(nodes[-1].name), node.name, node.scope)
        else:
            nodes.append(node)
    return replace(program, nodes=tuple(nodes))


def share_equal_values(program: Program) -> Program:
    """Merge equal operations on equal values, so that one activation is one value however often it is viewed."""
    first_names: dict[Any, str] = {}
    names: dict[str, str] = {}
    nodes = []
    for node in program.nodes:
        renamed = node.rename(names)
        key = repr((renamed.op, renamed.args, sorted(renamed.kwargs.items())))
        if key in first_names:
            names[node.name] = first_names[key]
        else:
            first_names[key] = node.name
            nodes.append(renamed)
    output = map_refs(program.output, lambda ref: Ref(names.get(ref.name, ref.name)))
    return replace(program, nodes=tuple(nodes), output=output)


def choose_by_masks(program: Program) -> Program:
    """Rewrite x[mask] = y[mask] to where(mask, y, x), whose size does not depend on the values of the mask."""

    def args_of(op: str, value: Any) -> tuple[Arg, ...]:
        node = _find_maker(program, value, op)
        return () if node is None else node.args

    def choose(node: Node) -> Node:
        if node.op != "aten.masked_scatter.default":
            return node
        x, hidden, value = node.args
        mask = hidden
        while unsqueezed := args_of("aten.unsqueeze.default", mask):
            mask = unsqueezed[0]
        y, places = args_of("aten.index.Tensor", value) or (None, ())
        parts = [args_of("getitem", place) for place in places]
        sources = [args_of("aten.nonzero_numpy.default", part[0]) for part in parts if part]
        in_order = [part[1] for part in parts if part] == [*range(len(places))]
        if places and in_order and all(arguments and arguments[0] in (mask, hidden) for arguments in sources):
            return replace(node, op="aten.where.self", args=(hidden, y, x))
        return node

    return replace(program, nodes=tuple(map(choose, program.nodes))).prune()


def store_parameters(program: Program) -> Program:
    """Compute the weights, biases and products that depend on stored tensors alone, and store the results.

    A product x W with a stored matrix W becomes a linear with the transpose of W.
    """
    constant = _constants(program)
    read_as = {value: (node, part) for node in reversed(program.nodes) for value, part in _parameters(node)}
    stored: dict[str, str] = {}  # computed value -> name of the tensor that it becomes
    taken = {*program.inputs, *program.tensors, *program.makers}
    for node in program.nodes:
        for value in (*[node.name] * (node.op in PRODUCTS), *dict(_parameters(node))):
            if value in constant and value not in program.tensors and value not in stored:
                reader, part = read_as.get(value, (node, "stored"))
                own = _kernel_of_row(program, reader, value)
                stored[value] = own if own is not None else _name_in(taken, reader, part)
    computed = _compute(program, constant, stored)
    tensors, nodes = dict(program.tensors), []
    tensors.update((name, computed[value].contiguous()) for value, name in stored.items())
    for node in program.nodes:
        reading = node.rename(stored)
        if node.op == "aten.matmul.default" and node.args[0].name not in constant:
            right = reading.args[1].name
            if right in tensors and tensors[right].ndim == 2:
                tensors[f"{right}.transposed"] = tensors[right].t().contiguous()
                reading = replace(reading, op="aten.linear.default", args=(reading.args[0], Ref(f"{right}.transposed")))
        nodes.append(reading)
    output = map_refs(program.output, lambda ref: Ref(stored.get(ref.name, ref.name)))
    return replace(program, nodes=tuple(nodes), output=output, tensors=tensors).prune()


def _kernel_of_row(program: Program, reader: Node, value: str) -> str | None:
    """Return the name of the tensor that becomes a kernel of height 1, if a convolution reads nothing else of it."""
    maker = _find_maker(program, Ref(value), "aten.unsqueeze.default")
    if maker is None or reader.op != "aten.conv2d.default":
        return None
    name: str = maker.args[0].name
    return name if name in program.tensors and program.uses[name] == 1 else None


def _parameters(node: Node) -> list[tuple[str, str]]:
    """Return the names of the values that a node reads as parameters, each with its part: "weight" or "bias"."""
    places = ((arg, PARAMETERS.get((node.op, index))) for index, arg in enumerate(node.args))
    return [(arg.name, part) for arg, part in places if part is not None and arg is not None]


def multiply_as_real(program: Program) -> Program:
    """Rewrite view_as_real(a b), a rotation of pairs of real numbers, to real products.

    a and b are view_as_complex(x) or complex constants. Rotary positions (RoFormer, Su et al., 2021) are written so.
    """
    constant, nodes = _constants(program), list[Node]()

    def emit(node: Node, part: str, op: str, *args: Arg) -> Ref:
        nodes.append(Node(node.name + part, f"aten.{op}", args, scope=node.scope))
        return Ref(nodes[-1].name)

    def pairs_of(value: Any, node: Node, part: str) -> Ref | None:
        """Return the real and imaginary parts (..., 2) of a complex value, or None if a program cannot hold them."""
        if (maker := _find_maker(program, value, "aten.view_as_complex.default")) is not None:
            return cast(Ref, maker.args[0])
        if not isinstance(value, Ref) or value.name not in constant:
            return None
        is_complex = _compute(program, constant, [value.name])[value.name].is_complex()
        if not is_complex:
            return None
        return emit(node, part, "view_as_real.default", emit(node, f"{part}.resolved", "resolve_conj.default", value))

    for node in program.nodes:
        is_real_view = node.op == "aten.view_as_real.default" and node.name not in constant
        rotated = _find_maker(program, node.args[0], "aten.mul.Tensor") if is_real_view else None
        factors = [] if rotated is None else [pairs_of(arg, node, f"#{i}") for i, arg in enumerate(rotated.args)]
        if not factors or None in factors:
            nodes.append(node)
            continue
        (a, b), (c, d) = (
            [emit(node, f"#{i}.{part}", "select.int", pairs, -1, part) for part in range(2)]
            for i, pairs in enumerate(factors)
        )
        ac, bd, ad, bc = (
            emit(node, f"#{name}", "mul.Tensor", *pair)
            for name, pair in {"ac": (a, c), "bd": (b, d), "ad": (a, d), "bc": (b, c)}.items()
        )
        parts = emit(node, "#real", "sub.Tensor", ac, bd), emit(node, "#imaginary", "add.Tensor", ad, bc)
        emit(node, "", "stack.default", parts, -1)
    return replace(program, nodes=tuple(nodes)).prune()


def store_constants(program: Program) -> Program:
    """Compute what `store_constants` lists above from constants alone, and store the results.

    Executors and exporters run in float32, so a table that the model computes in float64 is stored after its cast.
    """
    constant = _constants(program)
    names = {
        node.name
        for node in program.nodes
        if node.name in constant and (node.op not in OPERATIONS or "upsample" in node.op)  # a resized position table
    }
    casts = {node.name: node for node in program.nodes if node.name in constant and node.op == "aten.to.dtype"}
    sources = _compute(program, constant, {name for node in casts.values() for name in node.refs()})
    names |= {name for name, node in casts.items() if any(sources[ref].dtype == torch.float64 for ref in node.refs())}
    more, computed = names, dict[str, Any]()
    while more:  # what reads results that a program cannot store, such as lists and complex tensors, is computed too
        computed = _compute(program, constant, names)
        unstored = {name for name, value in computed.items() if not _is_storable(value)}
        readers = (node for node in program.nodes if node.name in constant and not unstored.isdisjoint(node.refs()))
        more = {node.name for node in readers} - names
        names |= more
    taken = {*program.inputs, *program.tensors, *program.makers}
    tensors, values = dict(program.tensors), dict[str, Any]()
    for node in program.nodes:
        value = computed.get(node.name)
        if isinstance(value, Tensor) and _is_storable(value):
            name = _name_in(taken, node, "stored")
            tensors[name], values[node.name] = value.contiguous(), Ref(name)
        elif _is_storable(value):
            values[node.name] = value

    def instead(ref: Ref) -> Any:
        return values.get(ref.name, ref)

    nodes = tuple(node.map_refs(instead) for node in program.nodes)
    return replace(program, nodes=nodes, output=map_refs(program.output, instead), tensors=tensors).prune()


def _constants(program: Program) -> set[str]:
    """Return the names of the values that depend on stored tensors and numbers alone, and not on chance."""
    constant = set(program.tensors)
    for node in program.nodes:
        if constant.issuperset(node.refs()) and (node.op in OPERATIONS or _is_repeatable(node.op)):
            constant.add(node.name)
    return constant


def _is_repeatable(op: str) -> bool:
    """Return True for an operation of PyTorch that always returns the same values for the same arguments."""
    try:
        return torch.Tag.nondeterministic_seeded not in _operation(op).tags
    except AttributeError:  # it is not an operation of PyTorch
        return False


def _operation(op: str) -> Any:
    """Return any operation of PyTorch by its name. Use it only for the model at hand, never for an artifact."""
    namespace, name, overload = (*op.split("."), "", "")[:3]
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def _compute(program: Program, constant: Collection[str], names: Collection[str]) -> dict[str, Any]:
    """Compute values that depend on stored tensors and numbers alone, by any operation of PyTorch."""
    making = tuple(node for node in program.nodes if node.name in constant)
    output = {name: Ref(name) for name in names}
    whole = replace(program, inputs=(), nodes=making, output=output).prune()
    device = next((value.device for value in program.tensors.values()), None)
    steps: dict[str, Callable[..., Any]] = {}
    for node in whole.nodes:
        if node.op not in OPERATIONS:
            function = _operation(node.op)
            placed = any(argument.name == "device" for argument in function._schema.arguments)
            steps[node.name] = partial(function, device=device) if placed else function
    computed: dict[str, Any] = whole.run((), steps=steps)
    return computed


def _is_storable(value: Any) -> bool:
    """Return True for a value that a program can hold: a tensor of real numbers or bits, or a number."""
    if isinstance(value, Tensor):
        return value.layout == torch.strided and not value.is_complex() and not value.is_quantized
    return isinstance(value, (bool, int, float))


def _name_in(taken: set[str], node: Node, part: str) -> str:
    """Return a name for a tensor that is stored for a node, and add it to the names that are taken."""
    name = f"{node.scope}.{part}".lstrip(".")
    name = f"{name}#{node.name}" if name in taken else name
    taken.add(name)
    return name


# What may compute an activation or a norm, and how many such operations do at the most. Clamps are left out, because
# they may act beyond the grid.
_POINTWISE = set(BY_OPERATION) | aten(
    "add.Tensor add.Scalar sub.Tensor sub.Scalar rsub.Scalar mul.Tensor mul.Scalar div.Tensor div.Scalar "
    "pow.Tensor_Scalar square.default sqrt.default neg.default reciprocal.default exp.default erf.default "
    "softplus.default"
)
_MEANS = aten("mean.dim var.correction")
_NORMALISING = _MEANS | aten(
    "add.Tensor add.Scalar sub.Tensor mul.Tensor div.Tensor pow.Tensor_Scalar square.default sqrt.default rsqrt.default"
)
_PARTS = 16
_JOINED: tuple[tuple[str, dict[str, Any]], ...] = (
    *((op, {}) for op, row in BY_OPERATION.items() if row.power_law),
    ("aten.gelu.default", {"approximate": "tanh"}),
)


def _find_parts(program: Program, node: Node, ops: Collection[str]) -> list[Node]:
    """Return the operations among `ops` that compute a value, itself first, or some of them if there are many."""
    parts = [node]
    for part in parts:
        makers = (program.makers.get(name) for name in part.refs())
        parts += [maker for maker in makers if maker and maker.op in ops and maker not in parts]
        if len(parts) > _PARTS:
            break
    return parts


def _evaluate(program: Program, parts: Sequence[Node], ndim: int, x: str, value: Tensor) -> Tensor | None:
    """Compute the first part in float64 from the value of x, or return None if it depends on other values.

    ndim: stored tensors of at most this many dimensions are read.
    """
    values: dict[str, Any] = {x: value}
    own = {part.name: part for part in parts}

    def compute(ref: Ref) -> Any:
        if ref.name not in values:
            stored = program.tensors.get(ref.name)
            if stored is not None and stored.ndim <= ndim and stored.is_floating_point():
                values[ref.name] = stored.cpu().double()
            else:
                part = own[ref.name].map_refs(compute)
                values[ref.name] = resolve(part.op)(*part.args, **part.kwargs)
        return values[ref.name]

    try:
        result: Tensor = compute(Ref(parts[0].name))
    except (IndexError, KeyError, TypeError, RuntimeError):
        return None
    return result if result.shape == value.shape else None


def join_activations(program: Program) -> Program:
    """Rewrite an activation that several operations compute to one operation.

    Their values on a grid decide, so it does not matter how the activation is written. The grid is dense near 0 and
    reaches -300 and 300, so that a part which acts only on large values is seen.
    """
    grid = torch.linspace(-6.4, 6.4, 257, dtype=torch.float64).sinh()
    wanted = [(op, kwargs, resolve(op)(grid, **kwargs)) for op, kwargs in _JOINED]

    def join(node: Node) -> Node:
        if node.op not in aten("mul.Tensor mul.Scalar div.Tensor div.Scalar"):
            return node
        parts = _find_parts(program, node, _POINTWISE)
        for x in dict.fromkeys(name for part in parts for name in part.refs()):
            computed = _evaluate(program, parts, 0, x, grid) if len(parts) > 1 else None
            for op, kwargs, values in wanted:
                if computed is not None and torch.allclose(computed, values, 0, 1e-6):
                    return replace(node, op=op, args=(Ref(x),), kwargs=kwargs)
        return node

    return replace(program, nodes=tuple(map(join, program.nodes))).prune()


def join_norms(program: Program, example: Sequence[Tensor]) -> Program:
    """Rewrite a LayerNorm or RMSNorm with a weight that several operations compute to one operation.

    Their values on random rows decide. Some rows are so small that the norm's epsilon counts. The rows have more
    dimensions than a model's values, so that only a dimension counted from the end can be the last one. A norm that
    broadcasts its input, or that has a weight of another dtype, stays. example: inputs to trace the program.
    """
    vectors = {name: value for name, value in program.tensors.items() if value.ndim == 1 and value.is_floating_point()}

    def takes(x: str, arguments: Sequence[Any]) -> bool:
        """Return True if x has a row for the weight, and the dtype of the weight and the bias."""
        value, own = trace(program, example).get(x), [vectors[arg.name] for arg in arguments if isinstance(arg, Ref)]
        return isinstance(value, Tensor) and all(
            value.dtype == one.dtype and value.ndim > 0 and value.shape[-1] == len(one) for one in own
        )

    def join(node: Node) -> Node:
        own = [name for name in node.refs() if name in vectors]
        if node.op not in aten("mul.Tensor add.Tensor") or len(own) != 1:
            return node
        parts, count = _find_parts(program, node, _NORMALISING), len(vectors[own[0]])
        read = list(dict.fromkeys(name for part in parts for name in part.refs()))
        epsilons = {arg for part in parts for arg in part.args if isinstance(arg, float) and arg > 0}
        norms: list[tuple[str, tuple[Any, ...]]] = []
        if node.op == "aten.mul.Tensor":  # a LayerNorm is also an RMSNorm of the deviations from the mean
            norms += [("aten.layer_norm.default", (Ref(own[0]), None, epsilon)) for epsilon in epsilons]
            norms += [("aten.rms_norm.default", (Ref(own[0]), epsilon)) for epsilon in epsilons]
        else:
            weights = [name for name in read if name != own[0] and name in vectors and len(vectors[name]) == count]
            pairs = product(weights, epsilons)
            norms += [("aten.layer_norm.default", (Ref(name), Ref(own[0]), epsilon)) for name, epsilon in pairs]
        if not norms or not any(part.op in _MEANS for part in parts):
            return node
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(2, 2, 2, 2, 5, count, generator=generator, dtype=torch.float64) + 0.5
        rows = rows * torch.logspace(-6, 2, 5, dtype=torch.float64)[:, None]
        computed = {x: values for x in read if (values := _evaluate(program, parts, 1, x, rows)) is not None}
        for op, args in norms if computed else ():
            parameters = [vectors[arg.name].cpu().double() if isinstance(arg, Ref) else arg for arg in args]
            wanted = resolve(op)(rows, (count,), *parameters)
            for x, values in computed.items():
                if torch.allclose(values, wanted, 1e-9, 1e-12) and takes(x, args):
                    return replace(node, op=op, args=(Ref(x), (count,), *args), kwargs={})
        return node

    return replace(program, nodes=tuple(map(join, program.nodes))).prune()


def fold_batch_norms(program: Program) -> Program:
    """Fold each batch norm into the convolution before it.

    y = (conv(x) - mean) g + b with g = weight / sqrt(variance + eps) is one convolution with other weights.
    """
    tensors, names, replaced = dict(program.tensors), dict[str, str](), dict[str, Node]()
    for norm in program.nodes:
        conv = program.makers.get(norm.args[0].name) if norm.op == "aten.batch_norm.default" else None
        if conv is None or conv.op != "aten.conv2d.default" or program.uses[conv.name] != 1:
            continue
        parameters, weight_name = norm.args[1:5], conv.args[1].name
        if None in parameters[2:]:  # the norm uses the batch's own statistics
            continue
        if not all(arg is None or arg.name in tensors for arg in parameters):  # a parameter is computed
            continue
        if weight_name not in tensors or program.uses[weight_name] != 1:
            continue
        gamma, beta = (None if arg is None else tensors[arg.name].double() for arg in parameters[:2])
        mean, variance = (tensors[arg.name].double() for arg in parameters[2:])
        gain = torch.rsqrt(variance + norm.args[7])
        if gamma is not None:
            gain = gain * gamma
        bias = -mean * gain if beta is None else beta - mean * gain
        if len(conv.args) > 2 and conv.args[2] is not None:
            bias = bias + tensors[conv.args[2].name].double() * gain
        weight = tensors[weight_name]
        tensors[weight_name] = (weight.double() * gain.view(-1, 1, 1, 1)).to(weight.dtype)
        bias_name = f"{weight_name.removesuffix('.weight')}.folded_bias"
        tensors[bias_name] = bias.to(weight.dtype)
        replaced[conv.name] = replace(conv, args=(*conv.args[:2], Ref(bias_name), *conv.args[3:]))
        names[norm.name] = conv.name
    nodes = tuple(replaced.get(node.name, node).rename(names) for node in program.nodes if node.name not in names)
    output = map_refs(program.output, lambda ref: Ref(names.get(ref.name, ref.name)))
    return replace(program, nodes=nodes, output=output, tensors=tensors).prune()


REWRITES: tuple[Callable[[Program], Program], ...] = (
    join_softmax,
    softmax_left,
    share_equal_values,
    choose_by_masks,
    store_parameters,
    multiply_as_real,
    store_constants,
    join_activations,
    fold_batch_norms,
)


def canonical(program: Program) -> Program:
    """Apply all `REWRITES` to a program, and remove the nodes and tensors that no output needs."""
    for rewrite in REWRITES:
        program = rewrite(program)
    return program.prune()
