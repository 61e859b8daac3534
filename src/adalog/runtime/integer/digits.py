"""Split integers into digits that a product of bytes or of floats can multiply."""

import torch
from torch import Tensor

from adalog.runtime.reference import IntegerSite


def multiplies_rows(site: IntegerSite) -> bool:
    """Return True if a site is one product of two matrices whose right one is stored. It then multiplies bytes."""
    return site.weight is not None and site.groups == 1


class Digits:
    """The digits of integers from `least` to `most`: integer = constant + sum(factor * digit for each of `factors`).

    signed: True makes the digits signed bytes. False makes them whole numbers in float32, and `constant` is then 0.
    Integers that fit without splitting are their own digit. `largest` is the largest magnitude of a digit.
    """

    def __init__(self, least: int, most: int, *, signed: bool):
        self.dtype = torch.int8 if signed else torch.float32
        # For floats only tables of 16 bits, 0 to 65,535, are split: sums of products of 8-bit digits fit in float32.
        self._fits = least >= -128 and most <= 127 if signed else least != 0 or most <= 255
        self._least = 0 if self._fits else least
        count = 1 if self._fits else max(1, -(-(most - least).bit_length() // 8))
        self.factors = tuple(256**place for place in range(count))
        self._middle = 128 if signed and not self._fits else 0  # subtracted from each digit to make it signed
        self.constant = self._least + self._middle * sum(self.factors)
        self.largest = max(-least, most) if self._fits else 128 if signed else 255

    def padding(self, factor: int) -> int:
        """Return the digit of the integer 0 for this factor."""
        return 0 if self._fits else (-self._least // factor) % 256 - self._middle

    def split(self, integers: Tensor) -> list[Tensor]:
        """Split integers into digits of type `dtype`: one tensor per factor."""
        if self._fits:
            return [integers.to(self.dtype)]
        raised = integers - self._least
        return [(((raised >> (8 * place)) & 255) - self._middle).to(self.dtype) for place in range(len(self.factors))]
