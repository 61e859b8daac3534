"""Load the bundled model, a ViT trained on CIFAR-10 by tools/train_demo_vit.py, and the bundled CIFAR-10 images.

Examples:
    >>> from adalog import demo
    >>> model, images = demo.load_model(), demo.calibration_images()
    >>> model(images).shape
    torch.Size([64, 10])
"""

import io
from importlib import resources

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load as parse_safetensors
from torch import Tensor

from adalog.inputs.demo.model import DemoViT

MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)
TILES_PER_ROW = 48  # of a packed sheet of images


def load_model() -> DemoViT:
    """Load the trained model.

    Returns:
        The model in float32 and evaluation mode. It maps normalised images (B, 3, 32, 32) to logits (B, 10).
    """
    model = DemoViT()
    model.load_state_dict({name: value.float() for name, value in _read("demo_vit.safetensors").items()})
    return model.eval()


def calibration_images() -> Tensor:
    """Load 64 unlabelled images of the training set for calibration.

    Returns:
        Normalised images, (64, 3, 32, 32).
    """
    stored = _read("cifar10.safetensors")
    return normalise(_unpack(stored["sheet_webp"])[: len(stored["calibration_index"])])


def unlabelled_images() -> Tensor:
    """Load 1,024 unlabelled images of the training set, for stages that fit images.

    Returns:
        Normalised images, (1024, 3, 32, 32). The first 64 are `calibration_images`.
    """
    more = _read("cifar10_unlabelled.safetensors")
    return torch.cat([calibration_images(), normalise(_unpack(more["sheet_webp"])[: len(more["train_index"])])])


def test_images() -> tuple[Tensor, Tensor]:
    """Load 2,000 labelled images of the test set, 200 per class.

    Returns:
        Normalised images, (2000, 3, 32, 32), and their labels, (2000,).
    """
    stored = _read("cifar10.safetensors")
    start, count = len(stored["calibration_index"]), len(stored["test_index"])
    return normalise(_unpack(stored["sheet_webp"])[start : start + count]), stored["test_labels"].long()


def normalise(images: Tensor) -> Tensor:
    """Normalise images as in the training of the model.

    Args:
        images: Pixel values 0-255, uint8, (N, 3, 32, 32).

    Returns:
        Normalised images, float32, (N, 3, 32, 32).
    """
    mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
    return (images.float() / 255 - mean) / std


def pack_sheet(images: Tensor) -> Tensor:
    """Pack images as the tiles of one lossless WebP image.

    Args:
        images: Pixel values 0-255, uint8, (N, 3, 32, 32).

    Returns:
        The bytes of the WebP file, uint8, (bytes,).
    """
    rows = -(-len(images) // TILES_PER_ROW)
    tiles = torch.zeros(rows * TILES_PER_ROW, 3, 32, 32, dtype=torch.uint8)
    tiles[: len(images)] = images
    sheet = tiles.view(rows, TILES_PER_ROW, 3, 32, 32).permute(0, 3, 1, 4, 2).reshape(rows * 32, TILES_PER_ROW * 32, 3)
    packed = io.BytesIO()
    Image.fromarray(sheet.numpy()).save(packed, "WEBP", lossless=True, quality=100, method=6)
    return torch.frombuffer(bytearray(packed.getvalue()), dtype=torch.uint8)


def _unpack(packed: Tensor) -> Tensor:
    """Unpack the tiles of a sheet, including the empty tiles of its last row: uint8, (tiles, 3, 32, 32)."""
    sheet = torch.from_numpy(np.array(Image.open(io.BytesIO(packed.numpy().tobytes())).convert("RGB")))
    rows = sheet.shape[0] // 32
    return sheet.view(rows, 32, TILES_PER_ROW, 32, 3).permute(0, 2, 4, 1, 3).reshape(-1, 3, 32, 32)


def _read(name: str) -> dict[str, Tensor]:
    return parse_safetensors(resources.files(__name__).joinpath(name).read_bytes())
