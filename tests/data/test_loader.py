import threading
import time
from collections.abc import Sequence

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from shoal.core.errors import DataError
from shoal.data.steps import Part
from shoal.data.steps import StepLoader as Loader

UNEQUAL = (0.25, 0.25, 0.10, 0.4)


def load(data: object, *, shares: Sequence[float] = (1.0,), index: int = 0, **options: int) -> list[Part]:
    return list(Loader(data, **({"batch_size": 8, "last_step": 7} | options), shares=shares, index=index))  # type: ignore[arg-type]


@pytest.mark.parametrize("shares", [(1.0,), (0.5, 0.5), (1 / 3,) * 3, UNEQUAL, (0.2,) * 5, (0.125,) * 8])
@pytest.mark.parametrize(("num_samples", "batch_size"), [(50, 8), (50, 7), (3, 8), (17, 1)])
def test_each_global_batch_is_the_same_however_many_workers_take_it(
    shares: tuple[float, ...], num_samples: int, batch_size: int
) -> None:
    data = torch.arange(num_samples)
    alone = load(data, batch_size=batch_size, last_step=20)
    workers = [load(data, shares=shares, index=i, batch_size=batch_size, last_step=20) for i in range(len(shares))]
    for step, whole in enumerate(alone):
        parts = [worker[step] for worker in workers]
        assert [s for part in parts for s in part.samples] == list(whole.samples)
        assert {part.epoch for part in parts} == {whole.epoch}
        assert {part.batch_samples for part in parts} == {len(whole.samples)}
        for part in parts:
            # A part without samples brings a stand-in: the first of the global batch.
            assert part.batch.tolist() == list(part.samples or whole.samples[:1])


def test_an_epoch_sees_each_sample_once_with_its_last_partial_batch() -> None:
    parts = load(torch.arange(50), last_step=14)
    for epoch in (0, 1):
        samples = [s for part in parts if part.epoch == epoch for s in part.samples]
        assert sorted(samples) == list(range(50))
    assert len(parts[6].samples) == 2


def test_a_loader_started_at_any_step_goes_on_as_if_it_had_never_stopped() -> None:
    data = torch.arange(30)
    whole = [part.samples for part in load(data, last_step=9)]
    for first in range(1, 10):
        assert [part.samples for part in load(data, first_step=first, last_step=9)] == whole[first - 1 :]


def test_without_shuffle_samples_come_as_they_lie() -> None:
    parts = list(Loader(torch.arange(10), batch_size=4, shares=(1.0,), index=0, last_step=3, shuffle=False))
    assert [part.samples for part in parts] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)]


def test_a_dataset_that_fetches_many_at_once_is_asked_for_many_at_once() -> None:
    class Batched(Dataset[int]):
        calls: list[list[int]] = []  # noqa: RUF012

        def __len__(self) -> int:
            return 10

        def __getitems__(self, samples: list[int]) -> list[int]:
            self.calls.append(samples)
            return samples

    data = Batched()
    parts = load(data, batch_size=5, last_step=2)
    assert [tuple(call) for call in data.calls] == [part.samples for part in parts]


class Failing(Dataset[int]):
    def __init__(self, bad: int) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        if index == self.bad:
            raise ValueError("a broken row")
        return index


def test_a_sample_that_raises_is_named_with_its_step_and_line() -> None:
    with pytest.raises(
        DataError,
        match=r"sample 17 cannot be loaded for step \d+ on worker 0: ValueError: a broken row "
        r"\(.*test_loader.py:\d+\)\.",
    ):
        load(Failing(17), last_step=5)


def test_samples_that_cannot_be_collated_are_named() -> None:
    data = [torch.zeros(2), torch.zeros(3)]
    with pytest.raises(DataError, match=r"the batch of samples [01], [01] cannot be loaded for step 1"):
        load(data, last_step=1)


def test_a_dataset_that_delivers_nothing_is_given_up_after_the_timeout() -> None:
    release = threading.Event()

    class Stuck(Failing):
        def __getitem__(self, index: int) -> int:
            release.wait(30)
            return index

    loader = Loader(Stuck(-1), batch_size=8, shares=(1.0,), index=0, last_step=1, timeout_s=0.2)
    threading.Timer(0.5, release.set).start()
    with pytest.raises(DataError, match=r"delivered nothing to worker 0 for 0.2 s"):
        list(loader)


class Counted(Failing):
    """Takes `seconds` for each sample, and counts them."""

    def __init__(self, seconds: float) -> None:
        super().__init__(bad=-1)
        self.seconds = seconds
        self.loaded = 0

    def __getitem__(self, index: int) -> int:
        time.sleep(self.seconds)
        self.loaded += 1
        return index


def test_slow_samples_are_loaded_ahead_while_the_worker_computes() -> None:
    data = Counted(seconds=0.002)
    parts = iter(Loader(data, batch_size=4, shares=(1.0,), index=0, last_step=9))
    for _ in range(4):
        next(parts)
    deadline = time.monotonic() + 20
    while data.loaded < 4 * (4 + 2) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert data.loaded >= 4 * (4 + 2)  # the four that were taken, and two ahead


def test_quick_samples_are_loaded_when_they_are_asked_for() -> None:
    data = Counted(seconds=0.0)
    for number, _ in enumerate(Loader(data, batch_size=4, shares=(1.0,), index=0, last_step=5), start=1):
        time.sleep(0.05)  # the worker computes: a hundred times as long as loading takes
        assert data.loaded == 4 * number


def test_the_thread_ends_with_the_iteration() -> None:
    def loaders() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "shoal-loader"]

    parts = iter(Loader(TensorDataset(torch.arange(99)), batch_size=1, shares=(1.0,), index=0, last_step=99))
    next(parts)
    assert len(loaders()) == 1
    parts.close()
    assert loaders() == []
