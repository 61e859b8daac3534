"""The roofs of this processor: how fast one thread multiplies bytes, computes 2^x and erf, and reads memory.

A roof is measured by a loop in which nothing else takes time (`roof.cpp`), as the best of many short runs, since other
load on the machine can only make a run longer.
"""

import ctypes
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adalog import library
from adalog.run import abi
from adalog.run.tape import aligned

_DOTS, _BYTES, _EXPS, _ERFS = range(4)  # loops of `adalog_roof`
_SECONDS = 1e-3  # that a run takes, about
_RUNS = 25
_CACHES = (1 << 15, 1 << 20, 1 << 25)  # bytes of the first, second and third cache, where the system does not tell
_MOST = 1 << 28  # bytes that are read to measure the memory, at most


@dataclass(frozen=True)
class Roofs:
    """What one thread does in a second at one level of kernels.

    dots: products of two bytes, added up. exps, erfs: values of 2^x, and of erf to 3e-5, in float32. reads: for each
    cache its size and the bytes that are read from it; at last those read from memory, of the size 0.
    """

    level: str
    dots: float
    exps: float
    erfs: float
    reads: tuple[tuple[int, float], ...]

    def read(self, size: int) -> float:
        """Bytes per second, of memory of this size that is read again and again."""
        return next((speed for cache, speed in self.reads if cache >= size or not cache), 0.0)

    def json(self) -> dict[str, Any]:
        """The roofs, in units of 10^9 per second."""
        names = [f"L{number} ({cache >> 10} KiB)" for number, (cache, _) in enumerate(self.reads[:-1], 1)]
        speeds = zip([*names, "memory"], (speed for _, speed in self.reads), strict=True)
        giga = {name: getattr(self, name) / 1e9 for name in ("dots", "exps", "erfs")}
        return {"level": self.level, **giga, "reads": {name: speed / 1e9 for name, speed in speeds}}


def measure(level: str | None = None) -> Roofs:
    """The roofs at a level of kernels; None: the fastest that run here. Raises ValueError where none do."""
    found = abi.load().adalog_roof
    found.restype = ctypes.c_int64
    found.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    levels = library.levels()
    level = levels[-1] if level is None else level
    if level not in levels:
        raise ValueError(f"level = {level!r} is none of {', '.join(levels)}")
    number, caches = library.LEVELS.index(level), cache_sizes()
    if found(number, _DOTS, None, 0, 0) < 0:
        raise ValueError(f"level = {level!r} has no loops in roof.cpp that measure its roofs")
    memory = aligned(min(_MOST, 4 * caches[-1]))
    memory.fill(1)  # or all of it would be one page of zeros

    def speed(what: int, size: int = 0) -> float:
        return _best(lambda rounds: int(found(number, what, memory.ctypes.data, size, rounds)))

    # Half of a cache, since the rest of the process lies there too; much less of the last one, which others share.
    sizes = [*(size // 2 for size in caches[:-1]), caches[-1] // 4]
    reads = [(cache, speed(_BYTES, size)) for cache, size in zip(caches, sizes, strict=True)]
    return Roofs(level, speed(_DOTS), speed(_EXPS), speed(_ERFS), (*reads, (0, speed(_BYTES, len(memory)))))


def _best(loop: Callable[[int], int]) -> float:
    """How much of what it counts a loop does per second. loop: of so many rounds; returns how much it did."""
    rounds = 1
    while min(_timed(loop, rounds)[0] for _ in range(3)) < _SECONDS / 2:
        rounds *= 2
    runs = [_timed(loop, rounds) for _ in range(_RUNS)]
    return max(count / seconds for seconds, count in runs)


def _timed(loop: Callable[[int], int], rounds: int) -> tuple[float, int]:
    start = time.thread_time()  # other load stops a thread's clock
    count = loop(rounds)
    return time.thread_time() - start, count


def cache_sizes() -> tuple[int, ...]:
    """The bytes of the caches for data that the first processor has, the nearest first."""
    found: dict[int, int] = {}
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        told = [_text(folder / name) for name in ("level", "size", "type")]
        size = re.fullmatch(r"(\d+)K", told[1])
        if told[0].isdecimal() and size is not None and told[2] != "Instruction":
            found[int(told[0])] = int(size[1]) << 10
    return tuple(found[number] for number in sorted(found)) or _CACHES


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
