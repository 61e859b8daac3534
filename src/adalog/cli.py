"""The command line: parse, call, print. Exit codes: 0 done, 1 failed, 2 bad input."""

import dataclasses
import json
import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

import adalog
from adalog import METHODS, AdalogError, Calibration, Config, DataError, QuantizedModel, artifact, demo, models
from adalog.capture import capture
from adalog.cost import PRODUCT_ROLES, cost
from adalog.evaluate import Score, Share, predict, score
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
CheckpointOption = Annotated[
    Path | None, typer.Option(help="Weights for the model: a safetensors file, or a state dict of torch.save.")
]
NoPretrainedOption = Annotated[bool, typer.Option("--no-pretrained", help="Random weights: nothing is downloaded.")]
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
def waiting(what: str) -> Iterator[None]:
    """A spinner on the terminal, while nothing that other packages print or warn of gets there."""
    with (
        Console(file=sys.stderr).status(what),
        warnings.catch_warnings(),
        redirect_stderr(StringIO()),
        redirect_stdout(StringIO()),
    ):
        warnings.simplefilter("ignore")
        yield


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


def share(value: Share | None) -> float | None:
    return None if value is None else value.value


def interval(result: Score) -> str:
    top1 = result.top1
    return "" if top1 is None else f"{100 * top1.value:.1f} % ({100 * top1.low:.1f}-{100 * top1.high:.1f})"


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
            row = {"bits": config.bits, "method": method, "top1": share(result.top1), "agreement": result.agreement}
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
    emit_json({"fp32": {"top1": share(fp32.top1)}, "rows": rows, "seed": seed}, json_out)


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
            demo.load_model(), images, jobs=jobs, progress=lambda done: progress.update(task, completed=done)
        )
        shift = len(images)
        logits = predict(model, images, jobs=jobs, progress=lambda done: progress.update(task, completed=shift + done))
    result = score(logits, labels, reference)
    if json_out != "-":
        print(
            f"{file}: top-1 {interval(result)} on {result.images} images, "
            f"agreement with fp32 {percent(result.agreement)}"
        )
    emit_json({"file": str(file), **dataclasses.asdict(result)}, json_out)


@app.command()
def inspect(
    target: Annotated[str, typer.Argument(help=f"An artifact, or a model: {models.KINDS}.")],
    by_bytes: Annotated[bool, typer.Option("--bytes", help="An artifact's bytes by part and tensor.")] = False,
    checkpoint: CheckpointOption = None,
    no_pretrained: NoPretrainedOption = False,
    json_out: JsonOption = None,
) -> None:
    """Say what an artifact holds: its sites, their bits, its bytes by part; or what a model would have of them."""
    if models.is_model(target):
        if by_bytes:
            raise ValueError(f"--bytes takes an artifact, {target} is a model: quantize it first")
        with waiting(f"load {target}"):
            loaded = models.load_model(target, pretrained=not no_pretrained, checkpoint=checkpoint)
        with waiting(f"capture {target}"):
            told = models.inspect(loaded)
        if json_out != "-":
            print_census(told)
        emit_json(told, json_out)
        return
    if checkpoint is not None or no_pretrained:
        raise ValueError(f"--checkpoint and --no-pretrained take a model, {target} is none of {models.KINDS}")
    content = artifact.read(Path(target))
    if json_out != "-":
        model: QuantizedModel = artifact.deserialise(content, target)
        if by_bytes:
            print_bytes(content)
        else:
            print(model.summary())
        parts = artifact.sizes(content)
        print(", ".join(f"{name} {count:,}" for name, count in parts.items()) + f"; {len(content):,} bytes in all")
    emit_json(artifact.inspect(content, target), json_out)


@app.command(name="cost")
def cost_command(
    target: Annotated[str, typer.Argument(help="An artifact, or demo: the bundled model in full precision.")],
    size: Annotated[tuple[int, int], typer.Option(help="Height and width of an image.")] = (32, 32),
    json_out: JsonOption = None,
) -> None:
    """Count what one image costs: multiplications, FixOPs, BOPs and bytes, by operation."""
    program = capture(*load_calibration(target)) if target == "demo" else adalog.load(target).program
    result = cost(program, [(3, *size)])
    if json_out != "-":
        table = Table(title=f"{target}, one image of {size[0]} x {size[1]}")
        table.add_column("role")
        for column in ("count", "FixOPs", "BOPs", "weight bytes"):
            table.add_column(column, justify="right")
        for role, row in result.by_role().items():
            kind = "" if role in PRODUCT_ROLES else "dim"
            table.add_row(
                role, f"{row.count:,}", f"{row.fixops:,.0f}", f"{row.bops:,}", f"{row.weight_bytes:,}", style=kind
            )
        Console().print(table)
        print(f"products: {result.macs:,} MACs, {result.fixops:,.0f} FixOPs, {result.bops:,} BOPs")
        print(f"the rest: {result.elementwise_fixops:,.0f} FixOPs")
        parts = ", ".join(f"{part} {count:,}" for part, count in result.size_bytes.items())
        print(f"bytes: {parts}; {sum(result.size_bytes.values()):,} in all")
    emit_json({"target": target, "size": list(size), **result.to_json()}, json_out)


def print_census(told: dict[str, Any]) -> None:
    """What `models.inspect` found: the sites, what folds and what does not."""
    table = Table(title=f"{told['model']}: {told['parameters']:,} parameters, images {told['images']}")
    for column in ("site", "role", "left", "right", "weight"):
        table.add_column(column, overflow="fold")
    for row in told["sites"]:
        shape = "" if row["shape"] is None else " x ".join(map(str, row["shape"]))
        table.add_row(escape(row["site"]), row["role"], row["left"], row["right"], shape)
    Console().print(table)
    print(
        f"{told['linears']} linears, {told['convs']} convolutions, {told['qk']} Q K^T, {told['av']} A V, "
        f"{len(told['other_sites'])} other products; {told['post_gelu']} sites after a GELU, {told['pairs']} norms fold"
    )
    for norm, why in told["refusals"].items():
        print(f"not folded: {norm}: {why}")
    kept = ", ".join(f"{name} x {count}" for name, count in sorted(told["float_ops"].items()))
    print(f"in float32, since they multiply no two stored or computed tensors: {kept}")


def print_bytes(content: bytes) -> None:
    """An artifact's bytes, one row a tensor."""
    parts = artifact.sizes(content)
    columns = [part for part in parts if part != "header"]
    table = Table(title="Bytes")
    table.add_column("tensor", overflow="fold")
    for column in (*columns, "all"):
        table.add_column(column, justify="right")
    for name, counts in artifact.tensor_sizes(content).items():
        cells = [f"{counts[part]:,}" if part in counts else "" for part in columns]
        table.add_row(escape(name), *cells, f"{sum(counts.values()):,}")
    table.add_section()
    table.add_row("header", *("" for _ in columns), f"{parts['header']:,}")
    table.add_row("all", *(f"{parts[part]:,}" for part in columns), f"{len(content):,}", style="bold")
    Console().print(table)
