"""Publish a benchmark's figures: result files, their provenance, and Markdown tables of them."""

import json
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from adalog.files import write_whole

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
_CODE = (
    "src/*.py",
    "src/*.cpp",
    "src/*.json",
    "benchmarks/*.py",
    "benchmarks/*.cpp",
    "benchmarks/*.c",
    "experiments/*",
)


def publish(result: Mapping[str, Any], path: Path) -> None:
    """Print the result and its commit as one JSON object, and save it in a file, whole or not at all."""
    print(save(result, path), end="")


def save(result: Mapping[str, Any], path: Path) -> str:
    """Save the result and its commit in a file, whole or not at all, and return the text of the file."""
    text = json.dumps({**result, "commit": commit()}, indent=1) + "\n"
    write_whole(path, text.encode())
    return text


def read(name: str) -> dict[str, Any]:
    """Return a result by the name of its file."""
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return result


def exists(name: str) -> bool:
    """Return True if there is a result with this name."""
    return (RESULTS / f"{name}.json").exists()


def later_files(name: str) -> list[str]:
    """Return the names of the files with later measurements of a result, NAME-renewed*.json."""
    return sorted(path.stem for path in RESULTS.glob(f"{name}-renewed*.json"))


def measured(name: str) -> dict[str, Any]:
    """Return a result with each row replaced by its later measurement, if there is one.

    Later rows are in `later_files` and get the key "renewed", the processor that measured them. A row that the result
    lacks comes after the other rows with its bits.
    """
    result = read(name)
    seed = result.get("seed")  # of rows without a seed of their own
    files, added = later_files(name), dict[str, dict[str, Any]]()
    places = {_identity(row, seed): index for index, row in enumerate(result.get("rows", []))}
    if files and len(places) < len(result["rows"]):
        raise ValueError(f"{name}.json has rows that differ only in measured values: add a field that tells them apart")
    for file in files:
        later = read(file)
        for row in later["rows"]:
            place = places.get(_identity(row, seed))
            row["renewed"] = later["machine"]["processor"]
            if place is None:
                added[_identity(row, seed)] = row
            else:
                result["rows"][place] = row
    for identity, row in added.items():
        alike = [index for index, other in enumerate(result["rows"]) if other["bits"] == row["bits"]]
        if not alike:
            raise ValueError(f"{name}-renewed*.json have a row of bits that {name}.json lacks: {identity}")
        result["rows"].insert(alike[-1] + 1, row)
    return result


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def source(*names: str) -> str:
    """Say which result files a table comes from, with the commit and the processor of each."""
    return f"Source: {'; '.join(map(_provenance, names))}."


def earlier(methods: str = "`adalog`", what: str = "This table was") -> str:
    """Say that something was measured before these methods had a correction."""
    return (
        f"{what} measured with an earlier search, before {methods} corrected weights; `stages=()` comes closest to "
        "it today."
    )


def _provenance(name: str) -> str:
    result = read(name)
    machine = result.get("machine", {})
    if isinstance(machine, str):
        machine = {"processor": machine}
    facts = [f"commit {result['commit'][:7]}" if result.get("commit") else "commit not recorded"]
    facts += [machine["processor"]] if "processor" in machine else []
    facts += [f"torch {machine['torch']}"] if "torch" in machine else []
    return f"`benchmarks/results/{name}.json` ({', '.join(facts)})"


_NAMES = ("table", "model", "bits", "stage", "images")  # fields that are not measured


def _identity(row: Mapping[str, Any], seed: int | None) -> str:
    # The rows of `experiments.tables` have names; their "method" is that of a published row.
    return json.dumps([row.get("names", row.get("method")), row.get("seed", seed), *(row.get(name) for name in _NAMES)])


def commit() -> str | None:
    """Return the commit of this clone, with "-changed" if code differs from it; None without a clone or git."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", *_CODE)
        return git("rev-parse", "HEAD") + ("-changed" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None
