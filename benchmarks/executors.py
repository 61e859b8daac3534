"""Integers beside fake quantization, on the bundled model and its 2,000 images, and their speed on DeiT-S's shapes.

    python benchmarks/executors.py --model demo --bits w3a3 w4a4 w6a6 [--json F]

One row for each executor and bits with the tables that calibration chose, against fake quantization of the same file:
the share of activation codes that differ, the median over images of the logits' relative error, the share of equal
answers (also beside `torch`), top-1 and images a second of the process's own time (batch 20, one thread). Rows of the
executor "fake" are fake quantization itself, with u8, u16 and float tables: what tables cost in top-1, and in loss, the
mean squared error of logits to full precision. In float32 the sums of fake quantization are rounded, which moves values
over thresholds (each then moves others), the more the finer the codes; rows with dtype "float64" compare the same in
float64, where nothing differs.
"speed": the median images a second of fp32 torch, of `torch`, and of `torch` after `compile()`, in turn, on DeiT-S with
random weights at batch 8, one thread, and the quotients by the first; of the process's own seconds, since machines are
shared. Prints one JSON object and saves it as benchmarks/results/executors.json, or as F.
"""

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
from adalog.graph.program import FAKE_QUANTIZE
from adalog.inputs import demo
from adalog.quantizers import LogQuantizer
from adalog.study.doctor import machine
from publish import RESULTS, publish

BATCH = 20
BARS = {"median_logit_error": 1e-4, "agreement": 0.995, "speed_ratio": 1.3}
SEED = 0


@torch.no_grad()
def answers(model: Callable[[Tensor], Tensor], images: Tensor) -> tuple[Tensor, float]:
    """The logits, and images a second."""
    start = time.process_time()
    logits = torch.cat([model(part) for part in images.split(BATCH)])
    return logits, len(images) / (time.process_time() - start)


@torch.no_grad()
def flips(model: QuantizedModel, executor: str, images: Tensor) -> float:
    """The share of codes of activations that are others than in fake quantization."""
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
    """The widths of a model's tables, how many of each."""
    widths = [each.width for each in model.program.quantizers.values() if isinstance(each, LogQuantizer)]
    counted = {f"u{width}" if width else "float": widths.count(width) for width in sorted(set(widths))}
    return ", ".join(f"{name} x {count}" for name, count in counted.items())


def speed(bits: str, repeats: int) -> dict[str, Any]:
    """Images a second at batch 8 on one thread, fp32 and integers in turn."""
    import timm

    torch.manual_seed(SEED)
    model = timm.create_model("deit_small_patch16_224").eval()
    short = Search(init=(4, 2), parents=1, steps=0, rough_rows=0)
    config = replace(Config.preset(bits), images=2, search=short)
    quantized = Calibration(model, torch.randn(2, 3, 224, 224)).quantize(config)
    compiled = quantized.compile("torch")
    compiled.compile()
    networks: dict[str, nn.Module] = {"fp32": model, "torch": quantized.compile("torch"), "torch compiled": compiled}
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


def main(
    bits: Annotated[list[str] | None, typer.Argument(help="After --bits.")] = None,
    model: str = "demo",
    first: Annotated[str, typer.Option("--bits", help="Several may follow.")] = "w3a3",
    images: Annotated[int, typer.Option(help="Of the 2,000.")] = 2000,
    reference_images: Annotated[int, typer.Option(help="Of these, for what is slow.")] = 400,
    repeats: int = 20,
    json_out: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    if model != "demo":
        raise typer.BadParameter("demo is the one model whose images are here", param_hint="--model")
    torch.set_num_threads(1)
    network = demo.load_model()
    pictures, labels = (value[:images] for value in demo.test_images())
    full, _ = answers(network, pictures)
    calibration = Calibration(network, demo.calibration_images()[: Config().images], seed=SEED)
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
            ("reference", min(images, reference_images)),
        ):
            some = pictures[:count]
            logits, rate = answers(quantized.compile(executor), some)
            by_torch = logits if by_torch is None else by_torch
            found = row(executor, width, tables_of(quantized), logits, rate, fake)
            found["agreement_with_torch"] = float((logits.argmax(1) == by_torch[:count].argmax(1)).double().mean())
            rows.append({**found, "code_flip_fraction": flips(quantized, executor, some)})
        double, some = deserialise(serialise(quantized.quantized)).double(), pictures[:reference_images].double()
        logits, rate = answers(double.compile("torch"), some)
        found = row("torch", width, tables_of(quantized), logits, rate, answers(double, some)[0])
        rows.append({**found, "code_flip_fraction": flips(double, "torch", some)})
        for tables in ("u8", "u16", "float"):
            other = calibration.quantize(replace(config, tables=tables))
            logits, rate = answers(other, pictures)
            rows.append({**row("fake", width, tables, logits, rate, fake), "code_flip_fraction": None})
    result = {
        "rows": rows,
        "speed": [speed(width, repeats) for width in (first, *(bits or ()))],
        "bars": BARS,
        "seed": SEED,
        "machine": machine(),
    }
    publish(result, json_out or RESULTS / "executors.json")


if __name__ == "__main__":
    typer.run(main)
