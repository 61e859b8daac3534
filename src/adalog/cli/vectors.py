"""`adalog vectors`: write the integer computation of sites as files."""

import fnmatch
from pathlib import Path
from typing import Annotated

import typer

import adalog
from adalog import DataError, files
from adalog.cli.console import check_outputs, show
from adalog.cli.options import DrawOption, JsonOption
from adalog.cli.targets import bundled_images, check_count, compile_artifact, find_preprocessing
from adalog.inputs.images import find_images
from adalog.runtime.vectors import write_trace


def command(
    file: Annotated[Path, typer.Argument(help="Artifact with the site, written by `adalog quantize`.")],
    site: Annotated[
        str,
        typer.Option(
            help="Name of the site, listed by `adalog inspect FILE`; or a pattern such as '*' or 'blocks.0.*', which "
            "writes a folder for each site."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to create.")],
    images: Annotated[int, typer.Option(min=1, help="Number of images to run.")] = 1,
    data: Annotated[
        Path | None, typer.Option(help="Folder of images to run. Default: the first bundled images.")
    ] = None,
    seed: DrawOption = 0,
    json_out: JsonOption = None,
) -> None:
    """Write the values, codes, sums and outputs of sites as .npy files, with a description of each in site.json."""
    check_outputs(json_out, reads=(file, data))
    files.check_folder(out)
    if json_out not in (None, "-") and Path(json_out).absolute().is_relative_to(out.absolute()):
        raise DataError(f"{json_out} is inside the folder {out}, which this command creates: choose another folder")
    quantized = adalog.load(file)
    model = compile_artifact(file, quantized, "reference")
    if data is None:
        tensors = bundled_images(file, quantized, images)
    else:
        image_set = find_images(data)
        check_count(data, len(image_set), images)
        tensors = image_set.sample(images, seed).load(find_preprocessing(file, quantized, None), jobs=1)
    names = [site] if site in model.sites else fnmatch.filter(model.sites, site) or [site]
    written = {name: write_trace(trace) for name, trace in model.traces(names, tensors).items()}
    content = written.get(site) or {
        f"{name}/{file}": value for name in written for file, value in written[name].items()
    }
    files.write_folder(out, content)
    sizes = {name: len(value) for name, value in sorted(content.items())}
    texts = (f"{out / name}: {size:,} bytes" for name, size in sizes.items())
    show({"folder": str(out), "files": sizes}, json_out, *texts)
