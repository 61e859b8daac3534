"""Fill the command-line page of the documentation with the help of all commands while mkdocs builds it."""

from experiments import figures, tables

from typing import Any

import typer
from typer.cli import get_docs_for_click

from adalog.cli import app
from adalog.cli.console import script_app

APPS = {
    "adalog": app,
    "python -m experiments.tables": script_app(tables.command),
    "python -m experiments.figures": script_app(figures.command),
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace each marker with the help of the command line that it names; mkdocs calls this for each page."""
    for name, each in APPS.items():
        marker = f"<!-- help of {name} -->"
        if marker in markdown:
            command = typer.main.get_command(each)
            text = get_docs_for_click(obj=command, ctx=typer.Context(command), name=name, title="")
            markdown = markdown.replace(marker, text.partition("\n")[2])
    return markdown
