"""Capture a PyTorch model as a program: export it with `torch.export`, then rewrite it to canonical form.

The importer drops identities (dropout, clone, casts to the same dtype) and turns each in-place write into a new value;
`adalog.graph.canonical` lists the other changes. `capture` then compares the program with the model.
"""

import functools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from adalog.device import full_float32
from adalog.errors import CaptureError, ProgramError
from adalog.graph.canonical import PARAMETERS, UNFOLDED, OpCall, canonical, join_norms
from adalog.graph.exported import ONE_SIZE, WITHOUT_IT, at, export_model, place_of_node, run_on, shapes_of
from adalog.graph.modules import float_module
from adalog.graph.operations import FLOAT_PRODUCTS, OPERATIONS, PADS, PLACEMENT, aten
from adalog.graph.program import Arg, ModelOutput, Node, Program, Ref, leaves_of, present_leaves
from adalog.graph.sizes import rule_of

TOLERANCE = 1e-4  # largest allowed difference between program and model, as a fraction of the largest output
# Largest allowed fraction of whole numbers and booleans that differ, because rounding decides between equal values.
_FLIPPED = 0.01
BATCHES = (1, 2, 7)  # batch sizes at which program and model are compared
# A limit on the batch size counts as no limit from this many images on. cuDNN normalises up to 65,535 images at once.
_MANY = 65_535
Sizes = Literal["fixed", "free"]
# Factors for the images' height and width, at which a program with free sizes is compared with the model.
# The last two factors keep the aspect ratio, because a model may require it.
_STRETCHED = ((1.25, 1.5), (1.5, 2.0), (2.0, 1.0), (3.0, 2.0), (0.75, 1.25), (2.0, 2.0), (0.5, 0.5))

_SYMBOLIC: dict[Any, str] = {
    **{getattr(operator, name): f"sym.{name}" for name in ("add", "sub", "mul", "floordiv", "mod", "neg")},
    operator.getitem: "getitem",
}
# Functions that round a quotient of sizes. Those that round towards zero round down if it is not negative.
_ROUNDED: dict[Any, str] = {math.trunc: "down", math.floor: "down", torch.sym_int: "down", math.ceil: "up"}

# A program drops `contiguous`, so it cannot guarantee the memory layout that `view` needs; `reshape` takes any layout.
_SPELLINGS = {"aten.view.default": "aten.reshape.default", "aten.view_as.default": "aten.reshape_as.default"}
# Memory that is not initialised may hold zeros.
_SPELLINGS |= {"aten.empty.memory_format": "aten.zeros.default", "aten.empty_like.default": "aten.zeros_like.default"}
# Operations that return their first argument at inference. Clones return it in new memory, the others in the same.
_CLONES = aten("clone.default lift_fresh_copy.default")
_IDENTITIES = _CLONES | aten(
    "dropout.default dropout_.default feature_dropout.default alpha_dropout.default contiguous.default detach.default "
    "detach_.default alias.default lift_fresh.default"
)
_CASTS = aten("to.dtype to.dtype_layout to.device to.other type_as.default")
_NEW = {f"aten.new_{name}.default": f"aten.{name}.default" for name in ("zeros", "ones", "full")}
_NEW["aten.new_empty.default"] = "aten.zeros.default"
_CHECKS = ("aten._assert", "aten.sym_constrain")
# Views that select a part of a tensor, and the operations that put a written part back into the whole tensor.
_SCATTERS = {
    "aten.slice.Tensor": "aten.slice_scatter.default",
    "aten.select.int": "aten.select_scatter.default",
    "aten.diagonal.default": "aten.diagonal_scatter.default",
}
_TRANSPOSES = aten("transpose.int t.default")  # each is its own inverse
_RESHAPES = aten("reshape.default reshape_as.default flatten.using_ints unflatten.int squeeze.dim unsqueeze.default")
# Regions that export keeps as separate graphs, and the position of the graph among the arguments.
_REGIONS = {"wrap_with_set_grad_enabled": 1, "wrap_with_autocast": 4}
_BY_VALUES = "use torch.where(mask, a, b) there, because the sizes in a program cannot depend on values"
_BY_CHANCE = "leave it out there, because it returns other values in each call"
# What to write instead of some operations that a program cannot hold.
_WAYS_OUT = dict.fromkeys(
    aten("nonzero_numpy.default nonzero.default masked_select.default masked_scatter.default _unique2.default"),
    _BY_VALUES,
)
_WAYS_OUT |= {f"aten.{name}.default": _BY_CHANCE for name in ("rand", "randn", "rand_like", "randn_like", "bernoulli")}


@torch.no_grad()
def capture(model: nn.Module, inputs: Tensor | Sequence[Any], sizes: Sizes = "fixed") -> Program:
    """Capture a model as a program that takes any batch size.

    inputs: the model's positional inputs, (N, ...) each; a single tensor is the only input. Inputs that are not tensors
    (None, a number) become constants of the program. A single image is captured as two equal images. sizes: "fixed" for
    images of the given size, "free" for images of any height and width, with inputs (N, C, H, W). A program with free
    sizes refuses a size for which the model takes another code path.
    The compiled functions of a model run as Python code during the capture.
    Raises CaptureError if the model is not a module of float weights or cannot be exported, if it uses an operation
    outside the whitelist on values that depend on the inputs, or if program and model differ on the inputs at batches
    of 1, 2 and 7 or, with free sizes, on images of another size.
    """
    if sizes not in get_args(Sizes):
        raise ValueError(f"sizes = {sizes!r} is not one of {', '.join(get_args(Sizes))}")
    model, example = float_module(model), as_batch(inputs)
    with inference(model), torch.compiler.set_stance("force_eager"):
        program = _import(model, take(example, [0, 1]), sizes == "free")
        for batch in BATCHES:
            _check(model, program, take(example, torch.arange(batch)))
        if sizes == "free":
            _check(model, program, _of_another_size(program, take(example, [0, 1])))
    return program


def as_batch(inputs: Tensor | Sequence[Any]) -> tuple[Any, ...]:
    """Return the inputs as a tuple. Raises CaptureError unless all tensors hold equally many images, at least one."""
    tensors = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    counts = [len(value) if value.ndim else None for value in tensors if isinstance(value, Tensor)]
    if not counts or len(set(counts)) > 1 or not counts[0]:
        shapes = ", ".join(str(tuple(value.shape)) for value in tensors if isinstance(value, Tensor)) or "no tensor"
        if set(counts) == {0}:
            raise CaptureError(f"the inputs hold no images ({shapes}): check how the images are selected")
        raise CaptureError(
            f"adalog cannot use these inputs ({shapes}), because the first dimension of every tensor must count the "
            "images, at least one and the same number in each: repeat an input that all images share once per image, "
            "or store it in the model as a buffer"
        )
    return tensors


def take(inputs: Sequence[Any], images: Sequence[int] | Tensor) -> tuple[Any, ...]:
    """Return the inputs of the images with these numbers; numbers beyond the last image start again at the first."""
    rows = torch.as_tensor(images)
    return tuple(value[rows.to(value.device) % len(value)] if isinstance(value, Tensor) else value for value in inputs)


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Put every module in evaluation mode while the context is open, and restore its own mode afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def runs_on(model: nn.Module, *inputs: Any) -> bool:
    """Return True if the model takes these inputs."""
    try:
        with torch.no_grad(), inference(model):
            model(*inputs)
    except Exception:  # the model's own code may raise any exception
        return False
    return True


def _import(model: nn.Module, example: tuple[Any, ...], any_size: bool) -> Program:
    """Export a model, and return it as a program in canonical form."""
    export = export_model(model, example, any_size)
    inputs, tensors, standing = [], dict[str, Tensor](), dict[str, Arg]()
    targets = {_own_path(spec.target or "") for spec in export.graph_signature.input_specs}
    for spec in export.graph_signature.input_specs:
        name = str(getattr(spec.arg, "name", ""))
        if isinstance(spec.arg, torch.export.graph_signature.ConstantArgument):
            standing[name] = spec.arg.value
        elif spec.kind == torch.export.graph_signature.InputKind.USER_INPUT:
            inputs.append(f"{name}#input" if name in targets else name)
            standing[name] = Ref(inputs[-1])
        else:
            assert spec.target is not None
            source = export.state_dict if spec.target in export.state_dict else export.constants
            standing[name] = Ref(_own_path(spec.target))
            tensors[_own_path(spec.target)] = source[spec.target].detach().clone()
    importer = _Importer(type(model).__name__, [*inputs, *tensors])
    placeholders = [node for node in export.graph.nodes if node.op == "placeholder"]
    result = importer.walk(export.graph, [standing[node.name] for node in placeholders])
    output = _structure(result, export.call_spec.out_spec)
    program = canonical(Program(tuple(inputs), tuple(importer.nodes), output, tensors).prune())
    _check_operations(model, program, importer.sources)
    _check_weights(model, program)
    program = join_norms(program, [value for value in example if isinstance(value, Tensor)])
    shapes = {ref.name: _meta(node).shape for node in placeholders if isinstance(ref := standing[node.name], Ref)}
    free = {name: (2, 3) for name in inputs if len(shapes[name]) == 4}
    if not any_size or not free:  # without an input (N, C, H, W), a free batch size does not need a rule
        _check_any_batch(model, export)
        return program
    return replace(program, free=free, rule=rule_of(inputs, [shapes[name] for name in inputs], free))


def _check_operations(model: nn.Module, program: Program, sources: Mapping[str, fx.Node]) -> None:
    """Raise CaptureError if a program holds operations outside the whitelist. sources: exported operations by name."""
    places, ways = set[str](), set[str]()
    for node in program.nodes:
        if node.op not in OPERATIONS or any(isinstance(leaf, complex) for leaf in leaves_of(node.args)):
            places.add(f"{node.op}{at(place_of_node(sources[node.name]))}")
            if node.op in _WAYS_OUT:
                ways.add(_WAYS_OUT[node.op])
    if places:
        raise CaptureError(
            f"{type(model).__name__} uses {', '.join(sorted(places))}, which adalog cannot store or run on values "
            f"that depend on the images: {ways.pop() if len(ways) == 1 else WITHOUT_IT}"
        )


def _check_weights(model: nn.Module, program: Program) -> None:
    """Raise CaptureError if a stored tensor holds NaN, or if an infinite one is multiplied with values."""
    multiplying = {op for op, _ in PARAMETERS} | FLOAT_PRODUCTS
    multiplied = {name for node in program.nodes if node.op in multiplying for name in node.refs()}
    for name, value in program.tensors.items():
        bad = value.isnan() | (value.isinf() if name in multiplied else False)
        if bool(bad.any()):
            raise CaptureError(
                f"{name} of {type(model).__name__} holds {value[bad][0].item()} in {int(bad.sum())} of {bad.numel()} "
                "places: load weights that are finite"
            )


def _check_any_batch(model: nn.Module, export: torch.export.ExportedProgram) -> None:
    """Raise CaptureError if the model takes another code path above some batch size; with a rule, the rule says so."""
    for node in export.graph.nodes:
        if node.op == "placeholder" and isinstance(value := node.meta["val"], Tensor) and value.ndim:
            size = getattr(getattr(value.shape[0], "node", None), "expr", None)  # None for the model's own tensors
            if size in export.range_constraints and export.range_constraints[size].upper < _MANY:
                raise CaptureError(
                    f"{type(model).__name__} takes another code path for more than "
                    f"{export.range_constraints[size].upper} images at once, for example because it splits the batch: "
                    "use code that treats batches of all sizes alike"
                )


class _Importer:
    """Importer of an exported graph into nodes, whose operations may be outside the whitelist.

    An in-place write becomes a new value. If the written tensor is a view of another tensor, the importer puts the new
    value back into that tensor, and computes other views of it again when they are next read.
    """

    def __init__(self, model: str, names: Iterable[str]):
        self.nodes: list[Node] = []
        self.sources: dict[str, fx.Node] = {}  # the exported operation of each node, by the node's name
        self._model = model
        self._names = set(names)
        self._values: dict[fx.Node, Arg] = {}
        self._stale: set[fx.Node] = set()

    def walk(self, graph: fx.Graph, inputs: Sequence[Arg]) -> Arg:
        """Import every node of a graph, whose placeholders have the values `inputs`, and return the graph's output."""
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
        if op in _IDENTITIES or (op in PADS and not any(args[1])):
            return args[0]
        if op in _CASTS:
            return self._cast(node, node.args[0], args[0])
        if op in _NEW:  # the first argument only determines the device and dtype
            return self._emit(node, _NEW[op], *args[1:], dtype=_dtype(node))
        if op == "getitem" and isinstance(args[0], tuple):
            return args[0][args[1]]
        if node.target in (operator.pow, pow) and type(args[1]) is int and args[1] > 0:
            return functools.reduce(partial(self._emit, node, "sym.mul"), [args[0]] * args[1])
        if node.target in _ROUNDED and (instead := self._import_quotient(node)) is not None:
            return instead
        if _is_in_place(node):
            return self._write(node, op, args, kwargs)
        return self._unfold(node, op, args, kwargs)

    def _unfold(self, node: fx.Node, op: str, args: tuple[Arg, ...], kwargs: Mapping[str, Arg]) -> Any:
        """Import an operation that writes to no argument, by its rewrite if it has one."""
        if op in UNFOLDED:
            metas, meta_kwargs = fx.map_arg((node.args, dict(node.kwargs)), _meta)
            instead = UNFOLDED[op](OpCall(op, args, kwargs, metas, meta_kwargs, partial(self._emit, node)))
            if instead is not None:
                return instead
        return self._emit(node, op, *args, **kwargs)

    def _convert(self, arg: Any) -> Arg:
        if isinstance(arg, fx.Node):
            if arg in self._stale:
                self._stale.discard(arg)
                self._values[arg] = self._convert(arg.args[0]) if _is_in_place(arg) else self._import(arg)
            return self._values[arg]
        if isinstance(arg, (tuple, list)):
            return tuple(self._convert(item) for item in arg)
        if arg is None or isinstance(arg, (bool, int, float, complex, str, torch.dtype)):
            return arg
        if isinstance(arg, (torch.device, torch.layout, torch.memory_format)):
            return None
        raise CaptureError(
            f"an operation of {self._model} has an argument of type {type(arg).__name__} ({arg}), which a program "
            f"cannot store: {WITHOUT_IT}"
        )

    def _emit(self, source: fx.Node, op: str, *args: Arg, part: str = "", **kwargs: Arg) -> Ref:
        """Add a node, named after the exported node and the part of it that this one computes; return a reference."""
        stem = name = source.name + part
        count = 1
        while name in self._names:
            count += 1
            name = f"{stem}#{count}"
        self._names.add(name)
        self.sources[name] = source
        self.nodes.append(Node(name, op, args, kwargs, _scope(source)))
        return Ref(name)

    def _cast(self, node: fx.Node, source: Any, value: Arg) -> Arg:
        """Return `value`, which `source` computes, in the dtype of `node`."""
        return value if _dtype(node) == _dtype(source) else self._emit(node, "aten.to.dtype", value, _dtype(node))

    def _inline(self, node: fx.Node, op: str) -> Arg:
        """Import a region that has its own global settings; only autocast changes the values, and is unsupported."""
        region, *operands = node.args[_REGIONS[op] :]
        owner: Any = node.graph.owning_module
        graph = owner.get_submodule(cast(fx.Node, region).target).graph
        if op == "wrap_with_autocast" and node.args[2]:
            place = next(filter(None, map(place_of_node, graph.nodes)), "")
            raise CaptureError(
                f"{self._model} uses autocast{at(place)}, but adalog computes what it does not quantize in float32: "
                "leave autocast out there, or give it enabled=False"
            )
        return self.walk(graph, self._convert(operands))

    def _import_quotient(self, node: fx.Node) -> Ref | None:
        """Import a rounded quotient of a size and a whole number as a division of whole numbers, if it is one."""
        quotient = node.args[0]
        if not isinstance(quotient, fx.Node) or quotient.target is not operator.truediv:
            return None
        size, count = quotient.args
        while isinstance(size, fx.Node) and size.target is torch.sym_float:
            size = size.args[0]
        if not isinstance(size, fx.Node) or not isinstance(count, (int, float)) or count != int(count):
            return None
        total, count = self._convert(size), int(count)
        if node.target is not math.floor and _ROUNDED[node.target] == "down" and (count < 1 or not _is_count(size)):
            return None
        if _ROUNDED[node.target] == "down":
            return self._emit(node, "sym.floordiv", total, count)
        less = self._emit(node, "sym.floordiv", self._emit(node, "sym.neg", total, part="_less"), count, part="_down")
        return self._emit(node, "sym.neg", less)

    def _write(self, node: fx.Node, op: str, args: tuple[Arg, ...], kwargs: Mapping[str, Arg]) -> Ref:
        """Import an in-place operation as the operation that returns a new value, and put that value in its place."""
        target = node.args[0]
        assert isinstance(target, fx.Node)
        if op in ("aten.copy_.default", "aten.fill_.Tensor"):
            new = self._emit(node, "aten.expand_as.default", self._cast(node, node.args[1], args[1]), args[0])
        elif op in ("aten.zero_.default", "aten.fill_.Scalar"):
            new = self._emit(node, "aten.full_like.default", args[0], *(args[1:] or (0,)))
        else:
            name, _, overload = op.rpartition(".")
            new = self._unfold(node, f"{name.removesuffix('_')}.{overload}", args, kwargs)
        result, family = new, [target]
        self._values[target] = new
        while (base := _shared_with(family[-1])) is not None:
            new = self._put_back(family[-1], new, self._convert(base))
            self._values[base] = new
            family.append(base)
        self._stale |= {other for other in self._values if _root(other) is family[-1] and other not in family}
        return result

    def _put_back(self, view: fx.Node, new: Ref, base: Arg) -> Ref:
        """Return the value of `base` after its view has become `new`."""
        op = _op(view)
        if op in _IDENTITIES or _is_in_place(view):
            return new
        if op in _SCATTERS:
            return self._emit(view, _SCATTERS[op], base, new, *self._convert(view.args[1:]))
        if op in _TRANSPOSES:
            return self._emit(view, op, new, *self._convert(view.args[1:]))
        if op == "aten.permute.default":
            dims: Any = view.args[1]
            order = [dim % len(dims) for dim in dims]
            return self._emit(view, op, new, tuple(order.index(dim) for dim in range(len(order))))
        if op not in _RESHAPES:
            raise CaptureError(
                f"{self._model} writes through {op}{at(place_of_node(view))}, which adalog cannot follow: make a new "
                "tensor there instead of a write"
            )
        return self._emit(view, "aten.reshape_as.default", new, base)


def _op(node: fx.Node) -> str:
    known = isinstance(node.target, (str, torch._ops.OperatorBase))  # other targets are functions of Python
    op = _SYMBOLIC.get(node.target, str(node.target) if known else getattr(node.target, "__name__", str(node.target)))
    return _SPELLINGS.get(op, op)


def _scope(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values()]
    return _own_path(str(paths[-1])) if paths else ""


def _own_path(path: str) -> str:
    """Return the path of a module or tensor without the modules that `torch.compile` puts around others."""
    return ".".join(part for part in path.split(".") if part != "_orig_mod")


def _meta(node: Any) -> Tensor:
    """Return the value of a node as a tensor without data; its sizes may be symbolic."""
    return node.meta["val"]


def _dtype(node: Any) -> torch.dtype:
    return _meta(node).dtype


def _is_in_place(node: fx.Node) -> bool:
    return hasattr(node.target, "_schema") and node.target._schema.is_mutable


def _is_count(value: Any) -> bool:
    """Return True if a value is certainly not negative: a size, or a sum, product or quotient of such values."""
    if not isinstance(value, fx.Node):
        return isinstance(value, (int, float)) and value >= 0
    if value.target in (torch.ops.aten.sym_size.int, torch.ops.aten.sym_numel.default):
        return True
    kinds = (operator.add, operator.mul, operator.floordiv, torch.sym_float)
    return value.target in kinds and all(map(_is_count, value.args))


def _shared_with(node: fx.Node) -> fx.Node | None:
    """Return the argument whose memory a node's result may share, or None if the result has memory of its own."""
    first = node.args[0] if node.args else None
    if node.op != "call_function" or not isinstance(first, fx.Node) or _op(node) in _CLONES:
        return None
    returns = node.target._schema.returns if hasattr(node.target, "_schema") else ()
    shares = _op(node) in {*_IDENTITIES, "getitem"} or any(value.alias_info is not None for value in returns)
    return first if shares else None


def _root(node: fx.Node) -> fx.Node:
    """Return the node that owns the memory that this node's result may share."""
    while (base := _shared_with(node)) is not None:
        node = base
    return node


def _structure(flat: Sequence[Arg], spec: Any) -> Any:
    """Return the model's output structure with a `Ref` per tensor; any named outputs become a `ModelOutput`."""
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
    if spec.type is dict and not all(isinstance(key, str) for key in keys):
        raise CaptureError(f"the model returns a dict with the keys {keys}: use strings as keys")
    if not isinstance(keys, list) or len(keys) != len(children) or not all(isinstance(key, str) for key in keys):
        return tuple(children)
    items = dict(zip(keys, children, strict=True))
    return items if spec.type is dict else ModelOutput(items)


def _check(model: nn.Module, program: Program, inputs: tuple[Any, ...]) -> None:
    """Raise CaptureError unless the program's rule allows these inputs, and program and model agree on them."""
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    shapes = shapes_of(inputs)
    if program.rule is not None and not all(program.rule.run(tensors)):
        raise CaptureError(f"{type(model).__name__} takes another code path for {shapes}: {ONE_SIZE}")
    with full_float32():  # as `Program.run` computes
        outputs = run_on(model, inputs)
    leaves = _present_leaves(outputs)
    for expected, actual in zip(leaves, present_leaves(program.run(tensors)), strict=True):
        if not isinstance(expected, Tensor):
            continue
        if expected.shape != actual.shape:
            raise CaptureError(
                f"the captured program of {type(model).__name__} differs from the model in the shape of an output on "
                f"{shapes}: {tuple(actual.shape)} instead of {tuple(expected.shape)}. The model may take another code "
                "path for such inputs, or behave differently from call to call: use code that treats all batches alike"
            )
        error = _difference(expected, actual)
        if not error <= _tolerance(expected):
            raise CaptureError(
                f"the captured program of {type(model).__name__} differs from the model by {error:.2g} of "
                f"{'the largest output' if expected.is_floating_point() else 'the values of an output'} on {shapes} "
                f"(at most {_tolerance(expected):g} is allowed). {_why_unlike(model, inputs, leaves, error)}"
            )


def _difference(expected: Tensor, actual: Tensor) -> float:
    """Return the largest difference over the largest output or, if not of floats, the share of unequal values."""
    if not expected.numel():
        return 0.0
    same = expected == actual  # includes equal infinities, which a mask may contain
    if not expected.is_floating_point():
        return 1 - same.double().mean().item()
    largest = expected.masked_fill(same & expected.isinf(), 0).abs().max().item()
    return (expected - actual).masked_fill(same, 0).abs().max().item() / max(largest, 1e-30)


def _tolerance(expected: Tensor) -> float:
    return TOLERANCE if expected.is_floating_point() else _FLIPPED


def _present_leaves(outputs: Any) -> list[Any]:
    """Return the values of a model's outputs, of any class that PyTorch knows, in order, except None."""
    return [value for value in pytree.tree_leaves(outputs) if value is not None]


def _why_unlike(model: nn.Module, inputs: tuple[Any, ...], expected: Sequence[Any], error: float) -> str:
    """Return a sentence that says why a program may differ from its model, whose outputs are `expected`."""
    if math.isnan(error):
        return "The images may contain NaN: check how they are prepared"

    def unlike(outputs: Any) -> bool:
        pairs = [(a, b) for a, b in zip(expected, _present_leaves(outputs), strict=True) if isinstance(a, Tensor)]
        return any(a.shape != b.shape or not _difference(a, b) <= _tolerance(a) for a, b in pairs)

    recorded = export_model(model, take(inputs, [0, 1]), False).module()
    with full_float32():
        if unlike(run_on(model, inputs)):
            return "The model behaves differently from call to call: make its outputs depend on its inputs alone"
        try:
            exports_another = unlike(recorded(*inputs))
        except Exception:  # PyTorch's checks of the inputs raise errors of many types
            exports_another = True
    if exports_another:
        return (
            "The model computes something else while torch.export records it, so its code, or a library that it calls, "
            "asks whether it is being traced or compiled: make both paths compute the same values, for example with "
            'attn_implementation="eager" in a model of transformers'
        )
    return f"adalog read an operation of the exported model wrongly, so please report this model, and {WITHOUT_IT}"


def _of_another_size(program: Program, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the inputs with images of the first other size that the program takes; CaptureError if it takes none."""
    for factors in _STRETCHED:
        stretched = tuple(_stretch(value, factors) for value in inputs)
        try:
            program.check([value for value in stretched if isinstance(value, Tensor)])
            return stretched
        except ProgramError:
            continue
    shapes = " and ".join(str(tuple(value.shape[1:])) for value in inputs if isinstance(value, Tensor))
    raise CaptureError(f"the model takes no other size than {shapes}: {ONE_SIZE}")


def _stretch(value: Any, factors: tuple[float, float]) -> Any:
    """Resize images (N, C, H, W) of any dtype, by repeating rows and columns or leaving some out."""
    if not isinstance(value, Tensor) or value.ndim != 4:
        return value
    for dim, factor in zip((2, 3), factors, strict=True):
        before, after = value.shape[dim], max(1, round(value.shape[dim] * factor))
        value = value.index_select(dim, torch.arange(after, device=value.device) * before // after)
    return value
