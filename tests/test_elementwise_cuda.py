"""Triton's kernels give what PyTorch gives: on a CUDA device, or else on the CPU, run by Triton's interpreter."""

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from adalog.quantizers import UniformQuantizer, bounds_to_uniform, elementwise, fused, uniform
from adalog.search import objective
from adalog.search.objective import OwnError
from test_elementwise import KINDS, SPECIAL, around_thresholds, block, chosen, normal, parameters, row_by_row

triton = pytest.importorskip("triton")

CUDA = torch.cuda.is_available()
INTERPRETED = not CUDA and os.environ.get("TRITON_INTERPRET") == "1"  # Triton reads it when it is imported
DEVICE = "cuda" if CUDA else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")  # of the interpreter
# Until Triton 3.7, its interpreter makes numbers of arrays in a way that NumPy refuses from 2.4 on.
OUTDATED = np.lib.NumpyVersion(triton.__version__) < "3.7.0" and np.lib.NumpyVersion(np.__version__) >= "2.4.0"
by_kernels = pytest.mark.skipif(not CUDA and not INTERPRETED, reason="another test lets the interpreter run it")


@pytest.mark.skipif(CUDA, reason="the device itself runs the kernels")
@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter")
@pytest.mark.skipif(OUTDATED, reason="the interpreter does not work with this NumPy")
def test_the_interpreter_runs_the_kernels(tmp_path):
    command = [sys.executable, "-m", "pytest", __file__, "-q", "-p", "no:cacheprovider", "-p", "no:randomly"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(
        [*command, f"--basetemp={tmp_path / 'inner'}"], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout


@pytest.mark.skipif(CUDA, reason="there is a CUDA device")
def test_without_a_device_there_are_no_kernels():
    assert elementwise._triton_kernels.__wrapped__() is None
    assert elementwise.kernels(torch.ones(2)) is None


def with_and_without(run, *values):
    """What a function returns by the kernels, and by PyTorch alone on the CPU; both on the CPU."""
    from adalog.quantizers import elementwise_cuda

    def patched(kernels):
        for module in (elementwise, fused, objective, uniform):
            patch.setattr(module, "kernels", kernels)

    def on_cpu(results):
        return [each.cpu() for each in (results if isinstance(results, tuple) else (results,))]

    calls = []

    def found(*values, dtype=torch.float32):
        calls.append(elementwise_cuda if CUDA or all(value.dtype == dtype for value in values) else None)
        return calls[-1]

    with pytest.MonkeyPatch.context() as patch:
        if INTERPRETED:
            patched(found)
        by_kernels = on_cpu(run(*(None if value is None else value.to(DEVICE) for value in values)))
        assert not INTERPRETED or elementwise_cuda in calls
        patched(lambda *_, dtype=None: None)
        patch.setattr(elementwise, "_functions", dict)
        return by_kernels, on_cpu(run(*values))


def assert_as_pytorch(run, *values):
    """The results are equal to the bit; the interpreter rounds to bfloat16 by leaving out bits."""
    for one, other in zip(*with_and_without(run, *values), strict=True):
        near = torch.finfo(torch.bfloat16).eps if INTERPRETED and one.dtype == torch.bfloat16 else 0.0
        torch.testing.assert_close(one, other, rtol=near, atol=near * 1e-30, equal_nan=True)


# (shape of the values, dimensions with parameters of their own)
LAYOUTS = [((6, 40), ()), ((7, 33), (0,)), ((2, 3, 5, 20), (1,)), ((3, 5, 24), (0,)), ((3, 40, 30), (0, 1))]


def with_special(shape, seed):
    """Random values; the first ones are zeros, subnormal and huge numbers, infinities and NaN."""
    values = normal(shape, seed)
    values.view(-1)[: len(SPECIAL)] = torch.tensor(SPECIAL)
    return values


@by_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "own_dims"), LAYOUTS)
def test_uniform_errors_are_those_of_pytorch(shape, own_dims, dtype):
    values, count = with_special(shape, 0), 11
    scale, zero_point = (each.detach() for each in parameters((count, *(shape[dim] for dim in own_dims)), 4, 1))
    values[-1, ..., -1] = (scale[0] * 2.5).flatten()[0]  # a half, but for rounding

    assert_as_pytorch(lambda *given: fused.uniform_errors(*given, 4, own_dims, dtype), values, scale, zero_point)


@by_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(6, 40), (2, 3, 5, 20), (3, 40, 30)])
def test_table_errors_are_those_of_pytorch(shape, dtype):
    values, tables = normal(shape, 0), normal((9, 50), 1)
    bins = torch.randint(50, (values.numel(),), dtype=torch.int32, generator=torch.Generator().manual_seed(2))
    assert_as_pytorch(lambda *given: fused.table_errors(*given, dtype), values, bins, tables)


@by_kernels
@pytest.mark.parametrize("gram", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "own_dims"), [*LAYOUTS, ((2, 3, 70, 130), (1,)), ((9000,), ())])
def test_sums_are_those_of_pytorch(shape, own_dims, dtype, gram):
    base = normal(shape, 0)
    product, error = (normal((5, *shape), seed).to(dtype) for seed in (1, 2))
    if len(shape) > 2:  # as `products` returns them
        product = product.movedim(0, -3).contiguous().movedim(-3, 0)

    found, there = with_and_without(
        lambda product, *others: fused.sums(product.clone(), *others, own_dims), product, base, error if gram else None
    )
    torch.testing.assert_close(found, there, rtol=1e-5, atol=1e-2 if gram else 0.0)
    assert found[0].dtype == torch.float32


@by_kernels
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_own_errors_are_those_of_pytorch(bits):
    sample = normal((3, 700), 0)
    scale, zero_point = (each.detach() for each in parameters((10, 3), bits, 1))

    def run(sample, scale, zero_point):
        scale, zero_point, code = scale.double()[..., None], zero_point.double()[..., None], torch.arange(2**bits)
        return OwnError(sample).loss(scale * (code - zero_point), scale * (code[:-1] + 0.5 - zero_point))

    found, there = with_and_without(run, sample, scale, zero_point)
    torch.testing.assert_close(found, there, rtol=1e-9, atol=1e-9)


@by_kernels
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("shape", [(40, 2, 30), (2, 1000), (9, 2)])
def test_quantizers_of_bounds_are_those_of_pytorch(shape, bits):
    """Also for bounds on one side of zero, and for equal ones."""
    points = normal(shape, 0).sort(dim=-1 if len(shape) < 3 else 1).values
    points.view(-1)[:2] = 0.0
    lower, upper = (points[:, 0], points[:, 1]) if len(shape) > 2 else (points[..., 0::2], points[..., 1::2])
    assert_as_pytorch(lambda *given: bounds_to_uniform(*given, bits), lower, upper)


@by_kernels
@pytest.mark.parametrize(("shape", "own"), [((3, 17, 40), ()), ((2, 6, 5, 20), (6, 1, 1)), ((3, 2500), (3, 1))])
@pytest.mark.parametrize("whole", [True, False])
def test_fake_quantization_is_that_of_pytorch(shape, own, whole):
    """With zero points that are whole numbers, and with others."""
    x, (scale, zero_point) = with_special(shape, 0), (each.detach() for each in parameters(own, 4, 1))

    zero_point = zero_point if whole else zero_point + 0.3
    assert_as_pytorch(lambda x, *own: UniformQuantizer(*own, 4).fake_quantize(x), x, scale, zero_point)


@by_kernels
@pytest.mark.parametrize("bits", [3, 4, 6])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("log")])
def test_logarithmic_fake_quantization_is_that_of_pytorch(kind, bits):
    """So are values at the thresholds between codes, and next to them."""
    quantizer = KINDS[kind](torch.tensor(0.1), torch.tensor(1.0), bits)
    x = torch.cat([around_thresholds(quantizer), normal((3000,), 0)])

    assert_as_pytorch(lambda x, scale: replace(quantizer, scale=scale).fake_quantize(x), x, quantizer.scale)


@by_kernels
@pytest.mark.parametrize("swept", [False, True])
@pytest.mark.parametrize("shape", [(1, 64, 5), (3, 7, 1), (2, 20, 17), (1, 1, 1)])
def test_codes_in_turn_are_those_of_pytorch(shape, swept):
    problem = block(*shape, swept, 0)
    *tensors, parameters, bits, rows = problem
    left, form, base, scale, zero_point = (
        None if value is None else value.to(DEVICE) for value in (*tensors, *parameters)
    )
    results = chosen(
        (left, form, base, (scale, zero_point), bits, rows), elementwise.codes_in_turn if CUDA else launched
    )
    assert all(map(torch.equal, (result.cpu() for result in results), chosen(problem, row_by_row)))


def launched(left, form, base, parameters, bits, rows, codes):
    """Choose the codes by the kernel itself, as `elementwise.codes_in_turn` does on a device."""
    from adalog.quantizers import elementwise_cuda

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(elementwise, "kernels", lambda *values, dtype: elementwise_cuda)
        return elementwise.codes_in_turn(left, form, base, parameters, bits, rows, codes)
