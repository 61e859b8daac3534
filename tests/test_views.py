"""Tables and lines of results for the terminal."""

from adalog.cli import console, views
from adalog.study.cost import Cost, CostRow


def test_headings_keep_their_units(capsys):
    console.say(*views.times({"file": "vit.safetensors", "threads": 1, "rows": [], "absent": {}}))
    printed = capsys.readouterr().out
    assert all(unit in printed for unit in ("[ms]", "[MB]", "[s]")), printed


def test_costs_keep_their_digits_in_a_narrow_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    row = CostRow("head", "adaptive_avg_pool2d", 10**12, 32, 32, 10**10)
    console.say(views.cost_table("a large model", Cost((row,), {})))
    printed = capsys.readouterr().out
    assert "…" not in printed
    assert sum(map(str.isdigit, printed)) == len(f"{row.count}{row.fixops:.0f}{row.bops}{row.weight_bytes}2")


def test_costs_say_what_they_leave_out():
    """The bytes are those of the tensors, not of the file, and products have their own lines."""
    rows = (CostRow("head", "linear", 64, 8, 4, 36), CostRow("head", "dequantize", 2, 32, 32))
    lines = views.cost_lines(Cost(rows, {"codes": 32, "scale": 4}, 16, {"gelu": 6})).splitlines()
    assert lines == [
        "products: 64 MACs, 32 FixOPs, 2,048 BOPs",
        "in integers: 64 MACs (100.0 %)",
        "everything else: 32 FixOPs",
        "bytes of the tensors: codes 32, scale 4; 36 in total",
        "tables, computed when the model is loaded: 16 bytes",
        "in float, besides products: gelu x 6",
    ]
