"""The search space of every kind of quantizer: points, their quantizers and back."""

from dataclasses import replace

import pytest
import torch

from adalog.baselines import MaxKeptFormat, SplitFormat, TwinFormat
from adalog.quantizers import LargestLevelFormat, LogFormat, UniformFormat, UniformQuantizer
from adalog.search.objective import OwnError
from adalog.search.operand import Operand
from strategies import normal

FORMATS = {
    "uniform": UniformFormat(4),
    "uniform by rows": UniformFormat(3, (0,)),
    "symmetric by rows": LargestLevelFormat(3, (0,), kind=UniformQuantizer),
    "twin": TwinFormat(4, offset=0.17),
    "adalog": LogFormat(4, offset=0.17),
    "log-sqrt2": LogFormat(4, r=2, q=1, table=False, offset=0.17),
}
every_format = pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)


def operand_of(form):
    return Operand(normal(6, 40).clamp(min=-0.17), form)


def points_of(operand):
    """Points from corner to corner of the box."""
    low, high = operand.box(0.4)
    shares = torch.linspace(0, 1, 5, dtype=torch.float64).view(-1, *(1 for _ in low.shape))
    return operand.format.snap(low + shares * (high - low))


@every_format
def test_a_box_has_a_name_for_each_hyperparameter(form):
    low, high = operand_of(form).box(0.4)
    assert low.shape == high.shape == (len(form.names), *(6 for _ in form.own_dims))
    assert len(form.scales) == len(form.names)
    assert bool((low <= high).all())


@every_format
def test_a_quantizer_has_its_point(form):
    """Bounds move to the levels next to them, since zero is one."""
    operand = operand_of(form)
    for point in points_of(operand):
        quantizer = operand.quantizer(point)
        again = operand.quantizer(operand.point_of(quantizer))
        for value, other in zip(quantizer.parameters().values(), again.parameters().values(), strict=True):
            torch.testing.assert_close(value, other)
        assert replace(operand, format=replace(form, bits=5)).point_of(quantizer) is None
    assert operand.point_of(None) is None


@every_format
def test_scales_multiply_all_levels(form):
    """With an offset, of the values plus that."""
    operand = operand_of(form)
    point = points_of(operand)[2]
    doubled = point * torch.tensor([1 + scaled for scaled in form.scales]).view(-1, *(1 for _ in point.shape[1:]))
    levels, more = ((form.steps(each[None])[0] + getattr(form, "offset", 0.0)) for each in (point, doubled))
    if isinstance(form, TwinFormat):  # its negative levels span the offset
        levels, more = (each[..., 8:] - form.offset for each in (levels, more))
    torch.testing.assert_close(more, 2 * levels)


@every_format
def test_errors_and_steps_are_those_of_the_quantizers(form):
    operand = operand_of(form)
    points = points_of(operand)
    errors = form.errors(operand.values)(points, torch.float64)
    steps = [each.unsqueeze(1) if not form.own_dims else each for each in form.steps(points)]
    losses = OwnError(operand.groups()).loss(*steps)
    for index, point in enumerate(points):
        hat = operand.quantizer(point).fake_quantize(operand.values)
        assert torch.equal(operand.fake_quantize_at(point), hat)
        close = (errors[index] - (hat - operand.values)).abs() < 1e-6
        assert float(close.double().mean()) > (0.98 if isinstance(form, LogFormat) else 0.999)  # codes by a table
        exact = replace(operand, values=(hat - operand.values).square()).groups().sum(1)
        torch.testing.assert_close(losses[index], exact, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("form", [SplitFormat(4), MaxKeptFormat(4)])
def test_only_a_baseline_finds_the_others(form):
    operand = operand_of(form)
    assert form.names == form.scales == ()
    assert operand.point_of(operand_of(UniformFormat(4)).quantizer(torch.tensor([-1.0, 1.0]))) is None
    with pytest.raises(ValueError, match="no space for the format"):
        operand.box(0.4)
    with pytest.raises(ValueError, match="no point determines"):
        operand.quantizer(torch.tensor([1.0]))


def test_a_logarithmic_quantizer_has_one_base():
    points = torch.tensor([[3.0, 1.0], [4.0, 1.0]])
    with pytest.raises(ValueError, match="different bases"):
        LogFormat(4).of(points)
    assert LogFormat(4).of(points[:1]).q == 8


@every_format
def test_only_uniform_activations_have_parameters_by_groups(form):
    expected = (1,) if isinstance(form, (UniformFormat, LargestLevelFormat)) else form.own_dims
    assert form.by_groups((1,)).own_dims == expected
