"""The search's elementwise steps: what the compiled library makes, if there is one, and what PyTorch makes, are one."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import strategies
from adalog import library
from adalog.quantizers import UniformQuantizer, elementwise, fused

SHAPES = [((7, 33), ()), ((5, 130), (0,)), ((2, 3, 11, 17), (1,)), ((4, 6, 9), (0, 1)), ((3, 5, 70), (2,))]
SHAPES += [((2, 0), ()), ((0, 3, 4), (1,)), ((3, 4, 5), (0, 2))]  # without values, and dimensions that are not adjacent
normal = partial(strategies.normal, dtype=torch.float32)
compiled = pytest.mark.skipif(library.load()[0] is None, reason=library.load()[1])


@pytest.fixture(params=["compiled", "torch"])
def way(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(elementwise, "_functions", dict)
    elif library.load()[0] is None:
        pytest.skip(library.load()[1])


@pytest.mark.parametrize(("shape", "keep"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_uniform_errors_are_those_of_the_quantizers(way, shape, keep, dtype, bits):
    values, groups = normal(*shape), [shape[dim] for dim in keep]
    scale = normal(3, *groups, seed=1).abs() + 0.01
    zero_point = (normal(3, *groups, seed=2) * 2**bits).round().clamp(0, 2**bits - 1)
    found = fused.uniform_errors(values, scale, zero_point, bits, keep, dtype)
    against = [1 if dim not in keep else size for dim, size in enumerate(shape)]
    assert found.dtype == dtype
    assert found.shape == (3, *shape)
    for error, own_scale, own_zero in zip(found, scale, zero_point, strict=True):
        quantizer = UniformQuantizer(own_scale.view(against), own_zero.view(against), bits)
        assert torch.equal(error, (quantizer.fake_quantize(values) - values).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_candidates_of_a_matrix_lie_together(way, dtype):
    values, factor = normal(2, 3, 5, 7), normal(2, 3, 7, 4, seed=1).to(dtype)
    errors = fused.uniform_errors(values, torch.full((6,), 0.3), torch.full((6,), 7.0), 4, (), dtype)
    if elementwise._functions():
        assert errors.movedim(0, -3).is_contiguous()
    found = fused.products(errors, factor)
    assert found.shape == (6, 2, 3, 5, 4)
    assert torch.equal(found, fused.products(errors.contiguous(), factor))  # however they lie
    torch.testing.assert_close(found, errors @ factor)
    looked_up = fused.table_errors(values, torch.zeros(210, dtype=torch.int32), normal(6, 3), dtype)
    assert looked_up.movedim(0, -3).is_contiguous()


@given(st.floats(2**-10, 10, width=32), st.integers(0, 15), st.integers(-40, 40), st.sampled_from([-0.5, 0.0, 0.5]))
def test_halves_round_to_even_in_both(scale, zero_point, step, half):
    values = torch.full((1, 1), scale) * (step + half)
    scale, zero_point = torch.full((1,), scale), torch.full((1,), float(zero_point))
    found = fused.uniform_errors(values, scale, zero_point, 4, (), torch.float32)
    code = torch.round(values / scale).clamp(-zero_point, 15 - zero_point)
    assert torch.equal(found[0], code * scale - values)


def test_values_and_tables_that_are_strided(way):
    strided = normal(6, 40).t()[::2], *(torch.full((2, 1), value).expand(2, 20) for value in (0.3, 3.0))
    found, wanted = (
        fused.uniform_errors(*given, 3, (0,), torch.float32)
        for given in (strided, [value.clone() for value in strided])
    )
    assert torch.equal(found, wanted)
    values, bins, table = normal(6), torch.arange(6, dtype=torch.int32), normal(12, seed=1)
    (found,) = fused.table_errors(values, bins, table[None, ::2], torch.float32)
    assert torch.equal(found, table[::2] - values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_table_errors_are_looked_up(way, dtype):
    values, tables = normal(3, 5, 7), normal(2, 50, seed=1)
    bins = torch.randint(0, 50, (values.numel(),), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    found = fused.table_errors(values, bins, tables, dtype)
    for error, table in zip(found, tables, strict=True):
        assert torch.equal(error, (table[bins.long()].view(3, 5, 7) - values).to(dtype))


@pytest.mark.parametrize(("shape", "keep"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gram", [False, True])
def test_sums_are_those_of_float64(way, shape, keep, dtype, gram):
    product, base = normal(4, *shape).to(dtype), normal(*shape, seed=1)
    error = normal(4, *shape, seed=2).to(dtype) if gram else None
    found = fused.sums(product.clone(), base, error, keep)
    wide = product.double() + (2 if gram else 1) * base.double()
    terms = wide * (wide if error is None else error.double())
    summed = [dim + 1 for dim in range(len(shape)) if dim not in keep]
    expected = terms.sum(summed) if summed else terms
    size = (terms.abs().sum(summed) if summed else terms.abs()).clamp(min=1e-30)
    assert found.dtype == torch.float32
    assert found.shape == expected.shape
    assert float(((found - expected).abs() / size).max() if found.numel() else 0) < 1e-6


def test_a_default_device_is_not_where_results_are(way):
    values, scale = normal(3, 4), torch.ones(2)
    bins, tables = torch.zeros(12, dtype=torch.int32), torch.ones(1, 1)
    with torch.device("meta"):  # memory that is not there: writing to it would end the process
        uniform = fused.uniform_errors(values, scale, scale, 4, (), torch.float32)
        looked_up = fused.table_errors(values, bins, tables, torch.float32)
        found = fused.sums(uniform.clone(), values, None, ())
    assert {each.device.type for each in (uniform, looked_up, found)} == {"cpu"}
    assert torch.equal(looked_up[0], 1 - values)
    torch.testing.assert_close(found, (uniform + values).square().sum((1, 2)))


def test_what_does_not_fit_is_an_error(way):
    """And not memory that is another's."""
    values, ones = normal(3, 4), torch.ones
    for function, *arguments in (
        (fused.uniform_errors, ones(2), ones(2), 4, (0,), torch.float32),
        (fused.uniform_errors, ones(2, 3), ones(2, 2), 4, (0,), torch.float32),
        (fused.table_errors, ones(11, dtype=torch.int32), ones(1, 2), torch.float32),
        (lambda base, product: fused.sums(product, base, None, ()), normal(2, 3, 3)),
        (lambda base, error: fused.sums(normal(2, 3, 4), base, error, ()), normal(2, 3, 3)),
    ):
        with pytest.raises(RuntimeError):
            function(values, *arguments)


def test_types_may_differ(way):
    values, bins, table = normal(6), torch.arange(6), normal(6, seed=1)
    assert torch.equal(fused.table_errors(values, bins, table[None], torch.float32)[0], table - values)
    product, error = normal(2, 6), normal(2, 6, seed=2).bfloat16()
    found = fused.sums(product.clone(), values, error, ())
    torch.testing.assert_close(found, ((product + 2 * values) * error).sum(1))


def test_sums_do_not_drift(way):
    """A million equal terms: one float32 sum of them would be off by far more."""
    base = torch.full((1, 1 << 20), 0.1)
    found = fused.sums(torch.zeros(1, 1, 1 << 20), base, None, ())
    assert float(found[0]) == pytest.approx((1 << 20) * float(base[0, 0].double()) ** 2, rel=2e-6)


@compiled
def test_the_library_is_what_runs():
    """Otherwise the tests above compare PyTorch with itself."""
    assert len(elementwise._functions()) == 10
    assert fused._compiled("sums", 1, torch.float32, torch.zeros(1))[1] is not None
    assert fused._compiled("sums", 1, torch.float64, torch.zeros(1))[1] is None
    assert fused._compiled("sums", 1, torch.float32, torch.zeros(1, dtype=torch.float64))[1] is None
    assert math.prod(elementwise.sizes_around((2, 3, 4), (1,))) == 24
