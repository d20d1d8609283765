"""`shoal pack` on the command line: what is written, said, checked and shown, and the exit codes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.cli.main import main
from shoal.data.pack.reader import Pack


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    np.save(tmp_path / "rows.npy", np.arange(3000, dtype=np.float32).reshape(1000, 3))
    return tmp_path / "rows.npy"


def ask(capfd: pytest.CaptureFixture[str], *command: str, code: int = 0) -> Any:
    """Return the one object that `shoal pack ... --json` prints."""
    assert main(["pack", *command, "--json"]) == code
    return json.loads(capfd.readouterr().out)


def test_a_file_is_packed_shown_and_checked(rows: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "rows.pack")
    assert main(["pack", str(rows), path, "--part-size", "4kB"]) == 0
    printed = capfd.readouterr()
    assert "Packed 1,000 rows into" in printed.out
    assert "Compression: " in printed.err
    assert main(["pack", "--show", path]) == 0
    shown = capfd.readouterr().out
    assert "rows.pack: 1,000 rows in 4 parts" in shown
    assert "float32" in shown
    assert main(["pack", "--check", path]) == 0
    assert "is whole" in capfd.readouterr().out
    column = next(iter(Pack(path).columns))
    np.testing.assert_array_equal(Pack(path)[999][column], [2997, 2998, 2999])


def test_json_is_one_object(rows: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "rows.pack")
    packed = ask(capfd, str(rows), path, "--compression", "zstd")
    assert packed["num_rows"] == 1000
    assert packed["columns"][0]["compression"] == "zstd"
    assert ask(capfd, "--show", path)["made"]["options"]["compression"] == "zstd"
    assert ask(capfd, "--check", path) == {"path": path, "is_whole": True, "problems": []}


def test_damage_is_exit_code_2_and_named(rows: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.pack"
    assert main(["pack", str(rows), str(path), "--part-size", "4kB", "--compression", "none"]) == 0
    capfd.readouterr()
    part = path / "parts/00002.arrow"
    part.write_bytes(part.read_bytes().replace(b"\x00\x00", b"\x00\x01", 1))
    assert main(["pack", "--check", str(path)]) == 2
    assert "00002.arrow is damaged" in capfd.readouterr().out
    (problem,) = ask(capfd, "--check", str(path), code=2)["problems"]
    assert problem["part"] == "00002"
    assert problem["row"] == Pack(path).manifest.first_rows[2]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "say what to write: shoal pack"),
        (["a.pack", "--check"], "each take one pack"),
        (["a.pack", "--part-size", "big"], "--part-size 'big' is not a number of bytes"),
        (["a.pack", "--workers", "0"], "--workers 0"),
        (["a.pack", "--columns", ",x"], "write it like --columns"),
        (["a.pack", "--compression", "x=,y"], "write it like --compression"),
        (["a.pack", "--option", "dtype"], "write it like --option"),
        (["a.pack", "--on-error", "ignore"], "give 'raise' or 'skip'"),
    ],
)
def test_a_wrong_flag_is_refused(
    flags: list[str],
    message: str,
    rows: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["pack", str(rows), *flags]) == 2
    assert message in capfd.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.npy"]


def test_a_source_or_a_pack_that_is_not_there_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["pack", str(tmp_path / "nothing"), str(tmp_path / "a.pack")]) == 2
    assert "nothing" in capfd.readouterr().err
    assert main(["pack", "--show", str(tmp_path / "b.pack")]) == 2
    assert "there is no pack" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []
