"""Operands as they are once everything before their site is quantized, as RepQ-ViT's released code has them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from adalog.calibration.operands import choices_of, formats_of, operands_of
from adalog.config import Config
from adalog.graph.program import Node, Program, Ref
from adalog.graph.rewrite import SiteGroup, rewritten
from adalog.graph.sites import Pair
from adalog.search import SEARCHES
from adalog.search.operand import Format
from adalog.search.product import Product, with_table


@torch.no_grad()
def observe_in_order(
    program: Program,
    images: Sequence[Tensor],
    groups: Sequence[SiteGroup],
    config: Config,
    unfolded: Callable[[Pair, Config], str],
) -> dict[str, Tensor]:
    """The operands of all sites by name, from one forward in which each site is quantized before the next one runs.

    The channels of a norm that will be folded have quantizers of their own in this forward (RepQ-ViT). unfolded: says
    why choices leave the norm of a pair as it is, as `Calibration` does.
    """
    seen = dict(program.tensors)
    group_of = {site.node.name: group for group in groups for site in group.sites}
    outputs: dict[str, Tensor] = {}

    def watch(node: Node, args: tuple[Any, ...], result: Any) -> Any:
        group = group_of.get(node.name)
        if group is None:
            return None
        if node.name not in outputs:
            site = group.first
            seen[site.left] = args[0]
            if site.role in ("qk", "av"):
                seen[site.right] = args[1]
            choices = choices_of(group, config)
            formats = formats_of(site, choices)
            if group.pair is not None and not unfolded(group.pair, choices):
                formats = [Format(choices.activation_bits, own_dims=(1,))]
            outputs.update(_quantized_outputs(program, group, choices, formats, seen))
        return outputs.pop(node.name)

    program.run(images, watch)
    return seen


def _quantized_outputs(
    program: Program, group: SiteGroup, choices: Config, formats: Sequence[Format], seen: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The outputs of the group's sites with quantized operands, by the names of their nodes."""
    module, tried = SEARCHES[type(choices.search)], []
    for activation in formats:
        product = Product(group.first.role, *operands_of(program, group, seen, choices, None, activation))
        tried.append(with_table(product, module.search_product(product, choices.search), choices.tables))
    found = max(tried, key=lambda each: each.sqnr)
    nodes = tuple(site.node for site in group.sites)
    operand_names = dict.fromkeys(name for site in group.sites for name in (site.left, site.right))
    inputs = tuple(name for name in operand_names if name not in program.tensors)
    alone = Program(inputs, nodes, tuple(Ref(node.name) for node in nodes), program.tensors)
    results = rewritten(alone, [(group, found)]).run([seen[name] for name in inputs])
    return {node.name: result for node, result in zip(nodes, results, strict=True)}
