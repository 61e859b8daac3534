"""Split a program into blocks and compute the inputs of each block, within a memory limit.

A method that changes a model block by block (choosing scales by a block's output, training weights by gradients) takes
the blocks in order. `Blocks.inputs` returns the inputs of a block, `Blocks.cut` the program that computes the block,
and `Blocks.change` replaces the block by a quantized one.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from adalog.calibration.batches import Batches, Chunk, cut, in_own_memory
from adalog.device import images_at_once
from adalog.graph.program import Program, Ref
from adalog.graph.sites import Block
from adalog.graph.tracing import Axis, peak_bytes, size_in_bytes, trace

# The most images that run together on a processor. Larger batches do not fit the cache and allocate new memory for
# every value. On an accelerator, `images_at_once` tells how many fit.
# A caller that has read enough images can stop only between batches.
BATCH = 32


class Blocks:
    """The blocks of a program and their inputs on all images, with about `memory` bytes held at a time.

    If the inputs of all blocks and the values of one forward of all images fit in memory, one forward computes the
    inputs, and they are kept. Otherwise 3/8 of the memory holds the input of one block, 3/8 the input of the next block
    while it is computed, and 1/4 the values of a batch of images. Reading the blocks in order then costs one forward in
    total. Reading a block before the last one that was read starts from the images again.

    An input larger than 3/8 of the memory is held for as many of the first images as fit, and replaces the previous
    input. `batches` computes the remaining images batch by batch, as far as it is read. `inputs` computes the whole
    input on every call.

    On a processor, batches hold at most `BATCH` images. They give the same values as all images at once, up to
    rounding. This is checked on two images. If it does not hold, all images run at once, whatever the memory limit. The
    images, the program's tensors and values that a caller keeps do not count towards the limit.

    To resume after an interruption, make a new object with the program as it was. The input of the first block that is
    read is then computed from the images. memory: None for no limit.
    """

    def __init__(
        self,
        program: Program,
        images: Sequence[Tensor],
        blocks: Sequence[Block],
        memory: int | None = None,
        *,
        like: "Blocks | None" = None,
    ):
        """Plan which inputs fit in memory.

        like: the blocks of the float program. They determine which values keep images apart in this quantized program.
        In a quantized program, one code at a rounding threshold would look as if images were mixed. With `like`, blocks
        are changed in order, so the inputs of later blocks are not computed ahead.
        """
        self.blocks = tuple(blocks)
        self._batches = Batches(program, images)
        self.count = self._batches.count
        shapes = trace(program, images)
        names = [block.value_in for block in blocks if block.value_in not in program.inputs]
        self._bytes = {name: size_in_bytes(shapes[name]) for name in names}
        self._held: Chunk = {}
        self._ahead = like is None
        # Values that keep their images apart, and values that do not or for which this is not known.
        self._apart: set[str] = set(program.inputs) if like is None else like._apart
        self._mixed: set[str] = set() if like is None else like._mixed
        outs = {block.value_out: shapes[block.value_out] for block in blocks}
        self._float = {name for name, value in outs.items() if isinstance(value, Tensor) and value.is_floating_point()}
        peak = peak_bytes(program, shapes)
        self._all_fit = memory is None or sum(self._bytes.values()) + peak <= memory
        self._limit = 0 if memory is None else memory * 3 // 8
        # The batches of two programs must be of the same images, although the free memory changes in between.
        self._most: int = (
            images_at_once(images[0].device, peak // max(1, self.count), BATCH) if like is None else like._most
        )
        self.batch = min(self.count, self._most)
        if memory is not None and not self._all_fit:
            self.batch = min(self.batch, max(1, memory * self.count // (4 * max(peak, 1))))

    @property
    def images(self) -> Chunk:
        """The model's inputs by name."""
        return self._batches.images

    def is_float(self, name: str) -> bool:
        """Return True if this output of a block is a floating-point tensor."""
        return name in self._float

    def axis(self, name: str) -> Axis:
        """Return the image axis of a value; None if all images share it or its shapes do not determine it."""
        return self._batches.axes.get(name)

    def cut(self, number: int, program: Program | None = None, count: int | None = None) -> Program:
        """Return the program that computes the output of one block.

        It takes the model's inputs and, unless the block is the first one, the block's input. It can be run with
        gradients. program: another program with the same blocks, such as the quantized one. count: the number of images
        that the result runs on; all images by default.
        """
        block = self.blocks[number]
        fixed = self._batches.sizes(count or self.count)
        return cut(program or self._batches.program, [block.value_in], Ref(block.value_out), fixed)

    def nodes(self, number: int) -> Program:
        """Return a block's operations with open sizes, to be rewritten and then passed to `run`."""
        alone, program = self.cut(number), self._batches.program
        made = {node.name for node in alone.nodes}
        nodes = tuple(node for node in program.nodes if node.name in made)
        read = {name for node in nodes for name in node.refs()}
        tensors = {name: value for name, value in program.tensors.items() if name in read}
        output = Ref(self.blocks[number].value_out)
        return replace(program, inputs=alone.inputs, nodes=nodes, tensors=tensors, output=output)

    @torch.no_grad()
    def inputs(self, number: int) -> Chunk:
        """Return what `cut` takes, on all images: the model's inputs and the block's input, by name."""
        images, name = self._batches.images, self.blocks[number].value_in
        if name in images:
            return dict(images)
        if self._held_count(name) < self.count:
            source = self._source(number)
            if self._all_fit and self._ahead:
                made = self.run(source, [block.value_in for block in self.blocks[number:]])
            elif self._splits(source, [name]):
                made = self._joined(self._made(number, 0, self.count), [name], self.count)
            else:
                made = self.run(source, [name])
            if not self._all_fit and self._bytes[name] > self._limit:
                return {**images, name: made[name]}
            self._held = {**(self._held if self._all_fit else {}), **made}
        return {**images, name: self._held[name]}

    @torch.no_grad()
    def batches(self, number: int) -> Iterator[Chunk]:
        """Yield the inputs of a block in batches of consecutive images."""
        name = self.blocks[number].value_in
        whole = name in self._batches.images or self._held_count(name) == self.count or self._all_fit
        if whole or self._bytes[name] <= self._limit or not self._splits(self._source(number), [name]):
            chunk = self.inputs(number)
            yield from self._batches.split(chunk, self.batch if self._splits(chunk, ()) else self.count)
            return
        # Hold whole batches only, so that the batches of two programs start at the same images.
        first = self._limit * self.count // self._bytes[name] // self.batch * self.batch
        if first and name not in self._held:
            self._held = self._joined(self._made(number, 0, first), [name], first)
        if first:
            images = self._batches.part(self._batches.images, 0, first)
            yield from self._batches.split({**images, name: self._held[name]}, self.batch)
        yield from self._made(number, first, self.count)

    def keeps_apart(self, number: int, names: Collection[str]) -> bool:
        """Return True if a block's input and these values of the block can be computed in batches of images."""
        if self.count < 2:
            return False
        source, names = self._source(number), [self.blocks[number].value_in, *names]
        return self._keep_apart(self._known_apart(number), source, None) and self._keep_apart(source, names, None)

    @torch.no_grad()
    def streamed(
        self, number: int, names: Collection[str], program: Program | None = None, *, apart: bool = True
    ) -> Iterator[Chunk]:
        """Yield named values of a block for one batch of consecutive images after another.

        apart: the result of `keeps_apart` for these values; if False, all images form one batch. program: as in `run`.
        """
        for chunk in self.batches(number) if apart else [self.inputs(number)]:
            yield self._batches.run(chunk, names, program)

    def values(
        self,
        chunk: Chunk,
        names: Collection[str],
        program: Program | None = None,
        steps: Mapping[str, Callable[..., Any]] | None = None,
    ) -> Chunk:
        """Compute named values for the images of a chunk at once; this also works with gradients.

        The arguments are as in `run`.
        """
        return self._batches.run(chunk, names, program, steps=steps)

    @torch.no_grad()
    def run(self, given: Chunk, names: Collection[str], program: Program | None = None) -> Chunk:
        """Compute named values on all images from given ones, in batches that fit in memory.

        given: the result of `inputs`, optionally with further values from `run`. program: another program with the same
        blocks, or a rewritten result of `nodes`.
        """
        if not self._splits(given, names, program):
            return self._batches.run(given, names, program)
        chunks = (
            {**self._images_of(chunk), **self._batches.run(chunk, names, program)}
            for chunk in self._batches.split(given, self.batch)
        )
        return self._joined(chunks, names, self.count)

    def change(self, number: int, program: Program) -> None:
        """Switch to another program, which may differ only in this block and the blocks after it."""
        behind = {block.value_in for block in self.blocks[number + 1 :]}
        self._held = {name: value for name, value in self._held.items() if name not in behind}
        self._batches.program = program

    def _source(self, number: int) -> Chunk:
        """Return the nearest input up to this block that is held for all images, or else the model's inputs."""
        return self._source_of(number, self.count)[0]

    def _source_of(self, number: int, count: int) -> tuple[Chunk, int]:
        """Return the nearest input that is held for at least `count` images, and for how many it is held."""
        for block in reversed(self.blocks[: number + 1]):
            held = self._held_count(block.value_in)
            if held >= count:
                return {**self._batches.images, block.value_in: self._held[block.value_in]}, held
        return dict(self._batches.images), self.count

    def _known_apart(self, number: int) -> Chunk:
        """Return the nearest input before this block that is held and keeps images apart, or else the model's inputs.

        Later values are tested from there, because a test from the images would run the network up to every block.
        """
        for block in reversed(self.blocks[:number]):
            if block.value_in in self._apart and self._held_count(block.value_in) > 1:
                return {**self._batches.images, block.value_in: self._held[block.value_in]}
        return dict(self._batches.images)

    def _held_count(self, name: str) -> int:
        """Return for how many images, counted from the first one, a block's input is held."""
        if name not in self._held or self._all_fit:
            return self.count if name in self._held else 0
        axis = self._batches.axes.get(name)
        return self.count if axis is None else self._held[name].shape[axis[0]] // axis[1]

    def _made(self, number: int, first: int, end: int) -> Iterator[Chunk]:
        """Yield a block's input in batches, for images `first` to `end`, from the nearest input that is held."""
        while first < end:
            source, held = self._source_of(number, first + 1)
            until = min(end, held)
            for chunk in self._batches.split(self._batches.part(source, first, until - first), self.batch):
                yield {**self._images_of(chunk), **self._batches.run(chunk, [self.blocks[number].value_in])}
            first = until

    def _images_of(self, chunk: Chunk) -> Chunk:
        return {name: chunk[name] for name in self._batches.images}

    def _joined(self, chunks: Iterator[Chunk], names: Collection[str], count: int) -> Chunk:
        """Join chunks of consecutive images into the named values for `count` images."""
        result: Chunk = {}
        before = 0
        for chunk in chunks:
            for name in names:
                value, axis = chunk[name], self._batches.axes[name]
                if axis is None:
                    result.setdefault(name, in_own_memory(value))
                    continue
                dim, each = axis
                if name not in result:
                    result[name] = value.new_empty((*value.shape[:dim], each * count, *value.shape[dim + 1 :]))
                result[name].narrow(dim, before * each, value.shape[dim]).copy_(value)
            before += self._batches.count_of(chunk)
        return result

    def _splits(self, given: Chunk, names: Collection[str], program: Program | None = None) -> bool:
        """Return True if all these values can be handled in batches; new names are tested on two images."""
        if self.batch >= self.count:
            return False
        return self._keep_apart(self._batches.images, given, None) and self._keep_apart(given, names, program)

    def _keep_apart(self, given: Chunk, names: Collection[str], program: Program | None) -> bool:
        new = [name for name in names if name not in self._apart]
        if not new:
            return True
        apart = self._mixed.isdisjoint(new) and self._batches.keeps_apart(given, new, program)
        if not apart and len(new) > 1:  # find one that does not
            return all(self._keep_apart(given, [name], program) for name in new)
        (self._apart if apart else self._mixed).update(new)
        return apart
