"""Compare the executors with fake quantization, and measure their speed on DeiT-S.

    python benchmarks/executors.py --model demo|deit_tiny:FOLDER [--realbench DIR] --bits w3a3 w4a4 w6a6 [--json F]

Each row compares one executor with fake quantization of the same artifact, with the tables that calibration chose: on
the test images of the bundled model, or on the queries of `realbench.py` for a classifier NAME:FOLDER.

- code_flip_fraction: the share of activation codes that differ.
- median_logit_error: the median over images of the relative error of the logits.
- agreement, agreement_with_torch: the share of images with the same prediction as fake quantization, and as `torch`.
- top1: the accuracy.
- loss: the mean squared error of the logits against full precision.
- images_per_second: by CPU time of the process, on one thread with batches of 20.

Rows with the executor "fake" are fake quantization itself, with u8, u16 and float tables. They show how the tables
change top-1 and the loss of the bundled model. In float32, fake quantization rounds its sums. A rounded value may cross
a threshold between codes and push other values across theirs; finer codes flip more easily. Rows with the dtype
"float64" repeat the comparison in float64, in which no code should flip.

"speed" compares full-precision PyTorch, the executor `torch`, and `torch` after `compile()`; a classifier's file has no
speeds. They take turns on DeiT-S with random weights at batch 8 on one thread. The object has their median images per
second and the ratios to full precision. All times are CPU times, because other processes may share the machine. The
script prints one JSON object and saves it as benchmarks/results/executors.json or executors-NAME.json, or as F.
"""

from benchmarks.publish import RESULTS, publish
from benchmarks.real import names_folder
from benchmarks.realbench import RealBench

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from adalog import Calibration, Config, QuantizedModel, Search, library
from adalog.artifact import deserialise, serialise
from adalog.graph.operations import FAKE_QUANTIZE
from adalog.inputs import demo
from adalog.quantizers import LogQuantizer
from adalog.study.doctor import machine

BATCH = 20
BARS = {"median_logit_error": 1e-4, "agreement": 0.995, "speed_ratio": 1.3}
SEED = 0


@torch.no_grad()
def answers(model: Callable[[Tensor], Tensor], images: Tensor) -> tuple[Tensor, float]:
    """Return the logits, and the images per second of CPU time."""
    start = time.process_time()
    logits = torch.cat([model(part) for part in images.split(BATCH)])
    return logits, len(images) / (time.process_time() - start)


@torch.no_grad()
def flips(model: QuantizedModel, executor: str, images: Tensor) -> float:
    """Return the share of activation codes that differ from the codes of fake quantization."""
    compiled = model.compile(executor)
    differ = count = 0
    for part in images.split(BATCH):
        found = compiled.codes(part)

        def watch(node: Any, args: tuple[Any, ...], result: Any, found: dict[str, Tensor] = found) -> None:
            nonlocal differ, count
            if node.op == FAKE_QUANTIZE and node.name in found:
                code = model.program.quantizers[args[1]].quantize(args[0])
                differ += int((found[node.name] != code).sum())
                count += code.numel()

        model.program.run([part], watch)
    return differ / count


def tables_of(model: QuantizedModel) -> str:
    """Return the widths of a model's tables as text, with the number of tables of each width."""
    widths = [each.width for each in model.program.quantizers.values() if isinstance(each, LogQuantizer)]
    counted = {f"u{width}" if width else "float": widths.count(width) for width in sorted(set(widths))}
    return ", ".join(f"{name} x {count}" for name, count in counted.items())


def speed(bits: str, repeats: int) -> dict[str, Any]:
    """Measure images per second of full precision and of integers, which take turns at batch 8 on one thread."""
    import timm

    torch.manual_seed(SEED)
    model = timm.create_model("deit_small_patch16_224").eval()
    short = Search(init=(4, 2), parents=1, steps=0, rough_rows=0)
    config = replace(Config.preset(bits), images=2, search=short)
    quantized = Calibration(model, torch.randn(2, 3, 224, 224)).quantize(config)
    networks: dict[str, nn.Module] = {"fp32": model, "torch": quantized.compile("torch")}
    x = torch.randn(8, 3, 224, 224)
    seconds: dict[str, list[float]] = {name: [] for name in networks}
    with torch.no_grad():
        for repeat in range(repeats + 2):
            for name, network in networks.items():
                start = time.process_time()
                network(x)
                if repeat > 1:
                    seconds[name].append(time.process_time() - start)
    rates = {name: 8 / median(found) for name, found in seconds.items()}
    found = {"model": "timm:deit_small_patch16_224", "bits": bits, "batch": 8, "threads": 1, "repeats": repeats}
    ratios = {name: rate / rates["fp32"] for name, rate in rates.items()}
    return {**found, "table": tables_of(quantized), "images_per_second": rates, "ratio": ratios}


def case_of(model: str, realbench: Path | None, images: int) -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """Return a model, images to evaluate it on, their labels, and its calibration images."""
    if model == "demo":
        pictures, labels = (value[:images] for value in demo.test_images())
        return demo.load_model(), pictures, labels, demo.calibration_images()[: Config().images]
    if realbench is None or not names_folder(model):
        raise typer.BadParameter("give demo, or NAME:FOLDER with --realbench DIR", param_hint="--model")
    bench = RealBench.of(realbench, model)
    pictures = bench.queries(images).load(bench.preprocessing)
    return bench.model, pictures, bench.truth[:images], bench.calibration_images(SEED, Config().images)


def main(
    bits: Annotated[list[str] | None, typer.Argument(help="Further bits, after the first of --bits.")] = None,
    model: str = "demo",
    first: Annotated[str, typer.Option("--bits", help="Bits to measure; others may follow.")] = "w3a3",
    realbench: Annotated[Path | None, typer.Option(envvar="ADALOG_REALBENCH", help="See `realbench.py`.")] = None,
    images: Annotated[int, typer.Option(help="Number of test images to use, or all if there are fewer.")] = 2000,
    reference_images: Annotated[int, typer.Option(help="Number of these images for slow runs.")] = 400,
    repeats: int = 20,
    json_out: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Compare the executors with fake quantization, and measure their speed on DeiT-S."""
    torch.set_num_threads(1)
    network, pictures, labels, calibrating = case_of(model, realbench, images)
    bundled = model == "demo"
    full, _ = answers(network, pictures)
    calibration = Calibration(network, calibrating, seed=SEED)
    rows: list[dict[str, Any]] = []

    def row(executor: str, width: str, table: str, logits: Tensor, rate: float, beside: Tensor) -> dict[str, Any]:
        beside = beside[: len(logits)]
        error = ((logits - beside).norm(dim=1) / beside.norm(dim=1)).median()
        return {
            "executor": executor,
            "bits": width,
            "table": table,
            "dtype": str(logits.dtype).removeprefix("torch."),
            "images": len(logits),
            "median_logit_error": float(error),
            "agreement": float((logits.argmax(1) == beside.argmax(1)).double().mean()),
            "top1": float((logits.argmax(1) == labels[: len(logits)]).double().mean()),
            "loss": float((logits - full[: len(logits)]).square().mean()),
            "images_per_second": rate,
        }

    for width in (first, *(bits or ())):
        config = Config.preset(width)
        quantized = calibration.quantize(config)
        fake, rate = answers(quantized, pictures)
        rows.append({**row("fake", width, tables_of(quantized), fake, rate, fake), "code_flip_fraction": 0.0})
        by_torch: Tensor | None = None
        for executor, count in (
            ("torch", images),
            *[("native", images)] * bool(library.levels()),
            *[("reference", min(images, reference_images))] * bundled,
        ):
            some = pictures[:count]
            logits, rate = answers(quantized.compile(executor), some)
            by_torch = logits if by_torch is None else by_torch
            found = row(executor, width, tables_of(quantized), logits, rate, fake)
            found["agreement_with_torch"] = float((logits.argmax(1) == by_torch[:count].argmax(1)).double().mean())
            rows.append({**found, "code_flip_fraction": flips(quantized, executor, some)})
        double, some = (
            QuantizedModel(deserialise(serialise(quantized.quantized))).double(),
            pictures[:reference_images].double(),
        )
        logits, rate = answers(double.compile("torch"), some)
        found = row("torch", width, tables_of(quantized), logits, rate, answers(double, some)[0])
        rows.append({**found, "code_flip_fraction": flips(double, "torch", some)})
        for tables in ("u8", "u16", "float") * bundled:
            other = calibration.quantize(replace(config, tables=tables))
            logits, rate = answers(other, pictures)
            rows.append({**row("fake", width, tables, logits, rate, fake), "code_flip_fraction": None})
    result = {
        "model": model.partition(":")[0],
        "rows": rows,
        "speed": [speed(width, repeats) for width in (first, *(bits or ())) if bundled],
        "bars": BARS,
        "seed": SEED,
        "machine": machine(),
    }
    name = "executors" if bundled else f"executors-{result['model']}"
    publish(result, json_out or RESULTS / f"{name}.json")


if __name__ == "__main__":
    typer.run(main)
