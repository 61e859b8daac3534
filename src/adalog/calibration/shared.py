"""Compute the data that some searches need in addition to the operands, once for all sites."""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from adalog.calibration.gradients import gradient_probe, hessian_probe, noise_probe, squared_gradients
from adalog.calibration.importance import resample, row_weights
from adalog.calibration.observe import Observations
from adalog.calibration.operands import choices_of, formats_of, in_shape_of_product, operands_of
from adalog.config import Config
from adalog.graph.capture import take
from adalog.graph.program import Program
from adalog.graph.rewrite import SiteGroup
from adalog.graph.sites import Block, Pair, find_splits
from adalog.quantizers import Assignment, UniformFormat
from adalog.search.product import Product
from adalog.search.tables import with_table


@dataclass(eq=False)
class ProductFields:
    """The optional fields of `Product` that a search needs (`AnySearch.needs`), for any site.

    All fields are held whole, in addition to the memory of `Observations`. unfolded: returns the reason why a pair's
    norm is not folded. memory: bytes for the values of a stage or of a backward pass.
    """

    program: Program
    images: Sequence[Tensor]
    groups: Sequence[SiteGroup]
    blocks: Sequence[Block]
    observed: Observations
    seed: int
    unfolded: Callable[[Pair, Config], str]
    memory: int
    _cache: dict[Any, Any] = field(default_factory=dict, init=False)
    _in_order: tuple[Config, dict[str, Tensor]] | None = field(default=None, init=False)
    _probe: Tensor | None = field(default=None, init=False)

    def probe(self, gradient: Tensor) -> None:
        """Weight errors by this gradient of a loss with respect to the model's only output, not by random ones."""
        self._probe = gradient
        self._cache.clear()

    def probes(self) -> list[tuple[str, Tensor]]:
        """Return the gradient that `probe` was called with, for a fingerprint; empty if there is none."""
        return [] if self._probe is None else [("probe", self._probe)]

    def prepare(self, config: Config) -> None:
        """Compute everything that the searches of a configuration share, before they run in parallel."""
        self.operands_in_order(config)
        needs = config.search.needs
        if needs.probes:
            self.squared_gradients(needs.probes, noise=needs.noise)
        if needs.row_splits:
            self._all_row_splits()
        self.row_weights(needs.importance)

    def gather_fields(self, group: SiteGroup, names: Collection[str], config: Config) -> dict[str, Any]:
        """Return "weights" and "row_splits" of a group's product, if needed. names: what its search reads."""
        needs, fields = config.search.needs, dict[str, Any]()
        if needs.probes:
            gradients = self.squared_gradients(needs.probes, noise=needs.noise)
            fields["weights"] = self._in_shape_of_product(group, names, gradients)
        if needs.row_splits:
            fields["row_splits"] = self._row_splits(group)
        return fields

    def rows(self, group: SiteGroup, names: Collection[str], config: Config) -> Tensor | None:
        """Return the numbers of the rows that a search reads so that they count by importance; None: each row once.

        Shape: (T,), or (*batch, T) for a product of activations. names: as in `gather_fields`.
        """
        weights = self.row_weights(config.search.needs.importance)
        if weights is None:
            return None
        importance = self._in_shape_of_product(group, names, weights).mean(-1)
        return resample(importance.mean(0) if group.first.role == "conv" and importance.ndim > 1 else importance)

    def _in_shape_of_product(
        self, group: SiteGroup, names: Collection[str], of_outputs: Mapping[str, Tensor]
    ) -> Tensor:
        """Return values of the outputs of a group's sites, which may lack channels, in the shape of its product."""
        sites = [site for call in group.calls for site in call]
        values = {site.node.name: self.observed.alike(site.left, names, of_outputs[site.node.name]) for site in sites}
        if group.first.role == "conv":
            channels = len(self.program.tensors[group.first.right])
            values = {name: value.expand(-1, channels, -1, -1) for name, value in values.items()}
        return in_shape_of_product(self.program, group, values)

    def row_weights(self, power: float) -> dict[str, Tensor] | None:
        """Return the weights of the rows of every site's output: `importance.row_weights`."""
        key = ("importance", power)
        if key not in self._cache:
            self._cache[key] = row_weights(self.program, self.images, self.groups, power, self.seed, self.memory)
        return self._cache[key]

    def order(self, config: Config) -> Config | None:
        """Return a cache key: the config if sites are calibrated in sequence, else None."""
        return None if config.search.needs.observe is None else config

    def operands_in_order(self, config: Config) -> Mapping[str, Tensor] | None:
        """Return the operands by name if sites are calibrated in sequence under these choices, else None."""
        observe = config.search.needs.observe
        if observe is None:
            return None
        if self._in_order is None or self._in_order[0] != config:  # held for one configuration at a time
            search = functools.partial(self._search, config)
            self._in_order = config, observe(self.program, self.images, self.groups, search)
        return self._in_order[1]

    def _search(self, config: Config, group: SiteGroup, operands: Mapping[str, Tensor]) -> Assignment:
        """Search a group on these operands; each channel of a norm to be folded has its own quantizer (RepQ-ViT)."""
        choices, assignments = choices_of(group, config), []
        formats = formats_of(group.first, choices)
        if group.pair is not None and not self.unfolded(group.pair, choices):
            formats = [UniformFormat(choices.activation_bits, own_dims=(1,))]
        for activation in formats:
            product = Product(group.first.role, *operands_of(self.program, group, operands, choices, None, activation))
            assignments.append(with_table(product, choices.search.search_product(product), choices.tables))
        return max(assignments, key=lambda assignment: assignment.sqnr)

    def squared_gradients(self, probes: int, *, noise: bool = False) -> dict[str, Tensor]:
        """Return squared gradients of the loss with respect to each site's and block's output, by output name."""
        key = ("gradients", probes, noise)
        if key not in self._cache:
            generator = torch.Generator().manual_seed(self.seed)
            random_probes = [noise_probe(generator)] if noise else [hessian_probe(generator)] * probes
            used = random_probes if self._probe is None else [gradient_probe(self._probe)]
            sites = {name for group in self.groups for name in group.nodes}
            names = sites | {block.value_out for block in self.blocks}
            self._cache[key] = squared_gradients(self.program, self.images, names, used, memory=self.memory)
        return self._cache[key]

    def _all_row_splits(self) -> dict[str, Tensor]:
        if "row splits" not in self._cache:
            sites = [site for group in self.groups for site in group.sites]
            self._cache["row splits"] = find_splits(self.program, sites, take(self.images, [0, 1]))
        return self._cache["row splits"]

    def _row_splits(self, group: SiteGroup) -> Tensor | None:
        """Return the split of each row of the group's weight, (O,), whose rows share a scale; None: all differ."""
        if group.first.role != "linear":
            return None
        splits, count = [], 0
        for site in group.sites:
            splits.append(self._all_row_splits()[site.name] + count)
            count = int(splits[-1].max()) + 1
        return torch.cat(splits)
