"""Quantize a module inside a larger model: record how the model calls it, and put another module in its place."""

import copy
import inspect
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from adalog.errors import CalibrationError
from adalog.graph.capture import inference, take
from adalog.graph.program import Program, leaves_of
from adalog.graph.sites import Site

Inputs = tuple[Tensor, ...]
# The types of arguments that the program of a call can hold as constants.
_CONSTANTS = (bool, int, float, str, type(None), torch.dtype)


@dataclass(frozen=True)
class ModuleCall:
    """The arguments and the output of one call of a module, without the values of its tensors.

    names: of all arguments, including each member of lists, tuples and dicts. constants: the arguments that are not
    tensors. structure: the nesting of the arguments, by parameter name. output: the nesting of the output.
    """

    signature: inspect.Signature
    names: tuple[str, ...]
    constants: Mapping[str, Any]
    structure: Any
    output: Any = None

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the tensors among the arguments."""
        return tuple(name for name in self.names if name not in self.constants)

    def tensors(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """Return the tensors of another call, in order. Raises TypeError if its other arguments or any names differ."""
        call, tensors = _call(self.signature, args, kwargs)
        if replace(call, output=self.output) != self:
            raise TypeError(
                f"the module was quantized for the tensors {self.inputs} and the constants {self.constants}, but this "
                f"call has the tensors {call.inputs} and the constants {call.constants}: call it as in calibration"
            )
        return list(tensors)

    def bind(self, tensors: Sequence[Any]) -> inspect.BoundArguments:
        """Return the arguments of a call with these tensors."""
        values = {**dict(zip(self.inputs, tensors, strict=True)), **self.constants}
        arguments = pytree.tree_unflatten([values[name] for name in self.names], self.structure)
        return inspect.BoundArguments(self.signature, arguments)

    def output_of(self, output: Any) -> Any:
        """Return a program's output in the structure and classes that the module returned."""
        return pytree.tree_unflatten(leaves_of(output), self.output)


def _call(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[ModuleCall, Inputs]:
    """Return a call, with defaults but without its output, and the tensors among its arguments."""
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    items, structure = pytree.tree_flatten_with_path(dict(bound.arguments))
    leaves = {path[0].key + pytree.keystr(path[1:]): value for path, value in items}  # type: ignore[attr-defined]
    constants = {name: value for name, value in leaves.items() if not isinstance(value, Tensor)}
    tensors = tuple(value for value in leaves.values() if isinstance(value, Tensor))
    return ModuleCall(signature, tuple(leaves), constants, structure), tensors


@torch.no_grad()
def record_calls(model: nn.Module, within: nn.Module, inputs: Sequence[Tensor]) -> tuple[ModuleCall, list[Inputs]]:
    """Run `within(*inputs)`, and return how it calls the module `model`, with the tensors of each call.

    Calls on values of the same sizes are joined into one call: (N, ...) and (M, ...) become (N + M, ...).
    Raises ValueError if `within` does not contain the module. Raises CalibrationError if `within` does not take these
    inputs or does not call the module, calls it in different ways or with a list of one member per image, or calls it
    on values that differ in more than the height and width of (N, C, H, W).
    """
    name, outer = type(model).__name__, type(within).__name__
    if model is within or all(module is not model for module in within.modules()):
        raise ValueError(f"{name} is not a part of {outer}: pass within= a model that contains it")
    calls, inputs_of_calls = _record(model, within, inputs)
    if not calls:
        raise CalibrationError(f"{name} is not called in a forward pass of {outer}: choose another part of the model")
    for key, value in calls[0].constants.items():
        if not isinstance(value, _CONSTANTS):
            raise CalibrationError(
                f"{name} is called with an argument {key} of type {type(value).__name__}, which adalog cannot store: "
                "call it with tensors, numbers, strings or None, or choose a module inside it"
            )
    if any(call != calls[0] for call in calls):
        raise CalibrationError(
            f"{name} is called {len(calls)} times in a forward pass of {outer}, and its arguments other than tensors "
            "differ: choose a part of it, or a module that contains it"
        )
    count = min((len(value) for value in inputs if isinstance(value, Tensor)), default=0)
    if count > 1 and any(name not in calls[0].signature.parameters for name in calls[0].names):
        fewer = _record(model, within, take(inputs, range(count // 2)))[0]
        if any(call != calls[0] for call in fewer):
            raise CalibrationError(
                f"the lists among the arguments of {name} depend on the number of images, so the quantized module "
                "could take no other number: choose a module inside it that takes tensors (N, ...)"
            )
    return calls[0], _join(name, inputs_of_calls)


def _record(model: nn.Module, within: nn.Module, inputs: Sequence[Any]) -> tuple[list[ModuleCall], list[Inputs]]:
    """Return the calls of `model` by `within`, and their tensors; CalibrationError if it fails before the first."""
    signature, calls, inputs_of_calls = inspect.signature(model.forward), list[ModuleCall](), list[Inputs]()

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call, tensors = _call(signature, args, kwargs)
        calls.append(call)
        inputs_of_calls.append(tuple(map(Tensor.clone, tensors)))  # the forward may write to its inputs

    def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        calls[-1] = replace(calls[-1], output=pytree.tree_structure(output))

    hooks = (model.register_forward_pre_hook(before, with_kwargs=True), model.register_forward_hook(after))
    try:
        with inference(within):
            within(*inputs)
    except Exception as cause:
        if calls:
            raise
        name, outer = type(model).__name__, type(within).__name__
        reason = (str(cause).splitlines() or [""])[0]
        raise CalibrationError(
            f"{outer} fails on the images before it calls {name} ({type(cause).__name__}: {reason}). If {outer} takes "
            f"something else, such as a list of dicts, pass {name} alone with the tensors that it takes, or within= a "
            f"module that takes the images and calls {outer} on them"
        ) from cause
    finally:
        for hook in hooks:
            hook.remove()
    return calls, inputs_of_calls


def _join(name: str, calls: list[Inputs]) -> list[Inputs]:
    """Join the calls into one if their values have the same sizes; otherwise return them, if only map sizes differ."""
    values = list(zip(*calls, strict=True))
    if all(len({value.shape[1:] for value in parts}) == 1 for parts in values):
        return [tuple(torch.cat(parts) if len(parts) > 1 else parts[0] for parts in values)]
    for parts in values:
        if any(value.ndim != 4 for value in parts) or len({value.shape[1] for value in parts}) > 1:
            shapes = ", ".join(str(tuple(value.shape)) for value in parts)
            raise CalibrationError(
                f"{name} is called {len(calls)} times, on values of the shapes {shapes}. Calls can share quantizers "
                "only if their values have the same sizes, or are maps (N, C, H, W) that differ in height and width "
                "alone: choose a part of it, or a module that contains it"
            )
    return calls


def as_function(model: nn.Module, call: ModuleCall, calls: int) -> nn.Module:
    """Return the module as a function of the tensors of several calls, which returns a tuple of their outputs.

    With one call, the function returns the output itself. It shares the module's parameters.
    """
    function, count, is_method = copy.copy(model), len(call.inputs), "forward" not in vars(model)

    def forward(module: nn.Module, *tensors: Tensor) -> Any:
        own = partial(type(model).forward, module) if is_method else model.forward
        bound_calls = [call.bind(tensors[start : start + count]) for start in range(0, calls * count, count)]
        outputs = tuple(own(*bound.args, **bound.kwargs) for bound in bound_calls)
        return outputs if calls > 1 else outputs[0]

    names = [name if index == 0 else f"{name}_{index}" for index in range(calls) for name in _identifiers(call)]
    kind = inspect.Parameter.POSITIONAL_ONLY
    forward.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in ("module", *names)])  # type: ignore[attr-defined]
    function.forward = types.MethodType(forward, function)  # bound, so that a deep copy uses its own weights
    return function


def _identifiers(call: ModuleCall) -> Iterator[str]:
    """Yield the names of a call's tensors as Python identifiers: x, maps_0, maps_fine."""
    names = set[str]()
    for name in call.inputs:
        word = re.sub(r"\W+", "_", name).strip("_")
        while word in names:
            word += "_"
        names.add(word)
        yield word


def check_shareable(model: nn.Module, sites: Sequence[Site]) -> None:
    """Raise CalibrationError if a site multiplies two computed values: calls on several map sizes cannot share it."""
    computed = [site.name for site in sites if site.role not in ("linear", "conv")]
    if computed:
        raise CalibrationError(
            f"{type(model).__name__} is called on maps of several sizes and multiplies computed values "
            f"({computed[0]}), but such calls cannot share quantizers of computed values: choose a part of it, or a "
            "module that contains it"
        )


def of_first_call(program: Program, inputs: int) -> Program:
    """Return the program of one call, with this many inputs, from one of several calls that share all quantizers."""
    names = program.inputs[:inputs]
    alone = replace(program, inputs=names, output=program.output[0]).prune()
    attributes = {node.args[1] for node in alone.nodes if len(node.args) > 1 and isinstance(node.args[1], str)}
    return replace(
        alone,
        quantizers={name: value for name, value in program.quantizers.items() if name in attributes},
        weights={name: value for name, value in program.weights.items() if name in alone.tensors},
        free={name: dims for name, dims in program.free.items() if name in names},
        rule=None if program.rule is None else _about(program.rule, names),
    )


def _about(rule: Program, inputs: tuple[str, ...]) -> Program | None:
    """Return the part of a rule that depends on these inputs alone, or None if nothing is left."""
    others = replace(rule, inputs=tuple(name for name in rule.inputs if name not in inputs)).of_inputs
    output = tuple(ref for ref in rule.output if ref.name not in others)
    return replace(rule, inputs=inputs, output=output).prune() if output else None


def exchange(model: nn.Module, within: nn.Module, replacement: nn.Module) -> None:
    """Replace a module by another at every place in `within`."""
    for parent in list(within.modules()):
        for name, child in list(parent._modules.items()):
            if child is model:
                parent.register_module(name, replacement)
