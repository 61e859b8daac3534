"""Rows of the paper's tables: which are measured, and those that fit images."""

import copy
from dataclasses import replace

import pytest
import torch

from adalog import METHODS, Config, DataError
from adalog.choices import Correction, Reconstruction
from adalog.cli.targets import load_model
from adalog.inputs.images import Preprocessing
from adalog.inputs.zoo import LoadedModel
from adalog.study import paper, tables
from adalog.study.paper import TABLES, Row, Table, find_published, plan, published
from adalog.study.tables import Bench


def quick(method, **changes):
    return replace(Config.preset("w4a4", method), **changes)


@pytest.fixture
def bench(tiniest):
    generator = torch.Generator().manual_seed(0)
    pool, judged = (torch.randn(count, 3, 32, 32, generator=generator) for count in (34, 40))
    labels = torch.randint(10, (40,), generator=generator)
    prepared = Preprocessing(size=(32, 32))
    return Bench(LoadedModel(tiniest, prepared, "timm:deit_small_patch16_224.tiny"), pool, judged, labels)


def test_rows_are_chosen_by_bits_and_first_names():
    chosen = plan(["1", "4"], bits=["w3a3"], firsts=["adalog", "easyquant"])
    assert {(config.bits, row.names[0]) for config, row in chosen.items()} == {
        ("w3a3", "adalog"),
        ("w3a3", "easyquant"),
    }
    assert len(plan(["1"], bits=["w3a3"])) < len(plan(["1"]))
    with pytest.raises(ValueError, match="no row of table 1 has the bits 'w5a5': choose from w4a4"):
        plan(["1"], bits=["w5a5"])


@pytest.mark.slow
def test_a_row_that_fits_images_is_measured(monkeypatch, bench):
    """On images of its own pool, while the search has those that it has in every other row."""
    stage = Reconstruction(images=12, iterations=1, batch=4)
    row = Row(("some",), quick("minmax", stages=(stage,)), "uniform, brecq")
    found = {"4": Table("Some", ("method",), (row, Row(("none",), quick("minmax"))))}
    monkeypatch.setattr(paper, "TABLES", found)
    whole = replace(bench, more=torch.cat([bench.judged, bench.pool]))
    result = tables.run(["4"], [whole], images=4)
    assert [entry["names"] for entry in result["rows"]] == [["some"], ["none"]]
    alone = tables.run(["4"], [bench], images=4, firsts=["none"])
    assert alone["rows"][0]["top1"]["values"] == result["rows"][1]["top1"]["values"]
    assert all(entry["published"] == {} for entry in result["rows"])  # on other numbers of images


def test_too_few_images_to_fit_are_refused_before_anything_is_measured():
    loaded = load_model("demo", False, None)
    assert paper.images_fitted(["4"]) == 1024
    assert len(Bench.of(loaded, None, 32, 1024).unlabelled(1024, 0, 1)) == 1024
    with pytest.raises(DataError, match="demo has only 1024 images for stages, but rows of these tables need 1025"):
        Bench.of(loaded, None, 32, 1025)


def test_all_that_fits_images_fits_as_many_in_one_table():
    rows = [row for row in TABLES["D"].rows if row.config.bits == "w3a3"]
    search, *fitted = rows
    assert (search.names, search.config) == (("adalog", "no"), Config.preset("w3a3"))
    assert {row.config.images_fitted for row in fitted} == {1024}
    assert {row.config.bits for row in TABLES["D"].rows} == {"w4a4", "w3a3", "w2a2"}
    names = [name for name in METHODS if Config.preset("w3a3", name).images_fitted]
    assert [row.names[0] for row in fitted] == [names[0], *names]
    assert names[0] == "adalog+"
    told = {row.names: [type(stage) for stage in row.config.stages] for row in fitted}
    assert told["adalog+", "correction and reconstruction"] == [Correction, Reconstruction]
    trained = "correction, reconstruction and reconstruction end to end"
    assert told["adalog++", trained] == [Correction, Reconstruction, Reconstruction]
    assert told["erq", "correction"] == [Correction]
    assert told["fima-q", "reconstruction"] == [Reconstruction]


def test_the_rows_of_reconstruction_are_those_of_the_papers_table():
    """BRECQ without and with AdaLog, weights alone or activations too, beside what is published on 1,024 images."""
    rows = [row for row in TABLES["4"].rows if row.config.stages]
    told = {(row.config.bits, row.method, row.config.stages[0].scales) for row in rows}
    assert told == {
        (bits, f"{kind}, {what}", scales)
        for bits in ("w4a4", "w3a3")
        for kind in ("uniform", "adalog")
        for what, scales in (("brecq", False), ("brecq and lsq", True))
    }
    for row in rows:
        assert row.config.images_fitted == 1024
        assert find_published("4", published()["models"]["ViT-S"], row.config.bits, row.method, 1024)


def test_another_device_is_measured_anew(bench):
    module = copy.deepcopy(bench.model.module)
    keys = [
        tables._Measured(
            replace(bench, model=replace(bench.model, module=module)), 4, 0, 1, torch.device(name), None
        )._key
        for name in ("cpu", "meta")
    ]
    assert keys[0] != keys[1]
    assert {**keys[0], "device": "meta"} == keys[1]
