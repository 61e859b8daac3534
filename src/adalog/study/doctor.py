"""Report what the package can run on this machine, and why it cannot run the rest."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from adalog import library
from adalog.runtime import EXECUTORS
from adalog.version import source_hash

NEEDED = ("adalog", "torch", "numpy", "safetensors")
OPTIONAL = ("timm", "torchvision", "transformers", "onnx", "onnxruntime", "openvino", "nncf", "executorch")
# The processor features that kernels use, as Linux names them.
FEATURES = (
    "avx2",
    "fma",
    "avx_vnni",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512_vnni",
    "avx512_bf16",
    "amx_int8",
    "amx_bf16",
    "asimddp",
    "i8mm",
)


def examine() -> dict[str, Any]:
    """Return versions, processor, threads, executors and kernels as JSON; the version of a missing package is None."""
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "packages": {name: version_of(name) for name in (*NEEDED, *OPTIONAL)},
        "processor": processor(),
        "features": features(),
        "cores": available_cores(),
        "torch_threads": torch.get_num_threads(),
        "executors": executors(),
        "native": library.about(),
    }


def executors() -> list[str]:
    """Return the executors that run on this machine, slowest first; "native" needs the compiled library."""
    return [name for name in EXECUTORS if name != "native" or library.levels()]


def machine() -> dict[str, Any]:
    """Return the processor and the versions that a measurement depends on, as JSON."""
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{name: version(name) for name in NEEDED},
        "source": source_hash(),
        "compiled library": library.load()[0] is not None,
    }


def version_of(package: str) -> str | None:
    """Return the installed version of a package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def available_cores() -> int:
    """Return the number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """Return the name of the processor."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def features() -> list[str] | None:
    """Return the `FEATURES` that the processor has; None if the system does not list them."""
    flags = (_cpuinfo("flags") or _cpuinfo("Features")).split()  # the names on x86-64 and on ARM
    return [name for name in FEATURES if name in flags] if flags else None


def _cpuinfo(key: str) -> str:
    """Return a field of the first core in /proc/cpuinfo; an empty string on systems other than Linux."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.split(":")[0].strip() == key), "")
