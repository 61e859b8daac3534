"""How `search.py` measures costs: CPU time, memory, the speed of products, and the floor below all searches.

And how it counts what a search did, from the outside: the library has no counters (`counted`).
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
    """A bar on standard error, and none where that is no terminal."""
    terminal = Console(stderr=True)
    return Progress(console=terminal, transient=True, disable=not terminal.is_terminal)


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


# --- what a search did -----------------------------------------------------------------------------------------------


@dataclass
class Counts:
    """What a search of one site did.

    points: how many candidates were scored on the output, {"sampled", "all"}: on a sample of the rows, or on all of
    them. shares: the same, each times the share of the rows that it was scored on. flops: those of all products of
    matrices, by dtype. A candidate of a weight has parameters for each of its rows and counts once.
    """

    points: defaultdict[str, float] = field(default_factory=partial(defaultdict, float))
    shares: defaultdict[str, float] = field(default_factory=partial(defaultdict, float))
    flops: defaultdict[str, int] = field(default_factory=partial(defaultdict, int))

    def to_json(self, rows: int) -> dict[str, Any]:
        """The counts of a site with this many rows. evaluations: the sum of candidates times rows."""
        kinds = {
            kind: {"candidates": round(self.points[kind]), "evaluations": round(self.shares[kind] * rows)}
            for kind in ("sampled", "all")
        }
        return {**totals(kinds), "rows": rows, **kinds, "flops": dict(self.flops)}


def totals(kinds: dict[str, dict[str, int]]) -> dict[str, int]:
    """The sums over kinds of scoring."""
    return {name: sum(kind[name] for kind in kinds.values()) for name in ("candidates", "evaluations")}


@dataclass(frozen=True)
class CountedError(ProductError):
    """A product's error that counts the candidates it scores.

    share: that of the site's rows that it looks at. part: that of the operand's own rows that it is about, for a large
    weight that is searched in slices (`by_rows`), or whose rows have different numbers of candidates (`loss_once`).
    """

    counts: Counts = field(default_factory=Counts, repr=False)
    share: float = 1.0
    part: float = 1.0

    def sample(self, rows: int, times: int = 1) -> ProductError:
        some = super().sample(rows, times)
        # The base has the rows, or the columns, that the sample has.
        return some if some is self else replace(some, share=self.share * some.base.numel() / self.base.numel())

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
    """Count what our searches do in this context.

    The wrapping costs some microseconds for each step and each product, of which a site has hundreds.
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
    """The rows of a site, those of all images together: tokens, or the places of a convolution's kernel."""
    shape = product.left.values.shape  # (T, I), (groups, T, I), or (images, heads, T, I)
    return shape[-2] * (shape[0] if len(shape) == 4 else 1)
