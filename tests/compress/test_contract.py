"""The contract of every codec, by real processes over Gloo, against the plain sum of what they were given."""

from typing import Any

import numpy as np
import pytest
import torch

from shoal.compress.bucket import ShardedBucket
from shoal.compress.carry import carried
from shoal.compress.codecs import CODECS
from shoal.compress.sparse import gathers
from tests.compress.counted import with_every_codec
from tests.compress.exercises import SHARDED_SHAPES, _arrays, _tensors
from tests.support.ranks import RankPool

SHARDING = [name for name, codec in CODECS.items() if codec.serves_shards]


def run(ranks: RankPool, exercise: str, workers: int, **arguments: Any) -> dict[str, list[Any]]:
    """Return what `exercise` returns on each worker, by codec."""
    arguments.setdefault("names", list(CODECS))
    where = f"tests.compress.exercises:{exercise}"
    answers = ranks.run(with_every_codec, workers=workers, exercise=where, **arguments)
    return {name: [answer[name] for answer in answers] for name in arguments["names"]}


def without_padding(rows: np.ndarray) -> np.ndarray:
    """Return the numbers of the gradients alone: FSDP2 ignores the others, and `sign` says something of them too."""
    parts: dict[str, torch.Tensor] = {}
    ShardedBucket(tuple("abcd"), SHARDED_SHAPES, len(rows)).split(torch.from_numpy(rows), parts)
    return torch.cat([part.flatten() for part in parts.values()]).numpy()


@pytest.fixture(scope="module")
def sums(ranks: RankPool) -> dict[int, dict[str, list[Any]]]:
    return {workers: run(ranks, "sums", workers) for workers in (2, 3, 4)}


@pytest.fixture(scope="module")
def slices(ranks: RankPool) -> dict[int, dict[str, list[Any]]]:
    return {workers: run(ranks, "slices", workers, names=SHARDING) for workers in (2, 3, 4)}


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("name", CODECS)
class TestSums:
    def test_all_workers_have_the_same_bits(self, sums: Any, name: str, workers: int) -> None:
        first, *others = sums[workers][name]
        assert all(other["arrived"].tobytes() == first["arrived"].tobytes() for other in others)

    def test_nothing_is_lost_and_nothing_counted_twice(self, sums: Any, name: str, workers: int) -> None:
        answers = sums[workers][name]
        given, pending = (sum(answer[key].astype(np.float64) for answer in answers) for key in ("given", "pending"))
        arrived = answers[0]["arrived"].astype(np.float64).sum(0)
        # Sums of 3 steps in float32: a few roundings of numbers up to 100.
        np.testing.assert_allclose(arrived + pending, given, atol=20 * 100 * 2**-24)
        assert np.abs(arrived).max() > 0

    def test_what_is_sent_is_what_was_said(self, sums: Any, name: str, workers: int) -> None:
        for answer in sums[workers][name]:
            assert answer["sent_bytes"] == pytest.approx(answer["said_bytes"], rel=1e-12)


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("name", SHARDING)
class TestSlices:
    def test_nothing_is_lost_and_nothing_counted_twice(self, slices: Any, name: str, workers: int) -> None:
        answers = slices[workers][name]
        given, pending = (sum(answer[key].astype(np.float64) for answer in answers) for key in ("given", "pending"))
        arrived = np.stack([answer["arrived"] for answer in answers])
        np.testing.assert_allclose(without_padding(arrived + pending), without_padding(given), atol=20 * 100 * 2**-24)

    def test_what_is_sent_is_what_was_said(self, slices: Any, name: str, workers: int) -> None:
        if name == "threshold":  # an expectation
            return
        for answer in slices[workers][name]:
            assert answer["sent_bytes"] == answer["said_bytes"]


def test_where_most_elements_would_be_sent_all_go_dense(ranks: RankPool) -> None:
    for error, sent_bytes, dense_bytes in run(ranks, "crowded", 3, names=["threshold"])["threshold"]:
        assert sent_bytes == dense_bytes
        assert error <= 2 * 2**-8 * 60  # rounded twice to 8 bits, and no sum is larger than 60


@pytest.mark.parametrize(("density", "workers", "gathered"), [(0.01, 64, True), (0.01, 128, False), (0.3, 4, False)])
def test_gathering_wins_while_density_times_workers_is_below_1(density: float, workers: int, gathered: bool) -> None:
    assert gathers(2**20, [int(density * 2**20)] * workers) == gathered


def test_many_steps_bring_the_mean_to_the_true_sum(ranks: RankPool) -> None:
    for name, answers in run(ranks, "mean_of_many", 3, steps=60).items():
        errors = answers[0]
        # What is pending stays bounded, so the error falls as 1 / steps in the end: sixfold steps, a sixth. One bit an
        # element takes long to get there, for elements that are many times the mean of their block.
        assert errors[59] < errors[9] * (0.8 if name == "sign" else 0.4), (name, errors)
        assert errors[59] < 0.5, (name, errors)


def test_least_squares_end_at_the_optimum(ranks: RankPool) -> None:
    for name, answers in run(ranks, "least_squares", 2, steps=400).items():
        reached, best = answers[0]
        assert reached == pytest.approx(best, rel=0.01), name


def test_a_state_that_was_saved_goes_on_to_the_same_bits(ranks: RankPool) -> None:
    whole = run(ranks, "train", 2, steps=8)
    half = run(ranks, "train", 2, steps=4)
    states = {name: [answer["state"] for answer in answers] for name, answers in half.items()}
    rest = run(ranks, "train", 2, steps=4, first=4, states=states)
    for name, answers in whole.items():
        assert rest[name][0]["arrived"].tobytes() == answers[0]["arrived"][4:].tobytes(), name


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3)])
def test_another_number_of_workers_goes_on_with_all_that_is_pending(ranks: RankPool, before: int, after: int) -> None:
    trained = run(ranks, "train", before, steps=10)
    states = {}
    for name, answers in trained.items():
        old = [_tensors(answer["state"]) for answer in answers]
        new = carried(old, after)
        for key in old[0]["pending"]:
            was, now = (sum(state["pending"].get(key, 0) for state in each) for each in (old, new))
            np.testing.assert_allclose(now, was, rtol=1e-5, atol=1e-5, err_msg=name)  # two or three terms in float32
        states[name] = [_arrays(state) for state in new]
    went_on = run(ranks, "train", after, steps=10, first=10, states=states)
    for name, answers in went_on.items():
        arrays = [answer["arrived"] for answer in answers]
        assert all(array.tobytes() == arrays[0].tobytes() for array in arrays), name
        assert all(answer["state"]["exchanges"] == 20 for answer in answers)
