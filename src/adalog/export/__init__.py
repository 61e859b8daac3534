"""Export quantized programs to other engines, certify the exported files, and make packs for `adalog.run`."""

from collections.abc import Sequence

from adalog.export.certificate import NOISE_IMAGES, Certificate, certify
from adalog.export.engines import ENGINES, Engine, to_openvino
from adalog.export.executorch import is_executorch, to_executorch
from adalog.export.executorch_certificate import certify_executorch, export_executorch
from adalog.export.onnx import to_onnx
from adalog.export.pack import to_pack
from adalog.export.qdq import to_encodings
from adalog.export.replay import EVERY_FORM, FORMS, OnnxForm
from adalog.quantized import QuantizedProgram

__all__ = [
    "ENGINES",
    "EVERY_FORM",
    "FORMS",
    "Certificate",
    "Engine",
    "OnnxForm",
    "certify",
    "certify_executorch",
    "export",
    "export_executorch",
    "is_executorch",
    "to_encodings",
    "to_executorch",
    "to_onnx",
    "to_openvino",
    "to_pack",
]


def export(
    quantized: QuantizedProgram, source: str, form: OnnxForm = "mixed", engines: Sequence[str] = ("onnxruntime",)
) -> tuple[bytes, list[Certificate]]:
    """Return the ONNX file of a quantized program, and its certificate in each engine.

    The certificates are made on noise of the calibration's shape. Do not use a file if its certificate fails.
    source: the SHA-256 of the artifact.
    Raises ArtifactError if the program cannot be exported to ONNX, and AdalogError if a package is missing.
    """
    if form not in EVERY_FORM:
        raise ValueError(f"form = {form!r} is not one of {', '.join(EVERY_FORM)}")
    noise = quantized.noise(NOISE_IMAGES)
    content = to_onnx(quantized, form, source, selects="openvino" in engines)
    return content, [certify(quantized, source, content, [noise], engine=engine) for engine in engines]
