"""Load models that timm, torchvision and transformers publish, with the preprocessing of their weights.

adalog first looks for the weights on this machine. It starts a download only if the server responds, because the
libraries repeat a hopeless request for a minute. `classes` is the number of classes, or None for the model's own.
"""

import difflib
import types
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from adalog.errors import DataError
from adalog.extras import extra_module
from adalog.inputs.images import Preprocessing
from adalog.inputs.refusals import SHOWN, refusal, shorten
from adalog.inputs.transforms import check_channels, of_processor, of_timm, of_torchvision, pair

OTHER_WEIGHTS = "give --checkpoint FILE, or --no-pretrained for random weights"
PATIENCE = 5  # seconds to wait for a server to respond
_WEIGHTS = "the pretrained weights of "  # before a name


def from_timm(name: str, pretrained: bool, classes: int | None = None) -> tuple[nn.Module, Preprocessing]:
    """Load a model of timm by its name. Raises DataError."""
    timm = extra_module("timm", "timm")
    architecture = name.partition(".")[0]
    if not timm.is_model(architecture):
        raise _unknown_model("timm", name, timm.list_models())
    try:
        settings = timm.models.get_pretrained_cfg(name)
    except RuntimeError as cause:  # there are no weights with that tag
        raise _unknown_model("timm", name, timm.list_pretrained(f"{architecture}.*")) from cause
    repository, file = getattr(settings, "hf_hub_id", None), None
    if pretrained and repository:
        names = (settings.hf_hub_filename, "model.safetensors", "pytorch_model.bin")
        file = _cached_file(repository.partition("@")[0], filter(None, names))
    with refusal(f"{_WEIGHTS * pretrained}timm:{name} cannot be loaded", OTHER_WEIGHTS):
        if pretrained and repository and file is None:
            _reach_hub()
        overlay = None if file is None else {"file": file}
        own = {} if classes is None else {"num_classes": classes}
        module = timm.create_model(name, pretrained=pretrained, pretrained_cfg_overlay=overlay, **own)
    return module, of_timm(f"timm:{name}", timm.data.resolve_model_data_config(module))


def from_torchvision(name: str, pretrained: bool, classes: int | None = None) -> tuple[nn.Module, Preprocessing]:
    """Load a model of torchvision by its name. Raises DataError."""
    models = extra_module("torchvision", "timm").models
    names = models.list_models(module=models)
    if name not in names:
        raise _unknown_model("torchvision", name, names)
    weights = models.get_model_weights(name).DEFAULT
    preprocessing = of_torchvision(weights.transforms())
    side = preprocessing.size[0]
    with refusal(f"{_WEIGHTS * pretrained}torchvision:{name} cannot be loaded", OTHER_WEIGHTS):
        if pretrained and not Path(torch.hub.get_dir(), "checkpoints", weights.url.rpartition("/")[2]).exists():
            urllib.request.urlopen(urllib.request.Request(weights.url, method="HEAD"), timeout=PATIENCE).close()
        if pretrained:  # by default torchvision would unpickle whatever its cache holds
            weights.get_state_dict(progress=False, check_hash=True, weights_only=True)
        own = {} if classes is None else {"num_classes": classes}
        module = models.get_model(name, weights=weights if pretrained else None, progress=False, **own)
        if getattr(module, "image_size", side) != side:  # the default size may differ
            module = models.get_model(name, weights=None, image_size=side, **own)
    return module, preprocessing


def from_hf(name: str, pretrained: bool, classes: int | None = None) -> tuple[nn.Module, Preprocessing]:
    """Load a model of transformers from a folder, or from the hub by its ID. Raises DataError."""
    transformers = extra_module("transformers", "hf")
    folder = Path(name).expanduser()
    with refusal(f"hf:{name} cannot be found", "give a folder that save_pretrained wrote"):  # a name may be too long
        inside, exists = folder.is_dir(), folder.exists()
    if inside and not (folder / "config.json").is_file():
        raise DataError(f"{folder} has no config.json: give a folder that save_pretrained wrote")
    if not inside and (exists or name.startswith((".", "~", "/")) or name.count("/") > 1):
        raise DataError(
            f"{folder} is not a folder: give one that save_pretrained wrote, or hf:ID with the ID of a model on the hub"
        )

    def fetch(function: Callable[..., Any], **options: Any) -> Any:
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
        if classes is not None:
            config.num_labels = classes
        check_channels(f"hf:{name}", getattr(config, "num_channels", 3))
        config.architectures = config.architectures or []  # transformers iterates over them
        classifies = any("ForImageClassification" in architecture for architecture in config.architectures)
        if not config.architectures:
            classifies = type(config) in transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING
        maker = transformers.AutoModelForImageClassification if classifies else transformers.AutoModel
    absent: list[str] = []
    with refusal(f"{_WEIGHTS * pretrained}hf:{name} cannot be loaded", OTHER_WEIGHTS):
        if pretrained:
            module, info = fetch(maker.from_pretrained, config=config, output_loading_info=True, weights_only=True)
            absent = sorted(info["missing_keys"])
        else:
            module = maker.from_config(config, trust_remote_code=False)
    if absent:
        raise DataError(
            f"the weights of hf:{name} lack {shorten(absent)} of {type(module).__name__}: load only the part that "
            "has weights, in your own path.py:function"
        )
    with refusal(f"the preprocessing of hf:{name} cannot be read", "correct or remove its preprocessor_config.json"):
        return module, _hf_preprocessing(transformers, fetch, folder, config)


def _hf_preprocessing(
    transformers: types.ModuleType, fetch: Callable[..., Any], folder: Path, config: Any
) -> Preprocessing:
    """Return the preprocessing of preprocessor_config.json, or else the defaults of the model's processor."""
    files = ("preprocessor_config.json", "processor_config.json")
    own = config.model_type == "timm_wrapper"  # its config.json holds timm's settings
    if own or not folder.is_dir() or any((folder / file).exists() for file in files):
        try:
            return of_processor(fetch(transformers.AutoImageProcessor.from_pretrained))
        except OSError:  # the hub has no such file
            if folder.is_dir():
                raise
    size = pair(getattr(config, "image_size", None) or 224)
    try:
        choices = transformers.IMAGE_PROCESSOR_MAPPING[type(config)]
    except KeyError:
        choices = ()
    refusal_of_all = None
    for choice in choices.values() if isinstance(choices, Mapping) else choices:
        for sizes in ({"height": size[0], "width": size[1]}, {"shortest_edge": min(size)}):
            try:  # a processor may need a package that is not installed, or sizes of another kind
                preprocessing = of_processor(choice(size=sizes, crop_size=None, do_center_crop=False))
            except (ImportError, TypeError, ValueError):
                continue
            except DataError as cause:
                refusal_of_all = refusal_of_all or cause
                continue
            if preprocessing.size == size:
                return preprocessing
    if refusal_of_all is not None:
        raise refusal_of_all
    return Preprocessing(size, size, (0.5,) * 3, (0.5,) * 3, "bilinear")


def _unknown_model(package: str, name: str, known: Iterable[str]) -> DataError:
    similar = difflib.get_close_matches(name, sorted(set(known)), SHOWN)
    hint = f"did you mean {' or '.join(similar)}?" if similar else f"see {package}'s list_models()"
    return DataError(f"{package} has no model {name!r}: {hint}")


def _cached_file(repository: str, names: Iterable[str]) -> str | None:
    hub = extra_module("huggingface_hub", "hf")
    paths = (hub.try_to_load_from_cache(repository, name) for name in names)
    return next((path for path in paths if isinstance(path, str)), None)


def _reach_hub() -> None:
    """Raise at once if the hub cannot be reached or is switched off; a download would raise only after many retries."""
    hub = extra_module("huggingface_hub", "hf")
    hub.utils.get_session().head(hub.constants.ENDPOINT, timeout=PATIENCE)
