"""Compute boxes and masks as mmdetection 2 does: anchors, offsets, levels, suppression and pasted masks.

A box is (x1, y1, x2, y2) in pixels of an image whose corner is (0, 0); pixel (i, j) covers [j, j + 1) x [i, i + 1).
All functions compute in the type and on the device of their arguments.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import grid_sample

from adalog.extras import extra_module

MAX_LOG_RATIO = math.log(1000 / 16)  # the largest dw and dh (mmdetection's wh_ratio_clip)
FINEST_SIDE = 56  # regions read the finest map below twice this side, the next one for each doubling (FPN)


def anchors(
    height: int, width: int, stride: int, scale: float, ratios: Sequence[float], device: torch.device
) -> Tensor:
    """Return the anchors of a map: (height * width * ratios, 4), ordered by row, column and ratio (height / width).

    The anchors are centred at multiples of the stride, have the area (scale * stride)^2, and are not rounded.
    """
    tall = torch.tensor(ratios, device=device).sqrt()
    half = scale * stride / 2 * torch.stack([-1 / tall, -tall, 1 / tall, tall], dim=1)
    x, y = (torch.arange(count, device=device) * float(stride) for count in (width, height))
    places = torch.stack([x.expand(height, -1), y[:, None].expand(-1, width)], dim=2).repeat(1, 1, 2)
    return (places[:, :, None] + half).reshape(-1, 4)


def decode_boxes(boxes: Tensor, offsets: Tensor, stds: Sequence[float], size: tuple[float, float]) -> Tensor:
    """Apply offsets (dx, dy, dw, dh) to boxes, and clip the results to the image: (..., 4).

    boxes, offsets: (..., 4), broadcast with each other. stds: factors to multiply the offsets by, before dw and dh are
    clamped to +-ln(62.5). size: (height, width) of the image without padding.
    """
    dx, dy, dw, dh = (offsets * offsets.new_tensor(stds)).unbind(-1)
    dw, dh = (value.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO) for value in (dw, dh))
    x1, y1, x2, y2 = boxes.unbind(-1)
    x, y = (x1 + x2) / 2 + (x2 - x1) * dx, (y1 + y2) / 2 + (y2 - y1) * dy
    half_width, half_height = (x2 - x1) * dw.exp() / 2, (y2 - y1) * dh.exp() / 2
    height, width = size
    sides = [(x - half_width, width), (y - half_height, height), (x + half_width, width), (y + half_height, height)]
    return torch.stack([value.clamp(0, limit) for value, limit in sides], dim=-1)


def encode_boxes(boxes: Tensor, targets: Tensor, stds: Sequence[float]) -> Tensor:
    """Return the offsets from which `decode_boxes` computes the targets: (..., 4)."""

    def parts(value: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x1, y1, x2, y2 = value.unbind(-1)
        return (x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1

    (x, y, width, height), (to_x, to_y, to_width, to_height) = parts(boxes), parts(targets)
    offsets = [(to_x - x) / width, (to_y - y) / height, (to_width / width).log(), (to_height / height).log()]
    return torch.stack(offsets, dim=-1) / boxes.new_tensor(stds)


def levels(boxes: Tensor, count: int) -> Tensor:
    """Return the index of the map that each box reads, 0 for the finest: (boxes,)."""
    width, height = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    return torch.log2((width * height).sqrt() / FINEST_SIDE + 1e-6).floor().clamp(0, count - 1).long()


def regions(maps: Sequence[Tensor], strides: Sequence[int], boxes: Tensor, images: Tensor, side: int) -> Tensor:
    """Pool the region of each box from the map for its size, by RoIAlign: (boxes, C, side, side).

    maps: (N, C, H, W) each, the finest first. images: (boxes,), the index of the image of each box.
    """
    roi_align = extra_module("torchvision.ops", "coco").roi_align
    result = boxes.new_zeros(len(boxes), maps[0].shape[1], side, side)
    which = levels(boxes, len(maps))
    for level, (values, stride) in enumerate(zip(maps, strides, strict=False)):
        of_level = (which == level).nonzero()[:, 0]
        rows = torch.cat([images[of_level, None].to(boxes.dtype), boxes[of_level]], dim=1)
        result[of_level] = roi_align(values, rows, side, spatial_scale=1 / stride, sampling_ratio=0, aligned=True)
    return result


def suppress(boxes: Tensor, scores: Tensor, groups: Tensor, overlap: float, most: int) -> Tensor:
    """Return the indices of at most `most` boxes after non-maximum suppression within each group, the best first."""
    kept: Tensor = extra_module("torchvision.ops", "coco").batched_nms(boxes, scores, groups, overlap)
    return kept[:most]


def paste(masks: Tensor, boxes: Tensor, size: tuple[int, int], threshold: float = 0.5) -> Tensor:
    """Paste masks of boxes into masks of the whole image: (masks, height, width) of bool.

    masks: (masks, side, side) of probabilities, sampled bilinearly at the pixel centres; they are 0 outside their box.
    boxes: (masks, 4), not rounded; a box without area has an empty mask. size: (height, width).
    """
    height, width = size
    result = torch.zeros(len(masks), height, width, dtype=torch.bool, device=masks.device)
    for index, (mask, (x1, y1, x2, y2)) in enumerate(zip(masks, boxes.tolist(), strict=True)):
        if not (x2 > x1 and y2 > y1):
            continue
        # Sampled only as far as the box reaches.
        left, top = max(math.floor(x1) - 1, 0), max(math.floor(y1) - 1, 0)
        right, bottom = min(math.ceil(x2) + 1, width), min(math.ceil(y2) + 1, height)
        if right <= left or bottom <= top:
            continue
        x = (torch.arange(left, right, device=mask.device, dtype=mask.dtype) + 0.5 - x1) / (x2 - x1) * 2 - 1
        y = (torch.arange(top, bottom, device=mask.device, dtype=mask.dtype) + 0.5 - y1) / (y2 - y1) * 2 - 1
        grid = torch.stack([x.expand(len(y), -1), y[:, None].expand(-1, len(x))], dim=2)
        sampled = grid_sample(mask[None, None], grid[None], align_corners=False)[0, 0]
        result[index, top:bottom, left:right] = sampled >= threshold
    return result
