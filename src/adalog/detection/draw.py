"""Draw detections into an image: masks, boxes, names and scores."""

import colorsys
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from adalog.detection.detector import Detections

_SHARE = 0.45  # opacity of masks


def draw(image: Image.Image, detections: Detections, names: Sequence[str], least: float = 0.3) -> Image.Image:
    """Return a copy of an RGB image with the detections of at least the score `least`, the highest on top.

    names: names of the classes. Each class has its own colour; lines and letters grow with the image.
    """
    pixels = np.asarray(image).astype(np.float32)
    indices = [index for index in range(len(detections)) if float(detections.scores[index]) >= least]
    colours = [colour_of(label) for label in detections.labels.tolist()]
    for index in reversed(indices):
        mask = detections.masks[index].cpu().numpy()
        pixels[mask] += _SHARE * (np.array(colours[index], np.float32) - pixels[mask])
    result = Image.fromarray(pixels.round().clip(0, 255).astype(np.uint8))
    canvas, line = ImageDraw.Draw(result), max(1, round(min(image.size) / 250))
    font = ImageFont.load_default(max(10, round(min(image.size) / 35)))
    labels: list[tuple[float, float, float, float]] = []
    for index in reversed(indices):
        canvas.rectangle(detections.boxes[index].tolist(), outline=colours[index], width=line)
    for index in indices:  # names come last, so that no box hides them; each moves down until it covers no other
        box, colour = detections.boxes[index].tolist(), colours[index]
        text = f"{names[int(detections.labels[index])]} {float(detections.scores[index]):.2f}"
        left, top, right, bottom = canvas.textbbox((0, 0), text, font=font)
        width, height = right - left + 2 * line + 2, bottom - top + 2 * line + 2
        x = min(max(box[0], 0), max(0, image.width - width))
        y = box[1] - height if box[1] >= height else box[1]
        y = min(max(y, 0), max(0, image.height - height))
        while y + height <= image.height and any(
            x < right and left < x + width and y < bottom and top < y + height for left, top, right, bottom in labels
        ):
            y += height
        labels.append((x, y, x + width, y + height))
        canvas.rectangle((x, y, x + width, y + height), fill=colour)
        light = 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2] > 140
        canvas.text((x + line + 1 - left, y + line + 1 - top), text, fill="black" if light else "white", font=font)
    return result


def colour_of(label: int) -> tuple[int, int, int]:
    """Return a colour for a class that differs strongly from those of neighbouring classes."""
    hue = label * 0.618033988749895 % 1.0  # steps of the golden ratio spread evenly over the hues
    red, green, blue = colorsys.hsv_to_rgb(hue, 0.75 if label % 2 else 0.95, 0.95 if label % 3 else 0.75)
    return round(red * 255), round(green * 255), round(blue * 255)
