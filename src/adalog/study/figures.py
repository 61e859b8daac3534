"""Pictures of what quantizers do: histograms with levels (the paper's Figures 1 and 4), a search's landscape, SQNR.

Functions from data to matplotlib figures; nothing global of matplotlib is changed or relied on.
"""

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from adalog.calibration.calibration import Calibration
from adalog.calibration.schedule import Progress
from adalog.choices import Search
from adalog.config import Config
from adalog.graph.program import FAKE_QUANTIZE, Node
from adalog.graph.sites import GELUS, POWER_LAW_ACTIVATIONS
from adalog.ledger import LedgerRow
from adalog.model import QuantizedModel
from adalog.quantizers import LogQuantizer, Quantizer, at_least_float32
from adalog.study.landscape import Landscape, SearchPath, View, example_site, landscapes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, told apart without seeing red and green, less the yellow, which is too pale on white.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000")
MARKERS = "os^DvPX<>ph*d"
_DASHES = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (5, 1, 1, 1)), (0, (3, 1, 1, 1, 1, 1)))
# Points [1/72 inch], of pictures about 10 inches wide: to be read at half their size.
_LARGE, _TEXT, _SMALL = 14, 12.5, 11.5
_DPI = 150
_BARS = 160
_OCTAVES = 16  # of a logarithmic axis
_SHADES = ("#FFFFFF", "#E8E8E8", "#D0D0D0", "#B8B8B8", "#A0A0A0", "#888888")
_STEPS = (0, 0.5, 1, 2, 4, 8), (0, 0.05, 0.1, 0.2, 0.4, 0.8)  # dB above the least loss: where shades begin; and near
_NO_LEVELS = "nothing that follows a softmax, a GELU or the like is quantized with one scale"
LEVEL_METHODS = ("uniform", "log2", "log-sqrt2", "adalog")  # which differ after softmax and GELU alone
_TITLES = {"layer_norm": "LayerNorm", "softmax": "softmax", "gelu": "GELU", "quick_gelu": "quick GELU", "silu": "SiLU"}
_TITLES |= {"relu": "ReLU"}
_ROLES = {"qk": "Q Kᵀ", "av": "A V", "conv": "convolution"}
_USUAL = (("qk", "other"), ("av", "softmax"), ("conv", "input"))  # where the source need not be told


# --- levels ----------------------------------------------------------------------------------------------------------


def _as_read(quantizer: Quantizer) -> Quantizer:
    """The quantizer in the domain of what it quantizes: with the offset taken off, if a bias has absorbed it."""
    return replace(quantizer, keeps_offset=False) if isinstance(quantizer, LogQuantizer) else quantizer


def levels_of(quantizer: Quantizer) -> Tensor:
    """Every value the quantizer can put out, in the domain of what it quantizes, ascending; of all its scales."""
    extra = isinstance(quantizer, LogQuantizer) and quantizer.beyond == "zero"  # a code more
    codes = torch.arange(2**quantizer.bits + extra, dtype=torch.float32, device=quantizer.scale.device)
    return _as_read(quantizer).map(lambda value: value.reshape(-1, 1)).dequantize(codes).unique().cpu()


def thresholds_of(quantizer: Quantizer) -> Tensor:
    """Where one level gives way to the next, ascending, found by halving what lies between them: one scale only."""
    read = _as_read(quantizer).map(lambda value: value.reshape(()).cpu())
    levels = levels_of(quantizer)
    low, high, above = levels[:-1].clone(), levels[1:].clone(), levels[1:]
    for _ in range(64):  # a float's exponent and mantissa
        middle = (low + high) / 2
        reached = read.fake_quantize(middle) >= above
        low, high = torch.where(reached, low, middle), torch.where(reached, middle, high)
    return high


@dataclass(frozen=True)
class Panel:
    """One set of levels to draw: quantizers by what each is (a method, a site), over the values of a site, if any.

    lift: what makes the values positive, for a logarithmic axis.
    """

    title: str
    quantizers: Mapping[str, Quantizer]
    lift: float = 0.0
    values: Tensor | None = None


def histogram_panels(calibration: Calibration, configs: Mapping[str, Config]) -> list[Panel]:
    """What follows a softmax and a GELU on the calibration images, with the levels under each of the choices.

    Of the sites after a softmax the middle one; after a GELU the middle one and one five sixths in, as in Figure 4.
    """
    panels = []
    for kinds, places in ((("softmax",), (1 / 2,)), (GELUS, (1 / 2, 5 / 6))):
        sites = [site for site in calibration.sites if site.left_source.kind in kinds]
        sites = [site for site in sites if site.role in ("linear", "av")]
        for index in dict.fromkeys(int(len(sites) * place) for place in places if sites):
            site = sites[index]
            found = {
                name: calibration.search(config, [site.name])[0].assignment.left for name, config in configs.items()
            }
            shown = {name: each for name, each in found.items() if each is not None and each.scale.numel() == 1}
            title = f"after {_title(site.left_source.kind)}: {site.name}"
            panels.append(Panel(title, shown, -site.left_source.minimum, calibration.operand(site.left)))
    return panels


def _power_laws(model: QuantizedModel) -> dict[str, dict[str, str]]:
    """Of a quantized model, by what they follow and by site: the fake-quantize nodes of activations of a power law."""
    found: dict[str, dict[str, str]] = {}
    for row in model.ledger:
        name = f"{row.site}.{'left' if row.role in ('qk', 'av') else 'input'}"
        quantizer = model.program.quantizers.get(name)  # linears of one activation have one, of the first one's name
        if row.source in ("softmax", *POWER_LAW_ACTIVATIONS) and quantizer is not None and quantizer.scale.numel() == 1:
            found.setdefault(row.source, {})[row.site] = name
    return found


def site_panels(model: QuantizedModel) -> list[Panel]:
    """The levels of every site after a softmax, a GELU or the like, which a file tells without any image."""
    panels = []
    for source, sites in _power_laws(model).items():
        quantizers = {site: model.program.quantizers[name] for site, name in sites.items()}
        panels.append(Panel(f"after {_title(source)}", quantizers, max(map(_lift, quantizers.values()))))
    return panels


def _lift(quantizer: Quantizer) -> float:
    """What makes the values of a quantizer positive, as far as its levels tell."""
    return quantizer.offset if isinstance(quantizer, LogQuantizer) else max(0.0, -float(levels_of(quantizer)[0]))


@torch.no_grad()
def observed_panels(model: QuantizedModel, images: Tensor) -> list[Panel]:
    """What its quantizers after softmax and GELU are given in a quantized model, with their levels: sites as above."""
    wanted = {}
    for source, sites in _power_laws(model).items():
        names = list(sites)
        for place in (1 / 2,) if source == "softmax" else (1 / 2, 5 / 6):
            site = names[int(len(names) * place)]
            wanted[sites[site]] = (source, site)
    seen: dict[str, list[Tensor]] = {}

    def watch(node: Node, args: tuple[Any, ...], result: Any) -> None:
        if node.op == FAKE_QUANTIZE and node.name in wanted:
            seen.setdefault(node.name, []).append(args[0].flatten())

    for part in images.split(16):
        model.program.run([part], watch)
    panels = []
    for name, (source, site) in wanted.items():
        quantizer = model.program.quantizers[name]
        title = f"after {_title(source)}: {site}"
        panels.append(Panel(title, {_words(quantizer): quantizer}, _lift(quantizer), torch.cat(seen[name])))
    return panels


def _words(quantizer: Quantizer) -> str:
    """A short name for the rows of a figure."""
    if isinstance(quantizer, LogQuantizer):
        return f"log, base 2^({quantizer.q}/{quantizer.r})"
    return type(quantizer).__name__.removesuffix("Quantizer").lower()


def _title(source: str) -> str:
    return _TITLES.get(source, source.replace("_", " "))


def histogram(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """How many values are in each bar; those beyond the edges are in the first and last."""
    return np.histogram(values.astype(np.float64).clip(edges[0], edges[-1]), edges)[0]


def level_figure(panels: Sequence[Panel], title: str = "") -> "Figure":
    """Rows of ticks for the levels, on a linear axis and on a logarithmic one, over the histogram of the values.

    Without values the thresholds are drawn too, as dots. At the right of a row: how many of the values get its lowest
    level, which is zero or what stands for it.
    """
    heights = [
        height
        for panel in panels
        for height in (0.55 + 0.27 * len(panel.quantizers), *([] if panel.values is None else [1.5]))
    ]
    figure = _new_figure(10, 0.6 + sum(heights) + 0.4 * len(panels), title)
    axes = figure.subplots(len(heights), 2, squeeze=False, height_ratios=heights)
    row = 0
    for panel in panels:
        rows = axes[row : row + (1 if panel.values is None else 2)]
        values = None if panel.values is None else at_least_float32(panel.values.flatten()).cpu().numpy()
        _draw_panel(panel, values, *rows[:, 0], logarithmic=False)
        _draw_panel(panel, values, *rows[:, 1], logarithmic=True)
        rows[0, 0].set_title(panel.title, fontsize=_LARGE, loc="left", parse_math=False)
        row += len(rows)
    if panels[0].values is None:
        _legend(figure, axes[0, 0], 2)
    return figure


def _draw_panel(
    panel: Panel, values: np.ndarray | None, upper: "Axes", lower: "Axes | None" = None, *, logarithmic: bool
) -> None:
    """Levels above, bars below, if there are values; on an axis of both."""
    ends = [float(end) for quantizer in panel.quantizers.values() for end in levels_of(quantizer)[[0, -1]]]
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
            lower.set_ylabel("values", fontsize=_TEXT)
    bottom = lower or upper
    for axis in dict.fromkeys((upper, bottom)):
        if logarithmic:
            axis.set_xscale("log", base=2)
            axis.set_xlim(low / 1.3, high * 1.3)
        else:
            axis.set_xlim(low - 0.03 * (high - low), high + 0.03 * (high - low))
        axis.minorticks_off()
        axis.tick_params(labelsize=_SMALL)
    if lower is not None:
        upper.tick_params(axis="x", which="both", bottom=False, labelbottom=False)
    name = f"value + {panel.lift:.3g}" if logarithmic and panel.lift else "value"
    bottom.set_xlabel(f"{name}, logarithmic axis" if logarithmic else name, fontsize=_TEXT)


def _draw_levels(axis: "Axes", panel: Panel, values: np.ndarray | None, logarithmic: bool, least: float) -> None:
    """A row of ticks a quantizer. On a logarithmic axis what is below its end is an arrowhead there."""
    names, shares = list(panel.quantizers), []
    for number, quantizer in enumerate(panel.quantizers.values()):
        colour = COLOURS[0] if values is None else COLOURS[number % len(COLOURS)]
        levels, thresholds = levels_of(quantizer).numpy(), thresholds_of(quantizer).numpy()
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
        axis.set_yticks(range(len(names)), names, fontsize=_SMALL if values is None else _TEXT, parse_math=False)
        return
    axis.yaxis.tick_right()
    axis.set_yticks(range(len(shares)), [f"{100 * share:.0f} %" for share in shares], fontsize=_TEXT)
    if shares:
        axis.set_title("values at the lowest level", fontsize=_SMALL, loc="right")


# --- the landscape of a search ---------------------------------------------------------------------------------------


def landscape_figure(found: Sequence[Landscape], title: str = "") -> "Figure":
    """A column an operand: the loss [dB above the least] over the box and near what was found, and FPCS's points."""
    from matplotlib.colors import BoundaryNorm, ListedColormap

    figure = _new_figure(10 if len(found) > 1 else 6.5, 10, title)
    axes = figure.subplots(2, len(found), squeeze=False)
    shades: dict[int, Any] = {}
    for column, each in zip(axes.T, found, strict=True):
        floor = min(each.whole.losses.min(), each.near.losses.min()).clamp(min=torch.finfo(torch.float32).tiny)
        for axis, part in zip(column, (each.whole, each.near), strict=True):
            decibels = 10 * (part.losses / floor).clamp(min=1).log10()
            row = int(part is each.near)
            if len(each.names) == 1:
                axis.plot(part.lines[0].numpy(), decibels.numpy(), color="#777777", lw=1.5)
                axis.set_ylabel("loss above the least [dB]", fontsize=_TEXT)
            else:
                cells = [float(line[0] - (line[1] - line[0]) / 2) for line in part.lines]
                cells += [float(line[-1] + (line[1] - line[0]) / 2) for line in part.lines]
                shades[row] = axis.imshow(
                    decibels.T.numpy(),
                    cmap=ListedColormap(_SHADES),
                    norm=BoundaryNorm(_STEPS[row], len(_SHADES), extend="max"),
                    extent=(cells[0], cells[2], cells[1], cells[3]),
                    origin="lower",
                    aspect="auto",
                    interpolation="nearest",
                )
                axis.set_ylabel(each.names[1], fontsize=_TEXT)
            _draw_path(axis, each.path, None if len(each.names) > 1 else (part.lines[0], decibels))
            _frame(axis, each.names[0].startswith("q"), part, 0.04 if part is each.whole else 0)
            axis.set_title("near what was found" if row else each.title, fontsize=_TEXT)
            axis.set_xlabel(each.names[0], fontsize=_TEXT)
    for row, image in shades.items():
        bar = figure.colorbar(image, ax=axes[row].tolist(), pad=0.02)
        bar.set_label("loss above the least [dB]", fontsize=_TEXT)
        bar.ax.tick_params(labelsize=_SMALL)
    _legend(figure, axes[0, 0], 6 if len(found) > 1 else 3)
    return figure


def _draw_path(axis: "Axes", path: SearchPath, curve: tuple[Tensor, Tensor] | None) -> None:
    """curve: where there is one hyperparameter, the loss to place points on."""

    def place(points: Tensor) -> Any:
        if curve is None:
            return points.T.numpy()
        return points[:, 0].numpy(), np.interp(points[:, 0].numpy(), curve[0].numpy(), curve[1].numpy())

    later = torch.cat([*path.steps[1:], path.steps[0][:0]])
    axis.plot(*place(path.steps[0]), "o", ms=5, mfc="none", mec=COLOURS[6], label="first grid", zorder=3)
    axis.plot(*place(path.parents), "o", ms=5, color=COLOURS[0], label="kept of it", zorder=3)
    axis.plot(*place(later), ".", ms=5, color=COLOURS[5], label="children", zorder=3)
    axis.plot(*place(path.judged), "s", ms=8, mfc="none", mec=COLOURS[2], mew=2, label="survivors", zorder=4)
    axis.plot(*place(path.walk), "-", lw=2, color=COLOURS[4], marker="D", ms=5, label="walk", zorder=5)
    axis.plot(*place(path.final[None]), "*", ms=15, color=COLOURS[1], mec="black", label="found", zorder=6)


def _frame(axis: "Axes", whole_q: bool, part: View, margin: float) -> None:
    """The box with a margin; q itself where log2 q is the hyperparameter."""
    room = margin * (part.high - part.low).clamp(min=1e-12)
    low, high = part.low - room, part.high + room
    axis.set_xlim(float(low[0]), float(high[0]))
    if len(low) > 1:
        axis.set_ylim(float(low[1]), float(high[1]))
    if whole_q:
        octaves = float(part.high[0] - part.low[0])
        places = [float(part.low[0]) + octaves * (index + 0.5) / 4 for index in range(4)]
        if octaves > 3:
            places = list(range(math.ceil(float(part.low[0])), math.floor(float(part.high[0])) + 1))
        axis.set_xticks(places, [f"{2**place:.3g}" for place in places])
    axis.tick_params(labelsize=_SMALL)


# --- SQNR ------------------------------------------------------------------------------------------------------------


def kinds_of(ledger: Sequence[LedgerRow]) -> dict[str, list[LedgerRow]]:
    """The rows by kind of site, in words, in order of execution."""
    found: dict[str, list[LedgerRow]] = {}
    for row in ledger:
        role = _ROLES.get(row.role, row.role)
        kind = f"other {role}" if row.source == "other" else f"{role} after {_title(row.source)}"
        found.setdefault(role if (row.role, row.source) in _USUAL else kind, []).append(row)
    return found


def sqnr_figure(ledgers: Mapping[str, Sequence[LedgerRow]], title: str = "") -> "Figure":
    """The SQNR of every site under each method, a panel a kind of site; float sites have none."""
    kinds = kinds_of(next(iter(ledgers.values())))
    columns = min(3, len(kinds))
    rows = math.ceil(len(kinds) / columns)
    figure = _new_figure(10, 1.1 + 2.5 * rows, title)
    axes = figure.subplots(rows, columns, squeeze=False, sharey=True)
    for axis in axes.flat[len(kinds) :]:
        axis.set_visible(False)
    for number, (axis, (kind, members)) in enumerate(zip(axes.flat, kinds.items(), strict=False)):
        place = {row.site: index + 1 for index, row in enumerate(members)}
        for index, (method, ledger) in enumerate(ledgers.items()):
            points = [(place[row.site], row.sqnr) for row in ledger if row.site in place and math.isfinite(row.sqnr)]
            axis.plot(
                *(np.array(points).reshape(-1, 2).T),
                color=COLOURS[index % len(COLOURS)],
                marker=MARKERS[index % len(MARKERS)],
                linestyle=_DASHES[index % len(_DASHES)],
                ms=6,
                lw=1.4,
                label=method,
            )
        axis.set_title(kind, fontsize=_TEXT, parse_math=False)
        axis.grid(axis="y", color="#DDDDDD", lw=0.8)
        axis.set_axisbelow(True)
        axis.set_xlim(0.5, len(members) + 0.5)
        step = -(-len(members) // 8)
        axis.set_xticks(range(1, len(members) + 1, step))
        axis.tick_params(labelsize=_SMALL, labelleft=True)
        if number % columns == 0:
            axis.set_ylabel("SQNR [dB]", fontsize=_TEXT)
        if number + columns >= len(kinds):
            axis.set_xlabel("n-th site of its kind", fontsize=_TEXT)
    _legend(figure, axes[0, 0], min(len(ledgers), 5))
    return figure


# --- files -----------------------------------------------------------------------------------------------------------

CAPTIONS = {
    "histograms": (
        "Grey: how many values the products behind a softmax and a GELU are given; the axes of the right column, and "
        "all counts, are logarithmic. Above: the levels of each quantizer, a tick each; an arrowhead stands for "
        "levels, and the first bar for values, that lie further to the left, down to that axis's zero. The percentages "
        "are the values that get the lowest level."
    ),
    "levels": (
        "The levels and thresholds of each site behind a softmax, a GELU or the like, in order of execution, on a "
        "linear and on a logarithmic axis, where an arrowhead stands for levels further to the left, down to its zero."
    ),
    "landscape": (
        "Shades: the squared error of the product's output over the hyperparameters of one operand, the other being "
        "quantized as it was found, in dB above the least, on the rows that the steps of the search look at. FPCS "
        "scores the first grid (rings), keeps its best (dots), and places children around the best of each step (small "
        "dots). Survivors of the last step (squares) are scored on all rows; from the best of them the walk (line) and "
        "a line of scales lead to what is found (star). Below: the same near the star, in finer shades."
    ),
    "sqnr": (
        "The signal-to-quantization-noise ratio of each site's output on the calibration images, in order of "
        "execution; higher is better. Linears that read one activation are searched as one and have one ratio."
    ),
}
FORMS = ("png", "svg")


@dataclass(frozen=True)
class Drawn:
    """A figure by its name in `CAPTIONS`, with its heading."""

    name: str
    heading: str
    figure: "Figure"

    @property
    def caption(self) -> str:
        return f"{self.heading}. {CAPTIONS[self.name]}"


def of_model(
    calibration: Calibration,
    name: str,
    bits: str,
    methods: Sequence[str],
    *,
    site: str | None = None,
    jobs: int = 1,
    progress: Callable[[str], Progress] | None = None,
) -> tuple[list[Drawn], dict[str, str]]:
    """All figures of a calibrated model, and by name why some are left out.

    methods: whose SQNR to compare; the last one that searches by FPCS gives the levels and the landscape. site: of the
    landscape. progress(method): what is told as its sites are done. Raises ValueError for what is no site or method.
    """
    images = len(calibration.images[0])
    configs = {method: replace(Config.preset(bits, method), images=images) for method in methods}
    names = [each.name for each in calibration.sites]
    if site is not None and site not in names:
        raise ValueError(f"site = {site!r} is none of the {len(names)} sites, which `adalog inspect MODEL` lists")
    ledgers, law = {}, None
    for method, config in configs.items():
        quantized = calibration.quantize(config, None if progress is None else progress(method), jobs=jobs)
        ledgers[method] = quantized.ledger
        if isinstance(config.search, Search) and config.search.strategy == "fpcs":
            law = method, config.search, quantized
    drawn: list[Drawn] = []
    left_out = {}
    whose = f"{name} at {bits}"
    panels = histogram_panels(calibration, {method: Config.preset(bits, method) for method in LEVEL_METHODS})
    if panels:
        heading = f"{whose}, {images} images: values after softmax and GELU, and levels"
        drawn.append(Drawn("histograms", heading, level_figure(panels, heading)))
    else:
        left_out["histograms"] = "nothing follows a softmax or a GELU"
    if law is None:
        left_out |= dict.fromkeys(("levels", "landscape"), "none of the methods searches by FPCS, as adalog does")
    else:
        method, search, quantized = law
        _add_levels(drawn, left_out, f"{whose}, {method}", site_panels(quantized))
        site = site or example_site(calibration)
        (searched,) = calibration.search(configs[method], [site])
        found = landscapes(searched, search, jobs=jobs)
        if found:
            heading = f"{whose}, {method}: the search of {site}"
            drawn.append(Drawn("landscape", heading, landscape_figure(found, heading)))
        else:
            left_out["landscape"] = f"{site} is not quantized"
    heading = f"{whose}: SQNR of each site"
    drawn.append(Drawn("sqnr", heading, sqnr_figure(ledgers, heading)))
    return drawn, left_out


def of_artifact(model: QuantizedModel, name: str, images: Tensor | None) -> tuple[list[Drawn], dict[str, str]]:
    """What a quantized model tells by itself, and what its quantizers are given of images, if there are any.

    With it, by name, why other figures are left out.
    """
    drawn: list[Drawn] = []
    left_out = {"landscape": "an artifact does not hold what was searched: give the model"}
    panels = [] if images is None else observed_panels(model, images)
    if panels and images is not None:
        heading = f"{name}, {len(images)} images: values after softmax and GELU, and levels"
        drawn.append(Drawn("histograms", heading, level_figure(panels, heading)))
    else:
        left_out["histograms"] = "no images: give --data FOLDER" if images is None else _NO_LEVELS
    _add_levels(drawn, left_out, name, site_panels(model))
    heading = f"{name}: SQNR of each site"
    drawn.append(Drawn("sqnr", heading, sqnr_figure({model.config.bits: model.ledger}, heading)))
    return drawn, left_out


def _add_levels(drawn: list[Drawn], left_out: dict[str, str], whose: str, panels: Sequence[Panel]) -> None:
    if panels:
        heading = f"{whose}: levels of each site"
        drawn.append(Drawn("levels", heading, level_figure(panels, heading)))
    else:
        left_out["levels"] = _NO_LEVELS


def pictures(drawn: Sequence[Drawn], title: str, left_out: Mapping[str, str]) -> dict[str, tuple[bytes, str]]:
    """Every file, by name, with its caption: each figure in each form, and an index in Markdown.

    left_out: figures that were not drawn, and why.
    """
    files = {}
    lines = [f"# {title}"]
    for each in drawn:
        for form in FORMS:
            files[f"{each.name}.{form}"] = rendered(each.figure, form, each.caption), each.caption
        lines.append(f"![{each.name}]({each.name}.png)\n\n{each.caption}")
    lines += [f"Not drawn: {name}: {why}." for name, why in left_out.items()]
    text = "\n\n".join(lines) + "\n"
    return files | {"index.md": (text.encode("utf-8", "backslashreplace"), "All pictures with their captions.")}


# --- pictures --------------------------------------------------------------------------------------------------------


def _new_figure(width: float, height: float, title: str) -> "Figure":
    """In inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=_DPI, layout="constrained", facecolor="white")
    if title:
        figure.suptitle(fill(title, int(7 * width)), fontsize=_LARGE, fontweight="bold", parse_math=False)
    return figure


def _legend(figure: "Figure", axis: "Axes", columns: int) -> None:
    """Below all panels, of what one of them shows."""
    shown = axis.get_legend_handles_labels()
    figure.legend(*shown, loc="outside lower center", ncols=columns, fontsize=_TEXT, frameon=False, columnspacing=1.2)


def rendered(figure: "Figure", form: str, description: str = "") -> bytes:
    """A figure as "png" or "svg", the same bytes each time under one version of matplotlib. description: metadata."""
    picture = io.BytesIO()
    if form == "svg":
        told = {"Date": None, "Creator": None, "Description": description or None}
        figure.savefig(picture, format="svg", dpi=_DPI, metadata=told, facecolor="white")
        return _numbered(picture.getvalue().decode()).encode()
    figure.savefig(picture, format="png", dpi=_DPI, facecolor="white")
    palette = Image.new("P", (1, 1))
    palette.putpalette(_palette())
    text = PngInfo()
    text.add_itxt("Description", description)
    content = io.BytesIO()
    with Image.open(picture) as drawn:
        few = drawn.convert("RGB").quantize(palette=palette, dither=Image.Dither.NONE)
    few.save(content, "png", optimize=True, pnginfo=text)  # a third of the size
    return content.getvalue()


def _palette() -> list[int]:
    """The 256 colours of a picture: the shades, and what each colour's edges fade through on white; rgb of each."""
    plain = [[int(colour[place : place + 2], 16) for place in (1, 3, 5)] for colour in (*_SHADES, *COLOURS)]
    strong, weights = plain[len(_SHADES) :], [step / 8 for step in range(1, 8)]
    faded = [[round(255 + (part - 255) * weight) for part in colour] for colour in strong for weight in weights]
    colours = plain + faded
    return [part for colour in colours + [plain[0]] * (256 - len(colours)) for part in colour]


def _numbered(svg: str) -> str:
    """An SVG whose ids are counted, in place of those that matplotlib draws from a random salt."""
    drawn = dict.fromkeys(re.findall(r'\bid="([^"]*[0-9a-f]{10})"', svg))
    names = {old: f"i{number}" for number, old in enumerate(drawn)}
    return re.sub(r'(?<=["#])([^"#()\s]*[0-9a-f]{10})(?=["\)])', lambda found: names.get(found[1], found[1]), svg)
