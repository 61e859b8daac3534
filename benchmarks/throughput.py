"""Measure the throughput of the executor "native" with several threads, models and processes on one machine.

    python benchmarks/throughput.py [--model timm:deit_small_patch16_224] [--bits w4a4] [--batch 1 8] [--rounds 5]
        [--seconds 3] [--json F] [--work DIR]

All processes start first and then wait. Each of them loads the artifact as a pack with `adalog.run`, without PyTorch.
Then the kinds take turns, --rounds times, and each kind runs for --seconds:

- one: one process of one thread.
- two, four: two or four processes of one thread each at the same time. "two" is the capacity of two cores, which share
  caches, memory and power.
- threads: one process with two threads on each image.
- models: one process that loads the artifact twice. Two Python threads call one model each, and each model has one
  thread.

The fields of a row are:

- images_per_second: the median over rounds, by wall time.
- over_two: the median of the throughput over the throughput of "two" in the same round.
- idle: the CPU time that the process with two threads takes while it waits, as a share of the waiting time.

"load" is the number of processes that ran or waited, before and after the measurement; other load on the machine
affects the results. A timm model has random weights, and is quantized as in `runtime.py`.
"""

from benchmarks.publish import RESULTS, publish
from benchmarks.runtime import SEED, artifact_of

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from adalog import export, load
from adalog.study.doctor import machine

# The number of processes of a kind, of threads of each model, and of models in each process.
KINDS = {"one": (1, 1, 1), "two": (2, 1, 1), "four": (4, 1, 1), "threads": (1, 2, 1), "models": (1, 1, 2)}
# The code of a process. It reads a number of seconds from standard input and runs for that long. Then it prints its
# images per second, and the share of the CPU that it took while it waited.
_WORKER = """
import json, sys, threading, time
import numpy as np
import adalog.run
models = [adalog.run.load(FILE, threads=THREADS) for _ in range(MODELS)]
images = np.random.default_rng(0).standard_normal(SHAPE, dtype=np.float32)
for model in models:
    model(images)
print("ready", flush=True)

def call(model, end, counts):
    while time.perf_counter() < end:
        model(images)
        counts.append(len(images))

waited, spent = time.perf_counter(), time.process_time()
for line in sys.stdin:
    begun = time.perf_counter()
    idle = (time.process_time() - spent) / (begun - waited)
    counts = []
    threads = [threading.Thread(target=call, args=(model, begun + float(line), counts)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - begun
    print(json.dumps([sum(counts) / seconds, idle]), flush=True)
    waited, spent = time.perf_counter(), time.process_time()
"""


class Workers:
    """The processes of one kind, which wait until `run` is called."""

    def __init__(self, kind: str, file: Path, shape: Sequence[int]):
        count, threads, models = KINDS[kind]
        given = f"FILE, SHAPE = {str(file)!r}, {tuple(shape)}\n"
        given += f"THREADS, MODELS = {threads}, {models}\n"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        command = [sys.executable, "-c", given + _WORKER]
        self._processes = [
            subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(count)
        ]
        for process in self._processes:
            if self._line(process) != "ready":
                raise RuntimeError(f"a process of {kind!r} did not start; its error is printed above")

    @staticmethod
    def _line(process: "subprocess.Popen[str]") -> str:
        assert process.stdout is not None
        return process.stdout.readline().strip()

    def run(self, seconds: float) -> tuple[float, float]:
        """Run all processes for this number of seconds.

        Returns their images per second in total, and the largest CPU share that one of them took while it waited.
        """
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{seconds}\n")
            process.stdin.flush()
        found = [json.loads(self._line(process)) for process in self._processes]
        return sum(rate for rate, _ in found), max(idle for _, idle in found)

    def close(self) -> None:
        for process in self._processes:
            process.communicate()


def measured(file: Path, batch: int, rounds: int, seconds: float) -> dict[str, Any]:
    """Measure all kinds at one batch size, and return their row."""
    pack = file.with_suffix(f".{batch}.adalog")
    pack.write_bytes(export.to_pack(file, (batch,)))
    shape = (batch, *load(file).example[0].shape[1:])
    workers = {kind: Workers(kind, pack, shape) for kind in KINDS}
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for turn in range(rounds):
        for kind in KINDS if turn % 2 else reversed(KINDS):
            time.sleep(0.2)
            found[kind].append(workers[kind].run(seconds))
    for each in workers.values():
        each.close()
    two = [rate for rate, _ in found["two"]]
    return {
        "batch": batch,
        "images_per_second": {kind: median(rate for rate, _ in runs) for kind, runs in found.items()},
        "over_two": {
            kind: median(rate / beside for (rate, _), beside in zip(runs, two, strict=True))
            for kind, runs in found.items()
            if kind != "two"
        },
        "idle": median(idle for _, idle in found["threads"]),
    }


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="timm:deit_small_patch16_224")
    parser.add_argument("--bits", default="w4a4")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--json", type=Path, help="file to write instead of benchmarks/results/throughput.json")
    parser.add_argument("--work", type=Path, help="folder that keeps the artifacts for later runs")
    asked = parser.parse_args(given)
    with tempfile.TemporaryDirectory() as folder:
        file = artifact_of(asked.model, asked.bits, asked.work or Path(folder))
        before = os.getloadavg()
        rows = [measured(file, batch, asked.rounds, asked.seconds) for batch in asked.batch]
    result: dict[str, Any] = {"model": asked.model, "bits": asked.bits, "seed": SEED, "rows": rows}
    result |= {"load": [before, os.getloadavg()], "machine": machine()}
    publish(result, asked.json or RESULTS / "throughput.json")


if __name__ == "__main__":
    main()
