"""The kernels of 64-bit ARM: cross-compiled, run under emulation, and compared with the scalar ones of this machine.

A toy model runs here on the scalar kernels, which equal the reference (test_native_kernels.py). Each call is recorded
with all memory that it reads, and replayed on the emulated processor. All is skipped where g++-aarch64-linux-gnu or
qemu-user, as Debian calls them, is missing.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

from adalog import library
from adalog.runtime import native
from recorded_kernels import Recorder, run_model, run_products

COMPILER, EMULATOR = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not library.levels(), reason=f"no kernels: {library.why()}"),
    pytest.mark.skipif(not (COMPILER and EMULATOR), reason="needs g++-aarch64-linux-gnu and qemu-user"),
]
# Processors to emulate, with the fastest level that each has.
PROCESSORS = {"cortex-a57": "scalar", "neoverse-n1": "neon", "max": "i8mm"}


@pytest.fixture(scope="module")
def replay(tmp_path_factory):
    """The program that replays calls, for 64-bit ARM."""
    built = tmp_path_factory.mktemp("arm") / "replay"
    kernels = Path(native.__file__).with_name("native.cpp")
    flags = ["-O1", "-std=c++17", "-static", "-pthread", f"-I{kernels.parent}"]
    sources = [str(kernels), str(Path(__file__).with_name("replay.cpp"))]
    subprocess.run([COMPILER, *flags, *sources, "-o", str(built)], check=True)
    return built


def check(recorder, replay, folder):
    """Replay what was recorded on every processor, with every level that it has."""
    recorder.save(folder / "calls")
    for processor, level in PROCESSORS.items():
        for name in ("scalar", "neon", "i8mm"):
            level_and_threads = str(library.LEVELS.index(name)), "2"
            command = [EMULATOR, "-cpu", processor, str(replay), str(folder / "calls"), *level_and_threads]
            ran = subprocess.run(command, capture_output=True, check=False)
            if library.LEVELS.index(name) > library.LEVELS.index(level):
                assert ran.returncode == 4  # the processor lacks it
                continue
            assert ran.returncode == 0
            recorder.check(ran.stdout)


@pytest.mark.parametrize(("bits", "tables"), [("w4a4", "u8"), ("w6a6", "u8"), ("w8a8", "u16")])
def test_a_model(calibration, fast, images, replay, tmp_path, monkeypatch, bits, tables):
    recorder = Recorder(monkeypatch)
    run_model(calibration, images, fast.search, bits, tables)
    assert len(recorder.content) > 15
    check(recorder, replay, tmp_path)


def test_accumulators(replay, tmp_path, monkeypatch):
    recorder = Recorder(monkeypatch)
    run_products()
    check(recorder, replay, tmp_path)
