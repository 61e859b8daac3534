"""A program: the straight line of operations that a model is, with its tensors and quantizers.

It is what `capture` reads from a model, what calibration observes and rewrites, what an artifact stores, and what runs.
Only the operations in `OPERATIONS` can be in a program; nothing else can be named, so running one runs no foreign code.
"""

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from adalog.errors import ProgramError, one_line
from adalog.quantizers import QuantizedTensor, Quantizer

FAKE_QUANTIZE = "adalog.fake_quantize"


def aten(names: str) -> frozenset[str]:
    """ATen operations by their names without the prefix."""
    return frozenset(f"aten.{name}" for name in names.split())


_ATEN = aten(
    """
    linear.default conv2d.default matmul.default bmm.default
    layer_norm.default batch_norm.default group_norm.default instance_norm.default rms_norm.default
    softmax.int log_softmax.int
    gelu.default relu.default silu.default mish.default sigmoid.default tanh.default hardswish.default
    hardsigmoid.default hardtanh.default relu6.default leaky_relu.default elu.default erf.default softplus.default
    prelu.default glu.default log_sigmoid.default square.default sign.default floor.default ceil.default round.default
    exp.default log.default sqrt.default rsqrt.default cos.default sin.default abs.default neg.default
    reciprocal.default
    add.Tensor sub.Tensor mul.Tensor div.Tensor div.Tensor_mode pow.Tensor_Scalar pow.Scalar
    add.Scalar sub.Scalar mul.Scalar div.Scalar rsub.Scalar
    maximum.default minimum.default clamp.default clamp.Tensor clamp_min.default clamp_max.default
    mean.dim mean.default sum.dim_IntList sum.default amax.default amin.default argmax.default max.dim min.dim
    var.correction std.correction
    linalg_vector_norm.default cumsum.default
    reshape.default reshape_as.default permute.default transpose.int t.default flatten.using_ints unflatten.int
    expand.default expand_as.default unsqueeze.default squeeze.dim squeeze.dims squeeze.default movedim.int
    unbind.int split.Tensor split_with_sizes.default chunk.default select.int slice.Tensor narrow.int
    select_scatter.default slice_scatter.default
    cat.default stack.default meshgrid.indexing repeat.default repeat_interleave.self_int roll.default flip.default
    im2col.default col2im.default tril.default triu.default
    pad.default constant_pad_nd.default
    masked_fill.Scalar where.self where.ScalarOther where.ScalarSelf logical_not.default logical_and.default
    logical_or.default bitwise_not.default bitwise_and.Tensor bitwise_or.Tensor
    eq.Tensor eq.Scalar ne.Tensor ne.Scalar lt.Tensor lt.Scalar le.Scalar gt.Tensor gt.Scalar ge.Scalar
    le.Tensor ge.Tensor index.Tensor index_select.default embedding.default gather.default
    zeros.default ones.default full.default arange.default arange.start arange.start_step
    zeros_like.default ones_like.default full_like.default to.dtype
    max_pool2d.default avg_pool1d.default avg_pool2d.default adaptive_avg_pool1d.default adaptive_avg_pool2d.default
    upsample_bicubic2d.vec upsample_bilinear2d.vec upsample_nearest2d.vec pixel_shuffle.default pixel_unshuffle.default
    _upsample_bicubic2d_aa.vec _upsample_bilinear2d_aa.vec
    sym_size.int
    """
)


def _on_sizes(function: Callable[..., int]) -> Callable[..., int]:
    """Arithmetic on sizes: whole numbers within 64 bits, and nothing else that Python's operators know."""

    def checked(*sizes: int) -> int:
        if not all(type(size) is int and abs(size) < 2**63 for size in sizes):
            raise TypeError("takes whole numbers of 64 bits")
        return function(*sizes)

    return checked


def _item(values: Sequence[Any], index: int) -> Any:
    """One of the tensors that an operation has made several of."""
    if not isinstance(values, (tuple, list)) or type(index) is not int:
        raise TypeError("takes one of several values by its number")
    return values[index]


_PYTHON: dict[str, Callable[..., Any]] = {
    "sym.add": _on_sizes(operator.add),
    "sym.sub": _on_sizes(operator.sub),
    "sym.mul": _on_sizes(operator.mul),
    "sym.floordiv": _on_sizes(operator.floordiv),
    "sym.mod": _on_sizes(operator.mod),
    "sym.neg": _on_sizes(operator.neg),
    "getitem": _item,
}

# Multiplications that run in float: no site is made of them.
FLOAT_PRODUCTS = aten(
    "conv1d.default conv1d.padding conv3d.default conv3d.padding "
    "conv_transpose1d.default conv_transpose2d.input conv_transpose3d.input"
)

OPERATIONS: frozenset[str] = _ATEN | FLOAT_PRODUCTS | set(_PYTHON) | {FAKE_QUANTIZE}

# Multiplications of two tensors: what quantization is about. Those before the last two have a weight and a bias.
PRODUCTS = ("aten.linear.default", "aten.conv2d.default", "aten.matmul.default", "aten.bmm.default")

# Operations that make a tensor from numbers alone, and so must be told on which device.
FACTORIES = aten("zeros.default ones.default full.default arange.default arange.start arange.start_step")

# Keyword arguments that say where and how a value lies; a program runs where its inputs are.
PLACEMENT = ("device", "layout", "pin_memory", "memory_format", "non_blocking", "copy")

# What a program may hold at once for each image, counted in elements (2**28 in float32: 1 GiB). For comparison: 24
# heads over 1,370 tokens, as in the largest DINOv2 at 518 pixels, make scores of 45 million.
MAX_ELEMENTS = 2**28
# A tensor's own bookkeeping, in elements: what keeps a program from holding millions of tiny ones.
_PER_TENSOR = 2**8
# How many tensors an operation makes of one.
_PIECES: dict[str, Callable[..., int]] = {
    "aten.unbind.int": lambda x, dim=0: x.shape[dim],
    "aten.split.Tensor": lambda x, size, dim=0: x.shape[dim] // size,
    "aten.chunk.default": lambda x, count, dim=0: min(x.shape[dim], count),
}


@dataclass(frozen=True)
class Ref:
    """The value of an input, a tensor or an earlier node, by name."""

    name: str


Arg = Any  # Ref, None, bool, int, float, str, torch.dtype, or a tuple of these


@dataclass(frozen=True)
class Node:
    """One operation: name = op(*args, **kwargs). scope: the module it came from, for display only."""

    name: str
    op: str
    args: tuple[Arg, ...]
    kwargs: Mapping[str, Arg] = field(default_factory=dict)
    scope: str = ""

    def refs(self) -> Iterator[str]:
        """The names of the values it reads, in order."""
        return refs_of((self.args, tuple(self.kwargs.values())))

    def renamed(self, names: Mapping[str, str]) -> "Node":
        """The same operation reading other values."""

        def rename(ref: Ref) -> Ref:
            return Ref(names.get(ref.name, ref.name))

        kwargs = {key: map_refs(value, rename) for key, value in self.kwargs.items()}
        return replace(self, args=map_refs(self.args, rename), kwargs=kwargs)


class Output(dict[str, Any]):
    """A model's named outputs, readable as attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass(frozen=True)
class Program:
    """inputs: names; output: nested tuples, lists and dicts of `Ref`; tensors: float values by name, among them the
    dequantized value of every entry of `weights`; quantizers: by the name that a fake-quantize node gives."""

    inputs: tuple[str, ...]
    nodes: tuple[Node, ...]
    output: Any
    tensors: Mapping[str, Tensor]
    quantizers: Mapping[str, Quantizer] = field(default_factory=dict)
    weights: Mapping[str, QuantizedTensor] = field(default_factory=dict)

    def run(
        self,
        inputs: Sequence[Tensor],
        watch: Callable[[Node, tuple[Any, ...], Any], Any] | None = None,
        steps: Mapping[str, Callable[..., Any]] | None = None,
    ) -> Any:
        """Evaluate on the inputs. watch(node, args, result) sees every operation with its evaluated arguments.

        What it returns, if anything, takes the result's place. steps: by a node's name what computes it from its
        arguments, in place of its operation.
        Raises ProgramError where an operation fails.
        """
        if len(inputs) != len(self.inputs):
            raise TypeError(f"the model takes {len(self.inputs)} inputs, got {len(inputs)}")
        values: dict[str, Any] = {**self.tensors, **dict(zip(self.inputs, inputs, strict=True))}
        device = next((value.device for value in (*inputs, *self.tensors.values())), None)
        for node, dead in zip(self.nodes, self._last_uses(), strict=True):
            args = evaluate(node.args, values)
            kwargs = {key: evaluate(value, values) for key, value in node.kwargs.items()}
            if node.op in FACTORIES:
                kwargs["device"] = device
            try:
                step = None if steps is None else steps.get(node.name)
                result = self.apply(node, args, kwargs) if step is None else step(*args)
            except torch.OutOfMemoryError:
                raise  # of a batch that is too large, which the caller may halve
            except Exception as cause:  # whatever an operation says of its arguments
                raise ProgramError(f"{_where(node)} fails: {one_line(cause)}") from cause
            instead = None if watch is None else watch(node, args, result)
            values[node.name] = result if instead is None else instead
            for name in dead:
                del values[name]
        return evaluate(self.output, values)

    def apply(self, node: Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """One operation on evaluated arguments."""
        if node.op == FAKE_QUANTIZE:
            x, quantizer = args[0], self.quantizers[args[1]]
            if torch.broadcast_shapes(x.shape, quantizer.scale.shape) != x.shape:
                raise ValueError(f"scales {tuple(quantizer.scale.shape)} are not for a value {tuple(x.shape)}")
            return x if x.is_meta else quantizer.fake_quantize(x)
        if node.op in _PIECES:
            count = _PIECES[node.op](*args, **kwargs)
            if count > MAX_ELEMENTS // _PER_TENSOR:
                raise ValueError(f"makes {count} tensors of one")
        return resolve(node.op)(*args, **kwargs)

    @torch.no_grad()
    def check(self, inputs: Sequence[Tensor]) -> None:
        """Run on the shapes and types of the inputs alone, without data: takes a millisecond for about seven nodes.

        Raises ProgramError where an operation cannot take its arguments, a quantizer does not have the shape for its
        value, or the values held at once, inputs among them, are more than `MAX_ELEMENTS` an image.
        """
        for node in self.nodes:
            _check_dtypes(node)
        limit = MAX_ELEMENTS * max(1, *(len(value) for value in inputs if value.ndim))
        last_uses = iter(self._last_uses())
        held = dict(zip(self.inputs, map(_elements, inputs), strict=False))

        def watch(node: Node, args: tuple[Any, ...], result: Any) -> None:
            held[node.name] = _elements(result)
            count = sum(held.values()) + _scratch(node.op, args, result)
            if count > limit:
                raise ProgramError(f"{_where(node)} takes {count:,} elements; a batch like this may take {limit:,}")
            for name in next(last_uses):
                held.pop(name, None)

        shapes = [torch.empty_like(value, device="meta") for value in inputs]
        tensors = {name: value.to("meta") for name, value in self.tensors.items()}
        replace(self, tensors=tensors).run(shapes, watch)

    def _last_uses(self) -> list[list[str]]:
        """For each node the names whose value nothing reads afterwards."""
        kept = {*self.tensors, *self.inputs, *refs_of(self.output)}
        dead: list[list[str]] = []
        for node in reversed(self.nodes):
            names = [name for name in dict.fromkeys([node.name, *node.refs()]) if name not in kept]
            kept.update(names)
            dead.append(names)
        return dead[::-1]

    def consumers(self) -> dict[str, list[Node]]:
        """Which nodes read each value."""
        readers: dict[str, list[Node]] = {}
        for node in self.nodes:
            for name in dict.fromkeys(node.refs()):
                readers.setdefault(name, []).append(node)
        return readers

    def unquantized(self) -> "tuple[Program, dict[str, str]]":
        """The program with every operand read where it is made, and what each fake-quantize node reads."""
        sources: dict[str, str] = {}
        nodes = []
        for node in self.nodes:
            if node.op == FAKE_QUANTIZE:
                name = node.args[0].name
                sources[node.name] = sources.get(name, name)
            else:
                nodes.append(node.renamed(sources))
        return replace(self, nodes=tuple(nodes), quantizers={}, weights={}), sources

    def float_operations(self) -> dict[str, int]:
        """How many of each operation multiply no two tensors, by ATen's name without overload."""
        ops = (node.op for node in self.nodes if node.op not in PRODUCTS and node.op not in FLOAT_PRODUCTS)
        return dict(Counter(op.removeprefix("aten.").split(".")[0] for op in ops if op.startswith("aten.")))

    def pruned(self) -> "Program":
        """Without the nodes and tensors that no output needs."""
        needed = set(refs_of(self.output))
        nodes = []
        for node in reversed(self.nodes):
            if node.name in needed:
                nodes.append(node)
                needed.update(node.refs())
        tensors = {name: value for name, value in self.tensors.items() if name in needed}
        return replace(self, nodes=tuple(nodes[::-1]), tensors=tensors)

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> "Program":
        """With a function (a move to a device, a cast) applied to every tensor and quantizer parameter.

        Codes, indices and masks keep their type under any cast.
        """

        def mapped(value: Tensor) -> Tensor:
            return function(value) if value.is_floating_point() else function(value).to(value.dtype)

        weights = {
            name: QuantizedTensor(mapped(weight.codes), weight.quantizer.map(function))
            for name, weight in self.weights.items()
        }
        tensors = {
            name: weights[name].dequantize() if name in weights else mapped(value)
            for name, value in self.tensors.items()
        }
        quantizers = {name: quantizer.map(function) for name, quantizer in self.quantizers.items()}
        return replace(self, tensors=tensors, quantizers=quantizers, weights=weights)


def _where(node: Node) -> str:
    return f"operation {node.op} ({node.name})"


def _check_dtypes(node: Node) -> None:
    """PyTorch takes a number for a type, and dies of one that names none."""
    if not node.op.startswith("aten."):
        return
    arguments = resolve(node.op)._schema.arguments  # type: ignore[attr-defined]
    named = zip((argument.name for argument in arguments), node.args, strict=False)
    dtypes = [value for name, value in (*named, *node.kwargs.items()) if name == "dtype"]
    if not all(value is None or isinstance(value, torch.dtype) for value in dtypes):
        raise ProgramError(f"{_where(node)} takes a type, not {dtypes}")


def _elements(value: Any) -> int:
    """Of a tensor or a tuple of tensors, one of 8 bytes as two; a size counts nothing."""
    if isinstance(value, Tensor):
        return max(value.numel() * max(1, value.element_size() // 4), _PER_TENSOR)
    return sum(_elements(item) for item in value) if isinstance(value, (tuple, list)) else 0


def _scratch(op: str, args: tuple[Any, ...], result: Any) -> int:
    """Elements that an operation may make besides its result: patches of images, operands spread over a batch."""
    if op == "aten.conv2d.default":
        kernel = args[1].shape
        return result.numel() // max(kernel[0], 1) * args[0].shape[-3] * kernel[2] * kernel[3]
    if op == "aten.matmul.default":
        left, right = args
        rows, columns = (left.shape[-2] if left.ndim > 1 else 1), (right.shape[-1] if right.ndim > 1 else 1)
        return result.numel() // max(rows * columns, 1) * (rows + columns) * left.shape[-1]
    return 0


def resolve(op: str) -> Callable[..., Any]:
    """The function of an operation on the whitelist."""
    if op not in OPERATIONS or op == FAKE_QUANTIZE:
        raise KeyError(op)
    if op in _PYTHON:
        return _PYTHON[op]
    name, overload = op.removeprefix("aten.").split(".")
    function: Callable[..., Any] = getattr(getattr(torch.ops.aten, name), overload)
    return function


def evaluate(arg: Arg, values: Mapping[str, Any]) -> Any:
    """The argument with every `Ref` replaced by its value."""
    if isinstance(arg, Ref):
        return values[arg.name]
    if isinstance(arg, (tuple, list)):
        return type(arg)(evaluate(item, values) for item in arg)
    if isinstance(arg, dict):
        return type(arg)((key, evaluate(item, values)) for key, item in arg.items())
    return arg


def map_refs(arg: Arg, function: Callable[[Ref], Any]) -> Any:
    if isinstance(arg, Ref):
        return function(arg)
    if isinstance(arg, (tuple, list)):
        return type(arg)(map_refs(item, function) for item in arg)
    if isinstance(arg, dict):
        return type(arg)((key, map_refs(item, function)) for key, item in arg.items())
    return arg


def leaves_of(output: Any) -> list[Any]:
    """What nested tuples, lists and dicts hold, in order."""
    if isinstance(output, (tuple, list, dict)):
        items = output.values() if isinstance(output, dict) else output
        return [leaf for item in items for leaf in leaves_of(item)]
    return [output]


def refs_of(arg: Arg) -> Iterator[str]:
    """The names in nested arguments, in order."""
    if isinstance(arg, Ref):
        yield arg.name
    elif isinstance(arg, dict):
        for item in arg.values():
            yield from refs_of(item)
    elif isinstance(arg, (tuple, list)):
        for item in arg:
            yield from refs_of(item)
