"""benchmarks/peer_lost.py says when survivors do not do what they should; what they do is tested in test_alive.py."""

from typing import Any

import pytest

from benchmarks.peer_lost import VICTIM, verdict
from benchmarks.peer_lost_worker import IN_MEMORY, OVER_LINKS, TIMEOUT_S
from shoal.comm.algorithms import ALL_GATHER, ALL_REDUCE, BROADCAST, REDUCE_SCATTER

SILENT = f"worker {VICTIM} (h3) has been silent for 3.0 s."


def end(*, kind: str = "PeerLost", text: str = SILENT, at_s: float = 104.0) -> dict[str, Any]:
    return {"worker": 0, "type": kind, "text": text, "at_s": at_s}


def test_all_who_name_the_lost_one_in_time_are_ok() -> None:
    assert verdict([end(), end(at_s=103.0), end()], 100.0) == {"ok": True, "seconds": 4.0, "named": SILENT}


@pytest.mark.parametrize(
    ("wrong", "shown"),
    [
        ({"text": "worker 1 (h2) has been silent for 3.0 s."}, "PeerLost: worker 1"),
        ({"text": f"worker {VICTIM}1 (h3) has been silent."}, f"PeerLost: worker {VICTIM}1"),
        ({"kind": "RuntimeError", "text": "Connection closed by peer"}, "RuntimeError: Connection closed"),
        ({"at_s": 100.1 + TIMEOUT_S}, SILENT),
    ],
)
def test_one_who_blames_another_or_comes_late_is_not_ok(wrong: dict[str, Any], shown: str) -> None:
    found = verdict([end(), end(**wrong), end()], 100.0)
    assert not found["ok"]
    assert found["named"].startswith(shown)


def test_one_who_says_nothing_is_not_ok() -> None:
    assert "1 of 3 survivors said nothing" in verdict([end(), end()], 100.0)["named"]


def test_every_collective_is_there() -> None:
    assert len(IN_MEMORY) == 4
    kinds: dict[str, Any] = {
        "all-reduce": ALL_REDUCE,
        "broadcast": BROADCAST,
        "reduce-scatter": REDUCE_SCATTER,
        "all-gather": ALL_GATHER,
    }
    for kind, algorithms in kinds.items():
        assert {f"{kind}, {name}" for name in algorithms} <= set(OVER_LINKS)
