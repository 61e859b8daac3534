"""How long a quantized model takes, by each executor, and what each needs."""

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
from adalog.export.noise import noise_like
from adalog.model import QuantizedModel
from adalog.study import doctor

FAKE = "fake"  # no executor, but the quantized model itself, which computes in float what the integers stand for
FP32 = "fp32"  # the full-precision model
_WARM = 2  # turns to warm up, which do not count
_LEAST = 5  # turns that count, at least
REST = 0.05  # seconds of rest before a run that has several threads


@dataclass(frozen=True)
class Times:
    """Median times of a run [s]. cpu: all threads of the process together; wall: elapsed. repeats: number of runs."""

    cpu: float
    wall: float
    repeats: int


def in_turn(runs: Mapping[str, Callable[[], Any]], seconds: float, rest: float = 0.0) -> dict[str, Times]:
    """Times of several runs that take turns, so that other load on the machine affects all of them alike.

    seconds: to spend on each run, on average; there are five turns at least. Every other turn goes backwards. rest:
    seconds to wait before each run, in which idle threads of the run before stop spinning.
    """
    order, found = list(runs), {name: ([], []) for name in runs}  # type: ignore[var-annotated]
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
                found[name][0].append(cpu)
                found[name][1].append(wall)
        order.reverse()
        turns += 1
    return {name: Times(median(cpu), median(wall), len(cpu)) for name, (cpu, wall) in found.items()}


def on_one_thread(run: Callable[[], Any]) -> Callable[[], Any]:
    """The run with PyTorch set to one thread meanwhile: idle ones would spin beside the threads of "native"."""

    def alone() -> Any:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return run()
        finally:
            torch.set_num_threads(before)

    return alone


def executors_here() -> tuple[list[str], dict[str, str]]:
    """What can be timed here, slowest first, but not the reference, a tool for checks; and what cannot, and why."""
    here = doctor.executors()
    missing = {} if "native" in here else {"native": library.why()}
    return [FAKE, *(name for name in here if name != "reference")], missing


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
    """One row per batch size and executor, as JSON. full: a full-precision model to time as "fp32" in the same turns.

    threads: those of "native", while torch has one; the other executors use as many as torch is set to. In a row,
    load_seconds is the time from `load` to the first answer, weight_bytes what a run reads of the sites' weights, and
    cpu_ms and wall_ms are per batch.
    Raises ValueError for an executor that does not run here, as `QuantizedModel.compile` does.
    """
    rows = []
    for batch in batches:
        made: dict[str, tuple[Callable[[], Any], int, float | None]] = {}
        for executor in executors:
            start = time.perf_counter()
            model = load()
            inputs = noise_like(model.quantized, batch)
            if executor == FAKE:
                network: nn.Module = model
                count = sum(model.program.tensors[name].nbytes for name in model.program.weights)
            else:
                choices = {"threads": threads, "batch": batch} if executor == "native" else {}
                network = compiled = model.compile(executor, **choices)
                count = compiled.weight_bytes
            network(*inputs)
            run = functools.partial(network, *inputs)
            made[executor] = (on_one_thread(run) if executor == "native" else run, count, time.perf_counter() - start)
        if full is not None:
            inputs = noise_like(load().quantized, batch)
            count = sum(value.nbytes for value in full.parameters() if value.ndim > 1)
            try:
                full(*inputs)
            except Exception as cause:
                shapes = ", ".join(str(tuple(value.shape)) for value in inputs)
                raise DataError(
                    f"the full-precision model does not take the artifact's inputs {shapes}: {one_line(cause)}; give "
                    "the model that was quantized"
                ) from cause
            made[FP32] = (lambda x=inputs: full(*x), count, None)  # type: ignore[misc]
        turns = {name: run for name, (run, *_) in made.items()}
        for name, times in in_turn(turns, seconds, REST if threads > 1 else 0.0).items():
            _, count, loading = made[name]
            row = {"executor": name, "batch": batch, **milliseconds(times, batch)}
            rows.append({**row, "weight_bytes": count, "load_seconds": loading})
    return rows


def milliseconds(times: Times, batch: int) -> dict[str, Any]:
    """The times of a row, as JSON."""
    return {
        "cpu_ms": 1e3 * times.cpu,
        "wall_ms": 1e3 * times.wall,
        "images_per_second": batch / times.wall,
        "repeats": times.repeats,
    }
