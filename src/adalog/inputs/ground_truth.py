"""Read the labels of ImageNet's validation images, which lie flat in one folder, from its development kit.

The images are named ILSVRC2012_val_00000001.JPEG and so on. The ground truth file of the kit has one ILSVRC number (1
to 1000) per line, in the order of the images. Another file maps these numbers to synsets: meta.mat (2012), or
map_clsloc.txt (later kits), whose lines are SYNSET NUMBER NAME. The class of a synset is its rank among all synsets,
sorted. Caffe's val.txt has lines FILE CLASS instead. `find_labels` looks for these files in the folder of the images,
in the folder above it, and in the kit's folders if they are unpacked in either.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from adalog.errors import DataError

_IMAGE = re.compile(r"ILSVRC2012_val_([0-9]{8})\.[A-Za-z]+")
_KITS = ("", "data", "devkit/data", "ILSVRC2012_devkit_t12/data", "ILSVRC/devkit/data")
_TRUTH = re.compile(r"ILSVRC20[0-9]{2}(_clsloc)?_validation_ground_truth\.txt")
_CLASSES = 1000
_MOST_BYTES = 2**24


def find_labels(folder: Path, names: Sequence[str]) -> tuple[int, ...] | None:
    """Return the labels of images with these names, or None if they are not ImageNet's or have no label files.

    Raises DataError for label files with other content, and OSError if they cannot be read.
    """
    numbers = [int(match[1]) if (match := _IMAGE.fullmatch(name)) else 0 for name in names]
    if not names or 0 in numbers:
        return None
    for place in (root / kit for root in (folder, folder.resolve().parent) for kit in _KITS):
        if (place / "val.txt").is_file():
            return _labels_by_name(place / "val.txt", names)
        for truth in sorted(place.glob("ILSVRC20*ground_truth.txt")) if place.is_dir() else ():
            if _TRUTH.fullmatch(truth.name):
                return _labels_by_number(truth, numbers)
    return None


def _lines(path: Path) -> list[tuple[int, list[str]]]:
    """Return the number, from 1, and the words of each line that is not empty."""
    if path.stat().st_size > _MOST_BYTES:
        raise DataError(f"{path} is too large for the labels of ImageNet: remove it")
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return [(number, line.split()) for number, line in enumerate(lines, 1) if line.strip()]


def _number(word: str, most: int) -> int | None:
    return int(word) if word.isascii() and word.isdecimal() and len(word) < 6 and int(word) <= most else None


def _labels_by_name(path: Path, names: Sequence[str]) -> tuple[int, ...]:
    """Return the labels of images with these names from a file with lines FILE CLASS."""
    labels: dict[str, int] = {}
    for number, words in _lines(path):
        label = _number(words[-1], _CLASSES - 1)
        if len(words) != 2 or label is None:
            raise DataError(
                f"{path}, line {number} is not FILE CLASS, with a class from 0 to {_CLASSES - 1}: correct it"
            )
        labels[Path(words[0]).name] = label
    missing = [name for name in names if name not in labels]
    if missing:
        raise DataError(f"{path} has no class for {missing[0]}: add a line for this image, or remove the file")
    return tuple(labels[name] for name in names)


def _labels_by_number(path: Path, numbers: Sequence[int]) -> tuple[int, ...]:
    """Return the labels of images with these numbers, from 1; line N of the file has the ILSVRC number of image N."""
    classes = _classes(path)
    lines = _lines(path)
    numbers_in_file = [_number(words[0], _CLASSES) if len(words) == 1 else None for _, words in lines]
    for number in numbers:
        if number > len(numbers_in_file) or numbers_in_file[number - 1] not in classes:
            line = lines[number - 1][0] if number <= len(lines) else len(lines) + 1
            raise DataError(f"{path} has no ILSVRC number from 1 to {_CLASSES} in line {line}: download it again")
    return tuple(classes[numbers_in_file[number - 1] or 0] for number in numbers)


def _classes(truth: Path) -> dict[int, int]:
    """Return the class of each ILSVRC number: the rank of its synset."""
    text, binary = truth.with_name("map_clsloc.txt"), truth.with_name("meta.mat")
    if text.is_file():
        lines = [words for _, words in _lines(text) if len(words) >= 2]
        synsets = {number: words[0] for words in lines if (number := _number(words[1], _CLASSES))}
        source = text
    elif binary.is_file():
        synsets, source = _of_matlab(binary), binary
    else:
        raise DataError(f"{truth} has ILSVRC numbers, not classes: put the kit's meta.mat or map_clsloc.txt next to it")
    if len(synsets) != _CLASSES or len(set(synsets.values())) != _CLASSES:
        raise DataError(f"{source} has {len(synsets)} numbered synsets, but ImageNet has {_CLASSES}: download it again")
    ranks = {synset: rank for rank, synset in enumerate(sorted(synsets.values()))}
    return {number: ranks[synset] for number, synset in synsets.items()}


def _of_matlab(path: Path) -> dict[int, str]:
    """Return the synset of each ILSVRC number in meta.mat. Only synsets without children are classes."""
    try:
        from scipy.io import loadmat
    except ImportError as cause:
        raise DataError(f"reading {path} needs SciPy: pip install 'adalog[imagenet]'") from cause
    try:
        rows = loadmat(path, squeeze_me=True)["synsets"]
        return {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in rows if int(row["num_children"]) == 0}
    except Exception as cause:  # SciPy raises all kinds of errors on damaged files
        raise DataError(f"{path} is not the meta.mat of ImageNet's kit ({cause}): download it again") from cause
