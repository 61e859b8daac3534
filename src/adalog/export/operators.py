"""The operators of ONNX that a replayed program writes itself, each under the name by which a certificate finds it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# The metadata of a node while it is on its way: the name of the node, and that of its result.
NODE, RESULT = "adalog.node", "adalog.result"
# An operator that is no operator of ONNX: the level of each value, given thresholds (descending) and the levels above
# them, with that below them all. `onnx` writes it as comparisons; it would take PyTorch seconds to export those.
STEPS = "adalog::Steps"
BYTE_STEPS = "adalog::ByteSteps"  # the same, where levels are bytes


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
    """One operator of ONNX. While a model is exported it becomes a node; otherwise it gives zeros of the right shape.

    at: the operand or site that it belongs to; result: a name for its result; none where nobody asks for it. dtype and
    shape: those of the result, by default those of the first input.
    """
    first = inputs[0]
    assert first is not None
    told = {NODE: at, **({RESULT: result} if result else {})}
    return torch.onnx.ops.symbolic(
        name,
        list(inputs),
        attributes or None,
        dtype=first.dtype if dtype is None else dtype,
        shape=list(first.shape if shape is None else shape),
        version=1 if "::" in name else None,
        metadata_props=told,
    )


def matmul_shape(left: Tensor, right: Tensor) -> Sequence[int]:
    """The shape of a product of matrices, whose leading dimensions broadcast."""
    lead = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    return [*lead, left.shape[-2], right.shape[-1]]
