"""A function as a model, and whether a program captured from a model is the same."""

import torch
from torch import nn
from torch.nn import functional as F

IMAGES = torch.randn(7, 3, 32, 32, generator=torch.Generator().manual_seed(2))


class Toy(nn.Module):
    """A function of images as a model, with modules to call."""

    def __init__(self, function, **modules):
        super().__init__()
        torch.manual_seed(0)
        for name, module in modules.items():
            setattr(self, name, module)
        self.function = function

    def forward(self, x):
        return self.function(self, x)


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
