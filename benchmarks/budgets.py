"""Compare widths that adalog chooses per site with one width for all sites, at no more bytes and operations.

    python benchmarks/budgets.py --model demo|realbench|deit_tiny:FOLDER [--realbench DIR] [--bits w4a4 w3a3]
        [--methods adalog adalog++] [--seeds 3] [--judged 128] [--widths 2 3 4 6 8] [--counts 16 32 64] [--work DIR]
        [--json FILE]

The baseline is `adalog` with the bits of --bits at all sites. Its file size and the BOPs of one image are the two
limits within which the widths are chosen from --widths, and each method of --methods quantizes with these widths. In
each run 32 images calibrate, and --judged other images without labels measure the losses by which adalog chooses.
Stages of a method fit as many images as they ask for, or all. The models are:

- demo: the bundled model. Training images calibrate and choose. Results are for 2,000 test images.
- realbench: TinyViT (see `realbench.py`). Support images calibrate and choose. Results are for 1,000 queries.
- NAME:FOLDER: a classifier (see `realbench.py`), with the same images.

--seeds repeats the comparison with other random images. --counts repeats it for the first seed with other numbers of
images that choose. The script also tests the prediction behind the choice. It quantizes 20 random mixes of widths, with
one width for all operands of a site, and correlates their measured losses with the sums of the losses of single
operands. All these losses are measured on the images that choose.
"""

from benchmarks.publish import RESULTS, publish
from benchmarks.real import fit_at_most
from benchmarks.reconstruct import load_case, resumably
from benchmarks.records import kept

import argparse
import os
import random
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from adalog import METHODS, Calibration, Config, QuantizedModel, Resources
from adalog.graph.rewrite import Assigned
from adalog.inputs import demo
from adalog.model import quickest
from adalog.study.budget import Budget, budget_of, quantize_within
from adalog.study.doctor import machine
from adalog.study.evaluate import divergence, predict, score
from adalog.study.sensitivity import Sensitivity, at_width, sensitivity
from adalog.version import source_hash

IMAGES = 32  # the number of images that calibrate
MIXES = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="demo, realbench (TinyViT) or NAME:FOLDER of a classifier")
    parser.add_argument("--realbench", type=Path, default=os.environ.get("ADALOG_REALBENCH"))
    parser.add_argument("--bits", nargs="+", default=["w4a4", "w3a3"])
    parser.add_argument("--methods", nargs="+", default=["adalog"], choices=METHODS)
    parser.add_argument("--seeds", type=int, default=1, help="number of random subsets of images")
    parser.add_argument("--judged", type=int, default=128, help="number of images that choose the widths")
    parser.add_argument("--widths", nargs="+", type=int, default=[2, 3, 4, 6, 8])
    parser.add_argument("--counts", nargs="*", type=int, default=[], help="other numbers of images that choose")
    parser.add_argument("--work", type=Path, help="folder that keeps finished parts for later runs")
    parser.add_argument("--json", type=Path)
    resumably(parser.parse_args(), measure)


def measure(given: argparse.Namespace, work: Path) -> None:
    """Measure all rows, and publish them. work: the folder of finished rows and of finished parts of a row."""
    case = load_case(given.model, given.realbench and Path(given.realbench))
    model = given.model.partition(":")[0]
    about = {"model": model, "widths": given.widths}
    most = max([given.judged, *given.counts])

    def finished(name: str, key: dict[str, Any], make: Callable[[], Any]) -> Any:
        return kept(work / f"{model}-{name}.json", {**about, **key}, make)

    def place(name: str) -> Path:
        return work / f"{model}-{name}-{source_hash()[:12]}.partial"

    @cache
    def calibrated(seed: int) -> tuple[Calibration, torch.Tensor]:
        fitted = max(choices_of(bits, method).images_fitted for bits, method in product(given.bits, given.methods))
        drawn = case.drawn(max(IMAGES + most, fitted), seed)
        calibration = Calibration(case.model, drawn[:IMAGES], unlabelled=drawn[:fitted] if fitted else None, seed=seed)
        return calibration, drawn[IMAGES:]

    def choices_of(bits: str, method: str) -> Config:
        return fit_at_most(Config.preset(bits, method), case.pool)

    search = Config(stages=())  # the losses of single operands and of mixes are those of searches

    def alone(seed: int, count: int) -> tuple[dict[str, Any], float]:
        calibration, judged = calibrated(seed)
        start, searched = time.process_time(), 0.0
        for width in given.widths:  # search first, so that the seconds below include no search
            begun = time.process_time()
            resources = Resources(partial=place(f"search-{width}-{seed}"), progress=told(f"{width} bits"))
            calibration.assign(at_width(search, width), resources)
            searched += time.process_time() - begun
        resources = Resources(partial=place(f"rows-{count}-{seed}"), progress=told("alone"))
        found = sensitivity(calibration, search, [judged[:count]], given.widths, resources)
        return found.to_json(), round(time.process_time() - start - searched, 1)

    def chosen_by(seed: int, count: int = given.judged) -> tuple[Sensitivity, float]:
        key = {"seed": seed, "judged": count}
        found, seconds = finished(f"alone-{count}-{seed}", key, lambda: alone(seed, count))
        return Sensitivity.from_json(found), seconds

    @cache
    def reference() -> torch.Tensor:
        return torch.tensor(finished("fp32", {}, lambda: case.classes(case.model, 1).tolist()))

    def judge(quantized: QuantizedModel) -> dict[str, Any]:
        runs, executor, at_once = quickest(quantized, 1)
        result = score(case.classes(runs, at_once), case.labels, reference())
        assert result.top1 is not None
        found = {"top1": result.top1.value, "agreement": result.agreement, "executor": executor}
        if model == "demo":
            images = demo.test_images()[0]
            found["kl"] = divergence(predict(case.model, images), predict(runs, images, jobs=at_once))
        return found

    def measured(bits: str, method: str, seed: int, count: int) -> dict[str, Any]:
        calibration, _ = calibrated(seed)
        found, _ = chosen_by(seed, count)
        resources = Resources(partial=place(f"{bits}-{seed}"), progress=told(bits))
        uniform = calibration.quantize(Config.preset(bits), resources)
        size, bops = budget_of(uniform)
        resources = Resources(partial=place(f"{bits}-{method}-{seed}"), progress=told(f"{bits} {method}, budget"))
        chosen = quantize_within(calibration, choices_of(bits, method), found, Budget(size, bops), resources)
        row = {"bits": bits, "method": method, "seed": seed, "judged": count}
        row |= {"bytes_uniform": size, "bytes_budget": chosen.bytes}
        row |= {"bops_uniform": bops, "bops_budget": chosen.bops, "foretold": chosen.plan.totals.loss}
        for name, quantized in (("uniform", uniform), ("budget", chosen.model)):
            row |= {f"{what}_{name}": value for what, value in judge(quantized).items()}
        print({key: value for key, value in row.items() if "_" in key}, file=sys.stderr)
        return row

    def mixes() -> dict[str, Any]:
        """Return the predicted and the measured losses of random mixes of widths, on the images that choose."""
        calibration, judged = calibrated(0)
        found, _ = chosen_by(0)
        losses = {(row.unit, row.operand, row.bits): row.loss for row in found.rows}
        units = {site.site: unit for unit in found.units for site in unit.sites}

        def searched(width: int) -> dict[str, Any]:
            resources = Resources(partial=place(f"search-{width}-0"))
            return dict(_named(calibration.assign(at_width(search, width), resources)))

        by_width = {width: searched(width) for width in given.widths}
        judged = judged[: given.judged]
        expected = predict(case.model, judged)
        draws, pairs = random.Random(0), []
        for _ in range(MIXES):
            width_of = {unit.name: draws.choice(given.widths) for unit in found.units}
            mix = [(group, by_width[width_of[units[group.name].name]][group.name]) for group in calibration.groups]
            output = predict(QuantizedModel(calibration.build_program(mix, search)), judged)
            foretold = sum(
                losses.get((unit.name, kind, width_of[unit.name]), 0.0)
                for unit in found.units
                for kind in unit.operands
            )
            error = float((expected - output).square().sum() / expected.square().sum())
            pairs.append([foretold, divergence(expected, output) if found.measure == "kl" else error])
            print(pairs[-1], file=sys.stderr)
        return {"pairs": pairs, "spearman": spearman(*zip(*pairs, strict=True))}

    def row(bits: str, method: str, seed: int, count: int) -> Any:
        key = {"bits": bits, "method": method, "seed": seed, "judged": count}
        return finished(f"{bits}-{method}-{count}-{seed}", key, partial(measured, bits, method, seed, count))

    asked = product(range(given.seeds), given.bits, given.methods)
    rows = [row(bits, method, seed, given.judged) for seed, bits, method in asked]
    told_mixes = finished("mixes", {"judged": given.judged}, mixes)
    result = {
        model: rows,
        "spearman": {model: told_mixes["spearman"]},
        "mixes": told_mixes["pairs"],
        "counts": [row(bits, "adalog", 0, count) for count, bits in product(given.counts, given.bits)],
        "measure": chosen_by(0)[0].measure,
        "judged_by": given.judged,
        "rows": len(chosen_by(0)[0].rows),
        "cpu_seconds_of_rows": [chosen_by(seed)[1] for seed in range(given.seeds)],
        "machine": machine(),
    }
    publish(result, given.json or RESULTS / f"budgets-{model}.json")


def told(what: str) -> Callable[[int, int, str], None]:
    """Return a callback that prints the progress of a task to standard error."""
    begun = time.monotonic()

    def tell(done: int, total: int, name: str) -> None:
        if done % 20 == 0:
            print(f"{what}: {done} of {total}, {time.monotonic() - begun:.0f} s", file=sys.stderr)

    return tell


def _named(assigned: Assigned) -> list[tuple[str, Any]]:
    return [(group.name, assignment) for group, assignment in assigned]


def spearman(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    """Return Spearman's rank correlation of values without ties."""
    ranks = [np.argsort(np.argsort(values)) for values in (one, other)]
    return float(np.corrcoef(*ranks)[0, 1])


if __name__ == "__main__":
    main()
