"""What is passed as the model is a module of float weights, or an error says what to pass instead."""

import functools

import pytest
import torch
from torch import nn

import adalog
from adalog import CaptureError
from adalog.graph.capture import capture
from adalog.graph.modules import float_module
from toys import TOKENS, tokens_config

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.(ao.quantization|jit).*deprecated")


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 5)).eval()


@functools.cache
def exported():
    return torch.export.export(model(), (TOKENS,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))


@functools.cache
def quantized():
    return adalog.quantize(model(), TOKENS, tokens_config())


def without_values():
    with torch.device("meta"):
        return model()


REFUSED = {
    "exported program": (exported, "an ExportedProgram that torch.export made: pass the torch.nn.Module"),
    "exported module": (lambda: exported().module(), "a GraphModule that torch.export made: pass the torch.nn.Module"),
    "traced": (lambda: torch.jit.trace(model(), TOKENS), "a TopLevelTracedModule that torch.jit made: pass the"),
    "scripted": (lambda: torch.jit.script(model()), "a RecursiveScriptModule that torch.jit made: pass the"),
    "scripted function": (lambda: torch.jit.script(torch.nn.functional.relu), "a ScriptFunction that torch.jit made"),
    "dynamically quantized": (
        lambda: torch.ao.quantization.quantize_dynamic(model(), {nn.Linear}),
        r"already quantized \(0 is a torch.*Linear\): pass the model with",
    ),
    "quantized": (quantized, "quantized .QuantizedModel is an adalog.model.QuantizedModel.: pass the model with"),
    "with a quantized part": (lambda: nn.Sequential(quantized(), nn.GELU()), r"quantized \(0 is an adalog.model"),
    "compiled by adalog": (lambda: quantized().compile("torch"), "already quantized .Compiled is an adalog.runtime"),
    "state dict": (lambda: model().state_dict(), r"an? OrderedDict of weights: make the model, load them with"),
    "class": (lambda: nn.Linear, "the model is the class Linear: pass an instance of it"),
    "function": (lambda: torch.relu, "a builtin_function_or_method: pass a torch.nn.Module"),
    "name": (lambda: "vit_base_patch16_224", "a str: pass a torch.nn.Module"),
    "nothing": (lambda: None, "a NoneType: pass a torch.nn.Module"),
    "meta device": (without_values, "0.weight is on the meta device, which holds no values: load the model's weights"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_what_is_no_module_of_float_weights(name):
    make, words = REFUSED[name]
    with pytest.raises(CaptureError, match=words) as caught:
        adalog.quantize(make(), TOKENS, tokens_config())
    assert len(str(caught.value)) < 250
    with pytest.raises(CaptureError, match=words):
        capture(make(), TOKENS)


WRAPPED = {
    "compiled": torch.compile,
    "in parallel": nn.DataParallel,
    "compiled in parallel": lambda module: nn.DataParallel(torch.compile(module)),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_wrappers_are_taken_off(name):
    inner = model()
    assert float_module(WRAPPED[name](inner)) is inner
    program = capture(WRAPPED[name](inner), TOKENS)
    assert set(program.tensors) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert torch.equal(program.run([TOKENS]), inner(TOKENS))


def test_compiled_parts_run_as_python_code():
    inner = model()
    inner[0] = torch.compile(inner[0])
    inner[1].compile()
    program = capture(inner, TOKENS)
    assert set(program.tensors) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert [node.scope for node in program.nodes] == ["0", "1", "2"]


def test_a_graph_of_symbolic_tracing_is_a_module():
    program = capture(torch.fx.symbolic_trace(model()), TOKENS)
    torch.testing.assert_close(program.run([TOKENS]), model()(TOKENS))
