"""What the documentation names exists."""

import ast
import functools
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from adalog import Config, Search

ROOT = Path(__file__).parent.parent
HEADER = ["Equation", "What it says", "Function", "Test"]


def table_rows():
    """The cells of docs/equations.md's table, below its header."""
    lines = (ROOT / "docs" / "equations.md").read_text(encoding="utf-8").splitlines()
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert table[0] == HEADER
    assert set("".join(table[1])) == {"-"}
    return table[2:]


ROWS = table_rows()
by_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}: {row[1]}")


@by_row
def test_rows_are_whole(row):
    assert len(row) == len(HEADER)
    assert all(row)


@by_row
def test_functions_can_be_imported(row):
    name = re.fullmatch(r"`((?:[a-z_]+\.)+)((?:[A-Z]\w*\.)?\w+)`", row[2])
    assert name is not None
    module = importlib.import_module(f"adalog.{name[1].strip('.')}")
    function = functools.reduce(getattr, name[2].split("."), module)
    assert callable(function)
    assert function.__module__ == module.__name__


@by_row
def test_tests_exist(row):
    name = re.fullmatch(r"`(tests/\w+\.py)::(test_\w+)`", row[3])
    assert name is not None
    tree = ast.parse((ROOT / name[1]).read_text(encoding="utf-8"))
    assert name[2] in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_equation_has_a_row():
    named = [row[0] for row in ROWS]
    assert [str(number) for number in range(1, 16) if str(number) not in named] == []
    for other in ("Algorithm 1", "Sec. 3.4", "Sec. 4.1"):
        assert any(name.startswith(other) for name in named)


def test_every_test_of_the_paper_has_a_row():
    tree = ast.parse((ROOT / "tests" / "test_paper.py").read_text(encoding="utf-8"))
    tests = {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}
    named = {tuple(row[3].strip("`").split("::")) for row in ROWS}
    assert tests == {test for file, test in named if file == "tests/test_paper.py"}


def test_every_command_is_told():
    from adalog.cli import app

    told = set(re.findall(r"^\| `(\w+)", (ROOT / "docs" / "commands.md").read_text(encoding="utf-8"), re.MULTILINE))
    assert told == {command.name or command.callback.__name__ for command in app.registered_commands}


@pytest.mark.slow
def test_the_readme_python_runs(monkeypatch, tmp_path):
    """The five lines, with a search cut short."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    quick = Config(search=Search(init=(8, 4), parents=4, steps=1, rounds=1))
    monkeypatch.setattr(Config, "preset", staticmethod(lambda bits: quick))
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(code, names)
    assert (tmp_path / "vit.w4a4.safetensors").exists()
    assert torch.equal(names["logits"], names["qmodel"](names["images"]))


@pytest.mark.slow
def test_the_integers_by_hand():
    """docs/integer.md: Eq. 10 measured, and one site with a pencil."""
    code = "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "integer.md").read_text(), flags=re.DOTALL))
    names: dict[str, object] = {}
    exec(code, names)
    assert round(names["literal"], 2) == 1.47  # as the table says
    errors = [names["error"](names[form](3)) for form in ("shifted", "folded")]
    assert [round(value, 3) for value in errors] == [0.122, 0.065]


def test_the_readme_tables_are_those_of_the_results():
    command = [sys.executable, str(ROOT / "benchmarks" / "tables.py"), "--check"]
    assert subprocess.run(command, check=False).returncode == 0
