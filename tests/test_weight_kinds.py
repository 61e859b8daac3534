"""Weights whose quantizers are not asymmetric uniform: symmetric ones, and a kind that the package does not have."""

import json
import math
import re
from base64 import b64decode, b64encode
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from adalog import Calibration, Config, Correction, QuantizedModel, Reconstruction, artifact, library
from adalog.calibration.partial import Partial
from adalog.choices import RangeSearch
from adalog.errors import ArtifactError, DataError
from adalog.quantizers import Assignment, LogQuantizer, QuantizedTensor, TwinUniformQuantizer, UniformQuantizer
from adalog.quantizers.codec import decode_weight, pack
from adalog.search.bounds import point_of
from adalog.search.operand import Format
from adalog.study.cost import cost
from problems import symmetric
from stored import deserialise, serialise

PAGE = Path(__file__).parent.parent / "docs" / "how-to" / "add-a-quantizer.md"
EXECUTORS = ("reference", "torch", *(["native"] if library.levels() else []))
FITTED = (Correction(images=4), Reconstruction(images=4, iterations=4, batch=4))


def codes_agree(model, images):
    """Every executor puts out what fake quantization does, but for codes that rounding moves."""
    fake = model(images)
    return all(float((model.compile(each)(images) - fake).norm() / fake.norm()) < 0.05 for each in EXECUTORS)


# --- symmetric weights ------------------------------------------------------------------------------------------------


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


def test_a_search_can_start_from_symmetric_weights_alone():
    right = symmetric()[1]
    upper = right.values.abs().amax(1)
    point = point_of(right, right.quantizer(upper[None]))
    torch.testing.assert_close(point, upper[None])
    skewed = UniformQuantizer(torch.ones(12, 1), torch.full((12, 1), 3.0), 4)
    assert point_of(right, skewed) is None


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("reach", [0.1, 0.4])
def test_the_box_of_one_scale_begins_below_the_best_one(width, reach):
    """Against a grid of scales for each row, by the error of the weight itself."""
    right = symmetric(width)[1]
    right = replace(right, values=right.values.abs().clamp(max=3) * right.values.sign())  # without outliers
    low, high = right.box(reach)
    top = right.values.abs().amax(1)
    points = torch.linspace(0.02, 1.2, 119, dtype=torch.float64)[:, None] * top
    errors = right.errors(right.values)(points[:, None], torch.float64).square().sum(2)
    best = points.gather(0, errors.argmin(0)[None])
    assert bool((low <= best * 1.02).all())
    assert torch.equal(high[0], top)


def test_a_twin_whose_negative_scale_is_another_starts_a_search():
    form = Format(4, one_scale=TwinUniformQuantizer, offset=0.17)
    operand = replace(symmetric()[0], format=form)
    twin = TwinUniformQuantizer(torch.tensor(0.3), torch.tensor(0.5), 4)
    assert point_of(operand, twin).item() == pytest.approx(7 * 0.3)


def test_the_largest_level_decides_a_symmetric_quantizer():
    found = UniformQuantizer.reaching(torch.tensor([[3.5], [0.0]]), 4, 0.0)
    assert found.levels()[[0, -1]].tolist() == [-4.0, 3.5]
    assert float(found.scale[1]) > 0


def test_weights_are_a_choice_of_search_alone():
    config = Config(weights="symmetric")
    assert Config.from_json(config.to_json()) == config
    with pytest.raises(ValueError, match=re.escape("weights = 'symmetric' goes with search = Search(...)")):
        Config(weights="symmetric", post_softmax="log2", post_gelu="uniform", search=RangeSearch())
    with pytest.raises(ValueError, match="weights = 'ternary' is none of uniform, symmetric"):
        Config(weights="ternary")


# --- the quantizer of the how-to --------------------------------------------------------------------------------------


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
        return Format(config.weight_bits, own_dims, one_scale=ternary)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Format, "of_weights", of_weights)
        stages = ((), FITTED[:1], FITTED[1:])
        return [calibration.quantize(replace(fast, weight_bits=2, stages=each)) for each in stages]


@pytest.fixture(scope="module")
def ternary_model(ternary_models):
    return ternary_models[1]


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
    given = {"codes": pack(torch.ones(320, dtype=torch.uint8), 2), "scale": torch.ones(10)}
    assert decode_weight("head.weight", "ternary", given, 2, [10, 32]).dequantize().unique().tolist() == [0.0]
    with pytest.raises(ArtifactError, match=match):
        decode_weight("head.weight", "ternary", given | change, 2, [10, 32])


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
    given = {"codes": pack(torch.ones(320, dtype=torch.uint8), 2), "scale": torch.ones(10)}
    with pytest.raises(ArtifactError, match=match):
        decode_weight("head.weight", kind, given, 2, [10, 32])


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


def test_kinds_that_take_more_than_one_number():
    with pytest.raises(ValueError, match="largest level alone does not determine a quantizer of the kind log"):
        LogQuantizer.reaching(torch.ones(()), 4, 0.0)
