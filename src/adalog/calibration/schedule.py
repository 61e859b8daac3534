"""Run searches in parallel threads and ranks, within the memory limit, from where an earlier run stopped."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from threading import Condition

import torch

from adalog.calibration.partial import Partial, assignment_json, assignment_of
from adalog.choices import check_whole
from adalog.graph.rewrite import SiteGroup
from adalog.quantizers import Assignment
from adalog.ranks import ALONE, Codec, Ranks, json_codec

# Called with (done, total, name of what is next), in units of work.
Progress = Callable[[int, int, str], None]
_BYTES_PER_UNIT = 1 << 24  # bytes of temporaries; the search of so many takes about as long as any search at least


@dataclass(frozen=True)
class Resources:
    """The threads and processes of a computation, the file from which it continues, and how it reports progress.

    The result does not depend on them. The seed and the memory limit can change it, so they are separate arguments.

    Args:
        jobs: Number of sites, or batches of images, that each process works on at once, in threads.
        partial: A file from which finished parts of the work are read, and to which new ones are added. Remove it once
            the result is saved. Some functions add files next to it, whose names begin with the name of this file.
        progress: Called as `progress(done, total, name)` whenever a part is done. A site with many values counts
            several times, so that `done / total` is about the share of the time.
        ranks: The processes that share the work (`adalog.ranks.Ranks.of_environment()`). Each of them makes the same
            call, and all get the same result. Default: this process alone.

    Raises:
        ValueError: If `jobs` is not a whole number of at least 1.

    Examples:
        >>> import adalog
        >>> from adalog import demo
        >>> calibration = adalog.Calibration(demo.load_model(), demo.calibration_images()[:32])
        >>> qmodel = calibration.quantize(adalog.Config.preset("w4a4"), adalog.Resources(jobs=2))
    """

    jobs: int = 1
    partial: Path | None = None
    progress: Progress | None = None
    ranks: Ranks = ALONE

    def __post_init__(self) -> None:
        check_whole("jobs", self.jobs, 1)

    def named(self, name: str) -> "Resources":
        """Return the resources of a part of the work that has a partial file of its own.

        Args:
            name: The end of the file's name, after a dot.

        Returns:
            The same resources with that file, or without a file as before.
        """
        return self if self.partial is None else replace(self, partial=Path(f"{self.partial}.{name}"))

    def report(self, done: int, total: int, name: str = "") -> None:
        """Call `progress`, if there is one.

        Args:
            done: The finished units of work.
            total: All units of work.
            name: What is next.
        """
        if self.progress is not None:
            self.progress(done, total, name)


SERIAL = Resources()  # one thread of this process


def units_of_work(size: int) -> int:
    """Return how many units of work the search of a site takes, for the bytes of its temporaries: 1 for a small one."""
    return 1 + size // _BYTES_PER_UNIT


def assignment_codec(device: torch.device) -> Codec[Assignment]:
    """Return the encoding that sends assignments between ranks exactly. device: that of received assignments."""
    return json_codec(assignment_json, lambda name, line: assignment_of(name, line).to(device))


def assignments_codec(device: torch.device) -> Codec[list[Assignment]]:
    """Return the encoding for lists of assignments; see `assignment_codec`."""
    return json_codec(
        lambda assigned: [assignment_json(assignment) for assignment in assigned],
        lambda name, lines: [assignment_of(name, line).to(device) for line in lines],
    )


class Scratch:
    """The memory that searches share. A search waits until enough is free; if all is not enough, it runs alone."""

    def __init__(self, size: int):
        self._size = self._free = size
        self._changed = Condition()

    @contextmanager
    def reserve(self, size: int) -> Iterator[None]:
        """Take `size` bytes while the context is open."""
        size = min(size, self._size)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= size)
            self._free -= size
        try:
            yield
        finally:
            with self._changed:
                self._free += size
                self._changed.notify_all()


def run_searches(
    splits: Sequence[Sequence[Sequence[SiteGroup]]],
    search: Callable[[Sequence[SiteGroup]], list[Assignment]],
    resources: Resources,
    *,
    known: Mapping[str, Assignment],
    bytes_of: Mapping[str, int],
    work_of: Mapping[str, int],
    memory: int,
    device: torch.device,
    partial: Partial | None = None,
) -> dict[str, Assignment]:
    """Return the assignment that the search finds for every group, by the group's name; the largest start first.

    splits: groups whose operands are held together, in lists that one search takes; a split starts when the one before
    it is done. known: assignments that need no search. bytes_of: the bytes of `memory` that each group takes. work_of:
    its units of work. partial: the opened file of the resources, to which the searches of this rank are added. Progress
    counts units of work on all ranks, with the name of an unfinished group.
    """
    scratch, ranks, assignments = Scratch(memory), resources.ranks, dict[str, Assignment]()
    total = sum(work_of[group.name] for split in splits for stack in split for group in stack)

    def size(stack: Sequence[SiteGroup]) -> int:
        return sum(bytes_of[group.name] for group in stack)

    def run_split(split: Sequence[Sequence[SiteGroup]]) -> None:
        stacks = {stack[0].name: stack for stack in sorted(split, key=size, reverse=True)}
        members = {first: [group.name for group in stack] for first, stack in stacks.items()}
        names = list(chain.from_iterable(members.values()))
        stored = {name: line for name in names if partial and (line := partial.get(name, device))}
        assignments.update({name: known[name] for name in names if name in known} | stored)
        if partial is not None and ranks.first:
            for name in names:
                if name in assignments and name not in stored:
                    partial.add(name, assignments[name])

        def report() -> None:
            waiting = next((name for name in names if name not in assignments), None)
            if waiting is not None:
                resources.report(sum(work_of[name] for name in list(assignments)), total, waiting)

        def find(first: str) -> list[Assignment]:
            with scratch.reserve(size(stacks[first])):
                return search(stacks[first])

        def finish(first: str, assigned: list[Assignment], own: bool) -> None:
            for name, assignment in zip(members[first], assigned, strict=True):
                assignments[name] = assignment
                if partial is not None and own:
                    partial.add(name, assignment)
            report()

        report()
        done = {
            first: [assignments[name] for name in group_names]
            for first, group_names in members.items()
            if assignments.keys() >= {*group_names}
        }
        shared = ranks.share(
            list(stacks), find, coded=assignments_codec(device), threads=resources.jobs, known=done, finished=finish
        )
        for first, assigned in shared.items():
            assignments.update(zip(members[first], assigned, strict=True))

    for split in splits:
        run_split(split)
    return assignments
