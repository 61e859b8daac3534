"""Derive the rule that says for which image sizes a captured program computes the same as the model.

`torch.export` follows one code path through the model. When that code asks for a size ("is the map larger than a
window?"), export records the result as a guard, and the program equals the model only if the guard holds. The guards
that are not true for every size become the program's `rule`. Export also records many guards on PyTorch's memory
layouts. This module ignores them, because each operation of a program chooses its own layout.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import Any

import sympy
import torch
from sympy.logic import boolalg
from torch.utils._sympy import functions
from torch.utils._sympy.value_ranges import bound_sympy

from adalog.errors import CaptureError
from adalog.graph.exported import ONE_SIZE
from adalog.graph.program import Node, Program, Ref

_TORCH = Path(torch.__file__).parent
_INEQUALITIES = (sympy.Lt, sympy.Le, sympy.Gt, sympy.Ge)

_OPERATIONS: Mapping[Any, str] = {
    sympy.Add: "add",
    sympy.Mul: "mul",
    sympy.Min: "min",
    sympy.Max: "max",
    sympy.Eq: "eq",
    sympy.Ne: "ne",
    sympy.Lt: "lt",
    sympy.Le: "le",
    sympy.And: "and",
    sympy.Or: "or",
    functions.FloorDiv: "floordiv",
    functions.CleanDiv: "floordiv",
    functions.Mod: "mod",
    functions.PythonMod: "mod",
    functions.Min: "min",
    functions.Max: "max",
}


def rule_of(
    inputs: Sequence[str], shapes: Sequence[Sequence[Any]], free: Mapping[str, tuple[int, ...]]
) -> Program | None:
    """Return a program whose outputs are all true for the allowed sizes, or None if all sizes are allowed.

    shapes: the shapes of the inputs as `torch.export` sees them, with symbols. free: the dimensions of inputs that are
    symbols, besides the first, which is the same batch for all inputs. Raises CaptureError if a guard needs operations
    that a program cannot hold.
    """
    sizes = {
        (name, dim): size
        for name, shape in zip(inputs, shapes, strict=True)
        for dim, size in enumerate(shape)
        if dim == 0 or dim in free.get(name, ())
    }
    batch = inputs[0]
    places: dict[sympy.Symbol, tuple[str, int]] = {}
    symbols: dict[Any, sympy.Symbol] = {}  # export's symbol for a size -> a symbol with a readable name, "x.shape[2]"
    for (name, dim), size in sizes.items():
        place = (name if dim else batch, dim)
        symbol = sympy.Symbol(f"{place[0]}.shape[{dim}]", integer=True, positive=True)
        places[symbol] = place
        if isinstance(size_symbol := _as_exported(size), sympy.Symbol):
            symbols.setdefault(size_symbol, symbol)
    # Once two sizes were found to be equal, export uses one symbol for both, so later guards rely on the equality.
    relied = [sympy.Eq(symbol, _as_known(sizes[place]).xreplace(symbols)) for symbol, place in places.items()]
    environment = next(size for size in sizes.values() if isinstance(size, torch.SymInt)).node.shape_env
    conditions = [guard.expr.xreplace(symbols) for guard in environment.guards if _is_asked_by_the_model(guard)]
    writer = _SizeWriter(places)
    output = tuple(writer.guard(guard) for guard in _needed_guards([*conditions, *relied]))
    return Program(tuple(inputs), tuple(writer.nodes), output, {}).prune() if output else None


def _as_exported(size: Any) -> Any:
    """Return an input's size as export first named it: a symbol of its own."""
    return sympy.sympify(getattr(size.node, "_expr", size.node.expr) if isinstance(size, torch.SymInt) else size)


def _as_known(size: Any) -> Any:
    """Return an input's size as export names it in the end: another size's symbol if the two were found to be equal."""
    return sympy.sympify(size.node.expr if isinstance(size, torch.SymInt) else size)


def _is_asked_by_the_model(guard: Any) -> bool:
    """Return True if a guard comes from the model's code, from PyTorch's modules, or from an unknown place.

    A guard from elsewhere in PyTorch is usually about a memory layout, but a model's assertions arrive from there too.
    So a guard that a size is a multiple of a number also counts, unless it comes from PyTorch's shape functions, such
    as those for pooling.
    """
    file = Path(getattr(getattr(guard.sloc, "framework_loc", None), "filename", ""))
    if isinstance(guard.expr, sympy.Eq) and isinstance(guard.expr.lhs, (functions.Mod, functions.PythonMod)):
        return file.name != "_meta_registrations.py"
    return not file.is_relative_to(_TORCH) or file.is_relative_to(_TORCH / "nn")


def _needed_guards(guards: Iterable[Any]) -> Iterator[Any]:
    """Leave out guards whose form shows that they are true for all sizes, or that another guard implies them."""
    tightest: dict[Any, tuple[Any, Any]] = {}
    for guard in guards:
        if _is_always_true(guard):
            continue
        subject, bound = _bound_of(guard)
        if subject not in tightest or bound < tightest[subject][0]:
            tightest[subject] = (bound, guard)
    return (guard for _, guard in tightest.values())


def _is_always_true(guard: Any) -> bool:
    """Return True if the ranges of a guard's parts show that it holds for all sizes of 1 or more."""
    if isinstance(guard, boolalg.BooleanAtom):
        return bool(guard)
    try:
        bounds = bound_sympy(guard)
    except Exception:  # PyTorch's analysis raises various errors for expressions that it does not know
        return False
    return bounds.lower == sympy.true


def _bound_of(guard: Any) -> tuple[Any, Any]:
    """Return a guard's subject and bound: if two guards have the same subject, the one with the smaller bound suffices.

    An inequality has the form (rest + constant >= 0) or (rest + constant > 0), and its subject is the rest.
    """
    if isinstance(guard, _INEQUALITIES):
        constant, rest = (guard.gts - guard.lts).as_coeff_Add()
        return (sympy.Ge, rest), (constant, isinstance(guard, (sympy.Le, sympy.Ge)))
    if isinstance(guard, (sympy.Eq, sympy.Ne)):
        return (guard.func, frozenset(guard.args)), (0, False)
    return guard, (0, False)


def _in_python(expression: Any) -> str:
    """Return an expression in Python's notation, such as "x.shape[2] == x.shape[3]"."""
    if isinstance(expression, sympy.Rel):
        return f"{expression.lhs} {expression.rel_op} {expression.rhs}"
    return str(expression)


class _SizeWriter:
    """Writer of expressions of sizes as operations, each once. places: the input and dimension of each symbol."""

    def __init__(self, places: Mapping[sympy.Symbol, tuple[str, int]]):
        self.nodes: list[Node] = []
        self._places = places
        self._known: dict[Any, Ref | int] = {}

    def guard(self, guard: Any) -> Ref:
        """Return a reference to the value of a guard, 1 or 0. Raises CaptureError if a program cannot hold it."""
        value = self._value(guard, guard)
        assert isinstance(value, Ref), f"{guard} is never true"
        return value

    def _value(self, expression: Any, guard: Any) -> Ref | int:
        """Return the value of a part of a guard: a number, or a reference to the result of an operation."""
        if expression not in self._known:
            self._known[expression] = self._write(expression, guard)
        return self._known[expression]

    def _write(self, expression: Any, guard: Any) -> Ref | int:
        if isinstance(expression, (sympy.Integer, boolalg.BooleanAtom, int)):
            return int(bool(expression)) if isinstance(expression, boolalg.BooleanAtom) else int(expression)
        if expression in self._places:
            name, dim = self._places[expression]
            return self._add("aten.sym_size.int", Ref(name), dim)
        arguments = expression.args
        if isinstance(expression, (sympy.Gt, sympy.Ge)):
            expression, arguments = expression.reversed, expression.args[::-1]
        if isinstance(expression, sympy.Pow) and isinstance(expression.exp, sympy.Integer) and expression.exp > 0:
            return reduce(partial(self._add, "sym.mul"), [self._value(expression.base, guard)] * int(expression.exp))
        if isinstance(expression, boolalg.Not):
            return self._add("sym.eq", self._value(arguments[0], guard), 0)
        for kind, name in _OPERATIONS.items():
            if isinstance(expression, kind):
                return reduce(partial(self._add, f"sym.{name}"), [self._value(part, guard) for part in arguments])
        raise CaptureError(
            f"the model takes another code path for sizes that do not satisfy {_in_python(guard)}, but adalog cannot "
            f"check this because a program cannot hold {_in_python(expression)}: {ONE_SIZE}"
        )

    def _add(self, op: str, *arguments: Ref | int) -> Ref:
        self.nodes.append(Node(f"size_{len(self.nodes)}", op, arguments))
        return Ref(self.nodes[-1].name)
