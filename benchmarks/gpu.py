"""Measure calibration and evaluation on a GPU.

    python -m benchmarks.gpu [--models deit_tiny_patch16_224 ...] [--device cuda] [--bits w4a4] [--images 32]
        [--batch 64] [--blocks 2] [--json FILE]

The models are timm architectures with random weights, or NAME:FOLDER with weights as NAME*.safetensors. Images are
random. For each model, the script reports the seconds of quantization by the method `adalog` the first time, those of
each part of it again, and the peak of GPU memory.

For the first model, cut to a few blocks, it counts what quantization asks of a GPU: operations that compute, copies
between types or devices, and synchronisations, in which the processor waits for the GPU; and on a GPU also the launches
of kernels and the share of the time in which the GPU computes. It compares the SQNR of all sites with those on the
processor. Last, it measures images per second of the float model, fake quantization and the executor `torch`, and how
many classes the last two agree on.

The script prints one JSON object and saves it as benchmarks/results/gpu.json.
"""

from benchmarks.publish import RESULTS, publish
from benchmarks.realbench import load_model

import argparse
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import adalog
from adalog import Calibration, Config, Search
from adalog.study.doctor import machine

MODELS = ("deit_tiny_patch16_224", "deit_small_patch16_224", "vit_base_patch16_224", "swin_small_patch4_window7_224")
# Like views, these compute nothing.
_FREE = ("_unsafe_view", "empty", "empty_like", "new_empty", "empty_strided")
_COPIES = ("_to_copy", "copy_")
_WAITS = ("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select")


class Counts(TorchDispatchMode):
    """Count the operations that PyTorch dispatches, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        kind = "copies" if name in _COPIES else "waits" if name in _WAITS else "operations"
        if not (func.is_view or name in _FREE):
            self.kinds[kind] += 1
        return func(*args, **(kwargs or {}))


def build(name: str, blocks: int | None = None) -> nn.Module:
    """Build a timm architecture with random weights, or load NAME:FOLDER. blocks: keep only so many of its blocks."""
    import timm

    torch.manual_seed(0)
    model = load_model(Path(), name) if ":" in name else timm.create_model(name).eval()
    if blocks is not None and isinstance(getattr(model, "blocks", None), nn.Sequential):
        model.blocks = model.blocks[:blocks]
    return model


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(device: torch.device, work: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds of some work on the device, and its result."""
    wait(device)
    start = time.perf_counter()
    result = work()
    wait(device)
    return time.perf_counter() - start, result


def measure_quantization(name: str, model: nn.Module, images: Tensor, config: Config) -> dict[str, Any]:
    """Return the seconds of the first quantization, those of each part of another one, and its peak memory."""
    device = images.device
    cold, _ = timed(device, lambda: adalog.quantize(model, images, config))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    capturing, calibration = timed(device, lambda: Calibration(model, images))
    searching, _ = timed(device, lambda: calibration.assign(replace(config, stages=())))
    correcting, _ = timed(device, lambda: calibration.assign(config))  # the calibration keeps the result of the search
    peak = round(torch.cuda.max_memory_allocated(device) / 2**30, 2) if device.type == "cuda" else None
    seconds = {"cold": cold, "capture": capturing, "search": searching, "correction": correcting}
    return {
        "model": name.partition(":")[0],
        **{part: round(value, 2) for part, value in seconds.items()},
        "peak_gib": peak,
    }


def measure_operations(model: nn.Module, images: Tensor, config: Config) -> dict[str, Any]:
    """Return what quantization asks of the device, and on a GPU how busy it is."""
    calibration = Calibration(model, images)
    with Counts() as counts:
        calibration.assign(config)
    asked: dict[str, Any] = {"groups": len(calibration.groups), **counts.kinds}
    if images.device.type == "cuda":
        from torch.profiler import ProfilerActivity, profile

        # The calibration keeps the result of the search, so this is the correction alone.
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            seconds, _ = timed(images.device, lambda: calibration.assign(config))
        kernels = [event for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        busy = sum(event.device_time for event in kernels) / 1e6
        asked |= {
            "launches_of_correction": len(kernels),
            "seconds_profiled_of_correction": round(seconds, 2),
            "busy_share_of_correction": round(busy / seconds, 3),
        }
    return asked


def compare_devices(model: nn.Module, images: Tensor, config: Config) -> dict[str, float]:
    """Return the differences of the SQNR of all sites [dB] from those on the processor."""
    here, there = (
        adalog.quantize(model.to(device), images.to(device), config).ledger for device in (images.device, "cpu")
    )
    model.to(images.device)
    off = [one.sqnr - other.sqnr for one, other in zip(here, there, strict=True)]
    return {"mean_db": round(sum(off) / len(off), 4), "least_db": round(min(off), 4), "most_db": round(max(off), 4)}


@torch.no_grad()
def measure_evaluation(model: nn.Module, images: Tensor, config: Config, batch: int) -> dict[str, Any]:
    """Return images per second of each way to run the model, and on how many classes the quantized ones agree."""
    quick = replace(config, search=Search(rounds=1, steps=0), stages=())  # other quantizers take as long
    quantized = adalog.quantize(model, images, quick)
    given = torch.randn(batch, *images.shape[1:], generator=torch.Generator().manual_seed(1)).to(images.device)
    ways = {"float": model, "fake_quantization": quantized, "torch": quantized.compile("torch")}
    speeds: dict[str, Any] = {}
    for name, run in ways.items():
        run(given)
        seconds, _ = timed(given.device, lambda run=run: [run(given) for _ in range(3)])
        speeds[name] = round(3 * batch / seconds, 1)
    one, other = (ways[name](given).argmax(1) for name in ("fake_quantization", "torch"))
    return {
        "bits": config.bits,
        "batch": batch,
        "images_per_second": speeds,
        "agreement": float((one == other).float().mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--bits", default="w4a4")
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--batch", type=int, default=64, help="images at a time in evaluation")
    parser.add_argument("--blocks", type=int, default=2, help="blocks of the first model for the counts")
    parser.add_argument("--json", type=Path, default=RESULTS / "gpu.json")
    given = parser.parse_args()
    from timm.data import resolve_model_data_config

    device, config = torch.device(given.device), replace(Config.preset(given.bits), images=given.images)
    first = build(given.models[0]).to(device)
    size = resolve_model_data_config(first)["input_size"]
    images = torch.randn(given.images, *size, generator=torch.Generator().manual_seed(0)).to(device)
    rows = [measure_quantization(name, build(name).to(device), images, config) for name in given.models]
    small = build(given.models[0], given.blocks).to(device)
    result = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "bits": given.bits,
        "images": given.images,
        "seed": 0,
        "rows": rows,
        "operations": {"blocks": given.blocks, **measure_operations(small, images, config)},
        "sqnr_against_cpu": compare_devices(small, images, config),
        "evaluation": [
            measure_evaluation(first, images, replace(Config.preset(bits), images=given.images), given.batch)
            for bits in (given.bits, "w8a8")
        ],
        "machine": machine(),
    }
    publish(result, given.json)


if __name__ == "__main__":
    main()
