"""Convert the evaluation transforms of timm, torchvision and transformers to a `Preprocessing` with the same pixels.

An image processor of transformers is code, and its fields mean different things in different classes:
`size={"shortest_edge": 224}` resizes to 224 pixels in CLIP, to 256 in LeViT, and to 224 / crop_pct in ConvNeXt. adalog
therefore lets the processor prepare a few images, and compares the pixels of every meaning that its fields may have.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from adalog.errors import DataError, one_line
from adalog.inputs.images import Channels, Fit, Interpolation, Position, Preprocessing
from adalog.inputs.refusals import shorten

_WAY_OUT = "return (module, Preprocessing) from your own path.py:function"
# Sizes (W, H) of the compared images: landscape and portrait, with odd sides. A last image is larger than the result.
_PROBES = ((403, 301), (229, 340), (61, 97))
# Largest mean difference between equal preparations, in levels of 255: Pillow and torchvision round differently.
_TOLERANCE = 0.5
# The fields of a processor that `_candidates` interprets.
_READ = {
    *("size", "crop_size", "pad_size", "crop_pct", "do_resize", "do_center_crop", "do_pad", "resample"),
    *("do_rescale", "rescale_factor", "rescale_offset", "do_normalize", "image_mean", "image_std", "include_top"),
    *("do_flip_channel_order", "background_color"),
}
# Fields that describe files, interfaces and labels, but not pixels.
_APART = {
    *("image_processor_type", "feature_extractor_type", "processor_class", "model_input_names", "default_to_square"),
    *("do_convert_rgb", "do_reduce_labels", "do_convert_annotations", "data_format", "input_data_format", "device"),
    *("return_tensors", "format", "mask_size", "mask_pad_size", "num_labels", "ignore_index"),
}


def of_timm(name: str, settings: Mapping[str, Any]) -> Preprocessing:
    """Convert the data settings of a timm model (`resolve_model_data_config`). Raises DataError."""
    channels, height, width = settings["input_size"]
    check_channels(name, channels)
    share, mode = settings["crop_pct"], settings["crop_mode"]
    if mode not in ("center", "squash", "border"):
        raise DataError(
            f"{name} prepares images by crop_mode {mode!r}, which Preprocessing does not support: {_WAY_OUT}"
        )
    mean, std = _three(settings["mean"]), _three(settings["std"])
    size, sides = (height, width), (math.floor(height / share), math.floor(width / share))
    resize = sides[0] if mode == "center" and sides[0] == sides[1] else sides
    fits: dict[str, Fit] = {"center": "cover", "squash": "stretch", "border": "contain"}
    fit: Fit = "stretch" if isinstance(resize, int) else fits[mode]
    # A crop_pct above 1 makes images smaller than the crop; torchvision fills what is missing with zeros.
    fill = (0.0,) * 3 if any(before < after for before, after in zip(sides, size, strict=True)) else None
    if mode == "border":
        fill = _three([round(255 * value) for value in mean])
    return Preprocessing(size, resize, mean, std, settings["interpolation"], fit=fit, fill=fill)


def of_torchvision(transform: Any) -> Preprocessing:
    resize = transform.resize_size[0] if len(transform.resize_size) == 1 else pair(transform.resize_size)
    mean, std = _three(transform.mean), _three(transform.std)
    return Preprocessing(pair(transform.crop_size), resize, mean, std, transform.interpolation.value)


def of_processor(processor: Any) -> Preprocessing:
    """Convert an image processor of transformers.

    Raises DataError, which names the fields that cannot be converted, if no preprocessing gives the same pixels.
    """
    name = type(processor).__name__
    if hasattr(processor, "data_config"):  # the processor of timm's models in transformers
        return of_timm(name, processor.data_config)
    _interpolation(processor)
    probes = [_probe(width, height) for width, height in _PROBES]
    prepared = [_run(processor, probe) for probe in probes]
    height, width = prepared[0].shape[2:]
    probes.append(_probe(2 * width + 37, 2 * height + 91))
    prepared.append(_run(processor, probes[-1]))
    if len({pixels.shape for pixels in prepared}) > 1:
        raise DataError(
            f"{name} prepares images of different sizes by {_unusual(processor)}, but adalog needs one size for all: "
            f"{_WAY_OUT}"
        )
    for candidate in _candidates(processor, (height, width)):
        if all(_agree(candidate, probe, pixels[0]) for probe, pixels in zip(probes, prepared, strict=True)):
            return candidate
    raise _unsupported(processor)


def check_channels(name: str, channels: int) -> None:
    if channels != 3:
        raise DataError(
            f"{name} takes images with {channels} channels, but adalog only loads models for 3: choose another"
        )


def pair(side: int | Sequence[int]) -> tuple[int, int]:
    """Return (H, W) from one side of a square, or from both sides."""
    sides = (side,) if isinstance(side, int) else tuple(side)
    return sides[0], sides[-1]


def _three(values: Any) -> tuple[float, float, float]:
    red, green, blue = (float(value) for value in (values if isinstance(values, Sequence) else [values] * 3))
    return red, green, blue


def _probe(width: int, height: int) -> Image.Image:
    """Return an image of smooth noise, in which a shift by one pixel changes most pixels by many levels."""
    coarse = np.random.default_rng(0).integers(0, 256, (height // 3, width // 3, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height))


def _run(processor: Any, image: Image.Image) -> Tensor:
    """Return the pixels (1, 3, H, W) of an image that the processor prepares."""
    try:
        prepared = processor(image, return_tensors="pt")
        pixels = prepared["pixel_values"]
    except Exception as cause:  # a processor may raise any error, for example if it needs boxes or several images
        raise DataError(
            f"{type(processor).__name__} does not prepare one image by itself ({one_line(cause)}): {_WAY_OUT}"
        ) from cause
    alone = sum(key.startswith("pixel_values") for key in prepared) == 1  # not with crops of the same image
    if not alone or not isinstance(pixels, Tensor) or pixels.ndim != 4 or pixels.shape[:2] != (1, 3):
        raise _unsupported(processor)
    return pixels.to(torch.float32)


def _agree(preprocessing: Preprocessing, image: Image.Image, pixels: Tensor) -> bool:
    levels = torch.tensor(preprocessing.std).view(3, 1, 1) / preprocessing.rescale
    return bool(((preprocessing(image) - pixels) * levels).abs().mean() < _TOLERANCE)


def _candidates(processor: Any, size: tuple[int, int]) -> Iterator[Preprocessing]:
    """Yield the preprocessings that the fields of a processor may mean, the most likely first.

    size: (H, W) of the prepared images.
    """

    def field(name: str) -> Any:
        return getattr(processor, name, None)

    interpolation = _interpolation(processor)
    rescale = float(field("rescale_factor") or 1 / 255) if field("do_rescale") else 1.0
    offset = 1.0 if field("rescale_offset") else 0.0
    values = [((offset,) * 3, (1.0,) * 3)]
    if field("do_normalize") and field("image_mean") is not None:
        own, deviation = _three([value + offset for value in _three(field("image_mean"))]), _three(field("image_std"))
        values.insert(0, (own, deviation))
        if field("include_top"):  # EfficientNet divides by the standard deviation a second time
            values.insert(0, (own, _three([value**2 for value in deviation])))
    orders = get_args(Channels)[:: -1 if field("do_flip_channel_order") else 1]
    for geometry, (mean, std), order in itertools.product(_geometries(processor, size), values, orders):
        neutral = [value / rescale for value in mean]  # becomes zero
        fills = [(0.0, 0.0, 0.0), _three(neutral if order == "rgb" else neutral[::-1])]
        if field("background_color") is not None:
            fills.insert(0, _three(field("background_color")))
        for fill in fills if geometry.fill else (None,):
            yield replace(
                geometry, mean=mean, std=std, interpolation=interpolation, rescale=rescale, fill=fill, channels=order
            )


def _interpolation(processor: Any) -> Interpolation:
    own = getattr(processor, "resample", None)
    number = Image.Resampling.BILINEAR.value if own is None else int(own)
    name = Image.Resampling(number).name.lower()
    if name not in get_args(Interpolation):
        raise DataError(
            f"{type(processor).__name__} resizes by resample = {number} ({name}), which Preprocessing does not "
            f"support: {_WAY_OUT}"
        )
    return name  # type: ignore[return-value]


def _geometries(processor: Any, size: tuple[int, int]) -> Iterator[Preprocessing]:
    """Yield the resizes, crops and paddings to `size` that the fields of a processor may mean."""
    sizes = _sizes(processor, "size") if getattr(processor, "do_resize", None) else {}
    side, longest = sizes.get("shortest_edge"), sizes.get("longest_edge")
    resizes: list[tuple[int | tuple[int, int], Fit]] = []
    if longest:
        resizes.append(((longest, longest), "contain"))
    elif side:
        share = getattr(processor, "crop_pct", None)
        sides = [side, *([int(side / share)] if share else []), int(256 / 224 * side)]  # the last one in LeViT
        resizes += [*((shorter, "stretch") for shorter in sides), ((side, side), "stretch")]
    for height, width in (("height", "width"), ("max_height", "max_width")):
        if height in sizes and width in sizes:
            target = sizes[height], sizes[width]
            resizes += [(target, "stretch"), (target, "contain")]
    for resize, fit in resizes:
        target = (resize, resize) if isinstance(resize, int) else resize
        margins = [before - after for before, after in zip(target, size, strict=True)]
        pads = fit == "contain" or min(margins) < 0
        # Both ways to round the centre agree for these margins, if they are the same for all images.
        same = fit == "stretch" and not isinstance(resize, int) and all(margin % 4 != 3 for margin in margins)
        positions: tuple[Position, ...] = ("center",) if same and not pads else ("center-floor", "top-left")
        for position in positions:
            yield Preprocessing(size, resize, fit=fit, position=position, fill=(0.0, 0.0, 0.0) if pads else None)


def _sizes(processor: Any, name: str) -> dict[str, int]:
    value = getattr(processor, name, None)
    return {} if value is None else {key: int(side) for key, side in dict(value).items() if side is not None}


def _unsupported(processor: Any) -> DataError:
    return DataError(
        f"{type(processor).__name__} prepares images by {_unusual(processor)} in a way that Preprocessing does not "
        f"support: {_WAY_OUT}"
    )


def _unusual(processor: Any) -> str:
    """Return the fields that only few processors have and that are set, or else the sizes."""
    fields = processor.to_dict()
    unset = {key for key, value in fields.items() if value is None or value is False or value in ("", [], {})}
    keys = sorted(key for key in fields.keys() - _READ - _APART - unset if not key.startswith("_"))
    sizes = {key: _sizes(processor, key) for key in ("size", "crop_size")}
    return (
        shorten(keys) if keys else " and ".join(f"{key} = {value}" for key, value in sizes.items() if value) or "fields"
    )
