"""Bad samples among the first, when columns are still being found out; disks and sources that fail on the way."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal
from benchmarks.bad_input_asked import Row
from benchmarks.bad_input_packs import broken_packs
from benchmarks.bad_input_sources import changing, hostile_tars, no_text
from shoal.core.errors import DataError
from shoal.data.pack.progress import Quiet
from shoal.data.pack.reader import Pack
from shoal.data.pack.writer import pack
from shoal.data.sources.find import open_source
from tests.data.pack.sources import MadeUp, jpeg

REPO = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (b"", "the image is empty"),
        (b"<html>not found</html>", r"it is no image: it begins with b'<html>no'"),
        (jpeg()[:-100], "the JPEG is truncated"),
    ],
)
@pytest.mark.parametrize("row", [0, 1, 70])
def test_what_is_no_image_among_images_is_named_and_does_not_change_the_column(
    bad: bytes, why: str, row: int, tmp_path: Path
) -> None:
    rows = [{"image": jpeg(seed=number)} for number in range(80)]
    rows[row] = {"image": bad}
    with pytest.raises(DataError, match=f"row {row}: column 'image': {why}"):
        pack(rows, tmp_path / "a.pack", compression="none", report=Quiet())
    assert list(tmp_path.iterdir()) == []
    manifest = pack(rows, tmp_path / "a.pack", compression="none", on_error="skip", report=Quiet())
    assert (manifest.num_rows, manifest.skipped, manifest.columns[0].kind) == (79, 1, "image")


@pytest.mark.parametrize("row", [0, 5, 70])
def test_a_sample_that_lacks_a_column_is_named_or_skipped(row: int, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"x": np.zeros(3), "label": number} for number in range(80)]
    rows[row].pop("label")
    with pytest.raises(DataError, match=f"row {row}: there is no column 'label'; it has x"):
        pack(rows, tmp_path / "a.pack", compression="none", report=Quiet())
    manifest = pack(rows, tmp_path / "a.pack", compression="none", on_error="skip", report=Quiet())
    assert (manifest.num_rows, manifest.skipped) == (79, 1)


@pytest.mark.parametrize(
    ("row", "bad", "why"),
    [
        (0, "half \ud800", r"column 'text': character 5 is \\ud800, which no text has"),
        (70, "half \ud800", r"column 'text': character 5 is \\ud800, which no text has"),
        (70, np.array([65, 255], np.uint8), "column 'text' is not UTF-8: byte 1 is wrong"),
        (70, b"bytes", "column 'text' has a bytes, not a str"),
    ],
)
def test_what_is_no_text_is_named_or_skipped(bad: Any, why: str, row: int, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"text": f"text {number}"} for number in range(80)]
    rows[row] = {"text": bad}
    options: dict[str, Any] = {"columns": {"text": "text"}, "compression": "none", "report": Quiet()}
    with pytest.raises(DataError, match=f"row {row}: {why}"):
        pack(rows, tmp_path / "a.pack", **options)
    assert list(tmp_path.iterdir()) == []
    manifest = pack(rows, tmp_path / "a.pack", **options, on_error="skip")
    assert (manifest.num_rows, manifest.skipped) == (79, 1)


def test_a_tuple_of_another_length_in_an_iterator_is_named_with_its_row(tmp_path: Path) -> None:
    def samples() -> Iterator[Any]:
        for number in range(100):
            yield (number, 1) if number != 80 else (number, 1, 2)

    with pytest.raises(DataError, match="row 80: a sample has 3 values, and columns names 2"):
        pack(samples(), tmp_path / "a.pack", columns=["a", "b"], compression="none", report=Quiet())
    manifest = pack(
        samples(), tmp_path / "a.pack", columns=["a", "b"], compression="none", on_error="skip", report=Quiet()
    )
    assert (manifest.num_rows, manifest.skipped) == (99, 1)


class Interrupted(MadeUp):
    """Ctrl-C while row 900 is read."""

    def read(self, part: Any) -> Iterator[Any]:
        for number, each in enumerate(super().read(part)):
            if part.begin + number == 900:
                raise KeyboardInterrupt
            yield each


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("is_almost_done", [False, True])
def test_what_an_attempt_left_out_is_looked_at_again_by_one_that_leaves_nothing_out(
    is_almost_done: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"part_bytes": 50e3, "compression": "none", "workers": 1, "report": Quiet()}
    source = (MadeUp if is_almost_done else Interrupted)(wrong=(177, 777))
    with monkeypatch.context() as patch:
        if is_almost_done:
            patch.setattr("shoal.data.pack.writer.give_name", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pack(source, tmp_path / "a.pack", on_error="skip", **options)
    with pytest.raises(DataError, match="row 177: column 'x' has shape"):
        pack(MadeUp(wrong=(177, 777)), tmp_path / "a.pack", **options)
    manifest = pack(MadeUp(), tmp_path / "a.pack", **options)
    assert (manifest.num_rows, manifest.skipped) == (1000, 0)
    assert [row["label"] for row in Pack(tmp_path / "a.pack", columns=["label"])] == list(range(1000))


class Touched:
    """A source of files, of which one gets another time when the third sample is read."""

    def __init__(self, folder: Path, file: Path) -> None:
        self._source, self._file = open_source(folder), file
        self.columns = self._source.columns
        self.describe, self.slices = self._source.describe, self._source.slices
        self.fingerprint = self._source.fingerprint

    def read(self, part: Any) -> Iterator[Any]:
        for number, sample in enumerate(self._source.read(part)):
            if number == 3:
                os.utime(self._file, ns=(0, self._file.stat().st_mtime_ns + 1))
            yield sample


def test_a_change_while_the_first_samples_are_read_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    for number in range(10):
        (tmp_path / f"files/{number}.bin").write_bytes(bytes(100))
    source = Touched(tmp_path / "files", tmp_path / "files/1.bin")
    with pytest.raises(DataError, match=r"the source has changed while it was read \(1.bin\)"):
        pack(source, tmp_path / "a.pack", compression="none", report=Quiet())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["files"]
    assert shoal.pack(tmp_path / "files", tmp_path / "a.pack", report=Quiet()).num_rows == 10


def test_a_disk_that_is_full_before_anything_is_written_says_so_by_a_faked_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("shoal.data.storage.os.write", full)
    with pytest.raises(DataError, match=r"the disk of .* is full .*Nothing was finished, and nothing is left"):
        pack(MadeUp(), tmp_path / "a.pack", workers=1, report=Quiet())
    assert list(tmp_path.iterdir()) == []


def test_a_limit_on_the_size_of_files_is_named_and_smaller_parts_fit(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((1000, 100), np.float32))
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000));"
        "from shoal.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "pack", "x.npy", "a.pack", "--compression", "none", "--part-size"]
    environment = {**os.environ, "PYTHONPATH": str(REPO), "PYTHONDONTWRITEBYTECODE": "1"}
    done, again = (
        subprocess.run([*command, size], cwd=tmp_path, env=environment, timeout=60, check=False, capture_output=True)
        for size in ("200kB", "50kB")
    )
    assert done.returncode == 2
    assert b"may be as large as a part (ulimit -f). Smaller parts: --part-size." in done.stderr
    assert again.returncode == 0, again.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pack", "x.npy"]
    assert Pack(tmp_path / "a.pack").num_rows == 1000


@pytest.mark.parametrize("case", [broken_packs, changing, hostile_tars, no_text])
def test_bad_input_is_answered_as_the_benchmark_says(case: Callable[[Path], list[Row]], tmp_path: Path) -> None:
    rows = case(tmp_path)
    assert len(rows) > 5
    assert [(row.bad, row.asked, row.said, row.wrong) for row in rows if row.wrong] == []
