"""Certify exports against their artifacts, and time them against the float model in ONNX Runtime and OpenVINO.

    python benchmarks/export.py --model demo --bits w6a6 w4a4 w3a3 [--images 2000] [--executor reference] [--json F]
    python benchmarks/export.py --model timm:deit_small_patch16_224 --bits w4a4 | --model realbench:DIR --bits w8a8 w6a6

Each row has the certificate of one form of export in one engine (see docs/reference/exports.md):

- images: the number of images compared.
- accumulators_equal: true if every accumulator is equal.
- argmax_changed, changed: the number and the list of images whose largest output changes.
- own_error: the median error that rounding alone causes in the artifact's own outputs.
- beyond_own: the number of changed images that own_error does not explain.
- time_over_fp32: the CPU time of the export over the CPU time of the float model in the same engine, at batch 1 on one
  thread. Both take turns. OpenVINO computes in float32.
- bytes: the size of the ONNX file, or of OpenVINO's two files.

"exports" has the CPU seconds of each export and the peak memory of the process so far in bytes. A timm model has random
weights, and its images are noise. The script also changes 20 initialisers of the first file, one at a time, and counts
the changed files that fail their certificates ("damaged_caught"); all of them should.
"""

from benchmarks.publish import RESULTS, publish
from benchmarks.runtime import Case, Files, folder_of, load_case, named, quantized

import argparse
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import torch

from adalog import export, load
from adalog.export.certificate import read
from adalog.export.engines import ENGINES, open_engine
from adalog.inputs import demo
from adalog.quantized import QuantizedProgram
from adalog.study.bench import in_turn
from adalog.study.doctor import machine, version_of
from adalog.version import source_hash

DAMAGED = 20
CERTIFIED = ("images", "passed", "accumulators_equal", "argmax_changed", "changed", "error", "own_error", "beyond_own")


def compared(
    case: Case, bits: Sequence[str], images: torch.Tensor, executor: str, seconds: float, work: Path
) -> dict[str, Any]:
    """Return the rows, the cost of each export, and the number of damaged files that fail their certificates."""
    rows: list[dict[str, Any]] = []
    exports: list[dict[str, Any]] = []
    damaged: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        plain = Files(case.model, case.calibration, Path(folder)).onnx().read_bytes()
        for width in bits:
            path = work / f"{width}-{source_hash()}.safetensors"
            quantized(case, width, path)
            program = load(path).quantized
            for form in export.FORMS:
                for engine in ENGINES:
                    start = time.process_time()
                    content = export.to_onnx(program, form, "", selects=engine == "openvino")
                    spent = time.process_time() - start
                    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
                    exports.append({"bits": width, "form": form, "cpu_seconds": spent, "most_bytes_held": memory})
                    found = export.certify(
                        program, "", content, ((some,) for some in images.split(20)), engine=engine, executor=executor
                    )
                    row = {"bits": width, "form": form, "engine": engine}
                    row |= {name: getattr(found, name) for name in CERTIFIED}
                    stored = export.to_openvino(content) if engine == "openvino" else (content,)
                    time_ratio = ratio(plain, content, engine, case, seconds)
                    row |= {"time_over_fp32": time_ratio, "bytes": sum(map(len, stored))}
                    rows.append(row)
                    damaged = damaged or caught(program, content, images[:1])
    return {"rows": rows, "exports": exports, **damaged}


def ratio(plain: bytes, content: bytes, engine: str, case: Case, seconds: float) -> float:
    """Return the CPU time of an exported file over the CPU time of the float model."""
    given = {"images": case.timed[:1].numpy()}
    runs = {name: partial(open_engine(engine, each), given) for name, each in (("plain", plain), ("ours", content))}
    times = in_turn(runs, seconds)
    return times["ours"].cpu / times["plain"].cpu


def caught(program: QuantizedProgram, content: bytes, images: torch.Tensor) -> dict[str, int]:
    """Change one number of the file at a time, and count the changed files that fail their certificates."""
    import onnx

    model, _ = read(content)
    places = range(0, len(model.graph.initializer), max(1, len(model.graph.initializer) // DAMAGED))
    found = {"damaged_caught": 0, "damaged_tried": 0}
    for place in list(places)[:DAMAGED]:
        copy = onnx.ModelProto()
        copy.CopyFrom(model)
        tensor = copy.graph.initializer[place]
        if tensor.data_type == onnx.TensorProto.INT4:
            tensor.raw_data = bytes([tensor.raw_data[0] ^ 1]) + tensor.raw_data[1:]
        else:
            values = onnx.numpy_helper.to_array(tensor).copy()
            values.reshape(-1)[:1] += 1
            tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
        certificate = export.certify(program, "", copy.SerializeToString(), [(images,)])
        found["damaged_tried"] += 1
        found["damaged_caught"] += not certificate.passed
    return found


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="a model as `adalog quantize` takes it, or realbench:DIR")
    parser.add_argument("--bits", nargs="+", default=["w6a6", "w4a4", "w3a3"])
    parser.add_argument("--images", type=int, default=2000, help="number of test images of the bundled model")
    parser.add_argument("--executor", default="torch", help="executor that runs the artifact")
    parser.add_argument("--seconds", type=float, default=5, help="seconds to spend on each timing; at least five runs")
    parser.add_argument("--json", type=Path, help="file to write instead of benchmarks/results/export-MODEL.json")
    parser.add_argument("--work", type=Path, help="folder that keeps the artifacts for later runs")
    asked = parser.parse_args(given)
    torch.set_num_threads(1)
    case = load_case(asked.model, pretrained=False)
    images = demo.test_images()[0][: asked.images] if asked.model == "demo" else case.timed
    model = "realbench" if asked.model.startswith("realbench:") else asked.model
    name = named(asked.model)
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        work = folder_of(asked.work, name) or Path(folder)
        result = compared(case, asked.bits, images, asked.executor, asked.seconds, work)
    result["rows"] = [{"model": model, **row} for row in result["rows"]]
    versions = {
        name: found for name in ("onnx", "onnxruntime", "onnxscript", "openvino") if (found := version_of(name))
    }
    told = {"executor": asked.executor, "threads": 1, **result, "machine": {**machine(), **versions}}
    publish(told, asked.json or RESULTS / f"export-{name}.json")


if __name__ == "__main__":
    main()
