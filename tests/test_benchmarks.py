"""The reference search and what `benchmarks/search.py` makes of it."""

from benchmarks import beside, direct, measure, tables
from benchmarks import search as benchmark

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import typer

from adalog import Calibration, Config, Search
from adalog.calibration.calibration import Searched
from adalog.choices import ReleasedSearch
from adalog.inputs.demo.model import DemoViT
from adalog.quantizers import Assignment, LogQuantizer, TwinUniformQuantizer, UniformQuantizer
from adalog.search import released
from adalog.search.operand import Format, Operand
from adalog.search.product import Product

SHORT = replace(Config.preset("w4a4", "adalog-released"), search=ReleasedSearch(steps=2, rounds=1))


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def scales(*shape):
    return normal(*shape, seed=2).abs() * 0.3 + 0.05


SCRIPTS = Path(benchmark.__file__).parent


# --- the package -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_script_run_by_its_path_hides_no_other_package(tmp_path):
    """It finds its siblings in the package, and their names are no top-level modules."""
    script = (
        f"import sys, importlib.util; sys.path[0] = {str(SCRIPTS)!r}; import benchmarks.publish as found\n"
        "names = ('search', 'beside', 'demo', 'tables', 'cost', 'runtime', 'publish', 'direct')\n"
        "print(found.__name__, found.__file__, [name for name in names if importlib.util.find_spec(name)])"
    )
    result = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert result.stdout == f"benchmarks.publish {SCRIPTS / 'publish.py'} []\n"


@pytest.mark.slow
@pytest.mark.parametrize("how", [[str(SCRIPTS / "search.py")], ["-m", "benchmarks.search"]])
def test_a_script_runs_by_its_path_and_as_a_module(how):
    """`search` imports most of the others."""
    command = [sys.executable, *how, "--help"]
    result = subprocess.run(command, cwd=SCRIPTS.parent, capture_output=True, text=True, check=True)
    assert "--ablation" in result.stdout


def test_no_script_imports_the_command_line():
    for path in SCRIPTS.glob("*.py"):
        assert "adalog.cli" not in path.read_text(), path


# --- direct: quantizing in place -------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [3, 8])
@pytest.mark.parametrize("shape", [(), (6, 1), (1, 3, 1, 1)])
def test_uniform_values_in_place_are_the_quantizers(bits, shape):
    values = normal(2, 3, 6, 8) if len(shape) == 4 else normal(6, 8)
    zero_point = torch.randint(0, 2**bits, shape, generator=torch.Generator().manual_seed(0)).float()
    quantizer = UniformQuantizer(scales(*shape), zero_point, bits)
    out = torch.empty_like(values)
    direct.quantize_into(quantizer, values, out)
    assert torch.equal(out, quantizer.fake_quantize(values))


@pytest.mark.parametrize("beyond", ["zero", "zero-coded", "saturate"])
@pytest.mark.parametrize("rounding", ["log", "nearest"])
@pytest.mark.parametrize("offset", [0.0, 0.17])
def test_logarithmic_values_in_place_are_the_quantizers(beyond, rounding, offset):
    values = torch.nn.functional.gelu(normal(40, 9)) if offset else normal(40, 9).softmax(1)
    quantizer = LogQuantizer(torch.tensor(0.9), 31, 37, 4, beyond, rounding, offset=offset)
    out = torch.empty_like(values)
    direct.quantize_into(quantizer, values, out)
    assert torch.equal(out, quantizer.fake_quantize(values))
    assert len(out.unique()) > 8


# --- direct: losses --------------------------------------------------------------------------------------------------


def operands(kind):
    """Both sides of a product and quantizers of them."""
    uniform, power = Format(4), Format(4, log2_base=(0, 37), beyond="zero", rounding="log", offset=0.17)
    log = LogQuantizer(torch.tensor(0.9), 31, 37, 4, "zero", "log", offset=0.17)

    def of(*shape):
        return UniformQuantizer(scales(*shape), torch.full(shape, 7.0), 4)

    if kind == "linear":
        return Operand(normal(50, 12), uniform), Operand(normal(9, 12, seed=1), Format(4, (0,))), of(), of(9, 1)
    if kind == "post-gelu":
        return Operand(normal(50, 12).relu(), power), Operand(normal(9, 12, seed=1), Format(4, (0,))), log, of(9, 1)
    if kind == "twin":
        twin = TwinUniformQuantizer(torch.tensor(0.2), torch.tensor(0.02), 4)
        form = Format(4, one_scale=TwinUniformQuantizer, offset=0.17)
        return Operand(normal(50, 12), form), Operand(normal(9, 12, seed=1), Format(4, (0,))), twin, of(9, 1)
    if kind == "grouped conv":
        mask = (normal(5, 40, 6, seed=3) > 0).float()
        weight = Operand(normal(5, 2, 6, seed=1), Format(4, (0, 1)))
        return Operand(normal(5, 40, 6).relu() * mask, power, mask), weight, log, of(5, 2, 1)
    if kind == "qk":
        heads = Format(4, (1,))
        left, right = normal(4, 3, 7, 6), normal(4, 3, 7, 6, seed=1)
        return Operand(left, heads), Operand(right, heads), of(1, 3, 1, 1), of(1, 3, 1, 1)
    softmax = replace(power, offset=0.0)
    left = Operand(normal(4, 3, 7, 7).softmax(-1), softmax)
    return left, Operand(normal(4, 3, 6, 7, seed=1), Format(4, (1,))), replace(log, offset=0.0), of(1, 3, 1, 1)


KINDS = ["linear", "post-gelu", "twin", "grouped conv", "qk", "av"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tile", [1, 100, 1 << 19])
def test_direct_losses_are_those_that_found_is_judged_by(kind, tile, monkeypatch):
    monkeypatch.setattr(direct, "TILE_ELEMENTS", tile)
    left, right, first, second = operands(kind)
    judged = Searched(None, Product("linear", left, right), Assignment(first, second)).mean_square_error()
    outputs = left.values[..., 0].numel() * right.values.shape[-2]
    of_left = direct.Losses(left, right.values, right.quantized(second))
    of_right = direct.Losses(right, left.values, left.quantized(first))
    for losses, operand, quantizer in ((of_left, left, first), (of_right, right, second)):
        found = losses([quantizer, quantizer])
        assert list(found.shape[1:]) == [operand.values.shape[dim] for dim in operand.format.own_dims]
        assert float(found[0].sum()) / outputs == pytest.approx(judged, rel=1e-5)
        assert torch.equal(found[0], found[1])
        assert (losses.evaluated, losses.flops) == (2, 4 * outputs * left.values.shape[-1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tile", [100, 1 << 19])
def test_fused_losses_are_the_others(kind, tile, monkeypatch):
    """A value that lies within 0.1 % of a threshold of a logarithm may get the code next to its own."""
    monkeypatch.setattr(direct, "TILE_ELEMENTS", tile)
    left, right, first, second = operands(kind)
    for operand, other, mine, theirs in ((left, right, first, second), (right, left, second, first)):
        some = [mine, replace(mine, scale=mine.scale * 0.8), mine]
        plain, quick = (
            direct.Losses(operand, other.values, other.quantized(theirs), fused=how) for how in (False, True)
        )
        expected = plain(some)
        torch.testing.assert_close(quick(some), expected, rtol=1e-3, atol=0)
        assert (quick.evaluated, quick.flops) == (plain.evaluated, plain.flops)


@pytest.mark.parametrize("kind", ["linear", "qk", "grouped conv"])
def test_losses_belong_to_their_groups(kind):
    """One group's parameters move no other group's loss, and its own as a product in float64 says."""
    left, right, first, second = operands(kind)
    other = left.quantized(first)
    losses = direct.Losses(right, left.values, other)
    scale = second.scale.clone()
    scale.view(-1)[1] *= 1.7
    before, after = losses([second, replace(second, scale=scale)])
    assert [int(index) for index in torch.nonzero((before != after).flatten())] == [1]
    hat = replace(second, scale=scale).fake_quantize(right.values).double()
    error = hat @ other.double().transpose(-1, -2) - right.values.double() @ left.values.double().transpose(-1, -2)
    expected = error.square().sum([dim for dim in range(error.ndim) if dim not in right.format.own_dims])
    assert torch.allclose(after, expected, rtol=1e-5)


@pytest.mark.parametrize("keep", [(), (0,)])
def test_own_losses_are_those_of_the_values(keep, monkeypatch):
    monkeypatch.setattr(direct, "TILE_ELEMENTS", 30)
    operand = Operand(normal(9, 12), Format(4, keep))
    shape = (9, 1) if keep else ()
    quantizer = UniformQuantizer(scales(*shape), torch.full(shape, 7.0), 4)
    error = (quantizer.fake_quantize(operand.values) - operand.values).double().square()
    for how in (False, True):
        losses = direct.Losses(operand, fused=how)
        assert torch.allclose(losses([quantizer])[0], error.sum(1) if keep else error.sum(), rtol=1e-5)
        assert losses.evaluated == losses.flops == 0


# --- direct: the search ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def case():
    torch.manual_seed(0)
    model = DemoViT(width=16, depth=1, heads=2).eval()
    images = normal(4, 3, 32, 32, seed=1)
    return measure.Case(model, images[:2], images[2:])


@pytest.mark.slow
def test_both_released_searches_find_the_same(case):
    """The library's and the one written for comparison, written apart."""
    ours = Calibration(case.model, case.images).search(SHORT)
    counted = direct.Direct()
    with mock.patch.object(released, "search_product", counted.search_product):
        theirs = Calibration(case.model, case.images).search(SHORT)
    assert len(ours) == 10
    for one, other in zip(ours, theirs, strict=True):
        assert one.sites == other.sites
        assert one.mean_square_error() == pytest.approx(other.mean_square_error(), rel=1e-3)
        if isinstance(one.assignment.left, LogQuantizer):
            assert one.assignment.left.q == other.assignment.left.q
    # A float image: weights alone. Else 2 steps for both sides; q first where that is searched.
    linear, softmax, gelu = 2 * 256, 128 + 256, 3 * 128 + 256
    assert counted.candidates == 256 + 7 * linear + softmax + gelu


# --- search: the command's parts -------------------------------------------------------------------------------------


@pytest.fixture
def short(monkeypatch):
    """Searches that take no time, and this process's memory as it is."""
    small = Search(init=(4, 2), parents=1, steps=0)
    ways = {
        "equals": beside.Ours(Search(steps=1), float32=True),
        "default": beside.Ours(small),
        "unfused": beside.Ours(small, float32=True, unfused=True),
        "six": beside.Ours(Search(steps=1)),
    }
    monkeypatch.setattr(beside, "OURS", ways)
    monkeypatch.setattr(beside, "keep_memory", lambda: None)


ROWS = [
    "equals: six steps, three rounds, float32",
    "as it comes",
    "float32 and unfused",
    "six steps, three rounds",
]


@pytest.mark.slow
def test_sites_are_compared_and_kept(case, short, tmp_path, monkeypatch):
    config = replace(SHORT, search=ReleasedSearch(steps=1, rounds=1))
    result = beside.compare(case, config, {"key": 1}, tmp_path, 0)
    assert json.loads(json.dumps(result)) == result
    calibration = Calibration(case.model, case.images)
    with mock.patch.object(released, "search_product", direct.Direct().search_product):
        found = calibration.search(config)
    assert list(result["sites"]) == [searched.sites[0].name for searched in found]
    for kind, part in (("six", result), *((kind, result[kind]) for kind in ("equals", "default", "unfused"))):
        assert part["equal"] == (kind == "equals")
        rows = part["sites"]
        ratios = [row["loss_ratio"] for row in rows.values()]
        assert part["loss_ratio"]["max"] == max(ratios)
        assert part["loss_ratio"]["geomean"] == pytest.approx(float(torch.tensor(ratios).log().mean().exp()))
        assert part["seconds"]["ours"] == pytest.approx(sum(row["seconds"] for row in rows.values()))
        assert part["speedup"] == pytest.approx(part["seconds"]["direct"] / part["seconds"]["ours"])
        assert part["speedup_over_fused"] == pytest.approx(part["seconds"]["direct_fused"] / part["seconds"]["ours"])
        assert part["float_forwards"] == pytest.approx(part["seconds"]["ours"] / part["floor"]["forward_seconds"])
        assert part["floor"]["over_floor"] > 0
        for searched in found[:3]:
            with beside.OURS[kind].run():
                best = beside.search_product(searched.product, beside.OURS[kind].search)
            ratio = replace(searched, assignment=best).mean_square_error() / searched.mean_square_error()
            assert rows[searched.sites[0].name]["loss_ratio"] == pytest.approx(ratio)
    softmax, gelu = 128 + 128, 128 + 128 + 128  # q; q and scales; and the other side
    assert result["candidates"]["direct"] == 128 + 7 * 256 + softmax + gelu
    assert result["candidates"]["ours"] == 256 + 9 * (1 + 2 * Search().rounds) * 256
    assert result["counts"]["direct"]["candidates"] == result["candidates"]["direct"]
    assert result["counts"]["direct"]["flops"] == result["direct_flops"]
    assert result["direct_fused"]["loss_ratio"]["geomean"] == pytest.approx(1, rel=0.01)

    file = tmp_path / "search-tiny.json"
    published = {**result, "images": 2, "machine": {"processor": "thing"}}
    file.write_text(json.dumps(published))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    table = tables.search_table().splitlines()
    assert [line.split(" | ")[2] for line in table[2:6]] == ROWS
    assert f"**{result['equals']['speedup_over_fused']:.1f}**" in table[2]
    assert sum("**" in line for line in table) == 1
    assert [line.split(" | ")[1] for line in table[9:14]] == ["direct", *ROWS]
    older = {key: value for key, value in published.items() if key not in ("counts", "equals", "unfused")}
    for part in (older, older["default"]):
        del part["equal"], part["speedup_over_fused"]
    file.write_text(json.dumps(older))
    assert [line.split(" | ")[2] for line in tables.search_table().splitlines()[2:]] == [ROWS[1], ROWS[3]]
    file.unlink()

    def fail(*_):
        raise AssertionError("measured again")

    monkeypatch.setattr(beside, "measure_site", fail)
    again = beside.compare(case, config, {"key": 1}, tmp_path, 0)
    assert again["sites"] == result["sites"]
    with pytest.raises(AssertionError, match="measured again"):
        beside.compare(case, config, {"key": 2}, tmp_path, 0)


@pytest.mark.slow
def test_held_out_losses_are_of_other_images(case, short):
    config = replace(SHORT, search=ReleasedSearch(steps=1, rounds=1))
    row, same = (
        beside.measure_site(
            Calibration(case.model, case.images), Calibration(case.model, judge), config, "blocks.0.mlp.fc2"
        )
        for judge in (case.held_out, case.images)
    )
    for kind in beside.OURS:
        assert same[kind]["held_out_ratio"] == same[kind]["loss_ratio"] == row[kind]["loss_ratio"]
        assert row[kind]["held_out_ratio"] != row[kind]["loss_ratio"]


@pytest.mark.slow
def test_parts_are_told_by_what_they_are_worth(case, tmp_path):
    short = replace(Config.preset("w3a3"), search=Search(steps=0, rough_rows=0, refit=False))
    configs = {"default": short, "same": short, "fitted": replace(short, search=Search(steps=0, rough_rows=0))}
    result = benchmark.ablate(case, configs, {}, tmp_path, 0)
    assert result["default"]["loss"] == result["same"]["held_out"] == 1
    ratios = []
    for found in Calibration(case.model, case.images).search(short):
        name = found.sites[0].name
        assert result["default"]["sites"][name][0] == pytest.approx(found.mean_square_error())
        ratios.append(result["fitted"]["sites"][name][0] / result["default"]["sites"][name][0])
    assert max(ratios) <= 1.0001  # the best scale for a row's codes
    assert result["fitted"]["loss"] == pytest.approx(math.exp(sum(map(math.log, ratios)) / len(ratios)))
    assert result["fitted"]["loss"] < 1
    assert len(list(tmp_path.glob("ablation-*.json"))) == 3
    assert next(iter(benchmark.variants("w4a4"))) == "default"


@pytest.mark.slow
def test_the_whole_model_is_measured(case, monkeypatch):
    monkeypatch.setattr(benchmark, "load_case", lambda *_: case)
    quick = Config(search=Search(steps=0))
    monkeypatch.setattr(benchmark.Config, "preset", staticmethod(lambda bits: quick))
    result = benchmark.quantize_whole("demo", 0, 2, None, 0, "w4a4")
    assert result["cpu_seconds"] > 0
    assert result["wall_seconds"] > 0
    assert result["floor"]["product_flops"] > 0
    ratio = result["cpu_seconds"] / result["floor"]["forward_seconds"]
    assert result["float_forwards"] == pytest.approx(ratio)


@pytest.mark.parametrize("points", benchmark.POINTS)
def test_every_count_of_candidates_is_a_search(points):
    first = benchmark.first_points(points)
    assert Search(init=first, parents=points // 8).init[0] * first[1] == points


@pytest.mark.slow
def test_growth_is_fitted_and_drawn(tmp_path, monkeypatch):
    calls = []

    def seconds(images, width, points, seed, config):
        calls.append((images, width, points))
        return 1e-6 * images * width**2.2 * points**0.5

    monkeypatch.setattr(benchmark, "block_seconds", seconds)
    monkeypatch.setattr(benchmark, "keep_memory", lambda: None)
    result = benchmark.scale(Config(), {}, tmp_path / "work", 0, tmp_path / "search.png")
    assert result["exponents"] == pytest.approx({"images": 1, "width": 2.2, "points": 0.5})
    assert (tmp_path / "search.png").read_bytes()[:4] == b"\x89PNG"
    assert sorted(calls) == sorted(set(calls))  # the base is measured once


@pytest.mark.slow
def test_a_block_is_timed():
    config = Config(search=Search(steps=0, rounds=1))
    assert benchmark.block_seconds(1, 64, 32, 0, config) > 0


def test_irreducible_products_are_counted():
    left, right = Operand(torch.zeros(50, 12), Format(4)), Operand(torch.zeros(9, 12), Format(4))
    # The product, 50 x 12 x 9; weights by 12 x 12 moments of 50 rows or the product, which is cheaper; activations
    # by those of 9 rows.
    assert benchmark.irreducible_flops(left, right) == 2 * (5400 + 5400 + 9 * 144)
    image = Operand(torch.zeros(50, 12), Format(32))
    assert benchmark.irreducible_flops(image, right) == 2 * (5400 + 5400)


def test_cases_are_cut_and_their_images_apart():
    case = benchmark.load_case("demo", 1, 4, None, 0)
    assert len(case.model.blocks) == 1
    assert case.images.shape == (4, 3, 32, 32)
    assert len(case.held_out) == 200
    one, same, other = (benchmark.smooth_noise(3, (40, 24), seed) for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    steps = (one[..., 1:, :] - one[..., :-1, :]).square().mean()
    assert float(steps) < float(one.square().mean()) / 2


def test_a_model_without_blocks_is_not_cut():
    with pytest.raises(typer.BadParameter, match="no sequence of `blocks`"):
        benchmark.load_case("timm:levit_128s", 1, 1, None, 0)
