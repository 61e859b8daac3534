"""Annotations, results and average precision in COCO's form; drawn scenes; drawn detections."""

import json
import math

import numpy as np
import pytest
import torch
from PIL import Image

from adalog import DataError
from adalog.detection import coco, demo
from adalog.detection.demo.scenes import LEAST_SEEN, NAMES, scene
from adalog.detection.detector import Detections
from adalog.detection.draw import colour_of, draw

coco_tools = pytest.importorskip("pycocotools.coco")


def found_in(each, scores=None):
    """What a detector that knows everything finds in a scene."""
    count = len(each.labels)
    return Detections(
        torch.from_numpy(each.boxes()),
        torch.linspace(0.9, 0.5, count) if scores is None else scores,
        torch.from_numpy(each.labels),
        torch.from_numpy(each.masks),
    )


@pytest.fixture(scope="module")
def scenes():
    return [(number, scene(number)) for number in range(12)]


@pytest.fixture(scope="module")
def told(scenes):
    return demo.truth(scenes)


LABELS = range(1, len(NAMES) + 1)


def results_of(scenes, find=found_in):
    numbers, drawn = zip(*scenes, strict=True)
    return coco.results_of(map(find, drawn), numbers, LABELS)


def test_the_truth_has_ap_1(scenes, told):
    figures = coco.average_precision(told, results_of(scenes))
    assert figures["box_ap"] == pytest.approx(1)
    assert figures["mask_ap"] == pytest.approx(1)
    assert set(figures) == {f"{kind}_{name}" for kind in ("box", "mask") for name in coco.FIGURES}


@pytest.mark.parametrize("number", [lambda index: index, lambda index: 1], ids=["from zero", "all one"])
def test_annotations_may_have_any_numbers(scenes, told, tmp_path, number):
    """pycocotools takes number 0 for no annotation, and keeps one of each number."""
    for image in told["images"]:
        (tmp_path / image["file_name"]).write_bytes(b"")
    annotations = [{**each, "id": number(index)} for index, each in enumerate(told["annotations"])]
    file = tmp_path / "told.json"
    file.write_text(json.dumps({**told, "annotations": annotations}))
    read = coco.read_annotations(file, tmp_path)
    assert coco.average_precision(read.told, results_of(scenes))["box_ap"] == pytest.approx(1)
    twice = [{**each, "id": 1} for each in told["categories"]]
    file.write_text(json.dumps({**told, "categories": twice}))
    with pytest.raises(DataError, match="two categories with the same id"):
        coco.read_annotations(file, tmp_path)


def random_detections(each):
    """Objects moved a little, some of another class, and some that are not there."""
    draw = torch.Generator().manual_seed(int(each.image.sum()))
    boxes = torch.from_numpy(each.boxes())
    boxes = boxes + torch.randn(boxes.shape, generator=draw) * 3
    boxes = torch.cat([boxes, torch.tensor([[5.0, 5.0, 50.0, 60.0]])])
    labels = torch.cat([torch.from_numpy(each.labels), torch.tensor([2])])
    labels[::3] = torch.randint(len(NAMES), labels[::3].shape, generator=draw)
    masks = torch.from_numpy(np.stack([np.roll(mask, 2, axis=1) for mask in each.masks]))
    masks = torch.cat([masks, torch.zeros(1, *masks.shape[1:], dtype=torch.bool)])
    masks[-1, 5:60, 5:50] = True
    return Detections(boxes, torch.rand(len(boxes), generator=draw), labels, masks)


def test_random_detections_agree_with_pycocotools_own_files(scenes, told, tmp_path):
    """Through its own loader of files, for boxes and for masks."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    results = results_of(scenes, random_detections)
    figures = coco.average_precision(told, results)
    (tmp_path / "truth.json").write_text(json.dumps({"info": {}, **told}))
    (tmp_path / "found.json").write_text(json.dumps(results))
    for word, kind in (("box", "bbox"), ("mask", "segm")):
        truth = COCO(str(tmp_path / "truth.json"))
        judged = COCOeval(truth, truth.loadRes(str(tmp_path / "found.json")), kind)
        judged.evaluate()
        judged.accumulate()
        judged.summarize()
        for name, value in zip(coco.FIGURES, judged.stats[:6], strict=True):
            expected = float(value) if value >= 0 else math.nan  # it has -1 where there are no such objects
            assert figures[f"{word}_{name}"] == pytest.approx(expected, nan_ok=True)
        assert 0.02 < figures[f"{word}_ap"] < 0.9


def slow_ap50(told, results):
    """AP at an overlap of one half: per class, detections by score, each taking the best free object of its image."""
    values = []
    for category in {each["category_id"] for each in told["annotations"]}:
        objects = [each for each in told["annotations"] if each["category_id"] == category]
        taken, hits = set(), []
        for row in sorted((r for r in results if r["category_id"] == category), key=lambda r: -r["score"]):
            best, which = 0.5, None
            for each in objects:
                if each["image_id"] == row["image_id"] and each["id"] not in taken:
                    a, b = row["bbox"], each["bbox"]
                    width = min(a[0] + a[2], b[0] + b[2]) - max(a[0], b[0])
                    height = min(a[1] + a[3], b[1] + b[3]) - max(a[1], b[1])
                    both = max(width, 0) * max(height, 0)
                    share = both / (a[2] * a[3] + b[2] * b[3] - both)
                    if share >= best:
                        best, which = share, each["id"]
            hits.append(which is not None)
            taken |= {which} - {None}
        right = np.cumsum(hits)
        precision, recall = right / np.arange(1, len(hits) + 1), right / len(objects)
        values.append(np.mean([max(precision[recall >= level - 1e-12], default=0) for level in np.linspace(0, 1, 101)]))
    return float(np.mean(values))


def test_ap50_of_boxes_from_its_definition(scenes, told):
    results = results_of(scenes, random_detections)
    assert coco.average_precision(told, results)["box_ap50"] == pytest.approx(slow_ap50(told, results), abs=0.01)


def test_nothing_found_and_nothing_to_find(told):
    figures = coco.average_precision(told, [])
    assert figures["box_ap"] == figures["mask_ap50"] == 0
    assert math.isnan(coco.average_precision({**told, "annotations": []}, [])["mask_ap"])
    # Of no size are there figures without an object of that size.
    small = {**told, "annotations": [each for each in told["annotations"] if each["area"] < 32**2]}
    assert small["annotations"]
    found = coco.average_precision(small, [])
    assert found["box_ap_small"] == 0
    assert math.isnan(found["box_ap_large"])


def test_boxes_without_area_and_crowds_change_nothing(scenes, told):
    """A crowd counts neither way; a box without area finds nothing."""
    results = results_of(scenes)
    crowd = {**told["annotations"][0], "id": 9999, "iscrowd": 1, "bbox": [0, 0, 256, 192], "area": 256.0 * 192}
    crowd["segmentation"] = coco.encoded_mask(np.ones((192, 256), bool))
    assert coco.average_precision({**told, "annotations": [*told["annotations"], crowd]}, results)["box_ap"] == 1
    extra = Detections(
        torch.tensor([[9.0, 9.0, 9.0, 20.0]]), torch.tensor([0.1]), torch.tensor([0]), torch.zeros(1, 192, 256).bool()
    )
    results += coco.results_of([extra], [scenes[0][0]], LABELS)
    assert coco.average_precision(told, results)["box_ap"] == pytest.approx(1)


def written(told, folder, change=lambda told: None):
    told = json.loads(json.dumps(told))
    change(told)
    (folder / "instances.json").write_text(json.dumps(told))
    for each in told["images"]:
        if each["file_name"] not in ("nowhere.png", "/nowhere/at/all.png"):
            Image.new("RGB", (256, 192)).save(folder / each["file_name"])
    return folder / "instances.json"


def test_annotations_are_read(told, tmp_path):
    found = coco.read_annotations(written(told, tmp_path), tmp_path)
    assert list(found.ids) == [image["id"] for image in told["images"]]
    assert len(found) == 12
    assert found.categories == {name: label + 1 for label, name in enumerate(NAMES)}
    assert coco.categories_of([*NAMES, "more"], found) == [*LABELS, -1]
    with pytest.raises(DataError, match="the detector does not know disc: give annotations of its 5 classes"):
        coco.categories_of(NAMES[1:], found)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda told: told["images"][0].update(file_name="nowhere.png"), "does not have: nowhere.png; add them"),
        (lambda told: told["images"][0].update(file_name="/nowhere/at/all.png"), "does not have: /nowhere/at/all.png"),
        (lambda told: told["annotations"][0].update(bbox=[1, 2, math.nan, 3]), r"the box \[1, 2, nan, 3\] is not"),
        (lambda told: told["annotations"][0].update(bbox=[1, 2, -3, 3]), r"the box \[1, 2, -3, 3\] is not"),
        (lambda told: told["annotations"][0].update(bbox=[1, 2, 3]), r"the box \[1, 2, 3\] is not"),
        (lambda told: told["annotations"][0].update(image_id=77), "image 77 is not in the file"),
        (lambda told: told["annotations"][0].update(category_id=77), "category 77 is not in the file"),
        (lambda told: told["annotations"][0].pop("bbox"), "is not in the format of COCO: 'bbox'"),
        (lambda told: told["annotations"][0].pop("area"), "annotation 1: the area None is not a number of pixels"),
        (lambda told: told["annotations"][0].update(area=-1), "annotation 1: the area -1 is not"),
        (lambda told: told["annotations"][0].pop("iscrowd"), "annotation 1: iscrowd is None; give 0"),
        (lambda told: told["annotations"][0].update(iscrowd=[]), r"annotation 1: iscrowd is \[\]; give 0"),
        (lambda told: told["images"][0].pop("height"), "image 0: width 256, height None are not positive"),
        (lambda told: told["images"][0].update(width=0), "image 0: width 0, height 192 are not positive"),
        (lambda told: told["images"].append(told["images"][0]), "two images with the same id"),
        (lambda told: told["images"][0].update(id="0"), "images: the id '0' is not a whole number; correct it"),
        (lambda told: told["categories"][0].update(id="1"), "categories: the id '1' is not a whole number; correct it"),
        (lambda told: told.pop("categories"), "lacks images, annotations or categories"),
        (lambda told: told.update(images=[], annotations=[]), "lists no images"),
    ],
)
def test_wrong_annotations_are_refused(told, change, words, tmp_path):
    with pytest.raises(DataError, match=words):
        coco.read_annotations(written(told, tmp_path, change), tmp_path)


SQUARE = [9.0, 9.0, 20.0, 9.0, 20.0, 20.0, 9.0, 20.0]
WRONG = [
    *(None, [], [[]], [SQUARE[:4]], [SQUARE[:7]], SQUARE, [[*SQUARE, 1.0, math.nan]], {}, "x"),
    *({"size": [256, 192], "counts": [256 * 192]}, {"size": [192, 256], "counts": [256 * 192, 1]}),
    *({"size": [192, 256], "counts": text} for text in ("", "P", "\x7f0", None)),
]


@pytest.mark.parametrize("outline", WRONG)
def test_wrong_outlines_are_refused(told, outline, tmp_path):
    file = written(told, tmp_path, lambda told: told["annotations"][0].update(segmentation=outline))
    with pytest.raises(DataError, match=r"annotation 1: its segmentation is neither .* nor a mask of 256 x 192 pixels"):
        coco.read_annotations(file, tmp_path)


@pytest.mark.parametrize("outline", [[SQUARE], [SQUARE, SQUARE], {"size": [192, 256], "counts": [9, 7, 49136]}])
def test_outlines_of_each_kind_are_judged(scenes, told, outline, tmp_path):
    def change(told):
        told["annotations"][0].update(segmentation=outline)

    found = coco.read_annotations(written(told, tmp_path, change), tmp_path)
    assert 0.5 < coco.average_precision(found.told, results_of(scenes))["mask_ap"] < 1


def test_an_image_of_another_size_than_annotated(told, tmp_path):
    """Masks of another size than the outlines' never overlap them, and mask AP would be 0 without a word."""
    found = coco.read_annotations(written(told, tmp_path), tmp_path)
    assert found.image(0).size == (256, 192)
    Image.new("RGB", (192, 256)).save(found.paths[1])
    with pytest.raises(DataError, match=r"1\.png has 192 x 256 pixels, but its annotations are for 256 x 192"):
        found.image(1)


def test_a_file_that_is_no_json(tmp_path):
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        coco.read_annotations(tmp_path / "x.json", tmp_path)


def test_the_public_classes():
    assert [coco.NAMES[number] for number in (0, 23, 79)] == ["person", "giraffe", "toothbrush"]
    assert len(coco.NAMES) == 80


@pytest.mark.parametrize("size", [(192, 256), (120, 90)])
def test_scenes_are_the_same_every_time(size):
    one, again, other = (scene(number, size).image for number in (5, 5, 6))
    assert one.shape == (*size, 3)
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)


def test_objects_of_scenes(scenes):
    labels = np.concatenate([each.labels for _, each in scenes])
    assert set(labels) == set(range(len(NAMES)))
    for _, each in scenes:
        assert each.masks.sum(0).max() <= 1  # each pixel is of one object
        for mask, (x1, y1, x2, y2) in zip(each.masks, each.boxes(), strict=True):
            rows, columns = np.nonzero(mask)
            assert (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1) == (x1, y1, x2, y2)
            assert mask.sum() >= 60
    assert LEAST_SEEN > 0


def test_detections_are_drawn(scenes):
    each = scenes[0][1]
    image = Image.fromarray(each.image)
    found = found_in(each)
    picture = np.asarray(draw(image, found, NAMES))
    assert picture.shape == each.image.shape
    assert np.array_equal(each.image, np.asarray(image))  # the given image stays
    inside = each.masks.any(0)
    changed = (picture != each.image).any(2)
    assert changed[inside].mean() > 0.9
    assert 0.01 < changed[~inside].mean() < 0.3  # boxes and names


def test_unsure_detections_are_not_drawn(scenes):
    each = scenes[0][1]
    found = found_in(each, torch.full((len(each.labels),), 0.29))
    assert np.array_equal(np.asarray(draw(Image.fromarray(each.image), found, NAMES)), each.image)


def test_neighbouring_classes_have_other_colours():
    colours = np.array([colour_of(label) for label in range(80)], float)
    assert np.abs(np.diff(colours, axis=0)).sum(1).min() > 150
    assert 0 <= colours.min() <= colours.max() <= 255
