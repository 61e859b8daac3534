"""What claims of the pages are made of: see `test_measured.py`.

A claim is a function that reads `benchmarks/results` and returns the sentences that are true by these files.
"""

from benchmarks.publish import measured

import functools
import math
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from adalog.study.paper import published

ROOT = Path(__file__).parent.parent
MEASURED, README = "docs/measured.md", "README.md"
CLAIMS: dict[Callable[[], str], str] = {}  # the page of each
NUMBERS = (
    *("none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen"),
)


def says(page: str):
    """The decorated function returns sentences of this page, or "" where none is true any more."""

    def added(claim: Callable[[], str]) -> Callable[[], str]:
        CLAIMS[claim] = page
        return claim

    return added


def order(holds: bool, *found: object) -> None:
    """Fails unless the files have the order that a sentence states. found: what they have instead."""
    assert holds, f"the files have another order now, reword the sentence: {found}"


@functools.cache
def results(name: str) -> Any:
    return measured(name)


def printed(table: str, bits: str, model: str, method: str, measure: str = "top1") -> float:
    """A figure of the paper."""
    names = {"table": table, "bits": bits, "model": model, "method": method, "measure": measure}
    (found,) = (
        figure["value"]
        for figure in published()["figures"]
        if all(figure[key] == value for key, value in names.items())
    )
    return found


def mean(value: Any) -> float:
    """The mean of several draws, or the only one."""
    return float(value["mean"] if isinstance(value, dict) else value)


def middle(value: Any) -> float:
    """The median of several draws' p-values, or the only one."""
    return float(median(p for p in value if p is not None) if isinstance(value, list) else value)


def listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def span(low: float, high: float) -> str:
    return f"{low:.0f} to {high:.0f}"


def tenths(value: float) -> str:
    """One decimal, with halves rounded up whatever the last bit of the float."""
    return f"{math.floor(10 * round(value, 6) + 0.5) / 10:.1f}"


def at_most(value: float) -> str:
    """Two digits that are no smaller than the value, for "at most"."""
    step = 10.0 ** (math.floor(math.log10(value)) - 1)
    return f"{math.ceil(round(value / step, 9)) * step:.2g}"


def at_least(value: float) -> str:
    """Two digits that are no larger than the value, for "at least"."""
    step = 10.0 ** (math.floor(math.log10(value)) - 1)
    return f"{math.floor(round(value / step, 9)) * step:.2g}"


def plain(text: str) -> str:
    return " ".join(text.replace("**", "").split())
