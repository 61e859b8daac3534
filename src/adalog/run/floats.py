"""The operations on floats that have no kernel but that NumPy does: each writes its result where it is told.

The executor "native" runs them too, so that both get the same bits.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

COPY = "copy"  # the one name that is not an ATen operation's


def _copy(out: Array, x: Array) -> None:
    np.copyto(out, x)


def _cat(out: Array, values: Sequence[Array], dim: int = 0) -> None:
    np.concatenate(values, axis=dim, out=out)


def _mean(out: Array, x: Array, dims: Sequence[int], keepdim: bool = False) -> None:
    """The mean over some dimensions, summed in float64."""
    sums = np.asarray(np.sum(x, axis=tuple(dims), dtype=np.float64, keepdims=keepdim))
    np.divide(sums, x.size // max(1, sums.size), out=out, casting="same_kind")


def _pool(out: Array, x: Array, size: Sequence[int]) -> None:
    """The means of cells of an image, which may share rows and columns. size: is that of the result."""
    (height, width), cells = x.shape[-2:], out.shape[-2:]
    for i, j in np.ndindex(*cells):
        rows = slice(i * height // cells[0], -(-(i + 1) * height // cells[0]))
        columns = slice(j * width // cells[1], -(-(j + 1) * width // cells[1]))
        _mean(out[..., i, j], x[..., rows, columns], (-2, -1))


def _pointwise(function: Callable[..., Any]) -> Callable[..., None]:
    def run(out: Array, *args: Any) -> None:
        function(*args, out=out)

    return run


# From an operation's name to a function of the result's memory and of the operation's arguments by position.
FLOATS: dict[str, Callable[..., None]] = {
    COPY: _copy,
    "aten.add.Tensor": _pointwise(np.add),
    "aten.sub.Tensor": _pointwise(np.subtract),
    "aten.mul.Tensor": _pointwise(np.multiply),
    "aten.div.Tensor": _pointwise(np.divide),
    "aten.cat.default": _cat,
    "aten.mean.dim": _mean,
    "aten.adaptive_avg_pool2d.default": _pool,
}
