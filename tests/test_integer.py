"""The integers: both executors and whole numbers of Python's own give the same accumulators from the same codes."""

import itertools
import json
import math
import shutil
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from adalog import ArtifactError, Calibration, Config, ProgramError, QuantizedModel, Search, library
from adalog.choices import ReleasedSearch, ScaleSearch
from adalog.graph.operations import FAKE_QUANTIZE
from adalog.graph.program import Node, Program, Ref
from adalog.quantized import QuantizedProgram
from adalog.quantizers import (
    LogQuantizer,
    QuantizedTensor,
    TwinUniformQuantizer,
    UniformQuantizer,
    integer_levels,
    log_levels,
    most_headroom,
)
from adalog.runtime import EXECUTORS as ALL
from adalog.runtime import Compiled, integer, reference, regions
from adalog.runtime.integer import memory, products
from adalog.runtime.reference import ENCODE, PRODUCT
from adalog.runtime.regions import REGION, SUMS
from adalog.runtime.vectors import vectors
from adalog.search.bounds import search_product
from adalog.search.operand import Format, Operand
from adalog.search.product import Product, with_table
from stored import deserialise, serialise
from strategies import bits, normal, q, seeds

MAKERS = (reference.Encoder, reference.Product), (integer.Encoder, integer.product)
PORTABLE = ("reference", "torch")
EXECUTORS = [name for name in ALL if name in PORTABLE or library.levels()]  # native: see test_native.py too
LOGS = {"log2": (1, 1, False), "log-sqrt2": (1, 2, False), "adalog": (0, 37, True)}

# --- tables ----------------------------------------------------------------------------------------------------------


def written_out(base, r, width_of_code, headroom, table):
    """Eq. 10's folded table in Python's whole numbers; without mantissas the nearest to an exact power."""
    rows = []
    for code in range(2**width_of_code):
        shift, rest = divmod(code * base, r)
        if table:
            mantissa = round(2 ** (-rest / r) * 2 * (2**width_of_code - 1))
            rows.append((mantissa << headroom) >> shift)
        else:
            rows.append(round(2 ** (headroom - code * base / r)))
    return rows


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
        ({"width": 8, "headroom": 0, "beyond": "zero"}, "more than a table of integers has codes for"),
        ({"width": 8, "headroom": 0, "bits": 8}, "headroom from 0 to -1"),
    ],
)
def test_tables_that_cannot_be(fields, match):
    with pytest.raises(ValueError, match=match):
        LogQuantizer(**{"scale": torch.tensor(1.0), "q": 17, "r": 37, "bits": 4, **fields})


# --- accumulators ----------------------------------------------------------------------------------------------------


def uniform(generator, width, *shape):
    zero_point = torch.randint(2**width, shape, generator=generator).float()
    return UniformQuantizer(torch.rand(shape, generator=generator) + 0.1, zero_point, width)


def left_quantizer(generator, kind, width, width_of_table, shape, offset=0.0):
    scale = torch.rand((), generator=generator) + 0.1
    if kind == "uniform":
        return uniform(generator, width, *shape)
    if kind == "twin":
        return TwinUniformQuantizer(scale, scale * 0.3, width)
    fixed, r, table = LOGS[kind]
    base = fixed or int(torch.randint(1, 60, (), generator=generator))
    if most_headroom(width, width_of_table, table=table) < 0:
        width_of_table = 16
    most = most_headroom(width, width_of_table, table=table)
    headroom = int(torch.randint(most + 1, (), generator=generator))
    beyond = "saturate" if base % 2 else "zero-coded"
    return LogQuantizer(
        scale, base, r, width, beyond, table=table, width=width_of_table, headroom=headroom, offset=offset
    )


def meanings(quantizer, code, place):
    """What one code stands for, an integer a part, by the definitions and nothing of the package's."""
    if isinstance(quantizer, UniformQuantizer):
        return [code - int(quantizer.zero_point.expand(place[0])[place[1]])]
    if isinstance(quantizer, TwinUniformQuantizer):
        signed = code - 2 ** (quantizer.bits - 1)
        return [max(signed, 0), min(signed, 0)]
    last = 2**quantizer.bits - 1
    table = written_out(quantizer.q, quantizer.r, quantizer.bits, quantizer.headroom, quantizer.table)
    value = 0 if code == last and quantizer.beyond == "zero-coded" else table[code]
    return [value, *([1] if quantizer.offset and not quantizer.keeps_offset else [])]


def whole(quantizer, codes):
    """The integers of a tensor of codes, an object array a part: Python's own whole numbers."""
    places = list(np.ndindex(*codes.shape))
    rows = [meanings(quantizer, int(codes[place]), (codes.shape, place)) for place in places]
    parts = [np.empty(len(places), dtype=object) for _ in rows[0]]
    for i, row in enumerate(rows):
        for part, value in zip(parts, row, strict=True):
            part[i] = value
    return [part.reshape(codes.shape) for part in parts]


def multiplied(left, right):
    """left @ right over the last dimensions, in Python's own whole numbers, batches broadcast."""
    lead = np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    left = np.broadcast_to(left, (*lead, *left.shape[-2:]))
    right = np.broadcast_to(right, (*lead, *right.shape[-2:]))
    result = np.empty((*lead, left.shape[-2], right.shape[-1]), dtype=object)
    for index in np.ndindex(*result.shape):
        *batch, i, j = index
        result[index] = sum(x * y for x, y in zip(left[(*batch, i)], right[(*batch, slice(None), j)], strict=True))
    return result


def convolved(image, weight, stride, padding, dilation, groups):
    """(B, C, H, W) and (O, C / groups, kh, kw) -> (B, O, H', W'), one product after the other; padding is nothing."""
    batch, channels, height, width = image.shape
    outputs, each, kh, kw = weight.shape
    size = [
        (full + 2 * pad - gap * (taps - 1) - 1) // step + 1
        for full, pad, gap, taps, step in zip((height, width), padding, dilation, (kh, kw), stride, strict=True)
    ]
    result = np.zeros((batch, outputs, *size), dtype=object)
    for b, o, y, x in np.ndindex(*result.shape):
        for c, i, j in np.ndindex(each, kh, kw):
            row = y * stride[0] - padding[0] + i * dilation[0]
            column = x * stride[1] - padding[1] + j * dilation[1]
            if 0 <= row < height and 0 <= column < width:
                channel = (o // (outputs // groups)) * each + c
                result[b, o, y, x] += image[b, channel, row, column] * weight[o, c, i, j]
    assert channels == each * groups
    return result


def model_of(op, left, right, shape, other, weight=None, arguments=()):
    """One product of two quantized operands. other: the shape of a right operand that is no weight."""
    nodes = [Node("l", FAKE_QUANTIZE, (Ref("x"), "l"))]
    tensors, weights, quantizers, inputs = {}, {}, {"l": left}, ["x"]
    example = [torch.empty((0, *shape[1:]))]
    if weight is None:
        nodes.append(Node("r", FAKE_QUANTIZE, (Ref("y"), "r")))
        quantizers["r"] = right
        inputs.append("y")
        example.append(torch.empty((0, *other[1:])))
        nodes.append(Node("out", op, (Ref("l"), Ref("r"))))
    else:
        weights["w"] = QuantizedTensor(weight, right)
        tensors["w"] = weights["w"].dequantize()
        tensors["b"] = torch.linspace(-1, 1, len(weight))
        nodes.append(Node("out", op, (Ref("l"), Ref("w"), Ref("b"), *arguments)))
    program = Program(tuple(inputs), tuple(nodes), Ref("out"), tensors, quantizers, weights)
    return QuantizedModel(QuantizedProgram(program, Config(), (), {}, example=example))


def codes_of(generator, width, shape, extreme):
    if extreme:
        return torch.full(shape, (2**width - 1) * (extreme - 1), dtype=torch.uint8)
    return torch.randint(2**width, shape, generator=generator, dtype=torch.uint8)


def check_accumulators(model, left, right, expected):
    """Both executors' from these codes, and their outputs beside the fake-quantized model's."""
    (site,) = reference.plan(model.program, model.example)
    for encoder, product in MAKERS:
        lifted = [encoder(site.left, site).lift(left)]
        if site.weight is None:
            lifted.append(encoder(site.right, site).lift(right))
        found = product(site).accumulate(*lifted)
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


kinds = st.sampled_from(["uniform", "twin", *LOGS])
tables = st.sampled_from([8, 16])
extremes = st.sampled_from([0, 0, 1, 2])


def linear(kind, width, weight_width, table, sizes, extreme, seed):
    generator = torch.Generator().manual_seed(seed)
    batch, outputs, terms = sizes
    left = left_quantizer(generator, kind, width, table, ())
    right = uniform(generator, weight_width, outputs, 1)
    codes = codes_of(generator, width, (batch, 3, terms), extreme)
    weight = codes_of(generator, weight_width, (outputs, terms), extreme)
    model = model_of("aten.linear.default", left, right, codes.shape, None, weight)
    (other,) = whole(right, weight)
    check_accumulators(model, codes, None, [multiplied(part, other.T) for part in whole(left, codes)])


def attention(kind, width, other_width, table, sizes, per_head, extreme, seed):
    generator = torch.Generator().manual_seed(seed)
    batch, rows, terms, columns = sizes
    heads = 2
    shape = (heads, 1, 1) if per_head else ()
    left = left_quantizer(generator, kind, width, table, shape)
    right = uniform(generator, other_width, *shape)
    codes = codes_of(generator, width, (batch, heads, rows, terms), extreme)
    others = codes_of(generator, other_width, (batch, heads, terms, columns), extreme)
    model = model_of("aten.matmul.default", left, right, codes.shape, others.shape)
    (wanted,) = whole(right, others)
    check_accumulators(model, codes, others, [multiplied(part, wanted) for part in whole(left, codes)])


def convolution(kind, widths, sizes, geometry, plain, extreme, seed):
    """Padded ones too, whose places are zero whatever code that would be, and offsets that no bias can absorb."""
    generator = torch.Generator().manual_seed(seed)
    width, weight_width, table = widths
    batch, groups, each, outputs = sizes  # of channels, each group sees `each` and puts out `outputs`
    stride, padding, dilation, own_offset = geometry
    shape = (groups, 1, 1) if kind == "uniform" and each == 1 else ()
    left = left_quantizer(generator, kind, width, table, shape, 0.17 if own_offset and kind in LOGS else 0.0)
    right = uniform(generator, weight_width, outputs * groups, 1, 1, 1)
    codes = codes_of(generator, width, (batch, groups * each, 5, 4), extreme)
    weight = codes_of(generator, weight_width, (outputs * groups, each, 2, 2), extreme)
    pairs = (stride, 1), (padding, 0), (dilation, 1)
    model = model_of("aten.conv2d.default", left, right, codes.shape, None, weight, (*pairs, groups))
    (other,) = whole(right, weight)
    expected = [convolved(part, other, *pairs, groups) for part in whole(left, codes)]
    # as they are summed: (B, groups, L, O / groups)
    ordered = [sums.reshape(batch, groups, outputs, -1).transpose(0, 1, 3, 2) for sums in expected]
    with mock.patch.object(products, "_SUMS_PLAINLY", plain and products._SUMS_PLAINLY):
        check_accumulators(model, codes, None, ordered)


few = st.integers(1, 3)
geometries = st.tuples(st.integers(1, 2), st.integers(0, 2), st.integers(1, 2), st.booleans())
PRODUCTS = {
    linear: (kinds, bits, bits, tables, st.tuples(st.integers(1, 9), st.integers(1, 5), st.integers(1, 9))),
    attention: (kinds, bits, bits, tables, st.tuples(*[st.integers(1, 5)] * 4), st.booleans()),
    convolution: (kinds, st.tuples(bits, bits, tables), st.tuples(few, few, few, few), geometries, st.booleans()),
}


@pytest.mark.slow
@pytest.mark.parametrize("examples", [15, pytest.param(80, marks=pytest.mark.slow)])
@pytest.mark.parametrize("product", PRODUCTS)
def test_accumulators(product, examples):
    settings(max_examples=examples)(given(*PRODUCTS[product], extremes, seeds)(product))()


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
        model = model_of(op, quantizer, right, x.shape, other, weight)
        (site,) = reference.plan(model.program, model.example)
        encoder = integer.Encoder(quantizer, site)
        wanted = encoder.lift(quantizer.quantize(x))
        assert all(map(torch.equal, encoder(x), wanted))
        if encoder.pure is not None:  # what torch.compile is given
            found = encoder.pure.function(*encoder.pure.choices, x, *encoder.pure.tensors)
            assert len(found) == len(wanted)
            assert all(torch.equal(each.to(other.dtype), other) for each, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize(("terms", "width", "accumulators"), [(4000, 4, 32), (4000, 8, 64)])
def test_large_sums(terms, width, accumulators):
    """Every code at its largest, sixteen bits by up to eight: beyond 2**24, and beyond 2**31."""
    left = LogQuantizer(torch.tensor(1.0), 1, 1, width, "saturate", table=False, width=16, headroom=15)
    right = UniformQuantizer(torch.ones(2, 1), torch.zeros(2, 1), width)
    codes = torch.zeros(2, 1, terms, dtype=torch.uint8)
    weight = torch.full((2, terms), 2**width - 1, dtype=torch.uint8)
    model = model_of("aten.linear.default", left, right, codes.shape, None, weight)
    (site,) = reference.plan(model.program, model.example)
    assert site.bits == accumulators
    wanted = np.full((2, 1, 2), terms * 2**15 * (2**width - 1), dtype=object)
    check_accumulators(model, codes, None, [wanted])


@pytest.mark.parametrize("zero_point", [300, -300, 70_000])
@pytest.mark.parametrize("op", ["aten.linear.default", "aten.matmul.default", "aten.conv2d.default"])
def test_zero_points_far_from_the_codes(op, zero_point):
    """Values that are all far from zero have such zero points: their integers do not fit in a byte."""
    generator = torch.Generator().manual_seed(0)
    left = UniformQuantizer(torch.tensor(0.5), torch.tensor(float(zero_point)), 4)
    shapes = {"aten.linear.default": (2, 3, 5), "aten.matmul.default": (2, 3, 5), "aten.conv2d.default": (2, 4, 5, 4)}
    codes = codes_of(generator, 4, shapes[op], 0)
    (whole_left,) = whole(left, codes)
    if op == "aten.matmul.default":
        right = UniformQuantizer(torch.tensor(0.25), torch.tensor(-float(zero_point)), 4)
        others = codes_of(generator, 4, (2, 5, 4), 0)
        model = model_of(op, left, right, codes.shape, others.shape)
        check_accumulators(model, codes, others, [multiplied(whole_left, *whole(right, others))])
        return
    right = uniform(generator, 4, 6, 1) if op == "aten.linear.default" else uniform(generator, 4, 4, 1, 1, 1)
    weight = codes_of(generator, 4, (6, 5) if op == "aten.linear.default" else (4, 2, 2, 2), 0)
    (other,) = whole(right, weight)
    if op == "aten.linear.default":
        model = model_of(op, left, right, codes.shape, None, weight)
        check_accumulators(model, codes, None, [multiplied(whole_left, other.T)])
        return
    geometry = (1, 1), (1, 0), (1, 1), 2
    model = model_of(op, left, right, codes.shape, None, weight, geometry)
    sums = convolved(whole_left, other, *geometry).reshape(2, 2, 2, -1).transpose(0, 1, 3, 2)
    check_accumulators(model, codes, None, [sums])


# --- models ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=EXECUTORS)
def compiled(request, quantized):
    return quantized.compile(request.param)


def test_a_model_runs_in_integers(compiled, quantized, images):
    assert [*compiled.sites] == [row.site for row in quantized.ledger]
    fake, found = quantized(images), compiled(images)
    assert float((found - fake).norm() / fake.norm()) < 0.05  # where float noise moves values over thresholds
    assert torch.equal(found, compiled(images))


def test_executors_agree_on_every_site(quantized, images):
    first, second = (quantized.compile(name) for name in PORTABLE)
    for name in first.sites:
        one, other = first.trace(name, images), second.trace(name, images)
        same = [torch.eq(*codes) for codes in ((one.left, other.left), (one.right, other.right))]
        # Float noise before a site may move a value over a threshold, which random weights make more of.
        assert all(each.double().mean() > 0.9 for each in same)
        if all(bool(each.all()) for each in same):
            assert all(map(torch.equal, one.accumulators, other.accumulators))
            assert torch.allclose(one.output, other.output, rtol=1e-5, atol=1e-5)


def test_steps_in_one_change_nothing(quantized, images):
    model = quantized.compile("torch")
    program, steps = model._apart
    fused = model._fused[0]
    assert len(fused.nodes) < len(program.nodes)
    assert torch.equal(program.run([images], None, steps), model(images))


@pytest.fixture
def uncompiled(monkeypatch):
    """torch.compile that compiles nothing: what it is given, run as it is."""
    monkeypatch.setattr(torch, "compile", lambda module, **options: module)


def test_regions_change_nothing(uncompiled, quantized, images):
    model, plain = quantized.compile("torch"), quantized.compile("torch")
    model.compile()
    found = model(images)
    program, steps = model._regions
    assert len(program.nodes) < len(model._apart[0].nodes)
    assert {node.op for node in program.nodes if node.name in steps} <= {SUMS, REGION, ENCODE, PRODUCT}
    assert sum(isinstance(step, regions.Rowwise) for step in steps.values()) == 2  # an fc1 a block
    torch.testing.assert_close(found, plain(images), rtol=1e-4, atol=1e-5)
    for count in (3, 1, 0):
        torch.testing.assert_close(model(images[:count]), found[:count], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("zero_point", [0.0, 7.0])
@pytest.mark.parametrize("transposed", [False, True])
def test_large_products_of_bytes(zero_point, transposed):
    """One product after the other: extreme codes of 8 by 4 bits, signed ones too."""
    generator = torch.Generator().manual_seed(0)
    left = UniformQuantizer(torch.tensor(1.0), torch.tensor(zero_point and 128.0), 8)
    right = UniformQuantizer(torch.tensor(1.0), torch.tensor(zero_point), 4)
    model = model_of("aten.matmul.default", left, right, (2, 3, 130, 97), (2, 3, 97, 90))
    (site,) = reference.plan(model.program, model.example)
    sides = []
    for quantizer, shape in ((left, (2, 3, 130, 97)), (right, (2, 3, 97, 90))):
        codes = torch.randint(2**quantizer.bits, shape, generator=generator)
        codes[..., :40] = 2**quantizer.bits - 1
        values = quantizer.dequantize(codes)
        values = values.mT.contiguous().mT if transposed and quantizer is right else values
        pure = integer.Encoder(quantizer, site).pure
        sides.append(pure.function(*pure.choices, values, *pure.tensors))
    x, y = sides[0][0], sides[1][0]
    assert products.pays_as_bytes(x, y) == products.multiplies_bytes(x.device, x.dtype)
    sums = integer.product(site).opened[0](*sides)
    assert torch.equal(sums.double(), x.double() @ y.double())


@pytest.mark.slow
def test_regions_of_other_types(uncompiled, quantized, images):
    plain = deserialise(serialise(quantized))
    model = plain.compile("torch")
    model.compile()
    double = model.double()
    assert double._regions is not None
    torch.testing.assert_close(double(images.double()), plain.double()(images.double()), rtol=1e-9, atol=1e-9)


def test_without_a_compiler(monkeypatch, quantized, images):
    def refuse(*args):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", lambda module, **options: refuse)
    model = quantized.compile("torch")
    wanted = model(images)
    model.compile()
    assert torch.equal(model(images), wanted)
    assert model._regions is None
    reference_model = quantized.compile("reference")
    before = reference_model(images)
    reference_model.compile()  # does nothing
    assert torch.equal(reference_model(images), before)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own modules
def test_compiled_regions(quantized, images):
    """With what torch.compile makes of them; without a compiler the same as without."""
    model = quantized.compile("torch")
    wanted, zero = model(images), torch.tensor([1e-40])
    model.compile()
    for count in (4, 3, 1):
        torch.testing.assert_close(model(images[:count]), wanted[:count], rtol=1e-4, atol=1e-5)
    assert model._regions is not None or shutil.which("g++") is None
    assert float(zero * 1) > 0  # small numbers are still numbers
    assert torch.equal(model(images), model(images))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "method"),
    [
        pytest.param("w2a8", "log2", marks=pytest.mark.slow),
        pytest.param("w8a2s3", "log-sqrt2", marks=pytest.mark.slow),
        pytest.param("w8a8", "adalog", marks=pytest.mark.slow),
        pytest.param("w5a6", "uniform", marks=pytest.mark.slow),
        ("w4a32", "adalog"),
    ],
)
def test_other_choices(calibration, fast, images, name, method):
    model = calibration.quantize(replace(Config.preset(name, method), images=4, search=fast.search))
    fake = model(images)
    for executor in EXECUTORS:
        found = model.compile(executor)
        assert float((found(images) - fake).norm() / fake.norm()) < 0.05
        assert len(found.sites) == (1 if name == "w4a32" else len(model.ledger))  # the images have 8 bits


def test_twin_quantizers(calibration, fast, images):
    model = calibration.quantize(replace(fast, post_gelu="twin"))
    fake = model(images)
    for executor in EXECUTORS:
        assert float((model.compile(executor)(images) - fake).norm() / fake.norm()) < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adalog-paper", "adalog-released"])
def test_published_readings_keep_float_tables(calibration, images, name):
    preset = Config.preset("w4a4", name)
    short = ReleasedSearch(steps=1, rounds=1) if name == "adalog-released" else Search(rounds=1, steps=0)
    model = calibration.quantize(replace(preset, images=4, search=short))
    with pytest.raises(ArtifactError, match=r"site blocks\.0\.attn\.av has logarithmic codes with levels in float"):
        model.compile("torch")


@pytest.mark.slow
def test_other_codes_that_have_no_integers(calibration):
    split = replace(Config.preset("w4a4", "ptq4vit"), images=4, search=ScaleSearch(candidates=4, rounds=1))
    published = replace(Config.preset("w4a4", "repq-vit"), images=4)
    fractions = replace(published.search, round_zero_point=False)
    for config, message in (
        (split, "split uniform"),
        (published, "levels in float"),
        (replace(published, post_softmax="uniform", search=fractions), "zero point that is not a whole number"),
    ):
        with pytest.raises(ArtifactError, match=rf"site blocks\.0\.attn\.\w+ has .*{message}"):
            calibration.quantize(config).compile("reference")


@pytest.mark.parametrize(
    "name", ["minmax", *(pytest.param(name, marks=pytest.mark.slow) for name in ("apq-vit", "repq-vit"))]
)
def test_rivals_that_have_integers(calibration, images, name):
    """repq-vit: with tables, which it has not as published."""
    config = replace(Config.preset("w4a4", name), images=4)
    if name == "apq-vit":
        config = replace(config, search=ScaleSearch(candidates=4, rounds=1), stages=())
    if name == "repq-vit":
        config = replace(config, tables="calibrated", beyond="zero-coded")
    model = calibration.quantize(config)
    fake = model(images)
    for executor in EXECUTORS:
        assert float((model.compile(executor)(images) - fake).norm() / fake.norm()) < 0.05


def test_a_loaded_model_compiles_the_same(quantized, images):
    assert torch.equal(deserialise(serialise(quantized)).compile()(images), quantized.compile()(images))


@pytest.mark.slow
def test_models_of_other_types(quantized, images):
    double = deserialise(serialise(quantized)).double()
    fake = double(images.double())
    for executor in PORTABLE:
        found = double.compile(executor)(images.double())
        assert found.dtype == torch.float64
        assert float((found - fake).norm() / fake.norm()) < 1e-10
    with pytest.raises(ArtifactError, match=r"is in torch\.float16: convert"):
        deserialise(serialise(quantized)).half().compile()


@pytest.mark.slow
def test_windows_and_masks(fast):
    from timm.models import SwinTransformer

    torch.manual_seed(0)
    net = SwinTransformer(
        img_size=8, patch_size=2, embed_dim=8, depths=(2,), num_heads=(2,), window_size=2, num_classes=3
    )
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    model = Calibration(net.eval(), x).quantize(fast)
    fake = model(x)
    for executor in EXECUTORS:
        assert float((model.compile(executor)(x) - fake).norm() / fake.norm()) < 1e-4


@pytest.mark.slow
def test_convolutions_with_channels_last(fast, images):
    """Of 1 x 1 and depthwise ones, with GELU between: images lie alike in all executors, so that codes agree."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 12, 1), nn.GELU(), nn.Conv2d(12, 12, 3, 2, 1, groups=12), nn.GELU(), nn.Conv2d(12, 8, 1)
    model = Calibration(nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, 5)).eval(), images).quantize(fast)
    plain, torch_ints = model.compile("reference"), model.compile("torch")
    wanted = plain.codes(images)
    assert len(wanted) == 4
    assert all(torch.equal(codes, wanted[name]) for name, codes in torch_ints.codes(images).items())
    for executor in EXECUTORS:
        torch.testing.assert_close(model.compile(executor)(images), plain(images), rtol=1e-5, atol=1e-6)
    assert {site.geometry[3] for site in torch_ints.sites.values() if site.geometry} == {1, 12}


def test_refusals(quantized, images):
    with pytest.raises(ValueError, match="executor = 'fpga' is none of reference, torch, native"):
        quantized.compile("fpga")
    with pytest.raises(ValueError, match="threads, batch and level are of the executor 'native'"):
        quantized.compile("torch", threads=2)
    with pytest.raises(ValueError, match="site = 'nothing' is none of the"):
        quantized.compile().trace("nothing", images)
    with pytest.raises(ValueError, match="the model takes"):
        quantized.compile()(images[:, :1])
    bare = QuantizedModel(QuantizedProgram(quantized.program, quantized.config, tuple(quantized.ledger), {}))
    with pytest.raises(ArtifactError, match="made without images"):
        bare.compile()


def test_scales_that_differ_within_a_sum():
    left = UniformQuantizer(torch.rand(5) + 0.1, torch.zeros(5), 4)
    right = UniformQuantizer(torch.ones(2, 1), torch.zeros(2, 1), 4)
    weight = torch.zeros(2, 5, dtype=torch.uint8)
    model = model_of("aten.linear.default", left, right, (1, 3, 5), None, weight)
    model(torch.zeros(1, 3, 5))
    with pytest.raises(ArtifactError, match=r"scales \(5,\) that differ within one sum"):
        model.compile()


def test_sums_that_grow_with_the_batch():
    """A strange program may sum over its images: more of them than the bounds are for are refused, not wrong."""
    one = UniformQuantizer(torch.tensor(1.0), torch.tensor(0.0), 4)
    nodes = (
        Node("t", "aten.transpose.int", (Ref("x"), 0, 1)),
        Node("l", FAKE_QUANTIZE, (Ref("t"), "l")),
        Node("r", FAKE_QUANTIZE, (Ref("x"), "r")),
        Node("out", "aten.matmul.default", (Ref("l"), Ref("r"))),
    )
    program = Program(("x",), nodes, Ref("out"), {}, {"l": one, "r": one})
    model = QuantizedModel(QuantizedProgram(program, Config(), (), {}, example=(torch.empty(0, 3),)))
    for executor in EXECUTORS:
        found = model.compile(executor)
        assert found(torch.ones(1, 3)).tolist() == [[1.0] * 3] * 3
        with pytest.raises(ProgramError, match="sums 2 products, its accumulators are for 1"):
            found(torch.ones(2, 3))


@pytest.mark.slow
def test_threads_have_memory_of_their_own(quantized, images):
    from concurrent.futures import ThreadPoolExecutor

    model = quantized.compile()
    wanted = [model(image[None]) for image in images]

    @torch.no_grad()
    def run(image):
        return model(image[None])

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(run, [*images] * 8))
    assert all(map(torch.equal, found, wanted * 8))


def test_scratch_memory_outlives_inference_mode(quantized, images):
    model = quantized.compile("torch")
    memory._scratch.blocks.clear()
    with torch.inference_mode():
        wanted = model(images).clone()
    assert torch.equal(model(images), wanted)


def test_no_images(quantized, images):
    for executor in EXECUTORS:
        assert quantized.compile(executor)(images[:0]).shape == (0, 10)


# --- the choice of a table -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["adalog", "log2"])
@pytest.mark.parametrize("width", [4, *(pytest.param(width, marks=pytest.mark.slow) for width in (3, 6, 8))])
def test_eight_bits_where_they_cost_little(width, kind):
    config = Config(activation_bits=width)
    probabilities = (normal(2, 1, 40, 40, seed=width) * 3).softmax(-1).float()
    left = Operand(probabilities, Format.power_law(kind, width, config, 0.0))
    right = Operand(normal(2, 1, 8, 40, seed=1).float(), Format(width))
    product = Product("av", left, right)
    plain = search_product(product, Search(rounds=1, steps=1))
    chosen = with_table(product, plain, "calibrated")
    ratios = {}
    for tables, bits_of_table in (("u8", 8), ("u16", 16)):
        if most_headroom(width, bits_of_table, table=plain.left.table) < 0:
            with pytest.raises(ValueError, match="mantissas of 9 bits do not fit: choose 'u16'"):
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
    form = Format.power_law("log2", width, Config(), 0.0)
    left = Operand(normal(64, terms).abs().float(), form)
    right = Operand(normal(8, terms, seed=1).float(), Format(8, own_dims=(0,)))
    product = Product("linear", left, right)
    found = with_table(product, search_product(product, Search(rounds=1, steps=0)), "u16").left
    assert terms * 255 * int(found.table_integers().max()) < 2**31
    assert found.headroom < most_headroom(width, 16, table=False)


# --- vectors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "blocks.0.attn.av",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("patch_embed.conv1", "blocks.1.mlp.fc2")),
    ],
)
def test_vectors_are_what_they_say(quantized, images, name, tmp_path):
    model = quantized.compile("reference")
    for file, content in vectors(model, name, images[:2]).items():
        (tmp_path / file).write_bytes(content)
    told = json.loads((tmp_path / "site.json").read_text())
    arrays = {key: np.load(tmp_path / f"{key}.npy") for key in told["files"]}
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["site.json", *(f"{key}.npy" for key in arrays)])
    for key, described in told["files"].items():
        assert (str(arrays[key].dtype), list(arrays[key].shape)) == (described["type"], described["shape"])
    assert (told["site"], told["accumulator_bits"]) == (name, 32)
    sides = {}
    for side in ("left", "right"):
        codes = arrays[f"{side}_codes"].astype(np.int64)
        logarithmic = told[side]["kind"] == "log"
        sides[side] = arrays[f"{side}_table_0"][codes] if logarithmic else codes - arrays[f"{side}_zero_point"]
    if told["operation"] == "conv2d":
        geometry = told["convolution"]
        sums = convolved(*(side.astype(object) for side in sides.values()), *geometry.values()).astype(np.int64)
        sums = sums.reshape(2, 1, len(sides["right"]), -1).transpose(0, 1, 3, 2)
    else:
        sums = sides["left"] @ (sides["right"].T if told["operation"] == "linear" else sides["right"])
    assert np.array_equal(arrays["accumulators_0"], sums)
    assert np.abs(sums).max() <= told["bounds"][0]
    output = sums * arrays["scale_0"] + arrays.get("bias", 0)
    if told["operation"] == "conv2d":
        output = output.transpose(0, 1, 3, 2).reshape(arrays["output"].shape)
    assert np.allclose(output, arrays["output"], rtol=1e-5, atol=1e-5)


class Tabled(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(3, 32, 5))

    def forward(self, x):
        return x @ self.table


def test_a_stored_table_on_the_right(fast):
    """A product with a stored operand of several matrices, quantized as it runs."""
    torch.manual_seed(0)
    net = Tabled()
    x = torch.randn(4, 3, 7, 32, generator=torch.Generator().manual_seed(1))
    model = Calibration(net.eval(), x).quantize(fast)
    fake = model(x)
    for executor in EXECUTORS:
        found = model.compile(executor)
        assert isinstance(found, Compiled)
        assert len(found.sites) == 1
        assert torch.allclose(found(x), fake, rtol=1e-4, atol=1e-5)


class ReadsItsAttention(nn.Module):
    """A linear of the attention itself, where others multiply it by values."""

    def __init__(self):
        super().__init__()
        self.qk = nn.Linear(6, 12)
        self.fc = nn.Linear(5, 3)

    def forward(self, x):
        q, k = self.qk(x).chunk(2, -1)
        return self.fc((q @ k.transpose(-1, -2)).softmax(-1))


def test_a_linear_of_the_attention_and_inputs_with_gradients():
    torch.manual_seed(0)
    images = torch.randn(8, 5, 6)
    quantized = Calibration(ReadsItsAttention().eval(), images).quantize(Config(images=8))
    expected = quantized(images)
    for executor in ("reference", "torch"):
        found = quantized.compile(executor)(images.clone().requires_grad_())
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
