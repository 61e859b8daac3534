"""Records of measurements as JSON: keep finished ones in files, summarize several, and compare their predictions."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adalog.finished import FinishedParts
from adalog.study.evaluate import mcnemar
from adalog.version import source_hash

_NAME = "row"  # of the only part with its key


def kept(path: Path | None, key: dict[str, Any], make: Callable[[], Any]) -> Any:
    """Return the result of `make`, read from the file `path` if it holds one for this key, else computed and stored.

    The result is JSON. The source code of the package and the version of torch are part of every key, so that a result
    is never used with other code. Raises DataError for a file that does not hold such results.
    """
    value = read_kept(path, key)
    if value is None:
        value = make()
        if path is not None:
            _finished(path, key).add(_NAME, {"value": value})
    return value


def _finished(path: Path, key: dict[str, Any]) -> FinishedParts:
    whole = {**key, "source": source_hash(), "torch": torch.__version__}
    return FinishedParts(path, whole, "rows")


def read_kept(path: Path | None, key: dict[str, Any]) -> Any:
    """Return the result that `kept` finds in the file; None if it has to be computed."""
    return None if path is None else _finished(path, key).parts.get(_NAME, {}).get("value")


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
