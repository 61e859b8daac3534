"""Measure the paper's table of detectors on your own detectors and images, by COCO's average precision."""

from benchmarks.publish import markdown_table
from benchmarks.records import statistics
from experiments import paper
from experiments.markdown import percent, unfinished
from experiments.paper import bits_name, find_published, published
from experiments.rows import Progress, Record, Records, Request, measure

import hashlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from adalog.calibration.partial import raw_bytes
from adalog.calibration.schedule import Resources
from adalog.config import Config
from adalog.detection import coco, demo, zoo
from adalog.detection.demo.scenes import scene
from adalog.detection.detector import Detections, Detector
from adalog.detection.images import Batch, batches_of, read
from adalog.detection.quantized import fastest, quantize_detector
from adalog.errors import DataError
from adalog.inputs.images import find_images
from adalog.methods import label

TABLE = "C"
_MEASURED = ("box_ap", "mask_ap", "seconds")


@dataclass(frozen=True)
class DetectorBench:
    """A detector with its calibration images and its evaluation images.

    data: a folder with the folders train and val, and instances.json, which annotates val; None for the bundled scenes.
    Raises DataError if one of them is missing.
    """

    name: str
    detector: Detector
    data: Path | None

    def __post_init__(self) -> None:
        if self.data is None and self.name != zoo.DEMO:
            raise DataError(
                f"{self.name} has no images of its own: give --data FOLDER with train, val and instances.json"
            )
        if self.data is not None:
            for name in ("train", "val", "instances.json"):
                if not (self.data / name).exists():
                    raise DataError(f"{self.data} has no {name}: give a folder with train, val and instances.json")

    @property
    def count(self) -> int:
        """The number of images that are available for calibration."""
        return len(demo.CALIBRATING if self.data is None else find_images(self.data / "train"))

    def calibration(self, count: int, seed: int) -> list[Batch]:
        """Return `count` random images in batches, chosen by the seed.

        Raises DataError if there are fewer images.
        """
        if self.data is None:
            return [batch for _, batch in demo.batches(demo.draw(count, seed), 4)]
        images = find_images(self.data / "train").sample(count, seed)
        return batches_of([read(path) for path in images.paths], self.detector.settings.resizing)

    def judged(self, runs: Detector) -> dict[str, float]:
        """Return COCO's average precision of a detector on the evaluation images."""
        if self.data is None:
            scenes = [scene(number) for number in demo.TESTED]
            told = demo.truth(zip(demo.TESTED, scenes, strict=True))
            return coco.average_precision(told, demo.detect(runs, scenes, demo.TESTED))
        annotated = coco.read_annotations(self.data / "instances.json", self.data / "val")

        def found() -> Iterator[Detections]:
            for index in range(len(annotated)):
                yield from runs(runs.settings.resizing.batch([annotated.image(index)]))

        categories = coco.categories_of(runs.settings.names, annotated)
        return coco.average_precision(annotated.told, coco.results_of(found(), annotated.ids, categories))

    def fingerprint(self) -> dict[str, Any]:
        """Return the values that identify the detector and its images; image files count by name."""
        weights = hashlib.sha256(repr(self.detector.settings).encode())
        for name, part in self.detector.parts.items():
            assert isinstance(part, nn.Module)
            for key, value in part.state_dict().items():
                weights.update(f"{name} {key} {tuple(value.shape)}".encode())
                weights.update(raw_bytes(value))
        images = hashlib.sha256()
        if self.data is not None:
            images.update((self.data / "instances.json").read_bytes())
            images.update("\n".join(path.name for path in find_images(self.data / "train").paths).encode())
        return {"model": self.name, "weights": weights.hexdigest(), "images": images.hexdigest()}


def run(request: Request, benches: Sequence[DetectorBench], progress: Progress | None = None) -> dict[str, Any]:
    """Measure the rows of the table on each bench and return it as JSON; `rows.measure` explains the progress.

    If a method cannot quantize a detector, its row gives the reason.
    """
    result = {
        "tables": {TABLE: {"title": paper.TABLES[TABLE].title, "note": published()["notes"][TABLE]}},
        "models": {},
        "calibration_images": request.images,
    }
    return measure(request, benches, lambda bench: _Measured(bench, request), result, progress)


class _Measured:
    """A bench whose rows are measured."""

    def __init__(self, bench: DetectorBench, request: Request):
        self.bench, self.name, self.identity, self._request = bench, bench.name, bench.fingerprint(), request

    def full_precision(self) -> Record:
        """Evaluate the full-precision detector."""
        return self._request.ranks.by_first(lambda: self._judged(self.bench.detector))

    @torch.no_grad()  # the setting holds for one thread
    def quantized(self, config: Config, seed: int, _: Record) -> Record:
        """Quantize and evaluate, with parts run by "native" if it can; or return the reason why it cannot be done."""
        begun, needed, there = time.process_time(), config.images_needed, self.bench.count
        if needed > there:
            return {"refusal": f"it needs {needed} images, but only {there} are available"}
        batches, jobs = self.bench.calibration(needed, seed), self._request.jobs
        try:
            (quantized,) = quantize_detector(self.bench.detector, batches, [config], Resources(jobs), seed=seed)
        except (ValueError, DataError) as cause:
            return {"refusal": str(cause)}
        seconds = time.process_time() - begun
        return {**self._judged(fastest(quantized, jobs)), "seconds": round(seconds, 2)}

    @torch.no_grad()
    def _judged(self, runs: Detector) -> Record:
        return _numbers(self.bench.judged(runs))

    def summary(self, whole: Record) -> dict[str, Any]:
        """Return the average precision in full precision, and the published one."""
        return {**whole, "published": find_published(TABLE, self.name, "fp32", "fp32")}

    def rows(self, _: Record, records: Records) -> Iterator[dict[str, Any]]:
        """Yield the rows that are finished for at least one seed."""
        for config, row in self._request.plan().items():
            if config in records:
                yield {
                    "table": TABLE,
                    "model": self.name,
                    "bits": config.bits,
                    "names": list(row.names),
                    "seeds": list(records[config]),
                    **_joined(list(records[config].values())),
                    "published": find_published(TABLE, self.name, config.bits, row.method),
                }


def _numbers(figures: dict[str, float]) -> Record:
    return {name: None if math.isnan(value) else value for name, value in figures.items()}


def _joined(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join the measurements that one row has for each seed."""
    refusal = next((record["refusal"] for record in records if "refusal" in record), None)
    if refusal is not None:
        return {"refusal": refusal}
    columns = {name: [record[name] for record in records] for name in _MEASURED}
    # The average precision is undefined without an object to find.
    return {name: None if None in values else statistics(values) for name, values in columns.items()}


def markdown(result: dict[str, Any], heading: str = "## ") -> str:
    """Format the result of `run` as Markdown."""
    (title,) = (table["title"] for table in result["tables"].values())
    paragraphs = [f"{heading}Table {TABLE}: {title}"]
    columns = ["bits", "method", "box AP", "mask AP", "published box AP", "published mask AP", "CPU s"]
    compared = False
    for model, whole in result["models"].items():
        lines = [["W32/A32", "full precision", *_precisions(whole), ""]]
        reasons = []
        for row in result["rows"]:
            if row["model"] == model:
                name, width = label(row["names"][0]), bits_name(Config.preset(row["bits"]))
                compared |= bool(row["published"])
                if "refusal" in row:
                    reasons.append(f"{name} at {width}: {row['refusal']}")
                    continue
                lines.append([width, name, *_precisions(row), f"{row['seconds']['mean']:.0f}"])
        shown = [any(line[index] for line in lines) for index, _ in enumerate(columns)]
        heads, *rows = (list(compress(line, shown)) for line in (columns, *lines))
        paragraphs += [f"{model}:", markdown_table(heads, rows)]
        paragraphs += [f"Not measured: {'; '.join(reasons)}."] if reasons else []
    if compared:
        paragraphs.append(result["tables"][TABLE]["note"])
    about, draws = result["machine"], max((len(row["seeds"]) for row in result["rows"]), default=1)
    drawn = f"Mean ± standard deviation over {draws} seeds" if draws > 1 else "One seed"
    paragraphs.append(
        f"{drawn}, with {result['calibration_images']} calibration images. AP [%] is computed as by pycocotools. Every "
        f"part is quantized. adalog {about['adalog']}, torch {about['torch']}, {about['processor']}."
    )
    paragraphs += unfinished(result)
    return "\n\n".join(paragraphs) + "\n"


def _precisions(row: dict[str, Any]) -> list[str]:
    """Return the cells of both average precisions, measured and published."""
    figures = row["published"]
    measured = [percent(row[name], 1) for name in _MEASURED[:2]]
    return measured + [f"{figures[name]:.1f}" if name in figures else "" for name in _MEASURED[:2]]
