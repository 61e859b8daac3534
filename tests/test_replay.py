"""Masks of a step, and what a recording asks of CUDA; `test_reconstruct` replays whole steps."""

import itertools
from contextlib import nullcontext
from typing import ClassVar

import pytest
import torch

from adalog.calibration import replay
from adalog.calibration.replay import Masks


def test_the_masks_of_a_step_are_views_of_one_draw():
    """From the second step on; a step that takes more draws the rest alone."""
    masks, sizes = Masks(0.25, torch.Generator().manual_seed(0)), ((3, 50), (7, 11), (400,))
    draws = []
    for count in (2, 2, 3, 3):
        masks.renew()
        taken = [masks.take(torch.zeros(size, dtype=torch.float64)) for size in sizes[:count]]
        assert [(each.shape, each.dtype) for each in taken] == [(size, torch.float64) for size in sizes[:count]]
        together = torch.cat([each.flatten() for each in taken])
        assert set(together.unique().tolist()) == {0.0, 1.0}
        assert float(together.mean()) == pytest.approx(0.25, abs=0.1)
        draws.append(together[:227])
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(draws, 2))


class TracedGraph:
    """In place of a CUDA graph: what it is asked for."""

    asked: ClassVar[list[str]] = []

    def __getattr__(self, name):
        return lambda *_: self.asked.append(name)


@pytest.mark.parametrize("fails", [False, True])
def test_a_recording_ends_whatever_happens(monkeypatch, fails):
    """In the order that CUDA asks for: the generator is registered first, and the stream is idle."""
    asked = TracedGraph.asked
    asked.clear()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", TracedGraph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: "side")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(asked.append(stream)))
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: asked.append(name))
    replay._stream.cache_clear()

    def step():
        asked.append("step")
        if fails:
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted") if fails else nullcontext():
        replay.record(step, torch.Generator())
    replay._stream.cache_clear()
    assert asked == [
        *("register_generator_state", "synchronize", "empty_cache", "side"),
        *("capture_begin", "step", "capture_end"),
    ]
