"""What lies between products as one kernel each, by `torch.compile`, where a C++ compiler is there.

A region is a run of float operations with what makes floats of accumulators before them, and digits after them. Regions
of the same structure, as the blocks of a transformer have them, share a kernel.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn

from adalog.graph.program import FACTORIES, FLOAT_PRODUCTS, PRODUCTS, Node, Program, Ref, map_refs, refs_of, resolve
from adalog.runtime.reference import ENCODE, PRODUCT

REGION, SUMS = "adalog.region", "adalog.sums"  # operations of fused programs alone
_OUTSIDE = {"aten.sym_size.int", *FACTORIES, *FLOAT_PRODUCTS, *PRODUCTS}
_ELEMENTWISE = {"aten.gelu.default", "aten.relu.default", "aten.silu.default"}
# Values in between are not stored, however many operations there are.
_OPTIONS: dict[str, Any] = {"realize_opcount_threshold": 1000, "realize_reads_threshold": 1000}


@dataclass(frozen=True)
class Pure:
    """A step without effects, that `torch.compile` reads: function(*choices, *values, *tensors)."""

    function: Callable[..., Any]
    choices: tuple[Any, ...]
    tensors: tuple[Tensor, ...]


def fuse(program: Program, apart: Mapping[str, Any]) -> tuple[Program, dict[str, Any]]:
    """The same program with a step for each region, which its first call compiles."""
    steps = dict(apart)
    kernels: dict[str, _Kernel] = {}
    split = list(_split(program, steps))
    nodes: list[Node] = []
    region: list[Node] = []
    for index, node in enumerate(split):
        inside = isinstance(steps.get(node.name), Pure) or (
            node.name not in steps and node.op not in _OUTSIDE and node.op.startswith(("aten.", "getitem"))
        )
        if inside:
            region.append(node)
        if region and (not inside or index == len(split) - 1):
            later = {name for each in split[index + inside :] for name in each.refs()} | set(refs_of(program.output))
            results = [each.name for each in region if each.name in later]
            if not any(each.name in steps for each in region):
                nodes += region
            else:
                kernel = _kernel(region, results, steps, kernels)
                if results == [region[-1].name] and _by_rows(region, apart):
                    first, last = region[0], region[-1]
                    steps[last.name] = _Rowwise(apart[first.name], kernel, apart[last.name])
                    nodes[-1] = replace(nodes[-1], name=last.name, args=(*nodes[-1].args, first.args[1]))
                else:
                    name = f"{region[0].name}#region"
                    steps[name] = kernel
                    nodes.append(Node(name, REGION, tuple(map(Ref, _inputs(region))), scope=region[0].scope))
                    nodes += [Node(result, "getitem", (Ref(name), i)) for i, result in enumerate(results)]
            region = []
        if not inside:
            nodes.append(node)
    return replace(program, nodes=tuple(nodes)), steps


def _split(program: Program, steps: dict[str, Any]) -> Iterator[Node]:
    """Encoders follow what they encode, and a product becomes its sums and what makes floats of them."""
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
        opened = steps[node.name].opened if node.op == PRODUCT else None
        if opened is None:
            yield node
        else:
            sums = f"{node.name}#sums"
            steps[sums], steps[node.name] = opened
            yield Node(sums, SUMS, node.args[:2], scope=node.scope)
            yield Node(node.name, REGION, (Ref(sums), node.args[2]), scope=node.scope)
        yield from encoders.get(node.name, [])


def _inputs(nodes: list[Node]) -> list[str]:
    """What they read that they do not make, in order."""
    made = {node.name for node in nodes}
    return list(dict.fromkeys(name for node in nodes for name in node.refs() if name not in made))


class _Kernel:
    """A module compiled by its first call: that takes time, and fails where there is no compiler."""

    def __init__(self, module: nn.Module):
        self._module = module

    def __call__(self, *args: Tensor) -> tuple[Any, ...]:
        return self._compiled(*args)

    @cached_property
    def _compiled(self) -> Callable[..., tuple[Any, ...]]:
        return torch.compile(self._module, fullgraph=True, options=_OPTIONS)


def _kernel(
    nodes: list[Node], results: list[str], steps: dict[str, Any], kernels: dict[str, _Kernel]
) -> Callable[..., tuple[Any, ...]]:
    """From a region's inputs to its results; kernels: those of other structures, by their code."""
    graph = fx.Graph()
    values = {name: graph.placeholder(f"x{i}") for i, name in enumerate(_inputs(nodes))}
    pure = {node.name: steps.pop(node.name) for node in nodes if node.name in steps}
    tensors = [tensor for each in pure.values() for tensor in each.tensors]
    given = iter([graph.placeholder(f"t{i}") for i in range(len(tensors))])

    def read(ref: Ref) -> fx.Node:
        return values[ref.name]

    for node in nodes:
        args = map_refs(node.args, read)
        if node.name in pure:
            step = pure[node.name]
            own = (next(given) for _ in step.tensors)
            values[node.name] = graph.call_function(step.function, (*step.choices, *args, *own))
        else:
            kwargs = {key: map_refs(value, read) for key, value in node.kwargs.items()}
            values[node.name] = graph.call_function(resolve(node.op), args, kwargs)
    graph.output(tuple(values[name] for name in results))
    module = fx.GraphModule(nn.Module(), graph)
    kernel = kernels.setdefault(module.code, _Kernel(module))
    return lambda *args: kernel(*args, *tensors)


def _by_rows(nodes: list[Node], apart: Mapping[str, Any]) -> bool:
    """Whether a region is a linear's outputs, an activation and an encoder: large, but one row like another."""
    last = nodes[-1]
    return (
        last.op == ENCODE
        and apart[last.name].by_value
        and hasattr(apart.get(nodes[0].name), "sums_by_rows")
        and all(node.op in _ELEMENTWISE for node in nodes[1:-1])
        and all(list(node.refs()) == [before.name] for before, node in pairwise(nodes))
    )


class _Rowwise:
    """A linear and what follows, some rows at a time, whose accumulators stay in the cache."""

    def __init__(self, product: Any, kernel: Callable[..., tuple[Any, ...]], encoder: Any):
        self._product, self._kernel, self._encoder = product, kernel, encoder

    def __call__(self, left: list[Tensor], right: None, bias: Tensor | None) -> list[Tensor]:
        shape = (*left[0].shape[:-1], self._product.columns)
        results: list[Tensor] = self._encoder.room(shape, left[0].device)
        rows = [result.view(-1, shape[-1]) for result in results]
        for span, sums in self._product.sums_by_rows(left):
            (digits,) = self._kernel(sums, *([] if bias is None else [bias]))
            for put, digit in zip(rows, digits, strict=True):
                put[span] = digit
        return results
