"""Progress bars, and how long a search takes before it is done."""

from types import SimpleNamespace

import pytest
import torch

from adalog.calibration.schedule import Resources, run_searches, units_of_work
from adalog.cli import console
from adalog.quantizers import Assignment


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the tests move."""
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: now.seconds))
    return now


def watched(at_once=1):
    with console.progress_bar() as progress:
        yield console.site_progress(progress, progress.add_task("capturing", total=1), "w4a4", at_once)


@pytest.mark.parametrize(
    ("seconds", "words"), [(6, ""), (30, "w4a4: about 4 minutes left\n"), (1500, "w4a4: about 3.8 hours left\n")]
)
def test_a_long_search_is_announced_after_its_first_site(clock, capsys, seconds, words):
    (watch,) = watched()
    for done in range(11):
        watch(done, 10, "site")
        clock.seconds += seconds
    assert capsys.readouterr().err == words


def test_searches_at_once_are_waited_for(clock, capsys):
    """Two searches that ran side by side for 60 s did two tenths of the work."""
    (watch,) = watched(at_once=2)
    watch(0, 10, "")
    clock.seconds = 60
    for done in (1, 2, 3):
        watch(done, 10, "")
    assert capsys.readouterr().err == "w4a4: about 4 minutes left\n"


def test_the_first_estimate_counts_sites_by_their_size(clock, capsys):
    """The largest sites come first. An estimate that counted sites alike would be 31 times too long."""
    sizes = {"large": 1 << 30, **{f"small {index}": 1 << 20 for index in range(63)}}
    groups = [SimpleNamespace(name=name) for name in sizes]

    def search(stack):
        clock.seconds += sum(units_of_work(sizes[group.name]) for group in stack) * 5.0
        return [Assignment(None, None)] * len(stack)

    (watch,) = watched()
    run_searches(
        [[[group] for group in groups]],
        search,
        Resources(progress=watch),
        known={},
        bytes_of=sizes,
        work_of={name: units_of_work(size) for name, size in sizes.items()},
        memory=1 << 30,
        device=torch.device("cpu"),
    )
    assert clock.seconds == 5 * (65 + 63)
    assert capsys.readouterr().err == "w4a4: about 5 minutes left\n"
