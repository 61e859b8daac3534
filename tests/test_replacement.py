"""A later result of a search replaces an earlier one only if its exact loss is less; an equal one changes nothing."""

from dataclasses import replace

import pytest
import torch

from adalog.choices import Search
from adalog.quantizers import LogQuantizer, UniformQuantizer
from adalog.search import bounds, product
from adalog.search.objective import ProductError
from adalog.search.operand import Format, Operand
from adalog.search.product import Product
from strategies import R, normal

SEARCH = Search(init=(8, 4), parents=4, steps=2, rounds=1, refit=False, rough_rows=0)


def linear():
    """A product of 40 rows and a weight of three rows, both in 4 bits."""
    left, right = normal(40, 16) * 2, normal(3, 16, seed=1)
    return Product("linear", Operand(left, Format(4)), Operand(right, Format(4, own_dims=(0,))))


def of_weight(given):
    """The error of the product as the right operand's search sees it, with the left one exact."""
    x = given.left.values.transpose(-1, -2)
    return ProductError.of(given.right.values, x, x, (0,))


def points(*rows):
    """A point per row of the weight, (low, high) each: (2, rows)."""
    return torch.tensor(rows, dtype=torch.float64).T


GOOD, BAD = (-2.0, 1.75), (-40.0, 35.0)
SHIFTED = (-2.0625, 1.6875)  # the same scale of 1/4, and the same zero point of 8: one quantizer, two points


def test_each_row_keeps_the_point_of_less_loss():
    """The first row's new point is worse, the second's is better, the third's is equal."""
    given = linear()
    error = of_weight(given)
    before, after = points(GOOD, BAD, GOOD), points(BAD, GOOD, SHIFTED)
    found, total = bounds._better(error, given.right, after, before)
    assert torch.equal(found, points(GOOD, GOOD, GOOD))
    hat = given.right.quantized_at(points(GOOD, GOOD, GOOD)) - given.right.values
    assert total == pytest.approx(float((given.left.values @ hat.T).square().sum()), rel=1e-9)


@pytest.mark.parametrize("after", [points(BAD, BAD, BAD), points(SHIFTED, BAD, SHIFTED)], ids=["worse", "equal"])
def test_the_point_before_is_the_very_same_where_no_row_gets_better(after):
    given, before = linear(), points(GOOD, GOOD, GOOD)
    assert bounds._better(of_weight(given), given.right, after, before)[0] is before


@pytest.mark.parametrize("rough_rows", [0, 10])
def test_a_candidate_that_is_worse_replaces_nothing(rough_rows, monkeypatch):
    """Whatever a strategy returns, the second round cannot lose what the first one has found."""
    given, minimise, calls = linear(), bounds.minimise, []

    def worse(loss, operand, search, incumbent=None, rough=None, *, nearby=False):
        calls.append(incumbent is not None)
        return minimise(loss, operand, search, incumbent, rough, nearby=nearby) if calls[-1] is False else 9 * incumbent

    search = replace(SEARCH, rough_rows=rough_rows)
    first = bounds.search_own(given.left, search)
    second, _ = bounds._search_operand(given.right, given.left.values, given.left.quantized_at(first), search, None)
    monkeypatch.setattr(bounds, "minimise", worse)
    found = bounds.search_product(given, replace(search, rounds=2))
    assert any(calls)
    for after, side, point in ((found.left, given.left, first), (found.right, given.right, second)):
        before = side.quantizer(point)
        assert torch.equal(before.scale, after.scale)
        assert torch.equal(before.zero_point, after.zero_point)


def started(monkeypatch, factor):
    """A wide start, and what comes of it where each search of an operand finds its ends times this factor."""
    given = linear()

    def finds(operand, other, other_hat, search, incumbent, *, nearby=False):
        return incumbent * factor if factor != 1 else incumbent, 1.0

    def quantizer(scale, shape):
        return UniformQuantizer(torch.full(shape, scale).double(), torch.full(shape, 8.0).double(), 4)

    start = given.assigned(quantizer(1.5, (1,)), quantizer(0.75, (3, 1)))
    monkeypatch.setattr(bounds, "_search_operand", finds)
    return start, bounds.search_product(replace(given, start=start), SEARCH)


def test_a_start_stays_where_the_search_finds_something_worse(monkeypatch):
    start, found = started(monkeypatch, 10)
    assert found.left is start.left
    assert found.right is start.right


def test_a_start_stays_where_the_search_finds_something_equal(monkeypatch):
    """Its own quantizers, and not copies that the search made of their points."""
    start, found = started(monkeypatch, 1)
    assert found.sqnr == start.sqnr
    assert found.left is start.left
    assert found.right is start.right


def test_a_start_goes_where_the_search_finds_something_better(monkeypatch):
    start, found = started(monkeypatch, 0.7)
    assert found.sqnr > start.sqnr + 0.1
    assert found.left is not start.left
    assert found.right is not start.right


@pytest.mark.parametrize(
    ("exact", "changes"),
    [
        (lambda first: abs(float(first.scale) - 1.13), True),
        (lambda first: 0.0, False),
        (lambda first: -abs(float(first.scale) - 1.13), False),
    ],
    ids=["better", "equal", "worse"],
)
def test_a_table_takes_another_scale_only_if_the_exact_error_is_less(exact, changes):
    """The rough error asks for the scale 1.13 each time."""
    left = Operand(normal(20, 8).abs(), Format(4, log2_base=(0, R)))
    quantizer = LogQuantizer(torch.tensor(1.0, dtype=torch.float64), 20, R, 4)
    second = UniformQuantizer(torch.tensor(0.1, dtype=torch.float64), torch.tensor(8.0, dtype=torch.float64), 4)
    found = product._tabled(left, quantizer, second, 8, lambda first: abs(float(first.scale) - 1.13), exact)
    assert found.width == 8
    assert float(found.scale) == (1.13 if changes else 1.0)
