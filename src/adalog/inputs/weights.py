"""Load weights from a user's file, safetensors or a state dict, without running code."""

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from adalog.errors import DataError
from adalog.inputs.refusals import refusal, shorten

# Keys under which training scripts store the weights. If several state dicts fit, those under the first key are used.
_WRAPPERS = ("state_dict", "model", "model_state_dict")
_DEPTH = 4  # mappings inside each other that are searched for weights
_COUNTERS = ("total_ops", "total_params")  # buffers that thop, which counts operations, leaves in a model
_WAY_OUT = "use the weights of this model, or give the model of these weights as path.py:function"


def load_weights(
    module: nn.Module, path: Path, spec: str, rebuild: Callable[[int], nn.Module] | None = None
) -> nn.Module:
    """Load the weights of a file into a module, and return the module. Raises DataError if they do not fit.

    The file may store them under a key, with a prefix before every name, or under names of an older release.
    rebuild: makes the module again for another number of classes, if the weights have another number.
    """
    own, states = module.state_dict(), list(_state_dicts(_read(path)))
    if not states:
        raise _without_tensors(path)
    parts = list(_parts(own, states))
    fit = [part for part in parts if not misfit(own, part.weights)]
    if fit:
        module.load_state_dict(_only_one(fit, f"{path} has weights of {spec}").weights)
        return module
    # Renaming takes time, and a file may hold many mappings of a few tensors, such as the state of an optimizer.
    large = [part.weights for part in parts if 2 * len(part.weights) >= len(own)]
    large = large or [max((part.weights for part in parts), key=len)]
    nearest = min((_rename(module, weights) for weights in large), key=lambda weights: _distance(own, weights))
    if not misfit(own, nearest):
        with refusal(f"{path} does not fit {spec}", _WAY_OUT):
            module.load_state_dict(nearest)
        return module
    if rebuild is not None and (classes := _other_classes(own, nearest)):
        with suppress(DataError):  # `nearest` may not have the values of weights of other shapes
            return load_weights(rebuild(classes), path, spec)
    raise DataError(f"{path} does not fit {spec}: {misfit(own, nearest)}; {_WAY_OUT}")


@dataclass(frozen=True)
class _Part:
    """The tensors of a file under a key, without the prefix that their names share."""

    key: str
    prefix: str
    weights: dict[str, Tensor]


def _parts(own: Mapping[str, Tensor], states: Iterable[tuple[str, dict[str, Tensor]]]) -> Iterator[_Part]:
    """Yield each state dict under each prefix that may stand before the names of a module's own tensors.

    What other tools add to a state dict is left out, and counters of batches that old files lack are added.
    """
    names = list(own)
    samples = {names[0], names[len(names) // 2], names[-1]} if names else set()
    for key, state in states:
        ends = ((name, sample) for name in state for sample in samples if name.endswith(sample))
        prefixes = {name.removesuffix(sample) for name, sample in ends} - {""}
        for prefix in ("", *sorted(prefix for prefix in prefixes if prefix.endswith("."))):
            part = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
            counters = [name for name in part if name not in own and name.rpartition(".")[2] in _COUNTERS]
            lost = [name for name in own if name not in part and name.endswith("num_batches_tracked")]
            weights = {name: value for name, value in part.items() if name not in counters}
            yield _Part(key, prefix, weights | {name: own[name] for name in lost})


def _only_one(parts: Sequence[_Part], what: str) -> _Part:
    """Return the part under the most usual key. Raises DataError if others are as likely. what: text of the error."""
    usual_parts = [part for part in parts if part.key.partition(".")[0] in ("", *_WRAPPERS)]
    likely = [part for part in usual_parts if part.key == usual_parts[0].key] or list(parts)
    likely = [part for part in likely if not part.prefix] or likely
    if len(likely) > 1:
        names = [f"{part.key}{part.prefix}".rstrip(".") for part in likely]
        raise DataError(f"{what} under {shorten(names)}: save only those that you want to use")
    return likely[0]


def _rename(module: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights under current names: timm and transformers convert older and other formats."""
    maker: Any = type(module)
    home = sys.modules[maker.__module__]
    if any(name.endswith((".weight", ".bias")) and _is_whole(value) for name, value in weights.items()):
        return weights  # transformers would turn the codes of another tool into weights
    try:
        if home.__name__.startswith("timm.") and hasattr(home, "checkpoint_filter_fn"):
            return dict(home.checkpoint_filter_fn(dict(weights), module))
        if home.__name__.startswith("transformers."):
            model, info = maker.from_pretrained(
                None, config=module.config, state_dict=weights, output_loading_info=True, ignore_mismatched_sizes=True
            )
            renamed = {name: value for name, value in model.state_dict().items() if name not in info["missing_keys"]}
            renamed |= {name: torch.empty(shape) for name, shape, _ in info["mismatched_keys"]}
            return renamed | {name: weights[name] for name in info["unexpected_keys"]}
    except Exception:  # the code of either package may fail in any way on weights of another model
        return weights
    return weights


def _other_classes(own: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> int:
    """Return the number of classes of weights that differ from a module's in nothing else, or 0."""
    if own.keys() != weights.keys():
        return 0
    shapes = [(value.shape, own[name].shape) for name, value in weights.items() if own[name].shape != value.shape]
    if any(not file_shape or file_shape[1:] != own_shape[1:] for file_shape, own_shape in shapes):
        return 0
    counts = {(file_shape[0], own_shape[0]) for file_shape, own_shape in shapes}
    return counts.pop()[0] if len(counts) == 1 else 0


def _distance(own: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> int:
    """Return the number of names and shapes in which weights differ from a module's own."""
    shared = own.keys() & weights.keys()
    return len(own.keys() ^ weights.keys()) + sum(own[name].shape != weights[name].shape for name in shared)


def misfit(own: Mapping[str, Any], weights: Mapping[str, Tensor]) -> str:
    """Describe how the names, shapes and kinds of weights differ from a module's own; return "" if they do not."""
    pairs = [(name, value, own[name]) for name, value in weights.items() if name in own]
    reasons = {
        "missing": [name for name in own if name not in weights],
        "unexpected": [name for name in weights if name not in own],
        "wrong shape": [
            f"{name} {list(value.shape)} instead of {list(own_value.shape)}"
            for name, value, own_value in pairs
            if own_value.shape != value.shape
        ],
        "complex or sparse": [
            name
            for name, value in weights.items()
            if value.layout != torch.strided or (name in own and value.is_complex() != own[name].is_complex())
        ],
        "codes of another tool": [  # whose scales are lost
            f"{name} of {value.dtype} instead of {own_value.dtype}"
            for name, value, own_value in pairs
            if own_value.is_floating_point() and _is_whole(value)
        ],
    }
    return "; ".join(f"{word} {shorten(names)}" for word, names in reasons.items() if names)


def _is_whole(value: Tensor) -> bool:
    """Return True if a tensor holds whole numbers or quantized values."""
    return not (value.is_floating_point() or value.is_complex())


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file or a state dict; remove the wrappers that training scripts add."""
    _, state = next(_state_dicts(_read(path)), ("", {}))
    if not state:
        raise _without_tensors(path)
    if all(name.startswith("module.") for name in state):  # as DataParallel names them
        state = {name.removeprefix("module."): value for name, value in state.items()}
    return state


def _without_tensors(path: Path) -> DataError:
    return DataError(f"{path} contains no named tensors: save model.state_dict(), preferably as safetensors")


def _state_dicts(content: Any, key: str = "", depth: int = _DEPTH) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield the state dicts in a file with the keys that lead to them, the most usual first."""
    if not isinstance(content, Mapping) or not depth:  # a wrapper may contain itself
        return
    inner = {str(name): value for name, value in content.items() if isinstance(value, Mapping)}
    wrappers = [name for name in _WRAPPERS if name in inner]
    for name in wrappers:
        yield from _state_dicts(inner[name], f"{key}{name}.", depth - 1)
    state = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
    if state:
        yield key, state
    for name, value in inner.items():
        if name not in wrappers:
            yield from _state_dicts(value, f"{key}{name}.", depth - 1)


def _read(path: Path) -> Any:
    """Read the content of a safetensors file or of a file that torch.save wrote, without running code."""
    with refusal(f"{path} cannot be read", "give a file with weights"), path.open("rb") as file:
        start = file.read(9)
    if path.suffix == ".safetensors" or start[8:] == b"{":
        with refusal(f"{path} is not a complete safetensors file", "copy or save it again"):
            return load_file(path)
    try:
        with refusal(f"{path} is neither safetensors nor a complete file of torch.save", "copy or save it again"):
            return torch.load(path, map_location="cpu", weights_only=True)
    except DataError as error:
        if not isinstance(error.__cause__, UnpicklingError):
            raise
        match = re.search(r"GLOBAL (\S+)", str(error.__cause__))
        what = f"contains {match[1]}" if match else "is damaged, or contains more than tensors"
        raise DataError(
            f"{path} {what}, which adalog does not load, because unpickling may run code: save only "
            "model.state_dict(), preferably as safetensors"
        ) from error.__cause__
