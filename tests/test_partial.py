"""An interrupted calibration goes on where it was and ends in the same bytes; its searches keep to their memory."""

import gc
import json
import random
import shutil
import sys
import threading
import time
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import pytest
import torch

import adalog
from adalog import Calibration, Config, Correction, DataError, Resources, Search
from adalog.baselines import SplitUniformQuantizer, TwinUniformQuantizer
from adalog.calibration.partial import Partial
from adalog.calibration.schedule import Scratch
from adalog.device import default_memory
from adalog.inputs.demo.model import DemoViT
from adalog.quantizers import (
    Assignment,
    Fold,
    LogFormat,
    LogQuantizer,
    QuantizedTensor,
    UniformFormat,
    UniformQuantizer,
)
from adalog.search.operand import Operand
from adalog.search.product import Product
from commands import forked, forking
from stored import serialise
from test_methods import brief
from toys import BRIEF

pytestmark = pytest.mark.usefixtures("captured_once")


class StopHere(Exception):
    pass


# What decides how a method refines its scales.
REFINED = {"apq-vit": ("candidates", "rounds", "probes"), "evol-q": ("passes", "cycles", "population")}


@pytest.fixture(scope="module")
def seeded(tiniest, images):
    """Calibrations of the same model on the same images, with the seeds 0 and 1."""
    return [Calibration(tiniest, images, seed=seed) for seed in (0, 1)]


def assert_same(first, second):
    assert type(first) is type(second)
    if isinstance(first, torch.Tensor):
        assert first.dtype == second.dtype
        assert torch.equal(first, second)
    elif is_dataclass(first):
        for field in fields(first):
            assert_same(getattr(first, field.name), getattr(second, field.name))
    else:
        assert first == second


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_what_is_found_reads_back_to_the_bit(tmp_path, dtype):
    torch.manual_seed(0)
    scale, zero_point = torch.rand(3, 1, dtype=dtype) + 1e-7, torch.tensor([[0.0], [3.0], [7.0]], dtype=dtype)
    quantizers = [
        UniformQuantizer(scale, zero_point, 3),
        UniformQuantizer(scale * 1.25, zero_point, 3),
        LogQuantizer(torch.rand((), dtype=dtype) / 3, 11, 37, 4, offset=0.1699, keeps_offset=True),
        TwinUniformQuantizer(scale[0], scale[1], 5),
        SplitUniformQuantizer(scale[0], scale[1], 4, True),
        None,
    ]
    codes = torch.randint(0, 8, (3, 21), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    rights = [quantizers[0], QuantizedTensor(codes, quantizers[1]), None] * 2
    folds = [None, None, Fold(torch.rand(4, dtype=dtype), torch.randn(4, dtype=dtype)), None, None, None]
    biases = [None, torch.tensor([0.1, -1e-30, 3e7])] * 3
    parts = zip(quantizers, rights, folds, biases, strict=True)
    assignments = {f"site{i}": Assignment(*each, 1 / 3 + i, bias) for i, (*each, bias) in enumerate(parts)}
    written = Partial(tmp_path / "partial", "these")
    for name, assignment in assignments.items():
        written.add(name, assignment)
    read = Partial(tmp_path / "partial", "these")
    for name, assignment in assignments.items():
        assert_same(read.get(name), assignment)
    assert read.get("another") is None


def test_a_line_that_was_cut_off_is_searched_again(tmp_path):
    path = tmp_path / "partial"
    written = Partial(path, "these")
    for name in ("first", "second"):
        written.add(name, Assignment(None, None, None, 1.0))
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        read = Partial(path, "these")
        lines = whole[:length].count(b"\n")
        assert (read.get("first") is None) == (lines < 2)
        assert read.get("second") is None
        read.add("third", Assignment(None, None, None, 2.0))
        assert Partial(path, "these").get("third").sqnr == 2.0


UNIFORM = {"dtype": "float32", "kind": "uniform", "bits": 4, "shape": [1], "scale": [1.0], "zero_point": [0]}


def line(**changes):
    """A file of one search, after these changes of it."""
    fields = {"name": "a", "left": UNIFORM, "right": None, "sqnr": 1.0, "fold": None, "bias": None} | changes
    return b'{"searches": "these"}\n' + json.dumps(fields).encode() + b"\n"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (line(), "another model, other images or other choices"),
        (b'{"my": "only copy"}', "it does not start with a fingerprint"),
        (b'{"searches": "more"}\n{"name": "cut', "another model, other images or other choices"),
    ],
)
def test_another_file_is_refused_and_kept(tmp_path, content, words):
    path = tmp_path / "partial"
    path.write_bytes(content)
    with pytest.raises(DataError, match=words):
        Partial(path, "others")
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    "content",
    [
        b"no json\n",
        b'{"searches": "these"}\n{"name": "a"}\n',
        b'{"searches": "these"}\n[1]\n',
        b'{"searches": "these"}\n{"name": "a", "left": {"kind": "Nothing"}, "right": null, "sqnr": 1, "fold": null}\n',
        b"\xff\xfe\n",
        line(left=1),
        line(left=UNIFORM | {"scale": [-1.0]}),
        line(left=UNIFORM | {"zero_point": [16]}),
        line(left=UNIFORM | {"bits": "4"}),
        line(left=UNIFORM | {"dtype": ["float32"]}),
        line(sqnr="high"),
        line(fold=[{"dtype": "float32", "shape": 1, "values": [1.0]}, 2]),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, content):
    path = tmp_path / "partial"
    path.write_bytes(line())
    assert Partial(path, "these").get("a").left.bits == 4
    path.write_bytes(content)
    with pytest.raises(DataError, match="remove it"):
        Partial(path, "these")


CONFIG = Config(images=4, search=BRIEF, stages=())


@pytest.fixture(scope="module")
def whole(tiniest, images, tmp_path_factory):
    """The bytes of a model, and the file of its searches."""
    path = tmp_path_factory.mktemp("whole") / "partial"
    return serialise(adalog.quantize(tiniest, images, CONFIG, partial=path)), path


@pytest.mark.slow
@pytest.mark.parametrize("stop", [1, 4, 7])
def test_an_interrupted_call_ends_in_the_same_bytes(tmp_path, tiniest, images, whole, stop):
    path = tmp_path / "partial"

    def interrupt(done, total, site):
        if done == stop:
            raise StopHere

    with pytest.raises(StopHere):
        adalog.quantize(tiniest, images, CONFIG, partial=path, progress=interrupt)
    assert len(path.read_text().splitlines()) == 1 + stop
    assert serialise(adalog.quantize(tiniest, images, CONFIG, partial=path)) == whole[0]


@pytest.mark.slow
def test_finished_searches_are_not_repeated(tmp_path, tiniest, images, whole, monkeypatch):
    content, path = whole[0], shutil.copy(whole[1], tmp_path)

    def refuse(*args):
        raise AssertionError("searched again")

    for name in ("search_product", "fold_channels"):
        monkeypatch.setattr(Search, name, refuse)
    assert serialise(adalog.quantize(tiniest, images, CONFIG, partial=path)) == content


@pytest.mark.slow
@pytest.mark.parametrize("change", ["config", "images", "weights"])
def test_other_searches_are_told_apart(tmp_path, tiniest, images, whole, change):
    path = shutil.copy(whole[1], tmp_path)
    model, config = tiniest, CONFIG
    if change == "images":
        images = images + 1e-3
    elif change == "config":
        config = replace(CONFIG, weight_bits=3)
    else:
        model = type(tiniest)(width=16, depth=1, heads=2).eval()
    with pytest.raises(DataError, match="holds searches of another"):
        adalog.quantize(model, images, config, partial=path)


def stop_after_the_first(done, total, site):
    if done:
        raise StopHere


@pytest.mark.parametrize("method", ["adalog", "ptq4vit", "apq-vit", "evol-q"])
def test_another_seed_or_refinement_is_another_calibration(tmp_path, seeded, method):
    """Its images may be the same: random gradients, and what refines blocks or weights, are drawn from the seed too."""
    path, config = tmp_path / "partial", brief(method)
    with pytest.raises(StopHere):
        seeded[0].assign(config, Resources(partial=path, progress=stop_after_the_first))
    before = path.read_bytes()
    assert len(before.splitlines()) == 2
    with pytest.raises(DataError, match="holds searches of another"):
        seeded[1].assign(config, Resources(partial=path))
    for field in REFINED.get(method, ()):
        other = replace(config, stages=(replace(config.stages[0], **{field: 5}),))
        assert other != config
        with pytest.raises(DataError, match="holds searches of another"):
            seeded[0].assign(other, Resources(partial=path))
    with pytest.raises(StopHere):  # the seed and choices that it was made with still read it
        seeded[0].assign(config, Resources(partial=path, progress=stop_after_the_first))
    assert path.read_bytes() == before


def quantize_all(out, partial=None):
    """What a process does until it is killed."""
    gc.freeze()  # as `commands.forked` does
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = DemoViT(width=16, depth=1, heads=2).eval()
    images = torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    config = Config(weight_bits=3, activation_bits=3, images=16, search=BRIEF, stages=(Correction(images=16),))
    adalog.quantize(model, images, config, partial=partial).save(out)


@pytest.mark.slow
def test_a_killed_process_goes_on_and_ends_in_the_same_bytes(tmp_path):
    whole = tmp_path / "whole.safetensors"
    out, partial = tmp_path / "killed.safetensors", tmp_path / "partial"

    def start(*arguments):
        process = forking().Process(target=quantize_all, args=arguments)
        process.start()
        return process

    moments, first = random.Random(0), start(whole)
    first.join()
    assert first.exitcode == 0
    for _ in range(3):
        process = start(out, partial)
        lines = len(partial.read_bytes().splitlines()) if partial.exists() else 0
        target = lines + moments.randint(1, 4)
        while process.exitcode is None and (not partial.exists() or partial.read_bytes().count(b"\n") < target):
            time.sleep(0.01)
        time.sleep(moments.random() * 0.1)
        process.kill()
        process.join()
        assert not out.exists() or out.read_bytes() == whole.read_bytes()
    last = start(out, partial)
    last.join()
    assert last.exitcode == 0
    assert out.read_bytes() == whole.read_bytes()
    names = [json.loads(line)["name"] for line in partial.read_text().splitlines()[1:]]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("size", [6, 100])
def test_a_search_waits_until_there_is_room(size):
    room, inside, done = Scratch(10), threading.Event(), threading.Event()

    def second():
        with room.reserve(size):
            inside.set()
        done.set()

    with room.reserve(6):
        thread = threading.Thread(target=second)
        thread.start()
        assert not inside.wait(0.2)
    assert inside.wait(10)
    assert done.wait(10)
    thread.join()
    with room.reserve(4), room.reserve(6):  # which fit together
        pass


def search_in_little_memory():
    """Print the SQNR that a search of many rows reaches in half the memory that calibrations have."""
    import resource

    torch.set_num_threads(1)
    kind = sys.argv[1]
    width, columns = (256, 64) if kind == "log" else (64, 256)
    x = torch.randn((1 << 25) // max(width, columns), width).abs_()
    form = LogFormat(4, r=37) if kind == "log" else UniformFormat(4)
    left, right = Operand(x, form), Operand(torch.randn(columns, width), UniformFormat(4, own_dims=(0,)))
    small = Operand(x[:64].clone(), form)
    search = Search(init=(4, 2), parents=1, steps=0, rounds=1)
    search.search_product(Product("linear", small, right))  # what only starting costs
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    more = default_memory(torch.device("cpu")) // 2
    resource.setrlimit(resource.RLIMIT_AS, (used + more, used + more))
    sys.stdout.write(str(search.search_product(Product("linear", left, right)).sqnr))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc to read the memory in use")
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["log", "uniform"])
def test_a_search_keeps_to_its_memory(kind):
    """The operand or the output has 2**25 elements, 128 MiB: half as many again are in a Swin-B at 32 images."""
    code, output, error = forked(kind, main=search_in_little_memory)
    assert code == 0, error
    assert float(output) > 5
