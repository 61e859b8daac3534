"""Offsets that a bias absorbs, and convolutions as products, leave outputs as they were."""

import pytest
import torch
from torch.nn.functional import conv2d, gelu

from adalog.graph.convolution import patches
from adalog.graph.rewrite import absorb_offset
from adalog.quantizers import LogQuantizer
from strategies import R, normal

CHANNELS = 16
# Sums of about 20 terms of size up to about 100, in float64.
EXACT = {"rtol": 0, "atol": 1e-11}


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


def test_absorbing_an_offset_leaves_its_inputs():
    weight, bias = normal(6, CHANNELS), normal(6)
    before = weight.clone(), bias.clone()
    absorb_offset(weight, bias, 0.17)
    assert torch.equal(weight, before[0])
    assert torch.equal(bias, before[1])


@pytest.mark.parametrize(
    ("stride", "padding", "dilation"), [((4, 4), (0, 0), (1, 1)), ((2, 1), (1, 2), (1, 1)), ((1, 2), (2, 0), (2, 1))]
)
def test_patches_make_a_convolution_a_product(stride, padding, dilation):
    x, weight = normal(2, 3, 12, 10), normal(5, 3, 4, 2, seed=1)
    expected = conv2d(x, weight, None, stride, padding, dilation)
    rows = patches(x, (4, 2), stride, padding, dilation)
    product = (rows @ weight.flatten(1).T).transpose(1, 2).reshape(expected.shape)
    torch.testing.assert_close(product, expected, **EXACT)
