"""Models with corners that few have: names that meet, parameters put out, one class, paths of large batches."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import adalog
from adalog import Calibration, CalibrationError, CaptureError, Config, Correction, Reconstruction
from adalog.calibration.gradients import with_mean_one
from adalog.graph.capture import capture
from adalog.quantizers import UniformQuantizer
from adalog.study.sensitivity import units_of
from toys import Toy

IMAGES = torch.randn(8, 6, 8, generator=torch.Generator().manual_seed(0)) * 2 + 1


def choices(bits="w8a8", method="minmax", **changes):
    return replace(Config.preset(bits, method), images=len(IMAGES), **changes)


def decibels(found, wanted):
    return float(10 * (wanted.square().sum() / (found - wanted).square().sum()).log10())


class Biased(nn.Module):
    """A linear without a bias, to which the module itself adds a tensor that it calls by one of the site's names."""

    def __init__(self, name):
        super().__init__()
        self.weight, self.name = nn.Parameter(torch.randn(8, 8)), name
        self.register_buffer(name, torch.randn(8) * 3)

    def forward(self, x):
        return F.linear(x, self.weight) + getattr(self, self.name)


@torch.no_grad()
@pytest.mark.parametrize("name", ["bias", "input", "shifted"])
def test_values_of_a_site_leave_alone_what_the_model_calls_so(name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(8), Biased(name), nn.GELU(), nn.Linear(8, 3)).eval()
    for config in (choices(method="repq-vit"), choices(stages=(Correction(images=8),))):
        quantized = adalog.quantize(model, IMAGES, config)
        assert decibels(quantized(IMAGES), model(IMAGES)) > 30
        assert torch.equal(quantized.compile("reference")(IMAGES), quantized.compile("reference")(IMAGES))


@torch.no_grad()
def test_parameters_that_are_put_out_stay_what_they_are():
    torch.manual_seed(0)
    model = Toy(
        lambda m, x: (m.fc(m.norm(x)), m.fc.weight, m.fc.bias, m.norm.weight), norm=nn.LayerNorm(8), fc=nn.Linear(8, 3)
    )
    found = adalog.quantize(model.eval(), IMAGES, choices("w4a4", "repq-vit"))(IMAGES)
    for one, other in zip(found[1:], model(IMAGES)[1:], strict=True):
        assert torch.equal(one, other)


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
        capture(Toy(function, fc=nn.Linear(8, 3)).eval(), IMAGES)


@torch.no_grad()
@pytest.mark.parametrize("method", ["ptq4vit", "apq-vit"])
def test_one_class_has_no_probabilities(method):
    torch.manual_seed(0)
    model = Toy(
        lambda m, x: m.fc(m.up(m.norm(x)).relu().mean(1)),
        norm=nn.LayerNorm(8),
        up=nn.Linear(8, 16),
        fc=nn.Linear(16, 1),
    )
    quantized = adalog.quantize(model.eval(), IMAGES, choices(method=method))
    assert decibels(quantized(IMAGES), model(IMAGES)) > 25


@pytest.mark.parametrize("loss", ["squared", "fisher", "low-rank"])
def test_what_no_gradient_reaches_is_reconstructed_as_it_was(loss):
    """A second output that is a comparison, whose block has nothing to train by."""
    torch.manual_seed(0)
    model = Toy(lambda m, x: (m.fc(x), (m.other(x) > 0).float()), fc=nn.Linear(8, 3), other=nn.Linear(8, 3)).eval()
    stage = Reconstruction(images=8, iterations=4, loss=loss)
    adalog.quantize(model, IMAGES, choices(stages=(stage,)))


def test_gradients_that_are_no_numbers_stay_so():
    assert bool(with_mean_one(torch.tensor([1.0, torch.nan])).isnan().any())


def test_gradients_pass_a_batch_norm():
    torch.manual_seed(0)
    model = Toy(
        lambda m, x: m.fc(F.gelu(m.norm(m.up(x).transpose(1, 2)))),
        up=nn.Linear(8, 6),
        norm=nn.BatchNorm1d(6),
        fc=nn.Linear(6, 3),
    )
    adalog.quantize(model.eval(), IMAGES, choices(method="ptq4vit"))


def test_a_site_is_not_taken_for_an_operation_of_its_name():
    model = Toy(lambda m, x: m.mean(m.fc(x)).mean(1), fc=nn.Linear(8, 8), mean=nn.Linear(8, 4)).eval()
    units = units_of(Calibration(model, IMAGES), choices(), [IMAGES])
    assert [site.macs for site in units["mean"].sites] == [6 * 8 * 4]


@torch.no_grad()
def test_a_left_operand_that_is_made_of_tensors_alone():
    torch.manual_seed(0)
    model = Toy(lambda m, x: m.fc((m.mix + m.mix.t()) @ x), fc=nn.Linear(8, 3))
    model.mix = nn.Parameter(torch.randn(6, 6))
    quantized = adalog.quantize(model.eval(), IMAGES, choices())
    assert decibels(quantized(IMAGES), model(IMAGES)) > 25
    for executor in ("reference", "torch"):
        assert decibels(quantized.compile(executor)(IMAGES), model(IMAGES)) > 25


def test_a_model_that_fails_on_its_images_is_told():
    with pytest.raises(CaptureError, match="Double"):
        adalog.quantize(Toy(lambda m, x: m.fc(x), fc=nn.Linear(8, 3)).eval(), IMAGES.double(), choices())


@torch.no_grad()
def test_a_model_that_writes_to_its_input():
    model = Toy(lambda m, x: m.fc(x.sub_(0.5)), fc=nn.Linear(8, 3)).eval()
    before = IMAGES.clone()
    program = capture(model, IMAGES)
    assert torch.equal(IMAGES, before)
    torch.testing.assert_close(program.run([IMAGES]), model(IMAGES.clone()))


@torch.no_grad()
def test_more_inputs_behind_a_star():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 3)

        def forward(self, x, *more):
            return self.fc(x + sum(more))

    model = Pair().eval()
    given = (IMAGES, IMAGES + 1, IMAGES * 2)
    torch.testing.assert_close(capture(model, given).run(given), model(*given))


@torch.no_grad()
def test_infinite_outputs_are_equal():
    model = Toy(lambda m, x: m.fc(x) + m.mask, fc=nn.Linear(8, 3)).eval()
    model.register_buffer("mask", torch.tensor([0.0, -torch.inf, 0.0]))
    program = capture(model, IMAGES)
    assert torch.equal(program.run([IMAGES]).isinf(), model(IMAGES).isinf())


@pytest.mark.parametrize("more", [(IMAGES, IMAGES), IMAGES.double(), IMAGES[..., :4, None]])
def test_unlabelled_images_are_those_that_the_model_takes(more):
    model = Toy(lambda m, x: m.fc(x), fc=nn.Linear(8, 3)).eval()
    with pytest.raises(CalibrationError, match="the unlabelled images are"):
        Calibration(model, IMAGES, unlabelled=more)


@torch.no_grad()
def test_a_quantizer_is_compiled_whole():
    quantizer = UniformQuantizer(torch.tensor(0.1), torch.tensor(3.0), 4)
    compiled = torch.compile(quantizer.fake_quantize, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(IMAGES), quantizer.fake_quantize(IMAGES))


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # PyTorch's, of what it maps value by value
def test_a_quantized_model_is_mapped_and_traced():
    model = Toy(lambda m, x: m.fc(F.gelu(m.up(x))), up=nn.Linear(8, 8), fc=nn.Linear(8, 3)).eval()
    quantized = adalog.quantize(model, IMAGES, choices("w4a4", "log2"))
    wanted = quantized(IMAGES)
    torch.testing.assert_close(torch.func.vmap(quantized)(IMAGES[:, None])[:, 0], wanted)


@torch.no_grad()
def test_part_of_a_model_in_half_precision():
    torch.manual_seed(0)
    whole = Toy(lambda m, x: m.head(m.body(x)), body=nn.Linear(8, 8), head=nn.Linear(8, 3)).to(torch.bfloat16).eval()
    quantized = adalog.quantize(whole.body, IMAGES.bfloat16(), choices(), within=whole)
    found, wanted = (each(IMAGES.bfloat16()) for each in (quantized, whole.body))
    assert found.dtype == torch.bfloat16
    assert decibels(found.float(), wanted.float()) > 25


@torch.no_grad()
@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: m.fc(x @ x.mT @ x),
        lambda m, x: m.fc(x @ x.adjoint() @ x),
        lambda m, x: x @ m.fc.weight.T,
        lambda m, x: m.fc(x.swapaxes(1, 2).swapdims(1, 2)),
        lambda m, x: m.fc(x).clip(min=-1).clip(-3, 0.5).clip(m.low),
        lambda m, x: m.fc(x) * ((x[..., :3] > 0) & (x[..., :3] < 1) | (x[..., :3] > 2)),
        lambda m, x: m.fc(x / (x.var(-1, unbiased=False, keepdim=True) + 1).sqrt()),
        lambda m, x: m.fc(x / x.std(-1, keepdim=True) + x.var(1)[:, None]),
    ],
)
def test_other_spellings_of_operations(function):
    torch.manual_seed(0)
    model = Toy(function, fc=nn.Linear(8, 3)).eval()
    model.register_buffer("low", torch.tensor(-0.4))
    quantized = adalog.quantize(model, IMAGES, choices())
    assert decibels(quantized(IMAGES), model(IMAGES)) > 20


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
    found, wanted = (each(IMAGES) for each in (lambda x: capture(model, x).run([x]), model))
    for one, other in zip(*((each if read_again else (each,)) for each in (found, wanted)), strict=True):
        torch.testing.assert_close(one, other)
