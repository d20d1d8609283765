"""Plans for fewer workers than they were made for, and for more."""

import pytest

from shoal.spec.plan import Batch, Mesh, Plan
from shoal.training.resized import fitting, fitting_at_last, resized


@pytest.mark.parametrize(
    ("mesh", "workers", "expected"),
    [
        (Mesh(replicate=4), 3, Mesh(replicate=3)),
        (Mesh(replicate=4), 1, Mesh()),
        (Mesh(shard=4), 3, Mesh(shard=3)),
        (Mesh(shard=2), 1, Mesh()),
        (Mesh(replicate=3, shard=2), 4, Mesh(replicate=2, shard=2)),
        (Mesh(replicate=2, shard=2), 3, Mesh(shard=3)),
        (Mesh(replicate=2, tensor=2), 2, Mesh(tensor=2)),
        (Mesh(pipeline=2, replicate=3), 4, Mesh(pipeline=2, replicate=2)),
        (Mesh(shard=3, tensor=2), 4, Mesh(shard=2, tensor=2)),
    ],
)
def test_whole_replicas_go_first_then_shards_and_never_parts_of_a_model(
    mesh: Mesh, workers: int, expected: Mesh
) -> None:
    plan = Plan(mesh=mesh, zero=3 if mesh.shard > 1 else 0)
    smaller = resized(plan, range(workers))
    assert smaller.mesh == expected
    assert smaller.zero == (3 if expected.shard > 1 else 0)
    assert resized(plan, range(plan.workers)) == plan


@pytest.mark.parametrize(
    ("mesh", "workers", "expected"),
    [
        (Mesh(replicate=4), 3, 3),
        (Mesh(replicate=4), 9, 9),
        (Mesh(replicate=2, tensor=2), 3, 2),
        (Mesh(replicate=2, tensor=2), 7, 6),
        (Mesh(pipeline=2, tensor=2), 3, 0),
        (Mesh(pipeline=2, replicate=2), 4, 4),
    ],
)
def test_as_many_train_as_hold_whole_models(mesh: Mesh, workers: int, expected: int) -> None:
    assert fitting(Plan(mesh=mesh), workers) == expected


def test_unequal_shares_stay_with_their_workers() -> None:
    plan = Plan(mesh=Mesh(replicate=4), batch=Batch(shares=(0.4, 0.3, 0.2, 0.1)))
    assert resized(plan, [0, 2, 3]).shares == pytest.approx((4 / 7, 2 / 7, 1 / 7))
    assert resized(Plan(mesh=Mesh(replicate=4)), [1, 3]).shares == (0.5, 0.5)


@pytest.mark.parametrize(
    ("mesh", "workers", "expected"),
    [
        (Mesh(), 3, Mesh(replicate=3)),
        (Mesh(replicate=2), 5, Mesh(replicate=5)),
        (Mesh(shard=2), 4, Mesh(replicate=2, shard=2)),
        (Mesh(shard=2), 5, Mesh(shard=5)),
        (Mesh(replicate=2, shard=2), 6, Mesh(replicate=3, shard=2)),
        (Mesh(replicate=2, shard=2), 7, Mesh(shard=7)),
        (Mesh(tensor=2), 6, Mesh(replicate=3, tensor=2)),
        (Mesh(pipeline=2, shard=2), 6, Mesh(pipeline=2, shard=3)),
    ],
)
def test_more_workers_are_more_replicas_or_where_these_are_not_whole_more_shards(
    mesh: Mesh, workers: int, expected: Mesh
) -> None:
    plan = Plan(mesh=mesh, zero=2 if mesh.shard > 1 else 0)
    assert fitting(plan, workers) == workers
    larger = resized(plan, range(workers))
    assert (larger.mesh, larger.zero) == (expected, plan.zero)


def test_one_that_is_added_takes_as_much_as_the_others_in_the_mean() -> None:
    plan = Plan(mesh=Mesh(replicate=3), batch=Batch(shares=(0.5, 0.3, 0.2)))
    mean = 1 / 3
    assert resized(plan, range(5)).shares == pytest.approx([x / (1 + 2 * mean) for x in (0.5, 0.3, 0.2, mean, mean)])
    assert resized(plan, [0, 1, 3]).shares == pytest.approx([x / 1.2 for x in (0.5, 0.3, 0.4)])
    assert resized(plan, [3, 4]).shares == (0.5, 0.5)
    pairs = Plan(mesh=Mesh(replicate=2, tensor=2), batch=Batch(shares=(0.75, 0.25)))
    assert resized(pairs, range(6)).shares == pytest.approx((0.5, 1 / 6, 1 / 3))


@pytest.mark.parametrize(
    ("mesh", "workers", "expected"),
    [
        (Mesh(pipeline=2), 1, Mesh()),
        (Mesh(tensor=4), 3, Mesh(tensor=2)),
        (Mesh(pipeline=4), 3, Mesh(pipeline=2)),
        (Mesh(pipeline=2, tensor=2), 3, Mesh(tensor=2)),
        (Mesh(pipeline=2, tensor=2), 1, Mesh()),
        (Mesh(pipeline=3, replicate=2), 2, Mesh(replicate=2)),
        (Mesh(pipeline=2, shard=2), 1, Mesh()),
    ],
)
def test_where_too_few_are_left_for_a_whole_model_its_axes_shrink(mesh: Mesh, workers: int, expected: Mesh) -> None:
    plan = Plan(mesh=mesh, zero=3 if mesh.shard > 1 else 0, batch=Batch(micro_batch=2))
    assert fitting(plan, workers) == 0
    count = fitting_at_last(plan, workers)
    assert count == expected.workers
    assert resized(plan, range(count)).mesh == expected


def test_what_belongs_to_an_axis_goes_with_it() -> None:
    pieces = Plan(mesh=Mesh(pipeline=4), schedule="interleaved", chunks=2, stages=tuple("bcdefgh"))
    half, one = resized(pieces, [0, 3]), resized(pieces, [0])
    assert (half.schedule, half.chunks, half.stages) == ("interleaved", 2, ("c", "e", "g"))
    assert (one.schedule, one.chunks, one.stages) == ("1f1b", 1, ())
    assert not resized(Plan(mesh=Mesh(tensor=2), sequence=True), [1]).sequence
