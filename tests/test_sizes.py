"""Models that take images of any size: what is captured, refused, saved and run at sizes that did not calibrate."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import zoo
from adalog import Calibration, CaptureError, artifact
from adalog.errors import ArtifactError, ProgramError
from adalog.graph.capture import capture
from adalog.quantized import _TAKEN
from adalog.runtime.reference import FREE_TERMS
from stored import deserialise, rebuilt, serialise, setting
from toys import Toy, assert_same, model_of
from whole_numbers import EXECUTORS, needs_kernels

SIZES = [(40, 56), (64, 64), (45, 83)]


def of_size(height, width, batch=2):
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(height + width))


def windows(m, x):
    """Windows of 4 x 4 patches with zeros at the edges, as in a Swin; maps that are no larger are not rolled."""
    x = m.embed(x).permute(0, 2, 3, 1)
    height, width = x.shape[1:3]
    y = F.pad(m.norm(x), (0, 0, 0, -width % 4, 0, -height % 4))
    if height > 4:
        y = y.roll(2, 1)
    y = y.unflatten(1, (-1, 4)).unflatten(3, (-1, 4)).transpose(2, 3).flatten(3, 4)
    q, k, v = m.qkv(y).chunk(3, -1)
    y = F.scaled_dot_product_attention(q, k, v).unflatten(3, (4, 4)).transpose(2, 3).flatten(3, 4).flatten(1, 2)
    x = x + y[:, :height, :width]
    return m.head(m.last(x).mean((1, 2)))


def make(function=windows):
    torch.manual_seed(0)
    parts = {"embed": nn.Conv2d(3, 16, 4, 4), "norm": nn.LayerNorm(16), "qkv": nn.Linear(16, 48)}
    model = Toy(function, **parts, last=nn.LayerNorm(16), head=nn.Linear(16, 5))
    for norm in (model.norm, model.last):
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    return model.eval()


@pytest.fixture(scope="module")
def calibration_of_any_size():
    return Calibration(make(), of_size(40, 56, 8), sizes="free")


@pytest.fixture(scope="module")
def program(calibration_of_any_size):
    return calibration_of_any_size.program


@pytest.fixture(scope="module")
def free(calibration_of_any_size, fast):
    return calibration_of_any_size.quantize(replace(fast, images=8))


# --- capture ---------------------------------------------------------------------------------------------------------


def test_a_program_with_free_sizes_is_the_model_at_each(program):
    model = make()
    assert program.free == {"x": (2, 3)}
    for height, width in [*SIZES, (21, 9)]:
        assert_same(model, program, of_size(height, width, 3))


@pytest.mark.parametrize(("size", "fits"), [((20, 8), True), ((19, 64), False), ((16, 16), False), ((160, 4), True)])
def test_sizes_for_which_the_model_takes_another_path_are_refused(program, size, fits):
    refused = pytest.raises(ProgramError, match=rf"not captured for inputs of \(3, {size[0]}, {size[1]}\)")
    with nullcontext() if fits else refused:
        program.check([of_size(*size)])


@pytest.mark.parametrize("pool", [lambda y: y, lambda y: F.max_pool2d(y, 1, stride=2)])
def test_a_model_without_questions_has_no_rule(pool):
    """Of pooling, PyTorch itself asks whether a size is odd, to round the result's."""
    model = make(lambda m, x: m.head(pool(m.embed(x)).mean((2, 3))))
    program = capture(model, of_size(36, 44), sizes="free")
    assert program.rule is None
    for size in ((36, 44), (40, 56), (44, 40), (8, 4)):
        assert_same(model, program, of_size(*size))


def mean_of(m, x):
    return m.head(m.embed(x).mean((2, 3)))


def asks(*questions):
    """A model that goes another way for each question about its images that is true."""

    def function(m, x):
        y = mean_of(m, x)
        for index, question in enumerate(questions):
            if question(x):
                y = (y * (2 + index)).tanh()
        return y

    return function


def accepts(program, *inputs):
    """Whether a program takes inputs of these shapes, told without data."""
    try:
        program.check([torch.empty(shape, device="meta") for shape in inputs])
    except ProgramError:
        return False
    return True


def conditions(program):
    """How many a rule has, and the operations that make them."""
    return len(program.rule.output), sorted(node.op for node in program.rule.nodes)


@pytest.mark.parametrize(
    ("question", "last", "first"),
    [
        (lambda x: x.shape[2] > 150, (150, 9), (151, 9)),
        (lambda x: x.shape[2] > 1000, (1000, 9), (1001, 9)),
        (lambda x: x.shape[2] * x.shape[3] > 10**5, (250, 400), (250, 401)),
        (lambda x: (x.shape[2] // 4) ** 2 > 10**6, (4003, 9), (4004, 9)),
        (lambda x: x.shape[2] > 50 and x.shape[3] < 2000, (50, 3000), (51, 56)),
        (lambda x: x.shape[2] == 4096, (4095, 9), (4096, 9)),
        (lambda x: torch._assert(x.shape[2] % 8 == 0, "rows must come by eights"), (48, 9), (44, 56)),
    ],
)
def test_bounds_far_from_the_captured_size_are_kept(question, last, first):
    program = capture(make(asks(question)), of_size(40, 56), sizes="free")
    assert accepts(program, (1, 3, *last))
    assert not accepts(program, (1, 3, *first))


def test_a_bound_is_kept_beside_what_hides_it():
    """Near the captured size only multiples of 32 are taken, none of which is beyond 224 alone."""
    model = make(asks(lambda x: x.shape[2] % 32 != 0, lambda x: x.shape[3] % 32 != 0, lambda x: x.shape[3] > 224))
    program = capture(model, of_size(160, 160), sizes="free")
    assert conditions(program)[0] == 3
    for size, fits in {(160, 224): True, (288, 32): True, (160, 256): False, (160, 200): False}.items():
        assert accepts(program, (2, 3, *size)) == fits
    assert_same(model, program, of_size(288, 96))


def test_a_rule_is_every_answer_of_the_model():
    """Sizes are taken where the model answers all its questions as it did, and nowhere else."""
    questions = [
        lambda x: x.shape[2] > 1000,
        lambda x: x.shape[2] > 150,
        lambda x: x.shape[3] >= 3 * x.shape[2],
        lambda x: x.shape[2] * x.shape[3] > 40000,
        lambda x: x.shape[2] // 4 % 7 == 5,
        lambda x: max(x.shape[2], x.shape[3]) > 400,
        lambda x: x.shape[2] < 12 or x.shape[3] < 8,
        lambda x: -x.shape[2] % 4 != 0,
    ]
    program = capture(make(asks(*questions)), of_size(40, 56), sizes="free")
    wanted = [question(of_size(40, 56)) for question in questions]
    generator = torch.Generator().manual_seed(0)
    found = []
    for limit in (16, 64, 256, 1100):
        for size in torch.randint(4, limit, (150, 2), generator=generator).tolist():
            image = torch.empty(1, 3, *size, device="meta")
            found.append(accepts(program, image.shape))
            assert found[-1] == ([question(image) for question in questions] == wanted), size
    assert 10 < sum(found) < 500


def test_bounds_that_others_imply_are_left_out():
    heights = [lambda x, bound=bound: (x.shape[2] + x.shape[3]) // 4 > bound for bound in (5000, 3000, 1000, 400, 100)]
    always = [lambda x: x.shape[2] > 0, lambda x: x.shape[3] // 2 >= 0, lambda x: x.shape[2] + x.shape[3] > 1]
    program = capture(make(asks(*heights, *always)), of_size(40, 56), sizes="free")
    assert conditions(program) == (1, ["aten.sym_size.int"] * 2 + ["sym.add", "sym.floordiv", "sym.le"])
    assert accepts(program, (2, 3, 200, 203))
    assert not accepts(program, (2, 3, 200, 204))


@pytest.mark.parametrize(
    ("question", "captured", "other", "wrong", "asserted"),
    [
        (lambda x: x.shape[2] == x.shape[3], (64, 64), (96, 96), (96, 100), False),
        (lambda x: x.shape[2] == x.shape[3], (64, 64), (96, 96), (96, 100), True),
        (lambda x: 2 * x.shape[2] == x.shape[3], (32, 64), (40, 80), (40, 40), False),
        (lambda x: 2 * x.shape[2] == x.shape[3], (32, 64), (40, 80), (40, 40), True),
        (lambda x: 3 * x.shape[2] == 2 * x.shape[3], (32, 48), (64, 96), (64, 64), False),
    ],
)
def test_sizes_that_must_be_equal(question, captured, other, wrong, asserted):
    """Export goes on with one of them, and asks about the other no more."""
    asked = [question, lambda x: x.shape[2] > 300, lambda x: x.shape[3] > 400]
    asserting = [lambda x: torch._assert(question(x), "sizes fit")]
    model = make(asks(*(asserting if asserted else asked)))
    program = capture(model, of_size(*captured), sizes="free")
    assert_same(model, program, of_size(*other))
    assert accepts(program, (2, 3, *other))
    assert not accepts(program, (2, 3, *wrong))
    assert accepts(program, (1, 3, 20 * other[0], 20 * other[1])) == asserted


def both(m, x, y):
    """Two images; of equal height, they are told from others."""
    first, second = m.embed(x).mean((2, 3)), m.embed(y).mean((2, 3))
    if x.shape[2] == y.shape[2]:
        first = first * 2
    return first + second * 3 if y.shape[2] * x.shape[0] > 500 else first - second


def test_sizes_of_two_inputs_that_must_be_equal():
    model = model_of(both, embed=nn.Conv2d(3, 4, 1))
    program = capture(model, [of_size(32, 48), of_size(32, 40)], sizes="free")
    assert conditions(program) == (2, ["aten.sym_size.int"] * 3 + ["sym.eq", "sym.le", "sym.mul"])
    assert accepts(program, (5, 3, 100, 48), (5, 3, 100, 9))
    assert not accepts(program, (5, 3, 100, 48), (5, 3, 99, 48))
    assert not accepts(program, (6, 3, 100, 48), (6, 3, 100, 9))


def test_a_rule_knows_the_batch():
    questions = [lambda x: x.shape[0] * x.shape[2] > 200, lambda x: x.shape[0] > 0, lambda x: x.shape[0] > 20]
    program = capture(make(asks(*questions)), of_size(20, 20), sizes="free")
    assert conditions(program) == (2, ["aten.sym_size.int"] * 2 + ["sym.le", "sym.le", "sym.mul"])
    for batch, most in {1: 200, 2: 100, 7: 28, 20: 10, 21: 0}.items():
        assert not most or accepts(program, (batch, 3, most, 24))
        assert not accepts(program, (batch, 3, most + 4, 24))


def test_a_model_without_maps_has_no_rule():
    program = capture(Toy(lambda m, x: m.head(x), head=nn.Linear(5, 5)).eval(), torch.randn(2, 5), sizes="free")
    assert (program.free, program.rule) == ({}, None)
    model = Toy(lambda m, x: m.head(x) if x.shape[0] < 100 else x, head=nn.Linear(5, 5)).eval()
    with pytest.raises(CaptureError, match="another code path for more than 99 images"):
        capture(model, torch.randn(2, 5), sizes="free")


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8])
def test_maps_that_are_no_floats_are_stretched_too(dtype):
    model = model_of(lambda m, x, mask: (m.embed(x) * mask.to(x.dtype)).mean((2, 3)), embed=nn.Conv2d(3, 4, 1))
    example = [of_size(40, 56), of_size(40, 56)[:, :1] > 0]
    program = capture(model, [example[0], example[1].to(dtype)], sizes="free")
    image, mask = of_size(24, 83), (of_size(24, 83)[:, :1] > 0).to(dtype)
    assert torch.allclose(program.run([image, mask]), model(image, mask), atol=1e-6)


@pytest.mark.parametrize("made", [lambda y: y, lambda y: (10 * y).long()])
def test_outputs_of_another_shape_are_told(made):
    """Neither shape is a part of the other's."""
    model = make(lambda m, x: made(mean_of(m, x)[:, :3] if x.shape[0] == 7 else mean_of(m, x)))
    words = r"differs .* in the shape of an output on inputs of \(7, 3, 40, 56\): \(7, 5\) instead of \(7, 3\)"
    with pytest.raises(CaptureError, match=words):
        capture(model, of_size(40, 56))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (
            asks(lambda x: x.shape[0] * x.shape[2] > 200),
            r"Toy takes another code path for inputs of \(7, 3, 40, 56\): cap",
        ),
        (asks(lambda x: x.shape[2] / x.shape[3] > 2), r"satisfy .*x.shape\[2\].*cannot hold .*capture it for one size"),
        (
            lambda m, x: m.head(m.embed(x).flatten(2) @ m.table),
            r"the model takes no other size than \(3, 40, 56\): .*capture it for one size",
        ),
        (
            lambda m, x: mean_of(m, x) if x.shape[2:] == (40, 56) else x,
            "Toy turns the height of the images into a fixed number at.*capture it for one size",
        ),
    ],
)
def test_what_no_rule_holds_is_refused(function, words):
    model = make(function)
    model.table = nn.Parameter(torch.randn(140, 16))
    with pytest.raises(CaptureError, match=words):
        capture(model, of_size(40, 56), sizes="free")


def test_sizes_that_are_no_choice():
    with pytest.raises(ValueError, match="sizes = 'any' is not one of fixed, free"):
        capture(make(), of_size(40, 56), sizes="any")


# --- quantized -------------------------------------------------------------------------------------------------------


def assert_agrees(model, executor, images):
    wanted, actual = model(images), model.compile(executor)(images)
    assert float((actual - wanted).abs().max()) < 1e-4 * float(wanted.abs().max())


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("size", SIZES)
def test_executors_agree_at_every_size(free, executor, size):
    assert_agrees(free, executor, of_size(*size))


def test_the_norm_before_zeros_is_folded(free):
    assert not free.refusals
    assert any(node.name.endswith("shifted") for node in free.program.nodes)


def test_a_loaded_model_is_the_same_at_every_size(free):
    loaded = deserialise(serialise(free))
    assert loaded.program.free == {"x": (2, 3)}
    for size in SIZES:
        assert torch.equal(loaded(of_size(*size)), free(of_size(*size)))
    with pytest.raises(ProgramError, match=r"program was not captured for inputs of \(3, 16, 16\)"):
        loaded(of_size(16, 16))
    assert serialise(loaded) == serialise(free)


def test_a_file_says_that_its_sizes_are_free(free, quantized):
    assert artifact.inspect(serialise(free))["inputs"] == {"x": ["B", 3, "H", "W"]}
    assert "height and width of x are free" in free.summary().splitlines()
    assert list(artifact.inspect(serialise(quantized))["inputs"].values()) == [["B", 3, 32, 32]]
    assert "free" not in quantized.summary()
    header = artifact.read_header(serialise(quantized))  # as before sizes could be free
    assert "rule" not in header
    assert [len(entry) for entry in header["inputs"]] == [3]


def test_other_shapes_are_told_what_is_free(free):
    with pytest.raises(ValueError, match=r"the model takes \(B, 3, H, W\) of torch.float32; got \(2, 1, 40, 56\)"):
        free(torch.zeros(2, 1, 40, 56))


@needs_kernels
def test_native_holds_a_plan_for_each_shape(free):
    compiled = free.compile("native")
    plan = compiled.prepare(2, (3, 45, 83))
    assert compiled.prepare(2, (3, 45, 83)) is plan
    assert compiled.prepare(2) is compiled.prepare(2, (3, 40, 56))
    assert compiled.prepare(2) is not plan
    with pytest.raises(ProgramError, match="program was not captured for inputs of"):
        compiled.prepare(1, (3, 16, 16))
    with pytest.raises(ProgramError, match="elements, but a batch of this size may take"):
        compiled.prepare(1, (3, 10**6, 10**6))
    for shapes in ((3, 40, 56), ((3, 40, 56), (3, 40, 56))):
        with pytest.raises(ValueError, match=r"give one \(C, H, W\) for each of the 1 inputs"):
            compiled.prepare(2, *shapes)


HEIGHT = ["h", "aten.sym_size.int", [{"ref": "x"}, 2], {}, ""]
PRODUCT = ["big", "sym.mul", [2**70, 2], {}, ""]  # does not fit 64 bits
FALSE = ["no", "sym.lt", [2, 1], {}, ""]


def with_more(node):
    """A change of a header whose rule has one more operation, and outputs it."""

    def change(header):
        header["rule"][0].append(node)
        header["rule"][1].append({"ref": node[0]})

    return change


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (setting("inputs", 0, 3, [1, 2]), r"has the invalid free dimensions \[1, 2\]"),
        (setting("inputs", 0, 3, [2.0, 3.0]), r"has the invalid free dimensions \[2.0, 3.0\]"),
        (setting("inputs", 0, 3, []), r"has the invalid free dimensions \[\]"),
        (setting("inputs", 0, 3, "23"), "has the invalid free dimensions '23'"),
        (lambda header: header["inputs"][0].append(1), "an input is no"),
        (lambda header: header["inputs"][0].pop(), "no size is free"),
        (setting("rule", []), "the rule for sizes is no"),
        (setting("rule", [[], []]), "no operations"),
        (setting("rule", [[HEIGHT] * 5000, [{"ref": "h"}]]), "has 5000 operations, more than 4096"),
        (setting("rule", [[HEIGHT], []]), "outputs something other than sizes"),
        (setting("rule", 1, [{"ref": "x"}]), "outputs something other than sizes"),
        (setting("rule", 1, 1), "outputs something other than sizes"),
        (
            lambda header: header["rule"][0].append(["big", "aten.relu.default", [{"ref": "x"}], {}, ""]),
            "the rule for sizes may not have the operations aten.relu.default",
        ),
        (with_more(PRODUCT), "was not captured for"),
        (with_more(FALSE), "was not captured for"),
    ],
)
def test_damaged_rules(free, change, told):
    content = rebuilt(serialise(free), change)
    with pytest.raises(ArtifactError, match=told):
        deserialise(content)


@pytest.mark.slow
def test_a_vit_that_interpolates_its_positions_takes_whole_patches():
    import timm

    model = timm.create_model("vit_tiny_patch16_224", img_size=64, dynamic_img_size=True, num_classes=5, depth=1).eval()
    program = capture(model, of_size(64, 64), sizes="free")
    for size in [(64, 96), (32, 48), (128, 80)]:
        assert_same(model, program, of_size(*size))
    with pytest.raises(ProgramError, match="program was not captured for inputs of"):
        program.check([of_size(70, 64)])


@pytest.mark.slow
def test_a_swin_runs_at_other_sizes_in_every_executor(fast):
    """All its norms fold, those before zeros too."""
    model = zoo.make("torchvision_swin")
    images = torch.randn(4, 3, 36, 44, generator=torch.Generator().manual_seed(0))
    calibration = Calibration(model, images, sizes="free")
    assert [pair.refusal for pair in calibration.pairs if pair.refusal] == []
    assert sum(pair.shifted for pair in calibration.pairs) == 3
    quantized = calibration.quantize(fast)
    for size in [(52, 40), (41, 70)]:
        assert_same(model, calibration.program, of_size(*size))
        for executor in EXECUTORS:
            assert_agrees(quantized, executor, of_size(*size))


# --- attention over all tokens ----------------------------------------------------------------------------------------


def everywhere(m, x):
    """Attention over all patches of an image, however many there are."""
    x = m.embed(x).flatten(2).transpose(1, 2)
    q, k, v = m.qkv(x).chunk(3, -1)
    return m.head((x + F.scaled_dot_product_attention(q, k, v)).mean(1))


@pytest.fixture(scope="module")
def free_tokens(fast):
    torch.manual_seed(0)
    model = Toy(everywhere, embed=nn.Conv2d(3, 16, 4, 4), qkv=nn.Linear(16, 48), head=nn.Linear(16, 5)).eval()
    return Calibration(model, of_size(40, 56, 4), sizes="free").quantize(replace(fast, images=4))


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("size", [(40, 56), (12, 20), (64, 64), (120, 132)])
def test_attention_over_all_tokens_runs_at_every_size(free_tokens, executor, size):
    assert_agrees(free_tokens, executor, of_size(*size))


def test_sums_over_tokens_alone_are_made_for_more(free_tokens):
    terms = {name: site.terms for name, site in free_tokens.compile("reference").sites.items()}
    assert terms == {"embed": 48, "qkv": 16, "qk": 16, "av": FREE_TERMS, "head": 16}


@pytest.mark.slow
def test_more_tokens_than_the_sums_hold_are_refused(free_tokens):
    with pytest.raises(ProgramError, match=r"it sums 4,225 products, but its accumulators are made for at most 4,096"):
        free_tokens.compile("reference")(of_size(260, 260, 1))


def test_a_size_that_a_rule_cannot_be_computed_for_is_refused(free_tokens):
    """The quotient by (height - 44) exists at all heights but one."""

    def change(header):
        height = [HEIGHT, ["d", "sym.sub", [{"ref": "h"}, 44], {}, ""]]
        last = [["q", "sym.floordiv", [1, {"ref": "d"}], {}, ""], ["ok", "sym.lt", [{"ref": "q"}, 9], {}, ""]]
        header["rule"] = [[*height, *last], [{"ref": "ok"}]]

    loaded = deserialise(rebuilt(serialise(free_tokens), change))
    loaded(of_size(48, 56))
    with pytest.raises(ProgramError, match=r"program was not captured for inputs of \(3, 44, 56\)"):
        loaded(of_size(44, 56))


def test_shapes_that_are_taken_are_not_kept_without_end(free_tokens):
    quantized = replace(free_tokens.quantized)
    for width in range(4, 4 + 4 * _TAKEN, 4):
        quantized._known_shapes.add(((1, 3, 4, width),))
    quantized.check([torch.empty(1, 3, 8, 8, device="meta")])
    quantized.check([torch.empty(1, 3, 8, 12, device="meta")])
    assert len(quantized._known_shapes) == _TAKEN
