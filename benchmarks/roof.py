"""Measure the roofs of this processor: how fast one thread multiplies bytes, computes 2^x and erf, and reads memory.

A roof is the best of many short runs of a loop in which nothing else takes time (`roof.cpp`), since other load on the
machine can only make a run longer.
"""

import ctypes
import functools
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from adalog import AdalogError, library

_SOURCE = Path(__file__).with_name("roof.cpp")
_FLAGS = ("-O2", "-g0", "-std=c++17", "-fvisibility=hidden", "-fno-wrapv", "-shared", "-fPIC")  # those of the kernels
_DOTS, _BYTES, _EXPS, _ERFS, _NARROW = range(5)  # loops of `roof.cpp`
_SECONDS = 1e-3  # approximate length of a run
_RUNS = 25
_CACHES = (1 << 15, 1 << 20, 1 << 25)  # bytes of the first, second and third cache, if the system does not report them
_LINE = 64  # bytes of a cache line
_MOST = 1 << 28  # most bytes to read for measuring the memory


@dataclass(frozen=True)
class Roofs:
    """What one thread can do per second with the kernels of one level.

    dots: products of two bytes, summed up.
    narrow: such products if sums of two of them fit in 16 bits, which only AVX2 makes faster.
    exps, erfs: values of 2^x, and of erf to within 3e-5, in float32.
    reads: (size, bytes read per second) of each cache, and finally of memory, with the size 0.
    """

    level: str
    dots: float
    narrow: float
    exps: float
    erfs: float
    reads: tuple[tuple[int, float], ...]

    def read(self, size: int) -> float:
        """Return the bytes per second for reading memory of this size again and again."""
        return next((speed for cache, speed in self.reads if cache >= size or not cache), 0.0)

    def json(self) -> dict[str, Any]:
        """Return the roofs in units of 10^9 per second."""
        names = [f"L{number} ({cache >> 10} KiB)" for number, (cache, _) in enumerate(self.reads[:-1], 1)]
        speeds = zip([*names, "memory"], (speed for _, speed in self.reads), strict=True)
        giga = {name: getattr(self, name) / 1e9 for name in ("dots", "narrow", "exps", "erfs")}
        return {"level": self.level, **giga, "reads": {name: speed / 1e9 for name, speed in speeds}}


def measure(level: str | None = None) -> Roofs:
    """Measure the roofs at a level of kernels; None means the fastest level that runs here.

    Raises ValueError if the level does not run here or has no loops to measure, and AdalogError if there are no kernels
    or no C++ compiler.
    """
    levels = library.levels()
    if not levels:
        raise AdalogError(library.why())
    level = level or levels[-1]
    if level not in levels:
        raise ValueError(f"level = {level!r} is not one of {', '.join(levels)}")
    loops, number, caches = load_loops(), library.LEVELS.index(level), cache_sizes()
    if loops(number, _DOTS, None, 0, 0) < 0:
        raise ValueError(f"level = {level!r} has no loops in roof.cpp: choose another level")
    memory = np.ones(min(_MOST, 4 * caches[-1]) + _LINE, np.uint8)
    memory = memory[-memory.ctypes.data % _LINE :]  # zeros would all be mapped to one page

    def speed(what: int, size: int = 0) -> float:
        return _best(lambda rounds: int(loops(number, what, memory.ctypes.data, size, rounds)))

    # Use half of a cache, since the rest of the process needs some, and less of the last one, which other cores share.
    sizes = [min(size, len(memory)) for size in (*(size // 2 for size in caches[:-1]), caches[-1] // 4)]
    reads = [(cache, speed(_BYTES, size)) for cache, size in zip(caches, sizes, strict=True)]
    reads.append((0, speed(_BYTES, len(memory))))
    dots, narrow, exps, erfs = map(speed, (_DOTS, _NARROW, _EXPS, _ERFS))
    return Roofs(level, dots, narrow, exps, erfs, tuple(reads))


@functools.cache
def load_loops() -> Callable[..., int]:
    """Compile `roof.cpp` and return its function, whose arguments are explained there.

    The function ends the process at a level that does not run here. Raises AdalogError without a C++ compiler.
    """
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise AdalogError("roof.cpp needs a C++ compiler: install g++, or name another one in the variable CXX")
    with tempfile.TemporaryDirectory() as folder:  # a loaded library stays, although its file goes
        built = Path(folder, "roof.so")
        subprocess.run([*compiler.split(), *_FLAGS, str(_SOURCE), "-o", str(built)], check=True)
        loops = ctypes.CDLL(str(built)).roof
    loops.restype = ctypes.c_int64
    loops.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    return loops


def _best(loop: Callable[[int], int]) -> float:
    """Return how much of the counted work a loop does per second.

    loop: takes a number of rounds, and returns the work that it did.
    """
    rounds = 1
    while min(_timed(loop, rounds)[0] for _ in range(3)) < _SECONDS / 2:
        rounds *= 2
    runs = [_timed(loop, rounds) for _ in range(_RUNS)]
    return max(count / seconds for seconds, count in runs)


def _timed(loop: Callable[[int], int], rounds: int) -> tuple[float, int]:
    start = time.thread_time()  # this clock stops while the thread waits for other load
    count = loop(rounds)
    return time.thread_time() - start, count


def cache_sizes() -> tuple[int, ...]:
    """Return the sizes [bytes] of the first processor's data caches, the nearest one first."""
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
