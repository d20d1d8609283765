"""The mode "deadline" with real processes: what it trains is what one process computes from who brought what."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks import RankPool
from tests.sync.deadline_worker import SIZES, Notes, caught_up, replayed, train

WORKERS = 4
SLOW = 3


def check_same_at_boundaries(notes: list[Notes], boundaries: tuple[int, ...]) -> None:
    """All hold the same bits after a boundary, and at the end, whoever was late before."""
    for of in notes:
        assert sorted(of.at_boundaries) == sorted(boundaries)
        for step, state in of.at_boundaries.items():
            assert all(map(torch.equal, state, notes[0].at_boundaries[step])), f"step {step}"
        assert all(map(torch.equal, of.state, notes[0].state))
        assert of.lr == notes[0].lr


def check_replayed(notes: list[Notes], steps: int, *, late: str, width: int = 6) -> None:
    """One process comes to the same parameters, losses and weights."""
    parameters, losses, weights = replayed(notes, steps, late=late, width=width)
    for found, expected in zip(notes[0].state, parameters, strict=False):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    for of in notes:
        for _, met in of.brought:
            step = met.next_step - 1
            assert met.loss == pytest.approx(losses[step - 1], rel=1e-9)
            assert met.weight == weights[step - 1]
            assert met.weight == sum(SIZES[worker] for worker in met.took_part)


def play(ranks: RankPool, folder: Path, *, steps: int, boundaries: tuple[int, ...], **story: Any) -> list[Notes]:
    notes: list[Notes] = ranks.run(train, workers=WORKERS, folder=folder, steps=steps, boundaries=boundaries, **story)
    check_same_at_boundaries(notes, boundaries)
    check_replayed(notes, steps, late=story["sync"].get("late", "add"), width=story.get("width", 6))
    return notes


@pytest.mark.parametrize("sync", [{"deadline_s": 30.0}, {"quorum": 4}, {"quorum": 4, "way": "naive"}])
def test_when_all_are_in_time_it_is_the_mean_over_the_global_batch(
    ranks: RankPool, tmp_path: Path, sync: dict[str, Any]
) -> None:
    notes = play(ranks, tmp_path, sync=sync, steps=10, boundaries=(10,))
    for of in notes:
        assert [meant for meant, _ in of.brought] == list(range(1, 11))
        assert all(met.took_part == (0, 1, 2, 3) and met.staleness == 0 for _, met in of.brought)
        assert sum(met.weight for _, met in of.brought) == 10 * sum(SIZES)


@pytest.mark.parametrize("late", ["add", "drop"])
@pytest.mark.parametrize("sync", [{"quorum": 3}, {"deadline_s": 0.2}])
def test_one_that_is_always_late_does_not_hold_up_the_others(
    ranks: RankPool, tmp_path: Path, sync: dict[str, Any], late: str
) -> None:
    boundaries = (6, 14)
    notes = play(ranks, tmp_path, sync={**sync, "late": late}, steps=14, boundaries=boundaries, lags={SLOW: 2})
    slow = notes[SLOW].brought
    was_late = [met for _, met in slow if met.staleness > 0]
    assert was_late
    assert len(caught_up(tmp_path, SLOW)) == len(was_late)
    for met in was_late:
        assert (SLOW in met.took_part) == (late == "add")
    for of in notes[:SLOW]:  # while nobody waits for it, all others are in time where they have time
        assert any(SLOW not in met.took_part for _, met in of.brought)
    at_boundaries = [met for of in notes for _, met in of.brought if met.next_step - 1 in boundaries]
    assert len(at_boundaries) == WORKERS * len(boundaries)


def test_a_boundary_waits_for_one_that_is_slow(ranks: RankPool, tmp_path: Path) -> None:
    boundaries = (1, 2, 3)
    sync = {"deadline_s": 0.01}
    notes = play(ranks, tmp_path, sync=sync, steps=3, boundaries=boundaries, sleeps={SLOW: 0.1})
    for of in notes:
        assert all(met.took_part == (0, 1, 2, 3) for _, met in of.brought)


def test_by_itself_it_goes_on_without_one_that_is_much_slower_than_the_others(ranks: RankPool, tmp_path: Path) -> None:
    sleeps = {0: 0.02, 1: 0.02, 2: 0.02, SLOW: 0.4}
    notes = play(ranks, tmp_path, sync={}, steps=30, boundaries=(30,), sleeps=sleeps)
    first = [met.took_part for _, met in notes[0].brought[:3]]
    assert first == [(0, 1, 2, 3)] * 3  # how long a step takes is not known yet
    assert any(met.staleness > 0 for _, met in notes[SLOW].brought)
    assert len(notes[SLOW].brought) < 30


def test_a_state_of_many_pieces_leaves_while_its_sender_computes(ranks: RankPool, tmp_path: Path) -> None:
    width = 40_000  # 6 * 8 * 40,000 bytes of parameters: some pieces of a message, and a ring
    story: dict[str, Any] = {"lags": {SLOW: 2}, "pause_s": 0.1}  # a step takes less: its sender has the next one ready
    notes = play(ranks, tmp_path, sync={"quorum": 3}, steps=12, boundaries=(12,), width=width, **story)
    assert any(met.staleness > 0 for _, met in notes[SLOW].brought)
    assert all(event["bytes"] > 3 * 6 * 8 * width for event in caught_up(tmp_path, SLOW))


def test_a_worker_alone_trains_as_one_process(ranks: RankPool, tmp_path: Path) -> None:
    notes = ranks.run(train, workers=1, folder=tmp_path, steps=5, boundaries=(5,), sync={})
    check_replayed(notes, 5, late="add")
