"""Write the tables of README and docs from benchmarks/results: `python benchmarks/tables.py` (`--check` compares)."""

import json
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def demo_table() -> str:
    """Top-1, agreement and size of the bundled model, mean over the seeds of demo.json."""
    result = json.loads((RESULTS / "demo.json").read_text())
    lines = [
        "| bits | quantizer after softmax and GELU | top-1 | agreement with fp32 | file |",
        "|---|---|---|---|---|",
    ]
    lines.append(f"| fp32 | | {100 * result['fp32']['top1']:.2f} % | | |")
    for row in result["rows"]:
        strong = "**" if row["method"] == "adalog" else ""
        cells = (row["bits"].upper(), row["method"], spread(row["top1"]), spread(row["agreement"]))
        size = f"{row['bytes']['mean'] / 1e6:.2f} MB"
        lines.append("| " + " | ".join(f"{strong}{cell}{strong}" for cell in (*cells, size)) + " |")
    machine = result["machine"]
    note = (
        f"Mean ± standard deviation over {len(result['seeds'])} draws of {result['calibration_images']} calibration "
        f"images, on {result['images']:,} test images (one top-1 has a standard error of about 0.7 points). "
        f"Measured with torch {machine['torch']}; figures: `benchmarks/results/demo.json`."
    )
    lines += ["", note]
    return "\n".join(lines)


def cost_table() -> str:
    """FixOPs and bytes of DeiT-T at each of the bits of cost.json, beside the paper's."""
    result = json.loads((RESULTS / "cost.json").read_text())
    columns = result["rows"]
    lines = ["| | " + " | ".join(row["bits"] for row in columns) + " |", "|---|" + "---|" * len(columns)]

    def line(name: str, values: list[float | None], form: str, unit: float) -> None:
        cells = ["" if value is None else format(value / unit, form) for value in values]
        lines.append("| " + " | ".join([name, *cells]) + " |")

    def fixops(role: str) -> list[float | None]:
        return [row["roles"][role]["fixops"] if role in row["roles"] else None for row in columns]

    products = [row["fixops"] for row in columns]
    for role in ("linear", "conv", "qk", "av"):
        line(role, fixops(role), ",.1f", 1e6)
    line("**products**", products, ",.1f", 1e6)
    line("of them the mantissas' extra bit", [row["mantissa_fixops"] or None for row in columns], ",.1f", 1e6)
    moves = ("quantize", "dequantize")
    for role in moves:
        line(role, fixops(role), ",.1f", 1e6)
    whole = [sum(value or 0 for value in cells) for cells in zip(products, *map(fixops, moves), strict=True)]
    line("**products, quantize, dequantize**", whole, ",.1f", 1e6)
    line("**the paper's Table 3**", [row["paper"] and row["paper"]["fixops"] for row in columns], ",.0f", 1e6)
    for role in ("layer_norm", "gelu", "softmax", "mul"):
        line(role, fixops(role), ",.1f", 1e6)
    for role in ("look-up", "shift"):
        counts = [row["roles"][role]["count"] if role in row["roles"] else None for row in columns]
        line(f"{role}s [millions]", counts, ",.1f", 1e6)
    files = [row["file_bytes"] for row in columns]
    for part in ("header", "codes", "scale", "zero_point", "float"):
        line(f"file: {part} [bytes]", [parts and parts[part] for parts in files], ",.0f", 1)
    line("**file [MB]**", [parts and sum(parts.values()) for parts in files], ".3f", 1e6)
    line("**the paper's Table 3 [MB]**", [row["paper"] and row["paper"]["size_bytes"] for row in columns], ".1f", 1e6)
    return "\n".join(lines)


def spread(value: dict[str, float]) -> str:
    return f"{100 * value['mean']:.2f} ± {100 * value['std']:.2f} %"


def main(check: Annotated[bool, typer.Option("--check")] = False) -> None:
    stale = False
    for place, name, table in (("README.md", "demo table", demo_table), ("docs/cost.md", "cost table", cost_table)):
        text = (ROOT / place).read_text()
        block = f"<!-- {name} -->\n{table()}\n<!-- end -->"
        fresh = re.sub(rf"<!-- {name} -->.*?<!-- end -->", lambda _, block=block: block, text, flags=re.DOTALL)
        stale |= fresh != text
        if not check:
            (ROOT / place).write_text(fresh)
    sys.exit(check and stale)


if __name__ == "__main__":
    typer.run(main)
