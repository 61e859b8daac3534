"""The command line: parse, call, print. Each command is a module with one function, `command`."""

from collections.abc import Callable
from typing import Annotated

import torch
import typer

from adalog.cli import (
    bench,
    certify,
    cost,
    demo,
    detect,
    doctor,
    evaluate,
    export,
    figures,
    inspect,
    methods,
    pareto,
    quantize,
    report,
    sensitivity,
    tables,
    tape,
    vectors,
)
from adalog.cli.console import Commands, Session, run

# In the order in which `adalog --help` lists them.
COMMANDS: dict[str, Callable[..., None]] = {
    "demo": demo.command,
    "quantize": quantize.command,
    "sensitivity": sensitivity.command,
    "pareto": pareto.command,
    "evaluate": evaluate.command,
    "detect": detect.command,
    "export": export.command,
    "certify": certify.command,
    "inspect": inspect.command,
    "report": report.command,
    "methods": methods.command,
    "tables": tables.command,
    "figures": figures.command,
    "doctor": doctor.command,
    "bench": bench.command,
    "tape": tape.command,
    "vectors": vectors.command,
    "cost": cost.command,
}

SHARED = ("quantize", "evaluate", "sensitivity", "pareto", "tables")  # those that several processes share

app = typer.Typer(
    cls=Commands,
    help="Quantize vision transformers to 2 to 8 bits with adaptive logarithm quantizers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
for _name, _command in COMMANDS.items():
    app.command(name=_name)(_command)


@app.callback()
def _before_the_command(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    context.ensure_object(Session).debug = debug


def main() -> None:
    """Run `adalog`. Exit codes: 0 done, 1 failed, 2 bad input."""
    torch.set_num_threads(1)  # sites and batches run side by side instead: that scales better, and no thread spins
    run(app, SHARED)
