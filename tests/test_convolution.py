"""Convolutions as products of patches."""

import pytest
import torch
from torch.nn.functional import conv2d

from adalog.graph.convolution import patches
from strategies import normal


@pytest.mark.parametrize(
    ("stride", "padding", "dilation"), [((4, 4), (0, 0), (1, 1)), ((2, 1), (1, 2), (1, 1)), ((1, 2), (2, 0), (2, 1))]
)
def test_patches_make_a_convolution_a_product(stride, padding, dilation):
    x, weight = normal(2, 3, 12, 10), normal(5, 3, 4, 2, seed=1)
    expected = conv2d(x, weight, None, stride, padding, dilation)
    rows = patches(x, (4, 2), stride, padding, dilation)
    product = (rows @ weight.flatten(1).T).transpose(1, 2).reshape(expected.shape)
    torch.testing.assert_close(product, expected, rtol=0, atol=1e-11)
