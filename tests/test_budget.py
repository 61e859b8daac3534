"""Widths within a budget: against exhaustive choice, on real files, and where nothing fits."""

import copy
import dataclasses
import itertools
import json
import random
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

from adalog import Calibration, Config, DataError, artifact, load
from adalog.cli import pareto
from adalog.cli.console import check_unfinished, remove_finished
from adalog.inputs.images import ImageSet
from adalog.quantizers import FLOAT_BITS
from adalog.study import budget as module
from adalog.study import pareto as study_pareto
from adalog.study.budget import Budget, Totals, choose, quantize_within
from adalog.study.cost import cost
from adalog.study.evaluate import PreparedImages
from adalog.study.pareto import curve
from adalog.study.sensitivity import Row, Sensitivity, Unit, UnitSite, sensitivity
from commands import call, refusal, run, write_images

JUDGED = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(3))
WIDTHS = (2, 4, 8)


def problem(seed, count=4):
    """Made-up rows whose losses fall with the width, by about four times a bit."""
    draw = random.Random(seed)
    units, rows = [], []
    for number in range(count):
        kinds = draw.choice([("activation", "weight"), ("softmax", "activation"), ("input", "weight")])
        weights = draw.randint(50, 5000) if kinds[1] == "weight" else 0
        units.append(Unit((UnitSite(f"site{number}", draw.randint(100, 9000), weights, *kinds),)))
        for kind, bits in itertools.product(kinds, WIDTHS):
            loss = draw.uniform(0.2, 5) * 4.0**-bits
            rows.append(Row(f"site{number}", kind, bits, loss, (bits,)))
    return Sensitivity("kl", 8, tuple(units), tuple(rows), "0" * 64, {})


def every_choice(found):
    """(loss, bytes, BOPs) of every combination of widths, from their definitions."""
    losses = {(row.unit, row.operand, row.bits): row.loss for row in found.rows}

    def costs_of(site, left, right):
        loss = losses[site.site, site.left, left] + losses[site.site, site.right, right]
        return loss, -(-site.weights * right // 8), site.macs * left * right

    pairs = list(itertools.product(WIDTHS, WIDTHS))
    options = [[costs_of(unit.sites[0], *pair) for pair in pairs] for unit in found.units]
    table = [[sum(part) for part in zip(*picked, strict=True)] for picked in itertools.product(*options)]
    return torch.tensor(table, dtype=torch.float64)


@pytest.mark.parametrize("limits", [["bytes"], ["bops"], ["bytes", "bops"]])
def test_choices_come_close_to_the_best_of_all(limits):
    ratios = []
    for seed in range(12):
        found = problem(seed)
        table = every_choice(found)
        columns = {"bytes": table[:, 1], "bops": table[:, 2]}
        most = {limit: int(columns[limit].quantile(0.3)) for limit in limits}
        plan, fits = choose(found, Budget(**most)), torch.ones(len(table), dtype=torch.bool)
        for limit, value in most.items():
            assert getattr(plan.totals, limit) <= value
            fits &= columns[limit] <= value
        ratios.append(plan.totals.loss / float(table[fits][:, 0].min()))
    assert min(ratios) >= 1 - 1e-9
    assert sum(ratios) / len(ratios) < 1.05
    assert max(ratios) < 1.4


def test_a_limit_of_loss_is_met_at_little_cost():
    ratios = []
    for seed in range(12):
        found = problem(seed)
        table = every_choice(found)
        limit = float(table[:, 0].quantile(0.2))
        plan = choose(found, Budget(loss=limit))
        assert plan.totals.loss <= limit
        worth = table[:, 1] / table[:, 1].max() + table[:, 2] / table[:, 2].max()
        mine = plan.totals.bytes / table[:, 1].max() + plan.totals.bops / table[:, 2].max()
        ratios.append(float(mine / worth[table[:, 0] <= limit].min()))
    assert min(ratios) >= 1 - 1e-9
    assert sum(ratios) / len(ratios) < 1.05


def test_several_limits_are_all_met():
    found = problem(1)
    table = every_choice(found)
    good = table[table[:, 0] <= table[:, 0].quantile(0.4)]
    limits = Budget(int(good[:, 1].quantile(0.3)), float(good[:, 2].quantile(0.5)), float(good[:, 0].max()))
    plan = choose(found, limits)
    assert plan.totals.bytes <= limits.bytes
    assert plan.totals.bops <= limits.bops
    assert plan.totals.loss <= limits.loss


def test_what_lies_beside_counts():
    found = problem(2)
    assert choose(found, Budget(9000)).totals.bytes > 6000
    assert choose(found, Budget(9000), overhead=Totals(3000.0, 0.0)).totals.bytes <= 6000


def test_widths_that_are_given_stay():
    found = problem(3)
    plan = choose(found, Budget(5000), {"activation": 4, "softmax": 2, "input": 8})
    widths = {pair for bits in plan.widths.values() for pair in bits.items() if pair[0] != "weight"}
    assert ("activation", 4) in widths <= {("activation", 4), ("softmax", 2), ("input", 8)}
    with pytest.raises(DataError, match=r"with activation at 5 bits is missing: measure that width too"):
        choose(found, Budget(5000), {"activation": 5})


def test_all_that_fits_is_as_wide_as_can_be():
    found = problem(4)
    plan = choose(found, Budget(10**9))
    assert all(width == 8 for bits in plan.widths.values() for width in bits.values())


def test_a_budget_that_nothing_meets_says_what_could_be():
    found = problem(5)
    least = int(every_choice(found)[:, 1].min())
    told = f"no choice of widths meets the budget; each limit alone can be as low as {least:,} bytes"
    with pytest.raises(DataError, match=told) as refusal:
        choose(found, Budget(least - 1))
    measured = {row.bits for row in found.rows}
    assert ("or measure smaller widths" in str(refusal.value)) == (min(measured) > 2)
    assert f"{min(measured)}, " in str(refusal.value)
    assert choose(found, Budget(least)).totals.bytes == least


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        ({}, "a budget needs a limit"),
        ({"bytes": 0}, "the limit of bytes is 0: give a positive, finite number"),
        ({"bops": float("inf")}, "the limit of BOPs is inf: give a positive"),
        ({"loss": float("nan")}, "the limit of loss is nan: give a positive"),
    ],
)
def test_limits_of_another_kind_are_refused(limits, told):
    with pytest.raises(ValueError, match=told):
        Budget(**limits)


# --- models ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(calibration, fast):
    return sensitivity(calibration, fast, [JUDGED], (2, 4, 8))


def test_a_model_within_a_budget(calibration, fast, found, quantized, images, tmp_path):
    size, bops = len(artifact.serialise(quantized.quantized)), cost(quantized.program, [(3, 32, 32)]).bops
    notes = {"preprocessing": {"size": [32, 32]}}
    chosen = quantize_within(calibration, fast, found, Budget(size + 300, bops), notes=notes)
    assert chosen.bytes == chosen.model.save(tmp_path / "model") <= size + 300
    assert chosen.bops == cost(chosen.model.program, [(3, 32, 32)]).bops <= bops
    assert chosen.bops > 0.9 * bops
    assert chosen.plan.totals.loss < sum(row.loss for row in found.rows if row.bits == 4)
    loaded = load(tmp_path / "model")
    assert torch.equal(loaded(images), chosen.model(images))
    assert loaded.provenance["preprocessing"] == {"size": [32, 32]}
    assert loaded.provenance["budget"]["limits"] == {"bytes": size + 300, "bops": bops, "loss": None}
    for name, bits in chosen.plan.widths.items():
        at = loaded.config.for_sites([name])
        assert {kind: getattr(at, f"{kind}_bits") for kind in bits} == bits
    again = quantize_within(calibration, fast, found, Budget(size + 300, bops), notes=notes)
    assert artifact.serialise(again.model.quantized) == artifact.serialise(chosen.model.quantized)


def test_bytes_alone_leave_activations_as_they_are(calibration, fast, found, quantized):
    size = len(artifact.serialise(quantized.quantized))
    chosen = quantize_within(calibration, fast, found, Budget(int(size * 1.1)))
    kept = {(kind, bits[kind]) for bits in chosen.plan.widths.values() for kind in bits if kind != "weight"}
    assert kept == {("activation", 4), ("softmax", 4), ("input", 8)}
    assert {bits["weight"] for bits in chosen.plan.widths.values() if "weight" in bits} - {4}
    assert size < chosen.bytes <= int(size * 1.1)


def test_rows_of_another_model_are_refused(calibration, fast, found):
    """Of other units, and of wider ones."""
    sites = [dataclasses.replace(unit.sites[0], weights=7) for unit in found.units]
    wider = dataclasses.replace(found, units=tuple(Unit((site,)) for site in sites))
    for other in (problem(0), wider):
        told = r"measured on another model, whose patch_embed.conv1 differs: measure this"
        with pytest.raises(DataError, match=told):
            quantize_within(calibration, fast, other, Budget(10**6))


def test_a_budget_below_everything(calibration, fast, found):
    with pytest.raises(DataError, match="no choice of widths meets the budget; each limit alone can be as low as"):
        quantize_within(calibration, fast, found, Budget(1000))


def test_rows_of_other_weights_are_refused(images, tiny, calibration, fast, found):
    """Of a model of the same form, as another checkpoint of it is."""
    other = copy.deepcopy(tiny)
    with torch.no_grad():
        other.head.bias[0] += 1
    again = Calibration(other, images)
    told = f"digest {found.tensors[:16]} instead of [0-9a-f]{{16}}: measure this model with `adalog sensitivity`"
    with pytest.raises(DataError, match=told):
        quantize_within(again, fast, found, Budget(10**6))
    with pytest.raises(DataError, match=told):
        curve(again, fast, found, other, JUDGED)


def test_rows_of_another_method_are_refused(calibration, fast, found):
    minmax = dataclasses.replace(Config.preset("w4a4", "minmax"), images=4)
    with pytest.raises(
        DataError, match=r'measured with another method, in which "\w+" is .* instead of .*: measure this model'
    ):
        quantize_within(calibration, minmax, found, Budget(10**6))
    slower = dataclasses.replace(fast, search=dataclasses.replace(fast.search, steps=2))
    with pytest.raises(DataError, match=r'in which "search\.steps" is 1 instead of 2: measure this model'):
        curve(calibration, slower, found, calibration.program.run, JUDGED)
    stages = Config.preset("w3a3", "adalog+").stages
    found.check(calibration, dataclasses.replace(fast, images=2, weight_bits=3, pinned=(("*", 8),), stages=stages))


# --- the command line ------------------------------------------------------------------------------------------------

OWN = """
import torch
from torch import nn
from adalog.inputs.images import Preprocessing

def small():
    torch.manual_seed(0)
    layers = [nn.Flatten(), nn.Linear(192, 48), nn.GELU(), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 4)]
    return nn.Sequential(*layers).eval(), Preprocessing(size=(8, 8), resize=8)

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = small()[0]

    def forward(self, x):
        return self.layers(x), self.layers(x).relu()

def two():
    return Two(), Preprocessing(size=(8, 8), resize=8)

def maps():
    return nn.Conv2d(3, 4, 1).eval(), Preprocessing(size=(8, 8), resize=8)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model of one's own and images."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own.py").write_text(OWN)
    write_images(folder / "images", {f"{index % 4}/{index // 4}.png": index % 4 for index in range(32)})
    (folder / "images" / "labels.csv").unlink()
    (folder / "left").mkdir()
    (folder / "left" / "rows.json.partial.4").write_text("searches")
    for label in range(2):
        shutil.copytree(folder / "images" / str(label), folder / "two" / str(label))
    return folder


SEARCHED = "own.py:small --data images --images 8 --threads 1"
IMAGES = "--data images --images 8 --threads 1 --judged 8"
GIVEN = f"own.py:small {IMAGES}"


@pytest.mark.slow
def test_commands_from_rows_to_curves(place):
    told = run("sensitivity", *GIVEN.split(), "--widths", "2,4,8", "-o", "rows.json", cwd=place)
    assert "Each operand quantized alone: KL divergence" in told
    rows = json.loads((place / "rows.json").read_text())
    assert (rows["measure"], rows["images"], len(rows["rows"])) == ("kl", 8, 18)
    assert not list(place.glob("*.partial*"))
    given = (*SEARCHED.split(), "--sensitivity", "rows.json")
    told = json.loads(run("quantize", *given, "--budget", "9kB", "-o", "small", "--json", "-", cwd=place))
    assert told["bytes"] == (place / "small").stat().st_size == told["budget"]["bytes"] <= 9000
    assert {bits["activation"] for bits in told["budget"]["widths"].values()} == {4}
    told = json.loads(run("quantize", *given, "--target-fixops", "2.2K", "-o", "fast", "--json", "-", cwd=place))
    assert told["budget"]["bops"] <= 2200 * 64
    told = json.loads(run("quantize", *GIVEN.split(), "--max-kl", "0.01", "-o", "good", "--json", "-", cwd=place))
    assert 0 < told["budget"]["foretold"] <= 0.01
    assert not list(place.glob("*.partial*"))
    drawn = ("--budgets", 3, "-o", "curve.png", "--json", "-")
    points = json.loads(run("pareto", *given, "--judged", 8, "--val", "images", *drawn, cwd=place))["points"]
    assert [point["chosen"] for point in points] == [False] * 3 + [True] * 3
    assert all(0 <= point["top1"] <= 1 and point["loss"] > 0 for point in points)
    sizes = [point["bytes"] for point in points if point["chosen"]]
    assert sizes == sorted(sizes)
    assert sizes[-1] <= points[2]["bytes"] + 1024
    assert points[0]["loss"] > points[2]["loss"]
    with Image.open(place / "curve.png") as picture:
        assert picture.width > 800


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (f"quantize {GIVEN} --budget small", "--budget 'small' is not a size: give one like 2GiB"),
        (f"quantize {GIVEN} --target-bops '4 gigs'", "--target-bops '4 gigs' is not a number: give one like 40G"),
        (f"quantize {GIVEN} --target-bops 4 --target-fixops 4", "set the same limit: give only one of them"),
        (f"quantize {GIVEN} --max-kl -1", "the limit of loss is -1.0: give a positive, finite number"),
        (f"quantize {SEARCHED} --sensitivity x", "--sensitivity needs a budget: give --budget"),
        (f"quantize {GIVEN}", "--judged has no effect unless a budget measures its losses now"),
        (f"quantize {GIVEN} --budget 1kB --sensitivity x", "--judged has no effect"),
        (f"quantize {SEARCHED} --budget 1kB --sensitivity x", "x cannot be read: No such file"),
        ("quantize demo:detector --budget 1MB", "budgets do not support detectors: give --bits"),
        (f"sensitivity {GIVEN} --widths 1,4", "--widths '1,4' is not a list of bits from 2 to 8"),
        ("sensitivity nothing", "unknown model 'nothing': give"),
        (
            f"sensitivity {GIVEN} -o left/rows.json",
            "left/rows.json.partial.4 holds results of an unfinished run: continue it with --resume",
        ),
        ("pareto demo:detector", "is a detector, which this command does not support"),
        (
            "sensitivity demo --judged 1000",
            "has only 960 images other than the calibration images, but --judged is 1000",
        ),
        (
            "sensitivity own.py:small --data images --images 8 --judged 30",
            "images has only 32 images, but --images, --judged and the method need 38",
        ),
        (f"pareto {GIVEN} --widths 4", "--widths 4 has only one width: give two or more"),
        (
            f"pareto {GIVEN} --widths 3,4 --sensitivity x",
            "--widths has no effect on the measured file of --sensitivity",
        ),
        (f"pareto {GIVEN} -o curve.gif", "curve.gif does not end in .png or .svg: give --out such a file"),
        (f"pareto {GIVEN} --val nowhere", "nowhere"),
        (f"pareto own.py:two {IMAGES}", "the model has 2 outputs, but a curve needs a single one"),
        (f"pareto own.py:maps {IMAGES}", "(1, 4, 8, 8), not logits"),
        (f"quantize own.py:maps {IMAGES} --max-kl 0.1", "--max-kl needs a model that outputs logits"),
        (f"pareto {GIVEN} --val two", "two has 2 subfolders, one per class, but own.py:small has"),
    ],
)
def test_bad_input_is_one_line_and_code_2(place, arguments, told, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(place)
    before = {path: path.is_file() and path.read_bytes() for path in place.rglob("*")}
    assert told in refusal(monkeypatch, capsys, *shlex.split(arguments))
    assert {path: path.is_file() and path.read_bytes() for path in place.rglob("*")} == before


def test_a_limit_of_kl_takes_a_classifier(place, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(place)
    file = tmp_path / "features.json"
    file.write_text(json.dumps(dataclasses.replace(problem(0), measure="relative squared error").to_json()))
    told = refusal(monkeypatch, capsys, "quantize", *SEARCHED.split(), "--max-kl", "0.1", "--sensitivity", file)
    assert told == "error: --max-kl needs a model that outputs logits: use --budget or --target-bops for this model\n"


def test_only_what_a_run_left_counts_as_left(tmp_path):
    partial = tmp_path / "m[1].st.partial"
    for name in ("m[1].st.partial", "m[1].st.partial.alone.4", "m[1].st.partial-notes", "m1.st.partial"):
        (tmp_path / name).write_text("")
    (tmp_path / "m[1].st.partial.folder").mkdir()
    (tmp_path / "m[1].st.partial.bak").write_text("a copy")
    with pytest.raises(DataError, match=r"m\[1\].st.partial holds results of an unfinished run"):
        check_unfinished(partial, resume=False)
    check_unfinished(partial, resume=True)
    remove_finished(partial)
    left = ["m1.st.partial", "m[1].st.partial-notes", "m[1].st.partial.bak", "m[1].st.partial.folder"]
    assert sorted(path.name for path in tmp_path.iterdir()) == left
    check_unfinished(partial, resume=False)
    check_unfinished(tmp_path / "nowhere" / "x", resume=False)


def test_a_curve_knows_the_images_that_it_was_judged_by():
    """Other images with the same labels are another curve."""
    labels, images = torch.tensor([0, 1]), torch.zeros(2, 3, 8, 8)
    files = [ImageSet((Path(folder) / "a.png", Path(folder) / "b.png"), (0, 1)) for folder in ("one", "other")]
    given = [images, images + 1, *files]
    told = [study_pareto._fingerprint(PreparedImages(each), labels) for each in (*given, *given)]
    assert len(set(told)) == len(given)


@pytest.mark.slow
def test_what_is_finished_of_a_curve_stays_until_its_json_is_written(place, monkeypatch, capsys):
    """And a damaged point is refused in one line."""
    monkeypatch.chdir(place)
    left, points = {}, Path("curve2.png.partial.points")
    for name in ("emit_json", "say"):
        monkeypatch.setattr(pareto, name, lambda *_, name=name: left.update({name: points.exists()}))
    given = ("pareto", *GIVEN.split(), "--method", "minmax", "--widths", "2,8", "--budgets", 2, "-o", "curve2.png")
    monkeypatch.setattr(pareto, "remove_finished", lambda partial: None)
    assert call(monkeypatch, capsys, *given) == (0, "")
    kept, begun = points.read_text(), left.copy()
    for change in (('"bops"', '"other"'), ('"bytes": ', '"bytes": 0.')):
        points.write_text(kept.replace(*change))
        told = refusal(monkeypatch, capsys, *given, "--resume")
        assert "curve2.png.partial.points is damaged (TypeError:" in told
    points.write_text(kept)
    monkeypatch.setattr(pareto, "remove_finished", remove_finished)
    assert call(monkeypatch, capsys, *given, "--resume") == (0, "")
    assert (begun["emit_json"], left) == (True, {"emit_json": True, "say": False})
    assert not list(place.glob("curve2.png.partial*"))


def test_every_budget_between_the_ends_has_a_model(calibration, fast, found):
    """The pins of a plan are in the file as well, so that a plan changes what lies beside its codes."""
    configs = (dataclasses.replace(fast, weight_bits=bits) for bits in (2, 8))
    low, high = (len(artifact.serialise(calibration.quantize(config).quantized)) for config in configs)
    for size in range(low + 2500, high, (high - low) // 12):
        chosen = quantize_within(calibration, fast, found, Budget(size))
        assert size * 0.93 < chosen.bytes <= size


@pytest.mark.parametrize("measured_with_pins", [False, True])
def test_pinned_sites_count_but_are_not_chosen(calibration, fast, found, measured_with_pins):
    """Whatever the rows say of them."""
    config = dataclasses.replace(fast, pinned=(("head", FLOAT_BITS), ("blocks.0.*", "w8a8")))
    rows = sensitivity(calibration, config, [JUDGED], (2, 4, 8)) if measured_with_pins else found
    uniform = calibration.quantize(config)
    size, bops = len(artifact.serialise(uniform.quantized)), cost(uniform.program, [(3, 32, 32)]).bops
    chosen = quantize_within(calibration, config, rows, Budget(size, bops))
    assert chosen.bytes <= size
    assert chosen.bops <= bops
    bits = {row.site: (row.left.split(" ")[0], row.right.split(" ")[0]) for row in chosen.model.ledger}
    assert {bits[name] for name in bits if name.startswith("blocks.0.")} == {("8-bit", "8-bit")}
    assert bits["head"] == ("float", "float")
    assert not [name for name in chosen.plan.widths if name.startswith(("blocks.0.", "head"))]
    with pytest.raises(DataError, match="all sites are pinned, so no width is left to choose"):
        quantize_within(calibration, dataclasses.replace(fast, pinned=(("*", 8),)), found, Budget(size))


def test_what_the_choices_keep_float_stays_float(calibration, fast, found):
    config = dataclasses.replace(fast, softmax_bits=FLOAT_BITS, input_bits=FLOAT_BITS)
    bops = cost(calibration.quantize(config).program, [(3, 32, 32)]).bops
    chosen = quantize_within(calibration, config, found, Budget(bops=bops))
    rows = {row.site: row for row in chosen.model.ledger}
    assert rows["patch_embed.conv1"].left == rows["blocks.0.attn.av"].left == rows["blocks.1.attn.av"].left == "float"
    assert chosen.bops <= bops


def test_what_stages_add_counts(calibration, fast, found, monkeypatch):
    """A stage that makes the file larger gets a plan that leaves room for it."""
    made = module._Maker.make

    def larger(self, plan, config):
        chosen = made(self, plan, dataclasses.replace(config, stages=()))
        return dataclasses.replace(chosen, bytes=chosen.bytes + 900 * bool(config.stages))

    monkeypatch.setattr(module._Maker, "make", larger)
    config = dataclasses.replace(fast, stages=Config.preset("w4a4", "adalog+").stages)
    size = len(artifact.serialise(calibration.quantize(fast).quantized)) + 300
    chosen = quantize_within(calibration, config, found, Budget(size))
    assert size - 2500 < chosen.bytes <= size
