"""`adalog demo`: quantize a bundled model and evaluate the results."""

import dataclasses
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from torch import nn

from adalog import Calibration, Config, artifact, files
from adalog._quantize import sample_images, with_error
from adalog.calibration.schedule import Resources
from adalog.cli import detectors, views
from adalog.cli.console import check_outputs, emit_json, note, progress_bar, say, site_progress
from adalog.cli.options import JsonOption, SeedOption, ThreadsOption, thread_count
from adalog.errors import printable
from adalog.inputs import demo, zoo
from adalog.model import quickest
from adalog.quantized import QuantizedProgram
from adalog.report import examine, report
from adalog.study.drawing import render
from adalog.study.evaluate import Score, Share, predict, score
from adalog.study.levels import HISTOGRAMS, LEVEL_METHODS, histogram_panels, level_figure

METHODS = (*LEVEL_METHODS, "adalog+")
# Defaults of --bits and --methods: quantizers at 4 bits; at fewer bits, a correction from 32 and from 128 images.
PLAN = {"w4a4": LEVEL_METHODS, "w3a3": ("adalog", "adalog+"), "w2a2": ("adalog", "adalog+")}
# Defaults for the bundled detector.
DETECTOR_BITS, DETECTOR_METHODS = ("w6a6", "w4a4"), ("adalog", "repq-vit", "uniform", "minmax")
_PAGE_IMAGES = 16  # images for the histograms of the report


def command(
    out: Annotated[Path, typer.Option(help="Folder to write artifacts, a figure and a report to.")] = Path(
        "adalog-demo"
    ),
    detector: Annotated[
        bool,
        typer.Option("--detector", help="Use the bundled detector instead, evaluated by COCO average precision (AP)."),
    ] = False,
    bits: Annotated[
        str | None,
        typer.Option(
            help=f"Bits of weights and activations, comma-separated. Default: {','.join(PLAN)}, or with --detector "
            f"{','.join(DETECTOR_BITS)}."
        ),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help=f"Methods to compare, comma-separated: {', '.join(METHODS)}. Default: a selection that depends on the "
            "bits."
        ),
    ] = None,
    seed: SeedOption = 0,
    threads: ThreadsOption = 0,
    json_out: JsonOption = None,
) -> None:
    """Quantize the bundled ViT with AdaLog and other methods, and evaluate each result on 2,000 real images.

    A result runs in integers if the compiled kernels support it, otherwise by fake quantization.
    With --detector, the command quantizes the bundled detector and evaluates each result on 300 synthetic scenes.
    """
    jobs = thread_count(threads)
    if detector:
        check_outputs(json_out)
        names = DETECTOR_METHODS if methods is None else methods.split(",")
        widths = DETECTOR_BITS if bits is None else bits.split(",")
        detectors.demonstrate(widths, names, seed=seed, jobs=jobs, json_out=json_out)
        return
    plans = _plan(bits or ",".join(PLAN), methods)
    artifacts = {plan: out / _file_name(*plan) for plan in plans if plan[0].startswith("adalog")}
    page = out / "report.html"
    outputs = [out / "levels.png", *artifacts.values(), *([page] if artifacts else [])]
    check_outputs(*outputs, json_out)
    model, (images, labels) = demo.load_model(), demo.test_images()
    rows: list[dict[str, Any]] = []
    results: list[tuple[Path, QuantizedProgram, str | None, Score]] = []
    table = Table(
        "bits",
        "method",
        *views.numbers("top-1 (95 % CI)", "agreement", "bytes", "calib. [s]"),
        title="The bundled ViT, trained on CIFAR-10 and evaluated on 2,000 of its test images",
        caption="If several methods quantize a site alike, it is searched once, and its time counts in the first row.",
    )
    with progress_bar() as progress:
        overall = progress.add_task("overall", total=len(plans) + 1)
        current = progress.add_task("full precision", total=1)
        reference = predict(model, images, jobs=jobs)
        fp32 = score(reference, labels)
        size = sum(value.numel() * 4 for value in model.state_dict().values())
        table.add_row("fp32", "", views.interval(fp32.top1), "", f"{size:,}", "")
        progress.advance(overall)
        calibration = _calibrate(model, plans, seed)
        for method, config in plans:
            start = time.perf_counter()
            watch = site_progress(progress, current, f"{config.bits} {method}")
            quantized = with_error(calibration.quantize(config, Resources(jobs, progress=watch)), calibration)
            quantized.note(preprocessing=zoo.DEMO_PREPROCESSING.to_json())
            seconds = time.perf_counter() - start
            runs, executor, at_once = quickest(quantized, jobs)
            result = score(predict(runs, images, jobs=at_once), labels, reference)
            if (method, config) in artifacts:
                results.append((artifacts[method, config], quantized.quantized, executor, result))
                count = quantized.save(artifacts[method, config])
            else:
                count = len(artifact.encode(quantized.quantized))
            rows.append(
                {
                    "bits": config.bits,
                    "method": method,
                    "top1": _value(result.top1),
                    "agreement": result.agreement,
                    "bytes": count,
                    "seconds": round(seconds, 3),
                    "executor": executor,
                }
            )
            table.add_row(
                config.bits,
                method,
                views.interval(result.top1),
                views.percent(result.agreement),
                f"{count:,}",
                f"{seconds:.1f}",
                end_section=(method, config) == [plan for plan in plans if plan[1].bits == config.bits][-1],
                style="bold" if (method, config) in artifacts else None,
            )
            progress.advance(overall)
        progress.update(current, description="drawing the figure")
        files.write_whole(out / "levels.png", _levels(calibration, plans))
        if results:
            files.write_whole(page, _page(*results[-1], fp32))
    if json_out != "-":
        say(table)
        note(printable(f"wrote {', '.join(map(str, outputs))}"))
        if results:
            note(printable(f"open {page} in a browser for a report on {results[-1][0].name}"))
    emit_json({"fp32": {"top1": _value(fp32.top1)}, "rows": rows, "seed": seed}, json_out)


def _levels(calibration: Calibration, plans: Sequence[tuple[str, Config]]) -> bytes:
    """Draw the figure of the levels as PNG."""
    compared = _configs_of_figure(plans)
    figure = level_figure(histogram_panels(calibration, compared), f"Levels at {next(iter(compared.values())).bits}")
    return render(figure, "png", HISTOGRAMS)


def _page(path: Path, quantized: QuantizedProgram, executor: str | None, result: Score, full: Score) -> bytes:
    """Return the HTML report of an artifact that the demo has evaluated."""
    record = {"file": path.name, "executor": executor, "reference": "demo", **dataclasses.asdict(result)}
    subject = examine(path.name, artifact.read(path), quantized, demo.calibration_images()[:_PAGE_IMAGES])
    return report(subject, evaluation={**record, "full_precision": dataclasses.asdict(full)})


def _plan(bits: str, methods: str | None) -> list[tuple[str, Config]]:
    """Return the methods to compare, each with its config. Raises ValueError for a method outside `METHODS`."""
    names = None if methods is None else methods.split(",")
    unknown = [name for name in names or () if name not in METHODS]
    if unknown:
        raise ValueError(f"--methods {unknown[0]!r} is not a method of the demo: choose from {', '.join(METHODS)}")
    return [
        (name, Config.preset(width, name)) for width in bits.split(",") for name in names or PLAN.get(width, METHODS)
    ]


def _calibrate(model: nn.Module, plans: Sequence[tuple[str, Config]], seed: int) -> Calibration:
    """Return one calibration for all plans. Stages that fit weights get more training images, if a plan has any."""
    images = sample_images(demo.calibration_images(), plans[0][1].images, seed)
    fitted = max(config.images_fitted for _, config in plans)
    more = sample_images(demo.unlabelled_images(), fitted, seed) if fitted else images
    return Calibration(model, images, unlabelled=more, seed=seed)


def _configs_of_figure(plans: Sequence[tuple[str, Config]]) -> dict[str, Config]:
    """Return the methods whose levels the figure shows, with their configs. All have the bits with the most methods."""
    # A correction does not change the levels.
    candidates = [plan for plan in plans if plan[0] in LEVEL_METHODS] or plans
    widths = [dict(of_bits) for _, of_bits in groupby(candidates, key=lambda plan: plan[1].bits)]
    return max(reversed(widths), key=len)


def _file_name(method: str, config: Config) -> str:
    return f"demo-{config.bits}{method.removeprefix('adalog')}.safetensors"


def _value(share: Share | None) -> float | None:
    return None if share is None else share.value
