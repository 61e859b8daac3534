"""The picture of levels: it shows what quantizers do, over the values that they quantize."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from adalog.baselines import SplitUniformQuantizer, TwinUniformQuantizer
from adalog.quantizers import LogQuantizer, UniformQuantizer, log_levels, log_thresholds
from adalog.study.levels import Panel, histogram, histogram_panels, level_figure, thresholds_of

UNIFORM = UniformQuantizer(torch.tensor(0.25), torch.tensor(3.0), 3)
LOG = LogQuantizer(torch.tensor(2.0), 30, 37, 3, offset=0.17, keeps_offset=True)
LOG2 = LogQuantizer(torch.tensor(0.75), 1, 1, 3, "saturate", "log", table=False)


def ticks(axis, marker):
    """The x of every row of markers on an axis, top row first."""
    rows = [line for line in axis.lines if line.get_marker() == marker]
    rows.sort(key=lambda line: line.get_ydata()[0] if len(line.get_xdata()) else 0)
    return [line.get_xdata() for line in rows]


@pytest.mark.parametrize(
    ("quantizer", "expected"),
    [
        (UNIFORM, [-0.75, -0.5, -0.25, 0, 0.25, 0.5, 0.75, 1]),
        (LOG2, [0.75 * 2**-code for code in reversed(range(8))]),
        (LogQuantizer(torch.tensor(1.0), 1, 1, 2, "zero", table=False), [0, 0.125, 0.25, 0.5, 1]),
        (LOG, sorted((2 * log_levels(30, 37, 3) - 0.17).tolist())),
        (TwinUniformQuantizer(torch.tensor(0.5), torch.tensor(0.1), 3), [-0.4, -0.3, -0.2, -0.1, 0, 0.5, 1, 1.5]),
        (SplitUniformQuantizer(torch.tensor(0.05), torch.tensor(0.25), 3), [0, 0.05, 0.1, 0.15, 0.25, 0.5, 0.75]),
        (UniformQuantizer(torch.tensor([[1.0], [2.0]]), torch.zeros(2, 1), 2), [0, 1, 2, 3, 4, 6]),
    ],
)
def test_levels(quantizer, expected):
    """In the domain of what is quantized, whether or not a bias has absorbed the offset; of all scales together."""
    assert quantizer.levels().tolist() == pytest.approx(expected, abs=1e-6)


def test_thresholds():
    half = torch.arange(7) + 0.5
    assert thresholds_of(UNIFORM).tolist() == pytest.approx(((half - 3) * 0.25).tolist(), abs=1e-6)
    cuts = 2 * log_thresholds(30, 37, 3) - 0.17
    assert thresholds_of(LOG).tolist() == pytest.approx(cuts.flip(0).tolist(), abs=1e-6)
    cuts = 0.75 * log_thresholds(1, 1, 3, beyond="saturate", rounding="log", table=False)
    assert thresholds_of(LOG2).tolist() == pytest.approx(cuts.flip(0).tolist(), rel=1e-6)


def test_the_bars_count_every_value():
    values = np.array([-1.0, 0.0, 0.5, 1.0, 1.0, 7.0])
    assert histogram(values, np.linspace(0, 1, 5)).tolist() == [2, 0, 1, 3]


def test_levels_over_a_histogram():
    values = torch.randn(3, 500, generator=torch.Generator().manual_seed(0)).abs() - 0.1
    values[0, :100] = thresholds_of(UNIFORM)[0]  # from a threshold on it is the next level
    values[1, :50] = -1.0
    figure = level_figure([Panel("gelu", {"one": UNIFORM, "two": LOG}, 0.17, values), Panel("none", {}, 0, values)])
    first, second, bars, lifted = figure.axes[:4]
    for axis in (bars, lifted, *figure.axes[6:]):
        (drawn,) = axis.patches
        assert drawn.get_data().values.sum() == values.numel()
    assert [row.tolist() for row in ticks(first, "|")] == [UNIFORM.levels().tolist(), LOG.levels().tolist()]
    one, two = ticks(second, "|")  # what is not positive is beyond the logarithmic axis, where an arrowhead tells of it
    assert one.tolist() == [pytest.approx(level + 0.17) for level in (0, 0.25, 0.5, 0.75, 1)]
    assert two.tolist() == pytest.approx((LOG.levels()[1:] + 0.17).tolist())
    assert len(ticks(second, "<")) == 2
    read = (UNIFORM, replace(LOG, keeps_offset=False))  # in the domain of its levels
    lowest = [each.fake_quantize(values) == each.levels()[0] for each in read]
    shares = [float(got.double().mean()) for got in lowest]
    assert [label.get_text() for label in second.get_yticklabels()] == [f"{100 * share:.0f} %" for share in shares]
    assert [label.get_text() for label in first.get_yticklabels()] == ["one", "two"]


def test_levels_alone_come_with_thresholds():
    figure = level_figure([Panel("sites", {"a.$b$_c": LOG2, "d": UNIFORM})])
    linear, logarithmic = figure.axes
    assert [row.tolist() for row in ticks(linear, ".")] == [thresholds_of(each).tolist() for each in (LOG2, UNIFORM)]
    assert ticks(logarithmic, "|")[0].tolist() == LOG2.levels().tolist()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["level", "threshold"]


def test_panels_of_a_calibration(calibration, fast):
    panels = histogram_panels(calibration, {"mine": fast})
    assert [panel.title for panel in panels] == ["after softmax: blocks.1.attn.av", "after GELU: blocks.1.mlp.fc2"]
    (site,) = [site for site in calibration.sites if site.name == "blocks.1.mlp.fc2"]
    assert torch.equal(panels[1].values, calibration.operand(site.left))
    assert panels[1].lift == pytest.approx(0.16997, abs=1e-5)
    (searched,) = calibration.search(fast, ["blocks.1.mlp.fc2"])
    assert panels[1].quantizers["mine"] == searched.assignment.left
