"""Quantized programs as ONNX files: replayed, translated by PyTorch, and then made small, plain and the same each time.

Weights are stored as codes, in four bits where these are enough. The metadata say what the file was made of.
"""

import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adalog import version
from adalog.errors import AdalogError, ArtifactError, one_line
from adalog.export.operators import NODE, RESULT, STEPS
from adalog.export.products import Stored
from adalog.export.replay import Form, Replay
from adalog.extras import extra_module
from adalog.graph.program import Output
from adalog.quantized import QuantizedProgram

OPSET = 21  # the first with integers of four bits
_IR = 10  # the version of the file's format that belongs to it
_SIZES = {"B": "batch", "H": "height", "W": "width"}  # the names of sizes that are free
KEY = "adalog"  # of the metadata, beside what the artifact notes of its images and classes
NOTED = ("preprocessing", "classes")


def to_onnx(quantized: QuantizedProgram, form: Form, source: str, *, selects: bool = False) -> bytes:
    """The ONNX file of a quantized program; the same program gives the same bytes with the same packages.

    source: the SHA-256 of the artifact. selects: write codes as OpenVINO is quickest at and most exact with, not ONNX
    Runtime. Raises ArtifactError for a program that has no form in ONNX, AdalogError where the packages are missing.
    """
    onnx = package("onnx")
    package("onnxscript")
    replay = Replay(quantized, form).eval()
    model = _translated(replay, quantized)
    _rename(model, replay)
    _expand_steps(model, selects=selects)
    if selects:
        _round_signed(model)
    _store(model, replay.stored())
    _name_ends(model, quantized)
    model.ir_version, model.producer_name, model.producer_version = _IR, "adalog", version.__version__
    about = {
        "form": form,
        "artifact": source,
        "graph": graph_digest(model),
        "made_by": {name: package(name).__version__ for name in ("torch", "onnx", "onnxscript")},
    }
    notes = {KEY: json.dumps(about)}
    notes |= {name: json.dumps(quantized.provenance[name]) for name in NOTED if name in quantized.provenance}
    del model.metadata_props[:]
    onnx.helper.set_model_props(model, notes)
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as cause:  # as for stored outputs
        raise ArtifactError(f"the program has no form in ONNX: {one_line(cause)}") from cause
    return bytes(model.SerializeToString(deterministic=True))


def package(name: str) -> Any:
    """The package of this name. Raises DataError where it is not installed, or does not load."""
    return extra_module(name, "openvino" if name == "openvino" else "onnx")


def graph_digest(model: Any) -> str:
    """The SHA-256 of all that a file computes: its graph with every number in it, and its versions of operators."""
    digest = hashlib.sha256(model.graph.SerializeToString(deterministic=True))
    for opset in sorted((each.domain, each.version) for each in model.opset_import):
        digest.update(repr(opset).encode())
    return digest.hexdigest()


def _translated(replay: Replay, quantized: QuantizedProgram) -> Any:
    """The file as PyTorch writes it."""
    inputs = tuple(value.new_zeros((2, *value.shape[1:])) for value in quantized.example)
    shapes = []
    for name, value in zip(quantized.program.inputs, inputs, strict=True):
        free = dict.fromkeys(quantized.program.free.get(name, ()), torch.export.Dim.DYNAMIC)
        shapes.append({0: torch.export.Dim("batch"), **free} if value.ndim else None)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exported = torch.export.export(replay, inputs, dynamic_shapes={"inputs": tuple(shapes)}, strict=False)
            found = torch.onnx.export(exported, dynamo=True, opset_version=OPSET, verbose=False)
    except AdalogError:
        raise
    except Exception as cause:  # PyTorch may raise anything about an operation that it cannot translate
        raise ArtifactError(f"the program has no form in ONNX: {one_line(cause)}") from cause
    assert found is not None
    return found.model_proto


# --- names -----------------------------------------------------------------------------------------------------------


def _rename(model: Any, replay: Replay) -> None:
    """Give the values and nodes of sites their names, and drop what PyTorch noted of its own work."""
    graph = model.graph
    names: dict[str, str] = {}
    for initializer in graph.initializer:
        names[initializer.name] = tensor_name(initializer.name)
    counts: dict[str, int] = {}
    for node in graph.node:
        told = {entry.key: entry.value for entry in node.metadata_props}
        if RESULT in told:
            names[node.output[0]] = told[RESULT]
        at = f"{told.get(NODE, 'float')}/{node.op_type}"
        counts[at] = counts.get(at, 0) + 1
        node.name = at if counts[at] == 1 else f"{at}_{counts[at]}"
        node.doc_string = ""
        del node.metadata_props[:]
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    for value in (*graph.initializer, *graph.output):
        value.name = names.get(value.name, value.name)
    for value in (*graph.input, *graph.output, *graph.initializer):
        value.doc_string = ""
        del value.metadata_props[:]
    del graph.value_info[:]
    del graph.metadata_props[:]
    del model.functions[:]
    graph.name, graph.doc_string, model.doc_string = "adalog", "", ""


def tensor_name(buffer: str) -> str:
    """The name in the file of a buffer of `Replay`."""
    for prefix in ("steps.", "tensors."):
        if buffer.startswith(prefix):
            return buffer.removeprefix(f"{prefix}/").replace("/", ".")
    return buffer


def _name_ends(model: Any, quantized: QuantizedProgram) -> None:
    """Name inputs and outputs as the program does; a single one is "images", or "logits"."""
    graph, program = model.graph, quantized.program
    output = program.output
    ends = list(output) if isinstance(output, Output) and len(output) == len(graph.output) else None
    if ends is None:
        ends = ["logits"] if len(graph.output) == 1 else [f"output_{i}" for i in range(len(graph.output))]
    starts = ["images"] if len(graph.input) == 1 else list(program.inputs)
    taken = {name for node in graph.node for name in node.output} | {each.name for each in graph.initializer}
    names: dict[str, str] = {}
    for value, name in zip((*graph.input, *graph.output), (*starts, *ends), strict=True):
        if name not in taken:
            names[value.name] = name
            value.name = name
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    sizes: dict[str, str] = {}
    for value, letters in zip(graph.input, quantized.shapes().values(), strict=True):
        for dim, letter in zip(value.type.tensor_type.shape.dim, letters, strict=True):
            if isinstance(letter, str):
                sizes.setdefault(dim.dim_param, _SIZES.get(letter, letter))
    for value in (*graph.input, *graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_param = sizes.get(dim.dim_param, dim.dim_param)


# --- what PyTorch does not write -------------------------------------------------------------------------------------


class _Writer:
    """Nodes and tensors that are added to a graph in the place of one node.

    at: what the names of all of them begin with.
    """

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
    """Write every `STEPS` and `BYTE_STEPS` as operators of ONNX.

    selects: write bytes as a chain of Where, which OpenVINO turns into one kernel; ONNX Runtime is nine times as slow
    at it as at the sums of bytes that are written otherwise.
    """
    from onnx import numpy_helper

    domain = STEPS.partition("::")[0]
    given = {each.name: numpy_helper.to_array(each) for each in model.graph.initializer}
    nodes: list[Any] = []
    tensors: dict[str, Any] = {}
    for node in model.graph.node:
        if node.domain != domain:
            nodes.append(node)
            continue
        value, thresholds, levels = (given.get(each, each) for each in node.input)
        writer = _Writer(node.name.rpartition("/")[0])
        write = _steps if node.op_type == STEPS.partition("::")[2] else _selects if selects else _byte_steps
        write(writer, value, thresholds, levels, node.output[0])
        nodes += writer.nodes
        tensors |= writer.tensors
    for opset in [each for each in model.opset_import if each.domain == domain]:
        model.opset_import.remove(opset)
    _rebuild(model, nodes, tensors)


def _steps(writer: _Writer, value: str, thresholds: Any, levels: Any, result: str) -> None:
    """level = last + sum over thresholds of (value > threshold) height, in floats."""
    total = writer.tensor("level", levels[-1])
    for k in reversed(range(len(thresholds))):
        above = writer.node("Greater", [value, writer.tensor(f"threshold_{k}", thresholds[k])])
        number = writer.node("Cast", [above], to=1)
        height = writer.node("Mul", [number, writer.tensor(f"height_{k}", levels[k] - levels[k + 1])])
        total = writer.node("Add", [height, total], "" if k else result)


def _byte_steps(writer: _Writer, value: str, thresholds: Any, levels: Any, result: str) -> None:
    """The same in bytes: a value above a threshold t is more than half of 2 t, so that it rounds to 1 or more.

    With a zero point of 254, the byte then is 255, and 254 otherwise. ONNX Runtime adds such bytes several at a time.
    """
    one, zero = writer.tensor("one", np.float32(1)), writer.tensor("zero", np.uint8(0))
    edge = writer.tensor("edge", np.uint8(254))
    total = writer.tensor("level", levels[-1])
    if levels[-1] > 0:  # below zero the byte would be less than 254, and take from this level
        value = writer.node("Max", [value, writer.tensor("none", np.float32(0))])
    for k in reversed(range(len(thresholds))):
        above = writer.node("QuantizeLinear", [value, writer.tensor(f"threshold_{k}", 2 * thresholds[k]), edge])
        height = writer.tensor(f"height_{k}", levels[k] - levels[k + 1])
        total = writer.node("Add", [writer.node("DequantizeLinear", [above, height, edge]), total])
        total = writer.node("QuantizeLinear", [total, one, zero], "" if k else result)
        if k:
            total = writer.node("DequantizeLinear", [total, one, zero])


def _selects(writer: _Writer, value: str, thresholds: Any, levels: Any, result: str) -> None:
    """The same as a chain of choices between bytes."""
    total = writer.tensor("level", np.uint8(levels[-1]))
    for k in reversed(range(len(thresholds))):
        above = writer.node("Greater", [value, writer.tensor(f"threshold_{k}", thresholds[k])])
        level = writer.tensor(f"level_{k}", np.uint8(levels[k]))
        total = writer.node("Where", [above, level, total], "" if k else result)


def _round_signed(model: Any) -> None:
    """Round what becomes signed bytes before QuantizeLinear sees it.

    OpenVINO 2026.4 counts the steps of signed bytes from -128 on in float32, which rounds a value to 1.5e-5 of a step.
    Products put out few values, and one of them so near to the edge of two codes has the wrong one in most images.
    """
    from onnx import TensorProto, numpy_helper

    given = {each.name: each for each in model.graph.initializer}
    nodes: list[Any] = []
    tensors: dict[str, Any] = {}
    for node in model.graph.node:
        zero = given.get(node.input[-1]) if node.op_type == "QuantizeLinear" else None
        if zero is not None and zero.data_type == TensorProto.INT8:
            value, scale, zero_point = node.input
            writer = _Writer(node.name.rpartition("/")[0])
            one = scale in given and bool((numpy_helper.to_array(given[scale]) == 1).all())
            whole = writer.node("Round", [value if one else writer.node("Div", [value, scale])])
            node.input[:] = [whole, scale if one else writer.tensor("one", np.float32(1)), zero_point]
            nodes += writer.nodes
            tensors |= writer.tensors
        nodes.append(node)
    _rebuild(model, nodes, tensors)


def _store(model: Any, stored: Mapping[str, Stored]) -> None:
    """Replace the values of weights by their codes, in the narrowest type, and what makes the values of them."""
    from onnx import TensorProto, helper, numpy_helper

    graph = model.graph
    named = {tensor_name(name): each for name, each in stored.items()}
    nodes, initializers = [], []
    for initializer in graph.initializer:
        weight = named.get(initializer.name)
        if weight is None:
            initializers.append(initializer)
            continue
        name, target = initializer.name, initializer.data_type
        for key, value in stored_tensors(name, weight).items():
            kind = TensorProto.INT4 if key.endswith(".codes") and _is_narrow(value) else None
            initializers.append(
                numpy_helper.from_array(value, key)
                if kind is None
                else helper.make_tensor(key, kind, value.shape, pack_nibbles(value), raw=True)
            )
        last = f"{name}.codes"
        steps: list[tuple[str, list[str], dict[str, Any]]] = [("Cast", [last], {"to": target})]
        if weight.zero_point is not None:
            steps = [("Cast", [last], {"to": TensorProto.FLOAT}), ("Sub", ["", f"{name}.zero_point"], {}), *steps]
            if target == TensorProto.FLOAT:
                steps.pop()
        for index, (op, reads, attributes) in enumerate(steps):
            given = [last, *reads[1:]]
            last = name if index == len(steps) - 1 else f"{name}.{op}_{index}"
            nodes.append(helper.make_node(op, given, [last], f"{name}/{op}_{index}", **attributes))
    rest = list(graph.node)
    del graph.node[:], graph.initializer[:]
    graph.node.extend([*nodes, *rest])
    graph.initializer.extend(initializers)


def stored_tensors(name: str, weight: Stored) -> dict[str, Any]:
    """The tensors that a weight is stored as, by their names in the file; codes are int8 or uint8."""
    codes = weight.codes.contiguous().numpy()
    narrow = np.int8 if codes.min(initial=0) >= -128 and codes.max(initial=0) <= 127 else np.uint8
    found = {f"{name}.codes": codes.astype(narrow)}
    if weight.zero_point is not None:
        found[f"{name}.zero_point"] = weight.zero_point.contiguous().numpy().astype(np.float32)
    return found


def _is_narrow(codes: Any) -> bool:
    """Whether four bits hold these numbers."""
    return bool(codes.dtype == np.int8 and codes.min(initial=0) >= -8 and codes.max(initial=0) <= 7)


def pack_nibbles(codes: Any) -> bytes:
    """Numbers of four bits, two per byte, the first in the lower half."""
    flat = codes.reshape(-1)
    flat = np.append(flat, np.zeros(len(flat) % 2, flat.dtype)).astype(np.uint8) & 15
    return bytes(flat[::2] | flat[1::2] << 4)


def _rebuild(model: Any, nodes: Sequence[Any], tensors: Mapping[str, Any]) -> None:
    """Give the graph these nodes and, beside its own initialisers, these; drop those that no node reads."""
    from onnx import numpy_helper

    graph = model.graph
    del graph.node[:]
    graph.node.extend(nodes)
    graph.initializer.extend(numpy_helper.from_array(each, key) for key, each in tensors.items())
    read = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
    kept = [each for each in graph.initializer if each.name in read]
    del graph.initializer[:]
    graph.initializer.extend(kept)


def as_array(value: Tensor) -> Any:
    """A tensor as the file's arrays have it."""
    return value.detach().cpu().contiguous().numpy()


def inputs_of(images: Sequence[Tensor], names: Sequence[str]) -> dict[str, Any]:
    """Inputs as engines take them, by name."""
    return {name: as_array(value) for name, value in zip(names, images, strict=True)}
