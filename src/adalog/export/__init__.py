"""Quantized programs as files for other engines, certificates that these compute what was judged, and tapes."""

from collections.abc import Sequence

from adalog.errors import ArtifactError
from adalog.export.certificate import Certificate, certify
from adalog.export.engines import ENGINES, Engine, to_openvino
from adalog.export.noise import noise_like
from adalog.export.onnx import to_onnx
from adalog.export.replay import FORMS, Form
from adalog.export.tape import to_tape
from adalog.quantized import QuantizedProgram

__all__ = [
    "ENGINES",
    "FORMS",
    "Certificate",
    "Engine",
    "Form",
    "certify",
    "export",
    "to_onnx",
    "to_openvino",
    "to_tape",
]

_IMAGES = 2  # of noise, on which an export is certified before it is written


def export(
    quantized: QuantizedProgram, source: str, form: Form = "mixed", engines: Sequence[str] = ("onnxruntime",)
) -> tuple[bytes, list[Certificate]]:
    """The ONNX file of a quantized program, and its certificate on noise of the calibration's shape in each engine.

    source: the SHA-256 of the artifact. A file whose certificate fails is not to be used.
    Raises ArtifactError for a program that has no form in ONNX, and AdalogError where a package is missing.
    """
    if form not in FORMS:
        raise ValueError(f"form = {form!r} is none of {', '.join(FORMS)}")
    if not quantized.example:
        raise ArtifactError("a model that was made without images has no inputs to tell: give it `example`")
    content = to_onnx(quantized, form, source, selects="openvino" in engines)
    noise = noise_like(quantized, _IMAGES)
    return content, [certify(quantized, source, content, [noise], engine=engine) for engine in engines]
