"""The only reader and writer of the artifact: one safetensors file that holds a program and its tensors.

Layout (docs/format.md). Metadata key "adalog": JSON with the format version, program, quantizers, config, ledger and
provenance. Tensors: "codes/W" packed b-bit codes, "scale/W" and "zero_point/W" of weights, "float/T" the rest.
Reading runs no code: the program may name only the operations of `program.OPERATIONS`.
"""

import json
import math
import os
import struct
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_safetensors
from safetensors.torch import save as to_safetensors
from torch import Tensor

import adalog
from adalog.config import Config
from adalog.errors import ArtifactError
from adalog.model import LedgerRow, QuantizedModel
from adalog.program import FAKE_QUANTIZE, OPERATIONS, Arg, Node, Output, Program, QuantizedTensor, Ref, refs_of
from adalog.quantizers import MAX_BITS, MIN_BITS, Beyond, LogQuantizer, Quantizer, Rounding, UniformQuantizer

FORMAT = 1
KEY = "adalog"
# What decoding raises for contents that no artifact has.
_DAMAGE = (
    SafetensorError,
    LookupError,
    ValueError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    MemoryError,
)
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16)}
DTYPES |= {
    "float64": torch.float64,
    "int64": torch.int64,
    "int32": torch.int32,
    "bool": torch.bool,
    "uint8": torch.uint8,
}


# --- packing ---------------------------------------------------------------------------------------------------------


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes (uint8, any shape, each below 2**bits) as a bit stream, least significant bit first: uint8, (bytes,)."""
    flat = codes.detach().cpu().numpy().reshape(-1)
    if flat.size and int(flat.max()) >= 2**bits:
        raise ValueError(f"code {int(flat.max())} does not fit in {bits} bits")
    stream = (flat[:, None] >> np.arange(bits, dtype=np.uint8)) & 1
    return torch.from_numpy(np.packbits(stream.reshape(-1), bitorder="little"))


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` codes of a bit stream: uint8, (count,). The stream must be exactly as long as they need."""
    if packed.numel() != -(-count * bits // 8):
        raise ArtifactError(
            f"{count} codes of {bits} bits take {-(-count * bits // 8)} bytes, the file has {packed.numel()}"
        )
    stream = np.unpackbits(packed.numpy(), bitorder="little")
    if stream[count * bits :].any():
        raise ArtifactError("the bits after the last code are not zero")
    weights = (1 << np.arange(bits)).astype(np.uint8)
    return torch.from_numpy(stream[: count * bits].reshape(-1, bits) @ weights)


# --- writing ---------------------------------------------------------------------------------------------------------


def write(model: QuantizedModel, path: Path) -> int:
    """Save a model, whole or not at all. Returns the size [bytes]."""
    content = serialise(model)
    write_whole(path, content)
    return len(content)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file whole or not at all: a temporary one beside it, then a rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def serialise(model: QuantizedModel) -> bytes:
    """The artifact's bytes: the same model gives the same bytes."""
    program = model.program.map_tensors(lambda value: value.detach().cpu())
    tensors: dict[str, Tensor] = {}
    shapes: dict[str, Any] = {}
    for name, weight in program.weights.items():
        tensors[f"codes/{name}"] = pack(weight.codes, weight.quantizer.bits)
        tensors[f"scale/{name}"] = weight.quantizer.scale.reshape(-1).contiguous()
        tensors[f"zero_point/{name}"] = weight.quantizer.zero_point.reshape(-1).to(torch.uint8)
        shapes[name] = [weight.quantizer.bits, list(weight.codes.shape)]
    for name, value in program.tensors.items():
        if name not in program.weights:
            tensors[f"float/{name}"] = _smallest(value).contiguous()
    header = {
        "format": FORMAT,
        "version": adalog.__version__,
        "config": json.loads(model.config.to_json()),
        "provenance": model.provenance,
        "refusals": model.refusals,
        "ledger": [[_encode(value) for value in row.values()] for row in model.ledger_json()],
        "inputs": list(program.inputs),
        "output": _encode(program.output),
        "nodes": [_encode_node(node) for node in program.nodes],
        "quantizers": {name: _encode_quantizer(quantizer) for name, quantizer in program.quantizers.items()},
        "weights": shapes,
        "dtypes": {name: str(value.dtype).removeprefix("torch.") for name, value in program.tensors.items()},
    }
    # One metadata key only: the order of several is not fixed, and the bytes must be.
    return to_safetensors(tensors, {KEY: json.dumps(header, separators=(",", ":"), allow_nan=False)})


def _smallest(value: Tensor) -> Tensor:
    """In float16 where that loses nothing."""
    if value.dtype == torch.float32:
        half = value.half()
        if torch.equal(half.float(), value):
            return half
    return value


def _encode(arg: Arg) -> Any:
    if isinstance(arg, Ref):
        return {"ref": arg.name}
    if isinstance(arg, torch.dtype):
        return {"dtype": str(arg).removeprefix("torch.")}
    if isinstance(arg, float) and not math.isfinite(arg):
        return {"float": str(arg)}
    if isinstance(arg, Output):
        return {"output": [[key, _encode(item)] for key, item in arg.items()]}
    if isinstance(arg, dict):
        return {"dict": [[key, _encode(item)] for key, item in arg.items()]}
    if isinstance(arg, tuple):
        return [_encode(item) for item in arg]
    if isinstance(arg, list):
        return {"list": [_encode(item) for item in arg]}
    return arg


def _encode_node(node: Node) -> list[Any]:
    kwargs = {key: _encode(value) for key, value in node.kwargs.items()}
    return [node.name, node.op, _encode(node.args), kwargs, node.scope]


def _encode_quantizer(quantizer: Quantizer) -> dict[str, Any]:
    scale = [float(str(value)) for value in quantizer.scale.reshape(-1).numpy()]  # shortest decimals that read back
    fields: dict[str, Any] = {"bits": quantizer.bits, "shape": list(quantizer.scale.shape), "scale": scale}
    if isinstance(quantizer, UniformQuantizer):
        return {"kind": "uniform", **fields, "zero_point": [int(value) for value in quantizer.zero_point.reshape(-1)]}
    names = ("q", "r", "beyond", "rounding", "table", "offset", "keeps_offset")
    return {"kind": "log", **fields, **{name: getattr(quantizer, name) for name in names}}


# --- reading ---------------------------------------------------------------------------------------------------------


def load(path: str | Path) -> QuantizedModel:
    """A saved model: needs this package and the file alone. Raises ArtifactError for a file that is not an artifact."""
    return deserialise(read(path), str(path))


def read(path: str | Path) -> bytes:
    """A file's bytes."""
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as cause:  # ValueError: a path that no file can have
        raise ArtifactError(f"{path} cannot be read: {getattr(cause, 'strerror', None) or cause}") from cause


def deserialise(content: bytes, name: str = "the artifact") -> QuantizedModel:
    header = read_header(content, name)
    try:
        return _decode_model(header, parse_safetensors(content))
    except ArtifactError as cause:
        raise ArtifactError(f"{name} is damaged: {cause}") from cause
    except _DAMAGE as cause:
        raise ArtifactError(f"{name} is damaged: {type(cause).__name__}: {cause}") from cause


def read_header(content: bytes, name: str = "the artifact") -> dict[str, Any]:
    """The JSON of an artifact, checked to be of this format."""
    try:
        (length,) = struct.unpack("<Q", content[:8])
        metadata = json.loads(content[8 : 8 + length])["__metadata__"]
        header: dict[str, Any] = json.loads(metadata[KEY])
        found = header["format"]
    except (struct.error, *_DAMAGE) as cause:
        raise ArtifactError(
            f"{name} is not an adalog artifact (or its start is damaged); make one with `adalog quantize`"
        ) from cause
    if found != FORMAT:
        raise ArtifactError(f"{name} has format version {found}, this package reads {FORMAT}: quantize the model again")
    return header


def sizes(content: bytes) -> dict[str, int]:
    """Bytes of the file by part; they sum to its size."""
    (length,) = struct.unpack("<Q", content[:8])
    parts = {"header": 8 + length, "codes": 0, "scale": 0, "zero_point": 0, "float": 0}
    for tensor in tensor_sizes(content).values():
        for part, count in tensor.items():
            parts[part] += count
    return parts


def tensor_sizes(content: bytes) -> dict[str, dict[str, int]]:
    """Bytes of each tensor by part, in the order of the program's tensors."""
    (length,) = struct.unpack("<Q", content[:8])
    entries = json.loads(content[8 : 8 + length])
    counts: dict[str, dict[str, int]] = {name: {} for name in read_header(content)["dtypes"]}
    for key, entry in entries.items():
        if key != "__metadata__":
            part, _, name = key.partition("/")
            begin, end = entry["data_offsets"]
            counts[name][part] = end - begin
    return counts


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise ArtifactError(message)


def _decode_model(header: Mapping[str, Any], stored: Mapping[str, Tensor]) -> QuantizedModel:
    named = {f"{part}/{name}" for name in header["weights"] for part in ("codes", "scale", "zero_point")}
    named |= {f"float/{name}" for name in header["dtypes"] if name not in header["weights"]}
    odd = sorted(named ^ set(stored))
    _check(not odd, f"tensors and header do not name the same: {', '.join(odd[:3])}")
    weights = {name: _decode_weight(name, bits, shape, stored) for name, (bits, shape) in header["weights"].items()}
    tensors: dict[str, Tensor] = {}
    for name, dtype in header["dtypes"].items():
        weight = weights.get(name)
        tensors[name] = stored[f"float/{name}"].to(DTYPES[dtype]) if weight is None else weight.dequantize()
        _check(not bool(tensors[name].isnan().any()), f"tensor {name} holds NaN")
    _check(weights.keys() <= tensors.keys(), "a weight is not among the tensors")
    quantizers = {name: _decode_quantizer(name, fields) for name, fields in header["quantizers"].items()}
    inputs = tuple(header["inputs"])
    nodes = _decode_nodes(header["nodes"], [*inputs, *tensors], quantizers)
    output = _decode(header["output"])
    known = {*inputs, *tensors, *(node.name for node in nodes)}
    missing = [ref for ref in refs_of(output) if ref not in known]
    _check(not missing, f"the output reads {missing}, which nothing makes")
    program = Program(inputs, nodes, output, tensors, quantizers, weights)
    config = Config.from_json(json.dumps(header["config"]))
    ledger = [_decode_ledger_row(*row) for row in header["ledger"]]
    refusals, provenance = header["refusals"], header["provenance"]
    _check(isinstance(provenance, dict), "the provenance is not an object")
    _check(all(isinstance(why, str) for why in refusals.values()), "a refusal is not text")
    return QuantizedModel(program, config, ledger, refusals, provenance=provenance)


def _decode_weight(name: str, bits: int, shape: Sequence[int], stored: Mapping[str, Tensor]) -> QuantizedTensor:
    _check(_is_whole(bits, MIN_BITS, MAX_BITS), f"weight {name} has {bits} bits")
    _check(all(_is_whole(size, 1) for size in shape), f"weight {name} has the shape {shape}")
    codes = unpack(stored[f"codes/{name}"], bits, math.prod(shape)).reshape(shape)
    scale, zero_point = (stored[f"{part}/{name}"] for part in ("scale", "zero_point"))
    _check(scale.is_floating_point(), f"weight {name} has scales of the type {scale.dtype}")
    zero_point = zero_point.to(scale.dtype)
    for value in (scale, zero_point):
        found = list(value.shape)
        _check(found == shape[:1], f"weight {name} has {shape[0]} channels and {found} parameters")
    _check_parameters(name, scale, zero_point, bits)
    lead = (-1, *(1 for _ in shape[1:]))
    return QuantizedTensor(codes, UniformQuantizer(scale.reshape(lead), zero_point.reshape(lead), bits))


def _decode_nodes(
    entries: Sequence[Any], before: Sequence[str], quantizers: Mapping[str, Quantizer]
) -> tuple[Node, ...]:
    """The operations, each of which may read only what was there before it."""
    known = set(before)
    _check(len(known) == len(before), "an input and a tensor have the same name")
    nodes = []
    for name, op, args, kwargs, scope in entries:
        _check(op in OPERATIONS, f"operation {op!r} is not one that a program can hold")
        _check(isinstance(args, list) and isinstance(scope, str), f"node {name} has no list of arguments")
        node = Node(name, op, _decode(args), {key: _decode(value) for key, value in kwargs.items()}, scope)
        if op == FAKE_QUANTIZE:
            _check(len(node.args) == 2 and isinstance(node.args[0], Ref), f"node {name} quantizes no value")
            _check(node.args[1] in quantizers, f"node {name} names no quantizer of the file")
        missing = [ref for ref in node.refs() if ref not in known]
        _check(not missing, f"node {name} reads {missing}, which is not there before it")
        _check(name not in known, f"two values have the name {name}")
        known.add(name)
        nodes.append(node)
    return tuple(nodes)


def _decode_ledger_row(site: str, role: str, source: str, left: str, right: str, sqnr: Any) -> LedgerRow:
    words = (site, role, source, left, right)
    _check(all(isinstance(word, str) for word in words), f"the ledger's row of {site} is not text")
    return LedgerRow(*words, float(_decode(sqnr)))


def _is_whole(value: Any, low: int, high: int = 2**31) -> bool:
    return type(value) is int and low <= value <= high


def _check_parameters(name: str, scale: Tensor, zero_point: Tensor, bits: int) -> None:
    positive = bool(torch.isfinite(scale).all() and (scale > 0).all())
    _check(positive, f"{name} has a scale that is not positive and finite")
    codes = bool(((zero_point >= 0) & (zero_point < 2**bits) & (zero_point == zero_point.round())).all())
    _check(codes, f"{name} has a zero point that is not a whole number from 0 to {2**bits - 1}")


def _decode_quantizer(name: str, fields: Mapping[str, Any]) -> Quantizer:
    bits = fields["bits"]
    _check(_is_whole(bits, MIN_BITS, MAX_BITS), f"quantizer {name} has {bits} bits")
    scale = torch.tensor(fields["scale"], dtype=torch.float32).reshape(fields["shape"])
    if fields["kind"] == "uniform":
        zero_point = torch.tensor(fields["zero_point"], dtype=torch.float32).reshape(fields["shape"])
        _check_parameters(name, scale, zero_point, bits)
        return UniformQuantizer(scale, zero_point, bits)
    _check(fields["kind"] == "log", f"quantizer {name} is of the unknown kind {fields['kind']!r}")
    _check_parameters(name, scale, torch.zeros_like(scale), bits)
    choices = {key: fields[key] for key in ("q", "r", "beyond", "rounding", "table", "offset", "keeps_offset")}
    sane = scale.numel() == 1 and all(_is_whole(choices[key], 1, 2**16) for key in ("q", "r"))
    sane = sane and choices["beyond"] in get_args(Beyond) and choices["rounding"] in get_args(Rounding)
    sane = sane and all(type(choices[key]) is bool for key in ("table", "keeps_offset"))
    sane = sane and type(choices["offset"]) in (int, float) and math.isfinite(choices["offset"])
    _check(sane, f"quantizer {name} has choices that no logarithmic quantizer has: {choices}")
    return LogQuantizer(scale=scale, bits=bits, **choices)


def _decode(value: Any) -> Arg:
    if isinstance(value, list):
        return tuple(_decode(item) for item in value)
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "ref":
        _check(isinstance(content, str), f"a value has the name {content!r}")
        return Ref(content)
    if kind == "dtype":
        return DTYPES[content]
    if kind == "float":
        return float(content)
    if kind == "list":
        return [_decode(item) for item in content]
    _check(kind in ("dict", "output"), f"an argument is of the unknown kind {kind!r}")
    pairs = ((key, _decode(item)) for key, item in content)
    return Output(pairs) if kind == "output" else dict(pairs)


def inspect(content: bytes, name: str = "the artifact") -> dict[str, Any]:
    """What a file is, as JSON: bits, bytes by part, ledger, float sites and operations, provenance."""
    model = deserialise(content, name)
    return {
        "format": FORMAT,
        "bits": model.config.bits,
        "config": asdict(model.config),
        "bytes": sizes(content),
        "total_bytes": len(content),
        "float_sites": model.float_sites(),
        "float_operations": model.float_operations(),
        "refusals": model.refusals,
        "sites": [row | {"sqnr": row["sqnr"] if math.isfinite(row["sqnr"]) else None} for row in model.ledger_json()],
        "provenance": model.provenance,
    }
