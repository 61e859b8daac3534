"""Strategies that find hyperparameters: Algorithm 1 (FPCS), and the two searches that the paper compares it with.

All three minimise a loss over a box of P hyperparameters, independently for each group (output channel, head, ...):

    loss: candidates (K, P, *groups) -> losses (K, *groups)
    low, high: (P, *groups), the corners of the box
    returns: the best point (P, *groups) and its loss (*groups)

An `incumbent` (P, *groups) is a point that is already known: the result is never worse. The first of equal losses wins,
so every search is deterministic. Refined points may leave the box by less than a grid spacing (as in the paper).
"""

from collections.abc import Callable, Sequence
from itertools import product

import torch
from torch import Tensor

Loss = Callable[[Tensor], Tensor]

_REACH = {1: 4, 2: 1}  # z by the number of hyperparameters: each point has 8 neighbours -z ... z


def fpcs(
    loss: Loss,
    low: Tensor,
    high: Tensor,
    *,
    init: Sequence[int] = (16, 8),
    parents: int = 16,
    steps: int = 4,
    incumbent: Tensor | None = None,
    rough: Loss | None = None,
) -> tuple[Tensor, Tensor]:
    """Run Fast Progressive Combining Search (Algorithm 1): each step refines the `parents` best points of the last one.

    The first step scores a uniform grid of init[0] x init[1] x ... points. Each of the `steps` further steps divides
    the spacing of every hyperparameter by 2 z, and gives each parent its neighbours -z ... z in every hyperparameter.
    These are 8 neighbours. Parents keep their losses, so a step takes 8 * parents evaluations.

    All points lie on the grid of the last step, so a child of two parents is the same point to the bit.

    rough: a cheaper loss for all steps. `loss` then scores only the `parents` best points, and the best of these takes
        a `walk`.
    """
    z, offsets = _neighbourhood(low)
    width = (2 * z) ** steps  # the width of a cell, in spacings of the last step
    spacing = grid_spacing(low, high, init) / width

    def points_at(cells: Tensor) -> Tensor:
        return low + cells * spacing

    cells = width * _cells(init, low).expand(-1, *low.shape)
    score = loss if rough is None else rough
    losses = score(points_at(cells))
    for _ in range(steps):
        best, losses = best_points(cells, losses, parents)
        width //= 2 * z
        born = (best + offsets * width).flatten(0, 1)
        cells, losses = torch.cat([best, born]), torch.cat([losses, score(points_at(born))])
    points = points_at(cells)
    if rough is not None:
        points, _ = best_points(points, losses, parents)
        best, _ = best_points(points, loss(points), 1)
        points, losses = (value[None] for value in walk(loss, best[0], spacing, moves=max(4, steps)))
    return _winner(loss, points, losses, incumbent)


def walk(loss: Loss, point: Tensor, spacing: Tensor, *, moves: int = 4) -> tuple[Tensor, Tensor]:
    """Move a point to a better neighbour ..., 4, 2 and 1 spacings (P, *groups) away; return the last and its loss."""
    _, offsets = _neighbourhood(point)
    points, losses = point[None], loss(point[None])
    for stride in (2**move for move in reversed(range(moves))):
        born = (points + offsets * (spacing * stride)).flatten(0, 1)
        points, losses = best_points(torch.cat([points, born]), torch.cat([losses, loss(born)]), 1)
    return points[0], losses[0]


def rescale(loss: Loss, point: Tensor, which: Sequence[bool], *, rough: Loss | None = None) -> tuple[Tensor, Tensor]:
    """Return the best of this point and 32 others, with scales multiplied by factors within 4 %, then within 0.4 %.

    which: True for each hyperparameter that is multiplied. The loss is jagged along the line of these points.
    rough: a cheaper loss, which leaves four points to `loss`.
    """
    steps = torch.tensor(which, dtype=point.dtype, device=point.device).view(-1, *(1 for _ in point.shape[1:]))
    score = loss if rough is None else rough
    points, losses = point[None], score(point[None])
    for width in (0.04, 0.004):
        factors = torch.linspace(-width, width, 16, dtype=point.dtype, device=point.device)
        born = points[:1] * (1 + factors.view(-1, *(1 for _ in point.shape)) * steps)
        points, losses = best_points(torch.cat([points, born]), torch.cat([losses, score(born)]), 4)
    if rough is None:
        return points[0], losses[0]
    return _winner(loss, points, loss(points), point)


def _neighbourhood(point: Tensor) -> tuple[int, Tensor]:
    """Return z, and the steps to the 8 neighbours -z ... z in every hyperparameter: (8, 1, P, 1, ...)."""
    count = len(point)
    if count not in _REACH:
        raise ValueError(f"the box has {count} hyperparameters, and this search takes 1 or 2: use another strategy")
    z = _REACH[count]
    steps = point.new_tensor([step for step in product(range(-z, z + 1), repeat=count) if any(step)])
    return z, steps.view(-1, 1, count, *(1 for _ in point.shape[1:]))


def grid_spacing(low: Tensor, high: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the distance between neighbours of `grid`: (P, *groups)."""
    return torch.stack([(high[i] - low[i]) / max(size - 1, 1) for i, size in enumerate(sizes)])


def brute_force(
    loss: Loss, low: Tensor, high: Tensor, *, sizes: Sequence[int] = (128, 128), incumbent: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the best point of the uniform grid sizes[0] x sizes[1] x ..., and its loss: O(n**P) evaluations."""
    points = grid(low, high, sizes)
    losses = torch.cat([loss(chunk) for chunk in points.split(128)])
    return _winner(loss, points, losses, incumbent)


def alternating(
    loss: Loss, low: Tensor, high: Tensor, *, sizes: Sequence[int] = (64, 64), incumbent: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Search one hyperparameter at a time over its uniform grid, with the others fixed: O(n) evaluations.

    It starts from the incumbent, or from the box's outer corner (the widest range).
    """
    best = torch.stack([low[0], *high[1:]]) if incumbent is None else incumbent
    best_loss = loss(best[None])[0]
    for axis, size in enumerate(sizes):
        points = best.expand(size, *best.shape).clone()
        share = torch.linspace(0, 1, size, dtype=low.dtype, device=low.device).view(size, *(1 for _ in low.shape[1:]))
        points[:, axis] = low[axis] + (high[axis] - low[axis]) * share
        best, best_loss = _winner(loss, points, loss(points), best)
    return best, best_loss


def grid(low: Tensor, high: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the Cartesian product of uniform partitions, (prod(sizes), P, *groups); the last one runs fastest."""
    return low + _cells(sizes, low) * grid_spacing(low, high, sizes)


def _cells(sizes: Sequence[int], like: Tensor) -> Tensor:
    """Return the points of `grid` as whole multiples of its spacing: (prod(sizes), P, 1, ...)."""
    cells = torch.cartesian_prod(*(torch.arange(size, dtype=like.dtype, device=like.device) for size in sizes))
    return cells.view(-1, len(sizes), *(1 for _ in like.shape[1:]))


def best_points(points: Tensor, losses: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` points with the least loss in each group, best first, and their losses."""
    losses, order = losses.sort(dim=0, stable=True)
    order = order[:count].unsqueeze(1).expand(-1, points.shape[1], *points.shape[2:])
    return points.gather(0, order), losses[:count]


def _winner(loss: Loss, points: Tensor, losses: Tensor, incumbent: Tensor | None) -> tuple[Tensor, Tensor]:
    if incumbent is not None:  # it comes first, so that it wins ties
        points, losses = torch.cat([incumbent[None], points]), torch.cat([loss(incumbent[None]), losses])
    best, least = best_points(points, losses, 1)
    return best[0], least[0]


def first_least(losses: Tensor) -> Tensor:
    """Return the index of the least loss along the first dimension, (*groups); the first one wins ties."""
    return losses.sort(dim=0, stable=True).indices[0]
