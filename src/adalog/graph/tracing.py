"""Trace a program without data: the shapes of its values, their channels through views, and their image axes."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from adalog.errors import ProgramError
from adalog.graph.operations import MOVES, PADS, resolve
from adalog.graph.program import Node, Program, evaluate

_KEPT = 8  # traces that a program keeps, each for inputs of other shapes
Axis = tuple[int, int] | None  # (dimension that counts images, entries per image); None if all images share the value


@torch.inference_mode(False)  # the values are kept for calls outside the caller's inference mode
@torch.no_grad()
def trace(program: Program, inputs: Sequence[Tensor], count: int | None = None) -> Mapping[str, Any]:
    """Return every value of a program by name, without data: tensors on the meta device, and sizes as numbers.

    count: the number of images, if other than that of the inputs. A program keeps its last traces, because many parts
    of a calibration ask for the same ones. Raises ProgramError if an operation fails.
    """
    if count is None:
        placeholders = [torch.empty_like(value, device="meta") for value in inputs]
    else:
        placeholders = [value.new_empty((count, *value.shape[1:]), device="meta") for value in inputs]
    key = tuple((value.shape, value.stride(), value.dtype) for value in placeholders)
    values = program.traces.get(key)
    if values is None:
        values = {name: value.to("meta") for name, value in program.tensors.items()}
        values |= zip(program.inputs, placeholders, strict=True)
        program.run_without_data(placeholders, lambda node, args, result: values.__setitem__(node.name, result))
        program.traces[key] = values
        for oldest in list(program.traces)[:-_KEPT]:
            program.traces.pop(oldest, None)
    return values


def size_in_bytes(value: Any) -> int:
    """Return the size of a tensor, or of several tensors, in bytes; numbers count as 0."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(size_in_bytes, value)) if isinstance(value, (tuple, list)) else 0


def at_twice_the_size(
    program: Program, inputs: Sequence[Tensor], images: int, names: Collection[str]
) -> Mapping[str, Any]:
    """Return these values, without data, for images of twice the height and width; scalars if the program fails."""
    larger = []
    for name, value in zip(program.inputs, inputs, strict=True):
        dims = program.free.get(name, ())
        sizes = [size * (2 if dim in dims else 1) for dim, size in enumerate(value.shape)]
        larger.append(value.new_empty((0, *sizes[1:])))
    try:
        values = trace(program, larger, images)
    except ProgramError:
        return dict.fromkeys(names, torch.empty(()))
    return {name: values[name] for name in names}


def sizes(values: Mapping[str, Any]) -> dict[str, int]:
    """Return the values that are numbers, by name."""
    return {name: value for name, value in values.items() if isinstance(value, int)}


def channels_in_views(
    name: str,
    values: Mapping[str, Any],
    readers: Mapping[str, Sequence[Node]],
    channels: Tensor | None = None,
    *,
    padded: bool = False,
) -> list[tuple[str, Any]]:
    """Return a value and all its views, nearest first, each with the channel number of every entry.

    values: from `trace`. readers: from `Program.consumers`. channels: the numbers in the value itself; by default, its
    last axis counts them. padded: follow zero padding too; padded entries have the channel number -1.
    """
    numbers, shape = sizes(values), values[name].shape
    views: list[tuple[str, Any]] = [(name, torch.arange(shape[-1]).expand(shape) if channels is None else channels)]
    for view, viewed in views:  # the loop appends to this list
        for reader in readers.get(view, []):
            known_values = {**numbers, view: viewed}
            if reader.op in MOVES:
                views.append((reader.name, resolve(reader.op)(*evaluate(reader.args, known_values), **reader.kwargs)))
            elif padded and zero_padding(reader):
                widths = evaluate(reader.args[1], known_values)
                views.append((reader.name, torch.nn.functional.pad(viewed, widths, value=-1)))
    return views


def zero_padding(node: Node) -> bool:
    """Return True if an operation pads a value with zeros, or crops it."""
    if node.op not in PADS or node.kwargs:
        return False
    arguments: list[Any] = list(node.args[2:])
    if node.op == "aten.constant_pad_nd.default":
        arguments.insert(0, "constant")
    mode, fill = arguments + ["constant", 0][len(arguments) :]
    return mode == "constant" and not fill


def image_axes(program: Program, inputs: Sequence[Tensor]) -> dict[str, Axis]:
    """Find the dimension of each tensor that counts images, from its shapes at two and three images.

    Tensors are left out if several dimensions change, or one changes unevenly.
    """
    two, three = (trace(program, inputs, count) for count in (2, 3))
    axes: dict[str, Axis] = {}
    for name, value in two.items():
        if not isinstance(value, Tensor):
            continue
        dims = [dim for dim in range(value.ndim) if value.shape[dim] != three[name].shape[dim]]
        entries = three[name].shape[dims[0]] - value.shape[dims[0]] if dims else 0
        if not dims:
            axes[name] = None
        elif len(dims) == 1 and value.shape[dims[0]] == 2 * entries:
            axes[name] = dims[0], entries
    return axes


def keeps_images_apart(
    run: Callable[[int, int], Mapping[str, Tensor]], names: Collection[str], axes: Mapping[str, Axis]
) -> bool:
    """Return True if a batch of two images gives the same values, up to rounding, as separate runs.

    run(first, count): computes the values of these names on `count` images, starting with image `first`.
    """
    if any(name not in axes for name in names):
        return False
    joint, *alone = run(0, 2), run(0, 1), run(1, 1)
    for name, value in joint.items():
        axis, pieces = axes[name], [values[name] for values in alone]
        references = pieces if axis is None else [torch.cat(pieces, axis[0])]
        if not all(close(value, reference) for reference in references):
            return False
    return True


def close(first: Tensor, second: Tensor) -> bool:
    """Return True if two tensors are equal up to rounding.

    The tolerance is the square root of the dtype's precision, relative to the largest value as well as to each value.
    """
    if first.shape != second.shape or not first.is_floating_point():
        return torch.equal(first, second)
    precision = torch.finfo(first.dtype).eps ** 0.5
    largest = first.abs().nan_to_num(posinf=0).max() if first.numel() else 0.0
    return torch.allclose(first, second, rtol=precision, atol=float(largest) * precision, equal_nan=True)
