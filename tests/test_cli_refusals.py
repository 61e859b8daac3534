"""What commands refuse before they do anything: outputs in the place of inputs, names and files of other things."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

import adalog
from adalog import Config, hub, library, run
from adalog.cli.console import check_outputs
from adalog.inputs import zoo
from adalog.inputs.images import find_images
from adalog.study import paper
from commands import call, say
from test_cli_images import CLASSIFIER


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A classifier, 12 labelled images, and two artifacts, one of them as a folder for transformers."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "own.py").write_text(CLASSIFIER)
    (folder / "images").mkdir()
    for index in range(12):
        values = np.random.default_rng(index).integers(0, 256, (10, 12, 3), dtype=np.uint8)
        Image.fromarray(values).save(folder / "images" / f"{index}.png")
    rows = [f"{index}.png,{index % 7}" for index in range(12)]
    (folder / "images" / "labels.csv").write_text("\n".join(["file,label", *rows]))
    loaded = zoo.load_model(f"{folder / 'own.py'}:model")
    images = find_images(folder / "images").load(loaded.preprocessing)
    quantized = adalog.quantize(loaded.module, images, dataclasses.replace(Config.preset("w4a4", "minmax"), images=12))
    quantized.save(folder / "bare.safetensors")
    hub.save(quantized.quantized, folder / "bare")
    quantized.note(preprocessing=dataclasses.asdict(loaded.preprocessing))
    quantized.save(folder / "made.safetensors")
    hub.save(quantized.quantized, folder / "card")
    return folder


def test_no_output_takes_the_place_of_what_a_folder_holds(place, monkeypatch, capsys):
    labels, image, data = place / "images" / "labels.csv", place / "images" / "0.png", place / "images"
    held = place / "card" / hub.FILE
    made, own = place / "made.safetensors", f"{place / 'own.py'}:model"
    before = [path.read_bytes() for path in (labels, image, held)]
    for arguments in (
        ("evaluate", made, "--data", data, "--json", labels),
        ("quantize", own, "--data", data, "--images", 8, "--method", "minmax", "-o", image),
        ("evaluate", place / "card", "--data", data, "--json", held),
        ("inspect", f"hf:{place / 'card'}", "--json", held),
    ):
        code, error = call(monkeypatch, capsys, *arguments)
        assert (code, "is a file of the input" in error) == (2, True), error
    assert before == [path.read_bytes() for path in (labels, image, held)]
    say(monkeypatch, capsys, "evaluate", made, "--data", data, "--json", data / "new.json")  # nothing is there yet
    (data / "out.partial").write_bytes(b"")
    check_outputs(data / "out", data / "out.partial", reads=[data])  # what an unfinished run has left


def test_a_folder_of_an_artifact_names_its_file(place, monkeypatch, capsys):
    code, error = call(monkeypatch, capsys, "cost", place / "card")
    assert code in (0, 2)
    code, error = call(monkeypatch, capsys, "export", place / "card", "-o", place / "x.onnx")
    assert (code, f"{place / 'card' / hub.FILE}" in error.replace("\n", "")) == (2, True), error


def test_only_what_runs_in_integers_is_exported(place, monkeypatch, capsys):
    """Float products besides do no harm."""
    (place / "mixed.py").write_text(
        "from torch import nn\n"
        "from adalog.inputs.images import Preprocessing\n"
        "def model():\n"
        "    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 3, 3)), Preprocessing((8, 8), (9, 9))\n"
    )
    quantize = (
        "quantize",
        f"{place / 'mixed.py'}:model",
        "--data",
        place / "images",
        "--images",
        8,
        "--method",
        "minmax",
    )
    say(monkeypatch, capsys, *quantize, "-o", place / "mixed.safetensors")
    code, error = call(monkeypatch, capsys, "export", place / "mixed.safetensors", "-o", place / "mixed.onnx")
    assert "nothing to export" not in error
    say(monkeypatch, capsys, *quantize, "--pin", "*=32", "-o", place / "float.safetensors")
    code, error = call(monkeypatch, capsys, "export", place / "float.safetensors", "-o", place / "float.onnx")
    assert (code, "nothing to export" in error) == (2, True), error


def test_a_card_tells_only_of_files_that_are_there(place):
    for folder, prepared in (("bare", False), ("card", True)):
        text = (place / folder / "README.md").read_text()
        assert (place / folder / hub.PREPROCESSING).exists() == prepared
        assert (hub.PREPROCESSING in text) == ("pipeline(" in text) == prepared


def test_times_of_another_artifact(place, monkeypatch, capsys):
    times = place / "times.json"
    bench = ("bench", place / "made.safetensors", "--executor", "torch", "--seconds", 0, "--json", times)
    say(monkeypatch, capsys, *bench)
    say(monkeypatch, capsys, "report", place / "made.safetensors", "--bench", times, "-o", place / "one.html")
    code, error = call(
        monkeypatch, capsys, "report", place / "bare.safetensors", "--bench", times, "-o", place / "two.html"
    )
    assert (code, "of another artifact" in error) == (2, True), error
    assert not (place / "two.html").exists()


def test_bench_says_which_model_does_not_fit(place, monkeypatch, capsys):
    code, error = call(monkeypatch, capsys, "bench", place / "made.safetensors", "--model", "demo", "--seconds", 0)
    assert (code, "cannot be timed" in error, "integers" in error) == (2, True, False), error


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"names": ["1"], "firsts": ["minmax", "nonsense"]}, "first name 'nonsense'"),
        ({"names": ["1"], "bits": ["w4a4", "w9a9"]}, "bits 'w9a9'"),
    ],
)
def test_rows_that_no_table_has(given, message):
    with pytest.raises(ValueError, match=message):
        paper.plan(**given)
    assert paper.plan(["5"], firsts=["FPCS, ours"])


def test_tables_take_a_name_with_a_comma(monkeypatch, capsys, tmp_path):
    code, error = call(monkeypatch, capsys, "tables", "5", "--rows", "FPCS, theirs", "--out", tmp_path / "t")
    assert (code, "'FPCS, theirs'" in error.replace("\n", " ")) == (2, True), error
    code, error = call(monkeypatch, capsys, "tables", "C", "1")
    assert (code, "measure it without 1" in error.replace("\n", " ")) == (2, True), error
    code, error = call(monkeypatch, capsys, "tables", "1", "--out", ".")
    assert (code, "does not name a file" in error) == (2, True), error


def test_detectors_where_none_is_taken(monkeypatch, capsys, tmp_path):
    code, error = call(monkeypatch, capsys, "pareto", "demo:detector", "--out", tmp_path / "p.png")
    assert (code, "is a detector, which this command does not support" in error) == (2, True), error


def test_reports_of_two_artifacts_draw_no_images(place, monkeypatch, capsys):
    two = (place / "made.safetensors", place / "bare.safetensors")
    code, error = call(monkeypatch, capsys, "report", *two, "--seed", 3, "-o", place / "both.html")
    assert (code, "--seed does not apply to a comparison" in error) == (2, True), error


def test_names_of_files_do_not_reach_the_terminal_as_they_are(place, monkeypatch, capsys):
    odd = place / "b\x1b[31m.safetensors"
    shutil.copy(place / "made.safetensors", odd)
    assert "\x1b" not in say(monkeypatch, capsys, "cost", odd)


def test_images_that_hold_nan(place):
    model = adalog.load(place / "made.safetensors")
    images = torch.zeros(2, 3, 8, 8)
    images[1, 0, 3, 3] = torch.nan
    for executor in ("reference", "torch"):
        with pytest.raises(ValueError, match="NaN"):
            model.compile(executor)(images)
    site = model.ledger[0].site
    with pytest.raises(ValueError, match="NaN"):
        model.compile("reference").trace(site, images)
    images[1, 0, 3, 3] = torch.inf
    assert bool(model.compile("torch")(images).isfinite().all())


def test_arguments_of_other_types(place):
    with pytest.raises(ValueError, match="no Config"):
        adalog.quantize(torch.nn.Linear(3, 3), torch.zeros(40, 3), "w4a4")
    with pytest.raises(ValueError, match=r"jobs = 1\.5"):
        adalog.quantize(torch.nn.Linear(3, 3), torch.zeros(40, 3), jobs=1.5)
    with pytest.raises(ValueError, match="threads" if library.levels() else "native"):
        run.abi.Context(1.5)
    assert json.loads((place / "card" / "config.json").read_text())
