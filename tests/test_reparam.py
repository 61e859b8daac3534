"""The folds leave outputs as they were."""

import pytest
import torch
from torch.nn.functional import conv2d, gelu, layer_norm

from adalog.graph.reparam import patches
from adalog.graph.rewrite import absorb_offset
from adalog.quantizers import Fold, LogQuantizer, uniform_quantize
from strategies import R, normal

CHANNELS = 16
# Sums of about 20 terms of size up to about 100, in float64.
EXACT = {"rtol": 0, "atol": 1e-11}


def channel_quantizers(bits=4, channels=CHANNELS):
    """(scale, zero_point), each (C,), spread over two orders of magnitude."""
    scale = normal(channels, seed=1).exp() * 0.1
    zero_point = (normal(channels, seed=2) * 3 + 2 ** (bits - 1)).round().clamp(0, 2**bits - 1)
    return scale, zero_point


@pytest.mark.parametrize("has_bias", [True, False])
def test_folding_a_norm_and_its_linears_leaves_the_outputs(has_bias):
    fold = Fold.sharing(*channel_quantizers())
    gamma, shift = normal(CHANNELS, seed=3), normal(CHANNELS, seed=4)
    x = normal(30, CHANNELS, seed=5)
    y = layer_norm(x, (CHANNELS,), gamma, shift)
    folded = layer_norm(x, (CHANNELS,), *fold.norm(gamma, shift))
    torch.testing.assert_close(folded, y / fold.ratio - fold.beta, **EXACT)
    torch.testing.assert_close(folded, fold.activation(y), **EXACT)
    for seed, outputs in ((6, 3), (7, 40)):
        weight, bias = normal(outputs, CHANNELS, seed=seed), normal(outputs, seed=seed + 2) if has_bias else None
        new_weight, new_bias = fold.linear(weight, bias)
        before = y @ weight.T + (0 if bias is None else bias)
        torch.testing.assert_close(folded @ new_weight.T + new_bias, before, **EXACT)


def test_a_float32_fold_stays_close():
    wide = Fold.sharing(*channel_quantizers())
    fold = Fold(wide.ratio.float(), wide.beta.float())
    weight, bias, y = (normal(*shape, seed=3).float() for shape in ((40, CHANNELS), (40,), (30, CHANNELS)))
    new_weight, new_bias = fold.linear(weight, bias)
    assert new_weight.dtype == new_bias.dtype == torch.float32
    after = (y / fold.ratio - fold.beta) @ new_weight.T + new_bias
    torch.testing.assert_close(after, y @ weight.T + bias, rtol=0, atol=1e-4)


@pytest.mark.parametrize("bits", [2, 4, 6, 8])
def test_one_quantizer_codes_the_folded_input_as_each_channels_own(bits):
    """Exactly, where x is not on a threshold: R(x' / s) + z = R(x / s_c) + z_c."""
    scale, zero_point = channel_quantizers(bits)
    fold = Fold.sharing(scale, zero_point)
    fraction = torch.rand(200, CHANNELS, generator=torch.Generator().manual_seed(0)).double() * 0.98 - 0.49
    whole = torch.randint(-(2**bits), 2 ** (bits + 1), fraction.shape, generator=torch.Generator().manual_seed(1))
    x = (whole + fraction) * scale
    together = uniform_quantize(fold.activation(x), scale.mean(), zero_point.mean().round(), bits)
    assert torch.equal(together, uniform_quantize(x, scale, zero_point, bits))


def test_the_shared_zero_point_is_a_whole_number():
    """beta is that many steps; with the mean not rounded, folded codes would differ."""
    scale, zero_point = channel_quantizers()
    assert zero_point.mean() != zero_point.mean().round()
    steps = Fold.sharing(scale, zero_point).beta / scale.mean()
    torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-12)


def test_equal_channels_need_no_fold():
    fold = Fold.sharing(torch.full((5,), 0.3), torch.full((5,), 7.0))
    torch.testing.assert_close(fold.ratio, torch.ones(5), rtol=1e-6, atol=0)
    assert not fold.beta.any()


def test_a_channel_that_never_moves_keeps_the_fold_finite():
    scale, zero_point = channel_quantizers()
    scale[3], zero_point[3] = 1e-30, 0
    fold = Fold.sharing(scale, zero_point)
    assert fold.ratio.min() >= 0.99e-4
    y = normal(30, CHANNELS, seed=5)
    y[:, 3] = 0
    weight, bias = normal(6, CHANNELS, seed=6), normal(6, seed=7)
    new_weight, new_bias = fold.linear(weight, bias)
    assert new_weight.abs().max() < 1e3
    torch.testing.assert_close((y / fold.ratio - fold.beta) @ new_weight.T + new_bias, y @ weight.T + bias, **EXACT)


@pytest.mark.parametrize("offset", [0.17, 0.27846])
@pytest.mark.parametrize("has_bias", [True, False])
def test_absorb_offset(has_bias, offset):
    """A quantizer that keeps its offset, with the absorbing bias, puts out what one that takes it off does."""
    x, weight = gelu(normal(40, CHANNELS)), (normal(6, CHANNELS, seed=1) * 4).round() / 4
    bias = normal(6, seed=2) if has_bias else None
    scale = torch.tensor(2.0, dtype=torch.float64)
    taken, kept = (LogQuantizer(scale, 20, R, 4, offset=offset, keeps_offset=keeps) for keeps in (False, True))
    before = taken.fake_quantize(x) @ weight.T + (0 if bias is None else bias)
    after = kept.fake_quantize(x) @ weight.T + absorb_offset(weight, bias, offset)
    torch.testing.assert_close(after, before, **EXACT)


def test_folds_do_not_modify_their_inputs():
    scale, zero_point = channel_quantizers()
    gamma, weight, bias = normal(CHANNELS), normal(6, CHANNELS), normal(6)
    inputs = (scale, zero_point, gamma, weight, bias)
    before = [each.clone() for each in inputs]
    fold = Fold.sharing(scale, zero_point)
    fold.norm(gamma, gamma)
    fold.activation(gamma)
    fold.linear(weight, bias)
    absorb_offset(weight, bias, 0.17)
    assert all(torch.equal(now, then) for now, then in zip(inputs, before, strict=True))


@pytest.mark.parametrize(
    ("stride", "padding", "dilation"), [((4, 4), (0, 0), (1, 1)), ((2, 1), (1, 2), (1, 1)), ((1, 2), (2, 0), (2, 1))]
)
def test_patches_make_a_convolution_a_product(stride, padding, dilation):
    x, weight = normal(2, 3, 12, 10), normal(5, 3, 4, 2, seed=1)
    expected = conv2d(x, weight, None, stride, padding, dilation)
    rows = patches(x, (4, 2), stride, padding, dilation)
    product = (rows @ weight.flatten(1).T).transpose(1, 2).reshape(expected.shape)
    torch.testing.assert_close(product, expected, **EXACT)
