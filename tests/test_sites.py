"""What is read from a program: its multiplications, the sources of their operands, LayerNorm pairs and blocks."""

import dataclasses
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import adalog
import zoo
from adalog.graph.activations import POWER_LAW_ACTIVATIONS
from adalog.graph.capture import capture
from adalog.graph.rewrite import group_sites, rewrite
from adalog.graph.sites import (
    census,
    find_blocks,
    find_pairs,
    find_pieces,
    find_refused,
    find_sites,
    find_splits,
)
from adalog.quantizers import Assignment, Fold
from toys import IMAGES, SMALL_IMAGES, Toy, Unbound, all_values, assert_same

# --- counts ----------------------------------------------------------------------------------------------------------


# Linears, convolutions, Q K^T, A V, sites after a GELU, and pairs that fold.
SMALL = {
    "demo": (9, 3, 2, 2, 2, 5),
    "timm_vit": (9, 1, 2, 2, 2, 5),
    "timm_vit_extras": (5, 1, 1, 1, 1, 3),
    "timm_distilled": (10, 1, 2, 2, 2, 5),
    "timm_swin": (14, 1, 3, 3, 3, 7),
    "timm_swin_v2": (14, 1, 3, 3, 3, 0),
    "timm_pvt": (11, 5, 2, 2, 2, 4),
    "hf_vit": (13, 1, 2, 2, 2, 5),
    "hf_swin": (20, 1, 3, 3, 3, 7),
    "hf_beit": (13, 1, 2, 2, 2, 5),
    "hf_clip": (12, 1, 2, 2, 2, 4),
    "torchvision_vit": (9, 1, 2, 2, 2, 5),
    "torchvision_swin": (14, 1, 3, 3, 3, 7),
    "torchvision_swin_v2": (14, 1, 3, 3, 3, 0),
}
REFUSED = {
    "timm_swin_v2": ["add.Tensor in layers.0.blocks.0", "add.Tensor in layers.1.blocks.0"],
    "torchvision_swin_v2": ["add.Tensor in features.1.0", "add.Tensor in features.3.0"],
    "timm_pvt": ["conv2d.default in stages.0.blocks.0.attn.sr"],
}


@pytest.mark.parametrize("name", zoo.NAMES)
def test_small_models(name):
    _, program = zoo.captured(name)
    sites = find_sites(program)
    pairs = find_pairs(program, sites, (IMAGES[:2],))
    counts = census(program, sites, pairs)
    assert tuple(counts[key] for key in zoo.COUNTS) == SMALL[name]
    assert [pair.refusal for pair in pairs if pair.refusal] == [
        f"it also feeds {reader}" for reader in REFUSED.get(name, [])
    ]


# --- sites -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", zoo.NAMES)
def test_operands_are_values_of_the_program(name):
    _, program = zoo.captured(name)
    sites = find_sites(program)
    assert len({site.name for site in sites}) == len(sites)
    for site in sites:
        assert (site.left, site.right) == (site.node.args[0].name, site.node.args[1].name)
        stored = site.role in ("linear", "conv")
        assert (site.right in program.tensors) is stored
        assert (site.right_source.kind == "weight") is stored
        assert site.bias is None or program.tensors[site.bias].shape == program.tensors[site.right].shape[:1]


def test_sites_of_the_demo_model_by_name():
    _, program = zoo.captured("demo")
    sites = {site.name: (site.role, site.left_source.kind) for site in find_sites(program)}
    block = {
        "attn.qkv": ("linear", "layer_norm"),
        "attn.qk": ("qk", "other"),
        "attn.av": ("av", "softmax"),
        "attn.proj": ("linear", "other"),
        "mlp.fc1": ("linear", "layer_norm"),
        "mlp.fc2": ("linear", "gelu"),
    }
    expected = {"patch_embed.conv1": ("conv", "input")}
    expected |= {f"patch_embed.conv{index}": ("conv", "relu") for index in (2, 3)}
    expected |= {f"blocks.{index}.{name}": value for index in (0, 1) for name, value in block.items()}
    assert sites == expected | {"head": ("linear", "layer_norm")}


def source_of(function, **modules):
    """The source of the last site's left operand."""
    program = capture(Toy(function, fc=nn.Linear(32, 4), **modules).eval(), IMAGES)
    return find_sites(program)[-1].left_source


@pytest.mark.parametrize(
    "move",
    [
        lambda x: x,
        lambda x: x.flatten(1, 2).unsqueeze(0),
        lambda x: x.reshape(-1, 32),
        lambda x: x.transpose(1, 2).permute(0, 2, 1, 3),
        lambda x: x.unbind(1)[2],
        lambda x: x.split(8, dim=2)[1],
        lambda x: x.chunk(4, dim=2)[3][:, 0],
        lambda x: x.roll((1, 2), (1, 2))[:, :, ::2].flip(2),
        lambda x: x[:, 1:].expand(2, -1, -1, -1, -1).squeeze(),
        lambda x: F.dropout(x.contiguous().clone(), training=False).repeat(1, 2, 1, 1).to(torch.float32),
    ],
)
def test_sources_are_seen_through_moves(move):
    source = source_of(lambda m, x: m.fc(move(F.gelu(x))))
    assert source.kind == "gelu"
    assert source.minimum == pytest.approx(-0.16997120747990366, abs=1e-12)


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda m, x: x.flatten(1, 2), "input"),
        (lambda m, x: m.norm(x), "layer_norm"),
        (lambda m, x: F.gelu(x) + 1, "other"),
        (lambda m, x: F.silu(x) * x, "other"),
        (lambda m, x: (x + 1) * torch.sigmoid(1.702 * x), "other"),  # a product of two gates
    ],
)
def test_sources_that_are_no_activation(function, kind):
    assert source_of(lambda m, x: m.fc(function(m, x)), norm=nn.LayerNorm(32)).kind == kind


@pytest.mark.parametrize(
    ("function", "name", "why"),
    [
        (lambda m, x: F.linear(x[0, 0], x[0, 1]), "linear", "its weight is computed, not stored"),
        (lambda m, x: F.conv2d(x, x[:2, :, :3, :3]), "conv", "its weight is computed, not stored"),
        (lambda m, x: F.linear(x, m.mix, x[0, 0, 0, :8]), "linear", "its bias is computed, not stored"),
        (lambda m, x: m.mix @ x, "qk", "its left operand is a stored tensor"),
        (lambda m, x: m.conv3d(x[:, None]), "conv3d.conv3d", "conv3d is neither a linear"),
        (lambda m, x: m.up(x), "up.conv_transpose2d", "conv_transpose2d is neither a linear"),
    ],
)
def test_products_that_stay_float_say_why(function, name, why):
    modules = {"conv3d": nn.Conv3d(1, 2, 3)}
    modules |= {"up": nn.ConvTranspose2d(3, 4, 2, 2), "mix": nn.Parameter(torch.randn(8, 32)), "fc": nn.Linear(4, 4)}
    program = capture(Toy(lambda m, x: m.fc(function(m, x).flatten(1)[:, :4]), **modules), IMAGES)
    (refused,) = find_refused(program)
    assert refused.name == name
    assert refused.refusal.startswith(why)
    assert [site.name for site in find_sites(program)] == ["fc"]


def test_a_stored_right_operand_of_several_matrices_is_a_site():
    """A relative position table: queries by it are a product like that with keys."""
    program = capture(Toy(lambda m, x: x @ m.table, table=nn.Parameter(torch.randn(3, 32, 5))), IMAGES)
    (site,) = find_sites(program)
    assert (site.role, site.right_source.kind) == ("qk", "weight")
    assert site.right in program.tensors


def test_talking_heads_keep_their_roles():
    """Linears over the heads before and after the softmax hide it as a source, not as attention."""

    def function(model, x):
        weights = model.before((x @ x.transpose(-2, -1)).permute(0, 2, 3, 1)).softmax(2)
        return model.after(weights).permute(0, 3, 1, 2) @ x

    program = capture(Toy(function, before=nn.Linear(3, 3), after=nn.Linear(3, 3)), IMAGES)
    sites = {site.role: site.left_source.kind for site in find_sites(program)}
    assert sites == {"qk": "input", "linear": "softmax", "av": "other"}


@pytest.mark.parametrize("view", [lambda a: a.transpose(-2, -1), lambda a: a.permute(0, 1, 3, 2), lambda a: a])
def test_a_softmax_on_the_right_comes_left(view):
    """Channels-first models write V A^T."""
    model = Toy(lambda m, x: x @ view(x.softmax(-1)))
    program = capture(model, IMAGES)
    (site,) = find_sites(program)
    assert (site.role, site.left_source.kind, site.right_source.kind) == ("av", "softmax", "input")
    assert site.left_source.minimum == 0
    assert_same(model, program, IMAGES)


# --- minima ----------------------------------------------------------------------------------------------------------


# To 20 digits by mpmath: findroot of the derivative at 60 digits.
MINIMA = {
    "gelu": (F.gelu, -0.16997120747990366169),
    "gelu tanh": (lambda x: F.gelu(x, approximate="tanh"), -0.17004075057125405064),
    "silu": (F.silu, -0.27846454276107379511),
    "quick gelu": (lambda x: x * torch.sigmoid(1.702 * x), -0.16361018963635358115),
    "hardswish": (F.hardswish, -0.375),
    "mish": (F.mish, -0.30884341301725040663),
    "relu": (F.relu, 0.0),
}


@pytest.mark.parametrize(
    ("function", "name"),
    [
        *((function, name) for name, (function, _) in MINIMA.items()),
        (lambda x: torch.sigmoid(1.702 * x) * x, "quick gelu"),
        (lambda x: torch.sigmoid(x * 1.702) * x, "quick gelu"),
    ],
)
def test_activations_are_recognised_with_their_minimum(function, name):
    source = source_of(lambda m, x: m.fc(function(x)))
    assert source.kind == name.replace(" tanh", "").replace(" ", "_")
    assert (source.kind in POWER_LAW_ACTIVATIONS) == (name != "relu")
    assert source.minimum == pytest.approx(MINIMA[name][1], abs=1e-12)


# --- pairs -----------------------------------------------------------------------------------------------------------


def pairs_of(function, **modules):
    modules |= {"norm": nn.LayerNorm(32), "fc": nn.Linear(32, 4), "other": nn.Linear(32, 6)}
    program = capture(Toy(function, **modules).eval(), IMAGES)
    return find_pairs(program, find_sites(program), (IMAGES[:2],))


@pytest.mark.parametrize(
    ("function", "sites"),
    [
        (lambda m, x: m.fc(m.norm(x)), ["fc"]),
        (lambda m, x: (m.fc(m.norm(x)), m.other(m.norm(x))), ["fc", "other"]),
        (lambda m, x: (m.fc(m.norm(x)[:, 0]), m.other(m.norm(x)[:, 1])), ["fc", "other"]),
        (lambda m, x: m.fc(m.norm(x).roll(3, 2).reshape(-1, 3, 4, 8, 32).transpose(2, 3).flatten(0, 1)), ["fc"]),
        (lambda m, x: m.fc(m.norm(x).view(-1, 3, 4, 8, 32)) + m.norm(x).shape[0], ["fc"]),
    ],
)
def test_norms_that_only_linears_read_are_pairs(function, sites):
    (pair,) = pairs_of(function)
    assert pair.refusal == ""
    assert sorted(pair.sites) == sites
    assert pair.norm.op == "aten.layer_norm.default"


def both(m, x):
    return m.fc(m.norm(x)), m.other(m.norm(x))


@pytest.mark.parametrize(
    ("function", "norm", "kind"),
    [
        (lambda m, x: m.fc(F.pad(m.norm(x), (0, 0, 0, 3, 1, 2))), nn.LayerNorm(32), "other"),
        (
            lambda m, x: m.fc(F.pad(m.norm(x), (0, 0, -2, 3), "constant", 0.0).roll(3, 2).flatten(1, 2)),
            nn.LayerNorm(32),
            "other",
        ),
        (lambda m, x: m.fc(torch.constant_pad_nd(m.norm(x), (0, 0, 1, 1))), nn.LayerNorm(32), "other"),
        (lambda m, x: (m.fc(m.norm(x)), m.other(F.pad(m.norm(x), (0, 0, 1, 1)))), nn.LayerNorm(32), "layer_norm"),
        (both, nn.RMSNorm(32), "rms_norm"),
        (both, nn.LayerNorm(32, bias=False), "layer_norm"),
    ],
)
def test_norms_with_zeros_around_or_without_a_bias_are_folded_exactly(function, norm, kind):
    """The norm keeps the scale; what the zeros or a bias would lose as well is taken off behind it."""
    torch.manual_seed(0)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    images = IMAGES.double()
    model = Toy(function, norm=norm, fc=nn.Linear(32, 4), other=nn.Linear(32, 6)).double().eval()
    program = capture(model, images)
    sites = find_sites(program)
    (pair,) = find_pairs(program, sites, (images[:2],))
    assert pair.shifted
    assert not pair.refusal
    assert sites[0].left_source.kind == kind
    fold = Fold(torch.rand(32).double() + 0.5, torch.randn(32).double())
    folded = rewrite(program, [(group, Assignment(None, None, fold)) for group in group_sites(sites, [pair])])
    torch.testing.assert_close(folded.run([images]), model(images), rtol=0, atol=1e-12)
    reading = [sites[0]] * len(sites) if function is both else sites  # one shift for equal inputs
    shifted = [folded.makers[site.node.name].args[0].name for site in sites]
    assert shifted == [f"{site.name}.shifted" for site in reading]
    assert torch.equal(folded.tensors["norm.weight"], norm.weight / fold.ratio)


ROWS = (0, 0, 1, 1)
MIXED = "its channels are mixed with positions before"


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda m, x: (m.conv(m.norm(x)), m.fc(m.norm(x))), "it also feeds conv2d.default in conv"),
        (lambda m, x: (m.fc(m.norm(x)), m.norm(x).roll(1, 2) + x), "it also feeds add.Tensor in the model"),
        (lambda m, x: (m.fc(m.norm(x)), F.pad(m.norm(x), ROWS, value=1.0)), "it also feeds pad.default in the model"),
        (lambda m, x: (m.fc(m.norm(x)), F.pad(m.norm(x), ROWS, "reflect")), "it also feeds pad.default in the model"),
        (lambda m, x: m.fc(F.pad(m.norm(x), (-1, 1, 1, 1))), f"{MIXED} fc"),
        (lambda m, x: (m.fc(m.norm(x)), m.norm(x)), "it is an output of the model"),
        (lambda m, x: (m.fc(m.norm(x)), m.norm(x)[:, 0]), "it is an output of the model"),
        (lambda m, x: m.fc(m.norm(x).transpose(2, 3)), f"{MIXED} fc"),
        (lambda m, x: m.fc(m.norm(x).reshape(-1, 16, 64)[..., 32:].flip(2)), f"{MIXED} fc"),
        (lambda m, x: F.linear(m.norm(x).flatten(2), m.wide), f"{MIXED} wide"),
        (lambda m, x: m.fc(m.plain(x)), "it has no stored weight to fold into"),
        (lambda m, x: m.fc(F.rms_norm(x, (32,), m.norm(x)[0, 0, 0])), "it has no stored weight to fold into"),
        (lambda m, x: m.fc(F.layer_norm(x, (32,), m.own, m.own)), "it has no stored bias of its own to fold into"),
        (lambda m, x: m.fc(m.square(x)), "it normalises more than the channels"),
    ],
)
def test_other_norms_are_refused_in_writing(function, why):
    norms = {"plain": nn.LayerNorm(32, elementwise_affine=False), "square": nn.LayerNorm((32, 32))}
    norms["own"] = nn.Parameter(torch.randn(32))
    (pair,) = pairs_of(function, conv=nn.Conv2d(3, 4, 3), wide=nn.Parameter(torch.randn(4, 1024)), **norms)
    assert pair.refusal == why


def test_a_norm_that_feeds_no_linear_is_no_pair():
    assert pairs_of(lambda m, x: m.norm(x) * 2) == []


# --- blocks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", zoo.NAMES)
def test_blocks_and_pieces_cut_the_whole_program(name):
    _, program = zoo.captured(name)
    blocks, pieces = find_blocks(program), find_pieces(program)
    for parts in (blocks, pieces):
        assert [node for part in parts for node in part.nodes] == [node.name for node in program.nodes]
        assert parts[0].value_in == program.inputs[0]
        for before, after in itertools.pairwise(parts):
            assert after.value_in == before.value_out == before.nodes[-1]
    softmaxes = [sum(program.makers[node].op == "aten.softmax.int" for node in block.nodes) for block in blocks]
    assert softmaxes == [0, *(1 for _ in blocks[1:-1]), 0]
    assert sum(softmaxes) == SMALL[name][3]
    products = {site.node.name for site in find_sites(program)}
    assert all(products & set(piece.nodes) for piece in pieces[1:])
    assert len(pieces) > len(blocks)


def test_pieces_of_a_vit_are_attentions_and_mlps():
    _, program = zoo.captured("demo")
    nodes = {site.node.name: site.name for site in find_sites(program)}
    pieces = [[nodes[node] for node in piece.nodes if node in nodes] for piece in find_pieces(program)]
    attention, mlp = ["attn.qkv", "attn.qk", "attn.av", "attn.proj"], ["mlp.fc1", "mlp.fc2"]
    blocks = [[f"blocks.{index}.{name}" for name in part] for index in range(2) for part in (attention, mlp)]
    assert pieces == [*([f"patch_embed.conv{index}"] for index in (1, 2, 3)), *blocks, ["head"]]


@pytest.mark.parametrize("name", zoo.NAMES)
def test_a_block_reads_its_value_and_what_no_image_changes(name):
    """Outside its own nodes: the value in, tensors, and numbers or tables that are the same for other images."""
    _, program = zoo.captured(name)
    seen = [all_values(program, [images]) for images in (IMAGES, IMAGES.flip(0))]
    for block in (*find_blocks(program), *find_pieces(program)):
        inside = set(block.nodes)
        outside = {ref for node in program.nodes if node.name in inside for ref in node.refs()} - inside
        for value in outside - {block.value_in} - set(program.tensors) - set(program.inputs):
            first, second = (values[value] for values in seen)
            assert first is second or (torch.equal(first, second) if torch.is_tensor(first) else first == second)


@pytest.mark.parametrize(
    ("name", "scopes"),
    [
        ("demo", ["", "blocks.0", "blocks.1", "head"]),
        ("timm_vit", ["", "blocks.0", "blocks.1", "head"]),
        pytest.param("timm_distilled", ["", "blocks.0", "blocks.1", ""], marks=pytest.mark.slow),
    ],
)
def test_blocks_of_a_vit_are_its_transformer_blocks(name, scopes):
    _, program = zoo.captured(name)
    blocks = find_blocks(program)
    assert [program.makers[block.value_out].scope for block in blocks] == scopes
    for block, scope in zip(blocks[1:-1], scopes[1:-1], strict=True):
        assert all(program.makers[node].scope.startswith(scope) for node in block.nodes)


def test_a_network_without_attention_is_one_block():
    program = capture(Toy(lambda m, x: m.fc(x).relu(), fc=nn.Linear(32, 4)), IMAGES)
    (block,) = find_blocks(program)
    assert block.nodes == tuple(node.name for node in program.nodes)


# --- heads -----------------------------------------------------------------------------------------------------------


class Heads(nn.Module):
    """Attention with two heads of eight over maps (B, H, W, 16), however its operands are laid out."""

    def __init__(self, layout):
        super().__init__()
        torch.manual_seed(0)
        self.layout, self.q, self.kv = layout, nn.Linear(16, 16), nn.Linear(16, 16 if layout == "shared" else 32)

    def forward(self, x):
        if self.layout == "rows of maps":
            q, k, v = self.q(x), *self.kv(x).chunk(2, -1)
        else:
            q, kv = self.q(x).flatten(1, 2).unflatten(-1, (2, 8)), self.kv(x).flatten(1, 2).unflatten(-1, (-1, 8))
            order = (2, 0, 1, 3) if self.layout == "heads first" else (0, 2, 1, 3)
            q, (k, v) = q.permute(order), kv.permute(order).chunk(2, 0 if self.layout == "heads first" else 1)
        attended = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return attended.mean((0, 2) if self.layout == "heads first" else (1, 2))


LAYOUTS = {"usual": (2, 2), "shared": (2, 1), "heads first": (1, 1), "rows of maps": (1, 1)}  # scales of Q and K


@pytest.mark.parametrize("layout", LAYOUTS)
def test_heads_alone_have_scales_of_their_own(layout):
    """Not images, nor the rows of a map, nor keys that all heads share."""
    x = torch.randn(4, 4, 5, 16, generator=torch.Generator().manual_seed(1))
    sizes = "free" if layout == "rows of maps" else "fixed"
    images = x.permute(0, 3, 1, 2)
    model = Toy(lambda self, image: self.heads(image.permute(0, 2, 3, 1)), heads=Heads(layout)).eval()
    config = dataclasses.replace(adalog.Config.preset("w4a4", "minmax"), images=4, per_head=True)
    quantized = adalog.quantize(model, images, config, sizes=sizes)
    scales = {name: value.scale.numel() for name, value in quantized.program.quantizers.items()}
    assert (scales["heads.qk.left"], scales["heads.qk.right"]) == LAYOUTS[layout]
    if layout == "heads first":  # its mean is over heads, so that images are apart
        assert torch.allclose(quantized(images.flip(0)), quantized(images).flip(0), atol=1e-6)
    assert len(quantized(images[:2])) == 2
    if sizes == "free":
        assert quantized(images.repeat(1, 1, 2, 2)).shape == quantized(images).shape


def test_lists_are_no_borders_of_blocks():
    program = capture(Unbound(lambda y: y).eval(), SMALL_IMAGES)
    lists = {node.args[0].name for node in program.nodes if node.op == "getitem"}
    assert lists
    blocks = find_blocks(program)
    assert lists.isdisjoint({block.value_out for block in blocks} | {block.value_in for block in blocks})


def parts_of(model, images):
    program = capture(model.eval(), (images,))
    return find_splits(program, find_sites(program), [images])


def test_queries_keys_and_values_of_one_linear_are_three_parts():
    model = zoo.timm_vit(depth=1)
    parts = parts_of(model, zoo.IMAGES[:2])
    assert parts["blocks.0.attn.qkv"].tolist() == [0] * 48 + [1] * 48 + [2] * 48
    for name in ("blocks.0.attn.proj", "blocks.0.mlp.fc1", "blocks.0.mlp.fc2"):
        assert set(parts[name].tolist()) == {0}


def gated(m, x):
    parts = m.both(x).reshape(-1, 4, 2)
    return m.out(parts[..., 0] * torch.sigmoid(parts[..., 1]))


def test_interleaved_parts_are_told_apart():
    parts = parts_of(Toy(gated, both=nn.Linear(6, 8), out=nn.Linear(4, 3)), torch.randn(2, 6))
    assert parts["both"].tolist() == [0, 1] * 4
    assert parts["out"].tolist() == [0, 0, 0]
