"""A worker that is stopped, or killed, under the mode "deadline"."""

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from shoal.comm.rank import Rank
from shoal.core.errors import PeerLost
from tests.support.ranks import RankPool
from tests.sync.deadline_worker import Notes, caught_up, train
from tests.sync.test_deadline import SLOW, check_replayed, check_same_at_boundaries


@pytest.mark.parametrize("sync", [{"quorum": 3}, {"deadline_s": 0.05}])
def test_a_stopped_worker_is_left_behind_and_catches_up(
    ranks: RankPool, tmp_path: Path, sync: dict[str, float]
) -> None:
    boundaries = (6, 16)  # after step 6 all are alike
    stops = (SLOW, 7, 11)
    notes = ranks.run(train, workers=4, folder=tmp_path, sync=sync, steps=16, boundaries=boundaries, stops=stops)
    check_same_at_boundaries(notes, boundaries)
    check_replayed(notes, 16, late="add")
    meant, met = next((meant, met) for meant, met in notes[SLOW].brought if meant == 7)
    assert met.staleness >= 5  # it was continued after step 11
    assert met.next_step - 1 == meant + met.staleness
    assert met.next_step - 1 in [event["step"] for event in caught_up(tmp_path, SLOW)]


STOPPING = """
import os, random, select, signal, sys, time
chance = random.Random(int(sys.argv[2]))
while not select.select([sys.stdin], [], [], chance.uniform(0.001, 0.05))[0]:
    os.kill(int(sys.argv[1]), signal.SIGSTOP)
    time.sleep(chance.uniform(0.001, 0.1))
    os.kill(int(sys.argv[1]), signal.SIGCONT)
"""


def stopped_at_random(rank: Rank, *, folder: Path, seed: int) -> Notes:
    """Train while this process, if it is the slow one, is stopped and continued at random moments by another."""
    stopping = [sys.executable, "-S", "-c", STOPPING, str(os.getpid()), str(seed)]
    with subprocess.Popen(stopping, stdin=subprocess.PIPE) if rank.index == SLOW else nullcontext():
        return train(rank, sync={"deadline_s": 0.02}, steps=60, boundaries=(30, 60), folder=folder)
    # Leaving the block closes its input, upon which it ends, and does not leave this process stopped.


def test_stopped_at_random_moments_it_ends_where_the_others_do(ranks: RankPool, tmp_path: Path) -> None:
    notes = ranks.run(stopped_at_random, workers=4, folder=tmp_path, seed=1)
    check_same_at_boundaries(notes, (30, 60))
    check_replayed(notes, 60, late="add")


def until_lost(rank: Rank, *, folder: Path) -> None:
    """Train until another is lost, and write down what is raised."""
    try:
        train(rank, sync={"quorum": 2}, steps=10**6, boundaries=(10**6,), folder=folder, kills=(2, 5), silent_s=8.0)
    except PeerLost as error:
        (folder / f"lost {rank.index}").write_text(str(error))


def test_all_others_raise_peer_lost_when_one_is_killed(tmp_path: Path) -> None:
    RankPool(dying=[2]).run(until_lost, workers=3, folder=tmp_path)
    found = {path.name: path.read_text() for path in tmp_path.glob("lost *")}
    assert sorted(found) == ["lost 0", "lost 1"]
    assert all(text.startswith("worker 2 (") for text in found.values())
