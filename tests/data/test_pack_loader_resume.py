"""Loaders of packs that go on where another one has stopped."""

from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from shoal.core.errors import ConfigError
from shoal.data.loader import Loader
from tests.data.packs import NUM_ROWS, expected, labels, rows_pack

UNEQUAL = (0.25, 0.25, 0.10, 0.4)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rows_pack(tmp_path_factory.mktemp("packs") / "rows.pack", NUM_ROWS)


def test_resuming_at_every_batch_gives_all_that_follows(rows: Path) -> None:
    options: dict[str, Any] = {"batch_size": 29, "columns": ["label"], "seed": 1}
    whole = labels(Loader(rows, **options, epochs=4))
    per_epoch = len(Loader(rows, **options))
    for taken in range(2 * per_epoch + 1):
        loader = Loader(rows, **options)
        batches = chain(loader, loader, loader)
        for _ in range(taken):
            next(batches)
        state = loader.state_dict()
        resumed = Loader(rows, **options, threads=1 + taken % 3)
        resumed.load_state_dict(state)
        end = max(1, -(-taken // per_epoch)) * per_epoch
        assert labels(resumed) == whole[taken:end], f"after {taken} batches"
        assert labels(resumed) == whole[end : end + per_epoch], "and then the next epoch"


def test_an_iteration_over_several_epochs_that_is_resumed_ends_where_it_would_have(rows: Path) -> None:
    options: dict[str, Any] = {"batch_size": 60, "columns": ["label"], "seed": 1, "epochs": 3}
    whole, per_epoch = labels(Loader(rows, **{**options, "epochs": 8})), len(Loader(rows, batch_size=60))
    for before in (0, 1):  # whole iterations, before the one in which the state is taken
        for taken in range(3 * per_epoch + 1):
            loader, first = Loader(rows, **options), 3 * before * per_epoch
            for _ in range(before):
                labels(loader)
            for _, _ in zip(range(taken), loader, strict=False):
                pass
            resumed = Loader(rows, **options)
            resumed.load_state_dict(loader.state_dict())
            assert resumed.state_dict() == loader.state_dict()
            assert len(resumed) == 3 * per_epoch
            rest = whole[first + taken : first + 3 * per_epoch]
            assert labels(resumed) == rest, f"after {taken} batches of iteration {before}"
            following = whole[first + 3 * per_epoch : first + 6 * per_epoch]
            assert labels(resumed)[: len(following)] == following, "and then the next three"


def test_a_state_is_resumed_by_another_number_of_workers(rows: Path) -> None:
    options: dict[str, Any] = {"batch_size": 24, "columns": ["label"]}
    first = Loader(rows, **options, shares=(0.5, 0.5), index=1)
    for batch, _ in zip(first, range(3), strict=False):
        assert len(batch["label"]) == 12
    state = first.state_dict()
    assert state["position"] == 4 * 24  # zip took a fourth before it saw the end
    parts = []
    for index in range(4):
        worker = Loader(rows, **options, shares=UNEQUAL, index=index)
        worker.load_state_dict(state)
        parts.append(labels(worker))
    assert [[*chain(*each)] for each in zip(*parts, strict=True)] == expected(24)[4:]


def test_a_state_that_means_other_samples_is_refused(rows: Path) -> None:
    state = Loader(rows, batch_size=8).state_dict()
    with pytest.raises(ConfigError, match=r"taken with seed=0, but this loader has seed=1"):
        Loader(rows, batch_size=8, seed=1).load_state_dict(state)
    with pytest.raises(ConfigError, match=r"taken with num_samples=203"):
        Loader([1, 2, 3], batch_size=1).load_state_dict(state)
    with pytest.raises(ConfigError, match=r"stands at sample 12 of its epoch, which is no multiple of batch_size=8"):
        Loader(rows, batch_size=8).load_state_dict({**state, "position": 12})
    with pytest.raises(ConfigError, match=r"no state of a shoal.Loader"):
        Loader(rows, batch_size=8).load_state_dict({"epoch": 1})


def test_breaking_off_goes_on_with_the_next_epoch_as_a_dataloader_does(rows: Path) -> None:
    loader = Loader(rows, batch_size=50, columns=["label"])
    next(iter(loader))
    assert labels(loader) == expected(50, epoch=1)
    assert loader.epoch == 2
