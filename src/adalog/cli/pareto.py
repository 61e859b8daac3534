"""`adalog pareto`: plot accuracy against size and operations."""

import dataclasses
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table

from adalog import Config, DataError
from adalog.cli import budgets, options, views
from adalog.cli.console import emit_json, partial_of, progress_bar, quiet, remove_finished, say, write_file
from adalog.cli.targets import source_of
from adalog.inputs import demo, zoo
from adalog.inputs.images import find_images
from adalog.study import sensitivity as study
from adalog.study.drawing import render
from adalog.study.evaluate import PreparedImages, check_classes, predict, score
from adalog.study.pareto import BUDGETS, Point, check_output, curve, pareto_figure


def command(
    model: Annotated[str, typer.Argument(help=f"Model to quantize: {zoo.KINDS}.")],
    data: options.JudgingDataOption = None,
    val: Annotated[
        Path | None,
        typer.Option(
            help="Folder of labelled images, to measure top-1 as well: one subfolder per class, or a CSV file with the "
            "columns file,label."
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Picture to write: .png or .svg.")] = Path("pareto.png"),
    method: options.MethodOption = "adalog",
    count: Annotated[
        int,
        typer.Option(
            "--budgets", min=2, max=100, help="Number of budgets between the smallest and the largest --widths."
        ),
    ] = BUDGETS,
    widths: options.WidthsOption = options.WIDTHS,
    images: options.ImagesOption = 32,
    judged: options.JudgedOption = study.JUDGED,
    sensitivity: options.SensitivityOption = None,
    checkpoint: options.CheckpointOption = None,
    no_pretrained: options.NoPretrainedOption = False,
    resume: options.ResumeOption = False,
    device: options.DeviceOption = "cpu",
    seed: options.SeedOption = 0,
    threads: options.ThreadsOption = 0,
    memory: options.MemoryOption = None,
    json_out: options.JsonOption = None,
) -> None:
    """Plot the loss of a quantized model against its size and its operations.

    For several budgets, adalog chooses the bits of each operand.
    The plot compares these models with models that have the same bits for all operands.
    """
    setup = options.read_setup(no_pretrained, checkpoint, device, seed, threads, memory)
    tried = options.read_widths(widths)
    if len(tried) < 2:
        raise ValueError(f"--widths {widths} has only one width: give two or more")
    if sensitivity is not None and widths != options.WIDTHS:
        raise ValueError("--widths has no effect on the measured file of --sensitivity: leave one of them out")
    if out.suffix not in (".png", ".svg"):
        raise DataError(f"{out} does not end in .png or .svg: give --out such a file")
    config = dataclasses.replace(Config.preset("w4a4", method), images=images)  # --widths replaces these bits
    partial = partial_of(out, json_out, resume, (source_of(model), checkpoint, sensitivity, data, val))
    known = None if sensitivity is None else study.read(sensitivity)
    calibrated = budgets.subject(model, data, config, judged, setup)
    check_output(calibrated.calibration.program)  # before the long work, check that the output can be evaluated
    predict(calibrated.loaded.module, calibrated.judged[:1])
    labelled = _labels_of(model, val, calibrated)
    out.parent.mkdir(parents=True, exist_ok=True)
    with progress_bar() as progress, quiet():
        losses = known or budgets.measure(calibrated, config, tried, progress, setup, partial)
        resources = setup.resources(partial, progress, "quantizing", "model:")
        points = curve(
            calibrated.calibration,
            config,
            losses,
            calibrated.loaded.module,
            calibrated.judged,
            resources.named("points"),
            labelled=labelled,
            count=count,
            notes=calibrated.notes,
        )
        figure = pareto_figure(points, losses.measure, model)
        write_file(out, render(figure, out.suffix[1:], f"{model}: loss against bytes and BOPs"))
    record = {"model": model, "method": method, "measure": losses.measure, "images": losses.images, "seed": seed}
    emit_json(record | {"points": [dataclasses.asdict(point) for point in points]}, json_out)
    remove_finished(partial)
    if json_out != "-":
        say(table_of(points, losses.measure), str(out))


def _labels_of(
    model: str, val: Path | None, calibrated: budgets.CalibratedModel
) -> tuple[PreparedImages, torch.Tensor] | None:
    """Return the labelled images with their labels, or None if there are none."""
    if val is None:
        if model != "demo":
            return None
        bundled, labels = demo.test_images()
        return PreparedImages(bundled), labels
    images = find_images(val)
    if images.labels is None:
        raise DataError(
            f"{val} has no labels: make one subfolder per class, or add a CSV file with the columns file,label"
        )
    prepared, labels = PreparedImages(images, calibrated.loaded.rgb_preprocessing), torch.tensor(images.labels)
    # Before the long work, check on one image of the highest class that the model knows all classes.
    last = int(labels.argmax())
    logits = predict(calibrated.loaded.module, prepared(range(last, last + 1)), device=calibrated.judged.device)
    check_classes(images.classes, logits, str(val), model)
    score(logits, labels[[last]])
    return prepared, labels


def table_of(points: list[Point], measure: str) -> Table:
    """Return a table with one row per model, the smallest file first."""
    loss = "KL [nats]" if measure == "kl" else measure
    title = "Models with the same bits for all operands, and with bits chosen within a budget"
    table = Table("widths", *views.numbers("bytes", "GBOPs", loss, "agreement", "top-1"), title=title)
    for point in sorted(points, key=lambda point: (point.bytes, point.chosen)):
        share = [views.percent(value) if value is not None else "" for value in (point.agreement, point.top1)]
        kind = f"chosen, budget of {point.width:.1f} bits" if point.chosen else f"{point.width} bits for all"
        table.add_row(kind, f"{point.bytes:,}", f"{point.bops / 1e9:.2f}", f"{point.loss:.3g}", *share)
    return table
