"""Measure the paper's tables of classifiers on your own models and images.

`run` measures each configuration of `paper.TABLES` once per model and seed, even if several tables have it, and keeps
finished rows in files. `markdown.markdown` turns its result into text.
"""

from benchmarks.records import kept, p_value, packed, read_kept, statistics
from experiments import paper
from experiments.paper import IMAGES, bits_name, find_published, images_fitted, plan, published

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from adalog._quantize import sample_images
from adalog.calibration.calibration import Calibration
from adalog.calibration.partial import raw_bytes
from adalog.config import Config
from adalog.errors import DataError
from adalog.graph.program import Program
from adalog.inputs import demo
from adalog.inputs.images import ImageSet, find_images
from adalog.inputs.zoo import LoadedModel
from adalog.model import quickest
from adalog.ranks import ALONE, Ranks
from adalog.study.cost import cost
from adalog.study.doctor import machine
from adalog.study.evaluate import Prepared, check_classes, in_batches, predict, score

Progress = Callable[[int, int, str, dict[str, Any]], None]


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
        """Return the bundled model with its images, or another model with the folders train and val of `data`.

        Raises DataError if the folders do not exist, have fewer than `images` images for calibration or `fitted` images
        for stages, or have no labels.
        """
        if model.name == "demo":
            bench = Bench(model, demo.calibration_images(), *demo.test_images(), demo.unlabelled_images())
        else:
            if data is None:
                raise DataError(f"{model.name} has no images of its own: give --data FOLDER with train and val")
            for name in ("train", "val"):
                if not (data / name).is_dir():
                    raise DataError(f"{data} has no folder {name}: give a folder with train and val")
            judged = find_images(data / "val")
            if judged.labels is None:
                raise DataError(
                    f"{data / 'val'} has no labels: make one subfolder per class, or add a CSV file of file,label"
                )
            bench = Bench(model, find_images(data / "train"), judged, torch.tensor(judged.labels))
        if images > len(bench.pool):
            raise DataError(
                f"{model.name} has only {len(bench.pool)} calibration images, but --images is {images}: give more "
                "images, or a smaller number"
            )
        pool = bench.pool if bench.more is None else bench.more
        if fitted > len(pool):
            raise DataError(
                f"{model.name} has only {len(pool)} images for stages, but rows of these tables need {fitted}: give "
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
            "preprocessing": repr(self.model.prepared),
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
        return pool.sample(count, seed).load(self.model.prepared, jobs=jobs)

    def classes(self, network: nn.Module, jobs: int, device: torch.device, ranks: Ranks = ALONE) -> Tensor:
        """Return the class that a network predicts for each evaluation image, (N,).

        ranks: the ranks that share the images.
        """
        images = Prepared(self.judged, self.model.preprocessing)

        def told(numbers: range) -> list[int]:
            return predict(network, images(numbers), device=device).argmax(dim=1).tolist()

        found = in_batches(len(images), told, jobs=jobs if device.type == "cpu" else 1, ranks=ranks)
        return torch.tensor([label for batch in found for label in batch])

    def check(self, device: torch.device) -> None:
        """Raise DataError unless the model runs on its images and has their classes."""
        last = int(self.labels.argmax())
        judged = self.judged
        one = judged[[last]] if isinstance(judged, Tensor) else judged.select([last]).load(self.model.prepared)
        logits = predict(self.model.module.to(device), one, device=device)
        if isinstance(judged, ImageSet):
            first = judged.paths[0]
            place = first.parents[1] if isinstance(first, Path) else first.archive
            check_classes(judged.classes, logits, str(place), self.model.name)
        score(logits, self.labels[[last]])

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one image."""
        return (3, *self.model.prepared.size)


def run(
    names: Sequence[str],
    benches: Sequence[Bench],
    *,
    seeds: int = 1,
    images: int = IMAGES,
    bits: Sequence[str] = (),
    firsts: Sequence[str] = (),
    jobs: int = 1,
    device: torch.device | None = None,
    work: Path | None = None,
    progress: Progress | None = None,
    ranks: Ranks = ALONE,
) -> dict[str, Any]:
    """Measure these tables and return them as JSON.

    seeds: number of random subsets of `images` calibration images. All rows are measured with one seed before the next.
    bits, firsts: keep only rows with these bits, and with these first names; empty for all.
    jobs: number of sites searched, and of batches run, at a time.
    work: a folder of finished rows, which are not measured again.
    progress(done, total, what, result): called after each row with the result of all rows finished by then.
    ranks: the ranks that share the rows. Each rank measures whole rows, and all of them must see the folder `work`.
    Raises ValueError for an unknown table.
    """
    planned, place = plan(names, images, bits, firsts), device or torch.device("cpu")
    fitted = images_fitted(names, images, bits, firsts)
    runs = [(config, seed) for seed in range(seeds) for config, row in planned.items() if not (seed and row.once)]
    result: dict[str, Any] = {
        "tables": {name: _described(name) for name in sorted(set(names))},
        "models": {},
        "calibration_images": images,
        "executors": [],
        "rows": [],
        "finished": 0,
        "of": len(runs) * len(benches),
        "machine": machine(),
    }
    for bench in benches:
        _run_bench(_Measured(bench, images, fitted, jobs, place, work), names, runs, planned, result, progress, ranks)
    return result


def _run_bench(
    rows: "_Measured",
    names: Sequence[str],
    runs: Sequence[tuple[Config, int]],
    planned: Mapping[Config, paper.Row],
    result: dict[str, Any],
    progress: Progress | None,
    ranks: Ranks,
) -> None:
    """Measure the runs of one model, and add them to the result."""
    name, before = rows.bench.model.name, list(result["rows"])
    records: dict[Config, dict[int, dict[str, Any]]] = {}
    whole = rows.full_precision(ranks)
    told = {field: whole[field] for field in ("top1", "fixops", "bytes")}
    result["models"][name] = {"images": len(rows.bench.labels), **told}
    named = {short_name(config, seed): (config, seed) for config, seed in runs}

    def finished(short: str, record: dict[str, Any], _: bool) -> None:
        config, seed = named[short]
        records[config] = dict(sorted({**records.get(config, {}), seed: record}.items()))
        result["executors"] = sorted({record["executor"], *result["executors"]})
        result["rows"] = before + list(_rows(names, name, whole, records, result["calibration_images"]))
        result["finished"] += 1
        if progress is not None:
            row = " ".join((name, bits_name(config), *planned[config].names))
            what = f"{row}, seed {seed}: {100 * record['top1']:.2f} %, {record['seconds']:.0f} s"
            progress(result["finished"], result["of"], what, result)

    ranks.shared(list(named), lambda short: rows.quantized(*named[short], whole), finished=finished)


def short_name(config: Config, seed: int) -> str:
    """Return a name for one row and one seed."""
    return f"{config.bits}-{hashlib.sha256(config.to_json().encode()).hexdigest()[:8]}-{seed}"


def file_name(model: str) -> str:
    """Return the name of a model with only characters that a file name may have."""
    return "".join(letter if letter.isalnum() else "-" for letter in model)


def _described(name: str) -> dict[str, Any]:
    """Return a table's title, columns and notes."""
    table = paper.TABLES[name]
    notes = {"note": table.note, "published_note": published()["notes"].get(name, "")}
    return {"title": table.title, "columns": list(table.columns), "cost": table.cost, **notes}


class _Measured:
    """The measurements of one model; the folder `work`, if given, keeps the finished ones."""

    def __init__(self, bench: Bench, images: int, fitted: int, jobs: int, device: torch.device, work: Path | None):
        self.bench, self._images, self._fitted, self._jobs, self._device = bench, images, fitted, jobs, device
        self._work, self._key = work, {**bench.fingerprint(), "device": device.type}
        self._model = file_name(bench.model.name)
        self._known: tuple[int, Calibration] | None = None
        bench.model.module.to(device)

    def full_precision(self, ranks: Ranks) -> dict[str, Any]:
        """Evaluate the full-precision model.

        Ranks share the images, unless the first rank has a finished result.
        """
        found: dict[str, Any] | None = ranks.by_first(lambda: read_kept(self._path("fp32"), self._key))
        if found is None:
            self._calibration(0)  # each rank needs one, so it makes it before it waits for others
            classes = self.bench.classes(self.bench.model.module, self._jobs, self._device, ranks)
            found = ranks.by_first(lambda: self._kept("fp32", {}, lambda: self._full_precision(classes)))
        return found

    def quantized(self, config: Config, seed: int, whole: Mapping[str, Any]) -> dict[str, Any]:
        """Evaluate the model quantized by this config.

        whole: the result of `full_precision`.
        """
        key = {"config": config.to_json(), "seed": seed}
        return self._kept(short_name(config, seed), key, lambda: self._quantized(config, seed, whole))

    def _full_precision(self, classes: Tensor) -> dict[str, Any]:
        right = classes == self.bench.labels
        told = {"classes": classes.tolist(), "top1": float(right.double().mean()), "right": packed(right)}
        return told | _costs(self._calibration(0).program, self.bench)

    def _quantized(self, config: Config, seed: int, whole: Mapping[str, Any]) -> dict[str, Any]:
        """Quantize and evaluate, by "native" if it runs. "seconds" is the CPU time of the searches and the stages."""
        calibration, jobs = self._calibration(seed), self._jobs
        calibration.quantize(replace(config, stages=()), jobs=jobs if self._device.type == "cpu" else 1)
        start = time.process_time()
        quantized = calibration.quantize(config)
        seconds = time.process_time() - start + sum(each.seconds for each in calibration.iter_search(config))
        runs, executor, at_once = quickest(quantized, jobs)
        classes = self.bench.classes(runs, at_once, self._device)
        right = classes == self.bench.labels
        return {
            "executor": executor or "fake quantization",
            "top1": float(right.double().mean()),
            "agreement": float((classes == torch.tensor(whole["classes"])).double().mean()),
            "right": packed(right),
            "seconds": round(seconds, 2),
            **_costs(quantized.program, self.bench),
        }

    def _kept(self, name: str, key: dict[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = kept(self._path(name), {**self._key, **key}, make)
        return found

    def _path(self, name: str) -> Path | None:
        return None if self._work is None else self._work / f"{self._model}-{name}.json"

    def _calibration(self, seed: int) -> Calibration:
        """Return the calibration for a seed; it is made on demand, and only one is held at a time."""
        if self._known is None or self._known[0] != seed:
            self._known = None
            calibrates = self.bench.sample(self._images, seed, self._jobs).to(self._device)
            more = calibrates
            if self._fitted:
                more = self.bench.unlabelled(self._fitted, seed, self._jobs).to(self._device)
            self._known = seed, Calibration(self.bench.model.module, calibrates, unlabelled=more, seed=seed)
        return self._known[1]


def _costs(program: Program, bench: Bench) -> dict[str, Any]:
    """Return the FixOPs and the bytes of the tensors.

    FixOPs count products as the paper does, quantizing and dequantizing.
    """
    found = cost(program, [bench.shape], as_printed=True)
    conversions = [total.fixops for role, total in found.by_role().items() if role in ("quantize", "dequantize")]
    return {"fixops": found.fixops + sum(conversions), "bytes": sum(found.size_bytes.values())}


def _rows(
    names: Sequence[str],
    model: str,
    whole: Mapping[str, Any],
    records: Mapping[Config, Mapping[int, Mapping[str, Any]]],
    images: int,
) -> Iterator[dict[str, Any]]:
    """Yield the rows of these tables that are finished for at least one seed, table by table."""
    for name in sorted(set(names)):
        for row in paper.TABLES[name].rows:
            found = records.get(replace(row.config, images=images), {})
            if not found:
                continue
            beside = records.get(replace(Config.preset(row.config.bits), images=images), {})
            yield {
                "table": name,
                "model": model,
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
                "published": find_published(name, model, row.config.bits, row.method, _taken(row.config, images)),
            }


def _taken(config: Config, images: int) -> int:
    """Return the number of images that a published figure for such a row used."""
    return config.images_fitted if config.images_fitted and images == IMAGES else images


_MEASURED = ("top1", "agreement", "seconds", "fixops", "bytes")
