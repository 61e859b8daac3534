"""What a search decides: folds leave outputs as they were, chosen codes end up in the file, a start is not lost."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import layer_norm

from adalog import Calibration, QuantizedModel, Search
from adalog.artifact import deserialise, serialise
from adalog.quantizers import Assignment, Fold, QuantizedTensor, UniformQuantizer, uniform_quantize
from adalog.search import bounds
from strategies import normal
from toys import Toy

CHANNELS = 16


# --- folds -----------------------------------------------------------------------------------------------------------


def channel_quantizers(bits=4, channels=CHANNELS):
    """(scale, zero_point), each (C,), spread over two orders of magnitude."""
    scale = normal(channels, seed=1).exp() * 0.1
    zero_point = (normal(channels, seed=2) * 3 + 2 ** (bits - 1)).round().clamp(0, 2**bits - 1)
    return scale, zero_point


@pytest.mark.parametrize("has_bias", [True, False])
# rel: of one product. atol: of sums of about 20 terms of size up to about 100.
@pytest.mark.parametrize(("dtype", "rel", "atol"), [(torch.float64, 1e-12, 1e-11), (torch.float32, 1e-5, 1e-4)])
def test_layer_norm_reparameterization(has_bias, dtype, rel, atol):
    """With r = s / mean(s) and beta = mean(s) (mean(z) - z), the fold into norm and linears leaves their outputs."""
    scale, zero_point = (value.to(dtype) for value in channel_quantizers())
    fold = Fold.sharing(scale, zero_point)
    mean, center = sum(scale.tolist()) / CHANNELS, round(sum(zero_point.tolist()) / CHANNELS)
    assert sum(zero_point.tolist()) % CHANNELS  # codes would differ if the shared zero point were not whole
    assert fold.ratio.tolist() == pytest.approx([s / mean for s in scale.tolist()], rel=rel)
    assert fold.beta.tolist() == pytest.approx([mean * (center - z) for z in zero_point.tolist()], rel=rel)
    shapes = enumerate([(CHANNELS,), (CHANNELS,), (30, CHANNELS)], 3)
    gamma, shift, x = (normal(*shape, seed=seed).to(dtype) for seed, shape in shapes)
    folded = layer_norm(x, (CHANNELS,), *fold.norm(gamma, shift))
    y = layer_norm(x, (CHANNELS,), gamma, shift)  # computed later, so that no fold may change its inputs
    torch.testing.assert_close(folded, y / fold.ratio - fold.beta, rtol=0, atol=atol)
    torch.testing.assert_close(folded, fold.activation(y), rtol=0, atol=atol)
    for seed, outputs in ((6, 3), (7, 40)):
        weight, bias = normal(outputs, CHANNELS, seed=seed).to(dtype), None
        if has_bias:
            bias = normal(outputs, seed=seed + 2).to(dtype)
        new_weight, new_bias = fold.linear(weight, bias)
        assert new_weight.dtype == new_bias.dtype == dtype
        before = y @ weight.T + (0 if bias is None else bias)
        torch.testing.assert_close(folded @ new_weight.T + new_bias, before, rtol=0, atol=atol)


@pytest.mark.parametrize("bits", [2, 4, 6, 8])
def test_one_quantizer_codes_the_folded_input_as_each_channels_own(bits):
    """Exactly, where x is not on a threshold: R(x' / s) + z = R(x / s_c) + z_c."""
    scale, zero_point = channel_quantizers(bits)
    fold = Fold.sharing(scale, zero_point)
    fraction = torch.rand(200, CHANNELS, generator=torch.Generator().manual_seed(0)).double() * 0.98 - 0.49
    whole = torch.randint(-(2**bits), 2 ** (bits + 1), fraction.shape, generator=torch.Generator().manual_seed(1))
    x = (whole + fraction) * scale
    together = uniform_quantize(fold.activation(x), scale.mean(), zero_point.mean().round(), bits)
    assert torch.equal(together, uniform_quantize(x, scale, zero_point, bits))


def test_a_channel_that_never_moves_keeps_the_fold_finite():
    scale, zero_point = channel_quantizers()
    scale[3], zero_point[3] = 1e-30, 0
    fold = Fold.sharing(scale, zero_point)
    assert fold.ratio.min() >= 0.99e-4
    y = normal(30, CHANNELS, seed=5)
    y[:, 3] = 0
    weight, bias = normal(6, CHANNELS, seed=6), normal(6, seed=7)
    new_weight, new_bias = fold.linear(weight, bias)
    assert new_weight.abs().max() < 1e3
    after = (y / fold.ratio - fold.beta) @ new_weight.T + new_bias
    torch.testing.assert_close(after, y @ weight.T + bias, rtol=0, atol=1e-11)


@pytest.fixture(scope="module")
def small(tiniest, images):
    """One block; what is tested does not depend on the model."""
    return Calibration(tiniest, images)


# --- chosen codes ----------------------------------------------------------------------------------------------------


def attention(m, x):
    """Queries, keys and values by linears of their own, which are searched together, behind a norm that is folded."""
    x = m.norm(x)
    return m.out(torch.cat([m.q(x) * 2, m.k(x)[..., :8].sigmoid() + m.v(x)], dim=-1)[..., :16])


def grouped(m, x):
    """A convolution, and one with groups."""
    return m.grouped(m.stem(x)).mean((2, 3))


def rows_of(group, right, program):
    """(weight's name, its codes in the weight's shape) of each of a group's sites, from the codes of all rows."""
    codes, start = right.codes.reshape(-1, right.codes.shape[-1]), 0
    for site in group.sites:
        shape = program.tensors[site.right].shape
        yield site, codes[start : start + shape[0]].reshape(shape)
        start += shape[0]
    assert start == len(codes)


def with_other_codes(assignment, seed):
    """The same with one code in five replaced by any other; codes that are not the nearest."""
    right = assignment.right
    generator = torch.Generator().manual_seed(seed)
    shape, top = right.codes.shape, 2**right.bits - 1
    added = torch.randint(1, top + 1, shape, generator=generator)
    added = torch.where(torch.rand(shape, generator=generator) < 0.2, added, 0)
    codes = ((right.codes.long() + added) % (top + 1)).to(torch.uint8)
    return replace(assignment, right=QuantizedTensor(codes, right.quantizer))


def assert_codes_are_stored(calibration, config, images):
    assigned = calibration.assign(config)
    changed = [
        (group, with_other_codes(each, index) if isinstance(each.right, QuantizedTensor) else each)
        for index, (group, each) in enumerate(assigned)
    ]
    nearest, program = (calibration.build_program(which, config) for which in (assigned, changed))
    stored = deserialise(serialise(program))
    for (group, assignment), (_, before) in zip(changed, assigned, strict=True):
        if group.first.role in ("qk", "av"):
            continue
        assert isinstance(assignment.right, QuantizedTensor)
        for site, codes in rows_of(group, assignment.right, calibration.program):
            each = [whole.program.weights[site.right] for whole in (program, stored)]
            assert all(torch.equal(weight.codes, codes) for weight in each)
            assert torch.equal(each[0].quantizer.scale, each[1].quantizer.scale)
            assert torch.equal(each[0].quantizer.zero_point, each[1].quantizer.zero_point)
            found = nearest.program.weights[site.right]
            assert not torch.equal(found.codes, codes)
            assert torch.equal(found.quantizer.scale, each[0].quantizer.scale)
            weight = each[1].quantizer.dequantize(codes)  # what the model multiplies by
            assert torch.equal(QuantizedModel(stored).quantized.program.tensors[site.right], weight)
        assert not torch.equal(assignment.right.codes, before.right.codes)
    outputs = [QuantizedModel(each)(*images) for each in (program, stored, nearest)]
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    return assigned


def test_chosen_codes_end_up_in_the_file(calibration, fast, images):
    assert_codes_are_stored(calibration, fast, [images])


@pytest.mark.parametrize(("function", "shape"), [(attention, (40, 16)), (grouped, (3, 16, 16))])
def test_chosen_codes_of_other_layers_end_up_in_the_file(function, shape, fast):
    torch.manual_seed(0)
    parts = {"norm": nn.LayerNorm(16), "q": nn.Linear(16, 16), "k": nn.Linear(16, 12), "v": nn.Linear(16, 8)}
    parts |= {"out": nn.Linear(16, 6), "stem": nn.Conv2d(3, 8, 4, 4), "grouped": nn.Conv2d(8, 12, 3, 1, 1, groups=4)}
    images = torch.randn(4, *shape)
    calibration = Calibration(Toy(function, **parts).eval(), images)
    assigned = assert_codes_are_stored(calibration, fast, [images])
    if function is attention:
        assert [len(group.sites) for group, _ in assigned] == [3, 1]
        assert assigned[0][1].fold is not None


def test_an_assignment_without_codes_stores_the_nearest(small, fast):
    config = replace(fast, search=replace(fast.search, refit=False))
    assigned = small.assign(config)
    stored = deserialise(serialise(small.build_program(assigned, config))).program
    for group, assignment in assigned:
        if group.first.role not in ("linear", "conv"):
            continue
        assert isinstance(assignment.right, UniformQuantizer)
        weight = torch.cat([small.program.tensors[site.right].flatten(1) for site in group.sites])
        if assignment.fold is not None:
            weight = assignment.fold.weight(weight)
        nearest = QuantizedTensor.nearest(weight, assignment.right)
        for site, codes in rows_of(group, nearest, small.program):
            assert torch.equal(stored.weights[site.right].codes, codes)


def test_a_tensor_of_codes_keeps_them_under_other_scales():
    values = normal(3, 8, dtype=torch.float32)
    quantizer = UniformQuantizer(torch.full((3, 1), 0.4), torch.full((3, 1), 7.0), 4)
    stored = QuantizedTensor.nearest(values, quantizer)
    assert stored.codes.dtype == torch.uint8
    assert stored.bits == 4
    assert torch.equal(stored.dequantize(), quantizer.fake_quantize(values))
    for other in (stored.rescale(1.5), stored.map(lambda value: value.double()), stored.to(torch.device("cpu"))):
        assert torch.equal(other.codes, stored.codes)
    torch.testing.assert_close(stored.rescale(1.5).dequantize(), stored.dequantize() * 1.5)
    assignment = Assignment(None, stored, Fold(torch.ones(8), torch.zeros(8)), 3.0).to(torch.device("cpu"))
    assert torch.equal(assignment.right.codes, stored.codes)
    assert (assignment.left, assignment.sqnr) == (None, 3.0)


# --- a start ---------------------------------------------------------------------------------------------------------


def sqnrs(assigned):
    return {group.name: assignment.sqnr for group, assignment in assigned}


def assert_no_site_is_worse(after, before):
    """But for rounding: where scales are refitted, an SQNR comes from other sums than where codes are given."""
    after, before = sqnrs(after), sqnrs(before)
    assert after.keys() == before.keys()
    assert {name: (before[name], after[name]) for name in before if not after[name] >= before[name] - 1e-5} == {}


@pytest.mark.slow
def test_a_start_is_never_exchanged_for_a_worse_assignment(small, calibration, fast):
    start = small.assign(fast)
    for search in (fast.search, Search(rounds=2, steps=2)):
        assert_no_site_is_worse(small.assign(replace(fast, search=search), start=start), start)
    assert sqnrs(small.assign(fast)) == sqnrs(start)  # nothing of a start is left for later searches
    start = calibration.assign(replace(fast, search=Search()))
    short = replace(fast, search=Search(init=(4, 2), parents=1, steps=1, rounds=1))
    alone = sqnrs(calibration.assign(short))
    assert sum(alone[name] < sqnr - 0.1 for name, sqnr in sqnrs(start).items()) > len(alone) / 2  # it would lose much
    assert_no_site_is_worse(calibration.assign(short, start=start), start)


def test_a_start_stays_where_searches_go_wrong(small, fast, monkeypatch):
    config = replace(fast, search=replace(fast.search, refit=False), tables="float")
    start = small.assign(config)

    def wrong(operand, other, other_hat, search, incumbent, *, nearby=False):
        return incumbent * 5, torch.tensor(1.0, dtype=torch.float64)

    monkeypatch.setattr(bounds, "_search_operand", wrong)
    after = small.assign(config, start=start)
    assert sqnrs(after) == sqnrs(start)
    assert all(mine.left is given.left for (_, mine), (_, given) in zip(after, start, strict=True))


@pytest.mark.slow
def test_sqnrs_of_what_starts_are_those_of_its_assignments(small, fast):
    """What is kept is judged on the same operands as what is found."""
    start = small.assign(fast)
    found = {searched.group.name: searched for searched in small.search(fast)}
    for group, assignment in small.assign(fast, start=start):
        product = found[group.name].product
        assert product.assign(assignment.left, assignment.right).sqnr == pytest.approx(assignment.sqnr, abs=1e-6)


@pytest.mark.slow
def test_a_start_of_other_bits_is_no_start(small, fast):
    """It would leave less error, with codes that these choices do not allow."""
    start = small.assign(replace(fast, weight_bits=8, activation_bits=8, softmax_bits=8))
    plain = small.build_program(small.assign(fast), fast).ledger
    begun = small.build_program(small.assign(fast, start=start), fast).ledger
    bits = [[side.split("-")[0] for row in ledger for side in (row.left, row.right)] for ledger in (plain, begun)]
    assert bits[0] == bits[1]
