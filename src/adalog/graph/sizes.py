"""Programs that take images of any size: for which sizes the captured operations are those of the model.

`torch.export` follows one path through the model's Python code. Where that code asks for a size ("is the map larger
than a window?"), export notes the answer as a guard, and the program is the model's only where the guard holds. All
such guards that are not true of every size become the `rule` of the program, so that a size at which the model would
have gone another way is refused and never computed wrongly. Hundreds of others say how PyTorch would lay out values in
memory; a program leaves that to each operation.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import sympy
import torch
from sympy.logic import boolalg
from torch.utils._sympy import functions
from torch.utils._sympy.value_ranges import bound_sympy

from adalog.errors import CaptureError
from adalog.graph.program import Node, Program, Ref

_TORCH = Path(torch.__file__).parent
_INEQUALITIES = (sympy.Lt, sympy.Le, sympy.Gt, sympy.Ge)

_OPERATIONS: Mapping[Any, str] = {
    sympy.Add: "add",
    sympy.Mul: "mul",
    functions.FloorDiv: "floordiv",
    functions.CleanDiv: "floordiv",
    functions.Mod: "mod",
    functions.PythonMod: "mod",
    functions.Min: "min",
    functions.Max: "max",
    sympy.Min: "min",
    sympy.Max: "max",
    sympy.Eq: "eq",
    sympy.Ne: "ne",
    sympy.Lt: "lt",
    sympy.Le: "le",
    boolalg.And: "and",
    boolalg.Or: "or",
}


def rule_of(
    inputs: Sequence[str], shapes: Sequence[Sequence[Any]], free: Mapping[str, tuple[int, ...]]
) -> Program | None:
    """What the sizes of inputs must hold: a program whose outputs are to be true; None where all sizes are right.

    shapes: of the inputs as `torch.export` sees them, with symbols. free: the dimensions of inputs that are symbols,
    besides the first, which is the same batch for all inputs. Raises CaptureError where a guard is made of operations
    that no program can hold.
    """
    sizes = {
        (name, dim): size
        for name, shape in zip(inputs, shapes, strict=True)
        for dim, size in enumerate(shape)
        if dim == 0 or dim in free.get(name, ())
    }
    batch = inputs[0]
    places: dict[sympy.Symbol, tuple[str, int]] = {}
    named: dict[Any, sympy.Symbol] = {}  # what export calls a size -> the size by its place, as in "x.shape[2]"
    for (name, dim), size in sizes.items():
        place = (name if dim else batch, dim)
        symbol = sympy.Symbol(f"{place[0]}.shape[{dim}]", integer=True, positive=True)
        places[symbol] = place
        if isinstance(given := _as_given(size), sympy.Symbol):
            named.setdefault(given, symbol)
    # Export goes on with one of two sizes, once it was asked whether they are equal, so all later guards rely on that.
    relied = [sympy.Eq(symbol, _as_known(sizes[place]).xreplace(named)) for symbol, place in places.items()]
    environment = next(size for size in sizes.values() if isinstance(size, torch.SymInt)).node.shape_env
    asked = [guard.expr.xreplace(named) for guard in environment.guards if _is_asked_by_the_model(guard)]
    writer = _Writer(places)
    output = tuple(writer.guard(guard) for guard in _needed([*asked, *relied]))
    return Program(tuple(inputs), tuple(writer.nodes), output, {}).pruned() if output else None


def _as_given(size: Any) -> Any:
    """An input's size as export first called it: a symbol of its own."""
    return sympy.sympify(getattr(size.node, "_expr", size.node.expr) if isinstance(size, torch.SymInt) else size)


def _as_known(size: Any) -> Any:
    """An input's size as export calls it in the end: another size's symbol where the two were found to be equal."""
    return sympy.sympify(size.node.expr if isinstance(size, torch.SymInt) else size)


def _is_asked_by_the_model(guard: Any) -> bool:
    """Whether a guard comes from the code of a model, or from that of PyTorch's modules; not known counts as yes.

    What a model asserts reaches export through export's own code, and so do layouts; only that a size is a multiple of
    a number is told from these, unless it comes from how PyTorch computes the sizes of a result (as of pooling).
    """
    place = getattr(guard.sloc, "framework_loc", None)
    file = Path(getattr(place, "filename", ""))
    if isinstance(guard.expr, sympy.Eq) and isinstance(guard.expr.lhs, (functions.Mod, functions.PythonMod)):
        return file.name != "_meta_registrations.py"
    return not file.is_relative_to(_TORCH) or file.is_relative_to(_TORCH / "nn")


def _needed(guards: Iterable[Any]) -> Iterator[Any]:
    """The guards without those that are true of all sizes, or wherever another of them is.

    Nothing is tried: a guard is left out only where its form shows that no size needs it.
    """
    tightest: dict[Any, tuple[Any, Any]] = {}
    for guard in guards:
        if _is_always_true(guard):
            continue
        subject, bound = _compared(guard)
        if subject not in tightest or bound < tightest[subject][0]:
            tightest[subject] = (bound, guard)
    return (guard for _, guard in tightest.values())


def _is_always_true(guard: Any) -> bool:
    """Whether the ranges of its parts show that a guard holds wherever all sizes are 1 or more."""
    if isinstance(guard, boolalg.BooleanAtom):
        return bool(guard)
    try:
        found = bound_sympy(guard)
    except Exception:  # PyTorch's analysis raises various errors for what it does not know
        return False
    return found.lower == sympy.true


def _compared(guard: Any) -> tuple[Any, Any]:
    """What a guard is about, and its bound: of two guards about the same, that of the smaller bound implies the other.

    An inequality is (rest + constant >= 0) or (rest + constant > 0), and about the rest.
    """
    if isinstance(guard, _INEQUALITIES):
        constant, rest = (guard.gts - guard.lts).as_coeff_Add()
        return (sympy.Ge, rest), (constant, isinstance(guard, (sympy.Le, sympy.Ge)))
    if isinstance(guard, (sympy.Eq, sympy.Ne)):
        return (guard.func, frozenset(guard.args)), (0, False)
    return guard, (0, False)


def _told(expression: Any) -> str:
    """An expression as Python has it, as "x.shape[2] == x.shape[3]"."""
    if isinstance(expression, sympy.Rel):
        return f"{expression.lhs} {expression.rel_op} {expression.rhs}"
    return str(expression)


class _Writer:
    """Sympy's expressions of sizes as operations of a program, each of them once.

    places: the input and dimension that each symbol is the size of.
    """

    def __init__(self, places: Mapping[sympy.Symbol, tuple[str, int]]):
        self.nodes: list[Node] = []
        self._places = places
        self._known: dict[Any, Ref | int] = {}

    def guard(self, guard: Any) -> Ref:
        """The value of a guard, which is true or not. Raises CaptureError where no program can hold it."""
        value = self._value(guard, guard)
        assert isinstance(value, Ref), f"{guard} is never true"
        return value

    def _value(self, expression: Any, guard: Any) -> Ref | int:
        """The value of a part of a guard: a number, or what one of the operations makes."""
        if expression not in self._known:
            self._known[expression] = self._written(expression, guard)
        return self._known[expression]

    def _written(self, expression: Any, guard: Any) -> Ref | int:
        if isinstance(expression, (sympy.Integer, boolalg.BooleanAtom, int)):
            return int(bool(expression)) if isinstance(expression, boolalg.BooleanAtom) else int(expression)
        if expression in self._places:
            name, dim = self._places[expression]
            return self._add("aten.sym_size.int", Ref(name), dim)
        arguments = expression.args
        if isinstance(expression, (sympy.Gt, sympy.Ge)):
            expression, arguments = expression.reversed, expression.args[::-1]
        if isinstance(expression, sympy.Pow) and isinstance(expression.exp, sympy.Integer) and expression.exp > 0:
            return self._joined("sym.mul", [self._value(expression.base, guard)] * int(expression.exp))
        if isinstance(expression, boolalg.Not):
            return self._add("sym.eq", self._value(arguments[0], guard), 0)
        for kind, name in _OPERATIONS.items():
            if isinstance(expression, kind):
                return self._joined(f"sym.{name}", [self._value(argument, guard) for argument in arguments])
        raise CaptureError(
            f"the model takes another path for some sizes, those without {_told(guard)}, where {_told(expression)} is "
            "nothing that a program can hold: capture it for one size"
        )

    def _joined(self, op: str, values: Sequence[Ref | int]) -> Ref | int:
        first, *others = values
        for other in others:
            first = self._add(op, first, other)
        return first

    def _add(self, op: str, *arguments: Ref | int) -> Ref:
        self.nodes.append(Node(f"size_{len(self.nodes)}", op, arguments))
        return Ref(self.nodes[-1].name)
