"""`adalog evaluate`: measure the accuracy of an artifact."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor, nn

import adalog
from adalog import DataError, artifact
from adalog.calibration.schedule import Resources
from adalog.cli import detectors, options, views
from adalog.cli.console import check_outputs, image_progress, job, progress_bar, quiet, show, waiting
from adalog.cli.targets import check_bundled, compile_artifact, find_preprocessing, load_model, source_of, stranger
from adalog.errors import one_line
from adalog.inputs import demo, zoo
from adalog.inputs.images import ImageSet, draw_indices, find_support
from adalog.study.evaluate import Contest, PreparedImages, check_classes, predict, score


def command(
    file: Annotated[
        Path, typer.Argument(help="Artifact written by `adalog quantize`, or the name of a full-precision detector.")
    ],
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder of images, with one subfolder per class or a CSV file with the columns file,label. "
            "Default: the bundled images."
        ),
    ] = None,
    support: Annotated[
        Path | None,
        typer.Option(
            help="Folder of labelled images, for a model without a classifier: an image gets the label of its nearest "
            "neighbour among them. It may be a subfolder of --data."
        ),
    ] = None,
    instances: Annotated[
        Path | None,
        typer.Option("--coco", help="For a detector: COCO annotations (instances_*.json) of the images in --data."),
    ] = None,
    count: Annotated[
        int | None,
        typer.Option("--images", min=1, help="Number of images to evaluate on, drawn at random. Default: all of them."),
    ] = None,
    seed: options.DrawOption = 0,
    model: Annotated[str | None, typer.Option(help=f"Full-precision model to compare with: {zoo.KINDS}.")] = None,
    checkpoint: options.CheckpointOption = None,
    no_pretrained: options.NoPretrainedOption = False,
    executor: options.ExecutorOption = None,
    device: options.DeviceOption = "cpu",
    threads: options.ThreadsOption = 0,
    json_out: options.JsonOption = None,
) -> None:
    """Measure the accuracy of an artifact: top-1 and top-5, or COCO average precision for a detector.

    With --model, the command also compares the artifact with its full-precision model.
    """
    check_outputs(json_out, reads=(file, source_of(model), checkpoint, instances, data, support))
    place, jobs = options.find_device(device), options.thread_count(threads)
    others = {
        "--images": count is not None,
        "--seed": seed > 0,
        "--model": model is not None,
        "--support": support is not None,
        "--device": place.type != "cpu",
    }
    if detectors.is_chosen(file, instances, [name for name, is_given in others.items() if is_given]):
        detectors.evaluate(
            file,
            instances=instances,
            data=data,
            no_pretrained=no_pretrained,
            checkpoint=checkpoint,
            executor=executor,
            jobs=jobs,
            json_out=json_out,
        )
        return
    if model is None and (checkpoint is not None or no_pretrained):
        raise ValueError("--checkpoint and --no-pretrained apply to the full-precision model: add --model")
    if data is None and support is not None:
        raise ValueError("--support needs the images of --data: give both")
    queries, support_images = (None, None) if data is None else find_support(data, support)
    if queries is not None and queries.labels is None and model is None:
        raise DataError(f"{data} has no labels: add them, or give --model to compare with a full-precision model")
    images, labels = _draw(demo.test_images() if queries is None else (queries, queries.labels), count, seed)
    quantized = adalog.load(file)
    if data is None:
        check_bundled(file, quantized)
    reference = "demo" if model is None and data is None else model
    loaded = None if reference is None else load_model(reference, no_pretrained, checkpoint)
    preprocessing = find_preprocessing(file, quantized, loaded)
    if queries is None and preprocessing != zoo.DEMO_PREPROCESSING:
        raise stranger(file)
    runs = quantized if executor is None else compile_artifact(file, quantized, executor, jobs)
    networks: list[nn.Module] = [runs] if loaded is None else [runs, loaded.module]
    truth = None if labels is None else torch.as_tensor(labels)
    single = [place.type != "cpu" or (executor == "native" and network is runs) for network in networks]
    prepared, nearest = PreparedImages(images, preprocessing), None
    if support_images is not None:
        nearest = PreparedImages(support_images, preprocessing), torch.tensor(support_images.labels or ())
    # Before the long work, check on one image that the models accept such images and know all classes.
    last = 0 if truth is None else int(truth.argmax())
    with waiting(f"checking {file}"):
        image = prepared(range(last, last + 1))
        outputs = [predict(runs.to(place), image, device=place)]
        if loaded is not None:
            outputs.append(_predict_full(loaded, image, place, file))
        folders = None if queries is None else queries.classes
        if support_images is None:
            check_classes(folders, outputs[0], str(data), str(file))
            score(outputs[0], None if truth is None else truth[[last]], *outputs[1:])
    with progress_bar() as progress, quiet():
        progress.add_task("images", total=len(images) + len(support_images or ()))
        resources = Resources(jobs, progress=image_progress(progress), ranks=job())
        tallies = Contest(networks, single, place, nearest).tallies(prepared, truth, resources)
    result = tallies[0].score()
    full = None if truth is None or reference is None else tallies[1].score()
    record = {"file": str(file), "executor": executor, "reference": reference, **dataclasses.asdict(result)}
    record |= {"seed": None if count is None else seed}
    record |= {"full_precision": None if full is None else dataclasses.asdict(full)}
    sites = artifact.describe(quantized.quantized)["sites"]  # with the SQNR on the calibration images
    show(record | {"sites": sites}, json_out, views.describe_score(str(file), result, reference, full))


def _draw(
    labelled: tuple[Tensor | ImageSet, Tensor | Sequence[int] | None], count: int | None, seed: int
) -> tuple[Tensor | ImageSet, Tensor | Sequence[int] | None]:
    """Return `count` of the images, at random and in their order, and their labels. None: return all of them."""
    images, labels = labelled
    if count is None:
        if seed:
            raise ValueError("--seed has no effect on all images: give --images as well, or leave it out")
        return labelled
    if count > len(images):
        raise DataError(f"--images {count} is more than the {len(images)} images that there are: give fewer")
    numbers = draw_indices(len(images), count, seed).sort().values
    chosen = images[numbers] if isinstance(images, Tensor) else images.select(numbers.tolist())
    return chosen, None if labels is None else torch.as_tensor(labels)[numbers]


def _predict_full(loaded: zoo.LoadedModel, image: Tensor, place: torch.device, file: Path) -> Tensor:
    """Return the output of the full-precision model; raise DataError if it does not accept the artifact's images."""
    try:
        return predict(loaded.module.to(place), image, device=place)
    except (RuntimeError, TypeError) as cause:
        raise DataError(
            f"{loaded.name} does not accept the images of {file}: {one_line(cause)}; give the model that the artifact "
            "was made from"
        ) from cause
