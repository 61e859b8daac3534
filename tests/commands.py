"""The command line as tests call it: in a process of its own, or in this one."""

import subprocess
import sys

import pytest

from adalog.cli import main


def run(*arguments, cwd=None, code=0):
    """Standard output of `adalog ARGUMENTS`, which must exit with `code` and never show a traceback."""
    command = [sys.executable, "-m", "adalog", *map(str, arguments)]
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert "Traceback" not in result.stderr
    assert result.returncode == code, result.stderr
    return result.stdout if code == 0 else result.stderr


def _inside(monkeypatch, capsys, arguments):
    """The exit code of `adalog ARGUMENTS` in this process, and what it wrote to the two outputs."""
    monkeypatch.setattr(sys, "argv", ["adalog", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        main()
    return stopped.value.code, *capsys.readouterr()


def call(monkeypatch, capsys, *arguments):
    """The exit code and the error output of `adalog ARGUMENTS`, in this process."""
    code, _, error = _inside(monkeypatch, capsys, arguments)
    return code, error


def say(monkeypatch, capsys, *arguments):
    """Standard output of `adalog ARGUMENTS`, in this process, which must exit with 0 and write no error."""
    code, output, error = _inside(monkeypatch, capsys, arguments)
    assert (code or 0, error) == (0, "")
    return output
