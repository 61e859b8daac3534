"""Small random products for the searches, and the errors of what they find."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import gelu

from adalog.quantizers import LargestLevelFormat, LogFormat, QuantizedTensor, UniformFormat, UniformQuantizer
from adalog.search.bounds import Search
from adalog.search.operand import Operand
from adalog.search.product import Product
from strategies import R, normal

SEARCH = Search(rough_rows=0)
SMALL = Search(init=(8, 4), parents=4, steps=3, rough_rows=0)
ONE_ROUND = replace(SMALL, rounds=1)
GELU_OFFSET = 0.1699712


def linear(width=4):
    """An activation, and a weight with outliers in a column that matters less."""
    x, weight = normal(64, 16, seed=1), normal(12, 16, seed=2)
    x[:, 5] *= 0.2
    weight[::3, 5] = 6
    return Operand(x, UniformFormat(width)), Operand(weight, UniformFormat(width, own_dims=(0,)))


def attention(width=4):
    """Queries and keys, each with a scale a head."""
    heads = torch.tensor([0.2, 1.0, 5.0], dtype=torch.float64).view(1, 3, 1, 1)
    form = UniformFormat(width, own_dims=(1,))
    return Operand(normal(2, 3, 10, 8, seed=1) * heads, form), Operand(normal(2, 3, 10, 8, seed=2), form)


def after_softmax(width=4):
    """Attention and values, which are given transposed."""
    form = LogFormat(width, r=R)
    return Operand((normal(1, 2, 9, 9, seed=1) * 3).softmax(-1), form), Operand(
        normal(1, 2, 8, 9, seed=2), UniformFormat(width, own_dims=(1,))
    )


def after_gelu(width=4):
    form = LogFormat(width, r=R, offset=GELU_OFFSET)
    return Operand(gelu(normal(64, 16, seed=1) * 2), form), Operand(
        normal(12, 16, seed=2), UniformFormat(width, own_dims=(0,))
    )


def fixed_base(width=4):
    form = LogFormat(width, r=2, q=1, table=False)
    return replace(after_softmax(width)[0], format=form), after_softmax(width)[1]


def symmetric(width=4):
    x, weight = linear(width)
    return x, replace(weight, format=LargestLevelFormat(width, (0,), kind=UniformQuantizer))


PROBLEMS = {
    problem.__name__: problem for problem in (linear, attention, after_softmax, after_gelu, fixed_base, symmetric)
}
every_problem = pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)


def output_error(left, right, left_hat, right_hat):
    """(squared error, squared norm) of the product, in float64."""
    output = left.values.double() @ right.values.double().transpose(-1, -2)
    error = left_hat.double() @ right_hat.double().transpose(-1, -2) - output
    return float(error.square().sum()), float(output.square().sum())


def many_rows(problem):
    """A problem with so many tokens that some of them can stand for all."""
    left, right = problem()
    repeats = (10, 1) if left.values.ndim == 2 else (8, 1, 4, 1)
    values = left.values.repeat(repeats)
    values = values * (1 + 0.3 * normal(*values.shape, seed=3)).abs()
    if problem in (after_softmax, fixed_base):
        values = values / values.sum(-1, keepdim=True)
    if problem is after_gelu:
        values = gelu(values)
    left = replace(left, values=values)
    if right.values.ndim == 2:
        return left, right
    if problem is attention:
        return left, replace(right, values=right.values.repeat(repeats))
    return left, replace(right, values=right.values.repeat(8, 1, 1, 1), alike=False)


def found_by(left, right, search):
    """The assignment of left @ right^T under these choices."""
    role = "linear" if left.values.ndim == 2 else "av" if isinstance(left.format, LogFormat) else "qk"
    return search.search_product(Product(role, left, right))


def weight_of(found):
    """The quantizer of the right operand, whose codes may be chosen already."""
    return found.right.quantizer if isinstance(found.right, QuantizedTensor) else found.right


def error_of(found, left, right):
    hats = left.fake_quantize(found.left), right.fake_quantize(found.right)
    return output_error(left, right, *hats)[0]


def rounded(value):
    """Halves to even."""
    return value.round()


MARGIN = 1e-9  # relative; sums of some thousand products in float64 differ by less than 1e-12 between processors


def pick(candidates, loss):
    """The candidate of the least loss. The test's input is at fault where another candidate comes within the margin."""
    losses = [loss(candidate) for candidate in candidates]
    least = min(losses)
    assert sum(other <= least * (1 + MARGIN) for other in losses) == 1, "the minimum is not unique by the margin"
    return candidates[losses.index(least)]


def assert_close(found, expected):
    assert found.flatten().tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)


def uniform_of(scale, bits=4):
    return UniformQuantizer(torch.tensor(scale, dtype=torch.float64), torch.tensor(float(2 ** (bits - 1))), bits)
