"""The candidates of the search of bounds: padding, channels, and which points are tried."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.nn.functional import gelu

from adalog.choices import Search
from adalog.config import Config
from adalog.quantizers import (
    Assignment,
    QuantizedTensor,
    UniformQuantizer,
    bounds_to_uniform,
    log_thresholds,
    uniform_fake_quantize,
)
from adalog.search.bounds import search_channels, search_own
from adalog.search.operand import Format, Operand
from adalog.search.product import Product
from problems import (
    GELU_OFFSET,
    SEARCH,
    SMALL,
    after_gelu,
    after_softmax,
    error_of,
    every_problem,
    found_by,
    output_error,
    weight_of,
)
from strategies import R, bits, normal, q

# --- a convolution's padding -----------------------------------------------------------------------------------


def padded(form):
    """Patches of which a third is zero padding, and kernels."""
    mask = (torch.arange(16) % 3 > 0).double().expand(64, 16)
    values = gelu(normal(64, 16, seed=1) * 2) * mask
    return Operand(values, form, mask), Operand(normal(12, 16, seed=2), Format(6, own_dims=(0,)))


@pytest.mark.parametrize("form", [Format(4, log2_base=(0, R), offset=GELU_OFFSET), Format(4)], ids=["log", "uniform"])
def test_padding_stays_zero(form):
    left, right = padded(form)
    found = found_by(left, right, SMALL)
    hat = torch.where(left.mask.bool(), found.left.fake_quantize(left.values), 0.0)
    noise, signal = output_error(left, right, hat, right.quantized(found.right))
    assert found.sqnr == pytest.approx(10 * math.log10(signal / noise), abs=1e-6)


def test_padding_is_no_noise_to_the_search():
    """Zero is no level of a quantizer with an offset, so padding that counts drives the search elsewhere."""
    form = Format(3, log2_base=(0, R), offset=GELU_OFFSET)
    left, right = padded(form)

    def error(found):
        hat = torch.where(left.mask.bool(), found.left.fake_quantize(left.values), 0.0)
        return output_error(left, right, hat, right.quantized(found.right))[0]

    masked = error(found_by(left, right, SMALL))
    counted = error(found_by(replace(left, mask=None), right, SMALL))
    assert masked < counted


# --- candidates -----------------------------------------------------------------------------------------------


@every_problem
def test_uniform_candidates_are_their_quantizers(problem):
    for operand in problem():
        if operand.format.log2_base is None:
            low, high = operand.box(0.4)
            points = torch.stack([low, high, (low + high) / 2])
            expected = [operand.quantizer(point).fake_quantize(operand.values) - operand.values for point in points]
            for dtype in (operand.values.dtype, torch.bfloat16):
                assert torch.equal(operand.errors(operand.values)(points, dtype), torch.stack(expected).to(dtype))


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
    errors, dtype = operand.errors(operand.values), operand.values.dtype
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
    ("kind", "base", "table"),
    [("uniform", None, True), ("log2", (1, 1), False), ("log-sqrt2", (1, 2), False), ("adalog", (0, 41), True)],
)
def test_power_law_formats(kind, base, table):
    config = Config(r=41, q_min=3, q_max=99, beyond="saturate", rounding="log")
    form = Format.power_law(kind, 3, config, 0.17)
    assert (form.bits, form.log2_base, form.table) == (3, base, table)
    if base is not None:
        assert (form.q_min, form.q_max) == (3, 99)
        assert (form.beyond, form.rounding, form.offset) == ("saturate", "log", 0.17)


@pytest.mark.parametrize(
    ("q_min", "q_max", "exponent", "expected"),
    [(1, 137, -0.4, 1), (1, 137, 0, 1), (1, 137, 5, 32), (1, 137, 7.5, 137), (1, 20, 5, 20), (10, 137, 3, 10)],
)
def test_bases_stay_in_their_range(q_min, q_max, exponent, expected):
    """A search refines log2 q, a little beyond the box as well."""
    operand = Operand(torch.ones(2, 2), Format(4, log2_base=(0, R), q_min=q_min, q_max=q_max))
    assert operand.quantizer(torch.tensor([exponent, 1.0])).q == expected


# --- channels -------------------------------------------------------------------------------------------------


def channels():
    """A LayerNorm's output: channels of different width and place, with outliers, and one that never moves."""
    values = normal(300, 6, seed=1) * torch.tensor([0.1, 1, 3, 10, 1, 0]) + torch.tensor([0.0, 2, -3, 20, 0, 0])
    values[::50, 4] *= 8
    return values


@pytest.mark.parametrize("width", [3, 4])
def test_search_channels_is_no_worse_than_min_and_max(width):
    values = channels()
    scale, zero_point = search_channels(values, width, SEARCH)
    assert scale.shape == zero_point.shape == (6,)
    assert bool((scale > 0).all())
    widest = bounds_to_uniform(values.min(0).values, values.max(0).values, width)

    def error(*parameters):
        return (uniform_fake_quantize(values, *parameters, width) - values).square().sum(0)

    found, of_widest = error(scale, zero_point), error(*widest)
    assert bool((found <= of_widest * (1 + 1e-9) + 1e-12).all())
    assert found[4] < {3: 0.7, 4: 0.9}[width] * of_widest[4]  # the more bits, the less there is to clip
    assert torch.equal(zero_point, zero_point.round())


@pytest.mark.parametrize("width", [5, 6, 8])
def test_search_channels_with_many_bits_takes_one_range_in_deviations(width):
    values = channels()
    scale, zero_point = search_channels(values, width, SEARCH)
    deviation, mean = values.std(0, correction=0), values.mean(0)
    lower, upper = -zero_point * scale, (2**width - 1 - zero_point) * scale
    holds_zero = [1, 4, 0]  # channels whose range is not widened to reach zero
    lower, upper = ((edge - mean) / deviation for edge in (lower, upper))
    for edge in (lower, upper):
        assert edge[holds_zero].max() - edge[holds_zero].min() < 2 * (scale / deviation)[holds_zero].max()
    assert bool(torch.isfinite(scale).all() and (scale > 0).all())
    assert torch.equal(zero_point, zero_point.round())


@pytest.mark.parametrize("width", [3, 8])
@pytest.mark.parametrize("ranges", ["own", "deviations"])
def test_fold_ranges_are_those_asked_for_whatever_the_bits(ranges, width):
    values = channels()
    scale, zero_point = search_channels(values, width, replace(SEARCH, fold_ranges=ranges))
    at_many, at_few = (search_channels(values, bits, SEARCH) for bits in (8, 3))
    usual = {8: at_many, 3: at_few}[width]
    assert (torch.equal(scale, usual[0]) and torch.equal(zero_point, usual[1])) == (
        (ranges == "own") == (width == 3)  # "by-bits", the default
    )


@pytest.mark.slow
def test_ranges_in_deviations_fit_unseen_values_better():
    """40 rows tell little of how far a channel goes: its own best range clips others."""
    scales = torch.logspace(-1, 1, 64)
    seen, unseen = normal(40, 64, seed=2) * scales, normal(4000, 64, seed=3) * scales

    def lost(parameters):
        return ((uniform_fake_quantize(unseen, *parameters, 8) - unseen).square().mean(0) / scales.square()).mean()

    own = search_own(Operand(seen, Format(8, own_dims=(1,))), SEARCH)
    assert lost(search_channels(seen, 8, SEARCH)) < 0.5 * lost(bounds_to_uniform(own[0], own[1], 8))


def test_search_channels_treats_each_channel_alone():
    values = channels()
    together = search_channels(values, 4, SEARCH)
    for i in range(6):
        alone = search_channels(values[:, i : i + 1], 4, SEARCH)
        assert (alone[0].item(), alone[1].item()) == (together[0][i].item(), together[1][i].item())


@pytest.mark.parametrize("strategy", ["alternating", "brute-force"])
def test_search_channels_is_the_same_for_every_strategy(strategy):
    first, second = (search_channels(channels(), 4, replace(SEARCH, strategy=name)) for name in ("fpcs", strategy))
    assert torch.equal(first[0], second[0])


@pytest.mark.parametrize("shapes", [((40, 12), (5, 12)), ((3, 40, 6), (3, 4, 6))], ids=["linear", "grouped"])
def test_refitted_scales_are_the_least_squares_of_the_codes(shapes):
    """A float64 oracle row by row; the codes stay."""
    w_shape = shapes[1]
    generator = torch.Generator().manual_seed(3)
    x, w = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    own_dims = (0,) if w.ndim == 2 else (0, 1)
    left, right = Operand(x, Format(3)), Operand(w, Format(3, own_dims=own_dims))
    found = found_by(left, right, replace(SMALL, refit=False))
    stored = Product("linear", left, right).refitted(found.left, found.right)
    codes = found.right.quantize(w)
    assert torch.equal(stored.codes.double(), codes)
    assert torch.equal(stored.quantizer.zero_point, found.right.zero_point)
    assert torch.equal(stored.dequantize(), (codes - found.right.zero_point) * stored.quantizer.scale)
    x_hat = found.left.fake_quantize(x)
    signed = codes - found.right.zero_point
    rows = signed.reshape(-1, w_shape[-1])
    for index, (row, exact, scale) in enumerate(
        zip(rows, w.reshape(rows.shape), stored.quantizer.scale.flatten(), strict=True)
    ):
        group = index // w_shape[-2]
        inputs, hats = (value if value.ndim == 2 else value[group] for value in (x, x_hat))
        made, wanted = hats @ row, inputs @ exact
        torch.testing.assert_close(scale, made @ wanted / (made @ made), rtol=1e-9, atol=0)
    assert error_of(Assignment(found.left, stored), left, right) < error_of(found, left, right)


@pytest.mark.parametrize("shapes", [((40, 12), (5, 12)), ((3, 40, 6), (3, 4, 6))], ids=["linear", "grouped"])
@pytest.mark.parametrize("exact", [False, True])
def test_the_sqnr_of_refitted_scales_is_that_of_their_output(shapes, exact):
    """It follows from the sums that the scales are fitted by, also where codes are exact but for their scale."""
    x, w = (torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64) for shape in shapes)
    w = w.sign() if exact else w
    own_dims = (0,) if w.ndim == 2 else (0, 1)
    product = Product("linear", Operand(x, Format(32 if exact else 3)), Operand(w, Format(3, own_dims=own_dims)))
    zero_point = torch.full((*w.shape[:-1], 1), 4.0, dtype=torch.float64)
    quantizer = UniformQuantizer(zero_point / (4.2 if exact else 5), zero_point, 3)
    first = None if exact else UniformQuantizer(torch.tensor(0.7).double(), torch.tensor(4.0).double(), 3)
    found = product.assigned_refitted(first, quantizer)
    stored = product.refitted(first, quantizer)
    assert torch.equal(found.right.codes, stored.codes)
    assert torch.equal(found.right.quantizer.scale, stored.quantizer.scale)
    if exact:
        assert found.sqnr > 100
    else:
        assert found.sqnr == pytest.approx(product.assigned(first, stored).sqnr, rel=1e-9)


def test_the_search_refits_weights_and_nothing_else():
    heads = [Operand(normal(4, 2, 9, 6, seed=seed).float(), Format(4, own_dims=(1,))) for seed in (1, 2)]
    found = found_by(*heads, SMALL)
    assert isinstance(found.left, UniformQuantizer)
    assert isinstance(found.right, UniformQuantizer)
    weight = Operand(normal(5, 6, seed=3).float(), Format(4, own_dims=(0,)))
    left = Operand(normal(50, 6, seed=4).float(), Format(4))
    found, before = (found_by(left, weight, search) for search in (SMALL, replace(SMALL, refit=False)))
    assert isinstance(found.left, UniformQuantizer)
    assert isinstance(found.right, QuantizedTensor)
    assert isinstance(before.right, UniformQuantizer)
    assert torch.equal(found.right.codes.float(), before.right.quantize(weight.values))
    assert not torch.equal(found.right.quantizer.scale, before.right.scale)


def test_large_values_in_float16_do_not_overflow():
    """Their squares would: the search and what judges it compute in float32."""
    x, w = (normal(256, 64, seed=1) * 30).half(), normal(8, 64, seed=2).half()
    found = found_by(Operand(x, Format(4)), Operand(w, Format(4, own_dims=(0,))), Search())
    wide = found_by(Operand(x.float(), Format(4)), Operand(w.float(), Format(4, own_dims=(0,))), Search())
    assert bool(torch.isfinite(weight_of(found).scale).all())
    assert abs(found.sqnr - wide.sqnr) < 0.5
