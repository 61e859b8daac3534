"""`adalog figures`: draw the quantizers of a model or an artifact."""

import functools
from pathlib import Path
from typing import Annotated

import typer

import adalog
from adalog import Calibration, Config, files
from adalog._quantize import sample_images
from adalog.cli.console import check_outputs, emit_json, progress_bar, quiet, say, site_progress, waiting
from adalog.cli.options import CheckpointOption, DrawOption, JsonOption, NoPretrainedOption, ThreadsOption, thread_count
from adalog.cli.targets import find_calibration, load_model, refuse_weights, sample_for, source_of
from adalog.errors import printable
from adalog.inputs import zoo
from adalog.inputs.images import ImageSet
from adalog.study import figures

METHODS = ("minmax", "ptq4vit", "repq-vit", "adalog")


def command(
    target: Annotated[
        str, typer.Argument(help=f"Artifact written by `adalog quantize`, or full-precision model: {zoo.KINDS}.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write the pictures and their index to.")],
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder of images, to calibrate a model or for the histograms of an artifact. demo has its own images."
        ),
    ] = None,
    bits: Annotated[str | None, typer.Option(help="Bits to quantize a model to, such as w6a6. Default: w4a4.")] = None,
    methods: Annotated[
        str | None,
        typer.Option(help=f"Methods to compare on a model by SQNR, comma-separated. Default: {','.join(METHODS)}."),
    ] = None,
    site: Annotated[
        str | None,
        typer.Option(
            help="Name of the site whose search to draw, listed by `adalog inspect MODEL`. Default: one after a GELU."
        ),
    ] = None,
    images: Annotated[int, typer.Option(min=1, help="Number of images to use.")] = 32,
    checkpoint: CheckpointOption = None,
    no_pretrained: NoPretrainedOption = False,
    seed: DrawOption = 0,
    threads: ThreadsOption = 0,
    json_out: JsonOption = None,
) -> None:
    """Draw the quantizers of a model or an artifact as PNG and SVG.

    The pictures show histograms with the levels of quantizers, the landscape of a search, and the SQNR of each site.
    """
    possible = [out / f"{name}.{form}" for name in figures.CAPTIONS for form in figures.FORMS]
    check_outputs(*possible, out / "index.md", json_out, reads=(source_of(target), checkpoint, data))
    jobs = thread_count(threads)
    if zoo.is_model(target):
        names, width = (methods or ",".join(METHODS)).split(","), bits or "w4a4"
        for name in names:  # raises for a wrong name before the long work
            Config.preset(width, name)
        given = find_calibration(target, data, images)
        loaded = load_model(target, no_pretrained, checkpoint)
        preprocessing = loaded.prepared
        with progress_bar() as progress, quiet():
            bar = progress.add_task("capturing", total=1)
            if isinstance(given, ImageSet):
                given = given.sample(images, seed).load(preprocessing, jobs=jobs)
            calibration = Calibration(loaded.module, sample_images(given, images, seed), seed=seed)
            watch = functools.partial(site_progress, progress, bar)
            drawn, left_out = figures.of_model(
                calibration, printable(target), width, names, site=site, jobs=jobs, progress=watch
            )
    else:
        refuse_weights(target, no_pretrained, checkpoint)
        for option, value in (("--bits", bits), ("--methods", methods), ("--site", site)):
            if value is not None:
                raise ValueError(f"{option} applies only to a model ({zoo.KINDS}), not to {target}: leave it out")
        quantized = adalog.load(target)
        sample = sample_for(Path(target), quantized, data, images, seed, jobs)
        with waiting(f"drawing {target}"):
            drawn, left_out = figures.of_artifact(quantized, printable(Path(target).name), sample)
    with waiting("drawing"):
        pictures = figures.pictures(drawn, printable(target), left_out)
    for name, (content, _) in pictures.items():
        files.write_whole(out / name, content)
    if json_out != "-":
        say(*(f"{out / name}: {len(content):,} bytes" for name, (content, _) in pictures.items()))
        say(*(f"not drawn: {name}: {why}" for name, why in left_out.items()))
    listed = [{"file": name, "caption": caption} for name, (_, caption) in pictures.items()]
    emit_json({"target": target, "folder": str(out), "files": listed, "left_out": left_out}, json_out)
