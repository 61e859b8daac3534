"""Load models that timm, torchvision and transformers publish, with the preprocessing of their weights.

adalog first looks for the weights on this machine. It starts a download only if the server responds, because the
libraries repeat a hopeless request for a minute.
"""

import difflib
import types
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn

from adalog.errors import DataError
from adalog.extras import extra_module
from adalog.inputs.images import Preprocessing, side_before_crop
from adalog.inputs.refusals import SHOWN, listed, refusal

OTHER_WEIGHTS = "give --checkpoint FILE, or --no-pretrained for random weights"
PATIENCE = 5  # seconds to wait for a server to respond
_WEIGHTS = "the pretrained weights of "  # before a name
_HALF = {"image_mean": (0.5, 0.5, 0.5), "image_std": (0.5, 0.5, 0.5)}


def from_timm(name: str, pretrained: bool) -> tuple[nn.Module, Preprocessing]:
    """Load a model of timm by its name. Raises DataError."""
    timm = extra_module("timm", "timm")
    architecture = name.partition(".")[0]
    if not timm.is_model(architecture):
        raise _unknown("timm", name, timm.list_models())
    try:
        settings = timm.models.get_pretrained_cfg(name)
    except RuntimeError as cause:  # there are no weights with that tag
        raise _unknown("timm", name, timm.list_pretrained(f"{architecture}.*")) from cause
    repository, file = getattr(settings, "hf_hub_id", None), None
    if pretrained and repository:
        names = (settings.hf_hub_filename, "model.safetensors", "pytorch_model.bin")
        file = _cached(repository.partition("@")[0], filter(None, names))
    with refusal(f"{_WEIGHTS * pretrained}timm:{name} cannot be loaded", OTHER_WEIGHTS):
        if pretrained and repository and file is None:
            _reach_hub()
        overlay = None if file is None else {"file": file}
        module = timm.create_model(name, pretrained=pretrained, pretrained_cfg_overlay=overlay)
    given = timm.data.resolve_model_data_config(module)
    channels, height, width = given["input_size"]
    _only_rgb(f"timm:{name}", channels)
    resize: int | tuple[int, int] = side_before_crop(max(height, width), given["crop_pct"])
    if given["crop_mode"] not in ("center", "squash"):
        raise DataError(
            f"timm:{name} prepares images by crop_mode {given['crop_mode']!r}, which Preprocessing does not support: "
            "return (module, Preprocessing) from your own path.py:function"
        )
    if given["crop_mode"] == "squash":
        resize = (side_before_crop(height, given["crop_pct"]), side_before_crop(width, given["crop_pct"]))
    mean, std = _three(given["mean"]), _three(given["std"])
    return module, Preprocessing((height, width), resize, mean, std, given["interpolation"])


def from_torchvision(name: str, pretrained: bool) -> tuple[nn.Module, Preprocessing]:
    """Load a model of torchvision by its name. Raises DataError."""
    models = extra_module("torchvision", "timm").models
    names = models.list_models(module=models)
    if name not in names:
        raise _unknown("torchvision", name, names)
    weights = models.get_model_weights(name).DEFAULT
    given = weights.transforms()
    size, mean, std = _pair(given.crop_size), _three(given.mean), _three(given.std)
    with refusal(f"{_WEIGHTS * pretrained}torchvision:{name} cannot be loaded", OTHER_WEIGHTS):
        if pretrained and not Path(torch.hub.get_dir(), "checkpoints", weights.url.rpartition("/")[2]).exists():
            urllib.request.urlopen(urllib.request.Request(weights.url, method="HEAD"), timeout=PATIENCE).close()
        if pretrained:  # by default torchvision would unpickle whatever its cache holds
            weights.get_state_dict(progress=False, check_hash=True, weights_only=True)
        module = models.get_model(name, weights=weights if pretrained else None, progress=False)
        if getattr(module, "image_size", size[0]) != size[0]:  # the default size may differ
            module = models.get_model(name, weights=None, image_size=size[0])
    resize = given.resize_size[0] if len(given.resize_size) == 1 else _pair(given.resize_size)
    return module, Preprocessing(size, resize, mean, std, given.interpolation.value)


def from_hf(name: str, pretrained: bool) -> tuple[nn.Module, Preprocessing]:
    """Load a model of transformers from a folder, or from the hub by its ID. Raises DataError."""
    transformers = extra_module("transformers", "hf")
    folder = Path(name).expanduser()
    with refusal(f"hf:{name} cannot be found", "give a folder that save_pretrained wrote"):  # a name may be too long
        inside, there = folder.is_dir(), folder.exists()
    if inside and not (folder / "config.json").is_file():
        raise DataError(f"{folder} has no config.json: give a folder that save_pretrained wrote")
    if not inside and (there or name.startswith((".", "~", "/")) or name.count("/") > 1):
        raise DataError(
            f"{folder} is not a folder: give one that save_pretrained wrote, or hf:ID with the ID of a model on the hub"
        )

    def fetch(function: Callable[..., Any], **options: Any) -> Any:
        """Read from this machine, or else download from the hub."""
        try:
            return function(str(folder), local_files_only=True, trust_remote_code=False, **options)
        except OSError:
            if folder.is_dir():
                raise
        _reach_hub()
        return function(name, trust_remote_code=False, **options)

    with refusal(f"the config of hf:{name} cannot be loaded", "give hf:DIR, a folder that save_pretrained wrote"):
        config = fetch(transformers.AutoConfig.from_pretrained)
        config.dtype = torch.float32  # whatever type the weights are stored in
        _only_rgb(f"hf:{name}", getattr(config, "num_channels", 3))
        config.architectures = config.architectures or []  # transformers iterates over them
        classifies = any("ForImageClassification" in architecture for architecture in config.architectures)
        if not config.architectures:
            classifies = type(config) in transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING
        maker = transformers.AutoModelForImageClassification if classifies else transformers.AutoModel
    absent: list[str] = []
    with refusal(f"{_WEIGHTS * pretrained}hf:{name} cannot be loaded", OTHER_WEIGHTS):
        if pretrained:
            module, told = fetch(maker.from_pretrained, config=config, output_loading_info=True, weights_only=True)
            absent = sorted(told["missing_keys"])
        else:
            module = maker.from_config(config, trust_remote_code=False)
    if absent:
        raise DataError(
            f"the weights of hf:{name} lack {listed(absent)} of {type(module).__name__}: load only the part that has "
            "weights, in your own path.py:function"
        )
    with refusal(f"the preprocessing of hf:{name} cannot be read", "correct or remove its preprocessor_config.json"):
        return module, _hf_preprocessing(transformers, fetch, folder, config)


def _hf_preprocessing(
    transformers: types.ModuleType, fetch: Callable[..., Any], folder: Path, config: Any
) -> Preprocessing:
    """Return the preprocessing of preprocessor_config.json, or else the defaults of the model's processor."""
    size = _pair(getattr(config, "image_size", None) or 224)
    given: Mapping[str, Any] = {**_HALF, "resample": Image.Resampling.BILINEAR}
    files = ("preprocessor_config.json", "processor_config.json")
    stored = not folder.is_dir() or any((folder / file).exists() for file in files)
    if stored:
        try:
            given = fetch(transformers.AutoImageProcessor.from_pretrained).to_dict()
        except OSError:  # the hub has no such file
            if folder.is_dir():
                raise
            stored = False
    if not stored:
        try:
            choices = transformers.IMAGE_PROCESSOR_MAPPING[type(config)]
        except KeyError:
            choices = ()
        for choice in choices.values() if isinstance(choices, Mapping) else choices:
            try:  # a processor may need a package that is not installed
                given = choice().to_dict()
            except (ImportError, TypeError):
                continue
            break
        given = {**given, "size": {"height": size[0], "width": size[1]}, "do_center_crop": False}
    return _from_processor(given, size)


def _from_processor(given: Mapping[str, Any], size: tuple[int, int]) -> Preprocessing:
    """Convert a processor of transformers, given as a dictionary.

    size: (H, W) that the model takes, used if the processor does not set a size.
    """
    wanted, crop = given.get("size") or {}, given.get("crop_size")
    edge = wanted.get("shortest_edge")
    exact = (wanted["height"], wanted["width"]) if "height" in wanted else None
    if given.get("do_center_crop") and crop:
        size = (crop["height"], crop["width"]) if isinstance(crop, Mapping) else _pair(crop)
    elif exact is not None:
        size = exact
    resize = edge or exact or size
    if not given.get("do_resize", True):
        resize = size
    normalises = given.get("do_normalize", True)
    return Preprocessing(
        size=size,
        resize=resize,
        mean=_three(given["image_mean"] if normalises else (0, 0, 0)),
        std=_three(given["image_std"] if normalises else (1, 1, 1)),
        interpolation=Image.Resampling(int(given.get("resample", 2))).name.lower(),  # type: ignore[arg-type]
        rescale=float(given.get("rescale_factor", 1 / 255)) if given.get("do_rescale", True) else 1.0,
    )


def _unknown(package: str, name: str, known: Iterable[str]) -> DataError:
    close = difflib.get_close_matches(name, sorted(set(known)), SHOWN)
    hint = f"did you mean {' or '.join(close)}?" if close else f"see {package}'s list_models()"
    return DataError(f"{package} has no model {name!r}: {hint}")


def _cached(repository: str, names: Iterable[str]) -> str | None:
    """Return the first of these files in the local cache of a hub repository, or None."""
    hub = extra_module("huggingface_hub", "hf")
    paths = (hub.try_to_load_from_cache(repository, name) for name in names)
    return next((path for path in paths if isinstance(path, str)), None)


def _reach_hub() -> None:
    """Raise at once if the hub cannot be reached or is switched off; a download would raise only after many retries."""
    hub = extra_module("huggingface_hub", "hf")
    hub.utils.get_session().head(hub.constants.ENDPOINT, timeout=PATIENCE)


def _only_rgb(spec: str, channels: int) -> None:
    if channels != 3:
        raise DataError(
            f"{spec} takes images with {channels} channels, but adalog only loads models for 3: choose another"
        )


def _pair(side: int | Sequence[int]) -> tuple[int, int]:
    """Return (H, W) from one side of a square, or from both sides."""
    sides = (side,) if isinstance(side, int) else tuple(side)
    return sides[0], sides[-1]


def _three(values: Sequence[float]) -> tuple[float, float, float]:
    red, green, blue = (float(value) for value in values)
    return red, green, blue
