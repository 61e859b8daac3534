"""The docstrings of exported names have the form that tools parse."""

import dataclasses
import importlib
import inspect
from pathlib import Path

import pytest

import adalog

ROOT = Path(__file__).parent.parent
MODULES = ("adalog.demo", "adalog.run", "adalog.pipeline")  # all of whose public names users call


def public_members(value):
    """Yield the public functions and properties that a class itself defines, and `__call__`.

    What overrides a member of a base without a docstring of its own has the docstring of that base.
    """
    for name, found in vars(value).items():
        member = getattr(found, "__func__", found)  # of a static or class method
        if member.__doc__ is None and any(name in vars(base) for base in value.__mro__[1:-1]):
            continue
        if (inspect.isfunction(member) or isinstance(member, property)) and (name[0] != "_" or name == "__call__"):
            yield name, member


def exported():
    """Yield each exported name of the package with its class, function or property; a class before its members."""
    values = {f"adalog.{name}": getattr(adalog, name) for name in adalog.__all__ if name not in ("METHODS", "demo")}
    values["adalog.methods.Method"] = type(adalog.METHODS["adalog"])
    for name in MODULES:
        module = adalog.demo if name == "adalog.demo" else importlib.import_module(name)
        own = ((each, value) for each, value in vars(module).items() if each[0] != "_")
        values |= {f"{name}.{each}": v for each, v in own if getattr(v, "__module__", "") == module.__name__}
    for name, value in values.items():
        if callable(value):
            yield name, value
        if isinstance(value, type):
            yield from ((f"{name}.{each}", member) for each, member in public_members(value))


def entries(docstring, section):
    """Return the names that a section of a docstring documents, or None if there is no such section."""
    _, found, rest = f"\n{docstring}\n".partition(f"\n{section}:\n")
    lines = rest.split("\n\n")[0].splitlines()
    names = [line.strip().partition(":")[0] for line in lines if line[:4].isspace() and not line[4:5].isspace()]
    return names if found else None


def initialises(kind):
    """Return True if a class itself defines how it is made: by a method, or by the fields of a dataclass."""
    return "__init__" in vars(kind) and (not dataclasses.is_dataclass(kind) or bool(inspect.get_annotations(kind)))


def faults(value):
    """Return what the docstring of a class, function or property lacks."""
    docstring, found = inspect.getdoc(value) or "", []
    if not docstring.partition("\n")[0].endswith("."):
        found.append("no summary")
    if isinstance(value, property) or (isinstance(value, type) and not initialises(value)):
        return found
    signature = inspect.signature(value)
    kinds = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    parameters = [kinds.get(each.kind, "") + name for name, each in signature.parameters.items()]
    parameters = [name for name in parameters if name not in ("self", "cls")]
    if (entries(docstring, "Args") or []) != parameters:
        found.append(f"Args has {entries(docstring, 'Args')}, the signature {parameters}")
    returns = not isinstance(value, type) and signature.return_annotation not in (None, signature.empty)
    if returns and entries(docstring, "Returns") is entries(docstring, "Yields") is None:
        found.append("no Returns")
    return found


def test_exported_names_are_documented():
    pytest.importorskip("transformers")  # for adalog.pipeline
    wrong = {name: found for name, value in exported() if (found := faults(value))}
    assert wrong == {}


def test_docstrings_of_exported_names_can_be_parsed(caplog):
    """By the parser of the documentation, without a warning."""
    griffe = pytest.importorskip("griffe")
    pytest.importorskip("transformers")
    package = griffe.load("adalog", search_paths=[ROOT / "src"], resolve_aliases=True)
    for name in ("adalog.METHODS", "adalog.demo", *MODULES[1:], *(name for name, _ in exported())):
        found = package[name.removeprefix("adalog.")]
        assert found.docstring is not None, name
        assert found.docstring.parse("google"), name
    assert caplog.messages == []
