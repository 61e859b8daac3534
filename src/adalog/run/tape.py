"""Read a tape: the kernel calls with which `native` runs one artifact, stored as data by `adalog tape`.

A tape is not trusted. It chooses which kernels run on which memory, and this module checks everything else:

- Every pointer is a place in a region of memory that this module allocates. All that a kernel reads or writes there
  must lie in that region.
- Results go only to the region "work".
- Values that a kernel checks once and then trusts (places of rows, tables, zero points) lie in the region "constants",
  which nothing writes.

docs/reference/format.md describes the file.
"""

import ctypes
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from adalog import library, stored
from adalog.run import abi
from adalog.run.floats import FLOATS
from adalog.stored import check, is_whole, unpack

FORMAT = 1
KEY = "adalog-tape"
CONSTANTS, WORK = "constants", "work"  # two regions of memory; each input is another one, named by its number
ALIGNMENT = 64  # bytes of a cache line
MAX_BATCH = 2**16
MAX_WORK = 2**30  # bytes per image, for the work and for a view, which may repeat its memory
_MAX_LAYOUTS = 16  # per weight
_MAX_SIDE = 2**24  # of a weight, as in native.cpp
_TYPES = ("float32", "float64", "uint8", "int32", "int64", "bool")
_FIELDS = {
    "format": int,
    "version": str,
    "interface": int,
    "artifact": str,
    "batch": int,
    "inputs": list,
    "weights": list,
    "work": int,
    "fills": list,
    "copies": list,
    "calls": list,
    "output": object,
}
WRITTEN = {(abi.Output, "data"), (abi.Output, "more"), (abi.Patches, "out")}
_READ = {(abi.Output, "residual"), *((kind, name) for kind in abi.STRUCTURES for name in ("data", "more"))} - WRITTEN
# Pointers to numbers of four bytes whose extents count bytes; so is the `data` of an output whose kind is in _WIDE.
_FLOATS = {(abi.Norm, "data"), (abi.Encode, "data"), (abi.Output, "residual"), (abi.Attention, "bias")}
_WIDE = (abi.SUMS, abi.FLOATS)

Array = npt.NDArray[Any]


def parse(header: str) -> dict[str, Any]:
    """Parse the JSON of a tape and check its fields. Raises ArtifactError for another format or interface."""
    return check_fields(stored.parse_header(header))


def check_fields(tape: Any) -> dict[str, Any]:
    """Check the fields of a tape, and return the tape. Raises ArtifactError for another format or interface."""
    stored.check_format(tape, FORMAT)
    interface = tape.get("interface")
    check(interface == library.ABI, f"it is for kernel interface {interface}, but adalog has {library.ABI}")
    stored.check_fields(tape, _FIELDS)
    batch, work = tape["batch"], tape["work"]
    check(is_whole(batch, 1, MAX_BATCH), f"its batch of {batch} images is out of range")
    check(is_whole(work, 0, batch * MAX_WORK), f"its work takes {work} bytes for {batch} images, which is out of range")
    check(bool(tape["inputs"]), "it has no inputs")
    for each in tape["inputs"]:
        good = isinstance(each, list) and len(each) == 2 and isinstance(each[0], str) and _is_shape(each[1])
        check(good and each[1][:1] == [batch], f"an input is {each}, not a [name, shape] with {batch} images")
    return tape


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, list) and len(shape) <= 8 and all(is_whole(size, 0, 2**31) for size in shape)


def weights_of(lists: Sequence[Sequence[Any]], tensor: Callable[[str], Array]) -> list[list[abi.Weights]]:
    """Load the weights that each tape lists. `tensor` returns an artifact's tensor; equal entries share a weight."""
    made: dict[str, abi.Weights] = {}
    layouts: Counter[str] = Counter()
    for entry in itertools.chain.from_iterable(lists):
        if repr(entry) not in made:
            made[repr(entry)] = _weight_of(entry, tensor)
            layouts[entry[0]] += 1
            few = layouts[entry[0]] <= _MAX_LAYOUTS
            check(few, f"weight {entry[0]} is laid out in more than {_MAX_LAYOUTS} ways")
    return [[made[repr(entry)] for entry in entries] for entries in lists]


def _weight_of(entry: Any, tensor: Callable[[str], Array]) -> abi.Weights:
    good = isinstance(entry, list) and len(entry) > 2 and isinstance(entry[0], str)
    check(good, "a weight is not [name, shape, bits, ...]")
    name, shape, *choices = entry
    good = len(choices) == 3 and all(is_whole(each, 0, 255) for each in choices) and 2 <= choices[0] <= 8
    check(
        good and _is_shape(shape) and len(shape) == 2 and all(1 <= side <= _MAX_SIDE for side in shape),
        f"weight {name} has an invalid shape {shape} or invalid numbers {choices}",
    )
    packed, zero = tensor(f"codes/{name}"), tensor(f"zero_point/{name}")
    check(
        packed.ndim == 1 and packed.dtype == zero.dtype == np.uint8,
        f"weight {name} is stored as {packed.dtype}, not as flat uint8",
    )
    check(zero.shape == (shape[0],), f"weight {name} has zero points of shape {zero.shape}")
    codes = unpack(packed, choices[0], math.prod(shape)).reshape(shape)
    return abi.Weights(codes, zero.astype(np.int32), name, *choices)


def aligned(size: int) -> Array:
    """Allocate this many zero bytes, aligned to a cache line."""
    memory = np.zeros(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size]


class Memory:
    """The regions of memory that calls read and write.

    constants: the bytes of the file, which no call writes. work: the number of bytes that calls may write. fills:
    [offset in the work, offset in the constants, bytes] to copy before the first call. inputs: the bytes of each input.
    most: the limit on the bytes of one view, which count again if the view repeats them.
    """

    def __init__(self, constants: Array, work: int, fills: Sequence[Any], inputs: Sequence[int], most: int):
        self.work, self._constants = aligned(work), aligned(len(constants))
        self._constants[:] = constants
        self._constants.flags.writeable = False
        self._inputs, self._most = inputs, most
        for fill in fills:
            good = isinstance(fill, list) and len(fill) == 3 and all(is_whole(each, 0) for each in fill)
            check(
                good and fill[0] + fill[2] <= work and fill[1] + fill[2] <= len(constants),
                f"it fills {fill}, which is not [offset, offset, bytes] within its memory",
            )
            to, start, count = fill
            self.work[to : to + count] = constants[start : start + count]

    def _place(self, place: Any) -> tuple[Any, int, int]:
        """Return the region and offset of a place, and the number of bytes from there to the end of the region."""
        check(
            isinstance(place, list) and len(place) == 2 and is_whole(place[1], 0), f"{place} is not a place in memory"
        )
        region, offset = place
        if is_whole(region, 0, len(self._inputs) - 1):
            size = self._inputs[region]
        else:
            check(region in (WORK, CONSTANTS), f"{region!r} is not a region of memory")
            size = len(self.work if region == WORK else self._constants)
        check(offset <= size, f"{place} lies beyond the region's {size} bytes")
        return region, offset, size - offset

    def address(self, place: Any, size: int, regions: Sequence[str] | None) -> tuple[int, int | None]:
        """Return (address, None) for a place of `size` bytes, or (offset, number of the input) if it is in an input.

        regions: the regions that the place may lie in; None allows all.
        """
        region, offset, there = self._place(place)
        check(regions is None or region in regions, f"{place} is not in {' or '.join(regions or ())}")
        check(0 <= size <= there, f"{place} has {there} bytes, not {size}")
        if isinstance(region, int):
            return offset, region
        memory = self.work if region == WORK else self._constants
        return memory.ctypes.data + offset, None

    def view(self, given: Any, *, written: bool = False) -> Array:
        """Return the array in the work or the constants that {"at", "shape", "strides", "type"} describes."""
        check(isinstance(given, dict) and given.keys() == {"at", "shape", "strides", "type"}, f"{given} is not a view")
        region, offset, there = self._place(given["at"])
        check(region == WORK or (region == CONSTANTS and not written), f"{given} lies in a region that it may not use")
        shape, strides = given["shape"], given["strides"]
        good = _is_shape(shape) and _is_shape(strides) and len(shape) == len(strides) and given["type"] in _TYPES
        check(good, f"{given} is not a view: its shape, strides or type are not valid")
        # NumPy checks this too, except for memory of zero bytes.
        last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        size = last + np.dtype(given["type"]).itemsize if all(shape) else 0
        check(size <= there, f"{given} takes {size} bytes, but only {there} are there")
        shown = math.prod(shape) * np.dtype(given["type"]).itemsize
        check(shown <= self._most, f"{given} shows {shown} bytes, more than {self._most}")
        memory = self.work if region == WORK else self._constants
        return np.ndarray(shape, given["type"], memory.data, offset, strides)


class Calls:
    """The calls of a tape, bound to memory. Raises ArtifactError if a call is not valid.

    runs: the name of its step and a function for each call, in order; the function returns None or the status of a
    kernel. pointers: the structures whose `data` lies in an input, with the number of the input and the offset there.
    """

    def __init__(self, context: abi.Context, weights: Sequence[abi.Weights], memory: Memory, calls: Sequence[Any]):
        self._context, self._weights, self._memory = context, weights, memory
        self.pointers: list[tuple[ctypes.Structure, int, int]] = []
        self._alive: list[ctypes.Structure] = []
        self.runs = [self._bound(call) for call in calls]

    def _bound(self, call: Any) -> tuple[str, Callable[[], int | None]]:
        good = isinstance(call, list) and len(call) == 3 and all(isinstance(each, str) for each in call[:2])
        check(good, "a call is not [step, operation, arguments]")
        step, operation, given = call
        if operation in abi.KERNELS:
            arguments = abi.KERNELS[operation]()
            _set_numbers(step, arguments, given)
            self._set_pointers(step, arguments, given, ())
            self._alive.append(arguments)
            return step, self._context.bind(operation, arguments)
        check(operation in FLOATS, f"step {step} calls {operation!r}, which this package does not run without PyTorch")
        check(isinstance(given, list) and len(given) > 1, f"step {step} needs a list with a result and arguments")
        out = self._memory.view(given[0], written=True)
        return step, functools.partial(FLOATS[operation], out, *map(self._argument, given[1:]))

    def _argument(self, given: Any) -> Any:
        if isinstance(given, list):
            return tuple(map(self._argument, given))
        return self._memory.view(given) if isinstance(given, dict) else given

    def _set_pointers(
        self, step: str, structure: ctypes.Structure, given: Any, around: tuple[ctypes.Structure, ...]
    ) -> None:
        """Set the pointers of a structure, whose numbers are set already. around: the structures that contain it."""
        kinds = _kinds(structure)
        for name, value in given.items():
            if issubclass(kinds[name], ctypes.Structure):
                self._set_pointers(step, getattr(structure, name), value, (structure, *around))
            elif isinstance(structure, abi.Linear) and name == "weights":
                check(
                    is_whole(value, 0, len(self._weights) - 1),
                    f"step {step} has the weight {value!r}, which the tape does not list",
                )
                structure.weights = self._weights[value].pointer
            elif kinds[name] is ctypes.c_void_p:
                self._point(structure, name, value, around)

    def _point(self, structure: ctypes.Structure, name: str, place: Any, around: tuple[ctypes.Structure, ...]) -> None:
        kind = type(structure)
        count, size = abi.EXTENTS[kind][name]
        entries = next(getattr(each, count) for each in (structure, *around) if hasattr(each, count))
        regions = [WORK] if (kind, name) in WRITTEN else None if (kind, name) in _READ else [CONSTANTS]
        address, number = self._memory.address(place, entries * size, regions)
        floats = (kind, name) in _FLOATS or (name == "data" and getattr(structure, "kind", None) in _WIDE)
        check(address % (4 if floats else min(size, 4)) == 0, f"{place} is not aligned to the size of its numbers")
        if number is None:
            setattr(structure, name, address)
        else:
            check(name == "data", f"only data may lie in an input, and {name} does")
            self.pointers.append((structure, number, address))


def _kinds(structure: ctypes.Structure) -> Mapping[str, Any]:
    return {name: kind for name, kind, *_ in structure._fields_}


def _set_numbers(step: str, structure: ctypes.Structure, given: Any) -> None:
    """Set the number fields of a structure and of the structures in it."""
    kinds = _kinds(structure)
    check(isinstance(given, dict) and given.keys() <= kinds.keys(), f"step {step} has fields that no kernel takes")
    for name, value in given.items():
        if issubclass(kinds[name], ctypes.Structure):
            _set_numbers(step, getattr(structure, name), value)
        elif kinds[name] is not ctypes.c_void_p:
            _set_number(step, structure, name, kinds[name], value)


def _set_number(step: str, structure: ctypes.Structure, name: str, kind: Any, value: Any) -> None:
    """Set a field to a number or a list of numbers. Raises ArtifactError if the field cannot hold it."""
    if issubclass(kind, ctypes.Array):
        good = isinstance(value, list) and len(value) == kind._length_ and all(is_whole(each, 0) for each in value)
        found: Any = kind(*value) if good else None
        held = list(found) if good else None
    elif kind is ctypes.c_float:
        found = held = value if type(value) in (int, float) else None
    else:
        found = kind(value).value if type(value) is int else None
        held = found
    check(held is not None and held == value, f"step {step} has {name} = {value!r}, which the field cannot hold")
    setattr(structure, name, found)
