"""Evolution of scales (Evol-Q): its loss against a loop, and that it changes nothing else."""

import math
from dataclasses import replace
from operator import mul

import pytest
import torch

import zoo
from adalog import Calibration, Config
from adalog.baselines import Evolution
from adalog.baselines.evolution import evolve, info_nce, mutate
from adalog.graph.rewrite import rewrite
from adalog.quantizers import UniformQuantizer
from problems import uniform_of
from strategies import normal


def test_info_nce():
    """Evol-Q's loss: each quantized output tells its own float output from those of the other images."""
    outputs, wanted, t = normal(5, 7), normal(5, 7, seed=1), 3.0

    def similarity(i, j):
        a, b = outputs[i].tolist(), wanted[j].tolist()
        return sum(map(mul, a, b)) / math.hypot(*a) / math.hypot(*b)

    likely = [[math.exp(similarity(i, j) / t) for j in range(5)] for i in range(5)]
    mean = sum(-math.log(row[i] / sum(row)) for i, row in enumerate(likely)) / 5
    assert info_nce(outputs, wanted, t) == pytest.approx(mean)
    assert info_nce(outputs.view(5, 7, 1) * 4, wanted, t) == pytest.approx(mean)
    assert info_nce(wanted, wanted, t) < info_nce(outputs, wanted, t)


def test_mutants_lie_within_the_radius():
    scale = torch.tensor([[1.0], [1e-4], [0.0005]], dtype=torch.float64)
    quantizer = UniformQuantizer(scale, torch.full_like(scale, 3), 4)
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        child = mutate(quantizer, None, generator)
        assert bool((child.scale > 0).all())
        assert bool(((child.scale - scale).abs() <= 1e-3).logical_or(child.scale <= 1e-3 - scale).all())
        assert torch.equal(child.zero_point, quantizer.zero_point)
    wide = replace(quantizer, scale=torch.ones(500, 1, dtype=torch.float64))
    moves = {bits: mutate(replace(wide, bits=bits), None, generator).scale - 1 for bits in (4, 8)}
    for bits, radius in ((4, 1e-3), (8, 1e-4)):
        assert 0.95 * radius < float(moves[bits].abs().max()) <= radius * (1 + 1e-9)
        assert abs(float(moves[bits].mean())) < 0.1 * radius
    assert 0.4 < float((mutate(wide, 0.5, generator).scale - 1).abs().max()) <= 0.5


def test_evolution_finds_better_scales_and_keeps_the_best():
    seen = []

    def loss(individual):
        seen.append([float(quantizer.scale) for quantizer in individual])
        return sum((scale - 1.01) ** 2 for scale in seen[-1])

    choices = Evolution(cycles=60, population=4, samples=3, radius=2e-3)
    least, best = evolve(loss, [uniform_of(1.0), uniform_of(1.02)], choices, torch.Generator().manual_seed(1))
    assert len(seen) == 61
    losses = [sum((scale - 1.01) ** 2 for scale in scales) for scales in seen]
    assert losses.index(min(losses)) == seen.index([float(quantizer.scale) for quantizer in best])
    assert least == min(losses) < losses[0] / 4
    # Every mutant is a step from one that was seen before it.
    for index, child in enumerate(seen[1:], 1):
        steps = (max(abs(a - b) for a, b in zip(child, parent, strict=True)) for parent in seen[:index])
        assert min(steps) <= 2e-3


@pytest.mark.parametrize("least", [None, 2.0])
@pytest.mark.parametrize("worse", [0.0, 1.0], ids=["equal", "worse"])
def test_evolution_keeps_the_start_where_nothing_is_better(worse, least):
    def loss(individual):
        return 2.0 + worse * abs(float(individual[0].scale) - 1)

    start = [uniform_of(1.0)]
    found = evolve(loss, start, Evolution(cycles=5, radius=0.1), torch.Generator(), least)
    assert found[0] == 2.0
    assert found[1] is start


@pytest.mark.slow
def test_evolution_lowers_the_model_s_loss():
    calibration = Calibration(zoo.captured("timm_vit")[0], zoo.IMAGES)
    choices = Evolution(passes=2, cycles=3)
    config = replace(Config.preset("w3a4", "fq-vit"), images=4)
    assigned = calibration.assign(config)
    given = calibration.program, calibration.images, assigned, lambda probes: {}, 0, 1 << 40
    after, again = choices.refine(*given), choices.refine(*given)
    with torch.no_grad():
        wanted = calibration.program.run(calibration.images)
        losses = [
            info_nce(rewrite(calibration.program, each).run(calibration.images), wanted, choices.temperature)
            for each in (assigned, after)
        ]
    assert losses[1] < losses[0]
    changed = 0
    for (group, before), (_, now), (_, same) in zip(assigned, after, again, strict=True):
        assert now.left is before.left
        assert torch.equal(now.right.scale, same.right.scale)
        assert torch.equal(now.right.zero_point, before.right.zero_point)
        changed += now.right is not before.right
        if group.first.role in ("qk", "av"):
            assert now.right is before.right
        else:
            assert float((now.right.scale - before.right.scale).abs().max()) <= 6 * 1e-3
    assert changed > 0
    model = calibration.quantize(replace(config, stages=(choices,)))
    for row, (_, now) in zip(model.ledger, after, strict=True):
        assert model.program.weights.get(f"{row.site}.weight") is None or torch.equal(
            model.program.weights[f"{row.site}.weight"].quantizer.scale.flatten(), now.right.scale.flatten()
        )
