"""APQ-ViT: one scale after another multiplied by what lowers the error of its block's output most.

With a block's output B and its error e, the loss is the sum of H e^2 over the largest such values only, where H is the
mean squared gradient of the model's loss by B. The smallest values, a given share of all, are eliminated.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from adalog.calibration.blocks import Blocks, is_folded, nodes_of, quantizers_of, with_quantizers
from adalog.config import BlockRefinement
from adalog.graph.program import FAKE_QUANTIZE, Program
from adalog.graph.rewrite import Placed, built
from adalog.graph.sites import find_blocks
from adalog.quantizers import Quantizer, TwinUniformQuantizer

Quantizers = list[Quantizer | None]


def refined_blocks(
    program: Program,
    images: Sequence[Tensor],
    placed: Sequence[Placed],
    choices: BlockRefinement,
    gradients: Mapping[str, Tensor],
    memory: int | None = None,
) -> list[Placed]:
    """What was found for a float program, with other scales, each block by itself on what the float program gives it.

    Sites for which a norm was folded stay as they are. gradients: squared, by the name of each block's output. Besides
    what `Blocks` holds, the outputs of one block are held twice, and the values that the operations behind one of its
    sites read.
    """
    current = list(placed)
    blocks = Blocks(program, images, find_blocks(program), memory)
    for number, block in enumerate(blocks.blocks):
        indices = [
            index for index, each in enumerate(current) if nodes_of(each) <= set(block.nodes) and not is_folded(each)
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
    blocks: Blocks, number: int, placed: Sequence[Placed], choices: BlockRefinement, weights: Tensor
) -> list[Placed]:
    output = blocks.blocks[number].value_out
    alone, given = blocks.nodes(number), blocks.inputs(number)
    wanted = blocks.run(given, [output], alone)[output]
    start: Quantizers = [side for each in placed for side in reversed(quantizers_of(each))]
    # The quantizer of softmax's output stays: what attention weighs most is to stay as it is.
    fixed = [stays for each in placed for stays in (False, each.sites[0].left_source.kind == "softmax")]

    def near(best: Quantizers, index: int) -> Callable[[Quantizers], float]:
        """The loss of quantizers that differ from the best at one index: values before that site are computed once."""
        state = _with_sides(placed, best)
        whole = built(alone, state)
        known = _read_by(whole, nodes_of(state[index // 2]))
        values = blocks.run(given, known, whole)

        def loss(quantizers: Quantizers) -> float:
            outputs = blocks.run({**given, **values}, [output], built(alone, _with_sides(placed, quantizers)))[output]
            return largest_errors(outputs - wanted, weights, choices.eliminated)

        return loss

    return _with_sides(placed, refine_block(near, start, choices, fixed))


def _with_sides(placed: Sequence[Placed], quantizers: Quantizers) -> list[Placed]:
    """The sites with these quantizers: the right one of each, then its left one."""
    sides = zip(placed, quantizers[1::2], quantizers[::2], strict=True)
    return [with_quantizers(each, left, right) for each, left, right in sides]


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
    near: Callable[[Quantizers, int], Callable[[Quantizers], float]],
    start: Quantizers,
    choices: BlockRefinement,
    fixed: Sequence[bool],
) -> Quantizers:
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
                tried[index] = scaled(quantizer, factor)
                found = loss(tried)
                if found < least:
                    best, least = tried, found
    return best


def scaled(quantizer: Quantizer, factor: float) -> Quantizer:
    """The quantizer with its scale multiplied by a factor; a twin quantizer with both of its scales."""
    if isinstance(quantizer, TwinUniformQuantizer):
        return quantizer.map(lambda scale: scale * factor)
    return replace(quantizer, scale=quantizer.scale * factor)


def largest_errors(error: Tensor, weights: Tensor, eliminated: float) -> float:
    """The sum of weights * error^2 over the largest such values. eliminated: the fraction of values left out."""
    weighted = (error.square() * weights).flatten()
    kept = weighted.numel() - int(eliminated * weighted.numel())
    if kept < weighted.numel():
        weighted = weighted.topk(kept, sorted=False).values
    return float(weighted.sum(dtype=torch.float64))
