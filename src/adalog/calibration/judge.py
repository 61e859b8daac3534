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
    """The error of the model's outputs on some images.

    `errors` quantizes one block, whose input is that of the quantized network; all blocks after it are float. `error`
    runs a whole program. Both add up the errors of all outputs. An output (N, C) of a linear is taken as logits, and
    measured by `logit_error`; any other one is measured by `relative_error`. Unlike plain distances, they do not count
    a common factor of the whole output, which changes no class.

    floats: the float network. numbers: the indices of the images, of which the first 64 judge. If images cannot be
    separated, all images judge.
    """

    @torch.no_grad()
    def __init__(self, program: Program, floats: Blocks, numbers: Tensor):
        self._floats = floats
        self._outputs = tuple(dict.fromkeys(refs_of(program.output)))
        apart = floats.keeps_apart(0, self._outputs)
        numbers = numbers[:_IMAGES] if apart else torch.arange(floats.count, device=numbers.device)
        self._batches = numbers.split(floats.batch if apart else floats.count)
        self._images = self._select(floats.images)
        linears = {node.name for node in program.nodes if node.op == "aten.linear.default"}
        values = self._run_rest(self._images)
        self._errors = [
            logit_error if name in linears and value.ndim == 2 else relative_error for name, value in values
        ]
        self._exact = [value for _, value in values]

    @torch.no_grad()
    def errors(self, quantized: Blocks, number: int, candidates: Sequence[Program]) -> list[float]:
        """Return the error for each candidate, a program in which block `number` is quantized."""
        inputs, output = self._select(quantized.inputs(number)), self._floats.blocks[number].value_out
        errors = []
        for program in candidates:
            outputs = (quantized.values(chunk, [output], program) for chunk in inputs)
            chunks = [images | chunk for images, chunk in zip(self._images, outputs, strict=True)]
            errors.append(self._total(self._run_rest(chunks)))
        return errors

    @torch.no_grad()
    def error(self, program: Program) -> float:
        """Return the error of a whole program, with all that is quantized in it."""
        return self._total(self._run_rest(self._images, program))

    def _total(self, values: Sequence[tuple[str, Tensor]]) -> float:
        measures = zip(self._errors, values, self._exact, strict=True)
        total = sum(measure(_rows(value), _rows(exact)) for measure, (_, value), exact in measures)
        return total if math.isfinite(total) else math.inf

    def _select(self, chunk: Chunk) -> list[Chunk]:
        """Return the values of a chunk of all images for the judging images, in batches."""
        return [picked(self._floats, chunk, numbers) for numbers in self._batches]

    def _run_rest(self, chunks: Sequence[Chunk], program: Program | None = None) -> list[tuple[str, Tensor]]:
        """Return the floating-point outputs by name, with the chunks as batches of values of the float network.

        program: run this program instead of the float network.
        """
        outputs = [self._floats.values(chunk, self._outputs, program) for chunk in chunks]
        leaves = [
            [(name, value) for name in self._outputs for value in leaves_of(batch[name]) if _is_float(value)]
            for batch in outputs
        ]
        return [
            (batches[0][0], torch.cat([torch.atleast_1d(value) for _, value in batches]))
            for batches in zip(*leaves, strict=True)
        ]


def _is_float(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _rows(value: Tensor) -> Tensor:
    """Return an output as a matrix with one row per image."""
    return value.reshape(len(value), -1)


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
