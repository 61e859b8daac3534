"""The module for browsers, in Node.js and in a browser. All is skipped if Emscripten, CMake or Node.js is missing."""

from benchmarks.browser import Browser, example_site, find, serve

import dataclasses
import json
import shutil
import struct
import subprocess
from contextlib import closing

import numpy as np
import pytest
import torch
from PIL import Image

import adalog.run
from adalog import Calibration, Config, Preprocessing, demo, library
from recorded_kernels import Recorder, run_model, run_products
from stored import packed
from test_native_model import HOSTILE, MEMORY, PICTURES, ROOT, SOURCES, changed, mutants, trained

CLASSES = [f"class {number} ß" for number in range(10)]
NODE, CMAKE, COMPILER = shutil.which("node"), shutil.which("emcmake"), shutil.which("em++")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not library.levels(), reason=f"no kernels: {library.why()}"),
    pytest.mark.skipif(not (NODE and CMAKE and COMPILER and shutil.which("cmake")), reason="needs emscripten and node"),
]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder with the module."""
    folder = tmp_path_factory.mktemp("web") / "built"
    subprocess.run([CMAKE, "cmake", "-S", ROOT, "-B", folder], check=True, capture_output=True)
    subprocess.run(["cmake", "--build", folder], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def file(quantized, tmp_path_factory):
    """A pack of a small model, for one image or three at once, with a preprocessing and the names of its classes."""
    preprocessing = Preprocessing(size=(32, 32), resize=32, fill=(1.0, 2.0, 3.0)).to_json()
    whole = dataclasses.asdict(Preprocessing.from_json(preprocessing))
    return packed(quantized, tmp_path_factory.mktemp("pack") / "model.adalog", (1, 3), whole, CLASSES)


def softmax(logits):
    powers = np.exp(logits.astype(np.float64) - logits.max())
    return powers / powers.sum()


def node(built, *arguments, given=b""):
    command = [NODE, ROOT / "tests" / "web.mjs", built, *map(str, arguments)]
    done = subprocess.run(command, input=given, capture_output=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    return done.stdout


def logits_of(built, file, images, level):
    return np.frombuffer(node(built, "run", file, level, given=images.tobytes()), np.float32).reshape(-1, 10)


def test_the_module_is_small(built):
    assert sum((built / name).stat().st_size for name in ("adalog.mjs", "adalog.wasm")) < 300_000


def test_the_description(built, file, quantized):
    found = json.loads(node(built, "describe", file, "wasm"))
    about = adalog.run.load(file).describe()
    assert (found["inputs"], found["outputs"]) == (about["inputs"], about["outputs"])
    assert found["classes"] == CLASSES
    assert (found["bits"], found["level"], found["batches"]) == (quantized.config.bits, "wasm", [1, 3])
    sizes = dict.fromkeys(["height", "width", "resizeHeight", "resizeWidth", "resizeShorter"], 32)
    words = {"interpolation": "bicubic", "fit": "stretch", "position": "center", "channels": "rgb"}
    numbers = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225], "rescale": 1 / 255}
    assert found["preprocessing"] == {**sizes, **words, **numbers, "fill": [1, 2, 3]}


def test_scalar_kernels_have_the_bits_of_this_processor(built, file):
    images = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(2)).numpy()
    wanted = adalog.run.load(file, level="scalar")(images)
    for count in (0, 1, 2, 8):
        assert np.array_equal(logits_of(built, file, images[:count], "scalar"), wanted[:count])
    assert np.allclose(logits_of(built, file, images, "wasm"), wanted, atol=0.2 * np.abs(wanted).max())


def test_part_of_an_image(built, file):
    with pytest.raises(AssertionError, match="has 400 bytes, not 1 images of 12288"):
        node(built, "run", file, "wasm", given=bytes(400))


@pytest.mark.parametrize("bits", ["w4a4", "w8a8"])
def test_bits_of_trained_weights(built, tmp_path, bits):
    packed(trained(bits), tmp_path / "vit.adalog", (1, 8))
    images = demo.test_images()[0][:9].numpy()
    wanted = adalog.run.load(tmp_path / "vit.adalog", level="scalar")(images)
    assert np.array_equal(logits_of(built, tmp_path / "vit.adalog", images, "scalar"), wanted)
    # The level `wasm` rounds floats otherwise, so only a prediction with a margin is sure to be the same.
    second, first = np.sort(wanted, 1)[:, -2:].T
    sure = first - second > 0.1 * np.abs(wanted).max()
    assert sure.any()
    found = logits_of(built, tmp_path / "vit.adalog", images, "wasm")
    assert np.array_equal(found[sure].argmax(1), wanted[sure].argmax(1))


# --- the kernels -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def replay(tmp_path_factory):
    """The program that replays calls, for Node.js."""
    program = tmp_path_factory.mktemp("replay") / "replay.js"
    flags = ["-O1", "-std=gnu++17", "-fwasm-exceptions", "-msimd128", f"-I{SOURCES}", '-DAPI=extern "C"']
    # With a module that compiles later, Emscripten 3.1.6 fetches its file, which newer releases of Node.js refuse.
    linked = ["-sNODERAWFS", "-sALLOW_MEMORY_GROWTH", "-sEXIT_RUNTIME", "-sWASM_ASYNC_COMPILATION=0"]
    sources = [SOURCES / "native.cpp", ROOT / "tests" / "replay.cpp"]
    subprocess.run([COMPILER, *flags, *linked, *sources, "-o", program], check=True)
    return program


def check(recorder, replay, folder):
    recorder.save(folder / "calls")
    for level in ("scalar", "wasm"):
        command = [NODE, replay, folder / "calls", str(library.LEVELS.index(level)), "1"]
        recorder.check(subprocess.run(command, capture_output=True, check=True).stdout)


@pytest.mark.parametrize(("bits", "tables"), [("w4a4", "u8"), ("w8a8", "u16")])
def test_calls_of_a_model(calibration, fast, images, replay, tmp_path, monkeypatch, bits, tables):
    recorder = Recorder(monkeypatch, pointer=4)
    run_model(calibration, images, fast.search, bits, tables)
    check(recorder, replay, tmp_path)


def test_accumulators(replay, tmp_path, monkeypatch):
    """Equal to the last bit."""
    recorder = Recorder(monkeypatch, pointer=4)
    run_products()
    check(recorder, replay, tmp_path)


# --- what is hostile -------------------------------------------------------------------------------------------------


def replies(built, packs):
    """Open and run every pack: the message of each."""
    given = b"".join(struct.pack("<q", len(each)) + each for each in packs)
    lines = node(built, "open", MEMORY, given=given).decode().split("\n")
    assert lines.pop() == ""
    assert len(lines) == len(packs)
    return lines


def test_hostile_packs(built, file):
    content = file.read_bytes()
    found = replies(built, [content, *(changed(content, change) for change, _ in HOSTILE)])
    assert found[0] == ""
    for message, (_, wanted) in zip(found[1:], HOSTILE, strict=True):
        assert wanted in message


def test_mutated_packs(built, file):
    """A kernel that leaves its memory would stop the module, or damage the memory of the allocator."""
    found = replies(built, list(mutants(file.read_bytes(), 0, 300)))
    assert not any("the library stopped" in message for message in found)
    assert 200 < sum(bool(message) for message in found) < 300


# --- the page --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "fields"), PICTURES)
def test_pixels_are_those_of_pillow(built, quantized, tmp_path, size, fields):
    preprocessing = Preprocessing(**{"size": (32, 32), "resize": 36, **fields})
    packed(quantized, tmp_path / "model.adalog", (1,), dataclasses.asdict(preprocessing))
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8))
    found = node(built, "prepare", tmp_path / "model.adalog", *size, given=picture.convert("RGBA").tobytes())
    assert np.array_equal(np.frombuffer(found, np.float32).reshape(3, 32, 32), preprocessing(picture).numpy())


@pytest.fixture(scope="module")
def site(built, file, tmp_path_factory):
    """The folder and the address of the example, with a pack that it opens by default."""
    folder = example_site(built, tmp_path_factory.mktemp("site") / "site")
    shutil.copy(file, folder)
    with serve(folder) as address:
        yield folder, address


@pytest.mark.skipif(find() is None, reason="no Chromium here: the Debian package chromium has one")
def test_the_page(built, file, site, tmp_path):
    """The page answers as Node.js does if no pixel is resized. It takes other packs and refuses hostile ones."""
    folder, address = site
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    Image.fromarray(pixels).save(folder / "picture.png")
    (folder / "other.adalog").write_bytes(changed(file.read_bytes(), lambda header: header.update(classes=None)))
    change, refusal = HOSTILE[0]
    (folder / "hostile.adalog").write_bytes(changed(file.read_bytes(), change))
    image = Preprocessing(size=(32, 32), resize=32)(Image.fromarray(pixels)).numpy()
    (logits,) = logits_of(built, file, image[None], "wasm")
    best = np.argsort(-logits)[:5]
    model, error = (f"document.getElementById('{name}').textContent" for name in ("model", "error"))
    rows = "[...document.querySelectorAll('tbody tr')].map((row) => [...row.cells].map((cell) => cell.textContent))"
    with closing(Browser(tmp_path)) as browser:
        browser.open(address)
        browser.wait(f"{model}.includes('MB')")
        size = file.stat().st_size / 1e6
        assert f"model.adalog: {size:.1f} MB, w" in browser.value(model)
        browser.drop("picture.png")
        browser.wait(f"{rows}.length || {error}")
        assert browser.value(error) == ""
        shown = browser.value(rows)
        assert [name for name, _ in shown] == [CLASSES[number] for number in best]
        assert [float(share[:-2]) for _, share in shown] == pytest.approx(100 * softmax(logits)[best], abs=0.1)
        browser.drop("other.adalog")
        browser.wait(f"{model}.includes('other.adalog')")
        browser.drop("picture.png")
        browser.wait(f"{rows}.length && {rows}[0][0] === 'class {best[0]}'")
        browser.drop("hostile.adalog")
        browser.wait(f"{error} !== ''")
        assert refusal in browser.value(error)
        assert all(each.startswith((address, "blob:", "data:")) for each in browser.asked)
        assert browser.messages == []


@pytest.mark.skipif(find() is None, reason="no Chromium here: the Debian package chromium has one")
def test_the_page_with_a_thousand_classes(built, site, tmp_path):
    """The page takes a pack with as many classes as ImageNet has, and pictures of other sizes and formats."""
    folder, address = site
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 8, 8), torch.nn.Flatten(), torch.nn.Linear(256, 1000)).eval()
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) / 8
    config = dataclasses.replace(Config.preset("w8a8", "minmax"), images=4)
    images = torch.randn(4, 3, 32, 32, generator=generator)
    preprocessing = Preprocessing(size=(32, 32), resize=32)
    names = [f"name {number}, or ß" for number in range(1000)]
    quantized = Calibration(model, images).quantize(config)
    pack = packed(quantized, folder / "thousand.adalog", (1,), dataclasses.asdict(preprocessing), names)
    pixels = np.random.default_rng(1).integers(0, 256, (32, 32, 3), np.uint8)
    Image.fromarray(pixels).save(folder / "fits.png")
    Image.fromarray(pixels).resize((90, 70)).save(folder / "wide.png")
    Image.fromarray(pixels).resize((40, 90)).save(folder / "high.jpg")
    run = adalog.run.load(pack)
    logits = {name: run(preprocessing(Image.open(folder / name))[None].numpy())[0] for name in ("fits.png", "wide.png")}
    rows = "[...document.querySelectorAll('tbody tr')].map((row) => row.cells[0].textContent)"
    model_line, error, time = (f"document.getElementById('{name}').textContent" for name in ("model", "error", "time"))
    with closing(Browser(tmp_path / "profile")) as browser:
        browser.open(address)
        browser.drop("thousand.adalog")
        browser.wait(f"{model_line}.includes('thousand.adalog')")
        assert f"{pack.stat().st_size / 1e6:.1f} MB, w8a8" in browser.value(model_line)
        for name in ("fits.png", "wide.png", "high.jpg"):
            browser.value("document.querySelector('tbody').replaceChildren()")
            browser.drop(name)
            browser.wait(f"{rows}.length || {error}")
            assert browser.value(error) == ""
            assert float(browser.value(time).removesuffix(" ms")) >= 0
            shown = browser.value(rows)
            assert set(shown) <= set(names)
            if name in logits:  # a browser may decode JPEG files otherwise than Pillow
                assert shown == [names[number] for number in np.argsort(-logits[name])[:5]]
        assert browser.messages == []
