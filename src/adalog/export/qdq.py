"""Write uniform quantizers as the pairs of QuantizeLinear and DequantizeLinear that other compilers read.

Every operand of a product is quantized to signed bytes with zero points of zero, with one scale per tensor of
activations and one per output channel of a weight. Compilers such as NVIDIA's TensorRT and Qualcomm's QNN read such
pairs as quantized layers. A signed byte is the code of a symmetric quantizer minus half of the number of codes.
"""

import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from adalog.errors import ArtifactError
from adalog.export.operands import Digit
from adalog.export.operators import matmul_shape, operator
from adalog.export.products import ProductTrace, StoredWeight, convolve, scales_of
from adalog.quantizers import Quantizer, UniformQuantizer, symmetric_zero_point
from adalog.runtime.reference import IntegerSite

_BITS = 8  # of activations: fewer codes than a byte has would need another operator to clamp values
_WAY_OUT = "quantize the model with --bits w8a8 --method symmetric"


@dataclass(frozen=True)
class QdqOperand:
    """The bytes of an activation, and the values that they stand for."""

    digit: Digit
    value: Tensor


class QdqEncoder(nn.Module):
    """QuantizeLinear and DequantizeLinear of an activation. Raises ArtifactError unless it is symmetric, in bytes."""

    def __init__(self, quantizer: Quantizer, site: IntegerSite, name: str):
        super().__init__()
        self.name = name
        quantizer = require_uniform(quantizer, site, name, "the form qdq", _WAY_OUT)
        zero_point, refusal = int(quantizer.zero_point) - symmetric_zero_point(quantizer.bits), ""
        if quantizer.bits != _BITS:
            refusal = f"{quantizer.bits} bits, and the form qdq takes {_BITS}"
        elif zero_point:
            refusal = f"the zero point {zero_point} in signed bytes, and the form qdq takes 0"
        if refusal:
            raise ArtifactError(f"site {site.name}: its operand {name} has {refusal}: {_WAY_OUT}")
        self.scale = nn.Buffer(quantizer.scale.reshape(()).clone())
        self.zero_point = nn.Buffer(torch.zeros((), dtype=torch.int8))

    def forward(self, x: Tensor) -> QdqOperand:
        name, parameters = f"{self.name}.codes", (self.scale, self.zero_point)
        codes = operator("QuantizeLinear", [x, *parameters], at=self.name, result=name, dtype=torch.int8)
        value = operator("DequantizeLinear", [codes, *parameters], at=self.name, dtype=torch.float32)
        return QdqOperand(Digit(name, codes, at=self.name, operand=self.name), value)


def require_uniform(quantizer: Quantizer, site: IntegerSite, name: str, target: str, way_out: str) -> UniformQuantizer:
    """Return the quantizer of an operand. Raises ArtifactError unless it is uniform with one scale."""
    if isinstance(quantizer, UniformQuantizer) and quantizer.scale.numel() == 1:
        return quantizer
    refusal = f"has {quantizer.scale.numel()} scales, and {target} takes one per tensor"
    if not isinstance(quantizer, UniformQuantizer):
        refusal = f"has a quantizer of the kind {quantizer.kind}, and {target} takes uniform ones"
    raise ArtifactError(f"site {site.name}: its operand {name} {refusal}: {way_out}")


class QdqProduct(nn.Module):
    """The product of a site in floats that were dequantized. Raises ArtifactError unless its weight is symmetric."""

    def __init__(self, site: IntegerSite):
        super().__init__()
        self.site = site
        self.traced: ProductTrace | None = None
        self.stored_weights: dict[str, StoredWeight] = {}  # the codes are a buffer
        (self.scale,) = scales_of(site)
        if site.weight is None:
            return
        codes, units = signed_weight(site, "the form qdq", _WAY_OUT)
        self.codes = nn.Buffer(codes if site.geometry is not None else codes.t().contiguous())
        self.units = nn.Buffer(units)
        self.zero_point = nn.Buffer(torch.zeros(len(units), dtype=torch.int8))

    def forward(self, left: QdqOperand, right: QdqOperand | None = None, bias: Tensor | None = None) -> Tensor:
        site, name = self.site, f"{self.site.name}.accumulators.0"
        weight = self._weight() if right is None else right.value
        if site.geometry is None:
            shape = matmul_shape(left.value, weight)
            result = operator("MatMul", [left.value, weight], at=site.name, result=name, shape=shape)
        else:
            result = convolve(site, left.value, weight, name)
        rights = None if right is None else ((right.digit,),)
        self.traced = ProductTrace(((left.digit,),), rights, (name,), (self.scale,))
        return site.add_bias(result, bias)

    def _weight(self) -> Tensor:
        name, axis = f"{self.site.name}.weight", 1 if self.site.geometry is None else 0
        inputs = [self.codes, self.units, self.zero_point]
        return operator("DequantizeLinear", inputs, at=name, result=name, dtype=torch.float32, axis=axis)


def signed_weight(site: IntegerSite, target: str, way_out: str) -> tuple[Tensor, Tensor]:
    """Return the signed bytes of a site's weight, (O, ...), and the scale of each output channel, (O,).

    Raises ArtifactError, which names the target and the way out, unless the weight's quantizer is symmetric.
    """
    assert site.weight is not None
    quantizer = site.right
    if not isinstance(quantizer, UniformQuantizer):
        raise ArtifactError(f"site {site.name}: its weight is not uniform, as {target} needs: {way_out}")
    half = symmetric_zero_point(quantizer.bits)
    if not bool((quantizer.zero_point == half).all()):
        raise ArtifactError(f"site {site.name}: its weight has zero points, and {target} takes none: {way_out}")
    codes = (site.weight.to(torch.int16) - half).to(torch.int8)
    return codes, quantizer.scale.flatten().expand(len(codes)).float().contiguous()


def to_encodings(content: bytes) -> bytes:
    """Return the encodings of a file in the form "qdq", as JSON in the layout 1.0.0 of Qualcomm's AIMET.

    Activations have the names of the values that QuantizeLinear reads, and weights the names of the values that
    DequantizeLinear returns. A value is scale * (code + offset), with codes from 0 to 2**bw - 1.
    Raises ArtifactError if a value is quantized with two scales.
    """
    from onnx import load_model_from_string, numpy_helper

    graph = load_model_from_string(content).graph
    stored = {initializer.name: initializer for initializer in graph.initializer}

    def encoding(name: str, scale: str, kind: str, bits: int) -> dict[str, Any]:
        scales = numpy_helper.to_array(stored[scale]).reshape(-1).tolist()
        half = symmetric_zero_point(bits)
        fixed = {"enc_type": kind, "dtype": "INT", "bw": bits, "is_sym": True}
        return {"name": name, **fixed, "scale": scales, "offset": [-half] * len(scales)}

    activations: dict[str, dict[str, Any]] = {}
    weights = []
    for node in graph.node:
        if node.op_type == "QuantizeLinear":
            entry = encoding(node.input[0], node.input[1], "PER_TENSOR", _BITS)
            if activations.setdefault(entry["name"], entry) != entry:
                raise ArtifactError(f"{entry['name']} is quantized with two scales, and encodings have one per value")
        elif node.op_type == "DequantizeLinear" and node.input[0] in stored:
            weights.append(encoding(node.output[0], node.input[1], "PER_CHANNEL", _BITS))
    entries = {"version": "1.0.0", "activation_encodings": list(activations.values()), "param_encodings": weights}
    return (json.dumps(entries, indent=1) + "\n").encode()
