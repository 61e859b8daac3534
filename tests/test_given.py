"""What people pass as calibration images becomes the inputs of a model, or an error that says what to pass."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import adalog
from adalog.inputs.given import as_inputs
from stored import serialise

IMAGES = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(0))
QUICK = adalog.Config(images=4, search=adalog.Search(rounds=1, steps=0), stages=())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 4, 4), nn.Linear(32, 5)

    def forward(self, x):
        return self.head(self.conv(x).flatten(1))


class OptionalInput(Model):
    def forward(self, x, bias=None):
        return super().forward(x if bias is None else x + bias)


class TwoInputs(Model):
    def forward(self, x, bias):
        return super().forward(x + bias)


class AnyInputs(Model):
    def forward(self, *inputs):
        return super().forward(sum(inputs))


@pytest.mark.parametrize("model", [Model(), OptionalInput(), AnyInputs()])
@pytest.mark.parametrize(
    "images",
    [
        IMAGES,
        list(IMAGES),
        [IMAGES[:8], IMAGES[8:]],
        [IMAGES[:10], IMAGES[10:12], IMAGES[12:]],
        DataLoader(IMAGES, batch_size=5),
        DataLoader(IMAGES, batch_size=1),
        DataLoader(list(IMAGES), batch_size=None),
    ],
)
def test_images_with_one_meaning_are_one_tensor(model, images):
    assert torch.equal(as_inputs(images, model, 16), IMAGES)


def test_one_image_is_refused_without_a_change_of_the_model():
    model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match="images is one image"):
        as_inputs(IMAGES[0], model, 16)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training


def test_a_loader_is_read_until_there_are_enough_images_or_tokens():
    tokens = IMAGES.flatten(2)
    assert torch.equal(as_inputs(DataLoader(IMAGES, batch_size=5), Model(), 6), IMAGES[:10])
    assert torch.equal(as_inputs(DataLoader(tokens, batch_size=5), Model(), 16), tokens)


@pytest.mark.parametrize("inputs", [(IMAGES,), (IMAGES, IMAGES), (IMAGES, None)])
def test_a_tuple_holds_the_inputs(inputs):
    assert as_inputs(inputs, OptionalInput(), 16) is inputs
    assert as_inputs(inputs, AnyInputs(), 16) is inputs


def test_a_list_of_batches_gives_the_model_of_all_images():
    torch.manual_seed(0)
    model = OptionalInput().eval()
    result = adalog.quantize(model, [IMAGES[:8], IMAGES[8:]], QUICK)
    assert len(result.program.inputs) == 1
    assert serialise(result) == serialise(adalog.quantize(model, IMAGES, QUICK))


LABELS = torch.zeros(16, dtype=torch.long)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (IMAGES.numpy(), "a ndarray: give one tensor (N, 3, H, W), as torch.from_numpy(images) of float32"),
        ({"pixel_values": IMAGES}, "a dict with pixel_values: give one tensor (N, 3, H, W), as images['pixel_values']"),
        ({}, "a dict with no key: give one tensor (N, 3, H, W)"),
        ((x for x in IMAGES), "a generator: give one tensor (N, 3, H, W)"),
        (TensorDataset(IMAGES, LABELS), "a TensorDataset: give one tensor (N, 3, H, W), as torch.stack([images[i][0]"),
        (None, "a NoneType: give one tensor (N, 3, H, W)"),
        ("folder", "a str: give one tensor (N, 3, H, W)"),
        (IMAGES[0], "one image of shape (3, 8, 8): give a batch (N, 3, H, W), as images[None] for one"),
        ((IMAGES, LABELS), "a tuple of 2 inputs, but Model takes 1: give one tensor (N, 3, H, W), without labels"),
        ([(IMAGES, LABELS)], "a list of tuple, not of tensors: give one tensor (N, 3, H, W), as torch.cat([x for x, _"),
        ([(IMAGES[0], 3)], "a list of tuple, not of tensors: give one tensor (N, 3, H, W), as torch.stack([x for x, _"),
        (DataLoader(TensorDataset(IMAGES, LABELS), 4), "a DataLoader of list, not of tensors: give one tensor (N, 3"),
        (DataLoader([{"x": image} for image in IMAGES], 4), "a DataLoader of dict, not of tensors: give one tensor"),
        ([np.zeros((8, 8, 3))], "a list of ndarray, not of tensors: give one tensor (N, 3, H, W)"),
        ([], "a list of nothing, which are not images of one size: give one tensor (N, 3, H, W)"),
        ([IMAGES[0], IMAGES[0, :, 1:]], "a list of (3, 7, 8) and (3, 8, 8), which are not images of one size: give"),
        ([IMAGES, IMAGES[0]], "which are not images of one size: give one tensor (N, 3, H, W)"),
        ([torch.zeros(4, 5), torch.zeros(4, 5)], "which are not images of one size: give one tensor (N, 3, H, W)"),
    ],
)
def test_anything_else_is_refused_in_one_line(images, message):
    with pytest.raises(ValueError, match=r"^images is ") as error:
        adalog.quantize(Model().eval(), images, QUICK)
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_a_list_is_not_two_inputs():
    with pytest.raises(ValueError, match="images is a list, but TwoInputs takes 2 inputs: give them as a tuple"):
        as_inputs([IMAGES, IMAGES], TwoInputs(), 4)


def test_three_rows_of_tokens_are_a_batch():
    tokens = torch.zeros(3, 5, 16)
    assert as_inputs(tokens, nn.Linear(16, 4), 3) is tokens
    signals = torch.zeros(3, 8, 8)
    model = nn.Sequential(nn.Unflatten(1, (1, 8)), nn.Conv2d(1, 2, 4))
    assert as_inputs(signals, model, 3) is signals


def test_the_images_of_a_part_are_those_of_the_whole():
    whole = nn.Sequential(OptionalInput(), nn.GELU()).eval()
    with pytest.raises(ValueError, match="images is a tuple of 2 inputs, but Sequential takes 1"):
        adalog.quantize(whole[0], (IMAGES, LABELS), QUICK, within=whole)
