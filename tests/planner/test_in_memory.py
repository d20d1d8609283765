"""The step time where workers of one processor meet in its shared memory: worked examples on round numbers."""

import dataclasses

import pytest

from shoal.planner.calibration.calibration import constants_of, with_constants
from shoal.planner.time.refine import refine
from shoal.spec.plan import Mesh, Plan
from shoal.spec.sync import Sync
from tests.planner.test_steptime import HOST, LINK, MB, changed, time_of


def test_gradients_that_meet_in_memory_lengthen_the_backward_and_the_last_bucket_shows() -> None:
    memory = dataclasses.replace(LINK, bytes_per_s=1e6, overlaps=False)
    host = dataclasses.replace(HOST, in_place=memory, inside=dataclasses.replace(LINK, latency_s=3, overlaps=False))
    big = changed(gradient_bytes=4 * MB)
    alone = time_of(big, HOST, replicate=2, batch_size=4)
    time = time_of(big, host, replicate=2, batch_size=4)
    all_s = 8 * 4 * MB / 1e6
    copy_s = 2 * 8 * 4 * MB / (10 / 2)  # read and written, by two who share the memory's rate
    assert time.data_s == pytest.approx(all_s / 8 + 2 * 3)  # and the losses, over the link
    assert time.compute_s - alone.compute_s == pytest.approx(all_s * 7 / 8 + copy_s)
    half = time_of(big, host, replicate=2, batch_size=4, sync=Sync(bucket_bytes=2 * MB))
    assert half.data_s == pytest.approx(all_s / 16 + 2 * 3)
    engine = time_of(big, host, replicate=2, batch_size=4, sync=Sync(way="engine"))
    assert engine.compute_s == alone.compute_s
    assert refine(big, Plan(mesh=Mesh(replicate=2)), host, batch_size=4).data_s == pytest.approx(time.data_s)


def test_shards_that_meet_in_memory_wait_for_all_of_it() -> None:
    copied = dataclasses.replace(LINK, bytes_per_s=1000, overlaps=False)
    host = dataclasses.replace(HOST, copied=copied)
    over_link, in_memory = (time_of(machine=each, shard=2, zero=2, batch_size=4) for each in (HOST, host))
    assert in_memory.data_s == pytest.approx(over_link.data_s / 10)
    assert in_memory.compute_s == over_link.compute_s


def test_a_calibrated_link_is_that_of_shards_and_not_that_of_sums_in_passing() -> None:
    host = dataclasses.replace(HOST, in_place=LINK, copied=LINK)
    constants = dataclasses.replace(constants_of(host), inside_bytes_per_s=HOST.inside.bytes_per_s / 2)
    slower = with_constants(host, constants)
    assert slower.in_place == LINK
    assert slower.copied == dataclasses.replace(LINK, bytes_per_s=LINK.bytes_per_s / 2)
    assert with_constants(HOST, constants).copied is None
