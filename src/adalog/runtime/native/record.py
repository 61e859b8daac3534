"""Record a plan as a tape: its calls as data, with places in memory instead of addresses (docs/reference/format.md)."""

import ctypes
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adalog import library, version
from adalog.errors import ArtifactError
from adalog.graph.program import Program, Ref, leaves_of, map_leaves
from adalog.runtime.native import abi
from adalog.runtime.native.emit import Plan
from adalog.runtime.native.products import ByteProduct, is_by_pixel

FORMAT = 1
CONSTANTS, WORK = "constants", "work"  # two regions of memory; each input is another one, named by its number
ALIGNMENT = 64  # bytes of a cache line


def record(plan: Plan, artifact: str, batch: int) -> tuple[dict[str, Any], Tensor]:
    """Return the tape of a plan for `batch` images, as JSON, and its constants, uint8, (bytes,).

    artifact: the SHA-256 of the artifact.
    Raises ArtifactError if only torch can run a step, or if an output does not have one row per image.
    """
    torch_only = Counter(call.operation for call in plan.calls if call.arguments is None)
    if torch_only:
        operations = ", ".join(f"{operation} ({count})" for operation, count in torch_only.items())
        raise ArtifactError(
            f"only PyTorch runs these operations (number of steps): {operations}. "
            'Run the model with PyTorch, by compile("native"), or export it to ONNX'
        )
    program = plan.program
    fixed_leaves = [leaf for leaf in leaves_of(program.output) if not _is_batched(plan, leaf, batch)]
    if fixed_leaves:
        raise ArtifactError(f"the output {fixed_leaves[0]} is not a tensor with a row for each of {batch} images")
    memory = _AddressMap(plan)
    weights: dict[int, int] = {}  # by pointer: the number of the weight
    entries: list[Any] = []
    for function in plan.functions.values():
        if isinstance(function, ByteProduct) and function.weights is not None:
            site = function.site
            assert site.weight is not None
            weights[function.weights.pointer] = len(entries)
            shape = list(site.weight.flatten(2 if is_by_pixel(site) else 1).shape)
            entries.append([site.node.args[1].name, shape, *function.weights.choices])
    inputs = {id(arguments): number for arguments, number in plan.pointers}
    calls = []
    for call in plan.calls:
        if isinstance(call.arguments, ctypes.Structure):
            fields = _fields(call.arguments, memory, weights, inputs.get(id(call.arguments)))
        else:
            assert call.arguments is not None
            out, args = call.arguments
            fields = [memory.view(out), *map_leaves(args, Tensor, memory.view)]
        calls.append([call.step, call.operation, fields])
    header = {
        "format": FORMAT,
        "version": version.__version__,
        "interface": library.ABI,
        "artifact": artifact,
        "batch": batch,
        "inputs": [[name, list(shape)] for name, shape in zip(program.inputs, plan.shapes, strict=True)],
        "weights": entries,
        "copies": [None if static is None else memory.view(static) for static in plan.statics],
        "calls": calls,
        "output": _output(program, program.output, plan, memory),
        "fills": memory.fills,
        "work": memory.work,
    }
    return header, memory.constants()


def _is_batched(plan: Plan, leaf: Any, batch: int) -> bool:
    value = plan.results.get(leaf.name) if isinstance(leaf, Ref) else None
    return isinstance(value, Tensor) and value.shape[:1] == (batch,)


def _output(program: Program, structure: Any, plan: Plan, memory: "_AddressMap") -> Any:
    """Return the structure of the output, with views in place of values."""
    if isinstance(structure, dict):
        return {"dict": [[key, _output(program, item, plan, memory)] for key, item in structure.items()]}
    if isinstance(structure, (tuple, list)):
        kind = "tuple" if isinstance(structure, tuple) else "list"
        return {kind: [_output(program, item, plan, memory) for item in structure]}
    return memory.view(plan.results[structure.name])


def _fields(structure: ctypes.Structure, memory: "_AddressMap", weights: dict[int, int], number: int | None) -> Any:
    """Return the fields of a structure that are not zero. number: the input that its data lies in, or None."""
    result: dict[str, Any] = {}
    for name, kind, *_ in structure._fields_:
        value = getattr(structure, name)
        if isinstance(value, ctypes.Structure):
            result[name] = _fields(value, memory, weights, None)
        elif isinstance(value, ctypes.Array):
            result[name] = list(value)
        elif kind is not ctypes.c_void_p:
            result |= {name: value} if value else {}
        elif name == "data" and number is not None:
            result[name] = [number, 0]
        elif value is not None:
            isolated = isinstance(structure, abi.Linear) and name == "weights"
            result[name] = weights[value] if isolated else memory.place(value)
    return result


class _AddressMap:
    """The place of each address, in the work, which calls write, or in the constants.

    work: the bytes of the work. fills: [offset in the work, offset in the constants, bytes] to copy before the first
    call.
    """

    def __init__(self, plan: Plan):
        self.work = 0
        self.fills: list[list[int]] = []
        self._constants = bytearray()
        self._known: dict[bytes, int] = {}  # by content: its place in the constants
        self._places: dict[int, tuple[str, int]] = {}  # by address: region and offset
        shared = [*plan.layout.arena.blocks, *(static for static in plan.statics if static is not None)]
        for value in shared:
            self._places[value.untyped_storage().data_ptr()] = (WORK, self._take(value.untyped_storage().nbytes()))
        values = [plan.layout.alive, *(call.arguments for call in plan.calls if isinstance(call.arguments, tuple))]
        self._sizes = {storage.data_ptr(): storage.nbytes() for storage in _storages([*shared, *values])}
        self._addresses = sorted(self._sizes)
        for call in plan.calls:
            if isinstance(call.arguments, ctypes.Structure):
                for address in _written_addresses(call.arguments):
                    self.place(address, written=True)
            elif call.arguments is not None:
                self.place(call.arguments[0].data_ptr(), written=True)

    def _take(self, size: int) -> int:
        start, self.work = self.work, self.work + -(-size // ALIGNMENT) * ALIGNMENT
        return start

    def place(self, address: int, *, written: bool = False) -> tuple[str, int]:
        """Return the region and offset of an address. written: True if a call writes to it."""
        base = self._addresses[bisect_right(self._addresses, address) - 1]
        assert 0 <= address - base <= self._sizes[base], "an address outside the memory of the plan"
        if base not in self._places:
            content = ctypes.string_at(base, self._sizes[base])
            start = self._constant(content)
            if written:
                offset = self._take(len(content))
                self.fills.append([offset, start, len(content)])
                self._places[base] = WORK, offset
            else:
                self._places[base] = CONSTANTS, start
        region, start = self._places[base]
        return region, start + address - base

    def _constant(self, content: bytes) -> int:
        if content not in self._known:
            self._constants += bytes(-len(self._constants) % ALIGNMENT)
            self._known[content] = len(self._constants)
            self._constants += content
        return self._known[content]

    def view(self, value: Tensor) -> dict[str, Any]:
        """Return the description of a tensor as a view of memory."""
        strides = [stride * value.element_size() for stride in value.stride()]
        dtype = str(value.dtype).removeprefix("torch.")
        return {"at": self.place(value.data_ptr()), "shape": list(value.shape), "strides": strides, "type": dtype}

    def constants(self) -> Tensor:
        return torch.from_numpy(np.frombuffer(self._constants, np.uint8).copy())


def _storages(value: Any) -> Iterator[torch.UntypedStorage]:
    """Yield the memory of all tensors in a nested value."""
    return (leaf.untyped_storage() for leaf in leaves_of(value) if isinstance(leaf, Tensor))


def _written_addresses(structure: ctypes.Structure) -> Iterator[int]:
    """Yield the addresses that a kernel writes to."""
    for name, *_ in structure._fields_:
        value = getattr(structure, name)
        if isinstance(value, ctypes.Structure):
            yield from _written_addresses(value)
        elif value and (type(structure), name) in abi.WRITTEN:
            yield value
