"""A captured model with what its sites see, and all that makes a quantized model of it."""

import difflib
import hashlib
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import adalog
from adalog.calibration import refine
from adalog.calibration.gradients import given_probe, hessian_probe, noise_probe, squared_gradients
from adalog.calibration.observe import Need, Observed, measured
from adalog.calibration.operands import choices_of, formats_of, in_shape_of_product, operands_of, product_elements
from adalog.calibration.ordered import observe_in_order
from adalog.calibration.partial import Partial, assignment_json
from adalog.calibration.schedule import Progress, run_searches
from adalog.choices import BlockRefinement, RangeSearch, Search
from adalog.config import Config
from adalog.errors import CalibrationError
from adalog.graph.capture import batched, capture, take
from adalog.graph.rewrite import Assigned, SiteGroup, group_sites, rewritten
from adalog.graph.sites import Pair, find_blocks, find_pairs, find_parts, find_refused, find_sites
from adalog.ledger import ledger_of
from adalog.model import QuantizedModel
from adalog.quantized import QuantizedProgram
from adalog.quantizers import FLOAT_BITS, Assignment, Fold, UniformQuantizer
from adalog.search import SEARCHES
from adalog.search.operand import Format
from adalog.search.product import Product, with_table

MEMORY = 2 << 30  # bytes: half of them for what the sites saw, half for temporaries of the searches of all jobs
_BYTES_PER_ELEMENT = 16  # temporaries of a search, for each element of a left operand, more or less


@dataclass(frozen=True)
class Searched:
    """What was found for the sites of one product.

    product: the operands as they were searched. seconds: CPU time of a thread, when the assignment was found, even if
    that was for other choices that share this search.
    """

    group: SiteGroup
    product: Product
    assignment: Assignment
    seconds: float = 0.0

    def mean_square_error(self) -> float:
        """The mean over all elements of the product's output."""
        left, right = self.product.left, self.product.right
        noise = self.product.output_power(self.assignment.left, self.assignment.right)[1]
        return noise / (left.values[..., 0].numel() * right.values.shape[-2])


class Calibration:
    """A captured model with what its sites see in one forward of the calibration images.

    Quantizing again with other choices repeats only the searches whose choices differ.
    """

    def __init__(self, model: nn.Module, images: Tensor | Sequence[Any], *, seed: int = 0, memory: int = MEMORY):
        """images: (N, 3, H, W), all of which calibrate; the released algorithm's inputs are the float network's.

        Or several positional inputs, (N, ...) each; what is no tensor is a constant.
        memory: bytes, half of them for what the sites saw, half for the searches' temporaries; the model, the images
        and what a caller asks for to keep come on top. If all that the sites saw fits (DeiT-T takes 0.8 GB at 32
        images), it stays for further configurations; else each configuration needs a forward. Where one operand, or its
        search, does not fit, every n-th row of the operand serves, of attention's products and convolutions every n-th
        image or window (`Observed`); ValueError where memory is too little for 1,024 rows.
        """
        inputs = batched(images)
        self.images = tuple(value for value in inputs if isinstance(value, Tensor))
        if not all(bool(torch.isfinite(image).all()) for value in self.images for image in value):
            raise CalibrationError("the calibration images hold NaN or infinite values")
        self.program = capture(model, inputs)
        self.sites = find_sites(self.program)
        self.pairs = find_pairs(self.program, self.sites, take(self.images, [0, 1]))
        self.seed = seed
        self.groups = group_sites(self.sites, self.pairs)
        if not self.sites:
            raise CalibrationError(f"{type(model).__name__} has no multiplication that could be quantized")
        self._blocks = find_blocks(self.program)
        self._memory = memory
        self._shapes = measured(self.program, self.images)
        self._needs = {group.name: self._need(group) for group in self.groups}
        self._observed = Observed(self.program, self.images, self._shapes, self._needs.values(), memory // 2)
        self._found: dict[Any, Any] = {}  # what searches share and find, by what it depends on
        self._seconds: dict[Any, float] = {}
        self._probe: Tensor | None = None

    # --- the story ---

    def quantize(
        self,
        config: Config,
        progress: Progress | None = None,
        *,
        jobs: int = 1,
        partial: Path | None = None,
        start: Assigned = (),
    ) -> QuantizedModel:
        """The model under these choices. jobs: sites searched at once, in threads; the result does not depend on it.

        partial: a file that finished searches are read from and added to; of no more use once the result is saved.
        start: assignments, as of `assign`, that searches of bounds begin from and never end worse than.
        """
        assigned = self.assign(config, progress, jobs=jobs, partial=partial, start=start)
        return QuantizedModel(self.finished(assigned, config))

    @torch.no_grad()
    def assign(
        self,
        config: Config,
        progress: Progress | None = None,
        *,
        jobs: int = 1,
        partial: Path | None = None,
        start: Assigned = (),
    ) -> list[tuple[SiteGroup, Assignment]]:
        """The assignment of every group under these choices, in order of execution. Arguments as of `quantize`."""
        self._check_pinned(config)
        self._prepare(config)
        given = {group.name: assignment for group, assignment in start}
        found = run_searches(
            self._splits(),
            lambda group: self._search(group, config, given.get(group.name)).assignment,
            bytes_of={name: need.scratch for name, need in self._needs.items()},
            memory=self._memory // 2,
            device=self.images[0].device,
            jobs=jobs,
            partial=None if partial is None else Partial(partial, self._fingerprint(config, given)),
            progress=progress,
        )
        assigned = [(group, found[group.name]) for group in self.groups]
        if config.refine is not None:
            assigned = self._refined(assigned, config)
        if progress is not None:
            progress(len(self.groups), len(self.groups), "")
        return assigned

    def finished(self, assigned: Assigned, config: Config) -> QuantizedProgram:
        """The quantized program of these assignments. config: the choices they were found under."""
        reasons = ((pair.name, pair.refusal or self._unfolded(pair, config.at(pair.sites))) for pair in self.pairs)
        refusals = {name: f"not folded: {reason}" for name, reason in reasons if reason}
        refusals |= {site.name: f"stays float: {site.refusal}" for site in find_refused(self.program)}
        for group in self.groups:
            choices = choices_of(group, config)
            if choices != config and choices.activation_bits == FLOAT_BITS:
                refusals |= {site.name: f"stays float: pinned to {FLOAT_BITS} bits" for site in group.sites}
        provenance = {"seed": self.seed, "calibration": digest(self.images), "images": len(self.images[0])}
        example = tuple(value[:0] for value in self.images)
        ledger = tuple(ledger_of(self.program, assigned))
        return QuantizedProgram(rewritten(self.program, assigned), config, ledger, refusals, provenance, example)

    def search(self, config: Config, sites: Collection[str] | None = None) -> list[Searched]:
        """Products' assignments under these choices, in order of execution: all, or those of these sites.

        They hold their operands, whatever the memory of this.
        """
        self._check_pinned(config)
        unknown = set(sites or ()) - {site.name for site in self.sites}
        if unknown:
            raise ValueError(f"{', '.join(sorted(unknown))}: no such site; there are {len(self.sites)}, as in `sites`")
        self._prepare(config)
        found = {}
        for group in (group for split in self._splits() for group in split):
            if sites is None or any(site.name in sites for site in group.sites):
                found[group.name] = self._search(group, config)
        return [found[group.name] for group in self.groups if group.name in found]

    @torch.no_grad()
    def judge(self, searched: Searched, config: Config) -> Searched:
        """The same assignment with what this calibration's images make of the operands: another one's, held out."""
        group = next(group for group in self.groups if group.name == searched.group.name)
        product = self._product(
            group, choices_of(group, config), searched.assignment.fold, searched.product.left.format
        )
        return replace(searched, product=product)

    def probe(self, gradient: Tensor) -> None:
        """Weight errors by this gradient of a loss by the model's only output, (N, ...), in place of random ones."""
        self._probe = gradient
        self._found.clear()
        self._seconds.clear()

    def operand(self, name: str) -> Tensor:
        """What a site's operand (`Site.left`, `Site.right`) was on the calibration images, in full precision.

        An operand larger than the memory is given by every n-th row or image.
        """
        return self._observed.seen([name])[name]

    # --- one group ---

    @torch.no_grad()  # a thread's own setting
    def _search(self, group: SiteGroup, whole: Config, start: Assignment | None = None) -> Searched:
        begun, seconds = time.thread_time(), 0.0
        config = choices_of(group, whole)
        search, module = config.search, SEARCHES[type(config.search)]
        ordered = self._seen_in_order(whole)
        fold, shared = self._fold(group, whole, ordered)
        if start is not None and isinstance(search, Search):
            fold = start.fold  # its quantizers are those of what this fold leaves; other choices may have found another
        tried = []
        for activation in formats_of(group.first, config):
            product = self._product(group, config, fold, activation)
            bits = None if fold is None else config.activation_bits
            key = (group.name, product.left.format, product.right.format, search, bits, self._order(whole))
            if key not in self._found or start is not None:
                wanted = module.needs(search)
                product = replace(product, shared=shared, start=start)
                if ordered is not None:
                    operands = operands_of(self.program, group, ordered, config, fold, activation)
                    product = replace(product, ordered=operands)
                if "weights" in wanted:
                    product = replace(product, weights=self._error_weights(group, config))
                if "row_splits" in wanted:
                    product = replace(product, row_splits=self._row_splits(group))
                found = module.search_product(product, search)
                if start is None:
                    self._found[key] = found
            else:
                found = self._found[key]
            tabled = (*key, config.tables)
            if tabled not in self._found or start is not None:
                found = with_table(product, found, config.tables)
                if start is None:
                    self._found[tabled] = found
            else:
                found = self._found[tabled]
            tried.append(Searched(group, product, found))
            begun, spent = time.thread_time(), time.thread_time() - begun
            self._seconds[tabled] = max(spent, self._seconds.get(tabled, 0.0))  # next to nothing where it was known
            seconds += self._seconds[tabled]
        return replace(max(tried, key=lambda searched: searched.assignment.sqnr), seconds=seconds)

    def _product(self, group: SiteGroup, config: Config, fold: Fold | None, activation: Format) -> Product:
        """The group's product on what the float network gives it."""
        seen = self._observed.seen(self._needs[group.name].names)
        left, right = operands_of(self.program, group, seen, config, fold, activation)
        return Product(group.first.role, left, right, fold)

    def _fold(
        self, group: SiteGroup, whole: Config, ordered: Mapping[str, Tensor] | None
    ) -> tuple[Fold | None, UniformQuantizer | None]:
        """The fold of a group's norm, and the quantizer that comes with it, if the method has one."""
        pair = group.pair
        if pair is None or self._unfolded(pair, choices_of(group, whole)):
            return None, None
        search, bits = whole.search, whole.at(pair.sites).activation_bits
        key = ("fold", pair.norm.name, bits, search, self._order(whole))
        if key not in self._found:
            seen = self._observed.seen(self._needs[group.name].names) if ordered is None else ordered
            read = {site.left for site in self.sites if site.name in pair.sites}
            rows = [seen[name].flatten(0, -2) for name in sorted(read)]
            values = rows[0] if len(rows) == 1 else torch.cat(rows)
            self._found[key] = SEARCHES[type(search)].fold_channels(values, bits, search)
        found: tuple[Fold, UniformQuantizer | None] = self._found[key]
        return found

    def _unfolded(self, pair: Pair, config: Config) -> str:
        """Why these choices leave a foldable norm as it is; empty where they fold it."""
        read = (self._shapes[site.left] for site in self.sites if site.name in pair.sites)
        rows = min(x[..., 0].numel() for x in read)  # a head may read one token per image of what the norm puts out
        if config.activation_bits == FLOAT_BITS:
            return "its linears take float activations"
        refused = SEARCHES[type(config.search)].refuses_fold(config.search, config)
        if refused:
            return refused
        if not config.fold_head and pair.norm.name in self._blocks[-1].nodes:
            return "it is the head's"
        if rows < config.fold_rows:
            return f"{rows} rows of calibration are too few for a scale a channel ({config.fold_rows} are enough)"
        return ""

    # --- all groups ---

    def _need(self, group: SiteGroup) -> Need:
        """What the search of a group's sites takes: their operands, and whatever else a norm is folded by."""
        products = [] if group.pair is None else list(group.pair.sites)
        read = {group.first.left} | {site.left for site in self.sites if site.name in products}
        if group.first.role in ("qk", "av"):
            read.add(group.first.right)
        rows = all(site.role == "linear" for site in self.sites if not read.isdisjoint((site.left, site.right)))
        elements = product_elements(self.program, group, self._shapes)
        return Need(group.name, frozenset(read), rows, elements * _BYTES_PER_ELEMENT)

    def _splits(self) -> list[list[SiteGroup]]:
        """The groups by whose operands are held at a time, in order."""

        def number(group: SiteGroup) -> int:
            return self._observed.part(self._needs[group.name].names)

        return [list(groups) for _, groups in groupby(sorted(self.groups, key=number), key=number)]

    def _refined(self, assigned: Assigned, config: Config) -> list[tuple[SiteGroup, Assignment]]:
        """With other scales, as `Config.refine` has it, and SQNRs to match."""
        gradients = {}
        if isinstance(config.refine, BlockRefinement):
            gradients = self._squared_gradients(config.refine.probes)
        assert config.refine is not None
        changed = refine.refined(self.program, self.images, assigned, config.refine, gradients, self.seed)
        judged = []
        for (group, before), (_, after) in zip(assigned, changed, strict=True):
            if after is before:
                judged.append((group, before))
                continue
            choices = choices_of(group, config)
            product = self._product(group, choices, after.fold, formats_of(group.first, choices)[0])
            judged.append((group, product.assigned(after.left, after.right)))
        return judged

    def _check_pinned(self, config: Config) -> None:
        names = [site.name for site in self.sites]
        for pattern, _ in config.pinned:
            if not any(fnmatchcase(name, pattern) for name in names):
                close = difflib.get_close_matches(pattern, names, 3, 0) or ["none"]
                raise ValueError(
                    f"pinned: no site's name matches {pattern!r}; the closest are {', '.join(close)} "
                    "(`adalog inspect MODEL` lists all; * stands for anything)"
                )

    def _fingerprint(self, config: Config, start: Mapping[str, Assignment]) -> str:
        """A digest of everything that decides what the searches find."""
        content = hashlib.sha256(repr((self.program.inputs, self.program.nodes, self.program.output)).encode())
        for name, value in self.program.tensors.items():
            content.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            content.update(raw_bytes(value))
        for value in (*self.images, *(() if self._probe is None else (self._probe,))):
            content.update(f"{value.dtype} {tuple(value.shape)} {value.device.type}".encode())
            content.update(raw_bytes(value))
        strides = [self._observed.stride(need.names) for need in self._needs.values()]
        versions = adalog.__version__, torch.__version__
        begun = [(name, assignment_json(start[name])) for name in sorted(start)]
        content.update(repr((config.to_json(), self.seed, strides, versions, begun)).encode())
        return content.hexdigest()

    # --- what some searches need beside the operands ---

    def _prepare(self, config: Config) -> None:
        """What all searches share, before they run side by side."""
        self._seen_in_order(config)
        wanted = SEARCHES[type(config.search)].needs(config.search)
        if "weights" in wanted:
            self._error_gradients(config)
        if "row_splits" in wanted:
            self._all_row_splits()

    def _error_gradients(self, config: Config) -> dict[str, Tensor]:
        return self._squared_gradients(config.search.probes, noise=config.search.released)  # type: ignore[union-attr]

    def _squared_gradients(self, probes: int, *, noise: bool = False) -> dict[str, Tensor]:
        """By what every site, and every block, puts out."""
        key = ("gradients", probes, noise)
        if key not in self._found:
            generator = torch.Generator().manual_seed(self.seed)
            drawn = [noise_probe(generator)] if noise else [hessian_probe(generator)] * probes
            given = drawn if self._probe is None else [given_probe(self._probe)]
            names = {site.node.name for site in self.sites} | {block.value_out for block in self._blocks}
            self._found[key] = squared_gradients(self.program, self.images, names, given)
        found: dict[str, Tensor] = self._found[key]
        return found

    def _error_weights(self, group: SiteGroup, config: Config) -> Tensor:
        """In the shape of the group's product."""
        gradients, names = self._error_gradients(config), self._needs[group.name].names
        values = [self._observed.alike(group.first.left, names, gradients[member.node.name]) for member in group.sites]
        return in_shape_of_product(self.program, group, values)

    def _all_row_splits(self) -> dict[str, Tensor]:
        if "row splits" not in self._found:
            self._found["row splits"] = find_parts(self.program, self.sites, take(self.images, [0, 1]))
        found: dict[str, Tensor] = self._found["row splits"]
        return found

    def _row_splits(self, group: SiteGroup) -> Tensor | None:
        """Which rows of the group's weight share a scale; None where each has its own."""
        if group.first.role != "linear":
            return None
        splits, count = [], 0
        for site in group.sites:
            splits.append(self._all_row_splits()[site.name] + count)
            count = int(splits[-1].max()) + 1
        return torch.cat(splits)

    @staticmethod
    def _order(config: Config) -> Config | None:
        """Cache key: the config if sites are calibrated in sequence, else None."""
        return config if isinstance(config.search, RangeSearch) and config.search.in_order else None

    def _seen_in_order(self, config: Config) -> dict[str, Tensor] | None:
        """What operands are under these choices, all of them at once, where methods look behind what is quantized."""
        if self._order(config) is None:
            return None
        key = ("seen", config)
        if key not in self._found:
            self._found[key] = observe_in_order(self.program, self.images, self.groups, config, self._unfolded)
        found: dict[str, Tensor] = self._found[key]
        return found


def digest(images: Sequence[Tensor]) -> str:
    """A short fingerprint of the calibration images, of every input together."""
    if not images:
        return ""
    content = hashlib.sha256()
    for value in images:
        content.update(value.detach().cpu().contiguous().to(torch.float32).reshape(-1).numpy().data)
    return content.hexdigest()[:16]


def raw_bytes(value: Tensor) -> memoryview:
    """The bytes of a tensor's values, for a fingerprint."""
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
