"""Load a detector by its name: mmdet:NAME, with a checkpoint as its weights, or demo:detector."""

from pathlib import Path

import torch

from adalog.detection import coco, demo
from adalog.detection.checkpoint import load_parts
from adalog.detection.detector import Detector, Settings
from adalog.detection.network import ARCHITECTURES, initialise, make_parts
from adalog.errors import DataError

KINDS = f"mmdet:NAME (NAME is one of {', '.join(ARCHITECTURES)}) or demo:detector"
DEMO = "demo:detector"


def names_detector(text: str) -> bool:
    """Return True if a name is that of a detector."""
    return text == DEMO or text.startswith("mmdet:")


def load_detector(spec: str, *, pretrained: bool = True, checkpoint: Path | None = None, seed: int = 0) -> Detector:
    """Load the detector that `spec` names, in float32 and evaluation mode.

    checkpoint: a checkpoint of the public Swin detectors, the only weights for mmdet:NAME. pretrained: False for random
    weights from `seed`, without changing the state of torch's global generator. Raises DataError.
    """
    if spec == DEMO:
        if checkpoint is not None or not pretrained:
            raise DataError(f"{DEMO} has its own weights: leave out --checkpoint and --no-pretrained")
        return demo.load_detector()
    name = spec.partition(":")[2]
    if name not in ARCHITECTURES:
        raise DataError(f"unknown detector {spec!r}: give {KINDS}")
    if pretrained and checkpoint is None:
        raise DataError(f"{spec} has no weights: give --checkpoint FILE, or --no-pretrained for random weights")
    sizes = ARCHITECTURES[name]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        parts = initialise(make_parts(sizes))
    if checkpoint is not None:
        load_parts(parts, checkpoint, spec)
    for part in parts.values():
        part.eval()
    return Detector(parts, Settings(coco.NAMES, stages=sizes.stages))
