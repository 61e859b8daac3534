"""Count what one image costs a model, by operation: multiplications, FixOPs, BOPs and bytes.

A FixOP is a product of 8 by 8 bits (APoT; the paper's Table 3), so a product of b1 by b2 bits counts b1 b2 / 64 FixOPs,
and a product of two float32 numbers counts 16. A BOP is a product of 1 by 1 bit, so a FixOP is 64 BOPs. Logarithmic
codes count as they run, through a table of integers; without a table, or on request, as mantissas and shifts (Eq. 10).
docs/reference/cost.md lists what is counted.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from adalog.errors import ProgramError
from adalog.graph.activations import BY_OPERATION
from adalog.graph.operations import FAKE_QUANTIZE, aten
from adalog.graph.program import Node, Program
from adalog.graph.sites import Site, find_refused, find_sites
from adalog.graph.tracing import trace
from adalog.quantizers import FLOAT_BITS, Quantizer

BOPS_PER_FIXOP = 64
PRODUCT_ROLES = ("linear", "conv", "qk", "av")

# Float multiplications and divisions per element of the result. Roots, erf and exponentials do not count, nor do those
# inside sigmoid or tanh.
_MULTIPLICATIONS = {
    **dict.fromkeys(aten("mul.Tensor mul.Scalar div.Tensor div.Scalar div.Tensor_mode reciprocal.default"), 1),
    **dict.fromkeys(aten("square.default rsqrt.default prelu.default glu.default leaky_relu.default"), 1),
    # The square, the division by the deviation, and the weight.
    **dict.fromkeys(aten("layer_norm.default group_norm.default instance_norm.default rms_norm.default"), 3),
    **dict.fromkeys(aten("batch_norm.default softmax.int pow.Tensor_Scalar"), 1),
    **{op: row.multiplications for op, row in BY_OPERATION.items() if row.multiplications},
    "aten.softplus.default": 2,
    **dict.fromkeys(aten("mean.dim mean.default avg_pool1d.default avg_pool2d.default"), 1),
    **dict.fromkeys(aten("adaptive_avg_pool1d.default adaptive_avg_pool2d.default"), 1),
    # With n taps: n products in each of n rows, then n products across the rows, as when an image is enlarged.
    **dict.fromkeys(aten("upsample_bilinear2d.vec _upsample_bilinear2d_aa.vec"), 6),
    "aten.grid_sampler.default": 4,  # four neighbours
    **dict.fromkeys(aten("upsample_bicubic2d.vec _upsample_bicubic2d_aa.vec"), 20),
}
# Operations with one multiplication per element of their input.
_REDUCING = aten("var.correction std.correction linalg_vector_norm.default")


@dataclass(frozen=True)
class CostRow:
    """The cost of one operation on one image.

    role: "linear", "conv", "qk" or "av" for products of two operands; "quantize" and "dequantize" for conversion to
    codes and back; "look-up" and "shift" (Eq. 10) for logarithmic codes; or the name of a float operation.
    count: MACs of a product, or the number of multiplications, look-ups or shifts.
    left_bits, right_bits: widths of the factors; 0 if nothing is multiplied.
    weight_bytes: size of the weight, as codes with scales and zero points or as floats; 0 if an earlier row has it.
    """

    name: str
    role: str
    count: int
    left_bits: int = 0
    right_bits: int = 0
    weight_bytes: int = 0

    @property
    def bops(self) -> int:
        return self.count * self.left_bits * self.right_bits

    @property
    def fixops(self) -> float:
        return self.bops / BOPS_PER_FIXOP


@dataclass(frozen=True)
class RoleCost:
    """The sums over the rows of one role."""

    count: int
    fixops: float
    bops: int
    weight_bytes: int


@dataclass(frozen=True)
class Cost:
    """The cost of one image.

    size_bytes: size of the stored tensors by part: "codes", "scale" and "zero_point" of weights, "activation" (scales
    and zero points of activations) and "float" (all other tensors).
    table_bytes: size of the tables of logarithmic codes, which are computed when the file is loaded.
    float_operations: how often each operation runs in float, including operations without a multiplication.
    """

    rows: tuple[CostRow, ...]
    size_bytes: Mapping[str, int]
    table_bytes: int = 0
    float_operations: Mapping[str, int] = field(default_factory=dict)

    @property
    def products(self) -> tuple[CostRow, ...]:
        """The rows of products."""
        return tuple(row for row in self.rows if row.role in PRODUCT_ROLES)

    @property
    def macs(self) -> int:
        return sum(row.count for row in self.products)

    @property
    def integer_macs(self) -> int:
        """The MACs of the products of two integer operands."""
        return sum(row.count for row in self.products if max(row.left_bits, row.right_bits) < FLOAT_BITS)

    @property
    def fixops(self) -> float:
        return self.bops / BOPS_PER_FIXOP

    @property
    def bops(self) -> int:
        return sum(row.bops for row in self.products)

    @property
    def elementwise_fixops(self) -> float:
        """The FixOPs of everything else: quantizing, dequantizing and float operations."""
        return sum(row.bops for row in self.rows) / BOPS_PER_FIXOP - self.fixops

    def by_role(self) -> dict[str, RoleCost]:
        """Return the sums over the rows of each role, products first."""
        roles = dict.fromkeys((*PRODUCT_ROLES, *(row.role for row in self.rows)))
        grouped = {role: [row for row in self.rows if row.role == role] for role in roles}
        return {
            role: RoleCost(*(sum(getattr(row, name) for row in rows) for name in RoleCost.__dataclass_fields__))
            for role, rows in grouped.items()
            if rows
        }

    def to_json(self) -> dict[str, Any]:
        totals = ("macs", "integer_macs", "fixops", "bops", "elementwise_fixops")
        return {name: getattr(self, name) for name in totals} | {
            "size_bytes": dict(self.size_bytes),
            "table_bytes": self.table_bytes,
            "float_operations": dict(self.float_operations),
            "roles": {role: asdict(total) for role, total in self.by_role().items()},
            "rows": [{**asdict(row), "fixops": row.fixops, "bops": row.bops} for row in self.rows],
        }


def cost(program: Program, inputs: Sequence[Tensor | Sequence[int]], *, as_printed: bool = False) -> Cost:
    """Count what one image costs a program; operands without a quantizer count as float32.

    Only shapes are computed, without data.
    inputs: for each input, images (any number of them) that give shape and type; or, for float inputs, a shape without
    the batch axis, such as (3, 224, 224).
    as_printed: count logarithmic codes by mantissas and shifts (Eq. 10), as the paper's Table 3 must have done, even if
    they have tables.
    Raises ValueError if the program does not run on such inputs.
    """
    if as_printed:
        program = replace(
            program, quantizers={name: quantizer.without_table() for name, quantizer in program.quantizers.items()}
        )
    plain, sources = program.unquantize()
    values = _values(plain, inputs)
    sites = {call.node.name: call for site in (*find_sites(plain), *find_refused(plain)) for call in site.calls}
    quantizers = quantizers_of(program)
    weights = {name: sum(_tensor_bytes(program, name).values()) for name in program.tensors}
    rows: list[CostRow] = []
    for node in program.nodes:
        if node.op == FAKE_QUANTIZE:
            rows += _quantize_rows(node.name, values[sources[node.name]].numel(), quantizers[node.name])
        elif node.name in sites:
            site = sites[node.name]
            rows += _product_rows(site, node, values, quantizers, weights.pop(site.right, 0))
        elif (count := _multiplications(node, values)) > 0:
            role = node.op.removeprefix("aten.").split(".")[0]
            rows.append(CostRow(node.name, role, count, FLOAT_BITS, FLOAT_BITS))
    table_bytes = sum(quantizer.table_bytes for quantizer in program.quantizers.values())
    return Cost(tuple(rows), _size_bytes(program), table_bytes, program.float_operations())


def _values(program: Program, example: Sequence[Tensor | Sequence[int]]) -> Mapping[str, Any]:
    """Return every value of a run on one image by name, without data."""
    dtype = next((value.dtype for value in program.tensors.values() if value.is_floating_point()), torch.float32)
    kinds = [(value.shape[1:], value.dtype) if isinstance(value, Tensor) else (value, dtype) for value in example]
    try:
        return trace(program, [torch.empty((1, *shape), dtype=kind, device="meta") for shape, kind in kinds])
    except (ProgramError, TypeError, ValueError) as cause:
        sizes = ", ".join(str(tuple(shape)) for shape, _ in kinds)
        raise ValueError(
            f"the model does not run on inputs of the shape {sizes} ({cause}): give the shape that the model expects"
        ) from cause


def _product_rows(
    site: Site, node: Node, values: Mapping[str, Any], quantizers: Mapping[str, Quantizer], weight_bytes: int
) -> Iterator[CostRow]:
    """Yield a product, its shifts (Eq. 10) if it has no table, and its conversion to float if both operands are codes.

    site: the site in the program without quantizers, which has its name. node: the product in the quantized program.
    """
    count = _macs(site, values)
    operands = [quantizers.get(ref.name) for ref in node.args[:2]]
    left, right = (FLOAT_BITS if quantizer is None else quantizer.multiplied_bits for quantizer in operands)
    role = "conv" if site.role.startswith("conv") else site.role
    yield CostRow(site.name, role, count, left, right, weight_bytes)
    if any(quantizer is not None and quantizer.shifts_products for quantizer in operands):
        yield CostRow(site.name, "shift", count)
    if None not in operands:
        yield CostRow(site.name, "dequantize", values[node.name].numel(), FLOAT_BITS, FLOAT_BITS)


def _quantize_rows(name: str, count: int, quantizer: Quantizer) -> Iterator[CostRow]:
    """Yield one x / scale per element, and a log code's look-ups of its integer, or mantissa and shift (Eqs. 8-9)."""
    yield CostRow(name, "quantize", count, FLOAT_BITS, FLOAT_BITS)
    if quantizer.look_ups:
        yield CostRow(name, "look-up", quantizer.look_ups * count)


def _macs(site: Site, values: Mapping[str, Any]) -> int:
    """Return the MACs of a site. Products with padding count, since a plain implementation computes them."""
    left, right, result = (values[name] for name in (site.left, site.right, site.node.name))
    if site.role.startswith("conv_transpose"):  # each input value is multiplied by all weights of its channel
        return left.numel() * right[0].numel()
    return result.numel() * (right[0].numel() if site.role.startswith("conv") else left.shape[-1])


def quantizers_of(program: Program) -> dict[str, Quantizer]:
    """Return the quantizer of each quantized operand, by the name of the operand."""
    weights = {name: weight.quantizer for name, weight in program.weights.items()}
    fakes = [node for node in program.nodes if node.op == FAKE_QUANTIZE]
    return {**weights, **{node.name: program.quantizers[node.args[1]] for node in fakes}}


def _multiplications(node: Node, values: Mapping[str, Any]) -> int:
    """Return the number of multiplications of a float operation."""
    result = values.get(node.name)
    if not isinstance(result, Tensor) or not result.is_floating_point():
        return 0
    if node.op in _REDUCING:
        return values[node.args[0].name].numel()
    return _MULTIPLICATIONS.get(node.op, 0) * result.numel()


def _size_bytes(program: Program) -> dict[str, int]:
    sizes = {"codes": 0, "scale": 0, "zero_point": 0, "activation": 0, "float": 0}
    for name in program.tensors:
        for part, size in _tensor_bytes(program, name).items():
            sizes[part] = sizes.get(part, 0) + size
    sizes["activation"] = sum(quantizer.nbytes for quantizer in program.quantizers.values())
    return sizes


def _tensor_bytes(program: Program, name: str) -> dict[str, int]:
    """Return a tensor's bytes by part, as in a file, where codes are packed without gaps."""
    if name not in program.weights:
        return {"float": program.tensors[name].nbytes}
    weight = program.weights[name]
    codes = math.ceil(weight.codes.numel() * weight.bits / 8)
    return {"codes": codes} | {part: value.nbytes for part, value in weight.quantizer.stored_parameters().items()}
