"""Make noise inputs, on which an export is tried before it is written."""

import torch
from torch import Tensor

from adalog.quantized import QuantizedProgram

IMAGES = 2  # the number of noise images on which an export is certified before it is written


def noise_like(quantized: QuantizedProgram, count: int) -> tuple[Tensor, ...]:
    """Return inputs of the calibration's shape: floats are the same normal noise in each call, other dtypes zeros.

    Raises ArtifactError if the program has no example.
    """
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(value.shape, generator=generator, dtype=value.dtype) if value.is_floating_point() else value
        for value in quantized.zeros(count)
    )
