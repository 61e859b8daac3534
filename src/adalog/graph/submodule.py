"""A module quantized inside a larger model: how it is called there, and how another takes its place."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from adalog.errors import CalibrationError
from adalog.graph.capture import inference
from adalog.graph.program import leaves_of


@dataclass(frozen=True)
class Call:
    """How a module was called.

    inputs: the names of the tensors among its arguments. constants: the other arguments. output: the structure of what
    it returned.
    """

    signature: inspect.Signature
    inputs: tuple[str, ...]
    constants: Mapping[str, Any]
    output: Any

    def tensors(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The tensors of another call, in order. Raises TypeError if its other arguments or their names differ."""
        tensors, constants = _tensors_and_others(_arguments(self.signature, args, kwargs))
        if tuple(tensors) != self.inputs or constants != self.constants:
            raise TypeError(
                f"the module was quantized for the tensors {self.inputs} with {self.constants}, and is called with the "
                f"tensors {tuple(tensors)} and {constants}"
            )
        return list(tensors.values())

    def output_of(self, output: Any) -> Any:
        """A program's output in the structure and classes that the module returned."""
        return pytree.tree_unflatten(leaves_of(output), self.output)


@torch.no_grad()
def record_call(model: nn.Module, within: nn.Module, inputs: Sequence[Tensor]) -> tuple[Call, tuple[Any, ...]]:
    """(how `within(*inputs)` calls one of its modules, the module's positional inputs in that call).

    Raises ValueError where `within` does not hold the module, and CalibrationError unless it calls it exactly once.
    """
    name = type(model).__name__
    if model is within or all(module is not model for module in within.modules()):
        raise ValueError(f"{name} is no part of {type(within).__name__}: give within= the model that holds it")
    signature = inspect.signature(model.forward)
    calls: list[dict[str, Any]] = []
    outputs: list[Any] = []

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = _arguments(signature, args, kwargs)  # copies, since the forward may write to what it is given
        calls.append(pytree.tree_map_only(Tensor, Tensor.clone, arguments))

    def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        outputs.append(pytree.tree_structure(output))

    hooks = (model.register_forward_pre_hook(before, with_kwargs=True), model.register_forward_hook(after))
    try:
        with inference(within):
            within(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
    if len(calls) != 1:
        raise CalibrationError(
            f"{name} is called {len(calls)} times in one forward of {type(within).__name__}, and only a part that is "
            "called once can be quantized in place; choose a part of it, or one that holds it"
        )
    positional = _positional(name, signature, calls[0])
    tensors, constants = _tensors_and_others(calls[0])
    return Call(signature, tuple(tensors), constants, outputs[0]), positional


def exchange(model: nn.Module, within: nn.Module, replacement: nn.Module) -> None:
    """Put a module in the place of another wherever it stands."""
    for parent in list(within.modules()):
        for name, child in list(parent._modules.items()):
            if child is model:
                parent.register_module(name, replacement)


def _arguments(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, defaults included; each variadic argument has a name of its own."""
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            named |= {f"{name}[{index}]": item for index, item in enumerate(value)}
        elif kind is inspect.Parameter.VAR_KEYWORD:
            named |= value
        else:
            named[name] = value
    return named


def _positional(name: str, signature: inspect.Signature, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
    """The arguments as positional inputs, without the defaults at their end."""
    positional = [
        key
        for key, parameter in signature.parameters.items()
        if parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    ]
    inputs: list[Any] = []
    for key, value in arguments.items():
        default = signature.parameters[key].default if key in signature.parameters else None
        fixed = value is None or isinstance(value, (bool, int, float, str))
        if not fixed and not isinstance(value, Tensor):
            raise CalibrationError(
                f"{name} is called with a {type(value).__name__} for {key}; give it tensors and numbers"
            )
        if key in positional or "[" in key:
            inputs.append((value, fixed and value == default))
        elif not (fixed and value == default):
            raise CalibrationError(f"{name} is called with {key} by keyword alone; a program takes inputs by position")
    while inputs and inputs[-1][1]:
        inputs.pop()
    return tuple(value for value, _ in inputs)


def _tensors_and_others(arguments: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(the tensors among the arguments, all other arguments), both by name."""
    tensors = {key: value for key, value in arguments.items() if isinstance(value, Tensor)}
    return tensors, {key: value for key, value in arguments.items() if key not in tensors}
