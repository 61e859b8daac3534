"""Run a program from any of its values to any others, on all images or on a few at a time."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from adalog.graph.operations import FAKE_QUANTIZE
from adalog.graph.program import Node, Program, Ref, map_refs, refs_of
from adalog.graph.tracing import Axis, image_axes, keeps_images_apart, size_in_bytes, sizes, trace

Chunk = dict[str, Tensor]  # the program's inputs and other values, by name, for some of the images


def cut(program: Program, known: Iterable[str], output: Any, fixed: Mapping[str, int]) -> Program:
    """Return the part of a program that computes an output from known values.

    The result takes the program's inputs first, then the known values. It computes values that depend on stored tensors
    alone, such as position tables, by itself. fixed: the sizes, by name, for the number of images that the result runs
    on.
    """
    known = [name for name in known if name not in program.inputs]
    needed, nodes = set(refs_of(output)), []
    for node in reversed(program.nodes):
        if node.name in needed and node.name not in known:
            nodes.append(fitted := _with_numbers(node, fixed))
            needed.update(fitted.refs())
    tensors = {name: value for name, value in program.tensors.items() if name in needed}
    return replace(program, inputs=(*program.inputs, *known), nodes=tuple(nodes[::-1]), output=output, tensors=tensors)


def _with_numbers(node: Node, fixed: Mapping[str, int]) -> Node:
    """Return the node with the references to these names replaced by their numbers."""
    if fixed.keys().isdisjoint(node.refs()):
        return node

    def fix(ref: Ref) -> Any:
        return fixed.get(ref.name, ref)

    return replace(
        node, args=map_refs(node.args, fix), kwargs={key: map_refs(arg, fix) for key, arg in node.kwargs.items()}
    )


class Batches:
    """Parts of a program, run on chunks of its images.

    Sizes and axes come from the program that this object was made with. Another program with the same names of values,
    such as the quantized one, can be run in its place.
    """

    def __init__(self, program: Program, images: Sequence[Tensor]):
        self.program = program
        self.images: Chunk = dict(zip(program.inputs, images, strict=True))
        self.count = len(images[0])
        self._sizes: dict[int, dict[str, int]] = {}  # by number of images

    @cached_property
    def axes(self) -> dict[str, Axis]:
        """The image axis of each value, for the values whose shapes determine it."""
        return image_axes(self.program, list(self.images.values()))

    def sizes(self, count: int) -> dict[str, int]:
        """Return the sizes in the program, by name, for this number of images."""
        if count not in self._sizes:
            self._sizes[count] = sizes(trace(self.program, list(self.images.values()), count))
        return self._sizes[count]

    def run(
        self,
        given: Chunk,
        names: Collection[str],
        program: Program | None = None,
        watch: Callable[[Node, tuple[Any, ...], Any], Any] | None = None,
        steps: Mapping[str, Callable[..., Any]] | None = None,
    ) -> Chunk:
        """Compute the named values from the given ones, for the images of the chunk.

        watch, steps: passed to `Program.run`.
        """
        output = {name: Ref(name) for name in names}
        stretch = cut(program or self.program, given, output, self.sizes(self.count_of(given)))
        result: Chunk = stretch.run([given[name] for name in stretch.inputs], watch, steps)
        return result

    def keeps_apart(self, given: Chunk, names: Collection[str], program: Program | None = None) -> bool:
        """Return True if the first two images of a chunk give the same named values alone as together."""
        for node in (program or self.program).nodes:
            if node.op == FAKE_QUANTIZE and node.name not in self.axes and node.args[0].name in self.axes:
                self.axes[node.name] = self.axes[node.args[0].name]
        if any(name not in self.axes for name in (*given, *names)):
            return False

        def run(first: int, count: int) -> Chunk:
            return self.run(self.part(given, first, count), names, program)

        return keeps_images_apart(run, names, self.axes)

    def count_of(self, chunk: Chunk) -> int:
        """Return the number of images in a chunk."""
        return len(chunk[self.program.inputs[0]])

    def part(self, chunk: Chunk, first: int, count: int) -> Chunk:
        """Return the values of a chunk for `count` images from number `first` on, as views."""
        result = {}
        for name, value in chunk.items():
            axis = self.axes[name]
            result[name] = value if axis is None else value.narrow(axis[0], first * axis[1], count * axis[1])
        return result

    def split(self, chunk: Chunk, size: int) -> list[Chunk]:
        """Split a chunk into parts of `size` images; the last part may have fewer."""
        count = self.count_of(chunk)
        if size >= count:
            return [chunk]
        return [self.part(chunk, first, min(size, count - first)) for first in range(0, count, size)]

    def joined(self, chunks: Sequence[Chunk]) -> Chunk:
        """Join the parts of a chunk into one chunk of all images."""
        if len(chunks) == 1:
            return chunks[0]
        result = dict(self.images)
        for name in chunks[0].keys() - result.keys():
            axis = self.axes[name]
            result[name] = chunks[0][name] if axis is None else torch.cat([chunk[name] for chunk in chunks], axis[0])
        return result


def in_own_memory(value: Tensor) -> Tensor:
    """Return the tensor, copied if it is part of a larger storage that it would keep from being freed."""
    return value.clone() if value.untyped_storage().nbytes() > size_in_bytes(value) else value
