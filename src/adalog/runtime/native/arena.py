"""Lay out the memory of a plan, and the calls of kernels that use it."""

import ctypes
import functools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adalog.graph.program import leaves_of, map_leaves
from adalog.runtime.native import abi
from adalog.runtime.native.floats import COPY, FLOATS
from adalog.runtime.native.products import bytes_behind, place, top_of
from adalog.runtime.native.steps import Rows
from adalog.runtime.native.tables import Codes, Finish, Lookup, buckets_of, few_buckets_of, search_tables


class Bytes(list[Any]):
    """A value as planes of bytes. If an operation returns several values (a split), each plane holds all of them."""


def addresses(value: Any) -> set[int]:
    """Return the addresses of the memory of all tensors in a value."""
    return {leaf.untyped_storage().data_ptr() for leaf in leaves_of(value) if isinstance(leaf, Tensor)}


def in_memory(value: Tensor) -> tuple[list[int], list[int]]:
    """Return the dimensions in order of stride, longest first, and the permutation that undoes this order."""
    order = sorted(range(value.ndim), key=lambda i: -value.stride()[i])
    return order, [order.index(i) for i in range(value.ndim)]


def copy(static: Any, value: Any) -> None:
    """Copy the tensors of a value into the tensors of another value with the same structure."""
    for target, source in zip(leaves_of(static), leaves_of(value), strict=True):
        if isinstance(target, Tensor):
            target.copy_(source)


@dataclass(frozen=True)
class PlanCall:
    """One call of a plan, for the step that computes the value `step`.

    operation: the name of a kernel or of an operation. run: makes the call, and returns None or the status of a kernel.
    arguments: the structure for a kernel; (result, arguments) if NumPy runs the operation; None if torch does.
    """

    step: str
    operation: str
    run: Callable[[], int | None]
    arguments: ctypes.Structure | tuple[Tensor, tuple[Any, ...]] | None


class Arena:
    """Memory that steps share: once no later step reads a value, its memory is used again."""

    def __init__(self) -> None:
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)  # by size
        self.blocks: list[Tensor] = []  # all memory of the arena, free or taken
        self._in_use: dict[int, Tensor] = {}  # by address
        self._live = Counter[int]()  # by address: the number of values there

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Take memory for a tensor. It stays taken until `drop` or `give_scratch` frees it."""
        count = math.prod(shape)
        size = max(64, -(-count * dtype.itemsize // 64) * 64)
        if not self._free[size]:
            self.blocks.append(torch.zeros(size, dtype=torch.uint8))
            self._free[size].append(self.blocks[-1])
        memory = self._free[size].pop()
        self._in_use[memory.data_ptr()] = memory
        return memory[: count * dtype.itemsize].view(dtype).view(shape)

    def _give(self, address: int) -> None:
        if address in self._in_use:
            memory = self._in_use.pop(address)
            self._free[len(memory)].append(memory)

    def hold(self, value: Any) -> None:
        """Count a value as a user of its memory."""
        self._live.update(addresses(value))

    def drop(self, value: Any) -> None:
        """Stop counting a value, and free its memory if it was the last value there."""
        for address in addresses(value):
            self._live[address] -= 1
            if not self._live[address]:
                del self._live[address]
                self._give(address)

    def holds_alone(self, value: Tensor) -> bool:
        """Return True if a value is the only one in its memory of the arena, and starts where the memory starts."""
        address = value.data_ptr()
        return address in self._in_use and self._live.get(address) == 1

    def give_scratch(self, scratch: Sequence[Tensor]) -> None:
        """Free these pieces of memory, except those that hold a value."""
        for value in scratch:
            if value.data_ptr() not in self._live:
                self._give(value.data_ptr())


class Layout:
    """The part of a plan that is laid out so far.

    calls: the calls, in order. alive: the objects that the arguments of kernels point to. step: the name of the value
    that the current step computes. scratch: the memory that only the current step uses.
    """

    def __init__(self, context: abi.Context):
        self._context = context
        self.arena = Arena()
        self.calls: list[PlanCall] = []
        self.alive: list[Any] = []
        self.step = ""
        self.scratch: list[Tensor] = []

    def keep(self, value: Tensor) -> int:
        """Return the address of a value, and keep the value alive as long as the plan."""
        self.alive.append(value)
        return value.data_ptr()

    def call(self, kernel: str, arguments: ctypes.Structure) -> None:
        """Add a call of a kernel."""
        self.alive.append(arguments)
        self.calls.append(PlanCall(self.step, kernel, self._context.bind(kernel, arguments), arguments))

    def floats(self, operation: str, out: Tensor, *args: Any) -> None:
        """Add a call of an operation in `FLOATS`."""
        run = functools.partial(FLOATS[operation], *map_leaves((out, *args), Tensor, Tensor.numpy))
        self.calls.append(PlanCall(self.step, operation, run, (out, args)))

    def take_scratch(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Take memory until the end of the current step."""
        memory = self.arena.take(shape, dtype)
        self.scratch.append(memory)
        return memory

    def like(self, value: Any) -> Any:
        """Take memory for a result, with the memory order that torch chose: images may have their channels last."""

        def take(tensor: Tensor) -> Tensor:
            order, back = in_memory(tensor)
            return self.arena.take([tensor.shape[i] for i in order], tensor.dtype).permute(back)

        return map_leaves(value, Tensor, take)

    def dense(self, value: Tensor) -> Tensor:
        """Return the value if it is contiguous, or else the memory for a contiguous copy that each call makes."""
        if value.is_contiguous():
            return value
        static = self.take_scratch(value.shape, value.dtype)
        self.floats(COPY, static, value)
        return static

    def make_dense(self, plane: Tensor, lead: Sequence[int]) -> Tensor:
        """Return bytes whose rows or columns are dense, and whose batch dimensions, `lead`, can be viewed as one."""
        view = plane = plane.expand(*lead, *plane.shape[-2:]) if len(lead) > 2 else plane
        if len(plane.shape[:-3]) > 1:
            try:
                plane.view(-1, *plane.shape[-3:])
            except RuntimeError:
                view = self.dense(plane)
        return view if 1 in (view.stride(-1), view.stride(-2)) else self.dense(view)

    def results(self, finish: Finish, shape: Sequence[int], rows: Rows | None = None) -> list[Tensor]:
        """Take memory for the results of a kernel, one tensor per plane. Places without a row hold an empty row."""
        count = finish.planes if isinstance(finish, Lookup) else 1
        dtype = torch.float32 if finish is None else torch.uint8
        if rows is None or rows.whole:
            return [self.arena.take(shape, dtype) for _ in range(count)]
        # Steps do not share this memory, because no call fills the empty places again. The kernel's rows may be longer
        # or shorter than the rows of the shape, because views may have changed them.
        columns = finish.scale.numel() if isinstance(finish, Codes) else 1
        empty = torch.zeros(columns) if rows.empty is None else rows.empty
        if isinstance(finish, Codes):
            planes = [((empty / finish.scale).round() + finish.zero).clamp(torch.zeros(()), finish.top)]
        elif finish is not None:
            bytes_ = finish.values[torch.searchsorted(finish.thresholds, empty, right=True)]
            planes = [bytes_ & 255, bytes_ >> 8][:count]
        else:
            planes = [empty]
        rows_of = (plane.to(dtype).expand(math.prod(shape) // len(plane), -1) for plane in planes)
        out = [value.clone(memory_format=torch.contiguous_format).view(tuple(shape)) for value in rows_of]
        self.alive += out
        return out

    def results_by_token(self, finish: Finish, shape: Sequence[int]) -> list[Tensor]:
        """Take memory for results (..., heads, rows, columns) in which the heads of a row follow each other."""
        *lead, heads, rows, columns = shape
        return [plane.transpose(-3, -2) for plane in self.results(finish, (*lead, rows, heads, columns))]

    def lookup(self, table: Lookup) -> abi.Steps:
        """Create the tables of a function of few values."""
        depth, heap, values = search_tables(table.thresholds, table.values)
        buckets, places = buckets_of(table.thresholds, table.values)
        steps = abi.Steps(
            heap=self.keep(heap),
            values=self.keep(values),
            length=len(heap),
            depth=depth,
            planes=table.planes,
            buckets=self.keep(buckets),
            count=len(buckets),
            top=top_of(table.values),
            **places,
        )
        few = few_buckets_of(table.thresholds)
        if few is not None:
            near, steps.most, steps.near_slope, steps.near_origin = few
            steps.near, steps.near_length = self.keep(near), near.numel()
        return steps

    def output(
        self, finish: Finish, out: Sequence[Tensor], scale: Tensor, bias: Tensor | None, activation: str = ""
    ) -> abi.Output:
        """Describe what a kernel does with its results x: it computes x * scale + bias, an activation and the finish.

        scale, bias: (columns,); scale is in float64. activation: one of `abi.ACTIVATIONS`.
        """
        offset = torch.zeros_like(scale) if bias is None else bias.double().reshape(-1).expand(len(scale))
        number = abi.ACTIVATIONS.index(activation)
        arguments = abi.Output(kind=abi.FLOATS, parameters=len(scale), activation=number, **place(*out))
        if isinstance(finish, Codes):
            if activation:
                arguments.code_scale = self.keep((1 / finish.scale.double()).float().contiguous())
                arguments.code_zero = self.keep(finish.zero.float().contiguous())
            else:
                scale, offset = scale / finish.scale.double(), offset / finish.scale.double() + finish.zero.double()
            arguments.kind, arguments.high = abi.CODES, self.keep(finish.top)
            arguments.top = self.keep(finish.top.to(torch.uint8))
        elif isinstance(finish, Lookup):
            arguments.kind, arguments.steps = abi.STEPS, self.lookup(finish)
        arguments.scale = self.keep(scale.float().contiguous())
        arguments.bias = self.keep(offset.float().contiguous())
        return arguments

    def move_rows(self, output: abi.Output, rows: Rows, residual: Tensor | None) -> None:
        """Set the places at which an output stores its rows, and the values that it adds to them."""
        added_to = None
        if residual is not None:
            residual, added_to = self.dense(residual), rows.added_to
            output.residual, output.residual_bytes = residual.data_ptr(), bytes_behind(residual)
        for field, numbers in (("place", rows.place), ("added_to", added_to)):
            if numbers is not None:
                setattr(output, field, self.keep(numbers))
                output.places = len(numbers)
