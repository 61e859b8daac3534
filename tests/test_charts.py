"""The pictures of a report: what is drawn is where and as high as the numbers say."""

import re

import pytest
import torch

from adalog.quantizers import LogQuantizer, UniformQuantizer
from adalog.report.charts import SHARE_STEPS, SQNR_STEPS, interval_picture, operand_picture, shade, short
from adalog.report.sites import Axis
from problems_report import subject_of


@pytest.fixture(scope="module")
def subject(content):
    return subject_of(content, images=4)


def test_axes_reach_beyond_the_levels():
    linear = Axis.of(UniformQuantizer(torch.tensor(0.5), torch.tensor(3.0), 3))
    assert linear.ends == pytest.approx((-1.85, 2.35))
    assert linear.place(torch.tensor([-9.0, 0.25, 9.0])).tolist() == pytest.approx([0, 0.5, 1])
    log = Axis.of(LogQuantizer(torch.tensor(2.0), 1, 1, 3, offset=0.17, keeps_offset=True))
    assert (log.logarithmic, log.high, log.lift) == (True, pytest.approx(1.5), pytest.approx(0.17))
    low, high = log.ends
    assert high == pytest.approx(2**1.5 - 0.17)
    assert log.place(torch.tensor([low - 1, low, 2 - 0.17, high])).tolist() == pytest.approx(
        [0, 0, (1 - log.low) / (1.5 - log.low), 1], abs=1e-5
    )


def test_numbers_are_short():
    assert [short(value) for value in (-0.0, 1234.5, None, float("nan"))] == ["0", "1.23e+03", "–", "–"]


def test_shades_change_at_the_steps():
    shades = [shade(value, SQNR_STEPS) for value in (40, 30, 29.9, 15, 10, 9.9, -3)]
    assert shades == ["k0", "k0", "k1", "k3", "k4", "k5", "k5"]
    assert [shade(value, SHARE_STEPS) for value in (0, 0.005, 0.099, 0.1, 1)] == ["k0", "k1", "k4", "k5", "k5"]
    assert [shade(value, SQNR_STEPS) for value in (None, float("inf"), float("nan"))] == ["kf"] * 3


def paths(picture, kind):
    return re.findall(rf'<path class="{kind}" d="(.*?)"/>', picture)


def test_ticks_are_where_the_levels_are(subject):
    """In pixels: a path goes down a tick, and on to the next."""
    site = next(site for site in subject.sites if site.row.source == "gelu")
    (path,) = paths(operand_picture(site.left, "a"), "ticks")
    start, *steps = re.findall(r"M(\d+) \d+v|m(\d+)-", path)
    found = [int(start[0])]
    for _, step in steps[:-1]:
        found.append(found[-1] + int(step))
    places = Axis.of(site.left.quantizer).place(site.left.quantizer.levels())
    assert found == sorted({round(320 * place) for place in places.tolist()})
    assert len(found) == 16
    heads = next(site for site in subject.sites if site.row.role == "qk").left
    assert len(paths(operand_picture(heads, "a"), "ticks")) == 2


def test_bars_are_as_high_as_the_counts(subject):
    weight = subject.sites[3].right
    (path,) = paths(operand_picture(weight, "a"), "bars")
    height, heights = 0, {}
    for place, step in re.findall(r"H([\d.]+)v(-?\d+)", path):
        height -= int(step)
        heights[float(place)] = height
    counts = weight.code_counts.tolist()
    wanted = [round(92 - 8 - (92 - 8) * (1 - count / max(counts))) for count in counts]
    now, found = 0, []
    for code in range(16):
        now = heights.get(20.0 * code, now)
        found.append(now)
    assert found == pytest.approx(wanted, abs=1)
    assert max(found) == 84


def test_intervals_are_on_one_axis():
    shares = [("a", {"value": 0.5, "low": 0.4, "high": 0.6}), ("b", {"value": 0.9, "low": 0.8, "high": 1.0})]
    picture = interval_picture(shares)
    ends = [list(map(float, each)) for each in re.findall(r'class="interval" d="M([\d.]+) \d+H([\d.]+)M', picture)]
    points = list(map(float, re.findall(r'cx="([\d.]+)"', picture)))
    assert points == pytest.approx([sum(each) / 2 for each in ends], abs=0.1)
    assert (points[1] - points[0]) / (ends[0][1] - ends[0][0]) == pytest.approx(2, abs=0.01)
    assert "28.0 %" in picture  # a fifth of the whole below
    assert "100.0 %" in picture
    assert interval_picture([("a", {"value": 1.0, "low": 1.0, "high": 1.0})])
