"""Measure accuracy against size and operations, for budgets between the narrowest and the widest operands."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial as partial_of
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from adalog.calibration.calibration import Calibration
from adalog.calibration.partial import fingerprint
from adalog.calibration.schedule import SERIAL, Resources
from adalog.config import Config
from adalog.errors import DataError
from adalog.finished import FinishedParts
from adalog.graph.program import Program, refs_of
from adalog.model import QuantizedModel, quickest
from adalog.ranks import Codec, json_codec
from adalog.study.budget import Budget, budget_of, quantize_within
from adalog.study.drawing import COLOURS, TEXT, add_legend, new_figure
from adalog.study.evaluate import Contest, PreparedImages, in_batches, predict, tally
from adalog.study.sensitivity import Measure, Sensitivity, loss_of, loss_terms

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BUDGETS = 10


@dataclass(frozen=True)
class Point:
    """One model of the curve.

    chosen: True if its widths were chosen within a budget. Otherwise all operands but images have `width` bits.
    width: for a chosen model, the width of all operands that would take the bytes of its budget. bops: of one image.
    loss, agreement: on the evaluation images without labels; agreement with the full-precision model's top-1 is for
    classifiers. top1: fraction of the labelled images that are classified correctly, if there are any.
    """

    chosen: bool
    width: float
    bytes: int
    bops: int
    loss: float
    agreement: float | None = None
    top1: float | None = None


def _point_of(name: str, content: Any) -> Point | None:
    """Return the point that `content`, the JSON of `asdict`, describes, or None; raise TypeError for anything else."""
    if content is None:
        return None
    point = Point(**content)
    plain = (point.width, point.loss, *(number for number in (point.agreement, point.top1) if number is not None))
    good = type(point.chosen) is bool and all(type(number) is int for number in (point.bytes, point.bops))
    if not good or not all(type(number) in (int, float) for number in plain):
        raise TypeError(f"the point {name!r} has invalid values")
    return point


_POINTS: Codec[Point | None] = json_codec(lambda point: None if point is None else asdict(point), _point_of)


@torch.no_grad()
def curve(
    calibration: Calibration,
    config: Config,
    measurement: Sensitivity,
    model: Callable[[Tensor], Any],
    judged: Tensor,
    resources: Resources = SERIAL,
    *,
    labelled: tuple[PreparedImages, Tensor] | None = None,
    count: int = BUDGETS,
    notes: dict[str, Any] | None = None,
) -> list[Point]:
    """Return models with one width for all operands, and models within `count` budgets between those models.

    A budget that no widths meet has no point.
    model: in full precision. judged: evaluation images without labels. labelled: such images with their labels.
    resources: the partial file holds points, and progress counts models. Ranks share the searches and the images of
    each model, but not whole models, since the models have most searches in common.
    Raises DataError for a model with several outputs, and for a sensitivity that has only one width or belongs to
    another model or method.
    """
    check_output(calibration.program)
    measurement.check(calibration, config)
    widths = sorted({row.bits for row in measurement.rows})
    if len(widths) < 2:
        raise DataError(f"the sensitivity has only rows at {widths[0]} bits: measure two widths or more")
    partial, ranks, alone = resources.partial, resources.ranks, replace(resources, partial=None, progress=None)
    judge = _CurveEvaluator(measurement.measure, judged, predict(model, judged, jobs=resources.jobs), labelled, alone)
    shares = np.linspace(0, 1, count + 1)[1:].tolist()  # the narrowest width leaves no choice
    names = [*(f"{width} bits for all" for width in widths), *(f"budget {share}" for share in shares)]
    lines = None
    if partial is not None:
        made_of = fingerprint((measurement.to_json(), count), [("judged", judged), ("expected", judge.expected)])
        labels = "" if labelled is None else _fingerprint(*labelled)
        title = f"{calibration.fingerprint(config)} {made_of} {labels}"
        lines = FinishedParts(partial, title, "points", ranks.rank).alone()
    points: dict[str, Point | None] = {}
    if lines is not None:
        with lines.refusing():
            points = {name: _point_of(name, line["point"]) for name, line in lines.parts.items()}
    points = ranks.agree(names, points, _POINTS)

    def same_width(width: int) -> Point:
        choices = replace(config, weight_bits=width, activation_bits=width, softmax_bits=width)
        quantized = calibration.quantize(choices, alone)
        quantized.note(**(notes or {}))
        return judge.point(quantized, False, width, *budget_of(quantized))

    def within(share: float) -> Point | None:
        low, high = (points[names[number]] for number in (0, len(widths) - 1))
        assert low is not None
        assert high is not None
        width = low.width + share * (high.width - low.width)
        part = (width**2 - low.width**2) / (high.width**2 - low.width**2)  # BOPs grow with the square of the width
        limits = low.bytes + share * (high.bytes - low.bytes), low.bops + part * (high.bops - low.bops)
        budget = Budget(int(limits[0]) + 1024, limits[1] + 1)
        try:
            model = quantize_within(calibration, config, measurement, budget, alone, notes=notes)
        except DataError:  # close to the narrowest width, the file's own header may leave no choice
            return None
        return judge.point(model.model, True, width, model.bytes, model.bops)

    makes: list[Callable[[], Point | None]] = [partial_of(same_width, width) for width in widths]
    makes += [partial_of(within, share) for share in shares]
    for done, (name, make) in enumerate(zip(names, makes, strict=True), 1):
        if name not in points:
            points[name] = point = make()
            if lines is not None and ranks.first:
                lines.add(name, {"point": None if point is None else asdict(point)})
        resources.report(done, len(names), name)
    return [point for point in points.values() if point is not None]


def check_output(program: Program) -> None:
    """Raise DataError for a model with several outputs, since a point has one loss."""
    count = len({*refs_of(program.output)})
    if count > 1:
        raise DataError(
            f"the model has {count} outputs, but a curve needs a single one: give a model that returns only that output"
        )


def _fingerprint(prepared: PreparedImages, labels: Tensor) -> str:
    """Return a fingerprint of labelled images; files count by their paths."""
    images, tensors = prepared.images, [("labels", labels)]
    if isinstance(images, Tensor):
        return fingerprint(len(images), [*tensors, ("images", images)])
    return fingerprint([str(path) for path in images.paths], tensors)


@dataclass(frozen=True)
class _CurveEvaluator:
    """Evaluates the models of a curve. expected: the full-precision model's outputs on the images `judged`."""

    measure: Measure
    judged: Tensor
    expected: Tensor
    labelled: tuple[PreparedImages, Tensor] | None
    resources: Resources

    def point(self, quantized: QuantizedModel, chosen: bool, width: float, size: int, bops: int) -> Point:
        """Evaluate a model and return its point; ranks share its images."""
        runs, _, jobs = quickest(quantized, self.resources.jobs)

        def alike(numbers: range) -> tuple[float, float, int]:
            output, own = (outputs[numbers.start : numbers.stop] for outputs in (self.judged, self.expected))
            output = predict(runs, output)
            same = tally(output, reference=own).agreeing if self.measure == "kl" else 0
            return *loss_terms(self.measure, own, output), same or 0

        resources, top1 = replace(self.resources, jobs=jobs), None
        terms = in_batches(len(self.judged), alike, resources)
        error, power, same = (sum(column) for column in zip(*terms, strict=True))
        agreement = same / len(self.judged) if self.measure == "kl" else None
        if self.labelled is not None:
            place = self.judged.device
            (counts,) = Contest([runs], [place.type != "cpu"], place).tallies(*self.labelled, resources)
            top1 = None if counts.right is None else counts.right / counts.images
        return Point(chosen, width, size, bops, loss_of(error, power), agreement, top1)


def pareto_figure(points: list[Point], measure: str, name: str) -> "Figure":
    """Draw the loss, and top-1 if known, against the bytes and the BOPs of the models."""
    rows = [("loss", "KL divergence [nats]" if measure == "kl" else measure)]
    if all(point.top1 is not None for point in points):
        rows.append(("top1", "top-1 [%]"))
    figure = new_figure(10, 4 * len(rows), f"Widths within budgets: {name}")
    axes = figure.subplots(len(rows), 2, squeeze=False, sharey="row")
    columns = (("bytes", "file [MB]", 1e6), ("bops", "BOPs per image [G]", 1e9))
    kinds = [(False, "one width for all", "s--", COLOURS[1]), (True, "widths chosen within a budget", "o-", COLOURS[0])]
    for line, (what, label) in zip(axes, rows, strict=True):
        for axis, (field, unit, scale) in zip(line, columns, strict=True):
            for chosen, kind, style, colour in kinds:
                series = sorted((point for point in points if point.chosen == chosen), key=lambda point: point.bytes)
                across = [getattr(point, field) / scale for point in series]
                up = [getattr(point, what) * (100 if what == "top1" else 1) for point in series]
                axis.plot(across, up, style, color=colour, label=kind)
            axis.set_xlabel(unit, fontsize=TEXT)
            axis.grid(alpha=0.3)
            if what == "loss":
                axis.set_yscale("log")
        line[0].set_ylabel(label, fontsize=TEXT)
    add_legend(figure, axes[0, 0], 2)
    return figure
