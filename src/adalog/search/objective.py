"""What a candidate costs: the error of a product's output when one operand is quantized, or an operand's own error.

Every site is a product left @ right: a linear's activation and weight, a convolution's patches and kernel, attention's
Q K^T and A V. With the other operand already quantized, and D = Q(left) - left,

    ||Q(left) right_hat - left right||^2 = ||D right_hat + left (right_hat - right)||^2        (the error form)

so nothing large cancels, and biases and offsets drop out. Swapping and transposing the operands gives the other search.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from adalog.device import chunk_elements, multiplies_bfloat16
from adalog.quantizers import at_least_float32
from adalog.search.fused import sums

# Of a sample about so many values, evenly spread, are sorted, but at least so many of each row.
SORTED_ELEMENTS, _SORTED_OF_ROW = 1 << 18, 1 << 12
# A rough loss looks at so many elements of each group, if those are rows enough.
_ROUGH_ELEMENTS = 3 << 15
# A product with fewer columns takes less time than rounding its operand to bfloat16.
_NARROW = 32

Candidates = Callable[[Tensor], Tensor]  # points (k, P, *groups) -> the quantized left operand (k, *left.shape)
Errors = Callable[[Tensor, torch.dtype], Tensor]  # likewise, and a type -> what quantizing adds to it, in this type


@dataclass(frozen=True)
class ProductError:
    """The output error of a product as a function of its left operand's quantizer (Sec. 3.4, Algorithm 1's loss).

    left: (*batch, T, I). base: left @ (right_hat - right), times right_hat^T where the Gram matrix is cheaper (`gram`).
    factor: right_hat (*batch, I, O), or right_hat right_hat^T (*batch, I, I). keep: the dimensions of `left` that keep
    a loss of their own (rows of a weight, heads); the error is summed over all others.
    """

    left: Tensor
    factor: Tensor
    base: Tensor
    constant: Tensor
    gram: bool
    keep: tuple[int, ...]
    mask: Tensor | None = None
    alike: bool = True

    @staticmethod
    def of(
        left: Tensor,
        right: Tensor,
        right_hat: Tensor,
        keep: Sequence[int] = (),
        mask: Tensor | None = None,
        alike: bool = True,
        gram: bool | None = None,
    ) -> "ProductError":
        """mask: 1 where an element of `left` is quantized, 0 where it is a convolution's padding; as `left`. alike:
        whether its rows are tokens, of which some can stand for all. gram: whether by the Gram matrix, as it is
        where that is cheaper (None); the losses of a sample are then all too large by one constant."""
        gram = right.shape[-1] > left.shape[-1] if gram is None else gram
        kept = tuple(keep)
        left, right, right_hat = (at_least_float32(value) for value in (left, right, right_hat))  # squares overflow
        base = left @ (right_hat - right)
        constant = _total(base.square(), kept)
        factor = right_hat
        if gram:
            transposed = right_hat.transpose(-1, -2)
            base, factor = base @ transposed, right_hat @ transposed
        return ProductError(left, factor, base, constant, gram, kept, mask, alike)

    def fast(self) -> "ProductError":
        """With products in bfloat16 where the device has them: each rounds by 2**-9 at most, which sums even out."""
        able = self.factor.dtype == torch.float32 and multiplies_bfloat16(self.factor.device)
        if self.factor.shape[-1] < _NARROW or not able:
            return self
        return replace(self, factor=self.factor.bfloat16())

    def sample(self, rows: int) -> "ProductError":
        """Of about `rows` tokens a loss, or as many as make `_ROUGH_ELEMENTS`, evenly spread; itself where all are few.

        Tokens are the rows of the operand, or the columns of the product where the rows are channels, which are not
        alike: what the largest of them do decides.
        """
        *_, length, width = self.left.shape
        kept = math.prod(self.left.shape[dim] for dim in self.keep)
        if not self.alike:
            columns = self.factor.shape[-1]
            stride = min(self.left[..., 0, 0].numel() // kept * columns // max(rows, 1), columns // 16)
            return self if self.gram or stride < 2 or self.left.ndim == 2 else self._columns(stride)
        summed = [dim for dim in range(self.left.ndim - 1) if dim not in self.keep]
        stride = self.left[..., 0].numel() // kept // max(rows, _ROUGH_ELEMENTS // width)
        if stride < 2 or self.left.ndim - 2 not in summed:
            return self
        sparse = coprime(max(1, min(stride, length // 16)), length)  # where rows are short some windows are left out
        some = self._every(summed[0], stride // sparse) if len(summed) > 1 and stride // sparse > 1 else self
        return some._rows(sparse)

    def _columns(self, stride: int) -> "ProductError":
        """Of every `stride`-th column of the product."""
        factor, base = (value[..., ::stride].contiguous() for value in (self.factor, self.base))
        return replace(self, factor=factor, base=base)

    def _every(self, dim: int, stride: int) -> "ProductError":
        """Of every `stride`-th index, or so, of a dimension that the operands share."""
        stride = coprime(stride, self.left.shape[dim])
        take = (slice(None),) * dim + (slice(None, None, stride),)
        mask = None if self.mask is None else self.mask[take]
        return replace(self, left=self.left[take], factor=self.factor[take], base=self.base[take], mask=mask)

    def _rows(self, stride: int) -> "ProductError":
        """Of every `stride`-th row, the same count from each matrix; counted through all of them, so that the first
        row is another one each time."""
        *lead, length, _ = self.left.shape
        start = (torch.arange(math.prod(lead), device=self.left.device) * -length) % stride
        row = start[:, None] + stride * torch.arange(length // stride, device=self.left.device)
        row = row.view(*lead, -1, 1)

        def take(values: Tensor) -> Tensor:
            return values.gather(-2, row.expand(*row.shape[:-1], values.shape[-1]))

        mask = None if self.mask is None else take(self.mask)
        return replace(self, left=take(self.left), base=take(self.base), mask=mask)

    def parts(self) -> "list[ProductError]":
        """The same error as the sum over slices of the first dimension that is summed over, where it is large."""
        summed = [dim for dim in range(self.left.ndim - 1) if dim not in self.keep]
        count = -(-self.left.numel() // (2 * chunk_elements(self.left.device)))
        if count == 1 or not summed:
            return [self]
        dim = summed[0]
        shared = dim >= self.factor.ndim - 2  # the rows of a matrix product, which the factor knows nothing of
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
        """The errors of slices of the rows, where those keep losses of their own and are many: of a weight."""
        if self.keep != (0,) or self.left.ndim != 2 or self.mask is not None:
            return [self]
        count = max(1, self.left.numel() // chunk_elements(self.left.device))
        size = -(-len(self.left) // count)
        pieces = zip(self.left.split(size), self.base.split(size), self.constant.split(size), strict=True)
        return [replace(self, left=left, base=base, constant=constant) for left, base, constant in pieces]

    def loss(self, candidates: Candidates, points: Tensor) -> Tensor:
        """points (K, P, *groups) -> squared output error (K, *groups)."""
        return self.loss_of(lambda part, dtype: candidates(part).sub_(self.left).to(dtype), points)

    def loss_of(self, errors: Errors, points: Tensor) -> Tensor:
        """As `loss`, of candidates that are known by their errors."""
        chunk = max(1, chunk_elements(self.left.device) // self.left.numel())
        return torch.cat([self._score(errors(part, self.factor.dtype)) for part in points.split(chunk)])

    def loss_by(self, errors: Callable[[Tensor], Errors]) -> Callable[[Tensor], Tensor]:
        """As `loss`, of candidates that are known by what they add to given values, slice by slice (`parts`)."""
        parts = [(part, errors(part.left)) for part in self.parts()]

        def loss(points: Tensor) -> Tensor:
            first, *others = (part.loss_of(added, points) for part, added in parts)
            return sum(others, start=first)

        return loss

    def _score(self, delta: Tensor) -> Tensor:
        if self.mask is not None:
            delta.mul_(self.mask)
        total = sums(delta @ self.factor, self.base, delta if self.gram else None, self.keep)
        return total + self.constant if self.gram else total


def _total(values: Tensor, keep: tuple[int, ...]) -> Tensor:
    """The sum over all dimensions but the kept ones."""
    dims = [dim for dim in range(values.ndim) if dim not in keep]
    return values.sum(dims) if dims else values


class OwnError:
    """The squared error of quantizing a sample itself, from one sort and prefix sums: O(levels log T) a candidate.

    sample: (G, T), one row a group, of which `thinned` leaves some.
    """

    def __init__(self, sample: Tensor):
        sample = thinned(sample)
        self.sorted = sample.double().sort(dim=1).values.contiguous()
        zero = self.sorted.new_zeros(len(sample), 1)
        self.sums = torch.cat([zero, self.sorted.cumsum(1)], 1)
        self.squares = torch.cat([zero, self.sorted.square().cumsum(1)], 1)

    def uniform_loss(self, scale: Tensor, zero_point: Tensor, bits: int) -> Tensor:
        """scale, zero_point (K, *groups), of uniform quantizers -> (K, *groups)."""
        shape = scale.shape
        scale, zero_point = (value.double().reshape(shape[0], -1, 1) for value in (scale, zero_point))
        code = torch.arange(2**bits, dtype=torch.float64, device=scale.device)
        return self.loss(scale * (code - zero_point), scale * (code[:-1] + 0.5 - zero_point)).view(shape)

    def loss(self, levels: Tensor, thresholds: Tensor) -> Tensor:
        """levels (K, G, L) ascending, thresholds (K, G, L - 1) ascending -> (K, G)."""
        count, groups, size = levels.shape
        chunk = max(1, 4 * chunk_elements(levels.device) // (groups * size))
        if count > chunk:
            parts = zip(levels.split(chunk), thresholds.split(chunk), strict=True)
            return torch.cat([self.loss(*part) for part in parts])
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


def thinned(sample: Tensor) -> Tensor:
    """About SORTED_ELEMENTS values of a sample (G, T), evenly spread over each row; all of a smaller one."""
    size = sample.shape[1]
    wanted = max(SORTED_ELEMENTS // len(sample), _SORTED_OF_ROW)
    return sample[:, :: coprime(max(1, size // wanted), size)]


def coprime(stride: int, size: int) -> int:
    """The least stride from this one on that shares no factor with the size, and so meets every column of a grid."""
    while math.gcd(stride, size) > 1:
        stride += 1
    return stride


def quantiles(sample: Tensor, fractions: tuple[float, ...]) -> list[Tensor]:
    """Per row, by linear interpolation; of large samples the extremes are exact, the rest by what `thinned` leaves."""
    ordered = thinned(sample).sort(dim=1).values
    ends = {0.0: sample.amin(dim=1), 1.0: sample.amax(dim=1)}
    result = []
    for fraction in fractions:
        if fraction in ends:
            result.append(ends[fraction])
            continue
        position = fraction * (ordered.shape[1] - 1)
        below = int(position)
        above = min(below + 1, ordered.shape[1] - 1)
        result.append(torch.lerp(ordered[:, below], ordered[:, above], position - below))
    return result
