"""Turn a program into the steps that kernels run, by its data flow and never by the name of a model.

- A norm, product or activation whose readers are all quantizers stores codes. Moves (views, permutations) then move
  bytes.
- Moves of whole rows (windows, rolls, padding) cost nothing: a norm or product stores each row at its final place.
- A softmax between two products becomes part of an attention.
- A product adds its residual.
- Torch runs all other operations.

The steps have no memory yet, and this module does not need the compiled library. `emit` adds both.
"""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from adalog.errors import ProgramError, converting
from adalog.graph.activations import BY_OPERATION
from adalog.graph.operations import MOVES, aten
from adalog.graph.program import Node, Program, Ref
from adalog.graph.sites import NORMS, read_parameters
from adalog.quantizers import Quantizer, UniformQuantizer
from adalog.runtime.native.flow import FACTORS, SIZE, Flow, rows_behind, with_addition, with_constant
from adalog.runtime.native.steps import (
    ActivationStep,
    AliasStep,
    AttentionStep,
    EncodeStep,
    LinearStep,
    LoweredProgram,
    MatmulStep,
    NormStep,
    Rows,
    Step,
    TorchStep,
)
from adalog.runtime.native.tables import Codes, Finish, entries_of, lookup_of
from adalog.runtime.reference import PRODUCT, IntegerSite

_POINTWISE = {*BY_OPERATION} | aten(
    "hardtanh.default leaky_relu.default erf.default softplus.default square.default abs.default neg.default "
    "mul.Tensor add.Tensor sub.Tensor div.Tensor mul.Scalar add.Scalar sub.Scalar div.Scalar "
    "clamp.default clamp_min.default clamp_max.default"
)
_SHIFTS = aten("add.Tensor add.Scalar")
_RESHAPES = aten("reshape.default unsqueeze.default squeeze.dim flatten.using_ints unflatten.int")
_MASKING = aten("masked_fill.Scalar")  # accepted if the mask hides nothing
_Line = tuple[Tensor, tuple[Tensor, Tensor] | None]  # the factor and the bias of an `AttentionStep`


def recognise(
    program: Program, sites: Mapping[str, IntegerSite], quantizers: Mapping[str, Quantizer], shapes: Mapping[str, Any]
) -> LoweredProgram:
    """Return the steps of a compiled program.

    sites, quantizers: the sites of products and the quantizers of encoders that kernels run, by the names of their
    nodes. shapes: each value on the meta device, as `trace` finds it. Raises ProgramError if an operation fails on its
    arguments.
    """
    flow = Flow(program, shapes)
    recogniser = _Recogniser(flow, sites, quantizers)
    steps: list[Step] = []
    needed = set(flow.outputs)
    for name in reversed(flow.nodes):
        pending = recogniser.pending.get(name)
        if pending is None or name not in needed or flow.is_constant(name):
            continue
        if isinstance(pending, Node):
            with failing(pending):
                pending = recogniser.default(pending)
        steps.append(pending)
        needed.update(pending.reads)
    steps.reverse()
    names = {*program.inputs, *(step.name for step in steps)}
    constants: dict[str, Any] = {}
    for name in sorted(needed - names):
        with failing(flow.nodes[name]) if name in flow.nodes else contextlib.nullcontext():
            constants[name] = flow.constant(name)
    in_place = {
        name
        for name in program.inputs
        if name not in flow.outputs and all(isinstance(step, EncodeStep) for step in steps if name in step.reads)
    }
    return LoweredProgram(program, tuple(steps), constants, frozenset(in_place))


def failing(node: Node) -> contextlib.AbstractContextManager[None]:
    """Convert what an operation raises while the context is open into a ProgramError that names the node."""
    return converting(ProgramError, f"operation {node.op} ({node.name}) fails: ")


class _Recogniser:
    """Search for the step that each node of a program becomes.

    pending: by name, a node that is unchanged so far, or the step that it became, without the nodes inside other steps.
    """

    def __init__(self, flow: Flow, sites: Mapping[str, IntegerSite], quantizers: Mapping[str, Quantizer]):
        self._flow, self._sites, self._quantizers = flow, sites, quantizers
        self.pending: dict[str, Node | Step] = dict(flow.nodes)
        for node in flow.nodes.values():
            site = sites.get(node.name)
            with failing(node):
                if site is not None and site.weight is None:
                    self._attention(node)
                elif site is not None and self._is_fixed(node.args[2]) and node.name in self.pending:
                    self._linear(node, site)
                elif node.op in NORMS and self._is_row_norm(node):
                    self._norm(node)
                elif node.op == "aten.div.Tensor" and self.pending.get(node.name) is node:
                    self._normalise(node)

    def default(self, node: Node) -> Step:
        """Return the step of a node that does not belong to another step."""
        quantizer = self._quantizers.get(node.name)
        if quantizer is None:
            kind = _kind_of(node)
            source = self._flow.shapes.get(node.args[0].name) if kind else None
            if isinstance(source, Tensor) and source.dtype == torch.float32 and source.numel():
                return ActivationStep(node.name, node.args[0].name, kind)
            return TorchStep(node.name, node)
        uniform, source = isinstance(quantizer, UniformQuantizer), self._flow.shapes[node.args[0].name]
        if source.dtype != torch.float32 or not source.numel() or not (uniform or quantizer.scale.numel() == 1):
            return TorchStep(node.name, node)
        lookup = None if uniform else lookup_of(quantizer, lambda x: x, torch.float32)
        return EncodeStep(node.name, node.args[0].name, quantizer, lookup)

    def _replace(self, replaced: Sequence[str], step: Step) -> None:
        """Store a step under the name of its value, and remove the values that are no longer computed."""
        for name in replaced:
            self.pending.pop(name, None)
        self.pending[step.name] = step

    def _tensor(self, arg: Any) -> Tensor | None:
        """Return the constant that an argument refers to, or None."""
        return None if arg is None else self._flow.constant(arg.name)

    def _is_fixed(self, arg: Any) -> bool:
        return arg is None or self._flow.is_constant(arg.name)

    # --- norms and products ------------------------------------------------------------------------------------------

    def _is_row_norm(self, node: Node) -> bool:
        shape, source = self._flow.shapes[node.name], self._flow.shapes.get(node.args[0].name)
        return (
            len(node.args[1]) == 1
            and not node.kwargs
            and shape.dtype == torch.float32
            and isinstance(source, Tensor)
            and all(map(self._is_fixed, read_parameters(node)))
            and not self._flow.is_constant(node.name)
        )

    def _norm(self, node: Node) -> None:
        arguments, about_zero = dict(enumerate(node.args)), NORMS[node.op] == "rms_norm"
        weight, bias = map(self._tensor, read_parameters(node))
        epsilon = arguments.get(3) if about_zero else arguments.get(4, 1e-5)
        epsilon = torch.finfo(torch.float32).eps if epsilon is None else epsilon
        self._norm_rows(node.name, node.args[0].name, weight, bias, epsilon, about_zero)

    def _normalise(self, node: Node) -> None:
        """Create the step of x / max(|x|, epsilon), which is an RMSNorm times 1 / sqrt(columns) for a small epsilon."""
        x, divisor = node.args
        expanded = self._before(divisor, "aten.expand_as.default")
        clamp = self._before(expanded.args[0] if expanded else divisor, "aten.clamp_min.default")
        length = self._before(clamp.args[0], "aten.linalg_vector_norm.default") if clamp else None
        if clamp is None or length is None or length.args[0] != x or self._flow.is_constant(node.name):
            return
        source, result, epsilon = self._flow.shapes[x.name], self._flow.shapes[node.name], clamp.args[1]
        by_row = source.numel() and length.args[1:] in ((2, (dim,), True) for dim in (-1, source.ndim - 1))
        alike = source.shape == result.shape and source.dtype == torch.float32
        if by_row and alike and 1e-16 <= epsilon <= 1e-8:  # its square is a float32
            columns = source.shape[-1]
            weight = torch.full((columns,), columns**-0.5, dtype=torch.float64)
            self._norm_rows(node.name, x.name, weight, None, epsilon**2 / columns, True)

    def _before(self, arg: Any, op: str) -> Node | None:
        """Return the node that computes an argument if it is this operation, without keyword arguments, or None."""
        node = self._flow.nodes.get(arg.name) if isinstance(arg, Ref) else None
        return node if node is not None and node.op == op and not node.kwargs else None

    def _norm_rows(
        self, name: str, source: str, weight: Tensor | None, shift: Tensor | None, epsilon: float, about_zero: bool
    ) -> None:
        """Create the step of a norm over the last dimension, and of the moves and the addition after it."""
        columns = self._flow.shapes[name].shape[-1]
        rows, constant = with_constant(self._flow, rows_behind(self._flow, name, columns), columns)
        finish = self._finish_of(rows.last, self._flow.columns(name, rows.last))
        if finish is None and constant is None:
            rows = with_addition(self._flow, rows, columns, self.pending)
        shape = self._flow.shapes[rows.last].shape
        if constant is not None:
            shift = constant if shift is None else shift + constant
        step = NormStep(rows.last, source, shape, rows, finish, shift, weight, epsilon, about_zero)
        self._replace(rows.gone, step)

    def _linear(self, node: Node, site: IntegerSite) -> None:
        """Create the step of a product with a stored weight and the operations after it."""
        shapes, weight = self._flow.shapes, site.weight
        assert weight is not None
        image = None if site.geometry is None else shapes[node.name].shape[2:]

        def step(
            rows: Rows, finish: Finish, name: str | None = None, factor: Tensor | None = None, activation: str = ""
        ) -> LinearStep:
            name = name or rows.last
            shape = shapes[name].shape
            if image is not None:
                shape = torch.Size((len(shapes[node.name]), math.prod(image), len(weight)))
            bias = self._tensor(node.args[2])
            return LinearStep(name, node.args[0].name, shape, rows, finish, bias, node.name, factor, image, activation)

        self.pending[node.name] = step(Rows(node.name), None)
        if len(site.scales) > 1:  # a kernel can add the second part only to floats
            return
        if image is not None:
            rows, shape = Rows(node.name), shapes[node.name].shape
            columns = torch.arange(shape[1], dtype=torch.int32)[:, None, None].expand(shape)
        else:
            rows = rows_behind(self._flow, node.name, len(weight))
            columns = self._flow.columns(node.name, rows.last)
        finish = self._finish_of(rows.last, columns)
        if finish is not None:
            self._replace(rows.gone, step(rows, finish))
            return
        activation = _activation(self._flow, node.name)
        if activation is not None:
            last, inside, function = activation
            finish = self._finish_of(last, None, function)
            if finish is not None:
                self._replace([node.name, *inside], step(Rows(node.name), finish, last))
                return
            kind = "" if inside else _kind_of(self._flow.nodes[last])
            if kind and shapes[last].shape == shapes[node.name].shape:
                finish = self._finish_of(last, columns)
                self._replace([node.name], step(Rows(node.name), finish, last, activation=kind))
                return
        if image is not None:
            return
        before, factor = self._factor(node.name, len(weight))
        rows = with_addition(self._flow, rows_behind(self._flow, before[-1], len(weight)), len(weight), self.pending)
        if rows.added is not None or rows.place is not None:
            self._replace([*before, *rows.gone], step(rows, None, factor=factor))

    def _factor(self, name: str, columns: int) -> tuple[list[str], Tensor | None]:
        """Return the factor per column that a value is multiplied by, or None, and the values up to the result."""
        reader = self._flow.sole_reader(name)
        if reader is not None and reader.op == "aten.mul.Tensor":
            others = [arg.name for arg in reader.args if isinstance(arg, Ref) and arg.name != name]
            if len(others) == 1 and self._flow.is_constant(others[0]):
                value = self._flow.constant(others[0])
                if isinstance(value, Tensor) and (value.numel() <= 1 or value.numel() == value.shape[-1] == columns):
                    return [name, reader.name], value.float().reshape(-1)
        return [name], None

    # --- attention ---------------------------------------------------------------------------------------------------

    def _attention(self, node: Node) -> None:
        """Create the step of a product of two computed operands, or of an attention that ends in it."""
        shape = self._flow.shapes[node.name].shape
        columns = None
        if len(shape) >= 3:
            numbers = torch.arange(shape[-3] * shape[-1], dtype=torch.int32)
            columns = numbers.view(shape[-3], 1, shape[-1]).expand(shape)
        elif len(shape) == 2:
            columns = self._flow.columns(node.name)
        logits = self._scores(node)
        finish = self._finish_of(node.name, columns)
        left, right = (arg.name for arg in node.args[:2])
        if logits is None:  # if a softmax reads this product, a later attention replaces this step
            self.pending[node.name] = MatmulStep(node.name, left, right, node.name, shape, finish)
            return
        scores, between, line = logits
        queries, keys = (arg.name for arg in scores.args[:2])
        probabilities = lookup_of(self._quantizers[left], torch.exp2, torch.float64)
        step = AttentionStep(
            node.name, queries, keys, right, scores.name, node.name, *line, probabilities, shape, finish
        )
        self._replace([scores.name, *between, left], step)

    def _scores(self, node: Node) -> "tuple[Node, list[str], _Line] | None":
        """Return the product of queries and keys whose softmax is the left operand of a product, or None.

        Only multiplications by constants, additions of constants and reshapes may lie between that product and the
        softmax, and nothing else may read the values between them. Also return the names of these values, up to and
        including the softmax, and the factor and bias that they apply.
        """
        flow = self._flow
        encode = flow.nodes.get(node.args[0].name)
        if encode is None or encode.name not in self._quantizers or self._quantizers[encode.name].scale.numel() != 1:
            return None
        softmax = flow.nodes.get(encode.args[0].name)
        if softmax is None or softmax.op != "aten.softmax.int" or flow.sole_reader(encode.name) is None:
            return None
        shape = flow.shapes[softmax.name].shape
        if softmax.args[1] not in (-1, len(shape) - 1) or len(softmax.args) > 2 or softmax.kwargs:
            return None
        if flow.sole_reader(softmax.name) is not encode:
            return None
        chain: list[Node] = []
        operand = flow.nodes.get(softmax.args[0].name)
        while operand is not None and flow.sole_reader(operand.name) is not None and operand.op != PRODUCT:
            refs = [arg.name for arg in operand.args if isinstance(arg, Ref)]
            varying = [name for name in refs if not flow.is_constant(name)]
            if operand.op not in FACTORS | _SHIFTS | _RESHAPES | _MASKING or len(varying) != 1 or operand.kwargs:
                return None
            if operand.op == "aten.div.Tensor" and operand.args[0] != Ref(varying[0]):
                return None
            chain.insert(0, operand)
            operand = flow.nodes.get(varying[0])
        if operand is None or flow.sole_reader(operand.name) is None or operand.name not in self.pending:
            return None
        site, of = self._sites.get(operand.name), flow.shapes[operand.name].shape
        if site is None or site.weight is not None:
            return None
        if of != flow.shapes[encode.name].shape or len(of) < 3 or not all(of):
            return None
        # The attention kernel takes queries in one plane of bytes, and one matrix of scores for each matrix of values.
        if of[:-2] != flow.shapes[node.name].shape[:-2] or int(entries_of(site.left).max()) > 255:
            return None
        line = _line_of(flow, operand.name, chain)
        return None if line is None else (operand, [*(link.name for link in chain), softmax.name], line)

    # --- codes -------------------------------------------------------------------------------------------------------

    def _finish_of(
        self, name: str, columns: Tensor | None, function: Callable[[Tensor], Tensor] | None = None
    ) -> Finish:
        """Return the finish that encodes a value if only quantizers read it, or None. Their steps become `AliasStep`.

        columns: the column number of each entry, int32. function: a function to apply to the value first.
        """
        leaves = self._flow.leaves(name)
        if not leaves or any(leaf.name not in self._quantizers for leaf, _ in leaves):
            return None
        quantizers = [self._quantizers[leaf.name] for leaf, _ in leaves]
        finish: Finish = None
        uniform = all(isinstance(quantizer, UniformQuantizer) for quantizer in quantizers)
        if function is None and columns is not None and uniform:
            readers = [(quantizer, path) for quantizer, (_, path) in zip(quantizers, leaves, strict=True)]
            finish = _codes(self._flow, name, columns, readers)
        elif len(leaves) == 1 and quantizers[0].scale.numel() == 1 and all(node.op in MOVES for node in leaves[0][1]):
            finish = lookup_of(quantizers[0], function or (lambda x: x), torch.float64)
        if finish is not None:
            for leaf, path in leaves:
                self.pending[leaf.name] = AliasStep(leaf.name, leaf.args[0].name)
                for before, node in pairwise([self._flow.nodes[name], *path]):
                    if node.op not in MOVES:
                        self.pending[node.name] = AliasStep(node.name, before.name)
        return finish


def _kind_of(node: Node) -> str:
    """Return the activation that a node applies, one of `abi.ACTIVATIONS`, which is "" if kernels do not have it."""
    activation = BY_OPERATION.get(node.op)
    return "" if activation is None else activation.kernels.get((*node.args[1:], *node.kwargs.values()), "")


def _activation(flow: Flow, name: str) -> tuple[str, list[str], Callable[[Tensor], Tensor]] | None:
    """Return the chain of pointwise operations after a value, or None if others read the values within the chain.

    The result is the name of the last value, the names of the values between, and the function from first to last.
    """
    inside: dict[str, Node] = {}
    for node in flow.behind(name) if any(reader.op in _POINTWISE for reader in flow.readers(name)) else ():
        reads = [ref for ref in node.refs() if ref == name or ref in inside]
        if reads and node.op in _POINTWISE and len(reads) == len(list(node.refs())):
            inside[node.name] = node
    if not inside or name in flow.outputs:
        return None
    *between, last = inside
    for value_name in (name, *between):
        readers = {reader.name for reader in flow.readers(value_name) if reader.op != SIZE}
        if value_name in flow.outputs or not readers <= inside.keys():
            return None

    def function(x: Tensor) -> Tensor:
        values = {name: x}
        for node in inside.values():
            values[node.name] = flow.apply(node, values)
        return values[last]

    return last, between, function


def _line_of(flow: Flow, name: str, chain: Sequence[Node]) -> "_Line | None":
    """Return (factor, bias) if a chain of nodes computes factor * x + bias with one factor per head, or None.

    The chain is run on zeros and on ones to find them. factor: (heads,), float64. bias: as in `AttentionStep`.
    """
    shape = flow.shapes[name].shape

    def run(value: float) -> Tensor:
        values = {name: torch.full(shape, value, dtype=torch.float64)}
        for node in chain:
            values[node.name] = flow.apply(node, values)
        return values[chain[-1].name if chain else name].reshape(-1, *shape[-3:])

    offset = run(0.0)
    factor = run(1.0).sub_(offset)
    per_head = factor[0, :, 0, 0]
    if not torch.allclose(factor, per_head[:, None, None].expand(factor.shape), rtol=1e-9, atol=1e-9):
        return None
    if not bool(offset.any()):
        return per_head, None
    return per_head, torch.unique(offset, dim=0, return_inverse=True)


def _codes(flow: Flow, name: str, columns: Tensor, readers: Sequence[tuple[Any, list[Node]]]) -> Codes | None:
    """Return the finish that encodes each column of a value, or None if its quantizers do not agree.

    readers: each quantizer, with the moves and factors between the value and the quantizer.
    """
    count = int(columns.max()) + 1
    parameters = [torch.full((count,), math.nan, dtype=torch.float64) for _ in range(3)]
    for quantizer, path in readers:
        numbers, factor, last = columns, torch.ones((), dtype=torch.float64), name
        for node in path:
            if node.op in MOVES:
                numbers = flow.apply(node, {last: numbers})
                factor = flow.apply(node, {last: factor}) if factor.ndim else factor
            else:
                (factor,) = _distinct(factor.expand(numbers.shape))
                factor = flow.apply(node, {last: factor}).expand(numbers.shape)
            last = node.name
        top, scale = torch.tensor(2.0**quantizer.bits - 1), quantizer.scale.double()
        expanded = [value.double().expand(numbers.shape) for value in (scale, quantizer.zero_point, top)]
        numbers, factor, *values = _distinct(numbers, factor.expand(numbers.shape), *expanded)
        values[0] = values[0] / factor
        column_of = numbers.reshape(-1).long()
        for parameter, column in zip(parameters, values, strict=True):
            value = column.reshape(-1)
            if not bool(value.isfinite().all()):
                return None
            before = parameter[column_of]
            if not bool((before.isnan() | (before == value)).all()):
                return None
            parameter[column_of] = value
            if not torch.equal(parameter[column_of], value):
                return None
    scale, zero, top = (value.nan_to_num(1.0) for value in parameters)
    return Codes(scale, zero.float(), top.float())


def _distinct(*values: Tensor) -> list[Tensor]:
    """Cut tensors of one shape to a single entry along the dimensions in which all of them repeat in memory."""
    repeated = [all(value.stride(i) == 0 for value in values) for i in range(values[0].ndim)]
    return [value[tuple(slice(0, 1) if is_repeated else slice(None) for is_repeated in repeated)] for value in values]
