"""A worker comes to stand still, by one cause after the other: when is it said, and are worker and line right?

    python benchmarks/hangs.py [--only dataset] [--json FILE]

3 workers train a small job of 10,000 samples; after a while, or from the start, worker 1 does what the cause says. ok:
a sentence, in the events of the run or as an error, names worker 1 and the line (where it has one) within 10 s of
the cause. It takes about 2 minutes; exit 1: one was not ok.
"""

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script: shoal/ and tests/ are beside benchmarks/

from benchmarks.hangs_worker import VICTIM, WORKERS
from shoal.comm.store import LOOPBACK, host_store
from shoal.core.events import EventReader
from shoal.core.run_folder import RunFolder
from shoal.core.toml import write_toml
from shoal.spec.plan import Mesh, Plan
from shoal.spec.sync import Sync

LIMIT_S = 10.0
PATIENCE_S = 25.0
_ROOT = Path(__file__).parents[1]
_WORKER = Path(__file__).with_name("hangs_worker.py")


PLAN = Plan(mesh=Mesh(replicate=WORKERS), timeout_s=120)


@dataclass(frozen=True)
class Cause:
    """Why a worker stands still, and what must be said of it."""

    name: str
    words: str = ""
    """What the sentence must hold beside the worker's number."""
    mark: str = ""
    """Which line it must name: that with `# here: MARK`; by default that of the name. "-": none."""
    plan: Plan = PLAN


CAUSES = [
    Cause("dataset sleeps"),
    Cause("dataset deadlocks"),
    Cause("model sleeps", words="wait in the sum of gradients"),
    Cause(
        "model sleeps, DDP",
        words="wait in all-reduce",
        mark="model sleeps",
        plan=Plan(mesh=Mesh(replicate=WORKERS), sync=Sync(way="engine"), timeout_s=120),
    ),
    Cause("model sleeps, ZeRO-3", mark="model sleeps", plan=Plan(mesh=Mesh(shard=WORKERS), zero=3, timeout_s=120)),
    Cause("optimizer blocks"),
    Cause("hook waits for a file"),
    Cause("hook reads a pipe"),
    Cause("C holds Python's lock", words="holds Python's lock"),
    Cause("SIGSTOP", words="stopped by a signal", mark="-"),
    Cause("another shape", words="all-reduce of float32 (4,)", mark="-"),
    Cause("extra collective", words="different collectives"),
    Cause("returned early", words="different collectives", mark="-"),
    Cause("process has ended", words="ended", mark="-"),
    Cause("another number of batches", words="total_steps = 100,001", mark="-"),
    Cause("another dataset", words="10,001 samples", mark="-"),
    Cause("another model", words="layers.0.weight", mark="-"),
    Cause("another seed", words="Job.seed = 7", mark="-"),
]


class Workers:
    """The process that forks the workers of each case."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "benchmarks.hangs_worker"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=_ROOT
        )
        self._text, self.lines = b"", list[dict[str, Any]]()

    def begin(self, **case: Any) -> None:
        """Let there be workers for `case`."""
        assert self._process.stdin is not None
        self.lines = []
        self._process.stdin.write((json.dumps(case) + "\n").encode())
        self._process.stdin.flush()

    def read(self, timeout_s: float) -> None:
        """Take in what they have said, for `timeout_s` at most if it is nothing."""
        assert self._process.stdout is not None
        if select.select([self._process.stdout], [], [], timeout_s)[0]:
            chunk = os.read(self._process.stdout.fileno(), 65536)
            if not chunk:
                raise RuntimeError("the process of the workers has ended")
            *whole, self._text = (self._text + chunk).split(b"\n")
            self.lines += map(json.loads, whole)

    def said(self, key: str) -> list[dict[str, Any]]:
        """Return the lines with `key`."""
        return [line for line in self.lines if key in line]

    def end_case(self) -> None:
        """End the workers of the case that still run."""
        for line in self.said("started"):
            for process in line["started"]:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        end_s = time.monotonic() + PATIENCE_S
        while not self.said("ended") and time.monotonic() < end_s:
            self.read(1.0)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait(PATIENCE_S)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


def hang(workers: Workers, cause: Cause, runs: Path, *, hang_s: float | None = None) -> dict[str, Any]:
    """Return what became of a case: when something was said that is right, or else all that was said."""
    folder = RunFolder.create(runs, None, stem="hang")
    write_toml(folder.plan_toml, cause.plan)
    store, port = host_store(host=LOOPBACK, timeout_s=PATIENCE_S)
    workers.begin(cause=cause.name, folder=str(folder.path), host=LOOPBACK, port=port, hang_s=hang_s)
    readers = [EventReader(folder.events_of(worker)) for worker in range(WORKERS)]
    said: list[tuple[float, str]] = []
    end_s = time.monotonic() + 2 * PATIENCE_S
    good = None
    while good is None and time.monotonic() < end_s and len(workers.said("type")) < WORKERS:
        workers.read(0.1)
        events = [event for reader in readers for event in reader.poll() if event["kind"] == "hang"]
        said += [(event["time"], event["sentence"]) for event in events]
        said += [(line["time"], line["text"]) for line in workers.said("type") if line["worker"] != VICTIM]
        good = next((each for each in said if is_right(each[1], cause)), None)
        fault = workers.said("fault")
        if fault and time.time() > fault[0]["fault"] + PATIENCE_S:
            break
    fault = workers.said("fault")
    workers.end_case()
    del store
    begin = fault[0]["fault"] if fault else time.time()
    seconds = None if good is None else good[0] - begin
    text = good[1] if good else " | ".join(dict.fromkeys(each for _, each in said)) or "nothing was said"
    return {"cause": cause.name, "ok": seconds is not None and seconds < LIMIT_S, "seconds": seconds, "said": text}


def is_right(sentence: str, cause: Cause) -> bool:
    """Return whether a sentence names the worker, the line and what else it must."""
    mark = cause.mark or cause.name
    line = (
        None
        if mark == "-"
        else next(
            number for number, text in enumerate(_WORKER.read_text().splitlines(), start=1) if f"# here: {mark}" in text
        )
    )
    place = "" if line is None else f"{_WORKER.name}:{line}"
    return f"worker {VICTIM} " in sentence and cause.words in sentence and place in sentence


@contextmanager
def started() -> Iterator[Workers]:
    """Have workers for the length of a `with` block."""
    workers = Workers()
    try:
        yield workers
    finally:
        workers.close()


def main() -> int:
    """Do all, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="the causes with this in their name")
    parser.add_argument("--json", type=Path, help="write the table there")
    options = parser.parse_args()
    print(f"{WORKERS} workers, worker {VICTIM} stands still")
    print(f"{'cause':<26} {'s':>5}  {'':<7} what is said")
    found = []
    with tempfile.TemporaryDirectory() as runs, started() as workers:
        for cause in CAUSES:
            if options.only in cause.name:
                line = hang(workers, cause, Path(runs))
                found.append(line)
                seconds = "" if line["seconds"] is None else f"{line['seconds']:.1f}"
                word = "ok" if line["ok"] else "NOT OK"
                print(f"{cause.name:<26} {seconds:>5}  {word:<7} {line['said']}", flush=True)
    good = sum(line["ok"] for line in found)
    print(f"{good} of {len(found)} ok, the slowest after {max(line['seconds'] or 0.0 for line in found):.1f} s")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return 0 if good == len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
