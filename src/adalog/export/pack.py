"""Make packs: an artifact, its tapes and a description in one file, for `adalog.run` and the C library."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load as parse_safetensors
from safetensors.torch import save as to_safetensors

from adalog import artifact, run, version
from adalog.errors import ArtifactError
from adalog.graph.program import leaves_of
from adalog.runtime import Compiled
from adalog.runtime.native.record import CONSTANTS, record
from adalog.stored import MAX_JSON, check_text

FORMAT = 1
MAX_BATCH = 2**16  # limit on the images of a tape


def to_pack(
    path: Path,
    batches: Sequence[int] = (1, 8),
    preprocessing: Mapping[str, Any] | None = None,
    classes: Sequence[str] | None = None,
) -> bytes:
    """Return the pack of an artifact, with a tape for each batch size. Images have the size of the calibration's.

    preprocessing: the fields of an `adalog.Preprocessing`, or None. classes: the name of each class, or None.
    Before it returns, this function runs noise through the pack, and checks that each tape gives the bits of the
    executor "native" on all these images at once.
    Raises ArtifactError if the model needs PyTorch to run, and ValueError if no kernels run on this machine or if the
    names do not fit the outputs.
    """
    content = artifact.read(path)
    quantized = artifact.deserialise(content, str(path))
    dtypes = [value.dtype for value in quantized.example if value.dtype != torch.float32]
    if dtypes:
        raise ArtifactError(
            f"{path} takes inputs of {dtypes[0]}, but a pack takes float32 inputs only: quantize the model with "
            "float32 inputs"
        )
    digest, tensors, tapes = hashlib.sha256(content).hexdigest(), parse_safetensors(content), []
    batches = sorted(set(batches))
    try:
        compiled = Compiled(quantized, "native", threads=1)
        for batch in batches:
            tape, tensors[f"{CONSTANTS}/{batch}"] = record(compiled.prepare(batch), digest, batch)
            tapes.append(tape)
    except ArtifactError as cause:
        raise ArtifactError(f"adalog cannot pack {path}: {cause}") from cause
    outputs = list(_describe(tapes[0]["output"]))
    shapes = [output["shape"] for output in outputs]
    if classes is not None and shapes != [[len(classes)]]:
        text = " and ".join(str(tuple(shape)) for shape in shapes)
        raise ValueError(
            f"there are {len(classes)} names of classes, but the model outputs {text} per image: give one name for "
            "each number of the only output, or none if there are several outputs"
        )
    fields = {
        "format": FORMAT,
        "version": version.__version__,
        "digest": digest,
        "bits": quantized.config.bits,
        "inputs": [_description(name, "float32", shape) for name, shape in tapes[0]["inputs"]],
        "outputs": outputs,
        "preprocessing": None if preprocessing is None else dict(preprocessing),
        "classes": None if classes is None else list(classes),
        "artifact": artifact.read_header(content, str(path)),
        "tapes": tapes,
    }
    check_text(fields)
    text = json.dumps(fields, separators=(",", ":"), allow_nan=False)
    if len(text) > MAX_JSON:
        raise ArtifactError(
            f"{path} and its tapes have {len(text)} bytes of JSON, more than {MAX_JSON}: choose fewer batch sizes"
        )
    packed: bytes = to_safetensors(tensors, {run.KEY: text})
    noise = quantized.noise(sum(batches) + 1)  # every tape runs, and so does one with missing images
    with TemporaryDirectory() as folder:
        file = Path(folder) / "pack"
        file.write_bytes(packed)
        results = run.load(file, memory=2**62)(*(value.numpy() for value in noise))
    pairs = zip(leaves_of(results), leaves_of(compiled(*noise)), strict=True)
    if not all(torch.equal(torch.from_numpy(found).nan_to_num(), output.nan_to_num()) for found, output in pairs):
        raise ArtifactError(
            f"adalog cannot pack {path}: the images of a batch change each other's outputs, so run it with PyTorch "
            "instead"
        )
    return packed


def _describe(structure: Any, path: str = "") -> Iterator[dict[str, Any]]:
    """Describe the outputs in a tape's structure of outputs; keys and numbers with dots between them name them."""
    kind = next(iter(structure)) if len(structure) == 1 else None
    if kind is None:
        yield _description(path or "output", structure["type"], structure["shape"])
        return
    for key, item in structure[kind] if kind == "dict" else enumerate(structure[kind]):
        yield from _describe(item, f"{path}.{key}" if path else str(key))


def _description(name: str, dtype: str, shape: Sequence[int]) -> dict[str, Any]:
    """Describe an input or an output. shape: with the batch first, which the description leaves out."""
    return {"name": name, "type": dtype, "shape": list(shape[1:])}
