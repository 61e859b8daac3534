"""Build the quantized program from a program and the quantizers assigned to its sites."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from adalog.graph.convolution import conv_geometry
from adalog.graph.operations import FAKE_QUANTIZE
from adalog.graph.program import Node, Program, Ref
from adalog.graph.sites import Pair, Site, read_parameters
from adalog.quantizers import Assignment, Fold, QuantizedTensor, Quantizer


@dataclass(frozen=True)
class SiteGroup:
    """Sites that are searched together: a product, or linears of one activation, with the norm to fold, if any."""

    sites: tuple[Site, ...]
    pair: Pair | None = None

    @property
    def first(self) -> Site:
        return self.sites[0]

    @property
    def name(self) -> str:
        return self.first.name

    @property
    def read(self) -> tuple[str, ...]:
        """The left operand of each call, which all sites of the group share."""
        return tuple(call.left for call in self.first.calls)

    @property
    def calls(self) -> tuple[tuple[Site, ...], ...]:
        """The multiplications of all sites, one tuple per call."""
        return tuple(zip(*(site.calls for site in self.sites), strict=True))

    def until(self, call: int) -> "SiteGroup":
        """Return the group without the calls after this one, counted from 0."""
        return replace(self, sites=tuple(replace(site, again=site.again[:call]) for site in self.sites))

    @property
    def nodes(self) -> tuple[str, ...]:
        """The node names of all multiplications in the group."""
        return tuple(call.node.name for site in self.sites for call in site.calls)

    @property
    def changes(self) -> set[str]:
        """The node names of all operations that an assignment of the group changes."""
        return {*self.nodes} | ({self.pair.norm.name} if self.pair is not None else set())


Assigned = Sequence[tuple[SiteGroup, Assignment]]  # the assignment of each group, in order of execution
# What assignments made of a program's tensors, by the node that reads them and the assignment's identity. The value
# holds the assignment too, so that it lives as long as its identity is used.
RewriteCache = dict[tuple[str, int], tuple[Assignment, Any]]


def group_sites(sites: Sequence[Site], pairs: Sequence[Pair]) -> list[SiteGroup]:
    """Group the sites that are searched together, in order of execution."""
    folded = {name: pair for pair in pairs if not pair.refusal for name in pair.sites}
    by_reads: dict[tuple[str, ...], list[Site]] = {}
    for site in sites:
        read = tuple(call.left for call in site.calls)
        key = ("linear", *read) if site.role == "linear" else (site.role, site.name)
        by_reads.setdefault(key, []).append(site)
    return [SiteGroup(tuple(members), folded.get(members[0].name)) for members in by_reads.values()]


def rewrite(program: Program, assigned: Assigned, cache: RewriteCache | None = None) -> Program:
    """Return the program with quantized operands, coded weights, folded norms and absorbed offsets.

    cache: the results of earlier calls with the same program, so that weights are not computed again; it is added to.
    """
    build = _Build(program, {} if cache is None else cache)
    for group, assignment in assigned:
        build.place(group, assignment)
    return build.program()


def absorbs_offset(site: Site) -> bool:
    """Return True if a bias can absorb the offset of a site's input, which the zeros of padding do not contain."""
    return site.role == "linear" or (site.role == "conv" and not any(conv_geometry(site.node)[1]))


def _absorb(site: Site, quantizer: Quantizer | None) -> tuple[float, Quantizer | None]:
    """Return the offset that a site's bias absorbs, and the quantizer of its input after that."""
    return (0.0, quantizer) if quantizer is None or not absorbs_offset(site) else quantizer.absorb_offset()


def exact_bias(program: Program, group: SiteGroup, assignment: Assignment) -> Tensor:
    """Return the biases of a group's float weights for the inputs that the assignment gives them: (O,)."""
    offset, _ = _absorb(group.first, assignment.left)
    biases = []
    for site in group.sites:
        weight, own = program.tensors[site.right], None if site.bias is None else program.tensors[site.bias]
        *_, bias = _quantized_weight(weight, own, None, assignment.fold, offset, None)
        biases.append(weight.new_zeros(len(weight)) if bias is None else bias.expand(len(weight)))
    return torch.cat(biases)


def absorb_offset(weight_hat: Tensor, bias: Tensor | None, offset: float) -> Tensor:
    """Return b - offset * W_hat 1 (Eq. 15), for an input that keeps its offset. weight_hat: dequantized, (O, I)."""
    shift = (weight_hat.double().sum(dim=1) * offset).to(weight_hat.dtype)
    return -shift if bias is None else bias - shift


class _Build:
    """A program that is being rewritten, group by group."""

    def __init__(self, program: Program, cache: RewriteCache):
        self._program = program
        self._cache = cache
        self._tensors: dict[str, Tensor] = dict(program.tensors)
        self._weights: dict[str, QuantizedTensor] = {}
        self._quantizers: dict[str, Quantizer] = {}
        self._before: dict[str, list[Node]] = {}
        self._nodes = dict(program.makers)  # in order of execution
        self._folded: set[str] = set()
        self._names = {*program.inputs, *program.tensors, *self._nodes}

    def place(self, group: SiteGroup, assignment: Assignment) -> None:
        """Quantize the operands of a group's sites."""
        first, fold = group.first, assignment.fold
        if fold is not None and group.pair is not None:
            self._fold_norm(group.pair, assignment, fold)
        if first.role in ("qk", "av"):
            right = assignment.right
            assert right is None or isinstance(right, Quantizer)
            left = assignment.left
            right = right and right.map(lambda value: _without_lead(value.transpose(-1, -2)))  # searched transposed
            if left is not None and first.left not in self._program.of_inputs:
                left = left.map(_without_lead)
            left_ref = self._fake(first, first.left, f"{first.name}.left", left)
            right_ref = self._fake(first, first.right, f"{first.name}.right", right)
            self._nodes[first.node.name] = replace(first.node, args=(left_ref, right_ref, *first.node.args[2:]))
            return
        offset, quantizer = _absorb(first, assignment.left)
        groups = conv_geometry(first.node)[-1] if first.role == "conv" else 1
        if quantizer is not None and groups > 1 and quantizer.scale.numel() > 1:
            channels = self._program.tensors[first.right].shape[1]
            quantizer = quantizer.map(
                lambda value: value.reshape(groups, 1, 1).repeat_interleave(channels, dim=0)  # for (B, channels, H, W)
            )
        values = [call.left for call in first.calls]
        if fold is not None and group.pair is not None and group.pair.shifted:
            values = [self._shift(first, fold)]
        name = f"{first.name}.input"
        inputs = [self._fake(*call_value, name, quantizer) for call_value in zip(first.calls, values, strict=True)]
        start = 0
        for site in group.sites:
            rows = range(start, start + len(self._program.tensors[site.right]))
            self._place_weight(site, inputs, assignment, offset, rows)
            start = rows.stop

    def _fold_norm(self, pair: Pair, assignment: Assignment, fold: Fold) -> None:
        norm = pair.norm
        if norm.name in self._folded:  # the norm feeds several groups
            return
        refs = [ref for ref in read_parameters(norm) if ref is not None]
        names = [self._own(ref.name, [norm]) for ref in refs]
        key = norm.name, id(assignment)
        if key not in self._cache:
            beta = torch.zeros_like(fold.beta) if pair.shifted else fold.beta
            parameters = [self._tensors[ref.name] for ref in refs]
            self._cache[key] = assignment, replace(fold, beta=beta).norm(*parameters)
        self._tensors |= dict(zip(names, self._cache[key][1], strict=True))
        self._nodes[norm.name] = norm.rename(dict(zip((ref.name for ref in refs), names, strict=True)))
        self._folded.add(norm.name)

    def _shift(self, site: Site, fold: Fold) -> str:
        """Subtract the fold's beta from a linear's input, and not in the norm; see `Pair`."""
        name = self._new(f"{site.name}.shifted")
        self._tensors[f"{name}#beta"] = -fold.beta
        self._before.setdefault(site.node.name, []).append(
            Node(name, "aten.add.Tensor", (Ref(site.left), Ref(f"{name}#beta")), scope=site.node.scope)
        )
        return name

    def _place_weight(
        self, site: Site, inputs: Sequence[Ref], assignment: Assignment, offset: float, rows: range
    ) -> None:
        """Quantize a site's weight, the `rows` of its group's, and let its calls, with these inputs, read it."""
        calls = [call.node for call in site.calls]
        bias = None if site.bias is None else self._tensors[site.bias]
        key = site.node.name, id(assignment)
        if key not in self._cache:
            original, right = self._program.tensors[site.right], _rows(assignment.right, rows)
            fitted = None if assignment.bias is None else _between(assignment.bias, rows)
            self._cache[key] = assignment, _quantized_weight(original, bias, right, assignment.fold, offset, fitted)
        stored, weight, new_bias = self._cache[key][1]
        name = self._own(site.right, calls)
        if stored is not None:
            self._weights[name] = stored
        self._tensors[name] = weight
        bias_ref = site.node.args[2] if len(site.node.args) > 2 else None
        if new_bias is not None and new_bias is not bias:
            bias_name = self._new(f"{site.name}.bias") if site.bias is None else self._own(site.bias, calls)
            self._tensors[bias_name] = new_bias
            bias_ref = Ref(bias_name)
        for node, x in zip(calls, inputs, strict=True):
            self._nodes[node.name] = replace(node, args=(x, Ref(name), bias_ref, *node.args[3:]))

    def _fake(self, call: Site, value: str, quantizer_name: str, quantizer: Quantizer | None) -> Ref:
        """Fake-quantize a value before a call, and return the reference; the calls of a site share the quantizer."""
        if quantizer is None:
            return Ref(value)
        again = quantizer_name in self._quantizers
        name = self._new(f"{quantizer_name}#{call.node.name}" if again else quantizer_name)
        self._quantizers[quantizer_name] = quantizer
        self._before.setdefault(call.node.name, []).append(
            Node(name, FAKE_QUANTIZE, (Ref(value), quantizer_name), scope=call.node.scope)
        )
        return Ref(name)

    def _new(self, name: str) -> str:
        """Reserve a name for a new value, and return it: `name`, with "#" appended while that name is taken."""
        while name in self._names:
            name += "#"
        self._names.add(name)
        return name

    def _own(self, name: str, nodes: Sequence[Node]) -> str:
        """Return the tensor's name, or a new name for these nodes if other nodes read the tensor too."""
        return name if self._program.uses.get(name, 0) == len(nodes) else f"{name}#{nodes[0].name}"

    def program(self) -> Program:
        nodes: list[Node] = []
        for name, node in self._nodes.items():
            nodes += (*self._before.get(name, ()), node)
        tensors = {name: value.contiguous() for name, value in self._tensors.items()}
        return replace(
            self._program, nodes=tuple(nodes), tensors=tensors, quantizers=self._quantizers, weights=self._weights
        ).prune()


def _quantized_weight(
    original: Tensor,
    bias: Tensor | None,
    right: Quantizer | QuantizedTensor | None,
    fold: Fold | None,
    offset: float,
    fitted_bias: Tensor | None,
) -> tuple[QuantizedTensor | None, Tensor, Tensor | None]:
    """Return a site's codes, None if it stays float, its weight as it is computed with, and its bias.

    offset: what the bias absorbs. fitted_bias: a bias that replaces the site's own.
    """
    values, shape = original.flatten(1), original.shape
    if fold is not None and (fitted_bias is None or not isinstance(right, QuantizedTensor)):
        values, bias = fold.linear(original, bias)
    stored, weight = None, values.reshape(shape)
    if right is not None:
        if isinstance(right, Quantizer):
            right = QuantizedTensor.nearest(values, right)
        lead = (-1, *(1 for _ in shape[1:]))
        stored = QuantizedTensor(right.codes.reshape(shape), right.quantizer.map(lambda value: value.reshape(lead)))
        weight = stored.dequantize()
    if fitted_bias is not None:
        return stored, weight, fitted_bias
    return stored, weight, absorb_offset(weight.flatten(1), bias, offset) if offset else bias


def _rows(right: Quantizer | QuantizedTensor | None, rows: range) -> Quantizer | QuantizedTensor | None:
    """Return these rows of a weight, counted through all groups; its quantizer has the shape (..., rows, 1)."""

    def some(value: Tensor) -> Tensor:
        return _between(value.flatten(0, -2), rows)

    if right is None:
        return None
    if isinstance(right, QuantizedTensor):
        return QuantizedTensor(some(right.codes), right.quantizer.map(some))
    return right.map(some)


def _between(value: Tensor, rows: range) -> Tensor:
    """Return these entries of the first dimension, without a slice to differentiate if they are all."""
    return value if len(rows) == len(value) else value[rows.start : rows.stop]


def _without_lead(value: Tensor) -> Tensor:
    """Drop the leading dimensions of size one, which a table that all images share does not have."""
    while value.ndim and value.shape[0] == 1:
        value = value.squeeze(0)
    return value
