"""Measure how long each executor takes to run a quantized model."""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import nn

from adalog import library
from adalog.errors import DataError, one_line
from adalog.model import QuantizedModel
from adalog.study import doctor

FAKE = "fake"  # not an executor: the quantized model itself, which computes in float
FP32 = "fp32"  # the full-precision model
_WARM = 2  # warm-up turns, which are not timed
_LEAST = 5  # the least number of timed turns
REST = 0.05  # seconds to rest before each run that uses several threads


@dataclass(frozen=True)
class Times:
    """Median times of one run [s]: CPU time, summed over the threads, and elapsed time; and the number of runs."""

    cpu: float
    wall: float
    repeats: int


def in_turn(runs: Mapping[str, Callable[[], Any]], seconds: float, rest: float = 0.0) -> dict[str, Times]:
    """Time several runs that take turns, so that other load on the machine affects all of them alike.

    Every other turn calls the runs in reverse order.
    seconds: time to spend on each run, on average; each run gets at least five timed turns.
    rest: seconds to wait before each run, so that idle threads of the previous run stop spinning.
    """
    order, times = list(runs), {name: ([], []) for name in runs}  # type: ignore[var-annotated]
    turns, stop = 0, 0.0
    while turns < _WARM + _LEAST or time.perf_counter() < stop:
        if turns == _WARM:
            stop = time.perf_counter() + seconds * len(order)
        for name in order:
            time.sleep(rest)
            cpu, wall = time.process_time(), time.perf_counter()
            runs[name]()
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            if turns >= _WARM:
                times[name][0].append(cpu)
                times[name][1].append(wall)
        order.reverse()
        turns += 1
    return {name: Times(median(cpu), median(wall), len(cpu)) for name, (cpu, wall) in times.items()}


def on_one_thread(run: Callable[[], Any]) -> Callable[[], Any]:
    """Wrap a run so that PyTorch uses one thread in it; idle ones would compete with the threads of "native"."""

    def alone() -> Any:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return run()
        finally:
            torch.set_num_threads(before)

    return alone


def executors_here() -> tuple[list[str], dict[str, str]]:
    """Return the executors to time here, slowest first ("reference" is only for checks), and why others are missing."""
    available = doctor.executors()
    missing = {} if "native" in available else {"native": library.why()}
    return [FAKE, *(name for name in available if name != "reference")], missing


@torch.no_grad()
def bench(
    load: Callable[[], QuantizedModel],
    executors: Sequence[str],
    batches: Sequence[int],
    *,
    threads: int,
    seconds: float,
    full: nn.Module | None = None,
) -> list[dict[str, Any]]:
    """Return one row of times per batch size and executor, as JSON.

    load_seconds is the time from `load` to the first output, weight_bytes counts the weights that a run reads, and
    cpu_ms and wall_ms are per batch.
    threads: number of threads of "native", while PyTorch has one; the other executors use PyTorch's own setting.
    full: a full-precision model to time in the same turns, as "fp32". Raises DataError if it refuses the inputs.
    """
    rows = []
    for batch in batches:
        runs: dict[str, tuple[Callable[[], Any], int, float | None]] = {}
        for executor in executors:
            start = time.perf_counter()
            model = load()
            inputs = model.quantized.noise(batch)
            if executor == FAKE:
                run = functools.partial(model, *inputs)
                count = sum(model.program.tensors[name].nbytes for name in model.program.weights)
            else:
                choices = {"threads": threads, "batch": batch} if executor == "native" else {}
                compiled = model.compile(executor, **choices)
                run, count = functools.partial(compiled, *inputs), compiled.weight_bytes
            run()
            runs[executor] = (on_one_thread(run) if executor == "native" else run, count, time.perf_counter() - start)
        if full is not None:
            inputs = load().quantized.noise(batch)
            count = sum(value.nbytes for value in full.parameters() if value.ndim > 1)
            try:
                full(*inputs)
            except Exception as cause:
                shapes = ", ".join(str(tuple(value.shape)) for value in inputs)
                raise DataError(
                    f"the full-precision model does not accept the artifact's inputs {shapes}: {one_line(cause)}; give "
                    "the model that was quantized"
                ) from cause
            runs[FP32] = (lambda x=inputs: full(*x), count, None)  # type: ignore[misc]
        turns = {name: run for name, (run, *_) in runs.items()}
        for name, times in in_turn(turns, seconds, REST if threads > 1 else 0.0).items():
            _, count, loading = runs[name]
            row = {"executor": name, "batch": batch, **milliseconds(times, batch)}
            rows.append({**row, "weight_bytes": count, "load_seconds": loading})
    return rows


def milliseconds(times: Times, batch: int) -> dict[str, Any]:
    """Return the times of a row as JSON."""
    return {
        "cpu_ms": 1e3 * times.cpu,
        "wall_ms": 1e3 * times.wall,
        "images_per_second": batch / times.wall,
        "repeats": times.repeats,
    }
