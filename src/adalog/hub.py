"""Models as folders that the Hugging Face Hub holds: the artifact, what transformers asks for, and a model card.

A folder is as untrusted as any file: it is read by `artifact`, and no code of it is run.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from adalog import artifact
from adalog.errors import AdalogError, ArtifactError, one_line
from adalog.extras import extra_module
from adalog.files import write_error, write_whole
from adalog.graph.program import given_leaves
from adalog.ledger import float_lines, ledger_table
from adalog.quantized import QuantizedProgram

FILE = "model.adalog.safetensors"
PREPROCESSING = "preprocessor_config.json"
PREFIX = "hf:"
MODEL_TYPE, ARCHITECTURE = "adalog", "AdalogForImageClassification"


def save(
    quantized: QuantizedProgram,
    folder: Path,
    *,
    classes: Sequence[str] = (),
    figures: Mapping[str, str] | None = None,
) -> None:
    """Write a model into a folder: the artifact, config.json, preprocessor_config.json and README.md, a model card.

    classes: the names of the classes, in the order of the logits. figures: what was measured of the model, by name, for
    the card. What transformers needs to prepare images is written where the artifact says how they are prepared. Raises
    DataError where the folder cannot be written, ArtifactError where it says that wrongly.
    """
    names = _class_names(quantized, classes)
    config: dict[str, Any] = {"architectures": [ARCHITECTURE], "model_type": MODEL_TYPE}
    if names:
        config |= {"id2label": dict(enumerate(names)), "label2id": {name: index for index, name in enumerate(names)}}
    preprocessing = quantized.provenance.get("preprocessing")
    files = {"config.json": _json(config)}
    if isinstance(preprocessing, Mapping):
        try:
            files[PREPROCESSING] = _json(_processor(preprocessing))
        except (AttributeError, LookupError, TypeError, ValueError) as cause:
            raise ArtifactError(
                f"the artifact says wrongly how its images are prepared ({one_line(cause)}): quantize the model again"
            ) from cause
    content = artifact.serialise(quantized)
    files["README.md"] = card(quantized, len(content), figures or {}, prepared=PREPROCESSING in files)
    contents = {FILE: content, **{name: text.encode() for name, text in files.items()}}
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as cause:
        raise write_error(folder, cause) from cause
    for name, written in contents.items():
        write_whole(folder / name, written)
    if PREPROCESSING not in files:
        (folder / PREPROCESSING).unlink(missing_ok=True)  # of a model that was here before


def logits_of(output: Any) -> Any:
    """The output of this name, or the first one; None where a model puts out nothing."""
    if isinstance(output, Mapping) and "logits" in output:
        return output["logits"]
    return next(iter(given_leaves(output)), None)


def _class_names(quantized: QuantizedProgram, classes: Sequence[str]) -> list[str]:
    """A name for each column of the logits, LABEL_0 and so on where none are given; none for a model without logits."""
    inputs = quantized.one_image()
    output = logits_of(quantized.program.run_without_data(inputs)) if inputs else None
    count = output.shape[1] if isinstance(output, torch.Tensor) and output.ndim == 2 else 0
    names = [f"LABEL_{index}" for index in range(count)] if not len(classes) else list(classes)
    if isinstance(classes, str) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"classes = {classes!r} is no list of names")
    if len(names) != count or len(set(names)) != count:
        raise ValueError(
            f"{len(names)} names of classes, {len(set(names))} different, are not one each for {count} logits"
        )
    return names


_PIPELINE = [
    "With transformers:",
    "",
    "```python",
    "import adalog.pipeline                     # lets transformers know the model's class",
    "from transformers import pipeline",
    "",
    'answers = pipeline("image-classification", model="OWNER/NAME")("image.jpg")',
    "```",
    "",
]


def card(quantized: QuantizedProgram, size: int, figures: Mapping[str, str], *, prepared: bool = True) -> str:
    """The model card: what is quantized and how, what was measured, and how to run it.

    size: bytes of the artifact. prepared: whether a file says how images are prepared, which transformers need.
    """
    floats = len(quantized.float_sites())
    told = [
        f"- {len(quantized.ledger)} multiplications, {floats} of which stay float",
        f"- bits: {quantized.config.bits}",
    ]
    if quantized.config.pinned:
        told[-1] += ", and other bits for some sites, as the table below has them"
    told += [f"- the artifact `{FILE}` takes {size:,} bytes"]
    images = quantized.provenance.get("images")
    if isinstance(images, int):
        told.append(f"- {images} unlabelled images calibrated it (seed {quantized.provenance.get('seed', 0)})")
    measured = [f"| {_plain(name)} | {_plain(value)} |" for name, value in figures.items()]
    return "\n".join(
        [
            "---",
            "library_name: adalog",
            "pipeline_tag: image-classification",
            "tags:",
            "- quantized",
            "- adalog",
            "- vision",
            "---",
            "",
            "# A vision transformer, quantized with adalog",
            "",
            *told,
            "",
            *(["| measured | |", "|---|---|", *measured, ""] if measured else []),
            "## How to run it",
            "",
            "```python",
            "import adalog",
            "",
            f"# Images are prepared as {PREPROCESSING} says."
            if prepared
            else "# The artifact has no record of how images are prepared.",
            'model = adalog.load("hf:OWNER/NAME")      # or a folder; it computes by fake quantization, in float',
            'logits = model.compile("native")(images)  # in integers',
            "```",
            "",
            *(_PIPELINE if prepared else []),
            "## What is quantized",
            "",
            "```text",
            *map(_plain_line, ledger_table(quantized.ledger)),
            *map(_plain_line, float_lines(quantized.refusals, quantized.float_operations())),
            "```",
            "",
        ]
    )


def locate(path: str, revision: str | None = None) -> Path:
    """The file of an artifact that a path names: itself, that of a folder, or hf:OWNER/NAME of the Hub.

    A folder may also be named hf:FOLDER. A repository of the Hub is read from the cache, and downloaded where it is not
    there yet; revision: a branch, tag or commit of it. Raises ArtifactError.
    """
    name = path.removeprefix(PREFIX)
    folder = _folder(name)
    if folder is not None:
        if revision not in (None, "main"):
            raise ValueError(
                f"revision = {revision!r} is of a repository of the Hub, {folder} is a folder: leave it out"
            )
        if not (folder / FILE).is_file():
            raise ArtifactError(f"{folder} has no {FILE}: give a folder that save_pretrained wrote")
        return folder / FILE
    if not path.startswith(PREFIX):
        if revision is not None:
            raise ValueError(f"revision = {revision!r} is of a repository of the Hub, {path} is none: leave it out")
        return Path(path)
    try:
        return Path(_hub().hf_hub_download(name, FILE, revision=revision))
    except AdalogError:
        raise
    except Exception as cause:  # the network, a name that is none, a repository without such a file
        raise ArtifactError(
            f"{path} cannot be loaded: {one_line(cause)}; give a repository of the Hub that holds {FILE}, or a folder"
        ) from cause


def _folder(name: str) -> Path | None:
    """The folder of this name; None where there is none."""
    try:
        folder = Path(name).expanduser()
        return folder if folder.is_dir() else None
    except (OSError, RuntimeError, ValueError):  # a name too long, or of a user that is not there
        return None


def push(quantized: QuantizedProgram, repository: str, folder: Path, *, private: bool = False) -> str:
    """Upload a folder that `save` wrote to a repository of the Hub, and return its address.

    The repository is made where there is none. Raises AdalogError where that fails.
    """
    try:
        api = _hub().HfApi()
        api.create_repo(repository, private=private, exist_ok=True)
        found = api.upload_folder(
            repo_id=repository,
            folder_path=str(folder),
            commit_message=f"A model quantized to {quantized.config.bits}",
            delete_patterns=[PREPROCESSING],  # of a model that was there before; what is uploaded stays
        )
    except AdalogError:
        raise
    except Exception as cause:  # the network, missing rights, a name that is none
        raise AdalogError(
            f"{repository} cannot be written: {one_line(cause)}; log in, or choose another name"
        ) from cause
    return str(found)


def _hub() -> Any:
    return extra_module("huggingface_hub", "hf")


def _processor(preprocessing: Mapping[str, Any]) -> dict[str, Any]:
    """The same preprocessing as transformers' image processors write it, with the numbers of Pillow's resampling."""
    from PIL import Image

    (height, width), resize = preprocessing["size"], preprocessing["resize"]
    exact = None if isinstance(resize, int) else {"height": resize[0], "width": resize[1]}
    return {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": exact or {"shortest_edge": resize},
        "resample": Image.Resampling[preprocessing["interpolation"].upper()].value,
        "do_center_crop": True,
        "crop_size": {"height": height, "width": width},
        "do_rescale": True,
        "rescale_factor": preprocessing["rescale"],
        "do_normalize": True,
        "image_mean": list(preprocessing["mean"]),
        "image_std": list(preprocessing["std"]),
    }


def _json(value: Any) -> str:
    return json.dumps(value, indent=1) + "\n"


def _plain(text: object) -> str:
    """A text in a cell of a table."""
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;")


def _plain_line(text: str) -> str:
    """A line within a block of code, which it cannot end."""
    return " ".join(text.split("\n")).replace("`", "'")
