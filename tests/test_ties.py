"""Scales that a cosine cannot tell apart: those within rounding of the best one are told apart by the squared error."""

import pytest
import torch

from adalog.choices import ScaleSearch
from adalog.search import scales
from adalog.search.operand import Format, Operand
from adalog.search.product import Product
from strategies import normal

BITS = 3
HALF = 2 ** (BITS - 1)


def equal_rows(size, dtype=torch.float64):
    """x, and a weight whose rows hold one positive value each: whatever its scale, a row has the codes of one shape."""
    x = normal(size, 6) * 2 + 0.5
    weight = torch.tensor([[0.7], [3.1], [0.02], [1.0]], dtype=torch.float64).expand(-1, 6)
    return x.to(dtype), weight.to(dtype).contiguous()


def found_scales(x, weight, search, row_splits=None):
    operands = Operand(x, Format(BITS)), Operand(weight, Format(BITS, own_dims=(0,)))
    return scales.search_product(Product("linear", *operands, row_splits=row_splits), search).right.scale.flatten()


def symmetric(x, s):
    return s * (x / s).round().clamp(-HALF, HALF - 1)


def least_squared_error(x, weight, search, labels):
    """The scale of each row, by the squared error alone, in float64; rows of one label share a scale.

    The input is at fault where two candidates, by their codes and scales, come within 1e-5 of each other.
    """
    x, weight = x.double(), weight.double()
    x_hat = symmetric(x, float(x.abs().max()) / (HALF - 0.5))
    low, high = search.span
    multiples = [low + index * (high - low) / search.candidates for index in range(search.candidates)]
    expected = {}
    for label in set(labels):
        rows = weight[[other == label for other in labels]]
        first = float(rows.abs().max()) / (HALF - 0.5)
        tried = [(float((x_hat @ symmetric(rows, first * m).T - x @ rows.T).square().sum()), m) for m in multiples]
        (least, best), (second, _) = sorted(tried)[:2]
        assert second > least * (1 + 1e-5), "the minimum is not unique by the margin"
        expected[label] = first * best
    return [expected[label] for label in labels]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("labels", [None, [0, 1, 0, 2]])
@pytest.mark.parametrize("size", [7, 1300])
def test_scales_with_equal_codes_go_to_the_least_squared_error(dtype, labels, size):
    """1,300 rows are sampled first: more candidates are equal than the sample may leave.

    Rows that share a scale have equal values here, else their codes would tell scales apart.
    """
    x, weight = equal_rows(size, dtype)
    if labels is not None:
        weight[2] = weight[0]
    search = ScaleSearch(metric="cosine", span=(0.5, 2.0), candidates=40, rounds=1)
    found = found_scales(x, weight, search, None if labels is None else torch.tensor(labels))
    expected = least_squared_error(x, weight, search, labels or [0, 1, 2, 3])
    assert found.tolist() == pytest.approx(expected, rel=1e-5)


def sums(output, hats):
    """What `by_cosine` takes: |O|^2, <O, e> and |e|^2, each output one group."""
    error = hats - output
    power, along, square = (value.double().sum(-1) for value in (output**2, error * output, error**2))
    return power, along, square


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lengths_are_no_directions(dtype):
    """Multiples of one output are a tie; an output whose direction is better by more than rounding wins over them."""
    output = normal(3, 500).to(dtype)
    hat = output + 0.1 * normal(3, 500, seed=1).to(dtype)
    lengths = (0.6, 1.9, 1.3, 0.95, 1.1)
    epsilon = torch.finfo(dtype).eps
    ties = torch.stack([length * hat for length in lengths])
    order = scales.by_cosine(*sums(output, ties), epsilon)
    nearest = sorted(range(5), key=lambda index: abs(lengths[index] - 0.99))  # 1 / (1 + 0.1**2), the best length
    assert order.T.tolist() == [nearest] * 3
    better = 1.7 * (output + 0.0999 * normal(3, 500, seed=1).to(dtype))  # its loss is less by the share 0.002
    assert scales.by_cosine(*sums(output, torch.cat([ties, better[None]])), epsilon)[0].tolist() == [5] * 3


def test_equal_candidates_stay_in_their_order():
    output = normal(2, 50)
    hats = torch.stack([output * 1.01, output * 1.01, output * 1.01])
    assert scales.by_cosine(*sums(output, hats), 2.0**-52).T.tolist() == [[0, 1, 2]] * 2


def test_an_output_that_rounds_to_zero_has_no_direction():
    """It has the loss 1, whatever is left of the sums: a good candidate wins, and a bad one loses."""
    size = 1e12
    power = torch.full((1,), size, dtype=torch.float64)
    along = size * torch.tensor([[-1.0 + 1e-9], [-0.1], [-1.5]], dtype=torch.float64)
    square = size * torch.tensor([[1.0 - 3e-9], [0.3], [2.5]], dtype=torch.float64)  # |O + e|^2: -1e-9, 1.1, 0.5
    assert scales.by_cosine(power, along, square, 2.0**-23).flatten().tolist() == [1, 0, 2]
    nothing = torch.zeros(3, 1, dtype=torch.float64)
    assert scales.by_cosine(nothing[0], nothing, square, 2.0**-23).flatten().tolist() == [1, 0, 2]
