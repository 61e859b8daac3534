"""Export quantized programs as ONNX files.

PyTorch translates the replayed program to ONNX. This module then makes the file small, plain and reproducible. It
stores weights as codes (in four bits if these are enough), names the values, and writes metadata that say what the file
was made from.
"""

import hashlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adalog import version
from adalog.errors import ArtifactError, converting
from adalog.export.operators import NODE, RESULT, STEPS
from adalog.export.products import StoredWeight
from adalog.export.replay import MAKERS, NOTED, OnnxForm, ProgramModule
from adalog.extras import extra_module
from adalog.quantized import QuantizedProgram

OPSET = 21  # the first version with integers of four bits
_IR = 10  # the version of the file format that belongs to this opset
_SIZES = {"B": "batch", "H": "height", "W": "width"}  # the names of free sizes
KEY = "adalog"  # the key of adalog's own metadata
_REFUSAL = "the program cannot be exported to ONNX: "


def to_onnx(quantized: QuantizedProgram, form: OnnxForm, source: str, *, selects: bool = False) -> bytes:
    """Return the ONNX file of a quantized program; the same program gives the same bytes with the same packages.

    source: the SHA-256 of the artifact. selects: write codes in the form that is fastest and most exact in OpenVINO,
    instead of the form for ONNX Runtime. Raises ArtifactError if the program cannot be exported to ONNX, and
    AdalogError if a package is missing.
    """
    onnx = package("onnx")
    package("onnxscript")
    replay = ProgramModule(quantized, MAKERS[form]).eval()
    model = _translate(replay, quantized)
    _rename(model)
    _expand_steps(model, selects=selects)
    if selects:
        _round_signed(model)
    _store(model, replay.stored_weights())
    _name_ends(model, quantized)
    model.ir_version, model.producer_name, model.producer_version = _IR, "adalog", version.__version__
    metadata = {
        "form": form,
        "artifact": source,
        "graph": graph_digest(model),
        "made_by": {name: package(name).__version__ for name in ("torch", "onnx", "onnxscript")},
    }
    notes = {KEY: json.dumps(metadata)}
    notes |= {name: json.dumps(quantized.provenance[name]) for name in NOTED if name in quantized.provenance}
    del model.metadata_props[:]
    onnx.helper.set_model_props(model, notes)
    with converting(ArtifactError, _REFUSAL):  # stored outputs, say
        onnx.checker.check_model(model, full_check=True)
    return bytes(model.SerializeToString(deterministic=True))


def package(name: str) -> Any:
    """Import the package of this name. Raises DataError if it is not installed or cannot be imported."""
    return extra_module(name, "openvino" if name == "openvino" else "onnx")


def graph_digest(model: Any) -> str:
    """Return the SHA-256 of everything that a file computes: its graph with all numbers, and its operator versions."""
    digest = hashlib.sha256(model.graph.SerializeToString(deterministic=True))
    for opset in sorted((entry.domain, entry.version) for entry in model.opset_import):
        digest.update(repr(opset).encode())
    return digest.hexdigest()


def _translate(replay: ProgramModule, quantized: QuantizedProgram) -> Any:
    """Translate the replayed program with PyTorch, and return the ONNX model."""
    inputs = quantized.zeros(2)
    shapes = []
    for name, value in zip(quantized.program.inputs, inputs, strict=True):
        free = dict.fromkeys(quantized.program.free.get(name, ()), torch.export.Dim.DYNAMIC)
        shapes.append({0: torch.export.Dim("batch"), **free} if value.ndim else None)
    with warnings.catch_warnings(), converting(ArtifactError, _REFUSAL):
        warnings.simplefilter("ignore")
        exported = torch.export.export(replay, inputs, dynamic_shapes={"inputs": tuple(shapes)}, strict=False)
        program = torch.onnx.export(exported, dynamo=True, opset_version=OPSET, verbose=False)
    assert program is not None
    return program.model_proto


# --- names -----------------------------------------------------------------------------------------------------------


def _rename(model: Any) -> None:
    """Give the values and nodes of sites their names, and drop the notes of PyTorch's exporter."""
    graph = model.graph
    names = {initializer.name: tensor_name(initializer.name) for initializer in graph.initializer}
    counts: dict[str, int] = {}
    for node in graph.node:
        properties = {entry.key: entry.value for entry in node.metadata_props}
        if RESULT in properties:
            names[node.output[0]] = properties[RESULT]
        at = f"{properties.get(NODE, 'float')}/{node.op_type}"
        counts[at] = counts.get(at, 0) + 1
        node.name = at if counts[at] == 1 else f"{at}_{counts[at]}"
        node.doc_string = ""
        del node.metadata_props[:]
    _replace_names(graph, names)
    for value in (*graph.initializer, *graph.output):
        value.name = names.get(value.name, value.name)
    for value in (*graph.input, *graph.output, *graph.initializer):
        value.doc_string = ""
        del value.metadata_props[:]
    del graph.value_info[:]
    del graph.metadata_props[:]
    del model.functions[:]
    graph.name, graph.doc_string, model.doc_string = "adalog", "", ""


def _replace_names(graph: Any, names: Mapping[str, str]) -> None:
    """Rename the values that nodes read and compute."""
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]


def tensor_name(buffer: str) -> str:
    """Return the name that a buffer of `ProgramModule` has in the file."""
    for prefix in ("steps.", "tensors."):
        if buffer.startswith(prefix):
            return buffer.removeprefix(f"{prefix}/").replace("/", ".")
    return buffer


def _name_ends(model: Any, quantized: QuantizedProgram) -> None:
    """Name inputs and outputs as in the program; a single input is "images", a single unnamed output is "logits".

    Values inside the graph make way for these names. An output with the name of an input gets the suffix "_output".
    """
    graph, program = model.graph, quantized.program
    starts = ["images"] if len(graph.input) == 1 else list(program.inputs)
    ends = [f"{name}_output" if name in starts else name for name in output_names(program.output)]
    if len(ends) != len(graph.output):  # an output that is a number, say
        ends = [f"output_{index}" for index in range(len(graph.output))]
    names: dict[str, str] = {}
    for value, name in zip((*graph.input, *graph.output), (*starts, *ends), strict=True):
        names.setdefault(value.name, name)
        value.name = names[value.name]
    inside = {name for node in graph.node for name in node.output}
    inside |= {initializer.name for initializer in graph.initializer}
    aside = (inside - names.keys()) & set(names.values())
    names |= {name: next(other for i in count() if (other := f"{name}.inner_{i}") not in inside) for name in aside}
    for initializer in graph.initializer:
        if initializer.name in aside:
            initializer.name = names[initializer.name]
    _replace_names(graph, names)
    sizes: dict[str, str] = {}
    for value, letters in zip(graph.input, quantized.shapes().values(), strict=True):
        for dim, letter in zip(value.type.tensor_type.shape.dim, letters, strict=True):
            if isinstance(letter, str):
                sizes.setdefault(dim.dim_param, _SIZES.get(letter, letter))
    for value in (*graph.input, *graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_param = sizes.get(dim.dim_param, dim.dim_param)


def output_names(output: Any) -> list[str]:
    """Return a name for each tensor of an output: its keys in nested dicts, such as "logits" or "hidden_states.0".

    A single tensor without a key is "logits", and the tensors of tuples without keys are "output_0", "output_1" and so
    on, counted through nested tuples.
    """
    paths = list(_paths(output))
    if not any(isinstance(step, str) for path in paths for step in path):
        return ["logits"] if len(paths) == 1 else [f"output_{index}" for index in range(len(paths))]
    return [
        ".".join([f"output_{path[0]}" if isinstance(path[0], int) else path[0], *map(str, path[1:])]) for path in paths
    ]


def _paths(output: Any) -> Iterator[tuple[str | int, ...]]:
    """Yield the keys and indices that lead to each tensor of an output, in the order of `present_leaves`."""
    if isinstance(output, (Mapping, tuple, list)):
        for step, value in output.items() if isinstance(output, Mapping) else enumerate(output):
            yield from ((step, *path) for path in _paths(value))
    elif output is not None:
        yield ()


# --- operators and types that PyTorch does not write -----------------------------------------------------------------


class _NodeWriter:
    """Nodes and tensors that replace one node of a graph. at: the prefix of all their names."""

    def __init__(self, at: str):
        self.at, self.nodes, self.tensors = at, [], {}  # type: str, list[Any], dict[str, Any]

    def tensor(self, name: str, value: Any) -> str:
        self.tensors[f"{self.at}.{name}"] = np.asarray(value)
        return f"{self.at}.{name}"

    def node(self, op: str, reads: Sequence[str], result: str = "", **attributes: Any) -> str:
        from onnx import helper

        number = len(self.nodes)
        result = result or f"{self.at}.step_{number}"
        self.nodes.append(helper.make_node(op, reads, [result], f"{self.at}/{op}_{number}", **attributes))
        return result


def _expand_steps(model: Any, *, selects: bool) -> None:
    """Replace every `STEPS` and `BYTE_STEPS` with operators of ONNX.

    selects: write bytes as a chain of Where, which OpenVINO turns into one kernel, instead of the sums of bytes that
    ONNX Runtime runs faster.
    """
    from onnx import numpy_helper

    domain, _, in_floats = STEPS.partition("::")
    constants = {initializer.name: numpy_helper.to_array(initializer) for initializer in model.graph.initializer}

    def write(writer: _NodeWriter, node: Any) -> None:
        if node.domain != domain:
            writer.nodes.append(node)
            return
        value, thresholds, levels = (constants.get(name, name) for name in node.input)
        expand = _steps if node.op_type == in_floats else _selects if selects else _byte_steps
        expand(writer, value, thresholds, levels, node.output[0])

    _rewrite(model, write)
    for opset in [entry for entry in model.opset_import if entry.domain == domain]:
        model.opset_import.remove(opset)


def _steps(writer: _NodeWriter, value: str, thresholds: Any, levels: Any, result: str) -> None:
    """Write level = last + sum over thresholds of (value > threshold) * height, in floats."""
    total = writer.tensor("level", levels[-1])
    for k in reversed(range(len(thresholds))):
        above = writer.node("Greater", [value, writer.tensor(f"threshold_{k}", thresholds[k])])
        number = writer.node("Cast", [above], to=1)
        height = writer.node("Mul", [number, writer.tensor(f"height_{k}", levels[k] - levels[k + 1])])
        total = writer.node("Add", [height, total], "" if k else result)


def _byte_steps(writer: _NodeWriter, value: str, thresholds: Any, levels: Any, result: str) -> None:
    """Write the same sum in bytes: in steps of 2 t, a value above the threshold t rounds to 1 or more.

    With a zero point of 254, its byte is then 255, and otherwise 254. ONNX Runtime adds several such bytes at a time.
    """
    one, zero = writer.tensor("one", np.float32(1)), writer.tensor("zero", np.uint8(0))
    edge = writer.tensor("edge", np.uint8(254))
    total = writer.tensor("level", levels[-1])
    if levels[-1] > 0:  # the byte of a negative value would be less than 254, and would reduce this level
        value = writer.node("Max", [value, writer.tensor("none", np.float32(0))])
    for k in reversed(range(len(thresholds))):
        above = writer.node("QuantizeLinear", [value, writer.tensor(f"threshold_{k}", 2 * thresholds[k]), edge])
        height = writer.tensor(f"height_{k}", levels[k] - levels[k + 1])
        total = writer.node("Add", [writer.node("DequantizeLinear", [above, height, edge]), total])
        total = writer.node("QuantizeLinear", [total, one, zero], "" if k else result)
        if k:
            total = writer.node("DequantizeLinear", [total, one, zero])


def _selects(writer: _NodeWriter, value: str, thresholds: Any, levels: Any, result: str) -> None:
    """Write the same levels as a chain of Where between bytes."""
    total = writer.tensor("level", np.uint8(levels[-1]))
    for k in reversed(range(len(thresholds))):
        above = writer.node("Greater", [value, writer.tensor(f"threshold_{k}", thresholds[k])])
        level = writer.tensor(f"level_{k}", np.uint8(levels[k]))
        total = writer.node("Where", [above, level, total], "" if k else result)


def _round_signed(model: Any) -> None:
    """Round values before QuantizeLinear turns them into signed bytes.

    OpenVINO 2026.4 counts the steps of signed bytes from -128 in float32, which is inexact near the edge between two
    codes. A product returns few distinct values, so a value near an edge would get the wrong code in most images.
    """
    from onnx import TensorProto, numpy_helper

    initializers = {initializer.name: initializer for initializer in model.graph.initializer}

    def write(writer: _NodeWriter, node: Any) -> None:
        zero = initializers.get(node.input[-1]) if node.op_type == "QuantizeLinear" else None
        if zero is not None and zero.data_type == TensorProto.INT8:
            value, scale, zero_point = node.input
            is_one = scale in initializers and bool((numpy_helper.to_array(initializers[scale]) == 1).all())
            whole = writer.node("Round", [value if is_one else writer.node("Div", [value, scale])])
            node.input[:] = [whole, scale if is_one else writer.tensor("one", np.float32(1)), zero_point]
        writer.nodes.append(node)

    _rewrite(model, write)


def _store(model: Any, stored: Mapping[str, StoredWeight]) -> None:
    """Store weights as codes in the narrowest type, and add the nodes that compute the values from the codes."""
    from onnx import TensorProto, helper, numpy_helper

    graph = model.graph
    weights = {tensor_name(name): weight for name, weight in stored.items()}
    nodes, initializers = [], []
    for initializer in graph.initializer:
        weight = weights.get(initializer.name)
        if weight is None:
            initializers.append(initializer)
            continue
        name, target = initializer.name, initializer.data_type
        for key, value in stored_tensors(name, weight).items():
            if value.dtype == np.int8 and value.min(initial=0) >= -8 and value.max(initial=0) <= 7:
                nibbles = pack_nibbles(value)
                initializers.append(helper.make_tensor(key, TensorProto.INT4, value.shape, nibbles, raw=True))
            else:
                initializers.append(numpy_helper.from_array(value, key))
        last = f"{name}.codes"
        steps: list[tuple[str, list[str], dict[str, Any]]] = [("Cast", [last], {"to": target})]
        if weight.zero_point is not None:
            steps = [("Cast", [last], {"to": TensorProto.FLOAT}), ("Sub", ["", f"{name}.zero_point"], {}), *steps]
            if target == TensorProto.FLOAT:
                steps.pop()
        for index, (op, reads, attributes) in enumerate(steps):
            inputs = [last, *reads[1:]]
            last = name if index == len(steps) - 1 else f"{name}.{op}_{index}"
            nodes.append(helper.make_node(op, inputs, [last], f"{name}/{op}_{index}", **attributes))
    others = list(graph.node)
    del graph.node[:], graph.initializer[:]
    graph.node.extend([*nodes, *others])
    graph.initializer.extend(initializers)


def stored_tensors(name: str, weight: StoredWeight) -> dict[str, Any]:
    """Return the tensors that a weight is stored as, by their names in the file; codes are int8 or uint8."""
    codes = weight.codes.contiguous().numpy()
    narrow = np.int8 if codes.min(initial=0) >= -128 and codes.max(initial=0) <= 127 else np.uint8
    tensors = {f"{name}.codes": codes.astype(narrow)}
    if weight.zero_point is not None:
        tensors[f"{name}.zero_point"] = weight.zero_point.contiguous().numpy().astype(np.float32)
    return tensors


def pack_nibbles(codes: Any) -> bytes:
    """Pack integers of four bits into bytes, two per byte, the first in the lower half."""
    flat = codes.reshape(-1)
    flat = np.append(flat, np.zeros(len(flat) % 2, flat.dtype)).astype(np.uint8) & 15
    return bytes(flat[::2] | flat[1::2] << 4)


def _rewrite(model: Any, write: Callable[[_NodeWriter, Any], None]) -> None:
    """Replace each node by the nodes and tensors that `write` adds for it; drop the initializers that no node reads."""
    from onnx import numpy_helper

    graph = model.graph
    nodes = list(graph.node)
    del graph.node[:]
    for node in nodes:
        writer = _NodeWriter(node.name.rpartition("/")[0])
        write(writer, node)
        graph.node.extend(writer.nodes)
        graph.initializer.extend(numpy_helper.from_array(value, key) for key, value in writer.tensors.items())
    names = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
    initializers = [initializer for initializer in graph.initializer if initializer.name in names]
    del graph.initializer[:]
    graph.initializer.extend(initializers)


def as_array(value: Tensor) -> Any:
    """Return a tensor as a NumPy array."""
    return value.detach().cpu().contiguous().numpy()


def inputs_of(images: Sequence[Tensor], names: Sequence[str]) -> dict[str, Any]:
    """Return inputs by name as NumPy arrays, as engines take them."""
    return {name: as_array(value) for name, value in zip(names, images, strict=True)}
