"""Evaluate the bundled detector, quantized by several methods, by COCO's average precision on synthetic scenes.

    python benchmarks/detection.py [--bits w6a6,w4a4,w3a3] [--methods adalog,repq-vit,...] [--seeds 1] [--work DIR]

Every part of the detector is quantized with 32 scenes and evaluated on 300 others. Each part runs on the fastest
executor that supports it. "below_adalog" compares a row with `adalog` at the same bits and seed: it has the 2.5th, 50th
and 97.5th percentiles of the difference in AP over 300 resamplings of the scenes. Both methods use the same
resamplings.
"""

from benchmarks.publish import RESULTS, publish
from benchmarks.records import kept

import contextlib
import io
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from adalog import Config
from adalog.detection import coco, demo
from adalog.detection.demo.scenes import scene
from adalog.detection.detector import Detector
from adalog.detection.quantized import fastest, quantize_detector, save
from adalog.inputs.images import draw_indices
from adalog.study.doctor import machine

METHODS = "adalog,repq-vit,ptq4vit,fq-vit,uniform,minmax,percentile"
IMAGES, RESAMPLED = 32, 300


class Judge:
    """Evaluates detections on the test scenes, and on resamplings of these scenes."""

    def __init__(self) -> None:
        self.scenes = [scene(number) for number in demo.TESTED]
        self.told = demo.truth(zip(demo.TESTED, self.scenes, strict=True))
        generator = np.random.default_rng(0)
        self.draws = [generator.integers(0, len(self.scenes), len(self.scenes)) for _ in range(RESAMPLED)]

    def results(self, detector: Detector) -> list[dict[str, Any]]:
        return demo.detect(detector, self.scenes, demo.TESTED)

    def resampled(self, results: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
        """Return the AP of boxes and of masks on each resampling of the scenes."""
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval

        found = {}
        with contextlib.redirect_stdout(io.StringIO()):
            for word, kind in (("box_ap", "bbox"), ("mask_ap", "segm")):
                truth = COCO()
                truth.dataset = {"info": {}, **self.told}
                truth.createIndex()
                judged = COCOeval(truth, truth.loadRes([dict(each) for each in results]), kind)
                judged.params.areaRng, judged.params.areaRngLbl = judged.params.areaRng[:1], ["all"]
                judged.params.maxDets = [100]
                judged.evaluate()
                whole = np.array(judged.evalImgs, dtype=object).reshape(len(judged.params.catIds), len(self.scenes))
                found[word] = [self._ap(judged, whole[:, draw]) for draw in self.draws]
        return found

    def _ap(self, judged: Any, matched: np.ndarray) -> float:
        """Return COCO's AP on scenes with matched detections; a scene may occur several times."""
        judged.evalImgs = list(matched.reshape(-1))
        judged.params.imgIds = judged._paramsEval.imgIds = list(range(matched.shape[1]))
        judged.accumulate()
        precision = judged.eval["precision"]
        return float(precision[precision > -1].mean())


def main(
    bits: str = "w6a6,w4a4,w3a3",
    methods: str = METHODS,
    seeds: int = 1,
    work: Annotated[Path | None, typer.Option()] = None,
) -> None:
    """Evaluate the bundled detector, quantized by several methods, and save benchmarks/results/detection-demo.json."""
    torch.set_num_threads(1)
    judge, detector = Judge(), demo.load_detector()

    def finished(name: str, make: Any) -> Any:
        return kept(None if work is None else work / f"{name}.json", {}, make)

    def row(runs: Detector) -> dict[str, Any]:
        begun, results = time.process_time(), judge.results(runs)
        seconds = time.process_time() - begun
        figures = coco.average_precision(judge.told, results)
        figures = {name: value for name, value in figures.items() if not math.isnan(value)}
        return {**figures, "judging_seconds": seconds, "resampled": judge.resampled(results)}

    whole = finished("fp32", lambda: row(detector))
    rows = []
    for seed in range(seeds):
        draws = draw_indices(len(demo.CALIBRATING), IMAGES, seed).tolist()
        batches = [batch for _, batch in demo.batches((demo.CALIBRATING[index] for index in draws), 4)]
        for width in bits.split(","):
            chosen = [(method, Config.preset(width, method)) for method in methods.split(",")]

            def measured(chosen: Any = chosen, batches: Any = batches, seed: int = seed) -> list[dict[str, Any]]:
                begun = time.process_time()
                found = quantize_detector(detector, batches, [config for _, config in chosen], seed=seed)
                seconds = time.process_time() - begun
                made = []
                for (method, config), each in zip(chosen, found, strict=True):
                    file = Path(f"{work or '.'}/{config.bits}-{method}.detector")
                    size = save(each, file)
                    file.unlink()
                    told = {"bits": config.bits, "method": method, "seed": seed, "bytes": size}
                    made.append({**told, **row(fastest(each, 1)), "all_quantized_in_seconds": seconds})
                    print(told, made[-1]["box_ap"], made[-1]["mask_ap"], file=sys.stderr, flush=True)
                return made

            rows += finished(f"{width}-{seed}-{len(chosen)}", measured)
    for each in rows:
        (ours,) = (
            other
            for other in rows
            if (other["bits"], other["seed"], other["method"]) == (each["bits"], each["seed"], "adalog")
        )
        each["below_adalog"] = {
            word: np.percentile(np.subtract(ours["resampled"][word], each["resampled"][word]), [2.5, 50, 97.5]).tolist()
            for word in ("box_ap", "mask_ap")
        }
    for each in (whole, *rows):
        del each["resampled"]
    about = {"images": len(judge.scenes), "calibration_images": IMAGES, "machine": machine()}
    publish({**about, "fp32": whole, "rows": rows}, RESULTS / "detection-demo.json")


if __name__ == "__main__":
    typer.run(main)
