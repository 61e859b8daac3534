"""Capture a model of every vision architecture of timm and transformers, and count what adalog refuses.

    python benchmarks/sweep.py --work DIR [--only WORD ...] [--json F]

From timm the script takes the smallest architecture of each module, and from transformers one model of each type that
reads images alone. All weights are random, and models are cut to two blocks per stage if they can be. Each model has a
process of its own and a limit of time. The script keeps finished models in DIR, and does not repeat them as long as the
sources of the package stay the same.
"""

from benchmarks.publish import RESULTS, publish
from benchmarks.records import kept

import argparse
import inspect
import itertools
import multiprocessing
import os
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from adalog.errors import AdalogError, one_line
from adalog.graph.capture import capture
from adalog.graph.sites import find_sites
from adalog.study.doctor import machine, version_of

SECONDS = 60  # for each model, including its initialisation
_SIDE = 128  # height and width of the images, if the model takes them
_LARGEST = 120_000_000  # parameters above which a model is not built
# Tasks of transformers, the first of which a type has gives its class.
_TASKS = (
    *("IMAGE_CLASSIFICATION", "OBJECT_DETECTION", "SEMANTIC_SEGMENTATION", "UNIVERSAL_SEGMENTATION"),
    *("INSTANCE_SEGMENTATION", "DEPTH_ESTIMATION", "KEYPOINT_DETECTION", "IMAGE_MATTING", "IMAGE_TO_IMAGE"),
    *("POSE_ESTIMATION", "VIDEO_CLASSIFICATION", "BACKBONE", "IMAGE"),
)
_DEPTHS = ("num_hidden_layers", "encoder_layers", "decoder_layers", "depth", "depths", "num_layers", "n_layer")
_NARROW = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
_WAY_OUT = re.compile(r": .*\b(capture|give|leave|load|make|pass|quantize|use)\b")
_OTHER_INPUTS = "it needs other inputs:"
_OF_ATTENTION = ("bmm", "baddbmm", "_scaled_dot_product")  # operations that multiply two computed values


def targets() -> list[str]:
    """Return the name of every architecture: "timm:MODULE" and "transformers:CLASS"."""
    import timm
    import transformers
    from transformers.models.auto import modeling_auto

    classes: dict[str, Any] = {}
    for task in _TASKS:
        for kind, name in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").items():
            classes.setdefault(kind, name if isinstance(name, str) else name[0])
    for kind, name in modeling_auto.MODEL_MAPPING_NAMES.items():
        if "vision" in kind:
            classes.setdefault(kind, name if isinstance(name, str) else name[0])
    towers = [name for name in dir(transformers) if name.endswith("VisionModel")]
    names = sorted({*classes.values(), *towers})
    return [*(f"timm:{module}" for module in timm.list_modules()), *(f"transformers:{name}" for name in names)]


def build(target: str) -> tuple[str, nn.Module, Tensor]:
    """Return the name, the model with random weights and two images of an architecture.

    Raises LookupError, with the reason, if the architecture does not read images alone or cannot be made small.
    """
    library, _, name = target.partition(":")
    return _of_timm(name) if library == "timm" else _of_transformers(name)


def _of_timm(module: str) -> tuple[str, nn.Module, Tensor]:
    """Return the smallest architecture of a module of timm."""
    import timm

    sizes = {}
    for name in timm.list_models(module=module):
        with torch.device("meta"):
            sizes[name] = _parameters(timm.create_model(name))
    name = min(sizes, key=lambda each: (sizes[each], each))

    def make(less: dict[str, Any], side: int | None) -> tuple[nn.Module, Tensor]:
        model = timm.create_model(name, **less).eval()
        return model, torch.randn(2, *((3, side, side) if side else model.default_cfg["input_size"]))

    choices = itertools.product(({"depth": 2}, {"depths": (1, 1, 2, 1)}, {"depths": (1, 1, 1)}, {}), (_SIDE, None))
    return name, *_first(make, choices)


def _of_transformers(name: str) -> tuple[str, nn.Module, Tensor]:
    """Return a model of transformers, narrow and with two blocks per stage if its configuration allows it."""
    import transformers

    cls = getattr(transformers, name)
    parameters = list(inspect.signature(cls.forward).parameters.values())[1:]
    needed = [each.name for each in parameters if each.default is each.empty and each.kind is not each.VAR_KEYWORD]
    if not parameters[0].name.startswith("pixel_values") or needed[1:]:
        raise LookupError(f"{_OTHER_INPUTS} {', '.join(needed or [parameters[0].name])}")
    values = cls.config_class().to_dict()
    size, patch = values.get("image_size"), values.get("patch_size")
    smaller = 8 * patch if patch in (14, 16) else _SIDE
    side = {"image_size": smaller} if isinstance(size, int) and size > smaller else {}
    narrow = _NARROW if all(isinstance(values.get(key), int) for key in _NARROW) else {}
    two, six = ({key: _cut(values[key], most) for key in _DEPTHS if key in values} for most in (2, 6))
    size = size or (values.get("backbone_config") or {}).get("image_size") or 224
    counts = {values[key] for key in ("num_frames", "frames_per_clip") if key in values}

    def make(less: dict[str, Any], frames: tuple[int, ...]) -> tuple[nn.Module, Tensor]:
        config = cls.config_class(**less)
        with torch.device("meta"):
            if (count := _parameters(cls(config))) > _LARGEST:
                raise LookupError(f"it has {count:,} parameters")
        height, width = size if isinstance(size, (list, tuple)) else [less.get("image_size", size)] * 2
        return cls(config).eval(), torch.randn(2, *frames, 3, height, width)

    choices = itertools.product(
        (two | side | narrow, two | side, six | side, side, {}), ((), *((each,) for each in counts))
    )
    return name, *_first(make, choices)


def _first(make: Callable[..., tuple[nn.Module, Tensor]], choices: Iterable[Sequence[Any]]) -> tuple[nn.Module, Tensor]:
    """Return the first model that can be made and takes its images; raise the first failure if there is none."""
    failures: list[Exception] = []
    for choice in choices:
        made = _made(make, choice)
        if not isinstance(made, Exception):
            return made
        failures.append(made)
    raise LookupError(one_line(failures[0])) from failures[0]


def _made(make: Callable[..., tuple[nn.Module, Tensor]], choice: Sequence[Any]) -> tuple[nn.Module, Tensor] | Exception:
    """Return a model and its images, or the exception of the model's own code."""
    try:
        model, images = make(*choice)
        with torch.no_grad():
            model(images)
    except Exception as cause:
        return cause
    return model, images


def _cut(depth: Any, most: int) -> Any:
    """Return a number of blocks, or a list of such numbers, with none above `most`; other values as they are."""
    if isinstance(depth, (list, tuple)):
        return [_cut(each, most) for each in depth]
    return min(depth, most) if isinstance(depth, int) else depth


def _parameters(model: nn.Module) -> int:
    return sum(value.numel() for value in model.parameters())


class _Seen(TorchDispatchMode):
    """Record the names of all operations that run while the context is open."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func).split(".")[1])
        return func(*args, **(kwargs or {}))


def examine(target: str) -> dict[str, Any]:
    """Capture an architecture, and return a row: its outcome, and why it is no capture at the first try."""
    torch.manual_seed(0)
    row: dict[str, Any] = {"target": target}
    try:
        row["model"], model, images = build(target)
        with torch.no_grad(), _Seen() as seen:
            model.eval()(images[:1])
    except Exception as cause:  # the model's own code may raise any exception
        outcome = "other inputs" if _OTHER_INPUTS in str(cause) else "not built"
        return {**row, "outcome": outcome, "message": str(cause).splitlines()[0]}
    row["attention"] = any(name.startswith(_OF_ATTENTION) for name in seen.names)
    row["parameters"], row["image"] = _parameters(model), list(images.shape[1:])
    try:
        with mock.patch.object(torch.export, "export", wraps=torch.export.export) as exports:
            row["sites"] = len(find_sites(capture(model, (images,))))
    except AdalogError as cause:
        outcome = "refused" if _WAY_OUT.search(str(cause)) else "other"
        return {**row, "outcome": outcome, "message": str(cause)}
    except Exception as cause:  # what adalog does not expect
        return {**row, "outcome": "other", "message": one_line(cause)}
    outcome = "exact" if exports.call_count == 1 else "second try"
    return {**row, "outcome": outcome if row["sites"] else "no sites"}


def _send(target: str, end: Connection) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    end.send(examine(target))


def examine_apart(target: str) -> dict[str, Any]:
    """Examine an architecture in a process of its own, which is stopped after `SECONDS`."""
    start = time.perf_counter()
    context = multiprocessing.get_context("fork")
    mine, other = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(target, other), daemon=True)
    process.start()
    other.close()
    row = {"target": target, "outcome": "late", "message": f"not finished in {SECONDS} s"}
    try:
        if mine.poll(SECONDS):
            row = mine.recv()
    except EOFError:
        row |= {"outcome": "other", "message": "the process ended"}
    process.kill()
    process.join()
    return {**row, "seconds": round(time.perf_counter() - start, 1)}


def rows(work: Path | None, only: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the row of every architecture whose name holds one of the words `only`, or of all."""
    import transformers

    # What all models import, and so the processes need not import again.
    assert transformers.ViTForImageClassification
    capture(nn.Linear(2, 2), torch.ones(2, 2))
    versions = {name: version_of(name) for name in ("timm", "transformers")}
    for target in targets():
        if not only or any(word in target for word in only):
            path = work / f"{target.replace(':', '-')}.json" if work else None
            yield kept(path, {"target": target, **versions}, lambda target=target: examine_apart(target))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--json", type=Path, default=RESULTS / "sweep.json")
    given = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # all weights are random
    found = []
    for row in rows(given.work, given.only):
        found.append(row)
        print(row["target"], row["outcome"], row.get("sites", ""), row.get("message", ""), row["seconds"], flush=True)
    publish({"rows": found, "seconds_per_model": SECONDS, "machine": machine()}, given.json)


if __name__ == "__main__":
    main()
