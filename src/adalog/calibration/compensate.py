"""Correction in closed form: weights and biases that make up for what quantization has done so far, site by site.

Sites are taken in order of execution. Each is fitted to its output in the float network, from the quantized inputs that
it really gets once everything before it is quantized and corrected. With centred inputs x and wanted outputs y over all
rows of the images, the weight W is to minimise

    sum |y - W x|^2 + ridge |W - W_0|^2,

where W_0 is the float weight, and the bias takes what the means leave. Without codes the solution is that of the normal
equations; its codes are chosen one column after another, each of which hands its error to those that follow (GPTQ,
Frantar et al., ICLR 2023; with wanted outputs that are the float network's, as in GPTAQ, Li et al., ICML 2025), and
then one at a time as long as the error falls. Only second moments of the rows are held.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from adalog.calibration.blocks import Blocks
from adalog.calibration.schedule import Progress
from adalog.choices import Correction
from adalog.graph.convolution import conv_geometry, patches
from adalog.graph.program import Program
from adalog.graph.rewrite import Assigned, SiteGroup, rewritten
from adalog.graph.sites import find_blocks
from adalog.quantizers import Assignment, QuantizedTensor, UniformQuantizer

# Every n-th image is held out of a fit to choose the strength of its ridge, and of four images or fewer none is.
_HELD_OUT = 4
# Strengths of the ridge that are tried, as shares of the inputs' mean variance; the weight stays as it is by the last.
_RIDGES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, math.inf)
# Where the weight itself is not fitted, this share of the mean variance keeps the inputs' moments definite.
_DAMPING = 1e-2
# How often all codes are gone through once more, at most.
_SWEEPS = 4


@dataclass(frozen=True)
class Moments:
    """Sums over rows of products of inputs x and wanted outputs y, both less an origin: by group of a convolution.

    x: (G, K), y: (G, O), xx: (G, K, K), yx: (G, O, K), yy: (G, O), in float64; G is 1 for a linear.
    """

    count: int
    x: Tensor
    y: Tensor
    xx: Tensor
    yx: Tensor
    yy: Tensor

    @staticmethod
    def of(x: Tensor, y: Tensor) -> "Moments":
        """x: (G, T, K), y: (G, T, O)."""
        turned = y.transpose(1, 2)
        found = (x.sum(1), y.sum(1), x.transpose(1, 2) @ x, turned @ x, y.square().sum(1))
        return Moments(x.shape[1], *(value.double() for value in found))

    def __add__(self, other: "Moments") -> "Moments":
        return Moments(
            self.count + other.count,
            self.x + other.x,
            self.y + other.y,
            self.xx + other.xx,
            self.yx + other.yx,
            self.yy + other.yy,
        )

    def about(self, x: Tensor, y: Tensor) -> "Moments":
        """The moments about another origin, (G, K) and (G, O)."""
        return Moments(
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
        """The sum of |y - W x|^2 over the rows, by output: (G, O). weight: (G, O, K)."""
        return self.yy - 2 * (weight * self.yx).sum(2) + ((weight @ self.xx) * weight).sum(2)


def corrected(
    program: Program,
    images: Sequence[Tensor],
    assigned: Assigned,
    choices: Correction,
    memory: int | None = None,
    progress: Progress | None = None,
) -> list[tuple[SiteGroup, Assignment]]:
    """The assignments with other codes, scales and biases for every weight that has codes.

    Sites of attention, and weights that stay float, keep what they have. memory: bytes for the values that are held at
    a time, those of both networks together; the moments of one site come on top.
    """
    current = list(assigned)
    share = None if memory is None else memory // 2
    blocks = find_blocks(program)
    floats = Blocks(program, images, blocks, share)
    quantized = Blocks(rewritten(program, current), images, blocks, share)
    floats.batch = quantized.batch = min(floats.batch, quantized.batch)
    done = 0
    for number, block in enumerate(blocks):
        names = set(block.nodes)
        for index, (group, assignment) in enumerate(current):
            if group.first.node.name not in names:
                continue
            if assignment.right is not None and group.first.role in ("linear", "conv"):
                whole = rewritten(program, current)
                fit, held = _moments(floats, quantized, number, group, whole)
                current[index] = group, _refitted(program, group, assignment, fit, held, choices)
            done += 1
            if progress is not None:
                progress(done, len(current), f"{group.name} corrected")
        quantized.change(number, rewritten(program, current))
    return current


def _moments(
    floats: Blocks, quantized: Blocks, number: int, group: SiteGroup, program: Program
) -> tuple[Moments, Moments | None]:
    """The moments of a group's rows: of the images that are fitted, and of those held out."""
    nodes = {node.name: node for node in program.nodes}
    read = nodes[group.first.node.name].args[0].name
    outputs = [site.node.name for site in group.sites]
    origin: tuple[Tensor, Tensor] | None = None
    sums: list[Moments | None] = [None, None]
    first = 0
    total = floats.count
    for wanted, given in _paired(floats, quantized, number, outputs, read, program):
        x, y = rows_of(group, given, wanted, program)
        if origin is None:
            origin = x.mean(1), y.mean(1)
        x, y = x - origin[0][:, None], y - origin[1][:, None]
        images = min(quantized.batch, total - first)
        numbers = torch.arange(first, first + images, device=x.device)
        held = (numbers % _HELD_OUT == _HELD_OUT - 1).repeat_interleave(x.shape[1] // images)
        for index, chosen in enumerate((~held, held) if total > _HELD_OUT else (held | True,)):
            if bool(chosen.any()):
                part, before = Moments.of(x[:, chosen], y[:, chosen]), sums[index]
                sums[index] = part if before is None else before + part
        first += images
    assert origin is not None
    assert sums[0] is not None
    back = tuple(-value.double() for value in origin)
    return sums[0].about(*back), None if sums[1] is None else sums[1].about(*back)


def _paired(
    floats: Blocks, quantized: Blocks, number: int, outputs: Sequence[str], read: str, program: Program
) -> Iterator[tuple[list[Tensor], Tensor]]:
    """What a group's sites put out in the float network and read in the quantized one, by batches of images."""
    apart = floats.keeps_apart(number, outputs) and quantized.keeps_apart(number, [read], program)
    wanted = floats.streamed(number, outputs, apart=apart)
    given = quantized.streamed(number, [read], program, apart=apart)
    for one, other in zip(wanted, given, strict=True):
        yield [one[name] for name in outputs], other[read]


def rows_of(group: SiteGroup, x: Tensor, outputs: Sequence[Tensor], program: Program) -> tuple[Tensor, Tensor]:
    """Inputs and outputs of a group's sites as the rows of a product: (G, T, K) and (G, T, O)."""
    node = group.first.node
    if group.first.role == "linear":
        return x.flatten(0, -2)[None], torch.cat([value.flatten(0, -2) for value in outputs], dim=-1)[None]
    stride, padding, dilation, groups = conv_geometry(node)
    kernel = program.tensors[group.first.right].shape[2:]
    split = x.unflatten(1, (groups, -1))
    seen = [patches(image, tuple(kernel), stride, padding, dilation) for image in split]
    wanted = outputs[0].unflatten(1, (groups, -1)).flatten(3).permute(1, 0, 3, 2)
    return torch.stack(seen, dim=1).flatten(1, 2), wanted.flatten(1, 2)


def _refitted(
    program: Program,
    group: SiteGroup,
    assignment: Assignment,
    fit: Moments,
    held: Moments | None,
    choices: Correction,
) -> Assignment:
    """The assignment of a group with the codes, scales and bias that fit these moments."""
    right = assignment.right
    weight = torch.cat([program.tensors[site.right].flatten(1) for site in group.sites])
    if assignment.fold is not None:
        weight = assignment.fold.weight(weight)
    if isinstance(right, UniformQuantizer):
        right = QuantizedTensor.nearest(weight.reshape(_shape(right, weight)), right)
    assert isinstance(right, QuantizedTensor)
    groups = len(fit.x)
    both = fit if held is None else fit + held
    mean_x, mean_y = both.means()
    whole = both.about(mean_x, mean_y)
    start = weight.double().reshape(groups, -1, weight.shape[1])
    ridge = math.inf if not choices.ridge else 1e-2 if held is None else chosen_ridge(fit, held, start)
    if held is not None:
        ridge *= fit.count / both.count
    moments, target = _target(whole, start, ridge)
    levels = right.quantizer.map(lambda value: value.double().reshape(groups, -1, 1).expand(*start.shape[:2], 1))
    if choices.compensate:
        codes, levels = rounded(target, moments, levels)
    elif choices.ridge:
        codes = levels.quantize(target)
    else:
        codes = right.codes.double().reshape(start.shape)
    found = levels.dequantize(codes)
    bias = (mean_y - (found @ mean_x[..., None])[..., 0]).flatten()
    noise, power = float(whole.error(found).sum()), float(whole.yy.sum())
    dtype, shape = weight.dtype, right.codes.shape
    scale = levels.map(lambda value: value.to(dtype).reshape(*shape[:-1], 1))
    stored = QuantizedTensor(codes.to(torch.uint8).reshape(shape), scale)
    sqnr = 10 * math.log10(power / noise) if noise > 0 and power > 0 else math.inf
    return replace(assignment, right=stored, bias=bias.to(dtype), sqnr=sqnr)


def _shape(quantizer: UniformQuantizer, weight: Tensor) -> tuple[int, ...]:
    """The shape in which a search saw a weight, (O, K): (G, O / G, K) if its scales are (G, O / G, 1)."""
    lead = quantizer.scale.shape[:-1]
    return (*lead, weight.shape[1]) if math.prod(lead) == len(weight) else tuple(weight.shape)


def chosen_ridge(fit: Moments, held: Moments, start: Tensor) -> float:
    """The strength of the ridge, as a share of the mean variance, whose solution is best on the rows held out."""
    origin = fit.means()
    inside, outside = fit.about(*origin), held.about(*origin)

    def error(ridge: float) -> float:
        return float(outside.error(_target(inside, start, ridge)[1]).sum())

    return min(_RIDGES, key=error)


def _target(moments: Moments, start: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """The quadratic form whose least value is wanted, (G, K, K), and the weight, (G, O, K), that has it."""
    variance = moments.xx.diagonal(dim1=1, dim2=2).mean(dim=1).clamp(min=torch.finfo(torch.float64).tiny)
    unit = torch.eye(start.shape[2], dtype=torch.float64, device=start.device)
    if math.isinf(ridge):
        return moments.xx + _DAMPING * variance[:, None, None] * unit, start
    added = ridge * variance[:, None, None]
    form = moments.xx + added * unit
    return form, torch.cholesky_solve((moments.yx + added * start).transpose(1, 2), torch.linalg.cholesky(form)).mT


def rounded(target: Tensor, form: Tensor, levels: UniformQuantizer) -> tuple[Tensor, UniformQuantizer]:
    """Codes (G, O, K), and scales, with a small error e A e^T, summed over rows e of target less what codes stand for.

    target: (G, O, K). form: A, (G, K, K), positive definite. levels: the quantizer to begin with, whose zero points
    stay; (G, O, 1).
    """
    codes = _in_turn(target, form, levels)
    for _ in range(_SWEEPS):
        before = codes
        levels = _least_squares(target, form, codes, levels)
        codes = _swept(target, form, codes, levels)
        if torch.equal(codes, before):
            break
    return codes, levels


def _in_turn(target: Tensor, form: Tensor, levels: UniformQuantizer) -> Tensor:
    """Codes chosen column by column, those that matter most first; each hands its error to the columns that follow."""
    order = form.diagonal(dim1=1, dim2=2).argsort(dim=1, descending=True)
    sorted_form = form.gather(1, order[:, :, None].expand_as(form)).gather(2, order[:, None].expand_as(form))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(sorted_form))
    factor = torch.linalg.cholesky(inverse).mT  # upper triangular: inverse = factor^T factor
    places = order[:, None].expand_as(target)
    left = target.gather(2, places)
    codes = torch.empty_like(left)
    for column in range(left.shape[2]):
        codes[..., column] = levels.quantize(left[..., column : column + 1])[..., 0]
        error = left[..., column] - levels.dequantize(codes[..., column : column + 1])[..., 0]
        error = error / factor[:, None, column, column]
        left[..., column + 1 :] -= error[..., None] * factor[:, None, column, column + 1 :]
    return torch.empty_like(codes).scatter_(2, places, codes)


def _swept(target: Tensor, form: Tensor, codes: Tensor, levels: UniformQuantizer) -> Tensor:
    """Codes, each in turn replaced by the one that is best beside all others."""
    codes = codes.clone()
    pull = (target - levels.dequantize(codes)) @ form
    diagonal = form.diagonal(dim1=1, dim2=2)
    for column in range(codes.shape[2]):
        now = levels.dequantize(codes[..., column : column + 1])
        best = levels.quantize(now + pull[..., column : column + 1] / diagonal[:, None, column : column + 1])
        moved = levels.dequantize(best) - now
        pull -= moved * form[:, column : column + 1]
        codes[..., column : column + 1] = best
    return codes


def _least_squares(target: Tensor, form: Tensor, codes: Tensor, levels: UniformQuantizer) -> UniformQuantizer:
    """The scales with the least error for these codes; a scale that would not be positive stays."""
    units = codes - levels.zero_point
    seen = units @ form
    scale = (seen * target).sum(2, keepdim=True) / (seen * units).sum(2, keepdim=True)
    return replace(levels, scale=torch.where(scale > 0, scale, levels.scale))


def _outer(left: Tensor, right: Tensor) -> Tensor:
    return left[:, :, None] * right[:, None]
