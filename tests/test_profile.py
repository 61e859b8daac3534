"""All property tests have the profile of conftest.py: the same examples on every machine, and no deadline."""

import ast
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

MODULES = sorted(Path(__file__).parent.glob("*.py"))
# What a test may set for itself; all else is the profile's.
OWN = {"max_examples"}


def test_the_profile_is_derandomised_and_without_deadline():
    """Examples of earlier failures, which one machine has and another has not, are not replayed either."""
    for used in (settings.default, settings(max_examples=3)):
        assert used.derandomize is True
        assert used.deadline is None
        assert used.database is None


def examples():
    """What a property test draws here."""
    drawn = []

    @settings(max_examples=10)
    @given(st.integers(), st.floats())
    def draw(whole, real):
        drawn.append((whole, repr(real)))

    draw()
    return drawn


def test_the_same_examples_are_drawn_again():
    first, second = examples(), examples()
    assert first == second
    assert len(set(first)) > 5


def violations(text):
    """The lines of a module that set more for a property test than its number of examples."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hypothesis"):
            wrong = {name.name for name in node.names} & {"seed", "reproduce_failure", "register_random"}
            wrong |= {name.asname for name in node.names if name.name == "settings" and name.asname}
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            wrong = {name} & {"register_profile", "load_profile", "reproduce_failure"}
            if name == "settings":
                wrong |= {str(keyword.arg) for keyword in node.keywords} - OWN
                wrong |= {"parent"} if node.args else set()
        else:
            continue
        found += [(node.lineno, each) for each in sorted(wrong)]
    return found


@pytest.mark.parametrize("path", MODULES, ids=[path.stem for path in MODULES])
def test_no_test_sets_more_than_its_number_of_examples(path):
    allowed = ["register_profile", "load_profile"] if path.stem == "conftest" else []
    found = violations(path.read_text("utf-8"))
    assert [name for _, name in found] == allowed, found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("settings(max_examples=3)", []),
        ("settings(deadline=200)", ["deadline"]),
        ("hypothesis.settings(max_examples=3, derandomize=False)", ["derandomize"]),
        ("settings(other, max_examples=3)", ["parent"]),
        ("settings(**others)", ["None"]),
        ("settings.load_profile('default')", ["load_profile"]),
        ("from hypothesis import given, seed", ["seed"]),
        ("from hypothesis import settings as how", ["how"]),
    ],
)
def test_what_sets_more_is_seen(text, expected):
    assert [name for _, name in violations(text)] == expected
