"""A process that packs groups of slices for another: `python -m shoal.data.pack.worker`, which `pool.py` starts.

It reads pickled frames from its stdin, which only its parent can write: first (source, recipe), then groups, until the
end of the file. It answers on its stdout: ("ready", ""), ("told", (rows, bytes)), ("done", progress),
("failed", error), ("crashed", (message, traceback)). What libraries print goes to stderr.
"""

import os
import pickle
import sys
import traceback
from typing import Any, BinaryIO

from shoal.core.errors import ShoalError, WorkerFailed


def main() -> int:
    """Serve until the parent closes our stdin; return the exit code."""
    parent = os.getppid()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        source, recipe = pickle.load(sys.stdin.buffer)  # noqa: S301  our parent wrote it
    except Exception as error:  # a class that this process does not have: the parent reads by itself then
        _answer(answers, "unreadable", f"{type(error).__name__}: {error}")
        return 0
    buffers = recipe.buffers()
    _answer(answers, "ready", "")
    while True:
        try:
            group = pickle.load(sys.stdin.buffer)  # noqa: S301
        except EOFError:
            return 0
        _serve(answers, group, source=source, recipe=recipe, buffers=buffers, parent=parent)


def _serve(answers: BinaryIO, group: Any, *, source: Any, recipe: Any, buffers: Any, parent: int) -> None:
    from shoal.data.pack.work import write_group

    def tell(rows: int, num_bytes: int) -> None:
        if os.getppid() != parent:
            os._exit(1)  # it was killed: what is not in the journal is written by whoever goes on
        _answer(answers, "told", (rows, num_bytes))

    try:
        _answer(answers, "done", write_group(source, group, recipe, buffers=buffers, tell=tell))
    except ShoalError as error:
        _answer(answers, "failed", error)
    except OSError as error:
        _answer(answers, "failed", OSError(error.errno, error.strerror or str(error), error.filename))
    except Exception as error:
        failed = WorkerFailed(f"{type(error).__name__}: {error}", details=traceback.format_exc())
        _answer(answers, "crashed", (str(failed), failed.details))


def _answer(answers: BinaryIO, kind: str, content: Any) -> None:
    pickle.dump((kind, content), answers)
    answers.flush()


if __name__ == "__main__":
    sys.exit(main())
