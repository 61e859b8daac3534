"""A module quantized inside a larger model: how it is called there, and how another takes its place."""

import copy
import inspect
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from adalog.errors import CalibrationError
from adalog.graph.capture import inference
from adalog.graph.program import Program, leaves_of, refs_of
from adalog.graph.sites import Site

Inputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Call:
    """How a module was called.

    names: of all its arguments, those in lists, tuples and dicts one by one. constants: those that are no tensors.
    structure, output: how it was given its arguments, by the names of its parameters, and what it returned.
    """

    signature: inspect.Signature
    names: tuple[str, ...]
    constants: Mapping[str, Any]
    structure: Any
    output: Any = None

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the tensors among its arguments."""
        return tuple(name for name in self.names if name not in self.constants)

    def tensors(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The tensors of another call, in order. Raises TypeError if its other arguments or their names differ."""
        call, tensors = _call(self.signature, args, kwargs)
        if replace(call, output=self.output) != self:
            raise TypeError(
                f"the module was quantized for the tensors {self.inputs} with {self.constants}, and is called with the "
                f"tensors {call.inputs} and {call.constants}"
            )
        return list(tensors)

    def bound(self, tensors: Sequence[Any]) -> inspect.BoundArguments:
        """The arguments of a call with these tensors."""
        given = {**dict(zip(self.inputs, tensors, strict=True)), **self.constants}
        arguments = pytree.tree_unflatten([given[name] for name in self.names], self.structure)
        return inspect.BoundArguments(self.signature, arguments)

    def output_of(self, output: Any) -> Any:
        """A program's output in the structure and classes that the module returned."""
        return pytree.tree_unflatten(leaves_of(output), self.output)


def _call(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Call, Inputs]:
    """(a call, defaults included, whose output is not known; the tensors among its arguments)."""
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    found, structure = pytree.tree_flatten_with_path(dict(bound.arguments))
    leaves = {path[0].key + pytree.keystr(path[1:]): value for path, value in found}  # type: ignore[attr-defined]
    constants = {name: value for name, value in leaves.items() if not isinstance(value, Tensor)}
    tensors = tuple(value for value in leaves.values() if isinstance(value, Tensor))
    return Call(signature, tuple(leaves), constants, structure), tensors


@torch.no_grad()
def record_calls(model: nn.Module, within: nn.Module, inputs: Sequence[Tensor]) -> tuple[Call, list[Inputs]]:
    """(how `within(*inputs)` calls one of its modules, the tensors that it gives it in each call).

    Calls on values of the same sizes are joined to one on all of them: (N, ...) and (M, ...) become (N + M, ...).
    Raises ValueError where `within` does not hold the module, and CalibrationError where it does not call it, calls it
    in different ways, or on values whose sizes differ in other dimensions than height and width of (N, C, H, W).
    """
    name = type(model).__name__
    if model is within or all(module is not model for module in within.modules()):
        raise ValueError(f"{name} is no part of {type(within).__name__}: give within= the model that holds it")
    signature = inspect.signature(model.forward)
    calls: list[Call] = []
    given: list[Inputs] = []

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call, tensors = _call(signature, args, kwargs)
        calls.append(call)
        given.append(tuple(map(Tensor.clone, tensors)))  # the forward may write to what it is given

    def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        calls[-1] = replace(calls[-1], output=pytree.tree_structure(output))

    hooks = (model.register_forward_pre_hook(before, with_kwargs=True), model.register_forward_hook(after))
    try:
        with inference(within):
            within(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
    if not calls:
        raise CalibrationError(f"{name} is not called in one forward of {type(within).__name__}: choose another part")
    for key, value in calls[0].constants.items():
        if not isinstance(value, (bool, int, float, str, type(None))):
            raise CalibrationError(
                f"{name} is called with a {type(value).__name__} for {key}; give it tensors and numbers"
            )
    if any(call != calls[0] for call in calls):
        raise CalibrationError(
            f"{name} is called {len(calls)} times in one forward of {type(within).__name__}, with different arguments "
            "besides tensors; choose a part of it, or one that holds it"
        )
    return calls[0], _joined(name, given)


def _joined(name: str, calls: list[Inputs]) -> list[Inputs]:
    """One call on all values where those of each have the same sizes; else the calls, whose maps may differ in size."""
    values = list(zip(*calls, strict=True))
    if all(len({value.shape[1:] for value in each}) == 1 for each in values):
        return [tuple(torch.cat(each) if len(each) > 1 else each[0] for each in values)]
    for each in values:
        if any(value.ndim != 4 for value in each) or len({value.shape[1] for value in each}) > 1:
            shapes = ", ".join(str(tuple(value.shape)) for value in each)
            raise CalibrationError(
                f"{name} is called {len(calls)} times, on {shapes}: its calls can share quantizers where their values "
                "have the same sizes, or are maps (N, C, H, W) that differ in height and width alone; choose a part of "
                "it, or one that holds it"
            )
    return calls


def as_function(model: nn.Module, call: Call, calls: int) -> nn.Module:
    """The module as a function of the tensors of so many calls, which puts out a tuple of what each returned.

    For one call it takes that call's tensors alone, and puts out what the module does. It shares the module's own.
    """
    function, count, is_method = copy.copy(model), len(call.inputs), "forward" not in vars(model)

    def forward(module: nn.Module, *tensors: Tensor) -> Any:
        each = [call.bound(tensors[start : start + count]) for start in range(0, calls * count, count)]
        outputs = tuple(own(module, *bound.args, **bound.kwargs) for bound in each)
        return outputs if calls > 1 else outputs[0]

    def own(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return type(model).forward(module, *args, **kwargs) if is_method else model.forward(*args, **kwargs)

    names = [name if index == 0 else f"{name}_{index}" for index in range(calls) for name in _identifiers(call)]
    kind = inspect.Parameter.POSITIONAL_ONLY
    forward.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in ("module", *names)])  # type: ignore[attr-defined]
    function.forward = types.MethodType(forward, function)  # a copy of the function has the copy's weights
    return function


def _identifiers(call: Call) -> Iterator[str]:
    """The names of a call's tensors as those of parameters: x, maps_0, maps_fine."""
    taken = set[str]()
    for name in call.inputs:
        word = re.sub(r"\W+", "_", name).strip("_")
        while word in taken:
            word += "_"
        taken.add(word)
        yield word


def check_shareable(model: nn.Module, sites: Sequence[Site]) -> None:
    """Raise CalibrationError for products of two computed values, which calls on maps of several sizes cannot share."""
    computed = [site.name for site in sites if site.role not in ("linear", "conv")]
    if computed:
        raise CalibrationError(
            f"{type(model).__name__} is called on maps of several sizes, and multiplies computed values "
            f"({computed[0]}), whose quantizers such calls cannot share; choose a part of it, or one that holds it"
        )


def of_first_call(program: Program, inputs: int) -> Program:
    """The program of one call, from that of several that share all quantizers. inputs: how many a call has."""
    given = program.inputs[:inputs]
    alone = replace(program, inputs=given, output=program.output[0]).pruned()
    named = {node.args[1] for node in alone.nodes if len(node.args) > 1 and isinstance(node.args[1], str)}
    return replace(
        alone,
        quantizers={name: value for name, value in program.quantizers.items() if name in named},
        weights={name: value for name, value in program.weights.items() if name in alone.tensors},
        free={name: dims for name, dims in program.free.items() if name in given},
        rule=None if program.rule is None else _about(program.rule, given),
    )


def _about(rule: Program, inputs: Sequence[str]) -> Program | None:
    """What a rule says of these inputs alone."""
    told = set(inputs)
    for node in rule.nodes:
        if told.issuperset(node.refs()):
            told.add(node.name)
    output = tuple(ref for ref in rule.output if told.issuperset(refs_of(ref)))
    return replace(rule, inputs=tuple(inputs), output=output).pruned() if output else None


def exchange(model: nn.Module, within: nn.Module, replacement: nn.Module) -> None:
    """Put a module in the place of another wherever it stands."""
    for parent in list(within.modules()):
        for name, child in list(parent._modules.items()):
            if child is model:
                parent.register_module(name, replacement)
