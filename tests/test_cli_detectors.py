"""The command line with a detector: quantize, evaluate, detect, and what is wrong with what it is given."""

import io
import json
import sys
import threading

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from adalog import artifact
from adalog.cli import detectors, main
from adalog.cli.detectors import SHOWN
from adalog.detection import demo
from adalog.detection.demo.scenes import scene
from adalog.detection.detector import Detections, Settings
from commands import refusal, run, say

pytest.importorskip("torchvision")
pytest.importorskip("pycocotools")
NUMBERS = range(4)


@pytest.fixture(autouse=True)
def threads_as_before():
    """`adalog detect` gives torch other threads, which the tests of other files do without."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Scenes as files, with their annotations."""
    place = tmp_path_factory.mktemp("scenes")
    scenes = [scene(number) for number in NUMBERS]
    for number, each in zip(NUMBERS, scenes, strict=True):
        Image.fromarray(each.image).save(place / f"{number}.png")
    (place / "instances.json").write_text(json.dumps(demo.truth(zip(NUMBERS, scenes, strict=True))))
    return place


@pytest.fixture(scope="module")
def file(tmp_path_factory, captured_once):
    """The bundled detector in 8 bits."""
    place = tmp_path_factory.mktemp("detector") / "detector.safetensors"
    report = tmp_path_factory.mktemp("report") / "report.json"
    words = f"adalog quantize demo:detector --bits w8a8 --method minmax --images 4 --threads 1 --out {place}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [*words.split(), "--json", str(report)])
        with pytest.raises(SystemExit) as stopped:
            main()
    assert not stopped.value.code
    told = json.loads(report.read_text())
    assert told["bytes"] == place.stat().st_size < 2_500_000
    assert list(told["parts"]) == ["backbone", "neck", "rpn", "box", "mask"]
    assert (told["bits"], told["calibration_images"]) == ("w8a8", 4)
    assert [path.name for path in place.parent.iterdir()] == [place.name]
    return place


@pytest.mark.slow
def test_a_quantized_detector_finds_what_the_float_one_finds(file, folder):
    options = ("--coco", folder / "instances.json", "--data", folder, "--threads", 1, "--json", "-")
    whole = json.loads(run("evaluate", "demo:detector", *options))
    small = json.loads(run("evaluate", file, *options))
    several = json.loads(run("evaluate", file, *options, "--threads", 3))
    assert several == small
    assert whole["images"] == small["images"] == 4
    assert whole["box_ap"] > 0.6
    assert small["box_ap"] > whole["box_ap"] - 0.15
    assert small["mask_ap"] > whole["mask_ap"] - 0.15
    assert whole["box_ap_large"] is None  # there are no objects that large


@pytest.mark.slow
def test_operands_of_chosen_parts_are_judged(tmp_path):
    words = "sensitivity demo:detector --method minmax --parts rpn,mask --widths 4,8 --images 2 --judged 2 --threads 1"
    told = json.loads(run(*words.split(), "-o", tmp_path / "rows.json", "--json", "-"))
    assert told == json.loads((tmp_path / "rows.json").read_text())
    assert (told["method"], told["calibration_images"], list(told["parts"])) == ("minmax", 2, ["rpn", "mask"])
    for part in told["parts"].values():
        losses = {width: sum(row["loss"] for row in part["rows"] if row["bits"] == width) for width in (4, 8)}
        assert losses[4] > 20 * losses[8] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["rows.json"]


@pytest.mark.slow
def test_what_is_found_is_drawn(file, folder, tmp_path):
    options = ("--out", tmp_path / "drawn.png", "--json", "-")
    told = json.loads(run("detect", file, folder / "0.png", *options))
    objects = scene(0)
    assert {each["name"] for each in told["objects"]} <= set(demo.NAMES)
    left, _, width, _ = told["objects"][0]["box"]
    assert any(left < x2 and x1 < left + width for x1, _, x2, _ in objects.boxes().tolist())
    with Image.open(tmp_path / "drawn.png") as drawn:
        picture = np.asarray(drawn)
    assert picture.shape == objects.image.shape
    assert (picture != objects.image).any()


@pytest.mark.slow
def test_an_image_of_another_size(file, tmp_path, monkeypatch, capsys):
    Image.fromarray(scene(3, (240, 180)).image).save(tmp_path / "tall.png")
    said = say(monkeypatch, capsys, "detect", file, tmp_path / "tall.png", "--out", tmp_path / "drawn.jpg")
    assert "objects in" in said
    with Image.open(tmp_path / "drawn.jpg") as picture:
        assert picture.size == (180, 240)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["inspect", "report", "bench"])
def test_commands_for_models_name_those_for_detectors(file, monkeypatch, capsys, command):
    told = refusal(monkeypatch, capsys, command, file)
    assert "holds a detector, which only `adalog evaluate --coco` and `adalog detect` can use" in told


@pytest.mark.slow
def test_the_demo(tmp_path, monkeypatch, capsys, captured_once):
    monkeypatch.setattr(demo, "TESTED", range(6))
    options = ("--bits", "w8a8", "--methods", "minmax", "--threads", 1, "--json", tmp_path / "told.json")
    assert "box AP" in say(monkeypatch, capsys, "demo", "--detector", *options)
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["fp32"]["box_ap"] > 0.5
    assert [(row["bits"], row["method"]) for row in told["rows"]] == [("w8a8", "minmax")]
    assert told["rows"][0]["mask_ap"] > 0.4


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            "quantize mmdet:mask-swin-x --data .",
            "unknown detector 'mmdet:mask-swin-x': give mmdet:NAME (NAME is one of mask-swin-t",
        ),
        ("quantize mmdet:mask-swin-t --data .", "has no weights: give --checkpoint FILE"),
        ("quantize mmdet:mask-swin-t", "mmdet:mask-swin-t has no images of its own: give --data FOLDER"),
        (
            "quantize demo:detector --parts tail",
            "--parts 'tail' is unknown: choose from backbone, neck, rpn, box, mask",
        ),
        ("sensitivity demo:detector --parts tail", "--parts 'tail' is unknown: choose from backbone, neck, rpn"),
        ("sensitivity mmdet:mask-swin-t", "mmdet:mask-swin-t has no images of its own: give --data FOLDER"),
        ("sensitivity demo --parts box", "--parts applies only to a detector (mmdet:NAME"),
        ("quantize demo --parts box", "--parts applies only to a detector (mmdet:NAME"),
        ("quantize demo:detector --no-pretrained", "has its own weights: leave out"),
        ("quantize demo:detector --free-sizes", "takes images of any size"),
        ("quantize demo:detector --images 2000", "has 1024 calibration images, but 2000 are needed"),
        ("evaluate demo:detector", "is a detector: give --coco instances.json and --data FOLDER"),
        ("evaluate demo:detector --coco x --data . --executor torch", "is not quantized"),
        ("evaluate demo:detector --coco x --data . --model demo", "which does not support --model: leave"),
        (
            "evaluate demo:detector --coco x --data . --model demo --support y",
            "demo:detector is a detector, which does not support --model, --support: leave that out",
        ),
        (
            "inspect demo:detector",
            "demo:detector is a detector, which this command does not support: give a classifier",
        ),
        ("evaluate no.safetensors --coco x --data .", "no.safetensors cannot be read: No such file or directory"),
        ("detect demo:detector nowhere.png", "nowhere.png cannot be read as an image"),
        ("detect demo:detector x.png --out x.gif", "x.gif must end in one of .png, .jpg"),
    ],
)
def test_bad_input_is_one_line_and_code_2(arguments, told, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert told in refusal(monkeypatch, capsys, *arguments.split())
    assert not list(tmp_path.iterdir())


def test_the_file_of_a_detector_needs_annotations(monkeypatch, capsys, tmp_path):
    """Labels, which models need, would not help."""
    header = json.dumps({"__metadata__": {artifact.DETECTOR: "{}"}}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    words = refusal(monkeypatch, capsys, "evaluate", tmp_path / "x.safetensors", "--data", tmp_path)
    assert "x.safetensors is a detector: give --coco instances.json and --data FOLDER" in words


def test_too_few_images_for_the_stages(folder, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    words = refusal(monkeypatch, capsys, *f"quantize demo:detector --method adalog+ --data {folder}".split())
    assert "has only 4 images, but the stages of the method fit 128: give --reconstruct-images 4, or more" in words


@pytest.mark.parametrize(
    ("missing", "arguments"),
    [
        ("torchvision", ("demo", "--detector")),
        ("torchvision", ("detect", "demo:detector", "x.png")),
        ("pycocotools", ("demo", "--detector")),
        ("pycocotools", ("evaluate", "demo:detector", "--coco", "instances.json", "--data", ".")),
    ],
)
def test_a_missing_package_is_named_with_its_extra(missing, arguments, monkeypatch, capsys, tmp_path, folder):
    Image.new("RGB", (64, 64)).save(tmp_path / "x.png")
    monkeypatch.chdir(folder if arguments[0] == "evaluate" else tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == missing]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, missing, None)
    told = f"error: {missing} is not installed: pip install 'adalog[coco]'\n"
    assert refusal(monkeypatch, capsys, *arguments) == told


def test_too_few_images_name_the_folder_and_the_option(monkeypatch, capsys, tmp_path):
    for index in range(3):
        Image.new("RGB", (64, 64)).save(tmp_path / f"{index}.png")
    arguments = ("sensitivity", "demo:detector", "--data", tmp_path, "--images", 2, "--judged", 2)
    told = refusal(monkeypatch, capsys, *arguments)
    assert f"{tmp_path} has only 3 images, but --images plus --judged is 4" in told


@pytest.fixture
def seeing(monkeypatch):
    """A detector that sees one object in each image, of a class whose name looks like markup."""
    settings = Settings(("[red]",))
    found = Detections(
        torch.tensor([[1.0, 2.0, 30.0, 40.0]]), torch.ones(1), torch.zeros(1).long(), torch.ones(1, 64, 64).bool()
    )

    class Seeing:
        def __init__(self):
            self.settings = settings

        def __call__(self, batch):
            self.threads = torch.get_num_threads()
            return [found]

    found_by = Seeing()
    monkeypatch.setattr(detectors, "load_detector", lambda *_: found_by)
    return found_by


@pytest.fixture
def one_seen(seeing, monkeypatch, tmp_path):
    """An image whose name looks like markup."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x[").mkdir()
    Image.new("RGB", (64, 64)).save("x[/foo].png")
    return "x[/foo].png"


def test_names_are_no_markup(one_seen, monkeypatch, capsys):
    said = say(monkeypatch, capsys, "detect", "demo:detector", one_seen, "-o", "drawn[b].png")
    assert "1 objects in x[/foo].png, drawn into drawn[b].png" in " ".join(said.split())
    assert "[red]" in said
    rows = [(("x[/foo].json",), dict.fromkeys(SHOWN, 0.5))]
    table = detectors.ap_table("4 images of val[red]2017.json", ["method"], rows)
    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    assert all(words in console.file.getvalue() for words in ("4 images of val[red]2017.json", "x[/foo].json"))


def test_threads_serve_a_detector(seeing, one_seen, folder, monkeypatch, capsys):
    """Those of torch for one image; and for many, two images at a time."""
    say(monkeypatch, capsys, "detect", "demo:detector", one_seen, "--threads", 3)
    assert seeing.threads == 3
    barrier = threading.Barrier(2, timeout=30)

    class Together:
        settings = demo.SETTINGS

        def __call__(self, batch):
            barrier.wait()
            size = batch.originals[0]
            return [Detections(torch.zeros(0, 4), torch.zeros(0), torch.zeros(0).long(), torch.zeros(0, *size).bool())]

    monkeypatch.setattr(detectors, "load_detector", lambda *_: Together())
    options = ("--coco", folder / "instances.json", "--data", folder, "--threads", 2, "--json", "-")
    told = json.loads(say(monkeypatch, capsys, "evaluate", "demo:detector", *options))
    assert (told["images"], told["box_ap"]) == (len(NUMBERS), 0)


def test_no_picture_is_left_where_masks_cannot_be_written(one_seen, monkeypatch, capsys, tmp_path):
    for name in ("pycocotools", "pycocotools.mask"):
        monkeypatch.setitem(sys.modules, name, None)
    refusal(monkeypatch, capsys, "detect", "demo:detector", one_seen, "-o", "drawn.png")
    assert [path.name for path in tmp_path.iterdir()] == ["x["]


def test_a_model_is_no_detector(monkeypatch, capsys, tmp_path, content):
    (tmp_path / "model").write_bytes(content)
    Image.new("RGB", (64, 64)).save(tmp_path / "x.png")
    told = refusal(monkeypatch, capsys, "detect", tmp_path / "model", tmp_path / "x.png", "-o", tmp_path / "drawn.png")
    assert "is not a detector: give a file that `adalog quantize mmdet:NAME` wrote" in told
    told = refusal(monkeypatch, capsys, "evaluate", tmp_path / "model", "--coco", "x.json", "--data", ".")
    assert "--coco evaluates a detector" in told
