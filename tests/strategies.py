"""What hypothesis draws in several test modules; how it runs is said in conftest.py."""

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from adalog.quantizers import log_dequantize, log_quantize

R = 37
KINDS = [(1, 1, False), (1, 2, False), (20, R, True), (20, R, False), (2, R, True), (137, R, True)]  # (q, r, table)

bits = st.integers(2, 8)
q = st.integers(1, 137)
scales = st.floats(2.0**-20, 2.0**20, width=32)
beyond = st.sampled_from(["saturate", "zero", "zero-coded"])
rounding = st.sampled_from(["log", "nearest"])
dtypes = st.sampled_from([torch.float32, torch.float64])
seeds = st.integers(0, 2**31 - 1)


def zero_points(width: int) -> st.SearchStrategy[int]:
    """Whole numbers that are codes of `width` bits."""
    return st.integers(0, 2**width - 1)


def tensors(
    dtype: torch.dtype = torch.float64, low: float = -100.0, high: float = 100.0, max_size: int = 24
) -> st.SearchStrategy[Tensor]:
    """Vectors with the values hypothesis likes: zeros, limits, repetitions, tiny ones."""
    width = 32 if dtype == torch.float32 else 64
    values = st.lists(st.floats(low, high, width=width), min_size=1, max_size=max_size)
    return values.map(lambda row: torch.tensor(row, dtype=dtype))


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Reproducible Gaussian values."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def log_fake_quantize(x: Tensor, scale: Tensor, q: Tensor | int, r: int, bits: int, **choices: Any) -> Tensor:
    """The level that x's logarithmic code stands for: codes take all choices, levels all but the rounding."""
    of_levels = {name: value for name, value in choices.items() if name != "rounding"}
    code = log_quantize(x, scale, q, r, bits, **choices)
    return log_dequantize(code, scale, q, r, bits, **of_levels).to(x.dtype)


def f64(*values: float) -> Tensor:
    """A float64 scalar, or a vector of several values."""
    return torch.tensor(values if len(values) > 1 else values[0], dtype=torch.float64)
