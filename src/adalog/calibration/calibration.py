"""Capture a model, observe the operands of its sites, search their quantizers, and build the quantized model."""

import copy
import functools
import hashlib
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from numbers import Integral
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from adalog.calibration import operands
from adalog.calibration.judge import output_errors
from adalog.calibration.observe import Observations
from adalog.calibration.outliers import even_out_values
from adalog.calibration.partial import Partial, assignment_json, fingerprint
from adalog.calibration.schedule import SERIAL, Resources, run_searches, units_of_work
from adalog.calibration.shared import ProductFields
from adalog.calibration.stages import check_images, run_stages
from adalog.calibration.values import Values
from adalog.choices import Correction
from adalog.config import Config, check_config
from adalog.device import default_memory, full_float32_on, waits_for_launches
from adalog.errors import CalibrationError
from adalog.graph.capture import Sizes, as_batch, capture, take
from adalog.graph.modules import float_module
from adalog.graph.program import Program
from adalog.graph.rewrite import Assigned, SiteGroup, group_sites, rewrite
from adalog.graph.sites import Site, find_blocks, find_pairs, find_refused, find_sites, with_heads
from adalog.graph.tracing import trace
from adalog.ledger import ledger_of
from adalog.model import QuantizedModel
from adalog.quantized import QuantizedProgram
from adalog.quantizers import FLOAT_BITS, Assignment, Fold, Format, UniformQuantizer
from adalog.search.bounds import Search, uniform_is_closer
from adalog.search.product import Product
from adalog.search.tables import with_tables
from adalog.version import source_hash

F = TypeVar("F", bound=Callable[..., Any])
_HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class SearchResult:
    """The result of the search of one product.

    Args:
        group: The sites that were searched together.
        product: The operands of the search.
        assignment: The best quantizers.
        seconds: CPU time of the search in its thread, even if it was made earlier for other choices that share it.
    """

    group: SiteGroup
    product: Product
    assignment: Assignment
    seconds: float = 0.0

    @property
    def sites(self) -> tuple[Site, ...]:
        """The sites that were searched together."""
        return self.group.sites

    def mean_square_error(self) -> float:
        """Return the mean squared error over all elements of the product's output."""
        left, right = self.product.left, self.product.right
        noise = self.product.output_power(self.assignment.left, self.assignment.right)[1]
        return noise / (left.values[..., 0].numel() * right.values.shape[-2])


def _alone(method: F) -> F:
    """Let a method of `Calibration` run without gradients and TF32, and outside inference mode, in any thread.

    Stages take gradients through the results, which tensors of inference mode do not allow.
    """

    @functools.wraps(method)
    def run(calibration: "Calibration", *args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode(False), torch.no_grad(), full_float32_on(calibration.images[0].device):
            return method(calibration, *args, **kwargs)

    return cast(F, run)


class Calibration:
    """A captured model with the operands of its sites, taken from one forward of the calibration images.

    Quantizing again with other choices repeats only the searches whose choices differ. The operands are those of the
    float network, as in the released code. If all of them fit in memory, they are kept for further choices; otherwise
    each call runs another forward. If a single operand, or its search, does not fit, only every n-th row of it is used
    (every n-th image or window for attention and convolutions).

    Args:
        model: The model to quantize, in evaluation mode. It is not changed.
        images: Images (N, 3, H, W), which all calibrate; or several positional inputs, (N, ...) each. An input that is
            not a tensor is a constant.
        unlabelled: Images that stages after the search may fit, as `images`. Default: the calibration images.
        seed: Seed of all random choices of searches and stages.
        memory: Bytes, half for the operands and half for the temporaries of the searches. The model, the images and the
            results take additional memory. Default: `device.default_memory`.
        sizes: "fixed", or "free" to let the quantized model take images of other heights and widths.

    Attributes:
        program: The captured model, with the values of attention evened out (`even_out_values`).
        images: The calibration images, as a tuple of inputs.
        unlabelled: The images that stages may fit, as a tuple of inputs.
        sites: The multiplications that can be quantized.
        pairs: The norms that may be folded, with the linears that read them.
        groups: The sites that are searched together, in order of execution.
        seed: The seed.

    Raises:
        CaptureError: If the model cannot be exported, or uses an operation that adalog does not support.
        CalibrationError: If the model has no multiplication to quantize, or if the images are not finite.
        ValueError: If the seed or `memory` is not a whole number, or if `memory` is too small for 1,024 rows of an
            operand.

    Warns:
        UserWarning: If all images hold one value, or if a convolution reads pixel values from 0 to 255 as they are.

    Examples:
        >>> import adalog
        >>> from adalog import demo
        >>> calibration = adalog.Calibration(demo.load_model(), demo.calibration_images()[:32])
        >>> w4a4 = calibration.quantize(adalog.Config.preset("w4a4"))
        >>> w3a3 = calibration.quantize(adalog.Config.preset("w3a3"))  # on the same operands
    """

    @torch.inference_mode(False)  # some searches and stages take gradients, which inference mode forbids
    def __init__(
        self,
        model: nn.Module,
        images: Tensor | Sequence[Any],
        *,
        unlabelled: Tensor | Sequence[Any] | None = None,
        seed: int = 0,
        memory: int | None = None,
        sizes: Sizes = "fixed",
    ):
        check_settings(seed, memory)
        inputs = _in_float32(as_batch(images))
        self.images = _finite(inputs)
        self.unlabelled = self.images if unlabelled is None else _more_like(self.images, unlabelled)
        self.program = capture(_of_float32(float_module(model)), inputs, sizes)
        self.sites = with_heads(find_sites(self.program), self.program, self.images)
        _warn_of_values(self.images, self.sites)
        with full_float32_on(self.images[0].device):
            self.program = even_out_values(self.program, self.sites, take(self.images, [0, 1]))
        self.pairs = find_pairs(self.program, self.sites, take(self.images, [0, 1]))
        self.seed = seed
        self.groups = group_sites(self.sites, self.pairs)
        if not self.sites:
            reasons = dict.fromkeys(site.refusal for site in find_refused(self.program))
            because = f": {', and '.join(reasons)}" if reasons else ""
            raise CalibrationError(f"{type(model).__name__} has no multiplication that can be quantized{because}")
        self._blocks = find_blocks(self.program)
        self._memory = memory = default_memory(self.images[0].device) if memory is None else memory
        self._one_by_one = not waits_for_launches(self.images[0].device)
        self._shapes = trace(self.program, self.images)
        requests = (operands.request_of(self.program, group, self.sites, self._shapes) for group in self.groups)
        self._requests = {request.site: request for request in requests}
        self._observed = Observations(self.program, self.images, self._requests.values(), memory // 2)
        head = frozenset(self._blocks[-1].nodes)
        self._unfolded = functools.partial(operands.why_unfolded, sites=self.sites, shapes=self._shapes, head=head)
        self._shared = ProductFields(
            self.program, self.images, self.groups, self._blocks, self._observed, seed, self._unfolded, memory // 2
        )
        self._searched: dict[Any, Any] = {}  # folds and assignments, by everything that they depend on
        self._assigned: dict[Any, Assignment] = {}  # results of whole searches, including those of other ranks
        self._seconds: dict[Any, float] = {}

    def quantize(self, config: Config, resources: Resources = SERIAL, *, start: Assigned = ()) -> QuantizedModel:
        """Quantize the model with these choices.

        Args:
            config: The bits, quantizers and search.
            resources: The threads and processes, the file to continue from, and the callback for progress. Each process
                has made the same calibration. Default: one thread.
            start: Assignments from `assign`. The search of `Search` begins from them and never ends with a larger
                error.

        Returns:
            The quantized model.

        Raises:
            CalibrationError: If there are fewer images than the stages fit, or if values inside the model are not
                finite.
            ValueError: If a pattern of `config.pinned` matches no site.
        """
        return QuantizedModel(self.build_program(self.assign(config, resources, start=start), config))

    @_alone
    def assign(
        self, config: Config, resources: Resources = SERIAL, *, start: Assigned = ()
    ) -> list[tuple[SiteGroup, Assignment]]:
        """Search the quantizers of every group of sites, and run the stages; errors are those of `quantize`.

        Args:
            config: As in `quantize`.
            resources: As in `quantize`.
            start: As in `quantize`.

        Returns:
            Each group with its assignment, in order of execution.
        """
        check_config(config)
        operands.check_pinned(config, self.sites)
        check_images(config, self.unlabelled)
        self._shared.prepare(config)
        starts = _starts(start, self.groups)
        path, rank = resources.partial, resources.ranks.rank
        partial = None if path is None else Partial(Path(path), self.fingerprint(config, starts), rank)
        keys = {group.name: self._key(group, config) for group in self.groups if not starts}

        def search(groups: Sequence[SiteGroup]) -> list[Assignment]:
            start = starts.get(groups[0].name)
            return [result.assignment for result in self._search_together(groups, config, start)]

        work = {
            name: units_of_work(request.scratch // self._observed.stride(request.names))
            for name, request in self._requests.items()
        }
        assignments = run_searches(
            [[[group] for group in split] if starts else self._stacks(split, config) for split in self._splits()],
            search,
            resources,
            known={name: self._assigned[key] for name, key in keys.items() if key in self._assigned},
            bytes_of={name: request.scratch for name, request in self._requests.items()},
            work_of=work,
            memory=self._memory // 2,
            device=self.images[0].device,
            partial=partial,
        )
        self._assigned |= {key: assignments[name] for name, key in keys.items()}
        assigned = [(group, assignments[group.name]) for group in self.groups]
        if config.stages:

            def judge(group: SiteGroup, now: Assignment) -> Assignment:
                return self.product(group, now, config).assign(now.left, now.right)

            assigned = run_stages(config.stages, self.unlabelled, assigned, self._shared, judge, resources, partial)
        resources.report(sum(work.values()), sum(work.values()))
        return assigned

    @_alone
    def build_program(self, assigned: Assigned, config: Config) -> QuantizedProgram:
        """Build the quantized program from the assignments of all groups.

        Args:
            assigned: Each group with its assignment, as `assign` returns them.
            config: The choices with which they were found.

        Returns:
            The quantized program. `QuantizedModel` wraps it.
        """
        refusals = {}
        for pair in self.pairs:
            if reason := pair.refusal or self._unfolded(pair, config.for_sites(pair.sites)):
                refusals[pair.name] = f"not folded: {reason}"
        refusals |= {site.name: f"stays float: {site.refusal}" for site in find_refused(self.program)}
        for group, assignment in assigned:
            if operands.choices_of(group, config) != config and assignment.left is None and assignment.right is None:
                refusals |= {site.name: f"stays float: pinned at {FLOAT_BITS} bits" for site in group.sites}
        for name, request in self._requests.items():
            if (stride := self._observed.stride(request.names)) > 1:
                part = f"searched on a part of its values: one row, image or window in {stride}"
                refusals.setdefault(name, part)
        if any(isinstance(stage, Correction) for stage in config.stages):
            weighted = [(group.first.role, now) for group, now in assigned if now.right is not None]
            biases = [now.bias for role, now in weighted if role in ("linear", "conv")]
            if biases and all(bias is None for bias in biases):
                refusals["the correction"] = "not applied: it does not lower the error of the model's output"
        provenance = {"seed": self.seed, "calibration": digest(self.images), "images": len(self.images[0])}
        if fitted := take(self.unlabelled, range(config.images_fitted)) if config.images_fitted else ():
            provenance |= {"fitted": digest(fitted), "fitted_images": config.images_fitted}
        example = tuple(value[:0] for value in self.images)
        ledger = tuple(ledger_of(self.program, assigned, operands.pin_owners(self.groups, config)))
        return QuantizedProgram(rewrite(self.program, assigned), config, ledger, refusals, provenance, example)

    @_alone
    def output_error(self, program: Program) -> dict[str, float]:
        """Measure how far a quantized program's outputs are from the float model's, on at most 64 calibration images.

        Args:
            program: A program from `build_program`.

        Returns:
            "kl": the mean KL divergence [nats] of outputs that are logits. "relative": the squared error of other
            outputs, divided by their power. Both are taken after the best common factor, and averaged over outputs.
        """
        floats = Values(self.program, self.images, self._memory // 2, self._blocks)
        return output_errors(self.program, floats, [program])[0]

    def search(self, config: Config, sites: Collection[str] | None = None) -> list[SearchResult]:
        """Search products and return their assignments together with their operands, even if these exceed the memory.

        Args:
            config: The bits, quantizers and search. Stages are not run.
            sites: Names of sites. Only their products are searched. Default: all products.

        Returns:
            One result per product, in order of execution.

        Raises:
            ValueError: If a name or a pattern of `config.pinned` matches no site.
        """
        results = {result.group.name: result for result in self.iter_search(config, sites)}
        return [results[group.name] for group in self.groups if group.name in results]

    def iter_search(self, config: Config, sites: Collection[str] | None = None) -> Iterator[SearchResult]:
        """Search products one after the other within the memory; errors are those of `search`.

        Args:
            config: As in `search`.
            sites: As in `search`.

        Yields:
            One result per product, in the order in which operands are observed.
        """
        check_config(config)
        operands.check_pinned(config, self.sites)
        if unknown := set(sites or ()) - {site.name for site in self.sites}:
            names = ", ".join(sorted(unknown))
            raise ValueError(f"{names}: no such site; `Calibration.sites` lists all {len(self.sites)}")
        self._shared.prepare(config)
        for group in chain.from_iterable(self._splits()):
            if sites is None or any(site.name in sites for site in group.sites):
                yield self._search_together([group], config)[0]

    @_alone
    def evaluate(self, searched: SearchResult, config: Config) -> SearchResult:
        """Evaluate another calibration's assignment on the images of this one.

        Args:
            searched: A result of `search` of another calibration of the same model.
            config: The choices with which it was found.

        Returns:
            The same assignment with the operands from these images, for `mean_square_error`.
        """
        group = next(group for group in self.groups if group.name == searched.group.name)
        fold, format_ = searched.assignment.fold, searched.product.left.format
        return replace(searched, product=self._product(group, operands.choices_of(group, config), fold, format_))

    def probe(self, gradient: Tensor) -> None:
        """Let searches and stages weight errors by the gradient of a given loss, instead of by random gradients.

        Args:
            gradient: Gradient of the loss with respect to the model's only output, (N, ...).
        """
        self._shared.probe(gradient)
        for cache in (self._searched, self._assigned, self._seconds):
            cache.clear()

    def operand(self, name: str) -> Tensor:
        """Return an operand in full precision.

        Args:
            name: Name of the value in the program, such as `left` of a site.

        Returns:
            The values; only every n-th row or image of them if they exceed the memory.
        """
        return self._observed.read([name])[name]

    # --- one group ---

    @_alone
    def _search_together(
        self, groups: Sequence[SiteGroup], overall: Config, start: Assignment | None = None
    ) -> list[SearchResult]:
        """Search the products of groups that are alike (`_stacks`), or return cached results.

        Of several formats, keep the best SQNR. start: only for a single group.
        """
        start_time, seconds = time.thread_time(), [0.0] * len(groups)
        candidates: list[list[SearchResult]] = [[] for _ in groups]
        config, order = operands.choices_of(groups[0], overall), self._shared.order(overall)
        folds = self._folds(groups, overall)
        left = None if start is None or not isinstance(config.search, Search) else start.left
        if start is not None and left is not None and left.bits == config.activation_bits:
            folds = [(start.fold, folds[0][1])]  # its quantizers belong to operands with this fold
        cache = self._searched if start is None else {}  # without a start these choices may find other quantizers
        for activation in operands.formats_of(groups[0].first, config):
            if candidates[0] and groups[0].first.role in ("linear", "conv"):  # the first products have the same values
                firsts = [results[0].product for results in candidates]
                products = [replace(first, left=operands.in_format(first.left, activation, config)) for first in firsts]
            else:
                pairs = zip(groups, folds, strict=True)
                products = [self._product(group, config, fold, activation) for group, (fold, _) in pairs]
            members: Sequence[int] = range(len(groups))
            if candidates[0] and start is None and operands.rarely_uniform(groups[0].first):  # a start may be uniform
                members = _maybe_uniform(products, [results[0] for results in candidates], config)
            keys: dict[int, Any] = {}
            for index in members:
                formats = products[index].left.format, products[index].right.format
                bits = None if folds[index][0] is None else config.activation_bits
                keys[index] = (groups[index].name, *formats, config.search, bits, order)
            if missing := [index for index in members if keys[index] not in cache]:
                ready = [self._with_needs(groups[i], products[i], folds[i][1], overall) for i in missing]
                results = config.search.search_together([replace(product, start=start) for product in ready])
                cache |= {keys[index]: assignment for index, assignment in zip(missing, results, strict=True)}
            tabled: dict[int, Any] = {index: (*key, config.tables) for index, key in keys.items()}
            if missing := [index for index in members if tabled[index] not in cache]:
                plain = [cache[keys[index]] for index in missing]
                results = with_tables([products[index] for index in missing], plain, config.tables)
                cache |= {tabled[index]: assignment for index, assignment in zip(missing, results, strict=True)}
            start_time, spent = time.thread_time(), time.thread_time() - start_time
            for index, key in tabled.items():
                candidates[index].append(SearchResult(groups[index], products[index], cache[key]))
                # A cached assignment takes no time.
                self._seconds[key] = max(spent / len(members), self._seconds.get(key, 0.0))
                seconds[index] += self._seconds[key]
        best = [max(results, key=lambda result: result.assignment.sqnr) for results in candidates]
        return [replace(result, seconds=duration) for result, duration in zip(best, seconds, strict=True)]

    def _with_needs(
        self, group: SiteGroup, product: Product, shared: UniformQuantizer | None, overall: Config
    ) -> Product:
        """Return the product with all that its search needs. shared: the quantizer that its fold's channels share."""
        config, ordered = operands.choices_of(group, overall), self._shared.operands_in_order(overall)
        left = product.left
        if config.search.needs.squares:
            operands.check_squares(group.name, left, product.right)
        in_order = ordered and operands.operands_of(self.program, group, ordered, config, product.fold, left.format)
        needs = self._shared.gather_fields(group, self._requests[group.name].names, config)
        return replace(product, shared=shared, ordered=in_order or None, **needs)

    def _product(self, group: SiteGroup, config: Config, fold: Fold | None, activation: Format) -> Product:
        """Return the group's product, with its operands in the float network."""
        values = self._observed.read(self._requests[group.name].names)
        left, right = operands.operands_of(self.program, group, values, config, fold, activation)
        rows = self._shared.rows(group, self._requests[group.name].names, config)
        return Product(group.first.role, left if rows is None else operands.with_rows(left, rows), right, fold)

    def _folds(self, groups: Sequence[SiteGroup], config: Config) -> list[tuple[Fold | None, UniformQuantizer | None]]:
        """Return the fold of each group's norm and the quantizer that its channels share, or None for each."""
        ordered = self._shared.operands_in_order(config)
        keys: list[Any] = []
        missing: dict[Any, dict[Any, tuple[Tensor, Tensor]]] = {}  # by bits and shapes, which are searched together
        search = config.search
        for group in groups:
            pair = group.pair
            if pair is None or self._unfolded(pair, operands.choices_of(group, config)):
                keys.append(None)
                continue
            bits = config.for_sites(pair.sites).activation_bits
            key = ("fold", pair.norm.name, bits, search, self._shared.order(config))
            keys.append(key)
            if key in self._searched:
                continue
            names = self._requests[group.name].names
            readers = [site for site in self.sites if site.name in pair.sites]
            observed = self._observed.read(names) if ordered is None else ordered
            inputs = sorted({site.left for site in readers})
            values = operands.join([observed[name].flatten(0, -2) for name in inputs], dim=0)
            rows = self._shared.rows(group, names, config)
            if rows is not None and len(rows) == len(values):
                values = values[rows]
            weight = torch.cat([self.program.tensors[site.right] for site in readers])
            missing.setdefault((bits, values.shape, weight.shape), {})[key] = values, weight
        for (bits, *_), norms in missing.items():
            values, weights = zip(*norms.values(), strict=True)
            self._searched |= dict(zip(norms, search.fold_together(values, bits, weights), strict=True))
        return [(None, None) if key is None else self._searched[key] for key in keys]

    # --- all groups ---

    def fingerprint(self, config: Config, start: Mapping[str, Assignment] | None = None) -> str:
        """Return a digest of everything on which the results of the searches and stages depend.

        Args:
            config: The choices.
            start: Assignments from which searches begin, by the name of the group.

        Returns:
            The digest. A partial file with another digest is not used.

        Raises:
            ValueError: If the results of this search cannot be stored.
        """
        if config.search.why_unstored:
            raise ValueError(config.search.why_unstored)
        strides = [self._observed.stride(request.names) for request in self._requests.values()]
        start_json = [(name, assignment_json(assignment)) for name, assignment in sorted((start or {}).items())]
        fitted = take(self.unlabelled, range(config.images_fitted)) if config.images_fitted else ()
        memory = self._memory if config.stages else 0  # the order of sums in a stage depends on the memory
        images = [("image", value) for value in (*self.images, *fitted)]
        graph = self.program.inputs, self.program.nodes, self.program.output
        choices = graph, config.to_json(), self.seed, memory, strides, source_hash(), torch.__version__, start_json
        return fingerprint(choices, (*self.program.tensors.items(), *images, *self._shared.probes()))

    def _key(self, group: SiteGroup, config: Config) -> Any:
        """Return the cache key of a group's assignment: everything that it depends on besides this calibration."""
        return group.name, replace(operands.choices_of(group, config), pinned=(), stages=()), self._shared.order(config)

    def _splits(self) -> list[list[SiteGroup]]:
        """Split the groups into lists whose operands are held in memory together, in order."""
        stage = {group.name: self._observed.stage(self._requests[group.name].names) for group in self.groups}
        ordered = sorted(self.groups, key=lambda group: stage[group.name])
        return [list(groups) for _, groups in groupby(ordered, key=lambda group: stage[group.name])]

    def _stacks(self, groups: Sequence[SiteGroup], config: Config) -> list[list[SiteGroup]]:
        """Split groups into lists that are searched together.

        On an accelerator, where the number of operations decides how long a search takes, these are groups of the same
        shapes and choices, as many as the memory for temporaries allows.
        """
        if self._one_by_one:
            return [[group] for group in groups]
        stacks: dict[Any, list[list[SiteGroup]]] = {}
        for group in groups:
            alike = stacks.setdefault(self._alike(group, config), [[]])
            scratch = sum(self._requests[group.name].scratch for group in alike[-1])
            if alike[-1] and scratch + self._requests[group.name].scratch > self._memory // 2:
                alike.append([])
            alike[-1].append(group)
        return list(chain.from_iterable(stacks.values()))

    def _alike(self, group: SiteGroup, config: Config) -> Any:
        """Return a key: groups with the same key can be searched together."""
        site, choices = group.first, operands.choices_of(group, config)
        if site.role == "conv":
            return group.name
        names = [*group.read, site.right] if site.role in ("qk", "av") else group.read
        shapes = [tuple(self._shapes[name].shape) for name in names]
        weights = [tuple(self.program.tensors[site.right].shape) for site in group.sites if site.role == "linear"]
        headed = site.left in site.headed, site.right in site.headed
        folded = group.pair is not None and not self._unfolded(group.pair, choices)
        formats = tuple(operands.formats_of(site, choices))
        return site.role, *map(tuple, (shapes, weights, headed)), folded, formats, self._key(group, config)[1]

    def product(self, group: SiteGroup, assignment: Assignment, config: Config) -> Product:
        """Return the product of a group, with its operands in the float network.

        Args:
            group: The sites that are searched together, one of `groups`.
            assignment: The assignment whose fold is applied to the operands.
            config: The choices.

        Returns:
            The product.
        """
        choices = operands.choices_of(group, config)
        return self._product(group, choices, assignment.fold, operands.formats_of(group.first, choices)[0])


def check_settings(seed: object, memory: object) -> None:
    """Raise ValueError unless the seed is valid for PyTorch and the memory, if it is not None, is in bytes."""
    if not isinstance(seed, Integral) or isinstance(seed, bool) or not 0 <= int(seed) < 2**63:
        raise ValueError(f"seed = {seed!r} is not a whole number from 0 to 2**63 - 1")
    if memory is not None and (not isinstance(memory, Integral) or isinstance(memory, bool) or int(memory) < 1):
        raise ValueError(f"memory = {memory!r} is not a number of bytes: give one such as 2 << 30")


def _maybe_uniform(products: Sequence[Product], results: Sequence[SearchResult], config: Config) -> list[int]:
    """Return the numbers of the products whose left values a uniform quantizer fits better than the one found."""
    quantizers = {
        index: result.assignment.left for index, result in enumerate(results) if result.assignment.left is not None
    }
    if not quantizers:
        return []
    lefts = [products[index].left for index in quantizers]
    closer = uniform_is_closer(lefts, list(quantizers.values()), cast(Search, config.search))
    return [index for index, uniform in zip(quantizers, closer, strict=True) if uniform]


def _starts(start: Assigned, groups: Sequence[SiteGroup]) -> dict[str, Assignment]:
    """Return the assignments from which searches begin, by group. Raises ValueError unless all groups have one."""
    starts = {group.name: assignment for group, assignment in start}
    if starts and starts.keys() != {group.name for group in groups}:
        raise ValueError(
            "start has other sites than this model: give exactly the assignments that `assign` returns, "
            "because sites may share a fold"
        )
    return starts


def _of_float32(model: nn.Module) -> nn.Module:
    """Return the model, or a copy in float32 if weights or buffers are in half precision or of inference mode."""
    values = (*model.parameters(), *model.buffers())
    halves = any(value.dtype in _HALVES for value in values)
    if halves or any(value.is_inference() for value in values):
        model = copy.deepcopy(model)
    return model.float() if halves else model


def _in_float32(inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Return the inputs, with half precision converted to float32 and tensors of inference mode copied."""

    def prepare(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        value = value.clone() if value.is_inference() else value
        return value.float() if value.dtype in _HALVES else value

    return tuple(map(prepare, inputs))


def _finite(inputs: Sequence[Any]) -> tuple[Tensor, ...]:
    """Return the tensors among the inputs. Raises CalibrationError for NaN or infinite values."""
    images = tuple(value for value in inputs if isinstance(value, Tensor))
    if any(value.is_meta for value in images):
        raise CalibrationError(
            "the calibration images are on the meta device, which holds no values: give images on another device"
        )
    if not all(bool(torch.isfinite(value).all()) for value in images):
        raise CalibrationError("the calibration images contain NaN or infinite values: check how they are prepared")
    return images


def _warn_of_values(images: Sequence[Tensor], sites: Sequence[Site]) -> None:
    """Warn if all images are one value, or if a convolution reads pixel values that are not normalised."""
    floats = [value for value in images if value.is_floating_point() and value.numel()]
    reads = any(site.role == "conv" and site.left_source.kind == "input" for site in sites)
    if floats and len(floats) == len(images) and all(bool(value.min() == value.max()) for value in floats):
        warnings.warn("all calibration images hold one and the same value: check how they are prepared", stacklevel=2)
    elif reads and any(value.ndim == 4 and _holds_pixels(value) for value in floats):
        warnings.warn(
            "the calibration images look like pixel values from 0 to 255, and the first convolution reads them as they "
            "are: normalise them as the model expects",
            stacklevel=2,
        )


def _holds_pixels(values: Tensor) -> bool:
    """Return True for whole numbers from 0 to 255 that are larger than those of labels or masks."""
    return bool(values.min() >= 0 and 20 < values.max() <= 255 and torch.equal(values, values.round()))


def _more_like(images: Sequence[Tensor], unlabelled: Tensor | Sequence[Any]) -> tuple[Tensor, ...]:
    """Return the unlabelled images as tensors. Raises CalibrationError for other channels, dimensions or dtypes."""
    more = _finite(_in_float32(as_batch(unlabelled)))
    signatures, expected = (
        [(value.ndim, value.shape[1:2], value.dtype) for value in values] for values in (more, images)
    )
    if signatures != expected:
        raise CalibrationError(
            f"the unlabelled images are {_describe(more)}, but the calibration images are {_describe(images)}: only "
            "the number, height and width may differ"
        )
    return more


def _describe(images: Sequence[Tensor]) -> str:
    """Describe the shapes and dtypes of images for a message."""
    return " and ".join(f"{tuple(value.shape)} of {str(value.dtype).removeprefix('torch.')}" for value in images)


def digest(images: Sequence[Tensor]) -> str:
    """Return a short digest of images, over all inputs."""
    if not images:
        return ""
    content = hashlib.sha256()
    for value in images:
        content.update(value.detach().cpu().contiguous().to(torch.float32).reshape(-1).numpy().data)
    return content.hexdigest()[:16]
