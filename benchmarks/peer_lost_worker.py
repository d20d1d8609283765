"""The worker of peer_lost.py: it repeats a collective until that raises, and says what.

    python -m benchmarks.peer_lost_worker INDEX

It reads cases from stdin, a line of JSON each, and forks for each of them. The one who forked and the one that was
forked write lines of JSON to stdout: {"ready": PID}, {"type": "PeerLost", "text": ..., "at_s": ...}, {"ended": PID}.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shoal.comm.algorithms import ALL_GATHER, ALL_REDUCE, BROADCAST, REDUCE_SCATTER, Wire, broadcast
from shoal.comm.alive import Watch, watching
from shoal.comm.group import joined, new_group
from shoal.comm.rank import Rank
from shoal.comm.shm.group import join
from shoal.comm.store import LOOPBACK, connect
from shoal.compress.bucket import Bucket
from shoal.compress.codecs import codec_named
from shoal.compress.collectives import GroupCollectives
from shoal.compress.feedback import ErrorFeedback
from shoal.parallel.replicate import apply_replicate
from shoal.sync.allreduce import AllReduce
from shoal.sync.background import Background
from shoal.sync.compressed import CompressedAllReduce

WORKERS = 4
TIMEOUT_S = 20.0
"""Of the groups: what an operation of the engine takes at most, if nobody finds out before."""
NUMEL = 300_000
HOSTS = ["a", "a", "b", "b"]
"""What the two levels are told: whichever hosts the workers are on, both levels are at work."""

Round = Callable[[], object]
"""One round of a collective."""


def over_wire(function: Callable[..., object], **options: Any) -> Callable[[Watch], Round]:
    """Return what makes a round of `function` over point-to-point messages."""

    def make(watch: Watch) -> Round:
        assert dist.group.WORLD is not None
        return partial(function, torch.ones(NUMEL), Wire(dist.group.WORLD, hosts=HOSTS, watch=watch), **options)

    return make


def training_step(_watch: Watch) -> Round:
    """Return a forward and backward, the gradients of which DDP sums by Gloo's all-reduce."""
    return _step_of(nn.Linear(500, NUMEL // 500), AllReduce(lambda: None).hook)


def training_step_through_codec(watch: Watch) -> Round:
    """Return a forward and backward, the gradients of which are summed through a codec, by a thread of its own."""
    model, background = nn.Linear(500, NUMEL // 500), Background(timeout_s=TIMEOUT_S)
    feedback, workers = ErrorFeedback(codec_named("int8")), GroupCollectives(new_group(), watch=watch)
    parameters = dict(model.named_parameters())
    step = _step_of(model, CompressedAllReduce(feedback, parameters, workers, background=background).hook)

    def explained() -> None:
        with background.explained():
            step()

    return explained


def _step_of(model: nn.Module, hook: Any) -> Round:
    replica = apply_replicate(model, hook=hook, bucket_bytes=1 << 20)
    return lambda: replica(torch.ones(2, 500)).sum().backward()


def through_codec(name: str) -> Callable[[Watch], Round]:
    """Return what makes an exchange of gradients through a codec."""

    def make(watch: Watch) -> Round:
        feedback, workers = ErrorFeedback(codec_named(name)), GroupCollectives(new_group(), watch=watch)
        bucket = Bucket(("weight",), ((500, NUMEL // 500),))
        return lambda: feedback.sum(bucket, torch.ones(NUMEL), workers)

    return make


OVER_LINKS: dict[str, Callable[[Watch], Round]] = {
    "a step of DDP, Gloo's all-reduce": training_step,
    "a step of DDP, int8": training_step_through_codec,
    **{f"all-reduce, {name}": over_wire(function) for name, function in ALL_REDUCE.items()},
    **{f"broadcast, {name}": over_wire(broadcast, algorithm=name) for name in BROADCAST},
    **{f"reduce-scatter, {name}": over_wire(function) for name, function in REDUCE_SCATTER.items()},
    **{f"all-gather, {name}": over_wire(function) for name, function in ALL_GATHER.items()},
    **{f"a codec's exchange, {name}": through_codec(name) for name in ("int8", "topk", "powersgd")},
}
IN_MEMORY: dict[str, Callable[[Any], object]] = {
    "shared memory, all-reduce": lambda group: group.all_reduce(torch.ones(NUMEL)),
    "shared memory, reduce-scatter": lambda group: group.reduce_scatter(torch.ones(NUMEL // 4), torch.ones(NUMEL)),
    "shared memory, all-gather": lambda group: group.all_gather(torch.ones(NUMEL), torch.ones(NUMEL // 4)),
    "shared memory, broadcast": lambda group: group.broadcast(torch.ones(NUMEL), 0),
}


def serve(index: int) -> None:
    """Be worker `index` in each case that is written to stdin, each in a process of its own; end with stdin."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            be_worker(index, **json.loads(line))
            os._exit(0)  # what threads still wait for is nobody's concern now
        os.waitpid(child, 0)
        _say(worker=index, ended=child)


def be_worker(index: int, *, collective: str, host: str, port: int, silent_s: float) -> None:
    """Repeat a collective until it raises, and say what."""
    local = WORKERS if host == LOOPBACK else 1
    rank = Rank(index, WORKERS, index if local > 1 else 0, local, host, port, store_is_hosted=True)
    run = _repeat_in_memory if collective in IN_MEMORY else _repeat_over_links
    try:
        run(rank, collective, silent_s)
    except Exception as error:
        _say(worker=index, type=type(error).__name__, text=str(error), at_s=time.monotonic())


def _repeat_over_links(rank: Rank, collective: str, silent_s: float) -> None:
    store = connect(rank, timeout_s=TIMEOUT_S)
    with (
        joined(rank, store, device=torch.device("cpu"), timeout_s=TIMEOUT_S),
        watching(store, rank, timeout_s=TIMEOUT_S, silent_s=silent_s) as watch,
    ):
        _repeat(OVER_LINKS[collective](watch), rank.index)


def _repeat_in_memory(rank: Rank, collective: str, _silent_s: float) -> None:
    store = connect(rank, timeout_s=TIMEOUT_S)
    with join(store, index=rank.index, count=rank.workers, timeout_s=TIMEOUT_S) as group:
        _repeat(partial(IN_MEMORY[collective], group), rank.index)


def _repeat(once: Round, index: int) -> None:
    once()
    _say(worker=index, ready=os.getpid())
    while True:
        once()


def _say(**words: Any) -> None:
    os.write(1, (json.dumps(words) + "\n").encode())  # at once and whole, also from a fork


if __name__ == "__main__":
    serve(int(sys.argv[1]))
