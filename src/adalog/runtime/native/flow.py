"""Analyse the data flow of a program: the readers of its values, its constants, and the moves of whole rows."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from adalog.graph.operations import MOVES, PADS, aten
from adalog.graph.program import Node, Program, Ref, evaluate, refs_of
from adalog.runtime.native.steps import Rows
from adalog.runtime.reference import ENCODE, PRODUCT

SIZE = "aten.sym_size.int"  # reads the shape of a value and not its entries
FACTORS = aten("mul.Tensor div.Tensor mul.Scalar div.Scalar")


class Flow:
    """The data flow of a program: shapes and readers of its values, and the values that no input changes.

    shapes: every value of the program as a tensor on the meta device, a number, or a tuple of these.
    """

    def __init__(self, program: Program, shapes: Mapping[str, Any]):
        self.program = program
        encoded = {node.name: shapes[node.args[0].name] for node in program.nodes if node.op == ENCODE}
        self.shapes: dict[str, Any] = {**shapes, **encoded}
        self.nodes = {node.name: node for node in program.nodes}  # in order of execution
        self._position = {name: i for i, name in enumerate(self.nodes)}
        self.outputs = frozenset(refs_of(program.output))
        self._readers = program.consumers()
        self._constants: dict[str, Any] = dict(program.tensors)
        self._varying = set(program.inputs)
        for node in program.nodes:
            varies = node.op in (ENCODE, PRODUCT) or not self._varying.isdisjoint(node.refs())
            if varies and not isinstance(self.shapes.get(node.name), int):
                self._varying.add(node.name)

    def readers(self, name: str) -> list[Node]:
        """Return the nodes that read a value."""
        return self._readers.get(name, [])

    def sole_reader(self, name: str) -> Node | None:
        """Return the only node that reads a value, once. Return None if there are more reads or it is an output."""
        readers = self.readers(name)
        if len(readers) != 1 or name in self.outputs or [*readers[0].refs()].count(name) > 1:
            return None
        return readers[0]

    def behind(self, name: str) -> list[Node]:
        """Return the nodes after the node that computes a value, in order of execution."""
        return list(self.program.nodes[self._position[name] + 1 :])

    def apply(self, node: Node, values: Mapping[str, Any]) -> Any:
        """Return the result of a node for these values and the constants that it reads."""
        operands = {name: values[name] if name in values else self.constant(name) for name in node.refs()}
        kwargs = {key: evaluate(value, operands) for key, value in node.kwargs.items()}
        return self.program.apply(node, evaluate(node.args, operands), kwargs)

    def is_constant(self, name: str) -> bool:
        """Return True if a value is the same for all inputs of this shape."""
        return name not in self._varying

    def constant(self, name: str) -> Any:
        """Return a value that is the same for all inputs of this shape."""
        if name not in self._constants:
            shape = self.shapes.get(name)
            self._constants[name] = shape if isinstance(shape, int) else self.apply(self.nodes[name], {})
        return self._constants[name]

    def leaves(self, name: str) -> list[tuple[Node, list[Node]]] | None:
        """Return each node that reads a value through moves and constant factors, with its path; None for an output."""
        paths: list[tuple[Node, list[Node]]] = []
        pending_paths: list[tuple[str, list[Node]]] = [(name, [])]
        while pending_paths:
            value, path = pending_paths.pop()
            if value in self.outputs:
                return None
            for reader in self.readers(value):
                if reader.op == SIZE:
                    continue
                if (reader.op in MOVES and list(reader.refs())[:1] == [value]) or self._multiplies(reader, value):
                    pending_paths.append((reader.name, [*path, reader]))
                else:
                    paths.append((reader, path))
        return paths

    def _multiplies(self, node: Node, name: str) -> bool:
        """Return True if a node only multiplies a value by constants."""
        refs = list(node.refs())
        return (
            node.op in FACTORS
            and not node.kwargs
            and refs.count(name) == 1
            and (node.op.startswith("aten.mul") or node.args[0] == Ref(name))
            and all(self.is_constant(ref) for ref in refs if ref != name)
            and self.shapes[node.name].shape == self.shapes[name].shape
        )

    def columns(self, name: str, moved: str | None = None) -> Tensor:
        """Return the column number of each entry of a value, int32, in the shape of the value `moved` if given."""
        columns, shape = self.shapes[name].shape[-1], self.shapes[moved or name].shape
        return torch.arange(columns, dtype=torch.int32).expand(shape.numel() // columns, columns).reshape(shape)


# --- moves of whole rows ---------------------------------------------------------------------------------------------


def rows_behind(flow: Flow, name: str, columns: int) -> Rows:
    """Find where each row of a value ends up after moves that have no other reader. columns: the length of a row."""
    shape = flow.shapes[name].shape
    rows = Rows(name)
    if name in flow.outputs or not 0 < shape.numel() < 2**31 - columns:
        return rows
    numbers = torch.arange(1, shape.numel() + 1, dtype=torch.int32).view(shape)  # 0 marks padding
    inside: dict[str, Any] = {name: numbers}
    for node in flow.behind(name):
        if inside.keys().isdisjoint(node.refs()):
            continue
        if not _moves(flow, node, inside):
            break
        inside[node.name] = moved = flow.apply(node, inside)
        moves = tuple(member for member in inside if member != node.name)
        alone = all(reader.name in inside for member in moves for reader in flow.readers(member))
        if not alone or not flow.outputs.isdisjoint(moves):
            continue
        if not isinstance(moved, Tensor) or not moved.numel() or moved.numel() % columns:
            continue
        stays = moved.data_ptr() == numbers.data_ptr() and moved.shape.numel() == shape.numel()
        if stays and moved.is_contiguous():
            rows = Rows(node.name, gone=moves)
            continue
        place = _places(moved.reshape(-1, columns), shape.numel() // columns)
        if place is not None:
            rows = Rows(node.name, place, int((place >= 0).sum()) * columns == moved.numel(), moves)
    return rows


def _moves(flow: Flow, node: Node, values: Mapping[str, Any]) -> bool:
    """Return True if a node moves some of these values, or pads one with zeros, and reads only sizes besides."""
    refs = list(node.refs())
    if not all(ref in values or isinstance(flow.shapes.get(ref), int) for ref in refs):
        return False
    if node.op in PADS:
        return not bool(flow.apply(node, {refs[0]: torch.zeros(values[refs[0]].shape)}).any())
    return node.op in MOVES or node.op == "aten.cat.default"


def _places(numbers: Tensor, count: int) -> Tensor | None:
    """Return the place of each of `count` rows among the moved rows, or -1: (count,), int32. None if rows are split.

    numbers: (moved rows, columns), the number of each entry before the moves, counted from 1; 0 is padding.
    """
    columns = numbers.shape[1]
    first = numbers[:, :1]
    filled = (first > 0)[:, 0]
    before = first[filled][:, 0] - 1
    place = torch.full((count,), -1, dtype=torch.int32)
    place[before.long() // columns] = filled.nonzero()[:, 0].int()
    rows = torch.arange(columns, dtype=torch.int32) * filled[:, None] + first
    complete = not bool((before % columns).any()) and torch.equal(numbers, rows)
    return place if complete and int((place >= 0).sum()) == len(before) else None


def with_constant(flow: Flow, rows: Rows, columns: int) -> tuple[Rows, Tensor | None]:
    """Include an addition of a constant, (columns,), if it is the rows' only reader; else the constant is None."""
    reader = flow.sole_reader(rows.last)
    if reader is None or reader.op != "aten.add.Tensor" or reader.kwargs or reader.args[0] != Ref(rows.last):
        return rows, None
    other = reader.args[1]
    if not isinstance(other, Ref) or not flow.is_constant(other.name):
        return rows, None
    constant, result = flow.constant(other.name), flow.shapes[reader.name]
    # If a view has changed the length of the rows, the sum may have a larger shape.
    alike = result.shape == flow.shapes[rows.last].shape and result.shape[-1:] == (columns,)
    if constant.shape != (columns,) or not alike or result.dtype != torch.float32:
        return rows, None
    return replace(rows, last=reader.name, gone=(*rows.gone, rows.last), empty=constant), constant


def with_addition(flow: Flow, rows: Rows, columns: int, pending: Mapping[str, Any]) -> Rows:
    """Include an addition of another value and the moves after it, if it is the rows' only reader.

    pending: the step that each node belongs to so far; the rows stay unchanged if a step already includes the addition.
    """
    reader = flow.sole_reader(rows.last)
    if reader is None or reader.op != "aten.add.Tensor" or reader.kwargs or len(reader.args) != 2 or not rows.whole:
        return rows
    others = [arg.name for arg in reader.args if isinstance(arg, Ref) and arg.name != rows.last]
    shape = flow.shapes[rows.last].shape
    replaced = pending.get(reader.name) is not reader
    if replaced or len(others) != 1 or flow.shapes[reader.name].shape != shape:
        return rows
    other = flow.shapes.get(others[0])
    if not isinstance(other, Tensor) or other.shape != shape or other.dtype != torch.float32:
        return rows
    behind = rows_behind(flow, reader.name, columns)
    place, added_to = behind.place, None
    if rows.place is not None:
        added_to = rows.place.clamp(min=0)
        place = rows.place if place is None else torch.where(rows.place < 0, rows.place, place[added_to.long()])
    gone = (*rows.gone, rows.last, *behind.gone)
    return replace(behind, place=place, gone=gone, added=others[0], added_to=added_to)
