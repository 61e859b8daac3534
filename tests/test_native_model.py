"""The C library: it has the bits of `native`, and a hostile pack is refused or runs within its memory."""

import dataclasses
import json
import random
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import adalog
import adalog.run
from adalog import Calibration, Config, Preprocessing, Search, demo, library
from adalog.inputs.zoo import DEMO_PREPROCESSING
from adalog.runtime.native import floats
from stored import first, header_of, packed, rebuilt, setting, spliced

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "src" / "adalog" / "runtime" / "native"
FLAGS = [
    *("-O0", "-g1", "-pthread", f"-I{SOURCES}"),  # compiling takes longer than running
    *("-fsanitize=address,undefined", "-fno-sanitize-recover"),
    # The address sanitizer reports null and objects that are too small, and there are no virtual functions.
    "-fno-sanitize=null,object-size,vptr",
    *("--param", "asan-instrumentation-with-call-threshold=0"),  # calls in place of code in place, which is slower
]
MEMORY = 2**28
PREPARATION = dataclasses.asdict(DEMO_PREPROCESSING)

pytestmark = pytest.mark.skipif(not library.levels(), reason=f"no kernels: {library.why()}")


@pytest.fixture(scope="module")
def file(quantized, tmp_path_factory):
    """A pack of a small model, for one image or three at once."""
    return packed(quantized, tmp_path_factory.mktemp("pack") / "model.adalog", (1, 3), PREPARATION)


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """tests/pack.c with the library, under the sanitizers. The kernels are those of the package."""
    folder = tmp_path_factory.mktemp("program")
    c, cpp = shutil.which("gcc"), shutil.which("g++")
    if not c or not cpp:
        pytest.skip("there is no gcc or g++")
    kernels = Path(library.load()[0]._name)
    empty = folder / "empty.cpp"
    empty.write_text("int main() {}")
    if subprocess.run([cpp, *FLAGS, empty, "-o", folder / "empty"], capture_output=True, check=False).returncode:
        pytest.skip("g++ has no sanitizers")
    warnings = ["-Wall", "-Wextra", "-Werror"]
    strict = [*warnings, "-std=c99", "-pedantic"]
    example = ROOT / "examples" / "c"
    objects = []
    for source in (ROOT / "tests" / "pack.c", example / "prepare.c"):
        objects.append(folder / source.with_suffix(".o").name)
        subprocess.run([c, *FLAGS, *strict, f"-I{example}", "-c", source, "-o", objects[-1]], check=True)
    options = ["-std=c++17", "-ffp-contract=off", *warnings]
    inputs = [SOURCES / "model.cpp", *objects, kernels]
    subprocess.run([cpp, *FLAGS, *options, *inputs, f"-Wl,-rpath,{kernels.parent}", "-o", folder / "pack"], check=True)
    return folder / "pack"


def run(program, *arguments, given=b"", fails=False):
    """Return what the program writes. A report of a sanitizer fails the test."""
    done = subprocess.run([program, *map(str, arguments)], input=given, capture_output=True, check=False, timeout=500)
    assert done.returncode == int(fails), done.stderr.decode()[-3000:]
    return done.stderr if fails else done.stdout


def logits_of(program, file, images, level, threads=1):
    written = run(program, level, threads, file, len(images), given=np.ascontiguousarray(images).tobytes())
    return np.frombuffer(written, np.float32).reshape(-1, 10)


@pytest.mark.parametrize("level", library.levels())
def test_bits_are_those_of_native(program, file, images, quantized, level):
    noise = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    wanted = quantized.compile("native", level=level)(noise).numpy()
    for count, threads in ((0, 1), (1, 2), (2, 1), (8, 2)):
        assert np.array_equal(logits_of(program, file, noise[:count].numpy(), level, threads), wanted[:count])


def trained(bits):
    """The bundled model with the first of its blocks, quantized."""
    model = demo.load_model()
    model.blocks = model.blocks[:1]
    search = Search(init=(8, 4), parents=4, steps=0, rounds=1)
    config = dataclasses.replace(Config.preset(bits), images=4, search=search, stages=())
    return Calibration(model, demo.calibration_images()[:4]).quantize(config)


@pytest.mark.slow
@pytest.mark.parametrize("bits", ["w4a4", "w8a8"])
def test_bits_of_trained_weights(program, tmp_path, bits):
    model = trained(bits)
    packed(model, tmp_path / "vit.adalog", (1, 8))
    levels = library.levels()
    for level, count in {levels[0]: 2, levels[-1]: 18}.items():  # scalar kernels are slow
        images = demo.test_images()[0][:count]
        wanted = model.compile("native", level=level)(images).numpy()
        assert np.array_equal(logits_of(program, tmp_path / "vit.adalog", images.numpy(), level), wanted)


# --- float operations ------------------------------------------------------------------------------------------------


def changed(content, change, tensors=None):
    """The pack with its JSON changed in place by `change`."""
    return rebuilt(content, change, tensors, adalog.run.KEY)


def viewed(shape, order=None, at=0, region="constants"):
    """A view of float32 whose dimensions lie in memory in this order, the last one dense."""
    order = order or range(len(shape))
    strides, step = [0] * len(shape), 4
    for axis in reversed(order):
        strides[axis], step = step, step * shape[axis]
    return {"at": [region, at], "shape": list(shape), "strides": strides, "type": "float32"}


MEAN, POOL = "aten.mean.dim", "aten.adaptive_avg_pool2d.default"
POINTWISE = ("add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "maximum.default", "minimum.default")
OPERATIONS = [
    *((f"aten.{name}", (3, 4, 5), [(3, 4, 5), (4, 1)], []) for name in POINTWISE),
    ("aten.sqrt.default", (3, 4, 5), [((3, 4, 5), (2, 0, 1))], []),
    ("aten.maximum.default", (3, 4), [(3, 4)], [7e4]),
    ("aten.add.Tensor", (3, 4), [(3, 4)], [0.1]),
    ("aten.cat.default", (3, 7, 5), [(3, 4, 5), (3, 3, 5)], [-2]),
    ("copy", (3, 4, 5), [(3, 4, 5)], []),
    (MEAN, (3, 33), [(3, 97, 33)], [[1]]),
    (MEAN, (3, 1, 33), [(3, 97, 33)], [[-2], True]),
    (MEAN, (3, 11), [(3, 11, 333)], [[2]]),
    (MEAN, (3,), [(3, 97, 33)], [[1, 2]]),
    (MEAN, (3, 5), [(3, 5, 17, 13)], [[2, 3]]),
    (MEAN, (3, 5), [((3, 5, 17, 13), (0, 2, 3, 1))], [[-1, -2]]),
    (POOL, (3, 5, 2, 3), [(3, 5, 17, 13)], [[2, 3]]),
    (POOL, (3, 5, 2, 3), [((3, 5, 17, 13), (0, 2, 3, 1))], [[2, 3]]),
]


@pytest.mark.parametrize(("operation", "out", "operands", "rest"), OPERATIONS)
def test_float_operations_have_the_bits_of_numpy(program, file, tmp_path, operation, out, operands, rest):
    numbers = torch.randn(60_000, generator=torch.Generator().manual_seed(3)) * 1e3 + 7e4
    views, at = [], 0
    for operand in operands:
        shape, order = operand if isinstance(operand[0], tuple) else (operand, None)
        views.append(viewed(shape, order, at))
        at += 4 * int(np.prod(shape))
    arguments = [views, *rest] if operation == "aten.cat.default" else [*views, *rest]
    written = viewed(out, region="work")

    def change(header):
        tape = header["tapes"][1]
        tape |= {"work": 4 * int(np.prod(out)), "fills": [], "copies": [None], "output": written}
        tape["calls"] = [["step", operation, [written, *arguments]]]
        header["tapes"] = [tape]
        header["outputs"] = [{"name": "output", "type": "float32", "shape": list(out[1:])}]

    constants = numbers.view(torch.uint8)
    (tmp_path / "pack").write_bytes(changed(file.read_bytes(), change, {"constants/3": constants}))
    images = np.zeros((3, 3, 32, 32), np.float32)
    given = [numbers.numpy()[view["at"][1] // 4 :] for view in views]
    given = [
        np.lib.stride_tricks.as_strided(part, view["shape"], view["strides"])
        for part, view in zip(given, views, strict=True)
    ]
    wanted = np.empty(out, np.float32)
    floats.FLOATS[operation](wanted, *([given, *rest] if operation == "aten.cat.default" else [*given, *rest]))
    found = run(program, "scalar", 1, tmp_path / "pack", 3, given=images.tobytes())
    assert np.isfinite(wanted).all()
    assert found == wanted.tobytes()


# --- what is damaged or hostile --------------------------------------------------------------------------------------


def replies(program, packs, level="scalar"):
    """Open and run every pack: (status, message) of each."""
    given = b"".join(struct.pack("<q", len(each)) + each for each in packs)
    lines = run(program, level, MEMORY, given=given).decode().splitlines()
    assert len(lines) == len(packs)
    return [(int(line.partition(" ")[0]), line.partition(" ")[2]) for line in lines]


def test_what_is_not_a_pack(program, file, tmp_path):
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    table = content[8 : 8 + length]

    def with_table(text):
        return len(text).to_bytes(8, "little") + text + content[8 + length :]

    cases = {
        b"": "it is too short",
        content[:100]: "more bytes of JSON than it has",
        content[:-1]: "does not fit in its offsets",
        content + b"\0": "bytes after its tensors",
        with_table(table.replace(b"adalog-pack", b"adalog-tape")): "it is not a pack",
        with_table(table.replace(b'"U8"', b'"U9"', 1)): "invalid type or shape",
        with_table(table.rstrip()[:-1] + b', "__metadata__": {}}'): "a key twice",
        with_table(b"[" * 100): "nested more than 64 deep",
        with_table(b'{"\xff": 1}'): "not UTF-8",
        with_table(b'{"a": 01}'): "lacks a comma",
        with_table(b'{"a": NaN}'): "not valid",
        with_table(b'{"a": "\\ud800"}'): "half of a character",
        with_table(b'{"a": 1e999}'): "out of range",
        with_table(b"[" + b"1," * 2**20 + b"1]"): "more than 1048576 values",
    }
    for (status, message), wanted in zip(replies(program, list(cases)), cases.values(), strict=True):
        assert (status, wanted in message) == (2, True), (message, wanted)
    for path, wanted in ((tmp_path, b"not a regular file"), (tmp_path / "none", b"read: No such file or directory")):
        assert wanted in run(program, "scalar", 1, path, 1, fails=True)
    assert b"the level fast does not run on this machine: choose one of scalar" in run(
        program, "fast", 1, file, 1, fails=True
    )
    assert b"the level wasm does not run" in run(program, "wasm", 1, file, 1, fails=True)
    image = np.full((1, 3, 32, 32), np.nan, np.float32)
    assert b"contain NaN" in run(program, "scalar", 1, file, 1, given=image.tobytes(), fails=True)


def tape(header):
    return header["tapes"][0]


def renamed(operation, other, count, *arguments):
    """A change of the first call of an operation to another operation, with `count` of its arguments and more."""

    def change(header):
        call = next(call for call in tape(header)["calls"] if call[1] == operation)
        call[1:] = other, [*call[2][:count], *arguments]

    return change


HOSTILE = [
    (setting("format", 2), "another format"),
    (setting("digest", "0"), "belong to another artifact"),
    (setting("bits", "a\x1b"), "do not print"),
    (setting("classes", ["a"]), "as many classes"),
    (setting("outputs", 0, "shape", [11]), "description"),
    (setting("classes", [0] * 10), "a name of a class is not text"),
    (setting("preprocessing", {"size": 1}), "the field resize of the preprocessing is missing"),
    (setting("preprocessing", "size", [32]), "its preprocessing is not valid"),
    (setting("preprocessing", "std", [1, 1, 0]), "its preprocessing is not valid"),
    (setting("preprocessing", "mean", [1, 1, True]), "its preprocessing is not valid"),
    (setting("more", 1), "more"),
    (setting("tapes", []), "1 to 16 tapes"),
    (lambda header: header["tapes"].reverse(), "do not increase"),
    (setting(tape, "interface", 1), "it is for kernel interface 1, and this library has"),
    (setting(tape, "interface", 2**40), "out of range"),
    (setting(tape, "batch", 0), "out of range"),
    (setting(tape, "work", 2**60), "out of range"),
    (setting(tape, "fills", [[0, 0, 2**40]]), "it fills"),
    (setting(tape, "fills", [[2**62, 0, 2**62]]), "it fills"),
    (setting(tape, "weights", 0, 2, 3), "have another size"),
    (setting(tape, "weights", 0, 1, [1, 1]), "zero points"),
    (setting(tape, "calls", 0, 1, "aten.exp.default"), "calls aten.exp.default, which"),
    (setting(tape, "output", {"set": []}), "unknown structure"),
    (lambda header: tape(header).update(output={"dict": [["a" * 2000, tape(header)["output"]]]}), "more than 1024"),
    (setting(tape, "weights", 0, 1, [1, 2**24 + 1]), "invalid shape"),
    (setting(tape, "weights", 0, 1, [1, 2**13, 2**12]), "invalid shape"),
    (setting(tape, "weights", 0, 1, [1, 1, 1, 1]), "invalid shape"),
    (setting("bits", "a\u061c"), "do not print"),
    (setting(tape, first("linear"), "weights", 99), "does not list"),
    (setting(tape, first("linear"), "rows", 1.5), "cannot hold"),
    (setting(tape, first("linear"), "bytes", 2**40), "as many bytes"),
    (setting(tape, first("linear"), "bytes", -1), "as many bytes"),
    (setting(tape, first("linear"), "data", ["work", 2**40]), "beyond its region"),
    (setting(tape, first("linear"), "data", ["stack", 0]), "unknown region"),
    (setting(tape, first("linear"), "out", "data", ["constants", 0]), "is not in work"),
    (setting(tape, first("norm"), "out", "scale", ["work", 0]), "is not in constants"),
    (setting(tape, first("norm"), "out", "scale", ["constants", 2]), "not aligned"),
    (setting(tape, first("norm"), "epsilon", None), "cannot hold"),
    (setting(tape, first("norm"), "out", "address", 1), "which its kernel does not take"),
    (setting(tape, first("attention"), "scores", "heads", 10**9), "as many bytes"),
    (setting(tape, first("attention"), "steps", "length", 2**30), "as many bytes"),
    (setting(tape, first("patches"), "kernel", [1]), "cannot hold"),
    (setting(tape, first("aten.mean.dim"), 0, "at", ["constants", 0]), "may not use"),
    (setting(tape, first("aten.mean.dim"), 1, "shape", [1, 10**9, 10**9]), "a view"),
    (setting(tape, first("aten.mean.dim"), 1, "type", "object"), "not valid"),
    (setting(tape, first("aten.mean.dim"), 2, [7]), "out of range"),
    (renamed("aten.add.Tensor", "aten.sqrt.default", 3), "too many arguments"),
    (renamed("aten.mean.dim", "aten.sqrt.default", 2), "more dimensions than its result"),
    (renamed("aten.add.Tensor", "aten.sqrt.default", 1, 4.0), "a view"),
    (renamed("aten.add.Tensor", "aten.maximum.default", 2, 1e39), "float32 cannot hold"),
    (renamed("aten.add.Tensor", "aten.minimum.default", 2), "too few arguments"),
]


def test_what_a_pack_may_not_say(program, file):
    content = file.read_bytes()
    found = replies(program, [changed(content, change) for change, _ in HOSTILE])
    for (status, message), (_, wanted) in zip(found, HOSTILE, strict=True):
        assert (status, wanted in message) == (2, True), (message, wanted)
    late = changed(content, setting(tape, first("norm"), "rows", 10**6))
    assert replies(program, [late]) == [(0, "")]  # three images run by the other tape
    late = changed(content, lambda header: [setting(tape, first("norm"), "rows", 10**6)(header), header["tapes"].pop()])
    assert replies(program, [late]) == [(4, "step layer_norm fails: a kernel's sizes do not match")]


def test_a_product_without_rows_is_checked_too(program, file):
    """Kernels read the zero points of a side before its rows."""

    def emptied(header):
        scores = first("attention")(tape(header))["scores"]
        scores["rows"] = 0
        del scores["left"]["zero"]
        header["tapes"].pop()

    assert replies(program, [changed(file.read_bytes(), emptied)])[0][0] == 4


def spots(value):
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(item, (dict, list)):
            yield from spots(item)
        yield value, key


def mutants(content, seed, count):
    """Packs with numbers, places and parts of their JSON changed at random, and packs with other bytes."""
    chance, whole = random.Random(seed), header_of(content, adalog.run.KEY)
    texts = [json.dumps({**whole, "tapes": [one]}) for one in whole["tapes"]]
    for _ in range(count):
        if chance.random() < 0.2:
            damaged = bytearray(content)
            for _ in range(chance.choice([1, 1, 3])):
                damaged[chance.randrange(len(damaged) if chance.random() < 0.5 else 3000)] = chance.randrange(256)
            yield bytes(damaged[: chance.choice([len(damaged)] * 4 + [chance.randrange(len(damaged))])])
            continue
        header = json.loads(chance.choice(texts))
        tapes = header["tapes"]
        if chance.random() < 0.2:
            tapes[0]["calls"] = chance.sample(tapes[0]["calls"], chance.randrange(4))
        part = chance.choice(["calls"] * 5 + ["work", "fills", "copies", "output", "weights", "inputs"])
        places = [(tapes[0], part), *(spots(tapes[0][part]) if isinstance(tapes[0][part], (dict, list)) else [])]
        for _ in range(chance.choice([1, 1, 2, 5])):
            holder, key = chance.choice(places)
            value = holder[key]
            if isinstance(value, int):
                holder[key] = chance.choice([value + 1, value - 1, 0, 1, -1, 2 * value, value // 2, 2**31, 2**63 - 1])
            else:
                other, where = chance.choice(places)
                holder[key] = json.loads(json.dumps(other[where]))
        yield spliced(content, json.dumps(header), adalog.run.KEY)


@pytest.mark.parametrize(("seed", "count", "which"), [(0, 200, 0), pytest.param(1, 600, -1, marks=pytest.mark.slow)])
def test_mutated_packs_do_no_harm(program, file, seed, count, which):
    found = replies(program, list(mutants(file.read_bytes(), seed, count)), library.levels()[which])
    assert {0, 2} <= {status for status, _ in found} <= {0, 2, 3, 4}


# --- the example -----------------------------------------------------------------------------------------------------

# The size of a picture, and the fields of a preprocessing.
PICTURES = [
    ((90, 70), {}),
    ((32, 40), {"resize": 32}),
    ((20, 61), {"resize": (35, 50), "interpolation": "bilinear"}),
    ((75, 50), {"resize": (48, 60), "interpolation": "lanczos", "fit": "cover", "position": "top-left"}),
    ((75, 50), {"resize": (32, 32), "fit": "contain", "fill": (1.5, 2.0, 3.0), "channels": "bgr"}),
    ((100, 37), {"resize": (40, 41), "interpolation": "nearest", "position": "center-floor"}),
]


def test_a_picture_that_would_be_too_long(program, quantized, tmp_path):
    preparation = PREPARATION | {"resize": (2**31 - 1, 32), "fit": "cover"}
    packed(quantized, tmp_path / "model.adalog", (1,), preparation)
    run(program, tmp_path / "model.adalog", 64, 1, given=bytes(3 * 64), fails=True)


@pytest.mark.parametrize(("size", "fields"), PICTURES)
def test_pixels_are_those_of_pillow(program, quantized, tmp_path, size, fields):
    preprocessing = Preprocessing(**{"size": (32, 32), "resize": 36, **fields})
    packed(quantized, tmp_path / "model.adalog", (1,), dataclasses.asdict(preprocessing))
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8))
    prepared = np.frombuffer(run(program, tmp_path / "model.adalog", *size, given=picture.tobytes()), np.float32)
    assert np.allclose(prepared.reshape(3, 32, 32), preprocessing(picture).numpy(), rtol=1e-6, atol=1e-6)


# --- the CMake project -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_project_and_the_example(file, tmp_path, monkeypatch):
    """Build, install and find the library; the example classifies an image with the shared and the static library."""
    cmake, compiler = shutil.which("cmake"), shutil.which("g++")
    if not cmake or not compiler or sys.platform != "linux":
        pytest.skip("this test needs Linux, cmake and g++")
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.delenv("ADALOG_LEVEL", raising=False)  # the C library does not read it
    installed, built = tmp_path / "installed", tmp_path / "built"
    configure = [cmake, "-S", ROOT, "-B", built, f"-DCMAKE_INSTALL_PREFIX={installed}"]
    configured = subprocess.run(configure, capture_output=True, text=True, check=False)
    if "GCC 11 or newer" in " ".join(configured.stderr.split()):
        pytest.skip("g++ is too old for the kernels")
    assert configured.returncode == 0, configured.stderr
    subprocess.run([cmake, "--build", built], check=True)
    subprocess.run([cmake, "--install", built, "--strip"], check=True)
    (shared,) = (path for path in installed.rglob("libadalog.so.*") if not path.is_symlink())
    listed = subprocess.run(["nm", "-D", "--defined-only", shared], capture_output=True, text=True, check=True).stdout
    names = {line.split()[-1] for line in listed.splitlines()}
    assert {name for name in names if name.startswith("adalog_")} == {
        f"adalog_model_{name}" for name in ("close", "describe", "open", "open_memory", "run")
    }
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8))
    picture.save(tmp_path / "picture.ppm")
    image = DEMO_PREPROCESSING(picture)[None].numpy()
    image.tofile(tmp_path / "image.raw")
    logits = adalog.run.load(file)(image)[0]
    source = ROOT / "examples" / "c"
    link = [compiler, "-static", "-x", "c++", "-", "-o", tmp_path / "empty"]  # not every system has a static libc
    whole = not subprocess.run(link, input=b"int main() {}", capture_output=True, check=False).returncode
    small = ["-DCMAKE_EXE_LINKER_FLAGS=-static -s -Wl,--gc-sections"] if whole else []
    for kind, flags in (("shared", []), ("static", small)):
        copied, program = tmp_path / kind, tmp_path / f"built-{kind}"
        shutil.copytree(source, copied)
        listing = copied / "CMakeLists.txt"
        listing.write_text(listing.read_text().replace("PRIVATE adalog::static", f"PRIVATE adalog::{kind}"))
        subprocess.run([cmake, "-S", copied, "-B", program, f"-DCMAKE_PREFIX_PATH={installed}", *flags], check=True)
        subprocess.run([cmake, "--build", program], check=True)
        for name in ("picture.ppm", "image.raw"):
            words = [program / "classify", file, tmp_path / name]
            printed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
            top, value = re.search(r"class (\d+), logit (\S+)", printed).groups()
            assert (int(top), float(value)) == (logits.argmax(), pytest.approx(logits.max(), rel=1e-4))
    assert not small or (tmp_path / "built-static" / "classify").stat().st_size < 1_600_000
