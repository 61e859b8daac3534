"""How a benchmark's figures are published."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adalog.files import write_whole

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def publish(result: Mapping[str, Any], path: Path) -> None:
    """Print the result and its commit as one JSON object, and save it in a file, whole or not at all."""
    text = json.dumps({**result, "commit": commit()}, indent=1) + "\n"
    write_whole(path, text.encode())
    print(text, end="")


def measured(name: str) -> dict[str, Any]:
    """A result by the name of its file, each row replaced by what was measured again later.

    Such rows are in files NAME-renewed*.json, and have "renewed": the processor that they were measured on.
    """
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    seed = result.get("seed")  # of rows that do not say theirs
    files = sorted(RESULTS.glob(f"{name}-renewed*.json"))
    places = {_identity(row, seed): index for index, row in enumerate(result.get("rows", []))}
    if files and len(places) < len(result["rows"]):
        raise ValueError(f"rows of {name}.json are alike but for what was measured: name what tells them apart")
    for path in files:
        later = json.loads(path.read_text(encoding="utf-8"))
        for row in later["rows"]:
            place = places.get(_identity(row, seed))
            if place is None:
                raise ValueError(f"{path} has a row that {name}.json has not: {_identity(row, seed)}")
            result["rows"][place] = {**row, "renewed": later["machine"]["processor"]}
    return result


_NAMES = ("table", "model", "bits", "stage", "images")  # what is not measured


def _identity(row: Mapping[str, Any], seed: int | None) -> str:
    # The rows of `adalog tables` have names; their "method" is that of a published row.
    return json.dumps([row.get("names", row.get("method")), row.get("seed", seed), *(row.get(name) for name in _NAMES)])


def commit() -> str | None:
    """The commit of this clone, with "-changed" where code differs from it; None where there is no clone or no git."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", ROOT, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "src/*.py", "src/*.cpp", "src/*.json", "benchmarks/*.py")
        return git("rev-parse", "HEAD") + ("-changed" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None
