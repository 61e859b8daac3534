"""What shapes alone tell: they are those of a run, and they say which axis counts images and where channels go."""

import pytest
import torch
from torch import nn

import zoo
from adalog.graph.capture import capture
from adalog.graph.program import Program
from adalog.graph.tracing import channels_in_views, close, image_axes, keeps_images_apart, sizes, trace
from toys import IMAGES, Toy, all_values


def shape_of(value):
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype
    return [shape_of(item) for item in value] if isinstance(value, (tuple, list)) else value


@pytest.mark.slow
@pytest.mark.parametrize("name", ["demo", "timm_swin", "timm_pvt"])
def test_a_trace_has_the_shapes_of_a_run(name):
    _, program = zoo.captured(name)
    images = torch.randn(3, *zoo.IMAGES.shape[1:])
    run = {**program.tensors, **all_values(program, [images])}
    for traced in (trace(program, [images]), trace(program, [images[:1]], 3)):
        assert {key: shape_of(value) for key, value in traced.items()} == {
            key: shape_of(value) for key, value in run.items()
        }
        assert all(value.is_meta for value in traced.values() if isinstance(value, torch.Tensor))
        assert sizes(traced) == {key: value for key, value in run.items() if isinstance(value, int)}
    assert trace(program, [images]) is trace(program, [images[:1]], 3)
    assert trace(program, [images], 2) is not trace(program, [images])


def test_a_program_is_traced_once_for_inputs_that_are_alike(monkeypatch):
    program = capture(Toy(lambda m, x: x * 2), IMAGES)
    runs, run = [], Program.run_without_data
    monkeypatch.setattr(Program, "run_without_data", lambda *given: runs.append(given) or run(*given))
    name = program.nodes[-1].name
    with torch.inference_mode():
        assert not trace(program, [IMAGES])[name].is_inference()
    for count in (None, 7, 3, 3):
        assert trace(program, [IMAGES], count)[name].shape == (count or 7, *IMAGES.shape[1:])
    assert len(runs) == 2
    double, last = (IMAGES.double(), IMAGES.to(memory_format=torch.channels_last))
    assert trace(program, [double])[name].dtype == torch.float64
    assert trace(program, [last])[name].stride() == last.stride()
    for count in range(10, 30):
        trace(program, [IMAGES], count)
    assert len(runs) == 24
    assert len(program.traces) < 10


@pytest.mark.parametrize("name", ["demo", pytest.param("timm_swin", marks=pytest.mark.slow)])
def test_images_lie_along_their_axis(name):
    """What three images have together is what each has alone, along the axis that was found."""
    _, program = zoo.captured(name)
    images = torch.randn(3, *zoo.IMAGES.shape[1:])
    axes, together = image_axes(program, [images]), {**program.tensors, **all_values(program, [images])}
    alone = [{**program.tensors, **all_values(program, [image])} for image in images.split(1)]
    assert axes.keys() == {key for key, value in together.items() if isinstance(value, torch.Tensor)}
    for key, axis in axes.items():
        for index, values in enumerate(alone):
            part = together[key] if axis is None else together[key].narrow(axis[0], index * axis[1], axis[1])
            assert close(part, values[key])


@pytest.mark.parametrize(
    ("mixed", "known", "apart"),
    [
        (lambda x: x * 2, True, True),
        (lambda x: x.transpose(0, 1) * 2, True, True),
        (lambda x: x - x.mean(0), True, False),
        (lambda x: x.transpose(0, 1).flatten(0, 1) * 2, True, False),
        (lambda x: x.flatten(1) @ x.flatten(1).t(), False, False),
    ],
)
def test_images_that_mix_are_told(mixed, known, apart):
    program = capture(Toy(lambda m, x: mixed(x)), IMAGES)
    name = program.nodes[-1].name
    axes = image_axes(program, [IMAGES])
    assert (name in axes) is known

    def run(first, count):
        return {name: program.run([IMAGES[first : first + count]])}

    assert keeps_images_apart(run, [name], axes) is apart


def test_close_is_equal_but_for_rounding():
    x = torch.randn(100, generator=torch.Generator().manual_seed(0))
    assert close(x, x * (1 + 1e-4))
    assert not close(x, x * 1.01)
    assert not close(x, x[:50])
    assert close(x.half(), x.half() * 1.01)
    assert not close(torch.arange(3), torch.arange(3) + 1)


def test_channels_are_followed_through_views():
    """(N, tokens, 6 channels) as two heads of three channels, as a single token, and as they are."""

    def views(m, x):
        y = m.fc(x.flatten(2)[:, :, :6])
        heads = y.unflatten(2, (2, 3)).transpose(1, 2)
        return heads.exp(), y[:, 0].exp(), y.exp()

    program = capture(Toy(views, fc=nn.Linear(6, 6)), IMAGES)
    (linear,) = [node.name for node in program.nodes if node.op == "aten.linear.default"]
    values, readers = trace(program, [IMAGES]), program.consumers()
    found = dict(channels_in_views(linear, values, readers))
    heads, token, whole = (found[node.args[0].name] for node in program.nodes if node.op == "aten.exp.default")
    count, tokens = len(IMAGES), values[linear].shape[1]
    assert torch.equal(heads, torch.arange(6).view(2, 1, 3).expand(count, 2, tokens, 3))
    assert torch.equal(token, torch.arange(6).expand(count, 6))
    assert torch.equal(whole, torch.arange(6).expand(count, tokens, 6))
