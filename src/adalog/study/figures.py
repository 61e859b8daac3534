"""Draw all figures of a model or an artifact, with captions: levels, a search landscape, and the SQNR of each site."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from adalog.calibration.calibration import Calibration
from adalog.calibration.schedule import Progress
from adalog.choices import Search
from adalog.config import Config
from adalog.ledger import LedgerRow
from adalog.methods import labelled
from adalog.model import QuantizedModel
from adalog.study.drawing import COLOURS, SMALL, TEXT, add_legend, new_figure, rendered, title_of
from adalog.study.landscape import example_site, landscape_figure, landscapes
from adalog.study.levels import Panel, histogram_panels, level_figure, observed_panels, site_panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEVEL_METHODS = ("uniform", "log2", "log-sqrt2", "adalog")  # methods that differ only after softmax and GELU
FORMS = ("png", "svg")
_MARKERS = "os^DvPX<>ph*d"
_DASHES = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (5, 1, 1, 1)), (0, (3, 1, 1, 1, 1, 1)))
_NO_LEVELS = "no operand after a softmax, a GELU or a similar activation is quantized with one scale"
_ROLES = {"qk": "Q Kᵀ", "av": "A V", "conv": "convolution"}
_USUAL = (("qk", "other"), ("av", "softmax"), ("conv", "input"))  # the titles of these (role, source) omit the source

CAPTIONS = {
    "histograms": (
        "Grey: histograms of the values that enter products after a softmax and a GELU. The axes of the right column, "
        "and all counts, are logarithmic. Above: the levels of each quantizer, one tick per level. On the logarithmic "
        "axis, an arrowhead marks levels further to the left, down to zero, and the first bar counts the values there. "
        "The percentages are the shares of values that go to the lowest level."
    ),
    "levels": (
        "The levels and thresholds of each site after a softmax, a GELU or a similar activation, in order of "
        "execution, on a linear and on a logarithmic axis. An arrowhead marks levels further to the left, down to zero."
    ),
    "landscape": (
        "Shades: the squared error of the product's output over the hyperparameters of one operand, in dB above the "
        "least error, on the rows that the search steps use. The other operand is quantized as in the result. FPCS "
        "scores the first grid (rings), keeps its best points as parents (dots), and places children around the best "
        "points of each step (small dots). It scores the survivors (squares) on more rows. The walk (line) starts from "
        "the best survivor; then a line of scales leads to the result (star). Below: the surroundings of the star, in "
        "finer shades."
    ),
    "sqnr": (
        "The signal-to-quantization-noise ratio of each site's output on the calibration images, in order of "
        "execution; higher is better. Linears that share an activation are searched together and have one ratio."
    ),
}


def kinds_of(ledger: Sequence[LedgerRow]) -> dict[str, list[LedgerRow]]:
    """Group the rows of a ledger by kind of site, named in words, in order of execution."""
    found: dict[str, list[LedgerRow]] = {}
    for row in ledger:
        role = _ROLES.get(row.role, row.role)
        kind = f"other {role}" if row.source == "other" else f"{role} after {title_of(row.source)}"
        found.setdefault(role if (row.role, row.source) in _USUAL else kind, []).append(row)
    return found


def sqnr_figure(ledgers: Mapping[str, Sequence[LedgerRow]], title: str = "") -> "Figure":
    """Draw the SQNR of every site under each method, one panel per kind of site; float sites have no SQNR."""
    kinds = kinds_of(next(iter(ledgers.values())))
    columns = min(3, len(kinds))
    rows = math.ceil(len(kinds) / columns)
    figure = new_figure(10, 1.1 + 2.5 * rows, title)
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
                marker=_MARKERS[index % len(_MARKERS)],
                linestyle=_DASHES[index % len(_DASHES)],
                ms=6,
                lw=1.4,
                label=labelled(method),
            )
        axis.set_title(kind, fontsize=TEXT, parse_math=False)
        axis.grid(axis="y", color="#DDDDDD", lw=0.8)
        axis.set_axisbelow(True)
        axis.set_xlim(0.5, len(members) + 0.5)
        step = -(-len(members) // 8)
        axis.set_xticks(range(1, len(members) + 1, step))
        axis.tick_params(labelsize=SMALL, labelleft=True)
        if number % columns == 0:
            axis.set_ylabel("SQNR [dB]", fontsize=TEXT)
        if number + columns >= len(kinds):
            axis.set_xlabel("n-th site of its kind", fontsize=TEXT)
    add_legend(figure, axes[0, 0], min(len(ledgers), 5))
    return figure


@dataclass(frozen=True)
class Drawn:
    """A figure with its heading and its name, a key of `CAPTIONS`."""

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
    """Draw all figures of a calibrated model; return them with the reason, by name, why any other is left out.

    methods: methods whose SQNR is compared; the last one that searches by FPCS gives the levels and the landscape.
    site: the site whose landscape to draw; None for `example_site`.
    progress(method): returns the callback for the sites of that method.
    Raises ValueError for an unknown site or method.
    """
    images = len(calibration.images[0])
    configs = {method: replace(Config.preset(bits, method), images=images) for method in methods}
    names = [each.name for each in calibration.sites]
    if site is not None and site not in names:
        raise ValueError(f"site = {site!r} is not one of the {len(names)} sites, which `adalog inspect MODEL` lists")
    ledgers, by_fpcs = {}, None
    for method, config in configs.items():
        quantized = calibration.quantize(config, None if progress is None else progress(method), jobs=jobs)
        ledgers[method] = quantized.ledger
        if isinstance(config.search, Search) and config.search.strategy == "fpcs":
            by_fpcs = method, config.search, quantized
    drawn: list[Drawn] = []
    left_out = {}
    whose = f"{name} at {bits}"
    panels = histogram_panels(calibration, {method: Config.preset(bits, method) for method in LEVEL_METHODS})
    if panels:
        heading = f"{whose}, {images} images: values after softmax and GELU, and levels"
        drawn.append(Drawn("histograms", heading, level_figure(panels, heading)))
    else:
        left_out["histograms"] = "no product follows a softmax or a GELU"
    if by_fpcs is None:
        left_out |= dict.fromkeys(("levels", "landscape"), "none of the methods searches by FPCS, as adalog does")
    else:
        method, search, quantized = by_fpcs
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
    """Draw the figures of a quantized model; return them with the reason, by name, why any other is left out.

    images: the images for the histograms, or None.
    """
    drawn: list[Drawn] = []
    left_out = {"landscape": "an artifact does not store the search: give the model instead"}
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
    """Return all files by name, each with its caption: every figure in every format, and an index in Markdown.

    left_out: the reason why a figure was not drawn, by name.
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
