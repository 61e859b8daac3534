"""What a search looks like: the loss over the box of an operand's hyperparameters, and FPCS's path in it."""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import takewhile

import numpy as np
import torch
from torch import Tensor

from adalog.calibration.calibration import Calibration, Searched
from adalog.choices import Search
from adalog.graph.sites import GELUS, POWER_LAW_ACTIVATIONS
from adalog.search.bounds import minimise
from adalog.search.objective import ProductError
from adalog.search.operand import Operand
from adalog.search.strategies import Loss, best_points, grid


@dataclass(frozen=True)
class SearchPath:
    """What FPCS tried, in order: points are (K, P) throughout, on the CPU.

    steps: the first grid, then the children of each step. parents: of the grid, those that had children. judged: the
    survivors of the last step, scored on all rows. walk: from the best of these to the end of the search, the best
    points after its moves. final: the point found, (P,), and its loss, `least`.
    """

    steps: tuple[Tensor, ...]
    parents: Tensor
    judged: Tensor
    walk: Tensor
    final: Tensor
    least: float


@dataclass(frozen=True)
class View:
    """Losses over a box [low, high] of hyperparameters, (P,). lines: what each was set to, (n,); losses: (n, ...)."""

    low: Tensor
    high: Tensor
    lines: tuple[Tensor, ...]
    losses: Tensor


@dataclass(frozen=True)
class Landscape:
    """The loss over the box of an operand's P hyperparameters (two, or one), and FPCS's path in it.

    names: of the hyperparameters. whole: the box; near: around what was found. Losses are of those rows of the operand
    that the steps of the search look at, a sample or all.
    """

    title: str
    names: tuple[str, ...]
    whole: View
    near: View
    path: SearchPath


@torch.no_grad()
def landscapes(searched: Searched, search: Search, *, size: int = 48, jobs: int = 1) -> list[Landscape]:
    """Of both operands of a product those that are quantized: each given what was found for the other.

    Where an operand has several sets of parameters (the rows of a weight, heads) the one of median power is shown. The
    search itself is run again, with losses that note what they are asked. size: of the landscape in each direction.
    """
    sides = ("left", searched.product.left, searched.product.right, searched.assignment.right)
    others = ("right", searched.product.right, searched.product.left, searched.assignment.left)
    result = []
    for side, operand, other, quantizer in (sides, others):
        if operand.is_float or operand.format.unit:
            continue
        hat = other.quantized(quantizer)
        chosen, which = _one_group(operand)
        values, other_values, mask = operand.values, other.values, operand.mask
        for dim, index in zip(operand.format.own_dims, chosen, strict=True):
            values = values.narrow(dim, index, 1)
            mask = None if mask is None else mask.narrow(dim, index, 1)
            if dim < values.ndim - 2:
                other_values, hat = other_values.narrow(dim, index, 1), hat.narrow(dim, index, 1)
        one = replace(operand, values=values, mask=mask)
        transposed = other_values.transpose(-1, -2), hat.transpose(-1, -2)
        given = (values, *transposed, one.format.own_dims, mask, one.alike)
        error = ProductError.of(*given)
        true = ProductError.of(*given, gram=False) if error.gram else error  # whose samples' losses are no constant off
        title = f"{side} operand, {_format_words(one)}{which}"
        result.append(_landscape(title, one, error, true, search, size, jobs))
    return result


def example_site(calibration: Calibration) -> str:
    """The middle one of the sites behind a GELU, else behind what else follows a power law, else of all."""
    for kinds in (GELUS, ("softmax", *POWER_LAW_ACTIVATIONS), None):
        names = [site.name for site in calibration.sites if kinds is None or site.left_source.kind in kinds]
        if names:
            return names[len(names) // 2]
    raise AssertionError("a calibration has sites")


def _one_group(operand: Operand) -> tuple[list[int], str]:
    """Along the kept dimensions, the place of the group of median power; and which it is, in words."""
    groups = operand.groups()
    if len(groups) == 1:
        return [0] * len(operand.format.own_dims), ""
    index = int(groups.double().square().sum(1).argsort(stable=True)[len(groups) // 2])
    sizes = [operand.values.shape[dim] for dim in operand.format.own_dims]
    what = "row" if operand.has_own_rows else "head" if operand.format.own_dims == (1,) else "group"
    return [int(place) for place in np.unravel_index(index, sizes)], f", {what} {index + 1} of {len(groups)}"


def _format_words(operand: Operand) -> str:
    form = operand.format
    kind = "twin uniform" if form.twin else "uniform" if form.log2_base is None else "logarithmic"
    return f"{form.bits}-bit {kind}"


def _landscape(
    title: str, operand: Operand, error: ProductError, true: ProductError, search: Search, size: int, jobs: int
) -> Landscape:
    def loss_of(part: ProductError) -> Loss:
        errors = operand.errors(part.left)
        return lambda points: part.loss_of(errors, points)

    sample = error.sample(search.rough_rows) if search.rough_rows else error
    whole, rough = loss_of(error), loss_of(sample)
    low, high = operand.box(search.reach)
    path = fpcs_path(operand, search, whole, None if sample is error else rough)
    last = torch.cat([path.judged, path.walk]).to(low)
    room = (0.3 * (last.amax(0) - last.amin(0))).reshape(low.shape).clamp(min=(high - low) / 24)
    near = last.amin(0).reshape(low.shape) - room, last.amax(0).reshape(low.shape) + room
    form = operand.format
    names: tuple[str, ...] = ("lower bound", "upper bound")
    if form.twin:
        names = ("largest value",)
    elif form.log2_base is not None:
        names = ("scale",) if form.log2_base[0] else (f"q (rounded), of base 2^(q / {form.log2_base[1]})", "scale")
    shown = rough if sample is error else loss_of(true.sample(search.rough_rows))
    views = view(shown, low, high, size, jobs), view(shown, *near, size, jobs)
    return Landscape(title, names, *views, path)


def view(loss: Loss, low: Tensor, high: Tensor, size: int, jobs: int = 1) -> View:
    """The losses of one group on a grid of `size` points in each direction."""
    points = grid(low, high, (size,) * len(low))
    with ThreadPoolExecutor(jobs) as pool:
        losses = torch.cat(list(pool.map(torch.no_grad()(loss), points.split(size))))
    start, end = (corner.reshape(-1).float().cpu() for corner in (low, high))
    lines = tuple((torch.linspace(0, 1, size)[:, None] * (end - start) + start).T)
    return View(start, end, lines, losses.reshape([size] * len(low)).float().cpu())


def fpcs_path(operand: Operand, search: Search, loss: Loss, rough: Loss | None) -> SearchPath:
    """The configured search of an operand that has one group, run with losses that note what they are asked.

    rough: the cheaper loss of its steps, if they have one. Raises ValueError where the strategy is not FPCS.
    """
    if search.strategy != "fpcs":
        raise ValueError(f"strategy = {search.strategy!r} has no path: it is FPCS's that is drawn")
    asked: list[tuple[bool, Tensor, Tensor]] = []

    def noting(function: Loss, exact: bool) -> Loss:
        def noted(points: Tensor) -> Tensor:
            losses = function(points)
            asked.append((exact, points.reshape(len(points), -1).float().cpu(), losses.reshape(-1).float().cpu()))
            return losses

        return noted

    point = minimise(noting(loss, True), operand, search, None, rough and noting(rough, False))
    least = float(loss(point[None]))
    # The steps ask one loss for many points each; what is left of them, then the walk, from a single point on, ask the
    # exact one; the rest is a line of scales through its end.
    steps = list(takewhile(lambda call: call[0] == asked[0][0] and len(call[1]) > 1, asked))
    rest = asked[len(steps) :]
    every = torch.cat([points for _, points, _ in steps]), torch.cat([losses for *_, losses in steps])
    final = point.reshape(-1).float().cpu()
    parents = best_points(steps[0][1], steps[0][2], search.parents)[0] if len(steps) > 1 else steps[0][1][:0]
    judged = best_points(*every, 1)[0] if rough is None else rest[0][1]
    moves = [every] if rough is None else [call[1:] for call in takewhile(lambda call: call[0], rest[1:])]
    walk, before = [], math.inf
    for points, losses in moves:
        if float(losses.min()) < before:
            before = float(losses.min())
            walk.append(best_points(points, losses, 1)[0])
    return SearchPath(
        tuple(points for _, points, _ in steps), parents, judged, torch.cat([*walk, final[None]]), final, least
    )
