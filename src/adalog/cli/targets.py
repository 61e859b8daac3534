"""Find and load the models, artifacts and images that a command line names."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from adalog import AdalogError, Config, DataError, QuantizedModel
from adalog.cli.console import waiting
from adalog.detection.zoo import names_detector
from adalog.inputs import demo, zoo
from adalog.inputs.images import ImageSet, Preprocessing, draw_indices, find_images
from adalog.runtime import Compiled

_FITTED = "--reconstruct-images"  # the option with a default that depends on the method


def source_of(target: str | None) -> str | None:
    """Return the file or folder that a command reads for a model or an artifact, or None if there is none."""
    if target is None or not zoo.is_model(target):
        return target
    if target.startswith("hf:") and Path(target[3:]).is_dir():
        return target[3:]
    file, _, _ = target.rpartition(":")
    return file if file.endswith(".py") else None


def load_model(name: str, no_pretrained: bool, checkpoint: Path | None) -> zoo.LoadedModel:
    """Load the full-precision model `name` while a spinner shows. Raises ValueError for the name of a detector."""
    _refuse_detector(name)
    with waiting(f"loading {name}"):
        return zoo.load_model(name, pretrained=not no_pretrained, checkpoint=checkpoint)


def _refuse_detector(name: str) -> None:
    if names_detector(name):
        raise ValueError(f"{name} is a detector, which this command does not support: give a classifier")


def refuse_weights(target: str, no_pretrained: bool, checkpoint: Path | None) -> None:
    """Raise ValueError if options that choose a model's weights are given with an artifact."""
    if checkpoint is not None or no_pretrained:
        raise ValueError(
            f"--checkpoint and --no-pretrained apply only to a model ({zoo.KINDS}), not to {target}: leave them out"
        )


def find_calibration(target: str, data: Path | None, count: int, option: str | None = "--images") -> Tensor | ImageSet:
    """Return the images to select `count` from: the folder `data`, or the bundled ones. option: as in `check_count`."""
    _refuse_detector(target)
    if data is None and target != "demo":
        raise DataError(
            f"{target} has no images of its own: give --data FOLDER with at least {count} images like its training data"
        )
    images: Tensor | ImageSet = demo.calibration_images() if data is None else find_images(data)
    if data is None and count > len(images):
        images = demo.unlabelled_images()
    check_count(data or target, len(images), count, option)
    return images


def count_option(config: Config) -> str:
    """Return the option that sets how many images `config` needs."""
    return _FITTED if config.images_needed > config.images else "--images"


def check_count(source: Path | str, available: int, count: int, option: str | None = "--images") -> None:
    """Raise DataError if `count`, set by `option` or by several options (None), is more than the images available."""
    if count <= available:
        return
    if option is None:
        why = (
            f"--images, --judged and the method need {count}: lower these options, choose a method that needs fewer, "
            "or give more images"
        )
    else:
        need = f"the stages of the method fit {count}" if option == _FITTED else f"{option} is {count}"
        why = f"{need}: give {option} {available}, or more images"
    raise DataError(f"{source} has only {available} images, but {why}")


def find_judging(
    target: str, data: Path | None, needed: int, judged: int, seed: int
) -> tuple[Tensor | ImageSet, Tensor | ImageSet]:
    """Select the images that `quantize` calibrates on with this seed, and `judged` others to measure losses on."""
    images = find_calibration(target, data, needed, None)
    if isinstance(images, Tensor) and needed <= len(images) < len(demo.unlabelled_images()):
        more = demo.unlabelled_images()[len(images) :]
        if judged > len(more):
            raise DataError(
                f"{target} has only {len(more)} images other than the calibration images, but --judged is {judged}: "
                f"give --judged {len(more)}, or fewer"
            )
        return images[draw_indices(len(images), needed, seed)], more[draw_indices(len(more), judged, seed)]
    images = find_calibration(target, data, needed + judged, None)
    numbers = draw_indices(len(images), needed + judged, seed)
    if isinstance(images, Tensor):
        return images[numbers[:needed]], images[numbers[needed:]]
    return images.select(numbers[:needed].tolist()), images.select(numbers[needed:].tolist())


def bundled_images(file: Path, quantized: QuantizedModel, count: int | None) -> Tensor:
    """Return the first `count` bundled test images, or all for None; raise DataError for another model's artifact."""
    check_bundled(file, quantized)
    bundled = demo.test_images()[0]
    if count is not None and count > len(bundled):
        raise DataError(
            f"only {len(bundled)} images are bundled, but --images is {count}: give fewer, or --data FOLDER"
        )
    return bundled[:count]


def check_bundled(file: Path, quantized: QuantizedModel) -> None:
    """Raise DataError if the artifact takes images of another size or preprocessing than the bundled images."""
    fits = [tuple(value.shape[1:]) for value in quantized.example] == [(3, *zoo.DEMO_PREPROCESSING.size)]
    if fits and "preprocessing" in quantized.provenance:
        fits = find_preprocessing(file, quantized, None) == zoo.DEMO_PREPROCESSING
    if not fits:
        raise stranger(file)


def stranger(file: Path) -> DataError:
    """Return the error for an artifact that the bundled images do not fit."""
    return DataError(
        f"{file} was not made from the bundled model, so the bundled images do not fit it: give --data FOLDER"
    )


def recorded_preprocessing(file: Path, provenance: Mapping[str, Any]) -> Preprocessing | None:
    """Return the preprocessing that an artifact records, or None. Raises DataError if it is not valid."""
    fields = provenance.get("preprocessing")
    try:
        return None if fields is None else Preprocessing.from_json(fields)
    except ValueError as cause:
        raise DataError(f"{file} records an invalid preprocessing: {cause}; quantize the model again") from cause


def find_preprocessing(file: Path, quantized: QuantizedModel, loaded: zoo.LoadedModel | None) -> Preprocessing:
    """Return the preprocessing that an artifact records, or else the preprocessing of its full-precision model.

    Raises DataError if there is neither, or if either does not fit the artifact's inputs.
    """
    own = recorded_preprocessing(file, quantized.provenance), str(file)
    full = (None, "") if loaded is None else (loaded.preprocessing, loaded.name)
    candidates = [(preprocessing, source) for preprocessing, source in (own, full) if preprocessing is not None]
    if not candidates:
        raise DataError(
            f"{file} does not record how to prepare images: give `adalog evaluate` a --model, or record it in Python "
            "with QuantizedModel.note(preprocessing=...) and save the model again"
        )
    inputs = " and ".join(str(tuple(value.shape[1:])) for value in quantized.example)
    for preprocessing, source in candidates:
        prepared = str((3, *preprocessing.size))
        if inputs != prepared:
            raise DataError(
                f"{file} takes inputs of shape {inputs}, but the preprocessing of {source} outputs {prepared}: "
                "give the model that the artifact was made from as --model, or quantize it again"
            )
    return candidates[0][0]


def sample_for(
    file: Path, quantized: QuantizedModel, data: Path | None, count: int, seed: int, jobs: int
) -> Tensor | None:
    """Return images to run an artifact on: from a folder, or bundled ones for the bundled model, or None."""
    if data is not None:
        images = find_calibration(str(file), data, count)
        assert isinstance(images, ImageSet)
        return images.sample(count, seed).load(find_preprocessing(file, quantized, None), jobs=jobs)
    stored = quantized.provenance.get("preprocessing")
    if stored is None or find_preprocessing(file, quantized, None) != zoo.DEMO_PREPROCESSING:
        return None
    bundled = find_calibration("demo", None, count)
    assert isinstance(bundled, Tensor)
    return bundled[draw_indices(len(bundled), count, seed)]


def compile_artifact(file: Path, quantized: QuantizedModel, executor: str, threads: int = 1) -> Compiled:
    """Compile an artifact for an executor; errors name the file. threads: only for the executor native."""
    with naming_file(file):
        return quantized.compile(executor, **({"threads": threads} if executor == "native" else {}))


@contextmanager
def naming_file(file: Path, what: str = "does not run in integers") -> Iterator[None]:
    """Add the file to the errors raised while the context is open. what: text between the file and the error."""
    try:
        yield
    except AdalogError as cause:
        raise type(cause)(f"{file} {what}: {cause}") from cause
