"""The golden file of the artifact format: this version of adalog reads it, runs it and saves the same bytes.

`python tests/test_format.py` writes the file anew. Do that only together with a new number of the format.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import adalog
from adalog import Config, Correction, artifact
from adalog.inputs.demo.model import DemoViT

FOLDER = Path(__file__).parent / "golden"
FILE = FOLDER / "format.safetensors"
OUTPUTS = FOLDER / "format_outputs.safetensors"
CONFIG = Config(weight_bits=3, images=4, pinned=(("head", 8),), stages=(Correction(images=6),))
PREPROCESSING = {"size": [32, 32]}


def write() -> None:
    """Quantize a model with random weights, and write the artifact, some images and their logits."""
    torch.manual_seed(0)
    model = DemoViT(width=16, depth=1, heads=2).eval()
    images = torch.randn(6, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    quantized = adalog.quantize(model, images, CONFIG)
    quantized.note(preprocessing=PREPROCESSING)
    quantized.save(FILE)
    save_file({"images": images[:2], "logits": adalog.load(FILE)(images[:2])}, OUTPUTS)


def test_it_runs_as_it_did():
    """Float operations may differ in the last bits on another processor, and so may a code or two."""
    known = load_file(OUTPUTS)
    logits = adalog.load(FILE)(known["images"])
    assert logits.shape == known["logits"].shape
    assert torch.nn.functional.cosine_similarity(logits, known["logits"]).min() > 0.999


def test_it_holds_the_choices():
    model = adalog.load(FILE)
    assert model.config == CONFIG
    assert model.provenance["preprocessing"] == PREPROCESSING
    assert next(row for row in model.ledger if row.site == "head").right.startswith("8-bit")


def test_it_is_written_byte_for_byte(monkeypatch):
    content = FILE.read_bytes()
    header = artifact.read_header(content)
    monkeypatch.setattr("adalog.version.__version__", header["version"])
    assert artifact.serialise(adalog.load(FILE).quantized) == content
    assert header["format"] == artifact.FORMAT == 1
    assert header["config"] == json.loads(CONFIG.to_json())
    assert header["config"]["pinned"] == [["head", 8]]
    assert header["config"]["search"]["parents"] == 16
    assert [stage["kind"] for stage in header["config"]["stages"]] == ["correction"]


if __name__ == "__main__":
    write()
