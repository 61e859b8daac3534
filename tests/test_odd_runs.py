"""Models that are rare but fair, run in integers: what a kernel does not take is left to others, and never wrong."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import adalog
from adalog import Config, Search, library
from adalog.graph.program import Node, Program, Ref
from adalog.quantized import QuantizedProgram
from adalog.quantizers import LogQuantizer, UniformQuantizer
from adalog.runtime import Compiled
from strategies import normal

needs_kernels = pytest.mark.skipif(not library.levels(), reason=f"no kernels: {library.why()}")
EXECUTORS = ("reference", "torch", "native")
QUICK = Search(rounds=1, steps=0)


class Attention(nn.Module):
    """Attention whose queries are probabilities, as in linear attention, so that they have logarithmic codes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 5)
        with torch.no_grad():
            self.qkv.weight.mul_(12)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = (q.softmax(-1) @ k.transpose(-1, -2) * 0.35).softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).flatten(2)).mean(1)


class ScalarBias(nn.Module):
    def __init__(self, shape):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.weight = nn.Linear(8, 8), nn.Parameter(torch.randn(5, 8))
        self.bias = nn.Parameter(torch.full(shape, 0.5))

    def forward(self, x):
        return F.linear(self.first(x).relu(), self.weight, self.bias)


@needs_kernels
def test_queries_of_two_bytes():
    """At 8 bits the table of logarithmic codes has two bytes, and the kernel of attention takes queries of one."""
    config = replace(Config.preset("w8a8"), images=4, search=QUICK)
    quantized = adalog.quantize(Attention().eval(), normal(4, 7, 16, seed=1).float(), config)
    x = normal(9, 7, 16, seed=2).float()
    wanted = quantized(x)
    for executor in EXECUTORS:
        found = quantized.compile(executor)(x)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4 * float(wanted.abs().max()))


@needs_kernels
@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_bias_for_all_columns(shape):
    config = replace(Config.preset("w4a4"), images=6, search=QUICK)
    quantized = adalog.quantize(ScalarBias(shape).eval(), normal(6, 8, seed=1).float(), config)
    x = normal(4, 8, seed=2).float()
    wanted = quantized(x)
    for executor in EXECUTORS:
        torch.testing.assert_close(quantized.compile(executor)(x), wanted, rtol=1e-5, atol=1e-5)


def uniform(scale):
    return UniformQuantizer(torch.tensor([scale]), torch.tensor([8.0]), 4)


def attention_of(bias):
    """Attention as a program, whose inputs are queries, keys and values of any shapes."""
    nodes = (
        Node("codes_q", "adalog.fake_quantize", (Ref("q"), "q")),
        Node("turned", "aten.transpose.int", (Ref("k"), -2, -1)),
        Node("codes_k", "adalog.fake_quantize", (Ref("turned"), "k")),
        Node("scores", "aten.matmul.default", (Ref("codes_q"), Ref("codes_k"))),
        Node("moved", "aten.add.Tensor", (Ref("scores"), Ref("bias"))),
        Node("shares", "aten.softmax.int", (Ref("moved"), -1)),
        Node("codes_p", "adalog.fake_quantize", (Ref("shares"), "p")),
        Node("codes_v", "adalog.fake_quantize", (Ref("v"), "v")),
        Node("mixed", "aten.matmul.default", (Ref("codes_p"), Ref("codes_v"))),
    )
    shares = LogQuantizer(torch.tensor([1.0]), 17, 37, 4, "zero-coded", "nearest", True, 0.0, False, 8, 3)
    quantizers = {"q": uniform(0.3), "k": uniform(0.3), "v": uniform(0.3), "p": shares}
    return Program(("q", "k", "v"), nodes, Ref("mixed"), {"bias": bias}, quantizers)


@needs_kernels
@pytest.mark.parametrize(
    ("queries", "values", "bias"),
    [
        ((2, 3, 5, 8), (2, 3, 5, 8), (3, 5, 5)),
        ((2, 5, 8), (2, 2, 5, 8), (5, 5)),
        ((2, 1, 3, 5, 8), (2, 4, 3, 5, 8), (1, 3, 5, 5)),
    ],
)
def test_scores_that_serve_several_values(queries, values, bias):
    given = [normal(*shape, seed=seed).float() for seed, shape in enumerate((queries, queries, values))]
    program = attention_of(normal(*bias, seed=4).float())
    quantized = QuantizedProgram(program, Config(), example=tuple(value[:0] for value in given))
    wanted = program.run(given)
    for executor in EXECUTORS:
        torch.testing.assert_close(Compiled(quantized, executor)(*given), wanted, rtol=1e-5, atol=1e-5)


@needs_kernels
def test_a_first_call_in_inference_mode_ties_no_later_one_to_it():
    class Squashed(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(8, 4)

        def forward(self, x):
            return self.last(torch.tanh(x) * x)

    torch.manual_seed(0)
    config = replace(Config.preset("w4a4"), images=4, search=QUICK)
    quantized = adalog.quantize(Squashed().eval(), normal(4, 8, seed=1).float(), config)
    x = normal(2, 8, seed=2).float()
    compiled = quantized.compile("native")
    with torch.inference_mode():
        first = compiled(x)
    assert torch.equal(first, compiled(x))


@needs_kernels
def test_a_cast_that_is_refused_leaves_the_model_as_it_was():
    torch.manual_seed(0)
    config = replace(Config.preset("w4a4"), images=4, search=QUICK)
    quantized = adalog.quantize(nn.Linear(8, 4).eval(), normal(4, 8, seed=1).float(), config)
    x = normal(2, 8, seed=2).float()
    compiled = quantized.compile("native")
    before = compiled(x)
    with pytest.raises(adalog.ArtifactError, match="'native' runs in float32"):
        compiled.double()
    assert torch.equal(compiled(x), before)
