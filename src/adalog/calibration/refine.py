"""What is done to scales beyond single products: judged by a block's output, or by the model's."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from adalog.calibration.blockwise import refined_blocks
from adalog.calibration.evolution import evolved
from adalog.config import Evolution, Refinement
from adalog.graph.program import Program
from adalog.graph.rewrite import Placed


def refined(
    program: Program,
    images: Sequence[Tensor],
    placed: Sequence[Placed],
    choices: Refinement,
    gradients: Mapping[str, Tensor],
    seed: int,
    memory: int | None = None,
) -> list[Placed]:
    """What was found for a float program, with other scales.

    gradients: squared, by the name of each block's output; evolution needs none. memory: about how many bytes
    the blocks' inputs and a forward may take, without the program and the images; None for no limit.
    """
    if isinstance(choices, Evolution):
        generator = torch.Generator().manual_seed(seed)
        return evolved(program, images, placed, choices, generator, memory)
    return refined_blocks(program, images, placed, choices, gradients, memory)
