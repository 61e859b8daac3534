"""Calibration of a whole model: layers that are called several times, and what is refused."""

from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import adalog
from adalog import Calibration, CalibrationError, CaptureError, Config, Correction, Reconstruction, Search, library
from adalog.baselines import RangeSearch
from adalog.calibration import operands
from adalog.graph.sites import census
from adalog.methods import METHODS
from adalog.study.cost import cost
from stored import deserialise, serialise
from toys import TOKENS, Toy, decibels, tokens_config

EXECUTORS = ("reference", "torch", *(["native"] if library.levels() else []))
IMAGES = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(3))


def pyramid(m, x):
    """The head of a detector on maps of three sizes, with values that grow from one to the next."""
    maps = [m.stem(x), m.stem(F.avg_pool2d(x, 2)) * 3, m.stem(F.avg_pool2d(x, 4)) * 9]
    hidden = [m.shared(value).relu() for value in maps]
    return [*map(m.scores, hidden), *map(m.boxes, hidden)]


def make_pyramid():
    torch.manual_seed(0)
    parts = {"stem": nn.Conv2d(3, 8, 2, 2), "shared": nn.Conv2d(8, 8, 3, 1, 1)}
    return Toy(pyramid, **parts, scores=nn.Conv2d(8, 2, 1), boxes=nn.Conv2d(8, 4, 1)).eval()


def twice(m, x):
    """Two values through the same linears, one after the other."""
    one, other = x.flatten(2).transpose(1, 2).chunk(2, 1)
    return torch.cat([m.out(F.gelu(m.inner(value))) for value in (one, other)], 1).mean(1)


def once(m, x):
    """The same values together, the first image's halves behind each other."""
    one, other = x.flatten(2).transpose(1, 2).chunk(2, 1)
    value = m.out(F.gelu(m.inner(torch.cat([one, other], 0))))
    return torch.cat(value.chunk(2, 0), 1).mean(1)


def quantized_in_calls(config):
    """The programs of a model that calls its layers twice, and of one that calls them once on the same values."""
    for function in (twice, once):
        torch.manual_seed(0)
        model = Toy(function, inner=nn.Linear(3, 16), out=nn.Linear(16, 5)).eval()
        yield Calibration(model, IMAGES).quantize(config).program


@pytest.fixture(scope="module")
def pyramid_calibration():
    return Calibration(make_pyramid(), IMAGES)


@pytest.fixture(scope="module")
def pyramid_quantized(pyramid_calibration, fast):
    return pyramid_calibration.quantize(replace(fast, images=8))


def test_calls_are_one_site(pyramid_calibration):
    wanted = [(name, 3) for name in ("stem", "shared", "scores", "boxes")]
    assert [(site.name, len(site.calls)) for site in pyramid_calibration.sites] == wanted
    found = census(pyramid_calibration.program, pyramid_calibration.sites, pyramid_calibration.pairs)
    assert [(row["site"], row["calls"]) for row in found["sites"]] == wanted
    assert found["convs"] == 4
    kinds = {site.name: site.left_source.kind for site in pyramid_calibration.sites}
    assert kinds == {"stem": "other", "shared": "other", "scores": "relu", "boxes": "relu"}
    assert pyramid_calibration.sites[2].left_source.minimum == 0.0


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: (F.conv2d(x, m.a.weight, m.a.bias), F.conv2d(x, m.a.weight, m.b.bias)),
        lambda m, x: (F.conv2d(x, m.a.weight, m.a.bias), F.conv2d(x, m.a.weight, m.a.bias, stride=2)),
        lambda m, x: (F.conv2d(x, m.a.weight, m.a.bias), F.conv2d(x, m.a.weight)),
    ],
    ids=["bias", "stride", "no bias"],
)
def test_another_bias_or_geometry_is_another_site(function, fast):
    torch.manual_seed(0)
    calibration = Calibration(Toy(function, a=nn.Conv2d(3, 4, 2), b=nn.Conv2d(3, 4, 2)).eval(), IMAGES)
    assert [len(site.calls) for site in calibration.sites] == [1, 1]
    assert len(calibration.quantize(replace(fast, images=8)).program.weights) == 2


def test_a_range_holds_what_all_calls_read(pyramid_calibration):
    """The oracle: minimum and maximum of the inputs of all calls, in the float model."""
    config = replace(Config.preset("w8a8", "minmax"), images=8)
    model, read = make_pyramid(), []
    model.shared.register_forward_pre_hook(lambda module, args: read.append(args[0]))
    with torch.no_grad():
        model(IMAGES)
    assert len(read) == 3
    low, high = (float(pick(torch.stack([pick(value) for value in read]))) for pick in (torch.min, torch.max))
    quantizer = pyramid_calibration.quantize(config).program.quantizers["shared.input"]
    assert float(quantizer.scale) == pytest.approx((high - low) / 255, rel=1e-5)


def test_one_weight_and_one_quantizer_are_stored(pyramid_quantized):
    program, names = pyramid_quantized.program, ["stem", "shared", "scores", "boxes"]
    assert program.weights.keys() == {f"{name}.weight" for name in names}
    assert program.quantizers.keys() == {f"{name}.input" for name in names}
    assert [row.site for row in pyramid_quantized.ledger] == names
    assert pyramid_quantized.float_sites() == []


def test_it_is_saved_and_runs_in_integers(pyramid_quantized):
    loaded = deserialise(serialise(pyramid_quantized))
    wanted = pyramid_quantized(IMAGES)
    assert all(map(torch.equal, wanted, loaded(IMAGES)))
    for executor in EXECUTORS:
        for a, b in zip(wanted, loaded.compile(executor)(IMAGES), strict=True):
            assert float((a - b).abs().max()) < 1e-4 * float(a.abs().max())
    names = list(loaded.compile("reference").sites)
    assert names[0] == "stem"
    assert len(names) == len(set(names)) == 12


def test_every_call_costs(pyramid_quantized):
    rows = [row for row in cost(pyramid_quantized.program, [(3, 16, 16)]).rows if row.role == "conv"]
    assert len(rows) == 12
    assert sum(row.weight_bytes > 0 for row in rows) == 4  # a weight is stored once
    assert sum(row.count for row in rows if row.name.startswith("stem")) == (64 + 16 + 4) * 8 * 12


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("method", list(METHODS))
def test_every_method_takes_layers_that_are_called_several_times(method, pyramid_calibration):
    config = Config.preset("w8a8", method)
    short = {Correction: {"images": 8}, Reconstruction: {"images": 8, "iterations": 4, "batch": 4}}
    stages = tuple(replace(stage, **short.get(type(stage), {})) for stage in config.stages)
    model = pyramid_calibration.quantize(replace(config, images=8, stages=stages))
    for a, b in zip(make_pyramid()(IMAGES), model(IMAGES), strict=True):
        assert float((a - b).norm() / a.norm()) < 0.5


# --- against the same values in one call ------------------------------------------------------------------------------


# The probes of importance give two calls other random signs than one.
ALIKE = Config(4, 4, 4, images=8, search=Search(importance=0.0), stages=())


@pytest.mark.parametrize(
    "config",
    [
        ALIKE,
        replace(Config.preset("w4a4", "minmax"), images=8),
        replace(ALIKE, stages=(Correction(images=8, coefficient=1.0, robust=False),)),
        replace(ALIKE, stages=(Correction(importance=0.0),)),
    ],
    ids=["search", "minmax", "fitted", "corrected"],
)
def test_two_calls_are_calibrated_as_one_on_both(config):
    split, joined = quantized_in_calls(config)
    assert sorted(split.weights) == sorted(joined.weights) == ["inner.weight", "out.weight"]
    for name, weight in joined.weights.items():
        assert torch.equal(split.weights[name].codes, weight.codes)
        torch.testing.assert_close(split.weights[name].quantizer.scale, weight.quantizer.scale)
    for name, quantizer in joined.quantizers.items():
        torch.testing.assert_close(split.quantizers[name].scale, quantizer.scale)
    for name in ("inner.bias", "out.bias"):
        torch.testing.assert_close(split.tensors[name], joined.tensors[name], rtol=1e-4, atol=1e-5)


def test_calibrated_in_order_a_call_is_quantized_by_the_calls_up_to_it():
    """In the end the range is that of all calls; the first linear reads the same in any order."""
    config = replace(Config.preset("w4a4", "minmax"), images=8, search=RangeSearch(in_order=True))
    split, joined = quantized_in_calls(config)
    torch.testing.assert_close(split.quantizers["inner.input"].scale, joined.quantizers["inner.input"].scale)
    ratio = float(split.quantizers["out.input"].scale / joined.quantizers["out.input"].scale)
    assert ratio == pytest.approx(1, abs=0.1)


def test_squared_gradients_of_calls_weight_their_own_rows():
    """PTQ4ViT's search, whose errors are weighted, gives the same whether the rows come in one call or in two."""
    config = replace(Config.preset("w4a4", "ptq4vit"), images=8)
    split, joined = quantized_in_calls(config)
    for name, weight in joined.weights.items():
        torch.testing.assert_close(split.weights[name].quantizer.scale, weight.quantizer.scale)


def recurrent(m, x):
    """A block that runs twice, one time after the other, norm and all."""
    y = m.embed(x).flatten(2).transpose(1, 2)
    for _ in range(2):
        y = y + m.out(F.gelu(m.inner(m.norm(y))))
    return m.head(y.mean(1))


@pytest.mark.parametrize("stages", [(), (Correction(images=8), Reconstruction(images=8, iterations=4, batch=4))])
def test_a_block_that_runs_twice(stages, fast):
    torch.manual_seed(0)
    parts = {"embed": nn.Conv2d(3, 8, 4, 4), "norm": nn.LayerNorm(8), "inner": nn.Linear(8, 16)}
    model = Toy(recurrent, **parts, out=nn.Linear(16, 8), head=nn.Linear(8, 5)).eval()
    quantized = Calibration(model, IMAGES).quantize(replace(fast, images=8, stages=stages))
    assert set(quantized.refusals.values()) == {"not folded: inner is called several times"}
    assert len(quantized.program.weights) == 4
    wanted = model(IMAGES).detach()
    assert float((quantized(IMAGES) - wanted).norm() / wanted.norm()) < 0.3


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_model_that_fails_on_its_images_is_told():
    with pytest.raises(CaptureError, match="Double"):
        adalog.quantize(Toy(lambda m, x: m.fc(x), fc=nn.Linear(8, 3)).eval(), TOKENS.double(), tokens_config())


@pytest.mark.parametrize("more", [(TOKENS, TOKENS), TOKENS.double(), TOKENS[..., :4, None]])
def test_unlabelled_images_are_those_that_the_model_takes(more):
    model = Toy(lambda m, x: m.fc(x), fc=nn.Linear(8, 3)).eval()
    with pytest.raises(CalibrationError, match="the unlabelled images are"):
        Calibration(model, TOKENS, unlabelled=more)


def test_arguments_that_nothing_can_be_done_with(tiniest, images, tmp_path, monkeypatch):
    config = Config(images=4, search=Search(rounds=1, steps=0))
    with pytest.raises(CalibrationError, match="on the meta device, which holds no values"):
        adalog.Calibration(tiniest, images.to("meta"))
    with pytest.raises(ValueError, match="seed = 'a' is not a whole number"):
        adalog.Calibration(tiniest, images, seed="a")
    adalog.Calibration(tiniest, images, seed=np.int64(1), memory=np.int64(2**30))
    for call in (adalog.Calibration.quantize, adalog.Calibration.search):
        with pytest.raises(ValueError, match="config = 'w4a4' is not a Config: give one such as"):
            call(adalog.Calibration(tiniest, images), "w4a4")
    monkeypatch.chdir(tmp_path)
    adalog.Calibration(tiniest, images).quantize(config, adalog.Resources(partial="searches"))
    assert (tmp_path / "searches").exists()


def of_convolution(function):
    return Toy(lambda m, x: m.fc(function(x)).flatten(1), fc=nn.Conv2d(3, 4, 16)).eval()


PIXELS = torch.randint(256, (8, 3, 16, 16), generator=torch.Generator().manual_seed(4)).float()
AS_THEY_ARE = of_convolution(lambda x: x.contiguous())


@pytest.mark.parametrize(
    ("model", "images", "words"),
    [
        (AS_THEY_ARE, torch.full_like(IMAGES, 0.3), "one and the same value"),
        (AS_THEY_ARE, PIXELS, "look like pixel values from 0 to 255"),
    ],
)
def test_a_warning_of_images_that_are_not_prepared(model, images, words):
    with pytest.warns(UserWarning, match=words):
        Calibration(model, images)


@pytest.mark.parametrize(
    ("model", "images"),
    [
        (of_convolution(lambda x: (x - 120) / 60), PIXELS),
        (AS_THEY_ARE, PIXELS / 255),
        (AS_THEY_ARE, PIXELS - 120),
        (AS_THEY_ARE, (PIXELS / 20).floor()),  # numbers of classes
        (AS_THEY_ARE, PIXELS + 0.5),
    ],
)
def test_no_warning_of_other_images(model, images):
    """A warning fails the test."""
    assert len(Calibration(model, images).sites) == 1


def enlarged(factor, by_a_product):
    """A model with a second layer of large weights, or with large values in front of a product of two values."""
    torch.manual_seed(1)
    parts = {"first": nn.Linear(8, 16), "second": nn.Linear(16, 5)}
    parts["second"].weight.data *= 1 if by_a_product else factor

    def function(model, x):
        x = model.first(x)
        return model.second((x * factor @ (x * factor).mT) @ x if by_a_product else x.relu())

    return Toy(function, **parts).eval()


@pytest.mark.parametrize("by_a_product", [False, True])
@pytest.mark.parametrize("method", ["adalog", "ptq4vit"])
def test_squares_that_overflow_are_told_by_the_site(method, by_a_product):
    words = "values of (second|qk) reach [0-9.]+e[+]1[4-9], and the search adds up squares, which overflow"
    with pytest.raises(CalibrationError, match=words):
        adalog.quantize(enlarged(1e14 if by_a_product else 1e20, by_a_product), TOKENS, tokens_config("w8a8", method))


@pytest.mark.parametrize("factor", [1e10, 1e20, 1e25])
def test_ranges_of_large_weights_do_not_overflow(factor):
    qmodel = adalog.quantize(enlarged(factor, False), TOKENS, tokens_config("w8a8", "minmax"))
    wanted = enlarged(factor, False)(TOKENS).detach().double()
    assert float((qmodel(TOKENS) - wanted).norm() / wanted.norm()) < 0.05
    assert 25 < qmodel.ledger[1].sqnr < 60


# --- sites with many rows --------------------------------------------------------------------------------------------


def test_a_site_with_many_rows_is_searched_on_a_part_of_them(tiniest, monkeypatch):
    images = torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(4))
    config = replace(Config.preset("w6a6"), images=16, stages=())
    whole = adalog.quantize(tiniest, images, config)
    assert not any("searched on a part" in reason for reason in whole.refusals.values())
    monkeypatch.setattr(operands, "_ROWS", 300)
    part = adalog.quantize(tiniest, images, config)
    reasons = {name: reason for name, reason in part.refusals.items() if "searched on a part" in reason}
    assert reasons
    assert reasons.keys() <= {row.site for row in part.ledger}
    output = tiniest(images).detach()
    assert decibels(part(images), output) > decibels(whole(images), output) - 1


# --- groups that are searched together -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stacking(tiny, images):
    """A calibration that searches as on an accelerator."""
    calibration = Calibration(tiny, images)
    calibration._one_by_one = False
    return calibration


def test_groups_of_the_same_shapes_are_searched_together(stacking, calibration, fast, monkeypatch):
    """Pinned bits and little memory part a stack."""

    def stacks(calibration, config=fast):
        return [[group.name for group in stack] for stack in calibration._stacks(calibration.groups, config)]

    both = stacks(stacking)
    assert sorted(chain.from_iterable(both)) == sorted(group.name for group in stacking.groups)
    assert ["blocks.0.mlp.fc2", "blocks.1.mlp.fc2"] in both
    assert max(map(len, both)) == 2
    pinned = stacks(stacking, replace(fast, pinned=(("blocks.1.mlp.fc2", 8),)))
    assert ["blocks.0.mlp.fc2"] in pinned
    assert all(["blocks.0.attn.qk", "blocks.1.attn.qk"] in each for each in (both, pinned))
    assert max(map(len, stacks(calibration))) == 1
    monkeypatch.setattr(stacking, "_memory", 2)
    assert max(map(len, stacks(stacking))) == 1


@pytest.mark.parametrize("changes", [{}, {"search": Search(rounds=2)}, {"post_gelu": "log2"}], ids=str)
def test_what_is_searched_together_is_as_good_as_alone(stacking, calibration, changes):
    config = Config(images=4, stages=(), **changes)
    alone, together = calibration.assign(config), stacking.assign(config)
    off = [other.sqnr - one.sqnr for (_, one), (_, other) in zip(alone, together, strict=True)]
    kinds = [[(group.name, type(one.left), one.fold is None) for group, one in each] for each in (alone, together)]
    assert kinds[0] == kinds[1]
    assert abs(sum(off)) / len(off) < 0.05
    assert min(off) > -0.5
    calibration.build_program(together, config)  # their quantizers have the shapes that a program takes


def test_a_search_together_goes_on_from_a_partial_file(stacking, tiny, images, fast, tmp_path):
    whole = stacking.assign(fast, adalog.Resources(partial=tmp_path / "whole"))
    lines = (tmp_path / "whole").read_bytes().splitlines(keepends=True)
    (tmp_path / "part").write_bytes(b"".join(lines[: len(lines) // 2]))
    again = Calibration(tiny, images)
    again._one_by_one = False
    found = again.assign(fast, adalog.Resources(partial=tmp_path / "part"))
    assert [each.sqnr for _, each in found] == [each.sqnr for _, each in whole]
