"""Write the assignments of finished searches and stages as JSON, so that an interrupted calibration can resume."""

import hashlib
import math
from base64 import b64decode, b64encode
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adalog.finished import FinishedParts
from adalog.quantizers import Assignment, Fold, QuantizedTensor, Quantizer
from adalog.quantizers.codec import check_shape, check_weight, decode_quantizer, encode_quantizer, pack, unpack

_DTYPES = {
    str(kind).removeprefix("torch."): kind for kind in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
}


def fingerprint(choices: object, tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return a digest of choices (by their `repr`) and of named tensors with their types, shapes and devices."""
    content = hashlib.sha256(repr(choices).encode())
    for name, value in tensors:
        content.update(f"{name} {value.dtype} {tuple(value.shape)} {value.device.type}".encode())
        content.update(raw_bytes(value))
    return content.hexdigest()


def raw_bytes(value: Tensor) -> memoryview:
    """Return the bytes of a tensor's values."""
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


class Partial:
    """Finished searches and stages in files with this fingerprint, and no other; see `FinishedParts`."""

    def __init__(self, path: Path, fingerprint: str, rank: int = 0):
        self._finished = FinishedParts(path, fingerprint, "searches", rank).alone()
        with self._finished.refusing():
            self._assignments = {name: assignment_of(name, line) for name, line in self._finished.parts.items()}

    def get(self, name: str, device: str | torch.device = "cpu") -> Assignment | None:
        """Return the assignment of this name, or None if it is not finished. A search has the name of its group."""
        line = self._assignments.get(name)
        return None if line is None else line.to(torch.device(device))

    def add(self, name: str, assignment: Assignment) -> None:
        """Append the assignment of this name to the file."""
        self._finished.add(name, assignment_json(assignment))


def assignment_json(assignment: Assignment) -> dict[str, Any]:
    """Convert an assignment to JSON; every number reads back exactly."""
    fold = assignment.fold
    return {
        "left": _fields(assignment.left),
        "right": _fields(assignment.right),
        "sqnr": float(assignment.sqnr),
        "fold": None if fold is None else [_plain(fold.ratio), _plain(fold.beta)],
        "bias": None if assignment.bias is None else _plain(assignment.bias),
    }


def assignment_of(name: str, line: dict[str, Any]) -> Assignment:
    """Read back an assignment that `assignment_json` converted. name: for error messages."""
    sqnr = line["sqnr"]
    if not isinstance(sqnr, float):
        raise TypeError(f"{name} has the SQNR {sqnr!r}, which is not a float")
    fold = None if line["fold"] is None else Fold(_tensor(line["fold"][0]), _tensor(line["fold"][1]))
    left, right = _side(name, line["left"]), _side(name, line["right"])
    if isinstance(left, QuantizedTensor):
        raise TypeError(f"the left operand of {name!r} has codes, which only a weight can have")
    bias = None if line["bias"] is None else _tensor(line["bias"])
    return Assignment(left, right, fold, sqnr, bias)


def _plain(value: Tensor) -> dict[str, Any]:
    dtype = str(value.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": list(value.shape), "values": value.double().reshape(-1).tolist()}


def _tensor(plain: dict[str, Any]) -> Tensor:
    return torch.tensor(plain["values"], dtype=_DTYPES[plain["dtype"]]).reshape(plain["shape"])


def _fields(side: Quantizer | QuantizedTensor | None) -> dict[str, Any] | None:
    if side is None:
        return None
    if isinstance(side, Quantizer):
        return encode_quantizer(side)
    packed = pack(side.codes, side.bits).numpy().tobytes()
    codes = {"shape": list(side.codes.shape), "packed": b64encode(packed).decode("ascii")}
    return {**encode_quantizer(side.quantizer), "codes": codes}


def _side(name: str, fields: dict[str, Any] | None) -> Quantizer | QuantizedTensor | None:
    if fields is None:
        return None
    quantizer = decode_quantizer(name, {key: value for key, value in fields.items() if key != "codes"})
    if "codes" not in fields:
        return quantizer
    shape = fields["codes"]["shape"]
    check_shape(name, shape)
    packed = torch.frombuffer(bytearray(b64decode(fields["codes"]["packed"], validate=True)), dtype=torch.uint8)
    codes = unpack(packed, quantizer.bits, math.prod(shape)).reshape(shape)
    return check_weight(name, QuantizedTensor(codes, quantizer))
