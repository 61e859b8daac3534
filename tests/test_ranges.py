"""Searches by minimum, maximum and percentiles, compared with slow oracles in float64 written from the papers."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from adalog import Config
from adalog.baselines import RangeSearch, ranges
from adalog.config import power_law_format
from adalog.quantizers import Fold, UniformFormat, quantiles
from adalog.search.operand import Operand
from adalog.search.product import Product
from problems import assert_close, pick, rounded
from released_oracle import quantile
from strategies import normal


def asymmetric(x, low, high, bits):
    low, high, top = min(low, 0.0), max(high, 0.0), 2**bits - 1
    s = (high - low) / top
    z = min(max(round(-low / s), 0), top)
    return s, z, s * ((rounded(x / s) + z).clamp(0, top) - z)


def range_of(x, bits, shares):
    """(s, z) of the share whose mean squared error is least."""
    ranges = [asymmetric(x, quantile(x, 1 - share), quantile(x, share), bits) for share in shares]
    return pick(ranges, lambda found: float((x - found[2]).square().mean()))[:2]


def assert_range(quantizer, x, bits, shares=(1.0,)):
    s, z = range_of(x, bits, shares)
    assert_close(quantizer.scale, [s])
    assert_close(quantizer.zero_point, [z])


def linear(x, weight, bits):
    return Product("linear", Operand(x, UniformFormat(bits)), Operand(weight, UniformFormat(bits, own_dims=(0,))))


SHARES = [(1.0,), (0.9,), (0.999, 0.99, 0.9)]


@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_ranges_of_a_linear(shares, bits):
    x, weight = normal(60, 12) * 2 + 0.7, normal(5, 12, seed=1) ** 3
    found = RangeSearch(percentiles=shares).search_product(linear(x, weight, bits))
    assert_range(found.left, x, bits, shares)
    rows = [range_of(row, bits, shares) for row in weight]
    assert_close(found.right.scale, [s for s, _ in rows])
    assert_close(found.right.zero_point, [z for _, z in rows])
    assert found.right.scale.shape == (5, 1)


def test_the_shares_of_groups_are_their_own():
    """Outliers are clipped where they cost more than they are worth, in one channel and not in the other."""
    x = torch.stack([normal(2000), torch.cat([normal(1990, seed=1) / 50, torch.full((10,), 2.0)])], dim=1)
    search = RangeSearch(percentiles=(1.0, 0.99))
    operand = Operand(x, UniformFormat(3, own_dims=(1,)))
    found = ranges.own_range(operand, search)
    each = [range_of(x[:, channel], 3, search.percentiles) for channel in range(2)]
    assert_close(found.scale, [s for s, _ in each])
    whole = ranges.own_range(operand, RangeSearch())
    assert (found.scale < whole.scale).flatten().tolist() == [True, False]


@pytest.mark.parametrize("bits", [2, 4])
def test_symmetric_weights(bits):
    """FQ-ViT: the largest magnitude is at the end of 2 h codes about zero."""
    x, weight = normal(20, 8), normal(3, 8, seed=1)
    search = RangeSearch(symmetric_weights=True)
    found = search.search_product(linear(x, weight, bits))
    h = 2 ** (bits - 1)
    assert_close(found.right.scale, [float(row.abs().max()) / (h - 0.5) for row in weight])
    assert set(found.right.zero_point.flatten().tolist()) == {h}
    assert_range(found.left, x, bits)  # the other operand, and attention, are not symmetric
    attention = search.search_product(
        Product("qk", Operand(x[None], UniformFormat(bits)), Operand(weight[None], UniformFormat(bits)))
    )
    assert_range(attention.right, weight, bits)


def test_logarithms_scale_is_the_upper_end():
    """RepQ-ViT's log-sqrt2 among percentiles; FQ-ViT's log2 with the scale 1."""
    scores = (normal(2, 40, 40) * 3).softmax(-1)
    value = normal(2, 6, 40, seed=1)
    right = Operand(value, UniformFormat(4))
    choices = replace(Config.preset("w4a4", "repq-vit"), beyond="zero")
    form = power_law_format("log-sqrt2", 4, choices, 0.0)
    shares = (0.999, 0.99, 0.9)
    found = RangeSearch(percentiles=shares).search_product(Product("av", Operand(scores, form), right))

    def loss(s):
        code = rounded(-2 * (scores / s).log2())
        hat = torch.where(code > 15, 0.0, s * 2.0 ** (-code.clamp(0, 15) / 2))
        return float((hat - scores).square().mean())

    assert_close(found.left.scale, [pick([quantile(scores, share) for share in shares], loss)])
    assert (found.left.q, found.left.r, found.left.table) == (1, 2, False)
    log2 = replace(form, r=1)
    unit = RangeSearch(unit_softmax=True).search_product(Product("av", Operand(scores * 0.7, log2), right))
    assert float(unit.left.scale) == 1


def test_long_rows_have_the_same_percentiles(monkeypatch):
    x = normal(3, 101)
    expected = [[quantile(row, share) for row in x] for share in (0.0, 0.013, 0.5, 0.99, 1.0)]
    for limit in (1 << 24, 150, 50):
        monkeypatch.setattr(quantiles, "QUANTILE_LIMIT", limit)
        for found, values in zip(quantiles.quantiles(x, (0.0, 0.013, 0.5, 0.99, 1.0)), expected, strict=True):
            assert_close(found, values)
        assert torch.equal(torch.stack(quantiles.quantiles(x, (1.0, 0.0))), torch.stack([x.amax(1), x.amin(1)]))


@pytest.mark.parametrize("rounds", [True, False])
def test_channels_share_the_mean_scale(rounds):
    """RepQ-ViT, Eqs. 6-9: s' and z' are means, r = s / s', beta = s' (z' - z); the channels' codes are kept."""
    x = normal(64, 6) * torch.tensor([1.0, 2, 3, 0.5, 1, 4]) + torch.tensor([0.0, 1, -1, 0, 2, -3])
    search = RangeSearch(percentiles=(0.99, 0.9), share="mean", round_zero_point=rounds)
    fold, shared = search.fold_channels(x, 4, x[:2])
    each = [range_of(x[:, channel], 4, search.percentiles) for channel in range(6)]
    s = sum(s for s, _ in each) / 6
    z = sum(z for _, z in each) / 6
    z = round(z) if rounds else z
    assert_close(shared.scale, [s])
    assert_close(shared.zero_point, [z])
    assert_close(fold.ratio, [scale / s for scale, _ in each])
    assert_close(fold.beta, [s * (z - zero) for _, zero in each])
    own = torch.stack([(rounded(x[:, c] / a) + b).clamp(0, 15) for c, (a, b) in enumerate(each)], dim=1)
    if rounds:
        assert torch.equal(shared.quantize(x / fold.ratio - fold.beta), own)


def test_channels_are_powers_of_two_apart():
    """FQ-ViT's power-of-two factors, each of the least error; the fold is exact."""
    x = normal(64, 5) * torch.tensor([1.0, 0.3, 5.0, 0.01, 2.0])
    fold, shared = RangeSearch(share="power-of-two").fold_channels(x, 4, x[:2])
    ratio, beta = fold.ratio, fold.beta
    low, high = float(x.min()), float(x.max())
    s = (high - low) / 15 / 8
    z = round(-low / (8 * s))

    def loss(power, channel):
        scale = power * s
        return float((scale * ((rounded(channel / scale) + z).clamp(0, 15) - z) - channel).square().sum())

    powers = [1.0, 2.0, 4.0, 8.0]
    assert not rounded(x[:, 3] / s).any()  # all its losses are equal to the bit, and the first one is taken
    expected = [1.0 if c == 3 else pick(powers, partial(loss, channel=channel)) for c, channel in enumerate(x.T)]
    assert ratio.tolist() == expected
    assert len(set(expected)) > 2
    assert not beta.any()
    assert_close(shared.scale, [s])
    assert_close(shared.zero_point, [z])

    weight, bias = normal(3, 5, seed=1).float(), normal(3, seed=2).float()
    narrow = Fold(ratio.float(), beta.float())
    folded, same_bias = narrow.linear(weight, bias)
    gain, shift = narrow.norm(torch.ones(5), torch.zeros(5))
    assert torch.equal(folded / ratio.float(), weight)
    assert torch.equal(same_bias, bias)
    assert torch.equal(gain * ratio.float(), torch.ones(5))
    assert not shift.any()
