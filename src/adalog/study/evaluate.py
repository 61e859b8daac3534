"""How good a model is: top-1 and top-5 with intervals, and how far it is from the full-precision model."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from adalog.errors import DataError

Z95 = 1.959964  # quantile of the normal distribution for a two-sided 95 % interval
_ROWS = 1000  # rows judged at a time, which bounds the memory


# --- what a model says -----------------------------------------------------------------------------------------------


def predict(
    model: Callable[[Tensor], Any],
    images: Tensor | Iterable[Tensor],
    *,
    batch: int = 20,
    jobs: int = 1,
    device: torch.device | str | None = None,
    progress: Callable[[int], None] | None = None,
) -> Tensor:
    """The model's logits, or a feature model's features: float32 on the CPU, (N, C).

    images: (N, 3, H, W), run `batch` at a time, or batches (B, 3, H, W), of which at most jobs + 1 are in memory.
    jobs: batches that run at the same time, in threads. device: where batches are moved first. progress(done): called
    with the number of images done. The output may be a tensor, a structure with `logits`, or a tuple that begins with
    them; other outputs raise DataError. Batches are small since a quantized forward makes many temporaries, which then
    stay in the cache.
    """

    @torch.no_grad()  # a setting of each thread
    def run(given: Tensor) -> Tensor:
        logits = _logits(model(given.to(device)), len(given))
        if bool(logits.isnan().any()):
            raise DataError(f"{type(model).__name__} gives NaN: check its weights, and that the images are normalised")
        return logits.to("cpu", torch.float32)

    results: list[Tensor] = []
    pending: deque[Future[Tensor]] = deque()
    done = 0

    def collect() -> None:
        nonlocal done
        results.append(pending.popleft().result())
        done += len(results[-1])
        if progress is not None:
            progress(done)

    with ThreadPoolExecutor(jobs) as pool:
        for given in images.split(batch) if isinstance(images, Tensor) else images:
            pending.append(pool.submit(run, given))
            if len(pending) > jobs:
                collect()
        while pending:
            collect()
    if not done:
        raise DataError("there are no images to judge the model by: give at least one")
    return torch.cat(results)


def _logits(output: Any, images: int) -> Tensor:
    """The logits in a model's output."""
    found: Any
    if isinstance(output, Tensor):
        found = output
    elif isinstance(output, Mapping):
        found = output.get("logits")
    elif isinstance(output, (tuple, list)) and output and not hasattr(output, "logits"):
        found = output[0]
    else:
        found = getattr(output, "logits", None)
    if isinstance(found, Tensor) and found.shape[:1] == (images,) and found.ndim == 2 and found.is_floating_point():
        return found
    what = f"{found.dtype} {tuple(found.shape)}" if isinstance(found, Tensor) else type(output).__name__
    raise DataError(
        f"for {images} images the model gives {what}, not logits ({images}, classes): give a classifier, or a module "
        "that returns logits or one feature vector an image"
    )


@torch.no_grad()
def classify_by_nearest(support: Tensor, support_labels: Tensor | Sequence[int], query: Tensor) -> Tensor:
    """The label of the support image that is nearest each query: (N,).

    support: (S, C) features, query: (N, C). The support's mean is taken off both; nearest by cosine, the first of
    several. Judges a model without a classifier.
    """
    labels = torch.as_tensor(support_labels)
    if not len(support) or labels.shape != (len(support),):
        raise DataError(f"{len(support)} support features have labels {tuple(labels.shape)}: give one label for each")
    if support.ndim != 2 or query.ndim != 2 or support.shape[1] != query.shape[1]:
        raise DataError(
            f"features of the shapes {tuple(support.shape)} and {tuple(query.shape)} cannot be compared: both have to "
            "be (images, channels), of the same model"
        )
    mean = support.double().mean(dim=0)
    known = F.normalize(support.double() - mean)
    nearest = [(F.normalize(part.double() - mean) @ known.t()).argmax(dim=1) for part in query.split(_ROWS)]
    return labels[torch.cat(nearest).to(labels.device)]


# --- what that is worth ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Share:
    """A share of images and its 95 % Wilson interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Score:
    """How good answers are by labels and compared with the full-precision model; None where that is unknown.

    top5: only for six classes or more. agreement: share of images with the same first answer. kl: mean of
    KL(full precision || model) [nats]. lost, gained: numbers of images that only the full-precision model, or only this
    one, gets right. p_value: McNemar's exact test of that difference.
    """

    images: int
    top1: Share | None = None
    top5: Share | None = None
    agreement: float | None = None
    kl: float | None = None
    lost: int | None = None
    gained: int | None = None
    p_value: float | None = None


@torch.no_grad()
def score(answers: Tensor, labels: Tensor | Sequence[int] | None = None, reference: Tensor | None = None) -> Score:
    """Judge a model's answers by labels, (N,), and compare them with `reference`, those of the full-precision model.

    Answers are logits (N, C) or predicted classes (N,); top-5 and KL need logits. Raises DataError if the arguments do
    not fit together.
    """
    count = len(answers)
    if not count:
        raise DataError("there are no answers to judge: give those to at least one image")
    known = None if labels is None else torch.as_tensor(labels, device=answers.device)
    right = None if known is None else _right(answers, known)
    top1 = None if right is None else _share(right)
    top5 = None if known is None or answers.ndim < 2 or answers.shape[1] < 6 else _share(_right(answers, known, 5))
    if reference is None:
        return Score(count, top1, top5)
    both = answers.ndim == reference.ndim == 2
    if len(reference) != count or (both and answers.shape != reference.shape):
        raise DataError(
            f"answers {tuple(answers.shape)} cannot be compared with full-precision ones {tuple(reference.shape)}: "
            "both models have to answer for the same images and classes"
        )
    agreement = (_first(answers) == _first(reference)).double().mean().item()
    kl = divergence(reference, answers) if both else None
    if known is None or right is None:
        return Score(count, agreement=agreement, kl=kl)
    before = _right(reference, known)
    lost, gained = int((before & ~right).sum()), int((right & ~before).sum())
    return Score(count, top1, top5, agreement, kl, lost, gained, mcnemar(lost, gained))


def check_classes(folders: Sequence[str] | None, logits: Tensor, data: str, model: str) -> None:
    """Raise DataError if images lie in subfolders, but not in one per class of the model."""
    if folders is not None and len(folders) != logits.shape[1]:
        raise DataError(
            f"{data} has {len(folders)} subfolders, one a class, and {model} tells {logits.shape[1]} classes: a "
            "class's number is not known; give a CSV file of file,label"
        )


def _first(answers: Tensor) -> Tensor:
    """The predicted classes, (N,)."""
    return answers.argmax(dim=1) if answers.ndim == 2 else answers


def _right(answers: Tensor, labels: Tensor, first: int = 1) -> Tensor:
    """Whether each label is among the `first` answers, (N,); among equal logits the lower class comes first."""
    if labels.shape != answers.shape[:1]:
        raise DataError(f"{len(answers)} answers have labels {tuple(labels.shape)}: give one label for each image")
    last = answers.shape[1] - 1 if answers.ndim == 2 else math.inf
    wrong = labels[(labels < 0) | (labels > last)]
    if len(wrong):
        raise DataError(
            f"label {int(wrong[0])} is none of the model's classes, 0 to {last}: give the labels that it was trained on"
        )
    if answers.ndim == 1:
        return answers == labels
    own = answers.gather(1, labels[:, None])
    lower = torch.arange(answers.shape[1], device=answers.device) < labels[:, None]
    return ((answers > own) | ((answers == own) & lower)).sum(dim=1) < first


def _share(right: Tensor) -> Share:
    hits, count = int(right.sum()), len(right)
    return Share(hits / count, *wilson(hits, count))


def divergence(reference: Tensor, answers: Tensor) -> float:
    """The mean over images of KL(reference || answers) [nats], in float64; classes of probability zero add nothing."""
    total = 0.0
    for p, q in zip(reference.split(_ROWS), answers.split(_ROWS), strict=True):
        log_p, log_q = p.double().log_softmax(dim=1), q.double().log_softmax(dim=1)
        total += float(torch.where(log_p > -math.inf, log_p.exp() * (log_p - log_q), 0.0).sum())
    return total / len(answers)


def wilson(successes: int, count: int) -> tuple[float, float]:
    """The 95 % interval of a proportion (Wilson 1927)."""
    share = successes / count
    centre = share + Z95**2 / (2 * count)
    half = Z95 * math.sqrt(share * (1 - share) / count + Z95**2 / (4 * count**2))
    scale = 1 + Z95**2 / count
    return (centre - half) / scale, (centre + half) / scale


def mcnemar(lost: int, gained: int) -> float:
    """The two-sided exact p-value of McNemar's test: how likely so uneven a split of lost + gained fair coins is."""
    count = lost + gained
    term = tail = 1  # binomial coefficients, and their sum, in whole numbers
    for successes in range(min(lost, gained)):
        term = term * (count - successes) // (successes + 1)
        tail += term
    return min(1.0, 2 * tail / 2**count)
