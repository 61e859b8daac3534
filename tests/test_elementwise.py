"""Fake quantization and its gradient: what the compiled library makes is what PyTorch makes."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses import FakeTensorMode

from adalog import library
from adalog.calibration.compensate import _row_by_row
from adalog.quantizers import LogQuantizer, UniformQuantizer, elementwise
from strategies import R

pytestmark = pytest.mark.skipif(library.load()[0] is None, reason=library.load()[1])

OFFSET = 0.1699712
# (shape of the values, shape of the parameters)
LAYOUTS = [
    ((3, 17, 40), ()),
    ((3, 17, 40), (1, 1, 1)),
    ((2, 5, 7, 64), (1, 5, 1, 1)),
    ((2, 6, 5, 5), (6, 1, 1)),
    ((2, 3, 4, 20), (3, 4, 1)),
    ((3, 2500), (3, 1)),
]
LEFT_TO_PYTORCH = [((3, 17, 40), (40,)), ((2, 5, 3), (5, 1)), ((2, 3, 4, 20), (2, 1, 4, 1)), ((0, 4), ())]
KINDS = {
    "uniform": UniformQuantizer,
    "log": lambda scale, _, bits: LogQuantizer(8 * scale, 20, R, bits, width=16),
    "log with an offset": lambda scale, _, bits: LogQuantizer(8 * scale, 9, R, bits, offset=OFFSET),
    "log that keeps its offset": lambda scale, _, bits: LogQuantizer(
        8 * scale, 37, R, bits, offset=OFFSET, keeps_offset=True
    ),
    "log, saturating": lambda scale, _, bits: LogQuantizer(8 * scale, 30, R, bits, beyond="saturate"),
}
SPECIAL = [0.0, -0.0, 1e-42, -1e-42, 3e38, -3e38, float("inf"), float("-inf"), float("nan")]


def normal(shape, seed):
    return 2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def parameters(shape, bits, seed):
    scale = normal(shape, seed).abs() * 0.1 + 0.05
    zero_point = (normal(shape, seed + 1).abs() * 2**bits / 4).round().clamp(0, 2**bits - 1)
    return scale.requires_grad_(), zero_point.requires_grad_()


def around_thresholds(quantizer):
    """Special values, levels, the thresholds between them, and the numbers next to these."""
    levels = quantizer.levels()
    middles = (levels[1:] + levels[:-1]) / 2
    around = [torch.nextafter(middles, middles + sign) for sign in (-1, 1)]
    return torch.cat([torch.tensor(SPECIAL), levels, middles, *around])


def assert_same(first, second):
    """To the bit, but for the bits of NaN."""
    assert torch.equal(first.isnan(), second.isnan())
    first, second = first.nan_to_num(), second.nan_to_num()
    assert torch.equal(first, second)
    assert torch.equal(first.signbit(), second.signbit())


def both(run):
    """What a function returns with the library, and without."""
    compiled = run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(elementwise, "_functions", dict)
        return compiled, run()


@given(st.sampled_from(LAYOUTS), st.integers(2, 8), st.sampled_from(sorted(KINDS)), st.booleans(), st.integers(0, 999))
def test_training_is_that_of_pytorch(layout, bits, kind, mixed, seed):
    shape, own = layout
    if kind != "uniform" and torch.Size(own).numel() > 1:
        own = ()  # a logarithmic quantizer has one scale
    kept = (normal(shape, seed + 2) > 1).float() if mixed else None

    def run():
        scale, zero_point = parameters(own, bits, seed)
        x = normal(shape, seed + 3).requires_grad_()
        hat = KINDS[kind](scale, zero_point, bits).fake_quantize(x, kept)
        hat.backward(normal(shape, seed + 4))
        return hat.detach(), x.grad, scale.grad, zero_point.grad

    scale, zero_point = (value.detach() for value in parameters(own, bits, seed))
    assert elementwise.nearest_uniform(normal(shape, 0), scale, zero_point, bits) is not None
    (hat, by_x, *sums), (hat_there, by_x_there, *sums_there) = both(run)
    assert torch.equal(hat, hat_there)
    assert torch.equal(by_x, by_x_there)
    for one, other in zip(sums, sums_there, strict=True):
        if other is not None:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * torch.Size(shape).numel() ** 0.5 * 2**bits)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_special_values_are_those_of_pytorch(kind, bits):
    """So are values at the thresholds between codes, and next to them."""
    quantizer = KINDS[kind](torch.tensor(0.1), torch.tensor(1.0), bits)
    values = torch.cat([around_thresholds(quantizer), quantizer.levels().square().sqrt()])
    assert_same(*both(lambda: quantizer.fake_quantize(values)))


STRIDES = {
    "transposed": normal((4, 5, 6), 0).transpose(0, 2),
    "with gaps": normal((8, 40), 1)[:, ::2],
    "channels last": normal((2, 5, 6, 7), 2).to(memory_format=torch.channels_last),
    "expanded": normal((8, 1), 3).expand(8, 40),
    "one number": normal((), 4),
    "none": normal((3, 0), 5),
    "negated without a copy": torch._neg_view(normal((4, 40), 6)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("values", STRIDES.values(), ids=STRIDES)
def test_any_strides_will_do(kind, values):
    quantizer = KINDS[kind](torch.tensor(0.3), torch.tensor(3.0), 4)
    found, there = both(lambda: quantizer.fake_quantize(values))
    assert torch.equal(found, there)
    assert found.stride() == there.stride()  # products round by the layout of what they multiply


@pytest.mark.parametrize(("shape", "own"), LEFT_TO_PYTORCH)
def test_other_layouts_are_left_to_pytorch(shape, own):
    x, (scale, zero_point) = normal(shape, 0), parameters(own, 4, 1)
    if shape[0]:
        assert elementwise.nearest_uniform(x, scale.detach(), zero_point.detach(), 4) is None
    with torch.no_grad():
        found, there = both(lambda: UniformQuantizer(scale, zero_point, 4).fake_quantize(x))
    assert torch.equal(found, there)


class Quantized(nn.Module):
    def __init__(self, quantizer):
        super().__init__()
        self.quantizer = quantizer

    def forward(self, x):
        return self.quantizer.fake_quantize(x)


@pytest.mark.filterwarnings(
    "ignore:There is a performance drop", "ignore:.*is deprecated", "ignore::torch.jit.TracerWarning"
)
def test_tensors_without_values_are_left_to_pytorch():
    """What stands for a tensor while PyTorch traces or maps a function has no memory to read."""
    quantizer, x = UniformQuantizer(torch.tensor(0.3), torch.tensor(3.0), 4), normal((3, 8, 40), 0)
    wanted, module, other = quantizer.fake_quantize(x), Quantized(quantizer), (normal((3, 8, 40), 1),)
    assert torch.equal(torch.func.vmap(quantizer.fake_quantize)(x), wanted)
    assert torch.equal(torch.export.export(module, other, strict=False).module()(x), wanted)
    assert torch.equal(torch.jit.trace(module, other)(x), wanted)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert quantizer.fake_quantize(mode.from_tensor(x)).shape == x.shape


def test_gradients_of_gradients_are_those_of_pytorch():
    quantizer = UniformQuantizer(torch.tensor(0.3), torch.tensor(3.0), 4)

    def run():
        x, w = torch.linspace(-0.5, 0.5, 20, requires_grad=True), torch.ones(20, requires_grad=True)
        by_x = torch.autograd.grad((quantizer.fake_quantize(x) * w).square().sum(), x, create_graph=True)[0]
        return torch.autograd.grad(by_x.square().sum(), w)[0]

    found, there = both(run)
    assert torch.equal(found, there)
    assert bool(found.any())


def test_gradients_that_are_not_finite_are_those_of_pytorch():
    gradient = torch.tensor([float("inf"), float("nan"), 1.0, 2.0]).repeat(8)

    def run():
        x = torch.linspace(-9, 9, 32, requires_grad=True)
        UniformQuantizer(torch.tensor(0.3), torch.tensor(3.0), 4).fake_quantize(x).backward(gradient)
        return x.grad

    assert_same(*both(run))


def test_scales_of_the_wrong_groups_are_refused():
    scale = torch.ones(1, 2, 3, 1)
    with pytest.raises(RuntimeError, match="must match"):
        UniformQuantizer(scale, scale, 4).fake_quantize(normal((4, 3, 2, 20), 0))


def test_a_library_without_clones_rounds_alike(tmp_path):
    """Compilers that make no clones for several processors, such as clang, have another way to round."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    built = tmp_path / "elementwise.so"
    source = Path(elementwise.__file__).with_suffix(".cpp")
    flags = ["-O2", "-std=c++17", "-shared", "-fPIC", "-DNO_CLONES"]
    subprocess.run([compiler, *flags, str(source), "-o", str(built)], check=True)
    alone = ctypes.CDLL(str(built))
    function = alone.adalog_nearest_uniform
    function.argtypes, function.restype = elementwise.TYPES["nearest_uniform"], None
    ties = (torch.arange(-200, 200) / 2) * 0.25
    x = torch.cat([normal((9000,), 0), torch.tensor(SPECIAL), ties, 1e6 * normal((400,), 1)])
    scale, zero_point = torch.tensor(0.25), torch.tensor(7.0)
    found = torch.empty_like(x)
    function(x, 1, 1, x.numel(), scale, zero_point, 15, found)
    assert_same(found, elementwise.nearest_uniform(x, scale, zero_point, 4))
    in_turn = alone.adalog_codes_in_turn
    in_turn.argtypes, in_turn.restype = elementwise.TYPES["codes_in_turn"], None
    problem = block(2, 9, 40, True, 0)
    wanted = chosen(problem, elementwise.codes_in_turn)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(elementwise, "_functions", lambda: {"codes_in_turn": in_turn})
        assert all(map(torch.equal, chosen(problem, elementwise.codes_in_turn), wanted))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_are_left_to_pytorch(dtype):
    x, one = torch.ones(4, 20, dtype=dtype), torch.tensor(1.0)
    assert elementwise.nearest_uniform(x, one, one, 4) is None
    assert UniformQuantizer(one, one, 4).fake_quantize(x).dtype == dtype


def block(groups, rows, outputs, swept, seed, bits=3):
    """The arguments of `codes_in_turn` but for the codes, for rows in the middle of a larger problem."""
    left, base, x = (normal((groups, rows + 7, width), seed + width).double() for width in (outputs, outputs, 90))
    scale, zero_point = (value.detach().double() for value in parameters((groups, 1, outputs), bits, seed))
    span = range(4, 4 + rows)
    return left, (x @ x.mT).mT, base if swept else None, (scale, zero_point), bits, span


def chosen(problem, function):
    """The codes and what the rows moved; rows that were not chosen have the code -1."""
    codes = torch.full_like(problem[0], -1)
    moved = function(*problem, codes)
    return codes, moved


def row_by_row(left, form, base, parameters, bits, rows, codes):
    return _row_by_row(left.clone(), form, base, UniformQuantizer(*parameters, bits), rows, codes)


@given(
    st.integers(1, 3), st.integers(1, 64), st.sampled_from([1, 5, 31, 32, 33, 100]), st.booleans(), st.integers(0, 999)
)
def test_codes_in_turn_are_those_of_pytorch(groups, rows, outputs, swept, seed):
    problem = block(groups, rows, outputs, swept, seed)
    (codes, moved), (codes_there, moved_there) = (
        chosen(problem, function) for function in (elementwise.codes_in_turn, row_by_row)
    )
    assert torch.equal(codes, codes_there)
    assert torch.equal(moved, moved_there)


@pytest.mark.parametrize("swept", [False, True])
def test_special_values_in_turn_are_those_of_pytorch(swept):
    special = torch.tensor([*SPECIAL, 1e300, -1e300, 0.25, 0.75, 1.25], dtype=torch.float64)
    left, form, _, _, bits, rows = block(2, 12, len(special), swept, 0)
    left[:, rows.start] = special
    base = special.expand_as(left).contiguous() if swept else None
    scale = torch.full((2, 1, len(special)), 0.5, dtype=torch.float64)
    problem = left, form, base, (scale, -torch.zeros_like(scale)), bits, rows
    for found, there in zip(chosen(problem, elementwise.codes_in_turn), chosen(problem, row_by_row), strict=True):
        assert_same(found, there)


def test_other_blocks_of_rows_are_left_to_pytorch():
    left, form, base, (scale, zero_point), bits, rows = block(2, 65, 6, True, 0)
    some, one = range(3, 40), torch.ones(1, 1, 1, dtype=torch.float64)
    assert chosen((left, form, base, (scale, zero_point), bits, some), elementwise.codes_in_turn)[1] is not None
    for problem in (
        (left, form, base, (scale, zero_point), bits, rows),  # 65 rows
        (left, form, base, (one, one), bits, some),
        (left.mT.contiguous().mT, form, base, (scale, zero_point), bits, some),
        (left.float(), form, base, (scale, zero_point), bits, some),
    ):
        assert chosen(problem, elementwise.codes_in_turn)[1] is None
