"""Models are exported although their code takes sizes as numbers; a refusal names the line that is the reason."""

import inspect
import logging
import sys

import pytest
import torch
from torch import nn

from adalog import CaptureError
from adalog.graph.capture import capture
from toys import IMAGES, TOKENS, assert_same


class Base(nn.Module):
    """A model of tokens or images, without its forward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.token, self.head, self.stem = nn.Parameter(torch.randn(1, 1, 8)), nn.Linear(8, 5), nn.Conv2d(3, 8, 4, 4)


class Length(Base):
    def forward(self, x):
        return self.head(torch.cat([self.token.expand(len(x), -1, -1), x], 1)[:, 0])


class Whole(Base):
    def forward(self, x):
        return self.head(x.reshape(int(x.shape[0]) * 6, 8).view(-1, 6, 8).mean(1))


class Windows(Base):
    """Two windows of three tokens per image, put together as the published Swin does."""

    def forward(self, x):
        windows = x.reshape(-1, 3, 8)
        return self.head(windows.view(int(windows.shape[0] / (6 * 1 / 3 / 1)), 6, 8).mean(1))


class Listed(Base):
    def forward(self, x):
        return self.head(x.view([len(x), *x.shape[1:]]).mean(1)) + torch.zeros(int(x.size(0)), 1)


@pytest.mark.parametrize("kind", [Length, Whole, Windows, Listed])
def test_the_number_of_images_may_be_a_python_number(kind):
    model = kind().eval()
    program = capture(model, TOKENS[:2])
    for count in (1, 3, 8):
        assert_same(model, program, TOKENS[:count])
    assert set(program.tensors) <= set(model.state_dict())
    assert {node.scope for node in program.nodes} >= {"head"}


def test_len_of_a_tensor_is_followed_where_the_second_way_fails(monkeypatch):
    """PyTorch's slower way fails on parts of published models, such as a split at sizes that a tensor holds."""
    export = torch.export.export

    def only_first_way(*args, strict, **kwargs):
        if strict:
            raise RuntimeError("no second way")
        return export(*args, strict=False, **kwargs)

    monkeypatch.setattr(torch.export, "export", only_first_way)
    model = Length()
    program = capture(model.eval(), TOKENS[:2])
    assert_same(model, program, TOKENS[:3])
    assert "len" not in globals()
    with pytest.raises(CaptureError, match="number of images into a fixed number"):
        capture(Whole().eval(), TOKENS[:2])


def test_a_quotient_that_may_be_negative_is_not_rounded_down():
    """Python rounds it towards zero: -8 / 16 becomes 0, not -1."""

    class Rounded(Base):
        def forward(self, x):
            return self.head(self.stem(x).mean((2, 3))) + int((x.shape[2] - 40) / 16)

    with pytest.raises(CaptureError):
        capture(Rounded().eval(), IMAGES, "free")


def test_height_and_width_may_be_python_numbers():
    class Rows(Base):
        def forward(self, x):
            x = self.stem(x)
            x = x * torch.ones(int(x.shape[2]) ** 2).mean()
            return self.head(x.reshape(len(x), 8, int(x.shape[2]) * int(x.shape[3])).mean(2))

    model = Rows().eval()
    program = capture(model, IMAGES, "free")
    for images in (IMAGES, IMAGES[:3, :, :16, :24]):
        assert_same(model, program, images)


# --- refusals --------------------------------------------------------------------------------------------------------


class Loop(Base):
    def forward(self, x):
        return torch.stack([self.head(one.mean(0)) for one in x])


class Fixed(Base):
    def forward(self, x):
        return self.head(helper(x))


def helper(x):
    return x.view(2, -1, 8).mean(1)


class FixedHeight(Base):
    def forward(self, x):
        return self.head(self.stem(x + torch.arange(32.0)).mean((2, 3)))


class ByValue(Base):
    def forward(self, x):
        return self.head(x if x.mean() > 0 else -x)


class Wrong(Base):
    def forward(self, x):
        return self.head(x[..., :3])


class Unknown:
    """No tensor, nor a list of tensors."""


class Odd(Base):
    def forward(self, x):
        return Unknown()


class Shy(Base):
    def forward(self, x):
        if torch.compiler.is_compiling():
            raise OSError("not while one looks")
        return x


def line_of(function, words):
    lines, start = inspect.getsourcelines(function)
    return start + next(index for index, line in enumerate(lines) if words in line)


@pytest.mark.parametrize(
    ("kind", "function", "code", "words"),
    [
        (Loop, Loop.forward, "for one in x", "Loop turns the number of images into a fixed number at {}: use x.shape"),
        (Fixed, helper, "x.view", "Fixed turns the number of images into a fixed number at {}: use x.shape"),
        (ByValue, ByValue.forward, "if x.mean", "because it decides by the values of tensors at {}, but a program"),
        (Wrong, Wrong.forward, "[..., :3]", "Wrong fails on inputs of (2, 6, 8) at {} (RuntimeError: "),
        (
            Odd,
            Odd.forward,
            "Unknown",
            (
                "Unknown, which torch.export does not take apart: return tensors, tuples, lists or dicts, or first "
                "pass a dataclass to torch.export.register_dataclass"
            ),
        ),
        (Shy, Shy.forward, "raise", "Shy could not be exported at {} (not while one looks): quantize a part of"),
    ],
)
def test_a_refusal_names_the_line(kind, function, code, words, capfd):
    before = logging.root.manager.disable, sys.stderr
    with pytest.raises(CaptureError) as caught:
        capture(kind().eval(), TOKENS)
    assert (logging.root.manager.disable, sys.stderr) == before
    place = f"test_exported.py:{line_of(function, code)}"
    assert words.format(place) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("dtype", ["uint8", "float64"])
@pytest.mark.parametrize("layer", [nn.Conv2d(3, 4, 8), nn.Linear(32, 4)])
def test_images_of_another_dtype_are_named(dtype, layer):
    with pytest.raises(CaptureError, match=rf"fails on .*: the images are {dtype}; give float32, normalised"):
        capture(nn.Sequential(layer).eval(), IMAGES.to(getattr(torch, dtype)))


def test_a_fixed_height_is_named():
    with pytest.raises(
        CaptureError, match=r"turns the width of the images into a fixed number at .*: capture it for one"
    ):
        capture(FixedHeight().eval(), IMAGES, "free")
    capture(FixedHeight().eval(), IMAGES)


def test_operations_are_named_with_their_line():
    class Products(Base):
        def forward(self, x):
            x = x.cumprod(1)
            return self.head(x)

    with pytest.raises(CaptureError) as caught:
        capture(Products().eval(), TOKENS)
    line = line_of(Products.forward, "cumprod")
    assert f"Products uses aten.cumprod.default at test_exported.py:{line}, which adalog cannot" in str(caught.value)
    assert "adalog.quantize(part, images, within=model)" in str(caught.value)


def test_a_part_of_pytorch_is_named_without_a_line():
    with pytest.raises(CaptureError, match=r"Sequential uses aten\.rrelu\.default, which adalog cannot"):
        capture(nn.Sequential(nn.Linear(8, 4), nn.RReLU()).eval(), TOKENS)


# --- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "value"), [(nn.Linear(8, 5), torch.inf), (nn.LayerNorm(8), -torch.inf), (nn.Conv1d(6, 6, 3), torch.nan)]
)
def test_weights_that_are_not_finite_are_named(layer, value):
    model = nn.Sequential(nn.Identity(), layer).eval()
    with torch.no_grad():
        before = layer.weight.clone()
        layer.weight.view(-1)[3] = value
    with pytest.raises(CaptureError, match=rf"1.weight of Sequential holds {value} in 1 of \d+ places: load weights"):
        capture(model, TOKENS)
    with torch.no_grad():
        layer.weight.copy_(before)
    capture(model, TOKENS)


def test_infinite_masks_are_taken():
    class Masked(Base):
        def forward(self, x):
            return (self.head(x) + torch.tensor([0, -torch.inf, 0, 0, 0])).softmax(-1)

    assert_same(Masked().eval(), capture(Masked().eval(), TOKENS), TOKENS)
