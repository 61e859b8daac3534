"""`adalog sensitivity`: what each operand of a model costs alone at each width."""

import dataclasses
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from adalog import METHODS, Config, DataError
from adalog.cli import budgets
from adalog.cli.console import check_outputs, emit_json, progress_bar, quiet, say
from adalog.cli.options import (
    CheckpointOption,
    DeviceOption,
    JsonOption,
    NoPretrainedOption,
    SeedOption,
    ThreadsOption,
    find_device,
    read_size,
    read_widths,
    thread_count,
)
from adalog.cli.targets import source_of
from adalog.inputs import zoo
from adalog.study.sensitivity import JUDGED, WIDTHS, Sensitivity, write


def command(
    model: Annotated[str, typer.Argument(help=f"The model: {zoo.KINDS}.")],
    data: Annotated[
        Path | None,
        typer.Option(help="Folder of images that calibrate and, apart from these, judge. demo has its own."),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The file to write, for --sensitivity of other commands.")
    ] = Path("sensitivity.json"),
    method: Annotated[str, typer.Option(help=f"One of {', '.join(METHODS)}.")] = "adalog",
    widths: Annotated[str, typer.Option(help="Bits at which each operand is tried.")] = ",".join(map(str, WIDTHS)),
    images: Annotated[int, typer.Option(min=1, help="Number of calibration images.")] = 32,
    judged: Annotated[int, typer.Option(min=1, help="Number of images that judge; none of them calibrates.")] = JUDGED,
    checkpoint: CheckpointOption = None,
    no_pretrained: NoPretrainedOption = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue a run that was stopped, from what OUT.partial holds.")
    ] = False,
    device: DeviceOption = "cpu",
    seed: SeedOption = 0,
    threads: ThreadsOption = 0,
    memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory for observed values and searches.")] = "2GiB",
    json_out: JsonOption = None,
) -> None:
    """Measure what each operand of a model costs alone at each width, and write it to a file."""
    limit, tried, place = read_size(memory), read_widths(widths), find_device(device)
    config = dataclasses.replace(Config.preset("w4a4", method), images=images)  # the widths are those of --widths
    partial = out.with_name(f"{out.name}.partial")
    check_outputs(out, partial, json_out, reads=(source_of(model), checkpoint))
    left = budgets.leftovers(partial)
    if left and not resume:
        raise DataError(f"{left[0]} holds what an earlier run has finished: go on with --resume, or remove it")
    jobs = thread_count(threads)
    about = budgets.subject(
        model,
        data,
        config,
        judged,
        no_pretrained=no_pretrained,
        checkpoint=checkpoint,
        seed=seed,
        jobs=jobs,
        memory=limit,
        device=place,
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    with progress_bar() as progress, quiet():
        found = budgets.measured(about, config, tried, progress, jobs=jobs, memory=limit, partial=partial)
    write(found, out)
    for file in budgets.leftovers(partial):
        file.unlink()
    if json_out != "-":
        say(table_of(found), f"{out}: {len(found.rows)} rows, judged by {found.images} images")
    emit_json(found.to_json(), json_out)


def table_of(found: Sensitivity) -> Table:
    """One row an operand, with its loss at each width."""
    loss = "KL divergence [nats]" if found.measure == "kl" else found.measure
    table = Table(title=f"Each operand alone: {loss} of the output")
    widths = sorted({row.bits for row in found.rows})
    for column in ("site", "operand"):
        table.add_column(column)
    for width in widths:
        table.add_column(f"{width} bits", justify="right")
    rows = {(row.unit, row.operand, row.bits): row.loss for row in found.rows}
    for unit in found.units:
        for kind in unit.operands:
            losses = (rows.get((unit.name, kind, width)) for width in widths)
            name = unit.name if len(unit.sites) == 1 else f"{unit.name} and {len(unit.sites) - 1} more"
            table.add_row(name, kind, *("" if each is None else f"{each:.2g}" for each in losses))
    return table
