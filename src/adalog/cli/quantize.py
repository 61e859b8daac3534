"""`adalog quantize`: a model becomes an artifact."""

import dataclasses
import time
from pathlib import Path
from typing import Annotated

import typer

import adalog
from adalog import METHODS, Config, DataError, artifact
from adalog.cli import detectors
from adalog.cli.console import check_outputs, emit_json, progress_bar, quiet, say, site_progress
from adalog.cli.options import (
    CheckpointOption,
    DeviceOption,
    JsonOption,
    NoPretrainedOption,
    SeedOption,
    ThreadsOption,
    find_device,
    read_pinned,
    read_size,
    thread_count,
)
from adalog.cli.targets import find_calibration, load_model, source_of
from adalog.detection import zoo as detection
from adalog.inputs import zoo
from adalog.inputs.images import ImageSet


def command(
    model: Annotated[str, typer.Argument(help=f"The model: {zoo.KINDS}; or a detector: {detection.KINDS}.")],
    data: Annotated[
        Path | None,
        typer.Option(help="Folder of images from which --images are drawn. Not needed for demo, which has its own."),
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="The artifact to write.")] = Path("model.safetensors"),
    bits: Annotated[
        str, typer.Option(help="Bits of weights and activations, such as w4a4; w4a4s3 sets those after softmax.")
    ] = "w4a4",
    method: Annotated[str, typer.Option(help=f"One of {', '.join(METHODS)}.")] = "adalog",
    images: Annotated[int, typer.Option(min=1, help="Number of calibration images.")] = 32,
    reconstruct_images: Annotated[
        int, typer.Option(min=0, help="Number of images that stages after the search fit; 0: as the method has it.")
    ] = 0,
    pinned: Annotated[
        list[str] | None,
        typer.Option(
            "--keep",
            "--pin",
            metavar="GLOB=BITS",
            help="Give sites whose name matches GLOB these bits: 8, w4a8, w4 or a8s4; 32 for float. May be repeated.",
        ),
    ] = None,
    free_sizes: Annotated[
        bool, typer.Option("--free-sizes", help="The artifact takes images of other heights and widths too.")
    ] = False,
    parts: Annotated[
        str | None,
        typer.Option(help="Parts of a detector to quantize, of backbone,neck,rpn,box,mask; all of them by default."),
    ] = None,
    checkpoint: CheckpointOption = None,
    no_pretrained: NoPretrainedOption = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue a run that was stopped, from what OUT.partial holds.")
    ] = False,
    device: DeviceOption = "cpu",
    seed: SeedOption = 0,
    threads: ThreadsOption = 0,
    memory: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Memory for observed values and their search, such as 512MB; the model and the images come on top.",
        ),
    ] = "2GiB",
    json_out: JsonOption = None,
) -> None:
    """Quantize a model and write the artifact."""
    limit = read_size(memory)
    config = dataclasses.replace(
        Config.preset(bits, method), images=images, pinned=tuple(map(read_pinned, pinned or ()))
    )
    if reconstruct_images:
        config = config.fitting(reconstruct_images)
    is_detector = detection.names_detector(model)
    if not zoo.is_model(model) and not is_detector:
        raise DataError(f"model {model!r} is none of {zoo.KINDS}, {detection.KINDS}")
    if parts is not None and not is_detector:
        raise ValueError(f"--parts are of a detector, {model} is none of {detection.KINDS}")
    partial = out.with_name(f"{out.name}.partial")
    check_outputs(out, partial, json_out, reads=(source_of(model), checkpoint))
    if not resume and (left := sorted(out.parent.glob(f"{partial.name}*"))):
        raise DataError(f"{left[0]} holds the searches of an earlier run: go on with --resume, or remove it")
    place = find_device(device)
    if is_detector:
        if free_sizes or place.type != "cpu":
            raise ValueError("a detector takes images of any size, and is quantized on the CPU: leave out the option")
        detectors.quantize(
            model,
            data,
            out,
            config,
            detectors.read_parts(parts or "all"),
            no_pretrained=no_pretrained,
            checkpoint=checkpoint,
            seed=seed,
            jobs=thread_count(threads),
            memory=limit,
            partial=partial,
            json_out=json_out,
        )
        return
    option = "--images" if config.images_wanted == images else "--reconstruct-images"
    given = find_calibration(model, data, config.images_wanted, option)
    loaded = load_model(model, no_pretrained, checkpoint)
    preprocessing = loaded.prepared
    out.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    jobs = thread_count(threads)
    with progress_bar() as progress, quiet():
        watch = site_progress(progress, progress.add_task("capture", total=1), config.bits)
        if isinstance(given, ImageSet):
            given = given.sample(config.images_wanted, seed).load(preprocessing, jobs=jobs)
        quantized = adalog.quantize(
            loaded.module.to(place),
            given.to(place),
            config,
            seed=seed,
            jobs=jobs if place.type == "cpu" else 1,  # the memory of a GPU holds one site at a time
            memory=limit,
            sizes="free" if free_sizes else "fixed",
            progress=watch,
            partial=partial,
        ).cpu()
    seconds = time.perf_counter() - start
    quantized.note(preprocessing=dataclasses.asdict(preprocessing))
    size = quantized.save(out)
    partial.unlink(missing_ok=True)
    if json_out != "-":
        say(quantized.summary(), f"{out}: {size:,} bytes, in {seconds:.1f} s")
    told = {"file": str(out), "bytes": size, "method": method, "seconds": round(seconds, 3)}
    emit_json(told | artifact.describe(quantized.quantized), json_out)
