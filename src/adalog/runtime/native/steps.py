"""Define the steps that a program is turned into, before they have memory.

A step has the name of the value that it computes. `reads` names the values that it reads and that depend on the inputs.
Values that do not depend on the inputs (weights, biases, factors) are in the step itself, or in
`LoweredProgram.constants`.
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
    """The final place of each row of a value, after moves that have no other reader.

    last: the name of the value after the last move. place: for each row, its number among the rows of `last`, or -1 if
    it is dropped; int32; None if all rows stay. whole: True if every place of `last` gets a row. empty: the value at
    the other places, (columns,); None means zeros. gone: the names of the values that are no longer computed. added:
    the name of a value that is added on the way, or None. added_to: for each row, the number of the row of `added` that
    it is added to, int32; None if it is the row with the same number.
    """

    last: str
    place: Tensor | None = None
    whole: bool = True
    gone: tuple[str, ...] = ()
    added: str | None = None
    added_to: Tensor | None = None
    empty: Tensor | None = None


@dataclass(frozen=True)
class _SourceStep:
    """A step that reads one value, its source."""

    name: str
    source: str

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.source,)


@dataclass(frozen=True)
class _RowStep(_SourceStep):
    """A step that moves the rows of its result, and adds the value that `rows` adds. shape: after these moves."""

    shape: torch.Size
    rows: Rows
    finish: Finish
    bias: Tensor | None

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.source,) if self.rows.added is None else (self.source, self.rows.added)


@dataclass(frozen=True)
class NormStep(_RowStep):
    """LayerNorm, or RMSNorm (`about_zero`), which does not subtract the mean, over the last dimension."""

    weight: Tensor | None
    epsilon: float
    about_zero: bool


@dataclass(frozen=True)
class LinearStep(_RowStep):
    """A product with a stored weight, plus bias, times a factor per column. shape: (B, L, O) for a convolution.

    product: the name of the program's product. image: the (height, width) of a convolution's output, or None.
    activation: the activation before the finish, one of `abi.ACTIVATIONS`; a `Lookup` has the activation in its tables
    instead.
    """

    product: str
    factor: Tensor | None
    image: torch.Size | None
    activation: str = ""


@dataclass(frozen=True)
class MatmulStep:
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
class AttentionStep:
    """softmax(factor * queries @ keys + bias) @ values.

    scores, product: the names of the program's two products. factor: one per head, without the scale of the codes.
    bias: (tables, heads, rows, columns), and the number of the table for each batch; None if nothing is added.
    probabilities: maps log2 of a probability to the bytes of its code.
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
class EncodeStep(_SourceStep):
    """The codes of a float32 value, as bytes. lookup: maps a value to the bytes; None if the quantizer is uniform."""

    quantizer: Quantizer
    lookup: Lookup | None


@dataclass(frozen=True)
class ActivationStep(_SourceStep):
    """An activation of a float32 value, one of `abi.ACTIVATIONS`."""

    activation: str


@dataclass(frozen=True)
class AliasStep(_SourceStep):
    """A value under another name. The step that computes the value has already done the work of this one."""


@dataclass(frozen=True)
class TorchStep:
    """An operation without a kernel. A view is made once; every call computes any other result again."""

    name: str
    node: Node

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(self.node.refs())


Step = NormStep | LinearStep | MatmulStep | AttentionStep | EncodeStep | ActivationStep | AliasStep | TorchStep


@dataclass(frozen=True)
class LoweredProgram:
    """The steps of a program for inputs of one shape.

    steps: the steps, in order of execution. constants: the values that steps or outputs read and that no input changes,
    by name. read_in_place: the inputs that only `EncodeStep` steps read, so that they need no copy.
    """

    program: Program
    steps: tuple[Step, ...]
    constants: Mapping[str, Any]
    read_in_place: frozenset[str]
