"""Train the bundled detector on synthetic scenes, and write the files that the package ships.

    python tools/train_demo_detector.py --work DIR [--steps 12000] [--threads 1]

The scenes come from adalog.detection.demo.scenes; training also rotates and mirrors them and permutes their colours.
The losses follow Mask R-CNN in mmdetection 2. The script averages the weights over steps. If you start it again,
it resumes from DIR. At the end it writes detector.safetensors to src/adalog/detection/demo, and the settings and the
log to benchmarks/results/demo_detector_training.json.
"""

import json
import math
import os
import platform
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.ops import box_iou, roi_align

from adalog.detection import demo
from adalog.detection.boxes import anchors, encode_boxes, regions
from adalog.detection.demo.scenes import SIZE, scene
from adalog.detection.detector import STDS, STRIDES, Detector, in_order_of_anchors
from adalog.detection.network import BOX_SIDE, LEVELS, MASK_SIDE, RATIOS, initialise, make_parts, parameters
from adalog.files import write_whole

ROOT = Path(__file__).resolve().parents[1]
BATCH = 8
SCENES = 6000  # number of scenes that are drawn once; training varies them by rotation, mirroring and colours
RATE, DECAY, WARM_UP, AVERAGE = 2e-3, 0.05, 300, 0.998
ANCHORS, REGIONS, MASKS = 128, 64, 10  # samples per image; at most MASKS of the regions have masks
PROPOSALS = 100


class Objects:
    """The objects in one image: boxes (n, 4), labels (n,), masks (n, H, W)."""

    def __init__(self, masks: np.ndarray, labels: np.ndarray):
        self.masks, self.labels = torch.from_numpy(np.ascontiguousarray(masks)), torch.from_numpy(labels)
        rows, columns = self.masks.any(2), self.masks.any(1)
        height, width = self.masks.shape[1:]
        y, x = torch.arange(height), torch.arange(width)

        def ends(places: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
            return (
                torch.where(seen, places, len(places)).amin(1).float(),
                torch.where(seen, places, -1).amax(1).float() + 1,
            )

        (top, bottom), (left, right) = ends(y, rows), ends(x, columns)
        self.boxes = torch.stack([left, top, right, bottom], dim=1)


class Scenes:
    """Synthetic scenes in memory, from which training takes random batches."""

    def __init__(self, work: Path):
        file = work / "scenes.npz"
        if not file.exists():
            drawn = [scene(demo.TRAINED + number) for number in range(SCENES)]
            drawn = [each for each in drawn if len(each.labels)]
            np.savez(
                file,
                images=np.stack([each.image for each in drawn]),
                masks=np.packbits(np.concatenate([each.masks for each in drawn]), axis=2),
                labels=np.concatenate([each.labels for each in drawn]),
                counts=np.array([len(each.labels) for each in drawn]),
            )
        stored = np.load(file)
        self.images, self.masks, self.labels = stored["images"], stored["masks"], stored["labels"]
        self.ends = np.concatenate([[0], stored["counts"].cumsum()])

    def batch(self, step: int) -> tuple[Tensor, list[Objects]]:
        """Return the batch of a step: images (B, 3, H, W) and their targets."""
        draw = np.random.default_rng([7, step])
        upright = draw.random() < 0.3
        images, objects = [], []
        for index in draw.integers(0, len(self.images), BATCH):
            image = self.images[index][..., draw.permutation(3)]
            masks = np.unpackbits(self.masks[self.ends[index] : self.ends[index + 1]], axis=2).astype(bool)
            if upright:
                image, masks = image.transpose(1, 0, 2), masks.transpose(0, 2, 1)
            if draw.random() < 0.5:
                image, masks = image[:, ::-1], masks[:, :, ::-1]
            if draw.random() < 0.5:
                image, masks = image[::-1], masks[:, ::-1]
            images.append(torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1))
            objects.append(Objects(masks, self.labels[self.ends[index] : self.ends[index + 1]]))
        resizing = demo.SETTINGS.resizing
        mean, std = (torch.tensor(each).view(3, 1, 1) for each in (resizing.mean, resizing.std))
        return (torch.stack(images).float() / 255 - mean) / std, objects


def sampled(positive: Tensor, negative: Tensor, count: int, share: float) -> tuple[Tensor, Tensor]:
    """Sample `count` indices: positives up to this share of them, and negatives for the rest."""
    chosen = positive[torch.randperm(len(positive))[: int(count * share)]]
    return chosen, negative[torch.randperm(len(negative))[: count - len(chosen)]]


def proposal_loss(found: list[Tensor], objects: list[Objects]) -> Tensor:
    """Return the loss of the part "rpn": of the logits of sampled anchors, and the offsets of positive anchors."""
    every = torch.cat(
        [
            anchors(*value.shape[2:], stride, demo.SETTINGS.anchor_scale, RATIOS, value.device)
            for value, stride in zip(found[:LEVELS], STRIDES, strict=True)
        ]
    )
    total = torch.zeros(())
    for index, each in enumerate(objects):
        logits = torch.cat([in_order_of_anchors(value[index], 1)[:, 0] for value in found[:LEVELS]]).float()
        offsets = torch.cat([in_order_of_anchors(value[index], 4) for value in found[LEVELS:]]).float()
        overlap = box_iou(each.boxes, every)
        best, which = overlap.max(0)
        positive, own = best >= 0.7, overlap.amax(1)
        for row, most in zip(overlap, own, strict=True):  # the best anchors of an object are always positive
            if most >= 0.3:
                fits = row == most
                positive, which = positive | fits, torch.where(fits, (overlap == row).all(1).nonzero()[0, 0], which)
        yes, no = sampled(positive.nonzero()[:, 0], ((best < 0.3) & ~positive).nonzero()[:, 0], ANCHORS, 0.5)
        both = torch.cat([yes, no])
        wanted = torch.cat([torch.ones(len(yes)), torch.zeros(len(no))])
        aims = encode_boxes(every[yes], each.boxes[which[yes]], (1.0,) * 4)
        moved = F.l1_loss(offsets[yes], aims, reduction="sum") / len(both)
        total = total + F.binary_cross_entropy_with_logits(logits[both], wanted) + moved
    return total / len(objects)


def head_losses(
    detector: Detector, maps: tuple[Tensor, ...], found: list[Tensor], objects: list[Objects]
) -> dict[str, Tensor]:
    """Return the losses of classes, boxes and masks on sampled regions, from the box head and the mask head."""
    size = tuple(side * STRIDES[0] for side in maps[0].shape[2:])
    rows, boxes, labels, aims, inside, masks, masked = [], [], [], [], [], [], []
    for index, each in enumerate(objects):
        with torch.no_grad():
            proposals = detector.proposals([value[index].float() for value in found], size)
        every = torch.cat([each.boxes, proposals])
        best, which = box_iou(every, each.boxes).max(1)
        yes, no = sampled((best >= 0.5).nonzero()[:, 0], (best < 0.5).nonzero()[:, 0], REGIONS, 0.4)
        both = torch.cat([yes, no])
        rows.append(torch.full((len(both),), index))
        boxes.append(every[both])
        labels.append(torch.cat([each.labels[which[yes]], torch.full((len(no),), demo.ARCHITECTURE.classes)]))
        aims.append(encode_boxes(every[yes], each.boxes[which[yes]], STDS[0]))
        inside.append(torch.cat([torch.ones(len(yes)), torch.zeros(len(no))]).bool())
        masked.append(torch.arange(len(both)) < min(MASKS, len(yes)))
        yes = yes[:MASKS]
        rois = torch.cat([which[yes, None].float(), every[yes]], dim=1)
        masks.append(roi_align(each.masks[:, None].float(), rois, 2 * MASK_SIDE, aligned=True)[:, 0] >= 0.5)
    images, rois, wanted, yes = torch.cat(rows), torch.cat(boxes), torch.cat(labels), torch.cat(inside)
    read = regions(maps[: LEVELS - 1], STRIDES, rois, images, BOX_SIDE)
    with torch.autocast("cpu", torch.bfloat16):
        logits, offsets = detector.parts["box"](read)
    own = offsets.float().unflatten(1, (-1, 4))[yes.nonzero()[:, 0], wanted[yes]]
    losses = {
        "classes": F.cross_entropy(logits.float(), wanted),
        "boxes": F.l1_loss(own, torch.cat(aims), reduction="sum") / len(rois),
    }
    chosen = torch.cat(masked)
    read = regions(maps[: LEVELS - 1], STRIDES, rois[chosen], images[chosen], MASK_SIDE)
    with torch.autocast("cpu", torch.bfloat16):
        likely = detector.parts["mask"](read).float()[torch.arange(int(chosen.sum())), wanted[chosen]]
    return losses | {"masks": F.binary_cross_entropy_with_logits(likely, torch.cat(masks).float())}


def make_optimizers(parts: nn.ModuleDict) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the Swin's blocks, and AdamW for all other weights."""
    matrices, others, undecayed = [], [], []
    for name, value in parts.named_parameters():
        if value.ndim == 2 and ".attn.relative" not in name and ("backbone" in name or "linears" in name):
            matrices.append(value)
        else:
            (others if value.ndim > 1 and "relative" not in name else undecayed).append(value)
    groups = [{"params": others, "weight_decay": DECAY}, {"params": undecayed, "weight_decay": 0.0}]
    muon = torch.optim.Muon(matrices, lr=RATE, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")
    return [torch.optim.AdamW(groups, lr=RATE), muon]


def train(work: Path, steps: int, threads: int) -> tuple[nn.ModuleDict, list[dict[str, float]]]:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    scenes, parts = Scenes(work), nn.ModuleDict(initialise(make_parts(demo.ARCHITECTURE)))
    average = {name: value.detach().clone() for name, value in parts.state_dict().items()}
    optimizers, begun, log = make_optimizers(parts), 0, list[dict[str, float]]()
    state, told = work / "state.pt", work / "log.json"
    if state.exists():
        stored = torch.load(state, weights_only=True)
        parts.load_state_dict(stored["parts"])
        average, begun = stored["average"], stored["step"]
        for optimizer, each in zip(optimizers, stored["optimizers"], strict=True):
            optimizer.load_state_dict(each)
        log = json.loads(told.read_text())
    detector = Detector(dict(parts.items()), demo.SETTINGS.__class__(**{**vars(demo.SETTINGS), "proposals": PROPOSALS}))
    since = time.process_time()
    for step in range(begun, steps):
        torch.manual_seed(step)
        rate = RATE * min((step + 1) / WARM_UP, 0.5 * (1 + math.cos(math.pi * step / steps)) + 0.01)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.zero_grad()
        images, objects = scenes.batch(step)
        with torch.autocast("cpu", torch.bfloat16):
            maps = parts["neck"](*parts["backbone"](images))
            found = list(parts["rpn"](*maps))
        maps = tuple(value.float() for value in maps)
        losses = {"proposals": proposal_loss(found, objects), **head_losses(detector, maps, found, objects)}
        sum(losses.values(), torch.zeros(())).backward()
        nn.utils.clip_grad_norm_(parts.parameters(), 5.0)
        for optimizer in optimizers:
            optimizer.step()
        share = min(AVERAGE, (1 + step) / (10 + step))
        for name, value in parts.state_dict().items():
            average[name].lerp_(value, 1 - share) if value.is_floating_point() else average[name].copy_(value)
        if step % 50 == 0:
            seconds = time.process_time() - since
            told_losses = {name: round(loss.item(), 4) for name, loss in losses.items()}
            log.append({"step": step, **told_losses, "seconds": round(seconds, 1)})
            print(json.dumps(log[-1]), flush=True)
            since = time.process_time()
        if step % 250 == 249:
            kept = {
                "parts": parts.state_dict(),
                "average": average,
                "step": step + 1,
                "optimizers": [optimizer.state_dict() for optimizer in optimizers],
            }
            torch.save(kept, state.with_suffix(".new"))
            state.with_suffix(".new").replace(state)
            told.write_text(json.dumps(log))
    parts.load_state_dict(average)
    return parts, log


def main(
    work: Annotated[Path, typer.Option(help="Folder that keeps the scenes, the state and the log.")],
    steps: Annotated[int, typer.Option()] = 12000,
    threads: Annotated[int, typer.Option()] = 1,
) -> None:
    """Train the bundled detector, and write its weights in float16 and the log."""
    work.mkdir(parents=True, exist_ok=True)
    parts, log = train(work, steps, threads)
    weights = {
        f"{name.partition('.')[0]}/{name.partition('.')[2]}": value.half() if value.is_floating_point() else value
        for name, value in parts.state_dict().items()
    }
    save_file({name: value.contiguous() for name, value in weights.items()}, work / "detector.safetensors")
    write_whole(ROOT / "src/adalog/detection/demo/detector.safetensors", (work / "detector.safetensors").read_bytes())
    told = {
        "steps": steps,
        "batch": BATCH,
        "scenes": SCENES,
        "size": SIZE,
        "rate": RATE,
        "decay": DECAY,
        "average": AVERAGE,
        "architecture": asdict(demo.ARCHITECTURE),
        "parameters": parameters(list(parts.values())),
        "seconds": sum(row["seconds"] for row in log),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "log": log,
    }
    write_whole(ROOT / "benchmarks/results/demo_detector_training.json", json.dumps(told, indent=1).encode() + b"\n")


if __name__ == "__main__":
    typer.run(main)
