"""Make packs: an artifact, its tapes and a description in one file, for `adalog.run` and the C library."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.torch import load as parse_safetensors
from safetensors.torch import save as to_safetensors

from adalog import artifact, run, version
from adalog.errors import ArtifactError
from adalog.export.noise import noise_like
from adalog.export.tape import to_tape
from adalog.graph.program import leaves_of
from adalog.run import pack
from adalog.run import tape as tapes
from adalog.stored import MAX_JSON, check_text


def to_pack(
    path: Path,
    batches: Sequence[int] = (1, 8),
    preprocessing: Mapping[str, Any] | None = None,
    classes: Sequence[str] | None = None,
) -> bytes:
    """Return the pack of an artifact, with a tape for each batch size.

    preprocessing: the fields of an `adalog.Preprocessing`, or None. classes: the name of each class, or None.
    Before it returns, this function runs noise through the pack, and checks that all tapes give the same bits.
    Raises ArtifactError if the model needs PyTorch to run, and ValueError if no kernels run on this machine or if the
    names do not fit the outputs.
    """
    content = artifact.read(path)
    quantized = artifact.deserialise(content, str(path))
    tensors = parse_safetensors(content)
    recordings = []
    batches = sorted(set(batches))
    with TemporaryDirectory() as folder:
        file = Path(folder) / "tape"
        for batch in batches:
            tape = to_tape(path, batch)
            file.write_bytes(tape)
            with safe_open(file, "pt") as opened:
                recordings.append(tapes.parse(opened.metadata()[tapes.KEY]))
            tensors[pack.constants_of(batch)] = parse_safetensors(tape)[tapes.CONSTANTS]
        model = run.load(path, tape=file)
        description = model.describe()
        shapes = [output["shape"] for output in description["outputs"]]
        if classes is not None and shapes != [[len(classes)]]:
            text = " and ".join(str(tuple(shape)) for shape in shapes)
            raise ValueError(f"there are {len(classes)} names of classes, but the model outputs {text} per image")
        fields = {
            "format": pack.FORMAT,
            "version": version.__version__,
            "digest": hashlib.sha256(content).hexdigest(),
            "bits": quantized.config.bits,
            **description,
            "preprocessing": None if preprocessing is None else dict(preprocessing),
            "classes": None if classes is None else list(classes),
            "artifact": artifact.read_header(content, str(path)),
            "tapes": recordings,
        }
        check_text(fields)
        text = json.dumps(fields, separators=(",", ":"), allow_nan=False)
        if len(text) > MAX_JSON:
            raise ArtifactError(
                f"{path} and its tapes have {len(text)} bytes of JSON, more than {MAX_JSON}: choose fewer batch sizes"
            )
        packed: bytes = to_safetensors(tensors, {pack.KEY: text})
        packed_file = Path(folder) / "pack"
        packed_file.write_bytes(packed)
        noise = [value.numpy() for value in noise_like(quantized, sum(batches))]  # every tape runs
        alone, together = (leaves_of(loaded(*noise)) for loaded in (model, run.load(packed_file)))
        if not all(np.array_equal(one, other, equal_nan=True) for one, other in zip(alone, together, strict=True)):
            raise ArtifactError(f"adalog cannot pack {path}: the outputs of an image depend on the batch")
    return packed
