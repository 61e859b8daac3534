"""Measure the error of a block's output during reconstruction, by its size or by the model's output."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from adalog.calibration.gradients import BATCH, mean_distance
from adalog.calibration.values import Chunk, Values
from adalog.errors import CalibrationError
from adalog.graph.program import leaves_of

# Maps the model's outputs that depend on the block's output, by their index among all outputs, to the gradient of a
# loss with respect to each of them.
Slope = Callable[[Mapping[int, Tensor]], Sequence[Tensor]]


@dataclass(frozen=True)
class BlockOutput:
    """A block's output in the float network on all images, and the model's outputs that depend on it.

    values: the model's inputs and this output, by name. outputs: the names of the model's outputs. apart: True if the
    images can be separated in these values; otherwise gradients are taken on all images together. fitted, held_out: the
    indices of the images that train the block, and of those that evaluate it. seed: of random gradients.
    """

    floats: Values
    name: str
    values: Chunk
    outputs: tuple[str, ...]
    apart: bool
    fitted: Tensor
    held_out: Tensor
    seed: int

    def batches(self, numbers: Tensor) -> Iterator[Tensor]:
        """Yield image indices in the batches that gradients are taken on."""
        yield from numbers.split(BATCH) if self.apart else [numbers]

    def pick(self, numbers: Tensor) -> Chunk:
        return pick(self.floats, self.values, numbers)

    def gradient(self, chunk: Chunk, value: Tensor, slope: Slope) -> Tensor:
        """Compute the gradient of a loss with respect to the block's output, at this value of the output.

        chunk: a chunk from `pick`. Raises CalibrationError if the model has no differentiable output.
        """
        with torch.enable_grad():
            leaf = value.detach().requires_grad_()
            leaves = self.leaves({**chunk, self.name: leaf})
            outputs = {index: value for index, value in enumerate(leaves) if value.requires_grad}
            if not outputs:
                raise CalibrationError(
                    "the model has no differentiable output, but this loss needs one: use loss = 'squared'"
                )
            return torch.autograd.grad(list(outputs.values()), leaf, slope(outputs))[0]

    def leaves(self, chunk: Chunk) -> list[Tensor]:
        """Return the model's outputs that are tensors."""
        values = self.floats.compute(chunk, self.outputs)
        return [value for name in self.outputs for value in leaves_of(values[name]) if isinstance(value, Tensor)]

    def by_image(self, values: Tensor) -> Tensor:
        """Return values of the block's output as one row per image, or one row if images cannot be separated."""
        axis = self.floats.axes.get(self.name) if self.apart else None
        if axis is None:
            return values.flatten()[None]
        dim, entries = axis
        return values.unflatten(dim, (-1, entries)).movedim(dim, 0).flatten(1)


class BlockError(ABC):
    """The error of a block's output while the block is trained.

    renewals: how often `renew` is called, first before training and then after equal numbers of steps.
    """

    renewals: ClassVar[int] = 0

    @abstractmethod
    def __call__(self, difference: Tensor, numbers: Tensor) -> Tensor:
        """Return the mean error. difference: of the block's output on the images with these indices."""

    def renew(self, quantized: Callable[[Tensor], Tensor]) -> None:
        """Adapt the error to the block's state. quantized: maps image indices to the block's output in that state."""
        return


class SquaredError(BlockError):
    """The squared error of the block's output."""

    def __call__(self, difference: Tensor, numbers: Tensor) -> Tensor:
        return difference.square().mean()


class OutputError(BlockError):
    """The errors of the block's output and of the model's output behind it (GLF-Q, arXiv 2609.34564).

    The block's error is squared, and the model's is `mean_distance`. The network behind the block is the float one.
    Each of the two errors is divided by its value on the held-out images before training. If the block is the whole
    model, a classifier's logits have both errors, and other outputs have the squared error twice.
    """

    renewals = 1

    def __init__(self, output: BlockOutput):
        self._output = output
        self._units = (1.0, 1.0)

    @torch.no_grad()
    def renew(self, quantized: Callable[[Tensor], Tensor]) -> None:
        sums, numbers = torch.zeros(2), self._output.held_out
        for batch in self._output.batches(numbers):
            difference = quantized(batch) - self._output.pick(batch)[self._output.name]
            sums += torch.stack(self._parts(difference, batch)).cpu() * (len(batch) / len(numbers))
        block, behind = sums.tolist()
        self._units = block or 1.0, behind or 1.0

    def _parts(self, difference: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        output = self._output
        chunk = output.pick(numbers)
        with torch.no_grad():
            exact = output.leaves(chunk)
        leaves = output.leaves({**chunk, output.name: chunk[output.name] + difference})
        return difference.square().mean(), mean_distance(leaves, exact)

    def __call__(self, difference: Tensor, numbers: Tensor) -> Tensor:
        block, behind = self._parts(difference, numbers)
        return block / self._units[0] + behind / self._units[1]


Loss = Callable[[BlockOutput], BlockError]
# By the value of `Reconstruction.loss`.
LOSSES: dict[str, Loss] = {"squared": lambda output: SquaredError(), "output": OutputError}


def pick(values: Values, chunk: Chunk, numbers: Tensor) -> Chunk:
    """Return the values of a chunk of all images for the selected images."""
    if len(numbers) == values.count:
        return dict(chunk)
    return {
        name: value if (axis := values.axes.get(name)) is None else value.index_select(axis[0], places(axis, numbers))
        for name, value in chunk.items()
    }


def places(axis: tuple[int, int], numbers: Tensor) -> Tensor:
    """Return the positions of some images along their axis."""
    if axis[1] == 1:
        return numbers
    return (numbers[:, None] * axis[1] + torch.arange(axis[1], device=numbers.device)).flatten()
