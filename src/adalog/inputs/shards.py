"""Read images from tar files whose members are named as in WebDataset: KEY.jpg, with the label as text in KEY.cls.

Nothing is unpacked. An image is a range of bytes of its tar file, so any image can be read at any time.
"""

import tarfile
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from adalog.errors import DataError

SUFFIX = ".tar"
_MOST_BYTES = 2**28  # largest size of an image
_MOST_DIGITS = 20  # largest size of a .cls file [bytes]


@dataclass(frozen=True)
class Member:
    """An image in a tar file: `size` bytes from the byte `start` on."""

    archive: Path
    member: str
    start: int
    size: int

    def __str__(self) -> str:
        return f"{self.archive}:{self.member}"

    @property
    def name(self) -> str:
        return PurePosixPath(self.member).name

    @property
    def parts(self) -> tuple[str, ...]:
        """Name of the tar file and of the member, to sort by like the parts of a path."""
        return self.archive.name, self.member

    def read(self) -> bytes:
        with self.archive.open("rb") as file:
            file.seek(self.start)
            return file.read(self.size)


def read_shards(paths: Sequence[Path], suffixes: Collection[str]) -> tuple[list[Member], list[int] | None]:
    """Return the images in tar files, in their order, and their labels, or None if there are no labels.

    suffixes: suffixes of images, with a dot. Links, folders, devices and hidden members are skipped. Raises DataError
    for tar files that are compressed, damaged or truncated, for labels that are not class indices, and if only some
    images have labels.
    """
    images, labels = list[Member](), list[int | None]()
    for path in paths:
        members, classes = _read_shard(path, suffixes)
        keys = [_key(member.member) for member in members]
        counts = Counter(keys)
        name = next((key for key in classes if counts[key] > 1), None)
        if name is not None:
            raise DataError(f"{path} has several images {name}.*, but one label {name}.cls: give each image its own")
        images += members
        labels += [classes.get(key) for key in keys]
    present = [label for label in labels if label is not None]
    if present and len(present) < len(labels):
        image = images[labels.index(None)]
        raise DataError(
            f"{image} has no label, but others have one: add {_key(image.member)}.cls, or leave the image out"
        )
    return images, present or None


def _read_shard(path: Path, suffixes: Collection[str]) -> tuple[list[Member], dict[str, int]]:
    images, classes, names = list[Member](), dict[str, int](), set[str]()
    try:
        size = path.stat().st_size
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                if member.size < 0:  # tarfile would read the same header forever
                    raise DataError(f"{path} is damaged in {member.name!r}: download it again")
                name, plain = PurePosixPath(member.name), member.isreg() and not member.issparse()
                suffix = name.suffix.lower()
                hidden = any(part.startswith(".") and part != ".." for part in name.parts)
                if not plain or hidden or suffix not in (*suffixes, ".cls"):
                    continue
                if member.size > (_MOST_DIGITS if suffix == ".cls" else _MOST_BYTES):
                    raise DataError(f"{path}:{member.name} is too large, with {member.size:,} bytes: leave it out")
                if member.offset_data + member.size > size:
                    raise DataError(f"{path} is truncated in {member.name}: download it again")
                if name.as_posix() in names:
                    raise DataError(f"{path} has {member.name} twice: keep one of them")
                names.add(name.as_posix())
                if suffix == ".cls":
                    content = archive.extractfile(member)
                    classes[_key(member.name)] = _label(path, member.name, b"" if content is None else content.read())
                else:
                    images.append(Member(path, member.name, member.offset_data, member.size))
            end = archive.offset
        with path.open("rb") as file:  # tarfile takes a damaged header for the end of the file
            file.seek(end)
            if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise DataError(f"{path} is damaged or truncated at byte {end:,}: download it again")
    except (tarfile.TarError, OSError, EOFError, ValueError, ArithmeticError, RecursionError, MemoryError) as cause:
        reason = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
        raise DataError(f"{path} cannot be read as a tar file: {reason}; give a complete, uncompressed file") from cause
    return images, classes


def _key(name: str) -> str:
    """Return the key that an image and its label share: the path up to the first dot of the file name."""
    path = PurePosixPath(name)
    return (path.parent / path.name.partition(".")[0]).as_posix()


def _label(path: Path, name: str, content: bytes) -> int:
    text = content.decode("ascii", "replace").strip()
    if not (text.isdecimal() and text.isascii() and len(text) < 10):
        raise DataError(f"{path}:{name}: label {text!r} is not a class index: give a whole number, from 0")
    return int(text)
