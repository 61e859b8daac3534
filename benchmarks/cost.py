"""What DeiT-T costs at the paper's bits as it runs, and as Eq. 10 is printed beside its Table 3.

    python benchmarks/cost.py

Prints one JSON object and saves it as benchmarks/results/cost.json. The weights are random, since a cost depends on
shapes and bits alone (the size of the file also on how many decimals a few numbers have); so is the search cut short.
"""

from dataclasses import replace

import timm
import torch
import typer

from adalog import Calibration, Config, Search, artifact
from adalog.quantizers import LogQuantizer
from adalog.study.cost import Cost, cost
from adalog.study.doctor import machine
from publish import RESULTS, publish

MODEL = "deit_tiny_patch16_224"
SHAPE = (3, 224, 224)
# Table 3: FixOPs in billions and the model's size in MB, AdaLog's.
PAPER = {"fp32": (20.1, 21.9), "w6a6": None, "w4a4": (0.539, 3.4), "w3a3": (0.391, 2.7)}


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = timm.create_model(MODEL).eval()
    calibration = Calibration(model, torch.randn(2, *SHAPE))
    search = Search(init=(4, 2), parents=1, steps=0, rough_rows=0)
    rows = []
    for bits, paper in PAPER.items():
        row = {"bits": bits, "paper": paper and {"fixops": paper[0] * 1e9, "size_bytes": paper[1] * 1e6}}
        if bits == "fp32":
            found = cost(calibration.program, [SHAPE])
            row |= {"file_bytes": None}
        else:
            quantized = calibration.quantize(replace(Config.preset(bits), images=2, search=search))
            found = cost(quantized.program, [SHAPE])
            tables = [each.width for each in quantized.program.quantizers.values() if isinstance(each, LogQuantizer)]
            row |= {
                "file_bytes": artifact.sizes(artifact.serialise(quantized.quantized)),
                "tables": {f"u{width}": tables.count(width) for width in sorted(set(tables))},
                "as_printed": summary(cost(quantized.program, [SHAPE], as_printed=True)),
            }
        rows.append({**row, **summary(found)})
    publish({"model": f"timm:{MODEL}", "shape": SHAPE, "rows": rows, "machine": machine()}, RESULTS / "cost.json")


def summary(found: Cost) -> dict[str, object]:
    """All but the rows, and what the bit costs that a mantissa of Eq. 10 has more than its code."""
    told = found.to_json()
    del told["rows"]
    widened = [row for row in found.rows if row.role == "shift"]
    products = {row.name: row for row in found.products}
    extra = sum(row.count * products[row.name].right_bits for row in widened) / 64
    return {**told, "mantissa_fixops": extra}


if __name__ == "__main__":
    typer.run(main)
