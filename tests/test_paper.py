"""The paper, equation by equation: each test computes the printed formula by itself, in float64 or in plain Python.

Equations are numbered as LaTeX counts them in arXiv 2407.12951.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import product
from operator import mul

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu

from adalog import Calibration
from adalog.config import Config, power_law_format
from adalog.graph.rewrite import absorb_offset
from adalog.methods import METHODS
from adalog.quantizers import (
    LogQuantizer,
    UniformFormat,
    UniformQuantizer,
    log_dequantize,
    log_levels,
    log_quantize,
    log_tables,
    table_step,
)
from adalog.search.bounds import Search
from adalog.search.objective import ProductError
from adalog.search.operand import Operand
from adalog.search.product import Product
from adalog.search.strategies import fpcs, grid
from released_oracle import quantile, square, uniform
from strategies import R, f64, log_fake_quantize, normal

BITS = [2, 3, 4, 6, 8]
BASES = [1, 10, 20, 37, 74, 137]
GELU_OFFSET = 0.16997120747990369


def post_softmax(count: int = 400) -> Tensor:
    """Positive values over many octaves, as after softmax."""
    return (normal(count) * 3 - 4).exp().clamp(1e-7, 1.0)


def printed_code(x: float, scale: float, log2_base: float, bits: int) -> int | None:
    """clamp(round(-log_b(x / s)), 0, 2^bit - 1); None where x is so near a tie that float64 cannot decide."""
    exponent = -math.log2(x / scale) / log2_base
    if abs(exponent - math.floor(exponent) - 0.5) < 1e-9:
        return None
    return min(max(round(exponent), 0), 2**bits - 1)


def assert_codes(code: Tensor, x: Tensor, scale: float, log2_base: float, bits: int) -> None:
    printed = [printed_code(value, scale, log2_base, bits) for value in x.tolist()]
    decided = [(int(got), want) for got, want in zip(code, printed, strict=True) if want is not None]
    assert len(decided) > 0.99 * len(x)
    assert [got for got, _ in decided] == [want for _, want in decided]


# --- Sec. 3.1: quantizers with a fixed base -----------------------------------------------------------------


def levels_of(scale: float, q: int, r: int, bits: int) -> list[float]:
    return log_dequantize(torch.arange(2**bits), f64(scale), q, r, bits, table=False).tolist()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(
    ("scale", "q", "r"), [*((scale, 1, r) for scale in (1.0, 0.37) for r in (1, 2)), *((0.8, q, R) for q in BASES)]
)
def test_eq_01_03_05_quantize(bits: int, scale: float, q: int, r: int) -> None:
    x = post_softmax()
    assert_codes(log_quantize(x, f64(scale), q, r, bits), x, scale, q / r, bits)


@pytest.mark.parametrize("bits", BITS)
def test_eq_02_log2_dequantize(bits: int) -> None:
    assert levels_of(0.37, 1, 1, bits) == [0.37 * 2.0**-k for k in range(2**bits)]


@pytest.mark.parametrize("bits", BITS)
def test_eq_04_log_sqrt2_dequantize_with_parity_scale(bits: int) -> None:
    def printed(code: int) -> float:
        parity_scale = 0.37 * ((code % 2) * (math.sqrt(2) - 1) + 1)
        return parity_scale * 2.0 ** math.floor(-code / 2)

    assert levels_of(0.37, 1, 2, bits) == pytest.approx([printed(code) for code in range(2**bits)], rel=1e-14)


# --- Sec. 3.2: AdaLog ---------------------------------------------------------------------------------------


every_base = pytest.mark.parametrize(("bits", "q"), list(product(BITS, BASES)))


@every_base
def test_eq_06_dequantize(bits: int, q: int) -> None:
    base = 2 ** (q / R)
    # k log2(base) is rounded before the power is taken: a relative error of about 1000 ulps at the largest exponents.
    assert levels_of(0.8, q, R, bits) == pytest.approx([0.8 * base**-k for k in range(2**bits)], rel=1e-12)


@pytest.mark.parametrize("q", BASES)
def test_eq_07_rational_base_splits_into_shift_and_fraction(q: int) -> None:
    bits = 4
    shift, _ = log_tables(q, R, bits)
    levels = log_levels(q, R, bits, beyond="saturate", table=False)
    for k in range(2**bits):
        fraction = ((q * k) % R) / R
        assert 2.0 ** -int(shift[k]) * 2.0**-fraction == pytest.approx(float(levels[k]), rel=1e-13)


@every_base
def test_eq_08_shift_and_remainder_tables(bits: int, q: int) -> None:
    shift, mantissa = log_tables(q, R, bits)
    exponents = [Fraction(q * k, R) for k in range(2**bits)]
    assert shift.tolist() == [math.floor(exponent) for exponent in exponents]
    # The remainder is kept as 2^-remainder / s_table (Eq. 9), which gives it back to within half a step.
    remainder = [-math.log2(m / (2 * (2**bits - 1))) for m in mantissa.tolist()]
    tolerance = math.log2(1 + 1 / (2 * (2**bits - 1) - 1))
    assert remainder == pytest.approx([float(e - math.floor(e)) for e in exponents], abs=tolerance)


@every_base
def test_eq_09_mantissa_table(bits: int, q: int) -> None:
    s_table = 1 / (2 * (2**bits - 1))
    assert table_step(bits) == s_table
    _, mantissa = log_tables(q, R, bits)
    printed = [round(2.0 ** -(((q * k) % R) / R) / s_table) for k in range(2**bits)]
    assert mantissa.tolist() == printed
    assert all(2**bits - 1 <= m <= 2 * (2**bits - 1) for m in printed)


def coded_product(bits: int, q: int) -> tuple[list[int], list[int], list[int], float, float]:
    """Mantissas U and shifts A of some codes, integers B, and the float product of what they stand for, over s s'.

    The last is the same product of magnitudes, for tolerances.
    """
    generator = torch.Generator().manual_seed(bits * 1000 + q)
    code = torch.randint(0, 2**bits, (64,), generator=generator)
    b = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (64,), generator=generator).double()
    shift, mantissa = (table[code].tolist() for table in log_tables(q, R, bits))
    scale, other_scale = 0.8, 0.013
    left, right = log_dequantize(code, f64(scale), q, R, bits), b * other_scale
    value, size = (float(product) / (scale * other_scale) for product in (left @ right, left @ right.abs()))
    return mantissa, shift, [int(n) for n in b], value, size


@pytest.mark.parametrize("bits", [2, 3, 4, 6])
@pytest.mark.parametrize("q", [1, 10, 20, 37])
def test_eq_10_integer_product(bits: int, q: int) -> None:
    mantissa, shift, b, value, size = coded_product(bits, q)
    terms = list(zip(mantissa, shift, b, strict=True))
    exact = sum(Fraction(u * n, 2**a) for u, a, n in terms)
    assert float(exact) / (2 * (2**bits - 1)) == pytest.approx(value, abs=1e-12 * size)
    # Shifted left by the largest shift first, no product loses a bit to the right shift.
    headroom = max(shift)
    assert sum(((u << headroom) * n) >> a for u, a, n in terms) == exact * 2**headroom


def test_eq_10_literal_shift_floors_every_term() -> None:
    mantissa, shift, b, _, _ = coded_product(4, 20)
    exact = [Fraction(u * n, 2**a) for u, a, n in zip(mantissa, shift, b, strict=True)]
    literal = [(u * n) >> a for u, a, n in zip(mantissa, shift, b, strict=True)]
    assert all(0 <= term - floored < 1 for term, floored in zip(exact, literal, strict=True))
    assert sum(exact) - sum(literal) > 10  # always downwards, so it does not average out


# --- Sec. 3.3: post-GELU layers -----------------------------------------------------------------------------


def linear_layer() -> tuple[Tensor, Tensor, Tensor]:
    """A weight (5, 12), a bias, and post-GELU inputs (40, 12)."""
    return normal(5, 12, seed=1), normal(5, seed=2), gelu(normal(40, 12, seed=3) * 2)


def test_eq_11_12_bias_reparameterization_leaves_the_output() -> None:
    weight, bias, x = linear_layer()
    lifted = (x + GELU_OFFSET) @ weight.T + absorb_offset(weight, bias, GELU_OFFSET)
    rows = list(zip(weight.tolist(), bias.tolist(), strict=True))
    printed = [[sum(map(mul, row, column)) + b for row, b in rows] for column in x.tolist()]
    torch.testing.assert_close(lifted, torch.tensor(printed, dtype=torch.float64), rtol=0, atol=1e-13)
    without = (x + GELU_OFFSET) @ weight.T + absorb_offset(weight, None, GELU_OFFSET)
    torch.testing.assert_close(without, x @ weight.T, rtol=0, atol=1e-13)


@pytest.mark.parametrize("bits", [3, 4, 6])
def test_eq_13_quantize_with_offset(bits: int) -> None:
    x = gelu(normal(300) * 2)
    quantizer = LogQuantizer(f64(3.0), 20, R, bits, beyond="saturate", rounding="log", offset=GELU_OFFSET)
    assert_codes(quantizer.quantize(x), x + GELU_OFFSET, 3.0, 20 / R, bits)


@pytest.mark.parametrize("keeps_offset", [False, True])
def test_eq_14_dequantize_with_offset(keeps_offset: bool) -> None:
    """The dequantized value is that of X' = X + 0.17, from which the offset goes only where no bias has absorbed it."""
    quantizer = LogQuantizer(
        f64(3.0), 20, R, 4, beyond="saturate", rounding="log", table=False, offset=0.17, keeps_offset=keeps_offset
    )
    printed = [3.0 * (2 ** (20 / R)) ** -k - (0.0 if keeps_offset else 0.17) for k in range(16)]
    assert quantizer.dequantize(torch.arange(16)).tolist() == pytest.approx(printed, abs=1e-13)


def test_eq_15_bias_uses_the_dequantized_weight() -> None:
    weight, bias, x = linear_layer()
    coarse = UniformQuantizer(f64(0.4), f64(8.0), 4).fake_quantize(weight)
    b_rep = absorb_offset(coarse, bias, 0.17)
    printed = [b - 0.17 * sum(row) for row, b in zip(coarse.tolist(), bias.tolist(), strict=True)]
    assert b_rep.tolist() == pytest.approx(printed, abs=1e-13)
    # So that the offset cancels exactly on the quantized layer, with the true weight it would not.
    torch.testing.assert_close((x + 0.17) @ coarse.T + b_rep, x @ coarse.T + bias, rtol=0, atol=1e-13)
    assert (absorb_offset(weight, bias, 0.17) - b_rep).abs().max() > 0.01


# --- Sec. 3.4: the search -----------------------------------------------------------------------------------


def rippled(points: Tensor) -> Tensor:
    """A loss with several minima, of points (K, 2)."""
    a, b = points[:, 0], points[:, 1]
    return (a - 0.31) ** 2 + 2 * (b - 0.77) ** 2 + a * b / 3 + 0.05 * torch.cos(25 * a) * torch.cos(19 * b)


Point = tuple[float, ...]
Score = Callable[[Point], float]


def printed_sets(low: Point, high: Point, score: Score) -> list[list[Point]]:
    """Algorithm 1 in plain Python: the candidates of each step.

    With n = 128 = 16 x 8, p = 4 and z_1 = z_2 = 1, a parent being one of its own children.
    """
    tau = [(high[0] - low[0]) / 15, (high[1] - low[1]) / 7]
    sets = [[(low[0] + i * tau[0], low[1] + j * tau[1]) for i in range(16) for j in range(8)]]
    for _ in range(4):
        parents = sorted(sets[-1], key=score)[:16]
        tau = [spacing / 2 for spacing in tau]
        sets.append([(a + i * tau[0], b + j * tau[1]) for a, b in parents for i in (0, -1, 1) for j in (0, -1, 1)])
    return sets


def printed_algorithm(low: Point, high: Point, score: Score) -> Point:
    return min(printed_sets(low, high, score)[-1], key=score)


def ripple(point: Point) -> float:
    return float(rippled(torch.tensor([point], dtype=torch.float64))[0])


def percentiles(x: Tensor, fractions: Sequence[float]) -> list[float]:
    return [quantile(x, fraction) for fraction in fractions]


LOW, HIGH, SIZES, KEEP, STEPS = (-1.0, 0.2), (0.5, 1.4), (16, 8), 16, 4
CORNERS = f64(*LOW), f64(*HIGH)


def distinct(points: list) -> list[tuple[float, float]]:
    return sorted({(round(a, 9), round(b, 9)) for a, b in points})


def test_algorithm_1_candidates_are_the_product_of_two_partitions() -> None:
    printed = printed_sets(LOW, HIGH, ripple)[0]
    assert len(printed) == 16 * 8
    torch.testing.assert_close(grid(*CORNERS, SIZES), torch.tensor(printed, dtype=torch.float64))


def test_algorithm_1_box_lies_between_percentiles() -> None:
    """Lines 1-2: the first bound between percentiles 0 and 0.1, the second between 0.9 and 1."""
    values = normal(7, 13)
    search = METHODS["adalog-paper"].choices["search"]
    low, high = Operand(values, UniformFormat(4)).box(search.reach)
    assert low.tolist() == pytest.approx(percentiles(values, [0.0, 0.9]), rel=1e-12)
    assert high.tolist() == pytest.approx(percentiles(values, [0.1, 1.0]), rel=1e-12)
    assert math.prod(search.init) == 128


def test_algorithm_1_keeps_the_best_and_shrinks_the_intervals() -> None:
    """Lines 4-7: each candidate set is the printed one. A parent's known loss is not computed again."""
    calls = []

    def loss(points: Tensor) -> Tensor:
        calls.append(points.clone())
        return rippled(points)

    best, least = fpcs(loss, *CORNERS, init=SIZES, parents=KEEP, steps=STEPS)
    sets = printed_sets(LOW, HIGH, ripple)
    assert [len(points) for points in calls] == [128] * (STEPS + 1)
    scored: set[tuple[float, float]] = set()
    for points, printed in zip(calls, sets, strict=True):
        new = distinct(points.tolist())
        scored |= set(new)
        assert set(new) <= set(distinct(printed)) <= scored
    printed_losses = rippled(torch.tensor(sets[-1], dtype=torch.float64))
    assert float(least) == pytest.approx(float(printed_losses.min()), abs=1e-12)
    assert best.tolist() == pytest.approx(sets[-1][int(printed_losses.argmin())], abs=1e-9)


def test_algorithm_1_is_never_worse_than_an_earlier_step() -> None:
    losses = [float(fpcs(rippled, *CORNERS, init=(4, 4), parents=3, steps=steps)[1]) for steps in range(7)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("width", [3, 40], ids=["few outputs", "many outputs"])
def test_sec_3_4_objective_is_the_output_error(width: int) -> None:
    """The loss of a candidate is the squared error between the quantized and the full-precision output."""
    x, weight = normal(9, 12, seed=1), normal(width, 12, seed=2)
    weight_hat = (weight * 4).round() / 4
    steps = torch.tensor([[0.05], [0.3], [1.0]], dtype=torch.float64)

    def candidates(points: Tensor) -> Tensor:
        return torch.round(x / points[..., None]) * points[..., None]

    loss = ProductError.of(x, weight.T, weight_hat.T).loss(candidates, steps)
    for got, (step,) in zip(loss.tolist(), steps.tolist(), strict=True):
        total = 0.0
        for row in x.tolist():
            for w, w_hat in zip(weight.tolist(), weight_hat.tolist(), strict=True):
                quantized = sum(round(v / step) * step * u for v, u in zip(row, w_hat, strict=True))
                total += (quantized - sum(map(mul, row, w))) ** 2
        assert got == pytest.approx(total, rel=1e-10)


# --- the method `adalog-paper`: the text taken literally ----------------------------------------------------


PAPER = replace(Config.preset("w4a4", "adalog-paper"), images=4)


def by_bounds(x: Tensor, point: Sequence[float], bits: int) -> Tensor:
    """Asymmetric uniform between two bounds, of which the lower is at most and the upper at least zero."""
    lower, upper = min(point[0], 0.0), max(point[1], 0.0)
    s = (upper - lower) / (2**bits - 1)
    return uniform(x, (s, round(-lower / s)), bits)


def by_logarithm(x: Tensor, point: Sequence[float], bits: int) -> Tensor:
    """Eqs. 5-9 with log2 q and s as they are searched, Eqs. 13-14 with the offset 0.17; codes saturate."""
    q, s = round(2 ** point[0]), point[1]
    k = (-((x + 0.17) / s).log2() * R / q).round().clamp(0, 2**bits - 1).long()
    levels = [round(2.0 ** -((i * q) % R / R) * 2 * (2**bits - 1)) * 2.0 ** -(i * q // R) for i in range(2**bits)]
    return s * torch.tensor(levels, dtype=torch.float64)[k] / (2 * (2**bits - 1)) - 0.17


def bounds_of(x: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The corners of Algorithm 1's box, lines 1-2."""
    lowest, low, high, highest = percentiles(x, (0.0, 0.1, 0.9, 1.0))
    return (lowest, high), (low, highest)


@pytest.mark.slow
def test_paper_literally_after_gelu() -> None:
    """A linear: the activation by its own error, then the weight's rows, the activation, the rows by the output's."""
    search = PAPER.search
    assert isinstance(search, Search)
    assert (search.strategy, math.prod(search.init), search.steps, search.rough_rows) == ("fpcs", 128, 4, 0)
    assert (PAPER.beyond, PAPER.rounding, PAPER.offset) == ("saturate", "log", 0.17)
    x, weight = gelu(normal(40, 6, seed=3) * 2), normal(3, 6, seed=4)
    exact = x @ weight.T
    s_low, s_high = percentiles(x + 0.17, (0.9, 1.0))
    box = (0.0, s_low), (math.log2(137), s_high)
    Rows = list[tuple[float, ...]]

    def rows_for(x_hat: Tensor, incumbents: Rows | None = None) -> Rows:
        points = []
        for index, row in enumerate(weight):

            def loss(point: Sequence[float], row: Tensor = row) -> float:
                return square(x_hat @ by_bounds(row, point, 4) - x @ row)

            best = printed_algorithm(*bounds_of(row), loss)
            points.append(best if incumbents is None else min(incumbents[index], best, key=loss))
        return points

    def hat_of(points: Rows) -> Tensor:
        return torch.stack([by_bounds(row, point, 4) for row, point in zip(weight, points, strict=True)])

    first = printed_algorithm(*box, lambda point: square(by_logarithm(x, point, 4) - x))
    rows = rows_for(by_logarithm(x, first, 4))

    def loss(point: Sequence[float]) -> float:
        return square(by_logarithm(x, point, 4) @ hat_of(rows).T - exact)

    first = min(first, printed_algorithm(*box, loss), key=loss)
    x_hat = by_logarithm(x, first, 4)
    rows = rows_for(x_hat, rows)

    left = Operand(x, power_law_format("adalog", 4, PAPER, 0.17))
    right = Operand(weight, UniformFormat(4, own_dims=(0,)))
    found = search.search_product(Product("linear", left, right))
    assert isinstance(found.left, LogQuantizer)
    assert found.right is not None
    assert found.left.q == round(2 ** first[0])
    assert float(found.left.scale) == pytest.approx(first[1], rel=1e-9)
    torch.testing.assert_close(found.left.fake_quantize(x), x_hat, rtol=0, atol=1e-9)
    torch.testing.assert_close(found.right.fake_quantize(weight), hat_of(rows), rtol=0, atol=1e-9)


@pytest.mark.slow
def test_paper_literally_layer_wise(calibration: Calibration) -> None:
    """Queries, keys and values have one scale and zero point each, from both bounds refined."""
    assert PAPER.per_head is False
    for searched in calibration.search(replace(PAPER, search=Search(steps=1, reach=0.1))):
        if searched.group.first.role in ("qk", "av"):
            quantizers = searched.assignment.left, searched.assignment.right
            assert [quantizer.scale.numel() for quantizer in quantizers if quantizer is not None] == [1, 1]

    q, k = normal(2, 2, 5, 4, seed=5), normal(2, 2, 5, 4, seed=6) * 0.3 + 0.1
    exact = q @ k.mT
    first = printed_algorithm(*bounds_of(q), lambda point: square(by_bounds(q, point, 3) - q))

    def right_loss(point: Sequence[float]) -> float:
        return square(by_bounds(q, first, 3) @ by_bounds(k, point, 3).mT - exact)

    def left_loss(point: Sequence[float]) -> float:
        return square(by_bounds(q, point, 3) @ by_bounds(k, second, 3).mT - exact)

    second = printed_algorithm(*bounds_of(k), right_loss)
    first = min(first, printed_algorithm(*bounds_of(q), left_loss), key=left_loss)
    second = min(second, printed_algorithm(*bounds_of(k), right_loss), key=right_loss)
    assert isinstance(PAPER.search, Search)
    found = PAPER.search.search_product(Product("qk", Operand(q, UniformFormat(3)), Operand(k, UniformFormat(3))))
    for quantizer, values, point in ((found.left, q, first), (found.right, k, second)):
        assert quantizer is not None
        torch.testing.assert_close(quantizer.fake_quantize(values), by_bounds(values, point, 3), rtol=0, atol=1e-9)


def test_quantized_levels_follow_the_tables() -> None:
    """Eqs. 5-9 together: what comes back is s s_table U 2^-A of the printed code."""
    x, bits, q, scale = post_softmax(), 4, 20, 0.8
    value = log_fake_quantize(x, f64(scale), q, R, bits)
    for got, source in zip(value.tolist(), x.tolist(), strict=True):
        code = printed_code(source, scale, q / R, bits)
        if code is not None:
            mantissa = round(2.0 ** -(((q * code) % R) / R) * 30)
            assert got == pytest.approx(scale * mantissa / 30 / 2 ** (q * code // R), rel=1e-14)
