"""Train the codes, scales, zero points and biases in the assignments of a block.

A weight's codes are either the float values rounded up or down (AdaRound, Nagel et al., ICML 2020) or latent values
that are rounded with a straight-through gradient. The scales of activations, and of weights with latent codes, are
trained as in LSQ (Esser et al., ICLR 2020). Their logarithm is trained, so that they stay positive.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from adalog.calibration.compensate import bias_of, with_codes
from adalog.choices import Reconstruction
from adalog.graph.program import Program
from adalog.graph.rewrite import SiteGroup, absorbs_offset
from adalog.quantizers import Assignment, QuantizedTensor, Quantizer, UniformQuantizer, round_ste

# The sigmoid that AdaRound clips reaches beyond 0 and 1 by this much.
_STRETCH = 0.1
# Latent values start at most this far from the middle of their codes' bins. Codes that a correction chose are often not
# the nearest to the float weight. If they started at the edge of their bins, the first steps would undo the correction.
_NEAR = 0.25


def rectified_sigmoid(v: Tensor) -> Tensor:
    """Return AdaRound's h(V), from 0 to 1: a sigmoid stretched by 0.1 on each side and clipped (its Eq. 23)."""
    return (v.sigmoid() * (1 + 2 * _STRETCH) - _STRETCH).clamp(0, 1)


def rounding_regulariser(h: Tensor, exponent: float | Tensor) -> Tensor:
    """Return AdaRound's 1 - |2 h - 1|^exponent, which is 0 if h is 0 or 1 (its Eq. 24)."""
    return 1 - (2 * h - 1).abs().pow(exponent)


class Rounding:
    """The trainable codes of a weight: latent values in units of codes.

    They start in the bins of the weight's codes, as near to the float weight as the bins allow. Latent values with a
    straight-through gradient start away from the edges of the bins.
    """

    def __init__(self, stored: QuantizedTensor, weight: Tensor, choices: Reconstruction):
        self._quantizer, codes = stored.quantizer, stored.codes.to(weight.dtype)
        self.top = self._quantizer.code_count - 1
        # Codes are whole steps of the scale apart, so a code and its integer differ by a constant.
        place = weight.reshape(codes.shape) / self._quantizer.scale + (codes - self._quantizer.integer(stored.codes))
        up_or_down = choices.weights == "adaround"
        inside = 0.5 - 2**-10 if up_or_down else _NEAR
        place = torch.minimum(torch.maximum(place, codes - inside), codes + inside).clamp(0, self.top)
        if up_or_down:
            self._floor = place.floor().clamp(max=self.top - 1)
            share = ((place - self._floor).clamp(0.01, 0.99) + _STRETCH) / (1 + 2 * _STRETCH)
            self.latent = torch.logit(share).requires_grad_()
            self.log_scale = None
        else:
            self.latent = place.clone().requires_grad_()
            self.log_scale = torch.zeros_like(self._quantizer.scale).requires_grad_()

    def soft(self, h: Tensor | None = None) -> QuantizedTensor:
        """Return the weight for training; with AdaRound, its codes are not whole numbers. h: h(V), if it is known."""
        if self.log_scale is None:
            h = rectified_sigmoid(self.latent) if h is None else h
            return QuantizedTensor(self._floor + h, self._quantizer)
        return QuantizedTensor(round_ste(self.latent), self._rescale())

    @torch.no_grad()
    def hard(self) -> QuantizedTensor:
        """Return the weight as it is stored."""
        if self.log_scale is None:
            return QuantizedTensor((self._floor + (self.latent > 0)).to(torch.uint8), self._quantizer)
        return QuantizedTensor(self.latent.round().to(torch.uint8), self._rescale())

    def _rescale(self) -> Quantizer:
        assert self.log_scale is not None
        return self._quantizer.rescale(self.log_scale.exp())

    def regulariser(self, exponent: float | Tensor) -> Tensor:
        """Return the mean of AdaRound's regulariser over the values."""
        return rounding_regulariser(rectified_sigmoid(self.latent), exponent).mean()


class _Levels:
    """The trainable scale of an activation's quantizer, and the trainable zero point of a uniform one."""

    def __init__(self, quantizer: Quantizer):
        self.quantizer = quantizer
        self.log_scale = torch.zeros_like(quantizer.scale).requires_grad_()
        is_uniform = isinstance(quantizer, UniformQuantizer)
        self.moved = torch.zeros_like(quantizer.scale).requires_grad_() if is_uniform else None

    def soft(self, h: Tensor | None = None) -> Quantizer:
        quantizer = self.quantizer.rescale(self.log_scale.exp())
        if self.moved is None or not isinstance(quantizer, UniformQuantizer):
            return quantizer
        return replace(quantizer, zero_point=round_ste(quantizer.zero_point + self.moved))  # `confine` keeps it a code

    @torch.no_grad()
    def hard(self) -> Quantizer:
        return self.soft()


Side = Rounding | _Levels


@torch.no_grad()
def confine(sides: Sequence[Side]) -> None:
    """Clamp latent codes and zero points to the range of codes; no gradient would bring back values that leave it.

    One operation clamps the values of all sides, because an accelerator waits for the launch of each.
    """
    latent = [side for side in sides if isinstance(side, Rounding) and side.log_scale is not None]
    if latent:  # a sigmoid confines the others
        values = [side.latent for side in latent]
        torch._foreach_clamp_min_(values, 0)
        torch._foreach_clamp_max_(values, [side.top for side in latent])
    zero_points = [
        (side.moved, side.quantizer.zero_point, side.quantizer.code_count - 1)
        for side in sides
        if isinstance(side, _Levels) and side.moved is not None and isinstance(side.quantizer, UniformQuantizer)
    ]
    if zero_points:
        shifts, starts, tops = zip(*zero_points, strict=True)
        now = torch._foreach_add(starts, shifts)
        torch._foreach_clamp_min_(now, 0)
        torch._foreach_clamp_max_(now, tops)
        torch._foreach_copy_(shifts, torch._foreach_sub(now, starts))


class GroupInTraining:
    """A group of sites with the trainable parts of its assignment.

    quantized: the rewritten program, which holds the biases of the quantized sites.
    """

    def __init__(
        self, group: SiteGroup, start: Assignment, program: Program, quantized: Program, choices: Reconstruction
    ):
        self.group, self._start = group, start
        self._left = _Levels(start.left) if choices.scales and start.left is not None else None
        self._right: _Levels | Rounding | None = None
        self._bias: Tensor | None = None
        self._now: Tensor | None = None
        right = start.right
        if right is None:
            return
        if group.first.role in ("qk", "av"):
            assert isinstance(right, Quantizer)
            self._right = _Levels(right) if choices.scales else None
            return
        weight = torch.cat([program.tensors[site.right].flatten(1) for site in group.sites])
        if start.fold is not None:
            weight = start.fold.weight(weight)
        stored = with_codes(right, weight)
        self._right = Rounding(stored, weight, choices)
        if choices.biases or start.bias is not None:
            nodes = {node.name: node for node in quantized.nodes}
            self._now = torch.cat([bias_of(nodes[site.node.name], quantized) for site in group.sites])
            self._offset = (
                start.left.absorb_offset()[0] if start.left is not None and absorbs_offset(group.first) else 0.0
            )
            self._sums = stored.dequantize().reshape(weight.shape).sum(1)
        if choices.biases:
            self._unit = weight.square().sum(1).sqrt()
            self._bias = torch.zeros_like(self._unit).requires_grad_()

    def parameters(self) -> dict[str, list[Tensor]]:
        """Return the tensors to train, by the kind that determines their learning rate."""
        codes = [side.latent if isinstance(side, Rounding) else side.moved for side in self.sides]
        tensors = {"codes": codes, "scales": [side.log_scale for side in self.sides], "biases": [self._bias]}
        return {kind: [value for value in values if value is not None] for kind, values in tensors.items()}

    def soft(self, h: Mapping[Side, Tensor] | None = None) -> Assignment:
        """Return the assignment for training. h: AdaRound's h(V) by weight, if it is known."""
        return self._with(lambda side: side.soft(None if h is None else h.get(side)))

    @torch.no_grad()
    def hard(self) -> Assignment:
        """Return the assignment as it is stored."""
        return self._with(lambda side: side.hard())

    def _with(self, finish: Callable[[Any], Any]) -> Assignment:
        left = self._start.left if self._left is None else finish(self._left)
        right = self._start.right if self._right is None else finish(self._right)
        assignment = replace(self._start, left=left, right=right)
        if self._now is None:
            return assignment
        bias = self._now if self._bias is None else self._now + self._bias * self._unit
        if self._offset:  # update the absorbed offset for the trained weight (Eq. 15)
            assert isinstance(right, QuantizedTensor)
            bias = bias - self._offset * (right.dequantize().reshape(len(bias), -1).sum(1) - self._sums)
        return replace(assignment, bias=bias)

    def regulariser(self, exponent: float | Tensor) -> Tensor | float:
        return self._right.regulariser(exponent) if isinstance(self._right, Rounding) else 0.0

    @property
    def sides(self) -> list[Side]:
        """The operands that are trained."""
        return [side for side in (self._left, self._right) if side is not None]


class BatchedRounding:
    """AdaRound's h(V) of all weights of some groups that are rounded up or down, together for an accelerator."""

    def __init__(self, groups: Sequence[GroupInTraining]):
        sides = [side for group in groups for side in group.sides if isinstance(side, Rounding)]
        self._sides = [side for side in sides if side.log_scale is None]
        self._counts = [side.latent.numel() for side in self._sides]
        shares = [side.latent.new_full((side.latent.numel(),), 1 / side.latent.numel()) for side in self._sides]
        self._shares = torch.cat(shares) if shares else None  # of each value in the mean over its weight

    def round(self) -> Tensor | None:
        """Return h(V) of all weights in a row, or None if there are no such weights."""
        if self._shares is None:
            return None
        return rectified_sigmoid(torch.cat([side.latent.flatten() for side in self._sides]))

    def by_weight(self, h: Tensor | None) -> dict[Side, Tensor]:
        """Return the result of `round` for each weight."""
        parts = [] if h is None else h.split(self._counts)
        return {side: part.view(side.latent.shape) for side, part in zip(self._sides, parts, strict=True)}

    def regulariser(self, h: Tensor | None, exponent: Tensor) -> Tensor | float:
        """Return the sum over the weights of AdaRound's regulariser. h: the result of `round`."""
        if h is None or self._shares is None:
            return 0.0
        return (rounding_regulariser(h, exponent) * self._shares).sum()
