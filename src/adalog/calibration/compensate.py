"""Correct weights and biases in closed form for the effects of quantization, site by site.

Sites are corrected in order of execution. Each site is fitted to its output in the float network, from the inputs that
it gets once everything before it is quantized and corrected. Let x be the centred inputs and y the centred targets over
all rows of the images, which count by their importance for the model's output. The weight W minimises

    sum |y - W x|^2 + ridge |W - W_0|^2

with the float weight W_0, and the bias restores the means. Only second moments of the rows are held. Codes are chosen
one column after another, and each column passes its error on to the columns that follow (GPTQ, Frantar et al., ICLR
2023; the targets are the float network's outputs, as in GPTAQ, Li et al., ICML 2025). Then single codes change as long
as the error falls. The design page "Stages" explains the choices.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from adalog.calibration.judge import output_errors
from adalog.calibration.partial import Partial
from adalog.calibration.schedule import Progress
from adalog.calibration.values import Values
from adalog.choices import Correction
from adalog.device import waits_for_launches
from adalog.errors import CalibrationError, one_line
from adalog.graph.convolution import conv_geometry, patches
from adalog.graph.program import Node, Program
from adalog.graph.rewrite import Assigned, RewriteCache, SiteGroup, exact_bias, rewrite
from adalog.graph.sites import find_pieces
from adalog.quantizers import Assignment, QuantizedTensor, Quantizer, UniformQuantizer, decibels
from adalog.quantizers.elementwise import codes_in_turn
from adalog.search.forms import gram_matrix

# Every n-th image is held out of a fit to choose its ridge strength. If there are no more images than n, none is.
_HELD_OUT = 4
# Candidate ridge strengths, as fractions of the inputs' mean variance. The last one keeps the weight.
_RIDGES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, math.inf)
# The ridge strength if no image is held out to choose it.
_RIDGE = 1e-2
# Codes are chosen as if this fraction of the mean variance were added to each input's own, because codes that
# compensate for each other on the fitted rows alone miss all others: at least `_DAMPING`, and more with few rows per
# input. Rows next to each other are alike, so that `_ALIKE` of them count as one.
_DAMPING = 1e-2
_ALIKE = 10
# The relative error of a sum of squares in float32, per column of the moments.
_OF_SUMS = 4 * torch.finfo(torch.float32).eps
# Values whose variance is below this fraction of their mean square are constant except for rounding noise.
ROUNDING = 1e-10
# The least and the most that scales are multiplied by to restore the power of the outputs.
_GAINS = (0.5, 2.0)
# The most bytes that the patches of a convolution take at a time.
_PATCHES = 2**26
# A site is fitted to at least this many rows, if it has them. Batches of images after that are not read.
_ROWS = 2**17
# The most passes that change codes after the first choice.
_SWEEPS = 4
# Weights with more inputs keep their assignments, because the moments would take over half a gigabyte.
_INPUTS = 8192
# The codes of this many inputs are chosen before one product updates all later inputs.
_BLOCK = 64


@dataclass(frozen=True)
class Moments:
    """Weighted sums over rows of products of inputs x and targets y, each relative to an origin, per group.

    count: the sum of the weights, a tensor unless all are 1, so that nothing waits for the device. x: (G, K), y:
    (G, O), xx: (G, K, K), yx: (G, O, K), yy: (G, O), in float64. G: groups of a convolution, 1 for a linear.
    """

    rows: int
    count: float | Tensor
    x: Tensor
    y: Tensor
    xx: Tensor
    yx: Tensor
    yy: Tensor

    @staticmethod
    def of(x: Tensor, y: Tensor, weights: Tensor | None = None) -> "Moments":
        """Return the moments of the rows x, (G, T, K), and y, (G, T, O). weights: (T,); default: all 1."""
        count: float | Tensor
        if weights is None:
            count, x_sum, y_sum = float(x.shape[1]), x.sum(1), y.sum(1)
        else:
            root = weights.sqrt()[:, None]
            count, x_sum, y_sum = weights.double().sum(), weights @ x, weights @ y
            x, y = root * x, root * y
        sums = (x_sum, y_sum, gram_matrix(x.mT), y.mT @ x, y.square().sum(1))
        return Moments(x.shape[1], count, *(value.double() for value in sums))

    def __add__(self, other: "Moments") -> "Moments":
        return Moments(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    def about(self, x: Tensor, y: Tensor) -> "Moments":
        """Return the moments about another origin, (G, K) and (G, O), given relative to the current one."""
        return Moments(
            self.rows,
            self.count,
            self.x - self.count * x,
            self.y - self.count * y,
            self.xx - _outer(self.x, x) - _outer(x, self.x) + self.count * _outer(x, x),
            self.yx - _outer(self.y, x) - _outer(y, self.x) + self.count * _outer(y, x),
            self.yy - 2 * self.y * y + self.count * y * y,
        )

    def means(self) -> tuple[Tensor, Tensor]:
        return self.x / self.count, self.y / self.count

    def error(self, weight: Tensor) -> Tensor:
        """Return the sum of |y - W x|^2 over the rows, per output: (G, O). weight: (G, O, K)."""
        return torch.sub(self.yy, (weight * self.yx).sum(2), alpha=2) + ((weight @ self.xx) * weight).sum(2)


def correct(
    program: Program,
    images: Sequence[Tensor],
    assigned: Assigned,
    choices: Correction,
    weights: Mapping[str, Tensor] | None = None,
    *,
    memory: int | None = None,
    partial: Partial | None = None,
    progress: Progress | None = None,
) -> list[tuple[SiteGroup, Assignment]]:
    """Return the assignments with corrected codes, scales and biases for every quantized weight.

    Some sites keep their assignments: those of attention, float weights, weights with more than 8,192 inputs, and
    layers that are called in several pieces of the program, because the inputs of a later call depend on the weight.
    weights: the result of `row_weights` on images of the same size, or None if all rows count alike. memory: bytes for
    the values of both networks; the moments of one site come on top. partial: finished sites are read from it, and new
    ones are added. Raises CalibrationError if the products of a site's inputs or outputs overflow or vanish.
    """
    current = list(assigned)
    cache: RewriteCache = {}
    before = rewrite(program, assigned, cache)
    share = None if memory is None else memory // 2
    pieces = find_pieces(program)
    floats = Values(program, images, share, pieces)
    quantized = Values(before, images, share, pieces, like=floats)
    floats.batch = quantized.batch = min(floats.batch, quantized.batch)
    done = 0
    for piece in pieces:
        names = set(piece.nodes)
        inside = [index for index, (group, _) in enumerate(current) if group.first.node.name in names]
        ran = names | {node.name for node in floats.operations(piece).nodes}  # also earlier values that read no images
        indices = [index for index, (group, _) in enumerate(current) if not ran.isdisjoint(group.changes)]
        correctable = [index for index in inside if _can_be_corrected(program, *current[index], names)]
        groups = [current[index][0] for index in correctable]
        streams = [_stream(program, group) if choices.target == "stream" else None for group in groups]
        stream_names = [name for stream in streams for name in stream or ()]
        values = [name for group in groups for name in (*group.read, *group.nodes)]
        floats.separable([*values, *stream_names], piece.value_in)  # all at once
        for index, stream in zip(correctable, streams, strict=True):
            group, assignment = current[index]
            key = f"correction of {group.name}"
            result = None if partial is None else partial.get(key, images[0].device)
            if result is None:
                within = rewrite(program, [current[number] for number in indices], cache)
                moments = _collect_moments(floats, quantized, piece.value_in, group, within, weights or {}, stream)
                result = _refit(program, group, assignment, moments, choices)
                if partial is not None:
                    partial.add(key, result)
            current[index] = (group, result)
        if correctable:
            quantized.change(rewrite(program, current, cache), piece.value_in)
        done += len(inside)
        if progress is not None and inside:
            progress(done, len(current), f"{current[inside[-1]][0].name} corrected")
    if choices.robust:
        outcomes = output_errors(program, floats, [before, rewrite(program, current, cache)])
        own, corrected_errors = (sum(errors.values()) for errors in outcomes)
        if corrected_errors > own:
            return list(assigned)
    return current


def _can_be_corrected(program: Program, group: SiteGroup, assignment: Assignment, names: set[str]) -> bool:
    """Return True for a group with quantized weights that is called in this piece alone. names: the piece's nodes."""
    if assignment.right is None or group.first.role not in ("linear", "conv"):
        return False
    return program.tensors[group.first.right][0].numel() <= _INPUTS and names.issuperset(group.nodes)


@dataclass(frozen=True)
class _GroupMoments:
    """The moments of a group's rows about an origin, (G, K) and (G, O), for the fitted and for the held-out images."""

    fit: Moments
    held: Moments | None
    origin: tuple[Tensor, Tensor]


def _stream(program: Program, group: SiteGroup) -> tuple[str, str] | None:
    """Return the name of the sum that adds a group's output to a stream, and the stream's name; None if not added."""
    output, readers = group.first.node.name, program.consumers()
    users = readers.get(output, [])
    if len(group.nodes) > 1 or len(users) != 1 or users[0].op != "aten.add.Tensor" or users[0].kwargs:
        return None
    before = [name for name in users[0].refs() if name != output and name not in program.tensors]
    return (users[0].name, before[0]) if len(before) == 1 else None


def _collect_moments(
    floats: Values,
    quantized: Values,
    start: str,
    group: SiteGroup,
    program: Program,
    weights: Mapping[str, Tensor],
    stream: tuple[str, str] | None = None,
) -> _GroupMoments:
    """Collect the moments of a group's inputs in the quantized network and of its targets.

    The moments cover all images, or the first batches that have enough rows. Every fourth image is held out, unless
    there are few images or they cannot be separated. stream: the result of `_stream`.
    """
    nodes = {node.name: node for node in program.nodes}
    outputs = [[site.node.name for site in call] for call in group.calls]
    reads = [nodes[names[0]].args[0].name for names in outputs]
    stream_names = [] if stream is None else list(stream)
    apart = floats.separable([*group.read, *group.nodes, *stream_names], start)
    axes = [floats.axes.get(name) if apart and floats.count > _HELD_OUT else None for name in group.read]
    target_batches = floats.batches([*group.nodes, *stream_names[:1]], start, apart=apart)
    input_batches = quantized.batches([*dict.fromkeys(reads), *stream_names[1:]], start, program, apart=apart)
    sums: list[Moments | None] = [None, None]
    origin: tuple[Tensor, Tensor] | None = None
    first_image = 0  # the index of the batch's first image
    for target_values, input_values in zip(target_batches, input_batches, strict=True):
        for source, names, axis in zip(reads, outputs, axes, strict=True):
            dim, entries = (0, 1) if axis is None else axis
            first, values = first_image * entries, [target_values[name] for name in names]
            if stream is not None and target_values[stream[0]].shape == values[0].shape:
                values = [target_values[stream[0]] - input_values[stream[1]]]
            for inputs, targets in _pieces(group, input_values[source], values, program):
                x, y = rows_of(group, inputs, targets, program)
                x, y = (value.to(torch.promote_types(value.dtype, torch.float32)) for value in (x, y))
                if origin is None:
                    origin = x.mean(1), y.mean(1)
                weight = _weights_of_rows([weights.get(name) for name in names], inputs, axis, first, x.shape[1])
                held_out = _held_out_mask(group, inputs, axis, first, x.shape[1])
                first += inputs.shape[dim]  # a piece of a convolution's batch may start or end within an image
                x, y = x - origin[0][:, None], y - origin[1][:, None]
                for index, mask in enumerate((~held_out, held_out)):
                    places = mask.nonzero()[:, 0].to(x.device, non_blocking=True)
                    if len(places):
                        part_weights = None if weight is None else weight[places].to(x.dtype)
                        part, before = Moments.of(x[:, places], y[:, places], part_weights), sums[index]
                        sums[index] = part if before is None else before + part
        first_image = first // entries
        if sum(part.rows for part in sums if part is not None) >= _ROWS:
            break
    fit, rest = sums  # the first image is never held out
    assert origin is not None
    assert fit is not None
    return _GroupMoments(fit, rest, (origin[0].double(), origin[1].double()))


def _held_out_mask(group: SiteGroup, inputs: Tensor, axis: tuple[int, int] | None, first: int, rows: int) -> Tensor:
    """Return a mask of the rows that belong to every fourth image: (rows,), on the CPU, so that reading it is free.

    axis: the image axis and the number of entries per image. first: the index of the first entry.
    """
    if axis is None:
        return torch.zeros(rows, dtype=torch.bool)
    dim, entries = axis
    numbers = (first + torch.arange(inputs.shape[dim])) // entries
    held_out = numbers % _HELD_OUT == _HELD_OUT - 1
    if group.first.role == "conv":
        return held_out.repeat_interleave(rows // len(held_out))
    shape = [len(held_out) if index == dim else 1 for index in range(inputs.ndim - 1)]
    return held_out.reshape(shape).expand(inputs.shape[:-1]).flatten()


def _weights_of_rows(
    weights: Sequence[Tensor | None], inputs: Tensor, axis: tuple[int, int] | None, first: int, rows: int
) -> Tensor | None:
    """Return the weight of each row, (rows,), or None if all rows count alike.

    weights: those of the group's outputs, whose weight of a position is the same for all images. axis, first: as in
    `_held_out_mask`; without an axis, images cannot be told apart, or none is held out.
    """
    present = [weight for weight in weights if weight is not None]
    if axis is None or not present:
        return None
    dim, entries = axis
    places = (first + torch.arange(inputs.shape[dim], device=inputs.device)) % entries
    mean = torch.stack([weight.index_select(dim, places) for weight in present]).mean(0).flatten()
    return mean if len(mean) == rows else None  # images of another size have other positions


def _pieces(
    group: SiteGroup, x: Tensor, outputs: Sequence[Tensor], program: Program
) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Yield the inputs and outputs of a batch, in pieces so that a convolution's patches take little memory."""
    if group.first.role == "linear":
        yield x, list(outputs)
        return
    taps = math.prod(_kernel(group, program))
    size = max(1, _PATCHES // max(1, taps * x[0].numel() * x.element_size()))
    for start in range(0, len(x), size):
        part = x[start : start + size]
        yield part, [value[start : start + size] for value in outputs]


def rows_of(group: SiteGroup, x: Tensor, outputs: Sequence[Tensor], program: Program) -> tuple[Tensor, Tensor]:
    """Return the inputs and outputs of a group's sites as the rows of a product: (G, T, K) and (G, T, O)."""
    node = group.first.node
    if group.first.role == "linear":
        return x.flatten(0, -2)[None], torch.cat([value.flatten(0, -2) for value in outputs], dim=-1)[None]
    stride, padding, dilation, groups = conv_geometry(node)
    split = x.unflatten(1, (groups, -1))
    rows = [patches(image, _kernel(group, program), stride, padding, dilation) for image in split]
    targets = outputs[0].unflatten(1, (groups, -1)).flatten(3).permute(1, 0, 3, 2)
    return torch.stack(rows, dim=1).flatten(1, 2), targets.flatten(1, 2)


def _kernel(group: SiteGroup, program: Program) -> tuple[int, ...]:
    """Return the height and width of a convolution's kernel. program: the float program or a rewritten one."""
    (node,) = (node for node in program.nodes if node.name == group.first.node.name)
    return tuple(program.tensors[node.args[1].name].shape[2:])


def _refit(
    program: Program, group: SiteGroup, assignment: Assignment, moments: _GroupMoments, choices: Correction
) -> Assignment:
    """Return the group's assignment with codes, scales and bias fitted to the observed moments.

    Once the ridge strength is chosen, the held-out images are fitted as well.
    """
    right = assignment.right
    weight = torch.cat([program.tensors[site.right].flatten(1) for site in group.sites])
    if assignment.fold is not None:
        weight = assignment.fold.weight(weight)
    assert right is not None
    right = with_codes(right, weight)
    groups, held = len(moments.fit.x), moments.held
    total = moments.fit if held is None else moments.fit + held
    means = total.means()
    centred, mean_x, mean_y = total.about(*means), means[0] + moments.origin[0], means[1] + moments.origin[1]
    start = weight.double().reshape(groups, -1, weight.shape[1])
    enough = total.rows >= start.shape[2] or not choices.robust
    fits, compensates = choices.ridge and enough, choices.compensate and enough
    floor = ROUNDING * total.count * mean_x.square().mean(1)
    try:
        ridge = _RIDGE if fits else math.inf
        if fits and held is not None:
            ridge = float(choose_ridge(moments.fit, held, start) * moments.fit.count / total.count)
        target = start.lerp(_target(centred, start, ridge, floor), choices.coefficient)
        damping = max(_DAMPING, _ALIKE * start.shape[2] / total.rows) if choices.robust else _DAMPING
        if compensates:
            form, _ = _form(centred, damping if math.isinf(ridge) else max(ridge, damping), floor)
    except torch.linalg.LinAlgError as cause:  # type: ignore[attr-defined]
        raise CalibrationError(
            f"{group.name} cannot be corrected, because products of its inputs or outputs overflow or "
            f"vanish ({one_line(cause)}): pin this site to 32 bits to keep it in float"
        ) from cause
    levels = right.quantizer.map(lambda value: value.double().reshape(groups, -1, 1).expand(*start.shape[:2], 1))
    if compensates:
        codes, levels = round_codes(target, form, levels)
    elif choices.ridge or choices.compensate:
        codes = levels.quantize(target)
    else:
        codes = right.codes.double().reshape(start.shape)
    if choices.robust and (choices.ridge or choices.compensate):
        levels = levels.rescale(_gain(centred, target, mean_y))
    shape, dtype = right.codes.shape, right.quantizer.scale.dtype
    stored = QuantizedTensor(
        codes.to(torch.uint8).reshape(shape), levels.map(lambda value: value.to(dtype).reshape(*shape[:-1], 1))
    )
    fitted = stored.dequantize().double().reshape(start.shape)
    own = exact_bias(program, group, assignment).double().reshape(mean_y.shape) + (start @ mean_x[..., None])[..., 0]
    bias = (own.lerp(mean_y, choices.coefficient) - (fitted @ mean_x[..., None])[..., 0]).flatten()
    gap = mean_y - (fitted @ mean_x[..., None])[..., 0] - bias.reshape(mean_y.shape)
    spread, whole = centred.yy.sum(), total.count * mean_y.square().sum()
    signal = torch.where(spread > ROUNDING * whole, spread, whole)  # equal rows, or a single one, have no spread
    power, noise = torch.stack([signal, (centred.error(fitted) + total.count * gap.square()).sum()]).tolist()
    return replace(assignment, right=stored, bias=bias.to(weight.dtype), sqnr=decibels(power, noise))


def _gain(moments: Moments, weight: Tensor, mean_y: Tensor) -> Tensor:
    """Return the factor with which the outputs of a weight, (G, O, K), have the power of the targets about their mean.

    One factor for all outputs: a class token can have nearly all the weight of the rows, and then few rows decide.
    """
    power, target_power = ((weight @ moments.xx) * weight).sum(), moments.yy.sum()
    least = ROUNDING * moments.count * mean_y.square().sum()
    varies = (power > least) & (target_power > least)  # not so for constant outputs, or a single row
    return torch.where(varies, (target_power / power).sqrt().clamp(*_GAINS), 1.0)


def bias_of(node: Node, program: Program) -> Tensor:
    """Return the bias of a linear or convolution, (O,); zeros if it has none."""
    bias = node.args[2] if len(node.args) > 2 else None
    weight = program.tensors[node.args[1].name]
    return weight.new_zeros(len(weight)) if bias is None else program.tensors[bias.name].expand(len(weight))


def with_codes(right: Quantizer | QuantizedTensor, weight: Tensor) -> QuantizedTensor:
    """Return the codes of a weight, (O, K), folded if its norm is: the nearest ones if it has only a quantizer.

    They have the shape that a search used: (G, O / G, K) if the scales are (G, O / G, 1).
    """
    if isinstance(right, QuantizedTensor):
        return right
    lead = right.scale.shape[:-1]
    return QuantizedTensor.nearest(weight.reshape(*lead, -1) if math.prod(lead) == len(weight) else weight, right)


def choose_ridge(fit: Moments, held: Moments, start: Tensor) -> float:
    """Return the ridge strength, a fraction of the mean variance, with the least error on the held-out rows."""
    origin = fit.means()
    inside, outside = fit.about(*origin), held.about(*origin)
    # All solutions are held at once where the number of operations decides how long this takes.
    together = len(_RIDGES) - 1 if waits_for_launches(start.device) else 1
    parts = [
        _errors(inside, outside, start, _RIDGES[at : at + together]) for at in range(0, len(_RIDGES) - 1, together)
    ]
    errors, failures = (torch.cat(values) for values in zip(*parts, strict=True))
    last = outside.error(start).sum()[None]  # that of the infinite ridge
    values = torch.cat([errors, last, failures]).tolist()  # to wait for the device only here
    candidate_errors, flags = values[: len(_RIDGES)], values[len(_RIDGES) :]
    for index, failed in enumerate(flags):
        if failed:
            candidate_errors[index] = float(outside.error(_target(inside, start, _RIDGES[index])).sum())
    return min(zip(_RIDGES, candidate_errors, strict=True), key=lambda pair: pair[1])[0]


def _errors(inside: Moments, outside: Moments, start: Tensor, ridges: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Return the error outside for each of these ridge strengths, and a flag other than 0 if no factor was found."""
    variance = _variance(inside)
    strengths = torch.stack([ridge * variance for ridge in ridges])  # (ridges, G, 1)
    targets = torch.addcmul(inside.yx, start, strengths[..., None]).mT  # (ridges, G, K, O)
    solutions, failures = [], []
    for strength, values in zip(strengths.unbind(), targets.unbind(), strict=True):
        root, failed = torch.linalg.cholesky_ex(_with_ridge(inside, strength))
        solutions.append(torch.cholesky_solve(values, root))
        failures.append(failed)
    weights = torch.stack(solutions, 1).mT  # (G, ridges, O, K)
    along = (weights * outside.yx[:, None]).sum((0, 2, 3))
    rows = weights.flatten(1, 2)
    power = (rows @ outside.xx).mul_(rows).view(weights.shape).sum((0, 2, 3))
    return outside.yy.sum() - 2 * along + power, torch.stack(failures).amax(1)


def _target(moments: Moments, start: Tensor, ridge: float, floor: Tensor | float = 0.0) -> Tensor:
    """Return the weight, (G, O, K), that minimises the error with this ridge strength. floor: as in `_form`."""
    if math.isinf(ridge):
        return start
    form, root = _form(moments, ridge, floor)
    increase = form.diagonal(dim1=1, dim2=2) - moments.xx.diagonal(dim1=1, dim2=2)
    return torch.cholesky_solve((moments.yx + start * increase[:, None]).mT, root).mT


def _form(moments: Moments, ridge: float, floor: Tensor | float = 0.0) -> tuple[Tensor, Tensor]:
    """Return the positive definite quadratic form of the error with this ridge strength, and its Cholesky factor.

    Both are (G, K, K). floor: (G,), the variance below which inputs are constant except for rounding noise.
    """
    strength = ridge * _variance(moments, floor)
    form = _with_ridge(moments, strength)
    root, failed = torch.linalg.cholesky_ex(form)
    if failed.any():  # a few channels are so large that float32 sums err by more than `strength`
        largest = moments.xx.diagonal(dim1=1, dim2=2).amax(dim=1)[:, None]
        form = _with_ridge(moments, torch.maximum(strength, largest * (_OF_SUMS * form.shape[1])))
        root = torch.linalg.cholesky(form)
    return form, root


def _variance(moments: Moments, floor: Tensor | float = 0.0) -> Tensor:
    """Return the mean variance of the inputs of each group, (G, 1), or 1 if it is 0. floor: as in `_form`."""
    variance = moments.xx.diagonal(dim1=1, dim2=2).mean(dim=1).clamp(min=floor)
    return torch.where(variance > 0, variance, 1.0)[:, None]


def _with_ridge(moments: Moments, ridge: Tensor) -> Tensor:
    """Return the inputs' products, (G, K, K), with these numbers, (G, 1), added to the squares."""
    form = moments.xx.clone()
    form.diagonal(dim1=1, dim2=2).add_(ridge)
    return form


def round_codes(target: Tensor, form: Tensor, levels: Quantizer) -> tuple[Tensor, Quantizer]:
    """Choose codes and scales with a small error: the sum of e A e^T over the rows e of target minus dequantized codes.

    target: (G, O, K), as the codes. form: A, (G, K, K), positive definite. levels: the initial quantizer, (G, O, 1);
    its zero points stay.
    """
    codes = _in_turn(target, form, levels)
    for _ in range(_SWEEPS):
        before = codes
        levels = _least_squares(target, form, codes, levels)
        codes = _swept(target, form, codes, levels)
        # After that, sweeps change nothing. Other devices do all of them, because reading a comparison would wait.
        if not waits_for_launches(codes.device) and torch.equal(codes, before):
            break
    return codes, _least_squares(target, form, codes, levels)


def _in_turn(target: Tensor, form: Tensor, levels: Quantizer) -> Tensor:
    """Choose codes column by column, the most important first; each passes its error on to later columns."""
    order = form.diagonal(dim1=1, dim2=2).argsort(dim=1, descending=True, stable=True)
    sorted_form = form.gather(1, order[:, :, None].expand_as(form)).gather(2, order[:, None].expand_as(form))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(sorted_form))
    factor = torch.linalg.cholesky(inverse).mT  # upper triangular: inverse = factor^T factor
    places, levels = order[:, :, None].expand_as(target.mT), levels.map(lambda value: value.mT.contiguous())
    codes = _by_rows(target.mT.gather(1, places), factor, levels)
    return torch.empty_like(codes).scatter_(1, places, codes).mT.contiguous()


def _swept(target: Tensor, form: Tensor, codes: Tensor, levels: Quantizer) -> Tensor:
    """Replace each code in turn by the best one given all other codes."""
    levels = levels.map(lambda value: value.mT.contiguous())
    values = levels.dequantize(codes.mT.clone(memory_format=torch.contiguous_format))
    return _by_rows(form @ (target.mT - values), form, levels, values).mT.contiguous()


def _by_rows(left: Tensor, form: Tensor, levels: Quantizer, base: Tensor | None = None) -> Tensor:
    """Return codes for each row of `left`, (G, K, O), chosen in turn; each updates the rows after it in place.

    What a row moves (see `codes_in_turn`), times its row of the form, (G, K, K), is subtracted from the rows after it:
    at once within the same block of rows, and elsewhere by one product per block. levels: with parameters (G, 1, O).
    base: (G, K, O), the current levels, or None if there are none yet.
    """
    codes = torch.empty_like(left)
    for start in range(0, left.shape[1], _BLOCK):
        rows = range(start, min(start + _BLOCK, left.shape[1]))
        moved = None
        if isinstance(levels, UniformQuantizer):
            moved = codes_in_turn(left, form, base, (levels.scale, levels.zero_point), levels.bits, rows, codes)
        if moved is None:
            moved = _row_by_row(left, form, base, levels, rows, codes)
        if rows.stop < left.shape[1]:
            left[:, rows.stop :].sub_(form[:, start : rows.stop, rows.stop :].mT @ moved)
    return codes


def _row_by_row(
    left: Tensor, form: Tensor, base: Tensor | None, levels: Quantizer, rows: range, codes: Tensor
) -> Tensor:
    """Do the same as `codes_in_turn` for any quantizer; the rows of `left` change."""
    moved = torch.empty_like(left[:, rows.start : rows.stop])
    for index, row in enumerate(rows):
        column, own = slice(row, row + 1), form[:, row, row, None, None]
        value = left[:, column] if base is None else base[:, column] + left[:, column] / own
        codes[:, column] = code = levels.quantize(value)
        level = levels.dequantize(code)
        moved[:, index] = change = ((value - level) / own if base is None else level - base[:, column])[:, 0]
        left[:, row + 1 : rows.stop].sub_(form[:, row, row + 1 : rows.stop, None] * change[:, None])
    return moved


def _least_squares(target: Tensor, form: Tensor, codes: Tensor, levels: Quantizer) -> Quantizer:
    """Return the quantizer with least-squares scales for these codes; a scale stays if it would not be positive."""
    units = levels.integer(codes).to(target.dtype)
    products = units @ form
    scale = (products * target).sum(2, keepdim=True) / (products * units).sum(2, keepdim=True)
    return replace(levels, scale=torch.where(scale > 0, scale, levels.scale))  # type: ignore[type-var]


def _outer(left: Tensor, right: Tensor) -> Tensor:
    return left[:, :, None] * right[:, None]
