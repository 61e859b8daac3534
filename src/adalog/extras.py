"""Packages that only some parts need, and that come with an extra of this one."""

import importlib
from types import ModuleType

from adalog.errors import DataError, one_line


def extra_module(name: str, extra: str) -> ModuleType:
    """A module of an optional package. extra: the extra that brings the package.

    Raises DataError that says what to install where the package is missing, or does not load.
    """
    package = name.partition(".")[0]
    install = f"pip install 'adalog[{extra}]'"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as cause:
        if (cause.name or "").partition(".")[0] == package:
            raise DataError(f"{package} is not installed: {install}") from cause
        raise DataError(f"{package} cannot be imported: {one_line(cause)}; {install}") from cause
    except Exception as cause:  # such as a torchvision that was built for another torch
        raise DataError(f"{package} cannot be imported: {one_line(cause)}; install it again: {install}") from cause
