"""A captured model with the operands of its sites, and the steps that make a quantized model of it."""

import copy
import functools
import hashlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from adalog.calibration.observe import Observed
from adalog.calibration.operands import (
    check_pinned,
    choices_of,
    formats_of,
    joined,
    moved_by,
    operands_of,
    request_of,
    why_unfolded,
)
from adalog.calibration.partial import Partial, assignment_json, check_storable, fingerprint
from adalog.calibration.schedule import Progress, run_searches
from adalog.calibration.shared import Shared
from adalog.calibration.stages import check_images, staged
from adalog.choices import Search
from adalog.config import Config
from adalog.errors import CalibrationError
from adalog.graph.capture import Sizes, batched, capture, take
from adalog.graph.rewrite import Assigned, SiteGroup, group_sites, rewritten
from adalog.graph.sites import Site, find_blocks, find_pairs, find_refused, find_sites, with_heads
from adalog.graph.tracing import trace
from adalog.ledger import ledger_of
from adalog.model import QuantizedModel
from adalog.quantized import QuantizedProgram
from adalog.quantizers import FLOAT_BITS, Assignment, Fold, UniformQuantizer
from adalog.ranks import ALONE, Ranks
from adalog.search import SEARCHES
from adalog.search.operand import Format
from adalog.search.product import Product, with_table
from adalog.version import source_hash

F = TypeVar("F", bound=Callable[..., Any])
_HALVES = (torch.float16, torch.bfloat16)
MEMORY = 2 << 30  # bytes: half of them hold the sites' operands, half the temporaries of the searches of all jobs


@dataclass(frozen=True)
class Searched:
    """The result of the search of one product.

    product: the operands as they were searched. seconds: the CPU time that the search took in its thread, even if it
    was made for other choices that share it.
    """

    group: SiteGroup
    product: Product
    assignment: Assignment
    seconds: float = 0.0

    @property
    def sites(self) -> tuple[Site, ...]:
        return self.group.sites

    def mean_square_error(self) -> float:
        """The mean squared error over all elements of the product's output."""
        left, right = self.product.left, self.product.right
        noise = self.product.output_power(self.assignment.left, self.assignment.right)[1]
        return noise / (left.values[..., 0].numel() * right.values.shape[-2])


def _alone(function: F) -> F:
    """The function without gradients, and out of the caller's inference mode: results serve stages that take gradients.

    Each thread has these settings for itself.
    """
    return torch.inference_mode(False)(torch.no_grad()(function))


class Calibration:
    """A captured model with the operands that its sites have in one forward of the calibration images.

    Quantizing again with other choices repeats only the searches whose choices differ.
    """

    @torch.inference_mode(False)  # some searches and stages take gradients, which this mode forbids
    def __init__(
        self,
        model: nn.Module,
        images: Tensor | Sequence[Any],
        *,
        unlabelled: Tensor | Sequence[Any] | None = None,
        seed: int = 0,
        memory: int = MEMORY,
        sizes: Sizes = "fixed",
    ):
        """images: (N, 3, H, W), all of which calibrate; or several positional inputs, (N, ...) each.

        An input that is not a tensor is a constant. unlabelled: images that stages after the search may fit; by default
        those that calibrate. sizes: as of `capture`. Operands are those of the float network, as in the released
        algorithm. memory: bytes, half of them for operands and half for the searches' temporaries; the model, the
        images and results come on top. If all operands fit (those of DeiT-T take 0.8 GB at 32 images), they stay for
        further configurations; otherwise each configuration takes a forward. Where one operand, or its search, does not
        fit, every n-th row is taken, or for attention and convolutions every n-th image or window (`Observed`).
        Raises ValueError for a memory too small for 1,024 rows, CalibrationError without sites or for infinite images.
        """
        inputs = _in_float32(batched(images))
        self.images = _finite(inputs)
        self.unlabelled = self.images if unlabelled is None else _more_like(self.images, unlabelled)
        self.program = capture(_of_float32(model), inputs, sizes)
        self.sites = with_heads(find_sites(self.program), self.program, self.images)
        self.pairs = find_pairs(self.program, self.sites, take(self.images, [0, 1]))
        self.seed = seed
        self.groups = group_sites(self.sites, self.pairs)
        if not self.sites:
            raise CalibrationError(f"{type(model).__name__} has no multiplication that could be quantized")
        self._blocks = find_blocks(self.program)
        self._memory = memory
        self._shapes = trace(self.program, self.images)
        self._requests = {each.name: request_of(self.program, each, self.sites, self._shapes) for each in self.groups}
        self._observed = Observed(self.program, self.images, self._shapes, self._requests.values(), memory // 2)
        head = frozenset(self._blocks[-1].nodes)
        self._unfolded = functools.partial(why_unfolded, sites=self.sites, shapes=self._shapes, head=head)
        self._shared = Shared(
            self.program, self.images, self.groups, self._blocks, self._observed, seed, self._unfolded
        )
        self._found: dict[Any, Any] = {}  # folds and assignments, by all that they depend on
        self._assigned: dict[Any, Assignment] = {}  # of whole searches, those of other ranks too
        self._seconds: dict[Any, float] = {}

    def quantize(
        self,
        config: Config,
        progress: Progress | None = None,
        *,
        jobs: int = 1,
        partial: Path | None = None,
        start: Assigned = (),
        ranks: Ranks = ALONE,
    ) -> QuantizedModel:
        """The model quantized under these choices.

        jobs: how many sites are searched at once, in threads; the result does not depend on it. partial: a file from
        which finished searches are read, and to which new ones are added; once the result is saved it can be removed.
        start: assignments that `assign` gave; searches of bounds begin from them and never end worse. ranks: the
        processes that share out the searches, each of which has made this calibration; all get the same model.
        """
        assigned = self.assign(config, progress, jobs=jobs, partial=partial, start=start, ranks=ranks)
        return QuantizedModel(self.finished(assigned, config))

    @_alone
    def assign(
        self,
        config: Config,
        progress: Progress | None = None,
        *,
        jobs: int = 1,
        partial: Path | None = None,
        start: Assigned = (),
        ranks: Ranks = ALONE,
    ) -> list[tuple[SiteGroup, Assignment]]:
        """The assignment of every group under these choices, in order of execution. Its arguments are `quantize`'s."""
        check_pinned(config, self.sites)
        check_images(config, self.unlabelled)
        self._shared.prepare(config)
        given = _given(start, self.groups)
        file = None if partial is None else Partial(Path(partial), self.fingerprint(config, given), ranks.rank)
        keys = {group.name: self._key(group, config) for group in self.groups if not given}
        found = run_searches(
            self._splits(),
            lambda group: self._search(group, config, given.get(group.name)).assignment,
            known={name: self._assigned[key] for name, key in keys.items() if key in self._assigned},
            bytes_of={name: request.scratch for name, request in self._requests.items()},
            memory=self._memory // 2,
            device=self.images[0].device,
            jobs=jobs,
            partial=file,
            progress=progress,
            ranks=ranks,
        )
        self._assigned |= {key: found[name] for name, key in keys.items()}
        assigned = [(group, found[group.name]) for group in self.groups]
        if config.stages:
            assigned = staged(
                config.stages,
                self.program,
                self.images,
                self.unlabelled,
                assigned,
                self._shared,
                lambda group, found: self.product(group, found, config).assigned(found.left, found.right),
                seed=self.seed,
                memory=self._memory // 2,
                partial=file,
                progress=progress,
                ranks=ranks,
            )
        if progress is not None:
            progress(len(self.groups), len(self.groups), "")
        return assigned

    @_alone
    def finished(self, assigned: Assigned, config: Config) -> QuantizedProgram:
        """The quantized program that these assignments give. config: the choices under which they were found."""
        reasons = ((pair.name, pair.refusal or self._unfolded(pair, config.at(pair.sites))) for pair in self.pairs)
        refusals = {name: f"not folded: {reason}" for name, reason in reasons if reason}
        refusals |= {site.name: f"stays float: {site.refusal}" for site in find_refused(self.program)}
        for group, assignment in assigned:
            if choices_of(group, config) != config and assignment.left is None and assignment.right is None:
                refusals |= {site.name: f"stays float: kept at {FLOAT_BITS} bits" for site in group.sites}
        provenance = {"seed": self.seed, "calibration": digest(self.images), "images": len(self.images[0])}
        if fitted := take(self.unlabelled, range(config.images_fitted)) if config.images_fitted else ():
            provenance |= {"fitted": digest(fitted), "fitted_images": config.images_fitted}
        example = tuple(value[:0] for value in self.images)
        ledger = tuple(ledger_of(self.program, assigned, moved_by(self.groups, config)))
        return QuantizedProgram(rewritten(self.program, assigned), config, ledger, refusals, provenance, example)

    def search(self, config: Config, sites: Collection[str] | None = None) -> list[Searched]:
        """The assignments of all products, or of those of these sites, with all their operands, whatever the memory."""
        found = {each.group.name: each for each in self.searched(config, sites)}
        return [found[group.name] for group in self.groups if group.name in found]

    def searched(self, config: Config, sites: Collection[str] | None = None) -> Iterator[Searched]:
        """The same one after the other, in the order in which operands are observed."""
        check_pinned(config, self.sites)
        _check_known(sites or (), self.sites)
        self._shared.prepare(config)
        for group in chain.from_iterable(self._splits()):
            if sites is None or any(site.name in sites for site in group.sites):
                yield self._search(group, config)

    @torch.no_grad()
    def judge(self, searched: Searched, config: Config) -> Searched:
        """The assignment that another calibration found, on the operands that the images of this one give."""
        group = next(group for group in self.groups if group.name == searched.group.name)
        fold, format_ = searched.assignment.fold, searched.product.left.format
        return replace(searched, product=self._product(group, choices_of(group, config), fold, format_))

    def probe(self, gradient: Tensor) -> None:
        """Weight errors by this gradient of a loss with respect to the only output, (N, ...), not by random ones."""
        self._shared.probe(gradient)
        for known in (self._found, self._assigned, self._seconds):
            known.clear()

    def operand(self, name: str) -> Tensor:
        """The operand of this name in full precision; every n-th row or image of it where it exceeds the memory."""
        return self._observed.seen([name])[name]

    # --- one group ---

    @_alone
    def _search(self, group: SiteGroup, whole: Config, start: Assignment | None = None) -> Searched:
        begun, seconds, tried = time.thread_time(), 0.0, []
        config, ordered = choices_of(group, whole), self._shared.ordered(whole)
        fold, shared = self._fold(group, whole, ordered)
        if start is not None and isinstance(config.search, Search) and _fits(start, config):
            fold = start.fold  # its quantizers belong to operands with this fold
        for activation in formats_of(group.first, config):
            product = self._product(group, config, fold, activation)
            formats = product.left.format, product.right.format
            bits, order = None if fold is None else config.activation_bits, self._shared.order(whole)
            key: Any = (group.name, *formats, config.search, bits, order)
            tabled = (*key, config.tables)
            if start is not None or key not in self._found:
                operands = ordered and operands_of(self.program, group, ordered, config, fold, activation)
                given = replace(product, shared=shared, ordered=operands or None, start=start)
                given = replace(given, **self._shared.wanted(group, self._requests[group.name].names, config))
                self._found[key] = SEARCHES[type(config.search)].search_product(given, config.search)
                self._found.pop(tabled, None)
            if tabled not in self._found:
                self._found[tabled] = with_table(product, self._found[key], config.tables)
            tried.append(Searched(group, product, self._found[tabled]))
            if start is not None:  # without a start these choices may find other quantizers
                del self._found[key], self._found[tabled]
            begun, spent = time.thread_time(), time.thread_time() - begun
            self._seconds[tabled] = max(spent, self._seconds.get(tabled, 0.0))  # a known assignment takes no time
            seconds += self._seconds[tabled]
        return replace(max(tried, key=lambda searched: searched.assignment.sqnr), seconds=seconds)

    def _product(self, group: SiteGroup, config: Config, fold: Fold | None, activation: Format) -> Product:
        """The group's product, with its operands in the float network."""
        seen = self._observed.seen(self._requests[group.name].names)
        left, right = operands_of(self.program, group, seen, config, fold, activation)
        return Product(group.first.role, left, right, fold)

    def _fold(
        self, group: SiteGroup, whole: Config, ordered: Mapping[str, Tensor] | None
    ) -> tuple[Fold | None, UniformQuantizer | None]:
        """The fold of the group's norm, and the quantizer that comes with it; None where the method has none."""
        pair = group.pair
        if pair is None or self._unfolded(pair, choices_of(group, whole)):
            return None, None
        search, bits = whole.search, whole.at(pair.sites).activation_bits
        key = ("fold", pair.norm.name, bits, search, self._shared.order(whole))
        if key not in self._found:
            seen = self._observed.seen(self._requests[group.name].names) if ordered is None else ordered
            read = {site.left for site in self.sites if site.name in pair.sites}
            values = joined([seen[name].flatten(0, -2) for name in sorted(read)], dim=0)
            self._found[key] = SEARCHES[type(search)].fold_channels(values, bits, search)
        return cast(tuple[Fold, UniformQuantizer | None], self._found[key])

    # --- all groups ---

    def fingerprint(self, config: Config, start: Mapping[str, Assignment] | None = None) -> str:
        """A digest of all that decides what the searches and stages find. ValueError where no file stores that."""
        check_storable(config.search)
        strides = [self._observed.stride(request.names) for request in self._requests.values()]
        begun = [(name, assignment_json(each)) for name, each in sorted((start or {}).items())]
        fitted = take(self.unlabelled, range(config.images_fitted)) if config.images_fitted else ()
        memory = self._memory if config.stages else 0  # for these it decides what is summed together
        images = [("image", value) for value in (*self.images, *fitted)]
        graph = self.program.inputs, self.program.nodes, self.program.output
        choices = (graph, config.to_json(), self.seed, memory, strides, source_hash(), torch.__version__, begun)
        return fingerprint(choices, (*self.program.tensors.items(), *images, *self._shared.probes()))

    def _key(self, group: SiteGroup, config: Config) -> Any:
        """All that the assignment of a group hangs on, besides what this calibration has."""
        return group.name, replace(choices_of(group, config), pinned=(), stages=()), self._shared.order(config)

    def _splits(self) -> list[list[SiteGroup]]:
        """The groups in splits whose operands are held together, in order."""
        stage = {group.name: self._observed.stage(self._requests[group.name].names) for group in self.groups}
        ordered = sorted(self.groups, key=lambda group: stage[group.name])
        return [list(groups) for _, groups in groupby(ordered, key=lambda group: stage[group.name])]

    def product(self, group: SiteGroup, assignment: Assignment, config: Config) -> Product:
        """The group's product, with its operands in the float network, folded as the assignment has it."""
        choices = choices_of(group, config)
        return self._product(group, choices, assignment.fold, formats_of(group.first, choices)[0])


def _given(start: Assigned, groups: Sequence[SiteGroup]) -> dict[str, Assignment]:
    """Assignments from which searches begin by the names of their groups; ValueError unless all groups have one."""
    given = {group.name: assignment for group, assignment in start}
    if given and given.keys() != {group.name for group in groups}:
        raise ValueError(
            "start has other sites than this model: give the assignments of all sites, as `assign` returns them, "
            "since several sites share a fold"
        )
    return given


def _check_known(names: Collection[str], sites: Sequence[Site]) -> None:
    unknown = set(names) - {site.name for site in sites}
    if unknown:
        raise ValueError(f"{', '.join(sorted(unknown))}: no such site; `sites` lists all {len(sites)}")


def _of_float32(model: nn.Module) -> nn.Module:
    """The model; a copy where weights or buffers are of inference mode, or in half precision, then in float32."""
    values = (*model.parameters(), *model.buffers())
    halves = any(value.dtype in _HALVES for value in values)
    if halves or any(value.is_inference() for value in values):
        model = copy.deepcopy(model)
    return model.float() if halves else model


def _in_float32(inputs: Sequence[Any]) -> tuple[Any, ...]:
    """The inputs, those in half precision in float32, and copies of those that were made in inference mode."""

    def taken(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        value = value.clone() if value.is_inference() else value
        return value.float() if value.dtype in _HALVES else value

    return tuple(map(taken, inputs))


def _finite(inputs: Sequence[Any]) -> tuple[Tensor, ...]:
    """The tensors among the inputs; what holds NaN or infinite values is refused."""
    images = tuple(value for value in inputs if isinstance(value, Tensor))
    if any(value.is_meta for value in images):
        raise CalibrationError("the calibration images are on the meta device, which holds no values: give images")
    if not all(bool(torch.isfinite(image).all()) for value in images for image in value):
        raise CalibrationError("the calibration images hold NaN or infinite values")
    return images


def _more_like(images: Sequence[Tensor], given: Tensor | Sequence[Any]) -> tuple[Tensor, ...]:
    """Other images as tensors; those that have other channels, dimensions or types are refused."""
    more = _finite(_in_float32(batched(given)))
    told, wanted = ([(value.ndim, value.shape[1:2], value.dtype) for value in values] for values in (more, images))
    if told != wanted:
        raise CalibrationError(
            f"the unlabelled images are {_told(more)}, and those that calibrate {_told(images)}: only their number "
            "and height and width may differ"
        )
    return more


def _told(images: Sequence[Tensor]) -> str:
    return " and ".join(f"{tuple(value.shape)} of {str(value.dtype).removeprefix('torch.')}" for value in images)


def _fits(start: Assignment, config: Config) -> bool:
    """Whether the left quantizer of an assignment has the bits that these choices ask for."""
    return start.left is not None and start.left.bits == config.activation_bits


def digest(images: Sequence[Tensor]) -> str:
    """A short fingerprint of the calibration images, all inputs together."""
    if not images:
        return ""
    content = hashlib.sha256()
    for value in images:
        content.update(value.detach().cpu().contiguous().to(torch.float32).reshape(-1).numpy().data)
    return content.hexdigest()[:16]
