"""What a result was measured on, how its figures are put together, and how a long measurement goes on."""

import math

from adalog.tables import kept, machine

__all__ = ["geometric_mean", "kept", "machine"]


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))
