"""Nothing hostile in a file passes: each is refused in one line, and costs no more than its bytes."""

import json
import os
import struct
from functools import reduce

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load as parse
from safetensors.torch import save as to_bytes

import adalog
from adalog import ArtifactError
from adalog.artifact import FORMAT, KEY
from adalog.quantizers import UniformQuantizer
from adalog.quantizers.codec import decode_quantizer
from stored import deserialise, rebuilt, refused, serialise, setting


def test_rebuilding_alone_changes_nothing(content, quantized, images):
    assert torch.equal(deserialise(rebuilt(content))(images), quantized(images))


def test_truncation(content):
    (length,) = struct.unpack("<Q", content[:8])
    points = {0, 1, 7, 8, 9, length, length + 7, length + 8, length + 9, len(content) - 1}
    for end in points | set(range(0, len(content), len(content) // 40)):
        refused(content[:end])


def test_trailing_bytes(content):
    refused(content + b"\0")


def test_flipped_header_bytes(content):
    """A changed byte is refused or gives a model; nothing else is ever raised."""
    (length,) = struct.unpack("<Q", content[:8])
    generator = torch.Generator().manual_seed(0)
    places = [*range(8), *torch.randint(8, 8 + length, (60,), generator=generator).tolist()]
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
    refused(rebuilt(content, lambda header: header.update(format=version)), f"has the format {version}")


def quantization(header):
    """The arguments of the first fake-quantize node."""
    return next(arguments for _, op, arguments, *_ in header["nodes"] if op == "adalog.fake_quantize")


def first_tensor(header):
    return next(iter(header["dtypes"]))


DEEP = reduce(lambda value, _: [value], range(400), {"ref": "x"})  # deeper than Python recurses


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (setting("nodes", 0, 1, "os.system"), "operation 'os.system' is not one"),
        (setting("nodes", 3, 2, 0, {"ref": "nothing"}), r"reads \['nothing'\]"),
        (setting("nodes", 0, 2, 0, lambda header: {"ref": header["nodes"][-1][0]}), "which does not exist before it"),
        (setting("nodes", 1, 0, lambda header: header["nodes"][0][0]), "two values have the name"),
        (setting("nodes", 0, 0, first_tensor), "two values have the name"),
        (setting("inputs", 0, 0, first_tensor), "an input and a tensor have the same name"),
        (setting("output", {"ref": "nothing"}), "the output reads"),
        (setting(quantization, 1, "nothing"), "names a quantizer that the file does not have"),
        (setting(quantization, 0, 1), "does not quantize a value"),
        (setting("nodes", 0, 2, 0, {"code": "print(1)"}), "of the unknown kind 'code'"),
        (setting("nodes", 0, 2, 0, {"ref": ["x"]}), "a value has the invalid name"),
        (setting("nodes", 0, 2, 0, {"ref": "x", "dtype": "float32"}), "ValueError"),
        (setting("nodes", 0, 2, DEEP), "some.file"),
        (setting("dtypes", "head.bias", "object"), "the type 'object' is not one of"),
        (lambda header: header["dtypes"].pop("head.weight"), "a weight is not among the tensors"),
        (setting("dtypes", "nothing", "float32"), "tensors and header do not have the same names: float/nothing"),
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

    refused(rebuilt(content, change), r"takes [0-9,]+ elements, but a batch of this size may take")


@pytest.mark.parametrize(
    ("part", "spoil", "match"),
    [
        ("scale", lambda value: -value, "scale that is not positive and finite"),
        ("scale", lambda value: value * torch.nan, "scale that is not positive and finite"),
        ("scale", lambda value: value * torch.inf, "scale that is not positive and finite"),
        ("scale", lambda value: value * 0, "scale that is not positive and finite"),
        ("scale", lambda value: value.int(), "of the types torch.uint8 and torch.int32"),
        ("scale", lambda value: value[1:], r"the shape \[10, 32\], but its scale has the shape \[9\]"),
        ("scale", lambda value: value[:, None], r"the shape \[10, 32\], but its scale has the shape \[10, 1\]"),
        ("scale", lambda value: value[0], r"the shape \[10, 32\], but its scale has the shape \[\]"),
        ("zero_point", lambda value: value * 0 + 16, "zero point that is not a whole number from 0 to 15"),
        ("zero_point", lambda value: value.float(), "zero points of the type torch.float32"),
        ("zero_point", lambda value: value[1:], r"the shape \[10, 32\], but its zero_point has the shape \[9\]"),
        ("codes", lambda value: value[1:], "codes of 4 bits take 160 bytes, the file has 159"),
        ("codes", lambda value: torch.cat([value, value]), "the file has 320"),
        ("codes", lambda value: value.float(), "of the types torch.float32"),
        ("codes", lambda value: None, "do not match: only one of them names codes/head.weight"),
        ("float", lambda value: None, "do not have the same names: float/head.bias"),
        ("float", lambda value: value * torch.nan, "tensor head.bias contains NaN"),
    ],
)
def test_damaged_tensors(content, part, spoil, match):
    name = f"{part}/head.{'bias' if part == 'float' else 'weight'}"
    refused(rebuilt(content, tensors={name: spoil(parse(content)[name])}), match)


def test_tensors_that_nothing_names(content):
    refused(rebuilt(content, tensors={"float/more": torch.ones(3)}), "do not have the same names: float/more")


@pytest.mark.parametrize(
    ("bits", "shape", "match"),
    [
        (4, [10, 33], "320 bytes|take 165 bytes"),
        (4, [32, 10], r"the shape \[32, 10\], but its \w+ has the shape \[10\]"),
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
        *(("log", "width", value) for value in (12, "8")),
        *(("log", "headroom", value) for value in (4, -1)),
        *(("twin", "scale", value) for value in ([-1.0], [0.0], [float("nan")], [1e400], ["x"], None, [1.0] * 3, [])),
        *(("twin", "negative_scale", value) for value in ([-1.0], [0.0], [1e400], ["x"], None, [1.0] * 3, [])),
        *(("twin", "bits", value) for value in (1, 9, 4.0, True)),
        *(("twin", "shape", value) for value in ([7], "x", None)),
        *(("twin", "kind", value) for value in ("uniform", "log", "triplet")),
        *(("split", "coarse_scale", value) for value in ([-1.0], [0.0], [1e400], ["x"], None, [1.0] * 3, [])),
        *(("split", "sums", value) for value in (0, "yes", None)),
        *(("split", "scale", value) for value in ([0.0], [1.0] * 3)),
        ("split", "kind", "log"),
    ],
)
def test_damaged_quantizers(twin_content, split, kind, field, value):
    def change(header):
        entry = next(entry for entry in header["quantizers"].values() if entry["kind"] == kind)
        entry[field] = value

    refused(rebuilt(serialise(split) if kind == "split" else twin_content, change), "some.file is damaged")


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


def test_a_quantizer_with_a_field_of_its_own(content):
    def change(header):
        next(iter(header["quantizers"].values()))["note"] = "x"

    refused(rebuilt(content, change), "has missing or unknown fields: note")


@pytest.mark.parametrize("dtype", ["int64", "int32"])
def test_a_division_at_which_a_processor_stops(content, images, dtype):
    """It is found where it is made, since no check without data can know the numbers."""
    least = torch.iinfo(getattr(torch, dtype)).min

    def change(header):
        for name, value in (("one", least), ("other", -1)):
            header["nodes"].append([name, "aten.full.default", [{"list": [1]}, value], {"dtype": {"dtype": dtype}}, ""])
        operands = [{"ref": "one"}, {"ref": "other"}]
        header["nodes"].append(["quotient", "aten.div.Tensor_mode", operands, {"rounding_mode": "trunc"}, ""])
        header["nodes"].append(["last", "aten.add.Tensor", [header["output"], {"ref": "quotient"}], {}, ""])
        header["output"] = {"ref": "last"}

    hostile = deserialise(rebuilt(content, change))
    for run in (hostile, hostile.compile("reference"), hostile.compile("torch")):
        with pytest.raises(adalog.ProgramError, match=f"divides {least} by -1"):
            run(images)
