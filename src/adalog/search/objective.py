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

from adalog.device import chunk_elements, waits_for_launches
from adalog.quantizers import Errors, at_least_float32
from adalog.quantizers.elementwise import kernels
from adalog.quantizers.quantiles import ascending, thin
from adalog.search.distinct import DistinctCandidates
from adalog.search.forms import Change, ExactForm, Form, GramForm, LeadingForm, Sample, gains_from_bfloat16, same

_ROUGH_ELEMENTS = 3 << 14  # at least, in each group of a sample
_COLUMNS = 16  # at least, in a sample of a product's columns
_WIDE = 192  # the columns from which on a Gram matrix is approximated by its leading directions
# A weight's rows are sorted by their number of distinct candidates and scored in up to `_PARTS` parts, each with at
# least `_ROWS_TOGETHER` rows.
_PARTS, _ROWS_TOGETHER = 8, 32

Candidates = Callable[[Tensor], Tensor]  # points (k, P, *groups) -> the quantized left operand (k, *left.shape)


@dataclass(frozen=True)
class ProductError:
    """The output error of a product as a function of its left operand's quantizer (Sec. 3.4, Algorithm 1's loss).

    left: (*batch, T, I).
    form: the formula of the loss.
    own_dims: the dimensions of `left` that have losses of their own (rows of a weight, heads). The error is summed over
        all others.
    mask: the shape of `left`, 1 for elements that are quantized and 0 for the padding of a convolution.
    alike: True if the rows of `left` are tokens, so that a sample can represent them all.
    stacked: True if the first dimension counts products that are searched together.
    """

    left: Tensor
    form: Form
    own_dims: tuple[int, ...]
    mask: Tensor | None = None
    alike: bool = True
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

        gram: True to use the Gram matrix; None: use it if that is cheaper. With it, the losses of `sample` and
            `leading` are off by one constant in each group.
        """
        own = tuple(own_dims)
        left, right, right_hat = (at_least_float32(value) for value in (left, right, right_hat))  # squares overflow
        gram = right.shape[-1] > left.shape[-1] if gram is None else gram
        form = GramForm.of(left, right, right_hat, own) if gram else ExactForm.of(left, right, right_hat)
        return ProductError(left, form, own, mask, alike, stacked)

    def fast(self) -> "ProductError":
        """Return the same error with products in bfloat16, if the device supports them and they take less time."""
        return replace(self, form=self.form.in_bfloat16()) if gains_from_bfloat16(self.form.factor) else self

    def sample(self, rows: int, times: int = 1) -> "ProductError":
        """Return the error on a sample of about `times` * `rows` tokens per loss, or the whole error of few tokens.

        The sample is larger if `rows` tokens have fewer than `_ROUGH_ELEMENTS` elements. Tokens are the rows of the
        operand if these are alike. If the rows are channels, a few large ones decide, so they are not sampled: tokens
        are then the columns of the product.
        """
        groups = math.prod(self.left.shape[dim] for dim in self.own_dims)
        if not self.alike:
            columns = self.form.factor.shape[-1]
            tokens = self.left[..., 0, 0].numel() // groups * columns
            stride = min(tokens // (times * max(rows, 1)), columns // _COLUMNS)
            if isinstance(self.form, ExactForm) and stride >= 2 and not self._of_weight:
                return replace(self, form=self.form.columns(stride))
            return self
        stride = self.left[..., 0].numel() // groups // (times * max(rows, _ROUGH_ELEMENTS // self.left.shape[-1]))
        if stride < 2 or self.left.ndim - 2 not in self._summed_dims:
            return self
        some = Sample.every(stride, self.left, self._summed_dims)
        return self._part(some.of_rows, some.of_matrices)

    def leading(self) -> "ProductError":
        """Return the error of a wide weight by the `LeadingForm` of its Gram matrix, else the error itself."""
        if not isinstance(self.form, GramForm) or not self._of_weight or self.left.shape[-1] < _WIDE:
            return self
        return replace(self, form=LeadingForm.of(self.form))

    def _part(self, rows: Change, matrices: Change = same, groups: Change = same) -> "ProductError":
        """Return the error of a part of the operand. The arguments are those of `Form.map`."""
        mask = None if self.mask is None else rows(self.mask)
        return replace(self, left=rows(self.left), mask=mask, form=self.form.map(rows, matrices, groups))

    def splits(self) -> "list[ProductError]":
        """Split a large operand along the first dimension that is summed over; the errors of the slices add up."""
        count = -(-self.left.numel() // (2 * chunk_elements(self.left.device)))
        if count == 1 or not self._summed_dims:
            return [self]
        dim = self._summed_dims[0]
        size = -(-self.left.shape[dim] // count)
        shared = dim >= self.left.ndim - 2  # slices of a product's rows share the factor

        def split(start: int) -> ProductError:
            def take(values: Tensor) -> Tensor:
                return values.narrow(dim, start, min(size, values.shape[dim] - start))

            return self._part(take, same if shared else take, torch.zeros_like if start else same)

        return [split(start) for start in range(0, self.left.shape[dim], size)]

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
        return self._part(lambda values: values[which], groups=lambda values: values[which])

    def loss(self, candidates: Candidates, points: Tensor) -> Tensor:
        """Return the squared output error (K, *groups) of the points (K, P, *groups)."""
        return self.loss_of(lambda part, dtype: candidates(part).sub_(self.left).to(dtype), points)

    def loss_of(self, errors: Errors, points: Tensor) -> Tensor:
        """Return the same as `loss`, for candidates given by their errors."""
        chunk = max(1, chunk_elements(self.left.device) // self.left.numel())
        return torch.cat([self._score(errors(part, self.form.factor.dtype)) for part in points.split(chunk)])

    def loss_by(self, errors: Callable[[Tensor], Errors]) -> Callable[[Tensor], Tensor]:
        """Return a function with the same result as `loss` that works slice by slice (`splits`).

        errors: maps the values of a slice to the function that gives the errors of its candidates.
        """
        splits = [(split, errors(split.left)) for split in self.splits()]

        def loss(points: Tensor) -> Tensor:
            first, *others = (split.loss_of(candidates, points) for split, candidates in splits)
            return sum(others, start=first)

        return loss

    def loss_once(
        self, errors: Callable[[Tensor], Errors], snap: Callable[[Tensor], Tensor]
    ) -> Callable[[Tensor], Tensor]:
        """Return a function with the same result as `loss_by` that scores distinct candidates as `once` does.

        Rows of a weight with similar numbers of distinct candidates are scored together.
        """
        whole = self.loss_by(errors)
        by_rows = self._has_own_rows and not self.stacked
        limit = max(_ROWS_TOGETHER, -(-len(self.left) // _PARTS))

        def loss(points: Tensor) -> Tensor:
            if waits_for_launches(points.device):
                return whole(snap(points))
            distinct = DistinctCandidates.of(snap(points))
            if not by_rows or int(distinct.counts.min()) == len(distinct.points):
                return distinct.to_all(whole(distinct.points))
            losses = points.new_zeros(len(distinct.points), len(self.left))
            for rows in distinct.counts.argsort(stable=True).split(limit):
                count = int(distinct.counts[rows[-1]])
                losses[:count, rows] = self.of_rows(rows).loss_by(errors)(distinct.points[:count, :, rows])
            return distinct.to_all(losses)

        return loss

    @property
    def _of_weight(self) -> bool:
        """True if the left operand is a matrix, or a stack of matrices."""
        return self.left.ndim == 2 + self.stacked

    @property
    def _has_own_rows(self) -> bool:
        return self._of_weight and self.own_dims == tuple(range(self.left.ndim - 1)) and self.mask is None

    @property
    def _summed_dims(self) -> list[int]:
        """The dimensions of the operand, except its columns, that losses are summed over."""
        return [dim for dim in range(self.left.ndim - 1) if dim not in self.own_dims]

    def _score(self, delta: Tensor) -> Tensor:
        if self.mask is not None:
            delta.mul_(self.mask)
        return self.form.losses(delta, self.own_dims)


class OwnError:
    """The squared error of quantizing a sample itself, from one sort and prefix sums: O(levels log T) per candidate.

    sample: (G, T); a large one is thinned (`thin`, with `stack`).
    """

    def __init__(self, sample: Tensor, stack: int = 1):
        sample = thin(sample, stack)
        self.sorted = ascending(sample).double().contiguous()
        self.sums, self.squares = self.sorted.new_zeros(2, len(sample), sample.shape[1] + 1)
        torch.cumsum(self.sorted, 1, out=self.sums[:, 1:])
        torch.cumsum(self.sorted.square(), 1, out=self.squares[:, 1:])

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
            return torch.cat([self.loss(*chunk) for chunk in chunks])
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
