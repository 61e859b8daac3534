"""How this package refuses a model: in one line that says what failed, why, and what to do about it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from adalog.errors import AdalogError, DataError

SHOWN = 3  # names listed before "and n more"


@contextmanager
def refusal(what: str, way_out: str) -> Iterator[None]:
    """Turns whatever other code raises inside into a DataError: `what`, the reason, the way out."""
    try:
        yield
    except AdalogError:
        raise
    except (Exception, SystemExit) as cause:
        reason = getattr(cause, "strerror", None) or (str(cause).strip() or type(cause).__name__).splitlines()[0]
        raise DataError(f"{what}: {reason}; {way_out}") from cause


def listed(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    rest = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + rest
