"""`adalog pack`: write the file that runs an artifact without PyTorch."""

import dataclasses
import hashlib
from pathlib import Path
from typing import Annotated

import typer

from adalog import DataError, artifact, export, files
from adalog.cli.console import check_outputs, show, waiting
from adalog.cli.options import JsonOption
from adalog.cli.targets import recorded_preprocessing
from adalog.export.pack import MAX_BATCH


def command(
    file: Annotated[Path, typer.Argument(help="Artifact to pack, written by `adalog quantize`.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Pack to write.")] = Path("model.adalog"),
    batch: Annotated[
        int, typer.Option(min=1, max=MAX_BATCH, help="Number of images that run at once, in addition to single images.")
    ] = 8,
    classes: Annotated[
        Path | None, typer.Option(help="Text file with the name of one class per line, in the order of the outputs.")
    ] = None,
    json_out: JsonOption = None,
) -> None:
    """Write a pack, which `adalog.run`, the C library and browsers run without PyTorch.

    The pack holds the artifact and the calls of the compiled kernels.
    It also describes the inputs and outputs, the preparation of images, and the names of the classes.
    """
    check_outputs(out, json_out, reads=(file, classes))
    names = None if classes is None else _read_names(classes)
    recorded = recorded_preprocessing(file, artifact.deserialise(artifact.read(file), str(file)).provenance)
    preprocessing = None if recorded is None else dataclasses.asdict(recorded)
    batches = sorted({1, batch})
    with waiting(f"packing {file}"):
        content = export.to_pack(file, batches, preprocessing, names)
    files.write_whole(out, content)
    sizes = " or ".join(map(str, batches)) + (" images" if batch > 1 else " image")
    record = {"file": str(out), "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    record |= {"batches": batches, "classes": names and len(names)}
    show(record, json_out, f"{out}: {len(content):,} bytes, for {sizes} at once")


def _read_names(path: Path) -> list[str]:
    """Return the lines of a file of class names. Raises DataError if there are none, or if a line cannot be a name."""
    try:
        names = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as cause:  # ValueError: the bytes are not text, or no file can have this path
        why = getattr(cause, "strerror", None) or "it is not text in UTF-8"
        raise DataError(f"{path} cannot be read: {why}; give a text file with one name per line") from cause
    unprintable = [number for number, name in enumerate(names, 1) if not name.strip() or not name.isprintable()]
    if unprintable or not names:
        raise DataError(
            f"{path}, line {unprintable[0] if unprintable else 1}, is not the name of a class: give one name per line"
        )
    return names
