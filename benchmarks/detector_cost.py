"""Measure the cost of quantizing a whole Mask R-CNN with a Swin-T backbone.

    python benchmarks/detector_cost.py [--bits w4a4] [--name mmdet:mask-swin-t]

The script quantizes every part of the detector on one thread, saves the result, loads it and runs it. The weights are
random, and the input is two images of 256 x 320 noise pixels. The result has the CPU seconds in total and until the end
of each part, the peak memory of the process, the size of the file, and the sites that stay float.
"""

from benchmarks.publish import RESULTS, publish

import resource
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import typer
from PIL import Image

from adalog import Config, Resources
from adalog.detection import zoo
from adalog.detection.detector import Detector
from adalog.detection.images import Resizing, batches_of
from adalog.detection.quantized import load, quantize_detector, save
from adalog.study.doctor import machine

SIZE = (256, 320)


def main(bits: str = "w4a4", name: str = "mmdet:mask-swin-t") -> None:
    """Measure the cost of quantizing a whole detector, and save it as benchmarks/results/detector-cost.json."""
    torch.set_num_threads(1)
    made = zoo.load_detector(name, pretrained=False)
    detector = Detector(made.parts, replace(made.settings, resizing=Resizing(short=SIZE[0], long=SIZE[1])))
    draw = np.random.default_rng(0)
    pictures = [Image.fromarray(draw.integers(0, 255, (*SIZE, 3), dtype=np.uint8)) for _ in range(2)]
    batches, parts = batches_of(pictures, detector.settings.resizing), dict[str, float]()
    begun = time.process_time()

    def watch(done: int, total: int, what: str) -> None:
        parts[what.partition(":")[0]] = round(time.process_time() - begun, 1)

    config = replace(Config.preset(bits), images=len(pictures))
    (quantized,) = quantize_detector(detector, batches, [config], Resources(progress=watch))
    with tempfile.TemporaryDirectory() as folder:
        size = save(quantized, Path(folder) / "detector")
        loaded = load(Path(folder) / "detector")
    found = [len(each) for batch in batches for each in loaded(batch)]
    seconds = time.process_time() - begun
    result = {
        "detector": name,
        "bits": config.bits,
        "images": len(pictures),
        "size": SIZE,
        "cpu_seconds": round(seconds, 1),
        "cpu_seconds_until_the_end_of": parts,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "bytes": size,
        "detections": found,
        "float_sites": {part: model.float_sites() for part, model in quantized.parts.items()},  # type: ignore[attr-defined]
        "refusals": {part: dict(model.refusals) for part, model in quantized.parts.items()},  # type: ignore[attr-defined]
        "machine": machine(),
    }
    publish(result, RESULTS / "detector-cost.json")


if __name__ == "__main__":
    typer.run(main)
