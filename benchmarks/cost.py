"""Count the cost of DeiT-T at the bits of the paper, and compare it with the paper's Table 3.

    python benchmarks/cost.py

adalog folds the levels of logarithmic codes into tables, so a product needs no shifts. Each row has this cost, and in
"as_printed" the cost of Eq. 10 with mantissas and shifts. A cost depends on shapes and bits only, so the weights are
random and the search is short. The size of the file also depends slightly on how many decimals a few numbers have.
"""

from benchmarks.publish import RESULTS, publish

from dataclasses import replace

import timm
import torch
import typer

from adalog import Calibration, Config, Search, artifact
from adalog.quantizers import LogQuantizer
from adalog.study.cost import Cost, cost
from adalog.study.doctor import machine

MODEL = "deit_tiny_patch16_224"
SHAPE = (3, 224, 224)
# AdaLog in Table 3 of the paper: FixOPs in billions, and the size of the model in MB.
PAPER = {"fp32": (20.1, 21.9), "w6a6": None, "w4a4": (0.539, 3.4), "w3a3": (0.391, 2.7)}


def main() -> None:
    """Count the cost of DeiT-T at the bits of the paper, and save it as benchmarks/results/cost.json."""
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
    """Return the totals, and the FixOPs of the one bit that a mantissa of Eq. 10 has more than its code."""
    told = found.to_json()
    del told["rows"]
    widened = [row for row in found.rows if row.role == "shift"]
    products = {row.name: row for row in found.products}
    extra = sum(row.count * products[row.name].right_bits for row in widened) / 64
    return {**told, "mantissa_fixops": extra}


if __name__ == "__main__":
    typer.run(main)
