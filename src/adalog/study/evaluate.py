"""Evaluate a model: top-1 and top-5 with intervals, and how much it differs from the full-precision model."""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from threading import Lock
from typing import Any, TypeVar

import safetensors.torch
import torch
from torch import Tensor
from torch.nn import functional as F

from adalog.calibration.schedule import SERIAL, Resources
from adalog.device import full_float32_on, images_at_once
from adalog.errors import DataError
from adalog.graph.stretches import peak_bytes
from adalog.graph.tracing import trace
from adalog.inputs.images import ImageSet, Preprocessing
from adalog.quantized import QuantizedProgram
from adalog.ranks import JSON, Codec, json_codec

Z95 = 1.959964  # quantile of the normal distribution for a two-sided 95 % interval
# Images per batch on a processor; few, so that the many temporaries of a quantized forward stay in the cache. On an
# accelerator, `batch_on` says how many fit.
BATCH = 20
_BYTES_OF_IMAGE = 32 << 20  # the most bytes of one image's values in a network that adalog did not quantize
_ROWS = 1000  # rows to process at a time, which limits the memory
T = TypeVar("T")


# --- predictions -----------------------------------------------------------------------------------------------------


def batch_on(device: torch.device | str | None, networks: Sequence[Any]) -> int:
    """Return how many images to run together: 20 on a processor, and as many as memory allows elsewhere.

    networks: run one after the other. The programs of quantized ones say how much memory they need, and the other
    networks need no more than these. Without a quantized network it is a guess.
    """
    place = torch.device("cpu" if device is None else device)
    if place.type == "cpu":
        return BATCH
    programs = (getattr(network, "quantized", None) for network in networks)
    peaks = [
        peak_bytes(quantized.program, trace(quantized.program, quantized.zeros(1, "meta")))
        for quantized in programs
        if isinstance(quantized, QuantizedProgram)
    ]
    if not peaks:
        return max(BATCH, images_at_once(place, _BYTES_OF_IMAGE, BATCH))
    return images_at_once(place, max(peaks), BATCH)


def predict(
    model: Callable[[Tensor], Any],
    images: Tensor,
    *,
    batch: int | None = None,
    jobs: int = 1,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return the model's logits, or the features of a model without a classifier: float32 on the CPU, (N, C).

    images: (N, 3, H, W), which run `batch` at a time (default: `batch_on`). jobs: number of batches that run at the
    same time, in threads.
    The output may be a tensor, a structure with `logits`, or a tuple whose first element is the logits. Raises
    DataError for other outputs, for NaN, and if there are no images.
    """

    @torch.no_grad()  # the setting holds for one thread
    def run(images: Tensor) -> Tensor:
        images = images.to(device, non_blocking=True)
        with full_float32_on(images.device):  # the float model, too: TF32 would change some of its predictions
            logits = _logits(model(images), len(images))
        if bool(logits.isnan().any()):
            raise DataError(
                f"{type(model).__name__} returned NaN: check its weights, and that the images are normalised"
            )
        return logits.to("cpu", torch.float32)

    if not len(images):
        raise DataError("there are no images to evaluate the model on: give at least one")
    if batch is None:
        batch = batch_on(images.device if device is None else device, [model])
    with ThreadPoolExecutor(jobs) as pool:
        return torch.cat(list(pool.map(run, images.split(batch))))


@dataclass(frozen=True)
class PreparedImages:
    """Images that are read and prepared for a model on request; tensors are already prepared."""

    images: Tensor | ImageSet
    preprocessing: Preprocessing | None = None

    def __len__(self) -> int:
        return len(self.images)

    def __call__(self, numbers: range) -> Tensor:
        """Return the images with these consecutive numbers, (B, 3, H, W)."""
        if isinstance(self.images, Tensor):
            return self.images[numbers.start : numbers.stop]
        assert self.preprocessing is not None
        return self.images.select(numbers).load(self.preprocessing)


def in_batches(
    count: int, make: Callable[[range], T], resources: Resources = SERIAL, *, batch: int = BATCH, coded: Codec[T] = JSON
) -> list[T]:
    """Return the results of `make` for each batch of images, in order.

    make: takes the numbers of its images, in the range of `count`, and reads them itself, so that at most as many
    batches are in memory as there are jobs. Progress counts images. Raises DataError if there are none.
    """
    if not count:
        raise DataError("there are no images to evaluate the model on: give at least one")
    spans = {str(start): range(start, min(start + batch, count)) for start in range(0, count, batch)}
    done = 0

    def finish(name: str, result: T, own: bool) -> None:
        nonlocal done
        done += len(spans[name])
        resources.report(done, count)

    results = resources.ranks.share(
        list(spans), lambda name: make(spans[name]), coded=coded, threads=resources.jobs, finished=finish
    )
    return list(results.values())


def _logits(output: Any, images: int) -> Tensor:
    """Return the logits in a model's output. Raises DataError if there are none."""
    logits: Any = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if isinstance(output, Mapping):
        logits = output.get("logits")
    elif isinstance(output, (tuple, list)) and output and not hasattr(output, "logits"):
        logits = output[0]
    if isinstance(logits, Tensor) and logits.shape[:1] == (images,) and logits.ndim == 2 and logits.is_floating_point():
        return logits
    what = f"{logits.dtype} {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(output).__name__
    raise DataError(
        f"for {images} images the model returned {what}, not logits ({images}, classes): give a classifier, or a "
        "module that returns logits or one feature vector per image"
    )


class Nearest:
    """Classifier for models that return features: each image gets the label of the nearest support image.

    support: (S, C) features. Their mean is subtracted from all features. The nearest image has the largest cosine
    similarity; the first one wins a tie. Raises DataError if the shapes do not fit.
    """

    def __init__(self, support: Tensor, labels: Tensor | Sequence[int]):
        self._labels = torch.as_tensor(labels)
        if not len(support) or self._labels.shape != (len(support),):
            shape = tuple(self._labels.shape)
            raise DataError(
                f"{len(support)} support features have labels of the shape {shape}: give one label for each feature"
            )
        if support.ndim != 2:
            shape = tuple(support.shape)
            raise DataError(f"features of the shape {shape} cannot be compared: the shape must be (images, channels)")
        self._mean = support.double().mean(dim=0)
        self._known = F.normalize(support.double() - self._mean)

    @torch.no_grad()  # the setting holds for one thread
    def __call__(self, query: Tensor) -> Tensor:
        """Return the labels (N,) of the images with these features (N, C)."""
        size = self._known.shape
        if query.ndim != 2 or size[1] != query.shape[1]:
            raise DataError(
                f"features of the shapes {tuple(size)} and {tuple(query.shape)} cannot be compared: both must "
                "be (images, channels), from the same model"
            )
        nearest = [
            (F.normalize(part.double() - self._mean) @ self._known.t()).argmax(dim=1) for part in query.split(_ROWS)
        ]
        return self._labels[torch.cat(nearest).to(self._labels.device)]


# --- scores ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Share:
    """A fraction of the images with its 95 % Wilson interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Score:
    """Accuracy of predictions, and how they differ from the full-precision model's; None if a value is unknown.

    top5: only for six classes or more.
    agreement: fraction of images with the same top-1 prediction as the full-precision model.
    kl: mean of KL(full precision || model) [nats].
    lost, gained: number of images that only the full-precision model, or only this model, classifies correctly.
    p_value: McNemar's exact test of that difference.
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
    """Counts of predictions, as sums over images, for a `Score`; None if a count is unknown.

    right, right5: number of images with their label as the top-1 prediction, or among the top 5.
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
        """Add up the tallies of disjoint sets of images, in this order."""
        columns = {entry.name: [getattr(part, entry.name) for part in parts] for entry in fields(Tally)}
        sums: dict[str, Any] = {name: None if None in values else sum(values) for name, values in columns.items()}
        return Tally(**sums)

    def score(self) -> Score:
        """Return the score that these counts give."""
        count, hits = self.images, (self.right, self.right5)
        top1, top5 = (None if right is None else Share(right / count, *wilson(right, count)) for right in hits)
        agreement, kl = (None if total is None else total / count for total in (self.agreeing, self.kl))
        p_value = None if self.lost is None or self.gained is None else mcnemar(self.lost, self.gained)
        return Score(count, top1, top5, agreement, kl, self.lost, self.gained, p_value)


def score(answers: Tensor, labels: Tensor | Sequence[int] | None = None, reference: Tensor | None = None) -> Score:
    """Return the score of a model's predictions; the arguments are those of `tally`."""
    return tally(answers, labels, reference).score()


@torch.no_grad()
def tally(answers: Tensor, labels: Tensor | Sequence[int] | None = None, reference: Tensor | None = None) -> Tally:
    """Count the correct predictions by labels, (N,), and the differences from the full-precision ones, `reference`.

    Predictions are logits (N, C) or classes (N,); top-5 and KL need logits. Raises DataError if the arguments do not
    fit together.
    """
    count = len(answers)
    if not count:
        raise DataError("there are no predictions to evaluate: give predictions for at least one image")
    truth = None if labels is None else torch.as_tensor(labels, device=answers.device)
    right = None if truth is None else _right(answers, truth)
    five = None if truth is None or answers.ndim < 2 or answers.shape[1] < 6 else int(_right(answers, truth, 5).sum())
    hits = None if right is None else int(right.sum())
    if reference is None:
        return Tally(count, hits, five)
    comparable = answers.ndim == reference.ndim == 2
    if len(reference) != count or (comparable and answers.shape != reference.shape):
        raise DataError(
            f"predictions {tuple(answers.shape)} cannot be compared with full-precision ones {tuple(reference.shape)}: "
            "both must be for the same images and classes"
        )
    agreeing = int((_first(answers) == _first(reference)).sum())
    kl = count * divergence(reference, answers) if comparable else None
    if truth is None or right is None:
        return Tally(count, agreeing=agreeing, kl=kl)
    before = _right(reference, truth)
    return Tally(count, hits, five, agreeing, kl, int((before & ~right).sum()), int((right & ~before).sum()))


_TALLIES: Codec[list[Tally]] = json_codec(
    lambda tallies: [asdict(entry) for entry in tallies], lambda _, rows: [Tally(**row) for row in rows]
)
_TENSORS: Codec[list[Tensor]] = Codec(
    lambda tensors: safetensors.torch.save({f"{index:06}": each.contiguous() for index, each in enumerate(tensors)}),
    lambda _, content: [tensor for _, tensor in sorted(safetensors.torch.load(content).items())],
)


@dataclass(frozen=True)
class Contest:
    """Networks to evaluate on the same images; each image is read only once.

    alone: for each network, True if it takes one batch at a time, since it runs on a GPU or has threads of its own.
    support: labelled images, for networks without a classifier (`Nearest`).
    """

    networks: Sequence[Callable[[Tensor], Any]]
    alone: Sequence[bool]
    device: torch.device | None = None
    support: tuple[PreparedImages, Tensor] | None = None
    _turn: Any = field(default_factory=Lock, init=False, repr=False)

    def tallies(self, images: PreparedImages, labels: Tensor | None, resources: Resources = SERIAL) -> list[Tally]:
        """Return one tally per network; the first network is also compared with the second one, if there is one.

        labels: (N,). Progress counts images, the support images first.
        """
        before = 0 if self.support is None else len(self.support[0])
        total = before + len(images)
        nearest = self._nearest(replace(resources, progress=lambda done, *_: resources.report(done, total)))

        def evaluate(numbers: range) -> list[Tally]:
            answers = self._run(images(numbers))
            if nearest:
                answers = [label(answer) for label, answer in zip(nearest, answers, strict=True)]
            own = None if labels is None else labels[numbers.start : numbers.stop]
            return [tally(answers[0], own, *answers[1:]), *(tally(answer, own) for answer in answers[1:])]

        after = replace(resources, progress=lambda done, *_: resources.report(before + done, total))
        results = in_batches(len(images), evaluate, after, batch=self._batch(len(images), resources), coded=_TALLIES)
        return [Tally.total(column) for column in zip(*results, strict=True)]

    def _nearest(self, resources: Resources) -> list[Nearest]:
        """Return one classifier per network, made from the network's features of the support images."""
        if self.support is None:
            return []
        images, labels = self.support
        batch = self._batch(len(images), resources)
        results = in_batches(len(images), lambda n: self._run(images(n)), resources, batch=batch, coded=_TENSORS)
        return [Nearest(torch.cat(column), labels) for column in zip(*results, strict=True)]

    def _batch(self, count: int, resources: Resources) -> int:
        """Return the number of images per batch, the same on all ranks."""

        def number() -> int:
            # Each job gets a batch to read, if there are enough images, since reading takes longer than running.
            most, at_once = batch_on(self.device, self.networks), resources.jobs * resources.ranks.world
            return most if most <= BATCH else max(BATCH, min(most, -(-count // at_once)))

        return BATCH if self.device is None or self.device.type == "cpu" else resources.ranks.by_first(number)

    def _run(self, batch: Tensor) -> list[Tensor]:
        if self.device is not None and self.device.type == "cuda":
            batch = batch.pin_memory()  # in this thread, while another thread uses the GPU
        results = []
        for network, single in zip(self.networks, self.alone, strict=True):
            with self._turn if single else nullcontext():
                results.append(predict(network, batch, batch=len(batch), device=self.device))
        return results


def check_classes(folders: Sequence[str] | None, logits: Tensor, data: str, model: str) -> None:
    """Raise DataError if the images lie in subfolders, but the model has another number of classes."""
    if folders is not None and len(folders) != logits.shape[1]:
        raise DataError(
            f"{data} has {len(folders)} subfolders, one per class, but {model} has {logits.shape[1]} classes, so the "
            "number of a class is unknown: give a CSV file of file,label"
        )


def _first(answers: Tensor) -> Tensor:
    """Return the predicted classes, (N,)."""
    return answers.argmax(dim=1) if answers.ndim == 2 else answers


def _right(answers: Tensor, labels: Tensor, first: int = 1) -> Tensor:
    """Return True for each label among the `first` highest predictions, (N,); of equal logits the lower class wins."""
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise DataError(f"labels are {labels.dtype}: give the number of each image's class as an integer")
    labels = labels.long()
    if labels.shape != answers.shape[:1]:
        raise DataError(
            f"{len(answers)} predictions have labels of the shape {tuple(labels.shape)}: give one label for each image"
        )
    last = answers.shape[1] - 1 if answers.ndim == 2 else math.inf
    wrong = labels[(labels < 0) | (labels > last)]
    if len(wrong):
        raise DataError(
            f"label {int(wrong[0])} is not a class of the model, 0 to {last}: give the labels that it was trained on"
        )
    if answers.ndim == 1:
        return answers == labels
    own = answers.gather(1, labels[:, None])
    lower = torch.arange(answers.shape[1], device=answers.device) < labels[:, None]
    before = ~(answers <= own) | ((answers == own) & lower)  # NaN ranks above every number
    return (before.sum(dim=1) < first) & ~own[:, 0].isnan()


def divergence(reference: Tensor, answers: Tensor) -> float:
    """Return the mean KL(reference || answers) over images [nats], in float64; classes of probability 0 add nothing."""
    total = 0.0
    for p, q in zip(reference.split(_ROWS), answers.split(_ROWS), strict=True):
        log_p, log_q = p.double().log_softmax(dim=1), q.double().log_softmax(dim=1)
        total += float(torch.where(log_p > -math.inf, log_p.exp() * (log_p - log_q), 0.0).sum())
    return total / len(answers)


def wilson(successes: int, count: int) -> tuple[float, float]:
    """Return the 95 % interval of a proportion (Wilson 1927)."""
    share = successes / count
    centre = share + Z95**2 / (2 * count)
    half = Z95 * math.sqrt(share * (1 - share) / count + Z95**2 / (4 * count**2))
    scale = 1 + Z95**2 / count
    low, high = (centre - half) / scale, (centre + half) / scale
    return (max(low, 0.0) if successes else 0.0), (min(high, 1.0) if successes < count else 1.0)


def mcnemar(lost: int, gained: int) -> float:
    """Return McNemar's exact p-value: how likely lost + gained tosses of a fair coin split at least as unevenly."""
    count = lost + gained
    term = tail = 1  # a binomial coefficient, and the sum of them, as exact integers
    for successes in range(min(lost, gained)):
        term = term * (count - successes) // (successes + 1)
        tail += term
    return min(1.0, 2 * tail / 2**count)
