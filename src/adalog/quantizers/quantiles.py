"""Quantiles of long rows, and thinned samples to approximate them."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

# About SORTED_ELEMENTS values of a sample are sorted, at even distances, but at least _SORTED_OF_ROW per row.
SORTED_ELEMENTS, _SORTED_OF_ROW = 1 << 18, 1 << 12
QUANTILE_LIMIT = 1 << 24  # the most elements that torch.quantile takes


def coprime(stride: int, size: int) -> int:
    """Return the least stride from this one on that meets every column of a grid: it shares no factor with `size`."""
    while math.gcd(stride, size) > 1:
        stride += 1
    return stride


def thin(sample: Tensor, stack: int = 1) -> Tensor:
    """Return about SORTED_ELEMENTS evenly spaced values of a sample (G, T); a smaller sample stays whole.

    stack: the number of samples that follow one another in the rows. Each of them is thinned as if it were alone.
    """
    size = sample.shape[1]
    count = max(SORTED_ELEMENTS * stack // len(sample), _SORTED_OF_ROW)
    return sample[:, :: coprime(max(1, size // count), size)]


def ascending(rows: Tensor) -> Tensor:
    """Sort each row of (G, T), by NumPy on the CPU, because its vectorized sort is faster than PyTorch's."""
    if rows.device.type != "cpu" or rows.dtype not in (torch.float32, torch.float64):
        return rows.sort(dim=1).values
    return torch.from_numpy(np.sort(rows.detach().numpy(), axis=1))


def sample_quantiles(sample: Tensor, fractions: Sequence[float], stack: int = 1) -> list[Tensor]:
    """Return the quantiles of `quantiles` of the thinned sample (`thin`), but the exact least and largest value."""
    inner = iter(_of_sorted(ascending(thin(sample, stack)), [share for share in fractions if 0 < share < 1]))
    return [
        sample.amin(dim=1) if share <= 0 else sample.amax(dim=1) if share >= 1 else next(inner) for share in fractions
    ]


def quantiles(rows: Tensor, fractions: Sequence[float]) -> list[Tensor]:
    """Return quantiles per row of (G, T), by linear interpolation: (G,) per fraction.

    Ranks are computed in the dtype of the values, as in torch.quantile, except for rows that are too long for it. Even
    rounding differences in a rank change the codes of early sites, and so all later sites.
    """
    if set(fractions) <= {0.0, 1.0}:
        ends = {0.0: rows.amin(dim=1), 1.0: rows.amax(dim=1)}
        return [ends[share] for share in fractions]
    if rows.shape[1] > QUANTILE_LIMIT:
        return _of_sorted(ascending(rows), fractions)
    chunk = max(1, QUANTILE_LIMIT // rows.shape[1])
    parts = [part.quantile(part.new_tensor(fractions), dim=1) for part in rows.split(chunk)]
    return list(torch.cat(parts, dim=1))


def _of_sorted(ordered: Tensor, fractions: Sequence[float]) -> list[Tensor]:
    """Return the quantiles of rows that are already sorted; ranks are computed in float64."""
    last, values = ordered.shape[1] - 1, []
    for share in fractions:
        rank = share * last
        below, above = (ordered[:, place] for place in (int(rank), min(int(rank) + 1, last)))
        values.append(torch.lerp(below, above, rank - int(rank)))
    return values
