"""Properties of the quantizers: real -> code -> real."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from adalog.baselines import SplitUniformQuantizer, TwinUniformQuantizer
from adalog.quantizers import (
    LogQuantizer,
    UniformQuantizer,
    bounds_to_uniform,
    log_levels,
    log_quantize,
    log_thresholds,
    round_ste,
    symmetric_zero_point,
    uniform_dequantize,
    uniform_fake_quantize,
    uniform_quantize,
)
from problems import GELU_OFFSET, uniform_of
from strategies import (
    KINDS,
    R,
    beyond,
    bits,
    dtypes,
    f64,
    log_fake_quantize,
    normal,
    q,
    rounding,
    scales,
    tensors,
    zero_points,
)
from toys import TOKENS

READINGS = ["saturate", "zero", "zero-coded"]
ROUNDINGS = ["log", "nearest"]


def code_count(width: int, reading: str) -> int:
    return 2**width + (reading == "zero")


def distance_to_nearest(x: Tensor, levels: Tensor) -> Tensor:
    """By brute force, in float64."""
    return (x.double()[:, None] - levels.double()[None]).abs().min(1).values


@st.composite
def uniform_or_twin(draw):
    """A quantizer of one scale, or of a scale for each sign."""
    width, dtype = draw(bits), draw(dtypes)
    scale, other = (torch.tensor(draw(scales), dtype=dtype) for _ in range(2))
    if draw(st.booleans()):
        return TwinUniformQuantizer(scale, other, width)
    return UniformQuantizer(scale, torch.tensor(float(draw(zero_points(width))), dtype=dtype), width)


@settings(max_examples=80)
@given(uniform_or_twin())
def test_representable_values_are_fixed_points(quantizer):
    code = torch.arange(2**quantizer.bits, dtype=quantizer.scale.dtype)
    value = quantizer.dequantize(code)
    assert torch.equal(quantizer.quantize(value), code)
    assert torch.equal(quantizer.fake_quantize(value), value)


@given(st.data(), bits, st.floats(2.0**-6, 2.0**4))
def test_uniform_takes_the_nearest_level(data, bits, scale):
    zero_point, x = data.draw(zero_points(bits)), data.draw(tensors())
    value = uniform_fake_quantize(x, f64(scale), f64(zero_point), bits)
    levels = scale * (torch.arange(2**bits, dtype=torch.float64) - zero_point)
    torch.testing.assert_close((x - value).abs(), distance_to_nearest(x, levels), rtol=0, atol=1e-12)


def test_uniform_rounds_halves_to_even():
    x = torch.tensor([0.5, 1.5, 2.5, 3.5])
    assert uniform_quantize(x, torch.tensor(1.0), torch.tensor(0.0), 4).tolist() == [0, 2, 2, 4]


@pytest.mark.parametrize("width", range(2, 9))
def test_symmetric_zero_point(width):
    zero_point = torch.tensor(float(symmetric_zero_point(width)))
    ends = uniform_fake_quantize(torch.tensor([-1e6, 0.0, 1e6]), torch.tensor(1.0), zero_point, width)
    assert ends.tolist() == [-(2 ** (width - 1)), 0, 2 ** (width - 1) - 1]


@given(bits, st.floats(-50, 50, width=32), st.floats(0, 100, width=32), dtypes)
def test_bounds_to_uniform_keeps_zero_and_spans_the_bounds(bits, lower, length, dtype):
    lower = torch.tensor(lower, dtype=dtype)
    upper = lower + length
    ends = torch.stack([lower, upper])
    scale, zero_point = bounds_to_uniform(lower, upper, bits)
    assert torch.equal(torch.stack([lower, upper]), ends)  # they are not modified
    assert scale > 0
    assert torch.equal(zero_point, zero_point.round())
    assert 0 <= zero_point < 2**bits
    assert uniform_fake_quantize(torch.zeros(1, dtype=dtype), scale, zero_point, bits).tolist() == [0]
    # Zero's place on the grid moves the ends by up to half a step.
    error = (uniform_fake_quantize(ends, scale, zero_point, bits) - ends).abs()
    assert bool((error <= scale * (0.5 + 1e-4)).all())


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_levels_descend_and_zero_has_its_code(kind, reading):
    base, r, table = kind
    for width in range(2, 9):
        levels = log_levels(base, r, width, beyond=reading, table=table)
        assert levels.dtype == torch.float64
        assert levels.shape == (code_count(width, reading),)
        assert levels[0] == 1
        assert bool((levels.diff() <= 0).all())
        if reading == "saturate":
            assert bool((levels > 0).all())
        else:
            assert levels[-1] == 0


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("rounds", ROUNDINGS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [2, 4, 8])
def test_thresholds_are_where_codes_change(width, kind, rounds, reading):
    base, r, table = kind
    options = {"beyond": reading, "rounding": rounds, "table": table}
    thresholds = log_thresholds(base, r, width, **options)
    assert thresholds.shape == (code_count(width, reading) - 1,)
    assert bool((thresholds.diff() <= 0).all())
    for x in (thresholds * (1 + 1e-9), thresholds * (1 - 1e-9)):
        code = log_quantize(x, f64(1.0), base, r, width, **options)
        assert code.tolist() == (x[:, None] <= thresholds[None]).sum(1).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize("width", [2, 4, 6, 8])
def test_nearest_codes_count_thresholds_exactly(width, table, dtype):
    """At every threshold and its neighbours on the dtype's grid, and in between."""
    spread, one = torch.logspace(0.3, -20, 3000, dtype=dtype), torch.ones((), dtype=dtype)
    choices = {"beyond": "zero-coded", "rounding": "nearest", "table": table}
    for base in (1, 2, 3, 7, 20, 36, 37, 38, 73, 137):
        cuts = log_thresholds(base, R, width, **choices).to(dtype)
        normal_cuts = cuts[cuts > 1e-30]  # so small that the code no longer matters, thresholds are all one
        sides = [normal_cuts, *(normal_cuts.nextafter(one * end) for end in (0.0, 4.0))]
        x = torch.cat([*sides, spread])
        passed = len(cuts) - torch.searchsorted(cuts.flip(0).contiguous(), x)
        assert torch.equal(log_quantize(x, one, base, R, width, **choices).long(), passed), base


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("rounds", ROUNDINGS)
@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize("width", [2, 4, *(pytest.param(width, marks=pytest.mark.slow) for width in (3, 6, 8))])
def test_log_representable_values_are_fixed_points(width, table, rounds, reading):
    """But rounding "log" may put a level with a rounded mantissa behind the last threshold, where zero begins."""
    choices = {"beyond": reading, "table": table}
    for base in range(1, 138):
        levels = log_levels(base, R, width, **choices)
        if rounds == "log" and reading != "saturate":
            zero_from = log_thresholds(base, R, width, rounding=rounds, **choices)[-1]
            levels = levels[(levels > zero_from) | (levels == 0)]
        value = log_fake_quantize(levels, f64(1.0), base, R, width, rounding=rounds, **choices)
        assert torch.equal(value, levels), base


@given(st.data(), bits, st.floats(2.0**-6, 2.0**4), q, beyond, st.booleans(), dtypes)
def test_log_nearest_takes_the_nearest_level(data, bits, scale, q, beyond, table, dtype):
    x = data.draw(tensors(dtype, 0.0, 32.0)) * torch.logspace(0, -6, 3, dtype=dtype)[:, None]
    x, scale = x.flatten(), torch.tensor(scale, dtype=dtype)
    value = log_fake_quantize(x, scale, q, R, bits, beyond=beyond, rounding="nearest", table=table)
    levels = log_levels(q, R, bits, beyond=beyond, table=table) * scale.double()
    # Thresholds and levels are on the grid of x's dtype, so a value that near to a threshold may go either way.
    slack = 4 * torch.finfo(dtype).eps * (x.double() + scale.double())
    error = (x.double() - value.double()).abs()
    assert bool((error <= distance_to_nearest(x, levels) + slack).all())


@pytest.mark.parametrize("rounds", ROUNDINGS)
def test_readings_of_what_lies_beyond(rounds):
    x, scale = torch.tensor([1.0, 2.0**-14, 2.0**-15, 1e-9, 0.0, -1.0], dtype=torch.float64), f64(1.0)

    def values(reading):
        return log_fake_quantize(x, scale, 1, 1, 4, beyond=reading, rounding=rounds, table=False).tolist()

    assert values("saturate") == [1, 2.0**-14, 2.0**-15, 2.0**-15, 2.0**-15, 2.0**-15]
    assert values("zero") == [1, 2.0**-14, 2.0**-15, 0, 0, 0]
    # Here 2**-15 is past the last level, half way to zero: for "nearest" a tie, which goes to the lower level.
    assert values("zero-coded") == [1, 2.0**-14, 0, 0, 0, 0]


CANDIDATES = {
    "per tensor": ((5, 7), (3, 1, 1)),
    "per channel": ((5, 7), (3, 5, 1)),
    "per head": ((2, 4, 5, 7), (3, 1, 4, 1, 1)),
    "one candidate": ((5, 7), (1, 1, 1)),
    "as many candidates as rows": ((3, 7), (3, 1, 1)),
}


@pytest.mark.parametrize(("shape", "parameters"), CANDIDATES.values(), ids=CANDIDATES)
def test_candidates_equal_a_loop(shape, parameters):
    x = normal(*shape, dtype=torch.float32)
    scale = normal(*parameters, seed=1, dtype=torch.float32).abs() + 0.05
    zero_point = torch.arange(scale.numel(), dtype=torch.float32).remainder(16).view(parameters)
    together = uniform_fake_quantize(x, scale, zero_point, 4)
    alone = [uniform_fake_quantize(x, s, z, 4) for s, z in zip(scale, zero_point, strict=True)]
    assert torch.equal(together, torch.stack(alone))
    code = uniform_quantize(x, scale, zero_point, 4)
    assert torch.equal(uniform_dequantize(code, scale, zero_point), together)
    for rounds in ROUNDINGS:
        together = log_fake_quantize(x.abs(), scale, 20, R, 4, rounding=rounds)
        alone = [log_fake_quantize(x.abs(), s, 20, R, 4, rounding=rounds) for s in scale]
        assert torch.equal(together, torch.stack(alone))


def every_quantizer(dtype, offset=0.0):
    scale = torch.tensor(0.13, dtype=dtype)
    uniform = [] if offset else [UniformQuantizer(scale, scale.new_tensor(5.0), 4)]
    uniform += [TwinUniformQuantizer(scale, scale / 9, 4), SplitUniformQuantizer(scale / 9, scale, 4)]
    return uniform + [
        LogQuantizer(scale * 20, 20, R, 6, reading, rounds, table=table, offset=offset, keeps_offset=not table)
        for reading in READINGS
        for rounds in ROUNDINGS
        for table in (False, True)
    ]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("offset", [0.0, 0.17])
def test_narrow_inputs_are_computed_in_float32_and_come_back_narrow(offset, dtype):
    for quantizer in every_quantizer(torch.float32, offset):
        x = torch.linspace(-0.17, 3, 1500).to(dtype)
        code, value = quantizer.quantize(x), quantizer.fake_quantize(x)
        assert code.dtype == torch.float32
        assert torch.equal(code, quantizer.quantize(x.float()))
        assert value.dtype == dtype
        assert torch.equal(value, quantizer.fake_quantize(x.float()).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("offset", [0.0, 0.17])
def test_inputs_are_not_modified(offset, dtype):
    for quantizer in every_quantizer(dtype, offset):
        x, parameters = torch.linspace(-0.17, 3, 200, dtype=dtype), quantizer.map(torch.clone)
        before = x.clone()
        code = quantizer.quantize(x)
        quantizer.fake_quantize(x)
        assert torch.equal(x, before)
        kept, first = code.clone(), quantizer.dequantize(code)
        assert torch.equal(code, kept)
        assert torch.equal(quantizer.scale, parameters.scale)
        assert torch.equal(quantizer.dequantize(code), first)


@pytest.mark.parametrize("width", [-1, 0, 1, 9, 32])
def test_bits_outside_2_to_8_are_refused(width):
    one = torch.tensor(1.0)
    for make, *scales_or_bases in (
        (UniformQuantizer, one, torch.tensor(0.0)),
        (TwinUniformQuantizer, one, one),
        (SplitUniformQuantizer, torch.tensor(0.1), one),
        (LogQuantizer, one, 20, R),
    ):
        with pytest.raises(ValueError, match=f"bits = {width} is outside 2 to 8"):
            make(*scales_or_bases, width)


@pytest.mark.parametrize(("base", "r"), [(0, 37), (-1, 37), (20, 0)])
def test_bases_that_are_no_base_are_refused(base, r):
    with pytest.raises(ValueError, match="is not positive"):
        LogQuantizer(torch.tensor(1.0), base, r, 4)


def test_uniform_quantizer_takes_integer_codes():
    quantizer = UniformQuantizer(torch.tensor(0.5), torch.tensor(3.0), 4)
    expected = [0.5 * (code - 3) for code in range(16)]
    assert quantizer.dequantize(torch.arange(16, dtype=torch.uint8)).tolist() == expected


@pytest.mark.parametrize("shape", [(), (5,), (4, 1), (1, 1, 1), (1, 4, 1), (6, 1, 1), (2, 1, 1, 1)])
def test_slices_change_nothing(shape, monkeypatch):
    """Whatever the scale varies along: codes and values are those of the whole at once."""
    x = normal(6, 4, 5, dtype=torch.float32).abs()
    scale = normal(math.prod(shape), seed=1, dtype=torch.float32).abs().view(shape) + 0.1
    quantizers = (
        UniformQuantizer(scale, torch.full_like(scale, 7), 4),
        TwinUniformQuantizer(scale, scale / 3, 4),
        SplitUniformQuantizer(scale / 8, scale, 4),
    )
    whole = [quantizer.dequantize(quantizer.quantize(x)) for quantizer in quantizers]
    monkeypatch.setattr("adalog.quantizers.quantizer._SLICE_ELEMENTS", 40)
    for quantizer, wanted in zip(quantizers, whole, strict=True):
        assert torch.equal(quantizer.fake_quantize(x), wanted)


def test_scaled_quantizers():
    one = torch.tensor(1.0)
    for quantizer, expected in (
        (uniform_of(2.0).rescale(1.5), [3, 8]),
        (TwinUniformQuantizer(one, one / 4, 4).rescale(2.0), [2.0, 0.5]),
        (LogQuantizer(one, 20, 37, 4).rescale(0.5), [0.5]),
    ):
        assert [float(value) for value in quantizer.parameters().values()] == expected


def test_map_keeps_everything_but_the_tensors():
    quantizer = LogQuantizer(f64(3.0), 20, R, 6, "saturate", "log", table=False, offset=0.17, keeps_offset=True)
    mapped = quantizer.map(Tensor.float)
    assert mapped.scale.dtype == torch.float32
    assert mapped == replace(quantizer, scale=mapped.scale)
    for kind in (UniformQuantizer, TwinUniformQuantizer, partial(SplitUniformQuantizer, sums=True)):
        quantizer = kind(f64(1.0), f64(2.0), bits=5)
        mapped = quantizer.map(lambda value: value * 2)
        assert [float(value) for value in mapped.parameters().values()] == [2.0, 4.0]
        assert mapped == replace(quantizer, **mapped.parameters())


@given(bits, q, beyond, rounding, dtypes)
def test_tables_that_are_kept_are_never_written_to(bits, q, beyond, rounding, dtype):
    """A float64 scale of 1 and an offset, so that nothing but the code itself stands between a table and the result."""
    tables = log_levels(q, R, bits, beyond=beyond), log_thresholds(q, R, bits, beyond=beyond, rounding=rounding)
    x = normal(200, seed=q).abs().to(dtype)
    quantizer = LogQuantizer(torch.tensor(1.0, dtype=dtype), q, R, bits, beyond, rounding, offset=0.1)
    first, second = (quantizer.fake_quantize(x) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(quantizer.dequantize(quantizer.quantize(x)), first)
    log_levels.cache_clear()
    log_thresholds.cache_clear()
    assert torch.equal(quantizer.fake_quantize(x), first)
    assert torch.equal(log_levels(q, R, bits, beyond=beyond), tables[0])
    assert torch.equal(log_thresholds(q, R, bits, beyond=beyond, rounding=rounding), tables[1])


def test_tables_that_inference_left_serve_gradients():
    log_levels.cache_clear()
    log_thresholds.cache_clear()
    x, scale = normal(50).abs(), f64(0.7).requires_grad_()
    with torch.inference_mode():
        seen = LogQuantizer(f64(0.7), 20, R, 4).fake_quantize(x)
    value = LogQuantizer(scale, 20, R, 4).fake_quantize(x)
    assert torch.equal(value.detach(), seen)
    value.sum().backward()
    assert scale.grad is not None
    # Straight through: (x_hat - x) / s for each value inside the range, x_hat / s for each above its end, which is s.
    torch.testing.assert_close(scale.grad * 0.7, torch.where(x > 0.7, seen, seen - x).sum())


@torch.no_grad()
def test_a_quantizer_is_compiled_whole():
    quantizer = UniformQuantizer(torch.tensor(0.1), torch.tensor(3.0), 4)
    compiled = torch.compile(quantizer.fake_quantize, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(TOKENS), quantizer.fake_quantize(TOKENS))


def test_the_largest_level_decides_a_symmetric_quantizer():
    found = UniformQuantizer.reaching(torch.tensor([[3.5], [0.0]]), 4)
    assert found.levels()[[0, -1]].tolist() == [-4.0, 3.5]
    assert float(found.scale[1]) > 0


def test_kinds_that_take_more_than_one_number():
    with pytest.raises(ValueError, match="largest level alone does not determine a quantizer of the kind log"):
        LogQuantizer.reaching(torch.ones(()), 4)


@given(tensors(), bits, scales, scales)
def test_twin_takes_the_nearest_level_of_the_values_sign(x, width, scale, negative):
    """By brute force over the levels: h of them above zero with zero, h below."""
    half = 2 ** (width - 1)
    above = [scale * code for code in range(half)]
    below = [-negative * code for code in range(half + 1)]
    hat = TwinUniformQuantizer(f64(scale), f64(negative), width).fake_quantize(x)
    for value, got in zip(x.tolist(), hat.tolist(), strict=True):
        levels = above if value >= 0 else below
        least = min(abs(value - level) for level in levels)
        assert abs(value - got) <= least + 1e-9 * max(abs(value), scale, negative)
        assert any(got == pytest.approx(level, rel=1e-12, abs=0) for level in levels)


@given(tensors(low=-1.0, high=2.0), bits, st.integers(0, 12), st.booleans())
def test_split_takes_the_finer_grid_below_the_split(x, width, power, sums):
    """Its codes fill the bits, and values beyond 0 and 1 get the first and the last one."""
    last, split = 2 ** (width - 1) - 1, 2.0**-power
    quantizer = SplitUniformQuantizer(f64(split / last), f64(1.0 / last), width, sums)
    x = torch.cat([x, f64(0.0, 1.0, -1.0, 1e9)])
    codes, expected = [], []
    for value in x.tolist():
        fine = value < float(quantizer.split)
        step = split / last if fine else 1 / last
        level = min(max(round(value / step), 0), last)
        codes.append(level if fine else level + last + 1)
        other = round(split * last) / last if fine else split
        expected.append(level * step + (other if sums else 0))
    assert quantizer.quantize(x).tolist() == codes
    assert quantizer.fake_quantize(x).tolist() == pytest.approx(expected, rel=1e-12, abs=1e-15)
    assert quantizer.dequantize(torch.tensor(codes, dtype=torch.uint8)).tolist() == pytest.approx(expected, abs=1e-15)


# --- gradients: exact values forwards, and backwards those of LSQ, by finite differences ------------------------------


BITS = 4
TOP, HALF = 2**BITS - 1, 2 ** (BITS - 1)
STEP = 1e-6  # of the finite differences; values are farther than this, times any code, from a kink of the surrogate
MARGIN = 1e-3


def between(x, low, high):
    """x brought between two ends, written without the functions under test."""
    return torch.where(x < low, low, torch.where(x > high, high, x))


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


def log_of(**options):
    return LogQuantizer(f64(0.9), 20, R, BITS, **options)


SATURATED = float(log_levels(20, R, BITS, beyond="saturate")[-1])
CHANNELS = f64(0.05, 0.11, 0.2).view(3, 1), f64(3.0, 8.0, 12.0).view(3, 1)

# (quantizer, by hand, the least and the largest value that are tried)
CASES = {
    "uniform": (UniformQuantizer(f64(0.13), f64(6.0), BITS), by_hand_uniform, -2.0, 2.0),
    "uniform, whole range above zero": (UniformQuantizer(f64(0.13), f64(0.0), BITS), by_hand_uniform, -1.0, 3.0),
    "uniform per channel": (UniformQuantizer(*CHANNELS, BITS), by_hand_uniform, -2.0, 3.0),
    "log": (log_of(), by_hand_log(0.0), 0.0, 1.5),
    "log, saturating": (log_of(beyond="saturate"), by_hand_log(SATURATED), 0.0, 1.5),
    "log, zero beyond": (log_of(beyond="zero", rounding="log"), by_hand_log(0.0), 0.0, 1.5),
    "log with an integer table": (log_of(width=16, headroom=8), by_hand_log(0.0), 0.0, 1.5),
    "log with offset": (log_of(offset=GELU_OFFSET), by_hand_log(0.0, GELU_OFFSET, GELU_OFFSET), -GELU_OFFSET, 1.5),
    "log that keeps its offset": (
        log_of(offset=GELU_OFFSET, keeps_offset=True),
        by_hand_log(0.0, GELU_OFFSET),
        -GELU_OFFSET,
        1.5,
    ),
    "twin": (TwinUniformQuantizer(f64(0.2), f64(0.02), BITS), by_hand_twin, -0.4, 2.0),
    "split": (SplitUniformQuantizer(f64(0.01), f64(0.12), BITS), by_hand_split, 0.0, 1.0),
    "split that sums": (SplitUniformQuantizer(f64(0.01), f64(0.12), BITS, True), by_hand_split, 0.0, 1.0),
}
on_any_device = pytest.mark.parametrize("accelerator", [False, True], ids=["processor", "accelerator"])
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


@given(st.data(), dtypes)
def test_rounding_is_exact_and_its_gradient_is_one(data, dtype):
    halves = torch.arange(-3.5, 4, dtype=dtype)  # are rounded to even
    x = torch.cat([data.draw(tensors(dtype)), halves]).requires_grad_()
    weight = normal(len(x)).to(dtype)
    value = round_ste(x)
    assert torch.equal(value, x.detach().round())
    assert value[-8:].tolist() == [-4.0, -2.0, -2.0, 0.0, 0.0, 2.0, 2.0, 4.0]
    (value * weight).sum().backward()
    assert torch.equal(x.grad, weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@every_case
def test_gradients_change_no_value(quantizer, by_hand, low, high, dtype):
    """To the bit, signs of zeros included; thresholds, ends and what lies far beyond them are among the values."""
    quantizer = quantizer.map(lambda value: value.to(dtype))
    levels = quantizer.levels()
    edges = torch.cat([levels, (levels[1:] + levels[:-1]) / 2])
    x = torch.cat([normal(1000).to(dtype), edges.to(dtype), f64(0.0, -0.0, 1e9, -1e9, 1e-30).to(dtype)]).expand(3, -1)
    plain = quantizer.fake_quantize(x)
    made, _ = trained(quantizer)
    bits = torch.int32 if dtype == torch.float32 else torch.int64
    given = x.clone().requires_grad_()
    with torch.no_grad():
        silent = made.fake_quantize(given)
    assert not silent.requires_grad
    for value in (made.fake_quantize(given), quantizer.fake_quantize(given), made.fake_quantize(x), silent):
        assert value.requires_grad or value is silent
        assert torch.equal(value.detach().view(bits), plain.view(bits))
    assert torch.equal(plain, quantizer.dequantize(quantizer.quantize(x)))


@every_case
def test_clamped_parts_are_the_integers_of_the_codes(quantizer, by_hand, low, high):
    """Uniform and twin quantizers round and clamp x / unit; the others name no such parts."""
    x = torch.linspace(2 * low - high, 2 * high - low, 999, dtype=torch.float64).expand(3, -1)
    parts = [torch.clamp((x / unit).round(), least, most) for unit, least, most in quantizer.clamp_bounds()]
    assert len(parts) == {"uniform": 1, "twin": 2}.get(quantizer.kind, 0)
    integers = quantizer.integers(quantizer.quantize(x)) if parts else []
    assert all(torch.equal(part, each.double()) for part, each in zip(parts, integers, strict=True))


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


@on_any_device
@every_case
def test_values_that_are_kept_stay_and_take_no_part(quantizer, by_hand, low, high, accelerator, monkeypatch):
    """QDrop: the gradient by x is 1 where a value is kept, and the parameters' are those of the other values alone."""
    monkeypatch.setattr("adalog.quantizers.quantizer.waits_for_launches", lambda device: accelerator)
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


@on_any_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@every_case
def test_gradients_in_slices_are_those_of_the_whole(quantizer, by_hand, low, high, dtype, accelerator, monkeypatch):
    """To float rounding, also where values lie in memory in another order."""
    monkeypatch.setattr("adalog.quantizers.quantizer.waits_for_launches", lambda device: accelerator)
    monkeypatch.setattr("adalog.quantizers.quantizer._SLICE_ELEMENTS", 100)
    quantizer = quantizer.map(lambda value: value.to(dtype))
    x, weight = ((normal(*shape, seed=seed) * 2).to(dtype) for shape, seed in (((350, 3, 2), 0), ((2, 3, 350), 1)))

    def gradients(way):
        made, parameters = trained(quantizer)
        given = x.clone().requires_grad_()
        (way(made, given.permute(2, 1, 0)) * weight).sum().backward()
        return [given.grad, *(parameter.grad for parameter in parameters)]

    def whole(made, values):
        clipped, step = between(values, *made.bounds()), made.step(values)
        hat = quantizer.fake_quantize(values.detach()) - made.kept_offset
        return clipped + step * ((hat - clipped) / step).detach()

    for found, wanted in zip(gradients(lambda made, values: made.fake_quantize(values)), gradients(whole), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4 if dtype == torch.float32 else 1e-10, atol=1e-5)


@given(st.floats(-4, -0.1), st.floats(0.1, 4))
@example(-1.0, 1.0)
def test_bounds_get_the_gradients_of_scale_and_zero_point(lower, upper):
    """s = (u - l) / L, and z = -l / s with its rounding left out."""
    ends = f64(lower).requires_grad_(), f64(upper).requires_grad_()
    scale, zero_point = bounds_to_uniform(*ends, BITS)
    assert float(zero_point.detach()) == round(float(zero_point.detach()))
    s = (upper - lower) / TOP
    by_scale = torch.autograd.grad(scale, ends, retain_graph=True)
    assert [float(each) for each in by_scale] == pytest.approx([-1 / TOP, 1 / TOP], rel=1e-12)
    by_zero_point = torch.autograd.grad(zero_point, ends)
    wanted = [-1 / s - lower / (s * s * TOP), lower / (s * s * TOP)]
    assert [float(each) for each in by_zero_point] == pytest.approx(wanted, rel=1e-9, abs=1e-9)


def test_a_bound_on_the_wrong_side_of_zero_has_no_gradient():
    """The range is widened to hold zero, whatever that bound is."""
    ends = f64(0.5).requires_grad_(), f64(2.0).requires_grad_()
    gradients = torch.autograd.grad(bounds_to_uniform(*ends, BITS)[0], ends)
    assert [float(each) for each in gradients] == [0, pytest.approx(1 / TOP)]
