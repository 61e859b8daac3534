"""What a result was measured on, and how its figures are put together."""

import math
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """Processor, cores and the versions that matter."""
    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        processor = names[0] if names else processor
    packages = {name: version(name) for name in ("adalog", "torch", "numpy", "safetensors")}
    return {"processor": processor, "cores": os.cpu_count(), "python": platform.python_version(), **packages}


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))
