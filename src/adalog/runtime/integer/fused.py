"""Fuse several steps into one, so that large values between them stay in the cache."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from adalog.graph.activations import BY_OPERATION
from adalog.graph.program import Node, Program, refs_of
from adalog.runtime.integer.encode import DigitEncoder
from adalog.runtime.integer.memory import CHUNK, scratch
from adalog.runtime.integer.products import BatchedProduct, RowProduct
from adalog.runtime.reference import ENCODE, PRODUCT


class LinearChain:
    """A linear, an activation function and an encoder, which run some rows at a time."""

    def __init__(self, product: RowProduct, activation: Callable[[Tensor], Tensor], encoder: DigitEncoder):
        self._product, self._activation, self._encoder = product, activation, encoder

    def __call__(self, left: list[Tensor], right: None, bias: Tensor | None) -> list[Tensor]:
        shape = *left[0].shape[:-1], self._product.columns
        results = self._encoder.empty(shape, left[0].device)
        flat = [result.view(-1, shape[-1]) for result in results]
        for span, rows in self._product.outputs_by_rows(left, bias):
            self._encoder(self._activation(rows), [result[span] for result in flat])
        return results


class FusedAttention:
    """Q K^T, its scaling, the softmax over the last dimension, an encoder and A V, which run some images at a time."""

    def __init__(self, scores: BatchedProduct, factor: float, encoder: DigitEncoder, product: BatchedProduct):
        self._scores, self._factor, self._encoder, self._product = scores, factor, encoder, product

    def __call__(self, *operands: list[Tensor]) -> Tensor:
        """Return the output of the attention. operands: the digits of queries, transposed keys and values."""
        queries, keys, _ = (operand[0] for operand in operands)
        alike = all(
            digit.ndim > 3 and digit.shape[:-2] == queries.shape[:-2] for operand in operands for digit in operand
        )
        if not alike or not len(queries) or queries.device.type != "cpu":
            weights = self._scores(operands[0], operands[1]).mul_(self._factor).softmax(-1)
            return self._product(self._encoder(weights), operands[2])
        self._scores.site.check_terms(queries.shape[-1])
        count = max(1, 4 * CHUNK // max(1, queries[0, ..., 0].numel() * keys.shape[-1]))
        groups = zip(
            *(zip(*(digit.split(count) for digit in operand), strict=True) for operand in operands), strict=True
        )
        return torch.cat([self._attend(*map(list, group)) for group in groups])

    def _attend(self, queries: list[Tensor], keys: list[Tensor], values: list[Tensor]) -> Tensor:
        (left,), (right,) = queries, keys
        shape = *left.shape[:-1], right.shape[-1]
        scores, weights = (scratch(name, shape, left.dtype, left.device) for name in ("scores", "attention"))
        torch.bmm(left.flatten(0, -3), right.flatten(0, -3), out=scores.flatten(0, -3))
        torch.softmax(scores.mul_(self._scores.site.scales[0]).mul_(self._factor), -1, out=weights)
        digits = self._encoder.scratch(shape, left.device)
        return self._product(self._encoder(weights, digits), values)


def fuse(program: Program, steps: Mapping[str, Any]) -> tuple[Program, dict[str, Any]]:
    """Return the program and its functions, with a `LinearChain` or `FusedAttention` in place of steps it fits."""
    steps = dict(steps)
    nodes = {node.name: node for node in program.nodes}
    following = _only_readers(program)
    for node in program.nodes:
        step = steps.get(node.name)
        if isinstance(step, RowProduct):
            _fuse_linear(node, step, nodes, steps, following)
        elif isinstance(step, BatchedProduct):
            _fuse_attention(node, step, nodes, steps, following)
    return replace(program, nodes=tuple(nodes.values())), steps


def _only_readers(program: Program) -> dict[str, Node]:
    """Return the reader of each value that exactly one node reads, as its first argument."""
    readers, outputs = program.consumers(), set(refs_of(program.output))
    return {
        name: reading[0]
        for name, reading in readers.items()
        if name not in outputs and len(reading) == 1 and list(reading[0].refs())[:1] == [name]
    }


def _next(node: Node | None, ops: Collection[str], following: Mapping[str, Node]) -> Node | None:
    """Return the only reader of a node if it is one of these operations, or None."""
    node_after = None if node is None else following.get(node.name)
    return node_after if node_after is not None and node_after.op in ops else None


def _fuse_linear(
    node: Node, step: RowProduct, nodes: dict[str, Node], steps: dict[str, Any], following: Mapping[str, Node]
) -> None:
    """Replace a linear, an activation function and an encoder by a chain, if they follow each other."""
    activation = _next(node, BY_OPERATION, following)
    encode = _next(activation, [ENCODE], following)
    if activation is None or encode is None or step.site.geometry is not None or not steps[encode.name].by_value:
        return
    steps[encode.name] = LinearChain(step, _in_place(activation), steps[encode.name])
    nodes[encode.name] = replace(node, name=encode.name)
    del nodes[node.name], nodes[activation.name]


def _in_place(node: Node) -> Callable[[Tensor], Tensor]:
    """Return the activation function of a node, computed in place."""
    function = getattr(torch.ops.aten, f"{BY_OPERATION[node.op].name}_").default
    return lambda x: function(x, *node.args[1:], **node.kwargs)


def _fuse_attention(
    node: Node, step: BatchedProduct, nodes: dict[str, Node], steps: dict[str, Any], following: Mapping[str, Node]
) -> None:
    """Replace two products and the softmax between them by an attention, if they follow each other."""
    scaling = _next(node, ["aten.mul.Tensor"], following)
    if scaling is not None and not isinstance(scaling.args[1], float):
        return
    softmax = _next(scaling or node, ["aten.softmax.int"], following)
    encode = _next(softmax, [ENCODE], following)
    last = _next(encode, [PRODUCT], following)
    if softmax is None or encode is None or last is None or softmax.args[1:] != (-1,) or softmax.kwargs:
        return
    encoder, product = steps[encode.name], steps[last.name]
    if product.site.weight is not None:  # a linear reads the softmax, not a product with values
        return
    per_image = any(scale.ndim > 3 and len(scale) > 1 for scale in (*step.site.scales, *product.site.scales))
    if not encoder.by_value or not step.is_single or per_image:
        return
    steps[last.name] = FusedAttention(step, scaling.args[1] if scaling is not None else 1.0, encoder, product)
    nodes[last.name] = replace(last, args=(*node.args[:2], last.args[1]))
    for fused in filter(None, (node, scaling, softmax, encode)):
        del nodes[fused.name]
