"""A captured program is the model, at every batch size and in canonical form; or a refusal says why there is none."""

import copy
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
from toys import IMAGES, TOKENS, Attention, Toy, assert_same


def ops(program):
    return [node.op.removeprefix("aten.").split(".")[0] for node in program.nodes]


def check(model, images=IMAGES):
    """Capture on two images and compare on seven others, and on one."""
    program = capture(model.eval(), images[:2])
    assert_same(model, program, images)
    assert_same(model, program, images[:1])
    return program


# --- equal to the model ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 2, 7])
@pytest.mark.parametrize("name", zoo.NAMES)
def test_equals_eager(name, batch):
    assert_same(*zoo.captured(name), IMAGES[:batch])


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


@pytest.mark.parametrize("name", zoo.NAMES)
def test_the_check_accepts_every_batch_size(name):
    """Any model that can be captured can be checked, so no whole file is refused."""
    _, program = zoo.captured(name)
    for batch in (1, 5):
        program.check([torch.empty(batch, 3, 32, 32)])


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


def test_modes_are_restored_after_a_refusal():
    model = Toy(lambda m, x: x.cumprod(0)).train()
    with pytest.raises(CaptureError):
        capture(model, IMAGES)
    assert model.training


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
    def function(model, x):
        return structure(x.mean((2, 3)), x.amax((2, 3)))

    model = Toy(function)
    program = check(model)
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


@dataclass
class Unknown:
    """No pytree."""

    value: torch.Tensor


def test_arguments_that_are_no_tensors_are_constants():
    class Scaled(nn.Module):
        def forward(self, x, scale=1.0, mask=None, flip=False):
            x = x * scale if mask is None else x
            return x.flip(3) if flip else x

    program = capture(Scaled(), (IMAGES, 0.5, None, True))
    assert program.inputs == ("x",)
    assert torch.equal(program.run((IMAGES,)), IMAGES.flip(3) * 0.5)


def test_several_inputs():
    class Two(nn.Module):
        def forward(self, left, right):
            return left @ right.transpose(1, 2)

    left, right = torch.randn(3, 4, 5), torch.randn(3, 6, 5)
    program = capture(Two(), (left, right))
    assert torch.equal(program.run((left, right)), left @ right.mT)
    with pytest.raises(TypeError, match="takes 2 inputs, got 1"):
        program.run((left,))


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
    program = check(model)
    assert ops(program) == ["conv2d", "relu"]
    assert not any("running" in name for name in program.tensors)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: m.norm(m.conv(x)) + m.conv(x),
        lambda m, x: (m.norm(m.conv(x)), m.conv(x)),
        lambda m, x: m.of_these(m.conv(x)),
        lambda m, x: F.batch_norm(m.conv(x), m.norm.running_mean * 2, m.norm.running_var.exp()),
    ],
    ids=["convolution read twice", "convolution an output", "statistics of these images", "statistics computed"],
)
def test_batch_norms_that_stay(function):
    norms = {"norm": nn.BatchNorm2d(8), "of_these": nn.BatchNorm2d(8, track_running_stats=False)}
    assert "batch_norm" in ops(check(Toy(function, conv=nn.Conv2d(3, 8, 3), **norms)))


def test_convolution_used_twice_keeps_its_batch_norms():
    def function(model, x):
        return model.first(model.conv(x)) + model.second(model.conv(-x))

    norms = {"first": nn.BatchNorm2d(8), "second": nn.BatchNorm2d(8)}
    program = check(Toy(function, conv=nn.Conv2d(3, 8, 3), **norms))
    assert ops(program).count("batch_norm") == 2


@pytest.mark.filterwarnings("ignore:Using padding=.same. with even kernel lengths")  # of torch, about such a model
@pytest.mark.parametrize("kernel", [3, 4])
@pytest.mark.parametrize(("padding", "dilation"), [("same", 1), ("same", 3), ("valid", 2)])
def test_padding_by_name_becomes_numbers(kernel, padding, dilation):
    conv = nn.Conv2d(3, 6, kernel, padding=padding, dilation=dilation, groups=3)
    program = check(Toy(lambda m, x: m.conv(x), conv=conv))
    assert [op for op in ops(program) if op != "constant_pad_nd"] == ["conv2d"]
    assert all(isinstance(size, int) for size in program.nodes[-1].args[4])


def read_again(model, x):
    x = model.conv(x)
    return model.relu(x) + x  # twice the result: x has become it


def read_before(model, x):
    x = model.conv(x)
    kept = x + 0
    return model.relu(x) - kept


def cloned(model, x):
    x = model.conv(x)
    kept = x.clone()
    return model.relu(x) - kept


def view_written(model, x):
    x = model.conv(x)
    x[:, 2:5, 0] = 7
    x[:, 0].mul_(2)
    return x


def view_read_after_the_whole_is_written(model, x):
    x = model.conv(x)
    rows = x.flatten(2)
    x.mul_(3)
    return rows


def sibling_read_after_a_write(model, x):
    x = model.conv(x)
    first, rows = x[:, :4], x.flatten(2)
    first += 1
    return rows, x[:, 2:6]


def result_read_after_a_second_write(model, x):
    x = model.conv(x)
    once = x.relu_()
    x.add_(1)
    return once


def mask_written(model, x):
    mask = x.new_zeros((1, 1, 30, 30))
    for count, rows in enumerate((slice(0, -8), slice(-8, None))):
        mask[:, :, rows] = count - 2
    return model.conv(x) + mask


@pytest.mark.parametrize(
    "function",
    [
        read_again,
        read_before,
        cloned,
        view_written,
        view_read_after_the_whole_is_written,
        sibling_read_after_a_write,
        result_read_after_a_second_write,
        mask_written,
    ],
)
def test_in_place_operations_become_values(function):
    check(Toy(function, conv=nn.Conv2d(3, 8, 3), relu=nn.ReLU(inplace=True)))


def test_a_chain_of_in_place_activations():
    layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True), nn.Hardswish(inplace=True), nn.ELU(inplace=True))
    assert ops(check(layers)) == ["conv2d", "relu", "hardswish", "elu"]


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
    program = check(Attention(mask, scale))
    start = ops(program).index("matmul")
    assert ops(program)[start - 1 :] == ["transpose", "matmul", "mul", *extra, "softmax", "matmul"]


@pytest.mark.parametrize("gain", [1.702, 1.0])
def test_quick_gelu_stays_a_product_and_a_sigmoid(gain):
    program = check(Toy(lambda m, x: x * torch.sigmoid(gain * x)))
    assert ops(program)[-2:] == ["sigmoid", "mul"]


def test_queries_keys_and_values_share_their_input():
    def function(model, x):
        return model.q(x[:, 0].flatten(1)), model.k(x[:, 0].flatten(1)), model.v(x[:, 0].flatten(1))

    program = check(Toy(function, q=nn.Linear(1024, 4), k=nn.Linear(1024, 4), v=nn.Linear(1024, 4)))
    linears = [node for node in program.nodes if node.op == "aten.linear.default"]
    assert len(linears) == 3
    assert len({node.args[0].name for node in linears}) == 1


def test_computed_weights_and_biases_are_stored():
    def function(model, x):
        bias = torch.cat([model.bias, torch.zeros_like(model.bias)])
        weight = model.fc.weight / model.fc.weight.norm()
        return F.linear(x.mean((2, 3)), weight, bias)

    program = check(Toy(function, fc=nn.Linear(3, 4), bias=nn.Parameter(torch.randn(2))))
    linear = program.nodes[-1]
    assert linear.op == "aten.linear.default"
    assert {arg.name for arg in linear.args[1:]} == set(program.tensors)


EINSUMS = {
    "bchw,bcvw->bhv": "plain, with two letters summed",
    "bchw,bchv->bcwv": "heads",
    "bchw, cvw -> bhcv": "heads that are not first, one operand without images",
    "bchw,vhw->cbv": "images and rows in one dimension",
    "bchw,vu->bcvuhw": "outer product",
    "bchw,bcvw": "implicit output",
}


@pytest.mark.parametrize(
    "equation",
    [
        equation if equation in ("bchw,bchv->bcwv", "bchw,vhw->cbv") else pytest.param(equation, marks=pytest.mark.slow)
        for equation in EINSUMS
    ],
    ids=EINSUMS.values(),
)
def test_an_einsum_of_two_operands_is_a_product(equation):
    right = {"bcvw": (7, 3, 5, 32), "bchv": (7, 3, 32, 5), "cvw": (3, 5, 32), "vhw": (5, 32, 32), "vu": (5, 2)}
    shape = right[equation.replace(" ", "").split("->")[0].split(",")[1]]
    other = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    inputs = (IMAGES, other) if shape[0] == 7 else (IMAGES,)

    class Einsum(nn.Module):
        def forward(self, x, y=other):
            return torch.einsum(equation, x, y)

    program = capture(Einsum(), inputs)
    assert sum(op in ("matmul", "linear") for op in ops(program)) == 1
    assert "einsum" not in ops(program)
    expected = Einsum()(*inputs)
    torch.testing.assert_close(program.run(inputs), expected, rtol=0, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: x @ m.vector,
        lambda m, x: torch.mv(x[:, 0, 0], m.vector) * x[:, 0, 0, 0],
        lambda m, x: x.mean((0, 1, 2)) @ x,
        lambda m, x: x[:, 0].mean((0, 1)) @ m.vector + x.mean((1, 2, 3)),
    ],
)
def test_a_product_with_a_vector_is_one_with_a_matrix(function):
    program = check(Toy(function, vector=nn.Parameter(torch.randn(32))))
    (product,) = (node for node in program.nodes if node.op in PRODUCTS)
    seen = {}
    program.run((IMAGES,), lambda node, args, result: seen.__setitem__(node.name, args))
    assert all(operand.ndim >= 2 for operand in seen[product.name][:2])


@pytest.mark.parametrize("gain", [{}, {"beta": 0.5, "alpha": 2}])
def test_products_with_an_addition_are_separate(gain):
    def function(model, x):
        return torch.addmm(model.bias, torch.baddbmm(x[:, 1], x[:, 0], x[:, 2], **gain).mean(1), model.weight, **gain)

    program = check(Toy(function, bias=nn.Parameter(torch.randn(5)), weight=nn.Parameter(torch.randn(32, 5))))
    assert [op for op in ops(program) if op in ("matmul", "linear")] == ["matmul", "linear"]


def test_a_product_with_a_stored_matrix_is_a_linear():
    program = check(Toy(lambda m, x: x.mean((2, 3)) @ m.weight, weight=nn.Parameter(torch.randn(3, 5))))
    assert ops(program)[-1] == "linear"
    assert program.tensors[program.nodes[-1].args[1].name].shape == (5, 3)


def test_a_network_of_tensors_alone_is_computed_once():
    def function(model, x):
        table = model.second(model.first(model.table).relu())
        return x.mean((2, 3)) + table.sum(0), table

    layers = {"first": nn.Linear(2, 8), "second": nn.Linear(8, 3), "table": nn.Buffer(torch.randn(6, 2))}
    assert "linear" not in ops(check(Toy(function, **layers)))


def test_casts_to_the_same_type_vanish():
    program = check(Toy(lambda m, x: x.to(torch.float32).float().type_as(x).to(x.device).double().float() + 1))
    assert ops(program) == ["to", "to", "add"]


def test_regions_without_autocast_or_gradients_are_inlined():
    def function(model, x):
        with torch.autocast("cpu", enabled=False), torch.enable_grad():
            x = model.fc(x.mean((2, 3)))
        return x + 1

    assert ops(check(Toy(function, fc=nn.Linear(3, 4)))) == ["mean", "linear", "add"]


def test_names_of_tensors_and_operations_do_not_clash():
    names = {"add": nn.Buffer(torch.randn(1)), "x": nn.Buffer(torch.randn(1)), "mul": nn.Buffer(torch.randn(1))}
    check(Toy(lambda m, x: (x + m.add) * m.x + m.mul, **names))


def test_stored_tensors_do_not_take_the_names_of_inputs():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.matrix, self.gain = nn.Parameter(torch.randn(5, 4)), nn.Parameter(torch.rand(5))

        def forward(self, x, weight, bias):
            return F.linear(x, self.matrix * self.gain[:, None], self.gain * 2) * weight + bias

    model, inputs = Gated().eval(), (torch.randn(2, 4), torch.randn(2, 5), torch.randn(2, 5))
    program = capture(model, inputs)
    assert torch.allclose(program.run(inputs), model(*inputs), atol=1e-6)


def test_einsums_of_images_of_any_size():
    def function(self, x):
        tokens = self.stem(x).flatten(2).transpose(1, 2)
        return torch.einsum("bnd,bmd->bnm", tokens, tokens).mean((1, 2))

    model = Toy(function, stem=nn.Conv2d(3, 8, 4, 4)).eval()
    program = capture(model, IMAGES, "free")
    for images in (IMAGES[:1], IMAGES[:2, :, :16, :24]):
        assert torch.allclose(program.run((images,)), model(images), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_kernel_that_is_put_out_is_not_folded():
    model = Toy(lambda m, x: (m.norm(m.conv(x)), m.conv.weight), conv=nn.Conv2d(3, 4, 2), norm=nn.BatchNorm2d(4)).eval()
    model.norm.running_var.uniform_(0.5, 2)
    images = torch.randn(8, 3, 5, 5)
    found = capture(model, images).run([images])
    for one, other in zip(found, model(images), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


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
def test_a_model_that_writes_to_its_input():
    model = Toy(lambda m, x: m.fc(x.sub_(0.5)), fc=nn.Linear(8, 3)).eval()
    before = TOKENS.clone()
    program = capture(model, TOKENS)
    assert torch.equal(TOKENS, before)
    torch.testing.assert_close(program.run([TOKENS]), model(TOKENS.clone()))


@torch.no_grad()
def test_more_inputs_behind_a_star():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 3)

        def forward(self, x, *more):
            return self.fc(x + sum(more))

    model = Pair().eval()
    given = (TOKENS, TOKENS + 1, TOKENS * 2)
    torch.testing.assert_close(capture(model, given).run(given), model(*given))


@torch.no_grad()
def test_infinite_outputs_are_equal():
    model = Toy(lambda m, x: m.fc(x) + m.mask, fc=nn.Linear(8, 3)).eval()
    model.register_buffer("mask", torch.tensor([0.0, -torch.inf, 0.0]))
    program = capture(model, TOKENS)
    assert torch.equal(program.run([TOKENS]).isinf(), model(TOKENS).isinf())


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

    model = Toy(function, fc=nn.Linear(8, 3)).eval()
    model.register_buffer("scale", torch.tensor(0.5))
    found, wanted = (each(TOKENS) for each in (lambda x: capture(model, x).run([x]), model))
    for one, other in zip(*((each if read_again else (each,)) for each in (found, wanted)), strict=True):
        torch.testing.assert_close(one, other)


def test_a_number_may_be_divided_by_whole_numbers():
    parts, numbers = {"rows": nn.Embedding(101, 8), "head": nn.Linear(8, 2)}, torch.arange(1, 5)
    model = Toy(lambda m, x: m.head(m.rows(torch.div(100, x, rounding_mode="trunc"))), **parts)
    program = capture(model.eval(), (numbers,))
    assert program.run([numbers]).shape == (4, 2)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "shapes"),
    [
        ((), "no tensor"),
        ((None,), "no tensor"),
        ((IMAGES[:0],), r"\(0, 3, 32, 32\)"),
        ((IMAGES, IMAGES[:2]), r"\(7, 3, 32, 32\), \(2, 3, 32, 32\)"),
        ((IMAGES, torch.tensor(3.0)), r"\(7, 3, 32, 32\), \(\)"),
    ],
)
def test_refuses_inputs_that_are_no_batch_of_images(tiny, inputs, shapes):
    with pytest.raises(
        CaptureError, match=rf"cannot use these inputs \({shapes}\), because the first dimension of every"
    ):
        capture(tiny, inputs)


@pytest.mark.slow
def test_a_single_image_serves(tiny):
    assert_same(tiny, capture(tiny, IMAGES[:1]), IMAGES)


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (lambda m, x: x.cumprod(0), "Toy uses .*aten.cumprod.default.* cannot store or run"),
        (lambda m, x: x + torch.rand(3, 32, 32), "Toy uses .*aten.rand.default.* cannot store or run"),
        (lambda m, x: torch.fft.fft2(x).real, "Toy uses .*aten.fft_fft2.default.* cannot store or run"),
        (lambda m, x: x.add(0).erfinv_(), "Toy uses .*aten.erfinv.default.* cannot store or run"),
        (lambda m, x: x.add(0).diagonal(0, 2, 3).add_(1), "Toy uses .*aten.diagonal.default.* cannot store or run"),
        (lambda m, x: x.add(0).unbind(1)[0].add_(1), r"Toy writes through getitem at .*: make a new tensor there"),
        (lambda m, x: x.view(2, -1), "Toy turns the number of images into a fixed number at"),
        (
            lambda m, x: x + 1 if x.mean() > 0 else x - 1,
            "Toy could not be exported, because it decides by the values of tensors",
        ),
        (lambda m, x: F.dropout(x, training=True), "behaves differently from call to call"),
        (lambda m, x: Unknown(x), "could not be exported"),
        (lambda m, x: {0: x * 2, 1: x}, r"a dict with the keys \[0, 1\]: use strings as keys"),
    ],
)
def test_refuses_what_no_program_does(function, told):
    with pytest.raises(CaptureError, match=told):
        capture(Toy(function), IMAGES)


def test_refuses_autocast():
    def function(model, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model.fc(x.mean((2, 3)))

    with pytest.raises(CaptureError, match=r"Toy uses autocast at .*toys.py:\d+, .* give it enabled=False"):
        capture(Toy(function, fc=nn.Linear(3, 4)), IMAGES)


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
    return Toy(masked_attention, patch=nn.Conv2d(3, 8, 8, 8), position=nn.Embedding(16, 8), causal=causal)


def test_captures_positions_that_masks_and_buckets_choose():
    model = patches_with_positions(causal=False)
    program = capture(model, IMAGES)
    assert torch.allclose(program.run([IMAGES]), model(IMAGES), atol=1e-5)


def test_refuses_a_model_that_is_another_one_while_it_is_exported():
    with pytest.raises(CaptureError, match=r"computes something else while torch\.export records it"):
        capture(patches_with_positions(causal=True), IMAGES)


def test_compares_outputs_that_are_whole_numbers():
    def labels(model, x):
        scores = x.mean((2, 3))
        return (-scores if torch.compiler.is_compiling() else scores).argmax(1)

    with pytest.raises(CaptureError, match=r"by 1 of the values of an output .*something else while torch.export"):
        capture(Toy(labels), IMAGES)


def test_asks_to_report_an_operation_that_is_read_wrongly(monkeypatch):
    monkeypatch.setitem(UNFOLDED, "aten.relu.default", lambda call: call.emit("aten.neg.default", *call.args))
    with pytest.raises(CaptureError, match="adalog read an operation of the exported model wrongly"):
        capture(Toy(lambda m, x: F.relu(x)), IMAGES)
