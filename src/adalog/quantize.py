"""The story: capture a model, observe it once on calibration images, search every site, build the quantized model."""

import difflib
import hashlib
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path
from threading import Condition
from typing import Any

import torch
from torch import Tensor, nn

import adalog
from adalog.calibration import refine
from adalog.calibration.gradients import given_probe, hessian_probe, noise_probe, squared_gradients
from adalog.calibration.observe import Observed, Request
from adalog.calibration.partial import Fold, Partial
from adalog.config import BlockRefinement, Config, RangeSearch, ReleasedSearch, ScaleSearch, Search
from adalog.errors import CalibrationError
from adalog.graph.capture import batched, capture, take
from adalog.graph.program import Node, Program, Ref
from adalog.graph.reparam import patches, shared_scale
from adalog.graph.rewrite import Placed, built, describe
from adalog.graph.sites import (
    GELUS,
    POWER_LAW_ACTIVATIONS,
    Pair,
    Site,
    conv_geometry,
    find_blocks,
    find_pairs,
    find_refused,
    find_sites,
    find_splits,
)
from adalog.graph.submodule import exchange, record_call
from adalog.graph.tracing import trace
from adalog.inputs.images import draw_indices
from adalog.model import LedgerRow, QuantizedModel, digest
from adalog.quantizers import FLOAT_BITS, UniformQuantizer
from adalog.search import released, rivals
from adalog.search.objective import coprime
from adalog.search.product import (
    Format,
    Found,
    Operand,
    output_power,
    search_channels,
    search_product,
    with_table,
)

MEMORY = 2 << 30  # bytes: half of them for what the sites saw, half for temporaries of the searches of all jobs
_BYTES_AN_ELEMENT = 16  # of temporaries for each element of a left operand, more or less

Progress = Callable[[int, int, str], None]
Images = Tensor | tuple[Tensor, ...]  # one input, or several of as many images each


def quantize(
    model: nn.Module,
    images: Images,
    config: Config | None = None,
    *,
    within: nn.Module | None = None,
    partial: Path | None = None,
    seed: int = 0,
    jobs: int = 1,
    memory: int = MEMORY,
    progress: Progress | None = None,
) -> QuantizedModel:
    """Quantize a vision transformer after training, from a few unlabelled images.

    images: (N, 3, H, W), normalised as the model wants, N >= config.images, of which a sample drawn with `seed` serves;
    or a tuple of inputs, (N, ...) each. within: a model that holds this one and takes the images: this one is
    calibrated on what it is given there, and the quantized model takes its place, in which nothing else changes.
    jobs: sites searched at once. progress(done, total, site): called as sites are done. partial: a file to which
    finished searches are added, from which an interrupted call goes on; remove it once the result is saved. memory:
    as of `Calibration`. The model is not changed.
    Raises CaptureError and CalibrationError, and ValueError where `within` does not hold the model, where a pattern of
    `keep` matches no site, or where memory is too little.
    """
    config = config or Config.preset("w4a4")
    sample = sample_images(images, config.images, seed)
    if within is None:
        return Calibration(model, sample, seed=seed, memory=memory).quantize(
            config, progress, jobs=jobs, partial=partial
        )
    call, inputs = record_call(model, within, batched(sample))
    calibration = Calibration(model, inputs, seed=seed, memory=memory)
    result = calibration.quantize(config, progress, jobs=jobs, partial=partial)
    result.provenance |= {"calibration": digest(batched(sample)), "images": config.images}
    result.call = call
    exchange(model, within, result)
    return result


def sample_images(images: Images, count: int, seed: int) -> Images:
    """`count` of the images, drawn without replacement from a generator of its own; the same ones of every input."""
    inputs = batched(images)
    found = len(inputs[0])
    if found < count:
        raise CalibrationError(
            f"calibration takes {count} images, got {found}: give more, or set Config(images={found})"
        )
    sample = take(inputs, draw_indices(found, count, seed))
    return sample[0] if isinstance(images, Tensor) else sample


@dataclass(frozen=True)
class _Group:
    """Sites that are one search: one product, or several linears of one activation (separate q, k, v)."""

    sites: tuple[Site, ...]
    pair: Pair | None

    @property
    def first(self) -> Site:
        return self.sites[0]

    def choices(self, config: Config) -> Config:
        """Those of these sites."""
        return config.at(self.pair.sites if self.pair is not None else [site.name for site in self.sites])


@dataclass(frozen=True)
class Searched:
    """What was found for the sites of one product.

    left, right: the operands as they were searched, after the norm's fold (ratio, beta), the right one transposed.
    seconds: of a thread's CPU time, when it was found, even if that was for other choices that share this search.
    """

    sites: tuple[Site, ...]
    left: Operand
    right: Operand
    found: Found
    fold: Fold
    seconds: float = 0.0

    def mean_square_error(self) -> float:
        """Of the product's output, over all its elements."""
        noise = output_power(self.left, self.right, self.found.left, self.found.right)[1]
        return noise / (self.left.values[..., 0].numel() * self.right.values.shape[-2])


class _Room:
    """Memory that searches share: one waits until there is enough; one larger than all of it goes alone."""

    def __init__(self, size: int):
        self._size = self._free = size
        self._changed = Condition()

    @contextmanager
    def taken(self, size: int) -> Iterator[None]:
        size = min(size, self._size)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= size)
            self._free -= size
        try:
            yield
        finally:
            with self._changed:
                self._free += size
                self._changed.notify_all()


class Calibration:
    """A captured model with what its sites see in one forward of the calibration images.

    Quantizing again with other choices repeats only the searches whose choices differ.
    """

    def __init__(self, model: nn.Module, images: Tensor | Sequence[Any], *, seed: int = 0, memory: int = MEMORY):
        """images: (N, 3, H, W), all of which calibrate; the released algorithm's inputs are the float network's.

        Or several positional inputs, (N, ...) each; what is no tensor is a constant.
        memory: bytes, half of them for what the sites saw, half for the searches' temporaries; the model, the images
        and what a caller asks for to keep come on top. If all that the sites saw fits (DeiT-T takes 0.8 GB at 32
        images), it stays for further configurations; else each needs a forward. Where one operand, or its search, does
        not fit, it is every n-th row of the operand that serves, of attention's products and convolutions every n-th
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
        self._groups = _group(self.sites, self.pairs)
        if not self.sites:
            raise CalibrationError(f"{type(model).__name__} has no multiplication that could be quantized")
        self._blocks = find_blocks(self.program)
        self._head = self._blocks[-1].nodes
        self._memory = memory
        self._shapes = trace(self.program, self.images)
        self._needs = {group.first.name: self._need(group) for group in self._groups}
        self._observed = Observed(self.program, self.images, self._shapes, self._needs.values(), memory // 2)
        self._found: dict[Any, Any] = {}
        self._seconds: dict[Any, float] = {}
        self._probe: Tensor | None = None

    def _need(self, group: _Group) -> Request:
        """What the search of a group's sites takes: their operands, and whatever else a norm is folded by."""
        products = [] if group.pair is None else list(group.pair.sites)
        read = {group.first.left} | {site.left for site in self.sites if site.name in products}
        if group.first.role in ("qk", "av"):
            read.add(group.first.right)
        rows = all(site.role == "linear" for site in self.sites if not read.isdisjoint((site.left, site.right)))
        return Request(group.first.name, frozenset(read), rows, self._elements(group) * _BYTES_AN_ELEMENT)

    @torch.no_grad()
    def quantize(
        self, config: Config, progress: Progress | None = None, *, jobs: int = 1, partial: Path | None = None
    ) -> QuantizedModel:
        """The model under these choices. jobs: sites searched at once, in threads; the result does not depend on it.

        partial: a file that finished searches are read from and added to; of no more use once the result is saved.
        """
        self._check_keep(config)
        self._prepare(config)
        done = None if partial is None else Partial(partial, self._fingerprint(config))
        room = _Room(self._memory // 2)

        def find(group: _Group) -> tuple[Found, Fold]:
            known = done and done.get(group.first.name)
            if known:
                return self._placed(*known)
            with room.taken(self._needs[group.first.name].scratch):
                searched = self._search(group, config)
            return searched.found, searched.fold

        found = dict[str, tuple[Found, Fold]]()
        with ThreadPoolExecutor(jobs) as pool:
            try:
                for part in self._parts():  # one after the other, since their operands are held at different times
                    for group, search in [(group, pool.submit(find, group)) for group in part]:
                        if progress is not None:
                            progress(len(found), len(self._groups), group.first.name)
                        found[group.first.name] = search.result()
                        if done is not None and not done.get(group.first.name):
                            done.add(group.first.name, *found[group.first.name])
            finally:
                pool.shutdown(cancel_futures=True)
        placed = []
        for group in self._groups:
            norm = None if group.pair is None else group.pair.norm
            placed.append(Placed(group.sites, found[group.first.name][0], norm, found[group.first.name][1]))
        if config.refine is not None:
            placed = self._refined(placed, config)
        ledger = [row for each in placed for row in _ledger_rows(each.sites, each.found, self.program)]
        if progress is not None:
            progress(len(self._groups), len(self._groups), "")
        reasons = ((pair.name, pair.refusal or self._unfolded(pair, config.at(pair.sites))) for pair in self.pairs)
        refusals = {name: f"not folded: {reason}" for name, reason in reasons if reason}
        refusals |= {site.name: f"stays float: {site.refusal}" for site in find_refused(self.program)}
        for group in self._groups:
            if group.choices(config) != config and group.choices(config).activation_bits == FLOAT_BITS:
                refusals |= {site.name: f"stays float: kept at {FLOAT_BITS} bits" for site in group.sites}
        whole = built(self.program, placed)
        return QuantizedModel(whole, config, ledger, refusals, seed=self.seed, images=self.images)

    def _refined(self, placed: list[Placed], config: Config) -> list[Placed]:
        """With other scales, as `Config.refine` has it, and SQNRs to match."""
        gradients = {}
        if isinstance(config.refine, BlockRefinement):
            gradients = self._squared_gradients(config.refine.probes)
        assert config.refine is not None
        changed = refine.refined(self.program, self.images, placed, config.refine, gradients, self.seed)
        judged = []
        for group, before, after in zip(self._groups, placed, changed, strict=True):
            if after.found is before.found:
                judged.append(before)
                continue
            choices = group.choices(config)
            seen = self._observed.seen(self._needs[group.first.name].names)
            operands = self._operands(group, seen, choices, after.fold, self._activations(group.first, choices)[0])
            judged.append(replace(after, found=Found.judged(*operands, after.found.left, after.found.right)))
        return judged

    def _parts(self) -> list[list[_Group]]:
        """The groups by whose operands are held at a time, in order."""

        def number(group: _Group) -> int:
            return self._observed.stage(self._needs[group.first.name].names)

        return [list(groups) for _, groups in groupby(sorted(self._groups, key=number), key=number)]

    def _fingerprint(self, config: Config) -> str:
        """Of all that decides what the searches find."""
        content = hashlib.sha256(repr((self.program.inputs, self.program.nodes, self.program.output)).encode())
        for name, value in self.program.tensors.items():
            content.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            content.update(raw_bytes(value))
        for value in (*self.images, *(() if self._probe is None else (self._probe,))):
            content.update(f"{value.dtype} {tuple(value.shape)} {value.device.type}".encode())
            content.update(raw_bytes(value))
        strides = [self._observed.stride(need.names) for need in self._needs.values()]
        content.update(repr((config.to_json(), strides, adalog.__version__, torch.__version__)).encode())
        return content.hexdigest()

    def _placed(self, found: Found, fold: Fold) -> tuple[Found, Fold]:
        """What a file held, where the model is."""

        def place(value: Tensor) -> Tensor:
            return value.to(self.images[0].device)

        found = replace(found, left=found.left and found.left.map(place), right=found.right and found.right.map(place))
        return found, fold and (place(fold[0]), place(fold[1]))

    def _elements(self, group: _Group) -> int:
        """Of the larger of a product's left operand and output, more or less."""
        site, x = group.first, self._shapes[group.first.left]
        if site.role == "linear":
            columns = sum(len(self.program.tensors[member.right]) for member in group.sites)
        else:
            columns = x.shape[-1] if site.role == "conv" else self._shapes[site.right].shape[-1]
        return x[..., 0].numel() * max(x.shape[-1], columns)

    def search(self, config: Config, sites: Collection[str] | None = None) -> list[Searched]:
        """Products' quantizers under these choices, in order of execution: all, or those of these sites.

        They hold their operands, whatever the memory of this.
        """
        self._check_keep(config)
        unknown = set(sites or ()) - {site.name for site in self.sites}
        if unknown:
            raise ValueError(f"{', '.join(sorted(unknown))}: no such site; there are {len(self.sites)}, as in `sites`")
        self._prepare(config)
        found = {}
        for group in (group for part in self._parts() for group in part):
            if sites is None or any(site.name in sites for site in group.sites):
                found[group.first.name] = self._search(group, config)
        return [found[group.first.name] for group in self._groups if group.first.name in found]

    def _check_keep(self, config: Config) -> None:
        names = [site.name for site in self.sites]
        for pattern, _ in config.keep:
            if not any(fnmatchcase(name, pattern) for name in names):
                close = difflib.get_close_matches(pattern, names, 3, 0) or ["none"]
                raise ValueError(
                    f"keep: no site's name matches {pattern!r}; the closest are {', '.join(close)} "
                    "(`adalog inspect MODEL` lists all; * stands for anything)"
                )

    @torch.no_grad()
    def judge(self, searched: Searched, config: Config) -> Searched:
        """The same quantizers with what this calibration's images make of the operands: another one's, held out."""
        group = next(group for group in self._groups if group.first.name == searched.sites[0].name)
        seen = self._observed.seen(self._needs[group.first.name].names)
        left, right = self._operands(group, seen, group.choices(config), searched.fold, searched.left.format)
        return replace(searched, left=left, right=right)

    @torch.no_grad()  # a thread's own setting
    def _search(self, group: _Group, config: Config) -> Searched:
        start, seconds = time.thread_time(), 0.0
        whole, config = config, group.choices(config)
        seen = self._observed.seen(self._needs[group.first.name].names)
        ordered = self._seen_in_order(whole)
        looked_at = seen if ordered is None else ordered
        fold: Fold = None
        shared: UniformQuantizer | None = None
        if group.pair is not None and not self._unfolded(group.pair, config):
            ratio, beta, shared = self._shared(group.pair, looked_at, whole)
            fold = ratio, beta
        tried = []
        for activation in self._activations(group.first, config):
            left, right = self._operands(group, seen, config, fold, activation)
            search, role = config.search, group.first.role
            bits = config.activation_bits if fold else None
            key = (group.first.name, left.format, right.format, search, bits, _order(whole))
            if key not in self._found:
                if isinstance(search, ReleasedSearch):
                    self._found[key] = released.search_product(role, left, right, search)
                elif isinstance(search, RangeSearch):
                    operands = self._operands(group, looked_at, config, fold, activation)
                    found = rivals.search_ranges(role, *operands, search, shared)
                    self._found[key] = Found.judged(left, right, found.left, found.right)
                elif isinstance(search, ScaleSearch):
                    weights = self._error_weights(group, search) if search.metric == "hessian" else None
                    parts = None if search.row_scales else self._linear_parts(group)
                    self._found[key] = rivals.search_scales(role, left, right, search, weights, parts)
                else:
                    self._found[key] = search_product(left, right, search)
            tabled = (*key, config.tables)
            if tabled not in self._found:
                self._found[tabled] = with_table(left, right, self._found[key], config.tables)
            tried.append(Searched(group.sites, left, right, self._found[tabled], fold))
            start, spent = time.thread_time(), time.thread_time() - start
            self._seconds[tabled] = max(spent, self._seconds.get(tabled, 0.0))  # next to nothing where it was known
            seconds += self._seconds[tabled]
        return replace(max(tried, key=lambda searched: searched.found.sqnr), seconds=seconds)

    def probe(self, gradient: Tensor) -> None:
        """Weight errors by this gradient of a loss by the model's only output, (N, ...), in place of random ones."""
        self._probe = gradient
        self._found.clear()
        self._seconds.clear()

    def operand(self, name: str) -> Tensor:
        """What a site's operand (`Site.left`, `Site.right`) was on the calibration images, in full precision.

        Of an operand larger than the memory, every n-th row or image.
        """
        return self._observed.seen([name])[name]

    def _unfolded(self, pair: Pair, config: Config) -> str:
        """Why these choices leave a foldable norm as it is; empty where they fold it."""
        read = (self._shapes[site.left] for site in self.sites if site.name in pair.sites)
        rows = min(x[..., 0].numel() for x in read)  # a head may read one token an image of what the norm puts out
        if config.activation_bits == FLOAT_BITS:
            return "its linears take float activations"
        ranges = isinstance(config.search, RangeSearch) and config.search.share == "none"
        if ranges or isinstance(config.search, ScaleSearch):
            return "this method folds no norm"
        if isinstance(config.search, ReleasedSearch) and config.weight_bits != config.activation_bits:
            return "the released code does not where weights and activations have unequal bits"
        if not config.fold_head and pair.norm.name in self._head:
            return "it is the head's"
        if rows < config.fold_rows:
            return f"{rows} rows of calibration are too few for a scale a channel ({config.fold_rows} are enough)"
        return ""

    def _shared(
        self, pair: Pair, seen: Mapping[str, Tensor], whole: Config
    ) -> tuple[Tensor, Tensor, UniformQuantizer | None]:
        """A pair's fold, and the quantizer that comes with it, if the method has one. whole: choices for all sites."""
        search, bits = whole.search, whole.at(pair.sites).activation_bits
        key = ("fold", pair.norm.name, bits, search, _order(whole))
        if key not in self._found:
            read = {site.left for site in self.sites if site.name in pair.sites}
            rows = [seen[name].flatten(0, -2) for name in sorted(read)]
            values = rows[0] if len(rows) == 1 else torch.cat(rows)
            if isinstance(search, ReleasedSearch):
                self._found[key] = *shared_scale(*released.search_channels(values, bits, search)), None
            elif isinstance(search, RangeSearch):
                self._found[key] = rivals.share_channels(values, bits, search)
            else:
                assert isinstance(search, Search)
                self._found[key] = *shared_scale(*search_channels(values, bits, search)), None
        found: tuple[Tensor, Tensor, UniformQuantizer | None] = self._found[key]
        return found

    def _activations(self, site: Site, config: Config) -> list[Format]:
        """The formats that the left operand of a site is tried in; the first of equally good ones wins.

        After SiLU and the like it depends on the site whether a logarithmic quantizer is better than a uniform one, and
        so it does before a grouped convolution, where a uniform one has a scale a group.
        """
        bits = config.input_bits if site.role == "conv" and site.left_source.kind == "input" else config.activation_bits
        kind = site.left_source.kind
        if kind == "softmax":
            return [Format.power_law(config.post_softmax, config.softmax_bits, config, 0.0)]
        if kind not in POWER_LAW_ACTIVATIONS:
            return [Format(bits)]
        own = -site.left_source.minimum
        offset = config.offset if config.offset is not None and kind == "gelu" else own
        power_law = Format.power_law(config.post_gelu, bits, config, offset)
        grouped = site.role == "conv" and conv_geometry(site.node)[3] > 1
        sure = (kind in GELUS and not grouped) or power_law.log2_base is None
        return [power_law] if sure else [power_law, Format(bits)]

    def _operands(
        self, group: _Group, seen: Mapping[str, Tensor], config: Config, fold: Fold, activation: Format
    ) -> tuple[Operand, Operand]:
        """Both operands of the group's product with their formats, the right one transposed."""
        site = group.first
        x = seen[site.left]
        if site.role in ("qk", "av"):
            heads = (1,) if config.per_head and x.ndim == 4 else ()
            right = seen[site.right].transpose(-1, -2).contiguous()
            lead = torch.broadcast_shapes(x.shape[:-2], right.shape[:-2])
            x, right = (value.expand(*lead, *value.shape[-2:]) for value in (x, right))
            if site.role == "qk" and activation.is_uniform:
                activation = replace(activation, keep=heads)
            alike = site.role == "qk"  # the rows of V, transposed, are its channels
            return Operand(x, activation), Operand(right, Format(config.activation_bits, keep=heads), alike=alike)
        weights = [self.program.tensors[member.right] for member in group.sites]
        if site.role == "conv":
            return _conv_operands(site, x, weights[0], activation, config.weight_bits)
        weight = torch.cat(weights)
        if fold is not None:
            ratio, beta = fold
            x, weight = (x / ratio).sub_(beta), weight * ratio
        return Operand(x.reshape(-1, x.shape[-1]), activation), Operand(weight, Format(config.weight_bits, keep=(0,)))

    # --- what rivals need beside the operands ---

    def _prepare(self, config: Config) -> None:
        """What all searches share, before they run side by side."""
        search = config.search
        self._seen_in_order(config)
        if isinstance(search, ScaleSearch):
            if search.metric == "hessian":
                self._squared_gradients(search.probes, noise=search.released)
            if not search.row_scales:
                self._all_linear_parts()

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

    def _error_weights(self, group: _Group, search: ScaleSearch) -> Tensor:
        """In the shape of the group's product."""
        gradients = self._squared_gradients(search.probes, noise=search.released)
        names, site = self._needs[group.first.name].names, group.first
        values = [self._observed.alike(site.left, names, gradients[member.node.name]) for member in group.sites]
        if site.role == "linear":
            return torch.cat([value.flatten(0, -2) for value in values], dim=-1)
        if site.role == "conv":
            groups = conv_geometry(site.node)[3]
            rows = (image.reshape(groups, -1, image[0].numel()).transpose(1, 2) for image in values[0])
            return _conv_rows(rows, len(values[0]), _overlap(site, self.program.tensors[site.right]))
        return values[0]

    def _all_linear_parts(self) -> dict[str, Tensor]:
        if "parts" not in self._found:
            self._found["parts"] = find_splits(self.program, self.sites, take(self.images, [0, 1]))
        found: dict[str, Tensor] = self._found["parts"]
        return found

    def _linear_parts(self, group: _Group) -> Tensor | None:
        """Which rows of the group's weight are one part; None where each is one."""
        if group.first.role != "linear":
            return None
        parts, count = [], 0
        for site in group.sites:
            parts.append(self._all_linear_parts()[site.name] + count)
            count = int(parts[-1].max()) + 1
        return torch.cat(parts)

    def _seen_in_order(self, config: Config) -> dict[str, Tensor] | None:
        """What operands are under these choices, all of them at once, where methods look behind what is quantized."""
        if _order(config) is None:
            return None
        key = ("seen", config)
        if key not in self._found:
            self._found[key] = self._observe_in_order(config)
        found: dict[str, Tensor] = self._found[key]
        return found

    @torch.no_grad()
    def _observe_in_order(self, config: Config) -> dict[str, Tensor]:
        """One forward in which each site's operands are quantized as they come.

        Where a norm is to be folded, its channels still have quantizers of their own (RepQ-ViT).
        """
        seen = dict(self.program.tensors)
        groups = {site.node.name: group for group in self._groups for site in group.sites}
        outputs: dict[str, Tensor] = {}

        def watch(node: Node, args: tuple[Any, ...], result: Any) -> Any:
            group = groups.get(node.name)
            if group is None:
                return None
            if node.name not in outputs:
                site = group.first
                seen[site.left] = args[0]
                if site.role in ("qk", "av"):
                    seen[site.right] = args[1]
                outputs.update(self._quantized_outputs(group, config, seen))
            return outputs.pop(node.name)

        self.program.run(self.images, watch)
        return seen

    def _quantized_outputs(self, group: _Group, config: Config, seen: Mapping[str, Tensor]) -> dict[str, Tensor]:
        choices = group.choices(config)
        assert isinstance(choices.search, RangeSearch)
        formats = self._activations(group.first, choices)
        if group.pair is not None and not self._unfolded(group.pair, choices):
            formats = [Format(choices.activation_bits, keep=(1,))]
        tried = []
        for activation in formats:
            operands = self._operands(group, seen, choices, None, activation)
            found = rivals.search_ranges(group.first.role, *operands, choices.search)
            tried.append(with_table(*operands, found, choices.tables))
        found = max(tried, key=lambda each: each.sqnr)
        nodes = tuple(site.node for site in group.sites)
        operand_names = dict.fromkeys(name for site in group.sites for name in (site.left, site.right))
        inputs = tuple(name for name in operand_names if name not in self.program.tensors)
        alone = Program(inputs, nodes, tuple(Ref(node.name) for node in nodes), self.program.tensors)
        results = built(alone, [Placed(group.sites, found)]).run([seen[name] for name in inputs])
        return {node.name: result for node, result in zip(nodes, results, strict=True)}


def _order(config: Config) -> Config | None:
    """All choices, where a site's values hang on those of the sites before it."""
    return config if isinstance(config.search, RangeSearch) and config.search.in_order else None


def raw_bytes(value: Tensor) -> memoryview:
    """Of its values, for a fingerprint."""
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _group(sites: Sequence[Site], pairs: Sequence[Pair]) -> list[_Group]:
    folded = {name: pair for pair in pairs if not pair.refusal for name in pair.sites}
    together: dict[tuple[str, str], list[Site]] = {}
    for site in sites:
        key = (site.left, "linear") if site.role == "linear" else (site.name, site.role)
        together.setdefault(key, []).append(site)
    return [_Group(tuple(members), folded.get(members[0].name)) for members in together.values()]


def _conv_operands(
    site: Site, x: Tensor, weight: Tensor, activation: Format, weight_bits: int
) -> tuple[Operand, Operand]:
    """A convolution as a product of patches and kernels, (groups, T, I) and (groups, O / groups, I) where grouped.

    A grouped convolution's input has one scale a group: each output sees one group alone. Where patches overlap, so
    that each value is in n of them, every n-th patch serves, as long as 1,024 are left.
    """
    stride, padding, dilation, groups = conv_geometry(site.node)
    batch, channels, height, width = x.shape
    kernel = (weight.shape[2], weight.shape[3])
    x = x.reshape(batch, groups, channels // groups, height, width)

    def rows(images: Tensor) -> Tensor:
        seen = (patches(image, kernel, stride, padding, dilation) for image in images)
        return _conv_rows(seen, batch, _overlap(site, weight))

    mask = None
    if any(padding) and activation.log2_base is not None:
        mask = rows(torch.ones_like(x))
    if groups == 1:
        return Operand(rows(x), activation, mask), Operand(weight.flatten(1), Format(weight_bits, keep=(0,)))
    kernels = weight.reshape(groups, -1, weight[0].numel())
    if activation.is_uniform:
        activation = replace(activation, keep=(0,))
    return Operand(rows(x), activation, mask), Operand(kernels, Format(weight_bits, keep=(0, 1)))


def _overlap(site: Site, weight: Tensor) -> int:
    """In how many of a convolution's patches a value is."""
    return weight.shape[2] * weight.shape[3] // math.prod(conv_geometry(site.node)[0])


def _conv_rows(images: Iterable[Tensor], batch: int, overlap: int) -> Tensor:
    """Every n-th of each image's rows, (groups, L, I), together: (groups, T, I), or (T, I) of one group."""
    parts = []
    for index, rows in enumerate(images):
        step = coprime(max(1, min(overlap, batch * rows.shape[1] // 1024)), rows.shape[1])
        parts.append(rows[:, index % step :: step])
    result = torch.cat(parts, dim=1)
    return result if len(result) > 1 else result[0]


def _ledger_rows(sites: Sequence[Site], found: Found, program: Program) -> Iterator[LedgerRow]:
    """One row a site; sites that were searched as one have one SQNR."""
    shares = [len(program.tensors[site.right]) if len(sites) > 1 else 0 for site in sites]
    for site, share in zip(sites, shares, strict=True):
        right = describe(found.right, share)
        yield LedgerRow(site.name, site.role, site.left_source.kind, describe(found.left), right, found.sqnr)
