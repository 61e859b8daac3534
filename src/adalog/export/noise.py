"""Inputs on which exports are tried before they are written."""

import torch
from torch import Tensor

from adalog.quantized import QuantizedProgram


def noise_like(quantized: QuantizedProgram, count: int) -> tuple[Tensor, ...]:
    """Inputs of the calibration's shape: floats are normal noise, the same each time, and other types are zero."""
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn((count, *value.shape[1:]), generator=generator, dtype=value.dtype)
        if value.is_floating_point()
        else value.new_zeros((count, *value.shape[1:]))
        for value in quantized.example
    )
