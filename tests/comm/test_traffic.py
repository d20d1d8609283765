"""What a process notes of its collectives."""

import pytest
import torch

from shoal.comm.traffic import Kind, Traffic, named


def test_calls_of_one_kind_are_added_up_and_taken_once() -> None:
    traffic = Traffic(link="network")
    for begin in range(3):
        traffic.add(float(begin), begin + 0.25, "all-reduce", "ring", 1024)
    traffic.add(9.0, 11.0, "all-gather", "shared-memory", 4096, link="shm")
    gathered, summed = traffic.take()
    assert gathered == {
        "op": "all-gather",
        "algorithm": "shared-memory",
        "link": "shm",
        "bytes": 4096,
        "count": 1,
        "seconds": 2.0,
    }
    assert (summed["link"], summed["count"], summed["seconds"]) == ("network", 3, 0.75)
    assert traffic.take() == []


def test_calls_that_nobody_timed_count_as_those_that_were() -> None:
    traffic = Traffic()
    traffic.add(1.0, 1.5, "all-reduce", "engine", 8)
    for _ in range(3):
        traffic.add(None, None, "all-reduce", "engine", 8)
    (call,) = traffic.take()
    assert (call["count"], call["seconds"]) == (4, 2.0)


def test_the_calls_of_a_step_are_kept_with_their_moments_until_the_next() -> None:
    traffic = Traffic()
    with traffic.timing("all-reduce", "engine", torch.zeros(4)):
        pass
    (spent,) = named(traffic.take_step())
    assert spent.kind == Kind("all-reduce", "engine", "host", 16)
    assert spent.begin <= spent.end
    assert traffic.take_step() == []
    assert len(traffic.take()) == 1


def test_what_fails_is_no_call() -> None:
    traffic = Traffic()
    with pytest.raises(ValueError, match="no"), traffic.timing("all-reduce", "engine", torch.zeros(4)):
        raise ValueError("no")
    assert (traffic.take_step(), traffic.take()) == ([], [])
