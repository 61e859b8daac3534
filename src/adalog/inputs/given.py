"""Turn what people pass as calibration images into the inputs of a model, or say what to pass instead."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from adalog.graph.capture import runs_on

Images = Tensor | tuple[Tensor, ...]  # one input, or several inputs with equally many images each
_ONE_TENSOR = "give one tensor (N, 3, H, W)"


def as_inputs(images: Any, model: nn.Module, count: int) -> Images:
    """Return images as one tensor, or as the tuple of a model's inputs.

    A DataLoader of tensors is read up to `count` images. A list of images (C, H, W) is stacked, and a list of batches
    (N, C, H, W) is joined: only a tuple holds several inputs. Raises ValueError for everything else.
    """
    if isinstance(images, Tensor):
        return _batch(images, model)
    if isinstance(images, tuple):
        taken = len(_parameters(model))
        if len(images) > taken > 0:
            raise ValueError(
                f"images is a tuple of {len(images)} inputs, but {type(model).__name__} takes {taken}: "
                f"{_ONE_TENSOR}, without labels; torch.cat joins batches"
            )
        return images
    if isinstance(images, DataLoader):
        return _join(_first(images, count), "a DataLoader", of_batches=images.batch_sampler is not None)
    if isinstance(images, list):
        required = [parameter for parameter in _parameters(model) if parameter.default is parameter.empty]
        if len(required) > 1:
            raise ValueError(
                f"images is a list, but {type(model).__name__} takes {len(required)} inputs: give them as a tuple of "
                "tensors (N, ...)"
            )
        return _join(images, "a list")
    kind = type(images).__name__
    if isinstance(images, Mapping):
        names = ", ".join(map(str, images)) or "no key"
        raise ValueError(f"images is a {kind} with {names}: {_ONE_TENSOR}, as images[{next(iter(images), 'NAME')!r}]")
    if hasattr(images, "__array__"):
        raise ValueError(f"images is a {kind}: {_ONE_TENSOR}, as torch.from_numpy(images) of float32")
    if hasattr(images, "__getitem__") and hasattr(images, "__len__"):
        raise ValueError(
            f"images is a {kind}: {_ONE_TENSOR}, as torch.stack([images[i][0] for i in range({count})]) if an item is "
            "(image, label)"
        )
    raise ValueError(f"images is a {kind}: {_ONE_TENSOR}, or a tuple of the model's inputs")


def _batch(images: Tensor, model: nn.Module) -> Tensor:
    """Return the images, unless the tensor is a single image of a model that takes batches."""
    single = images.ndim == 3 and len(images) <= 4 and isinstance(model, nn.Module)
    if single and any(isinstance(module, nn.Conv2d) for module in model.modules()) and runs_on(model, images[None]):
        raise ValueError(
            f"images is one image of shape {tuple(images.shape)}: give a batch (N, 3, H, W), as images[None] for one"
        )
    return images


def _parameters(model: nn.Module) -> list[inspect.Parameter]:
    """Return the positional parameters of a model's forward; none if it takes any number, or if they are unknown."""
    try:
        parameters = list(inspect.signature(model.forward).parameters.values())
    except (AttributeError, TypeError, ValueError):  # not a module, or a module without a signature
        return []
    if any(parameter.kind == parameter.VAR_POSITIONAL for parameter in parameters):
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter for parameter in parameters if parameter.kind in kinds]


def _first(loader: Any, count: int) -> list[Any]:
    """Return the first batches, or the first images, of a loader that hold `count` images."""
    batches, images = [], 0
    for batch in loader:
        batches.append(batch)
        single = loader.batch_sampler is None or not isinstance(batch, Tensor) or not batch.ndim
        images += 1 if single else len(batch)
        if images >= count:
            break
    return batches


def _join(parts: Sequence[Any], what: str, *, of_batches: bool = False) -> Tensor:
    """Join images (C, H, W) or batches (N, C, H, W) of equal shapes. of_batches: the parts are batches (N, ...)."""
    stranger = next((part for part in parts if not isinstance(part, Tensor)), None)
    if stranger is not None:
        pairs = isinstance(stranger, (tuple, list)) and stranger and isinstance(stranger[0], Tensor)
        hint = f", as torch.{'cat' if stranger[0].ndim == 4 else 'stack'}([x for x, _ in images])" if pairs else ""
        raise ValueError(f"images is {what} of {type(stranger).__name__}, not of tensors: {_ONE_TENSOR}{hint}")
    if of_batches and parts and parts[0].ndim and len({part.shape[1:] for part in parts}) == 1:
        return torch.cat(list(parts))
    shapes = {(part.ndim, tuple(part.shape[-3:])) for part in parts}
    if len(shapes) == 1 and parts[0].ndim in (3, 4):
        return torch.stack(list(parts)) if parts[0].ndim == 3 else torch.cat(list(parts))
    kinds = " and ".join(sorted({str(tuple(part.shape)) for part in parts})[:3]) or "nothing"
    raise ValueError(
        f"images is {what} of {kinds}, which are not images of one size: {_ONE_TENSOR}, or a tuple of inputs"
    )
