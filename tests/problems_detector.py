"""A small detector with random weights, and pictures for it."""

import math
from dataclasses import replace

import numpy as np
import torch
from PIL import Image

from adalog.detection.detector import Detector, Settings
from adalog.detection.images import Resizing
from adalog.detection.network import Architecture, make_parts

SMALL = Architecture(width=8, depths=(1, 1, 2, 1), heads=(1, 2, 2, 4), window=4, channels=8, hidden=16, classes=3)
NAMES = ("one", "two", "three")
SETTINGS = Settings(NAMES, proposals=40, score=0.2, most=6, resizing=Resizing(short=64, long=96))


def make(stages=1, seed=0):
    """A small detector whose heads are sure of something."""
    torch.manual_seed(seed)
    parts = make_parts(replace(SMALL, stages=stages))
    for name, part in parts.items():
        part.eval()
        for layer, value in part.named_parameters():
            if value.ndim > 1 and name != "backbone":
                torch.nn.init.normal_(value, std=(0.2 if "offsets" in layer else 1.5) / math.sqrt(value[0].numel()))
    return Detector(parts, replace(SETTINGS, stages=stages))


def pictures(count=3, sizes=((40, 60), (64, 64), (90, 50))):
    draw = np.random.default_rng(0)
    shapes = [sizes[index % len(sizes)] for index in range(count)]
    return [Image.fromarray(draw.integers(0, 255, (*size, 3), dtype=np.uint8)) for size in shapes]
