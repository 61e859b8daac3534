"""The steps that programs are recognised as: no test here needs a compiler or the compiled library."""

import pytest
import torch
from torch import nn

from adalog import Calibration, library
from adalog.graph.operations import MOVES
from adalog.graph.tracing import trace
from adalog.runtime import compile_program, native, reference
from adalog.runtime.native.products import ByteEncoder
from adalog.runtime.native.recognise import recognise
from adalog.runtime.native.steps import AliasStep, AttentionStep, LinearStep, MatmulStep, NormStep, TorchStep
from adalog.runtime.native.tables import Codes, Lookup
from test_native import block, hidden, merging


@pytest.fixture(autouse=True)
def _no_library(monkeypatch, tmp_path, reloaded):
    """Hides the compiled library."""
    monkeypatch.setenv("ADALOG_NATIVE", str(tmp_path / "none.so"))
    assert not library.levels()


def recognised(model, inputs):
    planned = reference.plan(model.program, model.example)
    program, made = compile_program(model.program, planned, native.encoder_key, native.encoder, lambda site: site)
    sites = {site.node.name: site for site in planned if native.takes(site)}
    quantizers = {name: each.quantizer for name, each in made.items() if isinstance(each, ByteEncoder)}
    return recognise(program, sites, quantizers, trace(model.program, [inputs]))


def working(found):
    """The steps but for moves by torch, and values under other names."""
    return [
        each
        for each in found.steps
        if not isinstance(each, AliasStep) and not (isinstance(each, TorchStep) and each.node.op in MOVES)
    ]


def told(step):
    """A step in short: its kind, what it stores, and how many values it is added to."""
    if isinstance(step, TorchStep):
        return step.node.op
    finish, rows = getattr(step, "finish", None), getattr(step, "rows", None)
    stores = {Codes: " codes", Lookup: " lookup"}.get(type(finish), "")
    added = " + residual" if rows is not None and rows.added else ""
    return type(step).__name__.removesuffix("Step") + stores + added


def test_a_vision_transformer(quantized, images):
    found = recognised(quantized, images)
    block = ["Norm codes", "Linear codes", "Attention codes", "Linear + residual"]
    block += ["Norm codes", "Linear lookup", "Linear + residual"]
    stem = ["Encode", *["Linear lookup"] * 2, "Linear", "aten.add.Tensor"]
    steps = working(found)
    assert [told(each) for each in steps] == [*stem, *block, *block, "aten.mean.dim", "Norm codes", "Linear"]
    assert found.read_in_place == {"images"}
    assert {name for name in found.constants if not name.startswith("sym_size")} == {"pos_embed"}
    norm, qkv, attend, project, _, up, down = steps[5:12]
    assert norm.finish.scale.shape == norm.weight.shape == (32,)
    assert qkv.finish.scale.unique().numel() == 6  # queries, keys and values of two heads
    assert up.finish.planes == 1
    assert attend.scores == "scaled_dot_product_attention_qk"
    assert (attend.factor.tolist(), attend.bias) == ([0.25, 0.25], None)
    assert (project.rows.added, down.rows.added) == (steps[4].name, project.name)
    assert all(each.rows.place is None for each in (norm, qkv, project, up, down))


def test_a_convolution_is_rows_that_are_an_image(quantized, images):
    first, _, second = [each for each in recognised(quantized, images).steps if isinstance(each, LinearStep)][:3]
    assert (first.shape, first.image) == ((4, 1024, 8), (32, 32))
    assert second.image == (8, 8)


def made(fast, make):
    """A quantized model, and its images."""
    torch.manual_seed(0)
    model, x = make()
    return Calibration(model.eval(), x).quantize(fast), x


def test_scales_of_layers_and_relative_biases(fast):
    steps = working(recognised(*made(fast, block)))
    wanted = ["Norm codes", *["Linear codes"] * 3, "Attention codes", "Linear + residual"]
    assert [told(each) for each in steps] == [*wanted, "Encode", "Linear lookup", "Linear + residual"]
    attend, project = steps[4:6]
    assert torch.allclose(attend.factor, torch.full((2,), 1 / 3.5, dtype=torch.float64))
    assert (attend.bias[0].shape, attend.bias[1].tolist()) == ((1, 2, 7, 7), [0] * 6)
    assert torch.allclose(project.factor, torch.linspace(0.5, 1.5, 24))


@pytest.mark.parametrize(("epsilon", "used"), [(1e-3, 1e-3), (None, torch.finfo(torch.float32).eps)])
def test_an_rms_norm_is_a_norm_about_zero(fast, epsilon, used):
    norm = nn.RMSNorm(24, eps=epsilon)
    steps = working(recognised(*made(fast, lambda: (nn.Sequential(norm, nn.Linear(24, 5)), torch.randn(8, 7, 24)))))
    assert list(map(told, steps)) == ["Norm codes", "Linear"]
    assert (steps[0].about_zero, steps[0].epsilon) == (True, used)


def test_moves_of_rows(fast):
    steps = working(recognised(*made(fast, merging)))
    assert [told(each) for each in steps] == ["Encode", "Linear", "Norm + residual", "Norm codes", "Linear"]
    norm, merged = steps[2:4]
    numbers = torch.arange(5 * 6 * 4, dtype=torch.int32).view(5, 6, 4)
    assert torch.equal(norm.rows.added_to, numbers.roll(-1, 1).flatten())  # each row is added to the row behind it
    assert norm.rows.last == merged.source  # and stored where four of them make a row
    assert torch.equal(norm.rows.place.sort().values, numbers.flatten())
    assert norm.shape == (5, 3, 2, 32)


def test_scores_that_a_mask_hides(fast):
    """The products stay apart, and torch does what lies between them."""
    kinds = [told(each) for each in working(recognised(*made(fast, hidden)))]
    between = ["aten.masked_fill.Scalar", "aten.softmax.int", "Encode"]
    assert kinds == ["Encode", "Linear codes", "Matmul", *between, "Matmul"]


class Adaptive(nn.Module):
    """A norm and a linear whose weight and bias depend on the inputs, and a norm of a parameter."""

    def __init__(self):
        super().__init__()
        self.weight, self.start = nn.Parameter(torch.ones(24)), nn.Parameter(torch.randn(7, 24))
        self.one, self.other = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x):
        y = self.one(nn.functional.layer_norm(x, (24,), self.weight * x.mean()))
        z = self.other(nn.functional.layer_norm(self.start, (24,)))
        return y + z


def test_what_is_not_known_beforehand_is_left_to_torch(fast):
    steps = working(recognised(*made(fast, lambda: (Adaptive(), torch.randn(6, 7, 24)))))
    assert not any(isinstance(each, NormStep) for each in steps)
    assert sum(each.node.op == "aten.layer_norm.default" for each in steps if isinstance(each, TorchStep)) == 1


def test_a_step_says_what_it_reads(quantized, images):
    """Each value is made once, before it is read."""
    found = recognised(quantized, images)
    known = {*found.program.inputs, *found.constants}
    for step in found.steps:
        assert set(step.reads) <= known
        assert step.name not in known
        known.add(step.name)
    assert {type(each) for each in found.steps} >= {NormStep, LinearStep, AttentionStep, AliasStep, TorchStep}
    assert not any(isinstance(each, MatmulStep) for each in found.steps)
