"""One operand of a product: its values, and the format of its quantizer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from adalog.quantizers import Format, QuantizedTensor, Quantizer
from adalog.quantizers.fused import reshape_against


@dataclass(frozen=True)
class Operand:
    """One side of a product; the last dimension but one holds its rows.

    values: activations (T, I), weights (O, I), heads (B, H, N, D).
    mask: 1 for values that are quantized, 0 for the zero padding of a convolution; the same in each of its groups.
    alike: True if the rows are tokens, so that a sample can represent them all; False if they are channels.
    stacked: True if the first dimension of the values counts operands that are searched together (`stack`).
    """

    values: Tensor
    format: Format
    mask: Tensor | None = None
    alike: bool = True
    stacked: bool = False

    @staticmethod
    def stack(operands: "Sequence[Operand]") -> "Operand":
        """Stack operands of the same shape and format without masks; each keeps parameters of its own."""
        first = operands[0]
        own_dims = (0, *(dim + 1 for dim in first.format.own_dims))
        values = torch.stack([operand.values for operand in operands])
        return Operand(values, replace(first.format, own_dims=own_dims), alike=first.alike, stacked=True)

    @property
    def stack_size(self) -> int:
        return len(self.values) if self.stacked else 1

    def groups(self) -> Tensor:
        """Return the values as (G, T): one row per set of parameters."""
        own_dims = self.format.own_dims
        rest = [dim for dim in range(self.values.ndim) if dim not in own_dims]
        return self.values.permute(*own_dims, *rest).reshape(math.prod(self.groups_shape), -1)

    @property
    def groups_shape(self) -> list[int]:
        """The sizes of the dimensions that have parameters of their own."""
        return [self.values.shape[dim] for dim in self.format.own_dims]

    def reshape(self, parameters: Tensor) -> Tensor:
        """Reshape parameters (k, *groups) to (k, ...), so that they broadcast against k candidates of the values."""
        return reshape_against(parameters, self.values.shape, self.format.own_dims)

    @property
    def has_own_rows(self) -> bool:
        """True if each row has parameters of its own, as in a weight."""
        return self.values.ndim - 2 in self.format.own_dims

    @property
    def is_float(self) -> bool:
        return self.format.is_float

    def quantizer(self, point: Tensor | None) -> Quantizer | None:
        """Return the quantizer of one point (P, *groups); its parameters broadcast against the values."""
        return None if point is None else self.format.quantizer(point, self.values.shape)

    def point_of(self, side: Quantizer | QuantizedTensor | None) -> Tensor | None:
        """Return the point (P, *groups) that gives this quantizer, or None if no point does."""
        quantizer = side.quantizer if isinstance(side, QuantizedTensor) else side
        if quantizer is None or quantizer.bits != self.format.bits:
            return None
        point, shape = self.format.point_of(quantizer), self.groups_shape
        return None if point is None or point[0].numel() != math.prod(shape) else point.reshape(len(point), *shape)

    def box(self, reach: float) -> tuple[Tensor, Tensor]:
        """Return the corners (low, high) of the search space, each (P, *groups), as in `Format.box`."""
        low, high = self.format.box(self.groups(), reach, self.stack_size)
        return low.reshape(len(low), *self.groups_shape), high.reshape(len(high), *self.groups_shape)

    def fake_quantize(self, side: Quantizer | QuantizedTensor | None) -> Tensor:
        """Return the values after quantization; the padding of a convolution stays as it is."""
        if side is None:
            return self.values
        if isinstance(side, QuantizedTensor):
            return self._mask(side.dequantize().to(self.values.dtype))
        return self._mask(side.fake_quantize(self.values))

    def fake_quantize_at(self, point: Tensor | None) -> Tensor:
        """Return the values after quantization with the quantizer of one point."""
        return self.values if point is None else self._mask(self.format.fake_quantize(point, self.values))

    def _mask(self, hat: Tensor) -> Tensor:
        if self.mask is None:
            return hat
        # A large operand's values are overwritten, not copied, unless gradients flow through them.
        return torch.where(self.mask.bool(), hat, self.values, out=None if hat.requires_grad else hat)
