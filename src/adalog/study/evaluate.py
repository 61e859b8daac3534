"""How good a model is: top-1 and top-5 with intervals, and how far it is from the full-precision model."""

import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, fields
from threading import Lock
from typing import Any, TypeVar

import safetensors.torch
import torch
from torch import Tensor
from torch.nn import functional as F

from adalog.errors import DataError
from adalog.inputs.images import ImageSet, Preprocessing
from adalog.ranks import ALONE, JSON, Coded, Ranks

Z95 = 1.959964  # quantile of the normal distribution for a two-sided 95 % interval
BATCH = 20  # images that run together: a quantized forward makes many temporaries, which then stay in the cache
_ROWS = 1000  # rows judged at a time, which bounds the memory
T = TypeVar("T")


# --- what a model says -----------------------------------------------------------------------------------------------


def predict(
    model: Callable[[Tensor], Any],
    images: Tensor | Iterable[Tensor],
    *,
    batch: int = BATCH,
    jobs: int = 1,
    device: torch.device | str | None = None,
    progress: Callable[[int], None] | None = None,
) -> Tensor:
    """The model's logits, or a feature model's features: float32 on the CPU, (N, C).

    images: (N, 3, H, W), run `batch` at a time, or batches (B, 3, H, W), of which at most jobs + 1 are in memory.
    jobs: batches that run at the same time, in threads. device: where batches are moved first. progress(done): called
    with the number of images done. The output may be a tensor, a structure with `logits`, or a tuple that begins with
    them; other outputs raise DataError.
    """

    @torch.no_grad()  # a setting of each thread
    def run(given: Tensor) -> Tensor:
        logits = _logits(model(given.to(device, non_blocking=True)), len(given))
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


@dataclass(frozen=True)
class Prepared:
    """Images that are read and prepared for a model when they are asked for; tensors are prepared already."""

    images: Tensor | ImageSet
    preprocessing: Preprocessing | None = None

    def __len__(self) -> int:
        return len(self.images)

    def __call__(self, numbers: range) -> Tensor:
        """The images of these consecutive numbers, (B, 3, H, W). Raises DataError for files that are no images."""
        if isinstance(self.images, Tensor):
            return self.images[numbers.start : numbers.stop]
        assert self.preprocessing is not None
        return self.images.select(numbers).load(self.preprocessing)


def in_batches(
    count: int,
    make: Callable[[range], T],
    *,
    batch: int = BATCH,
    jobs: int = 1,
    ranks: Ranks = ALONE,
    coded: Coded[T] = JSON,
    progress: Callable[[int], None] | None = None,
) -> list[T]:
    """What `make` gives for the images of each batch, in their order.

    make: takes the numbers of its images, of `count`, and reads them itself, so that memory holds no more than `jobs`
    batches. It runs in `jobs` threads of each rank, and what it gives goes to all ranks as `coded` says.
    progress(done): called with the number of images done. Raises DataError without images.
    """
    if not count:
        raise DataError("there are no images to judge the model by: give at least one")
    spans = {str(start): range(start, min(start + batch, count)) for start in range(0, count, batch)}
    done = 0

    def finished(name: str, result: T, own: bool) -> None:
        nonlocal done
        done += len(spans[name])
        if progress is not None:
            progress(done)

    found = ranks.shared(list(spans), lambda name: make(spans[name]), coded=coded, threads=jobs, finished=finished)
    return list(found.values())


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


class Nearest:
    """Judges a model without a classifier: an image has the label of the support image that is nearest.

    support: (S, C) features, whose mean is taken off all. Nearest is by cosine, the first of several.
    """

    def __init__(self, support: Tensor, labels: Tensor | Sequence[int]):
        self._labels = torch.as_tensor(labels)
        if not len(support) or self._labels.shape != (len(support),):
            told = tuple(self._labels.shape)
            raise DataError(f"{len(support)} support features have labels {told}: give one label for each")
        if support.ndim != 2:
            told = tuple(support.shape)
            raise DataError(f"features of the shape {told} cannot be compared: they have to be (images, channels)")
        self._mean = support.double().mean(dim=0)
        self._known = F.normalize(support.double() - self._mean)

    @torch.no_grad()  # a setting of each thread
    def __call__(self, query: Tensor) -> Tensor:
        """The labels of the images with these features, (N, C): (N,)."""
        known = self._known.shape
        if query.ndim != 2 or known[1] != query.shape[1]:
            raise DataError(
                f"features of the shapes {tuple(known)} and {tuple(query.shape)} cannot be compared: both have to "
                "be (images, channels), of the same model"
            )
        nearest = [
            (F.normalize(part.double() - self._mean) @ self._known.t()).argmax(dim=1) for part in query.split(_ROWS)
        ]
        return self._labels[torch.cat(nearest).to(self._labels.device)]


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


@dataclass(frozen=True)
class Tally:
    """What is counted of answers, as sums over images; None where it cannot be told.

    right, right5: images whose label is the first answer, or among the first five. agreeing: images with the same first
    answer as the full-precision model. kl: the sum of KL(full precision || model) [nats]. lost, gained: as of `Score`.
    """

    images: int
    right: int | None = None
    right5: int | None = None
    agreeing: int | None = None
    kl: float | None = None
    lost: int | None = None
    gained: int | None = None

    @staticmethod
    def total(parts: Sequence["Tally"]) -> "Tally":
        """The tally of all images from those of parts of them, added up in this order."""
        columns = {each.name: [getattr(part, each.name) for part in parts] for each in fields(Tally)}
        sums: dict[str, Any] = {name: None if None in each else sum(each) for name, each in columns.items()}
        return Tally(**sums)

    def score(self) -> Score:
        """What these counts say."""
        count = self.images
        top1, top5 = (None if hits is None else _share(hits, count) for hits in (self.right, self.right5))
        return Score(
            count,
            top1,
            top5,
            None if self.agreeing is None else self.agreeing / count,
            None if self.kl is None else self.kl / count,
            self.lost,
            self.gained,
            None if self.lost is None or self.gained is None else mcnemar(self.lost, self.gained),
        )


def score(answers: Tensor, labels: Tensor | Sequence[int] | None = None, reference: Tensor | None = None) -> Score:
    """Judge a model's answers by labels, (N,), and compare them with `reference`, those of the full-precision model.

    The arguments are those of `tally`.
    """
    return tally(answers, labels, reference).score()


@torch.no_grad()
def tally(answers: Tensor, labels: Tensor | Sequence[int] | None = None, reference: Tensor | None = None) -> Tally:
    """Count how often answers are right by labels, (N,), and how they differ from `reference`, full-precision ones.

    Answers are logits (N, C) or predicted classes (N,); top-5 and KL need logits. Raises DataError if the arguments do
    not fit together.
    """
    count = len(answers)
    if not count:
        raise DataError("there are no answers to judge: give those to at least one image")
    known = None if labels is None else torch.as_tensor(labels, device=answers.device)
    right = None if known is None else _right(answers, known)
    five = None if known is None or answers.ndim < 2 or answers.shape[1] < 6 else int(_right(answers, known, 5).sum())
    hits = None if right is None else int(right.sum())
    if reference is None:
        return Tally(count, hits, five)
    both = answers.ndim == reference.ndim == 2
    if len(reference) != count or (both and answers.shape != reference.shape):
        raise DataError(
            f"answers {tuple(answers.shape)} cannot be compared with full-precision ones {tuple(reference.shape)}: "
            "both models have to answer for the same images and classes"
        )
    agreeing = int((_first(answers) == _first(reference)).sum())
    kl = count * divergence(reference, answers) if both else None
    if known is None or right is None:
        return Tally(count, agreeing=agreeing, kl=kl)
    before = _right(reference, known)
    return Tally(count, hits, five, agreeing, kl, int((before & ~right).sum()), int((right & ~before).sum()))


_TALLIES: Coded[list[Tally]] = Coded(
    lambda tallies: json.dumps([asdict(each) for each in tallies]).encode(),
    lambda _, content: [Tally(**each) for each in json.loads(content)],
)
_TENSORS: Coded[list[Tensor]] = Coded(
    lambda tensors: safetensors.torch.save({f"{number:06}": each.contiguous() for number, each in enumerate(tensors)}),
    lambda _, content: [each for _, each in sorted(safetensors.torch.load(content).items())],
)


@dataclass(frozen=True)
class Contest:
    """Networks that answer for the same images, each of which is read once.

    alone: which of the networks take one batch at a time, as those on a GPU, or with threads of their own. support:
    labelled images, for networks without a classifier (`Nearest`).
    """

    networks: Sequence[Callable[[Tensor], Any]]
    alone: Sequence[bool]
    device: torch.device | None = None
    support: tuple[Prepared, Tensor] | None = None
    _turn: Any = field(default_factory=Lock, init=False, repr=False)

    def tallies(
        self,
        images: Prepared,
        labels: Tensor | None,
        *,
        jobs: int = 1,
        ranks: Ranks = ALONE,
        progress: Callable[[int], None] | None = None,
    ) -> list[Tally]:
        """What the first network gets right, beside the second if there is one, and what this gets right by labels.

        labels: (N,). jobs: batches at a time on each rank. progress(done): counts images on all ranks.
        """
        nearest, before = self._nearest(jobs, ranks, progress), 0 if self.support is None else len(self.support[0])

        def judged(numbers: range) -> list[Tally]:
            answers = self._run(images(numbers))
            if nearest:
                answers = [label(each) for label, each in zip(nearest, answers, strict=True)]
            own = None if labels is None else labels[numbers.start : numbers.stop]
            return [tally(answers[0], own, *answers[1:]), *(tally(each, own) for each in answers[1:])]

        watch = None if progress is None else lambda done: progress(before + done)
        found = in_batches(len(images), judged, jobs=jobs, ranks=ranks, coded=_TALLIES, progress=watch)
        return [Tally.total(column) for column in zip(*found, strict=True)]

    def _nearest(self, jobs: int, ranks: Ranks, progress: Callable[[int], None] | None) -> list[Nearest]:
        """What labels the features of each network, by those that it gives the support."""
        if self.support is None:
            return []
        images, labels = self.support
        found = in_batches(
            len(images), lambda n: self._run(images(n)), jobs=jobs, ranks=ranks, coded=_TENSORS, progress=progress
        )
        return [Nearest(torch.cat(column), labels) for column in zip(*found, strict=True)]

    def _run(self, batch: Tensor) -> list[Tensor]:
        if self.device is not None and self.device.type == "cuda":
            batch = batch.pin_memory()  # by this thread, while another one has its turn on the GPU
        found = []
        for network, single in zip(self.networks, self.alone, strict=True):
            with self._turn if single else nullcontext():
                found.append(predict(network, batch, batch=len(batch), device=self.device))
        return found


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
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise DataError(f"labels are {labels.dtype}: give the number of each image's class, an integer")
    labels = labels.long()
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
    before = ~(answers <= own) | ((answers == own) & lower)  # what is no number comes before all
    return (before.sum(dim=1) < first) & ~own[:, 0].isnan()


def _share(hits: int, count: int) -> Share:
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
    low, high = (centre - half) / scale, (centre + half) / scale
    return (max(low, 0.0) if successes else 0.0), (min(high, 1.0) if successes < count else 1.0)


def mcnemar(lost: int, gained: int) -> float:
    """The two-sided exact p-value of McNemar's test: how likely so uneven a split of lost + gained fair coins is."""
    count = lost + gained
    term = tail = 1  # binomial coefficients, and their sum, in whole numbers
    for successes in range(min(lost, gained)):
        term = term * (count - successes) // (successes + 1)
        tail += term
    return min(1.0, 2 * tail / 2**count)
