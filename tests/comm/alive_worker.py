"""A worker for tests of what a lost one does to the others: it runs a collective over and over until it raises.

    python -m tests.comm.alive_worker STORE_HOST STORE_PORT WORKERS INDEX '{"collective": ..., "victim": ...}'

INDEX "all" forks all workers in one host. Each prints one line, {"worker": 2, "ready": PID}, when all have met, and
one when it ends: {"worker": 2, "type": "PeerLost", "text": ..., "seconds": since ready}.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shoal.comm import torch_private
from shoal.comm.algorithms import ALL_REDUCE, Wire, broadcast, two_level_with
from shoal.comm.algorithms.shared_inside import over_shared
from shoal.comm.algorithms.two_level import AllReduce as TwoLevel
from shoal.comm.algorithms.two_level import levels
from shoal.comm.alive import watching
from shoal.comm.group import joined
from shoal.comm.rank import Rank
from shoal.comm.shm.group import join
from shoal.comm.store import connect
from shoal.parallel.replicate import apply_replicate
from shoal.sync.allreduce import AllReduce

TIMEOUT_S = 30.0
"""Of the groups: an error that took so long was not found by the watch."""


def main(host: str, port: str, workers: str, index: str, options: str) -> None:
    torch.set_num_threads(1)
    numbers = range(int(workers)) if index == "all" else [int(index)]
    children = []
    for number in numbers[1:]:
        child = os.fork()
        if child == 0:
            _work(host, int(port), int(workers), number, json.loads(options))
            os._exit(0)
        children.append(child)
    _work(host, int(port), int(workers), numbers[0], json.loads(options))
    os._exit(0)  # what threads still wait for is nobody's concern now


def _work(host: str, port: int, workers: int, index: int, options: dict[str, Any]) -> None:
    is_hosted = not options.get("worker_hosts", False)
    # One worker a host, as far as the group is told, unless all are on the loopback.
    local = workers if host == "127.0.0.1" else 1
    rank = Rank(index, workers, index if local > 1 else 0, local, host, port, store_is_hosted=is_hosted)
    store = connect(rank, timeout_s=TIMEOUT_S)
    if options.get("deaf"):  # the engine is not told that its connections are shut down
        vars(torch_private)["_shut_down"] = lambda _: None
    begin_s = time.monotonic()
    try:
        with (
            joined(rank, store, device=torch.device("cpu"), timeout_s=TIMEOUT_S),
            watching(store, rank, timeout_s=TIMEOUT_S, silent_s=options.get("silent_s", 1.5)) as watch,
        ):
            dist.barrier()
            _say(worker=index, ready=os.getpid())
            begin_s = time.monotonic()
            assert dist.group.WORLD is not None
            wire = Wire(dist.group.WORLD, watch=watch)
            if options["collective"] == "two-level":
                ALL_REDUCE["two-level"] = _in_shared_memory(store, wire)
            name = options["collective"]
            once = _step_of_ddp() if name == "ddp" else partial(_collective, name, index, workers, wire)
            once()  # DDP is made: what it then waits for is a sum of gradients
            if index == options.get("victim") and "signal" in options:
                threading.Timer(0.3, os.kill, [os.getpid(), signal.Signals[options["signal"]]]).start()
            for round_number in range(10**9):
                if index == options.get("victim") and "error" in options and round_number == 3:
                    raise ValueError(options["error"])
                once()
    except Exception as error:
        _say(worker=index, type=type(error).__name__, text=str(error), seconds=time.monotonic() - begin_s)


def _in_shared_memory(store: dist.Store, wire: Wire) -> TwoLevel:
    """Return an all-reduce in two levels as if each two workers were on one host, whose memory they share."""
    wire.hosts = tuple(f"host {worker // 2}" for worker in range(wire.count))
    first = wire.index - wire.index % 2
    own = dist.PrefixStore(f"host of {first}", store)
    group = join(own, index=wire.index - first, count=2, timeout_s=TIMEOUT_S, numbers=[first, first + 1])
    inside, (_, between) = over_shared(group), levels(wire)
    return lambda tensor, wire: two_level_with(tensor, wire, inside=inside, between=between)


def _step_of_ddp() -> Callable[[], object]:
    """Return a forward and backward, the gradients of which DDP sums by Gloo's all-reduce, in several buckets."""
    layers = [nn.Linear(400, 400) for _ in range(4)]
    replica = apply_replicate(nn.Sequential(*layers), hook=AllReduce(lambda: None).hook, bucket_bytes=1 << 20)
    return lambda: replica(torch.ones(2, 400)).sum().backward()


def _collective(name: str, index: int, workers: int, wire: Wire) -> None:
    tensor = torch.ones(300_000)
    if name == "gloo":
        dist.all_reduce(tensor)
    elif name == "broadcast":
        broadcast(tensor, wire, algorithm="chain")
    elif name == "pairs":  # 0 and 1 talk, 2 and 3 talk, and nobody else does
        other = index ^ 1
        wire.exchange([(tensor.view(torch.uint8), other)], [(torch.empty(1_200_000, dtype=torch.uint8), other)])
    else:
        ALL_REDUCE[name](tensor, wire)


def _say(**words: Any) -> None:
    os.write(1, (json.dumps(words) + "\n").encode())  # at once and whole, also from a fork


if __name__ == "__main__":
    main(*sys.argv[1:])
