"""The command line as a user runs it: in a process of its own, judged by its exit code, its output and its files."""

import json
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from safetensors.torch import save_file

from adalog import METHODS, Config
from adalog.cli import main
from adalog.inputs import zoo
from commands import call, run, say

COMMANDS = ("demo", "quantize", "evaluate", "inspect", "cost", "bench", "doctor")


def test_help(monkeypatch, capsys):
    text = say(monkeypatch, capsys, "--help")
    for word in ("Usage: ", *COMMANDS):
        assert word in text


@pytest.mark.slow
@pytest.mark.parametrize("start", [[sys.executable, "-m", "adalog"], [Path(sys.executable).with_name("adalog")]])
def test_help_in_a_process_of_its_own(start):
    result = subprocess.run([*start, "--help"], capture_output=True, text=True, check=True)
    for word in ("Usage: ", *COMMANDS):
        assert word in result.stdout


def test_methods(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["adalog", "methods", "--json", "-"])
    with pytest.raises(SystemExit, match="0"):
        main()
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == list(METHODS)
    for row in rows:
        assert set(row) == {"name", "label", "source", "choices"}
        assert row["label"] == METHODS[row["name"]].label
        assert Config.from_json(json.dumps(row["choices"])) == Config.preset("w4a4", row["name"])
    monkeypatch.setattr(sys, "argv", ["adalog", "methods", "--json", str(tmp_path / "methods")])
    with pytest.raises(SystemExit, match="0"):
        main()
    table = capsys.readouterr().out
    assert "repq-vit" in table
    assert "ICCV" in table
    assert "apq-vit (our reading)" in table
    assert json.loads((tmp_path / "methods").read_text()) == rows


@pytest.mark.slow
def test_a_refusal_in_a_process_of_its_own(tmp_path):
    assert (
        run("inspect", "missing", cwd=tmp_path, code=2) == "error: missing cannot be read: No such file or directory\n"
    )


@pytest.mark.slow
def test_importing_loads_no_optional_package():
    names = ("timm", "torchvision", "transformers", "typer", "rich", "matplotlib")
    script = f"import sys, adalog; print([name for name in {names} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


TAKES_NOTHING = [("/dev/full", "No space left on device"), (None, "it is closed"), ("pipe", "Broken pipe")]


@pytest.mark.parametrize(("out", "why"), TAKES_NOTHING)
def test_standard_output_that_takes_nothing(quantized, tmp_path, monkeypatch, capsys, out, why):
    quantized.save(tmp_path / "file")
    reader, pipe = os.pipe()
    os.close(reader)
    with os.fdopen(pipe if out == "pipe" else os.open("/dev/full", os.O_WRONLY), "w") as target:
        monkeypatch.setattr(sys, "stdout", None if out is None else target)
        assert call(monkeypatch, capsys, "inspect", tmp_path / "file") == (
            1,
            f"failed: cannot write to standard output: {why}\n",
        )


@pytest.mark.slow
@pytest.mark.parametrize(("out", "why"), TAKES_NOTHING)
def test_standard_output_of_a_process_that_takes_nothing(quantized, tmp_path, out, why):
    quantized.save(tmp_path / "file")
    reader, pipe = os.pipe()
    os.close(reader)
    with os.fdopen(pipe if out == "pipe" else os.open("/dev/full", os.O_WRONLY), "wb") as target:
        result = subprocess.run(
            [sys.executable, "-m", "adalog", "inspect", tmp_path / "file"],
            stdout=target,
            stderr=subprocess.PIPE,
            preexec_fn=(lambda: os.close(1)) if out is None else None,
            text=True,
            check=False,
        )
    assert (result.returncode, result.stderr) == (1, f"failed: cannot write to standard output: {why}\n")


def damaged(folder):
    file = folder / "damaged.safetensors"
    file.write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    return file


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["quantize", "demo", "--bits", "w4"], "bits = 'w4' is not of the form w4a4 or w4a4s3"),
        (["quantize", "demo", "--bits", "w9a4"], "weight_bits = 9 is not a whole number from 2 to 8"),
        (["quantize", "demo", "--method", "magic"], "method = 'magic' is none of"),
        (["quantize", "resnet50"], "'resnet50'"),
        (["evaluate", "missing.safetensors"], "missing.safetensors cannot be read: No such file or directory"),
        (["inspect", "missing.safetensors"], "missing.safetensors cannot be read: No such file or directory"),
        (["evaluate", damaged], "damaged.safetensors is not an adalog artifact"),
        (["cost", "missing.safetensors"], "missing.safetensors cannot be read: No such file or directory"),
        (["cost", "tim:vit"], "unknown model 'tim:vit': give timm:NAME"),
        (["cost", "x.safetensors", "--no-pretrained"], "path.py:function), not to x.safetensors: leave them out"),
        (["evaluate", "x.safetensors", "--no-pretrained"], "apply to the full-precision model: add --model"),
        (["evaluate", "x.safetensors", "--support", "."], "--support needs the images of --data: give both"),
        (["evaluate", "x.safetensors", "--data", "nowhere"], "nowhere cannot be read: No such file or directory"),
        (["inspect", damaged], "damaged.safetensors is not an adalog artifact"),
        (["bench", damaged], "damaged.safetensors is not an adalog artifact"),
        (["bench", "x.safetensors", "--json", "x.safetensors"], "x.safetensors is also an input or another output of"),
        (["inspect", "."], "is a folder: name a file in it"),
        (["quantize", "demo", "-o", "."], "--out '.' does not name a file: give a file name"),
        (
            ["vectors", "x.st", "--site", "a", "-o", "new", "--json", "new/a.json"],
            "new/a.json is inside the folder new",
        ),
        (["inspect", "[/name].safetensors"], "[/name].safetensors cannot be read"),
        (["demo", "--bits", "w4a4,w1a4"], "weight_bits = 1"),
        (
            ["demo", "--methods", "adalog,adalog-paper"],
            "--methods 'adalog-paper' is not a method of the demo: choose from uniform",
        ),
        (
            ["demo", "--out", ".", "--json", "demo-w3a3.safetensors"],
            "demo-w3a3.safetensors is also an input or another output",
        ),
        (
            ["quantize", "demo", "-o", "out", "--json", "./out"],
            "out is also an input or another output of this command: choose",
        ),
        (
            ["quantize", "x.py:model", "-o", "x.py"],
            "x.py is also an input or another output of this command: choose another",
        ),
        (
            ["inspect", "missing", "--json", "missing"],
            "missing is also an input or another output of this command: choose",
        ),
        (
            ["evaluate", "x.safetensors", "--json", "x.safetensors"],
            "x.safetensors is also an input or another output of",
        ),
        (["inspect", "miss\udcff\x1b[2Jing"], "error: miss??[2Jing cannot be read: No such file or directory\n"),
    ],
)
def test_bad_input_is_one_line_and_code_2(tmp_path, monkeypatch, capsys, arguments, told):
    monkeypatch.chdir(tmp_path)
    words = [argument(tmp_path) if callable(argument) else argument for argument in arguments]
    code, message = call(monkeypatch, capsys, *words)
    assert code == 2
    assert message.startswith("error: ")
    assert told in message
    assert message.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} <= {"damaged.safetensors"}


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
def test_an_error_that_nobody_foresaw(monkeypatch, capsys, debug):
    def fail():
        raise KeyError("gone [wrong]")

    monkeypatch.setattr("adalog.cli.doctor.examine", fail)
    code, message = call(monkeypatch, capsys, *["--debug"] * debug, "doctor")
    assert code == 1
    assert message.endswith("failed: KeyError: 'gone [wrong]'\n")
    assert ("Traceback" in message) == debug


def test_ctrl_c(monkeypatch, capsys):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr("adalog.cli.doctor.examine", interrupt)
    assert call(monkeypatch, capsys, "doctor") == (1, "interrupted\n")


def test_nothing_stays_silenced(monkeypatch, capsys, tmp_path):
    """A command that quiets others while it works leaves warnings, logging and streams as they were."""
    (tmp_path / "own.py").write_text(OWN)
    before = (list(warnings.filters), logging.root.manager.disable, sys.stdout, sys.stderr)
    say(monkeypatch, capsys, "inspect", f"{tmp_path / 'own.py'}:model")
    assert (list(warnings.filters), logging.root.manager.disable, sys.stdout, sys.stderr) == before


@pytest.mark.parametrize("arguments", [["nothing"], ["quantize"], ["inspect", "x", "--colour"]])
def test_bad_usage_is_code_2(monkeypatch, capsys, arguments):
    code, message = call(monkeypatch, capsys, *arguments)
    assert code == 2
    assert "Usage" in message


# --- models by name --------------------------------------------------------------------------------------------------

OWN = """
import sys, warnings
from torch import nn
from adalog.inputs.images import Preprocessing

def model():
    print("a word of its own")
    print("and another", file=sys.stderr)
    warnings.warn("a warning")
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 4), nn.GELU(), nn.Linear(4, 2)), Preprocessing((8, 8), (8, 8))

class Refused(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.norm(x)
        return x + self.fc(x)

def refused():
    return Refused(), Preprocessing((8, 8), (8, 8))

def broken():
    raise ValueError("no [luck] today")
"""


def run_quietly(*arguments, **environment):
    """The exit code, standard output and standard error of the same in an environment with these variables."""
    command = [sys.executable, "-m", "adalog", *map(str, arguments)]
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | environment, timeout=60
    )
    return result.returncode, result.stdout, result.stderr


@pytest.mark.slow
def test_inspect_a_model(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    target, file = f"{tmp_path / 'own.py'}:model", tmp_path / "w.safetensors"
    save_file(zoo.load_model(target).module.state_dict(), file)
    code, out, err = run_quietly("inspect", target, "--checkpoint", file, "--json", "-")
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert told == zoo.inspect(zoo.load_model(target)) | {"preprocessing": told["preprocessing"]}
    assert (told["linears"], told["post_gelu"], told["images"]) == (2, 1, [3, 8, 8])
    assert told["preprocessing"]["size"] == [8, 8]
    assert {path.name for path in tmp_path.iterdir()} == {"own.py", "w.safetensors"}


def test_inspect_a_model_as_a_table(tmp_path, monkeypatch, capsys):
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.setattr(sys, "argv", ["adalog", "inspect", f"{tmp_path / 'own.py'}:model"])
    with pytest.raises(SystemExit) as stopped:
        main()
    told = capsys.readouterr()
    assert not stopped.value.code
    assert "2 linears, 0 convolutions, 0 Q K^T, 0 A V, 0 other products; 1 sites after a GELU, 0 norms fold" in told.out
    assert "word of its own" not in told.out
    assert told.err == ""


def test_inspect_tells_what_does_not_fold(tmp_path, monkeypatch, capsys):
    (tmp_path / "own.py").write_text(OWN)
    lines = say(monkeypatch, capsys, "inspect", f"{tmp_path / 'own.py'}:refused").splitlines()
    assert "not folded: norm: it also feeds add.Tensor in the model" in lines
    assert "in float32, because they do not multiply two tensors: add x 1, layer_norm x 1" in lines


@pytest.mark.slow
@pytest.mark.parametrize("environment", [{"HF_ENDPOINT": "http://127.0.0.1:9"}, {"HF_HUB_OFFLINE": "1"}])
def test_weights_that_cannot_be_downloaded(tmp_path, environment):
    pytest.importorskip("timm")
    code, out, err = run_quietly("inspect", "timm:deit_tiny_patch16_224", HF_HOME=str(tmp_path), **environment)
    assert (code, out) == (2, "")
    assert err.startswith("error: the pretrained weights of timm:deit_tiny_patch16_224 cannot be loaded: ")
    assert err.endswith("; give --checkpoint FILE, or --no-pretrained for random weights\n")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["inspect", "own.py:broken"], "own.py:broken failed: no [luck] today; correct it"),
        (["inspect", "own.py:nothing"], "own.py has no function 'nothing': it has model, Refused, refused and 1 more"),
        (["inspect", "own.py"], "own.py is not an adalog artifact"),
        (["inspect", "none.py:model"], "none.py cannot be read: No such file or directory"),
        (["inspect", "own.py:model", "--no-pretrained"], "whose function creates its own weights"),
        (
            ["inspect", "own.py:model", "--bytes"],
            "--bytes needs an artifact, and own.py:model is a model: quantize it first",
        ),
        (["inspect", "x.safetensors", "--no-pretrained"], "path.py:function), not to x.safetensors: leave them out"),
        (["inspect", "x.safetensors", "--checkpoint", "y"], "path.py:function), not to x.safetensors: leave them out"),
        (["inspect", "tim:vit"], "unknown model 'tim:vit': give timm:NAME"),
        (["inspect", "hf:."], ". has no config.json"),
        (["inspect", "demo", "--checkpoint", "none.pt"], "none.pt cannot be read: No such file or directory"),
        (["inspect", "demo", "--checkpoint", "own.py"], "own.py is damaged, or contains more than tensors"),
    ],
)
def test_models_that_are_refused(tmp_path, monkeypatch, capsys, arguments, told):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    if arguments[1].startswith("hf:"):
        pytest.importorskip("transformers")
    code, message = call(monkeypatch, capsys, *arguments)
    assert code == 2
    assert message.startswith("error: ")
    assert told in message
    assert message.count("\n") == 1
