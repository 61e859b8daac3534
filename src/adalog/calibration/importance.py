"""Weigh the rows of products by how much the model's output depends on them.

In a late block of a model with a class token, nearly all of the output depends on the class token, which is one row in
two hundred. An error that counts all rows alike does not see it. The weights come from random probes of the float
network, so they need no labels.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from adalog.calibration.gradients import hessian_probe, squared_gradients
from adalog.errors import CalibrationError
from adalog.graph.program import Program
from adalog.graph.rewrite import SiteGroup
from adalog.graph.tracing import image_axes

# Backward passes per image. Averages over channels and images leave little noise.
_PROBES = 2
# The share of a row's weight that does not depend on its gradients, so that no row is ignored.
_EVEN = 0.2


@torch.inference_mode(False)  # which allows no gradients
def row_weights(
    program: Program,
    images: Sequence[Tensor],
    groups: Sequence[SiteGroup],
    power: float,
    seed: int,
    memory: int | None = None,
) -> dict[str, Tensor] | None:
    """Return the weight of each row of every site's output, with mean 1, by the output's name.

    A weight is the row's squared gradient to this power, averaged over the channels, and over the images for each
    position. It has the output's dimensions, with size 1 for those over which it is averaged; images keep their size.
    The result is None if all rows count alike: with the power 0, or if no output of the model has a gradient. memory:
    as in `squared_gradients`.
    """
    if not power:
        return None
    roles = {name: group.first.role for group in groups for name in group.nodes}

    def average(name: str, squares: Tensor) -> Tensor:
        if roles[name] == "conv":
            return squares.mean(1, keepdim=True)
        rows = squares.ndim - 2
        return squares.mean(-1 if roles[name] == "linear" else [d for d in range(1, squares.ndim) if d != rows], True)

    probes = [hessian_probe(torch.Generator().manual_seed(seed))] * _PROBES
    try:
        means = squared_gradients(program, images, roles, probes, average, memory)
    except CalibrationError:  # no output has a gradient
        return None
    axes, weights = image_axes(program, images), {}
    for name, mean in means.items():
        weight, axis = mean, axes.get(name)
        if axis is not None:
            dim, entries = axis
            parts = mean.unflatten(dim, (-1, entries))
            weight = parts.mean(dim, keepdim=True).expand_as(parts).flatten(dim, dim + 1)
        weight = weight.pow(power)
        weights[name] = (1 - _EVEN) * weight / weight.mean() + _EVEN
    return weights


def resample(weights: Tensor) -> Tensor:
    """Return as many row numbers as there are weights, (..., T), so that each row occurs in proportion to its weight.

    The numbers ascend. They are those of a systematic sample, which has no random part.
    """
    sums, count = weights.double().cumsum(-1), weights.shape[-1]
    points = (torch.arange(count, dtype=sums.dtype, device=sums.device) + 0.5) / count * sums[..., -1:]
    return torch.searchsorted(sums, points).clamp(max=count - 1)
