"""Pictures: what is drawn is what was measured, the same bytes each time, and the command writes what it lists."""

from experiments import figures, landscape
from experiments.figures import Drawn, main, sqnr_figure

import io
import json
import math
import xml.etree.ElementTree as ET

import matplotlib as mpl
import pytest
import torch
from PIL import Image
from torch import nn

import adalog
from adalog import Calibration, Config, Search
from adalog.ledger import LedgerRow
from adalog.quantizers import LogQuantizer
from adalog.study.drawing import render
from adalog.study.levels import Panel, level_figure
from commands import forked, refusal, say, write_images
from test_cli_images import CLASSIFIER

LOG = LogQuantizer(torch.tensor(2.0), 30, 37, 3, offset=0.17, keeps_offset=True)


def test_panels_of_an_artifact(quantized, images):
    softmax, gelu = figures.site_panels(quantized)
    assert list(softmax.quantizers) == ["blocks.0.attn.av", "blocks.1.attn.av"]
    assert list(gelu.quantizers) == ["blocks.0.mlp.fc2", "blocks.1.mlp.fc2"]
    assert gelu.lift == pytest.approx(0.16997, abs=1e-5)
    seen = figures.observed_panels(quantized, images)
    assert [panel.title for panel in seen] == ["after softmax: blocks.1.attn.av", "after GELU: blocks.1.mlp.fc2"]
    taken = {}
    quantized.program.run(
        [images], lambda node, args, result: taken.update({node.name: args[0]} if node.op.startswith("adalog") else {})
    )
    assert torch.allclose(seen[0].values, taken["blocks.1.attn.av.left"].flatten())
    assert len(seen[1].values) == taken["blocks.1.mlp.fc2.input"].numel()


LEDGER = [
    LedgerRow("stem", "conv", "input", "", "", 20.0),
    LedgerRow("a.fc1", "linear", "layer_norm", "", "", 10.0),
    LedgerRow("a.qk", "qk", "other", "", "", math.inf),
    LedgerRow("a.av", "av", "softmax", "", "", 12.0),
    LedgerRow("a.proj", "linear", "other", "", "", 11.0),
    LedgerRow("a.fc2", "linear", "gelu", "", "", 13.0),
    LedgerRow("b.fc2", "linear", "gelu", "", "", 14.0),
]


@pytest.mark.slow
def test_sqnr_by_kind_of_site():
    other = [LedgerRow(row.site, row.role, row.source, "", "", row.sqnr - 1) for row in LEDGER]
    figure = sqnr_figure({"one": LEDGER, "two": other})
    shown = [axis for axis in figure.axes if axis.get_visible()]
    titles = ["convolution", "linear after LayerNorm", "Q Kᵀ", "A V", "other linear", "linear after GELU"]
    assert [axis.get_title() for axis in shown] == titles
    assert [line.get_xydata().tolist() for line in shown[-1].lines] == [[[1, 13], [2, 14]], [[1, 12], [2, 13]]]
    assert [len(line.get_xdata()) for line in shown[2].lines] == [0, 0]  # float has no noise
    looks = [(line.get_marker(), line.get_color(), line.get_linestyle()) for line in shown[0].lines]
    assert all(one != two for one, two in zip(*looks, strict=True))


def panel_figure(drawn):
    return level_figure([Panel("a", {"b": LOG}, 0.17, torch.arange(50) / 50)])


def search_figure(drawn):
    return landscape.landscape_figure(drawn, "the search of $x_1$ & <y>")


@pytest.mark.slow
@pytest.mark.parametrize(("make", "form"), [(panel_figure, "svg"), (search_figure, "svg"), (search_figure, "png")])
def test_pictures_are_the_same_bytes_each_time(drawn, make, form):
    """And leave matplotlib's settings as they are."""
    before = dict(mpl.rcParams)
    content = render(make(drawn), form, "What is <shown> & why")
    assert render(make(drawn), form, "What is <shown> & why") == content
    if form == "svg":
        root = ET.fromstring(content)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        names = [element.get("id") for element in root.iter() if element.get("id")]
        assert len(names) == len(set(names))
        uses = [value for element in root.iter() for key, value in element.items() if key.endswith("href")]
        assert {use[1:] for use in uses if use.startswith("#")} <= set(names)
        assert b"What is &lt;shown&gt; &amp; why" in content
    else:
        with Image.open(io.BytesIO(content)) as image:
            assert image.text == {"Description": "What is <shown> & why"}
            assert image.width > 900
            assert image.convert("RGB").getpixel((1, 1)) == (255, 255, 255)
    assert dict(mpl.rcParams) == before


@pytest.mark.slow
def test_an_index_of_pictures():
    files = figures.pictures(
        [Drawn("sqnr", "Heading", sqnr_figure({"one": LEDGER}))], "model", {"levels": "for a reason"}
    )
    assert list(files) == ["sqnr.png", "sqnr.svg", "index.md"]
    text = files["index.md"][0].decode()
    assert text.startswith("# model\n\n![sqnr](sqnr.png)\n\nHeading. The signal-to-")
    assert text.endswith("Not drawn: levels: for a reason.\n")
    assert all(caption for _, caption in files.values())


def files_of(*names):
    return [f"{name}.{form}" for name in names for form in ("png", "svg")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("figures")
    (folder / "own.py").write_text(CLASSIFIER)
    write_images(folder / "images", {f"{index}.png": 0 for index in range(4)})
    return folder


@pytest.mark.slow
def test_figures_of_a_model(folder, tmp_path):
    """In a process of its own: the files that are listed, and no others."""
    arguments = [f"{folder / 'own.py'}:model", "--data", folder / "images", "--images", 4, "--bits", "w3a3"]
    arguments += ["--methods", "minmax,adalog", "--threads", 1, "--json", "-", "--out", tmp_path / "out"]
    code, out, error = forked(*arguments, main=main)
    assert (code, error) == (0, "")
    told = json.loads(out)
    names = [entry["file"] for entry in told["files"]]
    assert names == [*files_of("histograms", "levels", "landscape", "sqnr"), "index.md"]
    assert told["left_out"] == {}
    assert sorted(names) == sorted(path.name for path in (tmp_path / "out").iterdir())
    assert "own.py:model at w3a3, adalog: the search of 3. " in told["files"][4]["caption"]


@pytest.mark.slow
def test_what_is_not_drawn_is_told():
    """Where no method has a path, where nothing is quantized, and where nothing follows a power law."""
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.GELU(), nn.Linear(8, 4))
    calibration = Calibration(model, images)
    drawn, left_out = figures.of_model(calibration, "tiny", "w3a3", ["minmax", "percentile"])
    assert [each.name for each in drawn] == ["histograms", "sqnr"]
    assert left_out == dict.fromkeys(("levels", "landscape"), "none of the methods searches by FPCS, as adalog does")
    assert drawn[1].caption.startswith("tiny at w3a3: SQNR of each site. The signal-to-quantization-noise ratio")
    drawn, left_out = figures.of_model(calibration, "tiny", "w32a32", ["adalog"])
    assert [each.name for each in drawn] == ["histograms", "sqnr"]
    assert left_out["landscape"] == "3 is not quantized"
    calibration = Calibration(model[:2], images)
    drawn, left_out = figures.of_model(calibration, "tiny", "w3a3", ["adalog"])
    assert [each.name for each in drawn] == ["landscape", "sqnr"]
    assert left_out["histograms"] == "no product follows a softmax or a GELU"
    with pytest.raises(ValueError, match="site = 'head' is not one of the 1 sites"):
        figures.of_model(calibration, "tiny", "w3a3", ["adalog"], site="head")


@pytest.mark.slow
def test_figures_of_an_artifact(folder, tmp_path, monkeypatch, capsys):
    file = tmp_path / "out.safetensors"
    found = adalog.inputs.images.find_images(folder / "images")
    loaded = adalog.inputs.zoo.load_model(f"{folder / 'own.py'}:model")
    images = found.load(loaded.preprocessing)
    quantized = Calibration(loaded.module, images).quantize(Config(3, 3, 3, images=4, search=Search(steps=1)))
    quantized.note(preprocessing=adalog.inputs.zoo.asdict(loaded.preprocessing))
    quantized.save(file)
    quantized = adalog.load(file)
    drawn, left_out = figures.of_artifact(quantized, "out", None)
    assert [each.name for each in drawn] == ["levels", "sqnr"]
    assert left_out["histograms"] == "no images: give --data FOLDER"
    files = ("--data", folder / "images", "--out", tmp_path / "out", "--json", tmp_path / "told")
    out = say(monkeypatch, capsys, file, "--images", 4, *files, main=main)
    told = json.loads((tmp_path / "told").read_text())
    names = {entry["file"] for entry in told["files"]}
    assert names == {"index.md", *files_of("histograms", "levels", "sqnr")}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    assert f"{tmp_path / 'out' / 'sqnr.svg'}: {(tmp_path / 'out' / 'sqnr.svg').stat().st_size:,} bytes\n" in out
    assert out.endswith("not drawn: landscape: an artifact does not store the search: give the model instead\n")


OWN = ["own.py:model", "--data", "images", "--images", "4"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["missing.safetensors"], "missing.safetensors cannot be read: No such file or directory"),
        (["own.py:model"], "own.py:model has no images of its own: give --data FOLDER"),
        (["own.py:model", "--data", "images"], "images has only 4 images, but --images is 32"),
        (["demo", "--methods", "adalog,magic"], "method = 'magic' is not one of uniform"),
        (["demo", "--bits", "w4"], "bits = 'w4' is not of the form w4a4"),
        ([*OWN, "--site", "head"], "site = 'head' is not one of the 2 sites"),
        (["x.safetensors", "--bits", "w4a4"], "path.py:function), not to x.safetensors: leave it out"),
        (["x.safetensors", "--no-pretrained"], "path.py:function), not to x.safetensors: leave them out"),
        (["demo", "--out", "own.py"], "own.py/histograms.png cannot be written: Not a directory"),
    ],
)
def test_bad_input(folder, monkeypatch, capsys, arguments, told):
    monkeypatch.chdir(folder)
    before = set(folder.glob("[!_]*"))
    assert told in refusal(monkeypatch, capsys, "--out", "new", *arguments, main=main)
    assert set(folder.glob("[!_]*")) == before
