"""Search uniform bounds, and logarithmic bases and scales, with rounds of Algorithm 1 (Sec. 3.4)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from adalog.choices import check_choice, check_flag, check_number, check_share, check_whole
from adalog.quantizers import Assignment, Fold, Quantizer, UniformFormat, UniformQuantizer, bounds_to_uniform
from adalog.quantizers.quantiles import coprime
from adalog.search import AnySearch, Needs
from adalog.search.distinct import once
from adalog.search.objective import OwnError, ProductError
from adalog.search.operand import Operand
from adalog.search.product import Product
from adalog.search.strategies import Loss, alternating, brute_force, first_least, fpcs, grid_spacing, rescale, walk

_LEAST_GAIN = 1e-3  # the rounds stop when one improves the loss by less than this fraction
_FAIR = 8  # times as many rows score the survivors as the steps
Strategy = Literal["fpcs", "alternating", "brute-force"]
FoldRanges = Literal["own", "deviations", "best"]
_RANGES: tuple[FoldRanges, ...] = ("own", "deviations")  # among equally good ones, the first wins
_COMPARED = 1024  # rows on which two kinds of quantizers are compared before a search


@dataclass(frozen=True)
class Search(AnySearch):
    """The search of AdaLog: Fast Progressive Combining Search (FPCS, Algorithm 1) and the rounds around it.

    "Sec." and "Algorithm" refer to the AdaLog paper (Wu et al., ECCV 2024). The defaults of `rounds`, `rough_rows`,
    `refit`, `reach` and `importance` were chosen by measurement: docs/benchmarks.

    Args:
        strategy: How the two hyperparameters of a quantizer are searched: "fpcs" (Algorithm 1), "alternating" (one
            after the other), or "brute-force" (the whole grid). With every strategy, FPCS finds the first point of a
            left operand, the ranges of a folded norm, and whether `compare_uniform` searches a uniform quantizer.
        init: Sizes of the grid of the first step. n = 128 points are from Sec. 4.1; the split into 16 x 8 is ours.
        parents: Number of points that a step refines, each by 8 neighbours. 16 parents give n evaluations per step.
        steps: Number of steps after the first grid, p in the paper. Default from Sec. 4.1; the released code uses 6.
        rounds: Number of times that each operand is searched. The released code uses 3.
        rough_rows: A step scores candidates on a sample of at least this many tokens, and the best candidates on eight
            times as many. 0 always uses all tokens.
        refit: Give each row of a weight the scale that fits its codes best, once the codes are found.
        reach: The lower bound of a uniform quantizer lies between the percentiles 0 and `reach`, the upper one between
            1 - `reach` and 1. The paper uses 0.1.
        fold_ranges: How to find the ranges of the channels of a folded norm. "own": each channel has its own range, by
            its own error (RepQ-ViT's reparameterization, Sec. 4.1). "deviations": all channels have the same range
            in standard deviations around their mean. "best": for each norm, the kind with the smaller error of the
            linears' outputs on images that did not choose the ranges.
        importance: Rows (tokens) count by their squared gradient to this power, so that errors count where the model's
            output depends on them. 0 counts all rows alike, as in the paper.
        compare_uniform: After GELU, search a uniform quantizer too if one is closer to the values than the logarithmic
            quantizer that was found, and keep the one with the smaller error of the output. If False, activations after
            GELU get the quantizer `post_gelu`, as in the paper, unless a grouped convolution follows.

    Raises:
        ValueError: If a field has an invalid value.

    Examples:
        >>> config = adalog.Config(search=adalog.Search(steps=2))  # a shorter search
    """

    kind: ClassVar[str] = "bounds"
    finds_bases: ClassVar[bool] = True
    strategy: Strategy = "fpcs"
    init: tuple[int, int] = (16, 8)
    parents: int = 16
    steps: int = 4
    rounds: int = 1
    rough_rows: int = 256
    refit: bool = True
    reach: float = 0.4
    fold_ranges: FoldRanges = "best"
    importance: float = 0.5
    compare_uniform: bool = True

    def __post_init__(self) -> None:
        check_choice("strategy", self.strategy, Strategy)
        check_choice("fold_ranges", self.fold_ranges, FoldRanges)
        for name, least in (("parents", 1), ("steps", 0), ("rounds", 1), ("rough_rows", 0)):
            check_whole(name, getattr(self, name), least)
        for name in ("refit", "compare_uniform"):
            check_flag(name, getattr(self, name))
        check_share("importance", self.importance)
        check_number("reach", self.reach, 0, 0.5)
        if not isinstance(self.init, tuple) or len(self.init) != 2:
            raise ValueError(f"init = {self.init!r} is not a pair of sizes")
        for size in self.init:
            check_whole("init", size, 1)
        if math.prod(self.init) != 8 * self.parents:
            raise ValueError(f"init = {self.init} is not a grid of 8 * parents points, with parents = {self.parents}")

    @property
    def needs(self) -> Needs:
        return Needs(importance=self.importance)

    def refuses_fold(self, weight_bits: int, activation_bits: int) -> str:
        return ""

    def fold_channels(self, values: Tensor, bits: int, weight: Tensor) -> tuple[Fold, UniformQuantizer | None]:
        return self.fold_together([values], bits, [weight])[0]

    def fold_together(
        self, values: Sequence[Tensor], bits: int, weights: Sequence[Tensor]
    ) -> list[tuple[Fold, UniformQuantizer | None]]:
        stack = torch.stack(list(values))
        ranges = [self.fold_ranges] * len(stack)
        if self.fold_ranges == "best":
            ranges = best_ranges(stack, bits, self, torch.stack(list(weights)))
        folds: dict[int, Fold] = {}
        for kind in dict.fromkeys(ranges):
            members = [index for index, chosen in enumerate(ranges) if chosen == kind]
            members_stack = stack if len(members) == len(stack) else stack[members]
            scales, zero_points = search_channels(members_stack, bits, replace(self, fold_ranges=kind))
            folds |= dict(zip(members, map(Fold.sharing, scales, zero_points), strict=True))
        return [(folds[index], None) for index in range(len(stack))]

    def search_product(self, product: Product) -> Assignment:
        start = product.start
        first = None if start is None else product.left.point_of(start.left)
        second = None if start is None else product.right.point_of(start.right)
        if (first is None) != product.left.is_float or (second is None) != product.right.is_float:
            start = None  # its bits or kinds of quantizers differ from the formats of the operands
        assignment = self._assign(product, *self._points(product.left, product.right, first, second))
        if start is None:
            return assignment
        current = product.assign(start.left, start.right)
        return assignment if assignment.sqnr > current.sqnr else current

    def search_together(self, products: Sequence[Product]) -> list[Assignment]:
        if len(products) == 1:
            return [self.search_product(products[0])]
        left = Operand.stack([product.left for product in products])
        right = Operand.stack([product.right for product in products])
        lefts, rights = (
            [None] * len(products) if points is None else points.unbind(1) for points in self._points(left, right)
        )
        return list(map(self._assign, products, lefts, rights))

    def _assign(self, product: Product, first: Tensor | None, second: Tensor | None) -> Assignment:
        x_side, w_side = product.left.quantizer(first), product.right.quantizer(second)
        if self.refit and product.right.has_own_rows and isinstance(w_side, Quantizer):
            return product.assign_refitted(x_side, w_side)
        return product.assign(x_side, w_side)

    def _points(
        self, left: Operand, right: Operand, first: Tensor | None = None, second: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the best points of both operands, starting from given ones; a float operand has none.

        Stacked operands have (P, stack, *groups) points.
        """
        # Both operands are searched in turn, and a quantizer is never replaced by a worse one. The left quantizer
        # starts from its operand's own error, and the right operand is searched first. Later searches of an operand try
        # only points near its current one, if the steps use a sample and there are more than twice as many rows as
        # columns: with few rows, the best point moves far when the other operand changes.
        rows, columns = left.values[..., 0].numel() // left.stack_size, left.values.shape[-1]
        many = self.rough_rows > 0 and rows > max(self.rough_rows, 2 * columns)
        if first is None and not left.is_float:
            first = search_own(left, self)
        left_hat, right_hat = left.fake_quantize_at(first), right.values
        error = left.values.new_full([left.stack_size] * left.stacked, math.inf, dtype=torch.float64)
        if not right.is_float:
            second, error = _search_operand(right, left.values, left_hat, self, second)
            right_hat = right.fake_quantize_at(second)
        active = torch.ones_like(error, dtype=torch.bool)
        for index in range(self.rounds):
            before, changed = error, torch.zeros_like(active)
            if first is not None:
                best, least = _search_operand(left, right.values, right_hat, self, first, nearby=many and index > 0)
                changed = active & (best != first).movedim(0, -1).reshape(*active.shape, -1).any(-1)
                first, error = _where(active, best, first), torch.where(active, least, error)
                left_hat = left.fake_quantize_at(first)
            if second is not None and bool(changed.any()):
                best, least = _search_operand(right, left.values, left_hat, self, second, nearby=many)
                second, error = _where(changed, best, second), torch.where(changed, least, error)
                right_hat = right.fake_quantize_at(second)
            active = active & ~(error > before * (1 - _LEAST_GAIN))
            if index + 1 < self.rounds and not bool(active.any()):
                break
        return first, second


def _where(which: Tensor, after: Tensor, before: Tensor) -> Tensor:
    """Return the points that were found for some products of a stack, and those before for all others.

    which: (stack,), or () for a single product. after, before: (P, stack, *groups), or (P, *groups).
    """
    return torch.where(which.view(1, *which.shape, *(1 for _ in range(after.ndim - 1 - which.ndim))), after, before)


def best_ranges(values: Tensor, bits: int, search: Search, weight: Tensor) -> list[FoldRanges]:
    """Return for each norm the kind of ranges with the smallest error of the linears' outputs on unseen images.

    These are the last quarter of the rows, which are in the order of the images; the ranges come from the others.
    values, weight: (norms, T, C) and (norms, O, C).
    """
    fitted, held_out = values.tensor_split([values.shape[1] - values.shape[1] // 4], dim=1)

    def error(ranges: FoldRanges) -> Tensor:
        scale, zero_point = (
            parameter.unsqueeze(1) for parameter in search_channels(fitted, bits, replace(search, fold_ranges=ranges))
        )
        added = UniformQuantizer(scale, zero_point, bits).fake_quantize(held_out) - held_out
        return (added @ weight.mT).square().sum((1, 2))

    errors = torch.stack([error(ranges) for ranges in _RANGES])
    return [_RANGES[index] for index in first_least(errors).tolist()]


def minimise(
    loss: Loss,
    operand: Operand,
    search: Search,
    incumbent: Tensor | None = None,
    rough: Loss | None = None,
    *,
    nearby: bool = False,
) -> Tensor:
    """Return the best point of an operand's box by the configured strategy.

    nearby: try only points around the incumbent, if the strategy is FPCS.
    rough: a cheaper loss, as in `fpcs`.
    """
    low, high = operand.box(search.reach)
    count = math.prod(search.init)
    if search.strategy == "brute-force":
        return brute_force(loss, low, high, sizes=(count,) * len(low), incumbent=incumbent)[0]
    if search.strategy == "alternating":
        sizes = (count // len(low),) * len(low)
        return alternating(loss, low, high, sizes=sizes, incumbent=incumbent)[0]
    init: tuple[int, ...] = search.init
    steps = search.steps
    if len(low) == 1:  # with one hyperparameter, a step divides the spacing by 8 instead of 2
        init, steps = (count,), math.ceil(search.steps / 3)
    if nearby and incumbent is not None:
        spacing = grid_spacing(low, high, init) / 2**search.steps
        point, _ = walk(loss, incumbent, spacing, moves=max(4, search.steps))
    else:
        parents = search.parents
        point, _ = fpcs(loss, low, high, init=init, parents=parents, steps=steps, incumbent=incumbent, rough=rough)
    return rescale(loss, point, operand.format.scales, rough=rough)[0] if search.rough_rows else point


def search_own(operand: Operand, search: Search) -> Tensor:
    """Return the operand's best point by its own error; the output is not considered."""
    own = OwnError(operand.groups(), operand.stack_size)

    def loss(points: Tensor) -> Tensor:
        count, _, *groups = points.shape
        levels, cuts = (table.reshape(count, -1, table.shape[-1]) for table in operand.format.steps(points))
        return own.loss(levels, cuts).view(count, *groups)

    return minimise(once(loss, operand.format.snap), operand, replace(search, strategy="fpcs"))


def uniform_is_closer(operands: Sequence[Operand], quantizers: Sequence[Quantizer], search: Search) -> list[bool]:
    """Return for each operand of one shape whether a uniform quantizer of as many bits is closer to its values."""
    count = operands[0].values[..., 0].numel()
    step = coprime(max(1, count // _COMPARED), count)  # not the same position of every image
    samples = [
        Operand(
            operand.values.reshape(count, -1)[::step],
            UniformFormat(quantizer.bits),
            None if operand.mask is None else operand.mask.reshape(count, -1)[::step],
        )
        for operand, quantizer in zip(operands, quantizers, strict=True)
    ]
    points = search_own(Operand.stack(samples), search).unbind(1)

    def error(sample: Operand, quantizer: Quantizer | None) -> Tensor:
        return (sample.fake_quantize(quantizer) - sample.values).square().sum()

    uniform = [error(sample, sample.quantizer(point)) for sample, point in zip(samples, points, strict=True)]
    errors = [error(sample, quantizer) for sample, quantizer in zip(samples, quantizers, strict=True)]
    closer: list[bool] = (torch.stack(uniform) < torch.stack(errors)).tolist()
    return closer


def _search_operand(
    operand: Operand,
    other: Tensor,
    other_hat: Tensor,
    search: Search,
    incumbent: Tensor | None,
    *,
    nearby: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the best point of an operand and its loss: a number, or a number for each product of a stack.

    other, other_hat: the other operand, exact and quantized.
    """
    transposed = (other.transpose(-1, -2), other_hat.transpose(-1, -2))
    error = ProductError.of(
        *(operand.values, *transposed, operand.format.own_dims, operand.mask, operand.alike), stacked=operand.stacked
    )
    fair, rough = judges(error, operand, search, nearby=nearby)
    if search.rough_rows:
        fast = rough.fast()
        if rough is not fair:
            fair = fair.fast()
        elif nearby:
            fair = fast
        rough = fast
    start, points, totals = 0, list[Tensor](), list[Tensor]()
    for piece, fairer, rougher in zip(error.by_rows(), fair.by_rows(), rough.by_rows(), strict=True):
        rows = slice(start, start := start + piece.left.shape[-2])
        known = incumbent if incumbent is None or piece is error else incumbent[..., rows]
        part, form = replace(operand, values=piece.left), operand.format
        cheaper = None if rough is fair else rougher.loss_once(form.errors, form.snap)
        best = minimise(fairer.loss_once(form.errors, form.snap), part, search, known, cheaper, nearby=nearby)
        best, least = _better(piece, part, best, known)
        points.append(best)
        totals.append(least)
    return points[0] if len(points) == 1 else torch.cat(points, dim=-1), sum(totals[1:], start=totals[0])


def judges(
    error: ProductError, operand: Operand, search: Search, *, nearby: bool = False
) -> tuple[ProductError, ProductError]:
    """Return the error for survivors and walks, and the rougher one for the steps of FPCS; they may be the same.

    The steps use a sample of the tokens, or the leading part of a weight's Gram matrix. The survivors use a larger
    sample, and strategies other than FPCS the whole error.

    nearby: there are no steps.
    """
    if not search.rough_rows:
        return error, error
    if operand.has_own_rows:
        return error, error if nearby else error.leading()
    fair = error.sample(search.rough_rows, times=_FAIR) if search.strategy == "fpcs" else error
    return fair, error.sample(search.rough_rows)


def _better(error: ProductError, operand: Operand, best: Tensor, incumbent: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the better of two points in each group by the exact loss, and the exact loss summed over the groups.

    The loss is in float64: a number, or a number for each product of a stack.
    """

    def exact(point: Tensor) -> Tensor:
        return error.loss(lambda points: operand.fake_quantize_at(points[0])[None], point[None])[0]

    def total(losses: Tensor) -> Tensor:
        return losses.reshape(*losses.shape[: operand.stacked], -1).sum(-1).double()

    new = exact(best)
    if incumbent is None:
        return best, total(new)
    old = exact(incumbent)
    return torch.where(new < old, best, incumbent), total(torch.minimum(new, old))


def search_channels(values: Tensor, bits: int, search: Search) -> tuple[Tensor, Tensor]:
    """Return (scale, zero_point), each (norms, C), of one uniform quantizer per channel, for a fold.

    values: (norms, T, C).

    `search.fold_ranges` is "own" or "deviations". With fine codes, a range that is found by the channel's own error
    follows the channel's few largest values, and may fit other images less well.
    """
    if search.fold_ranges == "own":
        point = search_own(Operand(values, UniformFormat(bits, own_dims=(0, 2)), stacked=True), search)
        return bounds_to_uniform(point[0], point[1], bits)
    mean, deviation = values.mean(1), values.std(1, correction=0)
    least = (deviation.mean(1, keepdim=True).double() * 1e-4).clamp(min=torch.finfo(values.dtype).tiny)
    deviation = torch.maximum(deviation, least.to(values.dtype))
    scaled = (values - mean.unsqueeze(1)) / deviation.unsqueeze(1)
    point = search_own(Operand(scaled, UniformFormat(bits, own_dims=(0,)), stacked=True), search).unsqueeze(-1)
    return bounds_to_uniform(mean + deviation * point[0], mean + deviation * point[1], bits)
