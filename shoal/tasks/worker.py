"""A worker of a pool: a process that stays, loads each function once, and runs the tasks it is sent.

1. The pool starts it with one end of a socket, and a mark: 8 bytes of shared memory.
2. `("load", number, reference, path)` makes a function known; `("run", number, starred, items)` are tasks for one.
3. Before each task the worker writes its position into the mark: if it dies, the pool knows at which task.
4. It answers `(seconds, results, failures)`: results pickled, failures by position, or one of all.
5. It ends when the pool closes the socket, and is killed when the pool's process dies.
"""

import mmap
import os
import pickle
import socket
import sys
import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from shoal.launch.parent import die_with_parent
from shoal.tasks.call import IN_WORKER, load
from shoal.tasks.outcome import Failure, describe
from shoal.tasks.wire import receive, send

MARK_BYTES = 8
_LARGE_S = 1e-3
"""Pickling counts as part of the tasks where all is longer than this: below, it is the same for any number of tasks."""


def main(socket_fd: int, mark_fd: int, parent: int) -> None:
    """Serve the pool, until it closes the socket."""
    die_with_parent(parent)
    os.environ[IN_WORKER] = str(os.getpid())
    mark = memoryview(mmap.mmap(mark_fd, MARK_BYTES)).cast("q")
    with socket.socket(fileno=socket_fd) as end:
        _serve(end, mark)


def _serve(end: socket.socket, mark: "memoryview[int]") -> None:
    functions: dict[int, Callable[..., Any] | Failure] = {}
    while (data := receive(end)) is not None:
        begun_s = time.perf_counter()
        kind, number, *rest = pickle.loads(data)  # noqa: S301  # from our own parent
        if kind == "load":
            functions[number] = _loaded(*rest)
            continue
        run_s, results, failures = _answer(functions[number], mark, *rest)
        sys.stdout.flush()  # what tasks print is seen now, and not lost if the worker is killed later
        all_s = time.perf_counter() - begun_s
        try:
            send(end, (all_s if all_s > _LARGE_S else run_s, results, failures))
        except OSError:  # the pool is gone
            return


def _answer(
    function: Callable[..., Any] | Failure, mark: "memoryview[int]", starred: bool, pickled: bytes
) -> tuple[float, bytes, dict[int, Failure] | Failure]:
    """Return the seconds, the results, pickled, and the failures: by position, or one where no task could begin."""
    if isinstance(function, Failure):
        return 0.0, b"", function
    try:
        items = pickle.loads(pickled)  # noqa: S301  # from our own parent
    except Exception as error:
        return 0.0, b"", describe(error)
    begun_s = time.perf_counter()
    values, failures = run_tasks(function, items, starred=starred, mark=mark)
    return time.perf_counter() - begun_s, _pickled(values, failures), failures


def run_tasks(
    function: Callable[..., Any], items: Sequence[Any], *, starred: bool, mark: "memoryview[int]"
) -> tuple[list[Any], dict[int, Failure]]:
    """Return what `function` made of each item (starred: of its arguments and keywords), and failures by position."""
    values: list[Any] = []
    failures: dict[int, Failure] = {}
    add = values.append
    while len(values) < len(items):
        try:
            if starred:
                for args, kwargs in islice(items, len(values), None):
                    mark[0] = len(values)
                    add(function(*args, **kwargs))
            else:
                for position, item in enumerate(islice(items, len(values), None), len(values)):
                    mark[0] = position
                    add(function(item))
        except (Exception, SystemExit) as error:
            failures[len(values)] = describe(error, skip_frames=1)
            add(None)
    return values, failures


def _pickled(values: list[Any], failures: dict[int, Failure]) -> bytes:
    """Return the values pickled; one that cannot be is a failure of its task."""
    try:
        return pickle.dumps(values, pickle.HIGHEST_PROTOCOL)
    except Exception:
        for position, value in enumerate(values):
            try:
                pickle.dumps(value)
            except Exception as error:
                failures[position] = describe(error)
                values[position] = None
        return pickle.dumps(values, pickle.HIGHEST_PROTOCOL)


def _loaded(reference: Any, path: Sequence[str]) -> Callable[..., Any] | Failure:
    sys.path.extend(entry for entry in path if entry not in sys.path)
    try:
        return load(reference) if not callable(reference) else reference()
    except (Exception, SystemExit) as error:
        return describe(error, skip_frames=1)


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
