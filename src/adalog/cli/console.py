"""What commands write: results on standard output or as JSON, the rest on standard error; and how a command ends."""

import json
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from io import StringIO, TextIOWrapper
from pathlib import Path
from threading import Timer
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from typer.core import TyperGroup

from adalog import AdalogError, DataError, files
from adalog.detection.detector import KINDS
from adalog.errors import RankError, printable
from adalog.ranks import ALONE, Ranks

FAILED, BAD_INPUT = 1, 2  # exit codes; 0 is done
_errors = Console(stderr=True)
_job = ContextVar("_job", default=ALONE)  # set while a command runs


class Interrupted(Exception):
    """Ctrl-C. It takes the place of KeyboardInterrupt, which typer would report in its own way."""


class OutputError(Exception):
    """Standard output cannot be written."""


@dataclass
class Session:
    """The options that stand before the command. debug: show the traceback of an error."""

    debug: bool = False


class Commands(TyperGroup):
    """A group of commands that leaves Ctrl-C to `run`."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as cause:
            raise Interrupted from cause


def run(app: Callable[..., Any], shared: Sequence[str]) -> None:
    """Run the command line `app` and turn an error into one line on standard error and an exit code.

    shared: the commands that several processes share. Others are refused before a process waits for the rest.
    """
    if sys.stdout is None:
        _complain("failed", "standard output cannot be written: it is closed")
        sys.exit(FAILED)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # the name of a file need not be valid text
    session, ranks, terminal = Session(), ALONE, sys.stderr
    try:
        ranks = _ranks(shared)
        with _among(ranks):
            code = _ended(app, session, ranks)
    except (Exception, Interrupted, KeyboardInterrupt) as error:
        with redirect_stderr(terminal):
            code = ranks.failed(partial(_explain, error, session.debug))
    sys.exit(code)


def _ranks(shared: Sequence[str]) -> Ranks:
    """The processes that do this command together. ValueError where it is none of the shared ones."""
    command, world = next((word for word in sys.argv[1:] if not word.startswith("-")), ""), Ranks.expected()
    if world == 1 or not command:
        return Ranks.of_environment() if command else ALONE
    if command not in shared:
        if os.environ.get("RANK", "0") != "0":
            sys.exit(BAD_INPUT)  # the first process says why
        raise ValueError(
            f"{command} is the work of one process: start it without torchrun, which serves {', '.join(shared)}"
        )
    late = Timer(5.0, note, [f"waits for {world} processes, as WORLD_SIZE says"])
    late.daemon = True
    late.start()
    try:
        return Ranks.of_environment()
    finally:
        late.cancel()


@contextmanager
def _among(ranks: Ranks) -> Iterator[None]:
    """Let the block work for these ranks, and print nothing on any but the first."""
    token = _job.set(ranks)
    try:
        with ExitStack() as silence:
            if not ranks.first:
                nowhere = silence.enter_context(Path(os.devnull).open("w"))
                silence.enter_context(redirect_stdout(nowhere))
                silence.enter_context(redirect_stderr(nowhere))
            yield
    finally:
        _job.reset(token)


def _ended(app: Callable[..., Any], session: Session, ranks: Ranks) -> int:
    """The exit code of `app` on all ranks, once it has ended on all of them."""
    code: Any = 0
    try:
        app(obj=session)
    except SystemExit as end:  # typer has explained wrong arguments, which are the same on all ranks
        code = end.code or 0
    if code:
        return ranks.failed(lambda: int(code), alike=True)
    ranks.meet()
    return 0


def job() -> Ranks:
    """The processes that share the work of this command; by default there is this one."""
    return _job.get()


def _explain(error: BaseException, debug: bool) -> int:
    """Print the one line that says what went wrong, and return the exit code."""
    if isinstance(error, (Interrupted, KeyboardInterrupt)):
        _errors.print("interrupted")
        return FAILED
    if debug:
        traceback.print_exception(error)
    if isinstance(error, RankError):
        _complain("failed", str(error))
        return FAILED
    if isinstance(error, (AdalogError, ValueError)):
        _complain("error", str(error))
        return BAD_INPUT
    if isinstance(error, OutputError):
        # Python flushes standard output when it ends, which would fail once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _complain("failed", str(error))
        return FAILED
    _complain("failed", f"{type(error).__name__}: {error}")
    return FAILED


def _complain(how: str, why: str) -> None:
    _errors.print(f"[bold red]{how}:[/] {escape(printable(why))}", soft_wrap=True, highlight=False)


def note(text: str) -> None:
    """Print a line on standard error: it is no part of the result."""
    _errors.print(escape(text), soft_wrap=True, highlight=False)


def say(*results: str | Table) -> None:
    """Print results on standard output, each starting on a new line. Raises OutputError."""
    try:
        for result in results:
            if isinstance(result, str):
                sys.stdout.write(f"{_printable(result)}\n")
                continue
            if isinstance(result.title, str):
                result.title = _printable(result.title)
            Console().print(result)
        sys.stdout.flush()
    except OSError as cause:
        raise OutputError(f"standard output cannot be written: {cause.strerror}") from cause


def _printable(text: str) -> str:
    """The text without what a terminal obeys, which names of files may hold, but for tabs and ends of lines."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "?", text)


def emit_json(result: Any, target: str | None) -> None:
    """Write a result as JSON to the file `target`, whole or not at all, or to standard output where it is '-'."""
    if target is None:
        return
    text = json.dumps(result, indent=1)
    if target == "-":
        say(text)
    else:
        write_file(Path(target), f"{text}\n".encode())


def write_file(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, on the rank that writes."""
    if job().first:
        files.write_whole(path, content)


def check_outputs(*paths: Path | str | None, reads: Sequence[Path | str | None] = ()) -> None:
    """Raise DataError if an output cannot be written, or is also an input (`reads`) or another output.

    A folder that is an input keeps all files that it has, but for those of unfinished runs. Commands call this before
    any long work. None and '-' stand for no file.
    """
    used = {os.path.realpath(path) for path in reads if path is not None}
    folders = [Path(path) for path in used if Path(path).is_dir()]
    for path in paths:
        if path is not None and path != "-":
            files.check_writable(Path(path))
            if os.path.realpath(path) in used:
                raise DataError(f"{path} is an input, or an output of another kind: choose another file")
            real = Path(os.path.realpath(path))
            if (
                real.is_file()
                and real.suffix != ".partial"
                and (within := next((each for each in folders if each in real.parents), None))
            ):
                raise DataError(f"{path} is a file of the input {within}: choose another file, or remove it first")
            used.add(os.path.realpath(path))


def partial_of(out: Path) -> Path:
    """Where a run keeps what it has finished. Raises DataError where `out` names no file."""
    if not out.name:
        raise DataError(f"--out {str(out)!r} names no file: give a name for it")
    return out.with_name(f"{out.name}.partial")


def check_unfinished(partial: Path, resume: bool) -> None:
    """Raise DataError if an earlier run left finished parts in `partial` and this one does not go on from them.

    A job that its launcher has started again goes on. Rank 0 asks for all: others may be late, and find its new file.
    """
    left = job().by_first(lambda: list(map(str, _leftovers(partial))))
    if left and not resume and not job().restarts:
        raise DataError(f"{left[0]} holds what an earlier run has finished: go on with --resume, or remove it")


def remove_finished(partial: Path) -> None:
    """Remove what a run kept of its finished parts, now that its result is written."""
    job().meet()  # what is written is written, and the others have told all that they found
    for file in _leftovers(partial):
        file.unlink(missing_ok=True)  # another rank may be quicker


# What runs add to the name of a partial file: an operand alone and at a width, points of a curve, choices within a
# budget, a part of a detector, the rank of a process.
_LEFT = rf"(\.(alone|points|[2-8]|[0-9a-f]{{8}}|({'|'.join(KINDS)})(_\w+)?|rank\d+))*"


def _leftovers(partial: Path) -> list[Path]:
    """The files in which a run keeps what it has finished: `partial`, and those that begin with its name and a dot.

    Only names that runs give are: others, such as that of a copy, are the user's own.
    """
    if not partial.parent.is_dir():
        return []
    names = re.compile(re.escape(partial.name) + _LEFT)
    return sorted(path for path in partial.parent.iterdir() if names.fullmatch(path.name) and path.is_file())


# --- during the long part --------------------------------------------------------------------------------------------


@contextmanager
def quiet() -> Iterator[None]:
    """Keep what other packages and a user's own model print, log or warn of away from the terminal.

    Standard output may be JSON that a program reads. All settings are restored at the end of the block.
    """
    before = logging.root.manager.disable
    logging.disable()
    try:
        with warnings.catch_warnings(), redirect_stderr(StringIO()), redirect_stdout(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show a spinner on the terminal, and be quiet."""
    with Console(file=sys.stderr).status(escape(what)), quiet():
        yield


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Show a bar with the time that is left; show nothing if standard error is no terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("eta"),
        TimeRemainingColumn(),
    )
    terminal = Console(file=sys.stderr)
    with Progress(*columns, console=terminal, transient=True, disable=not terminal.is_terminal) as progress:
        yield progress


def site_progress(progress: Progress, task: TaskID, name: str) -> Callable[[int, int, str], None]:
    """A callback for `quantize` that shows on a bar how many sites or steps are done, and the name of the last one."""

    def update(done: int, total: int, site: str) -> None:
        progress.update(task, completed=done, total=total, description=f"{name} {site}")

    return update


def image_progress(progress: Progress) -> Callable[[int], None]:
    """A callback for one run over images, which adds the images done to what the only bar shows already."""
    (bar,) = progress.tasks
    before = bar.completed
    return lambda done: progress.update(bar.id, completed=before + done)
