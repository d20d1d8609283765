"""A loader that knows of no workers, divided among them by whoever is given it."""

from pathlib import Path

import pytest
import torch

import shoal
from shoal.core.errors import ConfigError
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
