"""`adalog tape`: write the file that runs an artifact without PyTorch."""

from pathlib import Path
from typing import Annotated

import typer

from adalog import export, files, run
from adalog.cli.console import check_outputs, emit_json, say, waiting
from adalog.cli.options import JsonOption
from adalog.run.tape import MAX_BATCH


def command(
    file: Annotated[Path, typer.Argument(help="Artifact to run, written by `adalog quantize`.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Tape to write. Default: FILE with the suffix .tape.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, max=MAX_BATCH, help="Number of images that run at once.")] = 1,
    json_out: JsonOption = None,
) -> None:
    """Write a tape, with which `adalog.run` runs an artifact without PyTorch.

    A tape lists the calls of the compiled kernels.
    It needs NumPy, safetensors and these kernels to run.
    """
    target = out or run.tape_path(file)
    check_outputs(target, json_out, reads=(file,))
    with waiting(f"writing a tape of {file}"):
        content = export.to_tape(file, batch)
    files.write_whole(target, content)
    if json_out != "-":
        say(f"{target}: {len(content):,} bytes, for {batch} image{'s' if batch > 1 else ''} at once")
    emit_json({"file": str(target), "bytes": len(content), "batch": batch}, json_out)
