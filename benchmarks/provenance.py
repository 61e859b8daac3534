"""What a result was measured on, how its figures are put together, and how a long measurement goes on."""

import json
import math
import os
import platform
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from adalog.artifact import write_whole
from adalog.doctor import processor


def machine() -> dict[str, Any]:
    """Processor, cores and the versions that matter."""
    packages = {name: version(name) for name in ("adalog", "torch", "numpy", "safetensors")}
    return {"processor": processor(), "cores": os.cpu_count(), "python": platform.python_version(), **packages}


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def kept(path: Path | None, key: dict[str, Any], make: Callable[[], Any]) -> Any:
    """What `make` gives, as JSON has it, kept in a file; made again where that holds it for another key."""
    if path is not None and path.exists() and (found := json.loads(path.read_text()))["key"] == key:
        return found["value"]
    value = make()
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({"key": key, "value": value}).encode())
    return value
