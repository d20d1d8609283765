"""Parts of a staged pack that do not come: waited for as long as bytes arrive, then read in place, or named."""

import os
import shutil
import threading
from pathlib import Path

import pytest

from shoal.core.errors import DataError
from shoal.data.stage.copies import write_plan
from shoal.data.stage.staged import Staged, in_place
from shoal.data.stage.staging import stage
from tests.data.stage.file_server import serving
from tests.data.stage.packs import make_pack


def test_a_missing_part_is_named_in_place_and_staged(tmp_path: Path) -> None:
    make_pack(tmp_path / "a.pack")
    (tmp_path / "a.pack" / "parts" / "00002.arrow").unlink()
    with pytest.raises(DataError, match=r"parts/00002.arrow is missing in "):
        in_place(tmp_path / "a.pack").path_of(2)
    with stage(tmp_path / "a.pack", to=tmp_path / "fast", desk=tmp_path / "desk") as staged:
        with pytest.raises(DataError, match=r"parts/00002.arrow of .* cannot be read: .*No such file"):
            staged.path_of(2)
        assert staged.path_of(3) == staged.path


def test_a_part_that_does_not_come_in_time_is_named(tmp_path: Path) -> None:
    make_pack(tmp_path / "source" / "a.pack")
    with serving(tmp_path / "source") as server:
        server.gates["a.pack/parts/00000.arrow"] = threading.Event()
        staged = stage(f"{server.url}/a.pack", to=tmp_path / "fast", desk=tmp_path / "desk", timeout_s=0.1)
        words = r"part 00000 of http.* has not come to .*: no byte has arrived for 0.1 s"
        with staged:
            with pytest.raises(DataError, match=words):
                staged.path_of(0)
            with pytest.raises(DataError, match=words):
                staged.wait()
        assert not staged.path.exists()


class _Clocked(Staged):
    """A copy that gets a byte each second, up to `last_s`, of a clock that goes only while somebody waits."""

    now_s, last_s = 0, 0

    def _pause(self, seconds: float) -> None:
        self.now_s += 1
        if self.now_s <= self.last_s:
            os.utime(self.path / "parts" / "00000.arrow.1.partial", (self.now_s, self.now_s))


@pytest.fixture
def clocked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Clocked:
    """A copy of which not one part is here, and the first is on its way."""
    make_pack(tmp_path / "a.pack")
    shutil.copytree(tmp_path / "a.pack", tmp_path / "copy", ignore=shutil.ignore_patterns("*.arrow"))
    write_plan(tmp_path / "copy", {"parts": [0, 1, 2, 3]})
    (tmp_path / "copy" / "parts" / "00000.arrow.1.partial").touch()
    staged = _Clocked(tmp_path / "copy", str(tmp_path / "a.pack"), timeout_s=10)
    monkeypatch.setattr("shoal.data.stage.staged.time.monotonic", lambda: float(staged.now_s))
    return staged


def test_a_part_is_waited_for_as_long_as_bytes_arrive_and_then_read_in_place(clocked: _Clocked) -> None:
    clocked.last_s = 1000
    with pytest.warns(RuntimeWarning, match="no byte has arrived for 10 s. What is missing is read in place"):
        assert clocked.path_of(0) == Path(clocked.source)
    assert 1000 < clocked.now_s < 1040
    before_s = clocked.now_s
    assert [clocked.path_of(part) for part in range(4)] == 4 * [Path(clocked.source)]  # at once, and without a word
    assert clocked.now_s == before_s
    with pytest.raises(DataError, match="no byte has arrived for 3 s"):
        clocked.wait(timeout_s=3)


def test_waiting_begins_anew_when_bytes_arrive_after_all(clocked: _Clocked) -> None:
    with pytest.warns(RuntimeWarning, match="no byte has arrived"):
        clocked.path_of(0)
    (clocked.path / "parts" / "00001.arrow").touch()
    assert clocked.path_of(1) == clocked.path
    before_s = clocked.now_s
    with pytest.warns(RuntimeWarning, match="no byte has arrived"):
        clocked.path_of(0)
    assert clocked.now_s > before_s + 10
