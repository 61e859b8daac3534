"""Detectors in the commands: load, quantize, measure and evaluate them."""

import functools
import itertools
import math
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table

from adalog import Config, DataError, artifact
from adalog.calibration.schedule import Resources
from adalog.cli import views
from adalog.cli.console import image_progress, job, progress_bar, quiet, remove_finished, show, site_progress, waiting
from adalog.cli.options import Setup
from adalog.cli.targets import check_count, count_option
from adalog.detection import coco, demo, zoo
from adalog.detection.demo.scenes import scene
from adalog.detection.detector import KINDS, Detector
from adalog.detection.images import Batch, batches_of, read
from adalog.detection.quantized import compile_parts, fastest, is_detector, load, quantize_detector, save
from adalog.detection.sensitivity import sensitivities
from adalog.extras import extra_module
from adalog.inputs import zoo as models
from adalog.inputs.images import find_images
from adalog.ledger import float_lines, ledger_table
from adalog.model import QuantizedModel
from adalog.study.evaluate import in_batches
from adalog.study.sensitivity import Sensitivity

SHOWN = ("box_ap", "box_ap50", "box_ap75", "mask_ap", "mask_ap50", "mask_ap75")


def read_parts(model: str, parts: str | None) -> tuple[str, ...] | None:
    """Return the parts of a detector that --parts selects (comma-separated, or all); None for any other model."""
    if not zoo.names_detector(model):
        if not models.is_model(model):
            raise DataError(f"unknown model {model!r}: give {models.KINDS}; or a detector, {zoo.KINDS}")
        if parts is not None:
            raise ValueError(f"--parts applies only to a detector ({zoo.KINDS}), not to {model}: leave it out")
        return None
    names = KINDS if parts in (None, "all") else tuple(parts.split(","))
    unknown = [part for part in names if part not in KINDS]
    if unknown:
        raise ValueError(f"--parts {unknown[0]!r} is unknown: choose from {', '.join(KINDS)}, or give all")
    return names


def check_setup(setup: Setup) -> None:
    """Raise ValueError for options that detectors do not support."""
    if setup.free_sizes:
        raise ValueError("a detector always takes images of any size: leave out --free-sizes")
    if setup.device.type != "cpu":
        raise ValueError(f"detectors are quantized on the CPU only: leave out --device {setup.device}")


def load_float(spec: str, no_pretrained: bool, checkpoint: Path | None) -> Detector:
    """Load the full-precision detector `spec` while a spinner shows."""
    with waiting(f"loading {spec}"):
        return zoo.load_detector(spec, pretrained=not no_pretrained, checkpoint=checkpoint)


def quantize(
    spec: str,
    data: Path | None,
    out: Path,
    config: Config,
    parts: Collection[str],
    setup: Setup,
    partial: Path,
    json_out: str | None,
) -> None:
    """Quantize the detector `spec` and write its artifact."""
    count = config.images_needed
    _check_data(spec, data, count)
    detector = load_float(spec, setup.no_pretrained, setup.checkpoint)
    out.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    with progress_bar() as progress, quiet():
        resources = setup.resources(partial, progress, "reading images", config.bits)
        (prepared,) = _prepare(detector, data, [count], setup.seed, count_option(config))
        (quantized,) = quantize_detector(
            detector, prepared, [config], resources, parts=parts, seed=setup.seed, memory=setup.memory
        )
    seconds = time.perf_counter() - start
    size = setup.ranks.by_first(lambda: save(quantized, out))
    remove_finished(partial)
    lines: list[str] = []
    described: dict[str, Any] = {}
    for name, part in quantized.parts.items():
        if isinstance(part, QuantizedModel):
            lines += [f"-- {name} --", *ledger_table(part.ledger), *float_lines(part.refusals, part.float_operations())]
            described[name] = artifact.describe(part.quantized)
    record = {"file": str(out), "bytes": size, "bits": config.bits, "seconds": round(seconds, 3)}
    record |= {"calibration_images": count, "quantized": list(parts), "parts": described}
    texts = "\n".join(line.rstrip() for line in lines), f"{out}: {size:,} bytes, in {seconds:.1f} s"
    show(record, json_out, *texts)


def measure(
    spec: str,
    data: Path | None,
    config: Config,
    judged: int,
    widths: Sequence[int],
    parts: Collection[str],
    setup: Setup,
    partial: Path,
) -> dict[str, Sensitivity]:
    """Measure the sensitivity of each operand of the detector `spec` at each width, part by part."""
    _check_data(spec, data, config.images + judged)
    detector = load_float(spec, setup.no_pretrained, setup.checkpoint)
    with progress_bar() as progress, quiet():
        resources = setup.resources(partial, progress, "reading images", "measuring")
        counts = [config.images, judged]
        calibrating, judging = _prepare(detector, data, counts, setup.seed, "--images plus --judged")
        return sensitivities(
            detector, calibrating, judging, config, widths, resources, parts=parts, seed=setup.seed, memory=setup.memory
        )


def _check_data(spec: str, data: Path | None, count: int) -> None:
    if data is None and spec != zoo.DEMO:
        raise DataError(
            f"{spec} has no images of its own: give --data FOLDER with at least {count} images like its training data"
        )


def _prepare(detector: Detector, data: Path | None, counts: Sequence[int], seed: int, option: str) -> list[list[Batch]]:
    """Return that many images for each count, in batches, from the folder or the bundled scenes; none occurs twice.

    option: as in `check_count`.
    """
    ends = list(itertools.accumulate(counts))
    spans = [slice(end - count, end) for count, end in zip(counts, ends, strict=True)]
    if data is None:
        numbers = demo.draw(ends[-1], seed)
        return [[batch for _, batch in demo.batches(numbers[span], 4)] for span in spans]
    image_set = find_images(data)
    check_count(data, len(image_set), ends[-1], option)
    paths = image_set.sample(ends[-1], seed).paths
    return [batches_of([read(path) for path in paths[span]], detector.settings.resizing) for span in spans]


def is_chosen(file: Path, instances: Path | None, refused: Sequence[str]) -> bool:
    """Return True for the name or the artifact of a detector; raise ValueError for `refused` options."""
    reads = instances is not None or file.is_file()
    if not zoo.names_detector(str(file)) and not (reads and is_detector(artifact.read(file))):
        if instances is not None:
            raise ValueError(f"--coco evaluates a detector, and {file} is not one: leave it out")
        return False
    if refused:
        raise ValueError(f"{file} is a detector, which does not support {', '.join(refused)}: leave that out")
    return True


def evaluate(
    file: Path,
    *,
    instances: Path | None,
    data: Path | None,
    no_pretrained: bool,
    checkpoint: Path | None,
    executor: str | None,
    jobs: int,
    json_out: str | None,
) -> None:
    """Evaluate a detector by COCO average precision, `jobs` images at a time, if the executor runs several."""
    if instances is None or data is None:
        raise DataError(f"{file} is a detector: give --coco instances.json and --data FOLDER with the annotated images")
    detector = load_detector(file, no_pretrained, checkpoint, executor, jobs)
    annotated = coco.read_annotations(instances, data)
    categories = coco.categories_of(detector.settings.names, annotated)
    with progress_bar() as progress, quiet():
        progress.add_task("images", total=len(annotated))
        resizing = detector.settings.resizing

        @torch.no_grad()  # needed in each thread
        def results_of(numbers: range) -> list[dict[str, Any]]:
            detections = (
                objects for index in numbers for objects in detector(resizing.batch([annotated.image(index)]))
            )
            return coco.results_of(detections, annotated.ids[numbers.start : numbers.stop], categories)

        at_once = 1 if executor in ("native", "reference") else jobs  # "reference" needs much memory for an image
        resources = Resources(at_once, progress=image_progress(progress), ranks=job())
        by_image = in_batches(len(annotated), results_of, resources, batch=1)
        results = [result for results in by_image for result in results]
        figures = coco.average_precision(annotated.told, results)
    record = {"file": str(file), "executor": executor, "images": len(annotated), "detections": len(results)}
    table = ap_table(f"{file}, {len(annotated)} images of {instances}", [], [((), figures)])
    show(record | _rounded(figures), json_out, table)


def load_detector(
    file: Path, no_pretrained: bool, checkpoint: Path | None, executor: str | None, jobs: int
) -> Detector:
    """Load the detector of an artifact, run by `executor` if given, or a full-precision detector by its name."""
    if zoo.names_detector(str(file)):
        if executor is not None:
            raise ValueError(f"--executor needs an artifact, and {file} is not quantized: leave it out")
        return load_float(str(file), no_pretrained, checkpoint)
    if checkpoint is not None or no_pretrained:
        raise ValueError(
            f"--checkpoint and --no-pretrained apply only to {zoo.KINDS}, and not to {file}: leave them out"
        )
    if not is_detector(artifact.read(file)):
        raise DataError(f"{file} is not a detector: give a file that `adalog quantize mmdet:NAME` wrote")
    with waiting(f"loading {file}"):
        detector = load(file)
        if executor is None:
            return detector
        return compile_parts(detector, executor, **({"threads": jobs} if executor == "native" else {}))


def demonstrate(bits: Sequence[str], methods: Sequence[str], *, seed: int, jobs: int, json_out: str | None) -> None:
    """Quantize the bundled detector by several methods, and evaluate each result on held-out scenes."""
    configs = [(method, Config.preset(width, method)) for width in bits for method in methods]
    rows: list[tuple[Sequence[str], dict[str, float]]] = []
    extra_module("pycocotools.mask", "coco")  # fails before the long work if it is not installed
    detector = demo.load_detector()
    with progress_bar() as progress, quiet():
        bar = progress.add_task("drawing scenes", total=(len(configs) + 1) * len(demo.TESTED))
        scenes = [scene(number) for number in demo.TESTED]
        truth = demo.truth(zip(demo.TESTED, scenes, strict=True))
        numbers = demo.draw(max(config.images_needed for _, config in configs), seed)
        calibrating = [batch for _, batch in demo.batches(numbers, 4)]

        def evaluate_scenes(runs: Detector, name: str) -> dict[str, float]:
            progress.update(bar, description=name)
            watch = functools.partial(progress.advance, bar)
            return coco.average_precision(truth, demo.detect(runs, scenes, demo.TESTED, watch))

        full = evaluate_scenes(detector, "full precision")
        watch = site_progress(progress, progress.add_task("searching", total=1), "")
        only, resources = [config for _, config in configs], Resources(jobs, progress=watch)
        quantized = quantize_detector(detector, calibrating, only, resources, seed=seed)
        for (method, config), parts in zip(configs, quantized, strict=True):
            figures = evaluate_scenes(fastest(parts, jobs), f"{config.bits} {method}")
            rows.append(((config.bits, method), figures))
    title = f"The bundled Swin Mask R-CNN, evaluated on {len(scenes)} held-out synthetic scenes"
    table = ap_table(title, ["bits", "method"], [(("fp32", ""), full), *rows])
    json_rows = [{"bits": bits, "method": method} | _rounded(figures) for (bits, method), figures in rows]
    show({"fp32": _rounded(full), "rows": json_rows, "seed": seed}, json_out, table)


def ap_table(title: str, heads: Sequence[str], rows: Sequence[tuple[Sequence[str], dict[str, float]]]) -> Table:
    """Return a table of average precision [%]. heads: of the first columns. rows: (their cells, figures) each."""
    columns = views.numbers(*(name.replace("_ap", " AP") for name in SHOWN))
    table = Table(*heads, *columns, title=escape(title))
    for texts, figures in rows:
        cells = [figures[name] for name in SHOWN]
        table.add_row(*map(escape, texts), *("" if math.isnan(value) else f"{100 * value:.1f}" for value in cells))
    return table


def _rounded(figures: dict[str, float]) -> dict[str, float | None]:
    """Round figures for JSON, which does not allow NaN: NaN becomes None."""
    return {name: None if math.isnan(value) else round(value, 6) for name, value in figures.items()}
