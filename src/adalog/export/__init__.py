"""Quantized programs as files for other engines, and certificates that these compute what was judged."""

from collections.abc import Sequence

import torch
from torch import Tensor

from adalog.errors import ArtifactError
from adalog.export.certificate import Certificate, certify
from adalog.export.engines import ENGINES, Engine, to_openvino
from adalog.export.onnx import to_onnx
from adalog.export.replay import FORMS, Form
from adalog.quantized import QuantizedProgram

__all__ = ["ENGINES", "FORMS", "Certificate", "Engine", "Form", "certify", "export", "to_onnx", "to_openvino"]

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


def noise_like(quantized: QuantizedProgram, count: int) -> tuple[Tensor, ...]:
    """Inputs of the calibration's shape: floats are normal noise, the same each time, and other types are zero."""
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn((count, *value.shape[1:]), generator=generator, dtype=value.dtype)
        if value.is_floating_point()
        else value.new_zeros((count, *value.shape[1:]))
        for value in quantized.example
    )
