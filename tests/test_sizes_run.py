"""Files and integers of models of any size: sums that grow with the image, rules that are none, other shapes."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from adalog import Calibration, library
from adalog.errors import ArtifactError, ProgramError
from adalog.quantized import _TAKEN
from adalog.runtime.reference import FREE_TERMS
from stored import deserialise, rebuilt, serialise
from toys import Toy

EXECUTORS = ("reference", "torch", *(["native"] if library.levels() else []))


def of_size(height, width, batch=2):
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(height + width))


def everywhere(m, x):
    """Attention over all patches of an image, however many there are."""
    x = m.embed(x).flatten(2).transpose(1, 2)
    q, k, v = m.qkv(x).chunk(3, -1)
    return m.head((x + F.scaled_dot_product_attention(q, k, v)).mean(1))


@pytest.fixture(scope="module")
def free(fast):
    torch.manual_seed(0)
    model = Toy(everywhere, embed=nn.Conv2d(3, 16, 4, 4), qkv=nn.Linear(16, 48), head=nn.Linear(16, 5)).eval()
    return Calibration(model, of_size(40, 56, 4), sizes="free").quantize(replace(fast, images=4))


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("size", [(40, 56), (12, 20), (64, 64), (120, 132)])
def test_attention_over_all_tokens_runs_at_every_size(free, executor, size):
    images = of_size(*size)
    wanted, found = free(images), free.compile(executor)(images)
    assert float((found - wanted).abs().max()) < 1e-4 * float(wanted.abs().max())


def test_sums_over_tokens_alone_are_made_for_more(free):
    terms = {name: site.terms for name, site in free.compile("reference").sites.items()}
    assert terms == {"embed": 48, "qkv": 16, "qk": 16, "av": FREE_TERMS, "head": 16}


@pytest.mark.slow
def test_more_tokens_than_the_sums_hold_are_refused(free):
    with pytest.raises(ProgramError, match=r"it sums 4,225 products, but its accumulators are made for at most 4,096"):
        free.compile("reference")(of_size(260, 260, 1))


def test_a_size_that_a_rule_cannot_be_computed_for_is_refused(free):
    """The quotient by (height - 44) exists at all heights but one."""

    def change(header):
        height = [["h", "aten.sym_size.int", [{"ref": "x"}, 2], {}, ""], ["d", "sym.sub", [{"ref": "h"}, 44], {}, ""]]
        last = [["q", "sym.floordiv", [1, {"ref": "d"}], {}, ""], ["ok", "sym.lt", [{"ref": "q"}, 9], {}, ""]]
        header["rule"] = [[*height, *last], [{"ref": "ok"}]]

    loaded = deserialise(rebuilt(serialise(free), change))
    loaded(of_size(48, 56))
    with pytest.raises(ProgramError, match=r"program was not captured for inputs of \(3, 44, 56\)"):
        loaded(of_size(44, 56))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda header: header["inputs"][0].__setitem__(3, [2.0, 3.0]), r"has the free dimensions \[2.0, 3.0\]"),
        (lambda header: header["inputs"][0].__setitem__(3, []), r"has the free dimensions \[\]"),
        (lambda header: header.update(rule=[[["h", "aten.sym_size.int", [{"ref": "x"}, 2], {}, ""]], []]), "puts out"),
        (
            lambda header: header.update(rule=[[["h", "sym.add", [1, 1], {}, ""]] * 5000, [{"ref": "h"}]]),
            "has 5000 operations, more than 4096",
        ),
    ],
)
def test_rules_that_are_none(free, change, told):
    with pytest.raises(ArtifactError, match=told):
        deserialise(rebuilt(serialise(free), change))


@pytest.mark.skipif(not library.levels(), reason="installed without a compiler")
def test_native_says_which_shapes_it_wants(free):
    compiled = free.compile("native")
    for shapes in ((3, 40, 56), ((3, 40, 56), (3, 40, 56))):
        with pytest.raises(ValueError, match=r"give one \(C, H, W\) for each of the 1 inputs"):
            compiled.prepare(2, *shapes)
    with pytest.raises(ProgramError, match="elements, but a batch of this size may take"):
        compiled.prepare(1, (3, 10**6, 10**6))


def test_shapes_that_are_taken_are_not_kept_without_end(free):
    quantized = replace(free.quantized)
    for width in range(4, 4 + 4 * _TAKEN, 4):
        quantized._taken.add(((1, 3, 4, width),))
    quantized.check([torch.empty(1, 3, 8, 8, device="meta")])
    quantized.check([torch.empty(1, 3, 8, 12, device="meta")])
    assert len(quantized._taken) == _TAKEN
