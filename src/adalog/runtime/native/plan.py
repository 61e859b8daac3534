"""A program in few steps of compiled kernels, over memory laid out once for one batch size: what `native` runs.

What a kernel can do at once is found in the flow of data, never by a model's name: a norm, a product or an activation
whose every reader is a quantizer puts out codes, and moves (views, permutations) then move bytes; moves of whole rows
(windows, rolls, padding) cost nothing, since a norm or a product stores each row where they take it; softmax between
two products is done inside an attention; a product adds its residual. All else runs as torch does it.
"""

import ctypes
import functools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from adalog.errors import AdalogError, ProgramError, one_line
from adalog.graph.program import Node, Program, Ref, aten, evaluate, refs_of
from adalog.graph.sites import MOVES
from adalog.quantizers import Quantizer, UniformQuantizer
from adalog.runtime import native
from adalog.runtime.native import CODES, FLOATS, STEPS, Context, Encoder, Output, Planes, Product, place, room_of
from adalog.runtime.reference import ENCODE, PRODUCT

SAME = "adalog.same"  # a value by another name, in programs of this module alone
_NORM = "aten.layer_norm.default"
_POINTWISE = aten(
    "gelu.default relu.default silu.default mish.default sigmoid.default tanh.default hardswish.default "
    "hardsigmoid.default hardtanh.default relu6.default leaky_relu.default elu.default erf.default softplus.default "
    "square.default abs.default neg.default mul.Tensor add.Tensor sub.Tensor div.Tensor mul.Scalar add.Scalar "
    "sub.Scalar div.Scalar clamp.default clamp_min.default clamp_max.default"
)
_FACTORS = aten("mul.Tensor div.Tensor mul.Scalar div.Scalar")
_SCALINGS = _FACTORS | aten("add.Tensor add.Scalar")
_PADS = aten("pad.default constant_pad_nd.default")
_RESHAPES = aten("reshape.default unsqueeze.default squeeze.dim flatten.using_ints unflatten.int")
_HIDING = aten("masked_fill.Scalar")  # of nothing, as by a mask that lets all pass; else torch does it


class _Bytes(list[Any]):
    """A value as planes of bytes; of several values at once (a split), each plane holds them all."""


# --- functions of few values -----------------------------------------------------------------------------------------


def _float_of(key: Tensor) -> Tensor:
    """The float32 of a place in the order of all: int64 -> float32."""
    return torch.where(key < 0, key ^ 0x7FFFFFFF, key).to(torch.int32).view(torch.float32)


def steps_of(values: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """A function of float32 as thresholds, ascending, and the value from each on, one more: (float32, int64).

    values: takes few values, and is looked at 256 times an octave; between two looks it changes in one direction.
    """
    most = 0x7F7FFFFF
    keys = torch.arange(-most - 1, most, 1 << 15)
    found = values(_float_of(keys))
    changes = (found[1:] != found[:-1]).nonzero()[:, 0]
    low, high = keys[changes], keys[changes + 1]
    left, right = found[changes], found[changes + 1]
    places, after = [], []
    while len(low):
        # the first place in (low, high] whose value is not that of `low`
        start, bottom, top = left, low, high
        while bool((top - bottom > 1).any()):
            middle = (bottom + top) // 2
            same = values(_float_of(middle)) == start
            bottom, top = torch.where(same, middle, bottom), torch.where(same, top, middle)
        value = values(_float_of(top))
        places.append(top)
        after.append(value)
        more = value != right
        low, high, left, right = top[more], high[more], value[more], right[more]
    if not places:
        return torch.empty(0), found[:1]
    place_of, order = torch.cat(places).sort()
    return _float_of(place_of), torch.cat([found[:1], torch.cat(after)[order]])


def search_tables(thresholds: Tensor, values: Tensor) -> tuple[int, Tensor, Tensor]:
    """(depth, heap, values) as `Steps` in native.cpp has them, of a function of few values; values: int32."""
    depth = max(4, len(thresholds).bit_length())
    count = 2**depth
    padded = torch.full((count - 1,), -math.inf)  # which nothing is below
    padded[: len(thresholds)] = thresholds.flip(0)
    heap = torch.full((count + 32,), -math.inf)
    for level in range(depth):  # 2**level thresholds, from one to the next (count >> level)
        middle = (count >> (level + 1)) - 1
        heap[1 << level : 2 << level] = padded[middle :: count >> level]
    entries = values.new_zeros(count + 32)
    entries[: len(values)] = values.flip(0)
    return depth, heap, entries.to(torch.int32)


# --- what becomes of a value -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Codes:
    """Codes by column: (columns,) each. scale: what a value is divided by."""

    scale: Tensor
    zero: Tensor
    top: Tensor


@dataclass(frozen=True)
class _Steps:
    """Bytes by value."""

    thresholds: Tensor
    values: Tensor
    planes: int


Finish = _Codes | _Steps | None  # None: floats


@dataclass(frozen=True)
class _Rows:
    """Where moves that nothing else reads take the rows of a value: `last` is what the last of these makes.

    place: of each row, among those of `last` that are as long, or -1; int32, None where they stay. whole: whether each
    place of `last` is one of a row, or else zeros were put between. gone: what needs not run. added: what is added on
    the way, if anything, and to which of its rows each is, int32, None where to its own.
    """

    last: str
    place: Tensor | None = None
    whole: bool = True
    gone: tuple[str, ...] = ()
    added: Ref | None = None
    added_to: Tensor | None = None


def _bytes_of(quantizer: Quantizer, function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> _Steps:
    """The bytes of a function's codes, as a function of float32; both in this type."""
    table, wide = native.table(quantizer), quantizer.map(lambda value: value.to(dtype))
    thresholds, codes = steps_of(lambda x: wide.quantize(function(x.to(dtype))).long().reshape(-1))
    values = table[codes]
    return _Steps(thresholds, values, 2 if int(table.max()) > 255 else 1)


def _distinct(*values: Tensor) -> list[Tensor]:
    """Tensors of one shape without the dimensions along which all of them repeat themselves in memory."""
    repeated = [all(value.stride(i) == 0 for value in values) for i in range(values[0].ndim)]
    return [value[tuple(slice(0, 1) if each else slice(None) for each in repeated)] for value in values]


def _places(numbers: Tensor, count: int) -> Tensor | None:
    """Where each of `count` rows is among moved ones, or -1: (count,), int32. None where these are not rows of them.

    numbers: (moved rows, columns), for each entry its place before it was moved, from 1 on; 0: it is none.
    """
    columns = numbers.shape[1]
    first = numbers[:, :1]
    there = (first > 0)[:, 0]
    before = first[there][:, 0] - 1
    place = torch.full((count,), -1, dtype=torch.int32)
    place[before.long() // columns] = there.nonzero()[:, 0].int()
    rows = torch.arange(columns, dtype=torch.int32) * there[:, None] + first
    whole = not bool((before % columns).any()) and torch.equal(numbers, rows)
    return place if whole and int((place >= 0).sum()) == len(before) else None


# --- the plan --------------------------------------------------------------------------------------------------------


class _Arena:
    """Memory that steps share: what no later step reads is taken again."""

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = {}
        self._held: dict[int, tuple[int, Tensor]] = {}  # by address: size class, memory
        self.nbytes = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        count = math.prod(shape)
        size = max(64, -(-count * dtype.itemsize // 64) * 64)
        free = self._free.get(size)
        if free:
            memory = free.pop()
        else:
            memory = torch.zeros(size, dtype=torch.uint8)
            self.nbytes += size
        self._held[memory.data_ptr()] = (size, memory)
        return memory[: count * dtype.itemsize].view(dtype).view(shape)

    def give(self, address: int) -> None:
        """Memory by its address, if it is from here."""
        if address in self._held:
            size, memory = self._held.pop(address)
            self._free.setdefault(size, []).append(memory)


def _addresses(value: Any) -> set[int]:
    """Where the tensors of a value have their memory."""
    if isinstance(value, Tensor):
        return {value.untyped_storage().data_ptr()}
    return set().union(*map(_addresses, value)) if isinstance(value, (tuple, list)) else set()


class Plan:
    """A compiled program for inputs of one shape. A call takes them and gives the outputs; one call at a time.

    program, steps: as compiled, node by node; shapes: what each of its values is, on the meta device.
    fallbacks: what runs as torch does it, operations by their nodes' names.
    """

    def __init__(
        self,
        program: Program,
        steps: Mapping[str, Any],
        context: Context,
        inputs: Sequence[Tensor],
        shapes: Mapping[str, Any],
    ):
        self._context = context
        self._steps = steps
        self._kept: list[Any] = []  # what the kernels' arguments point to
        self._calls: list[Callable[[], int | None]] = []
        self._pointers: list[tuple[ctypes.Structure, int]] = []  # arguments that read an input where it is
        self._arena = _Arena()
        self._lock = threading.Lock()
        self.fallbacks: dict[str, str] = {}
        self._program = program
        self._shapes = dict(shapes) | {
            node.name: shapes[node.args[0].name] for node in program.nodes if node.op == ENCODE
        }
        self._constants: dict[str, Any] = dict(program.tensors)
        self._known = {node.name: node for node in program.nodes}
        self._nodes = dict(self._known)  # and what becomes of them
        self._inputs_of = {name: i for i, name in enumerate(program.inputs)}
        self._finishes: dict[str, Finish] = {}
        self._emit: dict[str, Callable[..., Any]] = {}
        fused = self._fuse(program)
        self._build(fused, inputs)

    @property
    def nbytes(self) -> int:
        """Of the memory that steps share."""
        return self._arena.nbytes

    def __call__(self, inputs: Sequence[Tensor]) -> Any:
        with self._lock:
            given = [value.contiguous() for value in inputs]
            for arguments, index in self._pointers:
                arguments.data = given[index].data_ptr()
            for static, value in zip(self._statics, given, strict=True):
                if static is not None:
                    static.copy_(value)
            for call in self._calls:
                status = call()
                if status:
                    native.check(status)
            return evaluate(self._program.output, {name: _own(value) for name, value in self._results.items()})

    # --- which nodes become one step ---------------------------------------------------------------------------------

    def _fuse(self, program: Program) -> Program:
        self._readers, self._outputs = program.consumers(), set(refs_of(program.output))
        self._order = list(program.nodes)
        self._order_of = {node.name: i for i, node in enumerate(self._order)}
        for node in self._order:
            step = self._steps.get(node.name)
            if isinstance(step, Product):
                if step.weights is None:
                    self._attention(node, step)
                elif node.name in self._nodes:
                    self._linear(node, step)
            elif node.op == _NORM and self._is_row_norm(node):
                rows = self._rows_behind(node.name, self._shapes[node.name].shape[-1])
                finish = self._finish_of(rows.last, self._columns(node.name, rows.last))
                rows = rows if finish is not None else self._with_addition(rows, self._shapes[node.name].shape[-1])
                self._finishes[rows.last] = finish
                self._replace(rows.last, node, (rows.added, *node.args), rows.gone)
                self._emit[rows.last] = self._norm(rows)
        nodes = tuple(self._nodes[node.name] for node in self._order if node.name in self._nodes)
        return replace(program, nodes=nodes).pruned()

    def _sole_reader(self, name: str) -> Node | None:
        readers = self._readers.get(name, [])
        if len(readers) != 1 or name in self._outputs or [*readers[0].refs()].count(name) > 1:
            return None
        return readers[0]

    def _leaves(self, name: str) -> list[tuple[Node, list[Node]]] | None:
        """What reads a value through moves and constant factors: the nodes, and these; None where an output does."""
        found: list[tuple[Node, list[Node]]] = []
        waiting: list[tuple[str, list[Node]]] = [(name, [])]
        while waiting:
            value, path = waiting.pop()
            if value in self._outputs:
                return None
            for reader in self._readers.get(value, []):
                if reader.op == "aten.sym_size.int":
                    continue
                if (reader.op in MOVES and list(reader.refs())[:1] == [value]) or self._multiplies(reader, value):
                    waiting.append((reader.name, [*path, reader]))
                else:
                    found.append((reader, path))
        return found

    def _multiplies(self, node: Node, name: str) -> bool:
        """Whether a node multiplies a value by constants, and nothing else."""
        refs = list(node.refs())
        return (
            node.op in _FACTORS
            and not node.kwargs
            and refs.count(name) == 1
            and (node.op.startswith("aten.mul") or node.args[0] == Ref(name))
            and all(self._is_constant(each) for each in refs if each != name)
            and self._shapes[node.name].shape == self._shapes[name].shape
        )

    def _rows_behind(self, name: str, columns: int) -> _Rows:
        """Where the rows of so many columns, that a value is made of, are taken as wholes."""
        shape = self._shapes[name].shape
        found = _Rows(name)
        if name in self._outputs or not 0 < shape.numel() < 2**31 - columns:
            return found
        numbers = torch.arange(1, shape.numel() + 1, dtype=torch.int32).view(shape)  # 0 is what is put between
        inside: dict[str, Any] = {name: numbers}
        for node in self._order[self._order_of[name] + 1 :]:
            if inside.keys().isdisjoint(node.refs()):
                continue
            if not self._moves(node, inside):
                break
            inside[node.name] = moved = self._apply(node, inside)
            gone = tuple(each for each in inside if each != node.name)
            alone = all(reader.name in inside for each in gone for reader in self._readers.get(each, []))
            if not alone or not self._outputs.isdisjoint(gone):
                continue
            if not isinstance(moved, Tensor) or not moved.numel() or moved.numel() % columns:
                continue
            stays = moved.data_ptr() == numbers.data_ptr() and moved.shape.numel() == shape.numel()
            if stays and moved.is_contiguous():
                found = _Rows(node.name, gone=gone)
                continue
            place = _places(moved.reshape(-1, columns), shape.numel() // columns)
            if place is not None:
                found = _Rows(node.name, place, int((place >= 0).sum()) * columns == moved.numel(), gone)
        return found

    def _moves(self, node: Node, values: Mapping[str, Any]) -> bool:
        """Whether a node moves some of these values, or puts zeros between, and reads nothing else but sizes."""
        refs = list(node.refs())
        if not all(each in values or isinstance(self._shapes.get(each), int) for each in refs):
            return False
        if node.op in _PADS:
            return not bool(self._apply(node, {refs[0]: torch.zeros(values[refs[0]].shape)}).any())
        return node.op in MOVES or node.op == "aten.cat.default"

    def _with_addition(self, rows: _Rows, columns: int) -> _Rows:
        """The same with what the only reader adds to them, and the moves behind it, where there is such a reader."""
        reader = self._sole_reader(rows.last)
        if reader is None or reader.op != "aten.add.Tensor" or reader.kwargs or len(reader.args) != 2 or not rows.whole:
            return rows
        others = [arg for arg in reader.args if isinstance(arg, Ref) and arg.name != rows.last]
        shape = self._shapes[rows.last].shape
        # The other product of a sum may have taken it.
        if len(others) != 1 or self._shapes[reader.name].shape != shape or self._nodes.get(reader.name) is not reader:
            return rows
        other = self._shapes.get(others[0].name, self._constants.get(others[0].name))
        if not isinstance(other, Tensor) or other.shape != shape or other.dtype != torch.float32:
            return rows
        behind, place, added_to = self._rows_behind(reader.name, columns), rows.place, None
        if place is None:
            place = behind.place
        else:
            added_to = place.clamp(min=0)
            if behind.place is not None:
                place = torch.where(place < 0, place, behind.place[added_to.long()])
        gone = (*rows.gone, rows.last, *behind.gone)
        return _Rows(behind.last, place, behind.whole, gone, others[0], added_to)

    def _encoder(self, node: Node) -> Encoder | None:
        step = self._steps.get(node.name) if node.op == ENCODE else None
        return step if isinstance(step, Encoder) else None

    def _finish_of(
        self, name: str, columns: Tensor | None, function: Callable[[Tensor], Tensor] | None = None
    ) -> Finish:
        """What becomes of a value that nothing but quantizers reads, whose nodes then do nothing; None of others.

        columns: for each of its entries a number of its column, int32. function: what is applied to it first.
        """
        leaves = self._leaves(name)
        if not leaves or any(self._encoder(leaf) is None for leaf, _ in leaves):
            return None
        quantizers = [self._encoder(leaf).quantizer for leaf, _ in leaves]  # type: ignore[union-attr]
        finish: Finish = None
        if function is None and columns is not None and all(isinstance(each, UniformQuantizer) for each in quantizers):
            readers = [(each, path) for each, (_, path) in zip(quantizers, leaves, strict=True)]
            finish = self._codes(name, columns, readers)
        elif len(leaves) == 1 and quantizers[0].scale.numel() == 1 and all(node.op in MOVES for node in leaves[0][1]):
            finish = _bytes_of(quantizers[0], function or (lambda x: x), torch.float64)
        if finish is not None:
            for leaf, path in leaves:
                self._nodes[leaf.name] = replace(leaf, op=SAME)
                for before, node in pairwise([self._known[name], *path]):
                    if node.op not in MOVES:
                        self._nodes[node.name] = replace(node, op=SAME, args=(Ref(before.name),))
        return finish

    def _codes(self, name: str, columns: Tensor, readers: Sequence[tuple[Any, list[Node]]]) -> _Codes | None:
        """The codes of each column of a value, where every quantizer that reads it has the same."""
        count = int(columns.max()) + 1
        found = [torch.full((count,), math.nan, dtype=torch.float64) for _ in range(3)]
        for quantizer, path in readers:
            seen, factor, last = columns, torch.ones((), dtype=torch.float64), name
            for node in path:
                if node.op in MOVES:
                    seen = self._apply(node, {last: seen})
                    factor = self._apply(node, {last: factor}) if factor.ndim else factor
                else:
                    (factor,) = _distinct(factor.expand(seen.shape))
                    factor = self._apply(node, {last: factor}).expand(seen.shape)
                last = node.name
            top, scale = torch.tensor(2.0**quantizer.bits - 1), quantizer.scale.double()
            given = [each.double().expand(seen.shape) for each in (scale, quantizer.zero_point, top)]
            seen, factor, *values = _distinct(seen, factor.expand(seen.shape), *given)
            values[0] = values[0] / factor
            place_of = seen.reshape(-1).long()
            for kept, each in zip(found, values, strict=True):
                value = each.reshape(-1)
                if not bool(value.isfinite().all()):
                    return None
                before = kept[place_of]
                if not bool((before.isnan() | (before == value)).all()):
                    return None
                kept[place_of] = value
                if not torch.equal(kept[place_of], value):
                    return None
        scale, zero, top = (value.nan_to_num(1.0) for value in found)
        return _Codes(scale, zero.float(), top.float())

    def _apply(self, node: Node, values: Mapping[str, Any]) -> Any:
        known = {name: values[name] if name in values else self._constant(name) for name in node.refs()}
        kwargs = {key: evaluate(value, known) for key, value in node.kwargs.items()}
        return self._program.apply(node, evaluate(node.args, known), kwargs)

    def _is_constant(self, name: str) -> bool:
        """Whether a value is the same for all inputs of this shape."""
        waiting, seen = [name], set[str]()
        while waiting:
            each = waiting.pop()
            if each in seen or each in self._constants or isinstance(self._shapes.get(each), int):
                continue
            if each in self._inputs_of or each not in self._known or self._known[each].op in (ENCODE, PRODUCT):
                return False
            seen.add(each)
            waiting += self._known[each].refs()
        return True

    def _constant(self, name: str) -> Any:
        if name not in self._constants:
            shape = self._shapes.get(name)
            self._constants[name] = shape if isinstance(shape, int) else self._apply(self._known[name], {})
        return self._constants[name]

    def _columns(self, name: str, moved: str | None = None) -> Tensor:
        """For each entry of a value, or of what its rows are moved to, the number of its column: int32.

        Without memory of its own unless rows are merged.
        """
        columns, shape = self._shapes[name].shape[-1], self._shapes[moved or name].shape
        return torch.arange(columns, dtype=torch.int32).expand(shape.numel() // columns, columns).reshape(shape)

    def _is_row_norm(self, node: Node) -> bool:
        shape, given = self._shapes[node.name], self._shapes.get(node.args[0].name)
        return len(node.args[1]) == 1 and shape.dtype == torch.float32 and isinstance(given, Tensor)

    def _linear(self, node: Node, step: Product) -> None:
        """A product with a weight, and what follows it."""
        convolution = step.site.geometry is not None
        if convolution:
            shape, rows = self._shapes[node.name].shape, _Rows(node.name)
            columns = torch.arange(shape[1], dtype=torch.int32)[:, None, None].expand(shape)
        else:
            rows = self._rows_behind(node.name, step.columns)
            columns = self._columns(node.name, rows.last)
        finish = self._finish_of(rows.last, columns)
        if finish is not None:
            self._finishes[rows.last] = finish
            self._replace(rows.last, node, node.args, rows.gone)
            self._emit[rows.last] = self._product(node, step, rows)
            return
        self._emit[node.name] = self._product(node, step, _Rows(node.name))
        closed = self._activation(node.name)
        if closed is not None and not convolution:
            last, function = closed
            finish = self._finish_of(last.name, None, function)
            if finish is not None:
                self._finishes[last.name] = finish
                self._replace(last.name, node, node.args, [node.name, *self._inside])
                self._emit[last.name] = self._emit.pop(node.name)
                return
        if not convolution:
            self._residual(node, step)

    def _replace(self, last: str, node: Node, args: tuple[Any, ...], gone: Sequence[str]) -> None:
        """A node, with these arguments, in the place of the last of some."""
        for name in gone:
            self._nodes.pop(name, None)
        self._nodes[last] = replace(node, name=last, args=args, kwargs={})

    def _activation(self, name: str) -> tuple[Node, Callable[[Tensor], Tensor]] | None:
        """What pointwise operations make of a value: the last of them, which alone others read, and their function."""
        inside: dict[str, Node] = {}
        last: Node | None = None
        for node in self._order:
            reads = [each for each in node.refs() if each == name or each in inside]
            if not reads:
                continue
            if node.op in _POINTWISE and len(reads) == len(list(node.refs())):
                inside[node.name] = last = node
        if last is None or name in self._outputs:
            return None
        for each in (name, *inside):
            readers = {reader.name for reader in self._readers.get(each, []) if reader.op != "aten.sym_size.int"}
            if each != last.name and (each in self._outputs or not readers <= inside.keys()):
                return None
        chain, output = list(inside.values()), last.name

        def function(x: Tensor) -> Tensor:
            values = {name: x}
            for node in chain:
                values[node.name] = self._apply(node, values)
            return values[output]

        self._inside = [each for each in inside if each != output]
        return last, function

    def _residual(self, node: Node, step: Product) -> None:
        """A multiplication by constants of the columns, moves of rows, and an addition, behind a product."""
        gone, last, factor = [node.name], node, None
        reader = self._sole_reader(node.name)
        if reader is not None and reader.op == "aten.mul.Tensor":
            others = [arg for arg in reader.args if isinstance(arg, Ref) and arg.name != last.name]
            if len(others) == 1 and self._is_constant(others[0].name):
                value = self._constant(others[0].name)
                wide = isinstance(value, Tensor) and value.numel() > 1
                if isinstance(value, Tensor) and (not wide or value.numel() == value.shape[-1] == step.columns):
                    factor, last = value.float().reshape(-1), reader
                    gone.append(reader.name)
                    reader = self._sole_reader(reader.name)
        rows = self._with_addition(self._rows_behind(last.name, step.columns), step.columns)
        if rows.added is None and rows.place is None:
            return
        del self._emit[node.name]
        args = node.args if rows.added is None else (*node.args, rows.added)
        self._replace(rows.last, node, args, [*gone, *rows.gone])
        self._emit[rows.last] = self._product(node, step, rows, factor)

    def _attention(self, node: Node, step: Product) -> None:
        """A product of two computed operands; with softmax and the product before, if that is what its left one is."""
        shape = self._shapes[node.name].shape
        columns = None
        if len(shape) >= 3:
            numbers = torch.arange(shape[-3] * shape[-1], dtype=torch.int32)
            columns = numbers.view(shape[-3], 1, shape[-1]).expand(shape)
        elif len(shape) == 2:
            columns = self._columns(node.name)
        found = self._scores(node)
        # A softmax reads scores: an attention that comes later takes this product in.
        finish = self._finish_of(node.name, columns)
        self._finishes[node.name] = finish
        if found is None:
            self._emit[node.name] = self._matrices(node, step)
            return
        scores, factor, bias, softmax, encode, between = found
        steps = _bytes_of(self._encoder(encode).quantizer, torch.exp2, torch.float64)  # type: ignore[union-attr]
        for name in (scores.name, softmax.name, encode.name, *between):
            self._nodes.pop(name, None)
        self._emit.pop(scores.name, None)
        self._nodes[node.name] = replace(node, args=(*scores.args[:2], node.args[1]))
        self._emit[node.name] = self._attend(node, step, self._steps[scores.name], factor, bias, steps)

    def _scores(self, node: Node) -> Any:
        """The product of queries and keys behind the left operand of a product: with a factor a head and what is added.

        Between it and the softmax only multiplications by constants, additions of constants and reshapes; nothing else
        reads what lies between.
        """
        encode = self._known.get(node.args[0].name)
        encoder = None if encode is None else self._encoder(encode)
        if encode is None or encoder is None or encoder.quantizer.scale.numel() != 1:
            return None
        softmax = self._known.get(encode.args[0].name)
        if softmax is None or softmax.op != "aten.softmax.int" or self._sole_reader(encode.name) is None:
            return None
        shape = self._shapes[softmax.name].shape
        if softmax.args[1] not in (-1, len(shape) - 1) or len(softmax.args) > 2 or softmax.kwargs:
            return None
        if self._sole_reader(softmax.name) is not encode:
            return None
        chain: list[Node] = []
        each = self._known.get(softmax.args[0].name)
        while each is not None and self._sole_reader(each.name) is not None:
            if each.op == PRODUCT:
                break
            refs = [arg for arg in each.args if isinstance(arg, Ref)]
            varying = [ref.name for ref in refs if not self._is_constant(ref.name)]
            fits = each.op in _SCALINGS | _RESHAPES | _HIDING and len(varying) == 1 and not each.kwargs
            if not fits or (
                each.op == "aten.div.Tensor" and varying != [each.args[0].name if isinstance(each.args[0], Ref) else ""]
            ):
                return None
            chain.insert(0, each)
            each = self._known.get(varying[0])
        if each is None or self._sole_reader(each.name) is None or each.op != PRODUCT:
            return None
        step = self._steps.get(each.name)
        if not isinstance(step, Product) or step.weights is not None or each.name not in self._nodes:
            return None
        of = self._shapes[each.name].shape
        if of != self._shapes[encode.name].shape or len(of) < 3 or not all(of):
            return None

        def run(value: float) -> Tensor:
            values = {each.name: torch.full(of, value, dtype=torch.float64)}
            for link in chain:
                values[link.name] = self._apply(link, values)
            return values[chain[-1].name].reshape(-1, *of[-3:]) if chain else values[each.name].reshape(-1, *of[-3:])

        added = run(0.0)
        factor = run(1.0).sub_(added)
        by_head = factor[0, :, 0, 0]
        if not torch.allclose(factor, by_head[:, None, None].expand(factor.shape), rtol=1e-9, atol=1e-9):
            return None
        bias = torch.unique(added, dim=0, return_inverse=True) if bool(added.any()) else None
        return each, by_head, bias, softmax, encode, [link.name for link in chain]

    # --- what a step does --------------------------------------------------------------------------------------------

    def _keep(self, value: Tensor) -> int:
        """The address of a value that lives as long as this."""
        self._kept.append(value)
        return value.data_ptr()

    def _steps_arguments(self, steps: _Steps) -> native.Steps:
        depth, heap, values = search_tables(steps.thresholds, steps.values)
        return native.Steps(
            heap=self._keep(heap), values=self._keep(values), length=len(heap), depth=depth, planes=steps.planes
        )

    def _output(self, finish: Finish, out: Sequence[Tensor], scale: Tensor, bias: Tensor | None) -> Output:
        """What becomes of x: first x scale + bias, (columns,) each in float64."""
        offset = torch.zeros_like(scale) if bias is None else bias.double()
        arguments = Output(parameters=len(scale), **place(*out))
        if isinstance(finish, _Codes):
            scale, offset = scale / finish.scale.double(), offset / finish.scale.double() + finish.zero.double()
            arguments.kind = CODES
            arguments.high = self._keep(finish.top)
            arguments.top = self._keep(finish.top.to(torch.uint8))
        elif isinstance(finish, _Steps):
            arguments.kind, arguments.steps = STEPS, self._steps_arguments(finish)
        else:
            arguments.kind = FLOATS
        arguments.scale = self._keep(scale.float().contiguous())
        arguments.bias = self._keep(offset.float().contiguous())
        return arguments

    def _room(self, finish: Finish, shape: Sequence[int], whole: bool = True) -> list[Tensor]:
        """Memory for what becomes of a value; if not wholly written, of its own, full of what stands for zero."""
        count = finish.planes if isinstance(finish, _Steps) else 1
        dtype = torch.float32 if finish is None else torch.uint8
        if whole:
            return [self._arena.take(shape, dtype) for _ in range(count)]
        out = [torch.zeros(shape, dtype=dtype) for _ in range(count)]
        if isinstance(finish, _Codes):
            out[0].view(-1, len(finish.zero))[:] = finish.zero
        elif finish is not None:
            zero = int(finish.values[(finish.thresholds <= 0).sum()])
            for plane, byte in zip(out, (zero & 255, zero >> 8), strict=False):
                plane.fill_(byte)
        self._kept += out
        return out

    def _stored(self, output: Output, stored: _Rows, residual: Tensor | None) -> None:
        """Tell an output where its rows go, and what they are added to."""
        added_to = None
        if residual is not None:
            residual, added_to = self._dense(residual), stored.added_to
            output.residual, output.residual_bytes = residual.data_ptr(), room_of(residual)
        for field, rows in (("place", stored.place), ("from_", added_to)):
            if rows is not None:
                setattr(output, field, self._keep(rows))
                output.places = len(rows)

    @staticmethod
    def _value(finish: Finish, out: list[Tensor]) -> Any:
        return out[0] if finish is None else _Bytes(out)

    def _call(self, kernel: str, arguments: ctypes.Structure) -> None:
        self._kept.append(arguments)
        self._calls.append(self._context.bind(kernel, arguments))

    def _dense(self, value: Tensor) -> Tensor:
        """The value with its rows one after the other: itself, or a copy that each call makes."""
        if value.is_contiguous():
            return value
        static = self._arena.take(value.shape, value.dtype)
        self._scratch.append(static)
        self._calls.append(lambda: _copy(static, value))
        return static

    def _norm(self, stored: _Rows) -> Callable[..., Any]:
        def emit(
            residual: Tensor | None,
            x: Tensor,
            _: Any,
            weight: Tensor | None = None,
            bias: Tensor | None = None,
            eps: float = 1e-5,
            *__: Any,
        ) -> Any:
            x, finish = self._dense(x), self._finishes[self._current]
            out = self._room(finish, self._shapes[self._current].shape, stored.whole)
            scale = torch.ones(x.shape[-1]).double() if weight is None else weight.double()
            rows = [plane.view(-1, x.shape[-1]) for plane in out]
            arguments = native.Norm(
                data=x.data_ptr(),
                bytes=room_of(x),
                row=x.shape[-1],
                rows=x.numel() // x.shape[-1],
                columns=x.shape[-1],
                epsilon=eps,
                out=self._output(finish, rows, scale, bias),
            )
            self._stored(arguments.out, stored, residual)
            self._call("norm", arguments)
            return self._value(finish, out)

        return emit

    def _product(self, node: Node, step: Product, stored: _Rows, factor: Tensor | None = None) -> Callable[..., Any]:
        """factor: what the columns are multiplied by afterwards."""

        def emit(left: _Bytes, _: Any, bias: Tensor | None, residual: Tensor | None = None) -> Any:
            site, weights = step.site, step.weights
            assert weights is not None
            finish = self._finishes.get(self._current)
            rows, lead = self._rows_of(step, left)
            columns = step.columns
            scale = site.scales[0].double().reshape(-1).expand(columns)
            offset = None if bias is None else bias.double()
            if factor is not None:
                scale = scale * factor.double()
                offset = None if offset is None else offset * factor.double()
            shape = (*lead, columns) if site.geometry is not None else self._shapes[self._current].shape
            out = self._room(finish, shape, stored.whole)
            output = self._output(finish, [plane.view(-1, columns) for plane in out], scale, offset)
            self._stored(output, stored, residual)
            if len(rows[0]):
                self._call("linear", native.linear(weights, rows, output))
            if site.geometry is not None:  # (B, L, O) as (B, O, H, W)
                sizes = self._shapes[node.name].shape[2:]
                out = [plane.transpose(1, 2).unflatten(2, sizes) for plane in out]
            return self._value(finish, out)

        return emit

    def _rows_of(self, step: Product, left: _Bytes) -> tuple[Planes, tuple[int, ...]]:
        """A left operand as (T, I), and what T stands for."""
        site = step.site
        if site.geometry is None:
            return [self._dense(plane).view(-1, site.terms) for plane in left], tuple(left[0].shape[:-1])
        stride, padding, dilation, _ = site.geometry
        kernel, images = site.weight.shape[2:], left[0]  # type: ignore[union-attr]
        count = math.prod(site.sizes(images.shape))
        if math.prod((*kernel, *stride)) == 1 and not any(padding):  # each place of the image is a row
            return [self._dense(plane.permute(0, 2, 3, 1)).view(-1, site.terms) for plane in left], (len(images), count)
        rows = []
        for plane in map(self._dense, left):
            out = self._arena.take((len(plane) * count, site.terms), torch.uint8)
            self._scratch.append(out)
            pairs = {
                name: (ctypes.c_int64 * 2)(*value)
                for name, value in (
                    ("kernel", kernel),
                    ("stride", stride),
                    ("padding", padding),
                    ("dilation", dilation),
                )
            }
            arguments = native.Patches(
                data=plane.data_ptr(),
                bytes=room_of(plane),
                images=len(plane),
                channels=plane.shape[1],
                height=plane.shape[2],
                width=plane.shape[3],
                fill=native.zero_point(site.left),
                out=out.data_ptr(),
                out_bytes=room_of(out),
                row=site.terms,
                **pairs,
            )
            self._call("patches", arguments)
            rows.append(out)
        return rows, (len(images), count)

    def _room_by_token(self, finish: Finish, shape: Sequence[int]) -> list[Tensor]:
        """Memory for (..., heads, rows, columns) in which a row's heads follow each other."""
        *lead, heads, rows, columns = shape
        return [plane.transpose(-3, -2) for plane in self._room(finish, (*lead, rows, heads, columns))]

    def _matrices(self, node: Node, step: Product) -> Callable[..., Any]:
        def emit(left: _Bytes, right: _Bytes, _: Any) -> Any:
            finish, site, shape = self._finishes[node.name], step.site, self._shapes[node.name].shape
            site.check_terms(left[0].shape[-1])
            out = self._room_by_token(finish, shape) if len(shape) == 4 else self._room(finish, shape)
            sides = [self._strided(plane) for plane in (*left, *right)]
            arguments, kept = native.matrices(site, sides[:-1], sides[-1], out[0])
            scale = _by_column(site.scales[0], shape)
            arguments.out = self._output(finish, out, scale, None)
            self._kept.append(kept)
            self._call("product", arguments)
            return self._value(finish, out)

        return emit

    def _attend(
        self,
        node: Node,
        step: Product,
        scores: Product,
        by_head: Tensor,
        bias: tuple[Tensor, Tensor] | None,
        steps: _Steps,
    ) -> Callable[..., Any]:
        """bias: what is added to scores, (tables, heads, rows, columns), and which of these tables each batch takes."""

        def emit(queries: _Bytes, keys: _Bytes, values: _Bytes) -> Any:
            finish, site, shape = self._finishes[node.name], step.site, self._shapes[node.name].shape
            q, k, v = (self._strided(side[0]) for side in (queries, keys, values))
            scores.site.check_terms(q.shape[-1])
            site.check_terms(k.shape[-1])
            q, v = (side if side.stride(-1) == 1 else self._dense(side) for side in (q, v))
            if k.stride(-2) != 1:
                k = self._dense(k.transpose(-1, -2)).transpose(-1, -2)
            out, lead = self._room_by_token(finish, shape), shape[:-2]
            (left, *kept), (right, *kept_too), (of_values, *kept_as_well) = (
                native.side([plane], lead, quantizer)
                for plane, quantizer in ((q, scores.site.left), (k, scores.site.right), (v, site.right))
            )
            self._kept += [kept, kept_too, kept_as_well]
            spread = native.spread(out[0], lead)
            first = native.Matrices(
                batches=len(spread),
                heads=spread.shape[1],
                rows=shape[-2],
                terms=q.shape[-1],
                columns=k.shape[-1],
                left=left,
                right=right,
            )
            factor = _by_column(scores.site.scales[0], (*shape[:-1], 1)) * by_head * math.log2(math.e)
            arguments = native.Attention(
                scores=first,
                factor=self._keep(factor.float().contiguous()),
                steps=self._steps_arguments(steps),
                zero=native.zero_point(site.left),
                columns=shape[-1],
                values=of_values,
                out=self._output(finish, out, _by_column(site.scales[0], shape), None),
                out_batch=spread.stride(0),
                out_head=spread.stride(1),
            )
            if bias is not None:
                table, which = (bias[0] * math.log2(math.e)).float().contiguous(), bias[1].to(torch.int32)
                arguments.bias, arguments.bias_bytes = self._keep(table), room_of(table)
                arguments.bias_tables, arguments.bias_heads = table.shape[:2]
                arguments.bias_of, arguments.bias_batches = self._keep(which), len(which)
            self._call("attention", arguments)
            return self._value(finish, out)

        return emit

    def _strided(self, plane: Tensor) -> Tensor:
        """Bytes whose rows or columns are dense, and whose batches are one dimension or can be seen as such."""
        lead = plane.shape[:-3]
        seen = plane
        if len(lead) > 1:
            try:
                plane.view(-1, *plane.shape[-3:])
            except RuntimeError:
                seen = self._dense(plane)
        return seen if 1 in (seen.stride(-1), seen.stride(-2)) else self._dense(seen)

    @staticmethod
    def _encodes(encoder: Encoder | None, x: Tensor) -> bool:
        """Whether a kernel finds the codes of a value: any of a uniform quantizer, or of one scale."""
        if encoder is None or x.dtype != torch.float32 or not x.numel():
            return False
        return encoder.quantizer.scale.numel() == 1 or isinstance(encoder.quantizer, UniformQuantizer)

    def _encode(self, encoder: Encoder, x: Tensor, index: int | None) -> _Bytes:
        """Codes of a value, which lie as it does; index: of the input that it is."""
        quantizer, shape = encoder.quantizer, x.shape
        order, back = _in_memory(x)
        x = x.permute(order)
        parameters = [torch.ones(()), torch.zeros(())]
        if isinstance(quantizer, UniformQuantizer):
            parameters = [value.float() for value in (quantizer.scale, quantizer.zero_point)]
        scale, zero = (value.expand(shape).permute(order) for value in parameters)
        # Rows are as long as what has parameters of its own, or some thousand entries.
        first = next((i for i in range(x.ndim) if x.shape[i] > 1 and (scale.stride(i) or zero.stride(i))), x.ndim)
        if not x[(0,) * first].is_contiguous():
            x = self._dense(x)
        while first and x[(0,) * (first - 1)].is_contiguous():
            if first < x.ndim and x.shape[first - 1 :].numel() > 1 << 12:
                break
            first -= 1
        columns = x.shape[first:].numel()
        try:
            rows = x.view(-1, columns)
        except RuntimeError:
            x = self._dense(x)
            rows = x.view(-1, columns)
        finish: Finish
        if isinstance(quantizer, UniformQuantizer):
            scale, zero = (value[(0,) * first].reshape(-1).contiguous() for value in (scale, zero))
            finish = _Codes(scale, zero, torch.full((columns,), 2.0**quantizer.bits - 1))
        else:
            finish = _bytes_of(quantizer, lambda value: value, torch.float32)
        out = self._room(finish, x.shape)
        output = self._output(finish, [plane.view(-1, columns) for plane in out], torch.ones(columns).double(), None)
        if isinstance(finish, _Codes):
            output.scale = self._keep(finish.scale)  # by which it divides, as the quantizer does
        arguments = native.Encode(
            data=x.data_ptr(), bytes=room_of(x), row=rows.stride(0), rows=len(rows), columns=columns, out=output
        )
        if index is not None:
            self._pointers.append((arguments, index))
        self._call("encode", arguments)
        return _Bytes(plane.permute(back) for plane in out)

    # --- from nodes to calls -----------------------------------------------------------------------------------------

    def _build(self, program: Program, inputs: Sequence[Tensor]) -> None:
        values: dict[str, Any] = {}
        live: dict[int, int] = {}

        def hold(value: Any) -> None:
            for address in _addresses(value):
                live[address] = live.get(address, 0) + 1

        def drop(value: Any) -> None:
            for address in _addresses(value):
                live[address] -= 1
                if not live[address]:
                    del live[address]
                    self._arena.give(address)

        self._statics: list[Tensor | None] = []
        readers = program.consumers()
        for name, value in zip(program.inputs, inputs, strict=True):
            read = [node for node in readers.get(name, []) if node.op != "aten.sym_size.int"]
            encoded = all(self._encodes(self._encoder(node), value) for node in read) and name not in self._outputs
            static = None if encoded else torch.zeros_like(value)
            self._statics.append(static)
            values[name] = torch.empty(value.shape) if static is None else static
        for node, dead in zip(program.nodes, program._last_uses(), strict=True):
            self._current = node.name
            self._scratch: list[Tensor] = []
            try:
                for name in node.refs():
                    if name not in values:
                        values[name] = self._constant(name)
                values[node.name] = self._emitted(node, values)
            except AdalogError:
                raise
            except Exception as cause:  # whatever an operation says of its arguments
                raise ProgramError(f"operation {node.op} ({node.name}) fails: {one_line(cause)}") from cause
            hold(values[node.name])
            for scratch in self._scratch:
                if scratch.data_ptr() not in live:
                    self._arena.give(scratch.data_ptr())
            for name in dead:
                value = values.pop(name)
                if name in self._known:
                    drop(value)
        names = set(refs_of(program.output))
        self._results = {name: values[name] if name in values else self._constant(name) for name in names}

    def _emitted(self, node: Node, values: Mapping[str, Any]) -> Any:
        """The value of a node, where every call will put it."""
        if node.op not in (ENCODE, PRODUCT) and self._is_constant(node.name):
            return self._constant(node.name)
        args = evaluate(node.args, values)
        if node.op == SAME:
            return args[0]
        if node.name in self._emit:
            return self._emit[node.name](*args)
        encoder = self._encoder(node)
        if encoder is not None:
            index = self._inputs_of.get(node.args[0].name)
            index = index if index is not None and self._statics[index] is None else None
            if self._encodes(encoder, args[0]):
                return self._encode(encoder, args[0], index)
        kwargs = {key: evaluate(value, values) for key, value in node.kwargs.items()}
        function = self._steps.get(node.name) or functools.partial(_applied, self._program, node)
        if isinstance(args[0], _Bytes) and node.op in MOVES:
            return _Bytes(self._moved(node, function, (plane, *args[1:]), kwargs) for plane in args[0])
        args = tuple(list(arg) if isinstance(arg, _Bytes) else arg for arg in args)
        return self._moved(node, function, args, kwargs)

    def _moved(self, node: Node, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """An operation of torch: a view is made once, all else by each call, in memory of its own."""
        result = function(*args, **kwargs)
        if not _addresses(result) or _addresses(result) <= _addresses(args):
            return result
        static = self._static(result)
        into = None if node.name in self._steps else _writer(node.op)
        if into is not None and isinstance(static, Tensor) and _writes(into, args, kwargs, static, result):
            self._calls.append(functools.partial(_call, into, args, {**kwargs, "out": static}))
        else:
            self._calls.append(lambda: _copy(static, function(*args, **kwargs)))
        self.fallbacks[node.name] = node.op
        return _Bytes(static) if isinstance(function, Encoder) else static

    def _static(self, value: Any) -> Any:
        if isinstance(value, Tensor):  # which lies as torch would have it: images may have their channels last
            order, back = _in_memory(value)
            return self._arena.take([value.shape[i] for i in order], value.dtype).permute(back)
        return type(value)(map(self._static, value)) if isinstance(value, (tuple, list)) else value


def _applied(program: Program, node: Node, *args: Any, **kwargs: Any) -> Any:
    return program.apply(node, args, kwargs)


def _writer(op: str) -> Callable[..., Any] | None:
    """The operation that writes its result where it is told, if there is one."""
    packet = getattr(torch.ops.aten, op.removeprefix("aten.").partition(".")[0], None)
    return getattr(packet, "out", None)


def _writes(
    into: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], static: Tensor, wanted: Tensor
) -> bool:
    try:
        found = into(*args, **kwargs, out=static)
    except (RuntimeError, TypeError, ValueError):  # it takes other arguments
        return False
    return found is static and torch.equal(static, wanted)


def _call(into: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    into(*args, **kwargs)


def _copy(static: Any, value: Any) -> None:
    if isinstance(static, Tensor):
        static.copy_(value)
    elif isinstance(static, (tuple, list)):
        for put, given in zip(static, value, strict=True):
            _copy(put, given)


def _own(value: Any) -> Any:
    """The value in memory that the next call leaves alone; sizes are numbers."""
    if isinstance(value, (tuple, list)):
        return type(value)(map(_own, value))
    return value.clone() if isinstance(value, Tensor) else value


def _in_memory(value: Tensor) -> tuple[list[int], list[int]]:
    """The dimensions as they lie, the longest stride first, and how to permute what has that order back."""
    order = sorted(range(value.ndim), key=lambda i: -value.stride()[i])
    return order, [order.index(i) for i in range(value.ndim)]


def _by_column(scale: Tensor, shape: Sequence[int]) -> Tensor:
    """A scale against (..., heads, rows, columns) as one for each head and column: (heads * columns,), float64."""
    heads = shape[-3] if len(shape) > 2 else 1
    by_head = scale.double().reshape(scale.shape[-3:]) if scale.numel() > 1 else scale.double().reshape(())
    return by_head.expand(heads, 1, shape[-1]).reshape(-1)


def shapes_of(program: Program, inputs: Sequence[Tensor]) -> dict[str, Any]:
    """What each value of a program is for inputs like these: on the meta device, sizes as numbers."""
    found: dict[str, Any] = {}
    given = [torch.empty_like(value, device="meta") for value in inputs]

    def watch(node: Node, args: tuple[Any, ...], result: Any) -> None:
        found[node.name] = result

    program.map_tensors(lambda value: value.to("meta")).run(given, watch)
    return {**program.tensors, **found, **dict(zip(program.inputs, given, strict=True))}
