"""What a detector computes between its parts, line by line, against slow versions written here."""

import itertools
import math

import numpy as np
import pytest
import torch

from adalog import DataError
from adalog.detection.boxes import anchors, decode_boxes, encode_boxes, levels, paste, regions, suppress

pytest.importorskip("torchvision")


def random_boxes(count, size=(60, 80), seed=0):
    generator = torch.Generator().manual_seed(seed)
    corners = torch.rand(count, 2, 2, generator=generator) * torch.tensor([size[1], size[0]])
    return torch.cat([corners.amin(1), corners.amax(1)], dim=1)


def test_anchors():
    """8 strides on a side, unrounded, centred at multiples of the stride; at a place 1:2, 1:1 and 2:1."""
    found = anchors(2, 3, 16, 8.0, (0.5, 1.0, 2.0), torch.device("cpu"))
    expected = []
    for y, x, ratio in itertools.product((0, 16), (0, 16, 32), (0.5, 1.0, 2.0)):
        width, height = 128 / math.sqrt(ratio), 128 * math.sqrt(ratio)
        expected.append((x - width / 2, y - height / 2, x + width / 2, y + height / 2))
    torch.testing.assert_close(found, torch.tensor(expected))


@pytest.mark.parametrize("stds", [(1.0,) * 4, (0.1, 0.1, 0.2, 0.2)])
def test_offsets(stds):
    """Times their stds, then dw and dh within +-ln(62.5), then within the image without padding."""
    boxes, offsets = random_boxes(40), torch.randn(40, 4, generator=torch.Generator().manual_seed(1)) * 30
    found = decode_boxes(boxes, offsets, stds, (50, 70))
    for box, (dx, dy, dw, dh), got in zip(boxes.tolist(), offsets.tolist(), found.tolist(), strict=True):
        width, height = box[2] - box[0], box[3] - box[1]
        x = (box[0] + box[2]) / 2 + dx * stds[0] * width
        y = (box[1] + box[3]) / 2 + dy * stds[1] * height
        width *= math.exp(max(-math.log(62.5), min(math.log(62.5), dw * stds[2])))
        height *= math.exp(max(-math.log(62.5), min(math.log(62.5), dh * stds[3])))
        sides = (x - width / 2, y - height / 2, x + width / 2, y + height / 2)
        limits = (70, 50, 70, 50)
        expected = [max(0, min(limit, side)) for side, limit in zip(sides, limits, strict=True)]
        assert got == pytest.approx(expected, abs=1e-3, rel=1e-4)


def test_encoded_is_the_inverse():
    boxes, targets = random_boxes(20), random_boxes(20, seed=2)
    found = decode_boxes(boxes, encode_boxes(boxes, targets, (0.1, 0.1, 0.2, 0.2)), (0.1, 0.1, 0.2, 0.2), (60, 80))
    torch.testing.assert_close(found, targets, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(
    ("side", "level"),
    [(10, 0), (55, 0), (56, 0), (111.9, 0), (112, 1), (223, 1), (224, 2), (448, 3), (5000, 3), (0, 0)],
)
def test_the_map_that_a_region_reads(side, level):
    """floor(log2(side / 56 + 1e-6)), from 0 to 3."""
    assert levels(torch.tensor([[3.0, 5.0, 3.0 + side, 5.0 + side]]), 4).tolist() == [level]


def slow_align(values, box, scale, side):
    """RoIAlign, aligned: the mean of as many bilinear samples a bin as it has pixels, rounded up: (C, side, side).

    A box without width or height has no samples, and gives zeros.
    """
    x1, y1, x2, y2 = (float(each) * scale - 0.5 for each in box)
    width, height = (x2 - x1) / side, (y2 - y1) / side
    across, down = (math.ceil((end - start) / side) for start, end in ((x1, x2), (y1, y2)))
    rows, columns = values.shape[1:]

    def at(y, x):
        if y < -1 or y > rows or x < -1 or x > columns:
            return np.zeros(len(values))
        y, x = max(y, 0), max(x, 0)
        top, left = min(int(y), rows - 1), min(int(x), columns - 1)
        if top >= rows - 1:
            y = float(rows - 1)
        if left >= columns - 1:
            x = float(columns - 1)
        bottom, right = min(top + 1, rows - 1), min(left + 1, columns - 1)
        fy, fx = y - top, x - left
        upper = values[:, top, left] * (1 - fx) + values[:, top, right] * fx
        lower = values[:, bottom, left] * (1 - fx) + values[:, bottom, right] * fx
        return upper * (1 - fy) + lower * fy

    found = np.zeros((len(values), side, side))
    for i, j in itertools.product(range(side), repeat=2):
        samples = [
            at(y1 + height * (i + (a + 0.5) / down), x1 + width * (j + (b + 0.5) / across))
            for a, b in itertools.product(range(down), range(across))
        ]
        found[:, i, j] = np.mean(samples, axis=0) if samples else 0
    return found


def test_regions_are_read_from_the_map_of_their_size():
    generator = torch.Generator().manual_seed(0)
    maps = [torch.randn(2, 3, 48 // 2**level, 64 // 2**level, generator=generator) for level in range(4)]
    boxes = torch.tensor(
        [[3.2, 4.7, 30.1, 25.0], [10.0, 0.0, 150.0, 130.0], [0.0, 0.0, 250.0, 190.0], [5.5, 5.5, 5.5, 9.0]]
    )
    images = torch.tensor([0, 1, 0, 1])
    found = regions(maps, (4, 8, 16, 32), boxes, images, 3)
    for index, (box, image) in enumerate(zip(boxes, images.tolist(), strict=True)):
        level = int(levels(box[None], 4))
        expected = slow_align(maps[level][image].double().numpy(), box.tolist(), 1 / (4 * 2**level), 3)
        np.testing.assert_allclose(found[index].numpy(), expected, atol=1e-4)


def test_suppression_is_by_group():
    """The best first; a box goes that overlaps a better one of its own group by more than the limit."""
    boxes, generator = random_boxes(60), torch.Generator().manual_seed(3)
    scores = torch.rand(60, generator=generator)
    groups = torch.randint(3, (60,), generator=generator)

    def overlap(a, b):
        width, height = (min(a[axis + 2], b[axis + 2]) - max(a[axis], b[axis]) for axis in (0, 1))
        both = max(width, 0) * max(height, 0)
        return both / (sum((box[2] - box[0]) * (box[3] - box[1]) for box in (a, b)) - both)

    kept = []
    for index in scores.argsort(descending=True).tolist():
        rivals = [other for other in kept if groups[other] == groups[index]]
        if all(overlap(boxes[index].tolist(), boxes[other].tolist()) <= 0.5 for other in rivals):
            kept.append(index)
    assert len(kept) < 60
    assert suppress(boxes, scores, groups, 0.5, 100).tolist() == kept
    assert suppress(boxes, scores, groups, 0.5, 7).tolist() == kept[:7]


def test_masks_are_pasted_at_boxes_that_are_not_rounded():
    generator = torch.Generator().manual_seed(0)
    masks = torch.rand(5, 7, 7, generator=generator)
    empty = [[5.0, 5.0, 5.0, 9.0], [50, 50, 60, 60]]
    boxes = torch.tensor([[3.3, 4.6, 20.2, 18.9], [-5.0, -3.0, 12.5, 9.0], [20.0, 10.0, 40.0, 33.0], *empty])
    found = paste(masks, boxes, (24, 30))
    assert found.shape == (5, 24, 30)
    for mask, (x1, y1, x2, y2), got in zip(masks.numpy(), boxes.tolist(), found, strict=True):
        expected = np.zeros((24, 30), bool)
        for row in range(24 if x2 > x1 else 0):
            for column in range(30):
                y, x = (row + 0.5 - y1) / (y2 - y1) * 7 - 0.5, (column + 0.5 - x1) / (x2 - x1) * 7 - 0.5
                near = [(i, j) for i in range(7) for j in range(7) if abs(y - i) < 1 and abs(x - j) < 1]
                total = sum(mask[i, j] * (1 - abs(y - i)) * (1 - abs(x - j)) for i, j in near)
                expected[row, column] = total >= 0.5
        assert (got.numpy() != expected).mean() < 0.005  # a sum may be .5 but for rounding
    assert not found[3:].any()


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (ModuleNotFoundError("no", name="torchvision"), "pip install 'adalog"),
        (RuntimeError("nms"), "cannot be imported: RuntimeError: nms; install it again: pip install"),
    ],
)
def test_without_torchvision(found, told, monkeypatch):
    def fails(name):
        raise found

    monkeypatch.setattr("importlib.import_module", fails)
    with pytest.raises(DataError, match=told):
        suppress(random_boxes(2), torch.ones(2), torch.zeros(2), 0.5, 1)
