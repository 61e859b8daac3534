"""Compare the executor "native" with the limits of this processor, on one thread.

    python benchmarks/limits.py [--model timm:deit_small_patch16_224 demo] [--bits w4a4] [--batch 1 8] [--level L]
        [--seconds 10] [--json F] [--work DIR]

"roofs" has the rates that one thread reaches in loops that do nothing else, in units of 10^9 per second (see
`roof.py`): products of two bytes, values of 2^x and of erf, and bytes read from each cache and from memory.

Each row is a model at a batch size, with these fields:

- products_ms: the time of all integer products at the roofs.
- values_ms: the time of 2^x for each score of a softmax, and of erf for each value of an activation function.
- traffic_ms: the time to read operands and weights and to write results, once each.
- limit_ms: for each call the larger of two times, products plus values or traffic; summed over all calls.
- ms, over_limit: the measured time of a run, and this time over limit_ms.
- operations: the same numbers by kernel.

A time is the minimum of many runs, in CPU seconds of the thread, so that other load on the machine has little effect.
"load" is the number of processes that ran or waited, before and after the measurement. A timm model has random weights,
and is quantized as in `runtime.py`.
"""

from benchmarks import roof
from benchmarks.publish import RESULTS, publish
from benchmarks.runtime import SEED, artifact_of
from benchmarks.trace import by_operation, trace

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from adalog import load
from adalog.study.doctor import machine


def rows_of(model: str, bits: str, batches: Sequence[int], roofs: roof.Roofs, seconds: float, work: Path) -> list[Any]:
    """Return a row for each batch size, without the rows of single calls."""
    rows, path = [], artifact_of(model, bits, work)
    for batch in batches:
        found = trace(load(path), batch, roofs, seconds)
        told = {name: value for name, value in found.items() if name not in ("rows", "shapes")}
        rows.append({"model": model, "bits": bits, **told, "operations": by_operation(found)})
    return rows


def loads() -> list[float]:
    """Return the mean number of processes that ran or waited in the last 1, 5 and 15 minutes."""
    return [round(value, 2) for value in os.getloadavg()]


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["timm:deit_small_patch16_224", "demo"])
    parser.add_argument("--bits", nargs="+", default=["w4a4"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--level", help="level of the kernels; default: the fastest one that runs here")
    parser.add_argument("--seconds", type=float, default=10, help="seconds to spend on each row; at least five runs")
    parser.add_argument("--json", type=Path, help="file to write instead of benchmarks/results/limits.json")
    parser.add_argument("--work", type=Path, help="folder that keeps the artifacts for later runs")
    asked = parser.parse_args(given)
    torch.set_num_threads(1)
    before, rows = loads(), []
    roofs = roof.measure(asked.level)
    with tempfile.TemporaryDirectory() as folder:
        for model in asked.model:
            for bits in asked.bits:
                rows += rows_of(model, bits, asked.batch, roofs, asked.seconds, asked.work or Path(folder))
    told = {"roofs": roofs.json(), "rows": rows, "threads": 1, "load": {"before": before, "after": loads()}}
    publish({**told, "seed": SEED, "machine": machine()}, asked.json or RESULTS / "limits.json")


if __name__ == "__main__":
    main()
