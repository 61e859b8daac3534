"""Quantize an image classifier of transformers, and save a folder that the Hugging Face Hub takes.

    python examples/huggingface_model.py MODEL IMAGES [--bits w8a8] [-o folder]

MODEL: the name of a repository on the Hub, or a local folder. IMAGES: a folder with 32 or more JPEG or PNG files,
without labels. Needs `pip install -e ".[hf]"`.
"""

import argparse
from pathlib import Path

from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageClassification

import adalog


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("images", type=Path)
    parser.add_argument("--bits", default="w8a8")
    parser.add_argument("-o", "--out", type=Path, default=Path("quantized"))
    options = parser.parse_args()

    model = AutoModelForImageClassification.from_pretrained(options.model).eval()
    processor = AutoImageProcessor.from_pretrained(options.model)
    paths = sorted(path for path in options.images.iterdir() if path.suffix.lower() in (".jpg", ".jpeg", ".png"))
    images = processor([Image.open(path).convert("RGB") for path in paths], return_tensors="pt")["pixel_values"]

    qmodel = adalog.quantize(model, images, adalog.Config.preset(options.bits))
    print(qmodel.summary())
    classes = [model.config.id2label[index] for index in range(model.config.num_labels)]
    qmodel.save_pretrained(options.out, classes=classes)

    again = adalog.load(options.out)
    predictions = again(images[:8]).logits.argmax(1)
    print([classes[index] for index in predictions])


if __name__ == "__main__":
    main()
