"""What a capture refuses, in words that name the operation and the way out."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from adalog import CaptureError
from adalog.graph.capture import capture
from toys import IMAGES, Toy, assert_same


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
    with pytest.raises(CaptureError, match=rf"cannot use these inputs: {shapes}\. The first dimension of every tensor"):
        capture(tiny, inputs)


@pytest.mark.slow
def test_a_single_image_serves(tiny):
    assert_same(tiny, capture(tiny, IMAGES[:1]), IMAGES)


def test_refuses_control_flow_on_data():
    class Detector(nn.Module):
        def forward(self, x):
            return x + 1 if x.mean() > 0 else x - 1

    with pytest.raises(CaptureError, match=r"Detector could not be exported \(.*\)\. Capture the part that can be"):
        capture(Detector(), IMAGES)


def test_refuses_a_fixed_batch_size():
    with pytest.raises(CaptureError, match="Toy could not be exported"):
        capture(Toy(lambda m, x: x.view(2, -1)), IMAGES)


@pytest.mark.parametrize(
    ("function", "op"),
    [
        (lambda m, x: x.cumprod(0), "aten.cumprod.default"),
        (lambda m, x: x + torch.rand(3, 32, 32), "aten.rand.default"),
        (lambda m, x: torch.fft.fft2(x).real, "aten.fft_fft2.default"),
        (lambda m, x: x.add(0).erfinv_(), "aten.erfinv.default"),
        (lambda m, x: x.add(0).diagonal(0, 2, 3).add_(1), "a write through aten.diagonal.default"),
    ],
)
def test_refuses_operations_outside_the_whitelist(function, op):
    with pytest.raises(CaptureError, match=f"Toy uses .*{op}.* cannot store or run"):
        capture(Toy(function), IMAGES)


def test_refuses_causal_attention():
    def function(model, x):
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    with pytest.raises(CaptureError, match="causal"):
        capture(Toy(function), IMAGES)


def test_refuses_autocast():
    def function(model, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model.fc(x.mean((2, 3)))

    with pytest.raises(CaptureError, match="autocast"):
        capture(Toy(function, fc=nn.Linear(3, 4)), IMAGES)


@pytest.mark.slow
def test_refuses_images_that_are_not_numbers(tiny):
    with pytest.raises(CaptureError, match=r"DemoViT differs from the model by nan.*images may hold NaN"):
        capture(tiny, torch.full((2, 3, 32, 32), torch.nan))


def test_refuses_a_model_that_is_random_from_call_to_call():
    with pytest.raises(CaptureError, match="may behave differently from call to call"):
        capture(Toy(lambda m, x: F.dropout(x, training=True)), IMAGES)
