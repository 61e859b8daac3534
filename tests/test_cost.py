"""Costs against counts made by hand from the architectures, and against what a model really multiplies."""

import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from adalog import Calibration, Config, artifact
from adalog.graph.capture import capture
from adalog.graph.operations import FLOAT_PRODUCTS, OPERATIONS, PRODUCTS
from adalog.quantizers import LogQuantizer
from adalog.study.cost import _MULTIPLICATIONS, _REDUCING, PRODUCT_ROLES, Cost, CostRow, cost
from stored import serialise
from toys import Toy
from zoo import IMAGES, NAMES, captured

TINY = [(3, 32, 32)]  # the input of DemoViT


def counts(found, role):
    return [row.count for row in found.rows if row.role == role]


def vit_macs(size, patch, width, depth, heads, classes, tokens_more=1, mlp=4):
    """Role -> MACs of a plain ViT, from its description."""
    patches = (size // patch) ** 2
    tokens = patches + tokens_more
    block = tokens * width * (3 * width) + tokens * width * width + 2 * tokens * width * (mlp * width)
    attention = heads * tokens * tokens * (width // heads)
    head = width * classes
    return {
        "conv": patches * (3 * patch * patch) * width,
        "linear": depth * block + head,
        "qk": depth * attention,
        "av": depth * attention,
    }


@pytest.mark.slow
def test_deit_tiny_is_20_1_billion():
    """The float figure of the paper's Table 3, and DeiT-T's parameters in bytes."""
    timm = pytest.importorskip("timm")
    model = timm.create_model("deit_tiny_patch16_224").eval()
    found = cost(capture(model, torch.zeros(2, 3, 224, 224)), [(3, 224, 224)])
    expected = vit_macs(224, 16, 192, 12, 3, 1000)
    assert {role: row.count for role, row in found.by_role().items() if role in PRODUCT_ROLES} == expected
    assert found.macs == sum(expected.values()) == 1_253_683_200
    assert round(found.fixops / 1e9, 1) == 20.1
    parameters = sum(value.numel() for value in model.parameters())
    assert sum(found.size_bytes.values()) == pytest.approx(4 * parameters, abs=16)  # and the attention's scale
    assert counts(found, "softmax") == [3 * 197 * 197] * 12
    assert counts(found, "layer_norm") == [3 * 197 * 192] * 25


@pytest.mark.parametrize("name", NAMES)
def test_macs_are_those_torch_counts(name):
    """PyTorch's own counter, on a batch of three: cost is for one image. All operands are float."""
    _, program = captured(name)
    found = cost(program, TINY)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        program.run((IMAGES[:3],))
    assert 2 * 3 * found.macs == counter.get_total_flops()
    assert {(row.left_bits, row.right_bits) for row in found.products} == {(32, 32)}
    assert (found.fixops, found.bops) == (16 * found.macs, 1024 * found.macs)
    if name == "timm_vit":
        assert {role: sum(counts(found, role)) for role in PRODUCT_ROLES} == vit_macs(32, 8, 48, 2, 3, 10)


# --- quantized models ------------------------------------------------------------------------------------------------

WIDTH, HIDDEN, HEADS = 32, 128, 2  # of the tiny DemoViT, which has two blocks


@pytest.fixture(scope="module")
def mixed(calibration, fast):
    """Five-bit weights, four-bit activations, three-bit softmax."""
    return calibration.quantize(replace(fast, weight_bits=5, activation_bits=4, softmax_bits=3))


def by_name(found, *roles):
    return {row.name: row for row in found.rows if row.role in roles}


@pytest.mark.slow
@pytest.mark.parametrize("as_printed", [False, True])
def test_bits_and_counts_of_every_product(calibration, mixed, as_printed):
    """Of a logarithmic operand the integers of the table that runs, or a mantissa of one bit more than its code."""
    found = cost(mixed.program, TINY, as_printed=as_printed)
    rows = by_name(found, *PRODUCT_ROLES)
    running = mixed.compile("reference").sites
    assert [row.name for row in found.products] == [entry.site for entry in mixed.ledger]
    for entry in mixed.ledger:
        row, left = rows[entry.site], running[entry.site].left
        assert row.role == entry.role
        if row.role == "qk":
            bits = (4, 4)
        elif entry.source in ("softmax", "gelu"):
            assert int(left.table_integers().max()) < 2**left.width
            bits = (left.bits + 1 if as_printed else left.width, 4 if row.role == "av" else 5)
            assert left.bits == (3 if row.role == "av" else 4)
        elif row.role == "conv":
            bits = (8 if entry.source == "input" else 4, 5)
        else:
            bits = (4, 5)
        assert (row.left_bits, row.right_bits) == bits
        assert row.bops == row.count * bits[0] * bits[1]
    float_cost = cost(calibration.program, TINY)
    assert found.macs == found.integer_macs == float_cost.macs
    assert float_cost.integer_macs == float_cost.table_bytes == 0


@pytest.mark.parametrize("as_printed", [False, True])
def test_logarithmic_operands_are_looked_up(mixed, as_printed):
    """As printed, twice, and their products are shifted; otherwise in tables of one or two bytes for each code."""
    found = cost(mixed.program, TINY, as_printed=as_printed)
    products, shifts = by_name(found, *PRODUCT_ROLES), by_name(found, "shift")
    assert shifts.keys() == {row.site for row in mixed.ledger if as_printed and row.source in ("softmax", "gelu")}
    assert all(row.count == products[name].count and row.bops == 0 for name, row in shifts.items())
    elements, look_ups = by_name(found, "quantize"), by_name(found, "look-up")
    quantizers = {name: each for name, each in mixed.program.quantizers.items() if isinstance(each, LogQuantizer)}
    assert look_ups.keys() == quantizers.keys()
    assert all(row.count == (1 + as_printed) * elements[name].count for name, row in look_ups.items())
    tables = {} if as_printed else {name: each.table_integers() for name, each in quantizers.items()}
    assert found.table_bytes == sum(len(table) * quantizers[name].width // 8 for name, table in tables.items())
    assert found.table_bytes >= sum(len(table) * (1 if table.max() < 256 else 2) for table in tables.values())


def test_what_stays_in_float(mixed):
    """All that the summary lists, counted or free: two blocks, each of two norms and two residuals."""
    found = cost(mixed.program, TINY).float_operations
    assert found == mixed.float_operations()
    assert (found["layer_norm"], found["softmax"], found["gelu"]) == (5, 2, 2)
    assert found["add"] == 2 * 2 + 1  # and the positions
    assert not {"linear", "matmul", "conv2d"} & found.keys()


def test_requantization_is_one_multiplication_an_element(mixed, images):
    """Every value that a quantizer sees, and every value that a product puts out."""
    seen = {"quantize": {}, "dequantize": {}}

    def watch(node, args, result):
        if node.op == "adalog.fake_quantize":
            seen["quantize"][node.name] = args[0][0].numel()
        elif node.op.removeprefix("aten.").split(".")[0] in ("linear", "conv2d", "matmul", "bmm"):
            seen["dequantize"][node.name] = result[0].numel()

    mixed.program.run((images,), watch)
    found = cost(mixed.program, TINY)
    assert {row.name: row.count for row in found.rows if row.role == "quantize"} == seen["quantize"]
    assert counts(found, "dequantize") == list(seen["dequantize"].values())
    assert {(row.left_bits, row.right_bits) for row in found.rows if row.role.endswith("quantize")} == {(32, 32)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "tables", "bits"),
    [
        ("log2", "float", 0),
        ("adalog", "float", 5),
        ("adalog", "u8", 8),
        pytest.param("log-sqrt2", "float", 32, marks=pytest.mark.slow),
        pytest.param("uniform", "u8", 4, marks=pytest.mark.slow),
        pytest.param("log2", "u16", 16, marks=pytest.mark.slow),
    ],
)
def test_what_multiplies_after_the_softmax(calibration, fast, method, tables, bits):
    """The integers of a table are multiplied.

    Without a table, log2 has a single mantissa and nothing to multiply, log-sqrt2 multiplies floats, and AdaLog has
    bits + 1 mantissas.
    """
    config = replace(Config.preset("w4a4", method), images=4, search=fast.search, tables=tables)
    found = cost(calibration.quantize(config).program, TINY)
    assert {row.left_bits for row in found.rows if row.role == "av"} == {bits}
    assert bool(counts(found, "look-up")) == ((method, tables) != ("log2", "float") and method != "uniform")
    assert bool(counts(found, "shift")) == (method != "uniform" and tables == "float")


def test_bytes(mixed):
    """Codes, scales and zero points are those of the artifact, which may store floats in half the bytes."""
    found = cost(mixed.program, TINY)
    weights = mixed.program.weights
    assert found.size_bytes["codes"] == sum(math.ceil(weight.codes.numel() * 5 / 8) for weight in weights.values())
    channels = sum(len(weight.codes) for weight in weights.values())
    assert (found.size_bytes["scale"], found.size_bytes["zero_point"]) == (4 * channels, channels)
    floats = [value for name, value in mixed.program.tensors.items() if name not in weights]
    assert found.size_bytes["float"] == sum(4 * value.numel() for value in floats)
    stored = {part: found.size_bytes[part] for part in ("codes", "scale", "zero_point")}
    assert sum(row.weight_bytes for row in found.rows) == sum(stored.values())
    in_file = artifact.sizes(serialise(mixed))
    assert {part: in_file[part] for part in stored} == stored
    assert found.size_bytes["float"] / 2 <= in_file["float"] <= found.size_bytes["float"]


# --- what multiplies, and what does not ------------------------------------------------------------------------------

# Moves, comparisons, additions, roots, exponentials and whole numbers.
FREE = """
abs add amax amin arange argmax bitwise_and bitwise_not bitwise_or cat ceil chunk clamp clamp_max clamp_min col2im
constant_pad_nd cos cumsum embedding eq erf exp expand expand_as flatten flip floor full full_like gather ge gt hardtanh
im2col index index_put index_select le log log_sigmoid log_softmax logical_and logical_not logical_or lt masked_fill max
max_pool2d maximum meshgrid min minimum movedim narrow ne neg ones ones_like pad permute pixel_shuffle pixel_unshuffle
relu relu6 repeat repeat_interleave reshape reshape_as roll round rsub scatter scatter_add select select_scatter sigmoid
sign sin slice slice_scatter sort split split_with_sizes sqrt squeeze stack sub sum sym_size t tanh to topk transpose
tril triu unbind unflatten unsqueeze upsample_nearest2d where zeros zeros_like
"""


def test_every_operation_is_counted_or_free():
    counted = {*_MULTIPLICATIONS, *_REDUCING, *PRODUCTS, *FLOAT_PRODUCTS}
    assert counted <= OPERATIONS
    free = {op for op in OPERATIONS - counted if op.startswith("aten.")} - {"aten.pow.Scalar"}  # an exponential
    assert {op.removeprefix("aten.").split(".")[0] for op in free} == set(FREE.split())


def functions(_, x):
    x = nn.functional.rms_norm(x, (8,)) + nn.functional.elu(x) + x.square() + torch.rsqrt(x.abs() + 1)
    return nn.functional.glu(x) + x.std(-1, correction=1, keepdim=True)


def test_multiplications_of_functions():
    found = cost(capture(Toy(functions), torch.randn(2, 5, 8)), [(5, 8)])
    names = ("rms_norm", "elu", "square", "rsqrt", "glu", "std")
    assert [sum(counts(found, name)) for name in names] == [3 * 40, 40, 40, 40, 20, 40]


@pytest.mark.parametrize(
    ("layer", "shape", "macs"),
    [
        (nn.Conv1d(4, 6, 3, groups=2), (4, 9), 6 * 7 * 2 * 3),
        (nn.Conv3d(2, 3, (1, 2, 3), padding=(0, 0, 1)), (2, 4, 5, 6), 3 * 4 * 4 * 6 * 2 * 6),
        (nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), (4, 5, 7), 4 * 5 * 7 * 3 * 9),
        (Toy(lambda m, x: nn.functional.linear(x, m.layer.weight.abs()), layer=nn.Linear(8, 3)), (5, 8), 5 * 8 * 3),
    ],
)
def test_products_that_are_no_sites(layer, shape, macs):
    """They multiply float32 numbers, and so are MACs of 32 by 32 bits."""
    program = capture(layer.eval(), torch.randn(2, *shape))
    (row,) = cost(program, [shape]).products
    assert (row.count, row.left_bits, row.right_bits) == (macs, 32, 32)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        program.run((torch.randn(3, *shape),))
    assert 2 * 3 * macs == counter.get_total_flops()


# --- convolutions, shapes, totals ------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=12)
@given(
    st.sampled_from([(1, 4, 6), (2, 4, 6), (3, 6, 9), (6, 6, 6)]),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.integers(1, 2),
    st.integers(0, 1),
    st.tuples(st.integers(5, 11), st.integers(5, 11)),
)
def test_convolutions_grouped_and_odd(channels, kernel, stride, padding, size):
    """Each output sees kernel height x kernel width x (inputs / groups) values; padding counts."""
    groups, inputs, outputs = channels
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, groups=groups)
    found = cost(capture(conv, torch.randn(2, inputs, *size)), [(inputs, *size)])
    height, width = ((size[i] + 2 * padding - kernel[i]) // stride + 1 for i in (0, 1))
    assert found.macs == height * width * outputs * kernel[0] * kernel[1] * (inputs // groups)
    assert [row.role for row in found.rows] == ["conv"]


def test_a_depthwise_convolution_quantized(fast):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1, groups=6), nn.GELU(), nn.Conv2d(6, 5, 1))
    quantized = Calibration(model, torch.randn(4, 6, 7, 9)).quantize(fast)
    found = cost(quantized.program, [(6, 7, 9)])
    first, second = found.products
    assert (first.count, first.left_bits, first.right_bits) == (7 * 9 * 6 * 9, 8, 4)
    assert (second.count, second.right_bits) == (7 * 9 * 5 * 6, 4)
    assert second.left_bits in (8, 16)  # of a table
    assert counts(found, "quantize") == [6 * 7 * 9, 6 * 7 * 9]
    assert counts(found, "dequantize") == [6 * 7 * 9, 5 * 7 * 9]
    assert counts(found, "gelu") == [3 * 6 * 7 * 9]


def test_a_weight_that_serves_twice_is_stored_once():
    model = Toy(lambda m, x: m.layer(torch.relu(m.layer(x))), layer=nn.Linear(6, 6))
    found = cost(capture(model, torch.randn(2, 5, 6)), [(5, 6)])
    assert counts(found, "linear") == [5 * 36, 5 * 36]
    assert [row.weight_bytes for row in found.products] == [4 * 36, 0]
    assert found.size_bytes["float"] == 4 * (36 + 6)


@pytest.mark.slow
@settings(max_examples=100)
@given(
    st.lists(
        st.builds(
            CostRow,
            *(st.text("ab", max_size=2), st.sampled_from([*PRODUCT_ROLES, "gelu", "shift", "quantize"])),
            *(st.integers(0, most) for most in (10**12, 32, 32, 10**6)),
        )
    )
)
def test_totals_are_sums(rows):
    found = Cost(tuple(rows), {})
    roles = found.by_role()
    assert roles.keys() == {row.role for row in rows}
    for name in ("count", "bops", "weight_bytes"):
        assert sum(getattr(role, name) for role in roles.values()) == sum(getattr(row, name) for row in rows)
    for each in (*rows, *roles.values()):
        assert each.fixops == pytest.approx(each.bops / 64)
    products = [row for row in rows if row.role in PRODUCT_ROLES]
    assert found.macs == sum(row.count for row in products)
    assert found.bops == sum(row.count * row.left_bits * row.right_bits for row in products)
    everything = sum(row.count * row.left_bits * row.right_bits for row in rows) / 64
    assert found.fixops + found.elementwise_fixops == pytest.approx(everything)


def test_nothing_is_computed_and_nothing_changed(mixed, images):
    before = mixed(images)
    cost(mixed.program, TINY)
    assert torch.equal(mixed(images), before)


@pytest.mark.parametrize("shapes", [[(3, 48, 32)], [(1, 32, 32)], [(3, 32)], [], [(3, 32, 32)] * 2])
def test_wrong_inputs_are_refused(mixed, shapes):
    with pytest.raises(ValueError, match="does not run on inputs of"):
        cost(mixed.program, shapes)


def test_json(mixed):
    told = json.loads(json.dumps(cost(mixed.program, TINY).to_json()))
    assert told["fixops"] == told["bops"] / 64 == sum(told["roles"][role]["fixops"] for role in PRODUCT_ROLES)
    assert {row["role"] for row in told["rows"]} == told["roles"].keys()


def test_inputs_have_the_types_that_they_were_made_with():
    class Masked(nn.Linear):
        def forward(self, x, mask):
            return super().forward(x.masked_fill(mask, 0.0))

    given = torch.randn(2, 3, 4), torch.zeros(2, 3, 4, dtype=torch.bool)
    program = capture(Masked(4, 2).eval(), given)
    assert counts(cost(program, given), "linear") == [3 * 4 * 2]
    with pytest.raises(ValueError, match=r"shape \(3, 4\), \(3, 4\)"):
        cost(program, [(3, 4), (3, 4)])
