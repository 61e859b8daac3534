"""`adalog vectors`: what one site computes, as files."""

from pathlib import Path
from typing import Annotated

import typer

import adalog
from adalog import DataError, files
from adalog.cli.console import check_outputs, emit_json, say
from adalog.cli.options import DrawOption, JsonOption
from adalog.cli.targets import bundled_images, check_count, compiled, find_preprocessing
from adalog.inputs.images import find_images
from adalog.runtime.vectors import vectors


def command(
    file: Annotated[Path, typer.Argument(help="The artifact.")],
    site: Annotated[str, typer.Option(help="Name of a site, as `adalog inspect FILE` lists it.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to create.")],
    images: Annotated[int, typer.Option(min=1, help="Number of images.")] = 1,
    data: Annotated[
        Path | None, typer.Option(help="Folder from which --images are drawn. Without it, the first bundled ones.")
    ] = None,
    seed: DrawOption = 0,
    json_out: JsonOption = None,
) -> None:
    """Write what one site computes, from codes to outputs, as .npy files with a description in site.json."""
    check_outputs(json_out, reads=(file, data))
    files.check_folder(out)
    if json_out not in (None, "-") and Path(json_out).absolute().is_relative_to(out.absolute()):
        raise DataError(f"{json_out} lies in the folder {out}, which has files of its own: choose another place")
    quantized = adalog.load(file)
    model = compiled(file, quantized, "reference")
    if data is None:
        given = bundled_images(file, quantized, images)
    else:
        found = find_images(data)
        check_count(data, len(found), images)
        given = found.sample(images, seed).load(find_preprocessing(file, quantized, None), jobs=1)
    content = vectors(model, site, given)
    files.write_folder(out, content)
    sizes = {name: len(value) for name, value in sorted(content.items())}
    if json_out != "-":
        say(*(f"{out / name}: {size:,} bytes" for name, size in sizes.items()))
    emit_json({"folder": str(out), "files": sizes}, json_out)
