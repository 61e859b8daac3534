"""Quantizing whole models, and what the result is and tells."""

import copy
import io
import math
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn

import adalog
import zoo
from adalog import ArtifactError, Calibration, CalibrationError, Config, QuantizedModel, Search, quantize
from adalog.graph.operations import FAKE_QUANTIZE
from adalog.graph.program import ModelOutput
from adalog.graph.sites import find_sites
from adalog.inputs import demo
from adalog.quantized import QuantizedProgram
from stored import deserialise, serialise
from toys import Toy, all_values, decibels

pytestmark = pytest.mark.usefixtures("captured_once")
BITS4 = Config(images=4, search=Search(init=(8, 4), parents=4, rounds=1, steps=1), stages=())
BITS8 = replace(BITS4, weight_bits=8, activation_bits=8, softmax_bits=8)


def logits(output):
    return output if isinstance(output, torch.Tensor) else next(iter(output.values()))


@torch.no_grad()
def sqnr(model, quantized, images):
    """Of the outputs [dB]."""
    return decibels(logits(quantized(images)), logits(model(images)))


# --- whole models ----------------------------------------------------------------------------------------------------


def assert_same_after_saving(result, path):
    result.save(path)
    expected, loaded = result(zoo.IMAGES), adalog.load(path)(zoo.IMAGES)
    assert type(loaded) is type(expected)
    assert torch.equal(logits(loaded), logits(expected))


@pytest.mark.slow
def test_quantizes_to_four_bits(tmp_path):
    model = zoo.make("hf_vit")
    result = quantize(model, zoo.IMAGES, BITS4)
    assert result.float_sites() == []
    assert sqnr(model, result, zoo.IMAGES) > 5
    assert isinstance(result(zoo.IMAGES), ModelOutput)
    assert_same_after_saving(result, tmp_path / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.MODELS)
def test_eight_bits_are_close_to_full_precision(name, tmp_path):
    model = zoo.make(name)
    calibration = Calibration(model, zoo.IMAGES)
    result = calibration.quantize(BITS8)
    assert result.float_sites() == []
    assert {row.site for row in result.ledger} == {site.name for site in find_sites(calibration.program)}
    assert min(row.sqnr for row in result.ledger) > 28
    assert sqnr(model, result, zoo.IMAGES) > 25
    assert_same_after_saving(result, tmp_path / "model.safetensors")


@pytest.mark.slow
def test_operands_are_quantized_to_their_bits(calibration, images):
    config = Config(weight_bits=3, activation_bits=5, softmax_bits=2, images=4, search=BITS4.search)
    program = calibration.quantize(config).program
    roles = {f"{site.name}.{part}": site for site in calibration.sites for part in ("input", "left", "right")}
    values_of = all_values(program, (images,))
    quantized = {node.args[1]: values_of[node.name] for node in program.nodes if node.op == FAKE_QUANTIZE}
    assert len(quantized) == len(program.quantizers) == 3 + 9 + 4 + 4
    for name, values in quantized.items():
        site = roles[name]
        bits = program.quantizers[name].bits
        first, softmax = site.left_source.kind == "input", name.endswith("av.left")
        assert bits == (8 if first else 2 if softmax else 5)
        groups = program.quantizers[name].scale.numel()
        assert len(values.unique()) <= groups * 2**bits
    for weight in program.weights.values():
        assert weight.quantizer.bits == 3
        assert int(weight.codes.max()) < 8


@pytest.mark.slow
def test_the_model_passed_in_is_not_changed(tiniest, images):
    model = copy.deepcopy(tiniest).train()
    model.head.bias.data += 1  # a model that no other test has captured
    before = copy.deepcopy(model.state_dict())
    quantize(model, images, BITS4)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_one_norm_that_several_linears_read_through_views_is_folded_once(images):
    def function(model, x):
        x = model.norm(x.flatten(1, 2))
        return model.first(x[:, 0]) + model.second(x[:, 1])

    layers = {"norm": nn.LayerNorm(32), "first": nn.Linear(32, 8), "second": nn.Linear(32, 8)}
    model = Toy(function, **layers).eval()
    nn.init.normal_(model.norm.weight, 1, 0.3)
    nn.init.normal_(model.norm.bias)
    assert sqnr(model, quantize(model, images, BITS8), images) > 25


def test_no_sqnr_is_lost_in_json(images):
    """A product that is zero, and so exact, has no finite SQNR."""
    model = Toy(lambda m, x: m.fc(x), fc=nn.Linear(32, 4)).eval()
    nn.init.zeros_(model.fc.weight)
    result = quantize(model, images, BITS4)
    assert deserialise(serialise(result)).ledger == result.ledger


# --- calibration -----------------------------------------------------------------------------------------------------


@pytest.fixture
def searches(monkeypatch):
    """Every call of the search, by the sizes of its operands."""
    calls, search = [], Search.search_product
    monkeypatch.setattr(Search, "search_product", lambda *args: calls.append(args) or search(*args))
    return calls


@pytest.mark.slow
def test_methods_share_what_they_share(tiniest, images, searches):
    calibration = Calibration(tiniest, images)
    first = calibration.quantize(BITS4)
    every = len(searches)
    assert every == len(calibration.sites)  # q, k and v are one linear here
    uniform = replace(BITS4, post_softmax="uniform", post_gelu="uniform")
    second = calibration.quantize(uniform)
    assert len(searches) - every == 2  # one product after a softmax and one after a GELU
    again = calibration.quantize(BITS4)
    assert len(searches) - every == 2
    assert torch.equal(first(images), again(images))
    alone = Calibration(tiniest, images).quantize(uniform)
    assert torch.equal(alone(images), second(images))
    assert alone.ledger == second.ledger


@pytest.mark.slow
def test_separate_queries_keys_and_values_are_one_search(images, searches):
    calibration = Calibration(zoo.make("hf_vit"), images)
    one_kind = replace(BITS4.search, compare_uniform=False)
    result = calibration.quantize(replace(BITS4, search=one_kind))
    assert len(searches) == len(calibration.sites) - 2 * 2  # two blocks
    reads = [node.args[0].name for node in result.program.nodes if node.scope.endswith(("q_proj", "k_proj", "v_proj"))]
    assert len(set(reads)) < len(reads)


@pytest.mark.slow
def test_progress_counts_every_search(tiniest, images):
    seen = []
    quantize(tiniest, images, BITS4, progress=lambda done, total, site: seen.append((done, total, site)))
    totals = {total for _, total, _ in seen}
    assert len(totals) == 1
    assert [done for done, _, _ in seen] == list(range(totals.pop() + 1))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_refuses_images_that_are_not_finite(tiny, images, value):
    images = images.clone()
    images[1, 2, 3, 4] = value
    with pytest.raises(CalibrationError, match="the calibration images contain NaN or infinite values"):
        quantize(tiny, images, BITS4)


@pytest.mark.slow
def test_a_single_image_calibrates(tiniest, images):
    result = quantize(tiniest, images[:1], replace(BITS4, images=1))
    assert result.provenance["images"] == 1
    assert result(images).shape == (4, 10)


def test_refuses_values_that_overflow_inside(images):
    """Infinite where a product reads them, though not in the output."""
    model = Toy(lambda m, x: 1 / (1 + m.fc((1000 * x).exp())), fc=nn.Linear(32, 4, bias=False)).eval()
    nn.init.ones_(model.fc.weight)
    with pytest.raises(CalibrationError, match="exp outputs NaN or infinite values on these images"):
        quantize(model, images, BITS4)


# --- the result ------------------------------------------------------------------------------------------------------


def test_summary_tells_every_site_and_what_stays_float(quantized):
    text = quantized.summary()
    for row in quantized.ledger:
        assert row.site in text
        assert row.left in text
        assert row.right in text
    assert f"\nbits {quantized.config.bits}; {len(quantized.ledger)} sites, 0 of them float\n" in text
    last = text.splitlines()[-1]
    for name, count in quantized.float_operations().items():
        assert f"{name} x {count}" in last
    assert {"layer_norm", "softmax", "gelu", "add"} <= set(quantized.float_operations())
    assert not {"linear", "conv2d", "matmul"} & set(quantized.float_operations())


ON = "of the outputs on the calibration images (at most 64)"


@pytest.mark.parametrize(
    ("errors", "lines"),
    [
        ({"kl": 0.0123}, [f"KL divergence {ON}: 0.0123 nats"]),
        ({"relative": 0.02}, [f"relative squared error {ON}: 0.02"]),
        ({"kl": 0.031}, [f"KL divergence {ON}: 0.031 nats", "to lower it: "]),
        ({"relative": None}, [f"relative squared error {ON}: not finite", "to lower it: "]),
        ({"kl": "much", "relative": math.inf, "other": 1.0}, []),  # as a file may have it
        ({"kl": 10**400, "relative": -1.0}, []),
        ({"kl": True}, []),
        (["kl"], []),
        (None, []),
    ],
)
def test_summary_names_the_error_of_the_outputs_and_what_lowers_it(quantized, errors, lines):
    model = QuantizedModel(replace(quantized.quantized, provenance={"output_error": errors}))
    last = model.summary().splitlines()[len(quantized.summary().splitlines()) :]
    assert [line[: len(start)] for line, start in zip(last, lines, strict=True)] == lines


def test_a_site_that_is_not_quantized_is_told(quantized, calibration):
    plain = QuantizedModel(QuantizedProgram(calibration.program, quantized.config, (), {}))
    assert len(plain.float_sites()) == len(quantized.ledger)


SHAPE = r"\(4, 3, 32, 32\) of torch.float32"
CONVERT = r": convert the input with .to\(torch.float32\)"


@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda images: [], "nothing"),
        (lambda images: [images, images], f"{SHAPE} and {SHAPE}"),
        (lambda images: [images[..., :16]], r"\(4, 3, 32, 16\) of torch.float32"),
        (lambda images: [images[:, :1]], r"\(4, 1, 32, 32\) of torch.float32"),
        (lambda images: [images[0]], r"\(3, 32, 32\) of torch.float32"),
        (lambda images: [images.double()], rf"\(4, 3, 32, 32\) of torch.float64{CONVERT}"),
        (lambda images: [images.bfloat16()], rf"\(4, 3, 32, 32\) of torch.bfloat16{CONVERT}"),
        (lambda images: [images.long()], r"\(4, 3, 32, 32\) of torch.int64"),
        (lambda images: [images.numpy()], "ndarray"),
    ],
)
def test_refuses_other_inputs(quantized, images, change, got):
    with pytest.raises(ValueError, match=rf"^the model takes \(B, 3, 32, 32\) of torch.float32; got {got}$"):
        quantized(*change(images))


@pytest.mark.parametrize("batch", [1, 3, 9])
def test_other_batch_sizes(quantized, images, batch):
    more = images[torch.arange(batch) % 4]
    torch.testing.assert_close(quantized(more), quantized(images)[torch.arange(batch) % 4], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("move", [lambda model: model.to(torch.float64), lambda model: model.type(torch.float64)])
def test_moves_with_its_tensors(calibration, fast, images, move):
    model = calibration.quantize(fast)
    expected = model(images)
    assert move(model) is model
    for weight in model.program.weights.values():
        assert weight.codes.dtype == torch.uint8
        assert weight.quantizer.scale.dtype == torch.float64
    assert all(value.dtype == torch.float64 for value in model.program.tensors.values() if value.is_floating_point())
    actual = model(images.double())
    assert actual.dtype == torch.float64
    assert (actual - expected).norm() < 0.2 * expected.norm()  # a value at a threshold may take the next code
    assert torch.equal(model.to(torch.float32)(images), expected)


def test_stored_values_are_those_of_the_codes(quantized):
    program = quantized.program
    assert len(program.weights) == sum(row.role in ("linear", "conv") for row in quantized.ledger)
    for name, weight in program.weights.items():
        assert torch.equal(program.tensors[name], weight.dequantize())


# --- the bundled model -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_timm_loads_the_bundled_weights():
    from timm.models import VisionTransformer

    from adalog.inputs.demo.model import ConvStem

    ours = demo.load_model()
    sizes = {"img_size": 32, "patch_size": 4, "num_classes": 10, "embed_dim": 192, "depth": 6, "num_heads": 3}
    theirs = VisionTransformer(class_token=False, global_pool="avg", embed_layer=ConvStem, **sizes).eval()
    theirs.load_state_dict(ours.state_dict(), strict=True)
    images, _ = demo.test_images()
    with torch.no_grad():
        torch.testing.assert_close(theirs(images[:20]), ours(images[:20]), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_the_bundled_model_knows_its_images():
    images, labels = demo.test_images()
    with torch.no_grad():
        predictions = demo.load_model()(images[::5]).argmax(1)
    assert (predictions == labels[::5]).double().mean() >= 0.80
    assert labels.bincount().tolist() == [200] * 10


def test_the_bundled_calibration_images_are_not_test_images():
    calibration, (test, _) = demo.calibration_images(), demo.test_images()
    assert (calibration.shape, test.shape) == ((64, 3, 32, 32), (2000, 3, 32, 32))
    assert torch.cdist(calibration.flatten(1), test.flatten(1)).min() > 1


# --- state dicts and copies ------------------------------------------------------------------------------------------


QUICK = replace(BITS4, images=8, search=Search(rounds=1, steps=0))
ROWS = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


def small(seed, bits=4, width=8):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.Linear(width, 5))
    return quantize(model.eval(), ROWS, replace(QUICK, weight_bits=bits, activation_bits=bits))


def stored_by_torch(value, **options):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)


@pytest.mark.parametrize("bits", [3, 4])
def test_a_state_dict_holds_the_whole_model(bits):
    one, other = small(1), small(2, bits)
    assert not torch.equal(one(ROWS), other(ROWS))
    other.load_state_dict(stored_by_torch(one.state_dict()))
    assert torch.equal(one(ROWS), other(ROWS))
    assert serialise(one) == serialise(other)
    assert one.config == other.config


def test_a_state_dict_of_a_model_that_contains_it():
    one, other = (nn.Sequential(small(seed), nn.Flatten(), nn.Linear(5, 2)) for seed in (1, 2))
    assert list(one.state_dict()) == ["0._extra_state", "2.weight", "2.bias"]
    other.load_state_dict(stored_by_torch(one.state_dict()))
    assert torch.equal(one(ROWS), other(ROWS))


def test_a_state_dict_keeps_the_dtype_of_the_model_that_loads_it():
    one, other = small(1), small(2).double()
    other.load_state_dict(one.state_dict())
    assert other(ROWS.double()).dtype == torch.float64
    torch.testing.assert_close(other(ROWS.double()).float(), one(ROWS))


def test_a_state_dict_keeps_tensors_of_several_dtypes():
    """A model that multiplies by a table in float64."""

    def made(seed):
        torch.manual_seed(seed)
        table = torch.randn(5, 5, dtype=torch.float64)
        model = Toy(lambda m, x: (m.fc(x).double() @ m.table).float(), fc=nn.Linear(16, 5), table=table)
        return quantize(model.eval(), ROWS, QUICK)

    one, other = made(1), made(2)
    other.load_state_dict(one.state_dict())
    assert torch.equal(one(ROWS), other(ROWS))
    assert serialise(one) == serialise(other)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda state: state.clear(), RuntimeError, "Missing key"),
        (lambda state: state.update(extra=torch.ones(2)), RuntimeError, "Unexpected key"),
        (lambda state: state.update(_extra_state=state["_extra_state"][:-9]), ArtifactError, "_extra_state"),
        (lambda state: state.update(_extra_state=torch.zeros(8)), ArtifactError, "load what state_dict"),
        (lambda state: state.update(_extra_state=b"codes"), ArtifactError, "load what state_dict"),
    ],
)
def test_a_state_dict_that_is_not_complete_is_refused(change, error, message):
    model = small(1)
    before, state = model(ROWS), model.state_dict()
    change(state)
    with pytest.raises(error, match=message):
        model.load_state_dict(state)
    assert torch.equal(model(ROWS), before)


def test_a_state_dict_of_another_model_is_refused():
    torch.manual_seed(0)
    other = quantize(nn.Sequential(nn.Linear(16, 5)).eval(), ROWS, QUICK)
    with pytest.raises(ArtifactError, match="holds another model, with 1 sites instead of 2"):
        small(1).load_state_dict(other.state_dict())
    with pytest.raises(ArtifactError, match="holds another model"):
        small(1).load_state_dict(small(1, width=12).state_dict())


@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        lambda model: pickle.loads(pickle.dumps(model)),
        lambda model: stored_by_torch(model, weights_only=False),
    ],
)
def test_copies_are_equal_and_independent(copied):
    model = small(1)
    model.note(name="first")
    again = copied(model)
    assert serialise(again) == serialise(model)
    expected = model(ROWS)
    again.double()
    assert torch.equal(model(ROWS), expected)
    torch.testing.assert_close(again(ROWS.double()).float(), expected)


@pytest.mark.parametrize("post_softmax", ["adalog", "log2"])
def test_torch_compile_traces_the_model_as_one_graph(tiniest, images, fast, post_softmax):
    """Its values are the same, whatever the number of images."""
    config = replace(fast, post_softmax=post_softmax, rounding="log" if post_softmax == "log2" else "nearest")
    model = quantize(tiniest, images, config)
    with torch.no_grad():
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        for given in (images, images[:1]):
            torch.testing.assert_close(compiled(given), model(given), rtol=0, atol=1e-5)
    torch.compiler.reset()


def test_torch_load_without_code_names_the_class():
    with pytest.raises(pickle.UnpicklingError, match="QuantizedModel"):
        stored_by_torch(small(1))
