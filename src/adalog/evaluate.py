"""How good a model is: top-1 with its interval, and agreement with the full-precision model."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Z95 = 1.959964  # of the normal distribution, two-sided


@dataclass(frozen=True)
class Score:
    """top1 and its 95 % Wilson interval, fractions of `images`; agreement: share of equal predictions, or None."""

    top1: float
    low: float
    high: float
    images: int
    agreement: float | None = None


def predict(
    model: nn.Module,
    images: Tensor,
    *,
    batch: int = 20,
    jobs: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """The model's class for each image: (N,). jobs: batches run at once, in threads.

    Small batches: a quantized forward makes many temporaries, which had better stay in the cache.
    """

    @torch.no_grad()  # a thread's own setting
    def classes(part: Tensor) -> Tensor:
        return model(part).argmax(dim=-1)

    predictions: list[Tensor] = []
    with ThreadPoolExecutor(jobs) as pool:
        for part in pool.map(classes, images.split(batch)):
            predictions.append(part)
            if progress is not None:
                progress(min(len(predictions) * batch, len(images)), len(images))
    return torch.cat(predictions)


def score(predictions: Tensor, labels: Tensor, reference: Tensor | None = None) -> Score:
    """predictions, labels, reference (the full-precision model's predictions): (N,) each."""
    right, count = int((predictions == labels).sum()), len(labels)
    low, high = wilson(right, count)
    agreement = None if reference is None else (predictions == reference).double().mean().item()
    return Score(right / count, low, high, count, agreement)


def wilson(successes: int, count: int) -> tuple[float, float]:
    """The 95 % interval of a proportion (Wilson 1927)."""
    share = successes / count
    centre = share + Z95**2 / (2 * count)
    half = Z95 * math.sqrt(share * (1 - share) / count + Z95**2 / (4 * count**2))
    scale = 1 + Z95**2 / count
    return (centre - half) / scale, (centre + half) / scale
