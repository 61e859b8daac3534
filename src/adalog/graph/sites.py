"""Find the sites, pairs and blocks of a program from its flow of data, never from names."""

import functools
import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from adalog.graph.activations import BY_OPERATION, GELUS
from adalog.graph.operations import FLOAT_PRODUCTS, MOVES, PRODUCTS, SHAPE_READERS, resolve
from adalog.graph.program import Node, Program, Ref, refs_of
from adalog.graph.tracing import at_twice_the_size, channels_in_views, trace, zero_padding

NORMS = {"aten.layer_norm.default": "layer_norm", "aten.rms_norm.default": "rms_norm"}  # those that fold, by operation


@dataclass(frozen=True)
class Source:
    """The origin of an operand: "weight", "input", the name of a norm, "softmax", an activation's name, or "other".

    node: the node that computed it, before any views. minimum: the least value that this operation returns.
    """

    kind: str
    node: str = ""
    minimum: float = -math.inf


@dataclass(frozen=True)
class Site:
    """One multiplication, with its role ("linear", "conv", "qk" or "av") and the names of its left and right operands.

    The right operand of a linear or convolution is its weight, and `bias` names its bias, if it has one. The operands
    of "qk" and "av" are computed values; the right one may be a stored tensor. refusal: the reason why the site stays
    float, if it does. again: the further calls of a layer that is called several times, such as a detector's head on
    maps of several sizes. They share the weight, the bias and the quantizers, and `left_source` is what their inputs
    have in common. headed: the operands whose third dimension from the end counts heads; `with_heads` sets it.
    """

    name: str
    role: str
    node: Node
    left: str
    right: str
    left_source: Source
    right_source: Source
    bias: str | None = None
    refusal: str = ""
    again: tuple["Site", ...] = ()
    headed: frozenset[str] = frozenset()

    @property
    def calls(self) -> tuple["Site", ...]:
        """All multiplications that share this site's quantizers, starting with the site itself."""
        return (self, *self.again)


@dataclass(frozen=True)
class Pair:
    """A norm and the linears that read it; its channel scales fold into them unless there is a `refusal`.

    shifted: True if the fold's beta is subtracted before each linear, and not in the norm: the norm has no bias, or its
    output is padded with zeros, from which beta must be subtracted too.
    """

    norm: Node
    sites: tuple[str, ...]
    refusal: str = ""
    shifted: bool = False

    @property
    def name(self) -> str:
        """The name of the norm's module, or the name of its node if the norm is the whole model."""
        return self.norm.scope or self.norm.name


@dataclass(frozen=True)
class Block:
    """Consecutive nodes with one value in and one value out, which later stages run as a unit."""

    value_in: str
    value_out: str
    nodes: tuple[str, ...]


def find_sites(program: Program) -> list[Site]:
    """Find every multiplication that can be quantized, in order of execution, with the source of each operand.

    Multiplications by the same stored weight, with the same bias and geometry, are calls of one site.
    """
    calls: dict[Any, list[Site]] = {}
    for site in _products(program):
        if not site.refusal:
            layer = (site.node.op, site.node.args[1:]) if site.role in ("linear", "conv") else site.name
            calls.setdefault(layer, []).append(site)
    return [_merge_calls(calls_of_layer) for calls_of_layer in calls.values()]


def with_heads(sites: Sequence[Site], program: Program, inputs: Sequence[Tensor]) -> list[Site]:
    """Set `headed` of each site: its computed operands whose third dimension from the end counts heads.

    The dimension counts heads if the product has four dimensions, and if its size is not 1 and does not change with the
    number of images or, if sizes are free, for larger images. Otherwise it may count images or rows, or all heads may
    share one key.
    """
    names = {name for site in sites if site.role in ("qk", "av") for name in (site.left, site.right)}
    if not names:
        return list(sites)
    traces = [trace(program, inputs, 2), trace(program, inputs, 3)]
    if program.free:
        larger = at_twice_the_size(program, inputs, 2, names)
        traces.append({name: value if value.ndim else traces[0][name] for name, value in larger.items()})
    shapes = {name: [values[name].shape for values in traces] for name in names}

    def counts(name: str) -> bool:
        sizes = {shape[-3] if len(shape) > 2 else 1 for shape in shapes[name]}
        return len(sizes) == 1 and sizes != {1}

    def heads_of(site: Site) -> frozenset[str]:
        operands = {site.left, site.right} & names
        wide = operands and max(len(shapes[name][0]) for name in operands) == 4
        return frozenset(name for name in operands if wide and counts(name))

    return [replace(site, headed=heads_of(site)) for site in sites]


def _merge_calls(calls: Sequence[Site]) -> Site:
    """Merge the calls of one layer into one site."""
    sources = [call.left_source for call in calls]
    kind = sources[0].kind if len({source.kind for source in sources}) == 1 else "other"
    common = Source(kind, sources[0].node, min(source.minimum for source in sources))
    return replace(calls[0], left_source=common, again=tuple(calls[1:]))


def find_refused(program: Program) -> list[Site]:
    """Find every multiplication that stays float, in order of execution; its `refusal` gives the reason."""
    return [site for site in _products(program) if site.refusal]


def _products(program: Program) -> list[Site]:
    sites: list[Site] = []
    names: set[str] = set()
    for node in program.nodes:
        if node.op not in PRODUCTS and node.op not in FLOAT_PRODUCTS:
            continue
        left, right = node.args[0].name, node.args[1].name
        sources = find_source(program, left), find_source(program, right)
        bias, refusal = None, ""
        if node.op in FLOAT_PRODUCTS:
            role = name = node.op.removeprefix("aten.").split(".")[0]
            refusal = f"{role} is neither a linear, a 2-D convolution nor a matrix product"
        elif node.op in PRODUCTS[:2]:
            role, name = ("linear" if node.op == PRODUCTS[0] else "conv"), right.removesuffix(".weight")
            bias = node.args[2].name if len(node.args) > 2 and node.args[2] is not None else None
            parameters = {"weight": right} if bias is None else {"weight": right, "bias": bias}
            computed = [kind for kind, value in parameters.items() if value not in program.tensors]
            refusal = f"its {computed[0]} is computed, not stored" if computed else ""
        else:
            role = name = "av" if _is_attention(program, left) else "qk"
            refusal = "its left operand is a stored tensor" if sources[0].kind == "weight" else ""
        if role == name or refusal:
            name = f"{node.scope}.{role}" if node.scope else role
        if name in names:
            name = f"{name}.{node.name}"
        names.add(name)
        sites.append(Site(name, role, node, left, right, *sources, bias, refusal))
    return sites


def _is_attention(program: Program, name: str) -> bool:
    """Return True if a softmax computed a value, even if linears mixed its heads afterwards (talking heads)."""
    name = _behind(program, name, MOVES | set(PRODUCTS[:2]))
    return name in program.makers and program.makers[name].op == "aten.softmax.int"


def _behind(program: Program, name: str, ops: Collection[str]) -> str:
    """Return the value that these operations made a value from, each from its first argument."""
    while name in program.makers and program.makers[name].op in ops:
        name = program.makers[name].args[0].name
    return name


def find_source(program: Program, name: str) -> Source:
    """Find the source of a value: the operation that computed it, before any views."""
    name = _behind(program, name, MOVES)
    if name in program.inputs:
        return Source("input")
    if name in program.tensors:
        return Source("weight")
    node = program.makers[name]
    if node.op in NORMS:
        return Source(NORMS[node.op], name)
    if node.op == "aten.softmax.int":
        return Source("softmax", name, 0.0)
    if node.op in BY_OPERATION:
        minimum = _minimum_of_operation(node.op, node.args[1:], *node.kwargs.items())
        return Source(BY_OPERATION[node.op].name, name, minimum)
    gain = _quick_gelu_gain(program.makers, node)
    if gain is not None:
        return Source("quick_gelu", name, minimum_of(lambda x: x * torch.sigmoid(gain * x)))
    return Source("other", name)


def _quick_gelu_gain(makers: Mapping[str, Node], node: Node) -> float | None:
    """Return c if the node is x * sigmoid(c x), with its factors in either order, and None otherwise."""
    if node.op != "aten.mul.Tensor" or not all(isinstance(arg, Ref) for arg in node.args):
        return None
    for x, gate_ref in (node.args, node.args[::-1]):
        gate = makers.get(gate_ref.name)
        if gate is None or gate.op != "aten.sigmoid.default":
            continue
        inner = makers.get(gate.args[0].name)
        if inner is not None and inner.op in ("aten.mul.Tensor", "aten.mul.Scalar"):
            numbers = [arg for arg in inner.args if isinstance(arg, (int, float))]
            if numbers and x in inner.args:
                return float(numbers[0])
    return None


@functools.cache  # a network has an activation many times
def _minimum_of_operation(op: str, args: tuple[Any, ...], *kwargs: tuple[str, Any]) -> float:
    return minimum_of(lambda x: resolve(op)(x, *args, **dict(kwargs)))


def minimum_of(function: Any) -> float:
    """Compute the least value of a pointwise activation in float64; for GELU it is -0.16997120747990366."""
    low, high = -30.0, 30.0
    for _ in range(12):
        x = torch.linspace(low, high, 2001, dtype=torch.float64)
        best = int(function(x).argmin())
        step = (high - low) / 2000
        low, high = x[best].item() - step, x[best].item() + step
    return float(function(torch.tensor([(low + high) / 2], dtype=torch.float64)).item())


def find_pairs(program: Program, sites: Sequence[Site], example: Sequence[Tensor]) -> list[Pair]:
    """Find every norm of `NORMS` that feeds a linear, with the linears to fold it with or the reason not to fold it.

    Folding changes every value that the norm outputs. So every reader must be a linear, and the last axis of its input
    must count the norm's channels, whatever views or zero padding lie between. example: inputs to trace the program.
    """
    values, readers = trace(program, example), program.consumers()
    linears = {call.node.name: site for site in sites if site.role == "linear" for call in site.calls}
    repeated = {site.name for site in sites if site.again}
    outputs = set(refs_of(program.output))
    pairs = []
    for norm in program.nodes:
        if norm.op not in NORMS:
            continue
        reading, refusals = [], _parameter_refusals(program, norm)
        shifted = read_parameters(norm)[1] is None
        for name, channels in channels_in_views(norm.name, values, readers, padded=True):
            if name in outputs:
                refusals.append("it is an output of the model")
            for reader in readers.get(name, []):
                if reader.name in linears and reader.args[0].name == name:
                    reading.append(linears[reader.name].name)
                    count = values[norm.name].shape[-1]
                    if channels.shape[-1] != count or not bool((channels == torch.arange(count))[channels >= 0].all()):
                        refusals.append(f"its channels are mixed with positions before {reading[-1]}")
                elif zero_padding(reader):
                    shifted = True
                elif reader.op not in MOVES and reader.op != "aten.sym_size.int":
                    refusals.append(f"it also feeds {reader.op.removeprefix('aten.')} in {reader.scope or 'the model'}")
        refusals += [f"{name} is called several times" for name in reading if name in repeated]
        if reading:
            pairs.append(Pair(norm, tuple(reading), refusals[0] if refusals else "", shifted))
    return pairs


def read_parameters(norm: Node) -> tuple[Ref | None, Ref | None]:
    """Return the weight and the bias of a norm of `NORMS`, None if it lacks one."""
    weight, bias, *_ = (*norm.args[2:], None, None)
    return weight, bias if norm.op == "aten.layer_norm.default" else None


def _parameter_refusals(program: Program, norm: Node) -> list[str]:
    """Return the reasons why a fold cannot change the parameters of a norm."""
    weight, bias = read_parameters(norm)
    refusals = []
    if len(norm.args[1]) != 1:
        refusals.append("it normalises more than the channels")
    if weight is None or weight.name not in program.tensors:
        refusals.append("it has no stored weight to fold into")
    if bias is not None and (bias.name not in program.tensors or bias == weight):
        refusals.append("it has no stored bias of its own to fold into")
    return refusals


def find_splits(program: Program, sites: Sequence[Site], example: Sequence[Tensor]) -> dict[str, Tensor]:
    """Assign each output channel of a linear to a split, numbered from 0: (O,), by the linear's name.

    Channels belong to one split if the same operations read them, through views. For example, the queries, keys and
    values that one linear computes are three splits. example: inputs to trace the program.
    """
    values, readers = trace(program, example), program.consumers()
    splits = {}
    for site in sites:
        if site.role != "linear":
            continue
        read_by: list[list[int]] = [[] for _ in range(values[site.node.name].shape[-1])]
        count = 0  # number of readers
        views = (view for call in site.calls for view in channels_in_views(call.node.name, values, readers))
        for view, channels in views:
            for reader in readers.get(view, []):
                if reader.op not in MOVES and reader.op not in SHAPE_READERS:
                    for channel in channels.unique().tolist():
                        read_by[channel].append(count)
                    count += 1
        numbers: dict[tuple[int, ...], int] = {}
        splits[site.name] = torch.tensor([numbers.setdefault(tuple(key), len(numbers)) for key in read_by])
    return splits


def census(program: Program, sites: Sequence[Site], pairs: Sequence[Pair]) -> dict[str, Any]:
    """Count the multiplications of a program by role, and list its sites, as JSON.

    post_gelu: the number of sites whose left operand comes from a GELU. pairs: the number of pairs that fold.
    other_sites: products of two computed values outside attention.
    """
    readers = program.consumers()
    roles = {site.name: site.role for site in sites}
    roles |= {site.name: "other" for site in sites if site.role == "qk" and not _reaches_softmax(readers, site.node)}
    count = Counter(roles.values())
    folds = {name: pair.norm.name for pair in pairs if not pair.refusal for name in pair.sites}
    return {
        "linears": count["linear"],
        "convs": count["conv"],
        "qk": count["qk"],
        "av": count["av"],
        "post_gelu": sum(site.left_source.kind in GELUS for site in sites),
        "pairs": sum(not pair.refusal for pair in pairs),
        "refusals": {pair.name: f"not folded: {pair.refusal}" for pair in pairs if pair.refusal}
        | {site.name: f"stays float: {site.refusal}" for site in find_refused(program)},
        "float_ops": program.float_operations(),
        "other_sites": [name for name, role in roles.items() if role == "other"],
        "sites": [
            {
                "site": site.name,
                "role": roles[site.name],
                "calls": len(site.calls),
                "left": site.left_source.kind,
                "right": site.right_source.kind,
                "shape": list(program.tensors[site.right].shape) if site.right in program.tensors else None,
                "folds_with": folds.get(site.name),
            }
            for site in sites
        ],
    }


def _reaches_softmax(readers: Mapping[str, Sequence[Node]], product: Node) -> bool:
    """Return True if a softmax reads the result of a product, without another product between them."""
    front = [product.name]
    for name in front:  # the loop appends to this list
        for reader in readers.get(name, []):
            if reader.op == "aten.softmax.int":
                return True
            if reader.op not in PRODUCTS and reader.name not in front:
                front.append(reader.name)
    return False


def find_blocks(program: Program) -> list[Block]:
    """Cut the program into its stem, one block per attention, and its head, at values that everything later depends on.

    A block starts at the last such value before its softmax, which is the residual stream in a pre-norm ViT. It holds
    everything up to the next block, such as the MLP or a change of resolution. The head starts after the last residual
    addition. Values that do not depend on the inputs (position tables, masks) may be read across blocks, like tensors.
    A block boundary must be a tensor, not a list.
    """
    narrow = _borders(program)
    attentions = (index for index, node in enumerate(program.nodes) if node.op == "aten.softmax.int")
    last = next((end for end in range(len(narrow), 0, -1) if _adds_to_stream(program, narrow[:end])), 0)
    return _cut(program, narrow, [*(bisect_left(narrow, index) for index in attentions), last])


def find_spans(program: Program) -> list[Block]:
    """Return the program as one block or, if it has several outputs, cut it once per output.

    Each cut is at the last value that the output and everything later depend on.
    """
    outputs = set(refs_of(program.output))
    indices = [index for index, node in enumerate(program.nodes) if node.name in outputs]
    narrow = _borders(program) if len(indices) > 1 else []
    return _cut(program, narrow, [bisect_right(narrow, index) for index in indices])


def find_pieces(program: Program) -> list[Block]:
    """Cut the program finely: before each site, at the last value that everything later depends on.

    A piece holds one site, or all sites of an attention or of another residual branch.
    """
    narrow = _bottlenecks(program)
    products = {call.node.name for site in find_sites(program) for call in site.calls}
    indices = (index for index, node in enumerate(program.nodes) if node.name in products)
    return _cut(program, narrow, [bisect_left(narrow, index) for index in indices])


def _cut(program: Program, narrow: Sequence[int], counts: Iterable[int]) -> list[Block]:
    """Cut the program after the last of the first `count` bottlenecks, for each count above 0."""
    ends = {narrow[count - 1] + 1 for count in counts if count}
    if program.nodes:
        ends.add(len(program.nodes))
    blocks: list[Block] = []
    value, start = program.inputs[0], 0
    for end in sorted(ends):
        names = tuple(node.name for node in program.nodes[start:end])
        blocks.append(Block(value, names[-1], names))
        value, start = names[-1], end
    return blocks


def _borders(program: Program) -> list[int]:
    """Return the indices of the nodes after which a program may be cut into blocks: bottlenecks that are not lists."""
    lists = {name for node in program.nodes if node.op == "getitem" for name in node.refs()}
    return [index for index in _bottlenecks(program) if program.nodes[index].name not in lists]


def _bottlenecks(program: Program) -> list[int]:
    """Return the indices of the nodes whose value is, at that point, the only input-dependent value that is read later.

    Reading only a tensor's shape does not count, and neither does returning the tensor as an output.
    """
    steps = [(index, node) for index, node in enumerate(program.nodes) if node.op not in SHAPE_READERS]
    last_use = {name: index for index, node in steps for name in node.refs()}
    derived, live, bottlenecks = set(program.inputs), set(program.inputs), []
    for index, node in steps:
        if not derived.isdisjoint(node.refs()):
            derived.add(node.name)
            live.add(node.name)
        live = {name for name in live if last_use.get(name, -1) > index}
        if live == {node.name}:
            bottlenecks.append(index)
    return bottlenecks


def _adds_to_stream(program: Program, narrow: Sequence[int]) -> bool:
    """Return True if the last bottleneck adds to an earlier one, directly or through views and other additions."""
    *streams, last = (program.nodes[index] for index in narrow)
    front = [last] if last.op == "aten.add.Tensor" else []
    for node in front:  # the loop appends to this list
        if node in streams:
            return True
        if node.op in MOVES | {"aten.add.Tensor"}:
            front += [program.makers[name] for name in node.refs() if name in program.makers]
    return False
