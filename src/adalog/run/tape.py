"""Reading a tape: the calls of kernels by which `native` runs one artifact, as data that `adalog tape` wrote.

A tape is hostile until it is checked. It may say which kernels run on which memory, and no more: every pointer is a
place in a region of memory that is made here, all that a kernel reads and writes there must lie in that region, results
go to the region "work" alone, and what kernels take on trust after they have checked it (places of rows, tables, zero
points) lies in the region "constants", which nothing writes. docs/format.md describes the file.
"""

import ctypes
import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from adalog import library
from adalog.run import abi
from adalog.run.floats import FLOATS
from adalog.stored import MAX_JSON, check, check_text, is_whole, parse_json, unpack

FORMAT = 1
KEY = "adalog-tape"
CONSTANTS, WORK = "constants", "work"  # regions of memory; the others are the inputs, by their numbers
ALIGNMENT = 64  # bytes: a cache line
MAX_BATCH = 2**16
MAX_WORK = 2**30  # bytes for each image, of memory and of what a view of it shows
_MAX_LAYOUTS = 16  # of one weight
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
# Pointers to numbers of four bytes whose extents are told in bytes; those of an output are that in some kinds.
_FLOATS = {(abi.Norm, "data"), (abi.Encode, "data"), (abi.Output, "residual"), (abi.Attention, "bias")}
_WIDE = (abi.SUMS, abi.FLOATS)

Array = npt.NDArray[Any]


def parse(header: str) -> dict[str, Any]:
    """The JSON of a tape, with fields of the right types. Raises ArtifactError for another format or interface."""
    check(len(header) <= MAX_JSON, f"its JSON takes {len(header)} bytes, more than {MAX_JSON}")
    tape = parse_json(header)
    check(isinstance(tape, dict), "its JSON is no object")
    check_text(tape)
    found, interface = tape.get("format"), tape.get("interface")
    check(found == FORMAT, f"it has the format {found}, this package reads {FORMAT}")
    check(interface == library.ABI, f"it is for kernels of interface {interface}, this package has {library.ABI}")
    odd = sorted(tape.keys() ^ _FIELDS.keys())
    check(not odd, f"it lacks the fields, or has fields of its own: {', '.join(odd)}")
    for name, kind in _FIELDS.items():
        check(isinstance(tape[name], kind), f"its {name} is of the type {type(tape[name]).__name__}")
    batch, work = tape["batch"], tape["work"]
    check(is_whole(batch, 1, MAX_BATCH), f"it is for {batch} images")
    check(is_whole(work, 0, batch * MAX_WORK), f"it takes {work} bytes for {batch} images")
    check(bool(tape["inputs"]), "it has no inputs")
    for each in tape["inputs"]:
        good = isinstance(each, list) and len(each) == 2 and isinstance(each[0], str) and _is_shape(each[1])
        check(good and each[1][:1] == [batch], f"an input is {each}, no [name, shape] with {batch} images")
    return tape


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, list) and len(shape) <= 8 and all(is_whole(size, 0, 2**31) for size in shape)


def weights_of(entries: Sequence[Any], tensor: Callable[[str], Array]) -> list[abi.Weights]:
    """The weights that a tape names, of which `tensor` gives the artifact's tensors: one for all equal entries."""
    made: dict[str, abi.Weights] = {}
    layouts: Counter[str] = Counter()
    for entry in entries:
        if repr(entry) not in made:
            made[repr(entry)] = _weight_of(entry, tensor)
            layouts[entry[0]] += 1
            told = f"weight {entry[0]} is laid out in more than {_MAX_LAYOUTS} ways"
            check(layouts[entry[0]] <= _MAX_LAYOUTS, told)
    return [made[repr(entry)] for entry in entries]


def _weight_of(entry: Any, tensor: Callable[[str], Array]) -> abi.Weights:
    good = isinstance(entry, list) and len(entry) > 2 and isinstance(entry[0], str)
    check(good, "a weight is no [name, shape, bits, ...]")
    name, shape, *choices = entry
    good = len(choices) == 3 and all(is_whole(each, 0, 255) for each in choices) and 2 <= choices[0] <= 8
    check(good and _is_shape(shape) and len(shape) == 2 and all(shape), f"weight {name} has {shape} and {choices}")
    packed, zero = tensor(f"codes/{name}"), tensor(f"zero_point/{name}")
    check(packed.ndim == 1 and packed.dtype == zero.dtype == np.uint8, f"weight {name} is stored as {packed.dtype}")
    check(zero.shape == (shape[0],), f"weight {name} has {zero.shape} zero points")
    codes = unpack(packed, choices[0], math.prod(shape)).reshape(shape)
    return abi.Weights(codes, zero.astype(np.int32), name, *choices)


def aligned(size: int) -> Array:
    """So many bytes of zeros, from a cache line on."""
    memory = np.zeros(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size]


class Memory:
    """The regions that calls read and write.

    work: written by calls; constants: of the file, and never written. inputs: how many bytes each has. most: bytes that
    a view may show, some of them again and again.
    """

    def __init__(self, constants: Array, work: int, fills: Sequence[Any], inputs: Sequence[int], most: int):
        self.work, self._constants = aligned(work), aligned(len(constants))
        self._constants[:] = constants
        self._constants.flags.writeable = False
        self._inputs, self._most = inputs, most
        for fill in fills:
            good = isinstance(fill, list) and len(fill) == 3 and all(is_whole(each, 0) for each in fill)
            check(good and fill[0] + fill[2] <= work and fill[1] + fill[2] <= len(constants), f"it fills {fill}")
            to, start, count = fill
            self.work[to : to + count] = constants[start : start + count]

    def _place(self, place: Any) -> tuple[Any, int, int]:
        """(region, offset, bytes from there on)."""
        check(isinstance(place, list) and len(place) == 2 and is_whole(place[1], 0), f"{place} is no place in memory")
        region, offset = place
        if is_whole(region, 0, len(self._inputs) - 1):
            size = self._inputs[region]
        else:
            check(region in (WORK, CONSTANTS), f"{region!r} is no region of memory")
            size = len(self.work if region == WORK else self._constants)
        check(offset <= size, f"{place} lies behind the region's {size} bytes")
        return region, offset, size - offset

    def address(self, place: Any, size: int, regions: Sequence[str] | None) -> tuple[int, int | None]:
        """The address of a place with so many bytes, and None; in an input, the offset and its number.

        regions: where it may lie; None: anywhere.
        """
        region, offset, there = self._place(place)
        check(regions is None or region in regions, f"{place} is not in {' or '.join(regions or ())}")
        check(0 <= size <= there, f"{place} has {there} bytes, not {size}")
        if isinstance(region, int):
            return offset, region
        memory = self.work if region == WORK else self._constants
        return memory.ctypes.data + offset, None

    def view(self, given: Any, *, written: bool = False) -> Array:
        """The array that an object {"at", "shape", "strides", "type"} describes, in the work or the constants."""
        check(isinstance(given, dict) and given.keys() == {"at", "shape", "strides", "type"}, f"{given} is no view")
        region, offset, there = self._place(given["at"])
        check(region == WORK or (region == CONSTANTS and not written), f"{given} is no view that may be used here")
        shape, strides = given["shape"], given["strides"]
        good = _is_shape(shape) and _is_shape(strides) and len(shape) == len(strides) and given["type"] in _TYPES
        check(good, f"{given} is no view")
        # NumPy checks this itself, but not of memory without a byte.
        last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        size = last + np.dtype(given["type"]).itemsize if all(shape) else 0
        check(size <= there, f"{given} takes {size} bytes, and {there} are there")
        shown = math.prod(shape) * np.dtype(given["type"]).itemsize
        check(shown <= self._most, f"{given} shows {shown} bytes, more than {self._most}")
        memory = self.work if region == WORK else self._constants
        return np.ndarray(shape, given["type"], memory.data, offset, strides)


class Calls:
    """The calls of a tape, bound to memory. Raises ArtifactError for what no tape has.

    runs: in order, each with the name of the step that it is for; the result is None, or the status of a kernel.
    pointers: the structures whose `data` lies in an input, with its number and the offset there.
    """

    def __init__(self, context: abi.Context, weights: Sequence[abi.Weights], memory: Memory, calls: Sequence[Any]):
        self._context, self._weights, self._memory = context, weights, memory
        self.pointers: list[tuple[ctypes.Structure, int, int]] = []
        self._alive: list[ctypes.Structure] = []
        self.runs = [self._bound(call) for call in calls]

    def _bound(self, call: Any) -> tuple[str, Callable[[], int | None]]:
        good = isinstance(call, list) and len(call) == 3 and all(isinstance(each, str) for each in call[:2])
        check(good, "a call is no [step, operation, arguments]")
        step, operation, given = call
        if operation in abi.KERNELS:
            arguments = abi.KERNELS[operation]()
            _set_numbers(step, arguments, given)
            self._set_pointers(step, arguments, given, ())
            self._alive.append(arguments)
            return step, self._context.bind(operation, arguments)
        check(operation in FLOATS, f"step {step} calls {operation!r}, which this package does not run without PyTorch")
        check(isinstance(given, list) and len(given) > 1, f"step {step} has no list of arguments")
        out = self._memory.view(given[0], written=True)
        return step, functools.partial(FLOATS[operation], out, *map(self._argument, given[1:]))

    def _argument(self, given: Any) -> Any:
        if isinstance(given, list):
            return tuple(map(self._argument, given))
        return self._memory.view(given) if isinstance(given, dict) else given

    def _set_pointers(
        self, step: str, structure: ctypes.Structure, given: Any, around: tuple[ctypes.Structure, ...]
    ) -> None:
        """Give a structure its pointers. Their extents are numbers, all of which are set; around: what holds it."""
        kinds = _kinds(structure)
        for name, value in given.items():
            if issubclass(kinds[name], ctypes.Structure):
                self._set_pointers(step, getattr(structure, name), value, (structure, *around))
            elif isinstance(structure, abi.Linear) and name == "weights":
                check(is_whole(value, 0, len(self._weights) - 1), f"step {step} has the weight {value!r}")
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
        check(address % (4 if floats else min(size, 4)) == 0, f"{place} is not where a number starts")
        if number is None:
            setattr(structure, name, address)
        else:
            check(name == "data", f"{name} lies in an input")
            self.pointers.append((structure, number, address))


def _kinds(structure: ctypes.Structure) -> Mapping[str, Any]:
    return {name: kind for name, kind, *_ in structure._fields_}


def _set_numbers(step: str, structure: ctypes.Structure, given: Any) -> None:
    """Give a structure, and those in it, the fields that are numbers."""
    kinds = _kinds(structure)
    check(isinstance(given, dict) and given.keys() <= kinds.keys(), f"step {step} has fields that no kernel takes")
    for name, value in given.items():
        if issubclass(kinds[name], ctypes.Structure):
            _set_numbers(step, getattr(structure, name), value)
        elif kinds[name] is not ctypes.c_void_p:
            _set_number(step, structure, name, kinds[name], value)


def _set_number(step: str, structure: ctypes.Structure, name: str, kind: Any, value: Any) -> None:
    """Set a field to a number, or to several, that it can hold."""
    if issubclass(kind, ctypes.Array):
        good = isinstance(value, list) and len(value) == kind._length_ and all(is_whole(each, 0) for each in value)
        found: Any = kind(*value) if good else None
        held = list(found) if good else None
    elif kind is ctypes.c_float:
        found = held = value if type(value) in (int, float) else None
    else:
        found = kind(value).value if type(value) is int else None
        held = found
    check(held is not None and held == value, f"step {step} has {name} = {value!r}")
    setattr(structure, name, found)
