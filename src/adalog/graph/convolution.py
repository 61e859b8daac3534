"""Compute the geometry of a 2-D convolution, and the patches that turn it into a matrix product."""

import math

import torch
from torch import Tensor

from adalog.graph.program import Node

Pair = tuple[int, ...]  # (vertical, horizontal)


def conv_geometry(node: Node) -> tuple[Pair, Pair, Pair, int]:
    """Return (stride, padding, dilation, groups) of an aten.conv2d node."""
    arguments = dict(zip(("stride", "padding", "dilation", "groups"), node.args[3:], strict=False)) | dict(node.kwargs)

    def pair(name: str, default: int) -> Pair:
        value = arguments.get(name, (default, default))
        value = (value,) if isinstance(value, int) else tuple(value)
        return value * 2 if len(value) == 1 else value

    return pair("stride", 1), pair("padding", 0), pair("dilation", 1), int(arguments.get("groups", 1))


def output_sizes(sizes: Pair, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair) -> Pair:
    """Return (height, width) of a convolution's output."""
    dims = zip(sizes, kernel, stride, padding, dilation, strict=True)
    return tuple((size + 2 * pad - reach * (taps - 1) - 1) // step + 1 for size, taps, step, pad, reach in dims)


def patches(x: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, *, fill: int = 0) -> Tensor:
    """Return the patch of the image that each output of a convolution reads: (B, C, H, W) -> (B, L, C * kh * kw)."""
    windows = patch_view(x, kernel, stride, padding, dilation, fill=fill)
    images, height, width = windows.shape[:3]
    return windows.reshape(images, height * width, x.shape[1] * math.prod(kernel)).contiguous()


def patch_view(x: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, *, fill: int = 0) -> Tensor:
    """Return the same patches as a view of the padded image, which takes no memory: (B, h, w, C, kh, kw)."""
    height, width = output_sizes(x.shape[2:], kernel, stride, padding, dilation)
    if any(padding):
        x = torch.nn.functional.pad(x, (padding[1], padding[1], padding[0], padding[0]), value=fill)
    x = x.contiguous()
    images, channels, down, across = x.stride()
    steps = (images, stride[0] * down, stride[1] * across, channels, dilation[0] * down, dilation[1] * across)
    return x.as_strided((len(x), height, width, x.shape[1], *kernel), steps)
