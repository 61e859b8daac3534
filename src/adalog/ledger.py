"""Build and print the ledger: one row per site, with its quantizers and its SQNR."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from adalog.graph.program import Program
from adalog.graph.rewrite import Assigned


@dataclass(frozen=True)
class LedgerRow:
    """One site of the ledger.

    Args:
        site: Name of the site.
        role: Role of the product, such as "linear", "conv", "qk" or "av".
        source: Kind of operation that makes the left operand.
        left: Description of the left operand's quantizer, or "float".
        right: Description of the right operand's quantizer, or "float".
        sqnr: SQNR [dB] of the site's output on the calibration images. Linears that share an activation (separate
            q, k and v) are searched together and have one SQNR.
    """

    site: str
    role: str
    source: str
    left: str
    right: str
    sqnr: float


def ledger_of(program: Program, assigned: Assigned, moved: Mapping[str, str]) -> list[LedgerRow]:
    """Return the ledger of a float program with these assignments, in order of execution.

    moved: for each site whose bits were pinned for another site, the name of that site.
    """
    ledger = []
    for group, assignment in assigned:
        left = "float" if assignment.left is None else assignment.left.describe()
        for site in group.sites:
            own_rows = len(program.tensors[site.right]) if len(group.sites) > 1 else 0
            right = "float" if assignment.right is None else assignment.right.describe(own_rows)
            bits_of = f" (bits of {moved[site.name]})" if site.name in moved else ""
            row = LedgerRow(site.name, site.role, site.left_source.kind, left + bits_of, right, assignment.sqnr)
            ledger.append(row)
    return ledger


def ledger_json(ledger: Sequence[LedgerRow]) -> list[dict[str, Any]]:
    return [asdict(row) for row in ledger]


def ledger_table(ledger: Sequence[LedgerRow]) -> list[str]:
    """Return a header and the rows as lines of text."""
    header = ("site", "role", "source", "left", "right", "SQNR [dB]")
    rows = [(row.site, row.role, row.source, row.left, row.right, f"{row.sqnr:.1f}") for row in ledger]
    widths = [max(len(line[i]) for line in [header, *rows]) for i in range(len(header))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in [header, *rows]]


_NAMED = 3  # the most names in a line


def float_lines(refusals: Mapping[str, str], operations: Mapping[str, int]) -> list[str]:
    """Return the lines of text that list what stays float, and why.

    refusals: the reasons by name. operations: the number of operations in float32, by operation.
    """
    alike: dict[str, list[str]] = {}
    for name, why in refusals.items():
        alike.setdefault(why, []).append(name)
    lines = []
    for why, names in alike.items():
        what, _, reason = why.partition(": ")
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        lines.append(f"{what}: {', '.join(names[:_NAMED])}{more}: {reason}")
    summary = ", ".join(f"{name} x {count}" for name, count in sorted(operations.items()))
    return [*lines, f"in float32, because adalog quantizes only linears, convolutions and matrix products: {summary}"]


# How text names the errors of outputs. Above the number, the summary says what lowers the error. A correction lowers
# the divergence more on the images that it fits than on others, so the number is below one that costs accuracy.
_ERRORS = {"kl": ("KL divergence", " nats", 0.03), "relative": ("relative squared error", "", 0.1)}


def error_lines(errors: Any) -> list[str]:
    """Return the lines of text that name the errors of a model's outputs and, if they are large, what lowers them.

    errors: the result of `Calibration.output_error`, as a file stores it; None stands for an error that is not finite.
    """
    lines, large = [], False
    for kind, error in errors.items() if isinstance(errors, Mapping) else ():
        if kind in _ERRORS and (error is None or (type(error) is float and 0 <= error < math.inf)):
            name, unit, limit = _ERRORS[kind]
            value = "not finite" if error is None else f"{error:.3g}{unit}"
            lines.append(f"{name} of the outputs on the calibration images (at most 64): {value}")
            large = large or error is None or error > limit
    if large:
        lines.append(
            "to lower it: give more bits, fit more images (method adalog+, or adalog++, which trains), or let a budget "
            "choose the bits (docs/how-to/raise-accuracy.md)"
        )
    return lines
