"""Cut stretches out of a program, and tell which values a stretch passes on to the next."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any

from adalog.graph.program import Program
from adalog.graph.tracing import size_in_bytes

# The size of a list of tensors, which cannot be passed on: more bytes than any memory has.
NEVER = 1 << 62


def cut(program: Program, values: Iterable[str], output: Any, fixed: Mapping[str, int]) -> Program:
    """Return the stretch of a program that computes an output from known values.

    The result takes the program's inputs first, then the known values. fixed: the sizes, by name, for the number of
    images that the result runs on.
    """
    values = [name for name in values if name not in program.inputs]
    nodes = tuple(
        node if fixed.keys().isdisjoint(node.refs()) else node.map_refs(lambda ref: fixed.get(ref.name, ref))
        for node in program.nodes
        if node.name not in values
    )
    return replace(program, inputs=(*program.inputs, *values), nodes=nodes, output=output).prune()


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
    """Return the most bytes that values take at a time. shapes: from `trace`. lives: by default, while needed."""
    sizes = {node.name: size_in_bytes(shapes[node.name]) for node in program.nodes}
    live = live_bytes(lives or program.lives(), sizes, len(program.nodes))
    return max((before + sizes[node.name] for before, node in zip(live, program.nodes, strict=False)), default=0)
