"""A side of `shoal bench loaders`: a process that is stopped between its turns, and gone when the measurement is."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from shoal.bench.loaders.export import export_sample, task_of
from shoal.bench.loaders.peers.task import Task
from shoal.bench.loaders.side import Side
from shoal.data.pack.progress import Quiet
from shoal.data.pack.reader import open_pack
from shoal.data.pack.writer import pack


@pytest.fixture
def made(tmp_path: Path) -> Task:
    """A small sample in tmp_path / "sample"; and what is to be loaded of it."""
    rows = ({"x": row} for row in np.arange(1200, dtype=np.float32).reshape(100, 12))
    pack(rows, tmp_path / "rows.pack", compression="none", report=Quiet())
    rows_pack = open_pack(tmp_path / "rows.pack")
    task = task_of(rows_pack, column=None, batch_size=8, threads=2, window=17, size=16)
    (tmp_path / "sample").mkdir()
    export_sample(rows_pack, task, tmp_path / "sample", most_bytes=10**9)
    return task


def test_a_side_stands_still_between_its_turns_and_is_gone_at_the_end(made: Task, tmp_path: Path) -> None:
    side = Side(Path(sys.executable), "torch_batched", made, tmp_path / "sample", tmp_path)
    number = side._talk.pid
    try:
        assert state_of(number) == "T"
        assert side.turn(warm_s=0.01, seconds=0.05, watch=True) > 0
        assert state_of(number) == "T"
        assert side.first_batch_s > 0
        assert side.memory_bytes > 1_000_000
    finally:
        side.end()
    side.end()
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)


KILLED = """
import json, os, signal, sys
from pathlib import Path
from shoal.bench.loaders.side import Side
from shoal.bench.loaders.peers.task import Task
side = Side(Path(sys.executable), "torch_loader", Task(**json.loads(sys.argv[1])), Path(sys.argv[2]), Path(sys.argv[2]))
print(side._talk.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_measurement_that_is_killed_leaves_no_stopped_process(made: Task, tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, json.dumps(dataclasses.asdict(made)), str(tmp_path / "sample")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    session = int(done.stdout)
    deadline_s = time.monotonic() + 60
    while left := [pid for pid in all_processes() if session_of(pid) == session]:
        assert time.monotonic() < deadline_s, left
        time.sleep(0.05)


def all_processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def session_of(process: int) -> int | None:
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[3]) if fields[0] != "Z" else None


def state_of(process: int) -> str:
    """Return the kernel's letter; a stop takes a moment to be seen by all threads."""
    os.waitid(os.P_PID, process, os.WSTOPPED | os.WNOWAIT)
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
