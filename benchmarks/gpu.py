"""Measure calibration and evaluation on a GPU.

    python -m benchmarks.gpu [--parts quantization kernels ...] [--skip PART ...] [--add] [--device cuda] [--json FILE]
        [--models deit_tiny_patch16_224 ...] [--bits w4a4] [--images 32] [--batch 64] [--blocks 2] [--backend inductor]

The models are timm architectures with random weights, or NAME:FOLDER with weights as NAME*.safetensors. Images are
random. The parts are, in the order in which they are measured:

- quantization: for each model, the seconds of quantization by the method `adalog` the first time, those of each part of
  it again, and the peak of GPU memory.
- steps: the milliseconds of a training step of one block of the first model, cut to --blocks blocks, by the number of
  images in a step.
- evaluation: images per second of the first model: in float, by fake quantization, and by the executor `torch`. Batches
  have --batch images, and as many as an evaluation takes by default.
- agreement: on how many evaluation images of the bundled model the executor `torch`, and fake quantization on the
  processor, predict the class that fake quantization predicts.
- sqnr: the SQNR of all sites minus that on the processor, for the bundled model and for the first model, cut to
  --blocks blocks, with 8 images at most, because the processor is slow.
- compiled: images per second of fake quantization with `torch.compile`, for batches of --batch images, and the seconds
  of compiling.
- kernels: for the search and the correction of the first model, the launches of kernels, the share of the time in which
  the GPU computes, and the kernels that take the most time; and what both ask of a GPU: operations that compute, copies
  between types or devices, and synchronisations, in which the processor waits for the GPU.
- reconstruction, only if it is named: the seconds of each stage of `adalog++` at W3A3 on the first model, which fits
  --fitted random images.

The script saves the result after each part, as benchmarks/results/gpu.json, and prints it at the end as one JSON
object. --add keeps the parts that FILE has from an earlier run on the same kind of GPU.
"""

from benchmarks.publish import RESULTS, publish, save
from benchmarks.real import load_classifier
from benchmarks.reconstruct_cost import time_steps

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import adalog
from adalog import Calibration, Config, QuantizedModel, Search
from adalog.device import full_float32
from adalog.errors import one_line
from adalog.inputs import demo
from adalog.study.doctor import machine
from adalog.study.evaluate import batch_on, predict

MODELS = ("deit_tiny_patch16_224", "deit_small_patch16_224", "vit_base_patch16_224", "swin_small_patch4_window7_224")
PARTS = ("quantization", "steps", "evaluation", "agreement", "sqnr", "compiled", "kernels", "reconstruction")
# Like views, these compute nothing.
_FREE = ("_unsafe_view", "empty", "empty_like", "new_empty", "empty_strided")
_COPIES = ("_to_copy", "copy_")
_WAITS = ("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select")
_SHOWN = 15  # kernels in a table
_SEGMENT = 1.0  # seconds that one profile covers at least: a profile of millions of kernels would not fit its buffer
_STEPS = (30, 6)  # training steps that are measured, and those before them that warm up
_STEP_IMAGES = 64  # of which a block holds an eighth out, so that the largest step has enough
_COMPARED = 8  # images with which the SQNR on two devices is compared
_LONG_ENOUGH = 0.5  # seconds to measure the speed of an evaluation


# --- what is measured ------------------------------------------------------------------------------------------------


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


@dataclass
class Kernels:
    """The kernels of some work on a device, and the seconds of the work. On a processor, operations are its kernels.

    `cut` may be called during the work. It ends one profile and starts the next one, outside of the measured time.
    """

    device: torch.device
    launches: Counter[str] = field(default_factory=Counter)
    seconds_of: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    _profile: Any = None
    _begun: float = 0.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        self._start()
        try:
            yield
        finally:
            self._stop()

    def cut(self, *_: Any) -> None:
        """Start another profile if this one is long enough. Takes the arguments of a progress function."""
        if time.perf_counter() - self._begun > _SEGMENT:
            self._stop()
            self._start()

    def _start(self) -> None:
        activity = ProfilerActivity.CUDA if self.device.type == "cuda" else ProfilerActivity.CPU
        self._profile = profile(activities=[activity], acc_events=True)  # without this, it warns that it keeps none
        self._profile.__enter__()
        wait(self.device)
        self._begun = time.perf_counter()

    def _stop(self) -> None:
        wait(self.device)
        self.seconds += time.perf_counter() - self._begun
        self._profile.__exit__(None, None, None)
        kind = torch.autograd.DeviceType.CUDA if self.device.type == "cuda" else torch.autograd.DeviceType.CPU
        # The raw events: sorting them into a tree, as `events()` does, takes longer than the work.
        for event in self._profile.profiler.kineto_results.events():
            if event.device_type() == kind:
                self.launches[event.name()] += 1
                self.seconds_of[event.name()] += event.duration_ns() / 1e9

    def summary(self) -> dict[str, Any]:
        """Return the sums over all kernels, and the kernels that take the most time."""
        return {
            "launches": self.launches.total(),
            "seconds": round(self.seconds, 2),
            "busy_share": round(sum(self.seconds_of.values()) / self.seconds, 3),
            "kernels": [
                {"kernel": name[:120], "launches": self.launches[name], "ms": round(1000 * seconds, 2)}
                for name, seconds in self.seconds_of.most_common(_SHOWN)
            ],
        }


def build(name: str, blocks: int | None = None) -> nn.Module:
    """Build a timm architecture with random weights, or load NAME:FOLDER. blocks: keep only so many of its blocks."""
    import timm

    torch.manual_seed(0)
    model = load_classifier(name).module if ":" in name else timm.create_model(name).eval()
    if blocks is not None and isinstance(getattr(model, "blocks", None), nn.Sequential):
        model.blocks = model.blocks[:blocks]
    return model


def noise(count: int, shape: Sequence[int], device: torch.device, seed: int = 0) -> Tensor:
    """Return random images on the device, the same on every device."""
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed)).to(device)


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


def quick(config: Config) -> Config:
    """Return choices that search hardly anything; the speed of the result does not depend on that."""
    return replace(config, search=Search(rounds=1, steps=0), stages=())


# --- the parts -------------------------------------------------------------------------------------------------------


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
    return {"model": short(name), **{part: round(value, 2) for part, value in seconds.items()}, "peak_gib": peak}


def short(name: str) -> str:
    """Return the name of a model as results have it."""
    return name.partition(":")[0].partition("_patch")[0]


def measure_kernels(name: str, model: nn.Module, images: Tensor, config: Config) -> Iterator[dict[str, Any]]:
    """Yield the kernels of the search, those of the correction too, and then also what both ask of the device."""
    adalog.quantize(build(name, 1).to(images.device), images, config)  # loads and compiles the kernels
    calibration = Calibration(model, images)
    found: dict[str, Any] = {"model": short(name), "groups": len(calibration.groups)}
    # The calibration keeps the result of the search, so the second one is the correction alone.
    for part, choices in (("search", replace(config, stages=())), ("correction", config)):
        kernels = Kernels(images.device)
        with kernels.measured():
            calibration.assign(choices, adalog.Resources(progress=kernels.cut))
        found[part] = kernels.summary()
        yield found
    calibration = Calibration(model, images)
    for part, choices in (("search", replace(config, stages=())), ("correction", config)):
        with Counts() as counts:
            calibration.assign(choices)
        found[part] = dict(counts.kinds) | found[part]
        yield found


@torch.no_grad()
def measure_evaluation(model: nn.Module, images: Tensor, config: Config, batch: int) -> list[dict[str, Any]]:
    """Return images per second of each way to run the model, for this batch and the default one."""
    quantized = adalog.quantize(model, images, quick(config))
    ways = {"float": model, "fake_quantization": quantized, "torch": quantized.compile("torch")}
    default, rows = batch_on(images.device, [quantized]), []
    for size in dict.fromkeys((batch, default)):
        given = noise(size, images.shape[1:], images.device, 1)
        speeds = {name: speed(run, given) for name, run in ways.items()}
        row = {"bits": config.bits, "batch": size, "default": size == default, "images_per_second": speeds}
        rows.append(row)
    return rows


@torch.no_grad()
def measure_compiled(model: nn.Module, images: Tensor, config: Config, batch: int, backend: str) -> dict[str, Any]:
    """Return images per second of fake quantization with and without `torch.compile`, or why compiling failed."""
    quantized, given = adalog.quantize(model, images, quick(config)), noise(batch, images.shape[1:], images.device, 1)
    row: dict[str, Any] = {"bits": config.bits, "batch": batch, "fake_quantization": speed(quantized, given)}
    try:
        with full_float32():  # compiled code computes with the settings of its caller
            compiled = torch.compile(quantized, backend=backend, fullgraph=True)
            seconds, _ = timed(images.device, lambda: compiled(given))
            row |= {"seconds_to_compile": round(seconds, 1), "compiled": speed(compiled, given)}
    except Exception as cause:  # a compiler may raise anything
        row["not_compiled"] = one_line(cause)[:500]
    return row


def speed(run: Callable[[Tensor], Any], images: Tensor) -> float:
    """Return the images per second of a model that has run once."""
    run(images)
    once, _ = timed(images.device, lambda: run(images))
    repeats = max(3, round(_LONG_ENOUGH / once))
    seconds, _ = timed(images.device, lambda: [run(images) for _ in range(repeats)])
    return round(repeats * len(images) / seconds, 1)


def measure_agreement(device: torch.device, config: Config, work: Path) -> dict[str, Any]:
    """Return the share of evaluation images on which others predict what fake quantization on the device predicts."""
    calibrating, (images, _) = demo.calibration_images()[: config.images], demo.test_images()
    quantized = adalog.quantize(demo.load_model().to(device), calibrating.to(device), config)
    file = work.with_suffix(".safetensors.tmp")
    try:
        quantized.save(file)
        there: QuantizedModel = adalog.load(file)
    finally:
        file.unlink(missing_ok=True)
    own = predict(quantized, images, device=device).argmax(1)
    others = {
        "torch": predict(quantized.compile("torch"), images, device=device),
        "fake_quantization_on_cpu": predict(there, images),
    }
    shares = {name: round(float((logits.argmax(1) == own).float().mean()), 5) for name, logits in others.items()}
    return {"bits": config.bits, "images": len(images), **shares}


def compare_devices(model: nn.Module, images: Tensor, config: Config) -> dict[str, float]:
    """Return the differences of the SQNR of all sites [dB] from those on the processor."""
    here = adalog.quantize(model, images, config).ledger
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sites run in parallel instead
    try:
        there = adalog.quantize(model.to("cpu"), images.to("cpu"), config, jobs=os.cpu_count() or 1).ledger
    finally:
        torch.set_num_threads(threads)
        model.to(images.device)
    off = [one.sqnr - other.sqnr for one, other in zip(here, there, strict=True)]
    return {"mean_db": round(sum(off) / len(off), 4), "least_db": round(min(off), 4), "most_db": round(max(off), 4)}


def measure_reconstruction(name: str, model: nn.Module, images: Tensor, fitted: Tensor) -> dict[str, Any]:
    """Return the seconds of the search and of each stage of `adalog++` at W3A3."""
    config = replace(Config.preset("w3a3", "adalog++"), images=len(images)).with_fitted_images(len(fitted))
    calibration = Calibration(model, images, unlabelled=fitted)
    searching, _ = timed(images.device, lambda: calibration.assign(replace(config, stages=())))
    begun = {"correction": time.perf_counter()}

    def progress(done: int, total: int, told: str) -> None:
        if told.startswith("end to end") and "end_to_end" not in begun:
            wait(images.device)
            begun["end_to_end"] = time.perf_counter()

    timed(images.device, lambda: calibration.assign(config, adalog.Resources(progress=progress)))
    ends = [*list(begun.values())[1:], time.perf_counter()]
    stages = {stage: round(end - start, 1) for (stage, start), end in zip(begun.items(), ends, strict=True)}
    return {"model": short(name), "bits": config.bits, "fitted": len(fitted), "search": round(searching, 1), **stages}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS[:-1]))
    parser.add_argument("--skip", nargs="+", choices=PARTS, default=[])
    parser.add_argument("--add", action="store_true", help="keep the other parts that the file has")
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--bits", default="w4a4")
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--fitted", type=int, default=1000, help="images that the reconstruction fits")
    parser.add_argument("--batch", type=int, default=64, help="images at a time in evaluation")
    parser.add_argument("--blocks", type=int, default=2, help="blocks of the first model, where it is cut")
    parser.add_argument("--backend", default="inductor", help="the backend of torch.compile")
    parser.add_argument("--json", type=Path, default=RESULTS / "gpu.json")
    given = parser.parse_args()
    from timm.data import resolve_model_data_config

    device, wanted = torch.device(given.device), set(given.parts) - set(given.skip)
    config, wide = (replace(Config.preset(bits), images=given.images) for bits in (given.bits, "w8a8"))
    name = given.models[0]
    first = build(name).to(device)
    size = resolve_model_data_config(first)["input_size"]
    images = noise(given.images, size, device)
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "bits": given.bits,
        "images": given.images,
        "seed": 0,
        "machine": machine(),
    }
    if given.add and given.json.exists():
        before = json.loads(given.json.read_text(encoding="utf-8"))
        if any(before[key] != result[key] for key in ("device", "bits", "images")):
            parser.error(f"{given.json} has the results of another device, or of other bits or images")
        result = {key: value for key, value in before.items() if key != "commit"} | result

    def keep(part: str, measured: Any) -> None:
        result[part] = measured
        save(result, given.json)

    if "quantization" in wanted:
        rows: list[dict[str, Any]] = []
        for each in given.models:
            rows.append(measure_quantization(each, build(each).to(device), images, config))
            keep("rows", rows)
    if "steps" in wanted:
        small, many = build(name, given.blocks).to(device), noise(_STEP_IMAGES, size, device)
        keep("steps", [time_steps(small, many, batch, partial(wait, device), *_STEPS) for batch in (8, 32)])
    if "evaluation" in wanted:
        rows = []
        for choices in (config, wide):
            rows += measure_evaluation(first, images, choices, given.batch)
            keep("evaluation", rows)
    if "agreement" in wanted:
        rows = []
        for choices in (config, wide):
            rows.append(measure_agreement(device, choices, given.json))
            keep("agreement", rows)
    if "sqnr" in wanted:
        few = replace(config, images=min(_COMPARED, given.images))
        calibrating = demo.calibration_images()[: few.images].to(device)
        rows = [{"model": "demo", **compare_devices(demo.load_model().to(device), calibrating, few)}]
        keep("sqnr", rows)
        small = build(name, given.blocks).to(device)
        rows.append({"model": short(name), "blocks": given.blocks, **compare_devices(small, images[: few.images], few)})
        keep("sqnr", rows)
    if "compiled" in wanted:
        keep("compiled", measure_compiled(first, images, config, given.batch, given.backend))
    if "kernels" in wanted:
        for kernels in measure_kernels(name, first, images, config):
            keep("kernels", kernels)
    if "reconstruction" in wanted:
        keep("reconstruction", measure_reconstruction(name, first, images, noise(given.fitted, size, device, 1)))
    publish(result, given.json)


if __name__ == "__main__":
    main()
