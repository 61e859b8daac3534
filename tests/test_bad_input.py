"""What is not right: each time one line that says what, which, and the way out; or it works all the same.

The slow tests run the command as a user runs it, in a process of its own.
"""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import adalog
from adalog import Calibration, CalibrationError
from adalog.cli import main

MODELS = """
import time
from pathlib import Path

import torch
from torch import nn

from adalog.inputs.images import Preprocessing

SIZE = Preprocessing((8, 8), (8, 8))


def small():
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.GELU(), nn.Linear(8, 3)), SIZE


def bare():
    return small()[0]


class Branching(nn.Module):
    def forward(self, x):
        return x.mean((2, 3)) if x.sum() > 0 else x.amax((2, 3))


def branching():
    return Branching(), SIZE


class Dead(nn.Module):
    # A channel that is zero from end to end, a norm that puts out a constant, and a linear that puts out zeros.
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norms = nn.Conv2d(3, 16, 4, 4), nn.ModuleList(nn.LayerNorm(16) for _ in range(3))
        self.qkv, self.fc1, self.fc2 = nn.Linear(16, 48), nn.Linear(16, 8), nn.Linear(8, 16)
        self.zero, self.head = nn.Linear(16, 16), nn.Linear(16, 3)
        with torch.no_grad():
            for part in (self.embed.weight, self.embed.bias, self.norms[0].weight, self.norms[0].bias, self.fc1.weight):
                part[3] = 0
            self.norms[1].weight.zero_()
            self.zero.weight.zero_()
            self.zero.bias.zero_()

    def forward(self, x):
        x = self.embed(x).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(self.norms[0](x)).chunk(3, -1)
        x = x + (q @ k.transpose(1, 2)).softmax(-1) @ v
        x = x + self.fc2(nn.functional.gelu(self.fc1(self.norms[1](x))))
        zeros = self.zero(self.norms[2](x))
        return self.head(x).mean(1) + self.head(zeros).mean(1) + (zeros @ zeros.transpose(1, 2)).mean((1, 2))[:, None]


def dead():
    return Dead(), SIZE


def endless():
    Path("started").touch()
    for _ in range(12000):  # one long sleep misses a signal that comes just before it
        time.sleep(0.05)
"""
OLD = b"an older file"


def noise(*shape):
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder of models, weights, images of all sorts, and an output that is there already."""
    folder = tmp_path_factory.mktemp("bad")
    (folder / "own.py").write_text(MODELS)
    (folder / "out.safetensors").write_bytes(OLD)
    for name in ("images", "damaged", "empty", "directory"):
        (folder / name).mkdir()
    images = folder / "images"
    turned = Image.Exif()
    turned[274] = 6
    Image.fromarray(noise(20, 30, 3)).save(images / "larger.png")
    Image.fromarray(noise(5, 5, 3)).save(images / "smaller.png")
    Image.fromarray(noise(8, 8, 4), "RGBA").save(images / "alpha.png")
    Image.fromarray(noise(9, 9).astype(np.uint16) * 257).save(images / "sixteen.png")
    Image.fromarray(noise(12, 8, 4), "CMYK").save(images / "cmyk.jpg")
    Image.fromarray(noise(12, 8, 3)).save(images / "turned.jpg", exif=turned)
    Image.fromarray(noise(12, 8)).save(images / "grey.png")
    whole = (images / "larger.png").read_bytes()
    (folder / "damaged" / "half.png").write_bytes(whole[: len(whole) // 2])
    weights = {"1.weight": torch.ones(8, 192), "1.bias": torch.ones(8)}
    weights |= {"3.weight": torch.full((3, 8), torch.nan), "3.bias": torch.ones(3)}
    save_file(weights, folder / "nan.safetensors")
    return folder


def run(place, *arguments, **options):
    """The exit code, standard output and standard error of `adalog ARGUMENTS`; neither may hold a traceback."""
    command = [sys.executable, "-m", "adalog", *map(str, arguments)]
    result = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False, timeout=120, **options)
    assert "Traceback" not in result.stdout + result.stderr
    return result.returncode, result.stdout, result.stderr


def files(place):
    return {path: path.read_bytes() for path in place.rglob("*") if path.is_file() and "__pycache__" not in path.parts}


def quantize(model, *more, images=3, data="images"):
    return ["quantize", model, "--data", data, "--images", images, "-o", "out.safetensors", "--threads", 1, *more]


SMALL = "own.py:small"
CASES = [
    # models
    (
        quantize("resnet50"),
        "unknown model 'resnet50': give timm:NAME, torchvision:NAME, hf:DIR, hf:ID, demo, or path.py",
    ),
    (quantize("own.py:nothing"), "own.py has no function 'nothing': it has small, bare, Branching and"),
    (quantize("none.py:model"), "none.py cannot be read: No such file or directory"),
    (
        quantize("own.py:branching"),
        "Branching could not be exported (Could not guard on data-dependent ... Capture the part that can be",
    ),
    (
        quantize("own.py:bare"),
        "own.py:bare does not say how to prepare images: return (module, adalog.Preprocessing",
    ),
    # weights
    (quantize(SMALL, "--checkpoint", "nan.safetensors"), "nan.safetensors: tensor 3.weight holds NaN: use other"),
    (quantize(SMALL, "--checkpoint", "images/alpha.png"), "images/alpha.png is damaged, or contains more than tensors"),
    (quantize(SMALL, "--checkpoint", "none"), "none cannot be read: No such file or directory"),
    # images
    (quantize(SMALL, data="damaged", images=1), "damaged/half.png cannot be read as an image"),
    (quantize(SMALL, images=8), "images has only 7 images, but --images is 8: give --images 7, or more"),
    (quantize(SMALL, data="empty"), "empty has no images: give a folder of images"),
    (quantize(SMALL, data="nowhere"), "nowhere cannot be read: No such file or directory"),
    (quantize(SMALL, data="own.py"), "own.py cannot be read: Not a directory"),
    (["quantize", SMALL], "own.py:small has no images of its own: give --data FOLDER with at least 32 images"),
    (
        ["quantize", "demo", "--images", 1025],
        "demo has only 1024 images, but --images is 1025: give --images 1024",
    ),
    (quantize(SMALL, "--reconstruct-images", 64), "no stage fits images, so 64 images cannot be fitted"),
    # choices
    (quantize(SMALL, "--bits", "w1a4"), "weight_bits = 1 is not a whole number from 2 to 8, or 32 for float"),
    (quantize(SMALL, "--bits", "w9a9"), "weight_bits = 9 is not a whole number from 2 to 8"),
    (quantize(SMALL, "--bits", "w4a4s1"), "softmax_bits = 1 is not a whole number from 2 to 8"),
    (quantize(SMALL, "--bits", "4"), "bits = '4' is not of the form w4a4 or w4a4s3"),
    (quantize(SMALL, "--method", "magic"), "method = 'magic' is none of uniform, log2, log-sqrt2, adalog"),
    (quantize(SMALL, "--pin", "head"), "--pin 'head' is not of the form GLOB=BITS"),
    (
        quantize(SMALL, "--pin", "head=9"),
        "pinned bits of 'head' = 9 is not a whole number from 2 to 8, or 32 for float",
    ),
    (quantize(SMALL, "--pin", "head=w4b8"), "pinned bits 'w4b8' are not of the form 8, w4a8, w4, a8s4 or i4"),
    (quantize(SMALL, "--pin", "hat=8"), "pinned: no site's name matches 'hat'; the closest are"),
    (quantize(SMALL, "--device", "abacus"), "--device 'abacus' is not available on this machine: choose from cpu"),
    (quantize(SMALL, "--device", "cuda:99"), "--device 'cuda:99' is not available on this machine: choose from cpu"),
    # outputs
    (quantize(SMALL, "-o", "directory"), "directory cannot be written: Is a directory; choose a file in a folder"),
    (quantize(SMALL, "-o", "own.py/out"), "own.py/out cannot be written: Not a directory"),
    (quantize(SMALL, "--json", "directory"), "directory cannot be written: Is a directory"),
    (["evaluate", "out.safetensors", "--data", "images"], "images has no labels: add them"),
    (["evaluate", "out.safetensors"], "out.safetensors is not an adalog artifact"),
    (["cost", "own.py:branching"], "Branching could not be exported"),
    (["demo", "--out", "own.py"], "own.py/levels.png cannot be written: Not a directory"),
]


@pytest.mark.parametrize(("arguments", "told"), CASES)
def test_one_line_and_code_2(place, arguments, told, monkeypatch, capsys):
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "argv", ["adalog", *map(str, arguments)])
    before = files(place)
    with pytest.raises(SystemExit) as stopped:
        main()
    assert_refused(stopped.value.code, *capsys.readouterr(), told)
    assert files(place) == before


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "told"), CASES[::8])
def test_one_line_and_code_2_of_a_process(place, arguments, told):
    """A few of them, since each process takes seconds to start."""
    before = files(place)
    assert_refused(*run(place, *arguments), told)
    assert files(place) == before


def assert_refused(code, out, err, told):
    assert (code, out) == (2, ""), err
    assert err.startswith("error: ")
    assert all(part in err for part in told.split(" ... "))
    assert err.count("\n") == 1


@pytest.mark.parametrize("option", [("--images", 0), ("--threads", -1), ("--seed", -1), ("--images", "many")])
def test_numbers_out_of_range_are_bad_usage(place, option, monkeypatch, capsys):
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "argv", ["adalog", *map(str, (*quantize(SMALL), *option))])
    with pytest.raises(SystemExit) as stopped:
        main()
    out, err = capsys.readouterr()
    assert (stopped.value.code, out) == (2, "")
    assert "Invalid value" in err
    assert option[0] in err


@pytest.mark.slow
def test_a_folder_that_may_not_be_written(place, tmp_path):
    tmp_path.chmod(0o500)
    if os.access(tmp_path, os.W_OK):
        pytest.skip("the superuser may write anywhere")
    code, _, err = run(place, *quantize(SMALL, "-o", tmp_path / "out"))
    tmp_path.chmod(0o700)
    assert code == 2
    assert "cannot be written: Permission denied; choose a file in a folder that you may write to" in err


def whole_numbers_only(text):
    def refuse(constant):
        raise AssertionError(f"{constant} is no number of JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.slow
def test_images_of_every_size_and_kind_calibrate(place, tmp_path):
    """Larger, smaller, with alpha, of 16 bits, CMYK, grey, and turned: as read the right way, each of them."""
    from adalog.calibration.calibration import digest
    from adalog.inputs.images import find_images
    from adalog.inputs.zoo import load_model

    file = tmp_path / "out.safetensors"
    code, out, err = run(place, *quantize(SMALL, "-o", file, "--json", "-", images=7))
    assert (code, err) == (0, "")
    told = whole_numbers_only(out)
    preparation = load_model(f"{place / 'own.py'}:small").preprocessing
    images = find_images(place / "images").load(preparation)
    order = [torch.randperm(7, generator=torch.Generator().manual_seed(0)) for _ in range(2)]
    assert told["provenance"]["calibration"] == digest([images[order[0]][order[1]]])
    assert told["provenance"]["preprocessing"]["size"] == [8, 8]
    assert [site["site"] for site in told["sites"]] == ["1", "3"]
    assert told["bytes"] == file.stat().st_size


@pytest.mark.slow
def test_dead_channels_and_constants(place, tmp_path):
    file = tmp_path / "out.safetensors"
    code, out, err = run(place, *quantize("own.py:dead", "--bits", "w3a3", "-o", file, "--json", "-"))
    assert (code, err) == (0, "")
    sqnr = {site["site"]: site["sqnr"] for site in whole_numbers_only(out)["sites"]}
    assert sqnr["zero"] is None  # it puts out zeros before and after
    assert sqnr["qkv"] > 5
    model = adalog.load(file)
    for images in (torch.randn(2, 3, 8, 8), torch.zeros(2, 3, 8, 8)):
        assert bool(torch.isfinite(model(images)).all())


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_pixels_that_are_no_numbers(tiniest, images, value):
    images = images.clone()
    images[1, 0, 3, 3] = value
    with pytest.raises(CalibrationError, match="the calibration images hold NaN or infinite values"):
        Calibration(tiniest, images)


@pytest.mark.slow
def test_a_full_disk(place):
    resource = pytest.importorskip("resource")

    def little_room():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))

    code, out, err = run(place, *quantize(SMALL), preexec_fn=little_room)
    assert (code, out) == (1, "")
    assert "File too large; free some space, or choose another folder" in err
    assert err.count("\n") == 1
    assert (place / "out.safetensors").read_bytes() == OLD
    assert not list(place.glob(".adalog.*"))
    (place / "out.safetensors.partial").unlink(missing_ok=True)


@pytest.mark.slow
def test_ctrl_c(place, tmp_path):
    command = [
        sys.executable,
        "-m",
        "adalog",
        *map(str, quantize(f"{place / 'own.py'}:endless", data=place / "images")),
    ]

    def heeding():  # a shell has what it starts in the background ignore it, and so would all that the tests start
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "preexec_fn": heeding}
    with subprocess.Popen(command, cwd=tmp_path, **how) as process:
        try:
            for _ in range(4800):  # minutes, on a busy machine
                if (tmp_path / "started").exists() or process.poll() is not None:
                    break
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=240)
        finally:
            process.kill()
    assert (process.returncode, out, err) == (1, "", "interrupted\n")
    assert [path.name for path in tmp_path.iterdir()] == ["started"]
