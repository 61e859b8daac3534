"""The command line interface: one module per command, each with a function `command`."""

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

# `adalog --help` lists the commands in this order.
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

# Commands that torchrun may run as several processes.
SHARED = ("quantize", "evaluate", "sensitivity", "pareto", "tables")

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
    debug: Annotated[bool, typer.Option("--debug", help="Show the full traceback of an error.")] = False,
) -> None:
    context.ensure_object(Session).debug = debug


def main() -> None:
    """Run the `adalog` command. The exit code is 0 for success, 1 for failure and 2 for bad input."""
    torch.set_num_threads(1)  # adalog runs sites and batches in parallel instead, which scales better
    run(app, SHARED)
