"""Bringing what a run says of itself to one logger, from the run folder alone: while it goes, or any time later.

1. Start the logger with the run's settings; it goes on with the run that the folder names, or begins one.
2. Give it each row of numbers (rows.py) once, and keep in the folder up to which step it has them.
3. When the run is over: the rest, its files, and how it ended.
4. Where that fails, as when a server is gone, say so once, keep the rows, and try again: every `AGAIN_S` while the run
   goes. Nothing is lost then: what a logger lacks in the end, `shoal log RUN --to NAME` brings.
"""

import fcntl
import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from shoal.core.errors import ConfigError
from shoal.core.run_folder import RunFolder
from shoal.training.loggers.logger import Kept, Logger
from shoal.training.loggers.registry import LOGGERS, config_of
from shoal.training.loggers.rows import Row, Rows
from shoal.training.loggers.weights import cheap_weights

AGAIN_S = 15.0
_ROWS_AT_ONCE = 100

Say = Callable[[str], object]


def files_of(folder: RunFolder) -> Iterator[Path]:
    """Yield the files of the run that a logger keeps."""
    yield folder.report_html
    yield from sorted(folder.path.glob("*.toml"))
    yield from sorted(folder.code.glob("*.py"))


def lock_of(folder: RunFolder, name: str) -> IO[bytes]:
    """Return a file that is locked as long as it is open: one process at a time brings a run to the logger `name`."""
    folder.loggers.mkdir(exist_ok=True)
    file = (folder.loggers / f"{name}.lock").open("wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ConfigError(f"another process brings {folder.name} to {name} just now") from None
    return file


class Delivery:
    """The delivery of one run to one logger."""

    def __init__(self, folder: RunFolder, name: str, *, say: Say) -> None:
        self._folder, self._name, self._say = folder, name, say
        self.kept = Kept.read(folder, name)
        self._logger: Logger | None = None
        self._rows: Rows | None = None
        self._pending: list[Row] = []
        self._failure = ""
        self._again_s = 0.0
        self._lock: IO[bytes] | None = None

    def advance(self) -> None:
        """Deliver what is new; where that does not work, try again after a while."""
        if time.monotonic() < self._again_s:
            return
        try:
            self._deliver(is_over=False)
        except Exception as error:  # of any kind: it is another's library, and another's server
            self._note(error)
            self._again_s = time.monotonic() + AGAIN_S
        else:
            if self._failure:
                self._say(f"{self._name} answers again, and has all up to step {self.kept.step}.")
            self._failure = ""

    def finish(self) -> bool:
        """Deliver the rest, the files, and how the run ended; return whether all of it is there."""
        status = str(self._folder.read_result()["status"])
        try:
            self._deliver(is_over=True)
            assert self._logger is not None
            self.kept.is_whole = True
            self.kept.write(self._folder, self._name)
            for path in [*files_of(self._folder), *cheap_weights(self._folder)]:
                if path.is_file():
                    self._logger.artifact(path, str(path.relative_to(self._folder.path)))
            self._logger.close(status)
            self.close()
        except Exception as error:
            self._note(error)
            later = shlex.join(["shoal", "log", str(self._folder.path), "--to", self._name])
            self._say(f"{self._name} has the run up to step {self.kept.step}. The rest later: {later}")
            return False
        return True

    def close(self) -> None:
        """Let others bring the run to this logger."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _deliver(self, *, is_over: bool) -> None:
        if self._logger is None:
            self._lock = self._lock or lock_of(self._folder, self._name)
            self.kept = Kept.read(self._folder, self._name)  # as whoever had it before has left it
            logger = LOGGERS[self._name](self._folder)
            config, before = config_of(self._folder), self.kept.id
            logger.start(config, self.kept)
            self.kept.write(self._folder, self._name)
            self._logger = logger
            if self._rows is None or self.kept.id != before:  # the run was deleted there, and begins anew
                self._rows = Rows(
                    self._folder, unit=config["job"]["unit"], after=self.kept.step, is_whole=self.kept.is_whole
                )
                self._pending.clear()
        assert self._rows is not None
        self._pending += self._rows.poll(is_over=is_over)
        while self._pending:
            rows = self._pending[:_ROWS_AT_ONCE]
            for row in rows:
                self._logger.scalars(row.step, row.time_s, row.values)
            self._logger.flush()
            del self._pending[:_ROWS_AT_ONCE]
            self.kept.step, self.kept.is_whole = max(self.kept.step, rows[-1].step), False
            self.kept.write(self._folder, self._name)

    def _note(self, error: Exception) -> None:
        """Say why it does not work, once; the next attempt begins with a new start, for the library may be broken."""
        self._logger = None
        why = (str(error).splitlines() or [""])[0][:300].rstrip(".")
        if not self._failure:
            self._say(f"{self._name} does not take the run's numbers: {type(error).__name__}: {why}. Training goes on.")
        self._failure = why or type(error).__name__
