"""The search of bounds, bases and scales (`search.bounds`) on small random problems."""

import math
from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.nn.functional import gelu

import adalog.quantizers.log_format
import adalog.search.objective
from adalog.baselines import TwinFormat, TwinUniformQuantizer
from adalog.config import Config, power_law_format
from adalog.quantizers import (
    FLOAT_BITS,
    Assignment,
    LogFormat,
    LogQuantizer,
    QuantizedTensor,
    UniformFormat,
    UniformQuantizer,
    bounds_to_uniform,
    log_levels,
    log_thresholds,
    uniform_fake_quantize,
)
from adalog.search import bounds
from adalog.search.bounds import Search, best_ranges, minimise, search_own
from adalog.search.bounds import search_channels as search_stacked_channels
from adalog.search.forms import Sample
from adalog.search.objective import ProductError
from adalog.search.operand import Operand
from adalog.search.product import Product
from problems import (
    GELU_OFFSET,
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
    symmetric,
    weight_of,
)
from recorded import Operations
from strategies import R, bits, f64, normal, q


@pytest.fixture
def spy(monkeypatch):
    """A function that replaces another one by a mock that calls it, and returns the mock."""

    def replaced(owner, name):
        mock = Mock(wraps=getattr(owner, name))
        monkeypatch.setattr(owner, name, mock)
        return mock

    return replaced


@pytest.fixture
def strides(spy, monkeypatch):
    """A function that returns the strides of all samples until now. Samples are as small as the search allows."""
    monkeypatch.setattr(adalog.search.objective, "_ROUGH_ELEMENTS", 1)
    every = spy(Sample, "every")
    return lambda: [call.args[0] for call in every.call_args_list]


@every_problem
@pytest.mark.parametrize("dropped_bits", [13, 22])  # at 22, one bit of mantissa is left
def test_error_never_rises_however_rough_the_candidates(problem, dropped_bits, monkeypatch):
    """Logarithmic candidates are approximate; what replaces an incumbent is judged exactly."""
    monkeypatch.setattr(adalog.quantizers.log_format, "_DROPPED_BITS", dropped_bits)
    left, right = problem()
    errors = [error_of(found_by(left, right, replace(SMALL, rounds=rounds)), left, right) for rounds in (1, 2, 3)]
    assert errors[1] <= errors[0] * (1 + 1e-12)
    assert errors[2] <= errors[1] * (1 + 1e-12)


@every_problem
def test_products_are_searched_together_as_alone(problem):
    left, right = problem()
    products = [
        Product(
            "linear", replace(left, values=left.values * factor), replace(right, values=right.values.roll(index, 0))
        )
        for index, factor in enumerate((1.0, 0.3, 2.0))
    ]
    search = replace(SMALL, rounds=2, rough_rows=0)
    for one, other in zip(map(search.search_product, products), search.search_together(products), strict=True):
        assert other.sqnr == pytest.approx(one.sqnr, abs=1e-3)
        assert other.left.scale.shape == one.left.scale.shape
        assert weight_of(other).scale.shape == weight_of(one).scale.shape
        torch.testing.assert_close(other.left.scale, one.left.scale, rtol=1e-6, atol=0)


def sqnr_of(found, left, right):
    """The signal-to-noise ratio of the output [dB]. Padding stays zero."""
    noise, signal = output_error(left, right, left.fake_quantize(found.left), right.fake_quantize(found.right))
    return 10 * math.log10(signal / noise)


@every_problem
def test_a_stack_takes_as_many_operations_as_one_product(problem):
    """A search of 8 products launches hardly more kernels than a search of one."""
    computing = []
    for count in (1, 8):
        left, right = (Operand.stack([side] * count) for side in problem())
        with Operations() as operations:
            SMALL._points(left, right)
        computing.append(operations.computing.total())
    assert computing[1] <= 1.05 * computing[0]


@pytest.mark.slow
@every_problem
@pytest.mark.parametrize("fast", [False, True], ids=["exact", "bfloat16"])
def test_error_never_rises_however_few_rows_are_looked_at(problem, fast, strides, monkeypatch):
    """The winner of each search meets the incumbent on all rows, in full precision."""
    monkeypatch.setattr(adalog.search.forms, "multiplies_bfloat16", lambda _: fast)
    left, right = (replace(side, values=side.values.float()) for side in many_rows(problem))
    search = replace(SMALL, rough_rows=40)
    errors = [error_of(found_by(left, right, replace(search, rounds=rounds)), left, right) for rounds in (1, 2)]
    assert max(strides()) > 1
    assert errors[1] <= errors[0] * (1 + 1e-6)  # judged in float32


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chunk", "problem", "rough_rows"),
    [(50, linear, 0), (50, linear, 10), (50, after_gelu, 0), (50, after_gelu, 10), (16, linear, 10)],
)
def test_a_weight_in_pieces_is_found_as_in_one(problem, rough_rows, chunk, monkeypatch):
    """Its rows are searched independently; in the second round they meet their own incumbents.

    Bounds that differ by a common shift, up to rounding, are two points but one quantizer.
    """
    left, right = problem()
    search = replace(SMALL, rough_rows=rough_rows, rounds=2)
    whole, by_rows = found_by(left, right, search), ProductError.by_rows
    pieces = []

    def recorded(error):
        pieces.append(len(by_rows(error)))
        return by_rows(error)

    monkeypatch.setattr(ProductError, "by_rows", recorded)
    monkeypatch.setattr(adalog.search.objective, "chunk_elements", lambda _: chunk)
    found = found_by(left, right, search)
    assert max(pieces) == {16: 12, 50: 3}[chunk]
    torch.testing.assert_close(weight_of(found).scale, weight_of(whole).scale, rtol=1e-12, atol=0)
    assert torch.equal(weight_of(found).zero_point, weight_of(whole).zero_point)
    torch.testing.assert_close(found.left.scale, whole.left.scale, rtol=1e-12, atol=0)
    assert found.sqnr == pytest.approx(whole.sqnr, rel=1e-12)


def test_what_was_found_is_looked_for_nearby_where_rows_are_many(spy):
    left, right = linear()
    minimise = spy(bounds, "minimise")
    for rough_rows, expected in ((0, False), (63, True), (64, False)):
        minimise.reset_mock()
        found_by(left, right, replace(SMALL, rough_rows=rough_rows, rounds=2))
        near = [call.kwargs.get("nearby", False) for call in minimise.call_args_list]
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
def test_a_round_that_changes_nothing_is_the_last(problem, spy):
    minimise = spy(bounds, "minimise")
    left, right = problem()
    found = found_by(left, right, replace(SMALL, rounds=40))
    searches = minimise.call_count
    assert 3 <= searches < 80  # left by its own error, right, then both a round, or left alone in the last
    assert found.sqnr == found_by(left, right, replace(SMALL, rounds=max(1, (searches - 1) // 2))).sqnr


@every_problem
def test_the_right_operand_is_first_searched_against_the_left_one_by_its_own_error(problem, spy):
    left, right = problem()
    error_of_product = spy(ProductError, "of")
    found_by(left, right, ONE_ROUND)
    start = left.quantizer(search_own(left, ONE_ROUND)).fake_quantize(left.values)
    (values, _, hat, *_), (second, *_) = (call.args for call in error_of_product.call_args_list[:2])
    assert values is right.values
    assert torch.equal(hat, start.transpose(-1, -2))
    assert second is left.values


def test_a_weight_is_searched_once_if_the_activation_stays_float(spy):
    left, right = linear()
    searched = spy(bounds, "_search_operand")
    assert found_by(replace(left, format=UniformFormat(32)), right, replace(SMALL, rounds=3)).left is None
    assert [call.args[0].values is right.values for call in searched.call_args_list] == [True]


def test_rounds_help():
    left, right = linear(3)
    errors = [error_of(found_by(left, right, replace(SMALL, rounds=rounds)), left, right) for rounds in (1, 3)]
    assert errors[1] < 0.995 * errors[0]


@pytest.mark.parametrize("problem", [linear, attention, after_softmax, after_gelu])
def test_more_bits_more_sqnr(problem):
    """About 6 dB a bit for uniform operands, less for logarithmic ones (none for those with a fixed base)."""
    sqnrs = [found_by(*problem(width), ONE_ROUND).sqnr for width in (2, 4, 6)]
    assert sqnrs[0] + 4 < sqnrs[1] < sqnrs[2] - 4


@every_problem
@pytest.mark.parametrize("rough_rows", [0, 40])
def test_search_is_deterministic_and_leaves_its_operands(problem, rough_rows, strides, monkeypatch):
    monkeypatch.setattr(adalog.search.forms, "multiplies_bfloat16", lambda _: True)
    left, right = (replace(side, values=side.values.float()) for side in many_rows(problem))
    before = left.values.clone(), right.values.clone()
    search = replace(SMALL, rough_rows=rough_rows, rounds=2)
    first, second = (found_by(left, right, search) for _ in range(2))
    assert (max(strides(), default=1) > 1) == (rough_rows > 0)
    assert first.sqnr == second.sqnr
    assert torch.equal(first.left.scale, second.left.scale)
    assert torch.equal(weight_of(first).scale, weight_of(second).scale)
    assert torch.equal(weight_of(first).zero_point, weight_of(second).zero_point)
    assert all(map(torch.equal, (left.values, right.values), before))


@pytest.mark.parametrize(
    ("problem", "left", "right"),
    [
        (linear, (1, 1), (12, 1)),
        (attention, (1, 3, 1, 1), (1, 3, 1, 1)),
        (after_softmax, (), (1, 2, 1, 1)),
        (after_gelu, (), (12, 1)),
        (fixed_base, (), (1, 2, 1, 1)),
        (symmetric, (1, 1), (12, 1)),
    ],
)
def test_parameters_are_shaped_against_the_operands(problem, left, right):
    """The SQNR is that of the output."""
    operands = problem()
    found = found_by(*operands, ONE_ROUND)
    assert found.left.scale.shape == left
    assert weight_of(found).scale.shape == weight_of(found).zero_point.shape == right
    for side, operand in zip((found.left, found.right), operands, strict=True):
        code = side.codes if isinstance(side, QuantizedTensor) else side.quantize(operand.values)
        assert code.shape == operand.values.shape
        assert code.min() >= 0
        assert code.max() < 16
    assert found.sqnr == pytest.approx(sqnr_of(found, *operands), abs=1e-6)


def between_the_extremes(values):
    """Each row quantized to 4 bits between its least and its largest value."""
    low, high = values.min(1, keepdim=True).values, values.max(1, keepdim=True).values
    return uniform_fake_quantize(values, *bounds_to_uniform(low, high, 4), 4)


def test_uniform_search_beats_min_and_max():
    """On Gaussian weights with outliers, the rest of the product being the same."""
    left, right = linear()
    found, widest = found_by(left, right, SMALL), between_the_extremes(right.values)
    left_hat, output = found.left.fake_quantize(left.values), left.values @ right.values.T
    error, of_widest = (
        (left_hat @ hat.T - output).square().sum(0) for hat in (right.fake_quantize(found.right), widest)
    )
    assert error.sum() < 0.9 * of_widest.sum()
    assert error[::3].sum() < 0.8 * of_widest[::3].sum()  # where the outliers are


def test_search_is_no_worse_than_min_and_max_in_any_channel():
    """They are the corner of its first grid."""
    left, right = linear()
    left = replace(left, format=UniformFormat(FLOAT_BITS))
    found = found_by(left, right, ONE_ROUND)
    assert found.left is None
    hats = right.fake_quantize(found.right), between_the_extremes(right.values)
    error, of_widest = (((hat - right.values) @ left.values.T).square().sum(1) for hat in hats)
    assert bool((error <= of_widest * (1 + 1e-9)).all())


@pytest.mark.parametrize(("base", "width"), [(8, 3), (20, 3), (74, 3), (8, 4), (20, 4), (37, 4)])
def test_log_search_finds_the_base_of_data_on_a_log_grid(base, width):
    code = torch.randint(0, 2**width - 1, (64, 16), generator=torch.Generator().manual_seed(0))
    code[0, 0] = 0
    values = 0.7 * log_levels(base, R, width, beyond="saturate")[code]
    left = Operand(values, LogFormat(width, r=R))
    right = Operand(normal(12, 16, seed=1), UniformFormat(8, own_dims=(0,)))
    found = found_by(left, right, replace(SEARCH, rounds=1))
    assert isinstance(found.left, LogQuantizer)
    assert abs(found.left.q - base) <= 1
    assert float(found.left.scale) == pytest.approx(0.7, rel=0.02)
    assert found.sqnr > 45  # as the 8-bit weight allows


def test_adalog_beats_fixed_bases_and_uniform_after_softmax():
    left, right = after_softmax(3)
    forms = {kind: power_law_format(kind, 3, Config(), 0.0) for kind in ("uniform", "log2", "log-sqrt2", "adalog")}
    sqnr = {kind: found_by(replace(left, format=form), right, SMALL).sqnr for kind, form in forms.items()}
    assert sqnr["adalog"] > max(sqnr["uniform"], sqnr["log2"], sqnr["log-sqrt2"])


@pytest.mark.parametrize("strategy", ["fpcs", "alternating", "brute-force"])
def test_every_strategy_improves_on_the_widest_bounds(strategy):
    left, right = linear(3)
    left = replace(left, values=left.values[:10])
    found = found_by(left, right, replace(SMALL, strategy=strategy, rounds=2))
    low, high = right.box(0.4)
    widest = right.fake_quantize_at(torch.stack([low[0], high[1]]))
    left_hat = left.fake_quantize(found.left)
    assert error_of(found, left, right) < 0.9 * output_error(left, right, left_hat, widest)[0]


slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize("problem", [linear, after_softmax, slow(attention), slow(after_gelu), slow(fixed_base)])
def test_rough_steps_cost_little(problem, strides):
    """On several times the tokens of the other tests; a sample of a dozen tokens would tell nothing."""
    left, right = many_rows(problem)
    exact = error_of(found_by(left, right, SEARCH), left, right)
    assert not strides()
    rough = error_of(found_by(left, right, replace(SEARCH, rough_rows=120)), left, right)
    assert max(strides()) > 1
    assert rough <= 1.05 * exact


def padded(form):
    """Patches of which a third is zero padding, and kernels."""
    mask = (torch.arange(16) % 3 > 0).double().expand(64, 16)
    values = gelu(normal(64, 16, seed=1) * 2) * mask
    return Operand(values, form, mask), Operand(normal(12, 16, seed=2), UniformFormat(6, own_dims=(0,)))


@pytest.mark.parametrize("form", [LogFormat(4, r=R, offset=GELU_OFFSET), UniformFormat(4)], ids=["log", "uniform"])
def test_padding_stays_zero(form):
    left, right = padded(form)
    found = found_by(left, right, SMALL)
    hat = torch.where(left.mask.bool(), found.left.fake_quantize(left.values), 0.0)
    assert torch.equal(left.fake_quantize(found.left), hat)
    assert found.sqnr == pytest.approx(sqnr_of(found, left, right), abs=1e-6)


def test_padding_is_no_noise_to_the_search():
    """Zero is no level of a quantizer with an offset, so padding that counts drives the search elsewhere."""
    left, right = padded(LogFormat(3, r=R, offset=GELU_OFFSET))
    masked, counted = (found_by(operand, right, SMALL) for operand in (left, replace(left, mask=None)))
    assert error_of(masked, left, right) < error_of(counted, left, right)


@pytest.mark.slow
@pytest.mark.parametrize("problem", [after_softmax, after_gelu])
@pytest.mark.parametrize("rounding", ["log", "nearest"])
@pytest.mark.parametrize("beyond", ["saturate", pytest.param("zero-coded", marks=pytest.mark.slow)])
@given(bits, q, st.floats(0.05, 1.3), st.floats(0, 3))
@example(4, 2, 1.0, 2.0)
def test_log_candidates_are_their_quantizers_but_at_thresholds(problem, rounding, beyond, bits, q, reach, more):
    operand = problem(bits)[0]
    offset = operand.format.offset + more
    operand = replace(operand, format=replace(operand.format, rounding=rounding, beyond=beyond, offset=offset))
    lifted = operand.values + offset
    scale = float(lifted.max()) * reach
    point = torch.tensor([math.log2(q), scale], dtype=torch.float64)
    exact = operand.quantizer(point).fake_quantize(operand.values) - operand.values
    errors, dtype = operand.format.errors(operand.values), operand.values.dtype
    fast = errors(point[None], dtype)[0]
    two = torch.stack([point, point + torch.tensor([0.5, 0.1])])
    assert torch.equal(errors(two, dtype)[0], fast)  # whatever is asked along with it
    cuts = log_thresholds(q, R, bits, beyond=beyond, rounding=rounding) * scale
    near = ((lifted[..., None] / cuts - 1).abs() < 1e-3).any(-1)
    same = (exact - fast).abs() <= 1e-12 + 1e-6 * (exact + operand.values).abs()
    assert bool((same | near | (lifted < lifted.max() * 2.0**-19)).all())
    if float(near.double().mean()) < 0.002:  # many, where an offset puts all of what is nearly zero at one threshold
        error, fast_error = (each.square().sum() for each in (exact, fast))
        assert float(fast_error) == pytest.approx(float(error), rel=0.02)


@pytest.mark.parametrize(
    ("kind", "base", "table"), [("log2", (1, 1), False), ("log-sqrt2", (1, 2), False), ("adalog", (0, 41), True)]
)
def test_power_law_formats(kind, base, table):
    config = Config(r=41, q_min=3, q_max=99, beyond="saturate", rounding="log")
    assert power_law_format("uniform", 3, config, 0.17) == UniformFormat(3)
    expected = LogFormat(3, (), base[1], base[0], 3, 99, table, "saturate", "log", 0.17)
    assert power_law_format(kind, 3, config, 0.17) == expected


@pytest.mark.parametrize(
    ("q_min", "q_max", "exponent", "expected"),
    [(1, 137, -0.4, 1), (1, 137, 0, 1), (1, 137, 5, 32), (1, 137, 7.5, 137), (1, 20, 5, 20), (10, 137, 3, 10)],
)
def test_bases_stay_in_their_range(q_min, q_max, exponent, expected):
    """A search refines log2 q, a little beyond the box as well."""
    operand = Operand(torch.ones(2, 2), LogFormat(4, r=R, q_min=q_min, q_max=q_max))
    assert operand.quantizer(torch.tensor([exponent, 1.0])).q == expected


OWN, DEVIATIONS = (replace(SEARCH, fold_ranges=ranges) for ranges in ("own", "deviations"))


def search_channels(values, width, search):
    """The scales and zero points of one norm, (C,) each."""
    scale, zero_point = search_stacked_channels(values[None], width, search)
    return scale[0], zero_point[0]


def channels():
    """A LayerNorm's output: channels of different width and place, with outliers, and one that never moves."""
    values = normal(300, 6, seed=1) * torch.tensor([0.1, 1, 3, 10, 1, 0]) + torch.tensor([0.0, 2, -3, 20, 0, 0])
    values[::50, 4] *= 8
    return values


@pytest.mark.parametrize("width", [3, 4])
def test_search_channels_is_no_worse_than_min_and_max(width):
    values = channels()
    scale, zero_point = search_channels(values, width, OWN)
    assert scale.shape == zero_point.shape == (6,)
    assert bool((scale > 0).all())
    widest = bounds_to_uniform(values.min(0).values, values.max(0).values, width)
    found, of_widest = (
        (uniform_fake_quantize(values, *parameters, width) - values).square().sum(0)
        for parameters in ((scale, zero_point), widest)
    )
    assert bool((found <= of_widest * (1 + 1e-9) + 1e-12).all())
    assert found[4] < {3: 0.7, 4: 0.9}[width] * of_widest[4]  # the more bits, the less there is to clip
    assert torch.equal(zero_point, zero_point.round())


@pytest.mark.parametrize("width", [5, 6, 8])
def test_channels_may_share_one_range_in_deviations(width):
    values = channels()
    scale, zero_point = search_channels(values, width, DEVIATIONS)
    deviation, mean = values.std(0, correction=0), values.mean(0)
    holds_zero = [1, 4, 0]  # channels whose range is not widened to reach zero
    for edge in (-zero_point * scale, (2**width - 1 - zero_point) * scale):
        shared = ((edge - mean) / deviation)[holds_zero]
        assert shared.max() - shared.min() < 2 * (scale / deviation)[holds_zero].max()
    assert bool(torch.isfinite(scale).all() and (scale > 0).all())
    assert torch.equal(zero_point, zero_point.round())


@pytest.mark.parametrize("width", [4, 8])
@pytest.mark.parametrize("changed", [False, True], ids=["alike", "outliers later"])
def test_the_best_ranges_have_the_smallest_error_on_later_rows(width, changed):
    """Ranges from the first three quarters of the rows are compared on the last quarter."""
    values, weight = normal(400, 6, seed=1) * torch.logspace(-1, 1, 6), normal(5, 6, seed=2)
    values[300:] *= 3 if changed else 1
    errors = {}
    for search in (OWN, DEVIATIONS):
        scale, zero_point = search_channels(values[:300], width, search)
        added = uniform_fake_quantize(values[300:], scale, zero_point, width) - values[300:]
        errors[search.fold_ranges] = float((added.double() @ weight.double().t()).square().sum())
    best = min(errors, key=errors.get)
    assert best_ranges(values[None], width, SEARCH, weight[None]) == [best]
    fold, shared = SEARCH.fold_channels(values, width, weight)
    expected = replace(SEARCH, fold_ranges=best).fold_channels(values, width, weight)[0]
    assert shared is None
    assert torch.equal(fold.ratio, expected.ratio)


@pytest.mark.slow
def test_ranges_in_deviations_fit_unseen_values_better():
    """40 rows tell little of how far a channel goes: its own best range clips others."""
    scales = torch.logspace(-1, 1, 64)
    seen, unseen = normal(40, 64, seed=2) * scales, normal(4000, 64, seed=3) * scales

    def lost(parameters):
        return ((uniform_fake_quantize(unseen, *parameters, 8) - unseen).square().mean(0) / scales.square()).mean()

    own = search_own(Operand(seen, UniformFormat(8, own_dims=(1,))), SEARCH)
    assert lost(search_channels(seen, 8, DEVIATIONS)) < 0.5 * lost(bounds_to_uniform(own[0], own[1], 8))


def test_search_channels_treats_each_channel_alone():
    together = search_channels(channels(), 4, OWN)
    for i in range(6):
        alone = search_channels(channels()[:, i : i + 1], 4, OWN)
        assert all(torch.equal(one, several[i : i + 1]) for one, several in zip(alone, together, strict=True))


@pytest.mark.parametrize("strategy", ["alternating", "brute-force"])
def test_search_channels_is_the_same_for_every_strategy(strategy):
    first, second = (search_channels(channels(), 4, replace(SEARCH, strategy=name)) for name in ("fpcs", strategy))
    assert torch.equal(first[0], second[0])


every_weight = pytest.mark.parametrize(
    "shapes", [((40, 12), (5, 12)), ((3, 40, 6), (3, 4, 6))], ids=["linear", "grouped"]
)


@every_weight
def test_refitted_scales_are_the_least_squares_of_the_codes(shapes):
    """A float64 oracle; the codes stay."""
    generator = torch.Generator().manual_seed(3)
    x, w = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    left, right = Operand(x, UniformFormat(3)), Operand(w, UniformFormat(3, own_dims=tuple(range(w.ndim - 1))))
    found = found_by(left, right, replace(SMALL, refit=False))
    stored = Product("linear", left, right).refit(found.left, found.right)
    codes = found.right.quantize(w)
    assert torch.equal(stored.codes.double(), codes)
    assert torch.equal(stored.quantizer.zero_point, found.right.zero_point)
    signed = codes - found.right.zero_point
    assert torch.equal(stored.dequantize(), signed * stored.quantizer.scale)
    made, wanted = found.left.fake_quantize(x) @ signed.mT, x @ w.mT
    scale = (made * wanted).sum(-2) / made.square().sum(-2)
    torch.testing.assert_close(stored.quantizer.scale.flatten(), scale.flatten(), rtol=1e-9, atol=0)
    assert error_of(Assignment(found.left, stored), left, right) < error_of(found, left, right)


@every_weight
@pytest.mark.parametrize("exact", [False, True])
def test_the_sqnr_of_refitted_scales_is_that_of_their_output(shapes, exact):
    """It follows from the sums that the scales are fitted by, also where codes are exact but for their scale."""
    x, w = (normal(*shape, seed=3) for shape in shapes)
    w = w.sign() if exact else w
    left, right = Operand(x, UniformFormat(32 if exact else 3)), Operand(w, UniformFormat(3, tuple(range(w.ndim - 1))))
    product, zero_point = Product("linear", left, right), torch.full((*w.shape[:-1], 1), 4.0, dtype=torch.float64)
    quantizer = UniformQuantizer(zero_point / (4.2 if exact else 5), zero_point, 3)
    first = None if exact else UniformQuantizer(f64(0.7), f64(4.0), 3)
    found, stored = product.assign_refitted(first, quantizer), product.refit(first, quantizer)
    assert torch.equal(found.right.codes, stored.codes)
    assert torch.equal(found.right.quantizer.scale, stored.quantizer.scale)
    if exact:
        assert found.sqnr > 100
    else:
        assert found.sqnr == pytest.approx(product.assign(first, stored).sqnr, rel=1e-9)


def test_the_search_refits_weights_and_nothing_else():
    found = found_by(*attention(), SMALL)
    assert isinstance(found.left, UniformQuantizer)
    assert isinstance(found.right, UniformQuantizer)
    left, weight = linear()
    found, before = (found_by(left, weight, search) for search in (SMALL, replace(SMALL, refit=False)))
    assert isinstance(found.left, UniformQuantizer)
    assert isinstance(before.right, UniformQuantizer)
    assert torch.equal(found.right.codes.double(), before.right.quantize(weight.values))
    assert not torch.equal(found.right.quantizer.scale, before.right.scale)


def test_large_values_in_float16_do_not_overflow():
    """Their squares would: the search and what judges it compute in float32."""
    x, w = (normal(256, 64, seed=1) * 30).half(), normal(8, 64, seed=2).half()
    found, wide = (
        found_by(
            Operand(x.to(dtype), UniformFormat(4)), Operand(w.to(dtype), UniformFormat(4, own_dims=(0,))), Search()
        )
        for dtype in (torch.half, torch.float)
    )
    assert bool(torch.isfinite(weight_of(found).scale).all())
    assert abs(found.sqnr - wide.sqnr) < 0.5


# --- a later result replaces an earlier one only if its exact loss is less --------------------------------------------


EXACT_ROUND = Search(init=(8, 4), parents=4, steps=2, rounds=1, refit=False, rough_rows=0)


def random_linear():
    """A product of 40 rows and a weight of three rows, both in 4 bits."""
    left, right = normal(40, 16) * 2, normal(3, 16, seed=1)
    return Product("linear", Operand(left, UniformFormat(4)), Operand(right, UniformFormat(4, own_dims=(0,))))


def points(*rows):
    """A point per row of the weight, (low, high) each: (2, rows)."""
    return torch.tensor(rows, dtype=torch.float64).T


GOOD, BAD = (-2.0, 1.75), (-40.0, 35.0)
SHIFTED = (-2.0625, 1.6875)  # the same scale of 1/4, and the same zero point of 8: one quantizer, two points


def test_each_row_keeps_the_point_of_less_loss():
    """The first row's new point is worse, the second's is better, the third's is equal."""
    product = random_linear()
    x, weight = product.left.values, product.right
    error = ProductError.of(weight.values, x.mT, x.mT, (0,))
    before, after = points(GOOD, BAD, GOOD), points(BAD, GOOD, SHIFTED)
    found, total = bounds._better(error, weight, after, before)
    assert torch.equal(found, points(GOOD, GOOD, GOOD))
    hat = weight.fake_quantize_at(points(GOOD, GOOD, GOOD)) - weight.values
    assert total == pytest.approx(float((x @ hat.T).square().sum()), rel=1e-9)


@pytest.mark.parametrize("rough_rows", [0, 10])
def test_a_candidate_that_is_worse_replaces_nothing(rough_rows, monkeypatch):
    """Whatever a strategy returns, the second round cannot lose what the first one has found."""
    product, minimise, incumbents = random_linear(), bounds.minimise, []

    def worse(loss, operand, search, incumbent=None, rough=None, *, nearby=False):
        incumbents.append(incumbent)
        return minimise(loss, operand, search, None, rough) if incumbent is None else 9 * incumbent

    search = replace(EXACT_ROUND, rough_rows=rough_rows)
    left, right = product.left, product.right
    first = search_own(left, search)
    second, _ = bounds._search_operand(right, left.values, left.fake_quantize_at(first), search, None)
    monkeypatch.setattr(bounds, "minimise", worse)
    found = replace(search, rounds=2).search_product(product)
    assert any(incumbent is not None for incumbent in incumbents)
    for after, side, point in ((found.left, left, first), (found.right, right, second)):
        before = side.quantizer(point)
        assert torch.equal(before.scale, after.scale)
        assert torch.equal(before.zero_point, after.zero_point)


@pytest.mark.parametrize("factor", [1, 10, 0.7])
def test_a_start_stays_unless_the_search_finds_something_better(factor, monkeypatch):
    """A wide start, and searches that find its ends times this factor. Where it stays, its quantizers are no copies."""
    product = random_linear()

    def finds(operand, other, other_hat, search, incumbent, *, nearby=False):
        return incumbent * factor, torch.tensor(1.0, dtype=torch.float64)

    def quantizer(scale, shape):
        return UniformQuantizer(torch.full(shape, scale).double(), torch.full(shape, 8.0).double(), 4)

    start = product.assign(quantizer(1.5, (1,)), quantizer(0.75, (3, 1)))
    monkeypatch.setattr(bounds, "_search_operand", finds)
    found = EXACT_ROUND.search_product(replace(product, start=start))
    assert (found.sqnr > start.sqnr + 0.1) if factor < 1 else (found.sqnr == start.sqnr)
    assert (found.left is start.left) == (found.right is start.right) == (factor >= 1)


def test_a_search_of_symmetric_weights_cannot_start_from_others():
    assert symmetric()[1].point_of(UniformQuantizer(torch.ones(12, 1), torch.full((12, 1), 3.0), 4)) is None


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("reach", [0.1, 0.4])
def test_the_box_of_one_scale_begins_below_the_best_one(width, reach):
    """Against a grid of scales for each row, by the error of the weight itself."""
    right = symmetric(width)[1]
    right = replace(right, values=right.values.abs().clamp(max=3) * right.values.sign())  # without outliers
    low, high = right.box(reach)
    top = right.values.abs().amax(1)
    points = torch.linspace(0.02, 1.2, 119, dtype=torch.float64)[:, None] * top
    errors = right.format.errors(right.values)(points[:, None], torch.float64).square().sum(2)
    best = points.gather(0, errors.argmin(0)[None])
    assert bool((low <= best * 1.02).all())
    assert torch.equal(high[0], top)


def test_a_twin_whose_negative_scale_is_another_starts_a_search():
    form = TwinFormat(4, offset=0.17)
    operand = replace(symmetric()[0], format=form)
    twin = TwinUniformQuantizer(torch.tensor(0.3), torch.tensor(0.5), 4)
    assert operand.point_of(twin).item() == pytest.approx(7 * 0.3)
