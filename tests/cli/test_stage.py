"""`shoal stage`: copies that outlive the command, as long as they should, and what it says about them."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.main import main
from shoal.cli.stage import read_parts
from shoal.comm.store import host_store
from shoal.data.stage.staging import stage
from tests.data.stage.file_server import serving
from tests.data.stage.packs import differing, make_pack

TIMEOUT_S = 60.0


@pytest.fixture(autouse=True)
def own_desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A desk for each test: it lies among temporary files."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield
    tempfile.tempdir = None


def answer(*arguments: str) -> dict[str, Any]:
    """Return the JSON that the verb prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["stage", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(printed.getvalue())
    return found


def test_a_copy_stays_after_the_command_until_the_process_it_is_for_ends(tmp_path: Path) -> None:
    make_pack(tmp_path / "a.pack")
    lives = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    pack, to = str(tmp_path / "a.pack"), str(tmp_path / "fast")
    report = answer(pack, "--to", to, "--until", str(lives.pid))
    copy = Path(report["path"])
    assert differing(copy, tmp_path / "a.pack") == []
    (known,) = answer("--status")["copies"]
    assert (known["path"], known["has"], known["wants"], known["is_used"]) == (str(copy), [0, 1, 2, 3], 4, True)
    assert answer("--clean") == {"removed": []}
    with stage(pack, to=to) as shared:
        assert shared.path == copy
    lives.communicate(timeout=TIMEOUT_S)
    gone(copy)
    assert answer("--status") == {"copies": []}


def gone(path: Path) -> None:
    for _ in range(int(TIMEOUT_S / 0.02)):
        if not path.exists():
            return
        threading.Event().wait(0.02)
    raise AssertionError(f"{path} is still there")


def test_a_copy_is_given_back_when_asked(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_pack(tmp_path / "a.pack")
    pack = str(tmp_path / "a.pack")
    assert main(["stage", pack, "--to", str(tmp_path / "fast"), "--until", str(os.getpid())]) == 0
    shown = capfd.readouterr()
    assert "part 4 of 4 after" in shown.err
    assert f"until process {os.getpid()} ends, or: shoal stage --release {pack}." in shown.out
    assert main(["stage", "--status"]) == 0
    assert "4 of 4 parts (0-3), 400 kB; used" in capfd.readouterr().out
    assert main(["stage", "--release", pack]) == 0
    assert capfd.readouterr().out.endswith("given back.\n")
    assert main(["stage", "--release", pack]) == 0
    assert "is not staged on this node" in capfd.readouterr().out


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM])
def test_a_command_that_is_ended_leaves_nothing(tmp_path: Path, ending: signal.Signals) -> None:
    make_pack(tmp_path / "a.pack")
    command = [sys.executable, "-m", "shoal", "stage", str(tmp_path / "a.pack"), "--to", str(tmp_path / "fast")]
    process = subprocess.Popen([*command, "--foreground", "--json"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    copy = Path(json.loads(process.stdout.readline())["path"])
    process.send_signal(ending)
    process.communicate(timeout=TIMEOUT_S)
    gone(copy)
    assert answer("--clean") == {"removed": []}


def test_a_pack_that_is_best_read_where_it_is_stays_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    make_pack(tmp_path / "a.pack")
    monkeypatch.setattr("shoal.data.stage.staging.find_tiers", lambda **_: [])
    assert main(["stage", str(tmp_path / "a.pack")]) == 0
    shown = capfd.readouterr()
    assert shown.out.startswith(f"{tmp_path / 'a.pack'} is read in place at ")
    assert shown.err == ""


def test_only_the_parts_that_are_asked_for_come_first(tmp_path: Path) -> None:
    assert read_parts("3,0-2") == [3, 0, 1, 2]
    make_pack(tmp_path / "a.pack")
    report = answer(str(tmp_path / "a.pack"), "--to", str(tmp_path / "fast"), "--parts", "2-3")
    assert report["parts"] == 4  # all fit
    answer("--release", str(tmp_path / "a.pack"))


def test_nodes_of_a_launcher_stage_together_and_read_the_source_once(tmp_path: Path) -> None:
    make_pack(tmp_path / "source" / "a.pack")
    store, port = host_store(host="127.0.0.1", timeout_s=TIMEOUT_S)
    shared = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = []
    with serving(tmp_path / "source") as server:
        command = [
            sys.executable,
            "-m",
            "shoal",
            "stage",
            f"{server.url}/a.pack",
            "--json",
            "--until",
            str(os.getpid()),
        ]
        for rank in range(2):
            home = tmp_path / f"node{rank}"
            home.mkdir()
            mine = {"RANK": str(rank), "TMPDIR": str(home)}
            process = subprocess.Popen(
                [*command, "--to", str(home / "fast")],
                env={**os.environ, **shared, **mine},
                stdout=subprocess.PIPE,
                text=True,
            )
            processes.append(process)
        reports = [json.loads(process.communicate(timeout=TIMEOUT_S)[0]) for process in processes]
        assert [process.returncode for process in processes] == [0, 0]
        assert all(server.read_bytes[f"a.pack/parts/{part:05d}.arrow"] == 100_001 + 7 * part for part in range(4))
    assert sorted(report["source_bytes"] for report in reports) == [0, 4 * 100_001 + 7 * 6]
    for report in reports:
        assert differing(Path(report["path"]), tmp_path / "source" / "a.pack") == []
        Path(report["path"], "release").touch()  # its desk is another one's
        gone(Path(report["path"]))
    del store


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "PACK is missing. Write it like: shoal stage corpus.pack"),
        (["nowhere.pack"], "nowhere.pack is no pack: it has no manifest.json"),
        (["a.pack", "--parts", "1-x"], "--parts '1-x' is no list of parts"),
        (["a.pack", "--parts", "7"], "part 7 was asked for, but a.pack has parts 0 to 3."),
        (["a.pack", "--parts", "0-99999999999"], "no pack has 10,000,000 parts"),
        (["a.pack", "--reserve", "much"], "--reserve 'much' is not a number of bytes"),
        (["a.pack", "--fan-out", "0"], "--fan-out 0: give a number from 1"),
        (["a.pack", "--to", "/proc/x"], "--to /proc/x: no folder can be made there"),
        (["nosuch://x/a.pack"], "nosuch://x/a.pack cannot be read"),
    ],
)
def test_a_mistake_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    make_pack(tmp_path / "a.pack")
    assert main(["stage", *arguments]) == 2
    assert words in capfd.readouterr().err
    assert answer("--status") == {"copies": []}
