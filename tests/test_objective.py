"""The losses against direct computations in float64."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import adalog.search.objective
from adalog.quantizers import log_levels, log_thresholds
from adalog.quantizers.quantiles import coprime, quantiles, sample_quantiles, thin
from adalog.search.forms import GramForm
from adalog.search.objective import OwnError, ProductError
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


def squares(left, right, right_hat, keep, mask=None):
    """Each output's squared error under each candidate."""
    quantized = rounding_candidates(left, keep)(points_of(left.shape, keep))
    if mask is not None:
        quantized = torch.where(mask.bool(), quantized, left)
    return (quantized @ right_hat - left @ right).square()


def direct(left, right, right_hat, keep, mask=None):
    """||Q(left) right_hat - left right||^2 of each candidate, as written."""
    return total(squares(left, right, right_hat, keep, mask), (0, *(dim + 1 for dim in keep)))


def total(values, keep):
    """The sums over all dimensions but these."""
    return values.sum([dim for dim in range(values.ndim) if dim not in keep])


@pytest.mark.parametrize("masked", [False, True])
@every_product
def test_product_error(left, right, keep, masked):
    """Masked elements stay unquantized."""
    shape = left
    left, right, right_hat = operands(left, right)
    mask = (normal(*shape, seed=5) > 0).double() if masked else None
    error = ProductError.of(left, right, right_hat, keep, mask)
    loss = error.loss(rounding_candidates(left, keep), points_of(shape, keep))
    assert loss.shape == (len(STEPS), *(shape[dim] for dim in keep))
    torch.testing.assert_close(loss, direct(left, right, right_hat, keep, mask), rtol=1e-11, atol=1e-11)


def test_both_branches_are_tested():
    branches = {
        isinstance(ProductError.of(*operands(left, right), keep).form, GramForm)
        for left, right, keep in PRODUCTS.values()
    }
    assert branches == {False, True}


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
    each = squares(left, right, right_hat, keep, mask).sum(-1).flatten(1)
    expected = by_group(each[:, index.flatten()], index.flatten(), shape, keep)
    if isinstance(error.form, GramForm):
        loss, expected = loss - loss[:1], expected - expected[:1]
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)

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


@pytest.mark.parametrize("fraction", [0.0, 0.001, 0.1, 0.5, 0.77, 0.9, 1.0])
@pytest.mark.parametrize("size", [1, 2, 7, 100])
def test_quantile(fraction, size):
    sample = normal(3, size)
    for computed in (quantiles(sample, (fraction,)), sample_quantiles(sample, (fraction,))):
        torch.testing.assert_close(computed[0], torch.quantile(sample, fraction, dim=1))


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
    monkeypatch.setattr("adalog.quantizers.quantiles.SORTED_ELEMENTS", 4096)
    values = torch.arange(channels).repeat(500, 1)  # (T, C): each value is its channel's number
    some = thin(values.reshape(1, -1))
    assert 2048 <= some.numel() <= 8192
    assert some.unique().numel() == channels
    assert thin(values[:10].reshape(1, -1)).numel() == 10 * channels  # a small one stays whole


def test_quantiles_of_a_thinned_sample_keep_the_extremes(monkeypatch):
    monkeypatch.setattr("adalog.quantizers.quantiles.SORTED_ELEMENTS", 1000)
    monkeypatch.setattr("adalog.quantizers.quantiles._SORTED_OF_ROW", 500)
    sample = normal(2, 20001)
    sample[0, 1], sample[1, 2] = 99.0, -99.0
    assert 400 <= thin(sample).shape[1] <= 501
    low, middle, high = sample_quantiles(sample, (0.0, 0.5, 1.0))
    assert torch.equal(low, sample.amin(1))
    assert torch.equal(high, sample.amax(1))
    assert middle.abs().max() < 0.15


def test_a_thinned_sample_holds_so_many_values_of_each_row(monkeypatch):
    monkeypatch.setattr("adalog.quantizers.quantiles.SORTED_ELEMENTS", 4096)
    monkeypatch.setattr("adalog.quantizers.quantiles._SORTED_OF_ROW", 512)
    for rows, most in ((1, 4096), (4, 1024), (8, 512), (100, 512)):
        some = thin(torch.arange(5000).repeat(rows, 1))
        assert some.shape[0] == rows
        assert most / 2 <= some.shape[1] <= 5000 // (5000 // most) + 1
        assert bool((some.diff(dim=1) == some[0, 1]).all())


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("shape", "keep"), [((1000, 16), ()), ((40, 3, 30, 16), (1,)), ((5, 400, 9), (0,))])
def test_parts_add_up_to_the_whole(shape, keep, masked, monkeypatch):
    """Of rows, of images with heads, and of the rows of a grouped convolution, which keep a loss a group."""
    monkeypatch.setattr("adalog.search.objective.chunk_elements", lambda _: 1024)
    left, right = normal(*shape, seed=1), normal(*shape[:-2], shape[-1], 7, seed=2)
    mask = (normal(*shape, seed=5) > 0).double() if masked else None
    error = ProductError.of(left, right, right + 0.01 * right.roll(1, -1), keep, mask)
    parts, points = error.splits(), points_of(shape, keep)
    assert len(parts) > 1
    assert max(part.left.numel() for part in parts) <= 3 * 2048
    whole = error.loss(rounding_candidates(left, keep), points)
    together = sum(part.loss(rounding_candidates(part.left, keep), points) for part in parts)
    torch.testing.assert_close(together, whole, rtol=1e-10, atol=0)
