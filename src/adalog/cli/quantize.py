"""`adalog quantize`: quantize a model and write it as an artifact."""

import dataclasses
import time
from pathlib import Path
from typing import Annotated, Any

import typer

import adalog
from adalog import Config, DataError, artifact
from adalog.cli import budgets, detectors, options
from adalog.cli.console import partial_of, progress_bar, quiet, remove_finished, show, site_progress
from adalog.cli.targets import count_option, find_calibration, load_model, source_of
from adalog.detection import zoo as detection
from adalog.inputs import zoo
from adalog.inputs.images import ImageSet
from adalog.study.sensitivity import JUDGED


def command(
    model: Annotated[str, typer.Argument(help=f"Model to quantize: {zoo.KINDS}; or a detector: {detection.KINDS}.")],
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder of images to calibrate on; labels are not needed. Default for the model demo: its own images."
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Artifact to write, a safetensors file.")] = Path(
        "model.safetensors"
    ),
    bits: Annotated[
        str, typer.Option(help="Bits of weights and activations, such as w4a4. w4a4s3 sets 3 bits after softmax.")
    ] = "w4a4",
    method: options.MethodOption = "adalog",
    images: options.ImagesOption = 32,
    reconstruct_images: Annotated[
        int,
        typer.Option(
            min=0,
            help="Number of images for the stages after the search (correction, reconstruction); 0 means the default "
            "of the method.",
        ),
    ] = 0,
    reconstruct_steps: Annotated[
        int,
        typer.Option(min=0, help="Number of training steps of a reconstruction; 0 means the default of the method."),
    ] = 0,
    reconstruct_batch: Annotated[
        int, typer.Option(min=0, help="Number of images per training step; 0 means the default of the method.")
    ] = 0,
    pinned: Annotated[
        list[str] | None,
        typer.Option(
            "--pin",
            metavar="GLOB=BITS",
            help="Use other bits for the sites whose names match GLOB; `adalog inspect` lists the names. BITS is one "
            "number for all operands (32 means float), or names operands: w4a8, w4, a8s4, i4 (input image). Repeat the "
            "option for several globs.",
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Choose bits per operand so that the artifact has at most this size, such as 2.5MB."
        ),
    ] = None,
    target_bops: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="Choose bits per operand so that one image takes at most this many BOPs (products of two bits), such "
            "as 40G.",
        ),
    ] = None,
    target_fixops: Annotated[
        str | None,
        typer.Option(
            metavar="N", help="The same limit in FixOPs (products of two 8-bit numbers). Give one of the two."
        ),
    ] = None,
    max_kl: Annotated[
        float | None,
        typer.Option(
            help="Choose the cheapest bits per operand whose predicted KL divergence from the float model is at most "
            "this, in nats."
        ),
    ] = None,
    judged: options.JudgedOption = JUDGED,
    sensitivity: options.SensitivityOption = None,
    free_sizes: Annotated[
        bool, typer.Option("--free-sizes", help="Let the artifact take images of any height and width.")
    ] = False,
    parts: options.PartsOption = None,
    checkpoint: options.CheckpointOption = None,
    no_pretrained: options.NoPretrainedOption = False,
    resume: options.ResumeOption = False,
    device: options.DeviceOption = "cpu",
    seed: options.SeedOption = 0,
    threads: options.ThreadsOption = 0,
    memory: options.MemoryOption = None,
    json_out: options.JsonOption = None,
) -> None:
    """Quantize a model and write it to one file, the artifact."""
    limits = budgets.read_budget(budget, target_bops, target_fixops, max_kl)
    if out.suffix.lower() in (".onnx", ".xml", ".pte", ".adalog"):
        converter = "adalog pack" if out.suffix.lower() == ".adalog" else "adalog export"
        raise DataError(
            f"--out {out} is the name of another format: give --out {out.with_suffix('.safetensors')}, and convert it "
            f"with `{converter}`"
        )
    config = dataclasses.replace(
        Config.preset(bits, method), images=images, pinned=tuple(map(options.read_pinned, pinned or ()))
    )
    if reconstruct_images:
        config = config.with_fitted_images(reconstruct_images)
    if reconstruct_steps or reconstruct_batch:
        config = config.with_training(reconstruct_steps or None, reconstruct_batch or None)
    kinds = detectors.read_parts(model, parts)
    if sensitivity is not None and limits is None:
        raise ValueError("--sensitivity needs a budget: give --budget, --target-bops, --target-fixops or --max-kl")
    if judged != JUDGED and (limits is None or sensitivity is not None):
        raise ValueError("--judged has no effect unless a budget measures its losses now: leave it out")
    partial = partial_of(out, json_out, resume, (source_of(model), checkpoint, sensitivity, data))
    setup = options.read_setup(no_pretrained, checkpoint, device, seed, threads, memory, free_sizes)
    if kinds is not None:
        detectors.check_setup(setup)
        if limits is not None:
            raise ValueError("budgets do not support detectors: give --bits and --parts instead")
        detectors.quantize(model, data, out, config, kinds, setup, partial, json_out)
        return
    start = time.perf_counter()
    record: dict[str, Any] = {"file": str(out), "method": method}
    if limits is None:
        quantized = _quantize(model, data, config, setup, partial)
    else:
        quantized, plan = budgets.quantize(model, data, config, limits, judged, sensitivity, setup, partial)
        record |= {"budget": plan}
    seconds = time.perf_counter() - start
    size = setup.ranks.by_first(lambda: quantized.save(out))
    remove_finished(partial)
    record |= {"bytes": size, "seconds": round(seconds, 3)} | artifact.describe(quantized.quantized)
    show(record, json_out, quantized.summary(), f"{out}: {size:,} bytes, in {seconds:.1f} s")


def _quantize(
    model: str, data: Path | None, config: Config, setup: options.Setup, partial: Path
) -> adalog.QuantizedModel:
    """Quantize the model `model` as `config` says, and return it on the CPU."""
    source = find_calibration(model, data, config.images_needed, count_option(config))
    loaded = load_model(model, setup.no_pretrained, setup.checkpoint)
    partial.parent.mkdir(parents=True, exist_ok=True)
    with progress_bar() as progress, quiet():
        watch = site_progress(progress, progress.add_task("capturing", total=1), config.bits, setup.searches)
        if isinstance(source, ImageSet):
            source = source.sample(config.images_needed, setup.seed).load(loaded.rgb_preprocessing, jobs=setup.jobs)
        quantized = adalog.quantize(
            loaded.module.to(setup.device),
            source.to(setup.device),
            config,
            seed=setup.seed,
            jobs=setup.searches,
            memory=setup.memory,
            sizes="free" if setup.free_sizes else "fixed",
            progress=watch,
            partial=partial,
            ranks=setup.ranks,
        ).cpu()
    quantized.note(preprocessing=loaded.rgb_preprocessing.to_json())
    return quantized
