"""The order of the modules, read from their imports, inside the library and beside it."""

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "adalog"
OUTSIDE = ("experiments", "benchmarks")
STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)

BASE = {"errors", "extras", "library", "device", "files", "finished", "ranks", "stored", "version"}
SEARCHED = {"quantizers", "graph", "choices", "search"}
CONFIGURED = {*SEARCHED, "calibration", "config"}  # and thus without the baselines
# Each part of the package, lowest first, and what it may import besides BASE. "adalog" is the package's own __init__.
# The modules of `calibration` that read a `Config` are parts of their own, above it.
MAY_IMPORT = {
    **{part: set() for part in (*BASE, "run")},
    "quantizers": set(),
    "graph": {"quantizers"},
    "choices": {"quantizers"},
    "search": {"quantizers", "choices"},
    "calibration": SEARCHED,
    "baselines": {*SEARCHED, "calibration"},
    "methods": {"choices", "search", "baselines"},
    "config": {*SEARCHED, "calibration", "baselines", "methods"},
    "ledger": {"quantizers", "graph"},
    "quantized": {"config", "graph", "ledger"},
    "artifact": {"quantizers", "config", "graph", "ledger", "quantized", "run"},
    "runtime": {"quantizers", "graph", "ledger", "quantized", "run"},
    "export": {"quantizers", "graph", "ledger", "quantized", "artifact", "run", "runtime"},
    "hub": {"quantizers", "graph", "ledger", "quantized", "artifact"},
    "model": {"quantizers", "config", "graph", "ledger", "quantized", "artifact", "runtime", "export", "hub"},
    "calibration.operands": CONFIGURED,
    "calibration.shared": {*CONFIGURED, "calibration.operands"},
    "calibration.stages": {*CONFIGURED, "calibration.shared"},
    "inputs": {"graph", "run"},
}
MAY_IMPORT["calibration.calibration"] = {
    *(CONFIGURED | {"ledger", "quantized", "model"}),
    *("calibration.operands", "calibration.shared", "calibration.stages"),
}
MAY_IMPORT["_quantize"] = {*CONFIGURED, "calibration.calibration", "ledger", "quantized", "model", "inputs"}
MAY_IMPORT["adalog"] = {part for part in MAY_IMPORT if part not in BASE}
MAY_IMPORT["pipeline"] = MAY_IMPORT["adalog"] | {"adalog"}
MAY_IMPORT["study"] = MAY_IMPORT["adalog"] | {"adalog"}
MAY_IMPORT["report"] = MAY_IMPORT["study"] | {"study"}
MAY_IMPORT["detection"] = MAY_IMPORT["study"] | {"study"}
MAY_IMPORT["cli"] = MAY_IMPORT["report"] | {"report", "detection"}
MAY_IMPORT["__main__"] = {"cli"}


def module_name(file: Path) -> str:
    parts = file.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_of(module: str) -> str:
    names = module.split(".")[1:]
    return next((part for part in (".".join(names[:2]), *names[:1]) if part in MAY_IMPORT), module)


@cache
def modules() -> dict[str, Path]:
    return {module_name(file): file for file in sorted(SOURCE.rglob("*.py"))}


@cache
def outside() -> dict[str, Path]:
    """The modules of the packages beside the library, which the wheel leaves out."""
    files = [file for name in OUTSIDE for file in sorted((ROOT / name).glob("*.py"))]
    return {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in files}


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """What is directly inside of a node and may hold an import or a class."""
    return (each for each in ast.iter_child_nodes(node) if isinstance(each, STATEMENTS))


def imported(tree: ast.AST, here: str) -> set[str]:
    """The modules of our packages that a module imports, inside functions too; not what only types need."""
    found = set()
    for node in statements(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            found |= imported(ast.Module(node.orelse, []), here)
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{here} imports relatively: write the whole name"
            names = {f"{node.module}.{name.name}" for name in node.names}
            inner = names & (set(modules()) | set(outside()))
            found |= inner | ({node.module} if names - inner else set())
        else:
            found |= imported(node, here)
    return {name for name in found if name.split(".")[0] in ("adalog", *OUTSIDE)}


@cache
def imports() -> dict[str, set[str]]:
    """What each module imports of our packages."""
    files = modules() | outside()
    return {name: imported(tree_of(file), name) - {name} for name, file in files.items()}


def test_no_module_imports_a_higher_one():
    """graph and search, neither of which may import the other, are among them, and so are experiments."""
    failures = [
        f"{module} -> {other}"
        for module in modules()
        for other in sorted(imports()[module])
        if other.split(".")[0] in OUTSIDE
        or part_of(other) not in MAY_IMPORT[part_of(module)] | BASE | {part_of(module)}
    ]
    assert not failures


def test_only_the_command_line_may_import_detection():
    assert {part for part, others in MAY_IMPORT.items() if "detection" in others} == {"cli"}


def test_what_the_order_allows_has_no_circle():
    assert {"graph", "search"} <= set(TopologicalSorter(MAY_IMPORT).static_order())
    assert "search" not in MAY_IMPORT["graph"]
    assert "graph" not in MAY_IMPORT["search"]


def test_baselines_are_imported_only_where_names_get_their_meaning():
    """The core runs whatever search, stage, loss or quantizer a config holds."""
    importers = {part_of(module) for module in modules() if "baselines" in map(part_of, imports()[module])}
    assert {"methods", "config"} <= importers <= {"baselines", "methods", "config"}


def test_no_modules_import_each_other():
    try:
        tuple(TopologicalSorter(imports()).static_order())
    except CycleError as cause:
        pytest.fail(f"a circle of imports: {' <- '.join(cause.args[1])}")


def test_benchmarks_do_not_import_the_command_line():
    failures = [
        f"{module} -> {other}"
        for module in outside()
        if module.startswith("benchmarks.")
        for other in sorted(imports()[module])
        if other.split(".")[0] == "adalog" and part_of(other) == "cli"
    ]
    assert not failures
