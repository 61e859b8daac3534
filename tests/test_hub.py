"""Models as folders for the Hub: what is written, loaded and uploaded, without a network."""

import dataclasses
import json
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from PIL import Image

import adalog
from adalog import AdalogError, ArtifactError, hub
from adalog.graph.program import Ref
from adalog.inputs.zoo import DEMO_PREPROCESSING
from stored import serialise

CLASSES = [f"class {index}" for index in range(10)]


@pytest.fixture(scope="module")
def noted(quantized):
    model = adalog.QuantizedModel(quantized.quantized)
    model.note(preprocessing=dataclasses.asdict(DEMO_PREPROCESSING))
    return model


@pytest.fixture(scope="module")
def folder(noted, tmp_path_factory):
    place = tmp_path_factory.mktemp("hub") / "model"
    noted.save_pretrained(place, classes=CLASSES, figures={"top-1 | <b>": "90 %\nof 2,000"})
    return place


def test_a_folder_holds_what_the_hub_asks_for(folder, noted):
    names = ["README.md", "config.json", "model.adalog.safetensors", "preprocessor_config.json"]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert (folder / hub.FILE).read_bytes() == serialise(noted)
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "adalog"
    assert config["id2label"]["3"] == "class 3"
    assert config["label2id"]["class 9"] == 9
    processor = json.loads((folder / "preprocessor_config.json").read_text())
    assert (processor["size"], processor["crop_size"]) == ({"height": 32, "width": 32}, {"height": 32, "width": 32})
    assert processor["resample"] == Image.Resampling.BILINEAR
    assert processor["image_mean"] == pytest.approx(list(DEMO_PREPROCESSING.mean))


def test_the_card_says_what_is_in_the_file(folder, noted):
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: adalog\n")
    assert f"{len(noted.ledger)} multiplications; 0 of them stay float" in card
    assert f"takes {(folder / hub.FILE).stat().st_size:,} bytes" in card
    assert "| top-1 \\| &lt;b> | 90 % of 2,000 |" in card
    for row in noted.ledger:
        assert f"{row.site} " in card
    assert card.count("```") % 2 == 0


def test_names_cannot_end_the_block_of_code(noted):
    row = dataclasses.replace(noted.ledger[0], site="a```\n# hostile")
    card = hub.card(dataclasses.replace(noted.quantized, ledger=(row,)), 1, {}, prepared=True, classifies=True)
    assert "\n# hostile" not in card
    assert card.count("```") % 2 == 0


def test_a_folder_loads(folder, noted, images):
    for path in (folder, str(folder), f"hf:{folder}", folder / hub.FILE):
        assert torch.equal(adalog.load(path)(images), noted(images))


def test_without_preprocessing_none_is_written(quantized, tmp_path):
    bare = adalog.QuantizedModel(dataclasses.replace(quantized.quantized, provenance={"seed": 0, "images": 4}))
    bare.save_pretrained(tmp_path / "bare")
    assert not (tmp_path / "bare" / "preprocessor_config.json").exists()
    assert len(json.loads((tmp_path / "bare" / "config.json").read_text())["id2label"]) == 10


WHOLE = dataclasses.asdict(adalog.Preprocessing((16, 16), 16))


@pytest.mark.parametrize("told", [{"size": [16, 16]}, WHOLE | {"interpolation": "slow"}, WHOLE | {"size": 3}])
def test_preprocessing_that_is_told_wrongly_is_one_error(quantized, tmp_path, told):
    wrong = dataclasses.replace(quantized.quantized, provenance={"preprocessing": told})
    with pytest.raises(ArtifactError, match="the preprocessing that the artifact notes is not valid"):
        adalog.QuantizedModel(wrong).save_pretrained(tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()


def test_processors_of_transformers():
    processor = hub._processor(adalog.Preprocessing((224, 224), 256, interpolation="bicubic").to_json())
    assert processor["size"] == {"shortest_edge": 256}
    assert processor["resample"] == Image.Resampling.BICUBIC
    blue_first = adalog.Preprocessing((16, 16), 16, (0.0,) * 3, (1.0,) * 3, channels="bgr")
    processor = hub._processor(blue_first.to_json())
    assert (processor["image_processor_type"], processor["do_flip_channel_order"]) == ("MobileViTImageProcessor", True)


@pytest.mark.parametrize(
    "changes",
    [
        {"channels": "bgr"},
        {"fit": "cover", "resize": (16, 20)},
        {"fit": "contain", "resize": (16, 16), "fill": (0.0,) * 3},
        {"position": "top-left"},
        {"fill": (1.0, 2.0, 3.0)},
    ],
)
def test_without_a_processor_of_transformers_the_card_says_so(noted, tmp_path, changes):
    model = adalog.QuantizedModel(noted.quantized)
    model.note(preprocessing=dataclasses.replace(adalog.Preprocessing((16, 16), 16), **changes).to_json())
    model.save_pretrained(tmp_path, classes=CLASSES)
    assert not (tmp_path / hub.PREPROCESSING).exists()
    assert "transformers has no processor for them" in (tmp_path / "README.md").read_text()


@pytest.fixture
def fake(monkeypatch):
    """In place of the package huggingface_hub."""
    fake = mock.MagicMock()
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    return fake


def test_a_repository_is_downloaded_at_its_revision(fake, folder, noted, images):
    fake.hf_hub_download.return_value = str(folder / hub.FILE)
    loaded = adalog.load("hf:owner/name", revision="v1")
    assert torch.equal(loaded(images), noted(images))
    assert fake.mock_calls == [mock.call.hf_hub_download("owner/name", hub.FILE, revision="v1")]


def test_what_the_hub_holds_is_read_as_any_file(fake, tmp_path):
    (tmp_path / "hostile").write_bytes(b"\x80\x04code")
    fake.hf_hub_download.return_value = str(tmp_path / "hostile")
    with pytest.raises(ArtifactError, match="hf:owner/name"):
        adalog.load("hf:owner/name")


def test_a_hub_that_fails(fake, noted):
    fake.hf_hub_download.side_effect = OSError("no network\nat all")
    why = r"^hf:owner/name cannot be loaded: .*no network; name a repository[^\n]*$"
    with pytest.raises(ArtifactError, match=why):
        adalog.load("hf:owner/name")
    fake.HfApi().create_repo.side_effect = PermissionError("not yours")
    with pytest.raises(AdalogError, match=r"owner/name cannot be written: .*not yours; log in, or choose another name"):
        noted.push_to_hub("owner/name")


def test_an_upload(fake, noted):
    seen = {}

    def upload(repo_id, folder_path, commit_message, delete_patterns):
        seen.update({path.name: path.read_bytes() for path in Path(folder_path).iterdir()})
        seen["told"] = (repo_id, commit_message, delete_patterns)
        return "https://example.org/owner/name"

    api = fake.HfApi()
    api.upload_folder.side_effect = upload
    assert noted.push_to_hub("owner/name", private=True, classes=CLASSES) == "https://example.org/owner/name"
    assert api.create_repo.mock_calls == [mock.call("owner/name", private=True, exist_ok=True)]
    assert seen["told"] == ("owner/name", "A model quantized to w4a4", ["preprocessor_config.json"])
    assert seen[hub.FILE] == serialise(noted)
    assert sorted(seen) == ["README.md", "config.json", hub.FILE, "preprocessor_config.json", "told"]


def test_a_missing_package_is_named_with_its_extra(monkeypatch, noted):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for call in (lambda: adalog.load("hf:owner/name"), lambda: noted.push_to_hub("owner/name")):
        with pytest.raises(AdalogError, match=r"huggingface_hub is not installed: pip install 'adalog\[hf\]'"):
            call()


def test_classes_without_names_have_numbers(noted, tmp_path):
    noted.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["id2label"]["9"] == "LABEL_9"
    for names in ("cat", CLASSES[:3], [*CLASSES[:9], CLASSES[0]], [*CLASSES[:9], 9]):
        with pytest.raises(ValueError, match="classes"):
            noted.save_pretrained(tmp_path, classes=names)


def features(program):
    norm = next(node for node in reversed(program.nodes) if node.op == "aten.layer_norm.default")
    return Ref(norm.name)


@pytest.mark.parametrize(
    "output_of", [lambda program: {"boxes": program.output}, lambda program: (features(program), program.output)]
)
def test_a_folder_calls_no_other_model_a_classifier(noted, tmp_path, output_of):
    program = noted.program
    other = dataclasses.replace(noted.quantized, program=dataclasses.replace(program, output=output_of(program)))
    adalog.QuantizedModel(other).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == {"model_type": "adalog"}
    card = (tmp_path / "README.md").read_text()
    assert "classification" not in card
    assert "logits" not in card
    assert 'output = model.compile("native")(images)' in card


def test_names_for_a_model_without_logits_are_refused(noted, tmp_path):
    tokens = next(node.name for node in noted.program.nodes if node.op == "aten.layer_norm.default")
    other = dataclasses.replace(noted.quantized, program=dataclasses.replace(noted.program, output=Ref(tokens)))
    with pytest.raises(ValueError, match=r"the model returns no logits \(N, classes\): leave it out"):
        adalog.QuantizedModel(other).save_pretrained(tmp_path, classes=["cat", "dog"])


def test_figures_that_are_none_leave_nothing_behind(noted, tmp_path):
    with pytest.raises(AttributeError):
        noted.save_pretrained(tmp_path / "model", figures=[("top-1", "90 %")])
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("output", "place"),
    [
        ({"features": 1, "logits": 2}, "logits"),
        ({"scores": 1, "features": 2}, "scores"),
        ((None, 1, 2), 1),
        ([1, 2], 0),
    ],
)
def test_which_output_holds_the_logits(output, place):
    assert hub.logits_of(output) == output[place]
    assert hub.logits_of(3) == 3
    assert hub.logits_of((None,)) is None


def test_places_that_cannot_be_written(noted, tmp_path):
    (tmp_path / "file").write_text("")
    for place in ("file", "file/below"):
        with pytest.raises(AdalogError, match="cannot be written"):
            noted.save_pretrained(tmp_path / place)


def test_what_is_no_model_of_the_hub(tmp_path, folder):
    for name in ("a" * 300, "~nobodyhere/x"):
        with pytest.raises(ArtifactError, match="cannot be read"):
            adalog.load(name)
    with pytest.raises(
        ArtifactError, match=r"has no model.adalog.safetensors: name a folder that save_pretrained wrote"
    ):
        adalog.load(tmp_path)
    with pytest.raises(ValueError, match="revision = 'v1' is only for a repository of the Hub"):
        adalog.load(folder / hub.FILE, revision="v1")
    with pytest.raises(ValueError, match="is a folder: leave it out"):
        adalog.load(folder, revision="v1")


def test_transformers_refuses_a_model_without_classes():
    pytest.importorskip("transformers")
    from adalog import pipeline

    with pytest.raises(ArtifactError, match="names no classes, so it is not an image classifier"):
        pipeline.AdalogForImageClassification.from_pretrained("x", config=pipeline.AdalogConfig())


@pytest.mark.slow
def test_transformers_answers_with_the_integers(folder, noted):
    transformers = pytest.importorskip("transformers")
    from adalog import pipeline
    from adalog.model import quickest

    pixels = torch.randint(0, 256, (32, 32, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    picture = Image.fromarray(pixels.numpy())
    answers = transformers.pipeline("image-classification", model=str(folder), top_k=10)
    assert isinstance(answers.model, pipeline.AdalogForImageClassification)
    scores = {each["label"]: each["score"] for each in answers(picture)}
    expected = quickest(noted, 1)[0](DEMO_PREPROCESSING(picture)[None]).softmax(1)[0]
    assert [scores[name] for name in CLASSES] == pytest.approx(expected.tolist(), abs=0.02)
    model = transformers.AutoModelForImageClassification.from_pretrained(str(folder))
    with torch.no_grad():
        logits = model(DEMO_PREPROCESSING(picture)[None]).logits
    assert torch.allclose(logits, quickest(noted, 1)[0](DEMO_PREPROCESSING(picture)[None]))
