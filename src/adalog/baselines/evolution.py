"""Perturb the scales of weights block by block, and keep the best ones by the model's output (Evol-Q).

Let o_i be the outputs of the quantized model and f_j those of the float model, normalised to length 1. The loss is
InfoNCE: the mean over images i of -log(exp(o_i f_i / t) / sum_j exp(o_i f_j / t)). A mutation replaces the scales s of
a block by |s + u|, with u uniform in [-radius, radius].
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from adalog.calibration.refinement import Gradients, Refinement
from adalog.calibration.values import Values
from adalog.choices import check_number, check_whole
from adalog.errors import CalibrationError
from adalog.graph.program import Program, refs_of
from adalog.graph.rewrite import Assigned, SiteGroup, rewrite
from adalog.graph.sites import find_blocks
from adalog.graph.tracing import trace
from adalog.quantizers import MAX_BITS, Assignment, QuantizedTensor, Quantizer

Weight = Quantizer | QuantizedTensor  # the codes of a QuantizedTensor stay


@dataclass(frozen=True)
class Evolution(Refinement):
    """A stage that perturbs the scales of weights block by block, by the InfoNCE loss of the model's output (Evol-Q).

    The defaults are those of Evol-Q. Evol-Q's code also chooses the block and pass with the best top-1 on its test
    images; adalog does not use labels.

    Args:
        passes: Number of times that all blocks are visited.
        cycles: Number of mutants of a block per visit.
        population: Number of sets of scales that survive.
        samples: Number of survivors that are sampled for each mutant. The best of them is its parent.
        temperature: Temperature of the InfoNCE loss.
        radius: Largest difference between a mutant's scales and its parent's. None: 1e-4 at 8 bits, and 1e-3 below.

    Raises:
        ValueError: If a field has an invalid value.
    """

    kind: ClassVar[str] = "evolution"
    passes: int = 10
    cycles: int = 3
    population: int = 15
    samples: int = 10
    temperature: float = 3.0
    radius: float | None = None

    def __post_init__(self) -> None:
        for name in ("passes", "cycles", "population", "samples"):
            check_whole(name, getattr(self, name), 1)
        check_number("temperature", self.temperature, 0)
        if self.radius is not None:
            check_number("radius", self.radius, 0)

    def refine(
        self, program: Program, images: Sequence[Tensor], assigned: Assigned, squares: Gradients, seed: int, memory: int
    ) -> Assigned:
        # Each pass goes from the last block to the first. A block's input does not depend on the blocks after it, so
        # the inputs computed at the start of a pass serve all blocks.
        generator = torch.Generator().manual_seed(seed)
        blocks, output = find_blocks(program), _first_output(program, images)
        targets = Values(program, images, memory, blocks).of([output])
        current, least = list(assigned), None

        def loss(
            before: Values, inputs: dict[str, Tensor], assigned: Assigned, indices: list[int], weights: list[Weight]
        ) -> float:
            quantized = rewrite(program, _with_weights(assigned, indices, weights))
            return info_nce(before.of([output], inputs, quantized)[output], targets[output], self.temperature)

        for _ in range(self.passes):
            before = Values(rewrite(program, current), images, memory, blocks)
            for block in reversed(blocks):
                start = _weights(current, set(block.nodes))
                if not start:
                    continue
                inputs = before.images | before.of([block.value_in])
                loss_of_block = partial(loss, before, inputs, current, list(start))
                least, best = evolve(loss_of_block, list(start.values()), self, generator, least)
                current = _with_weights(current, list(start), best)
        return current


def _weights(assigned: Assigned, nodes: set[str]) -> dict[int, Weight]:
    """Return the weights of a block, by their index in the assignments."""
    return {
        index: assignment.right
        for index, (group, assignment) in enumerate(assigned)
        if group.first.role in ("linear", "conv") and nodes.issuperset(group.nodes) and assignment.right is not None
    }


def _with_weights(
    assigned: Assigned, indices: Sequence[int], weights: Sequence[Weight]
) -> list[tuple[SiteGroup, Assignment]]:
    result = list(assigned)
    for index, weight in zip(indices, weights, strict=True):
        group, assignment = result[index]
        if weight is not assignment.right:
            result[index] = group, replace(assignment, right=weight)
    return result


def _first_output(program: Program, images: Sequence[Tensor]) -> str:
    """Return the name of the model's first floating-point output. Raises CalibrationError if there is none."""
    values = trace(program, images)
    for name in refs_of(program.output):
        if isinstance(values[name], Tensor) and values[name].is_floating_point():
            return name
    raise CalibrationError("the model has no floating-point output for this method to compare: choose another method")


def evolve(
    loss: Callable[[list[Weight]], float],
    start: list[Weight],
    choices: Evolution,
    generator: torch.Generator,
    least: float | None = None,
) -> tuple[float, list[Weight]]:
    """Evolve a population that starts as copies of one individual, and return (least loss, best individual).

    Each cycle samples individuals with replacement, mutates the best of them, and drops the worst individual of all.
    least: the loss of the start, if it is known.
    """
    population = [(loss(start) if least is None else least, start)] * choices.population
    for _ in range(choices.cycles):
        numbers = torch.randint(0, len(population), (choices.samples,), generator=generator).tolist()
        parent = population[min(numbers)][1]  # sorted, the best first
        child = [mutate(quantizer, choices.radius, generator) for quantizer in parent]
        population = sorted([*population, (loss(child), child)], key=lambda individual: individual[0])[:-1]
    return population[0]


def mutate(weight: Weight, radius: float | None, generator: torch.Generator) -> Weight:
    """Return the weight with every scale moved by at most the radius; no scale becomes zero."""
    if isinstance(weight, QuantizedTensor):
        return replace(weight, quantizer=mutate(weight.quantizer, radius, generator))  # type: ignore[arg-type]
    if radius is None:
        radius = 1e-4 if weight.bits == MAX_BITS else 1e-3
    moves = torch.rand(weight.scale.shape, generator=generator, dtype=torch.float64) * 2 - 1
    scale = (weight.scale + radius * moves.to(weight.scale)).abs()
    return replace(weight, scale=scale.clamp(min=2.0**-94))  # type: ignore[type-var]


def info_nce(outputs: Tensor, targets: Tensor, temperature: float) -> float:
    """Return the InfoNCE loss of the outputs against their targets, (N, ...) each."""
    rows, others = (normalize(value.reshape(len(value), -1), dim=1) for value in (outputs, targets))
    similar = rows @ others.T
    return float(cross_entropy(similar.double() / temperature, torch.arange(len(similar), device=similar.device)))
