"""`adalog report`: one HTML page about a file, or about two side by side."""

from pathlib import Path
from typing import Annotated

import typer

from adalog import artifact, files
from adalog.cli.console import check_outputs, emit_json, progress_bar, quiet, say, waiting
from adalog.cli.options import JsonOption, SeedOption, thread_count
from adalog.cli.targets import sample_for
from adalog.errors import printable
from adalog.model import QuantizedModel
from adalog.report import (
    Subject,
    comparison,
    examine,
    read_bench,
    read_evaluation,
    read_sensitivity,
    report,
)


def command(
    file: Annotated[Path, typer.Argument(help="The artifact.")],
    other: Annotated[Path | None, typer.Argument(help="Another artifact, to compare the first with.")] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write.")] = Path("report.html"),
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder of images for the histograms of activations. The bundled model has its own without it."
        ),
    ] = None,
    images: Annotated[int, typer.Option(min=1, help="Number of images for the histograms.")] = 16,
    sensitivity: Annotated[
        Path | None, typer.Option(help="JSON of `adalog sensitivity`: the loss of each site alone.")
    ] = None,
    evaluation: Annotated[
        Path | None, typer.Option(help="JSON of `adalog evaluate` of the artifact: its accuracy.")
    ] = None,
    bench: Annotated[
        Path | None, typer.Option(help="JSON of `adalog bench` of the artifact: the executors' times.")
    ] = None,
    seed: SeedOption = 0,
    json_out: JsonOption = None,
) -> None:
    """Write one HTML page about an artifact: its sites, levels, losses, bytes and origin; or compare two artifacts."""
    check_outputs(out, json_out, reads=(file, other, sensitivity, evaluation, bench))
    losses = None if sensitivity is None else read_sensitivity(sensitivity)
    if other is not None:
        given = (("--data", data), ("--evaluation", evaluation), ("--bench", bench))
        odd = [option for option, value in given if value is not None]
        if odd:
            raise ValueError(f"{odd[0]} is of one artifact, and two are compared: leave it out, or name one file")
        with waiting(f"compare {file} and {other}"):
            pages = [examine(printable(path.name), artifact.read(path)) for path in (file, other)]
            content = comparison(*pages, sensitivity=losses)
    else:
        subject = _examined(file, data, images, seed)
        judged = None if evaluation is None else read_evaluation(evaluation, subject.quantized)
        timed = None if bench is None else read_bench(bench)
        content = report(subject, sensitivity=losses, evaluation=judged, bench=timed)
    files.write_whole(out, content)
    if json_out != "-":
        say(f"{printable(str(out))}: {len(content):,} bytes")
    emit_json({"file": str(out), "bytes": len(content), "of": [str(each) for each in (file, other) if each]}, json_out)


def _examined(file: Path, data: Path | None, images: int, seed: int) -> Subject:
    content = artifact.read(file)
    model = QuantizedModel(artifact.deserialise(content, str(file)))
    sample = sample_for(file, model, data, images, seed, thread_count(0))
    with progress_bar() as progress, quiet():
        bar = progress.add_task(f"examine {printable(file.name)}", total=images)
        return examine(
            printable(file.name),
            content,
            sample,
            lambda done, total: progress.update(bar, completed=done, total=total),
        )
