"""Maps that are filled ahead."""

import ctypes
import gc
import mmap
import threading
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from shoal.data.loader import Loader
from shoal.data.loading import tables, warm
from shoal.data.pack.progress import Quiet
from shoal.data.pack.writer import pack


def test_filling_a_map_leaves_it_as_it_is_and_in_memory(tmp_path: Path) -> None:
    file = tmp_path / "values"
    content = np.arange(3_000_000, dtype=np.int64)
    content.tofile(file)
    with file.open("rb") as opened:
        mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    values = np.frombuffer(mapped, np.int64)[1000:]
    warm.fill(values)
    assert np.array_equal(values, content[1000:])


def resident_pages(values: NDArray[np.uint8]) -> int:
    """Return how many pages of a map's file are in memory, whoever has read them."""
    pages = (ctypes.c_ubyte * (len(values) // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(values.ctypes.data), ctypes.c_size_t(len(values)), pages) == 0
    return sum(page & 1 for page in pages)


def test_rows_that_are_read_at_random_come_alone_until_their_part_is_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "sparse").open("wb") as sparse:
        sparse.truncate(64 << 20)
    with (tmp_path / "sparse").open("rb") as opened:
        mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    values, may_fill = np.frombuffer(mapped, np.uint8), threading.Event()
    monkeypatch.setattr(warm, "_free_bytes", lambda: 256 << 20)
    monkeypatch.setattr(warm, "_IDLE_S", 0.01)
    fill = warm.fill
    monkeypatch.setattr(warm, "fill", lambda array: may_fill.wait(30) and fill(array))
    warmer = warm.Warmer()
    warmer.add(values, is_scattered=True)
    assert [int(values[row]) for row in (5 << 20, 40 << 20)] == [0, 0]
    assert resident_pages(values) == 2
    may_fill.set()
    assert warmer._thread is not None
    warmer._thread.join(timeout=30)
    assert resident_pages(values) == len(values) // mmap.PAGESIZE


def test_a_warmer_takes_what_there_is_room_for_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    filled: list[int] = []
    monkeypatch.setattr(warm, "_free_bytes", lambda: 80 << 20)
    monkeypatch.setattr(warm, "_IDLE_S", 0.01)
    monkeypatch.setattr(warm, "fill", lambda array: filled.append(array.nbytes >> 20))
    warmer = warm.Warmer()
    arrays = [np.empty(megabytes << 20, np.uint8) for megabytes in (30, 20, 1, 8)]
    for array in arrays:
        warmer.add(array)
    thread = warmer._thread
    assert isinstance(thread, threading.Thread)
    thread.join(timeout=30)
    assert not thread.is_alive()
    assert filled == [30, 8], "20 MB are more than half of 80 less 30, and 1 MB is not worth it"
    assert warmer.left_bytes == 2 << 20
    del array, arrays
    gc.collect()
    assert warmer.left_bytes == 40 << 20, "what nobody maps any more has been given back"


def test_loaders_that_come_and_go_leave_the_warmer_what_it_may_fill(tmp_path: Path) -> None:
    rows = ({"x": np.zeros(1 << 20, np.float32)} for _ in range(4))
    pack(rows, tmp_path / "a.pack", compression="none", report=Quiet())
    before = tables._WARMER.left_bytes
    for _ in range(3):
        loader = Loader(tmp_path / "a.pack", batch_size=1)
        assert len([*loader]) == 4
        del loader
        warming = tables._WARMER._thread
        if warming is not None:
            warming.join(timeout=30)  # it holds what it fills
        gc.collect()
        assert tables._WARMER.left_bytes == before
