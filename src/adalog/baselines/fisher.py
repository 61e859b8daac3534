"""Weight the errors of a block's output by Fisher information (BRECQ, APHQ-ViT, FIMA-Q)."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from adalog.calibration.block_errors import BlockError, BlockOutput, Loss, pick, places
from adalog.calibration.gradients import distance_gradient, hessian_probe, with_mean_one

_EQUAL = 1e-6  # directions of change with less than this fraction of the largest power count as rounding noise
_IMAGES = 64  # the number of images per gradient of FIMA-Q's loss


class FisherWeights(BlockError):
    """Squared errors weighted by squared gradients of the model's loss (BRECQ's diagonal Fisher information).

    The loss is the distance to the float network's outputs (`hessian_probe`), because labels are not known. averaged:
    weight each value by its average over all images (APHQ-ViT).
    """

    def __init__(self, output: BlockOutput, *, averaged: bool = False):
        self._floats, self._name = output.floats, output.name
        probe = hessian_probe(torch.Generator().manual_seed(output.seed))
        value, axis = output.values[output.name], output.floats.axes.get(output.name)
        squares = torch.empty_like(value)
        for numbers in output.batches(torch.arange(output.floats.count, device=value.device)):
            chunk = output.pick(numbers)
            exact = chunk[output.name]
            square = output.gradient(chunk, exact, lambda outputs: probe(list(outputs.values()), slice(None))).square()
            if axis is None:
                squares.copy_(square)
            else:
                squares.index_copy_(axis[0], places(axis, numbers), square)
        self._squares = with_mean_one(squares)
        self._dim, self._mean = 0, None
        if averaged and axis is not None:
            self._dim, entries = axis
            self._mean = self._squares.unflatten(self._dim, (-1, entries)).mean(self._dim)

    def weights(self, numbers: Tensor) -> Tensor:
        """Return the weights of the output's values on these images."""
        if self._mean is not None:
            return torch.cat([self._mean] * len(numbers), self._dim)
        return pick(self._floats, {self._name: self._squares}, numbers)[self._name]

    def __call__(self, difference: Tensor, numbers: Tensor, exact: Tensor | None = None) -> Tensor:
        return (difference.square() * self.weights(numbers)).mean()


class LowRankFisher(BlockError):
    """A low-rank and a diagonal part of the Fisher information (FIMA-Q, Wu et al., CVPR 2025).

    The formulas follow a public reproduction of FIMA-Q's released code.

    The gradient of the loss at the quantized output is the Fisher information times the change of the output. k
    gradients and k changes, with their magnitudes averaged over images, form the matrices G and D, (k, values). The
    part of rank k is a^T (D D^T)^-1 a with a = G |difference|. The mean of G weights the diagonal part. Both parts are
    scaled to mean 1 at the point of the last gradient, and they count equally.
    """

    renewals = 4  # 15 in FIMA-Q

    def __init__(self, output: BlockOutput):
        self._output, self._numbers = output, output.fitted[:_IMAGES] if output.apart else output.fitted
        self._gradients, self._changes = list[Tensor](), list[Tensor]()
        self._inverse, self._units = torch.empty(0), (1.0, 1.0)

    @torch.no_grad()
    def renew(self, quantized: Callable[[Tensor], Tensor]) -> None:
        output, differences = self._output, []
        gradient, change = torch.zeros(()), torch.zeros(())
        for numbers in output.batches(self._numbers):
            chunk, value = output.pick(numbers), quantized(numbers)
            targets = output.leaves(chunk)

            def slope(outputs: Mapping[int, Tensor], targets: list[Tensor] = targets) -> Sequence[Tensor]:
                return distance_gradient(list(outputs.values()), [targets[index] for index in outputs])

            gradients = output.by_image(output.gradient(chunk, value, slope)).abs()
            differences.append(value - chunk[output.name])
            error = output.by_image(differences[-1]).abs()
            gradient, change = (
                before.to(gradients) + after.sum(0) for before, after in ((gradient, gradients), (change, error))
            )
        rows = [len(output.by_image(error)) for error in differences]
        self._gradients.append(gradient / sum(rows))
        self._changes.append(change / sum(rows))
        changes = torch.stack(self._changes).double()
        # Changes that differ only by rounding count as one. Their differences would weight errors by noise.
        self._inverse = torch.linalg.pinv(changes @ changes.t(), hermitian=True, rtol=_EQUAL).to(gradient.dtype)
        parts = [torch.stack(self._parts(error)) * count for error, count in zip(differences, rows, strict=True)]
        low, diagonal = (torch.stack(parts).sum(0) / sum(rows)).clamp(min=torch.finfo(torch.float32).tiny)
        self._units = float(low), float(diagonal)

    def _parts(self, difference: Tensor) -> tuple[Tensor, Tensor]:
        gradients = torch.stack(self._gradients)
        size = self._output.by_image(difference).abs()
        along = size @ gradients.t()
        return ((along @ self._inverse) * along).sum(1).mean(), (size.square() @ gradients.mean(0)).mean()

    def __call__(self, difference: Tensor, numbers: Tensor, exact: Tensor | None = None) -> Tensor:
        low, diagonal = self._parts(difference)
        return low / self._units[0] + diagonal / self._units[1]


# By the value of `Reconstruction.loss`.
LOSSES: dict[str, Loss] = {
    "fisher": FisherWeights,
    "averaged": partial(FisherWeights, averaged=True),
    "low-rank": LowRankFisher,
}
