"""Correction in closed form: each step against a slow oracle in float64, and what it does for a whole model."""

import itertools
import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import adalog
import emulated
from adalog import Calibration, CalibrationError, Config, Correction, QuantizedModel, Search, library
from adalog.calibration import compensate
from adalog.calibration.compensate import (
    Moments,
    _form,
    _held_out_mask,
    _in_turn,
    _least_squares,
    _swept,
    _target,
    _weights_of_rows,
    choose_ridge,
    correct,
    round_codes,
    rows_of,
)
from adalog.calibration.judge import logit_error
from adalog.calibration.values import Values
from adalog.graph.rewrite import rewrite
from adalog.graph.sites import find_pieces
from adalog.quantizers import UniformQuantizer
from adalog.quantizers.elementwise import codes_in_turn
from adalog.study.evaluate import predict
from strategies import normal
from toys import TOKENS, Toy, all_values, distance, learned_query


def correlated(rows, columns, seed=0):
    """Rows whose columns share a few directions, as activations do."""
    return normal(rows, 3, seed=seed) @ normal(3, columns, seed=seed + 1) + 0.3 * normal(rows, columns, seed=seed + 2)


def levels(*rows, bits=2):
    scale, zero_point = (torch.full((*rows, 1), value, dtype=torch.float64) for value in (0.6, 1.0))
    return UniformQuantizer(scale, zero_point, bits)


def rounded(rows, columns, outputs=3, bits=3):
    """The form of correlated rows, a target, and the quantizer of its codes: (1, K, K), (1, O, K), (1, O, 1)."""
    x, target = correlated(rows, columns), normal(1, outputs, columns, seed=4)
    return (x.T @ x + 0.1 * torch.eye(columns).double())[None], target, levels(1, outputs, bits=bits)


# --- moments ---------------------------------------------------------------------------------------------------------


def assert_same_moments(one, other):
    assert (one.rows, one.count) == (other.rows, other.count)
    for name in ("x", "y", "xx", "yx", "yy"):
        assert torch.allclose(getattr(one, name), getattr(other, name), atol=1e-9)


def test_moments_add_up_and_move_and_give_the_error_of_a_weight():
    x, y, weight = normal(2, 30, 4, seed=1), normal(2, 30, 3, seed=2), normal(2, 3, 4, seed=3)
    whole, parts = Moments.of(x, y), Moments.of(x[:, :11], y[:, :11]) + Moments.of(x[:, 11:], y[:, 11:])
    mean_x, mean_y = whole.means()
    moved, straight = parts.about(mean_x, mean_y), Moments.of(x - mean_x[:, None], y - mean_y[:, None])
    assert_same_moments(whole, parts)
    assert_same_moments(moved, straight)
    assert (whole.rows, whole.count) == (30, 30)
    assert torch.allclose(whole.error(weight), (y - x @ weight.mT).square().sum(1))


def test_a_row_of_weight_two_counts_as_two_rows():
    x, y, weights = normal(2, 30, 4, seed=1), normal(2, 30, 3, seed=2), torch.arange(30) % 3
    weighted = Moments.of(x, y, weights.double())
    repeated = Moments.of(*(value.repeat_interleave(weights, 1) for value in (x, y)))
    assert_same_moments(weighted, replace(repeated, rows=30))


# --- the weight ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ridge", [0.01, 1.0])
def test_the_target_solves_the_normal_equations(ridge):
    """Against least squares with the ridge written as further rows."""
    x, y, start = correlated(40, 6), normal(40, 3, seed=5), normal(3, 6, seed=6)
    strength = math.sqrt(ridge * x.square().sum(0).mean())
    rows = torch.cat([x, strength * torch.eye(6).double()])
    wanted = torch.cat([y, strength * start.T])
    oracle = torch.linalg.lstsq(rows, wanted).solution.T
    moments = Moments.of(x[None], y[None])
    assert torch.allclose(_target(moments, start[None], ridge)[0], oracle, atol=1e-9)
    assert _target(moments, start[None], math.inf)[0].equal(start)
    form, root = _form(moments, ridge)
    assert torch.allclose(form[0], rows.T @ rows)
    assert torch.allclose(root[0] @ root[0].T, rows.T @ rows)


def test_moments_that_rounding_made_indefinite_have_a_target():
    """A few channels far larger than the rest leave more rounding in the sums than the ridge adds."""
    x, start = correlated(400, 64), normal(1, 3, 64, seed=6)
    x[:, :4] = 1e5 * x[:, :1] * torch.arange(1, 5)
    moments = Moments.of(x[None], x[None] @ start.mT)
    rounding = 1e-5 * float(moments.xx.diagonal(dim1=1, dim2=2).max()) * torch.eye(64).double()
    assert int(torch.linalg.cholesky_ex(moments.xx - 0.5 * rounding).info)
    moved = replace(moments, xx=moments.xx - rounding)
    form, root = _form(moved, 1e-4)
    assert int(torch.linalg.cholesky_ex(form).info) == 0
    assert torch.allclose(root @ root.mT, form)
    target = _target(moved, start, 1e-4)
    assert float(moments.error(target).sum()) < 1e-6 * float(moments.yy.sum())


def test_the_ridge_is_the_one_that_serves_other_rows():
    """Rows in plenty are believed, and few rows of noise are not."""
    start, true = normal(1, 4, 12, seed=1), normal(1, 4, 12, seed=2)
    many, others = correlated(4000, 12, seed=3)[None], correlated(500, 12, seed=4)[None]
    held = Moments.of(others, others @ true.mT)
    assert choose_ridge(Moments.of(many, many @ true.mT), held, start) < 1e-3
    few = normal(1, 13, 12, seed=5)
    noise = Moments.of(few, few @ start.mT + 3 * normal(1, 13, 4, seed=6))
    assert choose_ridge(noise, Moments.of(others, others @ start.mT), start) >= 1


@pytest.mark.parametrize("definite", [True, False])
def test_the_ridge_has_the_least_error_of_all(definite):
    """Also if rounding made some forms indefinite, so that more than the ridge has to be added."""
    x, held, start = correlated(400, 64)[None], correlated(100, 64, seed=7)[None], normal(1, 3, 64, seed=6)
    if not definite:
        x[..., :4] = held[..., :4] = 1e5 * torch.arange(1, 5)
        x[..., :4] *= normal(400, 1)
    fit, other = (Moments.of(rows, rows @ normal(1, 3, 64).mT) for rows in (x, held))
    if not definite:
        rounding = 1e-5 * float(fit.xx.diagonal(dim1=1, dim2=2).max()) * torch.eye(64).double()
        fit = replace(fit, xx=fit.xx - rounding)
    origin = fit.means()
    inside, outside = (moments.about(*origin) for moments in (fit, other))
    failed = torch.linalg.cholesky_ex(compensate._with_ridge(inside, 1e-4 * compensate._variance(inside))).info.any()
    assert bool(failed) != definite
    errors = {ridge: float(outside.error(_target(inside, start, ridge)).sum()) for ridge in compensate._RIDGES}
    assert choose_ridge(fit, other, start) == min(errors, key=errors.get)


# --- the codes -------------------------------------------------------------------------------------------------------


def loss(weight, target, form):
    return float(((target - weight) @ form * (target - weight)).sum())


def test_codes_in_turn_are_those_of_the_papers_loop():
    """GPTQ: after each column the inverse of what is left of the form says how the error is handed on."""
    x, target, quantizer = correlated(50, 7), normal(3, 7, seed=9), levels(3)
    form = x.T @ x + 0.1 * torch.eye(7).double()
    left, codes, remaining = target.clone(), torch.empty_like(target), list(form.diagonal().argsort(descending=True))
    while remaining:
        column, *remaining = (int(each) for each in remaining)
        codes[:, column : column + 1] = quantizer.quantize(left[:, column : column + 1])
        error = left[:, column] - quantizer.dequantize(codes[:, column : column + 1])[:, 0]
        kept = [column, *remaining]
        inverse = torch.linalg.inv(form[kept][:, kept])
        left[:, kept] -= error[:, None] * inverse[0] / inverse[0, 0]
    found = _in_turn(target[None], form[None], UniformQuantizer(quantizer.scale[None], quantizer.zero_point[None], 2))
    assert torch.equal(found[0], codes)


def test_codes_come_close_to_the_best_of_all():
    """Two rows of four columns at 2 bits have few enough codes to try each row's 256."""
    choices = torch.tensor(list(itertools.product(range(4), repeat=4))).double()
    shares = []
    for seed in range(20):
        x, target = correlated(30, 4, seed=seed), normal(2, 4, seed=seed + 50)
        form, quantizer = x.T @ x + 0.05 * torch.eye(4).double(), levels(1, 2)
        codes = _swept(target[None], form[None], _in_turn(target[None], form[None], quantizer), quantizer)
        best = 0.0
        for row in range(2):
            gaps = target[row] - 0.6 * (choices - 1)
            best += float(((gaps @ form) * gaps).sum(1).min())
        found = loss(quantizer.dequantize(codes)[0], target, form)
        nearest = loss(quantizer.fake_quantize(target[None])[0], target, form)
        assert best * (1 - 1e-9) <= found <= nearest * (1 + 1e-9)
        shares.append(found / best)
    assert sum(share < 1 + 1e-9 for share in shares) >= 12
    assert sum(shares) / 20 < 1.3


@pytest.mark.parametrize("block", [1, 7, 1000])
def test_blocks_of_inputs_change_nothing(block, monkeypatch):
    form, target, quantizer = rounded(400, 150, bits=2)
    codes, found = round_codes(target, form, quantizer)
    monkeypatch.setattr(compensate, "_BLOCK", block)
    others, other = round_codes(target, form, quantizer)
    assert torch.equal(codes, others)
    torch.testing.assert_close(found.scale, other.scale, rtol=1e-9, atol=0)


def test_compiled_code_chooses_codes_if_there_is_any(monkeypatch):
    """It chooses the same ones as the loop (`test_elementwise`), but only for the layouts that it knows."""
    results = []

    def recorded(*given):
        results.append(codes_in_turn(*given))
        return results[-1]

    monkeypatch.setattr(compensate, "codes_in_turn", recorded)
    form, target, quantizer = rounded(300, 150)
    round_codes(target, form, quantizer)
    assert {result is None for result in results} == {library.load()[0] is None}


@pytest.mark.parametrize("outputs", [1, 3])
def test_sweeps_leave_the_codes_that_they_are_given(outputs):
    """Or they would seem to have changed none."""
    form, target, quantizer = rounded(60, 8, outputs, bits=2)
    codes = torch.zeros_like(target)
    assert bool(_swept(target, form, codes, quantizer).any())
    assert not bool(codes.any())


def test_no_single_code_can_be_bettered_after_the_sweeps():
    form, target, quantizer = rounded(60, 8)
    codes = _in_turn(target, form, quantizer)
    for _ in range(20):
        codes = _swept(target, form, codes, quantizer)
    least = loss(quantizer.dequantize(codes)[0], target[0], form[0])
    for row, column, code in itertools.product(range(3), range(8), range(8)):
        other = codes.clone()
        other[0, row, column] = code
        assert loss(quantizer.dequantize(other)[0], target[0], form[0]) >= least * (1 - 1e-9)


def test_scales_are_the_least_squares_of_the_codes():
    form, target, quantizer = rounded(60, 8)
    codes = quantizer.quantize(target)
    found = _least_squares(target, form, codes, quantizer)
    for factor, row in itertools.product((0.99, 1.01), range(3)):
        worse, least = (each.dequantize(codes)[0, row : row + 1] for each in (found.rescale(factor), found))
        assert loss(worse, target[0, row : row + 1], form[0]) > loss(least, target[0, row : row + 1], form[0])


def test_grouped_rows_are_chosen_apart():
    x, target, quantizer = normal(2, 40, 5), normal(2, 3, 5, seed=1), levels(2, 3)
    form = x.mT @ x
    together = round_codes(target, form, quantizer)
    for group in range(2):
        alone = round_codes(target[group : group + 1], form[group : group + 1], levels(1, 3))
        assert torch.equal(alone[0][0], together[0][group])
        assert torch.allclose(alone[1].scale[0], together[1].scale[group])


def test_a_fit_hardly_waits_for_a_device():
    """It reads the errors of all ridges at once, and whether the two forms are positive definite."""
    x, y, start, weights = correlated(90, 70)[None], normal(1, 90, 4), normal(1, 4, 70, seed=1), normal(90).square()
    quantizer = levels(1, 4, bits=3)

    def fit(x, y, start, weights, quantizer):
        inside, outside = (Moments.of(x[:, part], y[:, part], weights[part]) for part in (slice(60), slice(60, 90)))
        ridge = choose_ridge(inside, outside, start)
        target, (form, _) = _target(inside, start, ridge), _form(inside, 0.1)
        codes, found = round_codes(target, form, quantizer)
        return ridge, codes, found.scale * compensate._gain(inside, target, inside.y / inside.count)

    ridge, codes, scale = fit(x, y, start, weights, quantizer)
    with emulated.device() as put:
        given = [put(value) for value in (x, y, start, weights)]
        there = quantizer.map(put)
        with emulated.counted() as counts:
            found = fit(*given, there)
        assert found[0] == ridge
        assert torch.equal(found[1].cpu(), codes)
        assert torch.allclose(found[2].cpu(), scale)
    assert counts["wait"] <= 3, counts.told
    assert counts["copy"] == 0, counts.told


# --- a whole model ---------------------------------------------------------------------------------------------------


SHORT = Search(rounds=1, steps=0, rough_rows=0)
STAGE = Correction(images=24, coefficient=1.0, robust=False)
LOW = Config(weight_bits=2, activation_bits=4, softmax_bits=4, images=8, search=SHORT, stages=())


@pytest.fixture(scope="module")
def searched(tiny, pool):
    calibration = Calibration(tiny, pool[:8], unlabelled=pool[:24])
    return calibration, calibration.assign(LOW)


def moments_of(calibration, assigned, group, images, *, weights=None, stream=None, batch=None):
    """The moments of a group's rows, as a correction of these assignments collects them."""
    pieces, program = find_pieces(calibration.program), rewrite(calibration.program, assigned)
    start = next(piece.value_in for piece in pieces if group.nodes[0] in piece.nodes)
    floats = Values(calibration.program, [images], blocks=pieces)
    quantized = Values(program, [images], blocks=pieces, like=floats)
    floats.batch = quantized.batch = batch or floats.batch
    return compensate._collect_moments(floats, quantized, start, group, program, weights or {}, stream)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["output", "stream"])
def test_a_corrected_model_is_nearer_to_the_float_one(tiny, pool, searched, target):
    """On the images that are fitted, and on others."""
    calibration, before = searched
    fitted = correct(calibration.program, [pool[:24]], before, replace(STAGE, target=target))
    for (group, one), (_, other) in zip(before, fitted, strict=True):
        assert (one is other) == (group.first.role in ("qk", "av"))  # which have no codes
        assert other.left is one.left
    plain, after = (QuantizedModel(calibration.build_program(each, LOW)) for each in (before, fitted))
    if target == "output":  # a bias takes what the means leave, so that the head's outputs have the float mean
        means = (predict(each, pool[:24]).mean(dim=0) for each in (after, tiny))
        assert torch.allclose(*means, atol=1e-4)
    assert distance(after, tiny, pool[:24]) < 0.7 * distance(plain, tiny, pool[:24])
    assert distance(after, tiny, pool[24:]) < 0.7 * distance(plain, tiny, pool[24:])


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_rows_are_those_of_the_product(tiny, pool, searched, kind):
    calibration, _ = searched
    group = next(group for group in calibration.groups if group.first.role == kind)
    weight, site = calibration.program.tensors[group.first.right], group.first
    x = pool[:3] if kind == "conv" else normal(3, 5, weight.shape[1]).float()
    bias = calibration.program.tensors[site.bias] if site.bias else None
    y = F.linear(x, weight, bias) if kind == "linear" else F.conv2d(x, weight, bias, *site.node.args[3:])
    rows, wanted = rows_of(group, x, [y], calibration.program)
    outputs = rows @ weight.flatten(1).T + (0 if bias is None else bias)
    assert torch.allclose(outputs, wanted, atol=1e-4)


@pytest.mark.slow
def test_it_is_the_same_within_a_memory(pool, searched):
    """The values of one image at a time; sums of float32 differ in the last bits, and later codes with them."""
    calibration, before = searched
    whole, some = (
        correct(calibration.program, [pool[:24]], before, STAGE, memory=memory) for memory in (None, 600_000)
    )
    for (group, one), (_, other) in zip(whole, some, strict=True):
        if one.bias is not None and not group.name.startswith(("blocks.1", "head")):
            tolerance = 0.02 if group.name.startswith("patch_embed") else 0.5
            assert one.sqnr == pytest.approx(other.sqnr, abs=tolerance), group.name


@pytest.mark.slow
def test_both_networks_come_in_the_same_batches_at_any_memory(fast):
    """Near the limits at which the inputs of one network fit, and not those of the other, which holds more."""
    torch.manual_seed(0)
    layers = {"a": nn.Conv2d(3, 4, 1), "b": nn.Conv2d(4, 32, 1), "c": nn.Conv2d(32, 4, 1), "d": nn.Linear(4, 5)}
    model = Toy(lambda m, x: m.d(m.c(m.b(m.a(x))).mean((2, 3))), **layers).eval()
    images = torch.randn(96, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    calibration = Calibration(model, images[:8])
    assigned = calibration.assign(replace(fast, images=8))
    whole = correct(calibration.program, [images], assigned, Correction())
    for memory in range(2_000_000, 5_600_000, 300_000):
        found = correct(calibration.program, [images], assigned, Correction(), memory=memory)
        for (_, one), (_, other) in zip(whole, found, strict=True):
            assert one.sqnr == pytest.approx(other.sqnr, abs=0.3)


def test_no_more_images_are_read_than_give_enough_rows(pool, searched, monkeypatch):
    calibration, assigned = searched
    counts = []
    for least in (1, 6 * 256, 2**18):  # an image gives 256 rows
        monkeypatch.setattr(compensate, "_ROWS", least)
        seen = moments_of(calibration, assigned, assigned[1][0], pool[:24], batch=5)
        counts.append(seen.fit.count + seen.held.count)
    assert counts == [5 * 256, 10 * 256, 24 * 256]


def test_a_stream_is_fitted_to_what_it_lacks(pool, searched):
    """Where a site's output is added to one: the target is the float sum less what the quantized stream has."""
    calibration, before = searched
    program = calibration.program
    names = {group.name: index for index, (group, _) in enumerate(before)}
    streams = {name: compensate._stream(program, before[index][0]) for name, index in names.items()}
    assert {name for name, found in streams.items() if found} == {
        f"blocks.{block}.{site}" for block in (0, 1) for site in ("attn.proj", "mlp.fc2")
    }
    group, stream = before[names["blocks.1.mlp.fc2"]][0], streams["blocks.1.mlp.fc2"]
    seen = moments_of(calibration, before, group, pool[:24], stream=stream)
    values = [all_values(each, [pool[:24]]) for each in (program, rewrite(program, before))]
    lacks = (values[0][stream[0]] - values[1][stream[1]]).double().flatten(0, 1)
    both = seen.fit + seen.held
    assert torch.allclose(both.y[0] / both.count + seen.origin[1][0], lacks.mean(0), atol=1e-4)
    about = both.about(*both.means()).yy[0]
    assert torch.allclose(about, (lacks - lacks.mean(0)).square().sum(0), rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("images", [1, 3, 5])
def test_few_images_are_enough(pool, searched, images):
    calibration, before = searched
    for _, found in correct(calibration.program, [pool[:images]], before, Correction(images)):
        assert found.bias is None or bool(torch.isfinite(found.bias).all())


def test_inputs_that_never_change_move_the_bias_alone():
    """Their moments about the mean are zero but for rounding, and so nothing is known of the weight."""
    rows, start = torch.full((1, 50, 6), 100.1) + 1e-7 * normal(1, 50, 6), normal(1, 3, 6, seed=1)
    moments = Moments.of(rows, rows @ start.mT)
    centred = moments.about(*moments.means())
    floor = 1e-10 * 50 * moments.means()[0].square().mean(1)
    for ridge in (0.1, math.inf):
        target = _target(centred, start, ridge, floor)
        assert torch.allclose(target, start, atol=0.02)
        codes, quantizer = round_codes(target, _form(centred, 0.1, floor)[0], levels(1, 3))
        assert bool(torch.isfinite(quantizer.dequantize(codes)).all())


def test_a_weight_with_fewer_rows_than_inputs_is_not_fitted(searched, pool, monkeypatch):
    """The head reads one row per image: 8 rows do not determine its weights, so only its codes and bias change."""
    monkeypatch.setattr(compensate, "output_errors", lambda *given: [{"kl": 1.0}, {"kl": 0.0}])
    calibration, before = searched
    after = correct(calibration.program, [pool[:8]], before, Correction(8, compensate=False))
    group, one = before[-1]
    assert group.name == "head"
    weight, found = calibration.program.tensors[group.first.right], after[-1][1].right
    start = one.fold.weight(weight) if one.fold is not None else weight
    quantizer = replace(found.quantizer, scale=one.right.quantizer.scale)
    assert torch.equal(found.codes, quantizer.quantize(start).to(torch.uint8))


def test_rows_of_every_image_have_the_weights_of_their_positions():
    """In batches of any size, which may start within an image, and not if another size has other positions."""
    tokens, windows, positions = (normal(*shape).square() for shape in ((1, 17, 1), (4, 5, 1), (1, 1, 2, 3)))
    weights, inputs = tokens.expand(4, 17, 1), torch.zeros(3, 17, 8)
    assert torch.equal(_weights_of_rows([weights, None], inputs, (0, 1), 5, 51), tokens.flatten().repeat(3))
    assert _weights_of_rows([weights], torch.zeros(3, 16, 8), (0, 1), 0, 48) is None
    assert _weights_of_rows([weights], inputs, None, 0, 51) is None
    assert _weights_of_rows([None], inputs, (0, 1), 0, 51) is None
    # Two images of 4 windows with 5 tokens; the batch begins with the third window of an image.
    rows = _weights_of_rows([windows.repeat(2, 1, 1)], torch.zeros(6, 5, 8), (0, 4), 2, 30)
    assert torch.equal(rows, windows[[2, 3, 0, 1, 2, 3]].flatten())
    # Tokens first, and then images.
    turned = _weights_of_rows([tokens.transpose(0, 1).expand(17, 4, 1)], torch.zeros(17, 3, 8), (1, 1), 0, 51)
    assert torch.equal(turned, tokens.flatten().repeat_interleave(3))
    # A map of 2 x 3 positions: the rows of a convolution are its positions, image by image.
    pixels = _weights_of_rows([positions.expand(4, 1, 2, 3)], torch.zeros(3, 8, 4, 6), (0, 1), 1, 18)
    assert torch.equal(pixels, positions.flatten().repeat(3))


@pytest.mark.parametrize("dim", [0, 1])
def test_held_rows_are_those_of_whole_images(searched, dim):
    """Also where tokens come first and images second, as in attention that wants its sequences so."""
    group = next(group for group in searched[0].groups if group.first.role == "linear")
    images = torch.arange(8.0)[:, None, None].expand(8, 5, 3)
    values = images if dim == 0 else images.transpose(0, 1)
    held = _held_out_mask(group, values, (dim, 1), 0, 40)
    assert set(values[..., 0].flatten()[held].tolist()) == {3.0, 7.0}
    assert int(held.sum()) == 10


def test_pieces_of_a_batch_may_hold_parts_of_images(monkeypatch):
    """Two frames of an image in a convolution's batch: cut apart, they are held out together all the same."""
    torch.manual_seed(0)
    parts = {"conv": nn.Conv2d(3, 8, 8, 8), "head": nn.Linear(32, 4)}
    frames = Toy(lambda m, x: m.head(m.conv(x.flatten(0, 1)).flatten(1)).unflatten(0, (-1, 2)).mean(1), **parts)
    images = torch.randn(24, 2, 3, 16, 16)
    calibration = Calibration(frames.eval(), images[:8], unlabelled=images)
    before = calibration.assign(LOW)
    seen = []
    original = compensate.choose_ridge
    monkeypatch.setattr(compensate, "choose_ridge", lambda *given: seen.append(given[1].count) or original(*given))
    whole = correct(calibration.program, [images], before, STAGE)
    monkeypatch.setattr(compensate, "_PATCHES", 1)
    apart = correct(calibration.program, [images], before, STAGE)
    assert seen == [6 * 2 * 4, 6 * 2] * 2  # rows of every fourth image
    for (_, one), (_, other) in zip(whole, apart, strict=True):
        assert torch.equal(one.right.codes, other.right.codes)


def test_a_correction_that_makes_the_whole_model_worse_changes_nothing(pool, searched, monkeypatch):
    calibration, before = searched
    errors = [{"kl": 1.0}, {"kl": 0.5, "relative": 1.0}]
    monkeypatch.setattr(compensate, "output_errors", lambda *given: errors)
    after = correct(calibration.program, [pool[:6]], before, Correction(6, compensate=False))
    assert all(one is other for (_, one), (_, other) in zip(before, after, strict=True))


def test_a_value_without_images_is_quantized_wherever_it_is_read():
    """The second and the third piece read a linear of a table: the SQNR that they record is that of the whole model."""

    def function(m, x):
        t = m.of_table(m.table.expand(x.shape[0], -1, -1))
        x = m.stem(x)
        x = x + m.one(x + t).tanh()
        return m.head(x + m.two(x + t).tanh())

    torch.manual_seed(0)
    parts = {name: nn.Linear(8, 8) for name in ("of_table", "stem", "one", "two", "head")}
    model = Toy(function, **parts, table=nn.Parameter(torch.randn(1, 6, 8))).eval()
    images = torch.randn(12, 6, 8)
    calibration = Calibration(model, images)
    choices = Correction(compensate=False, robust=False)
    found = correct(calibration.program, [images], calibration.assign(LOW), choices)
    programs = calibration.program, rewrite(calibration.program, found)
    values = [all_values(program, [images]) for program in programs]
    for group, assignment in found:
        if group.name in ("one", "two"):
            exact, given = (seen[group.nodes[0]].flatten(0, -2) for seen in values)
            power = (exact - exact.mean(0)).square().sum() / (given - exact).square().sum()
            assert assignment.sqnr == pytest.approx(10 * math.log10(power), abs=0.02)


@pytest.mark.parametrize("worse", [True, False])
def test_a_model_says_that_its_correction_was_not_applied(pool, searched, fast, monkeypatch, worse):
    calibration, _ = searched
    errors = [{"kl": 1.0}, {"kl": 2.0 if worse else 0.5}]
    monkeypatch.setattr(compensate, "output_errors", lambda *given: errors)
    told = "not applied: the correction: it does not lower the error of the model's output"
    summary = calibration.quantize(replace(fast, stages=(Correction(images=6, compensate=False),))).summary()
    assert (told in summary) is worse


def test_the_sqnr_of_equal_rows_is_of_their_power():
    """A learned query is the same for every image, so its outputs have no spread about their mean."""
    calibration = Calibration(learned_query(), TOKENS)
    after = correct(calibration.program, [TOKENS], calibration.assign(LOW), Correction(robust=False))
    assert [group.name for group, _ in after] == ["query", "key", "head"]
    assert all(assignment.sqnr > 5 for _, assignment in after)


def test_moments_count_rows_by_their_weight(pool, searched):
    """Each row has the weight of its position, in batches of any size."""
    calibration, before = searched
    group = next(group for group, _ in before if group.name.endswith("fc1"))
    shape = calibration._shapes[group.nodes[0]].shape
    weight = torch.rand(1, shape[1], 1, generator=torch.Generator().manual_seed(0)).expand(6, -1, 1)
    for batch in (2, 6):
        seen = moments_of(calibration, before, group, pool[:6], weights={group.nodes[0]: weight}, batch=batch)
        assert (seen.fit.rows, seen.held.rows) == (5 * shape[1], shape[1])
        assert seen.held.count == pytest.approx(float(weight[0].sum()), rel=1e-5)
        assert seen.fit.count == pytest.approx(5 * float(weight[0].sum()), rel=1e-5)


def test_outputs_keep_their_power():
    """The power about the mean, within limits. Constant outputs and single rows are left alone."""
    x, weight = normal(1, 500, 6), normal(1, 4, 6, seed=1)
    y = 1.5 * x @ weight.mT + 0.1 * normal(1, 500, 4, seed=2)

    def gain(y, rows=500):
        moments = Moments.of(x[:, :rows], y[:, :rows])
        means = moments.means()
        return float(compensate._gain(moments.about(*means), weight, means[1]))

    assert gain(y) == pytest.approx(float((y.var(1).sum() / (x @ weight.mT).var(1).sum()).sqrt()))
    assert gain(0.1 * y) == 0.5
    assert gain(10 * y) == 2.0
    assert gain(torch.ones_like(y)) == gain(y, rows=1) == 1.0


def linear_and_moments(pool, searched):
    """Return a linear with a folded norm, its float weight, and the moments of its rows."""
    calibration, before = searched
    group, assignment = next(each for each in before if each[1].fold is not None)
    seen = moments_of(calibration, before, group, pool[:24])
    weight = torch.cat([calibration.program.tensors[site.right] for site in group.sites])
    return group, assignment, assignment.fold.weight(weight), seen


@pytest.mark.parametrize("coefficient", [0.0, 0.3, 1.0])
def test_means_move_as_far_as_weights(pool, searched, coefficient):
    """From those of the float weight on the quantized inputs to those of the float network."""
    program = searched[0].program
    group, assignment, weight, seen = linear_and_moments(pool, searched)
    after = compensate._refit(program, group, assignment, seen, Correction(coefficient=coefficient))
    mean_x, mean_y = (seen.fit + seen.held).means()
    mean_x, mean_y = mean_x[0] + seen.origin[0][0], mean_y[0] + seen.origin[1][0]
    bias = torch.cat([program.tensors[site.bias] for site in group.sites]).double()
    own = weight.double() @ (mean_x + assignment.fold.beta.double()) + bias
    found = after.right.dequantize().double().reshape(weight.shape)
    means = found @ mean_x + after.bias.double()
    assert torch.allclose(means, own.lerp(mean_y, coefficient), atol=1e-4)
    # The SQNR counts the means that are left.
    whole = (seen.fit + seen.held).about(*(seen.fit + seen.held).means())
    noise = whole.error(found[None]).sum() + whole.count * (mean_y - means).square().sum()
    assert after.sqnr == pytest.approx(10 * math.log10(float(whole.yy.sum() / noise)), abs=1e-3)


def test_very_wide_weights_keep_their_assignments(pool, searched, monkeypatch):
    calibration, before = searched
    monkeypatch.setattr(compensate, "_INPUTS", 30)
    after = correct(calibration.program, [pool[:8]], before, Correction(robust=False))
    kept = {True: set(), False: set()}  # by whether a weight is wide
    for (group, one), (_, other) in zip(before, after, strict=True):
        if group.first.role in ("linear", "conv"):
            kept[calibration.program.tensors[group.first.right][0].numel() > 30].add(one is other)
    assert kept == {True: {True}, False: {False}}


@pytest.mark.slow
def test_a_correction_of_the_calibration_images_lowers_the_error_of_others(tiny, pool, searched):
    """By default it fits the images that calibrated."""
    calibration, before = searched
    config = replace(LOW, stages=(Correction(),))
    assert config.images_fitted == 0
    after = calibration.quantize(config)
    assert "fitted" not in after.provenance
    plain = QuantizedModel(calibration.build_program(before, replace(LOW, stages=())))
    wanted = predict(tiny, pool[24:])
    errors = [logit_error(predict(model, pool[24:]), wanted) for model in (plain, after)]
    assert errors[1] < errors[0]


def test_a_coefficient_of_zero_leaves_the_weight(pool, searched):
    """Its codes are then the nearest ones, and with 1 they are those of the fit."""
    group, assignment, weight, seen = linear_and_moments(pool, searched)
    right = getattr(assignment.right, "quantizer", assignment.right)
    nearest = compensate.with_codes(right, weight)
    found = [
        compensate._refit(
            *(searched[0].program, group, replace(assignment, right=right), seen),
            replace(STAGE, compensate=False, coefficient=coefficient),
        )
        for coefficient in (0.0, 1.0)
    ]
    assert torch.equal(found[0].right.codes, nearest.codes)
    assert not torch.equal(found[1].right.codes, nearest.codes)
    assert found[1].sqnr > found[0].sqnr


@pytest.mark.slow
def test_without_ridge_and_compensation_only_the_bias_changes(pool, searched):
    calibration, before = searched
    after = correct(calibration.program, [pool[:24]], before, Correction(24, ridge=False, compensate=False))
    for (_, one), (_, other) in zip(before, after, strict=True):
        if other.bias is not None and hasattr(one.right, "codes"):
            assert torch.equal(one.right.codes, other.right.codes)
            assert torch.allclose(one.right.quantizer.scale, other.right.quantizer.scale)


# --- as a stage ------------------------------------------------------------------------------------------------------


def test_too_few_images_are_refused(tiniest, pool):
    with pytest.raises(CalibrationError, match=r"takes 24 images, got 20: give more"):
        adalog.quantize(tiniest, pool[:20], replace(LOW, stages=(STAGE,)))
    calibration = Calibration(tiniest, pool[:8])
    with pytest.raises(CalibrationError, match=r"fit 24 images, got 8: give more, or fit fewer"):
        calibration.quantize(replace(LOW, stages=(STAGE,)))


def test_stages_are_written_as_a_list():
    some = (adalog.Evolution(passes=2), Correction(images=8))
    for stages, kinds in ((), []), (some[1:], ["correction"]), (some, ["evolution", "correction"]):
        config = Config(stages=stages)
        assert [each["kind"] for each in json.loads(config.to_json())["stages"]] == kinds
        assert Config.from_json(config.to_json()) == config
    with pytest.raises(ValueError, match="target = 'block' is not one of output, stream"):
        Correction(target="block")
    with pytest.raises(ValueError, match=r"stages = \[\] is not a tuple of stages"):
        Config(stages=[])
    with pytest.raises(ValueError, match="stages that fit images come last"):
        Config(stages=some[::-1])
    assert Config.preset("w2a2", "adalog+").with_fitted_images(1024).images_needed == 1024
    with pytest.raises(ValueError, match="no stage fits images, so 64 images cannot be fitted: choose"):
        Config(stages=()).with_fitted_images(64)
