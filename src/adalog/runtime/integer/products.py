"""Multiply digits with exact sums: signed bytes for stored weights, floats for many small matrices."""

import functools
import math
import platform
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from adalog.errors import ArtifactError
from adalog.runtime.integer.digits import Digits, multiplies_rows
from adalog.runtime.integer.memory import CHUNK, scratch
from adalog.runtime.reference import INT32, IntegerSite, finish

_EXACT = {torch.float32: 2**24, torch.float64: 2**53}  # each type holds every whole number below this
# True if a float convolution sums plain products. Elsewhere it may be transformed (Winograd), which rounds.
_SUMS_PLAINLY = torch.backends.mkldnn.is_available() and platform.machine().lower() in ("x86_64", "amd64")


def product(site: IntegerSite) -> "RowProduct | BatchedProduct":
    """Return the function that multiplies the digits of a site's operands, which `DigitEncoder` returns."""
    return RowProduct(site) if multiplies_rows(site) else BatchedProduct(site)


@functools.cache
def multiplies_bytes(device: torch.device) -> bool:
    """Return True if `torch._int_mm` exists on the device and is exact on extreme bytes, so that no sum saturates."""
    left = torch.full((32, 64), -128, dtype=torch.int8, device=device)
    left[::2] = 127
    right = torch.full((64, 32), -128, dtype=torch.int8, device=device)
    right[:, ::2] = 127
    try:
        result = torch._int_mm(left, right)
    except (RuntimeError, NotImplementedError):
        return False
    return torch.equal(result.cpu().double(), left.cpu().double() @ right.cpu().double())


def multiply_bytes(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """Compute left @ right for int8 (T, I) and (I, O), as int32 (T, O). out: memory for it, if a CPU computes it."""
    if not multiplies_bytes(left.device):
        dtype = torch.float32 if left.shape[1] * 2**14 < _EXACT[torch.float32] else torch.float64
        return (left.to(dtype) @ right.to(dtype)).to(torch.int32)
    if left.shape[1] == 1:  # PyTorch 2.12 gets this wrong on the CPU
        left, right = torch.nn.functional.pad(left, (0, 1)), torch.nn.functional.pad(right, (0, 0, 0, 1))
    if left.device.type == "cpu":
        if not left.numel() or not right.numel():
            return torch.zeros(len(left), right.shape[1], dtype=torch.int32)
        return torch._int_mm(left, right, out=out)
    # cuBLAS needs more than 16 rows, and all sizes as multiples of 8.
    rows, terms, columns = len(left), left.shape[1], right.shape[1]
    left = torch.nn.functional.pad(left, (0, -terms % 8, 0, max(-rows % 8, 24 - rows)))
    right = torch.nn.functional.pad(right, (0, -columns % 8, 0, -terms % 8))
    return torch._int_mm(left, right.t().contiguous().t())[:rows, :columns]


class RowProduct:
    """The product of a site with a stored weight and one group, as a product of two matrices of signed bytes.

    columns: the number of outputs per row. nbytes: the bytes of the stored weight.
    """

    def __init__(self, site: IntegerSite):
        self.site = site
        self._left = [Digits(*limit, signed=True) for limit in site.left.limits()]
        self._weight, self._moved = self._bytes(site)
        self.nbytes = self._weight.nbytes
        self.columns = self._weight.shape[1]
        sums = self._weight.sum(0, dtype=torch.int64) + site.terms * self._moved
        largest = int(self._weight.to(torch.int16).abs().max()) if self._weight.numel() else 0
        self._constants = [digits.constant * sums for digits in self._left]
        self._has_constants = [bool(constant.any()) for constant in self._constants]
        self._has_moved = bool(self._moved.any())
        self._dtypes = []
        for digits, bound in zip(self._left, site.bounds, strict=True):
            passing = sum(digits.factors) * site.terms * 128 * largest + bound  # largest sum before the constants
            self._dtypes.append(torch.int32 if 2 * passing < INT32 else torch.int64)
        if site.terms * 2**14 >= INT32:
            raise ArtifactError(
                f"site {site.name} sums {site.terms:,} products, but 32 bits hold sums of fewer than {INT32 >> 14:,} "
                "products of bytes: the site cannot run in integers"
            )
        self._scales = [scale.reshape(-1).expand(self.columns).contiguous() for scale in site.scales]

    @staticmethod
    def _bytes(site: IntegerSite) -> tuple[Tensor, Tensor]:
        """Return the weight as signed bytes, (I, O), and the number that was subtracted per channel, (O,)."""
        weight = site.weight_integers()
        weight = weight if site.geometry is None else weight[0]
        outside = (weight.amin(0) < -128) | (weight.amax(0) > 127)
        shift = torch.where(outside, weight.amin(0) + 128, 0)
        if bool(((weight - shift) > 127).any()):
            raise ArtifactError(
                f"site {site.name} has a weight whose integers span more than a byte: use executor = 'reference'"
            )
        return (weight - shift).to(torch.int8).t().contiguous().t(), shift

    def _rows(self, left: list[Tensor]) -> list[list[Tensor]]:
        """Return the digits of each part as (T, I)."""
        site, stream = self.site, iter(left)
        parts = [[(next(stream), factor, digits) for factor in digits.factors] for digits in self._left]
        if site.geometry is None:
            return [[digit.reshape(-1, site.terms) for digit, *_ in part] for part in parts]
        # Padding is the integer 0 in every part, even in a part of ones.
        return [
            [site.rows(digit, digits.padding(factor)).reshape(-1, site.terms) for digit, factor, digits in part]
            for part in parts
        ]

    def _sums(self, part: int, rows: list[Tensor]) -> Tensor:
        """Compute the accumulators of one part, (T, O), in scratch memory if they fit in 32 bits."""
        shape = len(rows[0]), self.columns
        outs = (scratch(f"product {i}", shape, torch.int32, row.device) for i, row in enumerate(rows))
        products = [multiply_bytes(row, self._weight, out) for row, out in zip(rows, outs, strict=True)]
        digits, dtype = self._left[part], self._dtypes[part]
        total = products[0].to(dtype)
        for term, factor in zip(products[1:], digits.factors[1:], strict=True):
            total.add_(term.to(dtype), alpha=factor)
        if self._has_constants[part]:
            total.add_(self._constants[part].to(dtype))
        if self._has_moved:
            row_sums = sum(
                (row.sum(1, dtype=torch.int64) * factor for row, factor in zip(rows, digits.factors, strict=True)),
                start=torch.zeros(len(rows[0]), dtype=torch.int64, device=rows[0].device),
            )
            total.add_((row_sums[:, None] * self._moved).to(dtype))
        return total

    def accumulate(self, left: list[Tensor], right: None = None) -> list[Tensor]:
        """Return the same sums as `reference.CodeProduct.accumulate`, from digits."""
        lead = left[0].shape[:-1] if self.site.geometry is None else (len(left[0]), 1, -1)
        parts = enumerate(self._rows(left))
        return [self._sums(part, rows).to(torch.int64).reshape(*lead, self.columns) for part, rows in parts]

    def _spans(self, left: list[Tensor]) -> Iterator[tuple[slice, list[list[Tensor]]]]:
        """Yield ranges of rows and their digits for each part, so short that the accumulators stay in the cache."""
        parts = self._rows(left)
        total = len(parts[0][0])
        count = max(64, CHUNK // max(1, self.columns)) if left[0].device.type == "cpu" else max(1, total)
        for start in range(0, max(1, total), count):
            span = slice(start, min(start + count, total))
            yield span, [[row[span] for row in rows] for rows in parts]

    def outputs_by_rows(
        self, left: list[Tensor], bias: Tensor | None, result: Tensor | None = None
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yield ranges of rows and their outputs, (T, O), in `result` or in memory that the next rows overwrite."""
        dtype, device = self._scales[0].dtype, left[0].device
        for span, parts in self._spans(left):
            shape = span.stop - span.start, self.columns
            real = scratch("sums", shape, dtype, device)
            out = real if result is None else result[span]
            if result is None and len(self._scales) > 1:
                out = scratch("output", shape, dtype, device)
            for part, (scale, rows) in enumerate(zip(self._scales, parts, strict=True)):
                real.copy_(self._sums(part, rows))
                if part:
                    out.add_(real.mul_(scale))
                else:
                    torch.mul(real, scale, out=out)
            if bias is not None:
                # Not `addcmul`, which rounds only once. Accumulators are few whole numbers, so an output can lie
                # exactly between two codes of the next quantizer, and all executors must then round in the same way.
                out.add_(bias)
            yield span, out

    def __call__(self, left: list[Tensor], right: None = None, bias: Tensor | None = None) -> Tensor:
        site, shape = self.site, left[0].shape
        lead = shape[:-1] if site.geometry is None else (shape[0], math.prod(site.sizes(shape)))
        scale = self._scales[0]
        result = torch.empty(math.prod(lead), self.columns, dtype=scale.dtype, device=scale.device)
        for _ in self.outputs_by_rows(left, bias, result):
            pass
        result = result.view(*lead, self.columns)
        return result if site.geometry is None else site.image(result[:, None], shape)


class BatchedProduct:
    """The product of a site of many small matrices (attention, grouped convolutions), as whole numbers in floats.

    Floats hold all its sums exactly, so the order of summation does not matter. nbytes: the bytes of a stored weight.
    """

    def __init__(self, site: IntegerSite):
        self.site = site
        self._left, self._right = (
            [Digits(*limit, signed=False) for limit in operand.limits()] for operand in (site.left, site.right)
        )
        self._weight = None
        if site.weight is not None:
            self._weight = [digit for digits in self._right for digit in digits.split(site.weight_integers())]
        self.nbytes = sum(digit.nbytes for digit in self._weight or ())
        lefts, rights = (max(digits.largest for digits in side) for side in (self._left, self._right))
        fitting = [dtype for dtype, most in _EXACT.items() if site.terms * lefts * rights < most]
        if not fitting or max(lefts, rights) >= _EXACT[torch.float32]:
            raise ArtifactError(
                f"site {site.name} sums {site.terms:,} products up to {lefts * rights:,}, more than floats hold: the "
                "site cannot run in integers"
            )
        self._dtype = fitting[0]

    @property
    def is_single(self) -> bool:
        """True if this is a single product of two computed tensors in float32."""
        sides = (*self._left, *self._right)
        single = len(sides) == 2 and all(len(digits.factors) == 1 for digits in sides) and self._weight is None
        return single and self._dtype == self.site.scales[0].dtype == torch.float32

    def _products(self, left: list[Tensor], right: list[Tensor] | None) -> list[list[tuple[int, Tensor]]]:
        """Return the products of digits for each pair of parts, each with its factor."""
        site = self.site
        multiply: Callable[[Tensor, Tensor], Tensor] = torch.matmul
        if site.weight is not None and site.weight.shape[1] == 1 and len(site.weight) == site.groups:
            multiply = self._depthwise
        elif site.geometry is not None:
            left = [site.rows(digit) for digit in left]
        if right is None:
            assert self._weight is not None
            right = self._weight
        else:
            site.check_terms(left[0].shape[-1])
        lefts, rights = self._with_factors(self._left, left), self._with_factors(self._right, right)
        return [[(f * g, multiply(x, y)) for f, x in one for g, y in other] for one in lefts for other in rights]

    def _with_factors(self, parts: list[Digits], tensors: list[Tensor]) -> list[list[tuple[int, Tensor]]]:
        """Return the digits of each part in the type of the products, each with its factor."""
        following = iter(tensors)
        return [[(factor, next(following).to(self._dtype)) for factor in digits.factors] for digits in parts]

    def _depthwise(self, image: Tensor, weight: Tensor) -> Tensor:
        """Convolve each channel alone, (B, C, H, W), (C, taps, 1) -> (B, C, L, 1), without repeating it per tap."""
        site, (kernel, stride, padding, dilation) = self.site, self.site.window
        kernels = weight.reshape(-1, 1, *kernel)
        if _SUMS_PLAINLY and image.device.type == "cpu" and image.dtype == torch.float32:
            result = torch.conv2d(image, kernels, None, stride, padding, dilation, site.groups)
        else:
            height, width = site.sizes(image.shape)
            padded = torch.nn.functional.pad(image, (padding[1], padding[1], padding[0], padding[0]))
            result = image.new_zeros(*image.shape[:2], height, width)
            for i in range(kernels.shape[2]):
                for j in range(kernels.shape[3]):
                    window = padded[:, :, i * dilation[0] :: stride[0], j * dilation[1] :: stride[1]]
                    result.addcmul_(window[:, :, :height, :width], kernels[:, :, i, j, None])
        return result.flatten(2).unsqueeze(-1)

    def accumulate(self, left: list[Tensor], right: list[Tensor] | None = None) -> list[Tensor]:
        """Return the same sums as `reference.CodeProduct.accumulate`, from digits."""
        pairs = self._products(left, right)
        return [torch.stack([sums.long() * factor for factor, sums in products]).sum(0) for products in pairs]

    def __call__(self, left: list[Tensor], right: list[Tensor] | None = None, bias: Tensor | None = None) -> Tensor:
        sums = []
        for (_, total), *others in self._products(left, right):
            for factor, term in others:
                total.add_(term, alpha=factor)
            sums.append(total)
        if len(sums) == 1 and self.site.geometry is None and sums[0].dtype == self.site.scales[0].dtype:
            return sums[0].mul_(self.site.scales[0])
        return finish(self.site, sums, bias, left[0].shape)
