"""A product of two operands: the input of a search, the error of its output, and the refit of every search."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from adalog.quantizers import Assignment, Fold, QuantizedTensor, Quantizer, UniformQuantizer, at_least_float32, decibels
from adalog.search.forms import error_base
from adalog.search.operand import Operand

_OUTPUTS = 1 << 20  # of a product, whose errors are computed at a time

Side = Quantizer | QuantizedTensor | None  # how an operand is quantized; None: it stays float


@dataclass(frozen=True)
class Product:
    """left @ right^T of one site, or of several linears that share an activation, on the calibration images.

    role: as in `Site.role`.
    right: transposed, (*batch, O, I), so that both operands have the summed dimension last.
    fold: the fold of the norm before the product, already applied to the operands.
    shared: the quantizer that the fold's channels share.
    ordered: the operands as they are once everything before the site is quantized.
    weights: weights of the output's squared errors, in the shape of the output, (*batch, T, O).
    row_splits: (O,), a number per row of a linear's weight; rows with the same number share a scale.
    start: an assignment to begin from.
    """

    role: str
    left: Operand
    right: Operand
    fold: Fold | None = None
    shared: UniformQuantizer | None = None
    ordered: tuple[Operand, Operand] | None = None
    weights: Tensor | None = None
    row_splits: Tensor | None = None
    start: Assignment | None = None

    @property
    def of_activations(self) -> bool:
        """True if both operands are computed (Q K^T, A V)."""
        return self.role in ("qk", "av")

    def assign(self, first: Side, second: Side) -> Assignment:
        """Return the assignment of these quantizers, with the SQNR of the output under them [dB]."""
        return self._with_sqnr(first, second, *self.output_power(first, second))

    def assign_refitted(self, first: Side, second: Quantizer) -> Assignment:
        """Return the assignment with the weight's nearest codes and `refit` scales; compute the outputs once."""
        stored = QuantizedTensor.nearest(self.right.values, second)
        rows = self._row_powers(first, stored)
        factor = rows.best_factor()
        right = stored.rescale(factor.to(stored.quantizer.scale.dtype))
        return self._with_sqnr(first, right, *rows.rescale(factor))

    def output_power(self, first: Side, second: Side) -> tuple[float, float]:
        """Return the sums of squares of the output, and of its error under these quantizers."""
        powers = torch.zeros(2, dtype=torch.float64, device=self.left.values.device)
        for x, x_hat, w, w_hat in self._slices(first, second):
            error = output_error(x, x_hat, w, w_hat)
            powers += torch.stack([_power(x @ w.transpose(-1, -2)), _power(error)])
        signal, noise = powers.tolist()
        if math.isfinite(signal + noise) or self.left.values.dtype == torch.float64:
            return signal, noise
        # The squares overflow.
        wide = [replace(operand, values=operand.values.double()) for operand in (self.left, self.right)]
        return replace(self, left=wide[0], right=wide[1]).output_power(first, second)

    def refit(self, first: Side, second: Quantizer) -> QuantizedTensor:
        """Return the weight's nearest codes, with the scales of `refit_scales`."""
        return self.refit_scales(first, QuantizedTensor.nearest(self.right.values, second))

    def refit_scales(self, first: Side, stored: QuantizedTensor) -> QuantizedTensor:
        """Return the same codes with the scales of least error of the output, which is quadratic in a row's scale."""
        factor = self._row_powers(first, stored).best_factor()
        return stored.rescale(factor.to(stored.quantizer.scale.dtype))

    def _with_sqnr(self, first: Side, second: Side, signal: float, noise: float) -> Assignment:
        if isinstance(first, QuantizedTensor):
            raise TypeError("the left operand of a product is an activation: pass a quantizer, not stored codes")
        return Assignment(first, second, self.fold, decibels(signal, noise))

    def _row_powers(self, first: Side, stored: QuantizedTensor) -> "_RowPowers":
        slices = []
        for x, x_hat, w, w_hat in self._slices(first, stored):
            output = x_hat @ w_hat.transpose(-1, -2)
            error = output_error(x, x_hat, w, w_hat)
            noise = error.square().sum(-2)
            slices.append([total.double() for total in (error.mul_(output).sum(-2), output.square_().sum(-2), noise)])
        grouped = self.right.values.ndim > 2  # then each slice has its own rows, else all slices have the same
        parts = zip(*slices, strict=True)
        return _RowPowers(*(torch.cat(part) if grouped else torch.stack(part).sum(0) for part in parts))

    def _slices(self, first: Side, second: Side) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Yield both operands, exact and quantized, (x, x_hat, w, w_hat), in slices of the first dimension.

        They are at least float32, since squares of float16 overflow.
        """
        left, right = self.left, self.right
        x_hat, w_hat = left.fake_quantize(first), right.fake_quantize(second)
        outputs = left.values[..., 0].numel() * right.values.shape[-2]
        count = min(-(-outputs // _OUTPUTS), len(left.values))
        lefts = (value.tensor_split(count) for value in (left.values, x_hat))
        rights = (value.tensor_split(count) if value.ndim > 2 else [value] * count for value in (right.values, w_hat))
        for slices in zip(*lefts, *rights, strict=True):
            x, x_slice, w, w_slice = (at_least_float32(value) for value in slices)
            yield x, x_slice, w, w_slice


@dataclass(frozen=True)
class _RowPowers:
    """Sums over the quantized output of each row of a weight, in float64.

    excess: the sum of output times error.
    size: the sum of squared outputs.
    noise: the sum of squared errors.
    """

    excess: Tensor
    size: Tensor
    noise: Tensor

    def best_factor(self) -> Tensor:
        """Return the factor of each row's scale that leaves the least error: (..., O, 1)."""
        share = self.excess / self.size.clamp(min=torch.finfo(self.size.dtype).tiny)
        return 1 - share.clamp(-1, 0.5).unsqueeze(-1)

    def rescale(self, factor: Tensor) -> tuple[float, float]:
        """Return the sums of squares of the exact output, and of the error with the scales multiplied by `factor`."""
        more = factor.squeeze(-1) - 1
        noise = self.noise + 2 * more * self.excess + more.square() * self.size
        signal = self.size - 2 * self.excess + self.noise
        total, error = torch.stack([signal.sum(), noise.clamp(min=0).sum()]).tolist()
        return max(0.0, total), error


def _power(values: Tensor) -> Tensor:
    """Return the sum of squares, which overwrite the values; it is float64 without a float64 copy of all values."""
    return values.square_().sum(-1).sum(dtype=torch.float64)


def output_error(x: Tensor, x_hat: Tensor, w: Tensor, w_hat: Tensor) -> Tensor:
    """Return x_hat w_hat^T - x w^T, computed without the cancellation of two large outputs."""
    return (x_hat - x) @ w_hat.transpose(-1, -2) + error_base(x, w.transpose(-1, -2), w_hat.transpose(-1, -2))
