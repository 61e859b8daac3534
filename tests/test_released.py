"""The released code's search against slow oracles, written from a description of what that code computes."""

import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch.nn.functional import gelu

from adalog.baselines import ReleasedSearch, TwinUniformQuantizer, released
from adalog.config import Config, power_law_format
from adalog.quantizers import FLOAT_BITS, Fold, LogQuantizer, UniformFormat
from adalog.search.objective import ProductError
from adalog.search.operand import Operand
from adalog.search.product import Product
from problems import rounded
from released_oracle import (
    ACTIVATIONS,
    CONVS,
    DELTA,
    MATMULS,
    WEIGHTS,
    adalog,
    best_uniform,
    by_heads,
    by_rows,
    children,
    fc2_oracle,
    grid,
    heads_by_output,
    linear_oracle,
    quantile,
    square,
    start_of_heads,
    twin,
    uniform,
    weights_by_output,
    weights_by_own_error,
)
from strategies import normal

SEARCH = ReleasedSearch()
GRID_ALONE = ReleasedSearch(progressive=False)
SHORT = ReleasedSearch(steps=3, rounds=2)
searches = pytest.mark.parametrize("search", [SHORT, GRID_ALONE], ids=["fpcs", "alternating"])


def linear(bits):
    x = normal(40, 6, seed=1) * torch.tensor([1, 2, 0.5, 1, 3, 1], dtype=torch.float64) + 0.3
    return Operand(x, UniformFormat(bits)), Operand(normal(3, 6, seed=2), UniformFormat(bits, own_dims=(0,)))


def released_form(kind, bits, offset):
    return power_law_format(kind, bits, Config.preset("w4a4", "adalog-released"), offset)


def after_gelu(bits, kind="adalog"):
    weight = Operand(normal(3, 6, seed=4), UniformFormat(bits, own_dims=(0,)))
    return Operand(gelu(normal(40, 6, seed=3) * 2), released_form(kind, bits, DELTA)), weight


def queries(bits):
    spread = torch.tensor([0.3, 2.0], dtype=torch.float64).view(1, 2, 1, 1)
    form = UniformFormat(bits, own_dims=(1,))
    return Operand(normal(3, 2, 5, 4, seed=5) * spread, form), Operand(normal(3, 2, 5, 4, seed=6), form)


def after_softmax(bits, kind="adalog"):
    scores = Operand((normal(3, 2, 5, 5, seed=7) * 2).softmax(-1), released_form(kind, bits, 0.0))
    return scores, Operand(normal(3, 2, 4, 5, seed=8), UniformFormat(bits, own_dims=(1,)))


def assert_points(quantizer, points):
    assert quantizer.zero_point.flatten().tolist() == [z for _, z in points]
    assert quantizer.scale.flatten().tolist() == pytest.approx([s for s, _ in points], rel=1e-5)


def channels_of(values, bits, search):
    """(scale, zero_point) of the channels' own quantizers, each (C,), which a fold shares."""
    with mock.patch.object(Fold, "sharing", wraps=Fold.sharing) as sharing:
        fold, quantizer = search.fold_channels(values, bits, values[:2])
    assert quantizer is None
    ((scale, zero_point), _) = sharing.call_args
    expected = Fold.sharing(scale, zero_point)
    assert torch.equal(fold.ratio, expected.ratio)
    assert torch.equal(fold.beta, expected.beta)
    return scale, zero_point


@pytest.fixture
def scored(monkeypatch):
    """The candidates of every evaluation on the output's error, as they come."""
    seen, loss = [], ProductError.loss_of

    def recorded(self, errors, points):
        seen.append(points.clone())
        return loss(self, errors, points)

    monkeypatch.setattr(ProductError, "loss_of", recorded)
    return seen


def assert_candidates(points, wanted):
    """points: (128, 2, *groups); wanted: for each group, its pairs."""
    flat = points.double().reshape(len(points), 2, -1)
    assert flat.shape[2] == len(wanted)
    for group, pairs in enumerate(wanted):
        torch.testing.assert_close(flat[..., group], torch.tensor(pairs, dtype=torch.float64), rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("bits", WEIGHTS)
def test_grids_of_a_linear(scored, bits):
    left, right = linear(bits)
    replace(GRID_ALONE, rounds=1).search_product(Product("linear", left, right))
    weights, activations = scored
    assert_candidates(weights, [grid(row, bits, WEIGHTS[bits])[0] for row in right.values])
    assert_candidates(activations, [grid(left.values, bits, ACTIVATIONS[bits], 1e-4)[0]])


@pytest.mark.parametrize("bits", MATMULS)
def test_grids_of_a_product_of_activations(scored, bits):
    operands = queries(bits)
    replace(GRID_ALONE, rounds=1).search_product(Product("qk", *operands))
    for points, operand in zip(scored, operands, strict=True):  # left first
        assert_candidates(points, [grid(head, bits, MATMULS[bits], 1e-4)[0] for head in operand.values.unbind(1)])


@pytest.mark.parametrize("bits", CONVS)
def test_a_convolution_takes_a_float_image_and_searches_once(scored, bits):
    left, right = linear(bits)
    left = replace(left, format=UniformFormat(FLOAT_BITS))
    found = replace(SHORT, rounds=3).search_product(Product("conv", left, right))
    assert found.left is None
    assert len(scored) == SHORT.steps
    assert_candidates(scored[0], [grid(row, bits, CONVS[bits])[0] for row in right.values])
    assert_points(found.right, weights_by_output(right.values, left.values, left.values, bits, SHORT, CONVS))


def test_scales_of_activations_have_a_floor():
    left, right = linear(4)
    found = SHORT.search_product(Product("linear", replace(left, values=left.values * 1e-6), right))
    assert float(found.left.scale) == pytest.approx(1e-4, rel=1e-6)
    small = SHORT.search_product(Product("linear", left, replace(right, values=right.values * 1e-6)))
    assert float(small.right.scale.max()) < 1e-5


def test_quantiles_of_long_tensors_are_those_of_their_pieces(scored, monkeypatch):
    monkeypatch.setattr(released, "QUANTILE_LIMIT", 60)  # of 240 values: four pieces
    left, right = linear(4)
    replace(GRID_ALONE, rounds=1).search_product(Product("linear", left, right))
    pieces = left.values.flatten().split(60)
    q = [sum(quantile(piece, p) for piece in pieces) / 4 for p in (0, 0.1, 0.9, 1)]
    scales = scored[1][:, 0].double()
    assert float(scales[0]) == pytest.approx((q[2] - q[1]) / 15, rel=1e-5)
    assert float(scales[7]) == pytest.approx((q[3] - q[0]) / 15, rel=1e-5)
    assert float(scales[7]) < 0.99 * grid(left.values, 4, 16)[0][7][0]
    assert_candidates(scored[0], [grid(row, 4, 8)[0] for row in right.values])


def test_fpcs_refines_scales_alone_and_loses_its_parents(scored):
    """Each step's candidates from the last one's: no parent among them, and the spacing divided by 7.5 instead of 7."""
    left, right = linear(4)
    left = replace(left, format=UniformFormat(FLOAT_BITS))
    row, x = right.values[:1], left.values
    found = SEARCH.search_product(Product("linear", left, replace(right, values=row)))

    def loss(point):
        return square(x @ uniform(row[0], point, 4) - x @ row[0])

    points, spacing = grid(row[0], 4, WEIGHTS[4])
    assert len(scored) == 6
    best = []
    for step, seen in enumerate(scored):
        assert_candidates(seen, [points])
        best.append(min(map(loss, points)))
        parents = sorted(points, key=loss)[:16]
        points = children(parents, spacing, 8, 0.0)
        assert not {parent[0] for parent in parents} & {point[0] for point in points}
        assert spacing == pytest.approx((scored[0][1, 0, 0] - scored[0][0, 0, 0]).item() / 7.5**step, rel=1e-5)
        spacing /= 7.5
    assert float(found.right.scale) == pytest.approx(min(scored[5][..., 0].tolist(), key=loss)[0])
    winner = (float(found.right.scale), float(found.right.zero_point))
    assert loss(winner) == pytest.approx(best[-1], rel=1e-5)


@pytest.mark.parametrize(
    ("problem", "bits", "search"),
    [
        (linear, 3, SHORT),
        (linear, 3, GRID_ALONE),
        (lambda bits: after_gelu(bits, "uniform"), 4, SHORT),
        pytest.param(linear, 6, SEARCH, marks=pytest.mark.slow),
    ],
    ids=["fpcs", "alternating", "uniform after gelu", "in full"],
)
def test_linear(problem, bits, search):
    assert_linear(*problem(bits), bits, search)


def assert_linear(left, right, bits, search):
    found = search.search_product(Product("linear", left, right))
    point, rows = linear_oracle(left.values, right.values, bits, search)
    assert_points(found.left, [point])
    assert_points(found.right, rows)
    return found


def test_the_last_round_stands_even_if_an_earlier_one_was_better():
    left, right = linear(4)[0], replace(linear(4)[1], values=normal(3, 6, seed=57))
    second = SHORT.search_product(Product("linear", left, right))
    assert assert_linear(left, right, 4, replace(SHORT, rounds=3)).sqnr < second.sqnr


def test_a_weights_row_of_zeros_stays_zero():
    left, right = linear(4)
    values = right.values.clone()
    values[1] = 0
    found = SHORT.search_product(Product("linear", left, replace(right, values=values)))
    hat = found.right.fake_quantize(values)
    assert (found.right.scale > 0).all()
    assert not hat[1].any()
    assert hat.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "bits"), [("linear", 6), ("adalog", 4), ("log-sqrt2", 4), ("qk", 6), ("av", 4)])
def test_rough_losses_of_large_operands_end_at_no_worse_points(monkeypatch, kind, bits):
    generator = torch.Generator().manual_seed(bits)

    def noise(*shape):
        return torch.randn(shape, generator=generator) * torch.randn(shape[-1], generator=generator).exp()

    monkeypatch.setattr(released, "_MANY", 1 << 17)
    monkeypatch.setattr(released, "_ROWS", 1024)
    left = Operand(noise(1024, 128), UniformFormat(bits))
    right = Operand(noise(48, 128), UniformFormat(bits, own_dims=(0,)))
    if kind in ("adalog", "log-sqrt2"):
        left = Operand(gelu(left.values), released_form(kind, bits, DELTA))
    elif kind in ("qk", "av"):
        left, right = (Operand(noise(8, 2, 96, 96), UniformFormat(bits, own_dims=(1,))) for _ in range(2))
        if kind == "av":
            left = Operand(left.values.softmax(-1), released_form("adalog", bits, 0.0))
    role, search = "linear" if left.values.ndim == 2 else kind, replace(SHORT, rounds=1)
    rough = search.search_product(Product(role, left, right))
    monkeypatch.setattr(released, "_MANY", math.inf)
    exact = search.search_product(Product(role, left, right))
    assert rough.sqnr == pytest.approx(exact.sqnr, abs=0.005)  # 0.1 % of the error


def test_the_last_of_equal_points_wins():
    """Where all is zero every point is: the last zero point, and the scale at its floor."""
    scale, zero_point = channels_of(torch.zeros(20, 2), 4, GRID_ALONE)
    assert zero_point.tolist() == [15, 15]
    assert scale.tolist() == pytest.approx([1e-4, 1e-4])


def test_channels():
    values = normal(60, 4, seed=9) * torch.tensor([0.1, 1, 3, 10], dtype=torch.float64) + 1
    scale, zero_point = channels_of(values, 4, SHORT)
    for channel in range(4):
        x = values[:, channel]
        s, z = best_uniform(x, 4, 16, lambda point, x=x: square(uniform(x, point, 4) - x), SHORT, least=1e-4)
        assert float(scale[channel]) == pytest.approx(s, rel=1e-5)
        assert float(zero_point[channel]) == z


@searches
def test_queries_and_keys(scored, search):
    left, right = queries(4)
    found = search.search_product(Product("qk", left, right))
    q, k = left.values, right.values
    first, second = start_of_heads(q, 4), start_of_heads(k, 4)
    for _ in range(search.rounds):
        first = heads_by_output(q, k, by_heads(k, second, 4), 4, search)
        second = heads_by_output(k, q, by_heads(q, first, 4), 4, search)
    assert_points(found.left, first)
    assert_points(found.right, second)
    assert len(scored) == 2 * search.rounds * (search.steps if search.progressive else 1)


@pytest.mark.slow
@searches
def test_attention_and_values(search):
    left, right = after_softmax(4)
    found = search.search_product(Product("av", left, right))
    a, v = left.values, right.values
    second = start_of_heads(v, 4)
    for _ in range(search.rounds):
        v_hat = by_heads(v, second, 4)
        exact = a @ v.mT
        base = min(range(10, 138), key=lambda q, v_hat=v_hat: square(adalog(a, (1.0, q), 4) @ v_hat.mT - exact))
        second = heads_by_output(v, a, adalog(a, (1.0, base), 4), 4, search)
    assert isinstance(found.left, LogQuantizer)
    assert (float(found.left.scale), found.left.q) == (1.0, base)
    torch.testing.assert_close(found.left.fake_quantize(a), adalog(a, (1.0, base), 4), rtol=1e-6, atol=1e-12)
    assert_points(found.right, second)


@pytest.mark.parametrize(("kind", "base"), [("log2", (1, 1)), ("log-sqrt2", (1, 2))])
def test_fixed_bases_after_softmax_have_scale_one(kind, base):
    left, right = after_softmax(4, kind)
    found = SHORT.search_product(Product("av", left, right))
    assert (found.left.q, found.left.r) == base
    assert (float(found.left.scale), found.left.table) == (1.0, False)
    last, power = 15, base[0] / base[1]
    k = rounded(-left.values.clamp(1e-15, 1).log2() / power)
    hat = torch.where(k > last, 0.0, 2.0 ** (-k * power))
    torch.testing.assert_close(found.left.fake_quantize(left.values), hat)
    assert_points(found.right, heads_by_output(right.values, left.values, hat, 4, SHORT))


@pytest.mark.slow
@searches
@pytest.mark.parametrize("bits", [3, 6])
def test_fc2(bits, search):
    left, right = after_gelu(bits)
    found = search.search_product(Product("linear", left, right))
    (s, q), rows = fc2_oracle(left.values, right.values, bits, search)
    assert found.left.q == q
    assert float(found.left.scale) == pytest.approx(s, rel=1e-5)
    assert_points(found.right, rows)
    exact = adalog(left.values, (float(found.left.scale), q), bits, DELTA)
    torch.testing.assert_close(found.left.fake_quantize(left.values), exact, rtol=1e-6, atol=1e-9)


def test_fc2_keeps_8_of_the_bases_10_to_137_then_32_pairs(scored):
    replace(SEARCH, rounds=1).search_product(Product("linear", *after_gelu(4)))
    assert scored[0][:, 1].tolist() == list(range(10, 138))
    assert len(scored[0][:, 0].unique()) == 1
    bases = scored[1][:, 1].reshape(8, 16)
    assert torch.equal(bases, bases[:, :1].expand(-1, 16))
    assert len(bases[:, 0].unique()) == 8
    assert [len(points) for points in scored] == [128] * (7 + 6)  # and the weights
    steps = [points.reshape(32, 4, 2) for points in scored[2:7]]
    assert all(torch.equal(pairs[..., 1], pairs[:, :1, 1].expand(-1, 4)) for pairs in steps)
    widths = [float((pairs[:, 3, 0] - pairs[:, 0, 0]).max()) for pairs in steps]
    first = float(scored[1][1, 0] - scored[1][0, 0])
    assert widths == pytest.approx([first / 3.5**step for step in range(5)], rel=1e-4)


@pytest.mark.parametrize(
    ("kind", "base"), [("log2", (1, 1)), pytest.param("log-sqrt2", (1, 2), marks=pytest.mark.slow)]
)
def test_fixed_bases_after_gelu_copy_the_scale_of_adalog(kind, base):
    best = SHORT.search_product(Product("linear", *after_gelu(4)))
    left, right = after_gelu(4, kind)
    found = SHORT.search_product(Product("linear", left, right))
    assert (found.left.q, found.left.r, found.left.table) == (*base, False)
    assert torch.equal(found.left.scale, best.left.scale)
    assert torch.equal(found.right.scale, best.right.scale)
    assert torch.equal(found.right.zero_point, best.right.zero_point)
    assert found.sqnr < best.sqnr


@searches
def test_twin(scored, search):
    bits = 4
    left, right = after_gelu(bits, "twin")
    found = search.search_product(Product("linear", left, right))
    x, weight, h = left.values, right.values, 2 ** (bits - 1)
    rows = weights_by_own_error(weight, bits, search)
    powers = [DELTA / h * 2.0**i for i in range(-5, 24)]
    for _ in range(search.rounds):
        w_hat = by_rows(weight, rows, bits)
        positive = min(powers, key=lambda s, w_hat=w_hat: square(twin(x, s, bits) @ w_hat.T - x @ weight.T))
        rows = weights_by_output(weight, x, twin(x, positive, bits), bits, search)
    assert isinstance(found.left, TwinUniformQuantizer)
    assert float(found.left.scale) == pytest.approx(positive, rel=1e-6)
    assert float(found.left.negative_scale) == pytest.approx(DELTA / h, rel=1e-6)
    assert_points(found.right, rows)
    assert scored[0].flatten().tolist() == pytest.approx(powers, rel=1e-6)


def released_config(bits):
    return replace(Config.preset(bits, "adalog-released"), images=4, search=ReleasedSearch(steps=1, rounds=1))


@pytest.mark.slow
def test_the_image_is_float_and_the_heads_norm_is_not_folded(calibration, images):
    result = calibration.quantize(released_config("w4a4"))
    rows = {row.site: row for row in result.ledger}
    conv = next(row for row in result.ledger if row.role == "conv")
    assert (conv.left, conv.right) == ("float", "4-bit uniform x 8")
    assert all(row.left != "float" for row in result.ledger if row is not conv)
    assert [why for why in result.refusals.values() if "not folded" in why] == ["not folded: it belongs to the head"]
    assert sum("a zero beyond its codes" in row.left for row in rows.values()) == 4  # after softmax and GELU
    assert bool(torch.isfinite(result(images)).all())


@pytest.mark.slow
def test_unequal_bits_fold_nothing(calibration):
    config = released_config("w3a4")
    assert all(searched.assignment.fold is None for searched in calibration.search(config))
    folded = [searched.assignment.fold is not None for searched in calibration.search(released_config("w4a4"))]
    assert sum(folded) == 4
    refusals = calibration.quantize(config).refusals.values()
    assert sum("different bits" in why for why in refusals) >= 4


def test_a_fold_is_the_mean_of_the_channels(calibration):
    config = released_config("w4a4")
    searched = next(searched for searched in calibration.search(config) if searched.assignment.fold is not None)
    pair = next(pair for pair in calibration.pairs if searched.group.name in pair.sites)
    values = calibration.operand(pair.norm.name).flatten(0, -2)
    s, z = channels_of(values, 4, config.search)
    fold = searched.assignment.fold
    torch.testing.assert_close(fold.ratio, s / s.mean())
    torch.testing.assert_close(fold.beta, s.mean() * (z.mean().round() - z))
