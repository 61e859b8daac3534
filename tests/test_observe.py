"""What sites see, part by part: the same as at once, in one forward, within the memory."""

import functools
import threading
import weakref
from dataclasses import replace
from itertools import permutations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import zoo
from adalog import Calibration, CalibrationError, Config, Search, artifact
from adalog.capture import capture
from adalog.observe import Need, Observed, measured
from adalog.program import Program
from adalog.sites import find_sites
from test_capture import Toy

IMAGES = torch.randn(33, 3, 32, 32, generator=torch.Generator().manual_seed(1))
CONFIG = Config(images=33, search=Search(rounds=1, steps=1))


def needs_of(program):
    """What each product reads that is no weight."""
    sites = find_sites(program)
    names = [{site.left, site.right} - program.tensors.keys() for site in sites]
    return [Need(site.name, frozenset(read), site.role == "linear", 0) for site, read in zip(sites, names, strict=True)]


def at_once(program, images):
    """Every value, of one forward of all images."""
    values = dict(zip(program.inputs, images, strict=True))
    with torch.no_grad():
        program.run(images, lambda node, args, result: values.update({node.name: result}))
    return values


def size_of(program, images):
    """Bytes of all that is needed."""
    names = frozenset().union(*(need.names for need in needs_of(program))) - set(program.inputs)
    return sum(value.numel() * 4 for name, value in measured(program, images).items() if name in names)


def observed(program, images, memory):
    return Observed(program, images, measured(program, images), needs_of(program), memory)


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
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(8)))


FOLDED = {"fc": nn.Linear(32, 16), "other": nn.Linear(32, 16), "head": nn.Linear(16, 16), "tail": tail(16)}
FOLDED |= {"bias": nn.Linear(8, 32).weight}


MODELS = {
    "demo": lambda: zoo.captured("demo")[1],
    "timm_swin": lambda: zoo.captured("timm_swin")[1],
    "folded": functools.cache(lambda: capture(Toy(folded, **FOLDED).eval(), IMAGES)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("share", [1.5, 0.7, 0.45])
def test_values_of_batches_are_those_of_all_images_at_once(name, share):
    program = MODELS[name]()
    seen = observed(program, [IMAGES], int(size_of(program, [IMAGES]) * share))
    expected = at_once(program, [IMAGES])
    numbers = []
    for need in needs_of(program):
        assert seen.stride(need.names) == 1
        numbers.append(seen.part(need.names))
        for value, values in seen.seen(need.names).items():
            assert values.shape == expected[value].shape
            torch.testing.assert_close(values, expected[value], rtol=1e-5, atol=1e-5)
    assert numbers == sorted(numbers)
    assert (max(numbers) == 0) is (share > 1)


@pytest.mark.parametrize(("name", "share"), [("demo", 0.3), ("demo", 0.1), ("timm_swin", 0.2), ("timm_swin", 0.08)])
def test_no_more_is_held_than_the_memory(name, share):
    program = MODELS[name]()
    images = torch.cat([IMAGES] * 4)[:130]
    memory = int(size_of(program, [images]) * share)
    seen = observed(program, [images], memory)
    needs = needs_of(program)
    with Held(images, *program.tensors.values()) as held:
        for need in needs:
            seen.seen(need.names)
    assert held.peak <= memory
    assert held.peak > memory / 3
    with Held(images, *program.tensors.values()) as whole:
        every = observed(program, [images], 1 << 30)
        every.seen(needs[0].names)
    assert whole.peak > memory / share


@pytest.fixture
def computed(monkeypatch):
    """How many images each value was computed of, by its name, where its first dimension counts them."""
    counts = {}
    apply = Program._apply

    def counting(self, node, args, kwargs):
        result = apply(self, node, args, kwargs)
        if isinstance(result, torch.Tensor) and result.ndim and not result.is_meta:
            counts[node.name] = counts.get(node.name, 0) + len(result)
        return result

    monkeypatch.setattr(Program, "_apply", counting)
    return counts


@pytest.mark.parametrize("share", [1.01, 0.5])
def test_parts_in_order_cost_one_forward(share, computed):
    """And of four images more, a part, by which it is told whether batches may be trusted."""
    program = MODELS["demo"]()
    seen = observed(program, [IMAGES], int(size_of(program, [IMAGES]) * share))
    computed.clear()
    needs = [need for need in needs_of(program) if need.site != "head"]
    for _ in range(2 if share > 1 else 1):
        for need in needs:
            seen.seen(need.names)
    names = {name for need in needs for name in need.names if name in computed}
    assert {computed[name] for name in names} == {33 if share > 1 else 37}
    seen.seen(needs[1].names)
    assert seen.part(needs[1].names) == 0
    (first,) = needs[1].names
    assert computed[first] == (33 if share > 1 else 37 + 37)


def test_parts_may_be_asked_for_in_any_order_and_by_threads():
    program = MODELS["demo"]()
    expected, needs = at_once(program, [IMAGES]), needs_of(program)
    seen = observed(program, [IMAGES], size_of(program, [IMAGES]) // 3)
    some = [needs[index] for index in (2, 7, len(needs) - 1)]
    assert len({seen.part(need.names) for need in some}) == 3
    wrong = []

    def ask(order):
        for need in order:
            for name, value in seen.seen(need.names).items():
                if not torch.allclose(value, expected[name], rtol=1e-5, atol=1e-5):
                    wrong.append(name)

    for order in permutations(some):
        ask(order)
    threads = [threading.Thread(target=ask, args=(order,)) for order in (some, some[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong


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


def test_several_inputs_and_sizes_go_with_their_images():
    model = Several().eval()
    mask = torch.rand(33, 1, 32, 32, generator=torch.Generator().manual_seed(2)) < 0.7
    inputs = (IMAGES, mask | torch.eye(32, dtype=torch.bool), torch.arange(33) % 5)
    program = capture(model, inputs)
    expected = at_once(program, inputs)
    seen = observed(program, inputs, int(size_of(program, inputs) * 0.95))
    needs = needs_of(program)
    for need in needs:
        for name, value in seen.seen(need.names).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-5)
    assert seen.part(needs[-1].names) > 0


@pytest.mark.parametrize(
    "mixed",
    [
        lambda x: x - x.mean(0),  # each image's values depend on the others
        lambda x: x.transpose(0, 1).flatten(0, 1),  # images in a dimension inside another
        lambda x: x.flatten(0, 1)[None] + x[:, :1, :1],  # in two dimensions
    ],
)
def test_what_batches_cannot_give_is_computed_at_once(mixed):
    model = Toy(lambda m, x: m.two(mixed(m.one(x[:, 0]))), one=tail(32), two=tail(32)).eval()
    program = capture(model, IMAGES)
    expected = at_once(program, [IMAGES])
    seen = observed(program, [IMAGES], size_of(program, [IMAGES]) // 2)
    needs = needs_of(program)
    assert seen.part(needs[-1].names) > 0
    for need in needs:
        for name, value in seen.seen(need.names).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_of_a_large_operand_every_nth_row_or_window_is_kept(name):
    """The same ones as of all images at once; of a product's operands, the same windows."""
    program = MODELS[name]()
    images = torch.cat([IMAGES] * 4)[:130]
    expected = at_once(program, [images])
    seen = observed(program, [images], size_of(program, [images]) // 10)
    strides = set()
    for need in needs_of(program):
        stride = seen.stride(need.names)
        strides.add(stride)
        for value, kept in seen.seen(need.names).items():
            whole = expected[value].flatten(0, -2) if need.rows and stride > 1 else expected[value]
            torch.testing.assert_close(kept, whole[::stride], rtol=1e-5, atol=1e-5)
    assert 1 in strides
    assert max(strides) >= 3


def test_too_little_memory_is_told_with_how_much_is_enough():
    model = zoo.make("demo")
    with pytest.raises(
        ValueError, match=r"memory = 1,000,000 bytes are too few for patch_embed.conv1, which .*: give"
    ) as told:
        Calibration(model, IMAGES, memory=10**6)
    enough = 10**6
    while told is not None:  # of one site after the other
        more = int(str(told.value).split("give ")[1].split(" ")[0].replace(",", ""))
        assert more > enough
        enough, told = more, None
        try:
            Calibration(model, IMAGES, memory=enough)
        except ValueError as error:
            told = pytest.ExceptionInfo.from_exception(error)
    assert enough < 10**7


def test_a_value_that_is_not_finite_is_told_whenever_it_is_met():
    model = Toy(lambda m, x: m.fc(m.one(x * 1e-5) + x.exp()), one=tail(32), fc=nn.Linear(32, 32)).eval()
    program = capture(model, IMAGES)
    images = IMAGES.clone()
    images[30] = 1e38
    seen = observed(program, [images], size_of(program, [images]) // 2)
    first, *_, last = needs_of(program)
    for _ in range(2):
        assert all(bool(value.isfinite().all()) for value in seen.seen(first.names).values())
        with pytest.raises(CalibrationError, match="add puts out NaN or infinite values on these images"):
            seen.seen(last.names)


@pytest.mark.parametrize("name", ["demo", "timm_swin"])
def test_the_artifact_does_not_depend_on_the_memory(name, tmp_path):
    """As long as no rows have to be left out, nor on how many sites are searched at once."""
    model = zoo.make(name)
    wanted = artifact.serialise(Calibration(model, IMAGES).quantize(CONFIG))
    memory = {"demo": 9_600_000, "timm_swin": 27_000_000}[name]
    calibration = Calibration(model, IMAGES, memory=memory)
    found = calibration.search(CONFIG, [calibration.sites[-1].name])  # in another order first
    result = calibration.quantize(CONFIG, jobs=2, partial=tmp_path / "partial")
    assert artifact.serialise(result) == wanted
    assert result.ledger[-1].sqnr == found[0].found.sqnr
    (judged,) = [calibration.judge(one, CONFIG) for one in found]
    assert judged.mean_square_error() == found[0].mean_square_error()
    again = Calibration(model, IMAGES, memory=1 << 30).quantize(CONFIG, partial=tmp_path / "partial")
    assert again.ledger == result.ledger


def test_few_rows_of_many_find_as_good_quantizers():
    """Where the memory holds a third of the rows, the error on all of them is within a few percent."""
    model = zoo.make("timm_swin")
    images = torch.randn(130, 3, 32, 32, generator=torch.Generator().manual_seed(3))
    every = Calibration(model, images)
    config = replace(CONFIG, images=130)
    sites = [site.name for site in every.sites if site.name.startswith("layers.0.blocks.1")]
    best = every.search(config, sites)
    few = Calibration(model, images, memory=40_000_000).search(config, sites)
    for some, whole in zip(few, best, strict=True):
        assert some.left.values.numel() <= whole.left.values.numel()
        error = every.judge(some, config).mean_square_error()
        assert error == pytest.approx(whole.mean_square_error(), rel=0.1)
    assert sum(one.left.values.numel() for one in few) < 0.6 * sum(one.left.values.numel() for one in best)
