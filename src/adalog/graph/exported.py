"""Export a model with `torch.export`; if that fails, name the line of the model's code that is the reason."""

import inspect
import io
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental import _config as export_config

from adalog.errors import CaptureError, one_line, printable

# What to do about a part of a model that adalog cannot capture.
WITHOUT_IT = "quantize a part of the model that does not contain it, with adalog.quantize(part, images, within=model)"
ONE_SIZE = 'capture it for one size (sizes="fixed", or without --free-sizes)'
# The folders of PyTorch, of Python, and of this file.
_TORCH, _PYTHON, _OWN = (f"{Path(file).parent}{os.sep}" for file in (torch.__file__, os.__file__, __file__))
_FREE = {0: "number of images", 2: "height of the images", 3: "width of the images"}
_FIXED = "Constraints violated"  # in PyTorch's message if the model's code turns a free size into a number
_PATCHED = threading.Lock()  # held while a function of PyTorch is replaced


def export_model(model: nn.Module, example: Sequence[Any], any_size: bool) -> torch.export.ExportedProgram:
    """Export a model for any number of images and, if asked, for any height and width.

    PyTorch can follow the model's Python code in two ways. The second one takes longer, but it also follows `int` of a
    size, so it is used if the first one fails. Before that, the first one is tried again with a `len` that it can
    follow, unless height and width are free: it might then fix them where the second one leaves them free. Raises
    CaptureError if all fail.
    """
    shapes = _open_shapes(model, example, any_size)

    def by(strict: bool) -> torch.export.ExportedProgram:
        stance = torch.compiler.set_stance("default" if strict else "force_eager")
        # PyTorch prints the graph so far if it fails.
        with stance, redirect_stderr(io.StringIO()), _for_free_sizes() if any_size else nullcontext():
            return torch.export.export(model, tuple(example), dynamic_shapes=shapes, strict=strict)

    try:
        return by(strict=False)
    except Exception as cause:  # torch.export raises whatever the model's own code raises
        failure = cause
    run_on(model, example)
    if _FIXED in str(failure) and not any_size:
        try:
            with _followed_len(model):
                return by(strict=False)
        except Exception:  # the other way may still succeed
            pass
    try:
        return by(strict=True)
    except Exception:  # the first failure says more, because its traceback goes through the model's code
        raise _refusal(model, failure, lambda: by(strict=False), ONE_SIZE if any_size else WITHOUT_IT) from failure


@contextmanager
def _followed_len(model: nn.Module) -> Iterator[None]:
    """Give the Python modules that define a model's parts a `len` that, unlike Python's, keeps sizes free."""

    def follow(value: Any) -> Any:
        return value.shape[0] if isinstance(value, Tensor) and value.ndim else len(value)

    files = {sys.modules.get(type(part).__module__) for part in model.modules()} - {None}
    names = [vars(file) for file in files if _is_of_model(getattr(file, "__file__", None) or "")]
    own = [names_of_file for names_of_file in names if "len" not in names_of_file]
    with _PATCHED:
        for names_of_file in own:
            names_of_file["len"] = follow
        try:
            yield
        finally:
            for names_of_file in own:
                del names_of_file["len"]


def _open_shapes(model: nn.Module, example: Sequence[Any], any_size: bool) -> Any:
    """Return the free dimensions of each input, as `torch.export` takes them."""

    def open_dims(value: Tensor) -> dict[int, Any]:
        return dict.fromkeys((0, 2, 3) if any_size and value.ndim == 4 else (0,), torch.export.Dim.DYNAMIC)

    shapes = tuple(open_dims(value) if isinstance(value, Tensor) else None for value in example)
    kinds = [parameter.kind for parameter in inspect.signature(model.forward).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds[: len(shapes)]:
        more = kinds.index(inspect.Parameter.VAR_POSITIONAL)
        return (*shapes[:more], shapes[more:])  # one entry per parameter of forward
    return shapes


def run_on(model: nn.Module, inputs: Sequence[Any]) -> Any:
    """Run the model on copies of the inputs, to which it may write. Raises CaptureError if it fails."""
    try:
        return model(*(value.clone() if isinstance(value, Tensor) else value for value in inputs))
    except Exception as cause:  # the model's own code may raise any exception
        way_out = "give inputs that the model itself takes"
        dtypes = {value.dtype for value in inputs if isinstance(value, Tensor)}
        for dtype, name in ((torch.uint8, "uint8"), (torch.float64, "float64")):
            if dtype in dtypes and "type" in str(cause):
                way_out = f"the images are {name}; give float32, normalised as the model expects"
        raise CaptureError(
            f"{type(model).__name__} fails on {shapes_of(inputs)}{at(place_of_error(cause))} ({one_line(cause)}): "
            f"{way_out}"
        ) from cause


def shapes_of(inputs: Sequence[Any]) -> str:
    """Describe the inputs by their shapes, for a message."""
    return f"inputs of {' and '.join(str(tuple(value.shape)) for value in inputs if isinstance(value, Tensor))}"


@contextmanager
def _for_free_sizes() -> Iterator[None]:
    """Keep export from what takes most of its time: asking for memory layouts at every size, and checking a cache."""
    from torch._dynamo import config as dynamo_config  # which takes a second to import; export does so anyway

    # PyTorch 2.6 does not have this option.
    layouts = {"backed_size_oblivious": True} if hasattr(export_config, "backed_size_oblivious") else {}
    with dynamo_config.patch(fake_tensor_cache_enabled=False), export_config.patch(layouts):  # type: ignore[attr-defined]
        yield


# --- why it fails ----------------------------------------------------------------------------------------------------


def _refusal(model: nn.Module, failure: Exception, export: Callable[[], Any], way_out: str) -> CaptureError:
    """Return the error for a model that `export` cannot export. way_out: what to do about an unknown reason."""
    name, message = type(model).__name__, str(failure).strip()
    if _FIXED in message:
        for dim, place in _fixed_sizes(export):
            instead = f"{ONE_SIZE}, or use x.shape[{dim}] there instead of a number"
            if not dim:
                instead = "use x.shape[0] there, or -1 in a reshape, without int(), len() or a loop over images"
            return CaptureError(f"{name} turns the {_FREE[dim]} into a fixed number{at(place)}: {instead}")
    unknown = re.search(r"<class '(.+?)'> in output, which is not a known type", message)
    if unknown is not None:
        return CaptureError(
            f"{name} returns objects of the class {unknown[1]}, which torch.export does not take apart: return "
            "tensors, tuples, lists or dicts, or first pass a dataclass to torch.export.register_dataclass"
        )
    place = at(place_of_error(failure))
    if "data-dependent" in message:
        return CaptureError(
            f"{name} could not be exported, because it decides by the values of tensors{place}, but a program has "
            f"only one path: use torch.where there, or {WITHOUT_IT}"
        )
    line = printable((message or type(failure).__name__).splitlines()[0])[:300].rstrip(" .:!")
    return CaptureError(f"{name} could not be exported{place} ({line}): {way_out}")


def _fixed_sizes(export: Callable[[], Any]) -> list[tuple[int, str]]:
    """Return the free sizes that the model's code turns into numbers: the dimension, and the place in the code.

    PyTorch does not record the place. So export again, and look at the stack when PyTorch replaces a symbol.
    """
    from torch.fx.experimental import symbolic_shapes  # which an export has imported before

    fixed: list[tuple[int, str]] = []
    replace = symbolic_shapes.ShapeEnv._set_replacement

    def recording(self: Any, symbol: Any, value: Any, *rest: Any) -> None:
        if getattr(value, "is_number", False):
            place = place_of_frame(sys._getframe(1))
            dims = [getattr(source, "idx", None) for source in self.var_to_sources.get(symbol, ())]
            fixed.extend((dim, place) for dim in dims if dim in _FREE)
        replace(self, symbol, value, *rest)

    with _PATCHED:
        symbolic_shapes.ShapeEnv._set_replacement = recording  # type: ignore[assignment, method-assign]
        try:
            export()
        except Exception:
            return fixed
        finally:
            symbolic_shapes.ShapeEnv._set_replacement = replace  # type: ignore[method-assign]
    return fixed


# --- places in the model's code --------------------------------------------------------------------------------------


def place_of_node(node: fx.Node) -> str:
    """Return the line of the model's code that an exported operation comes from, or an empty string."""
    frames = re.findall(r'File "(.+?)", line (\d+)', node.meta.get("stack_trace") or "")
    return _last_own([(file, int(line)) for file, line in frames])


def place_of_error(cause: BaseException | None) -> str:
    """Return the line of the model's code that raised an exception, or an empty string."""
    while cause is not None:
        frames = traceback.extract_tb(cause.__traceback__)
        if place := _last_own([(frame.filename, frame.lineno or 0) for frame in frames]):
            return place
        cause = cause.__cause__ or cause.__context__
    return ""


def place_of_frame(frame: FrameType | None) -> str:
    """Return the innermost line of the model's code that is running, or an empty string."""
    while frame is not None and not frame.f_code.co_filename.startswith(_OWN):
        if _is_of_model(frame.f_code.co_filename):
            return _place(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return ""


def at(place: str) -> str:
    """Return a place as a part of a sentence."""
    return f" at {place}" if place else ""


def _last_own(frames: Sequence[tuple[str, int]]) -> str:
    return next((_place(file, line) for file, line in reversed(frames) if _is_of_model(file)), "")


def _is_of_model(file: str) -> bool:
    """Return True for a file that is neither Python's nor PyTorch's nor a part of adalog's capture."""
    of_python = file.startswith(_PYTHON) and "site-packages" not in file and "dist-packages" not in file
    return not of_python and not file.startswith((_TORCH, _OWN, "<frozen", "<string", "<eval"))


def _place(file: str, line: int) -> str:
    """Return "file:line", with the file relative to the folder from which Python imports it."""
    folders = (f"{Path(folder).absolute()}{os.sep}" for folder in (*sys.path, "."))
    folder = max((folder for folder in folders if file.startswith(folder)), key=len, default="")
    return f"{file.removeprefix(folder)}:{line}"
