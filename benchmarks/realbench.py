"""Measure how much accuracy quantization costs pretrained transformers on real images.

    python -m benchmarks.realbench --realbench DIR [--model deit_tiny:FOLDER] --bits w8a8 w6a6 w4a4 w3a3
        [--methods adalog uniform] [--seeds 3] [--work DIR] [--json FILE]

DIR, or the environment variable ADALOG_REALBENCH, names a folder with 2,000 labelled images: 1,000 support images, one
per ImageNet class, and 1,000 queries. Without --model it also has TinyViT-5M, which has no classifier: each query takes
the label of the support image with the nearest features. With --model NAME:FOLDER, the model is a classifier of
ImageNet's 1,000 classes: FOLDER has its weights as NAME*.safetensors, under the name of its timm architecture.

Each seed selects other support images: 32 calibrate, and stages of a method fit as many as they ask for, or all,
without their labels. For the float model and for each quantized model, the script reports top-1 on the queries; for a
quantized model also its agreement with the float model, McNemar's p against the float model and against `adalog` with
the same bits and seed, which queries it gets right (one bit each, hexadecimal), and the SQNR of every site. For a
classifier it adds the KL divergence from the float model, and the same measures on the support images that nothing
fitted. The script prints one JSON object and saves it as benchmarks/results/realbench.json, or realbench-NAME.json.
"""

from benchmarks.publish import RESULTS, publish
from benchmarks.real import PREPROCESSING, find_support, fit_at_most, load_classifier
from benchmarks.records import kept, p_value, packed

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from adalog import METHODS, Calibration, Config, Resources
from adalog.inputs.images import ImageSet, draw_indices
from adalog.model import quickest
from adalog.study.doctor import machine
from adalog.study.evaluate import Nearest, PreparedImages, divergence, in_batches, predict, score

IMAGES = 32


def load_model(folder: Path) -> nn.Module:
    """Load TinyViT, without a classifier, from a folder."""
    import timm

    (file,) = folder.glob("tiny_vit*.safetensors")
    network = timm.create_model("tiny_vit_5m_224", num_classes=0)
    network.load_state_dict(load_file(file))
    return network.eval()


@dataclass(frozen=True)
class RealBench:
    """A model and its images: support images calibrate, and queries evaluate.

    name: of the model. classifies: True if its outputs are scores of classes, False if they are features. labels: (N,).
    support: (N,) booleans.
    """

    name: str
    model: nn.Module
    classifies: bool
    images: ImageSet
    labels: Tensor
    support: Tensor
    preprocessing = PREPROCESSING

    @staticmethod
    def of(folder: Path, model: str | None = None) -> "RealBench":
        """Load the images of a folder, and TinyViT from it or the model NAME:FOLDER."""
        images, support = find_support(folder)
        name = model.partition(":")[0] if model else "tiny_vit"
        network = load_classifier(model).module if model else load_model(folder)
        return RealBench(name, network, bool(model), images, torch.tensor(images.labels), torch.tensor(support))

    def chosen(self, seed: int, count: int = IMAGES) -> list[int]:
        """Return the numbers of `count` support images that a seed selects."""
        pool = torch.nonzero(self.support).flatten().tolist()
        return [pool[index] for index in draw_indices(len(pool), count, seed)]

    def queries(self, count: int) -> ImageSet:
        """Return the first `count` queries, with their labels."""
        return self.images.select(torch.nonzero(~self.support).flatten()[:count].tolist())

    def calibration_images(self, seed: int, count: int = IMAGES) -> Tensor:
        """Return `count` support images that a seed selects, normalised."""
        return self.images.select(self.chosen(seed, count)).load(self.preprocessing)

    def outputs(self, network: Callable[[Tensor], Any], jobs: int, batch: int = 20) -> Tensor:
        """Return the outputs of a network for all images. jobs: batches that run at once."""
        images = PreparedImages(self.images, self.preprocessing)

        def run(numbers: range) -> Tensor:
            return predict(network, images(numbers), batch=batch)

        return torch.cat(in_batches(len(images), run, Resources(jobs), batch=batch))

    def classes(self, network: Callable[[Tensor], Any], jobs: int, batch: int = 20) -> Tensor:
        """Return the class that a network gives to each query."""
        return self.classes_of(self.outputs(network, jobs, batch))

    def classes_of(self, outputs: Tensor) -> Tensor:
        """Return the class of each query by the outputs for all images."""
        if self.classifies:
            return outputs[~self.support].argmax(1)
        return Nearest(outputs[self.support], self.labels[self.support])(outputs[~self.support])

    def divergences(self, outputs: Tensor, reference: Tensor, fitted: Sequence[int]) -> dict[str, Any]:
        """Return a classifier's KL divergence on the queries, and its measures on support images not fitted."""
        if not self.classifies:
            return {}
        kl = divergence(reference[~self.support], outputs[~self.support])
        rest = self.support.clone()
        rest[torch.tensor(fitted)] = False
        if not rest.any():
            return {"kl": kl}
        unseen = score(outputs[rest], self.labels[rest], reference[rest])
        measures = {"images": int(rest.sum()), "top1": unseen.top1.value, "agreement": unseen.agreement}
        return {"kl": kl, "support": {**measures, "kl": divergence(reference[rest], outputs[rest])}}

    @property
    def truth(self) -> Tensor:
        """The labels of the queries."""
        return self.labels[~self.support]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--realbench", type=Path, default=os.environ.get("ADALOG_REALBENCH"))
    parser.add_argument("--model", help="NAME:FOLDER of a classifier; default: TinyViT, in the folder of --realbench")
    parser.add_argument("--bits", nargs="+", default=["w8a8", "w6a6", "w4a4", "w3a3"])
    parser.add_argument("--methods", nargs="+", default=["adalog", "uniform"], choices=METHODS)
    parser.add_argument("--seed", type=int, default=0, help="the first seed of the calibration images")
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--work", type=Path, help="folder that keeps finished parts for later runs")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.realbench is None or not Path(given.realbench).is_dir():
        print(f"skipped: there is no folder {given.realbench}; give --realbench DIR or set ADALOG_REALBENCH")
        sys.exit(0)
    torch.set_num_threads(1)
    bench = RealBench.of(Path(given.realbench), given.model)

    def finished(name: str, key: dict[str, Any], make: Callable[[], Any]) -> Any:
        return kept(None if given.work is None else given.work / f"{name}.json", key, make)

    data = {"images": len(bench.images), "folder": Path(given.realbench).resolve().name, "model": bench.name}
    floats = torch.tensor(finished("fp32", data, lambda: bench.outputs(bench.model, given.jobs).tolist()))
    reference = bench.classes_of(floats)
    calibrations: dict[int, Calibration] = {}  # one seed at a time, made when a row is first measured

    def choices(bits: str, method: str) -> Config:
        return fit_at_most(Config.preset(bits, method), int(bench.support.sum()))

    def measured(bits: str, method: str, seed: int) -> dict[str, Any]:
        if seed not in calibrations:
            calibrations.clear()
            wanted = max(IMAGES, *(choices(bits, name).images_needed for name in given.methods))
            images = bench.calibration_images(seed, wanted)
            calibrations[seed] = Calibration(bench.model, images[:IMAGES], unlabelled=images, seed=seed)
        start = time.process_time()
        quantized = calibrations[seed].quantize(choices(bits, method), Resources(given.jobs))
        seconds = time.process_time() - start
        runs, executor, at_once = quickest(quantized, given.jobs)
        outputs = bench.outputs(runs, at_once)
        classes, fitted = bench.classes_of(outputs), bench.chosen(seed, choices(bits, method).images_needed)
        result = score(classes, bench.truth, reference)
        print(f"{bits} {method}, seed {seed}: {100 * result.top1.value:.1f} %, {seconds:.0f} s", file=sys.stderr)
        return {
            "bits": bits,
            "method": method,
            "seed": seed,
            "executor": executor or "fake quantization",
            "top1": result.top1.value,
            "agreement": result.agreement,
            "mcnemar_p": result.p_value,
            "right": packed(classes == bench.truth),
            "lost": result.lost,
            "gained": result.gained,
            **bench.divergences(outputs, floats, fitted),
            "cpu_seconds": round(seconds, 1),
            "sqnr": {entry.site: round(entry.sqnr, 2) for entry in quantized.ledger},
            "left": {entry.site: entry.left for entry in quantized.ledger},
        }

    rows: list[dict[str, Any]] = []
    seeds = range(given.seed, given.seed + given.seeds)
    for seed, bits, method in product(seeds, given.bits, given.methods):
        key = {**data, "config": choices(bits, method).to_json(), "seed": seed, "calibration_images": IMAGES}
        rows.append(finished(f"{bits}-{method}-{seed}", key, partial(measured, bits, method, seed)))
    adalog = {(row["bits"], row["seed"]): row for row in rows if row["method"] == "adalog"}
    for row in rows:
        other = adalog.get((row["bits"], row["seed"]), row)
        row["mcnemar_p_adalog"] = None if other is row else p_value(other, row)
    float_score = score(reference, bench.truth)
    result = {
        "model": bench.name,
        "fp32": {"top1": float_score.top1.value, "low": float_score.top1.low, "high": float_score.top1.high},
        "queries": len(bench.truth),
        "calibration_images": IMAGES,
        "seed": given.seed,
        "seeds": list(seeds),
        "rows": rows,
        "machine": machine(),
    }
    publish(result, given.json or RESULTS / f"realbench{f'-{bench.name}' if given.model else ''}.json")


if __name__ == "__main__":
    main()
