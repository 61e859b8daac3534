"""Run an artifact with the compiled kernels and NumPy, without PyTorch.

The command `adalog tape` records the calls of the kernels in a file with the suffix .tape. This module runs the calls.
`adalog pack` writes the artifact, its tapes and a description to one file, which this module and the C library run.
The outputs are bit for bit those of the executor "native". This module does not import PyTorch.

Examples:
    >>> import adalog.run
    >>> model = adalog.run.load("deit_s.w4a4.safetensors")  # and deit_s.w4a4.tape, from `adalog tape`
    >>> logits = model(images)  # a NumPy array, float32, (B, 3, 224, 224), normalised as in calibration
"""

import contextlib
import hashlib
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import safe_open

from adalog import stored
from adalog.errors import ArtifactError, ProgramError, one_line
from adalog.run import abi, pack
from adalog.run import tape as tapes

__all__ = ["Model", "load", "tape_path"]

Array = npt.NDArray[Any]
SUFFIX = ".adalog"  # of packs, so that a damaged pack is reported as a pack
_MAX_NAME = 1024  # limit on the name of an output [bytes], because many outputs may repeat the keys above them


def tape_path(artifact: str | Path) -> Path:
    """Return the default path of an artifact's tape: the same path with the suffix .tape.

    Args:
        artifact: The file of the artifact.

    Returns:
        The path of the tape.
    """
    return Path(artifact).with_suffix(".tape")


class Model:
    """A quantized model that runs in integers on NumPy arrays. `load` returns it.

    Several threads may call the model; the calls run one after the other.

    Args:
        context: The compiled kernels, with their number of threads and level.
        recordings: The contents of each tape, in the order of their batches, and its constants, uint8, (bytes,).
        tensor: Function that returns a tensor of the artifact by name.

    Attributes:
        batch: Number of images per run, which the tape fixes. If there are several tapes, this is the largest of
            their numbers. Other numbers of images run in pieces.
        batches: The number of images per run of each tape.
        inputs: Shape of each input by name, with `batch` images.
        preprocessing: The preparation of images that a pack records, as a dictionary, or None.
        classes: The names of the classes that a pack records, or None.
        threads: Number of threads.
        level: Level of the kernels, one of `adalog.library.LEVELS`.
        weight_bytes: Memory of the weights [bytes].
        nbytes: All other memory [bytes].

    Raises:
        ArtifactError: If the tapes cannot be run.
    """

    def __init__(
        self,
        context: abi.Context,
        recordings: Sequence[tuple[dict[str, Any], Array]],
        tensor: Callable[[str], Array],
    ):
        self.preprocessing: dict[str, Any] | None = None
        self.classes: tuple[str, ...] | None = None
        self.threads, self.level = context.threads, context.level
        weights = tapes.weights_of([header["weights"] for header, _ in recordings], tensor)
        self._tapes = [_Tape(context, *recording, own) for recording, own in zip(recordings, weights, strict=True)]
        self.batches = tuple(tape.batch for tape in self._tapes)
        self.batch, self.inputs = self._tapes[-1].batch, self._tapes[-1].inputs
        self.weight_bytes = sum(weight.nbytes for weight in {*itertools.chain.from_iterable(weights)})
        self.nbytes = sum(tape.nbytes for tape in self._tapes)
        self._lock = threading.Lock()

    def describe(self) -> dict[str, list[dict[str, Any]]]:
        """Describe the inputs and outputs.

        Returns:
            Under "inputs" and "outputs", one dictionary each, with "name", "type" and the "shape" per image. The name
            of an output consists of the keys and numbers that lead to it in the model's structure of outputs.
        """
        inputs, outputs = self._tapes[0].describe()
        return {"inputs": inputs, "outputs": outputs}

    def __call__(self, *inputs: Array) -> Any:
        """Compute the outputs.

        Args:
            *inputs: The inputs of the model, NumPy arrays of float32, (B, ...) each.

        Returns:
            The outputs, NumPy arrays in the same structure of tuples, lists and dicts as the original model's.

        Raises:
            ValueError: If the number, shapes or dtypes of the inputs are wrong, or if they contain NaN.
            ProgramError: If a step fails.
        """
        given = [np.ascontiguousarray(value) for value in inputs]
        counts = {len(value) for value in given if value.ndim}
        fits = len(given) == len(self.inputs) and len(counts) == 1
        fits = fits and all(
            value.dtype == np.float32 and value.shape[1:] == shape[1:]
            for value, shape in zip(given, self.inputs.values(), strict=True)
        )
        if not fits:
            wanted = " and ".join(f"(B{''.join(f', {size}' for size in shape[1:])})" for shape in self.inputs.values())
            got = " and ".join(f"{value.shape} of {value.dtype}" for value in given)
            raise ValueError(f"the model takes {wanted} of float32; got {got or 'nothing'}")
        if any(np.isnan(value).any() for value in given):
            raise ValueError("the inputs contain NaN, which cannot be quantized")
        (count,) = counts
        result = _map(lambda view: np.empty((count, *view.shape[1:]), view.dtype), self._tapes[0].output)
        start = 0
        with self._lock, np.errstate(all="ignore"):
            while start < count:
                # The largest batch that the rest fills, or else the smallest, with zeros for missing images.
                tape = next((fit for fit in reversed(self._tapes) if fit.batch <= count - start), self._tapes[0])
                pieces = [value[start : start + tape.batch] for value in given]
                missing = tape.batch - len(pieces[0])
                if missing:
                    pieces = [np.pad(piece, [(0, missing)] + [(0, 0)] * (piece.ndim - 1)) for piece in pieces]
                tape.run(pieces)
                end = start + tape.batch - missing
                for whole, view in zip(_leaves(result), _leaves(tape.output), strict=True):
                    whole[start:end] = view[: end - start]
                start = end
        return result


class _Tape:
    """The calls of one tape, bound to memory. `output` holds the results of the last run."""

    def __init__(
        self, context: abi.Context, header: dict[str, Any], constants: Array, weights: Sequence[abi.Weights]
    ) -> None:
        self.batch: int = header["batch"]
        self.inputs = {name: tuple(shape) for name, shape in header["inputs"]}
        stored.check(len(self.inputs) == len(header["inputs"]), "two of its inputs have one name")
        sizes = [4 * math.prod(shape) for shape in self.inputs.values()]
        most = self.batch * tapes.MAX_WORK
        self._weights = weights
        self._memory = tapes.Memory(constants, header["work"], header["fills"], sizes, most)
        self._calls = tapes.Calls(context, weights, self._memory, header["calls"])
        stored.check(len(header["copies"]) == len(sizes), f"it copies {len(header['copies'])} inputs")
        self._copies = list(map(self._copy, header["copies"], self.inputs.values()))
        self.output = self._views(header["output"])
        size = sum(view.nbytes for view in _leaves(self.output))
        stored.check(size <= most, f"its outputs take {size} bytes, more than {most}")
        self.nbytes = len(constants) + len(self._memory.work)

    def _copy(self, given: Any, shape: tuple[int, ...]) -> Array | None:
        """Return the view to which an input of this shape is copied, or None if the kernels read the input in place."""
        if given is None:
            return None
        found = self._memory.view(given, written=True)
        good = found.shape == shape and found.dtype == np.float32
        stored.check(good, f"it copies an input {shape} of float32 to {found.shape} of {found.dtype}")
        return found

    def _views(self, given: Any) -> Any:
        """Return the structure of the output, with views of the memory that holds one batch of each output."""
        kind = next(iter(given)) if isinstance(given, dict) and len(given) == 1 else None
        if kind is None:
            found = self._memory.view(given)
            stored.check(found.shape[:1] == (self.batch,), f"it outputs {found.shape} for {self.batch} images")
            return found
        items = given[kind]
        stored.check(kind in ("tuple", "list", "dict") and isinstance(items, list), f"it outputs a {kind}")
        if kind == "dict":
            return {str(key): self._views(item) for key, item in items}
        return (tuple if kind == "tuple" else list)(map(self._views, items))

    def describe(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the name, type and shape per image of each input and of each output."""
        inputs = [pack.describe(name, np.dtype(np.float32), shape) for name, shape in self.inputs.items()]
        return inputs, [pack.describe(name, view.dtype, view.shape) for name, view in _named(self.output)]

    def run(self, pieces: list[Array]) -> None:
        """Run one batch; the views in `output` then hold the results."""
        for structure, number, offset in self._calls.pointers:
            structure.data = pieces[number].ctypes.data + offset
        for static, piece in zip(self._copies, pieces, strict=True):
            if static is not None:
                np.copyto(static, piece)
        done = 0
        try:
            for _, run in self._calls.runs:
                status = run()
                if status:
                    abi.check(status)
                done += 1
        except MemoryError:
            raise
        except Exception as cause:  # NumPy may raise anything for a damaged tape
            raise ProgramError(f"step {self._calls.runs[done][0]} fails: {one_line(cause)}") from cause


def load(path: str | Path, *, tape: str | Path | None = None, threads: int = 1, level: str | None = None) -> Model:
    """Load a pack that `adalog pack` made, or an artifact and the tape that `adalog tape` made for it.

    Args:
        path: The file of the pack or of the artifact.
        tape: The file of the artifact's tape. Default: the path of the artifact with the suffix .tape.
        threads: Number of threads that the kernels use.
        level: Kernels to use, one of `adalog.library.LEVELS`. Default: the fastest that run on this machine.

    Returns:
        The model.

    Raises:
        ArtifactError: If a file cannot be read or is damaged, or if the tape belongs to another artifact.
        ValueError: If the kernels do not run on this machine.

    Examples:
        >>> import adalog.run
        >>> model = adalog.run.load("deit_s.w4a4.safetensors", threads=4)
        >>> model.batch, model.inputs
        (1, {'x': (1, 3, 224, 224)})
    """
    path = Path(path)
    _check_file(path, "name an artifact that `adalog quantize` made")
    if tape is None and (path.suffix == SUFFIX or _is_pack(path)):
        return _load_pack(path, threads, level)
    tape = tape_path(path) if tape is None else Path(tape)
    _check_file(tape, f"make it with `adalog tape {path}`, which needs PyTorch")
    context = abi.Context(threads, level)
    with _refusing(tape, f"make it again with `adalog tape {path}`"):
        with safe_open(tape, "np") as file:
            metadata = file.metadata() or {}
            stored.check(set(metadata) == {tapes.KEY}, "it holds no tape")
            header, constants = tapes.parse(metadata[tapes.KEY]), _constants(file.get_tensor(tapes.CONSTANTS))
        if header["artifact"] != _sha256(path):
            raise ArtifactError(f"it belongs to another artifact, not to {path}")
        with safe_open(path, "np") as file:
            return Model(context, [(header, constants)], file.get_tensor)


def _is_pack(path: Path) -> bool:
    """Return True if a file has the metadata key of a pack. `load` refuses other files later, with the reason."""
    try:
        with safe_open(path, "np") as file:
            return pack.KEY in (file.metadata() or {})
    except Exception:
        return False


def _load_pack(path: Path, threads: int, level: str | None) -> Model:
    """Load a pack."""
    context = abi.Context(threads, level)
    with _refusing(path, "make it again with `adalog pack`"), safe_open(path, "np") as file:
        metadata = file.metadata() or {}
        stored.check(set(metadata) == {pack.KEY}, "it holds no pack")
        header = pack.parse(metadata[pack.KEY])
        constants = [_constants(file.get_tensor(pack.constants_of(tape["batch"]))) for tape in header["tapes"]]
        model = Model(context, list(zip(header["tapes"], constants, strict=True)), file.get_tensor)
        for tape in model._tapes:
            same = (header["inputs"], header["outputs"]) == tape.describe()
            stored.check(same, f"its description is not that of its tape for {tape.batch} images")
        model.preprocessing = header["preprocessing"]
        model.classes = None if header["classes"] is None else tuple(header["classes"])
        return model


@contextlib.contextmanager
def _refusing(path: Path, way_out: str) -> Iterator[None]:
    """Turn any exception into an ArtifactError that names the file and the way out."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as cause:  # damaged files make the parsing raise anything
        raise ArtifactError(f"{path} cannot be used: {one_line(cause)}; {way_out}") from cause


def _constants(value: Array) -> Array:
    stored.check(value.dtype == np.uint8 and value.ndim == 1, "its constants are not bytes")
    return value


def _check_file(path: Path, way_out: str) -> None:
    """Raise ArtifactError, with a way out, if the path is not a file."""
    try:
        why = "" if path.is_file() else "not a regular file" if path.exists() else "no such file"
    except (OSError, ValueError) as cause:  # a path that no file can have
        why = getattr(cause, "strerror", None) or one_line(cause)
    if why:
        raise ArtifactError(f"{path} cannot be read: {why}; {way_out}")


def _sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hex digits."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            found.update(piece)
    return found.hexdigest()


def _map(function: Callable[[Array], Array], value: Any) -> Any:
    """Apply a function to every array of a nested value."""
    if isinstance(value, dict):
        return {key: _map(function, item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_map(function, item) for item in value)
    return function(value)


def _leaves(value: Any) -> Iterator[Array]:
    """Yield the arrays of a nested value, in order."""
    if isinstance(value, (dict, tuple, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _leaves(item)
    else:
        yield value


def _named(value: Any, path: str = "") -> Iterator[tuple[str, Array]]:
    """Yield the arrays of a nested value with their names: keys and numbers with dots between them."""
    stored.check(len(path.encode()) <= _MAX_NAME, f"the name of an output has more than {_MAX_NAME} bytes")
    if not isinstance(value, (dict, tuple, list)):
        yield path or "output", value
        return
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _named(item, f"{path}.{key}" if path else str(key))
