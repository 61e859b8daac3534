"""Methods on models and images that are rare but fair: lists inside, no floats put out, blank images, absent inputs."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import adalog
from adalog import CalibrationError, CaptureError, Config, Correction, Reconstruction, Search
from adalog.choices import BlockRefinement
from adalog.graph.capture import capture
from adalog.graph.sites import find_blocks
from toys import Toy


class Unbound(nn.Module):
    """Attention without a residual, so that a list of queries, keys and values is all that is read."""

    def __init__(self, ends):
        super().__init__()
        torch.manual_seed(0)
        self.patches, self.qkv, self.up = nn.Conv2d(3, 16, 4, 4), nn.Linear(16, 48), nn.Linear(16, 24)
        self.head, self.ends = nn.Linear(24, 5), ends

    def forward(self, x):
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(tokens).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = ((q @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(1, 2).flatten(2)
        return self.ends(self.head(nn.functional.gelu(self.up(mixed))).mean(1))


IMAGES = torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(3))
ENDS = {
    "logits": lambda y: y,
    "logits and classes": lambda y: (y, y.argmax(1)),
    "one number": lambda y: y[:, 0],
    "classes": lambda y: y.argmax(1),
}


def quick(method):
    config = replace(Config.preset("w4a4", method), images=4)
    if method in ("qdrop", "fima-q"):
        (stage,) = config.stages
        config = replace(config, stages=(replace(stage, images=6, iterations=4),))
    if method == "evol-q":
        config = replace(config, stages=(replace(config.stages[0], cycles=1, passes=1),))
    return config


def test_lists_are_no_borders_of_blocks():
    program = capture(Unbound(ENDS["logits"]).eval(), IMAGES)
    lists = {node.args[0].name for node in program.nodes if node.op == "getitem"}
    assert lists
    blocks = find_blocks(program)
    assert lists.isdisjoint({block.value_out for block in blocks} | {block.value_in for block in blocks})


@pytest.mark.slow
@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("method", ["ptq4vit", "apq-vit", "qdrop", "fima-q", "evol-q"])
def test_methods_take_any_outputs(method, ends):
    model = Unbound(ENDS[ends]).eval()
    if ends == "classes" and method != "qdrop":  # which compares the blocks themselves
        with pytest.raises(CalibrationError, match="the model has no"):
            adalog.quantize(model, IMAGES, quick(method))
        return
    found = adalog.quantize(model, IMAGES, quick(method))
    assert set(found.float_sites()) <= {"patches"}  # images, which PTQ4ViT does not quantize
    assert found(IMAGES[:2])[0] is not None


@pytest.mark.slow
@pytest.mark.parametrize("method", ["qdrop", "fima-q"])
def test_blank_images_train_nothing(method):
    found = adalog.quantize(Unbound(ENDS["logits"]).eval(), torch.zeros_like(IMAGES), quick(method))
    assert bool(found(torch.zeros_like(IMAGES)).isfinite().all())


def test_an_input_may_be_absent():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 4)

        def forward(self, mask, x):
            return self.linear(x if mask is None else x * mask)

    x = torch.randn(6, 16)
    found = adalog.quantize(Masked().eval(), (None, x), replace(Config.preset("w8a8", "minmax"), images=4))
    assert len(found.ledger) == 1
    with pytest.raises(CalibrationError, match="calibration takes 7 images, got 6"):
        adalog.quantize(Masked().eval(), (None, x), replace(Config.preset("w8a8", "minmax"), images=7))


def test_outputs_without_names_are_refused():
    with pytest.raises(CaptureError, match=r"a dict with the keys \[0, 1\]\. Use strings as keys"):
        capture(Toy(lambda m, x: {0: m.conv(x), 1: x}, conv=nn.Conv2d(3, 4, 3)).eval(), IMAGES)


@pytest.mark.parametrize(
    "stages", [(Correction(images=4), Reconstruction(images=4, iterations=2)), (BlockRefinement(),)]
)
def test_inference_mode_around_it_changes_nothing(tiniest, images, stages):
    config = Config(images=4, search=Search(rounds=1, steps=0), stages=stages)
    found = []
    for mode in (True, False):
        with torch.inference_mode(mode):
            model = adalog.quantize(copy.deepcopy(tiniest), images + 0, config)
        found.append(model(images[:2]))
    assert torch.equal(*found)


def test_arguments_that_nothing_can_be_done_with(tiniest, images, tmp_path, monkeypatch):
    config = Config(images=4, search=Search(rounds=1, steps=0))
    with pytest.raises(ValueError, match="jobs = 0 is not a whole number of at least 1"):
        adalog.Calibration(tiniest, images).quantize(config, jobs=0)
    with pytest.raises(CalibrationError, match="on the meta device, which holds no values"):
        adalog.Calibration(tiniest, images.to("meta"))
    monkeypatch.chdir(tmp_path)
    adalog.Calibration(tiniest, images).quantize(config, partial="searches")
    assert (tmp_path / "searches").exists()


def test_what_was_searched_in_inference_mode_serves_stages_outside(tiniest, images):
    config = Config(images=4, search=Search(rounds=1, steps=0))
    calibration = adalog.Calibration(tiniest, images)
    with torch.inference_mode():
        calibration.search(config)
        inside = calibration.quantize(config)
    calibration.quantize(replace(config, stages=(Reconstruction(images=4, iterations=2),)))
    assert not any(value.is_inference() for value in inside.quantized.program.tensors.values())


def test_a_number_may_be_divided_by_whole_numbers():
    class Divided(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows, self.head = nn.Embedding(101, 8), nn.Linear(8, 2)

        def forward(self, numbers):
            return self.head(self.rows(torch.div(100, numbers, rounding_mode="trunc")))

    numbers = torch.arange(1, 5)
    program = capture(Divided().eval(), (numbers,))
    assert program.run([numbers]).shape == (4, 2)
