"""Encode and multiply the operands of single sites with the compiled kernels, with the same interface as `reference`.

A left operand is stored as planes of unsigned bytes: codes of a uniform quantizer, or entries of an 8-bit or 16-bit
table.
"""

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from adalog.quantizers import LogQuantizer, Quantizer, UniformQuantizer
from adalog.runtime import integer, reference
from adalog.runtime.native import abi
from adalog.runtime.native.tables import entries_of
from adalog.runtime.reference import INT32, IntegerSite, finish

MOST_PLACES = 256  # taps of a depthwise kernel at most: two for each of `MOST_PAIRS` in native.cpp
Planes = list[Tensor]  # one operand, uint8: its low bytes and, for tables of 16 bits, its high bytes


def zero_point(quantizer: Quantizer) -> int:
    """Return the zero point that all codes of a left operand share, which is 0 for the entries of a table."""
    return int(quantizer.zero_point.reshape(-1)[0]) if isinstance(quantizer, UniformQuantizer) else 0


def top_of(entries: Tensor) -> int:
    """Return the largest byte in either plane of some entries."""
    return int(torch.maximum(entries & 255, entries >> 8).max())


# --- which sites have a kernel ---------------------------------------------------------------------------------------


def takes(site: IntegerSite) -> bool:
    """Return True if a site has a kernel: it multiplies bytes, sums in 32 bits, and has one scale per head."""
    left, right = site.left, site.right
    if not isinstance(right, UniformQuantizer) or site.bits > 32 or not site.terms:
        return False
    if any(scale.dtype != torch.float32 or scale.device.type != "cpu" for scale in site.scales):
        return False
    if any(isinstance(side, UniformQuantizer) and not _codes_hold_zero(side) for side in (left, right)):
        return False
    if is_depthwise(site):
        return len(site.scales) == 1 and isinstance(left, UniformQuantizer) and site.terms <= MOST_PLACES
    if site.weight is None:
        known = len(site.scales) == 1 and isinstance(left, (UniformQuantizer, LogQuantizer))
        return known and all(map(_per_head, (left, right)))
    # A second part is ones: only padding changes its sums.
    has_ones = len(site.scales) == 2 and site.geometry is not None and isinstance(left, LogQuantizer)
    if len(site.scales) > 1 and not has_ones:
        return False
    return site.groups == 1 and left.scale.numel() == 1 and site.weight.numel() > 0 and site.terms < INT32 >> 16


def is_depthwise(site: IntegerSite) -> bool:
    """Return True if a site is a convolution of each channel alone."""
    weight = site.weight
    return weight is not None and site.groups > 1 and len(weight) == site.groups and weight.shape[1] == 1


def is_by_pixel(site: IntegerSite) -> bool:
    """Return True if the terms of a convolution lie pixel by pixel, or False if they lie channel by channel.

    Kernels write images with their channels last. A row of a patch is then one run of bytes, which is quick to copy.
    """
    if site.geometry is None or site.weight is None:
        return False
    channels = site.weight.shape[1]
    kernel, stride, padding, dilation = (across for _, across in site.window)
    within_limits = channels * max(kernel, stride, padding) <= 1 << 16  # `sizes_of` in native.cpp
    return channels > 3 and dilation == 1 and within_limits


def _per_head(quantizer: Quantizer) -> bool:
    """Return True if scales differ at most between the heads of (..., heads, rows, columns)."""
    shape = quantizer.scale.shape
    return quantizer.scale.numel() == 1 or (len(shape) >= 3 and shape[-3] == quantizer.scale.numel())


def _codes_hold_zero(quantizer: UniformQuantizer) -> bool:
    zero = quantizer.zero_point
    return bool((zero >= 0).all()) and bool((zero < 2**quantizer.bits).all())


def encoder_key(site: IntegerSite) -> str:
    """Return the key of a site. Sites with the same key share an encoded operand."""
    return "planes" if takes(site) else integer.DigitEncoder.key(site)


def encoder(quantizer: Quantizer, site: IntegerSite) -> Any:
    """Return the encoder of a site's operand. Without a kernel, the executor "torch" provides the encoder."""
    return ByteEncoder(quantizer) if takes(site) else integer.DigitEncoder(quantizer, site)


def product(site: IntegerSite, context: abi.Context) -> Any:
    """Return the product of a site. Without a kernel, the executor "torch" provides the product."""
    if not takes(site):
        return integer.product(site)
    return DepthwiseProduct(site, context) if is_depthwise(site) else ByteProduct(site, context)


# --- encoders and products -------------------------------------------------------------------------------------------


class ByteEncoder:
    """Encoder of values into the bytes that their codes represent."""

    def __init__(self, quantizer: Quantizer):
        self.quantizer = quantizer
        self._entries = entries_of(quantizer)
        self._planes = 2 if int(self._entries.max()) > 255 else 1

    def __call__(self, x: Tensor) -> Planes:
        return self.lift(self.quantizer.quantize(x))

    def lift(self, code: Tensor) -> Planes:
        """Return the bytes of codes."""
        entries = self._entries[code.long()]
        return [((entries >> (8 * plane)) & 255).to(torch.uint8) for plane in range(self._planes)]


class ByteProduct:
    """The product of one site. nbytes, columns: the bytes and the number of outputs of a stored weight, or 0."""

    def __init__(self, site: IntegerSite, context: abi.Context):
        self.site, self.context = site, context
        self.weights = None if site.weight is None else weights_of(site)
        self.nbytes = 0 if self.weights is None else self.weights.nbytes
        self.columns = 0 if site.weight is None else len(site.weight)

    def ones_sums(self, shape: Sequence[int]) -> Tensor:
        """Return the sums of a convolution's part of ones for an image of this shape, (C, H, W): (L, O), int64."""
        (sums,) = reference.CodeProduct(self.site).sums([torch.ones(1, *shape, dtype=torch.float64)])
        return sums[0, 0].long()

    def rows(self, left: Planes) -> Planes:
        """Return the left operand of a stored weight as (T, I). Padding is the integer 0."""
        if self.site.geometry is None:
            return [plane.reshape(-1, self.site.terms).contiguous() for plane in left]
        fill = zero_point(self.site.left)
        rows = [self.site.rows(plane, fill).reshape(-1, self.site.terms) for plane in left]
        if not is_by_pixel(self.site):
            return rows
        return [plane.unflatten(1, (left[0].shape[1], -1)).transpose(1, 2).flatten(1).contiguous() for plane in rows]

    def accumulate(self, left: Planes, right: Planes | None = None) -> list[Tensor]:
        """Return the same sums as `reference.CodeProduct.accumulate`, from bytes."""
        site, shape = self.site, left[0].shape
        if self.weights is None:
            assert right is not None
            site.check_terms(shape[-1])
            return [self._multiply(left, right[0])]
        rows = self.rows(left)
        sums = torch.empty(len(rows[0]), self.columns, dtype=torch.int32)
        if len(rows[0]):
            self.context.run("linear", linear(self.weights, rows, abi.Output(kind=abi.SUMS, **place(sums))))
        lead = shape[:-1] if site.geometry is None else (shape[0], 1, math.prod(site.sizes(shape)))
        parts = [sums.long().view(*lead, self.columns)]
        if len(site.scales) > 1:
            parts.append(self.ones_sums(shape[1:]).expand_as(parts[0]))
        return parts

    def _multiply(self, left: Planes, right: Tensor) -> Tensor:
        lead = torch.broadcast_shapes(left[0].shape[:-2], right.shape[:-2])
        sums = torch.empty(*lead, left[0].shape[-2], right.shape[-1], dtype=torch.int32)
        if sums.numel():
            alive = list[Any]()
            arguments = matrices(self.site, left, right, sums, alive)
            arguments.out = abi.Output(kind=abi.SUMS, **place(sums))
            self.context.run("product", arguments)
        return sums.long()

    def __call__(self, left: Planes, right: Planes | None = None, bias: Tensor | None = None) -> Tensor:
        return finish(self.site, self.accumulate(left, right), bias, left[0].shape)


class DepthwiseProduct:
    """The product of one site that convolves each channel alone. nbytes, columns: as in `ByteProduct`.

    zero: the zero points of the left operand, (C,), uint8. factors: the weights minus their zero points, two taps of
    the kernel together, (pairs, C, 2), int16.
    """

    def __init__(self, site: IntegerSite, context: abi.Context):
        assert site.weight is not None
        assert isinstance(site.left, UniformQuantizer)
        self.site, self.context, self.columns = site, context, len(site.weight)
        places = site.right.integer(site.weight).flatten(1).t()  # (places, C)
        pairs = torch.nn.functional.pad(places, (0, 0, 0, len(places) % 2)).unflatten(0, (-1, 2))
        self.factors = pairs.transpose(1, 2).to(torch.int16).contiguous()
        self.zero = site.left.zero_point.reshape(-1).expand(self.columns).to(torch.uint8).contiguous()
        self.nbytes = self.factors.nbytes

    def arguments(self, image: Tensor, out: abi.Output) -> abi.Depthwise:
        """Return the arguments of the kernel. image: (B, H, W, C), contiguous. out: the output, for (B L, C)."""
        return abi.Depthwise(
            zero=self.zero.data_ptr(),
            factors=self.factors.data_ptr(),
            pairs=len(self.factors),
            out=out,
            **window_fields(self.site.window, image.permute(0, 3, 1, 2)),
        )

    def accumulate(self, left: Planes, right: None = None) -> list[Tensor]:
        """Return the same sums as `reference.CodeProduct.accumulate`, from bytes: (B, C, L, 1)."""
        image = left[0].permute(0, 2, 3, 1).contiguous()
        count = math.prod(self.site.sizes(left[0].shape))
        sums = torch.empty(len(image) * count, self.columns, dtype=torch.int32)
        if sums.numel():
            self.context.run("depthwise", self.arguments(image, abi.Output(kind=abi.SUMS, **place(sums))))
        return [sums.long().view(len(image), count, self.columns).transpose(1, 2)[..., None]]

    def __call__(self, left: Planes, right: None = None, bias: Tensor | None = None) -> Tensor:
        return finish(self.site, self.accumulate(left), bias, left[0].shape)


def weights_of(site: IntegerSite) -> abi.Weights:
    """Return the stored weight of a site in the layout of the kernels."""
    assert site.weight is not None
    assert isinstance(site.right, UniformQuantizer)
    codes = (site.weight.permute(0, 2, 3, 1) if is_by_pixel(site) else site.weight).flatten(1).contiguous()
    zero = site.right.zero_point.reshape(-1).expand(len(codes)).to(torch.int32).contiguous()
    choices = site.right.bits, zero_point(site.left), top_of(entries_of(site.left))
    return abi.Weights(codes.numpy(), zero.numpy(), site.name, choices)


# --- arguments of kernels --------------------------------------------------------------------------------------------


def place(value: Tensor, *others: Tensor) -> dict[str, int]:
    """Return the fields of `Output` that locate a value whose rows are its last dimension, or its two planes."""
    row = value.stride(-2) if value.ndim > 1 else value.shape[-1]
    fields = {"data": value.data_ptr(), "bytes": bytes_behind(value), "row": row}
    return fields | ({"more": others[0].data_ptr()} if others else {})


def bytes_behind(value: Tensor) -> int:
    """Return the number of bytes from a tensor's first entry to the end of its memory."""
    storage = value.untyped_storage()
    return int(storage.nbytes()) - int(value.storage_offset()) * value.element_size()


def row_fields(x: Tensor) -> dict[str, int]:
    """Return the fields that locate the rows that a kernel reads, (rows, columns)."""
    return {"data": x.data_ptr(), "bytes": bytes_behind(x), "row": x.stride(0), "rows": len(x), "columns": x.shape[1]}


def linear(weights: abi.Weights, rows: Planes, out: abi.Output) -> abi.Linear:
    """Return the arguments of a linear. rows: (T, I), from `ByteProduct.rows`."""
    return abi.Linear(weights=weights.pointer, **_planes(rows), row=rows[0].stride(0), rows=len(rows[0]), out=out)


def _planes(planes: Planes) -> dict[str, int | None]:
    """Return the fields that locate the planes of an operand."""
    low, *high = (plane.data_ptr() for plane in planes)
    return {"data": low, "more": high[0] if high else None, "bytes": min(map(bytes_behind, planes))}


def window_fields(window: Sequence[Sequence[int]], image: Tensor) -> dict[str, Any]:
    """Return the fields of a convolution's images, (B, C, H, W) in any memory order, and of the outputs' window."""
    pairs = zip(("kernel", "stride", "padding", "dilation"), window, strict=True)
    return {
        "data": image.data_ptr(),
        "bytes": bytes_behind(image),
        **dict(zip(("images", "channels", "height", "width"), image.shape, strict=True)),
        **{name: (ctypes.c_int64 * 2)(*pair) for name, pair in pairs},
    }


def matrices(site: IntegerSite, left: Planes, right: Tensor, out: Tensor, alive: list[Any]) -> abi.Matrices:
    """Return the arguments of a product of two computed operands, without the field `out`.

    out: has the shape of the product; its strides locate the batches and heads. alive: as for `side`.
    """
    lead = out.shape[:-2]
    one, other = side(left, lead, site.left, alive, transposed=False), side([right], lead, site.right, alive)
    result = by_batch_and_head(out, lead)
    sizes = {"batches": len(result), "heads": result.shape[1], "rows": out.shape[-2], "columns": out.shape[-1]}
    places = {"out_batch": result.stride(0), "out_head": result.stride(1)}
    return abi.Matrices(**sizes, terms=left[0].shape[-1], left=one, right=other, **places)


def by_batch_and_head(value: Tensor, lead: Sequence[int]) -> Tensor:
    """Return a value as (batches, heads, rows, columns). The heads are the last of the leading dimensions."""
    value = value.expand(*lead, *value.shape[-2:])
    if len(lead) == 2:
        return value
    return value.reshape(math.prod(lead[:-1]), lead[-1] if lead else 1, *value.shape[-2:])


def side(
    planes: Planes, lead: Sequence[int], quantizer: Quantizer, alive: list[Any], *, transposed: bool | None = None
) -> abi.Side:
    """Return the arguments of one operand of a product.

    alive: gets the objects that must live as long as the arguments. transposed: True if the operand's columns are dense
    in memory, False if its rows are; None decides by the strides.
    """
    planes = [by_batch_and_head(plane, lead) for plane in planes]
    if transposed is None:
        transposed = planes[0].stride(-1) != 1 and planes[0].stride(-2) == 1
    if not transposed and planes[0].stride(-1) != 1:
        planes = [plane.contiguous() for plane in planes]
    first = planes[0]
    zero = torch.zeros(first.shape[1], dtype=torch.int32)
    if isinstance(quantizer, UniformQuantizer):
        zero += quantizer.zero_point.reshape(-1).to(torch.int32)
    alive += [planes, zero]
    return abi.Side(
        **_planes(planes),
        batch=first.stride(0),
        head=first.stride(1),
        row=first.stride(-1) if transposed else first.stride(-2),
        zero=zero.data_ptr(),
        bits=quantizer.bits,
        transposed=transposed,
        top=top_of(entries_of(quantizer)),
    )
