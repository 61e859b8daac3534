"""The losses against direct computations in float64."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import adalog.search.objective
from adalog.quantizers import log_levels, log_thresholds, uniform_fake_quantize
from adalog.search.objective import OwnError, ProductError, gram_matrix
from adalog.search.quantiles import coprime, quantiles, thinned
from strategies import R, log_fake_quantize, normal

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


def total(values, keep):
    """The sums over all dimensions but these."""
    return values.sum([dim for dim in range(values.ndim) if dim not in keep])


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


def row_errors(left, right, right_hat, keep, mask=None):
    """Each row's squared error under each candidate, (K, *batch, T)."""
    quantized = rounding_candidates(left, keep)(points_of(left.shape, keep))
    if mask is not None:
        quantized = torch.where(mask.bool(), quantized, left)
    return (quantized @ right_hat - left @ right).square().sum(-1)


def by_group(values, index, shape, keep):
    """Sums of the chosen rows' values (K, n), one for each kept index of `left`: (K, *groups)."""
    sizes = [shape[dim] for dim in keep]
    places = torch.unravel_index(index, shape[:-1])
    group = torch.zeros_like(index)
    for dim in keep:
        group = group * shape[dim] + places[dim]
    return values.new_zeros(len(values), math.prod(sizes)).index_add_(1, group, values).view(-1, *sizes)


def rows_of_sample(error, rows):
    """Which rows a sample takes, counted through all matrices: as its operand (*batch, T, I)."""
    *lead, width = error.left.shape
    index = torch.arange(math.prod(lead), dtype=torch.float64).view(*lead, 1).expand(*lead, width)
    return replace(error, left=index).sample(rows).left[..., 0].long()


SAMPLED = {  # with the count of images where each has to be met
    "tokens": ((640, 6), (6, 5), (), 10),
    "tokens, gram": ((640, 6), (6, 40), (), 10),
    "queries by head": ((4, 3, 97, 9), (4, 3, 9, 7), (1,), 4),
    "queries by head, gram": ((4, 3, 97, 5), (4, 3, 5, 97), (1,), 4),
    "queries per tensor": ((4, 1, 97, 9), (4, 1, 9, 7), (), 4),
    "windows by head": ((64, 2, 9, 6), (64, 2, 6, 5), (1,), None),
    "windows by head, gram": ((64, 2, 9, 6), (64, 2, 6, 9), (1,), None),
    "windows per tensor": ((64, 2, 9, 6), (64, 2, 6, 5), (), None),
    "grouped patches": ((3, 640, 6), (3, 6, 2), (0,), 30),
    "grouped patches per tensor": ((3, 640, 6), (3, 6, 2), (), 3),
}
every_sample = pytest.mark.parametrize(("shape", "right", "keep", "images"), SAMPLED.values(), ids=SAMPLED)


@pytest.mark.parametrize("masked", [False, True])
@every_sample
def test_a_sample_scores_some_rows_of_every_image(shape, right, keep, images, masked, monkeypatch):
    """Of the Gram form up to a constant, which moves no candidate."""
    monkeypatch.setattr("adalog.search.objective._ROUGH_ELEMENTS", 1)
    left, right, right_hat = operands(shape, right)
    mask = (normal(*shape, seed=5) > 0).double() if masked else None
    error = ProductError.of(left, right, right_hat, keep, mask)
    sample, index = error.sample(80), rows_of_sample(error, 80)
    loss = sample.loss(rounding_candidates(sample.left, keep), points_of(shape, keep))
    each = row_errors(left, right, right_hat, keep, mask).flatten(1)
    expected = by_group(each[:, index.flatten()], index.flatten(), shape, keep)
    if error.gram:
        loss, expected = loss - loss[:1], expected - expected[:1]
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)

    assert index.unique().numel() == index.numel()  # each at most once
    groups = math.prod(shape[dim] for dim in keep)
    assert 40 <= index.numel() / groups <= 160
    if images is not None:
        assert (index // (left[..., 0].numel() // images)).unique().numel() == images
    else:  # of many short windows, evenly spread ones
        windows = (index // math.prod(shape[1:-1])).flatten(1)
        assert bool((windows == windows[:, :1]).all())
        assert windows[:, 0].diff().unique().numel() == 1


@every_sample
def test_a_sample_may_be_several_times_as_large(shape, right, keep, images, monkeypatch):
    monkeypatch.setattr("adalog.search.objective._ROUGH_ELEMENTS", 1)
    error = ProductError.of(*operands(shape, right), keep)
    assert torch.equal(error.sample(20, times=4).left, error.sample(80).left)


def test_a_sample_takes_other_rows_of_each_image(monkeypatch):
    monkeypatch.setattr("adalog.search.objective._ROUGH_ELEMENTS", 1)
    left, right, right_hat = operands((8, 3, 64, 9), (8, 3, 9, 7))
    index = rows_of_sample(ProductError.of(left, right, right_hat, (1,)), 128) % 64
    assert index.shape == (8, 3, 64 // 5)  # the next stride from 4 on that meets every column of an even grid
    assert bool((index.diff(dim=-1) == 5).all())
    assert index[..., 0].unique().tolist() == [0, 1, 2, 3, 4]


@given(
    st.integers(1, 40), st.integers(1, 4), st.integers(1, 120), st.integers(1, 300), st.sampled_from([(), (1,), (0,)])
)
def test_a_sample_meets_no_row_twice_and_no_matrix_more_often(batch, heads, length, rows, keep):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("adalog.search.objective._ROUGH_ELEMENTS", 1)
        left = torch.zeros(batch, heads, length, 2)
        error = ProductError.of(left, torch.zeros(batch, heads, 2, 2), torch.zeros(batch, heads, 2, 2), keep)
        index = rows_of_sample(error, rows)
    assert index.numel() > 0
    assert index.unique().numel() == index.numel()
    matrix = index // length
    assert bool((matrix == matrix[..., :1]).all())
    assert matrix[..., 0].unique().numel() == matrix[..., 0].numel()  # each one's rows stand together
    for dim in keep:
        assert index.shape[dim] == left.shape[dim]  # what has a loss of its own keeps it
    if batch * heads * length < 2 * rows:
        assert error.sample(rows) is error


@pytest.mark.parametrize("keep", [(), (1,)])
@pytest.mark.parametrize("masked", [False, True])
def test_a_sample_of_channels_scores_some_columns(keep, masked, monkeypatch):
    """The rows of V, transposed, all serve: some of the tokens that read them stand for the rest."""
    left, right, right_hat = operands((4, 3, 8, 97), (4, 3, 97, 97))
    mask = (normal(4, 3, 8, 97, seed=5) > 0).double() if masked else None
    error = ProductError.of(left, right, right_hat, keep, mask, alike=False)
    for rows, stride in ((40, 6), (100, 3 if keep else 6), (190, 2 if keep else 6)):  # at least 16 columns are left
        sample = error.sample(rows)
        assert sample.left is error.left
        loss = sample.loss(rounding_candidates(left, keep), points_of(left.shape, keep))
        some = right[..., ::stride], right_hat[..., ::stride]
        torch.testing.assert_close(loss, direct(left, *some, keep, mask), rtol=1e-11, atol=1e-11)


def test_all_rows_serve_where_they_are_few_or_keep_their_losses(monkeypatch):
    left, right = normal(640, 12, seed=1), normal(12, 5, seed=2)
    tokens = ProductError.of(left, right, right)
    assert tokens.sample(1) is tokens  # 7,680 elements are few
    monkeypatch.setattr("adalog.search.objective._ROUGH_ELEMENTS", 12 * 160)
    assert tokens.sample(321) is tokens
    assert len(tokens.sample(320).left) == 640 // 3  # 2 is no stride that meets every column
    assert len(tokens.sample(1).left) == 640 // 7  # of as many rows as make that many elements
    monkeypatch.setattr("adalog.search.objective._ROUGH_ELEMENTS", 1)
    for kept in (
        ProductError.of(left, right, right, own_dims=(0,)),
        ProductError.of(left.view(4, 160, 12), right.expand(4, 12, 5), right.expand(4, 12, 5), own_dims=(0, 1)),
        ProductError.of(left, right, right, alike=False),
        ProductError.of(left, normal(12, 40), normal(12, 40), alike=False),
    ):
        assert kept.sample(10) is kept


@pytest.mark.parametrize("tokens", [9, 60], ids=["direct", "gram"])
@pytest.mark.parametrize("chunk", [1, 30, 100, 1000])
def test_slices_of_the_rows_are_the_whole(tokens, chunk, monkeypatch):
    left, right, right_hat = operands((23, 12), (12, tokens))
    error, points = ProductError.of(left, right, right_hat, (0,)), points_of((23, 12), (0,))
    whole = error.loss(rounding_candidates(left, (0,)), points)
    monkeypatch.setattr(adalog.search.objective, "chunk_elements", lambda _: chunk)
    pieces = error.by_rows()
    assert {len(piece.left) for piece in pieces[:-1]} <= {-(-23 // max(1, 276 // chunk))}
    assert torch.equal(torch.cat([piece.left for piece in pieces]), left)
    losses, start = [], 0
    for piece in pieces:
        rows = slice(start, start := start + len(piece.left))
        losses.append(piece.loss(rounding_candidates(piece.left, (0,)), points[..., rows]))
    torch.testing.assert_close(torch.cat(losses, 1), whole, rtol=1e-12, atol=1e-12)
    assert (len(pieces) == 1) == (chunk > 138)


@every_product
def test_only_the_rows_of_a_weight_are_sliced(left, right, keep, monkeypatch):
    monkeypatch.setattr(adalog.search.objective, "chunk_elements", lambda _: 1)
    left, right, right_hat = operands(left, right)
    error = ProductError.of(left, right, right_hat, keep)
    assert len(error.by_rows()) == (len(left) if keep == (0,) and left.ndim == 2 else 1)
    assert len(ProductError.of(left, right, right_hat, keep, torch.ones_like(left)).by_rows()) == 1


# --- bfloat16 --------------------------------------------------------------------------------------------------------


BFLOAT16 = {
    "activation, few outputs": ((200, 48), (48, 36), ()),
    "activation, many outputs": ((200, 48), (48, 90), ()),
    "weight, few tokens": ((6, 48), (48, 40), (0,)),
    "weight, many tokens": ((6, 48), (48, 200), (0,)),
    "queries by head": ((4, 3, 40, 36), (4, 3, 36, 40), (1,)),
    "values by head": ((4, 3, 16, 40), (4, 3, 40, 40), (1,)),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("left", "right", "keep"), BFLOAT16.values(), ids=BFLOAT16)
def test_products_in_bfloat16_choose_as_well(left, right, keep, seed, monkeypatch):
    monkeypatch.setattr(adalog.search.objective, "multiplies_bfloat16", lambda _: True)
    shape = left
    left, right = normal(*left, seed=seed).float(), normal(*right, seed=seed + 10).float()
    error = ProductError.of(left, right, (right * 8).round() / 8, keep)
    fast = error.fast()
    assert fast.factor.dtype == torch.bfloat16
    groups = [shape[dim] for dim in keep]
    points = torch.linspace(0.2, 1.2, 60).view(-1, 1, *(1 for _ in groups)).expand(-1, 1, *groups)
    exact, rough = (each.loss(rounding_candidates(left, keep), points) for each in (error, fast))
    assert rough.dtype == torch.float32
    assert not fast.gram
    if error.gram:  # the root of a Gram matrix gives losses up to one constant in each group
        rough = rough + error.constant - total(fast.base.square(), keep)
    torch.testing.assert_close(rough, exact, rtol=1e-2, atol=0)
    assert not torch.equal(rough, exact)
    chosen = exact.gather(0, rough.argmin(0, keepdim=True))[0]
    assert bool((chosen <= 1.001 * exact.amin(0)).all())


def test_bfloat16_only_where_it_is_faster(monkeypatch):
    wide, narrow = (
        ProductError.of(*(each.to(dtype) for each in operands((9, 40), (40, 16))))
        for dtype in (torch.float64, torch.float32)
    )
    few = ProductError.of(*(each.float() for each in operands((9, 40), (40, 15))))
    monkeypatch.setattr(adalog.search.objective, "multiplies_bfloat16", lambda _: False)
    assert narrow.fast() is narrow
    monkeypatch.setattr(adalog.search.objective, "multiplies_bfloat16", lambda _: True)
    assert wide.fast() is wide
    assert few.fast() is few
    fast = narrow.fast()
    assert (fast.left.dtype, fast.base.dtype, fast.factor.dtype) == (torch.float32, torch.float32, torch.bfloat16)


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
    monkeypatch.setattr(adalog.search.objective, "chunk_elements", lambda _: 1)
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
    monkeypatch.setattr(adalog.search.objective, "chunk_elements", lambda _: 1)
    assert torch.equal(own.loss(levels, thresholds), whole)
    nearest = (sample[None, :, :, None] - levels[:, :, None]).abs().min(-1).values.square().sum(-1)
    torch.testing.assert_close(whole, nearest, rtol=1e-10, atol=1e-10)


# --- thinning --------------------------------------------------------------------------------------------------------


@settings(max_examples=100)
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
    monkeypatch.setattr("adalog.search.quantiles.SORTED_ELEMENTS", 4096)
    values = torch.arange(channels).repeat(500, 1)  # (T, C): each value is its channel's number
    some = thinned(values.reshape(1, -1))
    assert 2048 <= some.numel() <= 8192
    assert some.unique().numel() == channels
    assert thinned(values[:10].reshape(1, -1)).numel() == 10 * channels  # a small one stays whole


def test_quantiles_of_a_thinned_sample_keep_the_extremes(monkeypatch):
    monkeypatch.setattr("adalog.search.quantiles.SORTED_ELEMENTS", 1000)
    monkeypatch.setattr("adalog.search.quantiles._SORTED_OF_ROW", 500)
    sample = torch.randn(2, 20001, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sample[0, 1], sample[1, 2] = 99.0, -99.0
    assert 400 <= thinned(sample).shape[1] <= 501
    low, middle, high = quantiles(sample, (0.0, 0.5, 1.0))
    assert torch.equal(low, sample.amin(1))
    assert torch.equal(high, sample.amax(1))
    assert middle.abs().max() < 0.15


def test_a_thinned_sample_holds_so_many_values_of_each_row(monkeypatch):
    monkeypatch.setattr("adalog.search.quantiles.SORTED_ELEMENTS", 4096)
    monkeypatch.setattr("adalog.search.quantiles._SORTED_OF_ROW", 512)
    for rows, most in ((1, 4096), (4, 1024), (8, 512), (100, 512)):
        some = thinned(torch.arange(5000).repeat(rows, 1))
        assert some.shape[0] == rows
        assert most / 2 <= some.shape[1] <= 5000 // (5000 // most) + 1
        assert bool((some.diff(dim=1) == some[0, 1]).all())


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", [(1000, 16), (40, 3, 30, 16), (5, 400, 9)])
def test_parts_add_up_to_the_whole(shape, masked, monkeypatch):
    """Of rows, of images with heads, and of the rows of a grouped convolution, which keep a loss a group."""
    monkeypatch.setattr("adalog.search.objective.chunk_elements", lambda _: 1024)
    generator = torch.Generator().manual_seed(1)
    left = torch.randn(shape, generator=generator, dtype=torch.float64)
    lead = shape[:-2]
    right = torch.randn(*lead, shape[-1], 7, generator=generator, dtype=torch.float64)
    keep = {2: (), 4: (1,), 3: (0,)}[len(shape)]
    mask = (normal(*shape, seed=5) > 0).double() if masked else None
    error = ProductError.of(left, right, right + 0.01 * right.roll(1, -1), keep, mask)
    parts = error.splits()
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


# --- leading directions of a Gram matrix ------------------------------------------------------------------------------


def weights_of_tokens(decay, width=192):
    """A weight with 12 rows, tokens whose directions have lengths that fall like this, and these tokens moved a bit."""
    turn = torch.linalg.qr(normal(width, width, seed=3)).Q
    right = (turn * decay ** torch.arange(width)) @ normal(width, 400, seed=2)
    return normal(12, width, seed=1), right, 1.05 * right


def leading_and_exact(decay):
    """The losses of a sample and of all tokens, both above those of the first candidate."""
    left, right, right_hat = weights_of_tokens(decay)
    error = ProductError.of(left, right, right_hat, (0,))
    assert error.gram
    sample, points = error.leading(), points_of(left.shape, (0,))
    exact = direct(left, right, right_hat, (0,))
    found = sample.loss(rounding_candidates(left, (0,)), points)
    return sample, found - found[:1], exact - exact[:1]


def test_leading_directions_are_all_of_a_matrix_of_their_rank():
    sample, found, exact = leading_and_exact(0.5)  # 2**-64 is left of the last direction
    assert sample.factor.shape == (192, 64)
    assert not sample.gram
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-4)


def test_a_wide_matrix_has_no_more_directions_than_a_narrower_one(monkeypatch):
    monkeypatch.setattr(adalog.search.objective, "_DIRECTIONS", 24)
    sample, found, exact = leading_and_exact(0.5)
    assert sample.factor.shape == (192, 24)
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("decay", [0.95, 0.99, 1.0])
def test_the_diagonal_stands_for_what_leading_directions_leave(decay):
    sample, found, exact = leading_and_exact(decay)
    assert float((found - exact).norm() / exact.norm()) < 0.1
    without = replace(sample, rest=None).loss(
        rounding_candidates(sample.left, (0,)), points_of(sample.left.shape, (0,))
    )
    assert float((without - without[:1] - exact).norm() / exact.norm()) > 1.5 * float(
        (found - exact).norm() / exact.norm()
    )


def test_what_is_linear_in_the_error_is_exact():
    """A tiny step of one weight: its square is nothing."""
    left, right, right_hat = weights_of_tokens(1.0)
    error = ProductError.of(left, right, right_hat, (0,))
    step = torch.zeros(12, 192, dtype=torch.float64)
    step[:, 5] = 1e-6

    def moved(points):
        return torch.stack([left, left + step, left - step])

    def slope(of):
        _, up, down = of.loss(moved, torch.zeros(3, 1, 12))
        return up - down

    torch.testing.assert_close(slope(error.leading()), slope(error), rtol=1e-4, atol=1e-12)


def test_narrow_weights_and_dead_tokens():
    left, right, right_hat = weights_of_tokens(0.9, width=191)
    narrow = ProductError.of(left, right, right_hat, (0,))
    assert narrow.leading() is narrow
    zeros = torch.zeros(192, 400, dtype=torch.float64)
    dead = ProductError.of(normal(12, 192), zeros, zeros, (0,)).leading()
    assert float(dead.loss(rounding_candidates(dead.left, (0,)), points_of((12, 192), (0,))).max()) < 1e-30


def test_a_few_channels_of_very_different_power_have_leading_directions():
    """Uniform codes of 3 bits leave so few after GELU; LAPACK does not find them in float32."""
    alive = torch.tensor([118, 208, 294, 312, 512, 552, 598, 692])
    power = torch.diag(torch.tensor([109.03, 136067.0, 54.514, 54.514, 3652.4, 109.03, 109.03, 12484.0]))
    power[1, 4] = power[4, 1] = 21806.0
    power[1, 7] = power[7, 1] = 40886.0
    power[4, 7] = power[7, 4] = 6487.2
    gram = torch.zeros(768, 768)
    gram[alive[:, None], alive] = power
    left, right = normal(12, 768, seed=1).float(), normal(768, 800, seed=2).float()
    error = replace(ProductError.of(left, right, right, (0,)), factor=gram)
    sample, points = error.leading(), points_of(left.shape, (0,)).float()
    found, exact = (each.loss(rounding_candidates(left, (0,)), points) for each in (sample, error))
    torch.testing.assert_close(found, exact, rtol=1e-2, atol=1)


def test_slices_of_a_weight_have_the_same_leading_part(monkeypatch):
    error = ProductError.of(*weights_of_tokens(0.95), (0,)).leading()
    points = points_of((12, 192), (0,))
    whole = error.loss(rounding_candidates(error.left, (0,)), points)
    monkeypatch.setattr(adalog.search.objective, "chunk_elements", lambda _: 1000)
    first, *others = error.by_rows()
    assert others
    some = points[..., : len(first.left)]
    torch.testing.assert_close(
        first.loss(rounding_candidates(first.left, (0,)), some), whole[:, : len(first.left)], rtol=1e-9, atol=1e-9
    )


def test_leading_directions_are_drawn_where_the_values_are():
    error = ProductError.of(*weights_of_tokens(0.95), (0,))
    expected = error.leading()
    with torch.device("meta"):
        found = error.leading()
    assert torch.equal(found.factor, expected.factor)


@pytest.mark.parametrize("shape", [(1, 7), (64, 9), (65, 9), (3, 130, 5), (515, 11), (900, 3)])
def test_a_gram_matrix_is_made_of_every_pair_of_rows(shape):
    rows = normal(*shape, seed=3)
    found = gram_matrix(rows)
    torch.testing.assert_close(found, torch.einsum("...it,...jt->...ij", rows, rows), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("left", "right", "keep"), [BFLOAT16["weight, many tokens"], BFLOAT16["queries by head"]])
def test_a_root_stands_for_a_gram_matrix(left, right, keep, dtype):
    shape, left, right = left, normal(*left, seed=1).to(dtype), normal(*right, seed=2).to(dtype)
    error = ProductError.of(left, right, (right * 3).round() / 3, keep, gram=True)
    root = error.rooted()
    assert not root.gram
    points = points_of(shape, keep).to(dtype)
    exact, found = (each.loss(rounding_candidates(left, keep), points) for each in (error, root))
    found = found + error.constant - total(root.base.square(), keep)
    torch.testing.assert_close(found, exact, rtol=1e-4 if dtype == torch.float32 else 1e-9, atol=0)


def test_a_root_of_what_was_never_seen():
    """Channels that are always zero, and tokens that are all alike, leave a Gram matrix without an inverse."""
    left = normal(4, 24, seed=1).float()
    right = normal(24, 1, seed=2).float().expand(24, 60).clone()
    right[5] = 0
    error = ProductError.of(left, right, right * 1.01, (0,))
    assert error.gram
    points = points_of(left.shape, (0,)).float()
    exact, found = (each.loss(rounding_candidates(left, (0,)), points) for each in (error, error.rooted()))
    found = found + (exact - found).mean(0)
    assert bool(found.isfinite().all())
    torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-3 * float(exact.max()))
    nothing = ProductError.of(left, right, torch.zeros_like(right), (0,)).rooted()
    assert bool(nothing.loss(rounding_candidates(left, (0,)), points).isfinite().all())


def test_a_root_of_a_matrix_with_more_rounding_than_a_factor_bears():
    """Many equal tokens, as of blank images: rounding in their sum leaves directions of negative power."""
    left, right = normal(4, 24, seed=1).float(), normal(24, 1, seed=2).float().expand(24, 60).clone()
    error = ProductError.of(left, right, right * 1.01, (0,))
    allowed = float(error.factor.diagonal().max()) * torch.finfo(torch.float32).eps * 24
    rounded = replace(error, factor=error.factor - 10 * allowed * torch.eye(24))
    assert int(torch.linalg.cholesky_ex(rounded.factor + allowed * torch.eye(24)).info)
    points = points_of(left.shape, (0,)).float()
    exact, found = (each.loss(rounding_candidates(left, (0,)), points) for each in (error, rounded.rooted()))
    found = found + (exact - found).mean(0)
    torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-3 * float(exact.max()))


def test_a_large_error_along_rare_directions_costs_more_than_a_small_one(monkeypatch):
    """Neighbours in an image are nearly equal, and a weight that takes their difference sees little of them.

    A Gram matrix in bfloat16 would take the loss of such a weight set to zero for less than nothing.
    """
    monkeypatch.setattr(adalog.search.objective, "multiplies_bfloat16", lambda _: True)
    smooth = normal(1, 4000, seed=1) * 3 + 2
    right = (smooth + 0.03 * normal(27, 4000, seed=2)).float()
    left = normal(40, 27, seed=3)
    left = (left - left.mean(1, keepdim=True)).float()
    error = ProductError.of(left, right, (right * 200).round() / 200, (0,))
    assert error.gram
    steps = torch.tensor([1e-3, 1e9]).view(2, 1, 1).expand(2, 1, len(left))  # the second leaves nothing of the weight
    fine, nothing = error.fast().loss(rounding_candidates(left, (0,)), steps)
    exact_fine, exact_nothing = error.loss(rounding_candidates(left, (0,)), steps)
    assert bool((exact_nothing > 2 * exact_fine).all())
    assert bool((nothing > fine).all())
