"""Draw the loss over an operand's hyperparameters, and the path that FPCS takes through it."""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from adalog.calibration.calibration import Calibration, SearchResult
from adalog.graph.activations import GELUS, POWER_LAW_ACTIVATIONS
from adalog.search.bounds import Search, judges, minimise
from adalog.search.forms import GramForm
from adalog.search.objective import ProductError
from adalog.search.operand import Operand
from adalog.search.strategies import Loss, best_points, grid
from adalog.study.drawing import COLOURS, SHADES, SMALL, TEXT, add_legend, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The lower limits of the shades, in dB above the least loss: over the whole box, and near the result.
_STEPS = (0, 0.5, 1, 2, 4, 8), (0, 0.05, 0.1, 0.2, 0.4, 0.8)


@dataclass(frozen=True)
class SearchPath:
    """The points that FPCS tried, in order, each set as (K, P) on the CPU.

    steps: the first grid, then the children of each step.
    parents: the points of the grid that had children.
    judged: the survivors, scored on a larger sample.
    walk: the best point after each move, from the best survivor to the end of the search.
    final: the resulting point, (P,). least: its loss.
    """

    steps: tuple[Tensor, ...]
    parents: Tensor
    judged: Tensor
    walk: Tensor
    final: Tensor
    least: float


@dataclass(frozen=True)
class View:
    """Losses over a box [low, high] of hyperparameters, (P,).

    lines: the values of each hyperparameter, (n,). losses: (n, ...).
    """

    low: Tensor
    high: Tensor
    lines: tuple[Tensor, ...]
    losses: Tensor


@dataclass(frozen=True)
class Landscape:
    """The loss over one or two hyperparameters of an operand, and the path that FPCS takes.

    names: the names of the hyperparameters.
    whole: the view of the whole box. near: the view around the result.
    Losses are computed on the rows of the operand that the search steps use, a sample or all.
    """

    title: str
    names: tuple[str, ...]
    whole: View
    near: View
    path: SearchPath


@torch.no_grad()
def landscapes(searched: SearchResult, search: Search, *, size: int = 48, jobs: int = 1) -> list[Landscape]:
    """Return a landscape for each quantized operand of a product; the other operand is quantized as in the result.

    If an operand has several sets of parameters (one per row of a weight, or per head), the set with the median power
    is shown. The search runs again, with losses that record the points they are called with.
    size: points in each direction.
    """
    sides = ("left", searched.product.left, searched.product.right, searched.assignment.right)
    others = ("right", searched.product.right, searched.product.left, searched.assignment.left)
    result = []
    for side, operand, other, quantizer in (sides, others):
        if operand.is_float or not operand.format.names:
            continue
        hat = other.fake_quantize(quantizer)
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
        # With a Gram matrix, losses on a sample are off by a constant. A search may ignore it, but a picture may not.
        true = ProductError.of(*given, gram=False) if isinstance(error.form, GramForm) else error
        title = f"{side} operand, {one.format.bits}-bit {one.format.title}{which}"
        result.append(_landscape(title, one, error, true, search, size, jobs))
    return result


def example_site(calibration: Calibration) -> str:
    """Return the middle site after a GELU, else after a softmax or a similar activation, else of all sites."""
    for kinds in (GELUS, ("softmax", *POWER_LAW_ACTIVATIONS), None):
        names = [site.name for site in calibration.sites if kinds is None or site.left_source.kind in kinds]
        if names:
            return names[len(names) // 2]
    raise AssertionError("a calibration has sites")


def _one_group(operand: Operand) -> tuple[list[int], str]:
    """Return the index of the group with the median power along the operand's own dimensions, and its name."""
    groups = operand.groups()
    if len(groups) == 1:
        return [0] * len(operand.format.own_dims), ""
    index = int(groups.double().square().sum(1).argsort(stable=True)[len(groups) // 2])
    sizes = [operand.values.shape[dim] for dim in operand.format.own_dims]
    what = "row" if operand.has_own_rows else "head" if operand.format.own_dims == (1,) else "group"
    return [int(place) for place in np.unravel_index(index, sizes)], f", {what} {index + 1} of {len(groups)}"


def _landscape(
    title: str, operand: Operand, error: ProductError, true: ProductError, search: Search, size: int, jobs: int
) -> Landscape:
    def loss_of(product: ProductError) -> Loss:
        errors = operand.format.errors(product.left)
        return lambda points: product.loss_of(errors, points)

    fair, rough = judges(error, operand, search)
    low, high = operand.box(search.reach)
    path = fpcs_path(operand, search, loss_of(fair), None if rough is fair else loss_of(rough))
    last = torch.cat([path.judged, path.walk]).to(low)
    margin = (0.3 * (last.amax(0) - last.amin(0))).reshape(low.shape).clamp(min=(high - low) / 24)
    near = last.amin(0).reshape(low.shape) - margin, last.amax(0).reshape(low.shape) + margin
    shown = loss_of(error if operand.has_own_rows or rough is error else true.sample(search.rough_rows))
    views = view(shown, low, high, size, jobs), view(shown, *near, size, jobs)
    return Landscape(title, operand.format.names, *views, path)


def view(loss: Loss, low: Tensor, high: Tensor, size: int, jobs: int = 1) -> View:
    """Return the losses of one group on a grid of `size` points in each direction."""
    points = grid(low, high, (size,) * len(low))
    with ThreadPoolExecutor(jobs) as pool:
        losses = torch.cat(list(pool.map(torch.no_grad()(loss), points.split(size))))
    start, end = (corner.reshape(-1).float().cpu() for corner in (low, high))
    lines = tuple((torch.linspace(0, 1, size)[:, None] * (end - start) + start).T)
    return View(start, end, lines, losses.reshape([size] * len(low)).float().cpu())


def fpcs_path(operand: Operand, search: Search, loss: Loss, rough: Loss | None) -> SearchPath:
    """Return the path of the configured search of an operand with one group, by recording the points that it evaluates.

    loss: the loss that survivors and the walk use. rough: the cheaper loss that the steps use, if any. Raises
    ValueError if the strategy is not FPCS.
    """
    if search.strategy != "fpcs":
        raise ValueError(f"strategy = {search.strategy!r} has no path to draw: choose 'fpcs'")
    asked: list[tuple[bool, Tensor, Tensor]] = []

    def noting(function: Loss, exact: bool) -> Loss:
        def noted(points: Tensor) -> Tensor:
            losses = function(points)
            asked.append((exact, points.reshape(len(points), -1).float().cpu(), losses.reshape(-1).float().cpu()))
            return losses

        return noted

    point = minimise(noting(loss, True), operand, search, None, rough and noting(rough, False))
    least = float(loss(point[None]))
    # Each step calls one loss with many points. The survivors are scored by the loss on more rows, and then so is the
    # walk, which starts with a single point. Last comes a line of scales through the end of the walk.
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


# --- drawing ---------------------------------------------------------------------------------------------------------


def landscape_figure(found: Sequence[Landscape], title: str = "") -> "Figure":
    """Draw one column per operand: the loss [dB above the least] with the path, over the box and near the result."""
    from matplotlib.colors import BoundaryNorm, ListedColormap

    figure = new_figure(10 if len(found) > 1 else 6.5, 10, title)
    axes = figure.subplots(2, len(found), squeeze=False)
    shades: dict[int, Any] = {}
    for column, each in zip(axes.T, found, strict=True):
        floor = min(each.whole.losses.min(), each.near.losses.min()).clamp(min=torch.finfo(torch.float32).tiny)
        for axis, shown in zip(column, (each.whole, each.near), strict=True):
            decibels = 10 * (shown.losses / floor).clamp(min=1).log10()
            row = int(shown is each.near)
            if len(each.names) == 1:
                axis.plot(shown.lines[0].numpy(), decibels.numpy(), color="#777777", lw=1.5)
                axis.set_ylabel("loss above the least [dB]", fontsize=TEXT)
            else:
                cells = [float(line[0] - (line[1] - line[0]) / 2) for line in shown.lines]
                cells += [float(line[-1] + (line[1] - line[0]) / 2) for line in shown.lines]
                shades[row] = axis.imshow(
                    decibels.T.numpy(),
                    cmap=ListedColormap(SHADES),
                    norm=BoundaryNorm(_STEPS[row], len(SHADES), extend="max"),
                    extent=(cells[0], cells[2], cells[1], cells[3]),
                    origin="lower",
                    aspect="auto",
                    interpolation="nearest",
                )
                axis.set_ylabel(each.names[1], fontsize=TEXT)
            _draw_path(axis, each.path, None if len(each.names) > 1 else (shown.lines[0], decibels))
            _frame(axis, each.names[0].startswith("q"), shown, 0.04 if shown is each.whole else 0)
            axis.set_title("near the result" if row else each.title, fontsize=TEXT)
            axis.set_xlabel(each.names[0], fontsize=TEXT)
    for row, image in shades.items():
        bar = figure.colorbar(image, ax=axes[row].tolist(), pad=0.02)
        bar.set_label("loss above the least [dB]", fontsize=TEXT)
        bar.ax.tick_params(labelsize=SMALL)
    add_legend(figure, axes[0, 0], 6 if len(found) > 1 else 3)
    return figure


def _draw_path(axis: "Axes", path: SearchPath, curve: tuple[Tensor, Tensor] | None) -> None:
    """Draw the points of a path.

    curve: the loss curve to place points on, if there is one hyperparameter; else None.
    """

    def place(points: Tensor) -> Any:
        if curve is None:
            return points.T.numpy()
        return points[:, 0].numpy(), np.interp(points[:, 0].numpy(), curve[0].numpy(), curve[1].numpy())

    later = torch.cat([*path.steps[1:], path.steps[0][:0]])
    axis.plot(*place(path.steps[0]), "o", ms=5, mfc="none", mec=COLOURS[6], label="first grid", zorder=3)
    axis.plot(*place(path.parents), "o", ms=5, color=COLOURS[0], label="parents", zorder=3)
    axis.plot(*place(later), ".", ms=5, color=COLOURS[5], label="children", zorder=3)
    axis.plot(*place(path.judged), "s", ms=8, mfc="none", mec=COLOURS[2], mew=2, label="survivors", zorder=4)
    axis.plot(*place(path.walk), "-", lw=2, color=COLOURS[4], marker="D", ms=5, label="walk", zorder=5)
    axis.plot(*place(path.final[None]), "*", ms=15, color=COLOURS[1], mec="black", label="result", zorder=6)


def _frame(axis: "Axes", whole_q: bool, shown: View, margin: float) -> None:
    """Show the box with a margin, and label q if log2(q) is the hyperparameter."""
    border = margin * (shown.high - shown.low).clamp(min=1e-12)
    low, high = shown.low - border, shown.high + border
    axis.set_xlim(float(low[0]), float(high[0]))
    if len(low) > 1:
        axis.set_ylim(float(low[1]), float(high[1]))
    if whole_q:
        octaves = float(shown.high[0] - shown.low[0])
        places = [float(shown.low[0]) + octaves * (index + 0.5) / 4 for index in range(4)]
        if octaves > 3:
            places = list(range(math.ceil(float(shown.low[0])), math.floor(float(shown.high[0])) + 1))
        axis.set_xticks(places, [f"{2**place:.3g}" for place in places])
    axis.tick_params(labelsize=SMALL)
