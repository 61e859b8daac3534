"""Command lines as tests call them, in a process of their own or in this one.

The command line is that of `adalog`, unless `main` names the one of a script.
"""

import functools
import gc
import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from adalog.cli import main


@functools.cache
def forking():
    """Processes that fork from one that has imported what commands import, at once or to capture, for seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["adalog.cli", "torch.export._trace", "pytest"])
    return context


def _child(main, arguments, folder, environment, prepare, out, error):
    """Run a command line in a forked process, and write its outputs to two files."""
    gc.freeze()  # collecting garbage among what the processes share would copy all of it
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, path in ((1, out), (2, error)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    sys.argv = ["adalog", *arguments]
    if prepare is not None:
        prepare()
    main()


def forked(*arguments, main=main, cwd=None, prepare=None, **environment):
    """Return the exit code, standard output and standard error of `adalog ARGUMENTS`, in a process of its own.

    prepare: a function of a module that the process calls first, to change what the package does.
    environment: variables that are added to those of this process.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("out", "error")]
        words, variables = [str(each) for each in arguments], {**os.environ, **environment}
        given = (main, words, cwd or Path.cwd(), variables, prepare, *files)
        process = forking().Process(target=_child, args=given)
        process.start()
        process.join(600)
        assert process.exitcode is not None, "the command did not end"
        return process.exitcode, *(file.read_text() for file in files)


def run(*arguments, main=main, cwd=None, code=0, prepare=None):
    """Standard output of `adalog ARGUMENTS`, which must exit with `code` and never show a traceback."""
    found, out, error = forked(*arguments, main=main, cwd=cwd, prepare=prepare)
    assert "Traceback" not in error
    assert found == code, error
    return out if code == 0 else error


def _inside(monkeypatch, capsys, arguments, main):
    """The exit code of `adalog ARGUMENTS` in this process, and what it wrote to the two outputs."""
    monkeypatch.setattr(sys, "argv", ["adalog", *map(str, arguments)])
    monkeypatch.setattr(sys.modules["__main__"], "__package__", "")  # not the name of a module that `python -m` runs
    with pytest.raises(SystemExit) as stopped:
        main()
    return stopped.value.code, *capsys.readouterr()


def call(monkeypatch, capsys, *arguments, main=main):
    """The exit code and the error output of `adalog ARGUMENTS`, in this process."""
    code, _, error = _inside(monkeypatch, capsys, arguments, main)
    return code, error


def refusal(monkeypatch, capsys, *arguments, main=main):
    """The one line that `adalog ARGUMENTS` writes when it refuses, in this process."""
    code, output, error = _inside(monkeypatch, capsys, arguments, main)
    assert (code, output, error.count("\n"), error[:7]) == (2, "", 1, "error: "), error
    return error


def say(monkeypatch, capsys, *arguments, main=main):
    """Standard output of `adalog ARGUMENTS`, in this process, which must exit with 0 and write no error."""
    code, output, error = _inside(monkeypatch, capsys, arguments, main)
    assert (code or 0, error) == (0, "")
    return output


def write_images(folder, labels):
    """Write images of random values, 12 by 10 pixels, into a folder, with a table of their labels by file."""
    draw = np.random.default_rng(0)
    for name in labels:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (10, 12, 3), dtype=np.uint8)).save(folder / name)
    (folder / "labels.csv").write_text(
        "\n".join(["file,label", *(f"{name},{label}" for name, label in labels.items())])
    )


ALONE = """
import sys
for name in ("torch", "safetensors", "typer", "rich", "PIL", "matplotlib", "jinja2"):  # all that NumPy is not
    sys.modules[name] = None  # importing it fails
import numpy as np
import adalog.run
images = np.load(sys.argv[2])
np.save(sys.argv[3], adalog.run.load(sys.argv[1])(images.transpose(0, 1, 3, 2).copy().transpose(0, 1, 3, 2)))
assert not [name for name in sys.modules if name.startswith("torch.")]
"""


def run_alone(file, images, folder):
    """The outputs of `adalog.run` in a process that can import NumPy only."""
    paths = [file, folder / "images.npy", folder / "outputs.npy"]
    np.save(paths[1], images.numpy())
    subprocess.run([sys.executable, "-c", ALONE, *map(str, paths)], check=True)
    return np.load(paths[2])
