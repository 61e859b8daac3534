"""Store the finished parts of a long run, one per line, so that the run can resume after an interruption."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from adalog.errors import ArtifactError, DataError
from adalog.files import check_writable, writing

_DAMAGE = (ArtifactError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError)


class FinishedParts:
    """The finished parts of a run in files: named JSON objects, one per line, which are only ever appended.

    A line with a fingerprint, which is a digest or JSON, says on what the parts after it depend. `parts` has the parts
    with this fingerprint. Each rank of a job appends to its own file: rank 0 to `path`, the others to files with the
    suffix .rank1 and so on. All of these files are read, whichever job wrote them. A last line that was cut off is
    ignored, and the next part takes its place. Nothing is written before the first part. kind: the name of the parts,
    such as "searches". Raises DataError for a file that is damaged, has other content, or cannot be written.
    """

    def __init__(self, path: Path, fingerprint: str | Mapping[str, Any], kind: str, rank: int = 0):
        self.path = path if rank == 0 else path.with_name(f"{path.name}.rank{rank}")
        self.parts: dict[str, dict[str, Any]] = {}
        self._kind, self._header = kind, json.loads(json.dumps({kind: fingerprint}))
        self._last: Any = None  # the last fingerprint of the rank's own file
        self._whole: int | None = None  # the bytes of its whole lines, if more follow
        self._mixed: Path | None = None  # a file that also has parts with another fingerprint
        check_writable(self.path)
        for other in _files_of_ranks(path):
            self._read(other)

    def alone(self) -> "FinishedParts":
        """Return the same object. Raises DataError if a file also has parts with another fingerprint."""
        if self._mixed is not None:
            raise DataError(
                f"{self._mixed} holds {self._kind} of another model, other images or other choices (including memory, "
                "seed, and the versions of adalog and PyTorch): use the same ones again, or remove the file"
            )
        return self

    def add(self, name: str, content: dict[str, Any]) -> None:
        lines = [self._header] * (self._last != self._header) + [{"name": name, **content}]
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                if self._whole is not None:
                    file.truncate(self._whole)
                file.write("".join(json.dumps(line) + "\n" for line in lines))
                file.flush()
                os.fsync(file.fileno())
        self._last, self._whole = self._header, None

    @contextmanager
    def refusing(self, path: Path | None = None) -> Iterator[None]:
        """Turn errors raised while the context is open into a DataError that says that the file is damaged."""
        try:
            yield
        except _DAMAGE as cause:
            raise DataError(f"{path or self.path} is damaged ({type(cause).__name__}: {cause}): remove it") from cause

    def _read(self, path: Path) -> None:
        start, header = json.dumps({self._kind: 0})[:-2].encode(), None
        try:
            content = path.read_bytes()
            whole = content[: content.rfind(b"\n") + 1]
            lines = [json.loads(line) for line in whole.splitlines()]
            if not (self._is_header(lines[0]) if lines else content[: len(start)] == start[: len(content)]):
                raise ValueError("it does not start with a fingerprint")
        except (OSError, ValueError, RecursionError) as cause:
            raise DataError(
                f"{path} is not a file of finished {self._kind} ({cause}): remove it, or choose another path"
            ) from cause
        with self.refusing(path):
            for line in lines:
                if self._is_header(line):
                    header = line
                    self._mixed = self._mixed if header == self._header else path
                elif header == self._header:
                    self.parts[str(line["name"])] = line
        if path == self.path:
            self._last, self._whole = header, len(whole) if len(whole) < len(content) else None

    def _is_header(self, line: Any) -> bool:
        return isinstance(line, dict) and line.keys() == {self._kind}


def _files_of_ranks(path: Path) -> list[Path]:
    """Return the existing files of a run: the one at this path, and those that other ranks wrote next to it."""
    start, others = f"{path.name}.rank", list[Path]()
    with suppress(OSError):  # a folder that cannot be listed
        others = sorted(path.with_name(file.name) for file in path.parent.iterdir() if file.name.startswith(start))
    return [path] * path.exists() + [file for file in others if file.name[len(start) :].isdecimal()]
