"""Measure how long a fresh process needs until an artifact returns its first output, and how much memory it takes.

    python benchmarks/load.py [--model timm:deit_small_patch16_224 demo] [--bits w4a4] [--repeats 7]
        [--program build/classify/classify] [--json F] [--work DIR]

The script compares these ways to run the artifact:

- c: `examples/c/classify.c`, if --program names it, built as docs/how-to/run-in-c.md says for one small file. Its
  ready_seconds include the first output, because it prints only one.
- run: `adalog.run.load` without PyTorch, with the artifact as a pack.
- native: `adalog.load(...).compile("native", batch=1)`.
- onnxruntime: the artifact as `adalog export` writes it, if ONNX Runtime is installed.
- numpy: only the import of NumPy, as a lower bound for `run`.

Each way runs in new processes of one thread, and the ways take turns. All values are medians over these processes:

- ready_seconds: the CPU time of the process until the model can be called, including imports.
- first_seconds, second_seconds: the CPU time of the first and of the second call, at batch 1.
- peak_bytes: the largest resident set.

"ratios" has the ready time of each other way over the ready time of `run`. A timm model has random weights, and is
quantized as in `runtime.py`.
"""

from benchmarks.publish import RESULTS, publish
from benchmarks.runtime import SEED, artifact_of, pack_of

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from adalog import export, load
from adalog.study.doctor import machine, version_of

# The code of each way. It defines `model` for `_END`, which prints the measurements.
_WAYS = {
    "numpy": "import numpy as np\nmodel = lambda images: None",
    "run": "import numpy as np\nimport adalog.run\nmodel = adalog.run.load(FILE.replace('.safetensors', '.adalog'))",
    "native": """
import numpy as np
import torch
import adalog
torch.set_num_threads(1)
compiled = adalog.load(FILE).compile("native", threads=1, batch=1)
model = lambda images: compiled(torch.from_numpy(images))
""",
    "onnxruntime": """
import numpy as np
import onnxruntime
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = options.inter_op_num_threads = 1
session = onnxruntime.InferenceSession(FILE.replace(".safetensors", ".onnx"), options)
name = session.get_inputs()[0].name
model = lambda images: session.run(None, {name: images})
""",
}
_END = """
import json, time
clock = [time.process_time()]
images = np.random.default_rng(0).standard_normal(SHAPE, dtype=np.float32)
clock.append(time.process_time())
for _ in range(2):
    model(images)
    clock.append(time.process_time())
lines = open("/proc/self/status").read().splitlines()
peak = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
print(json.dumps([clock[0], clock[2] - clock[1], clock[3] - clock[2], peak]))
"""
# Runs a program. It starts from a small process, because the kernel counts the memory of its parent as its peak too.
_SPAWN = """
import os, sys
actions = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
child = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ, file_actions=actions)
_, status, used = os.wait4(child, 0)
assert status == 0
print([used.ru_utime + used.ru_stime, used.ru_maxrss * 1024])
"""


def measured(ways: Sequence[str], file: Path, shape: Sequence[int], repeats: int) -> dict[str, dict[str, float]]:
    """Run each way in turn in new processes, and return its median seconds and bytes."""
    given = f"FILE, SHAPE = {str(file)!r}, {tuple(shape)}\n"
    found: dict[str, list[list[float]]] = {way: [] for way in ways}
    for turn in range(repeats):
        for way in ways if turn % 2 else reversed(ways):
            command = [sys.executable, "-c", given + _WAYS[way] + _END]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
            result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            found[way].append(json.loads(result.stdout))
    rows = {}
    for way, runs in found.items():
        ready, first, second, peak = map(median, zip(*runs, strict=True))
        seconds = {"ready_seconds": ready, "first_seconds": first, "second_seconds": second}
        rows[way] = {**seconds, "peak_bytes": peak}
    return rows


def measured_program(program: Path, pack: Path, shape: Sequence[int], repeats: int) -> dict[str, float]:
    """Run the C program on an image of noise in new processes, and return its median seconds and bytes."""
    image = pack.with_suffix(".raw")
    np.random.default_rng(0).standard_normal(shape, dtype=np.float32).tofile(image)
    command = [sys.executable, "-I", "-S", "-c", _SPAWN, program.resolve(), pack, image]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(repeats)]
    seconds, peak = map(median, zip(*map(json.loads, runs), strict=True))
    return {"ready_seconds": seconds, "peak_bytes": peak}


def rows_of(model: str, bits: str, repeats: int, work: Path, program: Path | None) -> dict[str, Any]:
    """Return the measurements of one model, and the ratios to `run`."""
    file = artifact_of(model, bits, work)
    pack, loaded, ways = pack_of(file), load(file), list(_WAYS)
    if find_spec("onnxruntime") is None:
        ways.remove("onnxruntime")
    else:
        file.with_suffix(".onnx").write_bytes(export.to_onnx(loaded.quantized, "mixed", ""))
    rows = measured(ways, file, (1, *loaded.example[0].shape[1:]), repeats)
    ratios = {way: rows[way]["ready_seconds"] / rows["run"]["ready_seconds"] for way in ways if way != "run"}
    if program:
        rows["c"] = measured_program(program, pack, loaded.example[0].shape[1:], repeats)
    bytes_of = {"artifact_bytes": file.stat().st_size, "pack_bytes": pack.stat().st_size}
    return {"model": model, "bits": bits, **bytes_of, "ways": rows, "ratios": ratios}


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["timm:deit_small_patch16_224", "demo"])
    parser.add_argument("--bits", default="w4a4")
    parser.add_argument("--repeats", type=int, default=7, help="number of processes for each way")
    parser.add_argument("--program", type=Path, help="the program that examples/c builds")
    parser.add_argument("--json", type=Path, help="file to write instead of benchmarks/results/load.json")
    parser.add_argument("--work", type=Path, help="folder that keeps the files for later runs")
    asked = parser.parse_args(given)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            rows_of(model, asked.bits, asked.repeats, asked.work or Path(folder), asked.program)
            for model in asked.model
        ]
    here = {**machine(), **({"onnxruntime": found} if (found := version_of("onnxruntime")) else {})}
    load_now = [round(value, 2) for value in os.getloadavg()]
    program = {"program_bytes": asked.program.stat().st_size} if asked.program else {}
    publish(
        {"rows": rows, **program, "threads": 1, "load": load_now, "seed": SEED, "machine": here},
        asked.json or RESULTS / "load.json",
    )


if __name__ == "__main__":
    main()
