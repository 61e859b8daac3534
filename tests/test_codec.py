"""Codes to bits and back; symmetric weights, and weights of the how-to's quantizer."""

import json
import math
import re
from base64 import b64decode, b64encode
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adalog import ArtifactError, Calibration, Correction, QuantizedModel, Reconstruction, artifact, library
from adalog.baselines import TwinUniformQuantizer
from adalog.calibration import operands
from adalog.calibration.partial import Partial
from adalog.errors import DataError
from adalog.quantizers import Assignment, LargestLevelFormat, LogQuantizer, QuantizedTensor, UniformQuantizer
from adalog.quantizers.codec import decode_weight, pack, unpack
from adalog.study.cost import cost
from stored import deserialise, serialise
from strategies import bits


@given(bits, st.integers(0, 65), st.randoms(use_true_random=False))
def test_pack_and_unpack_are_inverse(width, count, random):
    codes = torch.tensor([random.randrange(2**width) for _ in range(count)], dtype=torch.uint8)
    packed = pack(codes, width)
    assert packed.dtype == torch.uint8
    assert packed.shape == (math.ceil(width * count / 8),)
    assert torch.equal(unpack(packed, width, count), codes)


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


PAGE = Path(__file__).parent.parent / "docs" / "how-to" / "add-a-quantizer.md"
EXECUTORS = ("reference", "torch", *(["native"] if library.levels() else []))
FITTED = (Correction(images=4), Reconstruction(images=4, iterations=4, batch=4))


def codes_agree(model, images):
    """Every executor puts out what fake quantization does, but for codes that rounding moves."""
    fake = model(images)
    return all(float((model.compile(each)(images) - fake).norm() / fake.norm()) < 0.05 for each in EXECUTORS)


@pytest.fixture(
    scope="module", params=[(), pytest.param(FITTED, marks=pytest.mark.slow)], ids=["searched", "reconstructed"]
)
def symmetric_model(request, calibration, fast):
    return calibration.quantize(replace(fast, weight_bits=3, weights="symmetric", stages=request.param))


def test_symmetric_weights_have_half_of_the_codes_as_zero_point(symmetric_model):
    weights = symmetric_model.quantized.program.weights
    assert {weight.bits for weight in weights.values()} == {3}
    assert all(bool((weight.quantizer.zero_point == 4).all()) for weight in weights.values())
    assert {int(code) for weight in weights.values() for code in weight.codes.unique()} == set(range(8))


def test_symmetric_weights_run_and_round_trip(symmetric_model, images):
    assert codes_agree(symmetric_model, images)
    loaded = deserialise(serialise(symmetric_model))
    assert torch.equal(loaded(images), symmetric_model(images))
    assert loaded.config.weights == "symmetric"


@pytest.fixture(scope="module")
def ternary():
    """The class that the page defines."""
    (code,) = re.findall(r"```python\n(.*?class TernaryQuantizer.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    found: dict[str, object] = {}
    exec(code, found)
    return found["TernaryQuantizer"]


@pytest.fixture(scope="module")
def ternary_models(ternary, tiny, images, fast):
    """Of the search alone, with a correction, and with training as the only stage.

    The calibration is its own: the shared one keeps what it finds, and its choices do not name this kind.
    """
    calibration = Calibration(tiny, images)

    def of_weights(config, *own_dims):
        return LargestLevelFormat(config.weight_bits, own_dims, kind=ternary)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operands, "weight_format", of_weights)
        stages = ((), FITTED[:1], FITTED[1:])
        return [calibration.quantize(replace(fast, weight_bits=2, stages=each)) for each in stages]


@pytest.fixture(scope="module")
def ternary_model(ternary_models):
    return ternary_models[1]


STORED = {"codes": pack(torch.ones(320, dtype=torch.uint8), 2), "scale": torch.ones(10)}  # of a weight of 10 rows


@pytest.mark.slow
def test_ternary_weights_are_searched_corrected_and_reconstructed(ternary_models, ternary_model, images):
    weights = [model.quantized.program.weights.values() for model in ternary_models]
    one, *others = ([weight.dequantize() for weight in found] for found in weights)
    assert [all(map(torch.equal, one, other)) for other in others] == [False, False]  # a correction, and training
    weights = ternary_model.quantized.program.weights.values()
    assert {weight.quantizer.kind for weight in weights} == {"ternary"}
    assert {int(code) for weight in weights for code in weight.codes.unique()} == {0, 1, 2}
    assert codes_agree(ternary_model, images)


@pytest.mark.slow
def test_ternary_weights_round_trip(ternary_model, images):
    content = serialise(ternary_model)
    loaded = deserialise(content)
    assert torch.equal(loaded(images), ternary_model(images))
    assert serialise(loaded) == content


@pytest.mark.slow
def test_ternary_weights_go_through_the_file_of_what_is_done(ternary_model, tmp_path):
    weight = next(iter(ternary_model.quantized.program.weights.values()))
    path = tmp_path / "some.partial"
    Partial(path, "of this").add("one", Assignment(None, weight, sqnr=1.0))
    again = Partial(path, "of this").get("one").right
    assert again.quantizer.kind == "ternary"
    assert torch.equal(again.codes, weight.codes)
    assert torch.equal(again.dequantize(), weight.dequantize())
    lines = path.read_text().splitlines()
    line = json.loads(lines[1])
    line["right"]["codes"]["packed"] = b64encode(b"\xff" * len(b64decode(line["right"]["codes"]["packed"]))).decode()
    path.write_text(f"{lines[0]}\n{json.dumps(line)}\n")
    with pytest.raises(DataError, match="has the code 3, but its quantizer has only 3 codes"):
        Partial(path, "of this")


@pytest.mark.slow
def test_bytes_of_ternary_weights_have_no_zero_points(ternary_model):
    program = ternary_model.quantized.program
    sizes = cost(program, [(3, 32, 32)]).size_bytes
    assert sizes["zero_point"] == 0
    assert sizes["codes"] == sum(math.ceil(weight.codes.numel() / 4) for weight in program.weights.values())


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"codes": pack(torch.full((320,), 3, dtype=torch.uint8), 2)}, "has the code 3, but its quantizer has only 3"),
        ({"zero_point": torch.ones(10, dtype=torch.uint8)}, "only one of them names zero_point/head.weight"),
        ({"scale": torch.zeros(10)}, "scale that is not positive and finite"),
    ],
)
def test_ternary_weights_that_no_model_has(ternary, change, match):
    assert decode_weight("head.weight", "ternary", STORED, 2, [10, 32]).dequantize().unique().tolist() == [0.0]
    with pytest.raises(ArtifactError, match=match):
        decode_weight("head.weight", "ternary", STORED | change, 2, [10, 32])


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        (LogQuantizer.kind, "a quantizer of the kind log, which weights cannot have"),
        ("nothing", "weight head.weight is of the unknown kind 'nothing'"),
        (["uniform"], "is of the unknown kind"),
        (None, "is of the unknown kind None"),
    ],
)
def test_kinds_that_no_weight_has(kind, match):
    with pytest.raises(ArtifactError, match=match):
        decode_weight("head.weight", kind, STORED, 2, [10, 32])


def test_a_weight_of_another_kind_is_refused_when_it_is_written(quantized):
    program = quantized.quantized.program
    name, weight = next(iter(program.weights.items()))
    twin = TwinUniformQuantizer(weight.quantizer.scale, weight.quantizer.scale, weight.bits)
    odd = replace(program, weights={**program.weights, name: replace(weight, quantizer=twin)})
    with pytest.raises(ArtifactError, match="has a quantizer of the kind twin, which weights cannot have"):
        artifact.serialise(replace(quantized.quantized, program=odd))
    with pytest.raises(ArtifactError, match="kind twin have 2 parts, but those of a weight must have one"):
        QuantizedModel(replace(quantized.quantized, program=odd)).compile("reference")


def test_integers_that_span_more_than_a_byte_run_by_reference_alone(quantized, images):
    class Wide(UniformQuantizer):
        kind = "wide"

        def integers(self, code):
            return [3 * part for part in super().integers(code)]

        def units(self):
            return [unit / 3 for unit in super().units()]

        def limits(self):
            return [(3 * low, 3 * high) for low, high in super().limits()]

    program = quantized.quantized.program
    name, weight = next((name, each) for name, each in program.weights.items() if name.startswith("head"))
    eight = UniformQuantizer(weight.quantizer.scale / 16, torch.full_like(weight.quantizer.zero_point, 128), 8)
    codes = eight.quantize(weight.dequantize()).to(torch.uint8)
    codes[:, :2] = torch.tensor([0, 255], dtype=torch.uint8)
    wide = QuantizedTensor(codes, Wide(eight.scale, eight.zero_point, 8))
    tensors = {**program.tensors, name: wide.dequantize()}
    odd = replace(program, weights={**program.weights, name: wide}, tensors=tensors)
    model = QuantizedModel(replace(quantized.quantized, program=odd))
    torch.testing.assert_close(model.compile("reference")(images), model(images), rtol=1e-3, atol=1e-3)
    with pytest.raises(ArtifactError, match="integers span more than a byte: use executor = 'reference'"):
        model.compile("torch")
