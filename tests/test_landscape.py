"""Loss landscapes: what a picture of a search shows is what the search sees."""

from experiments import landscape

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from adalog import Config, Search
from adalog.search.bounds import minimise
from adalog.search.forms import GramForm
from adalog.search.objective import ProductError
from adalog.search.strategies import brute_force
from adalog.study.drawing import render


def errors_of(operand, other, other_hat, view):
    """The squared error of the product at every point of a view, from its definition, in float64."""
    losses = torch.empty(view.losses.numel(), dtype=torch.float64)
    wanted = operand.values.double() @ other.double().T
    for index, point in enumerate(torch.cartesian_prod(*view.lines)):
        hat = operand.fake_quantize_at(point.reshape(len(point), *[1] * len(operand.format.own_dims)))
        losses[index] = (hat.double() @ other_hat.double().T - wanted).square().sum()
    return losses.view(view.losses.shape)


def test_a_landscape_is_the_loss(searched, drawn):
    """Of the activation over base and scale, of one row of the weight over bounds; its least is brute force's."""
    left, right = drawn
    assert left.names == ("q (rounded), of base 2^(q / 37)", "scale")
    assert right.names == ("lower bound", "upper bound")
    product, assignment = searched.product, searched.assignment
    hats = product.left.fake_quantize(assignment.left), product.right.fake_quantize(assignment.right)
    expected = errors_of(product.left, product.right.values, hats[1], left.whole)
    assert torch.allclose(left.whole.losses.double(), expected, rtol=1e-2)
    row = int(right.title.split("row ")[1].split()[0]) - 1
    power = product.right.values.square().sum(1)
    assert int((power < power[row]).sum()) == len(power) // 2
    one = replace(product.right, values=product.right.values[row : row + 1])
    expected = errors_of(one, product.left.values, hats[0], right.whole)
    assert torch.allclose(right.whole.losses.double(), expected, rtol=1e-2)
    error = ProductError.of(one.values, product.left.values.T, hats[0].T, (0,))
    low, high = one.box(Search().reach)
    _, least = brute_force(lambda points: error.loss_of(one.format.errors(one.values), points), low, high, sizes=(6, 6))
    assert float(right.whole.losses.min()) == pytest.approx(float(least), rel=1e-5)


def loss_of_left(searched):
    """The loss of the product by points of its left operand, as in a search."""
    left, right = searched.product.left, searched.product.right
    error = ProductError.of(left.values, right.values.T, right.fake_quantize(searched.assignment.right).T)
    return partial(error.loss_of, left.format.errors(left.values))


def inside(points, view):
    spacing = (view.high - view.low) / torch.tensor([15.0, 7.0])
    return bool(((points >= view.low - spacing) & (points <= view.high + spacing)).all())


def test_a_path_is_that_of_the_search(searched, drawn):
    for each in drawn:
        path = each.path
        assert [len(points) for points in path.steps] == [128, 128, 128]
        assert len(path.parents) == Search().parents
        assert torch.equal(path.steps[0].amin(0), each.whole.low)
        assert torch.allclose(path.steps[0].amax(0), each.whole.high)
        for points in (*path.steps, path.parents, path.judged, path.walk):
            assert inside(points, each.whole)
        assert torch.equal(path.walk[-1], path.final)
        assert ((path.final >= each.near.low) & (path.final <= each.near.high)).all()
        assert path.least <= float(each.whole.losses.min()) * 1.2
    loss = loss_of_left(searched)
    point = minimise(loss, searched.product.left, Search(steps=2))
    assert torch.equal(drawn[0].path.final, point.flatten())
    assert drawn[0].path.least == float(loss(point[None]))


def test_a_path_from_a_sample_walks_on_a_larger_one(searched, monkeypatch):
    monkeypatch.setattr("adalog.search.objective._ROUGH_ELEMENTS", 1)
    search = Search(steps=1, rough_rows=64)
    left, right = landscape.landscapes(searched, search, size=3)
    assert len(right.path.judged) == 1  # a row of a weight is no sample
    assert [len(points) for points in left.path.steps] == [128, 128]
    assert len(left.path.judged) == search.parents
    assert (left.path.judged == left.path.walk[0]).all(1).any()
    losses = loss_of_left(searched)(left.path.walk)
    assert (losses.diff() <= 0).all()
    assert losses[-1] < losses[0]
    assert float(losses[-1]) == pytest.approx(left.path.least, rel=1e-4)


def test_a_landscape_of_a_sample_is_the_loss_on_its_rows(calibration, monkeypatch):
    """Also where the search takes the Gram matrix, since the product has more columns than the operand."""
    monkeypatch.setattr("adalog.search.objective._ROUGH_ELEMENTS", 1)
    (wide,) = calibration.search(Config(3, 3, 3, images=4, search=Search(steps=1)), ["blocks.0.mlp.fc1"])
    left, _ = landscape.landscapes(wide, Search(steps=1, rough_rows=64), size=3)
    hat = wide.product.right.fake_quantize(wide.assignment.right)
    error = ProductError.of(wide.product.left.values, wide.product.right.values.T, hat.T)
    rows = error.sample(64).left
    assert isinstance(error.form, GramForm)
    assert len(rows) < len(wide.product.left.values)
    expected = errors_of(replace(wide.product.left, values=rows), wide.product.right.values, hat, left.whole)
    assert torch.allclose(left.whole.losses.double(), expected, rtol=1e-4)


def test_paths_without_a_sample_or_steps(searched):
    """As adalog-paper has it: one loss for all, and no line of scales; and the first grid alone."""
    search = Search(steps=2, rough_rows=0)
    path = landscape.landscapes(searched, search, size=3)[0].path
    assert [len(points) for points in path.steps] == [128, 128, 128]
    assert torch.equal(path.judged[0], path.final)
    path = landscape.landscapes(searched, Search(steps=0, rough_rows=0), size=3)[0].path
    assert (len(path.steps), len(path.parents)) == (1, 0)
    with pytest.raises(ValueError, match="strategy = 'alternating' has no path"):
        landscape.landscapes(searched, Search(strategy="alternating"), size=3)


@pytest.mark.slow
def test_a_landscape_of_heads_and_one_of_one_hyperparameter(calibration):
    config = Config.preset("w3a3", "log2")
    (scores,) = calibration.search(config, ["blocks.0.attn.qk"])
    left, right = landscape.landscapes(scores, Search(steps=1), size=3)
    assert left.title.split(", ")[-1] in ("head 1 of 2", "head 2 of 2")
    assert left.whole.losses.shape == right.whole.losses.shape == (3, 3)
    (mixed,) = calibration.search(config, ["blocks.0.attn.av"])
    left, _ = landscape.landscapes(mixed, Search(steps=1), size=5)
    assert left.names == ("scale",)
    assert left.whole.losses.shape == (5,)
    figure = landscape.landscape_figure([left], "one")
    assert np.allclose(figure.axes[0].lines[0].get_xdata(), left.whole.lines[0])
    assert len(render(figure, "png")) > 1000


def test_what_stays_float_has_no_landscape(calibration):
    config = Config(images=4, pinned=(("blocks.0.mlp.fc2", 32),), search=Search(steps=1))
    assert landscape.landscapes(calibration.search(config, ["blocks.0.mlp.fc2"])[0], Search()) == []


def test_a_drawn_landscape_shows_its_path(drawn):
    figure = landscape.landscape_figure(drawn, "search")
    axis = figure.axes[0]
    points = {line.get_label(): line.get_xydata() for line in axis.lines}
    path = drawn[0].path
    assert np.array_equal(points["first grid"], path.steps[0].numpy())
    assert np.array_equal(points["parents"], path.parents.numpy())
    assert np.array_equal(points["children"], torch.cat(path.steps[1:]).numpy())
    assert np.array_equal(points["walk"], path.walk.numpy())
    assert np.array_equal(points["result"], path.final[None].numpy())
    shown = axis.images[0].get_array()
    assert np.unravel_index(shown.argmin(), shown.shape)[::-1] == np.unravel_index(
        int(drawn[0].whole.losses.argmin()), (6, 6)
    )
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(points)
