"""Fill the command-line page of the documentation with the help of all commands while mkdocs builds it."""

from typing import Any

import typer
from typer.cli import get_docs_for_click

from adalog.cli import app

MARKER = "<!-- commands -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the marker with the help of all commands; mkdocs calls this for each page."""
    if MARKER not in markdown:
        return markdown
    command = typer.main.get_command(app)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name="adalog", title="")
    return markdown.replace(MARKER, text.partition("\n")[2])
