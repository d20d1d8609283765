"""A DataLoader of Lightning's, cut for workers: what each has in an evaluation."""

from itertools import chain

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from shoal.core.errors import ConfigError
from shoal.lightning.loaders import CutLoader, cut_loader


def evaluated(num_samples: int, *, batch_size: int, shares: tuple[float, ...]) -> list[CutLoader]:
    """Return the loaders of all workers."""
    loader = DataLoader(TensorDataset(torch.arange(num_samples)), batch_size=batch_size)
    cut = [
        cut_loader(loader, shares=shares, index=index, seed=0, epoch=0, trains=lambda _: False)
        for index in range(len(shares))
    ]
    return [each for each in cut if isinstance(each, CutLoader)]


@pytest.mark.parametrize(
    ("num_samples", "batch_size", "workers", "batches"),
    [(10, 4, 2, 3), (9, 4, 2, 2), (1000, 1, 2, 500), (1001, 1, 2, 500), (1000, 2, 4, 250), (10, 3, 4, 2), (9, 3, 1, 3)],
)
def test_batches_are_joined_until_each_worker_has_a_sample_and_no_further(
    num_samples: int, batch_size: int, workers: int, batches: int
) -> None:
    loaders = evaluated(num_samples, batch_size=batch_size, shares=(1 / workers,) * workers)
    given = [[batch[0].tolist() for batch in loader] for loader in loaders]
    assert sorted(chain.from_iterable(chain.from_iterable(given))) == list(range(num_samples))
    assert {len(loader) for loader in loaders} == {len(of_worker) for of_worker in given} == {batches}
    assert max(len(batch) for batch in chain.from_iterable(given)) <= batch_size + workers


def test_fewer_samples_than_workers_cannot_be_evaluated_on() -> None:
    (first, *_) = evaluated(3, batch_size=1, shares=(0.25,) * 4)
    assert len(first) == 1
    with pytest.raises(ConfigError, match="3 samples to evaluate on cannot be divided among 4 workers"):
        list(first)
