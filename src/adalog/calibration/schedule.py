"""Run searches in parallel threads and ranks, within the memory limit, from where an earlier run stopped."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from threading import Condition

import torch

from adalog.calibration.partial import Partial, assignment_json, assignment_of
from adalog.graph.rewrite import SiteGroup
from adalog.quantizers import Assignment
from adalog.ranks import ALONE, Coded, Ranks

# Called with (done, total, name of what is next), in units of work.
Progress = Callable[[int, int, str], None]
_BYTES_PER_UNIT = 1 << 24  # bytes of temporaries; the search of so many takes about as long as any search at least


def units_of_work(size: int) -> int:
    """Return how many units of work the search of a site takes, for the bytes of its temporaries: 1 for a small one."""
    return 1 + size // _BYTES_PER_UNIT


def coded(device: torch.device) -> Coded[Assignment]:
    """Return the encoding that sends assignments between ranks exactly.

    device: the device for received assignments.
    """
    return Coded(
        lambda assignment: json.dumps(assignment_json(assignment)).encode(),
        lambda name, content: assignment_of(name, json.loads(content)).to(device),
    )


def coded_list(device: torch.device) -> Coded[list[Assignment]]:
    """Return the encoding for lists of assignments; see `coded`."""
    return Coded(
        lambda assigned: json.dumps([assignment_json(each) for each in assigned]).encode(),
        lambda name, content: [assignment_of(name, each).to(device) for each in json.loads(content)],
    )


class Scratch:
    """The memory for temporaries that searches share.

    A search waits until enough of it is free. A search that needs more than all of it runs alone.
    """

    def __init__(self, size: int):
        self._size = self._free = size
        self._changed = Condition()

    @contextmanager
    def taken(self, size: int) -> Iterator[None]:
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
    *,
    known: Mapping[str, Assignment],
    bytes_of: Mapping[str, int],
    work_of: Mapping[str, int],
    memory: int,
    device: torch.device,
    jobs: int = 1,
    partial: Partial | None = None,
    progress: Progress | None = None,
    ranks: Ranks = ALONE,
) -> dict[str, Assignment]:
    """Return the assignment that the search finds for every group, by the group's name.

    The result depends neither on `jobs`, the number of searches that run at once on a rank, nor on the number of ranks.
    The searches that take the most bytes start first.

    splits: groups whose operands are held together, in lists that one search takes; a split starts when the one before
    it is done. known: assignments that need no search. bytes_of: the bytes of `memory` that each group takes, by its
    name. work_of: the units of work of each group. partial: a file from which finished searches are read, and to which
    those of this rank are added. progress: called with (units of work done on all ranks, total, name of an unfinished
    group). Raises ValueError if jobs is less than 1.
    """
    if jobs < 1:
        raise ValueError(f"jobs = {jobs} is not a whole number of at least 1")
    scratch = Scratch(memory)
    total = sum(work_of[group.name] for split in splits for stack in split for group in stack)
    found = dict[str, Assignment]()

    def told(names: Iterable[str]) -> None:
        waiting = next((name for name in names if name not in found), None)
        if progress is not None and waiting is not None:
            progress(sum(work_of[name] for name in list(found)), total, waiting)

    for split in splits:

        def size(stack: Sequence[SiteGroup]) -> int:
            return sum(bytes_of[group.name] for group in stack)

        stacks = {stack[0].name: stack for stack in sorted(split, key=size, reverse=True)}
        members = {name: [group.name for group in stack] for name, stack in stacks.items()}
        names = list(chain.from_iterable(members.values()))
        stored = {name: each for name in names if partial and (each := partial.get(name, device))}
        found.update({name: known[name] for name in names if name in known} | stored)
        for name in names:
            if partial is not None and ranks.first and name in found and name not in stored:
                partial.add(name, found[name])

        def find(first: str, stacks: Mapping[str, Sequence[SiteGroup]] = stacks) -> list[Assignment]:
            with scratch.taken(size(stacks[first])):
                return search(stacks[first])

        def finished(
            first: str,
            assigned: list[Assignment],
            own: bool,
            members: Mapping[str, Sequence[str]] = members,
            names: Iterable[str] = names,
        ) -> None:
            for name, assignment in zip(members[first], assigned, strict=True):
                found[name] = assignment
                if partial is not None and own:
                    partial.add(name, assignment)
            told(names)

        told(names)
        whole = [first for first, group_names in members.items() if found.keys() >= {*group_names}]
        done = {first: [found[name] for name in members[first]] for first in whole}
        shared = ranks.shared(list(stacks), find, coded=coded_list(device), threads=jobs, known=done, finished=finished)
        for first, assigned in shared.items():
            found.update(zip(members[first], assigned, strict=True))
    return found
