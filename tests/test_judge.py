"""The judge: errors of outputs against a search for the best factor, and against networks that run whole."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import emulated
from adalog import Calibration, Config, Search
from adalog.calibration import judge
from adalog.calibration.judge import logit_error, output_errors, relative_error
from adalog.calibration.values import Values
from adalog.graph.capture import capture
from adalog.graph.rewrite import rewrite
from strategies import normal
from toys import Toy

CONFIG = Config(weight_bits=3, activation_bits=3, softmax_bits=3, images=4, search=Search(rounds=1, steps=0))


def both_of(model, images):
    """The program of a model, and the quantized one."""
    calibration = Calibration(model, images)
    return calibration.program, rewrite(calibration.program, calibration.assign(CONFIG))


def test_the_error_of_logits_is_the_divergence_at_the_best_factor():
    exact = 2 * normal(6, 10, seed=1)
    logits = 3 * exact + 2 * normal(6, 10)

    def divergence(factor):
        other = torch.distributions.Categorical(logits=factor * logits)
        return float(torch.distributions.kl_divergence(torch.distributions.Categorical(logits=exact), other).mean())

    best = min(divergence(factor) for factor in torch.logspace(-2, 1, 3001, base=10).double())
    assert logit_error(logits, exact) == pytest.approx(best, abs=1e-6)


@pytest.mark.parametrize("factor", [0.1, 1.0, 7.0])
@pytest.mark.parametrize("error", [logit_error, relative_error])
def test_a_common_factor_is_no_error(error, factor):
    exact = normal(5, 8)
    assert error(factor * exact, exact) == pytest.approx(0, abs=1e-9)


def test_the_relative_error_is_that_at_the_best_factor():
    values, exact = normal(4, 6), normal(4, 6, seed=1) + normal(4, 6)
    factor = (values * exact).sum() / values.square().sum()
    assert relative_error(values, exact) == pytest.approx(
        float((factor * values - exact).square().sum() / exact.square().sum())
    )
    assert relative_error(-exact, exact) == 1  # only positive factors
    assert relative_error(torch.zeros(2, 2), torch.zeros(2, 2)) == 0
    assert relative_error(torch.zeros(2, 2), torch.ones(2, 2)) == 1


@pytest.mark.parametrize(("error", "waits"), [(logit_error, 2), (relative_error, 1)])
def test_errors_hardly_wait_for_a_device(error, waits):
    values, exact = normal(5, 8), normal(5, 8, seed=1)
    with emulated.device() as put:
        given = put(values), put(exact)
        with emulated.counted() as counts:
            assert error(*given) == error(values, exact)
    assert counts == {"wait": waits}, counts.told


@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("most", [3, 64])
def test_outputs_are_measured_over_the_first_images(head, most, monkeypatch):
    """As logits or as features, in batches of images or at once."""

    def function(m, x):
        x = x + m.one(m.norm(x))
        x = x + m.three(m.two(x).sigmoid())
        return m.head(x.mean(1)) if head else x

    monkeypatch.setattr(judge, "_IMAGES", most)
    parts = {"norm": nn.LayerNorm(8), "one": nn.Linear(8, 8), "two": nn.Linear(8, 16), "three": nn.Linear(16, 8)}
    model = Toy(function, **parts, head=nn.Linear(8, 5)).eval()
    images, error = normal(8, 6, 8).float(), logit_error if head else relative_error
    program, quantized = both_of(model, images[:4])
    wanted, values = (network.run([images])[:most].flatten(1) for network in (program, quantized))
    for batch in (2, 8):
        floats = Values(program, [images])
        floats.batch = batch
        both = output_errors(program, floats, [program, quantized])
        assert [list(errors) for errors in both] == [["kl" if head else "relative"]] * 2
        same, other = (next(iter(errors.values())) for errors in both)
        assert same == pytest.approx(0, abs=1e-6)
        assert other == pytest.approx(error(values, wanted), rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("count", [5, 8])
def test_images_need_not_be_the_first_dimension_of_an_output(count):
    """In batches, of which the last may be smaller; a single value per image is not a logit."""
    model = Toy(lambda m, x: (m.two(m.one(x)).transpose(0, 1), m.two(x)), one=nn.Linear(4, 4), two=nn.Linear(4, 1))
    images = normal(count, 4).float()
    program, quantized = both_of(model.eval(), images)
    floats = Values(program, [images])
    floats.batch = 3
    (errors,) = output_errors(program, floats, [quantized])
    pairs = zip(quantized.run([images]), program.run([images]), strict=True)
    wanted = [relative_error(value.reshape(count, -1), exact.reshape(count, -1)) for value, exact in pairs]
    assert errors == {"relative": pytest.approx(sum(wanted) / 2, rel=1e-4)}
    assert errors["relative"] > 0


def test_outputs_that_are_not_finite_have_an_infinite_error():
    model = Toy(lambda m, x: m.two(m.one(x)), one=nn.Linear(4, 4), two=nn.Linear(4, 3)).eval()
    images = normal(8, 4).float()
    program = capture(model, (images,))
    infinite = torch.full_like(program.tensors["one.weight"], math.inf)
    broken = replace(program, tensors=program.tensors | {"one.weight": infinite})
    assert output_errors(program, Values(program, [images]), [broken]) == [{"kl": math.inf}]
