"""Cut stretches out of a program, and tell which values a stretch passes on to the next."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any

from adalog.graph.program import Program, refs_of
from adalog.graph.tracing import size_in_bytes

# The size of a list of tensors, which cannot be passed on: more bytes than any memory has.
NEVER = 1 << 62


def cut(program: Program, values: Iterable[str], output: Any, fixed: Mapping[str, int]) -> Program:
    """Return the stretch of a program that computes an output from known values.

    The result takes the program's inputs first, then the known values. It computes values that depend on stored tensors
    alone, such as position tables, by itself. fixed: the sizes, by name, for the number of images that the result runs
    on.
    """
    values = [name for name in values if name not in program.inputs]
    needed, nodes = set(refs_of(output)), []
    for node in reversed(program.nodes):
        if node.name in needed and node.name not in values:
            unfixed = fixed.keys().isdisjoint(node.refs())
            nodes.append(node if unfixed else node.map_refs(lambda ref: fixed.get(ref.name, ref)))
            needed.update(nodes[-1].refs())
    tensors = {name: value for name, value in program.tensors.items() if name in needed}
    return replace(program, inputs=(*program.inputs, *values), nodes=tuple(nodes[::-1]), output=output, tensors=tensors)


def live_bytes(lives: Mapping[str, range], sizes: Mapping[str, int], count: int) -> list[int]:
    """Return the bytes of the live values at each time from 0 to `count`. lives: as `Program.lives`."""
    changes = [0] * (count + 2)
    for name, life in lives.items():
        changes[life.start] += sizes[name]
        changes[life.stop] -= sizes[name]
    return list(accumulate(changes[:-1]))


def passed_bytes(value: Any) -> int:
    """Return the bytes that a value takes if one stretch passes it on to the next."""
    return NEVER if isinstance(value, (tuple, list)) else size_in_bytes(value)


def peak_bytes(program: Program, shapes: Mapping[str, Any], lives: Mapping[str, range] | None = None) -> int:
    """Return the most bytes that the values of one forward take at a time.

    shapes: the result of `trace`. lives: when the values are held; by default, as long as something reads them.
    """
    sizes = {node.name: size_in_bytes(shapes[node.name]) for node in program.nodes}
    live = live_bytes(lives or program.lives(), sizes, len(program.nodes))
    return max((before + sizes[node.name] for before, node in zip(live, program.nodes, strict=False)), default=0)
