"""The bundled detector: a small Swin Mask R-CNN, trained on synthetic scenes by tools/train_demo_detector.py."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import resources
from itertools import islice
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load as parse_safetensors

from adalog.detection.coco import annotations_of, results_of
from adalog.detection.demo.scenes import NAMES, SIZE, Scene, scene
from adalog.detection.detector import Detections, Detector, Settings
from adalog.detection.images import Batch, Resizing
from adalog.detection.network import Architecture, make_parts
from adalog.errors import DataError
from adalog.inputs.images import draw_indices

ARCHITECTURE = Architecture(
    width=24, depths=(2, 2, 2, 2), heads=(1, 2, 4, 8), window=4, channels=48, hidden=128, classes=len(NAMES)
)
# Few regions are enough, since a scene has at most nine objects.
SETTINGS = Settings(NAMES, anchor_scale=6.0, proposals=200, most=50, resizing=Resizing(short=SIZE[0], long=SIZE[1]))
# Numbers of the scenes to evaluate, to calibrate, and, from the last value on, to train.
TESTED, CALIBRATING, TRAINED = range(300), range(1000, 2024), 1_000_000


def load_detector() -> Detector:
    """Load the trained detector in float32 and evaluation mode, without changing torch's global generator."""
    stored = parse_safetensors(resources.files(__name__).joinpath("detector.safetensors").read_bytes())
    with torch.random.fork_rng(devices=[]):
        parts = make_parts(ARCHITECTURE)
    for name, part in parts.items():
        own = {key.partition("/")[2]: value for key, value in stored.items() if key.partition("/")[0] == name}
        part.load_state_dict(own)  # which makes float32 of float16
        part.eval()
    return Detector(parts, SETTINGS)


def draw(count: int, seed: int) -> list[int]:
    """Return the numbers of `count` calibration scenes, selected by the seed. Raises DataError if there are fewer."""
    if count > (most := len(CALIBRATING)):
        raise DataError(
            f"the bundled detector has {most} calibration images, but {count} are needed: ask for at most {most}"
        )
    return [CALIBRATING[index] for index in draw_indices(len(CALIBRATING), count, seed).tolist()]


def batches(numbers: Iterable[int], size: int = 10) -> Iterator[tuple[list[Scene], Batch]]:
    """Yield scenes with these numbers, `size` at a time, with the same images as a batch."""
    scenes = map(scene, numbers)
    while pending := list(islice(scenes, size)):
        yield pending, prepare(pending)


def truth(scenes: Iterable[tuple[int, Scene]]) -> dict[str, Any]:
    """Return the COCO annotations of scenes, given as (number, scene); the category of label k is k + 1."""
    images, annotations = [], list[dict[str, Any]]()
    for number, drawing in scenes:
        height, width = drawing.image.shape[:2]
        images.append({"id": number, "height": height, "width": width, "file_name": f"{number}.png"})
        first = len(annotations) + 1
        annotations += annotations_of(drawing.masks, drawing.boxes(), drawing.labels.tolist(), number, first)
    categories = [{"id": label + 1, "name": name} for label, name in enumerate(NAMES)]
    return {"images": images, "annotations": annotations, "categories": categories}


def detect(
    runs: Detector, scenes: Sequence[Scene], numbers: Sequence[int], progress: Callable[[int], None] | None = None
) -> list[dict[str, Any]]:
    """Run a detector on scenes with these numbers; return its detections as COCO results.

    progress: called after every few scenes with their count.
    """

    def detections() -> Iterator[Detections]:
        for start in range(0, len(scenes), 10):
            chunk = scenes[start : start + 10]
            yield from runs(prepare(chunk))
            if progress is not None:
                progress(len(chunk))

    return results_of(detections(), numbers, range(1, len(NAMES) + 1))


def prepare(scenes: Sequence[Scene]) -> Batch:
    """Prepare scenes as a batch of images."""
    return SETTINGS.resizing.batch([Image.fromarray(drawing.image) for drawing in scenes])
