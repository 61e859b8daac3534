"""Load weights from a user's file, safetensors or a state dict, without running code."""

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from adalog.errors import DataError
from adalog.inputs.refusals import listed, refusal

_WRAPPERS = ("state_dict", "model", "model_state_dict")  # keys under which training scripts store the weights


def load_weights(module: nn.Module, path: Path, spec: str) -> None:
    """Load the weights of a file into a module. Raises DataError if a name or shape differs from the module's."""
    own, given = module.state_dict(), read_weights(path)
    if misfit(own, given):
        with refusal(f"{path} does not fit {spec}: {misfit(own, given)}", "use the weights of this model"):
            given = _renamed(module, given)
    if told := misfit(own, given):
        raise DataError(f"{path} does not fit {spec}: {told}; use the weights of this model")
    with refusal(f"{path} does not fit {spec}", "use the weights of this model"):
        module.load_state_dict(given)


def _renamed(module: nn.Module, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights under current names: timm and transformers convert older and other formats."""
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


def misfit(own: Mapping[str, Any], given: Mapping[str, Tensor]) -> str:
    """Describe how the names and shapes of weights differ from a module's own; return "" if they do not."""
    missing = [name for name in own if name not in given]
    unexpected = [name for name in given if name not in own]
    shapes = [
        f"{name} {list(value.shape)} instead of {list(own[name].shape)}"
        for name, value in given.items()
        if name in own and own[name].shape != value.shape
    ]
    odd = [
        name
        for name, value in given.items()
        if value.layout != torch.strided or (name in own and value.is_complex() != own[name].is_complex())
    ]
    found = {"missing": missing, "unexpected": unexpected, "wrong shape": shapes, "complex or sparse": odd}
    return "; ".join(f"{word} {listed(names)}" for word, names in found.items() if names)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file or a state dict; remove the wrappers that training scripts add."""
    with refusal(f"{path} cannot be read", "give a file with weights"), path.open("rb") as file:
        start = file.read(9)
    if path.suffix == ".safetensors" or start[8:] == b"{":
        with refusal(f"{path} is not a complete safetensors file", "copy or save it again"):
            content: Any = load_file(path)
    else:
        content = _read_pickle(path)
    for _ in _WRAPPERS:  # a wrapper may contain itself, so the depth is limited
        inner = [content[key] for key in _WRAPPERS if key in content] if isinstance(content, Mapping) else []
        if not inner or not isinstance(inner[0], Mapping):
            break
        content = inner[0]
    state = dict(content) if isinstance(content, Mapping) else {}
    state = {str(name): value for name, value in state.items() if isinstance(value, Tensor)}
    if not state:
        raise DataError(f"{path} contains no named tensors: save model.state_dict(), preferably as safetensors")
    if all(name.startswith("module.") for name in state):  # as DataParallel names them
        state = {name.removeprefix("module."): value for name, value in state.items()}
    return state


def _read_pickle(path: Path) -> Any:
    """Read a file that torch.save wrote, without running code."""
    try:
        with refusal(f"{path} is neither safetensors nor a complete file of torch.save", "copy or save it again"):
            return torch.load(path, map_location="cpu", weights_only=True)
    except DataError as error:
        if not isinstance(error.__cause__, UnpicklingError):
            raise
        found = re.search(r"GLOBAL (\S+)", str(error.__cause__))
        what = f"contains {found[1]}" if found else "is damaged, or contains more than tensors"
        raise DataError(
            f"{path} {what}, which adalog does not load, because unpickling may run code: save only "
            "model.state_dict(), preferably as safetensors"
        ) from error.__cause__
