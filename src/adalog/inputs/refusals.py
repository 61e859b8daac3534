"""Turn the errors of other code into one line that says what failed, why, and what to do about it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from adalog.errors import AdalogError, DataError

SHOWN = 3  # number of names listed before "and n more"


@contextmanager
def refusal(what: str, way_out: str) -> Iterator[None]:
    """Turn an error raised while the context is open into a DataError with `what`, the reason and `way_out`."""
    try:
        yield
    except AdalogError:
        raise
    except (Exception, SystemExit) as cause:
        reason = getattr(cause, "strerror", None) or (str(cause).strip() or type(cause).__name__).splitlines()[0]
        raise DataError(f"{what}: {reason}; {way_out}") from cause


def shorten(names: Sequence[str]) -> str:
    """Join the first few names, followed by the number of the others."""
    rest = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + rest
