"""What sites see, part by part: the same as at once, in one forward, within the memory."""

import functools
import weakref
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import permutations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import zoo
from adalog import Calibration, CalibrationError, Config, DataError, Resources, Search
from adalog.calibration.observe import Observations, Request
from adalog.graph.capture import capture
from adalog.graph.program import Program
from adalog.graph.sites import find_sites
from adalog.graph.tracing import trace
from stored import serialise
from toys import Toy, all_values

IMAGES = torch.randn(33, 3, 32, 32, generator=torch.Generator().manual_seed(1))
CONFIG = Config(images=33, search=Search(rounds=1, steps=1), stages=())


def needs_of(program):
    """What each product reads that is no weight."""
    sites = find_sites(program)
    names = [{site.left, site.right} - program.tensors.keys() for site in sites]
    reads = zip(sites, names, strict=True)
    return [Request(site.name, frozenset(read), site.role == "linear", 0) for site, read in reads]


def size_of(program, images):
    """Bytes of all that is needed."""
    names = frozenset().union(*(need.names for need in needs_of(program))) - set(program.inputs)
    return sum(value.numel() * 4 for name, value in trace(program, images).items() if name in names)


def observed(program, images, memory):
    return Observations(program, images, needs_of(program), memory)


def assert_reads(seen, needs, expected):
    """What is read is every n-th row, window or image of the values at once. Return n for each need."""
    strides = []
    for need in needs:
        strides.append(seen.stride(need.names))
        for name, kept in seen.read(need.names).items():
            whole = expected[name].flatten(0, -2) if need.by_row and strides[-1] > 1 else expected[name]
            torch.testing.assert_close(kept, whole[:: strides[-1]], rtol=1e-5, atol=1e-5)
    return strides


class Held(TorchDispatchMode):
    """The bytes of all tensors that are made and still held, now and at most; some are not counted."""

    def __init__(self, *others):
        super().__init__()
        self.now = self.peak = 0
        self._known = {}
        self._others = {value.untyped_storage()._cdata for value in others}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        pytree.tree_map_only(torch.Tensor, self._count, result)
        return result

    def _count(self, value):
        storage = value.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if value.is_meta or key in self._known or key in self._others:
            return

        def gone(_):
            self.now -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)


def folded(m, x):
    """Windows in the first dimension, three an image, whose scores get a bias that all images share."""
    windows = m.fc(x).flatten(0, 1)
    return m.tail(
        m.other((windows @ windows.transpose(-1, -2)) * (m.bias @ m.bias.transpose(0, 1))) + m.head(F.gelu(windows))
    )


def tail(width):
    """What makes a value of some size a small part of all."""
    return nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(width, width), nn.Tanh())))


FOLDED = {"fc": nn.Linear(32, 16), "other": nn.Linear(32, 16), "head": nn.Linear(16, 16), "tail": tail(16)}
FOLDED |= {"bias": nn.Linear(8, 32).weight}


MODELS = {
    "demo": lambda: zoo.captured("demo")[1],
    "timm_swin": lambda: zoo.captured("timm_swin")[1],
    "folded": functools.cache(lambda: capture(Toy(folded, **FOLDED).eval(), IMAGES)),
}


SLOW = [(name, share) for name in MODELS for share in (1.5, 0.45, 1 / 8) if (name, share) != ("demo", 0.45)]


@pytest.mark.parametrize(
    ("name", "share"), [("demo", 0.45), *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)]
)
def test_values_of_batches_are_those_of_all_images_at_once(name, share):
    """With little memory, every n-th row or window of them; of a product's operands, the same windows."""
    program = MODELS[name]()
    images = torch.randn(97, *IMAGES.shape[1:], generator=torch.Generator().manual_seed(1))
    seen, needs = observed(program, [images], int(size_of(program, [images]) * share)), needs_of(program)
    strides = assert_reads(seen, needs, all_values(program, [images]))
    assert min(strides) == 1
    assert max(strides) >= 3 if share < 0.2 else max(strides) == 1
    numbers = [seen.stage(need.names) for need in needs]
    assert numbers == sorted(numbers)
    assert (max(numbers) == 0) is (share > 1)


@pytest.mark.parametrize(
    ("name", "share"),
    [("demo", 0.4), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("demo", 0.1), ("timm_swin", 0.2)))],
)
def test_no_more_is_held_than_the_memory(name, share):
    program = MODELS[name]()
    images = torch.cat([IMAGES] * 3)[:97]
    memory = int(size_of(program, [images]) * share)
    seen = observed(program, [images], memory)
    needs = needs_of(program)
    with Held(images, *program.tensors.values()) as held:
        for need in needs:
            seen.read(need.names)
    assert held.peak <= memory
    assert held.peak > memory / 3
    with Held(images, *program.tensors.values()) as whole:
        every = observed(program, [images], 1 << 30)
        every.read(needs[0].names)
    assert whole.peak > memory / share


def computed(monkeypatch):
    """Return a dict that gets the first dimension of every value that a program computes, by the value's name."""
    sizes, apply = defaultdict(list), Program.apply

    def counting(self, node, args, kwargs):
        result = apply(self, node, args, kwargs)
        if isinstance(result, torch.Tensor) and result.ndim and not result.is_meta:
            sizes[node.name].append(len(result))
        return result

    monkeypatch.setattr(Program, "apply", counting)
    return sizes


@pytest.mark.parametrize("share", [1.01, 0.5])
def test_parts_in_order_cost_one_forward(share, monkeypatch):
    """And of four images more, a part, by which it is told whether batches may be trusted."""
    program = MODELS["demo"]()
    seen = observed(program, [IMAGES], int(size_of(program, [IMAGES]) * share))
    sizes = computed(monkeypatch)
    needs = [need for need in needs_of(program) if need.site != "head"]
    for _ in range(2 if share > 1 else 1):
        for need in needs:
            seen.read(need.names)
    names = {name for need in needs for name in need.names if name in sizes}
    assert {sum(sizes[name]) for name in names} == {33 if share > 1 else 37}
    seen.read(needs[1].names)
    assert seen.stage(needs[1].names) == 0
    (first,) = needs[1].names
    assert sum(sizes[first]) == (33 if share > 1 else 37 + 37)


@pytest.mark.slow
def test_parts_may_be_asked_for_in_any_order_and_by_threads():
    program = MODELS["demo"]()
    expected, needs = all_values(program, [IMAGES]), needs_of(program)
    seen = observed(program, [IMAGES], size_of(program, [IMAGES]) // 3)
    some = [needs[index] for index in (2, 7, len(needs) - 1)]
    assert len({seen.stage(need.names) for need in some}) == 3
    for order in permutations(some):
        assert_reads(seen, order, expected)
    with ThreadPoolExecutor() as threads:
        asked = [threads.submit(assert_reads, seen, order, expected) for order in (some, some[::-1])]
        for future in asked:
            future.result(60)


class Several(nn.Module):
    """Attention over rows with a mask, and a token put before them that depends on the image's kind."""

    def __init__(self):
        super().__init__()
        self.fc, self.tail, self.table = nn.Linear(32, 32), tail(8), nn.Embedding(5, 8)

    def forward(self, x, mask, kind):
        y = self.fc(x[:, 0]).unflatten(2, (4, 8)).transpose(1, 2)
        scores = (y @ y.transpose(-1, -2)).masked_fill(~mask, -torch.inf).softmax(-1)
        first = torch.zeros(x.shape[0], 1, 8) + self.table(kind)[:, None]
        return self.tail(torch.cat([first, (scores @ y).flatten(1, 2)], dim=1))


@pytest.mark.slow
def test_several_inputs_and_sizes_go_with_their_images():
    model = Several().eval()
    mask = torch.rand(33, 1, 32, 32, generator=torch.Generator().manual_seed(2)) < 0.7
    inputs = (IMAGES, mask | torch.eye(32, dtype=torch.bool), torch.arange(33) % 5)
    program = capture(model, inputs)
    seen, needs = observed(program, inputs, int(size_of(program, inputs) * 0.95)), needs_of(program)
    assert set(assert_reads(seen, needs, all_values(program, inputs))) == {1}
    assert seen.stage(needs[-1].names) > 0


@pytest.mark.parametrize(
    "mixed",
    [
        lambda x: x - x.mean(0),  # each image's values depend on the others
        # Images in a dimension inside another.
        pytest.param(lambda x: x.transpose(0, 1).flatten(0, 1), marks=pytest.mark.slow),
        pytest.param(lambda x: x.flatten(0, 1)[None] + x[:, :1, :1], marks=pytest.mark.slow),  # in two dimensions
    ],
)
def test_what_batches_cannot_give_is_computed_at_once(mixed):
    model = Toy(lambda m, x: m.two(mixed(m.one(x[:, 0]))), one=tail(32), two=tail(32)).eval()
    program = capture(model, IMAGES)
    seen, needs = observed(program, [IMAGES], size_of(program, [IMAGES]) // 2), needs_of(program)
    assert seen.stage(needs[-1].names) > 0
    assert set(assert_reads(seen, needs, all_values(program, [IMAGES]))) == {1}


def test_too_little_memory_is_told_with_how_much_is_enough_for_all():
    """Twice what is for values, since as much is for temporaries."""
    program = MODELS["demo"]()
    with pytest.raises(
        ValueError, match=r"memory = 200,000 bytes is too little for .*: use [\d,]+ bytes or more"
    ) as told:
        observed(program, [IMAGES], 10**5)
    enough = int(str(told.value).split("use ")[1].split(" ")[0].replace(",", "")) // 2
    assert 10**5 < enough < size_of(program, [IMAGES]) / 2
    observed(program, [IMAGES], enough)
    with pytest.raises(ValueError, match=f"memory = {2 * (enough // 2):,} bytes"):
        observed(program, [IMAGES], enough // 2)


def test_a_value_that_is_not_finite_is_told_whenever_it_is_met():
    model = Toy(lambda m, x: m.fc(m.one(x * 1e-5) + x.exp()), one=tail(32), fc=nn.Linear(32, 32)).eval()
    program = capture(model, IMAGES)
    images = IMAGES.clone()
    images[30] = 1e38
    seen = observed(program, [images], size_of(program, [images]) // 2)
    first, *_, last = needs_of(program)
    for _ in range(2):
        assert all(bool(value.isfinite().all()) for value in seen.read(first.names).values())
        with pytest.raises(CalibrationError, match="add outputs NaN or infinite values on these images"):
            seen.read(last.names)


@pytest.mark.slow
@pytest.mark.usefixtures("captured_once")
@pytest.mark.parametrize(("name", "count", "memory"), [("demo", 9, 2_700_000), ("timm_swin", 17, 14_000_000)])
def test_what_is_found_does_not_depend_on_the_memory(name, count, memory, tmp_path):
    """As long as no rows have to be left out; up to rounding, on which a convolution's batch has a say."""
    model, images, config = zoo.make(name), IMAGES[:count], replace(CONFIG, images=count)
    wanted = Calibration(model, images).quantize(config)
    calibration = Calibration(model, images, memory=memory)
    assert len(calibration._splits()) > 2
    last = calibration.sites[-1].name
    (found,) = calibration.search(config, [last])  # in another order first
    result = calibration.quantize(config, Resources(2, tmp_path / "partial"))
    assert [row.site for row in result.ledger] == [row.site for row in wanted.ledger]
    for row, whole in zip(result.ledger, wanted.ledger, strict=True):
        assert row.sqnr == pytest.approx(whole.sqnr, abs=0.01)
    assert result.ledger[-1].sqnr == found.assignment.sqnr
    assert calibration.evaluate(found, config).mean_square_error() == found.mean_square_error()
    again = Calibration(model, images, memory=memory)
    assert serialise(again.quantize(config)) == serialise(result)
    resumed = Calibration(model, images).quantize(config, Resources(partial=tmp_path / "partial"))
    assert serialise(resumed) == serialise(result)


@pytest.mark.slow
@pytest.mark.usefixtures("captured_once")
def test_an_interrupted_run_goes_on_with_other_memory_only_where_the_same_rows_are_kept(tmp_path):
    model, images = zoo.make("demo"), torch.cat([IMAGES] * 3)
    config = replace(CONFIG, images=len(images), pinned=(("*", 32),), input_bits=32)
    Calibration(model, images, memory=12_000_000).quantize(config, Resources(partial=tmp_path / "partial"))
    with pytest.raises(DataError, match="partial"):
        Calibration(model, images).quantize(config, Resources(partial=tmp_path / "partial"))


@pytest.mark.slow
@pytest.mark.usefixtures("captured_once")
def test_few_rows_of_many_find_as_good_quantizers():
    """Where the memory holds a third of the rows or less, the error on all of them is within a few percent."""
    model = zoo.make("demo")
    images = torch.randn(130, 3, 32, 32, generator=torch.Generator().manual_seed(3))
    config = replace(CONFIG, images=130)
    sites = ["blocks.0.attn.av", "blocks.1.mlp.fc2"]
    every, some = Calibration(model, images), Calibration(model, images, memory=14_000_000)
    for best, found in zip(every.search(config, sites), some.search(config, sites), strict=True):
        assert found.product.left.values.numel() < 0.4 * best.product.left.values.numel()
        error = every.evaluate(found, config).mean_square_error()
        assert error == pytest.approx(best.mean_square_error(), rel=0.05)


def test_a_request_for_fewer_rows_takes_them_whatever_the_memory():
    program = MODELS["demo"]()
    needs = [replace(need, stride=2) for need in needs_of(program)]
    seen = Observations(program, [IMAGES], needs, 1 << 30)
    strides = assert_reads(seen, needs, all_values(program, [IMAGES]))
    assert set(strides) >= {1, 2}  # 1 if few rows would be left
