"""A pool of warm worker processes: multi-process tests that pay for torch's import once."""

import multiprocessing
import time
import traceback
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection, wait
from typing import Any

from shoal.comm.rank import Rank

_TIMEOUT_S = 240.0


class RankPool:
    """Runs functions as the workers of a group. The processes stay; each run has a rendezvous store of its own."""

    def __init__(self, *, dying: Collection[int] = ()) -> None:
        """Workers `dying` end in the middle of a run, and give no answer; the others are ended after it."""
        self._members: list[tuple[Any, Connection]] = []
        self._dying = dying

    def run(self, function: Callable[..., Any], *, workers: int, **arguments: Any) -> list[Any]:
        """Return what `function(rank, **arguments)` returns on each of `workers` workers, but for those `dying` of it.

        An exception on one is raised here, with its traceback as text; the pool is then started afresh.
        """
        from shoal.comm.store import host_store

        self._grow(workers)
        store, port = host_store(host="127.0.0.1", timeout_s=_TIMEOUT_S)
        members = self._members[:workers]
        for index, (_, pipe) in enumerate(members):
            rank = Rank(index, workers, index, workers, "127.0.0.1", port, store_is_hosted=True)
            pipe.send((function, rank, arguments))
        try:
            answers = _receive([pipe for index, (_, pipe) in enumerate(members) if index not in self._dying])
        except BaseException:
            self.close()
            raise
        if self._dying:
            self.close()
        del store
        return answers

    def close(self) -> None:
        """End every process of the pool."""
        for process, pipe in self._members:
            pipe.close()
            process.kill()
            process.join(10)
        self._members = []

    def _grow(self, workers: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["shoal.training.worker"])
        while len(self._members) < workers:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._members.append((process, ours))


class WorkerError(Exception):
    """A worker of the pool raised; the message is its traceback."""


def _receive(pipes: list[Connection]) -> list[Any]:
    """Return what each worker answers, in their order. Whoever fails is heard at once: the others may wait for it."""
    answers: dict[Connection, Any] = {}
    until_s = time.monotonic() + _TIMEOUT_S
    while len(answers) < len(pipes):
        ready = wait([pipe for pipe in pipes if pipe not in answers], timeout=max(0.0, until_s - time.monotonic()))
        if not ready:
            raise TimeoutError(f"a worker of the pool has not answered for {_TIMEOUT_S:g} s")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            is_good, answers[pipe] = pipe.recv()
            if not is_good:
                raise WorkerError(answers[pipe])
    return [answers[pipe] for pipe in pipes]


def _serve(pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            function, rank, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(rank, **arguments)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
