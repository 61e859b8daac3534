"""The result of one product's search: quantizers, weight codes, and the fold of the preceding norm."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from adalog.quantizers.quantizer import Quantizer


@dataclass(frozen=True)
class QuantizedTensor:
    """A stored tensor: uint8 codes and the quantizer that gives them values.

    codes: the shape of the tensor. A search may choose other codes than `quantizer.quantize` does.
    """

    codes: Tensor
    quantizer: Quantizer

    @staticmethod
    def nearest(values: Tensor, quantizer: Quantizer) -> QuantizedTensor:
        """Return the values with the codes that `quantizer.quantize` gives them."""
        return QuantizedTensor(quantizer.quantize(values).to(torch.uint8), quantizer)

    @property
    def bits(self) -> int:
        return self.quantizer.bits

    def dequantize(self) -> Tensor:
        return self.quantizer.dequantize(self.codes)

    def map(self, function: Callable[[Tensor], Tensor]) -> QuantizedTensor:
        """Apply a function to the quantizer's parameters; the codes stay."""
        return replace(self, quantizer=self.quantizer.map(function))

    def rescale(self, factor: float | Tensor) -> QuantizedTensor:
        """Multiply the scales by `factor`; the codes stay."""
        return replace(self, quantizer=self.quantizer.rescale(factor))

    def to(self, device: torch.device) -> QuantizedTensor:
        return QuantizedTensor(self.codes.to(device), self.quantizer.to(device))

    def describe(self, count: int = 0) -> str:
        return self.quantizer.describe(count)


@dataclass(frozen=True)
class Fold:
    """The reparameterization of a norm (RepQ-ViT, Sec. 3.3): it outputs x / ratio - beta, which its linears undo.

    ratio, beta: (C,) each.
    """

    ratio: Tensor
    beta: Tensor

    @staticmethod
    def sharing(scale: Tensor, zero_point: Tensor, *, rounds: bool = True) -> Fold:
        """Return the fold with which one shared quantizer gives the codes of one quantizer per channel (RepQ-ViT).

        With s = mean(scale) and z = mean(zero_point), x / ratio - beta = s (x / scale + zero_point - z).

        scale, zero_point: (C,), the parameters of the per-channel quantizers.
        rounds: round z before it is used, as AdaLog does and RepQ-ViT does not.
        """
        mean = scale.mean()
        floor = mean * 1e-4  # without it, a constant channel would make the norm's folded weight unbounded
        ratio = scale.clamp(min=floor) / mean
        shared = zero_point.mean()
        return Fold(ratio, mean * ((shared.round() if rounds else shared) - zero_point))

    def norm(self, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return (weight, bias) of the norm that outputs x / ratio - beta. Without a bias, return only the weight."""
        return (weight / self.ratio, *([] if bias is None else [bias / self.ratio - self.beta]))

    def activation(self, x: Tensor) -> Tensor:
        """Return the output of the folded norm, (..., C), given the output x of the original norm."""
        return (x / self.ratio).sub_(self.beta)

    def weight(self, weight: Tensor) -> Tensor:
        """Return the weight (O, C) that multiplies the folded activation."""
        return weight * self.ratio

    def linear(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (weight, bias) of the linear that maps x / ratio - beta to its original output. weight: (O, C)."""
        folded = self.weight(weight)
        shift = (folded.double() @ self.beta.double()).to(weight.dtype)
        return folded, shift if bias is None else bias + shift

    def to(self, device: torch.device) -> Fold:
        return Fold(self.ratio.to(device), self.beta.to(device))


def decibels(signal: float, noise: float) -> float:
    """Return the signal-to-noise ratio of two sums of squares [dB]: inf without noise, -inf without a signal."""
    if noise <= 0:
        return math.inf
    ratio = signal / noise
    return 10 * math.log10(ratio) if ratio > 0 else -math.inf


@dataclass(frozen=True)
class Assignment:
    """The quantizers of a product's operands, the fold of its norm, and the SQNR of its output in calibration [dB].

    left, right: None if the operand stays float.
    right: transposed, as in the search. A `QuantizedTensor` if the search has chosen the codes of a weight, else a
        quantizer.
    bias: (O,), replaces the biases of the sites once the operands are quantized; it includes the effect of a fold and
        of the offset of a lifted input. None: the sites keep their biases.
    """

    left: Quantizer | None
    right: Quantizer | QuantizedTensor | None
    fold: Fold | None = None
    sqnr: float = math.nan
    bias: Tensor | None = None

    def to(self, device: torch.device) -> Assignment:
        """Return the assignment on another device."""
        parts = {name: getattr(self, name) for name in ("left", "right", "fold", "bias")}
        moved: dict[str, Any] = {name: None if part is None else part.to(device) for name, part in parts.items()}
        return replace(self, **moved)
