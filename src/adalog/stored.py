"""Read the contents of files without PyTorch: checked JSON, and codes as a bit stream."""

import json
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from adalog.errors import ArtifactError

# The most bytes of JSON that a file may have. A model of 40 blocks has far fewer. Python objects take much more memory
# than their JSON, so this also limits the memory that a hostile file can claim.
MAX_JSON = 2**23
_UNITS = 1 << 15  # units of a bit stream that are unpacked at once, so that temporaries stay in the cache

Bytes = npt.NDArray[np.uint8]


def check(holds: bool, message: str) -> None:
    """Raise ArtifactError with this message unless the condition holds."""
    if not holds:
        raise ArtifactError(message)


def parse_json(text: str) -> Any:
    """Parse a JSON text. Raises ArtifactError if an object has a key twice, or if a number is not finite."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        check(len(values) == len(pairs), "a JSON object has a key twice")
        return values

    def finite(number: str) -> float:
        check(math.isfinite(float(number)), f"{number} is not a number of JSON")
        return float(number)

    return json.loads(text, object_pairs_hook=once, parse_float=finite, parse_constant=finite)


def check_text(value: Any) -> None:
    """Raise ArtifactError for text with control characters, which a terminal would obey."""
    if isinstance(value, str):
        check(value.isprintable(), f"the text {value!r} has characters that do not print")
    elif isinstance(value, (dict, list)):
        for item in [*value, *value.values()] if isinstance(value, dict) else value:
            check_text(item)


def is_whole(value: Any, low: int, high: float = math.inf) -> bool:
    """Return True if a value of JSON is a whole number in [low, high]."""
    return type(value) is int and low <= value <= high


def pack(codes: Bytes, bits: int) -> Bytes:
    """Pack codes of any shape into a bit stream (bytes,), least significant bit first.

    Raises ValueError for a code that is not below 2**bits.
    """
    flat = codes.reshape(-1)
    if flat.size and int(flat.max()) >= 2**bits:
        raise ValueError(f"code {int(flat.max())} does not fit in {bits} bits")
    stream = (flat[:, None] >> np.arange(bits, dtype=np.uint8)) & 1
    return np.packbits(stream.reshape(-1), bitorder="little")


def unpack(packed: Bytes, bits: int, count: int) -> Bytes:
    """Unpack `count` codes from a bit stream: (count,).

    Raises ArtifactError for a stream of another length, or if a bit after the last code is not zero.
    """
    size = -(-count * bits // 8)
    check(len(packed) == size, f"{count} codes of {bits} bits take {size} bytes, the file has {len(packed)}")
    check(
        not size or int(packed[-1]) >> (count * bits - 8 * (size - 1)) == 0, "the bits after the last code are not zero"
    )
    # The stream consists of units: each has a whole number of bytes and a whole number of codes.
    bytes_of, codes_of = bits // math.gcd(bits, 8), 8 // math.gcd(bits, 8)
    word = np.uint8 if bytes_of == 1 else np.uint32 if bytes_of < 4 else np.uint64
    units = -(-size // bytes_of)
    stream = np.zeros((units, bytes_of), np.uint8)
    stream.reshape(-1)[:size] = packed
    codes = np.empty((units, codes_of), np.uint8)
    for start in range(0, units, _UNITS):
        span = slice(start, start + _UNITS)
        words: npt.NDArray[Any] = stream[span, 0].astype(word)
        for i in range(1, bytes_of):
            more: npt.NDArray[Any] = stream[span, i].astype(word)
            words |= more << 8 * i
        for i in range(codes_of):
            codes[span, i] = words >> bits * i & 2**bits - 1
    return codes.reshape(-1)[:count]
