"""Every method on whole models: folds, ledgers, outputs of any kind, and what each of them sees."""

import functools
import math
import re
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu

import adalog
import zoo
from adalog import Calibration, CalibrationError, Config, QuantizedModel, Reconstruction, Resources, Search
from adalog.artifact import deserialise, serialise
from adalog.baselines import BlockRefinement, Evolution, RangeSearch, ScaleSearch, ranges
from adalog.errors import ArtifactError
from adalog.quantizers import FLOAT_BITS, UniformFormat
from adalog.search.operand import Operand
from adalog.search.product import Product
from toys import SMALL_IMAGES, Toy, Unbound, values

QUICK = {
    ScaleSearch: {"candidates": 8, "probes": 2},
    Search: {"rounds": 1, "steps": 1},
    Evolution: {"passes": 1, "cycles": 2},
    BlockRefinement: {"candidates": 3, "probes": 2},
    Reconstruction: {"images": 6, "iterations": 4},
}


def brief(method, bits="w4a4s3"):
    """A method's choices with searches that take little time."""
    config = replace(Config.preset(bits, method), images=4)
    search, *stages = (replace(each, **QUICK.get(type(each), {})) for each in (config.search, *config.stages))
    return replace(config, search=search, stages=tuple(stages))


@pytest.fixture(scope="module")
def calibrations():
    return functools.cache(zoo.calibrated)


@pytest.fixture(scope="module")
def convolutional():
    torch.manual_seed(0)
    parts = {"stem": nn.Conv2d(3, 8, 3, 2, 1), "grouped": nn.Conv2d(8, 12, 3, 1, 1, groups=4)}
    parts |= {"depthwise": nn.Conv2d(12, 12, 3, 2, 1, groups=12), "head": nn.Linear(12, 5)}
    return Calibration(Toy(gelu_convolutions, **parts).eval(), torch.randn(4, 3, 16, 16))


RIVALS = ("minmax", "percentile", "easyquant", "fq-vit", "ptq4vit", "apq-vit", "repq-vit", "evol-q")
FAMILIES = ("demo",)
SLOW = tuple(name for name in zoo.MODELS if name not in FAMILIES)
# Every method quantizes the bundled model and another family, and every family is quantized by a method.
PAIRS = [
    *((family, method) for family in FAMILIES for method in RIVALS),
    *((family, RIVALS[index % len(RIVALS)]) for index, family in enumerate(SLOW)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "method"), PAIRS)
def test_every_family_is_quantized_and_stored(calibrations, family, method):
    model = calibrations(family).quantize(brief(method))
    if method in ("ptq4vit", "apq-vit"):  # they keep images in float
        convs = [row.site for row in model.ledger if row.role == "conv" and row.source == "input"]
        assert [row.site for row in model.ledger if row.left == "float"] == convs
    else:
        assert not model.float_sites()
    assert all(math.isfinite(row.sqnr) and row.sqnr > 0 for row in model.ledger)
    stored = QuantizedModel(deserialise(serialise(model.quantized)))
    with torch.no_grad():
        outputs, again = (values(network(zoo.IMAGES)) for network in (model, stored))
    assert all(torch.equal(one, other) for one, other in zip(outputs, again, strict=True))
    assert all(bool(torch.isfinite(value).all()) for value in outputs)


@pytest.fixture(scope="module")
def one_block(tiniest, images):
    return Calibration(tiniest, images)


@pytest.mark.slow
@pytest.mark.parametrize("bits", ["w2a2", "w8a5s2", "w32a4", "w4a32", "w32a32", "w4a32s3"])
@pytest.mark.parametrize("method", RIVALS)
def test_every_width_is_quantized(one_block, bits, method):
    config = brief(method, bits)
    model = one_block.quantize(config)
    kinds = {side for row in model.ledger for side in (row.left, row.right)}
    widths = {int(kind.split("-")[0]) for kind in kinds if kind != "float"}
    allowed = {config.weight_bits, config.activation_bits, config.softmax_bits, config.input_bits} - {FLOAT_BITS}
    assert widths <= allowed
    assert deserialise(serialise(model.quantized)).config == config


def gelu_convolutions(m, x):
    """A padded, strided, grouped convolution after a GELU, and a depthwise one."""
    x = m.depthwise(torch.nn.functional.silu(m.grouped(gelu(m.stem(x)))))
    return m.head(x.mean((2, 3)))


@pytest.mark.slow
@pytest.mark.parametrize("method", RIVALS)
def test_grouped_convolutions(convolutional, method):
    model = convolutional.quantize(brief(method))
    assert {row.site for row in model.ledger} == {"stem", "grouped", "depthwise", "head"}
    assert all(row.sqnr > 0 for row in model.ledger)
    stored = QuantizedModel(deserialise(serialise(model.quantized)))
    assert torch.equal(stored(*convolutional.images), model(*convolutional.images))


@pytest.mark.slow
@pytest.mark.parametrize("search", [RangeSearch((1.0, 0.99), share="mean"), ScaleSearch("squared", candidates=6)])
@pytest.mark.parametrize("law", ["log2", pytest.param("log-sqrt2", marks=pytest.mark.slow), "twin"])
def test_other_quantizers_go_with_either_search(calibrations, convolutional, law, search):
    softmax = "uniform" if law == "twin" else law
    config = Config(images=4, post_softmax=softmax, post_gelu=law, search=search, stages=())
    kind = {"log2": "4-bit log 2^(1/1)", "log-sqrt2": "4-bit log 2^(1/2)", "twin": "4-bit twin uniform"}[law]
    for calibration in (calibrations("demo"), convolutional):
        model = calibration.quantize(config)
        if calibration is not convolutional:  # where what the search finds better is taken
            found = {row.left for row in model.ledger if row.source == "gelu"}
            assert {re.sub(r" u(8|16)$", "", left) for left in found} == {kind}
        assert all(row.sqnr > 3 for row in model.ledger)
        assert deserialise(serialise(model.quantized)).config == config


@pytest.mark.slow
def test_methods_fold_as_they_say(calibrations):
    calibration = calibrations("timm_vit")
    reasons = {method: calibration.quantize(brief(method)).refusals for method in ("minmax", "fq-vit", "repq-vit")}
    assert set(reasons["minmax"].values()) == {"not folded: this method does not fold norms"}
    assert not reasons["fq-vit"]
    assert reasons["repq-vit"] == {"norm": "not folded: it belongs to the head"}


@pytest.mark.slow
def test_a_folded_norm_decides_the_quantizer_of_its_linears(calibrations):
    calibration = calibrations("timm_vit")
    config = brief("repq-vit")
    (found,) = calibration.search(config, ["blocks.1.attn.qkv"])
    x = calibration.operand(next(s for s in calibration.sites if s.name == "blocks.1.attn.qkv").left).flatten(0, -2)
    fold, shared = config.search.fold_channels(x, 4, x[:2])
    assert torch.equal(found.assignment.left.scale, shared.scale)
    assert torch.equal(found.assignment.left.zero_point, shared.zero_point)
    assert torch.equal(found.product.left.values, x / fold.ratio - fold.beta)


def test_released_zero_points_are_refused_by_files(calibrations, tmp_path):
    """RepQ-ViT's code does not round the shared zero point: its 2^b + 1 levels are no codes of b bits."""
    config = brief("repq-vit")
    config = replace(config, search=replace(config.search, round_zero_point=False))
    model = calibrations("timm_vit").quantize(config)
    assert bool(torch.isfinite(model(zoo.IMAGES)).all())
    with pytest.raises(ArtifactError, match="has a zero point that is not a whole number from 0 to 15"):
        serialise(model.quantized)
    with pytest.raises(ValueError, match="round_zero_point = False finds zero points that no file can store"):
        calibrations("timm_vit").quantize(config, Resources(partial=tmp_path / "searches"))
    assert not list(tmp_path.iterdir())


def chain(m, x):
    y = m.a(m.norm(x))
    return m.b(y) + m.c(y)


def test_operands_are_seen_behind_what_is_quantized():
    """RepQ-ViT: a channel's own quantizers first, then weights; what follows sees their output."""
    torch.manual_seed(1)
    parts = {"norm": nn.LayerNorm(6), "a": nn.Linear(6, 8), "b": nn.Linear(8, 4), "c": nn.Linear(8, 4)}
    model, x = Toy(chain, **parts).eval(), torch.randn(200, 6)
    nn.init.normal_(model.norm.weight)
    search = RangeSearch((0.99, 0.9), share="mean", in_order=True)
    config = replace(brief("repq-vit"), images=200, fold_head=True, search=search)
    calibration = Calibration(model, x)
    found = {searched.group.name: searched for searched in calibration.search(config)}
    assert [len(found[name].group.sites) for name in ("a", "b")] == [1, 2]

    normed = model.norm(x).detach()

    def range_of(values, *own_dims):
        return ranges.own_range(Operand(values, UniformFormat(4, own_dims=own_dims)), config.search)

    weight, bias = model.a.weight.detach(), model.a.bias.detach()
    behind = range_of(normed, 1).fake_quantize(normed) @ range_of(weight, 0).fake_quantize(weight).T + bias
    expected = range_of(behind)
    torch.testing.assert_close(found["b"].assignment.left.scale, expected.scale)
    assert float(found["b"].assignment.left.zero_point) == float(expected.zero_point)
    plain = calibration.search(replace(config, search=replace(config.search, in_order=False)), ["b"])[0]
    assert not torch.allclose(plain.assignment.left.scale, expected.scale)
    # The weight of a folded norm is chosen anew.
    folded = weight * found["a"].assignment.fold.ratio
    torch.testing.assert_close(found["a"].assignment.right.scale, range_of(folded, 0).scale)
    # What is judged is the error on float inputs.
    assert torch.equal(found["b"].product.left.values, calibration.operand(calibration.sites[1].left))


def test_gradients_weight_the_errors_of_their_own_rows():
    """Images that the loss does not see have no part in the search."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4)).eval(), torch.randn(40, 6)
    x[20:] *= 5
    config = replace(brief("ptq4vit"), images=40, search=ScaleSearch(candidates=20))
    calibration = Calibration(model, x)
    probe = torch.zeros(40, 4)
    probe[:20] = torch.randn(20, 4)
    calibration.probe(probe)
    found = {searched.group.name: searched for searched in calibration.search(config)}["2"]
    gradient = probe.square() / probe.square().mean()
    left, right = found.product.left, found.product.right
    product = Product("linear", left, right, weights=gradient, row_splits=torch.zeros(4, dtype=torch.int64))
    again = config.search.search_product(product)
    assert torch.equal(found.assignment.left.scale, again.left.scale)
    assert torch.equal(found.assignment.right.scale, again.right.scale)
    loud = replace(left, values=torch.cat([left.values[:20], left.values[20:] * 9]))
    found = config.search.search_product(Product("linear", loud, right))
    assert float(found.left.scale) > float(again.left.scale)


@pytest.mark.slow
def test_gradients_are_thinned_as_operands_are():
    """With little memory every n-th row serves, and has its own weights."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4)).eval(), torch.randn(8000, 6)
    quiet = torch.arange(8000) % 5 < 2  # which a step of 3 rows meets as often
    x[~quiet] *= 6
    config = replace(brief("ptq4vit"), images=8000, search=ScaleSearch(candidates=40, rough_stride=1))
    found = []
    for memory in (1 << 30, 900_000):
        calibration = Calibration(model, x, memory=memory)
        calibration.probe(quiet[:, None] * torch.ones(8000, 4))
        found.append({searched.group.name: searched for searched in calibration.search(config)})
    for name in ("0", "2"):
        whole, part = (each[name] for each in found)
        assert len(part.product.left.values) == -(-8000 // 3)
        for side in ("left", "right"):
            both = (getattr(each.assignment, side).scale for each in (part, whole))
            torch.testing.assert_close(*both, rtol=0.15, atol=0)
        plain = replace(part.product, weights=None, row_splits=None)
        unweighted = config.search.search_product(plain)
        assert float(unweighted.left.scale) > 1.5 * float(part.assignment.left.scale)


ENDS = {
    "logits": lambda y: y,
    "logits and classes": lambda y: (y, y.argmax(1)),
    "one number": lambda y: y[:, 0],
    "classes": lambda y: y.argmax(1),
}


@pytest.fixture(scope="module")
def unbound():
    """Calibrations of the model with each of the outputs, on more images than calibrate."""

    @functools.cache
    def calibrate(ends):
        return Calibration(Unbound(ENDS[ends]).eval(), SMALL_IMAGES[:4], unlabelled=SMALL_IMAGES)

    return calibrate


@pytest.mark.slow
@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("method", ["ptq4vit", "apq-vit", "qdrop", "fima-q", "evol-q"])
def test_methods_take_any_outputs(unbound, method, ends):
    if ends == "classes" and method != "qdrop":  # which compares the blocks themselves
        with pytest.raises(CalibrationError, match="the model has no"):
            unbound(ends).quantize(brief(method))
        return
    found = unbound(ends).quantize(brief(method))
    assert set(found.float_sites()) <= {"patches"}  # images, which PTQ4ViT does not quantize
    assert found(SMALL_IMAGES[:2])[0] is not None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:all calibration images hold one")
@pytest.mark.parametrize("method", ["qdrop", "fima-q"])
def test_blank_images_train_nothing(method):
    found = adalog.quantize(Unbound(ENDS["logits"]).eval(), torch.zeros_like(SMALL_IMAGES), brief(method))
    assert bool(found(torch.zeros_like(SMALL_IMAGES)).isfinite().all())
