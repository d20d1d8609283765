"""Readers of the source are held back: by locked files, by keys of the store, and by what was measured."""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from shoal.comm.store import host_store
from shoal.data.stage.origin import FolderOrigin
from shoal.data.stage.staging import stage
from shoal.data.stage.turns import FolderTurns, NoTurns, StoreTurns, Turns, next_limit
from tests.data.stage.packs import differing, make_pack

TIMEOUT_S = 30.0


def settled(rate: Callable[[int], float]) -> int:
    """Return how many readers there are in the end, where so many together get `rate`."""
    limit, rates = 1, dict[int, float]()
    for _ in range(100):
        rates[limit] = rate(limit)
        limit = next_limit(limit, rates)
    return limit


def test_one_link_gets_one_reader_and_a_parallel_file_system_as_many_as_it_serves() -> None:
    assert settled(lambda count: 118e6) == 1
    assert settled(lambda count: min(count, 5) * 1e9) == 5
    assert settled(lambda count: count * 1e9) == 64
    assert settled(lambda count: 1e9 / count) == 1
    assert next_limit(3, {}) == 3


def folder_turns(tmp_path: Path) -> Callable[[str], Turns]:
    return lambda me: FolderTurns(tmp_path / ".readers")


def store_turns(tmp_path: Path) -> Callable[[str], Turns]:
    store, _ = host_store(host="127.0.0.1", timeout_s=TIMEOUT_S)
    return lambda me: StoreTurns(store, "a", me=me, silent_s=0.2)


@pytest.fixture(params=[folder_turns, store_turns])
def turns(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Turns]:
    made: Callable[[str], Turns] = request.param(tmp_path)
    return made


def test_one_reads_at_a_time_until_two_are_worth_it(turns: Callable[[str], Turns]) -> None:
    first, second = turns("1"), turns("2")
    with first.take(timeout_s=TIMEOUT_S) as turn:
        assert turn.number == 0
        with second.take(timeout_s=0.01) as none:
            assert none.number == -1  # waited long enough: reads without one
        turn.bytes_per_s = 100.0
    with first.take(timeout_s=TIMEOUT_S) as one, second.take(timeout_s=TIMEOUT_S) as other:
        assert sorted([one.number, other.number]) == [0, 1]
        other.bytes_per_s = 50.0  # each got half: the two are not worth it
    with first.take(timeout_s=TIMEOUT_S), second.take(timeout_s=0.01) as none:
        assert none.number == -1


def test_a_turn_is_free_again_after_an_error(turns: Callable[[str], Turns]) -> None:
    with pytest.raises(ZeroDivisionError), turns("1").take(timeout_s=TIMEOUT_S):
        raise ZeroDivisionError
    with turns("2").take(timeout_s=TIMEOUT_S) as turn:
        assert turn.number == 0


def test_the_turn_of_a_silent_reader_is_taken_and_that_of_a_slow_one_is_not(tmp_path: Path) -> None:
    made = store_turns(tmp_path)
    with made("silent").take(timeout_s=TIMEOUT_S), made("next").take(timeout_s=TIMEOUT_S) as turn:
        assert turn.number == 0
    ended = threading.Event()
    with made("slow").take(timeout_s=TIMEOUT_S) as slow:
        slow._last_s = 0.0  # type: ignore[attr-defined]

        def beat() -> None:
            while not ended.wait(0.02):
                slow._last_s = 0.0  # type: ignore[attr-defined]
                slow.beat()

        thread = threading.Thread(target=beat)
        thread.start()
        with made("next").take(timeout_s=0.6) as turn:
            assert turn.number == -1
        ended.set()
        thread.join(TIMEOUT_S)


def test_files_of_turns_are_removed_when_nobody_reads(tmp_path: Path) -> None:
    first, second = FolderTurns(tmp_path / ".readers"), FolderTurns(tmp_path / ".readers")
    with first.take(timeout_s=TIMEOUT_S):
        second.close()
        assert (tmp_path / ".readers").exists()
    first.close()
    assert not (tmp_path / ".readers").exists()
    with NoTurns().take(timeout_s=0) as turn:
        assert turn.number == 0


def test_nodes_that_cannot_reach_each_other_read_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_pack(tmp_path / "a.pack", part_bytes=1_000_000)
    monkeypatch.setattr("shoal.data.stage.turns.next_limit", lambda limit, rates: 1)
    lock, readers, most = threading.Lock(), 0, 0

    class Counted(FolderOrigin):
        def open(self, name: str) -> Any:
            opened = super().open(name)

            class Both:
                def __enter__(self) -> Any:
                    nonlocal readers, most
                    with lock:
                        readers += name != "manifest.json"
                        most = max(most, readers)
                    return opened.__enter__()

                def __exit__(self, *error: Any) -> None:
                    nonlocal readers
                    with lock:
                        readers -= name != "manifest.json"
                    opened.__exit__(*error)

            return Both()

    monkeypatch.setattr("shoal.data.stage.origin.FolderOrigin", Counted)
    with ExitStack() as opened:
        homes = [tmp_path / f"node{index}" for index in range(4)]
        nodes = [opened.enter_context(stage(tmp_path / "a.pack", to=home, desk=home / "desk")) for home in homes]
        for node in nodes:
            node.wait(timeout_s=TIMEOUT_S)
            assert differing(node.path, tmp_path / "a.pack") == []
    assert most == 1
    assert not (tmp_path / "a.pack" / ".readers").exists()
