"""Multiply whole numbers with operators of ONNX."""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from adalog.errors import ArtifactError
from adalog.export.operands import Digit, OnnxOperand, fits_bytes
from adalog.export.operators import matmul_shape, operator
from adalog.quantizers import UniformQuantizer
from adalog.runtime.reference import INT32, IntegerSite

_EXACT = 2**24  # float32 holds every whole number below this
_PAIRS = 2**15  # engines without VNNI add two products of an unsigned and a signed byte in 16 bits
_BASES = ((0, 0), (256, 0), (0, 16), (256, 16), (16, 16))  # bases of the digits of floats (left, right); 0: no digits


@dataclass(frozen=True)
class StoredWeight:
    """A weight's bytes as the file holds them: value = code - zero_point, cast to the dtype of the value.

    codes: whole numbers in int64, from -8 to 7 if four bits are enough. zero_point: broadcasts to the codes; None is 0.
    """

    codes: Tensor
    zero_point: Tensor | None = None


@dataclass(frozen=True)
class ProductTrace:
    """The operands of a site's product, and the names of its results in the file, one per pair of parts.

    scales: the value of one unit of each result, or None if the results are the accumulators themselves.
    """

    left: tuple[tuple[Digit, ...], ...]
    right: tuple[tuple[Digit, ...], ...] | None
    results: tuple[str, ...]
    scales: tuple[Tensor, ...] | None


class OnnxProduct(nn.Module):
    """The product of a site. mixed: write matrices of bytes as quantized floats, otherwise as integers."""

    def __init__(self, site: IntegerSite, *, mixed: bool):
        super().__init__()
        self.site, self.mixed = site, mixed
        spans = [most - least for least, most in site.right.limits()]
        fits = fits_bytes(site.left) and (fits_bytes(site.right) if site.weight is None else max(spans) <= 255)
        self.bytes = site.geometry is None and fits and site.terms * 255 * 255 < INT32
        self.signed, self.bases = False, (0, 0)
        if self.bytes:
            self.signed = 2 * max(map(_raw, site.left.limits())) * max(span // 2 + 1 for span in spans) < _PAIRS
        else:
            self.bases = _bases(site)
        for index, scale in enumerate(scales_of(site)):
            self.register_buffer(f"scale_{index}", scale)
        self.stored_weights: dict[str, StoredWeight] = {}
        if site.weight is not None:
            self._store(site)
        self.traced: ProductTrace | None = None

    # --- what the file stores ---

    def _store(self, site: IntegerSite) -> None:
        """Store the weight as codes minus half of their range, so that codes of four bits fit in signed four bits."""
        assert site.weight is not None
        codes, zero = site.right.integer(site.weight), torch.zeros(1, dtype=torch.int64)
        if isinstance(site.right, UniformQuantizer):
            half = 2 ** (site.right.bits - 1)
            codes, zero = site.weight.long() - half, site.right.zero_point.long() - half
        ones = [1] * (codes.ndim - 1)
        zero = zero.reshape(-1, *ones).expand(len(codes), *ones)
        if not self.bytes:
            if site.geometry is None:
                codes, zero = codes.t(), zero.t()
            integers = (codes - zero).float().contiguous()
            for place, factor in enumerate(_factors(self.bases[1])):
                self.register_buffer(f"weight_{place}", _digit(integers, factor, self.bases[1]))
            if not self.bases[1]:
                self.stored_weights["weight_0"] = StoredWeight(codes, zero if bool(zero.any()) else None)
            return
        integers = codes - zero
        largest = int(integers.abs().max())
        if largest < 128 and 2 * max(map(_raw, site.left.limits())) * largest < _PAIRS:
            # OpenVINO multiplies bytes only with weights that have no zero point.
            self.stored_weights["weight_0"] = StoredWeight(codes.t(), zero.t() if bool(zero.any()) else None)
            codes, zero, self.signed = integers, torch.zeros_like(zero), True
        else:
            if not self.signed:
                codes, zero = codes + 128, zero + 128
            self.stored_weights["weight_0"] = StoredWeight(codes.t())
        dtype = torch.int8 if self.signed else torch.uint8
        self.weight_0 = nn.Buffer(codes.t().contiguous().to(dtype))
        self.zero_point = nn.Buffer(zero.flatten().to(dtype))
        self.has_zero_point = bool(zero.any())
        if self.mixed:
            self.unit = nn.Buffer(site.right.units()[0].flatten().expand(len(codes)).float().contiguous())

    # --- the product ---

    def forward(self, left: OnnxOperand, right: OnnxOperand | None = None, bias: Tensor | None = None) -> Tensor:
        site = self.site
        if self.bytes:
            lefts = left.bytes(signed=False)
            rights = None if right is None else right.bytes(signed=self.signed)
        else:
            lefts, rights = left.floats(), None if right is None else right.floats()
        sums = self._sums(lefts, self._weights() if rights is None else rights)
        names = tuple(f"{site.name}.accumulators.{index}" for index in range(len(sums)))
        scales = tuple(self.get_buffer(f"scale_{index}") for index in range(len(sums))) if self._has_units else None
        rights_read = None if rights is None else tuple(map(tuple, rights))
        self.traced = ProductTrace(tuple(map(tuple, lefts)), rights_read, names, scales)
        total = None
        for index, summand in enumerate(sums):
            part = summand
            if not self._has_units:
                part = summand.to(torch.float32) * self.get_buffer(f"scale_{index}")
            total = part if total is None else total + part
        assert total is not None
        return site.add_bias(total, bias)

    @property
    def _has_units(self) -> bool:
        """True if the quantized floats already contain the units of both operands."""
        units = [*self.site.left.units(), *([] if self.site.weight is not None else self.site.right.units())]
        return self.bytes and self.mixed and all(unit.numel() == 1 for unit in units)

    def _weights(self) -> list[list[Digit]]:
        """Return the stored weight as the right side of the product."""
        names = [(f"weight_{place}", factor) for place, factor in enumerate(_factors(self.bases[1]))]
        return [[Digit(f"{self.site.name}.{name}", self.get_buffer(name), factor) for name, factor in names]]

    def _sums(self, lefts: list[list[Digit]], rights: list[list[Digit]]) -> list[Tensor]:
        """Return the sums of each pair of parts: int32, int64, whole numbers in float32, or dequantized floats."""
        at, floats = self.site.name, self.bytes and self.mixed
        if not self.bytes:
            lefts = self._cut(lefts, 0)
            rights = rights if self.site.weight is not None else self._cut(rights, 1)
        sums: list[Tensor] = []
        for i, j in itertools.product(range(len(lefts)), range(len(rights))):
            name = f"{at}.accumulators.{len(sums)}"
            pairs = list(itertools.product(lefts[i], rights[j]))
            total: Tensor | None = None
            for number, (x, y) in enumerate(pairs, 1):
                term = self._multiply(x, y, name if len(pairs) == 1 else "", i, j)
                if len(pairs) > 1 and not floats:
                    term = term.to(torch.int64 if self.site.bits > 32 else torch.int32)
                    factor = x.factor * y.factor
                    term = term if factor == 1 else operator("Mul", [term, term.new_tensor(factor)], at=at)
                last = name if number == len(pairs) else ""
                total = term if total is None else operator("Add", [total, term], at=at, result=last)
            assert total is not None
            sums.append(total)
        return sums

    def _multiply(self, left: Digit, right: Digit, result: str, i: int, j: int) -> Tensor:
        """Write the product of two digits, which belong to the parts i and j of the operands."""
        site, at = self.site, self.site.name
        x, y = left.value, right.value
        if site.geometry is not None:
            return self._convolve(x, y, result)
        if self.bytes and self.mixed:  # as floats that engines recognize as quantized
            x = self._float(left, site.left.units()[i] if self._has_units else None)
            y = self._float(right, site.right.units()[j] if self._has_units else None)
        shape = matmul_shape(x, y)
        if self.mixed or not self.bytes:
            return operator("MatMul", [x, y], at=at, result=result, shape=shape)
        zeros = [x.new_tensor(left.zero_point)]
        if site.weight is None:
            zeros.append(y.new_tensor(right.zero_point))
        elif self.has_zero_point:
            zeros.append(self.zero_point)
        return operator("MatMulInteger", [x, y, *zeros], at=at, result=result, dtype=torch.int32, shape=shape)

    def _convolve(self, x: Tensor, weight: Tensor, result: str) -> Tensor:
        site = self.site
        sums = convolve(site, x, weight, result if self.mixed else "")
        if self.mixed:
            return sums
        # Without the cast, an engine may multiply the weights by the scales, so that the sums are not whole numbers.
        return operator("Cast", [sums], at=site.name, result=result, dtype=torch.int32, to=6)

    def _float(self, digit: Digit, unit: Tensor | None) -> Tensor:
        """Dequantize the bytes of a digit. unit: the unit of its part, or None if the product is scaled afterwards."""
        stored = self.site.weight is not None and digit.name.startswith(f"{self.site.name}.weight_")
        if stored and unit is not None:
            scale = self.get_buffer("unit")
        else:
            factor = digit.factor * (1.0 if unit is None else float(unit))
            scale = torch.full((len(self.zero_point),) if stored else (), factor, device=digit.value.device)
        zero = self.zero_point if stored else digit.value.new_tensor(digit.zero_point)
        attributes: dict[str, Any] = {"axis": 1} if stored else {}
        zeros = [zero] if not stored or self.has_zero_point else []
        return operator(
            "DequantizeLinear", [digit.value, scale, *zeros], at=self.site.name, dtype=torch.float32, **attributes
        )

    def _cut(self, parts: list[list[Digit]], side: int) -> list[list[Digit]]:
        """Cut whole numbers in float32 into digits of the base of this side."""
        base = self.bases[side]
        if not base:
            return parts
        parts_cut = []
        for (digit,) in parts:
            at = self.site.name
            high = operator("Mul", [digit.value, digit.value.new_tensor(1 / base)], at=at)
            high = operator("Floor", [high], at=at)
            low = operator("Mul", [high, digit.value.new_tensor(float(base))], at=at)
            low = operator("Sub", [digit.value, low], at=at)
            parts_cut.append([Digit("", high, base), Digit("", low)])
        return parts_cut


def scales_of(site: IntegerSite) -> list[Tensor]:
    """Return the scale of each pair of parts, in a shape that broadcasts to the product's results."""
    if site.geometry is None:
        return [scale.clone() for scale in site.scales]
    assert site.weight is not None
    shape = site.groups, 1, len(site.weight) // site.groups
    return [scale.expand(shape).reshape(-1, 1, 1).contiguous() for scale in site.scales]


def convolve(site: IntegerSite, x: Tensor, weight: Tensor, result: str) -> Tensor:
    """Write the operator Conv of a site for an image x."""
    kernel, stride, padding, dilation = site.window
    return operator(
        "Conv",
        [x, weight],
        at=site.name,
        result=result,
        shape=[x.shape[0], len(weight), *site.sizes(x.shape)],
        strides=list(stride),
        pads=[*padding, *padding],
        dilations=list(dilation),
        group=site.groups,
        kernel_shape=list(kernel),
    )


def _raw(limits: tuple[int, int]) -> int:
    """Return the largest byte of an operand with these limits."""
    return min(255, limits[1] - limits[0])


def _factors(base: int) -> tuple[int, ...]:
    return (base, 1) if base else (1,)


def _digit(integers: Tensor, factor: int, base: int) -> Tensor:
    """Return the digit of whole numbers in float32 that has this factor."""
    if not base:
        return integers
    high = (integers / base).floor()
    return high if factor == base else integers - high * base


def _bases(site: IntegerSite) -> tuple[int, int]:
    """Choose the bases of the digits of both sides so that float32 holds every sum; raise ArtifactError if none fit."""
    sides = [max(max(-least, most) for least, most in operand.limits()) for operand in (site.left, site.right)]
    for bases in _BASES:
        largest = [
            max(base - 1, math.ceil(most / base)) if base else most for base, most in zip(bases, sides, strict=True)
        ]
        if site.terms * math.prod(largest) < _EXACT:
            return bases
    raise ArtifactError(
        f"site {site.name} sums {site.terms:,} products of up to {math.prod(sides):,}, which float32 cannot hold "
        "exactly, so adalog cannot export it to ONNX: use fewer bits"
    )
