"""The command line as a user runs it: in a process of its own, judged by its exit code, its output and its files."""

import dataclasses
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

import adalog
from adalog import METHODS, Config, hub
from adalog.calibration.calibration import digest
from adalog.cli.console import check_outputs
from adalog.inputs import zoo
from adalog.inputs.images import find_images
from commands import call, forked, refusal, say, write_images
from test_cli_images import CLASSIFIER

MODELS = """
import sys
import time
import warnings
from pathlib import Path

import torch
from torch import nn

from adalog.inputs.images import Preprocessing

SIZE = Preprocessing((8, 8), (8, 8))


def small():
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.GELU(), nn.Linear(8, 3)), SIZE


def bare():
    return small()[0]


def talking():
    print("a word of its own")
    print("and another", file=sys.stderr)
    warnings.warn("a warning")
    return small()


class Branching(nn.Module):
    def forward(self, x):
        return x.mean((2, 3)) if x.sum() > 0 else x.amax((2, 3))


def branching():
    return Branching(), SIZE


def broken():
    raise ValueError("no [luck] today")


class Refused(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.norm(x)
        return x + self.fc(x)


def refused():
    return Refused(), SIZE


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
HELP = ("Usage: ", "demo", "quantize", "evaluate", "inspect", "cost", "bench", "doctor")


def test_help(monkeypatch, capsys):
    text = say(monkeypatch, capsys, "--help")
    assert all(word in text for word in HELP)
    assert say(monkeypatch, capsys) == text
    text = say(monkeypatch, capsys, "certify", "--help")
    assert "model.onnx" in text
    assert "{{" not in text


@pytest.mark.slow
@pytest.mark.parametrize("start", [[sys.executable, "-m", "adalog"], [Path(sys.executable).with_name("adalog")]])
def test_help_in_a_process_of_its_own(start):
    result = subprocess.run([*start, "--help"], capture_output=True, text=True, check=True)
    assert all(word in result.stdout for word in HELP)


def test_methods(tmp_path, monkeypatch, capsys):
    rows = json.loads(say(monkeypatch, capsys, "methods", "--json", "-"))
    assert [row["name"] for row in rows] == list(METHODS)
    for row in rows:
        assert set(row) == {"name", "label", "source", "choices"}
        assert row["label"] == METHODS[row["name"]].label
        assert Config.from_json(json.dumps(row["choices"])) == Config.preset("w4a4", row["name"])
    table = say(monkeypatch, capsys, "methods", "--json", tmp_path / "methods")
    assert "repq-vit" in table
    assert "ICCV" in table
    assert "apq-vit (our reading)" in table
    assert "stages = none" in " ".join(table.split())
    assert not any(sign in table for sign in "{}[]")
    assert json.loads((tmp_path / "methods").read_text()) == rows


@pytest.mark.slow
def test_importing_loads_no_optional_package():
    names = ("timm", "torchvision", "transformers", "typer", "rich", "matplotlib")
    script = f"import sys, adalog; print([name for name in {names} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("inside", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("out", "why"), [("/dev/full", "No space left on device"), (None, "it is closed"), ("pipe", "Broken pipe")]
)
def test_standard_output_that_takes_nothing(quantized, tmp_path, monkeypatch, capsys, out, why, inside):
    """In this process and in one of its own."""
    quantized.save(tmp_path / "file")
    reader, pipe = os.pipe()
    os.close(reader)
    with os.fdopen(pipe if out == "pipe" else os.open("/dev/full", os.O_WRONLY), "w") as target:
        if inside:
            monkeypatch.setattr(sys, "stdout", None if out is None else target)
            found = call(monkeypatch, capsys, "inspect", tmp_path / "file")
        else:
            command = [sys.executable, "-m", "adalog", "inspect", tmp_path / "file"]
            closing = (lambda: os.close(1)) if out is None else None
            outputs = {"stdout": target, "stderr": subprocess.PIPE, "text": True}
            result = subprocess.run(command, preexec_fn=closing, check=False, **outputs)
            found = result.returncode, result.stderr
    assert found == (1, f"failed: cannot write to standard output: {why}\n")


def test_debug_shows_the_traceback_of_an_error(tmp_path, monkeypatch, capsys):
    """Before the same line and with the same exit code; the next run is without it again."""
    monkeypatch.chdir(tmp_path)
    code, message = call(monkeypatch, capsys, "--debug", "inspect", "missing")
    *trace, last = message.splitlines()
    assert (code, last) == (2, "error: missing cannot be read: No such file or directory")
    assert trace[0] == "Traceback (most recent call last):"
    assert any("FileNotFoundError" in line for line in trace)
    assert any("DataError: missing cannot be read" in line or "ArtifactError: missing" in line for line in trace)
    code, message = call(monkeypatch, capsys, "inspect", "missing")
    assert (code, message) == (2, f"{last}\n")


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize(
    ("error", "told"),
    [(KeyError("gone [wrong]"), "failed: KeyError: 'gone [wrong]'\n"), (KeyboardInterrupt(), "interrupted\n")],
)
def test_an_error_that_nobody_foresaw(monkeypatch, capsys, debug, error, told):
    monkeypatch.setattr("adalog.cli.doctor.examine", Mock(side_effect=error))
    code, message = call(monkeypatch, capsys, *["--debug"] * debug, "doctor")
    assert (code, message.endswith(told)) == (1, True)
    assert ("Traceback" in message) == (debug and isinstance(error, KeyError))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing"], "; see `adalog --help`"),
        (["--debug"], "; see `adalog --help`"),
        (["quantize"], "; see `adalog quantize --help`"),
        (["inspect", "x", "--colour"], "; see `adalog inspect --help`"),
        (["quantize", "demo", "--bits"], "Option '--bits' requires an argument"),
        (["--debug=1"], "Option '--debug' does not take a value"),
    ],
)
def test_bad_usage_is_one_line(monkeypatch, capsys, arguments, words):
    assert refusal(monkeypatch, capsys, *arguments).endswith(f"{words}\n")


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(MODELS)
    return tmp_path / "own.py"


def test_inspect_a_model(own, tmp_path, monkeypatch, capsys):
    """What the model says is not shown, and warnings, logging and streams are as they were when the command ends."""
    target, file = f"{own}:talking", tmp_path / "w.safetensors"
    loaded = zoo.load_model(target)
    save_file(loaded.module.state_dict(), file)
    expected = zoo.inspect(loaded)
    capsys.readouterr()
    before = (list(warnings.filters), logging.root.manager.disable, sys.stdout, sys.stderr)
    told = json.loads(say(monkeypatch, capsys, "inspect", target, "--checkpoint", file, "--json", "-"))
    assert told == expected | {"preprocessing": told["preprocessing"]}
    assert (told["linears"], told["post_gelu"], told["images"]) == (2, 1, [3, 8, 8])
    assert told["preprocessing"]["size"] == [8, 8]
    assert {path.name for path in tmp_path.iterdir()} == {"own.py", "w.safetensors"}
    text = say(monkeypatch, capsys, "inspect", target)
    counts = "linears 2, convolutions 0, Q K^T 0, A V 0, other products 0; sites after a GELU 1, norms that fold 0"
    assert counts in text
    assert "word of its own" not in text
    assert (list(warnings.filters), logging.root.manager.disable, sys.stdout, sys.stderr) == before


def test_inspect_tells_what_does_not_fold(own, monkeypatch, capsys):
    lines = say(monkeypatch, capsys, "inspect", f"{own}:refused").splitlines()
    assert "not folded: norm: it also feeds add.Tensor in the model" in lines
    assert (
        "in float32, because adalog quantizes only linears, convolutions and matrix products: add x 1, layer_norm x 1"
        in lines
    )


@pytest.mark.slow
@pytest.mark.parametrize("environment", [{"HF_ENDPOINT": "http://127.0.0.1:9"}, {"HF_HUB_OFFLINE": "1"}])
def test_weights_that_cannot_be_downloaded(tmp_path, environment):
    pytest.importorskip("timm")
    code, out, err = forked("inspect", "timm:deit_tiny_patch16_224", HF_HOME=str(tmp_path), **environment)
    assert (code, out) == (2, "")
    assert err.startswith("error: the pretrained weights of timm:deit_tiny_patch16_224 cannot be loaded: ")
    assert err.endswith("; give --checkpoint FILE, or --no-pretrained for random weights\n")
    assert err.count("\n") == 1


# --- bad input of `adalog quantize` -----------------------------------------------------------------------------------


OLD = b"an older file"


def noise_of(*shape):
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder of models, weights, images of all sorts, and an output that is there already."""
    folder = tmp_path_factory.mktemp("bad")
    (folder / "own.py").write_text(MODELS)
    (folder / "out.safetensors").write_bytes(OLD)
    (folder / "damaged.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    for name in ("images", "damaged", "empty", "directory"):
        (folder / name).mkdir()
    images = folder / "images"
    turned = Image.Exif()
    turned[274] = 6
    Image.fromarray(noise_of(20, 30, 3)).save(images / "larger.png")
    Image.fromarray(noise_of(5, 5, 3)).save(images / "smaller.png")
    Image.fromarray(noise_of(8, 8, 4), "RGBA").save(images / "alpha.png")
    Image.fromarray(noise_of(9, 9).astype(np.uint16) * 257).save(images / "sixteen.png")
    Image.fromarray(noise_of(12, 8, 4), "CMYK").save(images / "cmyk.jpg")
    Image.fromarray(noise_of(12, 8, 3)).save(images / "turned.jpg", exif=turned)
    Image.fromarray(noise_of(12, 8)).save(images / "grey.png")
    whole = (images / "larger.png").read_bytes()
    (folder / "damaged" / "half.png").write_bytes(whole[: len(whole) // 2])
    weights = {"1.weight": torch.ones(8, 192), "1.bias": torch.ones(8)}
    weights |= {"3.weight": torch.full((3, 8), torch.nan), "3.bias": torch.ones(3)}
    save_file(weights, folder / "nan.safetensors")
    return folder


def run_in(place, *arguments):
    """The exit code, standard output and standard error of `adalog ARGUMENTS`; neither may hold a traceback."""
    code, out, err = forked(*arguments, cwd=place)
    assert "Traceback" not in out + err
    return code, out, err


def files_in(place):
    return {path: path.read_bytes() for path in place.rglob("*") if path.is_file() and "__pycache__" not in path.parts}


def quantize(model):
    return f"quantize {model} --data images --images 3 -o out.safetensors --threads 1"


QUANTIZE = quantize("own.py:small")
TAKEN = "is also an input or another output of this command: choose"
CASES = [
    # models
    (
        quantize("resnet50"),
        "unknown model 'resnet50': give timm:NAME, torchvision:NAME, hf:DIR, hf:ID, demo, or path.py",
    ),
    (quantize("own.py:broken"), "own.py:broken failed: no [luck] today; correct it"),
    (quantize("none.py:model"), "none.py cannot be read: No such file or directory"),
    (
        quantize("own.py:branching"),
        "Branching could not be exported, because it decides by the values of tensors at own.py:",
    ),
    (quantize("own.py:bare"), "own.py:bare does not say how to prepare images: return (module, adalog.Preprocessing"),
    # weights
    (f"{QUANTIZE} --checkpoint nan.safetensors", "nan.safetensors: tensor 3.weight contains NaN: use other"),
    # images
    (f"{QUANTIZE} --data damaged --images 1", "damaged/half.png cannot be read as an image"),
    (f"{QUANTIZE} --images 8", "images has only 7 images, but --images is 8: give --images 7, or more"),
    (
        f"{QUANTIZE} --method adalog++",
        "images has only 7 images, but the stages of the method fit 1024: give --reconstruct-images 7, or more images",
    ),
    (f"{QUANTIZE} --data empty", "empty has no images: give a folder of images"),
    ("quantize own.py:small", "own.py:small has no images of its own: give --data FOLDER with at least 32 images"),
    ("quantize demo --images 1025", "demo has only 1024 images, but --images is 1025: give --images 1024"),
    (f"{QUANTIZE} --method minmax --reconstruct-images 64", "no stage fits images, so 64 images cannot be fitted"),
    (f"{QUANTIZE} --reconstruct-steps 9", "no stage trains, so its steps cannot change: choose the method"),
    # choices
    (f"{QUANTIZE} --bits w1a4", "weight_bits = 1 is not a whole number from 2 to 8, or 32 for float"),
    (f"{QUANTIZE} --bits w4", "bits = 'w4' is not of the form w4a4 or w4a4s3"),
    (
        f"{QUANTIZE} -o vit.onnx",
        "--out vit.onnx is the name of another format: give --out vit.safetensors, and convert it with `adalog export`",
    ),
    (f"{QUANTIZE} -o vit.ADALOG", "give --out vit.safetensors, and convert it with `adalog pack`"),
    (
        f"{QUANTIZE} --method magic",
        "method = 'magic' is not one of uniform, uniform-tensor, symmetric, log2, log-sqrt2, adalog",
    ),
    (f"{QUANTIZE} --pin head", "--pin 'head' is not of the form GLOB=BITS"),
    (f"{QUANTIZE} --pin head=9", "pinned bits of 'head' = 9 is not a whole number from 2 to 8, or 32 for float"),
    (f"{QUANTIZE} --pin hat=8", "pinned: no site's name matches 'hat'; the closest are"),
    (f"{QUANTIZE} --device abacus", "--device 'abacus' is not available on this machine: choose from cpu"),
    (f"{QUANTIZE} --device cuda:99", "--device 'cuda:99' is not available on this machine: choose from cpu"),
    # outputs
    (f"{QUANTIZE} -o directory", "directory cannot be written: Is a directory; choose a file in a folder"),
    (f"{QUANTIZE} -o own.py/out", "own.py/out cannot be written: Not a directory"),
    (f"{QUANTIZE} --json directory", "directory cannot be written: Is a directory"),
    ("evaluate out.safetensors --data images", "images has no labels: add them"),
    ("demo --out own.py", "own.py/levels.png cannot be written: Not a directory"),
    ("inspect .", "is a folder: name a file in it"),
    (f"{quantize('demo')} -o -", "an output named - is not written to standard output: give the name of a file"),
    (f"{quantize('demo')} -o .", "--out '.' does not name a file: give a file name"),
    ("vectors x.st --site a -o new --json new/a.json", "new/a.json is inside the folder new"),
    ("demo --out . --json demo-w3a3.safetensors", "demo-w3a3.safetensors is also an input or another output"),
    ("quantize demo -o out --json ./out", f"out {TAKEN}"),
    ("quantize x.py:model -o x.py", f"x.py {TAKEN}"),
    ("inspect missing --json missing", f"missing {TAKEN}"),
    ("evaluate x.safetensors --json x.safetensors", f"x.safetensors {TAKEN}"),
    ("bench x.safetensors --json x.safetensors", f"x.safetensors {TAKEN}"),
    # artifacts
    ("evaluate missing.safetensors", "missing.safetensors cannot be read: No such file or directory"),
    ("inspect missing.safetensors", "missing.safetensors cannot be read: No such file or directory"),
    ("inspect [/name].safetensors", "[/name].safetensors cannot be read"),
    ("inspect miss\udcff\x1b[2Jing", "error: miss??[2Jing cannot be read: No such file or directory\n"),
    ("evaluate out.safetensors", "out.safetensors is not an adalog artifact"),
    ("inspect damaged.safetensors", "damaged.safetensors is not an adalog artifact"),
    ("bench damaged.safetensors", "damaged.safetensors is not an adalog artifact"),
    ("inspect own.py", "own.py has to be followed by the function that makes the model: give own.py:function"),
    # other commands
    ("cost own.py:branching", "Branching could not be exported"),
    ("cost x.safetensors --no-pretrained", "path.py:function), not to x.safetensors: leave them out"),
    ("inspect x.safetensors --checkpoint y", "path.py:function), not to x.safetensors: leave them out"),
    ("inspect own.py:small --no-pretrained", "whose function creates its own weights"),
    ("inspect own.py:small --bytes", "--bytes needs an artifact, and own.py:small is a model: quantize it first"),
    ("cost missing.safetensors", "missing.safetensors cannot be read: No such file or directory"),
    ("inspect hf:.", ". has no config.json"),
    ("inspect demo --checkpoint none.pt", "none.pt cannot be read: No such file or directory"),
    ("inspect demo --checkpoint own.py", "own.py is damaged, or contains more than tensors"),
    ("evaluate x.safetensors --no-pretrained", "apply to the full-precision model: add --model"),
    ("evaluate x.safetensors --support .", "--support needs the images of --data: give both"),
    ("evaluate x.safetensors --data nowhere", "nowhere cannot be read: No such file or directory"),
    ("demo --bits w4a4,w1a4", "weight_bits = 1"),
    ("demo --methods adalog,adalog-paper", "--methods 'adalog-paper' is not a method of the demo: choose from uniform"),
]


@pytest.mark.parametrize(("arguments", "told"), CASES)
def test_one_line_and_code_2(place, arguments, told, monkeypatch, capsys):
    monkeypatch.chdir(place)
    if "hf:." in arguments:
        pytest.importorskip("transformers")
    before = files_in(place)
    assert told in refusal(monkeypatch, capsys, *arguments.split())
    assert files_in(place) == before


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "told"), CASES[::30])
def test_one_line_and_code_2_of_a_process(place, arguments, told):
    """Of a few, because a process takes a second."""
    code, out, err = run_in(place, *arguments.split())
    assert (code, out, err[:7], err.count("\n")) == (2, "", "error: ", 1), err
    assert told in err


@pytest.mark.parametrize("option", [("--images", 0), ("--threads", -1), ("--seed", -1), ("--images", "many")])
def test_numbers_out_of_range_are_bad_usage(option, monkeypatch, capsys):
    message = refusal(monkeypatch, capsys, *QUANTIZE.split(), *option)
    assert message.startswith(f"error: Invalid value for '{option[0]}': ")


@pytest.mark.slow
def test_a_folder_that_may_not_be_written(place, tmp_path):
    tmp_path.chmod(0o500)
    if os.access(tmp_path, os.W_OK):
        pytest.skip("the superuser may write anywhere")
    code, _, err = run_in(place, *QUANTIZE.split(), "-o", tmp_path / "out")
    tmp_path.chmod(0o700)
    assert code == 2
    assert "cannot be written: Permission denied; choose a file in a folder that you may write to" in err


def whole_numbers_only(text):
    return json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is no number of JSON"))


@pytest.mark.slow
def test_images_of_every_size_and_kind_calibrate(place, tmp_path):
    """Larger, smaller, with alpha, of 16 bits, CMYK, grey, and turned: as read the right way, each of them."""
    file = tmp_path / "out.safetensors"
    code, out, err = run_in(place, *QUANTIZE.split(), "-o", file, "--json", "-", "--images", 7)
    assert (code, err) == (0, "")
    told = whole_numbers_only(out)
    preparation = zoo.load_model(f"{place / 'own.py'}:small").preprocessing
    images = find_images(place / "images").load(preparation)
    order = [torch.randperm(7, generator=torch.Generator().manual_seed(0)) for _ in range(2)]
    assert told["provenance"]["calibration"] == digest([images[order[0]][order[1]]])
    assert told["provenance"]["preprocessing"]["size"] == [8, 8]
    assert [site["site"] for site in told["sites"]] == ["1", "3"]
    assert told["bytes"] == file.stat().st_size


@pytest.mark.slow
def test_dead_channels_and_constants(place, tmp_path):
    file = tmp_path / "out.safetensors"
    code, out, err = run_in(place, *quantize("own.py:dead").split(), "--bits", "w3a3", "-o", file, "--json", "-")
    assert (code, err) == (0, "")
    sqnr = {site["site"]: site["sqnr"] for site in whole_numbers_only(out)["sites"]}
    assert sqnr["zero"] is None  # it puts out zeros before and after
    assert sqnr["qkv"] > 5
    model = adalog.load(file)
    for images in (torch.randn(2, 3, 8, 8), torch.zeros(2, 3, 8, 8)):
        assert bool(torch.isfinite(model(images)).all())


@pytest.mark.slow
def test_a_full_disk(place):
    resource = pytest.importorskip("resource")

    def little_room():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))

    command = [sys.executable, "-m", "adalog", *QUANTIZE.split()]
    found = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False, preexec_fn=little_room)
    assert (found.returncode, found.stdout, found.stderr.count("\n")) == (1, "", 1)
    assert "File too large; free some space, or choose another folder" in found.stderr
    assert (place / "out.safetensors").read_bytes() == OLD
    assert not list(place.glob(".adalog.*"))
    (place / "out.safetensors.partial").unlink(missing_ok=True)


@pytest.mark.slow
def test_ctrl_c_in_a_process_of_its_own(place, tmp_path):
    arguments = [*quantize(f"{place / 'own.py'}:endless").split(), "--data", str(place / "images")]
    command = [sys.executable, "-m", "adalog", *arguments]

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


# --- what commands refuse before they do anything ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def artifacts_place(tmp_path_factory):
    """A classifier, 12 labelled images, and two artifacts, one of them as a folder for transformers."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "own.py").write_text(CLASSIFIER)
    write_images(folder / "images", {f"{index}.png": index % 7 for index in range(12)})
    loaded = zoo.load_model(f"{folder / 'own.py'}:model")
    images = find_images(folder / "images").load(loaded.preprocessing)
    quantized = adalog.quantize(loaded.module, images, dataclasses.replace(Config.preset("w4a4", "minmax"), images=12))
    quantized.save(folder / "bare.safetensors")
    hub.save(quantized.quantized, folder / "bare", (), None)
    quantized.note(preprocessing=dataclasses.asdict(loaded.preprocessing))
    quantized.save(folder / "made.safetensors")
    hub.save(quantized.quantized, folder / "card", (), None)
    return folder


def test_no_output_takes_the_place_of_what_a_folder_holds(artifacts_place, monkeypatch, capsys):
    data = artifacts_place / "images"
    labels, image = data / "labels.csv", data / "0.png"
    held = artifacts_place / "card" / hub.FILE
    made, own = artifacts_place / "made.safetensors", f"{artifacts_place / 'own.py'}:model"
    before = [path.read_bytes() for path in (labels, image, held)]
    for arguments in (
        ("evaluate", made, "--data", data, "--json", labels),
        ("quantize", own, "--data", data, "--images", 8, "--method", "minmax", "-o", image),
        ("evaluate", artifacts_place / "card", "--data", data, "--json", held),
        ("inspect", f"hf:{artifacts_place / 'card'}", "--json", held),
    ):
        assert "is a file of the input" in refusal(monkeypatch, capsys, *arguments)
    assert before == [path.read_bytes() for path in (labels, image, held)]
    say(monkeypatch, capsys, "evaluate", made, "--data", data, "--json", data / "new.json")  # nothing is there yet
    (data / "out.partial").write_bytes(b"")
    check_outputs(data / "out", data / "out.partial", reads=[data])  # what an unfinished run has left


def test_a_folder_of_an_artifact_names_its_file(artifacts_place, monkeypatch, capsys):
    assert "FixOPs" in say(monkeypatch, capsys, "cost", artifacts_place / "card")
    error = refusal(monkeypatch, capsys, "export", artifacts_place / "card", "-o", artifacts_place / "x.onnx")
    assert f"{artifacts_place / 'card' / hub.FILE}" in error


def test_only_what_runs_in_integers_is_exported(artifacts_place, monkeypatch, capsys):
    """Float products besides do no harm."""
    monkeypatch.chdir(artifacts_place)
    Path("mixed.py").write_text(
        "from torch import nn\n"
        "from adalog.inputs.images import Preprocessing\n"
        "def model():\n"
        "    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 3, 3)), Preprocessing((8, 8), (9, 9))\n"
    )
    arguments = (*quantize("mixed.py:model").split(), "--images", 8, "--method", "minmax")
    say(monkeypatch, capsys, *arguments, "-o", "mixed.safetensors")
    _, error = call(monkeypatch, capsys, "export", "mixed.safetensors", "-o", "mixed.onnx")
    assert "nothing to export" not in error
    say(monkeypatch, capsys, *arguments, "--pin", "*=32", "-o", "float.safetensors")
    assert "nothing to export" in refusal(monkeypatch, capsys, "export", "float.safetensors", "-o", "float.onnx")


@pytest.mark.parametrize("command", ["export", "pack"])
def test_a_file_that_does_not_run_in_integers_is_named(artifacts_place, monkeypatch, capsys, command):
    made = artifacts_place / "paper.safetensors"
    if not made.exists():
        model = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.GELU(), nn.Linear(8, 3))
        adalog.quantize(model, torch.rand(32, 3, 8, 8), adalog.Config.preset("w4a4", "adalog-paper")).save(made)
    error = refusal(monkeypatch, capsys, command, made, "-o", artifacts_place / "paper.out")
    assert "paper.safetensors" in error.split(": site 3 has logarithmic codes with float levels")[0]


def test_a_card_tells_only_of_files_that_are_there(artifacts_place):
    for folder, prepared in (("bare", False), ("card", True)):
        text = (artifacts_place / folder / "README.md").read_text()
        assert (artifacts_place / folder / hub.PREPROCESSING).exists() == prepared
        assert (hub.PREPROCESSING in text) == ("pipeline(" in text) == prepared


def test_times_of_another_artifact(artifacts_place, monkeypatch, capsys):
    monkeypatch.chdir(artifacts_place)
    bench = ("bench", "made.safetensors", "--executor", "torch", "--seconds", 0, "--json", "times.json")
    say(monkeypatch, capsys, *bench)
    say(monkeypatch, capsys, "report", "made.safetensors", "--bench", "times.json", "-o", "one.html")
    error = refusal(monkeypatch, capsys, "report", "bare.safetensors", "--bench", "times.json", "-o", "two.html")
    assert "belongs to another artifact" in error
    assert not Path("two.html").exists()


def test_bench_says_which_model_does_not_fit(artifacts_place, monkeypatch, capsys):
    made = artifacts_place / "made.safetensors"
    error = refusal(monkeypatch, capsys, "bench", made, "--model", "demo", "--seconds", 0)
    assert ("cannot be timed" in error, "integers" in error) == (True, False)


def test_names_of_files_do_not_reach_the_terminal_as_they_are(artifacts_place, monkeypatch, capsys):
    odd = artifacts_place / "b\x1b[31m.safetensors"
    shutil.copy(artifacts_place / "made.safetensors", odd)
    assert "\x1b" not in say(monkeypatch, capsys, "cost", odd)
