"""Real workers that come to stand still: what is said names the worker and the line. See benchmarks/hangs.py."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from benchmarks.hangs import CAUSES, Workers, hang, is_right, started
from shoal.comm.rank import Rank
from shoal.comm.store import connect
from shoal.core.errors import PeerLost
from shoal.fault.watch import Pace, watched
from tests.support.ranks import RankPool

HANG_S = 3.0
"""Less than people get, so that tests are short."""

CASES = {cause.name: cause for cause in CAUSES}


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    """Have the process that forks workers."""
    with started() as process:
        yield process


@pytest.mark.parametrize(
    "name",
    ["dataset sleeps", "C holds Python's lock", "SIGSTOP", "extra collective", "another shape", "process has ended"],
)
def test_a_hang_is_said_with_the_worker_and_the_line(name: str, workers: Workers, tmp_path: Path) -> None:
    found = hang(workers, CASES[name], tmp_path, hang_s=HANG_S)
    assert is_right(found["said"], CASES[name]), found["said"]


def in_vain(rank: Rank, *, numbers: tuple[int, ...] = ()) -> str:
    """Return what those who wait for the first raise, in a group with a short timeout. Runs in the pool."""
    import torch

    from shoal.comm.calls import CALLS
    from shoal.comm.group import barrier, joined

    store = connect(rank, timeout_s=60)
    rank = replace(rank, numbers=numbers)
    try:
        with (
            joined(rank, store, device=torch.device("cpu"), timeout_s=6),
            watched(store, rank, timeout_s=6, silent_s=3),
        ):
            CALLS.step = 1
            if rank.index == 0:
                store.wait(["raised 1", "raised 2"], timedelta(seconds=60))
            barrier()
    except PeerLost as error:
        store.set(f"raised {rank.index}", "")
        return str(error)
    except RuntimeError:
        return "its own"
    return "nothing"


@pytest.mark.parametrize("numbers", [(), (4, 5, 7)], ids=["from the start", "after a loss"])
def test_after_the_groups_timeout_the_sentence_is_the_error(numbers: tuple[int, ...], ranks: RankPool) -> None:
    _, one, two = ranks.run(in_vain, workers=3, numbers=numbers)
    assert one == two
    assert one.startswith(f"worker {4 if numbers else 0} is in test_watch.py:")
    assert "the others wait in barrier #1" in one


def test_the_usual_step_is_a_median_and_stillness_counts_from_the_last_move() -> None:
    pace = Pace()
    assert pace.look((1,), 0) == 0.0
    assert pace.step_s is None
    pace.look((2,), 1)
    assert pace.look((3,), 11) == 0.0
    assert pace.step_s is not None
    assert pace.look((3,), 11) >= 0.0
