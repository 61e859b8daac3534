"""How `search.py` measures costs: CPU time, memory, the speed of products, and the floor below all searches."""

import ctypes
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from adalog.search.operand import Operand

Result = TypeVar("Result")


def keep_memory() -> None:
    """Tell glibc not to return freed memory to the kernel, since its pages would be faulted in again and again."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        for parameter in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            library.mallopt(parameter, 1 << 30)


def peak_bytes() -> int | None:
    """The largest resident set of this process so far; None if the system does not tell."""
    status = Path("/proc/self/status")
    found = re.search(r"^VmHWM:\s+(\d+) kB", status.read_text(), re.MULTILINE) if status.exists() else None
    return None if found is None else 1024 * int(found[1])


def measured(run: Callable[[], Result]) -> tuple[dict[str, Any], Result]:
    """The cost of a run, {"seconds" of CPU time, "peak_rss_bytes"}, and its result. Memory kept before is released."""
    library, reset = ctypes.CDLL(None), Path("/proc/self/clear_refs")
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
    peak = reset.exists()
    if peak:
        reset.write_text("5")  # starts counting the peak anew
    start = time.process_time()
    result = run()
    seconds = time.process_time() - start
    return {"seconds": seconds, "peak_rss_bytes": peak_bytes() if peak else None}, result


def least_seconds(run: Callable[[], object], times: int = 3) -> float:
    """The least CPU time of several runs, after one that does not count."""
    run()
    found = []
    for _ in range(times):
        start = time.process_time()
        run()
        found.append(time.process_time() - start)
    return min(found)


@torch.no_grad()
def forward_seconds(model: nn.Module, images: Tensor) -> float:
    """CPU time of one float forward."""
    return least_seconds(lambda: model(images))


def gemm_gflops() -> float:
    """The processor's speed on a product of matrices that fit in its cache."""
    left, right, out = torch.ones(1024, 768), torch.ones(768, 512), torch.empty(1024, 512)
    return 2 * left.numel() * 512 / least_seconds(lambda: torch.mm(left, right, out=out), 10) / 1e9


def irreducible_flops(left: Operand, right: Operand) -> int:
    """The FLOPs that no exact search of this product can save; see the docstring of `search.py`."""
    rows, inner, columns = left.values.shape[-2], left.values.shape[-1], right.values.shape[-2]
    product = rows * inner * columns
    searched = [(left, columns), (right, rows)]
    moments = sum(min(others * inner**2, product) for operand, others in searched if not operand.is_float)
    return 2 * math.prod(left.values.shape[:-2]) * (product + moments)


def floor(flops: int, forward: float, gflops: float, ours: float) -> dict[str, float]:
    """The floor in seconds. over_floor: our search and the forward that it needs, over the floor."""
    products = flops / gflops / 1e9
    return {
        "forward_seconds": forward,
        "product_flops": flops,
        "gemm_gflops": gflops,
        "product_seconds": products,
        "seconds": forward + products,
        "over_floor": (ours + forward) / (forward + products),
    }
