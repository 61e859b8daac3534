"""Share work between the processes (ranks) of one job, as `torchrun` starts them.

Ranks claim jobs and exchange results through the job's key-value store, which the launcher serves: a claim increments a
counter, and results are bytes. Tensors to sum (`Ranks.sum_in_order`) go from rank to rank by Gloo, in CPU memory.
"""

import itertools
import json
import os
import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from threading import Event
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from adalog.errors import RankError, one_line

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.distributed_c10d import Store

T = TypeVar("T")
_PIECE = 4 << 20  # bytes of one value in the store: a TCPStore refuses more than 8 MiB
_POLL = 0.1  # seconds between queries of the store
_WAITS = timedelta(days=7)  # time for which a rank may be busy before it sends its part of a sum
_LAST_WORDS = 10.0  # seconds for which a failing rank waits for the rank that failed first to report the reason


@dataclass(frozen=True)
class Codec(Generic[T]):
    """The encoding of a result: `write` converts it to bytes, and `read` restores it from its name and the bytes."""

    write: Callable[[T], bytes]
    read: Callable[[str, bytes], T]


def json_codec(write: Callable[[T], Any], read: Callable[[str, Any], T]) -> Codec[T]:
    """Return the encoding as JSON: `write` makes JSON values of a result, which `read` restores, also from its name."""
    return Codec(
        lambda result: json.dumps(write(result)).encode(), lambda name, content: read(name, json.loads(content))
    )


JSON: Codec[Any] = json_codec(lambda value: value, lambda _, value: value)


class Ranks:
    """The processes (ranks) of one job, as seen from this one. By default this process is alone.

    All ranks must make the same calls in the same order. If a rank dies, the launcher has to notice: `torchrun` then
    ends the other ranks, and starts all of them again if it may. torch.distributed is imported only for several ranks.

    Args:
        store: The job's key-value store. None: this process is alone.
        rank: Number of this process, from 0 to `world` - 1.
        world: Number of processes.
        local: Number of this process among those on this machine.
        neighbours: Number of processes on this machine.
        restarts: Number of times that the launcher has restarted the job.
    """

    def __init__(
        self,
        store: "Store | None" = None,
        rank: int = 0,
        world: int = 1,
        *,
        local: int = 0,
        neighbours: int = 1,
        restarts: int = 0,
    ):
        self.rank, self.world, self.local, self.neighbours, self.restarts = rank, world, local, neighbours, restarts
        self._store: Any = store
        self._calls = itertools.count()
        self._group: Any = None  # created by the first sum

    @staticmethod
    def expected_size() -> int:
        """Return the number of ranks from the environment variables of `torchrun`; 1 unless all of them are set."""
        world = _number("WORLD_SIZE", 1)
        if world < 1:
            raise RankError("the environment variable WORLD_SIZE is 0: start the job with `torchrun`, or unset it")
        return world if {"RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys() else 1

    @staticmethod
    def of_environment() -> "Ranks":
        """Return the ranks of the job that `torchrun` started, or this process alone if `torchrun` did not start it.

        Raises RankError if the job's store cannot be reached, or if an environment variable is not a number.
        """
        restarts = _number("TORCHELASTIC_RESTART_COUNT", 0)
        if Ranks.expected_size() == 1:
            return Ranks(restarts=restarts)
        for name in ("RANK", "MASTER_PORT"):
            _number(name, 0)
        local, neighbours = _number("LOCAL_RANK", 0), _number("LOCAL_WORLD_SIZE", 1)
        from torch.distributed.distributed_c10d import PrefixStore
        from torch.distributed.rendezvous import rendezvous

        with _reach():
            store, rank, world = next(rendezvous("env://", timeout=timedelta(minutes=5)))
        store = PrefixStore(f"adalog/{restarts}", store)  # restarts of a job may share one store
        return Ranks(store, rank, world, local=local, neighbours=neighbours, restarts=restarts)

    @property
    def first(self) -> bool:
        """True for the rank that prints and writes."""
        return self.rank == 0

    def share(
        self,
        names: Sequence[str],
        make: Callable[[str], T],
        *,
        coded: Codec[T] = JSON,
        threads: int = 1,
        known: Mapping[str, T] | None = None,
        finished: Callable[[str, T, bool], None] | None = None,
    ) -> dict[str, T]:
        """Share jobs between the ranks, and return the results of all jobs on every rank.

        Jobs are claimed in the order of `names`, so long ones should come first. A rank does the jobs that it claims.

        make: does the job of a name. The result must not depend on the rank.
        threads: number of jobs that this rank does at a time.
        known: results that this rank has already; other ranks need not have them.
        finished: called as finished(name, result, own) in the calling thread of every rank, once for each job that was
            not known. own is True if this rank did the job.

        Raises what a job on this rank raises, and RankError if another rank failed or shares other jobs.
        """
        results = self.agree(names, known or {}, coded)
        waiting = [name for name in names if name not in results]

        def take(name: str, result: T, own: bool) -> None:
            results[name] = result
            if finished is not None:
                finished(name, result, own)

        if self.world == 1 and threads == 1:  # in the calling thread, so that an interrupt stops it
            for name in waiting:
                take(name, make(name), True)
        elif self.world == 1:
            with ThreadPoolExecutor(threads) as pool:
                jobs = {pool.submit(make, name): name for name in waiting}
                try:
                    for job in as_completed(jobs):
                        take(jobs[job], job.result(), True)
                finally:
                    pool.shutdown(wait=False, cancel_futures=True)
        else:
            self._share(waiting, make, coded, threads, take)
        return {name: results[name] for name in names}

    def _share(
        self,
        waiting: Sequence[str],
        make: Callable[[str], T],
        coded: Codec[T],
        threads: int,
        take: Callable[[str, T, bool], None],
    ) -> None:
        """Do jobs in threads, and pass the results of all ranks to `take` as they arrive."""
        board, left = self._board(), len(waiting)
        results: queue.SimpleQueue[tuple[str, T] | BaseException] = queue.SimpleQueue()
        stopped = Event()

        def work() -> None:
            try:
                while not stopped.is_set() and (number := board.claim()) < len(waiting):
                    result = make(waiting[number])
                    board.tell(waiting[number], result, coded)
                    results.put((waiting[number], result))
            except BaseException as error:
                results.put(error)

        with _reach():
            with ThreadPoolExecutor(threads) as pool:
                try:
                    for _ in range(min(threads, len(waiting))):
                        pool.submit(work)
                    while left:
                        with suppress(queue.Empty):
                            message = results.get(timeout=_POLL)
                            if isinstance(message, BaseException):
                                raise message
                            take(*message, True)
                            left -= 1
                        for name, content in board.news():
                            take(name, coded.read(name, content), False)
                            left -= 1
                finally:
                    stopped.set()
            board.close()  # after the last claim

    def agree(self, names: Sequence[str], known: Mapping[str, T], coded: Codec[T] = JSON) -> dict[str, T]:
        """Return on every rank the named results that any rank knows, in the order of the names."""
        if self.world == 1:
            return {name: known[name] for name in names if name in known}
        board = self._board()
        with _reach():
            results = board.agree(names, known, coded)
            board.close()
        return results

    def by_first(self, make: Callable[[], T], coded: Codec[T] = JSON) -> T:
        """Call `make` on rank 0, and return its result on all ranks."""
        if self.world == 1:
            return make()
        board = self._board()
        with _reach():
            if self.first:
                board.tell("it", result := make(), coded)
            else:
                ((_, content),) = board.wait_for(board.news)
                result = coded.read("it", content)
            board.close()
        return result

    def sum_in_order(self, count: int, make: "Callable[[int], Tensor]", like: "Tensor") -> "Tensor":
        """Return on all ranks the sum of `make(0)` to `make(count - 1)`, bit for bit the same for any number of ranks.

        Neighbours are added in pairs, then pairs of pairs, and so on. Each rank makes whole runs of neighbours, and the
        same runs in each call with the same count. make: returns new tensors with the shape, dtype and device of
        `like`. Raises RankError if another rank has ended.
        """
        size = 1  # length of a run, a power of two
        while size < count and -(-count // (2 * size)) >= self.world:
            size *= 2

        def total(first: int, length: int, values: "Callable[[int], Tensor]", end: int) -> "Tensor":
            if length == 1:
                return values(first)
            half = length // 2
            left = total(first, half, values, end)
            return left if first + half >= end else left.add_(total(first + half, half, values, end))

        totals: list[Tensor] = []
        runs = -(-count // size)
        for before in range(0, runs, self.world):
            run = before + self.rank
            own = total(run * size, size, make, count) if run < runs else like.new_zeros(like.shape)
            totals += self._gather(own)
        return total(0, 1 << (runs - 1).bit_length(), lambda run: totals[run], runs)

    def _gather(self, value: "Tensor") -> "list[Tensor]":
        """Return the tensors that all ranks pass here, in the order of the ranks."""
        if self.world == 1:
            return [value]
        from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo

        with _reach():
            if self._group is None:
                try:
                    self._group = ProcessGroupGloo(PrefixStore("gloo", self._store), self.rank, self.world, _WAITS)
                except RuntimeError as cause:
                    raise RankError(
                        f"Gloo cannot connect to the other processes of this job ({one_line(cause)}): name the network "
                        "interface in the environment variable GLOO_SOCKET_IFNAME"
                    ) from cause
            sent = value.cpu().contiguous()
            parts = [sent.new_empty(sent.shape) for _ in range(self.world)]
            try:
                self._group.allgather([parts], [sent]).wait()
            except RuntimeError as cause:  # Gloo only raises this if a connection fails
                raise RankError("another process of this job has failed") from cause
        return [part.to(value.device) for part in parts]

    def meet(self) -> None:
        """Wait for all ranks. Raises RankError if one has failed."""
        if self.world == 1:
            return
        board = self._board()
        with _reach():
            self._store.add(f"{board.key}/here", 1)
            board.wait_for(lambda: self._store.add(f"{board.key}/here", 0) == self.world)

    def fail(self, tell: Callable[[], int], *, alike: bool = False) -> int:
        """Report that this rank fails, and return the exit code of the job.

        tell: prints the reason and returns the exit code. Only the first rank that fails calls it; the others return
        the same code. alike: True if all ranks fail for the same reason, which rank 0 then reports.
        """
        if self.world == 1:
            return tell()
        with suppress(RuntimeError):  # the store may be gone already
            if self.first if alike else self._store.add("failing", 1) == 1:
                code = tell()
                self._store.set("failed", str(code).encode())
                return code
            deadline = time.monotonic() + _LAST_WORDS
            while not self._store.check(["failed"]) and time.monotonic() < deadline:
                time.sleep(_POLL)
            return int(self._store.get("failed")) if self._store.check(["failed"]) else 1
        return tell() if self.first else 1

    def _board(self) -> "_Board":
        return _Board(self._store, f"call{next(self._calls)}", self.rank, self.world)


ALONE = Ranks()


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise RankError(
            f"the environment variable {name} is {text!r}, not a whole number: start the job with `torchrun`, or "
            "unset it"
        )
    return int(text)


@contextmanager
def _reach() -> Iterator[None]:
    """Raise RankError instead of the error of a store that does not respond."""
    try:
        yield
    except RuntimeError as cause:
        if type(cause).__module__.startswith("torch.distributed"):
            raise RankError(f"the other processes of this job cannot be reached: {type(cause).__name__}") from cause
        raise


class _Board:
    """The messages between the ranks in one call of `Ranks`, under a key of their own in the job's store."""

    def __init__(self, store: Any, key: str, rank: int, world: int):
        self.key, self._store, self._rank, self._world = key, store, rank, world
        self._put_keys: list[str] = []
        self._read_count = 0  # number of results in the store that this rank has read
        self._own: set[str] = set()

    def agree(self, names: Sequence[str], known: Mapping[str, T], coded: Codec[T]) -> dict[str, T]:
        """Return the results that any rank knows before jobs are claimed; the same on every rank."""
        own = [name for name in names if name in known]
        self._put(f"rank{self._rank}", json.dumps([list(names), own]).encode())
        plans = [json.loads(self._await(f"rank{rank}")) for rank in range(self._world)]
        if any(plan != list(names) for plan, _ in plans):
            raise RankError(
                "the processes of this job do different work: start all of them with the same arguments, on machines "
                "with the same files and versions"
            )
        teller = {name: rank for rank, (_, plan) in reversed(list(enumerate(plans))) for name in plan}
        for name in (name for name in own if teller[name] == self._rank):
            self._put(f"known/{name}", coded.write(known[name]))
        reported = [name for name in names if name in teller]
        return {n: known[n] if n in known else coded.read(n, self._await(f"known/{n}")) for n in reported}

    def claim(self) -> int:
        """Return the number of the next job: each number once, over all ranks."""
        return int(self._store.add(f"{self.key}/claimed", 1)) - 1

    def tell(self, name: str, result: T, coded: Codec[T]) -> None:
        self._own.add(name)
        self._put(f"result/{name}", coded.write(result))
        number = self._store.add(f"{self.key}/told", 1) - 1
        self._put(f"told/{number}", name.encode())

    def news(self) -> list[tuple[str, bytes]]:
        """Return new results of other ranks. Raises RankError if a rank has failed."""
        self._check()
        begin, self._read_count = self._read_count, int(self._store.add(f"{self.key}/told", 0))
        names = [self._await(f"told/{number}").decode() for number in range(begin, self._read_count)]
        return [(name, self._await(f"result/{name}")) for name in names if name not in self._own]

    def wait_for(self, ready: Callable[[], T]) -> T:
        """Call `ready` until its result is true, and return it. Raises RankError if a rank has failed."""
        pause = _POLL / 32
        while not (answer := ready()):
            self._check()
            time.sleep(pause)
            pause = min(2 * pause, _POLL)
        return answer

    def close(self) -> None:
        """Delete this rank's keys from the store, once all ranks have read them."""
        self._store.add(f"{self.key}/read", 1)
        self.wait_for(lambda: self._store.add(f"{self.key}/read", 0) == self._world)
        for key in self._put_keys:
            self._store.delete_key(key)

    def _check(self) -> None:
        if self._store.check(["failed"]):
            raise RankError("another process of this job has failed")

    def _put(self, key: str, content: bytes) -> None:
        """Store bytes of any length in pieces. The number of pieces is stored last."""
        path, starts = f"{self.key}/{key}", range(0, len(content), _PIECE)
        pieces = {f"{path}/{number}": content[start : start + _PIECE] for number, start in enumerate(starts)}
        for name, piece in {**pieces, path: str(len(pieces)).encode()}.items():
            self._store.set(name, piece)
            self._put_keys.append(name)

    def _await(self, key: str) -> bytes:
        path = f"{self.key}/{key}"
        self.wait_for(lambda: self._store.check([path]))
        return b"".join(self._store.get(f"{path}/{number}") for number in range(int(self._store.get(path))))
