"""Choices: presets, JSON, refusals."""

import dataclasses
import json
import math
import re

import pytest

from adalog.baselines import BlockRefinement, Evolution, RangeSearch, ReleasedSearch, ScaleSearch
from adalog.choices import Reconstruction
from adalog.config import Config
from adalog.methods import METHODS
from adalog.search import AnySearch
from adalog.search.bounds import Search


@dataclasses.dataclass(frozen=True)
class OwnSearch(AnySearch):
    """A search that a user wrote."""

    kind = "own"

    def search_product(self, product):
        return product.assign(None, None)


POWER_LAW = "uniform, twin, log2, log-sqrt2, adalog"
RANGES = {"post_softmax": "log2", "post_gelu": "uniform", "search": RangeSearch()}


# The quantizers after softmax and GELU, and the methods of others that have them.
RIVALS = {
    ("uniform", "uniform"): "uniform-tensor symmetric minmax percentile easyquant brecq qdrop aphq-vit fima-q",
    ("log2", "uniform"): "fq-vit evol-q",
    ("split", "twin"): "ptq4vit",
    ("max-kept", "twin"): "apq-vit",
    ("log-sqrt2", "uniform"): "repq-vit qwt erq",
    ("adalog", "adalog"): "brecq-adalog",
}
QUANTIZERS = {method: kinds for kinds, methods in RIVALS.items() for method in methods.split()}


@pytest.mark.parametrize(
    ("name", "widths"), [("w4a4", (4, 4, 4)), ("w3a6", (3, 6, 6)), ("w6a8s3", (6, 8, 3)), ("w2a2s8", (2, 2, 8))]
)
@pytest.mark.parametrize("method", METHODS)
def test_preset(name, widths, method):
    config = Config.preset(name, method)
    assert (config.weight_bits, config.activation_bits, config.softmax_bits) == widths
    in_float = ("adalog-released", "ptq4vit", "ptq4vit-released", "apq-vit")
    assert config.input_bits == (32 if method in in_float else 8)
    assert config.bits == name
    assert Config.preset(name.upper(), method) == config
    ours = method.partition("-paper")[0].partition("-released")[0].rstrip("+")
    assert (config.post_softmax, config.post_gelu) == QUANTIZERS.get(ours, (ours, ours))


def test_defaults_are_those_of_the_paper():
    config = Config()
    assert config == Config.preset("w4a4", "adalog")
    assert (config.r, config.images) == (37, 32)
    search = config.search
    assert search.strategy == "fpcs"
    assert math.prod(search.init) == 128
    assert search.steps == 4
    assert math.isqrt(math.prod(search.init) // search.parents + 1) == 3  # 3 x 3 - 1 children


def test_methods_are_choices_of_config():
    fields = {field.name for field in dataclasses.fields(Config)}
    for method in METHODS.values():
        assert set(method.choices) <= fields
    for method in ("uniform", "log2", "log-sqrt2", "adalog"):  # which differ in their quantizers alone
        search = Search(compare_uniform=method in ("uniform", "adalog"))  # log2 has no uniform activations there
        power_law = {"post_softmax": method, "post_gelu": method}
        assert Config.preset("w4a4", method) == dataclasses.replace(Config(), **power_law, search=search)


@pytest.mark.parametrize("method", METHODS)
def test_json_round_trip(method):
    search = Search(strategy="alternating", init=(8, 8), parents=8, steps=2, rounds=1, rough_rows=0, reach=0.2)
    preset = Config.preset("w3a5s4", method)
    config = dataclasses.replace(
        preset,
        post_softmax="uniform" if preset.post_softmax in ("split", "max-kept") else preset.post_softmax,
        r=41,
        q_min=7,
        q_max=99,
        offset=0.25,
        fold_rows=3,
        fold_head=False,
        beyond="saturate",
        rounding="log",
        per_head=False,
        search=search,
    )
    text = config.to_json()
    again = Config.from_json(text)
    assert again == config
    assert hash(again) == hash(config)
    assert again.to_json() == text
    assert json.loads(text)["search"]["init"] == [8, 8]
    plain = Config.preset("w32a4s8", method)
    assert Config.from_json(plain.to_json()) == plain


@pytest.mark.parametrize(
    ("kind", "search"),
    [
        ("bounds", Search(steps=6)),
        ("released", ReleasedSearch(progressive=False, steps=2, rounds=1)),
        ("ranges", RangeSearch((0.9, 1.0), share="power-of-two", powers=2, symmetric_weights=True)),
        ("scales", ScaleSearch("cosine", (0.5, 2.0), 7, 1, row_scales=True, probes=3, released=True)),
    ],
)
@pytest.mark.parametrize("stage", [None, Evolution(passes=2, radius=0.1), BlockRefinement(3, (0.9, 1.1), 0.25)])
def test_json_names_the_search_and_the_stages(kind, search, stage):
    config = Config(search=search, stages=(stage,) if stage else (), post_softmax="uniform", post_gelu="uniform")
    text = config.to_json()
    assert json.loads(text)["search"]["kind"] == kind
    assert Config.from_json(text) == config
    assert hash(Config.from_json(text)) == hash(config)
    kinds = {Evolution: "evolution", BlockRefinement: "blocks"}
    assert [each["kind"] for each in json.loads(text)["stages"]] == [kinds[type(stage)] for stage in config.stages]


def test_methods_tell_their_sources_and_choices():
    for name in ("minmax", "percentile", "easyquant", "fq-vit", "ptq4vit", "apq-vit", "repq-vit", "evol-q", "adalog"):
        assert re.search(r"\d{4}\)$", METHODS[name].source.partition(", then corrected")[0])
    plain = METHODS["apq-vit"].to_json(Config.defaults())
    assert plain["post_softmax"] == "max-kept"
    assert plain["search"] == {"kind": "scales", "rounds": 1}
    assert plain["stages"] == [{"kind": "blocks"}]
    assert METHODS["adalog"].to_json(Config.defaults()) == {}


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: RangeSearch(()), r"percentiles = \(\) is not a tuple of numbers"),
        (lambda: RangeSearch([1.0]), r"percentiles = \[1.0\] is not a tuple"),
        (lambda: RangeSearch((0.5,)), "percentiles = 0.5 is not a number above 0.5 and at most 1.0"),
        (lambda: RangeSearch(("1",)), "percentiles = '1' is not a number above"),
        (lambda: RangeSearch(share="most"), "share = 'most' is not one of none, mean, power-of-two"),
        (lambda: RangeSearch(powers=-1), "powers = -1 is not a whole number of at least 0"),
        (lambda: RangeSearch(in_order=1), "in_order = 1 is neither true nor false"),
        (lambda: ScaleSearch("angle"), "metric = 'angle' is not one of squared, cosine, hessian"),
        (lambda: ScaleSearch(span=(0.0, 1.0)), "span = 0.0 is not a number above 0"),
        (lambda: ScaleSearch(span=(1.0, 1.0)), "span = 1.0 is not a number above 1.0"),
        (lambda: ScaleSearch(span=(1.0,)), r"span = \(1.0,\) is not a pair of increasing positive factors"),
        (lambda: ScaleSearch(probes=0), "probes = 0 is not a whole number of at least 1"),
        (lambda: BlockRefinement(eliminated=1), "eliminated = 1 is not a number of at least 0 and below 1"),
        (lambda: BlockRefinement(rounds=0), "rounds = 0 is not a whole number"),
        (lambda: Evolution(temperature=0), "temperature = 0 is not a number above 0"),
        (lambda: Evolution(radius=-1.0), "radius = -1.0 is not a number above 0"),
        (lambda: Evolution(samples=True), "samples = True is not a whole number"),
        (lambda: Config(post_softmax="split"), "post_softmax = 'split' needs search = ScaleSearch"),
        (
            lambda: Config(search=RangeSearch()),
            "RangeSearch cannot search the base of 'adalog' quantizers: choose others for post_softmax and post_gelu",
        ),
        (lambda: Config(search=OwnSearch(), post_gelu="uniform"), "OwnSearch cannot search the base"),
        (lambda: Search(reach="0.1"), "reach = '0.1' is not a number above 0 and at most 0.5"),
        (lambda: Config(search=ScaleSearch(), post_softmax="max-kept"), "ScaleSearch cannot search the base"),
        (lambda: Config(post_softmax="log3"), f"^post_softmax = 'log3' is not one of {POWER_LAW}, split, max-kept$"),
        (lambda: Config(post_gelu="log3"), f"^post_gelu = 'log3' is not one of {POWER_LAW}$"),
        (lambda: Config(post_softmax="twin"), "'twin' is not possible: a twin quantizer is for values of both signs"),
        (lambda: Config(images=0), "images = 0 is not a whole number of at least 1"),
        (lambda: Search(fold_ranges="widest"), "fold_ranges = 'widest' is not one of own, deviations, best"),
        (lambda: Search(importance=-0.1), "importance = -0.1 is not a number from 0 to 1"),
        (lambda: Search(importance=1.5), "importance = 1.5 is not a number from 0 to 1"),
        (lambda: Search(importance="half"), "importance = 'half' is not a number from 0 to 1"),
        (lambda: Config(weights="ternary"), "weights = 'ternary' is not one of uniform, symmetric"),
        (lambda: Config(weights="symmetric", **RANGES), r"weights = 'symmetric' needs search = Search\(...\)"),
        (lambda: Config(activations="symmetric", **RANGES), r"activations = 'symmetric' needs search = Search\(...\)"),
        (
            lambda: Config(activations="symmetric", stages=(Reconstruction(),)),
            r"activations = 'symmetric' needs Reconstruction\(scales=False\)",
        ),
        (lambda: Config().with_training(iterations=9), "no stage trains"),
        (lambda: Config.preset("w4a4", "adalog++").with_training(iterations=0), "iterations = 0"),
        (
            lambda: Config.preset("w4a4", "gptq"),
            r"^method = 'gptq' is not one of uniform, .*, adalog, adalog\+, adalog\+\+, adalog-paper, adalog-",
        ),
        (lambda: Config.preset("w4a4", "repqvit"), "; the closest is repq-vit$"),
        (lambda: Config.preset("w4a4", None), "^method = None is not one of"),
        *(
            (lambda name=name: Config.preset(name), r"is not of the form w4a4 or w4a4s3")
            for name in ("", "4", "w4", "a4w4", "w4a4s", "w4a4 ", "w4a4s3x")
        ),
        (lambda: Config.preset("w1a4"), "weight_bits"),
        (lambda: Config.preset("w4a9"), "activation_bits"),
        (lambda: Config.preset("w4a4s0"), "softmax"),
    ],
)
def test_choices_that_are_refused(make, told):
    with pytest.raises(ValueError, match=told):
        make()


def test_json_may_leave_defaults_out():
    assert Config.from_json("{}") == Config()
    short = Config.from_json('{"weight_bits": 3, "search": {"steps": 6}}')
    assert short == Config(weight_bits=3, search=Search(steps=6))


@pytest.mark.parametrize("field", ["weight_bits", "activation_bits", "softmax_bits", "input_bits"])
@pytest.mark.parametrize("value", [1, 9, 31, 33, 0, -4, 4.0, "4", None])
def test_bits_are_whole_numbers_from_2_to_8_or_32(field, value):
    with pytest.raises(ValueError, match=rf"^{field} = .* is not a whole number from 2 to 8, or 32 for float$"):
        Config(**{field: value})
    assert getattr(Config(**{field: 32}), field) == 32


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("r", '{"r": 0}'),
        ("q_max", '{"q_max": 0}'),
        ("q_min", '{"q_min": 0}'),
        ("q_min = 9 is above q_max = 8", '{"q_min": 9, "q_max": 8}'),
        ("offset", '{"offset": 0}'),
        ("offset", '{"offset": -0.17}'),
        ("offset", '{"offset": Infinity}'),
        ("fold_rows", '{"fold_rows": 0}'),
        ("beyond", '{"beyond": "wrap"}'),
        ("rounding", '{"rounding": "up"}'),
        ("images", '{"images": 1.5}'),
        ("strategy", '{"search": {"strategy": "random"}}'),
        ("rounds", '{"search": {"rounds": 0}}'),
        ("init", '{"search": {"init": [128]}}'),
        ("init", '{"search": {"init": [16, 4, 2]}}'),
        ("init", '{"search": {"init": 5}}'),
        ("search", '{"search": 5}'),
        ("pinned", '{"pinned": 5}'),
        ("offset", '{"offset": "a"}'),
        ("reach", '{"search": {"reach": "x"}}'),
        ("per_head", '{"per_head": "no"}'),
        ("progressive", '{"search": {"kind": "released", "progressive": 1}}'),
        ("parents", '{"search": {"parents": 5}}'),
        ("steps", '{"search": {"steps": -1}}'),
        ("reach", '{"search": {"reach": 0}}'),
        ("reach", '{"search": {"reach": 0.51}}'),
        ("steps", '{"search": {"kind": "released", "steps": 0}}'),
        ("rounds", '{"search": {"kind": "released", "rounds": 1.0}}'),
        ("parents", '{"search": {"kind": "released", "parents": 16}}'),
        ("kind 'magic' is not one of bounds, released", '{"search": {"kind": "magic"}}'),
        ("; add a class of your own to SEARCHES", '{"search": {"kind": "magic"}}'),
        ("bitz", '{"bitz": 4}'),
        ("stepz", '{"search": {"stepz": 4}}'),
        (
            "stages: the kind 'train' is not one of blocks, evolution, correction, reconstruction",
            '{"stages": [{"kind": "train"}]}',
        ),
        ("stages = 3 is not a list", '{"stages": 3}'),
        ("stages = 3 is not a JSON object", '{"stages": [3]}'),
        ("cycles: no such choice in BlockRefinement", '{"stages": [{"kind": "blocks", "cycles": 3}]}'),
        ("loss = 'cubed' is not one of squared, output", '{"stages": [{"kind": "reconstruction", "loss": "cubed"}]}'),
        ("loss = {} is not one of", '{"stages": [{"kind": "reconstruction", "loss": {}}]}'),
        ("steps: no such choice in RangeSearch", '{"search": {"kind": "ranges", "steps": 3}}'),
    ],
)
def test_other_mistakes_are_refused_by_name(field, text):
    with pytest.raises(ValueError, match=field):
        Config.from_json(text)


def test_the_last_pattern_that_matches_gives_both_operands_their_bits():
    config = Config.preset("w3a4s5")
    kept = dataclasses.replace(config, pinned=(("blocks.*", 6), ("*.qkv", 32), ("head", 8)))
    assert Config.from_json(kept.to_json()) == kept
    assert hash(Config.from_json(kept.to_json())) == hash(kept)
    widths = {}
    for name in ("blocks.0.fc1", "blocks.0.qkv", "head", "neck", "heads"):
        at = kept.for_sites([name])
        widths[name] = (at.weight_bits, at.activation_bits, at.softmax_bits, at.input_bits)
    assert widths == {
        "blocks.0.fc1": (6, 6, 6, 6),
        "blocks.0.qkv": (32, 32, 32, 32),
        "head": (8, 8, 8, 8),
        "neck": (3, 4, 5, 8),
        "heads": (3, 4, 5, 8),
    }
    assert kept.for_sites(["neck"]) is kept
    assert kept.for_sites(["neck", "blocks.1.k"]).weight_bits == 6


@pytest.mark.parametrize(
    ("pinned", "widths"),
    [
        (("w6",), (6, 4, 5, 8)),
        (("a6",), (3, 6, 6, 8)),
        (("a6s2",), (3, 6, 2, 8)),
        (("s2",), (3, 4, 2, 8)),
        (("i4",), (3, 4, 5, 4)),
        (("w6a7s8i2",), (6, 7, 8, 2)),
        (("w6a7", "a2", "s3"), (6, 2, 3, 8)),
        ((8, "w2"), (2, 8, 8, 8)),
        (("w2", 32), (32, 32, 32, 32)),
    ],
)
def test_a_pin_names_the_operands_whose_bits_it_gives(pinned, widths):
    config = dataclasses.replace(Config.preset("w3a4s5"), pinned=tuple(("x.*", bits) for bits in pinned))
    assert Config.from_json(config.to_json()) == config
    at = config.for_sites(["x.y"])
    assert (at.weight_bits, at.activation_bits, at.softmax_bits, at.input_bits) == widths


@pytest.mark.parametrize(
    ("pinned", "told"),
    [
        ((("head", 9),), "pinned bits of 'head' = 9 is not a whole number from 2 to 8, or 32 for float"),
        ((("head", 1),), "pinned bits of 'head' = 1 is not"),
        ((("head", "8"),), "pinned bits '8' are not of the form 8, w4a8, w4, a8s4 or i4"),
        ((("head", ""),), "pinned bits '' are not of the form"),
        ((("head", "a4w4"),), "pinned bits 'a4w4' are not of the form"),
        ((("head", "w4a9"),), "pinned activation_bits of 'head' = 9 is not a whole number from 2 to 8"),
        ((("head", 8.0),), "pinned bits of 'head' = 8.0 is not"),
        ((("", 8),), r"pinned = \('', 8\) is not \(pattern, bits\)"),
        (((8, "head"),), r"is not \(pattern, bits\)"),
        (("head=8",), r"pinned = 'head=8' is not \(pattern, bits\), as in \('head', 8\)"),
        ([("head", 8)], r"is not a tuple of \(pattern, bits\)"),
    ],
)
def test_pins_of_another_form_are_refused(pinned, told):
    with pytest.raises(ValueError, match=told):
        Config(pinned=pinned)


def test_the_paper_to_the_letter_folds_with_own_ranges_and_counts_all_rows_alike():
    paper, ours = Config.preset("w8a8", "adalog-paper").search, Config().search
    assert (paper.fold_ranges, ours.fold_ranges) == ("own", "best")
    assert paper.importance == 0 < ours.importance


def test_fields_that_were_added_later_are_stored_only_if_they_differ_from_their_defaults():
    assert json.loads(Config().to_json()).keys().isdisjoint({"activations", "per_group"})
    config = Config(weights="symmetric", activations="symmetric", stages=(), per_group=False)
    stored = json.loads(config.to_json())
    assert (stored["activations"], stored["per_group"]) == ("symmetric", False)
    assert Config.from_json(config.to_json()) == config


def test_training_takes_other_steps_and_batches():
    config = Config.preset("w4a4", "adalog++")
    correction, training = config.stages
    assert config.with_training(iterations=9).stages == (correction, dataclasses.replace(training, iterations=9))
    assert config.with_training(batch=2).stages == (correction, dataclasses.replace(training, batch=2))
    assert config.with_training() == config
