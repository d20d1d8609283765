"""Bytes past the page cache: the file has all of them, whatever their number, and wherever they begin."""

import errno
import os
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.fault.checkpoint import direct
from shoal.fault.checkpoint.direct import BLOCK_BYTES, write_directly
from shoal.fault.checkpoint.memory import _in_blocks

SIZES = [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES, (4 << 20) + 5, (9 << 20) - 3]


def some(num_bytes: int) -> torch.Tensor:
    memory = _in_blocks(num_bytes, pinned=False)
    assert memory.data_ptr() % BLOCK_BYTES == 0
    return memory.copy_(torch.arange(num_bytes) % 251)


def check(path: Path, memory: torch.Tensor) -> None:
    ticks: list[int] = []
    said = write_directly(path, memory, lambda: ticks.append(1))
    content = memory.numpy().tobytes()
    assert path.read_bytes() == content
    assert said == f"{zlib.crc32(content):08x}"
    assert bool(ticks) == bool(content)


@pytest.mark.parametrize("num_bytes", SIZES)
def test_a_file_of_any_size_is_whole(tmp_path: Path, num_bytes: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"what was there before" * 1000)
    check(path, some(num_bytes))


def test_memory_that_begins_within_a_block_goes_by_the_page_cache(tmp_path: Path) -> None:
    check(tmp_path / "file", some(3 * BLOCK_BYTES + 100)[1:])


def test_a_file_system_that_cannot_is_written_as_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refusing(path: Any, flags: int, mode: int = 0o777) -> int:
        if direct._DIRECT and flags & direct._DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refusing)
    check(tmp_path / "file", some(2 * BLOCK_BYTES + 7))


def test_a_full_disk_is_not_taken_for_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int, piece: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        write_directly(tmp_path / "file", some(BLOCK_BYTES), lambda: None)
