"""The model that a name means, with the preprocessing it was made with, and what capture sees in it.

timm:NAME, torchvision:NAME, hf:DIR or hf:ID, demo, or path.py:function. The last runs the user's own file; nothing else
that is read here runs code. Weights are looked for on this machine first, and a download is tried only where its server
answers, since libraries repeat a hopeless request for a minute.
"""

import difflib
import importlib
import inspect as signatures
import re
import sys
import types
import urllib.request
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

from adalog.errors import AdalogError, CaptureError, DataError
from adalog.graph.capture import capture
from adalog.graph.program import Program
from adalog.graph.sites import census, find_pairs, find_sites
from adalog.inputs import demo
from adalog.inputs.demo.model import DemoViT
from adalog.inputs.images import Preprocessing, side_before_crop

KINDS = "timm:NAME, torchvision:NAME, hf:DIR, hf:ID, demo, or path.py:function"
OTHER_WEIGHTS = "give --checkpoint FILE, or --no-pretrained for random weights"
PATIENCE = 5  # seconds until a server that does not answer counts as out of reach
DEMO_PREPROCESSING = Preprocessing((32, 32), (32, 32), demo.MEAN, demo.STD, "bilinear")
SHOWN = 3  # tensors or names listed before "and n more"
_WRAPPERS = ("state_dict", "model", "model_state_dict")
_WEIGHTS = "the pretrained weights of "  # before a name
_HALF = {"image_mean": (0.5, 0.5, 0.5), "image_std": (0.5, 0.5, 0.5)}


@dataclass(frozen=True)
class LoadedModel:
    """A model in float32 and evaluation mode; what its images go through, or None where nothing says; its name."""

    module: nn.Module
    preprocessing: Preprocessing | None
    name: str

    @property
    def prepared(self) -> Preprocessing:
        """What its images go through. Raises DataError where nothing says."""
        if self.preprocessing is None:
            raise DataError(
                f"{self.name} does not say how its images are prepared: return (module, "
                "adalog.Preprocessing(...)) from the function"
            )
        return self.preprocessing


def load_model(spec: str, *, pretrained: bool = True, checkpoint: Path | None = None, seed: int = 0) -> LoadedModel:
    """The model that `spec` names (the forms are in this module's first lines).

    pretrained: with the weights that belong to the name, else with random ones drawn with `seed`; torch's own generator
    stays as it is. checkpoint: a file of weights to use instead, safetensors or a state dict that torch.load reads with
    weights_only=True. Raises DataError.
    """
    with _own_randomness(seed), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other packages, about themselves
        module, preprocessing = _build(spec, pretrained, checkpoint is None)
        if checkpoint is not None:
            _load_weights(module, checkpoint, spec)
    for name, value in module.state_dict().items():
        if isinstance(value, Tensor) and bool(value.isnan().any()):
            raise DataError(f"{checkpoint or spec}: tensor {name} holds NaN: use other weights")
    return LoadedModel(module.float().eval(), preprocessing, spec)


def inspect(loaded: LoadedModel, *, seed: int = 0) -> dict[str, Any]:
    """What capture sees in a model, as JSON: its name, size and preprocessing, and its census.

    Raises CaptureError.
    """
    program, images = captured(loaded, seed=seed)
    sites = find_sites(program)
    return {
        "model": loaded.name,
        "parameters": sum(value.numel() for value in loaded.module.parameters()),
        "images": list(images.shape[1:]),
        "preprocessing": None if loaded.preprocessing is None else asdict(loaded.preprocessing),
        **census(program, sites, find_pairs(program, sites, (images,))),
    }


def captured(loaded: LoadedModel, *, seed: int = 0) -> tuple[Program, Tensor]:
    """A model's program, and the two random images it was captured on, of the size that its preprocessing says.

    Without preprocessing they are of 224 x 224. Raises CaptureError.
    """
    size = (224, 224) if loaded.preprocessing is None else loaded.preprocessing.size
    images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(seed))
    try:
        return capture(loaded.module, images), images
    except CaptureError as cause:
        if loaded.preprocessing is not None:
            raise
        raise CaptureError(
            f"{cause} (on images of 224 x 224; for another size return (module, Preprocessing) from the function)"
        ) from cause


def is_model(text: str) -> bool:
    """Whether a text is meant as a model's name and not as a file's."""
    return text == "demo" or (":" in text and not Path(text).exists())


# --- where a name leads ----------------------------------------------------------------------------------------------

_Built = tuple[nn.Module, Preprocessing | None]


def _build(spec: str, pretrained: bool, weights: bool) -> _Built:
    """weights: whether the pretrained ones are wanted, where there are such."""
    kind, _, name = spec.partition(":")
    path, _, function = spec.rpartition(":")
    if spec == "demo":
        return demo.load_model() if pretrained and weights else DemoViT(), DEMO_PREPROCESSING
    if name and kind == "timm":
        return _timm(name, pretrained and weights)
    if name and kind == "torchvision":
        return _torchvision(name, pretrained and weights)
    if name and kind == "hf":
        return _hf(name, pretrained and weights)
    if path.endswith(".py"):
        if not pretrained:
            raise DataError(
                f"--no-pretrained says nothing to {spec}, whose function makes its own weights: leave it out"
            )
        return _call(Path(path), function)
    raise DataError(f"model {spec!r} is none of {KINDS}")


def _timm(name: str, pretrained: bool) -> _Built:
    timm = _package("timm", "timm")
    architecture = name.partition(".")[0]
    if not timm.is_model(architecture):
        raise _unknown("timm", name, timm.list_models())
    try:
        settings = timm.models.get_pretrained_cfg(name)
    except RuntimeError as cause:  # no weights of that tag
        raise _unknown("timm", name, timm.list_pretrained(f"{architecture}.*")) from cause
    repository, file = getattr(settings, "hf_hub_id", None), None
    if pretrained and repository:
        names = (settings.hf_hub_filename, "model.safetensors", "pytorch_model.bin")
        file = _cached(repository.partition("@")[0], filter(None, names))
    with _refusal(f"{_WEIGHTS * pretrained}timm:{name} cannot be loaded", OTHER_WEIGHTS):
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
            f"timm:{name} prepares images by crop_mode {given['crop_mode']!r}, which Preprocessing cannot say: return "
            "(module, Preprocessing) from a path.py:function of yours"
        )
    if given["crop_mode"] == "squash":
        resize = (side_before_crop(height, given["crop_pct"]), side_before_crop(width, given["crop_pct"]))
    mean, std = _three(given["mean"]), _three(given["std"])
    return module, Preprocessing((height, width), resize, mean, std, given["interpolation"])


def _torchvision(name: str, pretrained: bool) -> _Built:
    models = _package("torchvision", "timm").models
    names = models.list_models(module=models)
    if name not in names:
        raise _unknown("torchvision", name, names)
    weights = models.get_model_weights(name).DEFAULT
    given = weights.transforms()
    size, mean, std = _pair(given.crop_size), _three(given.mean), _three(given.std)
    with _refusal(f"{_WEIGHTS * pretrained}torchvision:{name} cannot be loaded", OTHER_WEIGHTS):
        if pretrained and not Path(torch.hub.get_dir(), "checkpoints", weights.url.rpartition("/")[2]).exists():
            urllib.request.urlopen(urllib.request.Request(weights.url, method="HEAD"), timeout=PATIENCE).close()
        if pretrained:  # torchvision itself would unpickle whatever its cache holds
            weights.get_state_dict(progress=False, check_hash=True, weights_only=True)
        module = models.get_model(name, weights=weights if pretrained else None, progress=False)
        if getattr(module, "image_size", size[0]) != size[0]:  # as its weights want it, not as it is without them
            module = models.get_model(name, weights=None, image_size=size[0])
    resize = given.resize_size[0] if len(given.resize_size) == 1 else _pair(given.resize_size)
    return module, Preprocessing(size, resize, mean, std, given.interpolation.value)


def _hf(name: str, pretrained: bool) -> _Built:
    transformers = _package("transformers", "hf")
    folder = Path(name).expanduser()
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise DataError(f"{folder} has no config.json: give a folder that save_pretrained wrote")
    if not folder.is_dir() and (folder.exists() or name.startswith((".", "~", "/")) or name.count("/") > 1):
        raise DataError(f"{folder} is not a folder: give one that save_pretrained wrote, or hf:ID of the hub")

    def fetch(function: Callable[..., Any], **options: Any) -> Any:
        """From this machine, else from the hub."""
        try:
            return function(str(folder), local_files_only=True, trust_remote_code=False, **options)
        except OSError:
            if folder.is_dir():
                raise
        _reach_hub()
        return function(name, trust_remote_code=False, **options)

    with _refusal(f"the config of hf:{name} cannot be loaded", "give hf:DIR, a folder that save_pretrained wrote"):
        config = fetch(transformers.AutoConfig.from_pretrained)
        config.dtype = torch.float32  # whatever type the weights are stored in
        _only_rgb(f"hf:{name}", getattr(config, "num_channels", 3))
        config.architectures = config.architectures or []  # transformers goes through them
        classifies = any("ForImageClassification" in architecture for architecture in config.architectures)
        if not config.architectures:
            classifies = type(config) in transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING
        maker = transformers.AutoModelForImageClassification if classifies else transformers.AutoModel
    absent: list[str] = []
    with _refusal(f"{_WEIGHTS * pretrained}hf:{name} cannot be loaded", OTHER_WEIGHTS):
        if pretrained:
            module, told = fetch(maker.from_pretrained, config=config, output_loading_info=True, weights_only=True)
            absent = sorted(told["missing_keys"])
        else:
            module = maker.from_config(config, trust_remote_code=False)
    if absent:
        raise DataError(
            f"the weights of hf:{name} lack {_listed(absent)} of {type(module).__name__}: load the part that has "
            "weights in a path.py:function of yours"
        )
    with _refusal(f"the preprocessing of hf:{name} cannot be read", "mend its preprocessor_config.json, or remove it"):
        return module, _hf_preprocessing(transformers, fetch, folder, config)


def _hf_preprocessing(
    transformers: types.ModuleType, fetch: Callable[..., Any], folder: Path, config: Any
) -> Preprocessing:
    """What preprocessor_config.json says; without one, what the model's processor does if told nothing but the size."""
    size = _pair(getattr(config, "image_size", None) or 224)
    given: Mapping[str, Any] = {**_HALF, "resample": Image.Resampling.BILINEAR}
    files = ("preprocessor_config.json", "processor_config.json")
    stored = not folder.is_dir() or any((folder / file).exists() for file in files)
    if stored:
        try:
            given = fetch(transformers.AutoImageProcessor.from_pretrained).to_dict()
        except OSError:  # the hub has none
            if folder.is_dir():
                raise
            stored = False
    if not stored:
        try:
            choices = transformers.IMAGE_PROCESSOR_MAPPING[type(config)]
        except KeyError:
            choices = ()
        for choice in choices.values() if isinstance(choices, Mapping) else choices:
            try:  # one may need a package that is not there
                given = choice().to_dict()
            except (ImportError, TypeError):
                continue
            break
        given = {**given, "size": {"height": size[0], "width": size[1]}, "do_center_crop": False}
    return _from_processor(given, size)


def _from_processor(given: Mapping[str, Any], size: tuple[int, int]) -> Preprocessing:
    """given: a processor as a dictionary. size: what the model takes, where the processor does not say."""
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


def _call(path: Path, function: str) -> _Built:
    """What a function of the user's own file returns. This runs the file, as `python path.py` would."""
    with _refusal(f"{path} cannot be read", "give path.py:function"):
        source = path.read_bytes()
    file = types.ModuleType(f"adalog_model_of_{path.stem}")
    file.__file__ = str(path)
    with _importable(file, path.resolve().parent):
        with _refusal(f"{path} does not run", "mend it"):
            exec(compile(source, str(path), "exec"), file.__dict__)
        made = getattr(file, function, None)
        if not callable(made):
            own = [name for name, value in vars(file).items() if getattr(value, "__module__", "") == file.__name__]
            raise DataError(f"{path} has no function {function!r}: it has {_listed(own) or 'none'}")
        with _refusal(f"{path}:{function} cannot be called", "give its arguments defaults"):
            signatures.signature(made).bind()
        with _refusal(f"{path}:{function} failed", "mend it"):
            result = made()
    match result:
        case nn.Module():
            return result, None
        case (nn.Module() as module, Preprocessing() as preprocessing):
            return module, preprocessing
    raise DataError(
        f"{path}:{function} returns {type(result).__name__}: return a torch.nn.Module, or (module, Preprocessing)"
    )


# --- weights of a file -----------------------------------------------------------------------------------------------


def _load_weights(module: nn.Module, path: Path, spec: str) -> None:
    """Put a file's weights into a module, all of them and no others."""
    own, given = module.state_dict(), _read_weights(path)
    if _misfit(own, given):
        with _refusal(f"{path} does not fit {spec}: {_misfit(own, given)}", "use the weights of this model"):
            given = _renamed(module, given)
    misfit = _misfit(own, given)
    if misfit:
        raise DataError(f"{path} does not fit {spec}: {misfit}; use the weights of this model")
    module.load_state_dict(given)


def _renamed(module: nn.Module, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights as timm and transformers name them today, who read those of their own older releases and of others."""
    maker: Any = type(module)
    home = sys.modules[maker.__module__]
    if home.__name__.startswith("timm.") and hasattr(home, "checkpoint_filter_fn"):
        return dict(home.checkpoint_filter_fn(dict(given), module))
    if home.__name__.startswith("transformers."):
        other, told = maker.from_pretrained(
            None, config=module.config, state_dict=given, output_loading_info=True, ignore_mismatched_sizes=True
        )
        renamed = {name: value for name, value in other.state_dict().items() if name not in told["missing_keys"]}
        renamed |= {name: torch.empty(shape) for name, shape, _ in told["mismatched_keys"]}
        return renamed | {name: given[name] for name in told["unexpected_keys"]}
    return given


def _misfit(own: Mapping[str, Any], given: Mapping[str, Tensor]) -> str:
    """In which keys and shapes weights differ from a module's own; "" where in none."""
    missing = [name for name in own if name not in given]
    unexpected = [name for name in given if name not in own]
    shapes = [
        f"{name} {list(value.shape)} for {list(own[name].shape)}"
        for name, value in given.items()
        if name in own and own[name].shape != value.shape
    ]
    found = {"missing": missing, "unexpected": unexpected, "wrong shape": shapes}
    return "; ".join(f"{word} {_listed(names)}" for word, names in found.items() if names)


def _read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file or a state dict, out of the wrappings that training scripts put around them."""
    with _refusal(f"{path} cannot be read", "give a file of weights"), path.open("rb") as file:
        start = file.read(9)
    if path.suffix == ".safetensors" or start[8:] == b"{":
        with _refusal(f"{path} is not a whole safetensors file", "copy or save it again"):
            content: Any = load_file(path)
    else:
        content = _read_pickle(path)
    while isinstance(content, Mapping) and (inner := [content[key] for key in _WRAPPERS if key in content]):
        if not isinstance(inner[0], Mapping):
            break
        content = inner[0]
    state = dict(content) if isinstance(content, Mapping) else {}
    state = {str(name): value for name, value in state.items() if isinstance(value, Tensor)}
    if not state:
        raise DataError(f"{path} holds no tensors by name: save model.state_dict(), best as safetensors")
    if all(name.startswith("module.") for name in state):  # of DataParallel
        state = {name.removeprefix("module."): value for name, value in state.items()}
    return state


def _read_pickle(path: Path) -> Any:
    """What torch.load reads without running code."""
    try:
        with _refusal(f"{path} is neither safetensors nor a whole file of torch.save", "copy or save it again"):
            return torch.load(path, map_location="cpu", weights_only=True)
    except DataError as error:
        if not isinstance(error.__cause__, UnpicklingError):
            raise
        found = re.search(r"GLOBAL (\S+)", str(error.__cause__))
        what = f"holds {found[1]}" if found else "is damaged, or holds other things than tensors"
        raise DataError(
            f"{path} {what}, which is not read since unpickling may run code: save model.state_dict() alone, best as "
            "safetensors"
        ) from error.__cause__


# --- what the above share --------------------------------------------------------------------------------------------


@contextmanager
def _own_randomness(seed: int) -> Iterator[None]:
    """Torch's CPU generator seeded, and as it was afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


@contextmanager
def _refusal(what: str, way_out: str) -> Iterator[None]:
    """Whatever other code raises inside, as a DataError: `what`, its reason, the way out."""
    try:
        yield
    except AdalogError:
        raise
    except (Exception, SystemExit) as cause:
        reason = getattr(cause, "strerror", None) or (str(cause).strip() or type(cause).__name__).splitlines()[0]
        raise DataError(f"{what}: {reason}; {way_out}") from cause


@contextmanager
def _importable(module: types.ModuleType, folder: Path) -> Iterator[None]:
    """A module registered as an import would register it; what lies beside its file can be imported while it loads."""
    sys.modules[module.__name__] = module
    sys.path.insert(0, str(folder))
    try:
        yield
    except BaseException:
        del sys.modules[module.__name__]
        raise
    finally:
        sys.path.remove(str(folder))


def _package(name: str, extra: str) -> types.ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as cause:
        if cause.name != name:
            raise DataError(f"{name} cannot be imported: {cause}") from cause
        raise DataError(f"{name} is not installed: pip install 'adalog[{extra}]'") from cause
    except Exception as cause:  # as where torch and torchvision are of different builds
        raise DataError(f"{name} cannot be imported: {cause}; install it again beside this torch") from cause


def _unknown(package: str, name: str, known: Iterable[str]) -> DataError:
    close = difflib.get_close_matches(name, sorted(set(known)), SHOWN)
    hint = f"is it {' or '.join(close)}?" if close else f"see {package}'s list_models()"
    return DataError(f"{package} has no model {name!r}: {hint}")


def _cached(repository: str, names: Iterable[str]) -> str | None:
    """The first of these files of a repository of the hub that was downloaded before."""
    hub = importlib.import_module("huggingface_hub")
    paths = (hub.try_to_load_from_cache(repository, name) for name in names)
    return next((path for path in paths if isinstance(path, str)), None)


def _reach_hub() -> None:
    """Raise at once what a download would raise after many trials, if the hub is out of reach or switched off."""
    hub = importlib.import_module("huggingface_hub")
    hub.utils.get_session().head(hub.constants.ENDPOINT, timeout=PATIENCE)


def _only_rgb(spec: str, channels: int) -> None:
    if channels != 3:
        raise DataError(f"{spec} takes images of {channels} channels: only models of 3 can be named")


def _listed(names: Sequence[str]) -> str:
    rest = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + rest


def _pair(side: int | Sequence[int]) -> tuple[int, int]:
    """(H, W) from one side or both."""
    sides = (side,) if isinstance(side, int) else tuple(side)
    return sides[0], sides[-1]


def _three(values: Sequence[float]) -> tuple[float, float, float]:
    red, green, blue = (float(value) for value in values)
    return red, green, blue
