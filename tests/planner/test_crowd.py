"""The steps of every all-reduce: the closed forms where nobody shares cores, and fewer messages where they do."""

import pytest

from shoal.planner.collectives.allreduce import ALLREDUCE
from shoal.planner.collectives.choice import choose_way
from shoal.planner.collectives.crowd import STEPS, crowded
from shoal.spec.device import Link

ALONE = Link(source="test", bytes_per_s=125e6, latency_s=1e-4)
CROWDED = Link(source="test", bytes_per_s=125e6, latency_s=1e-4, crowd_s=1e-4)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5, 7, 8, 12, 64])
def test_without_a_crowd_the_steps_are_the_closed_form(name: str, workers: int) -> None:
    form, steps = ALLREDUCE[name](1e5, workers, 125e6, 1e-4), crowded(name, 1e5, workers, ALONE)
    assert steps.seconds == pytest.approx(form.seconds)
    assert steps.steps == form.steps


@pytest.mark.parametrize("workers", [2, 3, 4, 5, 8, 13])
def test_a_tree_has_two_messages_for_each_worker_but_the_root(workers: int) -> None:
    assert sum(step.messages for step in STEPS["tree"](1.0, workers)) == 2 * (workers - 1)


def test_small_messages_of_a_crowd_go_by_a_tree_and_of_hosts_apart_by_recursive_doubling() -> None:
    sizes = {"workers": 4, "per_host": 1, "inside": None, "bucket": 4096}
    assert choose_way(between=CROWDED, **sizes).name == "tree"  # type: ignore[arg-type]
    assert choose_way(between=ALONE, **sizes).name == "recursive-doubling"  # type: ignore[arg-type]


def test_large_messages_from_other_workers_wait_for_a_small_one() -> None:
    exact = crowded("halving-doubling", 100e6, 4, ALONE).seconds
    form = ALLREDUCE["halving-doubling"](100e6, 4, 125e6, 1e-4).seconds
    assert exact == pytest.approx(form + 3 * 1e-4)
    assert crowded("ring", 100e6, 4, ALONE).seconds == pytest.approx(ALLREDUCE["ring"](100e6, 4, 125e6, 1e-4).seconds)
