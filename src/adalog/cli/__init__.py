"""The command line: parse, call, print. Exit codes: 0 done, 1 failed, 2 bad input."""

import dataclasses
import functools
import json
import logging
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO, TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn
from typer.core import TyperGroup

import adalog
from adalog import METHODS, AdalogError, Calibration, Config, DataError, QuantizedModel, artifact, files
from adalog.cli import views
from adalog.errors import printable
from adalog.inputs import demo, zoo
from adalog.inputs.images import ImageSet, Preprocessing, draw_indices, find_images, find_support
from adalog.model import quickest
from adalog.quantize import sample_images
from adalog.runtime import EXECUTORS, Compiled
from adalog.runtime.vectors import vectors
from adalog.study import figures, tables
from adalog.study.bench import FAKE, bench, executors_here
from adalog.study.cost import cost
from adalog.study.doctor import available_cores, examine
from adalog.study.evaluate import Share, check_classes, classify_by_nearest, predict, score


class Interrupted(Exception):
    """Ctrl-C, in place of what typer would make of it."""


class OutputError(Exception):
    """Standard output that takes no more."""


class Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as cause:
            raise Interrupted from cause


app = typer.Typer(
    cls=Commands,
    help="Vision transformers in 2 to 8 bits, by adaptive logarithm quantizers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
console = Console(stderr=True)

DEMO_BITS = ("w6a6", "w4a4", "w3a3")
DEMO_METHODS = figures.LEVEL_METHODS
FIGURE_METHODS = ("minmax", "ptq4vit", "repq-vit", "adalog")
JsonOption = Annotated[str | None, typer.Option("--json", help="Write the result as JSON to this file, or to '-'.")]
SeedOption = Annotated[
    int, typer.Option(min=0, max=2**63 - 1, help="Which images calibrate: the same seed gives the same file.")
]
CheckpointOption = Annotated[
    Path | None, typer.Option(help="Weights for the model: a safetensors file, or a state dict of torch.save.")
]
NoPretrainedOption = Annotated[bool, typer.Option("--no-pretrained", help="Random weights: nothing is downloaded.")]
ThreadsOption = Annotated[int, typer.Option(min=0, help="CPU threads; 0: one a core.")]
DeviceOption = Annotated[str, typer.Option(help="Where to compute: cpu, cuda, cuda:1, ...")]


def main() -> None:
    """The entry point: turns what the package refuses into one line on stderr and an exit code."""
    if sys.stdout is None:
        console.print("[bold red]failed:[/] standard output cannot be written: it is closed")
        sys.exit(1)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # the name of a file may be no text
    torch.set_num_threads(1)  # sites and batches run side by side instead, which scales better and never waits in spins
    try:
        app()
    except (AdalogError, ValueError) as error:
        complain("error", str(error))
        sys.exit(2)
    except OutputError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left to write would fail once more
        complain("failed", str(error))
        sys.exit(1)
    except (Interrupted, KeyboardInterrupt):
        console.print("interrupted")
        sys.exit(1)
    except Exception as error:
        complain("failed", f"{type(error).__name__}: {error}")
        sys.exit(1)


def complain(how: str, why: str) -> None:
    console.print(f"[bold red]{how}:[/] {escape(printable(why))}", soft_wrap=True, highlight=False)


def say(*results: str | Table) -> None:
    """Print results, each on lines of its own."""
    try:
        for result in results:
            if isinstance(result, str):
                sys.stdout.write(f"{result}\n")
            else:
                Console().print(result)
        sys.stdout.flush()
    except OSError as cause:
        raise OutputError(f"standard output cannot be written: {cause.strerror}") from cause


@contextmanager
def quiet() -> Iterator[None]:
    """Nothing that other packages print, log or warn of gets to the terminal."""
    before = logging.root.manager.disable
    logging.disable()
    try:
        with warnings.catch_warnings(), redirect_stderr(StringIO()), redirect_stdout(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """A spinner on the terminal, and quiet."""
    with Console(file=sys.stderr).status(escape(what)), quiet():
        yield


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A bar on the terminal, with the time that is left; nothing where there is no terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("eta"),
        TimeRemainingColumn(),
    )
    terminal = Console(file=sys.stderr)
    with Progress(*columns, console=terminal, transient=True, disable=not terminal.is_terminal) as progress:
        yield progress


def cores(threads: int) -> int:
    """How many threads an option asks for; 0 asks for one a core that this process may use."""
    return threads or available_cores()


def emit_json(result: Any, target: str | None) -> None:
    """Write to a file, whole or not at all, or to stdout for '-'."""
    if target is None:
        return
    text = json.dumps(result, indent=1)
    if target == "-":
        say(text)
        return
    files.write_whole(Path(target), f"{text}\n".encode())


def source_of(target: str | None) -> str | None:
    """The file that is named by a model's or an artifact's name, if any."""
    if target is None or not zoo.is_model(target):
        return target
    file, _, _ = target.rpartition(":")
    return file if file.endswith(".py") else None


def share(value: Share | None) -> float | None:
    return None if value is None else value.value


def check_outputs(*paths: Path | str | None, reads: Sequence[Path | str | None] = ()) -> None:
    """Before the long part: whether what comes of it can be written, each to a file that is not used otherwise."""
    used = {os.path.realpath(path) for path in reads if path is not None}
    for path in paths:
        if path is not None and path != "-":
            files.check_writable(Path(path))
            if os.path.realpath(path) in used:
                raise DataError(f"{path} is an input, or an output of another kind: choose another file")
            used.add(os.path.realpath(path))


def find_device(name: str) -> torch.device:
    """The device of that name, if it is there."""
    try:
        with quiet():
            torch.zeros(1, device=name).item()
        return torch.device(name)
    except (RuntimeError, AssertionError, ImportError) as cause:
        here = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
        raise ValueError(f"device = {name!r} is not one of this machine: it has {', '.join(here)}") from cause


def read_keep(text: str) -> tuple[str, int]:
    """GLOB=bits."""
    pattern, _, bits = text.rpartition("=")
    if not pattern or not bits.isascii() or not bits.isdecimal():
        raise ValueError(f"--keep {text!r} is not of the form GLOB=bits, as in 'head=8' or 'blocks.0.*=32' for float")
    return pattern, int(bits)


def read_size(text: str) -> int:
    """A number of bytes, as 2GiB, 1.5GB or 500000000."""
    found = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,15})?) ?(?:([KMGT])(i?)B)?", text, re.ASCII)
    if found is None:
        raise ValueError(f"--memory {text!r} is no size: give one like 2GiB, 1.5GB or 500MB")
    number, letter, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** ("KMGT".index(letter) + 1 if letter else 0))


def load_model(name: str, no_pretrained: bool, checkpoint: Path | None) -> zoo.LoadedModel:
    with waiting(f"load {name}"):
        return zoo.load_model(name, pretrained=not no_pretrained, checkpoint=checkpoint)


@app.command(name="demo")
def demo_command(
    out: Annotated[Path, typer.Option(help="Folder for the artifacts and the figure.")] = Path("adalog-demo"),
    bits: Annotated[str, typer.Option(help="Comma-separated bits, widest first.")] = ",".join(DEMO_BITS),
    methods: Annotated[str, typer.Option(help="Comma-separated, some of the default.")] = ",".join(DEMO_METHODS),
    seed: SeedOption = 0,
    threads: ThreadsOption = 0,
    json_out: JsonOption = None,
) -> None:
    """Quantize the bundled ViT with AdaLog and its rivals, and judge each on 2,000 real images, in integers."""
    jobs = cores(threads)
    names = methods.split(",")
    plans = [(method, Config.preset(width, method)) for width in bits.split(",") for method in names]
    odd = [name for name in names if name not in DEMO_METHODS]
    if odd:
        raise ValueError(f"--methods {odd[0]!r} is none of the demo's: {', '.join(DEMO_METHODS)}")
    artifacts = {out / f"demo-{config.bits}.safetensors" for method, config in plans if method == "adalog"}
    check_outputs(out / "levels.png", *artifacts, json_out)
    model = demo.load_model()
    images, labels = demo.test_images()
    rows: list[dict[str, Any]] = []
    table = Table(
        title="A ViT trained on CIFAR-10, on 2,000 of its test images",
        caption="Sites that methods share are searched once: their time counts in the first row of each bits.",
    )
    for column in ("bits", "method"):
        table.add_column(column)
    for column in ("top-1 (95 % CI)", "agreement", "bytes", "calib. [s]"):
        table.add_column(column, justify="right")
    with progress_bar() as progress:
        whole = progress.add_task("all", total=len(plans) + 1)
        part = progress.add_task("full precision", total=1)
        reference = predict(model, images, jobs=jobs)
        fp32 = score(reference, labels)
        size = sum(value.numel() * 4 for value in model.state_dict().values())
        table.add_row("fp32", "", views.interval(fp32.top1), "", f"{size:,}", "")
        progress.advance(whole)
        calibration = Calibration(model, sample_images(demo.calibration_images(), plans[0][1].images, seed), seed=seed)
        for method, config in plans:
            start = time.perf_counter()
            watch = _site_progress(progress, part, f"{config.bits} {method}")
            quantized = calibration.quantize(config, watch, jobs=jobs)
            quantized.note(preprocessing=dataclasses.asdict(zoo.DEMO_PREPROCESSING))
            seconds = time.perf_counter() - start
            runs, executor, at_once = quickest(quantized, jobs)
            result = score(predict(runs, images, jobs=at_once), labels, reference)
            if method == "adalog":
                count = quantized.save(out / f"demo-{config.bits}.safetensors")
            else:
                count = len(artifact.serialise(quantized.quantized))
            row = {"bits": config.bits, "method": method, "top1": share(result.top1), "agreement": result.agreement}
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
            progress.advance(whole)
        progress.update(part, description="figure")
        panels = figures.histogram_panels(calibration, dict(plans[-len(names) :]))
        drawn = figures.level_figure(panels, f"Levels at {plans[-1][1].bits}")
        files.write_whole(out / "levels.png", figures.rendered(drawn, "png", figures.CAPTIONS["histograms"]))
    if json_out != "-":
        say(table)
        written = printable(", ".join(str(path) for path in sorted(out.iterdir())))
        console.print(f"wrote {escape(written)}", soft_wrap=True, highlight=False)
    emit_json({"fp32": {"top1": share(fp32.top1)}, "rows": rows, "seed": seed}, json_out)


def _site_progress(progress: Progress, task: TaskID, name: str) -> Any:
    return lambda done, total, site: progress.update(task, completed=done, total=total, description=f"{name} {site}")


def find_calibration(target: str, data: Path | None, count: int) -> Tensor | ImageSet:
    """The images of which so many are to be drawn: a folder's, or those that demo brings."""
    if data is None and target != "demo":
        raise DataError(f"{target} brings no images: give --data FOLDER, with {count} or more of what it was made for")
    given: Tensor | ImageSet = demo.calibration_images() if data is None else find_images(data)
    if count > len(given):
        there = len(given)
        raise DataError(
            f"{data or target} has {there} images, --images {count} are wanted: give --images {there}, or more"
        )
    return given


@app.command()
def quantize(
    model: Annotated[str, typer.Argument(help=f"The model: {zoo.KINDS}.")],
    data: Annotated[
        Path | None, typer.Option(help="Folder of images, of which some calibrate; demo has images of its own.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="The artifact to write.")] = Path("model.safetensors"),
    bits: Annotated[str, typer.Option(help="Bits of weights and activations, like w4a4 or w4a4s3.")] = "w4a4",
    method: Annotated[str, typer.Option(help=f"One of {', '.join(METHODS)}.")] = "adalog",
    images: Annotated[int, typer.Option(min=1, help="How many images calibrate.")] = 32,
    keep: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB=BITS", help="Bits of the sites of such names, 32 for float; may be repeated."),
    ] = None,
    checkpoint: CheckpointOption = None,
    no_pretrained: NoPretrainedOption = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with what OUT.partial holds of a run that was stopped.")
    ] = False,
    device: DeviceOption = "cpu",
    seed: SeedOption = 0,
    threads: ThreadsOption = 0,
    memory: Annotated[
        str, typer.Option(metavar="SIZE", help="For values and their search, beside model and images, like 512MB.")
    ] = "2GiB",
    json_out: JsonOption = None,
) -> None:
    """Quantize a model and write its artifact."""
    limit = read_size(memory)
    config = dataclasses.replace(Config.preset(bits, method), images=images, pinned=tuple(map(read_keep, keep or ())))
    if not zoo.is_model(model):
        raise DataError(f"model {model!r} is none of {zoo.KINDS}")
    partial = out.with_name(f"{out.name}.partial")
    check_outputs(out, partial, json_out, reads=(source_of(model), checkpoint))
    if partial.exists() and not resume:
        raise DataError(f"{partial} holds the searches of an earlier run: go on with --resume, or remove it")
    place = find_device(device)
    given = find_calibration(model, data, images)
    loaded = load_model(model, no_pretrained, checkpoint)
    preprocessing = loaded.prepared
    out.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    jobs = cores(threads)
    with progress_bar() as progress, quiet():
        watch = _site_progress(progress, progress.add_task("capture", total=1), config.bits)
        if isinstance(given, ImageSet):
            given = given.sample(images, seed).load(preprocessing, jobs=jobs)
        quantized = adalog.quantize(
            loaded.module.to(place),
            given.to(place),
            config,
            seed=seed,
            jobs=jobs if place.type == "cpu" else 1,  # a GPU's memory is for one site at a time
            memory=limit,
            progress=watch,
            partial=partial,
        ).cpu()
    seconds = time.perf_counter() - start
    quantized.note(preprocessing=dataclasses.asdict(preprocessing))
    size = quantized.save(out)
    partial.unlink(missing_ok=True)
    if json_out != "-":
        say(quantized.summary(), f"{out}: {size:,} bytes, in {seconds:.1f} s")
    told = {"file": str(out), "bytes": size, "method": method, "seconds": round(seconds, 3)}
    emit_json(told | artifact.describe(quantized.quantized), json_out)


@app.command()
def evaluate(
    file: Annotated[Path, typer.Argument(help="The artifact.")],
    data: Annotated[
        Path | None,
        typer.Option(help="Images: a subfolder a class, or with a CSV file of file,label. Without: the bundled ones."),
    ] = None,
    support: Annotated[
        Path | None,
        typer.Option(help="For features without a classifier: images whose nearest gives its label; may be in --data."),
    ] = None,
    model: Annotated[str | None, typer.Option(help=f"The full-precision model to compare with: {zoo.KINDS}.")] = None,
    checkpoint: CheckpointOption = None,
    no_pretrained: NoPretrainedOption = False,
    executor: Annotated[
        str | None,
        typer.Option(help=f"Run the integers, by one of {', '.join(EXECUTORS)}; without, what they stand for."),
    ] = None,
    device: DeviceOption = "cpu",
    threads: ThreadsOption = 0,
    json_out: JsonOption = None,
) -> None:
    """Judge an artifact: top-1 and top-5, and how far it is from the full-precision model."""
    check_outputs(json_out, reads=(file, source_of(model), checkpoint))
    place, jobs = find_device(device), cores(threads)
    if model is None and (checkpoint is not None or no_pretrained):
        raise ValueError("--checkpoint and --no-pretrained are of a full-precision model: give --model")
    if data is None and support is not None:
        raise ValueError("--support goes with the images of --data: give both")
    queries, known = (None, None) if data is None else find_support(data, support)
    if queries is not None and queries.labels is None and model is None:
        raise DataError(f"{data} has no labels to judge by: give them, or --model to compare with")
    quantized = adalog.load(file)
    stranger = DataError(f"{file} is not of the bundled model, whose images are the only ones here: give --data FOLDER")
    if data is None and [tuple(value.shape[1:]) for value in quantized.example] != [(3, *zoo.DEMO_PREPROCESSING.size)]:
        raise stranger
    reference = "demo" if model is None and data is None else model
    loaded = None if reference is None else load_model(reference, no_pretrained, checkpoint)
    preprocessing = find_preprocessing(file, quantized, loaded)
    if queries is None and preprocessing != zoo.DEMO_PREPROCESSING:
        raise stranger
    runs = quantized if executor is None else compiled(file, quantized, executor, jobs)
    networks: list[nn.Module] = [runs] if loaded is None else [runs, loaded.module]
    images, labels = demo.test_images() if queries is None else (queries, queries.labels)

    def run(network: nn.Module, given: Tensor | ImageSet, progress: Progress | None = None) -> Tensor:
        batches = given if isinstance(given, Tensor) else given.batches(preprocessing, jobs=jobs)
        watch = None if progress is None else _image_progress(progress)
        alone = place.type != "cpu" or (executor == "native" and network is runs)  # it has threads of its own
        return predict(network, batches, jobs=1 if alone else jobs, device=place, progress=watch)

    def answer(network: nn.Module, progress: Progress) -> Tensor:
        if known is None:
            return run(network, images, progress)
        features = run(network, known, progress)
        return classify_by_nearest(features, known.labels or (), run(network, images, progress))

    # Before the long part: whether the models take these images, have all classes, and equally many.
    last = 0 if labels is None else int(torch.as_tensor(labels).argmax())
    with waiting(f"try {file}"):
        one = images[[last]] if isinstance(images, Tensor) else images.select([last])
        tried = [run(network.to(place), one) for network in networks]
        folders = None if queries is None else queries.classes
        if known is None:
            check_classes(folders, tried[0], str(data), str(file))
            score(tried[0], None if labels is None else [int(labels[last])], *tried[1:])
    with progress_bar() as progress, quiet():
        progress.add_task("images", total=len(networks) * (len(images) + len(known or ())))
        answers = [answer(network, progress) for network in networks]
    result = score(answers[0], labels, *answers[1:])
    full = None if labels is None or reference is None else score(answers[1], labels)
    if json_out != "-":
        say(views.judgement(str(file), result, reference, full))
    told = {"file": str(file), "executor": executor, "reference": reference, **dataclasses.asdict(result)}
    told |= {"full_precision": None if full is None else dataclasses.asdict(full)}
    emit_json(
        told | {"sites": artifact.describe(quantized.quantized)["sites"]}, json_out
    )  # SQNRs on the calibration images


def compiled(file: Path, quantized: QuantizedModel, executor: str, threads: int = 1) -> Compiled:
    """The model in integers; what has none is refused by the file's name. threads: of "native"."""
    with integers_of(file):
        return quantized.compile(executor, **({"threads": threads} if executor == "native" else {}))


@contextmanager
def integers_of(file: Path) -> Iterator[None]:
    """What is raised inside tells the file whose integers it is about."""
    try:
        yield
    except AdalogError as cause:
        raise type(cause)(f"{file} does not run in integers: {cause}") from cause


def find_preprocessing(file: Path, quantized: QuantizedModel, loaded: zoo.LoadedModel | None) -> Preprocessing:
    """What is done to the images of an artifact: as it says itself, or else as its full-precision model says."""
    found: list[tuple[Preprocessing, str]] = []
    stored = quantized.provenance.get("preprocessing")
    if stored is not None:
        try:
            found.append((Preprocessing.from_json(stored), str(file)))
        except ValueError as cause:
            raise DataError(
                f"{file} says wrongly how its images are prepared: {cause}; quantize the model again"
            ) from cause
    if loaded is not None and loaded.preprocessing is not None:
        found.append((loaded.preprocessing, loaded.name))
    if not found:
        raise DataError(f"{file} does not say how its images are prepared: give --model MODEL that does")
    inputs = " and ".join(str(tuple(value.shape[1:])) for value in quantized.example)
    for preprocessing, of in found:
        prepared = str((3, *preprocessing.size))
        if inputs != prepared:
            raise DataError(
                f"{file} takes inputs of {inputs}, images are prepared to {prepared} for {of}: "
                "give the model that it was made of as --model, or quantize it again"
            )
    return found[0][0]


def _image_progress(progress: Progress) -> Callable[[int], None]:
    """For one run over images: those done come on top of what its bar shows."""
    (bar,) = progress.tasks
    before = bar.completed
    return lambda done: progress.update(bar.id, completed=before + done)


@app.command()
def inspect(
    target: Annotated[str, typer.Argument(help=f"An artifact, or a model: {zoo.KINDS}.")],
    by_bytes: Annotated[bool, typer.Option("--bytes", help="An artifact's bytes by part and tensor.")] = False,
    checkpoint: CheckpointOption = None,
    no_pretrained: NoPretrainedOption = False,
    json_out: JsonOption = None,
) -> None:
    """Say what an artifact holds: its sites, their bits, its bytes by part; or what a model would have of them."""
    check_outputs(json_out, reads=(source_of(target), checkpoint))
    if zoo.is_model(target):
        if by_bytes:
            raise ValueError(f"--bytes takes an artifact, {target} is a model: quantize it first")
        loaded = load_model(target, no_pretrained, checkpoint)
        with waiting(f"capture {target}"):
            told = zoo.inspect(loaded)
        if json_out != "-":
            say(views.census_table(told), views.census_lines(told))
        emit_json(told, json_out)
        return
    refuse_weights(target, no_pretrained, checkpoint)
    content = artifact.read(Path(target))
    if json_out != "-":
        quantized = artifact.deserialise(content, target)
        sums = f"{views.parts_line(artifact.sizes(content))}; {len(content):,} bytes in all"
        say(views.bytes_table(content) if by_bytes else quantized.summary(), sums)
    told = artifact.inspect(content, target)
    emit_json(told | {"tensors": artifact.tensor_sizes(content)} if by_bytes else told, json_out)


@app.command(name="methods")
def methods_command(json_out: JsonOption = None) -> None:
    """List the methods: where each is from, and its choices that differ from the defaults."""
    check_outputs(json_out)
    rows = [
        {"name": name, "source": method.source, "choices": method.to_json(Config.defaults())}
        for name, method in METHODS.items()
    ]
    if json_out != "-":
        say(views.methods_table(rows))
    emit_json(rows, json_out)


@app.command(name="tables")
def tables_command(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[N]...", help=f"Some of {', '.join(tables.TABLES)}; without, they are listed."),
    ] = None,
    model_names: Annotated[
        str, typer.Option("--models", help=f"Comma-separated: {zoo.KINDS}. demo has images of its own.")
    ] = "demo",
    data: Annotated[
        Path | None, typer.Option(help="Folder with the folders train, of which some images calibrate, and val.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Draws of calibration images, from seed 0 on.")] = 1,
    images: Annotated[int, typer.Option(min=1, help="How many images calibrate.")] = tables.IMAGES,
    out: Annotated[Path, typer.Option("--out", "-o", help="What to write, with .md and with .json after it.")] = Path(
        "adalog-tables"
    ),
    work: Annotated[
        Path | None, typer.Option(help="Folder of finished rows, from which a run goes on. Without: OUT.rows.")
    ] = None,
    device: DeviceOption = "cpu",
    jobs: Annotated[int, typer.Option(min=0, help="CPU threads; 0: one a core.")] = 0,
    json_out: JsonOption = None,
) -> None:
    """List the paper's tables, or measure some on models of yours, beside the published figures."""
    if not names:
        check_outputs(json_out)
        if json_out != "-":
            say(views.tables_list(tables.TABLES))
        emit_json([{"table": name, "title": table.title} for name, table in tables.TABLES.items()], json_out)
        return
    tables.plan(names)
    base = out.with_suffix("") if out.suffix in (".md", ".json") else out
    markdown, told = (base.with_name(f"{base.name}{suffix}") for suffix in (".md", ".json"))
    specs = list(dict.fromkeys(model_names.split(",")))
    check_outputs(markdown, told, json_out, reads=[source_of(name) for name in specs])
    rows = base.with_name(f"{base.name}.rows") if work is None else work
    files.check_writable(rows / "row.json")
    for name in specs:
        if not zoo.is_model(name):
            raise DataError(f"model {name!r} is none of {zoo.KINDS}")
    place = find_device(device)
    benches = [tables.Bench.of(load_model(name, False, None), data, images) for name in specs]
    for each in benches:
        with waiting(f"try {each.model.name}"):
            each.check(place)
    with progress_bar() as progress, quiet():
        bar = progress.add_task("rows")

        def finished(done: int, total: int, what: str, result: dict[str, Any]) -> None:
            progress.update(bar, completed=done, total=total, description=escape(what))
            progress.console.print(f"{done} of {total}: {escape(what)}", soft_wrap=True, highlight=False)
            files.write_whole(markdown, tables.markdown(result).encode())
            emit_json(result, str(told))

        result = tables.run(
            names, benches, seeds=seeds, images=images, jobs=cores(jobs), device=place, work=rows, progress=finished
        )
    if json_out != "-":
        say(tables.markdown(result))
    emit_json(result, json_out)


@app.command(name="figures")
def figures_command(
    target: Annotated[str, typer.Argument(help=f"An artifact, or a model: {zoo.KINDS}.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the pictures and their index.")],
    data: Annotated[
        Path | None, typer.Option(help="Folder of images, of which some calibrate a model, or go through an artifact.")
    ] = None,
    bits: Annotated[str | None, typer.Option(help="Bits of a model, like w4a4, the default, or w4a4s3.")] = None,
    methods: Annotated[
        str | None,
        typer.Option(help=f"Whose SQNR of a model to compare, comma-separated; else {','.join(FIGURE_METHODS)}."),
    ] = None,
    site: Annotated[
        str | None, typer.Option(help="Whose search to draw, as `adalog inspect MODEL` lists them; else one of GELU.")
    ] = None,
    images: Annotated[int, typer.Option(min=1, help="How many images to take.")] = 32,
    checkpoint: CheckpointOption = None,
    no_pretrained: NoPretrainedOption = False,
    seed: SeedOption = 0,
    threads: ThreadsOption = 0,
    json_out: JsonOption = None,
) -> None:
    """Draw histograms with levels, a search's landscape and each site's SQNR, as PNG and SVG with an index."""
    possible = [out / f"{name}.{form}" for name in figures.CAPTIONS for form in figures.FORMS]
    check_outputs(*possible, out / "index.md", json_out, reads=(source_of(target), checkpoint))
    jobs = cores(threads)
    if zoo.is_model(target):
        names, width = (methods or ",".join(FIGURE_METHODS)).split(","), bits or "w4a4"
        for name in names:  # before the long part
            Config.preset(width, name)
        given = find_calibration(target, data, images)
        loaded = load_model(target, no_pretrained, checkpoint)
        preprocessing = loaded.prepared
        with progress_bar() as progress, quiet():
            part = progress.add_task("capture", total=1)
            if isinstance(given, ImageSet):
                given = given.sample(images, seed).load(preprocessing, jobs=jobs)
            calibration = Calibration(loaded.module, sample_images(given, images, seed), seed=seed)
            watch = functools.partial(_site_progress, progress, part)
            drawn, left_out = figures.of_model(
                calibration, printable(target), width, names, site=site, jobs=jobs, progress=watch
            )
    else:
        refuse_weights(target, no_pretrained, checkpoint)
        for option, value in (("--bits", bits), ("--methods", methods), ("--site", site)):
            if value is not None:
                raise ValueError(f"{option} is of a model, {target} is none of {zoo.KINDS}")
        quantized = adalog.load(target)
        sample = _sample_for(Path(target), quantized, data, images, seed, jobs)
        with waiting(f"draw {target}"):
            drawn, left_out = figures.of_artifact(quantized, printable(Path(target).name), sample)
    with waiting("draw"):
        pictures = figures.pictures(drawn, printable(target), left_out)
    for name, (content, _) in pictures.items():
        files.write_whole(out / name, content)
    if json_out != "-":
        say(*(f"{out / name}: {len(content):,} bytes" for name, (content, _) in pictures.items()))
        say(*(f"not drawn: {name}: {why}" for name, why in left_out.items()))
    listed = [{"file": name, "caption": caption} for name, (_, caption) in pictures.items()]
    emit_json({"target": target, "folder": str(out), "files": listed, "left_out": left_out}, json_out)


def _sample_for(
    file: Path, quantized: QuantizedModel, data: Path | None, count: int, seed: int, jobs: int
) -> Tensor | None:
    """Images for an artifact: of a folder, or the bundled ones where it is of the bundled model."""
    if data is not None:
        found = find_calibration(str(file), data, count)
        assert isinstance(found, ImageSet)
        return found.sample(count, seed).load(find_preprocessing(file, quantized, None), jobs=jobs)
    stored = quantized.provenance.get("preprocessing")
    if stored is None or find_preprocessing(file, quantized, None) != zoo.DEMO_PREPROCESSING:
        return None
    bundled = find_calibration("demo", None, count)
    assert isinstance(bundled, Tensor)
    return bundled[draw_indices(len(bundled), count, seed)]


@app.command()
def doctor(json_out: JsonOption = None) -> None:
    """Say what runs here: versions, executors, which of the native kernels, and why others do not."""
    check_outputs(json_out)
    told = examine()
    if json_out != "-":
        say(*views.health(told))
    emit_json(told, json_out)


@app.command(name="bench")
def bench_command(
    file: Annotated[Path, typer.Argument(help="The artifact.")],
    executor: Annotated[
        list[str] | None,
        typer.Option(help=f"One of {', '.join((FAKE, *EXECUTORS))}; may be repeated. Without: all that are fast here."),
    ] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Images at once; may be repeated. Without: 1.")] = None,
    model: Annotated[
        str | None, typer.Option(help=f"The full-precision model to time beside them: {zoo.KINDS}.")
    ] = None,
    checkpoint: CheckpointOption = None,
    no_pretrained: NoPretrainedOption = False,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads of each run; 0: one a core.")] = 1,
    seconds: Annotated[
        float, typer.Option(min=0, max=3600, help="For each executor and batch; five runs at least.")
    ] = 3,
    json_out: JsonOption = None,
) -> None:
    """Time an artifact by each executor, in turn, on random images: medians, bytes of weights, time to load."""
    check_outputs(json_out, reads=(file, source_of(model), checkpoint))
    if model is None and (checkpoint is not None or no_pretrained):
        raise ValueError("--checkpoint and --no-pretrained are of a full-precision model: give --model")
    here, missing = executors_here()
    wanted = list(dict.fromkeys(executor)) if executor else here
    odd = [name for name in wanted if name not in (FAKE, *EXECUTORS)]
    if odd:
        raise ValueError(f"executor = {odd[0]!r} is none of {', '.join((FAKE, *EXECUTORS))}")
    adalog.load(file)  # a file that is none is refused before a model is loaded to go beside it
    full = None if model is None else load_model(model, no_pretrained, checkpoint).module
    count = cores(threads)
    torch.set_num_threads(count)
    with waiting(f"time {file}"), integers_of(file):
        rows = bench(
            lambda: adalog.load(file), wanted, sorted(set(batch or [1])), threads=count, seconds=seconds, full=full
        )
    told = {"file": str(file), "threads": count, "rows": rows, "absent": {} if executor else missing}
    if json_out != "-":
        say(*views.times(told))
    emit_json(told, json_out)


@app.command(name="vectors")
def vectors_command(
    file: Annotated[Path, typer.Argument(help="The artifact.")],
    site: Annotated[str, typer.Option(help="A site's name, as `adalog inspect FILE` lists them.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to make.")],
    images: Annotated[int, typer.Option(min=1, help="How many images.")] = 1,
    data: Annotated[Path | None, typer.Option(help="Folder of images. Without: the bundled ones.")] = None,
    seed: SeedOption = 0,
    json_out: JsonOption = None,
) -> None:
    """Write what one site computes, codes in and accumulators out, as .npy files with a description: a golden model."""
    check_outputs(json_out, reads=(file,))
    files.check_folder(out)
    quantized = adalog.load(file)
    model = compiled(file, quantized, "reference")
    if data is None:
        given = demo.test_images()[0]
        if [tuple(value.shape[1:]) for value in quantized.example] != [tuple(given.shape[1:])]:
            raise DataError(
                f"{file} is not of the bundled model, whose images are the only ones here: give --data FOLDER"
            )
        given = given[:images]
    else:
        found = find_images(data)
        if images > len(found):
            raise DataError(f"{data} has {len(found)} images, --images {images} are wanted: give fewer, or more images")
        given = found.sample(images, seed).load(find_preprocessing(file, quantized, None), jobs=1)
    content = vectors(model, site, given)
    files.write_folder(out, content)
    sizes = {name: len(value) for name, value in sorted(content.items())}
    if json_out != "-":
        say(*(f"{out / name}: {size:,} bytes" for name, size in sizes.items()))
    emit_json({"folder": str(out), "files": sizes}, json_out)


def refuse_weights(target: str, no_pretrained: bool, checkpoint: Path | None) -> None:
    if checkpoint is not None or no_pretrained:
        raise ValueError(f"--checkpoint and --no-pretrained take a model, {target} is none of {zoo.KINDS}")


@app.command(name="cost")
def cost_command(
    target: Annotated[str, typer.Argument(help=f"An artifact, or a model: {zoo.KINDS}.")],
    checkpoint: CheckpointOption = None,
    no_pretrained: NoPretrainedOption = False,
    json_out: JsonOption = None,
) -> None:
    """Count what one image costs: multiplications, FixOPs, BOPs and bytes, by operation."""
    check_outputs(json_out, reads=(source_of(target), checkpoint))
    if zoo.is_model(target):
        loaded = load_model(target, no_pretrained, checkpoint)
        with waiting(f"capture {target}"):
            program, images = zoo.captured(loaded)
        inputs = [list(images.shape[1:])]
    else:
        refuse_weights(target, no_pretrained, checkpoint)
        quantized = adalog.load(target)
        program, inputs = quantized.program, [list(value.shape[1:]) for value in quantized.example]
    result = cost(program, inputs)
    if json_out != "-":
        title = f"{target}, inputs {' and '.join(map(str, inputs))}"
        say(views.cost_table(title, result), views.cost_lines(result))
    emit_json({"target": target, "inputs": inputs, **result.to_json()}, json_out)
