"""The only reader and writer of the artifact: one safetensors file that holds a program and its tensors.

Layout (docs/format.md). Metadata key "adalog": JSON with the format version, program, quantizers, config, ledger and
provenance. Tensors: "codes/W" packed b-bit codes, "scale/W" and "zero_point/W" of weights, "float/T" the rest.
Reading runs no code: the program may name only the operations of `program.OPERATIONS`.
"""

import errno
import json
import math
import os
import secrets
import shutil
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from safetensors.torch import load as parse_safetensors
from safetensors.torch import save as to_safetensors
from torch import Tensor

import adalog
from adalog.config import Config
from adalog.errors import ArtifactError, DataError, one_line
from adalog.graph.program import (
    FAKE_QUANTIZE,
    OPERATIONS,
    PLACEMENT,
    Arg,
    Node,
    Output,
    Program,
    QuantizedTensor,
    Ref,
    refs_of,
)
from adalog.model import LedgerRow, QuantizedModel
from adalog.quantizers import (
    MAX_BITS,
    MIN_BITS,
    Beyond,
    LogQuantizer,
    Quantizer,
    Rounding,
    SplitUniformQuantizer,
    TwinUniformQuantizer,
    UniformQuantizer,
)

FORMAT = 3
KEY = "adalog"
# Bytes of JSON. Python objects take some forty times their JSON; the header of a model of 40 blocks takes 1 % of this.
MAX_HEADER = 2**23
# What the header holds, in the order of writing.
_FIELDS: dict[str, type] = {
    "format": int,
    "version": str,
    "config": dict,
    "provenance": dict,
    "refusals": dict,
    "ledger": list,
    "inputs": list,
    "output": object,
    "nodes": list,
    "quantizers": dict,
    "weights": dict,
    "dtypes": dict,
}
_LOG_FIELDS = ("q", "r", "beyond", "rounding", "table", "offset", "keeps_offset", "width", "headroom")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
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
    """Write a file whole or not at all: a temporary one beside it, then a rename.

    A link stays one, and what it leads to is written; a file that was there keeps its mode.
    Raises DataError for a path that cannot be written, and OSError where the disk is full or fails.
    """
    try:
        _check_target(path)
        target = Path(os.path.realpath(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".adalog.{secrets.token_hex(8)}")
        handle = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_BINARY", 0), 0o666)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            if target.exists():
                temporary.chmod(stat.S_IMODE(target.stat().st_mode))
            temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as cause:
        raise write_error(path, cause) from cause


def write_folder(path: Path, contents: Mapping[str, bytes]) -> None:
    """Write a folder of files whole or not at all: a temporary one beside it, then a rename.

    Raises as `write_whole` does, and DataError where something is at the path already.
    """
    check_folder(path)
    try:
        target = Path(os.path.realpath(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".adalog.{secrets.token_hex(8)}")
        temporary.mkdir()
        try:
            for name, content in contents.items():
                (temporary / name).write_bytes(content)
            temporary.rename(target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    except OSError as cause:
        raise write_error(path, cause) from cause


def check_folder(path: Path) -> None:
    """Raise the DataError of `write_folder`, as far as it can be known before there is anything to write."""
    if path.exists() or path.is_symlink():
        raise DataError(f"{path} is there already: name a folder to make, or remove it")
    check_writable(path)


def check_writable(path: Path) -> None:
    """Raise the DataError of `write_whole`, as far as it can be known before there is anything to write."""
    try:
        _check_target(path)
        folder = next(parent for parent in Path(os.path.realpath(path)).parents if parent.exists())
        if not folder.is_dir():
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not os.access(folder, os.W_OK | os.X_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as cause:
        raise write_error(path, cause) from cause


def _check_target(path: Path) -> None:
    """Raise OSError where what is there already is not a file that may be replaced."""
    if not path.exists():
        return
    if path.is_dir():
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not path.is_file():
        raise OSError(errno.EINVAL, "Not a regular file")
    if not path.stat().st_mode & 0o222:  # the superuser too is told
        raise OSError(errno.EACCES, "Write-protected")


def write_error(path: Path, cause: OSError) -> Exception:
    """What to raise where a file cannot be written: an OSError where the disk is full or fails, else a DataError."""
    if cause.errno in _FULL:
        told = f"{path} cannot be written: {cause.strerror}; free some space, or choose another folder"
        return OSError(cause.errno, told)
    return DataError(f"{path} cannot be written: {cause.strerror}; choose a file in a folder that you may write to")


def serialise(model: QuantizedModel) -> bytes:
    """The artifact's bytes: the same model gives the same bytes.

    Raises ArtifactError or ProgramError for a model that `load` would refuse.
    """
    _check(bool(model.example), "a model that was made without images has no inputs to tell: give it `example`")
    model.check([value.new_empty((1, *value.shape[1:]), device="meta") for value in model.example])
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
        "inputs": [
            [name, _dtype_name(value), list(value.shape[1:])]
            for name, value in zip(program.inputs, model.example, strict=True)
        ],
        "output": _encode(program.output),
        "nodes": [_encode_node(node) for node in program.nodes],
        "quantizers": {name: encode_quantizer(quantizer) for name, quantizer in program.quantizers.items()},
        "weights": shapes,
        "dtypes": {name: _dtype_name(value) for name, value in program.tensors.items()},
    }
    _check_text(header)
    # One metadata key only: the order of several is not fixed, and the bytes must be.
    content = to_safetensors(tensors, {KEY: json.dumps(header, separators=(",", ":"), allow_nan=False)})
    _table(content)
    return content


def _dtype_name(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


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


def encode_quantizer(quantizer: Quantizer) -> dict[str, Any]:
    """A quantizer as JSON, all but its type of number."""
    scale = _decimals(quantizer.scale)
    fields: dict[str, Any] = {"bits": quantizer.bits, "shape": list(quantizer.scale.shape), "scale": scale}
    if isinstance(quantizer, UniformQuantizer):
        _check_parameters("a uniform quantizer", quantizer.scale, quantizer.zero_point, quantizer.bits)
        if quantizer.rounded_by is not None:
            fields["rounded_by"] = _decimals(quantizer.rounded_by)
        return {"kind": "uniform", **fields, "zero_point": [int(value) for value in quantizer.zero_point.reshape(-1)]}
    if isinstance(quantizer, TwinUniformQuantizer):
        return {"kind": "twin", **fields, "negative_scale": _decimals(quantizer.negative_scale)}
    if isinstance(quantizer, SplitUniformQuantizer):
        return {"kind": "split", **fields, "coarse_scale": _decimals(quantizer.coarse_scale), "sums": quantizer.sums}
    return {"kind": "log", **fields, **{name: getattr(quantizer, name) for name in _LOG_FIELDS}}


def _decimals(values: Tensor) -> list[float]:
    """The shortest that read back the same."""
    if values.dtype in (torch.float16, torch.bfloat16):  # a reader has float32, and numpy no bfloat16
        values = values.float()
    return [float(str(value)) for value in values.cpu().reshape(-1).numpy()]


# --- reading ---------------------------------------------------------------------------------------------------------


def load(path: str | Path) -> QuantizedModel:
    """A saved model: needs this package and the file alone. Raises ArtifactError for a file that is not an artifact."""
    return deserialise(read(path), str(path))


def read(path: str | Path) -> bytes:
    """A file's bytes."""
    try:
        path = Path(path)
        # A pipe or a device may never end.
        odd = path.exists() and not (path.is_file() or path.is_dir())
        _check(not odd, f"{path} cannot be read: not a regular file; name one that `adalog quantize` has made")
        return path.read_bytes()
    except (OSError, ValueError, MemoryError) as cause:  # ValueError: a path that no file can have
        raise ArtifactError(f"{path} cannot be read: {getattr(cause, 'strerror', None) or one_line(cause)}") from cause


def deserialise(content: bytes, name: str = "the artifact") -> QuantizedModel:
    """The model that an artifact's bytes hold, every part of it checked, its program once without data.

    Takes memory of at most some 60 times the bytes. Raises ArtifactError, which calls the bytes by `name`.
    """
    header = read_header(content, name)
    try:
        return _decode_model(header, parse_safetensors(content))
    except Exception as cause:  # whatever contents that no artifact has make the decoding raise
        raise _damaged(name, cause) from cause


def _damaged(name: str, cause: Exception) -> ArtifactError:
    return ArtifactError(f"{name} is damaged: {one_line(cause)}; make it anew with `adalog quantize`")


def read_header(content: bytes, name: str = "the artifact") -> dict[str, Any]:
    """The JSON of an artifact, checked to be of this format."""
    try:
        metadata = _table(content)["__metadata__"]
        text = metadata[KEY]
        _check(set(metadata) == {KEY}, "the metadata has other keys too")
    except Exception as cause:  # whatever bytes that are no artifact make the parsing raise
        raise ArtifactError(
            f"{name} is not an adalog artifact, or its start is damaged ({one_line(cause)}); make one with "
            "`adalog quantize`"
        ) from cause
    try:
        header: dict[str, Any] = _parse_json(text)
        found = header["format"]
    except Exception as cause:
        raise _damaged(name, cause) from cause
    if type(found) is not int or found != FORMAT:
        told = one_line(ArtifactError(str(found)))[:20]
        raise ArtifactError(f"{name} has format version {told}, this package reads {FORMAT}: quantize the model again")
    return header


def _table(content: bytes) -> dict[str, Any]:
    """The JSON that a safetensors file starts with."""
    length = int.from_bytes(content[:8], "little")
    _check(8 + length <= len(content), f"the file says it starts with {length} bytes of JSON, and has {len(content)}")
    _check(length <= MAX_HEADER, f"its JSON takes {length} bytes, more than {MAX_HEADER}")
    table: dict[str, Any] = _parse_json(content[8 : 8 + length].decode())
    return table


def _parse_json(text: str) -> Any:
    """JSON in which each key is there once and each number finite."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        _check(len(values) == len(pairs), "a JSON object has a key twice")
        return values

    def finite(number: str) -> float:
        _check(math.isfinite(float(number)), f"{number} is no number of JSON")
        return float(number)

    return json.loads(text, object_pairs_hook=once, parse_float=finite, parse_constant=finite)


def sizes(content: bytes) -> dict[str, int]:
    """Bytes of an artifact by part; they sum to its size."""
    parts = {"header": len(content), "codes": 0, "scale": 0, "zero_point": 0, "float": 0}
    for tensor in tensor_sizes(content).values():
        for part, count in tensor.items():
            parts[part] += count
            parts["header"] -= count
    return parts


def tensor_sizes(content: bytes) -> dict[str, dict[str, int]]:
    """Bytes of each tensor by part, in the order of the program's tensors."""
    entries = _table(content)
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


def _check_text(value: Any) -> None:
    """A terminal obeys control characters, so a name has none."""
    if isinstance(value, str):
        _check(value.isprintable(), f"the text {value!r} does not print")
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_text(key)
            _check_text(item)
    elif isinstance(value, list):
        for item in value:
            _check_text(item)


def _decode_model(header: Mapping[str, Any], stored: Mapping[str, Tensor]) -> QuantizedModel:
    odd = sorted(_FIELDS.keys() ^ header.keys())
    _check(not odd, f"the header lacks the fields, or has fields of its own: {', '.join(odd)}")
    for name, kind in _FIELDS.items():
        _check(isinstance(header[name], kind), f"the header's {name} is of the type {type(header[name]).__name__}")
    _check_text(dict(header))
    named = {f"{part}/{name}" for name in header["weights"] for part in ("codes", "scale", "zero_point")}
    named |= {f"float/{name}" for name in header["dtypes"] if name not in header["weights"]}
    odd = sorted(named ^ set(stored))
    _check(not odd, f"tensors and header do not name the same: {', '.join(odd[:3])}")
    weights = {name: _decode_weight(name, entry, stored) for name, entry in header["weights"].items()}
    tensors = {name: _decode_tensor(name, dtype, weights, stored) for name, dtype in header["dtypes"].items()}
    _check(weights.keys() <= tensors.keys(), "a weight is not among the tensors")
    quantizers = {name: decode_quantizer(name, fields) for name, fields in header["quantizers"].items()}
    for name, fields in header["quantizers"].items():
        _check("rounded_by" not in fields, f"quantizer {name} rounds by another scale, as only weights do")
    inputs, example = zip(*(_decode_input(entry) for entry in header["inputs"]), strict=True)
    nodes = _decode_nodes(header["nodes"], [*inputs, *tensors], quantizers)
    output = _decode(header["output"])
    known = {*inputs, *tensors, *(node.name for node in nodes)}
    _check(any(True for _ in refs_of(output)), "the output holds no value")
    missing = [ref for ref in refs_of(output) if ref not in known]
    _check(not missing, f"the output reads {missing}, which nothing makes")
    program = Program(inputs, nodes, output, tensors, quantizers, weights)
    config = Config.from_json(json.dumps(header["config"]))
    ledger = [_decode_ledger_row(*row) for row in header["ledger"]]
    refusals, provenance = header["refusals"], header["provenance"]
    _check(all(isinstance(why, str) for why in refusals.values()), "a refusal is not text")
    model = QuantizedModel(program, config, ledger, refusals, provenance=provenance, example=example)
    model.check([value.new_empty((1, *value.shape[1:]), device="meta") for value in example])
    return model


def _decode_input(entry: Any) -> tuple[str, Tensor]:
    """The name of an input, and what it is with no images in it."""
    _check(isinstance(entry, list) and len(entry) == 3, "an input is no [name, type, shape]")
    name, dtype, shape = entry
    _check(isinstance(name, str), f"an input has the name {name!r}")
    _check_shape(f"input {name}", shape)
    return name, torch.empty((0, *shape), dtype=_decode_dtype(dtype))


def _check_shape(name: str, shape: Any) -> None:
    good = isinstance(shape, list) and len(shape) <= 8 and all(_is_whole(size, 1) for size in shape)
    _check(good, f"{name} has the shape {shape}")


def _decode_dtype(name: Any) -> torch.dtype:
    _check(isinstance(name, str) and name in DTYPES, f"the type {name!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _decode_tensor(
    name: str, dtype: Any, weights: Mapping[str, QuantizedTensor], stored: Mapping[str, Tensor]
) -> Tensor:
    wanted = _decode_dtype(dtype)
    value = weights[name].dequantize() if name in weights else stored[f"float/{name}"]
    same = value.dtype == wanted or (value.dtype, wanted) == (torch.float16, torch.float32)
    _check(same, f"tensor {name} is stored as {value.dtype} for {wanted}")
    _check(not bool(value.isnan().any()), f"tensor {name} holds NaN")
    return value.to(wanted)


def _decode_weight(name: str, entry: Any, stored: Mapping[str, Tensor]) -> QuantizedTensor:
    _check(isinstance(entry, list) and len(entry) == 2, f"weight {name} is no [bits, shape]")
    bits, shape = entry
    _check(_is_whole(bits, MIN_BITS, MAX_BITS), f"weight {name} has {bits!r} bits")
    _check_shape(f"weight {name}", shape)
    packed, scale, zero_point = (stored[f"{part}/{name}"] for part in ("codes", "scale", "zero_point"))
    types = packed.dtype == zero_point.dtype == torch.uint8 and scale.dtype in DTYPES.values()
    types = types and scale.is_floating_point() and packed.ndim == 1
    found = [str(value.dtype) for value in (packed, scale, zero_point)]
    _check(types, f"weight {name} has codes, scales and zero points of the types {', '.join(found)}")
    codes = unpack(packed, bits, math.prod(shape)).reshape(shape)
    zero_point = zero_point.to(scale.dtype)
    for value in (scale, zero_point):
        sizes_found = list(value.shape)
        _check(sizes_found == shape[:1], f"weight {name} has the shape {shape} and {sizes_found} parameters")
    _check_parameters(name, scale, zero_point, bits)
    lead = (-1, *(1 for _ in shape[1:]))
    return QuantizedTensor(codes, UniformQuantizer(scale.reshape(lead), zero_point.reshape(lead), bits))


def _decode_nodes(
    entries: Sequence[Any], before: Sequence[str], quantizers: Mapping[str, Quantizer]
) -> tuple[Node, ...]:
    """The operations, each of which may read only what was there before it."""
    known = set(before)
    _check(len(known) == len(before), "an input and a tensor have the same name")
    _check(bool(entries), "the program has no operations")
    nodes = []
    for entry in entries:
        _check(isinstance(entry, list) and len(entry) == 5, "a node is no [name, operation, arguments, ..., scope]")
        name, op, args, kwargs, scope = entry
        _check(isinstance(name, str) and isinstance(scope, str), f"a node has the name {name!r} and scope {scope!r}")
        _check(isinstance(op, str) and op in OPERATIONS, f"operation {op!r} is not one that a program can hold")
        good = isinstance(args, list) and isinstance(kwargs, dict)
        _check(good, f"node {name} has no list of arguments and object of keyword arguments")
        _check(not kwargs.keys() & set(PLACEMENT), f"node {name} says where its value lies")
        node = Node(name, op, _decode(args), {key: _decode(value) for key, value in kwargs.items()}, scope)
        if op == FAKE_QUANTIZE:
            good = len(node.args) == 2 and isinstance(node.args[0], Ref) and isinstance(node.args[1], str)
            _check(good and not kwargs, f"node {name} quantizes no value")
            _check(node.args[1] in quantizers, f"node {name} names no quantizer of the file")
        missing = [ref for ref in node.refs() if ref not in known]
        _check(not missing, f"node {name} reads {missing}, which is not there before it")
        _check(name not in known, f"two values have the name {name}")
        known.add(name)
        nodes.append(node)
    return tuple(nodes)


def _decode_ledger_row(site: str, role: str, source: str, left: str, right: str, sqnr: Any) -> LedgerRow:
    words = (site, role, source, left, right)
    _check(all(isinstance(word, str) for word in words), f"the ledger's row of {site!r} is not text")
    value = _decode(sqnr)
    _check(isinstance(value, (int, float)), f"the ledger's row of {site} has the SQNR {value!r}")
    return LedgerRow(*words, float(value))


def _is_whole(value: Any, low: int, high: int = 2**31) -> bool:
    return type(value) is int and low <= value <= high


def _check_parameters(name: str, scale: Tensor, zero_point: Tensor, bits: int) -> None:
    positive = bool(torch.isfinite(scale).all() and (scale > 0).all())
    _check(positive, f"{name} has a scale that is not positive and finite")
    codes = bool(((zero_point >= 0) & (zero_point < 2**bits) & (zero_point == zero_point.round())).all())
    _check(codes, f"{name} has a zero point that is not a whole number from 0 to {2**bits - 1}")


def decode_quantizer(name: str, fields: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> Quantizer:
    """The quantizer that JSON describes, with numbers of this type. Raises ArtifactError for one that cannot be."""
    bits = fields["bits"]
    _check(_is_whole(bits, MIN_BITS, MAX_BITS), f"quantizer {name} has {bits!r} bits")
    _check_shape(f"quantizer {name}", fields["shape"])
    scale = torch.tensor(fields["scale"], dtype=dtype).reshape(fields["shape"])
    if fields["kind"] == "uniform":
        zero_point = torch.tensor(fields["zero_point"], dtype=dtype).reshape(fields["shape"])
        _check_parameters(name, scale, zero_point, bits)
        if "rounded_by" not in fields:
            return UniformQuantizer(scale, zero_point, bits)
        rounded_by = torch.tensor(fields["rounded_by"], dtype=dtype).reshape(fields["shape"])
        _check_parameters(name, rounded_by, zero_point, bits)
        return UniformQuantizer(scale, zero_point, bits, rounded_by)
    known = fields["kind"] in ("log", "twin", "split")
    _check(known, f"quantizer {name} is of the unknown kind {fields['kind']!r}")
    _check_parameters(name, scale, torch.zeros_like(scale), bits)
    if fields["kind"] == "twin":
        negative = torch.tensor(fields["negative_scale"], dtype=dtype).reshape(fields["shape"])
        _check_parameters(name, negative, torch.zeros_like(negative), bits)
        return TwinUniformQuantizer(scale, negative, bits)
    if fields["kind"] == "split":
        coarse = torch.tensor(fields["coarse_scale"], dtype=dtype).reshape(fields["shape"])
        _check_parameters(name, coarse, torch.zeros_like(coarse), bits)
        _check(type(fields["sums"]) is bool, f"quantizer {name} sums its halves: {fields['sums']!r}")
        return SplitUniformQuantizer(scale, coarse, bits, fields["sums"])
    choices = {key: fields[key] for key in _LOG_FIELDS}
    sane = scale.numel() == 1 and all(_is_whole(choices[key], 1, 2**16) for key in ("q", "r"))
    sane = sane and choices["beyond"] in get_args(Beyond) and choices["rounding"] in get_args(Rounding)
    sane = sane and all(type(choices[key]) is bool for key in ("table", "keeps_offset"))
    sane = sane and type(choices["offset"]) in (int, float) and math.isfinite(choices["offset"])
    sane = sane and all(_is_whole(choices[key], 0, 16) for key in ("width", "headroom"))
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
        return _decode_dtype(content)
    if kind == "float":
        _check(content in ("inf", "-inf", "nan"), f"a number is {content!r}")
        return float(content)
    _check(kind in ("list", "dict", "output"), f"an argument is of the unknown kind {kind!r}")
    _check(isinstance(content, list), f"the items of a {kind} are no list")
    if kind == "list":
        return [_decode(item) for item in content]
    pairs = {key: _decode(item) for key, item in content}
    good = len(pairs) == len(content) and all(isinstance(key, str) for key in pairs)
    _check(good, f"the keys of a {kind} are not different texts")
    return Output(pairs) if kind == "output" else pairs


def inspect(content: bytes, name: str = "the artifact") -> dict[str, Any]:
    """What a file is, as JSON: bits, bytes by part, ledger, float sites and operations, provenance."""
    model = deserialise(content, name)
    return {"format": FORMAT, **describe(model), "bytes": sizes(content), "total_bytes": len(content)}


def describe(model: QuantizedModel) -> dict[str, Any]:
    """The ledger and all around it, as JSON; an SQNR that is not finite is null."""
    return {
        "bits": model.config.bits,
        "config": json.loads(model.config.to_json()),
        "float_sites": model.float_sites(),
        "float_operations": model.float_operations(),
        "refusals": model.refusals,
        "sites": [row | {"sqnr": row["sqnr"] if math.isfinite(row["sqnr"]) else None} for row in model.ledger_json()],
        "provenance": model.provenance,
    }
