"""A program cut into blocks, and what each block is given on the images, within a limit of memory.

Whoever changes a model block by block (scales judged by a block's output, weights learned by gradients) takes the
blocks one after the other from here: `Blocks.inputs` of a block, `Blocks.cut` for the program that computes it, and
`Blocks.change` once the block is replaced by a quantized one.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from adalog.calibration.batches import Batches, Chunk, cut, in_own_memory, size_in_bytes
from adalog.graph.program import Program, Ref
from adalog.graph.sites import Block
from adalog.graph.tracing import Axis, trace

# The most images that are run together. Larger batches leave the cache and take fresh memory for every value, and
# whoever has seen enough stops only between batches.
BATCH = 32


class Blocks:
    """The blocks of a program with what they are given on all images; about `memory` bytes are held at a time.

    Where the inputs of all blocks and the values of one forward of all images fit, one forward makes the inputs, and
    they stay. Else 3/8 of the memory hold the input of one block, 3/8 that of the next one while it is made, and 1/4
    the values of a batch of images. So blocks in order cost one forward in all, and a block before the last one that
    was asked for starts from the images again. An input of more than 3/8 of the memory is held for as many of the first
    images as fit, in place of the input before. `batches` makes the rest a batch at a time, if it is read so far, and
    `inputs` all of it whenever it is asked for: from the images again, as it then does the block behind it.

    Batches, of `BATCH` images at most, give what all images at once give, up to rounding. They are tried on two images;
    where these have not alone what they have together, all images go at once, whatever the memory. The images, the
    program's tensors and what a caller holds on to are not counted.

    To go on after an interruption, make a new object with the program as it was: the input of the first block that is
    asked for is made from the images. memory: None for no limit.
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
        """like: blocks of the float program, which say what keeps its images apart in this quantized one too.

        In a quantized program one code at a threshold would look as if images were mixed. Its blocks are changed in
        order, so the inputs of later ones are not made along.
        """
        self.blocks = tuple(blocks)
        self._batches = Batches(program, images)
        self.count = self._batches.count
        shapes = trace(program, images)
        names = [block.value_in for block in blocks if block.value_in not in program.inputs]
        self._bytes = {name: size_in_bytes(shapes[name]) for name in names}
        self._held: Chunk = {}
        self._ahead = like is None
        # Values that keep their images apart; values that do not, or of which it is not known.
        self._apart: set[str] = set(program.inputs) if like is None else like._apart
        self._mixed: set[str] = set() if like is None else like._mixed
        outs = {block.value_out: shapes[block.value_out] for block in blocks}
        self._float = {name for name, value in outs.items() if isinstance(value, Tensor) and value.is_floating_point()}
        peak = _peak(program, shapes)
        self._all_fit = memory is None or sum(self._bytes.values()) + peak <= memory
        self._limit = 0 if memory is None else memory * 3 // 8
        self.batch = min(self.count, BATCH)
        if memory is not None and not self._all_fit:
            self.batch = min(self.batch, max(1, memory * self.count // (4 * max(peak, 1))))

    @property
    def images(self) -> Chunk:
        """The model's inputs by name."""
        return self._batches.images

    def is_float(self, name: str) -> bool:
        """Whether the output of this name, of a block, is a tensor of floats."""
        return name in self._float

    def axis(self, name: str) -> Axis:
        """The axis of images of a value, where its shapes tell it."""
        return self._batches.axes.get(name)

    def cut(self, number: int, program: Program | None = None, count: int | None = None) -> Program:
        """The program of a block alone, which takes the model's inputs and, unless it is the first, the block's input.

        It puts out the block's output. program: another one with the same blocks, such as the quantized one. count: the
        number of images that it is to take; all, if not given. It may be run with gradients.
        """
        block = self.blocks[number]
        fixed = self._batches.sizes(count or self.count)
        return cut(program or self._batches.program, [block.value_in], Ref(block.value_out), fixed)

    def nodes(self, number: int) -> Program:
        """The operations of a block alone with sizes left open: to be rewritten, and then to be given to `run`."""
        alone, program = self.cut(number), self._batches.program
        made = {node.name for node in alone.nodes}
        nodes = tuple(node for node in program.nodes if node.name in made)
        read = {name for node in nodes for name in node.refs()}
        tensors = {name: value for name, value in program.tensors.items() if name in read}
        output = Ref(self.blocks[number].value_out)
        return replace(program, inputs=alone.inputs, nodes=nodes, tensors=tensors, output=output)

    @torch.no_grad()
    def inputs(self, number: int) -> Chunk:
        """What a block takes, on all images: the model's inputs and the block's, by name, as `cut` takes them."""
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
        """What a block takes, in batches of consecutive images."""
        name = self.blocks[number].value_in
        whole = name in self._batches.images or self._held_count(name) == self.count or self._all_fit
        if whole or self._bytes[name] <= self._limit or not self._splits(self._source(number), [name]):
            chunk = self.inputs(number)
            yield from self._batches.split(chunk, self.batch if self._splits(chunk, ()) else self.count)
            return
        # Whole batches, so that those of two programs begin at the same images whatever each of them holds.
        first = self._limit * self.count // self._bytes[name] // self.batch * self.batch
        if first and name not in self._held:
            self._held = self._joined(self._made(number, 0, first), [name], first)
        if first:
            images = self._batches.part(self._batches.images, 0, first)
            yield from self._batches.split({**images, name: self._held[name]}, self.batch)
        yield from self._made(number, first, self.count)

    def keeps_apart(self, number: int, names: Collection[str]) -> bool:
        """Whether these values of a block, and its input, can be made in batches of images."""
        if self.count < 2:
            return False
        source, names = self._source(number), [self.blocks[number].value_in, *names]
        return self._keep_apart(self._batches.images, source, None) and self._keep_apart(source, names, None)

    @torch.no_grad()
    def streamed(
        self, number: int, names: Collection[str], program: Program | None = None, *, apart: bool = True
    ) -> Iterator[Chunk]:
        """Values of a block by name, for one batch of consecutive images after another; for all at once if not apart.

        apart: what `keeps_apart` says of these values. program: as of `run`.
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
        """Values of a program for the images of a chunk at once, also with gradients. Its arguments: as of `run`."""
        return self._batches.run(chunk, names, program, steps=steps)

    @torch.no_grad()
    def run(self, given: Chunk, names: Collection[str], program: Program | None = None) -> Chunk:
        """Values of a program on all images, computed from given ones, in batches that the memory allows.

        given: as of `inputs`, perhaps with more that `run` has made. program: another one with the same blocks, or the
        `nodes` of one, rewritten.
        """
        if not self._splits(given, names, program):
            return self._batches.run(given, names, program)
        chunks = (
            {**self._images_of(chunk), **self._batches.run(chunk, names, program)}
            for chunk in self._batches.split(given, self.batch)
        )
        return self._joined(chunks, names, self.count)

    def change(self, number: int, program: Program) -> None:
        """Go on with another program, which differs from the one so far in this block and those behind it only."""
        behind = {block.value_in for block in self.blocks[number + 1 :]}
        self._held = {name: value for name, value in self._held.items() if name not in behind}
        self._batches.program = program

    def _source(self, number: int) -> Chunk:
        """What is held, for all images, of the last block before this one, or the images: to make its input of."""
        return self._source_of(number, self.count)[0]

    def _source_of(self, number: int, count: int) -> tuple[Chunk, int]:
        """The same where the first `count` images are enough, and the number of images that it has."""
        for block in reversed(self.blocks[: number + 1]):
            held = self._held_count(block.value_in)
            if held >= count:
                return {**self._batches.images, block.value_in: self._held[block.value_in]}, held
        return dict(self._batches.images), self.count

    def _held_count(self, name: str) -> int:
        """The number of images, the first ones, for which a block's input is held."""
        if name not in self._held or self._all_fit:
            return self.count if name in self._held else 0
        axis = self._batches.axes.get(name)
        return self.count if axis is None else self._held[name].shape[axis[0]] // axis[1]

    def _made(self, number: int, first: int, end: int) -> Iterator[Chunk]:
        """A block's input in batches, from one image to another, made of the nearest input before that is held."""
        while first < end:
            source, held = self._source_of(number, first + 1)
            until = min(end, held)
            for chunk in self._batches.split(self._batches.part(source, first, until - first), self.batch):
                yield {**self._images_of(chunk), **self._batches.run(chunk, [self.blocks[number].value_in])}
            first = until

    def _images_of(self, chunk: Chunk) -> Chunk:
        return {name: chunk[name] for name in self._batches.images}

    def _joined(self, chunks: Iterator[Chunk], names: Collection[str], count: int) -> Chunk:
        """The values of these names for `count` images from chunks of consecutive ones."""
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
        """Whether values may be given, and others made of them, in batches; new ones are tried on two images."""
        if self.batch >= self.count:
            return False
        return self._keep_apart(self._batches.images, given, None) and self._keep_apart(given, names, program)

    def _keep_apart(self, given: Chunk, names: Collection[str], program: Program | None) -> bool:
        new = [name for name in names if name not in self._apart]
        if not new:
            return True
        apart = self._mixed.isdisjoint(new) and self._batches.keeps_apart(given, new, program)
        (self._apart if apart else self._mixed).update(new)
        return apart


def _peak(program: Program, shapes: Mapping[str, Any]) -> int:
    """The most bytes of values that one forward of all images holds at a time."""
    live: dict[str, int] = {}
    most = 0
    for node, dead in zip(program.nodes, program._last_uses(), strict=True):
        live[node.name] = size_in_bytes(shapes[node.name])
        most = max(most, sum(live.values()))
        for name in dead:
            live.pop(name, None)
    return most
