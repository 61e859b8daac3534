"""Blockwise refinement of scales (APQ-ViT): its loss against a loop, and that it changes nothing else."""

from dataclasses import replace

import pytest
import torch

import zoo
from adalog import Calibration, Config
from adalog.baselines import BlockRefinement, ScaleSearch
from adalog.baselines.blockwise import largest_errors, refine_block
from adalog.quantizers import UniformQuantizer
from problems import uniform_of
from strategies import normal


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.95])
def test_the_smallest_errors_do_not_count(share):
    """APQ-ViT's bottom-elimination: the largest weighted squared errors alone."""
    error, weights = normal(7, 9), normal(7, 9, seed=1).square()
    terms = sorted(e * e * w for e, w in zip(error.flatten().tolist(), weights.flatten().tolist(), strict=True))
    assert largest_errors(error, weights, share) == pytest.approx(sum(terms[int(share * 63) :]))


def test_one_scale_after_another_is_multiplied():
    """A loss of two scales whose best multiples are on the grid, in coordinates."""
    choices = BlockRefinement(candidates=9, span=(0.6, 1.4), rounds=2)

    def loss_of(scales):
        return (scales[0] - 1.2) ** 2 + (scales[1] - 2 * scales[0]) ** 2

    def loss(quantizers):
        return loss_of([float(quantizer.scale) for quantizer in quantizers if quantizer is not None])

    start = [uniform_of(1.0), None, uniform_of(2.0)]
    found = refine_block(lambda *_: loss, start, choices, [False] * 3)
    best, grid = (1.0, 2.0), [0.6 + 0.1 * i for i in range(9)]
    for which in (0, 1, 0, 1):
        a, b = best
        tried = [(a * m, b) if which == 0 else (a, b * m) for m in grid]
        best = min([best, *tried], key=loss_of)
    assert [float(found[0].scale), float(found[2].scale)] == pytest.approx(best)
    assert found[1] is None
    assert refine_block(lambda *_: loss, start, choices, [True] * 3) == start


def test_a_scale_with_an_equal_loss_replaces_nothing():
    start = [uniform_of(1.0), None, uniform_of(2.0)]
    for loss in (0.0, 3.0):
        found = refine_block(lambda *_, loss=loss: lambda _: loss, start, BlockRefinement(candidates=4), [False] * 3)
        assert all(after is before for after, before in zip(found, start, strict=True))
    # The first of several that are equally good stays.
    choices = BlockRefinement(candidates=5, span=(0.8, 1.2), rounds=2)
    found = refine_block(lambda *_: lambda sides: float(sides[0].scale > 0.9), [uniform_of(1.0)], choices, [False])
    assert float(found[0].scale) == pytest.approx(0.8)


@pytest.mark.slow
def test_blocks_lower_their_own_outputs_errors():
    calibration = Calibration(zoo.captured("timm_vit")[0], zoo.IMAGES)
    choices = BlockRefinement(candidates=6, probes=2, eliminated=0.5)
    search = ScaleSearch(candidates=10, rounds=1, probes=2)
    config = replace(Config.preset("w3a3", "apq-vit"), images=4, search=search, stages=())
    plain, after = (calibration.quantize(replace(config, stages=stages)) for stages in ((), (choices,)))
    with torch.no_grad():
        wanted = zoo.captured("timm_vit")[0](zoo.IMAGES)
        errors = [float((model(zoo.IMAGES) - wanted).square().mean()) for model in (plain, after)]
    assert errors[0] != errors[1]
    changed = 0
    for name, quantizer in after.program.quantizers.items():
        before = plain.program.quantizers[name]
        factor = quantizer.scale / before.scale
        if isinstance(quantizer, UniformQuantizer):
            assert torch.equal(quantizer.zero_point, before.zero_point)
        torch.testing.assert_close(factor, factor.flatten()[0].expand_as(factor))
        changed += not torch.equal(quantizer.scale, before.scale)
        if name.endswith("av.left"):
            assert torch.equal(quantizer.scale, before.scale)
    assert changed > 0
    assert [row.sqnr for row in plain.ledger] != [row.sqnr for row in after.ledger]
