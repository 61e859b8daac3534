"""Prepared pixels are those of the published transform: timm's, torchvision's, and the processors of transformers."""

import contextlib
import functools
import itertools

import numpy as np
import pytest
import torch
from PIL import Image

from adalog import DataError
from adalog.inputs import transforms
from adalog.inputs.transforms import of_processor, of_timm, of_torchvision

timm = pytest.importorskip("timm")
torchvision = pytest.importorskip("torchvision")
transformers = pytest.importorskip("transformers")
mapping = pytest.importorskip("transformers.models.auto.image_processing_auto")

# Other sizes (W, H) than those that `of_processor` compares, with odd sides, and other modes of Pillow.
SIZES = ((333, 500), (501, 257), (101, 131), (57, 31))
MODES = ("L", "P", "CMYK", "RGBA", "RGB")
# Two of these images, one larger and one smaller than most results, serve where many transforms are compared.
FEW = slice(1, 4, 2)
# The most pixels a side of a small processor's images. The slow test of fields takes every fourth of these processors.
SMALL, EVERY = 256, 4


@functools.cache
def photo(width, height, mode="RGB"):
    """Smooth noise, with less red than blue."""
    if mode != "RGB":
        return photo(width, height).convert(mode)
    random = np.random.default_rng(width)
    codes = random.integers(0, 256, (height // 4 + 2, width // 4 + 2, 3), dtype=np.uint8)
    codes[..., 0] //= 2
    return Image.fromarray(codes).resize((width, height), Image.Resampling.BICUBIC)


def assert_same(preprocessing, transform, cases=None):
    """Compare pixels in levels of 255. Pillow and torchvision may round each of two resizes differently.

    cases: the compared images, as a slice of those of all sizes and modes; default: all of them.
    """
    levels = torch.tensor(preprocessing.std).view(3, 1, 1) / preprocessing.rescale
    height, width = preprocessing.size
    images = zip((*SIZES, (2 * width + 5, height + 8)), MODES, strict=True)
    for size, mode in list(images)[cases or slice(None)]:
        image = photo(*size, mode)
        expected, prepared = transform(image.convert("RGB")), preprocessing(image)
        assert prepared.shape == expected.shape
        error = (prepared - expected).mul(levels).abs()
        assert error.mean() < 0.5, (size, mode)
        assert (error > 2).float().mean() < 0.04, (size, mode)  # some processors do not clip what bicubic overshoots


def timm_settings():
    """Every different evaluation transform among timm's pretrained weights."""
    settings = {}
    for name in timm.list_pretrained():
        config = timm.data.resolve_data_config({}, pretrained_cfg=timm.models.get_pretrained_cfg(name).to_dict())
        settings.setdefault(tuple(sorted(config.items())), config)
    return list(settings.values())


def assert_timm(settings, cases=None):
    if settings["input_size"][0] != 3:
        with pytest.raises(DataError, match="channels"):
            of_timm("timm:x", settings)
        return
    assert_same(of_timm("timm:x", settings), timm.data.create_transform(**settings), cases)


@pytest.mark.parametrize("crop_mode", ["center", "squash", "border"])
@pytest.mark.parametrize("input_size", [(3, 96, 96), (3, 60, 92)])
@pytest.mark.parametrize("crop_pct", [0.9, 1.0, 1.15])
def test_every_crop_of_timm(crop_mode, input_size, crop_pct):
    settings = {"input_size": input_size, "crop_mode": crop_mode, "crop_pct": crop_pct, "interpolation": "bicubic"}
    assert_timm(settings | {"mean": (0.4, 0.5, 0.6), "std": (0.3, 0.2, 0.1)})


@pytest.mark.slow
def test_every_transform_of_timm():
    """One image is compared, since the sizes and modes of images are those of `test_every_crop_of_timm`."""
    settings = timm_settings()
    assert len(settings) > 50
    for each in settings:
        assert_timm(each, slice(1, 2))


def test_another_crop_of_timm_is_refused():
    settings = {"input_size": (3, 8, 8), "crop_pct": 1.0, "crop_mode": "fold"}
    with pytest.raises(DataError, match="timm:x prepares images by crop_mode 'fold', which"):
        of_timm("timm:x", settings)


@pytest.mark.slow
def test_every_transform_of_torchvision():
    models = torchvision.models
    names = models.list_models(module=models)
    weights = [each for name in names for each in models.get_model_weights(name)]
    different = {repr(each.transforms()): each.transforms() for each in weights}
    assert len(different) > 20
    for transform in different.values():
        assert_same(of_torchvision(transform), transform, FEW)


def processors():
    """Every image processor of the installed release that works without arguments, with its defaults."""
    names = {name for choices in mapping.IMAGE_PROCESSOR_MAPPING_NAMES.values() for name in choices.values() if name}
    for name in sorted(names):
        # Some need another package, or arguments.
        with contextlib.suppress(AttributeError, ImportError, TypeError, ValueError):
            yield name, mapping.get_image_processor_class_from_name(name)()


def small(every=EVERY):
    """One in `every` processors whose images have at most `SMALL` pixels a side."""
    sizes = ((pair, transforms._sizes(pair[1], "size").values()) for pair in processors())
    return itertools.islice((pair for pair, sides in sizes if max(sides, default=999) <= SMALL), 0, None, every)


def changed(processor):
    """The processor with each of its switches turned, and with other resampling, sizes and scales."""
    fields = processor.to_dict()
    changes = [{name: not value} for name, value in fields.items() if isinstance(value, bool)]
    changes += [{"resample": number} for number in (0, 1, 2, 3, 4)]
    changes += [{"rescale_factor": 1 / 127.5}, {"image_mean": [0.1, 0.2, 0.3]}, {"crop_pct": 0.8}, {"pad_size": 300}]
    changes += [{"size": {"height": 75, "width": 101}}, {"size": {"shortest_edge": 98}}, {"size": {"longest_edge": 98}}]
    for change in changes:
        with contextlib.suppress(AttributeError, TypeError, ValueError):  # the class may refuse a change
            yield type(processor).from_dict({**fields, **change})


def assert_honoured(name, processor, cases=None):
    """The pixels are the processor's own, or its class and what it does otherwise are named. cases: as above."""
    try:
        preprocessing = of_processor(processor)
    except DataError as refusal:
        message = str(refusal)
    else:
        assert_same(preprocessing, lambda image: processor(image, return_tensors="pt")["pixel_values"][0], cases)
        return True
    assert type(processor).__name__ in message
    assert "return (module, Preprocessing) from your own path.py:function" in message
    assert len(message.splitlines()) == 1
    return False


def test_processors_are_honoured_or_refused():
    assert True in {assert_honoured(name, processor) for name, processor in small(3 * EVERY)}


@pytest.mark.slow
def test_every_processor_is_honoured_or_refused():
    """Of a processor with two backends one is compared, by turns."""
    backends = itertools.groupby(processors(), lambda pair: pair[0].removesuffix("Pil"))
    families = [list(pairs) for _, pairs in backends]
    turns = (family[index % len(family)] for index, family in enumerate(families))
    honoured = {name.removesuffix("Pil") for name, processor in turns if assert_honoured(name, processor, FEW)}
    assert len(honoured) > 30
    for name in ("MobileViT", "Levit", "PoolFormer", "Sam", "ConvNext", "EfficientNet", "Beit"):
        assert f"{name}ImageProcessor" in honoured


@pytest.mark.slow
def test_every_field_of_every_processor_is_honoured_or_refused():
    honoured = [assert_honoured(name, other, FEW) for name, processor in small() for other in changed(processor)]
    assert sum(honoured) > 40


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("Detr", {}, r"of different sizes by size = \{.*'longest_edge': 1333.*\}, but adalog needs one"),
        ("ViT", {"do_resize": False}, "of different sizes"),
        ("ViT", {"resample": 4}, r"resizes by resample = 4 \(box\)"),
        ("SuperGlue", {}, "SuperGlueImageProcessor does not prepare one image by itself"),
        ("Owlv2", {"size": {"height": 96, "width": 96}}, "Owlv2ImageProcessor prepares images by size = "),
    ],
)
def test_a_processor_that_is_refused_says_why(name, fields, message):
    with pytest.raises(DataError, match=message):
        of_processor(getattr(transformers, f"{name}ImageProcessor")(**fields))


def test_a_shift_by_one_pixel_is_found():
    """The crop of torchvision and that of transformers begin at different pixels for every fourth size."""
    processor = transformers.CLIPImageProcessor(size={"shortest_edge": 40}, crop_size={"height": 33, "width": 33})
    preprocessing = of_processor(processor)
    assert preprocessing.position == "center-floor"
    other = transforms.replace(preprocessing, position="center")
    assert (other(photo(43, 40)) - preprocessing(photo(43, 40))).abs().max() > 0.1
