"""The same input gives the same bytes: by any number of processes, in batches or row by row, also after a crash."""

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal
from shoal.core.errors import ConfigError, DataError
from shoal.data.pack.progress import Quiet
from shoal.data.pack.reader import Pack
from shoal.data.pack.writer import group_slices, pack
from tests.data.pack.sources import Batched, MadeUp, Rows, assert_same, files_of, sample

OPTIONS: dict[str, Any] = {"part_bytes": 30e3, "compression": {"x": "zstd", "text": "lz4"}, "storage_bytes_per_s": 1e12}


class Told(Quiet):
    """Keeps what is said, and counts."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.rows = 0

    def say(self, line: str) -> None:
        self.lines.append(line)

    def add(self, rows: int, num_bytes: int) -> None:
        self.rows += rows


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    path = tmp_path_factory.mktemp("wanted") / "a.pack"
    pack(MadeUp(), path, workers=1, report=Quiet(), **OPTIONS)
    assert [found["label"] for found in Pack(path, columns=["label"])] == list(range(1000))
    return files_of(path)


@pytest.mark.parametrize(("source", "workers"), [(MadeUp, 2), (MadeUp, 3), (Batched, 1), (Batched, 2)])
def test_bytes_do_not_depend_on_processes_nor_on_batches(
    source: type[MadeUp], workers: int, wanted: dict[str, bytes], tmp_path: Path
) -> None:
    told = Told()
    pack(source(), tmp_path / "a.pack", workers=workers, report=told, **OPTIONS)
    assert files_of(tmp_path / "a.pack") == wanted
    assert told.rows == 1000
    assert list(tmp_path.iterdir()) == [tmp_path / "a.pack"]


def test_an_iterator_is_read_once_and_in_order(tmp_path: Path) -> None:
    def samples() -> Iterator[dict[str, Any]]:
        for row in range(300):
            yield sample(row)

    manifest = shoal.pack(samples(), tmp_path / "a.pack", part_bytes=20e3, report=Quiet())
    assert manifest.num_rows == 300
    assert len(manifest.parts) > 1
    for row in range(300):
        assert_same(Pack(tmp_path / "a.pack")[row], sample(row))


def test_a_part_is_about_as_large_as_asked_and_small_slices_share_one() -> None:
    groups = group_slices([Rows(i, i + 1, 100) for i in range(10)], 400)
    assert [len(group.slices) for group in groups] == [4, 4, 2]
    assert [group.part_bytes for group in groups] == [500, 500, 500], "about right is one part, not a tiny second one"
    assert [len(group.slices) for group in group_slices([Rows(0, 1, 0), Rows(1, 2, 0)], 400)] == [1, 1]
    assert group_slices([Rows(0, 1, 5000)], 400)[0].part_bytes == 400


def test_a_row_larger_than_a_part_has_one_for_itself(tmp_path: Path) -> None:
    rows = [{"x": np.zeros(1000 * (1 + row % 2), np.uint8)} for row in range(6)]
    manifest = pack(rows, tmp_path / "a.pack", part_bytes=500, compression="none", report=Quiet())
    assert [part.num_rows for part in manifest.parts] == [1] * 6


@pytest.mark.parametrize("source", [MadeUp, Batched])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_wrong_shape_is_named_with_its_row(source: type[MadeUp], workers: int, tmp_path: Path) -> None:
    path = tmp_path / "a.pack"
    with pytest.raises(DataError, match=r"row 777: column 'x' has shape \(3, 4\), the pack's is \(3, 5\)"):
        pack(source(wrong=(777, 801)), path, workers=workers, report=Quiet(), **OPTIONS)
    assert not path.exists()
    manifest = pack(source(wrong=(777, 801)), path, workers=workers, on_error="skip", report=Quiet(), **OPTIONS)
    assert manifest.skipped == 2
    assert [why[:7] for why in manifest.made["skipped"]] == ["row 777", "row 801"]
    labels = [found["label"] for found in Pack(path, columns=["label"])]
    assert labels == [row for row in range(1000) if row not in (777, 801)]
    assert list(tmp_path.iterdir()) == [path], "what was kept for the second attempt is gone"


@pytest.mark.parametrize("source", [MadeUp, Batched])
def test_a_sample_that_cannot_be_read_is_named_or_skipped(source: type[MadeUp], tmp_path: Path) -> None:
    broken = source(300, unreadable=(130, 131))
    with pytest.raises(DataError, match="row 130: the file ends here"):
        pack(broken, tmp_path / "a.pack", workers=1, report=Quiet(), **OPTIONS)
    manifest = pack(broken, tmp_path / "a.pack", workers=1, on_error="skip", report=Quiet(), **OPTIONS)
    assert (manifest.num_rows, manifest.skipped) == (298, 2)


def test_a_pack_of_bad_samples_alone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the file ends here"):
        pack(MadeUp(5, unreadable=tuple(range(5))), tmp_path / "a.pack", on_error="skip", report=Quiet(), **OPTIONS)
    assert list(tmp_path.iterdir()) == []


def test_a_source_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    stamp = tmp_path / "stamp"
    stamp.write_text("first")
    with pytest.raises(DataError, match="the source has changed while it was read"):
        pack(MadeUp(changes=stamp), tmp_path / "a.pack", workers=1, report=Quiet(), **OPTIONS)
    assert not (tmp_path / "a.pack").exists()


@pytest.mark.parametrize("kill_at", [0, 250, 763, 999])
@pytest.mark.parametrize("workers", [1, 2])
def test_what_was_finished_before_a_kill_is_kept(
    kill_at: int, workers: int, wanted: dict[str, bytes], tmp_path: Path
) -> None:
    fuse, path = tmp_path / "fuse", tmp_path / "a.pack"
    fuse.touch()
    source = MadeUp(kill_at=kill_at, fuse=fuse)
    script = (
        "import pickle, sys; from shoal.data.pack.writer import pack; from shoal.data.pack.progress import Quiet;"
        "source, path, options = pickle.load(sys.stdin.buffer); pack(source, path, report=Quiet(), **options)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=pickle.dumps((source, path, {**OPTIONS, "workers": workers})),
        timeout=60,
        check=False,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    # The first samples are read by the process itself; later ones by those it has started.
    assert done.returncode == (-signal.SIGKILL if workers == 1 or kill_at == 0 else 1), done.stderr
    assert not path.exists()
    kept = sorted(path.with_name("a.pack.unfinished").glob("parts/*")) if kill_at else []
    times = {file.name: file.stat().st_mtime_ns for file in kept}
    told = Told()
    pack(MadeUp(kill_at=kill_at, fuse=fuse), path, workers=workers, report=told, **OPTIONS)
    assert files_of(path) == wanted
    if workers == 1 and kill_at > 500:
        assert any("going on" in line for line in told.lines)
        fresh = {file.stat().st_mtime_ns for file in (path / "parts").iterdir()}
        assert len(set(times.values()) & fresh) > 4, "finished parts were not written again"
    assert list(tmp_path.iterdir()) == [path]


def test_an_attempt_with_other_options_begins_anew(tmp_path: Path, wanted: dict[str, bytes]) -> None:
    path = tmp_path / "a.pack"
    with pytest.raises(DataError):
        pack(MadeUp(wrong=(777,)), path, workers=1, report=Quiet(), **{**OPTIONS, "part_bytes": 20e3})
    assert path.with_name("a.pack.unfinished").is_dir()
    told = Told()
    pack(MadeUp(), path, workers=1, report=told, **OPTIONS)
    assert any("starting anew" in line for line in told.lines)
    assert files_of(path) == wanted


def test_two_writers_of_one_pack_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.data.pack import journal, writer

    monkeypatch.setattr(writer, "locked", lambda path: journal.locked(path, timeout_s=0.0))
    (tmp_path / "a.pack.unfinished").mkdir()
    with (
        journal.locked(tmp_path / "a.pack.unfinished"),
        pytest.raises(ConfigError, match="another shoal pack is writing"),
    ):
        pack(MadeUp(10), tmp_path / "a.pack", report=Quiet(), **OPTIONS)


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mount") is None, reason="only root can mount a small disk")
@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_is_named_and_the_work_goes_on_when_there_is_room(
    workers: int, wanted: dict[str, bytes], tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=112k", "none", str(disk)], timeout=30, check=False, capture_output=True
    )
    if mount.returncode != 0:
        pytest.skip("this kernel lets us mount nothing")
    try:
        with pytest.raises(DataError, match=r"the disk of .* is full .*make room and run the same shoal pack again"):
            pack(MadeUp(), disk / "a.pack", workers=workers, report=Quiet(), **OPTIONS)
        assert [file.name for file in disk.iterdir()] == ["a.pack.unfinished"]
        journal = disk / "a.pack.unfinished/journal"
        named = {
            f["name"] for file in journal.iterdir() for p in json.loads(file.read_text())["parts"] for f in p["files"]
        }
        assert {f"parts/{file.name}" for file in (disk / "a.pack.unfinished/parts").iterdir()} == named
        subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], timeout=30, check=True)
        pack(MadeUp(), disk / "a.pack", workers=workers, report=Quiet(), **OPTIONS)
        assert files_of(disk / "a.pack") == wanted
    finally:
        subprocess.run(["umount", "-l", str(disk)], timeout=30, check=True)


def test_a_disk_that_fills_at_the_first_part_leaves_nothing_by_a_faked_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("shoal.data.pack.part_stream.os.pwrite", full)
    with pytest.raises(DataError, match=r"is full .*Nothing was finished, and nothing is left"):
        pack(MadeUp(), tmp_path / "a.pack", workers=1, report=Quiet(), **OPTIONS)
    assert list(tmp_path.iterdir()) == []


def test_a_destination_that_exists_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / "a.pack").mkdir()
    with pytest.raises(ConfigError, match="there is something of that name already"):
        pack(MadeUp(10), tmp_path / "a.pack", report=Quiet())
    with pytest.raises(ConfigError, match="there is no folder"):
        pack(MadeUp(10), tmp_path / "nowhere/a.pack", report=Quiet())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, "workers=0: give 1 or more"),
        ({"on_error": "ignore"}, "give 'raise' or 'skip'"),
        ({"part_bytes": 0}, "a part has some bytes"),
        ({"restart_blocks": -1}, "give 0"),
        ({"compression": "gzip"}, "compression 'gzip' is none"),
        ({"compression": {"y": "zstd"}}, "a column 'y', which is not there"),
        ({"columns": ["lable"]}, "Did you mean 'label'"),
        ({"columns": {"x": "tokens"}}, "cannot be stored as tokens"),
    ],
)
def test_what_makes_no_sense_is_refused_and_leaves_nothing(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        pack(MadeUp(10), tmp_path / "a.pack", report=Quiet(), **{"storage_bytes_per_s": 1e9, **options})
    assert list(tmp_path.iterdir()) == []


class Here:
    """A dataset that no other process knows."""

    def __init__(self) -> None:
        self.lock = open(os.devnull)  # noqa: PTH123, SIM115

    def __len__(self) -> int:
        return 400

    def __getitem__(self, row: int) -> dict[str, Any]:
        return sample(row)


def test_a_dataset_that_cannot_be_sent_is_packed_here(tmp_path: Path) -> None:
    told, dataset = Told(), Here()
    shoal.pack(dataset, tmp_path / "a.pack", part_bytes=20e3, workers=2, compression="none", report=told)
    dataset.lock.close()
    assert any("in this process alone" in line for line in told.lines)
    assert [found["label"] for found in Pack(tmp_path / "a.pack", columns=["label"])] == list(range(400))
