"""Boundaries that somebody asks for: workers that are apart, in any order, agree on one that nobody has passed."""

import random

from torch.distributed import HashStore

from shoal.spec.plan import Checkpoints, Mesh, Plan
from shoal.training.boundaries import Agreement, Boundaries, is_planned
from tests.support.jobs import linear


def test_the_job_and_the_plan_name_boundaries() -> None:
    job = linear(steps=13)
    plan = Plan(checkpoint=Checkpoints(every_steps=5))
    assert [step for step in range(1, 14) if is_planned(job, plan, step)] == [5, 10, 13]
    evaluated = linear(steps=13, eval_data=job.data, eval_every_steps=4)
    assert [step for step in range(1, 14) if is_planned(evaluated, Plan(), step)] == [4, 8, 12, 13]


def test_the_next_checkpoint_by_the_clock_is_one() -> None:
    boundaries = Boundaries(linear(steps=50), Plan(), None, index=0)
    assert not boundaries.is_boundary(7)
    boundaries.next_save = lambda: 7
    assert boundaries.is_boundary(7)


def test_one_worker_alone_is_there_after_the_next_step() -> None:
    agreement = Agreement(None, "stop", index=0, workers=1, last=50)
    assert not agreement.is_boundary(7)
    agreement.ask(7)
    assert [step for step in range(8, 51) if agreement.is_boundary(step)] == [8]


class Walker:
    """A worker that does steps at its own pace, waits at a boundary, and hears of the request at some step."""

    def __init__(self, store: HashStore, index: int, *, workers: int, hears_at: int, last: int) -> None:
        self.agreement = Agreement(store, "stop", index=index, workers=workers, last=last)
        self.step, self.hears_at, self.last = 0, hears_at, last
        self.waits_at: int | None = None

    def go(self) -> None:
        """Do a step, unless this worker waits."""
        if self.waits_at is not None:
            return
        if self.step >= self.hears_at:
            self.agreement.ask(self.step)
        self.step += 1
        if self.step == self.last or self.agreement.is_boundary(self.step):
            self.waits_at = self.step


def walked(seed: int) -> set[int | None]:
    """Return after which steps workers stop that go, and hear of the request, in the order of a seed."""
    draw = random.Random(seed)
    workers = draw.randint(2, 5)
    store = HashStore()
    walkers = [Walker(store, i, workers=workers, hears_at=draw.randint(0, 30), last=200) for i in range(workers)]
    paces = [draw.choice([1, 2, 5]) for _ in walkers]
    while any(walker.waits_at is None for walker in walkers):
        draw.choices(walkers, paces)[0].go()
    return {walker.waits_at for walker in walkers}


def test_whoever_hears_of_it_when_all_stop_after_the_same_step() -> None:
    found = [walked(seed) for seed in range(300)]
    assert all(len(steps) == 1 for steps in found)
    assert sum(steps != {200} for steps in found) > 290, "before the last step, unless it was near"


def test_a_boundary_that_would_come_after_the_last_step_is_none() -> None:
    store = HashStore()
    both = [Agreement(store, "stop", index=index, workers=2, last=10) for index in range(2)]
    for agreement in both:
        assert not agreement.is_boundary(9)
        agreement.ask(9)
    assert not any(agreement.is_boundary(10) for agreement in both)
    assert is_planned(linear(steps=10), Plan(mesh=Mesh(replicate=2)), 10)
