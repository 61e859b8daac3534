"""Draw the bundled detector's detections in a scene, in full precision and quantized: docs/figures/detections.jpg.

    python tools/draw_detections.py FILE

Write FILE with `adalog quantize demo:detector --bits w4a4 --out FILE`.
"""

import dataclasses
import sys
from pathlib import Path

import torch
from PIL import Image

from adalog.detection import demo, quantized
from adalog.detection.demo.scenes import scene
from adalog.detection.draw import draw

SCENE = demo.TESTED[8]
LARGER = 2  # pixels of the figure per pixel of the scene, along each side
TARGET = Path(__file__).parent.parent / "docs/figures/detections.jpg"


def main(file: Path) -> None:
    shown = scene(SCENE)
    height, width = (LARGER * side for side in shown.image.shape[:2])
    image = Image.fromarray(shown.image).resize((width, height), Image.Resampling.LANCZOS)
    both = Image.new("RGB", (2 * width, height))
    for index, detector in enumerate((demo.load_detector(), quantized.load(file))):
        found = detector(demo.prepare([shown]))[0]
        masks = found.masks.repeat_interleave(LARGER, dim=1).repeat_interleave(LARGER, dim=2)
        larger = dataclasses.replace(found, boxes=found.boxes * LARGER, masks=masks)
        both.paste(draw(image, larger, detector.settings.names), (index * width, 0))
    both.save(TARGET, quality=88)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
