"""The quantized model: calling it, its summary, saving and loading."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from adalog import artifact, hub, library
from adalog.config import Config
from adalog.errors import ArtifactError
from adalog.graph.program import Program
from adalog.graph.submodule import Call
from adalog.ledger import LedgerRow, ledger_json
from adalog.quantized import QuantizedProgram
from adalog.runtime import Compiled, Executor


class QuantizedModel(nn.Module):
    """A model whose multiplications have quantized operands; its inputs and outputs are those of the original.

    It wraps a `QuantizedProgram`, whose fields are its properties. The tensors live in the program: `parameters()` and
    `state_dict()` are empty, and `.to` and `.double` work. call: how the module that this one replaces was called; a
    file does not hold it.
    """

    call: Call | None = None

    def __init__(self, quantized: QuantizedProgram):
        super().__init__()
        self.quantized = quantized
        self.eval()

    @property
    def program(self) -> Program:
        return self.quantized.program

    @property
    def config(self) -> Config:
        return self.quantized.config

    @property
    def ledger(self) -> list[LedgerRow]:
        return list(self.quantized.ledger)

    @property
    def refusals(self) -> Mapping[str, str]:
        return self.quantized.refusals

    @property
    def provenance(self) -> Mapping[str, Any]:
        return self.quantized.provenance

    @property
    def example(self) -> tuple[Tensor, ...]:
        return self.quantized.example

    def note(self, **entries: Any) -> None:
        """Add these entries to the provenance, or replace those of the same name."""
        self.quantized = replace(self.quantized, provenance={**self.provenance, **entries})

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The outputs of the original model, in their structure, for its positional inputs, (B, ...) each.

        A model that replaces a module (`call`) takes the arguments of that module, and returns its classes; in a model
        of half precision it takes and returns such values, and computes in float32.
        Raises ValueError for inputs of another number, shape or dtype, and ProgramError where the program cannot run.
        """
        if self.call is not None:
            return self.call.output_of(self._in_own_type(self.call.tensors(inputs, named)))
        if named:
            raise TypeError(f"the model takes its inputs by position, got {', '.join(named)} by name")
        if self.example:
            self.quantized.check(inputs)
        return self.program.run(inputs)

    def _in_own_type(self, given: Sequence[Tensor]) -> Any:
        """The program's output for inputs that may be in half precision, in which it then is too."""
        halves = [value.dtype for value in given if value.dtype in (torch.float16, torch.bfloat16)]
        if not halves or any(value.dtype in halves for value in self.program.tensors.values()):
            return self.program.run(given)
        return _halved(self.program.run([x.float() if x.dtype in halves else x for x in given]), halves[0])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "QuantizedModel":
        """Apply `.to`, `.double` and the like to every tensor of the program; codes stay uint8."""
        self.quantized = self.quantized.map_tensors(fn)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def compile(self, executor: str = "torch", **choices: Any) -> Compiled:  # type: ignore[override]
        """This model, run in integers by the executor "reference", "torch" or "native": see `runtime.Compiled`."""
        return Compiled(self.quantized, executor, **choices)

    def float_sites(self) -> list[str]:
        """Multiplications with an operand that is neither fake-quantized nor a stored weight; `refusals` says why."""
        return self.quantized.float_sites()

    def float_operations(self) -> dict[str, int]:
        """How many of each operation run in float32: everything that is not a multiplication."""
        return self.quantized.float_operations()

    def summary(self) -> str:
        """The ledger as text: one row per site, then what stays float and why."""
        return self.quantized.summary()

    def ledger_json(self) -> list[dict[str, Any]]:
        """The ledger as JSON."""
        return ledger_json(self.ledger)

    def save(self, path: str | Path) -> int:
        """Write the artifact, whole or not at all; returns its size [bytes]."""
        return artifact.write(self.quantized, Path(path))

    def save_pretrained(
        self, folder: str | Path, *, classes: Sequence[str] = (), figures: Mapping[str, str] | None = None
    ) -> None:
        """Write a folder as the Hub holds it: the artifact, what transformers asks for, and a model card (`hub.save`).

        classes: names of the classes, in the order of the logits. figures: what was measured, by name, for the card.
        """
        hub.save(self.quantized, Path(folder), classes=classes, figures=figures)

    def push_to_hub(
        self,
        repository: str,
        *,
        private: bool = False,
        classes: Sequence[str] = (),
        figures: Mapping[str, str] | None = None,
    ) -> str:
        """Upload what `save_pretrained` writes to OWNER/NAME of the Hub; returns its address. Needs `adalog[hf]`."""
        with TemporaryDirectory() as folder:
            self.save_pretrained(folder, classes=classes, figures=figures)
            return hub.push(self.quantized, repository, Path(folder), private=private)


def load(path: str | Path, *, revision: str | None = None) -> QuantizedModel:
    """A saved model, for which this package and the file are enough.

    path: a file, a folder that `save_pretrained` wrote, or hf:OWNER/NAME, a repository of the Hub of which `revision`
    may name a branch, tag or commit. Raises ArtifactError for what is not an artifact, or cannot be had.
    """
    file = hub.locate(str(path), revision)
    return QuantizedModel(artifact.deserialise(artifact.read(file), str(path)))


def quickest(model: QuantizedModel, threads: int) -> tuple[nn.Module, Executor | None, int]:
    """The fastest way to run this model here: a callable, its executor, and how many calls to make at once.

    That is the executor "native", which uses `threads` threads itself; or the model itself, with no executor and one
    call per thread, where "native" does not take it.
    """
    if library.levels():
        with contextlib.suppress(ArtifactError):
            return model.compile("native", threads=threads), "native", 1
    return model, None, threads


def _halved(value: Any, dtype: torch.dtype) -> Any:
    """An output with its floating tensors in half precision."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return type(value)((key, _halved(each, dtype)) for key, each in value.items())
    return type(value)(_halved(each, dtype) for each in value) if isinstance(value, (tuple, list)) else value
