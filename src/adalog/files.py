"""Files and folders that are written whole or not at all: a temporary one beside the target, then a rename."""

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path

from adalog.errors import DataError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file whole or not at all: a temporary one beside it, then a rename.

    A link stays a link, and its target is written; a file that was there keeps its mode.
    Raises DataError for a path that cannot be written, and OSError where the disk is full or fails.
    """
    try:
        _check_target(path)
        target = Path(os.path.realpath(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".adalog.{secrets.token_hex(8)}")
        handle = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_BINARY", 0), 0o666)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            if target.exists():
                temporary.chmod(stat.S_IMODE(target.stat().st_mode))
            temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as cause:
        raise write_error(path, cause) from cause


def write_folder(path: Path, contents: Mapping[str, bytes]) -> None:
    """Write a folder of files whole or not at all: a temporary one beside it, then a rename.

    Raises as `write_whole` does, and DataError where something is at the path already.
    """
    check_folder(path)
    try:
        target = Path(os.path.realpath(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".adalog.{secrets.token_hex(8)}")
        temporary.mkdir()
        try:
            for name, content in contents.items():
                (temporary / name).write_bytes(content)
            temporary.rename(target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    except OSError as cause:
        raise write_error(path, cause) from cause


def check_folder(path: Path) -> None:
    """Raise the DataError of `write_folder`, if it can be foreseen before there is anything to write."""
    try:
        there = path.exists() or path.is_symlink()
    except OSError as cause:
        raise write_error(path, cause) from cause
    if there:
        raise DataError(f"{path} is there already: name a folder to make, or remove it")
    check_writable(path)


def check_writable(path: Path) -> None:
    """Raise the DataError of `write_whole`, if it can be foreseen before there is anything to write."""
    try:
        _check_target(path)
        folder = next(parent for parent in Path(os.path.realpath(path)).parents if parent.exists())
        if not folder.is_dir():
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not os.access(folder, os.W_OK | os.X_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as cause:
        raise write_error(path, cause) from cause


def _check_target(path: Path) -> None:
    """Raise OSError where there is already something that is not a file which may be replaced."""
    if not path.exists():
        return
    if path.is_dir():
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not path.is_file():
        raise OSError(errno.EINVAL, "Not a regular file")
    if not path.stat().st_mode & 0o222:  # said even to the superuser, who could write it
        raise OSError(errno.EACCES, "Write-protected")


def write_error(path: Path, cause: OSError) -> Exception:
    """The error to raise where a file cannot be written: an OSError if the disk is full or fails, else a DataError."""
    if cause.errno in _FULL:
        told = f"{path} cannot be written: {cause.strerror}; free some space, or choose another folder"
        return OSError(cause.errno, told)
    return DataError(f"{path} cannot be written: {cause.strerror}; choose a file in a folder that you may write to")
