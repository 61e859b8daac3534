"""The compiled kernels, at every level that runs here: the accumulators of the reference, and its models."""

import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import test_integer as integer
from adalog import ArtifactError, Calibration, Config, library
from adalog.quantizers import LogQuantizer, UniformQuantizer
from adalog.runtime import native, reference
from adalog.runtime.native import plan
from adalog.runtime.native.plan import Plan, search_tables, steps_of
from stored import deserialise, serialise
from strategies import bits, normal, seeds

LEVELS = library.levels()
needs_kernels = pytest.mark.skipif(not LEVELS, reason=f"no kernels: {library.why()}")
every_level = pytest.mark.parametrize("level", LEVELS or [pytest.param("none", marks=needs_kernels)])
few = settings(max_examples=12)  # at each level
SOURCES = [Path(native.__file__).with_name("native.cpp"), Path(library.__file__).parent / "search" / "fused.cpp"]


def room(level, threads=1):
    return native.Room(native.Context(threads, level))


# --- products --------------------------------------------------------------------------------------------------------

kinds = st.sampled_from(["uniform", "log2", "log-sqrt2", "adalog"])
tables = st.sampled_from([8, 16])
extremes = st.sampled_from([0, 0, 0, 1, 2])


def accumulators(kernels, model, left, right):
    (site,) = reference.plan(model.program, model.example)
    lifted = [kernels.Encoder(site.left, site).lift(left)]
    if site.weight is None:
        lifted.append(kernels.Encoder(site.right, site).lift(right))
    product = kernels.Product(site)
    assert isinstance(product, native.Product) == native.takes(site)
    (found,) = product.accumulate(*lifted)
    return found


def exact(model, left, right):
    (site,) = reference.plan(model.program, model.example)
    lifted = [reference.Encoder(site.left, site).lift(left)]
    if site.weight is None:
        lifted.append(reference.Encoder(site.right, site).lift(right))
    (found,) = reference.Product(site).accumulate(*lifted)
    return found


@every_level
@few
@given(kinds, bits, bits, tables, st.tuples(*[st.integers(1, n) for n in (9, 5, 140, 300)]), extremes, seeds)
def test_linear(level, kind, width, weight_width, table, sizes, extreme, seed):
    generator = torch.Generator().manual_seed(seed)
    batch, tokens, outputs, terms = sizes
    left = integer.left_quantizer(generator, kind, width, table, ())
    right = integer.uniform(generator, weight_width, outputs, 1)
    codes = integer.codes_of(generator, width, (batch, tokens, terms), extreme)
    weight = integer.codes_of(generator, weight_width, (outputs, terms), extreme)
    model = integer.model_of("aten.linear.default", left, right, codes.shape, None, weight)
    found = accumulators(room(level), model, codes, None)
    assert torch.equal(found, exact(model, codes, None))


@every_level
@few
@given(
    kinds,
    bits,
    bits,
    tables,
    st.tuples(*[st.integers(1, n) for n in (3, 3, 40, 70, 70)]),
    st.booleans(),
    extremes,
    seeds,
)
def test_products_of_computed_operands(level, kind, width, other_width, table, sizes, transposed, extreme, seed):
    generator = torch.Generator().manual_seed(seed)
    batch, heads, rows, terms, columns = sizes
    left = integer.left_quantizer(generator, kind, width, table, (heads, 1, 1) if kind == "uniform" else ())
    right = integer.uniform(generator, other_width, heads, 1, 1)
    codes = integer.codes_of(generator, width, (batch, heads, rows, terms), extreme)
    others = integer.codes_of(generator, other_width, (batch, heads, terms, columns), extreme)
    model = integer.model_of("aten.matmul.default", left, right, codes.shape, others.shape)
    others = others.mT.contiguous().mT if transposed else others
    found = accumulators(room(level), model, codes, others)
    assert torch.equal(found, exact(model, codes, others))


@every_level
@few
@given(kinds, bits, bits, tables, st.tuples(*[st.integers(1, 3)] * 4), st.integers(0, 2), seeds)
def test_convolution(level, kind, width, weight_width, table, sizes, padding, seed):
    generator = torch.Generator().manual_seed(seed)
    batch, channels, stride, dilation = sizes
    left = integer.left_quantizer(generator, kind, width, table, ())
    right = integer.uniform(generator, weight_width, 5, 1, 1, 1)
    codes = integer.codes_of(generator, width, (batch, channels, 9, 8), 0)
    weight = integer.codes_of(generator, weight_width, (5, channels, 3, 2), 0)
    geometry = (stride, 1), (padding, 1), (dilation, 1), 1
    model = integer.model_of("aten.conv2d.default", left, right, codes.shape, None, weight, geometry)
    found = accumulators(room(level), model, codes, None)
    assert torch.equal(found, exact(model, codes, None))
    x = left.dequantize(codes)
    assert torch.allclose(model.compile("native", level=level)(x), model.compile("reference")(x), rtol=1e-5, atol=1e-4)


@every_level
def test_the_largest_sums(level):
    """Every byte at its largest, where 16 bits would saturate and 32 wrap were they signed differently."""
    for width, terms in ((8, 4000), (4, 4000), (8, 63)):
        left = LogQuantizer(torch.tensor(1.0), 1, 1, width, "saturate", table=False, width=8, headroom=7)
        for zero in (0.0, 2.0**width - 1):
            right = UniformQuantizer(torch.ones(3, 1), torch.full((3, 1), zero), width)
            codes = torch.zeros(1, 1, terms, dtype=torch.uint8)
            weight = torch.full((3, terms), 0 if zero else 2**width - 1, dtype=torch.uint8)
            model = integer.model_of("aten.linear.default", left, right, codes.shape, None, weight)
            found = accumulators(room(level), model, codes, None)
            assert found.flatten().tolist() == [(-1 if zero else 1) * terms * 128 * (2**width - 1)] * 3


# --- functions of few values -----------------------------------------------------------------------------------------


@every_level
@few
@given(st.integers(1, 90), st.integers(1, 70), st.data())
def test_rows_have_their_places(level, columns, count, data):
    """Accumulators, and floats with a residual: each row where it is told, none twice, and some nowhere."""
    context, site = native.Context(2, level), _site(columns, 70)
    places = torch.tensor(data.draw(st.permutations(range(count + 5)))[:count], dtype=torch.int32)
    places[data.draw(st.lists(st.integers(0, count - 1), max_size=5))] = -1
    added_to = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count)), dtype=torch.int32)
    told = {"place": places.data_ptr(), "places": count}
    weights, rows = context.weights(site), torch.arange(count * 70).remainder_(16).to(torch.uint8).view(count, 70)
    plain, sums = torch.empty(count, columns, dtype=torch.int32), torch.full((count + 5, columns), 7, dtype=torch.int32)
    for out, where in ((plain, {}), (sums, told)):
        kind = native.Output(kind=native.SUMS, **native.place(out), **where)
        context.run("linear", native.linear(weights, [rows], kind))
    wanted = torch.full_like(sums, 7)
    wanted[places[places >= 0].long()] = plain[places >= 0]
    assert torch.equal(sums, wanted)
    one, none, residual = torch.ones(columns), torch.zeros(columns), torch.randn(3, columns)
    floats = torch.zeros(count + 5, columns)
    kind = native.Output(
        kind=native.FLOATS,
        scale=one.data_ptr(),
        bias=none.data_ptr(),
        parameters=columns,
        residual=residual.data_ptr(),
        residual_bytes=residual.nbytes,
        from_=added_to.data_ptr(),
        **native.place(floats),
        **told,
    )
    context.run("linear", native.linear(weights, [rows], kind))
    wanted = torch.zeros_like(floats)
    wanted[places[places >= 0].long()] = (plain + residual[added_to.long()])[places >= 0]
    assert torch.equal(floats, wanted)


def looked_up(x, thresholds, values):
    """The search of native.cpp, place by place."""
    depth, heap, entries = search_tables(thresholds, values)
    found = []
    for value in x.tolist():
        at = 1
        for _ in range(depth):
            at = 2 * at + (value < heap[at].item())
        found.append(int(entries[at - 2**depth]))
    return torch.tensor(found)


@given(st.integers(0, 70), seeds)
def test_searches(count, seed):
    generator = torch.Generator().manual_seed(seed)
    thresholds = torch.randn(count, generator=generator).sort().values
    values = torch.randint(256, (count + 1,), generator=generator)
    x = torch.cat([thresholds, torch.randn(20, generator=generator)])
    assert torch.equal(looked_up(x, thresholds, values), values[torch.searchsorted(thresholds, x, right=True)])


def test_thresholds_of_a_function_that_rises_and_falls():
    def codes(x):
        return (torch.nn.functional.gelu(x.double()) * 20).round().clamp(-4, 9).long()

    thresholds, values = steps_of(codes)
    assert bool((thresholds[1:] > thresholds[:-1]).all())
    assert len(values) == len(thresholds) + 1 > 14  # down and up again
    x = torch.cat([thresholds, torch.nextafter(thresholds, torch.tensor(-100.0)), torch.randn(999)])
    assert torch.equal(values[torch.searchsorted(thresholds, x, right=True)], codes(x))


@every_level
@few
@given(st.sampled_from(["uniform", "adalog", "log2"]), bits, tables, seeds)
def test_codes_are_the_quantizers_own(level, kind, width, table, seed):
    """On levels, ties, ends and far beyond: a linear that multiplies by one tells the codes."""
    generator = torch.Generator().manual_seed(seed)
    quantizer = integer.left_quantizer(generator, kind, width, table, ())
    values = quantizer.dequantize(torch.arange(2**width)).float()
    ties = (values[1:] + values[:-1]) / 2
    x = torch.cat([values, ties, torch.tensor([0.0, -1.0, 1e30, -1e30, 1e-30]), normal(64, seed=seed).float()])[:, None]
    one = UniformQuantizer(torch.ones(1, 1), torch.zeros(1, 1), 4)
    model = integer.model_of("aten.linear.default", quantizer, one, x.shape, None, torch.ones(1, 1, dtype=torch.uint8))
    found, wanted = model.compile("native", level=level)(x), model.compile("reference")(x)
    assert torch.allclose(found, wanted, rtol=1e-6, atol=1e-6 * float(values.abs().max()))


# --- models ----------------------------------------------------------------------------------------------------------


def close(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


@every_level
def test_a_model(level, quantized, images):
    compiled = quantized.compile("native", level=level)
    found = compiled(images)
    assert close(found, quantized(images)) < 0.05  # where float noise moves values over thresholds
    assert torch.equal(found, compiled(images))
    assert sorted(compiled.prepare(4).fallbacks.values()) == [
        "aten.add.Tensor",
        "aten.mean.dim",
        *["aten.relu.default"] * 2,
    ]


@needs_kernels
def test_batches_and_threads_change_nothing(quantized, images):
    many = images.repeat(3, 1, 1, 1)[:9]
    alone = quantized.compile("native", threads=1, batch=9)
    wanted = alone(many)
    for threads in (2, 3):
        assert torch.equal(quantized.compile("native", threads=threads)(many), wanted)
    for batch in range(1, 10):  # more sizes than are kept
        assert torch.equal(alone(many[:batch]), wanted[:batch])
    assert torch.equal(alone(many.transpose(2, 3).contiguous().transpose(2, 3)), wanted)
    assert alone(many[:0]).shape == (0, 10)


@needs_kernels
def test_concurrent_calls(quantized, images):
    model = quantized.compile("native", threads=2)
    wanted = [model(images[: 1 + i % 4]) for i in range(8)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda i: model(images[: 1 + i % 4]), range(64)))
    assert all(map(torch.equal, found, wanted * 8))


@needs_kernels
@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two processors, and Linux"
)
def test_workers_that_slept_keep_off_the_callers_processor(quantized, images):
    """Where Linux would wake them, to take turns with the caller."""
    tasks = Path("/proc/self/task")
    before = set(tasks.iterdir())
    model = quantized.compile("native", threads=3, batch=len(images))
    workers = [int(task.name) for task in set(tasks.iterdir()) - before]
    time.sleep(0.2)  # longer than they spin
    wanted = model(images)
    allowed = [os.sched_getaffinity(worker) for worker in workers]
    assert len(workers) == 2
    assert allowed[0] == allowed[1]
    assert len(os.sched_getaffinity(0) - allowed[0]) == 1
    assert torch.equal(model(images), wanted)


@needs_kernels
@pytest.mark.parametrize(
    "choices",
    [
        ("w2a8", "log2"),
        *(
            pytest.param(choices, marks=pytest.mark.slow)
            for choices in (("w8a2s3", "log-sqrt2"), ("w8a8", "adalog"), ("w5a6", "uniform"))
        ),
    ],
)
def test_other_choices(calibration, fast, images, choices):
    model = calibration.quantize(replace(Config.preset(*choices), images=4, search=fast.search))
    assert close(model.compile("native")(images), model(images)) < 0.05


@pytest.mark.parametrize("tables_of", ["u8", "u16"])
@every_level
def test_tables(calibration, fast, images, tables_of, level):
    model = calibration.quantize(replace(fast, tables=tables_of))
    assert close(model.compile("native", level=level)(images), model(images)) < 0.05


@needs_kernels
def test_sites_without_a_kernel(calibration, fast, images):
    """Twin codes run as `torch` runs them."""
    model = calibration.quantize(replace(fast, post_gelu="twin"))
    compiled = model.compile("native")
    assert close(compiled(images), model(images)) < 0.05
    assert "adalog.product" in compiled.prepare(len(images)).fallbacks.values()


class Block(nn.Module):
    """What vision transformers put around their products: scales of layers, quick GELU, separate q, k and v."""

    def __init__(self):
        super().__init__()
        self.norm, self.q, self.k, self.v = nn.LayerNorm(24), nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 24)
        self.proj, self.up, self.down = nn.Linear(24, 24), nn.Linear(24, 50), nn.Linear(50, 24)
        self.gamma = nn.Parameter(torch.linspace(0.5, 1.5, 24))
        self.bias = nn.Parameter(torch.randn(2, 7, 7))

    def forward(self, x):
        y = self.norm(x)
        q, k, v = (each(y).unflatten(-1, (2, 12)).transpose(1, 2) for each in (self.q, self.k, self.v))
        a = ((q @ k.transpose(-1, -2)) / 3.5 + self.bias).softmax(-1)
        x = x + self.gamma * self.proj((a @ v).transpose(1, 2).flatten(2))
        y = self.up(x)
        return x + self.down(y * torch.sigmoid(1.702 * y))


@every_level
def test_what_is_done_in_one_step(level, fast):
    torch.manual_seed(0)
    x = torch.randn(6, 7, 24)
    model = Calibration(Block().eval(), x).quantize(fast)
    compiled = model.compile("native", level=level)
    plan = compiled.prepare(6)
    assert not plan.fallbacks
    # norm, q, k, v, attention, projection with scale and addition, codes, up with its activation, down with addition
    assert len(plan._calls) == 9
    assert close(compiled(x), model(x)) < 1e-5
    assert close(compiled(x), model.compile("torch")(x)) < 1e-5


class Normalised(nn.Module):
    """Queries and keys that stay float and have a quantizer a head, and two products that are added."""

    def __init__(self):
        super().__init__()
        self.qkv, self.one, self.other = nn.Linear(24, 72), nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 12)).permute(2, 0, 3, 1, 4)
        q, k = nn.functional.normalize(q, dim=-1), nn.functional.normalize(k, dim=-1)
        y = ((q @ k.transpose(-1, -2)) * 5).softmax(-1) @ v
        y = y.transpose(1, 2).flatten(2)
        return self.one(y) + self.other(y)


@every_level
def test_codes_of_heads(level, fast):
    torch.manual_seed(0)
    x = torch.randn(6, 7, 24)
    model = Calibration(Normalised().eval(), x).quantize(fast)
    compiled = model.compile("native", level=level)
    assert "adalog.encode" not in compiled.prepare(6).fallbacks.values()
    assert any(quantizer.scale.numel() == 2 for quantizer in model.program.quantizers.values())
    assert close(compiled(x), model(x)) < 1e-5


class Masked(nn.Module):
    """Scores that a stored mask hides, or none of them."""

    def __init__(self, hidden):
        super().__init__()
        self.qkv = nn.Linear(24, 72)
        self.register_buffer("hidden", hidden)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 12)).permute(2, 0, 3, 1, 4)
        return (0.3 * q @ k.transpose(-1, -2)).masked_fill(self.hidden, -torch.inf).softmax(-1) @ v


@needs_kernels
@pytest.mark.parametrize("hidden", [torch.zeros(7, 7), torch.ones(7, 7).triu(1)], ids=["nothing", "what is later"])
def test_hidden_scores(fast, hidden):
    torch.manual_seed(0)
    x = torch.randn(6, 7, 24)
    model = Calibration(Masked(hidden.bool()).eval(), x).quantize(fast)
    compiled = model.compile("native")
    assert ("aten.softmax.int" in compiled.prepare(6).fallbacks.values()) == bool(hidden.any())
    assert close(compiled(x), model(x)) < 1e-5


@pytest.fixture(scope="module")
def windowed(fast):
    """A Swin transformer with windows, masks and a merging, and images."""
    from timm.models import SwinTransformer

    torch.manual_seed(0)
    net = SwinTransformer(
        img_size=8, patch_size=2, embed_dim=8, depths=(2, 2), num_heads=(2, 2), window_size=2, num_classes=3
    )
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    return Calibration(net.eval(), x).quantize(fast), x


@pytest.mark.slow
@every_level
def test_windows_and_masks(level, windowed):
    model, x = windowed
    compiled = model.compile("native", level=level)
    assert close(compiled(x), model(x)) < 1e-4
    assert not {"aten.softmax.int", "adalog.product", "aten.gelu.default"} & set(compiled.prepare(4).fallbacks.values())


@pytest.fixture(scope="module")
def padded(fast):
    """A Swin transformer whose windows fit no grid: rows are put between, rolled, moved to windows, back, dropped."""
    from timm.models import SwinTransformer

    torch.manual_seed(0)
    net = SwinTransformer(
        img_size=(18, 14), patch_size=2, embed_dim=8, depths=(2, 2), num_heads=(2, 4), window_size=4, num_classes=3
    )
    x = torch.randn(3, 3, 18, 14, generator=torch.Generator().manual_seed(1))
    return Calibration(net.eval(), x).quantize(fast), x


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 3])
@every_level
def test_moves_of_rows_cost_nothing_and_change_nothing(level, batch, padded, monkeypatch):
    model, x = padded
    assert {"aten.roll.default", "aten.pad.default"} <= {node.op for node in model.program.nodes}
    compiled = model.compile("native", level=level)
    found = compiled(x[:batch])
    assert close(found, model(x[:batch])) < 1e-4
    assert set(compiled.prepare(batch).fallbacks.values()) == {"aten.mean.dim"}
    monkeypatch.setattr(Plan, "_rows_behind", lambda self, name, columns: plan._Rows(name))
    moved = model.compile("native", level=level)
    assert "aten.roll.default" in moved.prepare(batch).fallbacks.values()
    assert torch.equal(found, moved(x[:batch]))
    assert torch.equal(found, compiled(x[:batch]))


class Merging(nn.Module):
    """Rows that are cut and put together by fours, and rolled; a norm that is added to what it is of; two outputs."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.merged, self.down = (
            nn.Linear(6, 8),
            nn.LayerNorm(8),
            nn.LayerNorm(32),
            nn.Linear(32, 8),
        )

    def forward(self, x):
        x = self.up(x)
        x = x + self.norm(x).roll(1, 1)
        y = torch.cat([x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)], -1)
        z = self.down(self.merged(y))
        return z.flip(1)[:, 1:], z.roll(2, 2)


@every_level
def test_rows_that_are_read_in_parts(level, fast):
    torch.manual_seed(0)
    x = torch.randn(5, 6, 4, 6)
    model = Calibration(Merging().eval(), x).quantize(fast)
    compiled = model.compile("native", level=level)
    assert set(compiled.prepare(5).fallbacks.values()) == {"aten.flip.default", "aten.roll.default"}
    assert len(compiled.prepare(5)._calls) == 7  # codes, up, norm with its addition, norm, down, and those two
    for found, wanted in zip(compiled(x), model(x), strict=True):
        assert close(found, wanted) < 1e-5


@needs_kernels
def test_codes_and_traces(quantized, images):
    compiled, torch_model = quantized.compile("native"), quantized.compile("torch")
    codes, others = compiled.codes(images), torch_model.codes(images)
    assert codes.keys() == others.keys()
    assert all(float((codes[name] == others[name]).double().mean()) > 0.9 for name in codes)
    trace = compiled.trace("blocks.0.mlp.fc2", images)
    assert torch.equal(trace.accumulators[0], torch_model.trace("blocks.0.mlp.fc2", images).accumulators[0])


@needs_kernels
def test_a_loaded_model_gives_the_same(quantized, images):
    loaded = deserialise(serialise(quantized))
    assert torch.equal(loaded.compile("native")(images), quantized.compile("native")(images))


# --- refusals --------------------------------------------------------------------------------------------------------


@needs_kernels
def test_refusals(quantized):
    for choices, match in (
        ({"level": "neon"}, "level = 'neon' is none of scalar"),
        ({"threads": 0}, "threads = 0 is outside 1 to 1024"),
        ({"batch": 0}, "batch = 0: only 'native' prepares"),
    ):
        with pytest.raises(ValueError, match=match):
            quantized.compile("native", **choices)
    with pytest.raises(ArtifactError, match=r"'native' runs in float32 on the CPU; the model is in torch\.float64"):
        deserialise(serialise(quantized)).double().compile("native")


@pytest.mark.parametrize(
    ("content", "match"), [(None, "is no library of kernels"), (b"\x7fELF", "is no library of kernels")]
)
def test_no_library(quantized, monkeypatch, tmp_path, content, match):
    path = tmp_path / "_native.so"
    if content:
        path.write_bytes(content)
    monkeypatch.setenv("ADALOG_NATIVE", str(path))
    library.load.cache_clear()
    try:
        assert library.levels() == []
        assert match in library.why()
        with pytest.raises(ValueError, match="executor = 'native' does not run here"):
            quantized.compile("native")
    finally:
        library.load.cache_clear()


@needs_kernels
def test_kernels_refuse_sizes_that_do_not_fit():
    """Nothing is written where a structure says more than its memory holds."""
    context = native.Context(1)
    site = _site(5, 70)
    weights = context.weights(site)
    rows = torch.zeros(4, 70, dtype=torch.uint8)
    sums = torch.zeros(4, 5, dtype=torch.int32)
    good = native.linear(weights, [rows], native.Output(kind=native.SUMS, **native.place(sums)))
    context.run("linear", good)
    for field, value in (("rows", 5), ("rows", -1), ("rows", 2**62), ("row", 69), ("row", 2**62), ("bytes", 279)):
        kept = getattr(good, field)
        setattr(good, field, value)
        with pytest.raises(ValueError, match="sizes of a kernel do not fit"):
            context.run("linear", good)
        setattr(good, field, kept)
    for field, value in (("bytes", 79), ("row", 4), ("kind", 7), ("kind", native.CODES)):
        kept = getattr(good.out, field)
        setattr(good.out, field, value)
        with pytest.raises(ValueError, match="sizes of a kernel do not fit"):
            context.run("linear", good)
        setattr(good.out, field, kept)
    for places, count in (([0, 1, 2, 4], 4), ([0, 1, 2, -2], 4), ([0, 1, 2, 2**31 - 1], 4), ([0, 1, 2, 3], 3)):
        kept = torch.tensor(places, dtype=torch.int32)
        good.out.place, good.out.places = kept.data_ptr(), count
        with pytest.raises(ValueError, match="sizes of a kernel do not fit"):
            context.run("linear", good)


def _site(columns, terms, width=4):
    right = UniformQuantizer(torch.ones(columns, 1), torch.full((columns, 1), 3.0), width)
    left = UniformQuantizer(torch.tensor(1.0), torch.tensor(2.0), width)
    weight = torch.ones(columns, terms, dtype=torch.uint8)
    model = integer.model_of("aten.linear.default", left, right, (1, terms), None, weight)
    return reference.plan(model.program, model.example)[0]


# --- long ------------------------------------------------------------------------------------------------------------

FUZZ = """
import ctypes, random, sys
import torch
from adalog import library
from adalog.runtime import native

random.seed(int(sys.argv[1]))
torch.manual_seed(int(sys.argv[1]))
torch.set_num_threads(1)
structures = {"linear": native.Linear, "product": native.Matrices, "attention": native.Attention,
              "norm": native.Norm, "encode": native.Encode, "patches": native.Patches}

def memory(count):
    kept.append((ctypes.c_ubyte * count)(*bytes(random.randrange(256) for _ in range(min(count, 64)))))
    return ctypes.addressof(kept[-1])

def fill(structure, size):
    for name, kind in structure._fields_:
        if kind is ctypes.c_void_p:
            if name in ("more", "residual", "bias", "place", "from_") and random.random() < 0.6:
                continue
            setattr(structure, name, memory(size))
            if name == "zero" and random.random() < 0.9:
                ctypes.memset(structure.zero, 0, size)
            if name in ("place", "from_", "bias_of"):
                most = random.choice([2, 2, 2, 40])
                rows = [random.randrange(-1 if name == "place" else 0, most) for _ in range(size // 4)]
                ctypes.memmove(getattr(structure, name), (ctypes.c_int32 * len(rows))(*rows), size)
        elif isinstance(getattr(structure, name), ctypes.Structure):
            fill(getattr(structure, name), size)
        elif isinstance(getattr(structure, name), ctypes.Array):
            for i in range(2):
                getattr(structure, name)[i] = random.choice([0, 1, 1, 2, 3])
        elif name in ("bytes", "residual_bytes", "bias_bytes", "out_bytes"):
            setattr(structure, name, size)
        elif name in ("parameters", "length", "places", "bias_batches"):
            setattr(structure, name, size // 4)
        elif name == "kind":
            structure.kind = random.randrange(-1, 5)
        elif name == "depth":
            structure.depth = random.choice([3, 4, 5, 6])
        elif name == "planes":
            structure.planes = random.choice([1, 2])
        elif name == "bits":
            structure.bits = random.randrange(1, 10)
        elif name == "transposed":
            structure.transposed = random.randrange(2)
        elif kind is ctypes.c_float:
            structure.epsilon = 1e-6
        else:
            setattr(structure, name, random.choice([0, 1, 2, 3, 7, 16, 17, 30, 64, 65, -1, 2**40, 2**62]
                                                   if random.random() < 0.15 else [1, 2, 3, 5, 16, 17, 24]))

done = 0
for level in library.levels():
    context = native.Context(2, level)
    for _ in range(int(sys.argv[2])):
        kept = []
        name = random.choice(list(structures))
        structure, size = structures[name](), random.choice([256, 1024, 8192, 65536])
        fill(structure, size)
        handle = None
        if name == "linear":
            columns, terms, width = random.randint(1, 90), random.randint(1, 200), random.randint(2, 8)
            codes = (ctypes.c_ubyte * (columns * terms))()
            zero = (ctypes.c_int32 * columns)(*(random.randrange(2**width) for _ in range(columns)))
            handle = context._library.adalog_weights(codes, zero, columns, terms, width, random.randrange(256))
            structure.weights = handle
            structure.row = random.choice([terms, terms, terms + 3, terms - 1])
            structure.out.row = random.choice([columns, columns, columns + 1])
        done += context.bind(name, structure)() == 0
        if handle:
            context._library.adalog_weights_free(handle)
    del context
print(done)
"""


MUTANTS = """
import sys
import torch
import test_fuzz

torch.set_num_threads(1)
print(test_fuzz.hunt(test_fuzz.make_bases(), range(int(sys.argv[1])))["runs"])
"""


@pytest.fixture(scope="module")
def under_sanitizers(tmp_path_factory):
    """Runs a script, in a process whose library has the address and undefined-behaviour sanitizers: what it prints.

    Compiling all levels with both takes minutes.
    """
    tmp_path = tmp_path_factory.mktemp("sanitizers")
    compiler = shutil.which("g++")
    preloaded = []
    for name in ("libasan.so", "libstdc++.so"):  # the second so that the first finds what throws exceptions
        asked = [compiler, f"-print-file-name={name}"]
        preloaded.append(compiler and subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip())
    if not all(path and "/" in path for path in preloaded):
        pytest.skip("needs g++ and its sanitizers")
    built = tmp_path / "_native.so"
    flags = [
        "-O0",  # compiling is what takes long
        "-g",
        "-std=c++17",
        "-shared",
        "-fPIC",
        "-pthread",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover",
    ]
    subprocess.run([compiler, *flags, *map(str, SOURCES), "-o", str(built)], check=True)
    environment = {
        "ADALOG_NATIVE": str(built),
        "LD_PRELOAD": " ".join(preloaded),
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": os.pathsep.join([str(Path(library.__file__).parents[1]), str(Path(__file__).parent)]),
        "OMP_NUM_THREADS": "1",
    }

    def run(script, *arguments):
        file = tmp_path / "script.py"
        file.write_text(script)
        command = [sys.executable, "-W", "error", str(file), *map(str, arguments)]
        found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stderr[-3000:]
        return found.stdout

    return run


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize("seed", range(2))
def test_kernels_stay_within_their_memory(under_sanitizers, seed):
    """Structures of random sizes: refused, or done in bounds."""
    assert int(under_sanitizers(FUZZ, seed, 60)) > 3  # not all were refused


@pytest.mark.slow
@needs_kernels
def test_corrupt_artifacts_stay_within_their_memory(under_sanitizers):
    """Whatever bytes an artifact has, kernels do not leave what is theirs."""
    assert int(under_sanitizers(MUTANTS, 1000)) > 50


@pytest.mark.slow
@needs_kernels
def test_memory_stays_as_it_is(quantized, images):
    """Ten thousand calls, of several batch sizes."""
    model = quantized.compile("native", threads=2)

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    for batch in (1, 2, 4):
        for _ in range(200):
            model(images[:batch])
    before = resident()
    for i in range(10_000):
        model(images[: (1, 2, 4)[i % 3]])
    assert resident() - before < 2**23
