"""What `benchmarks/search.py` counts of our searches, and what it switches off."""

from benchmarks import beside, measure

from dataclasses import replace

import pytest
import torch

from adalog import Search
from adalog.quantizers import elementwise
from adalog.search import distinct, objective
from adalog.search.operand import Format, Operand
from adalog.search.product import Product


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def linear(tokens=2048, width=48, outputs=32):
    left, right = Operand(normal(tokens, width), Format(4)), Operand(normal(outputs, width, seed=1), Format(4, (0,)))
    return Product("linear", left, right)


def counts_of(product, search, way=None):
    with (way or beside.Ours(search)).run(), measure.counted() as counts:
        found = beside.search_product(product, search)
    return counts.to_json(measure.site_rows(product)), found


@pytest.fixture
def alike_scored(monkeypatch):
    """Equal candidates are scored each by itself."""

    def all_of(points):
        count, _, *groups = points.shape
        place = torch.arange(count).view(-1, *(1 for _ in groups)).expand(count, *groups)
        return distinct.Distinct(points, torch.full(groups, count), place)

    monkeypatch.setattr(distinct.Distinct, "of", staticmethod(all_of))


def test_of_equal_candidates_one_counts(request):
    search = Search(steps=2, rough_rows=0, refit=False)
    fewer, found = counts_of(linear(), search)
    request.getfixturevalue("alike_scored")
    whole, same = counts_of(linear(), search)
    assert 0.5 * whole["candidates"] < fewer["candidates"] < whole["candidates"]
    assert sum(fewer["flops"].values()) < sum(whole["flops"].values())
    assert fewer["evaluations"] == 2048 * fewer["candidates"]
    assert found.sqnr == pytest.approx(same.sqnr, abs=0.01)


@pytest.mark.usefixtures("alike_scored")
def test_candidates_are_counted_with_the_rows_they_are_scored_on(monkeypatch):
    """Without a sample, these are a grid, the steps, and an old point beside a new one, all scored on all rows."""
    monkeypatch.setattr(objective, "_ROUGH_ELEMENTS", 0)
    search = Search(steps=2, rough_rows=0, refit=False)
    counts, found = counts_of(linear(), search)
    # The weight first, with no old point; then the activation; and the weight again if the activation changed.
    searches = [385, 387] if counts["candidates"] < 1000 else [385, 387, 387]
    assert counts["candidates"] == counts["all"]["candidates"] == sum(searches)
    assert counts["rows"] == 2048
    assert counts["all"]["evaluations"] == 2048 * counts["candidates"]
    assert counts["sampled"] == {"candidates": 0, "evaluations": 0}
    assert found.sqnr == beside.search_product(linear(), search).sqnr  # counting changes nothing
    # A weight's candidates are multiplied by the Gram matrix of the activation, which takes 3.5 products to prepare.
    product, gram = 2 * 2048 * 48 * 32, 2 * 32 * 48 * 48
    weights = [count for index, count in enumerate(searches) if index != 1]
    judged = 3 * product
    expected = (387 + 1) * product + sum(3.5 * product + count * gram for count in weights) + judged
    assert counts["flops"] == {"float32": expected}

    counts, _ = counts_of(linear(), replace(search, rough_rows=256))
    assert counts["sampled"]["candidates"] == 384 + 33  # the grid, the steps, and the scales around the best
    assert counts["sampled"]["evaluations"] == pytest.approx(417 * 256, rel=0.15)
    assert counts["all"]["evaluations"] == 2048 * counts["all"]["candidates"]
    assert counts["evaluations"] == counts["sampled"]["evaluations"] + counts["all"]["evaluations"]


def test_a_weight_that_is_searched_in_slices_counts_once(monkeypatch):
    search = Search(steps=0, rough_rows=0, refit=False)
    whole, _ = counts_of(linear(64), search)
    monkeypatch.setattr(objective, "chunk_elements", lambda device: 700)
    slices, _ = counts_of(linear(64), search)
    assert (slices["candidates"], slices["evaluations"]) == (whole["candidates"], whole["evaluations"])


def test_the_share_in_bfloat16_is_counted_and_switched_off(monkeypatch):
    monkeypatch.setattr(objective, "multiplies_bfloat16", lambda device: True)
    search = Search(steps=0, refit=False)
    mixed, _ = counts_of(linear(256), search)
    assert mixed["flops"]["bfloat16"] > 0.5 * mixed["flops"]["float32"]
    plain, _ = counts_of(linear(256), search, beside.Ours(search, float32=True))
    assert list(plain["flops"]) == ["float32"]
    share = beside.our_counts([mixed, plain])["bfloat16_share"]
    assert share == mixed["flops"]["bfloat16"] / sum(sum(each["flops"].values()) for each in (mixed, plain))


def test_kernels_are_switched_off_and_on():
    way = beside.Ours(Search(), unfused=True)
    before = elementwise._functions()
    with way.run():
        assert elementwise._functions() == {}
    assert elementwise._functions() == before
    assert not way.to_json()["fused"]
    assert beside.OURS["equals"].to_json() | {"fused": True} == {
        "steps": 6,
        "rounds": 3,
        "bfloat16": False,
        "fused": True,
    }
