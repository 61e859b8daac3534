"""Models on the compiled kernels, at every level that runs here, beside the same models in other executors."""

import functools
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from adalog import ArtifactError, Calibration, library
from adalog.runtime.native import flow, recognise
from adalog.runtime.native.steps import Rows
from stored import deserialise, serialise
from toys import Toy, values
from whole_numbers import PORTABLE, needs_kernels

LEVELS = library.levels()
# The kernels are tested at every level in test_native_kernels.py; a whole model is quickly tested at the best one.
every_level = pytest.mark.parametrize(
    "level",
    [*(pytest.param(level, marks=pytest.mark.slow) for level in LEVELS[:-1]), *LEVELS[-1:]]
    or [pytest.param("none", marks=needs_kernels)],
)


def close(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


@every_level
def test_a_model(level, quantized, images):
    compiled = quantized.compile("native", level=level)
    found = compiled(images)
    assert close(found, quantized(images)) < 0.05  # where float noise moves values over thresholds
    assert torch.equal(found, compiled(images))
    assert sorted(compiled.prepare(4).fallbacks.values()) == ["aten.add.Tensor", "aten.mean.dim"]


@pytest.mark.slow
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
@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two processors, and Linux"
)
def test_workers_that_slept_keep_off_the_callers_processor(quantized, images):
    """Where Linux would wake them, to take turns with the caller.

    A call tells sleeping workers which processors they may use. On a busy machine a worker may still wait for its turn
    to fall asleep, and a call then tells nothing: so the test calls until one did.
    """
    tasks = Path("/proc/self/task")
    before = set(tasks.iterdir())
    model = quantized.compile("native", threads=3, batch=len(images))
    workers = [int(task.name) for task in set(tasks.iterdir()) - before]
    wanted = model(images)
    for _ in range(50):
        time.sleep(0.02)  # longer than they spin
        assert torch.equal(model(images), wanted)
        allowed = [os.sched_getaffinity(worker) for worker in workers]
        if all(len(os.sched_getaffinity(0) - of_worker) == 1 for of_worker in allowed):
            break
    assert len(workers) == 2
    assert allowed[0] == allowed[1]
    assert len(os.sched_getaffinity(0) - allowed[0]) == 1
    assert torch.equal(model(images), wanted)


@pytest.mark.parametrize("tables_of", ["u8", "u16"])
@every_level
def test_tables(calibration, fast, images, tables_of, level):
    model = calibration.quantize(replace(fast, tables=tables_of))
    assert close(model.compile("native", level=level)(images), model(images)) < 0.05


@needs_kernels
def test_sites_without_a_kernel(twin, images):
    """Twin codes run as `torch` runs them."""
    compiled = twin.compile("native")
    assert close(compiled(images), twin(images)) < 0.05
    assert "adalog.product" in compiled.prepare(len(images)).fallbacks.values()


@pytest.fixture(scope="module")
def quantized_once(fast):
    """Quantize the model of a maker on its images, once for all levels; returns the quantized model and the images."""

    @functools.cache
    def quantize(make, *choices):
        torch.manual_seed(0)
        model, x = make(*choices)
        return Calibration(model.eval(), x).quantize(fast), x

    return quantize


def transformer_block(m, x):
    """What vision transformers put around their products: scales of layers, quick GELU, separate q, k and v."""
    y = m.norm(x)
    q, k, v = (each(y).unflatten(-1, (2, 12)).transpose(1, 2) for each in (m.q, m.k, m.v))
    a = ((q @ k.transpose(-1, -2)) / 3.5 + m.bias).softmax(-1)
    x = x + m.gamma * m.proj((a @ v).transpose(1, 2).flatten(2))
    y = m.up(x)
    return x + m.down(y * torch.sigmoid(1.702 * y))


def block():
    x = torch.randn(6, 7, 24)
    parts = {"norm": nn.LayerNorm(24), **{name: nn.Linear(24, 24) for name in ("q", "k", "v", "proj")}}
    parts |= {"up": nn.Linear(24, 50), "down": nn.Linear(50, 24), "bias": nn.Parameter(torch.randn(2, 7, 7))}
    parts |= {"gamma": nn.Parameter(torch.linspace(0.5, 1.5, 24))}
    return Toy(transformer_block, **parts), x


def normalised_heads(m, x):
    """Queries and keys that stay float and have a quantizer a head, and two products that are added."""
    q, k, v = m.qkv(x).unflatten(-1, (3, 2, 12)).permute(2, 0, 3, 1, 4)
    q, k = nn.functional.normalize(q, dim=-1), nn.functional.normalize(k, dim=-1)
    y = ((q @ k.transpose(-1, -2)) * 5).softmax(-1) @ v
    y = y.transpose(1, 2).flatten(2)
    return m.one(y) + m.other(y)


def normalised():
    parts = {"qkv": nn.Linear(24, 72), "one": nn.Linear(24, 24), "other": nn.Linear(24, 24)}
    return Toy(normalised_heads, **parts), torch.randn(6, 7, 24)


def of_length_one():
    """Vectors, with a zero one among them, divided by their length; also by the larger of it and a number."""

    def run(m, x):
        one, other, third = (F.normalize(x, dim=-1, eps=epsilon) for epsilon in (1e-12, 1e-3, 1e-24))
        return m.one(one) + m.other(other) + m.third(third)

    x = torch.randn(6, 7, 24)
    x[:, 2] = 0
    return Toy(run, **{name: nn.Linear(24, 24) for name in ("one", "other", "third")}), x


class Masked(nn.Module):
    """Scores that a stored mask hides, or none of them."""

    def __init__(self, hidden):
        super().__init__()
        self.qkv = nn.Linear(24, 72)
        self.register_buffer("hidden", hidden)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 12)).permute(2, 0, 3, 1, 4)
        return (0.3 * q @ k.transpose(-1, -2)).masked_fill(self.hidden, -torch.inf).softmax(-1) @ v


def hidden():
    return Masked(torch.ones(7, 7).triu(1).bool()), torch.randn(6, 7, 24)


def merged_rows(m, x):
    """Rows that are cut and put together by fours, and rolled; a norm that is added to what it is of; two outputs."""
    x = m.up(x)
    x = x + m.norm(x).roll(1, 1)
    y = torch.cat([x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)], -1)
    z = m.down(m.merged(y))
    return z.flip(1)[:, 1:], z.roll(2, 2)


def merging():
    parts = {"up": nn.Linear(6, 8), "norm": nn.LayerNorm(8), "merged": nn.LayerNorm(32), "down": nn.Linear(32, 8)}
    return Toy(merged_rows, **parts), torch.randn(5, 6, 4, 6)


def rows_after_padding():
    """Behind one norm the rows become codes, behind the other one they stay numbers."""

    def run(m, x):
        return m.fc(F.pad(m.norm(x), (0, 0, 1, 2)) + m.row), F.pad(m.other(x), (0, 0, 2, 0)).roll(1, 1) + m.row

    modules = {"norm": nn.LayerNorm(8), "other": nn.LayerNorm(8), "fc": nn.Linear(8, 3)}
    x = torch.randn(5, 6, 8)
    return Toy(run, **modules, row=nn.Parameter(torch.randn(8))), x


def about_zero():
    """A norm without a bias, whose fold is subtracted behind it, and one that is a result."""
    modules = {
        "norm": nn.RMSNorm(24),
        "other": nn.RMSNorm(24, eps=1e-3),
        "up": nn.Linear(24, 50),
        "down": nn.Linear(50, 24),
    }
    nn.init.normal_(modules["norm"].weight, 1, 0.5)
    return Toy(lambda m, x: m.other(x + m.down(F.gelu(m.up(m.norm(x))))), **modules), torch.randn(6, 7, 24) + 0.2


def linear_attention(m, x):
    """Attention without softmax: values are summed by keys first, so that a left operand lies across."""
    q, k, v = m.qkv(x).unflatten(-1, (3, 2, 12)).permute(2, 0, 3, 1, 4)
    return (q.relu() @ (k.relu().transpose(-1, -2) @ v)).mean(1)


def linear():
    return Toy(linear_attention, qkv=nn.Linear(24, 72)), torch.randn(6, 7, 24)


def inverted_bottleneck(m, x):
    """A block of a mobile network, with a padded offset in front: convolutions of all channels and of each alone."""
    x = m.next(F.gelu(m.stem(x)))
    return F.silu(m.down(F.gelu(m.each(F.gelu(m.up(x))))) + x).mean((2, 3))


class Bare(nn.Module):
    """Products of two computed operands, without a softmax, or with keys that several of the left operands share."""

    def __init__(self, shared):
        super().__init__()
        self.shared, self.q, self.kv = shared, nn.Linear(24, 24), nn.Linear(24, 48)

    def forward(self, x):
        q, kv = self.q(x).unflatten(-1, (2, 12)).transpose(-2, -3), self.kv(x).unflatten(-1, (2, 24)).transpose(-2, -3)
        k, v = (kv[:, :1] if self.shared else kv).chunk(2, -1)
        scores = q @ k.transpose(-1, -2)
        return scores.softmax(-1) @ v if self.shared else scores


def convolutions():
    parts = {"stem": nn.Conv2d(3, 8, 3, 2, 1), "next": nn.Conv2d(8, 12, 3, 2, 1), "up": nn.Conv2d(12, 24, 1)}
    parts |= {"each": nn.Conv2d(24, 24, 3, 1, 1, groups=24), "down": nn.Conv2d(24, 12, 1)}
    return Toy(inverted_bottleneck, **parts), torch.randn(6, 3, 16, 16)


# For each model: its maker, the operations without a kernel, the number of calls, and the largest relative error.
MODELS = {
    # norm, q, k, v, attention, projection with scale and addition, codes, up with its activation, down with addition
    "block": (block, [], 9, 1e-5),
    "heads": (normalised, [], 12, 1e-5),
    "vectors of length one": (
        of_length_one,
        ["clamp_min.default", "div.Tensor", "linalg_vector_norm.default"],
        14,
        1e-5,
    ),
    "rows read in parts": (merging, ["flip.default", "roll.default"], 7, 1e-5),  # and codes, up, two norms, down
    "norms about zero": (about_zero, [], 4, 1e-5),  # two norms and two linears
    "rows after padding": (rows_after_padding, [], 3, 1e-5),  # two norms and a linear
    "nothing hidden": (lambda: (Masked(torch.zeros(7, 7).bool()), torch.randn(6, 7, 24)), [], 3, 1e-5),
    "hidden": (hidden, ["masked_fill.Scalar", "softmax.int"], 7, 1e-5),
    # a value may lie at the edge of two codes
    "one token": (lambda: (Masked(torch.zeros(1, 1).bool()), torch.randn(6, 1, 24)), [], 3, 0.02),
    "one column": (lambda: (Bare(shared=False), torch.randn(6, 1, 24)), [], 4, 0.02),
    "shared keys": (lambda: (Bare(shared=True), torch.randn(6, 3, 7, 24)), [], 7, 0.02),
    "linear attention": (linear, ["mean.dim"], 13, 0.02),
    "convolutions": (convolutions, ["add.Tensor", "mean.dim"], 12, 0.02),
}


@every_level
@pytest.mark.parametrize("name", MODELS)
def test_models(level, name, quantized_once):
    make, operations, calls, most = MODELS[name]
    model, x = quantized_once(make)
    compiled = model.compile("native", level=level)
    plan = compiled.prepare(6)
    assert sorted({*plan.fallbacks.values()}) == [f"aten.{operation}" for operation in operations]
    assert len(plan.calls) == calls
    for inputs in (x, x[:4].flip(0) * 0.9):
        for found, wanted in zip(values(compiled(inputs)), values(model(inputs)), strict=True):
            assert close(found, wanted) < most


@needs_kernels
def test_codes_of_heads_and_a_block_in_other_executors(quantized_once):
    model, _ = quantized_once(normalised)
    assert any(quantizer.scale.numel() == 2 for quantizer in model.program.quantizers.values())
    model, x = quantized_once(block)
    assert close(model.compile("native")(x), model.compile("torch")(x)) < 1e-5


@pytest.fixture(scope="module")
def padded(fast):
    """A quantized Swin transformer with masks and a merging, and images.

    Its windows fit no grid: rows are put between, rolled, moved to windows, back, dropped.
    """
    from timm.models import SwinTransformer

    torch.manual_seed(0)
    sizes = {"img_size": (18, 14), "patch_size": 2, "embed_dim": 8, "window_size": 4, "num_classes": 3}
    net = SwinTransformer(depths=(2, 2), num_heads=(2, 4), **sizes)
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
    for executor in (compiled, *map(model.compile, PORTABLE)):
        assert close(executor(x[:batch]), model(x[:batch])) < 1e-4
    assert set(compiled.prepare(batch).fallbacks.values()) == {"aten.mean.dim"}
    for module in (flow, recognise):
        monkeypatch.setattr(module, "rows_behind", lambda flow, name, columns: Rows(name))
    moved = model.compile("native", level=level)
    assert "aten.roll.default" in moved.prepare(batch).fallbacks.values()
    assert torch.equal(found, moved(x[:batch]))
    assert torch.equal(found, compiled(x[:batch]))


@needs_kernels
def test_codes_and_traces(quantized, images):
    compiled, torch_model = quantized.compile("native"), quantized.compile("torch")
    codes, others = compiled.codes(images), torch_model.codes(images)
    assert codes.keys() == others.keys()
    assert all(float((codes[name] == others[name]).double().mean()) > 0.9 for name in codes)
    trace = compiled.trace("blocks.0.mlp.fc2", images)
    assert torch.equal(trace.accumulators[0], torch_model.trace("blocks.0.mlp.fc2", images).accumulators[0])


# --- refusals --------------------------------------------------------------------------------------------------------


@needs_kernels
def test_refusals(quantized):
    for choices, match in (
        ({"level": "neon"}, "level = 'neon' does not run on this machine: choose one of scalar"),
        ({"threads": 0}, "threads = 0 is not a whole number from 1 to 1024"),
        ({"batch": 0}, "batch = 0: only 'native' prepares"),
    ):
        with pytest.raises(ValueError, match=match):
            quantized.compile("native", **choices)
    with pytest.raises(ArtifactError, match=r"'native' runs in float32 on the CPU, but the model is in torch\.float64"):
        deserialise(serialise(quantized)).double().compile("native")


@pytest.mark.parametrize("content", [None, b"\x7fELF"])
def test_no_library(quantized, monkeypatch, tmp_path, reloaded, content):
    path = tmp_path / "_native.so"
    if content:
        path.write_bytes(content)
    monkeypatch.setenv("ADALOG_NATIVE", str(path))
    assert library.levels() == []
    assert "is not a library of kernels" in library.why()
    with pytest.raises(ValueError, match="executor = 'native' does not run here"):
        quantized.compile("native")


# --- long ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@needs_kernels
def test_memory_stays_as_it_is(quantized, images):
    """Five thousand calls, of several batch sizes, may leave less than a kilobyte each."""
    model = quantized.compile("native", threads=2)

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    for batch in (1, 2, 4):
        for _ in range(200):
            model(images[:batch])
    before = resident()
    for i in range(5_000):
        model(images[: (1, 2, 4)[i % 3]])
    assert resident() - before < 2**22


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


def zeros_around(m, x):
    return F.pad(m.norm(x), (0, 0, 1, 1))


CASES = {
    "sums in each other's place": (sums, 8, 8),
    "sums that are read later": (sums_read_later, 8, 8),
    "a sum that is larger than the rows": (lambda m, x: m.fc(m.norm(x).unsqueeze(-1) + m.row), 8, 8),
    "zeros, then three and two heads": (attention, 24, 8),
    "zeros, then rows in halves": (lambda m, x: m.fc(F.pad(m.a(x), (0, 0, 1, 1)).unflatten(-1, (2, 4))), 8, 4),
    "zeros, then a norm's rows in halves": (lambda m, x: m.fc(zeros_around(m, x).unflatten(-1, (2, 4))), 8, 4),
    "zeros, then all rows as one": (lambda m, x: m.fc(zeros_around(m, x).flatten(1)), 8, 64),
    "zeros, then two rows as one": (lambda m, x: m.fc(zeros_around(m, x).unflatten(1, (4, 2)).flatten(2)), 8, 16),
}


def check_tokens(fast, function, wide=8, read=8):
    """Compare a toy on the kernels with fake quantization, and return the bytes that its steps share."""
    torch.manual_seed(0)
    model = Toy(function, norm=nn.LayerNorm(8), a=nn.Linear(8, wide), fc=nn.Linear(read, 3))
    model.row = nn.Parameter(torch.randn(8))
    nn.init.normal_(model.norm.weight)
    nn.init.normal_(model.norm.bias)
    quantized = Calibration(model.eval(), TOKENS).quantize(replace(fast, images=8))
    compiled = quantized.compile("native")
    for wanted, found in zip(values(quantized(TOKENS)), values(compiled(TOKENS)), strict=True):
        assert float((found - wanted).abs().max()) < 1e-5 * float(wanted.abs().max())
    return compiled.prepare(len(TOKENS)).nbytes


@needs_kernels
@pytest.mark.parametrize("case", CASES)
def test_native_gives_what_fake_quantization_gives(case, fast):
    check_tokens(fast, *CASES[case])


@needs_kernels
def test_a_sum_lies_where_what_it_adds_to_lay(fast):
    """Two blocks take no more memory than one, and a sum that the model puts out stays what it is."""
    assert check_tokens(fast, sums) == check_tokens(fast, lambda m, x: m.fc(x + m.a(m.norm(x))))
    check_tokens(fast, lambda m, x: (first := x + m.a(x), first + m.a(first)))
