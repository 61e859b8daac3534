"""The paper's table of detectors, measured on the bundled one and on images of one's own."""

from experiments import detectors, paper
from experiments.rows import Request
from experiments.tables import main

import json
import math

import pytest
from PIL import Image

from adalog import METHODS, DataError
from adalog.detection import demo
from adalog.detection.demo.scenes import scene
from commands import refusal

pytest.importorskip("torchvision")
pytest.importorskip("pycocotools")


def test_every_method_has_a_row():
    for bits in ("w4a4", "w6a6"):
        names = [row.names[0] for row in paper.TABLES["C"].rows if row.config.bits == bits]
        assert sorted(names) == sorted(METHODS)


def test_published_figures_stand_beside_whatever_was_calibrated():
    assert paper.find_published("C", "mmdet:mask-swin-t", "w4a4", "adalog") == {"box_ap": 39.1, "mask_ap": 37.7}
    assert paper.find_published("C", "mmdet:cascade-swin-s", "fp32", "fp32") == {"box_ap": 51.9, "mask_ap": 45.0}
    assert paper.find_published("C", "demo:detector", "w4a4", "adalog") == {}


def test_an_average_precision_without_objects_is_left_empty():
    draws = [detectors._numbers({"box_ap": 0.5, "mask_ap": math.nan}) | {"seconds": float(each)} for each in range(2)]
    row = detectors._joined(draws)
    assert (row["mask_ap"], row["box_ap"]["mean"], row["seconds"]["mean"]) == (None, 0.5, 0.5)
    assert detectors._precisions({**row, "published": {"box_ap": 9.0}}) == ["50.0 ± 0.0", "", "9.0", ""]


def test_a_table_that_was_stopped_says_so():
    about = {"adalog": "1", "torch": "2", "processor": "p"}
    result = {"tables": {"C": {"title": "t", "note": ""}}, "models": {}, "rows": [], "calibration_images": 32}
    whole = {**result, "machine": about, "finished": 48, "of": 48}
    assert "Unfinished" not in detectors.markdown(whole)
    assert "Unfinished: 1 of 48 measurements." in detectors.markdown({**whole, "finished": 1})


@pytest.mark.slow
@pytest.mark.usefixtures("captured_once")
def test_the_table_on_images_of_ones_own(tmp_path, monkeypatch, capsys):
    """The bundled detector on files; finished rows are not measured again; a row that needs more images says so."""
    for name, numbers in (("train", range(100, 104)), ("val", range(3))):
        (tmp_path / name).mkdir()
        for number in numbers:
            Image.fromarray(scene(number).image).save(tmp_path / name / f"{number}.png")
    told = demo.truth((number, scene(number)) for number in range(3))
    (tmp_path / "instances.json").write_text(json.dumps(told))
    bench = detectors.DetectorBench("demo:detector", demo.load_detector(), tmp_path)
    work, seen = tmp_path / "rows", []
    for _ in range(2):
        request = Request(["C"], images=4, bits=["w4a4"], cells=["minmax", "adalog+"], work=work)
        result = detectors.run(request, [bench], lambda done, total, what, result: seen.append((done, total)))
    assert seen == [(1, 2), (2, 2)] * 2
    assert result["models"]["demo:detector"]["box_ap"] > 0.5
    rows = {row["names"][0]: row for row in result["rows"]}
    assert 0.2 < rows["minmax"]["box_ap"]["mean"] <= 1
    assert "images, but only 4 are available" in rows["adalog+"]["refusal"]
    text = detectors.markdown(result)
    assert "| W4/A4 | minmax |" in text
    assert "Not measured: adalog+ at W4/A4: " in text
    assert len(list(work.iterdir())) == 3


def test_an_image_that_cannot_be_read_ends_the_run(tmp_path):
    """It is no method's refusal, which would be kept as a finished row."""
    for name in ("train", "val"):
        (tmp_path / name).mkdir()
        Image.fromarray(scene(0).image).save(tmp_path / name / "0.png")
    (tmp_path / "instances.json").write_text(json.dumps(demo.truth([(0, scene(0))])))
    (tmp_path / "train" / "0.png").write_bytes(b"broken")
    bench = detectors.DetectorBench("demo:detector", demo.load_detector(), tmp_path)
    with pytest.raises(DataError, match=r"0\.png is not an image"):
        detectors.run(Request(["C"], images=1, bits=["w4a4"], cells=["minmax"], work=tmp_path / "rows"), [bench])
    assert [path.name for path in (tmp_path / "rows").iterdir()] == ["demo-detector-fp32.json"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("C", "1"), "table C is about detectors: measure it without 1"),
        (("C", "--device", "cuda"), "table C is measured on the CPU only: leave out --device cuda"),
        (("C", "--data", "."), "the bundled detector has its own images and weights: leave out --data"),
        (("C", "--models", "timm:vit"), "table C is about detectors, and timm:vit is not one: give mmdet:NAME"),
        (("C", "--models", "mmdet:mask-swin-t"), "has no weights: give --checkpoint"),
        (("1", "--checkpoint", "x"), "--checkpoint applies only to table C"),
    ],
)
def test_bad_input(arguments, told, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert told in refusal(monkeypatch, capsys, *arguments, main=main)
