"""How much accuracy quantization costs a real pretrained transformer on real images.

    python benchmarks/realbench.py --realbench DIR --bits w8a8 w6a6 w4a4 w3a3 [--methods adalog uniform] [--seeds 3]
        [--json FILE]

DIR, or the environment variable ADALOG_REALBENCH, names a folder with TinyViT-5M, which has no classifier, and 2,000
labelled images. Each query takes the label of the support image whose features are nearest. 32 support images
calibrate; each seed draws others. Stages of a method fit as many support images as they ask for, or all of them,
without their labels. Prints one JSON object and saves it as benchmarks/results/realbench.json: top-1 of the float model
and of each quantized model; for a quantized model also its agreement with the float one, McNemar's p against the float
one and against `adalog` at the same bits and of the same draw, which queries it gets right (one bit each, hexadecimal),
and the SQNR of every site. `--work DIR` keeps finished rows as long as the sources of the package are the same.
"""

from benchmarks.publish import RESULTS, publish

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from adalog import METHODS, Calibration, Config
from adalog.inputs.images import ImageSet, Preprocessing, find_images
from adalog.model import quickest
from adalog.study.doctor import machine
from adalog.study.evaluate import Nearest, predict, score
from adalog.study.tables import kept, p_value, packed

IMAGES = 32


def load_model(folder: Path) -> nn.Module:
    import timm

    model = timm.create_model("tiny_vit_5m_224", num_classes=0)
    model.load_state_dict(load_file(folder / "tiny_vit_5m_224_in22k.safetensors"))
    return model.eval()


@dataclass(frozen=True)
class RealBench:
    """The model, and its images: support images calibrate and give labels, query images are labelled.

    support: (N,) booleans, whether an image is one of the support. labels: (N,).
    """

    model: nn.Module
    images: ImageSet
    labels: Tensor
    support: Tensor
    preprocessing = Preprocessing(size=(224, 224), resize=256)

    @staticmethod
    def of(folder: Path) -> "RealBench":
        images = find_images(folder)
        support = torch.tensor([path.parent.name == "support" for path in images.paths])
        return RealBench(load_model(folder), images, torch.tensor(images.labels), support)

    def calibration_images(self, seed: int, count: int = IMAGES) -> Tensor:
        """`count` support images, drawn with the seed and normalised."""
        pool = self.images.select(torch.nonzero(self.support).flatten().tolist())
        return pool.sample(count, seed).load(self.preprocessing)

    def classes(self, network: Callable[[Tensor], Any], jobs: int, batch: int = 20) -> Tensor:
        """The label that the features of a network give to each query. jobs: batches that run at once."""
        features = predict(network, self.images.batches(self.preprocessing, batch=batch, jobs=jobs), jobs=jobs)
        return Nearest(features[self.support], self.labels[self.support])(features[~self.support])

    @property
    def truth(self) -> Tensor:
        """The labels of the queries."""
        return self.labels[~self.support]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--realbench", type=Path, default=os.environ.get("ADALOG_REALBENCH"))
    parser.add_argument("--bits", nargs="+", default=["w8a8", "w6a6", "w4a4", "w3a3"])
    parser.add_argument("--methods", nargs="+", default=["adalog", "uniform"], choices=METHODS)
    parser.add_argument("--seed", type=int, default=0, help="that of the first draw of calibration images")
    parser.add_argument("--seeds", type=int, default=1, help="number of draws")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--json", type=Path, default=RESULTS / "realbench.json")
    given = parser.parse_args()
    if given.realbench is None or not Path(given.realbench).is_dir():
        print(f"skipped: there is no folder {given.realbench}; give --realbench DIR or set ADALOG_REALBENCH")
        sys.exit(0)
    torch.set_num_threads(1)
    bench = RealBench.of(Path(given.realbench))

    def finished(name: str, key: dict[str, Any], make: Callable[[], Any]) -> Any:
        return kept(None if given.work is None else given.work / f"{name}.json", key, make)

    data = {"images": len(bench.images), "folder": Path(given.realbench).resolve().name}
    reference = torch.tensor(finished("fp32", data, lambda: bench.classes(bench.model, given.jobs).tolist()))
    calibrations: dict[int, Calibration] = {}  # one seed at a time, made when a row is first measured

    def choices(bits: str, method: str) -> Config:
        config = Config.preset(bits, method)
        fitted = min(config.images_fitted, int(bench.support.sum()))
        return config.with_fitted_images(fitted) if fitted else config

    def measured(bits: str, method: str, seed: int) -> dict[str, Any]:
        if seed not in calibrations:
            calibrations.clear()
            wanted = max(IMAGES, *(choices(bits, name).images_needed for name in given.methods))
            images = bench.calibration_images(seed, wanted)
            calibrations[seed] = Calibration(bench.model, images[:IMAGES], unlabelled=images, seed=seed)
        start = time.process_time()
        quantized = calibrations[seed].quantize(choices(bits, method), jobs=given.jobs)
        seconds = time.process_time() - start
        runs, executor, at_once = quickest(quantized, given.jobs)
        answers = bench.classes(runs, at_once)
        result = score(answers, bench.truth, reference)
        print(f"{bits} {method}, seed {seed}: {100 * result.top1.value:.1f} %, {seconds:.0f} s", file=sys.stderr)
        return {
            "bits": bits,
            "method": method,
            "seed": seed,
            "executor": executor or "fake quantization",
            "top1": result.top1.value,
            "agreement": result.agreement,
            "mcnemar_p": result.p_value,
            "right": packed(answers == bench.truth),
            "lost": result.lost,
            "gained": result.gained,
            "seconds": round(seconds, 1),
            "sqnr": {entry.site: round(entry.sqnr, 2) for entry in quantized.ledger},
            "left": {entry.site: entry.left for entry in quantized.ledger},
        }

    rows: list[dict[str, Any]] = []
    seeds = range(given.seed, given.seed + given.seeds)
    for seed, bits, method in product(seeds, given.bits, given.methods):
        key = {**data, "config": choices(bits, method).to_json(), "seed": seed, "calibration_images": IMAGES}
        rows.append(finished(f"{bits}-{method}-{seed}", key, partial(measured, bits, method, seed)))
    beside = {(row["bits"], row["seed"]): row for row in rows if row["method"] == "adalog"}
    for row in rows:
        other = beside.get((row["bits"], row["seed"]), row)
        row["mcnemar_p_adalog"] = None if other is row else p_value(other, row)
    float_score = score(reference, bench.truth)
    result = {
        "fp32": {"top1": float_score.top1.value, "low": float_score.top1.low, "high": float_score.top1.high},
        "queries": len(bench.truth),
        "calibration_images": IMAGES,
        "seed": given.seed,
        "seeds": list(seeds),
        "rows": rows,
        "machine": machine(),
    }
    publish(result, given.json)


if __name__ == "__main__":
    main()
