"""The same numbers in every form that a Job takes its data in."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from shoal.spec.job import Job

SAMPLES, BATCH = 22, 4  # an epoch's last batch is partial


def numbers() -> "Dataset[tuple[Tensor, ...]]":
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(SAMPLES, 5, generator=generator)
    return TensorDataset(x, x.sum(1).sin())


class Numbers(IterableDataset[tuple[Tensor, ...]]):
    """The numbers as a stream; each epoch in another order, where it is told which it is."""

    def __init__(self, *, mixed: bool = False) -> None:
        self._mixed, self._epoch = mixed, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        data = numbers()
        order = torch.arange(SAMPLES)
        if self._mixed:
            order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self._epoch))
        yield from (data[i] for i in order.tolist())


class Pairs(Sampler[list[int]]):
    """Batches of neighbours, in a random order that depends on the epoch."""

    def __init__(self) -> None:
        self.generator: torch.Generator | None = None

    def __iter__(self) -> Iterator[list[int]]:
        for first in torch.randperm(SAMPLES // BATCH, generator=self.generator).tolist():
            yield list(range(BATCH * first, BATCH * first + BATCH))

    def __len__(self) -> int:
        return SAMPLES // BATCH


class Chance(Sampler[int]):
    """An order that nobody can draw again."""

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(SAMPLES).tolist()

    def __len__(self) -> int:
        return SAMPLES


def summed(samples: list[Any]) -> dict[str, Tensor]:
    """A collate_fn of the user's own."""
    return {"x": torch.stack([x for x, _ in samples]), "y": torch.stack([y for _, y in samples])}


def hugging_face(*, as_stream: bool = False) -> Any:
    import datasets

    x, y = numbers()[:]
    data = datasets.Dataset.from_dict({"x": x.tolist(), "y": y.tolist()})
    return data.to_iterable_dataset(num_shards=2).shuffle(seed=3, buffer_size=5) if as_stream else data


FORMS: dict[str, Any] = {
    "dataset": numbers,
    "shuffled loader": lambda: DataLoader(numbers(), batch_size=BATCH, shuffle=True),
    "loader in order": lambda: DataLoader(numbers(), batch_size=BATCH, drop_last=True),
    "loader with a collate_fn": lambda: DataLoader(numbers(), BATCH, collate_fn=summed, num_workers=2),
    "weighted loader": lambda: DataLoader(numbers(), BATCH, sampler=WeightedRandomSampler([1.0, 5.0] * 11, SAMPLES)),
    "loader of a part": lambda: DataLoader(numbers(), BATCH, sampler=SubsetRandomSampler(range(3, 18))),
    "loader of batches": lambda: DataLoader(numbers(), batch_sampler=Pairs()),
    "stream": Numbers,
    "mixed stream": lambda: Numbers(mixed=True),
    "loader of a stream": lambda: DataLoader(Numbers(mixed=True), batch_size=BATCH, drop_last=True),
    "Hugging Face dataset": hugging_face,
    "Hugging Face stream": lambda: hugging_face(as_stream=True),
}


def job(*, form: str, steps: int, **fields: Any) -> Job:
    """A regression on the numbers in one of the `FORMS`."""
    data = FORMS[form]()
    named = "Hugging" in form or "collate_fn" in form
    made = Job(
        model=lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)),
        inputs=(lambda batch: batch["x"]) if named else None,
        loss=lambda output, batch: F.mse_loss(output[:, 0], batch["y"] if named else batch[1]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        data=data,
        steps=steps,
        batch_size=0 if isinstance(data, DataLoader) else BATCH,
    )
    return dataclasses.replace(made, **fields) if fields else made
