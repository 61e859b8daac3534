"""Rewrite a program to canonical form: the same values, computed in the one way that the rest of the package expects.

`capture` applies `UNFOLDED` to single operations as it reads them. `canonical` applies `REWRITES` to the whole program,
in this order:

    softmax_left          V^T A^T                            -> (A V)^T
    share_equal_values    the same operation, twice          -> once
    store_parameters      a parameter computed from tensors  -> a stored tensor;   x W -> linear(x, W^T)
    fold_batch_norms      batch_norm(conv(x))                -> conv(x), with other weights
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from adalog.errors import CaptureError
from adalog.graph.operations import PRODUCTS
from adalog.graph.program import Arg, Node, Program, Ref, map_refs, refs_of
from adalog.graph.sites import find_source

# Arguments that are parameters: (operation, position) -> "weight" or "bias".
_PARAMETERS = {
    **{(f"aten.{op}.default", 1): "weight" for op in ("linear", "conv2d", "matmul", "batch_norm")},
    **{(f"aten.{op}.default", 2): "bias" for op in ("linear", "conv2d", "batch_norm")},
    ("aten.layer_norm.default", 2): "weight",
    ("aten.layer_norm.default", 3): "bias",
}


# --- single operations -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """One operation of the exported graph, with everything that a rewrite needs to replace it.

    metas, meta_kwargs: the arguments as tensors without data; their sizes may be symbolic. emit(op, *args, part=""):
    adds a node, named after this operation and the part, and returns a reference to it.
    """

    args: tuple[Arg, ...]
    kwargs: Mapping[str, Arg]
    metas: tuple[Any, ...]
    meta_kwargs: Mapping[str, Any]
    scope: str
    emit: Callable[..., Ref]


def unfold_attention(call: Call) -> Ref:
    """Unfold softmax(Q K^T scale + mask) V into separate operations, so that its two products become sites."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
    if given.get("is_causal") or given.get("enable_gqa"):
        where = call.scope or "the model"
        raise CaptureError(
            f"the attention in {where} is causal or grouped, which adalog does not support: capture a part of the "
            "model that does not contain it"
        )
    scale = given.get("scale")
    if scale is None:
        scale = 1 / math.sqrt(call.metas[0].shape[-1])
    transposed = call.emit("aten.transpose.int", given["key"], -2, -1, part="_kt")
    scores = call.emit("aten.matmul.default", given["query"], transposed, part="_qk")
    scores = call.emit("aten.mul.Tensor", scores, scale, part="_scaled")
    mask = given.get("attn_mask")
    if mask is not None:
        meta = call.metas[3] if len(call.metas) > 3 else call.meta_kwargs["attn_mask"]
        if meta.dtype == torch.bool:
            hidden = call.emit("aten.logical_not.default", mask, part="_hidden")
            scores = call.emit("aten.masked_fill.Scalar", scores, hidden, -math.inf, part="_masked")
        else:
            scores = call.emit("aten.add.Tensor", scores, mask, part="_masked")
    weights = call.emit("aten.softmax.int", scores, -1, part="_softmax")
    return call.emit("aten.matmul.default", weights, given["value"], part="_av")


def unfold_einsum(call: Call) -> Ref | None:
    """Write an einsum of two operands as permute, flatten, matmul, unflatten, permute.

    A letter of both operands is summed, or is a leading dimension of matmul if the output has it. A letter of one
    operand is a row or column dimension. If matmul cannot express the equation, capture refuses the model.
    """
    equation, operands = call.args[:2]
    if len(operands) != 2:
        return None
    inputs, arrow, wanted = equation.replace(" ", "").partition("->")
    left, right = inputs.split(",")
    if not arrow:
        wanted = "".join(sorted(letter for letter in {*left, *right} if (left + right).count(letter) == 1))
    alone = set(left) ^ set(right)
    plain = all(word.isalpha() and len(set(word)) == len(word) for word in (left, right, wanted) if word)
    if not plain or not alone <= set(wanted) or not set(wanted) <= {*left, *right}:
        return call.emit(f'aten.einsum.default("{equation}")')  # not on the whitelist, so that capture refuses it
    sizes: dict[str, Arg] = {}
    told: dict[str, Any] = {}
    for word, value, meta in zip((left, right), operands, call.metas[1], strict=True):
        for axis, (letter, size) in enumerate(zip(word, meta.shape, strict=True)):
            known = isinstance(size, int)
            once = [isinstance(each, int) and each == 1 for each in (size, told.setdefault(letter, size))]
            if once[0] != once[1]:  # one operand is broadcast
                return call.emit(f'aten.einsum.default("{equation}")')
            sizes[letter] = size if known else call.emit("aten.sym_size.int", value, axis, part="_size")
    lead = [letter for letter in left if letter in right and letter in wanted]
    summed = [letter for letter in left if letter in right and letter not in wanted]
    rows, columns = ([letter for letter in word if letter in alone] for word in (left, right))
    first = _arrange(call, operands[0], left, (lead, rows, summed), sizes, "_left")
    second = _arrange(call, operands[1], right, (lead, summed, columns), sizes, "_right")
    result = call.emit("aten.matmul.default", first, second, part="_product")
    made = [*lead, *rows, *columns]
    result = call.emit("aten.reshape.default", result, tuple(sizes[letter] for letter in made), part="_split")
    return call.emit("aten.permute.default", result, tuple(made.index(letter) for letter in wanted))


def _arrange(
    call: Call, value: Ref, word: str, groups: tuple[list[str], ...], sizes: Mapping[str, Arg], part: str
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


def unfold_vector_product(call: Call) -> Ref | None:
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


def unfold_added_product(call: Call) -> Ref:
    """Write beta * added + alpha * (left @ right) as separate operations."""
    added, left, right = call.args
    alpha, beta = call.kwargs.get("alpha", 1), call.kwargs.get("beta", 1)
    product = call.emit("aten.matmul.default", left, right, part="_product")
    if alpha != 1:
        product = call.emit("aten.mul.Tensor", product, alpha, part="_scaled")
    if beta != 1:
        added = call.emit("aten.mul.Tensor", added, beta, part="_weighed")
    return call.emit("aten.add.Tensor", added, product)


def unfold_named_padding(call: Call) -> Ref:
    """Write a convolution with padding "same" or "valid" with the padding as numbers.

    If the total padding is odd, the extra row goes to the bottom and the extra column to the right.
    """

    def of(
        image: Ref,
        weight: Ref,
        bias: Ref | None = None,
        stride: Sequence[int] = (1, 1),
        padding: str = "valid",
        dilation: Sequence[int] = (1, 1),
        groups: int = 1,
    ) -> Ref:
        kernel = call.metas[1].shape[2:]
        both = [step * (size - 1) * (padding == "same") for step, size in zip(dilation, kernel, strict=True)]
        sides = tuple(total // 2 for total in both)
        if any(total % 2 for total in both):
            (top, left), (height, width) = sides, both
            zeros = (left, width - left, top, height - top)
            image = call.emit("aten.constant_pad_nd.default", image, zeros, part="_pad")
            sides = (0, 0)
        return call.emit("aten.conv2d.default", image, weight, bias, stride, sides, dilation, groups)

    return of(*call.args)


def _spelled(op: str, *last: Arg) -> Callable[[Call], Ref]:
    """Return a rewrite that emits the operation as `op`, with the arguments `last` after its own."""
    return lambda call: call.emit(op, *call.args, *last, **call.kwargs)


def _reversed(call: Call) -> Ref:
    """Write `x.T` as a permutation."""
    return call.emit("aten.permute.default", call.args[0], tuple(reversed(range(call.metas[0].ndim))))


def _corrected(op: str) -> Callable[[Call], Ref]:
    """Return a rewrite of a variance or standard deviation that turns `unbiased` into a correction of 1 or 0."""

    def spelled(call: Call) -> Ref:
        given = dict(zip(("self", "dim", "unbiased", "keepdim"), call.args, strict=False)) | dict(call.kwargs)
        correction = int(given.get("unbiased", True))
        return call.emit(op, given["self"], given["dim"], correction=correction, keepdim=given.get("keepdim", False))

    return spelled


# Each function returns the replacement of an operation, or None to keep the operation as it is.
UNFOLDED: Mapping[str, Callable[[Call], Ref | None]] = {
    **dict.fromkeys(("aten.mT.default", "aten.mH.default"), _spelled("aten.transpose.int", -2, -1)),  # values are real
    "aten.adjoint.default": _spelled("aten.transpose.int", -2, -1),
    "aten.numpy_T.default": _reversed,
    **dict.fromkeys(("aten.swapaxes.default", "aten.swapdims.default"), _spelled("aten.transpose.int")),
    "aten.clip.default": _spelled("aten.clamp.default"),
    "aten.clip.Tensor": _spelled("aten.clamp.Tensor"),
    "aten.__and__.Tensor": _spelled("aten.bitwise_and.Tensor"),
    "aten.__or__.Tensor": _spelled("aten.bitwise_or.Tensor"),
    "aten.var.dim": _corrected("aten.var.correction"),
    "aten.std.dim": _corrected("aten.std.correction"),
    "aten.scaled_dot_product_attention.default": unfold_attention,
    "aten.einsum.default": unfold_einsum,
    "aten.matmul.default": unfold_vector_product,
    "aten.mv.default": unfold_vector_product,
    "aten.baddbmm.default": unfold_added_product,
    "aten.addmm.default": unfold_added_product,
    "aten.conv2d.padding": unfold_named_padding,
}


# --- whole programs --------------------------------------------------------------------------------------------------


def softmax_left(program: Program) -> Program:
    """Rewrite V^T A^T as (A V)^T, so that a softmax is always the left operand of its product."""
    makers = {node.name: node for node in program.nodes}
    nodes: list[Node] = []

    def transposed(value: Ref, name: str, scope: str) -> Ref:
        maker = makers.get(value.name)
        if maker is not None and maker.op == "aten.transpose.int" and set(maker.args[1:]) == {-2, -1}:
            return maker.args[0]
        nodes.append(Node(name, "aten.transpose.int", (value, -2, -1), scope=scope))
        return Ref(name)

    for node in program.nodes:
        sources = [find_source(program, makers, ref.name).kind for ref in node.args] if node.op in PRODUCTS[2:] else []
        if sources[1:] == ["softmax"] and sources[0] not in ("softmax", "weight"):
            value, weights = node.args
            args = (
                transposed(weights, f"{node.name}#left", node.scope),
                transposed(value, f"{node.name}#right", node.scope),
            )
            nodes.append(replace(node, name=f"{node.name}#product", args=args))
            transposed(Ref(nodes[-1].name), node.name, node.scope)
        else:
            nodes.append(node)
    return replace(program, nodes=tuple(nodes))


def share_equal_values(program: Program) -> Program:
    """Merge equal operations on equal values, so that one activation is one value however often it is viewed."""
    seen: dict[Any, str] = {}
    names: dict[str, str] = {}
    nodes = []
    for node in program.nodes:
        renamed = node.renamed(names)
        key = repr((renamed.op, renamed.args, sorted(renamed.kwargs.items())))
        if key in seen:
            names[node.name] = seen[key]
        else:
            seen[key] = node.name
            nodes.append(renamed)
    output = map_refs(program.output, lambda ref: Ref(names.get(ref.name, ref.name)))
    return replace(program, nodes=tuple(nodes), output=output)


def store_parameters(program: Program) -> Program:
    """Compute the weights, biases and products that depend on stored tensors alone, and store the results.

    Examples are a bias concatenated from several tensors, and the MLP of a position table. A product x W with a stored
    matrix W becomes a linear with the transpose of W.
    """
    constant = set(program.tensors)
    for node in program.nodes:
        if constant.issuperset(node.refs()):
            constant.add(node.name)
    stored: dict[str, str] = {}  # computed value -> name of the tensor that it becomes
    taken = {*program.tensors, *program.inputs, *(node.name for node in program.nodes)}

    def store(value: str, node: Node, part: str) -> None:
        if value in constant and value not in program.tensors and value not in stored:
            name = f"{node.scope}.{part}".lstrip(".")
            stored[value] = f"{name}#{node.name}" if name in taken else name
            taken.add(stored[value])

    for node in program.nodes:
        if node.op in PRODUCTS:
            store(node.name, node, "stored")
        for index, arg in enumerate(node.args):
            if (node.op, index) in _PARAMETERS and arg is not None:
                store(arg.name, node, _PARAMETERS[node.op, index])
    making = tuple(node for node in program.nodes if node.name in constant)
    wanted = {name: Ref(value) for value, name in stored.items()}
    computed: dict[str, Tensor] = replace(program, inputs=(), nodes=making, output=wanted).pruned().run(())
    tensors, nodes = dict(program.tensors), []
    tensors.update((name, value.contiguous()) for name, value in computed.items())
    for node in program.nodes:
        reading = node.renamed(stored)
        if node.op == "aten.matmul.default" and node.args[0].name not in constant:
            right = reading.args[1].name
            if right in tensors and tensors[right].ndim == 2:
                tensors[f"{right}.transposed"] = tensors[right].t().contiguous()
                reading = replace(reading, op="aten.linear.default", args=(reading.args[0], Ref(f"{right}.transposed")))
        nodes.append(reading)
    output = map_refs(program.output, lambda ref: Ref(stored.get(ref.name, ref.name)))
    return replace(program, nodes=tuple(nodes), output=output, tensors=tensors).pruned()


def fold_batch_norms(program: Program) -> Program:
    """Fold each batch norm into the convolution before it.

    y = (conv(x) - mean) g + b with g = weight / sqrt(variance + eps) is one convolution with other weights.
    """
    makers = {node.name: node for node in program.nodes}
    readers = program.consumers()
    uses = [*refs_of(program.output), *(name for node in program.nodes for name in node.refs())]
    outputs = set(refs_of(program.output))
    tensors, names, replaced = dict(program.tensors), dict[str, str](), dict[str, Node]()
    for norm in program.nodes:
        if norm.op != "aten.batch_norm.default":
            continue
        conv = makers.get(norm.args[0].name)
        if conv is None or conv.op != "aten.conv2d.default" or len(readers[conv.name]) != 1 or conv.name in outputs:
            continue
        if norm.args[3] is None or norm.args[4] is None:  # the norm uses the batch's own statistics
            continue
        if not all(arg is None or arg.name in tensors for arg in norm.args[1:5]):  # a parameter is computed
            continue
        weight_name = conv.args[1].name
        if weight_name not in tensors or uses.count(weight_name) != 1:
            continue
        mean, variance = (tensors[norm.args[i].name].double() for i in (3, 4))
        gain = torch.rsqrt(variance + norm.args[7])
        if norm.args[1] is not None:
            gain = gain * tensors[norm.args[1].name].double()
        bias = -mean * gain if norm.args[2] is None else tensors[norm.args[2].name].double() - mean * gain
        old_bias = conv.args[2] if len(conv.args) > 2 else None
        if old_bias is not None:
            bias = bias + tensors[old_bias.name].double() * gain
        weight = tensors[weight_name]
        tensors[weight_name] = (weight.double() * gain.view(-1, 1, 1, 1)).to(weight.dtype)
        bias_name = f"{weight_name.removesuffix('.weight')}.folded_bias"
        tensors[bias_name] = bias.to(weight.dtype)
        replaced[conv.name] = replace(conv, args=(*conv.args[:2], Ref(bias_name), *conv.args[3:]))
        names[norm.name] = conv.name
    nodes = tuple(replaced.get(node.name, node).renamed(names) for node in program.nodes if node.name not in names)
    output = map_refs(program.output, lambda ref: Ref(names.get(ref.name, ref.name)))
    return replace(program, nodes=nodes, output=output, tensors=tensors).pruned()


REWRITES: tuple[Callable[[Program], Program], ...] = (
    softmax_left,
    share_equal_values,
    store_parameters,
    fold_batch_norms,
)


def canonical(program: Program) -> Program:
    """Apply all `REWRITES` to a program, and remove the nodes and tensors that no output needs."""
    for rewrite in REWRITES:
        program = rewrite(program)
    return program.pruned()
