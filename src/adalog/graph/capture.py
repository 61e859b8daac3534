"""Capture a PyTorch model as a program: export it with `torch.export`, then rewrite it to canonical form.

The importer drops identities (dropout, clone, casts to the same dtype) and turns each in-place write into a new value;
`adalog.graph.canonical` lists the other changes. `capture` then compares the program with the model.
"""

import inspect
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental import _config as export_config
from torch.utils import _pytree as pytree

from adalog.device import full_float32
from adalog.errors import CaptureError, ProgramError, one_line
from adalog.graph.canonical import UNFOLDED, Call, canonical
from adalog.graph.operations import OPERATIONS, PADS, PLACEMENT, aten
from adalog.graph.program import Arg, Node, Output, Program, Ref, given_leaves
from adalog.graph.sizes import rule_of

TOLERANCE = 1e-4  # largest allowed difference between program and model, as a fraction of the largest output
BATCHES = (1, 2, 7)  # batch sizes at which program and model are compared
# A limit on the batch size counts as no limit from this many images on. cuDNN normalises up to 65,535 images at once.
_MANY = 65_535
Sizes = Literal["fixed", "free"]
# Factors for the images' height and width, at which a program with free sizes is compared with the model.
# The last two factors keep the aspect ratio, because a model may require it.
_STRETCHED = ((1.25, 1.5), (1.5, 2.0), (2.0, 1.0), (3.0, 2.0), (0.75, 1.25), (2.0, 2.0), (0.5, 0.5))

_SYMBOLIC: dict[Any, str] = {
    operator.add: "sym.add",
    operator.sub: "sym.sub",
    operator.mul: "sym.mul",
    operator.floordiv: "sym.floordiv",
    operator.mod: "sym.mod",
    operator.neg: "sym.neg",
    operator.getitem: "getitem",
}


# A program drops `contiguous`, so it cannot guarantee the memory layout that `view` needs; `reshape` takes any layout.
_SPELLINGS = {"aten.view.default": "aten.reshape.default", "aten.view_as.default": "aten.reshape_as.default"}
# Operations that return their first argument at inference. Clones return it in new memory, the others in the same.
_CLONES = aten("clone.default lift_fresh_copy.default")
_IDENTITIES = _CLONES | aten(
    "dropout.default dropout_.default feature_dropout.default alpha_dropout.default contiguous.default detach.default "
    "detach_.default alias.default lift_fresh.default"
)
_CASTS = aten("to.dtype to.dtype_layout to.device to.other type_as.default")
_NEW = {f"aten.new_{name}.default": f"aten.{name}.default" for name in ("zeros", "ones", "full")}
_CHECKS = ("aten._assert", "aten.sym_constrain")
# Views that select a part of a tensor, and the operations that put a written part back into the whole tensor.
_SCATTERS = {"aten.slice.Tensor": "aten.slice_scatter.default", "aten.select.int": "aten.select_scatter.default"}
_TRANSPOSES = aten("transpose.int t.default")  # each is its own inverse
_RESHAPES = aten("reshape.default reshape_as.default flatten.using_ints unflatten.int squeeze.dim unsqueeze.default")
# Regions that export keeps as separate graphs, and the position of the graph among the arguments.
_REGIONS = {"wrap_with_set_grad_enabled": 1, "wrap_with_autocast": 4}


@torch.no_grad()
def capture(model: nn.Module, inputs: Tensor | Sequence[Any], sizes: Sizes = "fixed") -> Program:
    """Capture a model as a program that takes any batch size.

    inputs: the model's positional inputs, (N, ...) each; a single tensor is the only input. Inputs that are not tensors
    (None, a number) become constants of the program. A single image is captured as two equal images. sizes: "fixed" for
    images of the given size, "free" for images of any height and width, with inputs (N, C, H, W). A program with free
    sizes refuses a size for which the model takes another code path.
    Raises CaptureError if the model cannot be exported, if it uses an operation outside the whitelist, or if program
    and model differ on the inputs at batches of 1, 2 and 7 or, with free sizes, on images of another size.
    """
    if sizes not in get_args(Sizes):
        raise ValueError(f"sizes = {sizes!r} is not one of {', '.join(get_args(Sizes))}")
    example = batched(inputs)
    with inference(model):
        program = canonical(_import(model, take(example, [0, 1]), sizes == "free"))
        for batch in BATCHES:
            _check(model, program, take(example, torch.arange(batch)))
        if sizes == "free":
            _check(model, program, _of_another_size(program, take(example, [0, 1])))
    return program


def batched(inputs: Tensor | Sequence[Any]) -> tuple[Any, ...]:
    """Return the positional inputs as a tuple.

    Raises CaptureError unless all tensors hold the same number of images, at least one.
    """
    given = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    counts = [len(value) if value.ndim else None for value in given if isinstance(value, Tensor)]
    if not counts or len(set(counts)) > 1 or not counts[0]:
        shapes = ", ".join(str(tuple(value.shape)) for value in given if isinstance(value, Tensor)) or "no tensor"
        raise CaptureError(
            f"adalog cannot use these inputs ({shapes}), because the first dimension of every tensor must count the "
            "images, at least one and the same number in each: repeat an input that all images share once per image, "
            "or store it in the model as a buffer"
        )
    return given


def take(inputs: Sequence[Any], images: Sequence[int] | Tensor) -> tuple[Any, ...]:
    """Return the inputs of the images with these numbers; numbers beyond the last image start again at the first."""
    rows = torch.as_tensor(images)

    def taken(value: Any) -> Any:
        return value[rows.to(value.device) % len(value)] if isinstance(value, Tensor) else value

    return tuple(taken(value) for value in inputs)


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


def _import(model: nn.Module, example: tuple[Any, ...], any_size: bool) -> Program:
    """Export a model, and return it as a program that is not canonical yet."""
    exported = _export(model, example, any_size)
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
            f"{type(model).__name__} uses {', '.join(sorted(importer.unknown))}, which this version of adalog cannot "
            "store or run: capture a part of the model that does not use it"
        )
    output = _structure(result, exported.call_spec.out_spec)
    program = Program(tuple(inputs), tuple(importer.nodes), output, tensors).pruned()
    if not any_size:
        _check_any_batch(model, exported)
        return program
    given = {ref.name: _meta(node).shape for node in placeholders if isinstance(ref := standing[node.name], Ref)}
    free = {name: (2, 3) for name in inputs if len(given[name]) == 4}
    if not free:  # no input is (N, C, H, W), and a free batch size does not need a rule
        _check_any_batch(model, exported)
        return program
    return replace(program, free=free, rule=rule_of(inputs, [given[name] for name in inputs], free))


def _export(model: nn.Module, example: tuple[Any, ...], any_size: bool) -> torch.export.ExportedProgram:
    def open_dims(value: Tensor) -> dict[int, Any]:
        return dict.fromkeys((0, 2, 3) if any_size and value.ndim == 4 else (0,), torch.export.Dim.DYNAMIC)

    shapes: Any = tuple(open_dims(value) if isinstance(value, Tensor) else None for value in example)
    try:
        kinds = [parameter.kind for parameter in inspect.signature(model.forward).parameters.values()]
        if inspect.Parameter.VAR_POSITIONAL in kinds[: len(shapes)]:
            more = kinds.index(inspect.Parameter.VAR_POSITIONAL)
            shapes = (*shapes[:more], shapes[more:])  # one entry per parameter of forward
        with _for_free_sizes() if any_size else nullcontext():
            return torch.export.export(model, example, dynamic_shapes=shapes)
    except Exception as cause:  # torch.export raises whatever the model's own code raises
        first_line = (str(cause).strip() or type(cause).__name__).splitlines()[0]
        part = "the part that can be exported (for a detector, its backbone) and pass that to adalog.quantize"
        way_out = (
            f'capture it for one size (sizes="fixed", or without --free-sizes), or capture {part}'
            if any_size
            else f"capture {part}"
        )
        raise CaptureError(f"{type(model).__name__} could not be exported ({first_line}): {way_out}") from cause


def _check_any_batch(model: nn.Module, exported: torch.export.ExportedProgram) -> None:
    """Raise CaptureError if the model takes another code path above some batch size; with a rule, the rule says so."""
    for node in exported.graph.nodes:
        if node.op == "placeholder" and isinstance(value := node.meta["val"], Tensor) and value.ndim:
            size = getattr(getattr(value.shape[0], "node", None), "expr", None)  # None for the model's own tensors
            if size in exported.range_constraints and exported.range_constraints[size].upper < _MANY:
                raise CaptureError(
                    f"{type(model).__name__} takes another code path for more than "
                    f"{exported.range_constraints[size].upper} images at once, for example because it splits the "
                    "batch: capture a part of the model that treats batches of all sizes alike"
                )


@contextmanager
def _for_free_sizes() -> Iterator[None]:
    """Keep export from two things that take most of its time if sizes are free.

    It would ask for memory layouts at every size, and check every entry of a cache that hardly ever saves work then.
    """
    from torch._dynamo import config as dynamo_config  # which takes a second to import; export does so anyway

    with ExitStack() as stack:
        stack.enter_context(dynamo_config.patch(fake_tensor_cache_enabled=False))
        if hasattr(export_config, "backed_size_oblivious"):  # PyTorch 2.6 does not have this option
            stack.enter_context(export_config.patch(backed_size_oblivious=True))  # type: ignore[attr-defined]
        yield


class _Importer:
    """Importer of an exported graph into nodes, which collects unsupported operations in `unknown`.

    An in-place write becomes a new value. If the written tensor is a view of another tensor, the importer puts the new
    value back into that tensor, and computes other views of it again when they are next read.
    """

    def __init__(self, names: Iterable[str]):
        self.nodes: list[Node] = []
        self.unknown: set[str] = set()
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
            return args[0] if _dtype(node) == _dtype(node.args[0]) else self._cast(node, args[0])
        if op in _NEW:  # the first argument only determines the device and dtype
            return self._emit(node, _NEW[op], *args[1:], dtype=_dtype(node))
        if op == "getitem" and isinstance(args[0], tuple):
            return args[0][args[1]]
        if op in UNFOLDED:
            metas, meta_kwargs = fx.map_arg((node.args, dict(node.kwargs)), _meta)
            call = Call(args, kwargs, metas, meta_kwargs, _scope(node), partial(self._emit, node))
            if (instead := UNFOLDED[op](call)) is not None:
                return instead
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
        raise CaptureError(
            f"an operation of the model has an argument of type {type(arg).__name__} ({arg}), which a program cannot "
            "store: capture a part of the model without this operation"
        )

    def _emit(self, source: fx.Node, op: str, *args: Arg, part: str = "", **kwargs: Arg) -> Ref:
        """Add a node, named after the exported node and the part of it that this one computes; return a reference."""
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
        """Import a region that has its own global settings; only autocast changes the values, and is unsupported."""
        if op == "wrap_with_autocast" and node.args[2]:
            self.unknown.add("autocast")
        region, *operands = node.args[_REGIONS[op] :]
        owner = node.graph.owning_module
        assert isinstance(region, fx.Node)
        assert owner is not None
        graph = owner.get_submodule(str(region.target)).graph
        assert isinstance(graph, fx.Graph)
        return self.walk(graph, self._convert(operands))

    def _write(self, node: fx.Node, op: str, args: tuple[Arg, ...], kwargs: Mapping[str, Arg]) -> Ref:
        """Import an in-place operation as the operation that returns a new value, and put that value in its place."""
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
        """Return the value of `whole` after its view has become `new`."""
        op = _op(view)
        if op in _IDENTITIES or _is_in_place(view):
            return new
        if op in _SCATTERS:
            return self._emit(view, _SCATTERS[op], whole, new, *self._convert(view.args[1:]))
        if op in _TRANSPOSES:
            return self._emit(view, op, new, *self._convert(view.args[1:]))
        if op == "aten.permute.default":
            dims: Any = view.args[1]
            order = [dim % len(dims) for dim in dims]
            return self._emit(view, op, new, tuple(order.index(dim) for dim in range(len(order))))
        if op not in _RESHAPES:
            self.unknown.add(f"a write through {op}")
        return self._emit(view, "aten.reshape_as.default", new, whole)


def _op(node: fx.Node) -> str:
    op = _SYMBOLIC.get(node.target, str(node.target))
    return _SPELLINGS.get(op, op)


def _scope(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values()]
    return str(paths[-1]) if paths else ""


def _meta(node: Any) -> Tensor:
    """Return the value of a node as a tensor without data; its sizes may be symbolic."""
    return node.meta["val"]


def _dtype(node: Any) -> torch.dtype:
    return _meta(node).dtype


def _is_in_place(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


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
    while (whole := _shared_with(node)) is not None:
        node = whole
    return node


def _structure(flat: Sequence[Arg], spec: Any) -> Any:
    """Return the model's output structure with a `Ref` per tensor; named outputs of any class become an `Output`."""
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
    named = dict(zip(keys, children, strict=True))
    return named if spec.type is dict else Output(named)


def _check(model: nn.Module, program: Program, inputs: tuple[Any, ...]) -> None:
    """Raise CaptureError unless the program's rule allows these inputs, and program and model agree on them."""
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    given = f"inputs of {' and '.join(str(tuple(value.shape)) for value in tensors)}"
    if program.rule is not None and not all(program.rule.run(tensors)):
        raise CaptureError(
            f"{type(model).__name__} takes another code path for {given}: capture it for one size "
            '(sizes="fixed", or without --free-sizes)'
        )
    try:
        # Clones, because the model may write to its inputs.
        with full_float32():  # as `Program.run` computes
            made = model(*(value.clone() if isinstance(value, Tensor) else value for value in inputs))
    except Exception as cause:  # the model's own code may raise any exception
        raise CaptureError(
            f"{type(model).__name__} fails on {given} ({one_line(cause)}): capture a part of the model that runs on "
            "such inputs"
        ) from cause
    wanted = [value for value in pytree.tree_leaves(made) if value is not None]
    got = given_leaves(program.run(tensors))
    for expected, actual in zip(wanted, got, strict=True):
        if not isinstance(expected, Tensor):
            continue
        if expected.shape != actual.shape:
            raise CaptureError(
                f"the captured program of {type(model).__name__} differs from the model in the shape of an output on "
                f"{given}: {tuple(actual.shape)} instead of {tuple(expected.shape)}. The model may take another code "
                "path for such inputs, or behave differently from call to call: capture a part of it that does neither"
            )
        if not expected.is_floating_point() or not expected.numel():
            continue
        same = expected == actual  # includes equal infinities, which a mask may contain
        largest = expected.masked_fill(same & expected.isinf(), 0).abs().max().item()
        error = (expected - actual).masked_fill(same, 0).abs().max().item() / max(largest, 1e-30)
        if not error <= TOLERANCE:
            raise CaptureError(
                f"the captured program of {type(model).__name__} differs from the model by {error:.2g} of the largest "
                f"output on {given} (at most {TOLERANCE:g} is allowed). The images may contain NaN, or the model may "
                "behave differently from call to call: check the images, and capture a part of the model whose outputs "
                "do not change between calls"
            )


def _of_another_size(program: Program, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the inputs with images of another height and width: the first of a few sizes that the program takes.

    Raises CaptureError if the program takes none of them.
    """
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    for height, width in _STRETCHED:

        def stretched(value: Any, height: float = height, width: float = width) -> Any:
            if not isinstance(value, Tensor) or value.ndim != 4:
                return value
            return _stretched(_stretched(value, 2, height), 3, width)

        try:
            program.check([stretched(value) for value in tensors])
        except ProgramError:
            continue
        return tuple(stretched(value) for value in inputs)
    shapes = " and ".join(str(tuple(value.shape[1:])) for value in tensors)
    raise CaptureError(
        f'the model takes no other size than {shapes}: capture it for one size (sizes="fixed", or without --free-sizes)'
    )


def _stretched(value: Tensor, dim: int, factor: float) -> Tensor:
    """Resize a dimension by this factor, by repeating entries or leaving some out; works for any dtype."""
    before, after = value.shape[dim], max(1, round(value.shape[dim] * factor))
    return value.index_select(dim, torch.arange(after, device=value.device) * before // after)
