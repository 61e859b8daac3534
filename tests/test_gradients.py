"""Squared gradients against Jacobians, and the probes against the Hessians they stand for."""

import itertools

import pytest
import torch
from torch import nn

from adalog.calibration import gradients, values
from adalog.calibration.gradients import (
    BATCH,
    distance_gradient,
    gradient_probe,
    hessian_probe,
    mean_distance,
    noise_probe,
    squared_gradients,
    with_mean_one,
)
from adalog.errors import CalibrationError
from adalog.graph.capture import capture
from adalog.graph.sites import find_sites
from adalog.graph.tracing import trace
from strategies import normal
from toys import Toy


def captured(model, images):
    """Return the program of a model, and the names of its sites' outputs."""
    program = capture(model.eval(), (images,))
    return program, {site.name: site.node.name for site in find_sites(program)}


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    parts = {"first": nn.Linear(3, 5), "second": nn.Linear(5, 4)}
    images = normal(2 * BATCH + 3, 3)
    model = Toy(lambda m, x: m.second(torch.tanh(m.first(x))) * 3, **parts).double()
    return model, images, *captured(model, images)


def scaled(value):
    return value / value.mean()


def test_squares_of_a_given_gradient(network):
    model, images, program, names = network
    gradient = normal(len(images), 4, seed=1)
    found = squared_gradients(program, (images,), names.values(), [gradient_probe(gradient)])
    hidden = model.first(images).detach()
    at_second = gradient * 3
    at_first = (at_second @ model.second.weight.detach()) * (1 - hidden.tanh().square())
    torch.testing.assert_close(found[names["second"]], scaled(at_second.square()))
    torch.testing.assert_close(found[names["first"]], scaled(at_first.square()))


def test_several_probes_are_averaged(network):
    _, images, program, names = network
    drawn = [normal(len(images), 4, seed=seed) for seed in (1, 2, 3)]
    each = [gradient_probe(gradient) for gradient in drawn]
    name = names["second"]
    together = squared_gradients(program, (images,), [name], each)[name]
    torch.testing.assert_close(together, scaled(sum(gradient.square() for gradient in drawn)))


def test_large_images_run_one_at_a_time(network, monkeypatch):
    """The gradients stay the same if the memory allows only one image in a pass, and few values in a comparison."""
    _, images, program, names = network
    probes = [gradient_probe(normal(len(images), 4, seed=seed)) for seed in (1, 2)]

    def means(_, squares):
        return squares.mean(-1, keepdim=True)

    expected = squared_gradients(program, (images,), names.values(), probes, means)
    sizes, run = [], type(program).run

    def recorded(self, given, *rest):
        sizes.extend([len(given[0])] * (not given[0].is_meta))
        return run(self, given, *rest)

    monkeypatch.setattr(gradients, "_BATCH_BYTES", 1)
    monkeypatch.setattr(values, "_COMPARED_BYTES", 1)
    monkeypatch.setattr(type(program), "run", recorded)
    found = squared_gradients(program, (images,), names.values(), probes, means)
    assert sizes == [2, 1, 1] + [1] * len(images)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("memory", [1, 8_000, 100_000])
def test_a_program_in_stretches_has_the_same_gradients(memory):
    """Each stretch runs again for the backward pass. Its values are read later, given out, or lead to nothing."""

    def function(model, x):
        first, second = model.first(x).chunk(2, -1)
        middle = model.second(torch.relu(first) * second)
        places = middle.argmax(-1)
        last = model.third(middle + x) + places[:, None]
        return {"last": last + first.sum(-1, keepdim=True), "middle": middle, "places": places, "input": x}

    layers = {"first": nn.Linear(6, 12), "second": nn.Linear(6, 6), "third": nn.Linear(6, 6)}
    images = normal(40, 6)
    program, names = captured(Toy(function, **layers).double(), images)

    def squares(memory):
        probes = [hessian_probe(torch.Generator().manual_seed(seed)) for seed in (1, 2)]
        return squared_gradients(program, (images,), names.values(), probes, memory=memory)

    expected = squares(None)
    assert expected.keys() == {*names.values()}
    torch.testing.assert_close(squares(memory), expected)
    traced = trace(program, (images,))
    ends = gradients._ends(program, traced, gradients._bytes_by_node(program, traced), memory)
    assert len(ends) > 1 or memory == 100_000


def test_the_program_is_not_changed(network):
    _, images, program, names = network
    with torch.no_grad():
        squared_gradients(program, (images,), names.values(), [hessian_probe(torch.Generator())])
    assert not any(value.grad is not None for value in program.tensors.values())
    assert not images.requires_grad


def test_probes_have_the_hessian_of_the_divergence():
    """All signs e there are: the mean of g g^T is diag(p) - p p^T, the Hessian of KL(p || softmax(y)) at p."""
    y = normal(1, 4) * 2
    p = y.softmax(-1)[0]
    hessian = torch.autograd.functional.hessian(lambda z: (p * (p.log() - z.log_softmax(-1))).sum(), y[0])
    torch.testing.assert_close(hessian, p.diag() - p[:, None] * p)
    signs = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=4)), dtype=torch.float64)
    probes = p.sqrt() * signs - p * (signs @ p.sqrt())[:, None]
    torch.testing.assert_close(probes.T @ probes / len(probes), hessian)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.cat([hessian_probe(generator)([y], slice(0, 1))[0] for _ in range(60)])
    nearest = (drawn[:, None] - probes).abs().amax(-1).min(1)
    assert float(nearest.values.max()) < 1e-12
    assert len(nearest.indices.unique()) > 10


def test_noise_is_what_the_gradient_of_a_perturbed_divergence_is():
    """softmax(y + d) - p = (diag(p) - p p^T) d to first order."""
    y = normal(3, 5)
    p = y.softmax(-1)
    found = noise_probe(torch.Generator().manual_seed(4))([y], slice(0, 3))[0]
    noise = torch.randn(y.shape, generator=torch.Generator().manual_seed(4)).double() * 1e-6
    torch.testing.assert_close(found * 1e-6, (y + noise).softmax(-1) - p, rtol=1e-3, atol=1e-10)


@pytest.mark.parametrize("probe", [hessian_probe, noise_probe])
def test_other_outputs_have_plain_probes(probe):
    outputs = [normal(2, 3, 4), normal(2, 4)]
    drawn = probe(torch.Generator().manual_seed(0))(outputs, slice(0, 2))
    assert [value.shape for value in drawn] == [value.shape for value in outputs]
    if probe is hessian_probe:
        assert all(set(value.flatten().tolist()) == {-1.0, 1.0} for value in drawn)


def test_what_no_gradient_reaches_has_ones():
    parts, images = {"used": nn.Linear(3, 4), "unused": nn.Linear(3, 2)}, torch.randn(5, 3)
    program, names = captured(Toy(lambda m, x: (m.used(x), m.unused(x).argmax(-1)), **parts), images)
    found = squared_gradients(program, (images,), names.values(), [hessian_probe(torch.Generator())])
    assert bool((found[names["unused"]] == 1).all())
    assert float(found[names["used"]].mean()) == pytest.approx(1)


@pytest.mark.parametrize("within", [False, True])
def test_images_may_lie_along_any_dimension(within):
    """Images second, or their tokens one after the other with the images within."""

    def function(m, x):
        turned = x.transpose(0, 1)
        y = torch.tanh(m.first(turned.reshape(-1, 3) if within else turned)).reshape(x.shape[1], x.shape[0], 4)
        return m.second(y).transpose(0, 1).sum(1)

    torch.manual_seed(0)
    model, images = Toy(function, first=nn.Linear(3, 4), second=nn.Linear(4, 2)), torch.randn(2 * BATCH + 1, 5, 3)
    program, names = captured(model, images)
    gradient = torch.randn(len(images), 2)
    found = squared_gradients(program, (images,), names.values(), [gradient_probe(gradient)])
    hidden = torch.tanh(model.first(images.transpose(0, 1))).detach()
    at_first = (gradient @ model.second.weight.detach()) * (1 - hidden.square())
    torch.testing.assert_close(found[names["first"]].view(5, -1, 4), scaled(at_first.square()))
    torch.testing.assert_close(found[names["second"]], scaled(gradient.square().expand(5, -1, -1)))


def test_a_model_without_gradients_is_refused():
    images = torch.randn(2, 3)
    program, _ = captured(Toy(lambda m, x: m.linear(x).argmax(-1), linear=nn.Linear(3, 4)), images)
    with pytest.raises(CalibrationError, match="the model has no differentiable output"):
        squared_gradients(program, (images,), [], [hessian_probe(torch.Generator())])


def test_gradients_that_are_no_numbers_stay_so():
    assert bool(with_mean_one(torch.tensor([1.0, torch.nan])).isnan().any())


# --- distances to the outputs of the float network --------------------------------------------------------------------


def test_the_distance_of_logits_is_the_mean_kl_divergence():
    exact, logits = normal(6, 5), normal(6, 5, seed=1)
    p, q = exact.softmax(1), logits.softmax(1)
    assert mean_distance([logits], [exact]) == pytest.approx(float((p * (p / q).log()).sum(1).mean()), rel=1e-9)


def test_the_distance_of_other_outputs_is_the_mean_squared_error_of_each():
    exact, outputs = [normal(6, 5), normal(2, 3, 4)], [normal(6, 5, seed=1), normal(2, 3, 4, seed=1)]
    chosen = torch.zeros(6, dtype=torch.int64)  # an output without an error
    wanted = sum(float((one - other).square().mean()) for one, other in zip(outputs, exact, strict=True))
    assert mean_distance([*outputs, chosen], [*exact, chosen]) == pytest.approx(wanted, rel=1e-9)


def test_the_gradient_of_the_distance_of_logits():
    exact, logits = normal(6, 5), normal(6, 5, seed=1).requires_grad_()
    (gradient,) = torch.autograd.grad(mean_distance([logits], [exact]) * 6, logits)
    torch.testing.assert_close(gradient, distance_gradient([logits], [exact])[0])
