"""With how many workers a run is to go on: what its launcher is asked while it trains, through the run folder alone.

1. A launcher that can start more workers, or end some, says in launcher.json which process it is, and how many workers
   it has started: those of the plan, and later those that were added.
2. Whoever wants another number of workers writes it to workers.json, whole (`shoal scale`, which checks it first).
3. The launcher looks there once a second. It takes the file away, and does what it says (replacing.py). Of several
   wishes the last counts.
"""

import contextlib
import json
import os
import socket
import time
from dataclasses import asdict, dataclass

from shoal.core.files import write_whole
from shoal.core.run_folder import RunFolder

LOOK_S = 1.0
_MOST_BYTES = 4096


@dataclass(frozen=True)
class Launcher:
    """Who starts the workers of a run, and can start more."""

    host: str
    process: int
    workers: int
    """How many there have been at most: these have an event log."""


def read_launcher(folder: RunFolder) -> Launcher | None:
    """Return who has started the workers of the run in `folder`; None where nobody can start more of them."""
    try:
        fields = json.loads(folder.launcher_json.read_text()[:_MOST_BYTES])
        launcher = Launcher(str(fields["host"]), int(fields["process"]), int(fields["workers"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return launcher


def ask(folder: RunFolder, workers: int) -> None:
    """Ask the launcher of the run in `folder` to go on with so many workers. Raises OSError where that cannot be."""
    write_whole(folder.workers_json, json.dumps({"workers": workers}) + "\n")


class Wishes:
    """The launcher's side: what a run of so many workers is asked to go on with."""

    def __init__(self, folder: RunFolder, workers: int) -> None:
        """Say that this process looks. What was asked before was asked of another."""
        self._folder, self._looked_s = folder, time.monotonic()
        self._launcher = Launcher(socket.gethostname(), os.getpid(), workers)
        with contextlib.suppress(OSError):
            folder.workers_json.unlink(missing_ok=True)
        self._write()

    @property
    def workers(self) -> int:
        """How many workers there have been at most."""
        return self._launcher.workers

    def look(self) -> int | None:
        """Return with how many workers the run is to go on, if somebody has asked for that since; at most 1/s."""
        if time.monotonic() - self._looked_s < LOOK_S:
            return None
        self._looked_s = time.monotonic()
        taken = self._folder.workers_json.with_name(f".{self._folder.workers_json.name}.taken")
        try:
            self._folder.workers_json.replace(taken)  # whoever asks in this moment writes another file
            workers = int(json.loads(taken.read_text()[:_MOST_BYTES])["workers"])
            taken.unlink()
        except (OSError, ValueError, TypeError, KeyError):
            return None
        return workers if workers > 0 else None

    def note(self, workers: int) -> None:
        """Write down that there are so many workers, if there were never as many."""
        if workers > self._launcher.workers:
            self._launcher = Launcher(self._launcher.host, self._launcher.process, workers)
            self._write()

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # a full disk: then nobody can ask, and the run goes on
            write_whole(self._folder.launcher_json, json.dumps(asdict(self._launcher)) + "\n")
