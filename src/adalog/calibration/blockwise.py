"""APQ-ViT: one scale after another multiplied by what lowers the error of its block's output most.

With a block's output B and its error e, the loss is the sum of H e^2 over the largest such values only, where H is the
mean squared gradient of the model's loss by B. The smallest values, a given share of all, are eliminated.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from adalog.calibration.blocks import Blocks
from adalog.choices import BlockRefinement
from adalog.graph.operations import FAKE_QUANTIZE
from adalog.graph.program import Program
from adalog.graph.rewrite import Assigned, SiteGroup, rewritten
from adalog.graph.sites import find_blocks
from adalog.quantizers import Assignment, QuantizedTensor, Quantizer

Sides = list[Quantizer | QuantizedTensor | None]  # the right side of each assignment, then its left one


def refined_blocks(
    program: Program,
    images: Sequence[Tensor],
    assigned: Assigned,
    choices: BlockRefinement,
    gradients: Mapping[str, Tensor],
    memory: int | None = None,
) -> list[tuple[SiteGroup, Assignment]]:
    """The assignments with other scales, each block by itself on what the float program gives it.

    Sites for which a norm was folded stay as they are. gradients: squared, by the name of each block's output. Besides
    what `Blocks` holds, the outputs of one block are held twice, and the values that the operations behind one of its
    sites read.
    """
    current = list(assigned)
    blocks = Blocks(program, images, find_blocks(program), memory)
    for number, block in enumerate(blocks.blocks):
        names = {node.name for node in blocks.nodes(number).nodes}  # without those of a second head
        indices = [
            index
            for index, (group, assignment) in enumerate(current)
            if names.issuperset(group.nodes) and assignment.fold is None
        ]
        if not indices or block.value_out not in gradients:
            continue
        changed = _refined_block(
            blocks, number, [current[index] for index in indices], choices, gradients[block.value_out]
        )
        for index, each in zip(indices, changed, strict=True):
            current[index] = each
    return current


def _refined_block(
    blocks: Blocks, number: int, assigned: Assigned, choices: BlockRefinement, weights: Tensor
) -> list[tuple[SiteGroup, Assignment]]:
    output = blocks.blocks[number].value_out
    alone, given = blocks.nodes(number), blocks.inputs(number)
    wanted = blocks.run(given, [output], alone)[output]
    start: Sides = [side for _, each in assigned for side in (each.right, each.left)]
    # The quantizer of softmax's output stays: what attention weighs most is to stay as it is.
    fixed = [stays for group, _ in assigned for stays in (False, group.first.left_source.kind == "softmax")]

    def near(best: Sides, index: int) -> Callable[[Sides], float]:
        """The loss of quantizers that differ from the best at one index: values before that site are computed once."""
        state = _with_sides(assigned, best)
        whole = rewritten(alone, state)
        known = _read_by(whole, state[index // 2][0].nodes)
        values = blocks.run(given, known, whole)

        def loss(quantizers: Sides) -> float:
            outputs = blocks.run({**given, **values}, [output], rewritten(alone, _with_sides(assigned, quantizers)))[
                output
            ]
            return largest_errors(outputs - wanted, weights, choices.eliminated)

        return loss

    return _with_sides(assigned, refine_block(near, start, choices, fixed))


def _with_sides(assigned: Assigned, sides: Sides) -> list[tuple[SiteGroup, Assignment]]:
    """The assignments with these sides; the same object where nothing changes."""
    changed = []
    for (group, assignment), right, left in zip(assigned, sides[::2], sides[1::2], strict=True):
        assert left is None or isinstance(left, Quantizer)
        same = right is assignment.right and left is assignment.left
        changed.append((group, assignment if same else replace(assignment, left=left, right=right)))
    return changed


def _read_by(program: Program, names: Collection[str]) -> list[str]:
    """The computed values that these nodes, their quantizers and all nodes that depend on them read from elsewhere."""
    quantizers = {node.name for node in program.nodes if node.op == FAKE_QUANTIZE}
    later = {ref for node in program.nodes if node.name in names for ref in node.refs()} & quantizers
    later |= set(names)
    read: dict[str, None] = {}
    for node in program.nodes:
        if node.name in later or not later.isdisjoint(node.refs()):
            later.add(node.name)
            read.update(dict.fromkeys(node.refs()))
    made = {node.name for node in program.nodes}
    return [name for name in read if name in made and name not in later]


def refine_block(
    near: Callable[[Sides, int], Callable[[Sides], float]],
    start: Sides,
    choices: BlockRefinement,
    fixed: Sequence[bool],
) -> Sides:
    """The quantizers with scales multiplied, one quantizer after another, where that lowers the loss.

    near(best, index): the loss as a function of quantizers that differ from `best` at this index. fixed: whether each
    quantizer stays as it is.
    """
    low, high = choices.span
    factors = torch.linspace(low, high, choices.candidates, dtype=torch.float64).tolist()
    best = list(start)
    least: float | None = None
    for _ in range(choices.rounds):
        for index, stays in enumerate(fixed):
            quantizer = best[index]
            if stays or quantizer is None:
                continue
            loss = near(best, index)
            least = loss(best) if least is None else least
            for factor in factors:
                tried = list(best)
                tried[index] = quantizer.scaled(factor)
                found = loss(tried)
                if found < least:
                    best, least = tried, found
    return best


def largest_errors(error: Tensor, weights: Tensor, eliminated: float) -> float:
    """The sum of weights * error^2 over the largest such values. eliminated: the fraction of values left out."""
    weighted = (error.square() * weights).flatten()
    kept = weighted.numel() - int(eliminated * weighted.numel())
    if kept < weighted.numel():
        weighted = weighted.topk(kept, sorted=False).values
    return float(weighted.sum(dtype=torch.float64))
