"""Even out the channels of attention's values V, whose outliers would widen the step of a whole head.

Attention computes A V, and a linear with the weight P reads it. To divide a channel of V by a power of two in the
linear that computes V, and to multiply its columns of P by the same power, leaves the function as it is, bit for bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from adalog.graph.operations import MOVES, SHAPE_READERS
from adalog.graph.program import Node, Program, refs_of
from adalog.graph.sites import Site
from adalog.graph.tracing import channels_in_views, trace
from adalog.quantizers import UniformQuantizer, bounds_to_uniform

# A channel is an outlier if its range is this many times the median range of its head.
_OUTLIER = 8
# The bits at which errors are compared.
_BITS = 4


@dataclass(frozen=True)
class _AttentionValues:
    """The values V of one attention, between the linear that computes them and the linear that reads A V.

    channels: (..., D), the output channel of `maker` in each column of A V; it broadcasts to V. columns: the same for
    the columns of the weight of `reader`.
    """

    site: Site
    maker: Node
    reader: Node
    channels: Tensor
    columns: Tensor


def even_out_values(program: Program, sites: Sequence[Site], images: Sequence[Tensor]) -> Program:
    """Return the program with scaled values V, where that lowers the error of the linears after attention.

    Only heads with an outlier change. images: a few calibration images.
    """
    attentions, ranges = find_values(program, sites, images), dict[str, Tensor]()
    makers = {values.maker.name for values in attentions}

    def measure(node: Node, args: tuple[Any, ...], result: Any) -> None:
        if node.name in makers:
            rows = result.flatten(0, -2)
            ranges[node.name] = rows.amax(0) - rows.amin(0)

    if makers:
        program.run(images, measure)
    steps = {}
    for values in attentions:
        step = _steps(values, program, ranges[values.maker.name])
        if step.any():
            steps[values.site.node.name] = values, step
    names: list[str] = []

    def compare(node: Node, args: tuple[Any, ...], result: Any) -> None:
        if node.name in steps:
            values, step = steps[node.name]
            attention, v, *_ = args
            scaled, plain = (_error(values, program, attention, v, s) for s in (step, torch.zeros_like(step)))
            if scaled < plain:
                names.append(node.name)

    if steps:
        program.run(images, compare)
    tensors = dict(program.tensors)
    for values, step in (steps[name] for name in names):
        weight, *bias = _parameters(values.maker)
        tensors[weight] = torch.ldexp(tensors[weight], -step[:, None])
        tensors |= {name: torch.ldexp(tensors[name], -step) for name in bias}
        read = values.reader.args[1].name
        tensors[read] = torch.ldexp(tensors[read], step[values.columns])
    return replace(program, tensors=tensors) if names else program


def find_values(program: Program, sites: Sequence[Site], example: Sequence[Tensor]) -> list[_AttentionValues]:
    """Find the attentions whose V comes from a stored linear and whose A V goes to another, through views alone.

    Nothing else may read these channels. example: inputs whose shapes are used to trace the program.
    """
    attentions = [site for site in sites if site.role == "av" and not site.again]
    if not attentions:
        return []
    shapes, readers = trace(program, example, 1), program.consumers()
    makers = {node.name: node for node in program.nodes}
    outputs = set(refs_of(program.output))
    shared = outputs.union(name for name, nodes in readers.items() if len(nodes) > 1)
    linears = {
        site.node.name: site.node
        for site in sites
        if site.role == "linear" and not site.again and shared.isdisjoint(_parameters(site.node))
    }

    def end_of(views: Sequence[tuple[str, Any]], channels: Tensor) -> tuple[Node | None, Tensor]:
        """Return the only operation that computes with these channels, and the channels of the value it reads."""
        ends: list[tuple[Node | None, Tensor]] = []
        known = channels.unique()
        for view, numbers in views:
            if isinstance(numbers, Tensor) and bool(torch.isin(numbers.unique(), known).any()):
                ends += [(None, numbers)] if view in outputs else []
                ends += [(node, numbers) for node in readers.get(view, []) if node.op not in MOVES | SHAPE_READERS]
        return ends[0] if len(ends) == 1 else (None, channels)

    attended_values = []
    for site in attentions:
        name = site.right
        while name in makers and makers[name].op in MOVES:
            name = makers[name].args[0].name
        if name not in linears:
            continue
        views = channels_in_views(name, shapes, readers)
        numbers = next(numbers for view, numbers in views if view == site.right)
        channels = numbers[..., :1, :]
        attended = channels.expand(shapes[site.node.name].shape)
        reader, inputs = end_of(channels_in_views(site.node.name, shapes, readers, attended), channels)
        columns = inputs.flatten(0, -2)[0]
        apart = bool((numbers == channels).all()) and bool((inputs == columns).all())
        if apart and end_of(views, channels)[0] is site.node and reader is not None and reader.name in linears:
            maker, device = linears[name], program.tensors[linears[name].args[1].name].device
            attended_values.append(_AttentionValues(site, maker, reader, channels.to(device), columns.to(device)))
    return attended_values


def _parameters(linear: Node) -> list[str]:
    """Return the names of a linear's weight and, if it has one, its bias."""
    return [arg.name for arg in linear.args[1:3] if arg is not None]


def _steps(values: _AttentionValues, program: Program, ranges: Tensor) -> Tensor:
    """Return the powers of two by which channels are divided: (O,), zeros but for outliers.

    A step balances how far a channel's range is above the median range of its head, and how far its columns of the
    next weight are above their median.
    """
    weight = program.tensors[values.reader.args[1].name].abs().amax(0)
    headed = values.site.right in values.site.headed
    heads = values.channels.flatten(0, -2).unique(dim=0) if headed else values.channels.unique()[None]
    steps = torch.zeros_like(ranges, dtype=torch.int32)
    least = torch.finfo(ranges.dtype).tiny
    for head in heads:
        largest = torch.where(values.columns[:, None] == head, weight[:, None], 0).amax(0)
        wide, heavy = (spread / spread.median().clamp(min=least) for spread in (ranges[head], largest))
        step = ((wide / heavy.clamp(min=least)).clamp(min=least).log2() / 2).round().clamp(0, 16)
        steps[head] = torch.where(wide >= _OUTLIER, step, 0).to(torch.int32)
    return steps


def _error(values: _AttentionValues, program: Program, attention: Tensor, v: Tensor, steps: Tensor) -> float:
    """Return the squared error of the linear after attention if V, A V and its weight are quantized by their ranges."""
    step = steps[values.channels]
    weight = torch.ldexp(program.tensors[values.reader.args[1].name], steps[values.columns])
    power = torch.zeros(len(steps), dtype=weight.dtype, device=weight.device)
    inside, of_weight = (
        power.index_add(0, values.columns, matrix.square().sum(0)) for matrix in (weight, _rounding(weight, (1,)))
    )
    v = torch.ldexp(v, -step)
    attended = attention @ v
    dims = (-2, -1) if values.site.right in values.site.headed else tuple(range(v.ndim))
    noise = (attention @ _rounding(v, dims)).square() + _rounding(attended, tuple(range(v.ndim))).square()
    error = noise * inside[values.channels] + attended.square() * of_weight[values.channels]
    return float(error.double().sum())


def _rounding(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return the error of a uniform quantizer whose ranges, over these dimensions, are those of the values."""
    scale, zero_point = bounds_to_uniform(x.amin(dims, keepdim=True), x.amax(dims, keepdim=True), _BITS)
    return UniformQuantizer(scale, zero_point, _BITS).fake_quantize(x) - x
