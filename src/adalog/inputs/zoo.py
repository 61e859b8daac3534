"""Load a model by its name, with its preprocessing, and inspect its sites.

A name is timm:NAME, torchvision:NAME, hf:DIR or hf:ID, demo, or path.py:function. The last form runs the user's own
file. No other form runs code that it reads.
"""

import inspect as signatures
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from adalog.errors import CaptureError, DataError
from adalog.graph.capture import capture, runs_on
from adalog.graph.modules import float_module
from adalog.graph.program import Program
from adalog.graph.sites import census, find_pairs, find_sites
from adalog.inputs import demo
from adalog.inputs.demo.model import DemoViT
from adalog.inputs.images import Preprocessing
from adalog.inputs.published import from_hf, from_timm, from_torchvision
from adalog.inputs.refusals import refusal, shorten
from adalog.inputs.weights import load_weights

KINDS = "timm:NAME, torchvision:NAME, hf:DIR, hf:ID, demo, or path.py:function"
DEMO_PREPROCESSING = Preprocessing((32, 32), (32, 32), demo.MEAN, demo.STD, "bilinear")


@dataclass(frozen=True)
class LoadedModel:
    """A model in float32 and evaluation mode, with its name.

    preprocessing: how to prepare images for the model, or None if that is not known.
    """

    module: nn.Module
    preprocessing: Preprocessing | None
    name: str

    @property
    def rgb_preprocessing(self) -> Preprocessing:
        """The preprocessing of the model's images. Raises DataError if it is not known, or if they are not RGB."""
        if _first_channels(self.module) not in (None, 3) and (channels := _other_channels(self)):
            raise DataError(_not_rgb(self.name, channels))
        if self.preprocessing is None:
            raise DataError(
                f"{self.name} does not say how to prepare images: return (module, "
                "adalog.Preprocessing(...)) from the function"
            )
        return self.preprocessing


def load_model(spec: str, *, pretrained: bool = True, checkpoint: Path | None = None, seed: int = 0) -> LoadedModel:
    """Load the model that `spec` names, in one of the forms at the top of this module.

    pretrained: load the published weights; otherwise use random weights from `seed`, without changing the state of
    torch's global generator. checkpoint: a file with weights to use instead, safetensors or a state dict that
    torch.load reads with weights_only=True. Raises DataError.
    """
    published = spec.partition(":")[0] in ("timm", "torchvision", "hf")
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        torch.default_generator.manual_seed(seed)
        warnings.simplefilter("ignore")  # warnings of other packages do not concern the user
        module, preprocessing = _build(spec, pretrained, checkpoint is None)
        if checkpoint is not None:
            rebuild = (lambda classes: _build(spec, False, False, classes)[0]) if published else None
            module = load_weights(module, checkpoint, spec, rebuild)
    module = float_module(module)
    weights = dict(module.named_parameters())
    for name, value in module.state_dict().items():
        if isinstance(value, Tensor) and bool(value.isnan().any()):
            raise DataError(f"{checkpoint or spec}: tensor {name} contains NaN: use other weights")
        if name in weights and bool(value.isinf().any()):  # a buffer may be a mask, whose values are infinite
            raise DataError(f"{checkpoint or spec}: tensor {name} contains infinite values: use other weights")
    return LoadedModel(module.float().eval(), preprocessing, spec)


def inspect(loaded: LoadedModel) -> dict[str, Any]:
    """Describe a model as JSON: its name, size and preprocessing, and its sites of each kind.

    Raises CaptureError.
    """
    program, images = capture_loaded(loaded)
    sites = find_sites(program)
    return {
        "model": loaded.name,
        "parameters": sum(value.numel() for value in loaded.module.parameters()),
        "images": list(images.shape[1:]),
        "preprocessing": None if loaded.preprocessing is None else asdict(loaded.preprocessing),
        **census(program, sites, find_pairs(program, sites, (images,))),
    }


def capture_loaded(loaded: LoadedModel) -> tuple[Program, Tensor]:
    """Capture a model on two random images; return its program and the images.

    The images have the size of the model's preprocessing, or 224 x 224 if it has none. Raises CaptureError.
    """
    images = torch.randn(2, 3, *_size(loaded), generator=torch.Generator().manual_seed(0))
    try:
        return capture(loaded.module, images), images
    except CaptureError as cause:
        if channels := _other_channels(loaded):
            raise CaptureError(_not_rgb(loaded.name, channels)) from cause
        if loaded.preprocessing is not None:
            raise
        raise CaptureError(
            f"{cause} (on images of 224 x 224; for another size return (module, Preprocessing) from the function)"
        ) from cause


def _size(loaded: LoadedModel) -> tuple[int, int]:
    return (224, 224) if loaded.preprocessing is None else loaded.preprocessing.size


def _other_channels(loaded: LoadedModel) -> int:
    """Return how many channels the images of a model have if it does not run on RGB images, or 0 if it does."""
    device = next((value.device for value in loaded.module.parameters()), None)

    def runs(channels: int) -> bool:
        return runs_on(loaded.module, torch.zeros(1, channels, *_size(loaded), device=device))

    if runs(3):
        return 0
    first = _first_channels(loaded.module)
    if first is not None:
        return first if first != 3 else 0
    return next((channels for channels in range(1, 17) if runs(channels)), 0)


def _first_channels(module: nn.Module) -> int | None:
    return next((layer.in_channels for layer in module.modules() if isinstance(layer, nn.Conv2d)), None)


def _not_rgb(name: str, channels: int) -> str:
    return (
        f"{name} takes images with {channels} channel{'s' * (channels > 1)}, but the command line prepares RGB images: "
        f"call adalog.quantize from Python with images (N, {channels}, H, W)"
    )


def is_model(text: str) -> bool:
    """Return True if a text is the name of a model and not the path of a file."""
    try:
        exists = Path(text).exists()
    except OSError:  # the text is too long for a file name
        exists = False
    return text == "demo" or text.endswith(".py") or (":" in text and not exists)


_Built = tuple[nn.Module, Preprocessing | None]


def _build(spec: str, pretrained: bool, weights: bool, classes: int | None = None) -> _Built:
    """Build the model of a name.

    weights: False if a checkpoint replaces the pretrained weights. classes: the number of classes of a published
    model, or None for its own.
    """
    kind, _, name = spec.partition(":")
    path, _, function = spec.rpartition(":")
    if spec == "demo":
        return demo.load_model() if pretrained and weights else DemoViT(), DEMO_PREPROCESSING
    if name and kind == "timm":
        return from_timm(name, pretrained and weights, classes)
    if name and kind == "torchvision":
        return from_torchvision(name, pretrained and weights, classes)
    if name and kind == "hf":
        return from_hf(name, pretrained and weights, classes)
    if path.endswith(".py"):
        if not pretrained:
            raise DataError(
                f"--no-pretrained has no effect on {spec}, whose function creates its own weights: leave it out"
            )
        return _call(Path(path), function)
    if spec.endswith(".py"):
        raise DataError(f"{spec} has to be followed by the function that makes the model: give {spec}:function")
    raise DataError(f"unknown model {spec!r}: give {KINDS}")


def _call(path: Path, function: str) -> _Built:
    """Run the user's own file, as `python path.py` would, and return the model that its function makes."""
    with refusal(f"{path} cannot be read", "give path.py:function"):
        source = path.read_bytes()
    file = types.ModuleType(f"adalog_model_of_{path.stem}")
    file.__file__ = str(path)
    with _importable(file, path.resolve().parent):
        with refusal(f"{path} does not run", "correct it"):
            exec(compile(source, str(path), "exec"), file.__dict__)
        maker = getattr(file, function, None)
        if not callable(maker):
            own = [name for name, value in vars(file).items() if getattr(value, "__module__", "") == file.__name__]
            raise DataError(f"{path} has no function {function!r}: it has {shorten(own) or 'none'}")
        with refusal(f"{path}:{function} cannot be called", "give all its arguments default values"):
            signatures.signature(maker).bind()
        with refusal(f"{path}:{function} failed", "correct it"):
            result = maker()
    match result:
        case nn.Module():
            return result, None
        case (nn.Module() as module, Preprocessing() as preprocessing):
            return module, preprocessing
    raise DataError(
        f"{path}:{function} returns {type(result).__name__}: return a torch.nn.Module, or (module, Preprocessing)"
    )


@contextmanager
def _importable(module: types.ModuleType, folder: Path) -> Iterator[None]:
    """Register a module as an import would; while the context is open, it can import the files next to its own."""
    sys.modules[module.__name__] = module
    sys.path.insert(0, str(folder))
    try:
        yield
    except BaseException:
        del sys.modules[module.__name__]
        raise
    finally:
        sys.path.remove(str(folder))
