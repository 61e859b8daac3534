"""Records of measurements as JSON: keep finished ones in files, summarize several, and compare their predictions."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adalog.errors import DataError
from adalog.files import write_whole
from adalog.study.evaluate import mcnemar
from adalog.version import source_hash


def kept(path: Path | None, key: dict[str, Any], make: Callable[[], Any]) -> Any:
    """Return the result of `make`, read from the file `path` if it holds one for this key, else computed and stored.

    The result is JSON. The source code of the package and the version of torch are part of every key, so that a result
    is never used with other code. Raises DataError for a file that does not hold such a result.
    """
    value = read_kept(path, key)
    if value is None:
        value = make()
        if path is not None:
            write_whole(path, json.dumps({"key": _whole(key), "value": value}).encode())
    return value


def _whole(key: dict[str, Any]) -> dict[str, Any]:
    """Return the key together with everything else that determines a result."""
    return {**key, "source": source_hash(), "torch": torch.__version__}


def read_kept(path: Path | None, key: dict[str, Any]) -> Any:
    """Return the result that `kept` finds in the file; None if it has to be computed."""
    if path is None or not path.exists():
        return None
    try:
        found = json.loads(path.read_text())
        return found["value"] if found["key"] == _whole(key) else None
    except (ValueError, LookupError, TypeError) as cause:
        raise DataError(
            f"{path} does not hold a finished row ({cause}): remove it, or choose another folder"
        ) from cause


def packed(right: Tensor) -> str:
    """Pack booleans (N,) into one bit each, written as a hexadecimal number."""
    return np.packbits(right.numpy()).tobytes().hex()


def statistics(values: Iterable[float]) -> dict[str, Any]:
    """Return the mean, the standard deviation and the values themselves, as results hold them."""
    found = list(values)
    return {"mean": mean(found), "std": stdev(found) if len(found) > 1 else 0.0, "values": found}


def p_value(first: Mapping[str, Any], second: Mapping[str, Any]) -> float:
    """Return McNemar's exact p-value for two records.

    "right" says which images each record classifies correctly (see `packed`).
    """
    one, other = int(first["right"], 16), int(second["right"], 16)
    return mcnemar((one & ~other).bit_count(), (other & ~one).bit_count())
