"""Reading rates of real folders."""

import shutil
from pathlib import Path

import pytest

from shoal.core.errors import ConfigError
from shoal.data.storage import measure_storage, usual_folders


def test_a_folder_is_read_and_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    storage = measure_storage(tmp_path, seconds=0.01)
    assert storage.read_bytes_per_s > 0
    assert storage.path == str(tmp_path.resolve())
    assert 0 < storage.free_bytes <= shutil.disk_usage(tmp_path).total
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_the_usual_folders_can_be_written_and_lie_on_different_file_systems() -> None:
    folders = usual_folders()
    assert Path.cwd() in folders
    assert len({folder.stat().st_dev for folder in folders}) == len(folders)


def test_a_folder_that_is_not_there_or_takes_no_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--storage .*nowhere: there is no such folder"):
        measure_storage(tmp_path / "nowhere", seconds=0.01)
    with pytest.raises(ConfigError, match="--storage /proc: no file can be written there"):
        measure_storage(Path("/proc"), seconds=0.01)
