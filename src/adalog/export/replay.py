"""Replay a quantized program as a module, with operators of ONNX in place of its encoders and products."""

import operator as python
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from adalog.errors import ArtifactError
from adalog.export.operands import Encoder
from adalog.export.products import Product, Stored
from adalog.graph.operations import FAKE_QUANTIZE
from adalog.graph.program import given_leaves
from adalog.quantized import QuantizedProgram
from adalog.quantizers import Quantizer
from adalog.runtime import compiled
from adalog.runtime.reference import IntegerSite, plan

Form = Literal["mixed", "integer"]
FORMS = get_args(Form)

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


class Replay(nn.Module):
    """The program of a quantized model as a module that returns a tuple of tensors.

    sites: the sites that run in integers. Raises ArtifactError if the program cannot be exported to ONNX.
    """

    def __init__(self, quantized: QuantizedProgram, form: Form):
        super().__init__()
        program = quantized.program
        floats = [value for value in program.tensors.values() if value.is_floating_point()]
        odd = [value.dtype for value in floats if value.dtype != torch.float32]
        if odd:
            raise ArtifactError(f"the model is in {odd[0]}, but adalog exports float32 only: convert it to float32")
        self.sites = _apart(plan(program, quantized.example))
        self.steps = nn.ModuleDict()

        def encoder(quantizer: Quantizer, site: IntegerSite) -> Encoder:
            return Encoder(quantizer, site.node.args[0 if quantizer is site.left else 1].name)

        def product(site: IntegerSite) -> Product:
            return Product(site, mixed=form == "mixed")

        self.program, steps = compiled(program, self.sites, lambda site: "whole", encoder, product)
        self._called: dict[str, Callable[..., Any]] = {}
        for name, step in steps.items():
            self.steps[_path(step.name if isinstance(step, Encoder) else step.site.name)] = step
            self._called[name] = step
        for node in self.program.nodes:
            if node.op in _SIZES:
                self._called[node.name] = _SIZES[node.op]
            elif node.op == FAKE_QUANTIZE:
                site = str(node.args[1]).rpartition(".")[0]
                raise ArtifactError(
                    f"a float operation reads the quantized operand {node.args[1]}, which adalog cannot export to "
                    f"ONNX: keep the site in float, for example with --pin '{site}=32'"
                )
        self._stored = {name: f"tensors.{_path(name)}" for name in self.program.tensors}
        self.tensors = nn.Module()
        for name, value in self.program.tensors.items():
            self.tensors.register_buffer(_path(name), value)

    @property
    def products(self) -> dict[str, Product]:
        """The product of each site, by the site's name."""
        return {step.site.name: step for step in self.steps.values() if isinstance(step, Product)}

    def stored(self) -> dict[str, Stored]:
        """Return the weights that are stored in narrow types, by the name of the buffer that holds their value."""
        return {
            f"steps.{path}.{name}": each
            for path, step in self.steps.items()
            if isinstance(step, Product)
            for name, each in step.stored.items()
        }

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        tensors = {name: self.tensors.get_buffer(_path(name)) for name in self.program.tensors}
        found = replace(self.program, tensors=tensors).run(inputs, None, self._called)
        return tuple(given_leaves(found))


def _apart(sites: Sequence[IntegerSite]) -> list[IntegerSite]:
    """Return the sites, with a different name for each further call of a layer."""
    found: dict[str, IntegerSite] = {}
    for site in sites:
        name = f"{site.name}#{site.node.name}" if site.name in found else site.name
        found[name] = replace(site, name=name)
    return list(found.values())


def _path(name: str) -> str:
    """Return a valid name for a part of a module, which cannot be the name of one of the module's own attributes."""
    return "/" + name.replace(".", "/")
