"""What a reconstruction says of its sites, beside the same from the values themselves."""

import math

import pytest

from adalog.calibration.block_errors import picked
from adalog.graph.rewrite import rewritten
from test_reconstruct import block_of, searched

__all__ = ["searched"]


def test_the_sqnr_of_a_weight_is_about_the_mean_of_each_channel(pool, searched):
    block = block_of(*searched, pool[:24])
    exact, given = (picked(block._blocks, chunk, block._judging) for chunk in (block._exact, block._given))
    program = rewritten(block._nodes, block._assigned)
    for group, found in block._measured(block._assigned):
        wanted, got = (
            block._blocks.values(chunk, group.nodes, each) for chunk, each in ((exact, block._nodes), (given, program))
        )
        signal = noise = 0.0
        for name in group.nodes:
            y = wanted[name].double()
            noise += float((got[name].double() - y).square().sum())
            alone = group.first.role in ("qk", "av") or len(y.flatten(0, -2)) == 1
            mean = 0.0 if alone else y.flatten(0, -2).mean(0)
            signal += float((y - mean).square().sum())
        assert found.sqnr == pytest.approx(10 * math.log10(signal / noise), abs=1e-3), group.name
