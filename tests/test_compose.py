"""Operations composed of float operations: what PyTorch computes."""

import math

import pytest
import torch
from torch.nn import functional as F

from adalog import library
from adalog.graph.operations import resolve
from adalog.runtime.native import abi
from adalog.runtime.native.arena import Layout
from adalog.runtime.native.compose import COMPOSED, compose
from adalog.runtime.native.floats import COPY, FLOATS

pytestmark = pytest.mark.skipif(not library.levels(), reason=f"no kernels: {library.why()}")

X = torch.randn(2, 6, 9, 10, generator=torch.Generator().manual_seed(0))
LAST = X.contiguous(memory_format=torch.channels_last)  # images as products write them
VECTORS = (*X[0, :4, 0, :6].square().add(0.1),)
CASES = [
    ("neg.default", (X,)),
    ("square.default", (X,)),
    ("pow.Tensor_Scalar", (X, 2)),
    ("reciprocal.default", (X,)),
    ("rsub.Scalar", (X, 1)),
    ("rsqrt.default", (X.abs(),)),
    ("clamp.default", (X, -0.5)),
    ("clamp.default", (X, -0.5, 0.25)),
    ("clamp_min.default", (X, 1e-12)),
    ("clamp_max.default", (X, 0.5)),
    ("batch_norm.default", (X, *VECTORS, False, 0.1, 1e-5, True)),
    ("batch_norm.default", (LAST, None, None, *VECTORS[:2], False, 0.1, 1e-3, True)),
    ("group_norm.default", (X, 2, *VECTORS[:2])),
    ("group_norm.default", (LAST, 3, None, VECTORS[0], 1e-3)),
    ("stack.default", ((X, -X),)),
    ("stack.default", ((X, LAST, X), -1)),
    ("roll.default", (X, (-4, 13), (1, -1))),
    ("roll.default", (X, (20,), (3,))),
    ("pad.default", (X, (1, 0, -2, 3))),
    ("pad.default", (LAST, (1, 2), "constant", -math.inf)),
    ("constant_pad_nd.default", (X, (0, 2, 1, 1, -1, 0), 0.5)),
    ("sum.dim_IntList", (X, (1, 2))),
    ("sum.dim_IntList", (X, None, True)),
    ("linalg_vector_norm.default", (X, 2.0, (-1,), True)),
    ("linalg_vector_norm.default", (LAST,)),
    ("amax.default", (X, (2,))),
    ("amax.default", (LAST, (-1, 0), True)),
    ("amax.default", (X[:, :, :1], ())),
    ("amin.default", (X, (3, 1))),
    ("max_pool2d.default", (X, (3, 3), (2, 2), (1, 1))),
    ("max_pool2d.default", (LAST, (3, 3), (2, 2), (1, 1))),
    ("max_pool2d.default", (X[0], (2, 3))),
    ("max_pool2d.default", (X, (3,), (2,), (1,), (2,))),
    ("max_pool2d.default", (LAST, (2, 2), (2, 2), (0, 0), (1, 1), True)),
    ("max_pool2d.default", (X, (3, 3), (4, 4), (1, 1), (1, 1), True)),
    ("im2col.default", (X, (3, 3), (1, 1), (1, 1), (2, 2))),
    ("im2col.default", (LAST, (2, 3), (2, 1), (0, 2), (1, 3))),
    *(("adaptive_avg_pool2d.default", (X, size)) for size in ((1, 1), (2, 3), (9, 10))),
]
# Operations of one call, with the same bits as in PyTorch.
SINGLE = [
    *((f"{name}.Tensor", (X, LAST + 1)) for name in ("add", "sub", "mul", "div")),
    *((f"{name}.default", (X, -LAST)) for name in ("maximum", "minimum")),
    ("add.Tensor", (X, 0.1)),
    ("cat.default", ((X, LAST), -2)),
    ("reshape.default", (LAST, (2, -1))),
]
ROUNDED_ONCE = [("mean.dim", (X, (1,))), ("mean.dim", (X, (0, -1), True)), ("sqrt.default", (X.abs(),))]


def composed(op, args, kwargs=()):
    """The result of an operation, or None if NumPy does not run it."""
    wanted, layout = resolve(op)(*args, **dict(kwargs)), Layout(abi.Context(1, "scalar"))
    out = layout.like(wanted)
    out.fill_(math.nan)
    if not compose(layout, op, out, args, dict(kwargs)):
        assert not layout.calls
        return None
    assert not any(call.run() for call in layout.calls)
    return out


@pytest.mark.parametrize(("op", "args"), CASES)
def test_composed_operations_are_what_torch_computes(op, args):
    op = f"aten.{op}"
    assert torch.allclose(composed(op, args), resolve(op)(*args), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("op", "args"), SINGLE)
def test_single_operations_have_the_bits_of_torch(op, args):
    assert torch.equal(composed(f"aten.{op}", args), resolve(f"aten.{op}")(*args))


@pytest.mark.parametrize(("op", "args"), ROUNDED_ONCE)
def test_results_are_rounded_once(op, args):
    wanted = resolve(f"aten.{op}")(args[0].double(), *args[1:]).float()
    assert torch.equal(composed(f"aten.{op}", args), wanted)


def test_each_operation_has_a_case():
    assert {*COMPOSED, *FLOATS} - {COPY} <= {f"aten.{op}" for op, _ in CASES + SINGLE + ROUNDED_ONCE}


def test_nan_spreads_and_zeros_are_positive():
    values = torch.tensor([[-0.0, 0.0, -1.0], [0.0, -0.0, -1.0], [1.0, math.nan, 0.0]])
    largest = composed("aten.amax.default", (values, (1,)))
    assert torch.equal(largest[:2].signbit(), torch.zeros(2).bool())
    assert largest[2].isnan()


@pytest.mark.parametrize(
    ("op", "args", "kwargs"),
    [
        ("exp.default", (X,), {}),
        ("neg.default", (X.double(),), {}),
        ("stack.default", ((X.double(), X.double()),), {}),
        ("pow.Tensor_Scalar", (X.abs(), 1.5), {}),
        ("clamp.default", (X, -0.5, math.inf), {}),
        ("roll.default", (X, (1,)), {}),
        ("roll.default", (X, (1, 1), (0, 0)), {}),
        ("rsub.Scalar", (X, 1, 2), {}),
        ("amax.default", (X[0, 0, 0, 0], (0,)), {}),
        ("pad.default", (X[0], (1, 1), "reflect"), {}),
        ("sum.dim_IntList", (X, (1,)), {"dtype": torch.float64}),
        ("linalg_vector_norm.default", (X, 1.0, (-1,)), {}),
        ("batch_norm.default", (X, None, None, None, None, True, 0.1, 1e-5, True), {}),
    ],
)
def test_what_torch_runs(op, args, kwargs):
    assert composed(f"aten.{op}", args, kwargs) is None


def test_pools_of_infinite_values_are_infinite():
    image = torch.full((1, 1, 4, 4), -math.inf)
    assert torch.equal(
        composed("aten.max_pool2d.default", (image, (3, 3), (2, 2), (1, 1))), F.max_pool2d(image, 3, 2, 1)
    )
