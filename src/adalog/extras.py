"""Import optional packages, which the extras of adalog install."""

import importlib
from types import ModuleType

from adalog.errors import DataError, one_line


def extra_module(name: str, extra: str) -> ModuleType:
    """Import a module of an optional package that the extra `extra` installs.

    Raises DataError, which says what to install, if the package is missing or cannot be imported.
    """
    package = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except Exception as cause:  # for example if torchvision was built for another version of torch
        missing = isinstance(cause, ModuleNotFoundError) and (cause.name or "").partition(".")[0] == package
        what = "is not installed" if missing else f"cannot be imported: {one_line(cause)}; install it again"
        raise DataError(f"{package} {what}: pip install 'adalog[{extra}]'") from cause
