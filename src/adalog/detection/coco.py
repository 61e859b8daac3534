"""Read COCO annotations, write detections as COCO results, and compute average precision."""

import contextlib
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, cast

import numpy as np
from PIL import Image
from torch import Tensor

from adalog.detection.detector import Detections
from adalog.detection.images import read
from adalog.errors import DataError
from adalog.extras import extra_module
from adalog.inputs.refusals import refusal, shorten
from adalog.stored import is_whole

# The classes of COCO 2017, in the order of the public detectors.
NAMES = tuple(resources.files("adalog.detection").joinpath("coco_names.txt").read_text("utf-8").splitlines())
# The first six of COCO's twelve figures, in COCO's order.
FIGURES = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")


@dataclass(frozen=True)
class AnnotatedImages:
    """Images of a folder with their annotations.

    ids: COCO's id of each image, in the order of `paths`. sizes: (height, width) of each image in the file. categories:
    COCO's id of each class by name. told: the content of the annotation file.
    """

    paths: tuple[Path, ...]
    ids: tuple[int, ...]
    sizes: tuple[tuple[int, int], ...]
    categories: Mapping[str, int]
    told: Mapping[str, Any]

    def __len__(self) -> int:
        return len(self.paths)

    def image(self, index: int) -> Image.Image:
        """Read an image as RGB. Raises DataError if it cannot be read, or does not have the size in the annotations."""
        path, (height, width) = self.paths[index], self.sizes[index]
        image = read(path)
        if image.size != (width, height):
            raise DataError(
                f"{path} has {image.width} x {image.height} pixels, but its annotations are for {width} x {height}: "
                "give the image that was annotated"
            )
        return image


def read_annotations(file: Path, folder: Path) -> AnnotatedImages:
    """Read an annotation file (instances_*.json) and find its images in a folder.

    Raises DataError for a file of another form, for images that are not in the folder, for boxes that are not four
    finite numbers or have a negative width or height, and for segmentations that are neither polygons nor a mask of the
    image's size. Boxes without area and crowds are kept, because pycocotools handles them.
    """
    with refusal(f"{file} cannot be read", "give an instances_*.json of COCO"):
        content = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or not all(
        isinstance(content.get(key), list) for key in ("images", "annotations", "categories")
    ):
        raise DataError(f"{file} lacks images, annotations or categories: give an instances_*.json of COCO")
    with refusal(f"{file} is not in the format of COCO", "correct it"):
        for key in ("images", "categories"):
            for entry in content[key]:
                if not is_whole(entry["id"], 0):
                    raise DataError(f"{file}, {key}: the id {entry['id']!r} is not a whole number; correct it")
        categories = {str(category["name"]): int(category["id"]) for category in content["categories"]}
        images = {int(image["id"]): str(image["file_name"]) for image in content["images"]}
        numbers = set(categories.values())
        if len(images) < len(content["images"]) or len(numbers) < len(content["categories"]):
            raise DataError(
                f"{file} has two images with the same id, or two categories with the same id or name: correct it"
            )
        sizes = {int(image["id"]): _size_of(file, image) for image in content["images"]}
        for annotation in content["annotations"]:
            _check_annotation(file, annotation, sizes, numbers)
        # pycocotools treats the id 0 as no annotation, and keeps only one annotation per id.
        content["annotations"] = [
            {**annotation, "id": number} for number, annotation in enumerate(content["annotations"], 1)
        ]
    missing = [name for name in images.values() if Path(name).is_absolute() or not (folder / name).is_file()]
    if missing:
        raise DataError(
            f"{file} lists images that {folder} does not have: {shorten(missing)}; add them, or remove their entries"
        )
    if not images:
        raise DataError(f"{file} lists no images: give a file with images")
    return AnnotatedImages(
        tuple(folder / name for name in images.values()), tuple(images), tuple(sizes.values()), categories, content
    )


def _size_of(file: Path, image: Mapping[str, Any]) -> tuple[int, int]:
    height, width = size = (image.get("height"), image.get("width"))
    if not (is_whole(height, 1) and is_whole(width, 1)):
        raise DataError(
            f"{file}, image {image['id']}: width {width}, height {height} are not positive whole numbers; correct them"
        )
    return cast(tuple[int, int], size)


def _check_annotation(
    file: Path, annotation: Mapping[str, Any], sizes: Mapping[int, tuple[int, int]], categories: set[int]
) -> None:
    """Raise DataError for an annotation on which pycocotools would fail. sizes: (height, width) of each image by id."""
    box, where = annotation["bbox"], f"{file}, annotation {annotation['id']}"
    if len(box) != 4 or not all(map(_is_number, box)) or min(box[2:]) < 0:
        raise DataError(f"{where}: the box {box} is not (x, y, width, height) in finite numbers; correct or remove it")
    if annotation["image_id"] not in sizes:
        raise DataError(f"{where}: image {annotation['image_id']} is not in the file; add it, or remove the annotation")
    if annotation["category_id"] not in categories:
        raise DataError(
            f"{where}: category {annotation['category_id']} is not in the file; add it, or remove the annotation"
        )
    if not _is_number(annotation.get("area")) or annotation["area"] < 0:
        raise DataError(f"{where}: the area {annotation.get('area')!r} is not a number of pixels; correct or remove it")
    if type(annotation.get("iscrowd")) not in (int, bool) or annotation["iscrowd"] not in (0, 1):
        raise DataError(f"{where}: iscrowd is {annotation.get('iscrowd')!r}; give 0 for one object, 1 for a crowd")
    outline, size = annotation.get("segmentation"), sizes[annotation["image_id"]]
    if not (_are_polygons(outline) if isinstance(outline, list) else _is_mask(outline, size)):
        raise DataError(
            f"{where}: its segmentation is neither polygons of three points or more nor a mask of {size[1]} x "
            f"{size[0]} pixels; correct or remove it"
        )


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _are_polygons(outline: Sequence[Any]) -> bool:
    """Return True for a list of at least one polygon, each a flat list of x and y of at least three points."""
    return bool(outline) and all(
        isinstance(polygon, list) and len(polygon) >= 6 and len(polygon) % 2 == 0 and all(map(_is_number, polygon))
        for polygon in outline
    )


def _is_mask(outline: Any, size: tuple[int, int]) -> bool:
    """Return True for a mask of (height, width) `size` in COCO's run lengths, as a list or as compressed text.

    In the text, each character from "0" on holds 5 bits of a run; all but the last of a run have the sixth bit set.
    """
    if not isinstance(outline, dict) or outline.get("size") != list(size):
        return False
    runs = outline.get("counts")
    if isinstance(runs, list):
        return all(is_whole(run, 0) for run in runs) and sum(runs) == math.prod(size)
    if not isinstance(runs, str) or not runs:
        return False
    pieces = [ord(letter) - ord("0") for letter in runs]
    return all(0 <= piece < 64 for piece in pieces) and pieces[-1] < 32


def results_of(detections: Iterable[Detections], ids: Sequence[int], categories: Sequence[int]) -> list[dict[str, Any]]:
    """Convert detections to COCO results, with boxes (x, y, width, height) and run-length encoded masks.

    ids: COCO's id of each image. categories: COCO's id of each label, or -1 to leave out its detections.
    """
    results = []
    for number, detection in zip(ids, detections, strict=True):
        columns = (detection.boxes.double(), detection.scores, detection.labels)
        rows = zip(*(column.tolist() for column in columns), detection.masks.cpu().numpy(), strict=True)
        results += [
            {
                "image_id": number,
                "category_id": categories[label],
                "bbox": [round(value, 3) for value in (x1, y1, x2 - x1, y2 - y1)],
                "score": round(score, 5),
                "segmentation": encoded_mask(mask),
            }
            for (x1, y1, x2, y2), score, label, mask in rows
            if categories[label] >= 0
        ]
    return results


def encoded_mask(mask: np.ndarray) -> dict[str, Any]:
    """Encode a mask (H, W) as COCO's compressed run lengths."""
    runs = extra_module("pycocotools.mask", "coco").encode(np.asfortranarray(mask, dtype=np.uint8))
    return {"size": [int(side) for side in runs["size"]], "counts": runs["counts"].decode("ascii")}


def categories_of(names: Sequence[str], annotated: AnnotatedImages) -> list[int]:
    """Return COCO's id of each class of a detector, or -1 if the annotation file does not have the class.

    Raises DataError if the file has categories that the detector does not know.
    """
    unknown = [name for name in annotated.categories if name not in names]
    if unknown:
        raise DataError(f"the detector does not know {shorten(unknown)}: give annotations of its {len(names)} classes")
    return [annotated.categories.get(name, -1) for name in names]


def average_precision(content: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Compute COCO's average precision of boxes and masks with pycocotools, from 0 to 1.

    Keys: `FIGURES` with box_ and with mask_ in front. A figure without annotated objects is NaN.
    """
    return {
        f"{word}_{name}": value
        for word, kind in (("box", "bbox"), ("mask", "segm"))
        for name, value in zip(FIGURES, _evaluate(content, results, kind), strict=True)
    }


def _evaluate(content: Mapping[str, Any], results: Sequence[Mapping[str, Any]], kind: str) -> list[float]:
    dataset, evaluation = extra_module("pycocotools.coco", "coco"), extra_module("pycocotools.cocoeval", "coco")

    def indexed(content: Mapping[str, Any]) -> Any:
        result = dataset.COCO()
        result.dataset = {"info": {}, **content}
        result.createIndex()
        return result

    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints its progress
        truth = indexed(content)
        detections = indexed({**content, "annotations": []})  # loadRes does not accept an empty list
        if results:
            detections = truth.loadRes([dict(result) for result in results])
        judged = evaluation.COCOeval(truth, detections, kind)
        judged.evaluate()
        judged.accumulate()
        judged.summarize()
    return [float(value) if value >= 0 else math.nan for value in judged.stats[: len(FIGURES)]]


def annotations_of(
    masks: Tensor | np.ndarray, boxes: np.ndarray, labels: Sequence[int], image: int, first: int
) -> list[dict[str, Any]]:
    """Return the objects of one image as COCO annotations with ids from `first`; categories are labels + 1."""
    objects = zip(map(np.asarray, masks), boxes.tolist(), labels, strict=True)
    return [
        {
            "id": number,
            "image_id": image,
            "category_id": int(label) + 1,
            "bbox": [x1, y1, x2 - x1, y2 - y1],
            "area": float(mask.sum()),
            "iscrowd": 0,
            "segmentation": encoded_mask(mask),
        }
        for number, (mask, (x1, y1, x2, y2), label) in enumerate(objects, first)
    ]
