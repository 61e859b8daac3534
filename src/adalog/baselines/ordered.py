"""Observe each operand after everything before its site is quantized, as in RepQ-ViT's released code."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from adalog.graph.program import Node, Program, Ref
from adalog.graph.rewrite import SiteGroup, rewrite
from adalog.quantizers import Assignment


@torch.no_grad()
def observe_in_order(
    program: Program,
    images: Sequence[Tensor],
    groups: Sequence[SiteGroup],
    search: Callable[[SiteGroup, Mapping[str, Tensor]], Assignment],
) -> dict[str, Tensor]:
    """Return the operands of all sites by name, from one forward that quantizes each site before the next.

    If a layer is called several times, each call is quantized by the inputs of the calls up to it.
    search: returns the assignment of a group for operands by name.
    """
    values = dict(program.tensors)
    group_of = {
        site.node.name: group.until(number)
        for group in groups
        for number, call in enumerate(group.calls)
        for site in call
    }
    outputs: dict[str, Tensor] = {}

    def watch(node: Node, args: tuple[Any, ...], result: Any) -> Any:
        group = group_of.get(node.name)
        if group is None:
            return None
        if node.name not in outputs:
            site = group.first
            values[group.read[-1]] = args[0]
            if site.role in ("qk", "av"):
                values[site.right] = args[1]
            outputs.update(_quantized_outputs(program, group, search(group, values), values))
        return outputs.pop(node.name)

    program.run(images, watch)
    return values


def _quantized_outputs(
    program: Program, group: SiteGroup, assignment: Assignment, values: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the outputs of the group's last call with quantized operands, by the names of their nodes."""
    nodes = tuple(site.node for call in group.calls for site in call)
    operand_names = dict.fromkeys(name for site in group.sites for name in (*group.read, site.right))
    inputs = tuple(name for name in operand_names if name not in program.tensors)
    last = [site.node.name for site in group.calls[-1]]
    alone = Program(inputs, nodes, tuple(map(Ref, last)), program.tensors)
    results = rewrite(alone, [(group, assignment)]).run([values[name] for name in inputs])
    return dict(zip(last, results, strict=True))
