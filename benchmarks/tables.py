"""Write the README's tables from benchmarks/results: `python benchmarks/tables.py` (`--check` only compares)."""

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


def spread(value: dict[str, float]) -> str:
    return f"{100 * value['mean']:.2f} ± {100 * value['std']:.2f} %"


def main(check: Annotated[bool, typer.Option("--check")] = False) -> None:
    readme = ROOT / "README.md"
    text = readme.read_text()
    block = f"<!-- demo table -->\n{demo_table()}\n<!-- end -->"
    fresh = re.sub(r"<!-- demo table -->.*?<!-- end -->", lambda _: block, text, flags=re.DOTALL)
    if check:
        sys.exit(fresh != text)
    readme.write_text(fresh)


if __name__ == "__main__":
    typer.run(main)
