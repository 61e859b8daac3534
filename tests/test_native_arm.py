"""The kernels of 64-bit ARM: cross-compiled, run under emulation, and compared with the scalar ones of this machine.

A toy model runs here on the scalar kernels, which equal the reference (test_native_kernels.py). Each call is recorded
with all memory that it reads, and replayed on the emulated processor. All is skipped where g++-aarch64-linux-gnu or
qemu-user, as Debian calls them, is missing.
"""

import ctypes
import gc
import shutil
import struct
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from adalog import Config, library
from adalog.run import abi
from adalog.runtime import native
from test_native_products import check_accumulators
from whole_numbers import codes_of, left_quantizer, model_of, uniform

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


def pointers(structure, start=0):
    """(offset, address) of each pointer in a structure that is not null."""
    for name, kind in structure._fields_:
        offset, value = start + getattr(type(structure), name).offset, getattr(structure, name)
        if isinstance(value, ctypes.Structure):
            yield from pointers(value, offset)
        elif kind is ctypes.c_void_p and value:
            yield offset, value


def memory_behind(address):
    """The bytes from an address to the end of the tensor that holds it."""
    for tensor in (each for each in gc.get_objects() if type(each) is torch.Tensor):
        start, size = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
        if start <= address < start + size:
            return np.ctypeslib.as_array((ctypes.c_ubyte * (start + size - address)).from_address(address))
    raise AssertionError("a pointer to memory that no tensor has")


def numbers(*given):
    return struct.pack(f"{len(given)}q", *given)


class Recorder:
    """Records all calls of kernels. content: of each, as replay.cpp reads it; results: (kind, what it wrote)."""

    def __init__(self, monkeypatch):
        self.content, self.results, self._weights = [], [], {}
        made, bound = abi.Weights.__init__, abi.Context.bind

        def make(weights, codes, zero, *told):
            made(weights, codes, zero, *told)
            self._weights[weights.pointer] = codes.copy(), zero.copy(), (*codes.shape, *weights.choices)

        def bind(context, kernel, arguments):
            return lambda: self._record(kernel, arguments, bound(context, kernel, arguments))

        monkeypatch.setattr(abi.Weights, "__init__", make)
        monkeypatch.setattr(abi.Context, "bind", bind)

    def _record(self, kernel, arguments, call):
        memory, places, seen, told = [], [], {}, ()
        if kernel == "linear":
            *memory, told = self._weights[arguments.weights]
        for offset, address in list(pointers(arguments))[1 if told else 0 :]:
            if address not in seen:
                seen[address] = len(memory)
                memory.append(memory_behind(address))
            places.append((offset, seen[address]))
        content = [numbers(list(abi.KERNELS).index(kernel), len(memory))]
        for each in memory:
            content += [numbers(each.nbytes), each.tobytes()]
        content += [numbers(ctypes.sizeof(arguments)), bytes(arguments), numbers(len(places))]
        content += [numbers(*place) for place in places]
        patches = kernel == "patches"
        written = [arguments.out] if patches else [arguments.out.data, arguments.out.more]
        written = [seen[address] for address in written if address]
        self.content.append(b"".join([*content, numbers(*told, len(written), *written)]))
        status = call()
        kind = abi.CODES if patches else arguments.out.kind
        self.results += [(kind, memory[which].copy()) for which in written]
        return status


def check(recorder, replay, folder):
    """Replay what was recorded on every processor, with every level that it has."""
    file = folder / "calls"
    file.write_bytes(numbers(len(recorder.content)) + b"".join(recorder.content))
    for processor, level in PROCESSORS.items():
        for name in ("scalar", "neon", "i8mm"):
            command = [EMULATOR, "-cpu", processor, str(replay), str(file), str(library.LEVELS.index(name))]
            ran = subprocess.run(command, capture_output=True, check=False)
            if library.LEVELS.index(name) > library.LEVELS.index(level):
                assert ran.returncode == 4  # the processor lacks it
                continue
            assert ran.returncode == 0
            start = 0
            for kind, here in recorder.results:
                there = np.frombuffer(ran.stdout, np.uint8, here.nbytes, start)
                start += here.nbytes
                if kind == abi.SUMS:
                    assert np.array_equal(here, there)
                elif kind == abi.FLOATS:
                    assert np.allclose(here.view(np.float32), there.view(np.float32), rtol=1e-4, atol=1e-4)
                else:  # a float that is rounded otherwise may be another code
                    assert (here != there).mean() < 0.01
            assert start == len(ran.stdout) > 0


@pytest.mark.parametrize(("bits", "tables"), [("w4a4", "u8"), ("w6a6", "u8"), ("w8a8", "u16")])
def test_a_model(calibration, fast, images, replay, tmp_path, monkeypatch, bits, tables):
    config = replace(Config.preset(bits), images=4, search=fast.search, tables=tables)
    recorder = Recorder(monkeypatch)
    compiled = calibration.quantize(config).compile("native", threads=1, level="scalar")
    compiled(images[:2])
    assert len(recorder.content) > 15
    check(recorder, replay, tmp_path)


def test_accumulators(replay, tmp_path, monkeypatch):
    """Equal to the last bit, for codes drawn at random and for the largest ones."""
    recorder = Recorder(monkeypatch)
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        draw = lambda high: int(torch.randint(1, high, (), generator=generator))  # noqa: E731, B023
        kind, table = ("uniform", "log2", "adalog")[seed % 3], (8, 16)[draw(3) - 1]
        width, other, rows, terms, columns = 1 + draw(8), 1 + draw(8), draw(20), draw(300), draw(90)
        heads = draw(4)
        largest = (0, 0, 1, 2)[seed % 4]
        left = left_quantizer(generator, kind, width, table, (heads, 1, 1) if kind == "uniform" and seed % 2 else ())
        codes = codes_of(generator, width, (2, heads, rows, terms), largest)
        if seed % 2:
            right = uniform(generator, other, heads, 1, 1)
            others = codes_of(generator, other, (2, heads, terms, columns), largest)
            model = model_of("aten.matmul.default", left, right, codes.shape, others.shape)
            others = others.mT.contiguous().mT if seed % 4 == 1 else others
        else:
            right = uniform(generator, other, columns, 1)
            codes, others = codes[0], None
            weight = codes_of(generator, other, (columns, terms), largest)
            model = model_of("aten.linear.default", left, right, codes.shape, None, weight)
        check_accumulators("scalar", model, codes, others)
    for seed in range(12):  # convolutions of each channel alone
        generator = torch.Generator().manual_seed(seed)
        width, channels = 2 + seed % 7, (3, 8, 21, 40)[seed % 4]
        right = uniform(generator, 8 - seed % 7, channels, 1, 1, 1)
        left = uniform(generator, width, *((channels, 1, 1) if seed % 2 else ()))
        codes = codes_of(generator, width, (2, channels, 9, 8), (0, 0, 1, 2)[seed % 4])
        weight = codes_of(generator, right.bits, (channels, 1, 3, 3), (0, 1, 2)[seed % 3])
        geometry = ((1 + seed % 2, 1), (1, 1), (1, 1), channels)
        check_accumulators(
            "scalar", model_of("aten.conv2d.default", left, right, codes.shape, None, weight, geometry), codes
        )
    check(recorder, replay, tmp_path)
