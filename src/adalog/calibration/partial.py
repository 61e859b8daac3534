"""A file of what a calibration has finished (searches, and stages), one line each, from which a killed one goes on."""

import hashlib
import json
import math
import os
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adalog.choices import RangeSearch
from adalog.errors import ArtifactError, DataError
from adalog.files import write_error
from adalog.quantizers import Assignment, Fold, QuantizedTensor, Quantizer
from adalog.quantizers.codec import check_shape, checked_weight, decode_quantizer, encode_quantizer, pack, unpack

_DTYPES = {
    str(kind).removeprefix("torch."): kind for kind in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
}


def fingerprint(choices: object, tensors: Iterable[tuple[str, Tensor]]) -> str:
    """A digest of choices (by their `repr`) and of named tensors, with their types, shapes and devices."""
    content = hashlib.sha256(repr(choices).encode())
    for name, value in tensors:
        content.update(f"{name} {value.dtype} {tuple(value.shape)} {value.device.type}".encode())
        content.update(raw_bytes(value))
    return content.hexdigest()


def raw_bytes(value: Tensor) -> memoryview:
    """The bytes of the values of a tensor."""
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


class Lines:
    """What is finished of a long run, in files: JSON objects by name, one line each.

    Each rank of a job adds to a file of its own: rank 0 to `path`, others to one beside it with .rank1 and so on behind
    its name. All of them are read, whichever job wrote them. They must be of what `fingerprint` names; other files are
    left alone. A line that a kill cut off is left out. kind: what the lines are called. Raises DataError for a file of
    something else, or one that is damaged.
    """

    def __init__(self, path: Path, fingerprint: str, kind: str, rank: int = 0):
        self.path = path if rank == 0 else path.with_name(f"{path.name}.rank{rank}")
        self._header = {kind: fingerprint}
        self.found: dict[str, dict[str, Any]] = {}
        for other in _files_of_ranks(path):
            self._read(other, kind)
        if not self.path.exists() or not self.path.stat().st_size:
            self._append(self._header)

    def _read(self, path: Path, kind: str) -> None:
        try:
            content = path.read_bytes()
            whole = content[: content.rfind(b"\n") + 1]
            lines = [json.loads(line) for line in whole.splitlines()]
        except (OSError, ValueError, RecursionError) as cause:
            raise DataError(f"{path} is no file of finished {kind} ({cause}): remove it, or name another") from cause
        cut_in_header = json.dumps(self._header).encode().startswith(content)
        if lines[:1] != [self._header] and not cut_in_header:
            raise DataError(
                f"{path} holds {kind} of another model, other images or other choices (memory, seed, and versions of "
                "adalog and PyTorch among them): give those again, or remove it"
            )
        with self.refusing(path):
            self.found |= {str(line["name"]): line for line in lines[1:]}
        if path == self.path and len(whole) < len(content):
            os.truncate(path, len(whole))

    def add(self, name: str, content: dict[str, Any]) -> None:
        """Write one more object to the file."""
        self._append({"name": name, **content})

    @contextmanager
    def refusing(self, path: Path | None = None) -> Iterator[None]:
        """Turn what goes wrong while lines are read into the error that the file is damaged."""
        try:
            yield
        except (
            ArtifactError,
            ArithmeticError,
            AttributeError,
            LookupError,
            TypeError,
            ValueError,
            RuntimeError,
        ) as cause:
            raise DataError(f"{path or self.path} is damaged ({type(cause).__name__}: {cause}): remove it") from cause

    def _append(self, line: Any) -> None:
        try:
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as cause:
            raise write_error(self.path, cause) from cause


def _files_of_ranks(path: Path) -> list[Path]:
    """The file, and those beside it that other ranks of a job have made, as far as they are there."""
    start, others = f"{path.name}.rank", list[Path]()
    with suppress(OSError):  # a folder that cannot be listed
        others = sorted(path.with_name(each.name) for each in path.parent.iterdir() if each.name.startswith(start))
    return [path] * path.exists() + [other for other in others if other.name[len(start) :].isdecimal()]


class Partial:
    """The finished searches in files, which must be those that `fingerprint` names; see `Lines`.

    Numbers are written so that they read back to the bit.
    """

    def __init__(self, path: Path, fingerprint: str, rank: int = 0):
        self._lines = Lines(path, fingerprint, "searches", rank)
        with self._lines.refusing():
            self._found = {name: assignment_of(name, line) for name, line in self._lines.found.items()}

    def get(self, name: str, device: str | torch.device = "cpu") -> Assignment | None:
        """The assignment of this name, a group's for its search; None where it is not finished."""
        found = self._found.get(name)
        return None if found is None else found.to(torch.device(device))

    def add(self, name: str, assignment: Assignment) -> None:
        """Write the assignment of this name to the file."""
        self._lines.add(name, assignment_json(assignment))


def check_storable(search: object) -> None:
    """Raise ValueError for a search whose quantizers no file stores."""
    if isinstance(search, RangeSearch) and not search.round_zero_point:
        raise ValueError(
            "round_zero_point = False finds zero points that no file stores, neither artifact nor partial: "
            "judge such a model in memory (`adalog tables` does), or round them (the method repq-vit)"
        )


def assignment_json(assignment: Assignment) -> dict[str, Any]:
    """An assignment as JSON, from which every number reads back to the bit."""
    fold = assignment.fold
    return {
        "left": _fields(assignment.left),
        "right": _fields(assignment.right),
        "sqnr": float(assignment.sqnr),
        "fold": None if fold is None else [_plain(fold.ratio), _plain(fold.beta)],
        "bias": None if assignment.bias is None else _plain(assignment.bias),
    }


def assignment_of(name: str, line: dict[str, Any]) -> Assignment:
    """The assignment of which `assignment_json` gave this. name: for errors."""
    sqnr = line["sqnr"]
    if not isinstance(sqnr, float):
        raise TypeError(f"{name} has the SQNR {sqnr!r}")
    fold = None if line["fold"] is None else Fold(_tensor(line["fold"][0]), _tensor(line["fold"][1]))
    left, right = _side(name, line["left"]), _side(name, line["right"])
    if isinstance(left, QuantizedTensor):
        raise TypeError(f"the left operand of {name!r} has codes")
    bias = None if line["bias"] is None else _tensor(line["bias"])
    return Assignment(left, right, fold, sqnr, bias)


def _dtype_name(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def _plain(value: Tensor) -> dict[str, Any]:
    return {"dtype": _dtype_name(value), "shape": list(value.shape), "values": value.double().reshape(-1).tolist()}


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
    return checked_weight(name, QuantizedTensor(codes, quantizer))
