"""What a program multiplies: its sites, LayerNorm pairs and blocks, read from the flow of data and never from names."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adalog.errors import CaptureError
from adalog.program import Node, Program, Ref, evaluate, refs_of, resolve

# Operations that move values about without changing them: a value's source is looked for through these.
_MOVES = {
    f"aten.{name}"
    for name in (
        "view.default reshape.default permute.default transpose.int t.default flatten.using_ints unflatten.int "
        "expand.default unsqueeze.default squeeze.dim squeeze.dims squeeze.default movedim.int unbind.int split.Tensor "
        "split_with_sizes.default chunk.default select.int slice.Tensor narrow.int roll.default flip.default repeat.default"
    ).split()
} | {"getitem"}
_ACTIVATIONS = {
    f"aten.{name}.default": name
    for name in ("gelu", "silu", "relu", "hardswish", "mish", "relu6", "sigmoid", "tanh", "elu", "hardsigmoid")
}
POWER_LAW_ACTIVATIONS = ("gelu", "quick_gelu", "silu", "hardswish", "mish")
_PRODUCTS = ("aten.linear.default", "aten.conv2d.default", "aten.matmul.default", "aten.bmm.default")


@dataclass(frozen=True)
class Source:
    """Where an operand comes from: "weight", "input", "layer_norm", "softmax", an activation's name, or "other"."""

    kind: str
    node: str = ""  # the node that made it, before any moves
    minimum: float = -math.inf  # of the operation, where it has one


@dataclass(frozen=True)
class Site:
    """One multiplication: role "linear", "conv", "qk" or "av"; left and right are the operands' value names.

    For a linear or convolution, right is the weight's tensor name and `bias` the bias's, if it has one.
    """

    name: str
    role: str
    node: Node
    left: str
    right: str
    left_source: Source
    right_source: Source
    bias: str | None = None


@dataclass(frozen=True)
class Pair:
    """A LayerNorm whose every reader is a linear, so that its scale can be folded; or why it is not one."""

    norm: Node
    sites: tuple[str, ...]
    refusal: str = ""


@dataclass(frozen=True)
class Block:
    """Consecutive nodes with one live value in and one out: the unit of reconstruction."""

    value_in: str
    value_out: str
    nodes: tuple[str, ...]


def find_sites(program: Program) -> list[Site]:
    """Every multiplication of the program in order of execution, with the source of each operand."""
    makers = {node.name: node for node in program.nodes}
    sites: list[Site] = []
    for node in program.nodes:
        if node.op not in _PRODUCTS:
            continue
        left, right = node.args[0].name, node.args[1].name
        left_source, right_source = (find_source(program, makers, name) for name in (left, right))
        bias = None
        if node.op in _PRODUCTS[:2]:
            if right_source.kind != "weight":
                raise CaptureError(f"{node.op} in {node.scope or 'the model'} has a weight that is computed, not stored")
            role, name = ("linear" if node.op == _PRODUCTS[0] else "conv"), right.removesuffix(".weight")
            bias = node.args[2].name if len(node.args) > 2 and node.args[2] is not None else None
        else:
            role = "av" if left_source.kind == "softmax" else "qk"
            name = f"{node.scope}.{role}" if node.scope else role
        if any(site.name == name for site in sites):
            name = f"{name}.{node.name}"
        sites.append(Site(name, role, node, left, right, left_source, right_source, bias))
    return sites


def find_source(program: Program, makers: Mapping[str, Node], name: str) -> Source:
    """Walk back from a value through moves to what made it."""
    while name in makers and makers[name].op in _MOVES:
        name = makers[name].args[0].name
    if name in program.inputs:
        return Source("input")
    if name in program.tensors:
        return Source("weight")
    node = makers[name]
    if node.op == "aten.layer_norm.default":
        return Source("layer_norm", name)
    if node.op == "aten.softmax.int":
        return Source("softmax", name, 0.0)
    if node.op in _ACTIVATIONS:
        return Source(_ACTIVATIONS[node.op], name, minimum_of(lambda x: resolve(node.op)(x, *node.args[1:], **node.kwargs)))
    gain = _quick_gelu_gain(makers, node)
    if gain is not None:
        return Source("quick_gelu", name, minimum_of(lambda x: x * torch.sigmoid(gain * x)))
    return Source("other", name)


def _quick_gelu_gain(makers: Mapping[str, Node], node: Node) -> float | None:
    """c where the node is x * sigmoid(c x), whichever way it is written."""
    if node.op != "aten.mul.Tensor" or not all(isinstance(arg, Ref) for arg in node.args):
        return None
    for x, gate_ref in (node.args, node.args[::-1]):
        gate = makers.get(gate_ref.name)
        if gate is None or gate.op != "aten.sigmoid.default":
            continue
        inner = makers.get(gate.args[0].name)
        if inner is None:
            continue
        if inner.op in ("aten.mul.Tensor", "aten.mul.Scalar"):
            numbers = [arg for arg in inner.args if isinstance(arg, (int, float))]
            if numbers and x in inner.args:
                return float(numbers[0])
        if gate.args[0] == x:
            return 1.0
    return None


def minimum_of(function: Any) -> float:
    """The least value of a pointwise activation, by its own float64 arithmetic: GELU's is -0.16997124254703522."""
    low, high = -30.0, 30.0
    for _ in range(12):
        x = torch.linspace(low, high, 2001, dtype=torch.float64)
        best = int(function(x).argmin())
        step = (high - low) / 2000
        low, high = x[best].item() - step, x[best].item() + step
    return float(function(torch.tensor([(low + high) / 2], dtype=torch.float64)).item())


def find_pairs(program: Program, sites: Sequence[Site], example: Sequence[Tensor]) -> list[Pair]:
    """For every LayerNorm that feeds a linear: the linears to fold it with, or the reason not to.

    Folding changes every value the norm sends out, so every reader must be a linear that meets the channels where the
    norm left them, last. example: inputs to run the program on once.
    """
    readers = program.consumers()
    by_node = {site.node.name: site for site in sites}
    outputs = set(refs_of(program.output))
    numbers: dict[str, int] = {}
    shapes: dict[str, tuple[int, ...]] = {}

    def watch(node: Node, args: tuple[Any, ...], result: Any) -> None:
        if isinstance(result, int):
            numbers[node.name] = result
        elif node.op == "aten.layer_norm.default":
            shapes[node.name] = tuple(result.shape)

    program.run(example, watch)
    pairs = []
    for norm in program.nodes:
        if norm.op != "aten.layer_norm.default":
            continue
        linears, refusal = _linear_readers(norm, shapes[norm.name], readers, by_node, numbers)
        if len(norm.args[1]) != 1:
            refusal = "it normalises more than the channels"
        elif len(norm.args) < 4 or norm.args[2] is None or norm.args[3] is None:
            refusal = "it has no weight and bias to fold into"
        elif norm.name in outputs:
            refusal = "it is an output of the model"
        if linears:
            pairs.append(Pair(norm, tuple(linears), refusal))
    return pairs


def _linear_readers(
    norm: Node,
    shape: tuple[int, ...],
    readers: Mapping[str, list[Node]],
    by_node: Mapping[str, Site],
    numbers: Mapping[str, int],
) -> tuple[list[str], str]:
    """The linears that read a norm, and the first reason why they are not all, or ''.

    A probe that holds its channel's number at every place is moved as the norm's output is: where a linear reads, the
    last axis must count the channels.
    """
    channels = torch.arange(shape[-1])
    linears, refusal = [], ""
    front: list[tuple[str, Any]] = [(norm.name, channels.expand(shape))]
    while front:
        name, probe = front.pop(0)
        for reader in readers.get(name, []):
            site = by_node.get(reader.name)
            if site is not None and site.role == "linear" and site.left == name:
                if probe.shape[-1] == len(channels) and bool((probe == channels).all()):
                    linears.append(site.name)
                else:
                    refusal = refusal or f"its channels are mixed with positions before {site.name}"
            elif reader.op in _MOVES:
                moved = resolve(reader.op)(*evaluate(reader.args, {**numbers, name: probe}), **reader.kwargs)
                front.append((reader.name, moved))
            elif reader.op != "aten.sym_size.int":
                refusal = refusal or f"it also feeds {reader.op.removeprefix('aten.')} in {reader.scope or 'the model'}"
    return linears, refusal


def find_blocks(program: Program) -> list[Block]:
    """Cut at residual additions where one value alone is live; a softmax starts a block, what follows joins it.

    For a pre-norm ViT: the stem, then one block (attention and MLP) each, then the head.
    """
    derived = _derived_from_inputs(program)
    position = {node.name: index for index, node in enumerate(program.nodes)}
    last_use = {name: max(position[reader.name] for reader in nodes) for name, nodes in program.consumers().items()}
    cuts = []
    for index, node in enumerate(program.nodes):
        live = [
            name for name in derived if position.get(name, -1) <= index and last_use.get(name, -1) > index
        ]
        both = [arg for arg in node.args if isinstance(arg, Ref) and arg.name in derived]
        if live == [node.name] and node.op == "aten.add.Tensor" and len(both) == 2:
            cuts.append(index)
    segments: list[tuple[int, int]] = []
    start = 0
    for cut in cuts:
        segments.append((start, cut + 1))
        start = cut + 1
    blocks: list[Block] = []
    entry = program.inputs[0]
    for begin, end in segments:
        nodes = program.nodes[begin:end]
        names = tuple(node.name for node in nodes)
        has_softmax = any(node.op == "aten.softmax.int" for node in nodes)
        if blocks and not has_softmax:
            blocks[-1] = Block(blocks[-1].value_in, names[-1], blocks[-1].nodes + names)
        else:
            blocks.append(Block(entry, names[-1], names))
        entry = names[-1]
    rest = tuple(node.name for node in program.nodes[start:])
    if rest:
        blocks.append(Block(entry, rest[-1], rest))
    return _stem_apart(program, blocks)


def _stem_apart(program: Program, blocks: list[Block]) -> list[Block]:
    """The first block split where the residual stream begins: at the last single live value before its first norm."""
    makers = {node.name: node for node in program.nodes}
    first = blocks[0]
    inside = set(first.nodes)
    last = makers[first.value_out]
    stream = [arg.name for arg in last.args if isinstance(arg, Ref) and arg.name in inside]
    while stream:
        candidate = makers[stream[0]]
        nodes = list(first.nodes)
        cut = nodes.index(candidate.name)
        before, after = tuple(nodes[: cut + 1]), tuple(nodes[cut + 1 :])
        softmax_after = any(makers[name].op == "aten.softmax.int" for name in after)
        softmax_before = any(makers[name].op == "aten.softmax.int" for name in before)
        if softmax_after and not softmax_before:
            stem = Block(first.value_in, candidate.name, before)
            return [stem, Block(candidate.name, first.value_out, after), *blocks[1:]]
        stream = [arg.name for arg in candidate.args if isinstance(arg, Ref) and arg.name in inside]
    return blocks


def _derived_from_inputs(program: Program) -> set[str]:
    derived = set(program.inputs)
    for node in program.nodes:
        if node.op != "aten.sym_size.int" and not node.op.startswith("sym.") and any(n in derived for n in node.refs()):
            derived.add(node.name)
    return derived
