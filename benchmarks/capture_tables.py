"""Tables of the architectures of timm and transformers that adalog captures."""

from benchmarks.publish import markdown_table, read, source

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

# Outcomes of architectures that were built, with their column.
_OUTCOMES = {"exact": "captured", "second try": "captured later", "refused": "refused", "late": "not finished"}
_ATTENTION = {True: "yes", False: "no", None: "unknown"}
_OUTCOMES |= {"no sites": "nothing to quantize", "other": "failed otherwise"}


def sweep_table() -> str:
    """Return how many architectures of each library are captured, and why the others are not."""
    result = read("sweep")
    rows = result["rows"]
    counts = [line for library in ("timm", "transformers") for line in _counted(library, rows)]
    table = markdown_table(["Architectures", "built", *_OUTCOMES.values()], counts)
    others = [row for row in rows if row["outcome"] in _OUTCOMES and row["outcome"] not in ("exact", "second try")]
    reasons = markdown_table(
        ["Not captured", "attention", "why"],
        ([f"`{row['target']}`", _ATTENTION[row.get("attention")], row.get("message", "")] for row in others),
    )
    unbuilt = ", ".join(f"`{row['target']}`" for row in rows if row["outcome"] == "not built")
    apart = sum(row["outcome"] == "other inputs" for row in rows)
    note = (
        f"Each model has {result['seconds_per_model']} seconds. {apart} classes of transformers need other inputs than "
        f"images, such as text or patches in one sequence, and are not counted. The script could not build: {unbuilt}."
    )
    return f"{table}\n\n{reasons}\n\n{note}\n\n{source('sweep')}"


def _counted(library: str, rows: list[Mapping[str, Any]]) -> Iterator[list[str]]:
    """Yield the counts of a library's architectures: all that were built, and those with attention."""
    own = [row for row in rows if row["target"].startswith(f"{library}:") and row["outcome"] in _OUTCOMES]
    for name, chosen in {
        library: own,
        f"{library}, with attention": [row for row in own if row.get("attention")],
    }.items():
        counts = Counter(row["outcome"] for row in chosen)
        yield [name, str(len(chosen)), *(str(counts[outcome]) for outcome in _OUTCOMES)]
