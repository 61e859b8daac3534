"""Load a real classifier and real labelled images from folders that are not part of the project.

Such a folder may have fewer images than a stage fits.
"""

from pathlib import Path

from safetensors.torch import load_file

from adalog.config import Config
from adalog.errors import DataError
from adalog.inputs.images import ImageSet, Preprocessing, find_images
from adalog.inputs.zoo import LoadedModel

PREPROCESSING = Preprocessing(size=(224, 224), resize=256)


def names_folder(name: str) -> bool:
    """Return True if a name is of the form NAME:FOLDER, and the folder exists."""
    kind, _, folder = name.partition(":")
    return bool(folder) and kind != "hf" and Path(folder).is_dir()


def load_classifier(name: str) -> LoadedModel:
    """Load the classifier NAME:FOLDER: NAME*.safetensors in the folder has its weights.

    The file has the name of the timm architecture, which becomes the name of the model. Raises DataError if the folder
    has no such file, or several.
    """
    import timm

    short, _, folder = name.partition(":")
    files = sorted(Path(folder).glob(f"{short}*.safetensors"))
    if len(files) != 1:
        raise DataError(f"{folder} has {len(files)} files {short}*.safetensors: give a folder with one")
    network = timm.create_model(files[0].stem)
    network.load_state_dict(load_file(files[0]))
    return LoadedModel(network.eval(), PREPROCESSING, f"timm:{files[0].stem}")


def has_queries(folder: Path) -> bool:
    """Return True if a folder has its images in `support` and `query`."""
    return all((folder / name).is_dir() for name in ("support", "query"))


def find_support(folder: Path) -> tuple[ImageSet, list[bool]]:
    """Return the images in the folders `support` and `query`, and for each image whether it is in `support`."""
    images = find_images(folder)
    return images, [isinstance(path, Path) and path.parent.name == "support" for path in images.paths]


def fit_at_most(config: Config, images: int) -> Config:
    """Return a configuration whose stages fit at most this many images."""
    return config.with_fitted_images(images) if config.images_fitted > images else config
