"""`adalog tape`: what runs an artifact without PyTorch."""

from pathlib import Path
from typing import Annotated

import typer

from adalog import export, files, run
from adalog.cli.console import check_outputs, emit_json, say, waiting
from adalog.cli.options import JsonOption
from adalog.run.tape import MAX_BATCH


def command(
    file: Annotated[Path, typer.Argument(help="The artifact.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The file to write. Without it, FILE with the suffix .tape.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, max=MAX_BATCH, help="Images that run at once.")] = 1,
    json_out: JsonOption = None,
) -> None:
    """Write the tape with which `adalog.run` runs an artifact: NumPy and the kernels, without PyTorch."""
    target = out or run.tape_beside(file)
    check_outputs(target, json_out, reads=(file,))
    with waiting(f"tape {file}"):
        content = export.to_tape(file, batch)
    files.write_whole(target, content)
    if json_out != "-":
        say(f"{target}: {len(content):,} bytes, for {batch} image{'s' if batch > 1 else ''} at once")
    emit_json({"file": str(target), "bytes": len(content), "batch": batch}, json_out)
