"""Measure the cost of a search and the floor below all searches, and count what a search does.

`search.py` uses this module. Costs are CPU time, memory, and the speed of matrix products. The library has no counters,
so `counted` wraps its functions.
"""

import ctypes
import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn

from adalog.search.objective import Candidates, Errors, ProductError
from adalog.search.operand import Operand
from adalog.search.product import Product

Result = TypeVar("Result")


@dataclass(frozen=True)
class Case:
    """A model, its calibration images, and held-out images."""

    model: nn.Module
    images: Tensor
    held_out: Tensor


def progress_bar() -> Progress:
    """Return a progress bar on standard error, which stays hidden unless standard error is a terminal."""
    terminal = Console(stderr=True)
    return Progress(console=terminal, transient=True, disable=not terminal.is_terminal)


def keep_memory() -> None:
    """Tell glibc to keep freed memory.

    Memory that goes back to the kernel causes page faults whenever it is used again.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        for parameter in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            library.mallopt(parameter, 1 << 30)


def peak_bytes() -> int | None:
    """Return the largest resident set of this process so far, or None if the system does not report it."""
    status = Path("/proc/self/status")
    found = re.search(r"^VmHWM:\s+(\d+) kB", status.read_text(), re.MULTILINE) if status.exists() else None
    return None if found is None else 1024 * int(found[1])


def measured(run: Callable[[], Result]) -> tuple[dict[str, Any], Result]:
    """Run a function, and return its cost {"seconds" of CPU time, "peak_rss_bytes"} and its result.

    Memory that glibc kept before is released first, so that it does not count.
    """
    library, reset = ctypes.CDLL(None), Path("/proc/self/clear_refs")
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
    peak = reset.exists()
    if peak:
        reset.write_text("5")  # resets the peak
    start = time.process_time()
    result = run()
    seconds = time.process_time() - start
    return {"seconds": seconds, "peak_rss_bytes": peak_bytes() if peak else None}, result


def least_seconds(run: Callable[[], object], times: int = 3) -> float:
    """Return the least CPU time of several runs, after one warm-up run."""
    run()
    found = []
    for _ in range(times):
        start = time.process_time()
        run()
        found.append(time.process_time() - start)
    return min(found)


@torch.no_grad()
def forward_seconds(model: nn.Module, images: Tensor) -> float:
    """Return the CPU time of one float forward."""
    return least_seconds(lambda: model(images))


def gemm_gflops() -> float:
    """Return the speed of a product of matrices that fit in the processor's cache, in 10^9 FLOPs per second."""
    left, right, out = torch.ones(1024, 768), torch.ones(768, 512), torch.empty(1024, 512)
    return 2 * left.numel() * 512 / least_seconds(lambda: torch.mm(left, right, out=out), 10) / 1e9


def irreducible_flops(left: Operand, right: Operand) -> int:
    """Return the FLOPs that no exact search of this product can save; see the docstring of `search.py`."""
    rows, inner, columns = left.values.shape[-2], left.values.shape[-1], right.values.shape[-2]
    product = rows * inner * columns
    searched = [(left, columns), (right, rows)]
    moments = sum(min(others * inner**2, product) for operand, others in searched if not operand.is_float)
    return 2 * math.prod(left.values.shape[:-2]) * (product + moments)


def floor(flops: int, forward: float, gflops: float, ours: float) -> dict[str, float]:
    """Return the floor in seconds. over_floor: the seconds of adalog's search and its forward over the floor."""
    products = flops / gflops / 1e9
    return {
        "forward_seconds": forward,
        "product_flops": flops,
        "gemm_gflops": gflops,
        "product_seconds": products,
        "seconds": forward + products,
        "over_floor": (ours + forward) / (forward + products),
    }


# --- counts of a search -----------------------------------------------------------------------------------------------


@dataclass
class Counts:
    """Counts of the search of one site.

    points: the number of candidates scored on the output, by {"sampled", "all"}: on a sample of the rows, or on all.
    shares: the same, with each candidate weighted by the share of the rows that it was scored on.
    flops: the FLOPs of all matrix products, by dtype.

    A candidate for a weight has parameters for each row of the weight and counts once.
    """

    points: defaultdict[str, float] = field(default_factory=partial(defaultdict, float))
    shares: defaultdict[str, float] = field(default_factory=partial(defaultdict, float))
    flops: defaultdict[str, int] = field(default_factory=partial(defaultdict, int))

    def to_json(self, rows: int) -> dict[str, Any]:
        """Return the counts of a site with this many rows. evaluations: the sum of candidates times rows."""
        kinds = {
            kind: {"candidates": round(self.points[kind]), "evaluations": round(self.shares[kind] * rows)}
            for kind in ("sampled", "all")
        }
        return {**totals(kinds), "rows": rows, **kinds, "flops": dict(self.flops)}


def totals(kinds: dict[str, dict[str, int]]) -> dict[str, int]:
    """Return the sums over both kinds of scoring."""
    return {name: sum(kind[name] for kind in kinds.values()) for name in ("candidates", "evaluations")}


@dataclass(frozen=True)
class CountedError(ProductError):
    """A product's error that counts the candidates it scores.

    share: the share of the site's rows that this error uses.
    part: the share of the operand's own rows that this error covers. It is below 1 if a large weight is searched in
        slices (`by_rows`), or if the rows of a weight have different numbers of candidates (`loss_once`).
    """

    counts: Counts = field(default_factory=Counts, repr=False)
    share: float = 1.0
    part: float = 1.0

    def sample(self, rows: int, times: int = 1) -> ProductError:
        some = super().sample(rows, times)
        # The base has the same rows, or columns, as the sample.
        return (
            some if some is self else replace(some, share=self.share * some.form.base.numel() / self.form.base.numel())
        )

    def of_rows(self, rows: slice | Tensor) -> ProductError:
        some = super().of_rows(rows)
        return replace(some, part=self.part * len(some.left) / len(self.left))

    def loss(self, candidates: Candidates, points: Tensor) -> Tensor:
        self._count(points)
        return super().loss(candidates, points)

    def loss_by(self, errors: Callable[[Tensor], Errors]) -> Callable[[Tensor], Tensor]:
        score = super().loss_by(errors)

        def loss(points: Tensor) -> Tensor:
            self._count(points)
            return score(points)

        return loss

    def _count(self, points: Tensor) -> None:
        kind = "all" if self.share == 1 else "sampled"
        self.counts.points[kind] += len(points) * self.part
        self.counts.shares[kind] += len(points) * self.part * self.share


@contextmanager
def counted() -> Iterator[Counts]:
    """Count the candidates and products of adalog's searches while the context is open.

    The wrappers slow each step and each product down slightly.
    """
    counts, of, multiply = Counts(), ProductError.of, torch.Tensor.__matmul__

    def watched(*args: Any, **choices: Any) -> ProductError:
        return CountedError(**vars(of(*args, **choices)), counts=counts)

    def multiplied(left: Tensor, right: Tensor) -> Tensor:
        product = multiply(left, right)
        counts.flops[str(left.dtype).removeprefix("torch.")] += 2 * product.numel() * left.shape[-1]
        return product

    with (
        mock.patch.object(ProductError, "of", staticmethod(watched)),
        mock.patch.object(torch.Tensor, "__matmul__", multiplied),
    ):
        yield counts


def site_rows(product: Product) -> int:
    """Return the number of rows of a site over all images: tokens, or positions of a convolution's kernel."""
    shape = product.left.values.shape  # (T, I), (groups, T, I), or (images, heads, T, I)
    return shape[-2] * (shape[0] if len(shape) == 4 else 1)
