"""What a reconstruction says of its sites and blocks, beside the same from the values themselves."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from adalog import Calibration
from adalog.calibration.block_errors import picked
from adalog.calibration.reconstruct import BlockInTraining, reconstructed
from adalog.calibration.training import _Levels
from adalog.graph.rewrite import rewritten
from adalog.quantizers import UniformQuantizer
from test_reconstruct import LOW, STAGE, block_of, searched

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


class Again(nn.Module):
    """Two residual blocks that share a layer."""

    def __init__(self):
        super().__init__()
        self.embed, self.shared, self.head = nn.Linear(12, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.own = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x):
        x = self.embed(x.flatten(1))
        for own in self.own:
            x = x + own(self.shared(x).softmax(-1))
        return self.head(x)


def test_a_block_is_judged_with_all_that_is_quantized_in_it(pool, monkeypatch):
    """Also with a layer that is called in another block too, which is not trained.

    In float64, so that no value lies at a threshold of codes to within rounding.
    """
    torch.manual_seed(0)
    images, judged = pool[:16, :, :2, :2].double(), {}

    class Told(BlockInTraining):
        def trained(self, report=None):
            judged[self._out] = self._judged(self._assigned)
            return self._assigned

    monkeypatch.setattr("adalog.calibration.reconstruct.BlockInTraining", Told)
    calibration = Calibration(Again().double().eval(), images[:8])
    before = calibration.assign(LOW)
    reconstructed(calibration.program, [images], before, replace(STAGE, images=16))
    values = []
    for program in (calibration.program, rewritten(calibration.program, before)):
        made = {}
        program.run([images[7::8]], watch=lambda node, args, result, made=made: made.update({node.name: result}))
        values.append(made)
    assert len(judged) == 4  # the stem, two blocks and the head
    for name, error in judged.items():
        exact, quantized = (made[name] for made in values)
        assert error == pytest.approx(float((exact - quantized).square().mean()), rel=1e-6)


def test_zero_points_stay_among_the_codes():
    """One that left would get no gradient any more."""
    levels = _Levels(UniformQuantizer(torch.tensor(0.5), torch.tensor(1.0), 2))
    for moved, wanted in ((-1.7, 0.0), (0.4, 1.0), (9.0, 3.0)):
        levels.moved.data.fill_(moved)
        levels.confine()
        assert float(levels.hard().zero_point) == wanted
        levels.moved.grad = None
        levels.soft().zero_point.backward()
        assert float(levels.moved.grad) == 1
