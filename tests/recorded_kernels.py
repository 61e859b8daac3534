"""Calls of kernels, recorded with all memory that they read, which tests/replay.cpp repeats on another processor.

The calls run here on the scalar kernels, which equal the reference (test_native_kernels.py).
"""

import ctypes
import gc
import struct
from dataclasses import replace

import numpy as np
import torch

from adalog import Config
from adalog.quantizers import UniformQuantizer
from adalog.runtime.native import abi
from test_native_products import check_accumulators
from whole_numbers import codes_of, computed_product, left_quantizer, model_of, stored_product


def laid_out(structure, pointer):
    """A structure for a processor whose pointers take this many bytes: its bytes, alignment and [(offset, address)].

    The bytes of pointers are zero, and pointers that are null have no address.
    """
    content, places, widest = bytearray(), [], 1
    for name, kind in structure._fields_:
        value, inner = getattr(structure, name), []
        if isinstance(value, ctypes.Structure):
            part, alignment, inner = laid_out(value, pointer)
        elif kind is ctypes.c_void_p:
            part, alignment, inner = bytes(pointer), pointer, [(0, value)] if value else []
        else:
            part = bytes(value if isinstance(value, ctypes.Array) else kind(value))
            alignment = ctypes.alignment(kind)
        content += bytes(-len(content) % alignment)
        places += [(len(content) + offset, address) for offset, address in inner]
        content += part
        widest = max(widest, alignment)
    return bytes(content) + bytes(-len(content) % widest), widest, places


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
    """Records all calls of kernels. content: of each, as replay.cpp reads it; results: (kind, what it wrote).

    pointer: the bytes of a pointer on the processor that repeats the calls.
    """

    def __init__(self, monkeypatch, pointer=8):
        self.content, self.results, self._weights, self._pointer = [], [], {}, pointer
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
        layout, _, pointers = laid_out(arguments, self._pointer)
        for offset, address in pointers[1 if told else 0 :]:
            if address not in seen:
                seen[address] = len(memory)
                memory.append(memory_behind(address))
            places.append((offset, seen[address]))
        content = [numbers(list(abi.KERNELS).index(kernel), len(memory))]
        for each in memory:
            content += [numbers(each.nbytes), each.tobytes()]
        content += [numbers(len(layout)), layout, numbers(len(places))]
        content += [numbers(*place) for place in places]
        patches = kernel == "patches"
        written = [arguments.out] if patches else [arguments.out.data, arguments.out.more]
        written = [seen[address] for address in written if address]
        self.content.append(b"".join([*content, numbers(*told, len(written), *written)]))
        status = call()
        kind = abi.CODES if patches else arguments.out.kind
        self.results += [(kind, memory[which].copy()) for which in written]
        return status

    def save(self, file):
        """Write all calls to a file for replay.cpp."""
        file.write_bytes(numbers(len(self.content)) + b"".join(self.content))

    def check(self, output):
        """Compare what the other processor wrote. Accumulators are equal to the last bit."""
        start = 0
        for kind, here in self.results:
            there = np.frombuffer(output, np.uint8, here.nbytes, start)
            start += here.nbytes
            if kind == abi.SUMS:
                assert np.array_equal(here, there)
            elif kind == abi.FLOATS:
                assert np.allclose(here.view(np.float32), there.view(np.float32), rtol=1e-4, atol=1e-4)
            else:  # a float that is rounded otherwise may be another code
                assert (here != there).mean() < 0.01
        assert start == len(output) > 0


def run_model(calibration, images, search, bits, tables):
    """Run a model of two images on the scalar kernels."""
    config = replace(Config.preset(bits), images=4, search=search, tables=tables)
    calibration.quantize(config).compile("native", threads=1, level="scalar")(images[:2])


def run_products():
    """Compute accumulators on the scalar kernels, for codes drawn at random and for the largest ones."""
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        draw = lambda high: int(torch.randint(1, high, (), generator=generator))  # noqa: E731, B023
        kind, table = ("uniform", "log2", "adalog")[seed % 3], (8, 16)[draw(3) - 1]
        widths, heads, rows, terms, columns = (1 + draw(8), 1 + draw(8)), draw(4), draw(20), draw(300), draw(90)
        drawn, largest = (generator, kind, widths, table), (0, 0, 1, 2)[seed % 4]
        if seed % 2:
            model, codes, others = computed_product(*drawn, (2, heads, rows, terms), columns, largest)
            others = others.mT.contiguous().mT if seed % 4 == 1 else others
            check_accumulators("scalar", model, codes, others)
        else:
            model, codes, _ = stored_product(*drawn, (heads, rows, terms), (columns, terms), largest)
            check_accumulators("scalar", model, codes)
    for seed in range(6):  # long sums of codes below 16, which the level `wasm` computes for two rows at once
        generator = torch.Generator().manual_seed(seed)
        zero_point = torch.tensor([0.0, 7.0, 15.0]).repeat(12)[:, None]
        right = UniformQuantizer(torch.rand(36, 1, generator=generator) + 0.1, zero_point, 4)
        codes = codes_of(generator, 4, (3 + seed, 700), (0, 2)[seed % 2])
        weight = codes_of(generator, 4, (36, 700), (0, 1, 2)[seed % 3])
        left = left_quantizer(generator, "uniform", 4, 8, ())
        check_accumulators("scalar", model_of("aten.linear.default", left, right, codes.shape, None, weight), codes)
    for seed in range(12):  # convolutions of each channel alone
        channels = (3, 8, 21, 40)[seed % 4]
        shapes, own = ((2, channels, 9, 8), (channels, 1, 3, 3)), (channels, 1, 1) if seed % 2 else ()
        drawn = torch.Generator().manual_seed(seed), "uniform", (2 + seed % 7, 8 - seed % 7), 8
        geometry = (1 + seed % 2, 1), (1, 1), (1, 1), channels
        model, codes, _ = stored_product(*drawn, *shapes, (0, 0, 1, 2)[seed % 4], own, geometry)
        check_accumulators("scalar", model, codes)
