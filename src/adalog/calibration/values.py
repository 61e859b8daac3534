"""Compute the values of a program on images, from any of its values to any others, within a memory limit.

This module alone decides how the memory is divided (docs/design/search.md draws it): 3/8 for values that were asked
for, 3/8 for values that the next ones are computed from, and 1/4 for the values of a batch of images while it runs. The
images, the program's tensors and values that a caller keeps come on top.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from adalog.device import images_at_once
from adalog.graph.operations import FAKE_QUANTIZE
from adalog.graph.program import Node, Program, Ref
from adalog.graph.sites import Block
from adalog.graph.stretches import cut, peak_bytes
from adalog.graph.tracing import Axis, image_axes, keeps_images_apart, size_in_bytes, sizes, trace
from adalog.quantizers.quantiles import coprime

Chunk = dict[str, Tensor]  # the program's inputs and other values, by name, for some of the images

# The most images that run together on a processor. Larger batches do not fit the cache and allocate new memory for
# every value, and a caller that has read enough images can stop only between batches. On an accelerator,
# `images_at_once` returns how many fit.
BATCH = 32
# If two images together and each of them alone have more bytes of values than this, a part of the values is compared.
_COMPARED_BYTES = 1 << 28


def held_bytes(memory: int) -> int:
    """Return the share of the memory for values that were asked for, and for those that the next ones start from."""
    return memory * 3 // 8


def memory_to_hold(size: int) -> int:
    """Return how much memory has a share of `size` bytes for values that were asked for."""
    return size * 8 // 3


def batch_bytes(memory: int) -> int:
    """Return the share of the memory for the values of a batch of images while it runs."""
    return memory // 4


def batch_that_fits(count: int, peak: int, memory: int, least: int = 1) -> int:
    """Return how many images run together. peak: the most bytes that the values of all `count` images take."""
    return min(count, max(least, batch_bytes(memory * count) // max(peak, 1)))


class Values:
    """The values of a program on images, by name, with about `memory` bytes held at a time.

    blocks: the blocks that a caller takes in order. The values that they start from are called starts. The last start
    that was asked for is held, and later values are computed from it, so that all starts in order cost one forward. An
    earlier start is computed from the images again. If all starts and the values of one forward of all images fit in
    memory, one forward computes all starts, and they are held. A start larger than its share of the memory is held for
    as many of the first images as fit. `batches` then computes the remaining images as far as they are read, and `of`
    computes all of them on every call.

    On a processor, batches hold at most `BATCH` images. If the program mixes images, or counts them in a dimension
    inside another, which is tested on two images, all images run at once, whatever the memory. memory: None for no
    limit. To resume after an interruption, make a new object with the program as it was.
    """

    def __init__(
        self,
        program: Program,
        images: Sequence[Tensor],
        memory: int | None = None,
        blocks: Sequence[Block] = (),
        *,
        like: "Values | None" = None,
    ):
        """Plan which starts fit in memory.

        like: the values of the float program. They determine which values keep images apart, because in this quantized
        program one code at a rounding threshold would look as if images were mixed. With `like`, the program changes
        stretch by stretch, so later starts are not computed ahead.
        """
        self.program, self.starts = program, tuple(block.value_in for block in blocks)
        self.images: Chunk = dict(zip(program.inputs, images, strict=True))
        self.count = len(images[0])
        self.shapes = trace(program, images)
        self._sizes: dict[int, dict[str, int]] = {}  # by number of images
        self._held: Chunk = {}
        self._ahead = like is None
        # Values that keep their images apart, and values that do not or for which this is not known.
        self._apart: set[str] = set(program.inputs) if like is None else like._apart
        self._mixed: set[str] = set() if like is None else like._mixed
        peak = peak_bytes(program, self.shapes)
        total = sum(size_in_bytes(self.shapes[name]) for name in self.starts if name not in self.images)
        self._all_fit = memory is None or total + peak <= memory
        self._limit = 0 if memory is None else held_bytes(memory)
        # The batches of two programs must be of the same images, although the free memory changes in between.
        self._most: int = (
            images_at_once(images[0].device, peak // max(1, self.count), BATCH) if like is None else like._most
        )
        self.batch = min(self.count, self._most)
        if memory is not None and not self._all_fit:
            self.batch = min(self.batch, batch_that_fits(self.count, peak, memory))

    @cached_property
    def axes(self) -> dict[str, Axis]:
        """The image axis of each value, for the values whose shapes determine it."""
        return image_axes(self.program, list(self.images.values()))

    def is_float(self, name: str) -> bool:
        value = self.shapes.get(name)
        return isinstance(value, Tensor) and value.is_floating_point()

    # --- on all images ---

    @torch.no_grad()
    def of(self, names: Collection[str], chunk: Chunk | None = None, program: Program | None = None) -> Chunk:
        """Return the named values on all images.

        chunk: values on all images to compute them from, with the images; by default, the nearest start that is held.
        program: another program with the same values, such as the quantized one, or a rewritten result of `operations`.
        """
        if chunk is not None:
            return self._compute(self._split(chunk, names, program), names, program)
        values, missing = dict(self.images), [name for name in names if self._held_images(name) < self.count]
        if missing:
            if self._all_fit and self._ahead and missing[0] in self.starts:
                missing += [name for name in self._from(missing[0]) if name not in missing]
            source, _ = self._source(missing, self.count)
            split = self._may_split(source, missing)
            values |= self._compute(self._sources(missing, 0, self.count) if split else [source], missing)
            self._hold({name: values[name] for name in missing})
        return {name: (self._held | values)[name] for name in names}

    @torch.no_grad()
    def batches(
        self, names: Collection[str], start: str | None = None, program: Program | None = None, *, apart: bool = True
    ) -> Iterator[Chunk]:
        """Yield the images and the named values for one batch of consecutive images after another.

        start: the start that they are computed from; by default, the images. apart: the result of `separable` for these
        values; if False, all images form one batch. program: as in `of`.
        """
        start = self.program.inputs[0] if start is None else start
        chunks = self._batches_of(start) if apart else [self.images | self.of([start])]
        for chunk in chunks:
            yield chunk | self.compute(chunk, names, program)

    def separable(self, names: Collection[str], start: str) -> bool:
        """Return True if a start and these values after it can be computed in batches of images."""
        if self.count < 2:
            return False
        source, names = self._source([start], self.count)[0], [start, *names]
        return self._keep_apart(self._known_apart(start), source, None) and self._keep_apart(source, names, None)

    def change(self, program: Program, start: str) -> None:
        """Switch to another program, which may differ only behind this start."""
        behind = self._from(start)[1:]
        self._held = {name: value for name, value in self._held.items() if name not in behind}
        self.program = program

    def operations(self, block: Block) -> Program:
        """Return a block's operations with open sizes, to be rewritten and then passed to other methods."""
        alone = cut(self.program, [block.value_in], Ref(block.value_out), self.sizes(self.count))
        outputs = {node.name for node in alone.nodes}
        nodes = tuple(node for node in self.program.nodes if node.name in outputs)
        inputs = {name for node in nodes for name in node.refs()}
        tensors = {name: value for name, value in self.program.tensors.items() if name in inputs}
        return replace(self.program, inputs=alone.inputs, nodes=nodes, tensors=tensors, output=Ref(block.value_out))

    # --- on a chunk of images ---

    def sizes(self, count: int) -> dict[str, int]:
        """Return the sizes in the program, by name, for this number of images."""
        if count not in self._sizes:
            self._sizes[count] = sizes(trace(self.program, list(self.images.values()), count))
        return self._sizes[count]

    def compute(
        self,
        chunk: Chunk,
        names: Collection[str],
        program: Program | None = None,
        watch: Callable[[Node, tuple[Any, ...], Any], Any] | None = None,
        steps: Mapping[str, Callable[..., Any]] | None = None,
    ) -> Chunk:
        """Compute the named values from the given ones, for the images of a chunk at once; also with gradients.

        program: as in `of`. watch, steps: passed to `Program.run`.
        """
        stretch = self._stretch(chunk, names, program)
        return stretch.run([chunk[name] for name in stretch.inputs], watch, steps)

    def _stretch(self, chunk: Chunk, names: Collection[str], program: Program | None) -> Program:
        output = {name: Ref(name) for name in names}
        return cut(program or self.program, chunk, output, self.sizes(self.count_of(chunk)))

    @torch.no_grad()
    def keeps_apart(self, start: Chunk, names: Collection[str], program: Program | None = None) -> bool:
        """Return True if the first two images of a chunk give the same named values alone as together.

        Of values that exceed `_COMPARED_BYTES`, a part is compared.
        """
        for node in (program or self.program).nodes:
            if node.op == FAKE_QUANTIZE and node.name not in self.axes and node.args[0].name in self.axes:
                self.axes[node.name] = self.axes[node.args[0].name]
        if any(name not in self.axes for name in (*start, *names)):
            return False
        axes = {name: self.axes[name] for name in names if name not in start}
        step = -(-sum(4 * size_in_bytes(self.shapes.get(name)) // self.count for name in axes) // _COMPARED_BYTES)

        def run(first: int, count: int) -> Chunk:
            compared: Chunk = {}

            def watch(node: Node, args: tuple[Any, ...], result: Any) -> None:
                if node.name in axes:
                    axis = axes[node.name]
                    if step > 1 and axis is not None:
                        rows = result.movedim(axis[0], 0).reshape(result.shape[axis[0]], -1)
                        result = rows[:, :: coprime(step, rows.shape[1])].clone()
                    compared[node.name] = result

            chunk = self.part(start, first, count)
            stretch = replace(self._stretch(chunk, names, program), output=())
            stretch.run([chunk[name] for name in stretch.inputs], watch)
            return compared

        places = {name: axis if axis is None or step <= 1 else (0, axis[1]) for name, axis in axes.items()}
        return keeps_images_apart(run, list(axes), places)

    def count_of(self, chunk: Chunk) -> int:
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

    def join(self, chunks: Iterable[Chunk], names: Collection[str], count: int) -> Chunk:
        """Join the named values of chunks of consecutive images, `count` in all."""
        result: Chunk = {}
        before = 0
        for chunk in chunks:
            for name in names:
                value, axis = chunk[name], self.axes[name]
                if axis is None:
                    result.setdefault(name, in_own_memory(value))
                    continue
                dim, entries = axis
                if name not in result:
                    result[name] = value.new_empty((*value.shape[:dim], entries * count, *value.shape[dim + 1 :]))
                result[name].narrow(dim, before * entries, value.shape[dim]).copy_(value)
            before += self.count_of(chunk)
        return result

    # --- which start is held, and for how many images ---

    def _from(self, start: str) -> tuple[str, ...]:
        """Return a start and all starts after it."""
        return self.starts[self.starts.index(start) :] if start in self.starts else (start,)

    def _held_images(self, name: str) -> int:
        """Return for how many images, counted from the first one, a value is held."""
        value = (self.images | self._held).get(name)
        if value is None or name in self.images or self._all_fit:
            return 0 if value is None else self.count
        axis = self.axes.get(name)
        return self.count if axis is None else value.shape[axis[0]] // axis[1]

    def _hold(self, values: Chunk) -> None:
        """Hold those of the values that are starts, in place of earlier ones if not all starts fit."""
        starts = {name: values[name] for name in self.starts if name in values}
        if self._all_fit:
            self._held |= starts
        elif small := [name for name in starts if size_in_bytes(self.shapes[name]) <= self._limit]:
            self._held = {small[-1]: starts[small[-1]]}

    def _source(self, names: Sequence[str], count: int) -> tuple[Chunk, int]:
        """Return the images with the nearest start up to the first value that is held for at least `count` images.

        Also return for how many images it is held.
        """
        behind = self._from(names[0])[1:]
        for start in reversed(self.starts[: len(self.starts) - len(behind)]):
            if start in self._held and (held := self._held_images(start)) >= count:
                return {**self.images, start: self._held[start]}, held
        return dict(self.images), self.count

    def _known_apart(self, start: str) -> Chunk:
        """Return the images with the nearest start before this one that is held and keeps images apart.

        Later values are tested from there, because a test from the images would run the network up to every start.
        """
        for name in reversed(self.starts[: len(self.starts) - len(self._from(start))]):
            if name in self._held and name in self._apart and self._held_images(name) > 1:
                return {**self.images, name: self._held[name]}
        return dict(self.images)

    def _sources(self, names: Sequence[str], first: int, end: int) -> Iterator[Chunk]:
        """Yield batches of the images `first` to `end`, with the nearest start that is held."""
        while first < end:
            source, count = self._source(names, first + 1)
            stop = min(end, count)
            yield from self.split(self.part(source, first, stop - first), self.batch)
            first = stop

    def _batches_of(self, start: str) -> Iterator[Chunk]:
        """Yield the images and a start in batches; hold the start for as many of the first images as fit."""
        size = size_in_bytes(self.shapes[start])
        fits = self._all_fit or size <= self._limit or self._held_images(start) == self.count
        if fits or not self._may_split(self._source([start], self.count)[0], [start]):
            yield from self._split(self.images | self.of([start]))
            return
        # Hold whole batches only, so that the batches of two programs start at the same images.
        first = self._limit * self.count // size // self.batch * self.batch
        if first and start not in self._held:
            self._held = self._compute(self._sources([start], 0, first), [start], count=first)
        if first:
            yield from self.split({**self.part(self.images, 0, first), start: self._held[start]}, self.batch)
        for chunk in self._sources([start], first, self.count):
            yield self._images_of(chunk) | self.compute(chunk, [start])

    # --- batches of images, if these are kept apart ---

    def _compute(
        self, chunks: Iterable[Chunk], names: Collection[str], program: Program | None = None, count: int | None = None
    ) -> Chunk:
        """Compute named values from one chunk of all images at once, or from several chunks of `count` images."""
        if isinstance(chunks, list) and len(chunks) == 1:
            return self.compute(chunks[0], names, program)
        chunk_values = ({**self._images_of(chunk), **self.compute(chunk, names, program)} for chunk in chunks)
        return self.join(chunk_values, names, count or self.count)

    def _images_of(self, chunk: Chunk) -> Chunk:
        return {name: chunk[name] for name in self.images}

    def _split(self, chunk: Chunk, names: Collection[str] = (), program: Program | None = None) -> list[Chunk]:
        """Split given values of all images into batches, or into one batch if these images must run together."""
        return self.split(chunk, self.batch if self._may_split(chunk, names, program) else self.count)

    def _may_split(self, chunk: Chunk, names: Collection[str], program: Program | None = None) -> bool:
        """Return True if all these values can be handled in batches; new names are tested on two images."""
        apart = self.batch < self.count and self._keep_apart(self.images, chunk, None)
        return apart and self._keep_apart(chunk, names, program)

    def _keep_apart(self, chunk: Chunk, names: Collection[str], program: Program | None) -> bool:
        new = [name for name in names if name not in self._apart]
        if not new:
            return True
        apart = self._mixed.isdisjoint(new) and self.keeps_apart(chunk, new, program)
        if not apart and len(new) > 1:  # find one that does not
            return all(self._keep_apart(chunk, [name], program) for name in new)
        (self._apart if apart else self._mixed).update(new)
        return apart


def in_own_memory(value: Tensor) -> Tensor:
    """Return the tensor, copied if it is part of a larger storage that it would keep from being freed."""
    return value.clone() if value.untyped_storage().nbytes() > size_in_bytes(value) else value
