"""From a PyTorch model to a program: `torch.export`, then a canonical form that the rest of the package reads.

Canonical: no in-place operations, no identities (dropout, clone, detach), attention unfolded into scale, transpose,
matmul, mask, softmax, matmul, batch norms folded into the convolutions before them, equal values computed once.
"""

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from adalog.errors import CaptureError
from adalog.program import OPERATIONS, Arg, Node, Output, Program, Ref, map_refs

TOLERANCE = 1e-4  # of the largest output, between graph and model in float32
BATCHES = (1, 2, 7)

_SYMBOLIC: dict[Any, str] = {
    operator.add: "sym.add",
    operator.sub: "sym.sub",
    operator.mul: "sym.mul",
    operator.floordiv: "sym.floordiv",
    operator.mod: "sym.mod",
    operator.neg: "sym.neg",
    operator.getitem: "getitem",
}
# First argument in, first argument out, at inference.
_IDENTITIES = {
    f"aten.{name}"
    for name in (
        "dropout.default dropout_.default feature_dropout.default alpha_dropout.default clone.default contiguous.default "
        "detach.default detach_.default alias.default lift_fresh_copy.default lift_fresh.default to.device"
    ).split()
}
_CHECKS = ("aten._assert", "aten.sym_constrain", "aten._functional_assert", "aten.sym_constrain_range_for_size")
_DROPPED_KWARGS = ("device", "layout", "pin_memory", "memory_format", "non_blocking", "copy")


@torch.no_grad()
def capture(model: nn.Module, inputs: Tensor | Sequence[Tensor]) -> Program:
    """The program of a model, free in its batch size.

    inputs: the model's positional inputs with at least two images, (N, ...) each; one tensor is one input.
    Raises CaptureError where the model cannot be exported, uses an operation outside the whitelist, or where the
    program disagrees with the model on the inputs at batches of 1, 2 and 7.
    """
    example = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    if any(value.shape[0] < 2 for value in example):
        raise CaptureError("capturing a model takes two images or more, so that the batch size is seen to be free; got 1")
    with _inference(model):
        program = _import(model, tuple(value[:2] for value in example))
        program = fold_batch_norms(share_equal_values(program)).pruned()
        _check(model, program, example)
    return program


@contextmanager
def _inference(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for every module inside, as it was outside."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _import(model: nn.Module, example: tuple[Tensor, ...]) -> Program:
    shapes = tuple({0: torch.export.Dim.DYNAMIC} for _ in example)
    try:
        exported = torch.export.export(model, example, dynamic_shapes=_match_signature(model, shapes))
    except Exception as cause:  # torch.export raises whatever the model's own code does
        first_line = (str(cause).strip() or type(cause).__name__).splitlines()[0]
        raise CaptureError(
            f"{type(model).__name__} could not be exported: {first_line} "
            "Capture the part that can be (for a detector, its backbone) and pass that to adalog.quantize."
        ) from cause
    kinds = torch.export.graph_signature.InputKind
    tensors: dict[str, Tensor] = {}
    inputs: list[str] = []
    rename: dict[str, Any] = {}  # fx name -> what stands for it here
    for spec in exported.graph_signature.input_specs:
        name = getattr(spec.arg, "name", "")
        if spec.kind == kinds.USER_INPUT:
            inputs.append(name)
            rename[name] = Ref(name)
        else:
            assert spec.target is not None
            source = exported.state_dict if spec.target in exported.state_dict else exported.constants
            tensors[spec.target] = source[spec.target].detach().clone()
            rename[name] = Ref(spec.target)

    nodes: list[Node] = []
    unknown: set[str] = set()

    def emit(op: str, name: str, scope: str, *args: Arg, **kwargs: Arg) -> Ref:
        nodes.append(Node(name, op, args, kwargs, scope))
        return Ref(name)

    result: Arg = None
    for node in exported.graph.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "output":
            result = _convert(node.args[0], rename)
            continue
        op = _SYMBOLIC.get(node.target, str(node.target))
        args = tuple(_convert(arg, rename) for arg in node.args)
        kwargs = {key: _convert(value, rename) for key, value in node.kwargs.items() if key not in _DROPPED_KWARGS}
        scope = _scope(node)
        if op.startswith(_CHECKS):
            continue
        if op in _IDENTITIES or (op in ("aten.pad.default", "aten.constant_pad_nd.default") and not any(args[1])):
            rename[node.name] = args[0]
        elif op == "aten.scaled_dot_product_attention.default":
            shape = node.args[0].meta["val"].shape
            rename[node.name] = unfold_attention(emit, node, scope, args, kwargs, width=int(shape[-1]))
        elif op not in OPERATIONS and _functional(op) in OPERATIONS:
            rename[node.name] = emit(_functional(op), node.name, scope, *args, **kwargs)
            for name, ref in rename.items():  # what was written to is now the result, for every later reader
                if ref == args[0]:
                    rename[name] = Ref(node.name)
        else:
            if op not in OPERATIONS:
                unknown.add(op)
            rename[node.name] = emit(op, node.name, scope, *args, **kwargs)
    if unknown:
        raise CaptureError(
            f"{type(model).__name__} uses {', '.join(sorted(unknown))}, which this version cannot store or run. "
            "Capture a part of the model without it."
        )
    output = _structure(result, exported.call_spec.out_spec)
    return Program(tuple(inputs), tuple(nodes), output, tensors).pruned()


def _match_signature(model: nn.Module, shapes: tuple[dict[int, Any], ...]) -> Any:
    """dynamic_shapes in the form torch.export wants: one entry a parameter of forward, a tuple for *args."""
    import inspect

    parameters = list(inspect.signature(model.forward).parameters.values())
    if parameters and parameters[0].kind is inspect.Parameter.VAR_POSITIONAL:
        return (shapes,)
    return shapes


def _functional(op: str) -> str:
    """The name of an in-place operation's functional twin."""
    name, _, overload = op.rpartition(".")
    return f"{name.rstrip('_')}.{overload}"


def _scope(node: torch.fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values()]
    return str(paths[-1]) if paths else ""


def _convert(arg: Any, rename: Mapping[str, Any]) -> Arg:
    if isinstance(arg, torch.fx.Node):
        return rename[arg.name]
    if isinstance(arg, (tuple, list)):
        return tuple(_convert(item, rename) for item in arg)
    if arg is None or isinstance(arg, (bool, int, float, str, torch.dtype)):
        return arg
    raise CaptureError(f"an argument of type {type(arg).__name__} ({arg}) cannot be stored in a program")


def _structure(flat: Sequence[Arg], spec: Any) -> Any:
    """The model's output structure with a Ref for each tensor; named outputs of any class become `Output`."""
    if spec.is_leaf():
        return flat[0]
    children, start = [], 0
    for child in spec.children():
        children.append(_structure(flat[start : start + child.num_leaves], child))
        start += child.num_leaves
    if spec.type in (list, tuple):
        return spec.type(children)
    keys = spec.context if isinstance(spec.context, list) else None
    if keys is None and isinstance(spec.context, (tuple, list)) and spec.context and isinstance(spec.context[0], list):
        keys = spec.context[0]
    if keys is None or len(keys) != len(children) or not all(isinstance(key, str) for key in keys):
        return tuple(children)
    named = dict(zip(keys, children, strict=True))
    return named if spec.type is dict else Output(named)


def unfold_attention(
    emit: Callable[..., Ref],
    node: torch.fx.Node,
    scope: str,
    args: tuple[Arg, ...],
    kwargs: Mapping[str, Arg],
    *,
    width: int,
) -> Ref:
    """softmax(Q K^T scale + mask) V as separate operations, the two products of which are sites."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if given.get("is_causal") or given.get("enable_gqa"):
        raise CaptureError(f"attention in {scope or 'the model'} is causal or grouped, which no vision transformer needs")
    scale = given.get("scale")
    name = node.name
    transposed = emit("aten.transpose.int", f"{name}_kt", scope, given["key"], -2, -1)
    scores = emit("aten.matmul.default", f"{name}_qk", scope, given["query"], transposed)
    scores = emit("aten.mul.Tensor", f"{name}_scaled", scope, scores, 1 / math.sqrt(width) if scale is None else scale)
    mask = given.get("attn_mask")
    if mask is not None:
        position = names.index("attn_mask")
        mask_node = node.args[position] if len(node.args) > position else node.kwargs["attn_mask"]
        assert isinstance(mask_node, torch.fx.Node)
        if mask_node.meta["val"].dtype == torch.bool:
            hidden = emit("aten.logical_not.default", f"{name}_hidden", scope, mask)
            scores = emit("aten.masked_fill.Scalar", f"{name}_masked", scope, scores, hidden, float("-inf"))
        else:
            scores = emit("aten.add.Tensor", f"{name}_masked", scope, scores, mask)
    weights = emit("aten.softmax.int", f"{name}_softmax", scope, scores, -1)
    return emit("aten.matmul.default", f"{name}_av", scope, weights, given["value"])


def share_equal_values(program: Program) -> Program:
    """Common subexpressions computed once, so that one activation is one value however often it was viewed."""
    seen: dict[Any, str] = {}
    names: dict[str, str] = {}
    nodes = []
    for node in program.nodes:
        node = node.renamed(names)
        key = repr((node.op, node.args, sorted(node.kwargs.items())))
        if key in seen:
            names[node.name] = seen[key]
        else:
            seen[key] = node.name
            nodes.append(node)
    output = map_refs(program.output, lambda ref: Ref(names.get(ref.name, ref.name)))
    return replace(program, nodes=tuple(nodes), output=output)


def fold_batch_norms(program: Program) -> Program:
    """y = (conv(x) - mean) g + b, g = weight / sqrt(variance + eps), as one convolution with other weights."""
    makers = {node.name: node for node in program.nodes}
    readers = program.consumers()
    uses = [name for node in program.nodes for name in node.refs()]
    tensors, names, replaced = dict(program.tensors), dict[str, str](), dict[str, Node]()
    for norm in program.nodes:
        if norm.op != "aten.batch_norm.default":
            continue
        conv = makers.get(norm.args[0].name)
        if conv is None or conv.op != "aten.conv2d.default" or len(readers[conv.name]) != 1:
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


def _check(model: nn.Module, program: Program, example: tuple[Tensor, ...]) -> None:
    """Program and model agree at every batch size of `BATCHES`, or capture refuses and says by how much they differ."""
    for batch in BATCHES:
        rows = torch.arange(batch) % len(example[0])
        inputs = tuple(value[rows.to(value.device)] for value in example)
        wanted = pytree.tree_leaves(model(*inputs))
        got = pytree.tree_leaves(program.run(inputs))
        for expected, actual in zip(wanted, got, strict=True):
            if not isinstance(expected, Tensor) or not expected.is_floating_point():
                continue
            error = (expected - actual).abs().max().item() / max(expected.abs().max().item(), 1e-30)
            if not error <= TOLERANCE:
                raise CaptureError(
                    f"the program of {type(model).__name__} differs from the model by {error:.2g} of the largest output "
                    f"at batch {batch} (at most {TOLERANCE:g} is allowed); the images may hold NaN, or the model may "
                    "behave differently from call to call"
                )
