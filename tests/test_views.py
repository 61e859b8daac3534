"""Tables of results for the terminal."""

from adalog.cli import console, views


def test_headings_keep_their_units(capsys):
    console.say(*views.times({"file": "vit.safetensors", "threads": 1, "rows": [], "absent": {}}))
    printed = capsys.readouterr().out
    assert all(unit in printed for unit in ("[ms]", "[MB]", "[s]")), printed
