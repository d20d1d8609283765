"""A loader that knows of no workers, divided among them by whoever is given it."""

from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import shoal
from shoal.core.errors import ConfigError, DataError
from shoal.data.pack.progress import Quiet


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packs") / "numbers.pack"
    shoal.pack([{"number": number} for number in range(21)], path, report=Quiet())
    return path


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.7, 0.3), (0.25,) * 4])
def test_parts_make_the_global_batches_and_say_what_they_are_of_them(numbers: Path, shares: tuple[float, ...]) -> None:
    whole = [batch["number"].tolist() for batch in shoal.Loader(numbers, batch_size=5)]
    parts = []
    for index in range(len(shares)):
        loader = shoal.Loader(numbers, batch_size=5).divided(shares, index=index, has_stand_ins=True)
        assert loader.leaves_nothing  # the last batch has one sample
        given = [(batch["number"].tolist(), loader.given()) for batch in loader]
        for loaded, (samples, counted, of_all) in given:
            assert loaded == list(samples)
            assert of_all == len(whole[given.index((loaded, (samples, counted, of_all)))])
        parts.append([loaded[: told[1]] for loaded, told in given])
    assert [[*_joined(batch)] for batch in zip(*parts, strict=True)] == whole


def _joined(parts: tuple[list[int], ...]) -> list[int]:
    return torch.cat([torch.tensor(part, dtype=torch.int64) for part in parts]).tolist()


def test_a_loader_is_divided_once(numbers: Path) -> None:
    half = shoal.Loader(numbers, batch_size=4).divided((0.5, 0.5), index=1)
    with pytest.raises(ConfigError, match="is that of worker 1 already"):
        half.divided((0.5, 0.5), index=0)
    with pytest.raises(ConfigError, match="shares are fractions of 1"):
        shoal.Loader(numbers, batch_size=4).divided((0.5, 0.6), index=0)


class Row(NamedTuple):
    numbers: torch.Tensor
    name: str


ROWS = [{"row": Row(torch.full((3,), number), f"row {number}"), "number": number} for number in range(9)]


def as_lists(batch: dict[str, Any]) -> list[Any]:
    return [batch["row"].numbers.tolist(), list(batch["row"].name), batch["number"].tolist()]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(("batch_size", "shares"), [(4, (0.5, 0.5)), (2, (0.25,) * 4), (4, (1.0, 0.0))])
def test_a_part_that_is_left_nothing_is_an_empty_batch_of_the_same_form(
    batch_size: int, shares: tuple[float, ...], workers: int
) -> None:
    options: dict[str, Any] = {"batch_size": batch_size, "workers": workers}
    alone = [as_lists(batch) for batch in shoal.Loader(ROWS, **options)]
    divided = []
    for index in range(len(shares)):
        loader = shoal.Loader(ROWS, **options, shares=shares, index=index, copy=True)
        assert loader.leaves_nothing
        batches = list(loader)
        assert {batch["row"].numbers.shape[1:] for batch in batches} == {(3,)}
        assert {batch["number"].dtype for batch in batches} == {torch.int64}
        divided.append(map(as_lists, batches))
    assert [[[*chain(*column)] for column in zip(*parts, strict=True)] for parts in zip(*divided, strict=True)] == alone


def test_a_collate_that_takes_no_samples_makes_the_empty_batch_itself() -> None:
    *_, last = shoal.Loader(ROWS, batch_size=4, shares=(0.5, 0.5), index=1, collate=list)
    assert last == []


def test_an_empty_batch_that_nobody_can_make_is_an_error_that_says_what_to_do() -> None:
    loader = shoal.Loader(ROWS, batch_size=4, shares=(0.5, 0.5), index=1, collate=lambda rows: rows[0]["row"].name)
    with pytest.raises(DataError, match=r"a str cannot be cut to none\. Let collate take an empty list, or load with"):
        list(loader)
