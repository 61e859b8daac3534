"""Pictures of what quantizers do: the paper's Figures 1 and 4 for a calibrated model."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from adalog.artifact import write_whole
from adalog.quantizers import LogQuantizer, Quantizer

# Okabe and Ito's palette: told apart without seeing red and green.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")


def levels_of(quantizer: Quantizer) -> Tensor:
    """Every value the quantizer can put out, in the domain of what it quantizes (offset taken off), ascending."""
    codes = torch.arange(2**quantizer.bits, dtype=torch.float32)
    values = quantizer.dequantize(codes)
    if isinstance(quantizer, LogQuantizer) and quantizer.keeps_offset:
        values = values - quantizer.offset
    return values.flatten().unique()


def level_figure(panels: Sequence[tuple[str, Tensor, Mapping[str, Quantizer]]], path: Path) -> None:
    """One panel a site: the histogram of its activations, and a row of ticks for each quantizer's levels.

    panels: (title, values, quantizers by method). Writes a PNG, whole or not at all.
    """
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(11, 3.4 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for axis, (title, values, quantizers) in zip(axes, panels, strict=True):
        sample = values.flatten().numpy()
        top = float(np.quantile(sample, 0.9999))
        top = max([top, *(float(levels_of(quantizer).max()) for quantizer in quantizers.values())])
        axis.hist(sample, bins=200, range=(float(sample.min()), top), color="#BBBBBB", log=True, label="activations")
        floor, ceiling = axis.get_ylim()
        step = (np.log10(ceiling) - np.log10(max(floor, 0.5))) * 0.11
        for row, (method, quantizer) in enumerate(quantizers.items()):
            height = 10 ** (np.log10(ceiling) + step * (row + 0.5))
            levels = levels_of(quantizer).numpy()
            axis.plot(levels, np.full(len(levels), height), "|", ms=11, mew=1.6, color=COLOURS[row], label=method)
        axis.set_ylim(max(floor, 0.5), 10 ** (np.log10(ceiling) + step * (len(quantizers) + 0.5)))
        axis.set_title(title, fontsize=12)
        axis.set_ylabel("count")
        axis.legend(loc="upper right", fontsize=10, framealpha=0.9)
    axes[-1].set_xlabel("activation; each tick is one level that a quantizer can put out")
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    write_whole(path, picture.getvalue())
