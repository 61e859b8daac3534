"""Encode values as the whole numbers that a product multiplies, with operators of ONNX.

An operand is a sum of parts (see `adalog.runtime.reference`). The integers of a part are written as bytes with a zero
point (as two bytes if they are wider than one), or as whole numbers in float32.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from adalog.errors import ArtifactError
from adalog.export.operators import BYTE_STEPS, STEPS, operator
from adalog.quantizers import LogQuantizer, Quantizer
from adalog.runtime.integer.encode import value_thresholds
from adalog.runtime.reference import IntegerSite

COMPARED_BITS = 4  # logarithmic codes of up to this many bits are found by comparing with every threshold
_FINEST = 2**14  # the most cells per octave that are tried to keep thresholds apart
_FUZZ = 0.02  # how far an engine's logarithm may be off, in cells


@dataclass(frozen=True)
class Digit:
    """Whole numbers as an engine multiplies them: a part's integers are the sum of factor * (value - zero_point).

    name: the name of the value in the file. at: the prefix of the names of the nodes that compute it; the first of
    these nodes reads the value that is encoded. operand: the encoder's name.
    """

    name: str
    value: Tensor
    factor: int = 1
    zero_point: int = 0
    at: str = ""
    operand: str = ""


class OnnxEncoder(nn.Module):
    """Encoder of values as an `OnnxOperand`. Raises ArtifactError for a quantizer that ONNX cannot express."""

    def __init__(self, quantizer: Quantizer, site: IntegerSite, name: str):
        super().__init__()
        self.name, self.limits = name, quantizer.limits()
        parts: list[_UniformPart | _Logarithm | _Ones] = [_UniformPart(*clamp) for clamp in quantizer.clamp_bounds()]
        if isinstance(quantizer, LogQuantizer):
            parts = [_Logarithm(quantizer), *(_Ones() for _ in self.limits[1:])]
        if not parts:
            raise ArtifactError(
                f"{name} has a quantizer of the kind {quantizer.kind}, which adalog cannot export to ONNX: choose "
                "another kind of quantizer"
            )
        self.parts, self.pieces = nn.ModuleList(parts), parts

    def forward(self, x: Tensor) -> "OnnxOperand":
        return OnnxOperand(self, x)


def fits_bytes(quantizer: Quantizer) -> bool:
    """Return True if every integer is one byte minus a zero point, or two bytes."""
    return all(most - least <= 255 or (least == 0 and most < 2**16) for least, most in quantizer.limits())


class OnnxOperand:
    """A value and its encoder; the encoded value is written when a product first asks for it."""

    def __init__(self, encoder: OnnxEncoder, value: Tensor):
        self.encoder, self.value = encoder, value
        self._digits: dict[str, list[list[Digit]]] = {}

    def bytes(self, *, signed: bool) -> list[list[Digit]]:
        """Return the digits of each part, as bytes."""
        kind = "signed" if signed else "bytes"
        return self._written(kind, lambda part, name, limits: part.bytes(self.value, name, limits, signed))

    def floats(self) -> list[list[Digit]]:
        """Return each part as whole numbers in float32."""
        return self._written("floats", lambda part, name, _: [Digit(name, part.whole(self.value, name, name))])

    def _written(self, kind: str, write: Callable[..., list[Digit]]) -> list[list[Digit]]:
        """Return the digits of each part, which are written once. write: takes a part, its name and its limits."""
        if kind not in self._digits:
            operand, parts = self.encoder.name, zip(self.encoder.pieces, self.encoder.limits, strict=True)
            named = [(part, f"{operand}.{kind}.{index}", limits) for index, (part, limits) in enumerate(parts)]
            self._digits[kind] = [
                [replace(digit, at=name, operand=operand) for digit in write(part, name, limits)]
                for part, name, limits in named
            ]
        return self._digits[kind]


class _UniformPart(nn.Module):
    """clamp(round(x / scale), low, high): the integers of a uniform quantizer, or of one half of a twin quantizer."""

    def __init__(self, scale: Tensor, low: Tensor, high: Tensor):
        super().__init__()
        self.single = scale.numel() == 1
        if self.single:
            scale, low, high = (value.flatten()[0] for value in (scale, low, high))
            self.least, self.most = nn.Buffer(low * scale), nn.Buffer(high * scale)
        self.scale, self.low, self.high = (nn.Buffer(value.clone()) for value in (scale, low, high))

    def _clamp(self, x: Tensor, at: str, result: str = "") -> Tensor:
        # With scales per head, OpenVINO 2026.4 uses the first head's scale for all if a Clip and QuantizeLinear follow.
        if self.single:
            return operator("Clip", [x, self.low, self.high], at=at, result=result)
        return operator("Min", [operator("Max", [x, self.low], at=at), self.high], at=at, result=result)

    def whole(self, x: Tensor, name: str, result: str) -> Tensor:
        ratio = operator("Div", [x, self.scale], at=name)
        return self._clamp(operator("Round", [ratio], at=name), name, result)

    def bytes(self, x: Tensor, name: str, limits: tuple[int, int], signed: bool) -> list[Digit]:
        """Write the part as bytes; clamping before rounding gives the same codes, and engines see one operator."""
        least, most = limits
        zero_point = -least - ((most - least + 1) // 2 if signed else 0)
        dtype = torch.int8 if signed else torch.uint8
        if self.single:
            clamped, scale = operator("Clip", [x, self.least, self.most], at=name), self.get_buffer("scale")
        else:
            clamped = self._clamp(operator("Div", [x, self.scale], at=name), name)
            scale = torch.ones((), device=x.device)
        zero = torch.tensor(zero_point, dtype=dtype, device=x.device)
        value = operator("QuantizeLinear", [clamped, scale, zero], at=name, result=name, dtype=dtype)
        return [Digit(name, value, factor=1, zero_point=zero_point)]


class _Logarithm(nn.Module):
    """The entry of a logarithmic quantizer's table for each value.

    Up to `COMPARED_BITS` bits, a value is compared with every threshold. Above that, its logarithm selects the cell
    that it lies in. At most one threshold is in or near a cell, and the value is compared with this threshold.
    """

    def __init__(self, quantizer: LogQuantizer):
        super().__init__()
        self.offset = quantizer.offset
        table, thresholds = quantizer.table_integers().float().cpu(), value_thresholds(quantizer)
        steps = [k for k in range(len(thresholds)) if table[k] != table[k + 1]]
        self.thresholds = nn.Buffer(thresholds[steps])
        self.levels = nn.Buffer(table[[*steps, -1]])
        self.compared = quantizer.bits <= COMPARED_BITS
        if not self.compared:
            self.cells, self.first, ends, entries = _cells(self.thresholds, self.levels)
            self.ends, self.entries = nn.Buffer(ends), nn.Buffer(entries)

    def _lift(self, x: Tensor, name: str) -> Tensor:
        return operator("Add", [x, _number(x, self.offset)], at=name) if self.offset else x

    def whole(self, x: Tensor, name: str, result: str) -> Tensor:
        write, number, value = partial(operator, at=name), partial(_number, x), self._lift(x, name)
        if self.compared:
            return write(STEPS, [value, self.thresholds, self.levels], result=result)
        positive = write("Max", [value, number(2.0 ** (self.first / self.cells - 1))])
        octaves = write("Mul", [write("Log", [positive]), number(self.cells / math.log(2))])
        cell = write("Floor", [write("Add", [octaves, number(-self.first)])])
        cell = write("Clip", [cell, number(0), number(len(self.ends) - 1)])
        index = write("Cast", [cell], dtype=torch.int32, to=6)
        end = write("Gather", [self.ends, index], shape=x.shape)
        above = write("Cast", [write("Greater", [value, end], dtype=torch.bool)], dtype=torch.int32, to=6)
        index = write("Add", [write("Add", [index, index]), above])
        return write("Gather", [self.entries, index], result=result, shape=x.shape)

    def bytes(self, x: Tensor, name: str, limits: tuple[int, int], signed: bool) -> list[Digit]:
        """Write the part as bytes; entries above 255 become two digits of base 256."""
        most = limits[1]
        shift = 128 if signed else 0
        dtype, code = (torch.int8, 3) if signed else (torch.uint8, 2)

        def cast(integers: Tensor, result: str) -> Tensor:
            shifted = operator("Sub", [integers, _number(x, shift)], at=name) if shift else integers
            return operator("Cast", [shifted], at=name, result=result, dtype=dtype, to=code)

        if most <= 255 and self.compared and not signed:
            inputs = [self._lift(x, name), self.thresholds, self.levels]
            return [Digit(name, operator(BYTE_STEPS, inputs, at=name, result=name, dtype=torch.uint8, shape=x.shape))]
        integers = self.whole(x, name, f"{name}.whole")
        if most <= 255:
            return [Digit(name, cast(integers, name), zero_point=-shift)]
        high = operator("Floor", [operator("Mul", [integers, _number(x, 1 / 256)], at=name)], at=name)
        low = operator("Sub", [integers, operator("Mul", [high, _number(x, 256)], at=name)], at=name)
        return [
            Digit(f"{name}.high", cast(high, f"{name}.high"), factor=256, zero_point=-shift),
            Digit(f"{name}.low", cast(low, f"{name}.low"), zero_point=-shift),
        ]


def _number(x: Tensor, constant: float) -> Tensor:
    return torch.tensor(constant, dtype=torch.float32, device=x.device)


def _cells(thresholds: Tensor, table: Tensor) -> tuple[int, int, Tensor, Tensor]:
    """Divide the logarithm into cells of equal width that keep these descending thresholds apart.

    table: the entry above each threshold, and the entry below all of them. Returns the number of cells per octave, the
    number of the first cell, the threshold of each cell, and two entries per cell: for values up to it, and above it.
    """
    octaves = thresholds.double().log2()
    cells = 1
    while cells < _FINEST and bool((octaves[:-1] - octaves[1:] <= (1 + 2 * _FUZZ) / cells).any()):
        cells *= 2
    places = octaves * cells
    first, last = math.floor(float(places[-1])) - 1, math.floor(float(places[0])) + 1
    numbers = torch.arange(first, last + 1, dtype=torch.float64)
    # The number of thresholds surely above each cell, and the number not surely below it: they may differ by one.
    above = (places[None] >= numbers[:, None] + (1 + _FUZZ)).sum(1)
    near = (places[None] > numbers[:, None] - _FUZZ).sum(1)
    if bool((near - above > 1).any()):
        raise ArtifactError(
            f"the thresholds of {len(table)} levels are too close together to export to ONNX: use fewer bits"
        )
    ends = torch.cat([thresholds, thresholds.new_full((1,), math.inf)])[torch.where(near > above, above, -1)]
    entries = torch.stack([table[near], table[above]], dim=1).flatten()
    return cells, first, ends, entries


class _Ones(nn.Module):
    """The part that is 1 everywhere, for an offset that no bias has absorbed."""

    def whole(self, x: Tensor, name: str, result: str) -> Tensor:
        ones = torch.ones_like(x, dtype=torch.int8)  # not float32, because PyTorch would drop the cast
        return operator("Cast", [ones], at=name, result=result, dtype=torch.float32, to=1)

    def bytes(self, x: Tensor, name: str, limits: tuple[int, int], signed: bool) -> list[Digit]:
        dtype, code = (torch.int8, 3) if signed else (torch.uint8, 2)
        return [Digit(name, operator("Cast", [torch.ones_like(x)], at=name, result=name, dtype=dtype, to=code))]
