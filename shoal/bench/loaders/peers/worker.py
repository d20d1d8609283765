"""One loader in one process, told by lines on stdin what to do. Run by path, by a Python that need not have shoal.

    python worker.py look PEER             print {"version"} or {"missing"}
    python worker.py write PEER TASK ...   write the peer's own format; print {"samples", "seconds"}
    python worker.py read PEER TASK ...    open it, take the first batch, print {"first_batch_s", ...}; then, for every
                                           line "WARM SECONDS" on stdin: load for WARM seconds, then measure, and print
                                           {"samples", "seconds"}. It ends when stdin does.

What libraries print goes to stderr; stdout is for these answers only.
"""

import ctypes
import importlib
import importlib.util
import json
import os
import queue
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

FOLDER = Path(__file__).resolve().parent
_LEAST_BATCHES = 3
_PR_SET_PDEATHSIG = 1  # prctl(2)


def stand_alone() -> None:
    """Let this Python import the peers by their full names without running shoal's own __init__."""
    folder = FOLDER
    for name in ("shoal.bench.loaders.peers", "shoal.bench.loaders", "shoal.bench", "shoal"):
        module = types.ModuleType(name)
        module.__path__ = [str(folder)]
        sys.modules[name] = module
        folder = folder.parent


def look(peer: Any) -> dict[str, Any]:
    """Return the version of what the peer needs, or what is missing."""
    for module in peer.MODULES:
        try:
            is_there = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:  # what comes before the dot
            is_there = False
        if not is_there:
            return {"missing": module}
    try:
        return {"version": metadata.version(peer.PACKAGE)}
    except metadata.PackageNotFoundError:
        return {"version": ""}


def write(peer: Any, task: Any, sample: Any, folder: Path) -> dict[str, Any]:
    """Write the peer's format; return how many samples there are and what it took."""
    begin_s = time.perf_counter()
    samples = peer.write(sample, folder, task)
    return {"samples": samples, "seconds": time.perf_counter() - begin_s}


def read(peer: Any, task: Any, sample: Any, folder: Path, say: Callable[[dict[str, Any]], None]) -> None:
    """Answer every line of stdin with a measured turn."""
    begin_s = time.perf_counter()
    batches = _endless(peer.open_batches(folder, task, sample))
    first = next(batches)
    first_s = time.perf_counter() - begin_s
    if wrong := task.wrong(first):
        raise SystemExit(f"{peer.NAME}: {wrong}.")
    del first
    say({"first_batch_s": first_s, "how": peer.how(task)})
    for line in _lines(getattr(peer, "close", lambda: None)):
        warm_s, seconds = map(float, line.split())
        _load(batches, warm_s)
        samples, took_s = _load(batches, seconds)
        say({"samples": samples, "seconds": took_s})


def _endless(epoch: Callable[[], Any]) -> Iterator[Any]:
    while True:
        num_batches = 0
        for batch in epoch():
            num_batches += 1
            yield batch
        if num_batches == 0:
            raise SystemExit("an epoch has no batch: give more data, or a smaller --batch-size.")


def _load(batches: Iterator[Any], seconds: float) -> tuple[int, float]:
    """Return how many samples came in about so many seconds, and how long it was."""
    samples, count, begin_s = 0, 0, time.perf_counter()
    while (took_s := time.perf_counter() - begin_s) < seconds or count < _LEAST_BATCHES:
        samples += len(next(batches))
        count += 1
    return samples, took_s


def _lines(close: Callable[[], None]) -> Iterator[str]:
    """Yield the lines of stdin; when it ends, this process does, whatever it was doing."""
    arrived: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            arrived.put(line)
        close()
        os._exit(0)  # without waiting for threads and worker processes of the peer: their pipes close with ours

    threading.Thread(target=listen, daemon=True).start()
    while True:
        yield arrived.get()


def _answers() -> TextIO:
    """Return the stdout that is ours alone; what others print goes to stderr from now on."""
    ours = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return ours


def die_with_parent() -> None:
    """Ask the kernel to kill this process with its parent: one that is stopped (SIGSTOP) would wait for ever.

    Its children, stopped as well, then belong to nobody, and the kernel sends SIGHUP to such.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main(what: str, name: str, text: str = "{}", sample_folder: str = "", folder: str = "") -> None:
    """Do what the command line says."""
    answers = _answers()

    def say(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    peer = importlib.import_module(f"shoal.bench.loaders.peers.{name}")
    if what == "look":
        return say(look(peer))
    from shoal.bench.loaders.peers.sample import Sample
    from shoal.bench.loaders.peers.task import Task

    more = getattr(peer, "WRITE_MODULES", ()) if what == "write" else ()
    for module in (*peer.MODULES, *more):
        importlib.import_module(module)  # the first batch is counted from the opening, not from the import
    task = Task(**json.loads(text))
    sample = Sample(Path(sample_folder), kind=task.kind, window=task.window)
    if what == "write":
        return say(write(peer, task, sample, Path(folder)))
    return read(peer, task, sample, Path(folder), say)


if __name__ == "__main__":
    die_with_parent()
    sys.path.pop(0)  # this folder: its names are not meant for the libraries
    if sys.argv[2] not in ("shoal_loader", "c_gather"):
        stand_alone()
    main(*sys.argv[1:])
