"""Save, find and upload models as folders for the Hugging Face Hub: artifact, files for transformers, model card.

A folder is as untrusted as any file: `artifact` reads it, and no code in it is run.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from adalog import artifact
from adalog.errors import AdalogError, ArtifactError, converting
from adalog.extras import extra_module
from adalog.files import write_whole, writing
from adalog.graph.program import Program, Ref, present_leaves
from adalog.graph.sites import NORMS, find_source
from adalog.ledger import float_lines, ledger_table
from adalog.quantized import QuantizedProgram

FILE = "model.adalog.safetensors"
PREPROCESSING = "preprocessor_config.json"
PREFIX = "hf:"
MODEL_TYPE, ARCHITECTURE = "adalog", "AdalogForImageClassification"


def save(quantized: QuantizedProgram, folder: Path, classes: Sequence[str], figures: Mapping[str, str] | None) -> None:
    """Write a model into a folder: the artifact, config.json, preprocessor_config.json and a model card, README.md.

    preprocessor_config.json is written only if the provenance has `preprocessing`, and if transformers has a processor
    for it. `QuantizedModel.save_pretrained` documents the arguments and errors.
    """
    names = _class_names(quantized, classes)
    config: dict[str, Any] = {"architectures": [ARCHITECTURE]} if names else {}
    config |= {"model_type": MODEL_TYPE}
    if names:
        config |= {"id2label": dict(enumerate(names)), "label2id": {name: index for index, name in enumerate(names)}}
    preprocessing = quantized.provenance.get("preprocessing")
    files = {"config.json": _json(config)}
    if isinstance(preprocessing, Mapping):
        refusal = "the preprocessing that the artifact notes is not valid ("
        with converting(ArtifactError, refusal, "): quantize the model again"):
            processor = _processor(preprocessing)
        if processor is not None:
            files[PREPROCESSING] = _json(processor)
    content = artifact.serialise(quantized)
    prepared, classifies = PREPROCESSING in files, bool(names)
    files["README.md"] = card(quantized, len(content), figures or {}, prepared=prepared, classifies=classifies)
    contents = {FILE: content, **{name: text.encode() for name, text in files.items()}}
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for name, written in contents.items():
        write_whole(folder / name, written)
    if PREPROCESSING not in files:
        (folder / PREPROCESSING).unlink(missing_ok=True)  # left by another model that was saved here


def logits_of(output: Any) -> Any:
    """Return the output named "logits" or else the first one; None if the output is empty."""
    if isinstance(output, Mapping) and "logits" in output:
        return output["logits"]
    return next(iter(present_leaves(output)), None)


def _class_names(quantized: QuantizedProgram, classes: Sequence[str]) -> list[str]:
    """Return a name for each logit, by default LABEL_0 and so on; the list is empty if the model has no logits."""
    output = logits_of(quantized.program.run_without_data(quantized.zeros(1, "meta")))
    count = output.shape[1] if isinstance(output, torch.Tensor) and output.ndim == 2 else 0
    if isinstance(classes, str) or not all(isinstance(name, str) for name in classes):
        raise ValueError(f"classes = {classes!r} is not a list of names")
    if not len(classes):
        return [] if _returns_features(quantized.program) else [f"LABEL_{index}" for index in range(count)]
    names = list(classes)
    if not count:
        raise ValueError(f"classes has {len(names)} names, but the model returns no logits (N, classes): leave it out")
    if len(names) != count or len(set(names)) != count:
        raise ValueError(
            f"classes has {len(names)} names, {len(set(names))} of them distinct: give a distinct name for each of "
            f"the {count} logits"
        )
    return names


def _returns_features(program: Program) -> bool:
    """Return True if the output that `logits_of` returns has another name than "logits", or comes out of a norm."""
    output, first = program.output, logits_of(program.output)
    other_name = isinstance(output, Mapping) and "logits" not in output
    return other_name or (isinstance(first, Ref) and find_source(program, first.name).kind in NORMS.values())


_PIPELINE = [
    "With transformers:",
    "",
    "```python",
    "import adalog.pipeline                     # registers the model's class with transformers",
    "from transformers import pipeline",
    "",
    'predictions = pipeline("image-classification", model="OWNER/NAME")("image.jpg")',
    "```",
    "",
]


def card(
    quantized: QuantizedProgram, size: int, figures: Mapping[str, str], *, prepared: bool, classifies: bool
) -> str:
    """Return the text of the model card.

    size: bytes of the artifact. prepared: True if the folder has preprocessor_config.json, which transformers needs.
    classifies: True if config.json names classes, which transformers' pipeline needs.
    """
    floats, output = len(quantized.float_sites()), "logits" if classifies else "output"
    facts = [
        f"- {len(quantized.ledger)} multiplications; {floats} of them stay float",
        f"- bits: {quantized.config.bits}",
    ]
    if quantized.config.pinned:
        facts[-1] += ", except for some sites; the table below lists the bits of each"
    facts += [f"- the artifact `{FILE}` takes {size:,} bytes"]
    images = quantized.provenance.get("images")
    if isinstance(images, int):
        facts.append(f"- calibrated on {images} unlabelled images (seed {quantized.provenance.get('seed', 0)})")
    measured = [f"| {_plain(name)} | {_plain(value)} |" for name, value in figures.items()]
    return "\n".join(
        [
            "---",
            "library_name: adalog",
            *(["pipeline_tag: image-classification"] if classifies else []),
            "tags:",
            "- quantized",
            "- adalog",
            "- vision",
            "---",
            "",
            "# A vision transformer, quantized with adalog",
            "",
            *facts,
            "",
            *(["| measured | |", "|---|---|", *measured, ""] if measured else []),
            "## How to run it",
            "",
            "```python",
            "import adalog",
            "",
            f"# {PREPROCESSING} describes how to prepare images."
            if prepared
            else "# Prepare images as the artifact's `preprocessing` says: transformers has no processor for them."
            if "preprocessing" in quantized.provenance
            else "# The artifact does not record how to prepare images.",
            'model = adalog.load("hf:OWNER/NAME")      # or a folder; runs by fake quantization in float',
            f'{output} = model.compile("native")(images)  # runs the products in integers',
            "```",
            "",
            *(_PIPELINE if prepared and classifies else []),
            "## What is quantized",
            "",
            "```text",
            *map(_plain_line, ledger_table(quantized.ledger)),
            *map(_plain_line, float_lines(quantized.refusals, quantized.program.float_operations())),
            "```",
            "",
        ]
    )


def locate(path: str, revision: str | None = None) -> Path:
    """Find the artifact that a path names: a file, the file in a folder (FOLDER or hf:FOLDER), or hf:OWNER/NAME.

    A repository of the Hub is downloaded if it is not in the cache. revision: its branch, tag or commit.
    Raises ArtifactError if the file is missing, and ValueError for a revision of a file or folder.
    """
    name = path.removeprefix(PREFIX)
    folder = _folder(name)
    if folder is not None:
        if revision not in (None, "main"):
            raise ValueError(
                f"revision = {revision!r} is only for a repository of the Hub, but {folder} is a folder: leave it out"
            )
        if not (folder / FILE).is_file():
            raise ArtifactError(f"{folder} has no {FILE}: name a folder that save_pretrained wrote")
        return folder / FILE
    if not path.startswith(PREFIX):
        if revision is not None:
            raise ValueError(f"revision = {revision!r} is only for a repository of the Hub: leave it out for {path}")
        return Path(path)
    way_out = f"; name a repository of the Hub that has {FILE}, or a folder"
    # No network, an invalid name, or a repository without such a file.
    with converting(ArtifactError, f"{path} cannot be loaded: ", way_out):
        return Path(extra_module("huggingface_hub", "hf").hf_hub_download(name, FILE, revision=revision))


def _folder(name: str) -> Path | None:
    try:
        folder = Path(name).expanduser()
        return folder if folder.is_dir() else None
    except (OSError, RuntimeError, ValueError):  # the name is too long, or names an unknown user
        return None


def push(quantized: QuantizedProgram, repository: str, folder: Path, *, private: bool = False) -> str:
    """Upload a folder that `save` wrote to a repository of the Hub, which is made if needed; return its address.

    Raises AdalogError if that fails.
    """
    # No network, missing rights, or an invalid name.
    with converting(AdalogError, f"{repository} cannot be written: ", "; log in, or choose another name"):
        api = extra_module("huggingface_hub", "hf").HfApi()
        api.create_repo(repository, private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repository,
            folder_path=str(folder),
            commit_message=f"A model quantized to {quantized.config.bits}",
            delete_patterns=[PREPROCESSING],  # left by another model; files of this upload are not deleted
        )
        return str(commit)


def _processor(preprocessing: Mapping[str, Any]) -> dict[str, Any] | None:
    """Convert a preprocessing to the fields of an image processor, or return None if transformers has none for it."""
    from PIL import Image

    swapped, plain = preprocessing.get("channels") == "bgr", not any(preprocessing["mean"])
    plain = plain and all(value == 1 for value in preprocessing["std"])
    if (
        preprocessing.get("fit", "stretch") != "stretch"
        or preprocessing.get("position") == "top-left"
        or any(preprocessing.get("fill") or ())
        or (swapped and not plain)
    ):
        return None

    (height, width), resize = preprocessing["size"], preprocessing["resize"]
    exact = None if isinstance(resize, int) else {"height": resize[0], "width": resize[1]}
    return {
        "image_processor_type": "MobileViTImageProcessor" if swapped else "CLIPImageProcessor",
        **({"do_flip_channel_order": True} if swapped else {}),
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
    """Escape a text for a cell of a Markdown table."""
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;")


def _plain_line(text: str) -> str:
    """Escape a text for a line of a code block, so that it cannot end the block."""
    return " ".join(text.split("\n")).replace("`", "'")
