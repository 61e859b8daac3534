"""Fake quantization and its gradient: what the compiled library makes is what PyTorch makes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adalog import library
from adalog.quantizers import LogQuantizer, UniformQuantizer, elementwise
from strategies import R

pytestmark = pytest.mark.skipif(library.load()[0] is None, reason=library.load()[1])

OFFSET = 0.1699712
# (shape of the values, shape of the parameters)
LAYOUTS = [
    ((3, 17, 40), ()),
    ((3, 17, 40), (1, 1, 1)),
    ((2, 5, 7, 64), (1, 5, 1, 1)),
    ((2, 6, 5, 5), (6, 1, 1)),
    ((2, 3, 4, 20), (3, 4, 1)),
    ((3, 2500), (3, 1)),
]
LEFT_TO_PYTORCH = [((3, 17, 40), (40,)), ((2, 5, 3), (5, 1)), ((2, 3, 4, 20), (2, 1, 4, 1)), ((0, 4), ())]
KINDS = {
    "uniform": UniformQuantizer,
    "log": lambda scale, _, bits: LogQuantizer(8 * scale, 20, R, bits, width=16),
    "log of a base below 2": lambda scale, _, bits: LogQuantizer(8 * scale, 9, R, bits, offset=OFFSET),
    "log that keeps its offset": lambda scale, _, bits: LogQuantizer(
        8 * scale, 37, R, bits, offset=OFFSET, keeps_offset=True
    ),
    "log, saturating": lambda scale, _, bits: LogQuantizer(8 * scale, 30, R, bits, beyond="saturate"),
}
SPECIAL = [0.0, -0.0, 1e-42, -1e-42, 3e38, -3e38, float("inf"), float("-inf"), float("nan")]


def normal(shape, seed):
    return 2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def parameters(shape, bits, seed):
    scale = normal(shape, seed).abs() * 0.1 + 0.05
    zero_point = (normal(shape, seed + 1).abs() * 2**bits / 4).round().clamp(0, 2**bits - 1)
    return scale.requires_grad_(), zero_point.requires_grad_()


def both(run):
    """What a function returns with the library, and without."""
    compiled = run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(elementwise, "_functions", dict)
        return compiled, run()


@given(st.sampled_from(LAYOUTS), st.integers(2, 8), st.sampled_from(sorted(KINDS)), st.booleans(), st.integers(0, 999))
def test_training_is_that_of_pytorch(layout, bits, kind, mixed, seed):
    shape, own = layout
    if kind != "uniform" and torch.Size(own).numel() > 1:
        own = ()  # a logarithmic quantizer has one scale
    kept = (normal(shape, seed + 2) > 1).float() if mixed else None

    def run():
        scale, zero_point = parameters(own, bits, seed)
        x = normal(shape, seed + 3).requires_grad_()
        hat = KINDS[kind](scale, zero_point, bits).fake_quantize(x, kept)
        hat.backward(normal(shape, seed + 4))
        return hat.detach(), x.grad, scale.grad, zero_point.grad

    scale, zero_point = (value.detach() for value in parameters(own, bits, seed))
    assert elementwise.nearest_uniform(normal(shape, 0), scale, zero_point, bits) is not None
    (hat, by_x, *sums), (hat_there, by_x_there, *sums_there) = both(run)
    assert torch.equal(hat, hat_there)
    assert torch.equal(by_x, by_x_there)
    for one, other in zip(sums, sums_there, strict=True):
        if other is not None:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * torch.Size(shape).numel() ** 0.5 * 2**bits)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_special_values_are_those_of_pytorch(kind, bits):
    """So are values at the thresholds between codes, and next to them."""
    quantizer = KINDS[kind](torch.tensor(0.1), torch.tensor(1.0), bits)
    levels = quantizer.levels()
    middles = (levels[1:] + levels[:-1]) / 2
    around = [torch.nextafter(middles, middles + sign) for sign in (-1, 1)]
    values = torch.cat([torch.tensor(SPECIAL), levels, middles, *around, levels.square().sqrt()])
    found, there = both(lambda: quantizer.fake_quantize(values))
    assert torch.equal(found.isnan(), there.isnan())
    assert torch.equal(found.nan_to_num(), there.nan_to_num())
    assert torch.equal(found.nan_to_num().signbit(), there.nan_to_num().signbit())


@pytest.mark.parametrize("values", [normal((4, 5, 6), 0).transpose(0, 2), normal((8, 40), 1)[:, ::2], normal((), 2)])
def test_any_strides_will_do(values):
    quantizer = UniformQuantizer(torch.tensor(0.3), torch.tensor(3.0), 4)
    found, there = both(lambda: quantizer.fake_quantize(values))
    assert torch.equal(found, there)
    assert found.stride() == there.stride()  # products round by the layout of what they multiply


@pytest.mark.parametrize(("shape", "own"), LEFT_TO_PYTORCH)
def test_other_layouts_are_left_to_pytorch(shape, own):
    x, (scale, zero_point) = normal(shape, 0), parameters(own, 4, 1)
    if shape[0]:
        assert elementwise.nearest_uniform(x, scale.detach(), zero_point.detach(), 4) is None
    with torch.no_grad():
        found, there = both(lambda: UniformQuantizer(scale, zero_point, 4).fake_quantize(x))
    assert torch.equal(found, there)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_are_left_to_pytorch(dtype):
    x, one = torch.ones(4, 20, dtype=dtype), torch.tensor(1.0)
    assert elementwise.nearest_uniform(x, one, one, 4) is None
    assert UniformQuantizer(one, one, 4).fake_quantize(x).dtype == dtype
