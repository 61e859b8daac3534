"""The exceptions that adalog raises. Each message names what is wrong, its value, and the way out."""

from collections.abc import Iterator
from contextlib import contextmanager


class AdalogError(Exception):
    """Base class of all errors of adalog. Raised itself if a step fails that has no subclass of its own."""


class CaptureError(AdalogError):
    """Raised if a model cannot be turned into a program."""


class CalibrationError(AdalogError):
    """Raised if the calibration images, or values inside the model, cannot calibrate it."""


class ProgramError(AdalogError):
    """Raised if an operation of a program fails, or if its values take too much memory."""


class ArtifactError(AdalogError):
    """Raised if a file is not a complete and valid artifact, or if a model cannot be stored in one."""


class DataError(AdalogError):
    """Raised if images or labels cannot be read or do not match the outputs, or if a path cannot be written."""


class RankError(AdalogError):
    """Raised if another process of the same job has failed, cannot be reached, or does different work."""


def printable(text: str) -> str:
    """Return the text on one line, with "?" for characters that do not print and that a terminal may obey."""
    return "".join(character if character.isprintable() else "?" for character in " ".join(text.splitlines()))


def one_line(cause: Exception) -> str:
    """Return the first line of an exception's message: at most 300 characters, with its class unless adalog's own."""
    first = (str(cause).strip().splitlines() or [""])[0]
    text = printable(first if isinstance(cause, AdalogError) else f"{type(cause).__name__}: {first}".removesuffix(": "))
    return text if len(text) <= 300 else f"{text[:297]}..."


@contextmanager
def converting(kind: type[AdalogError], before: str, after: str = "") -> Iterator[None]:
    """Convert exceptions that are not adalog's own. before, after: the message around the exception's first line."""
    try:
        yield
    except AdalogError:
        raise
    except Exception as cause:
        raise kind(f"{before}{one_line(cause)}{after}") from cause
