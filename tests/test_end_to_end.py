"""Reconstruction of a whole model at once: what it trains, judges and keeps, beside that of blocks."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import adalog
from adalog import METHODS, Calibration, Config, Correction, QuantizedModel, Reconstruction, Search
from adalog.calibration.reconstruct import reconstructed
from adalog.graph.capture import capture
from adalog.graph.program import Ref
from adalog.graph.sites import find_spans
from adalog.quantizers import QuantizedTensor
from adalog.study.evaluate import predict
from stored import deserialise, serialise

SHORT = Search(rounds=1, steps=1, rough_rows=0)
LOW = Config(weight_bits=2, activation_bits=3, softmax_bits=3, images=8, search=SHORT)
STAGE = Reconstruction(images=24, iterations=16, rate=0.05, scale_rate=0.01, drop=0.0, scope="model")


@pytest.fixture(scope="module")
def searched(tiniest, pool):
    calibration = Calibration(tiniest, pool[:8], unlabelled=pool[:24])
    return calibration, calibration.assign(LOW)


def errors(calibration, assigned, reference, images):
    """The squared error of the model's output for each image."""
    found = predict(QuantizedModel(calibration.build_program(assigned, LOW)), images)
    return (found - predict(reference, images)).square().sum(1)


def test_what_is_kept_has_the_least_error_of_the_models_output_on_images_held_out(tiniest, pool, searched):
    """Every eighth image judges; all sites of the model may change, and codes stay as small as they were."""
    calibration, before = searched
    after = reconstructed(calibration.program, [pool[:24]], before, STAGE)
    was, now = (errors(calibration, each, tiniest, pool[:24]) for each in (before, after))
    assert float(now[7::8].mean()) < 0.9 * float(was[7::8].mean())
    assert [group.name for group, _ in after] == [group.name for group, _ in before]
    for (group, one), (_, other) in zip(before, after, strict=True):
        assert one.left is None or not torch.equal(one.left.scale, other.left.scale), group.name
        if isinstance(other.right, QuantizedTensor):
            assert other.right.codes.dtype == torch.uint8
            assert int(other.right.codes.max()) < 4


def test_a_model_that_got_worse_goes_back(pool, searched):
    calibration, before = searched
    after = reconstructed(
        calibration.program, [pool[:24]], before, replace(STAGE, rate=500.0, scale_rate=50.0, iterations=2)
    )
    for (_, one), (_, other) in zip(before, after, strict=True):
        assert replace(one, sqnr=0) == replace(other, sqnr=0)


class Outputs(nn.Module):
    """A trunk with two heads."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(12, 8), nn.Linear(8, 8)
        self.one, self.two = nn.Linear(8, 3), nn.Linear(8, 2)

    def forward(self, x):
        x = self.second(self.first(x.flatten(1)).relu()).relu()
        return {"one": self.one(x), "two": self.two(x)}


def test_heads_of_a_model_with_several_outputs_are_a_block_of_their_own(pool):
    torch.manual_seed(0)
    images = pool[:8, :, :2, :2].contiguous()
    net = Outputs().eval()
    trunk, heads = find_spans(capture(net, (images,)))
    assert (trunk.value_in, heads.value_in) == ("x", trunk.value_out)
    assert len([name for name in trunk.nodes if "linear" in name]) == 2
    calibration = Calibration(net, images)
    before = calibration.assign(replace(LOW, fold_rows=1))
    after = reconstructed(calibration.program, [images], before, replace(STAGE, images=8))
    same = {group.name: one is other for (group, one), (_, other) in zip(before, after, strict=True)}
    assert same == {"first": False, "second": False, "one": True}  # one head's output alone would judge both


class Scales(nn.Module):
    """A stream that is put out in between as well, as a backbone does."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(12) for _ in range(3))

    def forward(self, x):
        x, found = x.flatten(1), []
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + layer(x).relu()
            found.append(norm(x))
        return tuple(found)


def test_a_block_ends_where_an_output_leaves_the_stream(pool):
    """So no output is made worse for the sake of a later one without being judged."""
    images = pool[:8, :, :2, :2].contiguous()
    program = capture(Scales().eval(), (images,))
    made = {node.name: node.op for node in program.nodes}
    blocks = find_spans(program)
    assert [made[block.value_out] for block in blocks[:3]] == ["aten.add.Tensor"] * 3
    assert [sum("linear" in name for name in block.nodes) for block in blocks] == [1, 1, 1, 0]


class Ending(nn.Module):
    """A trunk, and what a function makes of the input and of what follows the trunk."""

    def __init__(self, ending):
        super().__init__()
        self.first, self.second, self.ending = nn.Linear(12, 8), nn.Linear(8, 6), ending

    def forward(self, x):
        x = x.flatten(1)
        return self.ending(x, self.second(self.first(x).relu()))


@pytest.mark.parametrize(
    "ending", [lambda x, y: y, lambda x, y: {"logits": y}, lambda x, y: (y,), lambda x, y: [y.softmax(1)]]
)
def test_a_model_with_one_output_is_one_block(pool, ending):
    """However it is wrapped, as in the output of a classifier of transformers."""
    program = capture(Ending(ending).eval(), (pool[:4, :, :2, :2].contiguous(),))
    (block,) = find_spans(program)
    assert block.nodes == tuple(node.name for node in program.nodes)


def test_an_input_that_is_put_out_cuts_nothing(pool):
    model = Ending(lambda x, y: {"logits": y}).eval()
    program = capture(model, (pool[:4, :, :2, :2].contiguous(),))
    both = replace(program, output={"image": Ref(program.inputs[0]), "logits": program.output["logits"]})
    assert len(find_spans(both)) == 1


@pytest.mark.parametrize("ending", [lambda x, y: y.chunk(2, 1), lambda x, y: y.unbind(1)])
def test_no_block_ends_in_a_list(pool, ending):
    torch.manual_seed(0)
    images = pool[:8, :, :2, :2].contiguous()
    calibration = Calibration(Ending(ending).eval(), images)
    before = calibration.assign(replace(LOW, fold_rows=1))
    after = reconstructed(calibration.program, [images], before, replace(STAGE, images=8))
    assert not any(one is other for (_, one), (_, other) in zip(before, after, strict=True))


def test_progress_is_told_many_times(pool, searched):
    calibration, before = searched
    told = []
    reconstructed(calibration.program, [pool[:24]], before, STAGE, progress=lambda *each: told.append(each))
    assert [done for done, _, _ in told] == list(range(1, 17))
    assert {total for _, total, _ in told} == {16}
    assert [name for _, _, name in told[-2:]] == ["end to end, block 1 of 1, step 15 of 16", "end to end, block 1 of 1"]


@pytest.mark.slow
def test_both_reconstructions_follow_each_other_and_go_on_after_a_kill(tiniest, pool, tmp_path):
    """The file of what is done tells them apart, also where it ends between them or within the last one."""
    stages = (Correction(24), replace(STAGE, scope="block", iterations=4), replace(STAGE, iterations=8))
    config, whole = replace(LOW, stages=stages), tmp_path / "whole"
    content = serialise(adalog.quantize(tiniest, pool, config, partial=whole))
    lines = whole.read_bytes().splitlines(keepends=True)
    first = next(index for index, line in enumerate(lines) if b'"tuning of' in line)
    assert any(b"reconstruction of" in line for line in lines[:first])
    for kept in (first, first + 2):
        cut = tmp_path / f"cut-{kept}"
        cut.write_bytes(b"".join(lines[:kept]) + lines[kept][:40])
        assert serialise(adalog.quantize(tiniest, pool, config, partial=cut)) == content
    again = deserialise(content)
    assert again.config == config
    assert again.provenance["fitted_images"] == 24
    without = adalog.quantize(tiniest, pool, replace(config, stages=stages[:2]))
    assert serialise(without) != content
    assert abs(len(serialise(without)) - len(content)) < 512  # what tells of the stage


def test_the_scope_is_written_and_read():
    configs = {scope: Config(stages=(replace(STAGE, scope=scope),)) for scope in ("block", "model")}
    fields = {scope: json.loads(config.to_json()) for scope, config in configs.items()}
    assert [each["stages"][0]["scope"] for each in fields.values()] == ["block", "model"]
    for scope, each in fields.items():
        assert Config.from_json(json.dumps(each)).stages == (replace(STAGE, scope=scope),)
    with pytest.raises(ValueError, match="scope = 'site' is none of block, model"):
        replace(STAGE, scope="site")


def test_the_model_is_trained_last():
    blocks = replace(STAGE, scope="block")
    assert Config(stages=(Correction(), blocks, STAGE)).images_fitted == 128
    assert Config(stages=(blocks, STAGE)).stages == (blocks, STAGE)
    for stages in ((STAGE, blocks), (STAGE, Correction()), (STAGE, STAGE)):
        with pytest.raises(ValueError, match="then one of the model"):
            Config(stages=stages)
    kinds = [getattr(stage, "scope", "correction") for stage in Config.preset("w4a4", "adalog++").stages]
    assert kinds == ["correction", "block", "model"]
    assert "end to end" in METHODS["adalog++"].source
    assert Config.preset("w4a4", "adalog++").with_fitted_images(64).images_fitted == 64
