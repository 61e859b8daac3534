"""The searches: FPCS (Algorithm 1), alternating and brute force."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adalog.search.strategies import alternating, brute_force, fpcs, grid, grid_spacing, rescale, walk
from strategies import normal, seeds


def box(*lines, groups=()):
    """low and high, (P, *groups), of one (low, high) for each hyperparameter."""
    corners = torch.tensor(lines, dtype=torch.float64).T
    return tuple(corner.view(-1, *(1 for _ in groups)).expand(-1, *groups).clone() for corner in corners)


def bowl(target, weight=(1.0, 3.0)):
    """A quadratic around target (P, *groups)."""

    def loss(points):
        scale = torch.tensor(weight[: len(target)], dtype=points.dtype).view(-1, *(1 for _ in target.shape[1:]))
        return ((points - target).square() * scale).sum(1)

    return loss


def rough_sea(points):
    """Many minima, of points (K, P, *groups)."""
    p = points.double()
    return p.square().sum(1) + 0.3 * torch.cos(17 * p).sum(1) + 0.1 * torch.sin(31 * p.sum(1))


def white(seed):
    """A loss without any structure, of few distinct values so that many are equal."""

    def loss(points):
        index = torch.arange(1, points.shape[1] + 1, dtype=torch.float64).view(-1, *(1 for _ in points.shape[2:]))
        return (torch.sin((points.double() * 9173 * index).sum(1) + seed) * 5).round()

    return loss


def counted(loss):
    sizes = []

    def wrapped(points):
        sizes.append(len(points))
        return loss(points)

    return wrapped, sizes


SEARCHES = [fpcs, alternating, brute_force]
every_search = pytest.mark.parametrize("search", SEARCHES, ids=lambda search: search.__name__)


def test_the_last_hyperparameter_of_a_grid_runs_fastest():
    assert grid(*box((0, 1), (10, 30)), (2, 3)).tolist() == [[a, b] for a in (0.0, 1.0) for b in (10.0, 20.0, 30.0)]


def test_grid_of_groups_has_each_group_its_own_box():
    low, high = torch.tensor([[0.0, 5.0]]), torch.tensor([[1.0, 9.0]])
    assert grid(low, high, (3,)).tolist() == [[[0.0, 5.0]], [[0.5, 7.0]], [[1.0, 9.0]]]
    assert grid(low, high, (1,)).tolist() == [[[0.0, 5.0]]]


@every_search
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("groups", [(), (5,), (2, 3)], ids=str)
def test_form_and_loss_of_the_result(search, groups, dtype):
    low, high = (corner.to(dtype) for corner in box((-1, 1), (0, 2), groups=groups))
    best, least = search(rough_sea, low, high)
    assert best.shape == (2, *groups)
    assert best.dtype == dtype
    assert least.shape == groups
    assert torch.equal(least, rough_sea(best[None])[0])


@every_search
def test_groups_are_independent(search):
    low, high = box((-1, 1), (0, 2), groups=(6,))
    target = normal(2, 6) * 0.4 + torch.tensor([[0.0], [1.0]])
    together, losses = search(bowl(target), low, high)
    for i in range(6):
        alone, loss = search(bowl(target[:, i]), low[:, i], high[:, i])
        assert torch.equal(together[:, i], alone)
        assert losses[i] == loss


@every_search
@given(seeds, st.integers(0, 2**31 - 1))
def test_never_worse_than_the_incumbent(search, seed, place):
    low, high = box((-1, 1), (0, 2), groups=(3,))
    incumbent = low + (high - low) * torch.rand(2, 3, generator=torch.Generator().manual_seed(place))
    loss = white(seed % 1000)
    sizes = {"init": (4, 3), "parents": 2, "steps": 2} if search is fpcs else {"sizes": (6, 5)}
    best, least = search(loss, low, high, incumbent=incumbent, **sizes)
    held = loss(incumbent[None])[0]
    assert bool((least <= held).all())
    assert torch.equal(least, loss(best[None])[0])
    equal = least == held
    assert torch.equal(best[:, equal], incumbent[:, equal])  # an equal loss changes nothing


@every_search
def test_an_incumbent_outside_the_box_can_win(search):
    low, high = box((0, 1), (0, 1))
    target = torch.tensor([3.0, 3.0], dtype=torch.float64)
    best, least = search(bowl(target), low, high, incumbent=target.clone())
    assert torch.equal(best, target)
    assert least == 0


@every_search
def test_the_first_of_equal_losses_wins(search):
    low, high = box((-1, 1), (0, 2))
    best, _ = search(lambda points: torch.zeros(len(points), dtype=torch.float64), low, high)
    first = [-1.0, 2.0] if search is alternating else [-1.0, 0.0]  # where the alternating search starts, or the grid
    assert best.tolist() == first


@every_search
def test_one_hyperparameter(search):
    low, high = box((-1, 3), groups=(2,))
    target = torch.tensor([[0.7, 2.9]], dtype=torch.float64)
    best, _ = search(bowl(target), low, high, **{"init" if search is fpcs else "sizes": (128,)})
    assert best.shape == (1, 2)
    assert (best - target).abs().max() <= 4 / 127 / 2


@every_search
def test_a_box_without_extent(search):
    low, high = box((0.25, 0.25), (4, 4))
    best, _ = search(rough_sea, low, high)
    assert best.tolist() == [0.25, 4.0]


@pytest.mark.parametrize("steps", [0, 1, 2, 4, 6])
@pytest.mark.parametrize("groups", [(), (7,)], ids=str)
def test_fpcs_finds_a_minimum_to_half_the_last_spacing(steps, groups):
    """The nearest grid point is kept, and its children reach half way to its neighbours."""
    low, high = box((-1, 1), (0, 2), groups=groups)
    target = low + (high - low) * torch.rand(2, *groups, generator=torch.Generator().manual_seed(0)).double()
    best, _ = fpcs(bowl(target), low, high, steps=steps)
    spacing = torch.tensor([2 / 15, 2 / 7], dtype=torch.float64) / 2**steps
    error = (best - target).abs() / spacing.view(2, *(1 for _ in groups))
    assert error.max() <= 0.5 + 1e-9


def test_fpcs_of_one_hyperparameter_shrinks_by_its_reach():
    """Eight children -4 ... 4 shrink the spacing eightfold a step."""
    low, high = box((0, 1), groups=(50,))
    target = torch.rand(1, 50, generator=torch.Generator().manual_seed(1)).double()
    best, _ = fpcs(bowl(target), low, high, init=(128,), steps=3)
    assert (best - target).abs().max() <= 1 / 127 / 8**3 / 2 + 1e-12


@pytest.mark.parametrize("seed", range(5))
def test_fpcs_matches_brute_force_where_minima_are_wider_than_the_first_grid(seed):
    """640 evaluations find what brute force finds with 16384; two more steps are finer than its grid."""
    shift = normal(2, 1, seed=seed) * 0.3

    def loss(points):
        p = points - shift
        return p.square().sum(1) + 0.3 * torch.cos(5 * p).sum(1) + 0.1 * torch.sin(3 * p.sum(1))

    low, high = box((-1.5, 1.5), (-1.5, 1.5), groups=(1,))
    fine = brute_force(loss, low, high)[1]
    assert fpcs(loss, low, high)[1] <= fine + 1e-3
    assert fpcs(loss, low, high, steps=6)[1] <= fine


def test_fpcs_never_loses_a_parent():
    """A single good point of the first grid survives steps that offer only worse children."""
    low, high = box((0, 1), (0, 1))
    needle = grid(low, high, (16, 8))[77]

    def loss(points):
        return 1.0 - torch.isclose(points, needle, rtol=0, atol=1e-12).all(1).double() + points.sum(1) * 1e-3

    best, _ = fpcs(loss, low, high)
    assert torch.equal(best, needle)


@pytest.mark.parametrize(("init", "lines"), [((16, 8), [(0, 1), (0, 1)]), ((128,), [(0, 1)])], ids=["2", "1"])
def test_fpcs_evaluates_128_candidates_a_step(init, lines):
    low, high = box(*lines)
    for incumbent, last in ((None, []), (low, [1])):
        loss, sizes = counted(rough_sea)
        fpcs(loss, low, high, init=init, steps=4, incumbent=incumbent)
        assert sizes == [128] * 5 + last


def test_fpcs_keeps_no_more_than_there_are():
    low, high = box((0, 1), (0, 1))
    loss, sizes = counted(rough_sea)
    fpcs(loss, low, high, init=(2, 2), parents=16, steps=2)
    assert sizes == [4, 32, 128]


def test_fpcs_refuses_three_hyperparameters():
    low, high = box((0, 1), (0, 1), (0, 1))
    with pytest.raises(ValueError, match="the box has 3 hyperparameters, and this search takes 1 or 2"):
        fpcs(rough_sea, low, high)


def test_the_full_loss_judges_what_the_rough_one_leaves():
    """The result and its loss are the full loss's, even where the rough one prefers another."""
    target = torch.tensor([0.3, 1.1], dtype=torch.float64)
    full, full_sizes = counted(bowl(target))
    rough, rough_sizes = counted(bowl(target + 0.02))
    low, high = box((-1, 1), (0, 2))
    best, least = fpcs(full, low, high, rough=rough)
    assert float(least) == float(bowl(target)(best[None])[0])
    assert rough_sizes == [128] * 5
    assert full_sizes == [16, 1, 8, 8, 8, 8]  # the survivors, the best of them, and its walk
    only_rough, _ = fpcs(bowl(target + 0.02), low, high)
    assert least <= bowl(target)(only_rough[None])[0]
    spacing = grid_spacing(low, high, (16, 8)) / 2**4
    assert bool(((best - target).abs() <= 0.5 * spacing + 1e-12).all())  # the walk covers what the rough one is off


def test_a_rough_loss_that_orders_alike_costs_nothing():
    """The walk starts from what the full loss finds by itself."""
    low, high = box((-1, 1), (0, 2), groups=(3,))
    exact = fpcs(rough_sea, low, high)
    rough = fpcs(rough_sea, low, high, rough=lambda points: 2 * rough_sea(points) + 5)
    walked = walk(rough_sea, exact[0], grid_spacing(low, high, (16, 8)) / 2**4)
    assert torch.equal(rough[0], walked[0])
    assert torch.equal(rough[1], walked[1])
    assert bool((rough[1] <= exact[1]).all())


@given(seeds)
def test_a_misleading_rough_loss_never_costs_the_incumbent(seed):
    low, high = box((-1, 1), (0, 2))
    incumbent = torch.tensor([0.1, 0.9], dtype=torch.float64)
    loss = white(seed % 1000)
    _, least = fpcs(
        loss, low, high, init=(4, 3), parents=2, steps=2, incumbent=incumbent, rough=lambda points: -loss(points)
    )
    assert least <= loss(incumbent[None])[0]


@pytest.mark.parametrize("keep", [1, 5, 12])
def test_without_steps_survivors_of_the_grid_are_judged(keep):
    low, high = box((-1, 1), (0, 2))
    rough, rough_sizes = counted(rough_sea)
    full, full_sizes = counted(lambda points: -rough_sea(points))
    best, least = fpcs(full, low, high, steps=0, parents=keep, rough=rough)
    assert (rough_sizes, full_sizes) == ([128], [keep, 1, 8, 8, 8, 8])
    points = grid(low, high, (16, 8))
    survivors = rough_sea(points).sort().indices[:keep]
    walked = walk(full, points[survivors[-1]], grid_spacing(low, high, (16, 8)))
    assert torch.equal(best, walked[0])
    assert least == walked[1] == -rough_sea(best[None])[0]


@given(seeds, st.sampled_from([1, 2]), st.sampled_from([(), (5,), (2, 3)]))
def test_a_walk_never_ends_at_a_worse_point(seed, count, groups):
    point, loss = normal(count, *groups, seed=seed), white(seed % 1000)
    best, least = walk(loss, point, torch.full_like(point, 0.05))
    held = loss(point[None])[0]
    assert best.shape == point.shape
    assert torch.equal(least, loss(best[None])[0])
    assert bool((least <= held).all())
    same = least == held
    assert torch.equal(best[:, same], point[:, same])  # it moves for a lower loss only


@pytest.mark.parametrize(("count", "reach"), [(2, 15), (1, 60)])
@given(seeds)
def test_a_walk_reaches_the_lowest_point_of_a_bowl_around(count, reach, seed):
    """From up to so many spacings away in each dimension, to half a spacing; each group for itself."""
    generator = torch.Generator().manual_seed(seed)
    spacing, away = torch.rand(2, count, 50, generator=generator, dtype=torch.float64)
    spacing, away = spacing + 0.01, (2 * away - 1) * reach
    point = normal(count, 50, seed=seed)
    best, _ = walk(bowl(point + away * spacing), point, spacing)
    assert ((best - point) / spacing - away).abs().max() <= 0.5 + 1e-9


@given(seeds, st.floats(-0.3, 0.3))
def test_a_walk_down_a_tilted_bowl_ends_within_a_spacing(seed, tilt):
    away = (torch.rand(2, 50, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 0.5) * 28
    spacing = torch.tensor([[0.1], [2.0]], dtype=torch.float64)

    def loss(points):
        a, b = ((points / spacing) - away).unbind(1)
        return a.square() + b.square() + 2 * tilt * a * b

    best, _ = walk(loss, torch.zeros(2, 50, dtype=torch.float64), spacing.expand(2, 50))
    assert (best / spacing - away).abs().max() <= 1


@pytest.mark.parametrize("sizes", [(16, 8), (1, 2), (5,)])
def test_spacing_is_that_of_the_grid(sizes):
    low, high = box(*[(-1, 3), (2, 2.5)][: len(sizes)], groups=(3,))
    points, spacing = grid(low, high, sizes), grid_spacing(low, high, sizes)
    assert spacing.shape == low.shape
    for axis, size in enumerate(sizes):
        values = points[:, axis, 0].unique()
        if size > 1:
            torch.testing.assert_close(values.diff(), spacing[axis, 0].expand(size - 1))


@pytest.mark.parametrize("groups", [(), (3,)], ids=str)
def test_brute_force_finds_the_best_point_of_the_grid(groups):
    low, high = box((-1, 1), (0, 2), groups=groups)
    sizes = (23, 17)  # more than one chunk
    loss, counts = counted(rough_sea)
    best, least = brute_force(loss, low, high, sizes=sizes)
    points = grid(low, high, sizes)
    least_of_grid, index = rough_sea(points).min(0)
    assert torch.equal(least, least_of_grid)
    assert torch.equal(best, points.gather(0, index.expand(1, 2, *groups))[0])
    assert sum(counts) == 23 * 17
    assert max(counts) <= 128


def test_alternating_takes_one_line_of_each_hyperparameter():
    low, high = box((-1, 1), (0, 2))
    target = torch.tensor([0.3, 1.1], dtype=torch.float64)
    loss, sizes = counted(bowl(target))
    best, _ = alternating(loss, low, high, sizes=(64, 32))
    assert sorted(sizes)[-2:] == [32, 64]
    assert sum(sizes) <= 64 + 32 + 3  # O(n + m), and points in hand
    assert bool(((best - target).abs() <= torch.tensor([1 / 63, 1 / 31])).all())


def test_alternating_gets_better_with_rounds_and_can_be_trapped():
    """A narrow diagonal valley: one line at a time moves little, FPCS follows it."""

    def valley(points):
        a, b = points[:, 0], points[:, 1]
        return (a - b).square() * 100 + (a + b - 0.4).square()

    low, high = box((-1, 1), (-1, 1))
    best, losses = None, []
    for _ in range(3):
        best, least = alternating(valley, low, high, incumbent=best)
        losses.append(float(least))
    assert losses == sorted(losses, reverse=True)
    assert float(fpcs(valley, low, high)[1]) < 0.1 * losses[-1]


def test_rescaling_finds_the_best_of_a_line():
    """Of 32 factors, and within 0.03 % of a minimum that lies between two of them."""
    point = torch.tensor([[-1.0, -2.0], [1.0, 3.0]], dtype=torch.float64)
    wanted = torch.tensor([1.02, 0.97], dtype=torch.float64)

    def loss(points):
        return (points / point - wanted).square().sum(1)

    best, least = rescale(loss, point, [True, True])
    torch.testing.assert_close(best / point, wanted.expand(2, 2), rtol=3e-4, atol=0)
    assert torch.equal(loss(best[None])[0], least)


@given(st.integers(0, 2**31))
def test_rescaling_is_never_worse_and_moves_what_it_is_told(seed):
    generator = torch.Generator().manual_seed(seed)
    point = torch.randn(2, 3, generator=generator, dtype=torch.float64)

    def jagged(points):
        return (points * 1e3).sin().sum(1) + points.square().sum(1)

    best, least = rescale(jagged, point, [False, True])
    assert bool((least <= jagged(point[None])[0]).all())
    assert torch.equal(best[0], point[0])
    assert bool(((best[1] / point[1] - 1).abs() <= 0.0442).all())
