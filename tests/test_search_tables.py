"""Integer tables of logarithmic quantizers, searched for the error of the output."""

from dataclasses import replace

import pytest
import torch

from adalog.quantizers import LogFormat, LogQuantizer, UniformQuantizer
from adalog.search import tables
from adalog.search.operand import Operand
from adalog.search.product import Product
from adalog.search.tables import with_table, with_tables
from problems import SMALL, after_gelu, after_softmax, fixed_base
from strategies import R, normal


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
    left = Operand(normal(20, 8).abs(), LogFormat(4, r=R))
    quantizer = LogQuantizer(torch.tensor(1.0, dtype=torch.float64), 20, R, 4)
    second = UniformQuantizer(torch.tensor(0.1, dtype=torch.float64), torch.tensor(8.0, dtype=torch.float64), 4)

    def rough(candidates):
        return [[abs(float(first.scale) - 1.13)] for (first,) in candidates]

    (found,) = tables._with_tables(
        left, [quantizer], [second], 8, rough, lambda firsts: [exact(each) for each in firsts]
    )
    assert found.width == 8
    assert float(found.scale) == (1.13 if changes else 1.0)


@pytest.mark.parametrize("choice", ["calibrated", "u8", "u16"])
@pytest.mark.parametrize("problem", [after_softmax, after_gelu, fixed_base])
def test_tables_are_found_together_as_alone(problem, choice):
    left, right = problem()
    products = [
        Product("av", replace(left, values=left.values * factor), replace(right, values=right.values * (1 + factor)))
        for factor in (1.0, 0.5, 0.7)
    ]
    plain = [SMALL.search_product(product) for product in products]
    alone = [with_table(*each, choice) for each in zip(products, plain, strict=True)]
    together = with_tables(products, plain, choice)
    for one, other in zip(alone, together, strict=True):
        assert (one.left.q, one.left.width, one.left.headroom) == (other.left.q, other.left.width, other.left.headroom)
        torch.testing.assert_close(one.left.scale, other.left.scale)
        assert one.sqnr == pytest.approx(other.sqnr, abs=1e-3)


def test_a_device_gives_the_nearest_levels_as_the_quantizer_does():
    """At equal distances, of values on a threshold, either level is nearest."""
    values = torch.cat([normal(400, seed=1), torch.tensor([0.0, -0.17, 1.0, 4.0]), -normal(40, seed=2) / 100])
    values = values.clamp(min=-0.1699712).view(1, 4, -1)
    quantizers = [
        LogQuantizer(
            torch.tensor(scale, dtype=torch.float64), q, R, 4, offset=0.1699712, width=width, headroom=headroom
        )
        for scale, q, width, headroom in ((1.0, 20, 0, 0), (3.0, 31, 8, 1), (0.7, 50, 16, 5))
    ]
    found = tables._nearest(values, [(each,) for each in quantizers])
    for hat, quantizer in zip(found, quantizers, strict=True):
        exact = quantizer.fake_quantize(values)
        assert torch.equal(hat, exact) or (hat != exact).float().mean() < 0.01
        torch.testing.assert_close((hat - values).abs(), (exact - values).abs(), rtol=1e-9, atol=1e-12)
