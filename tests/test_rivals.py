"""The rivals' searches against slow oracles, written from the papers, one group at a time in float64; whole models."""

import math
from dataclasses import replace
from functools import partial
from itertools import combinations

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu

import zoo
from adalog import Config
from adalog.choices import RangeSearch, ScaleSearch
from adalog.graph.capture import capture
from adalog.graph.sites import find_sites, find_splits
from adalog.quantizers import FLOAT_BITS, Fold, SplitUniformQuantizer, TwinUniformQuantizer
from adalog.search import quantiles, ranges, scales
from adalog.search.operand import Format, Operand
from adalog.search.product import Product
from strategies import normal

# --- the oracle ------------------------------------------------------------------------------------------------------


def rounded(value):
    """Halves to even."""
    return value.round()


def asymmetric(x, low, high, bits):
    low, high, top = min(low, 0.0), max(high, 0.0), 2**bits - 1
    s = (high - low) / top
    z = min(max(round(-low / s), 0), top)
    return s, z, s * ((rounded(x / s) + z).clamp(0, top) - z)


def symmetric(x, s, bits):
    h = 2 ** (bits - 1)
    return s * rounded(x / s).clamp(-h, h - 1)


def percentile(values, share):
    ordered = sorted(values.flatten().tolist())
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    return ordered[low] + (place - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])


MARGIN = 1e-9  # relative; sums of some thousand products in float64 differ by less than 1e-12 between processors


def pick(candidates, loss):
    """The candidate of the least loss. The test's input is at fault where another candidate comes within the margin."""
    losses = [loss(candidate) for candidate in candidates]
    least = min(losses)
    assert sum(other <= least * (1 + MARGIN) for other in losses) == 1, "the minimum is not unique by the margin"
    return candidates[losses.index(least)]


def range_of(x, bits, shares):
    """(s, z) of the share whose mean squared error is least."""
    ranges = [asymmetric(x, percentile(x, 1 - share), percentile(x, share), bits) for share in shares]
    return pick(ranges, lambda found: float((x - found[2]).square().mean()))[:2]


def close(found, expected):
    assert found.flatten().tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)


# --- ranges ----------------------------------------------------------------------------------------------------------

SHARES = [(1.0,), (0.9,), (0.999, 0.99, 0.9)]


@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_ranges_of_a_linear(shares, bits):
    x, weight = normal(60, 12) * 2 + 0.7, normal(5, 12, seed=1) ** 3
    search = RangeSearch(percentiles=shares)
    found = ranges.search_product(
        Product("linear", Operand(x, Format(bits)), Operand(weight, Format(bits, own_dims=(0,)))), search
    )
    s, z = range_of(x, bits, shares)
    close(found.left.scale, [s])
    close(found.left.zero_point, [z])
    rows = [range_of(row, bits, shares) for row in weight]
    close(found.right.scale, [s for s, _ in rows])
    close(found.right.zero_point, [z for _, z in rows])
    assert found.right.scale.shape == (5, 1)


def test_the_shares_of_groups_are_their_own():
    """Outliers are clipped where they cost more than they are worth, in one channel and not in the other."""
    x = torch.stack([normal(2000), torch.cat([normal(1990, seed=1) / 50, torch.full((10,), 2.0)])], dim=1)
    search = RangeSearch(percentiles=(1.0, 0.99))
    operand = Operand(x, Format(3, own_dims=(1,)))
    found = ranges.own_range(operand, search)
    each = [range_of(x[:, channel], 3, search.percentiles) for channel in range(2)]
    close(found.scale, [s for s, _ in each])
    whole = ranges.own_range(operand, RangeSearch())
    assert (found.scale < whole.scale).flatten().tolist() == [True, False]


def test_values_of_one_sign_have_ranges_that_hold_zero():
    found = ranges.own_range(Operand(normal(50).abs() + 3, Format(4)), RangeSearch())
    assert float(found.zero_point) == 0
    assert float(found.quantize(torch.zeros(1, dtype=torch.float64))) == 0


@pytest.mark.parametrize("bits", [2, 4])
def test_symmetric_weights(bits):
    """FQ-ViT: the largest magnitude is at the end of 2 h codes about zero."""
    x, weight = normal(20, 8), normal(3, 8, seed=1)
    search = RangeSearch(symmetric_weights=True)
    found = ranges.search_product(
        Product("linear", Operand(x, Format(bits)), Operand(weight, Format(bits, own_dims=(0,)))), search
    )
    h = 2 ** (bits - 1)
    close(found.right.scale, [float(row.abs().max()) / (h - 0.5) for row in weight])
    assert set(found.right.zero_point.flatten().tolist()) == {h}
    s, z = range_of(x, bits, (1.0,))  # the other operand, and attention, are not symmetric
    close(found.left.scale, [s])
    close(found.left.zero_point, [z])
    attention = ranges.search_product(
        Product("qk", Operand(x[None], Format(bits)), Operand(weight[None], Format(bits))), search
    )
    s, z = range_of(weight, bits, (1.0,))
    close(attention.right.scale, [s])
    close(attention.right.zero_point, [z])


def test_logarithms_scale_is_the_upper_end():
    """RepQ-ViT's log-sqrt2 among percentiles; FQ-ViT's log2 with the scale 1."""
    scores = (normal(2, 40, 40) * 3).softmax(-1)
    value = normal(2, 6, 40, seed=1)
    right = Operand(value, Format(4))
    choices = replace(Config.preset("w4a4", "repq-vit"), beyond="zero")
    form = Format.power_law("log-sqrt2", 4, choices, 0.0)
    shares = (0.999, 0.99, 0.9)
    found = ranges.search_product(Product("av", Operand(scores, form), right), RangeSearch(percentiles=shares))

    def loss(s):
        code = rounded(-2 * (scores / s).log2())
        hat = torch.where(code > 15, 0.0, s * 2.0 ** (-code.clamp(0, 15) / 2))
        return float((hat - scores).square().mean())

    close(found.left.scale, [pick([percentile(scores, share) for share in shares], loss)])
    assert (found.left.q, found.left.r, found.left.table) == (1, 2, False)
    log2 = replace(form, log2_base=(1, 1))
    unit = ranges.search_product(Product("av", Operand(scores * 0.7, log2), right), RangeSearch(unit_softmax=True))
    assert float(unit.left.scale) == 1


def test_long_rows_have_the_same_percentiles(monkeypatch):
    x = normal(3, 101)
    expected = [[percentile(row, share) for row in x] for share in (0.0, 0.013, 0.5, 0.99, 1.0)]
    for limit in (1 << 24, 150, 50):
        monkeypatch.setattr(quantiles, "QUANTILE_LIMIT", limit)
        for found, values in zip(quantiles.quantiles(x, (0.0, 0.013, 0.5, 0.99, 1.0)), expected, strict=True):
            close(found, values)
        assert torch.equal(torch.stack(quantiles.quantiles(x, (1.0, 0.0))), torch.stack([x.amax(1), x.amin(1)]))


# --- folds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [True, False])
def test_channels_share_the_mean_scale(rounds):
    """RepQ-ViT, Eqs. 6-9: s' and z' are means, r = s / s', beta = s' (z' - z); the channels' codes are kept."""
    x = normal(64, 6) * torch.tensor([1.0, 2, 3, 0.5, 1, 4]) + torch.tensor([0.0, 1, -1, 0, 2, -3])
    search = RangeSearch(percentiles=(0.99, 0.9), share="mean", round_zero_point=rounds)
    fold, shared = ranges.fold_channels(x, 4, search)
    ratio, beta = fold.ratio, fold.beta
    each = [range_of(x[:, channel], 4, search.percentiles) for channel in range(6)]
    s = sum(s for s, _ in each) / 6
    z = sum(z for _, z in each) / 6
    z = round(z) if rounds else z
    close(shared.scale, [s])
    close(shared.zero_point, [z])
    close(ratio, [scale / s for scale, _ in each])
    close(beta, [s * (z - zero) for _, zero in each])
    own = torch.stack([(rounded(x[:, c] / a) + b).clamp(0, 15) for c, (a, b) in enumerate(each)], dim=1)
    if rounds:
        assert torch.equal(shared.quantize(x / ratio - beta), own)


def test_channels_are_powers_of_two_apart():
    """FQ-ViT's power-of-two factors, each of the least error; the fold is exact."""
    x = normal(64, 5) * torch.tensor([1.0, 0.3, 5.0, 0.01, 2.0])
    fold, shared = ranges.fold_channels(x, 4, RangeSearch(share="power-of-two"))
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
    close(shared.scale, [s])
    close(shared.zero_point, [z])

    weight, bias = normal(3, 5, seed=1).float(), normal(3, seed=2).float()
    narrow = Fold(ratio.float(), beta.float())
    folded, same_bias = narrow.linear(weight, bias)
    gain, shift = narrow.norm(torch.ones(5), torch.zeros(5))
    assert torch.equal(folded / ratio.float(), weight)
    assert torch.equal(same_bias, bias)
    assert torch.equal(gain * ratio.float(), torch.ones(5))
    assert not shift.any()


# --- scales ----------------------------------------------------------------------------------------------------------

FEW = {"candidates": 12, "rounds": 2}


def multiples(search):
    low, high = search.span
    return [low + i * (high - low) / search.candidates for i in range(search.candidates)]


def distance(output, hat, weights, search):
    if search.metric == "cosine":
        length = float(output.square().sum().sqrt() * hat.square().sum().sqrt())
        return 1 - float((output * hat).sum()) / length if length else 1.0
    return float(((output - hat).square() * weights).sum())


def start(x, bits):
    return float(x.abs().max()) / (2 ** (bits - 1) - 0.5)


@pytest.mark.parametrize("metric", ["squared", "cosine", "hessian"])
@pytest.mark.parametrize("labels", [[0, 0, 0, 0], [0, 1, 0, 2], None])
def test_scales_of_a_linear(metric, labels):
    """The weight's scales with the input's at hand, then the input's, and again; rows of one part have one scale."""
    # The cosine of a row's output does not see its scale: rows are long, so that each candidate has codes of its own.
    bits, x, weight = 3, normal(40, 48) * 2, normal(4, 48, seed=1) * torch.tensor([[1.0], [3.0], [0.2], [1.0]])
    weights = normal(40, 4, seed=2).square() if metric == "hessian" else torch.ones(40, 4, dtype=torch.float64)
    search = ScaleSearch(metric=metric, **FEW)
    splits = None if labels is None else torch.tensor(labels)
    groups = labels or [0, 1, 2, 3]
    operands = Operand(x, Format(bits)), Operand(weight, Format(bits, own_dims=(0,)))
    by_gradient = weights if metric == "hessian" else None
    found = scales.search_product(Product("linear", *operands, weights=by_gradient, row_splits=splits), search)

    output = x @ weight.T
    s = start(x, bits)
    rows = {group: start(weight[[g == group for g in groups]], bits) for group in set(groups)}
    first = {"x": s, **rows}
    for _ in range(search.rounds):
        x_hat = symmetric(x, s, bits)
        for group in set(groups):
            where = torch.tensor([g == group for g in groups])

            def loss(scale, where=where, x_hat=x_hat):
                hat = x_hat @ symmetric(weight[where], scale, bits).T
                return distance(output[:, where], hat, weights[:, where], search)

            rows[group] = pick([first[group] * m for m in multiples(search)], loss)
        w_hat = torch.stack([symmetric(row, rows[group], bits) for row, group in zip(weight, groups, strict=True)])
        s = pick(
            [first["x"] * m for m in multiples(search)],
            lambda scale, w_hat=w_hat: distance(output, symmetric(x, scale, bits) @ w_hat.T, weights, search),
        )
    close(found.left.scale, [s])
    close(found.right.scale, [rows[group] for group in groups])
    assert set(found.right.zero_point.flatten().tolist()) == {4.0}
    error = x @ weight.T - found.left.fake_quantize(x) @ found.right.fake_quantize(weight).T
    assert found.sqnr == pytest.approx(10 * math.log10(float(output.square().sum() / error.square().sum())))


@pytest.mark.parametrize("role", ["linear", "qk"])
def test_rounds_end_once_an_operand_stays_as_it_is(role, monkeypatch):
    """A hundred rounds find what the first few find: an operand is not searched twice beside the same other one."""
    beside, search = [], scales._Scaled.search

    def counted(self, error, *rough):
        beside.append((error.operand, error.factor))
        return search(self, error, *rough)

    monkeypatch.setattr(scales._Scaled, "search", counted)
    operands = Operand(normal(40, 12) * 2, Format(3)), Operand(normal(6, 12, seed=1), Format(3, own_dims=()))
    choices = ScaleSearch(metric="squared", candidates=12, rounds=100)
    found = scales.search_product(Product(role, *operands), choices)
    assert 2 < len(beside) < 12
    for (one, factor), (other, same) in combinations(beside, 2):
        assert one is not other or not torch.equal(factor, same)
    needed = replace(choices, rounds=-(-len(beside) // 2))
    shorter = scales.search_product(Product(role, *operands), needed)
    assert torch.equal(shorter.left.scale, found.left.scale)
    assert torch.equal(shorter.right.scale, found.right.scale)


@pytest.mark.parametrize("metric", ["cosine", "hessian"])
def test_scales_of_queries_and_keys_by_head(metric):
    bits, q, k = 4, normal(2, 3, 7, 5), normal(2, 3, 7, 5, seed=1) * 3
    weights = normal(2, 3, 7, 7, seed=2).square()
    search = ScaleSearch(metric=metric, **FEW)
    form = Format(bits, own_dims=(1,))
    found = scales.search_product(Product("qk", Operand(q, form), Operand(k, form), weights=weights), search)
    for head in range(3):
        a, b, output = q[:, head], k[:, head], q[:, head] @ k[:, head].mT
        first, second = start(a, bits), start(b, bits)
        s, t = first, second
        for _ in range(search.rounds):

            def loss(s, t, a=a, b=b, output=output, head=head):
                hat = symmetric(a, s, bits) @ symmetric(b, t, bits).mT
                return distance(output, hat, weights[:, head], search)

            s = pick([first * m for m in multiples(search)], partial(loss, t=t))
            t = pick([second * m for m in multiples(search)], partial(loss, s))
        close(found.left.scale[0, head], [s])
        close(found.right.scale[0, head], [t])


def split(x, sigma, bits, released):
    """PTQ4ViT after softmax, one value at a time."""
    h = 2 ** (bits - 1)
    fine = sigma / (h - 1)
    if released:
        coarse = rounded(x.clamp(sigma, 1) * (h - 1)) / (h - 1)
        return coarse + fine * rounded(x.clamp(0, sigma) / fine)
    return torch.where(x < sigma, fine * rounded(x / fine), rounded(x * (h - 1)).clamp(max=h - 1) / (h - 1))


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 5])
def test_the_split_after_softmax(bits, released):
    scores, value = (normal(2, 2, 9, 9) * 2).softmax(-1), normal(2, 2, 4, 9, seed=1)
    weights = normal(2, 2, 9, 4, seed=2).square()
    search = ScaleSearch(released=released, **FEW)
    operands = Operand(scores, Format(bits, unit="split")), Operand(value, Format(bits))
    found = scales.search_product(Product("av", *operands, weights=weights), search)
    first = start(value, bits)
    output, t = scores @ value.mT, first
    sigmas = [2.0**-i for i in range(20)]
    for _ in range(search.rounds):
        seen = value if released else symmetric(value, t, bits)
        sigma = pick(
            sigmas,
            lambda s, seen=seen: distance(output, split(scores, s, bits, released) @ seen.mT, weights, search),
        )
        hat = split(scores, sigma, bits, released)
        t = pick(
            [first * m for m in multiples(search)],
            lambda t, hat=hat: distance(output, hat @ symmetric(value, t, bits).mT, weights, search),
        )
    assert isinstance(found.left, SplitUniformQuantizer)
    close(found.left.split, [sigma])
    close(found.right.scale, [t])
    torch.testing.assert_close(found.left.fake_quantize(scores), split(scores, sigma, bits, released))


def test_twin_scales_after_gelu():
    bits, x, weight = 4, gelu(normal(50, 8) * 2), normal(3, 8, seed=1)
    search = ScaleSearch(metric="squared", **FEW)
    delta = 0.16997
    operands = (
        Operand(x, Format(bits, one_scale=TwinUniformQuantizer, offset=delta)),
        Operand(weight, Format(bits, own_dims=(0,))),
    )
    product = Product("linear", *operands, row_splits=torch.zeros(3, dtype=torch.int64))
    found = scales.search_product(product, search)
    h = 2 ** (bits - 1)

    def twin(s):
        return s * rounded(x / s).clamp(0, h - 1) + delta / h * rounded(x / (delta / h)).clamp(-h, 0)

    first = float(x.max()) / (h - 0.5), start(weight, bits)
    s, t = first
    for _ in range(search.rounds):
        t = pick(
            [first[1] * m for m in multiples(search)],
            lambda t, s=s: float((x @ weight.T - twin(s) @ symmetric(weight, t, bits).T).square().sum()),
        )
        s = pick(
            [first[0] * m for m in multiples(search)],
            lambda s, t=t: float((x @ weight.T - twin(s) @ symmetric(weight, t, bits).T).square().sum()),
        )
    assert isinstance(found.left, TwinUniformQuantizer)
    close(found.left.scale, [s])
    close(found.left.negative_scale, [delta / h])
    close(found.right.scale, 3 * [t])


def test_the_largest_weights_of_attention_are_kept():
    """APQ-ViT: all 2^b codes from zero to the maximum, whatever the output's error."""
    scores, value = (normal(2, 9, 9) * 4).softmax(-1), normal(2, 4, 9, seed=1)
    operands = Operand(scores, Format(3, unit="max-kept")), Operand(value, Format(3))
    found = scales.search_product(Product("av", *operands), ScaleSearch(metric="squared", **FEW))
    close(found.left.scale, [float(scores.max()) / 7])
    assert float(found.left.zero_point) == 0
    assert float(found.left.fake_quantize(scores).max()) == pytest.approx(float(scores.max()))


@pytest.mark.parametrize("search", [RangeSearch(), ScaleSearch(metric="squared", **FEW)])
def test_float_operands_stay(search):
    x, weight = normal(20, 4), normal(3, 4, seed=1)
    find = (ranges if isinstance(search, RangeSearch) else scales).search_product
    for bits in ((FLOAT_BITS, 4), (4, FLOAT_BITS), (FLOAT_BITS, FLOAT_BITS)):
        left, right = Operand(x, Format(bits[0])), Operand(weight, Format(bits[1], own_dims=(0,)))
        found = find(Product("linear", left, right), search)
        assert [side is None for side in (found.left, found.right)] == [width == FLOAT_BITS for width in bits]
    assert found.sqnr == math.inf


@pytest.mark.parametrize("metric", ["squared", "cosine", "hessian"])
def test_samples_leave_the_best_candidates(metric):
    """Of many rows, or images, some choose which candidates are scored on all."""
    x, weight = normal(1300, 8).float(), normal(6, 8, seed=1).float()
    form = Format(3, own_dims=(1,))
    q, k = normal(33, 2, 7, 5).float(), normal(33, 2, 7, 5, seed=1).float()
    for role, left, right, size in (
        ("linear", Operand(x, Format(3)), Operand(weight, Format(3, own_dims=(0,))), (1300, 6)),
        ("qk", Operand(q, form), Operand(k, form), (33, 2, 7, 7)),
    ):
        weights = normal(*size, seed=2).square().float() if metric == "hessian" else None
        product = Product(role, left, right, weights=weights)
        both = [
            scales.search_product(product, ScaleSearch(metric=metric, rounds=1, rough_stride=stride))
            for stride in (1, 5)
        ]
        assert both[1].sqnr == pytest.approx(both[0].sqnr, abs=0.2)  # [dB]; the cosine is not of the error alone
        torch.testing.assert_close(both[1].left.scale, both[0].left.scale, rtol=0.1, atol=0)


def test_a_zero_operand_keeps_finite_scales():
    zero = torch.zeros(6, 4)
    product = Product("linear", Operand(zero, Format(4)), Operand(zero[:3], Format(4, own_dims=(0,))))
    for module, search in ((ranges, RangeSearch()), (scales, ScaleSearch(metric="cosine", **FEW))):
        found = module.search_product(product, search)
        for side in (found.left, found.right):
            assert bool((side.scale > 0).all())
            assert not side.fake_quantize(zero[:3]).any()


# --- parts of a linear -----------------------------------------------------------------------------------------------


def parts_of(model, images):
    program = capture(model.eval(), (images,))
    return find_splits(program, find_sites(program), [images])


def test_queries_keys_and_values_of_one_linear_are_three_parts():
    model = zoo.timm_vit(depth=1)
    parts = parts_of(model, zoo.IMAGES[:2])
    assert parts["blocks.0.attn.qkv"].tolist() == [0] * 48 + [1] * 48 + [2] * 48
    for name in ("blocks.0.attn.proj", "blocks.0.mlp.fc1", "blocks.0.mlp.fc2"):
        assert set(parts[name].tolist()) == {0}


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.both, self.out = nn.Linear(6, 8), nn.Linear(4, 3)

    def forward(self, x):
        parts = self.both(x).reshape(-1, 4, 2)
        return self.out(parts[..., 0] * torch.sigmoid(parts[..., 1]))


def test_interleaved_parts_are_told_apart():
    parts = parts_of(Gated(), torch.randn(2, 6))
    assert parts["both"].tolist() == [0, 1] * 4
    assert parts["out"].tolist() == [0, 0, 0]
