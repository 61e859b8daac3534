"""`adalog report`: write an HTML page about an artifact, or a comparison of two artifacts."""

import hashlib
from pathlib import Path
from typing import Annotated

import typer

from adalog import artifact, files
from adalog.cli.console import check_outputs, progress_bar, quiet, show
from adalog.cli.options import DrawOption, JsonOption, thread_count
from adalog.cli.targets import sample_for
from adalog.errors import printable
from adalog.model import QuantizedModel
from adalog.report import comparison, examine, read_bench, read_evaluation, read_sensitivity, report

_IMAGES = 16


def command(
    file: Annotated[Path, typer.Argument(help="Artifact to describe, written by `adalog quantize`.")],
    other: Annotated[Path | None, typer.Argument(help="Second artifact, to compare with the first.")] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="HTML page to write.")] = Path("report.html"),
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder of images for the histograms of activations. Default: the bundled images, if they fit."
        ),
    ] = None,
    images: Annotated[
        int | None, typer.Option(min=1, help=f"Number of images for the histograms. Default: {_IMAGES}.")
    ] = None,
    sensitivity: Annotated[
        Path | None, typer.Option(help="File written by `adalog sensitivity`, to show the loss of each site.")
    ] = None,
    evaluation: Annotated[
        Path | None,
        typer.Option(help="File written by `adalog evaluate --json` for the artifact, to show its accuracy."),
    ] = None,
    bench: Annotated[
        Path | None, typer.Option(help="File written by `adalog bench --json` for the artifact, to show its speed.")
    ] = None,
    seed: DrawOption = 0,
    json_out: JsonOption = None,
) -> None:
    """Write an HTML page about an artifact, or a comparison of two artifacts.

    The page shows the sites of the model with their levels, losses and bytes, and how the artifact was made.
    """
    check_outputs(out, json_out, reads=(file, other, data, sensitivity, evaluation, bench))
    if other is not None:
        of_one = {"data": data, "images": images, "evaluation": evaluation, "bench": bench, "seed": seed or None}
        for name, value in of_one.items():
            if value is not None:
                raise ValueError(
                    f"--{name} does not apply to a comparison of two artifacts: leave it out, or name one file"
                )
    paths = [file] if other is None else [file, other]
    contents = [artifact.read(path) for path in paths]
    models = [artifact.deserialise(content, str(path)) for path, content in zip(paths, contents, strict=True)]
    first = models[0]
    losses = None if sensitivity is None else read_sensitivity(sensitivity, first)
    evaluated = None if evaluation is None else read_evaluation(evaluation, first)
    timed = None if bench is None else read_bench(bench, hashlib.sha256(contents[0]).hexdigest())
    sample = None if other else sample_for(file, QuantizedModel(first), data, images or _IMAGES, seed, thread_count(0))
    if images is not None and sample is None:
        raise ValueError(f"--images {images} needs images, and {file} has none of its own: give --data FOLDER")
    with progress_bar() as progress, quiet():
        bar = progress.add_task("examining", total=1 if sample is None else len(sample))
        subjects = [
            examine(printable(path.name), content, model, sample, lambda done: progress.update(bar, completed=done))
            for path, content, model in zip(paths, contents, models, strict=True)
        ]
    if other is None:
        page = report(subjects[0], sensitivity=losses, evaluation=evaluated, bench=timed)
    else:
        page = comparison(subjects[0], subjects[1], sensitivity=losses)
    files.write_whole(out, page)
    record = {"file": str(out), "bytes": len(page), "of": [str(path) for path in paths]}
    show(record, json_out, f"{printable(str(out))}: {len(page):,} bytes")
