"""A detector: its parts, and the steps between them, computed as mmdetection 2 does at test time."""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from adalog.detection.boxes import anchors, decode_boxes, paste, regions, suppress
from adalog.detection.images import Batch, Resizing
from adalog.detection.network import BOX_SIDE, LEVELS, MASK_SIDE, RATIOS, head_names
from adalog.errors import DataError

# The values of `--parts`, in order. The heads of a cascade are box_0, box_1, box_2 and mask_0, mask_1, mask_2.
KINDS = ("backbone", "neck", "rpn", "box", "mask")
HEADS = KINDS[3:]
STRIDES = (4, 8, 16, 32, 64)  # strides of the pyramid's maps, in pixels
STDS = ((0.1, 0.1, 0.2, 0.2), (0.05, 0.05, 0.1, 0.1), (0.033, 0.033, 0.067, 0.067))  # of the offsets, per stage
Part = Callable[..., Any]


@dataclass(frozen=True)
class Settings:
    """Settings of a detector.

    names: names of the classes. stages: number of box heads in sequence. anchor_scale: side of an anchor in strides.
    proposals: largest number of regions per level, and in total. proposal_overlap, overlap: IoU above which a region or
    a detection is suppressed by a better one. score: lowest score of a detection. most: largest number of detections
    per image. mask: lowest probability of a mask's pixels. resizing: preparation of the images.
    """

    names: tuple[str, ...]
    stages: int = 1
    anchor_scale: float = 8.0
    proposals: int = 1000
    proposal_overlap: float = 0.7
    score: float = 0.05
    overlap: float = 0.5
    most: int = 100
    mask: float = 0.5
    resizing: Resizing = field(default_factory=Resizing)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(fields: Any) -> "Settings":
        """Return the settings that `to_json` described. Raises ValueError for other fields or values."""
        known = {entry.name: entry for entry in dataclasses.fields(Settings)}
        if not isinstance(fields, dict) or fields.keys() != known.keys():
            raise ValueError(f"the settings of a detector must be {', '.join(known)}")
        values = dict(fields)
        names, resizing = values.pop("names"), values.pop("resizing")
        if not isinstance(names, (list, tuple)) or not names or not all(isinstance(name, str) for name in names):
            raise ValueError("the names of a detector's classes are not a list of texts")
        for name, value in values.items():
            whole = isinstance(known[name].default, int)
            good = type(value) is int if whole else type(value) in (int, float) and math.isfinite(value)
            if not good or not 0 <= value <= (100_000 if whole else 1000) or (name == "stages" and value not in (1, 3)):
                raise ValueError(f"{name} = {value!r} is not a valid setting of a detector")
        return Settings(tuple(names), **values, resizing=Resizing.from_json(resizing))


@dataclass(frozen=True)
class Detections:
    """Objects found in one image, sorted by descending score, in pixels of the original image.

    boxes: (n, 4) as (x1, y1, x2, y2). scores: (n,). labels: (n,), indices of classes. masks: (n, height, width).
    """

    boxes: Tensor
    scores: Tensor
    labels: Tensor
    masks: Tensor

    def __len__(self) -> int:
        return len(self.boxes)


def kind_of(part: str) -> str:
    """Return the kind of a part by its name."""
    return part.partition("_")[0]


def check_names(parts: Collection[str], settings: Settings) -> None:
    """Raise DataError unless these are the names of a detector's parts, in order."""
    names = [*KINDS[:3], *(name for kind in HEADS for name in head_names(kind, settings.stages))]
    if list(parts) != names:
        raise DataError(
            f"a detector with {settings.stages} stages needs the parts {', '.join(names)}, got {', '.join(parts)}"
        )


class Detector:
    """A detector made of parts, which may be float modules, quantized models, or compiled models."""

    def __init__(self, parts: Mapping[str, Part], settings: Settings):
        """Take the parts by name, as `network.make_parts` returns them. Raises DataError for other names or order."""
        check_names(parts, settings)
        self.parts, self.settings = dict(parts), settings

    def heads(self, kind: str) -> list[Part]:
        """Return the box or mask heads in order."""
        return [part for name, part in self.parts.items() if kind_of(name) == kind]

    @torch.no_grad()
    def __call__(self, batch: Batch) -> list[Detections]:
        """Detect the objects in each image of a batch."""
        maps = self.parts["neck"](*self.parts["backbone"](batch.images))
        outputs = self.parts["rpn"](*maps)
        results = []
        for index, size in enumerate(batch.sizes):
            maps_of_image = [value[index : index + 1] for value in maps]
            proposals = self.proposals([value[index] for value in outputs], size)
            boxes, scores, labels = self.boxes(maps_of_image, proposals, size, batch.factors[index])
            masks = self.masks(maps_of_image, boxes, labels, batch.factors[index], batch.originals[index])
            results.append(Detections(boxes, scores, labels, masks))
        return results

    def proposals(self, outputs: Sequence[Tensor], size: tuple[int, int]) -> Tensor:
        """Return the regions of one image that may contain objects, the most likely first: (n, 4).

        outputs: those of the part "rpn" without the image axis. size: (height, width) without padding.
        """
        settings, parts = self.settings, []
        for level, (logits, offsets) in enumerate(zip(outputs[:LEVELS], outputs[LEVELS:], strict=True)):
            likely = in_order_of_anchors(logits, 1)[:, 0].sigmoid().nan_to_num(-1)
            order = likely.argsort(descending=True, stable=True)[: settings.proposals]
            height, width = logits.shape[1:]
            own = anchors(height, width, STRIDES[level], settings.anchor_scale, RATIOS, logits.device)
            boxes = decode_boxes(own[order], in_order_of_anchors(offsets, 4)[order], (1.0,) * 4, size)
            valid = (_area(boxes) > 0) & (likely[order] >= 0)
            parts.append((boxes[valid], likely[order][valid], torch.full_like(order, level)[valid]))
        candidates, likely, levels = map(torch.cat, zip(*parts, strict=True))
        return candidates[suppress(candidates, likely, levels, settings.proposal_overlap, settings.proposals)]

    def boxes(
        self, maps: Sequence[Tensor], proposals: Tensor, size: tuple[int, int], factors: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (boxes, scores, labels) of the objects in the regions of one image.

        maps: (1, C, H, W) each. factors: (4,), the sides of a box in the resized image over those in the original one.
        """
        settings, heads = self.settings, self.heads("box")
        if not len(proposals):
            return proposals.new_zeros(0, 4), proposals.new_zeros(0), proposals.new_zeros(0, dtype=torch.long)
        total, rois = torch.zeros((), device=proposals.device), proposals
        for stage, (head, stds) in enumerate(zip(heads, STDS, strict=False)):
            logits, offsets = head(self.read(maps, rois, BOX_SIDE))
            candidates = decode_boxes(rois[:, None], offsets.unflatten(1, (-1, 4)), stds, size)  # (R, classes, 4)
            total = total + logits
            if stage < len(heads) - 1:
                rois = candidates[torch.arange(len(candidates)), logits[:, :-1].argmax(1)]
        scores = (total / len(heads)).softmax(1)[:, :-1]
        candidates = candidates / factors
        rows, labels = ((scores > settings.score) & (_area(candidates) >= 0)).nonzero(as_tuple=True)
        best, sure = candidates[rows, labels], scores[rows, labels]
        survivors = suppress(best, sure, labels, settings.overlap, settings.most)
        return best[survivors], sure[survivors], labels[survivors]

    def masks(
        self, maps: Sequence[Tensor], boxes: Tensor, labels: Tensor, factors: Tensor, original: tuple[int, int]
    ) -> Tensor:
        """Return the masks of one image's boxes: (n, height, width) of bool. original: (height, width) of the image."""
        if not len(boxes):
            return torch.zeros(0, *original, dtype=torch.bool, device=boxes.device)
        features, heads = self.read(maps, boxes * factors, MASK_SIDE), self.heads("mask")
        likely = torch.stack([head(features).sigmoid() for head in heads]).mean(0)
        return paste(likely[torch.arange(len(likely)), labels], boxes, original, self.settings.mask)

    def read(self, maps: Sequence[Tensor], boxes: Tensor, side: int) -> Tensor:
        """Pool the regions of one image's boxes from its maps."""
        images = torch.zeros(len(boxes), dtype=torch.long, device=boxes.device)
        return regions(maps[: LEVELS - 1], STRIDES, boxes, images, side)

    def over(self, batches: Iterable[Batch]) -> Iterator[Detections]:
        """Yield the detections of each image of several batches."""
        for batch in batches:
            yield from self(batch)


def in_order_of_anchors(values: Tensor, values_per_box: int) -> Tensor:
    """Rearrange (A * each, H, W) to (H * W * A, each), the order of the anchors."""
    return values.permute(1, 2, 0).reshape(-1, values_per_box)


def _area(boxes: Tensor) -> Tensor:
    """Return the areas of boxes; 0 for a box with a negative side, NaN for a box with NaN."""
    width, height = (boxes[..., 2] - boxes[..., 0]).clamp(min=0), (boxes[..., 3] - boxes[..., 1]).clamp(min=0)
    return width * height
