"""Draw the levels of quantizers over the values they quantize (the paper's Figures 1 and 4)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from adalog.calibration.calibration import Calibration
from adalog.config import Config
from adalog.graph.activations import GELUS
from adalog.quantizers import Quantizer, at_least_float32
from adalog.study.drawing import COLOURS, LARGE, SMALL, TEXT, add_legend, new_figure, title_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEVEL_METHODS = ("uniform", "log2", "log-sqrt2", "adalog")  # methods that differ only after softmax and GELU
HISTOGRAMS = (  # the caption of a figure of `histogram_panels`
    "Grey: histograms of the values that enter products after a softmax and a GELU. The axes of the right column, "
    "and all counts, are logarithmic. Above: the levels of each quantizer, one tick per level. On the logarithmic "
    "axis, an arrowhead marks levels further to the left, down to zero, and the first bar counts the values there. "
    "The percentages are the shares of values that go to the lowest level."
)
_BARS = 160
_OCTAVES = 16  # span of a logarithmic axis


def thresholds_of(quantizer: Quantizer) -> Tensor:
    """Return the least value that goes to each level but the lowest, ascending; the quantizer has one scale."""
    quantizer_here = quantizer.restore_offset().map(lambda value: value.reshape(()).cpu())
    levels = quantizer.levels()
    low, high, above = levels[:-1].clone(), levels[1:].clone(), levels[1:]
    for _ in range(64):  # enough for the exponent and the mantissa of a float
        middle = (low + high) / 2
        reached = quantizer_here.fake_quantize(middle) >= above
        low, high = torch.where(reached, low, middle), torch.where(reached, middle, high)
    return high


@dataclass(frozen=True)
class Panel:
    """Levels to draw: quantizers by the name of a method or a site, over the values of a site, if known.

    lift: added to the values, which makes them positive for a logarithmic axis.
    """

    title: str
    quantizers: Mapping[str, Quantizer]
    lift: float = 0.0
    values: Tensor | None = None


def histogram_panels(calibration: Calibration, configs: Mapping[str, Config]) -> list[Panel]:
    """Return the values after a softmax and after a GELU on the calibration images, with each config's levels.

    The sites are the middle one after a softmax, and the ones one half and five sixths in after a GELU, as in Figure 4.
    """
    panels = []
    for kinds, places in ((("softmax",), (1 / 2,)), (GELUS, (1 / 2, 5 / 6))):
        sites = [site for site in calibration.sites if site.left_source.kind in kinds]
        sites = [site for site in sites if site.role in ("linear", "av")]
        for index in dict.fromkeys(int(len(sites) * place) for place in places if sites):
            site = sites[index]
            operands = {
                name: calibration.search(config, [site.name])[0].assignment.left for name, config in configs.items()
            }
            shown = {name: side for name, side in operands.items() if side is not None and side.scale.numel() == 1}
            title = f"after {title_of(site.left_source.kind)}: {site.name}"
            panels.append(Panel(title, shown, -site.left_source.minimum, calibration.operand(site.left)))
    return panels


def histogram(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Count the values in each bar; values beyond the edges count in the first and the last bar."""
    return np.histogram(values.astype(np.float64).clip(edges[0], edges[-1]), edges)[0]


def level_figure(panels: Sequence[Panel], title: str = "") -> "Figure":
    """Draw levels as rows of ticks over a histogram of the values, on a linear and on a logarithmic axis.

    Without values, thresholds are drawn too, as dots. The number to the right of a row is the share of values that go
    to its lowest level, which is zero or close to it.
    """
    heights: list[float] = []
    for panel in panels:
        heights += [0.55 + 0.27 * len(panel.quantizers), *([] if panel.values is None else [1.5])]
    figure = new_figure(10, 0.6 + sum(heights) + 0.4 * len(panels), title)
    axes = figure.subplots(len(heights), 2, squeeze=False, height_ratios=heights)
    row = 0
    for panel in panels:
        rows = axes[row : row + (1 if panel.values is None else 2)]
        values = None if panel.values is None else at_least_float32(panel.values.flatten()).cpu().numpy()
        _draw_panel(panel, values, *rows[:, 0], logarithmic=False)
        _draw_panel(panel, values, *rows[:, 1], logarithmic=True)
        rows[0, 0].set_title(panel.title, fontsize=LARGE, loc="left", parse_math=False)
        row += len(rows)
    if panels[0].values is None:
        add_legend(figure, axes[0, 0], 2)
    return figure


def _draw_panel(
    panel: Panel, values: np.ndarray | None, upper: "Axes", lower: "Axes | None" = None, *, logarithmic: bool
) -> None:
    """Draw one column of a panel: levels above and, if there are values, bars below."""
    ends = [float(end) for quantizer in panel.quantizers.values() for end in quantizer.levels()[[0, -1]]]
    if values is not None:
        ends += [float(values.min()), float(values.max())]
    low, high = min(ends, default=0.0), max(ends, default=1.0)
    if logarithmic:
        high = max(high + panel.lift, 2.0**-100)
        low = high * 2.0**-_OCTAVES
    elif low == high:
        high = low + 1
    _draw_levels(upper, panel, values, logarithmic, low)
    if lower is not None and values is not None:
        edges = np.geomspace(low, high, _BARS + 1) if logarithmic else np.linspace(low, high, _BARS + 1)
        counts = histogram(values + panel.lift if logarithmic else values, edges)
        lower.stairs(counts, edges, fill=True, color="#999999")
        lower.set_yscale("log")
        lower.set_ylim(0.7, max(10, 2 * counts.max()))
        if not logarithmic:
            lower.set_ylabel("values", fontsize=TEXT)
    bottom = lower or upper
    for axis in dict.fromkeys((upper, bottom)):
        if logarithmic:
            axis.set_xscale("log", base=2)
            axis.set_xlim(low / 1.3, high * 1.3)
        else:
            axis.set_xlim(low - 0.03 * (high - low), high + 0.03 * (high - low))
        axis.minorticks_off()
        axis.tick_params(labelsize=SMALL)
    if lower is not None:
        upper.tick_params(axis="x", which="both", bottom=False, labelbottom=False)
    name = f"value + {panel.lift:.3g}" if logarithmic and panel.lift else "value"
    bottom.set_xlabel(f"{name}, logarithmic axis" if logarithmic else name, fontsize=TEXT)


def _draw_levels(axis: "Axes", panel: Panel, values: np.ndarray | None, logarithmic: bool, least: float) -> None:
    """Draw one row of ticks per quantizer; on a logarithmic axis, an arrowhead marks levels below its end."""
    names, shares = list(panel.quantizers), []
    for number, quantizer in enumerate(panel.quantizers.values()):
        colour = COLOURS[0] if values is None else COLOURS[number % len(COLOURS)]
        levels, thresholds = quantizer.levels().numpy(), thresholds_of(quantizer).numpy()
        if values is not None:
            shares.append(float((values < thresholds[0]).mean()))
        if logarithmic:
            levels, thresholds = levels + panel.lift, thresholds + panel.lift
            if levels[0] < least:
                axis.plot([least], [number], marker="<", ms=7, color=colour, linestyle="none")
            levels, thresholds = levels[levels >= least], thresholds[thresholds >= least]
        ends = [least if logarithmic else levels.min(), levels.max(initial=least)]
        axis.plot(ends, [number] * 2, color=colour, lw=0.8, alpha=0.5)
        words = ("", "") if number else ("level", "threshold")
        axis.plot(levels, [number] * len(levels), "|", ms=13, mew=2, color=colour, label=words[0])
        if values is None:
            axis.plot(thresholds, [number] * len(thresholds), ".", ms=5, color=COLOURS[4], label=words[1])
    axis.set_ylim(len(names) - 0.4, -0.6)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_visible(values is None)
    axis.tick_params(axis="y", length=0)
    if not logarithmic:
        axis.set_yticks(range(len(names)), names, fontsize=SMALL if values is None else TEXT, parse_math=False)
        return
    axis.yaxis.tick_right()
    axis.set_yticks(range(len(shares)), [f"{100 * share:.0f} %" for share in shares], fontsize=TEXT)
    if shares:
        axis.set_title("values at the lowest level", fontsize=SMALL, loc="right")
