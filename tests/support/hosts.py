"""Hosts on one machine: network namespaces with links of a given rate between them, for tests of real slow links.

    with hosts(count=4, rate="1gbit") as cluster:
        process = cluster.start(1, [sys.executable, "worker.py"])

Names and addresses hold this process's number, so that several test runs can have theirs at once. All processes that
were started there are ended and all is removed when the block ends; what a killed run has left, the next one removes.
"""

import itertools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.support.needs import why_no

_SCRIPT = Path(__file__).with_name("hosts.sh")
_NAMESPACES = Path("/run/netns")
_TIMEOUT_S = 60.0
_count = itertools.count()


def why_not() -> str | None:
    """Return why this machine cannot have such hosts, or None."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if (reason := why_no(("ip", "tc", "unshare", "bash"), ("iproute2", "util-linux", "bash"))) is not None:
        return reason
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "true"], capture_output=True, check=False, timeout=_TIMEOUT_S
    )
    return None if tried.returncode == 0 else f"no new network namespace here: {tried.stderr.decode().strip()}"


@contextmanager
def hosts(*, count: int, rate: str) -> Iterator["Hosts"]:
    """Have `count` hosts, numbered from 0, whose links carry `rate` ("1gbit", "100mbit", "none") in each direction."""
    _remove_what_is_left()
    cluster = Hosts(name=f"s{os.getpid()}{chr(ord('a') + next(_count) % 26)}", count=count, subnet=_free_subnet())
    try:
        cluster.script("up", rate, cluster.subnet)
        yield cluster
    finally:
        cluster.end()
        cluster.script("down")


class Hosts:
    """Hosts 0 ... count - 1, called h1 ... in their own eyes."""

    def __init__(self, *, name: str, count: int, subnet: str) -> None:
        self.name, self.count, self.subnet = name, count, subnet
        self.processes: list[subprocess.Popen[Any]] = []

    @property
    def machine(self) -> str:
        """Return the address at which the hosts reach this machine, and so this process."""
        return f"{self.subnet}.254"

    def address(self, index: int) -> str:
        """Return the address of host `index`."""
        return f"{self.subnet}.{index + 1}"

    def hostname(self, index: int) -> str:
        """Return what host `index` calls itself."""
        return f"h{index + 1}"

    def start(self, index: int, command: Sequence[str], **options: Any) -> "subprocess.Popen[Any]":
        """Start `command` on host `index`; `options` are Popen's. It is ended with the hosts at the latest.

        What it puts into shared memory, only what it starts itself can see there.
        """
        alone = 'hostname "$0" && mount -t tmpfs tmpfs /dev/shm && exec "$@"'
        inside = ["unshare", "--uts", "--mount", "sh", "-c", alone, self.hostname(index), *command]
        environment = {**(options.pop("env", None) or os.environ), "GLOO_SOCKET_IFNAME": "eth0"}
        process: subprocess.Popen[Any] = subprocess.Popen(
            ["ip", "netns", "exec", self._namespace(index), *inside],
            env=environment,
            start_new_session=True,
            **options,
        )
        self.processes.append(process)
        return process

    def cut(self, index: int) -> None:
        """Cut the link of host `index`: nothing comes in or goes out, and nobody is told."""
        subprocess.run(
            ["ip", "-n", self._namespace(index), "link", "set", "eth0", "down"], check=True, timeout=_TIMEOUT_S
        )

    def shape(self, rate: str) -> None:
        """Give all links another rate."""
        self.script("shape", rate)

    def end(self) -> None:
        """End every process that was started here."""
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(_TIMEOUT_S)
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        self.processes = []

    def script(self, command: str, *arguments: str) -> None:
        """Run hosts.sh for these hosts."""
        full = ["bash", str(_SCRIPT), command, self.name, str(self.count), *arguments]
        done = subprocess.run(full, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
        assert done.returncode == 0, f"{' '.join(full)}: {done.stderr}"

    def _namespace(self, index: int) -> str:
        assert 0 <= index < self.count
        return f"{self.name}h{index + 1}"


def _free_subnet() -> str:
    """Return the first three numbers of a /24 that no interface of this machine is in."""
    taken = subprocess.run(["ip", "-4", "-o", "addr"], capture_output=True, text=True, check=True, timeout=_TIMEOUT_S)
    for attempt in range(1000):
        number = (os.getpid() * 7 + attempt) % (64 * 256)
        subnet = f"10.{64 + number // 256}.{number % 256}"
        if f" {subnet}." not in taken.stdout:
            return subnet
    raise AssertionError("no free /24 in 10.64.0.0/10")


def _remove_what_is_left() -> None:
    """Remove the hosts of processes that are no more."""
    left: dict[str, int] = {}
    for path in _NAMESPACES.iterdir() if _NAMESPACES.is_dir() else []:
        found = re.fullmatch(r"(s(\d+)[a-z])h(\d+)", path.name)
        if found and not Path("/proc", found[2]).exists():
            left[found[1]] = max(left.get(found[1], 0), int(found[3]))
    for name, count in left.items():
        Hosts(name=name, count=count, subnet="").script("down")
