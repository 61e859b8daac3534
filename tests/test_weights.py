"""Where a named model's weights come from: a hub, a folder, a checkpoint; and what is refused."""

import json
import os
import pickle
import urllib.error

import pytest
import torch
from safetensors.torch import load_file, save_file

from adalog import DataError
from adalog.inputs.demo.model import DemoViT
from adalog.inputs.images import Preprocessing
from adalog.inputs.weights import load_weights, misfit, read_weights
from adalog.inputs.zoo import inspect, load_model
from toys import IMAGES
from zoo import COUNTS, TINY, refused

pytest.importorskip("timm")
pytest.importorskip("torchvision")
transformers = pytest.importorskip("transformers")


def assert_has(loaded, state):
    """The model has all of these weights."""
    own = loaded.module.state_dict()
    assert all(torch.equal(own[name], value) for name, value in state.items())


# --- downloads -------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """An empty cache, and a hub where nobody listens: what it would retry for a minute must fail at the first trial."""
    from huggingface_hub import constants, file_download

    cache = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")

    def retried(*args, **kwargs):
        raise AssertionError("a download was begun")

    monkeypatch.setattr(file_download, "get_hf_file_metadata", retried)
    return cache


@pytest.mark.parametrize("spec", [TINY, "timm:test_vit.r160_in1k"])
def test_timm_weights_out_of_reach(hub, spec):
    message = refused(spec)
    assert message.startswith(f"the pretrained weights of {spec} cannot be loaded: ")
    assert message.endswith("; give --checkpoint FILE, or --no-pretrained for random weights")


def test_timm_weights_of_a_file_or_of_the_cache_need_no_network(hub, tmp_path):
    state = load_model(TINY, pretrained=False, seed=3).module.state_dict()
    folder = hub / "models--timm--test_vit.r160_in1k"
    save_file(state, tmp_path / "w.safetensors")
    assert_has(load_model(TINY, checkpoint=tmp_path / "w.safetensors"), state)
    (folder / "snapshots" / "0").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0")
    save_file(state, folder / "snapshots" / "0" / "model.safetensors")
    assert_has(load_model(TINY), state)


def test_hf_out_of_reach(hub):
    message = refused("hf:someone/something")
    assert message.startswith("the config of hf:someone/something cannot be loaded: ")
    assert "hf:DIR" in message


def test_torchvision_weights_out_of_reach(monkeypatch, tmp_path):
    def unreachable(request, timeout):
        assert request.full_url.startswith("https://download.pytorch.org/models/swin_t")
        assert timeout < 30
        raise urllib.error.URLError("no route")

    monkeypatch.setattr("urllib.request.urlopen", unreachable)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    assert refused("torchvision:swin_t") == (
        "the pretrained weights of torchvision:swin_t cannot be loaded: <urlopen error no route>; "
        "give --checkpoint FILE, or --no-pretrained for random weights"
    )


# --- transformers ----------------------------------------------------------------------------------------------------


def vit_config(**changes):
    size = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 96}
    shape = {"image_size": 32, "patch_size": 8, "num_labels": 10}
    return transformers.ViTConfig(**size | shape | changes)


@pytest.fixture
def saved(tmp_path):
    """A folder with a tiny ViT's config and weights, and the model."""
    torch.manual_seed(0)
    model = transformers.ViTForImageClassification(vit_config()).eval()
    model.save_pretrained(tmp_path / "vit")
    return tmp_path / "vit", model


@pytest.mark.slow
def test_hf_folder(saved):
    folder, model = saved
    loaded = load_model(f"hf:{folder}")
    assert torch.equal(loaded.module(IMAGES).logits, model(IMAGES).logits)
    assert loaded.preprocessing == Preprocessing((32, 32), (32, 32), (0.5,) * 3, (0.5,) * 3, "bilinear")
    told = inspect(loaded)
    assert tuple(told[name] for name in COUNTS) == (13, 1, 2, 2, 2, 5)


def test_hf_half_weights_become_float(saved):
    folder, model = saved
    whole = model.classifier.weight.clone()
    save_file(model.state_dict(), folder / "whole.safetensors")
    model.half().save_pretrained(folder)
    module = load_model(f"hf:{folder}").module
    assert {value.dtype for value in module.parameters()} == {torch.float32}
    assert torch.equal(module.classifier.weight, model.classifier.weight.float())
    again = load_model(f"hf:{folder}", checkpoint=folder / "whole.safetensors").module
    assert torch.equal(again.classifier.weight, whole)
    assert not torch.equal(module.classifier.weight, whole)


STATISTICS = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}
OLD = {"size": 40, "crop_size": 32, "do_center_crop": True, "resample": 1, "rescale_factor": 0.5}
DEIT = {"size": {"height": 36, "width": 36}, "crop_size": {"height": 32, "width": 32}, "resample": 0}


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        (
            {"image_processor_type": "ViTImageProcessor", "size": {"height": 48, "width": 40}, "resample": 3}
            | STATISTICS,
            Preprocessing((48, 40), (48, 40), (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), "bicubic"),
        ),
        (  # of an old release, whose sizes were plain numbers
            {"feature_extractor_type": "CLIPFeatureExtractor"} | OLD | STATISTICS,
            Preprocessing((32, 32), 40, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), "lanczos", 0.5, position="center-floor"),
        ),
        (
            {"image_processor_type": "DeiTImageProcessor", "do_normalize": False, "do_rescale": False} | DEIT,
            Preprocessing((32, 32), (36, 36), (0.0,) * 3, (1.0,) * 3, "nearest", 1.0),
        ),
    ],
)
def test_hf_preprocessing(saved, stored, expected):
    folder, _ = saved
    (folder / "preprocessor_config.json").write_text(json.dumps(stored))
    assert load_model(f"hf:{folder}").preprocessing == expected


@pytest.mark.parametrize("content", ["{", '{"image_processor_type": "NoSuchProcessor"}', '{"resample": 77}'])
def test_hf_damaged_preprocessing(saved, content):
    folder, _ = saved
    (folder / "preprocessor_config.json").write_text(content)
    assert "preprocessing" in refused(f"hf:{folder}")


@pytest.mark.slow
def test_hf_config_alone(tmp_path):
    vit_config(image_size=[32, 48]).save_pretrained(tmp_path)
    loaded = load_model(f"hf:{tmp_path}", pretrained=False)
    assert type(loaded.module).__name__ == "ViTForImageClassification"
    assert loaded.preprocessing.size == loaded.preprocessing.resize == (32, 48)
    assert inspect(loaded)["images"] == [3, 32, 48]
    assert refused(f"hf:{tmp_path}").startswith(f"the pretrained weights of hf:{tmp_path} cannot be loaded: ")


@pytest.mark.parametrize(("name", "mean"), [("DeiT", "IMAGENET_STANDARD_MEAN"), ("Dinov2", "OPENAI_CLIP_MEAN")])
def test_hf_processor_of_the_class(tmp_path, name, mean):
    """What the model's own processor does by default, where there is no file."""
    shape = {"image_size": 28, "patch_size": 14, "hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    getattr(transformers, f"{name}Config")(**shape).save_pretrained(tmp_path)
    loaded = load_model(f"hf:{tmp_path}", pretrained=False)
    assert type(loaded.module).__name__ == f"{name}ForImageClassification"
    own = loaded.preprocessing
    assert own.size == own.resize == (28, 28)
    assert own.interpolation == "bicubic"
    assert own.mean == tuple(getattr(transformers.image_utils, mean))


def test_hf_without_a_head(tmp_path):
    torch.manual_seed(0)
    model = transformers.ViTModel(vit_config()).eval()
    model.save_pretrained(tmp_path)
    loaded = load_model(f"hf:{tmp_path}")
    assert torch.equal(loaded.module(IMAGES).last_hidden_state, model(IMAGES).last_hidden_state)


def test_hf_weights_that_lack_something_are_refused(tmp_path):
    transformers.ViTModel(vit_config(), add_pooling_layer=False).save_pretrained(tmp_path)
    assert "lack pooler.dense.bias, pooler.dense.weight of ViTModel" in refused(f"hf:{tmp_path}")


def test_hf_runs_no_code_of_the_folder(saved):
    folder, _ = saved
    marker = folder / "ran"
    (folder / "own.py").write_text(f"open({str(marker)!r}, 'w')\nclass Config: pass\nclass Model: pass\n")
    config = json.loads((folder / "config.json").read_text())
    own = {"AutoConfig": "own.Config", "AutoModel": "own.Model", "AutoModelForImageClassification": "own.Model"}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "unheard_of", "auto_map": own}))
    assert "config of hf:" in refused(f"hf:{folder}")
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": own}))
    load_model(f"hf:{folder}")
    assert not marker.exists()


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "config of hf:"),
        (lambda folder: (folder / "config.json").write_text("{}"), "config of hf:"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x"), "pretrained weights of hf:"),
        (lambda folder: (folder / "model.safetensors").unlink(), "pretrained weights of hf:"),
        (lambda folder: vit_config(num_channels=1).save_pretrained(folder), "takes images with 1 channels"),
        (lambda folder: vit_config(hidden_size=96).save_pretrained(folder), "pretrained weights of hf:"),
    ],
)
def test_hf_damaged_folders(saved, damage, told):
    folder, _ = saved
    damage(folder)
    message = refused(f"hf:{folder}")
    assert told in message
    assert folder.name in message


@pytest.mark.parametrize("name", ["./nothing", "/nothing", "a/b/c"])
def test_hf_folder_that_is_not_there(name):
    assert "is not a folder" in refused(f"hf:{name}")


# --- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def weights():
    return load_model("demo", pretrained=False, seed=7).module.state_dict()


def prefixed(state, prefix):
    return {prefix + name: value for name, value in state.items()}


@pytest.mark.parametrize(
    ("name", "wrap"),
    [
        ("w.safetensors", lambda state: state),
        ("renamed.bin", lambda state: state),
        ("w.safetensors", lambda state: prefixed(state, "module.")),
        ("w.pt", lambda state: state),
        ("w.pth", lambda state: {"state_dict": state, "epoch": 3}),
        ("w.pt", lambda state: {"model": state, "optimizer": {"state": {}}}),
        ("w.pt", lambda state: {"model_state_dict": prefixed(state, "module.")}),
        ("w.pt", lambda state: {"model": {"state_dict": state}}),
        ("w.pt", lambda state: {**state, "epoch": 3}),
        # of other tools
        ("w.pth", lambda state: prefixed(state, "_orig_mod.")),
        ("w.pth", lambda state: prefixed(state, "module._orig_mod.")),
        ("w.pth", lambda state: {"state_dict": prefixed(state, "model."), "callbacks": {"best": torch.ones(1)}}),
        ("w.pth", lambda state: {"state_dict": {**prefixed(state, "net.vit."), "criterion.weight": torch.ones(10)}}),
        ("w.pth", lambda state: prefixed(state, "backbone.")),
        ("w.pth", lambda state: prefixed(state, "base_model.model.")),
        ("w.pth", lambda state: {"model_ema": state}),
        ("w.pth", lambda state: {"net": state, "acc": 0.9}),
        ("w.pth", lambda state: {"checkpoint": {"weights": prefixed(state, "module.")}}),
        ("w.pth", lambda state: {"model": state, "model_ema": {name: value + 1 for name, value in state.items()}}),
        ("w.pth", lambda state: {"net": state, "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}}}),
        ("w.pth", lambda state: {**state, "total_ops": torch.zeros(1), "blocks.0.total_params": torch.zeros(1)}),
        ("w.pth", lambda state: {key: value if value.ndim else value.half().float() for key, value in state.items()}),
    ],
)
def test_checkpoints(tmp_path, weights, name, wrap):
    save = torch.save if name.startswith("w.pt") else save_file
    save(wrap(weights), tmp_path / name)
    loaded = load_model("demo", checkpoint=tmp_path / name)
    assert loaded.module.state_dict().keys() == weights.keys()
    assert_has(loaded, weights)


def test_counters_of_batches_that_old_files_lack(tmp_path):
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.BatchNorm2d(4))
    state = {name: value + 1 for name, value in module.state_dict().items() if "num_batches" not in name}
    torch.save(state, tmp_path / "w.pth")
    loaded = load_weights(module, tmp_path / "w.pth", "own").state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in state.items())


@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_fine_tuned_checkpoint_has_its_own_number_of_classes(tmp_path, prefix):
    state = load_model(TINY, pretrained=False, seed=3).module.state_dict()
    state |= {"head.weight": torch.randn(7, 64), "head.bias": torch.randn(7)}
    torch.save(prefixed(state, prefix), tmp_path / "w.pth")
    module = load_model(TINY, checkpoint=tmp_path / "w.pth").module
    assert torch.equal(module.head.weight, state["head.weight"])
    assert torch.equal(module.cls_token, state["cls_token"])
    assert module(torch.zeros(1, 3, 160, 160)).shape == (1, 7)


def test_a_fine_tuned_checkpoint_of_transformers(saved, tmp_path):
    folder, _ = saved
    state, file = load_file(folder / "model.safetensors"), tmp_path / "w.safetensors"
    state |= {"classifier.weight": torch.randn(4, 48), "classifier.bias": torch.randn(4)}
    save_file(state, file)
    module = load_model(f"hf:{folder}", checkpoint=file).module
    assert torch.equal(module.classifier.weight, state["classifier.weight"])
    state["classifier.weight"] = state["classifier.weight"].to(torch.int8)
    save_file(state, file)
    assert "codes of another tool classifier.weight of torch.int8" in refused(f"hf:{folder}", checkpoint=file)


def test_a_checkpoint_for_a_config(saved, tmp_path):
    folder, model = saved
    (folder / "model.safetensors").rename(tmp_path / "w.safetensors")
    loaded = load_model(f"hf:{folder}", checkpoint=tmp_path / "w.safetensors")
    assert torch.equal(loaded.module(IMAGES).logits, model(IMAGES).logits)
    torch.save(model.state_dict(), tmp_path / "w.pt")  # by its parameters' names, which a release of theirs may change
    loaded = load_model(f"hf:{folder}", checkpoint=tmp_path / "w.pt")
    assert torch.equal(loaded.module(IMAGES).logits, model(IMAGES).logits)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("classifier.bias", None, "missing classifier.bias; use"),
        ("extra", torch.ones(2), "unexpected extra; use"),
        ("classifier.bias", torch.ones(3), "wrong shape classifier.bias [3] instead of [10]; use"),
        ("classifier.bias", torch.full((10,), torch.nan), "classifier.bias contains NaN"),
    ],
)
def test_a_checkpoint_that_does_not_fit_a_config(saved, tmp_path, name, value, told):
    folder, _ = saved
    state, file = load_file(folder / "model.safetensors") | {name: value}, tmp_path / "w.safetensors"
    save_file({name: value for name, value in state.items() if value is not None}, file)
    message = refused(f"hf:{folder}", checkpoint=file)
    assert message.startswith(str(file))
    assert told in message


@pytest.mark.slow
def test_timm_renames_older_weights(tmp_path):
    """The names of Swin's own release: each merging a stage earlier, buffers among the weights."""
    spec = "timm:swin_tiny_patch4_window7_224"
    state = load_model(spec, pretrained=False, seed=3).module.state_dict()
    older = {"layers.0.blocks.0.attn.relative_position_index": torch.zeros(49, 49, dtype=torch.long)}
    for key, value in state.items():
        stage = key.split(".")[1]
        name = key.replace(f"layers.{stage}.down", f"layers.{int(stage) - 1}.down") if "downsample" in key else key
        older[name.replace("head.fc.", "head.")] = value
    torch.save({"model": older}, tmp_path / "swin.pth")
    assert_has(load_model(spec, checkpoint=tmp_path / "swin.pth"), state)
    del older["norm.weight"]
    torch.save({"model": older}, tmp_path / "swin.pth")
    assert "missing norm.weight; use" in refused(spec, checkpoint=tmp_path / "swin.pth")


class Evil:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return (os.mkdir, (str(self.marker),))


def half_a_file(path):
    torch.save({"weight": torch.ones(1000)}, path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda path: None, "cannot be read: No such file or directory"),
        (lambda path: path.mkdir(), "cannot be read: Is a directory"),
        (lambda path: path.write_bytes(b""), "is neither safetensors nor a complete file of torch.save"),
        (lambda path: path.write_bytes(b"<html>" * 9), "is damaged, or contains more than tensors"),
        (lambda path: path.write_bytes(b"\x10\0\0\0\0\0\0\0{}"), "is not a complete safetensors file"),
        (half_a_file, "is neither safetensors nor a complete file of torch.save"),
    ],
)
def test_files_that_cannot_be_read_are_refused(tmp_path, make, told):
    file = tmp_path / "weights"
    make(file)
    assert refused("demo", checkpoint=file).startswith(f"{file} {told}")


def changed(name, change):
    """A function that changes one tensor of a state dict."""
    return lambda state: {**state, name: change(state.get(name))}


def without(state, count):
    """All tensors but the first ones."""
    return dict(list(state.items())[count:])


@pytest.mark.parametrize(
    ("save", "change", "told"),
    [
        (
            torch.save,
            lambda _: DemoViT(32, 1, 2),
            "contains adalog.inputs.demo.model.DemoViT, which adalog does not load",
        ),
        (torch.save, lambda _: [1, 2], "contains no named tensors"),
        (torch.save, lambda _: {"model": {"epoch": 1}}, "contains no named tensors"),
        (
            *(torch.save, lambda state: {"student": state, "teacher": state}),
            "has weights of demo under student, teacher: save only",
        ),
        (
            *(torch.save, lambda state: prefixed(state, "a.") | prefixed(state, "b.")),
            "has weights of demo under a, b: save only those that you want to use",
        ),
        (
            *(torch.save, lambda state: {"model_ema": prefixed(without(state, 1), "module.")}),
            "does not fit demo: missing pos_embed; use the weights of this model, or give the model of these",
        ),
        (
            *(save_file, lambda state: without(state, 5)),
            "does not fit demo: missing pos_embed, patch_embed.conv1.weight, patch_embed.conv1.bias and 2 more; use",
        ),
        (save_file, changed("extra", lambda _: torch.ones(1)), "does not fit demo: unexpected extra; use"),
        (
            *(save_file, changed("head.weight", lambda _: torch.ones(5, 192))),
            "does not fit demo: wrong shape head.weight [5, 192] instead of [10, 192]; use",
        ),
        (
            *(torch.save, changed("head.weight", lambda value: (100 * value).to(torch.int8))),
            "codes of another tool head.weight of torch.int8 instead of torch.float32; use",
        ),
        (torch.save, changed("head.weight", torch.Tensor.long), "codes of another tool head.weight of torch.int64"),
        (save_file, changed("head.bias", lambda value: value + torch.nan), "tensor head.bias contains NaN"),
        (torch.save, changed("head.weight", lambda value: -value.abs() / 0), "head.weight contains infinite values"),
    ],
)
def test_weights_that_do_not_fit_are_refused(tmp_path, weights, save, change, told):
    file = tmp_path / "weights"
    save(change(weights), file)
    message = refused("demo", checkpoint=file)
    assert message.startswith(str(file))
    assert told in message


@pytest.fixture
def cached_swin(tmp_path, monkeypatch):
    """Where an empty cache of torchvision has the pretrained weights of its Swin-T."""
    from torchvision.models import Swin_T_Weights

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    file = tmp_path / "hub" / "checkpoints" / Swin_T_Weights.DEFAULT.url.rpartition("/")[2]
    file.parent.mkdir(parents=True)
    return file


def test_the_cache_of_torchvision_runs_no_code(cached_swin, tmp_path):
    marker = tmp_path / "ran"
    torch.save({"state_dict": Evil(marker)}, cached_swin)
    assert "the pretrained weights of torchvision:swin_t cannot be loaded" in refused("torchvision:swin_t")
    assert not marker.exists()


@pytest.mark.slow
def test_torchvision_weights_of_the_cache(cached_swin):
    module = load_model("torchvision:swin_t", pretrained=False, seed=3).module
    torch.save(module.state_dict(), cached_swin)
    assert_has(load_model("torchvision:swin_t"), module.state_dict())


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_runs_no_code(tmp_path, zipped):
    file, marker = tmp_path / "w.pt", tmp_path / "ran"
    if zipped:
        torch.save({"state_dict": Evil(marker)}, file)
    else:
        file.write_bytes(pickle.dumps(Evil(marker), protocol=2))
    assert "unpickling may run code" in refused("demo", checkpoint=file)
    assert not marker.exists()


# --- strange checkpoints ---------------------------------------------------------------------------------------------


def test_a_wrapper_that_holds_itself_ends(tmp_path):
    content = {"weight": torch.zeros(2)}
    content["model"] = content
    torch.save(content, tmp_path / "own.pth")
    assert list(read_weights(tmp_path / "own.pth")) == ["weight"]


def test_complex_and_sparse_weights_are_refused(tmp_path):
    module, given = torch.nn.Linear(3, 2), {"weight": torch.ones(2, 3, dtype=torch.complex64), "bias": torch.zeros(2)}
    torch.save(given, tmp_path / "complex")
    with pytest.raises(DataError, match="does not fit own: complex or sparse weight"):
        load_weights(module, tmp_path / "complex", "own")
    assert misfit(given, given) == ""
    assert misfit(module.state_dict(), given | {"weight": torch.eye(3)[:2].to_sparse()}) == "complex or sparse weight"
