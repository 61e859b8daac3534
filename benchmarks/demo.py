"""Compare quantizers after softmax and GELU on the bundled model, over several random subsets of calibration images.

    python benchmarks/demo.py --seeds 0,1,2 --work DIR

The script runs `adalog demo` for each seed, with every quantizer at 6, 4 and 3 bits. It keeps finished seeds in DIR and
does not repeat them as long as the sources of the package stay the same. For each bits and method the result has the
mean and the standard deviation over seeds of top-1, agreement, bytes and seconds, and the loss of top-1 against full
precision in points.
"""

from benchmarks.publish import RESULTS, publish

import json
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Annotated

import typer

from adalog.study.doctor import machine
from adalog.study.levels import LEVEL_METHODS
from adalog.version import source_hash


def main(work: Annotated[Path, typer.Option()], seeds: str = "0,1,2", threads: int = 0) -> None:
    """Run `adalog demo` for each seed, and save means and deviations as benchmarks/results/demo.json."""
    runs = []
    for seed in seeds.split(","):
        target = work / f"seed{seed}-{source_hash()[:12]}.json"
        if not target.exists():
            command = [sys.executable, "-m", "adalog", "demo", "--seed", seed, "--threads", str(threads)]
            command += ["--bits", "w6a6,w4a4,w3a3", "--methods", ",".join(LEVEL_METHODS)]
            subprocess.run([*command, "--out", str(work / f"seed{seed}"), "--json", str(target)], check=True)
        runs.append(json.loads(target.read_text()))
    fp32 = runs[0]["fp32"]["top1"]
    rows = []
    for group in zip(*(run["rows"] for run in runs), strict=True):
        row = {"bits": group[0]["bits"], "method": group[0]["method"]}
        for name in ("top1", "agreement", "bytes", "seconds"):
            values = [entry[name] for entry in group]
            row[name] = {"mean": mean(values), "std": stdev(values) if len(values) > 1 else 0.0}
        row["points_lost"] = 100 * (fp32 - row["top1"]["mean"])
        rows.append(row)
    result = {
        "fp32": {"top1": fp32},
        "images": 2000,
        "calibration_images": 32,
        "seeds": [run["seed"] for run in runs],
        "rows": rows,
        "runs": runs,
        "machine": machine(),
    }
    publish(result, RESULTS / "demo.json")


if __name__ == "__main__":
    typer.run(main)
