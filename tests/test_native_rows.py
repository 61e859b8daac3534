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


CASES = {
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
