"""Replay the steps of a training as one graph on an NVIDIA GPU, where small operations cost less than their launches.

A graph repeats recorded operations on the same memory. The step must therefore read and write tensors that stay in
place, and no number of the step may come from the processor.
"""

import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from adalog.errors import ProgramError

# The steps before the first graph: they allocate what later steps write to, and load the kernels.
_WARM_UP = 3


class Masks:
    """Random masks for the values of a step, all from one call of a generator.

    The first step that takes masks draws each alone. Later steps draw as many numbers at once as the last step took.
    drop: the share of ones. generator: on the device of the values.
    """

    def __init__(self, drop: float, generator: torch.Generator):
        self.generator, self._drop = generator, drop
        self._taken = 0  # numbers that this step has taken
        self._drawn: Tensor | None = None

    def renew(self) -> None:
        """Draw the masks of a new step."""
        self._drawn = self._draw(self._taken) if self._taken else None
        self._taken = 0

    def take(self, values: Tensor) -> Tensor:
        """Return a mask in the shape and dtype of the values: 1 for a share `drop` of them, and 0 for the others."""
        before, self._taken = self._taken, self._taken + values.numel()
        if self._drawn is None or self._taken > len(self._drawn):
            mask = self._draw(values.numel())
        else:
            mask = self._drawn[before : self._taken]
        return mask.view(values.shape).to(values.dtype)

    def _draw(self, count: int) -> Tensor:
        return random_mask(torch.empty(count, device=self.generator.device), self._drop, self.generator)


def random_mask(values: Tensor, drop: float, generator: torch.Generator) -> Tensor:
    """Return a random mask, 1 for a share `drop` of the values and 0 for the others, in their shape and dtype.

    16 random bits decide each value independently, so the share is exact to within 2^-16.
    """
    words = torch.empty(-(-values.numel() // 4), dtype=torch.int64, device=values.device)
    draws = words.random_(-(2**63), None, generator=generator).view(torch.int16)[: values.numel()]
    mask = torch.empty(values.shape, dtype=values.dtype, device=values.device)
    return torch.le(draws.view(values.shape), math.ceil(drop * 2**16) - 2**15 - 1, out=mask)


class Replay:
    """A step that is recorded as a graph after its first runs, and then replayed, if the device has graphs.

    If it cannot be recorded, all steps run operation by operation. step: runs on the device of the masks' generator,
    and reads and writes tensors that stay in place. masks, optimizer: those that the step uses.
    """

    def __init__(self, step: Callable[[], None], masks: Masks, optimizer: torch.optim.Optimizer):
        self._step, self._masks, self._optimizer = step, masks, optimizer
        self._graph: torch.cuda.CUDAGraph | None = None
        self._left = _WARM_UP  # runs before the step is recorded
        self._records = has_graphs(masks.generator.device)

    @property
    def is_recorded(self) -> bool:
        """True if the next step replays a graph."""
        return self._graph is not None

    def forget(self) -> None:
        """Record the step again before it is replayed, because numbers that it was recorded with have changed."""
        self._graph = None

    def run(self) -> None:
        if self._records and self._graph is None and self._left == 0:
            self._record()
        if self._graph is None:
            self._step()
            self._left = max(0, self._left - 1)
        else:
            self._graph.replay()

    def _record(self) -> None:
        """Record the step without running it; after an error, later steps run as before."""
        before = self._masks.generator
        # A generator may be of no more use after an error, so a copy draws the numbers of the graph.
        self._masks.generator = torch.Generator(before.device).set_state(before.get_state())
        self._tell_optimizer(True)
        try:
            self._graph = record(self._step, self._masks.generator)
        except (RuntimeError, ProgramError):  # an operation that cannot be recorded, or too little memory
            self._masks.generator, self._records = before, False
            self._tell_optimizer(False)

    def _tell_optimizer(self, recorded: bool) -> None:
        for group in self._optimizer.param_groups:
            group["capturable"] = recorded


def has_graphs(device: torch.device) -> bool:
    """Return True if `record` can record operations on this device."""
    return device.type == "cuda"


def record(step: Callable[[], None], generator: torch.Generator) -> torch.cuda.CUDAGraph:
    """Record the operations of a step on the generator's device, without running them.

    Each replay draws new numbers from the generator. Raises RuntimeError, or what the step raises, if an operation
    cannot be recorded.
    """
    device = generator.device
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()  # the graph has memory of its own
    with torch.cuda.stream(_stream(device)):
        graph.capture_begin()
        try:
            step()
        finally:
            graph.capture_end()
    return graph


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream for recordings: always the same one, because libraries keep memory for each stream."""
    return torch.cuda.Stream(device)
