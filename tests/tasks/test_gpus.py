"""GPUs of workers, by fake lists: each sees its part, and who takes the place of another sees the same."""

from pathlib import Path

import pytest

from shoal.tasks.bunch import Room, at_once
from shoal.tasks.executor import Executor
from shoal.tasks.gpus import VARIABLE, gpus_of, visible_gpus
from tests.tasks import work


@pytest.mark.parametrize(
    ("gpus", "workers", "parts"),
    [
        ("0,1,2,3", 4, ["0", "1", "2", "3"]),
        ("0,1,2,3", 2, ["0,1", "2,3"]),
        ("0,1,2,3", 3, ["0,1", "2", "3"]),
        ("4,6", 5, ["4", "6", "4", "6", "4"]),
        ("GPU-8a,GPU-9b", 2, ["GPU-8a", "GPU-9b"]),
        ("0,1", 1, [None]),
        ("", 3, [None, None, None]),
    ],
)
def test_gpus_are_dealt_out(gpus: str, workers: int, parts: list[str | None]) -> None:
    dealt = gpus_of(visible_gpus({VARIABLE: gpus}), workers)
    assert [each.get(VARIABLE) for each in dealt] == parts


def test_without_a_list_all_gpus_of_the_machine_are_visible(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == ["0", "1"]
    assert visible_gpus({VARIABLE: ""}, tmp_path) == []


def test_tasks_fit_gpus_and_not_only_their_memory_together() -> None:
    node = Room(cores=64, gpu_memory_bytes=320e9, gpus=4)
    fitting = {each: at_once(node, Room(gpu_memory_bytes=each * 1e9)) for each in (25, 50, 80, 100, 320)}
    assert fitting == {25: 12, 50: 4, 80: 4, 100: 2, 320: 1}
    assert at_once(node, Room()) == 4  # one each where nothing is said
    assert at_once(Room(cores=64, gpu_memory_bytes=80e9), Room(gpu_memory_bytes=20e9)) == 4


def test_each_worker_sees_its_gpus_also_after_another_has_died(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VARIABLE, "5,7")
    with Executor(2) as pool:
        list(pool.map(work.die_once, [(str(tmp_path), number) for number in range(10)]))
        seen = set(pool.map(work.gpus_and_process, [0.02] * 40))
    assert len(seen) == 2
    assert {gpus for gpus, _ in seen} == {"5", "7"}
