"""Colours, sizes and file formats that all pictures share.

The module neither changes nor relies on matplotlib's global settings.
"""

import io
from textwrap import fill
from typing import TYPE_CHECKING

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from adalog.graph.activations import ACTIVATIONS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The palette of Okabe and Ito, whose colours people with red-green colour blindness can tell apart. Its yellow is left
# out, since it is too pale on white.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000")
SHADES = ("#FFFFFF", "#E8E8E8", "#D0D0D0", "#B8B8B8", "#A0A0A0", "#888888")
# Font sizes [points], for pictures about 10 inches wide that are shown at half their size.
LARGE, TEXT, SMALL = 14, 12.5, 11.5
_DPI = 150
_TITLES = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm"} | {name: row.title for name, row in ACTIVATIONS.items()}


def title_of(source: str) -> str:
    """Return the name of an operation that a site follows, as it is written in titles."""
    return _TITLES.get(source, source.replace("_", " "))


def new_figure(width: float, height: float, title: str) -> "Figure":
    """Create an empty figure; width and height are in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=_DPI, layout="constrained", facecolor="white")
    if title:
        figure.suptitle(fill(title, int(7 * width)), fontsize=LARGE, fontweight="bold", parse_math=False)
    return figure


def add_legend(figure: "Figure", axis: "Axes", columns: int) -> None:
    """Add a legend of the entries of the panel `axis` below all panels."""
    handles = axis.get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=columns, fontsize=TEXT, frameon=False, columnspacing=1.2)


def render(figure: "Figure", form: str, description: str = "") -> bytes:
    """Return a figure as "png" or "svg"; one version of matplotlib gives the same bytes each time."""
    import matplotlib

    picture = io.BytesIO()
    if form == "svg":
        metadata = {"Date": None, "Creator": None, "Description": description or None}
        with matplotlib.rc_context({"svg.hashsalt": "adalog"}):  # otherwise ids depend on a random salt
            figure.savefig(picture, format="svg", dpi=_DPI, metadata=metadata, facecolor="white")
        return picture.getvalue()
    figure.savefig(picture, format="png", dpi=_DPI, facecolor="white")
    palette = Image.new("P", (1, 1))
    palette.putpalette(_palette())
    text = PngInfo()
    text.add_itxt("Description", description)
    content = io.BytesIO()
    with Image.open(picture) as image:
        few = image.convert("RGB").quantize(palette=palette, dither=Image.Dither.NONE)
    few.save(content, "png", optimize=True, pnginfo=text)  # the palette makes the file much smaller
    return content.getvalue()


def _palette() -> list[int]:
    """Return the 256 colours of a picture as RGB values: shades, colours, and steps from each colour to white."""
    plain = [list(bytes.fromhex(colour[1:])) for colour in (*SHADES, *COLOURS)]
    strong, weights = plain[len(SHADES) :], [step / 8 for step in range(1, 8)]
    faded = [[round(255 + (value - 255) * weight) for value in colour] for colour in strong for weight in weights]
    colours = plain + faded
    return [value for colour in colours + [plain[0]] * (256 - len(colours)) for value in colour]
