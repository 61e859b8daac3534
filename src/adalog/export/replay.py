"""Replay a quantized program as a module, with operators of another format for its encoders and products."""

import operator as python
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from adalog.errors import ArtifactError
from adalog.export.operands import OnnxEncoder
from adalog.export.products import OnnxProduct, StoredWeight
from adalog.export.qdq import QdqEncoder, QdqProduct
from adalog.graph.operations import FAKE_QUANTIZE
from adalog.graph.program import Node, Program, Ref, map_refs, present_leaves
from adalog.quantized import QuantizedProgram
from adalog.quantizers import Quantizer
from adalog.runtime import compile_program
from adalog.runtime.reference import IntegerSite, plan

OnnxForm = Literal["mixed", "integer", "qdq"]
EVERY_FORM = get_args(OnnxForm)
NOTED = ("preprocessing", "classes")  # keys of the artifact's provenance that are copied to the metadata
FORMS: tuple[OnnxForm, ...] = ("mixed", "integer")  # the forms that every kind of quantizer has

# Arithmetic on sizes, which are symbols while a model is exported.
_SIZES: dict[str, Callable[..., Any]] = {
    "sym.add": python.add,
    "sym.sub": python.sub,
    "sym.mul": python.mul,
    "sym.floordiv": python.floordiv,
    "sym.mod": python.mod,
    "sym.neg": python.neg,
    "sym.min": torch.sym_min,
    "sym.max": torch.sym_max,
}


@dataclass(frozen=True)
class Makers:
    """The functions that make the parts of a replayed program, and the format that messages name.

    encoder: makes the module that encodes an operand, from its quantizer, a site that reads it, and its name. product:
    makes the module of a site's product, with the attributes `site`, `traced` and `stored_weights` of `OnnxProduct`.
    """

    encoder: Callable[[Quantizer, IntegerSite, str], nn.Module]
    product: Callable[[IntegerSite], nn.Module]
    target: str = "ONNX"


MAKERS: dict[str, Makers] = {
    "mixed": Makers(OnnxEncoder, partial(OnnxProduct, mixed=True)),
    "integer": Makers(OnnxEncoder, partial(OnnxProduct, mixed=False)),
    "qdq": Makers(QdqEncoder, QdqProduct),
}


class ProgramModule(nn.Module):
    """The program of a quantized model as a module that returns a tuple of tensors.

    sites: the sites that run in integers. products: the product of each site, by the site's name.
    Raises ArtifactError if the program cannot be exported.
    """

    def __init__(self, quantized: QuantizedProgram, makers: Makers):
        super().__init__()
        program = _share_quantizers(quantized.program)
        floats = [value for value in program.tensors.values() if value.is_floating_point()]
        dtypes = [value.dtype for value in floats if value.dtype != torch.float32]
        if dtypes:
            raise ArtifactError(f"the model is in {dtypes[0]}, but adalog exports float32 only: convert it to float32")
        self.sites = _apart(plan(program, quantized.example))
        self.steps = nn.ModuleDict()
        self.products: dict[str, Any] = {}

        def encoder(quantizer: Quantizer, site: IntegerSite) -> nn.Module:
            name = site.node.args[0 if quantizer is site.left else 1].name
            self.steps[_path(name)] = module = makers.encoder(quantizer, site, name)
            return module

        def product(site: IntegerSite) -> nn.Module:
            self.steps[_path(site.name)] = self.products[site.name] = module = makers.product(site)
            return module

        self.program, steps = compile_program(program, self.sites, lambda site: "whole", encoder, product)
        self._called: dict[str, Callable[..., Any]] = dict(steps)
        for node in self.program.nodes:
            if node.op in _SIZES:
                self._called[node.name] = _SIZES[node.op]
            elif node.op == FAKE_QUANTIZE:
                site = str(node.args[1]).rpartition(".")[0]
                raise ArtifactError(
                    f"a float operation reads the quantized operand {node.args[1]}, which adalog cannot export to "
                    f"{makers.target}: keep the site in float, for example with --pin '{site}=32'"
                )
        self._stored = {name: f"tensors.{_path(name)}" for name in self.program.tensors}
        self.tensors = nn.Module()
        for name, value in self.program.tensors.items():
            self.tensors.register_buffer(_path(name), value)

    def stored_weights(self) -> dict[str, StoredWeight]:
        """Return the weights that are stored in narrow types, by the name of the buffer that holds their value."""
        return {
            f"steps.{_path(site)}.{name}": weight
            for site, product in self.products.items()
            for name, weight in product.stored_weights.items()
        }

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return self.run(inputs)

    def run(
        self, inputs: Sequence[Tensor], watch: Callable[[Node, tuple[Any, ...], Any], Any] | None = None
    ) -> tuple[Tensor, ...]:
        """Return the outputs. watch: called after every operation, as in `Program.run`."""
        tensors = {name: self.tensors.get_buffer(_path(name)) for name in self.program.tensors}
        outputs = replace(self.program, tensors=tensors).run(inputs, watch, self._called)
        return tuple(present_leaves(outputs))


def _share_quantizers(program: Program) -> Program:
    """Let sites that quantize a value equally share the operand, because PyTorch's exporter merges equal operators."""
    firsts: dict[str, str] = {}
    names: dict[str, str] = {}
    for node in program.nodes:
        if node.op == FAKE_QUANTIZE:
            fields = program.quantizers[str(node.args[1])].fields()
            names[node.name] = firsts.setdefault(repr((node.args[0], fields)), node.name)
    output = map_refs(program.output, lambda ref: Ref(names.get(ref.name, ref.name)))
    return replace(program, nodes=tuple(node.rename(names) for node in program.nodes), output=output).prune()


def _apart(sites: Sequence[IntegerSite]) -> list[IntegerSite]:
    """Return the sites, with a different name for each further call of a layer."""
    sites_by_encoder: dict[str, IntegerSite] = {}
    for site in sites:
        name = f"{site.name}#{site.node.name}" if site.name in sites_by_encoder else site.name
        sites_by_encoder[name] = replace(site, name=name)
    return list(sites_by_encoder.values())


def _path(name: str) -> str:
    """Return a valid name for a part of a module, which cannot be the name of one of the module's own attributes."""
    return "/" + name.replace(".", "/")
