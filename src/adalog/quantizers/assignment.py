"""The result of a search for one product: both quantizers, a weight's codes, and the fold of the norm before it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from adalog.quantizers.quantizer import Quantizer


@dataclass(frozen=True)
class QuantizedTensor:
    """A tensor as it is stored: codes (uint8, the tensor's shape) and the quantizer that gives them values.

    The search that chooses the codes states them: they need not be those that the quantizer finds nearest.
    """

    codes: Tensor
    quantizer: Quantizer

    @staticmethod
    def nearest(values: Tensor, quantizer: Quantizer) -> QuantizedTensor:
        """The values as the codes that the quantizer finds nearest."""
        return QuantizedTensor(quantizer.quantize(values).to(torch.uint8), quantizer)

    @property
    def bits(self) -> int:
        return self.quantizer.bits

    def dequantize(self) -> Tensor:
        return self.quantizer.dequantize(self.codes)

    def map(self, function: Callable[[Tensor], Tensor]) -> QuantizedTensor:
        """The same codes, with a function applied to the quantizer's parameters."""
        return replace(self, quantizer=self.quantizer.map(function))

    def scaled(self, factor: float | Tensor) -> QuantizedTensor:
        """The same codes, with scales that are `factor` times as large."""
        return replace(self, quantizer=self.quantizer.scaled(factor))

    def to(self, device: torch.device) -> QuantizedTensor:
        return QuantizedTensor(self.codes.to(device), self.quantizer.map(lambda value: value.to(device)))

    def describe(self, count: int = 0) -> str:
        return self.quantizer.describe(count)


@dataclass(frozen=True)
class Fold:
    """A LayerNorm's reparameterisation: the norm outputs x / ratio - beta in place of x, and its linears undo that.

    ratio, beta: (C,) each (RepQ-ViT, Sec. 3.3; the outputs of the linears do not change).
    """

    ratio: Tensor
    beta: Tensor

    @staticmethod
    def sharing(scale: Tensor, zero_point: Tensor, *, rounds: bool = True) -> Fold:
        """The fold after which one quantizer gives exactly the codes that one quantizer per channel gave (RepQ-ViT).

        scale, zero_point: (C,), of the per-channel quantizers. The shared one has s = mean(scale) and
        z = mean(zero_point): x / ratio - beta = s (x / scale + zero_point - z). rounds: whether z is rounded before it
        is used, as AdaLog does and RepQ-ViT does not.
        """
        mean = scale.mean()
        floor = mean * 1e-4  # a constant channel would otherwise have a column of weights without bound
        ratio = scale.clamp(min=floor) / mean
        shared = zero_point.mean()
        return Fold(ratio, mean * ((shared.round() if rounds else shared) - zero_point))

    def norm(self, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """(weight, bias) of the LayerNorm that outputs x / ratio - beta."""
        return weight / self.ratio, bias / self.ratio - self.beta

    def activation(self, x: Tensor) -> Tensor:
        """The output of the folded norm in place of x: (..., C)."""
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


def decibels(signal: float, noise: float) -> float:
    """The signal-to-noise ratio of these sums of squares [dB]: inf without noise, -inf without a ratio above 0."""
    if noise <= 0:
        return math.inf
    ratio = signal / noise
    return 10 * math.log10(ratio) if ratio > 0 else -math.inf


@dataclass(frozen=True)
class Assignment:
    """The quantizers of a product's operands, the fold of its norm, and its output's SQNR [dB] in calibration.

    left, right: None for an operand that stays float. right: transposed, as the search sees it; a `QuantizedTensor`
    where the search has chosen the codes of a weight, a quantizer where each value takes the nearest code. bias: (O,),
    what the product's outputs are given in place of the sites' biases, for the operands as they are quantized (with a
    fold, and with the offset of a lifted input); None: their own.
    """

    left: Quantizer | None
    right: Quantizer | QuantizedTensor | None
    fold: Fold | None = None
    sqnr: float = math.nan
    bias: Tensor | None = None

    def to(self, device: torch.device) -> Assignment:
        """The same assignment on another device."""
        right = self.right
        if isinstance(right, Quantizer):
            right = right.map(lambda value: value.to(device))
        elif right is not None:
            right = right.to(device)
        left = None if self.left is None else self.left.map(lambda value: value.to(device))
        fold = None if self.fold is None else self.fold.to(device)
        bias = None if self.bias is None else self.bias.to(device)
        return replace(self, left=left, right=right, fold=fold, bias=bias)
