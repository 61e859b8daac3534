"""The form that codes and quantizers have in a file: packed bits, and JSON."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adalog.errors import ArtifactError
from adalog.quantizers.logarithmic import LogQuantizer
from adalog.quantizers.quantizer import MAX_BITS, MIN_BITS, Quantizer, is_whole, read_scale
from adalog.quantizers.split import SplitUniformQuantizer
from adalog.quantizers.twin import TwinUniformQuantizer
from adalog.quantizers.uniform import UniformQuantizer

KINDS: dict[str, type[Quantizer]] = {
    kind.kind: kind for kind in (UniformQuantizer, LogQuantizer, TwinUniformQuantizer, SplitUniformQuantizer)
}
MAX_DIMENSIONS = 8


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes as a bit stream, least significant bit first: uint8, (bytes,).

    codes: uint8, any shape. Raises ValueError for a code that is not below 2**bits.
    """
    flat = codes.detach().cpu().numpy().reshape(-1)
    if flat.size and int(flat.max()) >= 2**bits:
        raise ValueError(f"code {int(flat.max())} does not fit in {bits} bits")
    stream = (flat[:, None] >> np.arange(bits, dtype=np.uint8)) & 1
    return torch.from_numpy(np.packbits(stream.reshape(-1), bitorder="little"))


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """The `count` codes of a bit stream: uint8, (count,).

    Raises ArtifactError for a stream of another length, or with bits other than zero after the last code.
    """
    if packed.numel() != -(-count * bits // 8):
        raise ArtifactError(
            f"{count} codes of {bits} bits take {-(-count * bits // 8)} bytes, the file has {packed.numel()}"
        )
    stream = np.unpackbits(packed.numpy(), bitorder="little")
    if stream[count * bits :].any():
        raise ArtifactError("the bits after the last code are not zero")
    weights = (1 << np.arange(bits)).astype(np.uint8)
    return torch.from_numpy(stream[: count * bits].reshape(-1, bits) @ weights)


def check_shape(name: str, shape: Any) -> None:
    """Raise ArtifactError for a value that is not the shape of a tensor."""
    if not (
        isinstance(shape, list) and len(shape) <= MAX_DIMENSIONS and all(is_whole(size, 1, 2**31) for size in shape)
    ):
        raise ArtifactError(f"{name} has the shape {shape}")


def decode_quantizer(name: str, given: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> Quantizer:
    """The quantizer whose `fields` are given, with parameters of the type `dtype`.

    name: the quantizer's, for messages. Raises ArtifactError for fields that no quantizer has.
    """
    bits = given["bits"]
    if not is_whole(bits, MIN_BITS, MAX_BITS):
        raise ArtifactError(f"quantizer {name} has {bits!r} bits")
    check_shape(f"quantizer {name}", given["shape"])
    kind = given["kind"]
    if kind not in KINDS:
        raise ArtifactError(f"quantizer {name} is of the unknown kind {kind!r}")
    return KINDS[kind].of_fields(name, given, read_scale(name, given["scale"], given["shape"], dtype))
