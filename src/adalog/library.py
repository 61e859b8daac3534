"""The compiled library: where it is, what it can do on this machine, and why it is missing where it is."""

import contextlib
import ctypes
import functools
import os
import zlib
from pathlib import Path
from typing import Any

from adalog.errors import AdalogError

ABI = 10  # the version of its interface
LAYOUT = "a06b6a11"  # the digest of where the fields of its structures lie, which are those of `adalog.run.abi`
Offsets = dict[str, tuple[int, int]]  # (offset, size) in bytes, of "Structure" and of "Structure.field"
LEVELS = ("scalar", "avx2", "avx512vnni", "amx", "neon", "i8mm")  # in the order of their bits in `adalog_features`


@functools.cache
def load() -> tuple[ctypes.CDLL | None, str]:
    """The library and a note that names it, or None and the reason why there is none that this package can use.

    It lies next to this file, or where the environment variable ADALOG_NATIVE says.
    """
    path = _path()
    if path is None:
        return None, (
            "there is no adalog/_native*.so: the package was installed without a C++17 compiler, or it failed; have "
            "g++, or name one in CXX, and install the package again (pip install --force-reinstall --no-deps ...)"
        )
    try:
        library = ctypes.CDLL(str(path))
        version = library.adalog_abi()
        library.adalog_features.restype = ctypes.c_uint
    except (OSError, AttributeError) as cause:
        return None, f"{path} is no library of kernels: {str(cause).splitlines()[0]}"
    if version != ABI:
        return None, f"{path} has interface {version}, this package needs {ABI}: install it again"
    if digest_of(layout_of(library)) != LAYOUT:
        return None, f"{path} has other structures than this package, of another version: install it again"
    return library, f"uses {path}"


def layout_of(compiled: ctypes.CDLL) -> Offsets:
    """The layout of the library's structures, as the library says it."""
    offset, size = ctypes.c_int64(), ctypes.c_int64()
    pointers = [ctypes.POINTER(ctypes.c_int64)] * 2
    compiled.adalog_layout.restype, compiled.adalog_layout.argtypes = ctypes.c_char_p, [ctypes.c_int64, *pointers]
    found: Offsets = {}
    while name := compiled.adalog_layout(len(found), ctypes.byref(offset), ctypes.byref(size)):
        found[name.decode()] = offset.value, size.value
    return found


def digest_of(layout: Offsets) -> str:
    """A few digits that tell one layout from another."""
    return f"{zlib.crc32(repr(sorted(layout.items())).encode()):08x}"


def _path() -> Path | None:
    asked = os.environ.get("ADALOG_NATIVE")
    return Path(asked) if asked else next(iter(sorted(Path(__file__).parent.glob("_native*.so"))), None)


def why() -> str:
    """The reason why there are no kernels, or a note that names the library which holds them."""
    return load()[1]


def levels() -> list[str]:
    """The levels of kernels that run on this machine, slowest first; none where there is no library.

    The environment variable ADALOG_LEVEL excludes faster levels than the one it names, as an older processor would.
    Raises AdalogError where it names no level.
    """
    library, _ = load()
    found = library.adalog_features() if library else 0
    highest = LEVELS.index(held() or LEVELS[-1])
    return [name for bit, name in enumerate(LEVELS) if found >> bit & 1 and bit <= highest]


def held() -> str | None:
    """The fastest level that the environment variable ADALOG_LEVEL allows; None where it is not set."""
    asked = os.environ.get("ADALOG_LEVEL") or None
    if asked is not None and asked not in LEVELS:
        raise AdalogError(f"ADALOG_LEVEL = {asked!r} is none of {', '.join(LEVELS)}: name one of these, or unset it")
    return asked


def about() -> dict[str, Any]:
    """The library and its kernels as JSON.

    library: its file, relative to the package's folder if it lies there, or None. interface: the version that the
    library has, and the one that this package needs. kernels: whether each level runs here. level: the one that is used
    unless another is asked for, or None. held: the level that ADALOG_LEVEL names, or None. why: the reason why there
    are no kernels, with the way out, or None.
    """
    path, found, interface = _path(), levels(), None
    if path is not None:
        with contextlib.suppress(OSError, AttributeError):
            interface = ctypes.CDLL(str(path)).adalog_abi()
        package = Path(__file__).parents[1]
        path = path.relative_to(package) if path.is_relative_to(package) else path
    return {
        "library": None if path is None else str(path),
        "interface": {"library": interface, "package": ABI},
        "kernels": {name: name in found for name in LEVELS},
        "level": found[-1] if found else None,
        "held": held(),
        "why": None if found else why(),
    }
