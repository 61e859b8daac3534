"""What each operand costs alone: losses against whole runs, resumption, and what is refused."""

import copy
import dataclasses
import json
import operator

import pytest
import torch
from torch import nn

from adalog import Calibration, Config, DataError, Resources, Search
from adalog.graph.rewrite import rewrite
from adalog.quantizers import QuantizedTensor, UniformQuantizer
from adalog.report import read_sensitivity
from adalog.study import sensitivity as module
from adalog.study.cost import cost
from adalog.study.sensitivity import Sensitivity, read, sensitivity, units_of
from toys import TOKENS, Attention, Toy, tokens_config

JUDGED = torch.randn(7, 3, 32, 32, generator=torch.Generator().manual_seed(3))
ROWS = torch.randn(5, 6, 16, generator=torch.Generator().manual_seed(4))


@pytest.fixture(scope="module")
def found(calibration, fast):
    return sensitivity(calibration, fast, [JUDGED], (3, 8))


def fitting(x, w, x_hat, w_hat):
    """The factors from 1/2 to 2 of a quantized weight's rows that leave the least error of the output: (rows, 1)."""
    exact, found = x.double() @ w.double().transpose(-1, -2), x_hat.double() @ w_hat.double().transpose(-1, -2)
    dims = tuple(range(exact.ndim - 1))
    factor = (exact * found).sum(dims) / found.square().sum(dims).clamp(min=1e-300)
    return factor.clamp(0.5, 2).unsqueeze(-1)


def alone(product, assignment, kinds, kind):
    """The assignment with one kind of operand quantized; where the right one is a weight, its scales fit the left."""
    left, right = (
        side if mine == kind else None for side, mine in zip((assignment.left, assignment.right), kinds, strict=True)
    )
    if kinds[1] == "weight" and (left is not None or right is not None):
        x, w = product.left.values, product.right.values
        if right is None:
            steps = (w.amax(-1, keepdim=True).clamp(min=0) - w.amin(-1, keepdim=True).clamp(max=0)) / 255
            right = QuantizedTensor.nearest(w, UniformQuantizer(steps, (-w.amin(-1, keepdim=True) / steps).round(), 8))
        x_hat = x if left is None else left.fake_quantize(x)
        right = right.rescale(fitting(x, w, x_hat, right.dequantize()).to(w.dtype))
    return dataclasses.replace(assignment, left=left, right=right)


def whole_losses(calibration, config, width, images):
    """The loss of every operand alone: all of the model is run, and the divergence is written out in float64."""
    config = dataclasses.replace(config, weight_bits=width, activation_bits=width, softmax_bits=width, input_bits=width)
    losses = {}
    with torch.no_grad():
        expected = calibration.program.run([images]).double().softmax(1)
        for group, assignment in calibration.assign(config):
            product = calibration.product(group, assignment, config)
            for kind in set(module._kinds(group)):
                changed = alone(product, assignment, module._kinds(group), kind)
                output = rewrite(calibration.program, [(group, changed)]).run([images]).double().softmax(1)
                losses[group.name, kind] = float((expected * (expected / output).log()).sum(1).mean())
    return losses


@pytest.mark.parametrize("width", [3, 8])
def test_rows_are_the_losses_of_whole_runs(calibration, fast, found, width):
    rows = {(row.unit, row.operand): row.loss for row in found.rows if row.bits == width}
    expected = whole_losses(calibration, fast, width, JUDGED)
    assert rows.keys() == expected.keys()
    for key, loss in expected.items():
        assert rows[key] == pytest.approx(loss, rel=1e-3, abs=1e-9), key
    assert (found.measure, found.images) == ("kl", 7)


def test_units_say_what_they_cost(found, calibration, quantized):
    sites = {site.site: site for unit in found.units for site in unit.sites}
    products = {row.name: row.count for row in cost(quantized.program, [(3, 32, 32)]).products}
    assert {name: site.macs for name, site in sites.items()} == products
    kinds = {name: (site.left, site.right) for name, site in sites.items()}
    assert kinds["head"] == ("activation", "weight")
    assert kinds["patch_embed.conv1"] == ("input", "weight")
    assert kinds["blocks.0.attn.qk"] == ("activation", "activation")
    assert kinds["blocks.1.attn.av"] == ("softmax", "activation")
    assert (sites["blocks.1.mlp.fc1"].weights, sites["blocks.0.attn.qk"].weights) == (32 * 128, 0)
    widths = {(row.unit, row.operand, row.bits): row.widths for row in found.rows}
    assert widths["head", "weight", 3] == (3,)
    assert widths["blocks.0.mlp.fc2", "activation", 3] == (8,)  # a table of one byte
    assert len(found.rows) == 2 * sum(len(unit.operands) for unit in found.units)


@pytest.mark.parametrize("changed", [{"memory": 1}, {"memory": 100_000}, {"resources": Resources(jobs=3)}])
def test_neither_memory_nor_threads_change_a_row(calibration, fast, found, changed):
    again = sensitivity(calibration, fast, [JUDGED], (3, 8), **changed)
    assert again == found


def test_batches_of_judging_images_add_up(tiny, images, fast, monkeypatch):
    # In float64, so that no code flips where products of other shapes round otherwise.
    calibration = Calibration(copy.deepcopy(tiny).double(), images.double())
    found = sensitivity(calibration, fast, [JUDGED.double()], (3, 8))
    monkeypatch.setattr(module, "_BATCH", 3)
    again = sensitivity(calibration, fast, [JUDGED.double()], (3, 8))
    for one, other in zip(again.rows, found.rows, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-6, abs=1e-12)


class Stopped(Exception):
    pass


def test_an_interrupted_run_goes_on(calibration, fast, found, tmp_path, monkeypatch):
    place, told = tmp_path / "rows", []

    def stop(done, total, name):
        told.append((done, total))
        if len(told) == 30:
            raise Stopped

    with pytest.raises(Stopped):
        sensitivity(calibration, fast, [JUDGED], (3, 8), Resources(partial=place, progress=stop))
    finished = len(place.read_text().splitlines()) - 1
    assert 0 < finished < len(found.rows) / 2
    place.write_text(place.read_text() + '{"name": "cut o')
    judged, losses = [], module._ChangeEvaluator.losses
    monkeypatch.setattr(
        module._ChangeEvaluator, "losses", lambda self, rows, *rest: judged.extend(rows) or losses(self, rows, *rest)
    )
    for left in (len(found.rows) - finished, 0):
        assert sensitivity(calibration, fast, [JUDGED], (3, 8), Resources(partial=place)) == found
        assert len(judged) == left
        judged.clear()
    with pytest.raises(DataError, match=r"holds rows of another model, other images or other choices"):
        sensitivity(calibration, fast, [JUDGED[:6]], (3, 8), Resources(partial=place))


def test_progress_counts_searches_and_rows(calibration, fast, found):
    told = []
    sensitivity(calibration, fast, [JUDGED], (3, 8), Resources(progress=lambda *each: told.append(each[:2])))
    total = 2 * len(calibration.groups) + len(found.rows)
    assert told == sorted(told)
    assert {each[1] for each in told} == {total} == {told[-1][0]}


def test_sites_with_pins_are_left_out(calibration, fast):
    config = dataclasses.replace(fast, pinned=(("blocks.*", 8), ("patch_embed.*", "w8")))
    found = sensitivity(calibration, config, [JUDGED], (4,))
    assert {row.unit for row in found.rows} == {"head"}


def test_sites_of_one_norm_are_one_unit():
    def function(m, x):
        y = m.norm(x)
        return m.q(y) + m.turned(y.flip(1)) + m.other(x)

    parts = {name: nn.Linear(16, 8) for name in ("q", "turned", "other")}
    calibration = Calibration(Toy(function, norm=nn.LayerNorm(16), **parts).eval(), ROWS)
    config = Config(search=Search(rounds=1, steps=1), fold_rows=1)
    found = sensitivity(calibration, config, [ROWS], (4,))
    assert [[site.site for site in unit.sites] for unit in found.units] == [["q", "turned"], ["other"]]
    assert [(row.unit, row.operand, row.widths) for row in found.rows] == [
        ("q", "activation", (4, 4)),
        ("q", "weight", (4, 4)),
        ("other", "activation", (4,)),
        ("other", "weight", (4,)),
    ]
    assert found.measure == "relative squared error"


def test_several_outputs_are_judged_by_their_mean_relative_error():
    def function(m, x):
        return {"one": m.one(x), "two": 3 * m.two(x).relu()}

    model = Toy(function, one=nn.Linear(16, 8), two=nn.Linear(16, 8)).eval()
    calibration, config = Calibration(model, ROWS), Config(search=Search(rounds=1, steps=1), stages=())
    found = sensitivity(calibration, config, [ROWS], (3,))
    choices = dataclasses.replace(config, weight_bits=3, activation_bits=3)
    group, assignment = calibration.assign(choices)[0]
    assert [site.name for site in group.sites] == ["one", "two"]
    for row in found.rows:
        changed = alone(calibration.product(group, assignment, choices), assignment, module._kinds(group), row.operand)
        with torch.no_grad():
            outputs = rewrite(calibration.program, [(group, changed)]).run([ROWS])
            expected = calibration.program.run([ROWS])
        errors = [
            float((outputs[name] - expected[name]).square().sum() / expected[name].square().sum()) for name in outputs
        ]
        assert row.loss == pytest.approx(sum(errors) / 2, rel=1e-4)
    with pytest.raises(ValueError, match=r"the KL divergence needs logits \(images, classes\), but the outputs are"):
        sensitivity(calibration, config, [ROWS], (3,), measure="kl")


def test_attention_with_a_float_operand_has_no_row(calibration):
    """PTQ4ViT leaves the images float."""
    config = dataclasses.replace(Config.preset("w6a6", "ptq4vit"), images=4)
    config = dataclasses.replace(config, search=dataclasses.replace(config.search, candidates=3, rounds=1))
    found = sensitivity(calibration, config, [JUDGED], (6,))
    assert not [row for row in found.rows if row.operand == "input"]
    assert [row.operand for row in found.rows if row.unit == "patch_embed.conv1"] == ["weight"]


@pytest.mark.parametrize("widths", [(), (1, 4), (4, 9), (4.0,)])
def test_widths_that_no_operand_can_have(calibration, fast, widths):
    with pytest.raises(ValueError, match="are not whole numbers from 2 to 8"):
        sensitivity(calibration, fast, [JUDGED], widths)


def test_calls_of_one_layer_are_one_site():
    def function(m, x):
        return m.same(m.same(x)) + m.other(x)

    calibration = Calibration(Toy(function, same=nn.Linear(16, 16), other=nn.Linear(16, 16)).eval(), ROWS)
    found = sensitivity(calibration, Config(search=Search(rounds=1, steps=1)), [ROWS], (4,))
    macs = {site.site: site.macs for unit in found.units for site in unit.sites}
    assert macs["same"] == 2 * macs["other"] == 2 * 6 * 16 * 16


def test_attention_of_several_shapes_starts_where_it_changes():
    model = Attention().eval()
    images = torch.randn(4, 2, 5, 32, generator=torch.Generator().manual_seed(5))
    calibration = Calibration(model, images)
    found = sensitivity(calibration, Config(search=Search(rounds=1, steps=1)), [images], (2, 8))
    assert all(row.loss >= 0 for row in found.rows)
    assert sum(row.loss for row in found.rows if row.bits == 2) > sum(row.loss for row in found.rows if row.bits == 8)


def test_rows_of_grouped_weights_are_scaled_group_by_group():
    model = Toy(lambda m, x: m.conv(x), conv=nn.Conv2d(6, 6, 3, padding=1, groups=3)).eval()
    images = torch.randn(4, 6, 8, 8, generator=torch.Generator().manual_seed(6))
    config = Config(search=Search(rounds=1, steps=1))
    found = sensitivity(Calibration(model, images), config, [images], (2, 8), measure="relative squared error")
    losses = {(row.operand, row.bits): row.loss for row in found.rows}
    for operand in ("input", "weight"):
        assert 0 < losses[operand, 8] < 1e-3
        assert losses[operand, 2] > 100 * losses[operand, 8]


# --- the file --------------------------------------------------------------------------------------------------------


def test_a_file_reads_back(found, tmp_path):
    (tmp_path / "rows.json").write_text(json.dumps(found.to_json()))
    assert read(tmp_path / "rows.json") == found
    told = json.loads((tmp_path / "rows.json").read_text())
    assert told["rows"][0]["sites"] == ["patch_embed.conv1"]


def changed(where, **values):
    """Change some values of an object in the JSON: of all of it, of the first row, or of the first site."""
    return lambda told: {"all": told, "row": told["rows"][0], "site": told["units"][0][0]}[where].update(values)


@pytest.mark.parametrize(
    "change",
    [
        *(operator.methodcaller("pop", name) for name in ("rows", "choices", "tensors")),
        *(changed("all", measure="guess"), changed("all", images=0), changed("all", choices=[])),
        *(changed("all", tensors="0" * 63), changed("all", tensors="\x1b" * 64)),
        *(changed("row", loss=float("nan")), changed("row", loss="x"), changed("row", bits=9)),
        *(changed("row", unit="nowhere"), changed("row", operand="bias")),
        *(changed("row", widths=[4, 4]), changed("row", widths=[-1])),
        *(changed("site", macs=-1), changed("site", left="top"), changed("site", more=1)),
        lambda told: told["units"][0].clear(),
        lambda told: told["units"][1].__setitem__(0, told["units"][0][0]),
        lambda told: told["rows"].append(told["rows"][0]),
    ],
)
def test_a_file_of_something_else_is_refused(found, tmp_path, change):
    told = found.to_json()
    change(told)
    (tmp_path / "rows.json").write_text(json.dumps(told))
    with pytest.raises(DataError, match=r"is not the JSON of `adalog sensitivity`"):
        read(tmp_path / "rows.json")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(DataError, match="cannot be read: No such file or directory; make it with"):
        read(tmp_path / "none")
    with pytest.raises(DataError, match="is not the JSON of `adalog sensitivity`"):
        Sensitivity.from_json([])


def twice(m, x):
    """A layer that is called twice, and a weight that two layers share."""
    x = m.shared(m.shared(x.flatten(1)).relu()).relu()
    return m.head(nn.functional.linear(x, m.shared.weight, m.other))


def test_a_report_takes_the_file_of_layers_that_are_called_again(tmp_path):
    images = torch.randn(8, 2, 2, 2, generator=torch.Generator().manual_seed(0))
    parts = {"shared": nn.Linear(8, 8), "head": nn.Linear(8, 3), "other": nn.Parameter(torch.zeros(8))}
    calibration, config = Calibration(Toy(twice, **parts).eval(), images[:4]), Config.preset("w4a4", "minmax")
    found = sensitivity(calibration, config, [images[4:]], widths=(4,))
    path = tmp_path / "losses.json"
    path.write_text(json.dumps(found.to_json()))
    assert read_sensitivity(path, calibration.quantize(config).quantized).measure == "kl"


def test_a_site_is_not_taken_for_an_operation_of_its_name():
    model = Toy(lambda m, x: m.mean(m.fc(x)).mean(1), fc=nn.Linear(8, 8), mean=nn.Linear(8, 4)).eval()
    units = units_of(Calibration(model, TOKENS), tokens_config(), [TOKENS])
    assert [site.macs for site in units["mean"].sites] == [6 * 8 * 4]
