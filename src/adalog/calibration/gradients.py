"""How much each value inside a program matters to what it puts out: squared gradients, by autograd on the program."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from adalog.errors import CalibrationError
from adalog.graph.program import Node, Program, leaves_of

# (the program's floating outputs for some images, which images) -> the gradient of a loss by each of these outputs.
Probe = Callable[[Sequence[Tensor], slice], Sequence[Tensor]]

BATCH = 4  # images that are back-propagated together


def hessian_probe(generator: torch.Generator) -> Probe:
    """Random gradients whose mean square is the diagonal of the loss's Hessian.

    The loss is KL(p || softmax(y)) where y, (B, classes), is all that the model puts out: its Hessian by y is
    diag(p) - p p^T = E[g g^T] with g = (diag(s) - p s^T) e, s = sqrt(p), and e random signs. So E[(J^T g)^2] is the
    diagonal of J^T (diag(p) - p p^T) J by any value inside. Of other outputs it is half the squared distance, g = e.
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
    """What the gradient of KL(p || softmax(y)) at softmax(y) = p comes to: (diag(p) - p p^T) times rounding noise of y.

    The true gradient is zero. Only the noise's direction counts, so it is Gaussian of unit size here.
    """

    def probe(outputs: Sequence[Tensor], images: slice) -> Sequence[Tensor]:
        noise = [_like(torch.randn(value.shape, generator=generator), value) for value in outputs]
        if not _is_scores(outputs):
            return noise
        p = outputs[0].detach().softmax(-1)
        return [p * (noise[0] - (p * noise[0]).sum(-1, keepdim=True))]

    return probe


def given_probe(gradient: Tensor) -> Probe:
    """This gradient by the only output, (images, ...)."""
    return lambda outputs, images: [_like(gradient[images], outputs[0])]


def _like(value: Tensor, other: Tensor) -> Tensor:
    return value.to(other)


def _is_scores(outputs: Sequence[Tensor]) -> bool:
    return len(outputs) == 1 and outputs[0].ndim == 2


def squared_gradients(
    program: Program, images: Sequence[Tensor], names: Collection[str], probes: Sequence[Probe]
) -> dict[str, Tensor]:
    """The mean over probes of the squared gradient by each named value, scaled so that it is 1 on average.

    What no gradient reaches has zeros. Takes one forward for every BATCH images, and one backward for each probe; all
    images together where some value does not keep them one after the other.
    """
    dimensions = _image_dimensions(program, images, names)
    batch = len(images[0]) if dimensions is None else BATCH
    leaves = {
        name: value.detach().requires_grad_() if value.is_floating_point() else value
        for name, value in program.tensors.items()
    }
    free = replace(program, tensors=leaves)
    parts: dict[str, list[Tensor]] = {name: [] for name in names}
    count = len(images[0])
    for start in range(0, count, batch):
        which = slice(start, min(start + batch, count))
        kept: dict[str, Tensor] = {}

        def watch(node: Node, args: tuple[Any, ...], result: Any, kept: dict[str, Tensor] = kept) -> None:
            if node.name in parts:
                kept[node.name] = result

        with torch.enable_grad():
            output = free.run([_leaf(value[which]) for value in images], watch)
            outputs = [leaf for leaf in leaves_of(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not outputs:
            raise CalibrationError("the model puts out nothing that has a gradient, which this method's errors need")
        squares = {name: torch.zeros_like(value) for name, value in kept.items()}
        for index, probe in enumerate(probes):
            found = torch.autograd.grad(
                outputs,
                list(kept.values()),
                probe(outputs, which),
                retain_graph=index + 1 < len(probes),
                allow_unused=True,
            )
            for name, gradient in zip(kept, found, strict=True):
                if gradient is not None:
                    squares[name] += gradient.square() / len(probes)
        for name, value in squares.items():
            parts[name].append(value)
    together = {
        name: values[0] if dimensions is None else torch.cat(values, dimensions[name]) for name, values in parts.items()
    }
    return {name: value / value.mean().clamp(min=torch.finfo(value.dtype).tiny) for name, value in together.items()}


def _leaf(value: Tensor) -> Tensor:
    return value.detach().requires_grad_() if value.is_floating_point() else value


@torch.no_grad()
def _image_dimensions(program: Program, images: Sequence[Tensor], names: Collection[str]) -> dict[str, int] | None:
    """The dimension of each value along which those of two images come one after the other.

    None: some value mixes its images otherwise, so that all must go through together.
    """

    def values(which: list[int]) -> dict[str, Tensor]:
        seen: dict[str, Tensor] = {}

        def watch(node: Node, args: tuple[Any, ...], result: Any) -> None:
            if node.name in names:
                seen[node.name] = result

        program.run([value[which] for value in images], watch)
        return seen

    if len(images[0]) < 2:
        return None
    first, second, both = values([0]), values([1]), values([0, 1])
    dimensions = {}
    for name, whole in both.items():
        one, other = first[name], second[name]
        grown = [dim for dim in range(whole.ndim) if whole.shape[dim] != one.shape[dim]]
        if len(grown) != 1:
            return None
        joined = torch.cat([one, other], grown[0])
        if joined.shape != whole.shape or not torch.allclose(joined, whole, rtol=1e-2, atol=1e-3 * float(whole.std())):
            return None
        dimensions[name] = grown[0]
    return dimensions
