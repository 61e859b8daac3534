"""Packages that only some parts need, and that come with an extra of this one."""

import importlib
from types import ModuleType

from adalog.errors import DataError, one_line


def extra_module(name: str, extra: str) -> ModuleType:
    """A module of an optional package. extra: the extra that brings the package.

    Raises DataError that says what to install where the package is missing, or does not load.
    """
    package = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except Exception as cause:  # such as a torchvision that was built for another torch
        missing = isinstance(cause, ModuleNotFoundError) and (cause.name or "").partition(".")[0] == package
        what = "is not installed" if missing else f"cannot be imported: {one_line(cause)}; install it again"
        raise DataError(f"{package} {what}: pip install 'adalog[{extra}]'") from cause
