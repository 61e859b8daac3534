"""The file: it round-trips bit by bit, is as small as it says, and nothing hostile in it passes."""

import errno
import hashlib
import json
import math
import os
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load as parse
from safetensors.torch import save as to_bytes

import adalog
from adalog import ArtifactError, Calibration, Config, DataError, QuantizedModel
from adalog.artifact import FORMAT, KEY, inspect, sizes
from adalog.choices import ReleasedSearch, ScaleSearch
from adalog.files import check_writable, write_whole
from adalog.graph.operations import FAKE_QUANTIZE
from adalog.graph.program import Node, Program, Ref
from adalog.quantized import QuantizedProgram
from adalog.quantizers import (
    LogQuantizer,
    QuantizedTensor,
    SplitUniformQuantizer,
    TwinUniformQuantizer,
    UniformQuantizer,
)
from adalog.quantizers.codec import decode_quantizer, pack, unpack
from stored import deserialise, serialise
from strategies import bits

# --- packing ---------------------------------------------------------------------------------------------------------


@given(bits, st.integers(0, 65), st.randoms(use_true_random=False))
def test_pack_and_unpack_are_inverse(width, count, random):
    codes = torch.tensor([random.randrange(2**width) for _ in range(count)], dtype=torch.uint8)
    packed = pack(codes, width)
    assert packed.dtype == torch.uint8
    assert packed.shape == (math.ceil(width * count / 8),)
    assert torch.equal(unpack(packed, width, count), codes)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 9, 1001])
def test_three_bits_take_three_bits(count):
    assert pack(torch.full((count,), 5, dtype=torch.uint8), 3).numel() == math.ceil(3 * count / 8)


def test_the_stream_starts_at_the_least_significant_bit():
    # 1, 2, 7 in 3 bits: 001 010 111 from the right is 1_1101_0001 = 0xD1, 0x01.
    assert pack(torch.tensor([1, 2, 7], dtype=torch.uint8), 3).tolist() == [0b11010001, 0b1]


@pytest.mark.parametrize("width", [2, 3, 7])
def test_a_code_that_does_not_fit_is_refused(width):
    with pytest.raises(ValueError, match=f"code {2**width} does not fit in {width} bits"):
        pack(torch.tensor([0, 2**width], dtype=torch.uint8), width)


@pytest.mark.parametrize("extra", [-1, 1])
def test_a_stream_of_another_length_is_refused(extra):
    packed = torch.zeros(4 + extra, dtype=torch.uint8)
    with pytest.raises(ArtifactError, match="10 codes of 3 bits take 4 bytes, the file has"):
        unpack(packed, 3, 10)


@pytest.mark.parametrize("place", [6, 7])
def test_bits_after_the_last_code_must_be_zero(place):
    packed = torch.tensor([0, 0, 0, 1 << place], dtype=torch.uint8)  # ten codes of three bits end at bit 30
    with pytest.raises(ArtifactError, match="bits after the last code are not zero"):
        unpack(packed, 3, 10)


# --- round trip ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def content(quantized):
    return serialise(quantized)


@pytest.fixture(scope="module")
def twin(calibration, fast):
    return calibration.quantize(replace(fast, post_gelu="twin"))


@pytest.fixture(scope="module")
def twin_content(twin):
    """With quantizers of every kind."""
    return serialise(twin)


def test_a_loaded_model_is_the_same(quantized, images, tmp_path):
    file = tmp_path / "deep" / "folder" / "model.safetensors"
    size = quantized.save(file)
    assert size == file.stat().st_size
    loaded = adalog.load(file)
    assert torch.equal(loaded(images), quantized(images))
    assert (loaded.config, loaded.ledger) == (quantized.config, quantized.ledger)
    assert (loaded.refusals, loaded.provenance) == (quantized.refusals, quantized.provenance)
    assert loaded.summary() == quantized.summary()
    assert loaded.float_sites() == []
    assert not loaded.training
    assert serialise(loaded) == file.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "method"),
    [
        *(("w3a5s2", "adalog"), ("w32a32", "adalog")),
        pytest.param("w32a4", "adalog", marks=pytest.mark.slow),
        pytest.param("w2a2", "log2", marks=pytest.mark.slow),
        pytest.param("w8a7s6", "log-sqrt2", marks=pytest.mark.slow),
        pytest.param("w5a3s8", "uniform", marks=pytest.mark.slow),
        pytest.param("w3a3", "adalog-paper", marks=pytest.mark.slow),
        pytest.param("w4a32", "adalog", marks=pytest.mark.slow),
    ],
)
def test_other_choices_round_trip(calibration, images, fast, name, method):
    choices = Config.preset(name, method)
    config = replace(choices, images=4, search=fast.search)
    model = calibration.quantize(config)
    loaded = deserialise(serialise(model))
    assert torch.equal(loaded(images), model(images))
    assert loaded.config == config


def test_twin_quantizers_round_trip(twin, twin_content, images):
    loaded = deserialise(twin_content)
    assert torch.equal(loaded(images), twin(images))
    assert loaded.config.post_gelu == "twin"
    kept = {name: q for name, q in loaded.program.quantizers.items() if isinstance(q, TwinUniformQuantizer)}
    assert len(kept) == sum(row.left == "4-bit twin uniform" for row in twin.ledger) == 2
    for name, quantizer in kept.items():
        original = twin.program.quantizers[name]
        assert quantizer.scale.shape == original.scale.shape == original.negative_scale.shape == ()
        assert torch.equal(quantizer.scale, original.scale)
        assert torch.equal(quantizer.negative_scale, original.negative_scale)
    assert serialise(loaded) == twin_content


@pytest.fixture(scope="module")
def split(calibration):
    search = ScaleSearch(metric="squared", candidates=6, rounds=1)
    return calibration.quantize(replace(Config.preset("w4a4", "ptq4vit"), images=4, search=search))


def test_split_quantizers_round_trip(split, images):
    content = serialise(split)
    loaded = deserialise(content)
    assert torch.equal(loaded(images), split(images))
    kept = {name: q for name, q in loaded.program.quantizers.items() if isinstance(q, SplitUniformQuantizer)}
    assert len(kept) == sum(row.left == "4-bit split uniform" for row in split.ledger) == 2
    for name, quantizer in kept.items():
        original = split.program.quantizers[name]
        assert torch.equal(quantizer.scale, original.scale)
        assert torch.equal(quantizer.coarse_scale, original.coarse_scale)
        assert quantizer.sums is original.sums is False
    assert serialise(loaded) == content


@pytest.mark.slow
@pytest.mark.parametrize("post_gelu", ["adalog", pytest.param("twin", marks=pytest.mark.slow)])
def test_released_models_round_trip(calibration, images, post_gelu):
    search = ReleasedSearch(steps=1, rounds=1)
    config = replace(Config.preset("w4a4", "adalog-released"), post_gelu=post_gelu, images=4, search=search)
    model = calibration.quantize(config)
    loaded = deserialise(serialise(model))
    assert torch.equal(loaded(images), model(images))
    assert loaded.config == config


@pytest.mark.slow
def test_same_seed_same_bytes(tiniest, images, fast):
    more = torch.cat([images, images.flip(3)])
    first, again, other = (adalog.quantize(tiniest, more, fast, seed=seed) for seed in (0, 0, 1))
    assert serialise(first) == serialise(again)
    assert (first.provenance["seed"], first.provenance["images"]) == (0, 4)
    assert first.provenance["calibration"] != other.provenance["calibration"]
    assert len(first.provenance["calibration"]) == 16


def test_the_format_is_what_it_was(monkeypatch):
    """One linear after a logarithmic quantizer, byte by byte: another hash is another format, and needs its number."""
    monkeypatch.setattr("adalog.version.__version__", "0")
    codes = torch.arange(10, dtype=torch.uint8).reshape(2, 5) % 8
    weight = QuantizedTensor(codes, UniformQuantizer(torch.tensor([[0.5], [0.1]]), torch.tensor([[3.0], [0.0]]), 3))
    left = LogQuantizer(torch.tensor(0.7), 17, 37, 4, offset=0.17, keeps_offset=True, width=8, headroom=3)
    nodes = (Node("l", FAKE_QUANTIZE, (Ref("x"), "l")), Node("y", "aten.linear.default", (Ref("l"), Ref("w"), None)))
    program = Program(("x",), nodes, Ref("y"), {"w": weight.dequantize()}, {"l": left}, {"w": weight})
    model = QuantizedModel(QuantizedProgram(program, Config(), (), {}, provenance={}, example=(torch.empty(0, 5),)))
    found = serialise(model)
    (length,) = struct.unpack("<Q", found[:8])
    header = json.loads(json.loads(found[8 : 8 + length])["__metadata__"][KEY])
    assert header["quantizers"]["l"] == {
        "kind": "log",
        "bits": 4,
        "shape": [],
        "scale": [0.7],
        "q": 17,
        "r": 37,
        "beyond": "zero-coded",
        "rounding": "nearest",
        "table": True,
        "offset": 0.17,
        "keeps_offset": True,
        "width": 8,
        "headroom": 3,
    }
    assert header["format"] == FORMAT == 3
    header["config"] = {}  # whose choices come and go
    text = json.dumps(header, sort_keys=True).encode() + found[8 + length :]
    assert hashlib.sha256(text).hexdigest() == "6b51b1bd74bf745c327d614b00cb9cb99494fa65e3798c81d953f3b3cc01fd54"


@pytest.mark.parametrize("fields", [{"width": 12}, {"width": 8, "headroom": 4}, {"headroom": -1}, {"width": "8"}])
def test_tables_that_do_not_fit(content, fields):
    def change(header):
        name = next(name for name, fields in header["quantizers"].items() if fields["kind"] == "log")
        header["quantizers"][name].update(fields)

    refused(rebuilt(content, change), "is damaged")


def test_floats_are_kept_exactly(quantized, content):
    program, loaded = quantized.program, deserialise(content).program
    assert program.tensors.keys() == loaded.tensors.keys()
    for name, value in program.tensors.items():
        assert loaded.tensors[name].dtype == value.dtype
        assert torch.equal(loaded.tensors[name], value)
    for name, weight in program.weights.items():
        assert torch.equal(loaded.weights[name].codes, weight.codes)
    for name, quantizer in program.quantizers.items():
        assert torch.equal(loaded.quantizers[name].scale, quantizer.scale)


def test_codes_take_their_bits_and_parts_sum_to_the_file(quantized, content):
    parts = sizes(content)
    assert sum(parts.values()) == len(content)
    assert parts["codes"] == sum(
        math.ceil(4 * weight.codes.numel() / 8) for weight in quantized.program.weights.values()
    )
    told = inspect(content)
    assert (told["bytes"], told["total_bytes"], told["bits"]) == (parts, len(content), "w4a4")
    assert told["float_sites"] == []
    assert len(told["sites"]) == len(quantized.ledger)
    json.dumps(told)


def test_output_structures_are_stored(images):
    class Outputs(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = torch.nn.Linear(32, 4)

        def forward(self, x):
            x = self.fc(x)
            return {"first": x, "rest": [(x + 1, x * 2), x.amax((1, 2))]}

    torch.manual_seed(0)
    model = Calibration(Outputs(), images).quantize(Config(images=4))
    expected, actual = model(images), deserialise(serialise(model))(images)
    assert torch.equal(actual["first"], expected["first"])
    assert isinstance(actual["rest"][0], tuple)
    assert torch.equal(actual["rest"][0][1], expected["rest"][0][1])


@pytest.mark.slow
def test_loads_where_no_model_library_is(quantized, images, tmp_path):
    quantized.save(tmp_path / "model.safetensors")
    torch.save(images, tmp_path / "images.pt")
    script = """
import sys
for name in ("timm", "torchvision", "transformers"):
    sys.modules[name] = None
import adalog, torch
print(adalog.load("model.safetensors")(torch.load("images.pt")).double().sum().item())
"""
    run = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) == pytest.approx(quantized(images).double().sum().item(), rel=1e-6)


# --- writing whole or not at all -------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["replace", "chmod"])
def test_an_interrupted_write_leaves_the_old_file(quantized, tmp_path, monkeypatch, step):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"old")

    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, step, fail)
    monkeypatch.setattr(Path, step, fail)
    with pytest.raises(KeyboardInterrupt):
        quantized.save(file)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert file.read_bytes() == b"old"


FULL = """
import resource, sys
from pathlib import Path
from adalog import files

resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, -1))
try:
    files.write_whole(Path(sys.argv[1]), bytes(200_000))
except OSError as error:
    print(error)
"""


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    """As on a full disk: the process may write no file as long."""
    resource = pytest.importorskip("resource")
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(OSError, match=f"{file} cannot be written: File too large; free some space") as error:
            write_whole(file, bytes(200_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert error.value.errno == errno.EFBIG
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert file.read_bytes() == b"old"


@pytest.mark.slow
def test_a_full_disk_leaves_the_old_file(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"old")
    run = subprocess.run([sys.executable, "-c", FULL, file], capture_output=True, text=True, check=False)
    told = f"{file} cannot be written: File too large; free some space, or choose another folder"
    assert (run.returncode, run.stdout, run.stderr) == (0, f"[Errno {errno.EFBIG}] {told}\n", "")
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert file.read_bytes() == b"old"


def read_only(folder):
    folder.chmod(0o500)
    return folder / "model.safetensors"


def a_folder(folder):
    (folder / "some").mkdir()
    return folder / "some"


def below_a_file(folder):
    (folder / "some").write_bytes(b"old")
    return folder / "some" / "model.safetensors"


def far_below_a_file(folder):
    return below_a_file(folder) / "deeper" / "model.safetensors"


@pytest.mark.parametrize(
    ("make", "why"),
    [
        pytest.param(
            read_only,
            "Permission denied",
            marks=pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write anywhere"),
        ),
        (a_folder, "Is a directory"),
        (below_a_file, "File exists|Not a directory"),
        (far_below_a_file, "Not a directory"),
        (lambda folder: folder / ("x" * 300), "File name too long"),
        (lambda folder: Path("/proc/nothing/model.safetensors"), "No such file or directory|Permission denied"),
    ],
)
def test_paths_that_cannot_be_written(tmp_path, make, why):
    path = make(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(DataError, match=f"cannot be written: ({why}); choose a file in a folder that") as error:
        write_whole(path, b"new")
    assert str(error.value).startswith(str(path))
    assert sorted(tmp_path.rglob("*")) == before


def write_protected(folder):
    (folder / "file").write_bytes(b"old")
    (folder / "file").chmod(0o444)
    return folder / "file"


def a_pipe(folder):
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


@pytest.mark.parametrize(
    ("make", "why"),
    [(write_protected, "Write-protected"), (a_pipe, "Not a regular file"), (a_folder, "Is a directory")],
)
@pytest.mark.parametrize("write", [check_writable, lambda path: write_whole(path, b"new")])
def test_what_is_there_and_may_not_be_replaced(tmp_path, make, why, write):
    path = make(tmp_path)
    before = path.lstat()
    with pytest.raises(DataError, match=f"cannot be written: {why}; choose a file in a folder that"):
        write(path)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    assert (path.lstat().st_ino, path.lstat().st_mode) == (before.st_ino, before.st_mode)


def test_modes_and_links_are_kept(tmp_path):
    (tmp_path / "by open").touch()
    write_whole(tmp_path / "new", b"new")
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "by open").stat().st_mode  # the umask's
    (tmp_path / "new").chmod(0o640)
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "link").symlink_to(tmp_path / "new")
    (tmp_path / "far" / "nowhere").symlink_to(tmp_path / "made")
    for name in ("link", "nowhere"):
        check_writable(tmp_path / "far" / name)
        write_whole(tmp_path / "far" / name, b"newer")
        assert (tmp_path / "far" / name).is_symlink()
    assert (tmp_path / "new").read_bytes() == (tmp_path / "made").read_bytes() == b"newer"
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o640


@pytest.mark.slow
def test_the_command_line_says_that_a_path_cannot_be_written(content, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(content)
    (tmp_path / "some").mkdir()
    command = [sys.executable, "-m", "adalog", "inspect", "model.safetensors", "--json", "some"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    told = "some cannot be written: Is a directory; choose a file in a folder that you may write to"
    assert (run.returncode, run.stderr) == (2, f"error: {told}\n")


# --- what `load` would refuse is not written -------------------------------------------------------------------------


def test_a_model_without_inputs_is_not_written(quantized):
    model = QuantizedModel(QuantizedProgram(quantized.program, quantized.config, tuple(quantized.ledger), {}))
    with pytest.raises(ArtifactError, match="made without images has no inputs to tell"):
        serialise(model)


def test_names_that_do_not_print_are_not_written(quantized, images):
    model = QuantizedModel(
        QuantizedProgram(
            quantized.program, quantized.config, tuple(quantized.ledger), {"a\nb": ""}, example=(images[:0],)
        )
    )
    with pytest.raises(ArtifactError, match=r"the text 'a\\nb' does not print"):
        serialise(model)


def test_other_precisions_keep_their_inputs_type(quantized, images):
    double = deserialise(serialise(quantized)).double()
    loaded = deserialise(serialise(double))
    assert torch.equal(loaded(images.double()), double(images.double()))
    with pytest.raises(ValueError, match=r"of torch\.float64; got"):
        loaded(images)


# --- hostile files ---------------------------------------------------------------------------------------------------


def refused(content, match=None):
    """Loading raises ArtifactError, whose one-line message names the file."""
    with pytest.raises(ArtifactError, match=match) as error:
        deserialise(content, "some.file")
    assert str(error.value).startswith("some.file ")


def rebuilt(content, change=None, tensors=None):
    """The file with its JSON changed in place by `change`, and with some tensors replaced (None: left out)."""
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(json.loads(content[8 : 8 + length])["__metadata__"][KEY])
    if change is not None:
        change(header)
    stored = {**parse(content), **(tensors or {})}
    return to_bytes({name: value for name, value in stored.items() if value is not None}, {KEY: json.dumps(header)})


def test_rebuilding_alone_changes_nothing(content, quantized, images):
    assert torch.equal(deserialise(rebuilt(content))(images), quantized(images))


def test_truncation(content):
    (length,) = struct.unpack("<Q", content[:8])
    points = {0, 1, 7, 8, 9, length, length + 7, length + 8, length + 9, len(content) - 1}
    for end in points | set(range(0, len(content), len(content) // 40)):
        refused(content[:end])


def test_trailing_bytes(content):
    refused(content + b"\0")


@pytest.mark.parametrize("count", [30, pytest.param(120, marks=pytest.mark.slow)])
def test_flipped_header_bytes(content, count):
    """A changed byte is refused or gives a model; nothing else is ever raised."""
    (length,) = struct.unpack("<Q", content[:8])
    generator = torch.Generator().manual_seed(0)
    places = [*range(8), *torch.randint(8, 8 + length, (count,), generator=generator).tolist()]
    found = harmless = 0
    for place in places:
        damaged = bytearray(content)
        damaged[place] ^= 1 << int(torch.randint(8, (), generator=generator))
        try:
            deserialise(bytes(damaged), "some.file")
        except ArtifactError as error:
            found += str(error).startswith("some.file ")
        else:
            harmless += 1
    assert found + harmless == len(places)
    assert found > harmless


@given(st.binary(max_size=200))
def test_arbitrary_bytes(content):
    refused(content, "not an adalog artifact")


@given(
    st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5), st.lists, max_leaves=5)
)
def test_arbitrary_json(value):
    start = json.dumps({"__metadata__": {KEY: json.dumps(value)}}).encode()
    refused(struct.pack("<Q", len(start)) + start, "is damaged")


FIELDS = ("config", "provenance", "refusals", "ledger", "inputs", "output", "nodes", "quantizers", "weights", "dtypes")


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", [None, 3, "text", [[1]], {"a": 1}, [None], "missing"])
def test_fields_of_another_type(content, field, value):
    def change(header):
        if value == "missing":
            del header[field]
        else:
            header[field] = value

    if (field, value) == ("provenance", {"a": 1}):
        deserialise(rebuilt(content, change))  # any provenance is no harm
    else:
        refused(rebuilt(content, change), "some.file")


@pytest.mark.parametrize("version", [0, FORMAT + 1, "1", None])
def test_other_versions(content, version):
    refused(rebuilt(content, lambda header: header.update(format=version)), f"has format version {version}")


def first(header, op):
    return next(node for node in header["nodes"] if node[1] == op)


def forbidden(header):
    header["nodes"][0][1] = "aten.set_.source_Storage"


def python_call(header):
    header["nodes"][0][1] = "os.system"


def dangling(header):
    header["nodes"][3][2][0] = {"ref": "nothing"}


def later(header):
    header["nodes"][0][2][0] = {"ref": header["nodes"][-1][0]}


def repeated(header):
    header["nodes"][1][0] = header["nodes"][0][0]


def shadowing(header):
    header["nodes"][0][0] = next(iter(header["dtypes"]))


def shadowed_input(header):
    header["inputs"][0][0] = next(iter(header["dtypes"]))


def dangling_output(header):
    header["output"] = {"ref": "nothing"}


def no_quantizer(header):
    first(header, "adalog.fake_quantize")[2][1] = "nothing"


def no_value(header):
    first(header, "adalog.fake_quantize")[2][0] = 1


def unknown_kind(header):
    header["nodes"][0][2][0] = {"code": "print(1)"}


def name_of_a_reference(header):
    header["nodes"][0][2][0] = {"ref": ["x"]}


def two_keys(header):
    header["nodes"][0][2][0] = {"ref": "x", "dtype": "float32"}


def unknown_dtype(header):
    name = next(name for name in header["dtypes"] if name not in header["weights"])
    header["dtypes"][name] = "object"


def deep(header):
    value = {"ref": "x"}
    for _ in range(400):
        value = [value]
    header["nodes"][0][2] = value


def weight_without_type(header):
    del header["dtypes"]["head.weight"]


def unknown_tensor(header):
    header["dtypes"]["nothing"] = "float32"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (forbidden, "operation 'aten.set_.source_Storage' is not one"),
        (python_call, "operation 'os.system' is not one"),
        (dangling, r"reads \['nothing'\]"),
        (later, "which is not there before it"),
        (repeated, "two values have the name"),
        (shadowing, "two values have the name"),
        (shadowed_input, "an input and a tensor have the same name"),
        (dangling_output, "the output reads"),
        (no_quantizer, "names no quantizer of the file"),
        (no_value, "quantizes no value"),
        (unknown_kind, "of the unknown kind 'code'"),
        (name_of_a_reference, "a value has the name"),
        (two_keys, "ValueError"),
        (unknown_dtype, "the type 'object' is not one of"),
        (weight_without_type, "a weight is not among the tensors"),
        (unknown_tensor, "tensors and header do not name the same: float/nothing"),
    ],
)
def test_programs_that_no_model_has(content, change, match):
    refused(rebuilt(content, change), match)


def test_an_input_larger_than_all_that_is_computed(content):
    """Counted too, although nothing of it would be held."""

    def change(header):
        x, shape = header["inputs"][0][0], [3, 2**20, 2**20]
        header["inputs"][0][2] = shape
        header["nodes"] = [["y", "aten.slice.Tensor", [{"ref": x}, 1, 0, 1], {}, ""]]
        header["nodes"] += [["z", "aten.slice.Tensor", [{"ref": "y"}, 2, 0, 1], {}, ""]]
        header["output"] = {"ref": "z"}

    refused(rebuilt(content, change), r"takes [0-9,]+ elements; a batch like this may take")


@pytest.mark.parametrize("depth", [5_000, 100_000])
def test_deep_json(content, depth):
    def change(header):
        header["nodes"][0][2] = "deep"

    plain = rebuilt(content, change)
    (length,) = struct.unpack("<Q", plain[:8])
    nest = b"[" * depth + b"]" * depth
    start = plain[8 : 8 + length].replace(b'\\"deep\\"', nest)
    refused(struct.pack("<Q", len(start)) + start + plain[8 + length :])


def test_arguments_nested_deeper_than_python_recurses(content):
    refused(rebuilt(content, deep), "some.file")


def weight_of(content):
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(json.loads(content[8 : 8 + length])["__metadata__"][KEY])
    return "head.weight", *header["weights"]["head.weight"]


@pytest.mark.parametrize(
    ("part", "spoil", "match"),
    [
        ("scale", lambda value: -value, "scale that is not positive and finite"),
        ("scale", lambda value: value * torch.nan, "scale that is not positive and finite"),
        ("scale", lambda value: value * torch.inf, "scale that is not positive and finite"),
        ("scale", lambda value: value * 0, "scale that is not positive and finite"),
        ("scale", lambda value: value.int(), "of the types torch.uint8, torch.int32, torch.uint8"),
        ("scale", lambda value: value[1:], r"the shape \[10, 32\] and \[9\] parameters"),
        ("scale", lambda value: value[:, None], r"the shape \[10, 32\] and \[10, 1\] parameters"),
        ("scale", lambda value: value[0], r"the shape \[10, 32\] and \[\] parameters"),
        ("zero_point", lambda value: value * 0 + 16, "zero point that is not a whole number from 0 to 15"),
        ("zero_point", lambda value: value.float(), "of the types torch.uint8, torch.float32, torch.float32"),
        ("zero_point", lambda value: value[1:], r"the shape \[10, 32\] and \[9\] parameters"),
        ("codes", lambda value: value[1:], "codes of 4 bits take 160 bytes, the file has 159"),
        ("codes", lambda value: torch.cat([value, value]), "the file has 320"),
        ("codes", lambda value: value.float(), "of the types torch.float32"),
        ("codes", lambda value: None, "do not name the same: codes/head.weight"),
        ("float", lambda value: None, "do not name the same: float/head.bias"),
        ("float", lambda value: value * torch.nan, "tensor head.bias holds NaN"),
    ],
)
def test_damaged_tensors(content, part, spoil, match):
    name = f"{part}/head.{'bias' if part == 'float' else 'weight'}"
    refused(rebuilt(content, tensors={name: spoil(parse(content)[name])}), match)


def test_tensors_that_nothing_names(content):
    refused(rebuilt(content, tensors={"float/more": torch.ones(3)}), "do not name the same: float/more")


@pytest.mark.parametrize(
    ("bits", "shape", "match"),
    [
        (4, [10, 33], "320 bytes|take 165 bytes"),
        (4, [32, 10], r"the shape \[32, 10\] and \[10\] parameters"),
        (4, [2**20, 2**30], "codes of 4 bits take"),
        (4, [-10, -32], "has the shape"),
        (4, [0], "has the shape"),
        (4, [10.0, 32], "has the shape"),
        (4, [True, 320], "has the shape"),
        (4, [], "some.file"),
        (3, [10, 32], "take 120 bytes"),
        (0, [10, 32], "has 0 bits"),
        (9, [10, 32], "has 9 bits"),
        (True, [10, 32], "has True bits"),
        ("4", [10, 32], "has '4' bits"),
        (None, [10, 32], "has None bits"),
    ],
)
def test_damaged_weights(content, bits, shape, match):
    refused(rebuilt(content, lambda header: header["weights"].update({"head.weight": [bits, shape]})), match)


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        *(("uniform", "scale", value) for value in ([-1.0], [0.0], [float("nan")], [1e400], ["x"], None, [1.0] * 3)),
        *(("uniform", "zero_point", value) for value in ([-1], [256], [0.5], [float("nan")], None)),
        *(("uniform", "bits", value) for value in (1, 9, 4.0, "4", True, None, float("inf"))),
        *(("uniform", "shape", value) for value in ([7], [-7], "x", None)),
        *(("uniform", "kind", value) for value in ("other", None, ["log"])),
        *(("log", "scale", value) for value in ([-1.0], [0.0], [1.0, 2.0], [])),
        *(("log", "q", value) for value in (0, -1, 1.5, 10**9, "1", float("nan"))),
        *(("log", "r", value) for value in (0, 2**40, None)),
        *(("log", "offset", value) for value in (float("inf"), float("nan"), "x", None)),
        *(("log", "beyond", value) for value in ("other", None, [])),
        *(("log", "rounding", value) for value in ("up", 1)),
        *(("log", "table", value) for value in (1, "yes")),
        *(("log", "keeps_offset", value) for value in (0, None)),
        *(("twin", "scale", value) for value in ([-1.0], [0.0], [float("nan")], [1e400], ["x"], None, [1.0] * 3, [])),
        *(("twin", "negative_scale", value) for value in ([-1.0], [0.0], [1e400], ["x"], None, [1.0] * 3, [])),
        *(("twin", "bits", value) for value in (1, 9, 4.0, True)),
        *(("twin", "shape", value) for value in ([7], "x", None)),
        *(("twin", "kind", value) for value in ("uniform", "log", "triplet")),
    ],
)
def test_damaged_quantizers(twin_content, kind, field, value):
    def change(header):
        entry = next(entry for entry in header["quantizers"].values() if entry["kind"] == kind)
        entry[field] = value

    refused(rebuilt(twin_content, change), "some.file is damaged")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("coarse_scale", value) for value in ([-1.0], [0.0], [1e400], ["x"], None, [1.0] * 3, [])),
        *(("sums", value) for value in (0, "yes", None)),
        *(("scale", value) for value in ([0.0], [1.0] * 3)),
        ("kind", "log"),
    ],
)
def test_damaged_split_quantizers(split, field, value):
    def change(header):
        entry = next(entry for entry in header["quantizers"].values() if entry["kind"] == "split")
        entry[field] = value

    refused(rebuilt(serialise(split), change), "some.file is damaged")


@pytest.mark.parametrize("make", ["directory", "missing", "text", "empty", "pipe"])
def test_paths_that_hold_no_artifact(tmp_path, make):
    path = tmp_path / "some.safetensors"
    if make == "directory":
        path.mkdir()
    elif make == "pipe":
        os.mkfifo(path)
    elif make != "missing":
        path.write_text("hello" if make == "text" else "")
    with pytest.raises(ArtifactError) as error:
        adalog.load(path)
    assert str(error.value).startswith(str(path))


def test_a_path_that_no_file_can_have():
    with pytest.raises(ArtifactError, match="cannot be read"):
        adalog.load("a\0b")


def test_other_safetensors_files(tmp_path):
    refused(to_bytes({"weight": torch.ones(3)}), "not an adalog artifact")
    refused(to_bytes({"weight": torch.ones(3)}, {"format": "pt"}), "not an adalog artifact")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_scales_read_back_the_same(dtype):
    """A reader has float32: the decimals are those of the value, not the shortest of the narrow type."""
    scale = torch.rand(200, dtype=dtype) + 0.01
    fields = UniformQuantizer(scale, torch.zeros_like(scale), 4).fields()
    assert torch.equal(decode_quantizer("x", fields).scale, scale.float())
