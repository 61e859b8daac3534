"""A name becomes a model with its weights and preprocessing, or a refusal that says what to do."""

import dataclasses
import json
import sys

import pytest
import torch
from torch import nn

import zoo
from adalog import CaptureError, DataError
from adalog.detection.zoo import load_detector
from adalog.graph.capture import capture
from adalog.graph.sites import census, find_pairs, find_sites
from adalog.inputs import demo
from adalog.inputs.images import Preprocessing
from adalog.inputs.zoo import inspect, is_model, load_model
from toys import IMAGES, Toy
from zoo import COUNTS, TINY, refused

pytest.importorskip("timm")
pytest.importorskip("torchvision")
pytest.importorskip("transformers")


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "counts"), [("demo", (25, 3, 6, 6, 6, 13)), (TINY, (25, 1, 6, 6, 6, 13))])
def test_counts(spec, counts):
    loaded = load_model(spec, pretrained=False)
    told = inspect(loaded)
    assert tuple(told[name] for name in COUNTS) == counts
    assert told["other_sites"] == []
    assert told["refusals"] == {}
    assert told["model"] == loaded.name == spec
    assert told["images"] == [3, *loaded.preprocessing.size]
    assert told["parameters"] == sum(value.numel() for value in loaded.module.parameters())
    assert len(told["sites"]) == sum(counts[:4])
    assert sum(row["folds_with"] is not None for row in told["sites"]) >= counts[5]
    assert told["float_ops"]["gelu"] == counts[4]
    assert told == json.loads(json.dumps(told)) | {"preprocessing": dataclasses.asdict(loaded.preprocessing)}


def tally(program):
    sites = find_sites(program)
    return census(program, sites, find_pairs(program, sites, (IMAGES[:2],)))


@pytest.mark.slow
def test_refusals_are_by_norm():
    told = tally(zoo.captured("timm_pvt")[1])
    assert told["refusals"] == {
        "stages.0.blocks.0.norm1": "not folded: it also feeds conv2d.default in stages.0.blocks.0.attn.sr"
    }
    assert told["pairs"] == 4
    rows = {row["site"]: row for row in told["sites"]}
    assert rows["stages.0.blocks.0.attn.q"]["folds_with"] is None


@pytest.mark.slow
def test_a_product_that_no_softmax_reads_is_another():
    told = tally(capture(Toy(lambda _, x: x @ x.transpose(-1, -2)).eval(), IMAGES))
    assert (told["qk"], told["av"], told["other_sites"]) == (0, 0, ["qk"])
    assert [row["role"] for row in told["sites"]] == ["other"]
    scores = Toy(lambda _, x: ((x @ x.transpose(-1, -2)) * 0.1 + 1).softmax(dim=-1) @ x)
    told = tally(capture(scores.eval(), IMAGES))
    assert (told["qk"], told["av"], told["other_sites"]) == (1, 1, [])


def test_quick_gelu_counts():
    model = Toy(lambda m, x: m.linear(x * torch.sigmoid(1.702 * x)), linear=nn.Linear(32, 5))
    assert tally(capture(model.eval(), IMAGES))["post_gelu"] == 1


def test_the_demo():
    loaded = load_model("demo")
    images, _ = demo.test_images()
    assert torch.equal(loaded.module(images[:4]), demo.load_model()(images[:4]))
    assert not loaded.module.training
    own = loaded.preprocessing
    assert (own.size, own.resize, own.mean, own.std) == ((32, 32), (32, 32), demo.MEAN, demo.STD)


def test_random_weights_come_from_the_seed_alone():
    before = torch.get_rng_state()
    first, again, other = (load_model("demo", pretrained=False, seed=seed).module for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(5)
    later = load_model("demo", pretrained=False, seed=1).module
    weights = [module.head.weight for module in (first, again, later, other, demo.load_model())]
    assert [torch.equal(weights[0], weight) for weight in weights[1:]] == [True, True, False, False]
    torch.set_rng_state(before)


def test_the_bundled_detector_leaves_the_generator_as_it_is():
    before = torch.get_rng_state()
    load_detector("demo:detector")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["test_vit", "vit_tiny_patch16_224.augreg_in21k"])
def test_timm_preprocessing_is_that_of_its_own_transform(name):
    from timm.data import create_transform, resolve_data_config
    from timm.models import get_pretrained_cfg

    settings = resolve_data_config({}, pretrained_cfg=get_pretrained_cfg(name).to_dict())
    resize, crop, _, normalize = create_transform(**settings).transforms
    own = load_model(f"timm:{name}", pretrained=False).preprocessing
    assert (own.size, own.resize, own.interpolation) == (tuple(crop.size), resize.size, resize.interpolation.value)
    assert own.mean == pytest.approx(normalize.mean.tolist())
    assert own.std == pytest.approx(normalize.std.tolist())


def changed_cfg(monkeypatch, **changes):
    """timm's settings of test_vit with others in their place."""
    from timm.models import _builder

    original = _builder.resolve_pretrained_cfg

    def resolve(*args, **kwargs):
        return dataclasses.replace(original(*args, **kwargs), **changes)

    monkeypatch.setattr(_builder, "resolve_pretrained_cfg", resolve)


def test_timm_may_squash_and_pad_and_take_other_channels(monkeypatch):
    changed_cfg(monkeypatch, crop_mode="squash", crop_pct=0.9)
    assert load_model(TINY, pretrained=False).preprocessing.resize == (177, 177)
    changed_cfg(monkeypatch, crop_mode="border", crop_pct=1.0)
    own = load_model(TINY, pretrained=False).preprocessing
    assert (own.resize, own.fit, own.fill) == ((160, 160), "contain", (128.0, 128.0, 128.0))
    changed_cfg(monkeypatch, crop_mode="center", input_size=(1, 160, 160))
    assert refused(TINY, pretrained=False).startswith("timm:test_vit takes images with 1 channels")


@pytest.mark.slow
def test_torchvision_preprocessing():
    own = load_model("torchvision:swin_v2_t", pretrained=False).preprocessing
    assert (own.size, own.resize, own.interpolation) == ((256, 256), 260, "bicubic")
    assert (own.mean, own.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        (
            "timm:deit_tny_patch16_224",
            "timm has no model 'deit_tny_patch16_224': did you mean deit_tiny_patch16_224 or",
        ),
        ("timm:test_vit.r160_in1", "timm has no model 'test_vit.r160_in1': did you mean test_vit.r160_in1k?"),
        ("timm:@@@", "timm has no model '@@@': see timm's list_models()"),
        ("torchvision:swim_t", "torchvision has no model 'swim_t': did you mean swin_t"),
        ("torchvision:fasterrcnn_resnet50_fpn", "torchvision has no model"),
        (
            "torchvison:swin_t",
            "unknown model 'torchvison:swin_t': give timm:NAME, torchvision:NAME, hf:DIR, hf:ID, demo",
        ),
        ("resnet50", "unknown model 'resnet50': give timm:NAME"),
        ("timm:", "unknown model 'timm:': give timm:NAME"),
        ("", "unknown model '': give timm:NAME"),
        ("a:" + "x" * 5000, ": give timm:NAME"),  # longer than the name of any file
        ("hf:" + "x" * 5000, "hf:"),
    ],
)
def test_unknown_names(spec, told):
    assert told in refused(spec)


@pytest.mark.parametrize(
    ("package", "spec", "extra"),
    [("timm", TINY, "timm"), ("torchvision", "torchvision:swin_t", "timm"), ("transformers", "hf:a/b", "hf")],
)
def test_a_missing_package_is_named_with_its_extra(monkeypatch, package, spec, extra):
    monkeypatch.setitem(sys.modules, package, None)
    assert refused(spec) == f"{package} is not installed: pip install 'adalog[{extra}]'"


OWN = """
import dataclasses
from torch import nn
from adalog.inputs.images import Preprocessing
from beside import WIDTH

@dataclasses.dataclass
class Shape:
    width: "int" = WIDTH

class Model(nn.Sequential):
    def __init__(self, width=WIDTH):
        super().__init__(nn.Flatten(), nn.Linear(3 * 32 * 32, Shape(width).width), nn.GELU(), nn.Linear(width, 2))

def plain():
    return Model().double().train()

def sized(width=4, *args, **kwargs):
    return Model(width), Preprocessing((32, 32), (40, 48))

def needs(width, *, depth):
    return Model(width)

def text():
    return "a model"

def swapped():
    return Preprocessing(), Model()

def broken():
    raise KeyError("lost")

def stops():
    raise SystemExit("enough")

number = 3
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "beside.py").write_text("WIDTH = 6\n")
    (tmp_path / "own.py").write_text(OWN)
    yield tmp_path / "own.py"
    sys.modules.pop("beside", None)


def test_a_function_of_the_users_file(own):
    path = list(sys.path)
    loaded = load_model(f"{own}:sized")
    assert loaded.preprocessing == Preprocessing((32, 32), (40, 48))
    assert sys.path == path
    told = inspect(loaded)
    assert tuple(told[name] for name in COUNTS) == (2, 0, 0, 0, 1, 0)
    assert inspect(load_model(f"{own}:sized", seed=0)) == told
    first, other = (load_model(f"{own}:Model", seed=seed).module[1].weight for seed in (0, 1))
    assert not torch.equal(first, other)


def test_without_a_preprocessing(own):
    loaded = load_model(f"{own}:plain")
    assert loaded.preprocessing is None
    assert not any(module.training for module in loaded.module.modules())
    assert loaded.module[1].weight.dtype == torch.float32
    with pytest.raises(CaptureError, match=r"224 x 224; for another size return \(module, Preprocessing\)"):
        inspect(loaded)


@pytest.mark.parametrize("channels", [1, 2, 4, 13])
def test_images_that_are_not_rgb(tmp_path, channels):
    (tmp_path / "own.py").write_text(
        "from torch import nn\n"
        "class Linear(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        f"        self.head = nn.Linear({channels * 49}, 2)\n"
        "    def forward(self, x):\n"
        "        return self.head(nn.functional.adaptive_avg_pool2d(x, 7).flatten(1))\n"
        "def conv():\n"
        f"    return nn.Sequential(nn.Conv2d({channels}, 2, 32, 32), nn.Flatten())\n"
    )
    s = "s" * (channels > 1)
    message = (
        f"takes images with {channels} channel{s}, but the command line prepares RGB images: call adalog.quantize from "
        rf"Python with images \(N, {channels}, H, W\)"
    )
    for function in ("conv", "Linear"):
        with pytest.raises(CaptureError, match=rf"own\.py:{function} {message}"):
            inspect(load_model(f"{tmp_path / 'own.py'}:{function}"))
    with pytest.raises(DataError, match=message):
        _ = load_model(f"{tmp_path / 'own.py'}:conv").rgb_preprocessing


def test_images_that_are_not_square(tmp_path):
    (tmp_path / "own.py").write_text(
        "from torch import nn\nfrom adalog import Preprocessing\n"
        "def bare():\n"
        "    return nn.Sequential(nn.Conv2d(3, 2, 16, 16), nn.Flatten(), nn.Linear(2 * 6 * 10, 5))\n"
        "def wide():\n"
        "    return bare(), Preprocessing((96, 160), (96, 160))\n"
    )
    with pytest.raises(CaptureError, match=r"224 x 224; for another size return \(module, Preprocessing\)"):
        inspect(load_model(f"{tmp_path / 'own.py'}:bare"))
    assert inspect(load_model(f"{tmp_path / 'own.py'}:wide"))["images"] == [3, 96, 160]


@pytest.mark.parametrize(
    ("function", "told"),
    [
        ("nothing", "has no function 'nothing': it has Shape, Model, plain and 6 more"),
        ("number", "has no function 'number'"),
        ("", "has no function ''"),
        ("needs", "missing a required argument: 'width'; give all its arguments default values"),
        ("text", "own.py:text returns str: return a torch.nn.Module, or (module, Preprocessing)"),
        ("swapped", "own.py:swapped returns tuple"),
        ("broken", "own.py:broken failed: 'lost'"),
        ("stops", "own.py:stops failed: enough"),
    ],
)
def test_a_function_that_gives_no_model(own, function, told):
    assert told in refused(f"{own}:{function}")
    assert "whose function creates its own weights" in refused(f"{own}:sized", pretrained=False)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "cannot be read: No such file or directory"),
        ("def f(:", "does not run: "),
        ("import no_such_package", "does not run: No module named 'no_such_package'"),
        ("raise SystemExit(3)", "does not run: 3"),
    ],
)
def test_a_file_that_does_not_run(tmp_path, content, told):
    file, modules = tmp_path / "own.py", set(sys.modules)
    if content is not None:
        file.write_text(content)
    message = refused(f"{file}:f")
    assert message.startswith(str(file))
    assert told in message
    assert set(sys.modules) == modules


def test_what_is_meant_as_a_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a:b").write_text("")
    names = ["demo", "timm:x", "no:such", "own.py:f", "demo.safetensors", "resnet50", "a:b"]
    assert [is_model(name) for name in names] == [True, True, True, True, False, False, False]
    assert is_model("a:" + "x" * 5000)  # longer than the name of any file
