"""Small models, and whether a program captured from a model is the same."""

from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

from adalog import Config, Search
from adalog.graph.capture import capture
from adalog.graph.operations import OPERATIONS
from adalog.study.evaluate import predict

IMAGES = torch.randn(7, 3, 32, 32, generator=torch.Generator().manual_seed(2))
SMALL_IMAGES = torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(3))
BRIEF = Search(init=(8, 4), parents=4, steps=0, rounds=1, compare_uniform=False)
TOKENS = torch.randn(8, 6, 8, generator=torch.Generator().manual_seed(0)) * 2 + 1  # (B, N, C)


class Toy(nn.Module):
    """A function of images as a model, with modules to call."""

    def __init__(self, function, **modules):
        super().__init__()
        torch.manual_seed(0)
        for name, module in modules.items():
            setattr(self, name, module)
        self.function = function

    def extra_repr(self):
        """Return what tells models of other functions apart, for `captured_once`."""
        return repr((self.function.__code__, [cell.cell_contents for cell in self.function.__closure__ or ()]))

    def forward(self, x):
        return self.function(self, x)


def model_of(forward, **modules):
    """A model with this forward method."""
    return type("Model", (Toy,), {"forward": forward})(forward, **modules).eval()


def values(output):
    """The tensors of nested outputs, in order."""
    if isinstance(output, torch.Tensor):
        return [output]
    items = output.values() if isinstance(output, dict) else output
    return [value for item in items for value in values(item)]


@torch.no_grad()
def assert_same(model, program, images, tolerance=1e-5):
    wanted, got = values(model(images)), values(program.run((images,)))
    assert len(wanted) == len(got) > 0
    for expected, actual in zip(wanted, got, strict=True):
        assert actual.shape == expected.shape
        assert actual.dtype == expected.dtype
        assert expected.abs().max() > 0
        assert (actual - expected).abs().max() <= tolerance * expected.abs().max()


def check_capture(model, images=IMAGES):
    """Capture the model on two inputs, compare it on all of them and on one, and return the program."""
    program = capture(model.eval(), images[:2])
    assert {node.op for node in program.nodes} <= OPERATIONS
    assert_same(model, program, images)
    assert_same(model, program, images[:1])
    return program


def ops(program):
    """The names of the operations in order, without overloads."""
    return [node.op.removeprefix("aten.").split(".")[0] for node in program.nodes]


class Attention(nn.Module):
    def __init__(self, mask=None, scale=None):
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(32, 96)
        self.mask = None if mask is None else nn.Buffer(mask)
        self.scale = scale

    def forward(self, x):
        q, k, v = self.qkv(x[:, 0]).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4).unbind(0)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, scale=self.scale)


def learned_query():
    """A model with a linear that reads a stored token, repeated for each image."""
    torch.manual_seed(0)
    layers = {name: nn.Linear(8, 8) for name in ("query", "key", "head")}
    return Toy(
        lambda m, x: m.head(m.query(m.token.expand(x.shape[0], -1, -1)) + m.key(x)),
        token=nn.Parameter(torch.randn(1, 1, 8)),
        **layers,
    ).eval()


def tokens_config(bits="w8a8", method="minmax", **changes):
    """A config that calibrates on all of `TOKENS`."""
    return replace(Config.preset(bits, method), images=len(TOKENS), **changes)


def decibels(found, wanted):
    """The signal-to-noise ratio of `found` [dB]."""
    noise = (found - wanted).double().square().sum()
    return float(10 * (wanted.double().square().sum() / noise).log10())


def distance(model, reference, images):
    """The squared error of a model's outputs, as a share of the variance of the reference's."""
    wanted = predict(reference, images)
    return float((predict(model, images) - wanted).square().mean() / wanted.var())


@torch.no_grad()
def all_values(program, inputs):
    """These inputs and every value that a program makes of them, by name."""
    values = dict(zip(program.inputs, inputs, strict=True))
    program.run(inputs, lambda node, args, result: values.update({node.name: result}))
    return values


class Unbound(nn.Module):
    """Attention without a residual, so that a list of queries, keys and values is all that is read."""

    def __init__(self, ends):
        super().__init__()
        torch.manual_seed(0)
        self.patches, self.qkv, self.up = nn.Conv2d(3, 16, 4, 4), nn.Linear(16, 48), nn.Linear(16, 24)
        self.head, self.ends = nn.Linear(24, 5), ends

    def forward(self, x):
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(tokens).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = ((q @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(1, 2).flatten(2)
        return self.ends(self.head(nn.functional.gelu(self.up(mixed))).mean(1))
