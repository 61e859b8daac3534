"""Certify ExecuTorch files of a classifier, and time them beside ExecuTorch's own float32.

    python benchmarks/executorch.py --realbench DIR --model deit_tiny:FOLDER [--bits w8a8 w4a8] [--images 200]
        [--seconds 10] [--json F]

The folders are those of `realbench.py`. The method is uniform-tensor, the seed of its calibration images is 0, and the
certificate compares the file with the artifact on the first queries. Both the float model and the artifacts run on
XNNPACK, one image at a time on one thread, and take turns; so does adalog's executor "native".

- argmax_changed: the number of images whose largest output differs from the artifact's.
- top1: the accuracy of each file on these images. "fp32" is that of the float file.
- cpu_ms, wall_ms: the median times of one image. bytes: the size of the file. export_seconds: CPU seconds.
"""

from benchmarks.publish import RESULTS, publish
from benchmarks.realbench import RealBench

import argparse
import sys
import time
from contextlib import redirect_stdout
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from adalog import Calibration, Config, export
from adalog.export import executorch
from adalog.study.bench import in_turn
from adalog.study.doctor import machine

SEED = 0
METHOD = "uniform-tensor"
CERTIFIED = ("passed", "accumulators_equal", "argmax_changed", "changed", "beyond_own", "error", "own_error")


def measure(bench: RealBench, asked: argparse.Namespace) -> dict[str, Any]:
    """Return the rows of all bits, and that of the float model."""
    images, labels = bench.queries(asked.images).load(bench.preprocessing), bench.truth[: asked.images]
    calibration = Calibration(bench.model, bench.calibration_images(SEED), seed=SEED)
    start = time.process_time()
    plain = executorch.lower(without_fused_attention(bench.model), (images[:1],), {})
    rows = [{"bits": "fp32", "export_seconds": time.process_time() - start, "bytes": len(plain)}]
    files = {"fp32": plain}
    runs: dict[str, Any] = {}
    for bits in asked.bits:
        model = calibration.quantize(Config.preset(bits, METHOD))
        start = time.process_time()
        content = executorch.to_executorch(model.quantized, "")
        spent = time.process_time() - start
        found = export.certify_executorch(model.quantized, "", content, ((some,) for some in images.split(20)))
        row = {"bits": bits, "export_seconds": spent, "bytes": len(content)}
        row |= {name: getattr(found, name) for name in CERTIFIED} | {"failures": found.failures}
        native = model.compile("native", threads=1)
        row["native_top1"] = top1(native(images), labels)
        rows.append(row)
        files[bits] = content
        runs[f"native {bits}"] = partial(native, images[:1])
    for row in rows:
        run = executorch.open_file(files[row["bits"]])
        row["top1"] = top1(torch.cat([run([image[None]])[0] for image in images]), labels)
        runs[row["bits"]] = partial(run, [images[:1]])
    times = in_turn(runs, asked.seconds)
    for row in rows:
        names = {"": row["bits"], "native_": f"native {row['bits']}"}
        for prefix, name in names.items():
            if name in times:
                row |= {f"{prefix}cpu_ms": 1e3 * times[name].cpu, f"{prefix}wall_ms": 1e3 * times[name].wall}
    return {"rows": rows}


def without_fused_attention(model: nn.Module) -> nn.Module:
    """Return a copy of a timm model that ExecuTorch runs faster: it adds slow operations to fused attention."""
    copy = deepcopy(model)
    for module in copy.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
    return copy


def top1(outputs: Tensor, labels: Tensor) -> float:
    """Return the share of images whose largest output is their label's."""
    return float((outputs.argmax(1) == labels).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--realbench", type=Path, required=True)
    parser.add_argument("--model", required=True, help="NAME:FOLDER of a classifier")
    parser.add_argument("--bits", nargs="+", default=["w8a8", "w4a8"])
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=10, help="seconds to spend on each timing")
    parser.add_argument("--json", type=Path, default=RESULTS / "executorch.json")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with redirect_stdout(sys.stderr):
        versions = executorch.versions()
        executorch.package("executorch.extension.pybindings.portable_lib")._unsafe_reset_threadpool(1)
        bench = RealBench.of(asked.realbench, asked.model)
        result = measure(bench, asked)
    told = {"model": bench.name, "method": METHOD, "images": asked.images, "seed": SEED, "threads": 1, **result}
    publish({**told, "machine": {**machine(), "executorch": versions["executorch"]}}, asked.json)


if __name__ == "__main__":
    main()
