"""Run the float operations that have no kernel with NumPy. Each function writes its result into the given array.

The executor "native" uses the same functions, so its outputs and the outputs of a tape are equal bit for bit.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

COPY = "copy"  # the only name that is not an ATen operation


def _cat(out: Array, values: Sequence[Array], dim: int = 0) -> None:
    np.concatenate(values, axis=dim, out=out)


def _mean(out: Array, x: Array, dims: Sequence[int], keepdim: bool = False) -> None:
    """Compute the mean over some dimensions, summed in float64."""
    sums = np.asarray(np.sum(x, axis=tuple(dims), dtype=np.float64, keepdims=keepdim))
    np.divide(sums, x.size // max(1, sums.size), out=out, casting="same_kind")


def _pool(out: Array, x: Array, size: Sequence[int]) -> None:
    """Compute the mean of each cell of an image. Cells may overlap; `out` already has the height and width `size`."""
    (height, width), cells = x.shape[-2:], out.shape[-2:]
    for i, j in np.ndindex(*cells):
        rows = slice(i * height // cells[0], -(-(i + 1) * height // cells[0]))
        columns = slice(j * width // cells[1], -(-(j + 1) * width // cells[1]))
        _mean(out[..., i, j], x[..., rows, columns], (-2, -1))


def _extremum(function: Callable[..., Any]) -> Callable[..., None]:
    """Return a function for the larger or smaller values, which adds 0 because NumPy may return either of two zeros."""

    def run(out: Array, *args: Any) -> None:
        np.add(function(*args, out=out), 0.0, out=out)

    return run


def _pointwise(function: Callable[..., Any]) -> Callable[..., None]:
    def run(out: Array, *args: Any) -> None:
        function(*args, out=out)

    return run


# For each operation, a function that takes the array for the result and the operation's positional arguments.
FLOATS: dict[str, Callable[..., None]] = {
    COPY: np.copyto,
    "aten.add.Tensor": _pointwise(np.add),
    "aten.sub.Tensor": _pointwise(np.subtract),
    "aten.mul.Tensor": _pointwise(np.multiply),
    "aten.div.Tensor": _pointwise(np.divide),
    "aten.maximum.default": _extremum(np.maximum),
    "aten.minimum.default": _extremum(np.minimum),
    "aten.sqrt.default": _pointwise(np.sqrt),
    "aten.cat.default": _cat,
    "aten.mean.dim": _mean,
    "aten.adaptive_avg_pool2d.default": _pool,
}
