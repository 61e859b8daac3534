"""Forms of a product's error: formulas for the loss of an operand's quantization error, exact or faster.

A product left @ right has rows e of Q(left) - left, and the quantized right operand W = right_hat. With r the row of
left @ (right_hat - right), the loss of a row is ||e W + r||^2 (`ExactForm`). Multiplied out, it needs only the Gram
matrix G = W W^T (`GramForm`). A root of G (`GramForm.root`) or its leading part (`LeadingForm`) is off by one constant
in each group, which moves no candidate. Each form also serves as the loss of some of the rows (`Sample`).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from adalog.device import multiplies_bfloat16, waits_for_launches
from adalog.quantizers.fused import products, sums
from adalog.quantizers.quantiles import coprime

# A product with fewer columns than this takes less time than the rounding of its operand to bfloat16.
_NARROW = 16
# `LeadingForm` has one direction per `_COLUMNS_OF_DIRECTION` columns, up to `_DIRECTIONS`.
_COLUMNS_OF_DIRECTION, _DIRECTIONS = 3, 512
# A large Gram matrix is computed in panels of at least `_PANEL` rows, and in at most `_PANELS` panels.
_PANEL, _PANELS = 64, 8
_PANEL_OF_ACCELERATOR = 1024  # with fewer rows, launches cost more than products

Change = Callable[[Tensor], Tensor]  # takes some rows, matrices or groups of a tensor
Same = TypeVar("Same", bound="Form")


def same(values: Tensor) -> Tensor:
    return values


@dataclass(frozen=True)
class Form(ABC):
    """The losses of errors, (k, *groups) for errors (k, *batch, T, I), as a sum over the rows of each group.

    factor: (*batch, I, F), by which errors are multiplied. Errors must have its dtype.
    base: (*batch, T, F), which is added to the product.
    """

    factor: Tensor
    base: Tensor

    @abstractmethod
    def losses(self, error: Tensor, own_dims: Sequence[int]) -> Tensor:
        """Return the losses. own_dims: the dimensions of the operand that have losses of their own."""

    def map(self: Same, rows: Change = same, matrices: Change = same, groups: Change = same) -> Same:
        """Return the form of a part of the operand.

        rows, matrices, groups: applied to all tensors that have the operand's rows (*batch, T, F), to those that all
            rows of a matrix share (*batch, I, F), and to those with one number per group.
        """
        return replace(self, factor=matrices(self.factor), base=rows(self.base))

    def in_bfloat16(self) -> "Form":
        """Return the form with products in bfloat16; its losses may be off by one constant in each group.

        Rounding changes each factor by a share of 2**-9 at most, and sums average that out.
        """
        return replace(self, factor=self.factor.bfloat16())


@dataclass(frozen=True)
class ExactForm(Form):
    """The loss ||e W + r||^2, with factor = W and base = r."""

    @staticmethod
    def of(left: Tensor, right: Tensor, right_hat: Tensor) -> "ExactForm":
        return ExactForm(right_hat, error_base(left, right, right_hat))

    def losses(self, error: Tensor, own_dims: Sequence[int]) -> Tensor:
        return sums(products(error, self.factor), self.base, None, own_dims)

    def columns(self, stride: int) -> "ExactForm":
        """Return the loss of every `stride`-th column of the product."""
        return ExactForm(*(value[..., ::stride].contiguous() for value in (self.factor, self.base)))


@dataclass(frozen=True)
class GramForm(Form):
    """The loss e G e^T + 2 b e^T + c, with factor = G = W W^T, base = b = r W^T, and constant = c, the sum of ||r||^2.

    It equals `ExactForm` and takes less time if W has more columns than rows. c stays that of all rows in a part of
    them.
    """

    constant: Tensor

    @staticmethod
    def of(left: Tensor, right: Tensor, right_hat: Tensor, own_dims: tuple[int, ...]) -> "GramForm":
        if left.shape[-2] < left.shape[-1]:
            rest = error_base(left, right, right_hat)
            return GramForm(gram_matrix(right_hat), rest @ right_hat.mT, _total(rest.square(), own_dims))
        error, wide = right_hat - right, left.double()  # few columns: multiply right operands first
        power = gram_matrix(error).double()
        constant = _total((wide @ power).mul_(wide), own_dims).to(left.dtype)  # large values of `left` may cancel
        return GramForm(gram_matrix(right_hat), left @ (error @ right_hat.mT), constant)

    def losses(self, error: Tensor, own_dims: Sequence[int]) -> Tensor:
        return sums(products(error, self.factor), self.base, error, own_dims) + self.constant

    def map(self, rows: Change = same, matrices: Change = same, groups: Change = same) -> "GramForm":
        return replace(super().map(rows, matrices), constant=groups(self.constant))

    def in_bfloat16(self) -> "Form":
        return self.root().in_bfloat16()

    def root(self) -> ExactForm:
        """Return the loss ||e F + b F^-T||^2 with a root of the Gram matrix, G = F F^T, by Cholesky's factorization.

        Its products may be rounded to bfloat16. If G itself were rounded, it might have directions of negative power,
        along which large errors would seem to reduce the loss.

        Many equal rows, as in blank images, leave more rounding noise in G than the factorization tolerates. The root
        is then made of the eigenvectors of G, with no less power than the rounding noise.
        """
        power, number, base = self.factor.double(), torch.finfo(self.factor.dtype), self.base
        ones = torch.eye(power.shape[-1], dtype=power.dtype, device=power.device)
        rounding = power.diagonal(dim1=-2, dim2=-1).amax(-1) * (number.eps * len(ones)) + number.tiny  # in G's products
        root, failed = torch.linalg.cholesky_ex(power + rounding[..., None, None] * ones)
        if failed.any():
            powers, turn = torch.linalg.eigh(power)
            length = torch.maximum(powers, rounding[..., None]).sqrt()[..., None, :]
            root, base = turn * length, base @ (turn / length).to(base.dtype)
        elif base.shape[-2] < len(ones):
            base = torch.linalg.solve_triangular(root.mT, base.double(), upper=True, left=False).to(base.dtype)
        else:
            base = base @ torch.linalg.solve_triangular(root.mT, ones, upper=True).to(base.dtype)
        return ExactForm(root.to(self.factor.dtype), base)


@dataclass(frozen=True)
class LeadingForm(Form):
    """The loss ||e F + b F^+T||^2 + sum_i d_i e_i^2 + 2 (b - b F^+T F^T) e^T, with F the leading directions of G.

    factor: F, with F F^T close to G. base: b F^+T.
    diagonal: (*batch, 1, I), d, the diagonal of G - F F^T. Errors of different columns are nearly independent, so the
        remainder of G nearly cancels except there.
    remainder: (*batch, T, I), the part of b outside F, so that what is linear in e stays exact.
    """

    diagonal: Tensor
    remainder: Tensor

    @staticmethod
    def of(gram: GramForm) -> "LeadingForm":
        """Find the leading directions of a Gram matrix by one step of subspace iteration."""
        matrix, columns = gram.factor, gram.factor.shape[-1]
        count, drawing = min(columns // _COLUMNS_OF_DIRECTION, _DIRECTIONS), torch.Generator("cpu").manual_seed(0)
        drawn = torch.randn(columns, count, generator=drawing, dtype=matrix.dtype, device="cpu").to(matrix.device)
        basis = torch.linalg.qr(matrix @ torch.linalg.qr(matrix @ drawn).Q).Q
        # In float64, since LAPACK's float32 may not converge if nearly all inputs are zero.
        power, turn = (value.to(matrix.dtype) for value in torch.linalg.eigh((basis.mT @ matrix @ basis).double()))
        directions, number = basis @ turn, torch.finfo(power.dtype)
        length = torch.maximum(power, (power[..., -1:] * number.eps).clamp(min=number.tiny)).sqrt().unsqueeze(-2)
        factor, base = directions * length, (gram.base @ directions) / length
        diagonal = (matrix.diagonal(dim1=-2, dim2=-1) - factor.square().sum(-1)).clamp(min=0).unsqueeze(-2)
        return LeadingForm(factor.contiguous(), base, diagonal, gram.base - base @ factor.mT)

    def losses(self, error: Tensor, own_dims: Sequence[int]) -> Tensor:
        total = sums(products(error, self.factor), self.base, None, own_dims)
        total += sums(error * self.diagonal, self.remainder, error, own_dims)
        return total

    def map(self, rows: Change = same, matrices: Change = same, groups: Change = same) -> "LeadingForm":
        part = super().map(rows, matrices)
        return replace(part, diagonal=matrices(self.diagonal), remainder=rows(self.remainder))

    def in_bfloat16(self) -> "LeadingForm":
        return replace(self, factor=self.factor.bfloat16(), diagonal=self.diagonal.bfloat16())


@dataclass(frozen=True)
class Sample:
    """Some rows of an operand. Its loss is the sum of the losses of these rows only.

    matrices: the index of the matrices (*batch) that the sample uses.
    rows: (*batch, n, 1), the rows that it uses in each of them.
    """

    matrices: tuple[slice, ...]
    rows: Tensor

    @staticmethod
    def every(stride: int, left: Tensor, summed: Sequence[int]) -> "Sample":
        """Return a sample of about every `stride`-th row of the operand, counted on from matrix to matrix.

        If a matrix has few rows, the sample also skips whole matrices along the first of the summed dimensions.
        """
        *lead, length, _ = left.shape
        sparse, matrices = coprime(max(1, min(stride, length // 16)), length), tuple[slice, ...]()
        if len(summed) > 1 and stride // sparse > 1:
            dim = summed[0]
            skip = coprime(stride // sparse, lead[dim])
            matrices = (slice(None),) * dim + (slice(None, None, skip),)
            lead[dim] = -(-lead[dim] // skip)
        start = (torch.arange(math.prod(lead), device=left.device) * -length) % sparse
        row = start[:, None] + sparse * torch.arange(length // sparse, device=left.device)
        return Sample(matrices, row.view(*lead, -1, 1))

    def of_matrices(self, values: Tensor) -> Tensor:
        """Return the values (*batch, I, F) of the matrices in the sample."""
        return values[self.matrices] if self.matrices else values

    def of_rows(self, values: Tensor) -> Tensor:
        """Return the values (*batch, T, F) of the rows in the sample."""
        values = self.of_matrices(values)
        return values.gather(-2, self.rows.expand(*self.rows.shape[:-1], values.shape[-1]))


def gains_from_bfloat16(factor: Tensor) -> bool:
    """Return True if a product with this right factor (..., I, O) takes less time in bfloat16."""
    fits = factor.dtype == torch.float32 and multiplies_bfloat16(factor.device)
    return fits and factor.shape[-1] >= _NARROW


def gram_matrix(rows: Tensor) -> Tensor:
    """Return the products of all rows (..., R, T) with each other, each once: (..., R, R)."""
    count = rows.shape[-2]
    size = max(_PANEL_OF_ACCELERATOR if waits_for_launches(rows.device) else _PANEL, -(-count // _PANELS))
    if count <= size:
        return rows @ rows.mT
    matrix = rows.new_empty((*rows.shape[:-1], count))
    for start in range(0, count, size):
        end = min(start + size, count)
        panel = rows[..., start:end, :] @ rows[..., :end, :].mT
        matrix[..., start:end, :end] = panel
        matrix[..., :start, start:end] = panel[..., :start].mT
    return matrix


def error_base(left: Tensor, right: Tensor, right_hat: Tensor) -> Tensor:
    """Return left @ (right_hat - right), the output error that the right operand alone causes, for the error form."""
    return left @ (right_hat - right)


def _total(values: Tensor, own_dims: tuple[int, ...]) -> Tensor:
    """Return the sum over all dimensions except `own_dims`."""
    dims = [dim for dim in range(values.ndim) if dim not in own_dims]
    return values.sum(dims) if dims else values
