"""What a search decides of one product: both quantizers, a weight's codes, and how a norm's channels share a scale."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from adalog.quantizers.quantizer import Quantizer
from adalog.quantizers.uniform import UniformQuantizer


@dataclass(frozen=True)
class QuantizedTensor:
    """A tensor as it is stored: codes (uint8, the tensor's shape) and the quantizer that gives them values.

    Whoever chooses the codes says them: they need not be those that the quantizer would find nearest.
    """

    codes: Tensor
    quantizer: UniformQuantizer

    @staticmethod
    def nearest(values: Tensor, quantizer: UniformQuantizer) -> QuantizedTensor:
        """The values with the codes that the quantizer finds nearest."""
        return QuantizedTensor(quantizer.quantize(values).to(torch.uint8), quantizer)

    @property
    def bits(self) -> int:
        return self.quantizer.bits

    def dequantize(self) -> Tensor:
        return self.quantizer.dequantize(self.codes)

    def map(self, function: Callable[[Tensor], Tensor]) -> QuantizedTensor:
        """With a function applied to the quantizer's parameters; the codes stay."""
        return replace(self, quantizer=self.quantizer.map(function))

    def scaled(self, factor: float) -> QuantizedTensor:
        """With scales that are so many times as large; the codes stay."""
        return replace(self, quantizer=self.quantizer.scaled(factor))

    def to(self, device: torch.device) -> QuantizedTensor:
        return QuantizedTensor(self.codes.to(device), self.quantizer.map(lambda value: value.to(device)))

    def describe(self, count: int = 0) -> str:
        return self.quantizer.describe(count)


@dataclass(frozen=True)
class Fold:
    """A LayerNorm's reparameterisation: it puts out x / ratio - beta in place of x, and its linears take that back.

    ratio, beta: (C,) each (RepQ-ViT, Sec. 3.3; the outputs of the linears do not change).
    """

    ratio: Tensor
    beta: Tensor

    @staticmethod
    def sharing(scale: Tensor, zero_point: Tensor, *, rounds: bool = True) -> Fold:
        """x / ratio - beta quantizes per tensor exactly as x quantizes per channel (from RepQ-ViT).

        scale, zero_point: (C,), of per-channel quantizers. The shared one has s = mean(scale) and z = mean(zero_point),
        rounded before it is used (`rounds`; RepQ-ViT does not): x / ratio - beta = s (x / scale + zero_point - z).
        """
        mean = scale.mean()
        floor = mean * 1e-4  # a channel that never moves would otherwise blow up its weights' column without bound
        ratio = scale.clamp(min=floor) / mean
        shared = zero_point.mean()
        return Fold(ratio, mean * ((shared.round() if rounds else shared) - zero_point))

    def norm(self, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """(weight, bias) of the LayerNorm that puts out x / ratio - beta."""
        return weight / self.ratio, bias / self.ratio - self.beta

    def activation(self, x: Tensor) -> Tensor:
        """What the folded norm puts out in place of x: (..., C)."""
        return (x / self.ratio).sub_(self.beta)

    def weight(self, weight: Tensor) -> Tensor:
        """The weight (O, C) that meets the folded activation."""
        return weight * self.ratio

    def linear(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """(weight, bias) of the linear whose output on x / ratio - beta is what it was on x. weight: (O, C)."""
        folded = self.weight(weight)
        shift = (folded.double() @ self.beta.double()).to(weight.dtype)
        return folded, shift if bias is None else bias + shift

    def to(self, device: torch.device) -> Fold:
        return Fold(self.ratio.to(device), self.beta.to(device))


@dataclass(frozen=True)
class Assignment:
    """The quantizers of a product's operands (None: float), its norm's fold, and its output's SQNR [dB] in calibration.

    right: transposed, as the search sees it; a `QuantizedTensor` where the search has chosen the codes of a weight, a
    quantizer where they are to be the nearest.
    """

    left: Quantizer | None
    right: Quantizer | QuantizedTensor | None
    fold: Fold | None = None
    sqnr: float = math.nan

    def to(self, device: torch.device) -> Assignment:
        """The same on another device."""
        right = self.right
        if isinstance(right, Quantizer):
            right = right.map(lambda value: value.to(device))
        elif right is not None:
            right = right.to(device)
        left = None if self.left is None else self.left.map(lambda value: value.to(device))
        return replace(self, left=left, right=right, fold=None if self.fold is None else self.fold.to(device))
