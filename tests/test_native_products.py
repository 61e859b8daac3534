"""The products of the compiled kernels, at every level that runs here: the accumulators of the reference."""

import ctypes
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from adalog.quantizers import LogQuantizer, UniformQuantizer
from adalog.runtime import reference
from adalog.runtime.native import abi, products
from adalog.runtime.native.arena import Layout
from adalog.runtime.native.tables import Lookup
from strategies import bits, seeds
from test_native_kernels import every_level, few, tables
from whole_numbers import accumulated, codes_of, computed_product, left_quantizer, model_of, site_of, stored_product

kinds = st.sampled_from(["uniform", "log2", "log-sqrt2", "adalog"])
widths = st.tuples(bits, bits)
extremes = st.sampled_from([0, 0, 0, 1, 2])


def accumulators(level, model, left, right=None):
    def product(site):
        native = products.product(site, abi.Context(3, level))
        assert isinstance(native, products.ByteProduct | products.DepthwiseProduct) == products.takes(site)
        return native

    return accumulated(site_of(model), products.encoder, product, left, right)


def check_accumulators(level, model, left, right=None):
    found = accumulators(level, model, left, right)
    wanted = accumulated(site_of(model), reference.CodeEncoder, reference.CodeProduct, left, right)
    assert len(found) == len(wanted)
    assert all(map(torch.equal, found, wanted))


def check_outputs(level, model, x):
    assert torch.allclose(model.compile("native", level=level)(x), model.compile("reference")(x), rtol=1e-5, atol=1e-4)


@every_level
@few
@given(kinds, widths, tables, st.tuples(*[st.integers(1, n) for n in (9, 5, 140, 300)]), extremes, seeds)
def test_linear(level, kind, widths, table, sizes, extreme, seed):
    batch, tokens, outputs, terms = sizes
    shapes = (batch, tokens, terms), (outputs, terms)
    model, codes, _ = stored_product(torch.Generator().manual_seed(seed), kind, widths, table, *shapes, extreme)
    check_accumulators(level, model, codes)


sizes_of_products = st.tuples(*[st.integers(1, n) for n in (3, 3, 40, 70, 70)])


@every_level
@few
@given(kinds, widths, tables, sizes_of_products, st.booleans(), extremes, seeds)
def test_products_of_computed_operands(level, kind, widths, table, sizes, transposed, extreme, seed):
    *shape, columns = sizes
    generator = torch.Generator().manual_seed(seed)
    model, codes, others = computed_product(generator, kind, widths, table, shape, columns, extreme)
    others = others.mT.contiguous().mT if transposed else others
    check_accumulators(level, model, codes, others)


@every_level
@few
@given(
    kinds,
    widths,
    tables,
    st.tuples(*[st.integers(1, n) for n in (3, 6, 3, 3)]),
    st.integers(0, 2),
    st.booleans(),
    seeds,
)
def test_convolution(level, kind, widths, table, sizes, padding, own_offset, seed):
    """Terms lie by channel or by pixel. With an offset that padding lacks, ones are a part of their own."""
    batch, channels, stride, dilation = sizes
    geometry = (stride, stride), (padding, 1), (dilation, dilation), 1
    offset = 0.2 if own_offset and kind == "adalog" else 0.0
    shapes = (batch, channels, 9, 8), (5, channels, 3, 2)
    model, codes, _ = stored_product(
        torch.Generator().manual_seed(seed), kind, widths, table, *shapes, 0, (), geometry, offset
    )
    check_accumulators(level, model, codes)
    check_outputs(level, model, site_of(model).left.dequantize(codes))


@every_level
@few
@given(widths, st.tuples(*[st.integers(1, n) for n in (3, 150, 5, 3, 3)]), st.booleans(), extremes, seeds)
def test_convolution_of_each_channel(level, widths, sizes, each, extreme, seed):
    """Fewer and more channels than vectors have lanes, with one zero point or one a channel, at and beyond edges."""
    batch, channels, kernel, stride, dilation = sizes
    channels += 1  # one channel is a plain convolution
    shapes, own = ((batch, channels, 15, 14), (channels, 1, kernel, 3)), (channels, 1, 1) if each else ()
    geometry = (stride, stride), (kernel // 2, 2), (dilation, 1), channels
    model, codes, _ = stored_product(
        torch.Generator().manual_seed(seed), "uniform", widths, 8, *shapes, extreme, own, geometry
    )
    assert products.takes(site_of(model))
    check_accumulators(level, model, codes)
    check_outputs(level, model, site_of(model).left.dequantize(codes))


@every_level
@pytest.mark.parametrize("table", [8, 16])
def test_sums_of_rows_serve_all_columns(level, table):
    """More rows and columns than a task takes, and zero points that need the sums of the rows."""
    generator = torch.Generator().manual_seed(0)
    left = left_quantizer(generator, "adalog", 8, table, ())
    right = UniformQuantizer(torch.ones(140, 1), torch.arange(140.0)[:, None] + 20, 8)
    codes = codes_of(generator, 8, (1, 1100, 20), 0)
    model = model_of("aten.linear.default", left, right, codes.shape, None, codes_of(generator, 8, (140, 20), 0))
    for _ in range(2):
        check_accumulators(level, model, codes)


@every_level
def test_the_largest_sums(level):
    """Every byte at its largest, where 16 bits would saturate and 32 wrap were they signed differently."""
    for width, terms in ((8, 4000), (4, 4000), (8, 63)):
        left = LogQuantizer(torch.tensor(1.0), 1, 1, width, "saturate", table=False, width=8, headroom=7)
        for zero in (0.0, 2.0**width - 1):
            right = UniformQuantizer(torch.ones(3, 1), torch.full((3, 1), zero), width)
            codes = torch.zeros(1, 1, terms, dtype=torch.uint8)
            weight = torch.full((3, terms), 0 if zero else 2**width - 1, dtype=torch.uint8)
            model = model_of("aten.linear.default", left, right, codes.shape, None, weight)
            (found,) = accumulators(level, model, codes)
            assert found.flatten().tolist() == [(-1 if zero else 1) * terms * 128 * (2**width - 1)] * 3


@every_level
@settings(max_examples=60)
@given(
    st.tuples(st.integers(1, 2), st.integers(1, 3)),
    st.tuples(st.integers(1, 4), st.one_of(st.integers(1, 9), st.sampled_from([14, 16]))),
    st.tuples(*[st.integers(1, 17)] * 2),
    st.tuples(*[st.integers(0, 9)] * 2),
    st.tuples(*[st.integers(1, 2)] * 2),
    st.tuples(*[st.integers(0, 20)] * 2),
    seeds,
)
def test_patches(level, counts, kernel, stride, padding, dilation, more, seed):
    """What each place sees, the padding besides, for rows of a kernel of any length; nothing beyond is written."""
    generator = torch.Generator().manual_seed(seed)
    reach = [spread * (size - 1) + 1 for spread, size in zip(dilation, kernel, strict=True)]
    sizes = [max(1, long - 2 * pad) + extra for long, pad, extra in zip(reach, padding, more, strict=True)]
    image = torch.randint(0, 200, (*counts, *sizes), dtype=torch.uint8, generator=generator)
    padded = F.pad(image.float(), (padding[1], padding[1], padding[0], padding[0]), value=255)
    wanted = F.unfold(padded, kernel, dilation, 0, stride).transpose(1, 2).flatten(0, 1)
    out = torch.full((wanted.numel() + 64,), 211, dtype=torch.uint8)
    pairs = {"kernel": kernel, "stride": stride, "padding": padding, "dilation": dilation}
    numbers = {"images": counts[0], "channels": counts[1], "height": sizes[0], "width": sizes[1], "fill": 255}
    numbers |= {name: (ctypes.c_int64 * 2)(*pair) for name, pair in pairs.items()}
    places = {"data": image.data_ptr(), "bytes": image.numel(), "out": out.data_ptr(), "out_bytes": wanted.numel()}
    abi.Context(2, level).run("patches", abi.Patches(**numbers, **places, row=wanted.shape[1]))
    assert torch.equal(out[: wanted.numel()].view(wanted.shape).float(), wanted)
    assert (out[wanted.numel() :] == 211).all()


@every_level
@few
@given(st.integers(1, 20), st.integers(1, 150), st.booleans(), st.sampled_from([0.7, 15.0, 255.0, 1e5]), seeds)
def test_uniform_codes_of_a_softmax(level, rows, keys, biased, code_scale, seed):
    """What attention sums, by float64: codes are rounded, and none is beyond the last one."""
    generator, terms, columns = torch.Generator().manual_seed(seed), 8, 5

    def codes(*shape):
        return torch.randint(0, 16, shape, generator=generator, dtype=torch.uint8)

    q, k, v = codes(rows, terms), codes(keys, terms), codes(keys, columns)
    bias = torch.randn(rows, keys, generator=generator)
    zeros = torch.tensor([3, 7, 5], dtype=torch.int32)
    sides = [
        abi.Side(data=each.data_ptr(), bytes=each.nbytes, row=each.shape[1], zero=zeros[i:].data_ptr(), bits=4, top=15)
        for i, each in enumerate((q, k, v))
    ]
    sides[1].transposed = 1
    sizes = {"batches": 1, "heads": 1, "rows": rows, "terms": terms, "columns": keys}
    layout, factor, sums = Layout(abi.Context(1)), torch.tensor([0.02]), torch.empty(rows, columns, dtype=torch.int32)
    number = torch.zeros(1, dtype=torch.int32)
    given = abi.Attention(
        scores=abi.Matrices(**sizes, left=sides[0], right=sides[1]),
        factor=factor.data_ptr(),
        steps=layout.lookup(Lookup(torch.tensor([-1.0]), torch.tensor([0, 200], dtype=torch.int32), 1)),
        zero=3,
        code_scale=code_scale,
        columns=columns,
        values=sides[2],
        out=abi.Output(kind=abi.SUMS, **products.place(sums)),
    )
    if biased:
        given.bias, given.bias_bytes, given.bias_tables, given.bias_heads = bias.data_ptr(), bias.nbytes, 1, 1
        given.bias_of, given.bias_batches = number.data_ptr(), 1
    abi.Context(1, level).run("attention", given)
    scores = (q.double() - 3) @ (k.double() - 7).t() * factor.double() + (bias.double() if biased else 0)
    places = (scores * math.log(2)).softmax(1) * code_scale + 3
    near = (places - places.floor() - 0.5).abs().amin(1) > 1e-5 * code_scale  # rows without a tie
    wanted = (places.round().clamp(0, 200) - 3) @ (v.double() - 5)
    assert torch.equal(sums[near].double(), wanted[near])
