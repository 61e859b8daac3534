"""Published methods besides AdaLog: their searches, stages, quantizers and losses, and their rows in the table."""

from adalog.baselines.blockwise import BlockRefinement
from adalog.baselines.evolution import Evolution
from adalog.baselines.ranges import RangeSearch
from adalog.baselines.released import ReleasedSearch
from adalog.baselines.scales import ScaleSearch
from adalog.baselines.split import MaxKeptFormat, SplitFormat, SplitUniformQuantizer
from adalog.baselines.twin import TwinFormat, TwinUniformQuantizer

__all__ = [
    "BlockRefinement",
    "Evolution",
    "MaxKeptFormat",
    "RangeSearch",
    "ReleasedSearch",
    "ScaleSearch",
    "SplitFormat",
    "SplitUniformQuantizer",
    "TwinFormat",
    "TwinUniformQuantizer",
]
