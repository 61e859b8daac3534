"""The quantized model: it runs, tells what it is, and is saved."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from adalog.config import Config
from adalog.graph.program import FAKE_QUANTIZE, FLOAT_PRODUCTS, PRODUCTS, Program
from adalog.graph.submodule import Call

if TYPE_CHECKING:
    from adalog.runtime import Compiled


@dataclass(frozen=True)
class LedgerRow:
    """One site: role, where its left operand comes from, both quantizers, and its output's SQNR [dB] in calibration.

    Linears of one activation (separate q, k, v) are searched as one, and have one SQNR.
    """

    site: str
    role: str
    source: str
    left: str
    right: str
    sqnr: float


class QuantizedModel(nn.Module):
    """A model whose multiplications have quantized operands. Same inputs and outputs as the original.

    program: the operations, codes and quantizers. config: the choices. ledger: one row a site. refusals: LayerNorms
    that were not folded and multiplications that stay float, and why. provenance: seed, number and digest of the
    calibration images. example: the inputs with no images in them, (0, ...) each, which tell shapes and types; none if
    it is not known. The tensors live in the program: `parameters()` and `state_dict()` are empty, and `.to` and
    `.double` work. call: how the module was called whose place this one takes; a file does not hold it.
    """

    call: Call | None = None

    def __init__(
        self,
        program: Program,
        config: Config,
        ledger: Sequence[LedgerRow],
        refusals: Mapping[str, str],
        *,
        seed: int = 0,
        images: Sequence[Tensor] = (),
        provenance: Mapping[str, Any] | None = None,
        example: Sequence[Tensor] = (),
    ):
        super().__init__()
        self.program = program
        self.config = config
        self.ledger = list(ledger)
        self.refusals = dict(refusals)
        if provenance is None:
            provenance = {"seed": seed, "calibration": digest(images), "images": len(images[0]) if images else 0}
        self.provenance = dict(provenance)
        self.example = tuple(value[:0] for value in images) if images else tuple(example)
        self._checked: set[tuple[int, ...]] = set()  # the batch sizes that the program is known to take
        self.eval()

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The original model's positional inputs, (B, ...) each, and its outputs in its structure.

        In the place of a module (`call`) it takes that module's arguments, and returns its classes.
        Raises ValueError for inputs of another number, shape or type, and ProgramError where the program cannot run.
        """
        if self.call is not None:
            return self.call.output_of(self.program.run(self.call.tensors(inputs, named)))
        if named:
            raise TypeError(f"the model takes its inputs by position, got {', '.join(named)} by name")
        if self.example:
            self.check(inputs)
        return self.program.run(inputs)

    def check(self, inputs: Sequence[Tensor]) -> None:
        """Raises as `forward` does for inputs, which may be on the meta device, that the model does not take."""
        wanted = [f"(B, {', '.join(map(str, value.shape[1:]))}) of {value.dtype}" for value in self.example]
        fits = len(inputs) == len(self.example) and all(
            isinstance(value, Tensor)
            and value.ndim == example.ndim
            and value.shape[1:] == example.shape[1:]
            and value.dtype == example.dtype
            for value, example in zip(inputs, self.example, strict=True)
        )
        if not fits:
            got = [
                f"{tuple(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
                for value in inputs
            ]
            raise ValueError(f"the model takes {' and '.join(wanted)}; got {' and '.join(got) or 'nothing'}")
        batches = tuple(len(value) for value in inputs)
        if batches not in self._checked:
            self.program.check(inputs)
            self._checked.add(batches)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "QuantizedModel":
        """What `.to`, `.double` and the like do: to every tensor of the program; codes stay uint8."""
        self.program = self.program.map_tensors(fn)
        self.example = tuple(fn(value) if value.is_floating_point() else value for value in self.example)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def compile(self, executor: str = "torch", **choices: Any) -> "Compiled":  # type: ignore[override]
        """This model run in integers, by the executor "reference", "torch" or "native": see `runtime.Compiled`."""
        from adalog.runtime import Compiled

        return Compiled(self, executor, **choices)

    def float_sites(self) -> list[str]:
        """Multiplications with an operand that is neither fake-quantized nor a stored weight; `refusals` says why."""
        quantized = {node.name for node in self.program.nodes if node.op == FAKE_QUANTIZE} | set(self.program.weights)
        sites = [node for node in self.program.nodes if node.op in PRODUCTS or node.op in FLOAT_PRODUCTS]
        return [node.scope or node.name for node in sites if not {arg.name for arg in node.args[:2]} <= quantized]

    def float_operations(self) -> dict[str, int]:
        """How many of each operation run in float32: what is not a multiplication."""
        return self.program.float_operations()

    def summary(self) -> str:
        """The ledger as text: one row a site, then what stays float and why."""
        header = ("site", "role", "source", "left", "right", "SQNR [dB]")
        rows = [(row.site, row.role, row.source, row.left, row.right, f"{row.sqnr:.1f}") for row in self.ledger]
        widths = [max(len(line[i]) for line in [header, *rows]) for i in range(len(header))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in [header, *rows]
        ]
        count = len(self.float_sites())
        lines.append(f"bits {self.config.bits}; {len(rows)} sites, {count} of them float")
        lines += float_lines(self.refusals, self.float_operations())
        return "\n".join(line.rstrip() for line in lines)

    def save(self, path: str | Path) -> int:
        """Write the artifact, whole or not at all; returns its size [bytes]."""
        from adalog.artifact import write

        return write(self, Path(path))

    def ledger_json(self) -> list[dict[str, Any]]:
        return [asdict(row) for row in self.ledger]


def float_lines(refusals: Mapping[str, str], operations: Mapping[str, int]) -> list[str]:
    """What stays float and why, a line each. refusals: as of a model; operations: how many of each run in float32."""
    told = ((name, *why.partition(": ")) for name, why in refusals.items())
    kept = ", ".join(f"{name} x {count}" for name, count in sorted(operations.items()))
    return [
        *(f"{what}: {name}: {why}" for name, what, _, why in told),
        f"in float32, since they multiply no two stored or computed tensors: {kept}",
    ]


def digest(images: Sequence[Tensor]) -> str:
    """A short fingerprint of the calibration images, of every input together."""
    if not images:
        return ""
    content = hashlib.sha256()
    for value in images:
        content.update(value.detach().cpu().contiguous().to(torch.float32).reshape(-1).numpy().data)
    return content.hexdigest()[:16]
