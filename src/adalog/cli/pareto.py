"""`adalog pareto`: accuracy against size and operations, as a picture and as JSON."""

import dataclasses
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table

from adalog import METHODS, Config, DataError, files
from adalog.cli import budgets, views
from adalog.cli.console import check_outputs, emit_json, progress_bar, quiet, say, site_progress
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
from adalog.inputs import demo, zoo
from adalog.inputs.images import find_images
from adalog.study import sensitivity as study
from adalog.study.drawing import rendered
from adalog.study.pareto import BUDGETS, Point, curve, pareto_figure


def command(
    model: Annotated[str, typer.Argument(help=f"The model: {zoo.KINDS}.")],
    data: Annotated[
        Path | None,
        typer.Option(help="Folder of images that calibrate and, apart from these, judge. demo has its own."),
    ] = None,
    val: Annotated[
        Path | None, typer.Option(help="Labelled images for top-1: one subfolder a class, or a CSV of file,label.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="The picture to write, .png or .svg.")] = Path("pareto.png"),
    method: Annotated[str, typer.Option(help=f"One of {', '.join(METHODS)}.")] = "adalog",
    count: Annotated[int, typer.Option("--budgets", min=2, max=100, help="Number of budgets.")] = BUDGETS,
    widths: Annotated[str, typer.Option(help="Bits among which to choose.")] = ",".join(map(str, study.WIDTHS)),
    images: Annotated[int, typer.Option(min=1, help="Number of calibration images.")] = 32,
    judged: Annotated[
        int, typer.Option(min=1, help="Number of images that judge; none of them calibrates.")
    ] = study.JUDGED,
    sensitivity: Annotated[
        Path | None, typer.Option(help="What `adalog sensitivity` wrote of this model; measured if not given.")
    ] = None,
    checkpoint: CheckpointOption = None,
    no_pretrained: NoPretrainedOption = False,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with the sensitivity that a run which was stopped left in OUT.partial."),
    ] = False,
    device: DeviceOption = "cpu",
    seed: SeedOption = 0,
    threads: ThreadsOption = 0,
    memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory for observed values and searches.")] = "2GiB",
    json_out: JsonOption = None,
) -> None:
    """Draw what models within ten budgets keep, beside models with one width for all."""
    limit, tried, place, jobs = read_size(memory), read_widths(widths), find_device(device), thread_count(threads)
    if len(tried) < 2:
        raise ValueError(f"--widths {widths}: a curve takes two widths or more")
    if out.suffix not in (".png", ".svg"):
        raise DataError(f"{out} is none of .png, .svg: name such a file")
    config = dataclasses.replace(Config.preset("w4a4", method), images=images)  # the widths are those of --widths
    partial = out.with_name(f"{out.name}.partial")
    check_outputs(out, partial, json_out, reads=(source_of(model), checkpoint, sensitivity))
    if not resume and (left := budgets.leftovers(partial)):
        raise DataError(f"{left[0]} holds what an earlier run has finished: go on with --resume, or remove it")
    known = None if sensitivity is None else study.read(sensitivity)
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
    labelled = _labelled(model, val, about, jobs)
    out.parent.mkdir(parents=True, exist_ok=True)
    with progress_bar() as progress, quiet():
        found = known or budgets.measured(about, config, tried, progress, jobs=jobs, memory=limit, partial=partial)
        watch = site_progress(progress, progress.add_task("models", total=1), "model of")
        points = curve(
            about.calibration,
            config,
            found,
            about.loaded.module,
            about.judged,
            labelled=labelled,
            count=count,
            notes=about.notes,
            jobs=jobs,
            progress=watch,
        )
        drawn = pareto_figure(points, found.measure, model)
        files.write_whole(out, rendered(drawn, out.suffix[1:], f"{model}: loss against bytes and BOPs"))
    for file in budgets.leftovers(partial):
        file.unlink()
    if json_out != "-":
        say(table_of(points, found.measure), str(out))
    told = {"model": model, "method": method, "measure": found.measure, "images": found.images, "seed": seed}
    emit_json(told | {"points": [dataclasses.asdict(each) for each in points]}, json_out)


def _labelled(
    model: str, val: Path | None, about: budgets.Subject, jobs: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The images with labels, where there are any."""
    if val is None:
        return demo.test_images() if model == "demo" else None
    images = find_images(val)
    if images.labels is None:
        raise DataError(f"{val} has no labels: make a subfolder a class, or add a CSV file of file,label")
    return images.load(about.loaded.prepared, jobs=jobs), torch.tensor(images.labels)


def table_of(points: list[Point], measure: str) -> Table:
    """One row a model, the smallest file first."""
    table = Table(title="Models of one width for all, and within budgets of bytes and BOPs")
    for column in ("widths", "bytes", "GBOPs", "KL [nats]" if measure == "kl" else measure, "agreement", "top-1"):
        table.add_column(column, justify="left" if column == "widths" else "right")
    for each in sorted(points, key=lambda each: (each.bytes, each.chosen)):
        share = [views.percent(value) if value is not None else "" for value in (each.agreement, each.top1)]
        kind = f"chosen, as of {each.width:.1f} bits" if each.chosen else f"{each.width} bits for all"
        table.add_row(kind, f"{each.bytes:,}", f"{each.bops / 1e9:.2f}", f"{each.loss:.3g}", *share)
    return table
