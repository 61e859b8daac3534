"""Export the values that one site computes, to test hardware against them (docs/reference/integers.md)."""

import json
from io import BytesIO
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adalog.quantizers import UniformQuantizer
from adalog.runtime import Compiled, Trace

FORMAT = 1


def vectors(model: Compiled, name: str, *inputs: Tensor) -> dict[str, bytes]:
    """Return the content of the files of one site for these inputs, by file name.

    The .npy files hold the values and codes of the operands, the zero point or table that gives their integers,
    accumulators, scales, bias and output; site.json describes them. Raises ValueError for a site that the model does
    not run in integers.
    """
    return write_trace(model.trace(name, *inputs))


def write_trace(trace: Trace) -> dict[str, bytes]:
    """Return the content of the files of a traced site, by file name."""
    site = trace.site
    values: dict[str, Tensor] = {"left_codes": trace.left, "right_codes": trace.right, "output": trace.output}
    values |= {f"{side}_values": value for side, value in zip(("left", "right"), trace.values, strict=False)}
    sides: dict[str, Any] = {}
    for side, quantizer in (("left", site.left), ("right", site.right)):
        if isinstance(quantizer, UniformQuantizer):
            values[f"{side}_zero_point"] = quantizer.zero_point.to(torch.int64)
        else:
            codes = torch.arange(quantizer.code_count)
            for index, table in enumerate(quantizer.integers(codes)):
                values[f"{side}_table_{index}"] = table
        for index, unit in enumerate(quantizer.units()):
            values[f"{side}_unit_{index}"] = unit
        stored = ("scale", "zero_point", "negative_scale")  # these have their own files
        fields = {key: value for key, value in quantizer.fields().items() if key not in stored}
        sides[side] = {**fields, "parts": len(quantizer.units())}
    for index, (sums, scale) in enumerate(zip(trace.accumulators, site.scales, strict=True)):
        values |= {f"accumulators_{index}": sums, f"scale_{index}": scale}
    if trace.bias is not None:
        values["bias"] = trace.bias
    arrays = {key: value.detach().cpu().contiguous().numpy() for key, value in values.items()}
    geometry = None
    if site.geometry is not None:
        geometry = dict(zip(("stride", "padding", "dilation", "groups"), site.geometry, strict=True))
    description = {
        "format": FORMAT,
        "site": site.name,
        "node": site.node.name,
        "operation": site.node.op.removeprefix("aten.").split(".")[0],
        "convolution": geometry,
        **sides,
        "terms": site.terms,
        "bounds": list(site.bounds),
        "accumulator_bits": site.bits,
        "files": {key: {"type": str(value.dtype), "shape": list(value.shape)} for key, value in arrays.items()},
    }
    files = {f"{key}.npy": _npy(value) for key, value in arrays.items()}
    return {**files, "site.json": f"{json.dumps(description, indent=1)}\n".encode()}


def _npy(value: np.ndarray[Any, Any]) -> bytes:
    """Return the content of a .npy file."""
    content = BytesIO()
    np.save(content, value, allow_pickle=False)
    return content.getvalue()
