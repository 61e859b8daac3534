"""Refine scales by the error of the block's output (APQ-ViT).

Each scale in turn is multiplied by the factor that lowers the error of its block's output most. For a block's output B
with error e, the loss is the sum of H e^2 over its largest terms. H is the mean squared gradient of the model's loss
with respect to B. A given fraction of the terms, the smallest ones, is left out.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from adalog.calibration.refinement import Gradients, Refinement
from adalog.calibration.values import Values
from adalog.choices import check_span, check_whole
from adalog.graph.operations import FAKE_QUANTIZE
from adalog.graph.program import Program
from adalog.graph.rewrite import Assigned, SiteGroup, rewrite
from adalog.graph.sites import Block, find_blocks
from adalog.quantizers import Assignment, QuantizedTensor, Quantizer

Sides = list[Quantizer | QuantizedTensor | None]  # the right side, then the left side of each assignment


@dataclass(frozen=True)
class BlockRefinement(Refinement):
    """A stage that searches the scales of a block's sites again, by the error of the block's output (APQ-ViT).

    The defaults are adalog's own, because the text of the APQ-ViT paper was not available.

    Args:
        candidates: Number of multiples of a scale to try, spaced evenly over `span`.
        span: Smallest and largest multiple.
        eliminated: Fraction of the output's weighted errors to ignore, the smallest ones first.
        rounds: Number of times that each scale is searched.
        probes: Number of random gradients, as in `ScaleSearch`.

    Raises:
        ValueError: If a field has an invalid value.
    """

    kind: ClassVar[str] = "blocks"
    candidates: int = 16
    span: tuple[float, float] = (0.6, 1.4)
    eliminated: float = 0.5
    rounds: int = 1
    probes: int = 8

    def __post_init__(self) -> None:
        check_span("span", self.span)
        for name in ("candidates", "rounds", "probes"):
            check_whole(name, getattr(self, name), 1)
        if not isinstance(self.eliminated, (int, float)) or not 0 <= self.eliminated < 1:
            raise ValueError(f"eliminated = {self.eliminated!r} is not a number of at least 0 and below 1")

    def refine(
        self, program: Program, images: Sequence[Tensor], assigned: Assigned, squares: Gradients, seed: int, memory: int
    ) -> Assigned:
        # Each block is refined on its inputs in the float program, and sites with a folded norm keep their scales. The
        # outputs of one block twice, and the values that the operations after one site read, come on top of the memory.
        gradients, current, blocks = squares(self.probes), list(assigned), find_blocks(program)
        values = Values(program, images, memory, blocks)
        for block in blocks:
            names = {node.name for node in values.operations(block).nodes}  # not the nodes of a second head
            indices = [
                index
                for index, (group, assignment) in enumerate(current)
                if names.issuperset(group.nodes) and assignment.fold is None
            ]
            if indices and block.value_out in gradients:
                chosen, weights = [current[index] for index in indices], gradients[block.value_out]
                for index, result in zip(indices, _refine(values, block, chosen, self, weights), strict=True):
                    current[index] = result
        return current


def _refine(
    values: Values, block: Block, assigned: Assigned, choices: BlockRefinement, weights: Tensor
) -> list[tuple[SiteGroup, Assignment]]:
    output, alone = block.value_out, values.operations(block)
    inputs = values.images | values.of([block.value_in])
    target = values.of([output], inputs, alone)[output]
    start: Sides = [side for _, assignment in assigned for side in (assignment.right, assignment.left)]
    # The quantizer of softmax's output stays, so that the largest attention weights keep their values.
    fixed = [stays for group, _ in assigned for stays in (False, group.first.left_source.kind == "softmax")]

    def near(best: Sides, index: int) -> Callable[[Sides], float]:
        """Return the loss of quantizers that differ from `best` at one index; earlier values are computed once."""
        quantized = rewrite(alone, _with_sides(assigned, best))
        before = values.of(_read_by(quantized, assigned[index // 2][0].nodes), inputs, quantized)

        def loss(quantizers: Sides) -> float:
            quantized = rewrite(alone, _with_sides(assigned, quantizers))
            outputs = values.of([output], {**inputs, **before}, quantized)[output]
            return largest_errors(outputs - target, weights, choices.eliminated)

        return loss

    return _with_sides(assigned, refine_block(near, start, choices, fixed))


def _with_sides(assigned: Assigned, sides: Sides) -> list[tuple[SiteGroup, Assignment]]:
    """Return the assignments with these sides; an unchanged assignment stays the same object."""
    result = []
    for (group, assignment), right, left in zip(assigned, sides[::2], sides[1::2], strict=True):
        assert left is None or isinstance(left, Quantizer)
        same = right is assignment.right and left is assignment.left
        result.append((group, assignment if same else replace(assignment, left=left, right=right)))
    return result


def _read_by(program: Program, names: Collection[str]) -> list[str]:
    """Return the computed values that these nodes, their quantizers and all their dependents read from elsewhere."""
    quantizers = {node.name for node in program.nodes if node.op == FAKE_QUANTIZE}
    later = {ref for node in program.nodes if node.name in names for ref in node.refs()} & quantizers | set(names)
    read = list[str]()
    for node in program.nodes:
        if node.name in later or not later.isdisjoint(node.refs()):
            later.add(node.name)
            read += node.refs()
    earlier = {node.name for node in program.nodes} - later
    return [name for name in dict.fromkeys(read) if name in earlier]


def refine_block(
    near: Callable[[Sides, int], Callable[[Sides], float]],
    start: Sides,
    choices: BlockRefinement,
    fixed: Sequence[bool],
) -> Sides:
    """Multiply the scale of one quantizer after another by the factor that lowers the loss most, if any does.

    near(best, index): the loss as a function of quantizers that differ from `best` only at this index.
    fixed: True for each quantizer that must not change.
    """
    factors = torch.linspace(*choices.span, choices.candidates, dtype=torch.float64).tolist()
    best, least = list(start), None
    for _ in range(choices.rounds):
        for index, stays in enumerate(fixed):
            quantizer = best[index]
            if stays or quantizer is None:
                continue
            loss = near(best, index)
            least = loss(best) if least is None else least
            for factor in factors:
                candidate = list(best)
                candidate[index] = quantizer.rescale(factor)
                error = loss(candidate)
                if error < least:
                    best, least = candidate, error
    return best


def largest_errors(error: Tensor, weights: Tensor, eliminated: float) -> float:
    """Return the sum of weights * error^2 over its largest terms; `eliminated` is the fraction left out."""
    weighted = (error.square() * weights).flatten()
    if left_out := int(eliminated * weighted.numel()):
        weighted = weighted.topk(weighted.numel() - left_out, sorted=False).values
    return float(weighted.sum(dtype=torch.float64))
