"""The geometry of convolutions: what each output sees."""

import math

import torch
from torch import Tensor


def output_sizes(
    sizes: tuple[int, ...],
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
) -> tuple[int, ...]:
    """(height, width) of a convolution's output."""
    each = zip(sizes, kernel, stride, padding, dilation, strict=True)
    return tuple((size + 2 * pad - reach * (taps - 1) - 1) // step + 1 for size, taps, step, pad, reach in each)


def patches(
    x: Tensor,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    *,
    fill: int = 0,
) -> Tensor:
    """What each output of a convolution sees, of any type: (B, C, H, W) -> (B, L, C * kh * kw), padded with `fill`."""
    height, width = output_sizes(x.shape[2:], kernel, stride, padding, dilation)
    if any(padding):
        x = torch.nn.functional.pad(x, (padding[1], padding[1], padding[0], padding[0]), value=fill)
    x = x.contiguous()
    images, channels, down, across = x.stride()
    steps = (images, stride[0] * down, stride[1] * across, channels, dilation[0] * down, dilation[1] * across)
    seen = x.as_strided((len(x), height, width, x.shape[1], *kernel), steps)
    return seen.reshape(len(x), height * width, x.shape[1] * math.prod(kernel)).contiguous()
