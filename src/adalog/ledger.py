"""The ledger: one row per site that says how it is quantized and at what loss, and the text around it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from adalog.graph.program import Program
from adalog.graph.rewrite import Assigned, SiteGroup
from adalog.quantizers import Assignment


@dataclass(frozen=True)
class LedgerRow:
    """One site: role, where its left operand comes from, both quantizers, and its output's SQNR [dB] in calibration.

    Linears that share an activation (separate q, k, v) are searched together, and have one SQNR.
    """

    site: str
    role: str
    source: str
    left: str
    right: str
    sqnr: float


def ledger_of(program: Program, assigned: Assigned, moved: Mapping[str, str]) -> list[LedgerRow]:
    """The rows of the ledger of a float program with these assignments, in order of execution.

    moved: the sites that have the bits pinned for another one, and its name.
    """
    return [row for entry in assigned for row in _rows(program, *entry, moved)]


def _rows(program: Program, group: SiteGroup, assignment: Assignment, moved: Mapping[str, str]) -> Iterator[LedgerRow]:
    several = len(group.sites) > 1
    left = "float" if assignment.left is None else assignment.left.describe()
    for site in group.sites:
        rows = len(program.tensors[site.right]) if several else 0
        right = "float" if assignment.right is None else assignment.right.describe(rows)
        bits_of = f" (bits of {moved[site.name]})" if site.name in moved else ""
        yield LedgerRow(site.name, site.role, site.left_source.kind, left + bits_of, right, assignment.sqnr)


def ledger_json(ledger: Sequence[LedgerRow]) -> list[dict[str, Any]]:
    """The rows as JSON."""
    return [asdict(row) for row in ledger]


def ledger_table(ledger: Sequence[LedgerRow]) -> list[str]:
    """The rows as text, after a header."""
    header = ("site", "role", "source", "left", "right", "SQNR [dB]")
    rows = [(row.site, row.role, row.source, row.left, row.right, f"{row.sqnr:.1f}") for row in ledger]
    widths = [max(len(line[i]) for line in [header, *rows]) for i in range(len(header))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in [header, *rows]]


def float_lines(refusals: Mapping[str, str], operations: Mapping[str, int]) -> list[str]:
    """The lines that say what stays float, and why.

    refusals: the reasons by name, as a model has them. operations: how many of each operation run in float32.
    """
    told = ((name, *why.partition(": ")) for name, why in refusals.items())
    kept = ", ".join(f"{name} x {count}" for name, count in sorted(operations.items()))
    return [
        *(f"{what}: {name}: {why}" for name, what, _, why in told),
        f"in float32, since they multiply no two stored or computed tensors: {kept}",
    ]
