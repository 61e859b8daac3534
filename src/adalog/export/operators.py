"""Write operators of ONNX from a replayed program, each under a name by which a certificate finds it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# Metadata keys that carry the name of a node, and the name of its result, through PyTorch's exporter.
NODE, RESULT = "adalog.node", "adalog.result"
# A placeholder that is not an operator of ONNX: it returns the level of each value, given descending thresholds, the
# level above each of them, and the level below all of them. `adalog.export.onnx` replaces it with operators of ONNX,
# because PyTorch would take long to export so many.
STEPS = "adalog::Steps"
BYTE_STEPS = "adalog::ByteSteps"  # the same for levels that are bytes


def operator(
    name: str,
    inputs: Sequence[Tensor | None],
    *,
    at: str,
    result: str = "",
    dtype: torch.dtype | None = None,
    shape: Sequence[int] | None = None,
    **attributes: Any,
) -> Tensor:
    """Write one operator of ONNX: a node while a model is exported, otherwise zeros of the right shape.

    at: the operand or site that the operator belongs to. result: a name for the result, or "" if it needs none. dtype,
    shape: the dtype and shape of the result, by default those of the first input.
    """
    first = inputs[0]
    assert first is not None
    names = {NODE: at, **({RESULT: result} if result else {})}
    return torch.onnx.ops.symbolic(
        name,
        list(inputs),
        attributes or None,
        dtype=first.dtype if dtype is None else dtype,
        shape=list(first.shape if shape is None else shape),
        version=1 if "::" in name else None,
        metadata_props=names,
    )


def matmul_shape(left: Tensor, right: Tensor) -> Sequence[int]:
    """Return the shape of a product of matrices whose leading dimensions broadcast."""
    lead = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    return [*lead, left.shape[-2], right.shape[-1]]
