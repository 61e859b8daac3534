"""Measure top-1 at 3 bits with only the weights quantized, with only the activations quantized, and with both.

    python benchmarks/sides.py --methods adalog repq-vit ptq4vit [--json F]

The script evaluates the bundled ViT on its 2,000 test images. It reports the mean and the standard deviation over three
random subsets of 32 calibration images. The result explains why the methods' order in Table 1 at W3/A3 differs from the
published order.
"""

from benchmarks.publish import RESULTS, publish
from benchmarks.records import statistics

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adalog import METHODS, Calibration, Config
from adalog._quantize import sample_images
from adalog.inputs import demo
from adalog.model import quickest
from adalog.study.doctor import machine
from adalog.study.evaluate import predict

BITS = ("w3a32", "w32a3", "w3a3")
SEEDS = range(3)


def top1(logits: Tensor, labels: Tensor) -> float:
    return float((logits.argmax(1) == labels).double().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=["adalog", "repq-vit", "ptq4vit"], choices=METHODS)
    parser.add_argument("--json", type=Path, default=RESULTS / "sides.json")
    given = parser.parse_args()
    torch.set_num_threads(1)
    model, (images, labels) = demo.load_model(), demo.test_images()
    found: dict[tuple[str, str], list[float]] = {(method, bits): [] for method in given.methods for bits in BITS}
    for seed in SEEDS:
        calibration = Calibration(model, sample_images(demo.calibration_images(), 32, seed), seed=seed)
        for (method, bits), values in found.items():
            runs, _, at_once = quickest(calibration.quantize(Config.preset(bits, method)), 1)
            values.append(top1(predict(runs, images, jobs=at_once), labels))
    rows: list[dict[str, Any]] = [
        {"method": method, "bits": bits, "top1": statistics(values)} for (method, bits), values in found.items()
    ]
    result = {
        "fp32": top1(predict(model, images), labels),
        "images": len(labels),
        "seeds": [*SEEDS],
        "rows": rows,
        "machine": machine(),
    }
    publish(result, given.json)


if __name__ == "__main__":
    main()
