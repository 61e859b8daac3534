"""Hold a quantized program: everything that an artifact stores and an executor needs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from adalog.config import Config
from adalog.errors import ArtifactError
from adalog.graph.operations import FAKE_QUANTIZE, FLOAT_PRODUCTS, PRODUCTS
from adalog.graph.program import Program
from adalog.ledger import LedgerRow, error_lines, float_lines, ledger_table

_TAKEN = 1024  # number of accepted shapes to remember, which are not checked again


@dataclass(frozen=True)
class QuantizedProgram:
    """A program whose multiplications have quantized operands, with its choices and its history.

    Args:
        program: The operations, codes and quantizers.
        config: The choices with which it was quantized.
        ledger: One row per site.
        refusals: Each norm that was not folded and each multiplication that stays float, with the reason.
        provenance: The seed, the number and digest of the calibration images, and notes of the caller.
        example: The inputs with zero images, (0, ...) each, which give the shapes and dtypes. Empty if these are
            unknown.
    """

    program: Program
    config: Config
    ledger: tuple[LedgerRow, ...] = ()
    refusals: Mapping[str, str] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    example: tuple[Tensor, ...] = ()
    _known_shapes: set[tuple[tuple[int, ...], ...]] = field(default_factory=set, init=False, repr=False, compare=False)

    def check(self, inputs: Sequence[Any]) -> None:
        """Raise ValueError if the number, shapes or dtypes of the inputs differ from `example`, except for free sizes.

        Raises ProgramError if the program cannot run on them. Accepted shapes are remembered and not checked again.
        The inputs may be on the meta device.
        """
        own = [(shape, example.dtype) for shape, example in zip(self.shapes().values(), self.example, strict=True)]
        fits = len(inputs) == len(own) and all(
            isinstance(value, Tensor)
            and value.ndim == len(shape)
            and all(isinstance(size, str) or size == actual for size, actual in zip(shape, value.shape, strict=True))
            and value.dtype == dtype
            for value, (shape, dtype) in zip(inputs, own, strict=True)
        )
        if not fits:
            expected = [f"({', '.join(map(str, shape))}) of {dtype}" for shape, dtype in own]
            actual = [
                f"{tuple(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
                for value in inputs
            ]
            types = [
                dtype
                for value, (_, dtype) in zip(inputs, own, strict=False)
                if isinstance(value, Tensor) and value.dtype != dtype
                if value.is_floating_point() and dtype.is_floating_point
            ]
            way_out = f": convert the input with .to({types[0]})" if types else ""
            raise ValueError(
                f"the model takes {' and '.join(expected)}; got {' and '.join(actual) or 'nothing'}{way_out}"
            )
        if torch.compiler.is_compiling():  # the compiler finds out itself whether the operations take the inputs
            return
        shapes = tuple(tuple(value.shape) for value in inputs)
        if shapes not in self._known_shapes:
            self.program.check(inputs)
            if len(self._known_shapes) >= _TAKEN:
                self._known_shapes.pop()
            self._known_shapes.add(shapes)

    def shapes(self) -> dict[str, list[int | str]]:
        """Return the shape of each input by name, with a letter for each free size, as in ["B", 3, "H", "W"]."""
        shapes_of: dict[str, list[int | str]] = {}
        for name, value in zip(self.program.inputs, self.example, strict=True):
            shapes_of[name] = ["B", *value.shape[1:]]
            for dim, letter in zip(self.program.free.get(name, ()), "HW", strict=False):
                shapes_of[name][dim] = letter
        return shapes_of

    def zeros(self, count: int, device: str | None = None) -> tuple[Tensor, ...]:
        """Return inputs of zeros for so many images, on this device or on the device of `example`.

        Raises ArtifactError if `example` is empty.
        """
        if not self.example:
            raise ArtifactError("the model was made without images, so its input shapes are unknown: set its `example`")
        return tuple(value.new_zeros((count, *value.shape[1:]), device=device) for value in self.example)

    def noise(self, count: int) -> tuple[Tensor, ...]:
        """Return inputs for so many images: floats are the same normal noise in each call, other dtypes zeros."""
        generator = torch.Generator().manual_seed(0)
        return tuple(
            torch.randn(value.shape, generator=generator, dtype=value.dtype) if value.is_floating_point() else value
            for value in self.zeros(count)
        )

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> "QuantizedProgram":
        """Return the program with a function, such as a move or a cast, applied to every tensor; codes stay uint8."""
        example = tuple(function(value) if value.is_floating_point() else value for value in self.example)
        copy = replace(self, program=self.program.map_tensors(function), example=example)
        copy._known_shapes.update(self._known_shapes)  # the function changes no shapes
        return copy

    def float_sites(self) -> list[str]:
        """List the multiplications with an operand that is neither fake-quantized nor a stored weight."""
        quantized = {node.name for node in self.program.nodes if node.op == FAKE_QUANTIZE} | set(self.program.weights)
        sites = [node for node in self.program.nodes if node.op in PRODUCTS or node.op in FLOAT_PRODUCTS]
        return [node.scope or node.name for node in sites if not {arg.name for arg in node.args[:2]} <= quantized]

    def summary(self) -> str:
        """Return the ledger as text: one row per site, what stays float and why, and the error of the output."""
        lines = ledger_table(self.ledger)
        bits = f"bits {self.config.bits}{', except at sites with pinned bits' if self.config.pinned else ''}"
        lines.append(f"{bits}; {len(self.ledger)} sites, {len(self.float_sites())} of them float")
        lines += [f"height and width of {name} are free" for name in self.program.free]
        lines += float_lines(self.refusals, self.program.float_operations())
        lines += error_lines(self.provenance.get("output_error"))
        return "\n".join(line.rstrip() for line in lines)
