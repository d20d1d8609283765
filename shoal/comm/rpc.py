"""Calls from worker to worker, on torch's RPC (TensorPipe), over the store that the workers have met at.

On one host nothing listens beyond loopback; of several, each listens on the interface that TP_SOCKET_IFNAME or
GLOO_SOCKET_IFNAME names, else on that of its own name, as Gloo does. What is called and what comes back is pickled, so
all of it comes from the workers of this run. A worker that is gone cannot come back into the group: whoever calls it
gets PeerLost.
"""

import itertools
import os
import pickle
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import rpc

from shoal.comm.rank import Rank
from shoal.core.errors import PeerLost

_SCHEME = "shoal"
_STORES: dict[str, tuple[dist.Store, Rank]] = {}
"""What is handed to torch's RPC by the address of a rendezvous: a store that is there already."""
_NUMBERS = itertools.count()
# What TensorPipe says of a worker that is gone (torch 2.13), and RPC of one that has not answered in time.
_GONE = ("eof: end of file", "connection reset", "connection refused", "broken pipe", "pipe closed", "async error on")
_LATE = ("rpc ran for more than set timeout", "rpcerr: 1", "timed out")


def name_of(worker: int) -> str:
    """Return what torch's RPC calls a worker."""
    return f"worker{worker}"


@contextmanager
def serving(rank: Rank, store: dist.Store, *, timeout_s: float, threads: int) -> Iterator[None]:
    """Call, and be called by, the other workers for the length of a `with` block. Called by every worker.

    At its end a worker serves until all have come there. After an error it leaves at once.
    """
    if rank.local_workers == rank.workers:  # one node: nothing need listen beyond loopback
        os.environ.setdefault("TP_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    elif interface := os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]:
        os.environ.setdefault("TP_SOCKET_IFNAME", interface)
    address = f"{_SCHEME}://run/{next(_NUMBERS)}"
    _STORES[address] = dist.PrefixStore("calls", store), rank
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=threads, rpc_timeout=timeout_s, init_method=address, _transports=["uv"]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what torch calls in its own code (2.13)
        rpc.init_rpc(  # type: ignore[no-untyped-call]
            name_of(rank.index), rank=rank.index, world_size=rank.workers, rpc_backend_options=options
        )
    try:
        yield
    except BaseException:
        rpc.shutdown(graceful=False)
        raise
    else:
        rpc.shutdown(graceful=True)
    finally:
        del _STORES[address]


class Answer:
    """What a call will bring."""

    def __init__(self, future: Any, worker: int, what: str, on_waited: Callable[[float], None]) -> None:
        self._future, self._worker, self._what, self._on_waited = future, worker, what, on_waited

    def is_there(self) -> bool:
        """Return whether it has come."""
        return bool(self._future.done())

    def wait(self) -> Any:
        """Return it once it is there. Raises what the function raised; PeerLost if the worker is gone or too late."""
        begin_s = time.perf_counter()
        try:
            is_good, value, trace = self._future.wait()
        except RuntimeError as error:
            text = str(error).lower()
            if any(words in text for words in _LATE):
                raise PeerLost(f"worker {self._worker} has not answered {self._what}() in time: {error}") from None
            if any(words in text for words in _GONE):
                raise PeerLost(f"worker {self._worker} is gone, and {self._what}() unanswered: {error}") from None
            raise
        finally:
            self._on_waited(time.perf_counter() - begin_s)
        if is_good:
            return value
        value.add_note(f"{self._what}() raised it on worker {self._worker}:\n{trace}")
        raise value


def start_call(
    worker: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    timeout_s: float,
    on_waited: Callable[[float], None],
) -> Answer:
    """Have `worker` call a function that it has under the same name, and return what will be its answer.

    `on_waited` is told how many seconds each wait for it took.
    """
    what = getattr(function, "__qualname__", str(function))
    try:
        future = rpc.rpc_async(name_of(worker), _served, args=(function, args, kwargs), timeout=timeout_s)
    except RuntimeError as error:
        raise PeerLost(f"worker {worker} cannot be reached for {what}(): {error}") from None
    return Answer(future, worker, what, on_waited)


def _served(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any, str]:
    """Call `function`, and return whether that went well, what came of it, and the traceback of an error.

    torch would make a RuntimeError of every error, and print it here as well.
    """
    try:
        return True, function(*args, **kwargs), ""
    except Exception as error:
        trace = traceback.format_exc()
        try:
            pickle.loads(pickle.dumps(error))  # noqa: S301  what was just made here
        except Exception:  # one that cannot travel
            return False, RuntimeError(f"{type(error).__name__}: {error}"), trace
        return False, error, trace


def _rendezvous(url: str, **_: Any) -> Iterator[tuple[dist.Store, int, int]]:
    store, rank = _STORES[url.partition("?")[0]]
    yield store, rank.index, rank.workers


dist.register_rendezvous_handler(_SCHEME, _rendezvous)  # type: ignore[no-untyped-call]
