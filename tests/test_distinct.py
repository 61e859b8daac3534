"""Candidates that are equal are scored once, and have the losses that they would have alone."""

from functools import partial

import pytest
import torch
from torch import Tensor

import strategies
from adalog.quantizers import LogFormat, UniformFormat
from adalog.search.distinct import DistinctCandidates, once
from adalog.search.objective import ProductError
from adalog.search.operand import Operand
from adalog.search.strategies import fpcs

normal = partial(strategies.normal, dtype=torch.float32)


def drawn(values: Tensor, count: int) -> Tensor:
    """`count` of these values in any order, so that many are equal."""
    return values[torch.randint(len(values), (count,), generator=torch.Generator().manual_seed(count))]


@pytest.mark.parametrize("groups", [(), (1,), (5,), (2, 3)])
@pytest.mark.parametrize("dims", [1, 2])
def test_every_candidate_equals_the_one_that_stands_for_it(groups, dims):
    points = torch.stack([drawn(normal(4), 12) for _ in range(dims)], 1)
    points = points.view(12, dims, *(1 for _ in groups)).expand(12, dims, *groups).contiguous()
    if groups:
        points[:6, :, 0] = points[:1, :, 0]  # fewer different ones than in the others
    found = DistinctCandidates.of(points)
    index = found.place.unsqueeze(1).expand(-1, dims, *groups)
    assert torch.equal(found.points.gather(0, index), points)
    for group in torch.cartesian_prod(*map(torch.arange, (*groups, 1))).view(-1, len(groups) + 1)[:, :-1].tolist():
        at = (slice(None), slice(None), *group)
        assert int(found.counts[tuple(group)]) == len(points[at].unique(dim=0))
    assert len(found.points) == int(found.counts.max())


@pytest.mark.parametrize("points", [normal(6, 3).double(), normal(6, 3), normal(1, 2)], ids=["double", "three", "one"])
def test_others_are_all_scored(points):
    found = DistinctCandidates.of(points)
    assert torch.equal(found.points, points)
    assert torch.equal(found.to_all(points[:, 0]), points[:, 0])


def test_a_loss_sees_each_point_once():
    seen = []

    def loss(points: Tensor) -> Tensor:
        seen.append(len(points))
        return points.square().sum(1)

    points = torch.stack([drawn(normal(3), 20), drawn(normal(3), 20).round()], 1)
    assert torch.equal(once(loss, lambda given: given)(points), points.square().sum(1))
    assert seen == [len(points.unique(dim=0))]


def test_children_of_two_parents_are_the_same_point_to_the_bit():
    """About half of a step's candidates are equal to others."""
    low, high, counts = normal(2, 40) - 9, normal(2, 40) + 9.1, []

    def bowl(points: Tensor) -> Tensor:
        counts.append(DistinctCandidates.of(points).counts.float().mean())
        return (points - normal(2, 40)).square().sum(1)

    fpcs(bowl, low, high)
    assert counts[0] == 128
    assert all(count < 90 for count in counts[1:])


@pytest.mark.parametrize("gram", [False, True])
@pytest.mark.parametrize("leading", [False, True])
@pytest.mark.parametrize("rows", [20, 300])
def test_rows_with_different_numbers_of_candidates_have_their_losses(gram, leading, rows, monkeypatch):
    monkeypatch.setattr("adalog.search.objective._WIDE", 12)
    right = normal(24, 60)
    operand = Operand(normal(rows, 24), UniformFormat(3, own_dims=(0,)))
    error = ProductError.of(operand.values, right, right + 0.1 * normal(24, 61)[:, :60], (0,), gram=gram)
    error = error.leading() if leading else error
    points = torch.stack([-drawn(normal(6).abs(), 30 * rows), drawn(normal(6).abs(), 30 * rows)], 1)
    points = points.view(30, rows, 2).transpose(1, 2).contiguous()
    points[:, :, : rows // 2] = points[:1, :, : rows // 2]
    expected = error.loss_by(operand.format.errors)(points)
    found = error.loss_once(operand.format.errors, operand.format.snap)(points)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-3)


def test_candidates_of_one_whole_base_are_equal():
    operand = Operand(normal(8, 4).abs(), LogFormat(4, r=37))
    bases = torch.tensor([0.9, 1.0, 1.1, 4.0, 4.01])
    points = torch.stack([bases, torch.full((5,), 0.7)], 1)
    assert DistinctCandidates.of(operand.format.snap(points)).place.tolist() == [0, 0, 0, 1, 1]
    errors = operand.format.errors(operand.values)
    assert torch.equal(errors(operand.format.snap(points), torch.float32), errors(points, torch.float32))
    uniform = UniformFormat(4)
    assert uniform.snap(points) is points
