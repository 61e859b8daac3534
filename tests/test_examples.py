"""The scripts in examples/ and the tutorial run as they are."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

import commands
from adalog import Config, Search

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def run(folder, *words):
    """Run Python with these arguments in a folder, and return what it prints."""
    done = subprocess.run([sys.executable, *map(str, words)], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def photographs(tmp_path):
    """A folder of noisy images of several sizes."""
    folder = tmp_path / "images"
    folder.mkdir()
    for index in range(36):
        Image.effect_noise((40 + index, 48), 60 + index).convert("RGB").save(folder / f"{index:02}.jpg")
    return folder


def test_every_example_has_a_test():
    text = Path(__file__).read_text(encoding="utf-8")
    assert [path.name for path in EXAMPLES if f'"{path.name}"' not in text] == []


@pytest.mark.slow
def test_timm(tmp_path, photographs):
    pytest.importorskip("timm")
    script = ROOT / "examples" / "timm_model.py"
    assert script.name == "timm_model.py"
    out = run(tmp_path, script, photographs, "--model", "test_vit", "--random")
    assert "held-out images" in out
    assert (tmp_path / "model.safetensors").stat().st_size > 0


@pytest.mark.slow
def test_transformers(tmp_path, photographs):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, image_size=32, patch_size=8
    )
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "vit")
    out = run(tmp_path, ROOT / "examples" / "huggingface_model.py", "vit", photographs)
    assert "LABEL_" in out
    assert (tmp_path / "quantized" / "model.adalog.safetensors").exists()


@pytest.mark.slow
def test_a_model_of_your_own(tmp_path):
    out = run(tmp_path, ROOT / "examples" / "your_own_model.py")
    errors = [float(error) for error in re.findall(r"relative error of the logits ([\d.]+)", out)]
    assert len(errors) == 2
    assert all(0 < error < 1 for error in errors)


def test_deployment_without_pytorch(tmp_path):
    library = pytest.importorskip("adalog.library")
    if library.load()[0] is None:
        pytest.skip(f"the compiled library is missing: {library.why()}")
    import adalog
    from adalog import demo

    file = tmp_path / "vit.safetensors"
    adalog.quantize(demo.load_model(), demo.calibration_images(), Config.preset("w8a8", "minmax")).save(file)
    run(tmp_path, "-m", "adalog", "tape", file)
    out = run(tmp_path, ROOT / "examples" / "deploy_without_pytorch.py", file)
    assert "PyTorch imported: False" in out


@pytest.mark.slow
def test_the_tutorial(tmp_path, photographs, monkeypatch):
    """Every block in its order, with a small model of random weights and a short search."""
    timm = pytest.importorskip("timm")
    pytest.importorskip("onnxruntime")
    make, preset = timm.create_model, Config.preset
    assert "w8a8" in (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained: make("test_vit", pretrained=False))

    def short(bits):
        quick = Search(init=(8, 4), parents=4, steps=1, rounds=1)
        config = preset(bits)
        return Config(weight_bits=config.weight_bits, activation_bits=config.activation_bits, search=quick)

    monkeypatch.setattr(Config, "preset", staticmethod(short))
    monkeypatch.chdir(tmp_path)
    names = {}
    for kind, code in re.findall(r"```(python|sh)\n(.*?)```", (ROOT / "docs" / "tutorial.md").read_text("utf-8"), re.S):
        if kind == "python":
            exec(code, names)
        elif code.startswith("adalog"):
            commands.run(*code.split()[1:], cwd=tmp_path)
    assert names["logits"].shape == (len(names["held_out"]), 1000)
    assert (tmp_path / "deit.html").exists()
