"""Gradients of what rounds: exact values forwards, and backwards those of LSQ, by finite differences."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from adalog.quantizers import (
    LogQuantizer,
    SplitUniformQuantizer,
    TwinUniformQuantizer,
    UniformQuantizer,
    bounds_to_uniform,
    log_levels,
    round_ste,
)
from strategies import R, dtypes, normal, tensors

OFFSET = 0.1699712
BITS = 4
TOP, HALF = 2**BITS - 1, 2 ** (BITS - 1)
STEP = 1e-6  # of the finite differences; values are farther than this, times any code, from a kink of the surrogate
MARGIN = 1e-3


def f64(*values):
    return torch.tensor(values if len(values) > 1 else values[0], dtype=torch.float64)


def between(x, low, high):
    """x brought between two ends, written without the functions under test."""
    return torch.where(x < low, low, torch.where(x > high, high, x))


# --- each quantizer's clipped value and step, by hand: functions of x and the parameters in their order -------------


def by_hand_uniform(x, scale, zero_point):
    return between(x, -zero_point * scale, (TOP - zero_point) * scale), scale


def by_hand_twin(x, scale, negative_scale):
    return between(x, -HALF * negative_scale, (HALF - 1) * scale), torch.where(x < 0, negative_scale, scale)


def by_hand_split(x, scale, coarse_scale):
    step = torch.where(x < (HALF - 1) * scale, scale, coarse_scale)
    return between(x, torch.zeros_like(x), (HALF - 1) * coarse_scale), step


def by_hand_log(least, added=0.0, taken=0.0):
    """least: the smallest level at scale 1; added, taken: the offset before and after."""
    return lambda x, scale: (between(x + added, least * scale, scale) - taken, scale)


def log(**options):
    return LogQuantizer(f64(0.9), 20, R, BITS, **options)


SATURATED = float(log_levels(20, R, BITS, beyond="saturate")[-1])
CHANNELS = f64(0.05, 0.11, 0.2).view(3, 1), f64(3.0, 8.0, 12.0).view(3, 1)

# (quantizer, by hand, the least and the largest value that are tried)
CASES = {
    "uniform": (UniformQuantizer(f64(0.13), f64(6.0), BITS), by_hand_uniform, -2.0, 2.0),
    "uniform, whole range above zero": (UniformQuantizer(f64(0.13), f64(0.0), BITS), by_hand_uniform, -1.0, 3.0),
    "uniform per channel": (UniformQuantizer(*CHANNELS, BITS), by_hand_uniform, -2.0, 3.0),
    "log": (log(), by_hand_log(0.0), 0.0, 1.5),
    "log, saturating": (log(beyond="saturate"), by_hand_log(SATURATED), 0.0, 1.5),
    "log, zero beyond": (log(beyond="zero", rounding="log"), by_hand_log(0.0), 0.0, 1.5),
    "log with an integer table": (log(width=16, headroom=8), by_hand_log(0.0), 0.0, 1.5),
    "log with offset": (log(offset=OFFSET), by_hand_log(0.0, OFFSET, OFFSET), -OFFSET, 1.5),
    "log that keeps its offset": (log(offset=OFFSET, keeps_offset=True), by_hand_log(0.0, OFFSET), -OFFSET, 1.5),
    "twin": (TwinUniformQuantizer(f64(0.2), f64(0.02), BITS), by_hand_twin, -0.4, 2.0),
    "split": (SplitUniformQuantizer(f64(0.01), f64(0.12), BITS), by_hand_split, 0.0, 1.0),
    "split that sums": (SplitUniformQuantizer(f64(0.01), f64(0.12), BITS, True), by_hand_split, 0.0, 1.0),
}
every_case = pytest.mark.parametrize(("quantizer", "by_hand", "low", "high"), CASES.values(), ids=CASES)


def values_of(quantizer, by_hand, low, high):
    """(3, n) values on both sides of every kink of the surrogate, none of them near one."""
    x = low + (high - low) * torch.rand(3, 400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    parameters = quantizer.parameters().values()

    # Within the margin the step stays, and the clipped value moves as x does or not at all.
    (below, step_below), (here, _), (above, step_above) = (by_hand(x + by, *parameters) for by in (-MARGIN, 0, MARGIN))
    near = ((above - here - (here - below)).abs() > MARGIN / 1000) | (step_below != step_above)
    return x[:, ~near.any(0)]


def trained(quantizer):
    """The quantizer with parameters that require a gradient, and those parameters."""
    made = quantizer.map(lambda value: value.clone().requires_grad_())
    return made, list(made.parameters().values())


# --- rounding --------------------------------------------------------------------------------------------------------


@given(st.data(), dtypes)
def test_rounding_is_exact_and_its_gradient_is_one(data, dtype):
    x = data.draw(tensors(dtype)).requires_grad_()
    weight = normal(len(x)).to(dtype)
    value = round_ste(x)
    assert torch.equal(value, x.detach().round())
    (value * weight).sum().backward()
    assert torch.equal(x.grad, weight)


def test_halves_are_rounded_to_even():
    assert round_ste(torch.arange(-3.5, 4)).tolist() == [-4.0, -2.0, -2.0, 0.0, 0.0, 2.0, 2.0, 4.0]


# --- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@every_case
def test_gradients_change_no_value(quantizer, by_hand, low, high, dtype):
    """To the bit, signs of zeros included; thresholds, ends and what lies far beyond them are among the values."""
    quantizer = quantizer.map(lambda value: value.to(dtype))
    levels = quantizer.levels()
    edges = torch.cat([levels, (levels[1:] + levels[:-1]) / 2])
    x = torch.cat([normal(1000).to(dtype), edges.to(dtype), f64(0.0, -0.0, 1e9, -1e9, 1e-30).to(dtype)]).expand(3, -1)
    plain = quantizer.fake_quantize(x)
    made, parameters = trained(quantizer)
    bits = torch.int32 if dtype == torch.float32 else torch.int64
    given = x.clone().requires_grad_()
    for value in (made.fake_quantize(given), quantizer.fake_quantize(given), made.fake_quantize(x)):
        assert value.requires_grad
        assert torch.equal(value.detach().view(bits), plain.view(bits))
    with torch.no_grad():
        silent = made.fake_quantize(given)
    assert not silent.requires_grad
    assert torch.equal(silent.view(bits), plain.view(bits))
    assert torch.equal(plain, quantizer.dequantize(quantizer.quantize(x)))
    assert len(parameters) == len(quantizer.parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@every_case
def test_gradients_change_no_value_of_a_narrow_type(quantizer, by_hand, low, high, dtype):
    x = (normal(3, 300) * (high - low)).to(dtype).requires_grad_()
    quantizer = quantizer.map(torch.Tensor.float)
    value = quantizer.fake_quantize(x)
    assert value.dtype == dtype
    assert torch.equal(value.detach(), quantizer.fake_quantize(x.detach()))
    value.sum().backward()
    assert set(x.grad.unique().tolist()) <= {0.0, 1.0}


# --- gradients -------------------------------------------------------------------------------------------------------


@every_case
def test_gradients_are_those_of_the_surrogate(quantizer, by_hand, low, high):
    """x_hat = c(x; theta) + s(theta) e, the rounding error e held constant: central differences in float64."""
    x = values_of(quantizer, by_hand, low, high)
    assert x.shape[1] > 200
    weight = normal(*x.shape, seed=1)
    made, parameters = trained(quantizer)
    given = x.clone().requires_grad_()
    (made.fake_quantize(given) * weight).sum().backward()

    at = [value.detach() for value in parameters]
    clipped, step = by_hand(x, *at)
    error = (quantizer.fake_quantize(x) - clipped) / step

    def surrogate(x, *parameters):
        clipped, step = by_hand(x, *parameters)
        return (clipped + step * error) * weight

    torch.testing.assert_close(surrogate(x, *at), quantizer.fake_quantize(x) * weight, rtol=0, atol=1e-14)
    by_x = (surrogate(x + STEP, *at) - surrogate(x - STEP, *at)) / (2 * STEP)
    torch.testing.assert_close(given.grad, by_x, rtol=0, atol=1e-8)
    assert (given.grad == weight).any()
    assert (given.grad == 0).any()
    for index, parameter in enumerate(parameters):
        moved = [
            surrogate(x, *(value + sign * STEP * (other == index) for other, value in enumerate(at)))
            for sign in (1, -1)
        ]
        each = (moved[0] - moved[1]) / (2 * STEP)
        expected = each.sum() if parameter.numel() == 1 else each.sum(1, keepdim=True)
        torch.testing.assert_close(parameter.grad, expected.view_as(parameter), rtol=0, atol=1e-6)
        assert bool((parameter.grad != 0).all())


@pytest.mark.parametrize("per_channel", [False, True])
def test_uniform_gradients_have_the_closed_forms_of_lsq(per_channel):
    """LSQ (Esser et al., 2020) and LSQ+ (Bhalgat et al., 2020)."""
    quantizer, by_hand, low, high = CASES["uniform per channel" if per_channel else "uniform"]
    x = values_of(quantizer, by_hand, low, high)
    scale, zero_point = (
        value.expand(3, x.shape[1]).clone().requires_grad_() for value in quantizer.parameters().values()
    )
    given = x.clone().requires_grad_()
    UniformQuantizer(scale, zero_point, BITS).fake_quantize(given).sum().backward()  # a scale for each value
    s, z = scale.detach(), zero_point.detach()
    below, above = x < -z * s, x > (TOP - z) * s
    inside = ~(below | above)
    assert below.any()
    assert above.any()
    assert inside.any()
    code = quantizer.quantize(x)
    assert torch.equal(given.grad, inside.double())
    by_scale = torch.where(below, -z, torch.where(above, TOP - z, code - z - x / s))
    torch.testing.assert_close(scale.grad, by_scale, rtol=0, atol=1e-12)
    torch.testing.assert_close(zero_point.grad, torch.where(inside, 0.0, -s), rtol=0, atol=1e-12)


def test_a_logarithmic_scale_has_its_rounding_error_inside_and_its_end_outside():
    quantizer, *rest = CASES["log with offset"]
    x = values_of(quantizer, *rest)
    made, (scale,) = trained(quantizer)
    hat = made.fake_quantize(x)
    hat.sum().backward()
    above = x + OFFSET > 0.9
    assert above.any()
    each = torch.where(above, 1.0, (hat.detach() - x) / 0.9)
    torch.testing.assert_close(scale.grad, each.sum(), rtol=1e-12, atol=0)


# --- values that stay exact ------------------------------------------------------------------------------------------


@every_case
def test_values_that_are_kept_stay_and_take_no_part(quantizer, by_hand, low, high):
    """QDrop: the gradient by x is 1 where a value is kept, and the parameters' are those of the other values alone."""
    x, weight = normal(3, 400) * (high - low), normal(3, 400, seed=1)
    kept = (torch.rand(3, 400, generator=torch.Generator().manual_seed(2)) < 0.3).to(x)

    def gradients(kept, weight):
        made, parameters = trained(quantizer)
        given = x.clone().requires_grad_()
        hat = made.fake_quantize(given, kept)
        (hat * weight).sum().backward()
        return hat.detach(), given.grad, [parameter.grad for parameter in parameters]

    hat, by_x, by_parameters = gradients(kept, weight)
    plain, plain_by_x, _ = gradients(None, weight)
    chosen = kept.bool()
    assert torch.equal(hat, torch.where(chosen, x + quantizer.kept_offset, plain))
    assert torch.equal(by_x, torch.where(chosen, weight, plain_by_x))
    assert torch.equal(quantizer.fake_quantize(x, kept), hat)
    for found, wanted in zip(by_parameters, gradients(None, weight * (1 - kept))[2], strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


class Whole(torch.autograd.Function):
    """The gradients of the surrogate by one operation on all values after the other, as its formula has them."""

    @staticmethod
    def forward(ctx, x, low, high, step, hat, above):
        ctx.save_for_backward(x, low, high, step, hat)
        ctx.above = above
        return hat.clone()

    @staticmethod
    def backward(ctx, gradient):
        x, low, high, step, hat = ctx.saved_tensors
        below, beyond = x < low, x > high
        clipped = torch.minimum(torch.maximum(x, low), high)
        parts = (gradient * below, gradient * beyond, gradient * (hat - ctx.above - clipped) / step)
        sums = (part.sum_to_size(of.shape) for part, of in zip(parts, (low, high, step), strict=True))
        return gradient.masked_fill(below | beyond, 0), *sums, None, None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@every_case
def test_gradients_in_slices_are_those_of_the_whole(quantizer, by_hand, low, high, dtype, monkeypatch):
    """To float rounding, also where values lie in memory in another order."""
    monkeypatch.setattr("adalog.quantizers.quantizer._SLICE_ELEMENTS", 100)
    quantizer = quantizer.map(lambda value: value.to(dtype))
    x, weight = ((normal(*shape, seed=seed) * 2).to(dtype) for shape, seed in (((350, 3, 2), 0), ((2, 3, 350), 1)))

    def gradients(way):
        made, parameters = trained(quantizer)
        given = x.clone().requires_grad_()
        (way(made, given.permute(2, 1, 0)) * weight).sum().backward()
        return [given.grad, *(parameter.grad for parameter in parameters)]

    def whole(made, values):
        hat = quantizer.fake_quantize(values.detach())
        return Whole.apply(values, *made.bounds(), made.step(values), hat, made.kept_offset)

    for found, wanted in zip(gradients(lambda made, values: made.fake_quantize(values)), gradients(whole), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4 if dtype == torch.float32 else 1e-10, atol=1e-5)


# --- bounds ----------------------------------------------------------------------------------------------------------


@given(st.floats(-4, -0.1), st.floats(0.1, 4))
@example(-1.0, 1.0)
def test_bounds_get_the_gradients_of_scale_and_zero_point(lower, upper):
    """s = (u - l) / L, and z = -l / s with its rounding left out."""
    low, high = f64(lower).requires_grad_(), f64(upper).requires_grad_()
    scale, zero_point = bounds_to_uniform(low, high, BITS)
    assert float(zero_point.detach()) == round(float(zero_point.detach()))
    s = (upper - lower) / TOP
    by_scale = torch.autograd.grad(scale, (low, high), retain_graph=True)
    assert [float(each) for each in by_scale] == pytest.approx([-1 / TOP, 1 / TOP], rel=1e-12)
    by_zero_point = torch.autograd.grad(zero_point, (low, high))
    wanted = [-1 / s - lower / (s * s * TOP), lower / (s * s * TOP)]
    assert [float(each) for each in by_zero_point] == pytest.approx(wanted, rel=1e-9, abs=1e-9)


def test_bounds_are_trained_through_the_quantizer():
    """By finite differences of the surrogate, in which both the codes' and the zero point's rounding are constant."""
    x, weight = normal(500) * 1.5, normal(500, seed=1)
    low, high = f64(-1.1).requires_grad_(), f64(1.7).requires_grad_()
    scale, zero_point = bounds_to_uniform(low, high, BITS)
    hat = UniformQuantizer(scale, zero_point, BITS).fake_quantize(x)
    (hat * weight).sum().backward()

    at = scale.detach(), zero_point.detach()
    near = ((x + at[0] * at[1]).abs() < MARGIN) | ((x - at[0] * (TOP - at[1])).abs() < MARGIN)
    assert not near.any()
    clipped, step = by_hand_uniform(x, *at)
    error, rounding = (hat.detach() - clipped) / step, at[1] + (-1.1) / at[0]

    def surrogate(low, high):
        scale = (high - low) / TOP
        clipped, step = by_hand_uniform(x, scale, -low / scale + rounding)
        return float(((clipped + step * error) * weight).sum())

    by_low = (surrogate(-1.1 + STEP, f64(1.7)) - surrogate(-1.1 - STEP, f64(1.7))) / (2 * STEP)
    by_high = (surrogate(-1.1, f64(1.7) + STEP) - surrogate(-1.1, f64(1.7) - STEP)) / (2 * STEP)
    assert float(low.grad) == pytest.approx(by_low, abs=1e-6)
    assert float(high.grad) == pytest.approx(by_high, abs=1e-6)
    assert abs(by_low) > 1
    assert abs(by_high) > 1


def test_a_bound_on_the_wrong_side_of_zero_has_no_gradient():
    """The range is widened to hold zero, whatever that bound is."""
    low, high = f64(0.5).requires_grad_(), f64(2.0).requires_grad_()
    scale, _ = bounds_to_uniform(low, high, BITS)
    scale.backward()
    assert float(low.grad) == 0
    assert float(high.grad) == pytest.approx(1 / TOP)
