"""From a PyTorch model to a program: `torch.export`, then a canonical form that the rest of the package reads.

Canonical: no in-place operations, no identities (dropout, clone, casts to the same type), attention unfolded into
transpose, matmul, scale, mask, softmax, matmul, einsums of two operands as matmuls, a softmax the left operand of its
product, batch norms folded into the convolutions before them, every weight and bias a stored tensor, equal values
computed once.
"""

import inspect
import math
import operator
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from adalog.errors import CaptureError
from adalog.graph.program import (
    OPERATIONS,
    PLACEMENT,
    PRODUCTS,
    Arg,
    Node,
    Output,
    Program,
    Ref,
    aten,
    leaves_of,
    map_refs,
    refs_of,
)
from adalog.graph.sites import find_source

TOLERANCE = 1e-4  # of the largest output, between graph and model in float32
BATCHES = (1, 2, 7)

_SYMBOLIC: dict[Any, str] = {
    operator.add: "sym.add",
    operator.sub: "sym.sub",
    operator.mul: "sym.mul",
    operator.floordiv: "sym.floordiv",
    operator.mod: "sym.mod",
    operator.neg: "sym.neg",
    operator.getitem: "getitem",
}


# A view asks for a memory layout that a program, which drops `contiguous`, does not promise.
_SPELLINGS = {"aten.view.default": "aten.reshape.default", "aten.view_as.default": "aten.reshape_as.default"}
# First argument in, first argument out, at inference. A clone has memory of its own; the others may share theirs.
_CLONES = aten("clone.default lift_fresh_copy.default")
_IDENTITIES = _CLONES | aten(
    "dropout.default dropout_.default feature_dropout.default alpha_dropout.default contiguous.default detach.default "
    "detach_.default alias.default lift_fresh.default"
)
_CASTS = aten("to.dtype to.dtype_layout to.device to.other type_as.default")
_PADS = aten("pad.default constant_pad_nd.default")
_NEW = {f"aten.new_{name}.default": f"aten.{name}.default" for name in ("zeros", "ones", "full")}
_CHECKS = ("aten._assert", "aten.sym_constrain")
# Views that can be written through: what puts the written part back into the whole.
_SCATTERS = {"aten.slice.Tensor": "aten.slice_scatter.default", "aten.select.int": "aten.select_scatter.default"}
_RESHAPES = aten("reshape.default reshape_as.default flatten.using_ints unflatten.int squeeze.dim unsqueeze.default")
# Arguments that are parameters: (operation, position) -> what they are.
_PARAMETERS = {
    **{(f"aten.{op}.default", 1): "weight" for op in ("linear", "conv2d", "matmul", "batch_norm")},
    **{(f"aten.{op}.default", 2): "bias" for op in ("linear", "conv2d", "batch_norm")},
    ("aten.layer_norm.default", 2): "weight",
    ("aten.layer_norm.default", 3): "bias",
}
# Regions that export keeps as a graph of their own: the position of that graph among the arguments.
_REGIONS = {"wrap_with_set_grad_enabled": 1, "wrap_with_autocast": 4}


@torch.no_grad()
def capture(model: nn.Module, inputs: Tensor | Sequence[Any]) -> Program:
    """The program of a model, free in its batch size.

    inputs: the model's positional inputs, (N, ...) each; one tensor is one input. What is no tensor (None, a number) is
    a constant that the program is fixed to. A single image is captured as two equal ones.
    Raises CaptureError where the model cannot be exported, uses an operation outside the whitelist, or where the
    program disagrees with the model on the inputs at batches of 1, 2 and 7.
    """
    example = batched(inputs)
    with inference(model):
        program = _import(model, take(example, [0, 1]))
        program = fold_batch_norms(store_parameters(share_equal_values(softmax_left(program)))).pruned()
        _check(model, program, example)
    return program


def batched(inputs: Tensor | Sequence[Any]) -> tuple[Any, ...]:
    """Positional inputs, checked to hold the same number of images, one or more, in every tensor's first dimension."""
    given = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    counts = [len(value) if value.ndim else None for value in given if isinstance(value, Tensor)]
    if not counts or len(set(counts)) > 1 or not counts[0]:
        shapes = ", ".join(str(tuple(value.shape)) for value in given if isinstance(value, Tensor)) or "no tensor"
        raise CaptureError(
            f"the inputs are {shapes}, but each must hold one image or more, and equally many, in its first dimension; "
            "repeat an input that all images share once for each image, or keep it in the model as a buffer"
        )
    return given


def take(inputs: Sequence[Any], images: Sequence[int] | Tensor) -> tuple[Any, ...]:
    """Inputs of these images, counted from the start again after the last one."""
    rows = torch.as_tensor(images)

    def taken(value: Any) -> Any:
        return value[rows.to(value.device) % len(value)] if isinstance(value, Tensor) else value

    return tuple(taken(value) for value in inputs)


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for every module inside, as it was outside."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _import(model: nn.Module, example: tuple[Any, ...]) -> Program:
    exported = _export(model, example)
    inputs, tensors, standing = [], dict[str, Tensor](), dict[str, Arg]()
    targets = {spec.target for spec in exported.graph_signature.input_specs}
    for spec in exported.graph_signature.input_specs:
        name = str(getattr(spec.arg, "name", ""))
        if isinstance(spec.arg, torch.export.graph_signature.ConstantArgument):
            standing[name] = spec.arg.value
        elif spec.kind == torch.export.graph_signature.InputKind.USER_INPUT:
            inputs.append(f"{name}#input" if name in targets else name)
            standing[name] = Ref(inputs[-1])
        else:
            assert spec.target is not None
            source = exported.state_dict if spec.target in exported.state_dict else exported.constants
            tensors[spec.target] = source[spec.target].detach().clone()
            standing[name] = Ref(spec.target)
    importer = _Importer([*inputs, *tensors])
    placeholders = [node for node in exported.graph.nodes if node.op == "placeholder"]
    result = importer.walk(exported.graph, [standing[node.name] for node in placeholders])
    if importer.unknown:
        raise CaptureError(
            f"{type(model).__name__} uses {', '.join(sorted(importer.unknown))}, which this version cannot store or "
            "run. Capture a part of the model without it."
        )
    output = _structure(result, exported.call_spec.out_spec)
    return Program(tuple(inputs), tuple(importer.nodes), output, tensors).pruned()


def _export(model: nn.Module, example: tuple[Any, ...]) -> torch.export.ExportedProgram:
    shapes: Any = tuple({0: torch.export.Dim.DYNAMIC} if isinstance(value, Tensor) else None for value in example)
    parameters = list(inspect.signature(model.forward).parameters.values())
    if parameters and parameters[0].kind is inspect.Parameter.VAR_POSITIONAL:
        shapes = (shapes,)  # one entry a parameter of forward
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about torch
            return torch.export.export(model, example, dynamic_shapes=shapes)
    except Exception as cause:  # torch.export raises whatever the model's own code does
        first_line = (str(cause).strip() or type(cause).__name__).splitlines()[0]
        raise CaptureError(
            f"{type(model).__name__} could not be exported: {first_line} "
            "Capture the part that can be (for a detector, its backbone) and pass that to adalog.quantize."
        ) from cause


class _Importer:
    """Reads an exported graph into nodes; operations that no program can hold end up in `unknown`.

    A value that is written to in place becomes a new value, put back into what it was a view of; other views of the
    same memory are read again after that.
    """

    def __init__(self, names: Iterable[str]):
        self.nodes: list[Node] = []
        self.unknown: set[str] = set()
        self._names = set(names)
        self._values: dict[fx.Node, Arg] = {}
        self._stale: set[fx.Node] = set()

    def walk(self, graph: fx.Graph, inputs: Sequence[Arg]) -> Arg:
        """Every node of a graph, with `inputs` for its placeholders; its output."""
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        self._values |= zip(placeholders, inputs, strict=True)
        for node in graph.nodes:
            if node.op == "call_function":
                self._values[node] = self._import(node)
            elif node.op == "output":
                return self._convert(node.args[0])
        return None

    def _import(self, node: fx.Node) -> Arg:
        op = _op(node)
        if op.startswith(_CHECKS):
            return None
        if op in _REGIONS:
            return self._inline(node, op)
        args = self._convert(node.args)
        kwargs = {key: self._convert(value) for key, value in node.kwargs.items() if key not in PLACEMENT}
        if op in _IDENTITIES or (op in _PADS and not any(args[1])):
            return args[0]
        if op in _CASTS:
            return args[0] if _dtype(node) == _dtype(node.args[0]) else self._cast(node, args[0])
        if op in _NEW:  # depends on its first argument in nothing but device and type
            return self._emit(node, _NEW[op], *args[1:], dtype=_dtype(node))
        if op == "getitem" and isinstance(args[0], tuple):
            return args[0][args[1]]
        if op == "aten.conv2d.padding":
            return self._pad_by_number(node, *args)
        if op == "aten.scaled_dot_product_attention.default":
            return self._unfold_attention(node, args, kwargs)
        if op == "aten.einsum.default" and len(args[1]) == 2:
            return self._product_of_einsum(node, *args[:2])
        if op in ("aten.matmul.default", "aten.mv.default") and 1 in (_meta(value).ndim for value in node.args):
            return self._product_of_vector(node, *args)
        if op in ("aten.baddbmm.default", "aten.addmm.default"):
            return self._add_product(node, *args, **kwargs)
        if _is_in_place(node):
            return self._write(node, op, args, kwargs)
        return self._emit(node, op, *args, **kwargs)

    def _convert(self, arg: Any) -> Arg:
        if isinstance(arg, fx.Node):
            if arg in self._stale:
                self._stale.discard(arg)
                self._values[arg] = self._convert(arg.args[0]) if _is_in_place(arg) else self._import(arg)
            return self._values[arg]
        if isinstance(arg, (tuple, list)):
            return tuple(self._convert(item) for item in arg)
        if arg is None or isinstance(arg, (bool, int, float, str, torch.dtype)):
            return arg
        if isinstance(arg, (torch.device, torch.layout, torch.memory_format)):
            return None
        raise CaptureError(f"an argument of type {type(arg).__name__} ({arg}) cannot be stored in a program")

    def _emit(self, source: fx.Node, op: str, *args: Arg, part: str = "", **kwargs: Arg) -> Ref:
        """A new node, named after the one it comes from."""
        if op not in OPERATIONS:
            self.unknown.add(op)
        stem = name = source.name + part
        count = 1
        while name in self._names:
            count += 1
            name = f"{stem}#{count}"
        self._names.add(name)
        self.nodes.append(Node(name, op, args, kwargs, _scope(source)))
        return Ref(name)

    def _cast(self, node: fx.Node, value: Arg) -> Ref:
        return self._emit(node, "aten.to.dtype", value, _dtype(node))

    def _inline(self, node: fx.Node, op: str) -> Arg:
        """A region under other global settings, which mean nothing at inference: only autocast would, were it on."""
        if op == "wrap_with_autocast" and node.args[2]:
            self.unknown.add("autocast")
        region, *operands = node.args[_REGIONS[op] :]
        owner = node.graph.owning_module
        assert isinstance(region, fx.Node)
        assert owner is not None
        graph = owner.get_submodule(str(region.target)).graph
        assert isinstance(graph, fx.Graph)
        return self.walk(graph, self._convert(operands))

    def _pad_by_number(
        self,
        node: fx.Node,
        image: Ref,
        weight: Ref,
        bias: Ref | None = None,
        stride: Sequence[int] = (1, 1),
        padding: str = "valid",
        dilation: Sequence[int] = (1, 1),
        groups: int = 1,
    ) -> Ref:
        """A convolution whose padding is "same" or "valid"; an even kernel's odd zero goes below and to the right."""
        both = [
            step * (size - 1) * (padding == "same")
            for step, size in zip(dilation, _meta(node.args[1]).shape[2:], strict=True)
        ]
        sides = tuple(total // 2 for total in both)
        if any(total % 2 for total in both):
            (top, left), (height, width) = sides, both
            image = self._emit(
                node, "aten.constant_pad_nd.default", image, (left, width - left, top, height - top), part="_pad"
            )
            sides = (0, 0)
        return self._emit(node, "aten.conv2d.default", image, weight, bias, stride, sides, dilation, groups)

    def _write(self, node: fx.Node, op: str, args: tuple[Arg, ...], kwargs: Mapping[str, Arg]) -> Ref:
        """An in-place operation as its functional twin, whose result replaces what it wrote to, and what that views."""
        target = node.args[0]
        assert isinstance(target, fx.Node)
        if op in ("aten.copy_.default", "aten.fill_.Tensor"):
            value = args[1] if _dtype(node) == _dtype(node.args[1]) else self._cast(node, args[1])
            new = self._emit(node, "aten.expand_as.default", value, args[0])
        elif op in ("aten.zero_.default", "aten.fill_.Scalar"):
            new = self._emit(node, "aten.full_like.default", args[0], *(args[1:] or (0,)))
        else:
            name, _, overload = op.rpartition(".")
            new = self._emit(node, f"{name.removesuffix('_')}.{overload}", *args, **kwargs)
        result, family = new, [target]
        self._values[target] = new
        while (whole := _shared_with(family[-1])) is not None:
            new = self._put_back(family[-1], new, self._convert(whole))
            self._values[whole] = new
            family.append(whole)
        self._stale |= {other for other in self._values if _root(other) is family[-1] and other not in family}
        return result

    def _put_back(self, view: fx.Node, new: Ref, whole: Arg) -> Ref:
        """`whole` where its view has become `new`."""
        op = _op(view)
        if op in _IDENTITIES or _is_in_place(view):
            return new
        if op in _SCATTERS:
            return self._emit(view, _SCATTERS[op], whole, new, *self._convert(view.args[1:]))
        if op not in _RESHAPES:
            self.unknown.add(f"a write through {op}")
        return self._emit(view, "aten.reshape_as.default", new, whole)

    def _product_of_einsum(self, node: fx.Node, equation: str, operands: tuple[Ref, Ref]) -> Ref:
        """An einsum of two operands as permute, flatten, matmul, unflatten, permute.

        Letters of both operands are summed, or else kept as matmul's leading dimensions; a letter of one alone is kept.
        """
        sources = node.args[1]
        assert isinstance(sources, (tuple, list))
        inputs, arrow, wanted = equation.replace(" ", "").partition("->")
        left, right = inputs.split(",")
        if not arrow:
            wanted = "".join(sorted(letter for letter in {*left, *right} if (left + right).count(letter) == 1))
        alone = set(left) ^ set(right)
        plain = all(word.isalpha() and len(set(word)) == len(word) for word in (left, right, wanted) if word)
        if not plain or not alone <= set(wanted) or not set(wanted) <= {*left, *right}:
            self.unknown.add(f'aten.einsum.default("{equation}")')
            return operands[0]
        sizes: dict[str, Arg] = {}
        for word, value, source in zip((left, right), operands, sources, strict=True):
            for axis, (letter, size) in enumerate(zip(word, _meta(source).shape, strict=True)):
                known = isinstance(size, int)
                sizes[letter] = size if known else self._emit(node, "aten.sym_size.int", value, axis, part="_size")
        lead = [letter for letter in left if letter in right and letter in wanted]
        summed = [letter for letter in left if letter in right and letter not in wanted]
        rows, columns = ([letter for letter in word if letter in alone] for word in (left, right))
        first = self._arrange(node, operands[0], left, (lead, rows, summed), sizes, "_left")
        second = self._arrange(node, operands[1], right, (lead, summed, columns), sizes, "_right")
        result = self._emit(node, "aten.matmul.default", first, second, part="_product")
        made = [*lead, *rows, *columns]
        result = self._emit(
            node, "aten.reshape.default", result, tuple(sizes[letter] for letter in made), part="_split"
        )
        return self._emit(node, "aten.permute.default", result, tuple(made.index(letter) for letter in wanted))

    def _arrange(
        self, node: fx.Node, value: Ref, word: str, parts: tuple[list[str], ...], sizes: Mapping[str, Arg], part: str
    ) -> Ref:
        """A value whose dimensions have these letters, permuted to (*lead, one dimension, one dimension)."""
        lead, *grouped = parts
        order = tuple(word.index(letter) for letter in [*lead, *grouped[0], *grouped[1]])
        value = self._emit(node, "aten.permute.default", value, order, part=part)
        if all(len(letters) == 1 for letters in grouped):
            return value
        shape: list[Arg] = [sizes[letter] for letter in lead]
        for letters in grouped:
            count: Arg = 1
            for letter in letters:
                size = sizes[letter]
                if isinstance(count, int) and isinstance(size, int):
                    count *= size
                else:
                    count = self._emit(node, "sym.mul", count, size, part="_count")
            shape.append(count)
        return self._emit(node, "aten.reshape.default", value, tuple(shape), part=f"{part}_matrix")

    def _product_of_vector(self, node: fx.Node, left: Ref, right: Ref) -> Ref:
        """A product with a vector as one with a matrix of one row or column."""
        row, column = (_meta(value).ndim == 1 for value in node.args)
        if row:
            left = self._emit(node, "aten.unsqueeze.default", left, 0, part="_row")
        if column:
            right = self._emit(node, "aten.unsqueeze.default", right, -1, part="_column")
        product = self._emit(node, "aten.matmul.default", left, right, part="_product")
        dims = (-2,) * row + (-1,) * column
        return self._emit(node, "aten.squeeze.dims", product, dims)

    def _add_product(
        self, node: fx.Node, added: Ref, left: Ref, right: Ref, *, beta: float = 1, alpha: float = 1
    ) -> Ref:
        """beta added + alpha left right, as separate operations."""
        product = self._emit(node, "aten.matmul.default", left, right, part="_product")
        if alpha != 1:
            product = self._emit(node, "aten.mul.Tensor", product, alpha, part="_scaled")
        if beta != 1:
            added = self._emit(node, "aten.mul.Tensor", added, beta, part="_weighed")
        return self._emit(node, "aten.add.Tensor", added, product)

    def _unfold_attention(self, node: fx.Node, args: tuple[Arg, ...], kwargs: Mapping[str, Arg]) -> Ref:
        """softmax(Q K^T scale + mask) V as separate operations, the two products of which are sites."""
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if given.get("is_causal") or given.get("enable_gqa"):
            where = _scope(node) or "the model"
            raise CaptureError(f"attention in {where} is causal or grouped, which no vision transformer needs")
        scale = given.get("scale")
        if scale is None:
            scale = 1 / math.sqrt(_meta(node.args[0]).shape[-1])
        transposed = self._emit(node, "aten.transpose.int", given["key"], -2, -1, part="_kt")
        scores = self._emit(node, "aten.matmul.default", given["query"], transposed, part="_qk")
        scores = self._emit(node, "aten.mul.Tensor", scores, scale, part="_scaled")
        mask = given.get("attn_mask")
        if mask is not None:
            source = node.args[3] if len(node.args) > 3 else node.kwargs["attn_mask"]
            if _dtype(source) == torch.bool:
                hidden = self._emit(node, "aten.logical_not.default", mask, part="_hidden")
                scores = self._emit(node, "aten.masked_fill.Scalar", scores, hidden, -math.inf, part="_masked")
            else:
                scores = self._emit(node, "aten.add.Tensor", scores, mask, part="_masked")
        weights = self._emit(node, "aten.softmax.int", scores, -1, part="_softmax")
        return self._emit(node, "aten.matmul.default", weights, given["value"], part="_av")


def _op(node: fx.Node) -> str:
    op = _SYMBOLIC.get(node.target, str(node.target))
    return _SPELLINGS.get(op, op)


def _scope(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values()]
    return str(paths[-1]) if paths else ""


def _meta(node: Any) -> Tensor:
    """Shape and type of what a node makes."""
    return node.meta["val"]


def _dtype(node: Any) -> torch.dtype:
    return _meta(node).dtype


def _is_in_place(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _shared_with(node: fx.Node) -> fx.Node | None:
    """The argument whose memory a node's result may be, or be a part of."""
    first = node.args[0] if node.args else None
    if node.op != "call_function" or not isinstance(first, fx.Node) or _op(node) in _CLONES:
        return None
    returns = node.target._schema.returns if hasattr(node.target, "_schema") else ()
    shares = _op(node) in {*_IDENTITIES, "getitem"} or any(value.alias_info is not None for value in returns)
    return first if shares else None


def _root(node: fx.Node) -> fx.Node:
    while (whole := _shared_with(node)) is not None:
        node = whole
    return node


def _structure(flat: Sequence[Arg], spec: Any) -> Any:
    """The model's output structure with a Ref for each tensor; named outputs of any class become `Output`."""
    if spec.is_leaf():
        return flat[0]
    children, start = [], 0
    for child in spec.children():
        children.append(_structure(flat[start : start + child.num_leaves], child))
        start += child.num_leaves
    if spec.type in (list, tuple):
        return spec.type(children)
    keys = spec.context
    if isinstance(keys, (tuple, list)) and keys and isinstance(keys[0], list):  # a dataclass: the fields that are set
        keys = keys[0]
    if not isinstance(keys, list) or len(keys) != len(children) or not all(isinstance(key, str) for key in keys):
        return tuple(children)
    named = dict(zip(keys, children, strict=True))
    return named if spec.type is dict else Output(named)


def softmax_left(program: Program) -> Program:
    """V^T A^T as (A V)^T, so that a softmax is the left operand of its product, as in other models."""
    makers = {node.name: node for node in program.nodes}
    nodes: list[Node] = []

    def transposed(value: Ref, name: str, scope: str) -> Ref:
        maker = makers.get(value.name)
        if maker is not None and maker.op == "aten.transpose.int" and set(maker.args[1:]) == {-2, -1}:
            return maker.args[0]
        nodes.append(Node(name, "aten.transpose.int", (value, -2, -1), scope=scope))
        return Ref(name)

    for node in program.nodes:
        sources = [find_source(program, makers, ref.name).kind for ref in node.args] if node.op in PRODUCTS[2:] else []
        if sources[1:] == ["softmax"] and sources[0] not in ("softmax", "weight"):
            value, weights = node.args
            args = (
                transposed(weights, f"{node.name}#left", node.scope),
                transposed(value, f"{node.name}#right", node.scope),
            )
            nodes.append(replace(node, name=f"{node.name}#product", args=args))
            transposed(Ref(nodes[-1].name), node.name, node.scope)
        else:
            nodes.append(node)
    return replace(program, nodes=tuple(nodes))


def share_equal_values(program: Program) -> Program:
    """Common subexpressions computed once, so that one activation is one value however often it was viewed."""
    seen: dict[Any, str] = {}
    names: dict[str, str] = {}
    nodes = []
    for node in program.nodes:
        renamed = node.renamed(names)
        key = repr((renamed.op, renamed.args, sorted(renamed.kwargs.items())))
        if key in seen:
            names[node.name] = seen[key]
        else:
            seen[key] = node.name
            nodes.append(renamed)
    output = map_refs(program.output, lambda ref: Ref(names.get(ref.name, ref.name)))
    return replace(program, nodes=tuple(nodes), output=output)


def store_parameters(program: Program) -> Program:
    """What weights, biases and products are from tensors alone (a bias put together of parts, a position MLP), stored.

    A product with a stored matrix on its right, x W, becomes a linear, which holds the transpose of W.
    """
    constant = set(program.tensors)
    for node in program.nodes:
        if constant.issuperset(node.refs()):
            constant.add(node.name)
    stored: dict[str, str] = {}  # a computed value -> the tensor that it becomes

    def store(value: str, node: Node, part: str) -> None:
        if value in constant and value not in program.tensors and value not in stored:
            name = f"{node.scope}.{part}".lstrip(".")
            taken = name in program.tensors or name in stored.values()
            stored[value] = f"{name}#{node.name}" if taken else name

    for node in program.nodes:
        if node.op in PRODUCTS:
            store(node.name, node, "stored")
        for index, arg in enumerate(node.args):
            if (node.op, index) in _PARAMETERS and arg is not None:
                store(arg.name, node, _PARAMETERS[node.op, index])
    making = tuple(node for node in program.nodes if node.name in constant)
    wanted = {name: Ref(value) for value, name in stored.items()}
    computed: dict[str, Tensor] = replace(program, inputs=(), nodes=making, output=wanted).pruned().run(())
    tensors, nodes = dict(program.tensors), []
    tensors.update((name, value.contiguous()) for name, value in computed.items())
    for node in program.nodes:
        reading = node.renamed(stored)
        if node.op == "aten.matmul.default" and node.args[0].name not in constant:
            right = reading.args[1].name
            if right in tensors and tensors[right].ndim == 2:
                tensors[f"{right}.transposed"] = tensors[right].t().contiguous()
                reading = replace(reading, op="aten.linear.default", args=(reading.args[0], Ref(f"{right}.transposed")))
        nodes.append(reading)
    output = map_refs(program.output, lambda ref: Ref(stored.get(ref.name, ref.name)))
    return replace(program, nodes=tuple(nodes), output=output, tensors=tensors).pruned()


def fold_batch_norms(program: Program) -> Program:
    """y = (conv(x) - mean) g + b, g = weight / sqrt(variance + eps), as one convolution with other weights."""
    makers = {node.name: node for node in program.nodes}
    readers = program.consumers()
    uses = [name for node in program.nodes for name in node.refs()]
    outputs = set(refs_of(program.output))
    tensors, names, replaced = dict(program.tensors), dict[str, str](), dict[str, Node]()
    for norm in program.nodes:
        if norm.op != "aten.batch_norm.default":
            continue
        conv = makers.get(norm.args[0].name)
        if conv is None or conv.op != "aten.conv2d.default" or len(readers[conv.name]) != 1 or conv.name in outputs:
            continue
        if norm.args[3] is None or norm.args[4] is None:  # it normalises by the images at hand
            continue
        weight_name = conv.args[1].name
        if weight_name not in tensors or uses.count(weight_name) != 1:
            continue
        mean, variance = (tensors[norm.args[i].name].double() for i in (3, 4))
        gain = torch.rsqrt(variance + norm.args[7])
        if norm.args[1] is not None:
            gain = gain * tensors[norm.args[1].name].double()
        bias = -mean * gain if norm.args[2] is None else tensors[norm.args[2].name].double() - mean * gain
        old_bias = conv.args[2] if len(conv.args) > 2 else None
        if old_bias is not None:
            bias = bias + tensors[old_bias.name].double() * gain
        weight = tensors[weight_name]
        tensors[weight_name] = (weight.double() * gain.view(-1, 1, 1, 1)).to(weight.dtype)
        bias_name = f"{weight_name.removesuffix('.weight')}.folded_bias"
        tensors[bias_name] = bias.to(weight.dtype)
        replaced[conv.name] = replace(conv, args=(*conv.args[:2], Ref(bias_name), *conv.args[3:]))
        names[norm.name] = conv.name
    nodes = tuple(replaced.get(node.name, node).renamed(names) for node in program.nodes if node.name not in names)
    output = map_refs(program.output, lambda ref: Ref(names.get(ref.name, ref.name)))
    return replace(program, nodes=nodes, output=output, tensors=tensors).pruned()


def _check(model: nn.Module, program: Program, example: tuple[Any, ...]) -> None:
    """Program and model agree at every batch size of `BATCHES`, or capture refuses and says by how much they differ."""
    for batch in BATCHES:
        inputs = take(example, torch.arange(batch))
        wanted = [value for value in pytree.tree_leaves(model(*inputs)) if value is not None]
        tensors = [value for value in inputs if isinstance(value, Tensor)]
        got = [value for value in leaves_of(program.run(tensors)) if value is not None]
        for expected, actual in zip(wanted, got, strict=True):
            if not isinstance(expected, Tensor) or not expected.is_floating_point():
                continue
            error = (expected - actual).abs().max().item() / max(expected.abs().max().item(), 1e-30)
            if not error <= TOLERANCE:
                raise CaptureError(
                    f"the program of {type(model).__name__} differs from the model by {error:.2g} of the largest "
                    f"output at batch {batch} (at most {TOLERANCE:g} is allowed); the images may hold NaN, or the "
                    "model may behave differently from call to call"
                )
