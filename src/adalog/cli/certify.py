"""`adalog certify`: whether an exported file computes what its artifact does."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from torch import Tensor

import adalog
from adalog import artifact, export, files
from adalog.cli.console import FAILED, check_outputs, emit_json, image_progress, progress_bar, quiet, say
from adalog.cli.options import JsonOption
from adalog.cli.targets import bundled_images, check_count, find_preprocessing, naming_file
from adalog.inputs.images import find_images
from adalog.runtime import EXECUTORS
from adalog.study.doctor import processor

_BATCH = 20


def command(
    file: Annotated[Path, typer.Argument(help="The artifact.")],
    exported: Annotated[Path, typer.Argument(metavar="{model.onnx}", help="What `adalog export` made of it.")],
    data: Annotated[Path | None, typer.Option(help="Folder of images. Without it, the bundled ones.")] = None,
    images: Annotated[int | None, typer.Option(min=1, help="Number of images; without it, all of them.")] = None,
    engine: Annotated[str, typer.Option(help=f"One of {', '.join(export.ENGINES)}.")] = "onnxruntime",
    executor: Annotated[str, typer.Option(help=f"What runs the artifact: one of {', '.join(EXECUTORS)}.")] = "torch",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the page to this file as well.")] = None,
    json_out: JsonOption = None,
) -> None:
    """Compare an export with its artifact, site by site and answer by answer; the exit code is 1 if it fails."""
    check_outputs(out, json_out, reads=(file, exported, data))
    if engine not in export.ENGINES or executor not in EXECUTORS:
        raise ValueError(f"engine = {engine!r} or executor = {executor!r} is none of those that `--help` lists")
    content, other = artifact.read(file), artifact.read(exported)
    quantized = adalog.QuantizedModel(artifact.deserialise(content, str(file)))
    if data is None:
        bundled = bundled_images(file, quantized, images)
        batches, count = iter(bundled.split(_BATCH)), len(bundled)
    else:
        found = find_images(data)
        count = len(found) if images is None else images
        check_count(data, len(found), count)
        batches = found.select(range(count)).batches(find_preprocessing(file, quantized, None), batch=_BATCH)
    with progress_bar() as progress, quiet(), naming_file(exported, "cannot be certified"):
        progress.add_task("images", total=count)
        watch = image_progress(progress)

        def counted() -> Iterator[tuple[Tensor]]:
            done = 0
            for batch in batches:
                yield (batch,)
                done += len(batch)
                watch(done)

        digest = hashlib.sha256(content).hexdigest()
        certificate = export.certify(quantized.quantized, digest, other, counted(), engine=engine, executor=executor)
    page = f"{certificate.text()}\nprocessor: {processor()}"
    if out is not None:
        files.write_whole(out, f"{page}\n".encode())
    if json_out != "-":
        say(page)
    emit_json(
        {"artifact": str(file), "export": str(exported), **certificate.json(), "processor": processor()}, json_out
    )
    if not certificate.passed:
        raise typer.Exit(FAILED)
