"""Pictures: what is drawn is what was measured, the same bytes each time, and the command writes what it lists."""

from experiments import figures, landscape
from experiments.figures import Drawn, main, sqnr_figure

import io
import json
import math
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace

import matplotlib as mpl
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import adalog
from adalog import Calibration, Config, Search
from adalog.ledger import LedgerRow
from adalog.quantizers import (
    LogQuantizer,
    SplitUniformQuantizer,
    TwinUniformQuantizer,
    UniformQuantizer,
    log_levels,
    log_thresholds,
)
from adalog.study import levels
from adalog.study.drawing import rendered
from adalog.study.levels import Panel, histogram, level_figure, thresholds_of
from commands import forked

UNIFORM = UniformQuantizer(torch.tensor(0.25), torch.tensor(3.0), 3)
LOG = LogQuantizer(torch.tensor(2.0), 30, 37, 3, offset=0.17, keeps_offset=True)
LOG2 = LogQuantizer(torch.tensor(0.75), 1, 1, 3, "saturate", "log", table=False)


def ticks(axis, marker):
    """The x of every row of markers on an axis, top row first."""
    rows = [line for line in axis.lines if line.get_marker() == marker]
    return [
        line.get_xdata() for line in sorted(rows, key=lambda line: line.get_ydata()[0] if len(line.get_xdata()) else 0)
    ]


# --- levels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quantizer", "expected"),
    [
        (UNIFORM, [-0.75, -0.5, -0.25, 0, 0.25, 0.5, 0.75, 1]),
        (LOG2, [0.75 * 2**-code for code in reversed(range(8))]),
        (LogQuantizer(torch.tensor(1.0), 1, 1, 2, "zero", table=False), [0, 0.125, 0.25, 0.5, 1]),
        (LOG, sorted((2 * log_levels(30, 37, 3) - 0.17).tolist())),
        (TwinUniformQuantizer(torch.tensor(0.5), torch.tensor(0.1), 3), [-0.4, -0.3, -0.2, -0.1, 0, 0.5, 1, 1.5]),
        (SplitUniformQuantizer(torch.tensor(0.05), torch.tensor(0.25), 3), [0, 0.05, 0.1, 0.15, 0.25, 0.5, 0.75]),
        (UniformQuantizer(torch.tensor([[1.0], [2.0]]), torch.zeros(2, 1), 2), [0, 1, 2, 3, 4, 6]),
    ],
)
def test_levels(quantizer, expected):
    """In the domain of what is quantized, whether or not a bias has absorbed the offset; of all scales together."""
    assert quantizer.levels().tolist() == pytest.approx(expected, abs=1e-6)


def test_thresholds():
    half = torch.arange(7) + 0.5
    assert thresholds_of(UNIFORM).tolist() == pytest.approx(((half - 3) * 0.25).tolist(), abs=1e-6)
    cuts = 2 * log_thresholds(30, 37, 3) - 0.17
    assert thresholds_of(LOG).tolist() == pytest.approx(cuts.flip(0).tolist(), abs=1e-6)
    cuts = 0.75 * log_thresholds(1, 1, 3, beyond="saturate", rounding="log", table=False)
    assert thresholds_of(LOG2).tolist() == pytest.approx(cuts.flip(0).tolist(), rel=1e-6)


def test_the_bars_count_every_value():
    values = np.array([-1.0, 0.0, 0.5, 1.0, 1.0, 7.0])
    assert histogram(values, np.linspace(0, 1, 5)).tolist() == [2, 0, 1, 3]


def test_levels_over_a_histogram():
    values = torch.randn(3, 500, generator=torch.Generator().manual_seed(0)).abs() - 0.1
    values[0, :100] = thresholds_of(UNIFORM)[0]  # from a threshold on it is the next level
    values[1, :50] = -1.0
    figure = level_figure([Panel("gelu", {"one": UNIFORM, "two": LOG}, 0.17, values), Panel("none", {}, 0, values)])
    first, second, bars, lifted = figure.axes[:4]
    for axis in (bars, lifted, *figure.axes[6:]):
        (drawn,) = axis.patches
        assert drawn.get_data().values.sum() == values.numel()
    assert [row.tolist() for row in ticks(first, "|")] == [UNIFORM.levels().tolist(), LOG.levels().tolist()]
    one, two = ticks(second, "|")  # what is not positive is beyond the logarithmic axis, where an arrowhead tells of it
    assert one.tolist() == [pytest.approx(level + 0.17) for level in (0, 0.25, 0.5, 0.75, 1)]
    assert two.tolist() == pytest.approx((LOG.levels()[1:] + 0.17).tolist())
    assert len(ticks(second, "<")) == 2
    read = (UNIFORM, replace(LOG, keeps_offset=False))  # in the domain of its levels
    lowest = [each.fake_quantize(values) == each.levels()[0] for each in read]
    shares = [float(got.double().mean()) for got in lowest]
    assert [label.get_text() for label in second.get_yticklabels()] == [f"{100 * share:.0f} %" for share in shares]
    assert [label.get_text() for label in first.get_yticklabels()] == ["one", "two"]


def test_levels_alone_come_with_thresholds():
    figure = level_figure([Panel("sites", {"a.$b$_c": LOG2, "d": UNIFORM})])
    linear, logarithmic = figure.axes
    assert [row.tolist() for row in ticks(linear, ".")] == [
        thresholds_of(LOG2).tolist(),
        thresholds_of(UNIFORM).tolist(),
    ]
    assert ticks(logarithmic, "|")[0].tolist() == LOG2.levels().tolist()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["level", "threshold"]


def test_panels_of_a_calibration(calibration, fast):
    panels = levels.histogram_panels(calibration, {"mine": fast})
    assert [panel.title for panel in panels] == [
        "after softmax: blocks.1.attn.av",
        "after GELU: blocks.1.mlp.fc2",
    ]
    (site,) = [site for site in calibration.sites if site.name == "blocks.1.mlp.fc2"]
    assert torch.equal(panels[1].values, calibration.operand(site.left))
    assert panels[1].lift == pytest.approx(0.16997, abs=1e-5)
    (searched,) = calibration.search(fast, ["blocks.1.mlp.fc2"])
    assert panels[1].quantizers["mine"] == searched.assignment.left


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


# --- SQNR and files --------------------------------------------------------------------------------------------------

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
    one, two = shown[0].lines
    assert one.get_marker() != two.get_marker()
    assert one.get_color() != two.get_color()
    assert one.get_linestyle() != two.get_linestyle()


def panel_figure(drawn):
    return level_figure([Panel("a", {"b": LOG}, 0.17, torch.arange(50) / 50)])


def search_figure(drawn):
    return landscape.landscape_figure(drawn, "the search of $x_1$ & <y>")


@pytest.mark.slow
@pytest.mark.parametrize(("make", "form"), [(panel_figure, "svg"), (search_figure, "svg"), (search_figure, "png")])
def test_pictures_are_the_same_bytes_each_time(drawn, make, form):
    """And leave matplotlib's settings as they are."""
    before = dict(mpl.rcParams)
    content = rendered(make(drawn), form, "What is <shown> & why")
    assert rendered(make(drawn), form, "What is <shown> & why") == content
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


# --- the command -----------------------------------------------------------------------------------------------------

MODEL = """
import torch
from torch import nn
from adalog.inputs.images import Preprocessing

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.GELU(), nn.Linear(16, 7)), Preprocessing((8, 8), (8, 8))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("figures")
    (folder / "own.py").write_text(MODEL)
    (folder / "images").mkdir()
    generator = np.random.default_rng(0)
    for index in range(4):
        Image.fromarray(generator.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(folder / "images" / f"{index}.png")
    return folder


def call(monkeypatch, capsys, *arguments):
    """Exit code, standard output and error output of the command in this process."""
    monkeypatch.setattr(sys, "argv", ["experiments.figures", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        main()
    told = capsys.readouterr()
    return stopped.value.code or 0, told.out, told.err


@pytest.mark.slow
def test_figures_of_a_model(folder, tmp_path):
    """In a process of its own: the files that are listed, and no others."""
    arguments = [f"{folder / 'own.py'}:model", "--data", folder / "images", "--images", 4, "--bits", "w3a3"]
    arguments += ["--methods", "minmax,adalog", "--threads", 1, "--json", "-", "--out", tmp_path / "out"]
    code, out, error = forked(*arguments, main=main)
    assert (code, error) == (0, "")
    told = json.loads(out)
    names = [entry["file"] for entry in told["files"]]
    drawn = [f"{name}.{form}" for name in ("histograms", "levels", "landscape", "sqnr") for form in ("png", "svg")]
    assert names == [*drawn, "index.md"]
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
    arguments = [
        file,
        "--data",
        folder / "images",
        "--images",
        4,
        "--out",
        tmp_path / "out",
        "--json",
        tmp_path / "told",
    ]
    code, out, err = call(monkeypatch, capsys, *arguments)
    assert (code, err) == (0, "")
    told = json.loads((tmp_path / "told").read_text())
    names = {entry["file"] for entry in told["files"]}
    assert names == {f"{name}.{form}" for name in ("histograms", "levels", "sqnr") for form in ("png", "svg")} | {
        "index.md"
    }
    assert {path.name: path.stat().st_size for path in (tmp_path / "out").iterdir()}.keys() == names
    assert f"{tmp_path / 'out' / 'sqnr.svg'}: {(tmp_path / 'out' / 'sqnr.svg').stat().st_size:,} bytes\n" in out
    assert out.endswith("not drawn: landscape: an artifact does not store the search: give the model instead\n")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["missing.safetensors"], "missing.safetensors cannot be read: No such file or directory"),
        (["own.py:model"], "own.py:model has no images of its own: give --data FOLDER"),
        (["own.py:model", "--data", "images"], "images has only 4 images, but --images is 32"),
        (["demo", "--methods", "adalog,magic"], "method = 'magic' is not one of uniform"),
        (["demo", "--bits", "w4"], "bits = 'w4' is not of the form w4a4"),
        (
            ["own.py:model", "--data", "images", "--images", "4", "--site", "head"],
            "site = 'head' is not one of the 2 sites",
        ),
        (["x.safetensors", "--bits", "w4a4"], "path.py:function), not to x.safetensors: leave it out"),
        (["x.safetensors", "--no-pretrained"], "path.py:function), not to x.safetensors: leave them out"),
        (["demo", "--out", "own.py"], "own.py/histograms.png cannot be written: Not a directory"),
    ],
)
def test_bad_input(folder, monkeypatch, capsys, arguments, told):
    monkeypatch.chdir(folder)
    before = sorted(folder.iterdir())
    code, out, err = call(monkeypatch, capsys, "--out", "new", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert told in err
    assert err.count("\n") == 1
    assert sorted(path for path in folder.iterdir() if path.name != "__pycache__") == [
        path for path in before if path.name != "__pycache__"
    ]
