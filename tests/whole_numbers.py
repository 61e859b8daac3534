"""Products of quantized operands: models that are one product, and exact oracles in whole numbers."""

import numpy as np
import pytest
import torch

from adalog import Config, QuantizedModel, library
from adalog.baselines import TwinUniformQuantizer
from adalog.graph.operations import FAKE_QUANTIZE
from adalog.graph.program import Node, Program, Ref
from adalog.quantized import QuantizedProgram
from adalog.quantizers import LogQuantizer, QuantizedTensor, UniformQuantizer, most_headroom
from adalog.runtime import EXECUTORS as ALL
from adalog.runtime import reference

LOGS = {"log2": (1, 1, False), "log-sqrt2": (1, 2, False), "adalog": (0, 37, True)}
PORTABLE = ("reference", "torch")
needs_kernels = pytest.mark.skipif(not library.levels(), reason=f"no kernels: {library.why()}")
EXECUTORS = [name for name in ALL if name in PORTABLE or library.levels()]  # native: see test_native.py too


def written_out(base, r, width_of_code, headroom, table):
    """Eq. 10's folded table in Python's whole numbers; without mantissas the nearest to an exact power."""
    rows = []
    for code in range(2**width_of_code):
        shift, rest = divmod(code * base, r)
        if table:
            mantissa = round(2 ** (-rest / r) * 2 * (2**width_of_code - 1))
            rows.append((mantissa << headroom) >> shift)
        else:
            rows.append(round(2 ** (headroom - code * base / r)))
    return rows


def convolved(image, weight, stride, padding, dilation, groups):
    """(B, C, H, W) and (O, C / groups, kh, kw) -> (B, O, H', W'), one product after the other; padding is nothing."""
    batch, channels, height, width = image.shape
    outputs, each, kh, kw = weight.shape
    size = [
        (full + 2 * pad - gap * (taps - 1) - 1) // step + 1
        for full, pad, gap, taps, step in zip((height, width), padding, dilation, (kh, kw), stride, strict=True)
    ]
    result = np.zeros((batch, outputs, *size), dtype=object)
    for b, o, y, x in np.ndindex(*result.shape):
        for c, i, j in np.ndindex(each, kh, kw):
            row = y * stride[0] - padding[0] + i * dilation[0]
            column = x * stride[1] - padding[1] + j * dilation[1]
            if 0 <= row < height and 0 <= column < width:
                channel = (o // (outputs // groups)) * each + c
                result[b, o, y, x] += image[b, channel, row, column] * weight[o, c, i, j]
    assert channels == each * groups
    return result


def model_of(op, left, right, shape, other, weight=None, arguments=()):
    """One product of two quantized operands. other: the shape of a right operand that is no weight."""
    nodes = [Node("l", FAKE_QUANTIZE, (Ref("x"), "l"))]
    tensors, weights, quantizers, inputs = {}, {}, {"l": left}, ["x"]
    example = [torch.empty((0, *shape[1:]))]
    if weight is None:
        nodes.append(Node("r", FAKE_QUANTIZE, (Ref("y"), "r")))
        quantizers["r"] = right
        inputs.append("y")
        example.append(torch.empty((0, *other[1:])))
        nodes.append(Node("out", op, (Ref("l"), Ref("r"))))
    else:
        weights["w"] = QuantizedTensor(weight, right)
        tensors["w"] = weights["w"].dequantize()
        tensors["b"] = torch.linspace(-1, 1, len(weight))
        nodes.append(Node("out", op, (Ref("l"), Ref("w"), Ref("b"), *arguments)))
    program = Program(tuple(inputs), tuple(nodes), Ref("out"), tensors, quantizers, weights)
    return QuantizedModel(QuantizedProgram(program, Config(), (), {}, example=example))


def site_of(model):
    """The only site of a model."""
    (site,) = reference.plan(model.program, model.example)
    return site


def stored_product(generator, kind, widths, table, shape, weight_shape, extreme, own=(), geometry=(), offset=0.0):
    """A product with a stored weight: the model, and the codes of its operands. own: the shape of the left's scale."""
    left = left_quantizer(generator, kind, widths[0], table, own, offset)
    right = uniform(generator, widths[1], weight_shape[0], *[1] * (len(weight_shape) - 1))
    codes = codes_of(generator, widths[0], shape, extreme)
    weight = codes_of(generator, widths[1], weight_shape, extreme)
    op = "aten.conv2d.default" if geometry else "aten.linear.default"
    return model_of(op, left, right, codes.shape, None, weight, geometry), codes, weight


def computed_product(generator, kind, widths, table, shape, columns, extreme, per_head=True):
    """A product of two computed operands: the model, and the codes of both. shape: (batch, heads, rows, terms)."""
    batch, heads, _, terms = shape
    left = left_quantizer(generator, kind, widths[0], table, (heads, 1, 1) if per_head and kind == "uniform" else ())
    right = uniform(generator, widths[1], *((heads, 1, 1) if per_head else ()))
    codes = codes_of(generator, widths[0], shape, extreme)
    others = codes_of(generator, widths[1], (batch, heads, terms, columns), extreme)
    return model_of("aten.matmul.default", left, right, codes.shape, others.shape), codes, others


def accumulated(site, encoder, product, left, right=None):
    """The accumulators that an executor computes from the codes of a site. right: None for a stored weight."""
    operands = [encoder(site.left, site).lift(left)]
    if right is not None:
        operands.append(encoder(site.right, site).lift(right))
    return product(site).accumulate(*operands)


def uniform(generator, width, *shape):
    zero_point = torch.randint(2**width, shape, generator=generator).float()
    return UniformQuantizer(torch.rand(shape, generator=generator) + 0.1, zero_point, width)


def left_quantizer(generator, kind, width, width_of_table, shape, offset=0.0):
    scale = torch.rand((), generator=generator) + 0.1
    if kind == "uniform":
        return uniform(generator, width, *shape)
    if kind == "twin":
        return TwinUniformQuantizer(scale, scale * 0.3, width)
    fixed, r, table = LOGS[kind]
    base = fixed or int(torch.randint(1, 60, (), generator=generator))
    if most_headroom(width, width_of_table, table=table) < 0:
        width_of_table = 16
    most = most_headroom(width, width_of_table, table=table)
    headroom = int(torch.randint(most + 1, (), generator=generator))
    beyond = "saturate" if base % 2 else "zero-coded"
    return LogQuantizer(
        scale, base, r, width, beyond, table=table, width=width_of_table, headroom=headroom, offset=offset
    )


def meanings(quantizer, code, place):
    """What one code stands for, an integer a part, by the definitions and nothing of the package's."""
    if isinstance(quantizer, UniformQuantizer):
        return [code - int(quantizer.zero_point.expand(place[0])[place[1]])]
    if isinstance(quantizer, TwinUniformQuantizer):
        signed = code - 2 ** (quantizer.bits - 1)
        return [max(signed, 0), min(signed, 0)]
    last = 2**quantizer.bits - 1
    table = written_out(quantizer.q, quantizer.r, quantizer.bits, quantizer.headroom, quantizer.table)
    value = 0 if code == last and quantizer.beyond == "zero-coded" else table[code]
    return [value, *([1] if quantizer.offset and not quantizer.keeps_offset else [])]


def whole(quantizer, codes):
    """The integers of a tensor of codes, an object array a part: Python's own whole numbers."""
    places = list(np.ndindex(*codes.shape))
    rows = [meanings(quantizer, int(codes[place]), (codes.shape, place)) for place in places]
    parts = [np.empty(len(places), dtype=object) for _ in rows[0]]
    for i, row in enumerate(rows):
        for part, value in zip(parts, row, strict=True):
            part[i] = value
    return [part.reshape(codes.shape) for part in parts]


def multiplied(left, right):
    """left @ right over the last dimensions, in Python's own whole numbers, batches broadcast."""
    lead = np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    left = np.broadcast_to(left, (*lead, *left.shape[-2:]))
    right = np.broadcast_to(right, (*lead, *right.shape[-2:]))
    result = np.empty((*lead, left.shape[-2], right.shape[-1]), dtype=object)
    for index in np.ndindex(*result.shape):
        *batch, i, j = index
        result[index] = sum(x * y for x, y in zip(left[(*batch, i)], right[(*batch, slice(None), j)], strict=True))
    return result


def codes_of(generator, width, shape, extreme):
    if extreme:
        return torch.full(shape, (2**width - 1) * (extreme - 1), dtype=torch.uint8)
    return torch.randint(2**width, shape, generator=generator, dtype=torch.uint8)
