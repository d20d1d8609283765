"""Parts of steps for whoever is free: loaded as they are given out, and every boundary is met."""

import random
import time
from dataclasses import dataclass, field

import pytest
import torch

from shoal.core.errors import DataError
from shoal.data.loading.patience import Patience
from shoal.data.steps import Part, StepLoader
from shoal.spec.parts import cut
from shoal.spec.plan import Batch, Mesh, Plan
from shoal.sync.mode import Met
from shoal.training.loader import PartLoader, open_loader, ticketed
from tests.support.jobs import linear
from tests.support.training import batch_samples

STEPS = 12
PLAN = Plan(mesh=Mesh(replicate=3), batch=Batch(shares=(0.5, 0.25, 0.25)))
CPU = torch.device("cpu")


def loader() -> PartLoader:
    def open_one(index: int) -> StepLoader:
        return open_loader(linear(steps=STEPS), PLAN, index=index, first_step=1, device=CPU)

    return PartLoader(open_one)


@dataclass
class Given:
    """Tickets that were drawn beforehand."""

    parts: list[tuple[int, int]]
    taken: int = 0
    settled: list[int] = field(default_factory=list)

    def next_part(self) -> tuple[int, int] | None:
        self.taken += 1
        return self.parts[self.taken - 1] if self.taken <= len(self.parts) else None

    def settle(self, step: int) -> Met:
        self.settled.append(step)
        return Met(0.0, 0.0, (), step + 1, is_common=True)


class Taker:
    """Takes what it is given, as a worker's loop does."""

    def __init__(self, given: Given, boundaries: set[int]) -> None:
        self.given, self.boundaries = given, boundaries | {STEPS}
        self.done, self.ahead = 0, STEPS + 1
        self.parts: list[Part] = []

    def run(self) -> "Taker":
        for part in ticketed(
            self.given,
            loader(),
            last_step=STEPS,
            done=lambda: self.done,
            is_boundary=self.boundaries.__contains__,
            on_ahead=self._note_ahead,
        ):
            if part.index < 0:
                assert part.samples == ()
                self._settle(part.step)
                continue
            self.parts.append(part)
            between = [step for step in range(part.step, self.ahead) if step in self.boundaries]
            if between:
                self._settle(between[0])
            else:
                self.done = self.ahead - 1
        return self

    def _note_ahead(self, step: int | None) -> None:
        self.ahead = step if step is not None else STEPS + 1

    def _settle(self, step: int) -> None:
        self.given.settle(step)
        self.done = step


@pytest.mark.parametrize("seed", range(20))
def test_each_boundary_is_met_once_in_order_and_each_part_is_the_right_one(seed: int) -> None:
    draw = random.Random(seed)
    every = [(step, part) for step in range(1, STEPS + 1) for part in range(3)]
    mine = [each for each in every if draw.random() < draw.choice([0.1, 0.4, 0.9])]
    boundaries = {step for step in range(1, STEPS + 1) if draw.random() < 0.3} | {STEPS}
    taker = Taker(Given(mine), boundaries).run()
    assert taker.given.settled == sorted(boundaries)
    assert [(part.step, part.index) for part in taker.parts] == mine
    job = linear(steps=STEPS)
    for part in taker.parts:
        samples = batch_samples(job, part.step - 1)
        bounds = cut(len(samples), PLAN.shares)
        assert list(part.samples) == samples[bounds[part.index] : bounds[part.index + 1]]
        x, _ = part.batch
        if part.samples:
            assert torch.equal(x, torch.stack([job.data[i][0] for i in part.samples]))


def test_a_worker_without_any_part_still_meets_the_others() -> None:
    assert Taker(Given([]), {5}).run().given.settled == [5, STEPS]


def test_one_part_is_taken_ahead() -> None:
    given = Given([(1, 0), (1, 1), (2, 2)])
    parts = ticketed(given, loader(), last_step=2, done=lambda: 0, is_boundary=lambda _: False, on_ahead=lambda _: None)
    assert next(parts).index == 0
    assert given.taken == 2
    parts.close()


def test_a_part_that_does_not_come_is_said() -> None:
    slow = PartLoader(lambda _: _Never())  # type: ignore[arg-type, return-value]
    with pytest.raises(DataError, match=r"part 1 of step 3 has not come for 0.05 s"):
        slow.start(3, 1)()
    slow.close()


class _Never:
    patience = Patience(0.05)

    def new_slot(self) -> None:
        return None

    def load(self, step: int, slot: object) -> None:
        time.sleep(0.3)

    def receive(self, loaded: object) -> None:
        raise AssertionError("nothing has come")
