"""What is done to scales beyond single products: judged by a block's output, or by the model's.

- Blockwise (APQ-ViT): of a block's output B and its error e, the loss is the sum of H e^2 over the largest such values
  alone, H being the mean squared gradient of the model's loss by B. The smallest share of them is eliminated. One scale
  after another is multiplied by what lowers the loss most.
- Evolution (Evol-Q): of outputs o_i of the quantized and f_j of the float model, normalised to length 1, the loss is
  InfoNCE, the mean over images i of -log(exp(o_i f_i / t) / sum_j exp(o_i f_j / t)). Scales s of a block become
  |s + u|, u uniform in [-radius, radius].
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from adalog.choices import BlockRefinement, Evolution, Refinement
from adalog.graph.program import FAKE_QUANTIZE, Node, Program, Ref, leaves_of, map_refs
from adalog.graph.rewrite import Assigned, SiteGroup, rewritten
from adalog.graph.sites import Block, find_blocks
from adalog.quantizers import MAX_BITS, Assignment, QuantizedTensor, Quantizer, UniformQuantizer

Weight = UniformQuantizer | QuantizedTensor
Quantizers = list[Quantizer | QuantizedTensor | None]


def refined(
    program: Program,
    images: Sequence[Tensor],
    placed: Assigned,
    choices: Refinement,
    gradients: Mapping[str, Tensor],
    seed: int,
) -> list[tuple[SiteGroup, Assignment]]:
    """What was found for a float program, with other scales. gradients: squared, by each block's output (blockwise)."""
    if isinstance(choices, Evolution):
        return _evolved(program, images, placed, choices, torch.Generator().manual_seed(seed))
    return _refined_blocks(program, images, placed, choices, gradients)


# --- evolution -------------------------------------------------------------------------------------------------------


def _evolved(
    program: Program,
    images: Sequence[Tensor],
    placed: Assigned,
    choices: Evolution,
    generator: torch.Generator,
) -> list[tuple[SiteGroup, Assignment]]:
    """Blocks from the last to the first, in each pass; a block's individuals are the scales of its weights.

    What a block is given hangs on none of those behind it: one run a pass serves all its blocks, whose mutants run from
    there on.
    """
    wanted = _first_output(program.run(images))
    blocks = find_blocks(program)
    current, least = list(placed), None
    for _ in range(choices.passes):
        given, numbers = _block_inputs(rewritten(program, current), images, blocks)
        for block in reversed(blocks):
            weights = {
                index: assignment.right
                for index, (group, assignment) in enumerate(current)
                if group.first.node.name in block.nodes and group.first.role in ("linear", "conv")
            }
            start = {
                index: each for index, each in weights.items() if isinstance(each, (UniformQuantizer, QuantizedTensor))
            }
            if not start:
                continue
            put = partial(_with_weights, current, list(start))

            def loss(
                quantizers: list[Weight],
                put: Callable[..., list[tuple[SiteGroup, Assignment]]] = put,
                block: Block = block,
                inputs: Sequence[Tensor] = _inputs(program, images, block, given),
                numbers: Mapping[str, int] = numbers,
            ) -> float:
                whole = rewritten(program, put(quantizers))
                outputs = _first_output(_between(whole, block.value_in, whole.output, numbers).run(inputs))
                return info_nce(outputs, wanted, choices.temperature)

            least, best = evolve(loss, list(start.values()), choices, generator, least)
            current = put(best)
    return current


def _with_weights(
    placed: Assigned, indices: Sequence[int], quantizers: Sequence[Weight]
) -> list[tuple[SiteGroup, Assignment]]:
    changed = list(placed)
    for index, quantizer in zip(indices, quantizers, strict=True):
        group, assignment = changed[index]
        if quantizer is not assignment.right:
            changed[index] = group, replace(assignment, right=quantizer)
    return changed


def _first_output(output: Any) -> Tensor:
    """The first floating tensor of a model's outputs."""
    return next(leaf for leaf in leaves_of(output) if isinstance(leaf, Tensor) and leaf.is_floating_point())


def evolve(
    loss: Callable[[list[Weight]], float],
    start: list[Weight],
    choices: Evolution,
    generator: torch.Generator,
    least: float | None = None,
) -> tuple[float, list[Weight]]:
    """The best of a population that starts as copies of one individual, after so many cycles, and its loss.

    Each cycle draws samples with replacement, mutates the best of them, and drops the worst of all. least: the loss of
    the start, if it is known.
    """
    population = [(loss(start) if least is None else least, start)] * choices.population
    for _ in range(choices.cycles):
        drawn = torch.randint(0, len(population), (choices.samples,), generator=generator).tolist()
        parent = population[min(drawn)][1]  # they are in order, the best first
        child = [mutated(quantizer, choices.radius, generator) for quantizer in parent]
        population = sorted([*population, (loss(child), child)], key=lambda individual: individual[0])[:-1]
    return population[0]


def mutated(weight: Weight, radius: float | None, generator: torch.Generator) -> Weight:
    """With every scale moved by at most the radius, and never zero; codes that are chosen already stay."""
    if isinstance(weight, QuantizedTensor):
        return replace(weight, quantizer=_moved(weight.quantizer, radius, generator))
    return _moved(weight, radius, generator)


def _moved(quantizer: UniformQuantizer, radius: float | None, generator: torch.Generator) -> UniformQuantizer:
    if radius is None:
        radius = 1e-4 if quantizer.bits == MAX_BITS else 1e-3
    moves = torch.rand(quantizer.scale.shape, generator=generator, dtype=torch.float64) * 2 - 1
    scale = (quantizer.scale + radius * moves.to(quantizer.scale)).abs()
    return replace(quantizer, scale=scale.clamp(min=2.0**-94))


def info_nce(outputs: Tensor, wanted: Tensor, temperature: float) -> float:
    """How well each output, (N, ...), tells its own wanted one from those of the other images."""
    similar = normalize(outputs.flatten(1), dim=1) @ normalize(wanted.flatten(1), dim=1).T
    return float(cross_entropy(similar.double() / temperature, torch.arange(len(similar), device=similar.device)))


# --- blockwise -------------------------------------------------------------------------------------------------------


def _refined_blocks(
    program: Program,
    images: Sequence[Tensor],
    placed: Assigned,
    choices: BlockRefinement,
    gradients: Mapping[str, Tensor],
) -> list[tuple[SiteGroup, Assignment]]:
    """Each block by itself, on what the float network gives it, with those of its sites that no norm was folded for."""
    current = list(placed)
    blocks = find_blocks(program)
    inputs, numbers = _block_inputs(program, images, blocks)
    for block in blocks:
        indices = [
            index
            for index, (group, assignment) in enumerate(current)
            if {site.node.name for site in group.sites} <= set(block.nodes) and assignment.fold is None
        ]
        if not indices or block.value_out not in gradients:
            continue
        alone = _between(program, block.value_in, Ref(block.value_out), numbers)
        given = _inputs(program, images, block, inputs)
        wanted = alone.run(given)
        start: Quantizers = [side for index in indices for side in _sides(current[index][1])]
        # Whatever attention is found to weigh most is to stay as it is.
        fixed = [stays for index in indices for stays in (False, current[index][0].first.left_source.kind == "softmax")]
        put = partial(_with_sides, [current[index] for index in indices])

        def near(
            best: Quantizers,
            index: int,
            put: Callable[..., list[tuple[SiteGroup, Assignment]]] = put,
            alone: Program = alone,
            given: Sequence[Tensor] = given,
            wanted: Tensor = wanted,
            weights: Tensor = gradients[block.value_out],
        ) -> Callable[[Quantizers], float]:
            state = put(best)
            whole = rewritten(alone, state)
            known = _read_by(whole, {site.node.name for site in state[index // 2][0].sites})
            values = replace(whole, output=[Ref(name) for name in known]).pruned().run(given)

            def loss(quantizers: Quantizers) -> float:
                rest = _resumed(rewritten(alone, put(quantizers)), known)
                return largest_errors(rest.run([*given, *values]) - wanted, weights, choices.eliminated)

            return loss

        for index, each in zip(indices, put(refine_block(near, start, choices, fixed)), strict=True):
            current[index] = each
    return current


def _sides(assignment: Assignment) -> Quantizers:
    return [assignment.right, assignment.left]


def _with_sides(placed: Assigned, quantizers: Quantizers) -> list[tuple[SiteGroup, Assignment]]:
    changed = []
    for (group, assignment), right, left in zip(placed, quantizers[::2], quantizers[1::2], strict=True):
        same = right is assignment.right and left is assignment.left
        changed.append((group, assignment if same else replace(assignment, left=left, right=right)))  # type: ignore[arg-type]
    return changed


def _block_inputs(
    program: Program, images: Sequence[Tensor], blocks: Sequence[Block]
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """What each block is given, and all sizes on the way."""
    names = {block.value_in for block in blocks}
    inputs: dict[str, Tensor] = {}
    numbers: dict[str, int] = {}

    def watch(node: Node, args: tuple[Any, ...], result: Any) -> None:
        if isinstance(result, int):
            numbers[node.name] = result
        elif node.name in names:
            inputs[node.name] = result

    program.run(images, watch)
    return inputs, numbers


def _inputs(program: Program, images: Sequence[Tensor], block: Block, given: Mapping[str, Tensor]) -> list[Tensor]:
    """What `_between` takes from this block on."""
    return [*images, *([] if block.value_in in program.inputs else [given[block.value_in]])]


def _between(program: Program, value_in: str, output: Any, numbers: Mapping[str, int]) -> Program:
    """What leads from a block's input to an output, its sizes fixed. It takes what `_resumed` takes."""

    def fix(ref: Ref) -> Any:
        return numbers.get(ref.name, ref)

    nodes = tuple(
        replace(
            node, args=map_refs(node.args, fix), kwargs={key: map_refs(arg, fix) for key, arg in node.kwargs.items()}
        )
        for node in program.nodes
    )
    known = [] if value_in in program.inputs else [value_in]
    return _resumed(replace(program, nodes=nodes, output=output), known)


def _resumed(program: Program, known: Sequence[str]) -> Program:
    """What is left to do where these values are known: it takes the program's inputs and, behind them, the values."""
    nodes = tuple(node for node in program.nodes if node.name not in known)
    return replace(program, inputs=(*program.inputs, *known), nodes=nodes).pruned()


def _read_by(program: Program, names: Collection[str]) -> list[str]:
    """The values that these nodes, with the quantizers before them, and all that hangs on them read from elsewhere."""
    quantizers = {node.name for node in program.nodes if node.op == FAKE_QUANTIZE}
    later = {ref for node in program.nodes if node.name in names for ref in node.refs()} & quantizers
    later |= set(names)
    read: dict[str, None] = {}
    for node in program.nodes:
        if node.name in later or not later.isdisjoint(node.refs()):
            later.add(node.name)
            read.update(dict.fromkeys(node.refs()))
    return [name for name in read if name not in later | set(program.inputs) | set(program.tensors)]


def refine_block(
    near: Callable[[Quantizers, int], Callable[[Quantizers], float]],
    start: Quantizers,
    choices: BlockRefinement,
    fixed: Sequence[bool],
) -> Quantizers:
    """The quantizers with scales multiplied, one quantizer after another, as far as the loss falls.

    near: the loss of quantizers that differ from given ones at one index. fixed: which of them stay as they are.
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
    """The sum of weights * error^2 over the largest such values; `eliminated`: the share of the smallest ones."""
    weighted = (error.square() * weights).flatten()
    kept = weighted.numel() - int(eliminated * weighted.numel())
    if kept < weighted.numel():
        weighted = weighted.topk(kept, sorted=False).values
    return float(weighted.sum(dtype=torch.float64))
