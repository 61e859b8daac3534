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


def call(monkeypatch, capsys, *arguments):
    """The exit code and the error output of the same without a process of its own."""
    monkeypatch.setattr(sys, "argv", ["adalog", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        main()
    return stopped.value.code, capsys.readouterr().err


def say(monkeypatch, capsys, *arguments):
    """Standard output of the command, in this process."""
    monkeypatch.setattr(sys, "argv", ["adalog", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        main()
    told = capsys.readouterr()
    assert (stopped.value.code or 0, told.err) == (0, "")
    return told.out
