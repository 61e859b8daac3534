"""The leading part of a weight's Gram matrix against the error itself."""

from dataclasses import replace

import pytest
import torch

import adalog.search.objective
from adalog.search.objective import ProductError
from strategies import normal
from test_objective import direct, points_of, rounding_candidates


def weights_of_tokens(decay, width=192):
    """A weight with 12 rows, tokens whose directions have lengths that fall like this, and these tokens moved a bit."""
    turn = torch.linalg.qr(normal(width, width, seed=3)).Q
    right = (turn * decay ** torch.arange(width)) @ normal(width, 400, seed=2)
    return normal(12, width, seed=1), right, 1.05 * right


def leading_and_exact(decay):
    """The losses of a sample and of all tokens, both above those of the first candidate."""
    left, right, right_hat = weights_of_tokens(decay)
    error = ProductError.of(left, right, right_hat, (0,))
    assert error.gram
    sample, points = error.leading(), points_of(left.shape, (0,))
    exact = direct(left, right, right_hat, (0,))
    found = sample.loss(rounding_candidates(left, (0,)), points)
    return sample, found - found[:1], exact - exact[:1]


def test_leading_directions_are_all_of_a_matrix_of_their_rank():
    sample, found, exact = leading_and_exact(0.5)  # 2**-64 is left of the last direction
    assert sample.factor.shape == (192, 64)
    assert not sample.gram
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("decay", [0.95, 0.99, 1.0])
def test_the_diagonal_stands_for_what_leading_directions_leave(decay):
    sample, found, exact = leading_and_exact(decay)
    assert float((found - exact).norm() / exact.norm()) < 0.1
    without = replace(sample, rest=None).loss(
        rounding_candidates(sample.left, (0,)), points_of(sample.left.shape, (0,))
    )
    assert float((without - without[:1] - exact).norm() / exact.norm()) > 1.5 * float(
        (found - exact).norm() / exact.norm()
    )


def test_what_is_linear_in_the_error_is_exact():
    """A tiny step of one weight: its square is nothing."""
    left, right, right_hat = weights_of_tokens(1.0)
    error = ProductError.of(left, right, right_hat, (0,))
    step = torch.zeros(12, 192, dtype=torch.float64)
    step[:, 5] = 1e-6

    def moved(points):
        return torch.stack([left, left + step, left - step])

    def slope(of):
        _, up, down = of.loss(moved, torch.zeros(3, 1, 12))
        return up - down

    torch.testing.assert_close(slope(error.leading()), slope(error), rtol=1e-4, atol=1e-12)


def test_narrow_weights_and_dead_tokens():
    left, right, right_hat = weights_of_tokens(0.9, width=191)
    narrow = ProductError.of(left, right, right_hat, (0,))
    assert narrow.leading() is narrow
    zeros = torch.zeros(192, 400, dtype=torch.float64)
    dead = ProductError.of(normal(12, 192), zeros, zeros, (0,)).leading()
    assert float(dead.loss(rounding_candidates(dead.left, (0,)), points_of((12, 192), (0,))).max()) < 1e-30


def test_slices_of_a_weight_have_the_same_leading_part(monkeypatch):
    error = ProductError.of(*weights_of_tokens(0.95), (0,)).leading()
    points = points_of((12, 192), (0,))
    whole = error.loss(rounding_candidates(error.left, (0,)), points)
    monkeypatch.setattr(adalog.search.objective, "chunk_elements", lambda _: 1000)
    first, *others = error.by_rows()
    assert others
    some = points[..., : len(first.left)]
    torch.testing.assert_close(
        first.loss(rounding_candidates(first.left, (0,)), some), whole[:, : len(first.left)], rtol=1e-9, atol=1e-9
    )


def test_leading_directions_are_drawn_where_the_values_are():
    error = ProductError.of(*weights_of_tokens(0.95), (0,))
    expected = error.leading()
    with torch.device("meta"):
        found = error.leading()
    assert torch.equal(found.factor, expected.factor)
