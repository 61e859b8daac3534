"""Make noise inputs, on which an export is tried before it is written."""

import torch
from torch import Tensor

from adalog.quantized import QuantizedProgram


def noise_like(quantized: QuantizedProgram, count: int) -> tuple[Tensor, ...]:
    """Return inputs of the calibration's shape: floats are the same normal noise in each call, other dtypes zeros."""
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn((count, *value.shape[1:]), generator=generator, dtype=value.dtype)
        if value.is_floating_point()
        else value.new_zeros((count, *value.shape[1:]))
        for value in quantized.example
    )
