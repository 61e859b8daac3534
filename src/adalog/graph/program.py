"""Hold a model as a program: a straight line of operations, with its tensors and quantizers.

`capture` makes a program from a model, calibration observes and rewrites it, and an artifact stores it.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from adalog.device import full_float32_on
from adalog.errors import ProgramError, one_line
from adalog.graph.operations import FACTORIES, FAKE_QUANTIZE, FLOAT_PRODUCTS, PRODUCTS, resolve
from adalog.quantizers import QuantizedTensor, Quantizer

# The most elements that a program may hold at once per image: 2**28, which is 1 GiB in float32. The attention scores of
# the largest DINOv2 at 518 pixels (24 heads, 1,370 tokens) are 45 million elements.
MAX_ELEMENTS = 2**28
# Every tensor counts as at least this many elements, so that a program cannot hold millions of tiny ones.
_PER_TENSOR = 2**8
# The number of tensors that an operation makes from one, computed before it runs.
_PIECES: dict[str, Callable[..., int]] = {
    "aten.unbind.int": lambda x, dim=0: x.shape[dim],
    "aten.split.Tensor": lambda x, size, dim=0: x.shape[dim] // size,
    "aten.chunk.default": lambda x, count, dim=0: min(x.shape[dim], count),
}


@dataclass(frozen=True)
class Ref:
    """A reference by name to the value of an input, a tensor or an earlier node."""

    name: str


Arg = Any  # Ref, None, bool, int, float, str, torch.dtype, or a tuple of these
Watch = Callable[["Node", tuple[Any, ...], Any], Any]  # as in `Program.run`


@dataclass(frozen=True)
class Node:
    """One operation: name = op(*args, **kwargs). scope: the module that it came from, for display only."""

    name: str
    op: str
    args: tuple[Arg, ...]
    kwargs: Mapping[str, Arg] = field(default_factory=dict)
    scope: str = ""

    def refs(self) -> Iterator[str]:
        """Iterate over the names of the values that the node reads, in order."""
        return iter(self._refs)

    @cached_property
    def _refs(self) -> tuple[str, ...]:
        return tuple(refs_of((self.args, tuple(self.kwargs.values()))))

    def map_refs(self, function: Callable[[Ref], Any]) -> "Node":
        """Return the node with every reference that it reads replaced by `function(ref)`."""
        kwargs = {key: map_refs(value, function) for key, value in self.kwargs.items()}
        return replace(self, args=map_refs(self.args, function), kwargs=kwargs)

    def rename(self, names: Mapping[str, str]) -> "Node":
        """Return the node with the values that it reads renamed. names: old name -> new name."""
        return self.map_refs(lambda ref: Ref(names.get(ref.name, ref.name)))


class ModelOutput(dict[str, Any]):
    """A model's named outputs, which can also be read as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass(frozen=True)
class Program:
    """A straight line of operations that reads inputs and stored tensors and computes an output.

    inputs: the names of the inputs. output: nested tuples, lists and dicts of `Ref`. tensors: stored values by name,
    including the dequantized value of every entry of `weights`. quantizers: by the name in a fake-quantize node. free:
    for each input, the dimensions besides the first that may vary. rule: a program that computes with sizes alone; the
    inputs' sizes are allowed if all its outputs are 1. Without a rule, all sizes are allowed.
    """

    inputs: tuple[str, ...]
    nodes: tuple[Node, ...]
    output: Any
    tensors: Mapping[str, Tensor]
    quantizers: Mapping[str, Quantizer] = field(default_factory=dict)
    weights: Mapping[str, QuantizedTensor] = field(default_factory=dict)
    free: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    rule: "Program | None" = None

    @cached_property
    def traces(self) -> dict[Any, dict[str, Any]]:
        """The values without data by the shapes and dtypes of the inputs, which `graph.tracing.trace` keeps here."""
        return {}

    @cached_property
    def makers(self) -> Mapping[str, Node]:
        """The node that computes each value, by the value's name."""
        return {node.name: node for node in self.nodes}

    @cached_property
    def uses(self) -> Mapping[str, int]:
        """How often each value that is read at all is read by the nodes and the output."""
        return Counter([*refs_of(self.output), *(name for node in self.nodes for name in node.refs())])

    @cached_property
    def of_inputs(self) -> Set[str]:
        """The names of the values that depend on the inputs."""
        dependent = set(self.inputs)
        for node in self.nodes:
            if not dependent.isdisjoint(node.refs()):
                dependent.add(node.name)
        return dependent

    def lives(self) -> dict[str, range]:
        """Return when each computed value exists and is still needed, as a range of numbers of operations run."""
        lasts = {name: index for index, node in enumerate(self.nodes) for name in node.refs()}
        lasts |= dict.fromkeys(refs_of(self.output), len(self.nodes))
        return {node.name: range(index + 1, lasts.get(node.name, index) + 1) for index, node in enumerate(self.nodes)}

    def _last_uses(self) -> list[list[str]]:
        """Return, for each node, the names of the computed values that no later node reads."""
        dead: list[list[str]] = [[] for _ in self.nodes]
        for name, life in self.lives().items():
            if life.stop <= len(dead):
                dead[life.stop - 1].append(name)
        return dead

    def run(
        self,
        inputs: Sequence[Tensor],
        watch: Watch | None = None,
        steps: Mapping[str, Callable[..., Any]] | None = None,
    ) -> Any:
        """Evaluate the program on its inputs, in order.

        watch(node, args, result) is called after every operation, with its evaluated arguments. If it returns a value
        other than None, that value replaces the result. steps: functions by node name; each computes its node's value
        from all arguments, instead of the node's operation. Raises ProgramError if an operation fails.
        """
        if len(inputs) != len(self.inputs):
            raise TypeError(f"the model takes {len(self.inputs)} inputs, got {len(inputs)}")
        device = next((value.device for value in (*inputs, *self.tensors.values())), None)
        values: dict[str, Any] = {**self.tensors, **dict(zip(self.inputs, inputs, strict=True))}
        with full_float32_on(device):
            for node, dead in zip(self.nodes, self._last_uses(), strict=True):
                args = evaluate(node.args, values)
                kwargs = {key: evaluate(value, values) for key, value in node.kwargs.items()}
                if node.op in FACTORIES:
                    kwargs["device"] = device
                try:
                    step = None if steps is None else steps.get(node.name)
                    result = self.apply(node, args, kwargs) if step is None else step(*args, **kwargs)
                except torch.OutOfMemoryError:
                    raise  # the batch is too large; the caller may halve it
                except Exception as cause:  # an operation may raise any exception for its arguments
                    raise ProgramError(f"{_where(node)} fails: {one_line(cause)}") from cause
                instead = None if watch is None else watch(node, args, result)
                values[node.name] = result if instead is None else instead
                for name in dead:
                    del values[name]
            return evaluate(self.output, values)

    def apply(self, node: Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one operation on evaluated arguments, and return its result."""
        if node.op == FAKE_QUANTIZE:
            x, quantizer = args[0], self.quantizers[args[1]]
            shape = quantizer.scale.shape
            if torch.broadcast_shapes(x.shape, shape) != x.shape:
                raise ValueError(f"scales of shape {tuple(shape)} do not fit a value of shape {tuple(x.shape)}")
            return x if x.is_meta else quantizer.fake_quantize(x)
        most = MAX_ELEMENTS // _PER_TENSOR
        if node.op in _PIECES and (count := _PIECES[node.op](*args, **kwargs)) > most:
            raise ValueError(f"a tensor cannot be split into {count} parts: at most {most} are allowed")
        if node.op == "aten.div.Tensor_mode" and kwargs.get("rounding_mode") == "trunc":
            _check_division(*args[:2])
        return resolve(node.op)(*args, **kwargs)

    @torch.no_grad()
    def check(self, inputs: Sequence[Tensor]) -> None:
        """Check that the program can run on inputs like these, without running it on data.

        Raises ProgramError if the rule forbids the sizes, if an operation cannot take its arguments, if a quantizer's
        shape does not fit its value, or if the values held at once (inputs included) exceed `MAX_ELEMENTS` per image.
        """
        if self.rule is not None and not _holds(self.rule, inputs):
            sizes = " and ".join(str(tuple(value.shape[1:])) for value in inputs)
            raise ProgramError(
                f"the program was not captured for inputs of {sizes}. The model takes another code path for this size, "
                "for example because a map is not larger than a window: quantize it with images of about this size"
            )
        for node in self.nodes:
            _check_arguments(node)
        limit = MAX_ELEMENTS * max(1, *(len(value) for value in inputs if value.ndim))
        last_uses = iter(self._last_uses())
        elements = dict(zip(self.inputs, map(_elements, inputs), strict=False))

        def watch(node: Node, args: tuple[Any, ...], result: Any) -> None:
            elements[node.name] = _elements(result)
            count = sum(elements.values()) + _scratch(node.op, args, result)
            if count > limit:
                raise ProgramError(
                    f"{_where(node)} takes {count:,} elements, but a batch of this size may take {limit:,}: "
                    "use smaller images"
                )
            for name in next(last_uses):
                elements.pop(name, None)

        self.run_without_data([torch.empty_like(value, device="meta") for value in inputs], watch)

    def run_without_data(self, inputs: Sequence[Tensor], watch: Watch | None = None) -> Any:
        """Evaluate the program on the meta device: all values have shapes and dtypes, but no data."""
        tensors = {name: value.to("meta") for name, value in self.tensors.items()}
        return replace(self, tensors=tensors).run(inputs, watch)

    def consumers(self) -> dict[str, list[Node]]:
        """Return the nodes that read each value, by the value's name."""
        readers: dict[str, list[Node]] = {}
        for node in self.nodes:
            for name in dict.fromkeys(node.refs()):
                readers.setdefault(name, []).append(node)
        return readers

    def unquantize(self) -> "tuple[Program, dict[str, str]]":
        """Return the program without fake-quantize nodes, and the name of the value that each of these nodes read."""
        sources: dict[str, str] = {}
        nodes = []
        for node in self.nodes:
            if node.op == FAKE_QUANTIZE:
                name = node.args[0].name
                sources[node.name] = sources.get(name, name)
            else:
                nodes.append(node.rename(sources))
        return replace(self, nodes=tuple(nodes), quantizers={}, weights={}), sources

    def float_operations(self) -> dict[str, int]:
        """Count the operations that do not multiply two tensors, by ATen name without overload."""
        ops = (node.op for node in self.nodes if node.op not in PRODUCTS and node.op not in FLOAT_PRODUCTS)
        return dict(Counter(op.removeprefix("aten.").split(".")[0] for op in ops if op.startswith("aten.")))

    def prune(self) -> "Program":
        """Return the program without the nodes and tensors that no output needs."""
        needed = set(refs_of(self.output))
        nodes = []
        for node in reversed(self.nodes):
            if node.name in needed:
                nodes.append(node)
                needed.update(node.refs())
        tensors = {name: value for name, value in self.tensors.items() if name in needed}
        return replace(self, nodes=tuple(nodes[::-1]), tensors=tensors)

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> "Program":
        """Apply a function (a move, a cast) to tensors and quantizers; codes, indices and masks keep their dtype."""

        def map_tensor(value: Tensor) -> Tensor:
            return function(value) if value.is_floating_point() else function(value).to(value.dtype)

        weights = {
            name: QuantizedTensor(map_tensor(weight.codes), weight.quantizer.map(function))
            for name, weight in self.weights.items()
        }
        tensors = {
            name: weights[name].dequantize() if name in weights else map_tensor(value)
            for name, value in self.tensors.items()
        }
        quantizers = {name: quantizer.map(function) for name, quantizer in self.quantizers.items()}
        return replace(self, tensors=tensors, quantizers=quantizers, weights=weights)


def _holds(rule: Program, inputs: Sequence[Tensor]) -> bool:
    """Return True if all outputs of a rule are true for the inputs' sizes, and False if they cannot be computed."""
    try:
        return all(rule.run_without_data(inputs))
    except ProgramError:
        return False


def _where(node: Node) -> str:
    return f"operation {node.op} ({node.name})"


def _check_arguments(node: Node) -> None:
    """Raise ProgramError for invalid arguments that PyTorch accepts, although it then crashes or computes nothing."""
    if not node.op.startswith("aten."):
        return
    arguments = resolve(node.op)._schema.arguments  # type: ignore[attr-defined]
    arguments_by_name = [*zip((argument.name for argument in arguments), node.args, strict=False), *node.kwargs.items()]
    dtypes = [value for name, value in arguments_by_name if name == "dtype"]
    if not all(value is None or isinstance(value, torch.dtype) for value in dtypes):
        raise ProgramError(f"{_where(node)} takes a torch.dtype, got {dtypes}")
    modes = ("interpolation_mode", "padding_mode") if node.op == "aten.grid_sampler.default" else ()
    for name in modes:
        if (mode := dict(arguments_by_name).get(name)) not in (0, 1, 2):
            raise ProgramError(f"{_where(node)} takes 0, 1 or 2 as {name}, got {mode!r}")


def _check_division(dividend: Any, divisor: Any) -> None:
    """Raise ValueError if the least integer of a dtype is divided by -1: the overflow would kill the process."""
    dtype = torch.result_type(dividend, divisor)
    absent = any(isinstance(value, Tensor) and value.is_meta for value in (dividend, divisor))
    if dtype in (torch.int32, torch.int64) and not absent:
        dividend, divisor = (torch.as_tensor(value).to(dtype) for value in (dividend, divisor))
        if bool(((dividend == torch.iinfo(dtype).min) & (divisor == -1)).any()):
            raise ValueError(f"it divides {torch.iinfo(dtype).min} by -1, and {dtype} cannot hold the result")


def _elements(value: Any) -> int:
    """Count the elements of a tensor or a tuple of tensors: 8-byte elements count twice, sizes do not count."""
    if isinstance(value, Tensor):
        return max(value.numel() * max(1, value.element_size() // 4), _PER_TENSOR)
    return sum(_elements(item) for item in value) if isinstance(value, (tuple, list)) else 0


def _scratch(op: str, args: tuple[Any, ...], result: Any) -> int:
    """Count the elements that an operation may need besides its result: image patches, operands copied for a batch."""
    if op == "aten.conv2d.default":
        kernel = args[1].shape
        return result.numel() // max(kernel[0], 1) * args[0].shape[-3] * kernel[2] * kernel[3]
    if op == "aten.matmul.default":
        left, right = args
        rows, columns = (left.shape[-2] if left.ndim > 1 else 1), (right.shape[-1] if right.ndim > 1 else 1)
        return result.numel() // max(rows * columns, 1) * (rows + columns) * left.shape[-1]
    return 0


def evaluate(arg: Arg, values: Mapping[str, Any]) -> Any:
    """Replace every `Ref` in nested arguments by its value."""
    return map_refs(arg, lambda ref: values[ref.name])


def map_refs(arg: Arg, function: Callable[[Ref], Any]) -> Any:
    """Replace every `Ref` in nested arguments by `function(ref)`."""
    return map_leaves(arg, Ref, function)


def map_leaves(value: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """Replace every value of this type in nested tuples, lists and dicts by `function(value)`."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, (tuple, list)):
        return type(value)(map_leaves(item, kind, function) for item in value)
    if isinstance(value, dict):
        return type(value)((key, map_leaves(item, kind, function)) for key, item in value.items())
    return value


def leaves_of(output: Any) -> list[Any]:
    """Return the values in nested tuples, lists and dicts, in order."""
    if isinstance(output, (tuple, list, dict)):
        items = output.values() if isinstance(output, dict) else output
        return [leaf for item in items for leaf in leaves_of(item)]
    return [output]


def present_leaves(output: Any) -> list[Any]:
    """Return the values of an output, in order, except None, which models return for outputs they do not compute."""
    return [leaf for leaf in leaves_of(output) if leaf is not None]


def refs_of(arg: Arg) -> Iterator[str]:
    """Iterate over the names of the references in nested arguments, in order."""
    return (leaf.name for leaf in leaves_of(arg) if isinstance(leaf, Ref))
