"""Reconstruction by gradients: its gradients against finite differences, its states, and what it does for a model."""

import gc
import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import adalog
from adalog import METHODS, Calibration, Config, Correction, QuantizedModel, Reconstruction, Resources, Search
from adalog.calibration.block_errors import pick
from adalog.calibration.gradients import mean_distance
from adalog.calibration.partial import Partial
from adalog.calibration.reconstruct import BlockInTraining, reconstruct
from adalog.calibration.replay import random_mask
from adalog.calibration.training import GroupInTraining, Rounding, _Levels, confine, rectified_sigmoid
from adalog.calibration.training import rounding_regulariser as regulariser
from adalog.calibration.values import Values
from adalog.config import LOSSES
from adalog.graph.capture import capture
from adalog.graph.program import Ref
from adalog.graph.rewrite import rewrite
from adalog.graph.sites import find_blocks, find_spans
from adalog.quantizers import LogQuantizer, QuantizedTensor, UniformQuantizer
from adalog.ranks import ALONE, Ranks
from adalog.study.evaluate import predict
from recorded import Operations, like_an_accelerator, record, without_data
from stored import deserialise, serialise
from strategies import normal
from toys import BRIEF, TOKENS, Toy, all_values, distance, learned_query, tokens_config
from zoo import timm_vit

pytestmark = pytest.mark.usefixtures("captured_once")
SHORT = Search(rounds=1, steps=1, rough_rows=0)
LOW = Config(weight_bits=2, activation_bits=3, softmax_bits=3, images=8, search=SHORT, stages=())
SHORTEST = replace(LOW, search=BRIEF)
STAGE = Reconstruction(images=24, iterations=24, batch=8, drop=0.1, rate=0.05, scale_rate=0.01)
WHOLE_MODEL = Reconstruction(images=24, iterations=16, rate=0.05, scale_rate=0.01, drop=0.0, scope="model")


def stored(codes, bits=2):
    scale = torch.linspace(0.4, 0.9, len(codes), dtype=torch.float64)[:, None]
    return QuantizedTensor(codes, UniformQuantizer(scale, torch.ones_like(scale), bits))


def differences(function, value, step=1e-6):
    """The gradient of a scalar function by finite differences."""
    found = torch.zeros_like(value)
    for place in range(value.numel()):
        moved = [value.detach().clone() for _ in range(2)]
        moved[0].view(-1)[place] += step
        moved[1].view(-1)[place] -= step
        found.view(-1)[place] = (float(function(moved[0])) - float(function(moved[1]))) / (2 * step)
    return found


# --- rounding --------------------------------------------------------------------------------------------------------


def test_the_gradient_of_adaround_is_that_of_finite_differences():
    """Of a layer's squared error by V, with weights s (floor + h(V) - z)."""
    weight, x, y = normal(3, 5, seed=1), normal(20, 5, seed=2), normal(20, 3, seed=3)
    weight_codes = stored(torch.zeros(3, 5)).quantizer.quantize(weight).to(torch.uint8)
    rounding = Rounding(stored(weight_codes), weight, Reconstruction(weights="adaround"))

    def loss(latent):
        rounding.latent = latent
        return (x @ rounding.soft().dequantize().T - y).square().sum() + 0.3 * rounding.regulariser(3.0)

    latent = rounding.latent.detach().clone()
    wanted = differences(loss, latent)
    leaf = latent.clone().requires_grad_()
    assert torch.allclose(torch.autograd.grad(loss(leaf), leaf)[0], wanted, atol=1e-5)


def test_the_regulariser_is_zero_where_rounding_is_decided():
    h = torch.tensor([0.0, 0.5, 1.0])
    assert regulariser(h, 2.0).tolist() == [0, 1, 0]
    assert rectified_sigmoid(torch.tensor([-9.0, 0.0, 9.0])).tolist() == [0, 0.5, 1]


@given(st.integers(2, 8), st.sampled_from(["adaround", "latent"]), st.integers(0, 999))
def test_training_begins_at_the_codes_that_there_are(bits, weights, seed):
    """Also where these are not the nearest ones, as after a correction."""
    codes = torch.randint(0, 2**bits, (4, 9), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    weight = 2 * normal(4, 9, seed=seed)
    rounding = Rounding(stored(codes, bits), weight, Reconstruction(weights=weights))
    soft = rounding.soft()
    hard = rounding.hard()
    assert torch.equal(hard.codes, codes)
    assert torch.equal(hard.quantizer.scale, stored(codes, bits).quantizer.scale)
    assert hard.codes.dtype == torch.uint8
    if weights == "latent":
        assert torch.equal(soft.dequantize().detach(), hard.dequantize())
        assert float((rounding.latent.detach() - codes).abs().max()) <= 0.25  # no small step takes it to another code
    else:
        assert float((soft.codes.detach() - codes).abs().max()) <= 0.5 + 1e-9


def test_gradients_of_latent_codes_pass_straight_through():
    """By a code: the scale times the gradient by the weight. By the logarithm of the scale: the weight times it."""
    codes = torch.tensor([[0, 1, 3], [2, 2, 1]], dtype=torch.uint8)
    rounding = Rounding(stored(codes), normal(2, 3), Reconstruction())
    arriving, hat = normal(2, 3, seed=4), rounding.hard().dequantize()
    (rounding.soft().dequantize() * arriving).sum().backward()
    scale = stored(codes).quantizer.scale
    assert torch.allclose(rounding.latent.grad, scale * arriving)
    assert torch.allclose(rounding.log_scale.grad, (hat * arriving).sum(1, keepdim=True))


def test_latent_codes_and_zero_points_stay_among_the_codes():
    """One that left would get no gradient any more."""
    rounding = Rounding(stored(torch.tensor([[0, 3]], dtype=torch.uint8)), normal(1, 2), Reconstruction())
    with torch.no_grad():
        rounding.latent.copy_(torch.tensor([[-7.0, 9.0]]))
    levels = _Levels(UniformQuantizer(torch.tensor(0.5), torch.tensor(1.0), 2))
    for moved, wanted in ((-1.7, 0.0), (0.4, 1.0), (9.0, 3.0)):
        levels.moved.data.fill_(moved)
        confine([rounding, levels])
        assert float(levels.hard().zero_point) == wanted
        levels.moved.grad = None
        levels.soft().zero_point.backward()
        assert float(levels.moved.grad) == 1
    assert rounding.latent.tolist() == [[0, 3]]
    assert rounding.hard().codes.tolist() == [[0, 3]]


# --- a block ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def searched(tiny, pool):
    calibration = Calibration(tiny, pool[:8], unlabelled=pool[:24])
    return calibration, calibration.assign(LOW)


@pytest.fixture(scope="module")
def small(pool):
    """Images of twelve values."""
    return pool[:8, :, :2, :2].contiguous()


@pytest.fixture(scope="module")
def spoilt(searched):
    """The same with every third code of a weight moved by one, so that there is something to mend."""
    calibration, assigned = searched
    generator = torch.Generator().manual_seed(1)

    def moved(right):
        if not isinstance(right, QuantizedTensor):
            return right
        signs = torch.randint(0, 2, right.codes.shape, generator=generator) * 2 - 1
        chosen = torch.rand(right.codes.shape, generator=generator) < 1 / 3
        return replace(right, codes=(right.codes + signs * chosen).clamp(0, 2**right.bits - 1).to(torch.uint8))

    return calibration, [(group, replace(found, right=moved(found.right))) for group, found in assigned]


def block_of(calibration, assigned, images, number=1, ranks=ALONE, **changes):
    choices = replace(STAGE, **changes)
    blocks = find_blocks(calibration.program)
    floats = Values(calibration.program, [images], blocks=blocks)
    quantized = Values(rewrite(calibration.program, assigned), [images], blocks=blocks, like=floats)
    names = set(blocks[number].nodes)
    here = [(group, found) for group, found in assigned if group.first.node.name in names]
    return BlockInTraining(
        calibration.program, floats, quantized, blocks[number], here, choices, 0, ranks, losses=LOSSES
    )


@pytest.mark.parametrize("biases", [False, True])
def test_a_bias_follows_the_weight_of_a_lifted_input(searched, biases):
    """Eq. 15: lifted by its offset, an input gives with any weights what it gives as it is."""
    calibration, assigned = searched
    group, found = next(each for each in assigned if isinstance(each[1].left, LogQuantizer) and each[1].left.offset)
    assert group.first.role == "linear"
    if not biases:
        found = replace(found, bias=calibration.program.tensors[group.first.bias] * 2)
    quantized = rewrite(calibration.program, [(group, found)])
    each = GroupInTraining(group, found, calibration.program, quantized, Reconstruction(biases=biases, scales=False))
    x = normal(7, calibration.program.tensors[group.first.right].shape[1]).float()

    def added(assignment):
        """What the bias and the offset add to the outputs."""
        weight = assignment.right.dequantize().reshape(-1, x.shape[1])
        return (x + found.left.offset) @ weight.T + assignment.bias - x @ weight.T

    before = each.hard()
    with torch.no_grad():
        each._right.latent.add_(3 * torch.randn_like(each._right.latent)).clamp_(0, 3)
    after = each.hard()
    assert not torch.equal(after.right.codes, before.right.codes)
    assert torch.allclose(added(after), added(before), atol=1e-4)


CHANGES = ({"weights": "adaround", "rate": 0.1}, {"loss": "fisher"}, {"loss": "averaged"}, {"loss": "low-rank"})


@pytest.mark.parametrize("changes", [{}, *(pytest.param(each, marks=pytest.mark.slow) for each in CHANGES)])
def test_training_lowers_the_error_on_images_held_out(pool, spoilt, changes):
    block = block_of(*spoilt, pool[:24], **changes)
    before = block._held_out_loss(block._assigned)
    found = block.train()
    assert block._held_out_loss(found) < 0.8 * before
    for (group, one), (_, other) in zip(found, block._assigned, strict=True):
        assert one.fold is other.fold, group.name
        if isinstance(one.left, UniformQuantizer):
            assert bool((one.left.zero_point % 1 == 0).all())


@pytest.mark.slow
def test_no_image_held_out_is_fitted(pool, searched):
    block = block_of(*searched, pool[:24], iterations=9)
    drawn = torch.cat(list(block._draws()))
    assert block._held_out.tolist() == [7, 15, 23]
    assert set(drawn.tolist()) == set(range(24)) - {7, 15, 23}
    assert len(drawn) == 9 * 8
    assert sorted(drawn[:21].tolist()) == sorted(set(drawn.tolist()))  # all of them once, before any comes again


@pytest.mark.slow
def test_a_share_of_values_stays_exact(pool, searched):
    """At nearly all of them, a block puts out what the float one does, also where a bias has absorbed an offset."""
    block = block_of(*searched, pool[:24], weights="latent")
    exact = [(group, replace(found, right=None)) for group, found in block._assigned if group.first.role == "linear"]
    numbers = torch.arange(4)
    program, generator = rewrite(block._nodes, exact), torch.Generator().manual_seed(0)
    nearly = float(block._loss(program, numbers, 1 - 1e-6, lambda x: random_mask(x, 1 - 1e-6, generator)))
    assert nearly < 1e-3 * float(block._loss(program, numbers))
    kept = random_mask(torch.zeros(3, 13_335), 0.25, generator)
    assert set(kept.unique().tolist()) == {0.0, 1.0}
    assert float(kept.mean()) == pytest.approx(0.25, abs=0.01)
    assert not torch.equal(kept, random_mask(kept, 0.25, generator))


@pytest.mark.parametrize("able", [False, True])
def test_products_of_a_step_are_rounded_where_the_device_multiplies_bfloat16(pool, searched, monkeypatch, able):
    """By less than the quantization, although a few codes are others; what judges stays as it is."""
    monkeypatch.setattr("adalog.calibration.reconstruct.multiplies_bfloat16", lambda device: able)
    block = block_of(*searched, pool[:24])
    given = pick(block._values, block._inputs, torch.arange(4))
    program = rewrite(block._nodes, block._assigned)
    judged, stepped = (block._run(program, given, drop) for drop in (None, 0.0))
    wanted = block._values.compute(given, [block._out], program)[block._out]
    assert torch.equal(judged, wanted)
    assert torch.equal(stepped, judged) != able
    noise = block._targets[block._out][:4] - judged
    assert float((stepped - judged).square().mean()) < 0.2 * float(noise.square().mean())


@pytest.mark.slow
def test_the_low_rank_error_is_made_of_gradients_where_the_block_was(pool, spoilt):
    """Of KL divergences by autograd, image by image: the two parts, each 1 where the last gradient was taken."""
    block = block_of(*spoilt, pool[:24], loss="low-rank")
    start, numbers, name, last = block._assigned, block._trained_on, block._out, spoilt[0].program.output.name
    softer = [(group, replace(found, left=None)) for group, found in start]
    gradients, changes, given = [], [], []
    block._error.renew(block._runner(softer))  # it begins with a gradient at the start
    for assigned in (start, softer):
        sums, moved, given = 0.0, 0.0, []
        for number in numbers:
            one = number[None]
            chunk = pick(block._values, {**block._exact, **block._targets}, one)
            value = block._runner(assigned)(one).detach().requires_grad_()
            with torch.enable_grad():
                logits = (block._values.compute({**chunk, name: at}, [last])[last] for at in (chunk[name], value))
                wanted, found = (each.log_softmax(-1) for each in logits)
                loss = F.kl_div(found, wanted.detach(), log_target=True, reduction="sum")
            sums = sums + torch.autograd.grad(loss, value)[0].abs().double()
            given.append((value - chunk[name]).detach())
            moved = moved + given[-1].abs().double()
        gradients.append(sums.flatten() / len(numbers))
        changes.append(moved.flatten() / len(numbers))
    g, d = torch.stack(gradients), torch.stack(changes)

    def parts(difference):
        size = difference.abs().double().flatten()
        return (g @ size) @ torch.linalg.inv(d @ d.T) @ (g @ size), (size.square() * g.mean(0)).mean()

    low, diagonal = (sum(each) / len(numbers) for each in zip(*map(parts, given), strict=True))
    other = normal(*given[0].shape, seed=3).float()
    wanted = parts(other)[0] / low + parts(other)[1] / diagonal
    assert float(block._error(other, numbers[:1])) == pytest.approx(float(wanted), rel=1e-3)
    assert float(block._error(torch.cat(given), numbers)) == pytest.approx(2, rel=1e-4)


@pytest.mark.slow
def test_averaged_weights_are_the_mean_over_images(pool, searched):
    """Each image gives another weight with "fisher", and all the same one with "averaged"."""
    fisher, averaged = (block_of(*searched, pool[:24], loss=loss)._error.weights for loss in ("fisher", "averaged"))
    everything = fisher(torch.arange(24))
    assert torch.equal(fisher(torch.tensor([5, 2])), everything[[5, 2]])
    assert torch.allclose(averaged(torch.arange(2)), everything.mean(0).expand(2, *everything.shape[1:]), atol=1e-5)


def test_the_error_of_the_output_is_added_to_that_of_the_block(pool, searched):
    """Each is divided by its value at the start, so that the error begins at 2."""
    block = block_of(*searched, pool[:24], loss="output")
    numbers, name, last = block._held_out, block._out, searched[0].program.output.name
    assert block._held_out_loss(block._assigned) == pytest.approx(2, rel=1e-4)
    softer = [(group, replace(found, left=None)) for group, found in block._assigned]
    errors = []
    for assigned in (block._assigned, softer):
        value = block._runner(assigned)(numbers)
        chunk = pick(block._values, {**block._exact, **block._targets}, numbers)
        exact, moved = (block._values.compute({**chunk, name: at}, [last])[last] for at in (chunk[name], value))
        errors.append([float((value - chunk[name]).square().mean()), float(mean_distance([moved], [exact]))])
    wanted = sum(after / before for before, after in zip(*errors, strict=True))
    assert block._held_out_loss(softer) == pytest.approx(wanted, rel=1e-3)


def test_changes_that_are_equal_but_for_rounding_count_once(pool, searched):
    """The low-rank part of the error stays as it is where gradients are taken again at the same state."""
    block = block_of(*searched, pool[:8], loss="low-rank")
    error, unit, draw = block._error, block._error._units[0], torch.Generator().manual_seed(0)
    for _ in range(3):
        for found, share in ((error._changes[-1], 1e-6), (error._gradients[-1], 1e-2)):
            found.mul_(1 + share * torch.randn(found.shape, generator=draw))
        error.renew(block._runner(block._assigned))
        assert error._units[0] == pytest.approx(unit, rel=0.1)


def test_the_regulariser_begins_late_and_sharpens(pool, searched):
    """Nothing in the first fifth; then the exponent falls from 20, which leaves all but the decided alone, to 2."""
    block = block_of(*searched, pool[:24], weights="adaround")
    assert block._regulariser(0.1) == 0
    found = [float(block._regulariser(done).detach()) for done in (0.2, 0.5, 1.0)]
    latent = [side.latent.detach() for side in block._sides if isinstance(side, Rounding)]
    for exponent, value in ((20.0, found[0]), (2.0, found[2])):
        wanted = sum(float(regulariser(rectified_sigmoid(each), exponent).mean()) for each in latent)
        assert value == pytest.approx(wanted, rel=1e-5)
    assert found[0] > found[1] > found[2]


@pytest.mark.slow
@pytest.mark.parametrize("images", [1, 3])
def test_few_images_are_enough(pool, searched, images):
    calibration, before = searched
    after = reconstruct(calibration.program, [pool[:images]], before, replace(STAGE, images=images, iterations=2))
    assert all(math.isfinite(found.sqnr) for _, found in after)


@pytest.mark.slow
def test_a_memory_changes_nothing_but_rounding(pool, searched):
    """Blocks that are made in batches of images give what they give at once, and are held out alike."""
    calibration, before = searched
    choices = replace(STAGE, iterations=3)
    whole, some = (
        reconstruct(calibration.program, [pool[:24]], before, choices, memory=memory) for memory in (None, 600_000)
    )
    (_, one), (_, other) = (
        next((group, found) for group, found in each if group.name.startswith("blocks.0")) for each in (whole, some)
    )
    assert (one.right.codes != other.right.codes).double().mean() < 0.02


def unchanged(model, images, choices):
    """Whether a reconstruction keeps the assignment of each site."""
    calibration = Calibration(model.eval(), images)
    before = calibration.assign(replace(LOW, fold_rows=1))
    after = reconstruct(calibration.program, [images], before, replace(choices, images=8))
    return {group.name: one is other for (group, one), (_, other) in zip(before, after, strict=True)}


def two_heads(m, x):
    """A trunk with two heads, the second of which leads to the last operation."""
    x = m.trunk(x.flatten(1)).relu()
    return m.one(x.tanh()), m.two(x).sigmoid()


def test_what_leads_to_no_blocks_output_or_to_others_as_well_stays_as_it_is(small):
    torch.manual_seed(0)
    model = Toy(two_heads, trunk=nn.Linear(12, 8), one=nn.Linear(8, 3), two=nn.Linear(8, 2))
    # For the trunk the second head alone would judge.
    assert unchanged(model, small, replace(STAGE, rate=0.5)) == {"trunk": True, "one": True, "two": False}


# --- a model ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_reconstructed_model_is_nearer_to_the_float_one(tiny, pool, spoilt):
    """On images that are fitted, and on others."""
    calibration, before = spoilt
    plain = QuantizedModel(calibration.build_program(before, LOW))
    found = reconstruct(calibration.program, [pool[:24]], before, STAGE)
    after = QuantizedModel(calibration.build_program(found, LOW))
    for images in (pool[:24], pool[24:]):
        assert distance(after, tiny, images) < 0.7 * distance(plain, tiny, images)


@pytest.mark.slow
def test_a_file_of_what_is_done_belongs_to_the_images_that_are_fitted(tiniest, pool, tmp_path):
    config = replace(SHORTEST, stages=(replace(STAGE, iterations=1),))
    partial = tmp_path / "partial"
    Calibration(tiniest, pool[:8], unlabelled=pool[:24]).assign(config, Resources(partial=partial))
    with pytest.raises(adalog.DataError, match="other images"):
        Calibration(tiniest, pool[:8], unlabelled=pool[8:32]).assign(config, Resources(partial=partial))


def test_what_is_read_back_goes_to_the_device_that_is_named(tmp_path, searched):
    """As where a run on an accelerator goes on from its file."""
    for index, (_, found) in enumerate(searched[1]):
        Partial(tmp_path / "file", "x").add(str(index), found)
        again = Partial(tmp_path / "file", "x").get(str(index), "meta")
        assert again.left.scale.is_meta
        assert (again.right.codes if isinstance(again.right, QuantizedTensor) else again.right.scale).is_meta


def test_choices_that_cannot_be_are_refused():
    for scope in ("block", "model"):
        stage = replace(STAGE, scope=scope)
        text = Config(stages=(stage,)).to_json()
        assert Config.from_json(text).stages == (stage,)
        assert json.loads(text)["stages"][0].items() >= {"kind": "reconstruction", "scope": scope}.items()
    wrong = {"images": 0, "weights": "nearest", "loss": "cross-entropy", "drop": 1.0, "rate": 0, "scope": "site"}
    for field, value in wrong.items():
        with pytest.raises(ValueError, match=f"^{field} = {value!r} is not "):
            Config(stages=(replace(STAGE, **{field: value}),))


@pytest.mark.slow
def test_the_stage_alone_changes_what_is_to_be_changed(pool, spoilt):
    """Weights alone, without scales and biases: quantizers of activations stay."""
    calibration, before = spoilt
    choices = replace(STAGE, scales=False, biases=False, weights="adaround", iterations=4, rate=0.3)
    after, same = reconstruct(calibration.program, [pool[:24]], before, choices), []
    for (group, one), (_, other) in zip(before, after, strict=True):
        assert other.left is one.left
        assert other.bias is one.bias
        if group.first.role in ("qk", "av"):
            assert other.right is one.right
        else:
            assert torch.equal(other.right.quantizer.zero_point, one.right.quantizer.zero_point)
            assert torch.equal(other.right.quantizer.scale, one.right.quantizer.scale)
            same.append(torch.equal(one.right.codes, other.right.codes))
    assert not all(same)


@pytest.mark.parametrize("loss", ["squared", "fisher", "low-rank", "output"])
def test_what_no_gradient_reaches_is_reconstructed_as_it_was(loss):
    """A second output that is a comparison, whose block has nothing to train by."""
    torch.manual_seed(0)
    model = Toy(lambda m, x: (m.fc(x), (m.other(x) > 0).float()), fc=nn.Linear(8, 3), other=nn.Linear(8, 3)).eval()
    stage = Reconstruction(images=8, iterations=4, loss=loss)
    before, after = (adalog.quantize(model, TOKENS, tokens_config(stages=stages)).program for stages in ((), (stage,)))
    codes = [[each.weights[name].codes for name in sorted(each.weights)] for each in (before, after)]
    same = [torch.equal(one, other) for one, other in zip(*codes, strict=True)]
    assert dict(zip(sorted(before.weights), same, strict=True))["other.weight"]


# --- on an accelerator ------------------------------------------------------------------------------------------------


def states(block, count=8):
    """Every trained tensor after some steps."""
    steps = block.steps(1.0)
    for _ in range(count):
        next(steps)
    return [value.detach().clone() for each in block._groups for some in each.parameters().values() for value in some]


ON_ACCELERATOR = [
    {"drop": 0.5},
    {"weights": "adaround", "rate": 0.1, "iterations": 12},
    {"drop": 0.0, "loss": "output"},
    {"batch": 21},
    {"loss": "low-rank", "biases": False},
]


@pytest.mark.parametrize("changes", ON_ACCELERATOR)
def test_a_recorded_step_does_what_the_step_does(pool, spoilt, monkeypatch, changes):
    """Also with other images, masks, learning rates and exponents in each replay."""
    like_an_accelerator(monkeypatch, graphs=False)
    wanted = states(block_of(*spoilt, pool[:24], **changes))
    like_an_accelerator(monkeypatch)
    block = block_of(*spoilt, pool[:24], **changes)
    got = states(block)
    assert block._replay.is_recorded
    assert all(map(torch.equal, got, wanted))
    assert not torch.equal(got[0], states(block_of(*spoilt, pool[:24], **changes), 7)[0])


@pytest.mark.parametrize("weights", ["latent", "adaround"])
def test_nothing_of_a_step_that_gradients_need_outlives_it(pool, spoilt, monkeypatch, weights):
    """Nodes that accumulate gradients would lead from a recording to the stream of the steps before it."""
    like_an_accelerator(monkeypatch, graphs=False)
    steps = block_of(*spoilt, pool[:24], weights=weights).steps(1.0)
    next(steps)
    gc.collect()
    gc.disable()
    try:
        next(steps)
        made = [each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter)]
        assert not [each.shape for each in made if each.grad_fn is not None]
    finally:
        gc.enable()


def test_a_step_that_cannot_be_recorded_runs_on_as_it_was(pool, spoilt, monkeypatch):
    like_an_accelerator(monkeypatch, graphs=False)
    wanted = states(block_of(*spoilt, pool[:24]))
    like_an_accelerator(monkeypatch)
    tries = []

    def fails(step, generator):
        tries.append(generator)
        generator.manual_seed(1)
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr("adalog.calibration.replay.record", fails)
    block = block_of(*spoilt, pool[:24])
    assert all(map(torch.equal, states(block), wanted))
    assert not block._replay.is_recorded
    assert len(tries) == 1


@pytest.mark.parametrize("weights", ["latent", "adaround"])
def test_training_on_an_accelerator_lowers_the_error_and_records_again_after_a_renewal(
    pool, spoilt, monkeypatch, weights
):
    like_an_accelerator(monkeypatch)
    recorded = []
    monkeypatch.setattr("adalog.calibration.replay.record", lambda *each: recorded.append(1) or record(*each))
    block = block_of(*spoilt, pool[:24], weights=weights, rate=0.1, loss="low-rank")
    before = block._held_out_loss(block._assigned)
    assert block._held_out_loss(block.train()) < 0.9 * before
    assert len(recorded) == block._error.renewals  # the first one, and one after each renewal but the last


@pytest.mark.parametrize("weights", ["latent", "adaround"])
@pytest.mark.parametrize("batch", [8, 32])
def test_a_step_on_an_accelerator_is_few_operations_and_waits_for_none(monkeypatch, weights, batch):
    """For a block of the architecture of DeiT-T, at any width and number of tokens.

    Without data no value can be asked for, and on the CPU the optimizer counts too.
    """
    monkeypatch.setattr("adalog.calibration.reconstruct.multiplies_bfloat16", lambda device: True)
    images = normal(40, 3, 32, 32).float()
    calibration = Calibration(timm_vit(depth=1).eval(), images[:4])
    assigned = calibration.assign(replace(LOW, images=4, activation_bits=4))
    for absent in (True, False):
        with monkeypatch.context() as patch:
            if not absent:
                like_an_accelerator(patch, graphs=False)
            block = block_of(calibration, assigned, images, weights=weights, batch=batch, drop=0.5)
            block = without_data(block, patch) if absent else block
            steps = block.steps(1.0)
            next(steps)
            with Operations() as operations:
                next(steps)
        assert operations.computing.total() <= 450
        assert operations.waiting == {}
        assert operations.computing["random_"] == 1
        assert list(operations.devices) == ["meta" if absent else "cpu"]


def test_an_accelerator_takes_all_images_at_once_and_several_ranks_take_shares(pool, searched, monkeypatch):
    numbers = torch.arange(24)
    assert len(block_of(*searched, pool[:24])._shares(numbers)) == 6
    like_an_accelerator(monkeypatch)
    assert len(block_of(*searched, pool[:24])._shares(numbers)) == 1
    assert len(block_of(*searched, pool[:24], ranks=Ranks(world=2))._shares(numbers)) == 2


# --- SQNRs and errors that a reconstruction reports -------------------------------------------------------------------


def test_the_sqnr_of_a_weight_is_about_the_mean_of_each_channel(pool, searched):
    block = block_of(*searched, pool[:24])
    exact, given = (pick(block._values, chunk, block._held_out) for chunk in (block._exact, block._inputs))
    program = rewrite(block._nodes, block._assigned)
    for group, found in block._with_sqnr(block._assigned):
        wanted, got = (
            block._values.compute(chunk, group.nodes, each) for chunk, each in ((exact, block._nodes), (given, program))
        )
        signal = noise = 0.0
        for name in group.nodes:
            y = wanted[name].double()
            noise += float((got[name].double() - y).square().sum())
            alone = group.first.role in ("qk", "av") or len(y.flatten(0, -2)) == 1
            mean = 0.0 if alone else y.flatten(0, -2).mean(0)
            signal += float((y - mean).square().sum())
        assert found.sqnr == pytest.approx(10 * math.log10(signal / noise), abs=1e-3), group.name


def test_the_sqnr_of_equal_rows_is_of_their_power():
    calibration = Calibration(learned_query(), TOKENS)
    block = block_of(calibration, calibration.assign(LOW), TOKENS.repeat(3, 1, 1), number=0)
    assert all(found.sqnr > 5 for _, found in block._with_sqnr(block._assigned))


def again(m, x):
    """Two residual blocks that share a layer."""
    x = m.embed(x.flatten(1))
    for own in m.own:
        x = x + own(m.shared(x).softmax(-1))
    return m.head(x)


def test_a_block_is_judged_with_all_that_is_quantized_in_it(pool, monkeypatch):
    """Also with a layer that is called in another block too, which is not trained.

    In float64, so that no value lies at a threshold of codes to within rounding.
    """
    torch.manual_seed(0)
    images, judged = pool[:16, :, :2, :2].double(), {}

    class Told(BlockInTraining):
        def train(self, report=None):
            judged[self._out] = self._held_out_loss(self._assigned)
            return self._assigned

    monkeypatch.setattr("adalog.calibration.reconstruct.BlockInTraining", Told)
    parts = {"embed": nn.Linear(12, 8), "shared": nn.Linear(8, 8)}
    parts |= {"head": nn.Linear(8, 4), "own": nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])}
    calibration = Calibration(Toy(again, **parts).double().eval(), images[:8])
    before = calibration.assign(LOW)
    reconstruct(calibration.program, [images], before, replace(STAGE, images=16))
    programs = calibration.program, rewrite(calibration.program, before)
    values = [all_values(program, [images[7::8]]) for program in programs]
    assert len(judged) == 4  # the stem, two blocks and the head
    for name, error in judged.items():
        exact, quantized = (made[name] for made in values)
        assert error == pytest.approx(float((exact - quantized).square().mean()), rel=1e-6)


# --- a whole model at once --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiniest_searched(tiniest, pool):
    """The start of training: a search that counts all rows alike leaves more to gain than one by importance."""
    calibration = Calibration(tiniest, pool[:8], unlabelled=pool[:24])
    return calibration, calibration.assign(replace(LOW, search=replace(LOW.search, importance=0.0)))


def errors(calibration, assigned, reference, images):
    """The squared error of the model's output for each image."""
    found = predict(QuantizedModel(calibration.build_program(assigned, LOW)), images)
    return (found - predict(reference, images)).square().sum(1)


def with_wide_activations(assigned):
    """Double the scales of all uniform activations, so that a training has something to mend."""
    return [
        (group, replace(found, left=replace(found.left, scale=2 * found.left.scale)))
        if isinstance(found.left, UniformQuantizer)
        else (group, found)
        for group, found in assigned
    ]


def test_training_lowers_the_error_of_the_models_output_on_images_held_out(tiniest, pool, tiniest_searched):
    """Every eighth image judges; all sites of the model may change, and codes stay as small as they were."""
    calibration, assigned = tiniest_searched
    choices = replace(WHOLE_MODEL, iterations=48, rate=0.003, scale_rate=0.02)
    before = with_wide_activations(assigned)
    after = reconstruct(calibration.program, [pool[:24]], before, choices)
    was, now = (errors(calibration, each, tiniest, pool[:24]) for each in (before, after))
    assert float(now[7::8].mean()) < 0.5 * float(was[7::8].mean())
    assert [group.name for group, _ in after] == [group.name for group, _ in before]
    for (group, one), (_, other) in zip(before, after, strict=True):
        assert one.left is None or not torch.equal(one.left.scale, other.left.scale), group.name
        if isinstance(other.right, QuantizedTensor):
            assert other.right.codes.dtype == torch.uint8
            assert int(other.right.codes.max()) < 4


def test_a_model_that_got_worse_goes_back(pool, tiniest_searched):
    calibration, before = tiniest_searched
    wild = replace(WHOLE_MODEL, rate=500.0, scale_rate=50.0, iterations=2)
    after = reconstruct(calibration.program, [pool[:24]], before, wild)
    for (_, one), (_, other) in zip(before, after, strict=True):
        assert replace(one, sqnr=0) == replace(other, sqnr=0)


@pytest.mark.parametrize("robust", [True, False])
def test_blocks_that_make_the_model_worse_are_taken_back(pool, tiniest_searched, monkeypatch, robust):
    """Even if training lowers the error of the block itself on the images held out."""
    calibration, before = tiniest_searched
    block = replace(WHOLE_MODEL, scope="block", robust=robust)
    images, seen = [pool[:24]], []

    def worse(program, floats, candidates, numbers):
        seen.append(numbers.tolist())
        return [{"kl": float(len(seen))}]

    monkeypatch.setattr("adalog.calibration.reconstruct.output_errors", worse)
    after = reconstruct(calibration.program, images, before, block)
    kept = [one is other for (_, one), (_, other) in zip(before, after, strict=True)]
    assert all(kept) if robust else not any(kept)
    blocks = len(find_blocks(calibration.program))
    assert seen == ([[7, 15, 23]] * (1 + blocks) if robust else [])  # before, and after each block


def test_a_whole_model_is_judged_by_its_loss_before_and_after(pool, tiniest_searched, monkeypatch):
    """The loss evaluates its outputs already, and the best of several states would be the luckiest one."""
    calibration, assigned = tiniest_searched
    judged, losses = BlockInTraining._held_out_loss, []

    def counted(self, assigned):
        losses.append(judged(self, assigned))
        return losses[-1]

    def refused(*_):
        raise AssertionError("the outputs are compared a second time")

    monkeypatch.setattr(BlockInTraining, "_held_out_loss", counted)
    monkeypatch.setattr("adalog.calibration.reconstruct.output_errors", refused)
    reconstruct(calibration.program, [pool[:24]], with_wide_activations(assigned), WHOLE_MODEL)
    assert len(losses) == 2
    assert losses[1] < losses[0]


def two_outputs(m, x):
    """A trunk with two heads."""
    x = m.second(m.first(x.flatten(1)).relu()).relu()
    return {"one": m.one(x), "two": m.two(x)}


def test_heads_of_a_model_with_several_outputs_are_a_block_of_their_own(small):
    torch.manual_seed(0)
    parts = {"first": nn.Linear(12, 8), "second": nn.Linear(8, 8), "one": nn.Linear(8, 3), "two": nn.Linear(8, 2)}
    net = Toy(two_outputs, **parts).eval()
    trunk, heads = find_spans(capture(net, (small,)))
    assert (trunk.value_in, heads.value_in) == ("x", trunk.value_out)
    assert len([name for name in trunk.nodes if "linear" in name]) == 2
    # One head's output alone would judge both.
    assert unchanged(net, small, WHOLE_MODEL) == {"first": False, "second": False, "one": True}


def scales(m, x):
    """A stream that is put out in between as well, as a backbone does."""
    x, found = x.flatten(1), []
    for layer, norm in zip(m.layers, m.norms, strict=True):
        x = x + layer(x).relu()
        found.append(norm(x))
    return tuple(found)


def test_a_block_ends_where_an_output_leaves_the_stream(small):
    """So no output is made worse for the sake of a later one without being judged."""
    parts = {"layers": nn.ModuleList(nn.Linear(12, 12) for _ in range(3))}
    parts |= {"norms": nn.ModuleList(nn.LayerNorm(12) for _ in range(3))}
    program = capture(Toy(scales, **parts).eval(), (small,))
    made = {node.name: node.op for node in program.nodes}
    blocks = find_spans(program)
    assert [made[block.value_out] for block in blocks[:3]] == ["aten.add.Tensor"] * 3
    assert [sum("linear" in name for name in block.nodes) for block in blocks] == [1, 1, 1, 0]


def trunk_and(ending):
    """A trunk, and what a function makes of its output."""
    parts = {"first": nn.Linear(12, 8), "second": nn.Linear(8, 6)}
    return Toy(lambda m, x: ending(m.second(m.first(x.flatten(1)).relu())), **parts).eval()


@pytest.mark.parametrize("ending", [lambda y: y, lambda y: {"logits": y}, lambda y: (y,), lambda y: [y.softmax(1)]])
def test_a_model_with_one_output_is_one_block(small, ending):
    """However it is wrapped, as in the output of a classifier of transformers."""
    program = capture(trunk_and(ending), (small,))
    (block,) = find_spans(program)
    assert block.nodes == tuple(node.name for node in program.nodes)
    both = replace(program, output=[Ref(program.inputs[0]), program.output])  # an input that is put out cuts nothing
    assert len(find_spans(both)) == 1


@pytest.mark.parametrize("ending", [lambda y: y.chunk(2, 1), lambda y: y.unbind(1)])
def test_no_block_ends_in_a_list(small, ending):
    torch.manual_seed(0)
    assert not any(unchanged(trunk_and(ending), small, WHOLE_MODEL).values())


def test_progress_is_told_many_times(pool, tiniest_searched):
    calibration, before = tiniest_searched
    told, name = [], "end to end, block 1 of 1"
    resources = Resources(progress=lambda *each: told.append(each))
    reconstruct(calibration.program, [pool[:24]], before, WHOLE_MODEL, resources)
    assert told == [*((step, 16, f"{name}, step {step} of 16") for step in range(1, 16)), (16, 16, name)]


@pytest.mark.slow
def test_both_reconstructions_follow_each_other_and_go_on_after_a_kill(tiniest, pool, tmp_path):
    """Wherever a kill cuts the file of what is done: within a stage, between two stages, or in the midst of a block."""
    stages = (Correction(24), replace(WHOLE_MODEL, scope="block", iterations=4), replace(WHOLE_MODEL, iterations=8))
    config, whole = replace(SHORTEST, stages=stages), tmp_path / "whole"
    content = serialise(adalog.quantize(tiniest, pool, config, partial=whole))
    lines = whole.read_bytes().splitlines(keepends=True)
    first = next(index for index, line in enumerate(lines) if b'"tuning of' in line)
    block = next(index for index, line in enumerate(lines) if b"reconstruction of" in line)
    for kept in (block - 2, block + 3, first, first + 2):
        cut = tmp_path / f"cut-{kept}"
        cut.write_bytes(b"".join(lines[:kept]) + lines[kept][:40])
        assert serialise(adalog.quantize(tiniest, pool, config, partial=cut)) == content
    again = deserialise(content)
    assert again.config == config
    assert again.provenance["fitted_images"] == 24
    without = adalog.quantize(tiniest, pool, replace(config, stages=stages[:2]))
    assert serialise(without) != content
    assert abs(len(serialise(without)) - len(content)) < 512  # what tells of the stage


@pytest.mark.parametrize(
    "stages",
    [
        *((STAGE, Correction()), (STAGE, STAGE), (STAGE, adalog.Evolution()), (Correction(), Correction())),
        *((WHOLE_MODEL, STAGE), (WHOLE_MODEL, Correction()), (WHOLE_MODEL, WHOLE_MODEL)),
    ],
)
def test_stages_in_another_order_are_refused(stages):
    words = "at most one Correction, then one Reconstruction of blocks, then one of the model"
    with pytest.raises(ValueError, match=words):
        Config(stages=stages)


def test_the_model_is_trained_last():
    blocks = replace(WHOLE_MODEL, scope="block")
    assert Config(stages=(Correction(128), blocks, WHOLE_MODEL)).images_fitted == 128
    assert Config(stages=(blocks, WHOLE_MODEL)).stages == (blocks, WHOLE_MODEL)
    kinds = [getattr(stage, "scope", "correction") for stage in Config.preset("w4a4", "adalog++").stages]
    assert kinds == ["correction", "model"]
    assert "end to end" in METHODS["adalog++"].source
    assert Config.preset("w4a4", "adalog++").with_fitted_images(64).images_fitted == 64
