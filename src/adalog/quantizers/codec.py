"""Encode codes and quantizers for files, as packed bits and JSON, and decode them."""

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
    """Pack uint8 codes into a bit stream (`stored.pack`): uint8, (bytes,)."""
    return torch.from_numpy(pack_bits(codes.detach().cpu().numpy(), bits))


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """Unpack the `count` codes of a bit stream (`stored.unpack`): uint8, (count,)."""
    return torch.from_numpy(unpack_bits(packed.numpy(), bits, count))


def check_shape(name: str, shape: Any) -> None:
    """Raise ArtifactError if the value is not the shape of a tensor."""
    if not (
        isinstance(shape, list) and len(shape) <= MAX_DIMENSIONS and all(is_whole(size, 1, 2**31) for size in shape)
    ):
        raise ArtifactError(
            f"{name} has the shape {shape}, which is not a list of up to {MAX_DIMENSIONS} positive whole numbers"
        )


def encode_quantizer(quantizer: Quantizer) -> dict[str, Any]:
    """Return the quantizer's `fields`, and the dtype of its numbers if that is not float32."""
    kind = str(quantizer.scale.dtype).removeprefix("torch.")
    return {**({} if kind == "float32" else {"dtype": kind}), **quantizer.fields()}


def decode_quantizer(name: str, record: Mapping[str, Any]) -> Quantizer:
    """Return the quantizer of this name that `encode_quantizer` encoded.

    Raises ArtifactError if the fields do not describe a quantizer.
    """
    bits, dtype = record["bits"], record.get("dtype", "float32")
    if not is_whole(bits, MIN_BITS, MAX_BITS):
        raise ArtifactError(f"quantizer {name} has {bits!r} bits, but quantizers have {MIN_BITS} to {MAX_BITS}")
    if not isinstance(dtype, str) or dtype not in _NAMED:
        raise ArtifactError(f"quantizer {name} has the dtype {dtype!r}, which is not one of {', '.join(_NAMED)}")
    check_shape(f"quantizer {name}", record["shape"])
    kind = kind_of(f"quantizer {name}", record["kind"])
    quantizer = kind.of_fields(name, record, read_scale(name, record["scale"], record["shape"], _NAMED[dtype]))
    names = sorted((record.keys() - {"dtype"}) ^ quantizer.fields().keys())
    if names:
        raise ArtifactError(f"quantizer {name} has missing or unknown fields: {', '.join(names)}")
    return quantizer


def decode_weight(name: str, kind: Any, stored: Mapping[str, Tensor], bits: int, shape: list[int]) -> QuantizedTensor:
    """Return the weight of this shape from its stored tensors, by name ("codes", "scale", ...).

    Raises ArtifactError if the tensors do not describe a weight.
    """
    try:
        packed, scale = stored["codes"], stored["scale"]
        if packed.dtype != torch.uint8 or packed.ndim != 1 or scale.dtype not in _SCALES:
            raise ArtifactError(
                f"weight {name} has codes and scales of the types {packed.dtype} and {scale.dtype}: "
                "codes must be a uint8 vector, and scales floating-point"
            )
        codes = unpack(packed, bits, math.prod(shape)).reshape(shape)
        for part, value in stored.items():
            if part != "codes" and list(value.shape) != shape[:1]:
                raise ArtifactError(
                    f"weight {name} has the shape {shape}, but its {part} has the shape {list(value.shape)}: "
                    "it must have one number per row of the weight"
                )
        check_parameters(name, scale, torch.zeros_like(scale), bits)
        quantizer = kind_of(f"weight {name}", kind).of_stored(name, stored, bits)
    except KeyError as missing:
        raise ArtifactError(
            f"the tensors and the header do not match: only one of them names {missing.args[0]}/{name}"
        ) from missing
    names = sorted(stored.keys() - quantizer.stored_parameters().keys() - {"codes"})
    if names:
        raise ArtifactError(f"the tensors and the header do not match: only one of them names {names[0]}/{name}")
    lead = (-1, *(1 for _ in shape[1:]))
    return check_weight(name, QuantizedTensor(codes, quantizer.map(lambda value: value.reshape(lead))))


def check_weight(name: str, weight: QuantizedTensor) -> QuantizedTensor:
    """Return the weight unchanged if it is valid.

    Raises ArtifactError if weights cannot have this kind of quantizer, or if a code is too large for the quantizer.
    """
    quantizer = weight.quantizer
    type(quantizer).of_stored(name, quantizer.stored_parameters(), quantizer.bits)
    most = int(weight.codes.max()) if weight.codes.numel() else 0
    if most >= quantizer.code_count:
        raise ArtifactError(
            f"weight {name} has the code {most}, but its quantizer has only {quantizer.code_count} codes"
        )
    return weight


def kind_of(what: str, kind: Any) -> type[Quantizer]:
    """Return the imported quantizer class that has this name in files.

    what: the thing that has this kind, for messages.
    Raises ArtifactError if no class has this name.
    """

    def subclasses(base: type[Any]) -> Iterator[type[Quantizer]]:
        for subclass in base.__subclasses__():
            yield subclass
            yield from subclasses(subclass)

    matches = [candidate for candidate in subclasses(Quantizer) if getattr(candidate, "kind", None) == kind]
    if kind is None or not matches:
        raise ArtifactError(f"{what} is of the unknown kind {kind!r}")
    return matches[-1]
