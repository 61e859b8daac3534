"""Output and exit codes of the commands: results on standard output or as JSON, everything else on standard error."""

import json
import logging
import os
import re
import sys
import time
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

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from typer.core import TyperCommand, TyperGroup

from adalog import AdalogError, DataError, files
from adalog.detection.detector import KINDS
from adalog.errors import RankError, printable
from adalog.ranks import ALONE, Ranks

FAILED, BAD_INPUT = 1, 2  # exit codes; 0 means success
_UsageError: Any = typer.BadParameter.__base__  # which typer does not export
_errors = Console(stderr=True)
_job = ContextVar("_job", default=ALONE)  # set while a command runs


class Interrupted(Exception):
    """Ctrl-C, in place of KeyboardInterrupt, which typer would report in its own way."""


class StdoutError(Exception):
    """The error if standard output cannot be written."""


@dataclass
class Session:
    """Options before the command name. debug: show the traceback of an error."""

    debug: bool = False


class _Interruptible:
    """Let `run` handle Ctrl-C in a command."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)  # type: ignore[misc]
        except KeyboardInterrupt as cause:
            raise Interrupted from cause


class Commands(_Interruptible, TyperGroup):
    """A group of commands, which shows its help if there are no arguments."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args or ["--help"])


class Script(_Interruptible, TyperCommand):
    """A command by itself."""


def script_app(command: Callable[..., None]) -> typer.Typer:
    """Return the command line of a program that has this command only."""
    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    app.command(cls=Script)(command)
    return app


def run_script(name: str, command: Callable[..., None], *, shared: bool = False) -> None:
    """Run a program that has this command only, as `run` does. shared: whether it may run as several processes."""
    run(script_app(command), name, [name] if shared else [])


def run(app: Callable[..., Any], command: str, shared: Sequence[str]) -> None:
    """Run the command line `app`; turn an error into one line on standard error and an exit code.

    command: its name, or "" for none. shared: commands that may run as several processes; others fail at once.
    """
    torch.set_num_threads(1)  # adalog runs sites and batches in parallel instead, which scales better
    if sys.stdout is None:
        _complain("failed", "cannot write to standard output: it is closed")
        sys.exit(FAILED)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a file name may be invalid text
    session, ranks, terminal = Session(), ALONE, sys.stderr
    try:
        ranks = _ranks(command, shared)
        with _among(ranks):
            code = _end(app, session, ranks)
    except (Exception, Interrupted, KeyboardInterrupt) as error:
        with redirect_stderr(terminal):
            code = ranks.fail(partial(_explain, error, session.debug))
    sys.exit(code)


def _ranks(command: str, shared: Sequence[str]) -> Ranks:
    """Return the processes that run this command together; raise ValueError if it does not support several."""
    world = Ranks.expected_size()
    if world == 1 or not command:
        return Ranks.of_environment() if command else ALONE
    if command not in shared:
        if os.environ.get("RANK", "0") != "0":
            sys.exit(BAD_INPUT)  # the first process reports the error
        only = f", which only supports {', '.join(shared)}" if shared else ""
        raise ValueError(f"{command} runs as one process: start it without torchrun{only}")
    late = Timer(5.0, note, [f"waiting for {world} processes, the value of WORLD_SIZE"])
    late.daemon = True
    late.start()
    try:
        return Ranks.of_environment()
    finally:
        late.cancel()


@contextmanager
def _among(ranks: Ranks) -> Iterator[None]:
    """Set the ranks of `job` while the context is open; silence all ranks but the first."""
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


def _end(app: Callable[..., Any], session: Session, ranks: Ranks) -> int:
    """Run `app` and return its exit code, which is the same on all ranks. Wait for all ranks to end."""
    try:
        code: Any = app(obj=session, standalone_mode=False)
    except SystemExit as end:
        code = end.code
    except _UsageError as error:  # all ranks have the same arguments
        return ranks.fail(partial(_explain, error, session.debug), alike=True)
    if code:
        return ranks.fail(lambda: int(code), alike=True)
    ranks.meet()
    return 0


def job() -> Ranks:
    """Return the processes that share the work of this command; by default, only this one."""
    return _job.get()


def _explain(error: BaseException, debug: bool) -> int:
    """Print the error in one line and return the exit code."""
    if isinstance(error, (Interrupted, KeyboardInterrupt)):
        _errors.print("interrupted")
        return FAILED
    if isinstance(error, _UsageError):
        hint = f"; see `{error.ctx.command_path} --help`" if error.ctx else ""
        _complain("error", error.format_message().rstrip(".") + hint)
        return BAD_INPUT
    if debug:
        traceback.print_exception(error)
    if isinstance(error, (AdalogError, ValueError)) and not isinstance(error, RankError):
        _complain("error", str(error))
        return BAD_INPUT
    if isinstance(error, StdoutError):
        # Python flushes standard output at exit, which would fail once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    foreseen = isinstance(error, (RankError, StdoutError))
    _complain("failed", str(error) if foreseen else f"{type(error).__name__}: {error}")
    return FAILED


def _complain(how: str, why: str) -> None:
    _errors.print(f"[bold red]{how}:[/] {escape(printable(why))}", soft_wrap=True, highlight=False)


def note(text: str) -> None:
    """Print a line that does not belong to the result on standard error."""
    _errors.print(escape(text), soft_wrap=True, highlight=False)


def say(*results: str | Table) -> None:
    """Print results on standard output, each starting on a new line. Raises StdoutError."""
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
        raise StdoutError(f"cannot write to standard output: {cause.strerror}") from cause


def _printable(text: str) -> str:
    """Replace control characters, which a file name may contain, by "?"; keep tabs and line breaks."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "?", text)


def emit_json(result: Any, target: str | None) -> None:
    """Write a result as JSON to the file `target`, or to standard output for '-'; do nothing for None."""
    if target is None:
        return
    text = json.dumps(result, indent=1)
    if target == "-":
        say(text)
    else:
        write_file(Path(target), f"{text}\n".encode())


def show(result: Any, json_out: str | None, *texts: str | Table) -> None:
    """Write the JSON of a result as `emit_json` does, and print its texts unless standard output takes the JSON."""
    emit_json(result, json_out)
    if json_out != "-":
        say(*texts)


def write_file(path: Path, content: bytes) -> None:
    """Write a file, all or nothing, on the first rank only."""
    if job().first:
        files.write_whole(path, content)


def check_outputs(*paths: Path | str | None, reads: Sequence[Path | str | None] = ()) -> None:
    """Raise DataError if an output cannot be written, or is also an input (`reads`) or another output.

    An output must not overwrite a file inside an input folder, except partial files. None and '-' mean no file.
    """
    resolved = {Path(os.path.realpath(path)) for path in reads if path is not None}
    folders = [path for path in resolved if path.is_dir()]
    for path in paths:
        if path is None or path == "-":
            continue
        if str(path) == "-":  # a Path: only JSON goes to standard output
            raise DataError("an output named - is not written to standard output: give the name of a file")
        files.check_writable(Path(path))
        real = Path(os.path.realpath(path))
        if real in resolved:
            raise DataError(f"{path} is also an input or another output of this command: choose another file")
        within = [folder for folder in folders if folder in real.parents]
        if within and real.is_file() and real.suffix != ".partial":
            raise DataError(
                f"{path} is a file of the input folder {within[0]}: choose another file, or remove it first"
            )
        resolved.add(real)


def partial_of(out: Path, json_out: str | None, resume: bool, reads: Sequence[Path | str | None]) -> Path:
    """Return the path of the partial file of a run, after `check_outputs` and `check_unfinished`."""
    if not out.name:
        raise DataError(f"--out {str(out)!r} does not name a file: give a file name")
    partial = out.with_name(f"{out.name}.partial")
    check_outputs(out, partial, json_out, reads=reads)
    check_unfinished(partial, resume)
    return partial


def check_unfinished(partial: Path, resume: bool) -> None:
    """Raise DataError if an earlier run left results and this one neither resumes nor was restarted by its launcher.

    Only rank 0 looks: a late rank would find its new file.
    """
    paths = job().by_first(lambda: list(map(str, _leftovers(partial))))
    if paths and not resume and not job().restarts:
        raise DataError(f"{paths[0]} holds results of an unfinished run: continue it with --resume, or remove the file")


def remove_finished(partial: Path) -> None:
    """Remove the partial files of a run after its result has been written."""
    job().meet()  # wait until the result is written and all ranks have sent their parts
    for file in _leftovers(partial):
        file.unlink(missing_ok=True)  # another rank may have removed it


# Suffixes that runs append to the name of a partial file: ".alone" and a width for a sensitivity, ".points" for a
# curve, eight hex digits for a plan within a budget, the part of a detector, and the rank of a process.
_LEFT = rf"(\.(alone|points|[2-8]|[0-9a-f]{{8}}|({'|'.join(KINDS)})(_\w+)?|rank\d+))*"


def _leftovers(partial: Path) -> list[Path]:
    """Return the existing partial files of a run; those with suffixes outside `_LEFT` belong to the user."""
    if not partial.parent.is_dir():
        return []
    names = re.compile(re.escape(partial.name) + _LEFT)
    return sorted(path for path in partial.parent.iterdir() if names.fullmatch(path.name) and path.is_file())


# --- progress --------------------------------------------------------------------------------------------------------


_LONG = 60.0  # the seconds from which a remaining time is printed
_PERIOD = 600.0  # the seconds over which a bar averages the speed; single sites take up to minutes


@contextmanager
def quiet() -> Iterator[None]:
    """Silence other packages and the user's model while the context is open: standard output may be JSON."""
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
    """Show a spinner with the text `what` while the context is open, and silence other output."""
    with Console(file=sys.stderr).status(escape(what)), quiet():
        yield


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Show a progress bar with the remaining time; show nothing if standard error is not a terminal."""
    columns = ("{task.description}", BarColumn(), TimeElapsedColumn(), "eta", TimeRemainingColumn())
    terminal = Console(file=sys.stderr)
    with Progress(
        *columns, console=terminal, transient=True, disable=not terminal.is_terminal, speed_estimate_period=_PERIOD
    ) as progress:
        yield progress


def site_progress(progress: Progress, task: TaskID, name: str, at_once: int = 0) -> Callable[[int, int, str], None]:
    """Return a callback that shows the finished share of sites or steps on a bar, with the name of the last one.

    If they will take more than a minute, it also prints about how long, even without a bar: once, after `at_once`
    sites, the number of sites that are searched at once. With 0 it prints nothing.
    """
    calls, began_at = 0, (0.0, 0)

    def update(done: int, total: int, site: str) -> None:
        nonlocal calls, began_at
        progress.update(task, completed=done, total=total, description=f"{name} {site}")
        if calls == 0:
            began_at = time.monotonic(), done
        elif calls == at_once and done > began_at[1]:
            seconds = (time.monotonic() - began_at[0]) * (total - done) / (done - began_at[1])
            if seconds > _LONG:
                progress.console.print(f"{name}: about {_duration(seconds)} left", highlight=False)
        calls += 1

    return update


def _duration(seconds: float) -> str:
    if seconds >= 7200:
        return f"{seconds / 3600:.1f} hours"
    minutes = max(1, round(seconds / 60))
    return "1 minute" if minutes == 1 else f"{minutes} minutes"


def image_progress(progress: Progress) -> Callable[..., None]:
    """Return a callback for one run over images; it adds the images of this run to the count on the only bar."""
    (bar,) = progress.tasks
    before = bar.completed
    return lambda done, *_: progress.update(bar.id, completed=before + done)
