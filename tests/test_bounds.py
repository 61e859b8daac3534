"""The search of bounds, bases and scales (`search.bounds`) on small random problems."""

import math
from dataclasses import replace

import pytest
import torch

import adalog.search.bounds
import adalog.search.objective
import adalog.search.operand
from adalog.config import Config
from adalog.quantizers import (
    FLOAT_BITS,
    LogQuantizer,
    QuantizedTensor,
    bounds_to_uniform,
    log_levels,
    uniform_fake_quantize,
)
from adalog.search.bounds import minimise, search_own
from adalog.search.operand import Format, Operand
from problems import (
    ONE_ROUND,
    SEARCH,
    SMALL,
    after_gelu,
    after_softmax,
    attention,
    error_of,
    every_problem,
    fixed_base,
    found_by,
    linear,
    many_rows,
    output_error,
    weight_of,
)
from strategies import R, normal


@pytest.fixture
def sampled(monkeypatch):
    """Samples of as few rows as the search says; the strides that were taken from now on."""
    monkeypatch.setattr(adalog.search.objective, "_ROUGH_ELEMENTS", 1)
    taken = []
    rows = adalog.search.objective.ProductError._rows

    def recorded(error, stride):
        taken.append(stride)
        return rows(error, stride)

    monkeypatch.setattr(adalog.search.objective.ProductError, "_rows", recorded)
    return taken


# --- products -------------------------------------------------------------------------------------------------


@every_problem
def test_error_never_rises_from_round_to_round(problem):
    left, right = problem()
    errors = [error_of(found_by(left, right, replace(SMALL, rounds=rounds)), left, right) for rounds in (1, 2, 3)]
    assert errors[1] <= errors[0] * (1 + 1e-12)
    assert errors[2] <= errors[1] * (1 + 1e-12)


@pytest.mark.parametrize("problem", [after_softmax, after_gelu])
def test_error_never_rises_however_rough_the_candidates(problem, monkeypatch):
    """Logarithmic candidates are approximate; what replaces an incumbent is judged exactly."""
    monkeypatch.setattr(adalog.search.operand, "_DROPPED_BITS", 22)  # one bit of mantissa left
    left, right = problem()
    errors = [error_of(found_by(left, right, replace(SMALL, rounds=rounds)), left, right) for rounds in (1, 2, 3)]
    assert errors[1] <= errors[0] * (1 + 1e-12)
    assert errors[2] <= errors[1] * (1 + 1e-12)


@pytest.mark.slow
@every_problem
@pytest.mark.parametrize("fast", [False, True], ids=["exact", "bfloat16"])
def test_error_never_rises_however_few_rows_are_looked_at(problem, fast, sampled, monkeypatch):
    """The winner of each search meets the incumbent on all rows, in full precision."""
    monkeypatch.setattr(adalog.search.objective, "multiplies_bfloat16", lambda _: fast)
    left, right = (replace(side, values=side.values.float()) for side in many_rows(problem))
    search = replace(SMALL, rough_rows=40)
    errors = [error_of(found_by(left, right, replace(search, rounds=rounds)), left, right) for rounds in (1, 2)]
    assert max(sampled) > 1
    assert errors[1] <= errors[0] * (1 + 1e-6)  # judged in float32


@every_problem
def test_a_search_of_samples_is_deterministic(problem, sampled, monkeypatch):
    monkeypatch.setattr(adalog.search.objective, "multiplies_bfloat16", lambda _: True)
    left, right = (replace(side, values=side.values.float()) for side in many_rows(problem))
    search = replace(SMALL, rough_rows=40, rounds=2)
    first, second = (found_by(left, right, search) for _ in range(2))
    assert max(sampled) > 1
    assert first.sqnr == second.sqnr
    assert torch.equal(first.left.scale, second.left.scale)
    assert torch.equal(weight_of(first).scale, weight_of(second).scale)
    assert torch.equal(weight_of(first).zero_point, weight_of(second).zero_point)


@pytest.mark.slow
@pytest.mark.parametrize("rough_rows", [0, pytest.param(10, marks=pytest.mark.slow)])
@pytest.mark.parametrize("problem", [linear, pytest.param(after_gelu, marks=pytest.mark.slow)])
@pytest.mark.parametrize("chunk", [pytest.param(16, marks=pytest.mark.slow), 50])
def test_a_weight_in_pieces_is_found_as_in_one(problem, rough_rows, chunk, monkeypatch):
    """Its rows are searched independently; in the second round they meet their own incumbents.

    Bounds that differ by a common shift, up to rounding, are two points but one quantizer.
    """
    left, right = problem()
    search = replace(SMALL, rough_rows=rough_rows, rounds=2)
    whole = found_by(left, right, search)
    pieces = []
    of = adalog.search.objective.ProductError.by_rows

    def recorded(error):
        pieces.append(len(of(error)))
        return of(error)

    monkeypatch.setattr(adalog.search.objective.ProductError, "by_rows", recorded)
    monkeypatch.setattr(adalog.search.objective, "chunk_elements", lambda _: chunk)
    found = found_by(left, right, search)
    assert max(pieces) == {16: 12, 50: 3}[chunk]
    torch.testing.assert_close(weight_of(found).scale, weight_of(whole).scale, rtol=1e-12, atol=0)
    assert torch.equal(weight_of(found).zero_point, weight_of(whole).zero_point)
    torch.testing.assert_close(found.left.scale, whole.left.scale, rtol=1e-12, atol=0)
    assert found.sqnr == pytest.approx(whole.sqnr, rel=1e-12)


def test_what_was_found_is_looked_for_nearby_where_rows_are_many(monkeypatch):
    left, right = linear()
    near = []
    minimise = adalog.search.bounds.minimise

    def recorded(*args, nearby=False):
        near.append(nearby)
        return minimise(*args, nearby=nearby)

    monkeypatch.setattr(adalog.search.bounds, "minimise", recorded)
    for rough_rows, expected in ((0, False), (63, True), (64, False)):
        near.clear()
        found_by(left, right, replace(SMALL, rough_rows=rough_rows, rounds=2))
        assert near[:5] == [False, False, False, expected, expected]  # left by its own error, right, left, right, left


@pytest.mark.parametrize("problem", [linear, after_gelu])
def test_looking_nearby_scores_33_points_and_loses_nothing(problem):
    left, _ = problem()
    target = search_own(left, SEARCH)
    sizes = []

    def loss(points):
        sizes.append(len(points))
        return (points - target).square().sum(1)

    low, high = left.box(SEARCH.reach)
    spacing = torch.stack([(high[0] - low[0]) / 15, (high[1] - low[1]) / 7]) / 2**4
    found = minimise(loss, left, SEARCH, target + 9 * spacing, nearby=True)
    assert sum(sizes) == 33
    assert bool(((found - target).abs() <= 0.5 * spacing + 1e-9).all())
    assert torch.equal(minimise(loss, left, SEARCH, target, nearby=True), target)


@every_problem
def test_a_round_that_changes_nothing_is_the_last(problem, monkeypatch):
    searches = []
    minimise = adalog.search.bounds.minimise

    def counted(*args, **options):
        searches.append(args[1])
        return minimise(*args, **options)

    monkeypatch.setattr(adalog.search.bounds, "minimise", counted)
    left, right = problem()
    found = found_by(left, right, replace(SMALL, rounds=40))
    assert 3 <= len(searches) < 80  # left by its own error, right, then both a round, or left alone in the last
    rounds = max(1, (len(searches) - 1) // 2)
    assert found.sqnr == found_by(left, right, replace(SMALL, rounds=rounds)).sqnr


@every_problem
def test_the_right_operand_is_first_searched_against_the_left_one_by_its_own_error(problem, monkeypatch):
    left, right = problem()
    seen = []
    of = adalog.search.bounds.ProductError.of

    def recorded(values, exact, hat, *rest):
        seen.append((values, hat))
        return of(values, exact, hat, *rest)

    monkeypatch.setattr(adalog.search.bounds.ProductError, "of", recorded)
    found_by(left, right, ONE_ROUND)
    start = left.quantizer(search_own(left, ONE_ROUND)).fake_quantize(left.values)
    assert seen[0][0] is right.values
    assert torch.equal(seen[0][1], start.transpose(-1, -2))
    assert seen[1][0] is left.values


def test_rounds_help():
    left, right = linear(3)
    errors = [error_of(found_by(left, right, replace(SMALL, rounds=rounds)), left, right) for rounds in (1, 3)]
    assert errors[1] < 0.995 * errors[0]


@every_problem
def test_sqnr_is_that_of_the_output(problem):
    left, right = problem()
    found = found_by(left, right, ONE_ROUND)
    hats = found.left.fake_quantize(left.values), right.quantized(found.right)
    noise, signal = output_error(left, right, *hats)
    assert found.sqnr == pytest.approx(10 * math.log10(signal / noise), abs=1e-6)


@pytest.mark.parametrize("problem", [linear, attention, after_softmax, after_gelu])
def test_more_bits_more_sqnr(problem):
    """About 6 dB a bit for uniform operands, less for logarithmic ones (none for those with a fixed base)."""
    sqnrs = [found_by(*problem(width), ONE_ROUND).sqnr for width in (2, 4, 6)]
    assert sqnrs[0] + 4 < sqnrs[1] < sqnrs[2] - 4


@every_problem
def test_search_is_deterministic_and_leaves_its_operands(problem):
    left, right = problem()
    before = left.values.clone(), right.values.clone()
    first, second = (found_by(left, right, ONE_ROUND) for _ in range(2))
    assert first.sqnr == second.sqnr
    assert torch.equal(first.left.scale, second.left.scale)
    assert torch.equal(weight_of(first).scale, weight_of(second).scale)
    assert torch.equal(left.values, before[0])
    assert torch.equal(right.values, before[1])


@pytest.mark.parametrize(
    ("problem", "left", "right"),
    [
        (linear, (1, 1), (12, 1)),
        (attention, (1, 3, 1, 1), (1, 3, 1, 1)),
        (after_softmax, (), (1, 2, 1, 1)),
        (after_gelu, (), (12, 1)),
    ],
)
def test_parameters_are_shaped_against_the_operands(problem, left, right):
    operands = problem()
    found = found_by(*operands, ONE_ROUND)
    assert found.left.scale.shape == left
    assert weight_of(found).scale.shape == weight_of(found).zero_point.shape == right
    for side, operand in zip((found.left, found.right), operands, strict=True):
        code = side.codes if isinstance(side, QuantizedTensor) else side.quantize(operand.values)
        assert code.shape == operand.values.shape
        assert code.min() >= 0
        assert code.max() < 16


def test_uniform_search_beats_min_and_max():
    """On Gaussian weights with outliers, the rest of the product being the same."""
    left, right = linear()
    found = found_by(left, right, SMALL)
    low, high = right.values.min(1, keepdim=True).values, right.values.max(1, keepdim=True).values
    widest = uniform_fake_quantize(right.values, *bounds_to_uniform(low, high, 4), 4)
    left_hat, output = found.left.fake_quantize(left.values), left.values @ right.values.T
    error, of_widest = ((left_hat @ hat.T - output).square().sum(0) for hat in (right.quantized(found.right), widest))
    assert error.sum() < 0.9 * of_widest.sum()
    assert error[::3].sum() < 0.8 * of_widest[::3].sum()  # where the outliers are


def test_search_is_no_worse_than_min_and_max_in_any_channel():
    """They are the corner of its first grid."""
    left, right = linear()
    left = replace(left, format=Format(FLOAT_BITS))
    found = found_by(left, right, ONE_ROUND)
    assert found.left is None
    low, high = right.values.min(1, keepdim=True).values, right.values.max(1, keepdim=True).values
    widest = uniform_fake_quantize(right.values, *bounds_to_uniform(low, high, 4), 4)
    error, of_widest = (
        ((hat - right.values) @ left.values.T).square().sum(1) for hat in (right.quantized(found.right), widest)
    )
    assert bool((error <= of_widest * (1 + 1e-9)).all())


@pytest.mark.parametrize(("base", "width"), [(8, 3), (20, 3), (74, 3), (8, 4), (20, 4), (37, 4)])
def test_log_search_finds_the_base_of_data_on_a_log_grid(base, width):
    code = torch.randint(0, 2**width - 1, (64, 16), generator=torch.Generator().manual_seed(0))
    code[0, 0] = 0
    values = 0.7 * log_levels(base, R, width, beyond="saturate")[code]
    left = Operand(values, Format(width, log2_base=(0, R)))
    right = Operand(normal(12, 16, seed=1), Format(8, own_dims=(0,)))
    found = found_by(left, right, replace(SEARCH, rounds=1))
    assert isinstance(found.left, LogQuantizer)
    assert abs(found.left.q - base) <= 1
    assert float(found.left.scale) == pytest.approx(0.7, rel=0.02)
    assert found.sqnr > 45  # as the 8-bit weight allows


def test_adalog_beats_fixed_bases_and_uniform_after_softmax():
    left, right = after_softmax(3)
    forms = {kind: Format.power_law(kind, 3, Config(), 0.0) for kind in ("uniform", "log2", "log-sqrt2", "adalog")}
    sqnr = {kind: found_by(replace(left, format=form), right, SMALL).sqnr for kind, form in forms.items()}
    assert sqnr["adalog"] > max(sqnr["uniform"], sqnr["log2"], sqnr["log-sqrt2"])


@pytest.mark.parametrize("strategy", ["fpcs", "alternating", "brute-force"])
def test_every_strategy_improves_on_the_widest_bounds(strategy):
    left, right = linear(3)
    left = replace(left, values=left.values[:10])
    found = found_by(left, right, replace(SMALL, strategy=strategy, rounds=2))
    low, high = right.box(0.4)
    scale, zero_point = (value[:, None] for value in bounds_to_uniform(low[0], high[1], 3))
    widest = uniform_fake_quantize(right.values, scale, zero_point, 3)
    assert (
        error_of(found, left, right) < 0.9 * output_error(left, right, found.left.fake_quantize(left.values), widest)[0]
    )


@pytest.mark.parametrize(
    "problem",
    [
        linear,
        after_softmax,
        *(pytest.param(each, marks=pytest.mark.slow) for each in (attention, after_gelu, fixed_base)),
    ],
)
def test_rough_steps_cost_little(problem, sampled):
    """On several times the tokens of the other tests; a sample of a dozen tokens would tell nothing."""
    left, right = many_rows(problem)
    exact = error_of(found_by(left, right, SEARCH), left, right)
    assert not sampled
    rough = error_of(found_by(left, right, replace(SEARCH, rough_rows=120)), left, right)
    assert max(sampled) > 1
    assert rough <= 1.05 * exact
