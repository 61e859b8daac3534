"""The compiled kernels, at every level that runs here: the accumulators of the reference, and what they refuse."""

import ctypes
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adalog import library
from adalog.quantizers import UniformQuantizer
from adalog.runtime import native
from adalog.runtime.native import abi, products
from adalog.runtime.native.arena import Layout
from adalog.runtime.native.tables import Lookup, steps_of
from stored import packed
from strategies import bits, normal, seeds
from test_native_model import FLAGS
from test_run import HOSTILE
from whole_numbers import left_quantizer, model_of, needs_kernels, site_of

LEVELS = library.levels()
every_level = pytest.mark.parametrize("level", LEVELS or [pytest.param("none", marks=needs_kernels)])
few = settings(max_examples=12)  # at each level
tables = st.sampled_from([8, 16])
SOURCES = [
    Path(native.__file__).with_name("native.cpp"),
    Path(native.__file__).with_name("model.cpp"),
    Path(library.__file__).parent / "quantizers" / "elementwise.cpp",
]


# --- functions of few values -----------------------------------------------------------------------------------------


@every_level
@few
@given(st.integers(1, 90), st.integers(1, 70), st.data())
def test_rows_have_their_places(level, columns, count, data):
    """Accumulators, and floats with a residual: each row where it is told, none twice, and some nowhere."""
    context, site = abi.Context(2, level), _site(columns, 70)
    places = torch.tensor(data.draw(st.permutations(range(count + 5)))[:count], dtype=torch.int32)
    places[data.draw(st.lists(st.integers(0, count - 1), max_size=5))] = -1
    added_to = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count)), dtype=torch.int32)
    told = {"place": places.data_ptr(), "places": count}
    weights, rows = products.weights_of(site), torch.arange(count * 70).remainder_(16).to(torch.uint8).view(count, 70)
    plain, sums = torch.empty(count, columns, dtype=torch.int32), torch.full((count + 5, columns), 7, dtype=torch.int32)
    for out, where in ((plain, {}), (sums, told)):
        kind = abi.Output(kind=abi.SUMS, **products.place(out), **where)
        context.run("linear", products.linear(weights, [rows], kind))
    wanted = torch.full_like(sums, 7)
    wanted[places[places >= 0].long()] = plain[places >= 0]
    assert torch.equal(sums, wanted)
    one, none, residual = torch.ones(columns), torch.zeros(columns), torch.randn(3, columns)
    floats = torch.zeros(count + 5, columns)
    parameters = {"scale": one.data_ptr(), "bias": none.data_ptr(), "parameters": columns}
    told |= {"residual": residual.data_ptr(), "residual_bytes": residual.nbytes, "added_to": added_to.data_ptr()}
    kind = abi.Output(kind=abi.FLOATS, **parameters, **products.place(floats), **told)
    context.run("linear", products.linear(weights, [rows], kind))
    wanted = torch.zeros_like(floats)
    wanted[places[places >= 0].long()] = (plain + residual[added_to.long()])[places >= 0]
    assert torch.equal(floats, wanted)


@every_level
@few
@given(st.sampled_from([0, 1, 15, 31, 70, 255, 500]), st.sampled_from(["even", "crowded", "far", "tiny"]), bits, seeds)
def test_functions_of_few_values(level, count, spread, width, seed):
    """On thresholds, beside them, between them and far beyond, however close they lie to each other."""
    generator = torch.Generator().manual_seed(seed)
    thresholds = torch.randn(count, generator=generator)
    spreads = {
        "even": lambda x: x,
        "crowded": lambda x: x**9,  # most of them about zero
        "far": lambda x: x * 1e37,
        "tiny": lambda x: x * 1e-42 + 1,  # ends up as 1, and zero a threshold
    }
    thresholds = spreads[spread](thresholds).unique()
    planes = 2 if width > 4 else 1
    values = torch.randint(256**planes, (len(thresholds) + 1,), generator=generator, dtype=torch.int32)
    far = torch.tensor([0.0, math.inf, -math.inf, 3e38, -3e38, 1e-45])
    beside = [torch.nextafter(thresholds, torch.tensor(end)) for end in (-math.inf, math.inf)]
    x = torch.cat([far, thresholds, *beside, torch.randn(99, generator=generator)])
    context, rows = abi.Context(1, level), x.view(1, -1)
    layout, out = Layout(context), torch.zeros(2, len(x), dtype=torch.uint8)
    one, finish = torch.ones(len(x)).double(), Lookup(thresholds, values, planes)
    output = layout.output(finish, [plane.view(1, -1) for plane in out[:planes]], one, None)
    context.run("encode", abi.Encode(**products.row_fields(rows), out=output))
    assert torch.equal(out[0].int() + 256 * out[1].int(), values[torch.searchsorted(thresholds, rows[0], right=True)])


ACTIVATIONS = {
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "silu": torch.nn.functional.silu,
    "hardswish": torch.nn.functional.hardswish,
    "sigmoid": torch.sigmoid,
}


@every_level
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(level, name):
    """Of numbers small and large, of those at ends, and of what is no number; as floats and as codes."""
    assert {"", *ACTIVATIONS} == {*abi.ACTIVATIONS}
    sizes = torch.exp2(torch.linspace(-30, 7, 999))
    x = torch.cat([sizes, -sizes, torch.linspace(-8, 8, 999), torch.tensor([0.0, 3.0, -3.0, 1e30])])
    wanted, context, layout = ACTIVATIONS[name](x.double()), abi.Context(1, level), Layout(abi.Context(1, level))
    out, odd = torch.zeros(1, len(x) + 2), torch.tensor([math.inf, math.nan])
    given = torch.cat([x, odd])
    output = layout.output(None, [out], torch.ones(len(given)).double(), None, name)
    context.run("encode", abi.Encode(**products.row_fields(given[None]), out=output))
    assert torch.allclose(out[0, : len(x)].double(), wanted, rtol=4e-7, atol=4e-7)
    assert out[0, -2] == ACTIVATIONS[name](odd[0])
    assert out[0, -1].isnan()


def test_thresholds_of_a_function_that_rises_and_falls():
    def codes(x):
        return (torch.nn.functional.gelu(x.double()) * 20).round().clamp(-4, 9).long()

    thresholds, values = steps_of(codes)
    assert bool((thresholds[1:] > thresholds[:-1]).all())
    assert len(values) == len(thresholds) + 1 > 14  # down and up again
    x = torch.cat([thresholds, torch.nextafter(thresholds, torch.tensor(-100.0)), torch.randn(999)])
    assert torch.equal(values[torch.searchsorted(thresholds, x, right=True)], codes(x))


@every_level
@few
@given(st.sampled_from(["uniform", "adalog", "log2"]), bits, tables, seeds)
def test_codes_are_the_quantizers_own(level, kind, width, table, seed):
    """On levels, ties, ends and far beyond: a linear that multiplies by one tells the codes."""
    generator = torch.Generator().manual_seed(seed)
    quantizer = left_quantizer(generator, kind, width, table, ())
    values = quantizer.dequantize(torch.arange(2**width)).float()
    ties = (values[1:] + values[:-1]) / 2
    x = torch.cat([values, ties, torch.tensor([0.0, -1.0, 1e30, -1e30, 1e-30]), normal(64, seed=seed).float()])[:, None]
    one = UniformQuantizer(torch.ones(1, 1), torch.zeros(1, 1), 4)
    model = model_of("aten.linear.default", quantizer, one, x.shape, None, torch.ones(1, 1, dtype=torch.uint8))
    found, wanted = model.compile("native", level=level)(x), model.compile("reference")(x)
    assert torch.allclose(found, wanted, rtol=1e-6, atol=1e-6 * float(values.abs().max()))


# --- refusals --------------------------------------------------------------------------------------------------------


def own_layout():
    """The offset and size of every structure of `abi` and of its fields."""
    offsets = {structure.__name__: (0, ctypes.sizeof(structure)) for structure in abi.STRUCTURES}
    for structure in abi.STRUCTURES:
        fields = {name: getattr(structure, name) for name, _ in structure._fields_}
        offsets |= {f"{structure.__name__}.{name}": (field.offset, field.size) for name, field in fields.items()}
    return offsets


@needs_kernels
def test_structures_are_those_of_the_library():
    assert library.layout_of(abi.load()) == own_layout()


def test_the_digest_is_that_of_the_structures():
    assert library.digest_of(own_layout()) == library.LAYOUT  # what it is now is on the left


@needs_kernels
@pytest.mark.parametrize(
    "changed", [{"Output.row": (8, 8)}, {"Side": (0, 40)}, {"Norm.epsilon": None}, {"Norm.gain": (4, 4)}]
)
def test_a_library_with_other_structures_is_refused(monkeypatch, reloaded, changed):
    layout = {key: value for key, value in {**own_layout(), **changed}.items() if value is not None}
    monkeypatch.setattr(library, "layout_of", lambda compiled: layout)
    assert library.levels() == []  # so that nothing takes the kernels for there
    told = "executor = 'native' does not run here: .* belongs to another version of adalog.*: install adalog again"
    with pytest.raises(ValueError, match=told):
        native.Context(1)


@needs_kernels
def test_kernels_refuse_sizes_that_do_not_fit():
    """Nothing is written where a structure says more than its memory holds."""
    context = abi.Context(1)
    site = _site(5, 70)
    weights = products.weights_of(site)
    rows = torch.zeros(4, 70, dtype=torch.uint8)
    sums = torch.zeros(4, 5, dtype=torch.int32)
    good = products.linear(weights, [rows], abi.Output(kind=abi.SUMS, **products.place(sums)))
    context.run("linear", good)
    of_rows = [("rows", 5), ("rows", -1), ("rows", 2**62), ("row", 69), ("row", 2**62), ("bytes", 279)]
    of_sums = [("bytes", 79), ("row", 4), ("kind", 7), ("kind", abi.CODES)]
    for part, field, value in [*((good, *each) for each in of_rows), *((good.out, *each) for each in of_sums)]:
        kept = getattr(part, field)
        setattr(part, field, value)
        with pytest.raises(ValueError, match="a kernel's sizes do not match"):
            context.run("linear", good)
        setattr(part, field, kept)
    for places, count in (([0, 1, 2, 4], 4), ([0, 1, 2, -2], 4), ([0, 1, 2, 2**31 - 1], 4), ([0, 1, 2, 3], 3)):
        kept = torch.tensor(places, dtype=torch.int32)
        good.out.place, good.out.places = kept.data_ptr(), count
        with pytest.raises(ValueError, match="a kernel's sizes do not match"):
            context.run("linear", good)


def _site(columns, terms):
    right = UniformQuantizer(torch.ones(columns, 1), torch.full((columns, 1), 3.0), 4)
    left = UniformQuantizer(torch.tensor(1.0), torch.tensor(2.0), 4)
    weight = torch.ones(columns, terms, dtype=torch.uint8)
    return site_of(model_of("aten.linear.default", left, right, (1, terms), None, weight))


# --- long ------------------------------------------------------------------------------------------------------------


FUZZ = """
import ctypes, random, sys
from adalog import library
from adalog.runtime.native import abi

random.seed(0)
CHOICES = {
    "heads": [0, 1, 1, 2, 3, 3, 17, 64, -1],  # one zero point for each, which the caller vouches for
    "kind": range(-1, 5),
    "depth": [3, 4, 5, 6],
    "planes": [1, 2],
    "bits": range(1, 10),
    "most": [0, 1, 2, 3],
    "activation": [0, 0, 0, 1, 2, 3, 4, 5, 6, -1],
    "shift": [0, 0, 15, 16, 17, 18, 23, 24, -1],
    "least": [0, 3000, 2**15, 2**15 + 1, -1],
    "top": range(256),
    "transposed": [0, 1],
}

def memory(count):
    kept.append((ctypes.c_ubyte * count)(*bytes(random.randrange(256) for _ in range(min(count, 64)))))
    return ctypes.addressof(kept[-1])

def fill(structure, size):
    for name, kind in structure._fields_:
        if kind is ctypes.c_void_p:
            if name in ("more", "residual", "bias", "place", "added_to") and random.random() < 0.6:
                continue
            setattr(structure, name, memory(size))
            if name == "zero" and random.random() < 0.9:
                ctypes.memset(structure.zero, 0, size)
            if name in ("place", "added_to", "bias_of"):
                most = random.choice([2, 2, 2, 40])
                rows = [random.randrange(-1 if name == "place" else 0, most) for _ in range(size // 4)]
                ctypes.memmove(getattr(structure, name), (ctypes.c_int32 * len(rows))(*rows), size)
        elif isinstance(getattr(structure, name), ctypes.Structure):
            fill(getattr(structure, name), size)
        elif isinstance(getattr(structure, name), ctypes.Array):
            for i in range(2):
                getattr(structure, name)[i] = random.choice([0, 1, 1, 2, 3])
        elif name in ("bytes", "residual_bytes", "bias_bytes", "out_bytes"):
            setattr(structure, name, size)
        elif name in ("parameters", "length", "places", "bias_batches", "near_length"):
            setattr(structure, name, size // 4)
        elif name == "count":
            structure.count = random.choice([1, 32, size // 8])
        elif name in CHOICES:
            setattr(structure, name, random.choice(CHOICES[name]))
        elif kind is ctypes.c_float:
            setattr(structure, name, random.choice([1e-6, 1.0, 3e38, float("inf"), float("nan")]))
        else:
            setattr(structure, name, random.choice([0, 1, 2, 3, 7, 16, 17, 30, 64, 65, -1, 2**40, 2**62]
                                                   if random.random() < 0.15 else [1, 2, 3, 5, 16, 17, 24]))

done = 0
for level in library.levels():
    context = abi.Context(2, level)
    for _ in range(int(sys.argv[1])):
        kept = []
        name = random.choice(list(abi.KERNELS))
        structure, size = abi.KERNELS[name](), random.choice([256, 1024, 8192, 65536])
        fill(structure, size)
        handle = None
        if name == "linear":
            columns, terms, width = random.randint(1, 90), random.randint(1, 200), random.randint(2, 8)
            codes = (ctypes.c_ubyte * (columns * terms))()
            zero = (ctypes.c_int32 * columns)(*(random.randrange(2**width) for _ in range(columns)))
            left = random.randrange(256), random.randrange(256)
            handle = context._library.adalog_weights(codes, zero, columns, terms, width, *left)
            structure.weights = handle
            structure.row = random.choice([terms, terms, terms + 3, terms - 1])
            structure.out.row = random.choice([columns, columns, columns + 1])
        if name == "depthwise":
            places = structure.kernel[0] * structure.kernel[1]
            structure.pairs = random.choice([(places + 1) // 2, (places + 1) // 2, 1, 300])
            structure.zero = memory(min(max(structure.channels, 1), 2**20))
            structure.factors = memory(min(max(2 * structure.factor_count, 1), 2**20))
        done += context.bind(name, structure)() == 0
        if handle:
            context._library.adalog_weights_free(handle)
    del context
print(done)
"""


MUTANTS = """
import sys
import torch
import test_artifact_fuzz

torch.set_num_threads(1)
print(test_artifact_fuzz.hunt(range(int(sys.argv[1])), {"small": 9, "demo": 1})["runs"])
"""


@pytest.fixture(scope="module")
def under_sanitizers(tmp_path_factory):
    """Runs a script, in a process whose library has the address and undefined-behaviour sanitizers: what it prints.

    Compiling all levels with both takes minutes.
    """
    tmp_path = tmp_path_factory.mktemp("sanitizers")
    compiler = shutil.which("g++") or pytest.skip("needs g++")
    preloaded = []
    for name in ("libasan.so", "libstdc++.so"):  # the second so that the first finds what throws exceptions
        asked = [compiler, f"-print-file-name={name}"]
        preloaded.append(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip())
    if not all("/" in path for path in preloaded):
        pytest.skip("needs the sanitizers of g++")
    built = tmp_path / "_native.so"
    # The last two sanitizers take half of the compile.
    flags = [*FLAGS, "-std=c++17", "-shared", "-fPIC", "-fno-sanitize=alignment,pointer-overflow"]
    subprocess.run([compiler, *flags, *map(str, SOURCES), "-o", str(built)], check=True)
    environment = {
        "ADALOG_NATIVE": str(built),
        "LD_PRELOAD": " ".join(preloaded),
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": os.pathsep.join([str(Path(library.__file__).parents[1]), str(Path(__file__).parent)]),
        "OMP_NUM_THREADS": "1",
    }

    def run(script, *arguments):
        file = tmp_path / "script.py"
        file.write_text(script)
        command = [sys.executable, "-W", "error", str(file), *map(str, arguments)]
        found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stderr[-3000:]
        return found.stdout

    return run


@pytest.mark.slow
@needs_kernels
def test_kernels_stay_within_their_memory(under_sanitizers):
    """Structures of random sizes: refused, or done in bounds."""
    assert int(under_sanitizers(FUZZ, 400)) > 3  # not all were refused


ELEMENTWISE = """
import torch
from adalog.quantizers import LogQuantizer, UniformQuantizer, elementwise

assert len(elementwise._functions()) == 10
for groups, inputs, outputs in [(1, 70, 33), (2, 64, 1), (3, 5, 65), (1, 1, 32)]:
    left, codes, base = torch.randn(3, groups, inputs, outputs).double().unbind()
    form = torch.rand(groups, inputs, inputs).double() + 1
    parameters = [torch.full((groups, 1, outputs), value).double() for value in (0.1, 3.0)]
    for start in range(0, inputs, 64):
        rows = range(start, min(start + 64, inputs))
        for known in (None, base.contiguous()):
            given = left.contiguous(), form, known, parameters, 4, rows, codes.contiguous()
            assert elementwise.codes_in_turn(*given).shape == (groups, len(rows), outputs)
for shape, own in [((3, 17, 40), ()), ((2, 5, 7, 19), (1, 5, 1, 1)), ((1, 33), ()), ((5, 0), ()), ((4097,), (1,))]:
    for bits in range(2, 9):
        for make in (UniformQuantizer, lambda scale, _, bits: LogQuantizer(scale.mean(), 20, 37, bits, offset=0.17)):
            scale, zero = torch.full(own, 0.1).requires_grad_(), torch.full(own, 1.0).requires_grad_()
            x = torch.randn(shape).requires_grad_()
            for kept in (None, torch.ones(shape)):
                make(scale, zero, bits).fake_quantize(x, kept).sum().backward()
for value in (float("nan"), float("inf"), -float("inf"), 1e-42, 3e38):
    for bits in (2, 8):
        LogQuantizer(torch.tensor(0.5), 20, 37, bits).fake_quantize(torch.full((70,), value))
"""


@pytest.mark.slow
@needs_kernels
def test_elementwise_work_and_corrupt_artifacts_stay_within_their_memory(under_sanitizers):
    """Whatever bytes an artifact has, kernels do not leave what is theirs. One process imports PyTorch for both."""
    assert int(under_sanitizers(ELEMENTWISE + MUTANTS, 150)) > 8


@pytest.mark.slow
@needs_kernels
def test_hostile_packs_stay_within_their_memory(under_sanitizers, quantized, tmp_path):
    """Packs with numbers and places changed at random, which load and run, or are refused."""
    pack = packed(quantized, tmp_path / "model.adalog", (3,))
    assert 0 < int(under_sanitizers(HOSTILE, pack, tmp_path / "hostile", 1, 150)) < 150


# --- what is too much: values, memory and threads; and a forked child -------------------------------------------------


@needs_kernels
@pytest.mark.parametrize("level", library.levels())
@pytest.mark.parametrize("high", [15, 255])
def test_codes_far_beyond_their_range(level, high):
    """What is too large, or no number, has the last code, in whole vectors as in the rest of a row."""
    values = [0.4, 3.0, 254.6, 4e4, 32767.5, 65535.0, 65536.0, 1e9, math.inf, math.nan, -0.6, -4e4, -1e9, -math.inf]
    bias = torch.tensor(values).repeat(9)
    scale, codes = torch.zeros_like(bias), torch.zeros(1, len(bias), dtype=torch.uint8)
    top = torch.full((len(bias),), float(high))
    top_bytes, x = top.to(torch.uint8), torch.randn(1, len(bias))
    addresses = {"scale": scale, "bias": bias, "high": top, "top": top_bytes}
    addresses = {name: value.data_ptr() for name, value in addresses.items()}
    output = abi.Output(kind=abi.CODES, **addresses, parameters=len(bias), **products.place(codes))
    abi.Context(1, level).run("norm", abi.Norm(**products.row_fields(x), epsilon=1e-6, out=output))
    assert torch.equal(codes[0].float(), bias.nan_to_num(high).round().clamp(0, high))


@needs_kernels
@pytest.mark.parametrize(("keys", "error"), [(2**23, MemoryError), (2**25, ValueError), (2**40 - 1, ValueError)])
def test_rows_that_lie_on_each_other_take_no_memory_without_end(keys, error):
    """A kernel copies what it packs, so that many keys in little memory would take much more of it."""
    codes, floats = torch.zeros(64, dtype=torch.uint8), torch.ones(16)
    zero = torch.zeros(1, dtype=torch.int32)
    side = {"data": codes.data_ptr(), "bytes": 64, "zero": zero.data_ptr(), "bits": 4, "top": 15}
    sizes = {"batches": 1, "heads": 1, "rows": 1, "terms": 16, "columns": keys}
    context = abi.Context(1)
    layout, few = Layout(context), torch.tensor([0, 1], dtype=torch.int32)
    result = torch.zeros(1, 16)
    told = {"scale": floats.data_ptr(), "bias": floats.data_ptr(), "parameters": 16}
    given = abi.Attention(
        scores=abi.Matrices(**sizes, left=abi.Side(**side), right=abi.Side(**side, transposed=1)),
        factor=floats.data_ptr(),
        steps=layout.lookup(Lookup(torch.tensor([-1.0]), few, 1)),
        columns=16,
        values=abi.Side(**side),
        out=abi.Output(kind=abi.FLOATS, **told, **products.place(result)),
    )
    with pytest.raises(error):
        context.run("attention", given)
    given.scores.columns = 100
    context.run("attention", given)


FORKED = """
import os, signal, sys
import numpy as np
from adalog.runtime.native import abi

x, ones, zeros = np.ones((200, 64), np.float32), np.ones(64, np.float32), np.zeros(64, np.float32)
out = np.zeros_like(x)
parameters = {"scale": ones.ctypes.data, "bias": ones.ctypes.data, "parameters": 64}
output = abi.Output(kind=abi.FLOATS, **parameters, data=out.ctypes.data, bytes=out.nbytes, row=64)
norm = abi.Norm(data=x.ctypes.data, bytes=x.nbytes, row=64, rows=200, columns=64, epsilon=1, out=output)
context = abi.Context(2)
context.run("norm", norm)
child = os.fork()
signal.alarm(60)  # what waits for ever ends, child and parent
out[:] = 0
context.run("norm", norm)
assert (out == 1).all()
del context
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""

CROWDED = """
import resource
from adalog.runtime.native import abi

pages = int(open("/proc/self/statm").read().split()[0])
most = pages * resource.getpagesize() + 2**28
resource.setrlimit(resource.RLIMIT_AS, (most, most))
try:
    abi.Context(1024)
except ValueError as error:
    print(error)
abi.Context(2)
"""


@needs_kernels
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_runs_and_ends():
    """Its parent's threads are not there: it does all tasks itself, and waits for nobody as it ends."""
    subprocess.run([sys.executable, "-c", FORKED], check=True)


@needs_kernels
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux, to bound a process's memory")
def test_more_threads_than_a_machine_starts():
    command = [sys.executable, "-c", CROWDED]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert told == "threads = 1024 is more than this machine can start: choose fewer\n"
