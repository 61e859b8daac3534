"""List the tables of the paper, or measure them.

    python -m experiments.tables [N]... [--models demo] [--data FOLDER] [--seeds 3] ...

`--help` lists the options. Under torchrun, several processes share the rows.
"""

from benchmarks.real import load_classifier, names_folder
from experiments import classifiers, detectors, paper
from experiments.markdown import markdown
from experiments.rows import Progress, Request

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from adalog import DataError, files
from adalog.cli.console import check_outputs, emit_json, job, progress_bar, quiet, run_script, say, waiting, write_file
from adalog.cli.options import DebugOption, DeviceOption, JsonOption, find_device, thread_count
from adalog.cli.targets import load_model, source_of
from adalog.detection import zoo as detection
from adalog.inputs import zoo


def command(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[N]...", help=f"Tables to measure: {', '.join(paper.TABLES)}. Without any, list the tables."
        ),
    ] = None,
    model_names: Annotated[
        str,
        typer.Option(
            "--models",
            help=f"Models, comma-separated: {zoo.KINDS}, or NAME:FOLDER, where NAME*.safetensors has the weights of a "
            "classifier under the name of its timm architecture. demo has its own images.",
        ),
    ] = "demo",
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder with the subfolders train (images to calibrate on) and val (labelled images to evaluate on), "
            "or with support, query and a CSV file of file,label."
        ),
    ] = None,
    seeds: Annotated[
        int, typer.Option(min=1, help="Number of seeds, from 0. Each seed selects other calibration images.")
    ] = 1,
    images: Annotated[int, typer.Option(min=1, help="Number of calibration images.")] = paper.IMAGES,
    fitted: Annotated[int, typer.Option(min=1, help="Most images that a stage fits.")] = paper.FITTED_IMAGES,
    bits: Annotated[str, typer.Option(help="Measure only rows with these bits, comma-separated, such as w6a6.")] = "",
    rows_of: Annotated[
        str,
        typer.Option(
            "--rows",
            help="Measure only rows with one of these in a cell, comma-separated, such as adalog,repq-vit or ours.",
        ),
    ] = "",
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", help="Files to write, without suffix: adalog writes this name with .md and with .json."
        ),
    ] = Path("adalog-tables"),
    work: Annotated[
        Path | None,
        typer.Option(help="Folder that stores finished rows, so that they are not measured again. Default: OUT.rows."),
    ] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="For table C: checkpoint of the detector mmdet:NAME.")] = None,
    device: DeviceOption = "cpu",
    jobs: Annotated[int, typer.Option(min=0, help="Number of CPU threads; 0 means one per core.")] = 0,
    json_out: JsonOption = None,
    debug: DebugOption = False,
) -> None:
    """List the tables of the paper, or measure them on your models and compare with the published figures."""
    if not names:
        check_outputs(json_out)
        if json_out != "-":
            say(_list())
        emit_json([{"table": name, "title": table.title} for name, table in paper.TABLES.items()], json_out)
        return
    # Cells may contain ", ".
    widths, cells = ([name for name in re.split(",(?! )", given) if name] for given in (bits, rows_of))
    specs = list(dict.fromkeys(model_names.split(",")))
    of_detectors = detectors.TABLE in names
    if of_detectors:
        specs = [detection.DEMO if name == "demo" else name for name in specs]
        _check_detectors(names, specs, data, checkpoint, device)
    elif checkpoint is not None:
        raise ValueError(f"--checkpoint applies only to table {detectors.TABLE}: leave it out")
    elif data is not None and specs == ["demo"]:
        raise ValueError(f"the bundled model has its own images: leave out --data {data}, or name another model")
    paper.plan(names, images, widths, cells)  # raises for a wrong name before the long work
    places = _Places.of(out, work, json_out, [checkpoint] if of_detectors else [data, *map(source_of, specs)])
    request = Request(
        names,
        seeds,
        images,
        widths,
        cells,
        fitted,
        jobs=thread_count(jobs),
        device=find_device(device),
        work=places.rows,
        ranks=job(),
    )
    if of_detectors:
        measured = functools.partial(detectors.run, request, _load_detectors(specs, checkpoint, data))
        _write(places, measured, detectors.markdown, json_out)
    else:
        measured = functools.partial(classifiers.run, request, _load_classifiers(specs, data, request))
        _write(places, measured, markdown, json_out)


def _check_detectors(
    names: Sequence[str], specs: Sequence[str], data: Path | None, checkpoint: Path | None, device: str
) -> None:
    """Raise ValueError if the options do not suit the table of detectors."""
    if others := [name for name in names if name != detectors.TABLE]:
        raise ValueError(f"table {detectors.TABLE} is about detectors: measure it without {', '.join(others[:3])}")
    if device != "cpu":
        raise ValueError(f"table {detectors.TABLE} is measured on the CPU only: leave out --device {device}")
    if odd := [name for name in specs if not detection.names_detector(name)]:
        raise ValueError(f"table {detectors.TABLE} is about detectors, and {odd[0]} is not one: give {detection.KINDS}")
    unused = [name for name, given in (("--data", data), ("--checkpoint", checkpoint)) if given is not None]
    if unused and list(specs) == [detection.DEMO]:
        raise ValueError(f"the bundled detector has its own images and weights: leave out {' and '.join(unused)}")


def _load_classifiers(specs: Sequence[str], data: Path | None, request: Request) -> list[classifiers.Bench]:
    """Load the models with their images, and check that they fit. Raises DataError if they do not."""
    for name in specs:
        if not zoo.is_model(name):
            raise DataError(f"unknown model {name!r}: give {zoo.KINDS}")
    models = (load_classifier(name) if names_folder(name) else load_model(name, False, None) for name in specs)
    benches = [classifiers.Bench.of(model, data, request.images, request.images_fitted) for model in models]
    for each in benches:
        with waiting(f"checking {each.model.name}"):
            each.check(request.device)
    return benches


def _load_detectors(specs: Sequence[str], checkpoint: Path | None, data: Path | None) -> list[detectors.DetectorBench]:
    """Load the detectors with their images. Raises DataError if there are none."""

    def bench(name: str) -> detectors.DetectorBench:
        if name == detection.DEMO:
            return detectors.DetectorBench(name, detection.load_detector(name), None)
        return detectors.DetectorBench(name, detection.load_detector(name, checkpoint=checkpoint), data)

    with waiting(f"loading {', '.join(specs)}"):
        return [bench(name) for name in specs]


def _list() -> Table:
    """Return a list of the tables that can be measured."""
    shown = Table(
        title="Tables of the paper, and our table D. Measure with: python -m experiments.tables N ... "
        "--models MODEL,... --data FOLDER"
    )
    for column in ("table", "title", "rows"):
        shown.add_column(column, overflow="fold")
    for name, table in paper.TABLES.items():
        shown.add_row(name, escape(table.title), str(len(table.rows)))
    return shown


@dataclass(frozen=True)
class _Places:
    """Paths of a measured table: as text, as JSON, and the folder of its finished rows."""

    text: Path
    json: Path
    rows: Path

    @staticmethod
    def of(out: Path, work: Path | None, json_out: str | None, reads: Sequence[Path | str | None]) -> "_Places":
        """Return the paths for these options. Raises DataError if one cannot be written, or is also an input."""
        if not out.name:
            raise DataError(f"--out {str(out)!r} does not name a file: give a file name")
        base = out.with_suffix("") if out.suffix in (".md", ".json") else out
        as_text, as_json, rows = (base.with_name(f"{base.name}{suffix}") for suffix in (".md", ".json", ".rows"))
        check_outputs(as_text, as_json, json_out, reads=reads)
        rows = rows if work is None else work
        files.check_writable(rows / "row.json")
        return _Places(as_text, as_json, rows)


def _write(
    places: _Places,
    measured: Callable[[Progress], dict[str, Any]],
    text: Callable[[dict[str, Any]], str],
    json_out: str | None,
) -> None:
    """Measure rows while a bar shows the progress; write all finished rows after each one."""
    with progress_bar() as progress, quiet():
        bar = progress.add_task("rows")

        def finished(done: int, total: int, what: str, result: dict[str, Any]) -> None:
            progress.update(bar, completed=done, total=total, description=escape(what))
            progress.console.print(f"{done} of {total}: {escape(what)}", soft_wrap=True, highlight=False)
            write_file(places.text, text(result).encode())
            emit_json(result, str(places.json))

        result = measured(finished)
    if json_out != "-":
        say(text(result))
    emit_json(result, json_out)


def main() -> None:
    """Run the command. The exit code is 0 for success, 1 for failure and 2 for bad input."""
    run_script("tables", command, shared=True)


if __name__ == "__main__":
    main()
