"""Build the operands of a group's product from observed values, and choose the formats to search."""

import difflib
import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor

from adalog.calibration.observe import Request
from adalog.config import Config, pinned_widths, power_law_format, uniform_format, weight_format
from adalog.errors import CalibrationError
from adalog.graph.activations import GELUS, POWER_LAW_ACTIVATIONS
from adalog.graph.convolution import conv_geometry, patch_view
from adalog.graph.program import Program
from adalog.graph.rewrite import SiteGroup
from adalog.graph.sites import Pair, Site
from adalog.quantizers import FLOAT_BITS, Fold, Format, at_least_float32
from adalog.quantizers.quantiles import coprime
from adalog.search.bounds import Search
from adalog.search.operand import Operand

OperandKind = Literal["weight", "activation", "softmax", "input"]
_BYTES_PER_ELEMENT = 16  # approximate bytes of a search's temporaries per element (`_product_elements`)
# The most rows that the search of a site reads, by `benchmarks/large.py`. The usual models have fewer on 32 images of
# 224 x 224.
_ROWS = 1 << 17


def check_pinned(config: Config, sites: Sequence[Site]) -> None:
    """Raise ValueError if a pattern of `pinned` matches no site, or misses all sites with operands of its kinds."""
    names = [site.name for site in sites]

    def widths_of(sites: Sequence[Site]) -> set[str]:
        kinds = (operand_kinds(site.role, site.left_source.kind) for site in sites)
        return {f"{kind}_bits" for pair in kinds for kind in pair}

    for pattern, bits in config.pinned:
        matching = [site for site in sites if fnmatchcase(site.name, pattern)]
        if not matching:
            similar = difflib.get_close_matches(pattern, names, 3, 0) or ["none"]
            raise ValueError(
                f"pinned: no site's name matches {pattern!r}; the closest are {', '.join(similar)} "
                "(`adalog inspect MODEL` lists all sites; * matches any characters)"
            )
        widths = pinned_widths(bits).keys()
        # A detector has parts without such operands, and all of its parts have the same pins.
        if widths & widths_of(sites) and not widths & widths_of(matching):
            raise ValueError(
                f"pinned: {bits!r} has no effect on {pattern!r}, because no site that matches has such an operand: use "
                "w for weights, a for activations, s for attention after softmax, i for the input image"
            )


def together(group: SiteGroup) -> tuple[str, ...]:
    """Return the names of all sites that share this group's bits through an activation or a folded norm."""
    return group.pair.sites if group.pair is not None else tuple(site.name for site in group.sites)


def choices_of(group: SiteGroup, config: Config) -> Config:
    """Return the choices for a group, with the bits pinned for any of its sites or any site of its norm."""
    return config.for_sites(together(group))


def pin_owners(groups: Iterable[SiteGroup], config: Config) -> dict[str, str]:
    """Return the sites that take bits pinned for another site, each with the name of that other site."""
    owners = {}
    for group in groups:
        for site in group.sites:
            if config.for_sites([site.name]) != choices_of(group, config):  # a pattern matches only another site
                patterns = [pattern for pattern, _ in reversed(config.pinned) if not fnmatchcase(site.name, pattern)]
                pairs = itertools.product(patterns, together(group))
                owners[site.name] = next(name for pattern, name in pairs if fnmatchcase(name, pattern))
    return owners


def operand_kinds(role: str, source: str) -> tuple[OperandKind, OperandKind]:
    """Return the kinds of the left and right operands of a site with this role and this kind of left source."""
    left: OperandKind = "activation"
    if source == "softmax":
        left = "softmax"
    elif role == "conv" and source == "input":
        left = "input"
    return left, "activation" if role in ("qk", "av") else "weight"


def formats_of(site: Site, config: Config) -> list[Format]:
    """Return the formats to search for the left operand of a site; among equally good ones the first wins.

    After an activation such as SiLU, a logarithmic or a uniform quantizer may be better, depending on the site, so both
    formats are returned. After GELU, the uniform one is returned only if the choices say so, or for a grouped
    convolution (`rarely_uniform`).
    """
    kind = site.left_source.kind
    operand = operand_kinds(site.role, kind)[0]
    bits: int = getattr(config, f"{operand}_bits")
    if operand == "softmax":
        return [power_law_format(config.post_softmax, bits, config, 0.0)]
    if kind not in POWER_LAW_ACTIVATIONS:
        return [uniform_format(bits, config)]
    own = -site.left_source.minimum
    offset = config.offset if config.offset is not None and kind == "gelu" else own
    power_law = power_law_format(config.post_gelu, bits, config, offset)
    compares = isinstance(config.search, Search) and config.search.compare_uniform
    sure = rarely_uniform(site) and not compares
    return [power_law] if sure or not power_law.for_power_laws else [power_law, uniform_format(bits, config)]


def rarely_uniform(site: Site) -> bool:
    """Return True for a site after GELU, unless a uniform quantizer has a scale per group there."""
    grouped = site.role == "conv" and conv_geometry(site.node)[3] > 1
    return site.left_source.kind in GELUS and not grouped


def operands_of(
    program: Program,
    group: SiteGroup,
    values: Mapping[str, Tensor],
    config: Config,
    fold: Fold | None,
    activation: Format,
) -> tuple[Operand, Operand]:
    """Return both operands of the group's product with their formats, the right one transposed.

    values: the observed values by name. activation: the format of the left operand.
    """
    site = group.first
    if site.role in ("qk", "av"):
        x, right = values[site.left], values[site.right].transpose(-1, -2).contiguous()
        own = [(1,) if config.per_head and name in site.headed else () for name in (site.left, site.right)]
        lead = torch.broadcast_shapes(x.shape[:-2], right.shape[:-2])
        x, right = (value.expand(*lead, *value.shape[-2:]) for value in (x, right))
        alike = site.role == "qk"  # the rows of transposed V are channels
        right_format = uniform_format(config.activation_bits, config, *own[1])
        left = Operand(x, activation.by_groups(own[0]) if alike else activation)
        return left, Operand(right, right_format, alike=alike)
    inputs = [values[name] for name in dict.fromkeys(group.read)]
    if site.role == "conv":
        return _conv_operands(site, inputs, program.tensors[site.right], activation, config)
    weight = torch.cat([program.tensors[member.right] for member in group.sites])
    if fold is not None:
        inputs, weight = [fold.activation(x) for x in inputs], fold.weight(weight)
    rows = join([x.reshape(-1, x.shape[-1]) for x in inputs], dim=0)
    return Operand(rows, activation), Operand(weight, weight_format(config, 0))


def check_squares(name: str, left: Operand, right: Operand) -> None:
    """Raise CalibrationError if the squares of a product's values, which a search adds up, overflow."""
    if left.is_float and right.is_float:
        return
    ends = (at_least_float32(operand.values).aminmax() for operand in (left, right))
    peaks = torch.stack([torch.maximum(high, -low).double() for low, high in ends]).tolist()
    largest = math.prod(max(peak, 1.0) for peak in peaks) * math.sqrt(left.values.shape[-1])
    if largest > math.sqrt(torch.finfo(torch.float32).max):
        raise CalibrationError(
            f"values of {name} reach {max(peaks):.2g}, and the search adds up squares, which overflow: make them "
            "smaller in the model, or use the method minmax, which does not square them"
        )


def in_shape_of_product(program: Program, group: SiteGroup, values: Mapping[str, Tensor]) -> Tensor:
    """Convert values in the shapes of multiplications' outputs, by node name, to the shape of the group's product."""
    site, outputs = group.first, dict[str, Tensor]()  # by input, which the product holds once
    for call in group.calls:
        results = [values[site.node.name] for site in call]
        if site.role == "linear":
            rows = torch.cat([value.flatten(0, -2) for value in results], dim=-1)
        elif site.role == "conv":
            groups = conv_geometry(site.node)[3]
            images = (image.unflatten(0, (groups, -1)).movedim(1, -1) for image in results[0])
            rows = _conv_rows(images, len(results[0]), _overlap(site, program.tensors[site.right]))
        else:
            rows = results[0]
        before = outputs.get(call[0].left)
        outputs[call[0].left] = rows if before is None else before + rows
    return join(list(outputs.values()), dim=-2)


def why_unfolded(
    pair: Pair, config: Config, sites: Sequence[Site], shapes: Mapping[str, Tensor], head: Collection[str]
) -> str:
    """Return the reason why these choices do not fold a foldable norm, or an empty string if they fold it.

    head: the nodes of the last block.
    """
    inputs = (shapes[site.left] for site in sites if site.name in pair.sites)  # none of them is called several times
    rows = min(x[..., 0].numel() for x in inputs)  # a head may read only one token per image
    if config.activation_bits == FLOAT_BITS:
        return "its linears take float activations"
    if refused := config.search.refuses_fold(config.weight_bits, config.activation_bits):
        return refused
    if not config.fold_head and pair.norm.name in head:
        return "it belongs to the head"
    if rows < config.fold_rows:
        return f"its linears read {rows} rows in calibration; one scale per channel needs {config.fold_rows}"
    return ""


def request_of(program: Program, group: SiteGroup, sites: Sequence[Site], shapes: Mapping[str, Tensor]) -> Request:
    """Return the values that the search of a group needs, including those for the fold of its norm.

    sites: all sites of the program. shapes: every value of the program without data, from `trace`.
    """
    names = {*group.read, *(site.left for site in sites if group.pair is not None and site.name in group.pair.sites)}
    if group.first.role in ("qk", "av"):
        names.add(group.first.right)
    users = (site for site in sites for call in site.calls if not names.isdisjoint((call.left, call.right)))
    by_row = all(site.role == "linear" for site in users)
    scratch = _product_elements(program, group, shapes) * _BYTES_PER_ELEMENT
    stride = max(1, _product_rows(program, group, shapes) // _ROWS)
    return Request(group.name, frozenset(names), by_row, scratch, stride)


def _product_rows(program: Program, group: SiteGroup, shapes: Mapping[str, Tensor]) -> int:
    """Return the number of rows of a product's left operand that one quantizer serves."""
    site, inputs = group.first, [shapes[name] for name in dict.fromkeys(group.read)]
    if site.role == "conv":
        rows = sum(shapes[call.node.name][:, 0].numel() for call in site.calls)
        return rows // max(1, _overlap(site, program.tensors[site.right]))
    heads = inputs[0].shape[-3] if site.left in site.headed else 1
    return sum(value[..., 0].numel() for value in inputs) // heads


def _product_elements(program: Program, group: SiteGroup, shapes: Mapping[str, Tensor]) -> int:
    """Return the approximate number of elements of a product's left operand or output, whichever is larger."""
    site, inputs = group.first, [shapes[name] for name in dict.fromkeys(group.read)]
    if site.role == "conv":
        return sum(value.numel() for value in inputs)
    if site.role == "linear":
        columns = sum(len(program.tensors[member.right]) for member in group.sites)
    else:
        columns = shapes[site.right].shape[-1]
    return sum(value[..., 0].numel() for value in inputs) * max(inputs[0].shape[-1], columns)


def _conv_operands(
    site: Site, inputs: Sequence[Tensor], weight: Tensor, activation: Format, config: Config
) -> tuple[Operand, Operand]:
    """Return a convolution as a product of patches, (T, I), and kernels, (O, I).

    A grouped convolution has the shapes (groups, T, I) and (groups, O / groups, I). If patches overlap, so that each
    value is in n of them, every n-th patch is used, as long as 1,024 are left.
    """
    stride, padding, dilation, groups = conv_geometry(site.node)
    kernel, overlap = (weight.shape[2], weight.shape[3]), _overlap(site, weight)

    def windows(image: Tensor) -> Tensor:
        return patch_view(image, kernel, stride, padding, dilation)

    def rows(images: Tensor) -> Tensor:
        return _conv_rows((windows(image.unflatten(0, (groups, -1))) for image in images), len(images), overlap)

    def inside(images: Tensor) -> Tensor:  # the same for all groups and channels
        ones = windows(images.new_ones(1, 1, *images.shape[2:]))
        ones = ones.expand(*ones.shape[:3], weight.shape[1], *kernel)
        return _conv_rows([ones] * len(images), len(images), overlap)

    mask, x = None, join([rows(images) for images in inputs], dim=-2)
    if any(padding) and not activation.has_zero:
        mask = join([inside(images) for images in inputs], dim=-2).expand_as(x)
    left = in_format(Operand(x, activation, mask), activation, config)
    if groups == 1:
        return left, Operand(weight.flatten(1), weight_format(config, 0))
    return left, Operand(weight.reshape(groups, -1, weight[0].numel()), weight_format(config, 0, 1))


def in_format(operand: Operand, activation: Format, config: Config) -> Operand:
    """Return the left operand of a linear or convolution in another format, with the same values.

    operand: in a format without a level for zero, if the new one has none either: only such a format has a mask. A
    grouped convolution, (groups, T, I), has one scale per group if the format and the choices allow it, because each
    output reads only one group.
    """
    if operand.values.ndim == 3 and config.per_group:
        activation = activation.by_groups((0,))
    return replace(operand, format=activation, mask=None if activation.has_zero else operand.mask)


def with_rows(operand: Operand, rows: Tensor) -> Operand:
    """Return the operand with these rows. rows: (T,), or (*batch, T), which broadcasts to the operand's shape."""
    if rows.ndim == 1:
        values, mask = operand.values.index_select(-2, rows), operand.mask
        if mask is not None:  # it is the same for all groups of a convolution
            mask = (mask if mask.ndim == 2 else mask[0]).index_select(0, rows).expand_as(values)
        return replace(operand, values=values, mask=mask)
    index = rows.expand(operand.values.shape[:-1])[..., None].expand_as(operand.values)
    return replace(operand, values=operand.values.gather(-2, index))


def join(rows: list[Tensor], dim: int) -> Tensor:
    """Concatenate the rows of several inputs; a single input is not copied."""
    return rows[0] if len(rows) == 1 else torch.cat(rows, dim)


def _overlap(site: Site, weight: Tensor) -> int:
    """Return the number of a convolution's patches that hold the same value."""
    return weight.shape[2] * weight.shape[3] // math.prod(conv_geometry(site.node)[0])


def _conv_rows(images: Iterable[Tensor], batch: int, overlap: int) -> Tensor:
    """Return every n-th row of all images, as (groups, T, I), or as (T, I) if there is one group.

    images: (groups, h, w, ...) each, with h w rows; views, of which only the rows that are returned are copied.
    overlap: the largest n.
    """
    result, start = torch.empty(0), 0
    for index, image in enumerate(images):
        groups, height, width, *rest = image.shape
        step = coprime(max(1, min(overlap, batch * height * width // 1024)), height * width)
        places = torch.arange(index % step, height * width, step, device=image.device)
        if not index:
            total = sum(-(-(height * width - start % step) // step) for start in range(batch))
            result = image.new_empty(groups, total, math.prod(rest))
        place = result[:, start : start + len(places)]
        if step == 1:
            place.view(image.shape).copy_(image)
        else:
            place.view(groups, len(places), *rest).copy_(image[:, places // width, places % width])
        start += len(places)
    return result if len(result) > 1 else result[0]
