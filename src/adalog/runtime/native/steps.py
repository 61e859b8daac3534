"""The steps that a program is recognised as: what each of them reads, does and makes, before it has memory.

A step has the name of the value that it makes. `reads` names the values that it takes, which depend on the inputs;
all that does not depend on them (weights, biases, factors) is in the step itself, or is named in `Steps.constants`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adalog.graph.program import Node, Program
from adalog.quantizers import Quantizer
from adalog.runtime.native.tables import Finish, Lookup


@dataclass(frozen=True)
class Rows:
    """Where each row of a value ends up after moves that have no other reader; `last` is what the last of them makes.

    place: of each row, its number among the rows of `last`, or -1 where it is dropped; int32; None where rows stay.
    whole: whether a row lands in every place of `last`; elsewhere there is `empty`, (columns,), or zeros where that is
    None. gone: the values that nobody makes.
    added: the value that is added on the way, if any; added_to: of each row, the number of the row of `added` that it
    is added to, int32; None where that is its own.
    """

    last: str
    place: Tensor | None = None
    whole: bool = True
    gone: tuple[str, ...] = ()
    added: str | None = None
    added_to: Tensor | None = None
    empty: Tensor | None = None


@dataclass(frozen=True)
class Norm:
    """LayerNorm over the last dimension. shape: of what it makes, after the moves of its rows."""

    name: str
    source: str
    weight: Tensor | None
    bias: Tensor | None
    epsilon: float
    shape: torch.Size
    rows: Rows
    finish: Finish

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.source,) if self.rows.added is None else (self.rows.added, self.source)


@dataclass(frozen=True)
class Linear:
    """A product with a stored weight, plus bias, times a factor per column, plus what `rows` adds.

    product: the name of the program's product. shape: of what it makes, after the moves of its rows; a convolution's
    (B, L, O), and image is then its (height, width). activation: what is applied before the finish, one of
    `abi.ACTIVATIONS`; the values of a `Lookup` have theirs in its tables.
    """

    name: str
    source: str
    product: str
    bias: Tensor | None
    factor: Tensor | None
    shape: torch.Size
    image: torch.Size | None
    rows: Rows
    finish: Finish
    activation: str = ""

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.source,) if self.rows.added is None else (self.source, self.rows.added)


@dataclass(frozen=True)
class Matrices:
    """A product of two computed operands. product: the name of the program's product."""

    name: str
    left: str
    right: str
    product: str
    shape: torch.Size
    finish: Finish

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.left, self.right)


@dataclass(frozen=True)
class Attend:
    """softmax(factor * queries @ keys + bias) @ values.

    scores, product: the names of the program's two products. factor: one per head, without the scale of the codes.
    bias: (tables, heads, rows, columns), and for each batch which of the tables it takes; None where nothing is added.
    probabilities: from log2 of a probability to the bytes of its code.
    """

    name: str
    queries: str
    keys: str
    values: str
    scores: str
    product: str
    factor: Tensor
    bias: tuple[Tensor, Tensor] | None
    probabilities: Lookup
    shape: torch.Size
    finish: Finish

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.queries, self.keys, self.values)


@dataclass(frozen=True)
class Encode:
    """The bytes of the codes of a float32 value. lookup: from a value to them, unless the quantizer is uniform."""

    name: str
    source: str
    quantizer: Quantizer
    lookup: Lookup | None

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.source,)


@dataclass(frozen=True)
class Activate:
    """A function of a float32 value, one of `abi.ACTIVATIONS`."""

    name: str
    source: str
    activation: str

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.source,)


@dataclass(frozen=True)
class Same:
    """A value under another name: what was to be done with it is done where it is made."""

    name: str
    source: str

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.source,)


@dataclass(frozen=True)
class Torch:
    """An operation that runs as torch runs it: a view is made once, all else by every call."""

    name: str
    node: Node

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(self.node.refs())


Step = Norm | Linear | Matrices | Attend | Encode | Activate | Same | Torch


@dataclass(frozen=True)
class Steps:
    """A program, recognised for inputs of one shape.

    steps: in order of execution. constants: the values that steps or outputs read and that no input changes, by name.
    read_in_place: the inputs that only `Encode` steps read, so that nobody copies them.
    """

    program: Program
    steps: tuple[Step, ...]
    constants: Mapping[str, Any]
    read_in_place: frozenset[str]
