"""What `adalog doctor` and `adalog bench` tell, and that the package installs without a compiler."""

import itertools
import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch

from adalog import library
from adalog import version as source_version
from adalog.runtime import EXECUTORS
from adalog.runtime.native import Context
from adalog.study import bench, doctor
from commands import refusal, say

ROOT = Path(__file__).parent.parent
needs_library = pytest.mark.skipif(not library.levels(), reason="installed without a compiler")


@pytest.fixture
def exchange(monkeypatch):
    """Put another library, or none (""), in the place of the installed one."""

    def put(path):
        monkeypatch.setattr(library, "_path", lambda: Path(path) if path else None)
        library.load.cache_clear()

    yield put
    monkeypatch.undo()
    library.load.cache_clear()


# --- doctor ----------------------------------------------------------------------------------------------------------


def test_doctor_as_json_and_as_text(monkeypatch, capsys, tmp_path):
    told = json.loads(say(monkeypatch, capsys, "doctor", "--json", "-"))
    assert told == doctor.examine()
    assert told["python"] == ".".join(map(str, sys.version_info[:3]))
    for name, found in told["packages"].items():
        if found is None:
            with pytest.raises(PackageNotFoundError):
                version(name)
        else:
            assert found == version(name)
    assert told["packages"]["torch"] is not None
    assert set(told["native"]["kernels"]) == set(library.LEVELS)
    assert [name for name, runs in told["native"]["kernels"].items() if runs] == library.levels()
    text = say(monkeypatch, capsys, "doctor", "--json", tmp_path / "told.json")
    assert json.loads((tmp_path / "told.json").read_text()) == told
    words = " ".join(text.split())
    assert f"torch {version('torch')}" in words
    assert told["native"]["why"] is not None or told["native"]["level"] in words


def test_without_a_library_native_is_off(monkeypatch, capsys, exchange):
    exchange("")
    told = json.loads(say(monkeypatch, capsys, "doctor", "--json", "-"))
    assert told["executors"] == [name for name in EXECUTORS if name != "native"]
    found = told["native"]
    assert (found["library"], found["level"], set(found["kernels"].values())) == (None, None, {False})
    assert found["interface"] == {"library": None, "package": library.ABI}
    text = " ".join(say(monkeypatch, capsys, "doctor").split())
    assert "native is not available: " + " ".join(found["why"].split()) in text
    assert "C++17 compiler" in text
    assert "install adalog again" in text


def test_a_library_that_is_none(tmp_path, exchange):
    file = tmp_path / "_native.so"
    file.write_text("no library")
    exchange(file)
    told = doctor.examine()["native"]
    assert (told["library"], told["level"], told["interface"]["library"]) == (str(file), None, None)
    assert told["why"].startswith(f"{file} is not a library of kernels: ")


@needs_library
def test_a_library_of_another_version(monkeypatch, exchange):
    path = library._path()
    assert doctor.examine()["native"]["library"] in (f"adalog/{path.name}", str(path))
    exchange(path)
    monkeypatch.setattr(library, "ABI", library.ABI + 1)
    told = doctor.examine()["native"]
    assert told["interface"] == {"library": library.ABI - 1, "package": library.ABI}
    assert "install adalog again" in told["why"]
    assert told["level"] is None


@needs_library
def test_the_environment_holds_kernels_to_a_level(monkeypatch, capsys):
    monkeypatch.delenv("ADALOG_LEVEL", raising=False)
    every = library.levels()
    assert library.about()["held"] is None
    for level in library.LEVELS:
        monkeypatch.setenv("ADALOG_LEVEL", level)
        assert library.levels() == [name for name in every if library.LEVELS.index(name) <= library.LEVELS.index(level)]
        told = doctor.examine()["native"]
        assert (told["held"], told["level"]) == (level, library.levels()[-1])
        assert Context(1).level == library.levels()[-1]
        assert f"ADALOG_LEVEL limits the kernels to {level}" in " ".join(say(monkeypatch, capsys, "doctor").split())
    monkeypatch.setenv("ADALOG_LEVEL", "fast")
    error = refusal(monkeypatch, capsys, "doctor")
    names = ", ".join(library.LEVELS)
    assert error == f"error: ADALOG_LEVEL = 'fast' is not one of {names}: set it to one of these, or unset it\n"


def test_features_are_those_of_the_first_core(monkeypatch):
    lines = {"model name": "Some CPU", "flags": "fpu avx2 fma sse amx_int8"}
    monkeypatch.setattr(doctor, "_cpuinfo", lambda key: lines.get(key, ""))
    assert doctor.features() == ["avx2", "fma", "amx_int8"]
    assert doctor.processor() == "Some CPU"
    lines.clear()
    assert doctor.features() is None
    assert doctor.processor()


def test_a_measurement_tells_the_sources_it_was_made_with(tmp_path):
    """Any change of them is another hash."""
    assert doctor.machine()["source"] == source_version.source_hash()
    keys = []
    for name, text in (("a.py", "1"), ("a.py", "2"), ("b.cpp", "2"), ("notes.txt", "3")):
        (tmp_path / name).write_text(text)
        keys.append(source_version.source_hash.__wrapped__(tmp_path))
    assert len(set(keys[:3])) == 3
    assert keys[2] == keys[3]


# --- bench -----------------------------------------------------------------------------------------------------------


def test_runs_take_turns(monkeypatch):
    """By a clock of their own: medians of what each run takes, after two turns that do not count."""
    clock, cost, calls = [0.0, 0.0], {"a": iter([9.0, 9.0, 1.0, 2.0, 3.0, 4.0, 50.0]), "b": iter([0.5] * 7)}, []

    def run(name):
        calls.append(name)
        taken = next(cost[name])
        clock[0] += taken
        clock[1] += taken / 2

    monkeypatch.setattr(bench.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(bench.time, "process_time", lambda: clock[1])
    found = bench.in_turn({name: lambda name=name: run(name) for name in cost}, 0)
    assert found == {"a": bench.Times(1.5, 3.0, 5), "b": bench.Times(0.25, 0.5, 5)}
    assert "".join(calls) == "abba" * 3 + "ab"


def test_runs_go_on_for_their_seconds(monkeypatch):
    clock = itertools.count(step=0.25)  # each look at it
    monkeypatch.setattr(bench.time, "perf_counter", lambda: next(clock))
    found = bench.in_turn({"a": lambda: None, "b": lambda: None}, 6)
    # Two runs have 12 s, 48 looks: five turns of four looks, then turns of five, one of them whether time is up.
    assert found["a"].repeats == found["b"].repeats == 5 + 6
    assert found["a"].wall == 0.25


def test_inputs_have_the_types_of_the_example(quantized):
    first, again = (quantized.quantized.noise(3)[0] for _ in range(2))
    assert (first.shape, first.dtype) == ((3, 3, 32, 32), torch.float32)
    assert torch.equal(first, again)


@pytest.fixture
def file(quantized, tmp_path):
    quantized.save(tmp_path / "file.safetensors")
    return tmp_path / "file.safetensors"


@pytest.mark.slow
def test_bench(file, quantized, monkeypatch, capsys, tmp_path):
    arguments = ["bench", file, "--batch", 2, "--batch", 1, "--seconds", 0, "--json", tmp_path / "told.json"]
    text = say(monkeypatch, capsys, *arguments)
    told = json.loads((tmp_path / "told.json").read_text())
    here, missing = bench.executors_here()
    assert {"fake", "torch"} <= set(here)
    assert ("native" in here) == bool(library.levels()) == ("native" not in missing)
    assert (told["file"], told["threads"], told["absent"]) == (str(file), 1, missing)
    assert [(row["batch"], row["executor"]) for row in told["rows"]] == list(itertools.product((1, 2), here))
    weights = sum(value.codes.numel() for value in quantized.program.weights.values())
    for row in told["rows"]:
        assert row["executor"] in text
        assert min(row["cpu_ms"], row["load_seconds"]) > 0
        assert row["repeats"] >= 5
        assert row["images_per_second"] == pytest.approx(1e3 * row["batch"] / row["wall_ms"])
    by_name = {row["executor"]: row["weight_bytes"] for row in told["rows"]}
    assert (by_name["fake"], by_name["torch"]) == (4 * weights, weights)  # four bytes and a byte each
    if "native" in by_name:  # half a byte each where they have 4 bits, and some padding
        assert by_name["native"] < 4 * by_name["torch"]


@pytest.mark.slow
def test_bench_beside_full_precision(file, monkeypatch, capsys):
    only = ["bench", file, "--seconds", 0, "--executor", "torch", "--json", "-"]
    told = json.loads(say(monkeypatch, capsys, *only, "--model", "demo", "--no-pretrained"))
    assert {row["executor"]: row["load_seconds"] is None for row in told["rows"]} == {"torch": False, "fp32": True}
    assert told["absent"] == {}
    error = refusal(monkeypatch, capsys, *only, "--no-pretrained")
    assert error == "error: --checkpoint and --no-pretrained apply to the full-precision model: add --model\n"


@pytest.mark.slow
def test_bench_refuses_what_does_not_run(file, monkeypatch, capsys, exchange):
    error = refusal(monkeypatch, capsys, "bench", file, "--executor", "quick")
    assert error == f"error: --executor 'quick' is not one of fake, {', '.join(EXECUTORS)}\n"
    exchange("")
    error = refusal(monkeypatch, capsys, "bench", file, "--executor", "native")
    assert error.startswith("error: executor = 'native' does not run here: there is no adalog/_native*.so")
    told = json.loads(say(monkeypatch, capsys, "bench", file, "--seconds", 0, "--json", "-"))
    assert list(told["absent"]) == ["native"]
    assert {row["executor"] for row in told["rows"]} == {"fake", "torch"}


# --- installed -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("compiler", [False, True])
def test_installing_takes_no_compiler(tmp_path, compiler):
    """Of a clean copy of the sources, into a folder of its own.

    To save minutes, the compiler is a script that writes the library that is there instead of compiling it again.
    """
    built, note = library.load()
    if compiler and built is None:
        pytest.skip("there is no compiled library")
    sources, target = tmp_path / "sources", tmp_path / "target"
    left_out = shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT / "src", sources / "src", ignore=left_out)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    environment = {name: value for name, value in os.environ.items() if name not in ("CC", "CXX", "ADALOG_NATIVE")}
    stand_in = tmp_path / "compiler"
    library_file = note.removeprefix("uses ")
    stand_in.write_text(
        f'#!/bin/sh\nfor word; do if [ "$before" = -o ]; then cp "{library_file}" "$word"; fi; before=$word; done\n'
    )
    stand_in.chmod(0o755)
    environment |= dict.fromkeys(("CC", "CXX"), str(stand_in) if compiler else "false")
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", target, sources]
    if int((doctor.version_of("setuptools") or "0").partition(".")[0]) >= 77:  # as pyproject.toml wants it
        install.append("--no-build-isolation")
    subprocess.run(install, env=environment, capture_output=True, check=True)
    environment["PYTHONPATH"] = str(target)
    script = "import adalog.cli; print(adalog.__file__); adalog.cli.main()"
    command = [sys.executable, "-c", script, "doctor", "--json", "-"]
    run = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    file, _, told = run.stdout.partition("\n")
    assert Path(file).is_relative_to(target)
    found = json.loads(told)["native"]
    if compiler:
        assert found["library"].startswith("adalog/_native")
        assert (found["kernels"]["scalar"], found["why"]) == (True, None)
    else:
        assert found["library"] is None
        assert "there was no C++17 compiler" in found["why"]
