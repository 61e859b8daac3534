"""Rows of the paper's Tables 1 to 5 and A to C, and of our Table D, with the published figures to compare with.

A table is a tuple of rows; a row is a configuration with its name. Every published figure is in published.json, with
its source and its number of calibration images. A figure is listed with the row that computes the same as the code
behind the figure: the authors' released code, not our reading of the paper.
"""

from benchmarks.real import fit_at_most

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from adalog.baselines import ReleasedSearch
from adalog.choices import Reconstruction
from adalog.config import Config, Stage
from adalog.methods import METHODS
from adalog.search import AnySearch
from adalog.search.bounds import Search

IMAGES = 32  # calibration images (Sec. 4.1)
FITTED_IMAGES = 1024  # images that stages fit, the usual number for block reconstruction
_STEPS = f"{Reconstruction().iterations} steps of {Reconstruction().batch} images"  # per block
_BITS = ("w4a4", "w3a3", "w6a6")
# The methods of the published comparison come first, then all others.
_COMPARED = ("adalog", "adalog-released", "repq-vit", "repq-vit-released", "ptq4vit", "ptq4vit-released", "apq-vit")
# The names in published.json of the methods that have published figures to compare with.
_PUBLISHED = {
    "adalog-released": "adalog",
    "repq-vit-released": "repq-vit",
    "ptq4vit-released": "ptq4vit",
    "apq-vit": "apq-vit",
}
# 64 values of each of two hyperparameters, the same values that the alternating search uses.
_BRUTE_FORCE = Search(strategy="brute-force", init=(8, 8), parents=8)


@dataclass(frozen=True)
class Row:
    """A row of a table.

    names: the text of its cells.
    method: its name in published.json, or "" without a published figure to compare with.
    once: True if it is measured with the first seed only.
    """

    names: tuple[str, ...]
    config: Config
    method: str = ""
    once: bool = False

    @property
    def cells(self) -> set[str]:
        """The texts that select this row: its cells, and their parts between commas."""
        return {*self.names, *(part for name in self.names for part in name.split(", "))}


@dataclass(frozen=True)
class Table:
    """A table of the paper.

    columns: titles of the columns of `Row.names`. cost: whether to show FixOPs and size. note: a remark below the
    table.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    cost: bool = False
    note: str = ""


def _config(bits: str, method: str = "", **changes: Any) -> Config:
    """Return the choices of a method, or without one, those of the search of "adalog" alone."""
    choices = Config.preset(bits, method) if method else replace(Config.preset(bits, "adalog"), stages=())
    return replace(choices, **changes)


# Every method, the methods of the published comparison first, and those that need no more images than the others.
_ALL = (*_COMPARED, *(name for name in METHODS if name not in _COMPARED))
_FAIR = [name for name in _ALL if name in _COMPARED or Config.preset("w4a4", name).images_needed <= IMAGES]


def _method(bits: str, name: str, once: bool = False) -> Row:
    return Row((name,), _config(bits, name), _PUBLISHED.get(name, ""), once)


# The released code differs from our search in more than FPCS: logarithmic quantizers after softmax have the scale 1,
# codes beyond the last one mean zero, and log2 and log-sqrt2 after GELU use the scales found for AdaLog.
_FRAMES = {"ours": "", "released": "adalog-released"}
_SEARCHES: dict[str, dict[str, AnySearch]] = {
    "ours": {"alternating": Search(strategy="alternating"), "FPCS": Search()},
    "released": {"alternating": ReleasedSearch(progressive=False), "FPCS": ReleasedSearch()},
}
_STARTS = (
    "In every row of ours, FPCS finds the first quantizer of a left operand and the ranges of folded norms. Our rows "
    "differ in the searches after that."
)
# A row without AdaLog can mean uniform quantizers after softmax and after GELU, or after GELU only. The paper says the
# former, but its figures at W4/A4 equal those of its Table B, which are for the latter. The released code has no
# uniform quantizer after softmax.
_QUANTIZERS = {
    "ours": (("uniform", "uniform"), ("adalog", "uniform"), ("adalog", "adalog")),
    "released": (("adalog", "uniform"), ("adalog", "adalog")),
}


def _switches(bits: str, searches: Sequence[str]) -> Iterator[Row]:
    for frame, method in _FRAMES.items():
        for softmax, gelu in _QUANTIZERS[frame]:
            for search in searches:
                choices = {"post_softmax": softmax, "post_gelu": gelu, "search": _SEARCHES[frame][search]}
                beside = f"{gelu}, {search}" if frame == "released" else ""
                yield Row((softmax, gelu, f"{search}, {frame}"), _config(bits, method, **choices), beside)


def _searched(bits: str) -> Iterator[Row]:
    for row in _switches(bits, ("FPCS",)):
        names = (*row.names[:2], row.names[2].removeprefix("FPCS, "), "no")
        yield replace(row, names=names, method=row.method.split(",")[0])


def _reconstructed(bits: str) -> Iterator[Row]:
    """Yield BRECQ with and without AdaLog: training the weights alone, and activation scales too (LSQ)."""
    for method, kind in (("brecq", "uniform"), ("brecq-adalog", "adalog")):
        whole = _config(bits, method)
        (stage,) = whole.stages
        assert isinstance(stage, Reconstruction)
        for scales, what, beside in ((False, "weights", "brecq"), (True, "weights and activations", "brecq and lsq")):
            config = replace(whole, stages=(replace(stage, scales=scales),))
            yield Row((kind, kind, "ours", what), config, f"{kind}, {beside}")


def _fitted(bits: str) -> Iterator[Row]:
    """Yield the search alone, each method whose stages fit images of their own, and `adalog+` with reconstruction.

    All stages fit the same number of images.
    """
    yield Row(("adalog", "no"), _config(bits))
    for name in METHODS:
        config = _config(bits, name)
        if config.images_fitted:
            stages = config.with_fitted_images(FITTED_IMAGES).stages
            yield Row((name, _stages_name(stages)), replace(config, stages=stages))
            if name == "adalog+":
                stages = (*stages, Reconstruction(images=FITTED_IMAGES))
                yield Row((name, _stages_name(stages)), replace(config, stages=stages))


def _stages_name(stages: Sequence[Stage]) -> str:
    """Return the stages of a row in words, such as "correction and reconstruction"."""
    kinds = {"block": "reconstruction", "model": "reconstruction end to end"}
    *first, last = (kinds[stage.scope] if isinstance(stage, Reconstruction) else "correction" for stage in stages)
    return f"{', '.join(first)} and {last}" if first else last


def _after_softmax() -> Iterator[Row]:
    for bits in ("w4a4s32", "w4a4", "w4a4s3", "w4a4s2"):
        for frame, method in _FRAMES.items():
            for kind in ("float",) if bits == "w4a4s32" else ("uniform", "log2", "log-sqrt2", "adalog"):
                softmax = "adalog" if kind == "float" else kind
                # The released code has no uniform quantizer here, so the published figures are listed with ours.
                if (frame, kind) != ("released", "uniform"):
                    beside = kind if frame == "released" or kind == "uniform" else ""
                    yield Row((kind, frame), _config(bits, method, post_softmax=softmax), beside)


def _after_gelu() -> Iterator[Row]:
    for frame, method in _FRAMES.items():
        for kind in ("uniform", "twin", "log2", "log-sqrt2", "adalog"):
            offset = "no" if kind in ("uniform", "twin") else "yes"
            beside = kind if frame == "released" else ""
            yield Row((kind, offset, frame), _config("w4a4", method, post_gelu=kind), beside)


TABLES = {
    "1": Table(
        "Top-1 by method and bits",
        ("method",),
        tuple(_method(bits, name, name == "evol-q") for bits in _BITS for name in _FAIR),
    ),
    "2": Table(
        "Without and with AdaLog and FPCS",
        ("after softmax", "after GELU", "search"),
        tuple(row for bits in _BITS[:2] for row in _switches(bits, ("alternating", "FPCS"))),
        note=_STARTS,
    ),
    "3": Table(
        "FixOPs and size",
        ("method",),
        tuple(_method(bits, name) for bits in _BITS[:2] for name in _COMPARED[:4]),
        cost=True,
        note="FixOPs count the products, quantizing and dequantizing. Logarithmic codes count by mantissas and shifts, "
        "as the paper's Eq. 10 is printed, although adalog runs them through a table of integers.",
    ),
    "4": Table(
        "Without and with AdaLog, by search alone and with reconstruction",
        ("after softmax", "after GELU", "search", "reconstruction"),
        tuple(row for bits in _BITS[:2] for row in (*_searched(bits), *_reconstructed(bits))),
        note=f"Reconstruction fits 1,024 images and trains each block for {_STEPS}; the published rows use 20,000 "
        "steps of 32 images. BRECQ weights errors by squared gradients of the labels' loss. Here the gradients are "
        "those of the distance to the float network's outputs, since no labels are used.",
    ),
    "5": Table(
        "Searches: accuracy and cost",
        ("search", "candidates of a pair", "complexity"),
        (
            Row(("alternating, ours", "64 + 64", "O(n)"), _config("w3a3", search=_SEARCHES["ours"]["alternating"])),
            Row(("FPCS, ours", "5 x 128 and a walk", "O(pn)"), _config("w3a3")),
            Row(("brute force, ours", "64 x 64", "O(n²)"), _config("w3a3", search=_BRUTE_FORCE), "brute force", True),
            Row(
                ("alternating, released", "128", "O(n)"),
                _config("w3a3", "adalog-released", search=_SEARCHES["released"]["alternating"]),
                "alternating",
            ),
            Row(("FPCS, released", "6 x 128", "O(pn)"), _config("w3a3", "adalog-released"), "FPCS"),
        ),
        note="Our FPCS is the search of `adalog`, whose steps score a sample of the rows; our other searches score all "
        f"rows. Our alternating search and brute force try the same 64 values of each hyperparameter. {_STARTS}",
    ),
    "A": Table("Quantizers after softmax", ("after softmax", "search"), tuple(_after_softmax())),
    "B": Table("Quantizers after GELU", ("after GELU", "offset", "search"), tuple(_after_gelu())),
    "C": Table(
        "AP of detectors by method and bits",
        ("method",),
        tuple(_method(bits, name) for bits in ("w4a4", "w6a6") for name in _ALL),
    ),
    "D": Table(
        "Stages after the search, all on 1,024 images",
        ("method", "stages"),
        tuple(row for bits in ("w4a4", "w3a3", "w2a2") for row in _fitted(bits)),
        note="The paper does not have this table. As published, `erq` fits 32 images, `qwt` fits 512, and methods that "
        f"train take 20,000 steps of 32 images per block; here a block takes {_STEPS}.",
    ),
}


def bits_name(config: Config) -> str:
    """Return the bits as the paper writes them, such as W4/A4 or W4/A4/S3."""
    softmax = "" if config.softmax_bits == config.activation_bits else f"/S{config.softmax_bits}"
    return f"W{config.weight_bits}/A{config.activation_bits}{softmax}"


def with_images(config: Config, images: int, fitted: int = FITTED_IMAGES) -> Config:
    """Return a configuration with this number of calibration images, whose stages fit at most `fitted` images."""
    return fit_at_most(replace(config, images=images), fitted)


def plan(
    names: Sequence[str],
    images: int = IMAGES,
    bits: Sequence[str] = (),
    cells: Sequence[str] = (),
    fitted: int = FITTED_IMAGES,
) -> dict[Config, Row]:
    """Return the configurations of these tables in the order of measurement, each with a row that it belongs to.

    Each configuration appears once. Slow ones come last: the released search, stages, and rows with one seed.
    bits, cells: keep only rows with one of these bits, and with one of these cells; empty for all. "ours", a part of
    the cell "FPCS, ours", counts too.
    fitted: the most images that a stage fits.
    Raises ValueError for an unknown table, and if no row is left.
    """
    found: dict[Config, Row] = {}
    for name in names:
        if name not in TABLES:
            raise ValueError(f"table {name!r} is not one of {', '.join(TABLES)}")
    rows = [row for name in names for row in TABLES[name].rows]
    for what, given, there in (
        ("bits", bits, dict.fromkeys(row.config.bits for row in rows)),
        ("cell", cells, dict.fromkeys(cell for row in rows for cell in row.cells)),
    ):
        if rows and (odd := [name for name in given if name not in there]):
            raise ValueError(
                f"no row of table {', '.join(names)} has the {what} {odd[0]!r}: choose from {', '.join(there)}"
            )
    for row in rows:
        if (not bits or row.config.bits in bits) and (not cells or not row.cells.isdisjoint(cells)):
            found.setdefault(with_images(row.config, images, fitted), row)
    if not found and (bits or cells):
        raise ValueError(
            f"no row of table {', '.join(names)} has both the bits {', '.join(bits) or 'any'} "
            f"and the cell {', '.join(cells) or 'any'}"
        )

    def slowness(each: tuple[Config, Row]) -> int:
        return 4 * each[1].once + 2 * bool(each[0].stages) + isinstance(each[0].search, ReleasedSearch)

    return dict(sorted(found.items(), key=slowness))


# --- published figures -----------------------------------------------------------------------------------------------


@cache
def published() -> dict[str, Any]:
    """Return the content of published.json: the timm names of "models", the "figures", and "notes" on tables.

    A figure has a table, model, bits, method, measure ("top1" [%], "fixops", "megabytes", "gpu_minutes"), value, number
    of calibration images (0 if nothing was calibrated) and source.
    """
    content: dict[str, Any] = json.loads(Path(__file__).with_name("published.json").read_text("utf-8"))
    return content


def find_published(table: str, model: str, bits: str, method: str, images: int | None = None) -> dict[str, float]:
    """Return the published figures of a row by measure, optionally only those with this number of calibration images.

    model: a name for `zoo.load_model`; the tag of the weights, after a dot in a timm name, is ignored.
    """
    names = {name: short for short, name in published()["models"].items()}
    short = names.get(model.partition(".")[0])
    wanted = {"table": table, "model": short, "bits": bits, "method": method}
    wanted |= {} if images is None else {"calibration_images": images}
    return {
        figure["measure"]: figure["value"]
        for figure in published()["figures"]
        if all(figure[name] == value for name, value in wanted.items())
    }
