"""Importance of rows: systematic samples, the weights of a class token, and that a search counts rows by them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from adalog import Calibration, Config, Search
from adalog.calibration.importance import resample, row_weights
from adalog.graph.capture import capture
from adalog.graph.rewrite import group_sites
from adalog.graph.sites import find_sites
from strategies import normal
from toys import Toy


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=60))
def test_rows_occur_in_proportion_to_their_weights(values):
    weights = torch.tensor(values, dtype=torch.float64)
    rows = resample(weights)
    assert len(rows) == len(weights)
    assert torch.equal(rows, rows.sort().values)
    expected = weights / weights.sum() * len(weights)
    assert (rows.bincount(minlength=len(weights)) - expected).abs().max() < 1 + 1e-9


def test_equal_weights_keep_every_row():
    assert torch.equal(resample(torch.full((3, 7), 0.3)), torch.arange(7).expand(3, 7))


def tokens_model(first):
    """A block whose head reads the first token only, as a class token, or the mean of all tokens."""

    def function(m, x):
        x = x + m.out(nn.functional.gelu(m.inner(m.norm(x))))
        return m.head(x[:, 0] if first else x.mean(1))

    torch.manual_seed(0)
    parts = {"norm": nn.LayerNorm(8), "inner": nn.Linear(8, 16), "out": nn.Linear(16, 8), "head": nn.Linear(8, 5)}
    return Toy(function, **parts).eval()


def weights_of(first, power):
    images = normal(6, 10, 8, dtype=torch.float32)
    program = capture(tokens_model(first), (images,))
    sites = find_sites(program)
    found = row_weights(program, (images,), group_sites(sites, []), power, 0)
    return {site.name: found[site.node.name] for site in sites}


@pytest.mark.parametrize("power", [0.5, 1.0])
def test_only_the_class_token_counts_if_only_it_is_read(power):
    weights = weights_of(True, power)
    for name in ("inner", "out"):
        assert weights[name].shape == (6, 10, 1)
        assert weights[name].mean() == pytest.approx(1)
        # Four fifths of the weight go by gradients, which only the first of ten tokens has.
        torch.testing.assert_close(weights[name][:, 0], torch.full((6, 1), 8.2))
        torch.testing.assert_close(weights[name][:, 1:], torch.full((6, 9, 1), 0.2))


def test_averaged_tokens_count_about_alike_and_positions_the_same_in_all_images():
    weights = weights_of(False, 0.5)["out"]
    assert weights.min() > 0.8
    assert weights.max() < 1.2
    assert torch.equal(weights, weights[:1].expand_as(weights))


def test_a_search_counts_the_rows_by_their_importance():
    """The class token's operand has a smaller error if the search counts what the head reads."""
    images = normal(16, 12, 8, dtype=torch.float32)
    images[:, 0] *= 4  # the class token has another range
    calibration, errors = Calibration(tokens_model(True), images), {}
    norm = nn.functional.layer_norm(images, (8,))[:, 0]
    for importance in (0.0, 0.5):
        search = Search(importance=importance)
        config = Config(weight_bits=3, activation_bits=3, images=16, fold_rows=10**9, search=search)
        (found,) = calibration.search(config, ["inner"])
        errors[importance] = float((found.assignment.left.fake_quantize(norm) - norm).square().mean())
        assert len(found.product.left.values) == 16 * 12  # as many rows as before
    assert errors[0.5] <= errors[0.0] * 1.05
