"""Draw the pictures of a report as SVG. Texts are escaped, and colours are classes of the style sheet."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite, log2

import torch
from markupsafe import Markup
from torch import Tensor

from adalog.report.sites import Axis, OperandFacts, SiteFacts

SQNR_STEPS = (30, 25, 20, 15, 10)  # [dB]; limits between the shades of cells
SHARE_STEPS = (0.005, 0.01, 0.02, 0.05, 0.1)  # limits between the shades, as fractions of the sum of all losses
_HIGH, _LABEL, _ACROSS = 44, 118, 9
_APART = 9  # ticks this many pixels apart merge if there are several rows: above 4 bits, a row becomes a bar
_WIDTH, _BASE = 320, 92  # width, and y of the axis, in the picture of an operand


def shade(value: float | None, steps: Sequence[float]) -> str:
    """Return the class of a cell's colour, from k0 for the least loss to k5; kf for a missing value."""
    if value is None or not isfinite(value):
        return "kf"
    falls = steps[0] > steps[-1]
    return f"k{sum(value < step if falls else value >= step for step in steps)}"


def short(value: float | None, form: str = ".3g") -> str:
    """Format a number, or return a dash if there is none."""
    return "–" if value is None or not isfinite(value) else format(value + 0.0, form)  # + 0.0 turns -0.0 into 0.0


@dataclass(frozen=True)
class Band:
    """A number in a cell: its name, its text, and the class of its colour."""

    name: str
    text: str
    shade: str

    @staticmethod
    def sqnr(value: float | None, name: str = "SQNR [dB]") -> "Band":
        return Band(name, short(value, ".1f"), shade(value, SQNR_STEPS))

    @staticmethod
    def loss(value: float | None, total: float) -> "Band":
        share = None if value is None else value / total if total else 0.0
        return Band("loss", short(value, ".2g"), shade(share, SHARE_STEPS))


def model_picture(sites: Sequence[SiteFacts], bands: Sequence[Sequence[Band]], name: str, to: str) -> Markup:
    """Draw the blocks from top to bottom and their sites from left to right, in order of execution, as links.

    bands: the numbers in the cell of each site. to: what precedes the number of a site in the target of its link.
    """
    blocks: dict[int, list[int]] = {}
    for number, site in enumerate(sites):
        blocks.setdefault(site.block, []).append(number)
    across = max(min(_ACROSS, max(map(len, blocks.values()), default=0)), 1)
    wide = min(168, 980 // across)
    parts, top = [], 4
    for _, members in sorted(blocks.items()):
        prefix = _prefix([sites[number].row.site for number in members])
        block = Markup('<circle class="dot" cx="7" cy="{}" r="4"/><text class="block" x="18" y="{}">{}</text>')
        parts.append(block.format(top + 19, top + 23, _tail(prefix, 16) or "–"))
        for place, number in enumerate(members):
            box = _LABEL + place % _ACROSS * wide, top + place // _ACROSS * _HIGH, wide - 6
            parts.append(_cell(sites[number], prefix, box, bands[number], f"{to}{number}"))
        top += -(-len(members) // _ACROSS) * _HIGH
    return Markup(
        '<svg class="model" viewBox="0 0 {w} {h}" width="{w}" role="group" aria-label="Sites of {name}">'
        '<path class="stream" d="M7 23V{end}"/>{parts}</svg>'
    ).format(w=_LABEL + across * wide, h=top, end=max(top - _HIGH + 19, 23), name=name, parts=Markup("").join(parts))


def _cell(site: SiteFacts, prefix: str, box: tuple[int, int, int], bands: Sequence[Band], place: str) -> Markup:
    row, (x, y, width) = site.row, box
    wide = width / len(bands)
    bars = [
        Markup(
            '<rect class="{}" x="{:g}" y="{}" width="{:g}" height="18"/><text class="v {}" x="{:g}" y="{}">{}</text>'
        ).format(band.shade, x + wide * index, y + 18, wide, band.shade, x + wide * (index + 0.5), y + 31, band.text)
        for index, band in enumerate(bands)
    ]
    label = _tail(row.site.removeprefix(prefix).lstrip(".") or row.site.rpartition(".")[2], width // 6 - 1)
    title = ", ".join([row.site, row.role, f"bits {site.bits}", *(f"{band.name} {band.text}" for band in bands)])
    return Markup(
        '<a href="#{}" class="cell"><title>{}</title>'
        '<rect class="frame" x="{}" y="{}" width="{}" height="36"/><text x="{}" y="{}">{}</text>{}</a>'
    ).format(place, title, x, y, width, x + 6, y + 13, label, Markup("").join(bars))


def _prefix(names: Sequence[str]) -> str:
    """Return the leading parts that all dotted names share; for a single name, all parts except the last."""
    split = [name.split(".") for name in names]
    same = [parts[0] for parts in zip(*split, strict=False) if len(set(parts)) == 1]
    if len(names) == 1 and len(same) > 1:
        same.pop()
    return ".".join(same)


def _tail(text: str, most: int) -> str:
    return text if len(text) <= most else f"…{text[1 - most :]}"


# --- operands --------------------------------------------------------------------------------------------------------


def operand_picture(operand: OperandFacts, name: str) -> Markup:
    """Draw the codes of a weight, or the levels of an activation over its values, if they are known."""
    if operand.weight is not None:
        counts = operand.code_counts
        top = 2**operand.bits - 1 if operand.bits else 0
        bars = _bars(counts, 8, logarithmic=False)
        return _svg(f"{name}: how often each code occurs", [bars], ("code 0", f"code {top}"))
    if operand.quantizer is None:
        return Markup("")
    axis = Axis.of(operand.quantizer)
    rows = operand.levels
    step = 14 if len(rows) == 1 else 7 if operand.histogram is not None else 10
    top = 2 if operand.histogram is not None else _BASE - 4 - step * len(rows)  # without bars, ticks are on the axis
    apart = 1 if len(rows) == 1 else _APART
    parts = [_ticks(axis, levels, step * index + top, step - 3, apart) for index, levels in enumerate(rows)]
    if operand.histogram is not None:
        parts.append(_bars(operand.histogram.counts, step * len(rows) + 6, logarithmic=True))
    what = "levels" if operand.histogram is None else "values and levels"
    low, high = axis.ends
    middle = "logarithmic axis" if axis.logarithmic else ""
    middle += f" of value + {axis.lift:.2g}" if axis.lift else ""
    return _svg(f"{name}: {what}", parts, (short(low), short(high)), middle)


def _svg(title: str, parts: Iterable[Markup], ends: tuple[str, str], middle: str = "") -> Markup:
    """Return the frame of an operand's picture. ends, middle: labels below its axis."""
    label = Markup('<text class="mid" x="160" y="106">{}</text>').format(middle) if middle else ""
    return Markup(
        '<svg class="chart" viewBox="0 0 320 110" role="img"><title>{}</title>{}<path class="axis" d="M0 92.5H320"/>'
        '<text y="106">{}</text>{}<text class="end" x="320" y="106">{}</text></svg>'
    ).format(title, Markup("").join(parts), ends[0], label, ends[1])


def _bars(counts: Tensor, top: int, *, logarithmic: bool) -> Markup:
    """Draw bars as one outline, up to y = top; logarithmic heights make tails visible."""
    scaled = [log2(1 + count) if logarithmic else count for count in counts.tolist()]
    most = max(scaled, default=0) or 1
    wide, path, before = _WIDTH / len(scaled), f"M0 {_BASE}", _BASE
    for index, value in enumerate(scaled):
        height = _BASE - round((_BASE - top) * value / most)
        if height != before:
            path += f"H{wide * index:g}v{height - before}"
        before = height
    return Markup('<path class="bars" d="{}H{}V{}z"/>').format(path, _WIDTH, _BASE)


def _ticks(axis: Axis, levels: Tensor, y: int, high: int, apart: int) -> Markup:
    """Draw levels as ticks on a line; ticks at most `apart` pixels apart merge into one bar."""
    runs: list[list[int]] = []
    for x in torch.unique((axis.place(levels) * _WIDTH).round().int()).tolist():
        if runs and x - runs[-1][1] <= apart:
            runs[-1][1] = x
        else:
            runs.append([x, x])
    start, end = runs[0][0], runs[-1][1]
    path = f"M{start} {y + high // 2}H{end}M{start} {y}"
    for (first, last), (following, _) in zip(runs, [*runs[1:], runs[-1]], strict=True):
        step = following - first  # relative steps need fewer bytes
        path += f"v{high}h{last - first}v-{high}zm{step} 0" if last > first else f"v{high}m{step}-{high}"
    return Markup('<path class="ticks" d="{}"/>').format(path)


# --- intervals -------------------------------------------------------------------------------------------------------


def interval_picture(shares: Sequence[tuple[str, dict[str, float]]]) -> Markup:
    """Draw fractions with their 95 % intervals, one below the other, on one axis."""
    low, high = min(share["low"] for _, share in shares), max(share["high"] for _, share in shares)
    margin = 0.2 * (high - low) or 0.01
    low, high = max(low - margin, 0.0), min(high + margin, 1.0)

    def at(value: float) -> str:
        return f"{140 + 330 * (value - low) / (high - low):.1f}"

    row = Markup(
        '<text x="0" y="{y}">{name}</text><path class="interval" d="M{a} {m}H{b}M{a} {t}v8M{b} {t}v8"/>'
        '<circle class="point" cx="{c}" cy="{m}" r="4"/>'
    )
    rows = [
        row.format(
            y=y + 20, m=y + 16, t=y + 12, name=name, a=at(share["low"]), b=at(share["high"]), c=at(share["value"])
        )
        for y, (name, share) in zip(range(0, 28 * len(shares), 28), shares, strict=True)
    ]
    bottom = 28 * len(shares) + 14
    return Markup(
        '<svg class="chart wide" viewBox="0 0 480 {h}" role="img"><title>Top-1 with 95 % intervals</title>{rows}'
        '<path class="axis" d="M140 {a}H470"/><text x="140" y="{b}">{low:.1f} %</text>'
        '<text class="end" x="470" y="{b}">{high:.1f} %</text></svg>'
    ).format(h=bottom + 14, rows=Markup("").join(rows), a=bottom - 4, b=bottom + 10, low=100 * low, high=100 * high)
