"""Refinement of scales: its losses against loops, and that it changes what it should and nothing else."""

import math
from dataclasses import replace

import pytest
import torch

import zoo
from adalog import Calibration, Config
from adalog.calibration import blockwise, evolution
from adalog.calibration.blocks import Blocks
from adalog.calibration.blockwise import largest_errors, refine_block, refined_blocks
from adalog.calibration.evolution import evolve, evolved, info_nce, mutated
from adalog.choices import BlockRefinement, Evolution, RangeSearch, ScaleSearch
from adalog.graph.rewrite import rewritten
from adalog.quantizers import LogQuantizer, TwinUniformQuantizer, UniformQuantizer
from strategies import normal


def uniform(scale, bits=4):
    return UniformQuantizer(torch.tensor(scale, dtype=torch.float64), torch.tensor(float(2 ** (bits - 1))), bits)


# --- losses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.95])
def test_the_smallest_errors_do_not_count(share):
    """APQ-ViT's bottom-elimination: the largest weighted squared errors alone."""
    error, weights = normal(7, 9), normal(7, 9, seed=1).square()
    terms = sorted(e * e * w for e, w in zip(error.flatten().tolist(), weights.flatten().tolist(), strict=True))
    assert largest_errors(error, weights, share) == pytest.approx(sum(terms[int(share * 63) :]))


def test_info_nce():
    """Evol-Q's loss: each quantized output tells its own float output from those of the other images."""
    outputs, wanted, t = normal(5, 7), normal(5, 7, seed=1), 3.0

    def similarity(i, j):
        a, b = outputs[i].tolist(), wanted[j].tolist()
        dot = sum(x * y for x, y in zip(a, b, strict=True))
        return dot / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))

    terms = []
    for i in range(5):
        total = sum(math.exp(similarity(i, j) / t) for j in range(5))
        terms.append(-math.log(math.exp(similarity(i, i) / t) / total))
    assert info_nce(outputs, wanted, t) == pytest.approx(sum(terms) / 5)
    assert info_nce(outputs.view(5, 7, 1) * 4, wanted, t) == pytest.approx(sum(terms) / 5)
    assert info_nce(wanted, wanted, t) < info_nce(outputs, wanted, t)


# --- evolution -------------------------------------------------------------------------------------------------------


def test_mutants_lie_within_the_radius():
    scale = torch.tensor([[1.0], [1e-4], [0.0005]], dtype=torch.float64)
    quantizer = UniformQuantizer(scale, torch.full_like(scale, 3), 4)
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        child = mutated(quantizer, None, generator)
        assert bool((child.scale > 0).all())
        assert bool(((child.scale - scale).abs() <= 1e-3).logical_or(child.scale <= 1e-3 - scale).all())
        assert torch.equal(child.zero_point, quantizer.zero_point)
    wide = replace(quantizer, scale=torch.ones(500, 1, dtype=torch.float64))
    moves = {bits: mutated(replace(wide, bits=bits), None, generator).scale - 1 for bits in (4, 8)}
    for bits, radius in ((4, 1e-3), (8, 1e-4)):
        assert 0.95 * radius < float(moves[bits].abs().max()) <= radius * (1 + 1e-9)
        assert abs(float(moves[bits].mean())) < 0.1 * radius
    assert 0.4 < float((mutated(wide, 0.5, generator).scale - 1).abs().max()) <= 0.5


def test_evolution_finds_better_scales_and_keeps_the_best():
    seen = []

    def loss(individual):
        seen.append([float(quantizer.scale) for quantizer in individual])
        return sum((scale - 1.01) ** 2 for scale in seen[-1])

    choices = Evolution(cycles=60, population=4, samples=3, radius=2e-3)
    least, best = evolve(loss, [uniform(1.0), uniform(1.02)], choices, torch.Generator().manual_seed(1))
    assert len(seen) == 61
    losses = [sum((scale - 1.01) ** 2 for scale in scales) for scales in seen]
    assert losses.index(min(losses)) == seen.index([float(quantizer.scale) for quantizer in best])
    assert least == min(losses) < losses[0] / 4
    # Every mutant is a step from one that was seen before it.
    for index, child in enumerate(seen[1:], 1):
        steps = (max(abs(a - b) for a, b in zip(child, parent, strict=True)) for parent in seen[:index])
        assert min(steps) <= 2e-3


def test_evolution_that_finds_nothing_changes_nothing():
    start = [uniform(1.0)]
    choices = Evolution(cycles=5, radius=0.1)
    for least in (None, 0.0):
        found = evolve(lambda individual: abs(float(individual[0].scale) - 1), start, choices, torch.Generator(), least)
        assert found[0] == 0
        assert found[1] is start


# --- blocks ----------------------------------------------------------------------------------------------------------


def test_one_scale_after_another_is_multiplied():
    """A loss of two scales whose best multiples are on the grid, in coordinates."""
    choices = BlockRefinement(candidates=9, span=(0.6, 1.4), rounds=2)

    def loss(quantizers):
        a, b = (float(quantizer.scale) for quantizer in quantizers if quantizer is not None)
        return (a - 1.2) ** 2 + (b - 2 * a) ** 2

    found = refine_block(lambda best, index: loss, [uniform(1.0), None, uniform(2.0)], choices, [False, False, False])
    a, b = 1.0, 2.0
    grid = [0.6 + 0.1 * i for i in range(9)]
    for _ in range(2):
        for which in (0, 1):
            tried = [(a * m, b) if which == 0 else (a, b * m) for m in grid]
            best = min(tried, key=lambda pair: (pair[0] - 1.2) ** 2 + (pair[1] - 2 * pair[0]) ** 2)
            if (best[0] - 1.2) ** 2 + (best[1] - 2 * best[0]) ** 2 < (a - 1.2) ** 2 + (b - 2 * a) ** 2:
                a, b = best
    assert [float(found[0].scale), float(found[2].scale)] == pytest.approx([a, b])
    assert found[1] is None
    kept = refine_block(lambda best, index: loss, [uniform(1.0), None, uniform(2.0)], choices, [True, True, True])
    assert [float(kept[0].scale), float(kept[2].scale)] == [1.0, 2.0]


def test_a_scale_with_an_equal_loss_replaces_nothing():
    start = [uniform(1.0), None, uniform(2.0)]
    for loss in (0.0, 3.0):
        found = refine_block(lambda *_, loss=loss: lambda _: loss, start, BlockRefinement(candidates=4), [False] * 3)
        assert all(after is before for after, before in zip(found, start, strict=True))
    # The first of several that are equally good stays.
    choices = BlockRefinement(candidates=5, span=(0.8, 1.2), rounds=2)
    found = refine_block(lambda *_: lambda sides: float(sides[0].scale > 0.9), [uniform(1.0)], choices, [False])
    assert float(found[0].scale) == pytest.approx(0.8)


def test_evolution_keeps_the_start_among_equals():
    start = [uniform(1.0)]
    assert evolve(lambda _: 2.0, start, Evolution(cycles=5), torch.Generator().manual_seed(0))[1] is start


def test_scaled_quantizers():
    one = torch.tensor(1.0)
    assert float(uniform(2.0).scaled(1.5).scale) == 3
    assert float(uniform(2.0).scaled(1.5).zero_point) == 8
    twin = TwinUniformQuantizer(one, one / 4, 4).scaled(2.0)
    assert (float(twin.scale), float(twin.negative_scale)) == (2.0, 0.5)
    assert float(LogQuantizer(one, 20, 37, 4).scaled(0.5).scale) == 0.5


# --- whole models ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def calibration():
    return Calibration(zoo.captured("timm_vit")[0], zoo.IMAGES)


def refined(program, images, assigned, choices, gradients, seed):
    if isinstance(choices, Evolution):
        return evolved(program, images, assigned, choices, torch.Generator().manual_seed(seed))
    return refined_blocks(program, images, assigned, choices, gradients)


@pytest.mark.slow
def test_evolution_lowers_the_model_s_loss(calibration):
    choices = Evolution(passes=2, cycles=3)
    config = replace(Config.preset("w3a4", "fq-vit"), images=4)
    assigned = calibration.assign(config)
    after = refined(calibration.program, calibration.images, assigned, choices, {}, 0)
    again = refined(calibration.program, calibration.images, assigned, choices, {}, 0)
    with torch.no_grad():
        wanted = calibration.program.run(calibration.images)
        losses = [
            info_nce(rewritten(calibration.program, each).run(calibration.images), wanted, choices.temperature)
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


@pytest.mark.slow
def test_blocks_lower_their_own_outputs_errors(calibration):
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


def test_ranges_can_be_evolved_with_any_search():
    config = Config(stages=(Evolution(passes=1),), search=RangeSearch(), post_softmax="uniform", post_gelu="uniform")
    assert Config.from_json(config.to_json()) == config
    assert hash(config) == hash(Config.from_json(config.to_json()))


@pytest.mark.parametrize("stage", [BlockRefinement(probes=1, candidates=2), Evolution(passes=1, cycles=1)])
def test_stages_keep_to_the_memory(tiniest, images, monkeypatch, stage):
    found = []

    class Watched(Blocks):
        def __init__(self, program, given, blocks, memory=None, **others):
            found.append(memory)
            super().__init__(program, given, blocks, memory, **others)

    for module in (blockwise, evolution):
        monkeypatch.setattr(module, "Blocks", Watched)
    config = replace(Config.preset("w4a4", "minmax"), images=4, stages=(stage,))
    Calibration(tiniest, images[:4], memory=1 << 26).quantize(config)
    assert set(found) == {1 << 25}
