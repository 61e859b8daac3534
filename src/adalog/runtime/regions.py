"""Fuse all operations between two products into one kernel of `torch.compile`, if a C++ compiler is installed.

A region is a sequence of float operations, together with the conversion of accumulators to floats before it and the
encoding into digits after it. Regions of the same structure share a kernel, for example in the blocks of a transformer.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn

from adalog.graph.activations import BY_OPERATION
from adalog.graph.operations import FACTORIES, FLOAT_PRODUCTS, PRODUCTS, resolve
from adalog.graph.program import Node, Program, Ref, map_refs, refs_of
from adalog.runtime.integer.encode import DigitEncoder
from adalog.runtime.integer.products import RowProduct
from adalog.runtime.integer.pure import Pure
from adalog.runtime.reference import ENCODE, PRODUCT

REGION, SUMS = "adalog.region", "adalog.sums"  # operations that only programs with regions have
_OUTSIDE = {"aten.sym_size.int", *FACTORIES, *FLOAT_PRODUCTS, *PRODUCTS}
# The compiler computes values within a region again instead of storing them, however many operations they take.
_OPTIONS: dict[str, Any] = {"realize_opcount_threshold": 1000, "realize_reads_threshold": 1000}

Kernel = Callable[..., tuple[Any, ...]]  # from a region's inputs to its results


def fuse(program: Program, apart: Mapping[str, Any]) -> tuple[Program, dict[str, Any]]:
    """Return the program with one step per region. The first call of such a step compiles it.

    apart: the functions of the program's encoders and products, by the name of their node.
    """
    steps = dict(apart)
    nodes_apart = list(_open(program, steps))
    later = set(refs_of(program.output))  # the values that later nodes or the output read
    runs: list[tuple[bool, list[Node], set[str]]] = []
    for node in reversed(nodes_apart):
        inside = _is_inside(node, steps)
        if not runs or not inside or not runs[-1][0]:
            runs.append((inside, [], set(later)))
        runs[-1][1].insert(0, node)
        later |= set(node.refs())
    kernels: dict[str, _LazyModule] = {}
    nodes: list[Node] = []
    for inside, run, reads in reversed(runs):
        if not inside or not any(node.name in steps for node in run):
            nodes += run
            continue
        results = [node.name for node in run if node.name in reads]
        kernel = _kernel(run, results, steps, kernels)
        first, last = run[0], run[-1]
        if results == [last.name] and _is_by_rows(run, apart):
            steps[last.name] = Rowwise(apart[first.name], kernel, apart[last.name])
            nodes[-1] = replace(nodes[-1], name=last.name, args=(*nodes[-1].args, first.args[1]))
        else:
            name = f"{first.name}#region"
            steps[name] = kernel
            nodes.append(Node(name, REGION, tuple(map(Ref, _inputs(run))), scope=first.scope))
            nodes += [Node(result, "getitem", (Ref(name), i)) for i, result in enumerate(results)]
    return replace(program, nodes=tuple(nodes)), steps


def _open(program: Program, steps: dict[str, Any]) -> Iterator[Node]:
    """Yield the nodes of a program. A product becomes two nodes: its sums, and their conversion to floats.

    Each encoder follows the value that it encodes. The steps of encoders and of these conversions become `Pure`.
    """
    encoders: dict[str, list[Node]] = {}
    for node in program.nodes:
        if node.op == ENCODE:
            encoders.setdefault(node.args[0].name, []).append(node)
            steps[node.name] = steps[node.name].pure or steps[node.name]
    for name in (*program.inputs, *program.tensors):
        yield from encoders.get(name, [])
    for node in program.nodes:
        if node.op == ENCODE:
            continue
        parts = steps[node.name].sums_and_finish if node.op == PRODUCT else None
        if parts is None:
            yield node
        else:
            sums = f"{node.name}#sums"
            steps[sums], steps[node.name] = parts
            yield Node(sums, SUMS, node.args[:2], scope=node.scope)
            yield Node(node.name, REGION, (Ref(sums), node.args[2]), scope=node.scope)
        yield from encoders.get(node.name, [])


def _is_inside(node: Node, steps: Mapping[str, Any]) -> bool:
    """Return True if a node can be part of a region."""
    if node.name in steps:
        return isinstance(steps[node.name], Pure)
    return node.op not in _OUTSIDE and node.op.startswith(("aten.", "getitem"))


def _inputs(nodes: list[Node]) -> list[str]:
    """Return the names of the values that these nodes read but do not compute, in order."""
    names = {node.name for node in nodes}
    return list(dict.fromkeys(name for node in nodes for name in node.refs() if name not in names))


@dataclass(frozen=True, eq=False)
class _LazyModule:
    """A module that is compiled by its first call. That call takes time, and fails without a compiler."""

    module: nn.Module

    def __call__(self, *args: Tensor) -> tuple[Any, ...]:
        return self._function(*args)

    @cached_property
    def _function(self) -> Kernel:
        return torch.compile(self.module, fullgraph=True, options=_OPTIONS)


def _kernel(nodes: list[Node], results: list[str], steps: dict[str, Any], kernels: dict[str, _LazyModule]) -> Kernel:
    """Return the function that computes these results of a region. kernels: the kernels so far, by their code."""
    graph = fx.Graph()
    values = {name: graph.placeholder(f"x{i}") for i, name in enumerate(_inputs(nodes))}
    pure = {node.name: steps.pop(node.name) for node in nodes if node.name in steps}
    tensors = [tensor for step in pure.values() for tensor in step.tensors]
    placeholders = iter([graph.placeholder(f"t{i}") for i in range(len(tensors))])

    def read(ref: Ref) -> fx.Node:
        return values[ref.name]

    for node in nodes:
        args = map_refs(node.args, read)
        if node.name in pure:
            step = pure[node.name]
            own = (next(placeholders) for _ in step.tensors)
            values[node.name] = graph.call_function(step.function, (*step.choices, *args, *own))
        else:
            kwargs = {key: map_refs(value, read) for key, value in node.kwargs.items()}
            values[node.name] = graph.call_function(resolve(node.op), args, kwargs)
    graph.output(tuple(values[name] for name in results))
    module = fx.GraphModule(nn.Module(), graph)
    kernel = kernels.setdefault(module.code, _LazyModule(module))
    return lambda *args: kernel(*args, *tensors)


def _is_by_rows(nodes: list[Node], apart: Mapping[str, Any]) -> bool:
    """Return True if a region is only a linear, activation functions and an encoder, so that it can run by rows."""
    last = apart.get(nodes[-1].name)
    return (
        isinstance(last, DigitEncoder)
        and last.by_value
        and isinstance(apart.get(nodes[0].name), RowProduct)
        and all(node.op in BY_OPERATION for node in nodes[1:-1])
        and all(list(node.refs()) == [before.name] for before, node in pairwise(nodes))
    )


class Rowwise:
    """A linear and the region after it. They run some rows at a time, so that the accumulators stay in the cache."""

    def __init__(self, product: RowProduct, kernel: Kernel, encoder: DigitEncoder):
        self._product, self._kernel, self._encoder = product, kernel, encoder

    def __call__(self, left: list[Tensor], right: None, bias: Tensor | None) -> list[Tensor]:
        shape = (*left[0].shape[:-1], self._product.columns)
        results = self._encoder.empty(shape, left[0].device)
        flat = [result.view(-1, shape[-1]) for result in results]
        for span, sums in self._product.sums_by_rows(left):
            (digits,) = self._kernel(sums, *([] if bias is None else [bias]))
            for result, digit in zip(flat, digits, strict=True):
                result[span] = digit
        return results
