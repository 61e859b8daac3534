"""Ranks of one job share out work: each job is done once, all get the same results, and who fails ends all."""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed import DistNetworkError, HashStore

import adalog
from adalog import Calibration, Config, Resources
from adalog.calibration.partial import Partial
from adalog.choices import Correction, Reconstruction
from adalog.cli import main
from adalog.errors import RankError
from adalog.quantizers import Assignment
from adalog.ranks import _PIECE, Codec, Ranks
from adalog.study.evaluate import Contest, PreparedImages
from adalog.study.sensitivity import sensitivity
from commands import call, forked, run, write_images
from stored import serialise
from toys import BRIEF


def together(work, world=2, store=None):
    """What `work` gives for each rank of a job, whose ranks are threads."""
    store = store or HashStore()
    with ThreadPoolExecutor(world) as pool:
        jobs = [pool.submit(work, Ranks(store, rank, world)) for rank in range(world)]
        return [job.result() for job in jobs]


# --- work that is shared out -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world", "threads"), [(1, 1), (1, 3), (2, 1), (3, 2)])
def test_each_job_is_done_once_and_all_get_its_result(world, threads):
    names = [f"job {number}" for number in range(20)]
    done, lock = [], threading.Lock()

    def make(name):
        with lock:
            done.append(name)
        time.sleep(0.002)
        return {"of": name, "number": 0.1 * len(done)}

    def work(ranks):
        told = []
        found = ranks.share(names, make, threads=threads, finished=lambda *each: told.append(each))
        again = ranks.share(names, make, known=found)  # what is known needs nobody
        return found, again, told

    results = together(work, world)
    assert sorted(done) == sorted(names)
    for found, again, told in results:
        assert found == again == results[0][0]
        assert list(found) == names
        assert {name: result for name, result, _ in told} == found
        assert len(told) == len(names)
    owners = [[name for name, _, own in told if own] for _, _, told in results]
    assert sorted(itertools.chain(*owners)) == sorted(names)


def test_jobs_are_claimed_in_their_order_as_ranks_are_free():
    """One rank is busy with the first job, so the other one does all the rest."""
    other_has_all, claimed = threading.Event(), []

    def work(ranks):
        def make(name):
            claimed.append((ranks.rank, name))
            if name == "first":
                assert other_has_all.wait(10)
            elif name == "fourth":
                other_has_all.set()
            return 1

        return ranks.share(["first", "second", "third", "fourth"], make)

    assert together(work) == [dict.fromkeys(["first", "second", "third", "fourth"], 1)] * 2
    slow = next(rank for rank, name in claimed if name == "first")
    assert [name for rank, name in claimed if rank != slow] == ["second", "third", "fourth"]


def test_what_any_rank_knows_is_done_by_none():
    def work(ranks):
        known = {f"of {ranks.rank}": ranks.rank, "of both": 9}
        return ranks.share(["of both", "of 1", "of 0", "new"], lambda name: name, known=known)

    assert together(work) == [{"of both": 9, "of 1": 1, "of 0": 0, "new": "new"}] * 2


def test_large_results_and_none_travel_whole():
    content = random.Random(0).randbytes(2 * _PIECE + 5)
    coded = Codec(lambda value: value, lambda name, value: value)
    payloads = {"large": content, "none": b"", "a piece": content[:_PIECE]}
    assert together(lambda ranks: ranks.by_first(lambda: content, coded)) == [content] * 2
    assert together(lambda ranks: ranks.share(list(payloads), payloads.get, coded=coded)) == [payloads] * 2


def test_results_leave_the_store_once_all_have_read_them():
    store = HashStore()
    together(lambda ranks: ranks.share(["a", "b"], str), store=store)
    assert store.num_keys() == 4  # counters


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8])
def test_sums_have_the_same_bits_on_any_number_of_ranks(count):
    """Of numbers whose sum depends on the order; each is made once."""
    values = (
        10.0 ** torch.arange(count)[:, None] * torch.rand(count, 5, generator=torch.Generator().manual_seed(0))
    ).sin()

    def summed(ranks):
        made = []

        def make(number):
            made.append(number)
            return values[number].clone()

        return ranks.sum_in_order(count, make, values[0]), made

    wanted, order = summed(Ranks())
    assert order == list(range(count))
    torch.testing.assert_close(wanted, values.sum(0))
    for world in (2, 3, 5):
        results = together(summed, world)
        assert all(torch.equal(found, wanted) for found, _ in results)
        assert sorted(itertools.chain(*(made for _, made in results))) == order
        assert sum(bool(made) for _, made in results) >= min(world, count) - 1  # all that can be busy, but for one


def test_all_meet():
    arrived = []

    def work(ranks):
        time.sleep(0.05 * ranks.rank)
        arrived.append(ranks.rank)
        ranks.meet()
        return sorted(arrived)

    assert together(work, 3) == [[0, 1, 2]] * 3


# --- failures --------------------------------------------------------------------------------------------------------


def test_who_fails_says_why_and_ends_all():
    said = []

    def tell(rank):
        time.sleep(0.05)
        said.append(rank)
        return 2

    def work(ranks):
        try:
            if ranks.rank == 1:
                raise ValueError("odd")
            ranks.share(["one", "two"], lambda name: time.sleep(0.01), known=None)
        except (ValueError, RankError) as error:
            return type(error), ranks.fail(lambda: tell(ranks.rank))

    assert together(work) == [(RankError, 2), (ValueError, 2)]
    assert said == [1]


def test_an_error_in_a_job_ends_its_rank_and_then_the_others():
    def work(ranks):
        def make(name):
            if name == "bad":
                raise ArithmeticError(name)
            return name

        try:
            ranks.share(["good", "bad", "third"], make)
        except (ArithmeticError, RankError) as error:
            return type(error), ranks.fail(lambda: 1)

    found = together(work)
    assert {kind for kind, _ in found} == {ArithmeticError, RankError}
    assert [code for _, code in found] == [1, 1]


def test_what_all_ranks_refuse_is_said_by_the_first():
    said = []
    codes = together(lambda ranks: ranks.fail(lambda: said.append(ranks.rank) or 2, alike=True), 3)
    assert (codes, said) == ([2, 2, 2], [0])


def test_ranks_that_do_different_work_are_told_so():
    def work(ranks):
        with pytest.raises(RankError, match="different work: start all of them with the same arguments"):
            ranks.share([f"of {ranks.rank}"], str)
        return True

    assert together(work) == [True, True]


class Gone:
    """A store whose server has ended."""

    def __getattr__(self, name):
        def fail(*arguments):
            raise DistNetworkError("Broken pipe")

        return fail


def test_a_store_that_is_gone():
    ranks = Ranks(Gone(), 0, 2)
    for work in (ranks.meet, lambda: ranks.by_first(str), lambda: ranks.share(["x"], str)):
        with pytest.raises(RankError, match="the other processes of this job cannot be reached"):
            work()
    assert ranks.fail(lambda: 7) == 7
    assert Ranks(Gone(), 1, 2).fail(lambda: 7) == 1


def test_an_interface_that_is_not_there_is_told(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")

    def work(ranks):
        with pytest.raises(RankError, match=r"Gloo cannot connect .* in the environment variable GLOO_SOCKET_IFNAME"):
            ranks.sum_in_order(2, lambda number: torch.ones(3), torch.ones(3))
        return True

    assert together(work) == [True, True]


def test_alone_where_no_launcher_says_otherwise(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    assert (Ranks.of_environment().world, Ranks.of_environment().first) == (1, True)
    monkeypatch.setenv("WORLD_SIZE", "4")  # someone else's
    assert Ranks.of_environment().world == 1
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert Ranks.of_environment().restarts == 2


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        *((name, "two", "'two', not a whole number") for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_PORT")),
        ("WORLD_SIZE", "0", "0"),
    ],
)
def test_variables_that_are_no_numbers_are_named(monkeypatch, name, value, told):
    for each in ("RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(each, "2")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv(name, value)
    with pytest.raises(RankError, match=f"the environment variable {name} is {told}: start the job with `torchrun`"):
        Ranks.of_environment()


# --- the work of the library -----------------------------------------------------------------------------------------


RECONSTRUCTION = Reconstruction(images=24, iterations=4, batch=8)


@pytest.mark.usefixtures("captured_once")
@pytest.mark.parametrize(
    "stages",
    [
        (),
        pytest.param((Correction(images=4),), marks=pytest.mark.slow),
        pytest.param((Correction(images=24), RECONSTRUCTION), marks=pytest.mark.slow),
        pytest.param((replace(RECONSTRUCTION, loss="low-rank"),), marks=pytest.mark.slow),
        pytest.param((replace(RECONSTRUCTION, scope="model", loss="output"),), marks=pytest.mark.slow),
    ],
)
def test_quantize_gives_the_same_bytes(tmp_path, tiniest, images, stages):
    config = Config(images=4, search=BRIEF, stages=stages)
    unlabelled = torch.randn(24, *images.shape[1:], generator=torch.Generator().manual_seed(1))
    unlabelled[:4] = images[:4]
    alone, *calibrations = (Calibration(tiniest, images, unlabelled=unlabelled) for _ in range(3))
    path, wanted = tmp_path / "partial", serialise(alone.quantize(config))

    def work(ranks):
        return serialise(calibrations[ranks.rank].quantize(config, Resources(ranks=ranks, partial=path)))

    assert together(work) == [wanted] * 2
    files = [path, path.with_name("partial.rank1")]
    names = [json.loads(line)["name"] for file in files for line in file.read_text().splitlines()[1:]]
    assert len(names) == len(set(names))
    assert len(files[1].read_text().splitlines()) > 1


def test_every_rank_reads_what_any_rank_has_finished(tmp_path):
    path = tmp_path / "partial"
    for rank in range(3):
        Partial(path, "these", rank).add(f"of {rank}", Assignment(None, None, None, float(rank)))
    for rank in (None, 0, 1, 7):
        read = Partial(path, "these") if rank is None else Partial(path, "these", rank)
        assert [read.get(f"of {each}").sqnr for each in range(3)] == [0.0, 1.0, 2.0]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["partial", "partial.rank1", "partial.rank2"]
    (tmp_path / "partial.rank1").write_text('{"searches": "others"}\n')
    with pytest.raises(adalog.DataError, match=r"partial\.rank1 holds searches of another model"):
        Partial(path, "these")


@pytest.mark.slow
@pytest.mark.usefixtures("captured_once")
def test_sensitivity_and_answers_are_the_same(tmp_path, tiniest, images):
    config = Config(images=4, search=BRIEF, stages=())
    judged = torch.randn(50, 3, 32, 32, generator=torch.Generator().manual_seed(5))
    labels = torch.randint(0, 10, (50,), generator=torch.Generator().manual_seed(6))
    calibrations = [Calibration(tiniest, images) for _ in range(3)]
    other = calibrations[0].quantize(config)

    def work(ranks):
        resources = Resources(ranks=ranks, partial=tmp_path / f"of{ranks.world}")
        rows = sensitivity(calibrations[ranks.rank], config, [judged[:8]], (4, 8), resources)
        return rows, Contest([other, tiniest], [False, False]).tallies(PreparedImages(judged), labels, resources)

    alone = work(Ranks())
    assert together(work, 2) == [alone] * 2
    assert together(work, 3) == [alone] * 3


# --- commands under torchrun -----------------------------------------------------------------------------------------

OWN = """
import os, torch, adalog
from adalog.inputs.demo.model import DemoViT

def model():
    torch.manual_seed(0)
    return DemoViT(width=32, depth=2, heads=2).eval(), adalog.Preprocessing((32, 32), (32, 32))

def odd():
    if os.environ["RANK"] == "1":
        raise ValueError("no such weights here")
    return model()
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model and images."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "own.py").write_text(OWN)
    write_images(folder / "images", {f"{number:02}.png": 0 for number in range(32)})
    return folder


def cut_short():
    """A brief search, and a reconstruction of ten steps a block."""
    preset = Config.preset

    def short(*given):
        config = preset(*given)
        stages = (replace(one, iterations=10) if isinstance(one, Reconstruction) else one for one in config.stages)
        return replace(config, search=BRIEF, stages=tuple(stages))

    Config.preset = staticmethod(short)


def take_a_rank():
    """Run the command line as a rank that a launcher has forked, and leave the process's id in a file."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the launcher has a handler of its own
    Path(f"rank{os.environ['RANK']}").write_text(str(os.getpid()))
    main()


def launch():
    """Do what `torchrun --standalone --nproc-per-node=2 --max-restarts=3` does, with ranks that are forked.

    Its own would import PyTorch at each start, for most of the test's time.
    """
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    place = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "run_id": "job"}
    elastic_launch(LaunchConfig(1, 1, 2, max_restarts=3, start_method="fork", **place), take_a_rank)()


@pytest.mark.slow
def test_killed_ranks_are_started_again_and_the_file_is_the_same(place):
    """The second rank is killed during the search, and the first one, which writes, while a later block is trained."""
    options = ("--data", "images", "--method", "qdrop", "--bits", "w3a3", "--reconstruct-images", 16, "--threads", 1)
    arguments = ("quantize", "own.py:model", *options)
    told = run(*arguments, "-o", "one.st", cwd=place, prepare=cut_short).splitlines()

    def finished(what):
        return sum(path.read_bytes().count(what) for path in place.glob("two.st.partial*"))

    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(forked, *arguments, "-o", "two.st", main=launch, cwd=place, prepare=cut_short)
        for what, count, rank in ((b"\n", 3, 1), (b"reconstruction of", 5, 0)):
            while not job.done() and finished(what) < count:
                time.sleep(0.02)
            with suppress(ProcessLookupError):
                os.kill(int((place / f"rank{rank}").read_text()), signal.SIGKILL)
        code, output, errors = job.result()
    assert code == 0, errors
    assert (place / "two.st").read_bytes() == (place / "one.st").read_bytes()
    assert output.splitlines()[:-1] == told[:-1]  # the last line has the seconds
    assert not list(place.glob("*.partial*"))


@pytest.mark.slow
def test_an_error_of_one_rank_is_one_line_and_leaves_no_file(place):
    """Under `torchrun` itself."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "adalog"]
    arguments = ["quantize", "own.py:odd", "--data", "images", "-o", "odd.st"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"}
    how = {"capture_output": True, "text": True, "cwd": place, "env": environment, "timeout": 300}
    process = subprocess.run([*launcher, *arguments], check=False, **how)
    assert process.returncode == 1  # the launcher's own; the ranks end with 2
    assert process.stdout == ""
    assert process.stderr.count("no such weights here") == 1
    assert "exitcode  : 2" in process.stderr
    assert not list(place.glob("odd.st*"))


def test_commands_for_one_process_say_so(monkeypatch, capsys):
    monkeypatch.setattr(Ranks, "expected_size", lambda: 2)
    monkeypatch.setattr(Ranks, "of_environment", lambda: pytest.fail("it waits for others"))
    told = (
        "error: inspect runs as one process: start it without torchrun, which only supports quantize, evaluate, "
        "sensitivity, pareto\n"
    )
    assert call(monkeypatch, capsys, "inspect", "some.safetensors") == (2, told)
    monkeypatch.setenv("RANK", "1")
    assert call(monkeypatch, capsys, "inspect", "some.safetensors") == (2, "")  # one line for all of them
