"""A whole detector: images in, detections out; its parts' weights; quantized, saved, loaded and run in integers."""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from adalog import DataError
from adalog.detection.boxes import anchors, decode_boxes, paste
from adalog.detection.checkpoint import load_parts, public_names
from adalog.detection.detector import STDS, STRIDES, Detector, Settings
from adalog.detection.images import Resizing, read
from adalog.detection.network import ARCHITECTURES, RATIOS, make_parts, parameters
from problems_detector import NAMES, SETTINGS, make, pictures

pytest.importorskip("torchvision")


@pytest.mark.parametrize(
    ("given", "size"),
    [
        ((480, 640), (800, 1067)),
        ((640, 480), (1067, 800)),
        ((300, 900), (444, 1333)),
        ((427, 640), (800, 1199)),
        ((1, 1), (800, 800)),
    ],
)
def test_images_keep_their_proportions(given, size):
    """The shorter side 800, unless the longer one would pass 1333; each is int(side * scale + 0.5)."""
    assert Resizing().size_of(*given) == size


def test_a_batch_is_padded_behind_its_images():
    batch = Resizing(short=64, long=96).batch(pictures())
    assert batch.images.shape == (3, 3, 96, 96)
    assert batch.sizes == ((64, 96), (64, 64), (96, 53))
    assert batch.originals == ((40, 60), (64, 64), (90, 50))
    assert not batch.images[1, :, 64:].any()
    assert not batch.images[2, :, :, 53:].any()
    torch.testing.assert_close(batch.factors[2], torch.tensor([53 / 50, 96 / 90, 53 / 50, 96 / 90]))
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in (Resizing().mean, Resizing().std))
    pixels = torch.from_numpy(np.array(pictures()[1])).permute(2, 0, 1) / 255
    torch.testing.assert_close(batch.images[1, :, :64, :64], (pixels - mean) / std)  # as large as it was


def test_resizing_is_bilinear_in_eight_bits():
    """Against a slow version: half a pixel from corner to centre, nothing smoothed, rounded."""
    image = pictures()[0]
    found = Resizing(short=20, long=40, mean=(0, 0, 0), std=(1, 1, 1)).resize(image) * 255
    pixels = np.asarray(image).astype(float)
    assert found.shape == (3, 20, 30)
    for row, column in product(range(20), range(30)):
        y, x = (row + 0.5) * 2 - 0.5, (column + 0.5) * 2 - 0.5
        top, left = int(y), int(x)
        fy, fx = np.array([1 - y + top, y - top]), np.array([1 - x + left, x - left])
        value = np.einsum("i, j, ijc -> c", fy, fx, pixels[top : top + 2, left : left + 2])
        assert np.abs(found[:, row, column].numpy() - value).max() <= 0.5 + 1e-3


@pytest.mark.parametrize("mode", ["L", "I;16"])
def test_grey_images_are_read(mode, tmp_path):
    values = np.random.default_rng(0).integers(0, 255, (30, 40))
    values = values.astype(np.uint8) if mode == "L" else (values * 257).astype(np.uint16)
    Image.fromarray(values).save(tmp_path / "grey.png")
    assert read(tmp_path / "grey.png").mode == "RGB"


def test_an_image_too_thin_is_refused(tmp_path):
    Image.new("RGB", (2000, 2)).save(tmp_path / "thin.png")
    with pytest.raises(DataError, match="2000 x 2 pixels, too thin for a detector"):
        read(tmp_path / "thin.png")


@pytest.mark.parametrize(
    ("name", "millions"),
    [("mask-swin-t", 47.8), ("mask-swin-s", 69.1), ("cascade-swin-t", 85.6), ("cascade-swin-s", 106.9)],
)
def test_parameters(name, millions):
    with torch.device("meta"):
        found = parameters(list(make_parts(ARCHITECTURES[name]).values()))
    assert round(found / 1e6, 1) == millions


@torch.no_grad()
def test_the_pyramid():
    neck = make().parts["neck"]
    maps = [torch.randn(1, 8 << level, 24 >> level, 17 - 4 * level) for level in range(4)]
    found = neck(*maps)
    lateral = [layer(x) for layer, x in zip(neck.lateral, maps, strict=True)]
    for level in (2, 1, 0):
        _, _, height, width = lateral[level].shape
        above = lateral[level + 1]
        rows = [int(row * above.shape[2] / height) for row in range(height)]
        columns = [int(column * above.shape[3] / width) for column in range(width)]
        lateral[level] = lateral[level] + above[:, :, rows][:, :, :, columns]
    for level in range(4):
        torch.testing.assert_close(found[level], neck.smooth[level](lateral[level]))
    assert torch.equal(found[4], found[3][:, :, ::2, ::2])


def test_settings_of_the_public_detectors():
    assert STRIDES == (4, 8, 16, 32, 64)
    assert RATIOS == (0.5, 1.0, 2.0)
    assert STDS == ((0.1, 0.1, 0.2, 0.2), (0.05, 0.05, 0.1, 0.1), (0.033, 0.033, 0.067, 0.067))
    expected = {"names": NAMES, "stages": 1, "anchor_scale": 8.0, "proposals": 1000, "proposal_overlap": 0.7}
    expected |= {"score": 0.05, "overlap": 0.5, "most": 100, "mask": 0.5}
    found = Settings(NAMES).to_json()
    resizing = found.pop("resizing")
    assert found == expected
    assert [255 * value for value in resizing.pop("mean")] == pytest.approx([123.675, 116.28, 103.53])
    assert [255 * value for value in resizing.pop("std")] == pytest.approx([58.395, 57.12, 57.375])
    assert resizing == {"short": 800, "long": 1333, "divisor": 32}


@pytest.mark.parametrize(("stages", "part", "counts"), [(3, "box_1", [4, 4, 3]), (1, "box", [0, 0, 4])])
def test_heads_of_a_cascade(stages, part, counts):
    """Four convolutions with batch norms and one linear; of the others two linears."""
    layers = [type(layer).__name__ for layer in make(stages).parts[part].modules()]
    assert [layers.count(name) for name in ("Conv2d", "BatchNorm2d", "Linear")] == counts


def slow_proposals(found, size, settings):
    """Level by level: every anchor's score and box, the best of each level; then no two of a level that overlap."""
    kept = []
    for level in range(5):
        scores, offsets = found[level].sigmoid(), found[5 + level]
        _, height, width = scores.shape
        own = anchors(height, width, STRIDES[level], settings.anchor_scale, RATIOS, torch.device("cpu"))
        rows = []
        for anchor, (row, column, ratio) in zip(own, product(range(height), range(width), range(3)), strict=True):
            moved = decode_boxes(anchor, offsets[4 * ratio : 4 * ratio + 4, row, column], (1.0,) * 4, size)
            rows.append((float(scores[ratio, row, column]), level, moved.tolist()))
        kept += sorted(rows, key=lambda each: -each[0])[: settings.proposals]
    kept = [each for each in kept if each[2][2] > each[2][0] and each[2][3] > each[2][1]]
    return greedy(kept, settings.proposal_overlap)[: settings.proposals]


def greedy(rows, limit):
    """Rows of (score, group, box) by score, without those that overlap a better one of their group by more."""
    found = []
    for score, group, box in sorted(rows, key=lambda each: -each[0]):
        if all(overlap(box, other[2]) <= limit for other in found if other[1] == group):
            found.append((score, group, box))
    return found


def overlap(a, b):
    both = max(min(a[2], b[2]) - max(a[0], b[0]), 0) * max(min(a[3], b[3]) - max(a[1], b[1]), 0)
    return both / max(sum((box[2] - box[0]) * (box[3] - box[1]) for box in (a, b)) - both, 1e-12)


@torch.no_grad()
def test_proposals():
    detector, generator = make(), torch.Generator().manual_seed(0)
    sides = [(16, 24), (8, 12), (4, 6), (2, 3), (1, 2)]
    outputs = [torch.randn(3, *side, generator=generator) for side in sides]
    outputs += [torch.randn(12, *side, generator=generator) * 0.3 for side in sides]
    expected = slow_proposals(outputs, (60, 90), detector.settings)
    boxes = detector.proposals(outputs, (60, 90))
    assert len(expected) == 40
    torch.testing.assert_close(boxes, torch.tensor([each[2] for each in expected]), atol=1e-3, rtol=1e-4)


@torch.no_grad()
def test_scores_that_are_no_numbers_propose_nothing():
    detector = make()
    found = [torch.full((3, 4, 4), math.nan)] * 5 + [torch.zeros(12, 4, 4)] * 5
    assert len(detector.proposals(found, (60, 90))) == 0


@pytest.mark.parametrize("stages", [1, 3])
@torch.no_grad()
def test_boxes_of_regions(stages):
    """In a cascade each head moves the regions to where its likeliest class has them; logits are averaged."""
    detector, generator = make(stages), torch.Generator().manual_seed(0)
    maps = [torch.randn(1, 8, 16 >> level, 24 >> level, generator=generator) * 2 for level in range(5)]
    start = torch.rand(12, 2, generator=generator) * 40
    proposals = torch.cat([start, start + 4 + torch.rand(12, 2, generator=generator) * 30], dim=1)
    factors = torch.tensor([1.5, 2.0, 1.5, 2.0])
    boxes, scores, labels = detector.boxes(maps, proposals, (60, 90), factors)
    rows = []
    for region in proposals:
        box, total = region, torch.zeros(4)
        for stage in range(stages):
            head = detector.parts["box" if stages == 1 else f"box_{stage}"]
            logits, offsets = (value[0] for value in head(detector.read(maps, box[None], 7)))
            moved = [decode_boxes(box, offsets[4 * label : 4 * label + 4], STDS[stage], (60, 90)) for label in range(3)]
            total += logits
            if stage < stages - 1:
                box = moved[int(logits[:3].argmax())]
        likely = (total / stages).softmax(0)
        sure = [label for label in range(3) if likely[label] > detector.settings.score]
        rows += [(float(likely[label]), label, (moved[label] / factors).tolist()) for label in sure]
    expected = greedy(rows, 0.5)[: detector.settings.most]
    assert labels.tolist() == [each[1] for each in expected]
    assert scores.tolist() == pytest.approx([each[0] for each in expected], rel=1e-4)
    torch.testing.assert_close(boxes, torch.tensor([each[2] for each in expected]), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("stages", [1, 3])
@torch.no_grad()
def test_masks_are_the_mean_of_the_heads(stages):
    detector, generator = make(stages), torch.Generator().manual_seed(0)
    maps = [torch.randn(1, 8, 16 >> level, 24 >> level, generator=generator) for level in range(5)]
    boxes, labels, factors = torch.tensor([[2.0, 3.0, 20.0, 25.0]] * 3), torch.arange(3), torch.tensor([2.0] * 4)
    found = detector.masks(maps, boxes, labels, factors, (30, 45))
    heads = [part for name, part in detector.parts.items() if name.startswith("mask")]
    likely = sum(head(detector.read(maps, boxes[:1] * 2, 14)).sigmoid()[0] for head in heads) / stages
    assert torch.equal(found, paste(likely, boxes, (30, 45)))
    assert found.any()


def test_an_image_with_no_object():
    detector = Detector(make().parts, replace(SETTINGS, score=1.0))
    (found,) = detector(SETTINGS.resizing.batch(pictures(1)))
    assert len(found) == 0
    assert found.masks.shape == (0, 40, 60)


def test_images_of_a_batch_do_not_meet():
    detector, images = make(), pictures()
    for image, found in zip(images, detector(SETTINGS.resizing.batch(images)), strict=True):
        (alone,) = detector(SETTINGS.resizing.batch([image], (96, 96)))
        torch.testing.assert_close(alone.boxes, found.boxes, atol=1e-2, rtol=1e-3)
        assert found.boxes.amax() <= max(image.size)
        assert found.masks.shape[1:] == (image.height, image.width)


def test_parts_that_are_missing():
    parts = make().parts
    del parts["mask"]
    with pytest.raises(DataError, match="needs the parts backbone, neck, rpn, box, mask, got backbone, neck, rpn, box"):
        Detector(parts, SETTINGS)


def public_state(stages, seed=1):
    """A checkpoint with the names of the public detectors."""
    parts, state = make(stages, seed).parts, {}
    for part, name, public in public_names(parts):
        value = parts[part].state_dict()[name].clone()
        state[public] = value.reshape(16, 16) if name.endswith("relative_position_index") else value
    return state


PUBLIC = {
    "backbone.patch_embed.proj.weight",
    "backbone.layers.2.blocks.1.attn.relative_position_bias_table",
    "backbone.layers.0.downsample.reduction.weight",
    "backbone.norm3.bias",
    "neck.lateral_convs.0.conv.weight",
    "neck.fpn_convs.3.conv.bias",
    "rpn_head.rpn_conv.weight",
    "rpn_head.rpn_cls.bias",
    "rpn_head.rpn_reg.weight",
}


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
def test_a_public_checkpoint_loads_whole(stages, suffix, tmp_path):
    state, path = public_state(stages), tmp_path / f"weights.{suffix}"
    more = {"roi_head.bbox_head.shared_fcs.1.weight", "roi_head.mask_head.convs.3.conv.weight"}
    if stages == 3:
        more = {"roi_head.bbox_head.2.shared_convs.3.bn.running_var", "roi_head.mask_head.1.conv_logits.bias"}
        assert "roi_head.bbox_head.0.shared_fcs.1.weight" not in state
    assert set(state) >= PUBLIC | more
    if suffix == "pth":
        torch.save({"meta": {"CLASSES": NAMES}, "state_dict": state}, path)
    else:
        save_file(state, path)
    parts = make(stages).parts
    load_parts(parts, path, "mmdet:mask-swin-t")
    for part, name, public in public_names(parts):
        assert torch.equal(parts[part].state_dict()[name].flatten(), state[public].flatten())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.pop("neck.lateral_convs.1.conv.bias"), "missing neck.lateral_convs.1.conv.bias"),
        (lambda state: state.update({"rpn_head.more": torch.ones(1)}), "unexpected rpn_head.more"),
        (
            lambda state: state.update({"backbone.norm0.bias": torch.ones(5)}),
            r"wrong shape backbone.norm0.bias \[5\] instead of \[8\]",
        ),
        (
            lambda state: state["backbone.layers.0.blocks.0.attn.relative_position_index"].add_(1),
            "relative_position_index has another order",
        ),
    ],
)
def test_another_checkpoint_is_refused(change, words, tmp_path):
    state = public_state(1)
    change(state)
    save_file(state, tmp_path / "weights.safetensors")
    with pytest.raises(DataError, match=words):
        load_parts(make().parts, tmp_path / "weights.safetensors", "mmdet:mask-swin-t")


def test_reading_a_checkpoint_runs_no_code(tmp_path):
    class Hostile:
        def __reduce__(self):
            return (open, (str(tmp_path / "written"), "w"))

    torch.save({"state_dict": public_state(1), "meta": Hostile()}, tmp_path / "weights.pth")
    with pytest.raises(DataError, match="adalog does not load, because unpickling may run code"):
        load_parts(make().parts, tmp_path / "weights.pth", "mmdet:mask-swin-t")
    assert not (tmp_path / "written").exists()
