"""Maps that are filled ahead."""

import mmap
import threading
from pathlib import Path

import numpy as np
import pytest

from shoal.data.loading import warm


def test_filling_a_map_leaves_it_as_it_is_and_in_memory(tmp_path: Path) -> None:
    file = tmp_path / "values"
    content = np.arange(3_000_000, dtype=np.int64)
    content.tofile(file)
    with file.open("rb") as opened:
        mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    values = np.frombuffer(mapped, np.int64)[1000:]
    warm.fill(values)
    assert np.array_equal(values, content[1000:])


def test_a_warmer_takes_what_there_is_room_for_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    filled: list[int] = []
    monkeypatch.setattr(warm, "_free_bytes", lambda: 80 << 20)
    monkeypatch.setattr(warm, "_IDLE_S", 0.01)
    monkeypatch.setattr(warm, "fill", lambda array: filled.append(array.nbytes >> 20))
    warmer = warm.Warmer()
    for megabytes in (30, 20, 1, 8):
        warmer.add(np.empty(megabytes << 20, np.uint8))
    thread = warmer._thread
    assert isinstance(thread, threading.Thread)
    thread.join(timeout=30)
    assert not thread.is_alive()
    assert filled == [30, 8], "20 MB are more than half of 80 less 30, and 1 MB is not worth it"
