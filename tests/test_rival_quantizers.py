"""The quantizers that other methods bring along: twin, split, and a zero beyond the last code."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adalog.quantizers import (
    SplitUniformQuantizer,
    TwinUniformQuantizer,
    UniformQuantizer,
    log_dequantize,
    log_levels,
    log_quantize,
    symmetric_zero_point,
)
from strategies import KINDS, bits, dtypes, f64, log_fake_quantize, scales, tensors

# --- twin uniform -------------------------------------------------------------------------------------------------


def twin_of(scale, negative, width, dtype=torch.float64):
    return TwinUniformQuantizer(torch.tensor(scale, dtype=dtype), torch.tensor(negative, dtype=dtype), width)


@given(bits, scales, scales, dtypes)
def test_twin_representable_values_are_fixed_points(width, scale, negative, dtype):
    quantizer, code = twin_of(scale, negative, width, dtype), torch.arange(2**width, dtype=dtype)
    value = quantizer.dequantize(code)
    assert torch.equal(quantizer.quantize(value), code)
    assert torch.equal(quantizer.fake_quantize(value), value)


@given(tensors(), bits, scales, scales)
def test_twin_codes_are_whole_in_range_and_monotone(x, width, scale, negative):
    code = twin_of(scale, negative, width).quantize(x.sort().values)
    assert torch.equal(code, code.round())
    assert bool(((code >= 0) & (code < 2**width)).all())
    assert bool((code.diff() >= 0).all())


@given(tensors(), bits, scales, scales)
def test_twin_takes_the_nearest_level_of_the_values_sign(x, width, scale, negative):
    """By brute force over the levels: h of them above zero with zero, h below."""
    half = 2 ** (width - 1)
    above = [scale * code for code in range(half)]
    below = [-negative * code for code in range(half + 1)]
    hat = twin_of(scale, negative, width).fake_quantize(x)
    for value, got in zip(x.tolist(), hat.tolist(), strict=True):
        levels = above if value >= 0 else below
        least = min(abs(value - level) for level in levels)
        assert abs(value - got) <= least + 1e-9 * max(abs(value), scale, negative)
        assert any(got == pytest.approx(level, rel=1e-12, abs=0) for level in levels)


def test_twin_keeps_zero_and_the_offset():
    quantizer = twin_of(0.5, 0.17 / 8, 4)
    assert float(quantizer.fake_quantize(f64(0.0))) == 0
    assert float(quantizer.fake_quantize(f64(-0.17))) == pytest.approx(-0.17)
    assert float(quantizer.fake_quantize(f64(100.0))) == 3.5


@given(tensors(), bits, st.integers(-10, 10))
def test_twin_with_equal_scales_is_symmetric_uniform(x, width, exponent):
    scale = 2.0**exponent
    uniform = UniformQuantizer(f64(scale), f64(symmetric_zero_point(width)), width)
    twin = twin_of(scale, scale, width)
    assert torch.equal(twin.quantize(x), uniform.quantize(x))
    assert torch.equal(twin.fake_quantize(x), uniform.fake_quantize(x))


# --- beyond="zero", the released code's reading -------------------------------------------------------------------


@pytest.mark.parametrize("width", [2, 3, 4, 6, 8])
@pytest.mark.parametrize(("base", "r", "table"), KINDS)
def test_the_released_reading_has_one_value_more_than_codes(width, base, r, table):
    """2**bits levels (fewer where rounded mantissas are equal), and zero."""
    count = len(log_levels(base, r, width, beyond="saturate", table=table).unique())
    powers = torch.exp2(-torch.arange(2**width + 3, dtype=torch.float64) * base / r)
    x = torch.cat([powers, powers.new_zeros(1)])
    assert len(log_fake_quantize(x, f64(1.0), base, r, width, beyond="zero", table=table).unique()) == count + 1
    code = log_quantize(x, f64(1.0), base, r, width, beyond="zero", table=table)
    assert code.unique().tolist() == list(range(2**width + 1))
    assert not log_dequantize(f64(2.0**width), f64(3.0), base, r, width, beyond="zero", table=table).any()


# --- split uniform ------------------------------------------------------------------------------------------------


def split_of(power, width, sums=False, dtype=torch.float64):
    last = 2 ** (width - 1) - 1
    return SplitUniformQuantizer(
        torch.tensor(2.0**-power / last, dtype=dtype), torch.tensor(1.0 / last, dtype=dtype), width, sums
    )


@given(tensors(low=0.0, high=1.0), bits, st.integers(0, 12), st.booleans())
def test_split_takes_the_finer_grid_below_the_split(x, width, power, sums):
    quantizer = split_of(power, width, sums)
    last, split = 2 ** (width - 1) - 1, 2.0**-power
    codes, expected = [], []
    for value in x.tolist():
        fine = value < float(quantizer.split)
        step = split / last if fine else 1 / last
        level = round(value / step)
        codes.append(level if fine else level + last + 1)
        other = round(split * last) / last if fine else split
        expected.append(level * step + (other if sums else 0))
    assert quantizer.quantize(x).tolist() == codes
    assert quantizer.fake_quantize(x).tolist() == pytest.approx(expected, rel=1e-12, abs=1e-15)
    assert quantizer.dequantize(torch.tensor(codes, dtype=torch.uint8)).tolist() == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("width", range(2, 9))
def test_split_codes_fill_the_bits(width):
    quantizer = split_of(3, width)
    x = torch.linspace(0, 1, 4001, dtype=torch.float64)
    codes = quantizer.quantize(x)
    assert (float(codes.min()), float(codes.max())) == (0, 2**width - 1)
    assert float(quantizer.quantize(x.new_tensor(1e9))) == 2**width - 1
    assert float(quantizer.quantize(x.new_tensor(-1.0))) == 0
    error = (quantizer.fake_quantize(x) - x).abs()
    last = 2 ** (width - 1) - 1
    assert float(error[x < 1 / 8].max()) <= 1 / 16 / last + 1e-12
    assert float(error.max()) <= 0.5 / last + 1e-12
