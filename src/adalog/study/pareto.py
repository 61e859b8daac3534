"""The curve of accuracy against size and operations: budgets between the narrowest and the widest operands."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from adalog.calibration.calibration import Calibration
from adalog.calibration.schedule import Progress
from adalog.config import Config
from adalog.errors import DataError
from adalog.model import QuantizedModel, quickest
from adalog.study.budget import Budget, quantize_within, taken
from adalog.study.drawing import COLOURS, TEXT, add_legend, new_figure
from adalog.study.evaluate import predict, score
from adalog.study.sensitivity import Sensitivity, loss_of, loss_terms

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BUDGETS = 10


@dataclass(frozen=True)
class Point:
    """One model of the curve.

    chosen: whether its widths were chosen within a budget; else all operands have `width` bits, but for images, which
    have those of the choices. width: for a chosen one, that of all operands which would take what its budget allows.
    bops: of one image. loss: of the output on the images that judge without labels, by the sensitivity's measure.
    agreement: share of these images with the same first answer, for a classifier. top1: share of labelled images,
    where there are any.
    """

    chosen: bool
    width: float
    bytes: int
    bops: int
    loss: float
    agreement: float | None = None
    top1: float | None = None


@torch.no_grad()
def curve(
    calibration: Calibration,
    config: Config,
    found: Sensitivity,
    model: Callable[[Tensor], Any],
    judged: Tensor,
    *,
    labelled: tuple[Tensor, Tensor] | None = None,
    count: int = BUDGETS,
    notes: dict[str, Any] | None = None,
    jobs: int = 1,
    progress: Progress | None = None,
) -> list[Point]:
    """Models of one width for all, and models within `count` budgets between the narrowest and the widest of these.

    model: the full-precision one. judged: images that judge without labels. labelled: images with their labels.
    A budget that no widths meet has no point. progress(done, total, name): counts models. Raises DataError for the
    sensitivity of one width alone.
    """
    widths = sorted({row.bits for row in found.rows})
    if len(widths) < 2:
        raise DataError(f"the sensitivity has rows of {widths[0]} bits alone: a curve takes two widths or more")
    expected = predict(model, judged, jobs=jobs)

    def point(quantized: QuantizedModel, chosen: bool, width: float, size: int, bops: int) -> Point:
        runs, _, at_once = quickest(quantized, jobs)
        output = predict(runs, judged, jobs=at_once)
        error, power = loss_terms(found.measure, expected, output)
        agreement = score(output, reference=expected).agreement if found.measure == "kl" else None
        told = None if labelled is None else score(predict(runs, labelled[0], jobs=at_once), labelled[1]).top1
        return Point(chosen, width, size, bops, loss_of(error, power), agreement, None if told is None else told.value)

    def points() -> Iterator[Point | None]:
        for width in widths:
            choices = replace(config, weight_bits=width, activation_bits=width, softmax_bits=width)
            quantized = calibration.quantize(choices, jobs=jobs)
            quantized.note(**(notes or {}))
            yield (one := point(quantized, False, width, *taken(quantized)))
            ends.append(one)
        low, high = ends[0], ends[-1]
        for share in np.linspace(0, 1, count + 1)[1:]:  # at the narrowest width there is nothing to choose
            width = low.width + share * (high.width - low.width)
            part = (width**2 - low.width**2) / (high.width**2 - low.width**2)  # BOPs grow with both operands' widths
            limits = low.bytes + share * (high.bytes - low.bytes), low.bops + part * (high.bops - low.bops)
            budget = Budget(int(limits[0]) + 1024, limits[1] + 1)
            try:
                within = quantize_within(calibration, config, found, budget, notes=notes, jobs=jobs)
            except DataError:  # close to the narrowest width the file's own header may not leave room for a choice
                yield None
            else:
                yield point(within.model, True, float(width), within.bytes, within.bops)

    ends: list[Point] = []
    result: list[Point] = []
    for done, each in enumerate(points(), 1):
        result += [] if each is None else [each]
        if progress is not None:
            progress(done, len(widths) + count, f"{result[-1].width:.1f} bits")
    return result


def pareto_figure(points: list[Point], measure: str, name: str) -> "Figure":
    """Loss, and top-1 where it is known, against the bytes and the BOPs of the models."""
    rows = [("loss", "KL divergence [nats]" if measure == "kl" else measure)]
    if all(each.top1 is not None for each in points):
        rows.append(("top1", "top-1 [%]"))
    figure = new_figure(10, 4 * len(rows), f"Widths within budgets: {name}")
    axes = figure.subplots(len(rows), 2, squeeze=False, sharey="row")
    kinds = [(False, "one width for all", "s--", COLOURS[1]), (True, "widths chosen within a budget", "o-", COLOURS[0])]
    for line, (what, label) in zip(axes, rows, strict=True):
        for axis, (field, unit, scale) in zip(
            line, (("bytes", "file [MB]", 1e6), ("bops", "BOPs of an image [G]", 1e9)), strict=True
        ):
            for chosen, kind, style, colour in kinds:
                mine = sorted((each for each in points if each.chosen == chosen), key=lambda each: each.bytes)
                across = [getattr(each, field) / scale for each in mine]
                up = [getattr(each, what) * (100 if what == "top1" else 1) for each in mine]
                axis.plot(across, up, style, color=colour, label=kind)
            axis.set_xlabel(unit, fontsize=TEXT)
            axis.grid(alpha=0.3)
            if what == "loss":
                axis.set_yscale("log")
        line[0].set_ylabel(label, fontsize=TEXT)
    add_legend(figure, axes[0, 0], 2)
    return figure
