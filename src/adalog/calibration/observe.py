"""Observe the values that a program's sites read on the calibration images, within a memory limit."""

import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from adalog.calibration.values import Chunk, Values, batch_that_fits, held_bytes, in_own_memory, memory_to_hold
from adalog.errors import CalibrationError
from adalog.graph.program import Node, Program
from adalog.graph.stretches import NEVER, live_bytes, passed_bytes, peak_bytes
from adalog.graph.tracing import size_in_bytes
from adalog.quantizers.quantiles import coprime

LEAST_ROWS = 1024  # the least number of rows kept of a value; all rows are kept if it has fewer


@dataclass(frozen=True)
class Request:
    """The values that the search of one site needs together.

    by_row: True if single rows (all dimensions but the last) can be left out; if False, whole images or windows, the
    same ones of every value. scratch: bytes that the search takes in addition. stride: every n-th row, image or window
    is enough, for about this n.
    """

    site: str
    names: frozenset[str]
    by_row: bool
    scratch: int
    stride: int = 1


@dataclass(frozen=True)
class _Stage:
    """Values that are held together; the first `end` nodes compute all of them. stride, by_row: as in `Request`.

    cut: the number of nodes after which the values that later stages start from are held; None if they are not held.
    """

    names: frozenset[str]
    stride: int
    by_row: bool
    end: int = 0
    cut: int | None = None


class Observations:
    """The values of a program on images, by name, with about `memory` bytes held at a time (docs/design/search.md).

    If the values of all requests fit in memory, one forward of all images computes them, and they are kept. Otherwise
    the program runs in stages. Requests in the order of the stages cost one forward in total; a request for an earlier
    stage starts from the images again. If the values that a stage would start from exceed their share of the memory, it
    starts from those of an earlier stage or from the images. If a request takes more than its share, or more scratch
    than `memory`, or if fewer rows are enough for it, every n-th row, image or window of it is kept; n has no common
    factor with the number of rows or windows in an image. Several threads may call `read` at the same time.

    Raises ValueError if fewer than 1,024 rows of a request would be kept. `read` raises CalibrationError if a value is
    not finite.
    """

    def __init__(self, program: Program, images: Sequence[Tensor], requests: Iterable[Request], memory: int):
        self._program = program
        self._all = Values(program, images)
        self._shapes, self._batch = self._all.shapes, self._all.count
        # The number of nodes after which each value exists: 0 for inputs and stored tensors.
        self._home = dict.fromkeys((*program.inputs, *program.tensors), 0)
        self._home |= {node.name: number for number, node in enumerate(program.nodes, 1)}
        # When each value is held: until the last node that reads it, and until the cut before the last stage that
        # holds it.
        self._lives = replace(program, output=()).lives()
        by_names: dict[frozenset[str], Request] = {}
        for request in requests:
            names = request.names.difference(program.tensors)
            other = by_names.get(names, request)
            by_row, scratch = request.by_row and other.by_row, max(request.scratch, other.scratch)
            by_names[names] = Request(other.site, names, by_row, scratch, min(request.stride, other.stride))
        self._stages = self._divide(list(by_names.values()), memory)
        self._requested = frozenset[str]().union(*(stage.names for stage in self._stages))
        self._lock = Lock()
        self._now: int | None = None
        self._values: Chunk = {}
        # The first stage that starts from here, the number of nodes that ran before it, and the values to start from.
        self._beginning = (0, 0, self._all.split(self._all.images, self._batch))
        self._checkpoint = self._beginning

    def stage(self, names: Collection[str]) -> int:
        """Return the index of the stage that computes all of these values, which must be part of one request."""
        computed = set(names) - self._program.tensors.keys()
        for number, stage in enumerate(self._stages):
            if computed <= stage.names:
                return number
        raise KeyError(", ".join(sorted(computed)))

    def stride(self, names: Collection[str]) -> int:
        """Return n such that every n-th row, image or window of these values is kept."""
        return self._stages[self.stage(names)].stride

    def alike(self, name: str, names: Collection[str], value: Tensor) -> Tensor:
        """Return the rows or images of another value that match the kept ones of `name`, which `names` includes."""
        return self._thin(name, value, self._stages[self.stage(names)], 0)

    def read(self, names: Collection[str]) -> Chunk:
        """Return the kept part of these values; one request must include all of them."""
        with self._lock:
            number = self.stage(names)
            if number != self._now:
                self._observe(number)
            return {name: {**self._program.tensors, **self._values}[name] for name in names}

    # --- plan: which values are held together, and where each stage starts ---

    def _divide(self, requests: Sequence[Request], memory: int) -> list[_Stage]:
        names = frozenset[str]().union(*(request.names for request in requests))
        storages = [self._shapes[name].untyped_storage() for name in names if self._home[name]]
        sizes = {storage._cdata: storage.nbytes() for storage in storages}
        if sum(sizes.values()) <= memory and all(
            request.scratch <= memory and request.stride == 1 for request in requests
        ):
            return [_Stage(names, 1, False, max(self._home[name] for name in names))]
        limit = held_bytes(memory)
        stages: list[_Stage] = []
        for request, stride in zip(requests, self._strides(requests, limit, memory), strict=True):
            if stages and stages[-1].stride == stride == 1 and self._bytes(stages[-1].names | request.names) <= limit:
                stages[-1] = replace(stages[-1], names=stages[-1].names | request.names)
            else:
                stages.append(_Stage(request.names, stride, request.by_row))
        return self._with_cuts(stages, memory)

    def _strides(self, requests: Sequence[Request], limit: int, memory: int) -> list[int]:
        """Return n for each request such that every n-th row, image or window of its values fits in memory.

        Raises ValueError, with the memory that is enough for all requests, if this leaves too few rows of one.
        """
        strides, short = list[int](), list[tuple[int, Request]]()
        for request in requests:
            least = max(1, -(-self._bytes(request.names) // max(limit, 1)), -(-request.scratch // max(memory, 1)))
            divisor, most = (1, 1) if max(least, request.stride) == 1 else self._possible(request)
            if least > most:
                size = max(memory_to_hold(self._bytes(request.names)), request.scratch)
                short.append((2 * (size // most + 4), request))
            else:
                strides.append(coprime(max(least, min(request.stride, most)), divisor))
        if short:
            enough, request = max(short, key=lambda pair: pair[0])
            shapes = " and ".join(str(tuple(self._shapes[name].shape)) for name in sorted(request.names))
            raise ValueError(
                f"memory = {2 * memory:,} bytes is too little for {request.site}, which reads values of shape "
                f"{shapes}: use {enough:,} bytes or more"
            )
        return strides

    def _possible(self, request: Request) -> tuple[int, int]:
        """Return a number with which a request's stride may have no common factor, and the largest such stride."""
        shapes = {name: self._shapes[name] for name in request.names}
        rows = [value[..., 0].numel() for value in shapes.values()]
        places = {(shapes[name].ndim - axis[0], axis[1]) for name in shapes if (axis := self._all.axes.get(name))}
        if request.by_row:
            entries = math.prod(max(1, count // self._all.count) for count in rows)
        else:
            entries = places.pop()[1] if len(places) == 1 else 0  # gcd(n, 0) is n, so 0 allows only stride 1
        largest = min(rows) // min(*rows, LEAST_ROWS)
        return entries, next(stride for stride in range(largest, 0, -1) if math.gcd(stride, entries) == 1)

    def _with_cuts(self, stages: Sequence[_Stage], memory: int) -> list[_Stage]:
        """Return the stages with their ends and cuts; also set the batch size and how long each value is held."""
        ends = list(accumulate((max(self._home[name] for name in stage.names) for stage in stages), max))
        gaps: list[range] = []  # the positions at which the next stage could start
        for number, end in enumerate(ends):
            later = frozenset[str]().union(*(stage.names for stage in stages[number + 1 :]))
            first = min((self._home[name] - 1 for name in later if self._home[name] > end), default=end)
            gaps.append(range(end, first + 1))
            for name in later & self._lives.keys():
                life = self._lives[name]
                self._lives[name] = range(life.start, max(life.stop, first + 1))
        sizes = {name: passed_bytes(self._shapes[name]) for name in self._lives}
        live = live_bytes(self._lives, sizes, len(self._program.nodes))
        cuts = [min(gap, key=lambda position: live[position]) for gap in gaps]
        fits = [live[cut] < NEVER and live[cut] <= held_bytes(memory) for cut in cuts[:-1]] + [False]
        # A batch's values while it runs, the values that it starts from, and the values that are taken from it.
        peak = peak_bytes(self._program, self._shapes, self._lives)
        peak += max(live[cut] if keep else 0 for cut, keep in zip(cuts, fits, strict=True))
        peak += max(self._bytes(stage.names) for stage in stages)
        self._batch = batch_that_fits(self._batch, peak, memory, least=2)
        return [
            replace(stage, end=end, cut=cut if keep else None)
            for stage, end, cut, keep in zip(stages, ends, cuts, fits, strict=True)
        ]

    def _bytes(self, names: Iterable[str]) -> int:
        return sum(size_in_bytes(self._shapes[name]) for name in names if self._home[name])

    # --- run of a stage ---

    @torch.no_grad()  # the gradient mode is set per thread
    def _observe(self, number: int) -> None:
        stage, images = self._stages[number], self._all.images
        self._values, self._now = {}, None
        chunks = (self._checkpoint if number >= self._checkpoint[0] else self._beginning)[2]
        # The tensors of earlier nodes that nodes from the cut on read, or that later stages hold.
        live = [name for name, life in self._lives.items() if stage.cut is not None and stage.cut in life]
        live = [name for name in live if isinstance(self._shapes[name], Tensor)]
        names = [name for name in stage.names if self._home[name]]
        apart = self._batch < self._all.count and self._all.keeps_apart(chunks[0], {*names, *live})
        if not apart:
            started = chunks[0].keys() - images.keys()
            chunks = [images | self._all.join(chunks, started, self._all.count)] if len(chunks) > 1 else chunks
        elif len(chunks) == 1:
            chunks = self._all.split(chunks[0], self._batch)
        if stage.cut is not None:
            self._checkpoint = self._beginning  # the next run starts here if this one fails
        queue, following = deque(chunks), list[Chunk]()
        del chunks  # so that each chunk is freed once it has been read
        values = {name: self._thin(name, images[name], stage, 0) for name in stage.names & images.keys()}
        before = 0
        while queue:
            chunk = queue.popleft()
            result = self._run(chunk, {*names, *live})
            if stage.cut is not None:
                following.append({name: chunk[name] for name in images})
                for name in live:
                    shared = apart and self._all.axes[name] is None and before
                    following[-1][name] = following[0][name] if shared else in_own_memory(result[name])
            for name in names:
                self._place(name, result.pop(name), stage, before, apart, values)
            before += self._all.count_of(chunk)
            del result  # free it before the next batch runs
        if stage.cut is not None:
            self._checkpoint = (number + 1, stage.cut, following)
        self._values, self._now = values, number

    def _run(self, chunk: Chunk, names: Collection[str]) -> Chunk:
        """Compute named values for the images of a chunk; wait for the device once to check that they are finite."""
        checks: list[tuple[Node, Tensor]] = []

        def check(node: Node, args: tuple[Any, ...], result: Any) -> None:
            if node.name in self._requested:
                checks.append((node, torch.isfinite(result).all()))

        result = self._all.compute(chunk, names, watch=check)
        finite = torch.stack([check for _, check in checks]).tolist() if checks else []
        for (node, _), is_finite in zip(checks, finite, strict=True):
            if not is_finite:
                raise CalibrationError(
                    f"{node.scope or node.name} outputs NaN or infinite values on these images: "
                    "check the images and the model's weights"
                )
        return result

    def _axis_of(self, name: str, stage: _Stage) -> tuple[int, int] | None:
        """Return (dimension, entries per image) along which a value is thinned; None if all images share the value."""
        axes = self._all.axes
        shared = name in axes and axes[name] is None
        if stage.stride > 1 and stage.by_row and not shared:
            return 0, self._shapes[name][..., 0].numel() // self._all.count
        return axes.get(name)

    def _thin(self, name: str, value: Tensor, stage: _Stage, before: int) -> Tensor:
        """Return the kept part of a value, which does not depend on batches. before: images in earlier batches."""
        if stage.stride == 1 or (counted := self._axis_of(name, stage)) is None:
            return value
        dim, entries = counted
        if stage.by_row:
            axis = self._all.axes.get(name)
            value = value.movedim(axis[0] if axis else 0, 0).reshape(-1, value.shape[-1])
        return value[(slice(None),) * dim + (slice(-before * entries % stage.stride, None, stage.stride),)]

    def _place(self, name: str, value: Tensor, stage: _Stage, before: int, apart: bool, values: Chunk) -> None:
        """Copy the kept part of a batch's value to its place in the value of all images."""
        piece = self._thin(name, value, stage, before)
        if not apart or (counted := self._axis_of(name, stage)) is None:  # it already covers all images
            values[name] = piece if stage.stride == 1 else piece.clone()
            return
        dim, entries = counted
        if name not in values and stage.stride == 1:  # the memory layout of all images at once
            values[name] = torch.empty_like(self._shapes[name], device=piece.device)
        elif name not in values:
            kept = -(-self._all.count * entries // stage.stride)
            values[name] = piece.new_empty((*piece.shape[:dim], kept, *piece.shape[dim + 1 :]))
        values[name].narrow(dim, -(-before * entries // stage.stride), piece.shape[dim]).copy_(piece)
