"""Define the integers of each site of a quantized model, and compute them exactly (docs/reference/integers.md).

An operand is a sum of parts, and each part is an integer times a unit. The value of a uniform code is
(code - zero_point) * scale, the value of a logarithmic code is T[code] * unit. A site multiplies the integers of each
pair of parts and sums the products exactly. One scale per output channel converts these accumulators to floats:
output = sum(accumulator * scale) + bias.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from adalog.errors import ArtifactError
from adalog.graph.convolution import conv_geometry, output_sizes, patches
from adalog.graph.operations import FAKE_QUANTIZE, PRODUCTS
from adalog.graph.program import Node, Program, Ref
from adalog.graph.sites import find_sites
from adalog.graph.tracing import at_twice_the_size, trace
from adalog.quantizers import Quantizer

ENCODE, PRODUCT = "adalog.encode", "adalog.product"  # operations that only compiled programs have
INT32 = 2**31  # 32-bit accumulators stay below this
# If images may have any size, sums over tokens hold at least this many terms: 1024 x 1024 pixels in patches of 16 x 16.
FREE_TERMS = 4096


@dataclass(frozen=True)
class IntegerSite:
    """A product whose two operands are codes.

    left, right: the quantizers of the operands. weight: the codes of a stored right operand, (O, I) or
    (O, I / groups, kh, kw). terms: the number of products that an accumulator sums. scales: the value of one unit of
    the accumulator for each pair of parts, left parts outermost; it broadcasts against the output, or for a convolution
    against (B, groups, L, O / groups). bounds: for each pair of parts, the largest magnitude that an accumulator can
    reach, which is terms times the largest integers of both parts. geometry: stride, padding, dilation and groups of a
    convolution; None for other products.
    """

    name: str
    node: Node
    left: Quantizer
    right: Quantizer
    weight: Tensor | None
    terms: int
    scales: tuple[Tensor, ...]
    bounds: tuple[int, ...]
    geometry: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int] | None = None

    @property
    def bits(self) -> int:
        """Bits of the narrowest two's complement accumulator that no input overflows: 32 or 64."""
        return 32 if max(self.bounds) < INT32 else 64

    def check_terms(self, count: int) -> None:
        """Raise ValueError if a sum has more than `terms` terms, which can happen if a program sums over its batch."""
        if count > self.terms:
            raise ValueError(f"it sums {count:,} products, but its accumulators are made for at most {self.terms:,}")

    @property
    def groups(self) -> int:
        return 1 if self.geometry is None else self.geometry[3]

    def weight_integers(self) -> Tensor:
        """Return the integers of a stored weight as a right operand: int64, (I, O) or (groups, I, O / groups)."""
        assert self.weight is not None
        integers = self.right.integer(self.weight)
        if self.geometry is None:
            return integers.t()
        return integers.reshape(self.groups, -1, integers[0].numel()).transpose(1, 2)

    @property
    def window(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """The kernel's (height, width), and the stride, padding and dilation of a convolution."""
        assert self.geometry is not None
        assert self.weight is not None
        return (tuple(self.weight.shape[2:]), *self.geometry[:3])

    def rows(self, image: Tensor, fill: int = 0) -> Tensor:
        """Return a convolution's operand as the rows of a product: (B, C, H, W) -> (B, groups, L, I / groups)."""
        return patches(image, *self.window, fill=fill).unflatten(2, (self.groups, -1)).transpose(1, 2)

    def image(self, rows: Tensor, shape: torch.Size) -> Tensor:
        """Reshape a convolution's output, (B, groups, L, O / groups) -> (B, O, H, W). shape: the shape of its input."""
        # Every executor stores the channels last in memory, because the last bit of float operations may depend on it.
        return rows.transpose(1, 2).flatten(2).contiguous().transpose(1, 2).unflatten(2, self.sizes(shape))

    def add_bias(self, output: Tensor, bias: Tensor | None) -> Tensor:
        if bias is None:
            return output
        return output + (bias if self.geometry is None else bias[:, None, None])

    def sizes(self, shape: torch.Size) -> tuple[int, ...]:
        """Return the (height, width) of a convolution's output for an input of this shape."""
        return output_sizes(shape[2:], *self.window)


def plan(program: Program, example: tuple[Tensor, ...]) -> list[IntegerSite]:
    """Return every product of two quantized operands, in order of execution. All other products stay float.

    example: the inputs with zero images, (0, ...) each. Raises ArtifactError for a site that cannot run in integers.
    """
    plain, _ = program.unquantize()
    names = {call.node.name: call.name for site in find_sites(plain) for call in site.calls}
    fakes = {node.name: node for node in program.nodes if node.op == FAKE_QUANTIZE}
    operands = {name for node in program.nodes if node.op in PRODUCTS for name in node.refs()}
    values = trace(program, example, 1)
    larger = at_twice_the_size(program, example, 1, operands) if program.free else values
    sites = []
    for node in program.nodes:
        if node.op not in PRODUCTS or not all(isinstance(arg, Ref) for arg in node.args[:2]):
            continue
        left, right = (arg.name for arg in node.args[:2])
        stored = node.op in PRODUCTS[:2]
        operand = program.weights.get(right) if stored else fakes.get(right)
        if left not in fakes or operand is None or (node.op == PRODUCTS[1] and values[left].ndim != 4):
            continue
        name = names.get(node.name, node.name)
        quantizers = (
            program.quantizers[fakes[left].args[1]],
            (program.quantizers[operand.args[1]] if isinstance(operand, Node) else operand.quantizer),
        )
        weight = None if isinstance(operand, Node) else operand.codes
        shapes = [values[left].shape, values[right].shape]
        grows = not stored and larger[left].shape[-1:] != shapes[0][-1:]
        sites.append(_site(name, node, quantizers, weight, shapes, FREE_TERMS if grows else 0))
    return sites


def _site(
    name: str,
    node: Node,
    operands: tuple[Quantizer, Quantizer],
    weight: Tensor | None,
    shapes: list[torch.Size],
    least: int,
) -> IntegerSite:
    """Create the site of a product. least: the fewest terms to allow for, because its sums may grow with the image."""
    left, right = (_quantizer_of(name, quantizer) for quantizer in operands)
    geometry = None
    if weight is None:
        flat = min(map(len, shapes)) < 2
        lefts = [_constant(name, unit, (-1, -2) if flat else (-1,)) for unit in left.units()]
        rights = [_constant(name, unit, (-1, -2) if flat else (-2,)) for unit in right.units()]
        terms = max(shapes[0][-1], least)
    elif node.op == PRODUCTS[0]:
        lefts = [_constant(name, unit, (-1,)) for unit in left.units()]
        rights = [unit.reshape(-1) for unit in right.units()]
        terms = weight.shape[1]
    else:
        geometry = conv_geometry(node)
        lefts = [_per_group(name, unit, geometry[3], shapes[0][1]) for unit in left.units()]
        rights = [unit.reshape(geometry[3], 1, -1) for unit in right.units()]
        terms = weight[0].numel()
    scales = tuple((x * y).to(left.scale.dtype) for x in lefts for y in rights)
    bounds = tuple(terms * x * y for x in _largest(left) for y in _largest(right))
    if max(bounds) >= 2**63:
        raise ArtifactError(f"site {name} sums {terms:,} products up to {max(bounds):,}, which does not fit in 64 bits")
    return IntegerSite(name, node, left, right, weight, terms, scales, bounds, geometry)


def _quantizer_of(name: str, quantizer: Quantizer) -> Quantizer:
    """Return the quantizer of a site. Raises ArtifactError if its codes do not represent integers."""
    if quantizer.why_no_integers:
        raise ArtifactError(f"site {name} {quantizer.why_no_integers}")
    if quantizer.scale.dtype not in (torch.float32, torch.float64):
        raise ArtifactError(f"site {name} is in {quantizer.scale.dtype}: convert the model to float32")
    return quantizer


def _largest(quantizer: Quantizer) -> list[int]:
    """Return the largest magnitude of the integers of each part."""
    return [max(-least, most) for least, most in quantizer.limits()]


def _constant(name: str, unit: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return the unit if it is the same along these dimensions. Raises ArtifactError otherwise."""
    if any(unit.ndim >= -dim and unit.shape[dim] > 1 for dim in dims):
        raise _uneven(name, unit)
    return unit


def _per_group(name: str, unit: Tensor, groups: int, channels: int) -> Tensor:
    """Return the unit of each group of an image's channels, (groups, 1, 1), or of all. Raises as `_constant`."""
    if unit.numel() == 1:
        return unit.reshape(())
    rows = unit.reshape(groups, -1) if unit.numel() == channels and unit.shape[-2:] == (1, 1) else None
    if rows is None or not bool((rows == rows[:, :1]).all()):
        raise _uneven(name, unit)
    return rows[:, :1, None]


def _uneven(name: str, unit: Tensor) -> ArtifactError:
    shape = tuple(unit.shape)
    return ArtifactError(f"site {name} has scales {shape} that differ within one sum: it cannot run in integers")


# --- the executor ----------------------------------------------------------------------------------------------------


class CodeEncoder:
    """Encoder of values into the operand that `CodeProduct` takes: their codes, int64."""

    def __init__(self, quantizer: Quantizer, site: IntegerSite):
        self.quantizer = quantizer

    def __call__(self, x: Tensor) -> Tensor:
        return self.lift(self.quantizer.quantize(x.nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf)))

    def lift(self, code: Tensor) -> Tensor:
        return code.to(torch.int64)


class CodeProduct:
    """The product of a site's codes, computed in int64 on the CPU."""

    def __init__(self, site: IntegerSite):
        self.site = site
        self._weight = None if site.weight is None else site.weight_integers().cpu()
        self.nbytes = 0 if self._weight is None else self._weight.nbytes

    def accumulate(self, left: Tensor, right: Tensor | None = None) -> list[Tensor]:
        """Return the exact sums, int64, one tensor per pair of parts. The site's scales broadcast against them."""
        lefts = [part.cpu() for part in self.site.left.integers(left)]
        rights = None if right is None else [part.cpu() for part in self.site.right.integers(right)]
        return [sums.to(left.device) for sums in self.sums(lefts, rights)]

    def sums(self, lefts: Sequence[Tensor], rights: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Return the sums of the parts' integers, on the CPU: int64, or float64 if no bound reaches 2**53."""
        site = self.site
        if site.geometry is not None:
            lefts = [site.rows(part) for part in lefts]
        if self._weight is None:
            assert rights is not None
            site.check_terms(lefts[0].shape[-1])
        else:
            rights = [self._weight.to(lefts[0].dtype)]
        return [torch.matmul(x, y) for x in lefts for y in rights]

    def __call__(self, left: Tensor, right: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        return finish(self.site, self.accumulate(left, right), bias, left.shape)


def finish(site: IntegerSite, accumulators: list[Tensor], bias: Tensor | None, shape: torch.Size) -> Tensor:
    """Return a site's output: accumulators times scales, plus the bias. shape: the shape of the left operand."""
    parts = [sums.to(scale.dtype) * scale for sums, scale in zip(accumulators, site.scales, strict=True)]
    result = sum(parts[1:], start=parts[0])
    return site.add_bias(result if site.geometry is None else site.image(result, shape), bias)
