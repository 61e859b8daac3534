"""`adalog demo`: the bundled model, quantized and judged."""

import dataclasses
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from adalog import Calibration, Config, artifact, files
from adalog.cli import views
from adalog.cli.console import check_outputs, emit_json, note, progress_bar, say, site_progress
from adalog.cli.options import JsonOption, SeedOption, ThreadsOption, thread_count
from adalog.errors import printable
from adalog.inputs import demo, zoo
from adalog.model import quickest
from adalog.quantize import sample_images
from adalog.study.drawing import rendered
from adalog.study.evaluate import Share, predict, score
from adalog.study.figures import CAPTIONS, LEVEL_METHODS
from adalog.study.levels import histogram_panels, level_figure

BITS = ("w6a6", "w4a4", "w3a3")
METHODS = LEVEL_METHODS


def command(
    out: Annotated[Path, typer.Option(help="Folder for the artifacts and the figure.")] = Path("adalog-demo"),
    bits: Annotated[str, typer.Option(help="Bits to quantize to, comma-separated, the most bits first.")] = ",".join(
        BITS
    ),
    methods: Annotated[
        str, typer.Option(help="Methods to compare, comma-separated; a selection of the default.")
    ] = ",".join(METHODS),
    seed: SeedOption = 0,
    threads: ThreadsOption = 0,
    json_out: JsonOption = None,
) -> None:
    """Quantize the bundled ViT with AdaLog and its rivals, and judge each on 2,000 real images, in integers."""
    jobs = thread_count(threads)
    names = methods.split(",")
    plans = [(method, Config.preset(width, method)) for width in bits.split(",") for method in names]
    odd = [name for name in names if name not in METHODS]
    if odd:
        raise ValueError(f"--methods {odd[0]!r} is none of the demo's: {', '.join(METHODS)}")
    artifacts = {out / f"demo-{config.bits}.safetensors" for method, config in plans if method == "adalog"}
    check_outputs(out / "levels.png", *artifacts, json_out)
    model = demo.load_model()
    images, labels = demo.test_images()
    rows: list[dict[str, Any]] = []
    table = Table(
        title="A ViT trained on CIFAR-10, on 2,000 of its test images",
        caption="A site that several methods treat alike is searched once: its time counts in the first of their rows.",
    )
    for column in ("bits", "method"):
        table.add_column(column)
    for column in ("top-1 (95 % CI)", "agreement", "bytes", "calib. [s]"):
        table.add_column(column, justify="right")
    with progress_bar() as progress:
        overall = progress.add_task("all", total=len(plans) + 1)
        current = progress.add_task("full precision", total=1)
        reference = predict(model, images, jobs=jobs)
        fp32 = score(reference, labels)
        size = sum(value.numel() * 4 for value in model.state_dict().values())
        table.add_row("fp32", "", views.interval(fp32.top1), "", f"{size:,}", "")
        progress.advance(overall)
        calibration = Calibration(model, sample_images(demo.calibration_images(), plans[0][1].images, seed), seed=seed)
        for method, config in plans:
            start = time.perf_counter()
            watch = site_progress(progress, current, f"{config.bits} {method}")
            quantized = calibration.quantize(config, watch, jobs=jobs)
            quantized.note(preprocessing=dataclasses.asdict(zoo.DEMO_PREPROCESSING))
            seconds = time.perf_counter() - start
            runs, executor, at_once = quickest(quantized, jobs)
            result = score(predict(runs, images, jobs=at_once), labels, reference)
            if method == "adalog":
                count = quantized.save(out / f"demo-{config.bits}.safetensors")
            else:
                count = len(artifact.serialise(quantized.quantized))
            row = {"bits": config.bits, "method": method, "top1": _value(result.top1), "agreement": result.agreement}
            rows.append({**row, "bytes": count, "seconds": round(seconds, 3), "executor": executor})
            table.add_row(
                config.bits,
                method,
                views.interval(result.top1),
                views.percent(result.agreement),
                f"{count:,}",
                f"{seconds:.1f}",
                end_section=method == names[-1],
                style="bold" if method == "adalog" else None,
            )
            progress.advance(overall)
        progress.update(current, description="figure")
        panels = histogram_panels(calibration, dict(plans[-len(names) :]))
        drawn = level_figure(panels, f"Levels at {plans[-1][1].bits}")
        files.write_whole(out / "levels.png", rendered(drawn, "png", CAPTIONS["histograms"]))
    if json_out != "-":
        say(table)
        written = printable(", ".join(str(path) for path in sorted(out.iterdir())))
        note(f"wrote {written}")
    emit_json({"fp32": {"top1": _value(fp32.top1)}, "rows": rows, "seed": seed}, json_out)


def _value(share: Share | None) -> float | None:
    return None if share is None else share.value
