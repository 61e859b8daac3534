"""What a model costs: multiplications, FixOPs, BOPs and bytes, by operation, for one image.

A FixOP is a product of 8 by 8 bits (APoT; the paper's Table 3), so one of b1 by b2 bits is b1 b2 / 64 of them and one
of two float32 numbers 16; a BOP is a product of 1 by 1 bit, so there are 64 to a FixOP. Both count multiplications
alone: BOPs here have no term for the accumulator. Logarithmic codes count as they run, through a table of integers;
without one, or where that is asked for, as Eq. 10 is printed, by mantissas and shifts. docs/cost.md says what is
counted and what is not.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from adalog.errors import ProgramError
from adalog.graph.operations import FAKE_QUANTIZE, aten
from adalog.graph.program import Node, Program
from adalog.graph.sites import Site, find_refused, find_sites
from adalog.quantizers import LogQuantizer, Quantizer, SplitUniformQuantizer, TwinUniformQuantizer, UniformQuantizer

FLOAT_BITS = 32
BOPS_PER_FIXOP = 64
PRODUCT_ROLES = ("linear", "conv", "qk", "av")

# Float multiplications and divisions an element of the result. Roots, exponentials (sigmoid, tanh, ... too) and erf
# count as none.
_MULTIPLICATIONS = {
    **dict.fromkeys(aten("mul.Tensor mul.Scalar div.Tensor div.Scalar div.Tensor_mode reciprocal.default"), 1),
    **dict.fromkeys(aten("square.default rsqrt.default prelu.default glu.default elu.default"), 1),
    # The square, 1 / deviation, the weight.
    **dict.fromkeys(aten("layer_norm.default group_norm.default instance_norm.default rms_norm.default"), 3),
    **dict.fromkeys(aten("batch_norm.default softmax.int pow.Tensor_Scalar"), 1),
    "aten.gelu.default": 3,  # x / sqrt(2), x times it, 1 / 2
    **dict.fromkeys(aten("silu.default mish.default leaky_relu.default hardsigmoid.default"), 1),
    **dict.fromkeys(aten("hardswish.default softplus.default"), 2),
    **dict.fromkeys(aten("mean.dim mean.default avg_pool1d.default avg_pool2d.default"), 1),
    **dict.fromkeys(aten("adaptive_avg_pool1d.default adaptive_avg_pool2d.default"), 1),
    # n taps along each of n rows, then n across: as they are where an image grows.
    **dict.fromkeys(aten("upsample_bilinear2d.vec _upsample_bilinear2d_aa.vec"), 6),
    **dict.fromkeys(aten("upsample_bicubic2d.vec _upsample_bicubic2d_aa.vec"), 20),
}
# The same, an element of what is reduced.
_REDUCING = aten("var.correction std.correction linalg_vector_norm.default")


@dataclass(frozen=True)
class CostRow:
    """One operation, on one image.

    role: "linear", "conv", "qk" or "av", a product of two operands; "quantize" and "dequantize", between numbers and
    codes; "look-up" and "shift" (Eq. 10), of logarithmic codes; or a float operation's name. count: MACs of a product,
    multiplications, look-ups or shifts of the others. left_bits, right_bits: the widths of what is multiplied, 0 where
    nothing is. weight_bytes: of the weight, unless an earlier row has it, as codes with scales and zero points, or as
    floats.
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
    """rows: in order of execution. size_bytes: of what is stored, by part, without names and program: "codes", "scale"
    and "zero_point" of the weights, "activation" (scales and zero points of activations), "float" (all else).
    table_bytes: of the tables of logarithmic codes, which are made of what is stored. float_operations: how many of
    each operation run in float, as the summary of a model lists them, those without multiplications too."""

    rows: tuple[CostRow, ...]
    size_bytes: Mapping[str, int]
    table_bytes: int = 0
    float_operations: Mapping[str, int] = field(default_factory=dict)

    @property
    def products(self) -> tuple[CostRow, ...]:
        """The rows whose MACs are usually meant: all but what is elementwise."""
        return tuple(row for row in self.rows if row.role in PRODUCT_ROLES)

    @property
    def macs(self) -> int:
        return sum(row.count for row in self.products)

    @property
    def integer_macs(self) -> int:
        """Of the products of integers by integers."""
        return sum(row.count for row in self.products if max(row.left_bits, row.right_bits) < FLOAT_BITS)

    @property
    def fixops(self) -> float:
        """Of the products."""
        return self.bops / BOPS_PER_FIXOP

    @property
    def bops(self) -> int:
        """Of the products."""
        return sum(row.bops for row in self.products)

    @property
    def elementwise_fixops(self) -> float:
        """Of everything else: quantizing, dequantizing and the float operations."""
        return sum(row.bops for row in self.rows) / BOPS_PER_FIXOP - self.fixops

    def by_role(self) -> dict[str, RoleCost]:
        """The sums of the rows of each role, products first."""
        roles = dict.fromkeys((*PRODUCT_ROLES, *(row.role for row in self.rows)))
        grouped = {role: [row for row in self.rows if row.role == role] for role in roles}
        return {
            role: RoleCost(*(sum(getattr(row, name) for row in rows) for name in RoleCost.__dataclass_fields__))
            for role, rows in grouped.items()
            if rows
        }

    def to_json(self) -> dict[str, Any]:
        totals = {"macs": self.macs, "integer_macs": self.integer_macs, "fixops": self.fixops, "bops": self.bops}
        return {
            **totals,
            "elementwise_fixops": self.elementwise_fixops,
            "size_bytes": dict(self.size_bytes),
            "table_bytes": self.table_bytes,
            "float_operations": dict(self.float_operations),
            "roles": {role: asdict(total) for role, total in self.by_role().items()},
            "rows": [{**asdict(row), "fixops": row.fixops, "bops": row.bops} for row in self.rows],
        }


def cost(program: Program, input_shapes: Sequence[Sequence[int]], *, as_printed: bool = False) -> Cost:
    """What a program costs on one image; what has no quantizer counts as float32.

    input_shapes: of each input without its batch axis, such as [(3, 224, 224)]. Nothing is computed: shapes come from
    a run without data. as_printed: logarithmic codes by Eq. 10's mantissas and shifts, as the paper's Table 3 must have
    them, also where tables run. Raises ValueError where the program does not run on such inputs.
    """
    if as_printed:
        program = replace(program, quantizers={name: _printed(each) for name, each in program.quantizers.items()})
    plain, sources = program.unquantized()
    values = _values(plain, input_shapes)
    sites = {site.node.name: site for site in (*find_sites(plain), *find_refused(plain))}
    quantizers = _quantizers(program)
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
    tables = [each for each in program.quantizers.values() if isinstance(each, LogQuantizer) and each.width]
    table_bytes = sum(2**each.bits * each.width // 8 for each in tables)
    return Cost(tuple(rows), _size_bytes(program), table_bytes, program.float_operations())


def _printed(quantizer: Quantizer) -> Quantizer:
    """Without the table of integers."""
    return replace(quantizer, width=0, headroom=0) if isinstance(quantizer, LogQuantizer) else quantizer


def _values(program: Program, input_shapes: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Every tensor of a run on one image, by name: shapes and types without data."""
    program = program.map_tensors(lambda value: value.to("meta"))
    dtype = next((value.dtype for value in program.tensors.values() if value.is_floating_point()), torch.float32)
    inputs = [torch.empty((1, *shape), dtype=dtype, device="meta") for shape in input_shapes]
    values = {**program.tensors, **dict(zip(program.inputs, inputs, strict=False))}

    def watch(node: Node, args: tuple[Any, ...], result: Any) -> None:
        if isinstance(result, Tensor):
            values[node.name] = result

    try:
        program.run(inputs, watch)
    except (ProgramError, TypeError) as cause:
        sizes = ", ".join(str(tuple(shape)) for shape in input_shapes)
        raise ValueError(
            f"the model does not run on inputs of the shape {sizes} ({cause}): give the shape it was made for"
        ) from cause
    return values


def _product_rows(
    site: Site, node: Node, values: Mapping[str, Tensor], quantizers: Mapping[str, Quantizer], weight_bytes: int
) -> Iterator[CostRow]:
    """A product; where its operands are codes, the way back to floats; the shifts of Eq. 10, where no table has them.

    site: as it is without quantizers, which names it; node: as it is in the program.
    """
    count = _macs(site, values)
    operands = [quantizers.get(ref.name) for ref in node.args[:2]]
    left, right = (_bits(quantizer) for quantizer in operands)
    role = "conv" if site.role.startswith("conv") else site.role
    yield CostRow(site.name, role, count, left, right, weight_bytes)
    if any(isinstance(quantizer, LogQuantizer) and not quantizer.width for quantizer in operands):
        yield CostRow(site.name, "shift", count)
    if None not in operands:
        yield CostRow(site.name, "dequantize", values[node.name].numel(), FLOAT_BITS, FLOAT_BITS)


def _quantize_rows(name: str, count: int, quantizer: Quantizer) -> Iterator[CostRow]:
    """x / scale for every element; of a logarithmic code its integer is looked up, or mantissa and shift (Eqs. 8-9)."""
    yield CostRow(name, "quantize", count, FLOAT_BITS, FLOAT_BITS)
    if isinstance(quantizer, LogQuantizer) and _bits(quantizer):
        yield CostRow(name, "look-up", count if quantizer.width else 2 * count)


def _macs(site: Site, values: Mapping[str, Tensor]) -> int:
    """Products with padding count, as they are in a plain implementation."""
    left, right, result = (values[name] for name in (site.left, site.right, site.node.name))
    if site.role.startswith("conv_transpose"):  # every input meets all that is stored for its channel
        return left.numel() * right[0].numel()
    return result.numel() * (right[0].numel() if site.role.startswith("conv") else left.shape[-1])


def _quantizers(program: Program) -> dict[str, Quantizer]:
    """Those of operands, by the operand's name."""
    weights = {name: weight.quantizer for name, weight in program.weights.items()}
    fakes = [node for node in program.nodes if node.op == FAKE_QUANTIZE]
    return {**weights, **{node.name: program.quantizers[node.args[1]] for node in fakes}}


def _bits(quantizer: Quantizer | None) -> int:
    """The width of what is multiplied: a code, a table's integer, a mantissa, or a float.

    Mantissas are bits + 1 wide. Where the base is a power of two there is one only, and a shift is all: 0.
    """
    if quantizer is None:
        return FLOAT_BITS
    if not isinstance(quantizer, LogQuantizer):
        return quantizer.bits
    if quantizer.width:
        return quantizer.width
    if quantizer.q % quantizer.r == 0:
        return 0
    return quantizer.bits + 1 if quantizer.table else FLOAT_BITS


def _multiplications(node: Node, values: Mapping[str, Tensor]) -> int:
    """Of a float operation."""
    result = values.get(node.name)
    if result is None or not result.is_floating_point():
        return 0
    if node.op in _REDUCING:
        return values[node.args[0].name].numel()
    return _MULTIPLICATIONS.get(node.op, 0) * result.numel()


def _size_bytes(program: Program) -> dict[str, int]:
    sizes = {"codes": 0, "scale": 0, "zero_point": 0, "activation": 0, "float": 0}
    for name in program.tensors:
        for part, size in _tensor_bytes(program, name).items():
            sizes[part] += size
    for quantizer in program.quantizers.values():
        sizes["activation"] += quantizer.scale.nbytes
        if isinstance(quantizer, UniformQuantizer):
            sizes["activation"] += quantizer.zero_point.numel()
        if isinstance(quantizer, TwinUniformQuantizer):
            sizes["activation"] += quantizer.negative_scale.nbytes
        if isinstance(quantizer, SplitUniformQuantizer):
            sizes["activation"] += quantizer.coarse_scale.nbytes
    return sizes


def _tensor_bytes(program: Program, name: str) -> dict[str, int]:
    """A tensor's bytes by part: a zero point takes one, codes lie side by side."""
    if name not in program.weights:
        return {"float": program.tensors[name].nbytes}
    weight = program.weights[name]
    codes = math.ceil(weight.codes.numel() * weight.quantizer.bits / 8)
    return {"codes": codes, "scale": weight.quantizer.scale.nbytes, "zero_point": weight.quantizer.zero_point.numel()}
