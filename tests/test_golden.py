"""Methods beside outputs of their released codes on a random tiny ViT: AdaLog (commit 75a57d2), RepQ-ViT, PTQ4ViT."""

from benchmarks import search as search_benchmark
from benchmarks.direct import direct_search
from experiments import golden

import copy
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from adalog import Calibration, Config
from adalog.baselines import ReleasedSearch
from adalog.quantizers import LogQuantizer, UniformQuantizer

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "tests" / "golden"
SETTINGS = json.loads((FOLDER / "released.json").read_text())["settings"]
RIVALS = json.loads((FOLDER / "rivals.json").read_text())["settings"]
FC2 = "blocks.0.mlp.fc2"
SLOW = [name for name in SETTINGS if name != "w4a4_nofpcs"]
pytestmark = pytest.mark.usefixtures("captured_once")
every_setting = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in SETTINGS]
)


class Head(nn.Module):
    """The last linear by itself, under its name."""

    def __init__(self, whole):
        super().__init__()
        self.head = whole.head

    def forward(self, features):
        return self.head(features)


@pytest.fixture(scope="module")
def parts():
    """The model and its images; the head, behind a block that is not stored, on its own input."""
    model, images, features = stored_vit()
    head = Head(model)
    model.head = nn.Identity()
    return [(model, images), (head, features)]


@pytest.fixture(scope="module")
def search(parts):
    """Every product's quantizers under some choices."""
    body, head = (Calibration(*part) for part in parts)
    return lambda config: body.search(config) + head.search(config)


def stored_vit():
    """The stored model, without its second block, its calibration images, and what its head was given on them."""
    tensors = load_file(FOLDER / "tiny_vit.safetensors")
    codes, values = tensors["image_codes"].long(), tensors["image_values"]
    images = torch.stack([values[channel][codes[:, channel]] for channel in range(3)], dim=1)
    return golden.load_vit({**tensors, "images": images}, heads=2), images, tensors["features"]


@every_setting
def test_released_search_gives_the_released_outputs(search, name):
    content = SETTINGS[name]
    found = search(golden.released_config(content))
    row = golden.compare(content, found)
    assert row["sites"] == len(content["relative_output_mse"]) == 8
    if content["post_gelu"] == "adalog":
        assert row["max_mse_ratio"] <= 1.01
        assert row["within_0.1_percent"] >= 0.9
        assert row["activation_zero_points_equal"]
    else:
        assert row["max_mse_ratio"] <= 1.03
    assert row["q_equal"]
    assert golden.passes(content, row)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sites"),
    [
        ("w3a3", ["patch_embed.proj", "blocks.0.attn.qk", "blocks.0.attn.av", "blocks.0.attn.proj", FC2]),
        ("w4a4_nofpcs", None),
        ("w4a4_gelu_ptq4vit", [FC2]),
    ],
)
def test_the_direct_search_gives_the_released_outputs(parts, name, sites):
    """The reference that the library's search is timed against. One product of each kind stands for the others."""
    content, config = SETTINGS[name], golden.released_config(SETTINGS[name])
    with mock.patch.object(ReleasedSearch, "search_product", direct_search):
        found = Calibration(*parts[0]).search(config, sites)
        if sites is None:
            found += Calibration(*parts[1]).search(config)
    row = golden.compare(content, found)
    assert row["sites"] == len(sites or content["relative_output_mse"])
    assert golden.passes(content, row)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "bar"), [("w3a3", 1.0), ("w4a4", 1.0), ("w6a6", 0.85)])
def test_our_search_leaves_less_error(search, name, bar):
    content = SETTINGS[name]
    found = search(Config.preset(name, "adalog"))
    layers = content["relative_output_mse"]
    ratios = [site.mean_square_error() / layers[golden.layer_name(site)]["mse"] for site in found]
    assert len(ratios) == len(layers)
    assert golden.geometric_mean(ratios) <= bar


class FirstBlock(nn.Module):
    """What the second block is given; names as in the whole."""

    def __init__(self, whole):
        super().__init__()
        self.patch_embed, self.cls_token, self.pos_embed = whole.patch_embed, whole.cls_token, whole.pos_embed
        self.blocks = whole.blocks

    def forward(self, images):
        tokens = self.patch_embed(images)
        return self.blocks(torch.cat([self.cls_token.expand(tokens.shape[0], -1, -1), tokens], dim=1) + self.pos_embed)


@pytest.fixture(scope="module")
def first_block():
    model, images, _ = stored_vit()
    calibration = Calibration(FirstBlock(model), images)
    calibration.probe(load_file(FOLDER / "rivals.safetensors")["gradient"])
    return calibration


@pytest.mark.slow
@pytest.mark.parametrize("name", RIVALS)
def test_rivals_give_the_released_outputs(first_block, name):
    content = RIVALS[name]
    config = replace(golden.released_config(content), fold_head=True)  # the block's second norm is the last one here
    row = golden.compare(content, first_block.search(config))
    assert row["sites"] == len(content["relative_output_mse"]) == 7
    assert row["max_mse_ratio"] <= 1.001
    assert row["max_scale_difference"] <= 2e-5
    assert golden.passes(content, row)


@pytest.mark.parametrize("name", RIVALS)
def test_rows_of_methods_are_what_is_compared(name):
    """The rows "-released" as they stand, up to what a file says of the first layer's input."""
    content, method = RIVALS[name], {"repq": "repq-vit-released", "ptq4vit": "ptq4vit-released"}[name.split("_")[0]]
    compared, row = golden.released_config(content), Config.preset(name.split("_")[1], method)
    assert compared == row
    plain = Config.preset(row.bits, method.removesuffix("-released"))
    named = replace(row, search=plain.search, offset=plain.offset)
    assert named == plain
    assert row.search != plain.search


# --- the command on a folder of another layout -----------------------------------------------------------------------

BITS = {"weight": 5, "activation": 5, "softmax": 5, "head": 5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A ViT of other sizes, where the expected outputs are our own, in one setting with and one without FPCS."""
    from timm.models import VisionTransformer

    path = tmp_path_factory.mktemp("golden")
    torch.manual_seed(0)
    size = {"img_size": 24, "patch_size": 8, "in_chans": 1, "embed_dim": 24, "depth": 1, "num_heads": 3}
    model = VisionTransformer(**size, mlp_ratio=2, num_classes=7).eval()
    images = torch.randn(5, 1, 24, 24, generator=torch.Generator().manual_seed(1)) * 2 + 0.5
    state = {f"state.{name}": value for name, value in model.state_dict().items()}
    save_file({**state, "images": images}, path / "vit.safetensors")
    calibration = Calibration(model, images)
    for name, fpcs, post_gelu in (("some", True, "adalog"), ("other", False, "uniform")):
        content = {"bits": BITS, "fpcs": fpcs, "steps": 2, "rounds": 1, "post_gelu": post_gelu}
        layers, values = {}, {}
        for site in calibration.search(golden.released_config(content)):
            layer = golden.layer_name(site)
            layers[layer] = {"mse": site.mean_square_error()}
            sides = ("A", "B") if layer.endswith(("matmul1", "matmul2")) else ("a",)
            for side, quantizer in zip(sides, (site.assignment.left, site.assignment.right), strict=False):
                fields = {} if quantizer is None else {"scale": quantizer.scale.flatten().tolist()}
                if isinstance(quantizer, LogQuantizer):
                    fields["q"] = [quantizer.q]
                if isinstance(quantizer, UniformQuantizer):
                    fields["zero_point"] = quantizer.zero_point.flatten().tolist()
                values[f"{layer}.{side}_quantizer"] = fields
        (path / f"{name}.json").write_text(
            json.dumps({**content, "relative_output_mse": layers, "hyperparameters": values})
        )
    return path


def ended(capsys, main, **options):
    """Return the exit code of a script's `main`, and the result that it prints and writes."""
    file = options["json_out"]
    with pytest.raises(SystemExit) as stopped:
        main(**options)
    assert capsys.readouterr().out == file.read_text()
    return stopped.value.code, json.loads(file.read_text())


@pytest.mark.slow
def test_the_command_takes_another_layout(folder, tmp_path, capsys):
    code, result = ended(capsys, golden.main, golden=folder, json_out=tmp_path / "result")
    assert code == 0
    assert result["ok"] is True
    assert result["images"] == 5
    assert set(result["files"]) == {"some", "other"}
    for row in result["files"].values():
        assert row["max_mse_ratio"] == pytest.approx(1, abs=1e-5)
        assert row["sites"] == 8
        assert row["within_0.1_percent"] == 1
    assert set(result["adalog_over_released"]) == {"w5a5"}
    by_site = result["adalog_over_released_by_site"]["w5a5"].values()
    assert result["adalog_over_released"]["w5a5"]["calibration"] == golden.geometric_mean(list(by_site))


@pytest.mark.slow
def test_the_direct_search_is_checked_by_command(folder, tmp_path, capsys):
    code, result = ended(capsys, search_benchmark.main, golden_files=folder, json_out=tmp_path / "direct")
    assert code == 0
    assert result["ok"] is True
    assert set(result["files"]) == {"some", "other"}
    assert all(row["sites"] == 8 for row in result["files"].values())


def test_a_corrupted_copy_does_not_pass(search):
    content = SETTINGS["w4a4_nofpcs"]
    found = search(golden.released_config(content))
    assert golden.passes(content, golden.compare(content, found))
    errors = copy.deepcopy(content["relative_output_mse"])
    errors[FC2]["mse"] *= 1.02
    assert not golden.passes(content, golden.compare({**content, "relative_output_mse": errors}, found))
    for name, field, change in (("matmul2.A", "q", 1), ("matmul1.B", "zero_point", -1)):
        values = copy.deepcopy(content["hyperparameters"])
        values[f"blocks.0.attn.{name}_quantizer"][field][-1] += change
        assert not golden.passes(content, golden.compare({**content, "hyperparameters": values}, found))


@pytest.mark.slow
def test_the_command_fails_on_a_corrupted_copy(folder, tmp_path):
    (tmp_path / "vit.safetensors").write_bytes((folder / "vit.safetensors").read_bytes())
    content = json.loads((folder / "some.json").read_text())
    content["hyperparameters"]["blocks.0.attn.matmul2.A_quantizer"]["q"][0] += 1
    (tmp_path / "some.json").write_text(json.dumps(content))
    words = [sys.executable, "-m", "experiments.golden", "--golden", str(tmp_path), "--json", str(tmp_path / "result")]
    done = subprocess.run(words, check=False, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == (tmp_path / "result").read_text(), done.stderr
    assert done.returncode == 1
    assert json.loads(done.stdout)["ok"] is False


def test_settings_that_have_no_config_are_refused():
    content = {**SETTINGS["w4a4"], "bits": {**BITS, "head": 8}}
    with pytest.raises(golden.typer.BadParameter, match="the head has 8 bits, not 5 as the other activations"):
        golden.released_config(content)
    config = golden.released_config(SETTINGS["w4a4_gelu_ptq4vit"])
    released = Config.preset("w4a4", "adalog-released")
    assert config == replace(released, post_gelu="twin")
    with pytest.raises(golden.typer.BadParameter, match="method 'other' is none of AdaLog, RepQ-ViT, PTQ4ViT"):
        golden.released_config({**RIVALS["repq_w4a4"], "method": "other"})
