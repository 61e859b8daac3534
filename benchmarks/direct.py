"""Search as the released code does, with one whole product per candidate and step: the baseline of `search.py`.

This search is written from a description of the released code. It shares only formats, quantizers and result types with
adalog's search. It does the same work as the released code, as fast as possible. Each candidate quantizes its operand,
multiplies it by the other operand over all tokens of all images, and compares the product with the full-precision
output. The search derives no error from another error, leaves out no token, and rejects no candidate early. It
quantizes values in place and writes products to existing buffers, in tiles that fit in the cache.

With `fused`, the compiled kernels of adalog do the work around each product. One pass quantizes and subtracts the exact
values, and one pass adds up the squares. The products then have the error form (see `objective`); their number and
sizes stay the same. Logarithmic codes then come from a table over the leading bits of the values, as in adalog's
search. A value very near a threshold may therefore get the neighbouring code.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from adalog.baselines import ReleasedSearch, TwinFormat, TwinUniformQuantizer
from adalog.quantizers import (
    Assignment,
    LogFormat,
    LogQuantizer,
    Quantizer,
    UniformFormat,
    UniformQuantizer,
    log_levels,
)
from adalog.quantizers.fused import sums, uniform_errors
from adalog.search.operand import Operand
from adalog.search.product import Product

POINTS = 128  # candidates per step
TILE_ELEMENTS = 1 << 19  # approximate number of elements in a tile of an operand and its output together
LEAST_SCALE = 1e-4  # the least scale of an activation
RADIX = 37
QUANTILE_LIMIT = 1 << 24  # torch.quantile takes at most this many elements

Space = Callable[[Tensor], Quantizer]  # maps a point (P, *groups) to its quantizer


def quantize_into(quantizer: Quantizer, values: Tensor, out: Tensor) -> None:
    """Write exactly `quantizer.fake_quantize(values)` to a contiguous tensor of the same shape."""
    if isinstance(quantizer, UniformQuantizer):
        low = -quantizer.zero_point
        torch.div(values, quantizer.scale, out=out).round_()
        torch.maximum(out, low, out=out)
        torch.minimum(out, low + (2**quantizer.bits - 1), out=out).mul_(quantizer.scale)
    elif isinstance(quantizer, LogQuantizer) and quantizer.rounding == "log":
        levels = log_levels(quantizer.q, quantizer.r, quantizer.bits, beyond=quantizer.beyond, table=quantizer.table)
        levels = levels.float() * quantizer.scale - quantizer.offset
        torch.add(values, quantizer.offset, out=out).div_(quantizer.scale).clamp_(min=torch.finfo(torch.float32).tiny)
        out.log2_().mul_(-quantizer.r).div_(quantizer.q).round_().clamp_(0, len(levels) - 1)
        torch.index_select(levels, 0, out.int().view(-1), out=out.view(-1))
    else:
        out.copy_(quantizer.fake_quantize(values))


class Losses:
    """The squared error of operand @ other^T under quantizers of the operand; without `other`, the operand's own error.

    other, other_hat: (*batch, O, I), the other operand in full precision and quantized.
    fused: True if compiled kernels do the work around each product.
    evaluated: the number of candidates that were scored on the output so far.
    flops: the FLOPs of their products.
    """

    def __init__(
        self, operand: Operand, other: Tensor | None = None, other_hat: Tensor | None = None, *, fused: bool = False
    ):
        self.operand, self.own_dims, self.evaluated, self.flops = operand, operand.format.own_dims, 0, 0
        values = operand.values.contiguous()
        rows = values.ndim - 2
        columns = 0 if other is None else other.shape[-2]
        # Tiles split the images of an attention product, or the rows of an activation. If the rows of a weight have
        # parameters of their own, tiles split the columns of the output instead.
        along = 0 if values.ndim == 4 else rows
        on_other = along in self.own_dims
        whole = columns if on_other else values.shape[along]
        unit = values[..., 0].numel() // (1 if on_other else whole) * (1 if on_other else values.shape[-1] + columns)
        size = max(1, min(whole, TILE_ELEMENTS // unit))
        if other is None or other_hat is None:
            pieces = [values] if on_other else values.split(size, along)
            self.tiles = [(piece, None, torch.zeros_like(piece) if fused else piece) for piece in pieces]
        else:
            other, other_hat = other.contiguous(), other_hat.contiguous()
            # The exact output, or for the error form the output error of the other operand's quantizer alone.
            target = values @ (other_hat - other if fused else other).transpose(-1, -2)
            targets = target.split(size, -1 if on_other else along)
            lefts = [values] * len(targets) if on_other else values.split(size, along)
            hats = other_hat.split(size, along) if on_other or values.ndim == 4 else [other_hat] * len(targets)
            self.tiles = list(zip(lefts, hats, targets, strict=True))
        masks = None if operand.mask is None else operand.mask.bool().split(size, along)
        self.masks = masks or [None] * len(self.tiles)

        self.errors = [self._errors(values) for values, _, _ in self.tiles] if fused else None

    def __call__(self, quantizers: Sequence[Quantizer]) -> Tensor:
        """Return the losses of K quantizers: (K, *groups), float64."""
        losses: list[Tensor | float] = [0.0] * len(quantizers)
        for tile in range(len(self.tiles)):
            score = self._squares if self.errors is None else self._fused_squares
            for index, squares in enumerate(score(tile, quantizers)):
                losses[index] += squares
            values, other, target = self.tiles[tile]
            self.flops += 0 if other is None else 2 * len(quantizers) * target.numel() * values.shape[-1]
        self.evaluated += len(quantizers) if self.tiles[0][1] is not None else 0
        return torch.stack([torch.as_tensor(loss) for loss in losses])

    def _squares(self, tile: int, quantizers: Sequence[Quantizer]) -> Iterator[Tensor]:
        """Yield the squared error of one tile under each quantizer: (*groups), float64."""
        (values, other, target), mask = self.tiles[tile], self.masks[tile]
        hat, output = torch.empty_like(values), values.new_empty(target.shape)
        for quantizer in quantizers:
            quantize_into(quantizer, values, hat)
            if mask is not None:
                torch.where(mask, hat, values, out=hat)
            if other is None:
                torch.sub(hat, target, out=output)
            else:
                multiply(hat, other, output).sub_(target)
            squares = torch.linalg.vector_norm(output, dim=-1).double().square_()
            summed = [dim for dim in range(squares.ndim) if dim not in self.own_dims]
            yield squares.sum(summed) if summed else squares

    def _fused_squares(self, tile: int, quantizers: Sequence[Quantizer]) -> Iterator[Tensor]:
        """Yield the same as `_squares`, computed by compiled kernels."""
        assert self.errors is not None
        (values, other, base), mask = self.tiles[tile], self.masks[tile]
        output, chunk = values.new_empty(base.shape), max(1, 2 * TILE_ELEMENTS // values.numel())
        for first in range(0, len(quantizers), chunk):
            for error in self.errors[tile](quantizers[first : first + chunk]):
                if mask is not None:
                    error.mul_(mask)
                product = error if other is None else multiply(error, other, output)
                yield sums(product[None], base, None, self.own_dims)[0].double()

    def _errors(self, values: Tensor) -> Callable[[Sequence[Quantizer]], Tensor]:
        """Return a function from k quantizers to the errors that they add to these values, (k, *values.shape)."""
        form = self.operand.format
        shape = [values.shape[dim] for dim in self.own_dims]
        by_table = None
        if isinstance(form, LogFormat):  # candidates have the base (q, RADIX) or (q, r), see `Logarithmic`
            by_table = replace(form, q=0, r=RADIX if form.q else form.r, table=True).errors(values)

        def errors(quantizers: Sequence[Quantizer]) -> Tensor:
            if by_table is not None and all(isinstance(each, LogQuantizer) for each in quantizers):
                points = [torch.stack([torch.tensor(math.log2(each.q)), each.scale.view(())]) for each in quantizers]
                return by_table(torch.stack(points), torch.float32)
            if all(isinstance(each, UniformQuantizer) for each in quantizers):
                scale = torch.stack([each.scale.reshape(shape) for each in quantizers])
                zero_point = torch.stack([each.zero_point.reshape(shape) for each in quantizers])
                return uniform_errors(values, scale, zero_point, form.bits, self.own_dims, torch.float32)
            return torch.stack([each.fake_quantize(values) for each in quantizers]).sub_(values)

        return errors


def multiply(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """Write left (*batch, T, I) @ right (*batch, O, I)^T to `out`, and return it."""
    if left.ndim == 2:
        return torch.mm(left, right.t(), out=out)
    torch.bmm(left.flatten(0, -3), right.flatten(0, -3).transpose(1, 2), out=out.view(-1, *out.shape[-2:]))
    return out


def direct_search(search: ReleasedSearch, product: Product) -> Assignment:
    """Return the quantizers of a product; this can replace `ReleasedSearch.search_product`."""
    return Direct().search_product(product, search)


class Direct:
    """The search of the released code.

    fused: as in `Losses`.
    candidates: the number of candidates that were scored on the output so far.
    flops: the FLOPs of their products.
    """

    def __init__(self, *, fused: bool = False) -> None:
        self.fused, self.candidates, self.flops = fused, 0, 0

    def search_product(self, product: Product, search: ReleasedSearch) -> Assignment:
        """Return the quantizers of a product."""
        role, left, right, of_activations = product.role, product.left, product.right, product.of_activations
        half = 2 ** (right.format.bits - 1)
        steps = search.steps - 1 if search.progressive else 0
        seconds = Uniform(right, min(half, 64 if role == "conv" else 16), steps, LEAST_SCALE if of_activations else 0)
        firsts: Uniform | Logarithmic | Twin
        if isinstance(left.format, TwinFormat):
            firsts = Twin(left, left.format)
        elif isinstance(left.format, LogFormat):
            firsts = Logarithmic(left, left.format, search, scale_is_one=role == "av")
        else:
            firsts = Uniform(left, seconds.zero_points if of_activations else min(2**left.format.bits, 16), steps)
        activation_first = of_activations or not isinstance(firsts, Uniform)

        first: Quantizer | None = None if left.is_float else firsts.start(self._own(left, of_activations))
        second: Quantizer | None = None if right.is_float else seconds.start(self._own(right, of_activations))
        for _ in range(1 if left.is_float or right.is_float else search.rounds):
            for on_left in (activation_first, not activation_first):
                if on_left and first is not None:
                    losses = Losses(left, right.values, right.fake_quantize(second), fused=self.fused)
                    first = firsts.search(losses, first)
                elif not on_left and second is not None:
                    losses = Losses(right, left.values, left.fake_quantize(first), fused=self.fused)
                    second = seconds.search(losses, second)
                else:
                    continue
                self.candidates, self.flops = self.candidates + losses.evaluated, self.flops + losses.flops
        if isinstance(firsts, Logarithmic) and isinstance(first, LogQuantizer):
            first = firsts.at_its_base(first)
        return product.assign(first, second)

    def _own(self, operand: Operand, of_activations: bool) -> Losses | None:
        """Return the operand's own error, from which the search of a linear starts, or None."""
        starts = isinstance(operand.format, UniformFormat) and not of_activations
        return Losses(operand, fused=self.fused) if starts else None


def best(points: Tensor, losses: Tensor, count: int) -> Tensor:
    """Return the `count` points of least loss: (count, P, *groups).

    Among equal losses the last point wins, as it mostly does with `torch.topk`.
    """
    order = len(losses) - 1 - losses.flip(0).sort(dim=0, stable=True).indices[:count]
    return torch.take_along_dim(points, order.unsqueeze(1), dim=0)


def refine(
    losses: Losses, space: Space, points: Tensor, spacing: Tensor, steps: int, count: int, least: float
) -> Tensor:
    """Return the best point after `steps` steps; each step places new scales around the `count` best points.

    spacing: the distance between the scales of the first grid.
    """
    fan = POINTS // count
    offsets = torch.linspace(-0.5, 0.5, fan).view(1, fan, *(1 for _ in spacing.shape))
    for _ in range(steps):
        parents = best(points, losses([space(point) for point in points]), count)
        scales = (parents[:, None, 0] + offsets * spacing).clamp(min=least).flatten(0, 1)
        points = torch.stack([scales, parents[:, 1].repeat_interleave(fan, dim=0)], dim=1)
        spacing = spacing / (fan - 0.5)
    return best(points, losses([space(point) for point in points]), 1)[0]


@dataclass(frozen=True)
class Uniform:
    """Candidates for a uniform quantizer; a point is (scale, zero point)."""

    operand: Operand
    zero_points: int
    steps: int
    least: float = LEAST_SCALE

    def quantizer(self, point: Tensor) -> UniformQuantizer:
        scale, zero_point = (self.operand.reshape(part)[0] for part in point)
        return UniformQuantizer(scale, zero_point, self.operand.format.bits)

    def grid(self) -> tuple[Tensor, Tensor]:
        """Return the points of the first grid, and the distance between its scales.

        For zero points around the middle code, the scales cover ranges from the inner 80 % of the values to all values.
        """
        bits, groups = self.operand.format.bits, self.operand.groups()
        count = POINTS // self.zero_points
        pieces = 1
        while groups.numel() // pieces > QUANTILE_LIMIT and groups.shape[1] % (2 * pieces) == 0:
            pieces *= 2
        inner = groups.view(len(groups), pieces, -1).quantile(torch.tensor([0.1, 0.9]), dim=2).mean(2)
        narrow, wide = inner[1] - inner[0], groups.amax(1) - groups.amin(1)
        scales = (narrow + torch.arange(count).view(-1, 1) / (count - 1) * (wide - narrow)) / (2**bits - 1)
        scales = scales.clamp(min=max(self.least, torch.finfo(torch.float32).tiny))
        middle = 2 ** (bits - 1) - self.zero_points // 2
        zero_points = torch.arange(middle, middle + self.zero_points).repeat_interleave(count).to(scales)
        points = torch.stack(
            [scales.repeat(self.zero_points, 1), zero_points.view(-1, 1).expand(-1, len(groups))], dim=1
        )
        shape = [self.operand.values.shape[dim] for dim in self.operand.format.own_dims]
        return points.view(POINTS, 2, *shape), (scales[1] - scales[0]).view(shape)

    def start(self, own: Losses | None) -> UniformQuantizer:
        if own is not None:
            return self.search(own)
        return self.quantizer(self.grid()[0][POINTS - 2])

    def search(self, losses: Losses, current: Quantizer | None = None) -> UniformQuantizer:
        points, spacing = self.grid()
        return self.quantizer(refine(losses, self.quantizer, points, spacing, self.steps, 16, self.least))


@dataclass(frozen=True)
class Logarithmic:
    """Candidates for a logarithmic quantizer; a point is AdaLog's (scale, q). A fixed base uses the scale only."""

    operand: Operand
    form: LogFormat
    choices: ReleasedSearch
    scale_is_one: bool

    def quantizer(self, point: Tensor) -> LogQuantizer:
        form, (scale, q) = self.form, point
        radix = RADIX if form.q else form.r
        return LogQuantizer(scale, round(float(q)), radix, form.bits, form.beyond, form.rounding, offset=form.offset)

    def at_its_base(self, found: LogQuantizer) -> LogQuantizer:
        form = self.form
        return replace(found, q=form.q, r=form.r, table=form.table) if form.q else found

    def span(self) -> tuple[Tensor, Tensor]:
        """Return the range of scales: the 0.9 quantile and the maximum of the positive values, both plus the offset."""
        positive = self.operand.values[self.operand.values > 0].sort().values
        if not len(positive):
            positive = torch.ones(1)
        low, high = (positive[math.ceil(share * len(positive)) - 1] for share in (0.9, 1.0))
        return low + self.form.offset, high + self.form.offset

    def start(self, own: Losses | None) -> LogQuantizer:
        low, high = self.span()
        scale = torch.ones(()) if self.scale_is_one else low + (high - low) * (POINTS - 2) / (POINTS - 1)
        return self.quantizer(torch.stack([scale, torch.tensor(float(RADIX))]))

    def search(self, losses: Losses, current: Quantizer) -> LogQuantizer:
        assert isinstance(current, LogQuantizer)
        if self.scale_is_one and self.form.q:
            return self.at_its_base(current)
        q = torch.arange(self.form.q_min, self.form.q_max + 1).float()
        points = torch.stack([current.scale.expand(len(q)), q], dim=1)
        bases = best(points, losses([self.quantizer(point) for point in points]), 8)
        if self.scale_is_one:
            return self.quantizer(bases[0])
        count, bases = (16, bases) if self.choices.progressive else (POINTS, bases[:1])
        steps = self.choices.steps - 1 if self.choices.progressive else 0
        low, high = self.span()
        scales = low + (high - low) * torch.linspace(0, 1, count)
        points = torch.stack([scales.repeat(len(bases)), bases[:, 1].repeat_interleave(count)], dim=1)
        spacing = (high - low) / (count - 1)
        return self.quantizer(refine(losses, self.quantizer, points, spacing, steps, 32, LEAST_SCALE))


@dataclass(frozen=True)
class Twin:
    """Candidates for a twin quantizer; a point is (positive scale,), the negative scale times a power of two."""

    operand: Operand
    form: TwinFormat

    def quantizer(self, scale: Tensor) -> TwinUniformQuantizer:
        bits = self.form.bits
        return TwinUniformQuantizer(scale, torch.tensor(self.form.offset / 2 ** (bits - 1)), bits)

    def start(self, own: Losses | None) -> TwinUniformQuantizer:
        return self.quantizer(self.operand.values.abs().max() / (2 ** (self.operand.format.bits - 1) - 0.5))

    def search(self, losses: Losses, current: Quantizer) -> TwinUniformQuantizer:
        negative = self.form.offset / 2 ** (self.form.bits - 1)
        points = negative * torch.exp2(torch.arange(-5.0, 24.0))[:, None]
        return self.quantizer(best(points, losses([self.quantizer(point[0]) for point in points]), 1)[0, 0])
