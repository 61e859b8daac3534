"""A program run from any of its values to any others, on all images or on a few at a time."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from adalog.graph.operations import FAKE_QUANTIZE
from adalog.graph.program import Node, Program, Ref, map_refs
from adalog.graph.tracing import Axis, image_axes, keeps_images_apart, sizes, trace

Chunk = dict[str, Tensor]  # values of some of the images by name, the program's inputs among them


def cut(program: Program, known: Iterable[str], output: Any, fixed: Mapping[str, int]) -> Program:
    """The part of a program that leads from known values to an output.

    It takes the program's inputs, which come first, and the known values. Values that depend on tensors alone, such as
    position tables, are computed within it. fixed: the sizes, by name, for the number of images that it is to take.
    """
    known = [name for name in known if name not in program.inputs]
    nodes = tuple(_with_numbers(node, fixed) for node in program.nodes if node.name not in known)
    return replace(program, inputs=(*program.inputs, *known), nodes=nodes, output=output).pruned()


def _with_numbers(node: Node, fixed: Mapping[str, int]) -> Node:
    """The node with these numbers in place of what it reads by their names."""
    if fixed.keys().isdisjoint(node.refs()):
        return node

    def fix(ref: Ref) -> Any:
        return fixed.get(ref.name, ref)

    return replace(
        node, args=map_refs(node.args, fix), kwargs={key: map_refs(arg, fix) for key, arg in node.kwargs.items()}
    )


class Batches:
    """Stretches of a program, run on chunks of its images.

    Sizes and axes are those of the program that this was made with; another one with the same values by name, such as
    the quantized one, may be run in its place.
    """

    def __init__(self, program: Program, images: Sequence[Tensor]):
        self.program = program
        self.images: Chunk = dict(zip(program.inputs, images, strict=True))
        self.count = len(images[0])
        self._sizes: dict[int, dict[str, int]] = {}  # by number of images

    @cached_property
    def axes(self) -> dict[str, Axis]:
        """The axis of images of each value, where its shapes tell it."""
        return image_axes(self.program, list(self.images.values()))

    def sizes(self, count: int) -> dict[str, int]:
        """The sizes in the program by name, for this number of images."""
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
        """The values of these names, computed from given ones, for the images of the chunk.

        watch, steps: those of `Program.run`.
        """
        output = {name: Ref(name) for name in names}
        stretch = cut(program or self.program, given, output, self.sizes(self.count_of(given)))
        result: Chunk = stretch.run([given[name] for name in stretch.inputs], watch, steps)
        return result

    def keeps_apart(self, given: Chunk, names: Collection[str], program: Program | None = None) -> bool:
        """Whether the first two images of a chunk have alone what they have together, in all values of these names."""
        for node in (program or self.program).nodes:
            if node.op == FAKE_QUANTIZE and node.name not in self.axes and node.args[0].name in self.axes:
                self.axes[node.name] = self.axes[node.args[0].name]
        if any(name not in self.axes for name in (*given, *names)):
            return False

        def run(first: int, count: int) -> Chunk:
            return self.run(self.part(given, first, count), names, program)

        return keeps_images_apart(run, names, self.axes)

    def count_of(self, chunk: Chunk) -> int:
        """The number of images in a chunk."""
        return len(chunk[self.program.inputs[0]])

    def part(self, chunk: Chunk, first: int, count: int) -> Chunk:
        """The values of a chunk for some of its images; they share its memory."""
        result = {}
        for name, value in chunk.items():
            axis = self.axes[name]
            result[name] = value if axis is None else value.narrow(axis[0], first * axis[1], count * axis[1])
        return result

    def split(self, chunk: Chunk, size: int) -> list[Chunk]:
        """A chunk in parts of `size` images, the last of which may have fewer."""
        count = self.count_of(chunk)
        if size >= count:
            return [chunk]
        return [self.part(chunk, first, min(size, count - first)) for first in range(0, count, size)]

    def joined(self, chunks: Sequence[Chunk]) -> Chunk:
        """The chunk of all images from its parts."""
        if len(chunks) == 1:
            return chunks[0]
        result = dict(self.images)
        for name in chunks[0].keys() - result.keys():
            axis = self.axes[name]
            result[name] = chunks[0][name] if axis is None else torch.cat([chunk[name] for chunk in chunks], axis[0])
        return result


def size_in_bytes(value: Any) -> int:
    """The bytes of a tensor or of several; a number has none."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(size_in_bytes, value)) if isinstance(value, (tuple, list)) else 0


def in_own_memory(value: Tensor) -> Tensor:
    """The tensor, or a copy where it is part of something larger, which it would keep from being freed."""
    return value.clone() if value.untyped_storage().nbytes() > size_in_bytes(value) else value
