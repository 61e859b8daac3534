"""Search ranges by a tensor's own values: minimum and maximum, percentiles, FQ-ViT, RepQ-ViT.

`methods.METHODS` lists the choices of each method.

With b bits, let L = 2**b - 1, h = 2**(b - 1), and let R round to the nearest integer, halves to even.

- A group of values x has, at the percentile p, the range (lo, hi) with hi = Q_p(x) and lo = Q_(1-p)(x), by linear
  interpolation. An asymmetric quantizer has s = (hi - lo) / L and z = R(-lo / s), and its range is widened to include
  zero. A symmetric quantizer has s = max(|lo|, |hi|) / (h - 1/2) and z = h. A logarithmic quantizer has the scale hi.
  If there are several p, the one with the least mean (x - x_hat)^2 wins (RepQ-ViT).
- Each channel c of a norm first has its own (s_c, z_c). RepQ-ViT replaces them by the means of both (`Fold.sharing`).
  FQ-ViT has s = (max - min) / L / 2^K and z of the whole tensor, and gives each channel the scale 2^a_c s, with the a_c
  in 0 ... K that has the least error.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from adalog.baselines.ordered import observe_in_order
from adalog.choices import check_choice, check_flag, check_number, check_whole
from adalog.quantizers import (
    Assignment,
    Fold,
    LogFormat,
    Quantizer,
    UniformFormat,
    UniformQuantizer,
    bounds_to_uniform,
    symmetric_scale,
    symmetric_zero_point,
    uniform_fake_quantize,
)
from adalog.quantizers.quantiles import quantiles
from adalog.search import AnySearch, Needs
from adalog.search.operand import Operand
from adalog.search.product import Product
from adalog.search.strategies import first_least

Sharing = Literal["none", "mean", "power-of-two"]


@dataclass(frozen=True)
class RangeSearch(AnySearch):
    """A search that finds each quantizer from the operand's own values, without the output.

    MinMax, percentiles, FQ-ViT and RepQ-ViT use it. The defaults are those of MinMax.

    Args:
        percentiles: Candidate upper percentiles p; the lower end is 1 - p. The p with the smallest error of the operand
            itself is used.
        symmetric_weights: Quantize weights with ranges that reach as far below zero as above.
        unit_softmax: Give logarithmic quantizers after softmax the scale 1.
        share: How the channels of a folded norm get one scale: "none" (norms are not folded), "mean" (RepQ-ViT: the
            mean over channels), or "power-of-two" (FQ-ViT: one scale, multiplied by a power of two per channel).
        powers: Largest exponent for `share` = "power-of-two" (K in FQ-ViT, whose value is the default).
        round_zero_point: Round the shared zero point to a whole number. In the released RepQ-ViT it is not rounded; an
            artifact cannot store such a model.
        in_order: Observe each operand with everything before its site quantized, as the released RepQ-ViT does.

    Raises:
        ValueError: If a field has an invalid value.
    """

    kind: ClassVar[str] = "ranges"
    percentiles: tuple[float, ...] = (1.0,)
    symmetric_weights: bool = False
    unit_softmax: bool = False
    share: Sharing = "none"
    powers: int = 3
    round_zero_point: bool = True
    in_order: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.percentiles, tuple) or not self.percentiles:
            raise ValueError(f"percentiles = {self.percentiles!r} is not a tuple of numbers")
        for share in self.percentiles:
            check_number("percentiles", share, 0.5, 1.0)
        for name in ("symmetric_weights", "unit_softmax", "round_zero_point", "in_order"):
            check_flag(name, getattr(self, name))
        check_choice("share", self.share, Sharing)
        check_whole("powers", self.powers, 0)

    @property
    def needs(self) -> Needs:
        return Needs(observe=observe_in_order if self.in_order else None, squares=False)

    def refuses_fold(self, weight_bits: int, activation_bits: int) -> str:
        return super().refuses_fold(weight_bits, activation_bits) if self.share == "none" else ""

    def fold_channels(self, values: Tensor, bits: int, weight: Tensor) -> tuple[Fold, UniformQuantizer | None]:
        if self.share == "power-of-two":
            return _doubled_channels(values, bits, self)
        channels = own_range(Operand(values, UniformFormat(bits, own_dims=(1,))), self)
        assert isinstance(channels, UniformQuantizer)
        scale, zero_point = channels.scale.flatten(), channels.zero_point.flatten()
        shared = zero_point.mean()
        quantizer = UniformQuantizer(scale.mean(), shared.round() if self.round_zero_point else shared, bits)
        return Fold.sharing(scale, zero_point, rounds=self.round_zero_point), quantizer

    def search_product(self, product: Product) -> Assignment:
        left, right = product.ordered or (product.left, product.right)
        first: Quantizer | None = None if left.is_float else product.shared
        if not left.is_float and first is None:
            unit = self.unit_softmax and product.role == "av" and isinstance(left.format, LogFormat)
            first = left.quantizer(left.values.new_ones(1)) if unit else own_range(left, self)
        symmetric = self.symmetric_weights and not product.of_activations
        second = None if right.is_float else own_range(right, self, symmetric=symmetric)
        return product.assign(first, second)

    @property
    def why_unstored(self) -> str:
        if self.round_zero_point:
            return ""
        return (
            "round_zero_point = False finds zero points that no file can store, whether an artifact or a partial file: "
            "evaluate the model in memory, or use the method repq-vit, which rounds them"
        )


def own_range(operand: Operand, search: RangeSearch, *, symmetric: bool = False) -> Quantizer:
    """Return the quantizer of each group's range at the percentile with the least own error; the first wins ties."""
    shares = search.percentiles
    ends = quantiles(operand.groups(), [*shares, *(1 - share for share in shares)])
    points = [
        _ends(operand, low, high, symmetric) for high, low in zip(ends[: len(shares)], ends[len(shares) :], strict=True)
    ]
    if len(points) > 1:
        best = first_least(torch.stack([_own_error(operand, point) for point in points]))
        points = [torch.take_along_dim(torch.stack(points), best[None, None], 0)[0]]
    return operand.format.quantizer(points[0], operand.values.shape)


def _ends(operand: Operand, low: Tensor, high: Tensor, symmetric: bool) -> Tensor:
    """Return the point (P, *groups) of `Operand.quantizer` whose range has the ends low and high, (G,) each."""
    form, shape = operand.format, operand.groups_shape
    low, high = low.reshape(shape), high.reshape(shape)
    if symmetric:
        half = symmetric_zero_point(form.bits)
        scale = symmetric_scale(torch.maximum(high.abs(), low.abs()), form.bits)
        low, high = -half * scale, (half - 1) * scale
    return form.point_of_range(low, high)


def _own_error(operand: Operand, point: Tensor) -> Tensor:
    """Return the mean squared error of each group's values: (*groups)."""
    hat = operand.format.fake_quantize(point, operand.values)
    error = replace(operand, values=(hat - operand.values).square_())
    return error.groups().mean(dim=1).reshape(point.shape[1:])


def _doubled_channels(values: Tensor, bits: int, search: RangeSearch) -> tuple[Fold, UniformQuantizer]:
    """Return the fold with FQ-ViT's power-of-two factors, and the quantizer that the channels share.

    Folded weights hold these factors exactly, since only exponents change.
    """
    scale, zero_point = bounds_to_uniform(values.min(), values.max(), bits)
    scale = scale / 2**search.powers
    errors = [
        (uniform_fake_quantize(values, scale * 2**power, zero_point, bits) - values).square_().sum(0)
        for power in range(search.powers + 1)
    ]
    ratio = torch.exp2(first_least(torch.stack(errors)).to(values.dtype))
    return Fold(ratio, torch.zeros_like(ratio)), UniformQuantizer(scale, zero_point, bits)
