"""What a Job takes of a DataLoader, a stream and a Hugging Face dataset, and what it refuses."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
)

from shoal.core.errors import ConfigError, DataError
from shoal.data.stream import Stream
from shoal.data.stream_steps import StreamLoader
from shoal.fault.same_samples import sample_hashes
from shoal.spec.job import Job
from shoal.spec.plan import Plan
from shoal.training.loader import open_loader
from tests.support.given import BATCH, SAMPLES, Chance, Numbers, Pairs, numbers, summed

CPU = torch.device("cpu")
COUNTED: Any = torch.arange(SAMPLES)


def job(data: Any, **fields: Any) -> Job:
    given: dict[str, Any] = {"steps": None if "epochs" in fields else 11, **fields}
    return Job(model=object, loss=lambda a, b: a, optimizer=lambda p: p, data=data, **given)


def batches(of: Job) -> list[Any]:
    return [part.batch for part in open_loader(of, Plan(), index=0, first_step=1, device=CPU)]


class Random(IterableDataset[Tensor]):
    """Other samples each time."""

    def __iter__(self) -> Iterator[Tensor]:
        yield from torch.rand(9)


class Counted(Numbers):
    def __len__(self) -> int:
        return SAMPLES


def test_a_loader_in_order_gives_its_own_batches() -> None:
    for options in ({}, {"drop_last": True}, {"collate_fn": summed}):
        loader = DataLoader(numbers(), batch_size=BATCH, **options)
        mine = batches(job(loader))
        theirs = [*loader, *loader, *loader][: len(mine)]
        flat = [list(b.values()) if isinstance(b, dict) else list(b) for b in (*mine, *theirs)]
        for ours, expected in zip(flat[: len(mine)], flat[len(mine) :], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


def test_a_shuffled_loader_sees_each_sample_once_an_epoch() -> None:
    made = job(DataLoader(COUNTED, batch_size=BATCH, shuffle=True), epochs=1)
    seen = torch.cat(batches(made))
    assert seen.tolist() != sorted(seen.tolist())
    assert sorted(seen.tolist()) == list(range(SAMPLES))
    assert made.batch_size == BATCH


def test_batches_of_a_sampler_of_batches_stay_together() -> None:
    made = job(DataLoader(COUNTED, batch_sampler=Pairs()))
    assert all(batch.tolist() == list(range(batch[0], batch[0] + BATCH)) for batch in batches(made))
    assert made.steps_per_epoch == SAMPLES // BATCH


def test_a_job_takes_a_sampler_without_a_loader() -> None:
    made = job(torch.arange(SAMPLES), batch_size=BATCH, sampler=RandomSampler(range(SAMPLES), num_samples=8), epochs=2)
    assert made.total_steps == 4
    first, second = batches(made)[:2], batches(made)[2:]
    assert len({*torch.cat(first).tolist()}) == 8
    assert torch.cat(first).tolist() != torch.cat(second).tolist()


def test_columns_of_a_hugging_face_dataset_come_as_tensors() -> None:
    data = datasets.Dataset.from_dict({"ids": [[i, i + 1, i + 2] for i in range(6)], "text": list("abcdef")})
    for form in (data, data.with_format("torch"), data.with_format("numpy"), data.to_iterable_dataset()):
        (batch,) = batches(job(form, batch_size=6, steps=1))
        assert batch["ids"].shape == (6, 3)
        assert sorted(batch["text"]) == list("abcdef")
    as_they_are = job(data, batch_size=6, shuffle=False, collate=lambda samples: samples, epochs=1)
    assert batches(as_they_are)[0][0] == {"ids": [0, 1, 2], "text": "a"}


def test_a_hugging_face_dataset_keeps_the_format_that_it_has() -> None:
    data = datasets.Dataset.from_dict({"ids": [[1, 2], [3, 4]]})
    for form in (data.with_format("numpy"), data.with_format("numpy").to_iterable_dataset()):
        kept = job(form, batch_size=2).data
        (sample,) = kept.head(1) if isinstance(kept, Stream) else [kept[0]]
        assert isinstance(sample["ids"], np.ndarray)


def test_a_stream_with_a_length_has_epochs() -> None:
    made = job(Counted(), batch_size=BATCH, epochs=2)
    assert made.total_steps == 2 * -(-SAMPLES // BATCH)
    assert sum(len(batch[0]) for batch in batches(made)) == 2 * SAMPLES


def test_a_stream_is_evaluated_on_to_its_end() -> None:
    settings: dict[str, Any] = {"batch_size": BATCH, "shares": (0.5, 0.5), "last_step": None}
    parts = [list(StreamLoader(Stream(Numbers()), index=index, **settings)) for index in range(2)]
    assert [len(each) for each in parts] == [6, 6]
    assert sum(len(part.samples) for each in parts for part in each) == SAMPLES


def test_shares_that_change_take_the_stream_on_where_it_is() -> None:
    loader = StreamLoader(Stream(Numbers()), batch_size=BATCH, shares=(0.5, 0.5), index=0, last_step=9, is_ahead=True)
    taken = []
    for part in loader:
        taken.append(part.samples)
        if part.step == 3:
            break
    loader.go_on(4, (0.75, 0.25))
    taken += [part.samples for part in loader]
    assert taken[2:5] == [(8, 9), (12, 13, 14), (16, 17, 18)]
    assert len(taken) == 9


def test_only_what_a_stream_gives_each_time_is_compared_between_workers() -> None:
    assert len(sample_hashes(Stream(Numbers()))) == 3
    assert sample_hashes(Stream(Random())) == {}


def test_a_stream_that_can_be_read_once_says_so_at_its_end() -> None:
    class Once:
        def __init__(self) -> None:
            self._left = iter(range(9))

        def __iter__(self) -> Iterator[int]:
            return self._left

    with pytest.raises(DataError, match="gave nothing in epoch 1: it can be read only once, and step 4 is beyond"):
        batches(job(Once(), batch_size=BATCH))


def test_an_error_in_a_stream_names_the_sample_and_the_line() -> None:
    class Broken:
        def __iter__(self) -> Iterator[int]:
            yield from range(9)
            raise ValueError("no more tape")

    with pytest.raises(DataError, match=r"after sample 8 of epoch 0 on worker 0, for step 3: ValueError: no more tape"):
        batches(job(Broken(), batch_size=BATCH))


class Uneven(Pairs):
    def __iter__(self) -> Iterator[list[int]]:
        yield from ([0], [1, 2], [3])


PLAIN = TensorDataset(torch.arange(8))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: job(DataLoader(PLAIN, batch_size=None)), "its dataset makes the batches, which nobody can cut"),
        (
            lambda: job(PLAIN, batch_size=4, eval_data=DataLoader(PLAIN, batch_size=None)),
            "Job.eval_data is a DataLoader with batch_size=None: its dataset makes the batches",
        ),
        (lambda: job(DataLoader(PLAIN, 4), drop_last=True), "Job.drop_last=True, and its DataLoader gives the last"),
        (lambda: job(DataLoader(PLAIN, 4), batch_size=8), "Job.batch_size=8, and its DataLoader makes batches of 4."),
        (lambda: job(DataLoader(PLAIN, 4, collate_fn=summed), collate=summed), "Job.collate beside a DataLoader"),
        (lambda: job(DataLoader(PLAIN, 4), sampler=Chance()), "Job.sampler beside a DataLoader"),
        (
            lambda: job(DataLoader(PLAIN, 4, sampler=DistributedSampler(PLAIN, 2, 0))),
            "shoal does that itself. Leave the sampler out",
        ),
        (lambda: job(DataLoader(numbers(), 4, sampler=Chance())), "Chance gives another order each time it is asked"),
        (lambda: job(DataLoader(numbers(), batch_sampler=Uneven())), "whose Uneven makes batches of 1 to 2 samples"),
        (lambda: job(Numbers(), batch_size=4, epochs=1), "Job.epochs=1 of a stream whose length nobody knows."),
        (lambda: job(Numbers(), batch_size=4, block_rows=4), "Job.block_rows is not for streams"),
        (lambda: job(Numbers(), batch_size=4, sampler=Chance()), "Job.data is a stream, which has its own."),
        (lambda: job(datasets.DatasetDict({"train": []}), batch_size=4), "Take one of them: data['train']."),
        (lambda: job(PLAIN, batch_size=9, drop_last=True), "Job.data is empty: drop_last leaves no batch of 9"),
        (lambda: job(3, batch_size=9), "Job.data must be a dataset with len() and [index], one to iterate over"),
    ],
)  # fmt: skip
def test_what_cannot_be_taken_is_refused_in_a_sentence(make: Callable[[], Job], sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        make()


@pytest.mark.parametrize(
    ("loader", "name"),
    [
        (DataLoader(PLAIN, 2, sampler=SubsetRandomSampler([0, 1, 2])), "SubsetRandomSampler"),
        (
            DataLoader(PLAIN, batch_sampler=BatchSampler(SubsetRandomSampler([0, 1, 2]), 2, False)),
            "SubsetRandomSampler",
        ),
        (DataLoader(PLAIN, 2, sampler=RandomSampler(PLAIN, num_samples=3)), "RandomSampler"),
        (DataLoader(PLAIN, 2, sampler=RandomSampler(PLAIN, replacement=True)), "RandomSampler"),
        (DataLoader(PLAIN, 2, sampler=SequentialSampler(range(3))), "SequentialSampler"),
        (DataLoader(PLAIN, batch_sampler=Uneven()), "Uneven"),
    ],
)
def test_a_choice_of_samples_to_evaluate_is_refused_however_a_loader_makes_it(
    loader: DataLoader[Any], name: str
) -> None:
    with pytest.raises(ConfigError, match=f"Job.eval_data has a {name}: all samples of its dataset are evaluated"):
        job(PLAIN, batch_size=4, eval_data=loader)


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(PLAIN, 2),
        DataLoader(PLAIN, 2, shuffle=True),
        DataLoader(PLAIN, batch_sampler=BatchSampler(SequentialSampler(PLAIN), 2, False)),
    ],
)
def test_all_samples_of_a_loader_without_a_choice_are_evaluated(loader: DataLoader[Any]) -> None:
    assert job(PLAIN, batch_size=4, eval_data=loader).eval_data is PLAIN


def test_training_on_the_first_samples_of_a_dataset_takes_no_others() -> None:
    made = job(DataLoader(PLAIN, 2, sampler=SequentialSampler(range(3))))
    assert made.num_samples == 3
