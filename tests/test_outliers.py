"""Outliers in the channels of attention's values move into the linear after attention."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import adalog
import zoo
from adalog.calibration.outliers import even_out_values, find_values
from adalog.graph.capture import capture
from adalog.graph.sites import find_sites, with_heads
from toys import TOKENS, Toy, decibels, tokens_config

CHANNEL = 13  # of V, in head 1


class Block(nn.Module):
    """Attention with two heads of eight channels. outlier: the factor of one channel of V, undone in `proj`.

    kept: return V as well. shared: the keys are the values.
    """

    def __init__(self, outlier=1.0, undone=True, kept=False, shared=False):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.proj, self.kept, self.shared = nn.Linear(8, 48), nn.Linear(16, 8), kept, shared
        with torch.no_grad():
            for value in (self.qkv.weight, self.qkv.bias):
                value[32 + CHANNEL] *= outlier
            self.proj.weight[:, CHANNEL] /= outlier if undone else 1.0

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(q, v if self.shared else k, v)
        x = self.proj(x.transpose(1, 2).flatten(2))
        return (x, v) if self.kept else x


def found(model, images=TOKENS):
    """Return the program, its sites and the attentions whose values can be scaled."""
    program = capture(model.eval(), images)
    sites = with_heads(find_sites(program), program, [images])
    return program, sites, find_values(program, sites, [images])


@pytest.mark.parametrize(
    ("name", "count"), [("demo", 2), ("timm_vit", 2), ("timm_swin", 3), ("timm_pvt", 2), ("hf_vit", 2), ("hf_swin", 3)]
)
def test_values_are_found_in_every_kind_of_model(name, count):
    _, program = zoo.captured(name)
    sites = with_heads(find_sites(program), program, [zoo.IMAGES])
    values = find_values(program, sites, [zoo.IMAGES])
    assert len(values) == count
    for each in values:  # a linear that computes keys and queries too has more channels
        assert len(each.columns.unique()) == len(each.columns)
        assert set(each.columns.tolist()) == set(each.channels.flatten().tolist())


@pytest.mark.parametrize("choices", [{"kept": True}, {"shared": True}])
def test_values_that_something_else_reads_stay(choices):
    program, sites, values = found(Block(100.0, **choices))
    assert values == []
    assert even_out_values(program, sites, [TOKENS]) is program


def test_an_outlier_moves_and_the_function_stays_bit_for_bit():
    program, sites, _ = found(Block(100.0))
    evened = even_out_values(program, sites, [TOKENS])
    changed = {name for name, value in evened.tensors.items() if not torch.equal(value, program.tensors[name])}
    assert changed == {"qkv.weight", "qkv.bias", "proj.weight"}
    (row,) = (evened.tensors["qkv.weight"] != program.tensors["qkv.weight"]).any(1).nonzero().flatten().tolist()
    assert row == 32 + CHANNEL
    ratio = program.tensors["qkv.weight"][row] / evened.tensors["qkv.weight"][row]
    assert ratio.tolist() == pytest.approx([float(ratio[0])] * 8, abs=0)
    assert math.frexp(float(ratio[0]))[0] == 0.5  # a power of two
    assert 32 <= float(ratio[0]) <= 256
    assert torch.equal(evened.run([TOKENS]), program.run([TOKENS]))


def test_ordinary_values_and_outliers_that_matter_less_than_their_columns_stay():
    program, sites, values = found(Block())
    assert len(values) == 1
    assert even_out_values(program, sites, [TOKENS]) is program
    # Half of the outlier moves where its column is as large as the others.
    program, sites, _ = found(Block(100.0, undone=False))
    evened = even_out_values(program, sites, [TOKENS])
    ratio = evened.tensors["proj.weight"][0, CHANNEL] / program.tensors["proj.weight"][0, CHANNEL]
    assert 1 <= float(ratio) <= 16


@pytest.mark.parametrize("bits", ["w4a4", "w6a6"])
def test_a_planted_outlier_costs_no_accuracy(bits):
    signals = {}
    for outlier in (1.0, 128.0):
        model = Block(outlier).eval()
        quantized = adalog.quantize(model, TOKENS, tokens_config(bits))
        signals[outlier] = decibels(quantized(TOKENS), model(TOKENS).detach())
    assert signals[128.0] > signals[1.0] - 0.5


def test_heads_that_share_keys_have_columns_of_the_same_channel():
    def grouped(m, x):
        """Four heads of queries on two heads of keys and values."""
        q, k, v = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (m.q, m.k, m.v))
        k, v = (value[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2) for value in (k, v))
        return m.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    torch.manual_seed(0)
    model = Toy(grouped, q=nn.Linear(8, 16), k=nn.Linear(8, 8), v=nn.Linear(8, 8), proj=nn.Linear(16, 8))
    with torch.no_grad():
        model.v.weight[5] *= 64
        model.v.bias[5] *= 64
        model.proj.weight[:, [9, 13]] /= 64  # channel 1 of the second head of V, in two heads
    program, sites, values = found(model)
    assert len(values) == 1
    evened = even_out_values(program, sites, [TOKENS])
    moved = (evened.tensors["proj.weight"] != program.tensors["proj.weight"]).any(0).nonzero().flatten()
    assert moved.tolist() == [9, 13]
    assert torch.equal(evened.run([TOKENS]), program.run([TOKENS]))
