"""Draw synthetic scenes with objects, to train, calibrate and evaluate the bundled detector.

A scene is a few shapes, which may overlap, on a background of waves, strokes and noise. It is computed only from its
number, by sums and comparisons of random numbers from NumPy, so that it is the same on every machine.
"""

from dataclasses import dataclass

import numpy as np

NAMES = ("disc", "square", "triangle", "flower", "ring", "cross")
SIZE = (192, 256)
LEAST_SEEN = 0.35  # the visible share that every shape must keep, or the next shape is not drawn
_LEAST_PIXELS = 60


@dataclass(frozen=True)
class Scene:
    """A synthetic image with its objects.

    image: (H, W, 3) of uint8. labels: (n,). masks: (n, H, W) of bool, the visible pixels of each object.
    """

    image: np.ndarray
    labels: np.ndarray
    masks: np.ndarray

    def boxes(self) -> np.ndarray:
        """Return the bounding boxes of the masks: (n, 4) as (x1, y1, x2, y2), in float32."""
        corners = np.zeros((len(self.masks), 4), np.float32)
        for box, mask in zip(corners, self.masks, strict=True):
            rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
            box[:] = columns[0], rows[0], columns[-1] + 1, rows[-1] + 1
        return corners


def scene(number: int, size: tuple[int, int] = SIZE) -> Scene:
    """Draw the scene with this number, with at most nine objects. size: (height, width) in pixels."""
    height, width = size
    draw = np.random.default_rng([number, height, width])
    y, x = np.mgrid[:height, :width].astype(np.float64) + 0.5
    image = _background(draw, x, y)
    masks: list[np.ndarray] = []
    labels: list[int] = []
    for _ in range(int(draw.integers(1, 10))):
        label = int(draw.integers(len(NAMES)))
        mask = _shape(draw, label, x, y)
        paint = _paint(draw, x, y)
        visible = [before & ~mask for before in masks]
        hidden = any(after.sum() < LEAST_SEEN * before.sum() for after, before in zip(visible, masks, strict=True))
        if mask.sum() < _LEAST_PIXELS or hidden or any(after.sum() < _LEAST_PIXELS for after in visible):
            continue
        image = np.where(mask[..., None], paint, image)
        masks, labels = [*visible, mask], [*labels, label]
    image = image + draw.normal(0, draw.uniform(2, 12), image.shape)
    stack = np.stack(masks) if masks else np.zeros((0, height, width), bool)
    return Scene(image.round().clip(0, 255).astype(np.uint8), np.array(labels, np.int64), stack)


def _shape(draw: np.random.Generator, label: int, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the mask of a shape with random position, size, proportions and rotation."""
    height, width = x.shape
    radius = np.exp(draw.uniform(np.log(9), np.log(min(height, width) * 0.28)))
    centre = draw.uniform(0, width), draw.uniform(0, height)
    turn, stretch = draw.uniform(0, 2 * np.pi), np.exp(draw.uniform(-0.25, 0.25))
    dx, dy = (x - centre[0]) / radius, (y - centre[1]) / radius
    u = (np.cos(turn) * dx + np.sin(turn) * dy) * stretch
    v = (np.cos(turn) * dy - np.sin(turn) * dx) / stretch
    far = np.hypot(u, v)
    name = NAMES[label]
    if name == "disc":
        return far <= 0.9
    if name == "square":
        return np.maximum(np.abs(u), np.abs(v)) <= 0.8
    if name == "triangle":
        return np.maximum(-v, np.abs(u) * np.sqrt(0.75) + v / 2) <= 0.55
    if name == "flower":
        return far <= 0.62 + 0.38 * np.cos(5 * np.arctan2(v, u))
    if name == "ring":
        return (far <= 1) & (far >= 0.55)
    short, long = np.minimum(np.abs(u), np.abs(v)), np.maximum(np.abs(u), np.abs(v))
    return (short <= 0.28) & (long <= 1)


def _paint(draw: np.random.Generator, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return a random paint: one colour, or stripes, checks or a gradient of two colours: (H, W, 3)."""
    first, second = draw.uniform(0, 255, (2, 3))
    turn, wave, phase = draw.uniform(0, np.pi), draw.uniform(4, 14), draw.uniform(0, 2 * np.pi)
    along = (np.cos(turn) * x + np.sin(turn) * y) * 2 * np.pi / wave + phase
    across = (np.cos(turn) * y - np.sin(turn) * x) * 2 * np.pi / wave
    kind = int(draw.integers(4))
    if kind == 0:
        share = np.zeros_like(x)
    elif kind == 1:
        share = 0.5 * (np.sin(along) > 0)
    elif kind == 2:
        share = 0.5 * (np.sin(along) * np.sin(across) > 0)
    else:
        share = 0.5 + 0.5 * np.sin(along / 6)
    return first + share[..., None] * (second - first)


def _background(draw: np.random.Generator, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return a random background: one colour with waves and strokes: (H, W, 3)."""
    image = np.broadcast_to(draw.uniform(40, 215, 3), (*x.shape, 3)).copy()
    for _ in range(4):
        turn, wave, phase = draw.uniform(0, np.pi), np.exp(draw.uniform(np.log(20), np.log(200))), draw.uniform(0, 7)
        wave_values = np.sin((np.cos(turn) * x + np.sin(turn) * y) * 2 * np.pi / wave + phase)
        image += wave_values[..., None] * draw.normal(0, 12, 3)
    for _ in range(int(draw.integers(4, 16))):
        turn, length = draw.uniform(0, np.pi), draw.uniform(8, 60)
        dx, dy = x - draw.uniform(0, x.shape[1]), y - draw.uniform(0, x.shape[0])
        along, across = np.cos(turn) * dx + np.sin(turn) * dy, np.cos(turn) * dy - np.sin(turn) * dx
        stroke = (np.abs(along) <= length / 2) & (np.abs(across) <= draw.uniform(0.5, 1.6))
        image = np.where(stroke[..., None], draw.uniform(0, 255, 3), image)
    return image
