"""Searches of scales, compared with slow oracles in float64 written from the papers."""

import math
from dataclasses import replace
from functools import partial
from itertools import combinations

import pytest
import torch
from torch.nn.functional import gelu

from adalog.baselines import (
    MaxKeptFormat,
    RangeSearch,
    ScaleSearch,
    SplitFormat,
    SplitUniformQuantizer,
    TwinFormat,
    TwinUniformQuantizer,
    scales,
)
from adalog.quantizers import FLOAT_BITS, UniformFormat
from adalog.search.operand import Operand
from adalog.search.product import Product
from problems import assert_close, pick, rounded
from strategies import normal


def symmetric_by_hand(x, s, bits):
    h = 2 ** (bits - 1)
    return s * rounded(x / s).clamp(-h, h - 1)


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


def in_turn(search, first, second, loss):
    """Both scales, each in turn the multiple of its start with the least loss(first, second) beside the other one."""
    s, t = first, second
    for _ in range(search.rounds):
        s = pick([first * m for m in multiples(search)], partial(loss, t=t))
        t = pick([second * m for m in multiples(search)], partial(loss, s))
    return s, t


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
    operands = Operand(x, UniformFormat(bits)), Operand(weight, UniformFormat(bits, own_dims=(0,)))
    by_gradient = weights if metric == "hessian" else None
    found = search.search_product(Product("linear", *operands, weights=by_gradient, row_splits=splits))

    output = x @ weight.T
    s = start(x, bits)
    rows = {group: start(weight[[g == group for g in groups]], bits) for group in set(groups)}
    first = {"x": s, **rows}
    for _ in range(search.rounds):
        x_hat = symmetric_by_hand(x, s, bits)
        for group in set(groups):
            where = torch.tensor([g == group for g in groups])

            def loss(scale, where=where, x_hat=x_hat):
                hat = x_hat @ symmetric_by_hand(weight[where], scale, bits).T
                return distance(output[:, where], hat, weights[:, where], search)

            rows[group] = pick([first[group] * m for m in multiples(search)], loss)
        w_hat = torch.stack(
            [symmetric_by_hand(row, rows[group], bits) for row, group in zip(weight, groups, strict=True)]
        )
        s = pick(
            [first["x"] * m for m in multiples(search)],
            lambda scale, w_hat=w_hat: distance(output, symmetric_by_hand(x, scale, bits) @ w_hat.T, weights, search),
        )
    assert_close(found.left.scale, [s])
    assert_close(found.right.scale, [rows[group] for group in groups])
    assert set(found.right.zero_point.flatten().tolist()) == {4.0}
    error = x @ weight.T - found.left.fake_quantize(x) @ found.right.fake_quantize(weight).T
    assert found.sqnr == pytest.approx(10 * math.log10(float(output.square().sum() / error.square().sum())))


@pytest.mark.parametrize("role", ["linear", "qk"])
def test_rounds_end_once_an_operand_stays_as_it_is(role, monkeypatch):
    """A hundred rounds find what the first few find: an operand is not searched twice beside the same other one."""
    beside, search = [], scales._ScaledQuantizers.search

    def counted(self, error, *rough):
        beside.append((error.operand, error.factor))
        return search(self, error, *rough)

    monkeypatch.setattr(scales._ScaledQuantizers, "search", counted)
    operands = Operand(normal(40, 12) * 2, UniformFormat(3)), Operand(normal(6, 12, seed=1), UniformFormat(3))
    choices = ScaleSearch(metric="squared", candidates=12, rounds=100)
    found = choices.search_product(Product(role, *operands))
    assert 2 < len(beside) < 12
    for (one, factor), (other, same) in combinations(beside, 2):
        assert one is not other or not torch.equal(factor, same)
    needed = replace(choices, rounds=-(-len(beside) // 2))
    shorter = needed.search_product(Product(role, *operands))
    assert torch.equal(shorter.left.scale, found.left.scale)
    assert torch.equal(shorter.right.scale, found.right.scale)


@pytest.mark.parametrize("metric", ["cosine", "hessian"])
def test_scales_of_queries_and_keys_by_head(metric):
    bits, q, k = 4, normal(2, 3, 7, 5), normal(2, 3, 7, 5, seed=1) * 3
    weights = normal(2, 3, 7, 7, seed=2).square()
    search = ScaleSearch(metric=metric, **FEW)
    form = UniformFormat(bits, own_dims=(1,))
    found = search.search_product(Product("qk", Operand(q, form), Operand(k, form), weights=weights))
    for head in range(3):
        a, b = q[:, head], k[:, head]

        def loss(s, t, a=a, b=b, head=head):
            hat = symmetric_by_hand(a, s, bits) @ symmetric_by_hand(b, t, bits).mT
            return distance(a @ b.mT, hat, weights[:, head], search)

        s, t = in_turn(search, start(a, bits), start(b, bits), loss)
        assert_close(found.left.scale[0, head], [s])
        assert_close(found.right.scale[0, head], [t])


def split_by_hand(x, sigma, bits, released):
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
    operands = Operand(scores, SplitFormat(bits)), Operand(value, UniformFormat(bits))
    found = search.search_product(Product("av", *operands, weights=weights))
    first = start(value, bits)
    output, t = scores @ value.mT, first
    sigmas = [2.0**-i for i in range(20)]

    def loss(sigma, value_hat):
        return distance(output, split_by_hand(scores, sigma, bits, released) @ value_hat.mT, weights, search)

    for _ in range(search.rounds):
        sigma = pick(sigmas, partial(loss, value_hat=value if released else symmetric_by_hand(value, t, bits)))
        hats = {first * m: symmetric_by_hand(value, first * m, bits) for m in multiples(search)}
        t = pick(list(hats), lambda t, sigma=sigma, hats=hats: loss(sigma, hats[t]))
    assert isinstance(found.left, SplitUniformQuantizer)
    assert_close(found.left.split, [sigma])
    assert_close(found.right.scale, [t])
    torch.testing.assert_close(found.left.fake_quantize(scores), split_by_hand(scores, sigma, bits, released))


def test_twin_scales_after_gelu():
    bits, x, weight = 4, gelu(normal(50, 8) * 2), normal(3, 8, seed=1)
    search, delta, h = ScaleSearch(metric="squared", **FEW), 0.16997, 2 ** (bits - 1)
    operands = (Operand(x, TwinFormat(bits, offset=delta)), Operand(weight, UniformFormat(bits, own_dims=(0,))))
    found = search.search_product(Product("linear", *operands, row_splits=torch.zeros(3, dtype=torch.int64)))

    def twin(s):
        return s * rounded(x / s).clamp(0, h - 1) + delta / h * rounded(x / (delta / h)).clamp(-h, 0)

    def loss(s, t):  # of the weight, which is searched first
        return float((x @ weight.T - twin(t) @ symmetric_by_hand(weight, s, bits).T).square().sum())

    t, s = in_turn(search, start(weight, bits), float(x.max()) / (h - 0.5), loss)
    assert isinstance(found.left, TwinUniformQuantizer)
    assert_close(found.left.scale, [s])
    assert_close(found.left.negative_scale, [delta / h])
    assert_close(found.right.scale, 3 * [t])


def test_the_largest_weights_of_attention_are_kept():
    """APQ-ViT: all 2^b codes from zero to the maximum, whatever the output's error."""
    scores, value = (normal(2, 9, 9) * 4).softmax(-1), normal(2, 4, 9, seed=1)
    operands = Operand(scores, MaxKeptFormat(3)), Operand(value, UniformFormat(3))
    found = ScaleSearch(metric="squared", **FEW).search_product(Product("av", *operands))
    assert_close(found.left.scale, [float(scores.max()) / 7])
    assert float(found.left.zero_point) == 0
    assert float(found.left.fake_quantize(scores).max()) == pytest.approx(float(scores.max()))


@pytest.mark.parametrize("search", [RangeSearch(), ScaleSearch(metric="squared", **FEW)])
def test_float_operands_stay(search):
    x, weight = normal(20, 4), normal(3, 4, seed=1)
    for bits in ((FLOAT_BITS, 4), (4, FLOAT_BITS), (FLOAT_BITS, FLOAT_BITS)):
        left, right = Operand(x, UniformFormat(bits[0])), Operand(weight, UniformFormat(bits[1], own_dims=(0,)))
        found = search.search_product(Product("linear", left, right))
        assert [side is None for side in (found.left, found.right)] == [width == FLOAT_BITS for width in bits]
    assert found.sqnr == math.inf


@pytest.mark.parametrize("metric", ["squared", "cosine", "hessian"])
def test_samples_leave_the_best_candidates(metric):
    """Of many rows, or images, some choose which candidates are scored on all."""
    x, weight = normal(1300, 8).float(), normal(6, 8, seed=1).float()
    form = UniformFormat(3, own_dims=(1,))
    q, k = normal(33, 2, 7, 5).float(), normal(33, 2, 7, 5, seed=1).float()
    for role, left, right, size in (
        ("linear", Operand(x, UniformFormat(3)), Operand(weight, UniformFormat(3, own_dims=(0,))), (1300, 6)),
        ("qk", Operand(q, form), Operand(k, form), (33, 2, 7, 7)),
    ):
        weights = normal(*size, seed=2).square().float() if metric == "hessian" else None
        product = Product(role, left, right, weights=weights)
        both = [ScaleSearch(metric=metric, rounds=1, rough_stride=stride).search_product(product) for stride in (1, 5)]
        assert both[1].sqnr == pytest.approx(both[0].sqnr, abs=0.2)  # [dB]; the cosine is not of the error alone
        torch.testing.assert_close(both[1].left.scale, both[0].left.scale, rtol=0.1, atol=0)


def test_a_zero_operand_keeps_finite_scales():
    zero = torch.zeros(6, 4)
    product = Product("linear", Operand(zero, UniformFormat(4)), Operand(zero[:3], UniformFormat(4, own_dims=(0,))))
    for search in (RangeSearch(), ScaleSearch(metric="cosine", **FEW)):
        found = search.search_product(product)
        for side in (found.left, found.right):
            assert bool((side.scale > 0).all())
            assert not side.fake_quantize(zero[:3]).any()


TIE_BITS = 3


def equal_rows(size, dtype=torch.float64):
    """x, and a weight whose rows hold one positive value each: whatever its scale, a row has the codes of one shape."""
    x = normal(size, 6) * 2 + 0.5
    weight = torch.tensor([[0.7], [3.1], [0.02], [1.0]], dtype=torch.float64).expand(-1, 6)
    return x.to(dtype), weight.to(dtype).contiguous()


def found_scales(x, weight, search, row_splits=None):
    operands = Operand(x, UniformFormat(TIE_BITS)), Operand(weight, UniformFormat(TIE_BITS, own_dims=(0,)))
    return search.search_product(Product("linear", *operands, row_splits=row_splits)).right.scale.flatten()


def least_squared_error(x, weight, search, labels):
    """The scale of each row, by the squared error alone, in float64; rows of one label share a scale.

    The input is at fault where two candidates, by their codes and scales, come within 1e-5 of each other.
    """
    x, weight = x.double(), weight.double()
    x_hat = symmetric_by_hand(x, start(x, TIE_BITS), TIE_BITS)
    expected = {}
    for label in set(labels):
        rows = weight[[other == label for other in labels]]
        first, tried = start(rows, TIE_BITS), []
        for m in multiples(search):
            error = x_hat @ symmetric_by_hand(rows, first * m, TIE_BITS).T - x @ rows.T
            tried.append((float(error.square().sum()), m))
        (least, best), (second, _) = sorted(tried)[:2]
        assert second > least * (1 + 1e-5), "the minimum is not unique by the margin"
        expected[label] = first * best
    return [expected[label] for label in labels]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("labels", [None, [0, 1, 0, 2]])
@pytest.mark.parametrize("size", [7, 1300])
def test_scales_with_equal_codes_go_to_the_least_squared_error(dtype, labels, size):
    """1,300 rows are sampled first: more candidates are equal than the sample may leave.

    Rows that share a scale have equal values here, else their codes would tell scales apart.
    """
    x, weight = equal_rows(size, dtype)
    if labels is not None:
        weight[2] = weight[0]
    search = ScaleSearch(metric="cosine", span=(0.5, 2.0), candidates=40, rounds=1)
    found = found_scales(x, weight, search, None if labels is None else torch.tensor(labels))
    expected = least_squared_error(x, weight, search, labels or [0, 1, 2, 3])
    assert found.tolist() == pytest.approx(expected, rel=1e-5)


def sums_of(output, hats):
    """What `by_cosine` takes: |O|^2, <O, e> and |e|^2, each output one group."""
    error = hats - output
    power, along, square = (value.double().sum(-1) for value in (output**2, error * output, error**2))
    return power, along, square


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lengths_are_no_directions(dtype):
    """Multiples of one output are a tie; an output whose direction is better by more than rounding wins over them."""
    output = normal(3, 500).to(dtype)
    hat = output + 0.1 * normal(3, 500, seed=1).to(dtype)
    lengths = (0.6, 1.9, 1.3, 0.95, 1.1)
    epsilon = torch.finfo(dtype).eps
    ties = torch.stack([length * hat for length in lengths])
    order = scales.by_cosine(*sums_of(output, ties), epsilon)
    nearest = sorted(range(5), key=lambda index: abs(lengths[index] - 0.99))  # 1 / (1 + 0.1**2), the best length
    assert order.T.tolist() == [nearest] * 3
    better = 1.7 * (output + 0.0999 * normal(3, 500, seed=1).to(dtype))  # its loss is less by the share 0.002
    assert scales.by_cosine(*sums_of(output, torch.cat([ties, better[None]])), epsilon)[0].tolist() == [5] * 3


def test_equal_candidates_stay_in_their_order():
    output = normal(2, 50)
    hats = torch.stack([output * 1.01, output * 1.01, output * 1.01])
    assert scales.by_cosine(*sums_of(output, hats), 2.0**-52).T.tolist() == [[0, 1, 2]] * 2


def test_an_output_that_rounds_to_zero_has_no_direction():
    """It has the loss 1, whatever is left of the sums: a good candidate wins, and a bad one loses."""
    size = 1e12
    power = torch.full((1,), size, dtype=torch.float64)
    along = size * torch.tensor([[-1.0 + 1e-9], [-0.1], [-1.5]], dtype=torch.float64)
    square = size * torch.tensor([[1.0 - 3e-9], [0.3], [2.5]], dtype=torch.float64)  # |O + e|^2: -1e-9, 1.1, 0.5
    assert scales.by_cosine(power, along, square, 2.0**-23).flatten().tolist() == [1, 0, 2]
    nothing = torch.zeros(3, 1, dtype=torch.float64)
    assert scales.by_cosine(nothing[0], nothing, square, 2.0**-23).flatten().tolist() == [1, 0, 2]
