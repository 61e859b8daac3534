"""Declare what a stage does that changes assignments on the calibration images; `baselines` has such stages."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from torch import Tensor

from adalog.graph.program import Program
from adalog.graph.rewrite import Assigned

# Maps a number of random gradients to their mean squares, by the name of each site's and block's output.
Gradients = Callable[[int], Mapping[str, Tensor]]


class Refinement(ABC):
    """A stage that changes assignments by errors on the calibration images. Refinements are frozen dataclasses.

    kind: the name of the stage in files.
    """

    kind: ClassVar[str]

    @abstractmethod
    def refine(
        self, program: Program, images: Sequence[Tensor], assigned: Assigned, squares: Gradients, seed: int, memory: int
    ) -> Assigned:
        """Return the assignments after the stage; an unchanged one stays the same object. memory: as in `Values`."""
