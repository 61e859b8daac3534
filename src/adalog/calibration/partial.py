"""The finished searches of a calibration in a file, a line each, so that one that was killed goes on where it was."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adalog.artifact import decode_quantizer, encode_quantizer, write_error
from adalog.errors import ArtifactError, DataError
from adalog.quantizers import Quantizer
from adalog.search.product import Found

Fold = tuple[Tensor, Tensor] | None

_DTYPES = {
    str(kind).removeprefix("torch."): kind for kind in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
}


class Partial:
    """What a file holds of the searches that `fingerprint` names; any other file is not touched.

    A line that was cut off by a kill is searched again. Numbers are written so that they read back to the bit.
    """

    def __init__(self, path: Path, fingerprint: str):
        self.path = path
        self._found: dict[str, tuple[Found, Fold]] = {}
        header = {"searches": fingerprint}
        try:
            content = path.read_bytes() if path.exists() else b""
            whole = content[: content.rfind(b"\n") + 1]
            lines = [json.loads(line) for line in whole.splitlines()]
        except (OSError, ValueError) as cause:
            raise DataError(f"{path} holds no finished searches ({cause}): remove it, or name another") from cause
        cut_in_header = json.dumps(header).encode().startswith(content)
        if lines[:1] != [header] and not cut_in_header:
            raise DataError(
                f"{path} holds searches of another model, other images or other choices: give those again, or remove it"
            )
        try:
            self._found.update(_read(line) for line in lines[1:])
        except (ArtifactError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as cause:
            raise DataError(f"{path} is damaged ({type(cause).__name__}: {cause}): remove it") from cause
        if len(whole) < len(content):
            os.truncate(path, len(whole))
        if not lines:
            self._append(header)

    def get(self, name: str) -> tuple[Found, Fold] | None:
        """What was found for the site of this name, and its norm's fold."""
        return self._found.get(name)

    def add(self, name: str, found: Found, fold: Fold) -> None:
        folded = None if fold is None else [_plain(part) for part in fold]
        sides = {"left": _fields(found.left), "right": _fields(found.right)}
        self._append({"name": name, **sides, "sqnr": float(found.sqnr), "fold": folded})

    def _append(self, line: Any) -> None:
        try:
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as cause:
            raise write_error(self.path, cause) from cause


def _read(line: dict[str, Any]) -> tuple[str, tuple[Found, Fold]]:
    name, sqnr = line["name"], line["sqnr"]
    if not isinstance(name, str) or not isinstance(sqnr, float):
        raise TypeError(f"the name {name!r} has the SQNR {sqnr!r}")
    found = Found(_quantizer(name, line["left"]), _quantizer(name, line["right"]), sqnr)
    fold = None if line["fold"] is None else (_tensor(line["fold"][0]), _tensor(line["fold"][1]))
    return name, (found, fold)


def _dtype_name(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def _plain(value: Tensor) -> dict[str, Any]:
    return {"dtype": _dtype_name(value), "shape": list(value.shape), "values": value.double().reshape(-1).tolist()}


def _tensor(plain: dict[str, Any]) -> Tensor:
    return torch.tensor(plain["values"], dtype=_DTYPES[plain["dtype"]]).reshape(plain["shape"])


def _fields(quantizer: Quantizer | None) -> dict[str, Any] | None:
    return None if quantizer is None else {"dtype": _dtype_name(quantizer.scale), **encode_quantizer(quantizer)}


def _quantizer(name: str, fields: dict[str, Any] | None) -> Quantizer | None:
    return None if fields is None else decode_quantizer(name, fields, _DTYPES[fields["dtype"]])
