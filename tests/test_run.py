"""The runtime alone: it has the bits of `native` without PyTorch, and a tape does nothing beyond its memory."""

import copy
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.numpy import load as parse
from safetensors.numpy import save as to_bytes
from torch import nn

import adalog.run
from adalog import AdalogError, ArtifactError, Calibration, QuantizedModel, library
from adalog.artifact import read_header
from adalog.export import to_tape
from adalog.graph.program import Output, Ref
from adalog.run import abi, floats
from adalog.run import tape as tapes
from commands import call, run_alone, say
from stored import first, header_of, rebuilt, setting
from test_native import Inverted, Masked

pytestmark = pytest.mark.skipif(not library.levels(), reason=f"no kernels: {library.why()}")


@pytest.fixture(scope="module")
def file(quantized, tmp_path_factory):
    """An artifact with its tape for three images beside it."""
    path = tmp_path_factory.mktemp("run") / "model.safetensors"
    quantized.save(path)
    adalog.run.tape_path(path).write_bytes(to_tape(path, 3))
    return path


def changed(tape, change):
    """The tape with its JSON changed in place by `change`."""
    return rebuilt(tape, change, key=tapes.KEY)


# --- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 3, 4])
def test_bits_are_those_of_native(file, quantized, images, count):
    model = adalog.run.load(file)
    wanted = quantized.compile("native")(images[:count])
    found = model(images[:count].numpy())
    assert found.dtype == np.float32
    assert np.array_equal(found, wanted.numpy())
    assert (model.batch, model.inputs) == (3, {"images": (3, 3, 32, 32)})


@pytest.mark.parametrize("level", library.levels())
def test_a_tape_is_for_every_level(file, quantized, images, level):
    found = adalog.run.load(file, level=level, threads=2)(images.numpy())
    assert np.array_equal(found, quantized.compile("native", level=level)(images).numpy())


def test_numpy_and_safetensors_are_enough(file, quantized, images, tmp_path):
    assert np.array_equal(run_alone(file, images, tmp_path), quantized.compile("native")(images).numpy())


def test_outputs_keep_their_structure(quantized, images, tmp_path):
    program = quantized.program
    norm = next(node.name for node in program.nodes if node.op == "aten.layer_norm.default")
    given = Output(logits=program.output, more=[(Ref(norm),), {"again": program.output}])
    model = QuantizedModel(replaced(quantized.quantized, program=replaced(program, output=given)))
    path = tmp_path / "model.safetensors"
    model.save(path)
    adalog.run.tape_path(path).write_bytes(to_tape(path))
    found, wanted = adalog.run.load(path)(images[:2].numpy()), model.compile("native")(images[:2])
    assert found.keys() == wanted.keys()
    assert isinstance(found["more"], list)
    assert isinstance(found["more"][0], tuple)
    assert np.array_equal(found["more"][0][0], wanted.more[0][0].numpy())
    assert np.array_equal(found["more"][1]["again"], wanted.logits.numpy())


def replaced(value, **changes):
    found = copy.copy(value)
    for name, each in changes.items():
        object.__setattr__(found, name, each)
    return found


def test_floats_are_what_torch_computes():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 3, 5, 7, generator=generator)
    two = {f"aten.{name}.Tensor": getattr(torch, name) for name in ("add", "sub", "mul", "div")}
    cases = [*((op, (x, y), function(x, y)) for op, function in two.items())]
    cases += [("aten.add.Tensor", (x, 0.1), x + 0.1)]
    cases += [("aten.cat.default", ((x, y), -2), torch.cat([x, y], -2)), (floats.COPY, (x,), x)]
    for op, args, wanted in cases:
        out = np.empty(wanted.shape, np.float32)
        given = [tuple(map(torch.Tensor.numpy, arg)) if isinstance(arg, tuple) else arg for arg in args]
        floats.FLOATS[op](out, *(arg.numpy() if isinstance(arg, torch.Tensor) else arg for arg in given))
        assert np.array_equal(out, wanted.numpy()), op
    for dims, keeps in (((1,), False), ((0, -1), True)):
        wanted = x.double().mean(dims, keeps)
        out = np.empty(wanted.shape, np.float32)
        floats.FLOATS["aten.mean.dim"](out, x.numpy(), dims, keeps)
        assert np.array_equal(out, wanted.float().numpy())
    for size in ((1, 1), (2, 3), (5, 7)):
        wanted = torch.nn.functional.adaptive_avg_pool2d(x, size)
        out = np.empty(wanted.shape, np.float32)
        floats.FLOATS["aten.adaptive_avg_pool2d.default"](out, x.numpy(), size)
        assert np.allclose(out, wanted.numpy(), rtol=1e-6, atol=1e-6)
    others = {"aten.mean.dim", "aten.adaptive_avg_pool2d.default"}
    assert floats.FLOATS.keys() == {*(op for op, *_ in cases), *others}


def test_a_mobile_network_has_a_tape(fast, tmp_path):
    """Convolutions of all kinds with activations run without PyTorch, with the bits of `native`."""
    torch.manual_seed(0)
    x = torch.randn(5, 3, 16, 16)
    quantized, path = Calibration(Inverted().eval(), x).quantize(fast), tmp_path / "model.safetensors"
    quantized.save(path)
    adalog.run.tape_path(path).write_bytes(to_tape(path, 2))
    compiled = quantized.compile("native")
    assert np.array_equal(adalog.run.load(path)(x.numpy()), compiled(x).numpy())
    found, wanted = compiled.trace("each", x), quantized.compile("reference").trace("each", x)
    assert all(map(torch.equal, found.accumulators, wanted.accumulators))


# --- what has no tape ------------------------------------------------------------------------------------------------


class Mixing(nn.Module):
    def forward(self, x):
        return self.head(x - x.mean(0, keepdim=True))

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(24, 3)


@pytest.mark.parametrize(
    ("module", "shape", "why"),
    [
        (Masked(torch.ones(7, 7).triu(1).bool()), (6, 7, 24), r"only PyTorch runs .*\(aten.masked_fill.Scalar\)"),
        (Mixing(), (6, 24), "the images of a batch change each other's outputs"),
    ],
)
def test_what_has_no_tape(fast, tmp_path, module, shape, why):
    torch.manual_seed(0)
    Calibration(module.eval(), torch.randn(shape)).quantize(fast).save(tmp_path / "model.safetensors")
    with pytest.raises(ArtifactError, match=f"cannot make a tape of .*model.safetensors: .*{why}"):
        to_tape(tmp_path / "model.safetensors", 2)


def test_the_command(file, monkeypatch, capsys, tmp_path):
    told = json.loads(say(monkeypatch, capsys, "tape", file, "--out", tmp_path / "b", "--batch", 2, "--json", "-"))
    assert told == {"file": str(tmp_path / "b"), "bytes": (tmp_path / "b").stat().st_size, "batch": 2}
    assert adalog.run.load(file, tape=tmp_path / "b").batch == 2
    code, error = call(monkeypatch, capsys, "tape", file, "--out", file)
    assert (code, "is also an input" in error) == (2, True)
    other = tmp_path / "none.safetensors"
    assert call(monkeypatch, capsys, "tape", other)[0] == 2


def test_inputs_that_do_not_fit(file, images):
    model = adalog.run.load(file)
    for wrong in ([images[0]], [images.double()], [images, images], [], [images[:, :, :8]]):
        with pytest.raises(ValueError, match=r"the model takes \(B, 3, 32, 32\) of float32; got"):
            model(*(value.numpy() for value in wrong))
    with pytest.raises(ValueError, match="level = 'fast' does not run on this machine: choose one of"):
        adalog.run.load(file, level="fast")


# --- what is stale, damaged or hostile -------------------------------------------------------------------------------


def refused(file, tmp_path, content, match):
    (tmp_path / "tape").write_bytes(content)
    with pytest.raises(ArtifactError, match=match) as error:
        adalog.run.load(file, tape=tmp_path / "tape")
    assert str(tmp_path / "tape") in str(error.value)
    assert f"`adalog tape {file}`" in str(error.value)


def test_files_that_do_not_go_together(file, quantized, tmp_path):
    tape = adalog.run.tape_path(file).read_bytes()
    other = tmp_path / "other.safetensors"
    quantized.save(other)
    other.write_bytes(other.read_bytes()[:-1] + b"\0")
    with pytest.raises(ArtifactError, match=r"other.tape cannot be read: no such file; make it with `adalog tape"):
        adalog.run.load(other)
    refused(other, tmp_path, tape, "it belongs to another artifact, not to")
    refused(file, tmp_path, tape[: len(tape) // 2], "cannot be used")
    refused(file, tmp_path, file.read_bytes(), "it holds no tape")
    for name in ("x" * 300, "\0", "."):
        with pytest.raises(ArtifactError, match=r"cannot be read: .*; name an artifact"):
            adalog.run.load(name)
    with pytest.raises(ArtifactError, match="other cannot be read: no such file; name an artifact"):
        adalog.run.load(tmp_path / "other")
    with pytest.raises(ArtifactError, match="cannot be read: not a regular file"):
        adalog.run.load(tmp_path)


VIEW = {"at": ["work", 0], "shape": [3, 3, 32, 32], "strides": [0, 0, 0, 4], "type": "float32"}
ONES = {"at": ["work", 0], "shape": [3, 2**27], "strides": [0, 0], "type": "float32"}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (setting("format", 2), "it has format 2, but adalog reads format 1"),
        (setting("interface", 1), "it is for kernel interface 1, but adalog has"),
        (setting("batch", 0), "its batch of 0 images is out of range"),
        (setting("batch", 2), r"an input is \['images', \[3, 3, 32, 32\]\], not a .* with 2 images"),
        (setting("work", 2**60), "its work takes 1152921504606846976 bytes for 3 images"),
        (setting("own", 1), "these fields are missing or unknown: own"),
        (setting("artifact", "a\x1b"), "do not print"),
        (setting("fills", [[0, 0, 2**40]]), "it fills"),
        (setting("weights", 0, 2, 3), "codes of 3 bits take"),
        (setting("weights", 0, 1, [1, 1]), "zero points"),
        (setting("weights", 0, 3, 256), r"has an invalid shape \[.*\] or invalid numbers \[4, 256"),
        (
            setting("calls", 0, 1, "aten.exp.default"),
            "calls 'aten.exp.default', which this package does",
        ),
        (setting("output", {"set": []}), "it outputs a set"),
        (setting(first("linear"), "weights", 99), "has the weight 99"),
        (setting(first("linear"), "rows", 2**64), "has rows = 18446744073709551616"),
        (setting(first("linear"), "row", 1.5), "has row = 1.5"),
        (setting(first("linear"), "bytes", 2**40), "bytes, not 1099511627776"),
        (setting(first("linear"), "bytes", -1), "bytes, not -1"),
        (setting(first("linear"), "data", ["work", 2**40]), "lies beyond the region"),
        (setting(first("linear"), "data", ["stack", 0]), "'stack' is not a region"),
        (setting(first("linear"), "data", [7, 0]), "7 is not a region"),
        (setting(first("linear"), "out", "data", ["constants", 0]), "is not in work"),
        (setting(first("linear"), "out", "data", [0, 0]), "is not in work"),
        (setting(first("norm"), "out", "scale", ["work", 0]), "is not in constants"),
        (setting(first("norm"), "out", "scale", ["constants", 2]), "is not aligned to the size of its numbers"),
        (setting(first("norm"), "data", ["work", 1]), "is not aligned to the size of its numbers"),
        (setting(first("norm"), "epsilon", None), "has epsilon = None"),
        (setting(first("norm"), "out", "address", 1), "has fields that no kernel takes"),
        (setting(first("attention"), "scores", "left", "zero", ["constants", 10**9]), "lies beyond the region"),
        (setting(first("attention"), "scores", "heads", 10**9), "bytes, not 4000000000"),
        (setting(first("attention"), "steps", "length", 2**30), "bytes, not 4294967296"),
        (setting(first("patches"), "kernel", [1]), r"has kernel = \[1\]"),
        (setting(first("aten.mean.dim"), 0, "at", ["constants", 0]), "lies in a region that it may not use"),
        (setting(first("aten.mean.dim"), 1, "shape", [10**9]), "cannot be used"),
        (
            setting(first("aten.mean.dim"), 1, "type", "object"),
            "is not a view: its shape, strides or type are not valid",
        ),
        (setting(first("aten.mean.dim"), 1, "strides", [0]), "is not a view: its shape, strides or type are not valid"),
        (setting("output", {**ONES, "shape": [3, 2**30]}), "shows 12884901888 bytes, more than 3221225472"),
        (setting("output", {"list": [ONES] * 3}), "its outputs take 4831838208 bytes, more than 3221225472"),
        (
            setting("copies", 0, {**VIEW, "shape": [3, 3, 32, 31]}),
            r"copies an input \(3, 3, 32, 32\) of float32 to",
        ),
    ],
)
def test_what_a_tape_may_not_say(file, tmp_path, change, match):
    tape = adalog.run.tape_path(file).read_bytes()
    refused(file, tmp_path, changed(tape, change), match)


@pytest.mark.parametrize("region", ["work", "constants"])
def test_views_lie_within_memory_without_a_byte(file, tmp_path, region):
    def change(header):
        view = {**VIEW, "at": [region, 0], "strides": [2**20, 4, 4, 4]}
        header |= {"work": 0, "fills": [], "calls": [], "weights": [], "copies": [None], "output": view}
        if region == "work":
            header["copies"] = [view]

    tape = adalog.run.tape_path(file).read_bytes()
    text = json.dumps(header_of(changed(tape, change), tapes.KEY))
    empty = to_bytes({"constants": np.zeros(0, np.uint8)}, {tapes.KEY: text})
    refused(file, tmp_path, empty, "takes 2097412 bytes, but only 0 are there")


def test_equal_weights_are_laid_out_once(file, tmp_path, images):
    tape = adalog.run.tape_path(file).read_bytes()
    many = changed(tape, lambda header: header["weights"].extend(header["weights"] * 20))
    (tmp_path / "tape").write_bytes(many)
    model, wanted = adalog.run.load(file, tape=tmp_path / "tape"), adalog.run.load(file)
    assert model.weight_bytes == wanted.weight_bytes
    assert np.array_equal(model(images.numpy()), wanted(images.numpy()))

    def differ(header):
        header["weights"] += [[*header["weights"][0][:-1], top] for top in range(20)]

    refused(file, tmp_path, changed(tape, differ), "is laid out in more than 16 ways")


def test_the_order_of_fields_does_not_matter(file, tmp_path):
    """How many zero points the values have is told by the scores, which may come later."""
    tape = adalog.run.tape_path(file).read_bytes()

    def change(header):
        given = first("attention")(header)
        given["scores"] = given.pop("scores")
        given["values"]["zero"] = ["constants", len(parse(tape)["constants"])]

    refused(file, tmp_path, changed(tape, change), "has 0 bytes, not")


def test_sizes_that_do_not_fit_together(file, tmp_path, images):
    """Kernels find them when they are called, before they read or write."""
    tape = changed(adalog.run.tape_path(file).read_bytes(), setting(first("norm"), "rows", 10**6))
    (tmp_path / "tape").write_bytes(tape)
    with pytest.raises(AdalogError, match="step layer_norm fails: ValueError: a kernel's sizes do not match"):
        adalog.run.load(file, tape=tmp_path / "tape")(images.numpy())


def test_operands_of_the_wrong_kind(file, tmp_path, images):
    def change(header):
        first("aten.mean.dim")(header)[1:] = [0.5, []]

    tape = changed(adalog.run.tape_path(file).read_bytes(), change)
    (tmp_path / "tape").write_bytes(tape)
    with pytest.raises(AdalogError, match="step mean fails: AttributeError: 'float"):
        adalog.run.load(file, tape=tmp_path / "tape")(images.numpy())


def test_every_pointer_has_an_extent():
    for structure in abi.STRUCTURES:
        pointers = {name for name, kind, *_ in structure._fields_ if kind is abi.c_void_p} - {"weights"}
        assert pointers == abi.EXTENTS.get(structure, {}).keys(), structure


HOSTILE = """
import json, random, sys
import numpy as np
import adalog.run
from adalog.errors import AdalogError
from adalog.run import tape as tapes
from safetensors.numpy import load as parse, save as to_bytes

file, place, seed, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
content = adalog.run.tape_path(file).read_bytes()
length = int.from_bytes(content[:8], "little")
text = json.loads(content[8 : 8 + length])["__metadata__"][tapes.KEY]
chance, constants = random.Random(seed), parse(content)["constants"]
PARTS = ["calls"] * 5 + ["work", "fills", "copies", "output", "weights"]

def spots(value):
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(item, (dict, list)):
            yield from spots(item)
        yield value, key

def places(header):
    part = chance.choice(PARTS)
    return [(header, part), *spots(header[part])] if isinstance(header[part], (dict, list)) else [(header, part)]

ran = 0
for _ in range(count):
    header = json.loads(text)
    if chance.random() < 0.2:  # few calls ask little of the rest
        header["calls"] = chance.sample(header["calls"], chance.randrange(4))
    size = chance.choice([len(constants)] * 8 + [0, 4096, len(constants) // 2, len(constants) - 1])
    for _ in range(chance.choice([1, 1, 2, 5])):
        holder, key = chance.choice(places(header))
        value = holder[key]
        if isinstance(value, int):
            holder[key] = chance.choice([value + 1, value - 1, 0, 1, -1, 2 * value, value // 2, 2**31, 2**63 - 1])
        else:
            other, where = chance.choice(places(header))
            holder[key] = json.loads(json.dumps(other[where]))
    try:
        with open(place, "wb") as out:
            out.write(to_bytes({"constants": constants[:size]}, {tapes.KEY: json.dumps(header)}))
        model = adalog.run.load(file, tape=place)
        model(np.ones((3, 3, 32, 32), np.float32))
        ran += 1
    except (AdalogError, MemoryError):
        pass
assert 0 < ran < count, ran
"""


def test_hostile_tapes_do_no_harm(file, tmp_path):
    """They run within their memory or are refused; a process that they could harm would crash now and then."""
    subprocess.run([sys.executable, "-c", HOSTILE, str(file), str(tmp_path / "tape"), "0", "150"], check=True)


def test_the_header_names_weights_of_the_artifact(file):
    tape = adalog.run.tape_path(file).read_bytes()
    weights = read_header(file.read_bytes())["weights"]
    assert {name for name, *_ in header_of(tape, tapes.KEY)["weights"]} == weights.keys()


# --- what loading costs ----------------------------------------------------------------------------------------------


def test_a_number_of_threads_that_is_not_whole():
    with pytest.raises(ValueError, match="threads"):
        abi.Context(1.5)
