"""What is done to scales beyond single products: judged by a block's output, or by the model's.

- Blockwise (APQ-ViT): of a block's output B and its error e, the loss is the sum of H e^2 over the largest such values
  alone, H being the mean squared gradient of the model's loss by B. The smallest share of them is eliminated. One scale
  after another is multiplied by what lowers the loss most.
- Evolution (Evol-Q): of outputs o_i of the quantized and f_j of the float model, normalised to length 1, the loss is
  InfoNCE, the mean over images i of -log(exp(o_i f_i / t) / sum_j exp(o_i f_j / t)). Scales s of a block become
  |s + u|, u uniform in [-radius, radius].
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from adalog.config import BlockRefinement, Evolution
from adalog.quantizers import MAX_BITS, Quantizer, TwinUniformQuantizer, UniformQuantizer

Quantizers = list[Quantizer | None]


def refine_block(
    loss: Callable[[Quantizers], float], start: Quantizers, choices: BlockRefinement, fixed: Sequence[bool]
) -> Quantizers:
    """The quantizers with scales multiplied, one quantizer after another, as far as the loss falls.

    fixed: which of them stay as they are.
    """
    low, high = choices.span
    factors = torch.linspace(low, high, choices.candidates, dtype=torch.float64).tolist()
    best, least = list(start), loss(start)
    for _ in range(choices.rounds):
        for index, stays in enumerate(fixed):
            quantizer = best[index]
            if stays or quantizer is None:
                continue
            for factor in factors:
                tried = list(best)
                tried[index] = scaled(quantizer, factor)
                found = loss(tried)
                if found < least:
                    best, least = tried, found
    return best


def scaled(quantizer: Quantizer, factor: float) -> Quantizer:
    """With a scale that is so many times as large; of a twin quantizer both."""
    if isinstance(quantizer, TwinUniformQuantizer):
        return quantizer.map(lambda scale: scale * factor)
    return replace(quantizer, scale=quantizer.scale * factor)


def largest_errors(error: Tensor, weights: Tensor, eliminated: float) -> float:
    """The sum of weights * error^2 over the largest such values; `eliminated`: the share of the smallest ones."""
    weighted = (error.square() * weights).flatten()
    kept = weighted.numel() - int(eliminated * weighted.numel())
    if kept < weighted.numel():
        weighted = weighted.topk(kept, sorted=False).values
    return float(weighted.sum(dtype=torch.float64))


def evolve(
    loss: Callable[[list[UniformQuantizer]], float],
    start: list[UniformQuantizer],
    choices: Evolution,
    generator: torch.Generator,
) -> list[UniformQuantizer]:
    """The best of a population that starts as copies of one individual, after so many cycles.

    Each cycle draws samples with replacement, mutates the best of them, and drops the worst of all.
    """
    population = [(loss(start), start)] * choices.population
    for _ in range(choices.cycles):
        drawn = torch.randint(0, len(population), (choices.samples,), generator=generator).tolist()
        parent = population[min(drawn)][1]  # they are in order, the best first
        child = [mutated(quantizer, choices.radius, generator) for quantizer in parent]
        population = sorted([*population, (loss(child), child)], key=lambda individual: individual[0])[:-1]
    return population[0][1]


def mutated(quantizer: UniformQuantizer, radius: float | None, generator: torch.Generator) -> UniformQuantizer:
    """With every scale moved by at most the radius, and never zero."""
    if radius is None:
        radius = 1e-4 if quantizer.bits == MAX_BITS else 1e-3
    moves = torch.rand(quantizer.scale.shape, generator=generator, dtype=torch.float64) * 2 - 1
    scale = (quantizer.scale + radius * moves.to(quantizer.scale)).abs()
    return replace(quantizer, scale=scale.clamp(min=2.0**-94))


def info_nce(outputs: Tensor, wanted: Tensor, temperature: float) -> float:
    """How well each output, (N, ...), tells its own wanted one from those of the other images."""
    similar = normalize(outputs.flatten(1), dim=1) @ normalize(wanted.flatten(1), dim=1).T
    return float(cross_entropy(similar.double() / temperature, torch.arange(len(similar), device=similar.device)))
