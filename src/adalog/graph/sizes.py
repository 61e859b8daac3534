"""Programs that take images of any size: for which sizes the captured operations are those of the model.

`torch.export` follows one path through the model's Python code. Where that code asks for a size ("is the map larger
than a window?"), export notes the answer as a guard, and the program is the model's only where the guard holds. Guards
that rule out some size become the `rule` of the program, so that such a size is refused and never computed wrongly.
Hundreds of others say how PyTorch would lay out values in memory; a program leaves that to each operation.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import sympy
import torch
from sympy.logic import boolalg
from torch.utils._sympy import functions

from adalog.errors import CaptureError
from adalog.graph.operations import resolve
from adalog.graph.program import Node, Program, Ref

_TORCH = Path(torch.__file__).parent
# Sizes at which guards are tried: each dimension from 1 to this one, the others as they were captured.
_SWEEP = 130
# Pairs and so on of sizes that are tried besides, up to twice the captured ones.
_PAIRS = 150

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
    besides the first. Raises CaptureError where a guard is made of operations that no program can hold.
    """
    symbols = {
        shape[dim].node.expr: (name, dim)
        for name, shape in zip(inputs, shapes, strict=True)
        for dim in free.get(name, ())
    }
    sizes = [size for shape in shapes for size in shape if isinstance(size, torch.SymInt)]
    captured = {size.node.expr: int(size.node.hint) for size in sizes}
    batch = {symbol: hint for symbol, hint in captured.items() if symbol not in symbols}
    writer = _Writer(symbols)
    asked = (guard for guard in sizes[0].node.shape_env.guards if _is_asked_by_the_model(guard))
    written = (writer.written(guard.expr.xreplace(batch)) for guard in asked)
    guards = list(dict.fromkeys(guard for guard in written if isinstance(guard, Ref)))
    tried = [writer.values(values) for values in _tried({symbol: captured[symbol] for symbol in symbols})]
    ruled_out = {guard: {index for index, values in enumerate(tried) if not values[guard.name]} for guard in guards}
    chosen = list(_covering(ruled_out, writer.depth))
    if not chosen:
        return None
    return Program(tuple(inputs), tuple(writer.nodes), tuple(chosen), {}).pruned()


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


def _tried(captured: Mapping[sympy.Symbol, int]) -> Iterator[dict[sympy.Symbol, int]]:
    """Sizes by symbol."""
    for symbol in captured:
        for size in range(1, _SWEEP):
            yield {**captured, symbol: size}
    generator = torch.Generator().manual_seed(0)
    for _ in range(_PAIRS):
        yield {
            symbol: int(torch.randint(1, 2 * size + 1, (), generator=generator)) for symbol, size in captured.items()
        }


def _covering(ruled_out: Mapping[Ref, set[int]], depth: Callable[[Ref], int]) -> Iterator[Ref]:
    """A few guards that rule out all that any of them does, simple ones before others."""
    left = set().union(*ruled_out.values())
    while left:
        best = max(ruled_out, key=lambda guard: (len(ruled_out[guard] & left), -depth(guard)))
        left -= ruled_out[best]
        yield best


class _Writer:
    """Sympy's expressions of sizes as operations of a program, each of them once.

    symbols: the input and dimension that each is the size of.
    """

    def __init__(self, symbols: Mapping[sympy.Symbol, tuple[str, int]]):
        self.nodes: list[Node] = []
        self._symbols = symbols
        self._known: dict[Any, Ref | int] = {}
        self._depth: dict[str, int] = {}

    def written(self, expression: Any) -> Ref | int:
        """The value of an expression: a number, or what one of the operations makes."""
        if expression not in self._known:
            self._known[expression] = self._written(expression)
        return self._known[expression]

    def _written(self, expression: Any) -> Ref | int:
        if isinstance(expression, (sympy.Integer, boolalg.BooleanAtom, int)):
            return int(bool(expression)) if isinstance(expression, boolalg.BooleanAtom) else int(expression)
        if expression in self._symbols:
            name, dim = self._symbols[expression]
            return self._add("aten.sym_size.int", Ref(name), dim)
        arguments = expression.args
        if isinstance(expression, (sympy.Gt, sympy.Ge)):
            expression, arguments = expression.reversed, expression.args[::-1]
        if isinstance(expression, sympy.Pow) and isinstance(expression.exp, sympy.Integer) and expression.exp > 0:
            return self._joined("sym.mul", [self.written(expression.base)] * int(expression.exp))
        if isinstance(expression, boolalg.Not):
            return self._add("sym.eq", self.written(arguments[0]), 0)
        for kind, name in _OPERATIONS.items():
            if isinstance(expression, kind):
                return self._joined(f"sym.{name}", [self.written(argument) for argument in arguments])
        raise CaptureError(
            f"the model takes another path for some sizes, by {type(expression).__name__} of a size, which no program "
            "can hold: capture it for one size"
        )

    def _joined(self, op: str, values: Sequence[Ref | int]) -> Ref | int:
        first, *others = values
        for other in others:
            first = self._add(op, first, other)
        return first

    def _add(self, op: str, *arguments: Ref | int) -> Ref:
        self.nodes.append(Node(f"size_{len(self.nodes)}", op, arguments))
        below = (self._depth.get(argument.name, 0) for argument in arguments if isinstance(argument, Ref))
        self._depth[self.nodes[-1].name] = 1 + max(below, default=0)
        return Ref(self.nodes[-1].name)

    def depth(self, value: Ref) -> int:
        return self._depth[value.name]

    def values(self, sizes: Mapping[sympy.Symbol, int]) -> dict[str, int]:
        """The value of every operation for these sizes; one that fails is 0."""
        by_place = {self._symbols[symbol]: size for symbol, size in sizes.items()}
        found: dict[str, int] = {}
        for node in self.nodes:
            if node.op == "aten.sym_size.int":
                found[node.name] = by_place[node.args[0].name, node.args[1]]
                continue
            given = [found[argument.name] if isinstance(argument, Ref) else argument for argument in node.args]
            try:
                found[node.name] = resolve(node.op)(*given)
            except ZeroDivisionError:
                found[node.name] = 0
        return found
