"""How long a quantized model takes, by each executor, and what each needs."""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from adalog import library
from adalog.model import QuantizedModel
from adalog.study import doctor

FAKE = "fake"  # not an executor: the quantized model in float, which computes what its integers stand for
FP32 = "fp32"  # the full-precision model beside it
_WARM = 2  # turns that do not count
_LEAST = 5  # turns that do
REST = 0.05  # seconds before a run of several threads


@dataclass(frozen=True)
class Times:
    """Medians of one run [s]: cpu, of all threads of the process together, and wall. repeats: how many there were."""

    cpu: float
    wall: float
    repeats: int


def in_turn(runs: Mapping[str, Callable[[], Any]], seconds: float, rest: float = 0.0) -> dict[str, Times]:
    """Times of several runs, which take turns: what else the machine does meets all of them alike.

    seconds: for each run on average; five turns are the least. Every other turn goes backwards. rest: seconds before
    each, so that threads of the one before no longer spin where it needs several.
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
    """The run while PyTorch has one thread: its others spin for a while where "native" has threads of its own."""

    def alone() -> Any:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return run()
        finally:
            torch.set_num_threads(before)

    return alone


def random_inputs(model: QuantizedModel, batch: int, seed: int = 0) -> list[Tensor]:
    """Inputs of the model's shapes and types: floats are normal noise, others zeros."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [((batch, *value.shape[1:]), value.dtype) for value in model.example]
    return [
        torch.randn(shape, generator=generator).to(dtype)
        if dtype.is_floating_point
        else torch.zeros(shape, dtype=dtype)
        for shape, dtype in shapes
    ]


def executors_here() -> tuple[list[str], dict[str, str]]:
    """What can be timed here, slowest first but for the reference, which is for checking; what cannot, and why."""
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
    """One row for each batch and executor, as JSON. full: the full-precision model, timed as "fp32" in the same turns.

    threads: of "native", while torch has one; the others take as many as torch is set to. A row's load_seconds are from
    `load` to the first answer; its weight_bytes what a run reads of the sites' weights; its cpu_ms and wall_ms are of
    one batch.
    Raises ValueError for an executor that does not run here, as `QuantizedModel.compile` does.
    """
    rows = []
    for batch in batches:
        made: dict[str, tuple[Callable[[], Any], int, float | None]] = {}
        for executor in executors:
            start = time.perf_counter()
            model = load()
            inputs = random_inputs(model, batch)
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
            inputs = random_inputs(load(), batch)
            count = sum(value.nbytes for value in full.parameters() if value.ndim > 1)
            made[FP32] = (lambda x=inputs: full(*x), count, None)  # type: ignore[misc]
        turns = {name: run for name, (run, *_) in made.items()}
        for name, times in in_turn(turns, seconds, REST if threads > 1 else 0.0).items():
            _, count, loading = made[name]
            row = {"executor": name, "batch": batch, **milliseconds(times, batch)}
            rows.append({**row, "weight_bytes": count, "load_seconds": loading})
    return rows


def milliseconds(times: Times, batch: int) -> dict[str, Any]:
    """A row's figures of time, as JSON."""
    return {
        "cpu_ms": 1e3 * times.cpu,
        "wall_ms": 1e3 * times.wall,
        "images_per_second": batch / times.wall,
        "repeats": times.repeats,
    }
