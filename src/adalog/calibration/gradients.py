"""How much each value inside a program matters to its output: squared gradients, by autograd on the program."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from adalog.errors import CalibrationError
from adalog.graph.operations import aten
from adalog.graph.program import Node, Program, leaves_of
from adalog.graph.tracing import image_axes, keeps_images_apart, trace

# (the program's floating outputs for some images, which images) -> the gradient of a loss by each of these outputs.
Probe = Callable[[Sequence[Tensor], slice], Sequence[Tensor]]

BATCH = 4  # images per backward pass
_NORMALISED = aten("batch_norm.default instance_norm.default")  # by statistics, which have no gradient


def hessian_probe(generator: torch.Generator) -> Probe:
    """Random gradients whose mean square is the diagonal of the loss's Hessian.

    Where the model's only output is y, (B, classes), with two classes or more, the loss is KL(p || softmax(y)). Its
    Hessian by y is diag(p) - p p^T = E[g g^T] with g = (diag(s) - p s^T) e, s = sqrt(p), and e random signs. So
    E[(J^T g)^2] is the diagonal of J^T (diag(p) - p p^T) J by any value inside. For other outputs the loss is half the
    squared distance, and g = e.
    """

    def probe(outputs: Sequence[Tensor], images: slice) -> Sequence[Tensor]:
        signs = [_like(torch.randint(0, 2, value.shape, generator=generator) * 2 - 1, value) for value in outputs]
        if not _is_scores(outputs):
            return signs
        p = outputs[0].detach().softmax(-1)
        signed = p.sqrt() * signs[0]
        return [signed - p * signed.sum(-1, keepdim=True)]

    return probe


def noise_probe(generator: torch.Generator) -> Probe:
    """What a computer finds for the gradient of KL(p || softmax(y)) at softmax(y) = p, where the true one is zero.

    It is (diag(p) - p p^T) times the rounding noise of y. Only the noise's direction counts, so it is Gaussian with
    unit variance here.
    """

    def probe(outputs: Sequence[Tensor], images: slice) -> Sequence[Tensor]:
        noise = [_like(torch.randn(value.shape, generator=generator), value) for value in outputs]
        if not _is_scores(outputs):
            return noise
        p = outputs[0].detach().softmax(-1)
        return [p * (noise[0] - (p * noise[0]).sum(-1, keepdim=True))]

    return probe


def distance_gradient(outputs: Sequence[Tensor], wanted: Sequence[Tensor]) -> Sequence[Tensor]:
    """The gradient of the distance to the float network's outputs, by other outputs.

    As above, the distance is KL(softmax(wanted) || softmax(y)) where the only output is (B, classes), and otherwise
    half the squared one.
    """
    if _is_scores(outputs):
        return [outputs[0].detach().softmax(-1) - wanted[0].softmax(-1)]
    return [value.detach() - exact for value, exact in zip(outputs, wanted, strict=True)]


def given_probe(gradient: Tensor) -> Probe:
    """A given gradient by the model's only output: (images, ...)."""
    return lambda outputs, images: [_like(gradient[images], outputs[0])]


def _like(value: Tensor, other: Tensor) -> Tensor:
    return value.to(other)


def _is_scores(outputs: Sequence[Tensor]) -> bool:
    return len(outputs) == 1 and outputs[0].ndim == 2 and outputs[0].shape[1] > 1


def squared_gradients(
    program: Program, images: Sequence[Tensor], names: Collection[str], probes: Sequence[Probe]
) -> dict[str, Tensor]:
    """The mean over probes of the squared gradient by each named value, scaled so that its mean is 1.

    Values that no gradient reaches have ones, so that all errors count alike. Takes one forward per BATCH images and
    one backward per probe and batch; where some value does not keep the images one after the other, all images are one
    batch.
    """
    traced = trace(program, images, names=names)
    names = [name for name, value in traced.items() if isinstance(value, Tensor) and value.is_floating_point()]
    dimensions = _image_dimensions(program, images, names)
    batch = len(images[0]) if dimensions is None else BATCH
    statistics = {ref.name for node in program.nodes if node.op in _NORMALISED for ref in node.args[3:5] if ref}
    leaves = {name: value.detach() if name in statistics else _leaf(value) for name, value in program.tensors.items()}
    free = replace(program, tensors=leaves)
    batches: dict[str, list[Tensor]] = {name: [] for name in names}
    count = len(images[0])
    for start in range(0, count, batch):
        which = slice(start, min(start + batch, count))
        kept: dict[str, Tensor] = {}

        def watch(node: Node, args: tuple[Any, ...], result: Any, kept: dict[str, Tensor] = kept) -> None:
            if node.name in batches:
                kept[node.name] = result

        with torch.enable_grad():
            output = free.run([_leaf(value[which]) for value in images], watch)
            outputs = [leaf for leaf in leaves_of(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not outputs:
            raise CalibrationError("the model puts out nothing that has a gradient, which this method's errors need")
        squares = {name: torch.zeros_like(value) for name, value in kept.items()}
        reached = {name: value for name, value in kept.items() if value.requires_grad}
        for index, probe in enumerate(probes if reached else ()):
            found = torch.autograd.grad(
                outputs,
                list(reached.values()),
                probe(outputs, which),
                retain_graph=index + 1 < len(probes),
                allow_unused=True,
            )
            for name, gradient in zip(reached, found, strict=True):
                if gradient is not None:
                    squares[name] += gradient.square() / len(probes)
        for name, value in squares.items():
            batches[name].append(value)
    together = {
        name: values[0] if dimensions is None else torch.cat(values, dimensions[name])
        for name, values in batches.items()
    }
    return {name: with_mean_one(value) for name, value in together.items()}


def with_mean_one(squares: Tensor) -> Tensor:
    """Squared gradients over their mean; ones where there is nothing but zeros."""
    mean = squares.mean()
    return torch.ones_like(squares) if mean == 0 else squares / mean


def _leaf(value: Tensor) -> Tensor:
    return value.detach().requires_grad_() if value.is_floating_point() else value


@torch.no_grad()
def _image_dimensions(program: Program, images: Sequence[Tensor], names: Collection[str]) -> dict[str, int] | None:
    """The dimension of each value that counts images; None where the images must go through the program together."""

    def run(first: int, count: int) -> dict[str, Tensor]:
        seen: dict[str, Tensor] = {}

        def watch(node: Node, args: tuple[Any, ...], result: Any) -> None:
            if node.name in names:
                seen[node.name] = result

        program.run([value[first : first + count] for value in images], watch)
        return seen

    if len(images[0]) < 2:
        return None
    axes = image_axes(program, images)
    dimensions = {name: axis[0] for name in names if (axis := axes.get(name)) is not None}
    if len(dimensions) < len(set(names)) or not keeps_images_apart(run, names, axes):
        return None
    return dimensions
