"""The kernels beside their peers, as `benchmarks/runtime.py` compares them, and how results are published."""

from benchmarks import publish, runtime, speed_tables, tables

import json
import subprocess

import pytest
import torch

from adalog import library, version
from adalog.study import doctor


def noise(count, seed):
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


def measured(model, **choices):
    few = {"bits": ["w4a4", "w3a3"], "batches": [1, 2], "peers": ["torch", "torch-bf16"], "threads": 1, "seconds": 0}
    return runtime.compare(runtime.Case(model, noise(8, seed=1), noise(8, seed=2)), **few | choices)


@pytest.mark.slow
@pytest.mark.skipif(not library.levels(), reason="installed without a compiler")
def test_kernels_are_compared_with_peers(tiniest):
    result = measured(tiniest)
    assert json.loads(json.dumps(result)) == result
    assert (result["absent"], result["by"]) == ({}, "cpu")
    names = ["torch", "torch-bf16", "native/w4a4", "native/w3a3"]
    assert [(row["batch"], row["name"]) for row in result["rows"]] == [
        (batch, name) for batch in (1, 2) for name in names
    ]
    rows = {(row["name"], row["batch"]): row for row in result["rows"]}
    for row in result["rows"]:
        assert row["images_per_second"] == pytest.approx(1e3 * row["batch"] / row["wall_ms"])
        assert row["repeats"] >= 5
    for bits in ("w4a4", "w3a3"):
        assert sum(result["tables"][bits].values()) == 2  # after softmax and after GELU
        for batch in (1, 2):
            ours, ratios = rows[f"native/{bits}", batch]["cpu_ms"], result["ratios"][f"native/{bits}/b{batch}"]
            assert ratios == pytest.approx({name: ours / rows[name, batch]["cpu_ms"] for name in names[:2]})
    errors = {name: rows[name, 2]["logit_error"] for name in names}
    assert errors["torch"] == 0 < errors["torch-bf16"] < 0.1
    assert errors["torch-bf16"] < errors["native/w4a4"] < 1
    parameters = sum(value.numel() for value in tiniest.parameters())
    assert [rows[name, 1]["weight_bytes"] for name in names[:2]] == [4 * parameters, 2 * parameters]


def test_another_method_may_be_measured(tiniest, tmp_path):
    case = runtime.Case(tiniest, noise(8, seed=1), noise(8, seed=2))
    assert runtime.quantized(case, "w4a4", tmp_path / "log.safetensors") == {"u8": 2}
    assert runtime.quantized(case, "w4a4:uniform", tmp_path / "uniform.safetensors") == {}
    assert speed_tables.engine("native/w8a8:uniform") == "**adalog W8A8 uniform, native**"


def test_each_run_is_judged_where_there_are_labels(tiniest, monkeypatch):
    """The float model agrees with itself; a batch that the images do not fill is filled with zeros."""
    monkeypatch.setattr(runtime.library, "levels", list)
    images, labels = noise(7, seed=3), torch.arange(7) % 3
    seen = []

    def classes(network, batch):
        seen.append(batch)
        return torch.cat([network(part) for part in images.split(batch)]).argmax(dim=1)

    case = runtime.Case(tiniest, noise(8, seed=1), noise(8, seed=2), classes, labels)
    result = runtime.compare(case, bits=["w4a4"], batches=[1, 4], peers=["torch"], threads=1, seconds=0)
    right = float((tiniest(images).argmax(dim=1) == labels).double().mean())
    assert result["accuracy"] == {
        "fp32": {"top1": pytest.approx(right), "images": 7},
        "torch": {"top1": pytest.approx(right), "agreement": 1.0},
    }
    assert seen == [4, 4]


def test_what_is_absent_is_told(tiniest, monkeypatch):
    monkeypatch.setattr(runtime, "find_spec", lambda package: None)
    monkeypatch.setattr(runtime.library, "levels", list)
    monkeypatch.setattr(runtime.library, "why", lambda: "no compiler")
    result = measured(tiniest, peers=list(runtime.PEERS), batches=[1])
    assert {row["name"] for row in result["rows"]} == {"torch", "torch-bf16"}
    assert result["absent"].pop("native") == "no compiler"
    assert set(result["absent"]) == set(runtime.PEERS) - {"torch", "torch-bf16"}
    assert result["absent"]["openvino-int8"] == "not installed: openvino, nncf"
    assert result["ratios"] == result["tables"] == {}


def test_a_peer_that_fails_is_told(tiniest, monkeypatch):
    def refuse(model, files, images, threads):
        raise RuntimeError(f"takes no {len(images)} images\nat all")

    monkeypatch.setitem(runtime.PEERS, "torch-bf16", ((), refuse))
    monkeypatch.setattr(runtime.library, "levels", list)
    result = measured(tiniest)
    assert result["absent"]["torch-bf16"] == "fails at batch 1: RuntimeError: takes no 1 images"
    assert {row["name"] for row in result["rows"]} == {"torch"}


def test_the_command_compares_a_model(tmp_path, monkeypatch, capsys):
    seen = {}
    monkeypatch.setattr(
        runtime, "compare", lambda case, **choices: seen.update(choices, labels=case.labels) or {"rows": []}
    )
    runtime.main(
        ["--model", "demo", "--batch", "1", "8", "--bits", "w3a3", "--peers", "torch", "--json", str(tmp_path / "f")]
    )
    told = json.loads((tmp_path / "f").read_text())
    assert told == json.loads(capsys.readouterr().out)
    assert (told["model"], told["pretrained"], told["threads"], told["rows"]) == ("demo", True, 1, [])
    assert len(seen.pop("labels")) == 2000
    assert seen == {
        "batches": [1, 8],
        "bits": ["w3a3"],
        "peers": ["torch"],
        "threads": 1,
        "seconds": 20,
        "level": None,
        "work": None,
    }
    with pytest.raises(SystemExit, match="2"):
        runtime.main(["--peers", "torch,magic"])
    assert "--peers 'magic' is none of torch, torch-bf16, onnxruntime" in capsys.readouterr().err


# --- what is published -----------------------------------------------------------------------------------------------


def test_a_result_names_the_commit_that_made_it(tmp_path, capsys, monkeypatch):
    """Outside a clone there is none to name."""

    def git(*arguments):
        author = ["-c", "user.name=A", "-c", "user.email=a@b.c"]
        found = subprocess.run(["git", *author, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
        return found.stdout.strip()

    monkeypatch.setattr(publish, "ROOT", tmp_path)
    assert publish.commit() is None
    git("init")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "code.py").write_text("1")
    git("add", ".")
    git("commit", "-m", "first")
    publish.publish({"a": 1}, tmp_path / "result.json")
    told = json.loads((tmp_path / "result.json").read_text())
    assert told == json.loads(capsys.readouterr().out) == {"a": 1, "commit": git("rev-parse", "HEAD")}
    (tmp_path / "src" / "code.py").write_text("2")
    assert publish.commit() == told["commit"] + "-changed"


def test_a_measurement_tells_the_sources_it_was_made_with(tmp_path, monkeypatch):
    """Any change of them is another hash."""
    assert doctor.machine()["source"] == version.source_hash()
    keys = []
    for name, text in (("a.py", "1"), ("a.py", "2"), ("b.cpp", "2"), ("notes.txt", "3")):
        (tmp_path / name).write_text(text)
        monkeypatch.setattr(version, "__file__", str(tmp_path / "version.py"))
        keys.append(version.source_hash.__wrapped__())
    assert len(set(keys[:3])) == 3
    assert keys[2] == keys[3]


def test_answers_that_share_their_memory_are_told_apart(tiniest, monkeypatch):
    """An engine that writes every answer to the same place is judged like one that does not."""
    monkeypatch.setattr(runtime.library, "levels", list)
    place = torch.zeros(1, 10)

    def shares(model, files, images, threads):
        return runtime.Made(lambda given: place.copy_(model(given)), lambda given: given, None, 0)

    monkeypatch.setitem(runtime.PEERS, "openvino", ((), shares))
    images = noise(5, seed=3)

    def classes(network, batch):
        return torch.cat([network(one) for one in images.split(batch)])[:, 0].argsort()  # tells all images apart

    case = runtime.Case(tiniest, noise(8, seed=1), noise(8, seed=2), classes, torch.zeros(5, dtype=torch.long))
    result = runtime.compare(case, bits=["w4a4"], batches=[1], peers=["openvino"], threads=1, seconds=0)
    assert result["accuracy"]["openvino"]["agreement"] == 1


def test_rows_of_several_draws_are_told_by_their_mean(tmp_path, monkeypatch):
    """One draw is told as it is."""
    share = {"bits": "w4a4", "method": "adalog", "agreement": 0.5, "mcnemar_p": 0.04, "mcnemar_p_adalog": None}
    rows = [{**share, "seed": seed, "top1": top1, "seconds": 10.0} for seed, top1 in ((0, 0.3), (1, 0.32))]
    whole = {
        "fp32": {"top1": 0.6, "low": 0.57, "high": 0.63},
        "queries": 1000,
        "calibration_images": 32,
        "seed": 0,
        "machine": {"torch": "2"},
    }
    monkeypatch.setattr(publish, "RESULTS", tmp_path)
    for seeds, top1, lost, told in (
        ([0], "30.0 %", "30.0", "seed 0"),
        ([0, 1], "31.0 ± 1.4 %", "29.0", "mean ± standard deviation over 2 draws"),
    ):
        found = {**whole, "seeds": seeds, "rows": rows[: len(seeds)]}
        (tmp_path / "realbench.json").write_text(json.dumps(found))
        assert f"| **adalog** | **{top1}** |" in tables.real_table()
        assert f"({told})" in tables.real_table()
        assert f"| W4A4 | adalog | {top1} | {lost} |" in tables.realbench_table()


def test_rows_measured_again_take_the_place_of_earlier_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(publish, "RESULTS", tmp_path)
    rows = [{"bits": bits, "method": "adalog", "seed": 0, "top1": 0.5} for bits in ("w4a4", "w3a3")]
    (tmp_path / "some.json").write_text(json.dumps({"rows": rows}))
    assert publish.measured("some")["rows"] == rows
    later = {"rows": [{**rows[1], "top1": 0.25}], "machine": {"processor": "a later one"}}
    (tmp_path / "some-renewed.json").write_text(json.dumps(later))
    assert publish.measured("some")["rows"] == [rows[0], {**rows[1], "top1": 0.25, "renewed": "a later one"}]
    (tmp_path / "some-renewed-2.json").write_text(json.dumps({**later, "rows": [{**rows[1], "seed": 9}]}))
    with pytest.raises(ValueError, match="has a row that some"):
        publish.measured("some")
