"""Measure, without labels, how far a change within a network moves the model's output, on images that nothing fits.

The error of one site does not tell this. A fit with a smaller error at each site may shrink the outputs of all sites,
so that little of the signal is left after twelve blocks.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from adalog.calibration.batches import Chunk
from adalog.calibration.block_errors import picked
from adalog.calibration.blocks import Blocks
from adalog.graph.program import Program, leaves_of, refs_of

# The most images that judge. Their outputs are held for every candidate.
_IMAGES = 64
# The logarithm to base 2 of the factor of the logits lies between minus and plus this number.
_FACTORS = 6.0
# Halvings of that range.
_HALVINGS = 24


class Judge:
    """The error of the model's outputs if one block is quantized and all blocks after it are float.

    The input of the block is that of the quantized network. The result is the sum over the outputs that depend on the
    block. An output (N, C) of a linear is taken as logits, and measured by `logit_error`; any other one is measured by
    `relative_error`. Unlike plain distances, they do not count a common factor of the whole output, which changes no
    class.

    floats: the float network. numbers: the indices of the images, of which the first 64 judge. If images cannot be
    separated, all images judge.
    """

    def __init__(self, program: Program, floats: Blocks, numbers: Tensor):
        self._floats = floats
        self._outputs = tuple(dict.fromkeys(refs_of(program.output)))
        apart = floats.keeps_apart(0, self._outputs)
        self._numbers = numbers[:_IMAGES] if apart else torch.arange(floats.count, device=numbers.device)
        self._size = floats.batch if apart else floats.count
        self._linear = {node.name for node in program.nodes if node.op == "aten.linear.default"}
        self._wanted = self._values([self._picked(floats.images, part) for part in self._parts()])

    def errors(self, quantized: Blocks, number: int, candidates: Sequence[Program]) -> list[float]:
        """Return the error for each candidate, a program in which block `number` is quantized."""
        given, output = quantized.inputs(number), self._floats.blocks[number].value_out
        chunks = [self._picked(given, part) for part in self._parts()]
        images = [self._picked(self._floats.images, part) for part in self._parts()]
        errors = []
        for program in candidates:
            behind = [
                {**image, output: quantized.values(chunk, [output], program)[output]}
                for image, chunk in zip(images, chunks, strict=True)
            ]
            errors.append(self._error(self._values(behind)))
        return errors

    def _parts(self) -> Sequence[Tensor]:
        return self._numbers.split(self._size)

    def _picked(self, chunk: Chunk, numbers: Tensor) -> Chunk:
        return picked(self._floats, chunk, numbers)

    @torch.no_grad()
    def _values(self, chunks: Sequence[Chunk]) -> list[list[tuple[str, Tensor]]]:
        """Return the model's outputs that are floating-point tensors, for each chunk, with the name of the output."""
        found = [self._floats.values(chunk, self._outputs) for chunk in chunks]
        return [
            [
                (name, value)
                for name in self._outputs
                for value in leaves_of(each[name])
                if isinstance(value, Tensor) and value.is_floating_point()
            ]
            for each in found
        ]

    def _error(self, found: Sequence[Sequence[tuple[str, Tensor]]]) -> float:
        total = 0.0
        for now, wanted in zip(zip(*found, strict=True), zip(*self._wanted, strict=True), strict=True):
            name = now[0][0]
            outputs, exact = (
                torch.cat([value.reshape(len(value) if value.ndim else 1, -1) for _, value in each])
                for each in (now, wanted)
            )
            total += (logit_error if name in self._linear and now[0][1].ndim == 2 else relative_error)(outputs, exact)
        return total if math.isfinite(total) else math.inf


def logit_error(logits: Tensor, exact: Tensor) -> float:
    """Return the mean KL divergence of softmax(factor * logits) from softmax(exact) [nats], with the best factor.

    logits, exact: (N, C).
    """
    logits, exact = logits.double(), exact.double().log_softmax(1)
    shares = exact.exp()

    def slope(factor: float) -> float:
        """Return the derivative with respect to the factor; it grows with the factor."""
        return float((((factor * logits).softmax(1) - shares) * logits).sum())

    low, high = -_FACTORS, _FACTORS
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(2.0**middle) < 0 else (low, middle)
    scaled = (2.0**low * logits).log_softmax(1)
    return float((shares * (exact - scaled)).sum(1).mean())


def relative_error(values: Tensor, exact: Tensor) -> float:
    """Return |factor * values - exact|^2 / |exact|^2 with the best positive factor: at most 1."""
    values, exact = values.double(), exact.double()
    along, powers = float((values * exact).sum()), float(values.square().sum()) * float(exact.square().sum())
    return 1 - max(0.0, along) ** 2 / powers if powers > 0 else float(not torch.equal(values, exact))
