"""Read the JSON of a pack: an artifact, its tapes and a description in one file, which `adalog pack` writes.

A pack is not trusted. docs/reference/format.md describes the file.
"""

import math
from typing import Any, Literal, get_args

import numpy as np

from adalog.run import tape as tapes
from adalog.stored import check, check_fields, check_format, is_whole, parse_header

FORMAT = 1
KEY = "adalog-pack"
MAX_TAPES = 16
Interpolation = Literal["bilinear", "bicubic", "lanczos", "nearest"]
Fit = Literal["stretch", "cover", "contain"]
Position = Literal["center", "center-floor", "top-left"]
Channels = Literal["rgb", "bgr"]
# The words that each of these fields of a preprocessing allows.
WORDS: dict[str, tuple[str, ...]] = {
    "interpolation": get_args(Interpolation),
    "fit": get_args(Fit),
    "position": get_args(Position),
    "channels": get_args(Channels),
}
_FIELDS: dict[str, type | tuple[type, ...]] = {
    "format": int,
    "version": str,
    "digest": str,
    "bits": str,
    "inputs": list,
    "outputs": list,
    "preprocessing": (dict, type(None)),
    "classes": (list, type(None)),
    "artifact": dict,
    "tapes": list,
}
_PREPARATION = {"size", "resize", "mean", "std", "rescale", "fill", *WORDS}


def constants_of(batch: int) -> str:
    """Return the name of the tensor that holds the constants of the tape for this many images."""
    return f"{tapes.CONSTANTS}/{batch}"


def describe(name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> dict[str, Any]:
    """Describe an input or an output. shape: with the batch first, which the description leaves out."""
    return {"name": name, "type": dtype.name, "shape": list(shape[1:])}


def parse(text: str) -> dict[str, Any]:
    """Parse the JSON of a pack and check its fields and its tapes' fields. Raises ArtifactError."""
    header: dict[str, Any] = parse_header(text)
    check_format(header, FORMAT)
    check_fields(header, _FIELDS)
    check(1 <= len(header["tapes"]) <= MAX_TAPES, f"it has {len(header['tapes'])} tapes, not 1 to {MAX_TAPES}")
    batches = [tapes.check_fields(tape)["batch"] for tape in header["tapes"]]
    check(all(map(int.__lt__, batches, batches[1:])), f"the batches of its tapes {batches} do not increase")
    same = all(tape["artifact"] == header["digest"] for tape in header["tapes"])
    check(same, "its tapes belong to another artifact")
    if header["preprocessing"] is not None:
        _check_preparation(header["preprocessing"])
    if header["classes"] is not None:
        good = all(isinstance(name, str) and name for name in header["classes"])
        check(good, "a name of a class is not text")
        outputs = header["outputs"]
        good = len(outputs) == 1 and isinstance(outputs[0], dict)
        check(
            good and outputs[0].get("shape") == [len(header["classes"])],
            f"it names {len(header['classes'])} classes, but its outputs are {outputs}",
        )
    return header


def _check_preparation(fields: dict[str, Any]) -> None:
    """Raise ArtifactError unless these are the fields of an `adalog.Preprocessing`."""
    check(fields.keys() == _PREPARATION, f"its preprocessing has the fields {', '.join(sorted(fields))}")
    sizes = [fields["size"], fields["resize"] if isinstance(fields["resize"], list) else [fields["resize"]] * 2]
    good = all(isinstance(size, list) and len(size) == 2 for size in sizes)
    good = good and all(is_whole(side, 1, 2**31 - 1) for size in sizes for side in size)
    colours = [
        fields["mean"],
        fields["std"],
        [fields["rescale"]] * 3,
        [0] * 3 if fields["fill"] is None else fields["fill"],
    ]
    good = good and all(isinstance(colour, list) and len(colour) == 3 for colour in colours)
    good = good and all(type(value) in (int, float) and math.isfinite(value) for colour in colours for value in colour)
    good = good and min(fields["std"]) > 0 and all(fields[name] in words for name, words in WORDS.items())
    check(good, f"its preprocessing {fields} is not valid")
