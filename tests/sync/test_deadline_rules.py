"""Who takes part, how long a step waits, and what is sent: the parts of the mode "deadline" by themselves."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from shoal.core.errors import PlanError
from shoal.sync.deadline.catching_up import describe, lay_out, step_schedule
from shoal.sync.deadline.limit import LEAST_S, WARM_UP, Limit
from shoal.sync.deadline.listing import (
    Listed,
    Ready,
    Waits,
    listed_text,
    may_close,
    read_listed,
    read_ready,
    ready_text,
)
from shoal.sync.deadline.summing import Row
from shoal.sync.mode import Trained

OPEN = 9


def ready(current: Sequence[int] = (), late: Sequence[int] = (), *, weight: float = 8.0) -> list[Ready]:
    found = [Ready(w, OPEN, OPEN if w in current else OPEN - 2, weight, 0.5, 8, 0.1) for w in (*current, *late)]
    return sorted(found, key=lambda one: one.worker)


def waits(
    *,
    expected: Sequence[int] = (0, 1, 2, 3),
    is_boundary: bool = False,
    waited_s: float = 0.0,
    limit_s: float = 1.0,
    quorum: int = 0,
    has_deadline: bool = True,
) -> Waits:
    return Waits(4, expected, is_boundary, waited_s, limit_s, quorum, has_deadline)


@pytest.mark.parametrize("quorum", [0, 2, 4])
@pytest.mark.parametrize("is_boundary", [False, True])
def test_it_closes_when_all_are_there(quorum: int, is_boundary: bool) -> None:
    assert may_close(ready([0, 1, 2], [3]), waits(quorum=quorum, is_boundary=is_boundary))


def test_a_boundary_waits_for_all_whatever_has_passed() -> None:
    assert not may_close(ready([0, 1, 2]), waits(is_boundary=True, waited_s=99, quorum=3))


def test_without_a_current_worker_with_samples_nothing_is_closed() -> None:
    assert not may_close(ready([], [0, 1, 2]), waits(waited_s=99))
    assert not may_close(ready([0], weight=0.0), waits(waited_s=99, expected=[0]))


def test_it_waits_for_those_who_are_current_until_its_limit_and_not_for_late_ones() -> None:
    assert not may_close(ready([0, 1]), waits(waited_s=0.9))
    assert may_close(ready([0, 1]), waits(waited_s=1.0))
    assert may_close(ready([0, 1, 2]), waits(expected=[0, 1, 2]))
    assert not may_close(ready([0, 1], [3]), waits(expected=[0, 1, 2], waited_s=0.9))
    assert not may_close(ready([0, 1, 2]), waits(limit_s=math.inf, waited_s=99))


def test_late_ones_do_not_push_current_ones_out_of_a_quorum() -> None:
    assert may_close(ready([0, 1, 2]), waits(quorum=3))
    assert not may_close(ready([0, 1], [3]), waits(quorum=3, expected=[0, 1, 2], waited_s=0.9))
    assert may_close(ready([0, 1], [3]), waits(quorum=3, expected=[0, 1, 2], waited_s=1.0))  # it may be stopped
    assert may_close(ready([0, 1], [3]), waits(quorum=3, expected=[0, 1]))


def test_a_quorum_is_the_least_unless_there_is_a_deadline_too() -> None:
    assert not may_close(ready([0, 1]), waits(quorum=3, waited_s=99, has_deadline=False))
    assert may_close(ready([0, 1]), waits(quorum=3, waited_s=99, has_deadline=True))


def test_dropped_gradients_weigh_nothing() -> None:
    listed = Listed(OPEN, ready=tuple(ready([0, 1], [3])))
    assert (listed.current, listed.late, listed.workers) == ((0, 1), (3,), (0, 1, 3))
    assert listed.counted("add") == {0: 8.0, 1: 8.0, 3: 8.0}
    assert listed.counted("drop") == {0: 8.0, 1: 8.0, 3: 0.0}


def test_a_loss_that_does_not_count_may_be_anything() -> None:
    listed = Listed(2, ready=(Ready(0, 2, 2, 1.0, 3.0, 1, 0.1), Ready(1, 2, 1, 4.0, math.nan, 4, 0.1)))
    assert listed.loss(listed.counted("drop")) == 3.0
    assert math.isnan(listed.loss(listed.counted("add")))
    assert Listed(2).loss({}) == 0.0


def test_what_the_store_holds_is_read_as_it_was_written() -> None:
    one = Ready(1, 2, 1, 1 / 3, math.inf, 4, 0.1)
    listed = Listed(2, True, (one,))
    assert read_ready(ready_text(one).encode()) == one
    assert read_ready(b"null") is None
    assert read_listed(listed_text(listed).encode()) == listed


def test_by_itself_a_step_waits_for_half_as_long_again_as_the_median_worker() -> None:
    limit = Limit(0.0)
    for _ in range(WARM_UP):
        assert limit.seconds == math.inf
        limit.note([0.1, 0.1, 0.11, 0.4])
    assert limit.seconds == pytest.approx(0.05)
    for _ in range(100):
        limit.note([0.001, 0.001])
    assert limit.seconds == LEAST_S


def test_one_that_was_much_slower_than_the_others_is_not_waited_for_once_steps_are_known() -> None:
    took_s = {0: 0.1, 1: 0.1, 3: 0.4}
    limit, given = Limit(0.0), Limit(0.3)
    for _ in range(WARM_UP):
        assert limit.expected(took_s) == {0, 1, 3}
        limit.note([0.1, 0.1, 0.4])
        given.note([0.1, 0.1, 0.4])
    assert limit.expected(took_s) == {0, 1}
    assert limit.expected({0: 0.5, 1: 0.5, 2: 0.6}) == {0, 1, 2}  # all are slower now
    assert limit.expected({0: 0.001, 1: 0.005}) == {0, 1}  # which is nothing
    assert given.expected(took_s) == {0, 1, 3}


def test_a_given_deadline_is_the_limit_from_the_first_step_on() -> None:
    limit = Limit(0.3)
    assert limit.seconds == 0.3
    limit.note([9.0])
    assert limit.seconds == 0.3


def test_a_row_has_zeros_for_what_does_not_count_and_takes_types_as_they_are() -> None:
    parameters = [nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(4, dtype=torch.bfloat16))]
    parameters[0].grad = torch.full((2, 3), math.nan)
    row = Row(parameters, torch.device("cpu"))
    row.fill(0.0)
    assert torch.equal(row.numbers, torch.zeros(10))
    parameters[0].grad = torch.arange(6.0).view(2, 3)
    row.fill(0.5)
    assert torch.equal(row.numbers, torch.tensor([0, 0.5, 1, 1.5, 2, 2.5, 0, 0, 0, 0]))
    row.numbers.add_(1)
    row.put_back()
    assert parameters[1].grad is not None
    assert torch.equal(parameters[1].grad, torch.ones(4, dtype=torch.bfloat16))


def trained_by(optimizer: Any, *, steps: int, **settings: float) -> Trained:
    torch.manual_seed(0)
    model: Any = nn.Conv2d(2, 3, 2)
    model.to(memory_format=torch.channels_last)
    made = optimizer(model.parameters(), **settings)
    for _ in range(steps):
        made.zero_grad()
        model(torch.randn(2, 2, 4, 4)).square().sum().backward()
        made.step()
    return Trained(dict(model.named_parameters()), {}, made, None)


@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        (torch.optim.AdamW, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.RMSprop, {"lr": 0.1}),
        (torch.optim.Adafactor, {"lr": 0.1}),
    ],
)
@pytest.mark.parametrize("steps", [0, 1])
def test_any_state_of_an_optimizer_is_laid_out_anew(optimizer: Any, settings: dict[str, float], steps: int) -> None:
    ahead, behind = trained_by(optimizer, steps=3, **settings), trained_by(optimizer, steps=steps, **settings)
    names, tensors = describe(ahead)
    places = lay_out(behind, names)
    for place, tensor in zip(places, tensors, strict=True):
        assert (place.shape, place.dtype) == (tensor.shape, tensor.dtype)
        place.copy_(tensor)
    again, copies = describe(behind)
    assert again == names
    assert all(map(torch.equal, copies, tensors))


def test_an_optimizer_that_keeps_lists_is_refused_by_name() -> None:
    model = nn.Linear(2, 1)
    made = torch.optim.LBFGS(model.parameters())
    made.step(lambda: model(torch.ones(2)).square().sum())  # type: ignore[no-untyped-call]
    made.state[model.weight]["old_dirs"] = []
    with pytest.raises(PlanError, match="LBFGS keeps 'old_dirs' as a list"):
        describe(Trained(dict(model.named_parameters()), {}, made, None))


def test_a_schedule_that_steps_for_missed_steps_says_the_same_rate() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    step_schedule(schedule, 4)  # before any step of the optimizer: no warning, which would be an error here
    assert schedule.last_epoch == 4
    step_schedule(None, 4)
