"""The binding of the C library: it has the bits of `native` without PyTorch, and says why it refuses a file."""

import copy
import ctypes
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import adalog.run
from adalog import ArtifactError, Calibration, ProgramError, QuantizedModel, library
from adalog.export import to_pack
from adalog.graph.program import ModelOutput, Ref
from commands import run_alone
from stored import first, packed, rebuilt, setting
from test_native import convolutions, hidden
from toys import Toy

pytestmark = pytest.mark.skipif(not library.levels(), reason=f"no kernels: {library.why()}")


@pytest.fixture(scope="module")
def file(quantized, tmp_path_factory):
    """A pack for three images at once."""
    return packed(quantized, tmp_path_factory.mktemp("run") / "model.adalog", (3,))


# --- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 3, 4])
def test_bits_are_those_of_native(file, quantized, images, count):
    model = adalog.run.load(file)
    found = model(images[:count].numpy())
    assert found.dtype == np.float32
    assert np.array_equal(found, quantized.compile("native")(images[:count]).numpy())
    assert (model.batches, model.inputs, model.bits) == ((3,), {"images": (3, 32, 32)}, "w4a4")
    assert (model.threads, model.level) == (1, library.levels()[-1])
    assert model.nbytes > 0


@pytest.mark.parametrize("level", library.levels())
def test_a_pack_is_for_every_level(file, quantized, images, level):
    found = adalog.run.load(file, level=level, threads=2)(images.numpy())
    assert np.array_equal(found, quantized.compile("native", level=level)(images).numpy())


def test_numpy_is_enough(file, quantized, images, tmp_path):
    assert np.array_equal(run_alone(file, images, tmp_path), quantized.compile("native")(images).numpy())


def test_outputs_keep_their_structure(quantized, images, tmp_path):
    program = quantized.program
    norm = next(node.name for node in program.nodes if node.op == "aten.layer_norm.default")
    given = ModelOutput(logits=program.output, more=[(Ref(norm),), {"again": program.output}])
    model = QuantizedModel(replaced(quantized.quantized, program=replaced(program, output=given)))
    run = adalog.run.load(packed(model, tmp_path / "model.adalog"))
    assert [each["name"] for each in run.describe()["outputs"]] == ["logits", "more.0.0", "more.1.again"]
    found, wanted = run(images[:2].numpy()), model.compile("native")(images[:2])
    assert found.keys() == wanted.keys()
    assert (type(found["more"]), type(found["more"][0])) == (list, tuple)
    assert np.array_equal(found["more"][0][0], wanted.more[0][0].numpy())
    assert np.array_equal(found["more"][1]["again"], wanted.logits.numpy())


def replaced(value, **changes):
    found = copy.copy(value)
    for name, each in changes.items():
        object.__setattr__(found, name, each)
    return found


def test_a_mobile_network_has_a_pack(fast, tmp_path):
    """Convolutions of all kinds with activations run without PyTorch, with the bits of `native`."""
    torch.manual_seed(0)
    model, x = convolutions()
    quantized = Calibration(model.eval(), x).quantize(fast)
    compiled, run = quantized.compile("native"), adalog.run.load(packed(quantized, tmp_path / "model.adalog", (2,)))
    assert np.array_equal(run(x.numpy()), compiled(x).numpy())
    found, wanted = compiled.trace("each", x), quantized.compile("reference").trace("each", x)
    assert all(map(torch.equal, found.accumulators, wanted.accumulators))


# --- what has no pack ------------------------------------------------------------------------------------------------


MIXING = Toy(lambda m, x: m.head(x - x.mean(0, keepdim=True)), head=nn.Linear(24, 3))


@pytest.mark.parametrize(
    ("module", "shape", "why"),
    [
        (hidden()[0], (6, 7, 24), r"only PyTorch runs .*aten.masked_fill.Scalar \(1\)"),
        (MIXING, (6, 24), "the images of a batch change each other's outputs"),
    ],
)
def test_what_has_no_pack(fast, tmp_path, module, shape, why):
    torch.manual_seed(0)
    Calibration(module.eval(), torch.randn(shape)).quantize(fast).save(tmp_path / "model.safetensors")
    with pytest.raises(ArtifactError, match=f"cannot pack .*model.safetensors: .*{why}"):
        to_pack(tmp_path / "model.safetensors", (2,))


# --- what does not fit, is damaged or fails --------------------------------------------------------------------------


def test_inputs_that_do_not_fit(file, images):
    model = adalog.run.load(file)
    for wrong in ([images[0]], [images.double()], [images, images], [], [images[:, :, :8]]):
        with pytest.raises(ValueError, match=r"the model takes \(B, 3, 32, 32\) of float32; got"):
            model(*(value.numpy() for value in wrong))
    with pytest.raises(ValueError, match="contain NaN"):
        model(np.full((1, 3, 32, 32), np.nan, np.float32))


def test_options_that_do_not_fit(file):
    with pytest.raises(ValueError, match="level = 'fast' does not run on this machine: choose one of"):
        adalog.run.load(file, level="fast")
    for threads in (0, 1.5, 1025):
        with pytest.raises(ValueError, match=f"threads = {threads} is not a whole number from 1 to 1024"):
            adalog.run.load(file, threads=threads)
    for memory in (0, -1):
        with pytest.raises(ValueError, match=f"memory = {memory} is too little: give a number of bytes of at least 1"):
            adalog.run.load(file, memory=memory)
    with pytest.raises(MemoryError, match="takes more than the limit of 100000 bytes"):
        adalog.run.load(file, memory=100_000)


def test_what_is_no_pack(file, tmp_path):
    (tmp_path / "cut.adalog").write_bytes(file.read_bytes()[:-1])
    for path, why in (
        (tmp_path / ("none" * 30), "none cannot be read: No such file or directory;"),
        (tmp_path, "cannot be read: it is not a regular file"),
        (tmp_path / "cut.adalog", "cannot be used: "),
        (file.with_suffix(".safetensors"), "cannot be used: it is not a pack"),
        ("\0", "cannot be read: no file can have this name"),
    ):
        with pytest.raises(ArtifactError, match=why) as error:
            adalog.run.load(path)
        assert "pack" in str(error.value).rpartition(";")[2]


def test_a_step_that_fails(file, tmp_path, images):
    """Kernels find sizes that do not fit together when they are called, before they read or write."""
    change = setting("tapes", 0, first("norm"), "rows", 10**6)
    (tmp_path / "hostile").write_bytes(rebuilt(file.read_bytes(), change, key=adalog.run.KEY))
    with pytest.raises(ProgramError, match="step layer_norm fails: "):
        adalog.run.load(tmp_path / "hostile")(images.numpy())


@pytest.mark.parametrize("name", ["error", "options", "value", "description", "buffer"])
def test_structures_have_the_fields_of_the_header(name):
    structure = getattr(adalog.run, f"_{name.title()}")
    header = Path(adalog.run.__file__).with_name("runtime") / "native" / "adalog.h"
    text = re.sub(r"/\*.*?\*/", "", header.read_text(), flags=re.DOTALL)
    (body,) = re.findall(r"typedef struct \{([^}]*)\} adalog_" + name + ";", text)
    fields = [re.search(r"(\w+)(\[\d+\])?$", part.strip())[1] for part in re.split("[;,]", body) if part.strip()]
    assert fields == [field for field, *_ in structure._fields_]
    pointers = [part.strip() for part in body.split(";") if "*" in part]
    kinds = ctypes._Pointer, ctypes.c_char_p, ctypes.c_void_p
    assert len(pointers) == sum(issubclass(kind, kinds) for _, kind in structure._fields_)


HOSTILE = """
import sys
from pathlib import Path
import numpy as np
import adalog.run
from adalog.errors import AdalogError
from test_native_model import mutants

file, place, seed, count = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
ran = 0
for pack in mutants(file.read_bytes(), seed, count):
    place.write_bytes(pack)
    try:
        adalog.run.load(place, memory=2**28)(np.ones((3, 3, 32, 32), np.float32))
        ran += 1
    except (AdalogError, MemoryError, ValueError):
        pass
print(ran)
"""  # for processes in which the whole library has sanitizers
