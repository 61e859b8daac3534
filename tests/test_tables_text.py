"""The paper's tables as text."""

import json

from adalog.methods import METHODS, labelled
from adalog.study.markdown import markdown


def test_of_several_draws_p_is_the_median():
    """Not the mean, the least, the first or the last one; draws without adalog beside them do not count."""
    share = {"mean": 0.5, "std": 0.1, "values": [0.4, 0.5, 0.6, 0.5, 0.5]}
    row = {
        "table": "1",
        "model": "demo",
        "bits": "w4a4",
        "names": ["minmax"],
        "method": "minmax",
        "seeds": [0, 1, 2, 3, 4],
        **dict.fromkeys(("top1", "agreement", "seconds", "fixops", "bytes"), share),
        "p_float": [0.9, 0.002, 0.03, 0.8, 0.01],
        "p_adalog": [0.7, None, 0.04, 0.0005, None],
        "published": {},
    }
    result = {
        "tables": {"1": {"title": "one", "columns": ["method"], "cost": False, "note": "", "published_note": ""}},
        "models": {"demo": {"images": 40, "top1": 0.9, "fixops": 1, "bytes": 1}},
        "calibration_images": 32,
        "executors": ["native"],
        "rows": [row],
        "finished": 5,
        "of": 5,
        "machine": {"adalog": "0", "torch": "2", "processor": "none"},
    }
    text = markdown(result)
    titles, _, _, cells = ([cell.strip() for cell in line.split("|")] for line in text.splitlines() if "|" in line)
    assert (cells[titles.index("p, float")], cells[titles.index("p, adalog")]) == ("0.03", "0.04")
    assert "with several seeds, the median" in text


def test_a_label_stands_beside_the_name_wherever_a_row_is_shown(monkeypatch, tmp_path):
    """And tables take files that lack rows, as those do that were measured before a method was there."""
    from benchmarks import publish
    from benchmarks import tables as generator

    assert labelled("apq-vit") == "apq-vit (our reading)"
    assert {name for name in METHODS if labelled(name) != name} == {"apq-vit", "aphq-vit", "erq", "fima-q", "qwt"}
    both = [{"bits": bits, "method": name} for bits in ("w4a4", "w3a3") for name in ("adalog", "apq-vit")]
    share = {"mean": 0.5, "std": 0.0, "values": [0.5]}
    measured = {"top1": 0.5, "agreement": 0.5, "mcnemar_p": 0.1, "mcnemar_p_adalog": None, "seconds": 1.0}
    bench = {
        "fp32": {"top1": 0.6, "low": 0.5, "high": 0.7},
        "queries": 9,
        "calibration_images": 32,
        "seed": 0,
        "rows": [{**row, **measured} for row in both[:3]],
        "machine": {"torch": "2"},
    }
    (tmp_path / "realbench.json").write_text(json.dumps(bench))
    (tmp_path / "sides.json").write_text(json.dumps({"rows": [{**row, "top1": share} for row in both[:3]]}))
    for module in (generator, publish):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    assert "| apq-vit (our reading) | 50.0 % |  |" in generator.real_table()
    assert "| W4A4 | apq-vit (our reading) |" in generator.realbench_table()
    assert "| apq-vit (our reading) | 50.00 % |  |" in generator.sides_table()
    row = {
        "table": "1",
        "model": "demo",
        "bits": "w4a4",
        "names": ["apq-vit"],
        "seeds": [0],
        **dict.fromkeys(("top1", "agreement", "seconds"), share),
        "p_float": [1.0],
        "p_adalog": [None],
        "published": {},
    }
    told = {
        "tables": {"1": {"title": "one", "columns": ["method"], "cost": False, "note": "", "published_note": ""}},
        "models": {"demo": {"top1": 0.6, "images": 9}},
        "rows": [row],
        "calibration_images": 32,
        "executors": ["native"],
        "finished": 1,
        "of": 9,
        "machine": {"adalog": "0", "torch": "2", "processor": "any"},
    }
    assert "| W4/A4 | apq-vit (our reading) | 50.00 |" in markdown(told)
