"""Measure the error of a block's output during reconstruction, by its size or by its effect on the model's output."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from adalog.calibration.batches import Chunk
from adalog.calibration.blocks import Blocks
from adalog.calibration.gradients import BATCH, distance_gradient, hessian_probe, mean_distance, with_mean_one
from adalog.errors import CalibrationError
from adalog.graph.program import leaves_of

# Maps the model's outputs that depend on the block's output, by their index among all outputs, to the gradient of a
# loss with respect to each of them.
Slope = Callable[[Mapping[int, Tensor]], Sequence[Tensor]]

# Directions of change with less than this fraction of the largest power count as rounding noise.
_EQUAL = 1e-6


@dataclass(frozen=True)
class BlockOutput:
    """A block's output in the float network on all images, and the model's outputs that depend on it.

    values: the model's inputs and this output, by name. outputs: the names of the model's outputs. apart: True if the
    images can be separated in these values; otherwise gradients are taken on all images together. fitted, held_out: the
    indices of the images that train the block, and of those that evaluate it. seed: of random gradients.
    """

    blocks: Blocks
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

    def picked(self, numbers: Tensor) -> Chunk:
        return picked(self.blocks, self.values, numbers)

    def gradient(self, chunk: Chunk, value: Tensor, slope: Slope) -> Tensor:
        """Compute the gradient of a loss with respect to the block's output, at this value of the output.

        chunk: a chunk from `picked`. Raises CalibrationError if the model has no differentiable output.
        """
        with torch.enable_grad():
            leaf = value.detach().requires_grad_()
            found = self.leaves({**chunk, self.name: leaf})
            outputs = {index: each for index, each in enumerate(found) if each.requires_grad}
            if not outputs:
                raise CalibrationError(
                    "the model has no differentiable output, but this loss needs one: use loss = 'squared'"
                )
            return torch.autograd.grad(list(outputs.values()), leaf, slope(outputs))[0]

    def leaves(self, chunk: Chunk) -> list[Tensor]:
        """Return the model's outputs that are tensors."""
        found = self.blocks.values(chunk, self.outputs)
        return [value for name in self.outputs for value in leaves_of(found[name]) if isinstance(value, Tensor)]

    def by_image(self, values: Tensor) -> Tensor:
        """Return values of the block's output as one row per image, or one row if images cannot be separated."""
        axis = self.blocks.axis(self.name) if self.apart else None
        if axis is None:
            return values.flatten()[None]
        dim, each = axis
        return values.unflatten(dim, (-1, each)).movedim(dim, 0).flatten(1)


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


class FisherWeights(BlockError):
    """Squared errors weighted by squared gradients of the model's loss (BRECQ's diagonal Fisher information).

    The loss is the distance to the float network's outputs (`hessian_probe`), because labels are not known. averaged:
    weight each value by its average over all images (APHQ-ViT).
    """

    def __init__(self, output: BlockOutput, *, averaged: bool = False):
        self._blocks, self._name = output.blocks, output.name
        probe = hessian_probe(torch.Generator().manual_seed(output.seed))
        value = output.values[output.name]
        squares = torch.empty_like(value)
        for numbers in output.batches(torch.arange(output.blocks.count, device=value.device)):
            chunk = output.picked(numbers)
            exact = chunk[output.name]
            gradient = output.gradient(chunk, exact, lambda found: probe(list(found.values()), slice(None)))
            put(output.blocks, squares, output.name, numbers, gradient.square())
        self._squares = with_mean_one(squares)
        axis = output.blocks.axis(output.name)
        self._dim, self._mean = 0, None
        if averaged and axis is not None:
            self._dim, each = axis
            self._mean = self._squares.unflatten(self._dim, (-1, each)).mean(self._dim)

    def weights(self, numbers: Tensor) -> Tensor:
        """Return the weights of the output's values on these images."""
        if self._mean is not None:
            return torch.cat([self._mean] * len(numbers), self._dim)
        return picked(self._blocks, {self._name: self._squares}, numbers)[self._name]

    def __call__(self, difference: Tensor, numbers: Tensor) -> Tensor:
        return (difference.square() * self.weights(numbers)).mean()


class LowRankFisher(BlockError):
    """A low-rank and a diagonal part of the Fisher information (FIMA-Q, Wu et al., CVPR 2025).

    The formulas follow a public reproduction of FIMA-Q's released code.

    The gradient of the loss at the quantized output is the Fisher information times the change of the output. k
    gradients and k changes, with their magnitudes averaged over images, form the matrices G and D, (k, values). The
    part of rank k is a^T (D D^T)^-1 a with a = G |difference|. The mean of G weights the diagonal part. Both parts are
    scaled to mean 1 at the point of the last gradient, and they count equally.

    images: the number of images per gradient.
    """

    renewals = 4  # 15 in FIMA-Q

    def __init__(self, output: BlockOutput, *, images: int = 64):
        self._output, self._numbers = output, output.fitted[:images] if output.apart else output.fitted
        self._gradients: list[Tensor] = []
        self._changes: list[Tensor] = []
        self._inverse = torch.empty(0)
        self._units: tuple[float, float] = (1.0, 1.0)

    @torch.no_grad()
    def renew(self, quantized: Callable[[Tensor], Tensor]) -> None:
        output, differences = self._output, []
        gradient, change = torch.zeros(()), torch.zeros(())
        for numbers in output.batches(self._numbers):
            chunk, value = output.picked(numbers), quantized(numbers)
            wanted = output.leaves(chunk)

            def slope(outputs: Mapping[int, Tensor], wanted: list[Tensor] = wanted) -> Sequence[Tensor]:
                return distance_gradient(list(outputs.values()), [wanted[index] for index in outputs])

            found = output.by_image(output.gradient(chunk, value, slope)).abs()
            differences.append(value - chunk[output.name])
            moved = output.by_image(differences[-1]).abs()
            gradient, change = (before.to(found) + now.sum(0) for before, now in ((gradient, found), (change, moved)))
        rows = [len(output.by_image(each)) for each in differences]
        self._gradients.append(gradient / sum(rows))
        self._changes.append(change / sum(rows))
        changes = torch.stack(self._changes).double()
        # Changes that differ only by rounding count as one. Their differences would weight errors by noise.
        self._inverse = torch.linalg.pinv(changes @ changes.t(), hermitian=True, rtol=_EQUAL).to(gradient.dtype)
        parts = [torch.stack(self._parts(each)) * count for each, count in zip(differences, rows, strict=True)]
        low, diagonal = (torch.stack(parts).sum(0) / sum(rows)).clamp(min=torch.finfo(torch.float32).tiny)
        self._units = float(low), float(diagonal)

    def _parts(self, difference: Tensor) -> tuple[Tensor, Tensor]:
        gradients = torch.stack(self._gradients)
        size = self._output.by_image(difference).abs()
        along = size @ gradients.t()
        return ((along @ self._inverse) * along).sum(1).mean(), (size.square() @ gradients.mean(0)).mean()

    def __call__(self, difference: Tensor, numbers: Tensor) -> Tensor:
        low, diagonal = self._parts(difference)
        return low / self._units[0] + diagonal / self._units[1]


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
        for some in self._output.batches(numbers):
            difference = quantized(some) - self._output.picked(some)[self._output.name]
            sums += torch.stack(self._parts(difference, some)).cpu() * (len(some) / len(numbers))
        block, rest = sums.tolist()
        self._units = block or 1.0, rest or 1.0

    def _parts(self, difference: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        output = self._output
        chunk = output.picked(numbers)
        with torch.no_grad():
            exact = output.leaves(chunk)
        moved = output.leaves({**chunk, output.name: chunk[output.name] + difference})
        return difference.square().mean(), mean_distance(moved, exact)

    def __call__(self, difference: Tensor, numbers: Tensor) -> Tensor:
        block, rest = self._parts(difference, numbers)
        return block / self._units[0] + rest / self._units[1]


Loss = Callable[[BlockOutput], BlockError]
# By the value of `Reconstruction.loss`.
LOSSES: dict[str, Loss] = {
    "squared": lambda output: SquaredError(),
    "fisher": FisherWeights,
    "averaged": partial(FisherWeights, averaged=True),
    "low-rank": LowRankFisher,
    "output": OutputError,
}


def picked(blocks: Blocks, chunk: Chunk, numbers: Tensor) -> Chunk:
    """Return the values of a chunk of all images for the selected images."""
    if len(numbers) == blocks.count:
        return dict(chunk)
    axes = {name: blocks.axis(name) for name in chunk}
    return {
        name: value if (axis := axes[name]) is None else value.index_select(axis[0], places(axis, numbers))
        for name, value in chunk.items()
    }


def put(blocks: Blocks, whole: Tensor, name: str, numbers: Tensor, some: Tensor) -> None:
    """Write the values of some images into the tensor for all images, along the image axis of the named value."""
    axis = blocks.axis(name)
    if axis is None:
        whole.copy_(some)
    else:
        whole.index_copy_(axis[0], places(axis, numbers), some)


def places(axis: tuple[int, int], numbers: Tensor) -> Tensor:
    """Return the positions of some images along their axis."""
    return (numbers[:, None] * axis[1] + torch.arange(axis[1], device=numbers.device)).flatten()
