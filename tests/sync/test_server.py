"""Servers in step against the obvious: one process that does the whole batch."""

from typing import Any

import pytest
import torch

from shoal.core.errors import PlanError
from shoal.spec.sync import Sync
from shoal.sync.server.slices import cut
from tests.sync.server_cluster import Bench, Build, Worker, adamw, batch_of, part_of, plain_sgd, sgd, together

CUTS = (6, 4, 2)
STEPS = 6
TOLERANCE = 1e-6
"""Of float32, for numbers below 1: what a sum in another order makes."""


def whole(build: Build, **options: Any) -> Bench:
    bench = Bench(build, **options)
    for step in range(1, STEPS + 1):
        bench.step(batch_of(step))
    return bench


def all_steps(worker: Worker) -> tuple[Any, list[Any], list[float]]:
    met = [worker.step(step, part_of(step, worker.rank.index, CUTS)) for step in range(1, STEPS + 1)]
    return worker.bench.row(), worker.bench.kept(), [each.loss for each in met]


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("build", [sgd, adamw])
def test_unequal_parts_at_any_number_of_servers_are_the_whole_batch(servers: int, build: Build) -> None:
    sync = Sync(mode="server", servers=servers)
    found = together(3, all_steps, sync, build=build, boundaries={STEPS})
    expected = whole(build)
    for row, kept, _ in found:
        assert torch.equal(row, found[0][0])
        assert torch.allclose(row, expected.row(), atol=TOLERANCE)
        for value, reference in zip(kept, expected.kept(), strict=True):
            assert torch.allclose(value, reference, atol=TOLERANCE)


def test_clipping_is_by_the_norm_over_all_servers_and_the_schedule_counts_steps() -> None:
    options: dict[str, Any] = {"clip_norm": 0.05, "has_schedule": True}
    found = together(3, all_steps, Sync(mode="server", servers=2), build=adamw, boundaries={STEPS}, **options)
    expected = whole(adamw, **options)
    losses = [Bench(adamw, **options).step(batch_of(1))]
    for row, kept, met in found:
        assert torch.allclose(row, expected.row(), atol=TOLERANCE)
        assert met[0] == pytest.approx(losses[0], abs=TOLERANCE)
        assert all(torch.allclose(a, b, atol=TOLERANCE) for a, b in zip(kept, expected.kept(), strict=True))


def test_a_run_goes_on_from_the_state_at_a_boundary() -> None:
    saved: dict[str, Any] = {}

    def first_half(worker: Worker) -> None:
        for step in range(1, 4):
            worker.step(step, part_of(step, worker.rank.index, CUTS))
        if worker.rank.index == 0:
            saved.update(model=worker.bench.model.state_dict(), optimizer=worker.bench.optimizer.state_dict())

    def second_half(worker: Worker) -> Any:
        for step in range(4, STEPS + 1):
            worker.step(step, batch_of(step)[6 * worker.rank.index :][:6])
        return worker.bench.row()

    def resumed(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = sgd(parameters)
        with torch.no_grad():
            for parameter, value in zip(parameters, saved["model"].values(), strict=True):
                parameter.copy_(value)
        optimizer.load_state_dict(saved["optimizer"])
        return optimizer

    together(3, first_half, Sync(mode="server", servers=3), boundaries={3})
    found = together(2, second_half, Sync(mode="server", servers=2), build=resumed, first_step=4)
    assert torch.allclose(found[0], whole(sgd).row(), atol=TOLERANCE)


def test_a_part_that_weighs_nothing_counts_nothing() -> None:
    def do(worker: Worker) -> Any:
        for step in range(1, 4):
            loss = worker.bench.backward(batch_of(step))
            index = worker.rank.index
            met = worker.servers.meet(type_of_mine(step, 0.0 if index else 12.0, loss))
            assert met.took_part == (0,)
            assert met.weight == 12.0
        return worker.bench.row()

    def type_of_mine(step: int, weight: float, loss: float) -> Any:
        from shoal.sync.mode import Mine

        return Mine(step, weight, loss, int(weight))

    found = together(2, do, Sync(mode="server"), build=plain_sgd)
    expected = Bench(plain_sgd)
    for step in range(1, 4):
        expected.step(batch_of(step))
    assert torch.allclose(found[0], expected.row(), atol=TOLERANCE)


def test_slices_are_equal_to_one_element_and_cut_parameters() -> None:
    slices = cut([6, 1, 5], [0, 0, 1], 3)
    assert [each.numel for each in slices] == [4, 4, 4]
    assert [[(p.parameter, p.begin, p.end, p.group) for p in each.pieces] for each in slices] == [
        [(0, 0, 4, 0)],
        [(0, 4, 6, 0), (1, 0, 1, 0), (2, 0, 1, 1)],
        [(2, 1, 5, 1)],
    ]


def test_an_optimizer_that_looks_at_whole_parameters_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match="Adafactor may look at whole ones"):
        together(1, lambda _: None, Sync(mode="server"), build=torch.optim.Adafactor)


def test_workers_that_are_fewer_than_planned_have_fewer_servers_beside_them() -> None:
    assert together(1, lambda worker: len(worker.servers.opened.links), Sync(mode="server", servers=2)) == [1]


def test_more_servers_than_numbers_are_refused() -> None:
    with pytest.raises(PlanError, match=r"sync\.servers=4, but the model has 3 numbers to train"):
        cut([1, 2], [0, 0], 4)
