"""Packs: an artifact, its tapes and a description in one file, which `adalog.run` opens or refuses."""

import dataclasses
import hashlib
import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load as parse
from safetensors.torch import save as to_bytes
from torch import nn
from torch.nn import functional as F

import adalog.run
from adalog import ArtifactError, Calibration, library
from adalog.export import to_pack
from adalog.inputs.zoo import DEMO_PREPROCESSING
from commands import call, refusal, say
from stored import header_of, packed, rebuilt, refused
from toys import Toy

pytestmark = pytest.mark.skipif(not library.levels(), reason=f"no kernels: {library.why()}")

PREPARATION = dataclasses.asdict(DEMO_PREPROCESSING)
NAMES = [f"class {number}" for number in range(10)]


@pytest.fixture(scope="module")
def artifact(quantized, tmp_path_factory):
    path = tmp_path_factory.mktemp("pack") / "model.safetensors"
    quantized.save(path)
    return path


@pytest.fixture(scope="module")
def content(artifact):
    return to_pack(artifact, (3, 1), PREPARATION, NAMES)


@pytest.fixture
def file(content, tmp_path):
    (tmp_path / "model.adalog").write_bytes(content)
    return tmp_path / "model.adalog"


def test_the_description(file, quantized, images):
    model = adalog.run.load(file)
    assert model.batches == (1, 3)
    native = quantized.compile("native")
    for count in range(5):
        assert np.array_equal(model(images[:count].numpy()), native(images[:count]).numpy())
    assert model.describe() == {
        "inputs": [{"name": "images", "type": "float32", "shape": [3, 32, 32]}],
        "outputs": [{"name": "output", "type": "float32", "shape": [10]}],
    }
    assert model.preprocessing == json.loads(json.dumps(PREPARATION))
    assert model.classes == tuple(NAMES)


def test_it_is_a_safetensors_file_with_the_artifact_in_it(file, artifact, content):
    stored, wanted = parse(content), parse(artifact.read_bytes())
    assert stored.keys() - wanted.keys() == {"constants/1", "constants/3"}
    with safe_open(file, "pt") as opened:
        assert list(opened.metadata()) == [adalog.run.KEY]
    text = json.dumps(header_of(content, adalog.run.KEY)["artifact"], separators=(",", ":"))
    again = to_bytes({name: stored[name] for name in wanted}, {"adalog": text})
    assert again == artifact.read_bytes()
    assert header_of(content, adalog.run.KEY)["digest"] == hashlib.sha256(again).hexdigest()
    refused(content, "holds a pack, which `adalog.run` and the C library run: give the artifact")


def test_the_same_artifact_gives_the_same_bytes(artifact, content):
    assert to_pack(artifact, (1, 3), PREPARATION, NAMES) == content


def test_names_that_do_not_fit(artifact):
    told = r"there are 9 names of classes, but the model outputs \(10,\) per image: give one name for each number"
    with pytest.raises(ValueError, match=told):
        to_pack(artifact, (1,), None, NAMES[:9])


def embed(m, x):
    """An image as tokens, by a pooling, a norm of the batch, gates and a window of each pixel."""
    x = F.max_pool2d(m.stem(x), 3, 2, 1)
    x = m.norm(x * x.mean((2, 3), keepdim=True).sigmoid()) + F.pad(F.relu(x[..., 1:, :]) ** 2, (0, 0, 1, 0))
    return F.unfold(x, 2).transpose(1, 2)


def attend(m, x):
    """Attention between normalised vectors with rotary positions, and the largest value of each column."""
    q, k, v = m.qkv(embed(m, x).roll(1, 1)).unflatten(2, (3, 2, 8)).permute(2, 0, 3, 1, 4)
    rotated = torch.stack([-q[..., 1::2], q[..., ::2]], -1).flatten(-2)
    scores = F.normalize(q + rotated, dim=-1) @ F.normalize(k, dim=-1, eps=1e-3).transpose(-1, -2)
    return m.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)).amax(1)


def attending():
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(8)
    norm.running_mean, norm.running_var = torch.randn(8), torch.rand(8) + 0.5
    parts = {"stem": nn.Conv2d(3, 8, 3), "norm": norm, "qkv": nn.Linear(32, 48), "out": nn.Linear(16, 5)}
    return Toy(attend, **parts).eval(), torch.randn(4, 3, 12, 10)


def test_composed_operations(fast, tmp_path):
    net, x = attending()
    model = Calibration(net, x).quantize(fast)
    wanted = model.compile("native")(x)
    assert np.array_equal(adalog.run.load(packed(model, tmp_path / "model.adalog", (1, 3)))(x.numpy()), wanted.numpy())
    assert float((wanted - model(x)).norm() / wanted.norm()) < 0.02  # where float noise moves values over thresholds


def test_operations_that_only_torch_runs(fast, tmp_path):
    net = Toy(lambda m, x: m.fc(x.cumsum(1).exp().cumsum(1)), fc=nn.Linear(8, 3))
    model = Calibration(net, torch.randn(4, 6, 8)).quantize(fast)
    told = (
        r"only PyTorch runs these operations \(number of steps\): aten.cumsum.default \(2\), aten.exp.default \(1\). "
    )
    with pytest.raises(ArtifactError, match=told + "Run the model with PyTorch"):
        packed(model, tmp_path / "model.adalog")


def test_the_command(artifact, monkeypatch, capsys, tmp_path):
    names, out = tmp_path / "names.txt", tmp_path / "model.adalog"
    names.write_text("\n".join(NAMES) + "\n")
    told = say(monkeypatch, capsys, "pack", artifact, "-o", out, "--batch", 2, "--classes", names, "--json", "-")
    digest = hashlib.sha256(out.read_bytes()).hexdigest()
    sizes = {"bytes": out.stat().st_size, "batches": [1, 2], "classes": 10}
    assert json.loads(told) == {"file": str(out), "sha256": digest, **sizes}
    model = adalog.run.load(out)
    assert (model.batches, model.classes, model.preprocessing) == ((1, 2), tuple(NAMES), None)
    for text, why in (("a\n\nb\n", "line 2, is not the name of a class"), ("", "line 1, is not the name")):
        names.write_text(text)
        assert why in refusal(monkeypatch, capsys, "pack", artifact, "-o", out, "--classes", names)
    assert call(monkeypatch, capsys, "pack", artifact, "-o", out, "--classes", tmp_path / "none")[0] == 2
    assert call(monkeypatch, capsys, "pack", artifact, "-o", artifact)[0] == 2


def test_a_pack_without_one_of_its_tensors(content, file):
    file.write_bytes(rebuilt(content, tensors={"constants/3": None}, key=adalog.run.KEY))
    with pytest.raises(ArtifactError, match="constants/3"):
        adalog.run.load(file)
