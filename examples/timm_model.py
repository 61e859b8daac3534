"""Quantize a timm model from a folder of images, compare it with the float model, and save it.

    python examples/timm_model.py IMAGES [--model deit_tiny_patch16_224] [--bits w8a8] [--random] [-o model.safetensors]

IMAGES: a folder with more than 32 JPEG or PNG files, without labels. Needs `pip install -e ".[timm]"`.
"""

import argparse
from pathlib import Path

import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_model_data_config

import adalog

CALIBRATION = 32


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("images", type=Path)
    parser.add_argument("--model", default="deit_tiny_patch16_224")
    parser.add_argument("--bits", default="w8a8")
    parser.add_argument("--random", action="store_true", help="random weights instead of pretrained ones")
    parser.add_argument("-o", "--out", type=Path, default=Path("model.safetensors"))
    options = parser.parse_args()

    model = timm.create_model(options.model, pretrained=not options.random).eval()
    prepare = create_transform(**resolve_model_data_config(model))
    paths = sorted(path for path in options.images.iterdir() if path.suffix.lower() in (".jpg", ".jpeg", ".png"))
    images = torch.stack([prepare(Image.open(path).convert("RGB")) for path in paths])
    held_out = images[CALIBRATION:]

    qmodel = adalog.quantize(model, images[:CALIBRATION], adalog.Config.preset(options.bits))
    print(qmodel.summary())
    with torch.no_grad():
        same = (qmodel(held_out).argmax(1) == model(held_out).argmax(1)).float().mean()
    print(f"same prediction as the float model on {same:.0%} of {len(held_out)} held-out images")
    print(f"{options.out}: {qmodel.save(options.out):,} bytes")


if __name__ == "__main__":
    main()
