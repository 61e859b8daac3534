"""Write files and folders atomically: to a temporary name in the same folder, then by a rename."""

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from adalog.errors import DataError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically: either all of it or nothing.

    A link stays a link, and its target is written. A file that is replaced keeps its mode.
    Raises DataError if the path cannot be written, and OSError if the disk is full or fails.
    """
    with _replacing(path) as (temporary, target):
        with temporary.open("xb") as file:
            file.write(content)
        if target.exists():
            temporary.chmod(stat.S_IMODE(target.stat().st_mode))
        temporary.replace(target)


def write_folder(path: Path, contents: Mapping[str, bytes]) -> None:
    """Write a folder of files atomically: either all of them or nothing. A name may have folders, as in "a/b.npy".

    Raises what `write_whole` raises, and DataError if the path exists already.
    """
    check_folder(path)
    with _replacing(path) as (temporary, target):
        temporary.mkdir()
        for name, content in contents.items():
            if ".." in Path(name).parts or Path(name).is_absolute():  # names may come from a hostile file
                raise DataError(
                    f"{path} cannot hold the file {name!r}, which lies outside of it: rename what it describes"
                )
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            (temporary / name).write_bytes(content)
        temporary.rename(target)


@contextmanager
def _replacing(path: Path) -> Iterator[tuple[Path, Path]]:
    """Yield a temporary path and the one that it shall replace; remove what is at the former if an error is raised."""
    with writing(path):
        _check_target(path)
        target = Path(os.path.realpath(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".adalog.{secrets.token_hex(8)}")
        try:
            yield temporary, target
        except BaseException:
            if temporary.is_dir():
                shutil.rmtree(temporary, ignore_errors=True)
            else:
                temporary.unlink(missing_ok=True)
            raise


def check_folder(path: Path) -> None:
    """Raise DataError if `write_folder` would certainly fail at this path."""
    with writing(path):
        if path.exists() or path.is_symlink():
            raise DataError(f"{path} exists already: name a new folder, or remove it")
    check_writable(path)


def check_writable(path: Path) -> None:
    """Raise DataError if `write_whole` would certainly fail at this path."""
    with writing(path):
        _check_target(path)
        folder = next(parent for parent in Path(os.path.realpath(path)).parents if parent.exists())
        if not folder.is_dir():
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not os.access(folder, os.W_OK | os.X_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))


def _check_target(path: Path) -> None:
    """Raise OSError if the path exists and is not a file that may be replaced."""
    if not path.exists():
        return
    if path.is_dir():
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not path.is_file():
        raise OSError(errno.EINVAL, "Not a regular file")
    if not path.stat().st_mode & 0o222:  # refused even for the superuser, who could write it
        raise OSError(errno.EACCES, "Write-protected")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Convert an OSError into one that names the path if the disk is full, and otherwise into a DataError."""
    try:
        yield
    except OSError as cause:
        refusal = f"{path} cannot be written: {cause.strerror}; "
        if cause.errno in _FULL:
            raise OSError(cause.errno, f"{refusal}free some space, or choose another folder") from cause
        raise DataError(f"{refusal}choose a file in a folder that you may write to") from cause
