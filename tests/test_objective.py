"""The losses against direct computations in float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import adalog.objective
from adalog.objective import OwnError, ProductError, coprime, quantiles, thinned
from adalog.quantizers import log_fake_quantize, log_levels, log_thresholds, uniform_fake_quantize
from strategies import R, normal

STEPS = torch.tensor([0.01, 0.1, 0.5, 2.0], dtype=torch.float64)

# left (*batch, T, I), right (*batch, I, O), the dimensions of left that keep a loss of their own
PRODUCTS = {
    "activation, few outputs": ((9, 12), (12, 5), ()),
    "activation, many outputs": ((9, 12), (12, 40), ()),
    "weight, few tokens": ((5, 12), (12, 9), (0,)),
    "weight, many tokens": ((5, 12), (12, 60), (0,)),
    "queries by head": ((2, 3, 7, 4), (2, 3, 4, 7), (1,)),
    "queries per tensor": ((2, 3, 7, 4), (2, 3, 4, 7), ()),
    "attention per tensor": ((2, 3, 7, 7), (2, 3, 7, 4), ()),
    "values by head": ((2, 3, 4, 7), (2, 3, 7, 7), (1,)),
    "grouped patches": ((3, 8, 6), (3, 6, 2), (0,)),
    "grouped kernels": ((3, 4, 6), (3, 6, 10), (0, 1)),
}
every_product = pytest.mark.parametrize(("left", "right", "keep"), PRODUCTS.values(), ids=PRODUCTS)


def operands(left, right):
    """left, right, and right quantized coarsely."""
    right = normal(*right, seed=2)
    return normal(*left, seed=1), right, (right * 3).round() / 3


def points_of(shape, keep):
    """(K, 1, *groups), a step size for each candidate and group."""
    groups = [shape[dim] for dim in keep]
    factor = torch.linspace(1, 2, max(1, torch.Size(groups).numel()), dtype=torch.float64).view(groups)
    return (STEPS.view(-1, *(1 for _ in groups)) * factor)[:, None]


def rounding_candidates(left, keep):
    """Candidates that round to multiples of their step."""

    def candidates(points):
        shape = [size if dim in keep else 1 for dim, size in enumerate(left.shape)]
        step = points[:, 0].reshape(-1, *shape)
        return torch.round(left / step) * step

    return candidates


def direct(left, right, right_hat, keep, mask=None):
    """||Q(left) right_hat - left right||^2 of each candidate, as written."""
    quantized = rounding_candidates(left, keep)(points_of(left.shape, keep))
    if mask is not None:
        quantized = torch.where(mask.bool(), quantized, left)
    error = (quantized @ right_hat - left @ right).square()
    return error.sum([dim for dim in range(1, error.ndim) if dim - 1 not in keep])


@every_product
def test_product_error(left, right, keep):
    shape = left
    left, right, right_hat = operands(left, right)
    error = ProductError.of(left, right, right_hat, keep)
    loss = error.loss(rounding_candidates(left, keep), points_of(shape, keep))
    expected = direct(left, right, right_hat, keep)
    assert loss.shape == (len(STEPS), *(shape[dim] for dim in keep))
    torch.testing.assert_close(loss, expected, rtol=1e-11, atol=1e-11)


def test_both_branches_are_tested():
    branches = {ProductError.of(*operands(left, right), keep).gram for left, right, keep in PRODUCTS.values()}
    assert branches == {False, True}


@every_product
def test_masked_elements_stay_unquantized(left, right, keep):
    shape = left
    left, right, right_hat = operands(left, right)
    mask = (normal(*shape, seed=5) > 0).double()
    loss = ProductError.of(left, right, right_hat, keep, mask).loss(
        rounding_candidates(left, keep), points_of(shape, keep)
    )
    torch.testing.assert_close(loss, direct(left, right, right_hat, keep, mask), rtol=1e-11, atol=1e-11)


def first_summed(name):
    left, _, keep = PRODUCTS[name]
    return next(dim for dim in range(len(left)) if dim not in keep)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "name", [name for name, (left, _, keep) in PRODUCTS.items() if first_summed(name) < len(left) - 1]
)
def test_a_sample_scores_every_stride_th_image_or_row(name, masked):
    """Up to a constant, which moves no candidate."""
    (shape, right, keep), dim = PRODUCTS[name], first_summed(name)
    shape, right = list(shape), list(right)
    if dim < len(shape) - 2:
        right[dim] = 33  # images of both operands
    shape[dim] = 33
    left, right, right_hat = operands(shape, right)
    mask = (normal(*shape, seed=5) > 0).double() if masked else None
    sample = ProductError.of(left, right, right_hat, keep, mask).sample(2, least=1)
    take = (slice(None),) * dim + (slice(None, None, 2),)
    loss = sample.loss(rounding_candidates(left[take], keep), points_of(shape, keep))
    rights = (value[take] if dim < left.ndim - 2 else value for value in (right, right_hat))
    expected = direct(left[take], *rights, keep, None if mask is None else mask[take])
    torch.testing.assert_close(loss - loss[:1], expected - expected[:1], rtol=1e-10, atol=1e-10)


def test_no_sample_of_what_is_short_or_has_losses_of_its_own():
    left, right = normal(32, 12, seed=1), normal(12, 5, seed=2)
    assert ProductError.of(left, right, right).sample(2) is None
    assert ProductError.of(left, right, right).sample(2, least=32) is not None
    assert ProductError.of(left, right, right).sample(2, least=33) is None
    assert ProductError.of(left[:31], right, right).sample(2, least=1) is None
    assert ProductError.of(left, right, right, keep=(0,)).sample(2, least=1) is None


@every_product
def test_no_error_without_quantization(left, right, keep):
    left, right, _ = operands(left, right)
    error = ProductError.of(left, right, right, keep)
    loss = error.loss(lambda points: left.expand(len(points), *left.shape).clone(), points_of(left.shape, keep))
    assert not loss.any()


@pytest.mark.parametrize("outputs", [5, 40], ids=["direct", "gram"])
def test_nothing_large_cancels(outputs):
    """A common offset of 1000 costs the difference of two float32 outputs its digits, but not the error form."""
    left = (normal(9, 12, seed=1) + 1000).float()
    right = normal(12, outputs, seed=2).float()
    error = ProductError.of(left, right, right)
    step = points_of(left.shape, ()).float()
    loss = error.loss(rounding_candidates(left, ()), step)
    delta = rounding_candidates(left, ())(step).double() - left.double()
    expected = (delta @ right.double()).square().sum((1, 2))
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)


@every_product
def test_chunks_do_not_change_a_product_error(left, right, keep, monkeypatch):
    shape = left
    left, right, right_hat = operands(left, right)
    error = ProductError.of(left, right, right_hat, keep)
    points, calls = points_of(shape, keep), []

    def candidates(part):
        calls.append(len(part))
        return rounding_candidates(left, keep)(part)

    whole = error.loss(candidates, points)
    monkeypatch.setattr(adalog.objective, "CHUNK_ELEMENTS", 1)
    parts = error.loss(candidates, points)
    assert calls == [4, 1, 1, 1, 1]
    torch.testing.assert_close(parts, whole, rtol=1e-13, atol=1e-13)


def test_the_operands_are_not_modified():
    left, right, right_hat = operands((9, 12), (12, 40))
    before = [each.clone() for each in (left, right, right_hat)]
    error = ProductError.of(left, right, right_hat)
    first, second = (error.loss(rounding_candidates(left, ()), points_of(left.shape, ())) for _ in range(2))
    assert torch.equal(first, second)
    assert all(torch.equal(now, then) for now, then in zip((left, right, right_hat), before, strict=True))


# --- a sample's own error -------------------------------------------------------------------------------------


@pytest.mark.parametrize("fraction", [0.0, 0.001, 0.1, 0.5, 0.77, 0.9, 1.0])
@pytest.mark.parametrize("size", [1, 2, 7, 100])
def test_quantile(fraction, size):
    sample = normal(3, size)
    torch.testing.assert_close(quantiles(sample, (fraction,))[0], torch.quantile(sample, fraction, dim=1))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_own_error_of_uniform_candidates(bits):
    sample = normal(4, 300, seed=1) * torch.tensor([[0.1], [1.0], [10.0], [0.0]], dtype=torch.float64)
    scale = normal(6, 4, 1, seed=2).exp() * 2 / 2**bits
    zero_point = (normal(6, 4, 1, seed=3) * 2 + 2 ** (bits - 1)).round().clamp(0, 2**bits - 1)
    code = torch.arange(2**bits, dtype=torch.float64)
    loss = OwnError(sample).loss(scale * (code - zero_point), scale * (code[:-1] + 0.5 - zero_point))
    expected = (uniform_fake_quantize(sample, scale, zero_point, bits) - sample).square().sum(-1)
    assert loss.shape == (6, 4)
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("reading", ["saturate", "zero", "zero-coded"])
@pytest.mark.parametrize("rounding", ["log", "nearest"])
def test_own_error_of_logarithmic_candidates(rounding, reading):
    sample = (normal(2, 300) * 3 - 4).exp()
    sample[:, :5] = 0
    bases, scales = [5, 20, 90], [0.3, 1.0, 4.0]
    levels, thresholds, expected = [], [], []
    for base, scale in zip(bases, scales, strict=True):
        levels.append(log_levels(base, R, 4, beyond=reading).flip(0) * scale)
        thresholds.append(log_thresholds(base, R, 4, beyond=reading, rounding=rounding).flip(0) * scale)
        size = torch.tensor(scale, dtype=torch.float64)
        value = log_fake_quantize(sample, size, base, R, 4, beyond=reading, rounding=rounding)
        expected.append((value - sample).square().sum(1))
    spread = [torch.stack(rows)[:, None].expand(-1, 2, -1) for rows in (levels, thresholds)]
    torch.testing.assert_close(OwnError(sample).loss(*spread), torch.stack(expected), rtol=1e-9, atol=1e-9)


def test_chunks_do_not_change_an_own_error(monkeypatch):
    sample = normal(3, 50)
    levels = normal(7, 3, 8, seed=1).sort(-1).values
    thresholds = (levels[..., 1:] + levels[..., :-1]) / 2
    own = OwnError(sample)
    whole = own.loss(levels, thresholds)
    monkeypatch.setattr(adalog.objective, "CHUNK_ELEMENTS", 1)
    assert torch.equal(own.loss(levels, thresholds), whole)
    nearest = (sample[None, :, :, None] - levels[:, :, None]).abs().min(-1).values.square().sum(-1)
    torch.testing.assert_close(whole, nearest, rtol=1e-10, atol=1e-10)


# --- thinning --------------------------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.sampled_from([15, 96, 192, 196, 384, 1000]))
def test_a_stride_meets_every_column(stride, width):
    rows = 50
    taken = {index % width for index in range(0, rows * width, coprime(stride, width))}
    if coprime(stride, width) <= rows:
        assert taken == set(range(width))
    assert coprime(stride, width) >= stride
    assert coprime(stride, width) == stride or math.gcd(stride, width) > 1


@pytest.mark.parametrize("channels", [96, 192])
def test_a_thinned_sample_holds_every_channel(channels, monkeypatch):
    monkeypatch.setattr("adalog.objective.PART_ELEMENTS", 4096)
    values = torch.arange(channels).repeat(500, 1)  # (T, C): each value is its channel's number
    some = thinned(values.reshape(1, -1))
    assert 2048 <= some.numel() <= 8192
    assert some.unique().numel() == channels
    assert thinned(values[:10].reshape(1, -1)).numel() == 10 * channels  # a small one stays whole


def test_quantiles_of_a_thinned_sample_keep_the_extremes(monkeypatch):
    monkeypatch.setattr("adalog.objective.PART_ELEMENTS", 1000)
    sample = torch.randn(2, 20001, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sample[0, 1], sample[1, 2] = 99.0, -99.0
    low, middle, high = quantiles(sample, (0.0, 0.5, 1.0))
    assert torch.equal(low, sample.amin(1))
    assert torch.equal(high, sample.amax(1))
    assert middle.abs().max() < 0.15


@pytest.mark.parametrize("shape", [(1000, 16), (40, 3, 30, 16), (5, 400, 9)])
def test_parts_add_up_to_the_whole(shape, monkeypatch):
    """Of rows, of images with heads, and of the rows of a grouped convolution, which keep a loss a group."""
    monkeypatch.setattr("adalog.objective.PART_ELEMENTS", 2048)
    generator = torch.Generator().manual_seed(1)
    left = torch.randn(shape, generator=generator, dtype=torch.float64)
    lead = shape[:-2]
    right = torch.randn(*lead, shape[-1], 7, generator=generator, dtype=torch.float64)
    keep = {2: (), 4: (1,), 3: (0,)}[len(shape)]
    error = ProductError.of(left, right, right + 0.01 * right.roll(1, -1), keep)
    parts = error.parts()
    assert len(parts) > 1
    assert max(part.left.numel() for part in parts) <= 3 * 2048
    points = torch.linspace(0.1, 0.5, 5, dtype=torch.float64)

    def rounded(values):
        def candidates(steps):
            step = steps.view(-1, *(1 for _ in values.shape))
            return (values / step).round() * step

        return candidates

    whole = error.loss(rounded(left), points)
    together = sum(part.loss(rounded(part.left), points) for part in parts)
    torch.testing.assert_close(together, whole, rtol=1e-10, atol=0)
