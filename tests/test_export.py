"""Exports beside the exact integers, in the engines themselves, and certificates that notice what was changed."""

import functools
import json
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import adalog
from adalog import ArtifactError, Calibration, Config, Search, export
from adalog.export import onnx as written
from adalog.export.certificate import Certificate, SiteReport, certify, changed_tensors, graph_digest, judge, read
from adalog.export.engines import open_engine
from adalog.export.operands import _cells
from adalog.export.replay import MAKERS, ProgramModule
from adalog.graph.capture import capture
from adalog.graph.program import ModelOutput, Ref, present_leaves
from adalog.graph.rewrite import group_sites, rewrite
from adalog.graph.sites import find_sites
from adalog.inputs.zoo import DEMO_PREPROCESSING
from adalog.quantized import QuantizedProgram
from adalog.quantizers import Assignment, LogQuantizer, UniformQuantizer
from adalog.runtime.integer.encode import value_thresholds
from commands import call, refusal, run, say
from toys import Toy

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

ROOT = Path(__file__).parent.parent
FAST = Config(images=4, search=Search(init=(8, 4), parents=4, rounds=1, steps=0), stages=())


def attention(self, x):
    tokens = F.gelu(self.embed(x)).flatten(2).transpose(1, 2)
    q, k, v = self.qkv(self.norm(tokens)).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4).unbind(0)
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask).transpose(1, 2).flatten(2)
    return self.head(F.gelu(self.fc(mixed)).mean(1))


def convolutions(self, x):
    x = F.relu(self.padded(x))
    x = F.gelu(self.depthwise(x))
    x = F.gelu(self.grouped(x))
    return self.head(x.mean((2, 3)))


def indices(self, x):
    """Operations that choose values by their size or by places."""
    maps = self.embed(x)
    tokens = maps.flatten(2).transpose(1, 2)
    best, places = tokens.topk(4, dim=1)
    mixed = torch.zeros_like(tokens).scatter(1, places, best).scatter_add(1, places, tokens)
    mixed[:, [1, 3]] = best[:, :2]
    mixed[mixed > 1] = 0.5
    grid = torch.tanh(tokens[:, None, :, :2])
    sampled = F.grid_sample(maps, grid, align_corners=False).flatten(2).transpose(1, 2)
    windows = mixed.sort(1)[0].unfold(1, 3, 2).mean(-1)
    return self.head(F.gelu(windows.logsumexp(1) + sampled.nan_to_num().mean(1)))


def toy(kind):
    if kind == "indices":
        return Toy(indices, embed=nn.Conv2d(3, 16, 8, 8), head=nn.Linear(16, 5))
    if kind == "attention":
        mask = torch.zeros(16, 16).masked_fill(torch.ones(16, 16).triu(9).bool(), -4.0)
        parts = {"embed": nn.Conv2d(3, 16, 8, 8), "norm": nn.LayerNorm(16), "qkv": nn.Linear(16, 48)}
        return Toy(attention, **parts, fc=nn.Linear(16, 24), head=nn.Linear(24, 5), mask=nn.Buffer(mask))
    padded, depthwise = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 1, 1, groups=8)
    grouped = nn.Conv2d(8, 12, 3, 2, 2, dilation=2, groups=2)
    return Toy(convolutions, padded=padded, depthwise=depthwise, grouped=grouped, head=nn.Linear(12, 5))


@pytest.fixture(scope="module")
def quantize(images):
    """A function that quantizes a toy; toys of one kind share their capture, and equal choices their result."""

    @functools.cache
    def calibrated(kind):
        return Calibration(toy(kind).eval(), images)

    @functools.cache
    def make(kind, bits, **choices):
        config = replace(FAST, weight_bits=bits, activation_bits=bits, softmax_bits=bits, **choices)
        return calibrated(kind).quantize(config).quantized

    return make


@pytest.fixture(scope="module")
def write(quantize):
    """A function that writes the file of the attention toy at 4 bits, each form once."""

    @functools.cache
    def make(form, selects=False):
        return written.to_onnx(quantize("attention", 4), form, "digest", selects=selects)

    return make


@pytest.fixture(scope="module")
def vit(tiniest, images):
    """A quantized vision transformer with one block."""
    return Calibration(tiniest, images).quantize(FAST)


@pytest.fixture(scope="module")
def exported(vit, tmp_path_factory):
    """A folder with an artifact, the file that `adalog export` makes of it, and the JSON that the command writes."""
    folder = tmp_path_factory.mktemp("exported")
    vit.save(folder / "vit.safetensors")
    run("export", folder / "vit.safetensors", "-o", folder / "vit.onnx", "--json", folder / "told.json")
    return folder


@pytest.fixture(scope="module")
def one(quantize, write):
    """A quantized program, the digest that stands for its artifact, and its file."""
    return quantize("attention", 4), "digest", write("integer")


def assert_certified(quantized, form, images, engine="onnxruntime"):
    content = written.to_onnx(quantized, form, "digest")
    found = certify(quantized, "digest", content, [(images,)], engine=engine, executor="reference")
    assert found.passed, found.failures
    assert found.accumulators_equal
    assert len(found.sites) == len(ProgramModule(quantized, MAKERS[form]).sites) > 0
    assert sum(site.off for site in found.sites) <= sum(site.operands for site in found.sites) * 1e-4
    assert found.images == len(images)
    return content


def test_both_forms_are_certified(one, images):
    quantized, _, content = one
    found = certify(quantized, "digest", content, [(images[:1],), (images,)], executor="reference")
    assert found.passed, found.failures
    assert found.accumulators_equal
    assert found.images == 5
    assert "PASSED: integer form in onnxruntime" in found.text()
    assert 0 <= found.own_error < 0.1
    assert json.loads(json.dumps(found.json()))["passed"] is True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "bits", "form", "choices"),
    [
        *(("attention", 3, form, {"tables": "u8"}) for form in export.FORMS),
        *(("attention", 4, form, {"tables": "u16"}) for form in export.FORMS),
        *(("attention", 8, form, {}) for form in export.FORMS),
        ("convolutions", 3, "mixed", {"tables": "u8"}),
        ("convolutions", 6, "integer", {"tables": "u16"}),
        ("convolutions", 6, "mixed", {"post_gelu": "twin"}),
        ("convolutions", 8, "integer", {}),
        *(("attention", 4, form, {"post_gelu": "twin"}) for form in export.FORMS),
        ("indices", 8, "mixed", {}),
    ],
)
def test_widths_and_quantizers(quantize, images, kind, bits, form, choices):
    assert_certified(quantize(kind, bits, **choices), form, images)


@pytest.mark.slow
@pytest.mark.parametrize("form", export.FORMS)
def test_openvino(quantize, write, images, form):
    pytest.importorskip("openvino")
    quantized = quantize("attention", 4)
    content = write(form)  # OpenVINO rounds its thresholds a little, as the page says
    found = certify(quantized, "digest", content, [(images,)], engine="openvino")
    assert found.accumulators_equal
    assert all(site.off <= max(5, site.operands // 200) for site in found.sites)
    content = write(form, selects=True)
    assert certify(quantized, "digest", content, [(images,)], engine="openvino").passed
    description, numbers = export.to_openvino(content)
    assert description.startswith(b"<?xml")
    assert len(numbers) > 0


def test_openvino_rounds_signed_bytes_as_the_artifact_does(write):
    """Also values near the edge of two codes, which its QuantizeLinear takes for the other code."""
    pytest.importorskip("openvino")
    helper, scale = onnx.helper, 0.6717
    edges = (np.arange(-4, 4) + 0.5) * scale
    values = np.concatenate([edges * (1 - 4e-6), edges * (1 + 4e-6)]).astype(np.float32)
    tensors = [helper.make_tensor("scale", 1, (), [scale]), helper.make_tensor("zero", 3, (), [-2])]
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["codes"], "site.signed.0/QuantizeLinear"),
        helper.make_node("Cast", ["codes"], ["y"], to=1),
    ]
    ends = [[helper.make_tensor_value_info(name, 1, [len(values)])] for name in ("x", "y")]
    graph = helper.make_graph(nodes, "codes", *ends, tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", written.OPSET)], ir_version=10)
    written._round_signed(model)
    onnx.checker.check_model(model, full_check=True)
    for engine in ("onnxruntime", "openvino"):
        (found,) = open_engine(engine, model.SerializeToString())({"x": values}).values()
        assert found.tolist() == (np.round(values / np.float32(scale)) - 2).tolist()
    model, _ = read(write("mixed", selects=True))
    signed = {each.name for each in model.graph.initializer if each.data_type == onnx.TensorProto.INT8}
    made = {name: node.op_type for node in model.graph.node for name in node.output}
    coded = [node for node in model.graph.node if node.op_type == "QuantizeLinear" and node.input[-1] in signed]
    assert [made[node.input[0]] for node in coded] == ["Round", "Round"]


def test_a_file_is_the_same_each_time_and_says_what_it_is(one):
    quantized, source, content = one
    assert written.to_onnx(quantized, "integer", source) == content
    model, about = read(content)
    onnx.checker.check_model(model, full_check=True)
    assert (about["form"], about["artifact"], about["graph"]) == ("integer", source, graph_digest(model))
    assert [each.version for each in model.opset_import if not each.domain] == [written.OPSET]
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    assert not any(node.metadata_props or node.doc_string for node in model.graph.node)


def test_weights_of_four_bits_are_stored_in_four_bits(one):
    model, _ = read(one[2])
    codes = [each for each in model.graph.initializer if each.name.endswith(".codes")]
    assert len(codes) == 4
    for each in codes:
        assert each.data_type == onnx.TensorProto.INT4
        assert len(each.raw_data) == -(-torch.Size(each.dims).numel() // 2)


def damaged(model, index):
    """A copy in which the first number of one initialiser is another."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    tensor = copy.graph.initializer[index]
    values = onnx.numpy_helper.to_array(tensor).copy()
    if tensor.data_type == onnx.TensorProto.INT4:
        raw = bytearray(tensor.raw_data)
        raw[0] ^= 1
        tensor.raw_data = bytes(raw)
    else:
        values.reshape(-1)[0] = values.reshape(-1)[0] + 1
        tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
    return copy


def test_every_changed_number_is_noticed(one):
    """By the digest, and without it, for all that the artifact stores, by its name."""
    quantized, _, content = one
    model, about = read(content)
    replay = ProgramModule(quantized, MAKERS["integer"])
    assert not changed_tensors(model, replay)
    named = 0
    for index, tensor in enumerate(model.graph.initializer):
        copy = damaged(model, index)
        assert graph_digest(copy) != about["graph"], tensor.name
        named += changed_tensors(copy, replay) == [tensor.name]
    assert named >= 20
    copy = damaged(model, 0)
    found = certify(quantized, "digest", copy.SerializeToString(), [(torch.zeros(1, 3, 32, 32),)])
    assert found.failures[0] == "the file was changed after adalog wrote it"


def test_another_artifact_and_a_changed_node_are_noticed(one, images):
    quantized, _, content = one
    found = certify(quantized, "another", content, [(images,)])
    assert found.failures == ["the file was made from another artifact"]
    model, about = read(content)
    for node in model.graph.node:
        if node.op_type == "Add":
            node.op_type = "Sub"
    about["graph"] = graph_digest(model)  # as one would who wants to hide it
    onnx.helper.set_model_props(model, {"adalog": json.dumps(about)})
    found = certify(quantized, "digest", model.SerializeToString(), [(images,)])
    assert not found.passed


def test_answers_are_judged_as_far_as_they_tell_something():
    """By hand: of 8 images the largest output of 3 changes, which the artifact prefers by .25, at an error of .3."""
    wanted = torch.tensor([0.8, 0.6, 0.0, 0.0]).repeat(8, 1)
    wanted[:3] = torch.tensor([0.8, 0.55, 0.0, (1 - 0.8**2 - 0.55**2) ** 0.5])
    got = wanted + torch.tensor([0.0, 0.0, 0.3, 0.0])
    got[:3] = wanted[:3] + torch.tensor([-0.14, 0.14, 0.0, 0.0]) * 1.5
    site = SiteReport("site", True, 10, 0, 0)
    for own, beyond, failures in ((0.0, 3, 2), (0.16, 3, 1), (0.24, 3, 1), (0.26, 0, 0)):
        found = Certificate("mixed", "engine", "torch", {}, {}, images=8, sites=[site], own_error=own)
        judge(found, [[(wanted, got)]])
        assert found.changed == [0, 1, 2]
        assert found.beyond_own == beyond
        assert found.error["median"] == pytest.approx(0.3)
        assert len(found.failures) == failures
        assert f"own error explains: {beyond}\n" in found.text() + "\n"


def test_sums_that_were_not_compared_are_not_called_wrong():
    found = Certificate("integer", "engine", "torch", {}, {}, failures=["the file was made from another artifact"])
    assert "accumulators: not compared\n" in found.text()
    found.sites.append(SiteReport("site", False, 10, 0, 0))
    assert "accumulators: NOT equal\n" in found.text()


def test_all_outputs_are_compared_and_the_first_has_the_largest():
    """By hand: an error in a map of (images, 2, 3) beside logits that are the same, in two batches."""
    logits, maps = torch.eye(4), torch.ones(4, 2, 3)
    found = Certificate("mixed", "engine", "torch", {}, {}, images=8, sites=[SiteReport("site", True, 10, 0, 0)])
    judge(found, [[(logits, logits), (maps, each)] for each in (maps, 2 * maps)])
    assert found.argmax_changed == 0
    assert found.error == {"median": 0.0, "largest": pytest.approx((6 / 7) ** 0.5)}
    judge(found, [[(logits, logits), (maps, maps * float("nan"))]])
    assert found.failures == ["the median relative error of the outputs is too large: nan"]
    assert json.loads(json.dumps(found.json(), allow_nan=False))["error"] == {"median": None, "largest": None}


def with_outputs(outputs, images):
    """A quantized model whose outputs are a function of the model and 16 features; it has two heads and a table."""
    parts = {"conv": nn.Conv2d(3, 4, 16, 16), "head": nn.Linear(16, 5), "box": nn.Linear(16, 4)}
    parts["table"] = nn.Buffer(torch.arange(3.0))
    model = Toy(lambda self, x: outputs(self, self.conv(x).flatten(1)), **parts).eval()
    return Calibration(model, images).quantize(FAST).quantized


def test_one_number_for_each_image(images):
    quantized = with_outputs(lambda self, x: self.head(x)[:, 0], images)
    for form in export.FORMS:
        assert_certified(quantized, form, images)


def test_outputs_that_no_file_has(images):
    with pytest.raises(ArtifactError, match="the program cannot be exported to ONNX"):
        written.to_onnx(with_outputs(lambda self, x: (x, self.table), images), "integer", "digest")


@pytest.mark.parametrize("beyond", ["zero-coded", "saturate"])
def test_values_below_the_lift(beyond):
    """Bytes of steps below zero would be taken from the last level, where that is not zero."""
    program = capture(Toy(lambda self, x: self.head(x * 1.0), head=nn.Linear(8, 3)).eval(), (torch.zeros(1, 8),))
    (group,) = group_sites(find_sites(program), [])
    left = LogQuantizer(torch.tensor(1.0), 17, 37, 4, beyond, offset=0.04, keeps_offset=False, width=8, headroom=3)
    right = UniformQuantizer(torch.full((3, 1), 0.05), torch.full((3, 1), 8.0), 4)
    quantized = QuantizedProgram(
        rewrite(program, [(group, Assignment(left, right))]), Config(), example=(torch.zeros(0, 8),)
    )
    for form in export.FORMS:
        assert_certified(quantized, form, 0.3 * torch.randn(64, 8, generator=torch.Generator().manual_seed(0)))


def test_outputs_that_are_not_floats(images):
    quantized = with_outputs(lambda self, x: self.head(x).argmax(1), images)
    found = certify(quantized, "digest", written.to_onnx(quantized, "integer", "digest"), [(images,)])
    assert found.failures[0] == (
        "the model does not return a float output per image, so there is nothing to compare: quantize it without the "
        "argmax, or the mean of all images, at its end"
    )
    assert not found.passed


X = Ref("x")


@pytest.mark.parametrize(
    ("output", "names"),
    [
        (X, ["logits"]),
        ((X,), ["logits"]),
        ((X, X), ["output_0", "output_1"]),
        ((X, (X, None, [X])), ["output_0", "output_1", "output_2"]),
        ({"out": X}, ["out"]),
        ({"out": X, "aux": X, "loss": None}, ["out", "aux"]),
        (ModelOutput(logits=X, hidden_states=(X, X), loss=None), ["logits", "hidden_states.0", "hidden_states.1"]),
        ({"boxes": {"left": X, "right": [X]}}, ["boxes.left", "boxes.right.0"]),
        ((X, {"aux": X}), ["output_0", "output_1.aux"]),
    ],
)
def test_names_of_outputs(output, names):
    assert written.output_names(output) == names
    assert len(present_leaves(output)) == len(names)


@pytest.mark.parametrize("names", [("images", "linear"), ("logits", "x")])
def test_outputs_in_a_dict_keep_their_names(images, names):
    """Also those of inputs, and of values inside the file."""

    def outputs(self, x):
        return {names[0]: self.head(x), names[1]: (self.box(x), self.box(x).relu()), "loss": None}

    quantized = with_outputs(outputs, images)
    content = written.to_onnx(quantized, "integer", "digest")
    expected = [names[0], f"{names[1]}.0", f"{names[1]}.1"]
    expected = [f"{name}_output" if name == "images" else name for name in expected]
    assert [value.name for value in read(content)[0].graph.output] == expected
    found = open_engine("onnxruntime", content)({"images": images.numpy()})
    assert [found[name].shape for name in expected] == [(len(images), 5), (len(images), 4), (len(images), 4)]
    assert certify(quantized, "digest", content, [(images,)]).passed


def test_cells_tell_every_threshold_apart():
    for bits, q, width in ((5, 17, 8), (6, 9, 16), (8, 5, 16), (8, 40, 16)):
        headroom = 16 - bits - 1 if width == 16 else 8 - bits - 1
        quantizer = LogQuantizer(torch.tensor(0.37), q, 37, bits, width=width, headroom=headroom)
        table, thresholds = quantizer.table_integers().float(), value_thresholds(quantizer)
        steps = [k for k in range(len(thresholds)) if table[k] != table[k + 1]]
        edges = thresholds[steps]
        cells, first, ends, entries = _cells(edges, table[[*steps, -1]])
        values = torch.cat([edges, torch.nextafter(edges, torch.tensor(9.0)), torch.rand(2000) ** 8])
        for near in (-0.01, 0.01):  # of a cell, by which an engine's logarithm may be off
            moved = ((values.double().log2() * cells + near).floor() - first).clamp(0, len(ends) - 1).long()
            got = entries[2 * moved + (values > ends[moved])]
            assert torch.equal(got, table[quantizer.quantize(values).long()])


def test_bad_input_is_refused_in_a_line(tmp_path, monkeypatch, capsys, quantized, split, one):
    model, other = tmp_path / "model.safetensors", tmp_path / "split.safetensors"
    quantized.save(model)
    split.save(other)
    assert "split uniform codes" in refusal(monkeypatch, capsys, "export", other, "-o", tmp_path / "a.onnx")
    assert "cannot be written" in refusal(monkeypatch, capsys, "export", model, "-o", tmp_path)
    assert "is not one of mixed, integer" in refusal(monkeypatch, capsys, "export", model, "--form", "fast")
    assert "NAME.xml" in refusal(monkeypatch, capsys, "export", model, "--to", "openvino", "-o", tmp_path / "a.onnx")
    assert "is not an ONNX model that adalog exported" in refusal(monkeypatch, capsys, "certify", model, model)
    told = refusal(monkeypatch, capsys, "certify", model, model, "--images", 5000)
    assert "only 2000 images are bundled, but --images is 5000: give fewer" in told
    noted = adalog.load(model)
    noted.note(preprocessing=asdict(replace(DEMO_PREPROCESSING, mean=(0.5, 0.5, 0.5))))
    noted.save(other)
    assert "was not made from the bundled model" in refusal(monkeypatch, capsys, "certify", other, model)
    monkeypatch.setitem(sys.modules, "onnx", None)
    told = refusal(monkeypatch, capsys, "export", model, "-o", tmp_path / "a.onnx")
    assert "onnx is not installed: pip install 'adalog[onnx]'" in told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "split.safetensors"]


@pytest.mark.slow
def test_the_commands(tmp_path, monkeypatch, capsys, exported):
    model, file, page = exported / "vit.safetensors", exported / "vit.onnx", tmp_path / "page.txt"
    told = json.loads((exported / "told.json").read_text())
    assert told["files"] == {str(file): file.stat().st_size}
    assert all(each["passed"] for each in told["certificates"])
    told = json.loads(say(monkeypatch, capsys, "certify", model, file, "--images", "24", "-o", page, "--json", "-"))
    assert (told["passed"], told["images"], told["accumulators_equal"]) == (True, 24, True)
    assert page.read_text().startswith("PASSED")
    changed = tmp_path / "changed.onnx"
    changed.write_bytes(damaged(read(file.read_bytes())[0], 0).SerializeToString())
    arguments = "certify", model, changed, "--images", "8", "-o", page, "--json", tmp_path / "told.json"
    assert call(monkeypatch, capsys, *arguments)[0] == 1
    assert json.loads((tmp_path / "told.json").read_text())["passed"] is False


@pytest.mark.slow
def test_a_file_that_fails_is_not_written(tmp_path, monkeypatch, capsys, exported):
    changed = damaged(read((exported / "vit.onnx").read_bytes())[0], 0).SerializeToString()
    monkeypatch.setattr(export, "to_onnx", lambda *_, **__: changed)
    code, error = call(monkeypatch, capsys, "export", exported / "vit.safetensors", "-o", tmp_path / "model.onnx")
    assert code == 1
    assert "was not written, because the export differs from the artifact" in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_page_runs(monkeypatch, capsys, exported, vit, images):
    """Run docs/reference/exports.md on the files that its commands write."""
    pytest.importorskip("openvino")
    monkeypatch.chdir(exported)
    say(monkeypatch, capsys, "export", "vit.safetensors", "--to", "openvino", "-o", "vit.xml")
    page = (ROOT / "docs" / "reference" / "exports.md").read_text(encoding="utf-8")
    names = {"images": images}
    exec("\n".join(re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)), names)
    wanted = vit.compile("reference")(images)
    for got in (names["logits"], names["prediction"]):
        assert got.shape == wanted.shape
        assert torch.equal(torch.as_tensor(got).argmax(1), wanted.argmax(1))


@pytest.mark.parametrize("form", export.FORMS)
def test_convolutions_that_quantize_a_value_equally_share_the_operand(images, form):
    """PyTorch's exporter merges equal operators, as of maps of a detector that feed the next stage and its neck."""

    def function(self, x):
        maps = self.stem(x).relu()
        return self.next(maps), self.neck(maps)

    convolutions = {"stem": nn.Conv2d(1, 8, 3), "next": nn.Conv2d(8, 4, 3, 2), "neck": nn.Conv2d(8, 4, 1)}
    few = images[:, :1, :8, :8]
    config = replace(Config.preset("w8a8", "minmax"), images=4)
    assert_certified(Calibration(Toy(function, **convolutions).eval(), few).quantize(config).quantized, form, few)


def test_batches_may_have_different_sizes(images):
    """A model of any size takes them; sites are compared on the first images of one size."""

    def function(self, x):
        return self.last(self.conv(x).relu().mean((2, 3)))

    model = Toy(function, conv=nn.Conv2d(1, 4, 3), last=nn.Linear(4, 5)).eval()
    config = replace(Config.preset("w8a8", "minmax"), images=4)
    quantized = Calibration(model, images[:, :1, :8, :8], sizes="free").quantize(config).quantized
    content = written.to_onnx(quantized, "integer", "digest")
    batches = [(images[:2, :1, :size, :size],) for size in (8, 12, 8)]
    certificate = certify(quantized, "digest", content, batches, executor="reference")
    assert certificate.passed, certificate.failures
    assert certificate.images == 6


def test_layers_that_are_called_again_and_outputs_that_are_none(images):
    """Of a module whose part has the name of a dict's method, alone and as a part of another module."""

    def function(self, x):
        first = self.keys(x.flatten(2).mean(1))
        return {"logits": self.keys(F.relu(first)), "loss": None}

    model = Toy(function, keys=nn.Linear(64, 64)).eval()
    whole = Toy(lambda m, x: m.inner(x)["logits"], inner=model).eval()
    config, few = replace(Config.preset("w4a4", "minmax"), images=4), images[:, :1, :8, :8]
    for module, form in ((model, "mixed"), (whole, "integer")):
        quantized = Calibration(module, few).quantize(config).quantized
        content = written.to_onnx(quantized, form, "digest")
        certificate = certify(quantized, "digest", content, [(few,)], executor="reference")
        assert all(site.equal for site in certificate.sites)
        assert len({site.site for site in certificate.sites}) == 2
