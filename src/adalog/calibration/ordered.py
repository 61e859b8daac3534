"""Observe each operand after everything before its site is quantized, as in RepQ-ViT's released code."""

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
    """Return the operands of all sites by name, from one forward that quantizes each site before the next.

    In this forward, each channel of a norm that will be folded has its own quantizer (RepQ-ViT). If a layer is called
    several times, each call is quantized by the inputs of the calls up to it. unfolded: returns the reason why a norm
    is not folded, as in `Calibration`.
    """
    seen = dict(program.tensors)
    group_of = {
        each.node.name: group.until(number)
        for group in groups
        for number, call in enumerate(group.calls)
        for each in call
    }
    outputs: dict[str, Tensor] = {}

    def watch(node: Node, args: tuple[Any, ...], result: Any) -> Any:
        group = group_of.get(node.name)
        if group is None:
            return None
        if node.name not in outputs:
            site = group.first
            seen[group.read[-1]] = args[0]
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
    """Return the outputs of the group's last call with quantized operands, by the names of their nodes."""
    module, tried = SEARCHES[type(choices.search)], []
    for activation in formats:
        product = Product(group.first.role, *operands_of(program, group, seen, choices, None, activation))
        tried.append(with_table(product, module.search_product(product, choices.search), choices.tables))
    found = max(tried, key=lambda each: each.sqnr)
    nodes = tuple(each.node for call in group.calls for each in call)
    operand_names = dict.fromkeys(name for site in group.sites for name in (*group.read, site.right))
    inputs = tuple(name for name in operand_names if name not in program.tensors)
    last = [site.node.name for site in group.calls[-1]]
    alone = Program(inputs, nodes, tuple(map(Ref, last)), program.tensors)
    results = rewritten(alone, [(group, found)]).run([seen[name] for name in inputs])
    return dict(zip(last, results, strict=True))
