"""Processes that pack groups of slices, each the next that nobody has taken.

They are started as commands, not forked: a fork of a process with threads may hang, and a spawned copy of the caller's
script would run it again. A source that cannot be sent to them is packed here.
"""

import contextlib
import io
import os
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

from shoal.core.errors import DataError, WorkerFailed
from shoal.data.pack.journal import Progress
from shoal.data.pack.progress import Tell
from shoal.data.pack.work import Group, Recipe

_END_S = 10.0
_SILENCE_S = 3600.0
_MOST_BYTES = 64 << 20
"""Of a pickled source: a path is small, and samples in memory are packed faster where they are."""


class Unreadable(Exception):
    """The source cannot be sent to another process."""


def write_groups(
    source: Any, groups: Sequence[Group], recipe: Recipe, *, workers: int, lock: int, tell: Tell
) -> list[Progress]:
    """Return what the journal says of each group, in order, when all are packed. The first failure ends all.

    `lock` is the descriptor of the unfinished folder's lock: the processes hold it, too.
    """
    start = _pickled((source, recipe))
    processes = [_start(lock) for _ in range(workers)]
    answers: queue.Queue[tuple[int, str, Any]] = queue.Queue()
    listeners = [
        threading.Thread(target=_listen, args=(number, process, answers), daemon=True)
        for number, process in enumerate(processes)
    ]
    try:
        for process, listener in zip(processes, listeners, strict=True):
            _send(process, start)
            listener.start()
        return _serve(processes, list(groups), answers, tell)
    finally:
        _end(processes, listeners)


class _Letter(io.BytesIO):
    """What is sent to a process, of no more than _MOST_BYTES."""

    def write(self, content: Any, /) -> int:
        if self.tell() + len(content) > _MOST_BYTES:
            raise Unreadable("it holds its samples in memory")
        return super().write(content)


def _pickled(content: Any) -> bytes:
    letter = _Letter()
    try:
        pickle.dump(content, letter)
    except Unreadable:
        raise
    except Exception as error:  # whatever the source's own objects raise
        raise Unreadable(f"{type(error).__name__}: {error}") from None
    return letter.getvalue()


def _serve(
    processes: list[subprocess.Popen[bytes]],
    groups: list[Group],
    answers: "queue.Queue[tuple[int, str, Any]]",
    tell: Tell,
) -> list[Progress]:
    waiting = list(reversed(groups))
    busy: dict[int, int] = {}
    finished: dict[int, Progress] = {}
    failures: dict[int, Exception] = {}
    while len(finished) < len(groups):
        number, kind, content = _next(answers)
        if kind == "told":
            tell(*content)
            continue
        if kind == "unreadable":
            raise Unreadable(content)
        group = busy.pop(number, -1)
        if kind == "done":
            finished[group] = content
        elif kind != "ready":
            failures[group] = content if kind == "failed" else WorkerFailed(*content)
        if failures:  # of several, the one that a single process would have come upon
            first = min(failures)
            if not any(other < first for other in busy.values()):
                raise failures[first]
        elif waiting:
            busy[number] = waiting[-1].number
            _send(processes[number], pickle.dumps(waiting.pop()))
    return [finished[group.number] for group in groups]


def _next(answers: "queue.Queue[tuple[int, str, Any]]") -> tuple[int, str, Any]:
    try:
        return answers.get(timeout=_SILENCE_S)  # a process that dies says so at once: its pipe ends
    except queue.Empty:
        raise DataError(f"the source has given nothing for {_SILENCE_S / 60:.0f} minutes.") from None


def _start(lock: int) -> subprocess.Popen[bytes]:
    # Modules that the source needs may lie where the caller's script does.
    path = os.pathsep.join(folder for folder in sys.path if folder)
    threads = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return subprocess.Popen(
        [sys.executable, "-m", "shoal.data.pack.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[lock],
        env={**os.environ, **threads, "PYTHONPATH": path},
    )


def _send(process: subprocess.Popen[bytes], content: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has died: its listener says so
        process.stdin.write(content)
        process.stdin.flush()


def _listen(number: int, process: subprocess.Popen[bytes], answers: "queue.Queue[tuple[int, str, Any]]") -> None:
    assert process.stdout is not None
    while True:
        try:
            kind, content = pickle.load(process.stdout)  # noqa: S301  our own child wrote it
        except (EOFError, OSError, ValueError, pickle.UnpicklingError):
            code = process.wait(timeout=_END_S)
            how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            answers.put((number, "crashed", (f"a process that packs {how} before it was done.", "")))
            return
        answers.put((number, kind, content))


def _end(processes: list[subprocess.Popen[bytes]], listeners: list[threading.Thread]) -> None:
    """End them all: what they have not finished is not in the journal."""
    for process in processes:
        process.kill()
    for process, listener in zip(processes, listeners, strict=True):
        process.wait(timeout=_END_S)
        if listener.ident is not None:
            listener.join(timeout=_END_S)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
