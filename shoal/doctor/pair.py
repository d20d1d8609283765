"""Two processes that sum as two workers of a run do; what they find is printed, one JSON object a line.

`python -m shoal.doctor.pair`, in a process of its own: a torch that crashes, or a sum that hangs, is then found, too.

1. torch is imported: its versions, and how long that took.
2. This process forks another, as a run forks its workers, and both sum over Gloo on loopback.
3. Each GPU multiplies; with two or more, the processes sum over NCCL.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

SUM_S = 15.0
"""How long the two wait for each other."""
_SIZE = 1000


def main() -> int:
    """Print each stage's line; the second process prints none."""
    begin_s = time.perf_counter()
    import torch
    import torch.distributed as dist

    _say("torch", **_versions(torch, dist), import_s=time.perf_counter() - begin_s)
    if not dist.is_available():
        return 0
    import shoal.comm.group  # noqa: F401  # before the fork: once for both

    read, write = os.pipe()
    other = os.fork()
    if other == 0:
        code = 1
        try:
            os.close(write)  # or its end would not be seen
            _second(read)
            code = 0
        finally:
            os._exit(code)  # an error was seen by the first, which waits in vain
    os.close(read)
    try:
        _first(write)
    finally:
        _end(other)
    return 0


def _first(write: int) -> None:
    from shoal.comm.store import LOOPBACK, host_store

    begin_s = time.perf_counter()
    store, port = host_store(host=LOOPBACK, timeout_s=SUM_S)
    os.write(write, f"{port}\n".encode())
    _stage("sum", lambda: {"sum": _sum(0, port, store, "cpu"), "seconds": time.perf_counter() - begin_s})
    count = _stage("gpus", _gpus).get("count", 0)
    if count >= 2:
        os.write(write, b"gpus\n")
        _stage("nccl", lambda: {"sum": _sum(0, port, store, "cuda")})
    os.close(write)


def _second(read: int) -> None:
    """Sum with the first for as long as it asks to."""
    with os.fdopen(read) as asked:
        port = int(asked.readline())
        _sum(1, port, None, "cpu")
        if asked.readline():
            _sum(1, port, None, "cuda")


def _sum(index: int, port: int, store: Any, device: str) -> float:
    """Return the sum of 1 and 2, of which each process has one. Called by both."""
    import torch
    import torch.distributed as dist

    from shoal.comm.group import all_reduce_sum, joined
    from shoal.comm.rank import Rank
    from shoal.comm.store import LOOPBACK, connect

    rank = Rank(index, 2, index, 2, LOOPBACK, port, store_is_hosted=True)
    meeting = dist.PrefixStore(device, store if store is not None else connect(rank, timeout_s=SUM_S))
    where = torch.device(device, index) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(where)
    with joined(rank, meeting, device=where, timeout_s=SUM_S):
        tensor = torch.full((_SIZE,), float(index + 1), device=where)
        all_reduce_sum(tensor).wait()
        return float(tensor.mean())


def _gpus() -> dict[str, Any]:
    """Return the GPUs, and whether each of them multiplies."""
    import torch

    names = []
    for number in range(torch.cuda.device_count()):
        ones = torch.ones(64, 64, device=torch.device("cuda", number))
        assert float((ones @ ones)[0, 0]) == 64.0, f"GPU {number} multiplies wrongly"
        properties = torch.cuda.get_device_properties(number)
        names.append((properties.name, properties.total_memory))
    return {"count": len(names), "names": names, "is_available": torch.cuda.is_available()}


def _versions(torch: Any, dist: Any) -> dict[str, Any]:
    has_nccl = dist.is_available() and dist.is_nccl_available()
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda or "",
        "hip": getattr(torch.version, "hip", None) or "",
        "has_gloo": dist.is_available() and dist.is_gloo_available(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl and torch.version.cuda else "",
    }


def _stage(name: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Do a stage's work, and print what came of it."""
    try:
        found = work()
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    _say(name, **found)
    return found


def _say(stage: str, **found: Any) -> None:
    print(json.dumps({"stage": stage, **found}), flush=True)


def _end(process: int) -> None:
    """Wait for the second process, and kill it when that takes too long."""
    until_s = time.monotonic() + SUM_S
    while time.monotonic() < until_s:
        if os.waitpid(process, os.WNOHANG)[0]:
            return
        time.sleep(0.01)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)


if __name__ == "__main__":
    sys.exit(main())
