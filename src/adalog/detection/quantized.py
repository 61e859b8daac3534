"""Quantize a detector part by part, on the inputs of the parts in the float detector; save and load the result."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as parse_safetensors
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn

from adalog import artifact
from adalog.calibration.calibration import Calibration, digest
from adalog.calibration.operands import check_pinned
from adalog.calibration.schedule import SERIAL, Resources
from adalog.config import Config
from adalog.detection.detector import HEADS, KINDS, Detector, Settings, check_names, kind_of
from adalog.detection.images import Batch
from adalog.errors import ArtifactError, CalibrationError, one_line
from adalog.extras import extra_module
from adalog.files import write_whole
from adalog.graph.capture import Sizes, capture
from adalog.graph.sites import Site, find_sites
from adalog.model import QuantizedModel, quickest
from adalog.quantized import QuantizedProgram
from adalog.stored import check_text, parse_json

KEY = artifact.DETECTOR
FORMAT = 1
# The most regions to calibrate a head on, from all images; a detector reads up to a thousand per image.
REGIONS = 2048


@torch.no_grad()
def quantize_detector(
    detector: Detector,
    batches: Sequence[Batch],
    configs: Sequence[Config],
    resources: Resources = SERIAL,
    *,
    parts: Collection[str] = KINDS,
    seed: int = 0,
    memory: int | None = None,
) -> list[Detector]:
    """Quantize a detector once per config; return detectors whose parts are quantized models.

    Each part is calibrated separately, on its inputs in the float detector. Heads are calibrated on at most 2,048
    regions, spaced evenly among those that the float detector reads in the calibration images.

    batches: images in tensors of one height and width. The first `images` of the configs are the calibration images;
    stages may fit all images. parts: kinds of parts to quantize; the others stay float. resources, memory: as in
    `Calibration`; each part has its own partial file, and may use all of the memory. Raises CaptureError,
    CalibrationError, and ValueError for unknown parts.
    """
    check_parts(parts)
    counts = {config.images for config in configs}
    if len(counts) != 1:
        raise ValueError(
            f"{len(configs)} configs have {sorted(counts)} images: give one or more, all with the same number"
        )
    inputs, images = record(detector, batches)
    count = min(*counts, len(images))
    few = {} if count == len(images) else record(detector, _first(batches, count))[0]
    parts_by_config: list[dict[str, QuantizedModel]] = [{} for _ in configs]
    modules = {name: part for name, part in detector.parts.items() if isinstance(part, nn.Module)}
    calibrations = {
        name: part_calibration(part, name, few.pop(name, inputs[name]), inputs[name], seed=seed, memory=memory)
        for name, part in modules.items()
        if kind_of(name) in parts
    }
    for config in configs:
        check_pinned(config, [site for calibration in calibrations.values() for site in calibration.sites])
    for name, part in modules.items():
        values, calibration = inputs.pop(name), calibrations.pop(name, None)
        if calibration is not None:
            own = [config_of(name, config, calibration.sites) for config in configs]
            if kind_of(name) in HEADS:
                fitted = len(values[0])
                own = [config.with_fitted_images(fitted) if config.images_fitted else config for config in own]
            models = [calibration.quantize(config, within(name, resources)) for config in own]
        else:
            program, example = capture(part, values, _sizes(name)), tuple(value[:0] for value in values)
            sites = find_sites(program)
            refusals = {site.name: "stays float: its part was not chosen" for site in sites}
            own = [config_of(name, config, sites) for config in configs]
            models = [QuantizedModel(QuantizedProgram(program, config, (), refusals, {}, example)) for config in own]
        for quantized_parts, model in zip(parts_by_config, models, strict=True):
            model.note(part=name, calibration=digest([images[:count]]), images=count)
            quantized_parts[name] = model
    return [Detector(quantized_parts, detector.settings) for quantized_parts in parts_by_config]


def part_calibration(
    part: nn.Module, name: str, first: tuple[Tensor, ...], values: tuple[Tensor, ...], *, seed: int, memory: int | None
) -> Calibration:
    """Return the calibration of a part. first: its inputs on the calibration images; values: on all images."""
    return Calibration(part, first, unlabelled=values, seed=seed, memory=memory, sizes=_sizes(name))


def _first(batches: Sequence[Batch], count: int) -> list[Batch]:
    """Return the first `count` images in batches."""
    starts = accumulate((len(batch.sizes) for batch in batches), initial=0)
    return [batch.first(count - start) for batch, start in zip(batches, starts, strict=False) if start < count]


def _sizes(part: str) -> Sizes:
    return "fixed" if kind_of(part) in HEADS else "free"  # the size of maps depends on the image


def check_parts(parts: Collection[str]) -> None:
    """Raise ValueError if a part is unknown, or if there are none."""
    unknown = set(parts) - set(KINDS)
    if unknown or not parts:
        raise ValueError(
            f"parts = {', '.join(sorted(unknown)) or 'none'} is not possible: choose from {', '.join(KINDS)}"
        )


def config_of(part: str, config: Config, sites: Sequence[Site]) -> Config:
    """Return the config of a part with these sites, without pins for the sites of other parts.

    Only the backbone reads the image, so only it uses `input_bits`.
    """
    pinned = tuple(pin for pin in config.pinned if any(fnmatchcase(site.name, pin[0]) for site in sites))
    input_bits = config.input_bits if part == "backbone" else config.activation_bits
    return replace(config, pinned=pinned, input_bits=input_bits)


def within(name: str, resources: Resources) -> Resources:
    """Return the resources for one part, with a partial file of its own, and with its name in the reports."""

    def report(done: int, total: int, site: str) -> None:
        resources.report(done, total, f"{name}: {site}" if site else name)

    return replace(resources.named(name), progress=report)


def record(detector: Detector, batches: Sequence[Batch]) -> tuple[dict[str, tuple[Tensor, ...]], Tensor]:
    """Run the float detector; return (the inputs of each part on all images, the images).

    If nothing is found in any image, so that a head is never called, all regions count as detections.
    """
    calls: dict[str, list[tuple[Tensor, ...]]] = {name: [] for name in detector.parts}
    counts = dict.fromkeys(detector.parts, 0)

    def watch(name: str, part: Callable[..., Any]) -> Callable[..., Any]:
        def call(*tensors: Tensor) -> Any:
            calls[name].append(_evenly(tensors, counts[name]) if kind_of(name) in HEADS else tensors)
            counts[name] += 1
            return part(*tensors)

        return call

    watched = Detector({name: watch(name, part) for name, part in detector.parts.items()}, detector.settings)
    for _ in watched.over(batches):
        pass
    if any(not tensors for tensors in calls.values()):  # nothing was found in any image
        for values_of_calls in calls.values():
            values_of_calls.clear()
        for _ in Detector(watched.parts, replace(detector.settings, score=0.0)).over(batches):
            pass
    joined: dict[str, tuple[Tensor, ...]] = {}
    for name, values_of_calls in calls.items():
        if not values_of_calls:
            raise CalibrationError(
                f"the detector finds no region in these images, so {name} has no inputs: give other images"
            )
        values = tuple(map(torch.cat, zip(*values_of_calls, strict=True)))
        joined[name] = _evenly(values, 0, REGIONS) if kind_of(name) in HEADS else values
    return joined, joined["backbone"][0]


def _evenly(values: Sequence[Tensor], first: int, most: int = 100) -> tuple[Tensor, ...]:
    """Return at most `most` evenly spaced rows, the same ones of each value. first: shifts the rows."""
    step = max(1, -(-len(values[0]) // most))
    return tuple(value[first % step :: step].clone() for value in values)


# --- one file ---------------------------------------------------------------------------------------------------------


def is_detector(content: bytes) -> bool:
    """Return True if a file's bytes begin like a detector."""
    return KEY.encode() in content[: 8 + 4096]


def save(detector: Detector, path: str | Path) -> int:
    """Write all parts and the settings as one file, all or nothing; return its size [bytes].

    Each part is stored as the bytes of an artifact.
    """
    parts = {}
    for name, part in detector.parts.items():
        assert isinstance(part, QuantizedModel)
        parts[name] = torch.frombuffer(bytearray(artifact.serialise(part.quantized)), dtype=torch.uint8)
    header = {"format": FORMAT, "parts": list(parts), "settings": detector.settings.to_json()}
    content = to_safetensors(parts, {KEY: json.dumps(header, separators=(",", ":"), allow_nan=False)})
    write_whole(Path(path), content)
    return len(content)


def load(path: str | Path) -> Detector:
    """Load a saved detector. This needs torchvision for its operations, but no model code and no other files.

    Raises ArtifactError for a file that is not a detector, and DataError without torchvision.
    """
    content = artifact.read(path)
    extra_module("torchvision.ops", "coco")
    try:
        settings, stored = _parse(content)
        check_names(stored, settings)
    except Exception as cause:  # parsing may raise any error on a hostile or damaged file
        raise ArtifactError(f"{path} is damaged, or not a detector: {one_line(cause)}; make it again") from cause
    parts = {
        name: QuantizedModel(artifact.deserialise(value.numpy().tobytes(), f"{path}, part {name},"))
        for name, value in stored.items()
    }
    return Detector(parts, settings)


def _parse(content: bytes) -> tuple[Settings, Mapping[str, Tensor]]:
    header = parse_json(artifact.table_of(content)["__metadata__"][KEY])
    check_text(header)
    if header.keys() != {"format", "parts", "settings"} or header["format"] != FORMAT:
        raise ValueError(f"its format is not {FORMAT}")
    stored = parse_safetensors(content)
    if sorted(stored) != sorted(header["parts"]) or any(
        value.dtype != torch.uint8 or value.ndim != 1 for value in stored.values()
    ):
        raise ValueError("its parts do not match its header")
    return Settings.from_json(header["settings"]), {name: stored[name] for name in header["parts"]}


def compile_parts(detector: Detector, executor: str, **choices: Any) -> Detector:
    """Return the detector with parts that run in integers by the executor "reference", "torch" or "native"."""
    parts = {name: part.compile(executor, **choices) for name, part in detector.parts.items()}  # type: ignore[attr-defined]
    return Detector(parts, detector.settings)


def fastest(detector: Detector, threads: int) -> Detector:
    """Return the detector with each part run by the fastest executor that supports it on this machine."""
    parts = {name: quickest(part, threads)[0] for name, part in detector.parts.items()}  # type: ignore[arg-type]
    return Detector(parts, detector.settings)
