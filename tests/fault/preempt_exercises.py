"""Workers that are asked to stop: functions for the pool, and a program for launchers."""

import itertools
import os
import signal
import sys
from contextlib import ExitStack

import torch
from torch.distributed import PrefixStore

from shoal.comm.group import all_reduce_sum, joined
from shoal.comm.rank import Rank, read_rank
from shoal.comm.store import connect
from shoal.core.errors import Stopped
from shoal.fault import inject, preempt
from shoal.fault.preempt import Preemption, preemptible

CPU = torch.device("cpu")


def stop_many_times(rank: Rank, *, requests: list[list[int]], look_s: float) -> list[tuple[int, str]]:
    """Train again and again until asked to stop; return after which step, and why, each time.

    In round r each worker of requests[r] signals itself in its step 3, 4, ...: at another moment than the others.
    """
    preempt.LOOK_S = look_s
    store = connect(rank, timeout_s=60)
    ended = []
    with joined(rank, store, device=CPU, timeout_s=60):
        for number, asked in enumerate(requests):
            preemption = Preemption(notice_s=60)
            preemption.meet(PrefixStore(str(number), store), index=rank.index, workers=rank.workers)
            at = 3 + asked.index(rank.index) if rank.index in asked else None
            try:
                ended.append(_train_until_asked(preemption, at))
            finally:
                preemption.close()
    return ended


def _train_until_asked(preemption: Preemption, at: int | None) -> tuple[int, str]:
    for step in itertools.count(1):
        if step == at:
            os.kill(os.getpid(), signal.SIGUSR1)
        exchange()
        reason = preemption.requested(step)
        if reason is not None:
            return step, str(reason)
    raise AssertionError


def exchange() -> None:
    """What makes a step one: nobody ends it before all have begun it."""
    all_reduce_sum(torch.ones(1)).wait()


def tell(line: str) -> None:
    """Print `line` by one write: workers of torchrun share their output, and print() may write the newline apart."""
    os.write(1, f"{line}\n".encode())


def main() -> int:
    """Be a worker that trains until it is asked to stop, and tells what it does."""
    rank = read_rank()
    assert rank is not None
    inject.begin(rank.index)
    store = connect(rank, timeout_s=60)
    try:
        with ExitStack() as stack:
            stack.enter_context(joined(rank, store, device=CPU, timeout_s=60))
            preemption = stack.enter_context(preemptible(last_saved=lambda: 2))
            preemption.meet(store, index=rank.index, workers=rank.workers)
            for step in itertools.count(1):
                inject.at("step begins", step)
                exchange()
                if step == 3:
                    tell(f"up {os.getpid()}")
                reason = preemption.requested(step)
                if reason is not None:
                    preemption.stop(reason, step, lambda step=step: tell(f"saved {step}"))  # type: ignore[misc]
    except Stopped as error:
        tell(str(error))
        return error.exit_code
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
