"""What a logger does: four verbs, and what it is started with.

TensorBoard writes a file, which costs nothing: worker 0 calls it between two steps. Those that talk to a server are
`is_apart`: a process of their own reads the run's events and calls them (delivery.py), so that no step waits for a
network.

    logger.start(config, kept)              the run begins, or goes on
    logger.scalars(step, time_s, values)    numbers of a step; steps never go back
    logger.flush()                          what was given is where it belongs, or an error says that it is not
    logger.artifact(path, name)             a file of the run
    logger.close(status)                    the run is "done", "failed", "stopped" or "unfinished"

Any of them may raise whatever its library raises: the caller tries again later, from the last `flush`.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from shoal.core.files import write_whole
from shoal.core.run_folder import RunFolder


@dataclass
class Kept:
    """What is kept in the run folder of a logger, so that a run that goes on continues the same curve."""

    id: str = ""
    """What the logger calls the run; empty before it has begun, or while the logger is switched off."""
    where: str = ""
    """Where people look at it: an address, or a folder; empty where the logger is switched off."""
    step: int = 0
    """The last step that it has."""
    is_whole: bool = False
    """Whether it has all that was logged of that step; if not, some may come twice, rather than not at all."""

    @classmethod
    def read(cls, folder: RunFolder, name: str) -> "Kept":
        """Return what is kept of the logger `name`; of one that is new, nothing."""
        try:
            found = json.loads((folder.loggers / f"{name}.json").read_text())
            return cls(str(found["id"]), str(found["where"]), int(found["step"]), bool(found["is_whole"]))
        except (OSError, ValueError, KeyError, TypeError):
            return cls()

    def write(self, folder: RunFolder, name: str) -> None:
        """Keep it."""
        folder.loggers.mkdir(exist_ok=True)
        write_whole(folder.loggers / f"{name}.json", json.dumps(asdict(self)) + "\n")


class Logger(Protocol):
    """See above."""

    is_apart: ClassVar[bool]
    """Whether it may wait for a network, and so must not be called by a worker."""

    def __init__(self, folder: RunFolder) -> None: ...

    @staticmethod
    def check() -> None:
        """Raise ConfigError if it cannot work here: what is not installed, or not set."""

    def start(self, config: Mapping[str, Any], kept: Kept) -> None:
        """Begin, or go on with the run that `kept` names; a new one is noted there."""

    def scalars(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Take numbers that were true after `step`, at `time_s` since 1970."""

    def flush(self) -> None:
        """Return when what was taken is out of this process, or raise."""

    def artifact(self, path: Path, name: str) -> None:
        """Keep the file `path` with the run, as `name`."""

    def close(self, status: str) -> None:
        """End, saying how the run has ended."""
