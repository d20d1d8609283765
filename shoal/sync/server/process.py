"""A host of servers as a process of its own: `python -m shoal.sync.server.process '{"host": 0, ...}'`.

A worker starts it and holds its standard input. It ends when that is closed: with the worker, in whatever way that
ends; it then waits a little for other workers to say goodbye. It reads nothing else, and says nothing but errors.
"""

import json
import os
import subprocess
import sys
from typing import Any

import torch
from torch import distributed as dist

from shoal.comm.rank import Rank
from shoal.comm.store import connect
from shoal.core.notice import leave_to_others
from shoal.sync.server.host import Host

_END_S = 15.0


class HostProcess:
    """A host that runs in another process, started here."""

    def __init__(self, told: dict[str, Any]) -> None:
        command = [sys.executable, "-m", "shoal.sync.server.process", json.dumps(told)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment)

    def close(self, *, linger_s: float = _END_S) -> None:
        """End it, at the latest after `linger_s`."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(linger_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(_END_S)


def store_of(rank: Rank, token: str, *, timeout_s: float) -> dist.Store:
    """Return a connection to the part of the store that one set of servers has for itself."""
    hosted = Rank(rank.index, rank.workers, 0, 1, rank.store_host, rank.store_port, store_is_hosted=True)
    return dist.PrefixStore(f"servers {token}", connect(hosted, timeout_s=timeout_s))


def main() -> None:
    """Be a host until standard input ends."""
    leave_to_others()
    told = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    rank = Rank(0, 1, 0, 1, told["store_host"], told["store_port"], store_is_hosted=True)
    store = store_of(rank, told["token"], timeout_s=told["timeout_s"])
    host = Host(
        told["host"],
        store,
        hosts=told["hosts"],
        address=told["address"],
        token=told["token"],
        workers=told["workers"],
        timeout_s=told["timeout_s"],
    )
    try:
        sys.stdin.read()
    finally:
        host.close(linger_s=5.0)


if __name__ == "__main__":
    main()
