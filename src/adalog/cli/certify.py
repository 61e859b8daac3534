"""`adalog certify`: check that an exported file computes the same as its artifact."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from torch import Tensor

import adalog
from adalog import artifact, export, files
from adalog.cli.console import FAILED, check_outputs, image_progress, progress_bar, quiet, show
from adalog.cli.options import JsonOption, check_choice
from adalog.cli.targets import bundled_images, check_count, find_preprocessing, naming_file
from adalog.inputs.images import find_images
from adalog.runtime import EXECUTORS
from adalog.study.doctor import processor
from adalog.study.evaluate import BATCH, PreparedImages


def command(
    file: Annotated[Path, typer.Argument(help="Artifact written by `adalog quantize`.")],
    exported: Annotated[
        Path,
        typer.Argument(
            metavar="model.onnx", help="ONNX or ExecuTorch file that `adalog export` wrote for the artifact."
        ),
    ],
    data: Annotated[
        Path | None, typer.Option(help="Folder of images to compare on. Default: the bundled images.")
    ] = None,
    images: Annotated[int | None, typer.Option(min=1, help="Number of images. Default: all.")] = None,
    engine: Annotated[
        str, typer.Option(help=f"Engine that runs an ONNX file: {', '.join(export.ENGINES)}.")
    ] = "onnxruntime",
    executor: Annotated[str, typer.Option(help=f"Executor that runs the artifact: {', '.join(EXECUTORS)}.")] = "torch",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Also write the certificate to this text file.")
    ] = None,
    json_out: JsonOption = None,
) -> None:
    """Compare an exported file with its artifact, site by site and output by output.

    The result is a certificate.
    The exit code is 1 if the two differ by more than rounding explains.
    """
    check_outputs(out, json_out, reads=(file, exported, data))
    check_choice("--engine", engine, export.ENGINES)
    check_choice("--executor", executor, EXECUTORS)
    content, package = artifact.read(file), artifact.read(exported)
    quantized = adalog.QuantizedModel(artifact.deserialise(content, str(file)))
    if data is None:
        prepared = PreparedImages(bundled_images(file, quantized, images))
    else:
        folder_images = find_images(data)
        count = len(folder_images) if images is None else images
        check_count(data, len(folder_images), count)
        prepared = PreparedImages(folder_images.select(range(count)), find_preprocessing(file, quantized, None))
    total = len(prepared)
    with progress_bar() as progress, quiet(), naming_file(exported, "cannot be certified"):
        progress.add_task("images", total=total)
        watch = image_progress(progress)

        def counted() -> Iterator[tuple[Tensor]]:
            for start in range(0, total, BATCH):
                end = min(start + BATCH, total)
                yield (prepared(range(start, end)),)
                watch(end)

        digest = hashlib.sha256(content).hexdigest()
        if export.is_executorch(package):
            certificate = export.certify_executorch(quantized.quantized, digest, package, counted(), executor=executor)
        else:
            certificate = export.certify(
                quantized.quantized, digest, package, counted(), engine=engine, executor=executor
            )
    page = f"{certificate.text()}\nprocessor: {processor()}"
    if out is not None:
        files.write_whole(out, f"{page}\n".encode())
    record = {"artifact": str(file), "export": str(exported), **certificate.json(), "processor": processor()}
    show(record, json_out, page)
    if not certificate.passed:
        raise typer.Exit(FAILED)
