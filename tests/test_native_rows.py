"""Rows of kernels that views and zeros have made something else of: native gives what the other executors do."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from adalog import Calibration, library
from toys import Toy

pytestmark = pytest.mark.skipif(not library.levels(), reason="installed without a compiler")
TOKENS = torch.randn(8, 6, 8, generator=torch.Generator().manual_seed(0))


def attention(m, x):
    """Zeros around all of q, k and v."""
    q, k, v = F.pad(m.a(m.norm(x)), (0, 0, 1, 1)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind(0)
    return m.fc(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def sums(m, x):
    """Each sum takes the place of the one before it, which nobody reads any more."""
    for _ in range(3):
        x = x + m.a(m.norm(x))
    return m.fc(x)


def sums_read_later(m, x):
    """No sum may take the place of another, by its own name or as a view, that is read after it."""
    first = x + m.a(m.norm(x))
    second = first + m.a(m.norm(first))
    third = second.flatten(0, 1) + m.a(m.norm(second)).flatten(0, 1)
    return m.fc(first + third.unflatten(0, x.shape[:2]) * second)


CASES = {
    "sums in each other's place": (sums, 8, 8),
    "sums that are read later": (sums_read_later, 8, 8),
    "a sum that is larger than the rows": (lambda m, x: m.fc(m.norm(x).unsqueeze(-1) + m.row), 8, 8),
    "zeros, then three and two heads": (attention, 24, 8),
    "zeros, then rows in halves": (lambda m, x: m.fc(F.pad(m.a(x), (0, 0, 1, 1)).unflatten(-1, (2, 4))), 8, 4),
    "zeros, then a norm's rows in halves": (
        lambda m, x: m.fc(F.pad(m.norm(x), (0, 0, 1, 1)).unflatten(-1, (2, 4))),
        8,
        4,
    ),
    "zeros, then all rows as one": (lambda m, x: m.fc(F.pad(m.norm(x), (0, 0, 1, 1)).flatten(1)), 8, 64),
    "zeros, then two rows as one": (
        lambda m, x: m.fc(F.pad(m.norm(x), (0, 0, 1, 1)).unflatten(1, (4, 2)).flatten(2)),
        8,
        16,
    ),
}


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_native_gives_what_fake_quantization_gives(case, fast):
    function, wide, read = CASES[case]
    torch.manual_seed(0)
    model = Toy(function, norm=nn.LayerNorm(8), a=nn.Linear(8, wide), fc=nn.Linear(read, 3))
    model.row = nn.Parameter(torch.randn(8))
    nn.init.normal_(model.norm.weight)
    nn.init.normal_(model.norm.bias)
    quantized = Calibration(model.eval(), TOKENS).quantize(replace(fast, images=8))
    wanted, found = quantized(TOKENS), quantized.compile("native")(TOKENS)
    assert float((found - wanted).abs().max()) < 1e-5 * float(wanted.abs().max())


@torch.no_grad()
def test_a_sum_lies_where_what_it_adds_to_lay(fast):
    """Two blocks take no more memory than one, and a sum that the model puts out stays what it is."""
    plans = []
    for function in (
        lambda m, x: m.fc(x + m.a(m.norm(x))),
        sums,
        lambda m, x: (first := x + m.a(x), first + m.a(first)),
    ):
        torch.manual_seed(0)
        model = Toy(function, norm=nn.LayerNorm(8), a=nn.Linear(8, 8), fc=nn.Linear(8, 3)).eval()
        quantized = Calibration(model, TOKENS).quantize(replace(fast, images=8))
        compiled = quantized.compile("native")
        wanted, found = quantized(TOKENS), compiled(TOKENS)
        for one, other in zip(wanted, found, strict=True):
            assert float((one - other).abs().max()) < 1e-5 * float(one.abs().max())
        plans.append(compiled.prepare(len(TOKENS)).nbytes)
    assert plans[0] == plans[1]
