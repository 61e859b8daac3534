"""What values of a program are on the calibration images, a limited number of bytes of them at a time."""

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from adalog.errors import CalibrationError
from adalog.graph.program import Node, Program, Ref, map_refs
from adalog.search.quantiles import coprime

LEAST_ROWS = 1024  # that are left of a value, or all where it has fewer

Chunk = dict[str, Tensor]  # what the rest of a program reads, of some of the images


@dataclass(frozen=True)
class Need:
    """Values that are asked for together, for a site's sake.

    rows: whether each row (all dimensions but the last) says something by itself, so that any may be left out; else
    whole images or windows are, the same ones of every value. scratch: bytes that the work on all of it takes besides.
    """

    site: str
    names: frozenset[str]
    rows: bool
    scratch: int


@dataclass(frozen=True)
class _Part:
    """Values that are held together, all made by the first `end` nodes; of each, every `stride`-th row or image.

    cut: where in the program the values are kept from which later parts start, if they are.
    """

    names: frozenset[str]
    stride: int
    rows: bool
    end: int = 0
    cut: int | None = None


def measured(program: Program, images: Sequence[Tensor], count: int | None = None) -> dict[str, Any]:
    """Every value of a program on so many images, or on all, without data: tensors on the meta device, and sizes."""
    made = {name: value.to("meta") for name, value in program.tensors.items()}
    inputs = [value.new_empty((count or len(value), *value.shape[1:]), device="meta") for value in images]
    values: dict[str, Any] = {**made, **dict(zip(program.inputs, inputs, strict=True))}

    def watch(node: Node, args: tuple[Any, ...], result: Any) -> None:
        values[node.name] = result

    replace(program, tensors=made).run(inputs, watch)
    return values


class Observed:
    """The values of a program on images, by name, of which about `memory` bytes are held at a time.

    Where all values of all needs fit, one forward of all images gives them, and they stay. Else the program runs in
    parts, each with all images in batches: 3/8 of the memory hold the values of one part, 3/8 those from which the next
    part starts (where these are more, it starts from an earlier part's or from the images), 1/4 a batch. So parts that
    are asked for in order cost one forward in all; a part before the last one starts anew. A need of more than its 3/8,
    or of more scratch than `memory`, keeps every n-th row, image or window, n sharing no factor with an image's number.

    Batches give what all images at once give, up to rounding. Of two images it is tried, part by part, that they have
    alone what they have together, at the place that their number tells; a part in which they have not (it mixes images,
    or puts them in a dimension inside another) runs all at once. Inputs and tensors are not counted: they are the
    caller's, as is what it holds on to of what it has `seen`. Threads may ask at the same time.

    shapes: `measured`, of all images. Raises ValueError where fewer than 1,024 rows of a need would be left, and
    CalibrationError, as values are asked for, where one is not finite.
    """

    def __init__(
        self,
        program: Program,
        images: Sequence[Tensor],
        shapes: Mapping[str, Any],
        needs: Iterable[Need],
        memory: int,
    ):
        self._program, self._shapes = program, shapes
        self._count = len(images[0])
        self._images: Chunk = dict(zip(program.inputs, images, strict=True))
        self._home = dict.fromkeys((*program.inputs, *program.tensors), 0)
        self._home |= {node.name: index + 1 for index, node in enumerate(program.nodes)}
        self._sizes = {self._count: _integers(shapes)}  # by number of images
        self._axes: dict[str, tuple[int, int] | None] = {}
        self._lasts: dict[str, int] = {}
        self._batch = self._count
        together: dict[frozenset[str], Need] = {}
        for need in needs:
            names = need.names.difference(program.tensors)
            other = together.get(names, need)
            together[names] = Need(other.site, names, need.rows and other.rows, max(need.scratch, other.scratch))
        self._parts = self._divided(list(together.values()), memory)
        self._wanted = frozenset[str]().union(*(part.names for part in self._parts))
        self._lock = Lock()
        self._now: int | None = None
        self._values: Chunk = {}
        self._beginning = (0, 0, self._split(self._images))  # the first part that starts here, the position, the values
        self._checkpoint = self._beginning

    def part(self, names: Collection[str]) -> int:
        """The number of the part that has all of these; parts are best asked for in order."""
        computed = set(names) - self._program.tensors.keys()
        for number, part in enumerate(self._parts):
            if computed <= part.names:
                return number
        raise KeyError(", ".join(sorted(computed)))

    def stride(self, names: Collection[str]) -> int:
        """Of how many rows, images or windows of these one is kept."""
        return self._parts[self.part(names)].stride

    def alike(self, name: str, names: Collection[str], value: Tensor) -> Tensor:
        """What is kept of another value that has the rows and images of this one, of a need's names."""
        return self._thinned(name, value, self._parts[self.part(names)], 0)

    def seen(self, names: Collection[str]) -> Chunk:
        """What is kept of these values, which some need asks for together."""
        with self._lock:
            number = self.part(names)
            if number != self._now:
                self._observe(number)
            return {name: {**self._program.tensors, **self._values}[name] for name in names}

    def _divided(self, needs: Sequence[Need], memory: int) -> list[_Part]:
        every = frozenset[str]().union(*(need.names for need in needs))
        made = [self._shapes[name].untyped_storage() for name in every if self._home[name]]
        held = {storage._cdata: storage.nbytes() for storage in made}
        if sum(held.values()) <= memory and all(need.scratch <= memory for need in needs):
            return [_Part(every, 1, False, max(self._home[name] for name in every))]
        limit = memory * 3 // 8
        two, three = (measured(self._program, list(self._images.values()), count) for count in (2, 3))
        self._axes = _axes(two, three)
        parts: list[_Part] = []
        for need in needs:
            stride = self._stride(need, limit, memory)
            if parts and parts[-1].stride == stride == 1 and self._bytes(parts[-1].names | need.names) <= limit:
                parts[-1] = replace(parts[-1], names=parts[-1].names | need.names)
            else:
                parts.append(_Part(need.names, stride, need.rows))
        return self._cut(parts, memory)

    def _stride(self, need: Need, limit: int, memory: int) -> int:
        """Of how many rows or images one is kept."""
        least = max(1, -(-self._bytes(need.names) // max(limit, 1)), -(-need.scratch // max(memory, 1)))
        if least == 1:
            return 1
        shapes = {name: self._shapes[name] for name in need.names}
        rows = min(value[..., 0].numel() for value in shapes.values())
        places = [(shapes[name].ndim - axis[0], axis[1]) for name in need.names if (axis := self._axes.get(name))]
        if need.rows:
            each = math.prod(max(1, value[..., 0].numel() // self._count) for value in shapes.values())
        else:
            each = places[0][1] if len(set(places)) == 1 else 0  # of which every stride but 1 is a multiple
        most = next(stride for stride in range(rows // min(rows, LEAST_ROWS), 0, -1) if math.gcd(stride, each) == 1)
        if least > most:
            wanted = 2 * (max(self._bytes(need.names) * 8 // 3, need.scratch) // most + 4)
            shown = " and ".join(str(tuple(value.shape)) for value in shapes.values())
            raise ValueError(
                f"memory = {2 * memory:,} bytes are too few for {need.site}, which reads {shown}: "
                f"give {wanted:,} or more"
            )
        return coprime(least, each)

    def _cut(self, parts: Sequence[_Part], memory: int) -> list[_Part]:
        """The parts with their ends and cuts; sets the batch and how long each value lives."""
        ends = list(accumulate((max(self._home[name] for name in part.names) for part in parts), max))
        # A value is wanted up to the node that reads it last, and up to the cut before the last part that holds it.
        self._lasts = {name: index for index, node in enumerate(self._program.nodes) for name in node.refs()}
        gaps: list[range] = []
        for number, end in enumerate(ends):
            later = frozenset[str]().union(*(part.names for part in parts[number + 1 :]))
            first = min((self._home[name] - 1 for name in later if self._home[name] > end), default=end)
            gaps.append(range(end, first + 1))
            for name in later:
                self._lasts[name] = max(self._lasts.get(name, 0), first)
        change, barred = ([0] * (len(self._program.nodes) + 2) for _ in range(2))
        for name, last in self._lasts.items():
            if self._home[name]:
                value = self._shapes[name]
                for counts, amount in ((change, _size(value)), (barred, isinstance(value, (tuple, list)))):
                    counts[self._home[name]] += amount
                    counts[last + 1] -= amount
        live, several = list(accumulate(change)), list(accumulate(barred))
        cuts = [min(gap, key=lambda position: (several[position], live[position])) for gap in gaps]
        kept = [not several[cut] and live[cut] <= memory * 3 // 8 for cut in cuts[:-1]] + [False]
        # A batch's values while it runs, where it starts, and what is taken from it.
        peak = max(live[index] + _size(self._shapes[node.name]) for index, node in enumerate(self._program.nodes))
        peak += max(live[cut] if keep else 0 for cut, keep in zip(cuts, kept, strict=True))
        peak += max(self._bytes(part.names) for part in parts)
        self._batch = min(self._count, max(2, memory * self._count // (4 * peak)))
        return [
            replace(part, end=end, cut=cut if keep else None)
            for part, end, cut, keep in zip(parts, ends, cuts, kept, strict=True)
        ]

    def _bytes(self, names: Iterable[str]) -> int:
        return sum(_size(self._shapes[name]) for name in names if self._home[name])

    @torch.no_grad()  # a thread's own setting
    def _observe(self, number: int) -> None:
        part = self._parts[number]
        self._values, self._now = {}, None
        _, start, chunks = self._checkpoint if number >= self._checkpoint[0] else self._beginning
        stop = part.end if part.cut is None else part.cut
        live = [] if part.cut is None else self._live(part.cut)
        made = [name for name in part.names if self._home[name]]
        alike = self._batch < self._count and self._separable(start, stop, chunks[0], {*made, *live})
        if not alike:
            chunks = [self._joined(chunks)]
        elif len(chunks) == 1:
            chunks = self._split(chunks[0])
        if part.cut is not None:
            self._checkpoint = self._beginning  # an error on the way starts anew
        queue, following = deque(chunks), list[Chunk]()
        del chunks  # so that each is freed as it has been read
        values = {name: self._thinned(name, self._images[name], part, 0) for name in part.names & self._images.keys()}
        before = 0
        while queue:
            chunk = queue.popleft()
            result = self._run(start, stop, chunk, {*made, *live})
            if part.cut is not None:
                following.append({name: chunk[name] for name in self._program.inputs})
                for name in live:
                    shared = alike and self._axes[name] is None
                    following[-1][name] = following[0][name] if shared and before else _own(result[name])
            for name in made:
                self._place(name, result.pop(name), part, before, alike, values)
            before += self._images_of(chunk)
            del result  # or it would be held beside the next batch's
        if part.cut is not None:
            self._checkpoint = (number + 1, part.cut, following)
        self._values, self._now = values, number

    def _run(self, start: int, stop: int, given: Chunk, names: Collection[str]) -> Chunk:
        """The values of these names, from those that the first `start` nodes made."""
        sizes = self._sizes_of(self._images_of(given))

        def known(ref: Ref) -> Any:
            return sizes[ref.name] if ref.name in sizes and self._home[ref.name] <= start else ref

        nodes = tuple(
            replace(
                node,
                args=map_refs(node.args, known),
                kwargs={key: map_refs(value, known) for key, value in node.kwargs.items()},
            )
            for node in self._program.nodes[start:stop]
        )
        output = {name: Ref(name) for name in names}
        part = replace(self._program, inputs=tuple(given), nodes=nodes, output=output)
        result: Chunk = part.run(tuple(given.values()), self._check)
        return result

    def _check(self, node: Node, args: tuple[Any, ...], result: Any) -> None:
        if node.name in self._wanted and not bool(torch.isfinite(result).all()):
            raise CalibrationError(f"{node.scope or node.name} puts out NaN or infinite values on these images")

    def _separable(self, start: int, stop: int, chunk: Chunk, names: Collection[str]) -> bool:
        """Whether two images have alone what they have together."""
        if any(name not in self._axes for name in (*chunk, *names)):
            return False
        together = self._run(start, stop, self._part_of(chunk, 0, 2), names)
        alone = [self._run(start, stop, self._part_of(chunk, index, 1), names) for index in range(2)]
        for name, value in together.items():
            axis = self._axes[name]
            pieces = [one[name] for one in alone]
            pairs = [(value, piece) for piece in pieces] if axis is None else [(value, torch.cat(pieces, axis[0]))]
            if not all(_close(*pair) for pair in pairs):
                return False
        return True

    def _sizes_of(self, count: int) -> dict[str, int]:
        if count not in self._sizes:
            self._sizes[count] = _integers(measured(self._program, list(self._images.values()), count))
        return self._sizes[count]

    def _live(self, position: int) -> list[str]:
        """The names of the tensors that the nodes from here on, or later parts, read of what earlier ones made."""
        made = [name for name, last in self._lasts.items() if 0 < self._home[name] <= position <= last]
        return [name for name in made if isinstance(self._shapes[name], Tensor)]

    def _images_of(self, chunk: Chunk) -> int:
        return len(chunk[self._program.inputs[0]])

    def _part_of(self, chunk: Chunk, first: int, count: int) -> Chunk:
        """The same of some of its images."""
        result = {}
        for name, value in chunk.items():
            axis = self._axes[name]
            result[name] = value if axis is None else value.narrow(axis[0], first * axis[1], count * axis[1])
        return result

    def _split(self, chunk: Chunk) -> list[Chunk]:
        if self._batch >= self._count:
            return [chunk]
        starts = range(0, self._count, self._batch)
        return [self._part_of(chunk, first, min(self._batch, self._count - first)) for first in starts]

    def _joined(self, chunks: Sequence[Chunk]) -> Chunk:
        if len(chunks) == 1:
            return chunks[0]
        result = dict(self._images)
        for name in chunks[0].keys() - result.keys():
            axis = self._axes[name]
            result[name] = chunks[0][name] if axis is None else torch.cat([chunk[name] for chunk in chunks], axis[0])
        return result

    def _counted(self, name: str, part: _Part) -> tuple[int, int] | None:
        """The dimension that counts what is kept of a value, or left out, and how many an image has of it."""
        shared = name in self._axes and self._axes[name] is None
        if part.stride > 1 and part.rows and not shared:
            return 0, self._shapes[name][..., 0].numel() // self._count
        return self._axes.get(name)

    def _thinned(self, name: str, value: Tensor, part: _Part, before: int) -> Tensor:
        """What is kept of a value of some images, if so many others went before; the same whatever the batch."""
        counted = self._counted(name, part)
        if part.stride == 1 or counted is None:
            return value
        dim, each = counted
        if part.rows:
            axis = self._axes.get(name)
            value = value.movedim(axis[0] if axis else 0, 0).reshape(-1, value.shape[-1])
        return value[(slice(None),) * dim + (slice(-before * each % part.stride, None, part.stride),)]

    def _place(self, name: str, value: Tensor, part: _Part, before: int, alike: bool, values: Chunk) -> None:
        """Put what is kept of a batch's value where it belongs among that of all images."""
        piece, counted = self._thinned(name, value, part, before), self._counted(name, part)
        if not alike or counted is None:  # it is of all images already
            values[name] = piece if part.stride == 1 else piece.clone()
            return
        dim, each = counted
        if name not in values and part.stride == 1:  # lies in memory as that of all images at once does
            values[name] = torch.empty_like(self._shapes[name], device=piece.device)
        elif name not in values:
            shape = list(piece.shape)
            shape[dim] = -(-self._count * each // part.stride)
            values[name] = piece.new_empty(shape)
        values[name].narrow(dim, -(-before * each // part.stride), piece.shape[dim]).copy_(piece)


def _integers(values: Mapping[str, Any]) -> dict[str, int]:
    return {name: value for name, value in values.items() if isinstance(value, int)}


def _size(value: Any) -> int:
    """Bytes of a tensor or several."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(_size, value)) if isinstance(value, (tuple, list)) else 0


def _axes(two: Mapping[str, Any], three: Mapping[str, Any]) -> dict[str, tuple[int, int] | None]:
    """The dimension of each value that counts images and how many entries an image has; None where none counts them.

    two, three: the values of so many images. Tensors of which it cannot be told are left out.
    """
    axes: dict[str, tuple[int, int] | None] = {}
    for name, value in two.items():
        if not isinstance(value, Tensor):
            continue
        changed = [dim for dim in range(value.ndim) if value.shape[dim] != three[name].shape[dim]]
        each = three[name].shape[changed[0]] - value.shape[changed[0]] if changed else 0
        if not changed:
            axes[name] = None
        elif len(changed) == 1 and value.shape[changed[0]] == 2 * each:
            axes[name] = changed[0], each
    return axes


def _own(value: Tensor) -> Tensor:
    """In memory of its own, where it is part of something larger."""
    return value.clone() if value.untyped_storage().nbytes() > _size(value) else value


def _close(first: Tensor, second: Tensor) -> bool:
    """Equal but for rounding: within the root of the type's precision, of the largest value."""
    if not first.is_floating_point():
        return torch.equal(first, second)
    precision = torch.finfo(first.dtype).eps ** 0.5
    largest = first.abs().nan_to_num(posinf=0).max() if first.numel() else 0.0
    return torch.allclose(first, second, rtol=precision, atol=float(largest) * precision, equal_nan=True)
