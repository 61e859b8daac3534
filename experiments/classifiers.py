"""Measure the paper's tables of classifiers on your own models and images.

`run` measures each configuration of `paper.TABLES` once per model and seed, even if several tables have it.
`markdown.markdown` turns its result into text.
"""

from benchmarks.real import find_support, has_queries
from benchmarks.records import p_value, packed, statistics
from experiments import paper
from experiments.paper import IMAGES, find_published, published
from experiments.rows import Progress, Record, Records, Request, measure

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from adalog._quantize import sample_images
from adalog.calibration.calibration import Calibration
from adalog.calibration.partial import raw_bytes
from adalog.calibration.schedule import Resources
from adalog.config import Config
from adalog.errors import DataError
from adalog.graph.program import Program
from adalog.inputs import demo
from adalog.inputs.images import ImageSet, find_images
from adalog.inputs.zoo import LoadedModel
from adalog.model import quickest
from adalog.ranks import ALONE, Ranks
from adalog.study.cost import cost
from adalog.study.evaluate import PreparedImages, check_classes, in_batches, predict, score


@dataclass(frozen=True)
class Bench:
    """A model with its calibration images and its evaluation images.

    Images are normalised tensors or files.
    pool: the images to choose calibration images from.
    judged: the evaluation images. labels: (N,), their labels.
    more: the images to choose from for stages; None means the calibration pool.
    """

    model: LoadedModel
    pool: Tensor | ImageSet
    judged: Tensor | ImageSet
    labels: Tensor
    more: Tensor | ImageSet | None = None

    @staticmethod
    def of(model: LoadedModel, data: Path | None, images: int, fitted: int = 0) -> "Bench":
        """Return the bundled model with its images, or another model with the images of `data` (see `_split`).

        Raises DataError if there are fewer than `images` images for calibration or `fitted` images for stages, or if
        the images to evaluate on have no labels.
        """
        if model.name == "demo":
            bench = Bench(model, demo.calibration_images(), *demo.test_images(), demo.unlabelled_images())
        else:
            if data is None:
                raise DataError(f"{model.name} has no images of its own: give --data FOLDER with train and val")
            pool, evaluated = _split(data)
            if evaluated.labels is None:
                raise DataError(
                    f"{data / 'val'} has no labels: make one subfolder per class, or add a CSV file of file,label"
                )
            bench = Bench(model, pool, evaluated, torch.tensor(evaluated.labels))
        if images > len(bench.pool):
            raise DataError(
                f"{model.name} has only {len(bench.pool)} calibration images, but --images is {images}: give more "
                "images, or a smaller number"
            )
        more = bench.pool if bench.more is None else bench.more
        if fitted > len(more):
            raise DataError(
                f"{model.name} has only {len(more)} images for stages, but rows of these tables need {fitted}: give "
                "more images, or choose rows without reconstruction with --rows"
            )
        return bench

    def fingerprint(self) -> dict[str, Any]:
        """Return the values that identify the model, with the file of its code, and its images; files count by name."""
        weights, images = hashlib.sha256(), hashlib.sha256(raw_bytes(self.labels))
        code = Path(self.model.name.rpartition(":")[0])
        if code.suffix == ".py" and code.is_file():
            weights.update(code.read_bytes())
        for name, value in self.model.module.state_dict().items():
            weights.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
            weights.update(raw_bytes(value))
        for given in (self.pool, self.judged, *(() if self.more is None else (self.more,))):
            if isinstance(given, Tensor):
                images.update(raw_bytes(given))
            else:
                images.update(json.dumps(["/".join(path.parts[-2:]) for path in given.paths]).encode())
        return {
            "model": self.model.name,
            "weights": weights.hexdigest(),
            "images": images.hexdigest(),
            "preprocessing": repr(self.model.rgb_preprocessing),
        }

    def sample(self, count: int, seed: int, jobs: int) -> Tensor:
        """Return `count` calibration images, normalised."""
        return self._drawn(self.pool, count, seed, jobs)

    def unlabelled(self, count: int, seed: int, jobs: int) -> Tensor:
        """Return `count` images for the stages that fit images, normalised."""
        return self._drawn(self.pool if self.more is None else self.more, count, seed, jobs)

    def _drawn(self, pool: Tensor | ImageSet, count: int, seed: int, jobs: int) -> Tensor:
        if isinstance(pool, Tensor):
            drawn = sample_images(pool, count, seed)
            assert isinstance(drawn, Tensor)
            return drawn
        return pool.sample(count, seed).load(self.model.rgb_preprocessing, jobs=jobs)

    def classes(self, network: nn.Module, jobs: int, device: torch.device, ranks: Ranks = ALONE) -> Tensor:
        """Return the class that a network predicts for each evaluation image, (N,).

        ranks: the ranks that share the images.
        """
        images = PreparedImages(self.judged, self.model.preprocessing)

        def told(numbers: range) -> list[int]:
            return predict(network, images(numbers), device=device).argmax(dim=1).tolist()

        resources = Resources(jobs if device.type == "cpu" else 1, ranks=ranks)
        found = in_batches(len(images), told, resources)
        return torch.tensor([label for batch in found for label in batch])

    def check(self, device: torch.device) -> None:
        """Raise DataError unless the model runs on its images and has their classes."""
        last = int(self.labels.argmax())
        judged = self.judged
        one = judged[[last]] if isinstance(judged, Tensor) else judged.select([last]).load(self.model.rgb_preprocessing)
        logits = predict(self.model.module.to(device), one, device=device)
        if isinstance(judged, ImageSet):
            first = judged.paths[0]
            place = first.parents[1] if isinstance(first, Path) else first.archive
            check_classes(judged.classes, logits, str(place), self.model.name)
        score(logits, self.labels[[last]])

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one image."""
        return (3, *self.model.rgb_preprocessing.size)


def _split(data: Path) -> tuple[ImageSet, ImageSet]:
    """Return the calibration images and the evaluation images of a folder.

    They are in its folders train and val, or are the support images and the queries that `benchmarks.realbench` reads.
    Raises DataError if the folder has neither.
    """
    if has_queries(data):
        images, is_support = find_support(data)
        numbers: tuple[list[int], list[int]] = ([], [])
        for number, supports in enumerate(is_support):
            numbers[not supports].append(number)
        return images.select(numbers[0]), images.select(numbers[1])
    for name in ("train", "val"):
        if not (data / name).is_dir():
            raise DataError(f"{data} has no folder {name}: give a folder with train and val")
    return find_images(data / "train"), find_images(data / "val")


def run(request: Request, benches: Sequence[Bench], progress: Progress | None = None) -> dict[str, Any]:
    """Measure the rows on each bench and return the tables as JSON; `rows.measure` explains the progress.

    Raises ValueError for an unknown table.
    """
    result = {
        "tables": {name: _described(name) for name in sorted(set(request.tables))},
        "models": {},
        "calibration_images": request.images,
        "executors": [],
    }
    return measure(request, benches, lambda bench: _Measured(bench, request), result, progress)


def _described(name: str) -> dict[str, Any]:
    """Return a table's title, columns and notes."""
    table = paper.TABLES[name]
    notes = {"note": table.note, "published_note": published()["notes"].get(name, "")}
    return {"title": table.title, "columns": list(table.columns), "cost": table.cost, **notes}


class _Measured:
    """A bench whose rows are measured."""

    def __init__(self, bench: Bench, request: Request):
        self.bench, self.name, self._request = bench, bench.model.name, request
        self.identity = {**bench.fingerprint(), "device": request.device.type}
        self._fitted = request.images_fitted
        self._known: tuple[int, Calibration] | None = None
        bench.model.module.to(request.device)

    def full_precision(self) -> Record:
        """Evaluate the full-precision model on images that the ranks share."""
        program = self._calibration(0).program  # each rank makes its own before it waits for others
        request = self._request
        classes = self.bench.classes(self.bench.model.module, request.jobs, request.device, request.ranks)
        right = classes == self.bench.labels
        record = {"classes": classes.tolist(), "top1": float(right.double().mean()), "right": packed(right)}
        return record | _costs(program, self.bench)

    def quantized(self, config: Config, seed: int, whole: Record) -> Record:
        """Quantize and evaluate, by "native" if it runs. "seconds" is the CPU time of the searches and the stages."""
        calibration, jobs, device = self._calibration(seed), self._request.jobs, self._request.device
        calibration.quantize(replace(config, stages=()), Resources(jobs if device.type == "cpu" else 1))
        start = time.process_time()
        quantized = calibration.quantize(config)
        seconds = time.process_time() - start + sum(each.seconds for each in calibration.iter_search(config))
        runs, executor, at_once = quickest(quantized, jobs)
        classes = self.bench.classes(runs, at_once, device)
        right = classes == self.bench.labels
        return {
            "executor": executor or "fake quantization",
            "top1": float(right.double().mean()),
            "agreement": float((classes == torch.tensor(whole["classes"])).double().mean()),
            "right": packed(right),
            "seconds": round(seconds, 2),
            **_costs(quantized.program, self.bench),
        }

    def summary(self, whole: Record) -> dict[str, Any]:
        """Return the number of evaluation images, and accuracy and cost in full precision."""
        return {"images": len(self.bench.labels), **{name: whole[name] for name in ("top1", "fixops", "bytes")}}

    def rows(self, whole: Record, records: Records) -> Iterator[dict[str, Any]]:
        """Yield the rows that are finished for at least one seed, table by table."""
        images = self._request.images
        for name in sorted(set(self._request.tables)):
            for row in paper.TABLES[name].rows:
                found = records.get(self._request.choices(row), {})
                if not found:
                    continue
                beside = records.get(replace(Config.preset(row.config.bits), images=images), {})
                yield {
                    "table": name,
                    "model": self.name,
                    "bits": row.config.bits,
                    "names": list(row.names),
                    "method": row.method,
                    "seeds": list(found),
                    **{field: statistics(record[field] for record in found.values()) for field in _MEASURED},
                    "p_float": [p_value(whole, record) for record in found.values()],
                    "p_adalog": [
                        p_value(beside[seed], record) if beside is not found and seed in beside else None
                        for seed, record in found.items()
                    ],
                    "published": find_published(
                        name, self.name, row.config.bits, row.method, _taken(self._request.choices(row), images)
                    ),
                }

    def _calibration(self, seed: int) -> Calibration:
        """Return the calibration for a seed; it is made on demand, and only one is held at a time."""
        if self._known is None or self._known[0] != seed:
            self._known = None
            jobs, device = self._request.jobs, self._request.device
            calibrates = self.bench.sample(self._request.images, seed, jobs).to(device)
            more = calibrates
            if self._fitted:
                more = self.bench.unlabelled(self._fitted, seed, jobs).to(device)
            self._known = seed, Calibration(self.bench.model.module, calibrates, unlabelled=more, seed=seed)
        return self._known[1]


def _costs(program: Program, bench: Bench) -> dict[str, Any]:
    """Return the FixOPs and the bytes of the tensors.

    FixOPs count products as the paper does, quantizing and dequantizing.
    """
    found = cost(program, [bench.shape], as_printed=True)
    conversions = [total.fixops for role, total in found.by_role().items() if role in ("quantize", "dequantize")]
    return {"fixops": found.fixops + sum(conversions), "bytes": sum(found.size_bytes.values())}


def _taken(config: Config, images: int) -> int:
    """Return the number of images that a published figure for such a row used."""
    return config.images_fitted if config.images_fitted and images == IMAGES else images


_MEASURED = ("top1", "agreement", "seconds", "fixops", "bytes")
