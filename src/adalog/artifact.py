"""Read and write artifacts: safetensors files that hold a program and its tensors. No other module does either.

The metadata key "adalog" holds JSON: the format, program, quantizers, config, ledger and provenance. For each quantized
weight W there are the tensors "codes/W", packed codes, and the parameters of its quantizer, "scale/W" and
"zero_point/W" if it is uniform. Each other tensor T is "float/T". docs/reference/format.md describes all fields.
Reading runs no code: a program may only name the operations of `graph.operations.OPERATIONS`.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as parse_safetensors
from safetensors.torch import save as to_safetensors
from torch import Tensor

from adalog import version
from adalog.config import Config
from adalog.errors import ArtifactError, converting, one_line
from adalog.files import write_whole
from adalog.graph.operations import FAKE_QUANTIZE, OPERATIONS, PLACEMENT
from adalog.graph.program import Arg, ModelOutput, Node, Program, Ref, refs_of
from adalog.ledger import LedgerRow, ledger_json
from adalog.quantized import QuantizedProgram
from adalog.quantizers import MAX_BITS, MIN_BITS, QuantizedTensor, Quantizer, UniformQuantizer
from adalog.quantizers.codec import check_shape, check_weight, decode_quantizer, decode_weight, encode_quantizer, pack
from adalog.run import KEY as PACK
from adalog.stored import MAX_JSON, check, check_text, is_whole, parse_json

FORMAT = 1
KEY = "adalog"
# The types of the header's fields.
_FIELDS: dict[str, type] = {
    **dict.fromkeys(("config", "provenance", "refusals", "quantizers", "weights", "dtypes"), dict),
    **dict.fromkeys(("ledger", "inputs", "nodes"), list),
    "format": int,
    "version": str,
    "output": object,
}
MAX_RULE = 4096  # most operations of a rule for sizes, which is evaluated for each new shape
DETECTOR = "adalog-detector"  # metadata key of a file with several artifacts: see adalog.detection.quantized
# What other files of adalog hold, by their metadata keys.
_OTHERS = {
    DETECTOR: "a detector, which only `adalog evaluate --coco` and `adalog detect` can use",
    PACK: "a pack, which `adalog.run` and the C library run: give the artifact that it was made from",
}
_DTYPES = ("float32", "float16", "bfloat16", "float64", "int64", "int32", "int16", "int8", "bool", "uint8")


# --- writing ---------------------------------------------------------------------------------------------------------


def write(quantized: QuantizedProgram, path: Path) -> int:
    """Write a quantized program to a file atomically, and return its size [bytes]."""
    content = serialise(quantized)
    write_whole(path, content)
    return len(content)


def serialise(quantized: QuantizedProgram) -> bytes:
    """Return the bytes of an artifact. The same program gives the same bytes.

    Raises ArtifactError or ProgramError for a program that `deserialise` would refuse, and for notes that JSON cannot
    hold.
    """
    content = encode(quantized)
    try:
        _decode(read_header(content), parse_safetensors(content))
    except Exception as cause:
        raise ArtifactError(f"the model cannot be stored: {one_line(cause)}") from cause
    return content


def encode(quantized: QuantizedProgram) -> bytes:
    """Return the bytes of `serialise` without reading them back, to find the size quickly."""
    quantized.check(quantized.zeros(1, "meta"))
    program = quantized.program.map_tensors(lambda value: value.detach().cpu())
    tensors: dict[str, Tensor] = {}
    shapes: dict[str, Any] = {}
    for name, weight in program.weights.items():
        tensors[f"codes/{name}"] = pack(check_weight(name, weight).codes, weight.bits)
        tensors |= {f"{part}/{name}": value for part, value in weight.quantizer.stored_parameters().items()}
        kind = weight.quantizer.kind
        shapes[name] = [weight.bits, list(weight.codes.shape), *([] if kind == UniformQuantizer.kind else [kind])]
    for name, value in program.tensors.items():
        if name not in program.weights:
            tensors[f"float/{name}"] = _smallest(value).contiguous()
    header = {
        "format": FORMAT,
        "version": version.__version__,
        "config": json.loads(quantized.config.to_json()),
        "provenance": dict(quantized.provenance),
        "refusals": dict(quantized.refusals),
        "ledger": [[_encode(value) for value in row.values()] for row in ledger_json(quantized.ledger)],
        "inputs": [
            [name, _dtype_name(value.dtype), list(value.shape[1:]), *map(list, filter(None, [program.free.get(name)]))]
            for name, value in zip(program.inputs, quantized.example, strict=True)
        ],
        "output": _encode(program.output),
        "nodes": [_encode_node(node) for node in program.nodes],
        "quantizers": {name: encode_quantizer(quantizer) for name, quantizer in program.quantizers.items()},
        "weights": shapes,
        "dtypes": {name: _dtype_name(value.dtype) for name, value in program.tensors.items()},
    }
    if program.rule is not None:
        header["rule"] = [[_encode_node(node) for node in program.rule.nodes], _encode(program.rule.output)]
    with converting(ArtifactError, "a note or an argument cannot be written as JSON: "):
        check_text(header)
        text = json.dumps(header, separators=(",", ":"), allow_nan=False)
    # There is only one metadata key, because safetensors does not fix the order of several.
    content = to_safetensors(tensors, {KEY: text})
    table_of(content)
    return content


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _smallest(value: Tensor) -> Tensor:
    """Return the value in float16 if that is exact, else unchanged."""
    exact = value.dtype == torch.float32 and torch.equal(value.half().float(), value)
    return value.half() if exact else value


def _encode(arg: Arg) -> Any:
    if isinstance(arg, Ref):
        return {"ref": arg.name}
    if isinstance(arg, torch.dtype):
        return {"dtype": _dtype_name(arg)}
    if isinstance(arg, float) and not math.isfinite(arg):
        return {"float": str(arg)}
    if isinstance(arg, ModelOutput):
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


# --- reading ---------------------------------------------------------------------------------------------------------


def read(path: str | Path) -> bytes:
    """Return a file's bytes. Raises ArtifactError if it cannot be read."""
    try:
        path = Path(path)
        # Reading a pipe or a device might never end.
        special = path.exists() and not (path.is_file() or path.is_dir())
        check(not special, f"{path} cannot be read: not a regular file; name one that `adalog quantize` made")
        check(not path.is_dir(), f"{path} is a folder: name a file in it, such as {path / 'model.adalog.safetensors'}")
        return path.read_bytes()
    except (OSError, ValueError, MemoryError) as cause:  # ValueError: no file can have this path
        raise ArtifactError(f"{path} cannot be read: {getattr(cause, 'strerror', None) or one_line(cause)}") from cause


def deserialise(content: bytes, name: str = "the artifact") -> QuantizedProgram:
    """Return the program in an artifact's bytes, after checking all of it and running it once without data.

    This takes at most about 60 times the bytes in memory. Raises ArtifactError, whose message calls the bytes `name`.
    """
    header = read_header(content, name)
    try:
        return _decode(header, parse_safetensors(content))
    except Exception as cause:  # decoding may raise anything for contents that are not valid
        raise _damage(name, cause) from cause


def _damage(name: str, cause: Exception) -> ArtifactError:
    return ArtifactError(f"{name} is damaged: {one_line(cause)}; make it again with `adalog quantize`")


def read_header(content: bytes, name: str = "the artifact") -> dict[str, Any]:
    """Return the JSON of an artifact. Raises ArtifactError for bytes that are not an artifact of this format."""
    try:
        metadata = table_of(content)["__metadata__"]
        others = [what for key, what in _OTHERS.items() if key in metadata]
        text = None if others else metadata[KEY]
        check(text is None or set(metadata) == {KEY}, "the metadata has unknown keys")
    except Exception as cause:  # parsing may raise anything for other bytes
        raise ArtifactError(
            f"{name} is not an adalog artifact, or its start is damaged ({one_line(cause)}); make one with "
            "`adalog quantize`"
        ) from cause
    if text is None:
        raise ArtifactError(f"{name} holds {others[0]}")
    try:
        header: dict[str, Any] = parse_json(text)
        declared = header["format"]
    except Exception as cause:
        raise _damage(name, cause) from cause
    if type(declared) is not int or declared != FORMAT:
        number = one_line(ArtifactError(str(declared)))[:20]
        raise ArtifactError(
            f"{name} has the format {number}, but this version of adalog reads {FORMAT}: quantize the model again"
        )
    return header


def table_of(content: bytes) -> dict[str, Any]:
    """Return the JSON at the start of a safetensors file. Raises ArtifactError or ValueError if it is not valid."""
    length = int.from_bytes(content[:8], "little")
    check(8 + length <= len(content), f"the file claims to start with {length} bytes of JSON, but has {len(content)}")
    check(length <= MAX_JSON, f"its JSON takes {length} bytes, more than {MAX_JSON}")
    table: dict[str, Any] = parse_json(content[8 : 8 + length].decode())
    return table


def sizes(content: bytes) -> dict[str, int]:
    """Count the bytes of an artifact by what they hold. The counts sum to its size."""
    counts = Counter(codes=0, scale=0, zero_point=0, float=0)
    for tensor in tensor_sizes(content).values():
        counts.update(tensor)
    return {"header": len(content) - counts.total(), **counts}


def tensor_sizes(content: bytes) -> dict[str, dict[str, int]]:
    """Count the bytes of each tensor by what they hold, in the order of the program's tensors."""
    entries = table_of(content)
    counts: dict[str, dict[str, int]] = {name: {} for name in read_header(content)["dtypes"]}
    for key, entry in entries.items():
        if key != "__metadata__":
            part, _, name = key.partition("/")
            begin, end = entry["data_offsets"]
            counts[name][part] = end - begin
    return counts


def _decode(header: Mapping[str, Any], stored: Mapping[str, Tensor]) -> QuantizedProgram:
    """Return the program that the header and the tensors of an artifact describe, and check all of it."""
    names = sorted(_FIELDS.keys() ^ (header.keys() - {"rule"}))
    check(not names, f"the header lacks fields, or has unknown ones: {', '.join(names)}")
    for name, kind in _FIELDS.items():
        check(isinstance(header[name], kind), f"the header's {name} is of the type {type(header[name]).__name__}")
    check_text(dict(header))
    check(header["weights"].keys() <= header["dtypes"].keys(), "a weight is not among the tensors")
    parts: dict[str, dict[str, Tensor]] = {name: {} for name in header["weights"]}
    floats = {f"float/{name}" for name in header["dtypes"] if name not in parts}
    names = []
    for key, value in stored.items():
        part, slash, name = key.partition("/")
        if slash and name in parts:
            parts[name][part] = value
        elif key not in floats:
            names.append(key)
    names = sorted([*names, *(floats - stored.keys())])
    check(not names, f"tensors and header do not have the same names: {', '.join(names[:3])}")
    weights = {name: _decode_weight(name, entry, parts[name]) for name, entry in header["weights"].items()}
    tensors = {name: _decode_tensor(name, dtype, weights, stored) for name, dtype in header["dtypes"].items()}
    quantizers = {name: decode_quantizer(name, fields) for name, fields in header["quantizers"].items()}
    inputs, example, opened = zip(*(_decode_input(entry) for entry in header["inputs"]), strict=True)
    free = {name: dims for name, dims in zip(inputs, opened, strict=True) if dims}
    nodes = _decode_nodes(header["nodes"], [*inputs, *tensors], quantizers)
    output = _decode_arg(header["output"])
    values = {*inputs, *tensors, *(node.name for node in nodes)}
    check(any(True for _ in refs_of(output)), "the output holds no value")
    missing = [ref for ref in refs_of(output) if ref not in values]
    check(not missing, f"the output reads {missing}, which no node makes")
    rule = None if "rule" not in header else _decode_rule(header["rule"], inputs)
    check(rule is None or bool(free), "there is a rule for sizes, but no size is free")
    program = Program(inputs, nodes, output, tensors, quantizers, weights, free, rule)
    config = Config.from_json(json.dumps(header["config"]))
    ledger = tuple(_decode_ledger_row(*row) for row in header["ledger"])
    refusals, provenance = header["refusals"], header["provenance"]
    check(all(isinstance(why, str) for why in refusals.values()), "a refusal is not text")
    quantized = QuantizedProgram(program, config, ledger, refusals, provenance, example)
    quantized.check(quantized.zeros(1, "meta"))
    return quantized


def _decode_input(entry: Any) -> tuple[str, Tensor, tuple[int, ...]]:
    """Return the name of an input, the input with zero images, and the dimensions whose sizes are free."""
    check(isinstance(entry, list) and len(entry) in (3, 4), "an input is not [name, type, shape] or [..., free]")
    name, dtype, shape, free = (*entry, None)[:4]
    check(isinstance(name, str), f"an input has the invalid name {name!r}")
    check_shape(f"input {name}", shape)
    listed = isinstance(free, list) and [(type(dim), dim) for dim in free] == [(int, 2), (int, 3)]
    good = len(entry) == 3 or (listed and len(shape) == 3)
    check(good, f"input {name} has the invalid free dimensions {free!r}")
    return name, torch.empty((0, *shape), dtype=_decode_dtype(dtype)), tuple(free or ())


def _decode_rule(entry: Any, inputs: Sequence[str]) -> Program:
    """Return the program that decides which image sizes the model takes."""
    good = isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], list)
    check(good, "the rule for sizes is not [operations, output]")
    check(len(entry[0]) <= MAX_RULE, f"the rule for sizes has {len(entry[0])} operations, more than {MAX_RULE}")
    nodes, output = _decode_nodes(entry[0], inputs, {}), _decode_arg(entry[1])
    others = [node.op for node in nodes if not node.op.startswith("sym.") and node.op != "aten.sym_size.int"]
    check(not others, f"the rule for sizes may not have the operations {', '.join(others[:3])}")
    names = {node.name for node in nodes}
    refs = isinstance(output, tuple) and all(isinstance(ref, Ref) and ref.name in names for ref in output)
    check(refs and len(output) > 0, "the rule for sizes outputs something other than sizes")
    return Program(tuple(inputs), nodes, output, {})


def _decode_dtype(name: Any) -> torch.dtype:
    check(name in _DTYPES, f"the type {name!r} is not one of {', '.join(_DTYPES)}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _decode_tensor(
    name: str, dtype: Any, weights: Mapping[str, QuantizedTensor], stored: Mapping[str, Tensor]
) -> Tensor:
    expected = _decode_dtype(dtype)
    value = weights[name].dequantize() if name in weights else stored[f"float/{name}"]
    same = value.dtype == expected or (value.dtype, expected) == (torch.float16, torch.float32)
    check(same, f"tensor {name} is stored as {value.dtype}, but is used as {expected}")
    check(not bool(value.isnan().any()), f"tensor {name} contains NaN")
    return value.to(expected)


def _decode_weight(name: str, entry: Any, stored: Mapping[str, Tensor]) -> QuantizedTensor:
    """Return a quantized weight from its tensors. A header entry without a kind means a uniform quantizer."""
    check(isinstance(entry, list) and len(entry) in (2, 3), f"weight {name} is not [bits, shape] or [..., kind]")
    bits, shape, kind = (*entry, UniformQuantizer.kind)[:3]
    check(is_whole(bits, MIN_BITS, MAX_BITS), f"weight {name} has {bits!r} bits")
    check_shape(f"weight {name}", shape)
    return decode_weight(name, kind, stored, bits, shape)


def _decode_nodes(
    entries: Sequence[Any], before: Sequence[str], quantizers: Mapping[str, Quantizer]
) -> tuple[Node, ...]:
    """Return the operations, and check that each reads only values that exist before it."""
    known = set(before)
    check(len(known) == len(before), "an input and a tensor have the same name")
    check(bool(entries), "the program has no operations")
    nodes = []
    for entry in entries:
        check(isinstance(entry, list) and len(entry) == 5, "a node is not [name, operation, arguments, ..., scope]")
        name, op, args, kwargs, scope = entry
        good = isinstance(name, str) and isinstance(scope, str)
        check(good, f"the name {name!r} or scope {scope!r} of a node is not text")
        check(isinstance(op, str) and op in OPERATIONS, f"operation {op!r} is not one that a program can hold")
        good = isinstance(args, list) and isinstance(kwargs, dict)
        check(good, f"node {name} does not have a list of arguments and an object of keyword arguments")
        check(not kwargs.keys() & set(PLACEMENT), f"node {name} chooses the device or layout of its value")
        node = Node(name, op, _decode_arg(args), {key: _decode_arg(value) for key, value in kwargs.items()}, scope)
        if op == FAKE_QUANTIZE:
            good = len(node.args) == 2 and isinstance(node.args[0], Ref) and isinstance(node.args[1], str)
            check(good and not kwargs, f"node {name} does not quantize a value")
            check(node.args[1] in quantizers, f"node {name} names a quantizer that the file does not have")
        missing = [ref for ref in node.refs() if ref not in known]
        check(not missing, f"node {name} reads {missing}, which does not exist before it")
        check(name not in known, f"two values have the name {name}")
        known.add(name)
        nodes.append(node)
    return tuple(nodes)


def _decode_ledger_row(site: str, role: str, source: str, left: str, right: str, sqnr: Any) -> LedgerRow:
    words = (site, role, source, left, right)
    check(all(isinstance(word, str) for word in words), f"the ledger's row of {site!r} is not text")
    value = _decode_arg(sqnr)
    check(isinstance(value, (int, float)), f"the ledger's row of {site} has the invalid SQNR {value!r}")
    return LedgerRow(*words, float(value))


def _decode_arg(value: Any) -> Arg:
    """Inverse of `_encode`."""
    if isinstance(value, list):
        return tuple(_decode_arg(item) for item in value)
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "ref":
        check(isinstance(content, str), f"a value has the invalid name {content!r}")
        return Ref(content)
    if kind == "dtype":
        return _decode_dtype(content)
    if kind == "float":
        check(content in ("inf", "-inf", "nan"), f"a number is {content!r}")
        return float(content)
    check(kind in ("list", "dict", "output"), f"an argument is of the unknown kind {kind!r}")
    check(isinstance(content, list), f"the items of a {kind} are not a list")
    if kind == "list":
        return [_decode_arg(item) for item in content]
    pairs = {key: _decode_arg(item) for key, item in content}
    good = len(pairs) == len(content) and all(isinstance(key, str) for key in pairs)
    check(good, f"the keys of a {kind} are not distinct texts")
    return ModelOutput(pairs) if kind == "output" else pairs


def inspect(content: bytes, name: str = "the artifact") -> dict[str, Any]:
    """Describe an artifact as JSON: what `describe` returns, with the format and the bytes by what they hold."""
    quantized = deserialise(content, name)
    return {"format": FORMAT, **describe(quantized), "bytes": sizes(content), "total_bytes": len(content)}


def describe(quantized: QuantizedProgram) -> dict[str, Any]:
    """Describe a program as JSON: bits, config, ledger, what stays float, and provenance. An infinite SQNR is null."""
    return {
        "bits": quantized.config.bits,
        "config": json.loads(quantized.config.to_json()),
        "inputs": quantized.shapes(),
        "float_sites": quantized.float_sites(),
        "float_operations": quantized.program.float_operations(),
        "refusals": dict(quantized.refusals),
        "sites": [
            row | {"sqnr": row["sqnr"] if math.isfinite(row["sqnr"]) else None} for row in ledger_json(quantized.ledger)
        ],
        "provenance": dict(quantized.provenance),
    }
