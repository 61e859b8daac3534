"""Run a pack, which `adalog pack` writes, with the compiled library and NumPy, without PyTorch.

This module binds the C library (adalog.h), which checks the pack and runs it. The outputs are bit for bit those of the
executor "native".

Examples:
    >>> import adalog.run
    >>> model = adalog.run.load("deit_s.adalog")
    >>> logits = model(images)  # a NumPy array, float32, (B, 3, 224, 224), normalised as in calibration
"""

import ctypes
import functools
import json
import os
from collections.abc import Iterator
from ctypes import POINTER, byref, c_char_p, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from adalog import library
from adalog.errors import ArtifactError, ProgramError

__all__ = ["Model", "load"]

Array = npt.NDArray[Any]
KEY = "adalog-pack"  # of a pack's JSON in the metadata of its file
_TYPES = ("float32", "float64", "uint8", "int32", "int64", "bool")  # in the order of `adalog_type`
_BAD_ARGUMENT, _BAD_FILE, _NO_MEMORY = 1, 2, 3  # values of `adalog_status`


class _Error(ctypes.Structure):
    _fields_ = (("status", c_int), ("message", ctypes.c_char * 256))


class _Options(ctypes.Structure):
    _fields_ = (("threads", c_int), ("level", c_char_p), ("memory", c_size_t))


class _Value(ctypes.Structure):
    _fields_ = (("name", c_char_p), ("type", c_int), ("rank", c_int), ("shape", POINTER(c_int64)), ("bytes", c_size_t))


class _Description(ctypes.Structure):
    _fields_ = (
        ("inputs", POINTER(_Value)),
        ("input_count", c_size_t),
        ("outputs", POINTER(_Value)),
        ("output_count", c_size_t),
        ("batches", POINTER(c_int64)),
        ("batch_count", c_size_t),
        ("preprocessing", c_void_p),
        ("classes", POINTER(c_char_p)),
        ("class_count", c_size_t),
        ("bits", c_char_p),
        ("level", c_char_p),
        ("threads", c_int),
        ("memory", c_size_t),
    )


class _Buffer(ctypes.Structure):
    _fields_ = (("data", c_void_p), ("bytes", c_size_t))


class Model:
    """A quantized model that runs in integers on NumPy arrays. `load` returns it.

    Several threads may call the model; the calls run one after the other.

    Args:
        path: The file of the pack.
        threads: Number of threads.
        level: Level of the kernels, or None for the fastest.
        memory: Limit on the memory of the model [bytes].

    Attributes:
        inputs: Shape of each input by name, without the batch.
        batches: The numbers of images that run at once, ascending. Other numbers of images run in pieces.
        preprocessing: The preparation of images that the pack records, as a dictionary, or None.
        classes: The names of the classes that the pack records, or None.
        bits: The bits of weights and activations, such as "w4a4".
        threads: Number of threads.
        level: Level of the kernels, one of `adalog.library.LEVELS`.
        nbytes: Memory that the model takes [bytes].

    Raises:
        ArtifactError: If the pack cannot be run.
        ValueError: If the number of threads or the level is not available here, or the memory is not positive.
    """

    def __init__(self, path: Path, threads: int, level: str | None, memory: int):
        self._library = _library()
        level = library.choose_level(level)
        library.check_threads(threads)
        if memory < 1:
            raise ValueError(f"memory = {memory!r} is too little: give a number of bytes of at least 1")
        error, pointer = _Error(), c_void_p()
        options = _Options(threads, level.encode(), memory)
        self._library.adalog_model_open(os.fsencode(path), byref(options), byref(pointer), byref(error))
        self._pointer = pointer
        _check(error, path)
        description: _Description = self._library.adalog_model_describe(pointer).contents
        self._inputs = [_describe(description.inputs[number]) for number in range(description.input_count)]
        self._outputs = [_describe(description.outputs[number]) for number in range(description.output_count)]
        self.inputs = {entry["name"]: tuple(entry["shape"]) for entry in self._inputs}
        self.batches = tuple(description.batches[: description.batch_count])
        self.bits, self.level = description.bits.decode(), description.level.decode()
        self.threads, self.nbytes = description.threads, description.memory
        header = _header(path)  # the library has checked it
        self.preprocessing: dict[str, Any] | None = header["preprocessing"]
        self.classes: tuple[str, ...] | None = None if header["classes"] is None else tuple(header["classes"])
        self._structure = header["tapes"][0]["output"]

    def __del__(self) -> None:
        if getattr(self, "_pointer", None):
            self._library.adalog_model_close(self._pointer)

    def describe(self) -> dict[str, list[dict[str, Any]]]:
        """Describe the inputs and outputs.

        Returns:
            Under "inputs" and "outputs", one dictionary each, with "name", "type" and the "shape" per image. The name
            of an output consists of the keys and numbers that lead to it in the model's structure of outputs.
        """
        return {"inputs": self._inputs, "outputs": self._outputs}

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
        arrays = [np.ascontiguousarray(value) for value in inputs]
        counts = {len(value) for value in arrays if value.ndim}
        fits = len(arrays) == len(self.inputs) and len(counts) == 1
        fits = fits and all(
            value.dtype == np.float32 and value.shape[1:] == shape
            for value, shape in zip(arrays, self.inputs.values(), strict=True)
        )
        if not fits:
            expected = " and ".join(f"(B{''.join(f', {size}' for size in shape)})" for shape in self.inputs.values())
            actual = " and ".join(f"{value.shape} of {value.dtype}" for value in arrays)
            raise ValueError(f"the model takes {expected} of float32; got {actual or 'nothing'}")
        (count,) = counts
        outputs = [np.empty((count, *entry["shape"]), entry["type"]) for entry in self._outputs]
        error = _Error()
        self._library.adalog_model_run(
            self._pointer, count, _buffers(arrays), len(arrays), _buffers(outputs), len(outputs), byref(error)
        )
        _check(error)
        return _structure(self._structure, iter(outputs))


def load(path: str | Path, *, threads: int = 1, level: str | None = None, memory: int = 2**31) -> Model:
    """Load a pack that `adalog pack` made.

    Args:
        path: The file of the pack.
        threads: Number of threads that the kernels use.
        level: Kernels to use, one of `adalog.library.LEVELS`. Default: the fastest that run on this machine.
        memory: Limit on the memory of the model [bytes]. While it runs, each thread takes up to 256 MiB more.

    Returns:
        The model.

    Raises:
        ArtifactError: If the file cannot be read, is damaged, or is not a pack.
        ValueError: If the kernels do not run on this machine.
        MemoryError: If the model takes more memory than the limit, or than the machine has.

    Examples:
        >>> import adalog.run
        >>> model = adalog.run.load("deit_s.adalog", threads=4)
        >>> model.batches, model.inputs
        ((1, 8), {'x': (3, 224, 224)})
    """
    path = Path(path)
    if "\0" in str(path):
        raise ArtifactError(f"{str(path)!r} cannot be read: no file can have this name; name a pack")
    return Model(path, threads, level, memory)


@functools.cache
def _library() -> ctypes.CDLL:
    """Load the compiled library and declare its functions. Raises ValueError if it cannot be used here."""
    compiled, why = library.load()
    if compiled is None:
        raise ValueError(f"packs do not run here: {why}")
    error, model, buffers = POINTER(_Error), c_void_p, POINTER(_Buffer)
    for name, result, arguments in (
        ("open", c_int, [c_char_p, POINTER(_Options), POINTER(model), error]),
        ("describe", POINTER(_Description), [model]),
        ("run", c_int, [model, c_int64, buffers, c_size_t, buffers, c_size_t, error]),
        ("close", None, [model]),
    ):
        function = getattr(compiled, f"adalog_model_{name}")
        function.restype, function.argtypes = result, arguments
    return compiled


def _check(error: _Error, path: Path | None = None) -> None:
    """Raise an exception for an error of the library. path: the file of the pack, while it is opened."""
    message = error.message.decode(errors="replace")
    if error.status == _BAD_FILE and path is not None:
        unread = message.startswith("it cannot be read")
        text = f"{path}{message[2:]}" if unread else f"{path} cannot be used: {message}"
        raise ArtifactError(f"{text}; make it with `adalog pack`")
    if error.status == _BAD_ARGUMENT:
        raise ValueError(message)
    if error.status == _NO_MEMORY:
        raise MemoryError(message)
    if error.status:
        raise ProgramError(message)


def _header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        table = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header: dict[str, Any] = json.loads(table["__metadata__"][KEY])
    return header


def _describe(value: _Value) -> dict[str, Any]:
    return {"name": value.name.decode(), "type": _TYPES[value.type], "shape": list(value.shape[: value.rank])}


def _buffers(values: list[Array]) -> Any:
    return (_Buffer * len(values))(*(_Buffer(value.ctypes.data, value.nbytes) for value in values))


def _structure(structure: Any, values: Iterator[Array]) -> Any:
    """Return the values in the structure of outputs that a tape records: a dict with one key, or a view."""
    kind = next(iter(structure)) if len(structure) == 1 else None
    if kind == "dict":
        return {key: _structure(item, values) for key, item in structure[kind]}
    if kind is not None:
        return (tuple if kind == "tuple" else list)(_structure(item, values) for item in structure[kind])
    return next(values)
