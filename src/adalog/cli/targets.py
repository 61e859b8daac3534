"""The models, artifacts and images that a command line names."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from adalog import AdalogError, DataError, QuantizedModel
from adalog.cli.console import waiting
from adalog.detection.zoo import names_detector
from adalog.inputs import demo, zoo
from adalog.inputs.images import ImageSet, Preprocessing, draw_indices, find_images
from adalog.runtime import Compiled


def source_of(target: str | None) -> str | None:
    """The file or folder that a command reads for a model's or an artifact's name, or None."""
    if target is None or not zoo.is_model(target):
        return target
    if target.startswith("hf:") and Path(target[3:]).is_dir():
        return target[3:]
    file, _, _ = target.rpartition(":")
    return file if file.endswith(".py") else None


def load_model(name: str, no_pretrained: bool, checkpoint: Path | None) -> zoo.LoadedModel:
    """The model of that name, loaded behind a spinner."""
    with waiting(f"load {name}"):
        return zoo.load_model(name, pretrained=not no_pretrained, checkpoint=checkpoint)


def refuse_weights(target: str, no_pretrained: bool, checkpoint: Path | None) -> None:
    """Raise ValueError if options that choose a model's weights are given with an artifact."""
    if checkpoint is not None or no_pretrained:
        raise ValueError(f"--checkpoint and --no-pretrained take a model, {target} is none of {zoo.KINDS}")


def find_calibration(target: str, data: Path | None, count: int, option: str | None = "--images") -> Tensor | ImageSet:
    """The images from which `count` are drawn: those of the folder `data`, or the bundled ones for the bundled model.

    option: the one that asked for so many. Raises DataError if there are fewer, or none.
    """
    if names_detector(target):
        raise ValueError(f"{target} is a detector, which this command does not take")
    if data is None and target != "demo":
        raise DataError(f"{target} brings no images: give --data FOLDER, with {count} or more of what it was made for")
    given: Tensor | ImageSet
    if data is None:
        few = demo.calibration_images()
        given = few if count <= len(few) else demo.unlabelled_images()
    else:
        given = find_images(data)
    check_count(data or target, len(given), count, option)
    return given


def check_count(source: Path | str, there: int, count: int, option: str | None = "--images") -> None:
    """Raise DataError if more images are wanted than there are.

    option: the one that asked for so many; None where several did, and perhaps the method.
    """
    if count > there and option is None:
        raise DataError(
            f"{source} has {there} images, and --images, --judged and the method want {count}: ask for fewer, choose a "
            "method that fits fewer, or give more images"
        )
    if count > there:
        raise DataError(
            f"{source} has {there} images, {option} {count} are wanted: give {option} {there}, or more images"
        )


def find_judging(
    target: str, data: Path | None, wanted: int, judged: int, seed: int
) -> tuple[Tensor | ImageSet, Tensor | ImageSet]:
    """The `wanted` images that calibrate, drawn with the seed, and `judged` others that only judge.

    The first ones are those that `quantize` draws without any that judge.
    """
    given = find_calibration(target, data, wanted, None)
    if isinstance(given, Tensor) and wanted <= len(given) < len(demo.unlabelled_images()):
        more = demo.unlabelled_images()[len(given) :]
        if judged > len(more):
            raise DataError(
                f"{target} has {len(more)} images beside those that calibrate, --judged {judged} are wanted: give "
                f"--judged {len(more)}, or fewer"
            )
        return given[draw_indices(len(given), wanted, seed)], more[draw_indices(len(more), judged, seed)]
    given = find_calibration(target, data, wanted + judged, None)
    drawn = draw_indices(len(given), wanted + judged, seed)
    if isinstance(given, Tensor):
        return given[drawn[:wanted]], given[drawn[wanted:]]
    return given.select(drawn[:wanted].tolist()), given.select(drawn[wanted:].tolist())


def bundled_images(file: Path, quantized: QuantizedModel, count: int | None) -> Tensor:
    """The first bundled images, for the bundled model's artifact; all of them without a count.

    Raises DataError for another artifact, and if there are fewer.
    """
    check_bundled(file, quantized)
    bundled = demo.test_images()[0]
    if count is not None and count > len(bundled):
        raise DataError(f"{len(bundled)} images are bundled, --images {count} are wanted: give fewer, or --data FOLDER")
    return bundled[:count]


def check_bundled(file: Path, quantized: QuantizedModel) -> None:
    """Raise DataError where the bundled images have another size, or are prepared otherwise, than an artifact wants."""
    fits = [tuple(value.shape[1:]) for value in quantized.example] == [(3, *zoo.DEMO_PREPROCESSING.size)]
    if fits and "preprocessing" in quantized.provenance:
        fits = find_preprocessing(file, quantized, None) == zoo.DEMO_PREPROCESSING
    if not fits:
        raise stranger(file)


def stranger(file: Path) -> DataError:
    """The error for an artifact that the bundled images do not fit."""
    return DataError(f"{file} is not of the bundled model, whose images are the only ones here: give --data FOLDER")


def find_preprocessing(file: Path, quantized: QuantizedModel, loaded: zoo.LoadedModel | None) -> Preprocessing:
    """How images are prepared for an artifact: as it says itself, or else as its full-precision model says.

    Raises DataError if neither says so, or if either does not fit the artifact's inputs.
    """
    found: list[tuple[Preprocessing, str]] = []
    stored = quantized.provenance.get("preprocessing")
    if stored is not None:
        try:
            found.append((Preprocessing.from_json(stored), str(file)))
        except ValueError as cause:
            raise DataError(
                f"{file} says wrongly how its images are prepared: {cause}; quantize the model again"
            ) from cause
    if loaded is not None and loaded.preprocessing is not None:
        found.append((loaded.preprocessing, loaded.name))
    if not found:
        raise DataError(f"{file} does not say how its images are prepared: give --model MODEL that does")
    inputs = " and ".join(str(tuple(value.shape[1:])) for value in quantized.example)
    for preprocessing, source in found:
        prepared = str((3, *preprocessing.size))
        if inputs != prepared:
            raise DataError(
                f"{file} takes inputs of {inputs}, images are prepared to {prepared} for {source}: "
                "give the model that it was made of as --model, or quantize it again"
            )
    return found[0][0]


def sample_for(
    file: Path, quantized: QuantizedModel, data: Path | None, count: int, seed: int, jobs: int
) -> Tensor | None:
    """Images to run an artifact on: those of a folder, or the bundled ones for the bundled model, or None."""
    if data is not None:
        found = find_calibration(str(file), data, count)
        assert isinstance(found, ImageSet)
        return found.sample(count, seed).load(find_preprocessing(file, quantized, None), jobs=jobs)
    stored = quantized.provenance.get("preprocessing")
    if stored is None or find_preprocessing(file, quantized, None) != zoo.DEMO_PREPROCESSING:
        return None
    bundled = find_calibration("demo", None, count)
    assert isinstance(bundled, Tensor)
    return bundled[draw_indices(len(bundled), count, seed)]


def compiled(file: Path, quantized: QuantizedModel, executor: str, threads: int = 1) -> Compiled:
    """The model that runs in integers. threads: for the executor "native". Errors name the file."""
    with naming_file(file):
        return quantized.compile(executor, **({"threads": threads} if executor == "native" else {}))


@contextmanager
def naming_file(file: Path, what: str = "does not run in integers") -> Iterator[None]:
    """Let errors inside the block say which file they are about. what: what does not work with it."""
    try:
        yield
    except AdalogError as cause:
        raise type(cause)(f"{file} {what}: {cause}") from cause
