"""The command line: parse, call, print. Exit codes: 0 done, 1 failed, 2 bad input."""

import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

import adalog
from adalog import METHODS, AdalogError, Calibration, Config, DataError, QuantizedModel, artifact, demo
from adalog.evaluate import Score, predict, score
from adalog.figures import level_figure
from adalog.quantize import sample_images

app = typer.Typer(
    help="Vision transformers in 3 to 8 bits, by adaptive logarithm quantizers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
console = Console(stderr=True)

DEMO_BITS = ("w6a6", "w4a4", "w3a3")
JsonOption = Annotated[str | None, typer.Option("--json", help="Write the result as JSON to this file, or to '-'.")]
SeedOption = Annotated[int, typer.Option(help="Which images calibrate: the same seed gives the same file.")]
ThreadsOption = Annotated[int, typer.Option(help="CPU threads; 0: one a core.")]


def main() -> None:
    """The entry point: turns what the package refuses into one line on stderr and an exit code."""
    torch.set_num_threads(1)  # sites and batches run side by side instead, which scales better and never waits in spins
    try:
        app()
    except (AdalogError, ValueError) as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True, highlight=False)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(1)
    except Exception as error:
        console.print(
            f"[bold red]failed:[/] {type(error).__name__}: {escape(str(error))}", soft_wrap=True, highlight=False
        )
        sys.exit(1)


@contextmanager
def progress_bar() -> Iterator[Progress]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("eta"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield progress


def cores(threads: int) -> int:
    """How many threads an option asks for; 0 asks for one a core that this process may use."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return threads or available


def emit_json(result: Any, target: str | None) -> None:
    """Write to a file, whole or not at all, or to stdout for '-'."""
    if target is None:
        return
    text = json.dumps(result, indent=1) + "\n"
    if target == "-":
        sys.stdout.write(text)
        return
    artifact.write_whole(Path(target), text.encode())


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def interval(result: Score) -> str:
    return f"{100 * result.top1:.1f} % ({100 * result.low:.1f}-{100 * result.high:.1f})"


@app.command(name="demo")
def demo_command(
    out: Annotated[Path, typer.Option(help="Folder for the artifacts and the figure.")] = Path("adalog-demo"),
    bits: Annotated[str, typer.Option(help="Comma-separated bits, widest first.")] = ",".join(DEMO_BITS),
    methods: Annotated[str, typer.Option(help="Comma-separated methods.")] = ",".join(METHODS),
    seed: SeedOption = 0,
    threads: ThreadsOption = 0,
    json_out: JsonOption = None,
) -> None:
    """Quantize the bundled ViT with AdaLog and its rivals, and judge each on 2,000 real images."""
    jobs = cores(threads)
    names = methods.split(",")
    plans = [(method, Config.preset(width, method)) for width in bits.split(",") for method in names]
    out.mkdir(parents=True, exist_ok=True)
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
        table.add_row("fp32", "", interval(fp32), "", f"{size:,}", "")
        progress.advance(whole)
        calibration = Calibration(model, sample_images(demo.calibration_images(), plans[0][1].images, seed), seed=seed)
        for method, config in plans:
            start = time.perf_counter()
            report = _site_progress(progress, part, f"{config.bits} {method}")
            quantized = calibration.quantize(config, report, jobs=jobs)
            seconds = time.perf_counter() - start
            result = score(predict(quantized, images, jobs=jobs), labels, reference)
            if method == "adalog":
                count = quantized.save(out / f"demo-{config.bits}.safetensors")
            else:
                count = len(artifact.serialise(quantized))
            row = {"bits": config.bits, "method": method, "top1": result.top1, "agreement": result.agreement}
            rows.append({**row, "bytes": count, "seconds": round(seconds, 3)})
            table.add_row(
                config.bits,
                method,
                interval(result),
                percent(result.agreement),
                f"{count:,}",
                f"{seconds:.1f}",
                end_section=method == names[-1],
                style="bold" if method == "adalog" else None,
            )
            progress.advance(whole)
        progress.update(part, description="figure")
        _demo_figure(calibration, dict(plans[-len(names) :]), out / "levels.png")
    if json_out != "-":
        Console().print(table)
        console.print(
            f"wrote {', '.join(str(path) for path in sorted(out.iterdir()))}", soft_wrap=True, highlight=False
        )
    emit_json({"fp32": {"top1": fp32.top1}, "rows": rows, "seed": seed}, json_out)


def _site_progress(progress: Progress, task: TaskID, name: str) -> Any:
    return lambda done, total, site: progress.update(task, completed=done, total=total, description=f"{name} {site}")


def _demo_figure(calibration: Calibration, configs: dict[str, Config], path: Path) -> None:
    """Post-softmax and post-GELU activations of one block with each method's levels."""
    models = {f"{method}, {config.bits}": calibration.quantize(config) for method, config in configs.items()}
    panels = []
    for role, source, label in (("av", "softmax", "softmax"), ("linear", "gelu", "GELU")):
        site = [site for site in calibration.sites if site.role == role and site.left_source.kind == source][2]
        suffix = "left" if role == "av" else "input"
        quantizers = {name: model.program.quantizers[f"{site.name}.{suffix}"] for name, model in models.items()}
        panels.append((f"post-{label}: {site.name}", calibration.operand(site.left), quantizers))
    level_figure(panels, path)


def load_calibration(model: str) -> tuple[torch.nn.Module, torch.Tensor]:
    """The model that a name means, and images to calibrate it with."""
    if model != "demo":
        raise DataError(
            f"model {model!r} is not known: the command line knows 'demo'. In Python: adalog.quantize(model, images)"
        )
    return demo.load_model(), demo.calibration_images()


@app.command()
def quantize(
    model: Annotated[str, typer.Argument(help="The model: demo.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The artifact to write.")] = Path("model.safetensors"),
    bits: Annotated[str, typer.Option(help="Bits of weights and activations, like w4a4 or w4a4s3.")] = "w4a4",
    method: Annotated[str, typer.Option(help=f"One of {', '.join(METHODS)}.")] = "adalog",
    seed: SeedOption = 0,
    threads: ThreadsOption = 0,
    json_out: JsonOption = None,
) -> None:
    """Quantize a model and write its artifact."""
    config = Config.preset(bits, method)
    network, images = load_calibration(model)
    start = time.perf_counter()
    with progress_bar() as progress:
        report = _site_progress(progress, progress.add_task("capture", total=1), config.bits)
        quantized = adalog.quantize(network, images, config, seed=seed, jobs=cores(threads), progress=report)
    seconds = time.perf_counter() - start
    size = quantized.save(out)
    if json_out != "-":
        print(quantized.summary())
        print(f"{out}: {size:,} bytes, in {seconds:.1f} s")
    emit_json(
        {"file": str(out), "bytes": size, "bits": config.bits, "method": method, "seconds": round(seconds, 3)}, json_out
    )


@app.command()
def evaluate(
    file: Annotated[Path, typer.Argument(help="An artifact of the demo model.")],
    threads: ThreadsOption = 0,
    json_out: JsonOption = None,
) -> None:
    """Judge an artifact on the 2,000 bundled test images."""
    jobs = cores(threads)
    model = adalog.load(file)
    images, labels = demo.test_images()
    with torch.no_grad():
        scores = model(images[:1])  # before the long part, whether it is a model of these images at all
    if not isinstance(scores, torch.Tensor) or scores.ndim != 2:
        raise DataError(f"{file} puts out no row of scores an image; adalog.load(...) in Python gives what it does")
    with progress_bar() as progress:
        task = progress.add_task("images", total=2 * len(images))
        reference = predict(
            demo.load_model(), images, jobs=jobs, progress=lambda done, _: progress.update(task, completed=done)
        )
        shift = len(images)
        classes = predict(
            model, images, jobs=jobs, progress=lambda done, _: progress.update(task, completed=shift + done)
        )
    result = score(classes, labels, reference)
    if json_out != "-":
        print(
            f"{file}: top-1 {interval(result)} on {result.images} images, "
            f"agreement with fp32 {percent(result.agreement)}"
        )
    emit_json({"file": str(file), **dataclasses.asdict(result)}, json_out)


@app.command()
def inspect(
    file: Annotated[Path, typer.Argument(help="An artifact.")],
    json_out: JsonOption = None,
) -> None:
    """Say what an artifact holds: its sites, their bits, its bytes by part."""
    content = artifact.read(file)
    if json_out != "-":
        model: QuantizedModel = artifact.deserialise(content, str(file))
        print(model.summary())
        parts = artifact.sizes(content)
        print(", ".join(f"{name} {count:,}" for name, count in parts.items()) + f"; {len(content):,} bytes in all")
    emit_json(artifact.inspect(content, str(file)), json_out)
