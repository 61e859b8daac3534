"""The integers: both executors and whole numbers of Python's own give the same accumulators from the same codes."""

import itertools
import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adalog import Config, Search
from adalog.config import power_law_format
from adalog.quantizers import LogQuantizer, UniformFormat, UniformQuantizer, integer_levels, log_levels, most_headroom
from adalog.runtime import integer, reference
from adalog.runtime.integer import products
from adalog.search.operand import Operand
from adalog.search.product import Product
from adalog.search.tables import with_table
from strategies import bits, normal, q, seeds
from whole_numbers import (
    EXECUTORS,
    LOGS,
    accumulated,
    codes_of,
    computed_product,
    convolved,
    left_quantizer,
    model_of,
    multiplied,
    site_of,
    stored_product,
    uniform,
    whole,
    written_out,
)

MAKERS = (reference.CodeEncoder, reference.CodeProduct), (integer.DigitEncoder, integer.product)

# --- tables ----------------------------------------------------------------------------------------------------------


@given(bits, q, st.sampled_from([8, 16]), st.sampled_from(list(LOGS)), st.integers(0, 15))
def test_tables_are_the_formula(width_of_code, base, width, kind, room):
    fixed, r, table = LOGS[kind]
    most = most_headroom(width_of_code, width, table=table)
    if most < 0:
        assert (width_of_code, width, table) == (8, 8, True)
        return
    headroom = min(room, most)
    found = integer_levels(fixed or base, r, width_of_code, headroom, table=table).tolist()
    assert found == written_out(fixed or base, r, width_of_code, headroom, table)
    assert max(found) < 2**width
    assert all(upper >= lower for upper, lower in itertools.pairwise(found))


@pytest.mark.parametrize(("width", "worst"), [(8, 0.5), (16, 0.001)])
def test_the_most_headroom_comes_close_to_the_levels(width, worst):
    """Each level of at least the unit's hundredfold is off by at most one unit."""
    for base in (5, 17, 37):
        exact = log_levels(base, 37, 4, beyond="saturate")
        found = log_levels(base, 37, 4, beyond="saturate", headroom=most_headroom(4, width))
        assert bool((found <= exact).all())
        assert (exact - found).max() <= 1 / (30 << most_headroom(4, width))
        assert ((exact - found)[:4] / exact[:4]).max() < worst


def test_zero_coded_tables_end_in_zero():
    quantizer = LogQuantizer(torch.tensor(1.0), 17, 37, 4, width=8, headroom=3)
    assert quantizer.table_integers()[-1] == 0
    saturating = replace(quantizer, beyond="saturate")
    assert saturating.table_integers()[-1] > 0
    code = torch.arange(16)
    for each in (quantizer, saturating):
        assert torch.equal(each.dequantize(code), (each.table_integers() * each.unit).float())


@given(bits, q, seeds, st.sampled_from([8, 16]), st.sampled_from(["saturate", "zero-coded"]))
def test_fake_quantization_is_the_table_that_runs(width_of_code, base, seed, width, beyond):
    most = most_headroom(width_of_code, width)
    if most < 0:
        return
    quantizer = LogQuantizer(torch.tensor(0.7), base, 37, width_of_code, beyond, width=width, headroom=most)
    x = normal(64, seed=seed).abs().float()
    levels = quantizer.table_integers().double() * quantizer.unit
    nearest = (x.double()[:, None] - levels).abs().min(dim=1).values
    found = quantizer.fake_quantize(x).double()
    assert torch.allclose((found - x).abs(), nearest, atol=1e-6)
    assert torch.allclose((found[:, None] - levels).abs().min(dim=1).values, torch.zeros(64).double(), atol=1e-7)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"width": 8, "headroom": 4}, "headroom from 0 to 3"),
        ({"width": 12, "headroom": 0}, "one of 8, 16"),
        ({"width": 8, "headroom": 0, "beyond": "zero"}, "one value more than the .* entries of an integer table"),
        ({"width": 8, "headroom": 0, "bits": 8}, "headroom from 0 to -1"),
    ],
)
def test_tables_that_cannot_be(fields, match):
    with pytest.raises(ValueError, match=match):
        LogQuantizer(**{"scale": torch.tensor(1.0), "q": 17, "r": 37, "bits": 4, **fields})


# --- accumulators ----------------------------------------------------------------------------------------------------


def check_accumulators(model, left, right=None):
    """Both executors' from these codes, and their outputs beside the fake-quantized model's."""
    site = site_of(model)
    expected = exact_sums(site, left, right)
    for makers in MAKERS:
        found = accumulated(site, *makers, left, right)
        assert len(found) == len(expected) == len(site.scales)
        for sums, wanted, bound in zip(found, expected, site.bounds, strict=True):
            assert sums.dtype == torch.int64
            assert sums.reshape(-1).tolist() == wanted.reshape(-1).tolist()
            assert max(map(abs, wanted.reshape(-1).tolist()), default=0) <= bound
    inputs = [site.left.dequantize(left)]
    if site.weight is None:
        inputs.append(site.right.dequantize(right))
    fake = model(*inputs)
    for name in EXECUTORS:
        output = model.compile(name)(*inputs)
        assert output.shape == fake.shape
        assert torch.allclose(output, fake, rtol=1e-4, atol=1e-5 * float(fake.abs().max() + 1))


def exact_sums(site, left, right):
    """The sums of a site for each part of the left operand, in Python's own whole numbers."""
    (other,) = whole(site.right, right if site.weight is None else site.weight)
    parts = whole(site.left, left)
    if site.geometry is None:
        return [multiplied(part, other if site.weight is None else other.T) for part in parts]
    sums = [convolved(part, other, *site.geometry) for part in parts]
    # as they are summed: (B, groups, L, O / groups)
    return [
        images.reshape(len(left), site.groups, len(other) // site.groups, -1).transpose(0, 1, 3, 2) for images in sums
    ]


kinds = st.sampled_from(["uniform", "twin", *LOGS])
tables = st.sampled_from([8, 16])
extremes = st.sampled_from([0, 0, 1, 2])


def linear(kind, widths, table, sizes, extreme, seed):
    batch, outputs, terms = sizes
    shapes = (batch, 3, terms), (outputs, terms)
    model, codes, _ = stored_product(torch.Generator().manual_seed(seed), kind, widths, table, *shapes, extreme)
    check_accumulators(model, codes)


def attention(kind, widths, table, sizes, per_head, extreme, seed):
    batch, rows, terms, columns = sizes
    sizes = (batch, 2, rows, terms), columns, extreme, per_head
    check_accumulators(*computed_product(torch.Generator().manual_seed(seed), kind, widths, table, *sizes))


def convolution(kind, widths, table, sizes, geometry, plain, extreme, seed):
    """Padded ones too, whose places are zero whatever code that would be, and offsets that no bias can absorb."""
    batch, groups, each, outputs = sizes  # of channels, each group sees `each` and puts out `outputs`
    stride, padding, dilation, own_offset = geometry
    own = (groups, 1, 1) if kind == "uniform" and each == 1 else ()
    pairs, offset = ((stride, 1), (padding, 0), (dilation, 1)), 0.17 if own_offset and kind in LOGS else 0.0
    shapes = (batch, groups * each, 5, 4), (outputs * groups, each, 2, 2)
    model, codes, _ = stored_product(
        torch.Generator().manual_seed(seed), kind, widths, table, *shapes, extreme, own, (*pairs, groups), offset
    )
    with mock.patch.object(products, "_SUMS_PLAINLY", plain and products._SUMS_PLAINLY):
        check_accumulators(model, codes)


few = st.integers(1, 3)
geometries = st.tuples(st.integers(1, 2), st.integers(0, 2), st.integers(1, 2), st.booleans())
PRODUCTS = {
    linear: [st.tuples(st.integers(1, 9), st.integers(1, 5), st.integers(1, 9))],
    attention: [st.tuples(*[st.integers(1, 5)] * 4), st.booleans()],
    convolution: [st.tuples(few, few, few, few), geometries, st.booleans()],
}


@pytest.mark.slow
@pytest.mark.parametrize("product", PRODUCTS)
def test_accumulators(product):
    given(kinds, st.tuples(bits, bits), tables, *PRODUCTS[product], extremes, seeds)(product)()


@given(kinds, bits, tables, seeds, st.sampled_from([(3, 5, 7), (1, 9, 4), (2, 2, 3, 4)]), st.booleans())
def test_codes_are_the_quantizers_own(kind, width, table, seed, shape, transposed):
    """The torch executor finds digits from values directly: those of the codes, on ties, ends and far beyond too."""
    generator = torch.Generator().manual_seed(seed)
    quantizer = left_quantizer(generator, kind, width, table, ())
    codes = torch.arange(2**width)
    values = quantizer.dequantize(codes).float()
    ties = (values[1:] + values[:-1]) / 2
    some = torch.cat([values, ties, torch.tensor([0.0, -0.0, -1.0, 1e30, -1e30, 1e-30]), normal(99, seed=seed).float()])
    x = some[torch.randint(len(some), shape, generator=generator)]
    x = x.transpose(0, -1) if transposed else x
    right = uniform(generator, 4, 1, 1)
    stored = torch.zeros(1, x.shape[-1], dtype=torch.uint8)
    for op, weight in (("aten.linear.default", stored), ("aten.matmul.default", None)):
        other = None if weight is not None else (1, *x.shape[1:-2], x.shape[-1], 1)[-x.ndim :]
        encoder = integer.DigitEncoder(quantizer, site_of(model_of(op, quantizer, right, x.shape, other, weight)))
        wanted = encoder.lift(quantizer.quantize(x))
        assert all(map(torch.equal, encoder(x), wanted))


@pytest.mark.parametrize(("terms", "width", "accumulators"), [(4000, 4, 32), (4000, 8, 64)])
def test_large_sums(terms, width, accumulators):
    """Every code at its largest, sixteen bits by up to eight: beyond 2**24, and beyond 2**31."""
    left = LogQuantizer(torch.tensor(1.0), 1, 1, width, "saturate", table=False, width=16, headroom=15)
    right = UniformQuantizer(torch.ones(2, 1), torch.zeros(2, 1), width)
    codes = torch.zeros(2, 1, terms, dtype=torch.uint8)
    weight = torch.full((2, terms), 2**width - 1, dtype=torch.uint8)
    model = model_of("aten.linear.default", left, right, codes.shape, None, weight)
    assert (site_of(model).bits, site_of(model).bounds) == (accumulators, (terms * 2**15 * (2**width - 1),))
    check_accumulators(model, codes)


@pytest.mark.parametrize("zero_point", [300, -300, 70_000])
@pytest.mark.parametrize(
    ("op", "shape", "other", "geometry"),
    [
        ("aten.linear.default", (2, 3, 5), (6, 5), ()),
        ("aten.matmul.default", (2, 3, 5), (2, 5, 4), ()),
        ("aten.conv2d.default", (2, 4, 5, 4), (4, 2, 2, 2), ((1, 1), (1, 0), (1, 1), 2)),
    ],
)
def test_zero_points_far_from_the_codes(op, shape, other, geometry, zero_point):
    """Values that are all far from zero have such zero points: their integers do not fit in a byte."""
    generator = torch.Generator().manual_seed(0)
    left = UniformQuantizer(torch.tensor(0.5), torch.tensor(float(zero_point)), 4)
    codes, others = codes_of(generator, 4, shape, 0), codes_of(generator, 4, other, 0)
    if op == "aten.matmul.default":
        right = UniformQuantizer(torch.tensor(0.25), torch.tensor(-float(zero_point)), 4)
        check_accumulators(model_of(op, left, right, shape, other), codes, others)
    else:
        right = uniform(generator, 4, other[0], *[1] * (len(other) - 1))
        check_accumulators(model_of(op, left, right, shape, None, others, geometry), codes)


# --- the choice of a table -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["adalog", "log2"])
@pytest.mark.parametrize("width", [4, *(pytest.param(width, marks=pytest.mark.slow) for width in (3, 6, 8))])
def test_eight_bits_where_they_cost_little(width, kind):
    config = Config(activation_bits=width)
    probabilities = (normal(2, 1, 40, 40, seed=width) * 3).softmax(-1).float()
    left = Operand(probabilities, power_law_format(kind, width, config, 0.0))
    product = Product("av", left, Operand(normal(2, 1, 8, 40, seed=1).float(), UniformFormat(width)))
    plain = Search(rounds=1, steps=1).search_product(product)
    chosen = with_table(product, plain, "calibrated")
    ratios = {}
    for tables, bits_of_table in (("u8", 8), ("u16", 16)):
        if most_headroom(width, bits_of_table, table=plain.left.table) < 0:
            with pytest.raises(ValueError, match="mantissas of 9 bits do not fit in 8 bits: choose 'u16'"):
                with_table(product, plain, tables)
            continue
        forced = with_table(product, plain, tables)
        assert forced.left.width == bits_of_table
        noise = [product.output_power(found.left, found.right)[1] for found in (forced, plain)]
        ratios[bits_of_table] = noise[0] / noise[1]
    assert ratios[16] < 1.02
    assert chosen.left.width == (8 if ratios.get(8, math.inf) <= 1.03 else 16)
    assert with_table(product, plain, "float") is plain


def test_headrooms_leave_accumulators_in_32_bits():
    width, terms = 7, 6000
    left = Operand(normal(64, terms).abs().float(), power_law_format("log2", width, Config(), 0.0))
    right = Operand(normal(8, terms, seed=1).float(), UniformFormat(8, own_dims=(0,)))
    product = Product("linear", left, right)
    found = with_table(product, Search(rounds=1, steps=0).search_product(product), "u16").left
    assert terms * 255 * int(found.table_integers().max()) < 2**31
    assert found.headroom < most_headroom(width, 16, table=False)
