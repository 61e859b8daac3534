"""`adalog sensitivity`: measure the loss of a model if only one operand is quantized, at each width."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from adalog import Config
from adalog.cli import budgets, detectors, options, views
from adalog.cli.console import emit_json, partial_of, progress_bar, quiet, remove_finished, show
from adalog.cli.targets import source_of
from adalog.detection import zoo as detection
from adalog.inputs import zoo
from adalog.study.sensitivity import JUDGED, Sensitivity


def command(
    model: Annotated[str, typer.Argument(help=f"Model to measure: {zoo.KINDS}; or a detector: {detection.KINDS}.")],
    data: options.JudgingDataOption = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="JSON file to write. Other commands read it with --sensitivity.")
    ] = Path("sensitivity.json"),
    method: options.MethodOption = "adalog",
    widths: options.WidthsOption = options.WIDTHS,
    images: options.ImagesOption = 32,
    judged: options.JudgedOption = JUDGED,
    parts: options.PartsOption = None,
    checkpoint: options.CheckpointOption = None,
    no_pretrained: options.NoPretrainedOption = False,
    resume: options.ResumeOption = False,
    device: options.DeviceOption = "cpu",
    seed: options.SeedOption = 0,
    threads: options.ThreadsOption = 0,
    memory: options.MemoryOption = None,
    json_out: options.JsonOption = None,
) -> None:
    """Measure the loss of a model if only one operand is quantized, for each operand and several bits.

    The loss is the KL divergence from the float model for a classifier, otherwise the relative squared error.
    Other commands read the result to choose bits within a budget.
    """
    setup = options.read_setup(no_pretrained, checkpoint, device, seed, threads, memory)
    tried = options.read_widths(widths)
    config = dataclasses.replace(Config.preset("w4a4", method), images=images)  # --widths replaces these bits
    partial = partial_of(out, json_out, resume, (source_of(model), checkpoint, data))
    out.parent.mkdir(parents=True, exist_ok=True)
    kinds = detectors.read_parts(model, parts)
    record: dict[str, Any] = {"model": model, "method": method, "calibration_images": images, "seed": seed}
    if kinds is not None:
        detectors.check_setup(setup)
        by_part = detectors.measure(model, data, config, judged, tried, kinds, setup, partial)
        record |= {"parts": {name: part_sensitivity.to_json() for name, part_sensitivity in by_part.items()}}
        tables = [table_of(part_sensitivity, name) for name, part_sensitivity in by_part.items()]
    else:
        calibrated = budgets.subject(model, data, config, judged, setup)
        with progress_bar() as progress, quiet():
            measurement = budgets.measure(calibrated, config, tried, progress, setup, partial)
        record |= measurement.to_json()
        tables = [table_of(measurement, "the model")]
    emit_json(record, str(out))
    remove_finished(partial)
    show(record, json_out, *tables, str(out))


def table_of(measurement: Sensitivity, name: str) -> Table:
    """Return a table with one row per operand and its loss at each width. name: the model or part that was measured."""
    loss = "KL divergence [nats]" if measurement.measure == "kl" else measurement.measure
    title = escape(f"Each operand quantized alone: {loss} of the output of {name}, on {measurement.images} inputs")
    widths = sorted({row.bits for row in measurement.rows})
    table = Table("site", "operand", *views.numbers(*(f"{width} bits" for width in widths)), title=title)
    rows = {(row.unit, row.operand, row.bits): row.loss for row in measurement.rows}
    for unit in measurement.units:
        for kind in unit.operands:
            losses = (rows.get((unit.name, kind, width)) for width in widths)
            name = unit.name if len(unit.sites) == 1 else f"{unit.name} and {len(unit.sites) - 1} more"
            table.add_row(escape(name), kind, *("" if loss is None else f"{loss:.2g}" for loss in losses))
    return table
