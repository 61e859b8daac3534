"""Run exported files in other engines, with the engines' default options and in float32."""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from adalog.errors import ArtifactError, converting
from adalog.export.onnx import package

Engine = Literal["onnxruntime", "openvino"]
ENGINES = get_args(Engine)
ELSEWHERE = "): try another version of it, or another engine"
Run = Callable[[Mapping[str, Any]], dict[str, Any]]  # inputs by name -> outputs by name, as arrays


def open_engine(engine: str, content: bytes) -> Run:
    """Return a function that runs a file in an engine, with one thread. Raises ArtifactError if that fails."""
    if engine not in ENGINES:
        raise ValueError(f"engine = {engine!r} is not one of {', '.join(ENGINES)}")
    module = package(engine)
    with converting(ArtifactError, f"{engine} cannot open the file (", ELSEWHERE):
        return _onnxruntime(module, content) if engine == "onnxruntime" else _openvino(module, content)


def _onnxruntime(onnxruntime: Any, content: bytes) -> Run:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4  # failures are raised; print nothing else to the terminal
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return lambda inputs: dict(zip(names, session.run(names, dict(inputs)), strict=True))


def _openvino(openvino: Any, content: bytes) -> Run:
    core = openvino.Core()
    # Without the hint, processors with bfloat16 compute in it and round every accumulator to 8 bits.
    options = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32"}
    model = core.compile_model(core.read_model(content), "CPU", options)
    request = model.create_infer_request()

    def run(inputs: Mapping[str, Any]) -> dict[str, Any]:
        results = request.infer(dict(inputs))
        outputs: dict[str, Any] = {}
        for output in model.outputs:
            value = results[output].copy()  # the next run writes to the same memory
            outputs |= dict.fromkeys(output.get_names(), value)
        return outputs

    return run


def to_openvino(content: bytes) -> tuple[bytes, bytes]:
    """Convert a file to the .xml and .bin of OpenVINO. Raises ArtifactError if OpenVINO refuses the file."""
    openvino = package("openvino")
    way_out = "): try another version of OpenVINO, or use the ONNX file"
    with converting(ArtifactError, "OpenVINO cannot convert the file (", way_out):
        model = openvino.Core().read_model(content)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.xml"
            openvino.serialize(model, str(path))
            return path.read_bytes(), path.with_suffix(".bin").read_bytes()
