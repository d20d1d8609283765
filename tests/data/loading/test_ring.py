"""Batches gathered by threads of C, beside those that Python's threads load."""

import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.data.loader import Loader
from shoal.data.loading.ring import RingFeed
from shoal.data.pack.progress import Quiet
from shoal.data.pack.writer import pack
from shoal.data.view import View
from shoal.native import library as native
from shoal.native.gather_ring import FAILED, Ring
from tests.data.packs import tokens_pack

NUM_ROWS = 203
DTYPES = ("bool", "int8", "uint16", "float32", "float64", "int64")
WAYS: list[dict[str, Any]] = [
    {"batch_size": 1},
    {"batch_size": 8, "threads": 1},
    {"batch_size": 8, "threads": 4, "prefetch": 9},
    {"batch_size": 33, "threads": 2, "prefetch": 1},
    {"batch_size": 33, "threads": 2, "prefetch": 0},
    {"batch_size": 33, "drop_last": True, "seed": 7},
    {"batch_size": 20, "shuffle": False},
    {"batch_size": 500, "epochs": 40},
    {"batch_size": 30, "shares": (0.5, 0.3, 0.2), "index": 2},
    {"batch_size": 200, "shares": (0.9, 0.1), "index": 1, "threads": 3},
]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packs") / "rows.pack"
    random = np.random.default_rng(0)
    values = {dtype: random.integers(0, 2, (NUM_ROWS, 3)).astype(dtype) for dtype in DTYPES}
    values |= {"label": np.arange(NUM_ROWS), "matrix": random.random((NUM_ROWS, 4, 5))}
    samples = ({name: value[row] for name, value in values.items()} for row in range(NUM_ROWS))
    pack(samples, path, compression="none", part_bytes=10_000, report=Quiet())
    assert len(View(path).pack.manifest.parts) > 3
    return path


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokens_pack(tmp_path_factory.mktemp("packs") / "tokens.pack", 200)


@pytest.fixture
def rings(monkeypatch: pytest.MonkeyPatch) -> list[range]:
    """The steps of each ring that was made."""
    if native.library() is None:
        pytest.skip("shoal is installed without its C part")
    found: list[range] = []

    class Watched(RingFeed):
        def __init__(self, samples: Any, steps: range, *others: Any, **options: Any) -> None:
            found.append(steps)
            super().__init__(samples, steps, *others, **options)

    monkeypatch.setattr("shoal.data.loader.RingFeed", Watched)
    return found


def copied(batches: Iterator[Any]) -> list[dict[str, torch.Tensor]]:
    return [{name: tensor.clone() for name, tensor in batch.items()} for batch in batches]


def assert_same(ours: list[dict[str, torch.Tensor]], theirs: list[dict[str, torch.Tensor]]) -> None:
    assert len(ours) == len(theirs)
    for batch, other in zip(ours, theirs, strict=True):
        assert batch.keys() == other.keys()
        for name, tensor in batch.items():
            assert tensor.dtype == other[name].dtype
            assert torch.equal(tensor, other[name])


@pytest.mark.parametrize("way", WAYS, ids=lambda way: ",".join(map(str, way.values())))
def test_batches_are_the_same_as_those_of_pythons_threads(rows: Path, way: dict[str, Any], rings: list[range]) -> None:
    loader, plain = Loader(rows, **way), Loader(rows, **way, copy=True)
    for _ in range(3):
        assert_same(copied(iter(loader)), copied(iter(plain)))
    assert rings[-1] == range(2 * len(loader), 3 * len(loader)), "the third time, all parts were mapped"


@pytest.mark.parametrize("stride", [None, 3, 40])
@pytest.mark.parametrize("threads", [1, 2])
def test_windows_are_the_same_too(tokens: Path, stride: int | None, threads: int, rings: list[range]) -> None:
    options: dict[str, Any] = {"batch_size": 7, "window": 17, "stride": stride, "threads": threads, "epochs": 2}
    loader, plain = Loader(tokens, **options), Loader(tokens, **options, copy=True)
    for _ in range(2):
        assert_same(copied(iter(loader)), copied(iter(plain)))
    assert rings[-1].start == len(loader)


def test_a_ring_takes_over_where_the_last_part_was_mapped(rows: Path, rings: list[range]) -> None:
    loader = Loader(rows, batch_size=8)
    labels = [label for batch in loader for label in batch["label"].tolist()]
    assert sorted(labels) == list(range(NUM_ROWS))
    assert len(rings) == 1
    assert 0 < rings[0].start < rings[0].stop == len(loader)


def test_resuming_at_every_batch_gives_all_that_follows(rows: Path, rings: list[range]) -> None:
    view = View(rows, columns=["label"])
    whole = copied(iter(Loader(view, batch_size=33)))
    first = Loader(view, batch_size=33)
    for number, batch in enumerate(first, start=1):
        assert torch.equal(batch["label"], whole[number - 1]["label"])
        if number < len(whole):
            other = Loader(view, batch_size=33)
            other.load_state_dict(first.state_dict())
            assert_same(copied(iter(other)), whole[number:])
    assert len(rings) > len(whole)


def test_a_batch_stays_as_it_is_until_the_next_one_is_asked_for(rows: Path, rings: list[range]) -> None:
    loader = Loader(rows, batch_size=5, threads=3, prefetch=20)
    list(loader)
    for batch in loader:
        before = batch["matrix"].clone()
        batch["matrix"].unsqueeze_(0)  # a tensor is the worker's own, and so is the dict
        batch["more"] = before
        assert torch.equal(batch["matrix"][0], before)
    assert len(rings) == 2
    assert all(batch["matrix"].shape[1:] == (4, 5) and "more" not in batch for batch in loader)


def test_its_threads_end_with_the_iteration_however_that_ends(rows: Path, rings: list[range]) -> None:
    loader = Loader(rows, batch_size=2, threads=3, prefetch=4)
    list(loader)
    before = threads_of_this_process()
    list(loader)
    assert threads_of_this_process() == before
    batches = iter(loader)
    next(batches)
    assert threads_of_this_process() == before + 2, "the third is the one who asks"
    del batches
    gc.collect()
    assert threads_of_this_process() == before
    assert len(rings) == 3


def threads_of_this_process() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_the_report_counts_every_batch(rows: Path, rings: list[range]) -> None:
    loader = Loader(rows, batch_size=4)
    list(loader)
    list(loader)
    assert rings
    report = loader.report()
    assert report.batches == 2 * len(loader)
    assert report.waited_s > 0
    assert report.load_s > 0


def test_what_needs_python_is_loaded_by_python(rows: Path, tokens: Path, rings: list[range]) -> None:
    plain: dict[str, Any] = {"batch_size": 8, "epochs": 2}
    for more in ({"copy": True}, {"block_rows": 16}, {"transform": lambda batch: batch}, {"workers": 1}):
        list(Loader(rows, **plain, **more))
    list(Loader(tokens, window=9, with_documents=True, **plain))
    list(Loader(tokens, **plain))
    assert not rings


def test_without_the_c_part_nothing_changes(rows: Path, monkeypatch: pytest.MonkeyPatch, rings: list[range]) -> None:
    loader = Loader(rows, batch_size=33)
    ours = copied(iter(loader)) + copied(iter(loader))
    assert rings
    rings.clear()
    monkeypatch.setattr("shoal.data.view.is_available", lambda: False)
    other = Loader(rows, batch_size=33)
    assert_same(ours, copied(iter(other)) + copied(iter(other)))
    assert not rings


def test_a_batch_that_c_refuses_is_loaded_by_python(
    rows: Path, monkeypatch: pytest.MonkeyPatch, rings: list[range]
) -> None:
    loader = Loader(rows, batch_size=33)
    whole = copied(iter(loader))
    asked = threading.Event()
    honest = Ring.next

    def refuse_one(self: Ring) -> int:
        slot = honest(self)
        if asked.is_set():
            return slot
        asked.set()
        return FAILED

    monkeypatch.setattr(Ring, "next", refuse_one)
    again = Loader(rows, batch_size=33)
    assert_same(copied(iter(again)), whole)
    assert asked.is_set()
    assert rings
