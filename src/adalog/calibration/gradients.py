"""Compute how much each value inside a program matters to its output, as squared gradients."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from adalog.calibration.values import Chunk, Values, batch_bytes
from adalog.device import waits_for_launches
from adalog.errors import CalibrationError
from adalog.graph.operations import aten
from adalog.graph.program import Node, Program, evaluate, leaves_of, refs_of
from adalog.graph.stretches import NEVER, live_bytes, passed_bytes

# (the program's differentiable outputs for some images, the slice of these images) -> the gradient of a loss with
# respect to each output.
Probe = Callable[[Sequence[Tensor], slice], Sequence[Tensor]]

BATCH = 4  # images per draw of a probe, and per backward pass on a CPU
_BATCH_OF_ACCELERATOR = 32
# The most bytes of values in a backward pass over several images. Large images run one at a time.
_BATCH_BYTES = 4 << 30
_NORMALISED = aten("batch_norm.default instance_norm.default")  # their statistics take no gradient


def hessian_probe(generator: torch.Generator) -> Probe:
    """Return a probe with random gradients whose mean square is the diagonal of the loss's Hessian.

    If the model's only output is y, (B, classes), with at least two classes, the loss is KL(p || softmax(y)). Its
    Hessian with respect to y is diag(p) - p p^T = E[g g^T] with g = (diag(s) - p s^T) e, s = sqrt(p), and random signs
    e. So E[(J^T g)^2] is the diagonal of J^T (diag(p) - p p^T) J for any value inside the model. For other outputs the
    loss is half the squared distance, and g = e.
    """

    def probe(outputs: Sequence[Tensor], images: slice) -> Sequence[Tensor]:
        signs = [(torch.randint(0, 2, value.shape, generator=generator) * 2 - 1).to(value) for value in outputs]
        if not _is_scores(outputs):
            return signs
        p = outputs[0].detach().softmax(-1)
        signed = p.sqrt() * signs[0]
        return [signed - p * signed.sum(-1, keepdim=True)]

    return probe


def noise_probe(generator: torch.Generator) -> Probe:
    """Return a probe with the rounding noise in the gradient of KL(p || softmax(y)) at softmax(y) = p.

    The exact gradient there is zero. The computed one is (diag(p) - p p^T) times the rounding noise of y. Only the
    direction of the noise matters, so it is Gaussian with unit variance here.
    """

    def probe(outputs: Sequence[Tensor], images: slice) -> Sequence[Tensor]:
        noise = [torch.randn(value.shape, generator=generator).to(value) for value in outputs]
        if not _is_scores(outputs):
            return noise
        p = outputs[0].detach().softmax(-1)
        return [p * (noise[0] - (p * noise[0]).sum(-1, keepdim=True))]

    return probe


def distance_gradient(outputs: Sequence[Tensor], targets: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the gradient of the distance to the float network's outputs with respect to other outputs.

    The distance is KL(softmax(target) || softmax(y)) if the only output is (B, classes), else half the squared one.
    """
    if _is_scores(outputs):
        return [outputs[0].detach().softmax(-1) - targets[0].softmax(-1)]
    return [value.detach() - exact for value, exact in zip(outputs, targets, strict=True)]


def mean_distance(outputs: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
    """Return the distance to the float network's outputs, averaged over images or, if it is squared, over values."""
    if _is_scores(outputs):
        exact = targets[0].log_softmax(-1)
        return (exact.exp() * (exact - outputs[0].log_softmax(-1))).sum(-1).mean()
    pairs = [pair for pair in zip(outputs, targets, strict=True) if pair[1].is_floating_point()]
    return sum(((value - exact).square().mean() for value, exact in pairs), torch.zeros((), device=targets[0].device))


def gradient_probe(gradient: Tensor) -> Probe:
    """Return a probe with a given gradient with respect to the model's only output: (images, ...)."""
    return lambda outputs, images: [gradient[images].to(outputs[0])]


def _is_scores(outputs: Sequence[Tensor]) -> bool:
    return len(outputs) == 1 and outputs[0].ndim == 2 and outputs[0].shape[1] > 1


def _identity(_: str, squares: Tensor) -> Tensor:
    return squares


def squared_gradients(
    program: Program,
    images: Sequence[Tensor],
    names: Collection[str],
    probes: Sequence[Probe],
    reduced: Callable[[str, Tensor], Tensor] = _identity,
    memory: int | None = None,
) -> dict[str, Tensor]:
    """Return the squared gradient of each named value, averaged over probes and scaled to mean 1.

    reduced: maps a name and the squared gradients of a batch to what is kept of them; it keeps the images apart. A
    value that no gradient reaches gets ones, so that all its errors count equally. A batch of `BATCH` images (more on
    an accelerator, fewer if their values exceed `_BATCH_BYTES`) takes one forward, and one backward per probe. If some
    value does not keep images apart, all images form one batch. memory: bytes for the values of any other batch; a
    program that makes more runs in stretches, whose values are computed again for the backward pass. None: no limit.
    Raises CalibrationError if no output has a gradient.
    """
    statistics = {ref.name for node in program.nodes if node.op in _NORMALISED for ref in node.args[3:5] if ref}
    leaves = {name: value.detach() if name in statistics else _leaf(value) for name, value in program.tensors.items()}
    free, values = replace(program, tensors=leaves), Values(program, images)
    shapes, count = values.shapes, values.count
    names = [name for name in shapes if name in names and values.is_float(name)]
    dimensions = _image_dimensions(values, names)
    sizes = _bytes_by_node(program, shapes)
    if dimensions is None:  # a value that no image reaches would be computed in several stretches
        draw, few, memory = count, count, None
    else:
        draw, few = BATCH, min(BATCH, max(1, _BATCH_BYTES * count // max(1, sum(sizes))))
    batch = max(draw, _BATCH_OF_ACCELERATOR) if waits_for_launches(images[0].device) and few == draw else few
    ends = _ends(program, shapes, sizes, None if memory is None else memory * count // min(batch, count))
    # Large values are reduced after each probe, which saves memory. The last bits differ from a reduction at the end,
    # so all others are reduced at the end.
    reduce_each, reduce_all = (reduced, _identity) if few < draw else (_identity, reduced)
    batches: dict[str, list[Tensor]] = {name: [] for name in names}
    start = 0
    for images_of_batch in values.split(values.images, batch):
        which = slice(start, start := start + values.count_of(images_of_batch))
        chunk = {name: _leaf(value) for name, value in images_of_batch.items()}

        def slopes(outputs: Sequence[Tensor], which: slice = which) -> Sequence[Sequence[Tensor]]:
            return _draw(probes, outputs, which, min(draw, batch))

        for name, value in _squares_of_batch(values, free, chunk, names, slopes, reduce_each, ends).items():
            batches[name].append(reduce_all(name, value))
    return {
        name: with_mean_one(squares[0] if dimensions is None else torch.cat(squares, dimensions[name]))
        for name, squares in batches.items()
    }


def _bytes_by_node(program: Program, shapes: Mapping[str, Any]) -> list[int]:
    """Return the bytes of the values that each node of a program makes; a view counts with the value that it views."""
    storages, sizes = set[int](), []
    for node in program.nodes:
        values = [leaf for leaf in leaves_of(shapes[node.name]) if isinstance(leaf, Tensor)]
        new = {storage._cdata: storage.nbytes() for value in values if (storage := value.untyped_storage())}
        sizes.append(sum(size for key, size in new.items() if key not in storages))
        storages.update(new)
    return sizes


def _ends(program: Program, shapes: Mapping[str, Any], sizes: Sequence[int], memory: int | None) -> list[int]:
    """Return the numbers of nodes after which the stretches of a program end; there is one stretch if memory suffices.

    Each stretch makes values of up to a batch's share of the memory, and ends where later ones need few bytes.
    """
    count, ends, start = len(program.nodes), list[int](), 0
    if memory is None or sum(sizes) <= memory:
        return [count]

    lives = _lives(program)
    costs = live_bytes(lives, {name: passed_bytes(shapes[name]) for name in lives}, count)
    for index in range(count):
        if sum(sizes[start : index + 1]) > batch_bytes(memory) and index > start:
            end = min(range((start + index) // 2 + 1, index + 1), key=lambda end: (costs[end], -end))
            if costs[end] < NEVER:
                ends.append(end)
                start = end
    return [*ends, count]


def _lives(program: Program) -> dict[str, range]:
    """Return when each value of the images is live; a stretch computes other values again."""
    return {name: life for name, life in program.lives().items() if name in program.of_inputs}


def _squares_of_batch(
    values: Values,
    free: Program,
    images: Chunk,
    names: Collection[str],
    slopes: Callable[[Sequence[Tensor]], Sequence[Sequence[Tensor]]],
    reduced: Callable[[str, Tensor], Tensor],
    ends: Sequence[int],
) -> dict[str, Tensor]:
    """Return the squared gradients of each named value for some images, averaged over probes.

    free: the program with tensors that require gradients. slopes: returns the gradients of each probe with respect to
    the outputs. reduced: is applied to the squares of each probe. The forward of the last stretch serves its backward.
    Others run twice, so that one is held at a time.
    """
    squares, chunks, lives = dict[str, Tensor](), [images], _lives(free)
    borders = [[name for name, life in lives.items() if end in life] for end in ends[:-1]]
    borders.append(list(dict.fromkeys(refs_of(free.output))))
    for border in borders[:-1]:
        result, _ = _stretch(values, free, chunks[-1], border, ())
        chunks.append({**chunks[0], **{name: _detach(value) for name, value in result.items()}})
        del result
    result, kept = _stretch(values, free, chunks[-1], borders[-1], names)
    outputs = [value for value in leaves_of(evaluate(free.output, result)) if _has_gradient(value)]
    if not outputs:
        raise CalibrationError(
            "the model has no differentiable output, but this method needs one: choose another method"
        )
    out_gradients = slopes(outputs)
    probes = len(out_gradients)
    for index in reversed(range(len(borders))):
        starts = {name: value for name, value in chunks[index].items() if name not in images and _has_gradient(value)}
        squares |= {name: reduced(name, torch.zeros_like(value)) for name, value in kept.items()}
        reached = {name: value for name, value in kept.items() if value.requires_grad}
        inputs, following = [*starts.values(), *reached.values()], list[Sequence[Tensor | None]]()
        for number, gradients in enumerate(out_gradients if inputs and outputs else ()):
            more = number + 1 < len(out_gradients)
            gradients_in = list(torch.autograd.grad(outputs, inputs, gradients, retain_graph=more, allow_unused=True))
            for name in reversed(reached):
                gradient = gradients_in.pop()  # so that it is freed before the next one is squared
                if gradient is not None:
                    squares[name] += reduced(name, gradient.square() / probes)
            following.append(gradients_in)
        if index:
            chunks.pop()
            del result, kept, reached, outputs, inputs
            result, kept = _stretch(values, free, chunks[-1], borders[index - 1], names)
            used = [place for place, name in enumerate(starts) if following and following[0][place] is not None]
            outputs = [result[name] for place, name in enumerate(starts) if place in used]
            out_gradients = [[gradient for gradient in of_probe if gradient is not None] for of_probe in following]
    return squares


def _stretch(
    values: Values, free: Program, chunk: Chunk, border: Collection[str], names: Collection[str]
) -> tuple[Chunk, Chunk]:
    """Compute the values that a stretch passes on from the values of a chunk; return also its named values."""
    kept: Chunk = {}

    def watch(node: Node, args: tuple[Any, ...], result: Any) -> None:
        if node.name in names:
            kept[node.name] = result

    with torch.enable_grad():
        return values.compute(chunk, border, free, watch), kept


def _detach(value: Any) -> Any:
    """Return a value without its history; it requires a gradient if it did before."""
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def _has_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _draw(probes: Sequence[Probe], outputs: Sequence[Tensor], images: slice, count: int) -> Sequence[Sequence[Tensor]]:
    """Return each probe's gradients, drawn for `count` images after another so that they do not depend on the batch."""
    size = images.stop - images.start
    if size <= count or any(len(value) != size for value in outputs):
        return [probe(outputs, images) for probe in probes]
    parts = []
    for first in range(0, size, count):
        part = slice(images.start + first, min(images.start + first + count, images.stop))
        parts.append([probe([value[first : first + count] for value in outputs], part) for probe in probes])
    return [[torch.cat(values) for values in zip(*of_probe, strict=True)] for of_probe in zip(*parts, strict=True)]


def with_mean_one(squares: Tensor) -> Tensor:
    """Divide squared gradients by their mean; return ones if all of them are zero."""
    mean = squares.mean()
    return torch.ones_like(squares) if mean == 0 else squares / mean


def _leaf(value: Tensor) -> Tensor:
    return value.detach().requires_grad_() if value.is_floating_point() else value


def _image_dimensions(values: Values, names: Sequence[str]) -> dict[str, int] | None:
    """Return the dimension of each value that counts images; None if the images must run together."""
    axes = {name: axis for name in names if (axis := values.axes.get(name)) is not None}
    if values.count == 1 or len(axes) < len(names) or not values.keeps_apart(values.images, names):
        return None
    return {name: dim for name, (dim, _) in axes.items()}
