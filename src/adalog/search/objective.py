"""Losses of candidates: the error of a product's output if one operand is quantized, or an operand's own error.

Every site is a product left @ right: a linear's activation and weight, a convolution's patches and kernel, or
attention's Q K^T and A V. If the other operand is already quantized, and D = Q(left) - left, the loss is

    ||Q(left) right_hat - left right||^2 = ||D right_hat + left (right_hat - right)||^2        (the error form)

In the error form no large terms cancel, and biases and offsets drop out. If the operands are swapped and transposed, it
gives the loss for the search of the other operand.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from adalog.device import chunk_elements, multiplies_bfloat16, waits_for_launches
from adalog.quantizers import at_least_float32
from adalog.quantizers.elementwise import kernels
from adalog.search.distinct import Distinct
from adalog.search.fused import products, sums
from adalog.search.quantiles import ascending, coprime, thinned

# A sample has at least this many elements per group, and at least as many rows as the caller asks for.
_ROUGH_ELEMENTS = 3 << 14
# A product with fewer columns than this takes less time than the rounding of its operand to bfloat16.
_NARROW = 16
# A sample of a product's columns has at least this many columns.
_COLUMNS = 16
# From `_WIDE` columns on, a Gram matrix is approximated by one direction per `_COLUMNS_OF_DIRECTION` columns, but by
# `_DIRECTIONS` at most.
_WIDE, _COLUMNS_OF_DIRECTION, _DIRECTIONS = 192, 3, 512
# A large Gram matrix is computed in panels of at least `_PANEL` rows, and in at most `_PANELS` panels.
_PANEL, _PANELS = 64, 8
_PANEL_OF_ACCELERATOR = 1024  # with fewer rows, launches cost more than products
# A weight's rows are sorted by their number of distinct candidates and scored in up to `_PARTS` parts, each with at
# least `_ROWS_TOGETHER` rows.
_PARTS, _ROWS_TOGETHER = 8, 32

Candidates = Callable[[Tensor], Tensor]  # points (k, P, *groups) -> the quantized left operand (k, *left.shape)
Errors = Callable[[Tensor, torch.dtype], Tensor]  # the same points, a dtype -> quantized minus exact, in that dtype


@dataclass(frozen=True)
class ProductError:
    """The output error of a product as a function of its left operand's quantizer (Sec. 3.4, Algorithm 1's loss).

    left: (*batch, T, I).
    base: left @ (right_hat - right), times right_hat^T if the Gram matrix is used (`gram`).
    factor: right_hat (*batch, I, O), or its Gram matrix right_hat right_hat^T (*batch, I, I).
    constant: ||left (right_hat - right)||^2, which is the same for all candidates.
    own_dims: the dimensions of `left` that have losses of their own (rows of a weight, heads). The error is summed over
        all others.
    mask, alike, stacked: as in `of`.
    rest: (1, I) and (T, I), the parts that `leading` leaves out of the Gram matrix (only its diagonal) and of `base`.
    """

    left: Tensor
    factor: Tensor
    base: Tensor
    constant: Tensor
    gram: bool
    own_dims: tuple[int, ...]
    mask: Tensor | None = None
    alike: bool = True
    rest: tuple[Tensor, Tensor] | None = None
    stacked: bool = False

    @staticmethod
    def of(
        left: Tensor,
        right: Tensor,
        right_hat: Tensor,
        own_dims: Sequence[int] = (),
        mask: Tensor | None = None,
        alike: bool = True,
        gram: bool | None = None,
        stacked: bool = False,
    ) -> "ProductError":
        """Return the error of left @ right, given that the right operand is quantized to right_hat.

        mask: the shape of `left`, 1 for elements that are quantized and 0 for the padding of a convolution.
        alike: True if the rows of `left` are tokens, so that a sample can represent them all.
        gram: True to use the Gram matrix; None: use it if that is cheaper. With it, the losses of a sample (`sample`)
            are all too large by one constant, and the losses of the leading part (`leading`) are off by one constant in
            each group.
        stacked: True if the first dimension counts products that are searched together.
        """
        gram = right.shape[-1] > left.shape[-1] if gram is None else gram
        own = tuple(own_dims)
        left, right, right_hat = (at_least_float32(value) for value in (left, right, right_hat))  # squares overflow
        factor, transposed = right_hat, right_hat.transpose(-1, -2)
        if gram and left.shape[-2] >= left.shape[-1]:  # few columns: multiply right operands first
            error, wide = right_hat - right, left.double()
            power = gram_matrix(error).double()
            constant = _total((wide @ power).mul_(wide), own).to(left.dtype)  # large values of `left` may cancel
            base, factor = left @ (error @ transposed), gram_matrix(right_hat)
        else:
            base = error_base(left, right, right_hat)
            constant = _total(base.square(), own)
            if gram:
                base, factor = base @ transposed, gram_matrix(right_hat)
        return ProductError(left, factor, base, constant, gram, own, mask, alike, stacked=stacked)

    def fast(self) -> "ProductError":
        """Return the same error with products in bfloat16, if the device supports them and they take less time.

        Rounding changes each factor by a share of 2**-9 at most, and sums average that out. A Gram matrix is replaced
        by its root (`rooted`). If the matrix itself were rounded, it might have directions of negative power, along
        which large errors would seem to reduce the loss. With the root, losses are off by one constant in each group.
        """
        if not gains_from_bfloat16(self.factor):
            return self
        error = self.rooted() if self.gram else self
        rest = None if error.rest is None else (error.rest[0].bfloat16(), error.rest[1])
        return replace(error, factor=error.factor.bfloat16(), rest=rest)

    def rooted(self) -> "ProductError":
        """Return the error in terms of a root F of its Gram matrix G = F F^T, up to one constant in each group.

        With e the quantization error of a row and b its part of `base`, e G e^T + 2 b e^T = ||e F + b F^-T||^2 - const.
        Many equal rows, as in blank images, leave more rounding noise in G than a Cholesky factorization tolerates. The
        root is then made of the eigenvectors of G, with no less power than the rounding noise.
        """
        gram, number = self.factor.double(), torch.finfo(self.factor.dtype)
        ones = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        rounding = gram.diagonal(dim1=-2, dim2=-1).amax(-1) * (number.eps * len(ones)) + number.tiny  # in G's products
        root, failed = torch.linalg.cholesky_ex(gram + rounding[..., None, None] * ones)
        if failed.any():
            power, turn = torch.linalg.eigh(gram)
            length = torch.maximum(power, rounding[..., None]).sqrt()[..., None, :]
            root, base = turn * length, self.base @ (turn / length).to(self.base.dtype)
        elif self.base.shape[-2] < len(ones):
            base = torch.linalg.solve_triangular(root.mT, self.base.double(), upper=True, left=False)
        else:
            base = self.base @ torch.linalg.solve_triangular(root.mT, ones, upper=True).to(self.base.dtype)
        return replace(self, factor=root.to(self.factor.dtype), base=base.to(self.base.dtype), gram=False)

    def sample(self, rows: int, times: int = 1) -> "ProductError":
        """Return the error on a sample of about `times` * `rows` tokens per loss, at even distances.

        The sample is larger if `rows` tokens have fewer than `_ROUGH_ELEMENTS` elements. If there are few tokens, the
        result is the whole error. Tokens are the rows of the operand if these are alike. If the rows are channels, a
        few large ones decide, so they are not sampled: tokens are then the columns of the product.
        """
        *_, length, width = self.left.shape
        groups = math.prod(self.left.shape[dim] for dim in self.own_dims)
        if not self.alike:
            tokens, columns = self.left[..., 0, 0].numel() // groups * self.factor.shape[-1], self.factor.shape[-1]
            stride = min(tokens // (times * max(rows, 1)), columns // _COLUMNS)
            return self if self.gram or stride < 2 or self._of_weight else self._columns(stride)
        summed = [dim for dim in range(self.left.ndim - 1) if dim not in self.own_dims]
        stride = self.left[..., 0].numel() // groups // (times * max(rows, _ROUGH_ELEMENTS // width))
        if stride < 2 or self.left.ndim - 2 not in summed:
            return self
        sparse = coprime(max(1, min(stride, length // 16)), length)  # if rows are few, skip whole matrices instead
        some = self._every(summed[0], stride // sparse) if len(summed) > 1 and stride // sparse > 1 else self
        return some._rows(sparse)

    def leading(self) -> "ProductError":
        """Return the error of a weight by its Gram matrix's leading directions and the diagonal of the remainder.

        There is one direction for every `_COLUMNS_OF_DIRECTION` columns, up to `_DIRECTIONS`. If there are few columns
        or no Gram matrix, the result is the error itself. The errors of different columns are nearly independent, so
        the remainder nearly cancels except on its diagonal. The part that is linear in the error is exact. The
        directions come from one step of subspace iteration.
        """
        gram, columns = self.factor, self.left.shape[-1]
        if not self.gram or not self._of_weight or columns < _WIDE:
            return self
        count, drawing = min(columns // _COLUMNS_OF_DIRECTION, _DIRECTIONS), torch.Generator("cpu").manual_seed(0)
        drawn = torch.randn(columns, count, generator=drawing, dtype=gram.dtype, device="cpu").to(gram.device)
        basis = torch.linalg.qr(gram @ torch.linalg.qr(gram @ drawn).Q).Q
        # In float64, since LAPACK's float32 may not converge if nearly all inputs are zero.
        power, turn = (each.to(gram.dtype) for each in torch.linalg.eigh((basis.mT @ gram @ basis).double()))
        directions, number = basis @ turn, torch.finfo(power.dtype)
        length = torch.maximum(power, (power[..., -1:] * number.eps).clamp(min=number.tiny)).sqrt().unsqueeze(-2)
        factor, base = directions * length, (self.base @ directions) / length
        diagonal = (gram.diagonal(dim1=-2, dim2=-1) - factor.square().sum(-1)).clamp(min=0).unsqueeze(-2)
        left_out = diagonal, self.base - base @ factor.mT
        return replace(self, factor=factor.contiguous(), base=base, gram=False, rest=left_out)

    def _columns(self, stride: int) -> "ProductError":
        """Return the error on every `stride`-th column of the product."""
        factor, base = (value[..., ::stride].contiguous() for value in (self.factor, self.base))
        return replace(self, factor=factor, base=base)

    def _every(self, dim: int, stride: int) -> "ProductError":
        """Return the error on about every `stride`-th index of a dimension that the operands share."""
        stride = coprime(stride, self.left.shape[dim])
        take = (slice(None),) * dim + (slice(None, None, stride),)
        mask = None if self.mask is None else self.mask[take]
        return replace(self, left=self.left[take], factor=self.factor[take], base=self.base[take], mask=mask)

    def _rows(self, stride: int) -> "ProductError":
        """Return the error on every `stride`-th row, with the same number of rows from each matrix.

        The count goes on from matrix to matrix, so that the first row differs from one matrix to the next.
        """
        *lead, length, _ = self.left.shape
        start = (torch.arange(math.prod(lead), device=self.left.device) * -length) % stride
        row = start[:, None] + stride * torch.arange(length // stride, device=self.left.device)
        row = row.view(*lead, -1, 1)

        def take(values: Tensor) -> Tensor:
            return values.gather(-2, row.expand(*row.shape[:-1], values.shape[-1]))

        mask = None if self.mask is None else take(self.mask)
        return replace(self, left=take(self.left), base=take(self.base), mask=mask)

    def splits(self) -> "list[ProductError]":
        """Split a large operand along the first dimension that is summed over; the errors of the slices add up."""
        summed = [dim for dim in range(self.left.ndim - 1) if dim not in self.own_dims]
        count = -(-self.left.numel() // (2 * chunk_elements(self.left.device)))
        if count == 1 or not summed:
            return [self]
        dim = summed[0]
        shared = dim >= self.factor.ndim - 2  # slices of a product's rows share the factor
        size = -(-self.left.shape[dim] // count)
        lefts, bases = self.left.split(size, dim), self.base.split(size, dim)
        factors = [self.factor] * len(lefts) if shared else self.factor.split(size, dim)
        masks = [None] * len(lefts) if self.mask is None else self.mask.split(size, dim)
        constants = [self.constant] + [torch.zeros_like(self.constant)] * (len(lefts) - 1)
        return [
            replace(self, left=left, factor=factor, base=base, constant=constant, mask=mask)
            for left, factor, base, constant, mask in zip(lefts, factors, bases, constants, masks, strict=True)
        ]

    def by_rows(self) -> "list[ProductError]":
        """Split the rows of a large operand into slices, if each row has its own loss, as in a weight."""
        if not self._has_own_rows:
            return [self]
        count = max(1, self.left.numel() // chunk_elements(self.left.device))
        rows = self.left.shape[-2]
        size = -(-rows // count)
        return [self.of_rows(slice(start, start + size)) for start in range(0, rows, size)]

    def of_rows(self, rows: slice | Tensor) -> "ProductError":
        """Return the error of some rows. Each row must have its own loss."""
        which = (slice(None), rows) if self.stacked else rows
        rest = None if self.rest is None else (self.rest[0], self.rest[1][which])
        return replace(self, left=self.left[which], base=self.base[which], constant=self.constant[which], rest=rest)

    def loss(self, candidates: Candidates, points: Tensor) -> Tensor:
        """Return the squared output error (K, *groups) of the points (K, P, *groups)."""
        return self.loss_of(lambda some, dtype: candidates(some).sub_(self.left).to(dtype), points)

    def loss_of(self, errors: Errors, points: Tensor) -> Tensor:
        """Return the same as `loss`, for candidates given by their errors."""
        chunk = max(1, chunk_elements(self.left.device) // self.left.numel())
        return torch.cat([self._score(errors(some, self.factor.dtype)) for some in points.split(chunk)])

    def loss_by(self, errors: Callable[[Tensor], Errors]) -> Callable[[Tensor], Tensor]:
        """Return a function with the same result as `loss` that works slice by slice (`splits`).

        errors: maps the values of a slice to the function that gives the errors of its candidates.
        """
        splits = [(split, errors(split.left)) for split in self.splits()]

        def loss(points: Tensor) -> Tensor:
            first, *others = (split.loss_of(added, points) for split, added in splits)
            return sum(others, start=first)

        return loss

    def loss_once(
        self, errors: Callable[[Tensor], Errors], settled: Callable[[Tensor], Tensor]
    ) -> Callable[[Tensor], Tensor]:
        """Return a function with the same result as `loss_by` that scores candidates of a group once if they are equal.

        Candidates are compared after `settled`. Rows of a weight with similar numbers of distinct candidates are scored
        together. On an accelerator, which would have to wait for the numbers of distinct candidates, all are scored.
        """
        whole = self.loss_by(errors)
        by_rows = self._has_own_rows and not self.stacked
        together = max(_ROWS_TOGETHER, -(-len(self.left) // _PARTS))

        def loss(points: Tensor) -> Tensor:
            if waits_for_launches(points.device):
                return whole(settled(points))
            found = Distinct.of(settled(points))
            if not by_rows or int(found.counts.min()) == len(found.points):
                return found.to_all(whole(found.points))
            losses = points.new_zeros(len(found.points), len(self.left))
            for rows in found.counts.argsort(stable=True).split(together):
                count = int(found.counts[rows[-1]])
                losses[:count, rows] = self.of_rows(rows).loss_by(errors)(found.points[:count, :, rows])
            return found.to_all(losses)

        return loss

    @property
    def _of_weight(self) -> bool:
        """True if the left operand is a matrix, or a stack of matrices."""
        return self.left.ndim == 2 + self.stacked

    @property
    def _has_own_rows(self) -> bool:
        return self._of_weight and self.own_dims == tuple(range(self.left.ndim - 1)) and self.mask is None

    def _score(self, delta: Tensor) -> Tensor:
        if self.mask is not None:
            delta.mul_(self.mask)
        total = sums(products(delta, self.factor), self.base, delta if self.gram else None, self.own_dims)
        if self.rest is not None:
            diagonal, base = self.rest
            total += sums(delta * diagonal, base, delta, self.own_dims)
        return total + self.constant if self.gram else total


def gains_from_bfloat16(factor: Tensor) -> bool:
    """Return True if a product with this right factor (..., I, O) takes less time in bfloat16."""
    able = factor.dtype == torch.float32 and multiplies_bfloat16(factor.device)
    return able and factor.shape[-1] >= _NARROW


def gram_matrix(rows: Tensor) -> Tensor:
    """Return the products of all rows with each other: (..., R, R) for rows (..., R, T).

    The part that mirrors another one is copied, not multiplied.
    """
    count = rows.shape[-2]
    size = max(_PANEL_OF_ACCELERATOR if waits_for_launches(rows.device) else _PANEL, -(-count // _PANELS))
    if count <= size:
        return rows @ rows.mT
    found = rows.new_empty((*rows.shape[:-1], count))
    for start in range(0, count, size):
        end = min(start + size, count)
        panel = rows[..., start:end, :] @ rows[..., :end, :].mT
        found[..., start:end, :end] = panel
        found[..., :start, start:end] = panel[..., :start].mT
    return found


def error_base(left: Tensor, right: Tensor, right_hat: Tensor) -> Tensor:
    """Return left @ (right_hat - right), the output error that the right operand alone causes, for the error form."""
    return left @ (right_hat - right)


def _total(values: Tensor, own_dims: tuple[int, ...]) -> Tensor:
    """Return the sum over all dimensions except `own_dims`."""
    dims = [dim for dim in range(values.ndim) if dim not in own_dims]
    return values.sum(dims) if dims else values


class OwnError:
    """The squared error of quantizing a sample itself, from one sort and prefix sums: O(levels log T) per candidate.

    sample: (G, T), one row per group. A large sample is thinned (`thinned`, with `stack`).
    """

    def __init__(self, sample: Tensor, stack: int = 1):
        sample = thinned(sample, stack)
        self.sorted = ascending(sample).double().contiguous()
        self.sums, self.squares = self.sorted.new_zeros(2, len(sample), sample.shape[1] + 1)
        torch.cumsum(self.sorted, 1, out=self.sums[:, 1:])
        torch.cumsum(self.sorted.square(), 1, out=self.squares[:, 1:])

    def uniform_loss(self, scale: Tensor, zero_point: Tensor, bits: int) -> Tensor:
        """Return the errors of uniform quantizers. scale, zero_point: (K, *groups), like the result."""
        shape = scale.shape
        scale, zero_point = (value.double().reshape(shape[0], -1, 1) for value in (scale, zero_point))
        code = torch.arange(2**bits, dtype=torch.float64, device=scale.device)
        return self.loss(scale * (code - zero_point), scale * (code[:-1] + 0.5 - zero_point)).view(shape)

    def loss(self, levels: Tensor, thresholds: Tensor) -> Tensor:
        """Return the errors (K, G) of quantizers with levels (K, G, L) and thresholds (K, G, L - 1), both ascending."""
        count, groups, size = levels.shape
        module = kernels(self.sorted, self.sums, self.squares, levels, thresholds, dtype=torch.float64)
        if module is not None:
            errors: Tensor = module.own_errors(
                self.sorted, self.sums, self.squares, levels.contiguous(), thresholds.contiguous()
            )
            return errors
        chunk = max(1, 4 * chunk_elements(levels.device) // (groups * size))
        if count > chunk:
            chunks = zip(levels.split(chunk), thresholds.split(chunk), strict=True)
            return torch.cat([self.loss(*some) for some in chunks])
        cuts = thresholds.permute(1, 0, 2).reshape(groups, -1).contiguous()
        inner = torch.searchsorted(self.sorted, cuts).view(groups, count, size - 1)
        ends = torch.cat(
            [torch.zeros_like(inner[..., :1]), inner, torch.full_like(inner[..., :1], self.sorted.shape[1])], -1
        )

        def between(prefix: Tensor) -> Tensor:
            return prefix.gather(1, ends.view(groups, -1)).view(ends.shape).diff(dim=-1)

        value = levels.permute(1, 0, 2)
        error = between(self.squares) - 2 * value * between(self.sums) + value.square() * ends.diff(dim=-1)
        return error.sum(-1).t()
