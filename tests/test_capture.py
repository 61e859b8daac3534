"""A captured program is the model, at every batch size and in canonical form; or a refusal says why there is none."""

import copy
import re
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import zoo
from adalog import CaptureError
from adalog.graph.canonical import UNFOLDED
from adalog.graph.capture import capture
from adalog.graph.operations import OPERATIONS, PRODUCTS
from adalog.graph.program import ModelOutput
from toys import IMAGES, TOKENS, Attention, Toy, assert_same, check_capture, model_of, ops

# --- equal to the model ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", zoo.NAMES)
def test_equals_eager(name):
    """Any model that can be captured can be checked, so no whole file is refused."""
    model, program = zoo.captured(name)
    for batch in (1, 2, 7):
        assert_same(model, program, IMAGES[:batch])
        program.check([torch.empty(batch, 3, 32, 32)])


@pytest.mark.parametrize("name", zoo.NAMES)
def test_canonical_form(name):
    _, program = zoo.captured(name)
    used = {node.op for node in program.nodes}
    assert used <= OPERATIONS
    assert not used & {"aten.dropout.default", "aten.clone.default", "aten.contiguous.default", "aten.view.default"}
    calls = [repr((node.op, node.args, dict(node.kwargs))) for node in program.nodes]
    assert len(calls) == len(set(calls))  # equal values are computed once
    read = {name for node in program.nodes for name in node.refs()}
    assert set(program.tensors) <= read  # nothing is kept that nothing reads
    names = [*program.inputs, *program.tensors, *(node.name for node in program.nodes)]
    assert len(names) == len(set(names))


def test_nothing_of_the_model_changes():
    model = zoo.make("timm_vit").train()
    model.blocks[0].eval()
    modes = {name: module.training for name, module in model.named_modules()}
    before = copy.deepcopy(model.state_dict())
    capture(model, IMAGES)
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_tensors_are_copies():
    model = Toy(lambda m, x: m.fc(x.mean((2, 3))), fc=nn.Linear(3, 4)).eval()
    program = capture(model, IMAGES)
    expected = program.run((IMAGES,))
    with torch.no_grad():
        model.fc.weight.zero_()
    assert torch.equal(program.run((IMAGES,)), expected)


FORWARDS = {
    "two inputs": (lambda self, left, right: left @ right.mT, (torch.randn(3, 4, 5), torch.randn(3, 6, 5)), {}),
    "arguments that are no tensors": (
        lambda self, x, scale=1.0, mask=None, flip=False: (x * scale if mask is None else x).flip(3 if flip else 2),
        (IMAGES, 0.5, None, True),
        {},
    ),
    "more inputs behind a star": (
        lambda self, x, *more: self.fc(x + sum(more)),
        (TOKENS, TOKENS + 1, TOKENS * 2),
        {"fc": nn.Linear(8, 3)},
    ),
    "stored tensors with the names of inputs": (
        lambda m, x, weight, bias: F.linear(x, m.matrix * m.gain[:, None], m.gain * 2) * weight + bias,
        (torch.randn(2, 4), torch.randn(2, 5), torch.randn(2, 5)),
        {"matrix": nn.Parameter(torch.randn(5, 4)), "gain": nn.Parameter(torch.rand(5))},
    ),
    "a write to the input": (lambda self, x: self.fc(x.sub_(0.5)), (TOKENS,), {"fc": nn.Linear(8, 3)}),
    "infinite outputs": (
        lambda m, x: x[..., :3] + m.mask,
        (TOKENS,),
        {"mask": nn.Buffer(torch.tensor([0.0, -torch.inf, 0.0]))},
    ),
    "a number divided by whole numbers": (
        lambda m, x: m.rows(torch.div(100, x, rounding_mode="trunc")),
        (torch.arange(1, 5),),
        {"rows": nn.Embedding(101, 8)},
    ),
}


@torch.no_grad()
@pytest.mark.parametrize("name", FORWARDS)
def test_inputs_of_any_kind(name):
    forward, inputs, parts = FORWARDS[name]
    model, before = model_of(forward, **parts), copy.deepcopy(inputs)
    program = capture(model, inputs)
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    torch.testing.assert_close(inputs, before, rtol=0, atol=0)
    torch.testing.assert_close(program.run(tensors), model(*before), rtol=1e-6, atol=1e-6)
    with pytest.raises(TypeError, match=f"takes {len(tensors)} inputs, got {len(tensors) - 1}"):
        program.run(tensors[1:])


# --- outputs ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_named_outputs_keep_their_names():
    model, program = zoo.captured("hf_vit")
    output = program.run((IMAGES,))
    assert isinstance(output, ModelOutput)
    assert list(output) == list(model(IMAGES)) == ["logits"]
    assert output.logits is output["logits"]
    with pytest.raises(AttributeError, match="loss"):
        _ = output.loss


@pytest.mark.parametrize(
    "structure",
    [
        lambda a, b: (a, b),
        lambda a, b: [a, b],
        lambda a, b: {"a": a, "b": b},
        lambda a, b: {"both": (a, [b]), "again": b},
        lambda a, b: ((a,),),
    ],
)
def test_output_structure_is_kept(structure):
    model = Toy(lambda m, x: structure(x.mean((2, 3)), x.amax((2, 3))))
    program = check_capture(model)
    expected, actual = model(IMAGES), program.run((IMAGES,))
    assert type(actual) is type(expected)
    assert str(torch.utils._pytree.tree_structure(actual)) == str(torch.utils._pytree.tree_structure(expected))


@dataclass
class Maps:
    """An output of two fields."""

    fine: torch.Tensor
    coarse: torch.Tensor
    mask: torch.Tensor | None = None


def test_a_dataclass_that_torch_knows_keeps_its_names():
    torch.export.register_dataclass(Maps)
    model = Toy(lambda m, x: (Maps(x.mean(1), x.amax((2, 3))), {"x": [x]}))
    maps, rest = capture(model, IMAGES).run((IMAGES,))
    assert torch.equal(maps.fine, IMAGES.mean(1))
    assert list(maps) == ["fine", "coarse"]
    assert torch.equal(rest["x"][0], IMAGES)


# --- canonical form --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_is_folded(bias, affine):
    norm = nn.BatchNorm2d(8, affine=affine)
    model = Toy(lambda m, x: m.norm(m.conv(x)).relu(), conv=nn.Conv2d(3, 8, 3, bias=bias), norm=norm)
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    if affine:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    program = check_capture(model)
    assert ops(program) == ["conv2d", "relu"]
    assert not any("running" in name for name in program.tensors)


@pytest.mark.parametrize(
    ("function", "count"),
    [
        (lambda m, x: m.norm(m.conv(x)) + m.conv(x), 1),
        (lambda m, x: (m.norm(m.conv(x)), m.conv(x)), 1),
        (lambda m, x: (m.norm(m.conv(x)), m.conv.weight), 1),
        (lambda m, x: m.of_these(m.conv(x)), 1),
        (lambda m, x: F.batch_norm(m.conv(x), m.norm.running_mean * 2, m.norm.running_var.exp()), 1),
        (lambda m, x: m.norm(m.conv(x)) + m.second(m.conv(-x)), 2),
    ],
    ids=["read twice", "an output", "kernel an output", "statistics of these images", "computed", "kernel used twice"],
)
def test_batch_norms_that_stay(function, count):
    norms = {"norm": nn.BatchNorm2d(8), "second": nn.BatchNorm2d(8)}
    norms["of_these"] = nn.BatchNorm2d(8, track_running_stats=False)
    norms["norm"].running_var.uniform_(0.5, 2)
    assert ops(check_capture(Toy(function, conv=nn.Conv2d(3, 8, 3), **norms))).count("batch_norm") == count


@pytest.mark.filterwarnings("ignore:Using padding=.same. with even kernel lengths")  # of torch, about such a model
@pytest.mark.parametrize("kernel", [3, 4])
@pytest.mark.parametrize(("padding", "dilation"), [("same", 1), ("same", 3), ("valid", 2)])
def test_padding_by_name_becomes_numbers(kernel, padding, dilation):
    conv = nn.Conv2d(3, 6, kernel, padding=padding, dilation=dilation, groups=3)
    program = check_capture(Toy(lambda m, x: m.conv(x), conv=conv))
    assert [op for op in ops(program) if op != "constant_pad_nd"] == ["conv2d"]
    assert all(isinstance(size, int) for size in program.nodes[-1].args[4])


def read_before_and_after(model, x):
    x = model.conv(x)
    kept, cloned = x + 0, x.clone()
    return kept, cloned, model.relu(x) + x  # twice the result: x has become it


def views_written(model, x):
    mask = x.new_zeros((1, 1, 30, 30))
    for count, rows in enumerate((slice(0, -8), slice(-8, None))):
        mask[:, :, rows] = count - 2
    x = model.conv(x)
    x[:, 2:5, 0] = 7
    x[:, 0].mul_(2)
    return x, x + mask


def read_after_writes(model, x):
    """A view of a whole that is written, a sibling of a written view, and a result that is written again."""
    whole, parts, again = model.conv(x), model.conv(-x), model.conv(2 * x)
    rows = whole.flatten(2)
    whole.mul_(3)
    first, sibling = parts[:, :4], parts.flatten(2)
    first += 1
    once = again.relu_()
    again.add_(1)
    return rows, sibling, parts[:, 2:6], once


@pytest.mark.parametrize("function", [read_before_and_after, views_written, read_after_writes])
def test_in_place_operations_become_values(function):
    check_capture(Toy(function, conv=nn.Conv2d(3, 8, 3), relu=nn.ReLU(inplace=True)))


def shared(model, x):
    return model.q(x.mean(1).flatten(1)), model.k(x.mean(1).flatten(1)), model.v(x.mean(1).flatten(1))


def computed_parameters(model, x):
    bias = torch.cat([model.bias, torch.zeros_like(model.bias)])
    return F.linear(x.mean((2, 3)), model.fc.weight / model.fc.weight.norm(), bias)


def network_of_tensors(model, x):
    table = model.out(model.fc(model.table).relu())
    return x.mean((2, 3)) + table.sum(0), table


def regions(model, x):
    with torch.autocast("cpu", enabled=False), torch.enable_grad():
        x = model.fc(x.mean((2, 3)))
    return x + 1


def in_place_activations(model, x):
    return F.elu(F.hardswish(F.relu(model.conv(x), inplace=True), inplace=True), inplace=True)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (in_place_activations, "conv2d relu hardswish elu"),
        (lambda m, x: x * torch.sigmoid(1.702 * x), "mul sigmoid mul"),
        (lambda m, x: x * torch.sigmoid(1.0 * x), "silu"),
        (shared, "mean flatten linear linear linear"),
        (computed_parameters, "mean linear"),
        (lambda m, x: x.mean((2, 3)) @ m.table.T, "mean linear"),  # a product with a stored matrix
        (network_of_tensors, "mean sum add"),
        (lambda m, x: x.to(torch.float32).float().type_as(x).to(x.device).double().float() + 1, "to to add"),
        (regions, "mean linear add"),
        (lambda m, x: (x + m.add) * m.x + m.mul, "add mul add"),  # tensors with the names of operations and inputs
    ],
)
def test_operations_of_the_canonical_form(function, expected):
    parts = {"conv": nn.Conv2d(3, 8, 3), "fc": nn.Linear(3, 4), "out": nn.Linear(4, 3)}
    parts |= {name: nn.Linear(1024, 4) for name in "qkv"}
    parts |= {"table": nn.Buffer(torch.randn(5, 3)), "bias": nn.Parameter(torch.randn(2))}
    parts |= {name: nn.Buffer(torch.randn(1)) for name in ("add", "x", "mul")}
    assert ops(check_capture(Toy(function, **parts))) == expected.split()


CORNER = torch.ones(32, 32, dtype=torch.bool).tril(4)


@pytest.mark.parametrize(
    ("mask", "extra"),
    [
        (None, []),
        (CORNER, ["logical_not", "masked_fill"]),
        (torch.randn(4, 32, 32, generator=torch.Generator().manual_seed(0)), ["add"]),
        (torch.zeros(32, 32).masked_fill(~CORNER, -torch.inf), ["add"]),
    ],
    ids=["none", "boolean", "bias per head", "minus infinity"],
)
@pytest.mark.parametrize("scale", [pytest.param(None, marks=pytest.mark.slow), 0.5])
def test_attention_is_unfolded(mask, extra, scale):
    program = check_capture(Attention(mask, scale))
    start = ops(program).index("matmul")
    assert ops(program)[start - 1 :] == ["transpose", "matmul", "mul", *extra, "softmax", "matmul"]


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: torch.einsum("bchw,bcvw->bhv", x, x[:, :, :5]),  # two letters summed
        lambda m, x: torch.einsum("bchw,bchv->bcwv", x, x[..., :5]),  # heads
        lambda m, x: torch.einsum("bchw, cvw -> bhcv", x, m.table[:3, :5]),  # one operand without images
        lambda m, x: torch.einsum("bchw,vhw->cbv", x, m.table),  # images and rows in one dimension
        lambda m, x: torch.einsum("bchw,vu->bcvuhw", x, m.table[0, :5, :2]),  # outer product
        lambda m, x: torch.einsum("bchw,bcvw", x, x[:, :, :5]),  # implicit output
        lambda m, x: x @ m.vector,
        lambda m, x: torch.mv(x[:, 0, 0], m.vector) * x[:, 0, 0, 0],
        lambda m, x: x.mean((0, 1, 2)) @ x,
        lambda m, x: x[:, 0].mean((0, 1)) @ m.vector + x.mean((1, 2, 3)),
    ],
)
def test_einsums_and_products_with_vectors_are_products_of_matrices(function):
    parts = {"vector": nn.Parameter(torch.randn(32)), "table": nn.Parameter(torch.randn(5, 32, 32))}
    program = check_capture(Toy(function, **parts))
    (product,) = (node for node in program.nodes if node.op in PRODUCTS)
    seen = {}
    program.run((IMAGES,), lambda node, args, result: seen.__setitem__(node.name, args))
    assert all(operand.ndim >= 2 for operand in seen[product.name][:2])


@pytest.mark.parametrize("gain", [{}, {"beta": 0.5, "alpha": 2}])
def test_products_with_an_addition_are_separate(gain):
    def function(model, x):
        return torch.addmm(model.bias, torch.baddbmm(x[:, 1], x[:, 0], x[:, 2], **gain).mean(1), model.weight, **gain)

    program = check_capture(Toy(function, bias=nn.Parameter(torch.randn(5)), weight=nn.Parameter(torch.randn(32, 5))))
    assert [op for op in ops(program) if op in ("matmul", "linear")] == ["matmul", "linear"]


@pytest.mark.parametrize(
    ("function", "most"),
    [
        (lambda m, x: torch.cat([m.fc(part) for part in x.split(8)]), 8),
        (lambda m, x: m.fc(x) if x.shape[0] <= 16 else 2 * m.fc(x), 16),
    ],
)
def test_a_path_of_large_batches_is_refused(function, most):
    with pytest.raises(CaptureError, match=f"another code path for more than {most} images"):
        capture(Toy(function, fc=nn.Linear(8, 3)).eval(), TOKENS)


@torch.no_grad()
@pytest.mark.parametrize(
    "view",
    [
        lambda y: y.transpose(1, 2),
        lambda y: y.permute(0, 2, 1),
        lambda y: y.permute(2, 0, -2),
        lambda y: y.flatten(1),
    ],
)
@pytest.mark.parametrize("read_again", [False, True])
def test_writes_through_views_that_turn(view, read_again):
    """Both the view and what it is a view of have what was written."""

    def function(m, x):
        y = m.fc(x)
        turned = view(y)
        turned += 1.5
        turned.mul_(m.scale)
        return (turned.sum(0), y) if read_again else turned.sum(0)

    model = Toy(function, fc=nn.Linear(8, 3), scale=nn.Buffer(torch.tensor(0.5))).eval()
    assert_same(model, capture(model, TOKENS), TOKENS, tolerance=1e-6)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ((), "cannot use these inputs (no tensor), because the first dimension of every"),
        ((None,), "cannot use these inputs (no tensor), because"),
        ((IMAGES, IMAGES[:2]), "cannot use these inputs ((7, 3, 32, 32), (2, 3, 32, 32)), because"),
        ((IMAGES, torch.tensor(3.0)), "cannot use these inputs ((7, 3, 32, 32), ()), because"),
        (IMAGES[:0], "the inputs hold no images ((0, 3, 32, 32)): check how"),
    ],
)
def test_refuses_inputs_that_are_no_batch_of_images(tiny, inputs, words):
    with pytest.raises(CaptureError, match=re.escape(words)):
        capture(tiny, inputs)


@pytest.mark.slow
def test_a_single_image_serves(tiny):
    assert_same(tiny, capture(tiny, IMAGES[:1]), IMAGES)


@pytest.mark.slow
def test_refuses_images_that_are_not_numbers(tiny):
    with pytest.raises(CaptureError, match=r"DemoViT differs from the model by nan.*images may contain NaN"):
        capture(tiny, torch.full((2, 3, 32, 32), torch.nan))


def positions_by_masks(x, patch=8):
    """Return the number of each patch of (B, C, H, W), (B, N), as models for images of several sizes compute it."""
    mask = torch.ones(len(x), x.shape[2] // patch, x.shape[3] // patch, dtype=torch.bool)
    bounds = torch.arange(1 / mask.shape[1], 1, 1 / mask.shape[1])
    places = torch.zeros(len(x), mask[0].numel(), dtype=torch.long)
    steps = torch.arange(mask.shape[1]) / mask[:, :, 0].sum(1)[:, None]
    down = torch.bucketize(steps.clamp(max=1 - 1e-6), bounds, right=True)
    numbers = (down[:, :, None] * mask.shape[2] + down[:, None, :]).reshape(len(x), -1)
    flat = mask.view(len(x), -1)
    places[flat] = numbers[flat]
    return places, flat


def masked_attention(model, x):
    """Attend to all patches: without a mask if it hides nothing, as transformers does unless it is being traced."""
    places, mask = positions_by_masks(x)
    tokens = model.patch(x).flatten(2).transpose(1, 2) + model.position(places)
    whole = not torch.compiler.is_compiling() and bool(mask.all())
    return F.scaled_dot_product_attention(
        tokens, tokens, tokens, None if whole else mask[:, None], is_causal=whole and model.causal
    )


def patches_with_positions(*, causal):
    torch.manual_seed(0)
    return {"patch": nn.Conv2d(3, 8, 8, 8), "position": nn.Embedding(16, 8), "causal": causal}


def test_captures_positions_that_masks_and_buckets_choose():
    check_capture(Toy(masked_attention, **patches_with_positions(causal=False)))


def autocast(model, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model.patch(x)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda m, x: torch.fft.fft2(x).real, "Toy uses .*aten.fft_fft2.default.* cannot store or run"),
        (lambda m, x: x.add(0).erfinv_(), "Toy uses .*aten.erfinv.default.* cannot store or run"),
        (lambda m, x: x.add(0).diagonal(0, 2, 3).add_(1), "Toy uses .*aten.diagonal.default.* cannot store or run"),
        (lambda m, x: x.add(0).unbind(1)[0].add_(1), r"Toy writes through getitem at .*: make a new tensor there"),
        (lambda m, x: F.dropout(x, training=True), "behaves differently from call to call"),
        (lambda m, x: {0: x * 2, 1: x}, r"a dict with the keys \[0, 1\]: use strings as keys"),
        (autocast, r"Toy uses autocast at .*(toys|test_capture).py:\d+, .* give it enabled=False"),
        (masked_attention, r"computes something else while torch\.export records it"),
        (
            lambda m, x: (-x if torch.compiler.is_compiling() else x).mean((2, 3)).argmax(1),
            "by 1 of the values of an output .*something else while torch.export",
        ),
    ],
)
def test_refuses_what_no_program_does(function, words):
    model = Toy(function, **patches_with_positions(causal=True)).train()
    with pytest.raises(CaptureError, match=words):
        capture(model, IMAGES)
    assert model.training


def test_asks_to_report_an_operation_that_is_read_wrongly(monkeypatch):
    monkeypatch.setitem(UNFOLDED, "aten.relu.default", lambda call: call.emit("aten.neg.default", *call.args))
    with pytest.raises(CaptureError, match="adalog read an operation of the exported model wrongly"):
        capture(Toy(lambda m, x: F.relu(x)), IMAGES)
