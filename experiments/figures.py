"""Draw the levels of quantizers (the paper's Figures 1 and 4), the landscape of a search, and the SQNR of each site.

    python -m experiments.figures TARGET --out FOLDER [--data FOLDER] ...

`--help` lists the options.
"""

from experiments.landscape import example_site, landscape_figure, landscapes

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor

import adalog
from adalog import Calibration, Config, QuantizedModel, Search, files
from adalog._quantize import sample_images
from adalog.calibration.schedule import Progress, Resources
from adalog.cli.console import check_outputs, emit_json, progress_bar, quiet, run_script, say, site_progress, waiting
from adalog.cli.options import (
    CheckpointOption,
    DebugOption,
    DrawOption,
    JsonOption,
    NoPretrainedOption,
    ThreadsOption,
    thread_count,
)
from adalog.cli.targets import find_calibration, load_model, refuse_weights, sample_for, source_of
from adalog.errors import printable
from adalog.graph.activations import POWER_LAW_ACTIVATIONS
from adalog.graph.operations import FAKE_QUANTIZE
from adalog.graph.program import Node
from adalog.inputs import zoo
from adalog.inputs.images import ImageSet
from adalog.ledger import LedgerRow
from adalog.methods import label
from adalog.study.drawing import COLOURS, SMALL, TEXT, add_legend, new_figure, render, title_of
from adalog.study.levels import HISTOGRAMS, LEVEL_METHODS, Panel, histogram_panels, level_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METHODS = ("minmax", "ptq4vit", "repq-vit", "adalog")  # whose SQNR is compared by default
FORMS = ("png", "svg")
_MARKERS = "os^DvPX<>ph*d"
_DASHES = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (5, 1, 1, 1)), (0, (3, 1, 1, 1, 1, 1)))
_NO_LEVELS = "no operand after a softmax, a GELU or a similar activation is quantized with one scale"
_ROLES = {"qk": "Q Kᵀ", "av": "A V", "conv": "convolution"}
_USUAL = (("qk", "other"), ("av", "softmax"), ("conv", "input"))  # the titles of these (role, source) omit the source

CAPTIONS = {
    "histograms": HISTOGRAMS,
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


def _power_laws(model: QuantizedModel) -> dict[str, dict[str, str]]:
    """Return the names of the fake-quantize nodes after a softmax, a GELU or the like, by activation and site."""
    found: dict[str, dict[str, str]] = {}
    for row in model.ledger:
        name = f"{row.site}.{'left' if row.role in ('qk', 'av') else 'input'}"
        # Linears that share an activation share the first one's quantizer.
        quantizer = model.program.quantizers.get(name)
        if row.source in ("softmax", *POWER_LAW_ACTIVATIONS) and quantizer is not None and quantizer.scale.numel() == 1:
            found.setdefault(row.source, {})[row.site] = name
    return found


def site_panels(model: QuantizedModel) -> list[Panel]:
    """Return the levels of every site after a softmax, a GELU or a similar activation; no image is needed."""
    panels = []
    for source, sites in _power_laws(model).items():
        quantizers = {site: model.program.quantizers[name] for site, name in sites.items()}
        panels.append(Panel(f"after {title_of(source)}", quantizers, max(each.lift for each in quantizers.values())))
    return panels


@torch.no_grad()
def observed_panels(model: QuantizedModel, images: Tensor) -> list[Panel]:
    """Return the values that a quantized model's quantizers after softmax and GELU see, with their levels.

    The sites are chosen as in `histogram_panels`.
    """
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

    for batch in images.split(16):
        model.program.run([batch], watch)
    panels = []
    for name, (source, site) in wanted.items():
        quantizer = model.program.quantizers[name]
        title = f"after {title_of(source)}: {site}"
        panels.append(Panel(title, {quantizer.title: quantizer}, quantizer.lift, torch.cat(seen[name])))
    return panels


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
                label=label(method),
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
        watch = None if progress is None else progress(method)
        quantized = calibration.quantize(config, Resources(jobs, progress=watch))
        ledgers[method] = quantized.ledger
        if isinstance(config.search, Search) and config.search.strategy == "fpcs":
            by_fpcs = method, config.search, quantized
    drawn: list[Drawn] = []
    left_out: dict[str, str] = {}
    whose = f"{name} at {bits}"
    panels = histogram_panels(calibration, {method: Config.preset(bits, method) for method in LEVEL_METHODS})
    heading = f"{whose}, {images} images: values after softmax and GELU, and levels"
    _add_levels(drawn, left_out, "histograms", heading, panels, "no product follows a softmax or a GELU")
    if by_fpcs is None:
        left_out |= dict.fromkeys(("levels", "landscape"), "none of the methods searches by FPCS, as adalog does")
    else:
        method, search, quantized = by_fpcs
        heading = f"{whose}, {method}: levels of each site"
        _add_levels(drawn, left_out, "levels", heading, site_panels(quantized), _NO_LEVELS)
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
    if images is None:
        left_out["histograms"] = "no images: give --data FOLDER"
    else:
        heading = f"{name}, {len(images)} images: values after softmax and GELU, and levels"
        _add_levels(drawn, left_out, "histograms", heading, observed_panels(model, images), _NO_LEVELS)
    _add_levels(drawn, left_out, "levels", f"{name}: levels of each site", site_panels(model), _NO_LEVELS)
    heading = f"{name}: SQNR of each site"
    drawn.append(Drawn("sqnr", heading, sqnr_figure({model.config.bits: model.ledger}, heading)))
    return drawn, left_out


def _add_levels(
    drawn: list[Drawn], left_out: dict[str, str], name: str, heading: str, panels: Sequence[Panel], why: str
) -> None:
    """Draw the panels, or say why there are none."""
    if panels:
        drawn.append(Drawn(name, heading, level_figure(panels, heading)))
    else:
        left_out[name] = why


def pictures(drawn: Sequence[Drawn], title: str, left_out: Mapping[str, str]) -> dict[str, tuple[bytes, str]]:
    """Return all files by name, each with its caption: every figure in every format, and an index in Markdown.

    left_out: the reason why a figure was not drawn, by name.
    """
    files = {}
    lines = [f"# {title}"]
    for each in drawn:
        for form in FORMS:
            files[f"{each.name}.{form}"] = render(each.figure, form, each.caption), each.caption
        lines.append(f"![{each.name}]({each.name}.png)\n\n{each.caption}")
    lines += [f"Not drawn: {name}: {why}." for name, why in left_out.items()]
    text = "\n\n".join(lines) + "\n"
    return files | {"index.md": (text.encode("utf-8", "backslashreplace"), "All pictures with their captions.")}


# --- the command ------------------------------------------------------------------------------------------------------


def command(
    target: Annotated[
        str, typer.Argument(help=f"Artifact written by `adalog quantize`, or full-precision model: {zoo.KINDS}.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write the pictures and their index to.")],
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder of images, to calibrate a model or for the histograms of an artifact. demo has its own images."
        ),
    ] = None,
    bits: Annotated[str | None, typer.Option(help="Bits to quantize a model to, such as w6a6. Default: w4a4.")] = None,
    methods: Annotated[
        str | None,
        typer.Option(help=f"Methods to compare on a model by SQNR, comma-separated. Default: {','.join(METHODS)}."),
    ] = None,
    site: Annotated[
        str | None,
        typer.Option(
            help="Name of the site whose search to draw, listed by `adalog inspect MODEL`. Default: one after a GELU."
        ),
    ] = None,
    images: Annotated[int, typer.Option(min=1, help="Number of images to use.")] = 32,
    checkpoint: CheckpointOption = None,
    no_pretrained: NoPretrainedOption = False,
    seed: DrawOption = 0,
    threads: ThreadsOption = 0,
    json_out: JsonOption = None,
    debug: DebugOption = False,
) -> None:
    """Draw the quantizers of a model or an artifact as PNG and SVG.

    The pictures show histograms with the levels of quantizers, the landscape of a search, and the SQNR of each site.
    """
    possible = [out / f"{name}.{form}" for name in CAPTIONS for form in FORMS]
    check_outputs(*possible, out / "index.md", json_out, reads=(source_of(target), checkpoint, data))
    jobs = thread_count(threads)
    if zoo.is_model(target):
        names, width = (methods or ",".join(METHODS)).split(","), bits or "w4a4"
        for name in names:  # raises for a wrong name before the long work
            Config.preset(width, name)
        given = find_calibration(target, data, images)
        loaded = load_model(target, no_pretrained, checkpoint)
        preprocessing = loaded.rgb_preprocessing
        with progress_bar() as progress, quiet():
            bar = progress.add_task("capturing", total=1)
            if isinstance(given, ImageSet):
                given = given.sample(images, seed).load(preprocessing, jobs=jobs)
            calibration = Calibration(loaded.module, sample_images(given, images, seed), seed=seed)
            watch = functools.partial(site_progress, progress, bar)
            drawn, left_out = of_model(
                calibration, printable(target), width, names, site=site, jobs=jobs, progress=watch
            )
    else:
        refuse_weights(target, no_pretrained, checkpoint)
        for option, value in (("--bits", bits), ("--methods", methods), ("--site", site)):
            if value is not None:
                raise ValueError(f"{option} applies only to a model ({zoo.KINDS}), not to {target}: leave it out")
        quantized = adalog.load(target)
        sample = sample_for(Path(target), quantized, data, images, seed, jobs)
        with waiting(f"drawing {target}"):
            drawn, left_out = of_artifact(quantized, printable(Path(target).name), sample)
    with waiting("drawing"):
        drawn_files = pictures(drawn, printable(target), left_out)
    for name, (content, _) in drawn_files.items():
        files.write_whole(out / name, content)
    if json_out != "-":
        say(*(f"{out / name}: {len(content):,} bytes" for name, (content, _) in drawn_files.items()))
        say(*(f"not drawn: {name}: {why}" for name, why in left_out.items()))
    listed = [{"file": name, "caption": caption} for name, (_, caption) in drawn_files.items()]
    emit_json({"target": target, "folder": str(out), "files": listed, "left_out": left_out}, json_out)


def main() -> None:
    """Run the command. The exit code is 0 for success, 1 for failure and 2 for bad input."""
    run_script("figures", command)


if __name__ == "__main__":
    main()
