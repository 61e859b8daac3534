"""Standard QDQ files: their scales, their certificates in ONNX Runtime, their encodings, and what is refused."""

import functools
import json
from dataclasses import replace

import pytest
import torch

from adalog import ArtifactError, Calibration, Config, QuantizedModel, export
from adalog.export.certificate import certify
from adalog.export.qdq import to_encodings
from commands import call, say
from test_export import FAST, onnx, toy


@pytest.fixture(scope="module")
def quantize(images):
    """A function that quantizes a toy by a method, with changed choices."""

    @functools.cache
    def make(kind, method="symmetric", bits="w8a8", **choices):
        config = replace(Config.preset(bits, method), images=4, search=FAST.search, stages=(), **choices)
        return Calibration(toy(kind).eval(), images).quantize(config).quantized

    return make


@pytest.fixture(scope="module")
def exported(quantize):
    """A function that exports a toy once: the quantized program, the file and its certificate."""

    @functools.cache
    def make(kind):
        content, (certificate,) = export.export(quantize(kind), "digest", "qdq")
        return quantize(kind), content, certificate

    return make


def stored(content):
    """Return the model of a file and its initializers by name."""
    model = onnx.load_model_from_string(content)
    return model, {each.name: onnx.numpy_helper.to_array(each) for each in model.graph.initializer}


@pytest.mark.parametrize("kind", ["attention", "convolutions"])
def test_files_have_certificates_and_only_standard_operators(kind, exported, images):
    quantized, content, first = exported(kind)
    assert first.passed, first.text()
    found = certify(quantized, "digest", content, [(images,)], executor="reference")
    assert found.passed, found.text()
    assert found.accumulators_equal
    assert found.form == "qdq"
    model, _ = stored(content)
    assert {each.domain for each in model.opset_import} == {""}
    assert not {"MatMulInteger", "Clip", "Greater"} & {node.op_type for node in model.graph.node}


@pytest.mark.parametrize("kind", ["attention", "convolutions"])
def test_scales_are_those_of_the_artifact_and_zero_points_are_zero(kind, exported):
    quantized, content, _ = exported(kind)
    model, tensors = stored(content)
    scales = {value.scale.item() for value in quantized.program.quantizers.values()}
    for node in model.graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            _, scale, zero_point = node.input
            assert tensors[zero_point].dtype.name == "int8"
            assert not tensors[zero_point].any()
            if node.op_type == "QuantizeLinear":
                assert tensors[scale].item() in scales
    for name, weight in quantized.program.weights.items():
        (node,) = (node for node in model.graph.node if node.output[0] == name)
        codes, units = (torch.from_numpy(tensors[each].copy()) for each in node.input[:2])
        codes = codes if codes.ndim == 4 else codes.t()
        assert torch.equal(units, weight.quantizer.scale.flatten())
        assert torch.equal(codes.int() + 128, weight.codes.int())


def test_encodings_list_every_scale_in_the_layout_of_aimet(exported):
    quantized, content, _ = exported("attention")
    told = json.loads(to_encodings(content))
    assert told["version"] == "1.0.0"
    scales = [each["scale"] for each in told["activation_encodings"]]
    assert sorted(scales) == sorted([value.scale.item()] for value in quantized.program.quantizers.values())
    weights = {each["name"]: each for each in told["param_encodings"]}
    for name, weight in quantized.program.weights.items():
        assert weights[name]["scale"] == weight.quantizer.scale.flatten().tolist()
        assert weights[name]["enc_type"] == "PER_CHANNEL"
    for each in [*told["activation_encodings"], *told["param_encodings"]]:
        assert (each["dtype"], each["bw"], each["is_sym"], set(each["offset"])) == ("INT", 8, True, {-128})


@pytest.mark.parametrize(
    ("method", "bits", "choices", "reason"),
    [
        ("symmetric", "w8a6", {}, "has 6 bits, and the form qdq takes 8"),
        ("uniform-tensor", "w8a8", {}, "has the zero point .* in signed bytes, and the form qdq takes 0"),
        ("adalog", "w8a8", {}, "has the zero point .* and the form qdq takes 0"),
        ("symmetric", "w8a8", {"per_head": True}, "has 4 scales, and the form qdq takes one per tensor"),
        ("symmetric", "w8a8", {"weights": "uniform"}, "its weight has zero points, and the form qdq takes none"),
        ("symmetric", "w8a8", {"post_softmax": "adalog"}, "the kind log, and the form qdq takes uniform ones"),
    ],
)
def test_a_refusal_names_the_site_the_reason_and_the_method_that_works(quantize, method, bits, choices, reason):
    quantized = quantize("attention", method, bits, **choices)
    with pytest.raises(ArtifactError, match=f"site .*{reason}: quantize the model with .*--method symmetric"):
        export.export(quantized, "digest", "qdq")


def test_the_command_writes_both_files_or_none(tmp_path, monkeypatch, capsys, quantize):
    artifact, refused = tmp_path / "toy.safetensors", tmp_path / "refused.safetensors"
    QuantizedModel(quantize("attention")).save(artifact)
    QuantizedModel(quantize("attention", "uniform-tensor")).save(refused)
    folder = tmp_path / "out"
    folder.mkdir()
    code, error = call(monkeypatch, capsys, "export", refused, "--form", "qdq", "-o", folder / "toy.onnx")
    assert code == 2
    assert "--method symmetric" in error
    words = "export", artifact, "--form", "qdq", "--to", "openvino", "-o", folder / "toy.xml"
    assert call(monkeypatch, capsys, *words)[0] == 2
    assert list(folder.iterdir()) == []
    say(monkeypatch, capsys, "export", artifact, "--form", "qdq", "-o", folder / "toy.onnx")
    assert {each.name for each in folder.iterdir()} == {"toy.onnx", "toy.encodings.json"}
    assert (folder / "toy.encodings.json").read_bytes() == to_encodings((folder / "toy.onnx").read_bytes())
