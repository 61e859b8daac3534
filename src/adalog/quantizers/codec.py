"""The form that codes and quantizers have in a file: packed bits, and JSON."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from adalog.errors import ArtifactError
from adalog.quantizers.assignment import QuantizedTensor
from adalog.quantizers.quantizer import MAX_BITS, MIN_BITS, Quantizer, check_parameters, read_scale
from adalog.stored import is_whole
from adalog.stored import pack as pack_bits
from adalog.stored import unpack as unpack_bits

MAX_DIMENSIONS = 8
_SCALES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_NAMED = {str(dtype).removeprefix("torch."): dtype for dtype in _SCALES}


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes, uint8, as a bit stream (`stored.pack`): uint8, (bytes,)."""
    return torch.from_numpy(pack_bits(codes.detach().cpu().numpy(), bits))


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """The `count` codes of a bit stream (`stored.unpack`): uint8, (count,)."""
    return torch.from_numpy(unpack_bits(packed.numpy(), bits, count))


def check_shape(name: str, shape: Any) -> None:
    """Raise ArtifactError for a value that is not the shape of a tensor."""
    if not (
        isinstance(shape, list) and len(shape) <= MAX_DIMENSIONS and all(is_whole(size, 1, 2**31) for size in shape)
    ):
        raise ArtifactError(f"{name} has the shape {shape}")


def encode_quantizer(quantizer: Quantizer) -> dict[str, Any]:
    """The quantizer's `fields`, with the type of its numbers where that is not float32."""
    kind = str(quantizer.scale.dtype).removeprefix("torch.")
    return {**({} if kind == "float32" else {"dtype": kind}), **quantizer.fields()}


def decode_quantizer(name: str, given: Mapping[str, Any]) -> Quantizer:
    """The quantizer of which `encode_quantizer` gave this.

    name: the quantizer's, for messages. Raises ArtifactError for fields that no quantizer has.
    """
    bits, dtype = given["bits"], given.get("dtype", "float32")
    if not is_whole(bits, MIN_BITS, MAX_BITS):
        raise ArtifactError(f"quantizer {name} has {bits!r} bits")
    if not isinstance(dtype, str) or dtype not in _NAMED:
        raise ArtifactError(f"quantizer {name} has numbers of the type {dtype!r}, none of {', '.join(_NAMED)}")
    check_shape(f"quantizer {name}", given["shape"])
    kind = kind_of(f"quantizer {name}", given["kind"])
    found = kind.of_fields(name, given, read_scale(name, given["scale"], given["shape"], _NAMED[dtype]))
    odd = sorted((given.keys() - {"dtype"}) ^ found.fields().keys())
    if odd:
        raise ArtifactError(f"quantizer {name} lacks the fields, or has fields of its own: {', '.join(odd)}")
    return found


def decode_weight(name: str, kind: Any, stored: Mapping[str, Tensor], bits: int, shape: list[int]) -> QuantizedTensor:
    """The weight of this shape whose codes and quantizer have the tensors `stored`, by name ("codes", "scale", ...).

    Raises ArtifactError for tensors that no weight has.
    """
    try:
        packed, scale = stored["codes"], stored["scale"]
        if packed.dtype != torch.uint8 or packed.ndim != 1 or scale.dtype not in _SCALES:
            raise ArtifactError(f"weight {name} has codes and scales of the types {packed.dtype} and {scale.dtype}")
        codes = unpack(packed, bits, math.prod(shape)).reshape(shape)
        for part, value in stored.items():
            if part != "codes" and list(value.shape) != shape[:1]:
                raise ArtifactError(f"weight {name} has the shape {shape} and {list(value.shape)} parameters")
        check_parameters(name, scale, torch.zeros_like(scale), bits)
        quantizer = kind_of(f"weight {name}", kind).of_stored(name, stored, bits)
    except KeyError as missing:
        raise ArtifactError(f"tensors and header do not name the same: {missing.args[0]}/{name}") from missing
    odd = sorted(stored.keys() - quantizer.stored().keys() - {"codes"})
    if odd:
        raise ArtifactError(f"tensors and header do not name the same: {odd[0]}/{name}")
    lead = (-1, *(1 for _ in shape[1:]))
    return checked_weight(name, QuantizedTensor(codes, quantizer.map(lambda value: value.reshape(lead))))


def checked_weight(name: str, weight: QuantizedTensor) -> QuantizedTensor:
    """The weight itself. Raises ArtifactError for a kind that no weight has, and for codes that its quantizer lacks."""
    quantizer = weight.quantizer
    type(quantizer).of_stored(name, quantizer.stored(), quantizer.bits)
    most = int(weight.codes.max()) if weight.codes.numel() else 0
    if most >= quantizer.code_count:
        raise ArtifactError(f"weight {name} has the code {most}: there are {quantizer.code_count} codes")
    return weight


def kind_of(what: str, kind: Any) -> type[Quantizer]:
    """The class of quantizers that has this name in files.

    what: is of this kind, for messages. Raises ArtifactError for a name that no class has.
    """
    found = [each for each in _derived(Quantizer) if getattr(each, "kind", None) == kind]
    if kind is None or not found:
        raise ArtifactError(f"{what} is of the unknown kind {kind!r}")
    return found[-1]


def _derived(base: type[Any]) -> Iterator[type[Quantizer]]:
    for each in base.__subclasses__():
        yield each
        yield from _derived(each)
