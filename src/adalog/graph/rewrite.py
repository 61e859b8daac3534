"""The quantized program, put together from what was found for each site."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from adalog.graph.program import FAKE_QUANTIZE, Node, Program, QuantizedTensor, Ref
from adalog.graph.reparam import absorb_offset, fold_linear, fold_norm
from adalog.graph.sites import Site, conv_geometry
from adalog.quantizers import LogQuantizer, Quantizer, SplitUniformQuantizer, TwinUniformQuantizer, UniformQuantizer
from adalog.search.product import Found


def describe(quantizer: Quantizer | None, count: int = 0) -> str:
    """A quantizer in a few words: "4-bit uniform x 3", "4-bit log 2^(20/37) u8". count: of its scales."""
    if quantizer is None:
        return "float"
    count = count or quantizer.scale.numel()
    several = f" x {count}" if count > 1 else ""
    if isinstance(quantizer, UniformQuantizer):
        return f"{quantizer.bits}-bit uniform{several}"
    if isinstance(quantizer, TwinUniformQuantizer):
        return f"{quantizer.bits}-bit twin uniform"
    if isinstance(quantizer, SplitUniformQuantizer):
        return f"{quantizer.bits}-bit split uniform"
    beyond = " and a zero beyond its codes" if quantizer.beyond == "zero" else ""
    table = f" u{quantizer.width}" if quantizer.width else ""
    return f"{quantizer.bits}-bit log 2^({quantizer.q}/{quantizer.r}){table}{beyond}"


@dataclass(frozen=True)
class Placed:
    """What was found for the sites of one product, with the fold (ratio, beta) of their norm, if it is folded."""

    sites: tuple[Site, ...]
    found: Found
    norm: Node | None = None
    fold: tuple[Tensor, Tensor] | None = None


def built(program: Program, placed: Sequence[Placed]) -> Program:
    """The program with what was found in its place."""
    build = Build(program)
    for each in placed:
        if each.fold is not None and each.norm is not None:
            build.fold_norm(each.norm, *each.fold)
        build.place(each.sites, each.found)
    return build.program()


class Build:
    """The quantized program, put together site by site."""

    def __init__(self, program: Program):
        self._program = program
        self._tensors: dict[str, Tensor] = dict(program.tensors)
        self._weights: dict[str, QuantizedTensor] = {}
        self._quantizers: dict[str, Quantizer] = {}
        self._before: dict[str, list[Node]] = {}
        self._nodes: dict[str, Node] = {node.name: node for node in program.nodes}
        self._folds: dict[str, tuple[Tensor, Tensor]] = {}
        self._uses: dict[str, int] = {}
        for node in program.nodes:
            for name in node.refs():
                self._uses[name] = self._uses.get(name, 0) + 1

    def fold_norm(self, norm: Node, ratio: Tensor, beta: Tensor) -> None:
        """Fold a pair: the norm now, its linears (whose weights come folded) with the same ratio, beta in `place`."""
        if norm.name in self._folds:  # it feeds several groups
            return
        weight, bias = (self._tensors[norm.args[i].name] for i in (2, 3))
        names = [self._own(norm.args[i].name, norm) for i in (2, 3)]
        self._tensors[names[0]], self._tensors[names[1]] = fold_norm(weight, bias, ratio, beta)
        args = (*norm.args[:2], Ref(names[0]), Ref(names[1]), *norm.args[4:])
        self._nodes[norm.name] = replace(norm, args=args)
        self._folds[norm.name] = (ratio, beta)

    def place(self, sites: Sequence[Site], found: Found) -> None:
        """Quantize the operands of a group of sites."""
        first = sites[0]
        if first.role in ("qk", "av"):
            left = self._fake(first, first.left, "left", found.left)
            right = self._fake(first, first.right, "right", found.right and found.right.map(_transposed))
            self._nodes[first.node.name] = replace(first.node, args=(left, right, *first.node.args[2:]))
            return
        quantizer = found.left
        _, padding, _, groups = conv_geometry(first.node) if first.role == "conv" else ((), (0,), (), 1)
        offset = 0.0
        if isinstance(quantizer, LogQuantizer) and quantizer.offset and not any(padding):
            offset, quantizer = quantizer.offset, replace(quantizer, keeps_offset=True)
        if isinstance(quantizer, UniformQuantizer) and first.role == "conv" and groups > 1:
            quantizer = quantizer.map(lambda value: _per_channel(value, self._program.tensors[first.right], groups))
        input_ref = self._fake(first, first.left, "input", quantizer)
        start = 0
        for site in sites:
            end = start + self._program.tensors[site.right].shape[0]
            weights = found.right and found.right.map(functools.partial(_rows, start, end))
            self._place_weight(site, input_ref, weights, offset)
            start = end

    def _place_weight(self, site: Site, x: Ref, quantizer: Quantizer | None, offset: float) -> None:
        original = self._program.tensors[site.right]
        values, shape = original.flatten(1), original.shape
        bias = None if site.bias is None else self._tensors[site.bias]
        new_bias = bias
        fold = self._folds.get(site.left_source.node)
        if fold is not None:
            values, new_bias = fold_linear(original, bias, *fold)
        lead = (-1, *(1 for _ in shape[1:]))
        weight_name = self._own(site.right, site.node)
        if quantizer is None:
            self._tensors[weight_name] = values.reshape(shape)
        else:
            assert isinstance(quantizer, UniformQuantizer)
            codes = quantizer.quantize(values).to(torch.uint8).reshape(shape)
            stored = QuantizedTensor(codes, replace(quantizer, rounded_by=None).map(lambda value: value.reshape(lead)))
            self._weights[weight_name] = stored
            self._tensors[weight_name] = stored.dequantize()
        if offset:
            new_bias = absorb_offset(self._tensors[weight_name].flatten(1), new_bias, offset)
        bias_ref = site.node.args[2] if len(site.node.args) > 2 else None
        if new_bias is not None and new_bias is not bias:
            name = f"{site.name}.bias" if site.bias is None else self._own(site.bias, site.node)
            self._tensors[name] = new_bias
            bias_ref = Ref(name)
        self._nodes[site.node.name] = replace(site.node, args=(x, Ref(weight_name), bias_ref, *site.node.args[3:]))

    def _fake(self, site: Site, value: str, operand: str, quantizer: Quantizer | None) -> Ref:
        if quantizer is None:
            return Ref(value)
        name = f"{site.name}.{operand}"
        self._quantizers[name] = quantizer
        self._before.setdefault(site.node.name, []).append(
            Node(name, FAKE_QUANTIZE, (Ref(value), name), scope=site.node.scope)
        )
        return Ref(name)

    def _own(self, name: str, node: Node) -> str:
        """The tensor's name, or one of its own for this node where others read the tensor too."""
        return name if self._uses[name] == 1 else f"{name}#{node.name}"

    def program(self) -> Program:
        nodes = [
            each for node in self._program.nodes for each in (*self._before.get(node.name, []), self._nodes[node.name])
        ]
        tensors = {name: value.contiguous() for name, value in self._tensors.items()}
        whole = replace(
            self._program, nodes=tuple(nodes), tensors=tensors, quantizers=self._quantizers, weights=self._weights
        )
        return whole.pruned()


def _rows(start: int, end: int, value: Tensor) -> Tensor:
    """Some of the rows of (..., rows, 1), all groups counted through."""
    return value.flatten(0, -2)[start:end]


def _transposed(value: Tensor) -> Tensor:
    """For an operand that was searched transposed: one value a head, or one in all, is the same either way.

    Without the leading axes of one, which a table that all images share does not have.
    """
    value = value.transpose(-1, -2)
    while value.ndim and value.shape[0] == 1:
        value = value[0]
    return value


def _per_channel(value: Tensor, weight: Tensor, groups: int) -> Tensor:
    """(groups, 1, 1) -> (channels, 1, 1), to broadcast against (B, channels, H, W)."""
    return value.reshape(groups, 1, 1).repeat_interleave(weight.shape[1], dim=0)
