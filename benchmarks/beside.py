"""Compare adalog's search with the direct search (`direct.py`) at every site: seconds, losses and counts."""

from benchmarks.direct import Direct
from benchmarks.measure import (
    Case,
    counted,
    floor,
    forward_seconds,
    gemm_gflops,
    irreducible_flops,
    keep_memory,
    measured,
    progress_bar,
    site_rows,
    totals,
)
from benchmarks.records import kept

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any
from unittest import mock

import torch

from adalog import Calibration, Config, Search, library
from adalog.baselines import ReleasedSearch
from adalog.device import multiplies_bfloat16
from adalog.quantizers import Assignment, elementwise
from adalog.search import forms
from adalog.search.operand import Operand
from adalog.search.product import Product


@dataclass(frozen=True)
class Ours:
    """Settings for a run of adalog's search.

    float32: compute all products in float32, never in bfloat16.
    unfused: let PyTorch do the work around the products, without the compiled kernels.
    """

    search: Search
    float32: bool = False
    unfused: bool = False

    @contextmanager
    def run(self) -> Iterator[None]:
        """Switch off bfloat16 products and compiled kernels, as set, while the context is open."""
        with ExitStack() as stack:
            if self.float32:
                stack.enter_context(mock.patch.object(forms, "multiplies_bfloat16", return_value=False))
            if self.unfused:
                stack.enter_context(mock.patch.object(elementwise, "_functions", dict))
            yield

    def to_json(self) -> dict[str, Any]:
        """Return the settings that are in effect here: the processor or the installation may lack a feature."""
        return {
            "steps": 1 + self.search.steps,
            "rounds": self.search.rounds,
            "bfloat16": not self.float32 and multiplies_bfloat16(torch.device("cpu")),
            "fused": not self.unfused and library.load()[0] is not None,
        }


SIX = Search(steps=5, rounds=3)  # the released code counts a grid and 5 steps as 6 steps
OURS = {
    "equals": Ours(SIX, float32=True),
    "default": Ours(Search()),
    "unfused": Ours(Search(), float32=True, unfused=True),
    "six": Ours(SIX),
}
EQUAL = "equals"  # same precision, kernels, steps and rounds as `direct_fused`


@torch.no_grad()
def measure_site(calibration: Calibration, held_out: Calibration, config: Config, name: str) -> dict[str, Any]:
    """Return the costs of both searches of a site's product, and the errors of the quantizers that they find."""
    runs: list[tuple[Operand, dict[str, Any]]] = []

    def directly(search: ReleasedSearch, product: Product, *, fused: bool = False) -> Assignment:
        direct = Direct(fused=fused)
        cost, found = measured(lambda: direct.search_product(product, search))
        runs.append((product.left, {**cost, "candidates": direct.candidates, "flops": direct.flops}))
        return found

    with mock.patch.object(ReleasedSearch, "search_product", directly):
        (reference,) = calibration.search(config, [name])

    def errors(found: Assignment) -> tuple[float, float]:
        searched = replace(reference, assignment=found)
        return searched.mean_square_error(), held_out.evaluate(searched, config).mean_square_error()

    theirs, rows = errors(reference.assignment), site_rows(reference.product)

    def ratios(found: Assignment) -> dict[str, float]:
        both = [1.0 if mine == other else mine / other for mine, other in zip(errors(found), theirs, strict=True)]
        return {"loss_ratio": both[0], "held_out_ratio": both[1]}

    def fresh() -> Product:
        """Return the product with copies of its operands, so that their caches are empty."""
        return replace(reference.product, left=replace(reference.product.left), right=replace(reference.product.right))

    # The run whose operand format had the least error.
    direct = next(cost for left, cost in runs if left is reference.product.left)
    assert isinstance(config.search, ReleasedSearch)
    found = directly(config.search, fresh(), fused=True)
    row: dict[str, Any] = {
        "sites": [site.name for site in reference.sites],
        "rows": rows,
        "direct": direct,
        "direct_fused": {**runs[-1][1], **ratios(found)},
        "irreducible_flops": irreducible_flops(reference.product.left, reference.product.right),
    }
    for kind, ours in OURS.items():
        product = fresh()
        with ours.run(), counted() as counts:
            cost, found = measured(partial(ours.search.search_product, product))
        candidates = configured_candidates(product.left, product.right, ours.search)
        row[kind] = {**cost, "candidates": candidates, "counts": counts.to_json(rows), **ratios(found)}
    return row


def configured_candidates(left: Operand, right: Operand, search: Search) -> int:
    """Return how many candidates the grid and the steps score on the output if the search never stops early.

    The number leaves out the walk and the rescaling that follow the steps. `counts` has the actual numbers.
    """
    searches = 0 if right.is_float else 1
    if not left.is_float:
        searches += search.rounds * (1 if right.is_float else 2)
    return searches * math.prod(search.init) * (1 + search.steps)


def compare(case: Case, config: Config, key: dict[str, Any], work: Path | None, seed: int) -> dict[str, Any]:
    """Run both searches at all sites, and return the sums and ratios of their costs and errors."""
    keep_memory()
    forward, gflops = forward_seconds(case.model, case.images), gemm_gflops()
    calibration, held_out = Calibration(case.model, case.images, seed=seed), Calibration(case.model, case.held_out)
    before, rows, done = measured(lambda: None)[0]["peak_rss_bytes"], {}, set()
    with progress_bar() as progress:
        task = progress.add_task("sites", total=len(calibration.sites))
        for site in calibration.sites:
            progress.update(task, description=site.name, completed=len(done))
            if site.name not in done:
                path = work and work / f"site-{site.name}.json"
                run = partial(measure_site, calibration, held_out, config, site.name)
                rows[site.name] = kept(path, key, run)
                done |= set(rows[site.name]["sites"])
    direct, fused_direct = ({name: row[kind] for name, row in rows.items()} for kind in ("direct", "direct_fused"))
    flops = sum(row["irreducible_flops"] for row in rows.values())

    def summary(kind: str) -> dict[str, Any]:
        ours = {name: row[kind] for name, row in rows.items()}
        seconds = total(ours, "seconds")
        return {
            "equal": kind == EQUAL,
            "search": OURS[kind].to_json(),
            "speedup": total(direct, "seconds") / seconds,
            "speedup_over_fused": total(fused_direct, "seconds") / seconds,
            "loss_ratio": loss_ratios(ours),
            "seconds": {
                "direct": total(direct, "seconds"),
                "direct_fused": total(fused_direct, "seconds"),
                "ours": seconds,
            },
            "candidates": {"direct": total(direct, "candidates"), "ours": total(ours, "candidates")},
            "counts": {"direct": direct_counts(rows), "ours": our_counts([row["counts"] for row in ours.values()])},
            "peak_rss_bytes": {
                "direct": max(row["peak_rss_bytes"] or 0 for row in direct.values()),
                "ours": max(row["peak_rss_bytes"] or 0 for row in ours.values()),
                "before": before,
            },
            "float_forwards": seconds / forward,
            "floor": floor(flops, forward, gflops, seconds),
            "sites": {
                name: {
                    "direct_seconds": direct[name]["seconds"],
                    "direct_fused_seconds": fused_direct[name]["seconds"],
                    "seconds": row["seconds"],
                    "direct_gflops": direct[name]["flops"] / direct[name]["seconds"] / 1e9,
                    "loss_ratio": row["loss_ratio"],
                    "held_out_ratio": row["held_out_ratio"],
                    "direct_candidates": direct[name]["candidates"],
                    "counts": row["counts"],
                }
                for name, row in ours.items()
            },
        }

    others = {kind: summary(kind) for kind in OURS if kind != "six"}
    made = total(direct, "flops")
    result = {**summary("six"), "gflops": made / total(direct, "seconds") / 1e9, "direct_flops": made, **others}
    return {**result, "direct_fused": {"loss_ratio": loss_ratios(fused_direct)}}


def total(rows: dict[str, dict[str, Any]], name: str) -> Any:
    """Return the sum of one cost over all sites."""
    return sum(row[name] for row in rows.values())


def loss_ratios(rows: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return the largest ratio of a loss to the direct search's loss, and the geometric mean of the ratios."""
    losses, unseen = ([row[name] for row in rows.values()] for name in ("loss_ratio", "held_out_ratio"))
    return {
        "max": max(losses),
        "geomean": geometric_mean(losses),
        "held_out_max": max(unseen),
        "held_out_geomean": geometric_mean(unseen),
    }


def direct_counts(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the counts of the direct search, which scores every candidate on all rows."""
    candidates = [row["direct"]["candidates"] for row in rows.values()]
    return {
        "candidates": sum(candidates),
        "evaluations": sum(row["direct"]["candidates"] * row["rows"] for row in rows.values()),
        "candidates_per_site": {"mean": sum(candidates) / len(candidates), "max": max(candidates)},
        "flops": total({name: row["direct"] for name, row in rows.items()}, "flops"),
    }


def our_counts(sites: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the counts of adalog's search, summed over all sites."""
    kinds = {
        kind: {name: sum(site[kind][name] for site in sites) for name in ("candidates", "evaluations")}
        for kind in ("sampled", "all")
    }
    candidates = [site["candidates"] for site in sites]
    made = sum(sum(site["flops"].values()) for site in sites)
    return {
        **totals(kinds),
        **kinds,
        "candidates_per_site": {"mean": sum(candidates) / len(candidates), "max": max(candidates)},
        "flops": made,
        "bfloat16_share": sum(site["flops"].get("bfloat16", 0) for site in sites) / made,
    }
