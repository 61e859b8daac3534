"""The forms of a product's error against the loss as written, in float64."""

from dataclasses import replace

import pytest
import torch

import adalog.search.forms
import adalog.search.objective
from adalog.search.forms import ExactForm, GramForm, LeadingForm, gram_matrix
from adalog.search.objective import ProductError
from strategies import normal
from test_objective import direct, operands, points_of, rounding_candidates, total

# left (*batch, T, I), right (*batch, I, O), the dimensions of left that keep a loss of their own
PRODUCTS = {
    "activation": ((40, 12), (12, 40), ()),
    "activation, few rows": ((9, 12), (12, 40), ()),
    "weight": ((5, 12), (12, 60), (0,)),
    "queries by head": ((2, 3, 20, 4), (2, 3, 4, 7), (1,)),
    "grouped kernels": ((3, 20, 6), (3, 6, 10), (0, 1)),
}


@pytest.mark.parametrize(("shape", "right", "keep"), PRODUCTS.values(), ids=PRODUCTS)
def test_a_root_and_all_directions_have_the_loss_up_to_a_constant(shape, right, keep, monkeypatch):
    monkeypatch.setattr(adalog.search.forms, "_COLUMNS_OF_DIRECTION", 1)  # as many directions as columns
    left, right, right_hat = operands(shape, right)
    error = rounding_candidates(left, keep)(points_of(shape, keep)) - left
    expected = direct(left, right, right_hat, keep)
    gram = GramForm.of(left, right, right_hat, keep)
    torch.testing.assert_close(gram.losses(error, keep), expected, rtol=1e-8, atol=1e-8)
    for form in (gram.root(), LeadingForm.of(gram)):
        found = form.losses(error, keep)
        torch.testing.assert_close(found - found[:1], expected - expected[:1], rtol=1e-8, atol=1e-8)


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
    monkeypatch.setattr(adalog.search.forms, "multiplies_bfloat16", lambda _: True)
    shape = left
    left, right = normal(*left, seed=seed).float(), normal(*right, seed=seed + 10).float()
    error = ProductError.of(left, right, (right * 8).round() / 8, keep)
    fast = error.fast()
    assert fast.form.factor.dtype == torch.bfloat16
    groups = [shape[dim] for dim in keep]
    points = torch.linspace(0.2, 1.2, 60).view(-1, 1, *(1 for _ in groups)).expand(-1, 1, *groups)
    exact, rough = (each.loss(rounding_candidates(left, keep), points) for each in (error, fast))
    assert rough.dtype == torch.float32
    assert not isinstance(fast.form, GramForm)
    if isinstance(error.form, GramForm):  # the root of a Gram matrix gives losses up to one constant in each group
        rough = rough + error.form.constant - total(fast.form.base.square(), keep)
    torch.testing.assert_close(rough, exact, rtol=1e-2, atol=0)
    assert not torch.equal(rough, exact)
    chosen = exact.gather(0, rough.argmin(0, keepdim=True))[0]
    assert bool((chosen <= 1.001 * exact.amin(0)).all())


def test_bfloat16_only_where_it_is_faster(monkeypatch):
    wide = ProductError.of(*operands((9, 40), (40, 16)))
    narrow, few = (ProductError.of(*(each.float() for each in operands((9, 40), (40, size)))) for size in (16, 15))
    monkeypatch.setattr(adalog.search.forms, "multiplies_bfloat16", lambda _: False)
    assert narrow.fast() is narrow
    monkeypatch.setattr(adalog.search.forms, "multiplies_bfloat16", lambda _: True)
    assert wide.fast() is wide
    assert few.fast() is few
    fast = narrow.fast()
    assert fast.left.dtype == fast.form.base.dtype == torch.float32
    assert fast.form.factor.dtype == torch.bfloat16


def weights_of_tokens(decay, width=192):
    """A weight with 12 rows, tokens whose directions have lengths that fall like this, and these tokens moved a bit."""
    turn = torch.linalg.qr(normal(width, width, seed=3)).Q
    right = (turn * decay ** torch.arange(width)) @ normal(width, 400, seed=2)
    return normal(12, width, seed=1), right, 1.05 * right


def leading_and_exact(decay):
    """The losses of a sample and of all tokens, both above those of the first candidate."""
    left, right, right_hat = weights_of_tokens(decay)
    error = ProductError.of(left, right, right_hat, (0,))
    assert isinstance(error.form, GramForm)
    sample, points = error.leading(), points_of(left.shape, (0,))
    exact = direct(left, right, right_hat, (0,))
    found = sample.loss(rounding_candidates(left, (0,)), points)
    return sample, found - found[:1], exact - exact[:1]


@pytest.mark.parametrize("most", [512, 24])
def test_leading_directions_are_all_of_a_matrix_of_their_rank(most, monkeypatch):
    """There is one direction for three columns, but no more than the most; 2**-64 is left of the 64th."""
    monkeypatch.setattr(adalog.search.forms, "_DIRECTIONS", most)
    sample, found, exact = leading_and_exact(0.5)
    assert isinstance(sample.form, LeadingForm)
    assert sample.form.factor.shape == (192, min(64, most))
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("decay", [0.95, 0.99, 1.0])
def test_the_diagonal_stands_for_what_leading_directions_leave(decay):
    sample, found, exact = leading_and_exact(decay)
    deviation = float((found - exact).norm() / exact.norm())
    assert deviation < 0.1
    without = replace(sample, form=ExactForm(sample.form.factor, sample.form.base)).loss(
        rounding_candidates(sample.left, (0,)), points_of(sample.left.shape, (0,))
    )
    assert float((without - without[:1] - exact).norm() / exact.norm()) > 1.5 * deviation


def test_what_is_linear_in_the_error_is_exact():
    """A tiny step of one weight: its square is nothing."""
    left, right, right_hat = weights_of_tokens(1.0)
    error = ProductError.of(left, right, right_hat, (0,))
    step = torch.zeros(12, 192, dtype=torch.float64)
    step[:, 5] = 1e-6

    def slope(of):
        up, down = of.loss(lambda points: torch.stack([left + step, left - step]), torch.zeros(2, 1, 12))
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
    error = ProductError.of(left, right, right, (0,))
    error = replace(error, form=replace(error.form, factor=gram))
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
    rows = slice(len(first.left))
    found = first.loss(rounding_candidates(first.left, (0,)), points[..., rows])
    torch.testing.assert_close(found, whole[:, rows], rtol=1e-9, atol=1e-9)


def test_leading_directions_are_drawn_where_the_values_are():
    error = ProductError.of(*weights_of_tokens(0.95), (0,))
    expected = error.leading()
    with torch.device("meta"):
        found = error.leading()
    assert torch.equal(found.form.factor, expected.form.factor)


@pytest.mark.parametrize("shape", [(1, 7), (64, 9), (65, 9), (3, 130, 5), (515, 11), (900, 3)])
def test_a_gram_matrix_is_made_of_every_pair_of_rows(shape):
    rows = normal(*shape, seed=3)
    found = gram_matrix(rows)
    torch.testing.assert_close(found, torch.einsum("...it,...jt->...ij", rows, rows), rtol=1e-12, atol=1e-12)


def rooted(error):
    """The error by a root of its Gram matrix."""
    return replace(error, form=error.form.root())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("left", "right", "keep"), [BFLOAT16["weight, many tokens"], BFLOAT16["queries by head"]])
def test_a_root_stands_for_a_gram_matrix(left, right, keep, dtype):
    shape, left, right = left, normal(*left, seed=1).to(dtype), normal(*right, seed=2).to(dtype)
    error = ProductError.of(left, right, (right * 3).round() / 3, keep, gram=True)
    root = rooted(error)
    points = points_of(shape, keep).to(dtype)
    exact, found = (each.loss(rounding_candidates(left, keep), points) for each in (error, root))
    found = found + error.form.constant - total(root.form.base.square(), keep)
    torch.testing.assert_close(found, exact, rtol=1e-4 if dtype == torch.float32 else 1e-9, atol=0)


def test_a_root_of_what_was_never_seen():
    """Channels that are always zero, and tokens that are all alike, leave a Gram matrix without an inverse."""
    left = normal(4, 24, seed=1).float()
    right = normal(24, 1, seed=2).float().expand(24, 60).clone()
    right[5] = 0
    error = ProductError.of(left, right, right * 1.01, (0,))
    assert isinstance(error.form, GramForm)
    points = points_of(left.shape, (0,)).float()
    exact, found = (each.loss(rounding_candidates(left, (0,)), points) for each in (error, rooted(error)))
    found = found + (exact - found).mean(0)
    assert bool(found.isfinite().all())
    torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-3 * float(exact.max()))
    nothing = rooted(ProductError.of(left, right, torch.zeros_like(right), (0,)))
    assert bool(nothing.loss(rounding_candidates(left, (0,)), points).isfinite().all())


def test_a_root_of_a_matrix_with_more_rounding_than_a_factor_bears():
    """Many equal tokens, as of blank images: rounding in their sum leaves directions of negative power."""
    left, right = normal(4, 24, seed=1).float(), normal(24, 1, seed=2).float().expand(24, 60).clone()
    error = ProductError.of(left, right, right * 1.01, (0,))
    allowed = float(error.form.factor.diagonal().max()) * torch.finfo(torch.float32).eps * 24
    noisy = error.form.factor - 10 * allowed * torch.eye(24)
    rounded = replace(error, form=replace(error.form, factor=noisy))
    assert int(torch.linalg.cholesky_ex(noisy + allowed * torch.eye(24)).info)
    points = points_of(left.shape, (0,)).float()
    exact, found = (each.loss(rounding_candidates(left, (0,)), points) for each in (error, rooted(rounded)))
    found = found + (exact - found).mean(0)
    torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-3 * float(exact.max()))


def test_a_large_error_along_rare_directions_costs_more_than_a_small_one(monkeypatch):
    """Neighbours in an image are nearly equal, and a weight that takes their difference sees little of them.

    A Gram matrix in bfloat16 would take the loss of such a weight set to zero for less than nothing.
    """
    monkeypatch.setattr(adalog.search.forms, "multiplies_bfloat16", lambda _: True)
    right = (normal(1, 4000, seed=1) * 3 + 2 + 0.03 * normal(27, 4000, seed=2)).float()
    left = normal(40, 27, seed=3)
    left = (left - left.mean(1, keepdim=True)).float()
    error = ProductError.of(left, right, (right * 200).round() / 200, (0,))
    assert isinstance(error.form, GramForm)
    steps = torch.tensor([1e-3, 1e9]).view(2, 1, 1).expand(2, 1, len(left))  # the second leaves nothing of the weight
    for of in (error, error.fast()):
        fine, nothing = of.loss(rounding_candidates(left, (0,)), steps)
        assert bool((nothing > fine * (2 if of is error else 1)).all())
