"""A part of a model is quantized where it stands, and nothing else of the model changes."""

import copy
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import nn

import adalog
from adalog import CalibrationError, CaptureError, Config, Correction, QuantizedModel, Search
from adalog.calibration import stages
from stored import deserialise, serialise
from toys import TOKENS, Toy, decibels, tokens_config

CONFIG = Config(images=3, weight_bits=8, activation_bits=8, softmax_bits=8, search=Search(steps=0))
IMAGES = torch.randn(5, 3, 16, 16, generator=torch.Generator().manual_seed(1))


class Backbone(nn.Module):
    """Two feature maps by name; the images come as windows, four of each."""

    def __init__(self):
        super().__init__()
        self.fine, self.coarse = nn.Conv2d(3, 8, 2, 2), nn.Conv2d(8, 8, 2, 2)

    def forward(self, x, scale=1.0, *, mask=None):
        fine = self.fine(x * scale).relu_()
        return {"fine": fine, "coarse": self.coarse(fine)}


class Detector(nn.Module):
    def __init__(self, call=lambda backbone, windows: backbone(windows)):
        super().__init__()
        torch.manual_seed(0)
        self.backbone, self.head, self.call = Backbone(), nn.Linear(8, 4), call
        self.drop = nn.Dropout(0.5).eval()
        self.also = nn.ModuleList([self.backbone])

    def forward(self, images):
        windows = images.unfold(2, 8, 8).unfold(3, 8, 8).permute(0, 2, 3, 1, 4, 5).flatten(0, 2)
        features = self.call(self.backbone, windows)
        return self.head(self.drop(features["coarse"].mean((2, 3)) + features["fine"].mean((2, 3)))).view(-1, 16)


def assert_close(actual, expected, least=30):
    """By signal to noise [dB]: 8 bits give some 40."""
    assert actual.shape == expected.shape
    assert least < decibels(actual, expected) < float("inf")


@pytest.mark.parametrize(
    "call",
    [
        lambda backbone, windows: backbone(windows),
        lambda backbone, windows: backbone(scale=1.0, x=windows),
        lambda backbone, windows: backbone(windows, 0.5),
        lambda backbone, windows: backbone(windows, scale=1, mask=None),
    ],
    ids=["position", "name", "a number", "defaults"],
)
@torch.no_grad()
def test_a_backbone_in_its_detector(call):
    model = Detector(call).train()
    model.drop.eval()
    backbone, expected = model.backbone, model(IMAGES)
    rest = {name: value.clone() for name, value in model.state_dict().items() if name.startswith("head")}
    modes = {name: module.training for name, module in model.named_modules() if "backbone" not in name}
    result = adalog.quantize(backbone, IMAGES, CONFIG, within=model)
    assert isinstance(result, QuantizedModel)
    assert model.backbone is model.also[0] is result
    assert result.provenance["images"] == 3
    assert result.float_sites() == []
    assert_close(model(IMAGES), expected)
    assert model(IMAGES[:1]).shape == (1, 16)
    assert modes == {name: model.get_submodule(name).training for name in modes}
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in rest.items())
    assert not backbone._forward_hooks
    assert not backbone._forward_pre_hooks


def test_what_a_call_gives_stays_what_it_was():
    model = Detector(lambda backbone, windows: backbone(windows, 0.5))
    result = adalog.quantize(model.backbone, IMAGES, CONFIG, within=model)
    windows = IMAGES[..., :8, :8]
    assert list(result(windows, scale=0.5)) == ["fine", "coarse"]
    for call in (lambda: result(windows), lambda: result(windows, torch.ones(())), lambda: result(0.5, 0.5)):
        with pytest.raises(TypeError, match="was quantized for the tensors"):
            call()


@contextmanager
def unchanged(model, name):
    """Give a part of a model by name, and check afterwards that nothing of the model changed."""
    part, before = getattr(model, name), copy.deepcopy(model.state_dict())
    yield part
    assert getattr(model, name) is part
    assert not part._forward_hooks
    assert not part._forward_pre_hooks
    assert model.training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def fails(backbone, windows):
    backbone(windows)
    raise ArithmeticError("of the model's own")


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda b, x: {**b(x), **b(x, 2.0)}, CalibrationError, "Backbone is called 2 times in a forward pass of"),
        (lambda b, x: dict.fromkeys(("fine", "coarse"), b.fine(x)), CalibrationError, "Backbone is not called in"),
        (lambda b, x: b(x, mask=object()), CalibrationError, "an argument mask of type object"),
        (lambda b, x: b(x, torch.ones(1, 1, 1, 1)), CaptureError, r"\(12, 3, 8, 8\), \(1, 1, 1, 1\)"),
        (fails, ArithmeticError, "of the model's own"),
    ],
)
def test_nothing_changes_where_it_fails(call, error, words):
    model = Detector(call).train()
    with unchanged(model, "backbone") as backbone, pytest.raises(error, match=words):
        adalog.quantize(backbone, IMAGES, CONFIG, within=model)


class Encoder(nn.Module):
    """An encoder that takes keyword arguments only, as those inside detectors do."""

    def __init__(self):
        super().__init__()
        self.embed, self.mix = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 8)

    def forward(self, *, pixel_values, mask=None, image_sizes=(), dtype=None, **options):
        x = self.embed(pixel_values).flatten(2).transpose(1, 2).to(dtype or torch.float32)
        return {"features": self.mix(x if mask is None else x * mask)}


def of_dicts(call):
    """A detector that takes a list of dicts, one per image."""

    def function(m, batch):
        return call(m.encoder, torch.stack([sample["image"] for sample in batch]))["features"]

    torch.manual_seed(0)
    return Toy(function, encoder=Encoder())


def of_tensor(detector):
    """A model that takes images, and calls a detector on dicts of them."""
    return Toy(lambda m, images: m.detector([{"image": image} for image in images]), detector=detector)


@pytest.mark.parametrize(
    "call",
    [
        lambda encoder, x: encoder(pixel_values=x),
        lambda encoder, x: encoder(pixel_values=x, image_sizes=x.shape[-2:], dtype=x.dtype, verbose=False, kind="fine"),
        lambda encoder, x: encoder(pixel_values=x, mask=x.new_ones(len(x), 16, 1), levels={"fine": [1, 2]}),
    ],
    ids=["a tensor", "constants", "two tensors"],
)
@torch.no_grad()
def test_an_encoder_of_keyword_arguments_in_a_detector_of_dicts(call):
    detector = of_dicts(call).eval()
    model = of_tensor(detector).eval()
    expected = model(IMAGES)
    result = adalog.quantize(detector.encoder, IMAGES, CONFIG, within=model)
    assert detector.encoder is result
    assert_close(model(IMAGES), expected)
    assert detector([{"image": IMAGES[0]}]).shape == (1, 16, 8)


@pytest.mark.parametrize(
    ("call", "wrap", "words"),
    [
        (
            lambda encoder, x: encoder(pixel_values=x),
            lambda detector: detector,
            r"Toy fails on the images before it calls Encoder \(IndexError: .*pass Encoder alone",
        ),
        (
            lambda encoder, x: encoder(pixel_values=x, image_sizes=[(16, 16)] * len(x)),
            of_tensor,
            "lists among the arguments of Encoder depend on the number of images.*choose a module inside it",
        ),
    ],
    ids=["dicts", "a size per image"],
)
def test_arguments_of_no_one_meaning_are_refused(call, wrap, words):
    detector = of_dicts(call).train()
    with unchanged(detector, "encoder") as encoder, pytest.raises(CalibrationError, match=words) as refused:
        adalog.quantize(encoder, IMAGES, CONFIG, within=wrap(detector).train())
    assert "\n" not in str(refused.value)


def test_a_loaded_model_takes_tensors_by_position():
    model = Detector()
    result = adalog.quantize(model.backbone, IMAGES, CONFIG, within=model)
    loaded, windows = deserialise(serialise(result)), IMAGES[..., :8, :8]
    assert torch.equal(loaded(windows)["coarse"], result(windows)["coarse"])
    with pytest.raises(TypeError, match="by position, got x by name"):
        loaded(x=windows)


def test_refuses_a_module_that_is_no_part():
    model = Detector()
    for other in (Backbone(), model):
        with pytest.raises(ValueError, match=r"is not a part of Detector: pass within="):
            adalog.quantize(other, IMAGES, CONFIG, within=model)


SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 8, "intermediate_size": 32}
YOLOS = {"image_size": [32, 32], "num_detection_tokens": 4, "use_mid_position_embeddings": False}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "choices"), [("ViTForImageClassification", {"image_size": 32}), ("YolosForObjectDetection", YOLOS)]
)
@torch.no_grad()
def test_the_backbone_of_a_transformers_model(name, choices):
    """Its outputs are of its own class, so that the head finds the fields that are not set."""
    import transformers

    kind = getattr(transformers, name)
    torch.manual_seed(0)
    model = kind(kind.config_class(**SMALL, **choices)).eval()
    backbone = model.vit
    images = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    expected, features = model(images), backbone(images)
    result = adalog.quantize(backbone, images, CONFIG, within=model)
    actual = model(images)
    assert type(result(images)) is type(features)
    assert type(actual) is type(expected)
    assert_close(actual.logits, expected.logits, least=20)


# --- parts that are called several times, or with more than tensors by position ---------------------------------------


class Head(nn.Module):
    """Scores of one map."""

    def __init__(self):
        super().__init__()
        self.hidden, self.scores = nn.Conv2d(8, 8, 3, 1, 1), nn.Conv2d(8, 2, 1)

    def forward(self, x):
        return {"scores": self.scores(self.hidden(x).relu())}


def pyramid(head, call, sizes):
    """A head on maps, by `call`, and one feature an image from what it gives."""

    def function(m, images):
        x = m.stem(images)
        scores = call(m.head, [nn.functional.avg_pool2d(x, size) * size for size in sizes])
        return torch.cat([value.mean((2, 3)) for value in scores], 1)

    torch.manual_seed(0)
    return Toy(function, stem=nn.Conv2d(3, 8, 2, 2), head=head()).eval()


def one_by_one(head, maps):
    return [head(value)["scores"] for value in maps]


def together(head, maps, **choices):
    return [value["scores"] for value in head(maps, **choices)]


class Heads(Head):
    """The same head on a list of maps."""

    def forward(self, maps):
        return [super(Heads, self).forward(value) for value in maps]


class Named(Heads):
    """The same on maps by name, with a number besides."""

    def forward(self, maps, *, scale=1.0, also=None):
        return [{"scores": value["scores"] * scale} for value in super().forward(list(maps.values()))]


MINMAX = replace(Config.preset("w8a8", "minmax"), images=5)
CALLS = {
    "several sizes": (Head, one_by_one, (1, 2, 4)),
    "one size": (Head, one_by_one, (2, 2)),
    "a list": (Heads, together, (1, 2, 4)),
    "a tuple": (Heads, lambda head, maps: together(head, tuple(maps)), (1, 2)),
    "a dict": (Named, lambda head, maps: together(head, dict(zip("abc", maps, strict=False)), scale=2.0), (1, 2)),
}


@pytest.mark.parametrize("case", CALLS)
@torch.no_grad()
def test_a_head_on_several_maps(case):
    model = pyramid(*CALLS[case])
    read = []
    hook = model.head.hidden.register_forward_pre_hook(lambda module, args: read.append(args[0]))
    expected = model(IMAGES)
    hook.remove()
    result = adalog.quantize(model.head, IMAGES, MINMAX, within=model)
    assert_close(model(IMAGES), expected)
    assert model(IMAGES[:1]).shape == expected[:1].shape
    assert sorted(result.program.weights) == ["hidden.weight", "scores.weight"]
    assert sorted(result.program.quantizers) == ["hidden.input", "scores.input"]
    assert [row.site for row in result.ledger] == ["hidden", "scores"]
    assert len(read) == len(CALLS[case][2])
    low, high = min(float(value.min()) for value in read), max(float(value.max()) for value in read)
    assert float(result.program.quantizers["hidden.input"].scale) == pytest.approx((high - low) / 255, rel=1e-5)


@torch.no_grad()
def test_what_maps_of_several_sizes_gave_is_saved_for_any_size():
    model = pyramid(*CALLS["several sizes"])
    result = adalog.quantize(model.head, IMAGES, MINMAX, within=model)
    loaded = deserialise(serialise(result))
    assert loaded.quantized.shapes() == {"x": ["B", 8, "H", "W"]}
    for shape in ((2, 8, 8, 8), (1, 8, 5, 3)):
        value = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        assert torch.equal(loaded(value)["scores"], result(value)["scores"])
        assert torch.allclose(loaded.compile("torch")(value)["scores"], result(value)["scores"], atol=1e-5)


@torch.no_grad()
def test_a_list_is_saved_as_its_members():
    model = pyramid(*CALLS["a list"])
    result = adalog.quantize(model.head, IMAGES, MINMAX, within=model, sizes="free")
    loaded = deserialise(serialise(result))
    assert list(loaded.quantized.shapes()) == ["maps_0", "maps_1", "maps_2"]
    maps = [torch.randn(2, 8, size, size) for size in (9, 4, 2)]
    wanted, found = result(maps), loaded(*maps)
    assert [list(value) for value in wanted] == [["scores"]] * 3
    assert all(torch.equal(a["scores"], b["scores"]) for a, b in zip(wanted, found, strict=True))
    with pytest.raises(TypeError, match="was quantized for the tensors"):
        result(maps[:2])


class Mixing(nn.Module):
    """Each place of a map weighted by how alike it is to the others."""

    def forward(self, x):
        rows = x.flatten(2).transpose(1, 2)
        return {"scores": ((rows @ rows.transpose(1, 2)).softmax(-1) @ rows).transpose(1, 2).unflatten(2, x.shape[2:])}


@pytest.mark.parametrize(
    ("head", "call", "words"),
    [
        (Mixing, one_by_one, "Mixing is called on maps of several sizes and multiplies computed values"),
        (
            lambda: nn.Linear(8, 2),
            lambda head, maps: [head(value.flatten(2).transpose(1, 2)).transpose(1, 2)[..., None] for value in maps],
            r"called 2 times, on values of the shapes \(5, 64, 8\), \(5, 16, 8\)\. Calls can share quantizers only if",
        ),
    ],
)
def test_calls_that_cannot_share(head, call, words):
    model = pyramid(head, call, (1, 2))
    with pytest.raises(CalibrationError, match=words):
        adalog.quantize(model.head, IMAGES, MINMAX, within=model)


@torch.no_grad()
def test_attention_called_on_maps_of_one_size():
    model = pyramid(Mixing, one_by_one, (2, 2))
    expected = model(IMAGES)
    adalog.quantize(model.head, IMAGES, MINMAX, within=model)
    assert_close(model(IMAGES), expected, least=20)


def twice(m, x):
    """A part that is called twice on maps of one size, the second time on far larger values."""
    return m.head(m.part(10 * m.part(x) + 5).mean(1))


def test_a_stage_fits_what_all_calls_give(monkeypatch):
    torch.manual_seed(0)
    parts = {"part": nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), "head": nn.Linear(8, 3)}
    whole = Toy(twice, **parts).eval()
    images, given, fitted = torch.randn(16, 5, 8), [], []
    watch = whole.part.register_forward_hook(lambda _, inputs, output: given.append(inputs[0]))
    with torch.no_grad():
        whole(images)
    watch.remove()
    corrected = stages.correct

    def watched(program, seen, *rest, **more):
        fitted.extend(seen)
        return corrected(program, seen, *rest, **more)

    monkeypatch.setattr(stages, "correct", watched)
    config = Config(4, 4, 4, images=8, search=Search(steps=1), stages=(Correction(images=16),))
    part = adalog.quantize(whole.part, images, config, within=whole)
    assert part.provenance["fitted_images"] == 32  # of both calls
    found, expected = (values.flatten().sort().values for values in (fitted[0], torch.cat(given)))
    torch.testing.assert_close(found, expected)


@torch.no_grad()
def test_part_of_a_model_in_half_precision():
    torch.manual_seed(0)
    whole = Toy(lambda m, x: m.head(m.body(x)), body=nn.Linear(8, 8), head=nn.Linear(8, 3)).to(torch.bfloat16).eval()
    quantized = adalog.quantize(whole.body, TOKENS.bfloat16(), tokens_config(), within=whole)
    found, wanted = (each(TOKENS.bfloat16()) for each in (quantized, whole.body))
    assert found.dtype == torch.bfloat16
    assert decibels(found.float(), wanted.float()) > 25
