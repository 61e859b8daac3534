"""Offsets that a bias absorbs leave the outputs of a program as they were."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu

import adalog
from adalog import Config, Search
from adalog.graph.rewrite import absorb_offset
from adalog.quantizers import LogQuantizer
from strategies import R, normal

CHANNELS = 16


@pytest.mark.parametrize("offset", [0.17, 0.27846])
@pytest.mark.parametrize("has_bias", [True, False])
def test_absorb_offset(has_bias, offset):
    """A quantizer that keeps its offset, with the absorbing bias, puts out what one that takes it off does."""
    x, weight = gelu(normal(40, CHANNELS)), (normal(6, CHANNELS, seed=1) * 4).round() / 4
    bias = normal(6, seed=2) if has_bias else None
    scale = torch.tensor(2.0, dtype=torch.float64)
    taken, kept = (LogQuantizer(scale, 20, R, 4, offset=offset, keeps_offset=keeps) for keeps in (False, True))
    operands = [weight.clone(), None if bias is None else bias.clone()]
    before = taken.fake_quantize(x) @ weight.T + (0 if bias is None else bias)
    after = kept.fake_quantize(x) @ weight.T + absorb_offset(weight, bias, offset)
    torch.testing.assert_close(after, before, rtol=0, atol=1e-11)  # float64 sums of 20 terms of size up to 100
    assert torch.equal(weight, operands[0])
    assert bias is None or torch.equal(bias, operands[1])


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("bits", ["w3a3", "w4a4"])
def test_a_quantized_model_loses_the_offset_with_its_quantized_weight(has_bias, bits):
    """Eqs. 11-15 end to end: the layer after GELU puts out W_hat (X_hat' - 0.17) + b of its own codes, in float64.

    An offset absorbed with the float weight would leave 0.17 (W - W_hat) 1 in each output.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 64), nn.GELU(), nn.Linear(64, 8, bias=has_bias)).eval()
    x = torch.randn(20, 12, generator=torch.Generator().manual_seed(1)) * 2
    config = replace(Config.preset(bits), images=20, search=Search(rounds=1, steps=1), stages=())
    quantized = adalog.quantize(model, x, config)
    program, linear = quantized.program, model[2]
    (stored,) = (weight for weight in program.weights.values() if weight.codes.shape == linear.weight.shape)
    (quantizer,) = (each for each in program.quantizers.values() if isinstance(each, LogQuantizer))
    offset = quantizer.offset
    assert offset == pytest.approx(-float(gelu(torch.linspace(-2, 0, 10001)).min()), abs=1e-6)
    weight = stored.quantizer.scale.double() * (stored.codes.double() - stored.quantizer.zero_point.double())
    bias = linear.bias.detach().double() if has_bias else torch.zeros(8, dtype=torch.float64)
    wrong = offset * (linear.weight.detach().double() - weight).sum(1)
    assert wrong.abs().max() > 1e-3

    def expected(codes):
        levels = quantizer.unit.double() * quantizer.table_integers().double()
        return (levels[codes.long()] - offset) @ weight.T + bias

    hidden = []
    output = program.run([x], lambda node, args, result: hidden.append(result) if "gelu" in node.op else None)
    trace = quantized.compile("reference").trace("2", x)
    for codes, found in ((quantizer.quantize(hidden[0]), output), (trace.left, trace.output)):
        torch.testing.assert_close(found.double(), expected(codes), rtol=0, atol=1e-5)  # float32 sums of 64 terms
