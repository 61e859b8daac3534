"""The scripts in examples/ and the tutorial run as they are, with searches cut short."""

import re
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

import commands
from adalog import Config, Search, demo, library

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
pytestmark = pytest.mark.usefixtures("captured_once")  # the tutorial quantizes one model several times


@pytest.fixture
def run_script(tmp_path, monkeypatch, capsys):
    """A function that runs a script of examples/ in this process and a new folder, and returns what it prints."""
    monkeypatch.chdir(tmp_path)

    def run(name, *words):
        monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.fixture
def short(monkeypatch):
    """Presets with a short search."""
    preset, quick = Config.preset, Search(init=(8, 4), parents=4, steps=0, rounds=1)
    monkeypatch.setattr(Config, "preset", staticmethod(lambda bits: replace(preset(bits), search=quick)))


@pytest.fixture
def small_timm(monkeypatch):
    """Whatever timm is asked for, it makes a narrow ViT with one block for small images. Returns what it was asked."""
    timm = pytest.importorskip("timm")
    make, asked = timm.create_model, []
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2}
    sizes["pretrained_cfg_overlay"] = {"input_size": (3, 32, 32)}

    def create(name, pretrained):
        asked.append((name, pretrained))
        return make("vit_tiny_patch16_224", **sizes)

    monkeypatch.setattr(timm, "create_model", create)
    return asked


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
def test_timm(tmp_path, photographs, run_script, short, small_timm):
    out = run_script("timm_model.py", photographs, "--model", "test_vit", "--random")
    assert small_timm == [("test_vit", False)]
    assert "of 4 held-out images" in out
    assert f"model.safetensors: {(tmp_path / 'model.safetensors').stat().st_size:,} bytes" in out


@pytest.mark.slow
def test_transformers(tmp_path, photographs, run_script, short):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, image_size=32, patch_size=8
    )
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "vit")
    out = run_script("huggingface_model.py", "vit", photographs)
    assert "LABEL_" in out
    assert (tmp_path / "quantized" / "model.adalog.safetensors").exists()


@pytest.mark.slow
def test_a_model_of_your_own(run_script, short, monkeypatch):
    monkeypatch.setattr(demo, "unlabelled_images", demo.calibration_images)  # fewer images
    out = run_script("your_own_model.py")
    errors = [float(error) for error in re.findall(r"relative error of the logits ([\d.]+)", out)]
    assert len(errors) == 2
    assert all(0 < error < 1 for error in errors)


@pytest.mark.skipif(not library.levels(), reason=f"no kernels: {library.why()}")
def test_deployment_without_pytorch(tmp_path, quantized):
    """In a process of its own, which does not import PyTorch."""
    file = tmp_path / "vit.safetensors"
    quantized.save(file)
    pack = tmp_path / "vit.adalog"
    commands.run("pack", file, "--out", pack)
    script = ROOT / "examples" / "deploy_without_pytorch.py"
    done = subprocess.run([sys.executable, str(script), str(pack)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "PyTorch imported: False" in done.stdout


@pytest.mark.slow
def test_the_tutorial(tmp_path, photographs, monkeypatch, short, small_timm):
    """Every block in its order."""
    pytest.importorskip("onnxruntime")
    assert "w8a8" in (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    names = {}
    for kind, code in re.findall(r"```(python|sh)\n(.*?)```", (ROOT / "docs" / "tutorial.md").read_text("utf-8"), re.S):
        if kind == "python":
            exec(code, names)
        elif code.startswith("adalog"):
            commands.run(*code.split()[1:], cwd=tmp_path)
    assert names["logits"].shape == (len(names["held_out"]), 1000)
    assert (tmp_path / "deit.html").exists()
