"""Time packs in Node.js: the module for browsers and onnxruntime-web with float32.

    python benchmarks/web.py --module build/web --ort node_modules/onnxruntime-web
        [--model timm:deit_tiny_patch16_224] [--bits w4a4 w8a8] [--calls 30] [--scalar-calls 2] [--json F]

--module: the folder with adalog.mjs and adalog.wasm, which CMake builds. --ort: the folder of the npm package
onnxruntime-web. A timm model has random weights, and is quantized as in `runtime.py`.

Every way runs one image at a time, on one thread, in one process per model. The ways take turns. The level "scalar"
runs in a process of its own, because it takes many times longer, and so do the packs outside Node.js: "native LEVEL"
has the times of the compiled library with AVX2 and with the fastest kernels. "milliseconds" has the least and the
median time of a call. V8 compiles better code during the first calls, so the least time is the time after that. "bytes"
has the size of each file.
"""

from benchmarks.publish import RESULTS, publish
from benchmarks.runtime import SEED, Files, load_case, pack_of, quantized

import argparse
import json
import subprocess
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import adalog.run
from adalog import library
from adalog.study.doctor import machine

SCRIPT = Path(__file__).with_suffix(".mjs")


def summarize(times: list[float]) -> dict[str, float]:
    """Return the least and the median time."""
    return {"least": round(min(times), 2), "median": round(median(times), 2)}


def measure(ways: list[dict[str, Any]], calls: int, module: Path, ort: Path) -> dict[str, dict[str, float]]:
    """Return the least and the median milliseconds of each way."""
    command = ["node", str(SCRIPT), str(module / "adalog.mjs"), str(ort), str(calls)]
    done = subprocess.run(command, input=json.dumps(ways), capture_output=True, text=True, check=True)
    return {name: summarize(times) for name, times in json.loads(done.stdout).items()}


def measure_native(file: str, level: str, shape: list[int], calls: int) -> dict[str, float]:
    """Return the least and the median milliseconds of a pack in the compiled library."""
    run, image = adalog.run.load(file, level=level), np.random.default_rng(SEED).random((1, *shape), np.float32)
    times = []
    for _ in range(calls + 1):
        begin = time.perf_counter()
        run(image)
        times.append(1e3 * (time.perf_counter() - begin))
    return summarize(times[1:])


def compare(spec: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one model."""
    case = load_case(spec, pretrained=False)
    shape = list(case.timed.shape[1:])
    with TemporaryDirectory() as name:
        folder = Path(name)
        float32 = Files(case.model, case.timed, folder).onnx()
        ways: list[dict[str, Any]] = []
        for bits in options.bits:
            artifact = folder / f"{bits}.safetensors"
            quantized(case, bits, artifact)
            ways.append({"name": f"wasm {bits}", "file": str(pack_of(artifact)), "level": "wasm", "shape": shape})
        scalar = [{**way, "name": way["name"].replace("wasm", "scalar"), "level": "scalar"} for way in ways]
        ways.append({"name": "onnxruntime-web float32", "file": str(float32), "level": None, "shape": shape})
        milliseconds = measure(ways, options.calls, options.module, options.ort)
        milliseconds |= measure(scalar, options.scalar_calls, options.module, options.ort)
        here = library.levels()
        for level in dict.fromkeys(level for level in ("avx2", here[-1]) if level in here):
            for bits in options.bits:
                times = measure_native(str(folder / f"{bits}.adalog"), level, shape, options.calls)
                milliseconds[f"native {level} {bits}"] = times
        sizes = {way["name"].removeprefix("wasm "): Path(way["file"]).stat().st_size for way in ways}
    return {"milliseconds": milliseconds, "bytes": sizes}


def main() -> None:
    """Measure and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--module", type=Path, required=True)
    parser.add_argument("--ort", type=Path, required=True)
    parser.add_argument("--model", nargs="+", default=["timm:deit_tiny_patch16_224"])
    parser.add_argument("--bits", nargs="+", default=["w4a4", "w8a8"])
    parser.add_argument("--calls", type=int, default=30)
    parser.add_argument("--scalar-calls", type=int, default=2)
    parser.add_argument("--json", type=Path, default=RESULTS / "web.json")
    options = parser.parse_args()
    options.module, options.ort = options.module.resolve(), options.ort.resolve()
    versions = {
        "node": subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout.strip(),
        "onnxruntime-web": json.loads((options.ort / "package.json").read_text())["version"],
    }
    module = {name: (options.module / name).stat().st_size for name in ("adalog.mjs", "adalog.wasm")}
    result = {"machine": machine(), "versions": versions, "seed": SEED, "module_bytes": module}
    models = {spec: compare(spec, options) for spec in options.model}
    publish({**result, "models": models}, options.json)


if __name__ == "__main__":
    main()
