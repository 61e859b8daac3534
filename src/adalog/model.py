"""Call, summarise, save and load a quantized model."""

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
from adalog.graph.program import Program, map_leaves
from adalog.graph.submodule import ModuleCall
from adalog.ledger import LedgerRow, ledger_json
from adalog.quantized import QuantizedProgram
from adalog.runtime import Compiled, Executor


class QuantizedModel(nn.Module):
    """A model whose multiplications have quantized operands, with the inputs and outputs of the original model.

    Calling it computes by fake quantization in float32. `compile` returns a model that computes the products in
    integers. The tensors belong to `program`: `parameters()` is empty, but `.to` and `.double` work. `state_dict()`
    holds the artifact as one tensor of bytes, which `load_state_dict` restores exactly. `adalog.quantize` and
    `adalog.load` return models of this class.

    Args:
        quantized: The quantized program to run.

    Attributes:
        quantized: The quantized program.
        call: How the replaced module was called, if this model takes the place of a part of another model (argument
            `within` of `adalog.quantize`); otherwise None. Files do not store it.

    Examples:
        >>> images = adalog.demo.calibration_images()
        >>> qmodel = adalog.quantize(adalog.demo.load_model(), images)
        >>> qmodel(images).shape, qmodel.config.bits, len(qmodel.ledger), qmodel.float_sites()
        (torch.Size([64, 10]), 'w4a4', 40, [])
    """

    call: ModuleCall | None = None

    def __init__(self, quantized: QuantizedProgram):
        super().__init__()
        self.quantized = quantized
        self.eval()

    @property
    def program(self) -> Program:
        """The operations, codes and quantizers."""
        return self.quantized.program

    @property
    def config(self) -> Config:
        """The choices with which the model was quantized."""
        return self.quantized.config

    @property
    def ledger(self) -> list[LedgerRow]:
        """One row per site: its role, both quantizers, and the SQNR [dB] of its output on the calibration images."""
        return list(self.quantized.ledger)

    @property
    def refusals(self) -> Mapping[str, str]:
        """The reasons by name: why a norm was not folded, or why a multiplication stays float."""
        return self.quantized.refusals

    @property
    def provenance(self) -> Mapping[str, Any]:
        """The seed, the number and digest of the calibration images, and the entries that `note` added."""
        return self.quantized.provenance

    @property
    def example(self) -> tuple[Tensor, ...]:
        """The inputs with zero images, (0, ...) each, which give the shapes and dtypes; empty if unknown."""
        return self.quantized.example

    def note(self, **entries: Any) -> None:
        """Add entries to the provenance, which `save` stores. An entry replaces one of the same name.

        Args:
            **entries: Values that JSON can hold, by name. The command line notes `preprocessing`, for example.

        Examples:
            >>> qmodel.note(trained_on="CIFAR-10")
        """
        self.quantized = replace(self.quantized, provenance={**self.provenance, **entries})

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Compute the outputs by fake quantization, in float32.

        A model that takes the place of a module in another model (`call`) takes the arguments of that module instead,
        and returns the same classes. If that model is in half precision, the inputs and outputs are too.

        `torch.compile` traces the model as one graph. Its code computes float32 products and convolutions with the
        settings of PyTorch; without it, adalog switches TF32 off.

        Args:
            *inputs: The positional inputs of the original model, (B, ...) each; in float32 if that model is in half
                precision.
            **named: Keyword arguments, only for a model that takes the place of a module.

        Returns:
            The outputs of the original model, in the same structure of tuples, lists and dicts.

        Raises:
            ValueError: If the number, shapes or dtypes of the inputs are not those of the original model.
            ProgramError: If the program cannot run on these inputs.
            TypeError: If an input is given by name, but the model does not take the place of a module.
        """
        if torch.compiler.is_compiling():
            self._prepare_to_compile()  # all quantizers compute their tables, which they keep
        if self.call is not None:
            return self.call.output_of(self._in_own_type(self.call.tensors(inputs, named)))
        if named:
            raise TypeError(f"the model takes its inputs by position, got {', '.join(named)} by name")
        if self.example:
            self.quantized.check(inputs)
        return self.program.run(inputs)

    def _prepare_to_compile(self) -> None:
        for quantizer in self.program.quantizers.values():
            quantizer.tables()

    def _in_own_type(self, tensors: Sequence[Tensor]) -> Any:
        """Run the program in float32 and return the output in half precision if an input is."""
        halves = [value.dtype for value in tensors if value.dtype in (torch.float16, torch.bfloat16)]
        if not halves or any(value.dtype in halves for value in self.program.tensors.values()):
            return self.program.run(tensors)
        output = self.program.run([x.float() if x.dtype in halves else x for x in tensors])
        return map_leaves(output, Tensor, lambda x: x.to(halves[0]) if x.is_floating_point() else x)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "QuantizedModel":
        """Apply `.to`, `.double` and the like to every tensor of the program; codes stay uint8."""
        self.quantized = self.quantized.map_tensors(fn)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def get_extra_state(self) -> Tensor:
        """Return the bytes of the artifact, which `state_dict` holds under the key `_extra_state`.

        Returns:
            The bytes that `save` writes, uint8, (bytes,).

        Raises:
            ArtifactError: If the model cannot be stored.
        """
        return torch.frombuffer(bytearray(artifact.serialise(self.quantized)), dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Restore the model from the bytes that `state_dict` holds; `load_state_dict` calls it.

        Args:
            state: The bytes of an artifact with the inputs and sites of this model, uint8, (bytes,). Bits and
                quantizers may differ.

        Raises:
            ArtifactError: If the bytes are not a valid artifact, or if it is the artifact of another model.
        """
        if not isinstance(state, Tensor) or state.dtype != torch.uint8 or state.ndim != 1:
            raise ArtifactError("_extra_state does not hold the bytes of an artifact: load what state_dict() returned")
        loaded = artifact.deserialise(state.cpu().numpy().tobytes(), "_extra_state of the state dict")
        own, other = ([(row.site, row.role) for row in quantized.ledger] for quantized in (self.quantized, loaded))
        tensors, others = self.program.tensors, loaded.program.tensors
        shared = tensors.keys() & others.keys()
        same = all(tensors[name].shape == others[name].shape for name in shared)
        if own != other or not same or self.quantized.shapes() != loaded.shapes():
            raise ArtifactError(
                f"the state dict holds another model, with {len(other)} sites instead of {len(own)} or with other "
                "names or shapes: load it into that model, or save the model as a file with save and use adalog.load"
            )
        like = next((value for value in self.program.tensors.values() if value.is_floating_point()), torch.zeros(()))
        # This model may have become `.double()`.
        cast = any(tensors[name].dtype != others[name].dtype for name in shared)
        self.quantized = loaded.map_tensors(
            lambda value: value.to(like if cast and value.is_floating_point() else like.device)
        )

    def compile(self, executor: str = "torch", **choices: Any) -> Compiled:  # type: ignore[override]
        """Return a model that computes the products in integers.

        Its predictions agree with those of this model up to rounding noise.

        Args:
            executor: "reference" (simple and slow), "torch" (PyTorch operations) or "native" (compiled kernels).
            **choices: For "native" only: `threads`, the number of threads (default: as many as PyTorch uses);
                `batch`, a batch size to prepare for; `level`, the kernels to use, one of
                `adalog.library.LEVELS` (default: the fastest that run on this machine).

        Returns:
            A module with the inputs and outputs of this model. Operations other than products run in float.

        Raises:
            ArtifactError: If the model cannot run in integers, for example because its levels are in float.
            ValueError: If the executor does not run on this machine, or if a choice is invalid.

        Examples:
            >>> integers = qmodel.compile("torch")
            >>> integers(images).argmax(1).eq(qmodel(images).argmax(1)).all()
            tensor(True)
        """
        return Compiled(self.quantized, executor, **choices)

    def float_sites(self) -> list[str]:
        """List the multiplications that stay float; `refusals` has the reasons.

        Returns:
            The names of the sites with an operand that is neither fake-quantized nor a stored weight.
        """
        return self.quantized.float_sites()

    def float_operations(self) -> dict[str, int]:
        """Count the operations that run in float32: everything that is not a multiplication.

        Returns:
            The number of operations by the name of the operation.
        """
        return self.program.float_operations()

    def summary(self) -> str:
        """Return the ledger as text.

        Returns:
            A header, one row per site, and then what stays float and why.

        Examples:
            >>> print(qmodel.summary())
            site                role    source      left                    right                SQNR [dB]
            patch_embed.conv1   conv    input       8-bit uniform           4-bit uniform x 48   22.9
            ...
        """
        return self.quantized.summary()

    def ledger_json(self) -> list[dict[str, Any]]:
        """Return the ledger as JSON.

        Returns:
            One object per site, with the fields of `ledger`.
        """
        return ledger_json(self.ledger)

    def save(self, path: str | Path) -> int:
        """Write the artifact: one safetensors file with the program, its codes and its scales.

        The same model gives the same bytes. The file is written atomically: either all of it or nothing.

        Args:
            path: The file to write. Its folder is made if it does not exist.

        Returns:
            The size of the file [bytes].

        Raises:
            ArtifactError: If the model cannot be stored, for example because a note is not JSON.
            ProgramError: If the program cannot run.
            DataError: If the path cannot be written.
            OSError: If the disk is full or fails.

        Examples:
            >>> size = qmodel.save("vit.w4a4.safetensors")
        """
        return artifact.write(self.quantized, Path(path))

    def save_pretrained(
        self, folder: str | Path, *, classes: Sequence[str] = (), figures: Mapping[str, str] | None = None
    ) -> None:
        """Write a folder for the Hugging Face Hub: the artifact, files for transformers, and a model card.

        Args:
            folder: The folder to write. It is created if it does not exist.
            classes: Names of the classes, in the order of the logits. Default: LABEL_0, LABEL_1 and so on for a
                classifier, and none for a model that returns boxes, maps or features.
            figures: Measured results for the model card, by name, such as `{"top-1": "81 %"}`.

        Raises:
            DataError: If the folder cannot be written.
            ArtifactError: If the noted `preprocessing` of the model is not valid.
            ValueError: If `classes` does not have one distinct name per logit.

        Examples:
            >>> qmodel.save_pretrained("small-vit", figures={"top-1 on my test set": "81 %"})
        """
        hub.save(self.quantized, Path(folder), classes, figures)

    def push_to_hub(
        self,
        repository: str,
        *,
        private: bool = False,
        classes: Sequence[str] = (),
        figures: Mapping[str, str] | None = None,
    ) -> str:
        """Upload the folder that `save_pretrained` writes to the Hugging Face Hub. Needs `adalog[hf]`.

        Args:
            repository: The repository, as OWNER/NAME. It is created if it does not exist.
            private: Make a new repository private.
            classes: As in `save_pretrained`.
            figures: As in `save_pretrained`.

        Returns:
            The address of the repository.

        Raises:
            AdalogError: If the upload fails, or if huggingface_hub is not installed.
            ValueError: If `classes` does not have one distinct name per logit.
        """
        with TemporaryDirectory() as folder:
            self.save_pretrained(folder, classes=classes, figures=figures)
            return hub.push(self.quantized, repository, Path(folder), private=private)


def load(path: str | Path, *, revision: str | None = None) -> QuantizedModel:
    """Load a saved model. The code of the original model is not needed, and nothing in the file is executed.

    Args:
        path: A file that `QuantizedModel.save` wrote, a folder that `QuantizedModel.save_pretrained` wrote, or
            hf:OWNER/NAME for a repository of the Hugging Face Hub, which is downloaded if it is not in the cache.
        revision: A branch, tag or commit of the repository. Only for hf:OWNER/NAME.

    Returns:
        The model, in evaluation mode on the CPU.

    Raises:
        ArtifactError: If the file is not a complete and valid artifact, or if it cannot be read or downloaded.
        ValueError: If `revision` is given for a file or a folder.

    Examples:
        >>> qmodel = adalog.load("vit.w4a4.safetensors")
        >>> logits = qmodel(images)  # (B, 3, H, W), normalised as the original model expects
    """
    file = hub.locate(str(path), revision)
    return QuantizedModel(artifact.deserialise(artifact.read(file), str(path)))


def quickest(model: QuantizedModel, threads: int) -> tuple[nn.Module, Executor | None, int]:
    """Return the fastest way to run the model here: a callable, its executor, and the number of parallel calls.

    If the executor "native" takes the model, it uses `threads` threads itself in one call at a time. Otherwise this is
    the model itself, without an executor and with one call per thread.
    """
    if library.levels():
        with contextlib.suppress(ArtifactError):
            return model.compile("native", threads=threads), "native", 1
    return model, None, threads


# `torch.compile` calls this method when it traces the model. Setting the attribute is what
# `torch.compiler.assume_constant_result` does, without importing the compiler.
QuantizedModel._prepare_to_compile._dynamo_marked_constant = True  # type: ignore[attr-defined]
