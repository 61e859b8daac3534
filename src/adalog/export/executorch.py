"""Export quantized programs as ExecuTorch files, and run these files on this machine.

XNNPACK, the backend of ExecuTorch for processors, multiplies bytes and returns floats only if it finds the range of
each row of activations itself while it runs. The exported program therefore quantizes and dequantizes every activation
with the artifact's own scale and zero point. To each row of a linear's input it then appends the two ends of the range
of codes, with weights of zero. XNNPACK finds exactly this range, so its bytes are the artifact's codes. Convolutions
and products of two activations are float32 products of the dequantized values, because XNNPACK has no quantized form
of them that returns floats.
"""

import importlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from adalog import version
from adalog.errors import ArtifactError, converting, one_line
from adalog.export.products import ProductTrace, StoredWeight
from adalog.export.qdq import require_uniform, signed_weight
from adalog.export.replay import NOTED, Makers, ProgramModule
from adalog.extras import extra_module
from adalog.graph.program import Node
from adalog.quantized import QuantizedProgram
from adalog.quantizers import Quantizer, UniformQuantizer, symmetric_zero_point
from adalog.runtime.reference import ENCODE, PRODUCT, IntegerSite

KEY = "adalog"  # the method of a file that returns adalog's own metadata
LOW, _HIGH = -128, 127  # the bytes of XNNPACK; codes are counted from LOW
_OPERATORS = "torch.ao.quantization.fx._decomposed"  # the module that defines the operators that quantize
_WAY_OUT = "quantize the model with --method uniform-tensor"


@dataclass(frozen=True)
class SignedCodes:
    """An activation's codes minus 128, and the values that they stand for."""

    codes: Tensor
    value: Tensor


class UniformEncoder(nn.Module):
    """Quantize an activation to bytes, and dequantize them. Raises ArtifactError unless one scale serves the tensor."""

    def __init__(self, quantizer: Quantizer, site: IntegerSite, name: str):
        super().__init__()
        self.name, self.quantizer = name, quantizer
        quantizer = require_uniform(quantizer, site, name, "XNNPACK", _WAY_OUT)
        self.scale, self.zero_point = float(quantizer.scale), int(quantizer.zero_point)
        self.top = 2**quantizer.bits - 1

    def forward(self, x: Tensor) -> SignedCodes:
        ops = torch.ops.quantized_decomposed
        if self.top < _HIGH - LOW:  # XNNPACK clamps to bytes only
            x = x.clamp(-self.zero_point * self.scale, (self.top - self.zero_point) * self.scale)
        arguments = self.scale, self.zero_point + LOW, LOW, LOW + self.top, torch.int8
        codes = ops.quantize_per_tensor.default(x, *arguments)
        return SignedCodes(codes, ops.dequantize_per_tensor.default(codes, *arguments))


class UniformProduct(nn.Module):
    """The product of a site. Raises ArtifactError unless its weight is symmetric."""

    def __init__(self, site: IntegerSite):
        super().__init__()
        self.site = site
        self.traced: ProductTrace | None = None
        self.stored_weights: dict[str, StoredWeight] = {}
        if site.weight is None:
            return
        codes, units = signed_weight(site, "XNNPACK", _WAY_OUT)
        if site.geometry is not None:
            self.weight = nn.Buffer(site.right.dequantize(site.weight).float())
            return
        left = site.left
        assert isinstance(left, UniformQuantizer)
        scale, zero_point = float(left.scale), int(left.zero_point)
        self.ends = -zero_point * scale, (_HIGH - LOW - zero_point) * scale
        self.codes = nn.Buffer(functional.pad(codes, (0, len(self.ends))))
        self.units = nn.Buffer(units)
        self.zero_points = nn.Buffer(torch.zeros(len(units), dtype=torch.int64))
        # XNNPACK stores codes of four bits as such.
        half = symmetric_zero_point(4 if site.right.bits <= 4 else 8)
        self.limits = -half, half - 1

    def forward(self, left: SignedCodes, right: SignedCodes | None = None, bias: Tensor | None = None) -> Tensor:
        if right is not None:
            result = torch.matmul(left.value, right.value)
            return result if bias is None else result + bias
        if self.site.geometry is not None:
            _, stride, padding, dilation = self.site.window
            return functional.conv2d(left.value, self.weight, bias, stride, padding, dilation, self.site.groups)
        ops = torch.ops.quantized_decomposed
        x = left.value
        for end in self.ends:
            x = functional.pad(x, (0, 1), value=end)
        scale, zero_point = ops.choose_qparams_per_token_asymmetric.default(x, torch.int8)
        arguments = scale, zero_point, LOW, _HIGH, torch.int8
        x = ops.dequantize_per_token.default(ops.quantize_per_token.default(x, *arguments), *arguments, torch.float32)
        stored = self.codes, self.units, self.zero_points, 0, *self.limits, torch.int8
        return functional.linear(x, ops.dequantize_per_channel.default(*stored), bias)


class InstrumentedModule(nn.Module):
    """A replayed program that also returns what its sites read and compute.

    names: of the values after the outputs; ("value" or "codes", operand) or ("result", site).
    """

    def __init__(self, replay: ProgramModule):
        super().__init__()
        self.replay = replay
        self.names: list[tuple[str, str]] = []

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        values: dict[tuple[str, str], Tensor] = {}
        sites = {site.node.name: site.name for site in self.replay.sites}

        def watch(node: Node, args: tuple[Any, ...], result: Any) -> None:
            if node.op == ENCODE:
                name = node.name.rpartition("#")[0]
                values["value", name], values["codes", name] = args[0], result.codes
            elif node.op == PRODUCT:
                values["result", sites[node.name]] = result

        outputs = self.replay.run(inputs, watch)
        self.names = list(values)
        return *outputs, *values.values()


MAKERS = Makers(UniformEncoder, UniformProduct, "ExecuTorch")


def to_executorch(quantized: QuantizedProgram, source: str) -> bytes:
    """Return the ExecuTorch file of a quantized program, which runs one image of the calibration's size.

    The same program gives the same bytes with the same packages. source: the SHA-256 of the artifact.
    Raises ArtifactError if the program cannot be exported to ExecuTorch, and DataError if a package is missing.
    """
    versions()
    metadata_entries = {KEY: json.dumps({"artifact": source, "made_by": versions()}, sort_keys=True)}
    metadata_entries |= {name: json.dumps(quantized.provenance[name]) for name in NOTED if name in quantized.provenance}
    return lower(ProgramModule(quantized, MAKERS).eval(), quantized.zeros(1), metadata_entries)


def to_watched(quantized: QuantizedProgram) -> tuple[bytes, ProgramModule, list[tuple[str, str]]]:
    """Return a file that also outputs what every site reads and computes, its program, and the outputs' names."""
    versions()
    watched, inputs = InstrumentedModule(ProgramModule(quantized, MAKERS).eval()), quantized.zeros(1)
    importlib.import_module(_OPERATORS)
    watched(*inputs)  # the names of an export are lost
    names = watched.names
    return lower(watched, inputs, {}), watched.replay, names


def lower(module: nn.Module, inputs: tuple[Tensor, ...], methods: Mapping[str, str]) -> bytes:
    """Return the ExecuTorch file of a module, with XNNPACK for all operations that it takes.

    methods: texts that methods of these names return. Raises ArtifactError if ExecuTorch cannot translate the module.
    """
    exir = package("executorch.exir")
    partitioner = package("executorch.backends.xnnpack.partition.xnnpack_partitioner")
    importlib.import_module(_OPERATORS)
    with quietly(), converting(ArtifactError, "the program cannot be exported to ExecuTorch: "):
        exported = torch.export.export(module, inputs, strict=False)
        edge = exir.to_edge_transform_and_lower(
            exported, partitioner=[partitioner.XnnpackPartitioner()], constant_methods=dict(methods)
        )
        return bytes(edge.to_executorch().buffer)


def open_file(content: bytes) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    """Return a function that runs a file on one image. Raises ArtifactError if the runtime refuses the file."""
    method = _method(content, "forward")

    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        with quietly():
            results = method.execute([value.contiguous() for value in inputs])
        return [value.clone() for value in results]  # the next run writes to the same memory

    return run


def is_executorch(content: bytes) -> bool:
    """Return True if the content begins as an ExecuTorch file does."""
    return content[4:6] == b"ET"


def read_notes(content: bytes) -> dict[str, Any]:
    """Return adalog's metadata of a file. Raises ArtifactError if `to_executorch` did not write the file."""
    try:
        with quietly():
            (text,) = _method(content, KEY).execute([])
        notes: dict[str, Any] = json.loads(text)
        if isinstance(notes["artifact"], str) and isinstance(notes["made_by"], dict):
            return notes
        why = "its metadata is not valid"
    except Exception as cause:  # the runtime may raise any exception for arbitrary bytes
        why = one_line(cause)
    raise ArtifactError(
        f"the file is not an ExecuTorch file that adalog exported ({why}): make one with `adalog export --to "
        "executorch`"
    )


def versions() -> dict[str, str]:
    """Return the versions of the packages that write files. Raises DataError if one is missing."""
    package("executorch.exir")
    return {"adalog": version.__version__, "torch": torch.__version__, "executorch": metadata.version("executorch")}


def package(name: str) -> ModuleType:
    """Import a module of ExecuTorch. Raises DataError if it is not installed or cannot be imported."""
    with quietly():
        return extra_module(name, "executorch")


def _method(content: bytes, name: str) -> Any:
    runtime = package("executorch.runtime")
    with quietly(), converting(ArtifactError, "ExecuTorch cannot open the file (", "): export it again"):
        return runtime.Runtime.get().load_program(content).load_method(name)


@contextmanager
def quietly() -> Iterator[None]:
    """Keep the warnings of ExecuTorch from the caller while the context is open."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
