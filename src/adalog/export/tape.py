"""Make tapes, which `adalog.run` needs together with an artifact to run it without PyTorch."""

import hashlib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from adalog import artifact, run
from adalog.errors import ArtifactError
from adalog.export.noise import noise_like
from adalog.graph.program import leaves_of
from adalog.runtime import Compiled
from adalog.runtime.native.record import record


def to_tape(path: Path, batch: int = 1) -> bytes:
    """Return the tape of an artifact, which runs images of the calibration's size, `batch` at a time.

    Before it returns, this function runs `batch` + 1 images of noise through `adalog.run`, and checks that the outputs
    have the same bits as one run of all these images by the "native" executor.
    Raises ArtifactError if the model needs PyTorch to run, and ValueError if no kernels run on this machine.
    """
    content = artifact.read(path)
    quantized = artifact.deserialise(content, str(path))
    odd = [value.dtype for value in quantized.example if value.dtype != torch.float32]
    if odd:
        raise ArtifactError(
            f"{path} takes inputs of {odd[0]}, but a tape takes float32 inputs only: quantize the model with float32 "
            "inputs"
        )
    compiled = Compiled(quantized, "native", threads=1)
    try:
        tape = record(compiled.prepare(batch), hashlib.sha256(content).hexdigest(), batch)
    except ArtifactError as cause:
        raise ArtifactError(f"adalog cannot make a tape of {path}: {cause}") from cause
    noise = noise_like(quantized, batch + 1)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "tape"
        file.write_bytes(tape)
        found = run.load(path, tape=file)(*(value.numpy() for value in noise))
    if not all(map(_is_same, leaves_of(found), leaves_of(compiled(*noise)))):
        raise ArtifactError(
            f"adalog cannot make a tape of {path}: the images of a batch change each other's outputs, so run it with "
            "PyTorch instead"
        )
    return tape


def _is_same(found: Any, wanted: Tensor) -> bool:
    return torch.equal(torch.from_numpy(found).nan_to_num(), wanted.nan_to_num())
