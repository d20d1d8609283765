import os
from pathlib import Path

import pytest

from shoal.core.files import write_whole


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "a file.txt"
    write_whole(path, "old")
    write_whole(path, "new and longer")
    assert path.read_text() == "new and longer"
    assert [path.name for path in tmp_path.iterdir()] == ["a file.txt"]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "result.json"
    write_whole(path, "old")

    def full_disk(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
