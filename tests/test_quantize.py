"""What a model may take and hold: several inputs, masks, products that stay float, activations of either quantizer."""

import copy
import math
import re
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import adalog
from adalog import Calibration, CalibrationError, CaptureError, Config, Correction, Reconstruction, Search
from adalog.baselines import BlockRefinement, ReleasedSearch
from adalog.calibration.calibration import digest
from adalog.config import power_law_format
from adalog.quantizers import QuantizedTensor, UniformFormat
from adalog.search.operand import Operand
from adalog.search.product import Product
from adalog.search.tables import with_table
from stored import deserialise, serialise
from toys import TOKENS, Toy, decibels, tokens_config

CONFIG = Config(images=4, weight_bits=8, activation_bits=8, softmax_bits=8, search=Search(steps=1), stages=())
IMAGES = torch.randn(6, 3, 32, 32, generator=torch.Generator().manual_seed(1))


# --- inputs ----------------------------------------------------------------------------------------------------------


class Masked(nn.Module):
    """Attention over rows, with a mask and a class for each image."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.table = nn.Linear(32, 96), nn.Embedding(5, 8)

    def forward(self, x, mask, kind):
        q, k, v = self.qkv(x[:, 0]).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4).unbind(0)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask) + self.table(kind)[:, None, None]


@pytest.fixture(scope="module")
def masked():
    mask = torch.rand(6, 1, 32, 32, generator=torch.Generator().manual_seed(2)) < 0.7
    return Masked().eval(), (IMAGES, mask | torch.eye(32, dtype=torch.bool), torch.arange(6) % 5)


@pytest.mark.slow
@torch.no_grad()
def test_several_inputs_of_any_type(masked):
    model, inputs = masked
    result = adalog.quantize(model, inputs, CONFIG)
    assert decibels(result(*inputs), model(*inputs)) > 25
    assert result(*(value[:1] for value in inputs)).shape == (1, 4, 32, 8)
    assert result.float_sites() == []
    assert torch.equal(deserialise(serialise(result))(*inputs), result(*inputs))


@pytest.mark.slow
def test_the_same_images_of_every_input(masked):
    model, inputs = masked
    result = adalog.quantize(model, inputs, CONFIG, seed=3)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(3))[:4]
    sample = tuple(value[order] for value in inputs)
    assert result.provenance["calibration"] == digest(sample)
    assert result.provenance["images"] == 4
    assert result.provenance["output_error"].keys() == {"relative"}
    assert 0 < result.provenance["output_error"]["relative"] < 0.01
    assert result.ledger == Calibration(model, sample).quantize(CONFIG).ledger
    assert len({digest(sample), digest(sample[:1]), digest((*sample[:2], sample[2] + 1))}) == 3
    assert digest(sample[:1]) == digest((sample[0],))


def test_refuses_inputs_that_all_images_share_and_inputs_with_nan(masked):
    model, (images, mask, kind) = masked
    with pytest.raises(CaptureError, match=r"\(6, 3, 32, 32\), \(1, 1, 32, 32\), \(6,\).*repeat an input"):
        adalog.quantize(model, (images, mask[:1], kind), CONFIG)
    with pytest.raises(CalibrationError, match="NaN or infinite"):
        adalog.quantize(model, (images * torch.nan, mask, kind), CONFIG)


# --- products that stay float ----------------------------------------------------------------------------------------


@torch.no_grad()
def test_products_that_stay_float_are_told():
    def function(model, x):
        mixed = model.mix @ model.fc(x)  # a stored operand on the left
        filtered = F.linear(mixed, x[0, 0, :8])  # a weight from the image
        return model.conv(filtered.flatten(1, 2)).flatten(1), model.head(mixed)

    modules = {"fc": nn.Linear(32, 32), "mix": nn.Parameter(torch.randn(8, 32)), "head": nn.Linear(32, 4)}
    model = Toy(function, conv=nn.ConvTranspose1d(24, 2, 3), **modules).eval()
    result = adalog.quantize(model, IMAGES, CONFIG)
    assert [row.site for row in result.ledger] == ["fc", "head"]
    assert result.refusals == {
        "qk": "stays float: its left operand is a stored tensor",
        "linear": "stays float: its weight is computed, not stored",
        "conv.conv_transpose1d": "stays float: conv_transpose1d is neither a linear, a 2-D convolution nor a matrix "
        "product",
    }
    assert len(result.float_sites()) == 3
    assert "2 sites, 3 of them float" in result.summary()
    assert "stays float: qk: its left operand is a stored tensor" in result.summary()
    loaded = deserialise(serialise(result))
    assert loaded.refusals == result.refusals
    for actual, expected in zip(loaded(IMAGES), model(IMAGES), strict=True):
        assert decibels(actual, expected) > 30


@pytest.mark.parametrize("per_head", [True, False])
@torch.no_grad()
def test_a_table_that_all_images_share_is_quantized_like_keys(per_head):
    """Its matrices, one a channel, stand for all images: what the search repeats, the program does not."""
    model = Toy(lambda m, x: x @ m.table, table=nn.Parameter(torch.randn(3, 32, 5))).eval()
    result = adalog.quantize(model, IMAGES, replace(CONFIG, per_head=per_head))
    assert [(row.role, row.right) for row in result.ledger] == [("qk", "8-bit uniform" + " x 3" * per_head)]
    assert result.float_sites() == []
    assert decibels(result(IMAGES), model(IMAGES)) > 35


@pytest.mark.parametrize("kind", ["adalog", "twin"])
@torch.no_grad()
def test_only_uniform_activations_have_a_scale_a_head_or_group(kind):
    config = replace(CONFIG, post_gelu=kind, search=replace(CONFIG.search, compare_uniform=False))
    word = {"adalog": "log", "twin": "twin uniform"}[kind]
    product = Toy(lambda _, x: F.gelu(x) @ x.transpose(-1, -2)).eval()
    grouped = Toy(lambda m, x: m.conv(F.gelu(x)), conv=nn.Conv2d(3, 6, 3, padding=1, groups=3)).eval()
    for model in (product, grouped) if kind == "twin" else (product,):
        result = adalog.quantize(model, IMAGES, config)
        assert result.ledger[0].left.startswith(f"8-bit {word}")
        assert " x " not in result.ledger[0].left
        assert decibels(result(IMAGES), model(IMAGES)) > 35


@torch.no_grad()
def test_a_grouped_convolution_after_gelu_takes_the_better_quantizer():
    """A uniform one with a scale a group where GELU is all but linear, a logarithmic one where tails are long."""
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    for inputs, kind in ((images * 0.02, "uniform x 3"), (10 * images**3, "log")):
        model = Toy(lambda m, x: m.conv(F.gelu(x)), conv=nn.Conv2d(3, 3, 3, groups=3)).eval()
        result = adalog.quantize(model, inputs, replace(CONFIG, activation_bits=4))
        assert kind in result.ledger[0].left


# --- what is searched as one -----------------------------------------------------------------------------------------


@torch.no_grad()
def test_separate_linears_have_rows_of_their_own():
    """The row of each says how many scales its own weight has; their one SQNR is that of all."""
    parts = {"q": nn.Linear(32, 8), "k": nn.Linear(32, 16), "v": nn.Linear(32, 4)}
    model = Toy(lambda m, x: (m.q(x), m.k(x), m.v(x)), **parts).eval()
    result = adalog.quantize(model, IMAGES, CONFIG)
    assert [row.right for row in result.ledger] == [f"8-bit uniform x {size}" for size in (8, 16, 4)]
    assert len({row.sqnr for row in result.ledger}) == 1
    calibration = Calibration(model, IMAGES)
    for names, count in ((["k"], 1), (["q", "v"], 1), (None, 1), ([], 0)):
        assert len(calibration.search(CONFIG, names)) == count
    with pytest.raises(ValueError, match="w: no such site"):
        calibration.search(CONFIG, ["q", "w"])


@pytest.mark.slow
@torch.no_grad()
def test_a_norm_folds_by_the_rows_that_its_linears_read():
    """A class token unlike all others: the ranges of the others say nothing of it."""

    def function(m, x):
        y = x[:, 0]
        return m.head(m.norm(torch.cat([y[:, :1] * m.gain, y[:, 1:]], dim=1))[:, 0])

    torch.manual_seed(0)
    gain = nn.Parameter(torch.logspace(-1.5, 1.5, 32))
    model = Toy(function, norm=nn.LayerNorm(32), head=nn.Linear(32, 10), gain=gain).eval()
    images = torch.randn(256, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    config = replace(CONFIG, images=256, weight_bits=8, activation_bits=4)
    folded = adalog.quantize(model, images, config)
    assert not folded.refusals
    plain = adalog.quantize(model, images, replace(config, fold_rows=10**6))
    assert decibels(folded(images), model(images)) > decibels(plain(images), model(images)) + 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_quantized_in_float32(tiny, images, fast, dtype):
    half = copy.deepcopy(tiny).to(dtype)
    found = adalog.quantize(half, images.to(dtype), fast)
    expected = adalog.quantize(copy.deepcopy(half).float(), images.to(dtype).float(), fast)
    assert serialise(found) == serialise(expected)
    assert {value.dtype for value in half.parameters()} == {dtype}


def test_a_model_without_multiplications_is_refused():
    with pytest.raises(CalibrationError, match="no multiplication"):
        adalog.quantize(Toy(lambda _, x: x + 1).eval(), IMAGES, CONFIG)
    model = Toy(lambda model, x: model.conv(x[:, None]), conv=nn.Conv3d(1, 4, 1)).eval()
    with pytest.raises(CalibrationError, match="can be quantized: conv3d is neither a linear, a 2-D convolution nor"):
        adalog.quantize(model, IMAGES, CONFIG)


# --- activations that may go either way ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "activation", [F.silu, F.gelu, *(pytest.param(each, marks=pytest.mark.slow) for each in (F.hardswish, F.mish))]
)
@pytest.mark.parametrize(("gain", "power", "kind"), [(0.05, 1, "uniform"), (2, 3, "log")])
@torch.no_grad()
def test_the_better_quantizer_after_an_activation(activation, gain, power, kind):
    """Values near zero have no power law above the activation's minimum; values with long tails have."""
    model = Toy(lambda m, x: m.fc(activation(gain * x**power)), fc=nn.Linear(32, 4)).eval()
    config = replace(CONFIG, weight_bits=4, activation_bits=4)
    calibration = Calibration(model, IMAGES)
    (chosen,) = calibration.quantize(config).ledger
    (uniform,) = calibration.quantize(replace(config, post_gelu="uniform")).ledger
    (site,) = calibration.sites
    values = calibration.operand(site.left).flatten(0, -2)
    form = power_law_format("adalog", 4, config, -site.left_source.minimum)
    weight = Operand(model.fc.weight.detach(), UniformFormat(4, own_dims=(0,)))
    product = Product("linear", Operand(values, form), weight)
    log = with_table(product, config.search.search_product(product), config.tables)
    assert kind in chosen.left
    assert chosen.sqnr == max(uniform.sqnr, log.sqnr)
    assert (log.sqnr > uniform.sqnr) is (kind == "log")


@pytest.mark.parametrize("compares", [True, False])
def test_gelu_has_the_papers_quantizer_unless_both_kinds_are_compared(compares):
    """The activations lie between 2 and 4, as a bias may place them, where a logarithm is coarse."""
    model = Toy(lambda m, x: m.fc(F.gelu(3 + 0.3 * x)), fc=nn.Linear(32, 4)).eval()
    search = replace(CONFIG.search, compare_uniform=compares)
    (row,) = adalog.quantize(model, IMAGES, replace(CONFIG, search=search)).ledger
    assert ("uniform" in row.left) is compares
    assert row.sqnr > 30 or not compares


def test_a_uniform_quantizer_is_searched_only_if_it_is_closer(monkeypatch):
    """After a GELU of values around zero, a logarithmic quantizer is closer, and one search is enough."""
    searched, search = [], Search.search_product
    monkeypatch.setattr(Search, "search_product", lambda *given: searched.append(given) or search(*given))
    model = Toy(lambda m, x: m.fc(F.gelu(2 * x**3)), fc=nn.Linear(32, 4)).eval()
    adalog.quantize(model, IMAGES, CONFIG)
    assert len(searched) == 1


# --- sites that keep other bits --------------------------------------------------------------------------------------


def kept(*keep, **changes):
    return replace(CONFIG, pinned=keep, weight_bits=4, activation_bits=4, softmax_bits=4, **changes)


def widths(result):
    """(left, right) of each site as in the ledger, without how many."""
    return {row.site: (row.left.split(" ")[0], row.right.split(" ")[0]) for row in result.ledger}


@pytest.mark.slow
@torch.no_grad()
def test_sites_keep_other_bits(calibration, images):
    result = calibration.quantize(kept(("blocks.*.mlp.*", 6), ("blocks.1.mlp.fc2", 32), ("*.av", 5)))
    found = widths(result)
    assert found.pop("patch_embed.conv1") == ("8-bit", "4-bit")
    special = {"blocks.1.mlp.fc2": ("float", "float")}
    special |= dict.fromkeys(("blocks.0.mlp.fc1", "blocks.1.mlp.fc1", "blocks.0.mlp.fc2"), ("6-bit", "6-bit"))
    special |= dict.fromkeys(("blocks.0.attn.av", "blocks.1.attn.av"), ("5-bit", "5-bit"))
    assert {site: bits for site, bits in found.items() if bits != ("4-bit", "4-bit")} == special
    assert result.refusals["blocks.1.mlp.fc2"] == "stays float: pinned at 32 bits"
    assert "stays float: blocks.1.mlp.fc2: pinned at 32 bits" in result.summary()
    assert result.float_sites() == ["blocks.1.mlp.fc2"]
    loaded = deserialise(serialise(result))
    assert loaded.config == result.config
    assert torch.equal(loaded(images), result(images))


@torch.no_grad()
def test_all_sites_kept_in_float_are_the_float_model(calibration, tiny, images):
    result = calibration.quantize(kept(("*", 32)))
    assert len(result.float_sites()) == len(result.ledger)
    assert "\nbits w4a4, except at sites with pinned bits; " in result.summary()
    assert torch.allclose(result(images), tiny(images), atol=1e-5)
    other = calibration.quantize(kept(("patch_embed.conv1", 32)))
    assert other.ledger[0].left == "float"


@pytest.mark.slow
@pytest.mark.parametrize("fold_rows", [1, 10**6])
@torch.no_grad()
def test_linears_of_one_activation_keep_the_same_bits(fold_rows):
    """What matches `q` alone is for `k` and `v` too; for what else reads a norm, where that can be folded."""

    def function(m, x):
        y = m.norm(x)
        return m.q(y) * m.k(y) + m.v(y) + m.turned(y.flip(2)) + m.other(x)

    parts = {name: nn.Linear(32, 32) for name in ("q", "k", "v", "turned", "other")}
    model = Toy(function, norm=nn.LayerNorm(32), **parts).eval()
    calibration = Calibration(model, IMAGES)
    quality = []
    for keep, bits in (((), "4-bit"), ((("q", 8),), "8-bit"), ((("q", 32),), "float")):
        result = calibration.quantize(kept(*keep, fold_rows=fold_rows))
        assert widths(result) == {name: ("4-bit", "4-bit") if name == "other" else (bits, bits) for name in parts}
        quality.append(decibels(result(IMAGES) - model.other(IMAGES), model(IMAGES) - model.other(IMAGES)))
    assert result.refusals["norm"] == "not folded: its linears take float activations"
    assert "not folded: norm: its linears take float activations" in result.summary()
    assert quality == sorted(quality)


@torch.no_grad()
def test_linears_of_different_activations_keep_their_own_bits():
    def function(m, x):
        y = m.norm(x)
        return m.q(y) + m.turned(y.flip(2)) + y  # which is why nothing folds

    model = Toy(function, norm=nn.LayerNorm(32), q=nn.Linear(32, 32), turned=nn.Linear(32, 32)).eval()
    result = adalog.quantize(model, IMAGES, kept(("q", 8)))
    assert widths(result) == {"q": ("8-bit", "8-bit"), "turned": ("4-bit", "4-bit")}


@torch.no_grad()
def test_operands_keep_bits_of_their_own(calibration, images):
    result = calibration.quantize(
        kept(("blocks.0.*", "w3a6"), ("*.av", "s2"), ("head", "w32"), ("patch_embed.*", "i5"), ("*.1.mlp.fc2", "a32"))
    )
    found = widths(result)
    assert found["patch_embed.conv1"] == ("5-bit", "4-bit")
    assert found["blocks.0.attn.qkv"] == ("6-bit", "3-bit")
    assert found["blocks.0.attn.qk"] == ("6-bit", "6-bit")
    assert (found["blocks.0.attn.av"], found["blocks.1.attn.av"]) == (("2-bit", "6-bit"), ("2-bit", "4-bit"))
    assert found["head"] == ("4-bit", "float")
    assert found["blocks.1.mlp.fc2"] == ("float", "4-bit")
    assert not any("pinned at 32" in reason for reason in result.refusals.values())
    loaded = deserialise(serialise(result))
    assert loaded.config == result.config
    assert torch.equal(loaded(images), result(images))


@torch.no_grad()
def test_the_ledger_says_which_sites_moved_with_another():
    """`q`, `k` share an activation, `turned` shares their folded norm; `other` shares nothing."""

    def function(m, x):
        y = m.norm(x)
        return m.q(y) + m.k(y) + m.turned(y.flip(2)) + m.other(x)

    parts = {name: nn.Linear(32, 32) for name in ("q", "k", "turned", "other")}
    calibration = Calibration(Toy(function, norm=nn.LayerNorm(32), **parts).eval(), IMAGES)
    result = calibration.quantize(kept(("other", 3), ("turned", "w6"), ("k", "a8"), fold_rows=1))
    assert widths(result) == {**dict.fromkeys(("q", "k", "turned"), ("8-bit", "6-bit")), "other": ("3-bit", "3-bit")}
    told = {row.site: row.left.partition(" (")[2] for row in result.ledger}
    assert told == {"q": "bits of k)", "k": "bits of turned)", "turned": "bits of k)", "other": ""}
    plain = calibration.quantize(kept(("q", "w6"), ("*", "w6"), fold_rows=1))
    assert not any("bits of" in row.left for row in plain.ledger)


@pytest.mark.parametrize(
    ("pattern", "bits", "told"),
    [
        ("blocks.0.mpl.fc1", 8, "no site's name matches 'blocks.0.mpl.fc1'; the closest are blocks.0.mlp.fc1"),
        ("head", "s4", "'s4' has no effect on 'head', because no site that"),
        ("*.qk", "w4i4", re.escape("'w4i4' has no effect on '*.qk', because no site that")),
    ],
)
def test_pins_without_an_effect_are_refused(calibration, pattern, bits, told):
    with pytest.raises(ValueError, match=told):
        calibration.quantize(kept(("patch_embed.*", 8), (pattern, bits)))


def test_a_model_without_attention_takes_pinned_bits_after_softmax():
    """As a part of a detector does, whose backbone has them."""
    model = Toy(lambda m, x: m.fc(x.flatten(1)), fc=nn.Linear(48, 3)).eval()
    result = Calibration(model, torch.randn(4, 3, 4, 4)).quantize(kept(("*", "s3")))
    assert widths(result) == {"fc": ("4-bit", "4-bit")}


# --- float operands --------------------------------------------------------------------------------------------------


def with_bits(bits, method="adalog", **changes):
    config = Config.preset(bits, method)
    search = Search(rounds=1, steps=1) if isinstance(config.search, Search) else ReleasedSearch(steps=1, rounds=1)
    return replace(config, images=4, search=search, **changes)


@pytest.mark.parametrize("method", ["adalog", "adalog-released", "uniform"])
@torch.no_grad()
def test_32_bits_are_the_float_model(calibration, tiny, images, method):
    result = calibration.quantize(with_bits("w32a32", method, input_bits=32))
    torch.testing.assert_close(result(images), tiny(images), rtol=1e-5, atol=1e-5)
    assert {(row.left, row.right, row.sqnr) for row in result.ledger} == {("float", "float", math.inf)}
    assert not result.program.quantizers
    assert not result.program.weights


@pytest.mark.parametrize("method", ["adalog", "adalog-released"])
@torch.no_grad()
def test_float_activations_leave_the_weights_alone_in_codes(calibration, tiny, images, method):
    result = calibration.quantize(with_bits("w4a32", method, input_bits=32, stages=()))
    assert not result.program.quantizers
    weights = {row.site: row.right for row in result.ledger if row.role in ("linear", "conv")}
    assert all(right.startswith("4-bit uniform x ") for right in weights.values())
    assert len(result.program.weights) == len(weights)
    assert {(row.left, row.right) for row in result.ledger if row.role in ("qk", "av")} == {("float", "float")}
    assert not any(why.startswith("stays float") for why in result.refusals.values())
    assert all("float activations" in why for why in result.refusals.values())  # no norm is folded
    # The program on its dequantized weights, by a model that never saw a quantizer.
    twin = copy.deepcopy(tiny)
    parameters = dict(twin.named_parameters())
    for name, weight in result.program.weights.items():
        assert parameters[name].shape == weight.codes.shape
        parameters[name].data = weight.dequantize()
    torch.testing.assert_close(result(images), twin(images), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@torch.no_grad()
def test_float_weights_are_those_of_the_model(calibration, tiny, images):
    result = calibration.quantize(with_bits("w32a4"))
    assert not result.program.weights
    assert all(row.right == "float" for row in result.ledger if row.role in ("linear", "conv"))
    assert all(row.left != "float" for row in result.ledger)
    finer = calibration.quantize(with_bits("w32a8"))
    assert decibels(finer(images), tiny(images)) > 20 + decibels(result(images), tiny(images))


@torch.no_grad()
def test_the_softmax_has_bits_of_its_own(calibration):
    rows = calibration.quantize(with_bits("w32a32s4")).ledger
    assert all(row.left.startswith("4-bit log") and row.right == "float" for row in rows if row.role == "av")
    assert all(row.left == row.right == "float" for row in rows if row.role in ("qk", "linear"))


# --- searches and what they found ------------------------------------------------------------------------------------


def values_of(side, values):
    """What a side of an assignment stands for: stored codes, or the nearest ones."""
    return side.dequantize().to(values) if isinstance(side, QuantizedTensor) else side.fake_quantize(values)


@torch.no_grad()
def test_the_error_of_what_was_found_is_that_of_the_products(calibration):
    """The mean square of each product of the float model minus the same product of fake-quantized operands."""
    for searched in calibration.search(with_bits("w4a4")):
        left, right = searched.product.left.values.double(), searched.product.right.values.double()
        hats = searched.assignment.left.fake_quantize(left), values_of(searched.assignment.right, right)
        error = (hats[0] @ hats[1].mT - left @ right.mT).square().mean().item()
        if searched.product.left.mask is None:
            assert searched.mean_square_error() == pytest.approx(error, rel=1e-3)
        noise = searched.mean_square_error()
        signal = (left @ right.mT).square().mean().item()
        assert searched.assignment.sqnr == pytest.approx(10 * math.log10(signal / noise), abs=0.01)


@pytest.mark.slow
@torch.no_grad()
def test_quantizers_are_judged_on_other_images(calibration, tiny, images):
    config = with_bits("w4a4")  # all rows count alike, since importance depends on the images and their order
    config = replace(config, search=replace(config.search, importance=0.0))
    found = calibration.search(config)
    other = Calibration(tiny, images.flip(0))
    same = [calibration.evaluate(site, config).mean_square_error() for site in found]
    assert same == [site.mean_square_error() for site in found]
    # The same images in another order; of a convolution's patches, that decides which quarter of them serves.
    shuffled = [other.evaluate(site, config) for site in found]
    for site, before in zip(shuffled, same, strict=True):
        if site.sites[0].role != "conv":
            assert site.mean_square_error() == pytest.approx(before, rel=1e-4)
            continue
        assert site.mean_square_error() == pytest.approx(before, rel=0.05)
        left, right = site.product.left.values.double(), site.product.right.values.double()
        hat = site.assignment.left.fake_quantize(left)
        mask = site.product.left.mask
        hat = hat if mask is None else torch.where(mask.bool(), hat, left)
        error = (hat @ values_of(site.assignment.right, right).mT - left @ right.mT).square().mean().item()
        assert site.mean_square_error() == pytest.approx(error, rel=1e-3)  # of the patches that do
    noise = Calibration(tiny, torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(9)))
    unseen = [noise.evaluate(site, config) for site in found]
    assert [site.assignment for site in unseen] == [site.assignment for site in found]
    assert all(one.mean_square_error() != site.mean_square_error() for one, site in zip(unseen, found, strict=True))


def test_a_norm_whose_linears_read_few_rows_is_not_folded(calibration):
    rows = {
        pair.norm.name: min(
            calibration.operand(site.left)[..., 0].numel() for site in calibration.sites if site.name in pair.sites
        )
        for pair in calibration.pairs
    }
    assert min(rows.values()) == 4  # the head reads one token of each image
    least = sorted(rows.values())[1]
    for fold_rows, count in ((1, 0), (4, 0), (5, 1), (least, 1), (10**6, len(rows))):
        refusals = calibration.quantize(with_bits("w4a4", fold_rows=fold_rows)).refusals.values()
        told = [why for why in refusals if f"rows in calibration; one scale per channel needs {fold_rows}" in why]
        assert len(told) == count
        assert all(why.startswith("not folded: ") for why in told)


# --- rare models ------------------------------------------------------------------------------------------------------


class Biased(nn.Module):
    """A linear without a bias, to which the module itself adds a tensor that it calls by one of the site's names."""

    def __init__(self, name):
        super().__init__()
        self.weight, self.name = nn.Parameter(torch.randn(8, 8)), name
        self.register_buffer(name, torch.randn(8) * 3)

    def forward(self, x):
        return F.linear(x, self.weight) + getattr(self, self.name)


@torch.no_grad()
@pytest.mark.parametrize("name", ["bias", "input", "shifted"])
def test_values_of_a_site_leave_alone_what_the_model_calls_so(name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(8), Biased(name), nn.GELU(), nn.Linear(8, 3)).eval()
    for config in (tokens_config(method="repq-vit"), tokens_config(stages=(Correction(images=8),))):
        quantized = adalog.quantize(model, TOKENS, config)
        assert decibels(quantized(TOKENS), model(TOKENS)) > 30
        assert torch.equal(quantized.compile("reference")(TOKENS), quantized.compile("reference")(TOKENS))


@torch.no_grad()
def test_parameters_that_are_put_out_stay_what_they_are():
    torch.manual_seed(0)
    model = Toy(
        lambda m, x: (m.fc(m.norm(x)), m.fc.weight, m.fc.bias, m.norm.weight), norm=nn.LayerNorm(8), fc=nn.Linear(8, 3)
    )
    found = adalog.quantize(model.eval(), TOKENS, tokens_config("w4a4", "repq-vit"))(TOKENS)
    for one, other in zip(found[1:], model(TOKENS)[1:], strict=True):
        assert torch.equal(one, other)


@torch.no_grad()
@pytest.mark.parametrize("method", ["ptq4vit", "apq-vit"])
def test_one_class_has_no_probabilities(method):
    torch.manual_seed(0)
    parts = {"norm": nn.LayerNorm(8), "up": nn.Linear(8, 16), "fc": nn.Linear(16, 1)}
    model = Toy(lambda m, x: m.fc(m.up(m.norm(x)).relu().mean(1)), **parts)
    quantized = adalog.quantize(model.eval(), TOKENS, tokens_config(method=method))
    assert decibels(quantized(TOKENS), model(TOKENS)) > 25


def test_gradients_pass_a_batch_norm():
    torch.manual_seed(0)
    parts = {"up": nn.Linear(8, 6), "norm": nn.BatchNorm1d(6), "fc": nn.Linear(6, 3)}
    model = Toy(lambda m, x: m.fc(F.gelu(m.norm(m.up(x).transpose(1, 2)))), **parts)
    adalog.quantize(model.eval(), TOKENS, tokens_config(method="ptq4vit"))


@torch.no_grad()
def test_a_left_operand_that_is_made_of_tensors_alone():
    torch.manual_seed(0)
    model = Toy(lambda m, x: m.fc((m.mix + m.mix.t()) @ x), fc=nn.Linear(8, 3))
    model.mix = nn.Parameter(torch.randn(6, 6))
    quantized = adalog.quantize(model.eval(), TOKENS, tokens_config())
    assert decibels(quantized(TOKENS), model(TOKENS)) > 25
    for executor in ("reference", "torch"):
        assert decibels(quantized.compile(executor)(TOKENS), model(TOKENS)) > 25


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # PyTorch's, of what it maps value by value
def test_a_quantized_model_is_mapped_and_traced():
    model = Toy(lambda m, x: m.fc(F.gelu(m.up(x))), up=nn.Linear(8, 8), fc=nn.Linear(8, 3)).eval()
    quantized = adalog.quantize(model, TOKENS, tokens_config("w4a4", "log2"))
    wanted = quantized(TOKENS)
    torch.testing.assert_close(torch.func.vmap(quantized)(TOKENS[:, None])[:, 0], wanted)


@torch.no_grad()
@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: m.fc(x @ x.mT @ x),
        lambda m, x: m.fc(x @ x.adjoint() @ x),
        lambda m, x: x @ m.fc.weight.T,
        lambda m, x: m.fc(x.swapaxes(1, 2).swapdims(1, 2)),
        lambda m, x: m.fc(x).clip(min=-1).clip(-3, 0.5).clip(m.low),
        lambda m, x: m.fc(x) * ((x[..., :3] > 0) & (x[..., :3] < 1) | (x[..., :3] > 2)),
        lambda m, x: m.fc(x / (x.var(-1, unbiased=False, keepdim=True) + 1).sqrt()),
        lambda m, x: m.fc(x / x.std(-1, keepdim=True) + x.var(1)[:, None]),
    ],
)
def test_other_spellings_of_operations(function):
    torch.manual_seed(0)
    model = Toy(function, fc=nn.Linear(8, 3)).eval()
    model.register_buffer("low", torch.tensor(-0.4))
    quantized = adalog.quantize(model, TOKENS, tokens_config())
    assert decibels(quantized(TOKENS), model(TOKENS)) > 20


def test_an_input_may_be_absent():
    class MaskedOrNot(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 4)

        def forward(self, mask, x):
            return self.linear(x if mask is None else x * mask)

    x = torch.randn(6, 16)
    found = adalog.quantize(MaskedOrNot().eval(), (None, x), replace(Config.preset("w8a8", "minmax"), images=4))
    assert len(found.ledger) == 1
    with pytest.raises(CalibrationError, match=r"calibration takes 7 images, got 6.*Config\(images=6\)"):
        adalog.quantize(MaskedOrNot().eval(), (None, x), replace(Config.preset("w8a8", "minmax"), images=7))


@pytest.mark.parametrize(
    "stages", [(Correction(images=4), Reconstruction(images=4, iterations=2)), (BlockRefinement(),)]
)
def test_inference_mode_around_it_changes_nothing(tiniest, images, stages):
    config = Config(images=4, search=Search(rounds=1, steps=0), stages=stages)
    found = []
    for mode in (True, False):
        with torch.inference_mode(mode):
            model = adalog.quantize(copy.deepcopy(tiniest), images + 0, config)
        found.append(model(images[:2]))
    assert torch.equal(*found)


def test_what_was_searched_in_inference_mode_serves_stages_outside(tiniest, images):
    config = Config(images=4, search=Search(rounds=1, steps=0))
    calibration = adalog.Calibration(tiniest, images)
    with torch.inference_mode():
        calibration.search(config)
        inside = calibration.quantize(config)
    calibration.quantize(replace(config, stages=(Reconstruction(images=4, iterations=2),)))
    assert not any(value.is_inference() for value in inside.quantized.program.tensors.values())


def test_arguments_of_other_types():
    with pytest.raises(ValueError, match="is not a Config"):
        adalog.quantize(nn.Linear(3, 3), torch.zeros(40, 3), "w4a4")
    for jobs in (0, 1.5):
        with pytest.raises(ValueError, match=f"jobs = {jobs} is not a whole number of at least 1"):
            adalog.quantize(nn.Linear(3, 3), torch.zeros(40, 3), jobs=jobs)
    for seed in ("0", 0.5, None, True, -1, 2**63):
        with pytest.raises(ValueError, match=rf"seed = {seed!r} is not a whole number from 0 to"):
            adalog.quantize(nn.Linear(3, 3), torch.zeros(40, 3), seed=seed)
    for memory in ("2GB", 2e9, 0):
        with pytest.raises(ValueError, match=rf"memory = {re.escape(repr(memory))} is not a number of bytes: give one"):
            adalog.quantize(nn.Linear(3, 3), torch.zeros(40, 3), memory=memory)
