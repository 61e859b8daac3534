"""A file of format 3 that commit c0e4b0d wrote, before the house was rebuilt, still reads, runs and saves."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

import adalog
from adalog import artifact

FOLDER = Path(__file__).parent / "golden"
FILE = FOLDER / "format3.safetensors"


def test_it_runs_as_it_did():
    """Float operations may differ in the last bits on another processor, and so may a code or two."""
    known = load_file(FOLDER / "format3_outputs.safetensors")
    logits = adalog.load(FILE)(known["images"])
    assert logits.shape == known["logits"].shape
    assert torch.nn.functional.cosine_similarity(logits, known["logits"]).min() > 0.999


def test_its_choices_have_their_new_names():
    model = adalog.load(FILE)
    assert model.config.pinned == (("head", 8),)
    assert model.config.search.parents == 16
    assert model.provenance["preprocessing"] == {"size": [32, 32]}
    assert next(row for row in model.ledger if row.site == "head").right.startswith("8-bit")


def test_it_is_written_as_it_was(monkeypatch):
    """Byte for byte: the names in files are those of format 3, whatever Python calls them."""
    content = FILE.read_bytes()
    header = artifact.read_header(content)
    monkeypatch.setattr("adalog.version.__version__", header["version"])
    assert artifact.serialise(adalog.load(FILE).quantized) == content
    assert header["format"] == 3
    assert header["config"]["keep"] == [["head", 8]]
    assert header["config"]["search"]["keep"] == 16
    assert json.loads(adalog.load(FILE).config.to_json()) == header["config"]
