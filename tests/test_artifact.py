"""The file: it round-trips bit by bit, is as small as it says, and nothing hostile in it passes."""

import errno
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import adalog
from adalog import ArtifactError, Calibration, Config, DataError, QuantizedModel
from adalog.artifact import inspect, sizes
from adalog.baselines import ReleasedSearch
from adalog.files import check_folder, check_writable, write_folder, write_whole
from stored import deserialise, serialise
from toys import Toy


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
        ("w4a4", "adalog-released"),
    ],
)
def test_other_choices_round_trip(calibration, images, fast, name, method):
    search = ReleasedSearch(steps=1, rounds=1) if method == "adalog-released" else fast.search
    config = replace(Config.preset(name, method), images=4, search=search, stages=())
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
def test_same_seed_same_bytes(tiniest, images, fast):
    more = torch.cat([images, images.flip(3)])
    first, again, other = (adalog.quantize(tiniest, more, fast, seed=seed) for seed in (0, 0, 1))
    assert serialise(first) == serialise(again)
    assert (first.provenance["seed"], first.provenance["images"]) == (0, 4)
    assert first.provenance["calibration"] != other.provenance["calibration"]
    assert len(first.provenance["calibration"]) == 16


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


@pytest.fixture
def places(tmp_path):
    """A folder, files of which one is write-protected, a pipe, and a folder that may not be written to."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "read-only").mkdir(0o500)
    for name in ("file", "protected"):
        (tmp_path / name).write_bytes(b"old")
    (tmp_path / "protected").chmod(0o444)
    os.mkfifo(tmp_path / "pipe")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "why"),
    [
        pytest.param(
            "read-only/model.safetensors",
            "Permission denied",
            marks=pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write anywhere"),
        ),
        ("folder", "Is a directory"),
        ("protected", "Write-protected"),
        ("pipe", "Not a regular file"),
        ("file/model.safetensors", "File exists|Not a directory"),
        ("file/model.safetensors/deeper/model.safetensors", "Not a directory"),
        ("x" * 300, "File name too long"),
        ("/proc/nothing/model.safetensors", "No such file or directory|Permission denied"),
    ],
)
def test_paths_that_cannot_be_written(places, name, why):
    def states():
        return [(path, path.lstat().st_ino, path.lstat().st_mode) for path in sorted(places.rglob("*"))]

    path, before, writers = places / name, states(), [lambda path: write_whole(path, b"new")]
    for write in [*writers, check_writable] if name in ("folder", "protected", "pipe") else writers:
        with pytest.raises(DataError, match=f"cannot be written: ({why}); choose a file in a folder that") as error:
            write(path)
        assert str(error.value).startswith(str(path))
        assert states() == before


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


CIRCLE: list[object] = []
CIRCLE.append(CIRCLE)
NO_JSON = "a note or an argument cannot be written as JSON"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"example": ()}, "so its input shapes are unknown"),
        ({"refusals": {"a\nb": ""}}, r"the text 'a\\nb' has characters that do not print"),
        *(({"provenance": {"odd": note}}, NO_JSON) for note in (math.nan, {1, 2}, object(), CIRCLE)),
    ],
)
def test_models_that_a_file_cannot_hold_are_not_written(quantized, changes, why):
    with pytest.raises(ArtifactError, match=why):
        serialise(QuantizedModel(replace(quantized.quantized, **changes)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_that_was_cast_keeps_its_numbers(quantized, images, dtype):
    cast = deserialise(serialise(quantized)).to(dtype)
    loaded = deserialise(serialise(cast))
    found = loaded.quantized.program.quantizers
    for name, quantizer in cast.quantized.program.quantizers.items():
        assert found[name].scale.dtype == dtype
        assert torch.equal(found[name].scale, quantizer.scale)
    assert torch.equal(loaded(images.to(dtype)), cast(images.to(dtype)))
    with pytest.raises(ValueError, match=f"of {dtype}; got"):
        loaded(images)


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


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/x"])
def test_names_that_leave_the_folder(name, tmp_path):
    with pytest.raises(DataError, match="lies outside of it"):
        write_folder(tmp_path / "new", {"a/fine": b"", name: b""})
    assert not list(tmp_path.iterdir())


def test_a_folder_whose_name_no_file_can_have(tmp_path):
    for write in (check_folder, lambda path: write_folder(path, {})):
        with pytest.raises(DataError, match="cannot be written: File name too long"):
            write(tmp_path / ("x" * 300))
