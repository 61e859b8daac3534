"""The executor of compiled kernels, `native.cpp`: where its library is, and what it can do here."""

import ctypes
import functools
import os
from pathlib import Path

ABI = 1
LEVELS = ("scalar", "avx2", "avx512vnni", "amx")  # in the order of the bits of `adalog_features`


def _candidates() -> list[Path]:
    """Where the library may lie: as ADALOG_NATIVE says, or next to this file."""
    asked = os.environ.get("ADALOG_NATIVE")
    return [Path(asked)] if asked else sorted(Path(__file__).parent.glob("_native*.so"))


@functools.cache
def _library() -> tuple[ctypes.CDLL | None, str]:
    """The library, if there is one that this package can use, and which it is or why there is none."""
    found = _candidates()
    if not found:
        return None, "the package was installed without a C++ compiler: it has no adalog/runtime/_native*.so"
    path = found[0]
    try:
        library = ctypes.CDLL(str(path))
        version = library.adalog_abi()
    except (OSError, AttributeError) as cause:
        return None, f"{path} is no library of kernels: {str(cause).splitlines()[0]}"
    if version != ABI:
        return None, f"{path} has interface {version}, this package needs {ABI}: install it again"
    library.adalog_features.restype = ctypes.c_uint
    return library, f"uses {path}"


def why() -> str:
    """Why there are no kernels, or the library they are in."""
    return _library()[1]


def levels() -> list[str]:
    """The kernels that run here, slowest first; none where there is no library."""
    library, _ = _library()
    found = library.adalog_features() if library else 0
    return [name for bit, name in enumerate(LEVELS) if found >> bit & 1]
