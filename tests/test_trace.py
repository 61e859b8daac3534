"""What `benchmarks/trace.py` reports about a model's calls and this processor."""

from benchmarks import roof
from benchmarks.roof import Roofs
from benchmarks.trace import SHAPES, Work, by_operation, least, main, trace

import json
import os
import shutil
from dataclasses import replace

import pytest
import torch
from torch import nn

from adalog import AdalogError, Calibration, library
from adalog.study.cost import cost
from toys import Toy

pytestmark = pytest.mark.skipif(not library.levels(), reason=f"no kernels: {library.why()}")
COMPILER = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
GIGA = 1e9


@pytest.fixture(scope="module")
def roofs():
    """Of a processor that one can compute with."""
    level = library.levels()[-1] if library.levels() else "scalar"
    reads = ((1 << 15, 200 * GIGA), (1 << 20, 100 * GIGA), (0, 10 * GIGA))
    return Roofs(level, 100 * GIGA, 200 * GIGA, 10 * GIGA, 5 * GIGA, reads)


def test_products_are_those_that_are_counted(quantized, roofs):
    found = trace(quantized, 3, roofs, seconds=0)
    assert sum(row["products"] for row in found["rows"]) == cost(quantized.program, [(3, 32, 32)]).integer_macs * 3
    assert all(row["narrow"] == row["products"] for row in found["rows"])  # all operands have 4 bits
    compiled = quantized.compile("native")
    assert sum(row["weights"] for row in found["rows"]) == compiled.weight_bytes
    assert [row["operation"] for row in found["rows"]] == [call.operation for call in compiled.prepare(3).calls]
    scores = [site for site in compiled.sites if site.endswith("attn.qk")]
    heads, tokens = 2, 64
    assert sum(row["exps"] for row in found["rows"]) == 3 * len(scores) * heads * tokens**2
    gelus = [row for row in found["rows"] if row["erfs"]]
    assert [row["erfs"] for row in gelus] == [row["shape"][0] * row["shape"][2] for row in gelus]
    assert [row["step"] for row in gelus] == ["relu", "relu_1", "gelu", "gelu_1"]
    assert all(len(row["shape"]) == len(SHAPES.get(row["operation"], row["shape"])) for row in found["rows"])


def test_the_limit_is_the_longer_of_computing_and_reading(roofs):
    computing = Work((), products=10**9, exps=10**9, erfs=10**9, bytes=1 << 15, weights=1 << 10)
    assert least(computing, roofs, 1 << 15) == pytest.approx(
        {"products": 0.01, "values": 0.3, "traffic": ((1 << 15) + (1 << 10)) / (200 * GIGA), "limit": 0.31}
    )
    narrow = replace(computing, narrow=6 * 10**8)
    assert least(narrow, roofs, 1 << 15)["products"] == pytest.approx(0.004 + 0.003)
    reading = Work((), products=10, bytes=1 << 30, weights=1 << 20)
    found = least(reading, roofs, 1 << 20)
    assert found["limit"] == found["traffic"] == pytest.approx((1 << 30) / (10 * GIGA) + (1 << 20) / (100 * GIGA))


def test_sums_over_calls(quantized, roofs):
    found = trace(quantized, 1, roofs, seconds=0)
    sums, rows = by_operation(found), found["rows"]
    assert found["runs"] == 5
    assert sum(each["calls"] for each in sums.values()) == len(rows)
    assert sum(each["ms"] for each in sums.values()) == pytest.approx(found["calls_ms"])
    assert sum(each["limit_ms"] for each in sums.values()) == pytest.approx(found["limit_ms"])
    assert found["over_limit"] == pytest.approx(found["ms"] / found["limit_ms"])
    assert all(row["share"] == pytest.approx(row["roof_microseconds"] / row["microseconds"]) for row in rows)


def chosen(m, x):
    """The head of a model that reads one token, as that of DeiT does."""
    return m.head(m.norm(x)[:, 0])


def test_rows_that_nobody_reads_are_not_counted(fast, roofs):
    torch.manual_seed(0)
    parts = {"norm": nn.LayerNorm(24), "head": nn.Linear(24, 3)}
    model = Calibration(Toy(chosen, **parts).eval(), torch.randn(6, 7, 24)).quantize(fast)
    (norm, head) = trace(model, 5, roofs, seconds=0)["rows"]
    assert (norm["operation"], norm["shape"], norm["bytes"]) == ("norm", (5, 24), 5 * 24 * 5)
    assert (head["shape"], head["products"]) == ((5, 24, 3), 5 * 24 * 3)


@needs_compiler
@pytest.mark.parametrize("level", library.levels())
def test_roofs_of_this_processor(level, monkeypatch):
    monkeypatch.setattr(roof, "_SECONDS", 1e-5)
    monkeypatch.setattr(roof, "_RUNS", 1)
    monkeypatch.setattr(roof, "_MOST", 1 << 20)
    found = roof.measure(level)
    assert found.level == level
    assert min(found.dots, found.exps, found.erfs, *(speed for _, speed in found.reads)) > 0
    caches = roof.cache_sizes()
    assert [size for size, _ in found.reads] == [*sorted(caches), 0]
    assert len(found.json()["reads"]) == len(caches) + 1
    assert found.read(caches[0]) == found.reads[0][1]
    assert found.read(caches[-1] + 1) == found.reads[-1][1]


@needs_compiler
def test_loops_that_there_are_not(monkeypatch):
    loop = roof.load_loops()
    assert loop(-1, 0, None, 0, 1) == loop(99, 0, None, 0, 1) == loop(0, 9, None, 0, 1) == loop(0, 1, None, 64, 1) == -1
    assert loop(0, 0, None, 0, -1) == -1
    with pytest.raises(ValueError, match="level = 'none' is not one of"):
        roof.measure("none")
    monkeypatch.setattr(library, "LEVELS", (*library.LEVELS, "later"))
    monkeypatch.setattr(library, "levels", lambda: ["later"])
    with pytest.raises(ValueError, match="level = 'later' has no loops"):
        roof.measure()


def test_what_the_roofs_need(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(AdalogError, match=r"roof\.cpp needs a C\+\+ compiler: install g\+\+"):
        roof.load_loops.__wrapped__()
    monkeypatch.setattr(library, "levels", list)
    monkeypatch.setattr(library, "why", lambda: "there is no library")
    with pytest.raises(AdalogError, match="there is no library"):
        roof.measure()


@needs_compiler
def test_the_script(quantized, capsys, tmp_path):
    file = tmp_path / "model.safetensors"
    quantized.save(file)
    main([str(file), "--batch", "2", "1", "--seconds", "0", "--json", str(tmp_path / "trace.json")])
    assert capsys.readouterr().out == ""
    told = json.loads((tmp_path / "trace.json").read_text())
    assert (told["file"], told["roofs"]["level"]) == (str(file), library.levels()[-1])
    assert [each["batch"] for each in told["traces"]] == [1, 2]
    assert {"step", "operation", "shape", "microseconds", "share"} <= told["traces"][0]["rows"][0].keys()
    main([str(file), "--seconds", "0"])
    assert json.loads(capsys.readouterr().out).keys() == told.keys()
    with pytest.raises(SystemExit, match="missing cannot be traced: missing cannot be read"):
        main(["missing"])
