"""The errors that the package raises. Each message says what is wrong, which value it was, and what to do."""


class AdalogError(Exception):
    """Anything this package refuses to do."""


class CaptureError(AdalogError):
    """A model that cannot be turned into a program."""


class CalibrationError(AdalogError):
    """Images, or values inside the model, that cannot calibrate it."""


class ProgramError(AdalogError):
    """An operation of a program that fails, or values of it that are too large."""


class ArtifactError(AdalogError):
    """A file that is not a whole and valid artifact."""


class DataError(AdalogError):
    """Images or labels that cannot be read, outputs they cannot judge, or a path that cannot be written."""


class RankError(AdalogError):
    """Another process of the same job that has failed, cannot be reached, or does different work."""


def printable(text: str) -> str:
    """The text on one line; what does not print, and a terminal may obey, is a question mark."""
    return "".join(character if character.isprintable() else "?" for character in " ".join(text.splitlines()))


def one_line(cause: Exception) -> str:
    """An exception's message on one line of at most 300 printable characters, with its class if that is not ours."""
    first = (str(cause).strip().splitlines() or [""])[0]
    text = printable(first if isinstance(cause, AdalogError) else f"{type(cause).__name__}: {first}".removesuffix(": "))
    return text if len(text) <= 300 else f"{text[:297]}..."
