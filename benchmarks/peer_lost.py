"""A worker killed, or its link cut, in the midst of every collective: who raises, when, and who is named.

    python benchmarks/peer_lost.py [--silent 3] [--only ring] [--json FILE]

4 workers repeat a collective of 1.2 MB. Then worker 2 gets SIGKILL; or, on 4 hosts with a link of 1 Gb/s
each, its link is cut, and nobody is told (network namespaces: tests/support/hosts.py; Linux, and root). ok: each of the
other three raises PeerLost that names worker 2, within the timeout. It takes about 3 minutes; exit 1: one was not ok.

The launcher, which sees a process end and says so at once, is not there: workers find out by themselves.
"""

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script: tests/ is beside benchmarks/

from benchmarks.peer_lost_worker import IN_MEMORY, OVER_LINKS, TIMEOUT_S, WORKERS
from shoal.comm.alive import SILENT_S
from shoal.comm.store import LOOPBACK, host_store
from tests.support.hosts import Hosts, hosts, why_not

VICTIM = 2
PATIENCE_S = 3 * TIMEOUT_S
_ROOT = Path(__file__).parents[1]


class Workers:
    """The processes that wait for cases, one a worker, on `cluster`'s hosts or all on this one."""

    def __init__(self, cluster: Hosts | None) -> None:
        self.host = LOOPBACK if cluster is None else cluster.machine
        self.processes = [self._started(cluster, index) for index in range(WORKERS)]
        self._texts = [b""] * WORKERS
        self._lines: list[dict[str, Any]] = []  # not asked for yet

    def _started(self, cluster: Hosts | None, index: int) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "benchmarks.peer_lost_worker", str(index)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        pipes["cwd"] = _ROOT
        return subprocess.Popen(command, **pipes) if cluster is None else cluster.start(index, command, **pipes)

    def begin(self, **case: Any) -> None:
        """Let each have a worker for `case`."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write((json.dumps({"host": self.host, **case}) + "\n").encode())
            process.stdin.flush()

    def said(self, key: str, count: int, timeout_s: float) -> list[dict[str, Any]]:
        """Return the next `count` lines with `key`, or fewer, those that came in time."""
        end_s = time.monotonic() + timeout_s
        streams = [process.stdout for process in self.processes if process.stdout]
        while len([line for line in self._lines if key in line]) < count and time.monotonic() < end_s:
            for stream in select.select(streams, [], [], max(0.0, end_s - time.monotonic()))[0]:
                self._read(streams.index(stream))
        found = [line for line in self._lines if key in line][:count]
        self._lines = [line for line in self._lines if line not in found]
        return found

    def close(self) -> None:
        """End the processes; those on a cluster's hosts end with it, too."""
        for process in self.processes:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.close()
            process.kill()
            process.wait(TIMEOUT_S)
            process.stdout.close()

    def _read(self, index: int) -> None:
        stream = self.processes[index].stdout
        assert stream is not None
        chunk = os.read(stream.fileno(), 65536)
        if not chunk:
            raise RuntimeError(f"the process of worker {index} has ended")
        *whole, self._texts[index] = (self._texts[index] + chunk).split(b"\n")
        self._lines += map(json.loads, whole)


def lose(
    workers: Workers, collective: str, how: str, *, fault: Callable[[int], None], silent_s: float
) -> dict[str, Any]:
    """Return what became of a case: `fault`, given the victim's process, is done while all repeat `collective`."""
    store, port = host_store(host=workers.host, timeout_s=PATIENCE_S)
    workers.begin(collective=collective, port=port, silent_s=silent_s)
    ready = {line["worker"]: line["ready"] for line in workers.said("ready", WORKERS, PATIENCE_S)}
    found: dict[str, Any] = {
        "collective": collective,
        "how": how,
        "ok": False,
        "seconds": None,
        "named": "did not start",
    }
    if len(ready) == WORKERS:
        select.select([], [], [], 0.3)  # in the midst of some round
        begin_s = time.monotonic()
        fault(ready[VICTIM])
        ends: list[dict[str, Any]] = []
        while len(ends) < WORKERS - 1 and (more := workers.said("type", 1, begin_s + PATIENCE_S - time.monotonic())):
            ends += [end for end in more if end["worker"] != VICTIM]
        found |= verdict(ends, begin_s)
    for process in ready.values():  # the victim of a cut link, and whoever hangs
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    workers.said("ended", WORKERS, PATIENCE_S)
    workers.said("type", WORKERS, 0.0)  # the victim's word, who was cut off
    del store
    return found


def verdict(ends: list[dict[str, Any]], begin_s: float) -> dict[str, Any]:
    """Return how the survivors ended: when the last of them did, whom they name, and whether that is right."""
    silent = WORKERS - 1 - len(ends)
    if silent:
        return {"named": f"{silent} of {WORKERS - 1} survivors said nothing for {PATIENCE_S:g} s"}
    seconds = max(end["at_s"] for end in ends) - begin_s
    wrong = [end for end in ends if end["type"] != "PeerLost" or not end["text"].startswith(f"worker {VICTIM} ")]
    shown = (wrong or ends)[0]
    named = f"{shown['type']}: {shown['text']}" if wrong else shown["text"]
    return {"ok": not wrong and seconds <= TIMEOUT_S, "seconds": seconds, "named": named.splitlines()[0][:110]}


def kill(process: int) -> None:
    """End a process as the kernel does that is out of memory."""
    os.kill(process, signal.SIGKILL)


@contextmanager
def cut_link(cluster: Hosts) -> Iterator[Callable[[int], None]]:
    """Give what cuts the victim's link; mend it at the end of the block."""
    yield lambda _process: cluster.cut(VICTIM)
    mend = ["ip", "-n", f"{cluster.name}h{VICTIM + 1}", "link", "set", "eth0", "up"]
    subprocess.run(mend, check=True, timeout=TIMEOUT_S)


def all_killed(names: list[str], silent_s: float) -> Iterator[dict[str, Any]]:
    """Yield what became of each collective in which a worker of this host is killed."""
    workers = Workers(None)
    try:
        for name in names:
            yield lose(workers, name, "SIGKILL", fault=kill, silent_s=silent_s)
    finally:
        workers.close()


def all_cut(names: list[str], silent_s: float) -> Iterator[dict[str, Any]]:
    """Yield what became of each collective in which the link of a host is cut."""
    with hosts(count=WORKERS, rate="1gbit") as cluster:
        workers = Workers(cluster)
        for name in names:
            with cut_link(cluster) as fault:
                yield lose(workers, name, "link cut", fault=fault, silent_s=silent_s)


def show(found: dict[str, Any]) -> None:
    """Print a line of the table."""
    seconds = "" if found["seconds"] is None else f"{found['seconds']:.1f}"
    verdict_word = "ok" if found["ok"] else "NOT OK"
    print(f"{found['collective']:<34} {found['how']:<9} {seconds:>7}  {verdict_word:<7} {found['named']}", flush=True)


def main() -> int:
    """Do all, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--silent", type=float, default=SILENT_S, help="seconds after which a silent worker counts as lost"
    )
    parser.add_argument("--only", default="", help="the collectives with this in their name")
    parser.add_argument("--json", type=Path, help="write the table there")
    options = parser.parse_args()
    no_hosts = why_not()
    print(f"{WORKERS} workers, worker {VICTIM} lost; timeout {TIMEOUT_S:g} s, silent after {options.silent:g} s")
    print(f"{'collective':<34} {'done':<9} {'last, s':>7}  {'':<7} what the survivors raise")
    over_links = [name for name in OVER_LINKS if options.only in name]
    found = []
    for line in all_killed([*over_links, *(name for name in IN_MEMORY if options.only in name)], options.silent):
        found.append(line)
        show(line)
    for line in all_cut(over_links, options.silent) if no_hosts is None else ():
        found.append(line)
        show(line)
    good = sum(line["ok"] for line in found)
    print(f"{good} of {len(found)} ok" + (f"; links were not cut: {no_hosts}" if no_hosts else ""))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return 0 if good == len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
