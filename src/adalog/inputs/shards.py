"""Tar files of images, as WebDataset names their members: KEY.jpg, with the label as text in KEY.cls.

Nothing is unpacked: an image is the bytes between two places of its tar file, so that any of them can be read at any
time, in the order of the files one after another.
"""

import tarfile
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from adalog.errors import DataError

SUFFIX = ".tar"
_MOST_BYTES = 2**28  # of one image
_MOST_DIGITS = 20  # bytes of a .cls


@dataclass(frozen=True)
class Member:
    """An image in a tar file: `size` bytes from `start` on."""

    archive: Path
    member: str
    start: int
    size: int

    def __str__(self) -> str:
        return f"{self.archive}:{self.member}"

    @property
    def name(self) -> str:
        """The last part of its name."""
        return PurePosixPath(self.member).name

    @property
    def parts(self) -> tuple[str, ...]:
        """As of a path: the name of the tar file, and that within it."""
        return self.archive.name, self.member

    def read(self) -> bytes:
        """Its bytes. Raises OSError."""
        with self.archive.open("rb") as file:
            file.seek(self.start)
            return file.read(self.size)


def read_shards(paths: Sequence[Path], suffixes: Collection[str]) -> tuple[list[Member], list[int] | None]:
    """The images in tar files, in their order, and their labels, or None where there are none.

    suffixes: of images, with a dot. Links, folders, devices and hidden members are passed over. Raises DataError for
    files that are compressed, damaged or cut off, and for labels that are no class indices or that only some images
    have.
    """
    images, labels = list[Member](), list[int | None]()
    for path in paths:
        found, classes = _read_shard(path, suffixes)
        keys = [_key(member.member) for member in found]
        counts = Counter(keys)
        twice = next((key for key in classes if counts[key] > 1), None)
        if twice is not None:
            raise DataError(f"{path} has several images {twice}.*, and one label {twice}.cls: give each its own")
        images += found
        labels += [classes.get(key) for key in keys]
    known = [label for label in labels if label is not None]
    if known and len(known) < len(labels):
        odd = images[labels.index(None)]
        raise DataError(f"{odd} has no label, others have one: add {_key(odd.member)}.cls, or leave the image out")
    return images, known or None


def _read_shard(path: Path, suffixes: Collection[str]) -> tuple[list[Member], dict[str, int]]:
    images, classes, seen = list[Member](), dict[str, int](), set[str]()
    try:
        size = path.stat().st_size
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                if member.size < 0:  # tarfile would read the same header for ever
                    raise DataError(f"{path} is damaged in {member.name!r}: fetch it again")
                name, plain = PurePosixPath(member.name), member.isreg() and not member.issparse()
                suffix = name.suffix.lower()
                hidden = any(part.startswith(".") and part != ".." for part in name.parts)
                if not plain or hidden or suffix not in (*suffixes, ".cls"):
                    continue
                if member.size > (_MOST_DIGITS if suffix == ".cls" else _MOST_BYTES):
                    raise DataError(f"{path}:{member.name} has {member.size:,} bytes: leave it out")
                if member.offset_data + member.size > size:
                    raise DataError(f"{path} is cut off in {member.name}: fetch it again")
                if name.as_posix() in seen:
                    raise DataError(f"{path} has {member.name} twice: keep one of them")
                seen.add(name.as_posix())
                if suffix == ".cls":
                    content = archive.extractfile(member)
                    classes[_key(member.name)] = _label(path, member.name, b"" if content is None else content.read())
                else:
                    images.append(Member(path, member.name, member.offset_data, member.size))
            end = archive.offset
        with path.open("rb") as file:  # tarfile takes a damaged header for the end
            file.seek(end)
            if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise DataError(f"{path} is damaged or cut off at byte {end:,}: fetch it again")
    except (tarfile.TarError, OSError, EOFError, ValueError, ArithmeticError, RecursionError, MemoryError) as cause:
        reason = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
        raise DataError(f"{path} cannot be read as a tar file: {reason}; it has to be whole, uncompressed") from cause
    return images, classes


def _key(name: str) -> str:
    """What images and their labels have in common: the name up to the first dot of its last part."""
    path = PurePosixPath(name)
    return (path.parent / path.name.partition(".")[0]).as_posix()


def _label(path: Path, name: str, content: bytes) -> int:
    text = content.decode("ascii", "replace").strip()
    if not (text.isdecimal() and text.isascii() and len(text) < 10):
        raise DataError(f"{path}:{name}: label {text!r} is not a class index: give a whole number, from 0")
    return int(text)
