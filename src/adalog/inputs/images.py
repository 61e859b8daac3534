"""Find images and their labels in folders, read image files, prepare them for a model, and sample them."""

import csv
import dataclasses
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, BinaryIO, Literal, TextIO, get_args

import numpy as np
import torch
from PIL import ExifTags, Image, UnidentifiedImageError
from torch import Tensor

from adalog.errors import DataError
from adalog.inputs.ground_truth import find_labels
from adalog.inputs.shards import SUFFIX, Member, read_shards

SUFFIXES = (
    *(".avif", ".bmp", ".gif", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpg", ".pbm"),
    *(".pgm", ".png", ".pnm", ".ppm", ".tga", ".tif", ".tiff", ".webp"),
)
Interpolation = Literal["bilinear", "bicubic", "lanczos", "nearest"]
Fit = Literal["stretch", "cover", "contain"]
Position = Literal["center", "center-floor", "top-left"]
Channels = Literal["rgb", "bgr"]
# The words that each of these fields of a preprocessing allows.
_LITERALS = {"interpolation": Interpolation, "fit": Fit, "position": Position, "channels": Channels}
WORDS: dict[str, tuple[str, ...]] = {name: get_args(words) for name, words in _LITERALS.items()}
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
# A resized image has at most this many pixels. Otherwise an image with a single row of pixels could fill the memory.
_MOST_RESIZED = 2**27
_TURNS = {  # the operation that undoes each EXIF orientation
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def draw_indices(total: int, count: int, seed: int) -> Tensor:
    """Sample `count` of the numbers below `total` without replacement, from a separate generator: int64, (count,)."""
    if not 0 <= count <= total:
        raise ValueError(f"count = {count} is not a whole number from 0 to {total}, the number of items to sample from")
    return torch.randperm(total, generator=torch.Generator().manual_seed(seed))[:count]


# --- one image -------------------------------------------------------------------------------------------------------


def read_image(path: str | Path | Member) -> Image.Image:
    """Read an image file as upright RGB with 8 bits per channel.

    The EXIF orientation is applied, transparent pixels become white, and CMYK is converted without its profile. Grey
    images with 16 bits keep the upper 8 bits, as Pillow does for colour images. For an animation, the first image is
    returned. Raises DataError for a file that is not an image, is damaged, has more pixels than
    PIL.Image.MAX_IMAGE_PIXELS, or contains numbers with an unknown range (float, 32 bits).
    """
    try:
        with _open(path) as file, Image.open(file) as image:
            # Up to twice its limit, Pillow itself only warns.
            if Image.MAX_IMAGE_PIXELS is not None and image.width * image.height > Image.MAX_IMAGE_PIXELS:
                raise Image.DecompressionBombError
            image.load()
            turn = _TURNS.get(_orientation(image))
            upright = image if turn is None else image.transpose(turn)
            return _to_rgb(upright, image.format)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as cause:
        raise DataError(
            f"{path} has more pixels than PIL.Image.MAX_IMAGE_PIXELS = {Image.MAX_IMAGE_PIXELS} allows: "
            "make it smaller, or leave it out"
        ) from cause
    except UnidentifiedImageError as cause:
        raise DataError(
            f"{path} is not an image that Pillow can read: leave it out, or convert it to PNG or JPEG"
        ) from cause
    except Exception as cause:  # Pillow's readers raise all kinds of errors on damaged files
        reason = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
        raise DataError(f"{path} cannot be read as an image: {reason}; replace it, or leave it out") from cause


def _open(path: str | Path | Member) -> BinaryIO:
    """Open an image as a stream. Given a path, Pillow would map the file and scramble TIFFs that need turning."""
    if isinstance(path, Member):
        return BytesIO(path.read())
    if Path(path).exists() and not (Path(path).is_file() or Path(path).is_dir()):
        raise ValueError("not a regular file")  # reading a pipe or a device might never end
    return Path(path).open("rb")


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation of a loaded image, or 1 if there is none or only the EXIF data is damaged."""
    with suppress(Exception):  # as in read_image
        orientation = image.getexif().get(ExifTags.Base.Orientation)
        return orientation if isinstance(orientation, int) else 1
    return 1


def _to_rgb(image: Image.Image, form: str | None) -> Image.Image:
    if image.mode == "I" and form not in ("PNG", "PPM"):  # older releases of Pillow open these with 16 bits as I
        raise ValueError("it contains 32-bit integers with an unknown range: convert it to 8 bits")
    if image.mode.startswith("I"):  # 16 bits, which Pillow would clip to 8 bits
        values = np.asarray(image)
        codes = (values >> 8).astype(np.uint8)
        codes[values == image.info.get("transparency", -1)] = 255
        return Image.fromarray(codes).convert("RGB")
    if image.mode == "F":
        raise ValueError("it contains floating-point numbers with an unknown range: convert it to 8 bits")
    if image.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in image.info:
        if image.mode == "La":  # premultiplied alpha, which Pillow can only convert to LA
            image = image.convert("LA")
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


@dataclass(frozen=True)
class Preprocessing:
    """The preparation of an image for a model: resize, crop or pad, order the channels, rescale and normalise.

    The defaults are those of many ImageNet models.

    Args:
        size: Height and width [pixels] that the model takes.
        resize: Size before the crop [pixels]: an int for the shorter side, which keeps the proportions of the image, or
            a (height, width), which `fit` interprets. It must not be smaller than `size`, unless `fill` is set.
        mean: Mean of each channel, which is subtracted after the pixel values 0-255 are multiplied by `rescale`. The
            first channel is blue if `channels` is "bgr".
        std: Standard deviation of each channel, by which the difference is divided.
        interpolation: "bilinear", "bicubic", "lanczos" or "nearest".
        rescale: Factor for the pixel values 0-255.
        fit: How an image is resized to a (height, width): "stretch" gives it exactly this size. The others keep its
            proportions: "cover" makes it as small as possible without falling below either side, and "contain" as
            large as possible without exceeding either side.
        position: Where the crop or the image on its padding lies: "center" rounds half a pixel to the nearest even
            number, as torchvision does; "center-floor" rounds it down, as transformers does; or "top-left".
        fill: Red, green and blue [0-255] of the padding of images that are smaller than `size`, or None if images are
            never padded.
        channels: "rgb", or "bgr" for models that take blue first.

    Raises:
        ValueError: If a field has an invalid value.

    Examples:
        >>> from PIL import Image
        >>> prepare = adalog.Preprocessing(size=(224, 224), resize=256)
        >>> prepare(Image.open("image.jpg").convert("RGB")).shape
        torch.Size([3, 224, 224])
    """

    size: tuple[int, int] = (224, 224)
    resize: int | tuple[int, int] = 256
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD
    interpolation: Interpolation = "bicubic"
    rescale: float = 1 / 255
    fit: Fit = "stretch"
    position: Position = "center"
    fill: tuple[float, float, float] | None = None
    channels: Channels = "rgb"

    def __post_init__(self) -> None:
        for name in ("size", "resize", "mean", "std", "fill"):
            if isinstance(value := getattr(self, name), list):
                object.__setattr__(self, name, tuple(value))
        if not isinstance(self.size, tuple) or len(self.size) != 2 or min(self.size) < 1:
            raise ValueError(f"size = {self.size} is not (height, width) in pixels")
        sides = (self.resize, self.resize) if isinstance(self.resize, int) else self.resize
        if len(sides) != 2 or min(sides) < 1:
            raise ValueError(f"resize = {self.resize} is neither the shorter side nor (height, width) in pixels")
        if self.fill is None and any(side < crop for side, crop in zip(sides, self.size, strict=True)):
            raise ValueError(
                f"resize = {self.resize} is smaller than the crop size = {self.size}: give at least {max(self.size)}, "
                f"or {self.size} for no crop, or set fill to pad images"
            )
        for name, words in WORDS.items():
            if getattr(self, name) not in words:
                raise ValueError(f"{name} = {getattr(self, name)!r} is not one of {', '.join(words)}")
        if self.fit != "stretch" and isinstance(self.resize, int):
            raise ValueError(f"fit = {self.fit!r} needs resize = (height, width), got resize = {self.resize}")
        if self.fit == "contain" and self.fill is None:
            raise ValueError("fit = 'contain' makes images smaller than resize: set fill, the colour of the padding")
        if self.fill is not None and len(self.fill) != 3:
            raise ValueError(f"fill = {self.fill} is not three numbers, for red, green and blue")
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise ValueError(f"mean = {self.mean} and std = {self.std} are not three numbers each, with a positive std")
        if max(map(abs, self.mean)) > 255 * self.rescale:
            raise ValueError(
                f"mean = {self.mean} is beyond 255 * rescale = {255 * self.rescale:g}: give mean and std of the pixel "
                "values times rescale, or set rescale = 1"
            )

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a dictionary; fields that the first version lacked are left out at their defaults.

        Returns:
            The fields by name, for `QuantizedModel.note(preprocessing=...)` and for JSON. `from_json` reads them.
        """
        fields = dataclasses.asdict(self)
        return {name: value for name, value in fields.items() if name not in _LATER or value != _LATER[name]}

    @staticmethod
    def from_json(fields: Any) -> "Preprocessing":
        """Return the preprocessing that a dictionary describes: the inverse of `to_json` and `dataclasses.asdict`.

        Args:
            fields: The fields by name. Lists, as JSON has them, are read as tuples.

        Returns:
            The preprocessing.

        Raises:
            ValueError: If a field is missing, unknown or invalid.
        """
        names = {field.name for field in dataclasses.fields(Preprocessing)}
        if not isinstance(fields, dict) or not names - _LATER.keys() <= fields.keys() <= names:
            raise ValueError(
                f"a preprocessing has the fields {', '.join(sorted(names - _LATER.keys()))}, and may have "
                f"{', '.join(sorted(_LATER))}"
            )
        for name, value in fields.items():
            if name in WORDS or (name == "fill" and value is None):
                continue
            single = name == "rescale" or (name == "resize" and not isinstance(value, (tuple, list)))
            numbers = (value,) if single else value
            kinds = (int,) if name in ("size", "resize") else (int, float)
            good = isinstance(numbers, (tuple, list)) and all(type(number) in kinds for number in numbers)
            if not good or not all(map(math.isfinite, numbers)):
                raise ValueError(f"{name} = {value!r} is not made of finite numbers")
        return Preprocessing(**fields)

    def __call__(self, image: Image.Image) -> Tensor:
        """Prepare an image.

        Args:
            image: An image of any size. Other modes than RGB are converted as `read_image` converts files.

        Returns:
            The prepared image, float32, (3, H, W).

        Raises:
            DataError: If the image is too long and thin to be resized.
        """
        if image.mode != "RGB":
            image = _to_rgb(image, image.format)
        width, height = self._resized_size(*image.size)
        if width * height > _MOST_RESIZED:
            raise DataError(
                f"an image of {image.width} x {image.height} pixels would become one of {width} x {height}: "
                "crop it, or leave it out"
            )
        image = image.resize((width, height), Image.Resampling[self.interpolation.upper()])
        top, left = self._start(height, self.size[0]), self._start(width, self.size[1])
        inside = (max(left, 0), max(top, 0), min(left + self.size[1], width), min(top + self.size[0], height))
        pixels = torch.from_numpy(np.array(image.crop(inside))).permute(2, 0, 1)
        pixels = pixels.to(torch.float32, memory_format=torch.contiguous_format)
        if pixels.shape[1:] != self.size:
            canvas = torch.tensor(self.fill).view(3, 1, 1).repeat(1, *self.size)
            rows, columns = slice(max(-top, 0), max(-top, 0) + pixels.shape[1]), max(-left, 0)
            canvas[:, rows, columns : columns + pixels.shape[2]] = pixels
            pixels = canvas
        if self.channels == "bgr":
            pixels = pixels.flip(0)
        mean, std = torch.tensor(self.mean).view(3, 1, 1), torch.tensor(self.std).view(3, 1, 1)
        return (pixels * self.rescale - mean) / std

    def _resized_size(self, width: int, height: int) -> tuple[int, int]:
        """Return (width, height) after resizing; the side that `resize` leaves open is rounded down, as in torchvision.

        Both sides are rounded to the nearest for "cover" and "contain", as in timm.
        """
        if not isinstance(self.resize, int):
            if self.fit == "stretch":
                return self.resize[1], self.resize[0]
            ratios = height / self.resize[0], width / self.resize[1]
            ratio = min(ratios) if self.fit == "cover" else max(ratios)
            return max(round(width / ratio), 1), max(round(height / ratio), 1)
        longer = int(self.resize * max(width, height) / min(width, height))
        return (self.resize, longer) if width <= height else (longer, self.resize)

    def _start(self, resized: int, size: int) -> int:
        """Return where a side of the crop begins in the resized image; negative by the padding before the image."""
        if self.position == "top-left":
            return 0
        if resized < size:
            return -((size - resized) // 2)
        return (resized - size) // 2 if self.position == "center-floor" else round((resized - size) / 2)


# The fields that the first version lacked, with their defaults.
_LATER: dict[str, Any] = {name: getattr(Preprocessing, name) for name in ("fit", "position", "fill", "channels")}


# --- many images -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ImageSet:
    """Images in files or tar files, in the same order on every machine, with their labels if these are known.

    classes: class names by label if each class is a folder, otherwise None.
    """

    paths: tuple[Path | Member, ...]
    labels: tuple[int, ...] | None = None
    classes: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.labels is not None and len(self.labels) != len(self.paths):
            raise ValueError(
                f"{len(self.paths)} paths have {len(self.labels)} labels: give one label per path, or None"
            )

    def __len__(self) -> int:
        return len(self.paths)

    def select(self, indices: Iterable[int]) -> "ImageSet":
        numbers = list(indices)
        labels = None if self.labels is None else tuple(self.labels[index] for index in numbers)
        return ImageSet(tuple(self.paths[index] for index in numbers), labels, self.classes)

    def sample(self, count: int, seed: int) -> "ImageSet":
        """Return a random sample of `count` images without replacement. Raises DataError if there are fewer images."""
        if count > len(self):
            raise DataError(
                f"{count} images are needed, but there are only {len(self)}: give more images, or ask for fewer"
            )
        return self.select(draw_indices(len(self), count, seed).tolist())

    def load(self, preprocessing: Preprocessing, *, jobs: int = 1) -> Tensor:
        """Read all images in `jobs` threads: float32, (N, 3, H, W). Raises DataError."""
        images = torch.empty(len(self), 3, *preprocessing.size)

        def read(index: int) -> None:
            image = read_image(self.paths[index])
            try:
                images[index] = preprocessing(image)
            except DataError as cause:
                raise DataError(f"{self.paths[index]}: {cause}") from cause

        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(read, range(len(self))))
        return images


def find_images(folder: str | Path) -> ImageSet:
    """Find the images in a folder by their suffix, with their labels; hidden files and other files are skipped.

    The folder may have one of these layouts:

    - A CSV file with the columns `file` (relative to the folder, with forward slashes) and `label` lists the images.
    - Each subfolder is a class, as in ImageNet. Its label is its rank among the sorted names.
    - The images lie in the folder itself. They have no labels, except ImageNet's validation images (`ground_truth`).
    - The images are in tar files in the folder, or `folder` is itself a tar file (`shards`).

    Images are sorted by folder and name; images in a tar file keep its order. Raises DataError for another layout, for
    a folder without images, and for a wrong CSV file.
    """
    folder = Path(folder)
    try:
        return _find_images(folder)
    except OSError as cause:
        raise DataError(f"{cause.filename or folder} cannot be read: {cause.strerror}; check the path") from cause


def _find_images(folder: Path) -> ImageSet:
    if folder.suffix.lower() == SUFFIX and folder.is_file():
        return _in_shards(folder.parent, [folder])
    files, folders = _list(folder)
    tables = [name for name in files if Path(name).suffix.lower() == ".csv"]
    if len(tables) > 1:
        raise DataError(f"{folder} has {len(tables)} CSV files, {', '.join(tables)}: keep the one with the labels")
    if tables:
        return _read_table(folder, folder / tables[0])
    flat = _images(files)
    classes = {name: _images(_list(folder / name)[0]) for name in folders}
    empty = [name for name, images in classes.items() if not images]
    if flat and len(empty) == len(classes):
        return ImageSet(tuple(folder / name for name in flat), find_labels(folder, flat))
    shards = [folder / name for name in files if Path(name).suffix.lower() == SUFFIX]
    if shards and len(empty) == len(classes):
        return _in_shards(folder, shards)
    if flat:
        raise DataError(
            f"{folder} has images both in itself and in subfolders: keep only one of the two, or list the images in a "
            "CSV file with the columns file,label"
        )
    if len(empty) == len(classes):
        raise DataError(
            f"{folder} has no images: give a folder of images, one with a subfolder per class, or one with a CSV "
            "file with the columns file,label"
        )
    if empty:  # dropping it may shift the labels of later folders
        raise DataError(f"{folder / empty[0]} has no images, so the classes are unclear: remove it")
    pairs = [(folder / name / image, label) for label, name in enumerate(classes) for image in classes[name]]
    return ImageSet(tuple(path for path, _ in pairs), tuple(label for _, label in pairs), tuple(classes))


def _in_shards(folder: Path, shards: Sequence[Path]) -> ImageSet:
    images, labels = read_shards(shards, SUFFIXES)
    if not images:
        raise DataError(f"{shards[0]} has no images: give tar files with members such as KEY.jpg and KEY.cls")
    if labels is None:
        return ImageSet(tuple(images), find_labels(folder, [image.name for image in images]))
    return ImageSet(tuple(images), tuple(labels))


def _without_detours(path: str | Path) -> Path:
    """Return the absolute path without "..", and without resolving links."""
    return Path(os.path.normpath(Path(path).absolute()))


def find_support(data: str | Path, support: str | Path | None) -> tuple[ImageSet, ImageSet | None]:
    """Return the images of `data` without those of `support`, and the labelled images of `support`.

    support: a folder or tar file inside `data` or elsewhere, or None. Raises DataError as `find_images` does, and if
    either has no images, if `support` has no labels, or if the two have different classes.
    """
    images = find_images(data)
    if support is None:
        return images, None
    support_images, support_path, root = None, _without_detours(support), _without_detours(data)
    end, data_path = Path(support).resolve(), Path(data).resolve()  # either may be reached by a link
    files = (_without_detours(path.archive if isinstance(path, Member) else path) for path in images.paths)
    inside = [file.is_relative_to(support_path) or file.resolve().is_relative_to(end) for file in files]
    if any(inside):
        if support_path.is_relative_to(root) or end.is_relative_to(data_path):
            support_images = images.select(index for index, belongs in enumerate(inside) if belongs)
        images = images.select(index for index, belongs in enumerate(inside) if not belongs)
    support_images = support_images or find_images(support)
    if support_images.labels is None:
        raise DataError(
            f"{support} has no labels: make one subfolder per class, or add a CSV file with the columns file,label"
        )
    if not len(images):
        raise DataError(f"{data} has no images other than those of {support}: add images to evaluate")
    if images.classes is not None and support_images.classes is not None and images.classes != support_images.classes:
        unshared = sorted(set(images.classes) ^ set(support_images.classes))
        raise DataError(
            f"{data} and {support} do not have the same subfolders, one per class: only one of them has "
            f"{', '.join(unshared[:3])}; give both the same classes, or each a CSV file with the columns file,label"
        )
    return images, support_images


def _list(folder: Path) -> tuple[list[str], list[str]]:
    """Return the sorted names of a folder's files and of its subfolders, without hidden ones; follow links.

    A link to the folder itself or to a folder above it is skipped. Raises DataError for a link whose target is missing,
    because a class without its link may shift the labels of later classes, and for two links to one subfolder.
    """
    files, folders, above = list[str](), dict[Path, str](), {folder.resolve(), *folder.resolve().parents}
    with os.scandir(folder) as listing:
        entries = sorted((entry for entry in listing if not entry.name.startswith(".")), key=lambda entry: entry.name)
    for entry in entries:
        target = Path(os.path.realpath(entry)) if entry.is_symlink() else folder.resolve() / entry.name
        if entry.is_symlink() and not target.exists():
            raise DataError(f"{entry.path} is a link to {target}, which does not exist: remove it, or link to a file")
        if not entry.is_dir():
            files.append(entry.name)
        elif target in folders:
            raise DataError(f"{entry.path} and {folder / folders[target]} are the same folder: remove one of them")
        elif target not in above:
            folders[target] = entry.name
    return files, list(folders.values())


def _images(names: Sequence[str]) -> list[str]:
    return [name for name in names if Path(name).suffix.lower() in SUFFIXES]


def _read_table(folder: Path, table: Path) -> ImageSet:
    if not table.is_file():
        raise DataError(f"{table} is not a regular file: remove it")
    try:
        with table.open(encoding="utf-8-sig", newline="") as lines:
            rows = list(_rows(table, lines))
    except (UnicodeDecodeError, csv.Error) as cause:
        raise DataError(f"{table} is not a CSV file in UTF-8: {cause}; save it as UTF-8") from cause
    labels: dict[str, int] = {}
    for line, text, label in rows:
        where = f"{table}, line {line}"
        if not text or PureWindowsPath(text).anchor or ".." in PureWindowsPath(text).parts:
            raise DataError(f"{where}: {text!r} is not a path below {folder}: give paths relative to the folder")
        slashed = text.replace("\\", "/")  # as Windows writes paths
        name = slashed if not (folder / text).is_file() and (folder / slashed).is_file() else text
        if not (folder / name).is_file():
            raise DataError(f"{where}: {folder / name} does not exist: remove the line, or add the file")
        image = PurePosixPath(name).as_posix()
        if image in labels:
            raise DataError(f"{where}: {name} is listed a second time: keep one line")
        if not (label.isascii() and label.isdecimal() and len(label) < 10):
            raise DataError(f"{where}: label {label!r} is not a class index: give a whole number, from 0")
        labels[image] = int(label)
    if not labels:
        raise DataError(f"{table} lists no images: add lines of file,label, or remove it")
    names = sorted(labels, key=lambda name: PurePosixPath(name).parts)
    return ImageSet(tuple(folder / name for name in names), tuple(labels[name] for name in names))


def _rows(table: Path, lines: TextIO) -> Iterator[tuple[int, str, str]]:
    """Yield (number of the line, file, label) for each row of a CSV file, whatever separates its columns.

    Spreadsheets separate columns by semicolons in many countries, or by tabs, and may name the separator in a first
    line such as sep=;. Names of columns may have capitals, and any field may have spaces around it.
    """
    before, header = 0, lines.readline()
    if header.lower().startswith("sep="):
        before, header = 1, lines.readline()
    for separator in ",;\t|":
        fields = next(csv.reader([header], delimiter=separator, skipinitialspace=True), [])
        columns = [name.strip().lower() for name in fields]
        if {"file", "label"} <= set(columns):
            reader = csv.DictReader(lines, columns, delimiter=separator, skipinitialspace=True)
            for row in reader:
                number = before + 1 + reader.line_num
                yield number, (row["file"] or "").strip(), (row["label"] or "").strip()
            return
    raise DataError(
        f"{table} does not begin with the columns file,label, but with {header.strip()[:60]!r}: name the columns file "
        "and label in the first line"
    )
