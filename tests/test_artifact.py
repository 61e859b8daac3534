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

import adalog
from adalog import ArtifactError, Calibration, Config, DataError, QuantizedModel
from adalog.artifact import FORMAT, KEY, inspect, sizes
from adalog.baselines import ReleasedSearch
from adalog.files import check_folder, check_writable, write_folder, write_whole
from adalog.graph.operations import FAKE_QUANTIZE
from adalog.graph.program import Node, Program, Ref
from adalog.quantized import QuantizedProgram
from adalog.quantizers import LogQuantizer, QuantizedTensor, UniformQuantizer
from commands import call
from stored import deserialise, rebuilt, refused, serialise
from toys import Toy

# --- round trip ------------------------------------------------------------------------------------------------------


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
        ("w3a5s2", "adalog"),
        ("w32a32", "adalog"),
        ("w32a4", "adalog"),
        ("w2a2", "log2"),
        ("w8a7s6", "log-sqrt2"),
        ("w5a3s8", "uniform"),
        ("w3a3", "adalog-paper"),
        ("w4a32", "adalog"),
    ],
)
def test_other_choices_round_trip(calibration, images, fast, name, method):
    choices = Config.preset(name, method)
    config = replace(choices, images=4, search=fast.search, stages=())
    model = calibration.quantize(config)
    loaded = deserialise(serialise(model))
    assert torch.equal(loaded(images), model(images))
    assert loaded.config == config


@pytest.mark.parametrize("kind", ["twin", "split"])
def test_quantizers_of_two_scales_round_trip(kind, images, request):
    model = request.getfixturevalue(kind)
    content = serialise(model)
    loaded = deserialise(content)
    assert torch.equal(loaded(images), model(images))
    kept = {name: q for name, q in loaded.program.quantizers.items() if q.kind == kind}
    assert len(kept) == sum(row.left == f"4-bit {kind} uniform" for row in model.ledger) == 2
    for name, quantizer in kept.items():
        assert quantizer.fields() == model.program.quantizers[name].fields()
    assert serialise(loaded) == content


@pytest.mark.slow
@pytest.mark.parametrize("post_gelu", ["adalog", "twin"])
def test_released_models_round_trip(calibration, images, post_gelu):
    search = ReleasedSearch(steps=1, rounds=1)
    choices = Config.preset("w4a4", "adalog-released")
    config = replace(choices, post_gelu=post_gelu, images=4, search=search, stages=())
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
    assert header["format"] == FORMAT == 1
    header["config"] = {}  # whose choices come and go
    text = json.dumps(header, sort_keys=True).encode() + found[8 + length :]
    assert hashlib.sha256(text).hexdigest() == "f2e1dfbb8e28fe893f773f66dfb5747e4fe95b31a945905a240928b0c9c271aa"


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


def test_output_structures_are_stored(images, fast):
    def structured(m, x):
        x = m.fc(x)
        return {"first": x, "rest": [(x + 1, x * 2), x.amax((1, 2))]}

    torch.manual_seed(0)
    model = Calibration(Toy(structured, fc=torch.nn.Linear(32, 4)), images).quantize(fast)
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


def test_the_command_line_says_that_a_path_cannot_be_written(content, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    (tmp_path / "some").mkdir()
    told = "some cannot be written: Is a directory; choose a file in a folder that you may write to"
    found = call(monkeypatch, capsys, "inspect", "model.safetensors", "--json", "some")
    assert found == (2, f"error: {told}\n")


# --- what `load` would refuse is not written -------------------------------------------------------------------------


def test_a_model_without_inputs_is_not_written(quantized):
    model = QuantizedModel(QuantizedProgram(quantized.program, quantized.config, tuple(quantized.ledger), {}))
    with pytest.raises(ArtifactError, match="so its input shapes are unknown"):
        serialise(model)


def test_names_that_do_not_print_are_not_written(quantized, images):
    model = QuantizedModel(
        QuantizedProgram(
            quantized.program, quantized.config, tuple(quantized.ledger), {"a\nb": ""}, example=(images[:0],)
        )
    )
    with pytest.raises(ArtifactError, match=r"the text 'a\\nb' has characters that do not print"):
        serialise(model)


def test_other_precisions_keep_their_inputs_type(quantized, images):
    double = deserialise(serialise(quantized)).double()
    loaded = deserialise(serialise(double))
    assert torch.equal(loaded(images.double()), double(images.double()))
    with pytest.raises(ValueError, match=r"of torch\.float64; got"):
        loaded(images)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_that_was_cast_keeps_its_numbers(quantized, images, dtype):
    cast = deserialise(serialise(quantized)).to(dtype)
    loaded = deserialise(serialise(cast))
    found = loaded.quantized.program.quantizers
    for name, quantizer in cast.quantized.program.quantizers.items():
        assert found[name].scale.dtype == dtype
        assert torch.equal(found[name].scale, quantizer.scale)
    assert torch.equal(loaded(images.to(dtype)), cast(images.to(dtype)))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16])
def test_small_whole_numbers_are_stored(quantized, dtype):
    model = with_tensor(quantized, torch.arange(5, dtype=dtype))
    found = deserialise(serialise(model)).quantized.program.tensors["extra"]
    assert found.dtype == dtype
    assert torch.equal(found, torch.arange(5, dtype=dtype))


def with_tensor(quantized, value):
    program = quantized.program
    changed = replace(program, tensors={**program.tensors, "extra": value})
    return QuantizedModel(replace(quantized.quantized, program=changed))


@pytest.mark.parametrize(
    ("value", "why"),
    [(torch.tensor([1.0, math.nan]), "tensor extra contains NaN"), (torch.zeros(2).cfloat(), "complex")],
)
def test_what_a_reader_would_refuse_is_not_written(quantized, value, why):
    with pytest.raises(ArtifactError, match=f"cannot be stored: .*{why}"):
        serialise(with_tensor(quantized, value))


CIRCLE: list[object] = []
CIRCLE.append(CIRCLE)


@pytest.mark.parametrize("note", [math.nan, {1, 2}, object(), CIRCLE])
def test_notes_that_are_no_json_are_not_written(quantized, note):
    model = QuantizedModel(quantized.quantized)
    model.note(odd=note)
    with pytest.raises(ArtifactError, match="a note or an argument cannot be written as JSON"):
        serialise(model)


def test_a_folder_whose_name_no_file_can_have(tmp_path):
    for write in (check_folder, lambda path: write_folder(path, {})):
        with pytest.raises(DataError, match="cannot be written: File name too long"):
            write(tmp_path / ("x" * 300))
