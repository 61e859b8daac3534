"""Define steps without side effects, which `torch.compile` can fuse into one kernel (see `regions`)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adalog.runtime.integer.memory import is_transposed


@dataclass(frozen=True)
class Pure:
    """A step as a function of tensors alone: function(*choices, *values, *tensors).

    choices: the constants that the compiled code depends on. tensors: the step's own parameters. Steps with equal
    choices share a kernel.
    """

    function: Callable[..., Any]
    choices: tuple[Any, ...]
    tensors: tuple[Tensor, ...]


def uniform_digit(
    dtype: torch.dtype, constant: int, x: Tensor, scale: Tensor, low: Tensor, high: Tensor
) -> list[Tensor]:
    """Compute the digit of each value's uniform code: round(x / scale) - constant, clamped to low ... high.

    Raises TypeError if the values and the scale have different types.
    """
    if x.dtype != scale.dtype:
        raise TypeError(f"the values are {x.dtype}, but the model is {scale.dtype}: convert one of them")
    code = torch.div(x, scale).round()
    code = code - constant if constant else code
    return [_for_products(torch.minimum(torch.maximum(code, low), high).to(dtype))]


def log_digits(dtype: torch.dtype, x: Tensor, offset: Tensor, thresholds: Tensor, *tables: Tensor) -> list[Tensor]:
    """Compute the digits of each value's logarithmic code: the number of thresholds that the value does not exceed.

    thresholds: descending, 2**bits - 1 of them; the code is found bit by bit, highest bit first. tables: the digit of
    every code, one tensor per factor. Raises TypeError if the values and the thresholds have different types.
    """
    if x.dtype != thresholds.dtype:
        raise TypeError(f"the values are {x.dtype}, but the model is {thresholds.dtype}: convert one of them")
    value, edges = x + offset, thresholds.unbind()
    above: list[Tensor] = []
    step = len(tables[0]) // 2
    while step:
        above.insert(0, value > _select(edges[step - 1 :: 2 * step], above))
        step //= 2
    return [_for_products(_select(table.unbind(), above).to(dtype)) for table in tables]


def to_floats(sums: Tensor, bias: Tensor | None, scale: Tensor) -> Tensor:
    """Convert the accumulators of a site of one part as `reference.finish` does: sums times scale, plus bias."""
    result = sums.to(scale.dtype) * scale
    return result if bias is None else result + bias


def _select(values: Sequence[Tensor], above: Sequence[Tensor]) -> Tensor:
    """Select one of 2**n values by n masks, one per bit of its number, lowest bit first. A set mask means a 0."""
    for mask in above:
        values = [torch.where(mask, zero, one_value) for zero, one_value in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def _for_products(digit: Tensor) -> Tensor:
    """Return a digit as contiguous rows, or as contiguous columns if it is transposed. Products take both."""
    return digit.mT.contiguous().mT if is_transposed(digit) else digit.contiguous()
