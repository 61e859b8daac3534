"""Compare two ways to choose the ranges with which a LayerNorm's scale is folded.

    python benchmarks/folds.py [--json FILE]

The script calibrates the bundled ViT on 32 images, with weights and activations of 3, 4, 6 and 8 bits. For every norm
it divides the squared error of the linear's output with a fold by the error without a fold:

- own: each channel has its own range, by its own error (`fold_ranges="own"`, as in `adalog-paper`).
- shared: all channels have the same range in standard deviations (`fold_ranges="deviations"`).

Each ratio is measured on the calibration images, and in "held_out" on 200 test images. The means over sites leave out
the head, which reads only one row per image.
"""

from benchmarks.publish import RESULTS, publish

from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean
from typing import Annotated, Any

import torch
import typer

from adalog import Calibration, Config
from adalog._quantize import sample_images
from adalog.calibration.calibration import SearchResult
from adalog.inputs import demo
from adalog.study.doctor import machine


def main(json_out: Annotated[Path, typer.Option("--json")] = RESULTS / "folds.json", seed: int = 0) -> None:
    """Measure how folds of norms change the error of the linears, and save it as benchmarks/results/folds.json."""
    torch.set_num_threads(1)
    model = demo.load_model()
    calibration = Calibration(model, sample_images(demo.calibration_images(), 32, seed), seed=seed)
    held_out = Calibration(model, demo.test_images()[0][:200])
    rows: list[dict[str, Any]] = []
    for bits in (3, 4, 6, 8):
        # So many rows prevent every fold.
        config = replace(Config.preset(f"w{bits}a{bits}"), fold_rows=10**9, stages=())
        sites = [pair.sites[0] for pair in calibration.pairs if not pair.refusal]
        plain = {searched.sites[0].name: searched for searched in calibration.search(config, sites)}
        folds = {}
        for name, ranges in (("own", "own"), ("shared", "deviations")):
            folding = replace(config, fold_rows=1, search=replace(config.search, fold_ranges=ranges))
            folds[name] = {each.sites[0].name: each for each in calibration.search(folding, sites)}
        errors = {
            site: {
                name: {
                    "calibration": fold[site].mean_square_error() / plain[site].mean_square_error(),
                    "held_out": judged(held_out, fold[site], config) / judged(held_out, plain[site], config),
                }
                for name, fold in folds.items()
            }
            for site in sites
        }
        row: dict[str, Any] = {"bits": bits, "sites": errors}
        for name in folds:
            for images in ("calibration", "held_out"):
                row[f"{name}_{images}"] = geometric_mean(
                    [errors[site][name][images] for site in sites if site != "head"]
                )
        rows.append(row)
    result = {"seed": seed, "calibration_images": 32, "held_out_images": 200, "rows": rows, "machine": machine()}
    publish(result, json_out)


def judged(held_out: Calibration, searched: SearchResult, config: Config) -> float:
    return held_out.evaluate(searched, config).mean_square_error()


if __name__ == "__main__":
    typer.run(main)
