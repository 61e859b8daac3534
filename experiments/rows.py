"""Measure chosen rows of the paper's tables, model by model, and keep finished ones in files."""

from benchmarks.records import kept, read_kept
from experiments.paper import FITTED_IMAGES, IMAGES, Row, bits_name, plan, with_images

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from adalog.config import Config
from adalog.ranks import ALONE, Ranks
from adalog.study.doctor import machine
from adalog.version import source_hash

Progress = Callable[[int, int, str, dict[str, Any]], None]
Record = dict[str, Any]  # what was measured of one configuration with one seed, as JSON
Records = Mapping[Config, Mapping[int, Record]]  # by configuration and seed
Bench = TypeVar("Bench")
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Request:
    """Rows to measure, and how.

    tables: the names of their tables.
    seeds: number of random subsets of `images` calibration images. All rows are measured with one seed before the next.
    bits, cells: as in `plan`.
    fitted: the most images that a stage fits.
    jobs: number of sites searched, and of batches run, at a time.
    work: a folder of finished rows, which are not measured again.
    ranks: the ranks that share the rows. Each rank measures whole rows, and all of them must see the folder `work`.
    """

    tables: Sequence[str]
    seeds: int = 1
    images: int = IMAGES
    bits: Sequence[str] = ()
    cells: Sequence[str] = ()
    fitted: int = FITTED_IMAGES
    jobs: int = 1
    device: torch.device = _CPU
    work: Path | None = None
    ranks: Ranks = ALONE

    def plan(self) -> dict[Config, Row]:
        """Return the configurations to measure, each with a row. Raises ValueError for an unknown table."""
        return plan(self.tables, self.images, self.bits, self.cells, self.fitted)

    def choices(self, row: Row) -> Config:
        """Return the configuration to measure for a row, with the numbers of images asked for."""
        return with_images(row.config, self.images, self.fitted)

    @property
    def images_fitted(self) -> int:
        """The number of images that the stages of these rows fit; 0 if none fits any. Raises ValueError as `plan`."""
        return max((config.images_fitted for config in self.plan()), default=0)


class Subject(Protocol):
    """A model or a detector to measure, with its images.

    identity: values that determine its records.
    """

    name: str
    identity: dict[str, Any]

    def full_precision(self) -> Record:
        """Measure it in full precision. All ranks call this, and get the same record."""

    def quantized(self, config: Config, seed: int, whole: Record) -> Record:
        """Measure it, quantized by a configuration. whole: the record in full precision."""

    def summary(self, whole: Record) -> dict[str, Any]:
        """Return what a result says about it in full precision."""

    def rows(self, whole: Record, records: Records) -> Iterable[dict[str, Any]]:
        """Return the rows of the tables that have a record."""


def measure(
    request: Request,
    benches: Sequence[Bench],
    subject_of: Callable[[Bench], Subject],
    result: dict[str, Any],
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure the rows on each bench, add them to the result, and return it.

    subject_of: makes the subject of a bench; only one is held at a time.
    progress(done, total, what, result): called after each row with the result of all rows finished by then.
    """
    planned = request.plan()
    seeds = range(request.seeds)
    runs = {
        short_name(config, seed): (config, seed)
        for seed in seeds
        for config, row in planned.items()
        if not (seed and row.once)
    }
    result |= {"rows": [], "finished": 0, "of": len(runs) * len(benches), "machine": machine()}
    for bench in benches:
        _measure_one(request, subject_of(bench), planned, runs, result, progress)
    return result


def _measure_one(
    request: Request,
    subject: Subject,
    planned: Mapping[Config, Row],
    runs: Mapping[str, tuple[Config, int]],
    result: dict[str, Any],
    progress: Progress | None,
) -> None:
    """Measure all runs of one subject, and add its rows to the result."""
    identity = {**subject.identity, "experiments": source_hash(Path(__file__).parent)}
    before, records = list(result["rows"]), dict[Config, dict[int, Record]]()

    def path_of(name: str) -> Path | None:
        return None if request.work is None else request.work / f"{file_name(subject.name)}-{name}.json"

    def full_precision() -> Record:
        found: Record | None = request.ranks.by_first(lambda: read_kept(path_of("fp32"), identity))
        if found is None:
            made = subject.full_precision()
            found = request.ranks.by_first(lambda: kept(path_of("fp32"), identity, lambda: made))
        return found

    def quantized(name: str) -> Record:
        config, seed = runs[name]
        key = {**identity, "config": config.to_json(), "seed": seed}
        record: Record = kept(path_of(name), key, lambda: subject.quantized(config, seed, whole))
        return record

    def finished(name: str, record: Record, _: bool) -> None:
        config, seed = runs[name]
        records[config] = dict(sorted({**records.get(config, {}), seed: record}.items()))
        if "executor" in record:
            result["executors"] = sorted({record["executor"], *result["executors"]})
        result["rows"] = [*before, *subject.rows(whole, records)]
        result["finished"] += 1
        if progress is not None:
            what = f"{' '.join((subject.name, bits_name(config), *planned[config].names))}, seed {seed}"
            if "top1" in record:
                what += f": {100 * record['top1']:.2f} %, {record['seconds']:.0f} s"
            progress(result["finished"], result["of"], what, result)

    whole = full_precision()
    result["models"][subject.name] = subject.summary(whole)
    request.ranks.share(list(runs), quantized, finished=finished)


def short_name(config: Config, seed: int) -> str:
    """Return a name for one row and one seed."""
    return f"{config.bits}-{hashlib.sha256(config.to_json().encode()).hexdigest()[:8]}-{seed}"


def file_name(model: str) -> str:
    """Return the name of a model with only characters that a file name may have."""
    return "".join(letter if letter.isalnum() else "-" for letter in model)
