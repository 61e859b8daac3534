"""The story: capture a model, observe it once on calibration images, search every site, build the quantized model."""

import difflib
import hashlib
import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from threading import Condition
from typing import Any

import torch
from torch import Tensor, nn

import adalog
from adalog import released
from adalog.build import Build, describe
from adalog.calibrate import Format, Found, Operand, output_power, search_channels, search_product, with_table
from adalog.capture import batched, capture, take
from adalog.config import Config, ReleasedSearch
from adalog.data import draw_indices
from adalog.errors import CalibrationError
from adalog.model import LedgerRow, QuantizedModel, digest
from adalog.objective import coprime
from adalog.partial import Fold, Partial
from adalog.program import Node, Program
from adalog.quantizers import FLOAT_BITS
from adalog.reparam import shared_scale, unfolded_patches
from adalog.sites import (
    GELUS,
    POWER_LAW_ACTIVATIONS,
    Pair,
    Site,
    conv_geometry,
    find_blocks,
    find_pairs,
    find_refused,
    find_sites,
)
from adalog.submodule import exchange, record_call

MEMORY = 1 << 30  # bytes of temporaries that the searches of all jobs may hold together
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
    progress: Progress | None = None,
) -> QuantizedModel:
    """Quantize a vision transformer after training, from a few unlabelled images.

    images: (N, 3, H, W), normalised as the model wants, N >= config.images, of which a sample drawn with `seed` serves;
    or a tuple of inputs, (N, ...) each. within: a model that holds this one and takes the images: this one is
    calibrated on what it is given there, and the quantized model takes its place, in which nothing else changes.
    jobs: sites searched at once. progress(done, total, site): called as sites are done. partial: a file to which
    finished searches are added, from which an interrupted call goes on; remove it once the result is saved. Searches
    hold about MEMORY bytes of temporaries beside what the sites saw. The model is not changed.
    Raises CaptureError and CalibrationError, and ValueError where `within` does not hold the model, or where a pattern
    of `keep` matches no site.
    """
    config = config or Config.preset("w4a4")
    sample = sample_images(images, config.images, seed)
    if within is None:
        return Calibration(model, sample, seed=seed).quantize(config, progress, jobs=jobs, partial=partial)
    call, inputs = record_call(model, within, batched(sample))
    result = Calibration(model, inputs, seed=seed).quantize(config, progress, jobs=jobs, partial=partial)
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
    """

    sites: tuple[Site, ...]
    left: Operand
    right: Operand
    found: Found
    fold: Fold

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
    """A captured model with everything its sites saw in one forward of the calibration images.

    Quantizing again with other choices repeats only the searches whose choices differ.
    """

    def __init__(self, model: nn.Module, images: Tensor | Sequence[Any], *, seed: int = 0):
        """images: (N, 3, H, W), all of which calibrate; the released algorithm's inputs are the float network's.

        Or several positional inputs, (N, ...) each; what is no tensor is a constant.
        """
        inputs = batched(images)
        self.images = tuple(value for value in inputs if isinstance(value, Tensor))
        if not all(bool(torch.isfinite(value).all()) for value in self.images):
            raise CalibrationError("the calibration images hold NaN or infinite values")
        self.program = capture(model, inputs)
        self.sites = find_sites(self.program)
        self.pairs = find_pairs(self.program, self.sites, take(self.images, [0, 1]))
        self.seed = seed
        self._groups = _group(self.sites, self.pairs)
        if not self.sites:
            raise CalibrationError(f"{type(model).__name__} has no multiplication that could be quantized")
        self._head = find_blocks(self.program)[-1].nodes
        self._seen = self._observe()
        self._found: dict[Any, Any] = {}

    @torch.no_grad()
    def _observe(self) -> dict[str, Tensor]:
        """The value of every operand, by name, from one float forward."""
        wanted = {name for site in self.sites for name in (site.left, site.right)}
        given = {**self.program.tensors, **dict(zip(self.program.inputs, self.images, strict=True))}
        seen = {name: value for name, value in given.items() if name in wanted}

        def watch(node: Node, args: tuple[Any, ...], result: Any) -> None:
            if node.name in wanted:
                if not bool(torch.isfinite(result).all()):
                    raise CalibrationError(f"{node.scope or node.name} puts out NaN or infinite values on these images")
                seen[node.name] = result

        self.program.run(self.images, watch)
        return seen

    @torch.no_grad()
    def quantize(
        self, config: Config, progress: Progress | None = None, *, jobs: int = 1, partial: Path | None = None
    ) -> QuantizedModel:
        """The model under these choices. jobs: sites searched at once, in threads; the result does not depend on it.

        partial: a file that finished searches are read from and added to; of no more use once the result is saved.
        """
        self._check_keep(config)
        build = Build(self.program)
        ledger: list[LedgerRow] = []
        done = None if partial is None else Partial(partial, self._fingerprint(config))
        room = _Room(MEMORY)

        def find(group: _Group) -> tuple[Found, Fold]:
            known = done and done.get(group.first.name)
            if known:
                return self._placed(*known)
            with room.taken(self._elements(group) * _BYTES_AN_ELEMENT):
                searched = self._search(group, config)
            return searched.found, searched.fold

        with ThreadPoolExecutor(jobs) as pool:
            searches = deque(pool.submit(find, group) for group in self._groups)
            try:
                for index, group in enumerate(self._groups):
                    if progress is not None:
                        progress(index, len(self._groups), group.first.name)
                    found, fold = searches.popleft().result()
                    if done is not None and not done.get(group.first.name):
                        done.add(group.first.name, found, fold)
                    if fold is not None and group.pair is not None:
                        build.fold_norm(group.pair.norm, *fold)
                    build.place(group.sites, found)
                    ledger += _ledger_rows(group.sites, found, self.program)
            finally:
                pool.shutdown(cancel_futures=True)
        if progress is not None:
            progress(len(self._groups), len(self._groups), "")
        reasons = ((pair.name, pair.refusal or self._unfolded(pair, config.at(pair.sites))) for pair in self.pairs)
        refusals = {name: f"not folded: {reason}" for name, reason in reasons if reason}
        refusals |= {site.name: f"stays float: {site.refusal}" for site in find_refused(self.program)}
        for group in self._groups:
            if group.choices(config) != config and group.choices(config).activation_bits == FLOAT_BITS:
                refusals |= {site.name: f"stays float: kept at {FLOAT_BITS} bits" for site in group.sites}
        return QuantizedModel(build.program(), config, ledger, refusals, seed=self.seed, images=self.images)

    def _fingerprint(self, config: Config) -> str:
        """Of all that decides what the searches find."""
        content = hashlib.sha256(repr((self.program.inputs, self.program.nodes, self.program.output)).encode())
        for name, value in self.program.tensors.items():
            content.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            content.update(_bytes(value))
        for value in self.images:
            content.update(f"{value.dtype} {tuple(value.shape)} {value.device.type}".encode())
            content.update(_bytes(value))
        content.update(repr((config.to_json(), adalog.__version__, torch.__version__)).encode())
        return content.hexdigest()

    def _placed(self, found: Found, fold: Fold) -> tuple[Found, Fold]:
        """What a file held, where the model is."""

        def place(value: Tensor) -> Tensor:
            return value.to(self.images[0].device)

        found = replace(found, left=found.left and found.left.map(place), right=found.right and found.right.map(place))
        return found, fold and (place(fold[0]), place(fold[1]))

    def _elements(self, group: _Group) -> int:
        """Of the larger of a product's left operand and output, more or less."""
        site, x = group.first, self._seen[group.first.left]
        if site.role == "linear":
            columns = sum(len(self.program.tensors[member.right]) for member in group.sites)
        else:
            columns = x.shape[-1] if site.role == "conv" else self._seen[site.right].shape[-1]
        return x[..., 0].numel() * max(x.shape[-1], columns)

    def search(self, config: Config, sites: Collection[str] | None = None) -> list[Searched]:
        """Products' quantizers under these choices, in order of execution: all, or those of these sites."""
        self._check_keep(config)
        unknown = set(sites or ()) - {site.name for site in self.sites}
        if unknown:
            raise ValueError(f"{', '.join(sorted(unknown))}: no such site; there are {len(self.sites)}, as in `sites`")
        groups = [group for group in self._groups if sites is None or any(site.name in sites for site in group.sites)]
        return [self._search(group, config) for group in groups]

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
        left, right = self._operands(group, group.choices(config), searched.fold, searched.left.format)
        return replace(searched, left=left, right=right)

    @torch.no_grad()  # a thread's own setting
    def _search(self, group: _Group, config: Config) -> Searched:
        config = group.choices(config)
        fold = None
        if group.pair is not None and not self._unfolded(group.pair, config):
            fold = self._fold(group.pair, config)
        tried = []
        for activation in self._activations(group.first, config):
            left, right = self._operands(group, config, fold, activation)
            search = config.search
            key = (group.first.name, left.format, right.format, search, config.activation_bits if fold else None)
            if key not in self._found:
                if isinstance(search, ReleasedSearch):
                    self._found[key] = released.search_product(group.first.role, left, right, search)
                else:
                    self._found[key] = search_product(left, right, search)
            tabled = (*key, config.tables)
            if tabled not in self._found:
                self._found[tabled] = with_table(left, right, self._found[key], config.tables)
            tried.append(Searched(group.sites, left, right, self._found[tabled], fold))
        return max(tried, key=lambda searched: searched.found.sqnr)

    def operand(self, name: str) -> Tensor:
        """What a site's operand (`Site.left`, `Site.right`) was on the calibration images, in full precision."""
        return self._seen[name]

    def _unfolded(self, pair: Pair, config: Config) -> str:
        """Why these choices leave a foldable norm as it is; empty where they fold it."""
        read = (self._seen[site.left] for site in self.sites if site.name in pair.sites)
        rows = min(x[..., 0].numel() for x in read)  # a head may read one token an image of what the norm puts out
        if config.activation_bits == FLOAT_BITS:
            return "its linears take float activations"
        if isinstance(config.search, ReleasedSearch) and config.weight_bits != config.activation_bits:
            return "the released code does not where weights and activations have unequal bits"
        if not config.fold_head and pair.norm.name in self._head:
            return "it is the head's"
        if rows < config.fold_rows:
            return f"{rows} rows of calibration are too few for a scale a channel ({config.fold_rows} are enough)"
        return ""

    def _fold(self, pair: Pair, config: Config) -> tuple[Tensor, Tensor]:
        search, bits = config.search, config.activation_bits
        key = ("fold", pair.norm.name, bits, search)
        if key not in self._found:
            read = {site.left for site in self.sites if site.name in pair.sites}
            values = torch.cat([self._seen[name].flatten(0, -2) for name in sorted(read)])
            if isinstance(search, ReleasedSearch):
                self._found[key] = shared_scale(*released.search_channels(values, bits, search))
            else:
                self._found[key] = shared_scale(*search_channels(values, bits, search))
        fold: tuple[Tensor, Tensor] = self._found[key]
        return fold

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

    def _operands(self, group: _Group, config: Config, fold: Fold, activation: Format) -> tuple[Operand, Operand]:
        """Both operands of the group's product with their formats, the right one transposed."""
        site = group.first
        x = self._seen[site.left]
        if site.role in ("qk", "av"):
            heads = (1,) if config.per_head and x.ndim == 4 else ()
            right = self._seen[site.right].transpose(-1, -2).contiguous()
            lead = torch.broadcast_shapes(x.shape[:-2], right.shape[:-2])
            x, right = (value.expand(*lead, *value.shape[-2:]) for value in (x, right))
            if site.role == "qk" and activation.is_uniform:
                activation = replace(activation, keep=heads)
            return Operand(x, activation), Operand(right, Format(config.activation_bits, keep=heads))
        weights = [self.program.tensors[member.right] for member in group.sites]
        if site.role == "conv":
            return _conv_operands(site, x, weights[0], activation, config.weight_bits)
        weight = torch.cat(weights)
        if fold is not None:
            ratio, beta = fold
            x, weight = x / ratio - beta, weight * ratio
        return Operand(x.reshape(-1, x.shape[-1]), activation), Operand(weight, Format(config.weight_bits, keep=(0,)))


def _bytes(value: Tensor) -> bytes:
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


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
    overlap = math.prod(kernel) // math.prod(stride)

    def rows(images: Tensor) -> Tensor:
        parts = []
        for index, image in enumerate(images):
            patches = unfolded_patches(image, kernel, stride, padding, dilation).unflatten(0, (groups, -1))
            step = coprime(max(1, min(overlap, batch * patches.shape[1] // 1024)), patches.shape[1])
            parts.append(patches[:, index % step :: step])
        result = torch.cat(parts, dim=1)
        return result if groups > 1 else result[0]

    mask = None
    if any(padding) and activation.log2_base is not None:
        mask = rows(torch.ones_like(x))
    if groups == 1:
        return Operand(rows(x), activation, mask), Operand(weight.flatten(1), Format(weight_bits, keep=(0,)))
    kernels = weight.reshape(groups, -1, weight[0].numel())
    if activation.is_uniform:
        activation = replace(activation, keep=(0,))
    return Operand(rows(x), activation, mask), Operand(kernels, Format(weight_bits, keep=(0, 1)))


def _ledger_rows(sites: Sequence[Site], found: Found, program: Program) -> Iterator[LedgerRow]:
    """One row a site; sites that were searched as one have one SQNR."""
    shares = [len(program.tensors[site.right]) if len(sites) > 1 else 0 for site in sites]
    for site, share in zip(sites, shares, strict=True):
        right = describe(found.right, share)
        yield LedgerRow(site.name, site.role, site.left_source.kind, describe(found.left), right, found.sqnr)
