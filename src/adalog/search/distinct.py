"""Score equal candidates only once.

Neighbouring points have many neighbours in common, so FPCS makes many equal candidates.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from adalog.device import waits_for_launches


@dataclass(frozen=True)
class DistinctCandidates:
    """The distinct candidates among K, in each group.

    points: (k, P, *groups); a group with fewer than k distinct candidates is padded with its first candidate.
    counts: (*groups), the number of distinct candidates.
    place: (K, *groups), the index in `points` of each candidate.
    """

    points: Tensor
    counts: Tensor
    place: Tensor

    @staticmethod
    def of(points: Tensor) -> "DistinctCandidates":
        """Find the distinct candidates among points (K, P, *groups).

        Only float32 points of one or two hyperparameters are compared; all other points count as distinct.
        """
        count, dims, *groups = points.shape
        if count == 1 or dims > 2 or points.dtype != torch.float32:
            counts = torch.full(groups, count, device=points.device)
            places = torch.arange(count, device=points.device).view(-1, *(1 for _ in groups))
            return DistinctCandidates(points, counts, places.expand(count, *groups))
        bits = points.reshape(count, dims, -1).permute(1, 2, 0).contiguous().view(torch.int32).to(torch.int64)
        key = bits[0] if dims == 1 else (bits[0] << 32) + bits[1]  # (G, K)
        order = torch.from_numpy(np.argsort(key.numpy(), 1))  # by NumPy, because its vectorized sort is faster
        key = key.gather(1, order)
        rank = (key[:, 1:] != key[:, :-1]).cumsum(1)
        rank = torch.cat([rank.new_zeros(len(rank), 1), rank], 1)
        counts = rank[:, -1] + 1
        first = rank.new_zeros(len(rank), int(counts.max())).scatter_(1, rank, order)
        place = torch.empty_like(rank).scatter_(1, order, rank)
        index = first.t().reshape(-1, 1, *groups).expand(-1, dims, *groups)
        return DistinctCandidates(points.gather(0, index), counts.view(groups), place.t().reshape(count, *groups))

    def to_all(self, losses: Tensor) -> Tensor:
        """Return the losses (K, *groups) of all candidates, given the losses (k, *groups) of the distinct ones."""
        return losses.gather(0, self.place)


def once(loss: Callable[[Tensor], Tensor], snap: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a function with the same losses that scores candidates only once if they are equal after `snap`.

    An accelerator scores all, since it would have to wait for the number of distinct ones.
    """

    def score(points: Tensor) -> Tensor:
        if waits_for_launches(points.device):
            return loss(snap(points))
        distinct = DistinctCandidates.of(snap(points))
        return distinct.to_all(loss(distinct.points))

    return score
