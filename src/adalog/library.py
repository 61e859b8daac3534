"""The compiled library: where it is, what it can do here, and why there is none where there is none."""

import ctypes
import functools
import os
from pathlib import Path

ABI = 1  # of its interface


@functools.cache
def load() -> tuple[ctypes.CDLL | None, str]:
    """The library, if there is one that this package can use, and which it is or why there is none.

    It lies next to this file, or where the environment's ADALOG_NATIVE says.
    """
    asked = os.environ.get("ADALOG_NATIVE")
    found = [Path(asked)] if asked else sorted(Path(__file__).parent.glob("_native*.so"))
    if not found:
        return None, "the package was installed without a C++ compiler: it has no adalog/_native*.so"
    path = found[0]
    try:
        library = ctypes.CDLL(str(path))
        version = library.adalog_abi()
    except (OSError, AttributeError) as cause:
        return None, f"{path} is no library of kernels: {str(cause).splitlines()[0]}"
    if version != ABI:
        return None, f"{path} has interface {version}, this package needs {ABI}: install it again"
    return library, f"uses {path}"
