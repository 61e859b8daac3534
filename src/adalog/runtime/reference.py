"""What the integers of a quantized model are, site by site, and the executor that computes just that (docs/integer.md).

An operand is a sum of parts, each an integer times a unit: a uniform code stands for (code - zero_point) scale, a
logarithmic one for T[code] unit. A site multiplies and adds the integers of each pair of parts exactly, and makes
floats of what comes out by one scale an output channel: output = sum of accumulator * scale, plus bias.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adalog.errors import ArtifactError
from adalog.graph.program import FAKE_QUANTIZE, PRODUCTS, Node, Program, Ref
from adalog.graph.reparam import output_sizes, patches
from adalog.graph.sites import conv_geometry, find_sites
from adalog.quantizers import Quantizer

ENCODE, PRODUCT = "adalog.encode", "adalog.product"  # operations of compiled programs alone
INT32 = 2**31  # what accumulators of 32 bits stay below


# --- sites -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class IntegerSite:
    """A multiplication whose operands are codes.

    left, right: their quantizers; weight: the right one's codes where they are stored, (O, I) or (O, I / groups, kh,
    kw). terms: how many products an accumulator sums. scales: for each pair of parts, left ones outermost, what an
    accumulator of one is worth, shaped against the output (a convolution's: against (B, groups, L, O / groups)).
    bounds: what the accumulators of each pair cannot exceed, whatever the codes: terms times the largest integers of
    both. geometry: of a convolution.
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
        """Of the narrowest two's complement accumulator that no input overflows: 32 or 64."""
        return 32 if max(self.bounds) < INT32 else 64

    def check_terms(self, count: int) -> None:
        """Raise ValueError for more terms than the bounds are for: a strange program may sum over its batch."""
        if count > self.terms:
            raise ValueError(f"sums {count:,} products, its accumulators are for {self.terms:,}")

    @property
    def groups(self) -> int:
        return 1 if self.geometry is None else self.geometry[3]

    def weight_integers(self) -> Tensor:
        """Of a stored weight, as the right side of a product: int64, (groups, I, O / groups), or (I, O)."""
        assert self.weight is not None
        (whole,) = self.right.integers(self.weight)
        if self.geometry is None:
            return whole.t()
        return whole.reshape(self.groups, -1, whole[0].numel()).transpose(1, 2)

    def rows(self, image: Tensor, fill: int = 0) -> Tensor:
        """A convolution's operand as rows of a product: (B, C, H, W) -> (B, groups, L, I / groups)."""
        assert self.geometry is not None
        assert self.weight is not None
        stride, padding, dilation, groups = self.geometry
        return (
            patches(image, self.weight.shape[2:], stride, padding, dilation, fill=fill)
            .unflatten(2, (groups, -1))
            .transpose(1, 2)
        )

    def image(self, rows: Tensor, shape: torch.Size) -> Tensor:
        """A convolution's output, (B, groups, L, O / groups) -> (B, O, H, W), for an input of this shape.

        Its channels are last in memory, in every executor: float operations may depend on it in their last bit.
        """
        return rows.transpose(1, 2).flatten(2).contiguous().transpose(1, 2).unflatten(2, self.sizes(shape))

    def sizes(self, shape: torch.Size) -> tuple[int, ...]:
        """(height, width) of a convolution's output for an input of this shape."""
        assert self.geometry is not None
        assert self.weight is not None
        return output_sizes(shape[2:], self.weight.shape[2:], *self.geometry[:3])


def plan(program: Program, example: tuple[Tensor, ...]) -> list[IntegerSite]:
    """Every product of two quantized operands, in order of execution; all others stay float.

    example: the inputs with no images in them. Raises ArtifactError for a site that has no integers (logarithmic codes
    without a table, split ones, scales that differ within one sum) or whose sums 64 bits may not hold.
    """
    plain, _ = program.unquantized()
    names = {site.node.name: site.name for site in find_sites(plain)}
    fakes = {node.name: node for node in program.nodes if node.op == FAKE_QUANTIZE}
    shapes: dict[str, list[torch.Size]] = {}

    def watch(node: Node, args: tuple[Any, ...], result: Any) -> None:
        if node.op in PRODUCTS:
            shapes[node.name] = [value.shape for value in args[:2]]

    inputs = [value.new_empty((1, *value.shape[1:]), device="meta") for value in example]
    program.map_tensors(lambda value: value.to("meta")).run(inputs, watch)
    sites = []
    for node in program.nodes:
        if node.op not in PRODUCTS or not all(isinstance(arg, Ref) for arg in node.args[:2]):
            continue
        left, right = (arg.name for arg in node.args[:2])
        stored = node.op in PRODUCTS[:2]
        other = program.weights.get(right) if stored else fakes.get(right)
        if left not in fakes or other is None or (node.op == PRODUCTS[1] and len(shapes[node.name][0]) != 4):
            continue
        name = names.get(node.name, node.name)
        quantizers = (
            program.quantizers[fakes[left].args[1]],
            (program.quantizers[other.args[1]] if isinstance(other, Node) else other.quantizer),
        )
        weight = None if isinstance(other, Node) else other.codes
        sites.append(_site(name, node, quantizers, weight, shapes[node.name]))
    return sites


def _site(
    name: str, node: Node, operands: tuple[Quantizer, Quantizer], weight: Tensor | None, shapes: list[torch.Size]
) -> IntegerSite:
    left, right = (_checked(name, quantizer) for quantizer in operands)
    geometry = None
    if weight is None:
        flat = min(map(len, shapes)) < 2
        lefts = [_constant(name, unit, (-1, -2) if flat else (-1,)) for unit in left.units()]
        rights = [_constant(name, unit, (-1, -2) if flat else (-2,)) for unit in right.units()]
        terms = shapes[0][-1]
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
        raise ArtifactError(f"site {name} sums {terms:,} products up to {max(bounds):,}, more than 64 bits hold")
    return IntegerSite(name, node, left, right, weight, terms, scales, bounds, geometry)


def _checked(name: str, quantizer: Quantizer) -> Quantizer:
    """The quantizer of a site, if its codes stand for integers."""
    if quantizer.why_no_integers:
        raise ArtifactError(f"site {name} {quantizer.why_no_integers}")
    if quantizer.scale.dtype not in (torch.float32, torch.float64):
        raise ArtifactError(f"site {name} is in {quantizer.scale.dtype}: convert the model to float32")
    return quantizer


def _largest(quantizer: Quantizer) -> list[int]:
    """The largest magnitude of an integer of each part."""
    return [max(-least, most) for least, most in quantizer.limits()]


def _constant(name: str, unit: Tensor, dims: tuple[int, ...]) -> Tensor:
    """A unit that does not differ along these dimensions."""
    if any(unit.ndim >= -dim and unit.shape[dim] > 1 for dim in dims):
        raise ArtifactError(
            f"site {name} has scales {tuple(unit.shape)} that differ within one sum: it has no integers"
        )
    return unit


def _per_group(name: str, unit: Tensor, groups: int, channels: int) -> Tensor:
    """Of an image's channels, a unit for each group of them: (groups, 1, 1), or one for all."""
    if unit.numel() == 1:
        return unit.reshape(())
    found = unit.reshape(groups, -1) if unit.numel() == channels and unit.shape[-2:] == (1, 1) else None
    if found is None or not bool((found == found[:, :1]).all()):
        raise ArtifactError(
            f"site {name} has scales {tuple(unit.shape)} that differ within one sum: it has no integers"
        )
    return found[:, :1, None]


# --- the executor ----------------------------------------------------------------------------------------------------


class Encoder:
    """From values to what a product takes: their codes, int64."""

    def __init__(self, quantizer: Quantizer, site: IntegerSite):
        self.quantizer = quantizer

    @staticmethod
    def key(site: IntegerSite) -> str:
        """Sites of the same key share what is encoded for one of them."""
        return "codes"

    def __call__(self, x: Tensor) -> Tensor:
        return self.lift(self.quantizer.quantize(x))

    def lift(self, code: Tensor) -> Tensor:
        return code.to(torch.int64)


class Product:
    """A site's product of codes, in int64 on the CPU."""

    def __init__(self, site: IntegerSite):
        self.site = site
        self._weight = None if site.weight is None else site.weight_integers().cpu()
        self.nbytes = 0 if self._weight is None else self._weight.nbytes

    def accumulate(self, left: Tensor, right: Tensor | None = None) -> list[Tensor]:
        """Exact sums, int64: for each pair of parts what its scale is shaped against."""
        site = self.site
        lefts = [part.cpu() for part in site.left.integers(left)]
        if site.geometry is not None:
            lefts = [site.rows(part) for part in lefts]
        if self._weight is None:
            assert right is not None
            site.check_terms(left.shape[-1])
            rights = [part.cpu() for part in site.right.integers(right)]
        else:
            rights = [self._weight]
        return [torch.matmul(x, y).to(left.device) for x in lefts for y in rights]

    def __call__(self, left: Tensor, right: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        return finish(self.site, self.accumulate(left, right), bias, left.shape)


def finish(site: IntegerSite, accumulators: list[Tensor], bias: Tensor | None, shape: torch.Size) -> Tensor:
    """The site's output: accumulators times scales, plus bias. shape: of the left operand."""
    parts = [sums.to(scale.dtype) * scale for sums, scale in zip(accumulators, site.scales, strict=True)]
    result = sum(parts[1:], start=parts[0])
    if site.geometry is None:
        return result if bias is None else result + bias
    result = site.image(result, shape)
    return result if bias is None else result + bias[:, None, None]
