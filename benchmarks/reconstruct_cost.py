"""Measure the cost of one step of reconstruction, on a block of DeiT-S with random weights at W4A4.

    python benchmarks/reconstruct_cost.py [--steps 15] [--images 32] [--seed 0] [--json FILE]

A short search on two images finds the block's quantizers. Then two runs take turns on a batch of noise images. One is a
forward and backward pass of the float block, with gradients of all its tensors and of its input. Training the block
cannot take less. The other is a step of `Reconstruction` with its optimizer. The result has the median and the least
CPU seconds of both on one thread, and the ratio of the medians.
"""

from benchmarks.publish import RESULTS, publish

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import timm
import torch
import typer
from torch import Tensor, nn

from adalog import Calibration, Config, Reconstruction, Search
from adalog.calibration.reconstruct import BlockInTraining
from adalog.calibration.values import Values
from adalog.device import multiplies_bfloat16
from adalog.graph.program import Program, Ref
from adalog.graph.rewrite import rewrite
from adalog.graph.sites import find_blocks
from adalog.graph.stretches import cut
from adalog.study.doctor import machine

MODEL = "deit_small_patch16_224"
NUMBER = 1  # index of the block; block 0 is the patch embedding


def seconds_of(work: Callable[[], object]) -> float:
    begun = time.process_time()
    work()
    return time.process_time() - begun


def float_pass(program: Program, given: Mapping[str, Tensor]) -> Callable[[], None]:
    """Return a forward and backward pass of the block, with gradients of all float tensors and of its input."""

    def leaf(value: Tensor) -> Tensor:
        return value.detach().requires_grad_() if value.is_floating_point() else value

    def run() -> None:
        free = replace(program, tensors={name: leaf(value) for name, value in program.tensors.items()})
        with torch.enable_grad():
            free.run([leaf(given[name]) for name in free.inputs]).square().mean().backward()

    return run


def block_in_training(model: nn.Module, noise: Tensor, choices: Reconstruction, seed: int = 0) -> BlockInTraining:
    """Return a block of a model before its training, with quantizers at W4A4 from a short search on two images."""
    config = replace(Config.preset("w4a4"), images=2, search=Search(rounds=1, steps=1, rough_rows=0), stages=())
    calibration = Calibration(model, noise[:2], seed=seed)
    assigned = calibration.assign(config)
    blocks = find_blocks(calibration.program)
    floats = Values(calibration.program, [noise], blocks=blocks)
    quantized = Values(rewrite(calibration.program, assigned), [noise], blocks=blocks, like=floats)
    names = {node.name for node in floats.operations(blocks[NUMBER]).nodes}
    here = [(group, found) for group, found in assigned if set(group.nodes) <= names]
    return BlockInTraining(calibration.program, floats, quantized, blocks[NUMBER], here, choices, seed)


def time_steps(
    model: nn.Module, noise: Tensor, batch: int, wait: Callable[[], object], steps: int = 30, warm: int = 6
) -> dict[str, Any]:
    """Return the milliseconds of a step of reconstruction of one block, on the device of the model and the noise.

    wait: waits for the device. warm: the number of first steps that are not timed; a GPU records a graph in the fourth.
    """
    choices = Reconstruction(images=len(noise), iterations=warm + steps + 1, batch=batch)
    block = block_in_training(model, noise, choices)
    taken = block.steps(1.0)
    for _ in range(warm):
        next(taken)
    wait()
    begun = time.perf_counter()
    for _ in range(steps):
        next(taken)
    wait()
    seconds = time.perf_counter() - begun
    recorded = block._replay is not None and block._replay.is_recorded
    return {"batch": batch, "ms_per_step": round(1000 * seconds / steps, 2), "recorded": recorded}


def main(steps: int = 15, images: int = 32, seed: int = 0, json: Path = RESULTS / "reconstruct-cost.json") -> None:
    """Measure the CPU seconds of one step of reconstruction, compared with a pass of the float block."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = timm.create_model(MODEL, pretrained=False, depth=2).eval()
    noise = torch.randn(images * 8 // 7 + 1, 3, 224, 224)  # every eighth image evaluates the block
    block = block_in_training(model, noise, Reconstruction(images=len(noise), iterations=steps + 1, batch=images), seed)
    values, start = block._values, block._in
    first = {name: value[:images] for name, value in block._exact.items()}
    alone = cut(values.program, [start], Ref(block._out), values.sizes(images))
    plain, taken = float_pass(alone, first), block.steps(1.0)
    next(taken)  # the first call costs more, so it is not timed
    plain()
    times = [(seconds_of(plain), seconds_of(lambda: next(taken))) for _ in range(steps)]
    floor, step = zip(*times, strict=True)
    result = {
        "model": MODEL,
        "bits": "w4a4",
        "images": images,
        "steps": steps,
        "seed": seed,
        "bfloat16": multiplies_bfloat16(noise.device),
        "cpu_seconds_of_a_step": {"median": median(step), "least": min(step)},
        "cpu_seconds_of_the_float_block": {"median": median(floor), "least": min(floor)},
        "ratio": median(step) / median(floor),
        "machine": machine(),
    }
    publish(result, json)


if __name__ == "__main__":
    typer.run(main)
