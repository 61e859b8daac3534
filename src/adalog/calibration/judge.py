"""Measure, without labels, how far quantization moves the model's outputs.

The errors of single sites do not tell this. A fit with a smaller error at each site may shrink the outputs of all
sites, so that little of the signal is left after twelve blocks.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from adalog.calibration.block_errors import pick
from adalog.calibration.values import Values
from adalog.graph.program import Program, leaves_of, refs_of

# The most images that are evaluated. Their outputs are held.
_IMAGES = 64
# The logarithm to base 2 of the factor of the logits lies between minus and plus this number.
_FACTORS = 6.0
# Halvings of that range.
_HALVINGS = 24


@torch.no_grad()
def output_errors(
    program: Program, floats: Values, candidates: Sequence[Program], numbers: Tensor | None = None
) -> list[dict[str, float]]:
    """Return the errors of each candidate's outputs on the first 64 images, or on all if they cannot be separated.

    An output (N, C) of a linear with several C is taken as logits, and "kl" is the mean of their `logit_error`.
    "relative" is the mean of the `relative_error` of all other outputs. Unlike plain distances, they do not count a
    common factor of the whole output, which changes no class. An error that is not finite is infinite.

    floats: the values of `program` and its images. numbers: indices of images to take the first 64 from; default: all.
    """
    outputs = tuple(dict.fromkeys(refs_of(program.output)))
    apart = floats.separable(outputs, program.inputs[0])
    every = torch.arange(floats.count, device=next(iter(floats.images.values())).device)
    batches = (every if numbers is None else numbers)[:_IMAGES].split(floats.batch) if apart else (every,)
    images = [pick(floats, floats.images, batch) for batch in batches]

    def run(candidate: Program) -> list[tuple[str, Tensor]]:
        parts = [floats.compute(chunk, outputs, candidate) for chunk in images]
        leaves = [
            [(name, leaf) for name in outputs for leaf in leaves_of(part[name]) if _is_float(leaf)] for part in parts
        ]
        return [(same[0][0], join(same[0][0], [leaf for _, leaf in same])) for same in zip(*leaves, strict=True)]

    def join(name: str, values: Sequence[Tensor]) -> Tensor:
        axis = floats.axes.get(name)
        if axis is None:  # all images share it, or they cannot be separated: there is one batch
            return torch.atleast_1d(values[0])
        return torch.cat([value.movedim(axis[0], 0) for value in values])

    exact = run(program)
    linears = {node.name for node in program.nodes if node.op == "aten.linear.default"}

    def errors(candidate: Program) -> dict[str, float]:
        losses: dict[str, list[float]] = {}
        for (name, value), (_, target) in zip(run(candidate), exact, strict=True):
            logits = name in linears and value.ndim == 2 and value.shape[1] > 1
            kind, measure = ("kl", logit_error) if logits else ("relative", relative_error)
            error = measure(value.reshape(len(value), -1), target.reshape(len(value), -1))
            losses.setdefault(kind, []).append(error if math.isfinite(error) else math.inf)
        return {kind: sum(values) / len(values) for kind, values in losses.items()}

    return [errors(candidate) for candidate in candidates]


def _is_float(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def logit_error(logits: Tensor, exact: Tensor) -> float:
    """Return the mean KL divergence of softmax(factor * logits) from softmax(exact) [nats], with the best factor.

    logits, exact: (N, C).
    """
    logits, exact = logits.double(), exact.double().log_softmax(1)
    shares = exact.exp()

    def slope(factor: Tensor) -> Tensor:
        """Return the derivative with respect to the factor; it grows with the factor."""
        return (((factor * logits).softmax(1) - shares) * logits).sum()

    # The exponents are tensors without dimensions, so that only the last one waits for the device.
    low, width = logits.new_full((), -_FACTORS), 2 * _FACTORS
    for _ in range(_HALVINGS):
        width /= 2
        low = torch.where(slope((low + width).exp2()) < 0, low + width, low)
    scaled = (2.0 ** float(low) * logits).log_softmax(1)
    return float((shares * (exact - scaled)).sum(1).mean())


def relative_error(values: Tensor, exact: Tensor) -> float:
    """Return |factor * values - exact|^2 / |exact|^2 with the best positive factor: at most 1."""
    values, exact = values.double(), exact.double()
    sums = (values * exact).sum(), values.square().sum(), exact.square().sum()
    along, power, target_power = torch.stack(sums).tolist()
    powers = power * target_power
    return 1 - max(0.0, along) ** 2 / powers if powers > 0 else float(not torch.equal(values, exact))
