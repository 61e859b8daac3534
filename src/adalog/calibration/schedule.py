"""The order of searches: side by side in threads, within shared memory, and from where an earlier run stopped."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Condition

import torch

from adalog.calibration.partial import Partial
from adalog.graph.rewrite import SiteGroup
from adalog.quantizers import Assignment

Progress = Callable[[int, int, str], None]


class Scratch:
    """The memory for temporaries that searches share.

    A search waits until there is enough of it; a search that needs more than all of it runs alone.
    """

    def __init__(self, size: int):
        self._size = self._free = size
        self._changed = Condition()

    @contextmanager
    def taken(self, size: int) -> Iterator[None]:
        """Take `size` bytes for as long as the context lasts."""
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
    splits: Sequence[Sequence[SiteGroup]],
    search: Callable[[SiteGroup], Assignment],
    *,
    bytes_of: Mapping[str, int],
    memory: int,
    device: torch.device,
    jobs: int = 1,
    partial: Partial | None = None,
    progress: Progress | None = None,
) -> dict[str, Assignment]:
    """The assignment that the search finds for every group, by the group's name; it does not depend on `jobs`.

    splits: groups whose operands are held together; a split begins when the one before it is done. bytes_of: the bytes
    of `memory` that each search takes, by the group's name. partial: a file from which finished searches are read, and
    to which new ones are added. progress: called with (done, total, the name of the group that is waited for).
    """
    scratch = Scratch(memory)

    def find(group: SiteGroup) -> Assignment:
        known = partial and partial.get(group.name, device)
        if known:
            return known
        with scratch.taken(bytes_of[group.name]):
            return search(group)

    found = dict[str, Assignment]()
    total = sum(map(len, splits))
    with ThreadPoolExecutor(jobs) as pool:
        try:
            for split in splits:
                for group, waiting in [(group, pool.submit(find, group)) for group in split]:
                    if progress is not None:
                        progress(len(found), total, group.name)
                    found[group.name] = waiting.result()
                    if partial is not None and not partial.get(group.name):
                        partial.add(group.name, found[group.name])
        finally:
            pool.shutdown(cancel_futures=True)
    return found
