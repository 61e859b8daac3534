"""What no input reaches is computed once, and operations on images are rewritten to the few that a program holds."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import adalog
from adalog import CaptureError
from adalog.artifact import deserialise, serialise
from adalog.graph.capture import capture
from toys import IMAGES, TOKENS, Toy, assert_same, check_capture, ops, tokens_config

MORE_TOKENS = torch.randn(7, 6, 8, generator=torch.Generator().manual_seed(1))
MASK = torch.tensor([True, False, True, True, False, True])


# --- constants -------------------------------------------------------------------------------------------------------


def decomposed(model, x):
    u, s, v = torch.linalg.svd(model.table)
    return x + ((u * s) @ v)[:6]


def written_diagonal(model, x):
    mask = torch.eye(8)
    mask.diagonal().mul_(3)
    mask[0].cumprod_(0)
    return x @ mask


def filled(model, x):
    table = torch.empty(8)
    table.fill_(2)
    return x * table + x.new_empty(8).zero_() + torch.empty_like(model.table[0]).fill_(1)


CONSTANTS = {
    "linspace": lambda m, x: x + torch.linspace(0, 1, 8),
    "tile": lambda m, x: x * torch.arange(4.0).tile(2).cos(),
    "interpolated table": lambda m, x: x + F.interpolate(m.table[None, :6], size=8, mode="linear")[0],
    "one_hot": lambda m, x: x + F.one_hot(torch.arange(6), 8).float(),
    "eye": lambda m, x: x @ torch.eye(8),
    "polar": lambda m, x: x * torch.polar(torch.ones(8), torch.arange(8.0)).real,
    "complex number": lambda m, x: x * torch.view_as_real(torch.exp(1j * torch.arange(4.0))).flatten(),
    "argsort": lambda m, x: x[:, torch.argsort(m.table[:6, 0])],
    "several results": decomposed,
    "frequencies": lambda m, x: x * torch.outer(torch.arange(6.0), 1 / torch.logspace(0, 3, 8)).sin(),
    "repeated by counts": lambda m, x: x + m.table[:3].repeat_interleave(torch.tensor([1, 2, 3]), 0),
    "a number": lambda m, x: x * m.table.abs().max().item(),
    "a mask as an index": lambda m, x: x[:, m.mask] + m.table[:6][m.mask],
    "a mask of two dimensions": lambda m, x: x[:, m.table[:6] > 0],
    "written diagonal": written_diagonal,
    "memory that is filled later": filled,
    "bucketize": lambda m, x: x + m.table[torch.bucketize(torch.arange(6.0), torch.tensor([1.0, 3.0]))],
    "triangle": lambda m, x: x[:, torch.tril_indices(3, 3)[0]],
    "cdist": lambda m, x: x + torch.cdist(m.table[:6], m.table),
    "einsum with a diagonal": lambda m, x: x * torch.einsum("ii->i", m.table),
    "fft": lambda m, x: x * torch.fft.fft(m.table)[0].abs(),
}


# What computes a resized table of positions.
RESIZED = {
    "bicubic": lambda table: F.interpolate(table, (3, 2), mode="bicubic", antialias=True),
    "bilinear": lambda table: F.interpolate(table, scale_factor=(1.5, 1), mode="bilinear"),
    "nearest": lambda table: F.interpolate(table, (3, 2)),
}


@pytest.mark.parametrize("name", RESIZED)
def test_a_table_that_is_resized_to_a_fixed_size_is_resized_once(name):
    def function(model, x):
        return x + RESIZED[name](model.table.view(1, 2, 2, 8).permute(0, 3, 1, 2)).flatten(2).mT

    program = check_capture(Toy(function, table=nn.Parameter(torch.randn(4, 8))), MORE_TOKENS)
    assert "table" not in program.tensors
    assert not any("upsample" in op for op in ops(program))


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize(
    "computed",
    [
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        parametrizations.orthogonal,
        nn.utils.weight_norm,  # by a hook
    ],
)
def test_a_weight_that_is_computed_keeps_the_name_of_its_layer(computed):
    program = check_capture(Toy(lambda m, x: m.head(x), head=computed(nn.Linear(8, 8))), MORE_TOKENS)
    assert set(program.tensors) == {"head.weight", "head.bias"}
    assert ops(program) == ["linear"]


def test_a_constant_is_stored_in_the_artifact():
    def function(model, x):
        return model.head(x + torch.linspace(0, 1, 8) + torch.polar(torch.ones(8), torch.arange(8.0)).imag)

    qmodel = adalog.quantize(Toy(function, head=nn.Linear(8, 5)).eval(), TOKENS, tokens_config())
    again = deserialise(serialise(qmodel.quantized))
    assert torch.equal(again.program.run([TOKENS]), qmodel(TOKENS))
    assert not {*ops(again.program)} & {"linspace", "polar", "imag"}


def test_a_convolution_over_one_dimension_is_quantized_under_its_own_name():
    parts = {"mix": nn.Conv1d(6, 4, 3, padding="same", groups=2), "head": nn.Linear(8, 5)}
    model = Toy(lambda m, x: m.head(F.gelu(m.mix(x))), **parts).eval()
    qmodel = adalog.quantize(model, TOKENS, tokens_config())
    assert [(row.site, row.role) for row in qmodel.ledger] == [("mix", "conv"), ("head", "linear")]
    assert not qmodel.float_sites()
    again = adalog.QuantizedModel(deserialise(serialise(qmodel.quantized)))
    integers = again.compile("native" if adalog.library.levels() else "torch")
    torch.testing.assert_close(integers(TOKENS), model(TOKENS), rtol=0.05, atol=0.05)


def test_whitelisted_operations_on_tables_stay():
    """A table of positions that is gathered in every block would be stored once per block."""
    model = Toy(lambda m, x: x + m.table[m.index], table=nn.Parameter(torch.randn(3, 8)), index=torch.arange(6) % 3)
    program = check_capture(model, MORE_TOKENS)
    assert program.tensors["table"].shape == (3, 8)
    assert "index" in ops(program)


@pytest.mark.parametrize("stored", [True, False])
def test_a_table_in_float64_is_stored_as_the_float32_that_images_meet(stored):
    """The kernels and exporters run in float32. Position tables of transformers' RT-DETR are made in float64."""

    def function(model, x):
        steps = model.steps if stored else torch.arange(6, dtype=torch.float64)
        return model.head(x + (steps[:, None] / 3).sin().float())

    model = Toy(function, head=nn.Linear(8, 5), steps=torch.arange(6, dtype=torch.float64)).eval()
    program = check_capture(model, MORE_TOKENS)
    assert {value.dtype for value in program.tensors.values()} == {torch.float32}
    assert ops(program) == ["add", "linear"]


# --- operations on images --------------------------------------------------------------------------------------------


def masked_token(model, x):
    x = x + 0
    x[x[..., 0] > 0] = model.token
    return x


def masked_number(model, x):
    x = x + 0
    x[x > 1] = 0.5
    x[:, model.mask] = -2.0
    return x


def rows_written(model, x):
    x = x + 0
    x[:, [1, 3]] = x[:, [0, 2]] * 2
    return x.index_put((torch.tensor([0]), torch.tensor([2])), x.new_ones(8), accumulate=True)


def rows_chosen(model, x):
    mask = x[..., 0] > 0
    x = x + 0
    x[mask.logical_not()] = (x * 2)[mask.logical_not()]
    both = x.flip(2)
    both[x > 0] = x[x > 0]
    return both


def bucketed(model, x):
    edges = torch.linspace(-1, 1, 5)
    return x * torch.bucketize(x, edges) + torch.bucketize(x.round(), edges, right=True)


def sampled(model, x):
    maps = x.unflatten(2, (2, 4)).transpose(1, 2)
    grid = torch.tanh(x[:, :, :6].unflatten(2, (3, 2)))
    return F.grid_sample(maps, grid, mode="bilinear", align_corners=False)


def filtered(model, x):
    """Convolutions over one dimension, of both parities, with all arguments."""
    weight = model.table[:6, :6].reshape(6, 2, 3)
    return (
        F.conv1d(x, weight, model.token[:6], 1, 2, 2, 3),
        F.conv1d(x, weight, padding="valid", groups=3),
        F.conv1d(x, weight[..., :2], stride=2, groups=3),
        F.conv1d(x, weight[..., :2], padding="same", dilation=3, groups=3),
    )


def largest(model, x):
    """Maxima of windows, and of all values in one dimension or both."""
    maps = x.unflatten(2, (2, 4))
    return F.adaptive_max_pool1d(x, 4), [F.adaptive_max_pool2d(maps, shape) for shape in (1, (1, 2), (None, 1))]


def aliases(model, x):
    x = torch.concat([torch.concatenate([x, torch.absolute(x)], 1), torch.negative(x)], 1)[:, : x.shape[1]]
    x = torch.multiply(x, torch.subtract(x, torch.divide(x, torch.true_divide(model.token, 2))))
    return x.moveaxis(1, 2) * x.greater(0).logical_or(x.less_equal(x * 2)).mT + torch.special.expit(x).mT


def pairs(x):
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


def rotated(model, x):
    """Turn pairs of channels by angles that depend on the position, as RoFormer does, and by those of another value."""
    turns = torch.polar(torch.ones(x.shape[1], 4), torch.outer(torch.arange(x.shape[1]), model.table[0, :4]))
    once = torch.view_as_real(turns.conj()[None] * pairs(x)).flatten(-2)
    return torch.view_as_real(pairs(once) * pairs(x.flip(1))).flatten(-2)


IMAGES_OPERATIONS = {
    "products of complex numbers": rotated,
    "tensor_split": lambda m, x: torch.cat(x.tensor_split(4, 1)[::-1], 1) + x.tensor_split((2, -1), dim=1)[1].sum(),
    "hsplit and dsplit": lambda m, x: torch.cat(torch.hsplit(x, 3)[1:], 1) + torch.dsplit(x, 2)[0].sum(),
    "unfold": lambda m, x: x.unfold(1, 3, 2).flatten(2),
    "unfold without overlap": lambda m, x: x.unfold(-1, 4, 4).unfold(1, 2, 2).flatten(2),
    "index_put by a mask, one vector": masked_token,
    "index_put by a mask, one number": masked_number,
    "index_put": rows_written,
    "masked_fill by a tensor": lambda m, x: x.masked_fill(x > 1, m.token.sum()),
    "scatter": lambda m, x: torch.zeros_like(x).scatter(2, x.argmax(-1, keepdim=True), 1.0),
    "scatter of values": lambda m, x: torch.zeros_like(x).scatter(2, x.topk(3, -1)[1], x),
    "scatter_add": lambda m, x: torch.zeros_like(x).scatter_add(2, x.topk(3, -1).indices, x),
    "one_hot": lambda m, x: F.one_hot(x.argmax(-1), 8) * x,
    "max and min": lambda m, x: x / x.max() + x.min() + torch.max(x, m.token) - torch.min(x, -x),
    "nan_to_num": lambda m, x: (x / (x > 0)).nan_to_num(1.0, 2.0) + (x / 0).nan_to_num(posinf=3, neginf=-4),
    "logsumexp": lambda m, x: x.logsumexp(-1) + x.logsumexp((1, 2), keepdim=True)[..., 0],
    "logsumexp of masked rows": lambda m, x: x.masked_fill(x < 9, -math.inf).logsumexp(-1).exp() + x[..., 0],
    "cosine_similarity": lambda m, x: F.cosine_similarity(x, m.token, -1) + F.cosine_similarity(x, x.flip(1), dim=2),
    "addcmul and addcdiv": lambda m, x: torch.addcmul(x, m.token, x).addcdiv(x, m.token.exp(), value=-0.5),
    "floor_divide": lambda m, x: x // 0.3 + x.floor_divide(m.token) + (x > 0).long() // 2,
    "index_put of what a mask selects": rows_chosen,
    "bucketize": bucketed,
    "any and all": lambda m, x: x + (x > 1).any() + (x > 1).any(-1, keepdim=True) * (x < 2).all((0, 2))[:, None],
    "topk": lambda m, x: x.topk(2, dim=1)[0],
    "sort": lambda m, x: x.sort(-1)[0],
    "grid_sampler": sampled,
    "conv1d": filtered,
    "adaptive_max_pool": largest,
    "other names": aliases,
    "einsum with an ellipsis": lambda m, x: torch.einsum("...c,dc->...d", x, m.table),
    "einsum with two ellipses": lambda m, x: torch.einsum("...nc,...mc->...nm", x, x),
    "einsum of one operand": lambda m, x: torch.einsum("bnc->cb", x),
    "einsum of three operands": lambda m, x: torch.einsum("bnc,dc,de->bne", x, m.table, m.table),
    "einsum with a sum": lambda m, x: torch.einsum("bnc,bmd->bn", x, x),
    "einsum that repeats an operand": lambda m, x: torch.einsum("bnc,bmc->bnm", x, m.token[None, None]),
    "einsum without an arrow": lambda m, x: torch.einsum("...ij,jk", x, m.table),
    "more columns than rows of attention": lambda m, x: F.scaled_dot_product_attention(x[:, :3], x, x, is_causal=True),
}


def toy(function):
    torch.manual_seed(0)
    parts = {"token": nn.Parameter(torch.randn(8)), "table": nn.Parameter(torch.randn(8, 8)), "mask": nn.Buffer(MASK)}
    return Toy(function, **parts)


@pytest.mark.parametrize("name", [*CONSTANTS, *IMAGES_OPERATIONS])
def test_any_operation_on_tensors_and_many_on_images(name):
    check_capture(toy((CONSTANTS | IMAGES_OPERATIONS)[name]), MORE_TOKENS)


@pytest.mark.parametrize("name", ["index_put", "topk", "sort", "grid_sampler", "scatter", "unfold"])
def test_operations_run_from_an_artifact(name):
    function = IMAGES_OPERATIONS[name]
    model = toy(lambda m, x: m.head(function(m, x + 0).flatten(1)[:, :6]))
    model.head = nn.Linear(6, 5)
    qmodel = adalog.quantize(model.eval(), TOKENS, tokens_config())
    again = adalog.QuantizedModel(deserialise(serialise(qmodel.quantized)))
    assert torch.equal(again(TOKENS), qmodel(TOKENS))
    integers = again.compile("native" if adalog.library.levels() else "torch")
    torch.testing.assert_close(integers(TOKENS), qmodel(TOKENS), rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("function", "way_out"),
    [
        (lambda m, x: x[x > 0].sum() + x, "use torch.where"),
        (lambda m, x: x + x.masked_select(x > 0).mean(), "use torch.where"),
        (lambda m, x: torch.view_as_real(pairs(x) * torch.arange(4.0)).sum() + x, "quantize a part of the model"),
        (lambda m, x: torch.einsum("bii->bi", x[:, :, :6]), "quantize a part of the model"),
        (lambda m, x: x * F.adaptive_max_pool1d(x, 2, return_indices=True)[1].sum(), "quantize a part of the model"),
        (lambda m, x: x + torch.rand(8), "other values in"),  # chance is not computed once
        (lambda m, x: x * torch.bernoulli(torch.ones(8) / 2), "other values in"),
    ],
)
def test_refusals_give_a_way_out(function, way_out):
    with pytest.raises(CaptureError, match=rf"uses aten\..* at .*(test_canonical|toys)\.py:\d+.*{way_out}"):
        capture(Toy(function), TOKENS)


# --- attention -------------------------------------------------------------------------------------------------------


def attention(**choices):
    """Attention with 4 heads of queries and 2 heads of keys and values."""

    def function(m, x):
        q = m.q(x).unflatten(-1, (4, 4)).transpose(1, 2)
        k, v = m.kv(x).unflatten(-1, (2, 2, 4)).permute(2, 0, 3, 1, 4)
        if "enable_gqa" not in choices:
            k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        return m.head(F.scaled_dot_product_attention(q, k, v, **choices).transpose(1, 2).flatten(2))

    torch.manual_seed(0)
    return Toy(function, q=nn.Linear(8, 16), kv=nn.Linear(8, 16), head=nn.Linear(16, 5)).eval()


@pytest.mark.parametrize(
    "choices", [{"enable_gqa": True}, {"is_causal": True}, {"enable_gqa": True, "is_causal": True}]
)
def test_grouped_and_causal_attention_is_unfolded(choices):
    model = attention(**choices)
    program = check_capture(model, MORE_TOKENS)
    assert sum(node.op == "aten.softmax.int" for node in program.nodes) == 1
    qmodel = adalog.quantize(model, TOKENS, tokens_config())
    assert [row.role for row in qmodel.ledger] == ["linear", "linear", "qk", "av", "linear"]
    error = (qmodel(TOKENS) - model(TOKENS)).norm() / model(TOKENS).norm()
    assert error < 0.05


@pytest.mark.parametrize(
    "function",
    [
        lambda tokens: F.scaled_dot_product_attention(tokens, tokens, tokens, is_causal=True).mean(1),
        lambda tokens: torch.einsum("bnd,bmd->bnm", tokens, tokens).mean((1, 2)),
        lambda tokens: F.adaptive_max_pool1d(tokens.mT, 1).flatten(1),
    ],
    ids=["causal attention", "einsum", "adaptive_max_pool1d"],
)
def test_operations_on_images_of_any_size(function):
    model = Toy(lambda m, x: function(m.stem(x).flatten(2).transpose(1, 2)), stem=nn.Conv2d(3, 8, 4, 4)).eval()
    program = capture(model, IMAGES, "free")
    for images in (IMAGES[:1], IMAGES[:3, :, :16, :24]):
        assert_same(model, program, images)


def test_grouped_attention_is_searched_at_four_bits():
    choices = replace(tokens_config("w4a4", "adalog"), search=adalog.Search(rounds=1, steps=0), stages=())
    qmodel = adalog.quantize(attention(enable_gqa=True), TOKENS, choices)
    assert all(math.isfinite(row.sqnr) for row in qmodel.ledger)


# --- operations that are joined --------------------------------------------------------------------------------------

ROOT = math.sqrt(2 / math.pi)
JOINED = {
    "gelu": lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
    "gelu, gate first": lambda x: (torch.erf(x * 0.7071067811865476) + 1) * (x * 0.5),
    "gelu, stored root": lambda x: x * (1 + torch.erf(x / torch.sqrt(torch.tensor(2.0)))) / 2,
    "gelu, of a multiple": lambda x: (y := 1.5 * x) * 0.5 * (1 + torch.erf(y / math.sqrt(2))),
    "gelu, tanh": lambda x: 0.5 * x * (1 + torch.tanh(ROOT * (x + 0.044715 * torch.pow(x, 3)))),
    "gelu, tanh of products": lambda x: x * 0.5 * (1 + torch.tanh(x * 0.7978845608 * (1 + 0.044715 * x * x))),
    "silu": lambda x: x * torch.sigmoid(x),
    "silu, quotient": lambda x: x / (1 + torch.exp(-x)),
    "mish": lambda x: x * torch.tanh(F.softplus(x)),
    "hardswish": lambda x: x * F.relu6(x + 3) / 6,
}
KEPT = {
    "quick gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "clamped": lambda x: x.clamp(-15, 15) * torch.sigmoid(x),
    "large values": lambda x: x * (torch.sigmoid(x) + F.relu(x - 20)),
    "another root": lambda x: 0.5 * x * (1 + torch.erf(x / 1.5)),
    "two values": lambda x: 0.5 * x * (1 + torch.erf(x.flip(-1) / math.sqrt(2))),
}


@pytest.mark.parametrize("name", [*JOINED, *KEPT])
def test_an_activation_of_several_operations_becomes_one(name):
    function = (JOINED | KEPT)[name]
    model = Toy(lambda model, x: model.head(function(x)), head=nn.Linear(8, 3))
    names = ops(check_capture(model, MORE_TOKENS))
    assert (name.partition(",")[0].partition(" ")[0] in names) == (name in JOINED)
    assert bool({"erf", "tanh", "sigmoid", "exp", "softplus", "relu6"} & {*names}) == (name in KEPT)


def exponentials(x):
    return torch.exp(x - x.max(-1, keepdim=True)[0])


SOFTMAX = {
    "max": lambda x: (e := exponentials(x)) / e.sum(-1, keepdim=True),
    "amax": lambda x: (e := torch.exp(x - x.amax(-1, keepdim=True))) / e.sum(-1, keepdim=True),
    "nothing subtracted": lambda x: (e := torch.exp(x)) / e.sum(dim=1, keepdim=True),
}
NO_SOFTMAX = {
    "softmax plus one": lambda x: (e := exponentials(x)) / (1 + e.sum(-1, keepdim=True)),
    "all of one matrix": lambda x: (e := exponentials(x)) / e.sum((-2, -1), keepdim=True),
    "sum of all": lambda x: (e := torch.exp(x)) / e.sum(None, keepdim=True),
    "another sum": lambda x: exponentials(x) / torch.exp(x).sum(-1, keepdim=True),
}


@pytest.mark.parametrize("name", [*SOFTMAX, *NO_SOFTMAX])
def test_a_softmax_of_several_operations_becomes_one(name):
    function = (SOFTMAX | NO_SOFTMAX)[name]
    model = Toy(lambda model, x: model.head(function(x)), head=nn.Linear(8, 3))
    names = ops(check_capture(model, MORE_TOKENS))
    assert names == ["softmax", "linear"] if name in SOFTMAX else "softmax" not in names


def root(x):
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


NORMS = {
    "rms_norm, power": lambda m, x: m.gain * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)),
    "rms_norm, quotient": lambda m, x: x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + 1e-6) * m.gain,
    "layer_norm, biased": lambda m, x: m.gain * ((d := x - x.mean(-1, keepdim=True)) * root(d)) + m.shift,
    "layer_norm, variance": lambda m, x: (
        (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True, correction=0) + 1e-5) * m.gain + m.shift
    ),
    "layer_norm, unbiased": lambda m, x: (d := x - x.mean(-1, keepdim=True)) * root(d) * m.gain,
}
NO_NORMS = {
    "no weight": lambda m, x: x * root(x),
    "another dimension": lambda m, x: m.gain * (x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6)),
    "a dimension from the start": lambda m, x: m.gain * (x * torch.rsqrt(x.pow(2).mean(2, keepdim=True) + 1e-6)),
    "epsilon outside": lambda m, x: m.gain * x / (torch.sqrt(x.square().mean(-1, keepdim=True)) + 1e-6),
    "sample deviation": lambda m, x: m.gain * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-5),
    "two values": lambda m, x: m.gain * (x * root(x.flip(1))),
    "two dimensions": lambda m, x: m.gain * (x * torch.rsqrt(x.pow(2).mean((1, -1), keepdim=True) + 1e-6)),
    "a single weight": lambda m, x: m.single * (x * root(x)),
    "a broadcast input": lambda m, x: m.gain * (x[..., :1] * root(x[..., :1])),
    "another dtype": lambda m, x: (m.precise * (x * root(x))).float(),
    "no epsilon": lambda m, x: m.gain * (x * torch.rsqrt(x.square().mean(-1, keepdim=True))),
}


@pytest.mark.parametrize("name", [*NORMS, *NO_NORMS])
def test_a_norm_of_several_operations_becomes_one(name):
    parameters = {part: nn.Parameter(torch.randn(8)) for part in ("gain", "shift")}
    parameters |= {"single": nn.Parameter(torch.randn(1)), "precise": nn.Parameter(torch.randn(8).double())}
    model = Toy(lambda m, x: m.head((NORMS | NO_NORMS)[name](m, x)), head=nn.Linear(8, 3), **parameters)
    names = ops(check_capture(model, MORE_TOKENS))
    assert names == [name.partition(",")[0], "linear"] if name in NORMS else not {"rms_norm", "layer_norm"} & {*names}
