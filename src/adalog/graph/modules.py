"""Find the module to capture in what a user passes as the model."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from adalog.errors import CaptureError

# The modules of these packages hold integer weights.
_QUANTIZED = (
    *("torch.ao.nn.quantized.", "torch.ao.nn.intrinsic.quantized.", "torch.ao.nn.sparse.quantized."),
    *("adalog.model.", "adalog.runtime.", "bitsandbytes.", "torchao.", "optimum.quanto."),
)


def float_module(model: Any) -> nn.Module:
    """Return the module to capture, without wrappers; a CaptureError says what to pass instead of other values."""
    while (inner := _unwrap(model)) is not None:
        model = inner
    kind = type(model).__name__
    if isinstance(model, type):
        raise CaptureError(f"the model is the class {model.__name__}: pass an instance of it")
    if isinstance(model, Mapping):
        raise CaptureError(
            f"the model is {_with_article(kind)} of weights: make the model, load them with "
            "model.load_state_dict(weights), and pass the model"
        )
    if origin := _origin(model):
        raise CaptureError(
            f"the model is {_with_article(kind)} that {origin} made: pass the torch.nn.Module that it was made of"
        )
    if not isinstance(model, nn.Module):
        raise CaptureError(f"the model is {_with_article(kind)}: pass a torch.nn.Module")
    parts: list[tuple[str, Any]] = [*model.named_modules(), *model.named_parameters()]
    for path, part in parts:
        origin = f"{type(part).__module__}.{type(part).__qualname__}"
        if origin.startswith(_QUANTIZED):
            raise CaptureError(
                f"the model is already quantized ({path or kind} is {_with_article(origin)}): pass the model with "
                "float weights"
            )
        if isinstance(part, Tensor) and part.is_meta:
            raise CaptureError(f"{path} is on the meta device, which holds no values: load the model's weights")
    return model


def _unwrap(model: Any) -> nn.Module | None:
    """Return the module that `torch.compile` or a parallel wrapper holds, or None for anything else."""
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return model.module
    compiled = isinstance(model, nn.Module) and type(model).__name__ == "OptimizedModule"
    return model._orig_mod if compiled else None


def _origin(model: Any) -> str | None:
    """Return the function of PyTorch that made a model which cannot be captured again, or None."""
    if isinstance(model, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
        return "torch.jit"
    of_export = isinstance(model, fx.GraphModule) and "eval" in vars(model)  # where torch.export forbids `eval`
    return "torch.export" if of_export or isinstance(model, torch.export.ExportedProgram) else None


def _with_article(name: str) -> str:
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"
