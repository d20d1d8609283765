"""Bunching: what is measured, how many tasks a node runs at once, how many jobs there are, and what each takes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.errors import ConfigError
from shoal.tasks.bunch import (
    BUNCH_S,
    Room,
    at_once,
    pack,
    plan_jobs,
    predict,
    refuse_many_jobs,
    reordered,
    shares,
    spread,
)


def test_the_first_tasks_are_spread() -> None:
    assert spread(100, 4) == [12, 37, 62, 87]
    assert spread(3, 8) == [0, 1, 2]
    assert spread(1, 1) == [0]


def test_times_are_predicted_by_the_mean_or_by_size() -> None:
    assert predict({0: 1.0, 5: 3.0}, [1, 2]) == {1: 2.0, 2: 2.0}
    sizes = [10.0, 0.0, 50.0, 0.0, 0.0, 30.0]
    assert predict({0: 1.0, 5: 3.0}, [1, 2], sizes) == {1: 0.0, 2: 5.0}


def test_a_node_runs_as_many_as_cores_memory_and_gpu_memory_allow() -> None:
    node = Room(cores=64, memory_bytes=256e9, gpu_memory_bytes=80e9)
    assert at_once(node, Room(cores=2)) == 32
    assert at_once(node, Room(cores=2, memory_bytes=10e9)) == 25
    assert at_once(node, Room(cores=2, memory_bytes=10e9, gpu_memory_bytes=20e9)) == 4
    assert at_once(Room(cores=4), Room(memory_bytes=1e9)) == 4  # nobody knows the node's memory
    with pytest.raises(
        ConfigError, match=r"a task needs 65 cores, and a node has 64 cores, 256 GB of memory, 80 GB of"
    ):
        at_once(node, Room(cores=65))


def test_jobs_last_some_minutes_unless_the_site_takes_fewer() -> None:
    assert plan_jobs(90_000.0, 1.0, 90_000, width=8, most_jobs=200).jobs == 25
    plan = plan_jobs(3_000_000.0, 30.0, 100_000, width=8, most_jobs=200)
    assert plan.jobs == 200
    assert plan.time_s >= 3_000_000 / 8 / 200 * 1.5


def test_little_work_is_one_job_unless_more_at_once_is_wanted() -> None:
    assert plan_jobs(100.0, 0.02, 5000, width=2, most_jobs=200).jobs == 1
    assert plan_jobs(100.0, 0.02, 5000, width=2, most_jobs=200, wanted_at_once=4).jobs == 2
    assert plan_jobs(100.0, 0.02, 5000, width=1, most_jobs=200, wanted_at_once=1000).jobs == 10


def test_no_more_run_at_once_than_wanted() -> None:
    assert plan_jobs(1e6, 1.0, 10**6, width=4, most_jobs=200, wanted_at_once=16).jobs == 4


def test_a_time_limit_makes_more_jobs() -> None:
    plan = plan_jobs(9000.0, 1.0, 9000, width=1, most_jobs=200, time_s=150)
    assert (plan.jobs, plan.time_s) == (90, 150)


@given(jobs=st.integers(1, 300), work_s=st.floats(0.0, 1e7))
def test_shares_are_the_whole_work_and_never_grow(jobs: int, work_s: float) -> None:
    parts = shares(jobs, work_s)
    assert sum(parts) == pytest.approx(1)
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in zip(parts, parts[jobs:], strict=False))
    assert len(parts) % jobs == 0


@given(st.dictionaries(st.integers(0, 10**5), st.floats(0.0, 1e4), min_size=1, max_size=300), st.integers(1, 20))
def test_every_task_is_in_one_bunch_and_longer_ones_come_first(times_s: dict[int, float], jobs: int) -> None:
    bunches = pack(times_s, shares(jobs, sum(times_s.values())))
    order = [task for bunch in bunches for task in bunch]
    assert sorted(order) == sorted(times_s)
    assert [times_s[task] for task in order] == sorted(times_s.values(), reverse=True)
    assert all(bunches)


def test_bunches_have_their_shares() -> None:
    bunches = pack(dict.fromkeys(range(5000), 0.02), shares(2, 50.0))
    assert [len(bunch) for bunch in bunches[:4]] == [1250, 1250, 625, 625]
    assert len(bunches[-1]) <= 5000 / 64


def test_one_job_per_task_for_many_items_is_refused_with_what_would_happen_instead() -> None:
    with pytest.raises(ConfigError) as refused:
        refuse_many_jobs(100_000, 1, most_jobs=200)
    said = str(refused.value)
    assert "100,000 items with --tasks-per-job 1 would be 100,000 jobs" in said
    assert "busy for 2 h 35 min" in said
    assert "packs the rest into at most 200 jobs of several minutes" in said
    assert "--tasks-per-job 500" in said
    refuse_many_jobs(100_000, 500, most_jobs=200)
    assert BUNCH_S == 450


@pytest.mark.parametrize("tasks", [0, -1])
def test_jobs_without_a_task_are_refused(tasks: int) -> None:
    with pytest.raises(ConfigError, match=f"tasks_per_job={tasks}: give at least 1"):
        refuse_many_jobs(100, tasks, most_jobs=200)


def test_after_a_round_in_vain_other_tasks_come_first() -> None:
    assert reordered([3, 4], 3, 1) == [[4], [3]]
    assert reordered([3], 3, 2) == [[3]]
    assert [bunch[0] for bunch in reordered(range(9), 3, 1)][:2] == [3, 4]
    bunches = reordered(range(2000), 3, 2)
    assert len(bunches) == 500
    assert sorted(task for bunch in bunches for task in bunch) == list(range(2000))
