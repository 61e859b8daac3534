"""Find and load the compiled library, and tell which kernels run on this machine or why there are none."""

import contextlib
import ctypes
import functools
import os
import zlib
from pathlib import Path
from typing import Any

from adalog.errors import AdalogError

ABI = 16  # version of the library's interface
LAYOUT = "bb200219"  # digest of the layout of the library's structures, which `runtime.native.abi` mirrors
Offsets = dict[str, tuple[int, int]]  # (offset, size) in bytes by "Structure" and "Structure.field"
# In the order of the bits in `adalog_features`.
LEVELS = ("scalar", "avx2", "avxvnni", "avx512vnni", "amx", "neon", "i8mm", "wasm")


@functools.cache
def load() -> tuple[ctypes.CDLL | None, str]:
    """Load the library: return it with a note that names its file, or None with the reason why it cannot be used.

    Its file lies next to this one, unless the environment variable ADALOG_NATIVE names another.
    """
    path = _path()
    if path is None:
        return None, (
            "there is no adalog/_native*.so: when adalog was installed, there was no C++17 compiler, or it failed; "
            "install g++, or name another compiler in CXX, and install adalog again (pip install --force-reinstall "
            "--no-deps ...)"
        )
    try:
        library = ctypes.CDLL(str(path))
        version = library.adalog_abi()
        library.adalog_features.restype = ctypes.c_uint
    except (OSError, AttributeError) as cause:
        return None, f"{path} is not a library of kernels: {str(cause).splitlines()[0]}"
    if version != ABI:
        return None, f"{path} has interface {version}, but this version of adalog needs {ABI}: install adalog again"
    if digest_of(layout_of(library)) != LAYOUT:
        return None, f"{path} belongs to another version of adalog, with other structures: install adalog again"
    return library, f"uses {path}"


def layout_of(compiled: ctypes.CDLL) -> Offsets:
    offset, size = ctypes.c_int64(), ctypes.c_int64()
    pointers = [ctypes.POINTER(ctypes.c_int64)] * 2
    compiled.adalog_layout.restype, compiled.adalog_layout.argtypes = ctypes.c_char_p, [ctypes.c_int64, *pointers]
    offsets: Offsets = {}
    while name := compiled.adalog_layout(len(offsets), ctypes.byref(offset), ctypes.byref(size)):
        offsets[name.decode()] = offset.value, size.value
    return offsets


def digest_of(layout: Offsets) -> str:
    return f"{zlib.crc32(repr(sorted(layout.items())).encode()):08x}"


def _path() -> Path | None:
    path = os.environ.get("ADALOG_NATIVE")
    return Path(path) if path else next(iter(sorted(Path(__file__).parent.glob("_native*.so"))), None)


def why() -> str:
    """Return the reason why there are no kernels, or a note that names the library's file."""
    return load()[1]


def levels() -> list[str]:
    """Return the levels of kernels that run on this machine, slowest first. Without a library the list is empty.

    The environment variable ADALOG_LEVEL excludes levels that are faster than the one it names.
    Raises AdalogError if ADALOG_LEVEL is not the name of a level.
    """
    library, _ = load()
    features = library.adalog_features() if library else 0
    highest = LEVELS.index(allowed_level() or LEVELS[-1])
    return [name for bit, name in enumerate(LEVELS) if features >> bit & 1 and bit <= highest]


def choose_level(level: str | None) -> str:
    """Return this level, or the fastest if it is None. Raises ValueError if it does not run on this machine."""
    available = levels()
    level = available[-1] if level is None else level
    if level not in available:
        raise ValueError(f"level = {level!r} does not run on this machine: choose one of {', '.join(available)}")
    return level


def check_threads(threads: int) -> None:
    if not isinstance(threads, int) or not 1 <= threads <= 1024:
        raise ValueError(f"threads = {threads!r} is not a whole number from 1 to 1024")


def allowed_level() -> str | None:
    """Return the fastest level that the environment variable ADALOG_LEVEL allows, or None if it is not set."""
    level = os.environ.get("ADALOG_LEVEL") or None
    if level is not None and level not in LEVELS:
        raise AdalogError(
            f"ADALOG_LEVEL = {level!r} is not one of {', '.join(LEVELS)}: set it to one of these, or unset it"
        )
    return level


def about() -> dict[str, Any]:
    """Describe the library and its kernels as JSON.

    library: its file, relative to the package's folder if it lies there, or None. interface: the version of the
    library's interface and the version that adalog needs. kernels: for each level, True if it runs here. level: the
    level used by default, or None. held: the level that ADALOG_LEVEL names, or None. why: the reason why there are no
    kernels, or None.
    """
    path, available, interface = _path(), levels(), None
    if path is not None:
        with contextlib.suppress(OSError, AttributeError):
            interface = ctypes.CDLL(str(path)).adalog_abi()
        package = Path(__file__).parents[1]
        path = path.relative_to(package) if path.is_relative_to(package) else path
    return {
        "library": None if path is None else str(path),
        "interface": {"library": interface, "package": ABI},
        "kernels": {name: name in available for name in LEVELS},
        "level": available[-1] if available else None,
        "held": allowed_level(),
        "why": None if available else why(),
    }
