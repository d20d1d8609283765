"""Schedules of random faults."""

import json
from collections import Counter

import pytest

from shoal.core.errors import ConfigError
from shoal.fault import inject
from shoal.fault.inject import POINTS
from shoal.fault.inject_random import random_faults


@pytest.mark.parametrize("workers", [2, 3, 6])
def test_random_faults_are_the_same_for_a_seed_and_leave_somebody_alive(workers: int) -> None:
    seen: Counter[str] = Counter()
    together = 0
    for seed in range(40):
        faults = random_faults(seed, workers, 20, 10)
        assert faults == random_faults(seed, workers, 20, 10)
        assert len(faults) == 10
        assert [fault.step for fault in faults] == sorted(fault.step for fault in faults)
        for step in {fault.step for fault in faults}:
            victims = [fault.worker for fault in faults if fault.step == step]
            assert len(victims) == len(set(victims)) < workers
            together += len(victims) > 1
        seen.update(fault.point for fault in faults)
        assert all(fault.worker == 0 for fault in faults if fault.point == "checkpoint: committing")
    assert random_faults(1, workers, 20, 10) != random_faults(2, workers, 20, 10)
    expected = set(POINTS) - ({"checkpoint: copying out"} if workers > 2 else {"checkpoint: copying out", "recovery"})
    assert set(seen) == expected
    assert (together > 0) == (workers > 2)


def test_random_faults_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="10 random faults do not fit a run of 2 workers and 5 steps"):
        random_faults(0, 2, 5, 10)
    assert json.dumps(inject.environment(random_faults(0, 2, 11, 10)))
